//! Values of options: each error says what is allowed.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// Reads a whole number.
///
/// # Errors
///
/// What is allowed.
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
/// What is allowed. Whether the amount is one that a node or a worker can have is not looked at.
pub fn amount(text: &str) -> Result<f64, String> {
    text.parse()
        .map_err(|_| "expected a number, such as 2 or 0.5".to_owned())
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
/// What is allowed.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "expected an IP address and a port, such as 10.0.0.1:7700 or [fd00::1]:7700".to_owned()
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
        assert_eq!((amount("0.5"), port("7700")), (Ok(0.5), Ok(7700)));
        assert_eq!(address("[::]:0"), Ok("[::]:0".parse().unwrap()));
        for error in [
            amount("two").unwrap_err(),
            port("0").unwrap_err(),
            port("65536").unwrap_err(),
            address("localhost:1").unwrap_err(),
            address("10.0.0.1").unwrap_err(),
        ] {
            assert!(error.starts_with("expected "), "{error}");
        }
    }
}
