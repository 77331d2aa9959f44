//! Matrix product on the host: operands are dequantised to FP32 and multiplied by a well-kept SGEMM. FP8 products are
//! exact in FP32, and their sums are more accurate than a GPU's. If the caller wants a GPU's bits, FP8 operands go to
//! [`tensor_core`].

use half::{bf16, f16};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};
use rayon::prelude::*;
use te_fast_kernels::Fp8;

use crate::base::config;
use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::gemm::problem::{Epilogue, Factor, GemmPointers, Operand, Problem, ScaleMode};
use crate::host::activation::gelu;
use crate::host::fp8::{self, E4m3, E5m2, Format};
use crate::host::tensor_core::{self, Accumulation, Rows};

/// Elements along one side of a scale's block.
const BLOCK: usize = 128;

/// Runs `problem`.
///
/// # Errors
/// An element type that no GEMM takes.
pub(crate) fn run(problem: &Problem, io: &GemmPointers<DevPtr<'_>>) -> Result<()> {
    let &Problem { m, n, k, ldd, .. } = problem;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let mut product = vec![0.0_f32; m * n];
    match (problem.x.as_fp8(), problem.w.as_fp8()) {
        (Some(x), Some(w)) if problem.exact || config::exact() => as_tensor_cores(problem, io, [x, w], &mut product),
        _ => {
            let x = load(&problem.x, io.x, io.x_scale, m, k)?;
            let w = load(&problem.w, io.w, io.w_scale, n, k)?;
            multiply(m, n, k, &x, &w, &mut product);
        }
    }
    if problem.x.scale == ScaleMode::Tensor || problem.alpha != Factor::ONE {
        let scales = if problem.x.scale == ScaleMode::Tensor { scalar(io.x_scale) * scalar(io.w_scale) } else { 1.0 };
        let scale = problem.alpha.value() * scales;
        product.par_iter_mut().for_each(|value| *value *= scale);
    }
    if let Some(dtype) = problem.bias {
        let bias = load_row(dtype, io.bias, n)?;
        product.par_chunks_mut(n).for_each(|row| row.iter_mut().zip(&bias).for_each(|(value, bias)| *value += bias));
    }
    match problem.epilogue {
        Epilogue::None => {}
        Epilogue::Relu => product.par_iter_mut().for_each(|value| *value = if *value < 0.0 { 0.0 } else { *value }),
        Epilogue::Gelu => product.par_iter_mut().for_each(|value| *value = gelu(*value).value),
    }
    match problem.d {
        DType::E4m3 => store_fp8::<E4m3>(io, &product, problem),
        DType::E5m2 => store_fp8::<E5m2>(io, &product, problem),
        DType::F32 => store(io.d.slice_mut::<f32>(span(m, n, ldd)), &product, problem, |value| value, |old| old),
        DType::Bf16 => store(io.d.slice_mut::<bf16>(span(m, n, ldd)), &product, problem, bf16::from_f32, bf16::to_f32),
        DType::F16 => store(io.d.slice_mut::<f16>(span(m, n, ldd)), &product, problem, f16::from_f32, f16::to_f32),
        other => return Err(Error::dtype("gemm", "the result", "float32, float16 or bfloat16", other)),
    }
    Ok(())
}

/// The product with the bits of Hopper's tensor cores, block scales included.
fn as_tensor_cores(problem: &Problem, io: &GemmPointers<DevPtr<'_>>, [x, w]: [Fp8; 2], product: &mut [f32]) {
    let &Problem { m, n, k, .. } = problem;
    let (x_ld, w_ld) = (problem.x.ld, problem.w.ld);
    let x = Rows { bytes: io.x.slice(span(m, k, x_ld)), ld: x_ld, format: x };
    let w = Rows { bytes: io.w.slice(span(n, k, w_ld)), ld: w_ld, format: w };
    let (x_scales, w_scales) =
        (BlockScales::of(&problem.x, io.x_scale, m, k), BlockScales::of(&problem.w, io.w_scale, n, k));
    let scale = |row, column, block| x_scales.at(row, block) * w_scales.at(column, block);
    let accumulation = match problem.x.scale {
        ScaleMode::Block1d | ScaleMode::Block2d => Accumulation::Scaled(&scale),
        ScaleMode::None | ScaleMode::Tensor if problem.fast_accumulation => Accumulation::Fast,
        ScaleMode::None | ScaleMode::Tensor => Accumulation::Split,
    };
    tensor_core::multiply(k, &x, &w, n, &accumulation, product);
}

/// Number of elements from the first to the last of a matrix with gaps between its rows.
const fn span(rows: usize, cols: usize, ld: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1) * ld + cols }
}

fn scalar(scale: DevPtr<'_>) -> f32 {
    scale.slice::<f32>(1).first().copied().unwrap_or(1.0)
}

/// `D[m, n] = X[m, k] · W[n, k]ᵀ`, contiguous FP32; rows are split over rayon's threads.
fn multiply(m: usize, n: usize, k: usize, x: &[f32], w: &[f32], d: &mut [f32]) {
    if k == 0 {
        return;
    }
    let rows = m.div_ceil(rayon::current_num_threads()).max(16);
    d.par_chunks_mut(rows * n).zip(x.par_chunks(rows * k)).for_each(|(d, x)| sgemm(n, k, x, w, d));
}

fn sgemm(n: usize, k: usize, x: &[f32], w: &[f32], d: &mut [f32]) {
    let m = d.len() / n;
    let views =
        (ArrayView2::from_shape((m, k), x), ArrayView2::from_shape((n, k), w), ArrayViewMut2::from_shape((m, n), d));
    if let (Ok(x), Ok(w), Ok(mut d)) = views {
        general_mat_mul(1.0, &x, &w.t(), 0.0, &mut d);
    }
}

/// An operand as contiguous FP32 `[outer, k]`; block scales are applied, a tensor's scale is left to the caller.
fn load(operand: &Operand, data: DevPtr<'_>, scales: DevPtr<'_>, outer: usize, k: usize) -> Result<Vec<f32>> {
    let (rows, cols) = if operand.k_outermost { (k, outer) } else { (outer, k) };
    let ld = operand.ld;
    let mut values = vec![0.0_f32; outer * k];
    if values.is_empty() {
        return Ok(values);
    }
    let count = span(rows, cols, ld);
    let place = |values: &mut [f32], get: &(dyn Fn(usize) -> f32 + Sync)| {
        if operand.k_outermost {
            values.par_chunks_mut(k).enumerate().for_each(|(j, row)| {
                row.iter_mut().enumerate().for_each(|(i, value)| *value = get(i * ld + j));
            });
        } else {
            values.par_chunks_mut(k).enumerate().for_each(|(i, row)| {
                row.iter_mut().enumerate().for_each(|(j, value)| *value = get(i * ld + j));
            });
        }
    };
    match operand.dtype {
        DType::F32 => {
            let data = data.slice::<f32>(count);
            place(&mut values, &|i| data[i]);
        }
        DType::F16 => {
            let data = data.slice::<f16>(count);
            place(&mut values, &|i| data[i].to_f32());
        }
        DType::Bf16 => {
            let data = data.slice::<bf16>(count);
            place(&mut values, &|i| data[i].to_f32());
        }
        DType::E4m3 | DType::E5m2 => {
            let table = fp8::decode_table(operand.dtype == DType::E4m3);
            let data = data.slice::<u8>(count);
            place(&mut values, &|i| table[usize::from(data[i])]);
        }
        other => return Err(Error::dtype("gemm", "an operand", "float32, float16, bfloat16 or FP8", other)),
    }
    apply_block_scales(operand, scales, &mut values, outer, k);
    Ok(values)
}

fn apply_block_scales(operand: &Operand, scales: DevPtr<'_>, values: &mut [f32], outer: usize, k: usize) {
    if matches!(operand.scale, ScaleMode::None | ScaleMode::Tensor) {
        return;
    }
    let scales = BlockScales::of(operand, scales, outer, k);
    values.par_chunks_mut(k).enumerate().for_each(|(row, values)| {
        for (block, values) in values.chunks_mut(BLOCK).enumerate() {
            let scale = scales.at(row, block);
            for value in values {
                *value *= scale;
            }
        }
    });
}

/// Block scales of an operand; none for other kinds of scales.
struct BlockScales<'a> {
    scales: &'a [f32],
    square: bool,
    pitch: usize,
}

impl<'a> BlockScales<'a> {
    fn of(operand: &Operand, scales: DevPtr<'a>, outer: usize, k: usize) -> Self {
        let (blocks, square) = (k.div_ceil(BLOCK), operand.scale == ScaleMode::Block2d);
        let (lines, length) = if square { (outer.div_ceil(BLOCK), blocks) } else { (blocks, outer) };
        let pitch = length.next_multiple_of(4);
        let blocked = square || operand.scale == ScaleMode::Block1d;
        Self { scales: scales.slice(if blocked { lines * pitch } else { 0 }), square, pitch }
    }

    fn at(&self, row: usize, block: usize) -> f32 {
        self.scales[if self.square { row / BLOCK * self.pitch + block } else { block * self.pitch + row }]
    }
}

fn load_row(dtype: DType, data: DevPtr<'_>, n: usize) -> Result<Vec<f32>> {
    Ok(match dtype {
        DType::F32 => data.slice::<f32>(n).to_vec(),
        DType::F16 => data.slice::<f16>(n).iter().map(|value| value.to_f32()).collect(),
        DType::Bf16 => data.slice::<bf16>(n).iter().map(|value| value.to_f32()).collect(),
        other => return Err(Error::dtype("gemm", "the bias", "float32, float16 or bfloat16", other)),
    })
}

/// FP8 under the given scale; the maximum before scaling is found, NaN left out.
fn store_fp8<F: Format>(io: &GemmPointers<DevPtr<'_>>, product: &[f32], problem: &Problem) {
    let &Problem { m, n, ldd, .. } = problem;
    let scale = scalar(io.d_scale);
    let amax = f32::from_bits(fp8::amax_bits(product));
    fp8::write_scalar(io.d_amax, amax);
    let d = io.d.slice_mut::<u8>(span(m, n, ldd));
    d.par_chunks_mut(ldd).zip(product.par_chunks(n)).for_each(|(d, product)| {
        d.iter_mut().zip(product).for_each(|(d, &value)| *d = F::encode(canonical(value * scale)));
    });
}

/// The value, and for each NaN the one that a GPU's arithmetic gives.
const fn canonical(value: f32) -> f32 {
    if value.is_nan() { tensor_core::NAN } else { value }
}

fn store<T: Copy + Send + Sync>(
    d: &mut [T],
    product: &[f32],
    problem: &Problem,
    encode: impl Fn(f32) -> T + Sync,
    decode: impl Fn(T) -> f32 + Sync,
) {
    let n = problem.n;
    d.par_chunks_mut(problem.ldd).zip(product.par_chunks(n)).for_each(|(d, product)| {
        for (d, &value) in d.iter_mut().zip(product) {
            *d = encode(canonical(if problem.accumulate { decode(*d) + value } else { value }));
        }
    });
}
