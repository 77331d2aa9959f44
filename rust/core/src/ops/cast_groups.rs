//! Casts to FP8 of tensors whose rows belong to groups, the experts of a mixture. Each group has its own scales, and
//! one launch casts all groups.
//!
//! The rows of activations are counted on the device; in the transposed layout each group begins at a multiple of 128,
//! with zeros between groups, as the products of weight gradients need. All weights have equal rows, and their
//! transposed layout is a stack, too.

use te_fast_kernels::constants::common::WARP;
use te_fast_kernels::constants::quantize::{self, THREADS};
use te_fast_kernels::constants::tile::{TILE, TILE_THREADS, TRANSPOSED_ALIGN};
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::amax::{ScaleRule, check_eps};
use crate::ops::cast::{aligned, check_columns};
use crate::ops::cast_block::{BlockShape, scale_shape};
use crate::{params, pointers};

const OP: &str = "cast_groups";
/// The most groups; a block finds the group of its tile by a scan over all groups.
pub const MAX_GROUPS: usize = 1024;
/// The most blocks that look for one group's maximum.
const MAX_PARTS: u32 = 64;
/// Blocks per multiprocessor; more blocks gain nothing.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;

/// How the rows of a tensor belong to groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Division {
    /// Counts on the device give the rows of each group; groups follow each other, with at most `rows` in all.
    Counted,
    /// Every group has `rows`.
    Equal,
}

/// A tensor whose rows belong to groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupShape {
    /// Number of groups.
    pub groups: usize,
    /// How rows belong to them.
    pub division: Division,
    /// Rows of the tensor, or of each group.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl GroupShape {
    /// Rows of all groups that the tensor has memory for.
    #[must_use]
    pub const fn all_rows(&self) -> usize {
        match self.division {
            Division::Counted => self.rows,
            Division::Equal => self.rows * self.groups,
        }
    }

    /// Last dimension of the row layout's scales of 1 x 128 blocks.
    #[must_use]
    pub const fn row_scale_pitch(&self) -> usize {
        scale_shape(BlockShape::OneDimensional, self.rows, self.cols)[1]
    }

    /// Leading dimension of the transposed layout: the rows of all groups, each rounded up to a multiple of 128, or the
    /// rows of one weight.
    #[must_use]
    pub const fn transposed_ld(&self) -> usize {
        match self.division {
            Division::Counted => padded_rows(self.rows, self.groups),
            Division::Equal => self.rows.next_multiple_of(TRANSPOSED_ALIGN),
        }
    }

    const fn transposed_bytes(&self) -> usize {
        match self.division {
            Division::Counted => self.transposed_ld() * self.cols,
            Division::Equal => self.transposed_ld() * self.cols * self.groups,
        }
    }

    /// Tiles along the rows: as many as there can be.
    pub(crate) const fn strips(&self) -> usize {
        match self.division {
            Division::Counted => self.transposed_ld() / TILE,
            Division::Equal => self.groups * self.rows.div_ceil(TILE),
        }
    }
}

/// The rows that `rows` rows of `groups` groups need at most if each group begins at a multiple of 128.
#[must_use]
pub const fn padded_rows(rows: usize, groups: usize) -> usize {
    (rows + (TILE - 1) * groups) / TILE * TILE
}

/// Rows of counted groups that are gathered by the numbers of [`Way::Numbers`](crate::ops::route::Way::Numbers): a
/// token's row for each of its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gather {
    /// Rows for each token.
    pub each: usize,
    /// Rows with probability 0 have their tokens' values, as gradients have, instead of zeros.
    pub all: bool,
}

/// Where scales come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupScales {
    /// Given scales: a slot of delayed scaling for each group, whose maximum is raised.
    Given {
        /// Slots from one group to the next.
        stride: usize,
    },
    /// One scale for each group, from the group's maximum.
    Current(ScaleRule),
    /// One scale for each block: 1 x 128 for counted groups, 128 x 128 for equal groups.
    Block {
        /// Smallest amax.
        eps: f32,
        /// Round scales down to powers of two.
        pow2: bool,
    },
}

/// The description of such a cast, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CastGroupsSpec {
    /// The tensor.
    pub shape: GroupShape,
    /// Its type.
    pub input: Float,
    /// Type to cast to.
    pub output: Fp8,
    /// Where scales come from.
    pub scales: GroupScales,
    /// Write the row layout.
    pub rowwise: bool,
    /// Write the transposed layout.
    pub columnwise: bool,
    /// How tokens' rows of the input are gathered; none if the input has the groups' rows.
    pub gather: Option<Gather>,
    /// Multiprocessors of the device (any number for the host backend).
    pub processors: u32,
}

impl CastGroupsSpec {
    /// Number of tokens' rows of the input; 0 without a gather.
    const fn tokens(&self) -> usize {
        match self.gather {
            Some(Gather { each, .. }) => self.shape.rows / each,
            None => 0,
        }
    }
}

pointers! {
    /// Buffers of one cast; null if the plan does not use them.
    pub struct CastGroupsPointers {
        /// Input, contiguous.
        x,
        /// [`CastGroupsPlan::out_bytes`].
        out,
        /// [`CastGroupsPlan::out_t_bytes`], 16-byte aligned.
        out_t,
        /// The first group's scale; only with given scales.
        scale,
        /// Inverse scales: one for each group, or one for each block of the row layout.
        scale_inv,
        /// Inverse scales of the transposed layout's blocks.
        scale_inv_t,
        /// The first group's maximum to raise; only with given scales.
        amax,
        /// One f32, or null; 1.0 leaves every output as it is.
        noop,
        /// int64 counts of the groups' rows; only for counted groups.
        splits,
        /// [`CastGroupsPlan::partial_bytes`].
        partial,
        /// The plan's own memory after `partial`: f32 per token, its maximum.
        token_max,
        /// i32 `[rows]`, if the input's rows are gathered.
        numbers,
    }
}

params! {
    /// Parameters of `amax_groups_*`, `cast_groups_*` and `cast_block_groups_*`.
    pub struct CastGroupsParams<'a> [quantize::CAST_GROUPS_PARAMS_BYTES]
        for AmaxTokens | AmaxGroups | CastGroups | CastBlockGroups1d | CastBlockGroups2d => host::cast_groups::run
    {
        ..CastGroupsPointers,
        /// Rows of the tensor, or of each group.
        pub rows: u64,
        /// Columns.
        pub cols: u64,
        /// Leading dimension of `out_t`.
        pub ld_t: u64,
        /// Last dimension of `scale_inv`, of blocks.
        pub scale_ld: u64,
        /// Last dimension of `scale_inv_t`.
        pub scale_ld_t: u64,
        /// Rows of the input, where these are gathered.
        pub tokens: u64,
        /// Groups.
        pub groups: u32,
        /// Groups have equal rows.
        pub equal: u32,
        /// Tiles along the columns.
        pub tiles_cols: u32,
        /// Slots from one group's scale to the next.
        pub stride: u32,
        /// Number of maxima of each group in `partial`; 0 with given scales.
        pub parts: u32,
        /// Round scales down to powers of two.
        pub pow2: u32,
        /// Smallest amax.
        pub eps: f32,
        /// Largest value of the FP8 type.
        pub fp8_max: f32,
        /// Rows whose number is negative are gathered, too.
        pub gathers_all: u32,
        /// Zero.
        pub unused: u32,
    }
}

/// A checked cast: kernels and grids are chosen.
#[derive(Clone, Copy, Debug)]
pub struct CastGroupsPlan {
    spec: CastGroupsSpec,
    kernel: KernelId,
    grid: Grid,
    /// Blocks for each group's maximum; 0 if scales do not follow from it.
    parts: u32,
    scale_shape: [usize; 2],
    scale_t_shape: [usize; 2],
}

impl CastGroupsPlan {
    /// Checks `spec` and picks the kernels.
    ///
    /// # Errors
    /// More groups or a larger shape than a launch can index, a bad epsilon, or nothing to write.
    pub fn new(spec: CastGroupsSpec) -> Result<Self> {
        let GroupShape { groups, division, rows, cols } = spec.shape;
        if !(spec.rowwise || spec.columnwise) {
            return Err(Error::value(OP, "no output is asked for; ask for rowwise or columnwise"));
        }
        if groups == 0 || groups > MAX_GROUPS {
            return Err(Error::shape(OP, "the number of groups", format!("1 to {MAX_GROUPS}"), groups));
        }
        check_columns(OP, cols)?;
        if let Some(Gather { each, .. }) = spec.gather
            && (division != Division::Counted || each == 0 || !rows.is_multiple_of(each))
        {
            let expected = format!("a multiple of {each}, counted, where those of tokens are gathered");
            return Err(Error::shape(OP, "the rows", expected, rows));
        }
        let tiles_cols = cols.div_ceil(TILE);
        let tiles = spec.shape.strips().saturating_mul(tiles_cols);
        if tiles > i32::MAX as usize || spec.shape.all_rows() > i32::MAX as usize {
            return Err(Error::shape(
                OP,
                "the tensor",
                "at most 2^31 rows and 2^31 tiles of 128 x 128",
                format!("{rows} x {cols}"),
            ));
        }
        let (input, output) = (spec.input, spec.output);
        let (kernel, parts) = match (spec.scales, division) {
            (GroupScales::Given { .. }, _) => (KernelId::CastGroups(input, output), 0),
            (GroupScales::Current(rule), _) => {
                check_eps(OP, rule.eps)?;
                let parts = (spec.processors * BLOCKS_PER_MULTIPROCESSOR / groups as u32).clamp(1, MAX_PARTS);
                (KernelId::CastGroups(input, output), parts)
            }
            (GroupScales::Block { eps, .. }, division) => {
                check_eps(OP, eps)?;
                let kernel = match division {
                    Division::Counted => KernelId::CastBlockGroups1d(input, output),
                    Division::Equal => KernelId::CastBlockGroups2d(input, output),
                };
                (kernel, 0)
            }
        };
        let (scale_shape, scale_t_shape) = match division {
            Division::Counted => (
                scale_shape(BlockShape::OneDimensional, rows, cols),
                scale_shape(BlockShape::OneDimensional, cols, spec.shape.transposed_ld()),
            ),
            Division::Equal => (
                scale_shape(BlockShape::TwoDimensional, rows, cols),
                scale_shape(BlockShape::TwoDimensional, cols, rows),
            ),
        };
        // Even without a tile, every group's inverse scale must be written.
        let grid = Grid::linear((tiles as u32).max(1), TILE_THREADS);
        Ok(Self { spec, kernel, grid, parts, scale_shape, scale_t_shape })
    }

    const fn is_block(&self) -> bool {
        matches!(self.spec.scales, GroupScales::Block { .. })
    }

    /// Size of the row layout.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        if self.spec.rowwise { self.spec.shape.all_rows() * self.spec.shape.cols } else { 0 }
    }

    /// Size of the transposed layout.
    #[must_use]
    pub const fn out_t_bytes(&self) -> usize {
        if self.spec.columnwise { self.spec.shape.transposed_bytes() } else { 0 }
    }

    /// Size of the inverse scales of the groups, or of the row layout's blocks.
    #[must_use]
    pub const fn scale_bytes(&self) -> usize {
        if !self.is_block() {
            return self.spec.shape.groups * size_of::<f32>();
        }
        if self.spec.rowwise { self.stacked(self.scale_shape) } else { 0 }
    }

    /// Size of the inverse scales of the transposed layout's blocks; with one scale per group, the same as
    /// [`Self::scale_bytes`].
    #[must_use]
    pub const fn scale_t_bytes(&self) -> usize {
        if !self.is_block() {
            return self.spec.shape.groups * size_of::<f32>();
        }
        if self.spec.columnwise { self.stacked(self.scale_t_shape) } else { 0 }
    }

    const fn stacked(&self, shape: [usize; 2]) -> usize {
        let count = match self.spec.shape.division {
            Division::Counted => 1,
            Division::Equal => self.spec.shape.groups,
        };
        count * shape[0] * shape[1] * size_of::<f32>()
    }

    /// Size of the maxima that the blocks of the first launch leave.
    #[must_use]
    pub const fn partial_bytes(&self) -> usize {
        let maxima = self.spec.shape.groups * self.parts as usize * size_of::<f32>();
        if self.takes_token_maxima() { maxima + self.spec.tokens() * size_of::<f32>() } else { maxima }
    }

    /// Whether maxima of groups are computed from maxima of tokens, which are fewer than rows.
    const fn takes_token_maxima(&self) -> bool {
        self.parts != 0 && self.spec.gather.is_some()
    }

    /// Whether both layouts have the one scale of their group.
    #[must_use]
    pub const fn shares_scale(&self) -> bool {
        !self.is_block()
    }

    const fn is_empty(&self) -> bool {
        self.spec.shape.all_rows() == 0 || self.spec.shape.cols == 0
    }

    /// Refuses buffers if one that the plan needs is missing or misaligned.
    pub(crate) fn check(&self, b: &CastGroupsPointers<DevPtr<'_>>, is_host: bool) -> Result<()> {
        let (spec, empty) = (&self.spec, self.is_empty());
        let counted = spec.shape.division == Division::Counted;
        let given = matches!(spec.scales, GroupScales::Given { .. });
        let missing = (!empty && b.x.is_null())
            || (!empty && spec.rowwise && (b.out.is_null() || b.scale_inv.is_null()))
            || (spec.columnwise && spec.shape.transposed_bytes() != 0 && b.out_t.is_null())
            || (self.is_block() && spec.columnwise && !empty && b.scale_inv_t.is_null())
            || (counted && b.splits.is_null())
            || (!empty && spec.gather.is_some() && b.numbers.is_null())
            || (given && b.scale.is_null())
            || (self.parts != 0 && b.partial.is_null());
        if missing {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        if spec.columnwise && !is_host {
            aligned(OP, "the transposed output", b.out_t)?;
        }
        Ok(())
    }

    /// Launches the cast.
    ///
    /// # Errors
    /// A buffer that the plan needs is null or misaligned, or a launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, buffers: &CastGroupsPointers<DevPtr<'_>>) -> Result<()> {
        self.check(buffers, target.is_host())?;
        let (spec, params) = (&self.spec, self.params(buffers));
        if self.takes_token_maxima() && !self.is_empty() {
            let blocks = spec.tokens().div_ceil((THREADS / WARP) as usize) as u32;
            launch(target, KernelId::AmaxTokens(spec.input), Grid::linear(blocks, THREADS), &params)?;
        }
        if self.parts != 0 {
            let grid = Grid::linear(self.parts * spec.shape.groups as u32, THREADS);
            launch(target, KernelId::AmaxGroups(spec.input), grid, &params)?;
        }
        launch(target, self.kernel, self.grid, &params)
    }

    /// The parameters of its launches.
    #[inline]
    pub(crate) fn params<'a>(&self, b: &CastGroupsPointers<DevPtr<'a>>) -> CastGroupsParams<'a> {
        let spec = &self.spec;
        let GroupShape { groups, division, rows, cols } = spec.shape;
        let counted = division == Division::Counted;
        let given = matches!(spec.scales, GroupScales::Given { .. });
        let (eps, pow2) = match spec.scales {
            GroupScales::Given { .. } => (0.0, false),
            GroupScales::Current(ScaleRule { eps, pow2, .. }) | GroupScales::Block { eps, pow2 } => (eps, pow2),
        };
        let stride = if let GroupScales::Given { stride } = spec.scales { stride } else { 1 };
        CastGroupsParams {
            at: CastGroupsPointers {
                out: b.out.when(spec.rowwise),
                out_t: b.out_t.when(spec.columnwise),
                splits: b.splits.when(counted),
                scale: b.scale.when(given),
                amax: b.amax.when(given),
                token_max: b.partial.offset(groups * self.parts as usize * size_of::<f32>()),
                numbers: b.numbers.when(spec.gather.is_some()),
                ..*b
            },
            rows: rows as u64,
            cols: cols as u64,
            ld_t: spec.shape.transposed_ld() as u64,
            scale_ld: self.scale_shape[1] as u64,
            scale_ld_t: self.scale_t_shape[1] as u64,
            tokens: spec.tokens() as u64,
            groups: groups as u32,
            equal: u32::from(!counted),
            tiles_cols: cols.div_ceil(TILE).max(1) as u32,
            stride: stride as u32,
            parts: self.parts,
            pow2: u32::from(pow2),
            eps,
            fp8_max: spec.output.max(),
            gathers_all: u32::from(spec.gather.is_some_and(|gather| gather.all)),
            unused: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padded_rows_hold_every_division_and_no_tile_more() {
        // The worst division gives all groups but the last one row.
        for (rows, groups) in [(0, 1), (1, 1), (128, 1), (129, 1), (3, 3), (256, 3), (1000, 8)] {
            let ones = rows.min(groups - 1);
            let worst = ones * TILE + (rows - ones).next_multiple_of(TILE);
            assert!(padded_rows(rows, groups) >= worst);
            assert!(padded_rows(rows, groups) < rows + TILE * groups + 1);
        }
    }
}
