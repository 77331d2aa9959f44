//! Host kernels of `cuda/activation/activation.cu` and the curves that `host/activation_backward.rs` shares. The formulas are
//! those of `cuda/activation/curves.cuh`; results differ from the GPU's by the last bits of 2^x and 1/x.

use half::{bf16, f16};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::host::cast::transpose_with;
use crate::host::fp8::{Real, is_noop, read_scalar, write_scalar};
use crate::host::rows::{Outputs, Values, for_row_groups, raise, row_bytes, write_measured};
use crate::ops::activation::{ActivationParams, Constants, Curve};

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// `2 k` with `k = sqrt(2 / pi)`.
const GELU_LINEAR: f32 = 1.595_769;
/// `2 k 0.044715`.
const GELU_CUBIC: f32 = 0.071_354_82;

/// A curve and its constants.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    curve: Curve,
    constants: Constants,
}

/// A value and its derivative.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) value: f32,
    pub(crate) slope: f32,
}

/// `sigmoid(u)` and `1 - sigmoid(u)`, both to full relative precision.
fn sigmoid(u: f32) -> (f32, f32) {
    let z = (-LOG2_E * u.abs()).exp2();
    let near_one = 1.0 / (1.0 + z);
    if u >= 0.0 { (near_one, z * near_one) } else { (z * near_one, near_one) }
}

fn tanh(y: f32) -> Pair {
    let z = (-2.0 * LOG2_E * y.abs()).exp2();
    let inverse = 1.0 / (1.0 + z);
    Pair { value: y.tanh(), slope: 4.0 * z * inverse * inverse }
}

/// `g * sigmoid(alpha g)`.
fn swish(g: f32, alpha: f32) -> Pair {
    let (s, rest) = sigmoid(alpha * g);
    let value = g * s;
    Pair { value, slope: alpha * rest * value + s }
}

/// GELU in its tanh approximation, which cuBLAS has in its epilogue, too.
pub(crate) fn gelu(g: f32) -> Pair {
    let (s, rest) = sigmoid(g * (GELU_CUBIC * (g * g) + GELU_LINEAR));
    let value = g * s;
    // If the square is capped, the product with `rest` is correctly 0.
    let slope = 3.0 * GELU_CUBIC * (g * g).min(1e10) + GELU_LINEAR;
    Pair { value, slope: value * rest * slope + s }
}

impl Function {
    pub(crate) fn new(number: u32, constants: Constants) -> Result<Self> {
        match Curve::from_number(number) {
            Some(curve) => Ok(Self { curve, constants }),
            None => Err(Error::state("activation", format_args!("there is no curve {number}"))),
        }
    }

    /// The activated half and its derivative.
    pub(crate) fn activated(&self, g: f32) -> Pair {
        let c = &self.constants;
        match self.curve {
            Curve::Gelu => gelu(g),
            Curve::Swish => swish(g, c.alpha),
            Curve::Clamped => {
                let Pair { value, slope } = swish(if g > c.limit { c.limit } else { g }, c.alpha);
                Pair { value, slope: if g <= c.limit { slope } else { 0.0 } }
            }
            Curve::Relu | Curve::SquaredRelu if g <= 0.0 => Pair { value: 0.0, slope: 0.0 },
            Curve::Relu => Pair { value: g, slope: 1.0 },
            Curve::SquaredRelu => Pair { value: g * g, slope: 2.0 * g },
            Curve::Sigmoid => {
                let (value, rest) = sigmoid(g);
                Pair { value, slope: value * rest }
            }
            Curve::Situ => {
                let bounded = tanh(g * (1.0 / c.beta1));
                let (s, rest) = sigmoid(g);
                let value = c.beta1 * bounded.value * s;
                Pair { value, slope: value * rest + bounded.slope * s }
            }
        }
    }

    /// The linear half and its derivative.
    pub(crate) fn linear(&self, l: f32) -> Pair {
        let c = &self.constants;
        match self.curve {
            Curve::Clamped => {
                let low = if l < -c.limit { -c.limit } else { l };
                let value = if low > c.limit { c.limit } else { low } + c.offset;
                Pair { value, slope: if l.abs() <= c.limit { 1.0 } else { 0.0 } }
            }
            Curve::Situ => {
                let bounded = tanh(l * (1.0 / c.beta2));
                Pair { value: c.beta2 * bounded.value, slope: bounded.slope }
            }
            _ => Pair { value: l, slope: 1.0 },
        }
    }
}

/// The column of the input for column `col` of the result.
#[derive(Clone, Copy)]
pub(crate) struct Halves {
    pub(crate) cols: usize,
    pub(crate) interleave: usize,
    pub(crate) count: usize,
}

impl Halves {
    pub(crate) const fn stride(self) -> usize {
        self.count * self.cols
    }

    pub(crate) const fn column(self, col: usize, half: usize) -> usize {
        match col.checked_div(self.interleave) {
            None => col + half * self.cols,
            Some(block) => col + (block + half) * self.interleave,
        }
    }
}

/// Runs `activation_*` and `activation_gated_*`.
///
/// # Errors
/// An id or a curve that does not take these parameters.
pub(crate) fn run(p: &ActivationParams<'_>, id: KernelId) -> Result<()> {
    let (count, float) = match id {
        KernelId::Activation(float) => (1, float),
        KernelId::ActivationGated(float) => (2, float),
        _ => return Err(Error::state("activation", id.symbol())),
    };
    let function = Function::new(p.curve, p.constants)?;
    let halves = Halves { cols: p.cols as usize, interleave: p.interleave as usize, count };
    match float {
        Float::F32 => activation::<f32>(p, &function, halves),
        Float::F16 => activation::<f16>(p, &function, halves),
        Float::Bf16 => activation::<bf16>(p, &function, halves),
    }
    Ok(())
}

fn activation<T: Real>(p: &ActivationParams<'_>, function: &Function, halves: Halves) {
    if is_noop(p.noop) {
        return;
    }
    let (rows, cols, ld_t) = (p.rows as usize, p.cols as usize, p.ld_t as usize);
    let x = p.x.slice::<T>(rows * halves.stride());
    let scale = read_scalar(p.scale).unwrap_or(1.0);
    write_scalar(p.scale_inv, 1.0 / scale);
    let mut spare = Vec::new();
    let bytes = row_bytes(p.out, p.out_t, &mut spare, rows * cols);
    let outputs = Outputs { high: p.y, bytes, scale, e5m2: p.e5m2 != 0, stride: cols, rounds: !p.measured.is_null() };
    let factors = Values::new(p.row_scale, p.row_scale_kind);
    let largest = for_row_groups(rows, x.len(), |group| {
        let mut y = vec![0.0_f32; cols];
        group
            .map(|row| {
                let (line, factor) = (&x[row * halves.stride()..][..halves.stride()], factors.get(row));
                for (col, y) in y.iter_mut().enumerate() {
                    let mut value = function.activated(line[halves.column(col, 0)].to_f32()).value;
                    if halves.count == 2 {
                        value *= function.linear(line[halves.column(col, 1)].to_f32()).value;
                    }
                    *y = value * factor;
                }
                outputs.store::<T>(row, &y)
            })
            .fold(0, u32::max)
    });
    raise(p.amax, largest.iter().copied());
    write_measured(p.measured, &p.rule, largest.into_iter());
    let bytes = bytes.slice::<u8>(rows * cols);
    transpose_with(p.out_t, rows, cols, ld_t, |row, col| bytes[row * cols + col]);
}
