//! The names of all kinds of messages.

use super::*;

/// Names all variants of an enum. Does not compile when one is added: add an example below, then its name here.
macro_rules! variants {
    ($kind:ident { $($variant:ident),* $(,)? }) => {{
        fn all_are_named(message: &$kind) {
            match message { $($kind::$variant { .. } => {})* }
        }
        let _: fn(&$kind) = all_are_named;
        [$(concat!(stringify!($kind), "::", stringify!($variant))),*]
    }};
}

pub(crate) fn required() -> BTreeSet<&'static str> {
    let mut names = BTreeSet::from([
        "JoinRequest",
        "Welcome",
        "Beat",
        "LogBatch",
        "WorkerCall",
        "WorkerResult",
    ]);
    names.extend(variants!(JoinReply { Joined, Refused }));
    names.extend(variants!(HeadRequest {
        Register,
        Heartbeats,
        Events,
        SignWorker,
        Submit,
        DryRun,
        Cluster,
        Jobs,
        Job,
        Stop,
        Renew,
        Drain,
        CreateToken,
        Tokens,
        RevokeToken,
        Revoke,
        Reinstate,
        Network,
        Interfaces,
        Surroundings,
        DrainNode,
        UndrainNode
    }));
    names.extend(variants!(SubmitFrame {
        ProgramReady,
        Stop,
        Kill,
        Done,
        Interrupt,
        Signal,
        Unreachable,
        Hosts
    }));
    names.extend(variants!(NodeEvent {
        WorkerReady,
        WorkerExited,
        WorkerUnseen,
        Taken,
        Committed,
        Holding,
        JobGone,
        JobLeft
    }));
    names.extend(variants!(HeadReply {
        Done,
        Registered,
        Signed,
        Cluster,
        Jobs,
        Job,
        Renewed,
        Token,
        Tokens,
        Revoked,
        Placed,
        Interfaces,
        Surroundings,
        Draining,
        Refused
    }));
    names.extend(variants!(JobEvent {
        Placed,
        Healthy,
        Generation,
        Fell,
        Waits,
        RankLost,
        Ended
    }));
    names.extend(variants!(NodeRequest {
        Revocations,
        Reserve,
        Release,
        Start,
        Membership,
        RankLost,
        Revoke,
        Hold,
        FreePort,
        StopWorker,
        Stop,
        Signal,
        Kill,
        HasProgram,
        PutProgram,
        Attach,
        Logs,
        Output,
        Probe,
        Echo,
        Surroundings
    }));
    names.extend(variants!(NodeReply {
        Done,
        Reserved,
        Started,
        FreePort,
        HasProgram,
        Attached,
        Logs,
        Output,
        Probed,
        Echo,
        Surroundings,
        Refused
    }));
    names.extend(variants!(CallOp {
        Function,
        Create,
        Method,
        Drop,
        Recover,
        Commit,
        Retain
    }));
    names.extend(variants!(CallFrame { Call, Cancel }));
    names.extend(variants!(CallReply {
        Result,
        Refused,
        Lost
    }));
    names.extend(variants!(ToWorker {
        Welcome,
        Certificate,
        Membership,
        Revoke,
        Hold,
        RankLost,
        Peer,
        LinkRequested,
        Cancel,
        Stop
    }));
    names.extend(variants!(FromWorker {
        Hello,
        Sign,
        Ready,
        ConnectPeer,
        RequestLink,
        Taken,
        Committed,
        Holding
    }));
    names.extend(variants!(Placement { Pack, Spread }));
    names.extend(variants!(Exit {
        Code,
        Signal,
        Unknown
    }));
    names.extend(
        variants!(JobState {
            Pending,
            Placing,
            Probing,
            Starting,
            Healthy,
            Recovering,
            Succeeded,
            Failed,
            Stopped
        })
        .map(|_| "JobState"),
    );
    names.extend(variants!(Outcome { Returned, Failed }));
    names
}
