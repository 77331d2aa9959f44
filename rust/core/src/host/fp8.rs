//! FP8 conversion on the CPU and the scale formula, with the bits of `cuda/common/fp8.cuh` and `math.cuh`.
//! Host kernels are generic over [`Real`] and [`Format`]; `dispatch_types!` picks the instance from a kernel's id.

use std::sync::OnceLock;

use half::{bf16, f16};
use te_fast_kernels::Fp8;

use crate::base::pointer::{DevPtr, Element};

/// Below this many elements a host kernel stays on its thread: handing work to rayon costs more.
pub(crate) const PARALLEL_FROM: usize = 1 << 15;

/// Element type of a high-precision tensor.
pub(crate) trait Real: Element {
    /// Largest finite value.
    const MAX: f32;
    /// The value, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest even.
    fn from_f32(value: f32) -> Self;
}

impl Real for f32 {
    const MAX: f32 = f32::MAX;
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Real for f16 {
    const MAX: f32 = 65504.0;
    #[inline]
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Real for bf16 {
    const MAX: f32 = f32::from_bits(0x7f7f_0000);
    #[inline]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// An FP8 format.
pub(crate) trait Format: Send + Sync + 'static {
    /// The format as data.
    const FP8: Fp8;
    /// Stored bits of the mantissa.
    const MANTISSA: u32;
    /// Bias of the exponent.
    const BIAS: u32;

    /// Saturating conversion to nearest even; infinity saturates, NaN of either sign becomes 0x7F.
    #[inline]
    fn encode(value: f32) -> u8 {
        let shift = 23 - Self::MANTISSA;
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let clamped = magnitude.min(Self::FP8.max().to_bits());
        let rounded = clamped + ((1 << (shift - 1)) - 1) + ((clamped >> shift) & 1);
        let normal = (rounded >> shift).wrapping_sub((127 - Self::BIAS) << Self::MANTISSA);
        // The sum's last place is the smallest subnormal, so the addition rounds to a multiple of it.
        let magic = (127 + 23 - (Self::BIAS - 1 + Self::MANTISSA)) << 23;
        let subnormal = (f32::from_bits(clamped) + f32::from_bits(magic)).to_bits().wrapping_sub(magic);
        let min_normal = (127 - Self::BIAS + 1) << 23;
        let finite = if clamped >= min_normal { normal } else { subnormal } | ((bits >> 24) & 0x80);
        if magnitude > 0x7f80_0000 { 0x7f } else { finite as u8 }
    }
}

/// 4 exponent bits, 3 mantissa bits, no infinity.
pub(crate) struct E4m3;

impl Format for E4m3 {
    const FP8: Fp8 = Fp8::E4m3;
    const MANTISSA: u32 = 3;
    const BIAS: u32 = 7;
}

/// 5 exponent bits, 2 mantissa bits.
pub(crate) struct E5m2;

impl Format for E5m2 {
    const FP8: Fp8 = Fp8::E5m2;
    const MANTISSA: u32 = 2;
    const BIAS: u32 = 15;
}

/// The value of every FP8 byte, of E4M3 or else of E5M2.
pub(crate) fn decode_table(e4m3: bool) -> &'static [f32; 256] {
    static TABLES: [OnceLock<[f32; 256]>; 2] = [OnceLock::new(), OnceLock::new()];
    TABLES[usize::from(e4m3)].get_or_init(|| {
        std::array::from_fn(|byte| if e4m3 { decode_e4m3(byte as u8) } else { decode_e5m2(byte as u8) })
    })
}

fn decode_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2.0_f32.powi(-9),
        _ => (8.0 + mantissa) * 2.0_f32.powi(exponent - 10),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// E5M2 is the upper byte of binary16.
fn decode_e5m2(byte: u8) -> f32 {
    f16::from_bits(u16::from(byte) << 8).to_f32()
}

/// Bits of `|value|` if it is a number, else 0: they order like the magnitudes, and NaN never counts.
#[inline]
pub(crate) fn magnitude_bits<T: Real>(value: T) -> u32 {
    let bits = value.to_f32().to_bits() & 0x7fff_ffff;
    if bits > 0x7f80_0000 { 0 } else { bits }
}

/// Bits of the largest magnitude.
#[inline]
pub(crate) fn amax_bits<T: Real>(values: &[T]) -> u32 {
    values.iter().fold(0, |amax, &value| amax.max(magnitude_bits(value)))
}

/// `fp8_max / max(amax, eps)`, 1 where that has no meaning, `for_inf` where it overflows, a power of two on request.
pub(crate) fn scale_from_amax(amax: f32, fp8_max: f32, eps: f32, for_inf: f32, pow2: bool) -> f32 {
    let amax = if amax < eps { eps } else { amax };
    if amax.is_nan() || amax <= 0.0 || amax.is_infinite() {
        return 1.0;
    }
    let quotient = fp8_max / amax;
    let scale = if quotient.is_infinite() { for_inf } else { quotient };
    if pow2 { f32::from_bits(scale.to_bits() & 0xff80_0000) } else { scale }
}

/// Whether the kernel must leave every output as it is.
pub(crate) fn is_noop(flag: DevPtr<'_>) -> bool {
    flag.slice::<f32>(1).first().is_some_and(|value| value.to_bits() == 1.0_f32.to_bits())
}

/// The scalar behind `pointer`; `None` for null.
pub(crate) fn read_scalar(pointer: DevPtr<'_>) -> Option<f32> {
    pointer.slice::<f32>(1).first().copied()
}

/// Writes the scalar behind `pointer`, unless it is null.
pub(crate) fn write_scalar(pointer: DevPtr<'_>, value: f32) {
    if let [slot] = pointer.slice_mut::<f32>(1) {
        *slot = value;
    }
}

/// Calls `$function::<In, Out>($arguments)` for a high-precision and an FP8 type that are known at run time.
macro_rules! dispatch_types {
    ($float:expr, $fp8:expr, $function:ident($($argument:expr),*)) => {{
        use half::{bf16, f16};
        use te_fast_kernels::{Float, Fp8};
        use $crate::host::fp8::{E4m3, E5m2};
        match ($float, $fp8) {
            (Float::F32, Fp8::E4m3) => $function::<f32, E4m3>($($argument),*),
            (Float::F32, Fp8::E5m2) => $function::<f32, E5m2>($($argument),*),
            (Float::F16, Fp8::E4m3) => $function::<f16, E4m3>($($argument),*),
            (Float::F16, Fp8::E5m2) => $function::<f16, E5m2>($($argument),*),
            (Float::Bf16, Fp8::E4m3) => $function::<bf16, E4m3>($($argument),*),
            (Float::Bf16, Fp8::E5m2) => $function::<bf16, E5m2>($($argument),*),
        }
    }};
}
pub(crate) use dispatch_types;

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest of all finite codes, ties to the even one: a slow and simple reference.
    fn nearest<F: Format>(value: f32) -> u8 {
        let table = decode_table(F::FP8 == Fp8::E4m3);
        let sign = u8::from(value.is_sign_negative()) << 7;
        let magnitude = f64::from(value.abs().min(F::FP8.max()));
        let distance = |code: u8| (f64::from(table[usize::from(code)]) - magnitude).abs();
        let codes = (0_u8..0x7f).filter(|&code| table[usize::from(code)].is_finite());
        codes.min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap_or(0) | sign
    }

    fn check<F: Format>() {
        for upper in 0..=u16::MAX {
            for lower in [0_u32, 1, 0x8000, 0xffff] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                let expected = if value.is_nan() { 0x7f } else { nearest::<F>(value) };
                assert_eq!(F::encode(value), expected, "{value}");
            }
        }
    }

    #[test]
    fn encode_is_the_nearest_code() {
        check::<E4m3>();
        check::<E5m2>();
    }

    #[test]
    fn decoded_codes_encode_to_themselves() {
        for code in 0..=255_u8 {
            let value = decode_table(true)[usize::from(code)];
            assert_eq!(E4m3::encode(value), if value.is_nan() { 0x7f } else { code });
        }
    }

    #[test]
    fn scale_takes_one_where_amax_has_no_meaning() {
        for amax in [0.0, f32::INFINITY, f32::NAN] {
            assert_eq!(scale_from_amax(amax, 448.0, 0.0, f32::MAX, true).to_bits(), 1.0_f32.to_bits());
        }
        assert_eq!(scale_from_amax(1e-45, 448.0, 0.0, 65504.0, false).to_bits(), 65504.0_f32.to_bits());
        assert_eq!(scale_from_amax(1.0, 448.0, 0.0, f32::MAX, true).to_bits(), 256.0_f32.to_bits());
    }
}
