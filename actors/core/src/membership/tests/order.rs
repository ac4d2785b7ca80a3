//! Ranks.

use super::*;

fn generation(
    number: u64,
    roster: &Roster,
    slots: &[u32],
    previous: Option<&Generation>,
) -> Generation {
    let seats = slots.iter().map(|slot| &roster.seats()[*slot as usize]);
    let (number, committed) = (ids::Generation(number), ids::Generation(2));
    Generation::new(number, String::new(), seats, previous, committed)
}

#[test]
fn new_processes_are_grouped_by_node_and_survivors_come_first() {
    // (nodes of slots 0.., slots of the generation before, slots in the next one)
    type Case<'a> = (&'a [u64], &'a [u32], &'a [u32]);
    let cases: [Case<'_>; 6] = [
        // A first generation: by node, in the order of the lowest slot.
        (&[1, 1, 2, 2], &[], &[0, 1, 2, 3]),
        (&[2, 1, 2, 1], &[], &[0, 2, 1, 3]),
        // Survivors keep their order, whatever their slots and nodes are.
        (&[1, 1, 2, 2], &[3, 0, 2, 1], &[3, 0, 2, 1]),
        // New processes are behind them; a node with a member comes before others.
        (&[3, 1, 2, 1], &[2], &[2, 0, 1, 3]),
        (&[3, 1, 2, 2, 1], &[2], &[2, 3, 0, 1, 4]),
        (&[3, 1, 2, 2, 1, 3], &[1, 0], &[1, 0, 4, 5, 2, 3]),
    ];
    for (nodes, before, expected) in cases {
        let roster = seated(nodes);
        let previous = generation(1, &roster, before, None);
        // The order in which seats are given does not matter.
        let given = roster.seats().iter().rev();
        let order = arrange(Some(&previous), given);
        let order: Vec<u32> = order.iter().map(|seat| seat.slot.0).collect();
        assert_eq!(order, expected, "{nodes:?} after {before:?}");
    }
}

#[test]
fn a_member_is_in_since_its_first_generation_without_a_gap() {
    let mut roster = seated(&[1, 1, 2]);
    let first = generation(1, &roster, &[0, 1], None);
    let second = generation(2, &roster, &[1, 2], Some(&first));
    assert_eq!(table(&second), [(1, 1, 1, 1), (2, 1, 2, 2)]);
    // 0 comes back, 1 is a new process: both are new.
    roster.boot(Instant::now(), Slot(1));
    let third = generation(3, &roster, &[2, 0, 1], Some(&second));
    assert_eq!(table(&third), [(2, 1, 2, 2), (0, 1, 1, 3), (1, 2, 1, 3)]);
    let ranks: Vec<u32> = third.members().iter().map(|member| member.rank.0).collect();
    assert_eq!(ranks, [0, 1, 2]);
    assert!(third.member(process(1, 1)).is_none());
    // Generation 2 has committed. Who joined later has to be given the state, in a later generation, too.
    assert!(third.needs_sync() && !third.needs_restore());
    assert!(!generation(4, &roster, &[2], Some(&third)).needs_sync());
    let last = generation(4, &roster, &[0], Some(&third));
    assert!(last.needs_sync() && last.needs_restore());
}
