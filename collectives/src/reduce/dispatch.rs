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
pub(super) enum Level {
    /// What every processor of this architecture has (SSE2 on x86-64, NEON on aarch64).
    Plain,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Level {
    /// The highest level that this processor has.
    pub(super) fn detected() -> Self {
        static DETECTED: OnceLock<Level> = OnceLock::new();
        *DETECTED.get_or_init(Self::detect)
    }

    /// The levels that this processor has, the lowest first.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps,
        _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_storeu_ps,
    };

    use super::{Convert, Kernel, LANES};

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
}
