//! Half types to `f32` and back, without a branch, so that loops over them become SIMD code.

/// As the processor's `VCVTPH2PS` does it: exact; a NaN keeps its bits and becomes quiet.
#[inline(always)]
pub(super) fn widen_f16(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let rest = u32::from(half & 0x7fff) << 13;
    // Exponents count from another zero: 2^112 is between them. Subnormal halves come out right by the way.
    let finite = (f32::from_bits(rest) * f32::from_bits(0x7780_0000)).to_bits();
    let quiet = if rest > 0x0f80_0000 { 0x0040_0000 } else { 0 };
    let special = rest | 0x7f80_0000 | quiet;
    let magnitude = if rest >= 0x0f80_0000 { special } else { finite };
    f32::from_bits(sign | magnitude)
}

/// As the processor's `VCVTPS2PH` does it: to nearest, ties to even; what is too large becomes infinite; a NaN keeps
/// its upper bits and becomes quiet.
#[inline(always)]
pub(super) fn narrow_f16(float: f32) -> u16 {
    let bits = float.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let rest = bits & 0x7fff_ffff;
    let special = if rest > 0x7f80_0000 {
        0x7e00 | (rest >> 13) & 0x3ff
    } else {
        0x7c00
    };
    // Below the least normal half: adding 0.5 makes the adder round at the right place.
    let tiny = (f32::from_bits(rest) + 0.5)
        .to_bits()
        .wrapping_sub(0.5_f32.to_bits());
    let odd = (rest >> 13) & 1;
    let normal = rest.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let magnitude = if rest >= 0x4780_0000 {
        special
    } else if rest < 0x3880_0000 {
        tiny
    } else {
        normal
    };
    (sign | magnitude) as u16
}

/// Exact.
#[inline(always)]
pub(super) fn widen_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// To nearest, ties to even; a NaN keeps its upper bits and becomes quiet.
#[inline(always)]
pub(super) fn narrow_bf16(float: f32) -> u16 {
    let bits = float.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 {
        nan
    } else {
        rounded
    }) as u16
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn every_half_widens_as_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            let expected = f16::from_bits(bits).to_f32_const();
            let given = widen_f16(bits);
            if expected.is_nan() {
                assert!(given.is_nan());
                assert_eq!(given.to_bits() >> 22 & 1, 1, "quiet");
                assert_eq!(narrow_f16(given), bits | 0x200);
            } else {
                assert_eq!(given.to_bits(), expected.to_bits(), "{bits:04x}");
                assert_eq!(narrow_f16(given), bits);
            }
            let wide = widen_bf16(bits);
            assert_eq!(wide.to_bits(), u32::from(bits) << 16);
            if wide.is_nan() {
                assert_eq!(narrow_bf16(wide), bits | 0x40);
            } else {
                assert_eq!(narrow_bf16(wide), bits);
            }
        }
    }

    #[test]
    fn floats_are_rounded_as_the_half_crate_says() {
        // All exponents, and mantissas around every tie.
        for high in 0..=0xffff_u32 {
            for low in [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let float = f32::from_bits(high << 16 | low);
                let (short, brain) = (f16::from_f32_const(float), bf16::from_f32_const(float));
                if float.is_nan() {
                    assert!(f16::from_bits(narrow_f16(float)).is_nan());
                    assert!(bf16::from_bits(narrow_bf16(float)).is_nan());
                } else {
                    assert_eq!(narrow_f16(float), short.to_bits(), "{float:e}");
                    assert_eq!(narrow_bf16(float), brain.to_bits(), "{float:e}");
                }
            }
        }
    }
}
