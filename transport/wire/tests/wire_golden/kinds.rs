//! All kinds of messages.

use kolo_wire::head::Beat;
use kolo_wire::*;

use super::{Again, again};

/// Structs by name, and enums with all their variants. Does not compile while a variant is missing.
macro_rules! kinds {
    ($($plain:ident)*; $($kind:ident { $($variant:ident)* })*) => {
        /// The names of all messages, as the golden file has them.
        pub(crate) fn names() -> Vec<String> {
            $(let _: fn(&$kind) = |message| match message { $($kind::$variant { .. } => {})* };)*
            let mut names = vec![$(stringify!($plain).to_owned()),*];
            $(names.extend([$(concat!(stringify!($kind), "::", stringify!($variant)).to_owned()),*]);)*
            names
        }

        /// Decodes a message of a kind, and encodes it again.
        pub(crate) fn of(kind: &str) -> Again {
            match kind {
                $(stringify!($plain) => again::<$plain>,)*
                $(stringify!($kind) => again::<$kind>,)*
                _ => panic!("no message is called {kind}"),
            }
        }
    };
}

kinds! {
    JoinRequest Welcome Beat OutputChunk StdinChunk LogBatch WorkerCall WorkerResult;
    JoinReply { Joined Refused }
    HeadRequest {
        Register Heartbeats Events SignWorker Submit DryRun Cluster Jobs Job Stop Renew
        Drain CreateToken Tokens RevokeToken Revoke Reinstate Network Interfaces
        Surroundings DrainNode UndrainNode Metrics
    }
    SubmitFrame { ProgramReady Stop Kill Done Interrupt Signal Unreachable Holding Hosts Overran }
    NodeEvent { WorkerReady WorkerExited WorkerUnseen Taken Committed Holding JobGone JobLeft }
    HeadReply {
        Done Registered Signed Cluster Jobs Job Renewed Token Tokens Revoked Placed
        Interfaces Surroundings Draining Refused
    }
    JobEvent { Placed Healthy Generation Fell Waits Hold RankLost Ended }
    NodeRequest {
        Revocations Reserve Release Start Membership RankLost Revoke Hold FreePort
        StopWorker Stop Signal Kill HasProgram PutProgram Attach Logs Output Probe Echo
        Surroundings
    }
    NodeReply {
        Done Reserved Started FreePort HasProgram Attached Logs Output Probed Echo
        Surroundings Refused
    }
    CallOp { Function Create Method Drop Recover Commit Retain }
    CallFrame { Call Cancel }
    CallReply { Result Refused Lost }
    ToWorker { Welcome Certificate Membership Revoke Hold RankLost Peer LinkRequested Cancel Stop }
    FromWorker { Hello Sign Ready ConnectPeer RequestLink Taken Committed Holding }
    Placement { Pack Spread }
    Exit { Code Signal Unknown }
    JobState { Pending Placing Probing Starting Healthy Recovering Succeeded Failed Stopped }
    Outcome { Returned Failed }
}
