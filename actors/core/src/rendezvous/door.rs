//! The door of one process: a rendezvous listener of its own, which the process keeps for life.
//!
//! A worker of Horovod reads one address at its start and asks there for ever. Its requests do not say which process asks, nor in which
//! generation the process is. So each process of a job that heals in place has a port of its own, and the head says which
//! generation is behind it.
//!
//! ```text
//! started --> the first request: arrived, waits --> let in --> the store of the generation
//!                                                     ^                  |
//!                                                     |          asks for its rank anew
//!                                                     |                  v
//!                                                     +---------- asked, waits
//! ```
//!
//! What waits has no answer until the head lets the process in. A worker of Horovod has no time limit for answers, while one that
//! waits for its peers in Gloo is gone after 30 s: so none waits there for others that may not come.

use std::net::{IpAddr, SocketAddr};

use kolo_wire::ids::{Generation, JobId, NodeId};
use kolo_wire::{GenerationTable, Member};

use super::plan::{PROCESS_SET, WORKER_ADDRESSES};
use crate::membership::Process;

/// Where a worker asks for its rank in the next generation, as `HOSTNAME:LOCAL_RANK`.
pub const RANK_AND_SIZE: &str = "rank_and_size";

/// A door that is to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoorOpening {
    /// The job.
    pub job: JobId,
    /// The process that is to be started.
    pub process: Process,
    /// The node on which it is started.
    pub node: NodeId,
    /// The value of `HOROVOD_HOSTNAME` in its environment.
    pub hostname: String,
    /// The addresses from which it comes.
    pub peers: Vec<IpAddr>,
    /// An address of this host that its node reaches, if one is known.
    pub local: Option<IpAddr>,
}

/// News of a door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DoorNews {
    /// It is open at this address, or why it is not.
    Opened(Result<SocketAddr, String>),
    /// The process has come for the first time, and waits to be let in.
    Arrived,
    /// The process has left this generation, and waits for a later one.
    Asked(Generation),
    /// The process listens for notices that hosts have changed.
    Hears,
    /// The process has taken the notice with this number, or why not.
    Noticed(u64, Result<(), String>),
}

/// What is to be done with a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Course {
    /// It concerns the store of the generation, where the scope has this name.
    Store(String),
    /// The answer is this: the process's ranks and sizes.
    Ranks(String),
    /// It waits until the process is let in, and is looked at again then. The news is for the head.
    Wait(Option<DoorNews>),
    /// Its value says where the process listens for notices.
    Hear,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    /// It is in no generation.
    Outside { has_arrived: bool },
    /// It is in one, or may be once it has its answer.
    Inside {
        generation: Generation,
        ranks: String,
        /// It has come for something other than its ranks, so it has them.
        is_in: bool,
        has_asked: bool,
    },
}

/// The door of one process. Pure: the shell has the listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Door {
    process: Process,
    node: NodeId,
    hostname: String,
    stage: Stage,
}

impl Door {
    /// The door of a process that is to be started with these values.
    #[must_use]
    pub fn new(process: Process, node: NodeId, hostname: String) -> Self {
        Self {
            process,
            node,
            hostname,
            stage: Stage::Outside { has_arrived: false },
        }
    }

    /// Lets the process into a generation. Nothing happens if it is no member, or is there already.
    pub fn admit(&mut self, table: &GenerationTable) -> bool {
        let is_self = |member: &&Member| {
            member.slot == self.process.slot && member.incarnation == self.process.incarnation
        };
        let Some(member) = table.members.iter().find(is_self) else {
            return false;
        };
        if let Stage::Inside { generation, .. } = &self.stage
            && *generation >= table.generation
        {
            return false;
        }
        self.stage = Stage::Inside {
            generation: table.generation,
            ranks: ranks(member, table.world_size()),
            // A new process has its ranks from its environment.
            is_in: matches!(self.stage, Stage::Outside { .. }),
            has_asked: false,
        };
        true
    }

    /// What is to be done with a request.
    pub fn request(&mut self, scope: &str) -> Course {
        if scope == WORKER_ADDRESSES {
            return Course::Hear;
        }
        match &mut self.stage {
            Stage::Outside { has_arrived } => {
                let is_first = !std::mem::replace(has_arrived, true);
                Course::Wait(is_first.then_some(DoorNews::Arrived))
            }
            // An answer may be lost, and then it is asked for again.
            Stage::Inside { ranks, is_in, .. } if scope == RANK_AND_SIZE && !*is_in => {
                Course::Ranks(ranks.clone())
            }
            Stage::Inside {
                generation,
                has_asked,
                ..
            } if scope == RANK_AND_SIZE => {
                let is_first = !std::mem::replace(has_asked, true);
                let asked = DoorNews::Asked(*generation);
                Course::Wait(is_first.then_some(asked))
            }
            Stage::Inside { is_in, .. } => {
                *is_in = true;
                Course::Store(self.common(scope))
            }
        }
    }

    /// The name that a scope has for all processes: a node may have another name for each of its processes.
    fn common(&self, scope: &str) -> String {
        let own = scope.strip_prefix("local_");
        let own = own.and_then(|scope| scope.strip_prefix(self.hostname.as_str()));
        match own {
            Some(rest) if rest.is_empty() || rest.starts_with(PROCESS_SET) => {
                format!("local_{}{rest}", self.node)
            }
            _ => scope.to_owned(),
        }
    }
}

/// The answer of Horovod's own driver.
fn ranks(member: &Member, size: u32) -> String {
    let Member {
        rank,
        local_rank,
        local_size,
        cross_rank,
        cross_size,
        ..
    } = member;
    format!("{rank},{size},{local_rank},{local_size},{cross_rank},{cross_size}")
}

#[cfg(test)]
mod tests {
    use kolo_wire::Handover;
    use kolo_wire::ids::{CrossRank, Incarnation, LocalRank, Rank, Slot};

    use super::*;

    const FIRST: Process = Process {
        slot: Slot(4),
        incarnation: Incarnation(2),
    };

    fn table(generation: u64, slots: &[(u32, u64)]) -> GenerationTable {
        let members = (0..).zip(slots).map(|(rank, (slot, incarnation))| Member {
            rank: Rank(rank),
            local_rank: LocalRank(rank),
            local_size: slots.len() as u32,
            cross_rank: CrossRank(0),
            cross_size: 1,
            slot: Slot(*slot),
            node: NodeId(7),
            hostname: "host".to_owned(),
            address: None,
            incarnation: Incarnation(*incarnation),
        });
        GenerationTable {
            job: JobId(1),
            generation: Generation(generation),
            members: members.collect(),
            cause: String::new(),
            handover: Handover::None,
        }
    }

    fn door() -> Door {
        Door::new(FIRST, NodeId(7), "host".to_owned())
    }

    #[test]
    fn a_new_process_waits_until_it_is_let_in() {
        let mut door = door();
        assert_eq!(
            door.request("global"),
            Course::Wait(Some(DoorNews::Arrived))
        );
        assert_eq!(door.request("global"), Course::Wait(None));
        // Another process of its seat is another process.
        assert!(!door.admit(&table(3, &[(4, 1), (5, 2)])));
        assert_eq!(door.request("global"), Course::Wait(None));
        assert!(door.admit(&table(3, &[(5, 2), (4, 2)])));
        assert_eq!(door.request("global"), Course::Store("global".to_owned()));
    }

    #[test]
    fn a_member_that_asks_for_its_rank_gets_that_of_a_later_generation() {
        let mut door = door();
        door.admit(&table(3, &[(5, 1), (4, 2)]));
        let asked = Course::Wait(Some(DoorNews::Asked(Generation(3))));
        assert_eq!(door.request(RANK_AND_SIZE), asked);
        assert_eq!(door.request(RANK_AND_SIZE), Course::Wait(None));
        assert!(!door.admit(&table(3, &[(4, 2)])), "it is in that one");
        assert!(!door.admit(&table(2, &[(4, 2)])), "that one is over");
        assert!(door.admit(&table(5, &[(4, 2)])));
        let ranks = Course::Ranks("0,1,0,1,0,1".to_owned());
        assert_eq!(door.request(RANK_AND_SIZE), ranks);
        // Its answer was lost.
        assert_eq!(door.request(RANK_AND_SIZE), ranks);
        assert_eq!(door.request("cross_0"), Course::Store("cross_0".to_owned()));
        let asked = Course::Wait(Some(DoorNews::Asked(Generation(5))));
        assert_eq!(door.request(RANK_AND_SIZE), asked);
    }

    #[test]
    fn the_scope_of_a_node_has_one_name_for_all_its_processes() {
        let mut door = door();
        door.admit(&table(1, &[(4, 2)]));
        let node = NodeId(7);
        for (scope, common) in [
            ("local_host", format!("local_{node}")),
            (
                "local_host_process_set_hash_1f",
                format!("local_{node}_process_set_hash_1f"),
            ),
            ("local_host2", "local_host2".to_owned()),
            ("global", "global".to_owned()),
        ] {
            assert_eq!(door.request(scope), Course::Store(common));
        }
        assert_eq!(door.request(WORKER_ADDRESSES), Course::Hear);
    }
}
