//! Sums of the rows of each group: the gradients of the experts' biases.

use te_fast_kernels::constants::quantize::{self, SUM_GROUPS_COLS, THREADS};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::cast::check_columns;
use crate::ops::cast_groups::MAX_GROUPS;
use crate::{params, pointers};

const OP: &str = "sum_groups";

/// The description of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumGroupsSpec {
    /// Number of groups.
    pub groups: usize,
    /// Rows that the tensor has memory for.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Type of the tensor and of the sums.
    pub input: Float,
    /// Type of a factor of each row, if there is one.
    pub row_scale: Option<Float>,
}

pointers! {
    /// Buffers of one such launch.
    pub struct SumGroupsPointers {
        /// Input `[rows, cols]`, contiguous.
        x,
        /// `[groups, cols]`; zeros for groups without rows.
        sums,
        /// A factor for each row, or null.
        row_scale,
        /// int64 counts of the groups' rows.
        splits,
    }
}

params! {
    /// Parameters of `sum_groups_*`.
    pub struct SumGroupsParams<'a> [quantize::SUM_GROUPS_PARAMS_BYTES] for SumGroups => host::sum_groups::run {
        ..SumGroupsPointers,
        /// Rows of the input.
        pub rows: u64,
        /// Columns.
        pub cols: u64,
        /// Groups.
        pub groups: u32,
        /// Type of the factors.
        pub row_scale_type: u32,
        /// Strips along the columns.
        pub strips: u32,
        /// Zero.
        pub unused: u32,
    }
}

/// A checked sum.
#[derive(Clone, Copy, Debug)]
pub struct SumGroupsPlan {
    spec: SumGroupsSpec,
    strips: u32,
}

impl SumGroupsPlan {
    /// Checks `spec`.
    ///
    /// # Errors
    /// More groups or columns than a launch can index.
    pub fn new(spec: SumGroupsSpec) -> Result<Self> {
        if spec.groups == 0 || spec.groups > MAX_GROUPS {
            return Err(Error::shape(OP, "the number of groups", format!("1 to {MAX_GROUPS}"), spec.groups));
        }
        check_columns(OP, spec.cols)?;
        let strips = spec.cols.div_ceil(SUM_GROUPS_COLS) as u32;
        if i32::try_from(u64::from(strips) * spec.groups as u64).is_err() {
            return Err(Error::shape(OP, "the sums", "fewer than 2^31 strips of columns", spec.cols));
        }
        Ok(Self { spec, strips })
    }

    /// Size of the sums.
    #[must_use]
    pub const fn sums_bytes(&self) -> usize {
        self.spec.groups * self.spec.cols * self.spec.input.size()
    }

    /// Launches the sums.
    ///
    /// # Errors
    /// A buffer that the plan needs is null, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, b: &SumGroupsPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        let missing = b.splits.is_null()
            || (spec.cols != 0 && (b.sums.is_null() || (spec.rows != 0 && b.x.is_null())))
            || (spec.rows != 0 && spec.row_scale.is_some() && b.row_scale.is_null());
        if missing {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        let params = SumGroupsParams {
            at: SumGroupsPointers { row_scale: b.row_scale.when(spec.row_scale.is_some()), ..*b },
            rows: spec.rows as u64,
            cols: spec.cols as u64,
            groups: spec.groups as u32,
            row_scale_type: spec.row_scale.map_or(0, |float| float as u32),
            strips: self.strips,
            unused: 0,
        };
        launch(
            target,
            KernelId::SumGroups(spec.input),
            Grid::linear(self.strips * spec.groups as u32, THREADS),
            &params,
        )
    }
}
