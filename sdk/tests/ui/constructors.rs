struct Missing;

#[kolo::executable]
impl Missing {
    fn get(&self) -> u8 {
        5
    }
}

struct Other;

#[kolo::executable]
impl Other {
    fn new() -> u8 {
        5
    }
}

struct Nothing;

#[kolo::executable]
impl Nothing {
    fn new() {}
}

struct Optional;

#[kolo::executable]
impl Optional {
    fn new() -> Option<Self> {
        None
    }
}

struct Receives;

#[kolo::executable]
impl Receives {
    fn new(&self) -> Self {
        Receives
    }
}

struct Skipped;

#[kolo::executable]
impl Skipped {
    #[kolo(skip)]
    fn new() -> Self {
        Skipped
    }
}

fn main() {}
