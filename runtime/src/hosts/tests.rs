use super::*;

fn host(user: Option<&str>, host: &str, slots: u32) -> HostSlots {
    HostSlots {
        user: user.map(str::to_owned),
        ..HostSlots::new(host, slots)
    }
}

fn parse_names(text: &str) -> Result<Vec<HostSlots>, HostsError> {
    List::of("").names(text)
}

fn parse_hostfile(text: &str) -> Result<Vec<HostSlots>, HostsError> {
    List::of("").file(text)
}

#[test]
fn lists_are_read_in_order() {
    assert_eq!(
        parse_hosts(" b:2, a-1.example:1,worker_0:3 ").unwrap(),
        [
            host(None, "b", 2),
            host(None, "a-1.example", 1),
            host(None, "worker_0", 3)
        ]
    );
    assert_eq!(
        parse_hosts("root@a:1,10.0.0.2:2,me@[fd00::2]:3,[fe80::1%eth0]:1").unwrap(),
        [
            host(Some("root"), "a", 1),
            host(None, "10.0.0.2", 2),
            host(Some("me"), "fd00::2", 3),
            host(None, "fe80::1%eth0", 1)
        ]
    );
}

#[test]
fn hosts_need_no_slots_where_slots_do_not_matter() {
    let expected = parse_hosts("a:1,me@b:1,[fd00::2]:1,c:4").unwrap();
    let read = parse_names("a, me@b,[fd00::2],c:4").unwrap();
    assert_eq!(read, expected);
    for wrong in ["", "a,", "a:x", "a b", "-oProxyCommand=x"] {
        assert!(parse_names(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn what_is_printed_is_read_again() {
    for text in ["a:1", "root@b.example:2", "[fd00::2]:3", "me@[::1]:65536"] {
        assert_eq!(parse_hosts(text).unwrap()[0].to_string(), text);
    }
}

// Horovod's test of hostfiles (S/test_run.py), and what Horovod can't read.
#[test]
fn hostfiles_are_read() {
    let text = "172.31.32.7 slots=8\n172.31.33.9 slots=8\n";
    let hosts = parse_hostfile(text).unwrap();
    assert_eq!(
        hosts,
        [host(None, "172.31.32.7", 8), host(None, "172.31.33.9", 8)]
    );
    let text = "\u{feff}# all of them\r\n\r\n  a slots=2   # the small one\r\n\tb\tslots = 4\r\n#c slots=1\r\nme@[fd00::1] slots=1";
    assert_eq!(
        parse_hostfile(text).unwrap(),
        [
            host(None, "a", 2),
            host(None, "b", 4),
            host(Some("me"), "fd00::1", 1)
        ]
    );
}

#[test]
fn bad_lists_name_the_entry_and_what_is_allowed() {
    for (text, part) in [
        ("a:1,,b:1", "entry 2, ``, is empty"),
        ("a:1,", "entry 2, ``, is empty"),
        ("a", "entry 1, `a`, has no number of slots"),
        ("[::1]", "has no number of slots"),
        ("a:", "slots that are no whole number"),
        ("a:-1", "slots that are no whole number"),
        ("a:+1", "slots that are no whole number"),
        ("a:1.5", "slots that are no whole number"),
        ("a:65537", "has more slots than 65536"),
        ("a:99999999999999999999", "has more slots than 65536"),
        (":2", "neither a name nor an address"),
        ("a b:2", "neither a name nor an address"),
        ("-oProxyCommand=x:2", "neither a name nor an address"),
        ("$(x):2", "neither a name nor an address"),
        ("[a]:2", "neither a name nor an address"),
        ("fd00::2:4", "has an IPv6 address without brackets"),
        ("@a:2", "has the user ``, which is none"),
        ("-l@a:2", "has the user `-l`, which is none"),
        ("a;b@c:2", "has the user `a;b`, which is none"),
    ] {
        let error = parse_hosts(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
        assert!(
            error.contains("expected HOST:SLOTS,HOST:SLOTS,... like `a:4,b:4`"),
            "{error}"
        );
    }
    for text in ["", "  "] {
        let error = parse_hosts(text).unwrap_err().to_string();
        assert!(error.starts_with("there is no host in it"), "{error}");
    }
}

#[test]
fn bad_hostfiles_name_the_line_and_what_is_allowed() {
    for (text, part) in [
        ("a slots=2\nb\n", "line 2, `b`, has no `slots=N`"),
        ("\n\nb 4", "line 3, `b 4`, has no `slots=N`"),
        ("b:4", "line 1, `b:4`, has no `slots=N`"),
        (
            "a slots=2 max_slots=4",
            "line 1, `a slots=2 max_slots=4`, goes on with `max_slots=4` after its slots",
        ),
        (
            "a max_slots=4",
            "has the key `max_slots`, which is not known; `slots` is the only one",
        ),
        ("a slots=", "slots that are no whole number"),
        ("a slots=x", "slots that are no whole number"),
        ("a\u{1b} slots=1", "line 1, `a\\u{1b} slots=1`, has a host"),
        ("fd00::2 slots=1", "an IPv6 address without brackets"),
    ] {
        let error = parse_hostfile(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
        assert!(error.contains("expected `HOST slots=N`"), "{error}");
    }
    for text in ["", "\n# a slots=2\n"] {
        let error = parse_hostfile(text).unwrap_err();
        assert_eq!(error, HostsError::Empty(Place::Line(1)));
    }
}

#[test]
fn duplicates_are_refused_with_both_places() {
    let error = parse_hostfile("a slots=2\n\nb slots=1\nA slots=2").unwrap_err();
    assert_eq!(
        error.to_string(),
        "`a` in line 1 and `A` in line 4 are one machine; write each machine once, with all its slots"
    );
    for text in [
        "a:2,a:2",
        "a:1,root@a:1",
        "a:1,a.:1",
        "[fd00::0:2]:1,[fd00::2]:1",
        "[::ffff:10.0.0.1]:1,10.0.0.1:1",
        "localhost:1,127.0.0.1:1",
    ] {
        let error = parse_hosts(text).unwrap_err().to_string();
        let (first, second) = text.split_once(',').unwrap();
        let host = |entry: &str| entry.rsplit_once(':').unwrap().0.to_owned();
        assert!(error.contains("in entry 2 are one machine"), "{error}");
        let (first, second) = (host(first), host(second));
        // Addresses are told as they were written.
        assert!(error.contains(&format!("`{first}` in entry 1")), "{error}");
        assert!(error.contains(&format!("`{second}` in entry 2")), "{error}");
    }
    let own = |text: &str| List::of("Me.example").hosts(text).map(|hosts| hosts.len());
    for text in ["me:1,localhost:1", "me.example.:1,root@[::1]:1"] {
        assert!(
            matches!(own(text), Err(HostsError::Duplicate { .. })),
            "{text}"
        );
    }
    assert_eq!(own("me.other:1,localhost:1,127.0.0.2:1"), Ok(3));
    assert!(
        List::of("me")
            .file("me slots=1\n127.0.1.1 slots=1")
            .is_err()
    );
}

#[test]
fn ranks_are_on_machines_and_not_on_spellings() {
    let ranks = |text: &str| List::of("me").ranks(text);
    assert_eq!(ranks("a,A,b,a.").unwrap(), ["a", "a", "b", "a"]);
    assert_eq!(
        ranks("[fd00::2],root@a,[fd00:0::2],a").unwrap(),
        ["fd00::2", "a", "fd00::2", "a"]
    );
    assert_eq!(ranks("localhost,me,127.0.0.1").unwrap(), ["localhost"; 3]);
    for (text, part) in [
        ("", "entry 1, ``, is empty"),
        ("a,,b", "entry 2, ``, is empty"),
        (
            "a:2",
            "`a:2`, has a host that is neither a name nor an address",
        ),
        ("a b", "neither a name nor an address"),
        ("::1", "an IPv6 address without brackets"),
    ] {
        let error = ranks(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
        assert!(error.ends_with("like `a,b,a,c`"), "{error}");
    }
}

#[test]
fn there_is_a_limit() {
    let many: Vec<String> = (0..=MAX_HOSTS)
        .map(|number| format!("h{number}:1"))
        .collect();
    assert_eq!(parse_hosts(&many[1..].join(",")).unwrap().len(), MAX_HOSTS);
    assert_eq!(
        parse_hosts(&many.join(",")).unwrap_err(),
        HostsError::TooMany
    );
}

// As Horovod and Open MPI take it.
#[test]
fn a_host_without_slots_is_listed_if_another_has_some() {
    let expected = [host(None, "a", 4), host(None, "b", 0)];
    assert_eq!(parse_hosts("a:4,b:0").unwrap(), expected);
    assert_eq!(parse_hostfile("a slots=4\nb slots=0").unwrap(), expected);
    assert_eq!(parse_hosts("a:0,b:00"), Err(HostsError::NoSlots));
    assert_eq!(parse_hostfile("a slots=0"), Err(HostsError::NoSlots));
    assert!(
        parse_hosts("a:4,b:0,b:1").is_err(),
        "a machine stands there once"
    );
}
