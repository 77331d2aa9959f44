//! Gradient of LayerNorm and RMSNorm: of the input, with the gradient of a residual branch added, and of the weights
//! in a fixed order of addition.

use te_fast_kernels::constants::common::VECTOR;
use te_fast_kernels::constants::norm::{
    self, BACKWARD_THREADS, FEW_SLOTS, MANY_SLOTS, MAX_BLOCKS, MAX_STAGES, TILE_COLS, TILE_STEP, TILE_THREADS,
};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::activation::check_outputs;
use crate::ops::norm::check_shape;
use crate::ops::norm_spec::NormKind;
use crate::runtime::lane::{COUNTER_BYTES, Limits, aligned};
use crate::{params, pointers};

/// The description of a norm's gradient, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "outputs are asked for one by one")]
pub struct NormBackwardSpec {
    /// Rows.
    pub rows: usize,
    /// Columns of a row; at least 1.
    pub cols: usize,
    /// Statistics of the forward.
    pub kind: NormKind,
    /// Type of the gradients in and out and of the forward's input.
    pub input: Float,
    /// Type of gamma and of the weights' gradients.
    pub weight: Float,
    /// Factors are `gamma + 1`.
    pub zero_centered_gamma: bool,
    /// Add another gradient to the gradient of the input.
    pub add: bool,
    /// Write the gradient of the input.
    pub dx: bool,
    /// Write the gradient of gamma.
    pub dgamma: bool,
    /// Write the gradient of beta; `LayerNorm` alone has one.
    pub dbeta: bool,
    /// The device's limits for launches.
    pub limits: Limits,
}

params! {
    /// Parameters of every gradient of a norm.
    pub struct NormBackwardParams<'a> [norm::NORM_BACKWARD_PARAMS_BYTES]
        for NormBackward | NormBackwardWide | NormBackwardElements | NormBackwardCluster | NormBackwardClusterElements
            | NormBackwardSums | NormBackwardTiles => host::norm_backward::run {
        ..NormBackwardPointers,
        /// Rows.
        pub rows: u32,
        /// Columns.
        pub cols: u32,
        /// Type of gamma and of the weights' gradients, as [`Float`].
        pub weight_kind: u32,
        /// 1: factors are gamma + 1.
        pub zero_centered: u32,
        /// Threads that have a row.
        pub team: u32,
        /// Rows that a team prefetches.
        pub stages: u32,
        /// Tiles along the columns.
        pub tiles_cols: u32,
        /// Rows of a tile.
        pub chunk: u32,
    }
}

pointers! {
    /// Buffers of one gradient; null if the plan does not use them.
    pub struct NormBackwardPointers {
        /// Gradient of the result `[rows, cols]`, contiguous; any alignment, 16 bytes is fast, as for every tensor here.
        dy,
        /// The rows that forward normalised: its input, or the sum with the residual.
        x,
        /// Factors `[cols]`.
        gamma,
        /// f32 `[rows]`; null for RMSNorm.
        mean,
        /// f32 `[rows]`.
        rstd,
        /// Summand of the input's gradient, of its shape and type.
        add,
        /// Receives the gradient of the input.
        dx,
        /// Receives the gradient of the factors `[cols]`.
        dgamma,
        /// Receives the gradient of the summands `[cols]`.
        dbeta,
        /// [`NormBackwardPlan::partial_bytes`], 16-byte aligned, of any content: with two kernels, sums of rows, then
        /// f32 `[sums wanted][rows summed apart][cols, up to whole slots of a team]`.
        partial,
        /// f32 `[rows, 2]`, set by the plan: the head of `partial`.
        sums,
        /// [`COUNTER_BYTES`], zeroed once when allocated. One launch at a time may use them.
        counters,
    }
}

/// How blocks divide the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// One launch: teams of threads hold rows, and add up columns as the rows pass. A block has `chunk` columns of a
    /// row: all columns, or its share in a cluster.
    Rows { team: u32, stages: u32, chunk: u32, grid: Grid },
    /// Two launches: sums over rows, then tiles.
    Tiles { tiles_cols: u32, chunk: u32, sums: Grid, tiles: Grid },
}

/// A checked gradient: kernels and grids are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormBackwardPlan {
    spec: NormBackwardSpec,
    way: Way,
}

const OP: &str = "norm_backward";
/// Columns of a row that a thread holds, for short rows and for long rows.
const FEW_COLS: usize = FEW_SLOTS * VECTOR;
const MOST_COLS: usize = MANY_SLOTS * VECTOR;
const MIN_TEAM: u32 = 4;
/// Pipeline stages of the ring: one that is read, and at least one that is being loaded.
const MIN_STAGES: usize = 2;
/// Largest number of columns of a block in a cluster.
const CLUSTER_COLS: usize = FEW_COLS * BACKWARD_THREADS as usize;
/// Static shared memory of a block.
const RESERVED_SHARED: usize = 9 << 10;
/// Blocks per multiprocessor, by which the tiles' rows are divided, and which sum rows.
const TILE_BLOCKS: usize = 8;
const SUM_BLOCKS: usize = 4;

impl NormBackwardPlan {
    /// Checks `spec`, picks the kernels and divides the rows among blocks.
    ///
    /// # Errors
    /// A shape beyond what a launch or the counters can index, the gradient of RMSNorm's beta, which does not exist, a
    /// branch to add without a gradient of the input, or nothing to write.
    pub fn new(spec: NormBackwardSpec) -> Result<Self> {
        let NormBackwardSpec { rows, cols, .. } = spec;
        check_outputs(OP, spec.dx || spec.dgamma || spec.dbeta, None, false)?;
        check_shape(OP, rows, cols)?;
        if spec.dbeta && spec.kind == NormKind::RmsNorm {
            return Err(Error::value(OP, "RMSNorm has no beta"));
        }
        if spec.add && !spec.dx {
            return Err(Error::value(OP, "a gradient to add needs the gradient of the input"));
        }
        let way = match Self::rows_way(&spec).or_else(|| Self::cluster_way(&spec)) {
            Some(way) => way,
            None => Self::tiles_way(&spec)?,
        };
        Ok(Self { spec, way })
    }

    /// Rows in registers and shared memory, if they fit.
    fn rows_way(spec: &NormBackwardSpec) -> Option<Way> {
        let most = MOST_COLS * BACKWARD_THREADS as usize;
        let team = spec.cols.div_ceil(FEW_COLS).next_power_of_two().clamp(MIN_TEAM as usize, BACKWARD_THREADS as usize);
        let teams = BACKWARD_THREADS as usize / team;
        let operands = if spec.add { 3 } else { 2 };
        let stage = operands * teams * spec.cols * spec.input.size();
        let shared = (spec.limits.shared_bytes as usize).saturating_sub(RESERVED_SHARED);
        // A block adds the sums of its teams in the ring's memory at the end.
        let sums = spec.cols.div_ceil(VECTOR * team) * VECTOR * size_of::<f32>() * BACKWARD_THREADS as usize;
        let stages = (shared / stage).min(MAX_STAGES);
        if spec.cols > most || stages < MIN_STAGES || sums > shared {
            return None;
        }
        let blocks = spec.rows.div_ceil(teams).clamp(1, spec.limits.multiprocessors.max(1) as usize);
        let grid = Grid::linear(blocks as u32, BACKWARD_THREADS).with_shared((stages * stage).max(sums) as u32);
        Some(Way::Rows { team: team as u32, stages: stages as u32, chunk: spec.cols as u32, grid })
    }

    /// Longer rows, divided among as few blocks of a cluster as can hold them.
    fn cluster_way(spec: &NormBackwardSpec) -> Option<Way> {
        let blocks = spec.cols.div_ceil(CLUSTER_COLS).next_power_of_two();
        let chunk = spec.cols.div_ceil(blocks).next_multiple_of(TILE_COLS);
        let operands = if spec.add { 3 } else { 2 };
        let stage = operands * chunk * spec.input.size();
        let shared = (spec.limits.shared_bytes as usize).saturating_sub(RESERVED_SHARED);
        let stages = (shared / stage).min(MAX_STAGES);
        if !spec.limits.clusters || blocks > MAX_BLOCKS as usize || stages < MIN_STAGES {
            return None;
        }
        let (blocks, chunk) = (blocks as u32, chunk as u32);
        let clusters = spec.rows.clamp(1, spec.limits.clusters_at_once(blocks, 1) as usize) as u32;
        let grid =
            Grid::linear(clusters * blocks, BACKWARD_THREADS).with_shared((stages * stage) as u32).with_cluster(blocks);
        Some(Way::Rows { team: BACKWARD_THREADS, stages: stages as u32, chunk, grid })
    }

    fn tiles_way(spec: &NormBackwardSpec) -> Result<Way> {
        let NormBackwardSpec { rows, cols, .. } = *spec;
        let processors = spec.limits.multiprocessors.max(1) as usize;
        let tiles_cols = cols.div_ceil(TILE_COLS);
        if tiles_cols * size_of::<u32>() > COUNTER_BYTES {
            let most = COUNTER_BYTES / size_of::<u32>() * TILE_COLS;
            return Err(Error::shape(OP, "the number of columns", format_args!("at most {most}"), cols));
        }
        let parts = (TILE_BLOCKS * processors).div_ceil(tiles_cols).min(rows.div_ceil(TILE_STEP)).max(1);
        let chunk = rows.div_ceil(parts).next_multiple_of(TILE_STEP).max(TILE_STEP);
        let tiles = tiles_cols * rows.div_ceil(chunk).max(1);
        let sums = rows.min(SUM_BLOCKS * processors);
        Ok(Way::Tiles {
            tiles_cols: tiles_cols as u32,
            chunk: chunk as u32,
            sums: Grid::linear(sums as u32, BACKWARD_THREADS),
            tiles: Grid::linear(tiles as u32, TILE_THREADS),
        })
    }

    /// The spec of the plan.
    #[must_use]
    pub const fn spec(&self) -> &NormBackwardSpec {
        &self.spec
    }

    /// Bytes of the sums over rows, which lie before those of columns.
    const fn sums_bytes(&self) -> usize {
        match self.way {
            Way::Rows { .. } => 0,
            Way::Tiles { .. } => aligned(2 * size_of::<f32>() * self.spec.rows),
        }
    }

    /// Size of the partial sums that blocks exchange.
    #[must_use]
    pub const fn partial_bytes(&self) -> usize {
        let cols = self.spec.cols;
        // A block writes the sums of all its threads, including columns after the end.
        let (apart, width) = match self.way {
            Way::Rows { team, chunk, grid, .. } => {
                (grid.blocks[0], (chunk as usize).next_multiple_of(VECTOR * team as usize))
            }
            Way::Tiles { tiles, tiles_cols, .. } => (tiles.blocks[0] / tiles_cols, cols),
        };
        let wanted = self.spec.dgamma as usize + self.spec.dbeta as usize;
        self.sums_bytes() + wanted * apart as usize * width * size_of::<f32>()
    }

    /// Launches the gradient.
    ///
    /// # Errors
    /// A buffer that the plan needs is null, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, buffers: &NormBackwardPointers<DevPtr<'_>>) -> Result<()> {
        self.check(target.is_host(), buffers)?;
        let (spec, params) = (&self.spec, self.params(buffers));
        if spec.rows == 0 && !spec.dgamma && !spec.dbeta {
            return Ok(());
        }
        match self.way {
            Way::Rows { team, grid, .. } => {
                launch(target, self.rows_kernel(team, grid.cluster, self.has_vectors(&params)), grid, &params)
            }
            Way::Tiles { sums, tiles, .. } => {
                if spec.dx {
                    launch(target, KernelId::NormBackwardSums(spec.input), sums, &params)?;
                }
                launch(target, KernelId::NormBackwardTiles(spec.input), tiles, &params)
            }
        }
    }

    /// The kernel of [`Way::Rows`]: with or without clusters, and with or without 16-byte accesses.
    const fn rows_kernel(&self, team: u32, cluster: u32, vectors: bool) -> KernelId {
        let NormBackwardSpec { cols, input, .. } = self.spec;
        match (cluster > 1, vectors) {
            (true, true) => KernelId::NormBackwardCluster(input),
            (true, false) => KernelId::NormBackwardClusterElements(input),
            (false, true) if cols > FEW_COLS * team as usize => KernelId::NormBackwardWide(input),
            (false, true) => KernelId::NormBackward(input),
            (false, false) => KernelId::NormBackwardElements(input),
        }
    }

    /// Whether every row allows 16-byte accesses.
    fn has_vectors(&self, p: &NormBackwardParams<'_>) -> bool {
        self.spec.cols.is_multiple_of(VECTOR) && [p.dy, p.x, p.add, p.dx].iter().all(|tensor| tensor.is_aligned(16))
    }

    #[inline]
    fn params<'a>(&self, b: &NormBackwardPointers<DevPtr<'a>>) -> NormBackwardParams<'a> {
        let spec = &self.spec;
        let (team, stages, tiles_cols, chunk) = match self.way {
            Way::Rows { team, stages, chunk, .. } => (team, stages, 0, chunk),
            Way::Tiles { tiles_cols, chunk, .. } => (0, 0, tiles_cols, chunk),
        };
        NormBackwardParams {
            at: NormBackwardPointers {
                mean: b.mean.when(spec.kind == NormKind::LayerNorm),
                add: b.add.when(spec.add),
                dx: b.dx.when(spec.dx),
                dgamma: b.dgamma.when(spec.dgamma),
                dbeta: b.dbeta.when(spec.dbeta),
                partial: b.partial.offset(self.sums_bytes()),
                sums: b.partial,
                ..*b
            },
            rows: spec.rows as u32,
            cols: spec.cols as u32,
            weight_kind: spec.weight as u32,
            zero_centered: u32::from(spec.zero_centered_gamma),
            team,
            stages,
            tiles_cols,
            chunk,
        }
    }

    /// Checks that every buffer that the kernels use is present.
    fn check(&self, host: bool, b: &NormBackwardPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        let sums = spec.dgamma || spec.dbeta;
        let missing = (spec.rows != 0
            && (b.dy.is_null()
                || b.x.is_null()
                || b.rstd.is_null()
                || (spec.kind == NormKind::LayerNorm && b.mean.is_null())
                || (spec.add && b.add.is_null())
                || (spec.dx && b.dx.is_null())))
            || b.gamma.is_null()
            || (spec.dgamma && b.dgamma.is_null())
            || (spec.dbeta && b.dbeta.is_null())
            || (self.sums_bytes() != 0 && b.partial.is_null())
            // The host backend sums columns without a workspace.
            || (!host && sums && (b.counters.is_null() || b.partial.is_null()));
        if missing {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: Limits = Limits { multiprocessors: 132, shared_bytes: 232_448, clusters: true };
    const ADA: Limits = Limits { multiprocessors: 128, shared_bytes: 101_376, clusters: false };
    const SPEC: NormBackwardSpec = NormBackwardSpec {
        rows: 8192,
        cols: 8192,
        kind: NormKind::LayerNorm,
        input: Float::Bf16,
        weight: Float::F32,
        zero_centered_gamma: false,
        add: false,
        dx: true,
        dgamma: true,
        dbeta: true,
        limits: HOPPER,
    };

    #[test]
    fn every_length_has_a_launch_within_the_limits() -> Result<()> {
        for limits in [HOPPER, ADA, Limits { multiprocessors: 1, shared_bytes: 0, clusters: false }] {
            for input in [Float::F32, Float::Bf16] {
                for cols in [1, 7, 64, 65, 1024, 8191, 8192, 8193, 16_384, 16_385, 65_536, 1 << 20] {
                    for rows in [0, 1, 16, 17, 8192] {
                        let plan = NormBackwardPlan::new(NormBackwardSpec { rows, cols, input, limits, ..SPEC })?;
                        match plan.way {
                            Way::Rows { team, stages, chunk, grid } => {
                                let each = if grid.cluster == 1 { MOST_COLS } else { FEW_COLS };
                                assert!(chunk as usize <= team as usize * each, "{plan:?}");
                                assert!(BACKWARD_THREADS.is_multiple_of(team), "{plan:?}");
                                // The last block has columns, too.
                                let (most, blocks) = (chunk as usize, grid.cluster as usize);
                                assert!(most * blocks >= cols && most * (blocks - 1) < cols, "{plan:?}");
                                assert!(grid.blocks[0].is_multiple_of(grid.cluster), "{plan:?}");
                                assert!((MIN_STAGES as u32..=8).contains(&stages) && team >= MIN_TEAM, "{plan:?}");
                                assert!(grid.shared_bytes as usize + RESERVED_SHARED <= limits.shared_bytes as usize);
                                assert!(grid.blocks[0] <= limits.multiprocessors && grid.blocks[0] >= 1);
                            }
                            Way::Tiles { tiles_cols, chunk, tiles, sums } => {
                                let parts = tiles.blocks[0] / tiles_cols;
                                assert!(tiles.blocks[0] % tiles_cols == 0 && parts >= 1, "{plan:?}");
                                assert!(tiles_cols as usize * TILE_COLS >= cols, "{plan:?}");
                                assert!(parts as usize * chunk as usize >= rows, "{plan:?}");
                                assert_eq!(sums.blocks[0] == 0, rows == 0);
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn rows_go_where_they_fit() -> Result<()> {
        let stages = |cols, input, add, limits| {
            let spec = NormBackwardSpec { cols, input, add, limits, ..SPEC };
            Ok::<_, Error>(match NormBackwardPlan::new(spec)?.way {
                Way::Rows { team, stages, .. } => Some((team, stages)),
                Way::Tiles { .. } => None,
            })
        };
        assert_eq!(stages(8192, Float::Bf16, false, HOPPER)?, Some((512, 6)));
        assert_eq!(stages(8192, Float::Bf16, true, HOPPER)?, Some((512, 4)));
        assert_eq!(stages(1024, Float::F32, false, HOPPER)?, Some((64, 3)));
        assert_eq!(stages(12_288, Float::Bf16, false, HOPPER)?, Some((512, 4)));
        assert_eq!(stages(12_288, Float::F32, false, ADA)?, None);
        assert_eq!(stages(16_384, Float::Bf16, false, HOPPER)?, Some((512, 6)));
        assert_eq!(stages(65_536, Float::F32, true, HOPPER)?, Some((512, 2)));
        assert_eq!(stages(65_537, Float::Bf16, false, HOPPER)?, None);
        Ok(())
    }

    #[test]
    fn kernels_follow_columns_and_alignment() -> Result<()> {
        let kernels = |cols| {
            let plan = NormBackwardPlan::new(NormBackwardSpec { cols, ..SPEC })?;
            let Way::Rows { team, grid, .. } = plan.way else { return Err(Error::state(OP, "not in one launch")) };
            Ok::<_, Error>([true, false].map(|vectors| plan.rows_kernel(team, grid.cluster, vectors).symbol()))
        };
        for few in [1, 16, 1000, 8192] {
            assert_eq!(kernels(few)?, ["norm_backward_bf16", "norm_backward_elements_bf16"]);
        }
        for many in [8193, 12_288] {
            assert_eq!(kernels(many)?, ["norm_backward_wide_bf16", "norm_backward_elements_bf16"]);
        }
        assert_eq!(kernels(12_289)?, ["norm_backward_cluster_bf16", "norm_backward_cluster_elements_bf16"]);
        Ok(())
    }

    #[test]
    fn partial_sums_are_one_row_per_block() -> Result<()> {
        assert_eq!(NormBackwardPlan::new(SPEC)?.partial_bytes(), 2 * 132 * 8192 * 4);
        let rms = NormBackwardSpec { kind: NormKind::RmsNorm, dbeta: false, rows: 100, ..SPEC };
        assert_eq!(NormBackwardPlan::new(rms)?.partial_bytes(), 100 * 8192 * 4);
        let ragged = NormBackwardSpec { cols: 5000, ..rms };
        assert_eq!(NormBackwardPlan::new(ragged)?.partial_bytes(), 100 * 8192 * 4);
        let long = NormBackwardSpec { cols: 16_384, rows: 100, dbeta: false, ..SPEC };
        assert_eq!(NormBackwardPlan::new(long)?.partial_bytes(), 66 * 16_384 * 4);
        let longest = NormBackwardSpec { cols: 131_072, ..long };
        assert_eq!(NormBackwardPlan::new(longest)?.partial_bytes(), aligned(800) + 2 * 131_072 * 4);
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let refused = |spec| assert!(NormBackwardPlan::new(spec).is_err(), "{spec:?}");
        refused(NormBackwardSpec { dx: false, dgamma: false, dbeta: false, ..SPEC });
        refused(NormBackwardSpec { kind: NormKind::RmsNorm, ..SPEC });
        refused(NormBackwardSpec { add: true, dx: false, ..SPEC });
        refused(NormBackwardSpec { cols: 0, ..SPEC });
        refused(NormBackwardSpec { rows: 1 << 31, ..SPEC });
        refused(NormBackwardSpec { rows: 1, cols: 1 << 22, ..SPEC });
    }
}
