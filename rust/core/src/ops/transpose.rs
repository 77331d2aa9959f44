//! Makes the column layout of FP8 bytes from the row layout, with the scales of 128x128 blocks.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::quantize;
use te_fast_kernels::constants::tile::{TILE, TILE_THREADS, TRANSPOSED_ALIGN};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::cast_block::{BlockShape, scale_shape};
use crate::{params, pointers};

const OP: &str = "transpose";

params! {
    /// Parameters of `transpose_fp8`.
    pub struct TransposeParams<'a> [quantize::TRANSPOSE_PARAMS_BYTES] for Transpose => host::transpose::run {
        ..TransposePointers,
        /// Rows.
        pub rows: u64,
        /// Columns.
        pub cols: u64,
        /// Leading dimension of `out_t`.
        pub ld_t: u64,
        /// Last dimension of `scale`.
        pub scale_ld: u64,
        /// Last dimension of `scale_t`.
        pub scale_ld_t: u64,
    }
}

pointers! {
    /// Tensors of one transposition.
    pub struct TransposePointers {
        /// FP8 bytes `[rows, cols]`.
        q,
        /// [`TransposePlan::out_bytes`].
        out_t,
        /// Scales of 128x128 blocks; null for one scale, which both layouts share.
        scale,
        /// [`TransposePlan::scale_bytes`].
        scale_t,
    }
}

/// The description of a transposition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransposeSpec {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Rows of the result have the length that GEMMs need: a multiple of 16, with zeros after the tensor's rows.
    pub padded: bool,
    /// There is a scale for each 128x128.
    pub block_scales: bool,
}

/// A checked transposition.
#[derive(Clone, Copy, Debug)]
pub struct TransposePlan {
    spec: TransposeSpec,
    ld_t: usize,
    grid: Grid,
}

impl TransposePlan {
    /// Checks `spec` and picks the grid.
    ///
    /// # Errors
    /// A shape beyond what a launch can index.
    pub fn new(spec: TransposeSpec) -> Result<Self> {
        let blocks = spec.rows.div_ceil(TILE).checked_mul(spec.cols.div_ceil(TILE));
        let fits = |&blocks: &usize| i32::try_from(blocks).is_ok() && i32::try_from(spec.cols).is_ok();
        let Some(blocks) = blocks.filter(fits) else {
            let got = format!("{} x {}", spec.rows, spec.cols);
            return Err(Error::shape(OP, "rows x cols", "below 2**31 columns and 2**31 tiles of 128 x 128", got));
        };
        let ld_t = if spec.padded { spec.rows.next_multiple_of(TRANSPOSED_ALIGN) } else { spec.rows };
        Ok(Self { spec, ld_t, grid: Grid::linear(blocks as u32, TILE_THREADS) })
    }

    /// Bytes of the result.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        self.spec.cols * self.ld_t
    }

    /// Bytes of its scales; 0 if both layouts share one scale.
    #[must_use]
    pub fn scale_bytes(&self) -> usize {
        if self.spec.block_scales { self.scales().1.iter().product::<usize>() * size_of::<f32>() } else { 0 }
    }

    /// Shapes of the scales in row and in column layout.
    fn scales(&self) -> ([usize; 2], [usize; 2]) {
        let TransposeSpec { rows, cols, .. } = self.spec;
        let shape = |rows, cols| scale_shape(BlockShape::TwoDimensional, rows, cols);
        (shape(rows, cols), shape(cols, rows))
    }

    /// Launches the transposition; does nothing for an empty tensor.
    ///
    /// # Errors
    /// A null buffer, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, at: &TransposePointers<DevPtr<'_>>) -> Result<()> {
        if self.grid.is_empty() {
            return Ok(());
        }
        let lacks_scales = self.spec.block_scales && (at.scale.is_null() || at.scale_t.is_null());
        if at.q.is_null() || at.out_t.is_null() || lacks_scales {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        let ([_, scale_ld], [_, scale_ld_t]) = self.scales();
        let scaled = self.spec.block_scales;
        let params = TransposeParams {
            at: TransposePointers { scale: at.scale.when(scaled), scale_t: at.scale_t.when(scaled), ..*at },
            rows: self.spec.rows as u64,
            cols: self.spec.cols as u64,
            ld_t: self.ld_t as u64,
            scale_ld: scale_ld as u64,
            scale_ld_t: scale_ld_t as u64,
        };
        launch(target, KernelId::Transpose, self.grid, &params)
    }
}
