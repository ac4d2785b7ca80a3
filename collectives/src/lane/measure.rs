//! Which of two lanes to a host is the better one: both are measured, in turn, before one of them is kept.

use std::future::poll_fn;
use std::io::IoSlice;
use std::time::{Duration, Instant};

use super::network::LaneChoice;
use super::{Lane, LaneError};
use crate::group::GroupId;

/// Round trips of each length that are measured on each lane in one pass.
const SMALL: (usize, u32) = (64, 8);
const LARGE: (usize, u32) = (512 << 10, 2);

/// Sent and echoed before that: one packet where packets have 9000 bytes. A network whose interfaces have those and whose switches
/// drop them lets short messages pass, and perhaps long ones, which leave in other packets.
const WHOLE: usize = 8000;

/// The TLS lane counts as broken if one pass takes so many times as long as the one of QUIC, and this.
const MUCH_SLOWER: u32 = 10;
const SLOW: Duration = Duration::from_secs(1);

/// Passes, in turn: what disturbs one lane for some milliseconds is not to decide. Where one pass of both takes longer than this,
/// such things count for less, and there are only two.
const PASSES: u32 = 4;
const LONG_PASS: Duration = Duration::from_millis(20);

/// Most bytes of one message, and of all, that a peer has echoed.
const MOST_ECHO: usize = 1 << 20;
const MOST_ECHOES: usize = 64 << 20;

/// QUIC has to be so many times better. The TLS lane takes less processor time, and is better in use than when it is measured: then
/// a task of the runtime waits for it, in use the thread that runs the operation, which looks for what comes.
const BETTER: f64 = 2.0;

/// Commands of the side that makes a link, each with a length.
const COMMAND: usize = 5;
const ECHO: u8 = 1;
const KEEP: u8 = 2;

/// What was measured of a lane: times of all round trips.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Measured {
    small: Vec<Duration>,
    large: Vec<Duration>,
}

impl Measured {
    /// Those in the middle. The shortest may be of a moment in which both ends had the same processor.
    pub(super) fn medians(&self) -> [Duration; 2] {
        [&self.small, &self.large].map(|times| {
            let mut times = times.clone();
            times.sort_unstable();
            times.get(times.len() / 2).copied().unwrap_or(Duration::MAX)
        })
    }
}

/// The lane whose times are shorter, small messages and large ones weighing the same. Pure.
pub(super) fn choose(quic: &Measured, tls: &Measured) -> LaneChoice {
    let product = |lane: &Measured| {
        let times = lane.medians().map(|time| time.as_secs_f64());
        times.iter().product::<f64>()
    };
    if product(tls) <= product(quic) * BETTER {
        LaneChoice::Tls
    } else {
        LaneChoice::Quic
    }
}

/// Echoes what is measured, until the peer keeps the lane or ends it.
pub(super) async fn kept(
    mut lane: Box<dyn Lane>,
    group: GroupId,
    limit: Duration,
) -> Result<Option<(Box<dyn Lane>, GroupId)>, LaneError> {
    let keeps = timed(limit, async {
        let mut echoed = 0;
        let mut bytes = Vec::new();
        loop {
            let mut head = [0; COMMAND];
            if !read(lane.as_mut(), &mut head).await? {
                return Ok(false);
            }
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            match head[0] {
                KEEP if length == 0 => return Ok(true),
                ECHO if length <= MOST_ECHO && echoed + length <= MOST_ECHOES => {
                    echoed += length;
                    bytes.resize(length, 0);
                    if !read(lane.as_mut(), &mut bytes).await? {
                        return Ok(false);
                    }
                    write(lane.as_mut(), &[IoSlice::new(&bytes)]).await?;
                }
                other => {
                    return Err(LaneError::Protocol {
                        reason: format!("a new link has command {other} with length {length}"),
                    });
                }
            }
        }
    })
    .await?;
    Ok(keeps.then_some((lane, group)))
}

/// What is found of two lanes, in turn. The other end waits for as long as `limit` for all of it.
pub(super) async fn measure_both<'a>(
    quic: &'a mut dyn Lane,
    tls: &'a mut dyn Lane,
    limit: Duration,
) -> (Result<Measured, LaneError>, Result<Measured, LaneError>) {
    let (mut of_quic, mut of_tls) = (Ok(Measured::default()), Ok(Measured::default()));
    let begun = Instant::now();
    for pass in 1..=PASSES {
        // Time must be left to use the other one if this one hangs.
        let mut patience = limit / 4;
        let lanes: [(&mut dyn Lane, _); 2] = [(quic, &mut of_quic), (tls, &mut of_tls)];
        for (lane, found) in lanes {
            let Ok(before) = found else {
                patience = limit;
                continue;
            };
            let pass = Instant::now();
            let left = limit.saturating_sub(begun.elapsed()) / 2;
            let measuring = measure(lane, std::mem::take(before));
            *found = timed(patience.min(left), measuring).await;
            patience = match found {
                Ok(_) => (MUCH_SLOWER * pass.elapsed()).max(SLOW),
                Err(_) => limit,
            };
        }
        let is_long = pass >= 2 && begun.elapsed() > pass * LONG_PASS;
        if is_long || of_tls.is_err() || of_quic.is_err() {
            break;
        }
    }
    (of_quic, of_tls)
}

/// One pass more.
async fn measure(lane: &mut dyn Lane, mut found: Measured) -> Result<Measured, LaneError> {
    let mut bytes = vec![0; LARGE.0];
    let mut probes = Vec::new();
    for (found, (length, times)) in [
        (&mut probes, (WHOLE, 1)),
        (&mut found.small, SMALL),
        (&mut found.large, LARGE),
    ] {
        for _ in 0..times {
            let begun = Instant::now();
            let mut head = [ECHO; COMMAND];
            head[1..].copy_from_slice(&(length as u32).to_be_bytes());
            write(lane, &[IoSlice::new(&head), IoSlice::new(&bytes[..length])]).await?;
            if !read(lane, &mut bytes[..length]).await? {
                return Err(LaneError::Ended {
                    reason: "the peer closed it while it was measured".to_owned(),
                });
            }
            found.push(begun.elapsed());
        }
    }
    Ok(found)
}

/// Says that the lane is kept.
pub(super) async fn keep(lane: &mut dyn Lane, limit: Duration) -> Result<(), LaneError> {
    timed(limit, command(lane, KEEP, 0)).await
}

async fn command(lane: &mut dyn Lane, command: u8, length: u32) -> Result<(), LaneError> {
    let mut head = [command; COMMAND];
    head[1..].copy_from_slice(&length.to_be_bytes());
    write(lane, &[IoSlice::new(&head)]).await
}

async fn write(lane: &mut dyn Lane, parts: &[IoSlice<'_>]) -> Result<(), LaneError> {
    for part in parts {
        let mut rest: &[u8] = part;
        while !rest.is_empty() {
            let count = poll_fn(|cx| lane.poll_write(cx, &[IoSlice::new(rest)])).await?;
            rest = &rest[count..];
        }
    }
    poll_fn(|cx| lane.poll_flush(cx)).await
}

/// Fills `into`; false if the peer has ended the lane instead.
async fn read(lane: &mut dyn Lane, into: &mut [u8]) -> Result<bool, LaneError> {
    let mut got = 0;
    while got < into.len() {
        match poll_fn(|cx| lane.poll_read(cx, &mut into[got..])).await? {
            0 => return Ok(false),
            count => got += count,
        }
    }
    Ok(true)
}

async fn timed<T>(
    limit: Duration,
    future: impl Future<Output = Result<T, LaneError>>,
) -> Result<T, LaneError> {
    tokio::time::timeout(limit, future)
        .await
        .unwrap_or_else(|_| {
            Err(LaneError::Timeout {
                reason: format!("a new link was not used within {} s", limit.as_secs_f64()),
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::MemoryLane;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn the_faster_lane_is_chosen_and_tls_if_they_are_alike() {
        // Single ones that are nothing like the others do not count.
        let lane = |small, large| Measured {
            small: [1, small, 10_000, small, small]
                .map(Duration::from_micros)
                .to_vec(),
            large: [large, 1, large].map(Duration::from_micros).to_vec(),
        };
        assert_eq!(choose(&lane(60, 900), &lane(30, 500)), LaneChoice::Tls);
        assert_eq!(choose(&lane(60, 500), &lane(60, 950)), LaneChoice::Tls);
        assert_eq!(choose(&lane(30, 500), &lane(61, 500)), LaneChoice::Quic);
        assert_eq!(choose(&lane(60, 500), &lane(30, 5000)), LaneChoice::Quic);
    }

    #[tokio::test]
    async fn a_lane_is_measured_and_then_kept_with_nothing_left_on_it() {
        let (mut mine, theirs) = MemoryLane::pair(1000);
        let (measured, kept) = tokio::join!(
            async {
                let measured = measure(&mut mine, Measured::default()).await.unwrap();
                command(&mut mine, KEEP, 0).await.unwrap();
                measured
            },
            kept(Box::new(theirs), GroupId(5), LIMIT)
        );
        assert_eq!((measured.small.len(), measured.large.len()), (8, 2));
        let (mut theirs, group) = kept.unwrap().unwrap();
        assert_eq!(group, GroupId(5));
        write(&mut mine, &[IoSlice::new(b"after")]).await.unwrap();
        let mut bytes = [0; 5];
        assert!(read(theirs.as_mut(), &mut bytes).await.unwrap());
        assert_eq!(&bytes, b"after");
    }

    /// Echoes, and gives up after so many bytes without saying so.
    async fn echo(mut lane: MemoryLane, most: usize) {
        let mut bytes = vec![0; LARGE.0];
        let mut echoed = 0;
        loop {
            let mut head = [0; COMMAND];
            if !read(&mut lane, &mut head).await.unwrap() {
                return;
            }
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            echoed += length;
            if echoed > most {
                std::future::pending::<()>().await;
            }
            assert!(read(&mut lane, &mut bytes[..length]).await.unwrap());
            write(&mut lane, &[IoSlice::new(&bytes[..length])])
                .await
                .unwrap();
        }
    }

    /// Neither of them eats up the time that the other end waits for all.
    #[tokio::test]
    async fn a_lane_that_hangs_is_given_up_soon_and_the_other_one_is_measured() {
        let (all, some) = (usize::MAX, WHOLE - 1);
        for (quic, tls, limit) in [(all, some, LIMIT), (some, all, 4 * SLOW), (all, all, LIMIT)] {
            let lanes = [quic, tls].map(|most| (most, MemoryLane::pair(LARGE.0)));
            let [
                (quic, (mut to_quic, quic_end)),
                (tls, (mut to_tls, tls_end)),
            ] = lanes;
            let begun = Instant::now();
            let found = tokio::select! {
                found = measure_both(&mut to_quic, &mut to_tls, limit) => found,
                _ = async { tokio::join!(echo(quic_end, quic), echo(tls_end, tls)) } => unreachable!("they end last"),
            };
            assert!(begun.elapsed() < LIMIT / 2);
            for (found, most) in [(found.0, quic), (found.1, tls)] {
                match found {
                    Ok(found) => assert!(most == all && found.large.len() >= 2),
                    Err(LaneError::Timeout { .. }) => assert_eq!(most, some),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    #[tokio::test]
    async fn a_lane_that_is_not_kept_is_no_error_and_one_that_breaks_the_rules_is() {
        let (mine, theirs) = MemoryLane::pair(1000);
        drop(mine);
        assert!(
            kept(Box::new(theirs), GroupId::WORLD, LIMIT)
                .await
                .unwrap()
                .is_none()
        );

        for bytes in [[9, 0, 0, 0, 0], [ECHO, 0xff, 0, 0, 0], [KEEP, 0, 0, 0, 1]] {
            let (mut mine, theirs) = MemoryLane::pair(1000);
            write(&mut mine, &[IoSlice::new(&bytes)]).await.unwrap();
            let error = kept(Box::new(theirs), GroupId::WORLD, LIMIT)
                .await
                .unwrap_err();
            assert!(matches!(error, LaneError::Protocol { .. }), "{error}");
        }

        let (_mine, theirs) = MemoryLane::pair(1000);
        let error = kept(Box::new(theirs), GroupId::WORLD, Duration::from_millis(20)).await;
        assert!(matches!(error, Err(LaneError::Timeout { .. })));
    }
}
