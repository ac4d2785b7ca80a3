//! What happens to an actor later: the end of some work, and its timer.

use std::time::Instant;

use actix::dev::ToEnvelope;
use actix::{Actor, AsyncContext, Context, Handler, Message, SpawnHandle};
use kolo_transport::awake::AwakeClock;
use tokio::task::AbortHandle;

/// Sends an actor the message that a future gives. Not one of the actor's own futures: an actor polls all of those at each turn.
pub(crate) fn later<A, M>(
    ctx: &mut Context<A>,
    message: impl Future<Output = M> + 'static,
) -> AbortHandle
where
    A: Actor<Context = Context<A>> + Handler<M>,
    A::Context: ToEnvelope<A, M>,
    M: Message<Result = ()> + Send + 'static,
{
    let this = ctx.address();
    let task = actix::spawn(async move {
        // An actor that is gone needs no message.
        this.send(message.await).await.ok();
    });
    task.abort_handle()
}

/// The one timer of an actor.
#[derive(Debug, Default)]
pub(crate) struct Timer(Option<(Instant, SpawnHandle)>);

impl Timer {
    /// Has `ring` called at a time of the clock, in place of the time before. It calls [`Timer::rang`] first.
    pub(crate) fn set<A: Actor<Context = Context<A>>>(
        &mut self,
        ctx: &mut Context<A>,
        (clock, at): (&AwakeClock, Option<Instant>),
        ring: impl FnOnce(&mut A, &mut Context<A>) + 'static,
    ) {
        if self.0.map(|(before, _)| before) == at {
            return;
        }
        if let Some((_, timer)) = self.0.take() {
            ctx.cancel_future(timer);
        }
        self.0 = at.map(|at| (at, ctx.run_later(clock.until(at), ring)));
    }

    /// The time has come.
    pub(crate) fn rang(&mut self) {
        self.0 = None;
    }
}
