//! Finds what a call names, runs it and says how it ended.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_transport::frame::{FrameError, InvalidFrame};
use kolo_transport::ids::{CallId, Generation, ObjectId};
use kolo_transport::wire::{CallFailure, FailureKind};
use serde::Deserialize;
use tokio::runtime::Runtime;

use super::object::Object;
use super::panics;
use super::reply::Reply;
use crate::__private::{Arguments, CreateFn, Created, Ended, FunctionFn, MethodFn};
use crate::codec;
use crate::context::{Context, Running, Session};
use crate::elastic::StateError;
use crate::registry::{ClassEntry, Registry, UnknownName};

/// [`WorkerCall`](kolo_transport::wire::WorkerCall), borrowed from the frame.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct CallHead<'a> {
    call: CallId,
    generation: Generation,
    #[serde(default)]
    deadline_ms: Option<u64>,
    #[serde(borrow)]
    op: Op<'a>,
}

/// [`CallOp`](kolo_transport::wire::CallOp), borrowed from the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum Op<'a> {
    Function { name: &'a str },
    Create { object: ObjectId, class: &'a str },
    Method { object: ObjectId, name: &'a str },
    Drop { object: ObjectId },
    Recover { object: ObjectId, class: &'a str },
    Commit { object: ObjectId },
    Retain,
}

impl<'a> CallHead<'a> {
    /// The call of an encoded head.
    pub(crate) fn decode(head: &'a [u8]) -> Result<Self, FrameError> {
        rmp_serde::from_slice(head).map_err(|error| {
            FrameError::Invalid(InvalidFrame::Malformed {
                expected: "WorkerCall",
                reason: error.to_string(),
            })
        })
    }
}

/// The executables of this worker, and how to run things.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    registry: &'static Registry,
    session: Arc<Session>,
    objects: HashMap<ObjectId, Object>,
    created: u64,
    /// For async user code; made when there is some.
    runtime: Option<Runtime>,
}

impl Dispatcher {
    pub(crate) fn new(registry: &'static Registry, session: Arc<Session>) -> Self {
        Self {
            registry,
            session,
            objects: HashMap::new(),
            created: 0,
            runtime: None,
        }
    }

    /// Runs a call and writes its result. `read_at` is when it came.
    ///
    /// # Errors
    ///
    /// Only if the result can't be put into a frame.
    pub(crate) fn call(
        &mut self,
        head: &CallHead<'_>,
        body: &[u8],
        read_at: Instant,
        reply: &mut Reply,
    ) -> Result<(), FrameError> {
        reply.begin(head.call)?;
        let (ended, generation) = self.checked(head, body, read_at, reply);
        reply.end((head.call, generation), ended)
    }

    fn checked(
        &mut self,
        head: &CallHead<'_>,
        body: &[u8],
        read_at: Instant,
        reply: &mut Reply,
    ) -> (Ended, Generation) {
        // A deadline beyond the clock's end is none.
        let deadline = head
            .deadline_ms
            .and_then(|ms| read_at.checked_add(Duration::from_millis(ms)));
        let begun = (self.session).begin_call((head.call, head.generation), deadline);
        let context = match begun {
            Ok(context) => context,
            Err(failure) => return (Err(failure), Generation(0)),
        };
        let ended = self.run(&context, head, body, reply);
        self.session.end_call(head.generation, ended)
    }

    fn run(
        &mut self,
        context: &Context,
        head: &CallHead<'_>,
        body: &[u8],
        reply: &mut Reply,
    ) -> Ended {
        let arguments = Arguments(body);
        match head.op {
            Op::Function { name } => self.function(context, name, arguments, reply),
            Op::Create { object, class } => self.create(context, (object, class), arguments, reply),
            Op::Method { object, name } => {
                self.method(context, (head.call, object, name), arguments, reply)
            }
            Op::Drop { object } => self.drop_object(object, reply),
            Op::Recover { object, class } => {
                self.recover(context, (object, class), arguments, reply)
            }
            Op::Commit { object } => self.commit(context, (head.call, object), reply),
            Op::Retain => self.retain(body, reply),
        }
    }

    fn function(
        &mut self,
        context: &Context,
        name: &str,
        arguments: Arguments<'_>,
        reply: &mut Reply,
    ) -> Ended {
        let entry = self
            .registry
            .function(name)
            .map_err(|name| unknown(&name))?;
        let runtime = &mut self.runtime;
        panics::catch(|| match entry.run {
            FunctionFn::Sync(run) => run(context, arguments, reply),
            FunctionFn::Async(run) => {
                block_on(runtime, context.running(), run(context, arguments, reply))
            }
        })
        .flatten()
        .map_err(|failure| name_target(failure, format_args!("{}{}", entry.name, entry.signature)))
    }

    fn create(
        &mut self,
        context: &Context,
        (object, class): (ObjectId, &str),
        arguments: Arguments<'_>,
        reply: &mut Reply,
    ) -> Ended {
        let class = self.registry.class(class).map_err(|name| unknown(&name))?;
        // The old one goes first, as its successor may want what it holds.
        if let Some(old) = self.objects.remove(&object) {
            drop_value(old);
        }
        let value = self.make(context, class, arguments)?;
        self.insert(object, class, value);
        reply.serialize(&())
    }

    /// Runs the constructor of a class.
    fn make(
        &mut self,
        context: &Context,
        class: &'static ClassEntry,
        arguments: Arguments<'_>,
    ) -> Created {
        let runtime = &mut self.runtime;
        panics::catch(|| match class.create {
            CreateFn::Sync(create) => create(context, arguments),
            CreateFn::Async(create) => {
                block_on(runtime, context.running(), create(context, arguments))
            }
        })
        .flatten()
        .map_err(|failure| {
            name_target(
                failure,
                format_args!("{}::new{}", class.name, class.signature),
            )
        })
    }

    fn insert(&mut self, object: ObjectId, class: &'static ClassEntry, value: Box<dyn Any>) {
        self.created += 1;
        let made = Object::new(class, value, self.created);
        self.objects.insert(object, made);
    }

    /// Brings an executable to the last commit of all ranks. One that is missing here, or in an unknown state, is made anew first.
    fn recover(
        &mut self,
        context: &Context,
        (object, class): (ObjectId, &str),
        arguments: Arguments<'_>,
        reply: &mut Reply,
    ) -> Ended {
        let class = self.registry.class(class).map_err(|name| unknown(&name))?;
        let known = self.objects.get(&object);
        if known.is_none_or(|found| found.poison.is_some()) {
            let value = self.make(context, class, arguments)?;
            match self.objects.get_mut(&object) {
                Some(found) => found.replace(value),
                None => self.insert(object, class, value),
            }
        }
        let found = self.objects.get_mut(&object);
        let found = found.ok_or_else(|| missing(object, "recover"))?;
        let commits = on_state(found, "going back to the last commit", |found| {
            found.recover(context)
        })?;
        reply.serialize(&commits)
    }

    /// Commits the state of an executable, together with the other ranks.
    fn commit(
        &mut self,
        context: &Context,
        (call, object): (CallId, ObjectId),
        reply: &mut Reply,
    ) -> Ended {
        let found = self.objects.get_mut(&object);
        let found = found.ok_or_else(|| missing(object, "commit"))?;
        if found.class().parts.is_none() {
            return Err(CallFailure::new(
                FailureKind::UnknownTarget,
                format!(
                    "`{}` has nothing to commit: it is not `#[kolo::executable(elastic)]`",
                    found.class().name
                ),
            ));
        }
        usable(found)?;
        let place = format!("the commit of call {call}");
        let commits = on_state(found, &place, |found| found.commit(context))?;
        reply.serialize(&commits)
    }

    /// Drops all executables but those of a list, in the order in which they were created.
    fn retain(&mut self, list: &[u8], reply: &mut Reply) -> Ended {
        let kept: HashSet<ObjectId> = codec::decode(list)
            .map_err(|error| CallFailure::new(FailureKind::Arguments, error.to_string()))?;
        let gone = self.objects.extract_if(|object, _| !kept.contains(object));
        drop_in_order(gone.map(|(_, found)| found).collect());
        reply.serialize(&())
    }

    fn method(
        &mut self,
        context: &Context,
        (call, object, name): (CallId, ObjectId, &str),
        arguments: Arguments<'_>,
        reply: &mut Reply,
    ) -> Ended {
        let found = self.objects.get_mut(&object);
        let found = found.ok_or_else(|| missing(object, name))?;
        let class = found.class();
        let method = class.method(name).map_err(|name| unknown(&name))?;
        usable(found)?;
        let runtime = &mut self.runtime;
        let value = found.value();
        let ended = panics::catch(|| match method.run {
            MethodFn::Sync(run) => run(value, context, arguments, reply),
            MethodFn::Async(run) => block_on(
                runtime,
                context.running(),
                run(value, context, arguments, reply),
            ),
        });
        if let Err(panic) = &ended {
            found.poison = Some(format!(
                "`{name}` panicked in call {call}: {}",
                panic.message
            ));
        }
        ended.flatten().map_err(|failure| {
            name_target(
                failure,
                format_args!("{}::{}{}", class.name, method.name, method.signature),
            )
        })
    }

    fn drop_object(&mut self, object: ObjectId, reply: &mut Reply) -> Ended {
        // One that could not be created is dropped by its driver all the same.
        if let Some(found) = self.objects.remove(&object) {
            panics::catch(|| drop(found))?;
        }
        reply.serialize(&())
    }

    /// Drops all executables, in the order in which they were created.
    pub(crate) fn drop_all(&mut self) {
        drop_in_order(self.objects.drain().map(|(_, object)| object).collect());
    }
}

fn missing(object: ObjectId, name: &str) -> CallFailure {
    CallFailure::new(
        FailureKind::UnknownTarget,
        format!(
            "there is no executable {object} on this rank for `{name}`: it was dropped, or could not be created"
        ),
    )
}

/// Refuses a value in an unknown state.
fn usable(object: &Object) -> Ended {
    let Some(poison) = &object.poison else {
        return Ok(());
    };
    Err(CallFailure::new(
        FailureKind::Poisoned,
        format!(
            "this `{}` is in an unknown state, because {poison}; create it again",
            object.class().name
        ),
    ))
}

/// Runs an operation on the state of a value. The code that names the parts is the user's, and may panic.
fn on_state<T>(
    object: &mut Object,
    place: &str,
    run: impl FnOnce(&mut Object) -> Result<T, StateError>,
) -> Result<T, CallFailure> {
    match panics::catch(|| run(object)) {
        Ok(done) => done.map_err(|error| CallFailure::new(FailureKind::Error, error.to_string())),
        Err(panic) => {
            object.poison = Some(format!("{place} panicked: {}", panic.message));
            Err(panic)
        }
    }
}

fn drop_in_order(mut all: Vec<Object>) {
    all.sort_unstable_by_key(|object| object.created);
    all.into_iter().for_each(drop_value);
}

/// Drops an executable whose caller does not learn of a panic.
fn drop_value(object: Object) {
    let class = object.class().name;
    if let Err(failure) = panics::catch(|| drop(object)) {
        tracing::error!(
            class,
            panic = failure.message,
            "an executable panicked when it was dropped"
        );
    }
}

/// Runs async user code to its end, or until the call is cancelled or its deadline passes.
fn block_on<T>(
    runtime: &mut Option<Runtime>,
    running: &Running,
    code: impl Future<Output = Result<T, CallFailure>>,
) -> Result<T, CallFailure> {
    let runtime = match runtime {
        Some(runtime) => runtime,
        None => runtime.insert(
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|error| {
                    CallFailure::new(
                        FailureKind::Error,
                        format!("the runtime for async code could not be started: {error}"),
                    )
                })?,
        ),
    };
    runtime.block_on(async {
        tokio::select! {
            biased;
            stopped = running.stopped() => Err(stopped.failure("at an await point")),
            ended = code => ended,
        }
    })
}

fn unknown(name: &UnknownName) -> CallFailure {
    CallFailure::new(FailureKind::UnknownTarget, name.to_string())
}

/// Says whose arguments do not decode.
fn name_target(mut failure: CallFailure, target: fmt::Arguments<'_>) -> CallFailure {
    if failure.kind == FailureKind::Arguments {
        failure.message = format!(
            "the arguments of `{target}` do not decode: {}",
            failure.message
        );
    }
    failure
}
