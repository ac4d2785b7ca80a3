//! What a worker runs of an executable.

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;

use super::Executable;
use crate::signature::{Returns, Role, cfgs, failed, private, worker_fn};

pub(super) fn make_entry(executable: &Executable) -> TokenStream {
    let ty = &executable.ty;
    let (context, this) = (private("context"), private("this"));

    let new = &executable.constructor.remote;
    let (decode, variables) = new.decode();
    let context_argument = new.takes_context.then(|| quote!(#context,));
    let new_name = &new.name;
    let invoked = new.awaited(&quote!(<#ty>::#new_name(#context_argument #(#variables),*)));
    let value = private("value");
    let boxed = quote!({
        let #value: #ty = #value;
        let #value: ::std::boxed::Box<dyn ::core::any::Any> = ::std::boxed::Box::new(#value);
        ::core::result::Result::Ok(#value)
    });
    let made = match &new.returns {
        Returns::Value(_) => quote!({
            let #value = #invoked;
            #boxed
        }),
        Returns::Result(_, at) => {
            let failed = failed(*at);
            quote!(match #invoked {
                ::core::result::Result::Ok(#value) => #boxed
                #failed
            })
        }
    };
    let body = quote!(#decode #made);
    let create_name = format_ident!("create");
    let (create, create_kind) = worker_fn(Role::Constructor, &create_name, new.is_async, &body);

    let mut functions = Vec::new();
    let mut entries = Vec::new();
    for (number, item) in executable.methods.iter().enumerate() {
        let remote = &item.remote;
        let cfgs = cfgs(&item.attributes);
        let (decode, variables) = remote.decode();
        let context_argument = remote.takes_context.then(|| quote!(#context,));
        let method = &remote.name;
        let invoked = quote!(<#ty>::#method(#this, #context_argument #(#variables),*));
        let answer = remote.answer(&invoked);
        let run = format_ident!("method{number}");
        let plain = method.unraw().to_string();
        let signature = remote.signature();
        let body = quote! {
            let #this = ::kolo::__private::downcast::<#ty>(#this)?;
            #decode
            #answer
        };
        let (function, kind) = worker_fn(Role::Method, &run, remote.is_async, &body);
        functions.push(quote! {
            #(#cfgs)*
            #[allow(unused_variables, clippy::all, clippy::pedantic)]
            #function
        });
        entries.push(quote! {
            #(#cfgs)*
            ::kolo::__private::MethodEntry::new(
                #plain,
                #signature,
                ::kolo::__private::MethodFn::#kind(#run),
            ),
        });
    }
    let signature = new.parameters();

    let elastic = (executable.is_elastic)
        .then(|| quote_spanned!(ty.span()=> .elastic(::kolo::__private::parts::<#ty>)));

    quote! {
        #[allow(unused_imports)]
        use ::kolo::__private::{
            BacktraceOfAny as _, BacktraceOfOurs as _, TextOfDisplay as _, TextOfError as _, TextOfNothing as _,
        };

        #[allow(unused_variables, clippy::all, clippy::pedantic)]
        #create

        #(#functions)*

        static METHODS: &[::kolo::__private::MethodEntry] = &[#(#entries)*];

        #[::kolo::__private::linkme::distributed_slice(::kolo::__private::CLASSES)]
        #[linkme(crate = ::kolo::__private::linkme)]
        static ENTRY: ::kolo::__private::ClassEntry = ::kolo::__private::ClassEntry::new(
            <#ty as ::kolo::Executable>::NAME,
            #signature,
            ::core::concat!(::core::file!(), ":", ::core::line!()),
            ::kolo::__private::CreateFn::#create_kind(create),
            METHODS,
        )#elastic;
    }
}
