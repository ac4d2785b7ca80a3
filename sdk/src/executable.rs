//! Types whose values live on workers.

use crate::{Object, Scope};

/// A type of which every rank can hold a value, made and called from the driver. Made by
/// [`#[kolo::executable]`](macro@crate::executable) on the type's `impl` block.
#[diagnostic::on_unimplemented(
    message = "workers can't make a `{Self}`: it is not marked with `#[kolo::executable]`",
    label = "not an executable",
    note = "write `#[kolo::executable]` above the `impl` block that has its `new`"
)]
pub trait Executable: Sized + 'static {
    /// The arguments of `new` as a tuple, without the [`Context`](crate::Context). The macro checks that they
    /// serialize; what encodes them says `T::Args: ArgumentTuple`.
    type Args;
    /// What the driver holds: it has the type's methods, on all ranks or on the chosen ones.
    type Handle<S: Scope>: From<Object<S>>;
    /// Its registered name: the path of its module, `::` and its own name.
    const NAME: &'static str;
    /// Whether it says with [`Elastic`](crate::elastic::Elastic) what its state is, so that its values outlive changes of an elastic group:
    /// `#[kolo::executable(elastic)]`.
    const ELASTIC: bool = false;
}
