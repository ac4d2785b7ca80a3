//! The shape of the sources: short files, and no circle of modules.
//!
//! Two modules of one parent form a circle if each of them, or of what is below it, names something of the other one. Paths that
//! begin with `crate`, `self` or `super` count, those of tests do not.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Most lines of a source file.
const MOST_LINES: usize = 600;

/// Folders with the sources of a crate.
const CRATES: [&str; 12] = [
    "actors/core/src",
    "actors/src",
    "benches/src",
    "collectives/src",
    "process/src",
    "runtime/src",
    "sdk/macros/src",
    "sdk/src",
    "tests/harness/src",
    "tests/simulation/src",
    "transport/src",
    "transport/wire/src",
];

type Module = Vec<String>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_file_is_longer_than_600_lines() {
    let mut files = Vec::new();
    for room in [
        "actors",
        "benches",
        "collectives",
        "examples",
        "process",
        "runtime",
        "sdk",
        "tests",
        "transport",
    ] {
        sources(&root().join(room), &mut files);
    }
    assert!(files.len() > 100, "only {} files were found", files.len());
    let long: Vec<_> = files
        .iter()
        .map(|file| (file, fs::read_to_string(file).unwrap().lines().count()))
        .filter(|(_, lines)| *lines > MOST_LINES)
        .collect();
    assert!(
        long.is_empty(),
        "files over {MOST_LINES} lines, to be cut by their types: {long:#?}"
    );
}

/// The module of a file in a folder of sources; none of tests and of programs.
fn module_of(file: &Path) -> Option<Module> {
    let mut path: Module = file
        .with_extension("")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if matches!(
        path.last().map(String::as_str),
        Some("mod" | "lib" | "main")
    ) {
        path.pop();
    }
    let is_test =
        |part: &String| part.starts_with("tests") || part.ends_with("_tests") || part == "bin";
    (!path.iter().any(is_test)).then_some(path)
}

/// The code of a file up to its tests, without comments.
fn code(source: &str) -> String {
    let lines = source
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let lines: Vec<&str> = lines
        .take_while(|line| !line.starts_with("mod tests {"))
        .collect();
    lines.join("\n")
}

/// The paths in `code` that begin in the crate: where they begin, and what follows. A list in braces gives a path for each entry.
fn paths<'a>(code: &'a str, module: &Module) -> Vec<Module> {
    let mut found = Vec::new();
    for start in ["crate::", "self::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back();
            // The rest of a longer word, or of a path that begins before.
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let mut base = match start {
                "crate::" => Module::new(),
                _ => module.clone(),
            };
            let mut rest: &'a str = &code[at..];
            for word in ["crate::", "self::"] {
                rest = rest.strip_prefix(word).unwrap_or(rest);
            }
            while let Some(after) = rest.strip_prefix("super::") {
                base.pop();
                rest = after;
            }
            expand(&base, rest, &mut found);
        }
    }
    found
}

/// Reads `a::b::{c, d::{e, f}}` behind `base`.
fn expand(base: &Module, mut rest: &str, found: &mut Vec<Module>) {
    let mut path = base.clone();
    loop {
        if let Some(list) = rest.strip_prefix('{') {
            let (mut depth, mut from) = (0, 0);
            for (at, c) in list.char_indices() {
                match c {
                    '{' => depth += 1,
                    ',' | '}' if depth == 0 => {
                        expand(&path, list[from..at].trim_start(), found);
                        from = at + 1;
                        if c == '}' {
                            return;
                        }
                    }
                    '}' => depth -= 1,
                    _ => {}
                }
            }
            return;
        }
        let end = rest
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        if end > 0 {
            path.push(rest[..end].to_owned());
        }
        match rest[end..].strip_prefix("::") {
            Some(after) if end > 0 => rest = after,
            _ => return found.push(path),
        }
    }
}

/// For each parent, which of its children name which others.
fn uses(
    modules: &BTreeMap<Module, String>,
) -> BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> {
    let mut uses: BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, source) in modules {
        for mut path in paths(&code(source), module) {
            while !modules.contains_key(&path) && path.pop().is_some() {}
            let common = module.iter().zip(&path).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(common), path.get(common)) {
                let room = uses.entry(module[..common].to_vec()).or_default();
                room.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    uses
}

/// The modules of a room from which a path of uses leads back to them.
fn circle(room: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<&String> {
    let reaches_itself = |start: &&String| {
        let mut seen = BTreeSet::new();
        let mut next: Vec<&String> = room[*start].iter().collect();
        while let Some(module) = next.pop() {
            if seen.insert(module) {
                next.extend(room.get(module).into_iter().flatten());
            }
        }
        seen.contains(*start)
    };
    room.keys().filter(reaches_itself).collect()
}

#[test]
fn modules_form_no_circle() {
    let mut faults = Vec::new();
    for room in CRATES {
        let folder = root().join(room);
        let mut files = Vec::new();
        sources(&folder, &mut files);
        let modules: BTreeMap<Module, String> = files
            .iter()
            .filter_map(|file| {
                let module = module_of(file.strip_prefix(&folder).unwrap())?;
                Some((module, fs::read_to_string(file).unwrap()))
            })
            .collect();
        for (parent, children) in &uses(&modules) {
            let found = circle(children);
            if !found.is_empty() {
                faults.push(format!("{room}, below `{}`: {found:?}", parent.join("::")));
            }
        }
    }
    assert!(
        faults.is_empty(),
        "circles of modules:\n{}",
        faults.join("\n")
    );
}

#[test]
fn a_circle_is_found() {
    let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
    let source =
        "use crate::b::{One, c::{Two, Three}};\nuse super::d::Four;\n// use crate::e::Five;\n";
    let found = paths(&code(source), &module("a"));
    let named = ["b::One", "b::c::Two", "b::c::Three", "d::Four"].map(module);
    assert_eq!(found, named);
    let modules = [
        ("a", source),
        ("b", ""),
        ("b::c", "use crate::a::X;"),
        ("d", ""),
        ("e", "use crate::a::X;"),
    ];
    let modules = modules
        .map(|(path, text)| (module(path), text.to_owned()))
        .into();
    let uses = uses(&modules);
    assert_eq!(
        circle(&uses[&Module::new()]),
        BTreeSet::from([&"a".to_owned(), &"b".to_owned()])
    );
}
