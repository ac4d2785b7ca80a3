//! Validation, cool-down, filters.

use super::*;

/// What is wrong with limits of 4 to 6 workers after a change.
fn refusal(change: fn(&mut Limits)) -> String {
    let checked = with(4, 6, change).check();
    checked.map_or_else(|error| error.to_string() + "\n", |()| String::new())
}

#[test]
fn limits_that_make_no_sense_say_what_was_given_and_what_is_allowed() {
    use Filter::{DivisibleBy, Max, WholeHosts};
    let sound: [fn(&mut Limits); 3] = [
        |_| {},
        |it| it.cooldown = Some(s(1)..=s(3600)),
        |it| it.filters = vec![DivisibleBy(5)],
    ];
    assert_eq!(sound.map(refusal).concat(), "");
    let senseless: [fn(&mut Limits); 18] = [
        |it| it.min = 0,
        |it| it.min = 7,
        |it| it.per_host = 3,
        |it| (it.per_host, it.max) = (2, 7),
        |it| (it.per_host, it.spares) = (2, 1),
        |it| (it.on_change, it.spares) = (OnChange::Restart, 1),
        |it| it.max = u32::MAX,
        |it| it.filters = vec![Max(6); 17],
        |it| it.cooldown = Some(ms(500)..=s(10)),
        |it| it.cooldown = Some(s(1)..=s(3601)),
        |it| it.cooldown = Some(s(20)..=s(10)),
        |it| it.start_timeout = s(0),
        |it| it.ack_timeout = s(0),
        |it| it.restarts_within = Some((3, s(0))),
        |it| it.filters = vec![WholeHosts(0)],
        |it| it.filters = vec![DivisibleBy(7)],
        |it| it.filters = vec![Max(3), DivisibleBy(2)],
        |it| it.filters = vec![DivisibleBy(2), DivisibleBy(5)],
    ];
    assert_eq!(
        senseless.map(refusal).concat(),
        "\
min_workers=0 is given; a group has at least 1 worker
min_workers=7 and max_workers=6 are given; max_workers must be at least min_workers
min_workers=4 is given; it must be a multiple of the 3 workers on each node
max_workers=7 is given; it must be a multiple of the 2 workers on each node
spares=1 is given; it must be a multiple of the 2 workers on each node
spares=1 is given for processes that are started with their ranks, so that none can wait without: give no spares
max_workers=4294967295 and spares=0 are given; allowed are 16384 workers in all
17 filters are given; allowed are 16
cooldown_range=(0.5, 10) s is given; allowed are 1 to 3600 s, the lower bound first
cooldown_range=(1, 3601) s is given; allowed are 1 to 3600 s, the lower bound first
cooldown_range=(20, 10) s is given; allowed are 1 to 3600 s, the lower bound first
start_timeout=0 is given; it must be longer than 0
ack_timeout=0 is given; it must be longer than 0
restarts_within=0 is given; it must be longer than 0
the filter whole_hosts(0) is given; its number must be at least 1
no number of workers from min_workers=4 to max_workers=6 passes divisible_by(7)
no number of workers from min_workers=4 to max_workers=6 passes max(3), divisible_by(2)
no number of workers from min_workers=4 to max_workers=6 passes divisible_by(2), divisible_by(5)
"
    );
}

/// The figures measured with Horovod for (10, 100).
#[test]
fn cooldown_grows_as_horovods() {
    let range = s(10)..=s(100);
    let cases = [(1, 20, 30), (2, 40, 50), (3, 80, 90)];
    for (times, least, most) in cases
        .into_iter()
        .chain([4, 5, 99].map(|times| (times, 100, 100)))
    {
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
    let both = [WholeHosts(2), DivisibleBy(3)];
    let cases: [(&[Filter], &[u64], &[u32]); 9] = [
        (&[], &[1, 1, 2], &[0, 1, 2]),
        (&[DivisibleBy(2)], &[1, 1, 2], &[0, 1]),
        (&[DivisibleBy(4)], &[1, 1, 2], &[]),
        (&[Max(2)], &[1, 1, 2], &[0, 1]),
        (&[WholeHosts(2)], &[1, 2, 2, 3], &[1, 2]),
        (&[WholeHosts(2)], &[1, 2, 1, 1], &[0, 2]),
        (&[WholeHosts(1)], &[1, 2, 1, 1], &[0, 1]),
        // What one leaves breaks the other, until both are met.
        (&both, &[1, 1, 2, 2, 3, 3, 4, 4], &[0, 1, 2, 3, 4, 5]),
        (&both, &[1, 1, 2, 2], &[]),
    ];
    for (filters, nodes, left) in cases {
        assert_eq!(filtered(filters, nodes), left, "{filters:?} of {nodes:?}");
    }
}
