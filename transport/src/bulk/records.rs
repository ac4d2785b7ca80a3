//! The records of an established TLS 1.3 connection (RFC 8446, section 5), by rustls's own ciphers.
//!
//! rustls's connection types take and give plaintext through buffers of their own: 4 KiB a read, and two copies more on each
//! side. Here a record is opened in the buffer into which the kernel wrote it.

use std::fmt;

use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{
    InboundOpaqueMessage, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, ExtractedSecrets, ProtocolVersion,
    SupportedCipherSuite, Tls13CipherSuite,
};

/// Bytes before the body of a record: its type, a version for old routers, its length.
pub(super) const HEADER: usize = 5;

/// Most plaintext in one record.
pub(super) const MOST_PLAIN: usize = 16 << 10;

/// Most bytes of a record's body: plaintext, its type, padding, tag.
pub(super) const MOST_BODY: usize = MOST_PLAIN + 256;

/// Records after which new keys are taken, if the cipher does not want them earlier. AES-GCM's limit is 2^24.
const REKEY: u64 = 1 << 22;

/// `key_update`, of one byte: whether the peer shall do the same.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];

/// What was in a record.
pub(super) enum Opened {
    /// So many bytes of the peer's data lie at the beginning of the body.
    Data(usize),
    /// Nothing for the user.
    Nothing,
    /// The peer ends its side in order.
    Closed,
}

/// The peer broke TLS, or somebody on the way changed what it sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RecordError {
    /// Not authentic or malformed.
    Broken(String),
    /// The peer says that it ends the connection for this reason.
    Alert(String),
}

/// Where new keys come from.
enum Secrets {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

/// Both directions of one connection.
pub(super) struct Records {
    secrets: Secrets,
    suite: &'static Tls13CipherSuite,
    encrypter: Box<dyn MessageEncrypter>,
    sent: u64,
    rekey_after: u64,
    decrypter: Box<dyn MessageDecrypter>,
    received: u64,
    /// The peer wants new keys.
    asked: bool,
}

impl Records {
    pub(super) fn client(
        (secrets, kernel): (ExtractedSecrets, KernelConnection<ClientConnectionData>),
    ) -> Result<Self, String> {
        let suite = kernel.negotiated_cipher_suite();
        Self::new(secrets, suite, Secrets::Client(kernel))
    }

    pub(super) fn server(
        (secrets, kernel): (ExtractedSecrets, KernelConnection<ServerConnectionData>),
    ) -> Result<Self, String> {
        let suite = kernel.negotiated_cipher_suite();
        Self::new(secrets, suite, Secrets::Server(kernel))
    }

    fn new(
        extracted: ExtractedSecrets,
        suite: SupportedCipherSuite,
        secrets: Secrets,
    ) -> Result<Self, String> {
        let suite = suite.tls13().ok_or("it is not TLS 1.3")?;
        let (sent, key) = extracted.tx;
        let encrypter = encrypter(suite, key)?;
        let (received, key) = extracted.rx;
        let decrypter = decrypter(suite, key)?;
        Ok(Self {
            secrets,
            suite,
            encrypter,
            sent,
            rekey_after: REKEY.min(suite.common.confidentiality_limit / 2),
            decrypter,
            received,
            asked: false,
        })
    }

    /// Puts data in records behind `into`. Takes at most [`MOST_PLAIN`] bytes.
    pub(super) fn seal(
        &mut self,
        chunks: OutboundChunks<'_>,
        mut into: impl FnMut(Vec<u8>),
    ) -> Result<(), String> {
        if self.asked || self.sent >= self.rekey_after {
            self.asked = false;
            let mut update = KEY_UPDATE.to_vec();
            update.push(0);
            into(self.seal_as(ContentType::Handshake, OutboundChunks::Single(&update))?);
            let (sent, key) = match &mut self.secrets {
                Secrets::Client(kernel) => kernel.update_tx_secret(),
                Secrets::Server(kernel) => kernel.update_tx_secret(),
            }
            .map_err(|error| error.to_string())?;
            self.encrypter = encrypter(self.suite, key)?;
            self.sent = sent;
        }
        into(self.seal_as(ContentType::ApplicationData, chunks)?);
        Ok(())
    }

    /// The record that says that nothing follows.
    pub(super) fn close_notify(&mut self) -> Result<Vec<u8>, String> {
        let alert = [1, AlertDescription::CloseNotify.into()];
        self.seal_as(ContentType::Alert, OutboundChunks::Single(&alert))
    }

    fn seal_as(
        &mut self,
        typ: ContentType,
        payload: OutboundChunks<'_>,
    ) -> Result<Vec<u8>, String> {
        let plain = OutboundPlainMessage {
            typ,
            version: ProtocolVersion::TLSv1_2,
            payload,
        };
        let sealed = self
            .encrypter
            .encrypt(plain, self.sent)
            .map_err(|error| error.to_string())?;
        self.sent += 1;
        Ok(sealed.encode())
    }

    /// Opens a record in place.
    pub(super) fn open(&mut self, typ: u8, body: &mut [u8]) -> Result<Opened, RecordError> {
        let typ = ContentType::from(typ);
        if typ != ContentType::ApplicationData {
            return Err(RecordError::Broken(format!(
                "a record is not protected: its type is {typ:?}"
            )));
        }
        let opaque = InboundOpaqueMessage::new(typ, ProtocolVersion::TLSv1_2, body);
        let plain = self
            .decrypter
            .decrypt(opaque, self.received)
            .map_err(|error| RecordError::Broken(error.to_string()))?;
        self.received += 1;
        match (plain.typ, plain.payload) {
            (ContentType::ApplicationData, data) => Ok(Opened::Data(data.len())),
            (ContentType::Alert, [_, alert]) => match AlertDescription::from(*alert) {
                AlertDescription::CloseNotify => Ok(Opened::Closed),
                other => Err(RecordError::Alert(format!("{other:?}"))),
            },
            (ContentType::Handshake, [24, 0, 0, 1, wants @ (0 | 1)]) => {
                self.asked |= *wants == 1;
                let (received, key) = match &mut self.secrets {
                    Secrets::Client(kernel) => kernel.update_rx_secret(),
                    Secrets::Server(kernel) => kernel.update_rx_secret(),
                }
                .map_err(|error| RecordError::Broken(error.to_string()))?;
                self.decrypter = decrypter(self.suite, key).map_err(RecordError::Broken)?;
                self.received = received;
                Ok(Opened::Nothing)
            }
            (other, _) => Err(RecordError::Broken(format!(
                "a record of type {other:?} is out of place"
            ))),
        }
    }

    /// Takes new keys with the next record.
    #[cfg(test)]
    pub(super) fn rekey_soon(&mut self) {
        self.asked = true;
    }
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records")
            .field("suite", &self.suite.common.suite)
            .field("sent", &self.sent)
            .field("received", &self.received)
            .finish_non_exhaustive()
    }
}

fn encrypter(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageEncrypter>, String> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
            Ok(suite.aead_alg.encrypter(key, iv))
        }
        _ => Err("the keys are of an unknown cipher".to_owned()),
    }
}

fn decrypter(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageDecrypter>, String> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
            Ok(suite.aead_alg.decrypter(key, iv))
        }
        _ => Err("the keys are of an unknown cipher".to_owned()),
    }
}
