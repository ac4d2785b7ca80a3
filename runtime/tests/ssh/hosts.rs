//! Hosts that come up, and hosts that don't.

use std::fs;

use crate::servers::{Servers, executable, is_running, texts};

#[test]
fn three_hosts_come_up_and_what_is_wrong_with_each_is_told_at_once() {
    let Some(servers) = Servers::start(4) else {
        return;
    };
    // The third has another key than the one that is known, the fourth lets nobody in.
    let known = servers.dir().join("known_hosts");
    let text = fs::read_to_string(&known).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let key = |line: &str| line.split_once(' ').unwrap().1.to_owned();
    let name = |line: &str| line.split_once(' ').unwrap().0.to_owned();
    let changed = format!("{} {}", name(lines[2]), key(lines[0]));
    fs::write(
        &known,
        [lines[0], changed.as_str(), lines[3]].join("\n") + "\n",
    )
    .unwrap();
    let closed = servers.dir().join("sshd5");
    let config = fs::read_to_string(&closed).unwrap();
    fs::write(&closed, config.replace("id.pub", "nobody.pub")).unwrap();
    let hosts = format!("{},127.0.0.99:1", servers.hosts());
    let output = servers.up(&["--hosts", &hosts]).output().unwrap();
    let (out, err) = texts(&output);
    assert_eq!((output.status.code(), out.as_str()), (Some(4), ""), "{err}");
    // The first comes up, and is taken down again.
    assert!(err.contains("kolo: 127.0.0.2: up\n"), "{err}");
    let summary = &err[err.find("kolo: 4 of 5 hosts did not come up").expect(&err)..];
    for (host, part) in [
        ("127.0.0.3", "Host key verification failed"),
        ("127.0.0.4", "IDENTIFICATION HAS CHANGED"),
        ("127.0.0.5", "Permission denied"),
        (
            "127.0.0.99",
            "ssh: connect to host 127.0.0.99 port 22: Connection refused",
        ),
    ] {
        let line = summary
            .lines()
            .find(|line| line.starts_with(&format!("  {host}: ssh: ")))
            .expect(&err);
        assert!(line.contains(part), "{line}");
    }
    assert!(summary.contains("ssh-keygen -R"), "{summary}");
    assert_eq!(servers.node_dirs(0), 0, "{err}");
}

#[test]
fn a_host_without_the_program_gets_it_once() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    // Without its debug information it is a tenth of the size.
    let small = servers.dir().join("kolo-node");
    let stripped = std::process::Command::new("strip")
        .arg("-o")
        .arg(&small)
        .arg(env!("CARGO_BIN_EXE_kolo-node"))
        .status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(env!("CARGO_BIN_EXE_kolo-node"), &small).unwrap();
    }
    let program = small.to_str().unwrap();
    for sends in [true, false, true] {
        let mut launch = crate::servers::Launched::start({
            let mut command = servers.kolo(&["--format", "json", "up", "--node-program", program]);
            command.args(["--hosts", &servers.hosts()]);
            command
        });
        let up = launch.ready();
        assert_eq!(up["nodes"][0]["existing"], false);
        let cached = servers.cached(0);
        assert_eq!(cached.len(), 1, "{cached:?}");
        assert_eq!(fs::read(&cached[0]).unwrap(), fs::read(&small).unwrap());
        launch.signal(rustix::process::Signal::INT);
        assert_eq!(launch.wait(), Some(0));
        let err = launch.stderr();
        assert_eq!(err.contains("sending kolo-node"), sends, "{err}");
        // What is damaged is not used.
        if !sends {
            fs::OpenOptions::new()
                .write(true)
                .open(&cached[0])
                .and_then(|file| file.set_len(1000))
                .unwrap();
        }
    }
}

#[test]
fn a_program_that_can_not_run_there_or_is_another_version_is_told_with_what_to_do() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let fake = servers.dir().join("it's a $(fake) kolo-node");
    let run = |text: &str| {
        executable(&fake, text);
        let args = ["--remote-program", fake.to_str().unwrap()];
        let mut command = servers.kolo(&["up", "--hosts", &servers.hosts()]);
        let output = command.args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(4));
        texts(&output).1
    };
    let err = run("#!/bin/sh\necho kolo-node 9.9.9\n");
    assert!(
        err.contains("`kolo-node 9.9.9`, needed is `kolo-node 0"),
        "{err}"
    );
    let err = run("#!/bin/sh\necho \"version 'GLIBC_2.99' not found\" >&2; exit 1\n");
    assert!(
        err.contains("can't run there (exit code 1); it said: version 'GLIBC_2.99' not found"),
        "{err}"
    );
    assert!(err.contains("--remote-program"), "{err}");
    fs::remove_file(&fake).unwrap();
    let output = servers
        .kolo(&[
            "up",
            "--hosts",
            &servers.hosts(),
            "--remote-program",
            "/no where",
        ])
        .output()
        .unwrap();
    assert!(texts(&output).1.contains("exit code 127"), "{output:?}");
}

#[test]
fn names_of_ssh_config_users_ports_and_keys_are_honoured() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let mut launch = servers.launch(&["--hosts", "alias2:3"]);
    let up = launch.ready();
    assert_eq!(up["nodes"][0]["host"], "alias2");
    assert_eq!(up["nodes"][0]["slots"], 3);
    launch.signal(rustix::process::Signal::TERM);
    assert_eq!(launch.wait(), Some(0));
    // Without ssh_config's help: by flags.
    let plain = servers.dir().join("plain");
    fs::write(
        &plain,
        format!(
            "UserKnownHostsFile {}/known_hosts\nIdentityAgent none\n",
            servers.dir().display()
        ),
    )
    .unwrap();
    let user = String::from_utf8(
        std::process::Command::new("id")
            .arg("-un")
            .output()
            .unwrap()
            .stdout,
    );
    let host = format!("{}@127.0.0.2:1", user.unwrap().trim());
    let (port, key) = (servers.port(0).to_string(), servers.dir().join("id"));
    let mut launch = servers.launch(&[
        "--hosts",
        &host,
        "--ssh-config-file",
        plain.to_str().unwrap(),
        "--ssh-port",
        &port,
        "--ssh-identity-file",
        key.to_str().unwrap(),
    ]);
    assert_eq!(launch.ready()["nodes"][0]["slots"], 1);
    launch.signal(rustix::process::Signal::INT);
    assert_eq!(launch.wait(), Some(0));
}

#[test]
fn a_machine_with_two_names_is_told_once_it_is_reached() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    // Names that ssh_config alone knows: what they lead to is seen when they are there.
    for hosts in ["alias2:1,alias3:1", "localhost:1,alias3:1"] {
        let (first, second) = hosts.split_once(',').unwrap();
        let name = |entry: &str| entry.split(':').next().unwrap().to_owned();
        let either = [
            format!("`{}` and `{}` are one machine", name(first), name(second)),
            format!("`{}` and `{}` are one machine", name(second), name(first)),
        ];
        let node = env!("CARGO_BIN_EXE_kolo-node");
        for command in [
            &["run", "-H", hosts, "--remote-program", node, "--", "true"][..],
            &["up", "-H", hosts, "--remote-program", node, "--quiet"],
        ] {
            let output = servers.kolo(command).output().unwrap();
            let err = texts(&output).1;
            assert_eq!(output.status.code(), Some(2), "{command:?}: {err}");
            assert!(
                either.iter().any(|line| err.contains(line)),
                "{command:?}: {err}"
            );
        }
    }
    // Addresses of the loopback are hosts of their own, if their user says so.
    let mut launch = servers.launch(&["--hosts", &servers.hosts()]);
    assert_eq!(launch.ready()["nodes"].as_array().unwrap().len(), 2);
    launch.signal(rustix::process::Signal::INT);
    assert_eq!(launch.wait(), Some(0));
    servers.nothing_is_left();
}

#[test]
fn this_machine_needs_no_ssh() {
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kolo"));
        command
            .args(["--format", "json", "up"])
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", home.path())
            .env("KOLO_SSH_PROGRAM", "/nowhere/ssh")
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        crate::servers::Launched::start(command)
    };
    let mut launch = run(&["--hosts", "localhost:2"]);
    let up = launch.ready();
    let pid = crate::servers::node_pids(&up)[0];
    assert!(is_running(pid));
    launch.signal(rustix::process::Signal::INT);
    assert_eq!(launch.wait(), Some(0));
    assert!(!is_running(pid));
    // Unless that is wanted.
    let mut launch = run(&["--hosts", "localhost:2", "--ssh-local"]);
    assert_eq!(launch.wait(), Some(4));
    let err = launch.stderr();
    assert!(err.contains("`/nowhere/ssh` could not be started"), "{err}");
    let mut launch = run(&["--hosts", "localhost:2,127.0.0.1:2"]);
    assert_eq!(launch.wait(), Some(2));
    let err = launch.stderr();
    assert!(
        err.contains("`localhost` in entry 1 and `127.0.0.1` in entry 2 are one machine"),
        "{err}"
    );
}
