use kolo::Context;

#[kolo::function]
fn text(_text: &str) {}

#[kolo::function]
fn nested(_all: Vec<&'static [f32]>, _more: &mut u8) {}

#[kolo::function]
fn gives(_n: u8) -> &'static str {
    ""
}

#[kolo::function]
fn renamed(_context: &Ctx) {}

type Ctx = Context;

fn main() {}
