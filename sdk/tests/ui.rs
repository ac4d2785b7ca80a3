//! What the macros and the compiler say to what they do not accept: each `tests/ui/*.rs` is a program with mistakes, and
//! beside it, in `*.stderr`, is what they say. `KOLO_BLESS=1` writes it anew; look at the difference before it is kept.
//!
//! The programs are checked against the library that this test itself is linked with, so nothing is built a second time.

// Clippy does not see that all of this is a test.
#![allow(clippy::unwrap_used)]

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

#[test]
fn mistakes_are_told_as_expected() {
    let mut cases: Vec<PathBuf> = std::fs::read_dir("tests/ui")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    cases.sort();
    assert!(!cases.is_empty());
    let scratch = tempfile::tempdir().unwrap();
    let deps = std::env::current_exe().unwrap();
    let deps = deps.parent().unwrap();
    // While cargo's own lock is held, nobody builds these libraries anew.
    let lock = File::open(deps.with_file_name(".cargo-lock"));
    if let Ok(lock) = &lock {
        lock.lock_shared().unwrap();
    }
    let library = library(deps, scratch.path());
    let bless = std::env::var_os("KOLO_BLESS").is_some();
    let mut wrong = String::new();
    for case in cases {
        let said = mistakes(&case, &library, scratch.path());
        let file = case.with_extension("stderr");
        if bless {
            std::fs::write(&file, &said).unwrap();
        }
        let expected = std::fs::read_to_string(&file).unwrap_or_default();
        if said != expected {
            let (case, file) = (case.display(), file.display());
            writeln!(
                wrong,
                "\n== {case} is not told as in {file}\n-- expected\n{expected}\n-- said\n{said}"
            )
            .unwrap();
        }
    }
    assert!(
        wrong.is_empty(),
        "{wrong}\nKOLO_BLESS=1 takes what was said"
    );
}

/// This crate, as cargo has built it: for this test, or later with other features.
fn library(deps: &Path, scratch: &Path) -> PathBuf {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        matches!(name.split_once('.'), Some((stem, "rlib")) if stem.starts_with("libkolo-"))
    };
    let mut all: Vec<PathBuf> = std::fs::read_dir(deps)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(is_ours)
        .collect();
    all.sort_by_key(|path| path.metadata().and_then(|file| file.modified()).unwrap());
    let empty = scratch.join("empty.rs");
    std::fs::write(&empty, "extern crate kolo; fn main() {}").unwrap();
    // Older ones may be of other sources.
    all.into_iter()
        .rev()
        .find(|library| compile(&empty, library, scratch).status.success())
        .expect("this test is linked with it; if its sources were changed and built meanwhile, run it again")
}

fn compile(program: &Path, library: &Path, scratch: &Path) -> Output {
    let deps = library.parent().unwrap();
    // The one that has built the library; cargo is beside it.
    Command::new(Path::new(env!("CARGO")).with_file_name("rustc"))
        .args(["--edition=2024", "--crate-type=bin", "--crate-name=case"])
        .args(["--emit=metadata", "--color=never", "--diagnostic-width=140"])
        .args([OsStr::new("--out-dir"), scratch.as_os_str()])
        .arg(format!("--extern=kolo={}", library.display()))
        .arg(format!("-Ldependency={}", deps.display()))
        .arg(program)
        .output()
        .unwrap()
}

/// What the compiler says to a program, as far as it is the same on every machine.
fn mistakes(case: &Path, library: &Path, scratch: &Path) -> String {
    let output = compile(case, library, scratch);
    let text = String::from_utf8(output.stderr).unwrap();
    let accepted = output.status.success();
    assert!(!accepted, "{} is accepted:\n{text}", case.display());
    normalized(&text)
}

/// Columns as wide as for three digits, and of other files than the program only their names.
fn normalized(text: &str) -> String {
    let mut out = String::new();
    let mut elsewhere = false;
    for line in text.lines() {
        let rest = line.trim_start();
        if [
            "error: aborting due to",
            "Some errors have",
            "For more information about",
        ]
        .iter()
        .any(|start| rest.starts_with(start))
        {
            continue;
        }
        let number_len = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, code) = rest.split_at(number_len);
        let code = code.trim_start();
        if let Some(place) = ["--> ", "::: "]
            .iter()
            .find_map(|arrow| rest.strip_prefix(arrow))
        {
            elsewhere = !place.starts_with("tests/ui/");
            let file = place.split(':').next().unwrap_or_default();
            let place = if elsewhere { file } else { place };
            writeln!(out, "   {}{place}", &rest[..4]).unwrap();
        } else if code == "|" || code.starts_with("| ") || rest == "..." {
            if !elsewhere {
                let bar = if rest == "..." {
                    rest.to_owned()
                } else {
                    format!("{number:>3} {code}")
                };
                writeln!(out, "{bar}").unwrap();
            }
        } else if rest.starts_with("= ") {
            writeln!(out, "    {rest}").unwrap();
        } else {
            elsewhere = false;
            writeln!(out, "{line}").unwrap();
        }
    }
    format!("{}\n", out.trim_end())
}
