//! What the macros' expansions use. No part of the public API: it may change in any release.

use std::any::Any;
use std::error::Error;
use std::fmt::Display;
use std::future::Future;
use std::pin::Pin;

use kolo_transport::wire::{CallFailure, FailureKind};

use crate::codec::{CodecError, Decoder, Encoder, append_argument, is_at_end, reason};
use crate::elastic::{Elastic, Parts};

pub use linkme;

pub use crate::context::Context;
pub use crate::function::{Argument, Failure, Output};
pub use crate::registry::{CLASSES, ClassEntry, FUNCTIONS, FunctionEntry, MethodEntry};
pub use crate::worker::Reply;

/// How user code ended, as far as it concerns the caller. On success the result is in the [`Reply`].
pub type Ended = Result<(), CallFailure>;

/// The same for async user code. It never leaves the worker's main thread.
pub type EndedFuture<'a> = Pin<Box<dyn Future<Output = Ended> + 'a>>;

/// What a constructor gives.
pub type Created = Result<Box<dyn Any>, CallFailure>;

/// The same for an async constructor.
pub type CreatedFuture<'a> = Pin<Box<dyn Future<Output = Created> + 'a>>;

/// Runs a function.
#[derive(Clone, Copy)]
pub enum FunctionFn {
    /// Without awaiting.
    Sync(fn(&Context, Arguments<'_>, &mut Reply) -> Ended),
    /// As a future.
    Async(for<'a> fn(&'a Context, Arguments<'a>, &'a mut Reply) -> EndedFuture<'a>),
}

/// Makes an executable.
#[derive(Clone, Copy)]
pub enum CreateFn {
    /// Without awaiting.
    Sync(fn(&Context, Arguments<'_>) -> Created),
    /// As a future.
    Async(for<'a> fn(&'a Context, Arguments<'a>) -> CreatedFuture<'a>),
}

/// Runs a method of an executable.
#[derive(Clone, Copy)]
pub enum MethodFn {
    /// Without awaiting.
    Sync(fn(&mut dyn Any, &Context, Arguments<'_>, &mut Reply) -> Ended),
    /// As a future.
    Async(
        for<'a> fn(&'a mut dyn Any, &'a Context, Arguments<'a>, &'a mut Reply) -> EndedFuture<'a>,
    ),
}

/// Names the parts of an executable's state.
pub type PartsFn = fn(&mut dyn Any, &mut Parts<'_>);

/// The parts of an executable of this type.
pub fn parts<T: Elastic + 'static>(value: &mut dyn Any, parts: &mut Parts<'_>) {
    // The dispatcher pairs the functions of a type with values of that type.
    if let Some(value) = value.downcast_mut::<T>() {
        value.parts(parts);
    }
}

macro_rules! opaque_debug {
    ($($name:ident $(<$($lifetime:lifetime)? $($param:ident)?>)?),*) => {$(
        impl $(<$($lifetime)? $($param)?>)? std::fmt::Debug for $name $(<$($lifetime)? $($param)?>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    )*};
}
opaque_debug!(
    FunctionFn,
    CreateFn,
    MethodFn,
    ArgumentReader<'a>,
    ArgumentCodec<A>,
    OutputCodec<T>
);

/// The encoded arguments of a call: an array, or nil for none.
#[derive(Debug, Clone, Copy)]
pub struct Arguments<'a>(pub(crate) &'a [u8]);

impl<'a> Arguments<'a> {
    /// Starts to take `count` arguments out.
    ///
    /// # Errors
    ///
    /// [`FailureKind::Arguments`] if there is another number of them.
    pub fn begin(self, count: usize) -> Result<ArgumentReader<'a>, CallFailure> {
        let (given, rest) = match self.0 {
            [0xc0, rest @ ..] => (0, rest),
            [marker @ 0x90..=0x9f, rest @ ..] => (usize::from(marker & 0x0f), rest),
            [0xdc, high, low, rest @ ..] => (usize::from(u16::from_be_bytes([*high, *low])), rest),
            _ => {
                return Err(arguments(format!(
                    "expected a list of {count}, found {} bytes of something else",
                    self.0.len()
                )));
            }
        };
        if given != count {
            return Err(arguments(format!("expected {count}, found {given}")));
        }
        Ok(ArgumentReader {
            decoder: Decoder::from_read_ref(rest),
        })
    }
}

fn arguments(message: String) -> CallFailure {
    CallFailure::new(FailureKind::Arguments, message)
}

/// Takes one argument after the other out of [`Arguments`].
pub struct ArgumentReader<'a> {
    decoder: Decoder<'a>,
}

impl ArgumentReader<'_> {
    /// The next argument. `name` and `type_name` are those of the source, for the message.
    ///
    /// # Errors
    ///
    /// [`FailureKind::Arguments`].
    pub fn next<A>(
        &mut self,
        codec: ArgumentCodec<A>,
        name: &str,
        type_name: &str,
    ) -> Result<A, CallFailure> {
        (codec.decode)(&mut self.decoder)
            .map_err(|error| arguments(format!("`{name}: {type_name}`: {}", reason(&error))))
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    ///
    /// [`FailureKind::Arguments`].
    pub fn end(mut self) -> Ended {
        if is_at_end(&mut self.decoder) {
            Ok(())
        } else {
            Err(arguments("bytes are left over".to_owned()))
        }
    }
}

/// Appends encoded arguments to a list.
#[derive(Debug)]
pub struct ArgumentWriter {
    bytes: Result<Vec<u8>, CodecError>,
}

impl ArgumentWriter {
    /// A list that will have `count` arguments.
    #[must_use]
    pub fn new(count: u8) -> Self {
        Self {
            bytes: Ok(match count {
                0 => vec![0xc0],
                1..=15 => vec![0x90 | count],
                _ => vec![0xdc, 0, count],
            }),
        }
    }

    /// Appends the next argument.
    #[must_use]
    pub fn push<A>(self, codec: ArgumentCodec<A>, value: &A) -> Self {
        self.add(value, codec.encode)
    }

    pub(crate) fn add<A>(
        mut self,
        value: &A,
        encode: fn(&A, &mut Encoder<'_>) -> Result<(), rmp_serde::encode::Error>,
    ) -> Self {
        if let Ok(bytes) = &mut self.bytes
            && let Err(error) = append_argument(bytes, value, encode)
        {
            self.bytes = Err(error);
        }
        self
    }

    /// The list.
    ///
    /// # Errors
    ///
    /// What the first argument that failed to encode said.
    pub fn finish(self) -> Result<Vec<u8>, CodecError> {
        self.bytes
    }
}

/// How an argument of this type is encoded and decoded. Has no bounds, so that a type that is no
/// [`Argument`] is told once, where [`argument`] is called with its span.
pub struct ArgumentCodec<A> {
    encode: fn(&A, &mut Encoder<'_>) -> Result<(), rmp_serde::encode::Error>,
    decode: fn(&mut Decoder<'_>) -> Result<A, rmp_serde::decode::Error>,
}

/// The codec of an argument's type.
#[must_use]
pub const fn argument<A: Argument<Proof>, Proof>() -> ArgumentCodec<A> {
    ArgumentCodec {
        encode: A::encode,
        decode: A::decode,
    }
}

/// How a result of this type is encoded.
pub struct OutputCodec<T> {
    encode: fn(&T, &mut Reply) -> Ended,
}

impl<T> OutputCodec<T> {
    /// Writes a result.
    ///
    /// # Errors
    ///
    /// [`FailureKind::Result`].
    pub fn encode(self, value: &T, reply: &mut Reply) -> Ended {
        (self.encode)(value, reply)
    }
}

/// The codec of a result's type.
#[must_use]
pub const fn output<T: Output<Proof>, Proof>() -> OutputCodec<T> {
    OutputCodec { encode: T::encode }
}

/// The failed call of an error that user code returned. Text and backtrace come from [`Thrown`].
pub fn failed<E: Failure<Proof>, Proof>(
    _: &E,
    text: String,
    backtrace: Option<String>,
) -> CallFailure {
    CallFailure {
        backtrace,
        ..CallFailure::new(FailureKind::Error, text)
    }
}

/// An executable of the type that a method wants.
///
/// # Errors
///
/// [`FailureKind::UnknownTarget`]; the dispatcher pairs methods with values of their own type, so this is
/// a fault in kolo.
pub fn downcast<T: 'static>(value: &mut dyn Any) -> Result<&mut T, CallFailure> {
    value.downcast_mut().ok_or_else(|| {
        CallFailure::new(
            FailureKind::UnknownTarget,
            format!(
                "this executable is not of type `{}`",
                std::any::type_name::<T>()
            ),
        )
    })
}

/// An error on its way to a text: with its sources if it is a [`std::error::Error`], in the alternate form
/// if it is only [`Display`] (for `anyhow::Error` that has the sources too).
///
/// `(&&&Thrown(&error)).text()` takes the first of the traits below that fits, by auto-reference.
#[derive(Debug)]
pub struct Thrown<'a, E>(pub &'a E);

/// First choice.
pub trait TextOfError {
    /// The text.
    fn text(&self) -> String;
}

/// Second choice.
pub trait TextOfDisplay {
    /// The text.
    fn text(&self) -> String;
}

/// Last choice. [`failed`] refuses such types with a message of its own.
pub trait TextOfNothing {
    /// The text.
    fn text(&self) -> String;
}

impl<E: Error> TextOfError for &&Thrown<'_, E> {
    fn text(&self) -> String {
        let mut text = self.0.to_string();
        let mut source = self.0.source();
        // A chain has an end; a bound costs nothing where a type returns itself.
        for _ in 0..32 {
            let Some(cause) = source else { break };
            let cause_text = cause.to_string();
            // Many types repeat their source in their own message.
            if !text.contains(&cause_text) {
                text.push_str(": ");
                text.push_str(&cause_text);
            }
            source = cause.source();
        }
        text
    }
}

impl<E: Display> TextOfDisplay for &Thrown<'_, E> {
    fn text(&self) -> String {
        format!("{:#}", self.0)
    }
}

impl<E> TextOfNothing for Thrown<'_, E> {
    fn text(&self) -> String {
        std::any::type_name::<E>().to_owned()
    }
}

/// First choice: an error that keeps where it was made.
pub trait BacktraceOfOurs {
    /// The backtrace.
    fn backtrace(&self) -> Option<String>;
}

/// Last choice.
pub trait BacktraceOfAny {
    /// None.
    fn backtrace(&self) -> Option<String>;
}

impl BacktraceOfOurs for &Thrown<'_, crate::Error> {
    fn backtrace(&self) -> Option<String> {
        crate::worker::trimmed(self.0.backtrace())
    }
}

impl<E> BacktraceOfAny for Thrown<'_, E> {
    fn backtrace(&self) -> Option<String> {
        None
    }
}
