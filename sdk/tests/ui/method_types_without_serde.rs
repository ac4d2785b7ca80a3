struct Model;

struct Trainer;

#[kolo::executable]
impl Trainer {
    fn new(_model: Model) -> Self {
        Trainer
    }

    fn merge(&mut self, other: Trainer) {
        drop(other);
    }

    fn model(&self) -> Model {
        Model
    }
}

fn main() {}
