//! FP8 back to high precision, under one scale or block scales.

use te_fast_kernels::constants::common::VECTOR;
use te_fast_kernels::constants::quantize::{self, SPAN, THREADS};
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::cast_block::{BlockShape, scale_shape};
use crate::{params, pointers};

params! {
    /// Parameters of `dequantize_*`, `dequantize_1d_*` and `dequantize_2d_*`.
    pub struct DequantizeParams<'a> [quantize::DEQUANTIZE_PARAMS_BYTES] for Dequantize | Dequantize1d | Dequantize2d => host::dequantize::run {
        ..DequantizePointers,
        /// Rows.
        pub rows: u64,
        /// Columns.
        pub cols: u64,
        /// Leading dimension of `q`.
        pub ld: u64,
        /// Last dimension of block scales.
        pub scale_ld: u64,
    }
}

/// The description of a dequantisation. A transposed layout `[cols, ld_t]` is described as a tensor of its own, with
/// columns as `rows` and rows as `cols`, and its result is transposed, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DequantizeSpec {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Leading dimension of the FP8 bytes.
    pub ld: usize,
    /// Type of the input.
    pub input: Fp8,
    /// Type of the output.
    pub output: Float,
    /// Shape of a scaling block; `None` for one scale.
    pub block: Option<BlockShape>,
}

pointers! {
    /// Tensors of one dequantisation.
    pub struct DequantizePointers {
        /// FP8 bytes.
        q,
        /// [`DequantizePlan::out_bytes`].
        out,
        /// One f32, or the block scales.
        scale_inv,
    }
}

/// A checked dequantisation.
#[derive(Clone, Copy, Debug)]
pub struct DequantizePlan {
    spec: DequantizeSpec,
    kernel: KernelId,
    grid: Grid,
    scale_ld: usize,
}

impl DequantizePlan {
    /// Checks `spec` and picks the kernel.
    ///
    /// # Errors
    /// A leading dimension below the columns, or a shape beyond what a launch can index.
    pub fn new(spec: DequantizeSpec) -> Result<Self> {
        if spec.ld < spec.cols {
            return Err(Error::shape("dequantize", "ld", format_args!("at least cols = {}", spec.cols), spec.ld));
        }
        let blocks = spec.cols.div_ceil(VECTOR).checked_mul(spec.rows).map(|groups| groups.div_ceil(SPAN / VECTOR));
        let Some(blocks) = blocks.filter(|&blocks| i32::try_from(blocks).is_ok()) else {
            let got = format_args!("{} x {}", spec.rows, spec.cols).to_string();
            return Err(Error::shape("dequantize", "rows x cols", "below 2**44 elements", got));
        };
        let (kernel, scale_ld) = match spec.block {
            None => (KernelId::Dequantize(spec.input, spec.output), 0),
            Some(block) => {
                let ld = scale_shape(block, spec.rows, spec.cols)[1];
                match block {
                    BlockShape::OneDimensional => (KernelId::Dequantize1d(spec.input, spec.output), ld),
                    BlockShape::TwoDimensional => (KernelId::Dequantize2d(spec.input, spec.output), ld),
                }
            }
        };
        Ok(Self { spec, kernel, grid: Grid::linear(blocks as u32, THREADS), scale_ld })
    }

    /// Size of the output.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        self.spec.rows * self.spec.cols * self.spec.output.size()
    }

    /// Launches the dequantisation; nothing for an empty tensor.
    ///
    /// # Errors
    /// A null buffer, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, at: &DequantizePointers<DevPtr<'_>>) -> Result<()> {
        if self.grid.is_empty() {
            return Ok(());
        }
        if at.q.is_null() || at.out.is_null() || at.scale_inv.is_null() {
            return Err(Error::value("dequantize", "a buffer that the plan needs is null"));
        }
        let spec = &self.spec;
        let params = DequantizeParams {
            at: *at,
            rows: spec.rows as u64,
            cols: spec.cols as u64,
            ld: spec.ld as u64,
            scale_ld: self.scale_ld as u64,
        };
        launch(target, self.kernel, self.grid, &params)
    }
}
