#![allow(missing_docs, clippy::unwrap_used)]
mod common;
use common::{Group, Kind};
use kolo_collectives::ReduceOp;
#[test]
fn probe() {
    let group = Group::new(Kind::Tls, 2);
    let r = group.run(|comm| {
        comm.barrier().unwrap();
        if comm.rank().0 == 1 { std::thread::sleep(std::time::Duration::from_secs(8)); }
        comm.all_reduce(&mut vec![1_u8; 32 << 20], ReduceOp::Sum)
    });
    println!("RESULT {r:?}");
}
