//! Runs the schedules of all ranks in memory, under the strictest rule: a send ends only when its receiver
//! has posted the receive for it. What gets through here can't deadlock on any lane.

use std::fmt::Debug;

use super::{Action, Schedule, Span};

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

/// The results of all ranks, and how many elements each one sent; or what is wrong.
pub(super) type Outcome<T> = Result<(Vec<Vec<T>>, Vec<usize>), String>;

/// Runs all schedules of something else than Adasum.
pub(super) fn run<T: Copy + Default + Debug>(
    schedules: &[Schedule],
    inputs: &[Vec<T>],
    combine: impl Fn(T, T) -> T,
    finish: impl Fn(T) -> T,
) -> Outcome<T> {
    let kernels = Kernels {
        combine: &combine,
        finish: &finish,
        dots: &|_, _| unreachable!("not adasum"),
        add: &|_, _| unreachable!("not adasum"),
        blend: &|_, _, _| unreachable!("not adasum"),
    };
    run_with(schedules, inputs, &kernels)
}

/// Runs all schedules.
pub(super) fn run_with<T: Copy + Default + Debug>(
    schedules: &[Schedule],
    inputs: &[Vec<T>],
    kernels: &Kernels<'_, T>,
) -> Outcome<T> {
    let world = schedules.len();
    let mut buffers: Vec<Vec<T>> = Vec::new();
    for (rank, (schedule, input)) in schedules.iter().zip(inputs).enumerate() {
        let mut buffer = vec![T::default(); schedule.buffer];
        if let Some(span) = schedule.input {
            if span.end() > schedule.buffer || span.len != input.len() {
                return Err(format!("the input of {} goes to {span:?}", input.len()));
            }
            buffer[span.start..span.end()].copy_from_slice(input);
        }
        buffers.push(buffer);
        for (index, step) in schedule.steps().enumerate() {
            check_step(rank, step, schedule.buffer)
                .map_err(|wrong| format!("rank {rank} step {index}: {wrong}"))?;
        }
    }
    let mut sent = vec![0; world];
    let mut at = vec![0_usize; world];
    // For each rank, which actions of its step are done.
    let undone = |rank: usize, at: usize| vec![false; schedules[rank].step(at).len()];
    let mut done: Vec<Vec<bool>> = (0..world).map(|rank| undone(rank, 0)).collect();
    while (0..world).any(|rank| at[rank] < schedules[rank].len()) {
        let mut moved = false;
        for rank in 0..world {
            let own = schedules[rank].step(at[rank]);
            for (index, action) in own.iter().enumerate() {
                let Action::Send { peer, span } = *action else {
                    continue;
                };
                // A link keeps the order.
                let is_same =
                    |other: &Action| matches!(other, Action::Send { peer: to, .. } if *to == peer);
                let mut before = own[..index].iter().zip(&done[rank]);
                if done[rank][index] || before.any(|(other, done)| is_same(other) && !done) {
                    continue;
                }
                let receiver = peer as usize;
                let step = schedules[receiver].step(at[receiver]);
                // The first open receive from this rank, in the receiver's present step.
                let receives = |(place, action): (usize, &Action)| {
                    let (from, into) = action.receive()?;
                    (from as usize == rank && !done[receiver][place]).then_some((place, into))
                };
                let Some((place, into)) = step.iter().enumerate().find_map(receives) else {
                    continue;
                };
                if into.len != span.len {
                    return Err(format!(
                        "rank {rank} sends {} elements in step {}, rank {receiver} expects {} in step {}",
                        span.len, at[rank], into.len, at[receiver]
                    ));
                }
                let values = buffers[rank][span.start..span.end()].to_vec();
                let is_reduced = matches!(step[place], Action::ReceiveReduce { .. });
                for (own, value) in buffers[receiver][into.start..into.end()]
                    .iter_mut()
                    .zip(values)
                {
                    *own = if is_reduced {
                        (kernels.combine)(*own, value)
                    } else {
                        value
                    };
                }
                sent[rank] += span.len;
                done[rank][index] = true;
                done[receiver][place] = true;
                moved = true;
            }
        }
        // Ranks whose transfers are done go to their next step.
        for rank in 0..world {
            let step = schedules[rank].step(at[rank]);
            let mut all = step.iter().zip(&done[rank]);
            if step.is_empty() || all.any(|(action, done)| !done && action.transfer().is_some()) {
                continue;
            }
            for action in step {
                local(action, &mut buffers[rank], kernels);
            }
            at[rank] += 1;
            done[rank] = undone(rank, at[rank]);
            moved = true;
        }
        if !moved {
            return Err(format!("deadlock: the ranks are at steps {at:?}"));
        }
    }
    let results = schedules.iter().zip(&buffers).map(|(schedule, buffer)| {
        let length = schedule.outputs.iter().map(|output| output.from.len).sum();
        let mut result = vec![T::default(); length];
        for output in &schedule.outputs {
            let from = output.from;
            result[output.to..output.to + from.len]
                .copy_from_slice(&buffer[from.start..from.end()]);
        }
        result
    });
    Ok((results.collect(), sent))
}

/// Spans lie in the buffer; what is received overlaps nothing that is sent or received in the same step;
/// local actions come last; nobody talks to itself.
fn check_step(rank: usize, step: &[Action], buffer: usize) -> Result<(), String> {
    let mut local_seen = false;
    for (index, action) in step.iter().enumerate() {
        let bad = |what: &str| Err(format!("{action:?} {what}"));
        if action.end() > buffer {
            return bad("is outside the buffer");
        }
        if let Some((peer, span)) = action.transfer() {
            let mut others = step[..index].iter();
            let clashes = |other: &Action| {
                let both_sent = action.receive().is_none() && other.receive().is_none();
                let touched = other
                    .transfer()
                    .is_some_and(|(_, other)| overlap(other, span));
                touched && !both_sent
            };
            if peer as usize == rank {
                return bad("is to itself");
            }
            if local_seen {
                return bad("comes after a local action");
            }
            if others.any(clashes) {
                return bad("is overwritten");
            }
            continue;
        }
        local_seen = true;
        let is_good = match *action {
            Action::Combine { from, into }
            | Action::Copy { from, into }
            | Action::AddDots { from, into } => from.len == into.len && !overlap(from, into),
            Action::Dots { left, right, into } => {
                left.len == right.len && !overlap(left, into) && !overlap(right, into)
            }
            Action::Blend {
                from, into, dots, ..
            } => from.len == into.len && !overlap(from, into) && !overlap(dots, into),
            _ => true,
        };
        if !is_good {
            return bad("mixes up its spans");
        }
    }
    Ok(())
}

fn overlap(a: Span, b: Span) -> bool {
    a.len > 0 && b.len > 0 && a.start < b.end() && b.start < a.end()
}

fn local<T: Copy>(action: &Action, buffer: &mut [T], kernels: &Kernels<'_, T>) {
    let copy = |buffer: &[T], span: Span| buffer[span.start..span.end()].to_vec();
    let join = |buffer: &mut [T], from: Span, into: Span, join: &dyn Fn(T, T) -> T| {
        for index in 0..into.len {
            let value = join(buffer[into.start + index], buffer[from.start + index]);
            buffer[into.start + index] = value;
        }
    };
    match *action {
        Action::Combine { from, into } => join(buffer, from, into, kernels.combine),
        Action::AddDots { from, into } => join(buffer, from, into, kernels.add),
        Action::Copy { from, into } => buffer.copy_within(from.start..from.end(), into.start),
        Action::Finish { span } => {
            for value in &mut buffer[span.start..span.end()] {
                *value = (kernels.finish)(*value);
            }
        }
        Action::Dots { left, right, into } => {
            let dots = (kernels.dots)(&copy(buffer, left), &copy(buffer, right));
            buffer[into.start..into.end()].copy_from_slice(&dots);
        }
        Action::Blend {
            from,
            into,
            dots,
            mirrored,
        } => {
            let dots = copy(buffer, dots);
            let (left, right) = if mirrored { (2, 1) } else { (1, 2) };
            let from = copy(buffer, from);
            let into = &mut buffer[into.start..into.end()];
            (kernels.blend)(into, &from, [dots[0], dots[left], dots[right]]);
        }
        Action::Send { .. } | Action::Receive { .. } | Action::ReceiveReduce { .. } => {}
    }
}
