//! One checkpoint as bytes.
//!
//! | bytes | |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 4 | [`FORMAT`], little-endian as all numbers here |
//! | 8 | the length of the header |
//! | | the header: [`About`] and the parts of the state, as MessagePack |
//! | | the encoded values, then the elements of the buffers, in the order of the parts |
//! | 32 | BLAKE3 of all bytes before |

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use kolo_transport::ids::JobId;
use serde::{Deserialize, Serialize};

use crate::codec;
use crate::elastic::snapshot::{Kind, Part, Snapshot};

const MAGIC: [u8; 8] = *b"kolo\x1acpt";
const FORMAT: u32 = 1;
const PREFIX: u64 = 20;
const CHECKSUM: u64 = 32;

/// The byte order of elements.
const BYTE_ORDER: &str = if cfg!(target_endian = "big") {
    "big"
} else {
    "little"
};

/// Bytes that are hashed, then written.
const PIECE: usize = 1 << 20;

/// Where a checkpoint is from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct About {
    /// The version of kolo that has written the file.
    pub(super) kolo: String,
    pub(super) byte_order: String,
    pub(super) job: JobId,
    pub(super) generation: u64,
    pub(super) commit: u64,
}

impl About {
    pub(super) fn new(job: JobId, generation: u64, commit: u64) -> Self {
        Self {
            kolo: env!("CARGO_PKG_VERSION").to_owned(),
            byte_order: BYTE_ORDER.to_owned(),
            job,
            generation,
            commit,
        }
    }
}

/// Writes a checkpoint.
pub(super) fn write(to: &mut dyn Write, about: &About, copy: &Snapshot) -> io::Result<()> {
    let header = codec::encode(&(about, &copy.parts)).map_err(io::Error::other)?;
    let mut out = Hashed {
        to,
        hasher: blake3::Hasher::new(),
    };
    out.write_all(&MAGIC)?;
    out.write_all(&FORMAT.to_le_bytes())?;
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    out.write_all(&copy.values)?;
    for buffer in &copy.buffers {
        out.write_all(buffer.bytes())?;
    }
    let checksum = out.hasher.finalize();
    to.write_all(checksum.as_bytes())
}

struct Hashed<'a> {
    to: &'a mut dyn Write,
    hasher: blake3::Hasher,
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(&bytes[..bytes.len().min(PIECE)])?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A file whose checksum is right.
#[derive(Debug)]
pub(in crate::elastic) struct Opened {
    pub(super) about: About,
    parts: Vec<Part>,
    /// At the values.
    file: BufReader<File>,
}

impl Opened {
    /// Opens a file, and looks at all its bytes. The error says what is wrong with the file.
    pub(super) fn new(path: &Path) -> Result<Self, String> {
        let file = File::open(path).map_err(cant)?;
        let length = file.metadata().map_err(cant)?.len();
        let mut file = BufReader::new(file);
        if length < PREFIX + CHECKSUM {
            return Err(format!(
                "has {length} bytes, and was not written to its end"
            ));
        }
        let (mut magic, mut format, mut header) = ([0; 8], [0; 4], [0; 8]);
        for field in [&mut magic[..], &mut format[..], &mut header[..]] {
            file.read_exact(field).map_err(cant)?;
        }
        let format = u32::from_le_bytes(format);
        if magic != MAGIC {
            return Err("is no checkpoint of kolo".to_owned());
        }
        if format != FORMAT {
            return Err(format!(
                "is of format {format}, but kolo {} reads format {FORMAT} alone",
                env!("CARGO_PKG_VERSION")
            ));
        }
        file.rewind().map_err(cant)?;
        let mut hasher = blake3::Hasher::new();
        let mut hashed = (&mut file).take(length - CHECKSUM);
        io::copy(&mut hashed, &mut hasher).map_err(cant)?;
        let mut checksum = [0; CHECKSUM as usize];
        file.read_exact(&mut checksum).map_err(cant)?;
        if hasher.finalize() != checksum {
            return Err(
                "has a wrong checksum: the file was changed, or was not written to its end"
                    .to_owned(),
            );
        }
        // The bytes are those that a writer of this format has written; what does not fit is a fault of that writer.
        let header = u64::from_le_bytes(header);
        let body = (length - PREFIX - CHECKSUM).checked_sub(header);
        let body = body.ok_or("has a header that is longer than the file")?;
        file.seek(SeekFrom::Start(PREFIX)).map_err(cant)?;
        let mut bytes = Vec::new();
        (&mut file)
            .take(header)
            .read_to_end(&mut bytes)
            .map_err(cant)?;
        let (about, parts): (About, Vec<Part>) = codec::decode(&bytes)
            .map_err(|error| format!("has a header that is not understood: {error}"))?;
        if about.byte_order != BYTE_ORDER {
            let theirs = about.byte_order;
            return Err(format!(
                "has numbers in {theirs}-endian order, but this machine has them in {BYTE_ORDER}-endian order"
            ));
        }
        let sum = (parts.iter()).try_fold(0_u64, |sum, part| sum.checked_add(part.bytes()?));
        if sum != Some(body) {
            return Err("has parts of another length than the file".to_owned());
        }
        Ok(Self { about, parts, file })
    }

    /// Reads the parts and the values.
    pub(in crate::elastic) fn read_values(&mut self, copy: &mut Snapshot) -> Result<(), String> {
        copy.parts = std::mem::take(&mut self.parts);
        let values = copy.parts.iter().filter(|part| part.kind == Kind::Value);
        let length = values.map(|part| part.size).sum();
        copy.values.clear();
        (&mut self.file)
            .take(length)
            .read_to_end(&mut copy.values)
            .map_err(cant)?;
        Ok(())
    }

    /// Reads the buffers, for which there is room.
    pub(in crate::elastic) fn read_buffers(&mut self, copy: &mut Snapshot) -> Result<(), String> {
        for buffer in &mut copy.buffers {
            buffer.read(&mut self.file).map_err(cant)?;
        }
        Ok(())
    }
}

fn cant(error: io::Error) -> String {
    format!("can't be read: {error}")
}
