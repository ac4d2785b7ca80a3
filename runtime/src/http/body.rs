//! Request bodies, limited in size and time.

use std::time::Duration;

use actix_web::http::header;
use actix_web::{HttpRequest, web};
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::time::{Instant, timeout_at};

/// The slowest sender that is waited for, in bytes per second, on top of the fixed time.
const SLOWEST: u64 = 1 << 20;

/// How much is set aside on the word of a header.
const FIRST: usize = 64 << 10;

/// Why there is no body.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error("the body has {given} bytes or more; allowed are up to {limit}")]
    TooLong { given: u64, limit: usize },
    #[error("the body did not come within {seconds:.1} seconds: there were {got} bytes of it")]
    Late { seconds: f64, got: usize },
    #[error("the body can't be read: {0}")]
    Broken(String),
}

/// The value of `Content-Length`. The HTTP parser has refused what is no number already.
pub(super) fn declared_length(request: &HttpRequest) -> Option<u64> {
    request
        .headers()
        .get(header::CONTENT_LENGTH)?
        .to_str()
        .ok()?
        .parse()
        .ok()
}

/// Reads a body of up to `limit` bytes. It must be complete after `patience`, and a second more for each MiB. It takes no more
/// memory than it is long: some are kept, and are counted by their length.
pub(super) async fn read(
    mut payload: web::Payload,
    declared: Option<u64>,
    limit: usize,
    patience: Duration,
) -> Result<Bytes, BodyError> {
    let too_long = |given: u64| BodyError::TooLong { given, limit };
    let expected = declared.unwrap_or(limit as u64);
    if expected > limit as u64 {
        return Err(too_long(expected));
    }
    let patience = patience + Duration::from_millis(expected.saturating_mul(1000) / SLOWEST);
    let deadline = Instant::now() + patience;
    let first = usize::try_from(declared.unwrap_or(0)).map_or(FIRST, |length| length.min(FIRST));
    let mut body = Vec::<u8>::with_capacity(first);
    loop {
        match timeout_at(deadline, payload.next()).await {
            Ok(None) => return Ok(body.into_boxed_slice().into()),
            Ok(Some(Ok(piece))) => {
                if body.len() + piece.len() > limit {
                    return Err(too_long((body.len() + piece.len()) as u64));
                }
                body.extend_from_slice(&piece);
            }
            Ok(Some(Err(error))) => return Err(BodyError::Broken(error.to_string())),
            Err(_) => {
                return Err(BodyError::Late {
                    seconds: patience.as_secs_f64(),
                    got: body.len(),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use actix_web::FromRequest;
    use actix_web::test::TestRequest;

    use super::*;

    #[tokio::test]
    async fn a_body_takes_no_more_memory_than_it_is_long() {
        let length = FIRST + FIRST / 2;
        for declared in [None, Some(length as u64)] {
            let (request, mut payload) = TestRequest::default()
                .set_payload(vec![b'x'; length])
                .to_http_parts();
            let payload = web::Payload::from_request(&request, &mut payload)
                .await
                .unwrap();
            let limit = 2 * length;
            let body = read(payload, declared, limit, Duration::from_secs(60)).await;
            // Nobody else has it, so this is its own memory.
            let memory = body.unwrap().try_into_mut().unwrap();
            assert_eq!((memory.len(), memory.capacity()), (length, length));
        }
    }
}
