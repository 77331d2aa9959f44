//! Gated activations of rows that belong to groups, the experts of a mixture, and their gradients: computed and cast to
//! FP8 in one launch, with the bits of [`activation`](crate::ops::activation) or
//! [`activation_backward`](crate::ops::activation_backward) and of [`cast_groups`](crate::ops::cast_groups).

use te_fast_kernels::constants::activation as constants;
use te_fast_kernels::constants::common::VECTOR;
use te_fast_kernels::constants::tile::{TILE, TILE_THREADS};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::activation::{Activation, Constants, Shape};
use crate::ops::cast::aligned;
use crate::ops::cast_groups::{
    CastGroupsParams, CastGroupsPlan, CastGroupsPointers, CastGroupsSpec, Division, GroupScales,
};
use crate::runtime::lane::MEASURE_COUNTERS_AT;
use crate::{params, pointers};

const OP: &str = "activation_groups";

/// The description of such an activation or gradient, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationGroupsSpec {
    /// The cast of the result, or of the gradient of the activation's input.
    pub cast: CastGroupsSpec,
    /// The function.
    pub activation: Activation,
    /// The halves alternate in blocks of this many columns; 0: side by side.
    pub interleave: usize,
    /// Type of a factor per row of the result, if there is one.
    pub row_scale: Option<Float>,
    /// What is computed.
    pub way: ActivationWay,
}

/// What is computed of an activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationWay {
    /// The result.
    Forward,
    /// The gradient of the input.
    Backward {
        /// And of the factors of rows, in their type.
        row_scale_grad: bool,
    },
}

impl ActivationGroupsSpec {
    /// Columns of the activation's result.
    #[must_use]
    pub const fn cols(&self) -> usize {
        match self.way {
            ActivationWay::Forward => self.cast.shape.cols,
            ActivationWay::Backward { .. } => self.cast.shape.cols / 2,
        }
    }

    /// The same for another number of rows.
    #[must_use]
    pub fn with_rows(mut self, rows: usize) -> Self {
        self.cast.shape.rows = rows;
        self
    }

    const fn sums(&self) -> bool {
        matches!(self.way, ActivationWay::Backward { row_scale_grad: true })
    }

    /// Why no kernel computes and casts at once, for any number of rows; none if one does.
    #[must_use]
    pub fn obstacle(&self) -> Option<&'static str> {
        let (cols, interleave) = (self.cols(), self.interleave);
        let apart = interleave == 0 || interleave.is_multiple_of(TILE);
        if !self.activation.is_gated() {
            Some("only gated activations are quantised for experts as they are computed")
        } else if matches!(self.cast.scales, GroupScales::Current(_)) {
            // Computing everything twice, for the maxima first, takes longer than writing and reading the values.
            Some("current scaling needs the maxima before it quantises")
        } else if self.cast.input != Float::Bf16 {
            Some("only bfloat16 is quantised for experts as it is computed")
        } else if !cols.is_multiple_of(VECTOR) || !interleave.is_multiple_of(VECTOR) {
            Some("rows of 8 columns are not aligned")
        } else if self.way == ActivationWay::Forward {
            None
        } else if !cols.is_multiple_of(TILE) || !(apart || TILE.is_multiple_of(interleave)) {
            Some("blocks of 128 columns of the gradient are not of whole tiles")
        } else {
            None
        }
    }
}

pointers! {
    /// Buffers of one launch; null if the plan does not use them.
    pub struct ActivationGroupsPointers {
        /// Input of the activation `[rows, 2 * cols]`, contiguous, 16-byte aligned.
        x,
        /// Gradient of the result `[rows, cols]`, likewise; only of a gradient.
        dy,
        /// Factors `[rows]`.
        row_scale,
        /// Their gradient `[rows]`; rows behind those of the groups are left as they are.
        row_scale_grad,
        /// As the cast's, 8-byte aligned.
        out,
        /// As the cast's.
        out_t,
        /// The first group's scale; only with given scales.
        scale,
        /// As the cast's.
        scale_inv,
        /// As the cast's.
        scale_inv_t,
        /// The first group's maximum to raise; only with given scales.
        amax,
        /// int64 counts of the groups' rows.
        splits,
        /// [`ActivationGroupsPlan::sums_bytes`].
        sums,
        /// [`ActivationGroupsPlan::counter_bytes`], zeroed once when allocated. One launch at a time may use them.
        counters,
    }
}

params! {
    /// Parameters of `activation_*groups` and `activation_backward_*groups`.
    pub struct ActivationGroupsParams<'a> [constants::ACTIVATION_GROUPS_PARAMS_BYTES]
        for ActivationCastGroups | ActivationCastBlockGroups | ActivationBackwardCastGroups
            | ActivationBackwardCastBlockGroups
        => host::activation_groups::run
    {
        /// The cast of what is computed; its input is the activation's.
        pub cast: CastGroupsParams<'a>,
        /// Gradient of the result.
        pub dy: DevPtr<'a>,
        /// Factors of rows.
        pub row_scale: DevPtr<'a>,
        /// Their gradient.
        pub row_scale_grad: DevPtr<'a>,
        /// Sums of that gradient, by column of tiles.
        pub sums: DevPtr<'a>,
        /// Arrival counters of the same, one for each strip of 128 rows.
        pub counters: DevPtr<'a>,
        /// Of the curve.
        pub constants: Constants,
        /// Number of the curve.
        pub curve: u32,
        /// Type of `row_scale` and its gradient, as [`Float`].
        pub row_scale_kind: u32,
        /// Columns of one block of interleaved halves; 0: side by side.
        pub interleave: u32,
    }
}

/// A checked launch: kernel and grid are chosen.
#[derive(Clone, Copy, Debug)]
pub struct ActivationGroupsPlan {
    spec: ActivationGroupsSpec,
    cast: CastGroupsPlan,
    kernel: KernelId,
    grid: Grid,
}

impl ActivationGroupsPlan {
    /// Checks `spec` and picks the kernel.
    ///
    /// # Errors
    /// What the cast or the activation refuses, [`ActivationGroupsSpec::obstacle`], the gradient of a factor that is not
    /// there, or more rows than the arrival counters allow.
    pub fn new(spec: ActivationGroupsSpec) -> Result<Self> {
        let shape = spec.cast.shape;
        let (rows, cols, activation, interleave) = (shape.rows, spec.cols(), spec.activation, spec.interleave);
        let tiling = Shape { op: OP, rows, cols, activation, interleave }.tiling(false, None)?;
        if let Some(obstacle) = spec.obstacle() {
            return Err(Error::unsupported(OP, obstacle));
        }
        if shape.division != Division::Counted || spec.cast.gather.is_some() {
            return Err(Error::value(OP, "rows are counted, and not gathered"));
        }
        if spec.sums() && spec.row_scale.is_none() {
            return Err(Error::value(OP, "the gradient of the row scale needs a row scale"));
        }
        let cast = CastGroupsPlan::new(spec.cast)?;
        let blocks = matches!(spec.cast.scales, GroupScales::Block { .. });
        let output = spec.cast.output;
        let kernel = match (spec.way, blocks) {
            (ActivationWay::Forward, false) => KernelId::ActivationCastGroups(output),
            (ActivationWay::Forward, true) => KernelId::ActivationCastBlockGroups(output),
            (ActivationWay::Backward { .. }, false) => KernelId::ActivationBackwardCastGroups(output),
            (ActivationWay::Backward { .. }, true) => KernelId::ActivationBackwardCastBlockGroups(output),
        };
        // Even without a tile, every group's inverse scale must be written.
        let tiles = (shape.strips() as u32 * tiling.strips.tiles_cols).max(1);
        let grid = Grid::linear(tiles, TILE_THREADS).with_shared(constants::GROUPS_SHARED);
        let plan = Self { spec, cast, kernel, grid };
        if plan.counter_bytes() > MEASURE_COUNTERS_AT {
            return Err(Error::shape(OP, "the rows", "at most 16320 strips of 128", rows));
        }
        Ok(plan)
    }

    /// The plan of the cast, with the sizes of its results.
    #[must_use]
    pub const fn cast(&self) -> &CastGroupsPlan {
        &self.cast
    }

    const fn tiles_cols(&self) -> usize {
        self.spec.cols().div_ceil(TILE)
    }

    /// Size of the gradient of the row scale.
    #[must_use]
    pub fn row_scale_grad_bytes(&self) -> usize {
        let float = self.spec.row_scale.filter(|_| self.spec.sums());
        float.map_or(0, |float| self.spec.cast.shape.rows * float.size())
    }

    /// Size of the sums for the gradient of the row scale.
    #[must_use]
    pub const fn sums_bytes(&self) -> usize {
        if self.spec.sums() { self.tiles_cols() * self.spec.cast.shape.rows * size_of::<f32>() } else { 0 }
    }

    /// Size of the arrival counters.
    #[must_use]
    pub const fn counter_bytes(&self) -> usize {
        if self.spec.sums() { self.spec.cast.shape.strips() * size_of::<u32>() } else { 0 }
    }

    /// Launches it.
    ///
    /// # Errors
    /// A buffer that the plan needs is null or misaligned, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, buffers: &ActivationGroupsPointers<DevPtr<'_>>) -> Result<()> {
        let (b, spec) = (buffers, &self.spec);
        let cast = CastGroupsPointers {
            x: b.x,
            out: b.out,
            out_t: b.out_t,
            scale: b.scale,
            scale_inv: b.scale_inv,
            scale_inv_t: b.scale_inv_t,
            amax: b.amax,
            splits: b.splits,
            ..CastGroupsPointers::default()
        };
        self.cast.check(&cast, target.is_host())?;
        self.check(b, target.is_host())?;
        let params = ActivationGroupsParams {
            cast: CastGroupsParams { tiles_cols: self.tiles_cols().max(1) as u32, ..self.cast.params(&cast) },
            dy: b.dy,
            row_scale: b.row_scale.when(spec.row_scale.is_some()),
            row_scale_grad: b.row_scale_grad.when(spec.sums()),
            sums: b.sums.when(spec.sums()),
            counters: b.counters.when(spec.sums()),
            constants: spec.activation.constants(),
            curve: spec.activation.curve() as u32,
            row_scale_kind: spec.row_scale.map_or(0, |float| float as u32),
            interleave: spec.interleave as u32,
        };
        launch(target, self.kernel, self.grid, &params)
    }

    /// Checks the buffers that the cast does not have.
    fn check(&self, b: &ActivationGroupsPointers<DevPtr<'_>>, is_host: bool) -> Result<()> {
        let spec = &self.spec;
        if spec.cast.shape.rows == 0 || spec.cast.shape.cols == 0 {
            return Ok(());
        }
        let backward = spec.way != ActivationWay::Forward;
        let missing = (backward && b.dy.is_null())
            || (spec.row_scale.is_some() && b.row_scale.is_null())
            || (spec.sums() && b.row_scale_grad.is_null())
            // The host backend sums without a workspace.
            || (!is_host && spec.sums() && (b.sums.is_null() || b.counters.is_null()));
        if missing {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        if is_host {
            return Ok(());
        }
        aligned(OP, "the input", b.x)?;
        aligned(OP, "the gradient", b.dy.when(backward))?;
        aligned(OP, "the output", b.out.when(spec.cast.rowwise))
    }
}
