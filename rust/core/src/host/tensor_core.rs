//! FP8 products with the bits of Hopper's tensor cores.
//!
//! The cores add 32 products at a time to the previous sum, in fixed point: every term is cut off, towards zero, 13
//! bits behind the point of the largest one, and so is the sum behind its own ("MMA-Sim", arXiv 2511.10909; confirmed
//! bit for bit on an H200, `tests/gpu/test_exact.py`). Fast accumulation is one chain over all of k; split accumulation
//! adds the chains of every 128 in FP32.

use rayon::prelude::*;
use te_fast_kernels::Fp8;

/// Products that the cores sum at a time.
const STEP: usize = 32;
/// Summed elements after which split accumulation and block scales leave the cores.
const BLOCK: usize = 128;
/// Bits behind the point of the largest term that are kept.
const FRACTION: i32 = 13;
/// The cores' result for NaN.
pub(crate) const NAN: f32 = f32::from_bits(0x7fff_ffff);
/// The exponent of a sum that is zero, below every other one.
const NOTHING: i32 = -1 << 16;

/// An FP8 number as the cores see it: `significand * 2^(exponent - 3)`, not normalised.
#[derive(Clone, Copy, Default)]
struct Term {
    significand: i16,
    exponent: i16,
    /// NaN or infinite; `significand` is the sign.
    special: Special,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Special {
    #[default]
    None,
    Infinite,
    Nan,
}

/// Every byte of a format.
struct Terms([Term; 256]);

impl Terms {
    fn of(format: Fp8) -> Self {
        Self(std::array::from_fn(|byte| Self::decode(format, byte as i16)))
    }

    fn decode(format: Fp8, byte: i16) -> Term {
        let (bits, bias) = match format {
            Fp8::E4m3 => (3, 7),
            Fp8::E5m2 => (2, 15),
        };
        let (exponent, mantissa) = ((byte & 0x7f) >> bits, byte & ((1 << bits) - 1));
        let sign = if byte & 0x80 == 0 { 1 } else { -1 };
        let special = match format {
            Fp8::E4m3 if byte & 0x7f == 0x7f => Special::Nan,
            Fp8::E5m2 if exponent == 31 && mantissa == 0 => Special::Infinite,
            Fp8::E5m2 if exponent == 31 => Special::Nan,
            _ => Special::None,
        };
        if special != Special::None {
            return Term { significand: sign, exponent: 0, special };
        }
        let hidden = if exponent == 0 { 0 } else { 1 << bits };
        Term { significand: (sign * (hidden + mantissa)) << (3 - bits), exponent: exponent.max(1) - bias, special }
    }
}

/// A sum in the cores: `significand * 2^(exponent - 13)`, its magnitude below 2^14 and, unless zero, at least 2^13.
#[derive(Clone, Copy)]
struct Sum {
    significand: i64,
    exponent: i32,
    /// An infinity or NaN, which replaces the sum.
    special: Option<f32>,
}

impl Sum {
    const ZERO: Self = Self { significand: 0, exponent: NOTHING, special: None };

    fn value(self) -> f32 {
        let finite = self.significand as f64 * f64::from(self.exponent - FRACTION).exp2();
        self.special.unwrap_or(finite as f32)
    }

    /// The sum after 32 more products.
    fn step(self, a: &[Term], b: &[Term]) -> Self {
        let special = self.special_of(a, b);
        if special.is_some() {
            return Self { special, ..self };
        }
        let terms = a.iter().zip(b).map(|(a, b)| {
            let significand = i64::from(a.significand) * i64::from(b.significand);
            (significand, i32::from(a.exponent) + i32::from(b.exponent))
        });
        let largest = |most: i32, (_, exponent)| most.max(exponent);
        let exponent = terms.clone().filter(|&(significand, _)| significand != 0).fold(self.exponent, largest);
        if exponent == NOTHING {
            return Self::ZERO;
        }
        // Products have 6 bits behind the point.
        let products = terms.map(|(significand, at)| cut(significand << (FRACTION - 6), exponent - at));
        Self::normalised(cut(self.significand, exponent - self.exponent) + products.sum::<i64>(), exponent)
    }

    fn normalised(significand: i64, exponent: i32) -> Self {
        if significand == 0 {
            return Self::ZERO;
        }
        let shift = 63 - FRACTION - significand.unsigned_abs().leading_zeros() as i32;
        let significand = if shift < 0 { significand << -shift } else { cut(significand, shift) };
        Self { significand, exponent: exponent + shift, special: None }
    }

    fn special_of(self, a: &[Term], b: &[Term]) -> Option<f32> {
        let products = a.iter().zip(b).filter(|(a, b)| a.special != Special::None || b.special != Special::None);
        products.fold(self.special, |sum, (a, b)| {
            let infinite = f32::INFINITY.copysign(f32::from(a.significand) * f32::from(b.significand));
            let zero = a.significand == 0 || b.significand == 0;
            let nan = zero || a.special == Special::Nan || b.special == Special::Nan;
            Some(match sum {
                Some(sum) if sum.to_bits() != infinite.to_bits() => NAN,
                _ if nan => NAN,
                _ => infinite,
            })
        })
    }
}

/// `significand / 2^places`, towards zero.
fn cut(significand: i64, places: i32) -> i64 {
    let magnitude = significand.unsigned_abs().checked_shr(places as u32).unwrap_or(0) as i64;
    if significand < 0 { -magnitude } else { magnitude }
}

/// An operand, a row for each outer index.
pub(crate) struct Rows<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) ld: usize,
    pub(crate) format: Fp8,
}

impl Rows<'_> {
    /// All rows as terms, their ends filled with zeros up to whole steps.
    fn terms(&self, rows: usize, k: usize) -> Vec<Term> {
        let table = Terms::of(self.format);
        let length = k.next_multiple_of(STEP);
        let mut terms = vec![Term::default(); rows * length];
        for (row, terms) in terms.chunks_mut(length.max(1)).enumerate() {
            let bytes = &self.bytes[row * self.ld..row * self.ld + k];
            terms.iter_mut().zip(bytes).for_each(|(term, &byte)| *term = table.0[usize::from(byte)]);
        }
        terms
    }
}

/// How the sums of blocks of 128 are combined.
pub(crate) enum Accumulation<'a> {
    /// One chain.
    Fast,
    /// Added in FP32.
    Split,
    /// Added in FP32 under a scale of row, column and block.
    Scaled(&'a (dyn Fn(usize, usize, usize) -> f32 + Sync)),
}

/// `product[m, n] = x[m, k] · w[n, k]ᵀ`, before scales of whole tensors.
pub(crate) fn multiply(
    k: usize,
    x: &Rows<'_>,
    w: &Rows<'_>,
    n: usize,
    accumulation: &Accumulation<'_>,
    product: &mut [f32],
) {
    let m = product.len() / n.max(1);
    let (x, w) = (x.terms(m, k), w.terms(n, k));
    let length = k.next_multiple_of(STEP).max(1);
    product.par_chunks_mut(n.max(1)).zip(x.par_chunks(length)).enumerate().for_each(|(row, (out, x))| {
        for (column, (out, w)) in out.iter_mut().zip(w.chunks(length)).enumerate() {
            *out = dot(x, w, row, column, accumulation);
        }
    });
}

fn chain(x: &[Term], w: &[Term]) -> f32 {
    let steps = x.chunks(STEP).zip(w.chunks(STEP));
    steps.fold(Sum::ZERO, |sum, (x, w)| sum.step(x, w)).value()
}

fn dot(x: &[Term], w: &[Term], row: usize, column: usize, accumulation: &Accumulation<'_>) -> f32 {
    if let Accumulation::Fast = accumulation {
        return chain(x, w);
    }
    let blocks = x.chunks(BLOCK).zip(w.chunks(BLOCK)).enumerate();
    blocks.fold(0.0, |sum, (block, (x, w))| match accumulation {
        Accumulation::Scaled(scale) => chain(x, w).mul_add(scale(row, column, block), sum),
        _ => sum + chain(x, w),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fp8::decode_table;

    #[test]
    fn terms_are_the_numbers() {
        for (format, e4m3) in [(Fp8::E4m3, true), (Fp8::E5m2, false)] {
            for (term, &value) in Terms::of(format).0.iter().zip(decode_table(e4m3)) {
                match term.special {
                    Special::None => {
                        let number = f32::from(term.significand) * f32::from(term.exponent - 3).exp2();
                        // The cores have no negative zero.
                        assert_eq!(number.to_bits(), (value + 0.0).to_bits());
                    }
                    Special::Infinite => assert!(value.is_infinite()),
                    Special::Nan => assert!(value.is_nan()),
                }
            }
        }
    }

    #[test]
    fn small_integers_are_exact_and_small_terms_are_cut_off() {
        let one = Terms::of(Fp8::E4m3).0[0x38];
        let small = Terms::of(Fp8::E4m3).0[0x01]; // 2^-9
        let mut a = [one; STEP];
        assert_eq!(Sum::ZERO.step(&a, &a).value().to_bits(), 32.0_f32.to_bits());
        a[1..].fill(small);
        // 2^-18 is below the 13 bits after the point of 1.
        assert_eq!(Sum::ZERO.step(&a, &a).value().to_bits(), 1.0_f32.to_bits());
        let sum = Sum::ZERO.step(&a[1..], &a[1..]).value();
        assert_eq!(sum.to_bits(), (31.0 * (-18.0_f32).exp2()).to_bits());
    }
}
