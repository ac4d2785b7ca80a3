#[kolo::main]
fn main() {}
