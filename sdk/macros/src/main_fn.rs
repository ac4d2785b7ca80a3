//! `#[kolo::main]`

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, Ident, ItemFn, Result, Token, parse2};

pub(crate) fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let Ok(function) = parse2::<ItemFn>(item.clone()) else {
        return Error::new_spanned(
            item,
            "#[kolo::main] goes on `async fn main() { .. }`, and on nothing else",
        )
        .to_compile_error();
    };
    match check(attribute, &function) {
        Ok(options) => rewrite(&options, &function),
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

/// The function that `init = ..` names, if it is given.
struct Options {
    init: Option<Expr>,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let name: Ident = input.parse()?;
        if name != "init" {
            return Err(Error::new_spanned(
                name,
                "the only option of #[kolo::main] is `init = function`; a program that needs its own runtime calls `kolo::worker::run_if_worker()` first in a plain `fn main`",
            ));
        }
        input.parse::<Token![=]>()?;
        let init = Some(input.parse()?);
        input.parse::<Option<Token![,]>>()?;
        Ok(Self { init })
    }
}

fn check(attribute: TokenStream, function: &ItemFn) -> Result<Options> {
    let signature = &function.sig;
    let options = if attribute.is_empty() {
        Options { init: None }
    } else {
        parse2(attribute)?
    };
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
    Ok(options)
}

fn rewrite(options: &Options, function: &ItemFn) -> TokenStream {
    let ItemFn {
        attrs,
        vis,
        sig,
        block,
    } = function;
    let output = &sig.output;
    let main = &sig.ident;
    let start = if let Some(init) = &options.init {
        quote!(::kolo::rt::main_with_init(#init, main))
    } else {
        quote!(::kolo::rt::main(main))
    };
    // With the types written down, a wrong last expression is an error at that expression.
    let body = match output {
        syn::ReturnType::Default => quote!({
            let main = async move #block;
            let () = #start;
        }),
        syn::ReturnType::Type(..) => quote!({
            async fn main() #output #block
            let main = main();
            #start
        }),
    };
    quote! {
        #(#attrs)*
        #vis fn #main() #output #body
    }
}
