//! The attribute macros of kolo: main, function and executable.
//!
//! They are re-exported and documented by the crate `kolo`, and everything that they expand to goes through it.

mod executable;
mod function;
mod main_fn;
mod signature;

use proc_macro::TokenStream;

/// `kolo::main`.
#[proc_macro_attribute]
pub fn main(attribute: TokenStream, item: TokenStream) -> TokenStream {
    main_fn::expand(attribute.into(), item.into()).into()
}

/// `kolo::function`.
#[proc_macro_attribute]
pub fn function(attribute: TokenStream, item: TokenStream) -> TokenStream {
    function::expand(attribute.into(), item.into()).into()
}

/// `kolo::executable`.
#[proc_macro_attribute]
pub fn executable(attribute: TokenStream, item: TokenStream) -> TokenStream {
    executable::expand(attribute.into(), item.into()).into()
}
