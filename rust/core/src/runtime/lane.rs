//! The place and the private memory of a call: device and stream, launch target, scratch and workspace.

use crate::base::dtype::Device;
use crate::base::pointer::DevPtr;
use crate::cuda::device::Stream;
use crate::cuda::zeroed::ZeroedCounters;
use crate::launch::target::Target;

/// Self-resetting counters of reductions that end in the launch that began them: zero between launches.
pub const COUNTER_BYTES: usize = 64 << 10;

/// Offset of the counters with which a kernel that has other counters also finds a maximum.
pub const MEASURE_COUNTERS_AT: usize = COUNTER_BYTES - 256;

/// Memory of a stream besides its scratch that is zeroed once, behind cuBLASLt's workspace: the counters, and those that
/// learned launches take.
pub(crate) const ZEROED_BYTES: usize = COUNTER_BYTES + ZeroedCounters::BYTES;

/// The same of a call under capture, which zeroes it.
pub(crate) const CAPTURED_ZEROED_BYTES: usize = COUNTER_BYTES + ZeroedCounters::BYTES_WITHOUT_GRAPHS;

/// Scratch above this size comes from torch's allocator, so that others can use the memory between calls.
pub const OWN_SCRATCH_LIMIT: usize = 32 << 20;

/// Every private buffer starts on a multiple of this.
pub const ALIGNMENT: usize = 256;

/// Rounds a size up to [`ALIGNMENT`].
#[must_use]
pub const fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// A device and one of its streams; the stream means nothing on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device.
    pub device: Device,
    /// The stream.
    pub stream: Stream,
}

/// The source of a call's private memory.
#[derive(Clone, Copy, Debug)]
pub enum Memory<'a> {
    /// The stream's own memory, which is kept.
    Own,
    /// The caller's memory, only for scratch.
    Scratch(DevPtr<'a>),
    /// The caller's memory for workspace, counters and scratch, since a graph under capture keeps its memory in its own
    /// pool.
    Everything(DevPtr<'a>),
    /// The same for a call without matrix products.
    Counted {
        /// Counters, then scratch.
        memory: DevPtr<'a>,
        /// Bytes of counters that the call uses.
        counters: usize,
    },
}

/// Private memory of one call.
#[derive(Clone, Copy, Debug)]
pub struct Workspace<'a> {
    /// [`crate::gemm::problem::WORKSPACE_BYTES`] for cuBLASLt; null on the host and of [`Memory::Counted`].
    pub gemm: DevPtr<'a>,
    /// [`COUNTER_BYTES`] bytes that are zero between launches; of [`Memory::Counted`] as many as it says.
    pub counters: DevPtr<'a>,
    /// As many bytes as the call asked for.
    pub scratch: DevPtr<'a>,
}

/// A launch target with its private memory.
#[derive(Debug)]
pub struct Lane<'d> {
    /// The launch target.
    pub target: Target<'d>,
    /// Memory for them.
    pub workspace: Workspace<'d>,
}

/// First compute capability that has clusters of blocks.
pub(crate) const CLUSTERS_FROM: (u32, u32) = (9, 0);

/// The limits by which plans choose grids and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block may ask for, bytes.
    pub shared_bytes: u32,
    /// Whether blocks can form clusters.
    pub clusters: bool,
}

impl Limits {
    /// Number of clusters of a size that run at once, if a multiprocessor has room for `each` blocks. Clusters of four
    /// and eight blocks fit on only 120 of an H200's 132 multiprocessors; a cluster too many would run after all
    /// others.
    #[must_use]
    pub const fn clusters_at_once(&self, blocks: u32, each: u32) -> u32 {
        let usable = if blocks > 2 { self.multiprocessors / 11 * 10 } else { self.multiprocessors };
        let clusters = usable * each / blocks;
        if clusters == 0 { 1 } else { clusters }
    }
}

/// The memory that a caller must allocate for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum External {
    /// Nothing.
    None,
    /// This many bytes of scratch.
    Scratch(usize),
    /// This many bytes for everything private.
    Everything(usize),
    /// Everything private of a call without matrix products.
    Counted {
        /// Bytes of counters that the call uses.
        counters: usize,
        /// Bytes of scratch.
        scratch: usize,
    },
}

impl External {
    /// The bytes, zero for none.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::None => 0,
            Self::Scratch(bytes) | Self::Everything(bytes) => bytes,
            Self::Counted { counters, scratch } => aligned(counters) + scratch,
        }
    }

    /// The memory, once the caller has it.
    #[must_use]
    pub const fn memory(self, memory: DevPtr<'_>) -> Memory<'_> {
        match self {
            Self::None => Memory::Own,
            Self::Scratch(_) => Memory::Scratch(memory),
            Self::Everything(_) => Memory::Everything(memory),
            Self::Counted { counters, .. } => Memory::Counted { memory, counters },
        }
    }
}
