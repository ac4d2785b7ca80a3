//! Tokens, renewal, revocation, and secrets that nobody sees.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_transport::wire::{HeadReply, HeadRequest};
use kolo_transport::{
    CloseCode, Connection, ConnectionLost, Credentials, Endpoint, EndpointConfig, Expect,
    JoinError, TransportRuntime, join, tls,
};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::process::{KOLO, Site, command};

/// In which a revocation must have reached everybody.
const AT_ONCE: Duration = Duration::from_secs(1);

fn error(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap().trim().to_owned()
}

fn id(dir: &Path) -> String {
    let credentials = Credentials::load(dir).unwrap();
    credentials.identity().name.clone()
}

#[test]
fn a_node_joins_once_with_a_token_and_comes_back_without() {
    let mut site = Site::new(&[]);
    let token = site.token("node.token", &["--role", "node", "--uses", "1"]);
    let mode = std::fs::metadata(&token).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    let args = ["--token-file", token.to_str().unwrap()];
    let mut node = site.node("node", &args);
    let first = node.ready();
    let key = site.path("node").join("identity").join("identity.pem");
    let mode = std::fs::metadata(&key).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    let listed = site.json(&["token", "list"]);
    assert_eq!(listed[0]["uses_left"], 0);
    assert_eq!(listed[0]["role"], "node");
    assert!(listed[0].get("token").is_none(), "a secret is shown once");
    // Used up.
    let mut second = site.node("second", &args);
    assert_eq!(second.end().code(), Some(1));
    assert!(
        second.printed.text().contains("used up"),
        "{}",
        second.printed.text()
    );
    // Without a token, after a crash, with a head that has crashed, too (D-1).
    node.signal(Signal::KILL);
    node.end();
    site.restart_head();
    std::fs::remove_file(&token).unwrap();
    let node = site.node("node", &[]);
    assert_eq!(node.ready()["node"], first["node"]);
    assert_eq!(site.json(&["token", "list"]), listed);
}

#[test]
fn only_administrators_make_tokens_and_revoke() {
    let site = Site::new(&[]);
    let driver = site.token("driver.token", &["--role", "driver", "--uses", "1"]);
    let dir = site.login("driver", &driver);
    let file = std::fs::metadata(dir.join("identity.pem")).unwrap();
    assert_eq!(file.permissions().mode() & 0o777, 0o600);
    assert!(site.kolo(&dir, &["status"]).status.success());
    let own = id(&dir);
    for args in [
        &["token", "create"][..],
        &["token", "create", "--role", "driver", "--admin"],
        &["token", "list"],
        &["token", "revoke", "token-00000000"],
        &["revoke", "driver-0000000000000001"],
        &["revoke", &own, "--undo"],
        &["up", "--hosts", "nowhere.invalid:1"],
    ] {
        let output = site.kolo(&dir, args);
        assert_eq!(output.status.code(), Some(5), "{args:?}: {output:?}");
        assert!(
            error(&output).contains("only an administrator"),
            "{output:?}"
        );
    }
    // One who joins with a token for administrators may.
    let token = site.token(
        "admin.token",
        &["--role", "driver", "--admin", "--ttl", "60s"],
    );
    let admin = site.login("admin", &token);
    let output = site.kolo(&admin, &["token", "create", "--role", "node"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.starts_with("kolo1.node.") && text.lines().count() == 1,
        "{text}"
    );
    let output = site.kolo(&admin, &["revoke", &id(&admin)]);
    assert!(error(&output).contains("can't revoke itself"), "{output:?}");
    // Ends a token that could be used for long.
    let open = site.token("open.token", &["--role", "driver", "--ttl", "7d"]);
    let listed = site.json(&["token", "list"]);
    let tokens = listed.as_array().unwrap();
    let name = tokens.last().unwrap()["id"].as_str().unwrap();
    assert!(
        site.kolo(&admin, &["token", "revoke", name])
            .status
            .success()
    );
    let output = site.kolo(
        &site.path("late"),
        &["login", "--token-file", open.to_str().unwrap()],
    );
    assert!(error(&output).contains("not known here"), "{output:?}");
    let output = site.kolo(&admin, &["token", "revoke", name]);
    assert!(error(&output).contains("knows no token"), "{output:?}");
    for (args, part) in [
        (&["token", "create", "--ttl", "1w"][..], "is not a duration"),
        (&["token", "create", "--uses", "0"], "--uses"),
        (&["token", "create", "--role", "head"], "node, driver"),
        (&["token", "create", "--admin"], "can't be an administrator"),
        (&["token", "revoke", "x"], "8 hexadecimal digits"),
        (&["revoke", "x"], "no hostname of a node, and no id"),
        (&["revoke", "node-00"], "give the whole id"),
        (
            &["revoke", "node-00000000000000zz"],
            "16 hexadecimal digits",
        ),
        (
            &["revoke", "node-0000000000000001", "--undo"],
            "is not revoked",
        ),
    ] {
        let output = site.kolo(&admin, args);
        assert!(!output.status.success(), "{args:?}");
        assert!(error(&output).contains(part), "{args:?}: {output:?}");
    }
}

#[test]
fn a_revoked_node_is_out_and_stays_out_until_it_is_let_in_again() {
    let mut site = Site::new(&[]);
    let token = site.token("node.token", &[]);
    let args = ["--token-file", token.to_str().unwrap()];
    let (mut bad, good) = (site.node("bad", &args), site.node("good", &args));
    let (out, other) = (bad.ready(), good.ready());
    let out = out["node"].as_str().unwrap();
    let other = other["node"].as_str().unwrap();
    let said = site.json(&["revoke", out, "--reason", "stolen"]);
    let begin = Instant::now();
    assert_eq!(said["nodes_late"].as_array().unwrap().len(), 0, "{said}");
    assert_eq!(said["seen"], true);
    assert_eq!(bad.end().code(), Some(3));
    assert!(begin.elapsed() < AT_ONCE * 5, "{:?}", begin.elapsed());
    bad.says("has revoked this node");
    assert_eq!(site.status_of(out)["state"], "revoked");
    assert_eq!(site.status_of(other)["state"], "alive");
    let shown = site.json(&["status"]);
    assert_eq!(shown["revoked"][0]["name"], out);
    assert_eq!(shown["revoked"][0]["reason"], "stolen");
    let table = site.operator(&["status"]);
    assert!(
        table.contains("REVOKED") && table.contains("stolen"),
        "{table}"
    );
    // Also after a crash of the head (D-1).
    site.restart_head();
    assert_eq!(site.json(&["status"])["revoked"], shown["revoked"]);
    // It may be a driver that has only logged in, or a slip of the pen.
    let said = site.operator(&["revoke", "node-0000000000000001"]);
    assert!(said.contains("has seen no node of this name"), "{said}");
    site.operator(&["revoke", "node-0000000000000001", "--undo"]);
    let mut again = site.node("bad", &[]);
    assert_eq!(again.end().code(), Some(3), "{}", again.printed.text());
    assert!(
        again.printed.text().contains("was revoked"),
        "{}",
        again.printed.text()
    );
    site.wait_for(other, "alive");
    // Undone by the start of its id.
    site.operator(&["revoke", &out[..12], "--undo"]);
    let back = site.node("bad", &[]);
    assert_eq!(back.ready()["node"], out);
}

pub(crate) async fn connect(
    runtime: &TransportRuntime,
    dir: &Path,
    address: std::net::SocketAddr,
    expect: Expect,
) -> Result<(Endpoint, Connection), kolo_transport::ConnectError> {
    let credentials = Credentials::load(dir).unwrap();
    let endpoint = Endpoint::bind(runtime, credentials, EndpointConfig::towards(address)).unwrap();
    let connection = endpoint.connect(address, expect).await?;
    Ok((endpoint, connection))
}

/// An HTTPS connection with a certificate.
pub(crate) async fn try_https(
    credentials: &Credentials,
    address: std::net::SocketAddr,
) -> std::io::Result<TlsStream<TcpStream>> {
    let tls = tls::client_config(credentials, &[]).unwrap();
    let stream = TcpStream::connect(address).await?;
    let name = tls::SERVER_NAME.try_into().unwrap();
    TlsConnector::from(Arc::new(tls))
        .connect(name, stream)
        .await
}

pub(crate) async fn https(dir: &Path, address: std::net::SocketAddr) -> TlsStream<TcpStream> {
    let credentials = Credentials::load(dir).unwrap();
    try_https(&credentials, address).await.unwrap()
}

/// The first line of the answer.
pub(crate) async fn get(stream: &mut TlsStream<TcpStream>, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: kolo\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let length = stream.read(&mut answer).await.unwrap();
    let text = String::from_utf8_lossy(&answer[..length]).into_owned();
    text.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_revoked_driver_is_out_everywhere_within_a_second() {
    let site = Site::new(&[]);
    let token = site.token("node.token", &[]);
    let node = site.node("node", &["--token-file", token.to_str().unwrap()]);
    let ready = node.ready();
    let node_address = ready["address"].as_str().unwrap().parse().unwrap();
    let node_id = ready["node"].as_str().unwrap().parse().unwrap();
    let token = site.token("driver.token", &["--role", "driver", "--admin"]);
    let (dir, other) = (site.login("driver", &token), site.login("other", &token));
    let spare = site.path("spare.token");
    let made = site.kolo(
        &dir,
        &[
            "token",
            "create",
            "--role",
            "driver",
            "--out",
            spare.to_str().unwrap(),
        ],
    );
    assert!(made.status.success(), "{made:?}");
    let runtime = TransportRuntime::new(1).unwrap();
    let head = |dir| connect(&runtime, dir, site.address, Expect::head());
    let to_node = |dir| connect(&runtime, dir, node_address, Expect::node(node_id));
    let (_one, to_head) = head(&dir).await.unwrap();
    let (_two, at_node) = to_node(&dir).await.unwrap();
    let (_three, good) = to_node(&other).await.unwrap();
    let mut http = https(&dir, site.http).await;
    assert!(get(&mut http, "/api/v1/jobs").await.contains("200"));

    let name = id(&dir);
    let folder = site.admin();
    let admin = head(&folder).await.unwrap();
    let begin = Instant::now();
    let asked = tokio::spawn(async move {
        let request = HeadRequest::Revoke {
            role: kolo_transport::Role::Driver,
            name,
            reason: String::new(),
        };
        let reply = admin.1.request(&request, Duration::from_secs(30)).await;
        assert_eq!(
            reply,
            Ok(HeadReply::Revoked {
                told: 1,
                late: Vec::new()
            })
        );
    });
    for connection in [&to_head, &at_node] {
        let lost = tokio::time::timeout(Duration::from_secs(30), connection.closed()).await;
        let lost = lost.unwrap();
        let revoked = matches!(
            lost,
            ConnectionLost::Closed {
                code: CloseCode::Revoked,
                ..
            }
        );
        assert!(revoked, "{lost}");
    }
    asked.await.unwrap();
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    // On a connection that was there before, too.
    assert!(get(&mut http, "/api/v1/jobs").await.contains("401"));
    for refused in [head(&dir).await, to_node(&dir).await] {
        let error = refused.unwrap_err();
        assert!(error.to_string().contains("was revoked"), "{error}");
    }
    let output = site.kolo(&dir, &["status"]);
    assert!(error(&output).contains("was revoked"), "{output:?}");
    // It can't come back by a token that it has put aside.
    let output = site.kolo(
        &site.path("back"),
        &["login", "--token-file", spare.to_str().unwrap()],
    );
    assert!(error(&output).contains("not known here"), "{output:?}");
    assert!(!good.is_closed());
    assert!(site.kolo(&other, &["status"]).status.success());
}

#[tokio::test]
async fn joining_is_limited_logged_once_each_and_secrets_are_nowhere() {
    const SECRET: &str = "a-bearer-secret-that-nobody-guesses";
    const REFUSED: &str = "a joiner was refused";
    let dir = tempfile::tempdir().unwrap();
    let bearer = dir.path().join("bearer");
    std::fs::write(&bearer, SECRET).unwrap();
    let site = Site::new(&["--bearer-file", bearer.to_str().unwrap(), "--log", "trace"]);
    let nodes = site.token("node.token", &["--role", "node"]);
    let drivers = site.token("driver.token", &["--role", "driver"]);
    let used = site.token("used.token", &["--role", "driver", "--uses", "1"]);
    let node_args = ["--log", "trace", "--token-file", nodes.to_str().unwrap()];
    let node = site.node("node", &node_args);
    node.ready();
    let driver = site.login("driver", &drivers);
    site.login("once", &used);
    let mut outputs = Vec::new();
    for args in [
        &["login", "--token-file", used.to_str().unwrap()][..],
        &["login", "--token-file", nodes.to_str().unwrap()],
        &["login", "--token-file", "/does/not/exist"],
    ] {
        let output = site.kolo(&site.path("nobody"), args);
        assert!(!output.status.success());
        outputs.push(error(&output));
    }
    // Half of a token in a file, and a node that gets it.
    let half = site.path("half.token");
    std::fs::write(&half, &read(&nodes)[..100]).unwrap();
    let mut halved = site.node("halved", &["--token-file", half.to_str().unwrap()]);
    assert_eq!(halved.end().code(), Some(1));
    let mut wrong = site.node("wrong", &["--token-file", used.to_str().unwrap()]);
    assert_eq!(wrong.end().code(), Some(1));

    // One line for each attempt, until there are too many. What a daemon has said is read a moment
    // later: wait for what must be there, and look for more than that at the end.
    let before = 1; // the second login with `used`; the node `wrong` knows what its token is for
    site.head.says_times(REFUSED, before);
    let runtime = TransportRuntime::new(1).unwrap();
    let token = read(&used).parse().unwrap();
    let mut limited = 0;
    for _ in 0..60 {
        match join(&runtime, site.address, &token).await {
            Err(JoinError::Refused(refusal)) if refusal.message.contains("too many attempts") => {
                limited += 1;
            }
            Err(JoinError::Refused(refusal)) => {
                assert!(refusal.message.contains("used up"), "{refusal}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!((20..60).contains(&limited), "{limited}");
    site.head.says_times(REFUSED, before + 60 - limited);
    site.head
        .says("too many attempts with wrong secrets; refused unseen");

    let http = async {
        let mut stream = https(&driver, site.http).await;
        let request = format!(
            "GET /api/v1/jobs HTTP/1.1\r\nHost: kolo\r\nAuthorization: Bearer {SECRET}x\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = vec![0; 4096];
        let length = stream.read(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer[..length]).into_owned()
    };
    outputs.push(http.await);

    // What must be nowhere: the secret part of each token, the bearer's secret, each private key.
    let mut secrets: Vec<String> = [&nodes, &drivers, &used]
        .iter()
        .map(|file| read(file).rsplit('.').next().unwrap().to_owned())
        .collect();
    secrets.push(SECRET.to_owned());
    for key in [
        site.admin().join("identity.pem"),
        driver.join("identity.pem"),
        site.path("node").join("identity").join("identity.pem"),
        site.path("head").join("authority.pem"),
    ] {
        let text = read(&key);
        let key = text.split("PRIVATE KEY-----").nth(1).unwrap();
        secrets.extend(
            key.lines()
                .filter(|line| line.len() > 40)
                .map(str::to_owned),
        );
    }
    for daemon in [&site.head, &node, &halved, &wrong] {
        outputs.push(daemon.printed.text());
    }
    let head = &site.head.printed;
    assert_eq!(
        head.count(REFUSED),
        before + 60 - limited,
        "{}",
        head.text()
    );
    // One in ten seconds.
    let lines = head.count("too many attempts with wrong secrets; refused");
    assert!((1..limited / 4).contains(&lines), "{lines}");
    for pid in [site.head.pid(), node.pid()] {
        for what in ["cmdline", "environ"] {
            let bytes = std::fs::read(format!("/proc/{pid}/{what}")).unwrap();
            outputs.push(String::from_utf8_lossy(&bytes).into_owned());
        }
    }
    for file in ["tokens.json", "members.json"] {
        outputs.push(read(&site.path("head").join(file)));
    }
    let all = outputs.join("\n");
    // The search can find something.
    assert!(all.contains("a node has registered") && secrets.len() > 6);
    for secret in &secrets {
        // Also a part of one is too much.
        let half = &secret[..secret.len() / 2];
        assert!(
            !all.contains(half),
            "a secret is in:\n{}",
            all.lines()
                .filter(|line| line.contains(half))
                .collect::<Vec<_>>()
                .join("\n")
        );
    }
}

#[test]
fn certificates_of_daemons_and_drivers_are_renewed_while_they_run() {
    // Renewed after some 5.5 s, and over after 9 s.
    let site = Site::new(&["--certificate-life", "9s"]);
    let nodes = site.token("node.token", &[]);
    let drivers = site.token("driver.token", &["--role", "driver"]);
    let mut node = site.node("node", &["--token-file", nodes.to_str().unwrap()]);
    let first = node.ready();
    let name = first["node"].as_str().unwrap();
    let asleep = site.login("asleep", &drivers);
    let identity = site.path("node").join("identity");
    let load = |dir: &Path| Credentials::load(dir).unwrap();
    let old = [load(&identity), load(&site.admin())];
    for round in 1..=2 {
        node.says_times("the certificate is renewed", round);
        // The head's own, and its operator's.
        site.head
            .says_times("the certificate is renewed", 2 * round);
        if round == 1 {
            // A command that comes late in the life of its certificate has it renewed.
            let before = load(&asleep).validity().end;
            while load(&asleep).validity().end == before {
                assert!(site.kolo(&asleep, &["status"]).status.success());
            }
        }
    }
    for (old, dir) in old.iter().zip([&identity, &site.admin()]) {
        assert!(old.validity().has_ended(std::time::SystemTime::now()));
        assert_eq!(load(dir).identity(), old.identity());
    }
    // The connection of the first certificates is still the same.
    assert_eq!(node.printed.count("the connection to the head is lost"), 0);
    assert_eq!(site.status_of(name)["state"], "alive");
    node.signal(Signal::KILL);
    node.end();
    let again = site.node("node", &[]);
    assert_eq!(again.ready()["node"], first["node"]);
    // Who was away for too long has to log in again, and is told so.
    let mut kolo = command(KOLO);
    kolo.arg("--head").arg(site.address.to_string());
    kolo.arg("--credentials").arg(&asleep).arg("status");
    let begin = Instant::now();
    let told = loop {
        let validity = kolo_transport::Credentials::load(&asleep).map(|own| own.validity());
        if validity.is_err() {
            break error(&kolo.output().unwrap());
        }
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(told.contains("log in, again"), "{told}");
}
