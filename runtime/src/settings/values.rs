//! Values of options: each error says what is allowed.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use kolo_transport::wire::Milli;
use kolo_transport::wire::span::{Span, duration};

/// Reads a whole number.
///
/// # Errors
///
/// The text is another one: the error says which values are allowed.
pub fn number(text: &str) -> Result<u32, String> {
    number_within(text, 0..=u32::MAX)
}

/// Reads a whole number that has limits.
pub(crate) fn number_within(text: &str, limits: RangeInclusive<u32>) -> Result<u32, String> {
    let given = text.parse().ok();
    given
        .filter(|number| limits.contains(number))
        .ok_or_else(|| {
            let (least, most) = limits.into_inner();
            format!("expected a whole number from {least} to {most}, such as 4")
        })
}

/// Reads an amount of a resource, which need not be whole.
///
/// # Errors
///
/// The text is another one: the error says which values are allowed.
pub fn amount(text: &str) -> Result<Milli, String> {
    let given = text.parse().ok();
    given
        .and_then(|number| Milli::from_f64("", number).ok())
        .ok_or_else(|| {
            "expected a number from 0 to 1000000 with at most 3 decimals, such as 2 or 0.5"
                .to_owned()
        })
}

/// Reads a duration that has limits.
pub(crate) fn time_within(
    text: &str,
    limits: RangeInclusive<Duration>,
) -> Result<Duration, String> {
    let given = duration(text)?;
    if limits.contains(&given) {
        return Ok(given);
    }
    Err(format!(
        "{} is out of range; allowed is {} to {}",
        Span(given),
        Span(*limits.start()),
        Span(*limits.end())
    ))
}

/// Reads how long a token is valid: a second to 366 days.
///
/// # Errors
///
/// The text is another one: the error says which values are allowed.
pub fn token_life(text: &str) -> Result<Duration, String> {
    time_within(
        text,
        Duration::from_secs(1)..=Duration::from_secs(366 * 86_400),
    )
}

/// Reads a port, which is not 0.
pub(crate) fn port(text: &str) -> Result<u16, String> {
    let given = text.parse().ok().filter(|port| *port > 0);
    given.ok_or_else(|| "expected a port from 1 to 65535".to_owned())
}

/// Reads an IP address with a port.
///
/// # Errors
///
/// The text is another one: the error says which values are allowed.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "expected an IP address and a port, such as 10.0.0.1:7700 or [fd00::1]:7700".to_owned()
    })
}

/// Reads the name or the address of a host, with a port.
///
/// # Errors
///
/// The text is another one: the error says which values are allowed.
pub fn host_and_port(text: &str) -> Result<String, String> {
    let parts = text.rsplit_once(':');
    parts
        .filter(|(host, port_of)| !host.is_empty() && port(port_of).is_ok())
        .map(|_| text.to_owned())
        .ok_or_else(|| {
            "expected a host and a port, such as 10.0.0.1:7700 or head.example:7700".to_owned()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_is_allowed() {
        assert_eq!((number("0"), number_within("7", 1..=7)), (Ok(0), Ok(7)));
        for bad in ["abc", "-1", "1.5", "", "4294967296"] {
            assert!(number(bad).unwrap_err().contains("from 0 to"), "{bad}");
        }
        for bad in ["0", "8"] {
            let error = number_within(bad, 1..=7).unwrap_err();
            assert!(error.contains("from 1 to 7"), "{error}");
        }
        assert_eq!((amount("0.5"), port("7700")), (Ok(Milli(500)), Ok(7700)));
        assert_eq!(address("[::]:0"), Ok("[::]:0".parse().unwrap()));
        for bad in ["two", "nan", "inf", "-1", "0.0001", "1e9"] {
            assert!(amount(bad).unwrap_err().contains("from 0 to"), "{bad}");
        }
        for bad in ["0s", "367d"] {
            let error = token_life(bad).unwrap_err();
            assert!(error.ends_with("allowed is 1s to 366d"), "{error}");
        }
        for good in ["head:7700", "10.0.0.1:7700", "[fd00::1]:7700"] {
            assert_eq!(host_and_port(good), Ok(good.to_owned()));
        }
        for bad in [
            "",
            "head",
            ":7700",
            "head:",
            "head:0",
            "head:99999",
            "head:x",
        ] {
            let error = host_and_port(bad).unwrap_err();
            assert!(error.starts_with("expected "), "{error}");
        }
        for error in [
            port("0").unwrap_err(),
            port("65536").unwrap_err(),
            address("localhost:1").unwrap_err(),
            address("10.0.0.1").unwrap_err(),
        ] {
            assert!(error.starts_with("expected "), "{error}");
        }
    }
}
