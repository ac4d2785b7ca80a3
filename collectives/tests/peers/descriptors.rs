//! A rank that has no file descriptor left.

use kolo_collectives::Handle;

use super::children::Process;
use super::*;

/// What such a rank does, in a process of its own.
pub(crate) fn exhaust(comm: &Communicator, named: bool) {
    comm.set_timeout(LONG);
    let limit = rustix::process::Rlimit {
        current: Some(64),
        maximum: Some(64),
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let mut held = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        held.push(file);
    }
    let named = named.then(|| start_named(comm));
    println!("\nkolo: exhausted");
    let text = match named {
        None => comm.barrier().unwrap_err().to_string(),
        Some(named) => named.wait().unwrap_err().to_string(),
    };
    let says = format!("rank {} has no file descriptor left for", comm.rank());
    assert!(text.contains(&says) && text.contains("ulimit"), "{text}");
    drop(held);
    println!("kolo: free");
    try_again(comm);
}

fn start_named(comm: &Communicator) -> Handle<Vec<f32>> {
    comm.named("sum").all_reduce(vec![1.0], ReduceOp::Sum)
}

/// A link that was refused late may end an operation more.
fn try_again(comm: &Communicator) {
    let mut errors = Vec::new();
    while let Err(error) = comm.barrier() {
        assert!(error.is_retryable(), "{error}");
        errors.push(error);
        assert!(errors.len() < 4, "{errors:?}");
    }
}

#[test]
fn a_rank_that_has_no_descriptor_left_says_so_and_all_hear_of_it() {
    let barriers = (0..3).map(|exhausted| (exhausted, 3, "barrier"));
    // Of a name only those hear who have asked for it.
    for (exhausted, world, what) in barriers.chain([(0, 2, "named")]) {
        let folder = Folder::new(&format!("exhausted-{exhausted}-{what}"));
        let given = format!("exhausts,{},{exhausted},{world},{what}", folder.0.display());
        let mut process = Process::start(&given);
        process.says("kolo: exhausted");
        let others = (0..world).filter(|rank| *rank != exhausted);
        let comms = run(others, |rank| {
            let comm = Local::in_folder(&folder.0).join(Rank(rank), world).unwrap();
            comm.set_timeout(LONG);
            let begun = Instant::now();
            let error = match what {
                "barrier" => comm.barrier().unwrap_err(),
                _ => start_named(&comm).wait().unwrap_err(),
            };
            assert_eq!(error.culprit_rank(), Some(Rank(exhausted)), "{error}");
            assert!(error.to_string().contains("no file descriptor"), "{error}");
            assert!(begun.elapsed() < LONG / 2);
            comm
        });
        process.says("kolo: free");
        run(&comms, try_again);
        process.ends_well();
    }
}
