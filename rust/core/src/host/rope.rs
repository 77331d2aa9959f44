//! Host kernel of `cuda/attention/rope.cu`.

use half::{bf16, f16};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host::fp8::Real;
use crate::ops::rope::{RotateParams, RotatePart};

/// Runs `rotate_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &RotateParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::Rotate(Float::F32) => rotate::<f32>(p),
        KernelId::Rotate(Float::F16) => rotate::<f16>(p),
        KernelId::Rotate(Float::Bf16) => rotate::<bf16>(p),
        _ => return Err(Error::state("rotate", id.symbol())),
    }
    Ok(())
}

fn rotate<T: Real>(p: &RotateParams<'_>) {
    let tensors =
        [(p.q, p.q_out, p.q_cos, p.q_sin), (p.k, p.k_out, p.k_cos, p.k_sin), (p.v, p.v_out, p.v_cos, p.v_sin)];
    for (part, (input, output, cos, sin)) in p.part.iter().zip(tensors) {
        for row in 0..p.rows[0] * p.rows[1] {
            let rows = [row / p.rows[1], row % p.rows[1]];
            let at = place(&part.wave_stride, &rows);
            let width = part.width as usize;
            let waves = (f32s(cos, at, width), f32s(sin, at, width));
            rotate_row::<T>(p, part, (input, output), rows, waves);
        }
    }
}

/// Offset of an element: strides times indices.
fn place(strides: &[i64], numbers: &[u64]) -> usize {
    strides.iter().zip(numbers).map(|(&stride, &number)| stride as usize * number as usize).sum()
}

fn f32s(wave: DevPtr<'_>, at: usize, width: usize) -> &[f32] {
    wave.offset(at * size_of::<f32>()).slice(width)
}

/// The heads of one row, each through a copy, since the output may be the input.
fn rotate_row<T: Real>(
    p: &RotateParams<'_>,
    part: &RotatePart,
    (input, output): (DevPtr<'_>, DevPtr<'_>),
    rows: [u64; 2],
    (cos, sin): (&[f32], &[f32]),
) {
    let (channels, pairs) = (p.channels as usize, cos.len() / 2);
    for head in 0..u64::from(part.heads) {
        let group = u64::from(part.per_group);
        let numbers = [rows[0], rows[1], head / group, head % group];
        let from = input.offset(place(&part.in_stride, &numbers) * size_of::<T>());
        let to = output.offset(place(&part.out_stride, &numbers) * size_of::<T>());
        let mut values: Vec<T> = from.slice::<T>(channels).to_vec();
        for pair in 0..pairs {
            let (a, b) = if p.interleaved == 0 { (pair, pair + pairs) } else { (2 * pair, 2 * pair + 1) };
            let (x, y) = (values[a].to_f32(), values[b].to_f32());
            let (sin_a, sin_b) = if p.transposed == 0 { (sin[a], sin[b]) } else { (sin[b], sin[a]) };
            values[a] = T::from_f32(x * cos[a] + y * sin_a);
            values[b] = T::from_f32(y * cos[b] + x * sin_b);
        }
        to.slice_mut::<T>(channels).copy_from_slice(&values);
    }
}
