use kolo::{Context, ReduceOp};

#[kolo::function]
fn of_strings(ctx: &Context) -> kolo::Result<()> {
    let mut names = ["a".to_owned()];
    ctx.comm().all_reduce(&mut names, ReduceOp::Sum)?;
    Ok(())
}

#[kolo::function]
fn of_a_scalar(ctx: &Context) -> kolo::Result<()> {
    let mut loss = 0.5_f32;
    ctx.comm().all_reduce(&mut loss, ReduceOp::Sum)?;
    Ok(())
}

fn main() {}
