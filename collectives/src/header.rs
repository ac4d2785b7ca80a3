//! The fixed header of every frame on the data plane. No I/O.
//!
//! 96 bytes, little endian, followed by `length` bytes of payload:
//!
//! ```text
//!  0  magic "kolo"        16  generation u64        56  offset u64
//!  4  version u8          24  call (hello: job) u64 64  prescale f64
//!  5  frame kind u8       32  part u16, operation   72  postscale f64
//!                             number u48 (hello: group)
//!  6  operation kind u8   40  elements u64          80  rows u64
//!  7  type u8             48  step u32              88  shape u64
//!  8  operator u8         52  length u32
//!  9  algorithm u8
//! 10  type on the way u8
//! 11  log2 of a segment u8
//! 12  root (hello: rank) u32
//! ```
//!
//! Elements travel in the machine's byte order; kolo runs on little-endian machines only and says so at
//! compile time.

use kolo_transport::ids::{Generation, JobId, Rank};

use crate::element::DType;
use crate::operation::{Factor, Operation, OperationKind, ReduceOp, Tag};
use crate::schedule::Algorithm;

#[cfg(not(target_endian = "little"))]
compile_error!("the data plane carries elements as little-endian memory");

/// Bytes of a header.
pub const HEADER: usize = 96;

/// Most bytes of one data frame's payload. Longer transfers are cut, so that a receiver can combine what has
/// come while the rest is on its way, from cache, and so that giving up costs little.
pub const SEGMENT: usize = 256 * 1024;

/// Most bytes of a payload that is text about a failure.
pub const MAX_TEXT: usize = 4096;

/// Longest piece of text, in bytes. Longer ones are cut.
const TEXT: usize = 1024;

/// In [`Header::Doing`]: the sender itself, which does not know its rank in the group because it has not made that.
pub const SENDER: Rank = Rank(u32::MAX);

const MAGIC: [u8; 4] = *b"kolo";
const VERSION: u8 = 7;

/// The first bytes of every header: what it is, and of which version.
pub const BEGINNING: [u8; 5] = [MAGIC[0], MAGIC[1], MAGIC[2], MAGIC[3], VERSION];
const NONE: u8 = u8::MAX;
const NO_ROOT: u32 = u32::MAX;

/// A parsed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Header {
    /// First frame of both sides of a link: who speaks.
    Hello {
        /// Its job.
        job: JobId,
        /// Its generation.
        generation: Generation,
        /// Its rank.
        rank: Rank,
        /// The group that the link is for, as the side says that makes it; 0 is the group of all ranks.
        group: u64,
        /// How many ranks the job has, or 0 from who does not say it.
        world: u32,
    },
    /// Second frame: the hello was right.
    Welcome,
    /// Second frame: it was not, and the link ends here.
    Refusal {
        /// What kind of reason the text gives.
        why: Refusal,
        /// Bytes of text that follow.
        length: u32,
    },
    /// About memory that the ranks of a host share. An offer comes with a descriptor.
    Share {
        /// The sender's generation.
        generation: Generation,
        /// What it says.
        share: Share,
    },
    /// Elements.
    Data(Data),
    /// What the sender asks for, said again because it has waited for a while, or because the receiver has no data of its
    /// own to give and wants to know. No payload; `step` and `offset` are 0.
    Ask(Data),
    /// The sender has begun this operation, and so have all that have told it. `step` is the round. No payload.
    Consent(Data),
    /// What a rank does that others wait for. Payload: text.
    Doing {
        /// The sender's generation.
        generation: Generation,
        /// The operation that they wait in.
        tag: Tag,
        /// The rank that it is about, or [`SENDER`].
        rank: Rank,
        /// Bytes of payload.
        length: u32,
    },
    /// The sender failed in an operation. Payload: a [`Cause`](crate::cause::Cause).
    AbortOperation {
        /// Its generation.
        generation: Generation,
        /// Which operation.
        tag: Tag,
        /// Bytes of payload.
        length: u32,
    },
    /// The sender failed in a call: it takes part in no more operations of it. Payload: a cause.
    AbortCall {
        /// Its generation.
        generation: Generation,
        /// Which call.
        call: u64,
        /// Bytes of payload.
        length: u32,
    },
}

/// At most [`TEXT`] bytes of a text, cut between two characters.
pub(crate) fn cut(text: &str) -> &str {
    cut_to(text, TEXT)
}

/// At most so many bytes of a text, cut between two characters.
pub(crate) fn cut_to(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Why a side of a new link does not want it, for those reasons on which the other side does something else than say them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Any other reason.
    Other,
    /// The sides are of different generations.
    Stale,
}

impl Refusal {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Other, Self::Stale];

    const fn code(self) -> u8 {
        self as u8
    }

    /// A reason that is not known is another one: the text says it.
    fn of_code(code: u8) -> Self {
        let known = Self::ALL.into_iter().find(|why| why.code() == code);
        known.unwrap_or(Self::Other)
    }
}

/// What ranks of one host say to each other before they share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Share {
    /// To rank 0: is there any?
    Ask,
    /// From rank 0: here it is.
    Offer,
    /// To or from rank 0: there will be none.
    Refuse,
    /// To rank 0: the sender has mapped it.
    Attached,
    /// From rank 0: it stands in the memory whether it is used.
    Settled,
}

impl Share {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Ask,
        Self::Offer,
        Self::Refuse,
        Self::Attached,
        Self::Settled,
    ];

    /// All are counted from 1, in their order.
    const fn code(self) -> u8 {
        self as u8 + 1
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|share| share.code() == code)
    }
}

/// The header of a data frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Data {
    /// The sender's generation.
    pub generation: Generation,
    /// Which operation of which call.
    pub tag: Tag,
    /// What the sender asks for.
    pub operation: Operation,
    /// The step of the sender's schedule.
    pub step: u32,
    /// Where the payload lies in that step's transfer, in bytes.
    pub offset: u64,
    /// Bytes of payload.
    pub length: u32,
}

/// What is wrong with a header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// It does not begin with the magic bytes.
    #[error("not a data-plane frame: it begins with {0:02x?} instead of `kolo`")]
    Magic([u8; 4]),
    /// Another version of the protocol.
    #[error("data-plane protocol version {0}, this side has {VERSION}")]
    Version(u8),
    /// A code that this version does not know.
    #[error("unknown {field} code {code}")]
    Code {
        /// Which field.
        field: &'static str,
        /// Its value.
        code: u8,
    },
    /// A payload over the limit.
    #[error("a payload of {given} bytes is over the limit of {limit}")]
    Length {
        /// What the header says.
        given: u32,
        /// What is allowed for its kind.
        limit: usize,
    },
}

impl Header {
    /// Bytes of payload that follow.
    #[must_use]
    pub fn length(&self) -> usize {
        match self {
            Self::Hello { .. }
            | Self::Welcome
            | Self::Ask(_)
            | Self::Consent(_)
            | Self::Share { .. } => 0,
            Self::Data(Data { length, .. })
            | Self::Doing { length, .. }
            | Self::Refusal { length, .. }
            | Self::AbortOperation { length, .. }
            | Self::AbortCall { length, .. } => *length as usize,
        }
    }

    /// Whether its payload is a text that says something about an operation or a call.
    pub(crate) const fn is_notice(&self) -> bool {
        matches!(
            self,
            Self::Doing { .. } | Self::AbortOperation { .. } | Self::AbortCall { .. }
        )
    }

    /// The frame with this payload.
    pub(crate) fn with(&self, payload: &[u8]) -> Vec<u8> {
        [&self.encode(), payload].concat()
    }

    /// The frame that says what a rank does, to ranks that wait for it in an operation.
    pub(crate) fn doing(generation: Generation, tag: Tag, rank: Rank, doing: &str) -> Vec<u8> {
        let text = cut(doing);
        let header = Self::Doing {
            generation,
            tag,
            rank,
            length: text.len() as u32,
        };
        header.with(text.as_bytes())
    }

    /// The header as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = Fields::new();
        match *self {
            Self::Hello {
                job,
                generation,
                rank,
                group,
                world,
            } => {
                out.kind(1);
                out.u32(8, world);
                out.u32(12, rank.0);
                out.u64(16, generation.0);
                out.u64(24, job.0);
                out.u64(32, group);
            }
            Self::Welcome => out.kind(2),
            Self::Refusal { why, length } => {
                out.kind(3);
                out.0[6] = why.code();
                out.u32(52, length);
            }
            Self::Share { generation, share } => {
                out.kind(10);
                out.0[6] = share.code();
                out.u64(16, generation.0);
            }
            Self::Data(data) | Self::Ask(data) | Self::Consent(data) => {
                let operation = data.operation;
                out.kind(match self {
                    Self::Ask(_) => 7,
                    Self::Consent(_) => 8,
                    _ => 4,
                });
                out.0[6] = operation.kind.code();
                out.0[7] = operation.dtype.map_or(NONE, DType::code);
                out.0[8] = operation.reduce.map_or(NONE, ReduceOp::code);
                out.0[9] = operation.algorithm.code();
                out.0[10] = operation.wire.map_or(NONE, DType::code);
                out.0[11] = operation.segment;
                out.u32(12, operation.root.unwrap_or(NO_ROOT));
                out.u64(16, data.generation.0);
                out.tag(data.tag);
                out.u64(40, operation.count);
                out.u32(48, data.step);
                out.u32(52, data.length);
                out.u64(56, data.offset);
                out.u64(64, operation.prescale.to_bits());
                out.u64(72, operation.postscale.to_bits());
                out.u64(80, operation.rows);
                out.u64(88, operation.shape);
            }
            Self::AbortOperation {
                generation,
                tag,
                length,
            } => {
                out.kind(5);
                out.u64(16, generation.0);
                out.tag(tag);
                out.u32(52, length);
            }
            Self::Doing {
                generation,
                tag,
                rank,
                length,
            } => {
                out.kind(9);
                out.u32(12, rank.0);
                out.u64(16, generation.0);
                out.tag(tag);
                out.u32(52, length);
            }
            Self::AbortCall {
                generation,
                call,
                length,
            } => {
                out.kind(6);
                out.u64(16, generation.0);
                out.u64(24, call);
                out.u32(52, length);
            }
        }
        out.0
    }

    /// Parses a header. Never panics, whatever the bytes are.
    ///
    /// # Errors
    ///
    /// [`HeaderError`]. The link can't be used any further then.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<Self, HeaderError> {
        let fields = Fields(*bytes);
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic != MAGIC {
            return Err(HeaderError::Magic(magic));
        }
        if bytes[4] != VERSION {
            return Err(HeaderError::Version(bytes[4]));
        }
        let generation = Generation(fields.get_u64(16));
        let tag = Tag::of_word(fields.get_u64(24), fields.get_u64(32));
        let length = |limit: usize| {
            let given = fields.get_u32(52);
            if given as usize <= limit {
                Ok(given)
            } else {
                Err(HeaderError::Length { given, limit })
            }
        };
        Ok(match bytes[5] {
            1 => Self::Hello {
                job: JobId(fields.get_u64(24)),
                generation,
                rank: Rank(fields.get_u32(12)),
                group: fields.get_u64(32),
                world: fields.get_u32(8),
            },
            2 => Self::Welcome,
            3 => Self::Refusal {
                why: Refusal::of_code(bytes[6]),
                length: length(MAX_TEXT)?,
            },
            kind @ (4 | 7 | 8) => {
                let data = Data {
                    generation,
                    tag,
                    operation: fields.operation()?,
                    step: fields.get_u32(48),
                    offset: fields.get_u64(56),
                    length: length(if kind == 4 { SEGMENT } else { 0 })?,
                };
                match kind {
                    4 => Self::Data(data),
                    7 => Self::Ask(data),
                    _ => Self::Consent(data),
                }
            }
            9 => Self::Doing {
                generation,
                tag,
                rank: Rank(fields.get_u32(12)),
                length: length(MAX_TEXT)?,
            },
            5 => Self::AbortOperation {
                generation,
                tag,
                length: length(MAX_TEXT)?,
            },
            6 => Self::AbortCall {
                generation,
                call: tag.call,
                length: length(MAX_TEXT)?,
            },
            10 => Self::Share {
                generation,
                share: Share::from_code(bytes[6]).ok_or(HeaderError::Code {
                    field: "share",
                    code: bytes[6],
                })?,
            },
            code => {
                return Err(HeaderError::Code {
                    field: "frame",
                    code,
                });
            }
        })
    }
}

/// Fields at fixed places of a header.
struct Fields([u8; HEADER]);

impl Fields {
    fn new() -> Self {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        Self(bytes)
    }

    fn kind(&mut self, kind: u8) {
        self.0[5] = kind;
    }

    fn tag(&mut self, tag: Tag) {
        self.u64(24, tag.call);
        self.u64(32, tag.word());
    }

    fn u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    fn get_u32(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[at..at + 4]);
        u32::from_le_bytes(bytes)
    }

    fn get_u64(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[at..at + 8]);
        u64::from_le_bytes(bytes)
    }

    fn operation(&self) -> Result<Operation, HeaderError> {
        let unknown = |field, at: usize| HeaderError::Code {
            field,
            code: self.0[at],
        };
        Ok(Operation {
            kind: OperationKind::from_code(self.0[6]).ok_or_else(|| unknown("operation", 6))?,
            dtype: match self.0[7] {
                NONE => None,
                code => Some(DType::from_code(code).ok_or_else(|| unknown("type", 7))?),
            },
            reduce: match self.0[8] {
                NONE => None,
                code => Some(ReduceOp::from_code(code).ok_or_else(|| unknown("operator", 8))?),
            },
            algorithm: Algorithm::from_code(self.0[9]).ok_or_else(|| unknown("algorithm", 9))?,
            root: Some(self.get_u32(12)).filter(|root| *root != NO_ROOT),
            count: self.get_u64(40),
            rows: self.get_u64(80),
            shape: self.get_u64(88),
            prescale: Factor::from_bits(self.get_u64(64)),
            postscale: Factor::from_bits(self.get_u64(72)),
            wire: match self.0[10] {
                NONE => None,
                code => Some(DType::from_code(code).ok_or_else(|| unknown("wire type", 10))?),
            },
            segment: self.0[11],
        })
    }
}

#[cfg(test)]
mod tests;
