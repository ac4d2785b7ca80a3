struct Trainer;

#[kolo::executable]
impl Trainer {
    fn new() -> Self {
        Trainer
    }

    fn on(&mut self) {}

    fn on_ranks(&self) -> u8 {
        5
    }

    fn clone(&self) -> u8 {
        5
    }
}

fn main() {}
