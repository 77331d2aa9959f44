//! Helpers of host kernels that work row by row: values per row, destinations of a row, and tasks.

use half::{bf16, f16};
use rayon::prelude::*;
use te_fast_kernels::Float;

use crate::base::pointer::DevPtr;
use crate::host::fp8::{E4m3, E5m2, Format, PARALLEL_FROM, Real, magnitude_bits, scale_from_amax, write_scalar};
use crate::ops::amax::ScaleNumbers;

/// Rows that one task works on.
pub(crate) const ROWS: usize = 16;

/// A tensor of a type known at run time.
#[derive(Clone, Copy)]
pub(crate) struct Values<'a> {
    data: DevPtr<'a>,
    float: Float,
}

impl<'a> Values<'a> {
    pub(crate) const fn new(data: DevPtr<'a>, kind: u32) -> Self {
        let float = match kind {
            0 => Float::F32,
            1 => Float::F16,
            _ => Float::Bf16,
        };
        Self { data, float }
    }

    /// An element; 1 if there is no tensor.
    pub(crate) fn get(self, index: usize) -> f32 {
        if self.data.is_null() {
            return 1.0;
        }
        let one = self.data.offset(index * self.float.size());
        match self.float {
            Float::F32 => one.slice::<f32>(1)[0],
            Float::F16 => one.slice::<f16>(1)[0].to_f32(),
            Float::Bf16 => one.slice::<bf16>(1)[0].to_f32(),
        }
    }

    /// Writes an element, rounded to the type; nothing for null.
    pub(crate) fn set(self, index: usize, value: f32) {
        if self.data.is_null() {
            return;
        }
        let one = self.data.offset(index * self.float.size());
        match self.float {
            Float::F32 => one.slice_mut::<f32>(1)[0] = value,
            Float::F16 => one.slice_mut::<f16>(1)[0] = f16::from_f32(value),
            Float::Bf16 => one.slice_mut::<bf16>(1)[0] = bf16::from_f32(value),
        }
    }
}

/// The destination of one tensor: rounded to its type, as FP8 bytes, or both.
pub(crate) struct Outputs<'a> {
    pub(crate) high: DevPtr<'a>,
    pub(crate) bytes: DevPtr<'a>,
    pub(crate) scale: f32,
    pub(crate) e5m2: bool,
    /// Elements of a row.
    pub(crate) stride: usize,
    /// Magnitudes are those of the rounded values.
    pub(crate) rounds: bool,
}

impl Outputs<'_> {
    /// Stores one row; returns the bits of its largest magnitude.
    pub(crate) fn store<T: Real>(&self, row: usize, values: &[f32]) -> u32 {
        let first = row * self.stride;
        let high = self.high.offset(first * size_of::<T>()).slice_mut::<T>(values.len());
        high.iter_mut().zip(values).for_each(|(out, &value)| *out = T::from_f32(value));
        let encode = if self.e5m2 { E5m2::encode } else { E4m3::encode };
        let bytes = self.bytes.offset(first).slice_mut::<u8>(values.len());
        bytes.iter_mut().zip(values).for_each(|(out, &value)| *out = encode(value * self.scale));
        if self.rounds {
            return values.iter().map(|&value| magnitude_bits(T::from_f32(value))).fold(0, u32::max);
        }
        values.iter().map(|&value| magnitude_bits(value)).fold(0, u32::max)
    }
}

/// Runs `task` for every group of [`ROWS`] rows, in parallel for many `elements`; results are in order.
pub(crate) fn for_row_groups<R: Send>(
    rows: usize,
    elements: usize,
    task: impl Fn(std::ops::Range<usize>) -> R + Sync,
) -> Vec<R> {
    let group = |index: usize| task(index * ROWS..rows.min((index + 1) * ROWS));
    let groups = rows.div_ceil(ROWS);
    if elements < PARALLEL_FROM {
        (0..groups).map(group).collect()
    } else {
        (0..groups).into_par_iter().map(group).collect()
    }
}

/// The row layout if there is one, else temporary bytes for the transposed layout.
pub(crate) fn row_bytes<'a>(out: DevPtr<'a>, out_t: DevPtr<'_>, spare: &'a mut Vec<u8>, len: usize) -> DevPtr<'a> {
    if !out.is_null() || out_t.is_null() {
        return out;
    }
    spare.resize(len, 0);
    DevPtr::from_slice(spare)
}

/// Writes the scale that follows from the largest of some magnitudes; nothing for null.
pub(crate) fn write_measured(measured: DevPtr<'_>, rule: &ScaleNumbers, bits: impl Iterator<Item = u32>) {
    let amax = f32::from_bits(bits.fold(0, u32::max));
    write_scalar(measured, scale_from_amax(amax, rule.fp8_max, rule.eps, f32::MAX, rule.pow2 != 0));
}

/// Raises `amax` to the largest of some magnitudes.
pub(crate) fn raise(amax: DevPtr<'_>, bits: impl Iterator<Item = u32>) {
    if let [slot] = amax.slice_mut::<u32>(1) {
        *slot = bits.fold(*slot, u32::max);
    }
}
