//! What the driver holds of an executable.

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Ident, ItemImpl, Type};

use super::Executable;
use crate::signature::{cfgs, docs};

pub(super) fn make_handle(block: &ItemImpl, executable: &Executable) -> TokenStream {
    let block_cfgs = cfgs(&block.attrs);
    let name = &executable.name;
    let handle = format_ident!("{}Handle", name.unraw());
    let doc = format!(
        "The driver's end of a [`{name}`] on every rank. A call runs on all ranks; see [`{handle}::on`] and [`{handle}::on_ranks`] for other choices. The values are dropped when the last handle is."
    );
    let methods = executable.methods.iter().map(|item| {
        let cfgs = cfgs(&item.attributes);
        let docs = docs(&item.attributes);
        let visibility = &item.visibility;
        let method = &item.remote.name;
        let plain = method.unraw().to_string();
        let output = item.remote.returns.value();
        let names: Vec<&Ident> = item.remote.arguments.iter().map(|a| &a.name).collect();
        let types: Vec<&Type> = item.remote.arguments.iter().map(|a| &a.ty).collect();
        let count = u8::try_from(names.len()).unwrap_or(u8::MAX);
        let codecs = types
            .iter()
            .map(|ty| quote_spanned!(ty.span()=> ::kolo::__private::argument::<#ty, _>()));
        quote! {
            #(#docs)*
            #(#cfgs)*
            #visibility fn #method(&self #(, #names: #types)*) -> ::kolo::Call<__S, #output> {
                self.object.call(
                    #plain,
                    ::kolo::__private::ArgumentWriter::new(#count)
                        #(.push(#codecs, &#names))*
                        .finish(),
                )
            }
        }
    });
    let elastic = executable.is_elastic.then(|| {
        quote! {
            /// Commits the value's state on all ranks, and gives the number of the commit: see [`kolo::Object::commit`].
            pub async fn commit(&self) -> ::core::result::Result<u64, ::kolo::CallError> {
                self.object.commit().await
            }

            /// Waits until the value is at its last commit on all ranks of a generation, and gives the number of that commit: see
            /// [`kolo::Object::recovered`].
            pub async fn recovered(&self) -> ::core::result::Result<u64, ::kolo::CallError> {
                self.object.recovered().await
            }
        }
    });
    quote! {
        #[doc = #doc]
        #(#block_cfgs)*
        #[allow(unreachable_pub, dead_code)]
        #[derive(::core::clone::Clone, ::core::fmt::Debug)]
        pub struct #handle<__S: ::kolo::Scope = ::kolo::All> {
            object: ::kolo::Object<__S>,
        }

        #(#block_cfgs)*
        #[automatically_derived]
        impl<__S: ::kolo::Scope> ::core::convert::From<::kolo::Object<__S>> for #handle<__S> {
            fn from(object: ::kolo::Object<__S>) -> Self {
                Self { object }
            }
        }

        #(#block_cfgs)*
        #[allow(
            unreachable_pub,
            dead_code,
            private_interfaces,
            missing_docs,
            clippy::all,
            clippy::pedantic
        )]
        impl<__S: ::kolo::Scope> #handle<__S> {
            /// The same executable, called on this rank alone: calls give one result.
            pub fn on(&self, rank: ::kolo::Rank) -> #handle<::kolo::One> {
                #handle { object: self.object.with_scope(::kolo::One(rank)) }
            }

            /// The same executable, called on these ranks: calls give their results in rank order.
            pub fn on_ranks(&self, ranks: &[::kolo::Rank]) -> #handle<::kolo::Ranks> {
                #handle { object: self.object.with_scope(::kolo::Ranks::from(ranks)) }
            }

            /// The same executable, called on all ranks: calls give all results, the index is the rank.
            pub fn on_all(&self) -> #handle<::kolo::All> {
                #handle { object: self.object.with_scope(::kolo::All) }
            }

            /// What the handle is made of, for calls of methods by name.
            pub fn object(&self) -> &::kolo::Object<__S> {
                &self.object
            }

            #elastic

            #(#methods)*
        }
    }
}
