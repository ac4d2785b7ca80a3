//! Every setting has a flag, a variable and a key, which agree, and the documents list them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Output;

use crate::process::{HEAD, NODE, command};

/// A setting, as a daemon itself says.
#[derive(Debug)]
struct Setting {
    key: String,
    flag: String,
    variable: String,
    help: String,
    default: String,
}

/// What is needed to print the settings of a daemon.
fn needed(program: &str) -> &'static [(&'static str, &'static str)] {
    if program == NODE {
        &[("head", "head.example:7700")]
    } else {
        &[("state_dir", "/var/lib/kolo")]
    }
}

/// Two good values for each setting, so that one can go before the other.
fn samples(key: &str) -> [&'static str; 2] {
    match key {
        "state_dir" | "bearer_file" | "node_token_file" | "driver_token_file" | "token_file" => {
            ["/one", "/two"]
        }
        "listen" | "http_listen" | "advertise" => ["10.0.0.1:1", "10.0.0.2:2"],
        "token_ttl"
        | "certificate_life"
        | "worker_certificate_life"
        | "drain_timeout"
        | "stop_timeout"
        | "join_timeout"
        | "orphan_timeout" => ["1h", "2h"],
        "output_memory" | "program_cache_size" | "rendezvous_memory" => ["2MiB", "3GiB"],
        "lease" => ["20s", "30s"],
        "heartbeat" => ["100ms", "200ms"],
        "log" => ["warn", "debug,quinn=info"],
        "log_format" | "format" => ["json", "text"],
        "head" => ["a:1", "b:2"],
        "cpus" => ["1.5", "2"],
        "gpus" => ["1", "2"],
        "resource" => ["fpga=1", "fpga=2"],
        "hostname" => ["one", "two"],
        "interfaces" => ["eth0", "eth1"],
        other => panic!("`{other}` is a new setting: give it two samples here"),
    }
}

fn run(program: &str, args: &[String], variables: &[(&str, &str)]) -> Output {
    command(program)
        .args(args)
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// Key and what follows it: the value and where it comes from.
fn printed(output: &Output) -> BTreeMap<String, String> {
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines()
        .map(|line| {
            if let Some((key, value)) = line.split_once(" = ") {
                return (key.to_owned(), value.to_owned());
            }
            let key = line
                .trim_start_matches("# ")
                .trim_end_matches(" is not set");
            (key.to_owned(), String::new())
        })
        .collect()
}

/// The settings of a daemon from its help: `--flag <VALUE>  text [env: NAME=] [default: ...]`.
fn settings(program: &str) -> Vec<Setting> {
    let help = run(program, &["-h".to_owned()], &[]);
    let help = String::from_utf8(help.stdout).unwrap();
    let options = help.split("Options:").nth(1).unwrap();
    let options = options.split("\n\n").next().unwrap();
    let mut blocks: Vec<String> = Vec::new();
    for line in options.lines() {
        let text = line.trim();
        // A flag stands further left than lines that go on, which may begin with the name of another one.
        let indent = line.len() - line.trim_start().len();
        if indent <= 6 && text.starts_with('-') {
            blocks.push(text.to_owned());
        } else if let Some(block) = blocks.last_mut() {
            block.push(' ');
            block.push_str(text);
        }
    }
    let between = |text: &str, open: &str| {
        let rest = text.split(open).nth(1)?;
        Some(rest.split(']').next()?.to_owned())
    };
    blocks
        .iter()
        .filter(|block| block.starts_with("--"))
        .filter(|block| {
            [
                "--config",
                "--print-config",
                "--check-config",
                "--print-man",
            ]
            .iter()
            .all(|other| block.split_whitespace().next() != Some(other))
        })
        .map(|block| {
            let flag = block
                .split_whitespace()
                .next()
                .unwrap()
                .trim_matches(',')
                .to_owned();
            let help = block.split_once('>').map_or("", |(_, rest)| rest);
            let variable = between(block, "[env: ").unwrap_or_default();
            Setting {
                key: flag.trim_start_matches("--").replace('-', "_"),
                variable: variable.split('=').next().unwrap_or_default().to_owned(),
                default: between(block, "[default: ").unwrap_or_default(),
                help: help
                    .split(" [")
                    .next()
                    .unwrap_or_default()
                    .trim()
                    .to_owned(),
                flag,
            }
        })
        .collect()
}

fn args_of(program: &str, except: &str) -> Vec<String> {
    let mut args = vec!["--print-config".to_owned()];
    for (key, value) in needed(program) {
        if *key != except {
            args.push(format!("--{}={value}", key.replace('_', "-")));
        }
    }
    // One can't be without the other.
    if except == "bearer_file" {
        args.push("--http-listen=127.0.0.1:1".to_owned());
    }
    args
}

#[test]
fn every_setting_is_a_flag_a_variable_and_a_key_which_agree() {
    for (program, prefix) in [(HEAD, "KOLO_HEAD_"), (NODE, "KOLO_NODE_")] {
        let settings = settings(program);
        assert!(settings.len() > 10, "{settings:?}");
        let all = printed(&run(program, &args_of(program, ""), &[]));
        let keys: Vec<_> = settings.iter().map(|setting| setting.key.clone()).collect();
        let mut sorted = keys.clone();
        sorted.sort();
        assert_eq!(sorted, all.keys().cloned().collect::<Vec<_>>());
        let dir = tempfile::tempdir().unwrap();
        for setting in &settings {
            let Setting {
                key,
                flag,
                variable,
                ..
            } = setting;
            let expected = format!("{prefix}{}", key.to_ascii_uppercase());
            let named = ["KOLO_LOG", "KOLO_HEAD"].contains(&variable.as_str());
            assert!(*variable == expected || named, "{key}: {variable}");
            let [one, two] = samples(key);
            let list = key == "resource" || key == "interfaces" && all[key].starts_with('[');
            let shown = |value: &str| {
                let value = toml_string(value);
                if list { format!("[{value}]") } else { value }
            };
            let file = dir.path().join("settings.toml");
            std::fs::write(&file, format!("{key} = {}\n", shown(two))).unwrap();
            let base = args_of(program, key);
            let config = [base.clone(), vec![format!("--config={}", file.display())]].concat();
            let with_flag = [config.clone(), vec![format!("{flag}={one}")]].concat();
            // The file alone; a variable before it; a flag before both.
            for (args, variables, value, origin) in [
                (&config, &[][..], two, "file"),
                (&config, &[(variable.as_str(), one)][..], one, "environment"),
                (&with_flag, &[(variable.as_str(), two)][..], one, "flag"),
                (&with_flag, &[][..], one, "flag"),
                (&base, &[(variable.as_str(), two)][..], two, "environment"),
            ] {
                let output = run(program, args, variables);
                let found = &printed(&output)[key];
                assert_eq!(*found, format!("{}  # {origin}", shown(value)), "{key}");
            }
        }
        // The file may be named by a variable, too.
        let file = dir.path().join("settings.toml");
        std::fs::write(&file, "log = 'trace'\n").unwrap();
        let variable = format!("{prefix}CONFIG");
        let named = [(variable.as_str(), file.to_str().unwrap())];
        let output = run(program, &args_of(program, ""), &named);
        assert_eq!(printed(&output)["log"], "\"trace\"  # file");
    }
}

fn toml_string(text: &str) -> String {
    format!("\"{text}\"")
}

#[test]
fn wrong_settings_are_refused_by_name_before_anything_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let file = dir.path().join("head.toml");
    for (text, part) in [
        (
            "lissten = '10.0.0.1:1'",
            "`lissten` is no setting of kolo-head; did you mean `listen`?",
        ),
        ("lease = '1s'", "heartbeat"),
        ("bearer_file = '/x'", "--http-listen"),
        (
            "certificate_life = '1s'",
            "certificate_life is 1s; allowed is 2s to 365d",
        ),
    ] {
        let heartbeat = if text.starts_with("lease = '1s'") {
            "heartbeat = '500ms'"
        } else {
            ""
        };
        std::fs::write(&file, format!("{text}\n{heartbeat}")).unwrap();
        let args = [
            format!("--config={}", file.display()),
            format!("--state-dir={}", state.display()),
        ];
        for extra in [vec![], vec!["--check-config".to_owned()]] {
            let output = run(HEAD, &[args.to_vec(), extra].concat(), &[]);
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{text}: {error}");
            assert!(error.contains(part), "{text}: {error}");
        }
    }
    assert!(!state.exists());
    std::fs::write(&file, "head = 'h:1'\n[resource]\nfpga = 2\n").unwrap();
    let good = [
        format!("--config={}", file.display()),
        "--check-config".to_owned(),
    ];
    let output = run(NODE, &good, &[]);
    assert!(output.status.success(), "{output:?}");
    std::fs::write(&file, "head = 'h:1'\nresource = ['a=1', 'a=2']\n").unwrap();
    let output = run(NODE, &good, &[]);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("given twice"),
        "{output:?}"
    );
    std::fs::write(&file, "head = 'h:1'\nhostname = ' '\n").unwrap();
    let output = run(NODE, &good, &[]);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("the hostname is empty"),
        "{output:?}"
    );
}

#[test]
fn wrong_arguments_are_named_with_what_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let state = format!("--state-dir={}", dir.path().display());
    let head = "--head=127.0.0.1:9";
    for (program, args, code, part) in [
        (HEAD, &[][..], 2, "--state-dir"),
        (HEAD, &[&*state, "--lease", "3x"], 2, "such as 250ms"),
        (
            HEAD,
            &[&state, "--lease", "1ms"],
            2,
            "lease is 1ms; allowed is",
        ),
        (HEAD, &[&state, "--listen", "nowhere"], 2, "--listen"),
        (HEAD, &[&state, "--log", "=====,,"], 2, "--log"),
        (HEAD, &[&state, "--bearer-file", "x"], 2, "--http-listen"),
        (
            HEAD,
            &[
                &state,
                "--listen=127.0.0.1:0",
                "--node-token-file=/no/such/file",
            ],
            1,
            "/no/such/file",
        ),
        (NODE, &[head, "--resource", "fpga"], 2, "NAME=AMOUNT"),
        (
            NODE,
            &[head, "--join-timeout", "3x"],
            2,
            "is not a duration",
        ),
        (NODE, &[head, "--cpus", "two"], 2, "--cpus"),
        (
            NODE,
            &[head, "--check-config", "--cpus", "nan"],
            2,
            "from 0 to",
        ),
        (NODE, &[head, "--resource", "fpga=-1"], 2, "from 0 to"),
        (HEAD, &[&state, "--token-ttl", "0s"], 2, "1s to 366d"),
        (NODE, &[head], 1, "--token-file"),
        (
            NODE,
            &[head, "--token-file", "/no/such/file"],
            1,
            "/no/such/file",
        ),
    ] {
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let output = run(program, &args, &[]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(part), "{args:?}: {error}");
    }
}

/// The rows of a daemon's settings in the documents. `KOLO_BLESS=1` writes them.
fn rows(prefix: &str, settings: &[Setting]) -> String {
    let mut out = String::from("| key | default | meaning |\n|---|---|---|\n");
    for setting in settings {
        // The text above the tables says so.
        let variable = match &*setting.key {
            "head" => "KOLO_HEAD".to_owned(),
            "log" => "KOLO_LOG".to_owned(),
            key => format!("{prefix}{}", key.to_uppercase()),
        };
        assert_eq!(setting.variable, variable);
        let default = if setting.default.is_empty() {
            String::new()
        } else {
            format!("`{}`", setting.default)
        };
        writeln!(
            out,
            "| `{}` | {default} | {} |",
            setting.key,
            setting.help.replace('|', "\\|")
        )
        .unwrap();
    }
    out
}

#[test]
fn the_documents_list_every_setting() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations.md");
    let mut document = std::fs::read_to_string(&path).unwrap();
    for (program, name, prefix) in [
        (HEAD, "kolo-head", "KOLO_HEAD_"),
        (NODE, "kolo-node", "KOLO_NODE_"),
    ] {
        let (open, close) = (
            format!("<!-- settings of {name} -->\n"),
            format!("<!-- end of the settings of {name} -->"),
        );
        let begin = document.find(&open).expect("the table has a mark") + open.len();
        let end = document.find(&close).expect("the table has an end");
        let expected = rows(prefix, &settings(program));
        if std::env::var_os("KOLO_BLESS").is_some() {
            document.replace_range(begin..end, &expected);
            std::fs::write(&path, &document).unwrap();
        } else {
            assert_eq!(
                &document[begin..end],
                expected,
                "docs/operations.md is not what {name} says; write it with KOLO_BLESS=1"
            );
        }
    }
}
