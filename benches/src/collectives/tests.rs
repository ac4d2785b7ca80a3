//! Parsing, figures and their shape. Runs with real ranks are in `benches/tests`.

use clap::Parser;

use super::summary::figures;
use super::wire::{Answer, How};
use super::*;

#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    options: Options,
}

fn parse(args: &[&str]) -> Result<Options, clap::Error> {
    let args = std::iter::once("all-reduce").chain(args.iter().copied());
    Args::try_parse_from(args).map(|args| args.options)
}

#[test]
fn options_are_read() {
    let options = parse(&[]).unwrap();
    assert_eq!((options.ranks, options.hosts, options.mtu()), (2, 1, 1500));
    assert_eq!(
        options.sizes(Operation::AllReduce)[1..3],
        [1 << 10, 64 << 10]
    );
    assert_eq!(options.peers, [Peer::Openmpi, Peer::Gloo]);
    assert!(!options.shared);
    options.check(Operation::Barrier).unwrap();

    let line =
        "--ranks 5 --hosts 2 --mtu 9000 --sizes 4,1KiB,4MiB --peers gloo --lane quic --format json";
    let options = parse(&line.split(' ').collect::<Vec<_>>()).unwrap();
    assert_eq!(options.sizes(Operation::Reduce), [4, 1 << 10, 4 << 20]);
    assert_eq!(options.sizes(Operation::Barrier), [0]);
    assert_eq!(
        (options.peers.as_slice(), options.lane),
        (&[Peer::Gloo][..], Lane::Quic)
    );
    assert_eq!(options.host_of(), [0, 0, 0, 1, 1]);
    assert_eq!(options.format, Format::Json);
    options.check(Operation::AllReduce).unwrap();
    assert!(
        options
            .title(Operation::AllReduce)
            .contains("two hosts (network namespaces), MTU 9000")
    );
}

#[test]
fn what_is_wrong_is_said() {
    for (args, says) in [
        (&["--ranks", "65"][..], "1..=64"),
        (&["--hosts", "3"], "1..=2"),
        (&["--sizes", "4X"], "is no size"),
        (&["--sizes", "0"], "allowed is 4 to 4G"),
        (&["--seconds", "0"], "allowed is 0.001 to 600"),
        (&["--peers", "nccl"], "possible values: openmpi, gloo, none"),
        (&["--lane", "rdma"], "possible values: auto, quic, tls"),
    ] {
        let error = parse(args).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    use Operation::{AllReduce, Barrier, SendReceive};
    for (operation, line, says) in [
        (Barrier, "--shared", "--shared is for all-reduce"),
        (SendReceive, "--ranks 3", "use an even number"),
        (
            AllReduce,
            "--shared --lane quic",
            "--shared is for ranks that share memory",
        ),
        (
            AllReduce,
            "--shared --hosts 2",
            "--shared is for ranks that share memory",
        ),
        (AllReduce, "--ranks 1 --hosts 2", "give each host a rank"),
        (
            AllReduce,
            "--ranks 1 --shared",
            "nobody to share memory with",
        ),
        (AllReduce, "--ranks 1 --lane tls", "no lane"),
        (Barrier, "--mtu 9000", "with --hosts 2"),
        (Barrier, "--sizes 4", "leave it out"),
    ] {
        let options = parse(&line.split(' ').collect::<Vec<_>>()).unwrap();
        let error = options.check(operation).unwrap_err().to_string();
        assert!(error.contains(says), "{line}: {error}");
    }
}

#[test]
fn sizes_are_of_all_shares_where_values_are_shared_out() {
    assert_eq!(Operation::AllReduce.share(1000, 4), 250);
    assert_eq!(Operation::AllGather.share(1000, 4), 62);
    assert_eq!(
        (
            Operation::AllGather.bytes(1000, 4),
            Operation::Scatter.bytes(4, 4)
        ),
        (992, 16)
    );
    assert_eq!(
        (
            Operation::SendReceive.bytes(7, 4),
            Operation::Barrier.bytes(7, 4)
        ),
        (4, 0)
    );
}

#[test]
fn what_is_said_is_understood() {
    let run = Run {
        share: 1 << 33,
        warm: 1,
        timed: 20_000,
        variant: 2,
        seed: 99,
        barrier: true,
    };
    let mut line = Vec::new();
    run.send(&mut line).unwrap();
    assert_eq!(
        String::from_utf8(line).unwrap().parse::<Run>().unwrap(),
        run
    );
    for wrong in [
        "",
        "walk 1",
        "run 1 2 3",
        "run 1 2 3 4 x 1",
        "run 1 2 3 4 -6 1",
    ] {
        assert!(wrong.parse::<Run>().is_err(), "{wrong}");
    }

    let answer = Answer {
        stamps: vec![(1, 2), (i64::MAX - 1, i64::MAX)],
        wrong: 3,
        how: Some(how("shm-ring,tls", "two-level-ring")),
    };
    for answer in [
        Answer {
            how: None,
            ..answer.clone()
        },
        answer,
    ] {
        let mut bytes = Vec::new();
        answer.send(&mut bytes).unwrap();
        assert_eq!(Answer::receive(&mut &bytes[..]).unwrap(), answer);
    }
    for (bytes, says) in [
        (&b""[..], "a rank ended"),
        (b"error no memory\n", "no memory"),
        (b"done 1\n", "a rank answered `done 1`"),
        (b"done 0 0 tls\n", "a rank answered `done 0 0 tls`"),
        (b"done 1 0\nshort", "a rank ended"),
    ] {
        let error = Answer::receive(&mut &bytes[..]).unwrap_err();
        assert_eq!(error.to_string(), says);
    }
}

fn answer(stamps: &[(i64, i64)], wrong: u64) -> Answer {
    Answer {
        stamps: stamps.to_vec(),
        wrong,
        how: Some(how("unix", "doubling")),
    }
}

fn how(lanes: &str, algorithm: &str) -> How {
    How {
        lanes: lanes.to_owned(),
        algorithm: algorithm.to_owned(),
    }
}

#[test]
fn how_is_of_all_ranks() {
    let ranks = [
        how("tls", "two-level-ring"),
        how("shm-ring,tls", "two-level-ring"),
    ];
    let all = How::of_all(ranks.iter()).unwrap();
    assert_eq!(all, how("shm-ring,tls", "two-level-ring"));
    assert_eq!(all.to_string(), "two-level-ring over shm-ring,tls");
    assert_eq!(how("shm", "local").to_string(), "over shm");
    assert_eq!(How::of_all([].into_iter()), None);
}

#[test]
fn a_time_is_from_the_last_begin_to_the_last_end() {
    let answers = [
        answer(&[(0, 5000), (6000, 7000)], 0),
        answer(&[(2000, 4000), (6500, 8500)], 0),
    ];
    let series = Series::new(&answers).unwrap();
    assert_eq!(series.times, [3.0, 2.0]);
    assert_eq!(series.how, Some(how("unix", "doubling")));
    let error = Series::new(&[answer(&[(0, 1)], 0), answer(&[(0, 1)], 2)]).unwrap_err();
    assert_eq!(error.to_string(), "2 values of the results were wrong");
    assert!(Series::new(&[answer(&[(0, 1)], 0), answer(&[], 0)]).is_err());
}

fn entry(name: &'static str, rounds: &[&[f64]]) -> Entry {
    Entry {
        name,
        rounds: rounds
            .iter()
            .map(|times| Series {
                times: times.to_vec(),
                how: (name == "kolo").then(|| how("shm", "local")),
            })
            .collect(),
    }
}

#[test]
fn figures_are_medians_of_rounds_beside_each_peer() {
    let rows = [
        Row {
            bytes: 4096,
            real: 4096,
            entries: vec![
                entry(
                    "kolo",
                    &[&[1.0, 2.0, 3.0], &[10.0, 11.0, 12.0], &[4.0, 4.0, 90.0]],
                ),
                entry("openmpi", &[&[8.0]]),
                entry("gloo", &[]),
            ],
        },
        Row {
            bytes: 0,
            real: 0,
            entries: vec![entry("kolo", &[&[1.0]])],
        },
    ];
    let setting = Setting {
        ranks: 4,
        hosts: 1,
        mtu: None,
        buffers: "own",
        cores: 2,
    };
    let lines = figures(Operation::AllReduce, setting, &rows);
    let json: Vec<String> = lines
        .iter()
        .map(|figure| serde_json::to_string(figure).unwrap())
        .collect();
    assert_eq!(
        json[0],
        r#"{"bench":"all-reduce","case":"4096","metric":"p50","unit":"us","value":4.0,"peer":"openmpi","peer_value":8.0,"ratio":0.5,"ranks":4,"hosts":1,"mtu":null,"buffers":"own","cores":2,"lanes":"shm","algorithm":"local"}"#
    );
    let metrics: Vec<_> = lines
        .iter()
        .map(|line| (line.figure.metric, line.figure.value, line.figure.ratio))
        .collect();
    assert_eq!(
        metrics,
        [
            ("p50", 4.0, Some(0.5)),
            ("p99", 90.0, Some(11.25)),
            ("algbw", 1.024, Some(2.0)),
            // A barrier has no bytes, and there is no peer.
            ("p50", 1.0, None),
            ("p99", 1.0, None),
        ]
    );
}

/// What each rank gives, and what it gets beside that.
#[test]
fn sizes_for_which_there_is_no_memory_are_refused() {
    for (operation, needed) in [
        (Operation::AllReduce, 4 << 20),
        (Operation::AllGather, 5 << 20),
        (Operation::Barrier, 0),
    ] {
        let options = parse(&["--ranks", "4", "--sizes", "4,1M"]).unwrap();
        options.check_memory(operation, needed).unwrap();
        if needed > 0 {
            let error = options.check_memory(operation, needed - 1).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("of 1 MiB by 4 ranks take"), "{error}");
        }
    }
    assert!(free_memory().unwrap() > 1 << 20);
}
