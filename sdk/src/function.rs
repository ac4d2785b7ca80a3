//! Functions that run on workers, and the types that they take and give.

use std::fmt::Display;

use kolo_transport::wire::{CallFailure, FailureKind};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::__private::{ArgumentWriter, Ended};
use crate::codec::{self, CodecError, Decoder, Encoder};
use crate::worker::Reply;

/// A function that workers can run. Made by [`#[kolo::function]`](macro@crate::function), which turns a
/// function into a type of the same name that implements this trait, and a function that gives a value of that
/// type: what [`Executor::run`](crate::Executor::run) takes. The function itself is `name::call`.
///
/// The macro checks that `Args` are [`Argument`]s and `Output` is an [`Output`], with an error at the type in
/// question. The trait does not repeat these bounds, so that there is one error and not three; what encodes
/// arguments says `F::Args: ArgumentTuple`, what decodes results `F::Output: DeserializeOwned + Send + 'static`.
pub trait Function {
    /// Its arguments as a tuple, without the [`Context`](crate::Context).
    type Args;
    /// What it gives back; for a function that returns `Result<T, E>` this is `T`.
    type Output;
    /// Its registered name: the path of its module, `::` and its own name.
    const NAME: &'static str;
}

/// Arguments as people like to write them: the tuple itself, or the value alone if there is just one.
///
/// ```
/// use kolo::IntoArgs;
///
/// fn take(_: impl IntoArgs<(u32,)>) {}
/// take(5);
/// take((5,));
/// ```
#[diagnostic::on_unimplemented(
    message = "these are not the arguments of the call: it takes `{A}`, and here is `{Self}`",
    label = "expected `{A}`",
    note = "arguments are given as a tuple; a single one may stand by itself"
)]
pub trait IntoArgs<A> {
    /// The tuple.
    fn into_args(self) -> A;
}

impl<A> IntoArgs<A> for A {
    fn into_args(self) -> A {
        self
    }
}

impl<A> IntoArgs<(A,)> for A {
    fn into_args(self) -> (A,) {
        (self,)
    }
}

/// The arguments of a call as a tuple, each of which serde can encode: see [`Argument`]. Tuples of up to 16 implement it.
pub trait ArgumentTuple {
    #[doc(hidden)]
    fn encode(&self) -> Result<Vec<u8>, CodecError>;
}

/// For the tuple in brackets, and for those that are one longer each.
macro_rules! argument_tuples {
    ([$($name:ident $index:tt)*]) => {
        impl<$($name: Serialize + 'static),*> ArgumentTuple for ($($name,)*) {
            fn encode(&self) -> Result<Vec<u8>, CodecError> {
                const ALL: &[u8] = &[$($index),*];
                ArgumentWriter::new(ALL.len() as u8)$(.add(&self.$index, codec::write))*.finish()
            }
        }
    };
    ([$($name:ident $index:tt)*] $next:ident $at:tt $($more:tt)*) => {
        argument_tuples!([$($name $index)*]);
        argument_tuples!([$($name $index)* $next $at] $($more)*);
    };
}
argument_tuples!([] A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7 I 8 J 9 K 10 L 11 M 12 N 13 O 14 P 15);

/// Proof that a type is an [`Argument`], an [`Output`] or a [`Failure`]: it has the usual traits.
#[derive(Debug)]
pub enum ByTraits {}

/// Stands for a second way to be one, which no type has. With two ways the compiler reports the
/// trait that was asked for and not the first bound that is missing, so that our message is shown.
#[derive(Debug)]
pub enum ByNothing {}

mod sealed {
    pub trait Never {}
}
use sealed::Never;

/// The name of a [`Function`], as [`Executor::run`](crate::Executor::run) takes it. Do not implement it; `Proof` is found by the compiler.
#[diagnostic::on_unimplemented(
    message = "workers run functions that are marked with `#[kolo::function]`, and this is none",
    label = "not the name of a function that workers know",
    note = "write `#[kolo::function]` above the function, and give its name alone, its arguments after it: `run(name, (a, b))`",
    note = "a closure can't be run: workers are other processes, and find functions by name"
)]
pub trait Marked<Proof> {
    /// The function.
    type Function: Function;
}

impl<T: FnOnce() -> F, F: Function> Marked<ByTraits> for T {
    type Function = F;
}

impl<T: Never> Marked<ByNothing> for T {
    type Function = ByNothing;
}

impl Function for ByNothing {
    type Args = ();
    type Output = ();
    const NAME: &'static str = "";
}

/// A type that an argument of a remote call may have: anything that is [`Serialize`], [`DeserializeOwned`]
/// and `'static`. Do not implement it; `Proof` is found by the compiler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be an argument of a remote call",
    label = "arguments travel to other processes, so they need `Serialize`, `Deserialize` and `'static`",
    note = "add `#[derive(serde::Serialize, serde::Deserialize)]` to `{Self}`, or pass something from which the worker can make it",
    note = "on an executable's method, `#[kolo(skip)]` keeps the method local"
)]
pub trait Argument<Proof>: Sized {
    #[doc(hidden)]
    fn encode(&self, out: &mut Encoder<'_>) -> Result<(), rmp_serde::encode::Error>;
    #[doc(hidden)]
    fn decode(from: &mut Decoder<'_>) -> Result<Self, rmp_serde::decode::Error>;
}

impl<T: Serialize + DeserializeOwned + 'static> Argument<ByTraits> for T {
    fn encode(&self, out: &mut Encoder<'_>) -> Result<(), rmp_serde::encode::Error> {
        codec::write(self, out)
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Self, rmp_serde::decode::Error> {
        codec::read(from)
    }
}

impl<T: Never> Argument<ByNothing> for T {
    fn encode(&self, _: &mut Encoder<'_>) -> Result<(), rmp_serde::encode::Error> {
        Ok(())
    }

    fn decode(_: &mut Decoder<'_>) -> Result<Self, rmp_serde::decode::Error> {
        Err(rmp_serde::decode::Error::OutOfRange)
    }
}

/// A type that the result of a remote call may have: anything that is [`Serialize`], [`DeserializeOwned`],
/// [`Send`] and `'static`. Do not implement it; `Proof` is found by the compiler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be the result of a remote call",
    label = "results travel to the driver, so they need `Serialize`, `Deserialize`, `Send` and `'static`",
    note = "add `#[derive(serde::Serialize, serde::Deserialize)]` to `{Self}`, or return the part of it that the driver needs",
    note = "on an executable's method, `#[kolo(skip)]` keeps the method local"
)]
pub trait Output<Proof> {
    #[doc(hidden)]
    fn encode(&self, reply: &mut Reply) -> Ended;
}

impl<T: Serialize + DeserializeOwned + Send + 'static> Output<ByTraits> for T {
    fn encode(&self, reply: &mut Reply) -> Ended {
        reply.serialize(self)
    }
}

impl<T: Never> Output<ByNothing> for T {
    fn encode(&self, _: &mut Reply) -> Ended {
        Err(CallFailure::new(FailureKind::Result, ""))
    }
}

/// A type that the error of a remote call may have: anything that is [`Display`]. The driver gets its text,
/// with those of its sources. Do not implement it; `Proof` is found by the compiler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be the error of a remote call",
    label = "the driver gets the error's text, so it needs `Display`",
    note = "implement `std::fmt::Display` for `{Self}`, or return `kolo::Result<T>`"
)]
pub trait Failure<Proof> {}

impl<T: Display> Failure<ByTraits> for T {}
impl<T: Never> Failure<ByNothing> for T {}
