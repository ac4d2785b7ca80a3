//! The TLS handshake over a TCP socket.

use std::time::Duration;

use rustls::CommonState;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::records::{HEADER, MOST_BODY};

/// Bytes that a peer may send before it is authenticated: some certificates.
const MOST_HANDSHAKE: usize = 64 << 10;

/// Parts of what a side says before it gives up, its alert included.
const MOST_PARTS: usize = 16;

/// How long a peer that is refused has to hear why.
const FAREWELL: Duration = Duration::from_millis(250);

/// Why a handshake came to nothing.
#[derive(Debug)]
pub(super) enum HandshakeError {
    /// The socket's error, or its end.
    Io(std::io::Error),
    Tls(rustls::Error),
    Other(String),
}

impl From<std::io::Error> for HandshakeError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl std::fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => write!(f, "{error}"),
            Self::Tls(error) => write!(f, "{error}"),
            Self::Other(reason) => f.write_str(reason),
        }
    }
}

/// One side of a handshake.
pub(super) trait Side: Send {
    type Data;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn common(&self) -> &CommonState;
}

impl Side for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn common(&self) -> &CommonState {
        self
    }
}

impl Side for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn common(&self) -> &CommonState {
        self
    }
}

enum Step {
    /// There is more to do before the next record.
    Again,
    Transmit,
    Read,
    Done,
    Failed(HandshakeError),
}

/// Runs a handshake to its end. Records are read one by one, so that none of what follows it is taken.
pub(super) async fn shake<S: Side>(
    tcp: &mut TcpStream,
    side: &mut S,
) -> Result<(), HandshakeError> {
    let mut incoming = Vec::new();
    let mut outgoing = Vec::new();
    let mut read = 0;
    loop {
        match step(side, &mut incoming, &mut outgoing) {
            Step::Again => {}
            Step::Transmit => {
                tcp.write_all(&outgoing).await?;
                outgoing.clear();
            }
            Step::Read => {
                read += read_record(tcp, &mut incoming).await?;
                if read > MOST_HANDSHAKE {
                    return Err(HandshakeError::Other(format!(
                        "its handshake is longer than {MOST_HANDSHAKE} bytes"
                    )));
                }
            }
            Step::Done => return Ok(()),
            Step::Failed(error) => {
                // The peer is told why, if it still listens. What counts is the error.
                let mut parts = 0;
                while parts < MOST_PARTS
                    && matches!(step(side, &mut incoming, &mut outgoing), Step::Again)
                {
                    parts += 1;
                }
                drop(tokio::time::timeout(FAREWELL, farewell(tcp, &outgoing)).await);
                return Err(error);
            }
        }
    }
}

/// Says why, and lets the peer hear it: closing a socket with something unread in it takes back what was sent.
async fn farewell(tcp: &mut TcpStream, alert: &[u8]) -> std::io::Result<()> {
    tcp.write_all(alert).await?;
    tcp.shutdown().await?;
    let mut unread = [0; 4096];
    for _ in 0..MOST_HANDSHAKE / unread.len() {
        if tcp.read(&mut unread).await? == 0 {
            break;
        }
    }
    Ok(())
}

fn step<S: Side>(side: &mut S, incoming: &mut Vec<u8>, outgoing: &mut Vec<u8>) -> Step {
    let other = |reason: &str| Step::Failed(HandshakeError::Other(reason.to_owned()));
    let UnbufferedStatus { discard, state } = side.process(incoming);
    let mut may_be_done = false;
    let mut step = match state {
        Err(error) => Step::Failed(HandshakeError::Tls(error)),
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let begin = outgoing.len();
            match data.encode(&mut []) {
                Err(EncodeError::InsufficientSize(size)) => {
                    outgoing.resize(begin + size.required_size, 0);
                    match data.encode(&mut outgoing[begin..]) {
                        Ok(_) => Step::Again,
                        Err(error) => Step::Failed(HandshakeError::Other(error.to_string())),
                    }
                }
                _ => Step::Again,
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Step::Transmit
        }
        Ok(ConnectionState::BlockedHandshake) => Step::Read,
        Ok(ConnectionState::WriteTraffic(_)) => {
            may_be_done = true;
            Step::Read
        }
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => {
            other("the peer ended it in the handshake")
        }
        Ok(_) => other("data came before the end of the handshake"),
    };
    incoming.drain(..discard.min(incoming.len()));
    if may_be_done && !side.common().is_handshaking() {
        step = Step::Done;
    }
    step
}

/// Reads one record behind `into`, and says how long it is.
async fn read_record(tcp: &mut TcpStream, into: &mut Vec<u8>) -> Result<usize, HandshakeError> {
    let mut header = [0; HEADER];
    tcp.read_exact(&mut header).await?;
    let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
    // Whoever speaks another protocol is found out before anything is awaited from it.
    if !(20..=23).contains(&header[0]) || header[1] != 3 || length > MOST_BODY {
        return Err(HandshakeError::Other("it does not speak TLS".to_owned()));
    }
    let begin = into.len();
    into.extend_from_slice(&header);
    into.resize(begin + HEADER + length, 0);
    tcp.read_exact(&mut into[begin + HEADER..]).await?;
    Ok(HEADER + length)
}
