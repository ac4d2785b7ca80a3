//! What the documents name exists.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the package is in a folder of the workspace")
        .to_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All documents: those at the root, and what is in `docs/`.
fn documents() -> Vec<PathBuf> {
    let at_the_root = [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
    ];
    let mut all: Vec<_> = at_the_root.iter().map(|name| root().join(name)).collect();
    all.push(root().join("tests/README.md"));
    let docs = std::fs::read_dir(root().join("docs")).expect("there is a folder docs");
    all.extend(
        docs.map(|entry| entry.expect("it can be listed").path())
            .filter(|path| path.extension().is_some_and(|end| end == "md")),
    );
    all
}

/// The pieces of `text` between `open` and `close`.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<&'a str> {
    text.split(open)
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(close)?.0))
        .collect()
}

/// Whether a document has the heading that a link names: its words in small letters, with `-` between them.
fn has_heading(text: &str, anchor: &str) -> bool {
    text.lines()
        .filter(|line| line.starts_with('#'))
        .any(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| if c == ' ' { '-' } else { c });
            kept.eq(anchor.chars())
        })
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut links = 0;
    for document in documents() {
        let text = read(&document);
        for link in between(&text, "](", ")") {
            if link.starts_with("http") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let folder = document.parent().expect("a document is in a folder");
            let target = match file {
                "" => document.clone(),
                file => folder.join(file),
            };
            let lost = format!("{} links to {link}, which is not there", document.display());
            assert!(target.exists(), "{lost}");
            assert!(
                anchor.is_empty() || has_heading(&read(&target), anchor),
                "{lost}"
            );
            links += 1;
        }
    }
    assert!(links > 10, "only {links} links were found");
}

/// How many tests the table under a heading of a document names; all of them exist.
fn tests_in_table(document: &str, head: &str) -> usize {
    let text = read(&root().join(document));
    let table = text.split_once(head).expect("the table is there").1;
    let mut tests = 0;
    for row in table.lines().filter(|line| line.starts_with("| ")) {
        // What it is about may have words of code as well.
        let row = row.splitn(3, '|').nth(2).unwrap_or_default();
        let mut source = None;
        for name in row.split('`').skip(1).step_by(2) {
            if name.contains('/') {
                source = Some((name, read(&root().join(name))));
                continue;
            }
            let Some((file, text)) = source.as_ref() else {
                continue;
            };
            assert!(
                text.contains(&format!("fn {name}(")),
                "{file} has no test {name}"
            );
            tests += 1;
        }
    }
    tests
}

#[test]
fn tests_that_show_a_promise_exist() {
    let tests = tests_in_table("docs/security.md", "| promise | tests |");
    assert!(tests > 20, "only {tests} tests were found");
}

#[test]
fn tests_that_have_the_names_of_horovods_exist() {
    let tests = tests_in_table("tests/README.md", "| case | here |");
    assert!(tests >= 35, "only {tests} tests were found");
}

#[test]
fn the_program_in_the_readme_is_the_example() {
    let readme = read(&root().join("README.md"));
    let program = read(&root().join("examples/counter/main.rs"));
    assert!(
        readme.contains(&format!("```rust\n{program}```\n")),
        "README.md and examples/counter/main.rs differ: copy the example into the README"
    );
}
