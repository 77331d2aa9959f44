//! Row maps of the permutation kernels: layouts, sizes and pointers, and the types of the permuted probabilities.

use te_fast_kernels::constants::moe::{self, MAX_EXPERTS};

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;

/// Number of first blocks that clear rows without a token: two per multiprocessor of a large GPU.
const ZERO_BLOCKS: usize = 264;

/// The layout of a row map; both layouts are Transformer Engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[T, 2E + 1]`: destinations in descending order, their experts from entry E, their number in entry 2E.
    Mask {
        /// E.
        experts: usize,
    },
    /// `[K, T]`: the destination of every slot, -1 if it was dropped.
    Index {
        /// K.
        top_k: usize,
    },
}

/// Sizes of a permutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapShape {
    /// Tokens.
    pub tokens: usize,
    /// Rows of the permuted tensor.
    pub rows: usize,
    /// Layout of the map.
    pub layout: Layout,
}

impl MapShape {
    /// Entries of the map.
    #[must_use]
    pub const fn entries(&self) -> usize {
        match self.layout {
            Layout::Mask { experts } => self.tokens * (2 * experts + 1),
            Layout::Index { top_k } => self.tokens * top_k,
        }
    }

    /// Columns of the probabilities.
    #[must_use]
    pub const fn slots(&self) -> usize {
        match self.layout {
            Layout::Mask { experts } => experts,
            Layout::Index { top_k } => top_k,
        }
    }

    /// Groups of rows that `ends` counts: the experts; one for an index map, which does not have experts.
    #[must_use]
    pub const fn groups(&self) -> usize {
        match self.layout {
            Layout::Mask { experts } => experts,
            Layout::Index { .. } => 1,
        }
    }

    /// Checks that a launch can index it.
    ///
    /// # Errors
    /// More experts, slots, tokens or rows than the map's 32-bit entries and the kernels hold.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        if !(1..=MAX_EXPERTS).contains(&self.slots()) {
            return Err(Error::shape(
                op,
                "experts or slots per token",
                format_args!("1 to {MAX_EXPERTS}"),
                self.slots(),
            ));
        }
        for (what, count) in [("tokens", self.tokens), ("rows of the permuted tensor", self.rows)] {
            if i32::try_from(count + ZERO_BLOCKS).is_err() {
                return Err(Error::shape(op, what, "below 2**31", count));
            }
        }
        Ok(())
    }

    /// Blocks that clear rows.
    pub(crate) const fn zero_blocks(&self) -> u32 {
        if self.rows < ZERO_BLOCKS { self.rows as u32 } else { ZERO_BLOCKS as u32 }
    }
}

/// The pointers of a row map.
#[derive(Clone, Copy, Debug)]
pub struct MapBuffers<'a> {
    /// [`MapShape::entries`] of i32.
    pub map: DevPtr<'a>,
    /// i64 per expert, or null without padding.
    pub pad_offsets: DevPtr<'a>,
    /// `[partials][groups]` of i32, or null if no row is cleared.
    pub ends: DevPtr<'a>,
    /// Parts in which `ends` was counted.
    pub partials: usize,
}

/// `RowMap` of `cuda/moe/routing.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RowMapParams<'a> {
    pub(crate) map: DevPtr<'a>,
    pub(crate) pad_offsets: DevPtr<'a>,
    pub(crate) ends: DevPtr<'a>,
    pub(crate) tokens: u64,
    pub(crate) rows: u64,
    pub(crate) experts: u32,
    pub(crate) top_k: u32,
    pub(crate) partials: u32,
    pub(crate) zero_blocks: u32,
}

const _: () = assert!(size_of::<RowMapParams<'static>>() == moe::ROW_MAP_BYTES);

impl<'a> RowMapParams<'a> {
    pub(crate) const fn new(shape: &MapShape, buffers: &MapBuffers<'a>, zero_blocks: u32) -> Self {
        let (experts, top_k) = match shape.layout {
            Layout::Mask { experts } => (experts as u32, 0),
            Layout::Index { top_k } => (0, top_k as u32),
        };
        Self {
            map: buffers.map,
            pad_offsets: buffers.pad_offsets,
            ends: buffers.ends,
            tokens: shape.tokens as u64,
            rows: shape.rows as u64,
            experts,
            top_k,
            partials: buffers.partials as u32,
            zero_blocks,
        }
    }
}

/// Type of probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Prob {
    /// IEEE binary32.
    F32 = moe::PROB_F32,
    /// IEEE binary16.
    F16 = moe::PROB_F16,
    /// bfloat16.
    Bf16 = moe::PROB_BF16,
    /// IEEE binary64, moved as it is; sums round it to binary32.
    F64 = moe::PROB_F64,
}

impl Prob {
    /// The type of a tensor of probabilities, if it is valid.
    #[must_use]
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::Bf16 => Some(Self::Bf16),
            DType::F64 => Some(Self::F64),
            _ => None,
        }
    }

    /// The kernels' code; 0 without probabilities.
    pub(crate) fn code(prob: Option<Self>) -> u32 {
        prob.map_or(0, |prob| prob as u32)
    }
}

impl From<Prob> for DType {
    fn from(prob: Prob) -> Self {
        match prob {
            Prob::F32 => Self::F32,
            Prob::F16 => Self::F16,
            Prob::Bf16 => Self::Bf16,
            Prob::F64 => Self::F64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_both_layouts() -> Result<()> {
        let mask = MapShape { tokens: 3, rows: 6, layout: Layout::Mask { experts: 4 } };
        assert_eq!((mask.entries(), mask.slots(), mask.groups(), mask.zero_blocks()), (27, 4, 4, 6));
        let index = MapShape { tokens: 3, rows: 600, layout: Layout::Index { top_k: 2 } };
        assert_eq!((index.entries(), index.slots(), index.groups(), index.zero_blocks()), (6, 2, 1, 264));
        index.check("test")
    }

    #[test]
    fn what_32_bits_cannot_hold_is_refused() {
        let shape = MapShape { tokens: 1, rows: 1 << 31, layout: Layout::Mask { experts: 1 } };
        assert!(shape.check("test").is_err());
        assert!(MapShape { rows: 1, layout: Layout::Mask { experts: 1025 }, ..shape }.check("test").is_err());
    }
}
