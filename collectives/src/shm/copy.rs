//! Copies from and to memory that another process may write or read meanwhile.
//!
//! Peers that keep to the protocol do that in one case: a buffer of an operation that failed belongs to its caller again,
//! while a late peer still reads it (what comes of that is thrown away). Others could do it at any time. To the language a
//! plain read beside a write is not only a torn value but undefined. So the copies are made where the compiler does not look: by
//! the system's `memcpy`, called in a way that hides what it is, and by assembly. What they read is any bytes, and is
//! looked at only in memory of this process.

use std::ffi::c_void;

/// Bytes that [`stream_lines`] copies at once.
pub(super) const LINE: usize = 64;

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
/// Both ranges are mapped, the destination to be written, and they do not overlap. Nothing of this process refers to
/// the destination, or to the source mutably.
#[inline]
pub(super) unsafe fn bytes(from: *const u8, into: *mut u8, count: usize) {
    // SAFETY: the caller's promise is what `memcpy` asks for.
    unsafe { hidden()(into.cast(), from.cast(), count) };
}

/// Copies lines past the caches on the way out. [`fence`] has to follow before others are told. `FAR`: the source is not in a
/// cache either.
///
/// # Safety
///
/// As [`bytes`]; the destination begins at a multiple of [`LINE`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn stream_lines<const FAR: bool>(from: *const u8, into: *mut u8, lines: usize) {
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
pub(super) unsafe fn stream_lines<const FAR: bool>(from: *const u8, into: *mut u8, lines: usize) {
    // SAFETY: as the caller promises.
    unsafe { bytes(from, into, lines * LINE) }
}

/// Copies past the caches on the way out, for what is hardly ever read again.
///
/// # Panics
///
/// If the lengths differ.
pub(crate) fn away(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "a copy has one length");
    let head = into.as_ptr().align_offset(LINE).min(into.len());
    let lines = (into.len() - head) / LINE;
    let tail = head + lines * LINE;
    into[..head].copy_from_slice(&from[..head]);
    // SAFETY: both have `lines` lines from `head` on, where the destination is aligned.
    unsafe {
        stream_lines::<false>(from[head..].as_ptr(), into[head..].as_mut_ptr(), lines);
    }
    fence();
    into[tail..].copy_from_slice(&from[tail..]);
}

/// Makes what was streamed visible before what is written next.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64. The instruction orders stores and does nothing else.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_and_bytes_arrive_where_they_should() {
        let from: Vec<u8> = (0..4000_u32).map(|value| (value % 251) as u8).collect();
        for (skip, lines) in [(0, 0), (0, 1), (3, 7), (13, 40)] {
            let mut into = vec![0_u8; 4096];
            let head = into.as_ptr().align_offset(LINE);
            // SAFETY: 63 + 40 * 64 bytes are in both; the destination is aligned by the choice of `head`.
            unsafe {
                stream_lines::<true>(from[skip..].as_ptr(), into[head..].as_mut_ptr(), lines);
            };
            fence();
            assert_eq!(
                into[head..head + lines * LINE],
                from[skip..skip + lines * LINE]
            );
            assert!(into[..head].iter().all(|byte| *byte == 0));
            assert!(into[head + lines * LINE..].iter().all(|byte| *byte == 0));
            let mut into = vec![0_u8; 4096];
            let count = lines * LINE + skip;
            // SAFETY: both have as many bytes.
            unsafe { bytes(from.as_ptr(), into.as_mut_ptr(), count) };
            assert_eq!(into[..count], from[..count]);
            assert!(into[count..].iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_copy_past_the_caches_is_a_copy() {
        let from: Vec<u8> = (0..4000_u32).map(|value| (value % 251) as u8).collect();
        for (skip, count) in [(0, 0), (1, 5), (7, 63), (3, 64), (0, 129), (11, 3000)] {
            let mut into = vec![0_u8; 4000];
            away(&from[..count], &mut into[skip..skip + count]);
            assert_eq!(into[skip..skip + count], from[..count]);
            assert!(into[..skip].iter().all(|byte| *byte == 0));
            assert!(into[skip + count..].iter().all(|byte| *byte == 0));
        }
    }
}
