//! Tokens with which nodes and drivers join a cluster.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use subtle::ConstantTimeEq;

use crate::fingerprint::{Fingerprint, decode_hex};
use crate::identity::Role;

/// First part of every token: the version of its form.
const PREFIX: &str = "kolo1";

/// What a node or driver needs to join: one line that the head printed. It is a secret.
///
/// It names the cluster's authority by fingerprint, so that the joiner can't be led to another head.
#[derive(Clone)]
pub struct JoinToken {
    role: Role,
    fingerprint: Fingerprint,
    secret: [u8; 32],
}

impl PartialEq for JoinToken {
    fn eq(&self, other: &Self) -> bool {
        self.role == other.role
            && self.fingerprint == other.fingerprint
            && bool::from(self.secret.ct_eq(&other.secret))
    }
}

impl Eq for JoinToken {}

/// A fresh secret from the kernel's random generator, for [`TokenBook::create`].
pub fn random_secret() -> [u8; 32] {
    let mut secret = [0; 32];
    crate::random::fill_random(&mut secret);
    secret
}

impl JoinToken {
    /// The role that the token gives.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The authority of the cluster.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Names the token without giving it away.
    pub fn id(&self) -> TokenId {
        SecretHash::of(&self.secret).id()
    }

    /// The secret part. Never log it.
    pub fn secret(&self) -> &[u8] {
        &self.secret
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}.{}.{}.", self.role, self.fingerprint)?;
        self.secret
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken")
            .field("role", &self.role)
            .field("fingerprint", &self.fingerprint)
            .finish_non_exhaustive()
    }
}

/// A text that is no [`JoinToken`]. Does not repeat the text, which may hold most of a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a join token: {0}; expected one line `kolo1.ROLE.FINGERPRINT.SECRET`, as the head prints it"
)]
pub struct ParseTokenError(&'static str);

impl FromStr for JoinToken {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<Self, ParseTokenError> {
        let mut parts = bare(text).split('.');
        if parts.next() != Some(PREFIX) {
            return Err(ParseTokenError("it does not start with `kolo1.`"));
        }
        let (Some(role), Some(fingerprint), Some(secret), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(ParseTokenError("it does not have four parts"));
        };
        Ok(Self {
            role: role
                .parse()
                .ok()
                .filter(|role: &Role| role.joins())
                .ok_or(ParseTokenError("its role is neither `node` nor `driver`"))?,
            fingerprint: fingerprint
                .parse()
                .map_err(|_| ParseTokenError("its fingerprint is not 64 hexadecimal digits"))?,
            secret: decode_hex(secret)
                .ok_or(ParseTokenError("its secret is not 64 hexadecimal digits"))?,
        })
    }
}

/// The text of a file that holds a secret in one line, without what editors and shells put around it: white space, line ends, and
/// the byte order mark of UTF-8. What Windows' shells write (UTF-16 with its mark) is read as well. `None` if it is no text.
#[must_use]
pub fn secret_text(bytes: &[u8]) -> Option<String> {
    let of_pairs = |rest: &[u8], pair: fn([u8; 2]) -> u16| {
        let (pairs, odd) = rest.as_chunks::<2>();
        let units: Vec<u16> = pairs.iter().copied().map(pair).collect();
        odd.is_empty().then(|| String::from_utf16(&units).ok())?
    };
    let text = match bytes {
        [0xff, 0xfe, rest @ ..] => of_pairs(rest, u16::from_le_bytes)?,
        [0xfe, 0xff, rest @ ..] => of_pairs(rest, u16::from_be_bytes)?,
        _ => String::from_utf8(bytes.to_vec()).ok()?,
    };
    Some(bare(&text).to_owned())
}

fn bare(text: &str) -> &str {
    text.trim_matches(|char: char| char.is_whitespace() || char == '\u{feff}')
}

/// Names a token without giving it away: a part of its hash.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenId(u32);

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("token-{:08x}", self.0))
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for TokenId {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<Self, ParseTokenError> {
        text.strip_prefix("token-")
            .filter(|digits| digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|digits| u32::from_str_radix(digits, 16).ok())
            .map(Self)
            .ok_or(ParseTokenError(
                "a token's id is `token-` and 8 hexadecimal digits",
            ))
    }
}

/// Why a token was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// No such token: never made, revoked, or of another cluster. Ask the head for a new one.
    #[error(
        "the join token is not known here; ask an administrator for a new one (`kolo token create`)"
    )]
    Unknown,
    /// It expired. Ask the head for a new one.
    #[error("the join token has expired; ask an administrator for a new one (`kolo token create`)")]
    Expired,
    /// It was used as often as it may be. Ask the head for a new one.
    #[error("the join token is used up; ask an administrator for a new one (`kolo token create`)")]
    UsedUp,
    /// It is for another role.
    #[error("the join token is for a {allowed}, not for a {asked}")]
    WrongRole {
        /// The role that was asked for.
        asked: Role,
        /// The role of the token.
        allowed: Role,
    },
}

/// What is known of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenInfo {
    /// Its id.
    pub id: TokenId,
    /// Its role.
    pub role: Role,
    /// When it expires, in seconds since 1970.
    pub expires_unix: u64,
    /// How often it can still be used; `None` for any number of times.
    pub uses_left: Option<u32>,
    /// Whether drivers that join with it may administer the cluster.
    pub admin: bool,
}

/// The tokens of a cluster. It stores hashes of their secrets and never the secrets.
///
/// Pure: time and randomness come in as arguments. It serializes for the head's durable state; what
/// [`TokenBook::redeem`] changed must be stored before the joiner is let in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenBook {
    entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    role: Role,
    hash: SecretHash,
    expires_unix: u64,
    #[serde(default)]
    uses_left: Option<u32>,
    #[serde(default)]
    admin: bool,
    /// The driver that made it; empty for the head itself.
    #[serde(default)]
    made_by: String,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entry").field(&self.info()).finish()
    }
}

impl Entry {
    fn info(&self) -> TokenInfo {
        TokenInfo {
            id: self.hash.id(),
            role: self.role,
            expires_unix: self.expires_unix,
            uses_left: self.uses_left,
            admin: self.admin,
        }
    }
}

/// Enough to recognise a secret of 256 random bits, and no help in guessing it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct SecretHash([u8; 32]);

impl SecretHash {
    fn of(secret: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("kolo join token secret, version 1");
        hasher.update(secret);
        Self(*hasher.finalize().as_bytes())
    }

    fn id(self) -> TokenId {
        let [a, b, c, d, ..] = self.0;
        TokenId(u32::from_be_bytes([a, b, c, d]))
    }
}

impl Serialize for SecretHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&Fingerprint(self.0))
    }
}

impl<'de> Deserialize<'de> for SecretHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        decode_hex(&String::deserialize(deserializer)?)
            .map(Self)
            .ok_or_else(|| de::Error::custom("a token's hash has 64 hexadecimal digits"))
    }
}

impl TokenBook {
    /// A book without tokens.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a token for `role`, valid for `ttl` from `now_unix` (seconds since 1970), for `uses` joins or any
    /// number of them.
    ///
    /// `secret` must be 256 fresh random bits and `fingerprint` that of the cluster's authority. A token for
    /// a role that does not join (see [`Role::joins`]) is never accepted.
    pub fn create(
        &mut self,
        role: Role,
        ttl: Duration,
        uses: Option<u32>,
        fingerprint: Fingerprint,
        now_unix: u64,
        secret: [u8; 32],
    ) -> JoinToken {
        self.prune(now_unix);
        self.entries.push(Entry {
            role,
            hash: SecretHash::of(&secret),
            expires_unix: now_unix.saturating_add(ttl.as_secs()),
            uses_left: uses,
            admin: false,
            made_by: String::new(),
        });
        JoinToken {
            role,
            fingerprint,
            secret,
        }
    }

    /// Says of the newest token who made it, and whether drivers that join with it may administer the cluster.
    pub fn describe_newest(&mut self, made_by: &str, admin: bool) {
        if let Some(entry) = self.entries.last_mut() {
            made_by.clone_into(&mut entry.made_by);
            entry.admin = admin && entry.role == Role::Driver;
        }
    }

    /// What is known of a token.
    pub fn find(&self, id: TokenId) -> Option<TokenInfo> {
        self.entries
            .iter()
            .find(|entry| entry.hash.id() == id)
            .map(Entry::info)
    }

    /// Forgets the tokens that a driver has made; how many.
    pub fn revoke_made_by(&mut self, driver: &str) -> usize {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.made_by != driver);
        before - self.entries.len()
    }

    /// Uses a token once.
    ///
    /// # Errors
    ///
    /// [`TokenError`]. The token is left as it was.
    pub fn redeem(
        &mut self,
        role: Role,
        secret: &[u8],
        now_unix: u64,
    ) -> Result<TokenId, TokenError> {
        let hash = SecretHash::of(secret);
        let mut found = None;
        // All entries are compared, and each in constant time.
        for (index, entry) in self.entries.iter().enumerate() {
            if bool::from(entry.hash.0.ct_eq(&hash.0)) {
                found = Some(index);
            }
        }
        let entry = found
            .and_then(|index| self.entries.get_mut(index))
            .filter(|entry| entry.role.joins())
            .ok_or(TokenError::Unknown)?;
        if now_unix >= entry.expires_unix {
            return Err(TokenError::Expired);
        }
        if entry.role != role {
            return Err(TokenError::WrongRole {
                asked: role,
                allowed: entry.role,
            });
        }
        if let Some(left) = &mut entry.uses_left {
            *left = left.checked_sub(1).ok_or(TokenError::UsedUp)?;
        }
        Ok(hash.id())
    }

    /// Forgets a token. Whether there was one. Members that have joined with it stay.
    pub fn revoke(&mut self, id: TokenId) -> bool {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.hash.id() != id);
        self.entries.len() < before
    }

    /// All tokens, the oldest first.
    pub fn list(&self) -> Vec<TokenInfo> {
        self.entries.iter().map(Entry::info).collect()
    }

    /// Forgets tokens that expired more than a week ago; until then their holders are told why they are
    /// refused.
    pub fn prune(&mut self, now_unix: u64) {
        const KEEP: u64 = 7 * 24 * 3600;
        self.entries
            .retain(|entry| now_unix < entry.expires_unix.saturating_add(KEEP));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_around_a_secret_in_a_file_does_not_count() {
        let pairs = |mark: u16, to_bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
            let text = "a.b\r\n".encode_utf16();
            std::iter::once(mark)
                .chain(text)
                .flat_map(to_bytes)
                .collect()
        };
        for (bytes, text) in [
            (b"a.b".to_vec(), Some("a.b")),
            (b"a.b\n".to_vec(), Some("a.b")),
            (b" \t a.b \r\n\r\n".to_vec(), Some("a.b")),
            (b"\xef\xbb\xbfa.b\r\n".to_vec(), Some("a.b")),
            (b"\xef\xbb\xbf  a.b".to_vec(), Some("a.b")),
            (b"\xef\xbb\xbf".to_vec(), Some("")),
            (b"".to_vec(), Some("")),
            (pairs(0xfeff, u16::to_le_bytes), Some("a.b")),
            (pairs(0xfeff, u16::to_be_bytes), Some("a.b")),
            (b"\xff\xfea".to_vec(), None),
            (b"a\xff".to_vec(), None),
        ] {
            assert_eq!(secret_text(&bytes).as_deref(), text, "{bytes:?}");
        }
        let token = JoinToken {
            role: Role::Node,
            fingerprint: Fingerprint([7; 32]),
            secret: [9; 32],
        };
        let text = format!("\u{feff}{token}\r\n");
        assert_eq!(text.parse::<JoinToken>(), Ok(token));
    }
}
