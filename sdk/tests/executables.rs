//! Executables of all kinds, in a crate with strict lints.
#![forbid(unsafe_code)]
#![deny(warnings, missing_docs, unreachable_pub, missing_debug_implementations)]
// Odd on purpose. Other lints are on, so that the macros' code gives no cause for them either.
#![allow(clippy::unused_async, clippy::unused_self)]

use kolo::prelude::*;
use kolo::{Call, Executable};
use serde::{Deserialize, Serialize};

/// What it is made of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Config {
    /// How fast.
    pub rate: f32,
}

/// A public one.
#[derive(Debug)]
pub struct Trainer {
    config: Config,
}

#[kolo::executable]
impl Trainer {
    /// The usual rate.
    pub const RATE: f32 = 0.1;

    /// Makes one.
    ///
    /// # Errors
    ///
    /// If the rate is negative.
    pub fn new(_ctx: &Context, config: Config) -> Result<Self> {
        if config.rate < 0.0 {
            return Err(kolo::Error::msg("negative"));
        }
        Ok(Self { config })
    }

    /// One step.
    ///
    /// # Errors
    ///
    /// If another rank is lost.
    pub fn train(&mut self, ctx: &Context, epoch: u32) -> Result<f32> {
        let mut data = [self.config.rate * epoch as f32];
        ctx.comm().all_reduce(&mut data, ReduceOp::Average)?;
        Ok(data[0])
    }

    /// All of it.
    pub async fn weights(&self) -> Vec<f32> {
        vec![self.config.rate]
    }

    /// Types may say `Self`.
    pub fn same(&self, other: Vec<<Self as Named>::Name>) -> Option<<Self as Named>::Name> {
        other.into_iter().next()
    }

    /// Stays here.
    #[kolo(skip)]
    pub fn on(&self, by: &str) -> usize {
        by.len()
    }

    /// Stays here too.
    #[kolo(skip)]
    pub fn consumed(self) -> Config {
        self.config
    }

    fn helper<T: Default>() -> T {
        T::default()
    }

    #[cfg(any())]
    fn absent(&self, not_there: NoSuchType) {}
}

/// Something with a type.
pub trait Named {
    /// The type.
    type Name;
}

impl Named for Trainer {
    type Name = String;
}

struct Plain;

#[kolo::executable]
impl Plain {
    async fn new() -> Plain {
        Plain
    }

    fn value(&self, object: u8, value: u8) -> u8 {
        object + value
    }

    // The handle needs a name for each argument, and no name twice.
    fn sum(&self, (a, b): (u8, u8), arg0: u8) -> u8 {
        a + b + arg0
    }
}

struct Generic<T>(T);

type GenericF32 = Generic<f32>;

#[kolo::executable]
impl GenericF32 {
    fn new(value: f32) -> GenericF32 {
        Generic(value)
    }

    fn get(&self) -> f32 {
        self.0
    }
}

fn handle_has_the_methods(handle: &TrainerHandle) {
    let _all: Call<All, f32> = handle.train(1);
    let one: TrainerHandle<One> = handle.on(Rank(0));
    let _one: Call<One, Vec<f32>> = one.weights();
    let some: TrainerHandle<Ranks> = one.on_ranks(&[Rank(1), Rank(0)]);
    let _some: Call<Ranks, Option<String>> = some.clone().same(vec!["a".to_owned()]);
    let _again: TrainerHandle<All> = some.on_all();
}

/// The shortest `main`.
#[kolo::main]
async fn main() {
    let _ = handle_has_the_methods;
    let context = Context::for_tests(
        kolo::collectives::local_group(1)
            .expect("a group")
            .remove(0),
    );
    let mut trainer = Trainer::new(
        &context,
        Config {
            rate: Trainer::RATE,
        },
    )
    .expect("a rate");
    assert!(trainer.train(&context, 2).is_ok());
    assert_eq!(trainer.on("abc") + Trainer::helper::<usize>(), 3);
    assert!((trainer.consumed().rate - 0.1).abs() < 1e-6);
    assert_eq!(Plain.value(1, 2) + Plain.sum((1, 2), 3), 9);
    assert!((GenericF32::new(1.5).get() - 1.5).abs() < 1e-6);
    assert_eq!(Trainer::NAME, concat!(module_path!(), "::Trainer"));
    let registry = kolo::registry::Registry::get().expect("no name twice");
    let class = registry.class(Trainer::NAME).expect("it is there");
    let methods: Vec<&str> = class
        .methods()
        .iter()
        .map(kolo::registry::MethodEntry::name)
        .collect();
    assert_eq!(methods, ["train", "weights", "same"]);
    assert_eq!(registry.classes().len(), 3);
}
