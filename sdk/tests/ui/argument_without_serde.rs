use kolo::Context;

struct Model;

#[kolo::function]
fn train(_ctx: &Context, epoch: u32, model: Model) -> f32 {
    drop(model);
    epoch as f32
}

fn main() {}
