//! What this program can run on workers: every `#[kolo::function]` and `#[kolo::executable]` in it.
//!
//! The linker collects the entries (crate `linkme`), so nothing has to be registered by hand and nothing
//! runs before `main`. Driver and worker are the same executable and so have the same entries; a worker
//! tells [`registry_digest`] in its hello, and a job whose workers differ is refused.
#![allow(unsafe_code)] // linkme's attribute names the section of the binary that the entries are in

use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

use strsim::levenshtein;

use crate::__private::{CreateFn, FunctionFn, MethodFn, PartsFn};

/// The functions of this program, in no particular order.
#[doc(hidden)]
#[linkme::distributed_slice]
pub static FUNCTIONS: [FunctionEntry];

/// The executables of this program, in no particular order.
#[doc(hidden)]
#[linkme::distributed_slice]
pub static CLASSES: [ClassEntry];

/// A registered function.
#[derive(Clone, Copy)]
pub struct FunctionEntry {
    pub(crate) name: &'static str,
    pub(crate) signature: &'static str,
    pub(crate) location: &'static str,
    pub(crate) run: FunctionFn,
}

/// A registered executable: a type with its constructor and methods.
#[derive(Clone, Copy)]
pub struct ClassEntry {
    pub(crate) name: &'static str,
    pub(crate) signature: &'static str,
    pub(crate) location: &'static str,
    pub(crate) create: CreateFn,
    pub(crate) methods: &'static [MethodEntry],
    pub(crate) parts: Option<PartsFn>,
}

/// A method of a [`ClassEntry`].
#[derive(Clone, Copy)]
pub struct MethodEntry {
    pub(crate) name: &'static str,
    pub(crate) signature: &'static str,
    pub(crate) run: MethodFn,
}

impl FunctionEntry {
    #[doc(hidden)]
    #[must_use]
    pub const fn new(
        name: &'static str,
        signature: &'static str,
        location: &'static str,
        run: FunctionFn,
    ) -> Self {
        Self {
            name,
            signature,
            location,
            run,
        }
    }
}

impl ClassEntry {
    #[doc(hidden)]
    #[must_use]
    pub const fn new(
        name: &'static str,
        signature: &'static str,
        location: &'static str,
        create: CreateFn,
        methods: &'static [MethodEntry],
    ) -> Self {
        Self {
            name,
            signature,
            location,
            create,
            methods,
            parts: None,
        }
    }

    /// The values have a state that survives changes of their group.
    #[doc(hidden)]
    #[must_use]
    pub const fn elastic(mut self, parts: PartsFn) -> Self {
        self.parts = Some(parts);
        self
    }

    /// Its methods, in the order of the source.
    #[must_use]
    pub fn methods(&self) -> &'static [MethodEntry] {
        self.methods
    }

    /// The method of this name.
    ///
    /// # Errors
    ///
    /// [`UnknownName`].
    pub fn method(&self, name: &str) -> Result<&'static MethodEntry, UnknownName> {
        // A type has a handful of methods: comparing lengths and bytes beats hashing.
        self.methods
            .iter()
            .find(|method| method.name == name)
            .ok_or_else(|| {
                UnknownName::new(
                    Kind::Method(self.name),
                    name,
                    self.methods.iter().map(|method| method.name),
                )
            })
    }
}

impl MethodEntry {
    #[doc(hidden)]
    #[must_use]
    pub const fn new(name: &'static str, signature: &'static str, run: MethodFn) -> Self {
        Self {
            name,
            signature,
            run,
        }
    }
}

macro_rules! as_in_the_source {
    ($($entry:ident, $name:literal, $signature:literal;)*) => {$(
        impl $entry {
            #[doc = $name]
            #[must_use]
            pub fn name(&self) -> &'static str {
                self.name
            }

            #[doc = $signature]
            #[must_use]
            pub fn signature(&self) -> &'static str {
                self.signature
            }
        }

        impl fmt::Debug for $entry {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}{}", self.name, self.signature)
            }
        }
    )*};
}
as_in_the_source! {
    FunctionEntry, "The name under which it is called: module path, `::` and the function's own name.",
        "Its arguments and result as in the source.";
    ClassEntry, "The name under which it is created: module path, `::` and the type's own name.",
        "The arguments of `new` as in the source.";
    MethodEntry, "The method's name.", "Its arguments and result as in the source.";
}

/// Why a program can't take part in any job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// Two entries have one name, so that a call could mean either. This happens to items inside of
    /// function bodies, whose paths are those of the module. Rename one, or move it to a module of its own.
    #[error(
        "two {kind}s are registered as `{name}`, at {first} and at {second}; rename one of them or move it to another module"
    )]
    Duplicate {
        /// `function` or `executable`.
        kind: &'static str,
        /// The name.
        name: String,
        /// File and line of one.
        first: &'static str,
        /// File and line of the other.
        second: &'static str,
    },
}

/// What a name was to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Function,
    Class,
    Method(&'static str),
}

/// A name that is not registered, with those that look most like it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownName {
    kind: Kind,
    given: String,
    near: Vec<&'static str>,
    known: usize,
}

/// Names that a message suggests.
const SUGGESTIONS: usize = 3;

impl UnknownName {
    fn new(kind: Kind, given: &str, known: impl Iterator<Item = &'static str> + Clone) -> Self {
        Self {
            kind,
            given: given.to_owned(),
            known: known.clone().count(),
            near: nearest(given, known),
        }
    }

    /// The registered names that look most like the one that was given, the best first; at most three.
    #[must_use]
    pub fn near(&self) -> &[&'static str] {
        &self.near
    }
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = &self.given;
        let plural = match self.kind {
            Kind::Function => {
                write!(f, "this program has no function `{given}`")?;
                "functions"
            }
            Kind::Class => {
                write!(f, "this program has no executable `{given}`")?;
                "executables"
            }
            Kind::Method(class) => {
                write!(f, "`{class}` has no method `{given}`")?;
                "methods"
            }
        };
        match &self.near[..] {
            [] => write!(f, " (it has {} {plural})", self.known),
            near => {
                f.write_str("; did you mean ")?;
                for (index, name) in near.iter().enumerate() {
                    if index > 0 {
                        f.write_str(" or ")?;
                    }
                    write!(f, "`{name}`")?;
                }
                f.write_str("?")
            }
        }
    }
}

impl std::error::Error for UnknownName {}

/// The known names that are close enough to be what was meant.
fn nearest(given: &str, known: impl Iterator<Item = &'static str>) -> Vec<&'static str> {
    // Names come from the network: what is very long is no typing error.
    let given: String = given.chars().take(256).collect();
    let last = |path: &str| path.rsplit("::").next().unwrap_or_default().to_owned();
    let given_last = last(&given);
    let mut scored: Vec<(usize, &'static str)> = known
        .filter_map(|name| {
            let name_last = last(name);
            let apart = levenshtein(&given_last, &name_last);
            // The same name in another module is the likeliest, then a few wrong letters in the last part.
            let close = apart <= (given_last.chars().count().max(3)) / 3;
            close.then(|| (apart * 1000 + levenshtein(&given, name), name))
        })
        .collect();
    scored.sort_unstable();
    scored
        .into_iter()
        .map(|(_, name)| name)
        .take(SUGGESTIONS)
        .collect()
}

/// The entries by name.
#[derive(Debug)]
pub struct Registry {
    functions: HashMap<&'static str, &'static FunctionEntry>,
    classes: HashMap<&'static str, &'static ClassEntry>,
    digest: u64,
}

impl Registry {
    /// The registry of these entries.
    ///
    /// # Errors
    ///
    /// [`RegistryError::Duplicate`].
    pub fn new(
        functions: &'static [FunctionEntry],
        classes: &'static [ClassEntry],
    ) -> Result<Self, RegistryError> {
        Ok(Self {
            functions: by_name("function", functions, |entry| (entry.name, entry.location))?,
            classes: by_name("executable", classes, |entry| (entry.name, entry.location))?,
            digest: digest(functions, classes),
        })
    }

    /// The registry of this program.
    ///
    /// # Errors
    ///
    /// [`RegistryError::Duplicate`].
    pub fn get() -> Result<&'static Self, &'static RegistryError> {
        static REGISTRY: OnceLock<Result<Registry, RegistryError>> = OnceLock::new();
        REGISTRY
            .get_or_init(|| Registry::new(&FUNCTIONS, &CLASSES))
            .as_ref()
    }

    /// The function of this name.
    ///
    /// # Errors
    ///
    /// [`UnknownName`].
    pub fn function(&self, name: &str) -> Result<&'static FunctionEntry, UnknownName> {
        self.functions
            .get(name)
            .copied()
            .ok_or_else(|| UnknownName::new(Kind::Function, name, self.functions.keys().copied()))
    }

    /// The executable of this name.
    ///
    /// # Errors
    ///
    /// [`UnknownName`].
    pub fn class(&self, name: &str) -> Result<&'static ClassEntry, UnknownName> {
        self.classes
            .get(name)
            .copied()
            .ok_or_else(|| UnknownName::new(Kind::Class, name, self.classes.keys().copied()))
    }

    /// All functions, by name.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static FunctionEntry> {
        let mut all: Vec<_> = self.functions.values().copied().collect();
        all.sort_unstable_by_key(|entry| entry.name);
        all
    }

    /// All executables, by name.
    #[must_use]
    pub fn classes(&self) -> Vec<&'static ClassEntry> {
        let mut all: Vec<_> = self.classes.values().copied().collect();
        all.sort_unstable_by_key(|entry| entry.name);
        all
    }

    /// As [`registry_digest`].
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }
}

fn by_name<T>(
    kind: &'static str,
    entries: &'static [T],
    name_and_location: impl Fn(&T) -> (&'static str, &'static str),
) -> Result<HashMap<&'static str, &'static T>, RegistryError> {
    let mut map: HashMap<&'static str, &'static T> = HashMap::with_capacity(entries.len());
    for entry in entries {
        let (name, second) = name_and_location(entry);
        if let Some(other) = map.insert(name, entry) {
            let (_, first) = name_and_location(other);
            return Err(RegistryError::Duplicate {
                kind,
                name: name.to_owned(),
                first: first.min(second),
                second: first.max(second),
            });
        }
    }
    Ok(map)
}

fn digest(functions: &[FunctionEntry], classes: &[ClassEntry]) -> u64 {
    let mut lines: Vec<String> = functions
        .iter()
        .map(|entry| format!("fn {entry:?}\n"))
        .chain(classes.iter().flat_map(|class| {
            std::iter::once(format!("type {class:?}\n")).chain(
                class
                    .methods
                    .iter()
                    .map(|method| format!("method {}::{method:?}\n", class.name)),
            )
        }))
        .collect();
    // The linker's order is not a promise.
    lines.sort_unstable();
    let mut hasher = blake3::Hasher::new();
    for line in &lines {
        hasher.update(line.as_bytes());
    }
    let hash = hasher.finalize();
    let (first, _) = hash
        .as_bytes()
        .split_first_chunk::<8>()
        .expect("a BLAKE3 hash has 32 bytes");
    u64::from_be_bytes(*first)
}

/// A digest of all registered names and signatures. Programs with the same functions and executables have
/// the same one; every worker of a job must.
#[must_use]
pub fn registry_digest() -> u64 {
    match Registry::get() {
        Ok(registry) => registry.digest,
        Err(_) => digest(&FUNCTIONS, &CLASSES),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_may_be_meant_come_best_first() {
        let known = [
            "app::train",
            "app::trial",
            "app::eval",
            "app::sub::train",
            "other::restrain",
        ];
        let near = |given: &str| nearest(given, known.into_iter());
        // The same name elsewhere, then what is one letter away.
        assert_eq!(near("app::train2"), ["app::train", "app::sub::train"]);
        assert_eq!(near("wrong::train")[..2], ["app::train", "app::sub::train"]);
        assert_eq!(near("app::evil"), ["app::eval"]);
        assert_eq!(near("app::something_else"), [""; 0]);
        assert_eq!(near(""), [""; 0]);
        assert_eq!(near(&"x".repeat(100_000)), [""; 0]);
        let all_alike = ["a1", "a2", "a3", "a4", "a5"];
        assert_eq!(nearest("a0", all_alike.into_iter()).len(), SUGGESTIONS);
    }

    #[test]
    fn what_is_not_known_is_told_with_what_is() {
        let none = UnknownName::new(Kind::Function, "f", std::iter::empty());
        assert_eq!(
            none.to_string(),
            "this program has no function `f` (it has 0 functions)"
        );
        let one = UnknownName::new(Kind::Method("app::T"), "runn", ["run", "stop"].into_iter());
        assert_eq!(
            one.to_string(),
            "`app::T` has no method `runn`; did you mean `run`?"
        );
        assert_eq!(one.near(), ["run"]);
    }
}
