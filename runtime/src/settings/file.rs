//! The file with settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::Daemon;

/// The key of a setting, and whether it may have several values.
type Key = (String, bool);

/// From 0 to 1: how like a name what was given must be to be taken for it.
const ALIKE: f64 = 0.75;

/// What is wrong with a file of settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The file can't be read. Check path and rights.
    #[error("the settings can't be read from {path}: {error}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        error: std::io::Error,
    },
    /// The file is not TOML. Correct it at the line that is named.
    #[error("{path} is not TOML: {reason}", path = path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and column.
        reason: String,
    },
    /// A key is no setting of the daemon. Correct or remove it.
    #[error("{path}: `{key}` is no setting of {daemon}; {hint}", path = path.display())]
    Unknown {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Whose settings these are.
        daemon: &'static str,
        /// What may have been meant.
        hint: String,
    },
    /// A value can't be used. Give one that is allowed.
    #[error("{path}: `{key}`: {reason}", path = path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong, and what is allowed.
        reason: String,
    },
}

/// What a file says, by key, as text that the parser of a flag reads.
#[derive(Debug, Default)]
pub(super) struct Values {
    path: PathBuf,
    values: BTreeMap<String, Vec<String>>,
}

impl Values {
    pub(super) fn read(daemon: Daemon, path: &Path, keys: &[Key]) -> Result<Self, SettingsError> {
        let text = std::fs::read_to_string(path).map_err(|error| SettingsError::Read {
            path: path.to_owned(),
            error,
        })?;
        let table: Table =
            text.parse()
                .map_err(|error: toml::de::Error| SettingsError::Syntax {
                    path: path.to_owned(),
                    reason: error.to_string().trim_end().to_owned(),
                })?;
        let mut all = Self {
            path: path.to_owned(),
            values: BTreeMap::new(),
        };
        for (name, value) in table {
            let Some((_, many)) = keys.iter().find(|(key, _)| *key == name) else {
                return Err(SettingsError::Unknown {
                    path: path.to_owned(),
                    hint: suggest(daemon, &name, keys),
                    key: name,
                    daemon: daemon.name,
                });
            };
            let texts = texts(*many, &value).map_err(|reason| all.wrong(&name, reason))?;
            all.values.insert(name, texts);
        }
        Ok(all)
    }

    pub(super) fn wrong(&self, key: &str, reason: String) -> SettingsError {
        SettingsError::Value {
            path: self.path.clone(),
            key: key.to_owned(),
            reason,
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&[String]> {
        self.values.get(key).map(Vec::as_slice)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.values
            .iter()
            .map(|(key, values)| (key.as_str(), values.as_slice()))
    }
}

fn texts(many: bool, value: &Value) -> Result<Vec<String>, String> {
    match value {
        Value::Array(values) if many => values.iter().map(text).collect(),
        // `fpga = 2` under `[resource]` is `--resource fpga=2`.
        Value::Table(table) if many => table
            .iter()
            .map(|(name, value)| Ok(format!("{name}={}", text(value)?)))
            .collect(),
        value if many => Err(format!("a list is expected, not {}", value.type_str())),
        value => Ok(vec![text(value)?]),
    }
}

fn text(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        Value::Boolean(truth) => Ok(truth.to_string()),
        other => Err(format!(
            "text, a number, true or false is expected, not {}",
            other.type_str()
        )),
    }
}

/// The key that is most like what was written.
fn suggest(daemon: Daemon, given: &str, keys: &[Key]) -> String {
    let spelt = given.to_ascii_lowercase().replace('-', "_");
    match nearest(&spelt, keys.iter().map(|(key, _)| key.as_str())) {
        Some(key) => format!("did you mean `{key}`?"),
        None => format!("`{} --print-config` shows all that there are", daemon.name),
    }
}

/// The name that may have been meant, if one is like what was given: also where two letters have changed places in a short one.
pub(crate) fn nearest<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let likeness = |name: &str| match strsim::osa_distance(given, name) {
        0 | 1 if name.len() > 2 => 1.0,
        _ => strsim::jaro_winkler(given, name),
    };
    names
        .map(|name| (likeness(name), name))
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .filter(|(likeness, _)| *likeness > ALIKE)
        .map(|(_, name)| name)
}
