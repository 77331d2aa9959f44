//! Cross entropy of rows of logits, in f32, and its gradient. Ranks that share a vocabulary join parts of each row.

use te_fast_kernels::constants::loss::{self, ROW_THREADS};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::{params, pointers};

const OP: &str = "cross_entropy";

/// Rows of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropySpec {
    /// Rows.
    pub rows: usize,
    /// Columns: the vocabulary, or a rank's part of it.
    pub columns: usize,
    /// Type of the logits.
    pub input: Float,
    /// Target without a loss and a gradient; of whole rows.
    pub ignored: i64,
    /// Probability that is spread over the whole vocabulary.
    pub smoothing: f32,
}

pointers! {
    /// Buffers of losses.
    pub struct CrossEntropyPointers {
        /// `[rows, columns]`.
        logits,
        /// i64 per row; null for parts of rows.
        target,
        /// f32 per row; null for parts of rows.
        losses,
        /// f32 `[2, rows]`: the largest logit, and the logarithm of the sum of exponentials; null if backward does not run.
        /// Of parts `[3, rows]`: the largest logit, the sum, the sum of differences to the largest.
        statistics,
    }
}

pointers! {
    /// Buffers of the gradient.
    pub struct CrossEntropyBwdPointers {
        /// `[rows, columns]`.
        logits,
        /// i64 per row.
        target,
        /// f32 `[2, rows]`: the largest logit, and the logarithm of the sum of exponentials.
        statistics,
        /// f32 per row, or one for all rows.
        grad,
        /// f32: columns of all parts; null where there is one part.
        vocabulary,
        /// `[rows, columns]`; may be the logits.
        dlogits,
    }
}

params! {
    /// Parameters of `cross_entropy_*`.
    pub struct CrossEntropyParams<'a> [loss::CROSS_ENTROPY_PARAMS_BYTES] for CrossEntropy => host::cross_entropy::run {
        ..CrossEntropyPointers,
        /// Rows.
        pub rows: u64,
        /// Columns.
        pub columns: u64,
        /// Target without a loss.
        pub ignored: i64,
        /// Label smoothing.
        pub smoothing: f32,
        /// Zero.
        pub unused: u32,
    }
}

params! {
    /// Parameters of `cross_entropy_bwd_*`.
    pub struct CrossEntropyBwdParams<'a> [loss::CROSS_ENTROPY_BWD_PARAMS_BYTES] for CrossEntropyBwd
        => host::cross_entropy::run_bwd {
        ..CrossEntropyBwdPointers,
        /// Rows.
        pub rows: u64,
        /// Columns.
        pub columns: u64,
        /// Distance of rows in the gradient of the losses: 0 or 1.
        pub grad_stride: u64,
        /// Target without a gradient.
        pub ignored: i64,
        /// Label smoothing.
        pub smoothing: f32,
        /// Zero.
        pub unused: u32,
    }
}

/// A checked cross entropy.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyPlan {
    spec: CrossEntropySpec,
    grid: Grid,
}

impl CrossEntropyPlan {
    /// Checks the sizes.
    ///
    /// # Errors
    /// More rows or columns than a launch can index.
    pub fn new(spec: CrossEntropySpec) -> Result<Self> {
        if i32::try_from(spec.rows).is_err() || i32::try_from(spec.columns).is_err() {
            let got = format!("{} x {}", spec.rows, spec.columns);
            return Err(Error::shape(OP, "logits", "fewer than 2**31 rows and columns", got));
        }
        Ok(Self { spec, grid: Grid::linear(spec.rows as u32, ROW_THREADS) })
    }

    /// Launches it; nothing for no rows.
    ///
    /// # Errors
    /// A null buffer, or the launch fails.
    pub fn run(&self, target: &mut Target<'_>, at: &CrossEntropyPointers<DevPtr<'_>>) -> Result<()> {
        if self.grid.is_empty() {
            return Ok(());
        }
        let spec = &self.spec;
        let is_part = at.losses.is_null();
        let lacks_own = if is_part { at.statistics.is_null() } else { at.target.is_null() };
        if (at.logits.is_null() && spec.columns != 0) || lacks_own {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        let (rows, columns) = (spec.rows as u64, spec.columns as u64);
        let (ignored, smoothing) = (spec.ignored, spec.smoothing);
        let params = CrossEntropyParams { at: *at, rows, columns, ignored, smoothing, unused: 0 };
        launch(target, KernelId::CrossEntropy(spec.input), self.grid, &params)
    }

    /// Launches the gradient of logits; nothing for no logits. `is_one` gradient is all rows'.
    ///
    /// # Errors
    /// A null buffer, or the launch fails.
    pub fn run_bwd(
        &self,
        target: &mut Target<'_>,
        at: &CrossEntropyBwdPointers<DevPtr<'_>>,
        is_one: bool,
    ) -> Result<()> {
        let spec = &self.spec;
        if self.grid.is_empty() || spec.columns == 0 {
            return Ok(());
        }
        let needed = [at.logits, at.target, at.statistics, at.grad, at.dlogits];
        if needed.iter().any(|pointer| pointer.is_null()) {
            return Err(Error::value(OP, "a buffer that the gradient needs is null"));
        }
        let (rows, columns) = (spec.rows as u64, spec.columns as u64);
        let (ignored, smoothing) = (spec.ignored, spec.smoothing);
        let grad_stride = u64::from(!is_one);
        let params = CrossEntropyBwdParams { at: *at, rows, columns, grad_stride, ignored, smoothing, unused: 0 };
        launch(target, KernelId::CrossEntropyBwd(spec.input), self.grid, &params)
    }
}
