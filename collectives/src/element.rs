//! The types that collectives carry.

use std::cell::RefMut;
use std::fmt;
use std::sync::{MutexGuard, RwLockWriteGuard};

use half::{bf16, f16};

/// A type of elements, as the header of a frame names it: by its place here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// `u8`.
    U8,
    /// `i8`.
    I8,
    /// `u16`.
    U16,
    /// `i16`.
    I16,
    /// `i32`.
    I32,
    /// `i64`.
    I64,
    /// IEEE 754 half precision, [`half::f16`]. Reduced in `f32`.
    F16,
    /// `f32`.
    F32,
    /// `f64`.
    F64,
    /// `bool`: one byte, 0 or 1. What comes from a peer counts as `true` unless it is 0.
    Bool,
    /// The upper half of an `f32`, [`half::bf16`]. Reduced in `f32`.
    Bf16,
    /// `u32`.
    U32,
    /// `u64`.
    U64,
}

impl DType {
    /// All types, by their codes on the wire.
    pub const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::Bool,
        Self::Bf16,
        Self::U32,
        Self::U64,
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Whether it is a floating-point type.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }

    /// Whether it is a whole number; `bool` is not one.
    #[must_use]
    pub const fn is_integer(self) -> bool {
        !self.is_float() && !matches!(self, Self::Bool)
    }

    /// Horovod's numbers 0 to 9, then kolo's own.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::Bool => "bool",
            Self::Bf16 => "bf16",
            Self::U32 => "u32",
            Self::U64 => "u64",
        })
    }
}

mod sealed {
    /// What the engine needs of a type.
    pub trait Sealed: Sized {
        fn bytes(values: &[Self]) -> &[u8];
        fn bytes_mut(values: &mut [Self]) -> Option<&mut [u8]>;
        fn take(values: &mut [Self], bytes: &[u8]);
    }
}

pub(crate) use sealed::Sealed;

/// A type that collectives can carry: `bool`, the integers of 8 to 64 bits, [`half::f16`], [`half::bf16`], `f32` and
/// `f64`. It can't be implemented elsewhere.
///
/// [`ReduceOp`](crate::ReduceOp) says which operator takes which type.
#[diagnostic::on_unimplemented(
    message = "collectives carry no `{Self}`",
    label = "not a number that collectives carry",
    note = "elements are `bool`, `u8` to `u64`, `i8` to `i64`, `f32`, `f64`, `half::f16` and `half::bf16`",
    note = "strings, structs and other types that serde knows: `broadcast_object` and `all_gather_object`"
)]
pub trait Element:
    Sealed + Copy + PartialEq + fmt::Debug + Default + Send + Sync + 'static
{
    /// Its name on the wire.
    const DTYPE: DType;

    /// The elements as bytes, in the byte order of this machine.
    fn as_bytes(values: &[Self]) -> &[u8] {
        Self::bytes(values)
    }

    /// Takes elements from bytes that [`as_bytes`](Self::as_bytes) gave. Any bytes are good for any type: a `bool` is `true` unless
    /// its byte is 0.
    ///
    /// # Panics
    ///
    /// If there are not as many bytes as the elements have.
    fn take_bytes(values: &mut [Self], bytes: &[u8]) {
        Self::take(values, bytes);
    }
}

/// What an operation changes in place: one [`Element`], a slice, an array, a `Vec`, a `Box`, a
/// [`SharedBuffer`](crate::SharedBuffer), and `&mut` or a guard of the standard library around one of these.
///
/// A type of your own that holds elements may implement this trait.
#[diagnostic::on_unimplemented(
    message = "collectives can't change `{Self}` in place",
    label = "neither a number nor a slice, an array, a `Vec` or a `Box` of numbers",
    note = "another container of numbers: `&mut x[..]`",
    note = "strings, structs and other types that serde knows: `broadcast_object` and `all_gather_object`"
)]
pub trait Elements {
    /// The type of each of them.
    type Item: Element;

    /// The elements themselves.
    fn elements_mut(&mut self) -> &mut [Self::Item];
}

/// Implements [`Elements`] for types that lead to others which have elements.
macro_rules! elements_behind {
    ($($type:ty),* $(,)?) => {$(
        impl<E: Elements + ?Sized> Elements for $type {
            type Item = E::Item;

            fn elements_mut(&mut self) -> &mut [E::Item] {
                E::elements_mut(self)
            }
        }
    )*};
}

elements_behind! {
    &mut E, Box<E>, MutexGuard<'_, E>, RwLockWriteGuard<'_, E>, RefMut<'_, E>,
}

impl<T: Element> Elements for [T] {
    type Item = T;

    fn elements_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element, const N: usize> Elements for [T; N] {
    type Item = T;

    fn elements_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> Elements for Vec<T> {
    type Item = T;

    fn elements_mut(&mut self) -> &mut [T] {
        self
    }
}

/// The elements as bytes.
pub(crate) fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    T::bytes(values)
}

/// The elements as bytes that may be written; `None` for a type that not all bytes are good for.
pub(crate) fn bytes_of_mut<T: Element>(values: &mut [T]) -> Option<&mut [u8]> {
    T::bytes_mut(values)
}

/// One number is a slice of one. (An implementation for each `T: Element` would meet that of `Box<E>`.)
macro_rules! one_element {
    ($type:ty) => {
        impl Elements for $type {
            type Item = Self;

            fn elements_mut(&mut self) -> &mut [Self] {
                std::slice::from_mut(self)
            }
        }
    };
}

macro_rules! element {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl Sealed for $type {
            fn bytes(values: &[Self]) -> &[u8] {
                bytemuck::cast_slice(values)
            }

            fn bytes_mut(values: &mut [Self]) -> Option<&mut [u8]> {
                Some(bytemuck::cast_slice_mut(values))
            }

            fn take(values: &mut [Self], bytes: &[u8]) {
                crate::copy::slice(bytes, bytemuck::cast_slice_mut(values));
            }
        }

        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }

        one_element!($type);
    )*};
}

element! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64,
}

impl Sealed for bool {
    fn bytes(values: &[Self]) -> &[u8] {
        bytemuck::cast_slice(values)
    }

    fn bytes_mut(_values: &mut [Self]) -> Option<&mut [u8]> {
        None
    }

    fn take(values: &mut [Self], bytes: &[u8]) {
        // Not every byte is a `bool`: they are never cast, only compared.
        assert_eq!(values.len(), bytes.len(), "one byte for each bool");
        for (value, byte) in values.iter_mut().zip(bytes) {
            *value = *byte != 0;
        }
    }
}

impl Element for bool {
    const DTYPE: DType = DType::Bool;
}

one_element!(bool);

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::{Mutex, RwLock};

    use super::*;

    #[test]
    fn codes_are_those_of_the_wire() {
        for (code, dtype) in (0..).zip(DType::ALL) {
            assert_eq!(dtype.code(), code);
            assert_eq!(DType::from_code(code), Some(dtype));
        }
        assert_eq!(DType::from_code(13), None);
        assert_eq!(DType::from_code(u8::MAX), None);
        // Horovod's message.h.
        assert_eq!((DType::F32.code(), DType::Bool.code()), (7, 9));
    }

    #[test]
    fn sizes_are_those_of_the_types() {
        fn check<T: Element>(name: &str) {
            assert_eq!(T::DTYPE.size(), size_of::<T>());
            assert_eq!(T::DTYPE.to_string(), name);
            assert!(align_of::<T>() <= align_of::<u64>());
        }
        check::<bool>("bool");
        check::<u8>("u8");
        check::<i8>("i8");
        check::<u16>("u16");
        check::<i16>("i16");
        check::<u32>("u32");
        check::<i32>("i32");
        check::<u64>("u64");
        check::<i64>("i64");
        check::<f16>("f16");
        check::<bf16>("bf16");
        check::<f32>("f32");
        check::<f64>("f64");
    }

    #[test]
    fn whatever_leads_to_elements_has_them() {
        fn add(to: &mut (impl Elements<Item = u8> + ?Sized)) -> usize {
            let elements = to.elements_mut();
            for element in elements.iter_mut() {
                *element += 1;
            }
            elements.len()
        }
        let (mut one, mut three, mut list) = (0_u8, [1_u8; 3], vec![2_u8; 2]);
        assert_eq!((add(&mut one), add(&mut three), add(&mut list)), (1, 3, 2));
        assert_eq!((one, three, &list[..]), (1, [2; 3], &[3; 2][..]));
        assert_eq!(add(&mut three[1..]), 2);
        assert_eq!(add(&mut &mut list), 2);
        assert_eq!((three, &list[..]), ([2, 3, 3], &[4; 2][..]));

        let mut boxed: Box<[u8]> = Box::new([7, 8]);
        assert_eq!((add(&mut boxed), &boxed[..]), (2, &[8, 9][..]));
        let (mutex, lock) = (Mutex::new(vec![1_u8]), RwLock::new([2_u8; 2]));
        let cell = RefCell::new(3_u8);
        assert_eq!(add(&mut mutex.lock().unwrap()), 1);
        assert_eq!(add(&mut lock.write().unwrap()), 2);
        assert_eq!(add(&mut cell.borrow_mut()), 1);
        assert_eq!(mutex.into_inner().unwrap(), [2]);
        assert_eq!((lock.into_inner().unwrap(), cell.into_inner()), ([3; 2], 4));
    }

    #[test]
    fn any_byte_from_a_peer_makes_a_bool() {
        let mut values = [false; 4];
        bool::take_bytes(&mut values, &[0, 1, 2, 255]);
        assert_eq!(values, [false, true, true, true]);
        assert_eq!(bytes_of(&values), [0, 1, 1, 1]);
        let mut floats = [0_f32; 2];
        f32::take_bytes(&mut floats, &[0, 0, 128, 63, 255, 255, 255, 255]);
        assert!((floats[0] - 1.0).abs() < f32::EPSILON && floats[1].is_nan());
        crate::reduce::store(&mut floats, Some(DType::Bf16), &[128, 63, 255, 255]);
        assert!((floats[0] - 1.0).abs() < f32::EPSILON && floats[1].is_nan());
    }
}
