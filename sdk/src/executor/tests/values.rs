//! Values of executables in groups whose members change.

use serde::Serialize;

use super::*;
use crate::call::Scope;
use crate::error::CallError;
use crate::{Object, codec};

const FIRST: Generation = Generation(1);
const SECOND: Generation = Generation(2);
const THIRD: Generation = Generation(3);

#[derive(Debug)]
struct Tally;

impl Executable for Tally {
    type Args = (u32,);
    type Handle<S: Scope> = Object<S>;
    const NAME: &'static str = "tests::Tally";
    const ELASTIC: bool = true;
}

fn lost(job: &FakeJob, slot: u32) -> CallReply {
    CallReply::Lost {
        slot: Slot(slot),
        incarnation: Incarnation::FIRST,
        failure: failure(job, slot, Exit::Signal(9)),
        stopping: false,
    }
}

fn add(value: &Object<All>) -> crate::call::CallFuture<All, u32> {
    let args = codec::encode(&(1_u32,));
    value.call("add", args).into_future()
}

/// A group of two ranks on one node, with a value.
struct Bed {
    fake: Fake,
    executor: Executor,
    job: FakeJob,
    /// The slots of the members.
    slots: Vec<u32>,
    generation: Generation,
}

impl Bed {
    async fn new(waits: bool) -> (Self, Object<All>) {
        let fake = Fake::new(1).await;
        let builder = Executor::builder().workers(1..=3).wait_for_recovery(waits);
        let (executor, job) = fake.elastic(builder, &[0, 0]).await;
        let bed = Self {
            fake,
            executor,
            job,
            slots: vec![0, 1],
            generation: FIRST,
        };
        let create = tokio::spawn(bed.executor.create::<Tally>(7).into_future());
        bed.recovers(None, 0).await;
        let value = soon(create).await.unwrap().unwrap();
        (bed, value)
    }

    /// All members answer a call alike.
    async fn answer(&self, call: CallId, value: &impl Serialize) {
        for slot in &self.slots {
            let place = (*slot, self.generation);
            let node = &self.fake.nodes[0];
            node.answers(self.generation, call, place, value).await;
        }
    }

    async fn call(&self) -> (CallId, Vec<Rank>, CallOp, Vec<u8>) {
        let (call, ranks, op, body) = self.fake.nodes[0].call().await;
        (call, ranks, op, body.to_vec())
    }

    /// The value is asked for on all ranks, with the arguments that it was made with.
    async fn asked(&self, known: Option<&Object<All>>) -> CallId {
        let (call, ranks, op, body) = self.call().await;
        let CallOp::Recover { class, object } = op else {
            panic!("{op:?}");
        };
        assert_eq!((class.as_str(), &body[..]), (Tally::NAME, &[0x91, 7][..]));
        assert_eq!(ranks.len(), self.slots.len());
        if let Some(known) = known {
            assert_eq!(object, known.id());
        }
        call
    }

    /// All ranks come to a commit of the value.
    async fn recovers(&self, known: Option<&Object<All>>, commit: u64) {
        let call = self.asked(known).await;
        self.answer(call, &commit).await;
    }

    /// These values are kept, and no others.
    async fn retains(&self, values: &[&Object<All>]) {
        let (_, _, op, body) = self.call().await;
        assert_eq!(op, CallOp::Retain);
        let ids: Vec<_> = values.iter().map(|value| value.id()).collect();
        assert_eq!(body, codec::encode(&ids).unwrap());
    }

    async fn adds(&self, value: &Object<All>) {
        let adding = tokio::spawn(add(value));
        let (call, _, op, _) = self.call().await;
        assert!(matches!(op, CallOp::Method { .. }), "{op:?}");
        self.answer(call, &5_u32).await;
        let sums = soon(adding).await.unwrap().unwrap();
        assert_eq!(sums.len(), self.slots.len());
    }

    async fn commits(&self, value: &Object<All>, number: u64) {
        let committing = tokio::spawn({
            let value = value.clone();
            async move { value.commit().await }
        });
        let (call, _, op, _) = self.call().await;
        assert_eq!(op, CallOp::Commit { object: value.id() });
        self.answer(call, &number).await;
        assert_eq!(soon(committing).await.unwrap().unwrap(), number);
    }

    /// The head offers a change.
    async fn offers(&mut self) {
        let generation = self.generation;
        self.job.send(&JobEvent::Hold { generation }).await;
    }

    /// The head hears that the generation has ended between two calls.
    async fn holds(&mut self) {
        let generation = self.generation;
        let holding = SubmitFrame::Holding { generation };
        assert_eq!(soon(self.job.frame()).await, Some(holding));
    }

    /// A member is lost, and somebody sees that.
    async fn loses(&mut self, slot: u32) {
        self.fake.nodes[0].reply(&lost(&self.job, slot), &[]).await;
        let mut present = match &self.executor.inner.target {
            Target::Elastic(generations) => generations.present(),
            Target::Fixed(_) => panic!("it is elastic"),
        };
        soon(present.wait_for(|now| now.is_over)).await.unwrap();
    }

    /// The next generation has these members.
    async fn next(&mut self, slots: &[u32]) {
        self.generation = Generation(self.generation.0 + 1);
        self.slots = slots.to_vec();
        let members: Vec<_> = slots.iter().map(|slot| (*slot, 1, 0)).collect();
        let number = self.generation.0;
        (self.job.generation(&self.fake, number, "", &members)).await;
        self.fake.attach(&members, self.generation).await;
    }

    async fn recovered(&self, value: &Object<All>) -> Result<u64, CallError> {
        soon(value.recovered()).await
    }
}

fn over(result: Result<Vec<u32>, CallError>) -> (Generation, String) {
    match result.unwrap_err() {
        CallError::GenerationOver {
            generation, cause, ..
        } => (generation, cause),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_value_is_on_all_ranks_before_the_next_generation_takes_calls() {
    let (mut bed, value) = Bed::new(false).await;
    bed.adds(&value).await;
    bed.commits(&value, 1).await;
    let hit = tokio::spawn(add(&value));
    bed.call().await;
    bed.loses(1).await;
    assert_eq!(over(soon(hit).await.unwrap()).0, FIRST);
    let mut waiting = tokio::spawn({
        let value = value.clone();
        async move { value.recovered().await }
    });
    bed.next(&[0, 5]).await;
    bed.retains(&[&value]).await;
    let call = bed.asked(Some(&value)).await;
    // Not before all have the value.
    settle(&mut waiting).await;
    assert_eq!(bed.executor.generation(), FIRST);
    assert_eq!(over(soon(add(&value)).await).0, FIRST);
    bed.answer(call, &1_u64).await;
    assert_eq!(soon(waiting).await.unwrap().unwrap(), 1);
    assert_eq!(bed.executor.generation(), SECOND);
    bed.adds(&value).await;
    bed.fake.nodes[0].hung_up(FIRST).await;
}

#[tokio::test]
async fn a_loss_between_two_calls_is_told_if_work_is_lost() {
    let (mut bed, value) = Bed::new(false).await;
    bed.adds(&value).await;
    bed.loses(0).await;
    bed.next(&[1]).await;
    bed.retains(&[&value]).await;
    bed.recovers(Some(&value), 0).await;
    soon(bed.executor.recovered()).await.unwrap();
    assert_eq!(bed.executor.generation(), SECOND);
    for _ in 0..2 {
        let (generation, cause) = over(soon(add(&value)).await);
        assert_eq!(generation, FIRST);
        assert!(cause.contains("back at commit 0"), "{cause}");
    }
    let error = soon(value.commit()).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    assert_eq!(bed.recovered(&value).await, Ok(0));
    bed.adds(&value).await;
    bed.commits(&value, 1).await;
    // Nothing is lost now.
    bed.loses(1).await;
    bed.next(&[2, 3]).await;
    bed.retains(&[&value]).await;
    bed.recovers(Some(&value), 1).await;
    soon(bed.executor.recovered()).await.unwrap();
    bed.adds(&value).await;
}

#[tokio::test]
async fn a_recovery_that_meets_another_loss_goes_on_in_the_generation_after() {
    let (mut bed, value) = Bed::new(true).await;
    bed.loses(1).await;
    bed.next(&[0, 2]).await;
    bed.retains(&[&value]).await;
    let call = bed.asked(Some(&value)).await;
    let mut waiting = tokio::spawn(add(&value));
    let mut failure = CallFailure::new(FailureKind::GenerationOver, "rank 1 is lost");
    failure.caused_by = Some(Rank(1));
    bed.fake.nodes[0].fails(call, Rank(0), failure).await;
    bed.fake.nodes[0].reply(&lost(&bed.job, 2), &[]).await;
    settle(&mut waiting).await;
    let mut changes = bed.executor.generations();
    bed.next(&[0, 3, 4]).await;
    bed.retains(&[&value]).await;
    bed.recovers(Some(&value), 0).await;
    // There was nothing to lose: the call goes on without a word.
    let (call, ranks, ..) = bed.call().await;
    assert_eq!(ranks.len(), 3);
    bed.answer(call, &1_u32).await;
    assert_eq!(soon(waiting).await.unwrap().unwrap(), [1, 1, 1]);
    // The second generation took no calls.
    assert_eq!(soon(changes.next()).await.unwrap().table.generation, FIRST);
    let third = soon(changes.next()).await.unwrap();
    assert_eq!((third.table.generation, third.before), (THIRD, 2));
    assert_eq!((third.left.len(), third.joined.len()), (1, 2));
}

#[tokio::test]
async fn a_value_that_is_made_while_the_group_changes_is_on_all_ranks_or_on_none() {
    let (mut bed, value) = Bed::new(false).await;
    let create = tokio::spawn(bed.executor.create::<Tally>(7).into_future());
    let call = bed.asked(None).await;
    drop(value);
    let (_, _, op, _) = bed.call().await;
    assert!(matches!(op, CallOp::Drop { .. }), "{op:?}");
    // A node joins at once; the answers come late.
    bed.next(&[0, 1, 2]).await;
    bed.retains(&[]).await;
    soon(bed.executor.recovered()).await.unwrap();
    assert_eq!(bed.executor.generation(), SECOND);
    for slot in [0, 1] {
        bed.fake.nodes[0]
            .answers(FIRST, call, (slot, FIRST), &0_u64)
            .await;
    }
    let error = soon(create).await.unwrap().unwrap_err();
    assert!(error.is_retryable(), "{error}");
    let (_, ranks, op, _) = bed.call().await;
    assert!(matches!(op, CallOp::Drop { .. }), "{op:?}");
    assert_eq!(ranks.len(), 3);
}

/// The answers are here, and the driver's task has not looked.
#[tokio::test]
async fn a_change_waits_for_a_value_that_is_being_made() {
    let (mut bed, value) = Bed::new(false).await;
    let mut create = Box::pin(bed.executor.create::<Tally>(7).into_future());
    assert!(futures_util::poll!(&mut create).is_pending());
    let making = bed.asked(None).await;
    bed.offers().await;
    // The driver has heard of the offer when it answers this.
    bed.job.places(&bed.fake, &[], true).await;
    assert_eq!(soon(bed.job.frame()).await, Some(SubmitFrame::ProgramReady));
    bed.answer(making, &0_u64).await;
    for _ in 0..2 {
        let call = tokio::spawn(bed.executor.on(Rank(0)).run(super::add, 1).into_future());
        let (id, ..) = bed.call().await;
        bed.answer(id, &1_u32).await;
        assert_eq!(soon(call).await.unwrap().unwrap(), 1);
    }
    let made = soon(create).await.unwrap();
    bed.holds().await;
    // One that comes between two generations is made in the next.
    let mut late = tokio::spawn(bed.executor.create::<Tally>(7).into_future());
    settle(&mut late).await;
    bed.next(&[0, 1, 2]).await;
    bed.retains(&[&value, &made]).await;
    // The last that is asked for is the first to be waited for.
    bed.recovers(Some(&value), 0).await;
    bed.recovers(Some(&made), 0).await;
    bed.recovers(None, 0).await;
    let late = soon(late).await.unwrap().unwrap();
    bed.adds(&late).await;
}

/// The next generation has begun, and the driver has seen no loss.
#[tokio::test]
async fn calls_wait_for_the_values_of_a_generation_that_has_begun() {
    let (mut bed, value) = Bed::new(true).await;
    bed.next(&[0, 1, 2]).await;
    bed.retains(&[&value]).await;
    let recovering = bed.asked(Some(&value)).await;
    let mut call = tokio::spawn(bed.executor.on(Rank(0)).run(super::add, 1).into_future());
    let executor = bed.executor.clone();
    let mut recovered = tokio::spawn(async move { executor.recovered().await });
    settle(&mut call).await;
    settle(&mut recovered).await;
    bed.answer(recovering, &0_u64).await;
    assert_eq!(soon(recovered).await.unwrap().unwrap().generation, SECOND);
    let (id, ..) = bed.call().await;
    bed.answer(id, &4_u32).await;
    assert_eq!(soon(call).await.unwrap().unwrap(), 4);
}

#[tokio::test]
async fn a_change_waits_for_a_commit_which_is_the_last_call_of_its_generation() {
    let (mut bed, value) = Bed::new(false).await;
    bed.adds(&value).await;
    bed.offers().await;
    // What is not committed would be lost.
    bed.adds(&value).await;
    bed.commits(&value, 1).await;
    bed.holds().await;
    assert_eq!(over(soon(add(&value)).await).0, FIRST);
    bed.next(&[0, 1, 2]).await;
    bed.retains(&[&value]).await;
    bed.recovers(Some(&value), 1).await;
    assert_eq!(bed.recovered(&value).await, Ok(1));
    bed.adds(&value).await;
}

#[tokio::test]
async fn a_change_waits_no_longer_for_a_value_without_a_handle() {
    let (mut bed, value) = Bed::new(false).await;
    bed.adds(&value).await;
    bed.offers().await;
    bed.adds(&value).await;
    drop(value);
    bed.holds().await;
}

/// Its members held at a commit of their own, and a call of theirs comes to its end later.
#[tokio::test]
async fn an_offer_that_the_next_generation_has_outrun_holds_nothing() {
    let (mut bed, value) = Bed::new(false).await;
    let run = tokio::spawn(bed.executor.run(super::add, 1).into_future());
    let (call, ..) = bed.call().await;
    bed.offers().await;
    bed.next(&[0, 1]).await;
    bed.retains(&[&value]).await;
    let recovering = bed.asked(Some(&value)).await;
    for slot in [0, 1] {
        let node = &bed.fake.nodes[0];
        node.answers(FIRST, call, (slot, SECOND), &1_u32).await;
    }
    assert_eq!(soon(run).await.unwrap().unwrap(), [1, 1]);
    bed.answer(recovering, &0_u64).await;
    soon(bed.executor.recovered()).await.unwrap();
    let run = tokio::spawn(bed.executor.run(super::add, 1).into_future());
    let (call, ..) = bed.call().await;
    bed.answer(call, &2_u32).await;
    assert_eq!(soon(run).await.unwrap().unwrap(), [2, 2]);
}

#[tokio::test]
async fn new_members_get_calls_that_span_generations_before_values() {
    let (mut bed, value) = Bed::new(false).await;
    let run = tokio::spawn(bed.executor.run(super::add, 1).into_future());
    let (call, ..) = bed.call().await;
    bed.loses(1).await;
    bed.next(&[0, 2]).await;
    let (same, ranks, ..) = bed.call().await;
    assert_eq!((same, ranks), (call, vec![Rank(1)]));
    bed.retains(&[&value]).await;
    bed.recovers(Some(&value), 0).await;
    let node = &bed.fake.nodes[0];
    node.answers(FIRST, call, (0, SECOND), &1_u32).await;
    node.answers(SECOND, call, (2, SECOND), &2_u32).await;
    assert_eq!(soon(run).await.unwrap().unwrap(), [1, 2]);
}

#[tokio::test]
async fn a_value_that_a_new_member_cannot_make_fails_alone() {
    let (mut bed, value) = Bed::new(false).await;
    bed.loses(1).await;
    bed.next(&[0, 2]).await;
    bed.retains(&[&value]).await;
    let call = bed.asked(Some(&value)).await;
    let failure = CallFailure::new(FailureKind::Error, "no file");
    bed.fake.nodes[0].fails(call, Rank(0), failure).await;
    soon(bed.executor.recovered()).await.unwrap();
    assert_eq!(bed.executor.generation(), SECOND);
    let error = soon(add(&value)).await.unwrap_err();
    assert!(error.to_string().contains("no file"), "{error}");
    assert_eq!(bed.recovered(&value).await, Err(error));
    let run = tokio::spawn(bed.executor.on(Rank(0)).run(super::add, 1).into_future());
    let (call, ..) = bed.call().await;
    bed.answer(call, &3_u32).await;
    assert_eq!(soon(run).await.unwrap().unwrap(), 3);
    // The end is told, too.
    bed.job.ended(JobState::Failed, None, None).await;
    soon(bed.executor.ended()).await;
    let error = bed.recovered(&value).await.unwrap_err();
    assert_eq!(error.kind(), CallErrorKind::Ended);
}
