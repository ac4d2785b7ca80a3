//! Functions of all kinds, in a crate with strict lints.
#![forbid(unsafe_code)]
#![deny(warnings, missing_docs, unreachable_pub, missing_debug_implementations)]
// Odd on purpose. Other lints are on, so that the macros' code gives no cause for them either.
#![allow(clippy::non_minimal_cfg, clippy::unnecessary_wraps)]

use std::collections::BTreeMap;

use kolo::{Context, Function};

/// Documented, public, conditional.
#[kolo::function]
#[cfg(all())]
pub fn documented(_ctx: &Context, mut map: BTreeMap<String, Option<u8>>) -> usize {
    map.clear();
    map.len()
}

#[kolo::function]
#[cfg(any())]
fn absent(not_there: NoSuchType) {}

#[kolo::function]
fn nothing() {}

#[kolo::function]
async fn waits(
    ctx: &kolo::Context,
    (a, b): (u8, u8),
    _: u8,
    arg1: u8,
) -> Result<u8, std::num::TryFromIntError> {
    std::future::ready(()).await;
    u8::try_from(ctx.rank() + usize::from(a) + usize::from(b) + usize::from(arg1))
}

#[kolo::function]
fn kolo_result(text: String) -> kolo::Result<f64> {
    Ok(text.parse()?)
}

#[kolo::function]
fn r#type(r#match: u8) -> u8 {
    r#match
}

// Names that the expansion must not take for its own.
#[kolo::function]
fn value(context: u8, arguments: u8, reply: u8, error: u8) -> Result<u8, String> {
    Ok(context + arguments + reply + error)
}

#[kolo::function]
fn formats() -> std::fmt::Result {
    Ok(())
}

#[kolo::function]
fn boxed() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Err("no".into())
}

mod inner {
    #[kolo::function]
    pub(super) fn nothing(one: u8) -> u8 {
        one
    }
}

/// As the executor takes functions.
fn args_of<F: Function>(_: impl FnOnce() -> F) -> (&'static str, usize) {
    (local(F::NAME), size_of::<F::Args>())
}

/// Without the name of the crate.
fn local(name: &'static str) -> &'static str {
    name.strip_prefix(concat!(module_path!(), "::"))
        .expect("the name begins with the crate")
}

/// `main` keeps its return type and its attributes.
#[kolo::main]
#[allow(clippy::unnecessary_wraps)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let value = tokio::spawn(async { 5 }).await?;
    assert_eq!(value, 5);
    // The name is free for a variable.
    let nothing = args_of(nothing);
    assert_eq!(nothing, ("nothing", 0));
    assert_eq!(args_of(inner::nothing), ("inner::nothing", 1));
    assert_eq!(args_of(r#type), ("type", 1));
    assert_eq!(r#type::call(3), 3);
    assert_eq!(value::call(1, 2, 3, 4), Ok(10));
    assert!(kolo_result::call("1.5".to_owned()).is_ok());
    assert!(boxed::call().is_err() && formats::call().is_ok());
    let context = kolo::Context::for_tests(
        kolo::collectives::local_group(1)
            .expect("a group")
            .remove(0),
    );
    assert_eq!(documented::call(&context, BTreeMap::new()), 0);
    let registry = kolo::registry::Registry::get().expect("no name twice");
    let names: Vec<&str> = registry
        .functions()
        .iter()
        .map(|entry| local(entry.name()))
        .collect();
    assert_eq!(
        names,
        [
            "boxed",
            "documented",
            "formats",
            "inner::nothing",
            "kolo_result",
            "nothing",
            "type",
            "value",
            "waits",
        ]
    );
    let waits = registry
        .function(concat!(module_path!(), "::waits"))
        .expect("it is there");
    assert_eq!(
        waits.signature(),
        "(arg0: (u8, u8), arg2: u8, arg1: u8) -> u8"
    );
    Ok(())
}
