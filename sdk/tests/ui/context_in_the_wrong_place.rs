use kolo::Context;

#[kolo::function]
fn last(_n: u8, _ctx: &Context) {}

#[kolo::function]
fn mutable(_ctx: &mut Context) {}

#[kolo::function]
fn owned(_ctx: Context) {}

fn main() {}
