//! Authorities, credentials and tokens, in memory and in files.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use common::Cluster;
use kolo_transport::identity::identity_of;
use kolo_transport::ids::{ClusterId, JobId, NodeId};
use kolo_transport::token::random_secret;
use kolo_transport::{
    Authority, CertificateRequest, Credentials, Fingerprint, IdentityError, JoinToken, Role,
    TokenBook, TokenError,
};

const HOUR: Duration = Duration::from_secs(3600);

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn credentials_are_private_files_that_load_again() {
    let cluster = Cluster::new();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("a/b");
    for id in [1, 2] {
        let saved = cluster.node(id);
        saved.save(&dir).unwrap();
        let loaded = Credentials::load(&dir).unwrap();
        assert_eq!(loaded.identity(), saved.identity());
        assert_eq!(loaded.chain(), saved.chain());
        assert_eq!(loaded.private_key(), saved.private_key());
    }
    assert_eq!(mode(&dir), 0o700);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    assert_eq!(mode(&dir.join("identity.pem")), 0o600);
}

/// Tells the process that is killed below where to save.
const SAVE_TO: &str = "KOLO_TEST_SAVE_TO";

/// Not a test by itself: the process that the next one kills.
#[test]
fn saves_until_it_is_killed() {
    let Some(dir) = std::env::var_os(SAVE_TO) else {
        return;
    };
    let cluster = Cluster::new();
    println!("begun");
    for id in 1.. {
        cluster.node(id).save(Path::new(&dir)).unwrap();
    }
}

#[test]
fn credentials_load_whole_while_they_are_replaced_and_after_a_kill_at_any_point() {
    use std::io::BufRead as _;
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("identity");
    Cluster::new().node(0).save(&dir).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..10_u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "saves_until_it_is_killed", "--nocapture"])
            .env(SAVE_TO, &dir)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = std::io::BufReader::new(child.stdout.take().unwrap());
        assert!(stdout.lines().any(|line| line.unwrap().contains("begun")));
        // Until it has replaced some, and then a little longer, by another amount each time.
        let mut own = std::collections::BTreeSet::new();
        while own.len() < 3 {
            own.insert(Credentials::load(&dir).unwrap().identity().uri());
        }
        std::thread::sleep(Duration::from_micros(430 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        seen.extend(own);
        Credentials::load(&dir).unwrap();
    }
    assert!(seen.len() > 20, "{}", seen.len());
    let last = Cluster::new().node(7);
    last.save(&dir).unwrap();
    assert_eq!(Credentials::load(&dir).unwrap().chain(), last.chain());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
}

#[test]
fn a_folder_in_which_others_can_put_keys_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("state");
    fs::create_dir(&dir).unwrap();
    Cluster::new().node(1).save(&dir).unwrap();
    let set = |mode| fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
    for mode in [0o777, 0o770, 0o702, 0o1777] {
        set(mode);
        for error in [
            Credentials::load(&dir).unwrap_err(),
            Authority::open(&dir).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(
                error.contains("chmod 700") && error.contains(dir.to_str().unwrap()),
                "{error}"
            );
        }
    }
    set(0o755);
    Credentials::load(&dir).unwrap();
    Authority::open(&dir).unwrap();
}

#[test]
fn load_errors_name_the_file_and_hold_no_secret() {
    let cluster = Cluster::new();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    let path = dir.join("identity.pem");
    let fails = |reason: &str| {
        let error = Credentials::load(dir).unwrap_err().to_string();
        let named = error.contains(&path.display().to_string());
        assert!(named && error.contains(reason), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    };
    let blocks = |of: &Credentials| {
        let dir = tempfile::tempdir().unwrap();
        of.save(dir.path()).unwrap();
        let text = fs::read_to_string(dir.path().join("identity.pem")).unwrap();
        let blocks: Vec<String> = text
            .split_inclusive("-----\n-----BEGIN")
            .map(str::to_owned)
            .collect();
        blocks
    };
    fails("No such file");
    cluster.node(1).save(dir).unwrap();
    let whole = fs::read_to_string(&path).unwrap();
    let [own, other, foreign] =
        [cluster.node(1), cluster.node(2), Cluster::new().node(1)].map(|of| blocks(&of));
    let of = |parts: [&String; 3]| parts.map(String::as_str).concat();
    for (content, reason) in [
        ("hunter2".to_owned(), "no private key"),
        (whole[..100].to_owned(), "no private key"),
        (whole[..whole.len() / 2].to_owned(), "two certificates"),
        (of([&other[0], &own[1], &own[2]]), "another private key"),
        (of([&own[0], &own[1], &foreign[2]]), "UnknownIssuer"),
    ] {
        fs::write(&path, content).unwrap();
        fails(reason);
    }
    fs::write(&path, whole).unwrap();
    set_mode(&path, 0o640);
    let error = Credentials::load(dir).unwrap_err();
    assert!(
        matches!(error, IdentityError::Exposed { mode: 0o640, .. }),
        "{error}"
    );
    fails("chmod 600");
    // A folder that can't be made.
    let file = dir.join("file");
    fs::write(&file, "").unwrap();
    let error = cluster.node(1).save(&file.join("sub")).unwrap_err();
    assert!(error.to_string().contains("file/sub"), "{error}");
}

#[test]
fn an_authority_is_made_once_and_stays_the_same() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ca");
    // Many heads that start at once agree.
    let starts: Vec<_> = (0..8)
        .map(|_| {
            let dir = dir.clone();
            std::thread::spawn(move || Authority::open(&dir).unwrap().fingerprint())
        })
        .collect();
    let all: Vec<Fingerprint> = starts.into_iter().map(|t| t.join().unwrap()).collect();
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    let again = Authority::open(&dir).unwrap();
    assert_eq!(again.fingerprint(), all[0]);
    let path = dir.join("authority.pem");
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(&dir), 0o700);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);

    // What one start signed, the next one's credentials go with.
    let name = NodeId(1).to_string();
    let before = again.issue(Role::Node, &name).unwrap();
    let after = Authority::open(&dir)
        .unwrap()
        .issue(Role::Node, &name)
        .unwrap();
    assert_eq!(before.authority(), after.authority());
    assert_eq!(before.identity(), after.identity());
    assert_eq!(before.identity().cluster, again.cluster());

    set_mode(&path, 0o644);
    let error = Authority::open(&dir).unwrap_err().to_string();
    assert!(
        error.contains("authority.pem") && error.contains("chmod 600"),
        "{error}"
    );
    set_mode(&path, 0o600);
    for (content, reason) in [
        (String::new(), "no certificate"),
        (again_without_key(&path), "no private key"),
        (member_as_authority(&again), "not that of an authority"),
    ] {
        fs::write(&path, content).unwrap();
        let error = Authority::open(&dir).unwrap_err().to_string();
        assert!(
            error.contains("authority.pem") && error.contains(reason),
            "{error}"
        );
    }
}

fn again_without_key(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.split("-----BEGIN PRIVATE").next().unwrap().to_owned()
}

fn member_as_authority(authority: &Authority) -> String {
    let dir = tempfile::tempdir().unwrap();
    let member = authority.issue(Role::Node, &NodeId(1).to_string()).unwrap();
    member.save(dir.path()).unwrap();
    fs::read_to_string(dir.path().join("identity.pem")).unwrap()
}

#[test]
fn only_requests_that_prove_their_key_are_signed_and_their_names_do_not_count() {
    let authority = Authority::create(ClusterId(5)).unwrap();
    let name = NodeId(1).to_string();
    let sign = |der: &[u8]| authority.sign(der, Role::Node, &name, HOUR);

    // A request that asks to be the head, an authority, and someone's web site.
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let uri = "kolo://cluster-0000000000000005/head/head";
    params.subject_alt_names = vec![
        rcgen::SanType::URI(uri.try_into().unwrap()),
        rcgen::SanType::DnsName("example.com".try_into().unwrap()),
    ];
    let greedy = params.serialize_request(&key).unwrap();
    let certificate = sign(greedy.der()).unwrap();
    let identity = identity_of(&certificate).unwrap();
    assert_eq!(
        identity.uri(),
        format!("kolo://cluster-0000000000000005/node/{name}")
    );
    let (_, parsed) = x509_parser::parse_x509_certificate(&certificate).unwrap();
    assert!(!parsed.is_ca());
    assert_eq!(
        parsed
            .subject_alternative_name()
            .unwrap()
            .unwrap()
            .value
            .general_names
            .len(),
        2
    );

    let mut forged = greedy.der().to_vec();
    let last = forged.len() - 1;
    forged[last] ^= 1;
    let other_curve = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let other_curve = rcgen::CertificateParams::default()
        .serialize_request(&other_curve)
        .unwrap();
    for bad in [&forged[..], other_curve.der(), b"", b"hunter2"] {
        let error = sign(bad).unwrap_err();
        assert!(matches!(error, IdentityError::Request { .. }), "{error}");
    }
    let request = CertificateRequest::generate().unwrap();
    let error = authority
        .sign(request.der(), Role::Node, "me", HOUR)
        .unwrap_err();
    assert!(matches!(error, IdentityError::Name(_)), "{error}");
    // The longest validity is no overflow.
    assert!(
        authority
            .sign(request.der(), Role::Node, &name, Duration::MAX)
            .is_ok()
    );
}

#[test]
fn a_certificate_for_another_key_or_from_another_authority_is_not_taken() {
    let (here, there) = (Cluster::new(), Cluster::new());
    let name = NodeId(1).to_string();
    let sign = |cluster: &Cluster, request: &CertificateRequest| {
        cluster
            .authority
            .sign(request.der(), Role::Node, &name, HOUR)
            .unwrap()
    };
    let (one, two) = (
        CertificateRequest::generate().unwrap(),
        CertificateRequest::generate().unwrap(),
    );
    let authority = here.authority.certificate();
    let error = one.finish(&sign(&here, &two), &authority).unwrap_err();
    assert!(matches!(error, IdentityError::WrongKey), "{error}");
    let from_there = sign(&there, &two);
    let error = two.finish(&from_there, &authority).unwrap_err();
    assert!(
        matches!(error, IdentityError::Certificate { .. }),
        "{error}"
    );
    let request = CertificateRequest::generate().unwrap();
    assert!(request.finish(b"garbage", b"garbage").is_err());
    // The authority itself is no member.
    assert!(identity_of(&authority).is_err());
}

#[test]
fn tokens_travel_as_one_line() {
    let fingerprint = Cluster::new().authority.fingerprint();
    let token = TokenBook::new().create(Role::Node, HOUR, None, fingerprint, 0, [0xab; 32]);
    let line = token.to_string();
    assert_eq!(
        line,
        format!("kolo1.node.{fingerprint}.{}", "ab".repeat(32))
    );
    let parsed: JoinToken = format!(" {line}\n").parse().unwrap();
    assert_eq!(parsed, token);
    assert_eq!(
        (parsed.role(), parsed.fingerprint(), parsed.secret()),
        (Role::Node, fingerprint, &[0xab; 32][..])
    );
    for (bad, reason) in [
        (line.replace("kolo1", "kolo2"), "does not start"),
        (line.replace("node", "head"), "neither"),
        (line.replace("node", "worker"), "neither"),
        (line.replace("abab", "xx"), "its secret"),
        (line.replacen('.', "", 1), "does not start"),
        (format!("{line}.x"), "four parts"),
        (
            format!("kolo1.node.00.{}", "ab".repeat(32)),
            "its fingerprint",
        ),
        (String::new(), "does not start"),
    ] {
        let error = bad.parse::<JoinToken>().unwrap_err().to_string();
        assert!(error.contains(reason), "{bad}: {error}");
        assert!(!error.contains("ababab"), "{error}");
    }
}

#[test]
fn a_book_of_tokens_keeps_their_terms_and_not_their_secrets() {
    let fingerprint = Fingerprint([7; 32]);
    let mut book = TokenBook::new();
    let secret = random_secret();
    assert_ne!(secret, random_secret());
    let once = book.create(Role::Node, HOUR, Some(1), fingerprint, 1000, secret);
    let many = book.create(Role::Driver, HOUR, None, fingerprint, 1000, [2; 32]);
    let never = book.create(Role::Head, HOUR, None, fingerprint, 1000, [3; 32]);
    assert_eq!(book.list().len(), 3);
    assert_eq!(book.list()[0].uses_left, Some(1));
    assert_eq!(book.list()[0].expires_unix, 4600);

    let wrong = TokenError::WrongRole {
        asked: Role::Driver,
        allowed: Role::Node,
    };
    assert_eq!(book.redeem(Role::Driver, once.secret(), 1000), Err(wrong));
    assert_eq!(book.redeem(Role::Node, b"", 1000), Err(TokenError::Unknown));
    assert_eq!(
        book.redeem(Role::Node, &[1; 32], 1000),
        Err(TokenError::Unknown)
    );
    assert_eq!(
        book.redeem(Role::Head, never.secret(), 1000),
        Err(TokenError::Unknown)
    );
    // What was refused cost nothing.
    let id = book.redeem(Role::Node, once.secret(), 4599).unwrap();
    assert_eq!(id, book.list()[0].id);
    assert_eq!(
        book.redeem(Role::Node, once.secret(), 1000),
        Err(TokenError::UsedUp)
    );
    for _ in 0..3 {
        book.redeem(Role::Driver, many.secret(), 1000).unwrap();
    }
    assert_eq!(
        book.redeem(Role::Driver, many.secret(), 4600),
        Err(TokenError::Expired)
    );

    // Kept in either kind of format, without the secrets.
    let json = serde_json::to_string(&book).unwrap();
    assert_eq!(serde_json::from_str::<TokenBook>(&json).unwrap(), book);
    let packed = rmp_serde::to_vec_named(&book).unwrap();
    assert_eq!(rmp_serde::from_slice::<TokenBook>(&packed).unwrap(), book);
    let hex = "02".repeat(32);
    for text in [&json, &format!("{book:?}"), &format!("{many:?}")] {
        assert!(!text.contains(&hex) && !text.contains("2, 2, 2"), "{text}");
    }

    assert!(book.revoke(id));
    assert!(!book.revoke(id));
    assert_eq!(
        book.redeem(Role::Node, once.secret(), 1000),
        Err(TokenError::Unknown)
    );
    assert_eq!(id.to_string().parse(), Ok(id));
    book.prune(4600 + 7 * 24 * 3600);
    assert!(book.list().is_empty());
}

#[test]
fn nothing_that_is_printed_for_debugging_holds_a_secret() {
    let cluster = Cluster::new();
    let credentials = cluster.node(1);
    let request = CertificateRequest::generate().unwrap();
    let join = kolo_transport::wire::JoinRequest {
        role: Role::Node,
        secret: b"hunter2".to_vec(),
        csr: Vec::new(),
    };
    let dump = format!(
        "{credentials:?} {request:?} {join:?} {:?}",
        cluster.authority
    );
    let key: Vec<String> = credentials
        .private_key()
        .secret_der()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(!dump.contains(&key[20..40].join(", ")), "{dump}");
    assert!(
        !dump.contains("hunter2") && !dump.contains("104, 117"),
        "{dump}"
    );
    assert!(dump.contains(&NodeId(1).to_string()));
    assert!(!dump.contains(&JobId(1).to_string()));
}
