//! Kernels of reductions, in bytes of result a second: beside the same loop without the processor's newer instructions,
//! and beside plain copies.

use std::hint::black_box;
use std::time::Instant;

use kolo::collectives::reduce::{Finish, Level, Store, combine_at, combine_many, convert_at, copy};
use kolo::collectives::{DType, ReduceOp};

use crate::report::Figure;
use crate::size;
use crate::stats::median;

/// GB/s of a piece of work over so many bytes: the median of some measurements of about 20 ms each.
fn rate(bytes: usize, mut work: impl FnMut()) -> f64 {
    work();
    let begun = Instant::now();
    work();
    let once = begun.elapsed().as_secs_f64().max(1e-9);
    #[allow(clippy::cast_sign_loss)] // a time is not negative
    let times = ((0.02 / once) as usize).clamp(1, 1_000_000);
    let rates: Vec<f64> = (0..5)
        .map(|_| {
            let begun = Instant::now();
            for _ in 0..times {
                work();
            }
            (bytes * times) as f64 / begun.elapsed().as_secs_f64() / 1e9
        })
        .collect();
    median(&rates)
}

/// Memory that is aligned for every type, and holds ones.
fn buffer(bytes: usize) -> Vec<u64> {
    vec![0x3c00_3f80_3f80_3c00; bytes.div_ceil(8)]
}

fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    bytemuck::cast_slice_mut(words)
}

pub(crate) fn run(sizes: &[u64]) -> Vec<Figure> {
    let mut figures = Vec::new();
    let best = Level::detected();
    let figure = |case: String, value: f64| Figure::new("kernels", case, "rate", "GB/s", value);
    for &size in sizes {
        let bytes = size as usize / 8 * 8;
        let shown = size::show(size);
        eprintln!("{shown}");
        let (mut into, mut from) = (buffer(bytes), buffer(bytes));
        let (into, from) = (bytes_of(&mut into), bytes_of(&mut from));
        for dtype in DType::ALL {
            for op in [ReduceOp::Sum, ReduceOp::Max] {
                if !op.allows(dtype) {
                    continue;
                }
                let mut at = |level| {
                    rate(bytes, || {
                        combine_at(level, dtype, op, black_box(into), black_box(from));
                    })
                };
                let (fast, plain) = (at(best), at(Level::Plain));
                let case = format!("{dtype} {op} {shown}");
                figures.push(figure(case, fast).beside("plain instructions", plain));
            }
        }
        let half = bytes / 2;
        for (to, of) in [
            (DType::F16, DType::F32),
            (DType::Bf16, DType::F32),
            (DType::F32, DType::F16),
            (DType::F32, DType::Bf16),
        ] {
            let (long, short) = if to == DType::F32 {
                (bytes, half)
            } else {
                (half, bytes)
            };
            let mut at = |level| {
                rate(bytes, || {
                    convert_at(
                        level,
                        to,
                        black_box(&mut into[..long]),
                        of,
                        black_box(&from[..short]),
                    );
                })
            };
            let (fast, plain) = (at(best), at(Level::Plain));
            let case = format!("{of} to {to} {shown}");
            figures.push(figure(case, fast).beside("plain instructions", plain));
        }
        let cached = rate(bytes, || {
            copy(black_box(into), black_box(from), Store::Cached);
        });
        let streamed = rate(bytes, || {
            copy(black_box(into), black_box(from), Store::Streaming);
        });
        figures.push(figure(format!("copy {shown} past caches"), streamed).beside("copy", cached));
        for count in [2, 4, 8] {
            let mut sources: Vec<Vec<u64>> = (0..count).map(|_| buffer(bytes)).collect();
            let inputs: Vec<&[u8]> = sources
                .iter_mut()
                .map(|source| &*bytes_of(source))
                .collect();
            for dtype in [DType::F32, DType::F16] {
                let mut by = |store| {
                    rate(bytes, || {
                        let nothing = Finish::NOTHING;
                        let into = black_box(&mut *into);
                        combine_many(
                            dtype,
                            ReduceOp::Sum,
                            into,
                            black_box(&inputs),
                            &nothing,
                            store,
                        );
                    })
                };
                let (chosen, cached) = (by(Store::for_result(bytes)), by(Store::Cached));
                let case = format!("{count} x {dtype} sum {shown}");
                figures.push(figure(case, chosen).beside("through caches", cached));
            }
        }
    }
    figures
}
