//! What the tests' calls run.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use serde::Serialize;

use crate::context::Context;

/// A place where a test and the user code that it runs meet. Each test has its own number.
pub(super) struct Meeting {
    pub(super) here: Sender<&'static str>,
    pub(super) wait: Receiver<()>,
}

pub(super) static MEETINGS: Mutex<Vec<(u32, Meeting)>> = Mutex::new(Vec::new());

pub(super) fn arrange(number: u32) -> (Receiver<&'static str>, Sender<()>) {
    let (here, seen) = channel();
    let (go, wait) = channel();
    MEETINGS
        .lock()
        .unwrap()
        .push((number, Meeting { here, wait }));
    (seen, go)
}

pub(super) fn meet(number: u32) -> Meeting {
    let mut all = MEETINGS.lock().unwrap();
    let index = all.iter().position(|(other, _)| *other == number).unwrap();
    all.swap_remove(index).1
}

#[kolo::function]
pub(super) fn whoami(ctx: &Context, greeting: String) -> String {
    format!(
        "{greeting} from rank {} of {}",
        ctx.rank(),
        ctx.world_size()
    )
}

#[kolo::function]
pub(super) fn divide(number: u32, by: u32) -> Result<u32, String> {
    number
        .checked_div(by)
        .ok_or_else(|| format!("{number} can't be divided by 0"))
}

#[kolo::function]
pub(super) async fn later(_ctx: &Context, value: u32) -> u32 {
    tokio::time::sleep(Duration::from_millis(1)).await;
    value + 1
}

#[kolo::function]
pub(super) fn blocks(number: u32) {
    let meeting = meet(number);
    meeting.here.send("begun").unwrap();
    meeting.wait.recv().unwrap();
}

#[kolo::function]
pub(super) fn looks(ctx: &Context, number: u32) -> bool {
    let meeting = meet(number);
    meeting.here.send("begun").unwrap();
    meeting.wait.recv().unwrap();
    ctx.is_cancelled()
}

/// Says so when it is dropped.
pub(super) struct Tells(Sender<&'static str>, &'static str);

impl Drop for Tells {
    fn drop(&mut self) {
        // The test may have ended.
        self.0.send(self.1).unwrap_or_default();
    }
}

#[kolo::function]
pub(super) async fn never_ends(number: u32) {
    let meeting = meet(number);
    meeting.here.send("begun").unwrap();
    let _tells = Tells(meeting.here, "dropped");
    std::future::pending::<()>().await;
}

#[kolo::function]
pub(super) fn breaks(why: String) {
    panic!("{why}");
}

/// Says no to both directions.
#[derive(Debug)]
pub(super) struct Refuses;

impl Serialize for Refuses {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("this one stays"))
    }
}

impl<'de> serde::Deserialize<'de> for Refuses {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Ok(Self)
    }
}

#[kolo::function]
pub(super) fn stays() -> Refuses {
    Refuses
}

#[derive(Debug, thiserror::Error)]
#[error("the reading failed")]
pub(super) struct Outer(#[source] std::num::ParseIntError);

#[kolo::function]
pub(super) fn parse(text: String) -> Result<u32, Outer> {
    text.parse().map_err(Outer)
}

/// Returns a kind of error that keeps its backtrace if it is asked to.
#[kolo::function]
pub(super) fn ours(text: String) -> kolo::Result<u32> {
    Ok(text.parse::<u32>()?)
}

#[kolo::function]
pub(super) fn formats(fail: bool) -> std::fmt::Result {
    if fail { Err(std::fmt::Error) } else { Ok(()) }
}

pub(super) struct Counter {
    pub(super) count: u64,
    dropped: Option<Tells>,
}

#[kolo::executable]
impl Counter {
    /// A constant that the block may have.
    const STEP: u64 = 1;

    pub(super) fn new(ctx: &Context, first: u64) -> Result<Self, String> {
        if first == 13 {
            return Err("13 brings bad luck".to_owned());
        }
        Ok(Self {
            count: first + ctx.rank() as u64,
            dropped: None,
        })
    }

    pub(super) fn add(&mut self, (a, b): (u64, u64)) -> u64 {
        self.count += (a + b) * Self::STEP;
        self.count
    }

    async fn get(&self, ctx: &Context, type_: Vec<u8>) -> (u64, usize, Vec<u8>) {
        tokio::task::yield_now().await;
        (self.count, ctx.local_rank(), type_)
    }

    async fn slowly(&mut self, number: u32) -> u64 {
        let meeting = meet(number);
        meeting.here.send("begun").unwrap();
        std::future::pending::<()>().await;
        self.count
    }

    fn tell_when_dropped(&mut self, number: u32, name: String) {
        self.dropped = Some(Tells(meet(number).here, name.leak()));
    }

    fn fails(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        self.count += 100;
        Err("not today".into())
    }

    fn breaks(&mut self) {
        self.count = 0;
        panic!("half-way");
    }

    #[kolo(skip)]
    pub(super) fn local(&self) -> &u64 {
        &self.count
    }

    pub(super) fn helper(value: u64) -> u64 {
        value * 2
    }
}

/// Adds up over all ranks. What is not part of its state is what it was made with.
pub(super) struct Tally {
    sum: u64,
    list: Vec<u32>,
    made_in: u64,
}

impl crate::elastic::Elastic for Tally {
    fn parts(&mut self, parts: &mut crate::elastic::Parts<'_>) {
        assert_ne!(self.sum, 666, "this panic is part of a test");
        parts.value("sum", &mut self.sum);
        parts.list("list", &mut self.list);
    }
}

#[kolo::executable(elastic)]
impl Tally {
    fn new(ctx: &Context, first: u64) -> Result<Self, String> {
        if first == 13 && ctx.generation().0 > 1 {
            return Err("13 brings bad luck".to_owned());
        }
        Ok(Self {
            sum: first + ctx.rank() as u64,
            list: Vec::new(),
            made_in: ctx.generation().0,
        })
    }

    /// Each rank gives this much.
    fn add(&mut self, ctx: &Context, more: u64) -> kolo::Result<u64> {
        let mut all = [more];
        ctx.comm()
            .all_reduce(&mut all, kolo_collectives::ReduceOp::Sum)?;
        self.sum += all[0];
        self.list.push(1);
        Ok(self.sum)
    }

    fn set(&mut self, sum: u64) {
        self.sum = sum;
    }

    fn breaks(&mut self) {
        self.sum = 1_000_000;
        panic!("this panic is part of a test");
    }

    fn get(&self) -> (u64, usize, u64) {
        (self.sum, self.list.len(), self.made_in)
    }
}
