//! Echo over one QUIC stream with mutual TLS and a Unix socket behind it: two hops.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::BytesMut;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::RootCertStore;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::child::{RawChild, parent};
use super::echo::UNIX_ECHO;
use super::{Measured, whole_frames};

/// Role of the forwarder between QUIC and a Unix socket.
pub(crate) const TWO_HOPS: &str = "two-hops";
const CLIENT: &str = "KOLO_BENCH_CLIENT";

struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    fn new() -> anyhow::Result<Self> {
        let made = rcgen::generate_simple_self_signed(vec!["bench".to_owned()])?;
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()).into();
        Ok(Self {
            certificate: made.cert.der().clone(),
            key,
        })
    }
}

fn roots(certificate: CertificateDer<'static>) -> anyhow::Result<Arc<RootCertStore>> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate)?;
    Ok(Arc::new(roots))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from(b"0123456789abcdef"[usize::from(nibble)]);
    bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

fn unhex(text: &str) -> anyhow::Result<Vec<u8>> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).context("not hexadecimal"))
        .collect()
}

/// The child: one endpoint on a single thread, one connection, one stream.
pub(crate) fn serve() -> anyhow::Result<()> {
    let mut socket = parent()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let me = Identity::new()?;
        let client = CertificateDer::from(unhex(&std::env::var(CLIENT)?)?);
        let verifier =
            rustls::server::WebPkiClientVerifier::builder_with_provider(roots(client)?, provider())
                .build()?;
        let tls = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![me.certificate.clone()], me.key)?;
        let config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
        let endpoint = quinn::Endpoint::server(config, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        writeln!(
            socket,
            "{} {}",
            endpoint.local_addr()?.port(),
            hex(&me.certificate)
        )?;
        let connection = endpoint.accept().await.context("no connection")?.await?;
        let (mut send, mut recv) = connection.accept_bi().await?;
        forward(&mut send, &mut recv).await
    })
}

async fn forward(send: &mut quinn::SendStream, recv: &mut quinn::RecvStream) -> anyhow::Result<()> {
    let worker = RawChild::spawn(UNIX_ECHO, &[])?;
    let socket = worker.socket.try_clone()?;
    socket.set_nonblocking(true)?;
    let (mut from_worker, mut to_worker) = tokio::net::UnixStream::from_std(socket)?.into_split();
    let out = async {
        let mut buffer = BytesMut::new();
        while recv.read_buf(&mut buffer).await? > 0 {
            let (_, bytes) = whole_frames(&buffer);
            to_worker.write_all(&buffer.split_to(bytes)).await?;
        }
        anyhow::Ok(())
    };
    let back = async {
        let mut buffer = BytesMut::new();
        while from_worker.read_buf(&mut buffer).await? > 0 {
            let (_, bytes) = whole_frames(&buffer);
            send.write_all(&buffer.split_to(bytes)).await?;
        }
        anyhow::Ok(())
    };
    tokio::select! { ended = out => ended, ended = back => ended }
}

/// Measures it from this process, on a single thread too.
pub(crate) fn measure(length: Duration) -> anyhow::Result<Measured> {
    let me = Identity::new()?;
    let child = RawChild::spawn(TWO_HOPS, &[(CLIENT, &hex(&me.certificate))])?;
    let mut line = String::new();
    BufReader::new(&child.socket).read_line(&mut line)?;
    let (port, certificate) = line
        .trim()
        .split_once(' ')
        .context("the echo did not say where it is")?;
    let server = CertificateDer::from(unhex(certificate)?);
    let port: u16 = port.parse()?;

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let tls = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots(server)?)
            .with_client_auth_cert(vec![me.certificate], me.key)?;
        let mut endpoint = quinn::Endpoint::client(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(
            QuicClientConfig::try_from(tls)?,
        )));
        let connection = endpoint
            .connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), "bench")?
            .await?;
        let (send, recv) = connection.open_bi().await?;
        let measured = super::measure(recv, send, length).await;
        connection.close(0_u32.into(), b"done");
        measured
    })
}
