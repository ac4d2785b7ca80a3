//! `#[kolo::executable]`

mod check;
mod entry;
mod handle;

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::ext::IdentExt;
use syn::{Attribute, Error, Ident, ImplItem, ItemImpl, Type, Visibility, parse2};

use crate::signature::{Errors, Remote, cfgs};

/// A constructor or method that the driver can call.
pub(crate) struct Item {
    pub(crate) remote: Remote,
    pub(crate) visibility: Visibility,
    pub(crate) attributes: Vec<Attribute>,
}

pub(crate) struct Executable {
    /// The type.
    pub(crate) ty: Type,
    /// Its name.
    pub(crate) name: Ident,
    pub(crate) constructor: Item,
    pub(crate) methods: Vec<Item>,
    /// Its values outlive changes of an elastic group.
    pub(crate) is_elastic: bool,
}

pub(crate) fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let Ok(mut block) = parse2::<ItemImpl>(item.clone()) else {
        return Error::new_spanned(
            item,
            "#[kolo::executable] goes on `impl Type { .. }`; for a single function use #[kolo::function]",
        )
        .to_compile_error();
    };
    let mut errors = Errors::default();
    let is_elastic = attribute.to_string() == "elastic";
    if !attribute.is_empty() && !is_elastic {
        errors.add(
            attribute,
            "the only option is `#[kolo::executable(elastic)]`, for a type that implements `kolo::elastic::Elastic`",
        );
    }
    let skipped = take_marks(&mut block, &mut errors);
    let checked = check::check_block(&block, &skipped, is_elastic, errors);
    let made = match checked {
        Ok(executable) => make(&block, &executable),
        Err(error) => error.to_compile_error(),
    };
    // With or without errors the type keeps its methods, so that their other uses are no errors too.
    quote! {
        #block
        #made
    }
}

/// Removes `#[kolo(..)]` from the items, and says for each whether it is skipped.
fn take_marks(block: &mut ItemImpl, errors: &mut Errors) -> Vec<bool> {
    let mut skipped = Vec::with_capacity(block.items.len());
    for item in &mut block.items {
        let attributes = match item {
            ImplItem::Fn(item) => &mut item.attrs,
            ImplItem::Const(item) => &mut item.attrs,
            ImplItem::Type(item) => &mut item.attrs,
            _ => {
                skipped.push(true);
                continue;
            }
        };
        let mut skip = false;
        attributes.retain(|attribute| {
            if !attribute.path().is_ident("kolo") {
                return true;
            }
            let parsed = attribute.parse_nested_meta(|meta| {
                if meta.path.is_ident("skip") {
                    skip = true;
                    Ok(())
                } else {
                    Err(meta
                        .error("the only mark is `#[kolo(skip)]`, which keeps a function local"))
                }
            });
            if let Err(error) = parsed {
                errors.push(error);
            }
            false
        });
        skipped.push(skip);
    }
    skipped
}

fn make(block: &ItemImpl, executable: &Executable) -> TokenStream {
    let cfgs = cfgs(&block.attrs);
    let handle = handle::make_handle(block, executable);
    let entry = entry::make_entry(executable);
    let ty = &executable.ty;
    let handle_name = format_ident!("{}Handle", executable.name.unraw());
    let arguments = executable.constructor.remote.argument_tuple();
    let plain_name = executable.name.unraw().to_string();
    let is_elastic = executable.is_elastic;
    quote! {
        #(#cfgs)*
        impl ::kolo::Executable for #ty {
            type Args = #arguments;
            type Handle<__S: ::kolo::Scope> = #handle_name<__S>;
            const NAME: &'static str =
                ::core::concat!(::core::module_path!(), "::", #plain_name);
            const ELASTIC: bool = #is_elastic;
        }

        #handle

        #(#cfgs)*
        const _: () = {
            #entry
        };
    }
}
