//! Copies, also from and to memory that another process may write or read meanwhile.
//!
//! Peers that keep to the protocol do that in one case: a buffer of an operation that failed belongs to its caller again,
//! while a late peer still reads it (what comes of that is thrown away). Others could do it at any time. To the language a
//! plain read beside a write is not only a torn value but undefined. So the copies are made where the compiler does not look: by
//! the system's `memcpy`, called in a way that hides what it is, and by assembly. What they read is any bytes, and is
//! looked at only in memory of this process.
//!
//! On AMD's processors since Zen 3 `memcpy` is slow for some addresses, from 2 KiB on to the size of the second cache: there C
//! libraries (glibc before 2.40, musl) copy by `rep movsb`, which takes up to 20 times as long as loads and stores where source
//! and destination lie in certain ways in their pages (glibc's bug 30994). Which those are changes with each run of a program. So these copies are
//! made by loads and stores here.

// Assembly, and a function of the C library.
#![allow(unsafe_code)]

use std::ffi::c_void;

/// Bytes that [`stream_lines`] copies at once.
const LINE: usize = 64;

type Memcpy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;

unsafe extern "C" {
    fn memcpy(into: *mut c_void, from: *const c_void, count: usize) -> *mut c_void;
}

/// A function of which the compiler does not know that it is `memcpy`.
#[inline]
#[allow(clippy::pointers_in_nomem_asm_block)] // nothing is read or written: there is no instruction
fn hidden() -> Memcpy {
    let copy: Memcpy = memcpy;
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        let mut copy = copy;
        // SAFETY: no instruction. To the compiler it may be another function afterwards.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) copy, options(pure, nomem, nostack, preserves_flags));
        }
        copy
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::hint::black_box(copy)
}

/// Copies bytes.
///
/// # Safety
///
/// Both ranges are mapped, the destination to be written, and they do not overlap. Nothing else of this process refers to
/// the destination, or to the source mutably.
#[inline]
pub(crate) unsafe fn bytes(from: *const u8, into: *mut u8, count: usize) {
    #[cfg(target_arch = "x86_64")]
    if VECTORS.contains(&count) && vectors::are_faster() {
        // SAFETY: the caller's promise; the processor has AVX, and there are more than two rounds of bytes.
        unsafe { vectors::copy(from, into, count) };
        return;
    }
    // SAFETY: the caller's promise is what `memcpy` asks for.
    unsafe { hidden()(into.cast(), from.cast(), count) };
}

/// As `into.copy_from_slice(from)`, for what may be long.
///
/// # Panics
///
/// If the lengths differ.
#[inline]
pub(crate) fn slice(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "a copy has one length");
    // SAFETY: references to as many bytes, of which one is mutable: so they do not overlap.
    unsafe { bytes(from.as_ptr(), into.as_mut_ptr(), from.len()) };
}

/// Lengths that C libraries copy by `rep movsb`: beyond the second cache they don't.
#[cfg(target_arch = "x86_64")]
const VECTORS: std::ops::Range<usize> = 2 << 10..1 << 20;

#[cfg(target_arch = "x86_64")]
mod vectors {
    use std::arch::x86_64::__cpuid;
    use std::sync::LazyLock;

    /// Bytes that are copied at once.
    const ROUND: usize = 128;

    static ARE_FASTER: LazyLock<bool> = LazyLock::new(|| {
        let (vendor, features) = (0, 7);
        // In a release of Rust after the oldest that is supported here it is safe.
        #[allow(unused_unsafe)]
        // SAFETY: every processor of this architecture has the instruction.
        let (vendor, features) = unsafe { (__cpuid(vendor), __cpuid(features)) };
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        let has_erms = vendor.eax >= 7 && features.ebx >> 9 & 1 == 1;
        name.concat() == b"AuthenticAMD" && has_erms && is_x86_feature_detected!("avx")
    });

    /// Whether `memcpy` would use an instruction that may be slow.
    #[inline]
    pub(super) fn are_faster() -> bool {
        *ARE_FASTER
    }

    /// Copies bytes by loads and stores of 32.
    ///
    /// # Safety
    ///
    /// As [`super::bytes`]; there are at least two rounds of bytes.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy(from: *const u8, into: *mut u8, count: usize) {
        debug_assert!(count >= 2 * ROUND);
        // The first bytes, after which stores are aligned, and the last ones lie over each other and the rest.
        let head = 32 - into.addr() % 32;
        // SAFETY: head is at most 32 and count at least 2 * ROUND, so all of this is inside. The loop goes on while there is more
        // than a round left, and the end takes the last round. Vector registers are any values.
        unsafe {
            std::arch::asm!(
                "vmovdqu ymm0, [{from}]",
                "vmovdqu [{into}], ymm0",
                "add {from}, {head}",
                "add {into}, {head}",
                "2:",
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovdqu ymm2, [{from} + 64]",
                "vmovdqu ymm3, [{from} + 96]",
                "vmovdqa [{into}], ymm0",
                "vmovdqa [{into} + 32], ymm1",
                "vmovdqa [{into} + 64], ymm2",
                "vmovdqa [{into} + 96], ymm3",
                "add {from}, 128",
                "add {into}, 128",
                "cmp {into}, {last}",
                "jb 2b",
                "vmovdqu ymm0, [{end}]",
                "vmovdqu ymm1, [{end} + 32]",
                "vmovdqu ymm2, [{end} + 64]",
                "vmovdqu ymm3, [{end} + 96]",
                "vmovdqu [{last}], ymm0",
                "vmovdqu [{last} + 32], ymm1",
                "vmovdqu [{last} + 64], ymm2",
                "vmovdqu [{last} + 96], ymm3",
                "vzeroupper",
                from = inout(reg) from => _,
                into = inout(reg) into => _,
                head = in(reg) head,
                last = in(reg) into.add(count - ROUND),
                end = in(reg) from.add(count - ROUND),
                // `vzeroupper` changes all of them.
                out("ymm0") _,
                out("ymm1") _,
                out("ymm2") _,
                out("ymm3") _,
                out("ymm4") _,
                out("ymm5") _,
                out("ymm6") _,
                out("ymm7") _,
                out("ymm8") _,
                out("ymm9") _,
                out("ymm10") _,
                out("ymm11") _,
                out("ymm12") _,
                out("ymm13") _,
                out("ymm14") _,
                out("ymm15") _,
                options(nostack)
            );
        }
    }
}

/// Copies lines past the caches on the way out. [`fence`] has to follow before others are told. `FAR`: the source is not in a
/// cache either.
///
/// # Safety
///
/// As [`bytes`]; the destination begins at a multiple of [`LINE`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream_lines<const FAR: bool>(from: *const u8, into: *mut u8, lines: usize) {
    use std::arch::x86_64::{_MM_HINT_NTA, _mm_prefetch};
    debug_assert!(lines == 0 || into.addr().is_multiple_of(LINE));
    for line in 0..lines {
        // SAFETY: the caller promises `lines` lines at both places, and the destination's alignment, which the store
        // demands. SSE2 is part of x86-64; a prefetch reads nothing and may be of any address.
        unsafe {
            let (from, into) = (from.add(line * LINE), into.add(line * LINE));
            if FAR {
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(512).cast());
            }
            std::arch::asm!(
                "movdqu {a}, [{from}]",
                "movdqu {b}, [{from} + 16]",
                "movdqu {c}, [{from} + 32]",
                "movdqu {d}, [{from} + 48]",
                "movntdq [{into}], {a}",
                "movntdq [{into} + 16], {b}",
                "movntdq [{into} + 32], {c}",
                "movntdq [{into} + 48], {d}",
                from = in(reg) from,
                into = in(reg) into,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// As above, where there is no such instruction.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream_lines<const FAR: bool>(from: *const u8, into: *mut u8, lines: usize) {
    // SAFETY: as the caller promises.
    unsafe { bytes(from, into, lines * LINE) }
}

/// Copies past the caches on the way out, for what is hardly ever read again. [`fence`] has to follow before others are told. `FAR`:
/// the source is not in a cache either.
///
/// # Safety
///
/// As [`bytes`].
pub(crate) unsafe fn bytes_away<const FAR: bool>(from: *const u8, into: *mut u8, count: usize) {
    let head = into.align_offset(LINE).min(count);
    let lines = (count - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: the caller's promise; the three parts are the whole, and the second one begins where a line does, or is empty.
    unsafe {
        bytes(from, into, head);
        stream_lines::<FAR>(from.add(head), into.add(head), lines);
        bytes(from.add(tail), into.add(tail), count - tail);
    }
}

/// As [`bytes_away`], in memory of this process.
///
/// # Panics
///
/// If the lengths differ.
pub(crate) fn away(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "a copy has one length");
    // SAFETY: references to as many bytes, of which one is mutable: so they do not overlap.
    unsafe { bytes_away::<false>(from.as_ptr(), into.as_mut_ptr(), from.len()) };
    fence();
}

/// Makes what was streamed visible before what is written next.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64. The instruction orders stores and does nothing else.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whichever way the processor takes, around where that changes, whatever the addresses.
    #[test]
    fn every_length_arrives_and_nothing_besides() {
        let from: Vec<u8> = (0..5000_u32).map(|value| (value % 251) as u8).collect();
        let lengths = [
            0, 1, 7, 256, 257, 383, 384, 385, 1000, 2047, 2048, 2049, 2111, 4600,
        ];
        for (length, skip) in lengths.into_iter().flat_map(|length| {
            [(0, 0), (1, 0), (0, 1), (31, 32), (33, 31), (63, 5)].map(|skip| (length, skip))
        }) {
            let (source, target) = skip;
            let given = &from[source..source + length];
            let check = |into: &[u8]| {
                assert_eq!(into[target..target + length], *given, "{length} {skip:?}");
                let others = into[..target].iter().chain(&into[target + length..]);
                assert!(others.copied().all(|byte| byte == 99), "{length} {skip:?}");
            };
            let mut into = vec![99; 5000];
            slice(given, &mut into[target..target + length]);
            check(&into);
            #[cfg(target_arch = "x86_64")]
            if length >= 256 && is_x86_feature_detected!("avx") {
                let mut into = vec![99; 5000];
                // SAFETY: as many bytes are in both, there are enough, and the processor has AVX.
                unsafe {
                    vectors::copy(given.as_ptr(), into[target..].as_mut_ptr(), length);
                }
                check(&into);
            }
        }
    }

    #[test]
    fn a_copy_past_the_caches_is_a_copy() {
        let from: Vec<u8> = (0..4000_u32).map(|value| (value % 251) as u8).collect();
        for (skip, count) in [
            (0, 0),
            (1, 5),
            (7, 63),
            (3, 64),
            (0, 129),
            (11, 3000),
            (13, 40 * 64),
        ] {
            let (mut near, mut far) = (vec![0; 4000], vec![0; 4000]);
            away(&from[..count], &mut near[skip..skip + count]);
            // SAFETY: both have as many bytes.
            unsafe { bytes_away::<true>(from.as_ptr(), far[skip..].as_mut_ptr(), count) };
            fence();
            for into in [near, far] {
                assert_eq!(into[skip..skip + count], from[..count]);
                let beside = into[..skip].iter().chain(&into[skip + count..]);
                assert!(beside.copied().all(|byte| byte == 0));
            }
        }
    }
}
