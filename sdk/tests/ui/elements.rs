use kolo::{Context, Rank, ReduceOp};

#[kolo::function]
fn of_strings(ctx: &Context) -> kolo::Result<()> {
    let mut names = ["a".to_owned()];
    ctx.comm().all_reduce(&mut names, ReduceOp::Sum)?;
    Ok(())
}

#[kolo::function]
fn of_a_list_of_strings(ctx: &Context) -> kolo::Result<()> {
    let mut names = vec!["a".to_owned()];
    ctx.comm().broadcast(&mut names, Rank(0))?;
    Ok(())
}

#[kolo::function]
fn of_a_string(ctx: &Context) -> kolo::Result<()> {
    let mut name = "a".to_owned();
    ctx.comm().broadcast(&mut name, Rank(0))?;
    Ok(())
}

#[kolo::function]
fn of_another_container(ctx: &Context) -> kolo::Result<()> {
    let mut losses = std::mem::ManuallyDrop::new([0.5_f32]);
    ctx.comm().all_reduce(&mut losses, ReduceOp::Sum)?;
    ctx.comm().all_reduce(&mut losses[..], ReduceOp::Sum)?;
    Ok(())
}

fn main() {}
