use kolo::elastic::{Elastic, Parts};

struct Plain;

#[kolo::executable(elastic)]
impl Plain {
    fn new() -> Self {
        Plain
    }
}

struct Trainer;

impl Elastic for Trainer {
    fn parts(&mut self, _: &mut Parts<'_>) {}
}

#[kolo::executable(elastic)]
impl Trainer {
    fn new() -> Self {
        Trainer
    }

    fn commit(&mut self) {}

    fn recovered(&self) {}
}

struct Other;

#[kolo::executable(fast)]
impl Other {
    fn new() -> Self {
        Other
    }
}

fn main() {}
