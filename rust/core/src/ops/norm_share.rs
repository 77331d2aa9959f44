//! How the blocks of a forward norm divide rows and columns: teams of threads, clusters, shared memory. For
//! [`crate::ops::norm`].

use te_fast_kernels::constants::common::{VECTOR, WARP};
use te_fast_kernels::constants::norm::{
    CHUNK, HELD_BYTES, MAX_BLOCKS, SHORT_BLOCKS, SHORT_BYTES, SHORT_THREADS, SHORT_TRANSPOSE_BLOCKS, THREADS,
    TRANSPOSED_COLUMNS,
};
use te_fast_kernels::{Float, KernelId};

use crate::ops::norm_spec::NormSpec;
use crate::runtime::lane::Limits;

/// Threads of a block without a transposed layout, if there are too few rows for more.
const ROW_THREADS: u32 = 128;
/// Largest number of columns of a block, if blocks can share rows: its gamma and beta, as f32, and its rows must fit
/// into shared memory.
const BLOCK_COLUMNS: usize = 8192;
/// Bytes of a column's gamma and beta in shared memory.
pub(super) const WEIGHT_BYTES: usize = 8;
/// Static shared memory of a block.
const STATIC_SHARED: usize = 9 << 10;
/// Shared memory of each block that the driver reserves.
const DRIVER_SHARED: usize = 1 << 10;
/// The ways to store rows transposed: blocks that share a row, threads, rows that are stored together, tensors that
/// pass through shared memory. If two ways take equally long, the first one is used.
const TRANSPOSED: [Layout; 11] = [
    Layout::new(1, 256, 64, 1),
    Layout::new(1, 512, 64, 1),
    Layout::new(2, 512, 64, 1),
    Layout::new(1, 512, 32, 2),
    Layout::new(1, 512, 32, 1),
    Layout::new(2, 512, 32, 2),
    Layout::new(2, 512, 32, 1),
    Layout::new(4, 512, 32, 1),
    Layout::new(8, 512, 32, 1),
    Layout::new(1, 256, 32, 1),
    Layout::new(1, 512, 32, 0),
];
/// The fewest columns of a block that shares a row.
const SHARED_COLUMNS: u32 = 512;
/// Fixed cost of a round of strips, in columns.
const ROUND_COLUMNS: u32 = 384;
/// Columns of the longest row for which a warp holds several rows.
pub(super) const SHORT_COLUMNS: usize = WARP as usize * VECTOR;
/// The fewest lanes per row, whose sums the matrix units compute.
const MIN_LANES: usize = 4;

/// Threads that have rows to themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Team {
    threads: u32,
    /// Rows at a time.
    rows: u32,
}

impl Team {
    /// For `cols` columns; a thread holds a number of columns of each of its rows.
    fn new(cols: usize, input: Float, each: usize) -> Option<Self> {
        let threads = cols.div_ceil(each * 32) * 32;
        let rows = (HELD_BYTES / input.size() / each) as u32;
        (threads <= THREADS as usize).then_some(Self { threads: threads as u32, rows })
    }

    /// As many rows as fit into a number of threads, at least one.
    const fn fill(self, threads: u32) -> u32 {
        if threads < self.threads { self.threads } else { threads / self.threads * self.threads }
    }
}

/// A row of [`TRANSPOSED`].
#[derive(Clone, Copy)]
struct Layout {
    blocks: u32,
    threads: u32,
    strip: u32,
    ring: u32,
}

impl Layout {
    const fn new(blocks: u32, threads: u32, strip: u32, ring: u32) -> Self {
        Self { blocks, threads, strip, ring }
    }
}

/// How a block works through its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) kernel: KernelId,
    pub(super) threads: u32,
    pub(super) team: u32,
    pub(super) strip: u32,
    pub(super) chunk: u32,
    pub(super) ring: u32,
    /// Blocks of a cluster; each has `chunk` columns of the cluster's rows.
    pub(super) blocks: u32,
}

impl Share {
    /// The way of a launch, and the bytes of dynamic shared memory of a block.
    pub(super) fn new(spec: &NormSpec) -> (Self, usize) {
        let shared = (spec.limits.shared_bytes as usize).saturating_sub(STATIC_SHARED);
        if spec.cols <= SHORT_COLUMNS {
            Self::of_short_rows(spec)
        } else if spec.columnwise {
            Self::of_strips(spec, shared)
        } else {
            Self::of_rows(spec, shared)
        }
    }

    fn shared_bytes(&self, columnwise: bool, team: Team) -> usize {
        let chunk = self.chunk as usize;
        let weights = if team.rows == 2 { WEIGHT_BYTES * chunk } else { 0 };
        let behind = if columnwise { self.strip as usize * chunk } else { weights };
        self.ring as usize * self.threads as usize * HELD_BYTES + behind
    }

    /// Short rows, several per warp, with or without the transposed layout.
    fn of_short_rows(spec: &NormSpec) -> (Self, usize) {
        let NormSpec { rows, cols, input, limits, columnwise, .. } = *spec;
        let lanes = cols.div_ceil(VECTOR).next_power_of_two().max(MIN_LANES);
        let held = SHORT_THREADS as usize / lanes * (SHORT_BYTES / VECTOR / input.size());
        // Runs of 64 bytes are faster if every block has several.
        let wide = rows >= 4 * 64 * (limits.multiprocessors * short_blocks(true)) as usize;
        let (kernel, strip) = match (columnwise, wide) {
            (false, _) => (KernelId::NormShort(input), held as u32),
            (true, false) => (KernelId::NormShortTranspose(input), 32),
            (true, true) => (KernelId::NormShortTranspose(input), 64),
        };
        let (threads, team, chunk) = (SHORT_THREADS, lanes as u32, whole_columns(cols, 1));
        let stage = if columnwise { strip * chunk } else { 0 };
        (
            Self { kernel, threads, team, strip, chunk, ring: 0, blocks: 1 },
            WEIGHT_BYTES * chunk as usize + stage as usize,
        )
    }

    /// Without the transposed layout: teams with two rows at a time and gamma and beta in shared memory, or else with
    /// one row.
    fn of_rows(spec: &NormSpec, shared: usize) -> (Self, usize) {
        let NormSpec { cols, input, limits, .. } = *spec;
        let most = if limits.clusters { MAX_BLOCKS as usize } else { 1 };
        let blocks = cols.div_ceil(BLOCK_COLUMNS).next_power_of_two();
        let blocks = if blocks <= most { blocks } else { 1 };
        let chunk = whole_columns(cols, blocks);
        let held = [2, 1].into_iter().find_map(|rows| {
            let team = Team::new(cols.min(chunk as usize), input, HELD_BYTES / rows / input.size())?;
            let strip_of = |threads| threads / team.threads * team.rows;
            let many = spec.rows >= (limits.multiprocessors * strip_of(team.fill(THREADS))) as usize;
            let threads = team.fill(if many { THREADS } else { ROW_THREADS });
            let (kernel, strip, blocks) = (KernelId::Norm(input), strip_of(threads), blocks as u32);
            (0..=1 + u32::from(spec.residual)).rev().find_map(|ring| {
                let share = Self { kernel, threads, team: team.threads, strip, chunk, ring, blocks };
                let bytes = share.shared_bytes(false, team);
                (bytes <= shared).then_some((share, bytes))
            })
        });
        held.unwrap_or_else(|| {
            let kernel = KernelId::NormLong(input);
            (Self { kernel, threads: THREADS, team: THREADS, strip: 1, chunk, ring: 0, blocks: 1 }, 0)
        })
    }

    /// With the transposed layout: runs of 64 bytes if these leave at most a quarter of the multiprocessors idle, or
    /// else the fastest way.
    fn of_strips(spec: &NormSpec, shared: usize) -> (Self, usize) {
        let NormSpec { rows, cols, input, limits, .. } = *spec;
        let fitting = || TRANSPOSED.into_iter().filter_map(|layout| Self::of_layout(spec, shared, layout));
        let wide = fitting().find(|(share, _)| {
            share.strip == 64 && 4 * rows.div_ceil(64) * share.blocks as usize >= 3 * limits.multiprocessors as usize
        });
        let narrow =
            || fitting().filter(|(share, _)| share.strip == 32).min_by_key(|(share, _)| share.time(rows, &limits));
        wide.or_else(narrow).unwrap_or_else(|| {
            let (kernel, strip) = (KernelId::NormLong(input), 32);
            let most = (shared / strip as usize / CHUNK).max(1) * CHUNK;
            let chunk = whole_columns(cols, 1).min(most as u32);
            let share = Self { kernel, threads: THREADS, team: THREADS, strip, chunk, ring: 0, blocks: 1 };
            (share, (strip * chunk) as usize)
        })
    }

    /// A layout for these rows, if the device has enough clusters and shared memory and every block has columns.
    fn of_layout(spec: &NormSpec, shared: usize, layout: Layout) -> Option<(Self, usize)> {
        let NormSpec { cols, input, limits, .. } = *spec;
        let Layout { blocks, strip, ring, .. } = layout;
        let chunk = whole_columns(cols, blocks as usize);
        let team = Team::new(cols.min(chunk as usize), input, TRANSPOSED_COLUMNS)?;
        let shares =
            blocks == 1 || limits.clusters && chunk >= SHARED_COLUMNS && (((blocks - 1) * chunk) as usize) < cols;
        if team.threads > layout.threads || !shares || ring > 1 + u32::from(spec.residual) {
            return None;
        }
        let (kernel, threads) = (KernelId::NormTranspose(input), team.fill(layout.threads));
        let share = Self { kernel, threads, team: team.threads, strip, chunk, ring, blocks };
        let many = (THREADS / layout.threads) as usize; // blocks of a multiprocessor
        let each = (shared + STATIC_SHARED - (many - 1) * DRIVER_SHARED) / many - STATIC_SHARED;
        let bytes = share.shared_bytes(true, team);
        (bytes <= each).then_some((share, bytes))
    }

    /// Time of strips of a number of rows, in columns of one block: rounds of strips, each with a fixed cost. Fitted to
    /// an H200, 64 to 4096 rows of 1024 to 16384 columns (`cuda/notes-norm.md`).
    fn time(&self, rows: usize, limits: &Limits) -> usize {
        let many = THREADS / self.threads;
        let rounds = rows.div_ceil(self.strip as usize).div_ceil(limits.clusters_at_once(self.blocks, many) as usize);
        rounds * (self.chunk + ROUND_COLUMNS) as usize * many as usize
    }

    /// Blocks for a number of strips: one per strip, but no more than run at once if a block continues with other
    /// strips.
    pub(super) fn grid_blocks(&self, strips: usize, limits: &Limits) -> usize {
        let short = |columnwise| strips.min((limits.multiprocessors * short_blocks(columnwise)) as usize);
        match self.kernel {
            KernelId::NormLong(_) => strips,
            KernelId::NormShort(_) => short(false),
            KernelId::NormShortTranspose(_) => short(true),
            _ => {
                let clusters = limits.clusters_at_once(self.blocks, THREADS / self.threads);
                strips.min(clusters as usize) * self.blocks as usize
            }
        }
    }
}

/// Number of blocks with short rows that fit on a multiprocessor.
const fn short_blocks(columnwise: bool) -> u32 {
    if columnwise { SHORT_TRANSPOSE_BLOCKS } else { SHORT_BLOCKS }
}

/// Columns of each of `blocks` blocks.
fn whole_columns(cols: usize, blocks: usize) -> u32 {
    cols.div_ceil(blocks).next_multiple_of(CHUNK) as u32
}
