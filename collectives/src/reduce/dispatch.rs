//! Which instructions are used.
//!
//! A [`Kernel`] is a plain loop that is always inlined. Each [`Level`] has one function that is compiled for the
//! level's instructions and inlines the kernel into itself, so that the compiler makes code for them out of the same
//! loop. Which function is called is decided at run time, by what the processor has. No level contracts
//! multiplications with additions and none changes an order: all give the same bits.

#![allow(unsafe_code)]

use std::sync::OnceLock;

use super::software;

/// Elements that are converted at once.
pub(super) const LANES: usize = 16;

/// What the processor can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Level {
    /// What every processor of this architecture has (SSE2 on x86-64, NEON on aarch64).
    Plain,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Level {
    /// The highest level that this processor has.
    #[must_use]
    pub fn detected() -> Self {
        static DETECTED: OnceLock<Level> = OnceLock::new();
        *DETECTED.get_or_init(Self::detect)
    }

    /// The levels that this processor has, the lowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Self::Plain, Self::Avx2, Self::Avx512]
            .into_iter()
            .filter(|level| *level <= Self::detected())
            .collect()
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Self {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        // To the compiler the first of them includes FMA (which no loop uses).
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (true, true) => Self::Avx512,
            (true, false) => Self::Avx2,
            (false, _) => Self::Plain,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> Self {
        Self::Plain
    }
}

/// A loop.
pub(super) trait Kernel {
    /// Runs it. Implementations are `#[inline(always)]`, closures in them included.
    fn run<C: Convert>(self);
}

/// How half types become `f32` and back.
pub(super) trait Convert {
    fn widen_f16(from: &[u16; LANES]) -> [f32; LANES];
    fn narrow_f16(from: &[f32; LANES]) -> [u16; LANES];
}

/// Runs a kernel with the instructions of a level.
///
/// # Panics
///
/// If this processor does not have that level.
pub(super) fn run<K: Kernel>(level: Level, kernel: K) {
    assert!(
        level <= Level::detected(),
        "{level:?} is not on this processor"
    );
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => {
            // SAFETY: it was asked above whether the processor has the instructions.
            unsafe { x86::avx512(kernel) }
        }
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => {
            // SAFETY: as above.
            unsafe { x86::avx2(kernel) }
        }
        _ => kernel.run::<Software>(),
    }
}

/// Conversion by arithmetic on bits.
pub(super) struct Software;

impl Convert for Software {
    #[inline(always)]
    fn widen_f16(from: &[u16; LANES]) -> [f32; LANES] {
        let mut into = [0.0; LANES];
        for at in 0..LANES {
            into[at] = software::widen_f16(from[at]);
        }
        into
    }

    #[inline(always)]
    fn narrow_f16(from: &[f32; LANES]) -> [u16; LANES] {
        let mut into = [0; LANES];
        for at in 0..LANES {
            into[at] = software::narrow_f16(from[at]);
        }
        into
    }
}

/// Copies past the caches: for results that are larger than they are, and that nobody reads soon. Can be faster than a
/// plain copy for those, because the old contents are not fetched first; how much depends on the machine.
///
/// # Panics
///
/// If the lengths differ.
pub(super) fn stream(into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "a copy takes slices of one length");
    #[cfg(target_arch = "x86_64")]
    x86::stream(into, from);
    #[cfg(not(target_arch = "x86_64"))]
    into.copy_from_slice(from);
}

/// Makes what was [streamed](stream) visible to other processors before what is written next. One for many streams.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    x86::fence();
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_sfence, _mm_storeu_si128,
        _mm_stream_si128, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_storeu_ps,
    };

    use super::{Convert, Kernel, LANES};

    /// Bytes of a cache line, which is written as a whole.
    const LINE: usize = 64;

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn avx2<K: Kernel>(kernel: K) {
        kernel.run::<F16c>();
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
    pub(super) fn avx512<K: Kernel>(kernel: K) {
        kernel.run::<F16c>();
    }

    /// Conversion by F16C. Used by kernels that run in [`avx2`] or [`avx512`] alone.
    pub(super) struct F16c;

    impl Convert for F16c {
        #[inline(always)]
        fn widen_f16(from: &[u16; LANES]) -> [f32; LANES] {
            let mut into = [0.0; LANES];
            for at in (0..LANES).step_by(8) {
                // SAFETY: `at + 8 <= LANES`, so that 8 halves are read and 8 floats written inside the arrays, which need
                // no alignment. The type is named in functions that enable F16C and AVX alone, and they are
                // called only where the processor has both.
                unsafe {
                    let halves = _mm_loadu_si128(from.as_ptr().add(at).cast());
                    _mm256_storeu_ps(into.as_mut_ptr().add(at), _mm256_cvtph_ps(halves));
                }
            }
            into
        }

        #[inline(always)]
        fn narrow_f16(from: &[f32; LANES]) -> [u16; LANES] {
            let mut into = [0; LANES];
            for at in (0..LANES).step_by(8) {
                // SAFETY: as in `widen_f16`.
                unsafe {
                    let floats = _mm256_loadu_ps(from.as_ptr().add(at));
                    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(floats);
                    _mm_storeu_si128(into.as_mut_ptr().add(at).cast(), halves);
                }
            }
            into
        }
    }

    pub(super) fn stream(into: &mut [u8], from: &[u8]) {
        // Up to the first whole line by plain stores, then lines, then the rest.
        let head = into.as_ptr().align_offset(LINE).min(into.len());
        let lines = (into.len() - head) / LINE;
        let (first, rest) = into.split_at_mut(head);
        first.copy_from_slice(&from[..head]);
        let (whole, last) = rest.split_at_mut(lines * LINE);
        let source = &from[head..head + lines * LINE];
        for (line, source) in whole.chunks_exact_mut(LINE).zip(source.chunks_exact(LINE)) {
            for at in (0..LINE).step_by(16) {
                // SAFETY: both slices have LINE bytes and `at + 16 <= LINE`. `line` begins at a multiple of LINE, as
                // the store demands: `head` bytes after the start of `into` is one, and lines follow each other.
                // SSE2 is part of x86-64.
                #[allow(clippy::cast_ptr_alignment)]
                unsafe {
                    let value = _mm_loadu_si128(source.as_ptr().add(at).cast());
                    _mm_stream_si128(line.as_mut_ptr().add(at).cast::<__m128i>(), value);
                }
            }
        }
        last.copy_from_slice(&from[head + lines * LINE..]);
    }

    pub(super) fn fence() {
        // SAFETY: SSE is part of x86-64. The instruction orders stores and does nothing else.
        unsafe { _mm_sfence() }
    }
}
