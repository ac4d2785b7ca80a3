struct Generic<T>(T);

#[kolo::executable]
impl<T> Generic<T> {
    fn new() -> Self {
        todo!()
    }
}

#[kolo::executable]
impl Generic<f32> {
    fn new() -> Self {
        Generic(0.0)
    }
}

struct Plain;

#[kolo::executable]
impl Default for Plain {
    fn default() -> Self {
        Plain
    }
}

struct Marked;

#[kolo::executable]
impl Marked {
    fn new() -> Self {
        Marked
    }

    #[kolo(ignore)]
    fn other(&self) {}
}

#[kolo::executable]
struct NoBlock;

fn main() {}
