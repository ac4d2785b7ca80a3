//! Whether an `impl` block can be an executable, and what is in it.

use proc_macro2::{Group, TokenStream, TokenTree};
use quote::{ToTokens, format_ident};
use syn::ext::IdentExt;
use syn::{Error, FnArg, Ident, ImplItem, ImplItemFn, ItemImpl, ReturnType, Type};

use super::{Executable, Item};
use crate::signature::{Argument, Errors, Returns, check, check_type, returns};

/// What the handle has of its own.
const RESERVED: &[&str] = &["on", "on_ranks", "on_all", "object", "clone"];

/// The same of the handle of an elastic executable.
const ELASTIC: &[&str] = &["commit", "recovered"];

pub(super) fn check_block(
    block: &ItemImpl,
    skipped: &[bool],
    is_elastic: bool,
    mut errors: Errors,
) -> Result<Executable, Error> {
    if let Some((_, path, _)) = &block.trait_ {
        errors.add(
            path,
            "#[kolo::executable] goes on the type's own `impl`, not on that of a trait",
        );
    }
    if !block.generics.params.is_empty() || block.generics.where_clause.is_some() {
        errors.add(
            &block.generics,
            "an executable can't be generic: workers find it by its name, which stands for one type; write the types out, for instance `type TrainerF32 = Trainer<f32>;` and `impl TrainerF32`",
        );
    }
    let name = match &*block.self_ty {
        Type::Path(path) if path.qself.is_none() => path
            .path
            .segments
            .last()
            .filter(|last| last.arguments.is_none())
            .map(|last| last.ident.clone()),
        _ => None,
    };
    if name.is_none() {
        errors.add(
            &block.self_ty,
            "an executable needs a plain name, which its handle gets too; make an alias, for instance `type TrainerF32 = Trainer<f32>;`, and write `impl TrainerF32`",
        );
    }
    let name = name.unwrap_or_else(|| format_ident!("Executable"));

    let mut constructor = None;
    let mut methods = Vec::new();
    for (item, skip) in block.items.iter().zip(skipped) {
        let ImplItem::Fn(item) = item else { continue };
        let is_new = item.sig.ident == "new";
        if *skip {
            if is_new {
                errors.add(
                    &item.sig.ident,
                    "`new` makes the executable on the workers, so it can't be skipped",
                );
                // There is one, so that it is missing is not said too.
                constructor.get_or_insert_with(|| {
                    item_of(item, &block.self_ty, "`new`", &mut Errors::default())
                });
            }
            continue;
        }
        let receiver = item.sig.inputs.first().and_then(|first| match first {
            FnArg::Receiver(receiver) => Some(receiver),
            FnArg::Typed(_) => None,
        });
        match receiver {
            None if is_new => {
                let checked = item_of(item, &block.self_ty, "`new`", &mut errors);
                check_new(item, &name, &mut errors);
                constructor = Some(checked);
            }
            None => {}
            Some(receiver) if is_new => {
                errors.add(
                    receiver,
                    "`new` makes the executable, so it has no `self`: write `fn new(ctx: &Context, ..) -> Self`",
                );
                constructor.get_or_insert_with(|| {
                    item_of(item, &block.self_ty, "`new`", &mut Errors::default())
                });
            }
            Some(receiver) => {
                if receiver.reference.is_none() || receiver.colon_token.is_some() {
                    errors.add(
                        receiver,
                        "a remote method takes `&self` or `&mut self`: the value stays on its worker for later calls; mark a method that is only used there with `#[kolo(skip)]`",
                    );
                }
                let plain = item.sig.ident.unraw().to_string();
                let plain_str = plain.as_str();
                if RESERVED.contains(&plain_str) || (is_elastic && ELASTIC.contains(&plain_str)) {
                    errors.add(
                        &item.sig.ident,
                        format!(
                            "`{name}Handle` has a method `{plain}` of its own; give this one another name, or mark it with `#[kolo(skip)]`"
                        ),
                    );
                }
                let method = item_of(item, &block.self_ty, "a remote method", &mut errors);
                check_type(
                    "the result of a remote method",
                    method.remote.returns.value(),
                    &mut errors,
                );
                methods.push(method);
            }
        }
    }
    let Some(constructor) = constructor else {
        errors.add(
            &block.self_ty,
            format!(
                "the executable `{name}` has no `new`; add `fn new(ctx: &Context, ..) -> Self` (or `-> Result<Self>`), which makes it on every worker"
            ),
        );
        return errors.into_result(()).and(Err(Error::new_spanned(
            &block.self_ty,
            "the executable has no `new`",
        )));
    };
    errors.into_result(Executable {
        ty: (*block.self_ty).clone(),
        name,
        constructor,
        methods,
        is_elastic,
    })
}

/// Checks a function. In its types `Self` is replaced, as they are used outside of the block.
fn item_of(item: &ImplItemFn, ty: &Type, what: &str, errors: &mut Errors) -> Item {
    let mut remote = check(what, &item.sig, errors);
    for Argument { ty: argument, .. } in &mut remote.arguments {
        *argument = without_self(argument, ty);
    }
    remote.returns = match remote.returns {
        Returns::Value(value) => Returns::Value(without_self(&value, ty)),
        Returns::Result(value, at) => Returns::Result(without_self(&value, ty), at),
    };
    Item {
        remote,
        visibility: item.vis.clone(),
        attributes: item.attrs.clone(),
    }
}

fn without_self(ty: &Type, own: &Type) -> Type {
    fn replace(tokens: TokenStream, own: &TokenStream, found: &mut bool) -> TokenStream {
        tokens
            .into_iter()
            .flat_map(|token| match token {
                TokenTree::Ident(ident) if ident == "Self" => {
                    *found = true;
                    own.clone()
                }
                TokenTree::Group(group) => {
                    let inside = replace(group.stream(), own, found);
                    let mut replaced = Group::new(group.delimiter(), inside);
                    replaced.set_span(group.span());
                    TokenTree::Group(replaced).into()
                }
                other => other.into(),
            })
            .collect()
    }
    let mut found = false;
    let replaced = replace(ty.to_token_stream(), &own.to_token_stream(), &mut found);
    if found {
        Type::Verbatim(replaced)
    } else {
        ty.clone()
    }
}

/// `new` returns `Self`, the type by its name, or a `Result` of these.
fn check_new(item: &ImplItemFn, name: &Ident, errors: &mut Errors) {
    let is_own = |ty: &Type| {
        matches!(ty, Type::Path(path) if path.path.segments.last().is_some_and(|last| {
            last.arguments.is_none() && (last.ident == "Self" || last.ident == *name)
        }))
    };
    if is_own(returns(&item.sig.output).value()) {
        return;
    }
    let message = format!("`new` makes a `{name}`: it returns `Self` or `Result<Self>`");
    match &item.sig.output {
        ReturnType::Default => errors.add(&item.sig.ident, message),
        ReturnType::Type(_, ty) => errors.add(ty, message),
    }
}
