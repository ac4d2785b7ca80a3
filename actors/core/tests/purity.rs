//! Decisions are pure: no source of this crate, nor of `kolo-wire`, reads a clock, makes random numbers, does I/O or
//! holds a container without an order. Tests in them may.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::path::Path;

/// Words that no source may have, each with the remedy.
const FORBIDDEN: [(&str, &str); 19] = [
    ("Instant::now", "let the caller pass the time in"),
    ("SystemTime", "let the caller pass the time in"),
    (
        "elapsed",
        "it reads the clock: take the difference of two times",
    ),
    ("rand", "let the caller pass the number in"),
    ("random", "let the caller pass the number in"),
    ("getrandom", "let the caller pass the number in"),
    ("RandomState", "its order differs from run to run"),
    ("HashMap", "its order differs from run to run: use BTreeMap"),
    ("HashSet", "its order differs from run to run: use BTreeSet"),
    ("std::env", "let the caller pass the environment in"),
    ("std::fs", "let the caller do I/O"),
    ("std::io", "let the caller do I/O"),
    ("std::process", "let the caller start processes"),
    ("std::thread", "let the caller start threads"),
    ("TcpListener", "let the caller do I/O"),
    ("TcpStream", "let the caller do I/O"),
    ("UdpSocket", "let the caller do I/O"),
    ("UnixStream", "let the caller do I/O"),
    (
        "std::{",
        "name each module of it in full, so that this test sees it",
    ),
];

/// Third-party crates and crates of kolo that decisions may use: none of them does I/O or has a clock.
const DEPENDENCIES: [&str; 4] = ["bytes", "kolo-wire", "serde", "thiserror"];

/// Lines of a source with a forbidden word, and the modules in other files that it declares; all without tests.
fn check(source: &str) -> (Vec<String>, Vec<&str>) {
    let (mut faults, mut modules) = (Vec::new(), Vec::new());
    let mut of_tests = false;
    for (number, line) in (1..).zip(source.lines().map(str::trim)) {
        if line.is_empty() || line.starts_with("//") {
            continue;
        }
        if line == "#[cfg(test)]" {
            of_tests = true;
            continue;
        }
        let item = ["pub(crate) ", "pub(super) ", "pub "]
            .iter()
            .find_map(|visibility| line.strip_prefix(visibility))
            .unwrap_or(line);
        if of_tests {
            if item.starts_with("mod ") && item.ends_with('{') {
                // Clippy sees to it that nothing comes behind the tests of a file.
                break;
            }
            // Further attributes belong to the same item.
            of_tests = line.starts_with("#[");
            continue;
        }
        modules.extend(item.strip_prefix("mod ").and_then(|m| m.strip_suffix(';')));
        for (word, remedy) in FORBIDDEN {
            if has_word(line, word) {
                faults.push(format!("line {number}: {word}: {remedy}"));
            }
        }
    }
    (faults, modules)
}

/// True if `line` has `word`, and not only as a part of a longer name.
fn has_word(line: &str, word: &str) -> bool {
    let of_a_name = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let longer_before = line[..at].ends_with(of_a_name);
        let longer_behind =
            word.ends_with(of_a_name) && line[at + word.len()..].starts_with(of_a_name);
        !longer_before && !longer_behind
    })
}

/// Checks a file and the modules below it, which are in `folder`. The number of files.
fn visit(file: &Path, folder: &Path, faults: &mut Vec<String>) -> usize {
    let source = std::fs::read_to_string(file).unwrap();
    let (here, modules) = check(&source);
    faults.extend(
        here.iter()
            .map(|fault| format!("{}: {fault}", file.display())),
    );
    let below = modules.iter().map(|module| {
        let folder = folder.join(module);
        let flat = folder.with_extension("rs");
        let file = if flat.exists() {
            flat
        } else {
            folder.join("mod.rs")
        };
        visit(&file, &folder, faults)
    });
    1 + below.sum::<usize>()
}

#[test]
fn sources_are_pure() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (folder, least) in [("src", 30), ("../../transport/wire/src", 12)] {
        let folder = here.join(folder);
        let mut faults = Vec::new();
        let files = visit(&folder.join("lib.rs"), &folder, &mut faults);
        assert!(faults.is_empty(), "{}", faults.join("\n"));
        assert!(files >= least, "{files} files of {}", folder.display());
    }
}

#[test]
fn dependencies_are_pure() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    let (_, rest) = manifest.split_once("\n[dependencies]\n").unwrap();
    let names: Vec<_> = rest
        .lines()
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split([' ', '.']).next())
        .filter(|name| !name.is_empty())
        .collect();
    assert_eq!(names, DEPENDENCIES);
}

#[test]
fn each_forbidden_word_is_found() {
    for (word, _) in FORBIDDEN {
        let source = format!("use a::b;\n\nlet x = {word}(1);\n");
        let (faults, _) = check(&source);
        assert!(
            faults
                .iter()
                .any(|fault| fault.starts_with(&format!("line 3: {word}: "))),
            "{word}"
        );
        for innocent in [
            format!("/// {word}\n"),
            format!("let x = y; a{word}b(1);\n"),
            format!("#[cfg(test)]\nmod tests {{\n    {word}\n}}\n"),
            format!("#[cfg(test)]\n#[path = \"x.rs\"]\nmod tests;\n/// {word}\n"),
        ] {
            let (faults, modules) = check(&innocent);
            assert_eq!((faults, modules), (Vec::new(), Vec::new()), "{innocent}");
        }
    }
}

#[test]
fn a_list_of_modules_of_std_is_found() {
    let (faults, _) = check("use std::{fs, mem};");
    assert_eq!(faults.len(), 1, "{faults:?}");
}

#[test]
fn what_comes_behind_a_module_of_tests_is_checked() {
    let source = "#[cfg(test)]\nmod tests;\npub mod one;\npub(crate) mod two;\nmod three;\nfn f() { Instant::now() }\n";
    let (faults, modules) = check(source);
    assert_eq!(
        faults,
        ["line 6: Instant::now: let the caller pass the time in"]
    );
    assert_eq!(modules, ["one", "two", "three"]);
}
