//! The attribute macros. Their documentation is here and not beside their code, as its examples need this crate.

/// Makes `async fn main` the start of a program that kolo runs: as the driver, and as every worker.
///
/// The body runs in the driver alone, on a multi-threaded tokio runtime. A worker is the same program started
/// again; it takes calls instead, and never gets to the body. So put into `main` what the driver does, and
/// nothing in front of it that a worker must not do. The return type is kept.
///
/// ```no_run
/// #[kolo::main]
/// async fn main() -> std::io::Result<()> {
///     println!("the driver, and only the driver");
///     Ok(())
/// }
/// ```
///
/// `#[kolo::main(init = function)]` calls a function first, in the driver and in each worker: to set a subscriber of `tracing`,
/// say. Without that, events of `tracing` and records of `log` in workers go to standard error, and so to the driver's
/// screen: from level `info` on, or as `RUST_LOG` says. The driver's own subscriber is always the program's to set.
///
/// ```no_run
/// fn logging() {
///     // tracing_subscriber::fmt().json().with_writer(std::io::stderr).init();
/// }
///
/// #[kolo::main(init = logging)]
/// async fn main() {}
/// ```
pub use kolo_macros::main;

/// Makes a function one that workers can run.
///
/// ```
/// use kolo::Context;
///
/// /// Who is there?
/// #[kolo::function]
/// fn whoami(ctx: &Context, greeting: String) -> String {
///     format!("{greeting}, I am rank {} of {}", ctx.rank(), ctx.world_size())
/// }
/// ```
///
/// - The first argument may be `&Context`; all others and the result are values that serde can encode and
///   decode. With `-> Result<T, E>` the result is a `T`, and an `E`, which needs `Display`, fails the call.
/// - `async fn` works too. It is awaited on the worker's main thread, so it need not be `Send`; it is dropped
///   at an await point when the call is cancelled or its deadline passes. Tasks that it spawns with `tokio::spawn` go
///   on only while async code of this worker runs.
/// - The name is what `executor.run(whoami, args)` takes. The function itself is `whoami::call(..)`, for tests and
///   other uses on the spot.
/// - It is registered as `module::path::whoami`. Two functions can't have one path.
/// - A panic fails the call, and the worker lives on.
pub use kolo_macros::function;

/// Makes a type one of which every rank can hold a value, made and called from the driver.
///
/// ```
/// use kolo::Context;
///
/// struct Counter {
///     count: u64,
/// }
///
/// #[kolo::executable]
/// impl Counter {
///     fn new(ctx: &Context, first: u64) -> Self {
///         Self { count: first + ctx.rank() as u64 }
///     }
///
///     fn add(&mut self, more: u64) -> Result<u64, String> {
///         self.count = self.count.checked_add(more).ok_or("the count is full")?;
///         Ok(self.count)
///     }
///
///     async fn get(&self) -> u64 {
///         self.count
///     }
///
///     #[kolo(skip)]
///     fn only_here(&self) -> &u64 {
///         &self.count
///     }
/// }
/// ```
///
/// - `new` makes the value: its first argument may be `&Context`, the others are what the driver passes; it
///   returns `Self` or `Result<Self, E>`.
/// - Methods with `&self` or `&mut self` can be called from the driver. Arguments and results are as for
///   [`function`](macro@function); the `&Context` comes right after `self`. Calls of one executable run one at a time, in the
///   order in which they were made.
/// - Functions without `self` other than `new`, and what is marked `#[kolo(skip)]`, stay local.
/// - The driver gets a `CounterHandle`, which has the methods with their visibility: `handle.add(1)` calls all ranks,
///   `handle.on(rank).add(1)` one, `handle.on_ranks(&ranks).add(1)` some. It is `pub`, as far as its module is. It
///   has `on`, `on_ranks`, `on_all`, `object` and `clone` itself, so methods can't have these names.
/// - The values live as long as there is a handle, and as long as the group: handles do not keep the
///   [`Executor`](crate::Executor) running.
/// - The `impl` block itself stays as it is, so the type can be used and tested without kolo.
/// - A panic in a method poisons the value: calls fail until it is created again.
///
/// # In an elastic group
///
/// `#[kolo::executable(elastic)]` is for a type that implements [`Elastic`](crate::elastic::Elastic). Its values outlive changes of an
/// elastic group: ranks that stay go back to the last commit, and processes that join make the value with the same arguments and get
/// the state. The handle has two functions more, `commit` and `recovered`: see [`Object::commit`](crate::Object::commit) and
/// [`Object::recovered`](crate::Object::recovered).
///
/// ```no_run
/// use kolo::prelude::*;
///
/// struct Trainer {
///     weights: Vec<f32>,
/// }
///
/// impl Elastic for Trainer {
///     fn parts(&mut self, parts: &mut Parts<'_>) {
///         parts.buffer("weights", &mut self.weights);
///     }
/// }
///
/// #[kolo::executable(elastic)]
/// impl Trainer {
///     fn new(length: usize) -> Self {
///         Self { weights: vec![0.0; length] }
///     }
///
///     fn train(&mut self, ctx: &Context, epoch: u64) -> Result<f32> {
///         let mut step = vec![1.0 / (epoch + 1) as f32; self.weights.len()];
///         ctx.comm().all_reduce(&mut step, ReduceOp::Average)?;
///         self.weights.iter_mut().zip(&step).for_each(|(weight, step)| *weight += step);
///         Ok(step[0])
///     }
/// }
///
/// # async fn example() -> kolo::Result<()> {
/// let cluster = Cluster::connect_or_local().await?;
/// let executor = Executor::builder().workers(2..=8).start(&cluster).await?;
/// let trainer = executor.create::<Trainer>(1000).await?;
/// let mut epoch = 0;
/// while epoch < 20 {
///     let step = async {
///         trainer.train(epoch).await?;
///         trainer.commit().await
///     };
///     match step.await {
///         // There is one commit for each epoch.
///         Ok(commit) => epoch = commit,
///         // All ranks are back at this commit.
///         Err(error) if error.is_retryable() => epoch = trainer.recovered().await?,
///         Err(error) => return Err(error.into()),
///     }
/// }
/// # Ok(()) }
/// ```
pub use kolo_macros::executable;
