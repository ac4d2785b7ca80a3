//! Options that are taken, and such that are refused.

use kolo_transport::wire::ProgramHash;

use super::*;

fn spec(change: impl FnOnce(&mut Options)) -> Result<JobSpec, OptionsError> {
    let mut options = Options {
        workers: Some(2.into()),
        ..Options::default()
    };
    change(&mut options);
    let program = Program {
        hash: ProgramHash([0; 32]),
        size: 1,
        name: "train".to_owned(),
    };
    options.spec(program)
}

fn refused(change: impl FnOnce(&mut Options)) -> String {
    spec(change).unwrap_err().to_string()
}

#[test]
fn sizes_are_workers_or_hosts_and_slots() {
    assert_eq!(
        spec(|_| {}).unwrap().placement,
        Placement::Pack { workers: 2 }
    );
    let hosts = |hosts, slots| {
        spec(|o| (o.workers, o.hosts, o.slots) = (None, Some(Count::from(hosts)), slots))
            .map(|s| s.placement)
    };
    assert_eq!(
        hosts(3, Some(2)),
        Ok(Placement::Spread { hosts: 3, slots: 2 })
    );
    assert_eq!(hosts(3, None), Ok(Placement::Spread { hosts: 3, slots: 1 }));
    assert_eq!(hosts(0, Some(2)), Err(OptionsError::Zero { what: "hosts" }));
    assert_eq!(hosts(2, Some(0)), Err(OptionsError::Zero { what: "slots" }));
    let given = u64::from(u32::MAX) * u64::from(u32::MAX);
    assert_eq!(
        hosts(u32::MAX, Some(u32::MAX)),
        Err(OptionsError::TooMany { given })
    );
    assert!(hosts(MAX_WORKERS, Some(1)).is_ok());
}

#[test]
fn sizes_that_contradict_are_refused() {
    assert!(refused(|o| o.workers = None).starts_with("how many workers?"));
    assert!(refused(|o| o.hosts = Some(1.into())).contains("workers(2) and hosts(h) are given"));
    assert!(refused(|o| o.slots = Some(1)).contains("workers(2) and slots(s) are given"));
    let text = refused(|o| (o.workers, o.slots) = (None, Some(3)));
    assert!(
        text.contains("slots(3) is given without hosts(h)"),
        "{text}"
    );
    assert!(refused(|o| o.workers = Some(0.into())).starts_with("workers(0) is given"));
    assert!(refused(|o| o.workers = Some(70_000.into())).contains("70000 workers"));
}

#[test]
fn gpus_are_as_in_horovod() {
    let gpus =
        |use_gpu, gpus| spec(|o| (o.use_gpu, o.gpus) = (use_gpu, gpus)).map(|s| s.per_worker.gpus);
    assert_eq!(gpus(false, None), Ok(0));
    // A falsy number is no number there.
    assert_eq!(gpus(false, Some(0)), Ok(0));
    assert_eq!(gpus(true, None), Ok(1));
    assert_eq!(gpus(true, Some(2)), Ok(2));
    assert_eq!(
        gpus(false, Some(1)),
        Err(OptionsError::GpusUnused { gpus: 1 })
    );
    assert_eq!(gpus(true, Some(0)), Err(OptionsError::NoGpus));
}

#[test]
fn amounts_are_exact_or_refused() {
    let resources = spec(|o| {
        o.cpus = 0.5;
        o.custom = BTreeMap::from([("fpga".to_owned(), 2.0)]);
    });
    let resources = resources.unwrap().per_worker;
    assert_eq!(resources.to_string(), "0.5 cpus, 2 fpga");
    for bad in [f64::NAN, f64::INFINITY, -1.0, 1e9, 0.0001] {
        assert!(
            refused(|o| o.cpus = bad).starts_with("cpus_per_worker is "),
            "{bad}"
        );
        let text = refused(|o| o.custom = BTreeMap::from([("fpga".to_owned(), bad)]));
        assert!(
            text.starts_with("the amount of `fpga` per worker is "),
            "{text}"
        );
    }
    for bad in ["", " fpga", "cpus", "gpus"] {
        let text = refused(|o| o.custom = BTreeMap::from([(bad.to_owned(), 1.0)]));
        assert!(text.contains("can't be the name of a resource"), "{text}");
    }
    assert_eq!(
        (1_u8.units(), 2_usize.units(), 0.5_f32.units(), (-3).units()),
        (1.0, 2.0, 0.5, -3.0)
    );
}

#[test]
fn variables_arguments_and_times_are_checked() {
    for (name, value) in [
        ("", "x"),
        ("A=B", "x"),
        ("A\0", "x"),
        ("A", "\0"),
        ("KOLO_RANK", "7"),
        (LANE, "rdma"),
        (RINGS, "maybe"),
    ] {
        let text = refused(|o| o.env = BTreeMap::from([(name.to_owned(), value.to_owned())]));
        assert!(text.contains("can't be set"), "{text}");
    }
    assert!(spec(|o| o.env = BTreeMap::from([("HOROVOD_X".to_owned(), String::new())])).is_ok());
    assert!(spec(|o| o.env = BTreeMap::from([(LANE.to_owned(), "tls".to_owned())])).is_ok());
    assert!(spec(|o| o.env = BTreeMap::from([(RINGS.to_owned(), "off".to_owned())])).is_ok());
    assert!(refused(|o| o.args = vec!["a".to_owned(), "\0".to_owned()]).contains("argument 1"));
    for bad in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        assert!(refused(|o| o.start_timeout = bad).starts_with("start_timeout is "));
    }
    assert!(refused(|o| o.grace = Duration::MAX).ends_with("allowed is 0ns to 3600s"));
    assert_eq!(
        spec(|o| o.grace = Duration::ZERO).map(|s| s.grace_ms),
        Ok(0)
    );
    assert!(refused(|o| o.max_in_flight = 0).contains("max_in_flight(0)"));
    assert!(refused(|o| o.max_in_flight = usize::MAX).contains("allowed is 1 to 1048576"));
}

#[test]
fn what_is_too_long_for_a_head_is_not_sent() {
    use bytes::BytesMut;
    use kolo_transport::frame::{PREFIX, encode_head};
    use kolo_transport::wire::HeadRequest;

    let with = |len| move |o: &mut Options| o.env = [("A".to_owned(), "x".repeat(len))].into();
    let text = refused(with(5 << 20));
    assert!(
        text.contains(" 5242881 of them arguments and variables; a head takes 4194304;"),
        "{text}"
    );
    assert!(refused(|o| o.name = Some("x".repeat(5 << 20))).contains(" 0 of them"));
    // The longest that is sent is one that a head reads.
    let (mut fits, mut over) = (1 << 20, 5 << 20);
    while over - fits > 1 {
        let half = usize::midpoint(fits, over);
        if spec(with(half)).is_ok() {
            fits = half;
        } else {
            over = half;
        }
    }
    let mut frame = BytesMut::new();
    let longest = HeadRequest::Submit(spec(with(fits)).unwrap());
    encode_head(&mut frame, &longest, 0).unwrap();
    let length = frame.len() - PREFIX;
    assert!(
        (MAX_SPEC - ENVELOPE..=MAX_SPEC).contains(&length),
        "{length}"
    );
}

#[test]
fn bounds_make_a_group_elastic() {
    let spec_of = |workers: Count| spec(|o| o.workers = Some(workers));
    assert_eq!(spec_of(4.into()).unwrap().elastic, None);
    let bounded = spec_of((2..=8).into()).unwrap();
    assert_eq!(bounded.placement, Placement::Pack { workers: 8 });
    let elastic = bounded.elastic.unwrap();
    assert_eq!((elastic.min, elastic.max, elastic.spares), (2, 8, 0));
    assert_eq!(
        (elastic.max_resets, elastic.restarts_without_progress),
        (None, 3)
    );
    // Lost workers are replaced, and the size stays.
    let replaced = spec(|o| o.elastic.spares = Some(1))
        .unwrap()
        .elastic
        .unwrap();
    assert_eq!((replaced.min, replaced.max, replaced.spares), (2, 2, 1));
    // Bounds of hosts are bounds of workers, on whole hosts.
    let of_hosts = |spares| {
        spec(|o| {
            (o.workers, o.hosts, o.slots) = (None, Some((1..=4).into()), Some(2));
            o.elastic.spares = Some(spares);
        })
    };
    let hosts = of_hosts(2).unwrap();
    assert_eq!(hosts.placement, Placement::Spread { hosts: 4, slots: 2 });
    let elastic = hosts.elastic.unwrap();
    assert_eq!((elastic.min, elastic.max, elastic.spares), (2, 8, 2));
    let error = of_hosts(1).unwrap_err();
    let (spares, slots) = (1, 2);
    assert_eq!(error, OptionsError::PartOfHost { spares, slots });
}

#[test]
fn limits_of_an_elastic_group_are_passed_on() {
    let spec = spec(|o| {
        o.workers = Some((2..=8).into());
        o.elastic = ElasticOptions {
            spares: Some(1),
            max_resets: Some(100),
            restarts: Some((5, Duration::from_secs(60))),
            restarts_without_progress: Some(1),
            cooldown: Some(Duration::from_secs(1)..=Duration::from_secs(10)),
            filters: vec![GroupFilter::DivisibleBy(2)],
            health_check: Some((
                "check".to_owned(),
                vec!["-q".to_owned()],
                Duration::from_secs(5),
            )),
            waits: true,
        };
    });
    let elastic = spec.unwrap().elastic.unwrap();
    assert_eq!((elastic.spares, elastic.max_resets), (1, Some(100)));
    let window = elastic.restarts_within.unwrap();
    assert_eq!((window.restarts, window.within_ms), (5, 60_000));
    assert_eq!(elastic.restarts_without_progress, 1);
    let cooldown = elastic.cooldown.unwrap();
    assert_eq!((cooldown.least_ms, cooldown.most_ms), (1000, 10_000));
    assert_eq!(elastic.filters, [GroupFilter::DivisibleBy(2)]);
    let check = elastic.health_check.unwrap();
    assert_eq!((check.program.as_str(), &*check.args[0]), ("check", "-q"));
    assert_eq!(check.timeout_ms, 5000);
}

#[test]
fn limits_that_contradict_are_refused() {
    let bad =
        |workers: std::ops::RangeInclusive<u32>| refused(|o| o.workers = Some(workers.into()));
    assert!(bad(0..=4).starts_with("workers(0..=4) is given; the lower bound"));
    let (least, most) = (8, 2);
    assert!(bad(least..=most).starts_with("workers(8..=2) is given; the lower bound"));
    assert!(bad(1..=70_000).contains("70000 workers"));
    let both = |o: &mut Options| o.hosts = Some((1..=2).into());
    assert!(refused(both).contains("workers(2) and hosts(h) are given"));
    let elastic = |change: fn(&mut ElasticOptions)| {
        refused(move |o| {
            o.workers = Some((2..=8).into());
            change(&mut o.elastic);
        })
    };
    let text = elastic(|e| (e.spares, e.max_resets) = (Some(1), Some(0)));
    assert!(text.starts_with("spares(1) and max_resets(0)"), "{text}");
    let text = elastic(|e| e.restarts = Some((1, Duration::ZERO)));
    assert!(text.starts_with("the time of restarts is 0ns"), "{text}");
    let text = elastic(|e| e.cooldown = Some(Duration::from_millis(1)..=Duration::from_secs(5)));
    assert!(
        text.starts_with("the lower bound of cooldown is 1ms"),
        "{text}"
    );
    let text = elastic(|e| e.cooldown = Some(Duration::from_secs(9)..=Duration::from_secs(5)));
    assert!(
        text.starts_with("the upper bound of cooldown is 5s"),
        "{text}"
    );
    let check = |program: &str, seconds| {
        let check = (program.to_owned(), Vec::new(), Duration::from_secs(seconds));
        refused(move |o| o.elastic.health_check = Some(check))
    };
    assert!(check("", 5).contains("its program has no name"));
    assert!(check("a\0", 5).contains("a NUL byte"));
    // The start timeout is 30 s.
    let text = check("check", 31);
    assert!(
        text.starts_with("the time of the health check is 31s"),
        "{text}"
    );
    let text = elastic(|e| e.filters = vec![GroupFilter::Max(0)]);
    assert_eq!(
        text,
        "filter(Max(0)) is given; its number must be 1 or more"
    );
    let text = elastic(|e| e.filters = vec![GroupFilter::DivisibleBy(9)]);
    assert_eq!(
        text,
        "no number of workers from 2 to 8 passes the filters [DivisibleBy(9)]"
    );
}
