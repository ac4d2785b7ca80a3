//! Runs the schedules of all ranks in memory, under the strictest rule: a send ends only when its receiver
//! has posted the receive for it. What gets through here can't deadlock on any lane.

use std::fmt::Debug;

use super::{Action, Schedule, Span};

/// What the ranks moved.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    /// Elements that each rank sent.
    pub(super) sent: Vec<usize>,
    /// Rounds in which every rank could go on.
    pub(super) rounds: usize,
}

/// What local actions do.
#[allow(clippy::type_complexity)] // tests write them as closures
pub(super) struct Kernels<'a, T> {
    pub(super) combine: &'a dyn Fn(T, T) -> T,
    pub(super) finish: &'a dyn Fn(T) -> T,
    /// Scalar products; how they are added up; left (which becomes the result) and right blended with them.
    pub(super) dots: &'a dyn Fn(&[T], &[T]) -> [T; 3],
    pub(super) add: &'a dyn Fn(T, T) -> T,
    pub(super) blend: &'a dyn Fn(&mut [T], &[T], [T; 3]),
}

/// Runs all schedules of something else than Adasum.
pub(super) fn run<T: Copy + Default + Debug>(
    schedules: &[Schedule],
    inputs: &[Vec<T>],
    combine: impl Fn(T, T) -> T,
    divide: impl Fn(T) -> T,
) -> Result<(Vec<Vec<T>>, Traffic), String> {
    let kernels = Kernels {
        combine: &combine,
        finish: &divide,
        dots: &|_, _| unreachable!("not adasum"),
        add: &|_, _| unreachable!("not adasum"),
        blend: &|_, _, _| unreachable!("not adasum"),
    };
    run_with(schedules, inputs, &kernels)
}

/// Runs all schedules. Returns the results, or says what is wrong.
pub(super) fn run_with<T: Copy + Default + Debug>(
    schedules: &[Schedule],
    inputs: &[Vec<T>],
    kernels: &Kernels<'_, T>,
) -> Result<(Vec<Vec<T>>, Traffic), String> {
    let combine = kernels.combine;
    let world = schedules.len();
    let mut buffers: Vec<Vec<T>> = schedules
        .iter()
        .map(|schedule| vec![T::default(); schedule.buffer])
        .collect();
    for ((buffer, schedule), input) in buffers.iter_mut().zip(schedules).zip(inputs) {
        if let Some(span) = schedule.input {
            if span.end() > schedule.buffer || span.len != input.len() {
                return Err(format!("the input of {} goes to {span:?}", input.len()));
            }
            buffer[span.start..span.end()].copy_from_slice(input);
        }
    }
    let mut traffic = Traffic {
        sent: vec![0; world],
        rounds: 0,
    };
    let mut at = vec![0_usize; world];
    // For each rank, which actions of its step are done.
    let mut done: Vec<Vec<bool>> = schedules
        .iter()
        .map(|schedule| vec![false; schedule.step(0).len()])
        .collect();
    for (rank, schedule) in schedules.iter().enumerate() {
        for (index, step) in schedule.steps().enumerate() {
            check_step(rank, index, step, schedule.buffer)?;
        }
    }
    while (0..world).any(|rank| at[rank] < schedules[rank].len()) {
        let mut moved = false;
        for rank in 0..world {
            for index in 0..schedules[rank].step(at[rank]).len() {
                let Action::Send { peer, span } = schedules[rank].step(at[rank])[index] else {
                    continue;
                };
                if done[rank][index]
                    || !is_first(schedules[rank].step(at[rank]), &done[rank], index)
                {
                    continue;
                }
                let receiver = peer as usize;
                let step = schedules[receiver].step(at[receiver]);
                // The first open receive from this rank, in the receiver's present step.
                let Some(matching) = (0..step.len()).find(|&place| {
                    !done[receiver][place]
                        && step[place]
                            .receive()
                            .is_some_and(|(peer, _)| peer as usize == rank)
                }) else {
                    continue;
                };
                let sent = buffers[rank][span.start..span.end()].to_vec();
                let (into, reduces) = match step[matching] {
                    Action::Receive { span, .. } => (span, false),
                    Action::ReceiveReduce { span, .. } => (span, true),
                    _ => unreachable!("matched above"),
                };
                if into.len != span.len {
                    return Err(format!(
                        "rank {rank} sends {} elements in step {}, rank {receiver} expects {} in step {}",
                        span.len, at[rank], into.len, at[receiver]
                    ));
                }
                for (slot, value) in buffers[receiver][into.start..into.end()]
                    .iter_mut()
                    .zip(&sent)
                {
                    *slot = if reduces {
                        combine(*slot, *value)
                    } else {
                        *value
                    };
                }
                traffic.sent[rank] += span.len;
                done[rank][index] = true;
                done[receiver][matching] = true;
                moved = true;
            }
        }
        // Ranks whose transfers are done go to their next step.
        for rank in 0..world {
            let step = schedules[rank].step(at[rank]);
            let transfers_done = step
                .iter()
                .zip(&done[rank])
                .all(|(action, done)| *done || action.transfer().is_none());
            if at[rank] >= schedules[rank].len() || !transfers_done {
                continue;
            }
            for action in step {
                local(action, &mut buffers[rank], kernels);
            }
            at[rank] += 1;
            done[rank] = vec![false; schedules[rank].step(at[rank]).len()];
            moved = true;
        }
        traffic.rounds += 1;
        if !moved {
            return Err(format!("deadlock: the ranks are at steps {at:?}"));
        }
    }
    let results = schedules
        .iter()
        .zip(&buffers)
        .map(|(schedule, buffer)| {
            let length = schedule.outputs.iter().map(|output| output.from.len).sum();
            let mut result = vec![T::default(); length];
            for output in &schedule.outputs {
                let from = output.from;
                result[output.to..output.to + from.len]
                    .copy_from_slice(&buffer[from.start..from.end()]);
            }
            result
        })
        .collect();
    Ok((results, traffic))
}

/// Whether no earlier send of the step to the same peer is open: a link keeps the order.
fn is_first(step: &[Action], done: &[bool], index: usize) -> bool {
    let Action::Send { peer: mine, .. } = step[index] else {
        return false;
    };
    step[..index].iter().zip(done).all(|(action, done)| {
        *done || !matches!(action, Action::Send { peer, .. } if *peer == mine)
    })
}

/// Spans lie in the buffer; what is received overlaps nothing that is sent or received in the same step;
/// local actions come last; nobody talks to itself.
fn check_step(rank: usize, index: usize, step: &[Action], buffer: usize) -> Result<(), String> {
    let mut sends: Vec<Span> = Vec::new();
    let mut receives: Vec<Span> = Vec::new();
    let mut local_seen = false;
    for action in step {
        let bad = || Err(format!("rank {rank} step {index}: bad {action:?}"));
        let (span, peer) = match *action {
            Action::Send { peer, span } => {
                sends.push(span);
                (span, Some(peer))
            }
            Action::Receive { peer, span } | Action::ReceiveReduce { peer, span } => {
                if receives.iter().any(|other| overlap(*other, span)) {
                    return Err(format!("rank {rank} step {index}: two receives overlap"));
                }
                receives.push(span);
                (span, Some(peer))
            }
            Action::Combine { from, into }
            | Action::Copy { from, into }
            | Action::AddDots { from, into } => {
                if from.len != into.len || overlap(from, into) || from.end() > buffer {
                    return bad();
                }
                (into, None)
            }
            Action::Finish { span } => (span, None),
            Action::Dots { left, right, into } => {
                if left.len != right.len
                    || overlap(left, into)
                    || overlap(right, into)
                    || left.end().max(right.end()) > buffer
                {
                    return bad();
                }
                (into, None)
            }
            Action::Blend {
                from, into, dots, ..
            } => {
                if from.len != into.len
                    || overlap(from, into)
                    || overlap(dots, into)
                    || from.end().max(dots.end()) > buffer
                {
                    return bad();
                }
                (into, None)
            }
        };
        if span.end() > buffer {
            return Err(format!(
                "rank {rank} step {index}: {action:?} is outside the buffer of {buffer}"
            ));
        }
        if peer == Some(rank as u32) {
            return Err(format!("rank {rank} step {index}: {action:?} is to itself"));
        }
        if peer.is_some() && local_seen {
            return Err(format!(
                "rank {rank} step {index}: a transfer after a local action"
            ));
        }
        local_seen |= peer.is_none();
    }
    if sends
        .iter()
        .any(|send| receives.iter().any(|receive| overlap(*send, *receive)))
    {
        return Err(format!(
            "rank {rank} step {index}: what is sent is overwritten"
        ));
    }
    Ok(())
}

fn overlap(a: Span, b: Span) -> bool {
    a.len > 0 && b.len > 0 && a.start < b.end() && b.start < a.end()
}

fn local<T: Copy>(action: &Action, buffer: &mut [T], kernels: &Kernels<'_, T>) {
    let copy = |buffer: &[T], span: Span| buffer[span.start..span.end()].to_vec();
    match *action {
        Action::Combine { from, into } => {
            for index in 0..into.len {
                buffer[into.start + index] =
                    (kernels.combine)(buffer[into.start + index], buffer[from.start + index]);
            }
        }
        Action::Finish { span } => {
            for value in &mut buffer[span.start..span.end()] {
                *value = (kernels.finish)(*value);
            }
        }
        Action::Copy { from, into } => buffer.copy_within(from.start..from.end(), into.start),
        Action::Dots { left, right, into } => {
            let dots = (kernels.dots)(&copy(buffer, left), &copy(buffer, right));
            buffer[into.start..into.end()].copy_from_slice(&dots);
        }
        Action::AddDots { from, into } => {
            for index in 0..into.len {
                buffer[into.start + index] =
                    (kernels.add)(buffer[into.start + index], buffer[from.start + index]);
            }
        }
        Action::Blend {
            from,
            into,
            dots,
            mirrored,
        } => {
            let dots = copy(buffer, dots);
            let dots = if mirrored {
                [dots[0], dots[2], dots[1]]
            } else {
                [dots[0], dots[1], dots[2]]
            };
            let from = copy(buffer, from);
            (kernels.blend)(&mut buffer[into.start..into.end()], &from, dots);
        }
        Action::Send { .. } | Action::Receive { .. } | Action::ReceiveReduce { .. } => {}
    }
}
