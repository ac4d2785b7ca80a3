use kolo::Executor;

fn plain() -> u32 {
    5
}

fn with_arguments(a: u32) -> u32 {
    a
}

#[kolo::function]
fn marked(a: u32) -> u32 {
    a
}

struct Plain;

impl Plain {
    fn new() -> Self {
        Plain
    }
}

async fn calls(executor: &Executor) -> kolo::Result<()> {
    executor.run(plain, ()).await?;
    executor.run(with_arguments, 5).await?;
    executor.run(marked::call, 5).await?;
    let offset = 5;
    executor.run(|| offset + 1, ()).await?;
    executor.run(|a: u32| a + offset, 5).await?;
    let _plain = executor.create::<Plain>(());
    Ok(())
}

fn main() {
    let _ = (calls, Plain::new);
}
