//! `y = alpha * x + r + b`: scaling, addition of a tensor and of a row, conversion between types.

use te_fast_kernels::constants::common::VECTOR;
use te_fast_kernels::constants::quantize::{self, THREADS};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::{params, pointers};

params! {
    /// Parameters of `affine_*`.
    pub struct AffineParams<'a> [quantize::AFFINE_PARAMS_BYTES] for Affine => host::affine::run {
        ..AffinePointers,
        /// Rows.
        pub rows: u64,
        /// Columns.
        pub cols: u64,
        /// Factor of `x`.
        pub alpha: f32,
        /// Type of `y`, as [`Float`].
        pub y_type: u32,
        /// Type of `b`, as [`Float`].
        pub b_type: u32,
        /// Type of `r`, as [`Float`].
        pub r_type: u32,
    }
}

/// Shape, types and factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffineSpec {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Type of `x`.
    pub input: Float,
    /// Type of `r`.
    pub added: Float,
    /// Type of `y`.
    pub output: Float,
    /// Type of `b`.
    pub row: Float,
    /// Factor of `x`.
    pub alpha: f32,
}

impl AffineSpec {
    /// An operation on tensors of one type, for any number of rows.
    #[must_use]
    pub const fn of(cols: usize, dtype: Float, alpha: f32) -> Self {
        Self { rows: 0, cols, input: dtype, added: dtype, output: dtype, row: dtype, alpha }
    }

    /// A conversion to another type, for any number of rows.
    #[must_use]
    pub const fn convert(cols: usize, input: Float, output: Float) -> Self {
        Self { output, ..Self::of(cols, input, 1.0) }
    }
}

pointers! {
    /// Tensors of one operation; null if the operation does not use them.
    pub struct AffinePointers {
        /// Input.
        x,
        /// Tensor to add, or null; may be `y` of the same type.
        r,
        /// Row to add, or null.
        b,
        /// [`AffinePlan::y_bytes`]; may be `x` of the same type.
        y,
    }
}

/// A checked operation.
#[derive(Clone, Copy, Debug)]
pub struct AffinePlan {
    spec: AffineSpec,
    grid: Grid,
}

impl AffinePlan {
    /// Checks `spec` and picks the grid.
    ///
    /// # Errors
    /// A shape beyond what a launch can index.
    pub fn new(spec: AffineSpec) -> Result<Self> {
        let groups = spec.cols.div_ceil(VECTOR).checked_mul(spec.rows);
        let blocks = groups.map(|groups| groups.div_ceil(THREADS as usize));
        let Some(blocks) = blocks.filter(|&blocks| i32::try_from(blocks).is_ok()) else {
            let got = format!("{} x {}", spec.rows, spec.cols);
            return Err(Error::shape("affine", "rows x cols", "below 2**42 elements", got));
        };
        Ok(Self { spec, grid: Grid::linear(blocks as u32, THREADS) })
    }

    /// Size of the output.
    #[must_use]
    pub const fn y_bytes(&self) -> usize {
        self.spec.rows * self.spec.cols * self.spec.output.size()
    }

    /// Launches it; nothing for an empty tensor.
    ///
    /// # Errors
    /// A null buffer, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, at: &AffinePointers<DevPtr<'_>>) -> Result<()> {
        if self.grid.is_empty() {
            return Ok(());
        }
        if at.x.is_null() || at.y.is_null() {
            return Err(Error::value("affine", "a buffer that the plan needs is null"));
        }
        let spec = &self.spec;
        let params = AffineParams {
            at: *at,
            rows: spec.rows as u64,
            cols: spec.cols as u64,
            alpha: spec.alpha,
            y_type: spec.output as u32,
            b_type: spec.row as u32,
            r_type: spec.added as u32,
        };
        launch(target, KernelId::Affine(spec.input), self.grid, &params)
    }
}
