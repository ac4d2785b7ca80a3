//! `#[kolo::function]`

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::ext::IdentExt;
use syn::{Error, FnArg, ItemFn, parse2};

use crate::signature::{Errors, Remote, Role, cfgs, check, check_type, docs, private, worker_fn};

pub(crate) fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let Ok(function) = parse2::<ItemFn>(item.clone()) else {
        return Error::new_spanned(
            item,
            "#[kolo::function] goes on a function with a body; for a type with methods use #[kolo::executable] on its `impl`",
        )
        .to_compile_error();
    };
    match checked(&attribute, &function) {
        Ok(remote) => rewrite(&function, &remote),
        Err(error) => error.to_compile_error(),
    }
}

fn checked(attribute: &TokenStream, function: &ItemFn) -> Result<Remote, Error> {
    let mut errors = Errors::default();
    if !attribute.is_empty() {
        errors.add(attribute, "#[kolo::function] takes no options");
    }
    for input in &function.sig.inputs {
        if let FnArg::Receiver(receiver) = input {
            errors.add(
                receiver,
                "a remote function has no `self`; put #[kolo::executable] on the whole `impl` block instead",
            );
        }
    }
    let remote = check("a remote function", &function.sig, &mut errors);
    check_type(
        "the result of a remote function",
        remote.returns.value(),
        &mut errors,
    );
    errors.into_result(remote)
}

fn rewrite(function: &ItemFn, remote: &Remote) -> TokenStream {
    let ItemFn {
        attrs,
        vis,
        sig,
        block,
    } = function;
    let name = &remote.name;
    let plain_name = name.unraw().to_string();
    let cfgs = cfgs(attrs);
    let docs = docs(attrs);

    // The function itself, under the name `call`.
    let mut call = sig.clone();
    call.ident = syn::Ident::new("call", name.span());

    let context = private("context");
    let (decode, variables) = remote.decode();
    let context_argument = remote.takes_context.then(|| quote!(#context,));
    let invoked = quote!(#name::call(#context_argument #(#variables),*));
    let answer = remote.answer(&invoked);
    let body = quote!(#decode #answer);
    let run_name = format_ident!("run");
    let (run, kind) = worker_fn(Role::Function, &run_name, remote.is_async, &body);
    let argument_tuple = remote.argument_tuple();
    let output = remote.returns.value();
    let signature = remote.signature();

    quote! {
        #(#docs)*
        #(#cfgs)*
        #[allow(non_camel_case_types, dead_code)]
        #[derive(::core::clone::Clone, ::core::marker::Copy, ::core::fmt::Debug)]
        #vis struct #name {}

        // As a value the name is a function and not a unit struct: a `let` may use the same name then.
        #(#cfgs)*
        #[allow(missing_docs, dead_code)]
        #vis fn #name() -> #name {
            #name {}
        }

        #(#cfgs)*
        impl #name {
            #(#attrs)*
            #vis #call #block
        }

        #(#cfgs)*
        impl ::kolo::Function for #name {
            type Args = #argument_tuple;
            type Output = #output;
            const NAME: &'static str =
                ::core::concat!(::core::module_path!(), "::", #plain_name);
        }

        #(#cfgs)*
        const _: () = {
            #[allow(unused_imports)]
            use ::kolo::__private::{
                BacktraceOfAny as _, BacktraceOfOurs as _, TextOfDisplay as _, TextOfError as _, TextOfNothing as _,
            };

            #[allow(unused_variables, clippy::all, clippy::pedantic)]
            #run

            #[::kolo::__private::linkme::distributed_slice(::kolo::__private::FUNCTIONS)]
            #[linkme(crate = ::kolo::__private::linkme)]
            static ENTRY: ::kolo::__private::FunctionEntry = ::kolo::__private::FunctionEntry::new(
                <#name as ::kolo::Function>::NAME,
                #signature,
                ::core::concat!(::core::file!(), ":", ::core::line!()),
                ::kolo::__private::FunctionFn::#kind(run),
            );
        };
    }
}
