use std::path::Path;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use super::*;

const DAEMON: Daemon = Daemon {
    name: "kolo-test",
    // Nothing in the environment of a test begins like this.
    prefix: "KOLO_SETTINGS_TEST",
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Colour {
    Red,
    Green,
}

fn seconds(text: &str) -> Result<Duration, String> {
    text.strip_suffix('s')
        .and_then(|number| number.parse().ok())
        .map(Duration::from_secs)
        .ok_or_else(|| "expected something like 3s".to_owned())
}

#[derive(Debug, Parser)]
#[command(name = "kolo-test")]
struct Args {
    /// Where it is
    #[arg(long)]
    state_dir: String,
    /// How long
    #[arg(long, default_value = "3s", value_parser = seconds)]
    lease: Duration,
    /// How many
    #[arg(long)]
    cpus: Option<f64>,
    /// Which
    #[arg(long, value_enum, default_value_t = Colour::Red)]
    colour: Colour,
    /// More
    #[arg(long = "resource")]
    resources: Vec<String>,
    /// Has a name of its own; the test sets none
    #[arg(long, env = "PATH", hide_env_values = true)]
    search: Option<String>,
}

fn file(text: &str) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kolo.toml");
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (dir, path)
}

fn read(args: &[&str]) -> Result<Loaded<Args>, String> {
    let args: Vec<OsString> = ["kolo-test"]
        .iter()
        .chain(args)
        .map(OsString::from)
        .collect();
    load(DAEMON, &args).map_err(|error| match error {
        LoadError::Arguments(error) => error.to_string(),
        LoadError::File(error) => error.to_string(),
    })
}

fn with_file(text: &str, args: &[&str]) -> Result<Loaded<Args>, String> {
    let (_dir, path) = file(text);
    read(&[&["--config", &path], args].concat())
}

#[test]
fn a_table_is_a_list_of_names_and_values() {
    let text = "state_dir = '/a'\n[resource]\nfpga = 2\nlicence = 0.5";
    assert_eq!(
        with_file(text, &[]).unwrap().args.resources,
        ["fpga=2", "licence=0.5"]
    );
}

#[test]
fn what_is_printed_says_the_same_again() {
    let text = "state_dir = 'a \"b\\'\ncpus = 2\nresource = ['a=1', 'b=2']";
    let first = with_file(text, &["--colour", "green"]).unwrap();
    let printed = first.render();
    assert!(
        printed.contains("colour = \"green\"  # flag\n"),
        "{printed}"
    );
    assert!(printed.contains("cpus = \"2\"  # file\n"), "{printed}");
    assert!(printed.contains("lease = \"3s\"  # default\n"), "{printed}");
    let again = with_file(&printed, &[]).unwrap();
    let values = |loaded: &Loaded<Args>| -> Vec<_> {
        loaded
            .settings
            .iter()
            .map(|setting| (setting.key.clone(), setting.values.clone()))
            .collect()
    };
    assert_eq!(values(&again), values(&first));
    let unset = read(&["--state-dir", "/a"]).unwrap().render();
    assert!(unset.contains("# cpus is not set\n"), "{unset}");
}

#[test]
fn unknown_keys_are_named_with_what_may_have_been_meant() {
    for (given, meant) in [
        ("state-dir", "`state_dir`"),
        ("statedir", "`state_dir`"),
        ("leese", "`lease`"),
        ("resources", "`resource`"),
        ("color", "`colour`"),
        ("CPUS", "`cpus`"),
    ] {
        let error = with_file(&format!("{given} = 1"), &[]).unwrap_err();
        let expected = format!("`{given}` is no setting of kolo-test; did you mean {meant}?");
        assert!(error.contains(&expected), "{error}");
    }
    for given in ["zzz", "config", "help", "print_config"] {
        let error = with_file(&format!("{given} = 1"), &[]).unwrap_err();
        assert!(error.contains("no setting"), "{error}");
    }
    let error = with_file("[lease]\nx = 1", &[]).unwrap_err();
    assert!(error.contains("`lease`: text, a number"), "{error}");
}

#[test]
fn wrong_values_are_told_with_file_key_and_what_is_allowed() {
    for (text, expected) in [
        (
            "lease = 3",
            "`lease`: `3` is not usable: expected something like 3s",
        ),
        ("cpus = 'two'", "`cpus`: `two` is not usable: invalid float"),
        (
            "colour = 'blue'",
            "`colour`: `blue` is not usable; allowed are red, green",
        ),
        (
            "resource = 'a=1'",
            "`resource`: a list is expected, not string",
        ),
        ("cpus = [1]", "`cpus`: text, a number"),
        ("state_dir = ", "is not TOML"),
        ("lease = '3s'\nlease = '4s'", "is not TOML"),
    ] {
        let error = with_file(text, &["--state-dir", "/a"]).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
        assert!(error.contains("kolo.toml"), "{error}");
    }
    let error = read(&["--config", "/no/such/file"]).unwrap_err();
    assert!(error.contains("/no/such/file"), "{error}");
    // What is missing is told as ever.
    let error = with_file("cpus = 1", &[]).unwrap_err();
    assert!(error.contains("--state-dir"), "{error}");
}

#[test]
fn help_needs_no_file() {
    let error = read(&["--config", "/no/such/file", "--help"]).unwrap_err();
    assert!(error.contains("--print-config"), "{error}");
    assert!(Path::new("/no/such/file").metadata().is_err());
}
