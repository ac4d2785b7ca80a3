//! Measuring what links take, and choosing algorithms by it from then on.

use std::time::{Duration, Instant};

use super::Communicator;
use crate::blocking::Alarm;
use crate::element::{DType, bytes_of};
use crate::error::CollectiveError;
use crate::group::Kind;
use crate::inner::Turn;
use crate::operation::{Operation, OperationKind, ReduceOp, Tag};
use crate::options::Options;
use crate::reduce;
use crate::schedule::calibrate::{LONG, Report, Round, SHORT, Sample, median};
use crate::schedule::{Algorithm, Calibration, Tuning};
use crate::shape::Mark;

/// Short messages that follow each other without an answer.
const BURST: usize = 16;

/// Two ranks that do not come to an end in this time, or half of what an operation may take, have not measured their link.
const LATE: Duration = Duration::from_secs(10);

/// How long it may take to tell a rank that nothing is measured.
const GOODBYE: Duration = Duration::from_secs(1);

/// What a message says: whether another round follows.
const LAST: u8 = 0;
const MORE: u8 = 1;
const GIVES_UP: u8 = 2;

/// What is combined, and how often.
const COMBINED: usize = 256 << 10;
const TIMES: usize = 7;

/// How often something is done: at first without looking at the clock, then until it was often enough or takes too long.
#[derive(Debug, Clone, Copy)]
struct Series {
    /// Messages one way before each answer.
    burst: usize,
    bytes: usize,
    warm: usize,
    most: usize,
    limit: Duration,
}

const PING: Series = Series {
    burst: 1,
    bytes: SHORT,
    warm: 8,
    most: 32,
    limit: Duration::from_millis(5),
};

const BUSY: Series = Series {
    burst: BURST,
    bytes: SHORT,
    warm: 2,
    most: 8,
    limit: Duration::from_millis(5),
};

const BULK: Series = Series {
    burst: 1,
    bytes: LONG,
    warm: 1,
    most: 6,
    limit: Duration::from_millis(20),
};

impl Communicator {
    /// Measures what links inside hosts and across them take, and how fast ranks combine: algorithms are chosen by that
    /// from the next operation on. All ranks call it, once, when the program begins; it is one operation among the others, and
    /// all get the same result, to the last bit.
    ///
    /// The first two ranks of each host, and the first ranks of two hosts at a time, send each other short messages and
    /// long ones, over links like those that operations use, after some that don't count. That takes some tens of milliseconds (on
    /// slow networks as long as four messages of 512 KiB each way). What counts is the median, of each pair and of all pairs.
    /// The [layout](Communicator::layout) says what a host is.
    ///
    /// Only [`Tuning::model`] changes. What [`Tuning::force`] and [`Tuning::segment`] set goes before it, as before any model.
    /// Groups that are made afterwards have the new model; those that are there keep theirs, and can measure for themselves.
    /// What ranks do in memory that they share does not depend on the model.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let found = comm.calibrate().unwrap();
    ///             println!("rank {}: {found}", comm.rank());
    ///             assert_eq!(comm.tuning().model, found.model);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], as any operation; the choice is as it was. If it fails in the last moment, some ranks may have the
    /// new model and others the old one. Operations for which these choose differently are a [`CollectiveError::Mismatch`] then, until
    /// all ranks have called it again.
    pub fn calibrate(&self) -> Result<Calibration, CollectiveError> {
        let plain = self.with(Options::new());
        Self::blocking(async |alarm, started| {
            let kind = OperationKind::Barrier;
            let (mut turn, tag) = plain.turn(alarm, started, kind).await?;
            let _agreeing = Agreeing::begin(&plain);
            let gather = tag.next_part();
            let tags = [tag, gather, gather.next_part()];
            plain.calibrate_in(alarm, &mut turn, tags).await
        })
    }

    async fn calibrate_in<A: Alarm>(
        &self,
        alarm: &mut A,
        turn: &mut Turn<'_>,
        [begin, gather, broadcast]: [Tag; 3],
    ) -> Result<Calibration, CollectiveError> {
        let marked = |operation| Operation {
            shape: Mark::Calibrate.encode(),
            ..operation
        };
        let numbers = |kind, count: usize| {
            let root = Some(0);
            let operation = Operation::new(kind, Some(DType::F64), count as u64);
            marked(Operation { root, ..operation })
        };
        if let Err(error) = turn
            .run(alarm, begin, marked(Operation::BARRIER), &[])
            .await
        {
            turn.skip(gather);
            turn.skip(broadcast);
            return Err(error);
        }
        let report = match self.measure(alarm, begin).await {
            Ok(report) => report,
            Err(error) => {
                let known = self.inner.inward(error.clone());
                let error = known.unwrap_or_else(|| CollectiveError::Aborted {
                    reason: error.to_string(),
                });
                let error = turn.refuse(gather, error);
                turn.skip(broadcast);
                return Err(error);
            }
        };
        let wanted = numbers(OperationKind::Gather, Report::NUMBERS);
        let own = report.encode();
        if let Err(error) = turn.run(alarm, gather, wanted, bytes_of(&own)).await {
            turn.skip(broadcast);
            return Err(error);
        }
        let mut agreed = [0.0; Calibration::NUMBERS];
        if self.inner.me == 0 {
            let mut all = vec![0.0; Report::NUMBERS * self.world()];
            turn.store(&mut all);
            let reports = all.chunks_exact(Report::NUMBERS).map(Report::decode);
            let reports: Vec<Report> = reports.collect();
            agreed = Calibration::of(&reports, &self.tuning().model).encode();
        }
        let wanted = numbers(OperationKind::Broadcast, Calibration::NUMBERS);
        turn.run(alarm, broadcast, wanted, bytes_of(&agreed))
            .await?;
        turn.store(&mut agreed);
        let found = Calibration::decode(agreed);
        // The next operation has its turn after this one, on every rank.
        let tuning = Tuning {
            model: found.model,
            ..self.tuning()
        };
        self.set_tuning(tuning);
        Ok(found)
    }

    /// What this rank finds.
    async fn measure<A: Alarm>(&self, alarm: &mut A, tag: Tag) -> Result<Report, CollectiveError> {
        let mut report = Report {
            gamma: gamma(),
            ..Report::default()
        };
        let (layout, me) = (self.layout(), self.inner.me);
        let mut failed = None;
        for (round, sample) in Round::ALL.into_iter().zip(&mut report.samples) {
            let Some((one, other)) = round.pair(&layout, me) else {
                continue;
            };
            let pair = self.measured_pair((one, other), tag);
            if failed.is_some() {
                pair.say_goodbye(alarm).await;
                continue;
            }
            match pair.sample(alarm).await {
                // The lower one says what both have found.
                Ok(found) => *sample = found.filter(|_| me == one),
                // The other one is late, or has waited for this one. What keeps it shows in the next operation of all.
                Err(
                    error @ (CollectiveError::Deadline { .. }
                    | CollectiveError::PeerFailed { .. }
                    | CollectiveError::PeerLeft { .. }),
                ) => tracing::debug!(one, other, %error, "two ranks did not measure their link"),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(report), Err)
    }

    /// What two ranks find. `None` if the other one gives up.
    async fn sample<A: Alarm>(&self, alarm: &mut A) -> Result<Option<Sample>, CollectiveError> {
        let mut times = [0.0; 3];
        for (time, series) in times.iter_mut().zip([PING, BUSY, BULK]) {
            match self.series(alarm, series).await? {
                Some(median) => *time = median,
                None => return Ok(None),
            }
        }
        let [ping, busy, bulk] = times;
        let more = (busy - ping).max(0.0) / (BURST - 1) as f64;
        Ok(Some(Sample {
            short: ping / 2.0,
            busy: more.max(f64::MIN_POSITIVE),
            long: bulk / 2.0,
        }))
    }

    /// Tells the other one, which may wait already, that this one does not measure, because it knows that all will fail.
    async fn say_goodbye<A: Alarm>(&self, alarm: &mut A) {
        let pair = self.clone().with_timeout(GOODBYE.min(self.timeout()));
        let mut data = [GIVES_UP; SHORT];
        let said = async {
            if self.inner.me == 1 {
                pair.pass(alarm, 0, &mut data).await?;
                data[0] = GIVES_UP;
            }
            pair.pass(alarm, self.inner.me, &mut data).await
        };
        if let Err(error) = said.await {
            tracing::debug!(%error, "the other one of two ranks was not told");
        }
    }

    /// Two ranks as a group of their own, for this one operation.
    fn measured_pair(&self, (one, other): (u32, u32), tag: Tag) -> Self {
        let inner = &self.inner;
        let members = vec![inner.job_rank(one), inner.job_rank(other)];
        let id = inner.id.child(Kind::Measured, tag.call, &members);
        let id = id.child(Kind::Measured, tag.operation, &[]);
        let pair = Self::of(inner.group(id, members, u32::from(inner.me == other)));
        // Time must be left for the operations of all.
        pair.with_timeout(LATE.min(self.timeout() / 2))
    }

    /// Sends messages to and fro. Returns the median time of a round; `None` if the other one gives up.
    async fn series<A: Alarm>(
        &self,
        alarm: &mut A,
        series: Series,
    ) -> Result<Option<f64>, CollectiveError> {
        // The first byte says what follows.
        let mut data = vec![0_u8; series.bytes];
        let mut times = Vec::with_capacity(series.most);
        let begun = Instant::now();
        for round in 1.. {
            let enough = round >= series.warm + series.most;
            let late = round > series.warm && begun.elapsed() >= series.limit;
            data[0] = if enough || late { LAST } else { MORE };
            let start = Instant::now();
            for _ in 0..series.burst {
                self.pass(alarm, 0, &mut data).await?;
                if data[0] == GIVES_UP {
                    return Ok(None);
                }
            }
            self.pass(alarm, 1, &mut data).await?;
            if round > series.warm {
                times.push(start.elapsed().as_secs_f64());
            }
            match data[0] {
                MORE => {}
                GIVES_UP => return Ok(None),
                _ => break,
            }
        }
        Ok(median(times.into_iter()))
    }

    /// A message from one of two ranks to the other.
    async fn pass<A: Alarm>(
        &self,
        alarm: &mut A,
        from: u32,
        data: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let kind = OperationKind::SendReceive;
        let (mut turn, tag) = self.turn(alarm, Instant::now(), kind).await?;
        let operation = Operation {
            root: Some(from),
            rows: u64::from(1 - from),
            shape: Mark::Calibrate.encode(),
            ..self.request::<u8>(kind, data.len())
        };
        let (sent, received): (&[u8], &mut [u8]) = if self.inner.me == from {
            (data, &mut [])
        } else {
            (&[], data)
        };
        turn.run_into(alarm, tag, operation, sent, received).await
    }
}

/// Seconds to combine a byte.
fn gamma() -> f64 {
    let (mut into, from) = (vec![0_u8; COMBINED], vec![0_u8; COMBINED]);
    let times = (0..TIMES).map(|_| {
        let begun = Instant::now();
        reduce::combine(DType::F32, ReduceOp::Sum, &mut into, &from);
        begun.elapsed().as_secs_f64()
    });
    median(times).unwrap_or(0.0) / COMBINED as f64
}

/// While ranks agree, how they do it does not depend on what they may not have agreed on: they could have different
/// models, after a failure.
struct Agreeing<'a>(&'a Communicator);

impl<'a> Agreeing<'a> {
    fn begin(comm: &'a Communicator) -> Self {
        let this = Self(comm);
        this.set(Some(Tuning {
            force: Some(Algorithm::Binomial),
            ..Tuning::default()
        }));
        this
    }

    fn set(&self, tuning: Option<Tuning>) {
        let mut state = self.0.inner.signals.lock();
        state.agreeing = tuning;
        state.settings += 1;
    }
}

impl Drop for Agreeing<'_> {
    fn drop(&mut self) {
        self.set(None);
    }
}
