use kolo::Context;

struct Trainer;

#[kolo::executable]
impl Trainer {
    fn new() -> Self {
        Trainer
    }

    fn finish(self) -> u8 {
        5
    }

    fn boxed(self: Box<Self>) -> u8 {
        5
    }

    fn generic<T>(&self, _value: T) {}

    fn late(&self, _value: u8, _ctx: &Context) {}

    fn text(&self) -> &str {
        ""
    }
}

fn main() {}
