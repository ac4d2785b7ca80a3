//! Validation, cool-down, filters.

use super::*;

#[test]
fn limits_that_make_no_sense_say_what_was_given_and_what_is_allowed() {
    type Case<'a> = (&'a dyn Fn(&mut Limits), &'a str);
    let check = |change: &dyn Fn(&mut Limits)| {
        let mut limits = Limits::elastic(4, 6);
        change(&mut limits);
        limits.check().map_err(|error| error.to_string())
    };
    assert_eq!(check(&|_| {}), Ok(()));
    assert_eq!(
        check(&|limits| limits.cooldown = Some(s(1)..=s(3600))),
        Ok(())
    );
    assert_eq!(
        check(&|limits| limits.filters = vec![Filter::DivisibleBy(5)]),
        Ok(())
    );
    let cases: [Case<'_>; 18] = [
        (
            &|limits| limits.min = 0,
            "min_workers=0 is given; a group has at least 1",
        ),
        (
            &|limits| limits.min = 7,
            "min_workers=7 and max_workers=6 are given",
        ),
        (
            &|limits| limits.per_host = 3,
            "min_workers=4 is given; it must be a multiple of the 3 workers on each node",
        ),
        (
            &|limits| (limits.per_host, limits.max) = (2, 7),
            "max_workers=7 is given; it must be a multiple of the 2 workers on each node",
        ),
        (
            &|limits| (limits.per_host, limits.spares) = (2, 1),
            "spares=1 is given; it must be a multiple of the 2 workers on each node",
        ),
        (
            &|limits| {
                limits.on_change = OnChange::Restart;
                limits.spares = 1;
            },
            "spares=1 is given for processes that are started with their ranks",
        ),
        (
            &|limits| limits.max = u32::MAX,
            "max_workers=4294967295 and spares=0 are given; allowed are 16384 workers in all",
        ),
        (
            &|limits| limits.filters = vec![Filter::Max(6); 17],
            "17 filters are given; allowed are 16",
        ),
        (
            &|limits| limits.cooldown = Some(ms(500)..=s(10)),
            "cooldown_range=(0.5, 10) s is given; allowed are 1 to 3600 s, the lower bound first",
        ),
        (
            &|limits| limits.cooldown = Some(s(1)..=s(3601)),
            "cooldown_range=(1, 3601) s",
        ),
        (
            &|limits| limits.cooldown = Some(s(20)..=s(10)),
            "cooldown_range=(20, 10) s",
        ),
        (
            &|limits| limits.start_timeout = s(0),
            "start_timeout=0 is given",
        ),
        (
            &|limits| limits.ack_timeout = s(0),
            "ack_timeout=0 is given",
        ),
        (
            &|limits| limits.restarts_within = Some((3, s(0))),
            "restarts_within=0 is given",
        ),
        (
            &|limits| limits.filters = vec![Filter::WholeHosts(0)],
            "the filter whole_hosts(0) is given; its number must be at least 1",
        ),
        (
            &|limits| limits.filters = vec![Filter::DivisibleBy(7)],
            "no number of workers from min_workers=4 to max_workers=6 passes divisible_by(7)",
        ),
        (
            &|limits| limits.filters = vec![Filter::Max(3), Filter::DivisibleBy(2)],
            "no number of workers from min_workers=4 to max_workers=6 passes max(3), divisible_by(2)",
        ),
        (
            &|limits| limits.filters = vec![Filter::DivisibleBy(2), Filter::DivisibleBy(5)],
            "no number of workers from min_workers=4 to max_workers=6",
        ),
    ];
    for (change, expected) in cases {
        let error = check(change).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    }
}

/// The figures measured with Horovod for (10, 100).
#[test]
fn cooldown_grows_as_horovods() {
    let range = s(10)..=s(100);
    let cases = [
        (1, 20, 30),
        (2, 40, 50),
        (3, 80, 90),
        (4, 100, 100),
        (5, 100, 100),
        (99, 100, 100),
    ];
    for (times, least, most) in cases {
        assert_eq!(cooldown(&range, times, 0.0), s(least), "{times}");
        assert_eq!(cooldown(&range, times, 1.0), s(most), "{times}");
    }
    assert_eq!(cooldown(&(s(10)..=s(15)), 1, 0.5), s(15));
}

/// Ranks are given as nodes; the result are the positions that are left.
fn filtered(filters: &[Filter], nodes: &[u64]) -> Vec<u32> {
    let roster = seated(nodes);
    let seats = roster.seats().iter().collect();
    let left = filter::apply(filters, seats);
    left.into_iter().map(|seat| seat.slot.0).collect()
}

#[test]
fn filters_leave_out_the_last_and_compose() {
    use Filter::{DivisibleBy, Max, WholeHosts};
    let cases: [(&[Filter], &[u64], &[u32]); 9] = [
        (&[], &[1, 1, 2], &[0, 1, 2]),
        (&[DivisibleBy(2)], &[1, 1, 2], &[0, 1]),
        (&[DivisibleBy(4)], &[1, 1, 2], &[]),
        (&[Max(2)], &[1, 1, 2], &[0, 1]),
        (&[WholeHosts(2)], &[1, 2, 2, 3], &[1, 2]),
        (&[WholeHosts(2)], &[1, 2, 1, 1], &[0, 2]),
        (&[WholeHosts(1)], &[1, 2, 1, 1], &[0, 1]),
        // What one leaves breaks the other, until both are met.
        (
            &[WholeHosts(2), DivisibleBy(3)],
            &[1, 1, 2, 2, 3, 3, 4, 4],
            &[0, 1, 2, 3, 4, 5],
        ),
        (&[WholeHosts(2), DivisibleBy(3)], &[1, 1, 2, 2], &[]),
    ];
    for (filters, nodes, expected) in cases {
        assert_eq!(
            filtered(filters, nodes),
            expected,
            "{filters:?} of {nodes:?}"
        );
    }
}
