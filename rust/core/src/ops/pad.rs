//! Rows moved in segments: padding and unpadding of grouped GEMM inputs, and the sorting of chunks.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::common::WARP;
use te_fast_kernels::constants::moe::{self, INLINE_SPLITS, PAD_THREADS};

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::row_map::Prob;
use crate::{params, pointers};

/// Most splits that a launch takes.
pub const MAX_SPLITS: usize = 4096;
/// Threads of a block; a warp moves a row.
const ROWS_PER_BLOCK: usize = (PAD_THREADS / WARP) as usize;
/// Four blocks per multiprocessor of a large GPU; each walks over its rows.
const BLOCKS: usize = 528;

params! {
    /// Parameters of `pad_rows`.
    pub struct PadRowsParams<'a> [moe::PAD_ROWS_PARAMS_BYTES] for PadRows => host::pad::run {
        ..PadPointers,
        /// Rows of the input.
        pub in_rows: u64,
        /// Rows of the output.
        pub out_rows: u64,
        /// Bytes of a row.
        pub row_bytes: u64,
        /// Bytes of a probability.
        pub prob_bytes: u32,
        /// Splits.
        pub count: u32,
        /// Padded splits are multiples of this.
        pub align: u32,
        /// [`Move`].
        pub mode: u32,
        /// 0 for i32, 1 for i64.
        pub split_type: u32,
        /// The same for `index`.
        pub index_type: u32,
        /// Splits by value.
        pub inline_splits: [i32; INLINE_SPLITS],
    }
}

/// The kind of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Move {
    /// Each split starts at a multiple of the alignment.
    Pad = moe::MOVE_PAD,
    /// The reverse.
    Unpad = moe::MOVE_UNPAD,
    /// Chunk `index[j]` comes j-th.
    Sort = moe::MOVE_SORT,
    /// The reverse.
    Unsort = moe::MOVE_UNSORT,
}

/// Integers on the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Integers<'a> {
    /// First element.
    pub data: DevPtr<'a>,
    /// 64 bits wide, else 32.
    pub wide: bool,
}

/// The place of the splits.
#[derive(Clone, Copy, Debug)]
pub enum Splits<'a> {
    /// On the device: (integers, count).
    Device(Integers<'a>, usize),
    /// On the host, passed by the caller.
    Values(&'a [i64]),
}

impl Splits<'_> {
    const fn count(&self) -> usize {
        match self {
            Self::Device(_, count) => *count,
            Self::Values(values) => values.len(),
        }
    }
}

/// Sizes of a move.
#[derive(Clone, Copy, Debug)]
pub struct PadSpec {
    /// The kind.
    pub mode: Move,
    /// Rows of the input.
    pub in_rows: usize,
    /// Rows of the output.
    pub out_rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Padded splits are multiples of this.
    pub align: usize,
    /// Type of the probabilities that move along.
    pub prob: Option<Prob>,
}

pointers! {
    /// Buffers of a move.
    pub struct PadPointers {
        /// `[in_rows, row_bytes]`.
        x,
        /// `[out_rows, row_bytes]`.
        out,
        /// Probabilities `[in_rows]`, or null.
        probs,
        /// Probabilities `[out_rows]`.
        out_probs,
        /// Set by the plan: splits on the device, or null if they are parameters.
        splits,
        /// Set by the plan: order of the chunks, only for sorting.
        index,
        /// Receives the padded splits in the type of the splits, only for padding; or null.
        padded_splits,
    }
}

/// A checked move.
#[derive(Clone, Copy, Debug)]
pub struct PadPlan {
    spec: PadSpec,
}

impl PadPlan {
    /// Checks the sizes.
    ///
    /// # Errors
    /// Sizes beyond what a launch can index, or an alignment of 0.
    pub fn new(spec: PadSpec) -> Result<Self> {
        for (what, value) in
            [("rows of the input", spec.in_rows), ("rows of the output", spec.out_rows), ("the alignment", spec.align)]
        {
            if i32::try_from(value).is_err() {
                return Err(Error::shape("pad_rows", what, "below 2**31", value));
            }
        }
        if spec.align == 0 || !spec.row_bytes.is_multiple_of(2) {
            return Err(Error::shape(
                "pad_rows",
                "alignment and bytes of a row",
                "positive and even",
                format_args!("{} and {}", spec.align, spec.row_bytes),
            ));
        }
        Ok(Self { spec })
    }

    /// Launches the move; `index` is the order of the chunks, only for sorting.
    ///
    /// # Errors
    /// More splits than a launch takes, or the driver's refusal.
    pub fn run(
        &self,
        target: &mut Target<'_>,
        b: &PadPointers<DevPtr<'_>>,
        splits: &Splits<'_>,
        index: Option<Integers<'_>>,
    ) -> Result<()> {
        let PadSpec { mode, in_rows, out_rows, row_bytes, align, prob } = self.spec;
        if out_rows == 0 && b.padded_splits.is_null() {
            return Ok(());
        }
        let count = splits.count();
        let most = if matches!(splits, Splits::Values(_)) { INLINE_SPLITS } else { MAX_SPLITS };
        if count > most {
            return Err(Error::shape("pad_rows", "the number of splits", format_args!("at most {most}"), count));
        }
        let mut inline_splits = [0; INLINE_SPLITS];
        let device = match splits {
            Splits::Device(integers, _) => *integers,
            Splits::Values(values) => {
                for (slot, &value) in inline_splits.iter_mut().zip(*values) {
                    *slot = i32::try_from(value).unwrap_or(i32::MAX);
                }
                Integers::default()
            }
        };
        let index = index.unwrap_or_default();
        let params = PadRowsParams {
            at: PadPointers { splits: device.data, index: index.data, ..*b },
            in_rows: in_rows as u64,
            out_rows: out_rows as u64,
            row_bytes: row_bytes as u64,
            prob_bytes: prob.map_or(0, |prob| DType::from(prob).size() as u32),
            count: count as u32,
            align: align as u32,
            mode: mode as u32,
            split_type: u32::from(device.wide),
            index_type: u32::from(index.wide),
            inline_splits,
        };
        let blocks = out_rows.div_ceil(ROWS_PER_BLOCK).clamp(1, BLOCKS) as u32;
        launch(target, KernelId::PadRows, Grid::linear(blocks, PAD_THREADS).with_shared(12 * count as u32), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_a_launch_cannot_index() {
        let spec = PadSpec { mode: Move::Pad, in_rows: 4, out_rows: 8, row_bytes: 2, align: 4, prob: None };
        assert!(PadPlan::new(spec).is_ok());
        assert!(PadPlan::new(PadSpec { align: 0, ..spec }).is_err());
        assert!(PadPlan::new(PadSpec { row_bytes: 3, ..spec }).is_err());
        assert!(PadPlan::new(PadSpec { out_rows: 1 << 31, ..spec }).is_err());
    }
}
