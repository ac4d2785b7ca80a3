use kolo_wire::Milli;
use proptest::prelude::*;

use super::*;

const LEASE: Duration = Duration::from_secs(5);

fn resources(cpus: u64, gpus: u32, fpga: u64) -> Resources {
    Resources {
        cpus: Milli::units(cpus),
        gpus,
        custom: BTreeMap::from([("fpga".to_owned(), Milli::units(fpga))]),
    }
}

impl Inventory {
    /// Reserves for a job: so much for each of so many workers.
    fn takes(
        &mut self,
        now: Instant,
        job: u64,
        per_worker: &Resources,
        workers: u32,
    ) -> Result<Holding, HoldError> {
        self.reserve(now, JobId(job), per_worker, workers, LEASE)
            .cloned()
    }

    fn devices(&mut self, now: Instant, job: u64, gpus: u32, workers: u32) -> Vec<String> {
        let holding = self.takes(now, job, &resources(1, gpus, 0), workers);
        holding.unwrap().devices
    }
}

fn inventory(cpus: u64, gpus: u32, fpga: u64) -> Inventory {
    let devices = (0..gpus).map(|id| id.to_string()).collect();
    Inventory::new(resources(cpus, 0, fpga), devices)
}

#[test]
fn the_job_gets_the_union_of_its_workers_devices() {
    let now = Instant::now();
    let mut node = inventory(8, 4, 0);
    assert_eq!(node.total().gpus, 4);
    assert_eq!(node.devices(now, 1, 1, 2), ["0", "1"]);
    assert!(node.devices(now, 2, 0, 2).is_empty());
    assert_eq!(node.devices(now, 3, 2, 1), ["2", "3"]);
    node.release(JobId(1));
    assert_eq!(node.devices(now, 4, 1, 1), ["0"], "devices come back");
}

#[test]
fn what_does_not_fit_is_refused_whole_and_named() {
    let now = Instant::now();
    let mut node = inventory(4, 1, 0);
    let error = node.takes(now, 1, &resources(2, 1, 1), 3).unwrap_err();
    let lacks = "this node lacks cpus: requested 6, available 4; gpus: requested 3, available 1; fpga: requested 3, available 0";
    assert_eq!(error.to_string(), lacks);
    assert_eq!(Refusal::from(error).kind, RefusalKind::Unplaceable);
    assert_eq!(node.free(), node.total());
    assert!(node.holdings.is_empty());
}

#[test]
fn wrong_requests_are_refused() {
    let now = Instant::now();
    let mut node = inventory(4, 0, 0);
    let one = resources(1, 0, 0);
    let mut reserve = |workers, lease| {
        node.reserve(now, JobId(1), &one, workers, lease)
            .cloned()
            .unwrap_err()
    };
    for (workers, lease, error) in [
        (0, LEASE, HoldError::NoWorkers),
        (
            MAX_WORKERS + 1,
            LEASE,
            HoldError::TooManyWorkers(MAX_WORKERS + 1),
        ),
        (1, Duration::ZERO, HoldError::Lease(Duration::ZERO)),
        (1, Duration::MAX, HoldError::Lease(Duration::MAX)),
    ] {
        assert_eq!(reserve(workers, lease), error);
    }
    // What asks for nothing fits anywhere, but not without a bound.
    let none = Resources::default();
    assert!(node.takes(now, 2, &none, 4096).is_ok());
}

#[test]
fn a_reservation_that_is_not_committed_in_time_is_released() {
    let start = Instant::now();
    let mut node = inventory(4, 2, 0);
    node.takes(start, 1, &resources(2, 1, 0), 2).unwrap();
    assert_eq!(node.next_expiry(), Some(start + LEASE));
    let late = start + LEASE;
    let early = start + LEASE / 2;
    assert!(node.expire(early).is_empty());
    // Even before `expire` has run, a late commit finds nothing.
    let not_reserved = Err(HoldError::NotReserved(JobId(1)));
    assert_eq!(node.commit(late, JobId(1), 2), not_reserved);
    assert_eq!(node.expire(late), [JobId(1)]);
    assert_eq!((node.free(), node.next_expiry()), (node.total(), None));
    assert_eq!(node.commit(late, JobId(1), 2), not_reserved);
}

#[test]
fn a_committed_reservation_stays() {
    let start = Instant::now();
    let mut node = inventory(4, 0, 0);
    let one = resources(1, 0, 0);
    node.takes(start, 1, &one, 2).unwrap();
    let other = HoldError::Workers {
        job: JobId(1),
        reserved: 2,
        given: 3,
    };
    let again = HoldError::Committed(JobId(1));
    for (workers, result) in [(3, Err(other)), (2, Ok(())), (2, Err(again))] {
        assert_eq!(node.commit(start, JobId(1), workers).map(drop), result);
    }
    assert!(node.expire(start + MAX_LEASE * 2).is_empty());
    let held = Err(HoldError::Held(JobId(1)));
    assert_eq!(node.takes(start, 1, &one, 2), held);
    assert!(node.release(JobId(1)).is_some());
    assert!(node.release(JobId(1)).is_none());
    assert_eq!(node.free(), node.total());
}

#[test]
fn the_same_request_again_renews_the_lease_and_takes_nothing_more() {
    let start = Instant::now();
    let mut node = inventory(4, 2, 0);
    let one = resources(1, 1, 0);
    let first = node.takes(start, 1, &one, 2).unwrap();
    let later = start + LEASE / 2;
    let second = node.takes(later, 1, &one, 2).unwrap();
    assert_eq!(second.devices, first.devices);
    assert_eq!(second.expires, Some(later + LEASE));
    assert_eq!(node.free(), &resources(2, 0, 0));
    let held = Err(HoldError::Held(JobId(1)));
    assert_eq!(node.takes(later, 1, &one, 1), held);
}

#[test]
fn a_job_grows_and_shrinks_by_workers_within_what_is_there() {
    let start = Instant::now();
    let mut node = inventory(4, 3, 0);
    let one = resources(1, 1, 0);
    node.takes(start, 1, &one, 2).unwrap();
    node.takes(start, 2, &resources(1, 0, 0), 1).unwrap();
    let all = |names: &[&str]| -> Vec<Vec<String>> {
        names.iter().map(|name| vec![(*name).to_owned()]).collect()
    };
    // Fewer than were reserved at first, then as many as fit.
    assert_eq!(node.grow(start, JobId(1), 1).unwrap(), all(&["0"]));
    assert_eq!(node.free(), &resources(2, 2, 0));
    assert!(node.expire(start + LEASE).contains(&JobId(2)));
    assert!(matches!(
        node.grow(start, JobId(1), 3),
        Err(HoldError::Shortage(short)) if short.len() == 1
    ));
    assert_eq!(node.grow(start, JobId(1), 2).unwrap(), all(&["1", "2"]));
    node.shrink(JobId(1), &all(&["1"])[0]);
    assert_eq!(node.grow(start, JobId(1), 1).unwrap(), all(&["1"]));
    for device in ["0", "1", "2", "2"] {
        node.shrink(JobId(1), &all(&[device])[0]);
    }
    assert_eq!(node.free(), node.total());
    assert_eq!(node.grow(start, JobId(1), 0).unwrap(), all(&[]));
    let most = node.grow(start, JobId(1), u32::MAX);
    assert_eq!(most, Err(HoldError::TooManyMore(JobId(1))));
    // A lease that has ended is none.
    node.takes(start, 3, &one, 1).unwrap();
    let late = node.grow(start + LEASE, JobId(3), 1);
    assert_eq!(late, Err(HoldError::NotReserved(JobId(3))));
}

#[derive(Debug, Clone)]
enum Step {
    Reserve(u64, u64, u32, u32),
    Commit(u64, u32),
    Grow(u64, u32),
    Shrink(u64),
    Release(u64),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_u64..5, 0_u64..4, 0_u32..3, 1_u32..4)
            .prop_map(|(job, cpus, gpus, workers)| Step::Reserve(job, cpus, gpus, workers)),
        (0_u64..5, 1_u32..4).prop_map(|(job, workers)| Step::Commit(job, workers)),
        (0_u64..5, 0_u32..4).prop_map(|(job, workers)| Step::Grow(job, workers)),
        (0_u64..5).prop_map(Step::Shrink),
        (0_u64..5).prop_map(Step::Release),
        (0_u64..4).prop_map(Step::Wait),
    ]
}

proptest! {
    /// Whatever happens, free plus held is the total, no device is held twice, and each job has
    /// as many devices as it holds GPUs.
    #[test]
    fn nothing_is_lost_and_nothing_is_held_twice(steps in proptest::collection::vec(step(), 0..60)) {
        let mut now = Instant::now();
        let mut node = inventory(10, 6, 0);
        // The devices of each worker of a job that grows.
        let mut grown = BTreeMap::new();
        for step in steps {
            match step {
                Step::Reserve(job, cpus, gpus, workers) => {
                    let _ = node.takes(now, job, &resources(cpus, gpus, 0), workers);
                }
                Step::Commit(job, workers) => {
                    let _ = node.commit(now, JobId(job), workers);
                }
                Step::Grow(job, workers) => {
                    let before = (node.free().clone(), node.holdings.get(&JobId(job)).cloned());
                    if let Ok(devices) = node.grow(now, JobId(job), workers) {
                        prop_assert_eq!(devices.len(), workers as usize);
                        grown.entry(job).or_insert_with(Vec::new).extend(devices);
                    } else {
                        let after = (node.free().clone(), node.holdings.get(&JobId(job)).cloned());
                        prop_assert_eq!(after, before);
                    }
                }
                Step::Shrink(job) => {
                    if let Some(devices) = grown.get_mut(&job).and_then(Vec::pop) {
                        node.shrink(JobId(job), &devices);
                    }
                }
                Step::Release(job) => {
                    node.release(JobId(job));
                    grown.remove(&job);
                }
                Step::Wait(seconds) => {
                    now += Duration::from_secs(seconds);
                    node.expire(now);
                }
            }
            let mut sum = node.free().clone();
            let mut devices = Vec::new();
            for holding in node.holdings.values() {
                let all = holding.per_worker.times(holding.workers);
                prop_assert_eq!(all.gpus as usize, holding.devices.len());
                prop_assert!(holding.expires.is_none_or(|expires| expires > now));
                devices.extend(holding.devices.clone());
                sum = sum.plus(&all);
            }
            prop_assert_eq!(&sum, node.total());
            let count = devices.len();
            devices.sort();
            devices.dedup();
            prop_assert_eq!(devices.len(), count);
        }
    }
}
