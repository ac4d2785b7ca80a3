//! How the API says no.

use std::fmt;
use std::time::Duration;

use actix_web::http::{StatusCode, header};
use actix_web::{HttpResponse, ResponseError};
use kolo_transport::wire::{Refusal, RefusalKind};

use super::dto::{ErrorBody, ErrorDetail};

/// A refusal with its status code; answered as `{"error": {"kind": .., "message": ..}}`.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// For a wrong method: the right ones.
    allow: Option<&'static str>,
    /// For who comes too often: when to come again.
    again_in: Option<Duration>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
            allow: None,
            again_in: None,
        }
    }

    pub(super) fn too_many(message: impl Into<String>, again_in: Duration) -> Self {
        Self {
            again_in: Some(again_in),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "busy", message)
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid", message)
    }

    pub(super) fn unauthenticated(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthenticated", message)
    }

    pub(super) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", message)
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub(super) fn late(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message)
    }

    pub(super) fn method(allow: &'static str) -> Self {
        Self {
            allow: Some(allow),
            ..Self::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                format!("this path takes {allow} only"),
            )
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.status
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status);
        if self.status == StatusCode::UNAUTHORIZED {
            response.insert_header((header::WWW_AUTHENTICATE, "Bearer realm=\"kolo\""));
        }
        if let Some(allow) = self.allow {
            response.insert_header((header::ALLOW, allow));
        }
        if let Some(again_in) = self.again_in {
            response.insert_header((header::RETRY_AFTER, again_in.as_secs() + 1));
        }
        response.json(ErrorBody {
            error: ErrorDetail {
                kind: self.kind.to_owned(),
                message: self.message.clone(),
            },
        })
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let (status, kind) = match refusal.kind {
            RefusalKind::Invalid | RefusalKind::UnknownRequest => {
                (StatusCode::BAD_REQUEST, "invalid")
            }
            RefusalKind::Token => (StatusCode::UNAUTHORIZED, "unauthenticated"),
            RefusalKind::Forbidden => (StatusCode::FORBIDDEN, "forbidden"),
            RefusalKind::NotFound => (StatusCode::NOT_FOUND, "not_found"),
            RefusalKind::Stale => (StatusCode::CONFLICT, "stale"),
            RefusalKind::Unplaceable => (StatusCode::CONFLICT, "unplaceable"),
            RefusalKind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "too_large"),
            RefusalKind::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
            RefusalKind::Stopped => (StatusCode::SERVICE_UNAVAILABLE, "stopped"),
            RefusalKind::Timeout => (StatusCode::GATEWAY_TIMEOUT, "timeout"),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        };
        Self::new(status, kind, refusal.message)
    }
}
