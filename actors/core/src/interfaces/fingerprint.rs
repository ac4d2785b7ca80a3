//! Which interfaces a node had, in 32 bytes.

use std::fmt;

use kolo_wire::{Interface, NodeNetwork};

/// BLAKE3 of a [`NodeNetwork`]: it changes when anything in it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NetworkFingerprint(pub [u8; 32]);

impl NetworkFingerprint {
    /// The fingerprint of `network`. The order of interfaces and addresses does not matter.
    #[must_use]
    pub fn of(network: &NodeNetwork) -> Self {
        let mut interfaces: Vec<&Interface> = network.interfaces.iter().collect();
        interfaces.sort_unstable();
        let mut hasher = blake3::Hasher::new();
        // Each part ends with what none can contain, so that no two lists give the same text.
        let mut add = |part: &dyn fmt::Display| {
            hasher.update(part.to_string().as_bytes());
            hasher.update(b"\0");
        };
        add(&network.listen);
        add(&network.host);
        for interface in interfaces {
            add(&interface.name);
            add(&interface.up);
            add(&interface.loopback);
            add(&interface.mtu);
            add(&interface.speed.unwrap_or(0));
            let mut addresses = interface.addresses.clone();
            addresses.sort_unstable();
            for address in addresses {
                add(&address.ip);
                add(&address.prefix);
            }
            add(&"");
        }
        Self(*hasher.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use kolo_wire::InterfaceAddress;

    use super::*;

    fn interface(name: &str, addresses: &[&str]) -> Interface {
        Interface {
            name: name.to_owned(),
            up: true,
            loopback: false,
            mtu: 1500,
            speed: None,
            addresses: addresses
                .iter()
                .map(|ip| InterfaceAddress {
                    ip: ip.parse().unwrap(),
                    prefix: 24,
                })
                .collect(),
        }
    }

    fn of(listen: &str, interfaces: Vec<Interface>) -> NetworkFingerprint {
        NetworkFingerprint::of(&NodeNetwork {
            listen: listen.parse().unwrap(),
            host: "h".to_owned(),
            interfaces,
        })
    }

    #[test]
    fn a_fingerprint_is_of_the_content_and_not_of_its_order() {
        let (a, b) = (
            interface("a", &["10.0.0.1", "10.0.0.2"]),
            interface("b", &["10.0.1.1"]),
        );
        let one = of("[::]:7", vec![a.clone(), b.clone()]);
        let mut turned = a.clone();
        turned.addresses.reverse();
        assert_eq!(of("[::]:7", vec![b.clone(), turned]), one);

        let mut others = vec![
            of("[::]:8", vec![a.clone(), b.clone()]),
            of("[::]:7", vec![a.clone()]),
            // The same words, divided otherwise.
            of(
                "[::]:7",
                vec![
                    interface("a", &["10.0.0.1"]),
                    interface("b", &["10.0.0.2", "10.0.1.1"]),
                ],
            ),
        ];
        for change in [
            |i: &mut Interface| i.up = false,
            |i: &mut Interface| i.mtu = 9000,
            |i: &mut Interface| i.speed = Some(10_000),
            |i: &mut Interface| i.name.push('0'),
            |i: &mut Interface| i.loopback = true,
            |i: &mut Interface| i.addresses[0].prefix = 25,
        ] {
            let mut changed = b.clone();
            change(&mut changed);
            others.push(of("[::]:7", vec![a.clone(), changed]));
        }
        for other in others {
            assert_ne!(other, one, "{other:?}");
        }
    }
}
