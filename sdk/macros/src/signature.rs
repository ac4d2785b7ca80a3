//! What functions, methods and constructors have in common: their arguments and what they return.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{
    Attribute, Error, FnArg, GenericArgument, Ident, Pat, PathArguments, ReturnType, Signature,
    Type, TypeImplTrait, TypeInfer, TypeReference,
};

/// The most arguments: serde has tuples up to here.
const MAX_ARGUMENTS: usize = 16;

/// An argument that comes from the driver.
pub(crate) struct Argument {
    /// Its name, or a made one if it is a pattern.
    pub(crate) name: Ident,
    pub(crate) ty: Type,
}

/// What a function returns.
pub(crate) enum Returns {
    /// A value of this type.
    Value(Type),
    /// A `Result` with a value of this type, and where its error's type is written.
    Result(Type, Span),
}

impl Returns {
    /// The type of the value.
    pub(crate) fn value(&self) -> &Type {
        match self {
            Self::Value(ty) | Self::Result(ty, _) => ty,
        }
    }
}

/// A checked signature.
pub(crate) struct Remote {
    pub(crate) name: Ident,
    pub(crate) is_async: bool,
    pub(crate) takes_context: bool,
    pub(crate) arguments: Vec<Argument>,
    pub(crate) returns: Returns,
}

/// Collects errors, so that all are shown at once.
#[derive(Default)]
pub(crate) struct Errors(Option<Error>);

impl Errors {
    pub(crate) fn add(&mut self, at: impl ToTokens, message: impl std::fmt::Display) {
        self.push(Error::new_spanned(at, message));
    }

    pub(crate) fn push(&mut self, error: Error) {
        match &mut self.0 {
            Some(errors) => errors.combine(error),
            None => self.0 = Some(error),
        }
    }

    pub(crate) fn into_result<T>(self, value: T) -> Result<T, Error> {
        match self.0 {
            Some(error) => Err(error),
            None => Ok(value),
        }
    }
}

/// Checks a signature. `what` names the kind of function in messages. The receiver, if there is one, is not
/// looked at.
pub(crate) fn check(what: &str, signature: &Signature, errors: &mut Errors) -> Remote {
    if !signature.generics.params.is_empty() || signature.generics.where_clause.is_some() {
        errors.add(
            &signature.generics,
            format!(
                "{what} can't be generic: it is found by its name, which stands for one type of each argument; write the types out"
            ),
        );
    }
    for (token, given) in [
        (
            signature.unsafety.map(ToTokens::into_token_stream),
            "unsafe",
        ),
        (
            signature.abi.as_ref().map(ToTokens::to_token_stream),
            "extern",
        ),
        (
            signature.constness.map(ToTokens::into_token_stream),
            "const",
        ),
    ] {
        if let Some(token) = token {
            errors.add(
                token,
                format!(
                    "{what} can't be `{given}`; remove it, or call such a function from a plain one"
                ),
            );
        }
    }
    if let Some(variadic) = &signature.variadic {
        errors.add(
            variadic,
            format!("{what} can't have a variable number of arguments"),
        );
    }

    let mut takes_context = false;
    let mut arguments = Vec::new();
    let mut first = true;
    for input in &signature.inputs {
        let FnArg::Typed(input) = input else { continue };
        for attribute in &input.attrs {
            if attribute.path().is_ident("cfg") || attribute.path().is_ident("cfg_attr") {
                errors.add(
                    attribute,
                    format!(
                        "arguments of {what} can't be conditional: all workers need the same ones"
                    ),
                );
            }
        }
        let kind = context_kind(&input.ty);
        match kind {
            ContextKind::Shared if first => takes_context = true,
            ContextKind::Shared => errors.add(
                &input.ty,
                "the context comes first: move this argument to the front (after `self`)",
            ),
            ContextKind::Mutable => {
                errors.add(&input.ty, "the context is shared: write `&Context`");
            }
            ContextKind::Owned => errors.add(
                &input.ty,
                "the context is lent for the call: write `&Context` (and `.clone()` it to keep it)",
            ),
            ContextKind::No => {
                check_type(&format!("an argument of {what}"), &input.ty, errors);
                let name = match &*input.pat {
                    Pat::Ident(pattern) => pattern.ident.clone(),
                    _ => free_name(signature, &arguments),
                };
                arguments.push(Argument {
                    name,
                    ty: (*input.ty).clone(),
                });
            }
        }
        first = false;
    }
    if arguments.len() > MAX_ARGUMENTS {
        errors.add(
            &signature.inputs,
            format!(
                "{what} takes at most {MAX_ARGUMENTS} arguments, but here are {}; put some into a struct",
                arguments.len()
            ),
        );
    }
    Remote {
        name: signature.ident.clone(),
        is_async: signature.asyncness.is_some(),
        takes_context,
        arguments,
        returns: returns(&signature.output),
    }
}

/// A name for an argument that is a pattern, which no other argument has.
fn free_name(signature: &Signature, before: &[Argument]) -> Ident {
    let given = |name: &Ident| {
        signature.inputs.iter().any(|input| {
            matches!(input, FnArg::Typed(input)
                if matches!(&*input.pat, Pat::Ident(pattern) if pattern.ident == *name))
        })
    };
    let first = before.len();
    (first..=first + 2 * signature.inputs.len())
        .map(|number| format_ident!("arg{number}"))
        .find(|name| !given(name) && before.iter().all(|argument| argument.name != *name))
        .expect("each argument takes one number, and one that was given another")
}

/// Checks a type that a value has which travels. `what` names the value in messages.
pub(crate) fn check_type(what: &str, ty: &Type, errors: &mut Errors) {
    struct Find<'a> {
        what: &'a str,
        errors: &'a mut Errors,
    }

    impl<'ast> Visit<'ast> for Find<'_> {
        fn visit_type_reference(&mut self, node: &'ast TypeReference) {
            let owned = match &*node.elem {
                Type::Path(path) if path.path.is_ident("str") => "String".to_owned(),
                Type::Slice(slice) => format!("Vec<{}>", text(&slice.elem)),
                other => text(other),
            };
            // A context under another name, which macros can't see through.
            let hint = match &*node.elem {
                Type::Path(path) if self.what.starts_with("an argument") && is_type_name(path) => {
                    "; if this is the context, call it `Context` and put it first"
                }
                _ => "",
            };
            self.errors.add(
                node,
                format!(
                    "{} can't be a reference: it travels between processes; write `{owned}`{hint}",
                    self.what
                ),
            );
        }

        fn visit_type_impl_trait(&mut self, node: &'ast TypeImplTrait) {
            let hint = if text(node).starts_with("impl Future") {
                "write `async fn`"
            } else {
                "write the type out"
            };
            self.errors.add(
                node,
                format!(
                    "{} can't be `impl Trait`: the other process must know its type; {hint}",
                    self.what
                ),
            );
        }

        fn visit_type_infer(&mut self, node: &'ast TypeInfer) {
            self.errors
                .add(node, format!("write out the type of {}", self.what));
        }
    }

    Find { what, errors }.visit_type(ty);
}

enum ContextKind {
    Shared,
    Mutable,
    Owned,
    No,
}

fn context_kind(ty: &Type) -> ContextKind {
    match ty {
        Type::Reference(reference) if is_context(&reference.elem) => {
            if reference.mutability.is_some() {
                ContextKind::Mutable
            } else {
                ContextKind::Shared
            }
        }
        Type::Path(path) if is_context(ty) => {
            // `mylib::Context` may be a type of the user's; the bare name and ours are not.
            let segments = &path.path.segments;
            if segments.len() == 1 || segments.first().is_some_and(|first| first.ident == "kolo") {
                ContextKind::Owned
            } else {
                ContextKind::No
            }
        }
        _ => ContextKind::No,
    }
}

/// `Name`, and not `u8` or `Vec<T>`.
fn is_type_name(path: &syn::TypePath) -> bool {
    path.path.segments.last().is_some_and(|last| {
        last.arguments.is_none() && last.ident.to_string().starts_with(char::is_uppercase)
    })
}

fn is_context(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if path
        .path
        .segments
        .last()
        .is_some_and(|last| last.ident == "Context" && last.arguments.is_none()))
}

/// What a function returns, by the name of the type alone: macros do not see more.
pub(crate) fn returns(output: &ReturnType) -> Returns {
    let ReturnType::Type(_, ty) = output else {
        return Returns::Value(unit(output.span()));
    };
    if let Type::Path(path) = &**ty
        && let Some(last) = path.path.segments.last()
        && last.ident == "Result"
    {
        let mut types = match &last.arguments {
            PathArguments::AngleBracketed(arguments) => arguments.args.iter().collect(),
            _ => Vec::new(),
        }
        .into_iter()
        .filter_map(|argument| match argument {
            GenericArgument::Type(ty) => Some(ty),
            _ => None,
        });
        // An alias such as `fmt::Result` has no type to name.
        let value = types.next().cloned().unwrap_or_else(|| unit(ty.span()));
        let error = types.next().map_or_else(|| ty.span(), Spanned::span);
        return Returns::Result(value, error);
    }
    Returns::Value((**ty).clone())
}

fn unit(span: Span) -> Type {
    Type::Verbatim(quote_spanned!(span=> ()))
}

/// The source of a type or signature as people write it.
pub(crate) fn text(tokens: &impl ToTokens) -> String {
    let mut text = tokens.to_token_stream().to_string();
    for (from, to) in [
        (" :: ", "::"),
        (":: ", "::"),
        (" < ", "<"),
        ("< ", "<"),
        (" >", ">"),
        (" ,", ","),
        (" ;", ";"),
        ("& ", "&"),
        ("( ", "("),
        (" )", ")"),
        ("[ ", "["),
        (" ]", "]"),
        (" (", "("),
    ] {
        text = text.replace(from, to);
    }
    text
}

/// The attributes that decide whether an item exists; they go on everything that is made from it.
pub(crate) fn cfgs(attributes: &[Attribute]) -> Vec<&Attribute> {
    attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("cfg"))
        .collect()
}

/// The doc comments.
pub(crate) fn docs(attributes: &[Attribute]) -> Vec<&Attribute> {
    attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("doc"))
        .collect()
}

/// An identifier that can't meet one of the user's.
pub(crate) fn private(name: &str) -> Ident {
    // Hygiene alone is not enough: a `let value` would mean the user's unit struct `value`.
    Ident::new(&format!("__kolo_{name}"), Span::mixed_site())
}

/// What a worker runs of the user's.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Role {
    Function,
    Constructor,
    Method,
}

/// The function by which a worker runs user code, and the variant of the type that holds the function: user code is awaited or not.
pub(crate) fn worker_fn(
    role: Role,
    name: &Ident,
    is_async: bool,
    body: &TokenStream,
) -> (TokenStream, Ident) {
    let [context, arguments, reply, this] = ["context", "arguments", "reply", "this"].map(private);
    let lifetime = is_async.then(|| quote!('a));
    let generics = is_async.then(|| quote!(<'a>));
    let of_arguments = lifetime.clone().unwrap_or_else(|| quote!('_));
    let this = (role == Role::Method).then(|| quote!(#this: &#lifetime mut dyn ::core::any::Any,));
    let makes = role == Role::Constructor;
    let reply = (!makes).then(|| quote!(#reply: &#lifetime mut ::kolo::__private::Reply,));
    let output = match (makes, is_async) {
        (true, false) => quote!(Created),
        (true, true) => quote!(CreatedFuture<'a>),
        (false, false) => quote!(Ended),
        (false, true) => quote!(EndedFuture<'a>),
    };
    let body = if is_async {
        quote!(::std::boxed::Box::pin(async move { #body }))
    } else {
        body.clone()
    };
    let function = quote! {
        fn #name #generics (
            #this
            #context: &#lifetime ::kolo::__private::Context,
            #arguments: ::kolo::__private::Arguments<#of_arguments>,
            #reply
        ) -> ::kolo::__private::#output {
            #body
        }
    };
    let variant = if is_async { "Async" } else { "Sync" };
    (function, format_ident!("{variant}"))
}

impl Remote {
    /// Arguments and result as text: `(epoch: u32) -> f32`.
    pub(crate) fn signature(&self) -> String {
        format!("{} -> {}", self.parameters(), text(self.returns.value()))
    }

    /// The arguments as text: `(epoch: u32)`.
    pub(crate) fn parameters(&self) -> String {
        let arguments: Vec<String> = self
            .arguments
            .iter()
            .map(|argument| format!("{}: {}", argument.name.unraw(), text(&argument.ty)))
            .collect();
        format!("({})", arguments.join(", "))
    }

    /// The types of the arguments as a tuple.
    pub(crate) fn argument_tuple(&self) -> TokenStream {
        let types = self.arguments.iter().map(|argument| &argument.ty);
        quote!((#(#types,)*))
    }

    /// Statements that take the arguments out of `arguments` into variables, and those variables.
    pub(crate) fn decode(&self) -> (TokenStream, Vec<Ident>) {
        let arguments = private("arguments");
        let count = self.arguments.len();
        let variables: Vec<Ident> = (0..count).map(|n| private(&format!("arg{n}"))).collect();
        let takes = self
            .arguments
            .iter()
            .zip(&variables)
            .map(|(argument, variable)| {
                let ty = &argument.ty;
                let name = argument.name.unraw().to_string();
                let type_text = text(ty);
                let codec = quote_spanned!(ty.span()=> ::kolo::__private::argument::<#ty, _>());
                quote!(let #variable = #arguments.next(#codec, #name, #type_text)?;)
            });
        let mutable = (count > 0).then(|| quote!(mut));
        let statements = quote! {
            let #mutable #arguments = #arguments.begin(#count)?;
            #(#takes)*
            #arguments.end()?;
        };
        (statements, variables)
    }

    /// An expression of type `Ended`: runs `call`, and puts its result into `reply`.
    pub(crate) fn answer(&self, call: &TokenStream) -> TokenStream {
        let reply = private("reply");
        let value = private("value");
        let ty = self.returns.value();
        let codec = quote_spanned!(ty.span()=> ::kolo::__private::output::<#ty, _>());
        let call = self.awaited(call);
        match &self.returns {
            Returns::Value(_) => quote!({
                let #value = #call;
                #codec.encode(&#value, #reply)
            }),
            Returns::Result(_, at) => {
                let failed = failed(*at);
                quote!(match #call {
                    ::core::result::Result::Ok(#value) => #codec.encode(&#value, #reply),
                    #failed
                })
            }
        }
    }

    /// The call, awaited if it must be.
    pub(crate) fn awaited(&self, call: &TokenStream) -> TokenStream {
        if self.is_async {
            quote!(#call.await)
        } else {
            call.clone()
        }
    }
}

/// The arm of a match that makes a failure of an error, whose type is written `at` some place.
pub(crate) fn failed(at: Span) -> TokenStream {
    // One hygiene for all of it, or the compiler points at the attribute.
    let at = at.resolved_at(Span::mixed_site());
    let mut error = private("error");
    error.set_span(at);
    let failure = quote_spanned!(at=> ::kolo::__private::failed(
        &#error,
        (&&&::kolo::__private::Thrown(&#error)).text(),
        (&&::kolo::__private::Thrown(&#error)).backtrace(),
    ));
    quote! {
        ::core::result::Result::Err(#error) => ::core::result::Result::Err(#failure),
    }
}
