//! The description of a matrix product: sizes, types, layouts, and the pointers of a call.
//!
//! Everything is stated for row-major tensors: `D[m, n] = X[m, k] · W[n, k]ᵀ + bias`, where an operand may also be
//! stored with k outermost.

use te_fast_kernels::Fp8;

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::pointers;

/// Scratch memory that cuBLASLt may use, bytes (torch's value on Hopper).
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// How an operand's scale is laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ScaleMode {
    /// A high-precision operand.
    #[default]
    None,
    /// One FP32 scale for the tensor.
    Tensor,
    /// One FP32 scale per 1 × 128 elements along k, stored `(⌈k/128⌉, up4(outer))`.
    Block1d,
    /// One FP32 scale per 128 × 128 elements, stored `(⌈outer/128⌉, up4(⌈k/128⌉))`.
    Block2d,
}

/// One operand's type and layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Element type.
    pub dtype: DType,
    /// Scales.
    pub scale: ScaleMode,
    /// Elements between two rows as stored.
    pub ld: usize,
    /// Stored `[k, outer]` instead of `[outer, k]`; FP8 tensor cores on Hopper do not take it.
    pub k_outermost: bool,
}

impl Operand {
    /// Its FP8 format.
    #[must_use]
    pub const fn as_fp8(&self) -> Option<Fp8> {
        match self.dtype {
            DType::E4m3 => Some(Fp8::E4m3),
            DType::E5m2 => Some(Fp8::E5m2),
            _ => None,
        }
    }
}

/// The epilogue of a GEMM, which changes the result before it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Epilogue {
    /// Nothing beyond the bias.
    #[default]
    None,
    /// GELU, tanh approximation, after the bias.
    Gelu,
    /// `max(x, 0)` after the bias.
    Relu,
}

/// A factor that takes part in a plan's key: equal bits, equal plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor(u32);

impl Factor {
    /// One.
    pub const ONE: Self = Self(0x3f80_0000);

    /// The factor of this value.
    #[must_use]
    pub const fn new(value: f32) -> Self {
        Self(value.to_bits())
    }

    /// The factor's value.
    #[must_use]
    pub const fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// A matrix product, without its pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Contraction length.
    pub k: usize,
    /// First operand, `m × k`.
    pub x: Operand,
    /// Second operand, `n × k`.
    pub w: Operand,
    /// Type of the result; FP8 is stored under a given scale, and its maximum is found.
    pub d: DType,
    /// Elements between two rows of the result.
    pub ldd: usize,
    /// Type of a bias of n elements, added to every row.
    pub bias: Option<DType>,
    /// Factor of the product, before bias and addition.
    pub alpha: Factor,
    /// The epilogue after the bias.
    pub epilogue: Epilogue,
    /// `D += …` instead of `D = …`.
    pub accumulate: bool,
    /// Hopper's faster FP8 accumulation, which keeps fewer bits (TE: no split accumulator).
    pub fast_accumulation: bool,
    /// On the host, FP8 operands: with the bits of Hopper's tensor cores. `TE_FAST_EXACT=1` asks for it everywhere.
    pub exact: bool,
    /// Bytes that every pointer is a multiple of.
    pub alignment: u16,
}

pointers! {
    /// Pointers of one call.
    pub struct GemmPointers {
        /// First operand.
        x,
        /// Its inverse scales, 16-byte aligned; null for high precision.
        x_scale,
        /// Second operand.
        w,
        /// Its inverse scales, likewise.
        w_scale,
        /// Bias, null without.
        bias,
        /// Result.
        d,
        /// Scale of an FP8 result; null for others.
        d_scale,
        /// Set to the maximum of an FP8 result before scaling; null for others.
        d_amax,
        /// [`WORKSPACE_BYTES`] bytes on a GPU; null on the host.
        workspace,
    }
}

impl Problem {
    /// An FP8 operand's k must be a multiple of 16; cuBLAS on Hopper is wrong beyond leading dimensions of 2³¹ bytes.
    pub(crate) fn check(&self) -> Result<()> {
        for (what, operand, outer) in [("x", self.x, self.m), ("w", self.w, self.n)] {
            let inner = if operand.k_outermost { outer } else { self.k };
            if operand.ld < inner {
                return Err(Error::layout(
                    "gemm",
                    "leading dimension",
                    format!("at least {inner} for {what}"),
                    operand.ld,
                ));
            }
            if operand.ld.saturating_mul(operand.dtype.size()) > i32::MAX as usize {
                return Err(Error::unsupported(
                    "gemm",
                    format!("rows of {what} span over 2^31 bytes, which cuBLAS gets wrong on Hopper; split the matrix"),
                ));
            }
            if operand.scale != ScaleMode::None && (operand.k_outermost || !operand.ld.is_multiple_of(16)) {
                return Err(Error::layout(
                    "gemm",
                    "an FP8 operand",
                    format!("stored [outer, k] with a leading dimension that is a multiple of 16 ({what})"),
                    operand.ld,
                ));
            }
        }
        if self.x.dtype == DType::E5m2 && self.w.dtype == DType::E5m2 {
            return Err(Error::unsupported(
                "gemm",
                "cuBLASLt does not multiply E5M2 by E5M2; use E4M3 for one operand",
            ));
        }
        if self.x.scale == ScaleMode::Block2d && self.w.scale == ScaleMode::Block2d {
            return Err(Error::unsupported(
                "gemm",
                "128x128 by 128x128 block scales are not supported; one operand must have 1x128 scales",
            ));
        }
        Ok(())
    }
}
