//! Addresses of names.

use std::io;
use std::net::SocketAddr;

/// The addresses of `HOST:PORT`, those of IPv4 first, and each once: a head that listens on `0.0.0.0` or `127.0.0.1` is
/// also `localhost` where that is `::1` before `127.0.0.1`. One at least.
///
/// Takes as long as the name server does.
///
/// # Errors
///
/// Those of the name server; `NotFound` if the name has no address.
pub async fn resolve(name: &str) -> io::Result<Vec<SocketAddr>> {
    let addresses = in_order(tokio::net::lookup_host(name).await?);
    if addresses.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "the name has no address",
        ));
    }
    Ok(addresses)
}

fn in_order(found: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in found {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    // The order of the name server stays among those of one family.
    addresses.sort_by_key(SocketAddr::is_ipv6);
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_4_is_tried_first_and_nothing_twice() {
        let given = [
            "[::1]:7",
            "10.0.0.2:7",
            "127.0.0.1:7",
            "[::1]:7",
            "10.0.0.2:7",
        ];
        let found = in_order(given.iter().map(|text| text.parse().unwrap()));
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.0.0.2:7", "127.0.0.1:7", "[::1]:7"]);
    }

    #[tokio::test]
    async fn an_address_is_its_own() {
        assert_eq!(
            resolve("[::1]:70").await.unwrap(),
            ["[::1]:70".parse().unwrap()]
        );
        assert!(resolve("no port").await.is_err());
    }
}
