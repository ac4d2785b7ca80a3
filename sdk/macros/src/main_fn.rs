//! `#[kolo::main]`

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Error, ItemFn, Result, parse2};

pub(crate) fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let Ok(function) = parse2::<ItemFn>(item.clone()) else {
        return Error::new_spanned(
            item,
            "#[kolo::main] goes on `async fn main() { .. }`, and on nothing else",
        )
        .to_compile_error();
    };
    match check(&attribute, &function) {
        Ok(()) => rewrite(&function),
        Err(error) => {
            // A `main` that can't be used would be a second error.
            let error = error.to_compile_error();
            quote! {
                #error
                fn main() {}
            }
        }
    }
}

fn check(attribute: &TokenStream, function: &ItemFn) -> Result<()> {
    let signature = &function.sig;
    if !attribute.is_empty() {
        return Err(Error::new_spanned(
            attribute,
            "#[kolo::main] takes no options; a program that needs its own runtime calls `kolo::worker::run_if_worker()` first in a plain `fn main`",
        ));
    }
    if signature.ident != "main" {
        return Err(Error::new_spanned(
            &signature.ident,
            "#[kolo::main] goes on the function `main`; for a function that workers run use #[kolo::function]",
        ));
    }
    if signature.asyncness.is_none() {
        return Err(Error::new_spanned(
            signature.fn_token,
            "#[kolo::main] wants an `async fn main`; write `async fn main()`",
        ));
    }
    if !signature.inputs.is_empty() {
        return Err(Error::new_spanned(
            &signature.inputs,
            "`main` takes no arguments; read the command line with `std::env::args()`",
        ));
    }
    if !signature.generics.params.is_empty() || signature.generics.where_clause.is_some() {
        return Err(Error::new_spanned(
            &signature.generics,
            "`main` can't be generic",
        ));
    }
    Ok(())
}

fn rewrite(function: &ItemFn) -> TokenStream {
    let ItemFn {
        attrs,
        vis,
        sig,
        block,
    } = function;
    let output = &sig.output;
    let main = &sig.ident;
    // With the types written down, a wrong last expression is an error at that expression.
    let body = match output {
        syn::ReturnType::Default => quote!({
            let main = async move #block;
            let () = ::kolo::rt::main(main);
        }),
        syn::ReturnType::Type(..) => quote!({
            async fn main() #output #block
            ::kolo::rt::main(main())
        }),
    };
    quote! {
        #(#attrs)*
        #vis fn #main() #output #body
    }
}
