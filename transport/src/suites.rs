//! The cipher suites of TLS 1.3, each from the library that is faster with it on this processor.
//!
//! AES-GCM is most of what a link between hosts costs beside the kernel's copies. AWS-LC has code for AES in registers of 64
//! bytes (AVX-512) and of 16, none for those of 32 (<https://github.com/aws/aws-lc/issues/2283>); *ring* has that. Processors
//! with the one and without the other are AMD's Zen 3 and Intel's for desktops: there *ring* takes 0.55 to 0.65 of the time,
//! for records and for packets (`docs/performance.md`). A peer can't tell the difference.

use rustls::SupportedCipherSuite;
use rustls::crypto::{aws_lc_rs, ring};

/// A library that can seal and open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Library {
    AwsLc,
    Ring,
}

/// What a processor has for AES.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Aes {
    /// Both halves of GCM for several blocks at once, in registers of 32 bytes.
    wide: bool,
    /// The parts of AVX-512 with which AWS-LC does that in registers of 64 bytes.
    avx512: bool,
}

impl Aes {
    fn of_this_processor() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            Self {
                wide: is_x86_feature_detected!("vaes")
                    && is_x86_feature_detected!("vpclmulqdq")
                    && is_x86_feature_detected!("avx2"),
                avx512: is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            Self {
                wide: false,
                avx512: false,
            }
        }
    }

    fn library(self) -> Library {
        if self.wide && !self.avx512 {
            Library::Ring
        } else {
            Library::AwsLc
        }
    }
}

/// All suites, the one that costs the least per packet first.
pub(crate) fn suites() -> Vec<SupportedCipherSuite> {
    from(Aes::of_this_processor().library())
}

fn from(library: Library) -> Vec<SupportedCipherSuite> {
    match library {
        Library::AwsLc => {
            use aws_lc_rs::cipher_suite as suite;
            vec![
                suite::TLS13_AES_128_GCM_SHA256,
                suite::TLS13_AES_256_GCM_SHA384,
                suite::TLS13_CHACHA20_POLY1305_SHA256,
            ]
        }
        Library::Ring => {
            use ring::cipher_suite as suite;
            vec![
                suite::TLS13_AES_128_GCM_SHA256,
                suite::TLS13_AES_256_GCM_SHA384,
                suite::TLS13_CHACHA20_POLY1305_SHA256,
            ]
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::crypto::CryptoProvider;
    use rustls::pki_types::ServerName;
    use rustls::quic::{Keys, Version};
    use rustls::{
        CipherSuite, ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
        Side,
    };

    use super::*;
    use crate::ids::ClusterId;
    use crate::random::RandomId as _;
    use crate::{Authority, Credentials, Role, tls};

    const BOTH: [Library; 2] = [Library::AwsLc, Library::Ring];

    #[test]
    fn ring_is_taken_where_it_alone_is_wide() {
        for (wide, avx512, library) in [
            (false, false, Library::AwsLc),
            (true, false, Library::Ring),
            (true, true, Library::AwsLc),
            (false, true, Library::AwsLc),
        ] {
            assert_eq!(Aes { wide, avx512 }.library(), library, "{wide} {avx512}");
        }
    }

    #[test]
    fn both_offer_the_same() {
        let names = |library| -> Vec<CipherSuite> {
            from(library)
                .iter()
                .map(SupportedCipherSuite::suite)
                .collect()
        };
        assert_eq!(names(Library::AwsLc), names(Library::Ring));
        assert_eq!(
            names(Library::Ring)[0],
            CipherSuite::TLS13_AES_128_GCM_SHA256
        );
    }

    /// Hosts of one cluster have different processors.
    #[test]
    fn each_understands_the_other_over_tls() {
        let authority = Authority::create(ClusterId::random()).unwrap();
        let credentials = authority.issue(Role::Head, "head").unwrap();
        for (client, server) in BOTH.map(|one| BOTH.map(|other| (one, other))).concat() {
            for (index, suite) in from(client).iter().enumerate() {
                let what = format!("{client:?} to {server:?} with {suite:?}");
                let (mut client, mut server) = connection(
                    &credentials,
                    provider(vec![from(client)[index]]),
                    provider(from(server)),
                );
                shake_hands(&mut client, &mut server);
                assert_eq!(
                    server.negotiated_cipher_suite().map(|suite| suite.suite()),
                    Some(suite.suite()),
                    "{what}"
                );
                for length in [0, 1, 15, 16, 17, 255, 4096, 16_384] {
                    let data: Vec<u8> = (0..251).cycle().take(length).collect();
                    assert!(carried(&data, &mut client, &mut server) == data, "{what}");
                    assert!(carried(&data, &mut server, &mut client) == data, "{what}");
                }
            }
        }
    }

    #[test]
    fn each_understands_the_other_in_quic_packets() {
        for (ours, theirs) in BOTH.map(|one| BOTH.map(|other| (one, other))).concat() {
            for (ours, theirs) in from(ours).iter().zip(&from(theirs)) {
                let keys = |suite: &SupportedCipherSuite, side| {
                    let suite = suite.tls13().expect("it is of TLS 1.3");
                    let quic = suite.quic.expect("it is for QUIC, too");
                    Keys::initial(Version::V1, suite, quic, b"connection", side)
                };
                let (ours, theirs) = (keys(ours, Side::Client), keys(theirs, Side::Server));
                for length in [1, 1200, 8900] {
                    let plain = vec![5; length];
                    let mut packet = plain.clone();
                    let tag = ours
                        .local
                        .packet
                        .encrypt_in_place(3, b"header", &mut packet)
                        .unwrap();
                    packet.extend_from_slice(tag.as_ref());
                    let sample = [9; 16];
                    let (mut first, mut number) = (0x43, [1, 2, 3, 4]);
                    let header = &ours.local.header;
                    header
                        .encrypt_in_place(&sample, &mut first, &mut number)
                        .unwrap();
                    assert_ne!(number, [1, 2, 3, 4]);
                    let header = &theirs.remote.header;
                    header
                        .decrypt_in_place(&sample, &mut first, &mut number)
                        .unwrap();
                    assert_eq!((first, number), (0x43, [1, 2, 3, 4]));

                    let opener = &theirs.remote.packet;
                    assert!(
                        opener
                            .decrypt_in_place(4, b"header", &mut packet.clone())
                            .is_err(),
                        "a packet of another number"
                    );
                    let opened = opener.decrypt_in_place(3, b"header", &mut packet).unwrap();
                    assert!(opened == plain);
                }
            }
        }
    }

    fn provider(cipher_suites: Vec<SupportedCipherSuite>) -> Arc<CryptoProvider> {
        Arc::new(CryptoProvider {
            cipher_suites,
            ..CryptoProvider::clone(&tls::provider())
        })
    }

    fn connection(
        credentials: &Credentials,
        client: Arc<CryptoProvider>,
        server: Arc<CryptoProvider>,
    ) -> (ClientConnection, ServerConnection) {
        let mut roots = RootCertStore::empty();
        roots.add(credentials.authority()).unwrap();
        let client = ClientConfig::builder_with_provider(client)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let server = ServerConfig::builder_with_provider(server)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(credentials.chain(), credentials.private_key())
            .unwrap();
        let name = ServerName::try_from(tls::SERVER_NAME).unwrap();
        (
            ClientConnection::new(Arc::new(client), name).unwrap(),
            ServerConnection::new(Arc::new(server)).unwrap(),
        )
    }

    fn shake_hands(client: &mut ClientConnection, server: &mut ServerConnection) {
        while client.is_handshaking() || server.is_handshaking() {
            assert!(client.wants_write() || server.wants_write());
            transmit(client, server);
            transmit(server, client);
        }
    }

    /// What comes out at `to` of what goes in at `from`.
    fn carried<C, S>(
        data: &[u8],
        from: &mut impl std::ops::DerefMut<Target = rustls::ConnectionCommon<C>>,
        to: &mut impl std::ops::DerefMut<Target = rustls::ConnectionCommon<S>>,
    ) -> Vec<u8> {
        use std::io::{Read, Write};
        from.writer().write_all(data).unwrap();
        let mut came = Vec::new();
        while came.len() < data.len() {
            transmit(from, to);
            let mut part = [0; 16_384];
            let length = to.reader().read(&mut part).unwrap();
            came.extend_from_slice(&part[..length]);
        }
        came
    }

    fn transmit<C, S>(
        from: &mut impl std::ops::DerefMut<Target = rustls::ConnectionCommon<C>>,
        to: &mut impl std::ops::DerefMut<Target = rustls::ConnectionCommon<S>>,
    ) {
        let mut wire = Vec::new();
        while from.wants_write() {
            from.write_tls(&mut wire).unwrap();
        }
        let mut wire = &wire[..];
        while !wire.is_empty() {
            to.read_tls(&mut wire).unwrap();
            to.process_new_packets().unwrap();
        }
    }
}
