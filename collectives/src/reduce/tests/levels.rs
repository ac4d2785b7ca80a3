//! Every level of instructions gives the same.

use super::*;

/// Two ranks write their result over their own values, one over the left and one over the right ones: which of two NaN comes out is
/// the same.
#[test]
fn a_result_over_either_operand_has_the_same_bits() {
    for (dtype, op) in defined().filter(|(_, op)| *op != ReduceOp::Adasum) {
        for level in Level::available() {
            for length in LENGTHS {
                // Any bits: many of them are NaN of different kinds.
                let random = |seed: u64| {
                    let mut bytes = mixed(dtype, length, seed);
                    if dtype != DType::Bool {
                        for (index, value) in bytes.chunks_exact_mut(dtype.size()).enumerate() {
                            if index % 3 == 0 {
                                value.fill(0xff);
                                value[0] = (index as u8).wrapping_mul(seed as u8);
                            }
                        }
                    }
                    Aligned::of(&bytes)
                };
                let (left, right) = (random(7), random(9));
                let mut over_left = Aligned::of(left.bytes());
                combine_at(level, dtype, op, over_left.bytes_mut(), right.bytes());
                let mut over_right = Aligned::of(right.bytes());
                combine_behind_at(level, dtype, op, left.bytes(), over_right.bytes_mut());
                let case = format!("{op} of {length} {dtype} at {level:?}");
                assert_eq!(over_left.bytes(), over_right.bytes(), "{case}");
            }
        }
    }
}

#[test]
fn many_inputs_give_what_pairs_give_in_rank_order() {
    for (dtype, op) in defined() {
        let is_half = matches!(dtype, DType::F16 | DType::Bf16);
        for count in [1, 2, 3, 8] {
            // Around a block too.
            for length in [0, 1, 63, 8192 / dtype.size() - 1, 8192 / dtype.size() + 5] {
                let inputs: Vec<Aligned> = (0..count)
                    .map(|rank| Aligned::of(&mixed(dtype, length, 10 + rank)))
                    .collect();
                let finish = Finish::of(op, count as u32, Factor::new(1.0));
                let mut expected = Aligned::of(inputs[0].bytes());
                if is_half && count > 1 {
                    // In f32, and rounded once.
                    let wide = |input: &Aligned| {
                        let mut wide = vec![0_f32; length];
                        let into = bytemuck::cast_slice_mut(&mut wide);
                        convert(DType::F32, into, dtype, input.bytes());
                        wide
                    };
                    let mut sum = wide(&inputs[0]);
                    for input in &inputs[1..] {
                        let from = wide(input);
                        let into = bytemuck::cast_slice_mut(&mut sum);
                        combine(DType::F32, op, into, bytemuck::cast_slice(&from));
                    }
                    super::finish(DType::F32, bytemuck::cast_slice_mut(&mut sum), &finish);
                    let into = expected.bytes_mut();
                    convert(dtype, into, DType::F32, bytemuck::cast_slice(&sum));
                } else {
                    for input in &inputs[1..] {
                        combine(dtype, op, expected.bytes_mut(), input.bytes());
                    }
                    super::finish(dtype, expected.bytes_mut(), &finish);
                }
                let size = dtype.size();
                let same = |index: usize| {
                    let one = &expected.bytes()[index * size..(index + 1) * size];
                    (!is_nan(dtype, one)).then(|| one.to_vec())
                };
                let slices: Vec<&[u8]> = inputs.iter().map(Aligned::bytes).collect();
                for store in [Store::Cached, Store::Streaming] {
                    let case = format!("{op} of {count} x {length} {dtype}, {store:?}");
                    let mut into = Aligned::of(&vec![0x5a; length * size]);
                    combine_many(dtype, op, into.bytes_mut(), &slices, &finish, store);
                    check_equal(dtype, into.bytes(), same, &case);
                    let mut all: Vec<Aligned> = inputs
                        .iter()
                        .map(|input| Aligned::of(input.bytes()))
                        .collect();
                    let mut buffers: Vec<&mut [u8]> =
                        all.iter_mut().map(Aligned::bytes_mut).collect();
                    combine_all(dtype, op, &mut buffers, &finish, store);
                    for buffer in &all {
                        check_equal(dtype, buffer.bytes(), same, &case);
                    }
                }
            }
        }
    }
}

#[test]
fn levels_convert_alike() {
    for to in [DType::F16, DType::Bf16, DType::F32, DType::F64] {
        for from in [DType::F16, DType::Bf16, DType::F32, DType::F64] {
            for length in [0, 1, 15, 16, 17, 1024, 1025, 3000] {
                let source = Aligned::of(&mixed(from, length, 5));
                let mut plain = Aligned::of(&vec![0; length * to.size()]);
                convert_at(Level::Plain, to, plain.bytes_mut(), from, source.bytes());
                for level in Level::available() {
                    let mut into = Aligned::of(&vec![1; length * to.size()]);
                    convert_at(level, to, into.bytes_mut(), from, source.bytes());
                    let size = to.size();
                    let same = |index: usize| {
                        let one = &plain.bytes()[index * size..(index + 1) * size];
                        (!is_nan(to, one)).then(|| one.to_vec())
                    };
                    check_equal(
                        to,
                        into.bytes(),
                        same,
                        &format!("{from} to {to} by {level:?}"),
                    );
                }
                // What is widened comes back.
                if to.size() > from.size() {
                    let mut back = Aligned::of(&vec![1; source.bytes().len()]);
                    convert(from, back.bytes_mut(), to, plain.bytes());
                    let size = from.size();
                    let same = |index: usize| {
                        let one = &source.bytes()[index * size..(index + 1) * size];
                        (!is_nan(from, one)).then(|| one.to_vec())
                    };
                    check_equal(
                        from,
                        back.bytes(),
                        same,
                        &format!("{from} to {to} and back"),
                    );
                }
            }
        }
    }
}

#[test]
fn every_half_is_converted_alike_by_all_levels() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for level in Level::available() {
        let mut wide = vec![0_f32; all.len()];
        let into = bytemuck::cast_slice_mut(&mut wide);
        convert_at(
            level,
            DType::F32,
            into,
            DType::F16,
            bytemuck::cast_slice(&all),
        );
        for (bits, wide) in all.iter().zip(&wide) {
            assert_eq!(
                wide.to_bits(),
                software::widen_f16(*bits).to_bits(),
                "{level:?} {bits:04x}"
            );
        }
        // Between halves, at the ties, and beyond the largest.
        let between: Vec<f32> = wide
            .iter()
            .flat_map(|value| {
                [0x0fff_u32, 0x1000, 0x1001].map(|low| f32::from_bits(value.to_bits() | low))
            })
            .collect();
        let mut short = vec![0_u16; between.len()];
        let into = bytemuck::cast_slice_mut(&mut short);
        convert_at(
            level,
            DType::F16,
            into,
            DType::F32,
            bytemuck::cast_slice(&between),
        );
        for (value, short) in between.iter().zip(&short) {
            assert_eq!(*short, software::narrow_f16(*value), "{level:?} {value:e}");
        }
    }
}

#[test]
fn streaming_copies_everything_whatever_the_alignment() {
    let from: Vec<u8> = (0..1000_u32).map(|index| (index % 251) as u8).collect();
    for start in 0..70 {
        for length in [0, 1, 15, 63, 64, 65, 127, 128, 129, 500] {
            let mut into = vec![0xee; 700];
            copy(
                &mut into[start..start + length],
                &from[3..3 + length],
                Store::Streaming,
            );
            assert_eq!(into[start..start + length], from[3..3 + length]);
            assert!(into[..start].iter().all(|byte| *byte == 0xee));
            assert!(into[start + length..].iter().all(|byte| *byte == 0xee));
        }
    }
    assert_eq!(Store::for_result(STREAM_FROM - 1), Store::Cached);
    assert_eq!(Store::for_result(STREAM_FROM), Store::Streaming);
}

#[test]
fn adasum_averages_parallel_and_adds_orthogonal_vectors() {
    for length in [1, 7, 8, 9, 513, 5000] {
        let one: Vec<f32> = (0..length).map(|index| 1.0 + (index % 7) as f32).collect();
        assert_eq!(reduced(ReduceOp::Adasum, &one, &one), one);
        let (mut left, mut right) = (vec![0.0_f64; length + 1], vec![0.0; length + 1]);
        (left[0], right[length]) = (3.0, 4.0);
        let sum = reduced(ReduceOp::Adasum, &left, &right);
        assert_eq!((sum[0], sum[length]), (3.0, 4.0));
    }
    let dots = Dots {
        both: 2.0,
        left: 4.0,
        right: 1.0,
    };
    assert_eq!(dots.factors(), (0.75, 0.0));
    assert_eq!(dots.mirrored().factors(), (0.0, 0.75));
    assert_eq!(Dots::from_bytes(&dots.to_bytes()), dots);
    assert_eq!(dots.plus(dots).both, 4.0);
}

#[test]
fn scalar_products_have_the_same_bits_at_every_level() {
    for dtype in [DType::F16, DType::F32, DType::F64] {
        for length in [0, 1, 8, 511, 512, 513, 4099] {
            let number = |seed: u32| -> Vec<f64> {
                (0..length)
                    .map(|index: u32| {
                        f64::from((index * 7919 + seed).wrapping_mul(40_503) % 1013) / 77.0
                    })
                    .collect()
            };
            let as_type = |values: &[f64]| {
                let mut bytes = Aligned::of(&vec![0; values.len() * dtype.size()]);
                convert(
                    dtype,
                    bytes.bytes_mut(),
                    DType::F64,
                    bytemuck::cast_slice(values),
                );
                bytes
            };
            let (left, right) = (as_type(&number(1)), as_type(&number(2)));
            let plain = dots_at(Level::Plain, dtype, left.bytes(), right.bytes());
            for level in Level::available() {
                assert_eq!(dots_at(level, dtype, left.bytes(), right.bytes()), plain);
            }
            let expected: f64 = {
                let mut wide = vec![0_f64; length as usize];
                convert(
                    DType::F64,
                    bytemuck::cast_slice_mut(&mut wide),
                    dtype,
                    left.bytes(),
                );
                wide.iter().map(|value| value * value).sum()
            };
            assert!((plain.left - expected).abs() <= 1e-9 * expected.max(1.0));
        }
    }
}
