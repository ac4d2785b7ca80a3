//! `kolo logs`.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use kolo_transport::ids::NodeId;
use kolo_transport::wire::{JobState, Refusal, RefusalKind, Stdio as Stream};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::fake::{Fake, FakeNode, Logs, job, line, placed};

/// Two nodes with two ranks each, as one job.
fn two_nodes(fake: &Fake, first: Logs, second: Logs) -> [FakeNode; 2] {
    let nodes = [fake.node(NodeId(30), first), fake.node(NodeId(31), second)];
    let placed = vec![nodes[0].placed(&[0, 1]), nodes[1].placed(&[2, 3])];
    fake.change(|state| state.jobs = vec![job(0xab << 56, JobState::Healthy, placed)]);
    nodes
}

#[test]
fn what_is_kept_is_printed_in_the_order_of_time() {
    let fake = Fake::new();
    let mut odd = line(1, 0, 20, "");
    odd.stream = Stream::Stderr;
    odd.text = b"caf\xe9\t\x1b[1m!".to_vec();
    let nodes = two_nodes(
        &fake,
        Logs::Kept(vec![line(0, 0, 10, "first"), odd, line(0, 1, 40, "")]),
        Logs::Kept(vec![line(2, 7, 10, "also first"), line(3, 0, 30, "third")]),
    );
    let output = fake.command(&["logs", "job-ab"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    // The worker's bytes come out as it wrote them.
    assert_eq!(
        output.stdout,
        b"[0]<stdout>:first\n[2]<stdout>:also first\n[1]<stderr>:caf\xe9\t\x1b[1m!\n[3]<stdout>:third\n[0]<stdout>:\n"
    );
    assert_eq!(nodes[0].asked(), [(vec![0, 1], None, false)]);
    assert_eq!(nodes[1].asked(), [(vec![2, 3], None, false)]);
}

#[test]
fn lines_may_have_times_and_old_ones_be_left_out() {
    let fake = Fake::new();
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let now = u64::try_from(now.as_millis()).unwrap();
    two_nodes(
        &fake,
        Logs::Kept(vec![line(0, 0, 10, "old"), line(1, 0, now, "new")]),
        Logs::Kept(Vec::new()),
    );
    let args = ["logs", "job-ab", "--since", "10m", "--timestamps"];
    let text = fake.kolo(&args).good();
    let (time, rest) = text.split_once(' ').unwrap();
    assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
    assert_eq!(rest, "[1]<stdout>:new\n");
}

#[test]
fn json_has_a_line_for_each() {
    let fake = Fake::new();
    two_nodes(
        &fake,
        Logs::Kept(vec![line(0, 5, 10, "a \"b\"")]),
        Logs::Kept(Vec::new()),
    );
    let text = fake.kolo(&["logs", "job-ab", "--format", "json"]).good();
    let found: Value = serde_json::from_str(text.strip_suffix('\n').unwrap()).unwrap();
    let expected =
        json!({"rank": 0, "stream": "stdout", "seq": 5, "time_ms": 10, "text": "a \"b\""});
    assert_eq!(found, expected);
}

#[test]
fn only_nodes_that_have_the_ranks_are_asked() {
    let fake = Fake::new();
    let nodes = two_nodes(
        &fake,
        Logs::Kept(Vec::new()),
        Logs::Kept(vec![line(3, 0, 1, "x")]),
    );
    let text = fake
        .kolo(&["logs", "ab", "--rank", "3", "--tail", "5"])
        .good();
    assert_eq!(text, "[3]<stdout>:x\n");
    assert_eq!(nodes[0].asked(), []);
    assert_eq!(nodes[1].asked(), [(vec![3], Some(5), false)]);
}

#[test]
fn what_is_not_there_is_told() {
    let fake = Fake::new();
    let line = fake.kolo(&["logs", "job-ab"]).bad(3);
    assert!(line.contains("there is no job `job-ab`"), "{line}");
    let refusal = Refusal::new(
        RefusalKind::NotFound,
        "the output of the job is not kept any more",
    );
    two_nodes(&fake, Logs::Refused(refusal), Logs::Kept(Vec::new()));
    let line = fake.kolo(&["logs", "job-ab", "--rank", "7"]).bad(2);
    assert_eq!(line, "job-ab00 has no rank 7; its ranks are 0 to 3");
    let line = fake.kolo(&["logs", "job-ab", "--rank", "0"]).bad(3);
    assert!(
        line.starts_with("box (node-")
            && line.ends_with("): the output of the job is not kept any more"),
        "{line}"
    );
}

#[test]
fn a_node_that_is_gone_does_not_hide_the_others() {
    let fake = Fake::new();
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let node = fake.node(NodeId(30), Logs::Kept(vec![line(0, 0, 1, "here")]));
    let gone = placed(NodeId(31), silent.local_addr().unwrap(), &[1]);
    let nodes = vec![node.placed(&[0]), gone];
    fake.change(|state| state.jobs = vec![job(0xab << 56, JobState::Healthy, nodes)]);
    let ran = fake.kolo(&["logs", "job-ab", "--connect-timeout", "1"]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (4, "[0]<stdout>:here\n"),
        "{ran:?}"
    );
    assert!(
        ran.err.contains("box (node-0000) can't be reached"),
        "{ran:?}"
    );
}

fn follow(fake: &Fake) -> Child {
    let mut command = fake.command(&["logs", "job-ab", "--follow"]);
    command.stdout(Stdio::piped()).spawn().unwrap()
}

/// Waits for the end of a process that should end soon.
fn ended(mut child: Child) -> (i32, String) {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(20), "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut said = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    (child.wait().unwrap().code().unwrap_or(-1), said)
}

#[test]
fn following_prints_each_line_as_it_comes_until_the_job_has_ended() {
    let fake = Fake::new();
    let (first, lines) = mpsc::channel(4);
    let (second, others) = mpsc::channel(4);
    let nodes = two_nodes(&fake, Logs::Live(lines), Logs::Live(others));
    let mut child = follow(&fake);
    let mut printed = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || printed.next().map(Result::unwrap);
    for round in 0..3 {
        first.blocking_send(line(0, round, round, "tick")).unwrap();
        assert_eq!(next().unwrap(), "[0]<stdout>:tick");
        second.blocking_send(line(2, round, round, "tock")).unwrap();
        assert_eq!(next().unwrap(), "[2]<stdout>:tock");
    }
    drop(first);
    second.blocking_send(line(3, 0, 9, "last")).unwrap();
    assert_eq!(next().unwrap(), "[3]<stdout>:last");
    drop(second);
    assert_eq!(next(), None);
    assert_eq!(ended(child), (0, String::new()));
    assert_eq!(nodes[0].asked(), [(vec![0, 1], None, true)]);
}

#[test]
fn a_node_that_ends_the_connection_while_it_is_followed_is_told() {
    let fake = Fake::new();
    let (first, lines) = mpsc::channel(4);
    let (second, others) = mpsc::channel(4);
    let nodes = two_nodes(&fake, Logs::Live(lines), Logs::Live(others));
    let mut child = follow(&fake);
    let mut printed = BufReader::new(child.stdout.take().unwrap()).lines();
    first.blocking_send(line(0, 0, 0, "tick")).unwrap();
    assert_eq!(printed.next().unwrap().unwrap(), "[0]<stdout>:tick");
    nodes[0]
        .endpoint
        .close(kolo_transport::CloseCode::Shutdown, "going down");
    // The other goes on.
    second.blocking_send(line(2, 0, 0, "tock")).unwrap();
    assert_eq!(printed.next().unwrap().unwrap(), "[2]<stdout>:tock");
    drop(second);
    let (code, said) = ended(child);
    assert_eq!(code, 4, "{said}");
    assert!(
        said.contains("box (node-0000)") && said.contains("going down"),
        "{said}"
    );
}

#[test]
fn a_reader_that_has_enough_ends_it_quietly() {
    let fake = Fake::new();
    let (first, lines) = mpsc::channel(4);
    two_nodes(&fake, Logs::Live(lines), Logs::Kept(Vec::new()));
    let mut child = follow(&fake);
    first.blocking_send(line(0, 0, 0, "tick")).unwrap();
    let mut printed = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    printed.read_line(&mut text).unwrap();
    assert_eq!(text, "[0]<stdout>:tick\n");
    drop(printed);
    // The next line finds nobody.
    first.blocking_send(line(0, 1, 1, "tick")).unwrap();
    assert_eq!(ended(child), (0, String::new()));
}

#[test]
fn an_interrupt_ends_it_and_tells_the_nodes() {
    let fake = Fake::new();
    let (first, lines) = mpsc::channel(1);
    two_nodes(&fake, Logs::Live(lines), Logs::Kept(Vec::new()));
    let mut child = follow(&fake);
    first.blocking_send(line(0, 0, 0, "tick")).unwrap();
    let mut printed = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    printed.read_line(&mut text).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(ended(child), (130, String::new()));
    // The node learns that nobody listens: its end of the channel goes.
    let began = Instant::now();
    let mut seq = 1;
    while first
        .blocking_send(line(0, seq, 0, "into the void"))
        .is_ok()
    {
        assert!(began.elapsed() < Duration::from_secs(20));
        seq += 1;
    }
}
