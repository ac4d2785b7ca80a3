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
pub use kolo_macros::executable;
