//! Where a worker of Horovod listens for notices that hosts have changed, and what such a notice looks like.
//!
//! Both are pickles. That of the worker is read by a fixed grammar: a pair of a table of addresses and a key. Nothing in it is called,
//! imported or built, whatever it holds.

use std::fmt;

/// Longest value that is read, in bytes. A host has some hundred addresses at most.
const LONGEST: usize = 64 << 10;

/// Bytes of the key.
const KEY: usize = 32;

/// Where a worker listens. It does so on all addresses of its host.
#[derive(Clone, PartialEq, Eq)]
pub struct Ear {
    /// The port.
    pub port: u16,
    /// With this its requests and answers are signed (HMAC-SHA256).
    pub key: [u8; KEY],
}

impl fmt::Debug for Ear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is a secret.
        f.debug_struct("Ear")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

/// Why a value says of no worker where it listens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the value of `worker_addresses` is not a table of addresses with a key, as Horovod pickles them: {why}"
)]
pub struct EarError {
    why: String,
}

fn no(why: impl Into<String>) -> EarError {
    EarError { why: why.into() }
}

/// What the grammar knows. No value holds others without limit, so that none is deep.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Value<'a> {
    /// The name of an interface or a host. Nobody asks for it: the worker is where its request came from.
    Text,
    Bytes(&'a [u8]),
    Number(u32),
    /// A host and a port.
    Address(u32),
    /// The ports of a list of addresses.
    Addresses(Vec<u32>),
    /// The ports of all interfaces.
    Table(Vec<u32>),
    /// A table and the key.
    Whole(Vec<u32>, &'a [u8]),
    Mark,
}

struct Reader<'a> {
    rest: &'a [u8],
    stack: Vec<Value<'a>>,
    /// What may be repeated: texts, numbers and bytes. A list that is repeated again and again would grow without end.
    memo: Vec<Option<Value<'a>>>,
}

impl Ear {
    /// Reads what a worker has published, a pickle without its base64.
    ///
    /// # Errors
    ///
    /// [`EarError`] for anything else.
    pub fn read(pickle: &[u8]) -> Result<Self, EarError> {
        if pickle.len() > LONGEST {
            let given = pickle.len();
            return Err(no(format!("it has {given} bytes, allowed are {LONGEST}")));
        }
        let mut reader = Reader {
            rest: pickle,
            stack: Vec::new(),
            memo: Vec::new(),
        };
        let Value::Whole(ports, key) = reader.run()? else {
            return Err(no("it is not a pair of a table and a key"));
        };
        let key = key.try_into().map_err(|_| no("the key has not 32 bytes"))?;
        let port = ports.first().ok_or_else(|| no("there is no address"))?;
        if ports.iter().any(|other| other != port) {
            return Err(no("there are several ports"));
        }
        let port = u16::try_from(*port).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| no("the port is not in 1 to 65535"))?;
        Ok(Self { port, key })
    }
}

impl<'a> Reader<'a> {
    /// The value of the pickle.
    fn run(&mut self) -> Result<Value<'a>, EarError> {
        loop {
            let code = self.take(1)?[0];
            match code {
                // PROTO, FRAME
                0x80 => drop(self.take(1)?),
                0x95 => drop(self.take(8)?),
                // MARK, EMPTY_LIST, EMPTY_DICT
                b'(' => self.stack.push(Value::Mark),
                b']' => self.stack.push(Value::Addresses(Vec::new())),
                b'}' => self.stack.push(Value::Table(Vec::new())),
                // SHORT_BINUNICODE, BINUNICODE, SHORT_BINBYTES, BINBYTES
                0x8c => self.text(1)?,
                b'X' => self.text(4)?,
                b'C' => self.bytes(1)?,
                b'B' => self.bytes(4)?,
                // BININT1, BININT2, BININT
                b'K' => self.number(1)?,
                b'M' => self.number(2)?,
                b'J' => self.number(4)?,
                // TUPLE2
                0x86 => {
                    let pair = match (self.pop()?, self.pop()?) {
                        (Value::Number(port), Value::Text) => Value::Address(port),
                        (Value::Bytes(key), Value::Table(ports)) => Value::Whole(ports, key),
                        _ => return Err(no("a pair is neither an address nor a table and a key")),
                    };
                    self.stack.push(pair);
                }
                // APPEND, APPENDS, SETITEM, SETITEMS
                b'a' => {
                    let address = self.pop()?;
                    self.append(vec![address])?;
                }
                b'e' => {
                    let addresses = self.since_mark()?;
                    self.append(addresses)?;
                }
                b's' => {
                    let (addresses, name) = (self.pop()?, self.pop()?);
                    self.set(vec![name, addresses])?;
                }
                b'u' => {
                    let items = self.since_mark()?;
                    self.set(items)?;
                }
                // MEMOIZE, BINGET, LONG_BINGET
                0x94 => {
                    let is_plain = |last: &&Value<'a>| {
                        matches!(last, Value::Text | Value::Bytes(_) | Value::Number(_))
                    };
                    let last = self.stack.last().filter(is_plain);
                    self.memo.push(last.cloned());
                }
                b'h' => self.repeat(1)?,
                b'j' => self.repeat(4)?,
                // STOP
                b'.' => {
                    let value = self.pop()?;
                    let is_all = self.stack.is_empty() && self.rest.is_empty();
                    return is_all
                        .then_some(value)
                        .ok_or_else(|| no("it has more than one value"));
                }
                other => return Err(no(format!("it has the operation {other:#04x}"))),
            }
        }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], EarError> {
        let taken = self.rest.split_at_checked(count);
        let (taken, rest) = taken.ok_or_else(|| no("it ends early"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn unsigned(&mut self, bytes: usize) -> Result<u32, EarError> {
        let taken = self.take(bytes)?.iter().rev();
        Ok(taken.fold(0, |number, byte| number << 8 | u32::from(*byte)))
    }

    fn text(&mut self, width: usize) -> Result<(), EarError> {
        let length = self.unsigned(width)? as usize;
        self.take(length)?;
        self.stack.push(Value::Text);
        Ok(())
    }

    fn bytes(&mut self, width: usize) -> Result<(), EarError> {
        let length = self.unsigned(width)? as usize;
        let bytes = self.take(length)?;
        self.stack.push(Value::Bytes(bytes));
        Ok(())
    }

    fn number(&mut self, width: usize) -> Result<(), EarError> {
        let number = self.unsigned(width)?;
        self.stack.push(Value::Number(number));
        Ok(())
    }

    fn repeat(&mut self, width: usize) -> Result<(), EarError> {
        let index = self.unsigned(width)? as usize;
        let known = self.memo.get(index).cloned().flatten();
        let known = known.ok_or_else(|| no("it repeats what is no text or number"))?;
        self.stack.push(known);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value<'a>, EarError> {
        self.stack.pop().ok_or_else(|| no("a value is missing"))
    }

    fn since_mark(&mut self) -> Result<Vec<Value<'a>>, EarError> {
        let mark = self.stack.iter().rposition(|value| *value == Value::Mark);
        let mark = mark.ok_or_else(|| no("a mark is missing"))?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn append(&mut self, items: Vec<Value<'a>>) -> Result<(), EarError> {
        let Some(Value::Addresses(ports)) = self.stack.last_mut() else {
            return Err(no("a list is missing"));
        };
        for item in items {
            let Value::Address(port) = item else {
                return Err(no("a list has something other than addresses"));
            };
            ports.push(port);
        }
        Ok(())
    }

    fn set(&mut self, items: Vec<Value<'a>>) -> Result<(), EarError> {
        let Some(Value::Table(all)) = self.stack.last_mut() else {
            return Err(no("a table is missing"));
        };
        for item in items.chunks(2) {
            let [Value::Text, Value::Addresses(ports)] = item else {
                return Err(no("a table has something other than names and lists"));
            };
            all.extend(ports);
        }
        Ok(())
    }
}

/// The notice that hosts have changed, as a pickle of protocol 2. A worker counts only notices whose number is above those before.
///
/// The notice says that hosts were added, so that the members synchronise their state: without that, members that are new would wait
/// for it.
#[must_use]
pub fn hosts_updated(number: u64) -> Vec<u8> {
    const CLASS: &[u8] =
        b"\x80\x02chorovod.runner.elastic.worker\nHostsUpdatedRequest\n)\x81}(X\x09\0\0\0timestamp";
    const ADDED: u8 = 2;
    let mut pickle = CLASS.to_vec();
    // LONG1: signed, little-endian.
    pickle.extend([0x8a, 9]);
    pickle.extend(number.to_le_bytes());
    pickle.extend(b"\0X\x03\0\0\0resK");
    pickle.push(ADDED);
    pickle.extend(b"ub.");
    pickle
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by cloudpickle 3 of Python 3.13: two interfaces with three addresses, port 51234, and the key 0, 1, 2, ... 31.
    const PICKLED: &str = "8005956e000000000000007d94288c026c6f945d948c093132372e302e302e31944d22c88694618c0465746830945d94288c08\
        31302e302e302e35944d22c886948c0831302e302e302e36944d22c8869465754320000102030405060708090a0b0c0d0e0f101112131415161718\
        191a1b1c1d1e1f9486942e";

    fn pickled() -> Vec<u8> {
        let digits = PICKLED.as_bytes().chunks(2);
        digits
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    fn refused(pickle: &[u8], why: &str) {
        let error = Ear::read(pickle).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }

    #[test]
    fn what_a_worker_of_horovod_pickles_is_read() {
        let ear = Ear::read(&pickled()).unwrap();
        assert_eq!(ear.port, 51234);
        assert!((0..32).eq(ear.key));
        assert_eq!(
            format!("{ear:?}"),
            "Ear { port: 51234, .. }",
            "no key in a log"
        );
    }

    #[test]
    fn every_part_of_it_is_refused_and_none_panics() {
        let whole = pickled();
        for length in 0..whole.len() {
            refused(&whole[..length], "");
        }
        // Each byte changed in each way: read as something else of the same grammar, or refused.
        for at in 0..whole.len() {
            for byte in 0..=u8::MAX {
                let mut other = whole.clone();
                other[at] = byte;
                drop(Ear::read(&other));
            }
        }
    }

    #[test]
    fn whatever_calls_imports_or_builds_is_refused() {
        refused(b"cos\nsystem\n(X\x02\0\0\0lstR.", "the operation 0x63");
        refused(
            b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
            "the operation 0x93",
        );
        refused(b"}}\x81.", "the operation 0x81");
        refused(b"(i__main__\nX\n.", "the operation 0x69");
        refused(&hosts_updated(1), "the operation 0x63");
    }

    #[test]
    fn what_grows_without_end_is_refused() {
        // A list in a list, and a list that is repeated.
        refused(b"]]a.", "other than addresses");
        refused(b"]\x94h\0.", "no text or number");
        refused(&[vec![b'}'], vec![0x86; 40_000]].concat(), "");
        refused(&vec![b'('; LONGEST + 1], "bytes, allowed are");
        refused(
            &[vec![b'('; 60_000], vec![b'u'; 4000]].concat(),
            "a table is missing",
        );
    }

    #[test]
    fn other_values_are_refused() {
        for (pickle, why) in [
            (b"K\x01.".as_slice(), "not a pair of a table and a key"),
            (b"}C\x02ab\x86.", "32 bytes"),
            (b"}C\x20aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbb\x86.", "no address"),
            (
                b"}X\x01\0\0\0e]X\x01\0\0\0hK\0\x86asC\x20aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbb\x86.",
                "1 to 65535",
            ),
            (
                b"}X\x01\0\0\0e](X\x01\0\0\0hK\x01\x86X\x01\0\0\0hK\x02\x86esC\x20aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbb\x86.",
                "several ports",
            ),
            (b"}(X\x01\0\0\0eu.", "names and lists"),
            (b"K\x01K\x02.", "more than one value"),
            (b"X\xff\xff\xff\xffa.", "ends early"),
        ] {
            refused(pickle, why);
        }
    }

    #[test]
    fn a_notice_is_an_object_with_two_numbers() {
        // Read by Python: HostsUpdatedRequest with timestamp 258 and res 2.
        let expected = b"\x80\x02chorovod.runner.elastic.worker\nHostsUpdatedRequest\n)\x81}(X\x09\0\0\0timestamp\
            \x8a\x09\x02\x01\0\0\0\0\0\0\0X\x03\0\0\0resK\x02ub.";
        assert_eq!(hosts_updated(258), expected);
    }
}
