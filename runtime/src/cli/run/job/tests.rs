use kolo_transport::ids::NodeId;
use kolo_transport::wire::Exit;

use super::*;

#[test]
fn a_group_that_falls_says_why_and_what_that_costs() {
    let failure = RankFailure {
        rank: Rank(1),
        node: NodeId(2),
        hostname: "b".to_owned(),
        pid: 4711,
        exit: Exit::Code(3),
        reason: None,
        stderr_tail: Vec::new(),
        account: None,
    };
    let why = "rank 1 on b: exit code 3";
    for (stopped, restart, rest) in [
        (3, Some((1, 3)), "; 3 workers are stopped; restart 1 of 3"),
        (1, Some((4, 3)), "; 1 worker is stopped; no restart is left"),
        (0, Some((1, 1)), "; restart 1 of 1"),
    ] {
        assert_eq!(
            fell(why, Some(&failure), stopped, restart),
            format!("rank 1 on b (pid 4711) ended with exit code 3{rest}")
        );
    }
    assert_eq!(
        fell("there is room for more", None, 2, None),
        "there is room for more; 2 workers are stopped"
    );
}
