//! Row maps of MoE permutations in one launch, the ends of a finished map, and the count of dropped rows.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use te_fast_kernels::KernelId;

use crate::driver::Stream;
use crate::error::{Error, Result};
use crate::host;
use crate::kernel::{Backend, DevPtr, Grid, Target, launch};
use crate::ops::permute::{Layout, MAX_EXPERTS, MapShape};
use crate::params;

/// Experts that one block owns.
const SLICE: usize = 32;
/// Most blocks that share the work, the describing one apart.
const MAX_TILES: usize = 512;
/// As many blocks as there are multiprocessors on a large GPU; more only add to what each has to read.
const TILES: usize = 128;
/// Tokens of a chunk that are worth a block.
const SHORT_CHUNK: usize = 64;
/// Tokens of a chunk in long maps: half of those whose bits stay in shared memory, so that two blocks share a
/// multiprocessor.
const LONG_CHUNK: usize = 1024;
const MAP_THREADS: u32 = 256;
const ENDS_THREADS: u32 = 512;
/// Most parts that ends are counted in.
const MAX_PARTIALS: usize = 32;

params! {
    /// Parameters of `permute_map_*`.
    pub struct PermuteMapParams<'a> [112]
        for PermuteMapMaskU8 | PermuteMapMaskI32 | PermuteMapMaskI64 | PermuteMapIndexI32 => host::permute_map::run {
        /// Mask `[T, E]` or expert ids `[T, K]`.
        pub routing: DevPtr<'a>,
        /// The map.
        pub row_id_map: DevPtr<'a>,
        /// Scratch: u32 `[chunks][slices * 32]`, then one sum per slice of a chunk.
        pub counts: DevPtr<'a>,
        /// Scratch: u8 `[slices][T]`, mask alone.
        pub shares: DevPtr<'a>,
        /// i32 per expert.
        pub ends: DevPtr<'a>,
        /// i64 per expert, or null.
        pub pad_offsets: DevPtr<'a>,
        /// i64 per expert, or null.
        pub padded_counts: DevPtr<'a>,
        /// i64 padded and routed rows, or null.
        pub totals: DevPtr<'a>,
        /// Tokens; slots for an index.
        pub tokens: u64,
        /// Rows of the permuted tensor.
        pub capacity: u64,
        /// Experts.
        pub experts: u32,
        /// Slots per token for an index, else 0.
        pub top_k: u32,
        /// Rows of an expert are padded to a multiple of this.
        pub align: u32,
        /// Tokens of a chunk.
        pub chunk_tokens: u32,
        /// State that no concurrent launch uses.
        pub slot: u32,
        /// 16-byte words of `fill`.
        pub fill_words: u32,
        /// Memory that is filled with ones, or null.
        pub fill: DevPtr<'a>,
    }
}

params! {
    /// Parameters of `permute_ends`.
    pub struct PermuteEndsParams<'a> [32] for PermuteEnds => host::permute_map::run_ends {
        /// The map.
        pub row_id_map: DevPtr<'a>,
        /// i32 `[blocks][groups]`.
        pub ends: DevPtr<'a>,
        /// Tokens.
        pub tokens: u64,
        /// Experts of a mask map, else 0.
        pub experts: u32,
        /// Slots per token of an index map, else 0.
        pub top_k: u32,
    }
}

params! {
    /// Parameters of `permute_dropped`.
    pub struct PermuteDroppedParams<'a> [16] for PermuteDropped => host::permute_map::run_dropped {
        /// One i64.
        pub out: DevPtr<'a>,
        /// 1 starts the count again.
        pub clear: u64,
    }
}

/// Element type of a routing map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Mask of bytes: bool, u8, i8.
    Mask8,
    /// Mask of i32.
    Mask32,
    /// Mask of i64.
    Mask64,
    /// Expert ids, i32.
    Index,
}

/// What a map is made for.
#[derive(Clone, Copy, Debug)]
pub struct MapSpec {
    /// Tokens, rows of the permuted tensor (`usize::MAX` while unknown) and layout.
    pub shape: MapShape,
    /// Element type of the routing map.
    pub routing: Routing,
    /// Rows of an expert are padded to a multiple of this; 1 for none.
    pub align: usize,
}

/// Buffers of a map.
#[derive(Clone, Copy, Debug)]
pub struct MapOutputs<'a> {
    /// The routing map.
    pub routing: DevPtr<'a>,
    /// [`MapShape::entries`] of i32.
    pub row_id_map: DevPtr<'a>,
    /// i32 per expert ([`MapPlan::experts`]).
    pub ends: DevPtr<'a>,
    /// i64 per expert, or null.
    pub pad_offsets: DevPtr<'a>,
    /// i64 per expert, or null.
    pub padded_counts: DevPtr<'a>,
    /// Two i64: padded and routed rows; or null.
    pub totals: DevPtr<'a>,
    /// [`MapPlan::scratch_bytes`].
    pub scratch: DevPtr<'a>,
    /// Memory that the launch behind the map wants filled with ones.
    pub fill: Fill<'a>,
}

/// Bytes that are filled at once.
pub(crate) const FILL_WORD: usize = 16;

/// Memory to fill with ones.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// 16-byte aligned, or null.
    pub data: DevPtr<'a>,
    /// 16-byte words.
    pub words: u32,
}

impl Fill<'_> {
    /// Nothing to fill.
    pub const NONE: Self = Self { data: DevPtr::null(), words: 0 };
}

/// A checked map: kernel and grid are chosen.
#[derive(Clone, Copy, Debug)]
pub struct MapPlan {
    spec: MapSpec,
    kernel: KernelId,
    units: usize,
    slices: usize,
    chunk_tokens: usize,
    chunks: usize,
}

impl MapPlan {
    /// Checks `spec` and shares out the work.
    ///
    /// # Errors
    /// Sizes beyond 32-bit rows, or an alignment of 0.
    pub fn new(spec: MapSpec) -> Result<Self> {
        let op = "permute_map";
        let bounded = MapShape { rows: 0, ..spec.shape };
        bounded.check(op)?;
        let (units, experts, kernel) = match (spec.shape.layout, spec.routing) {
            (Layout::Mask { experts }, Routing::Mask8) => (spec.shape.tokens, experts, KernelId::PermuteMapMaskU8),
            (Layout::Mask { experts }, Routing::Mask32) => (spec.shape.tokens, experts, KernelId::PermuteMapMaskI32),
            (Layout::Mask { experts }, Routing::Mask64) => (spec.shape.tokens, experts, KernelId::PermuteMapMaskI64),
            (Layout::Index { top_k }, Routing::Index) => {
                (spec.shape.tokens * top_k, MAX_EXPERTS, KernelId::PermuteMapIndexI32)
            }
            _ => return Err(Error::value(op, "the routing map's type does not fit the map's layout")),
        };
        if spec.align == 0 || i32::try_from(spec.align).is_err() {
            return Err(Error::shape(op, "the alignment", "1 to 2**31 - 1", spec.align));
        }
        let slices = experts.div_ceil(SLICE);
        let most = MAX_TILES / slices;
        let wanted = if slices * units.div_ceil(SHORT_CHUNK) <= TILES {
            units.div_ceil(SHORT_CHUNK)
        } else {
            (TILES / slices).max(units.div_ceil(LONG_CHUNK))
        };
        let chunk_tokens = units.div_ceil(wanted.clamp(1, most)).next_multiple_of(32).max(32);
        if i32::try_from(units).is_err() {
            return Err(Error::shape(op, "tokens times slots", "below 2**31", units));
        }
        Ok(Self { spec, kernel, units, slices, chunk_tokens, chunks: units.div_ceil(chunk_tokens) })
    }

    /// Experts that the per-expert outputs have.
    #[must_use]
    pub const fn experts(&self) -> usize {
        match self.spec.shape.layout {
            Layout::Mask { experts } => experts,
            Layout::Index { .. } => MAX_EXPERTS,
        }
    }

    /// Size of the scratch memory.
    #[must_use]
    pub const fn scratch_bytes(&self) -> usize {
        self.count_bytes() + self.slices * self.spec.shape.tokens
    }

    const fn count_bytes(&self) -> usize {
        self.chunks * self.slices * (SLICE + 1) * 4
    }

    /// Launches it; without tokens there is nothing to write but zeros, which the caller has.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(&self, target: &mut Target<'_>, b: &MapOutputs<'_>) -> Result<()> {
        let top_k = match self.spec.shape.layout {
            Layout::Mask { .. } => 0,
            Layout::Index { top_k } => top_k as u32,
        };
        let params = PermuteMapParams {
            routing: b.routing,
            row_id_map: b.row_id_map,
            counts: b.scratch,
            shares: b.scratch.offset(self.count_bytes()),
            ends: b.ends,
            pad_offsets: b.pad_offsets,
            padded_counts: b.padded_counts,
            totals: b.totals,
            tokens: self.units as u64,
            capacity: self.spec.shape.rows as u64,
            experts: self.experts() as u32,
            top_k,
            align: self.spec.align as u32,
            chunk_tokens: self.chunk_tokens as u32,
            slot: slot(target)?,
            fill_words: b.fill.words,
            fill: b.fill.data,
        };
        let blocks = (self.slices * self.chunks + 1) as u32;
        launch(target, self.kernel, Grid::linear(blocks, MAP_THREADS), &params)
    }
}

/// Counts the ends of a finished map.
#[derive(Clone, Copy, Debug)]
pub struct EndsPlan {
    shape: MapShape,
}

impl EndsPlan {
    /// For a map of this shape.
    ///
    /// # Errors
    /// Sizes beyond what a launch can index.
    pub fn new(shape: MapShape) -> Result<Self> {
        shape.check("permute_ends")?;
        Ok(Self { shape })
    }

    /// Parts that the ends are counted in.
    #[must_use]
    pub const fn partials(&self) -> usize {
        let parts = self.shape.tokens.div_ceil(ENDS_THREADS as usize / 8);
        if parts == 0 {
            1
        } else if parts < MAX_PARTIALS {
            parts
        } else {
            MAX_PARTIALS
        }
    }

    /// Size of the ends.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.partials() * self.shape.groups() * 4
    }

    /// Launches it.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(&self, target: &mut Target<'_>, map: DevPtr<'_>, ends: DevPtr<'_>) -> Result<()> {
        let (experts, top_k) = match self.shape.layout {
            Layout::Mask { experts } => (experts as u32, 0),
            Layout::Index { top_k } => (0, top_k as u32),
        };
        let params = PermuteEndsParams { row_id_map: map, ends, tokens: self.shape.tokens as u64, experts, top_k };
        launch(target, KernelId::PermuteEnds, Grid::linear(self.partials() as u32, ENDS_THREADS), &params)
    }
}

/// Copies the device's count of dropped rows to `out`, one i64, and starts it again when `clear` is set.
///
/// # Errors
/// The driver's refusal.
pub fn read_dropped(target: &mut Target<'_>, out: DevPtr<'_>, clear: bool) -> Result<()> {
    let params = PermuteDroppedParams { out, clear: u64::from(clear) };
    launch(target, KernelId::PermuteDropped, Grid::linear(1, 32), &params)
}

/// States of the map kernel, per device: the first for streams, the others for captured launches.
const SLOTS: u32 = 16_384;
const STREAM_SLOTS: u32 = 4096;

/// A state that nothing else uses at the same time. Launches of a stream follow each other, so each stream has one.
/// A captured launch may run on any stream later, so each has one of its own; they come round again after twelve
/// thousand.
fn slot(target: &Target<'_>) -> Result<u32> {
    static CAPTURED: AtomicU32 = AtomicU32::new(0);
    let Backend::Cuda(queue) = &target.backend else { return Ok(0) };
    if queue.is_capturing()? {
        return Ok(STREAM_SLOTS + CAPTURED.fetch_add(1, Ordering::Relaxed) % (SLOTS - STREAM_SLOTS));
    }
    Ok(stream_slot(queue.stream))
}

/// Open addressing by the stream's handle. With every place taken, streams share by hash; torch has about a hundred.
fn stream_slot(stream: Stream) -> u32 {
    static STREAMS: [AtomicU64; STREAM_SLOTS as usize] = [const { AtomicU64::new(0) }; STREAM_SLOTS as usize];
    let key = stream.0.wrapping_add(1); // 0 marks a free place, and is the default stream's handle
    let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as u32;
    for step in 0..STREAM_SLOTS {
        let at = (first + step) % STREAM_SLOTS;
        let place = &STREAMS[at as usize];
        match place.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return at,
            Err(taken) if taken == key => return at,
            Err(_) => {}
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(tokens: usize, experts: usize) -> Result<MapPlan> {
        let shape = MapShape { tokens, rows: usize::MAX, layout: Layout::Mask { experts } };
        MapPlan::new(MapSpec { shape, routing: Routing::Mask8, align: 1 })
    }

    #[test]
    fn work_is_shared_out_within_the_limits() -> Result<()> {
        for (tokens, experts) in [(0, 1), (1, 1), (4096, 256), (8192, 8), (40_000, 1024), (1 << 20, 256), (1 << 20, 33)]
        {
            let plan = mask(tokens, experts)?;
            assert!(plan.slices * plan.chunks <= MAX_TILES, "{plan:?}");
            assert!(plan.chunks * plan.chunk_tokens >= tokens && plan.chunk_tokens.is_multiple_of(32), "{plan:?}");
        }
        assert_eq!(mask(4096, 256).map(|plan| (plan.slices, plan.chunks, plan.chunk_tokens))?, (8, 16, 256));
        assert!(mask(1 << 31, 1024).is_err());
        Ok(())
    }

    #[test]
    fn streams_keep_their_slot_and_do_not_share() {
        let slots: Vec<u32> = (0..100).map(|i| stream_slot(Stream(i * 64))).collect();
        assert_eq!(slots, (0..100).map(|i| stream_slot(Stream(i * 64))).collect::<Vec<_>>());
        assert_eq!(slots.iter().collect::<std::collections::BTreeSet<_>>().len(), 100);
    }
}
