//! Row maps of MoE permutations, the ends of a finished map, and the count of dropped rows. A map is a launch of its
//! own, or the first blocks of the launch that moves rows by it.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::common::WARP;
pub use te_fast_kernels::constants::moe::STATE_BYTES;
use te_fast_kernels::constants::moe::{
    self, ENDS_THREADS, LEADING_MAP_GROUPS, MAP_GROUPS, MAP_THREADS, MAX_EXPERTS, MAX_TILES,
};

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Backend, Target, launch};
use crate::ops::row_map::{Layout, MapBuffers, MapShape};
use crate::{params, pointers};

/// Experts that one block owns.
const SLICE: usize = WARP as usize;
/// As many blocks as a large GPU has multiprocessors; more blocks would only read more.
const TILES: usize = 128;
/// Blocks of a map that precedes rows; these blocks have half the threads.
const LEADING_TILES: usize = 256;
/// Smallest number of tokens in a chunk for a block of its own.
const SHORT_CHUNK: usize = 64;
/// Tokens of a chunk in long maps: half of the tokens whose bits fit into shared memory, so that two blocks share a
/// multiprocessor.
const LONG_CHUNK: usize = MAP_GROUPS * WARP as usize / 2;
/// The same for a map that precedes rows, whose blocks have less shared memory.
const LEADING_CHUNK: usize = LEADING_MAP_GROUPS * WARP as usize;
/// Largest number of parts in which ends are counted.
const MAX_PARTIALS: usize = 32;

params! {
    /// Parameters of `permute_map`, and of a map in front of rows.
    #[derive(Default)]
    pub struct MakeMapParams<'a> [moe::MAKE_MAP_PARAMS_BYTES] for PermuteMap => host::permute_map::run {
        ..MapPointers,
        /// Rows of the permuted tensor.
        pub capacity: u64,
        /// Tokens; slots for an index.
        pub tokens: u32,
        /// Experts.
        pub experts: u32,
        /// Slots per token for an index, else 0.
        pub top_k: u32,
        /// Rows of an expert are padded to a multiple of this.
        pub align: u32,
        /// Tokens of a chunk.
        pub chunk_tokens: u32,
        /// 16-byte words of `fill`.
        pub fill_words: u32,
        /// Blocks of the map; 0: the launch makes no map.
        pub blocks: u32,
        /// [`Routing`].
        pub routing_type: u32,
    }
}

impl MakeMapParams<'_> {
    fn launch(&self, target: &mut Target<'_>) -> Result<()> {
        launch(target, KernelId::PermuteMap, Grid::linear(self.blocks, MAP_THREADS), self)
    }
}

/// A map for a launch that moves rows by it; by default a finished map.
#[derive(Clone, Copy, Debug, Default)]
pub struct Making<'a> {
    /// The part of the map that the launch makes.
    pub(crate) params: MakeMapParams<'a>,
    /// Whether the previous launch makes the map.
    pub(crate) before: bool,
}

impl Making<'_> {
    /// Makes the map if no rows move.
    ///
    /// # Errors
    /// The driver's refusal.
    pub(crate) fn finish(&self, target: &mut Target<'_>) -> Result<()> {
        self.params.launch(target)
    }
}

params! {
    /// Parameters of `permute_ends`.
    pub struct PermuteEndsParams<'a> [moe::PERMUTE_ENDS_PARAMS_BYTES] for PermuteEnds => host::permute_map::run_ends {
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
    pub struct PermuteDroppedParams<'a> [moe::PERMUTE_DROPPED_PARAMS_BYTES] for PermuteDropped => host::permute_map::run_dropped {
        /// The device's count; null on the host.
        pub rows: DevPtr<'a>,
        /// One i64.
        pub out: DevPtr<'a>,
        /// 1 resets the count.
        pub clear: u64,
    }
}

/// Element type of a routing map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Routing {
    /// Mask of bytes: bool, u8, i8.
    Mask8 = moe::ROUTING_MASK8,
    /// Mask of i32.
    Mask32 = moe::ROUTING_MASK32,
    /// Mask of i64.
    Mask64 = moe::ROUTING_MASK64,
    /// Expert ids, i32.
    Index = moe::ROUTING_INDEX,
}

impl Routing {
    /// The type of a mask with these elements, if there is one.
    #[must_use]
    pub const fn of_mask(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Bool | DType::U8 | DType::I8 => Some(Self::Mask8),
            DType::I32 => Some(Self::Mask32),
            DType::I64 => Some(Self::Mask64),
            _ => None,
        }
    }
}

/// The description of a map.
#[derive(Clone, Copy, Debug)]
pub struct MapSpec {
    /// Tokens, rows of the permuted tensor (`usize::MAX` while unknown) and layout.
    pub shape: MapShape,
    /// Element type of the routing map.
    pub routing: Routing,
    /// Rows of an expert are padded to a multiple of this; 1 for none.
    pub align: usize,
    /// Whether rows move by it in the same call.
    pub leads: bool,
}

pointers! {
    /// Buffers of a map.
    pub struct MapPointers {
        /// Mask `[T, E]` or expert ids `[T, K]`.
        routing,
        /// [`MapShape::entries`] of i32.
        row_id_map,
        /// [`MapPlan::scratch_bytes`]: u32 `[chunks][slices * 32]`, then one sum per slice of a chunk.
        counts,
        /// Set by the plan, after the counts: u8 `[T][slices rounded up to 4]`, only for a mask.
        shares,
        /// i32 per expert ([`MapPlan::experts`]).
        ends,
        /// i64 per expert, or null.
        pad_offsets,
        /// i64 per expert, or null.
        padded_counts,
        /// Two i64: padded and routed rows; or null.
        totals,
        /// [`STATE_BYTES`] that are zero before and after the launch, and that no other launch uses meanwhile: counters
        /// of the stream, or, under capture, of the launch itself, since two graphs may be replayed at once.
        state,
        /// Set by the plan: the device's count of dropped rows; null on the host.
        dropped_rows,
        /// Memory to fill with ones for the rows after the map, 16-byte aligned; null if the plan fills nothing.
        fill,
    }
}

/// A checked map, with its work divided among blocks.
#[derive(Clone, Copy, Debug)]
pub struct MapPlan {
    spec: MapSpec,
    units: usize,
    slices: usize,
    chunk_tokens: usize,
    chunks: usize,
    fill_words: u32,
}

impl MapPlan {
    /// Checks `spec` and divides the work.
    ///
    /// # Errors
    /// Sizes beyond 32-bit rows, or an alignment of 0.
    pub fn new(spec: MapSpec) -> Result<Self> {
        let op = "permute_map";
        let bounded = MapShape { rows: 0, ..spec.shape };
        bounded.check(op)?;
        let (units, experts) = match (spec.shape.layout, spec.routing) {
            (Layout::Mask { experts }, Routing::Mask8 | Routing::Mask32 | Routing::Mask64) => {
                (spec.shape.tokens, experts)
            }
            (Layout::Index { top_k }, Routing::Index) => (spec.shape.tokens * top_k, MAX_EXPERTS),
            _ => return Err(Error::value(op, "the routing map's type does not fit the map's layout")),
        };
        if spec.align == 0 || i32::try_from(spec.align).is_err() {
            return Err(Error::shape(op, "the alignment", "1 to 2**31 - 1", spec.align));
        }
        let slices = experts.div_ceil(SLICE);
        let most = MAX_TILES / slices;
        // The map of an index has an unknown number of experts, and takes long in blocks with little shared memory.
        let spec = MapSpec { leads: spec.leads && spec.routing != Routing::Index, ..spec };
        let (tiles, long_chunk) = if spec.leads { (LEADING_TILES, LEADING_CHUNK) } else { (TILES, LONG_CHUNK) };
        let wanted = if slices * units.div_ceil(SHORT_CHUNK) <= tiles {
            units.div_ceil(SHORT_CHUNK)
        } else {
            (tiles / slices).max(units.div_ceil(long_chunk))
        };
        let chunk_tokens = units.div_ceil(wanted.clamp(1, most)).next_multiple_of(32).max(32);
        if i32::try_from(units).is_err() {
            return Err(Error::shape(op, "tokens times slots", "below 2**31", units));
        }
        Ok(Self { spec, units, slices, chunk_tokens, chunks: units.div_ceil(chunk_tokens), fill_words: 0 })
    }

    /// The same, which also fills a number of words of 16 bytes.
    #[must_use]
    pub const fn filling(self, words: u32) -> Self {
        Self { fill_words: words, ..self }
    }

    /// Number of experts in the per-expert outputs.
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
        self.count_bytes() + self.slices.next_multiple_of(4) * self.spec.shape.tokens
    }

    const fn count_bytes(&self) -> usize {
        self.chunks * self.slices * (SLICE + 1) * 4
    }

    /// Prepares the map for a launch of rows that follows on `target`: that launch's first blocks make the map of a
    /// mask, and the map of an index is launched here. Also returns how that launch reads the map.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn make<'a>(
        &self,
        target: &mut Target<'_>,
        b: &MapPointers<DevPtr<'a>>,
    ) -> Result<(Making<'a>, MapBuffers<'a>)> {
        let params = self.params(target, b)?;
        let making = if self.spec.leads {
            Making { params, before: false }
        } else {
            params.launch(target)?;
            Making { before: true, ..Making::default() }
        };
        // An index map does not distinguish experts, so all its rows have one end.
        let ends = match self.spec.shape.layout {
            Layout::Mask { .. } => b.ends,
            Layout::Index { .. } => b.ends.offset(4 * (MAX_EXPERTS - 1)),
        };
        Ok((making, MapBuffers { map: b.row_id_map, pad_offsets: b.pad_offsets, ends, partials: 1 }))
    }

    fn params<'a>(&self, target: &mut Target<'_>, b: &MapPointers<DevPtr<'a>>) -> Result<MakeMapParams<'a>> {
        let top_k = match self.spec.shape.layout {
            Layout::Mask { .. } => 0,
            Layout::Index { top_k } => top_k as u32,
        };
        Ok(MakeMapParams {
            at: MapPointers { shares: b.counts.offset(self.count_bytes()), dropped_rows: dropped_rows(target)?, ..*b },
            capacity: self.spec.shape.rows as u64,
            tokens: self.units as u32,
            experts: self.experts() as u32,
            top_k,
            align: self.spec.align as u32,
            chunk_tokens: self.chunk_tokens as u32,
            fill_words: self.fill_words,
            blocks: (self.slices * self.chunks + 1) as u32,
            routing_type: self.spec.routing as u32,
        })
    }

    /// Launches only the map.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(&self, target: &mut Target<'_>, b: &MapPointers<DevPtr<'_>>) -> Result<()> {
        self.params(target, b)?.launch(target)
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

    /// Parts in which the ends are counted.
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

/// Copies the device's count of dropped rows to `out`, one i64, and resets it if `clear` is set.
///
/// # Errors
/// The driver's refusal.
pub fn read_dropped(target: &mut Target<'_>, out: DevPtr<'_>, clear: bool) -> Result<()> {
    let params = PermuteDroppedParams { rows: dropped_rows(target)?, out, clear: u64::from(clear) };
    launch(target, KernelId::PermuteDropped, Grid::linear(1, WARP), &params)
}

/// The device's count of dropped rows; null on the host, which has its own static.
fn dropped_rows(target: &mut Target<'_>) -> Result<DevPtr<'static>> {
    match &mut target.backend {
        Backend::Cuda(queue) => queue.device.variable(KernelId::PermuteMap, c"permute_dropped_rows"),
        Backend::Host => Ok(DevPtr::null()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(tokens: usize, experts: usize, leads: bool) -> Result<MapPlan> {
        let shape = MapShape { tokens, rows: usize::MAX, layout: Layout::Mask { experts } };
        MapPlan::new(MapSpec { shape, routing: Routing::Mask8, align: 1, leads })
    }

    #[test]
    fn work_is_shared_out_within_the_limits() -> Result<()> {
        let sizes = [(0, 1), (1, 1), (4096, 256), (8192, 8), (40_000, 1024), (1 << 20, 256), (1 << 20, 33)];
        for (leads, (tokens, experts)) in [false, true].into_iter().flat_map(|leads| sizes.map(|size| (leads, size))) {
            let plan = mask(tokens, experts, leads)?;
            assert!(plan.slices * plan.chunks <= MAX_TILES, "{plan:?}");
            assert!(plan.chunks * plan.chunk_tokens >= tokens && plan.chunk_tokens.is_multiple_of(32), "{plan:?}");
        }
        let shares = |leads| mask(4096, 256, leads).map(|plan| (plan.slices, plan.chunks, plan.chunk_tokens));
        assert_eq!((shares(false)?, shares(true)?), ((8, 16, 256), (8, 32, 128)));
        assert!(mask(1 << 31, 1024, false).is_err());
        Ok(())
    }
}
