//! MoE permutation of rows: a token's row is copied to each of its destinations, and all other rows become zero. It is
//! one launch, which first makes the map of a mask if there is none yet.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::moe::{self, ROW_THREADS};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::permute_map::{MakeMapParams, Making};
use crate::ops::row_map::{MapBuffers, MapShape, Prob, RowMapParams};
use crate::{params, pointers};

params! {
    /// Parameters of `permute_fwd`.
    pub struct PermuteParams<'a> [moe::PERMUTE_PARAMS_BYTES] for PermuteFwd => host::permute::run {
        ..PermutePointers,
        /// The map.
        pub map: RowMapParams<'a>,
        /// Bytes of a row.
        pub row_bytes: u64,
        /// Type of the probabilities.
        pub prob_type: u32,
        /// 1: the previous launch makes the map, so the rows may be read while it runs.
        pub behind_map: u32,
        /// Scales of a row; 0 without scales.
        pub scale_blocks: u32,
        /// Zero.
        pub unused: u32,
        /// Scales in a line of `scales`.
        pub scale_ld: u64,
        /// Scales in a line of `out_scales`.
        pub out_scale_ld: u64,
        /// The map, if this launch makes it; slots without a row are then removed from it.
        pub making: MakeMapParams<'a>,
    }
}

pointers! {
    /// Buffers of a permutation.
    pub struct PermutePointers {
        /// `[T, row_bytes]`; null of a plan of numbers.
        x,
        /// `[rows, row_bytes]`; of a plan of numbers i32 `[rows]`.
        out,
        /// `[T, slots]` where the plan has probabilities, else null.
        probs,
        /// `[rows]` where the plan has probabilities.
        out_probs,
        /// f32 `[blocks, in_line]` of a plan with scales, else null.
        scales,
        /// f32 `[blocks, out_line]` of a plan with scales.
        out_scales,
    }
}

/// Scales of rows, a line for each block of columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScaleLines {
    /// Blocks of a row.
    pub blocks: usize,
    /// Length of a line of tokens.
    pub in_line: usize,
    /// Length of a line of permuted rows; the places behind the rows become zero.
    pub out_line: usize,
}

/// A checked permutation of rows.
#[derive(Clone, Copy, Debug)]
pub struct PermutePlan {
    shape: MapShape,
    row_bytes: usize,
    prob: Option<Prob>,
    scales: ScaleLines,
}

impl PermutePlan {
    /// Checks the sizes; `prob` is the type of the probabilities that move along.
    ///
    /// # Errors
    /// Sizes beyond what a launch can index, or probabilities of rows without elements, which no launch moves.
    pub fn new(shape: MapShape, row_bytes: usize, prob: Option<Prob>) -> Result<Self> {
        shape.check("permute")?;
        if !row_bytes.is_multiple_of(2) || i32::try_from(row_bytes).is_err() {
            return Err(Error::shape("permute", "bytes of a row", "even and below 2**31", row_bytes));
        }
        if row_bytes == 0 && prob.is_some() {
            return Err(Error::shape("permute", "bytes of a row", "positive where probabilities move along", 0));
        }
        Ok(Self { shape, row_bytes, prob, scales: ScaleLines::default() })
    }

    /// The same with scales that move along, if there are any.
    ///
    /// # Errors
    /// Lines that are too short, or more blocks than a row has bytes.
    pub fn with_scales(self, scales: Option<ScaleLines>) -> Result<Self> {
        let Some(scales) = scales else { return Ok(self) };
        let fits = scales.in_line >= self.shape.tokens && scales.out_line >= self.shape.rows;
        if !fits || scales.blocks > self.row_bytes {
            let expected =
                format!("lines of {} and {}, {} blocks at most", self.shape.tokens, self.shape.rows, self.row_bytes);
            return Err(Error::shape("permute", "scales", expected, format!("{scales:?}")));
        }
        Ok(Self { scales, ..self })
    }

    /// The same with numbers instead of rows: the number of the row's token plus one, negative if the slot's
    /// probability is 0, and 0 for a row without a token.
    ///
    /// # Errors
    /// Sizes beyond what a launch can index.
    pub fn of_numbers(shape: MapShape, prob: Option<Prob>) -> Result<Self> {
        shape.check("permute")?;
        Ok(Self { shape, row_bytes: size_of::<i32>(), prob, scales: ScaleLines::default() })
    }

    /// Launches the permutation; `map` has its ends, and `making` says how the map is made.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(
        &self,
        target: &mut Target<'_>,
        at: &PermutePointers<DevPtr<'_>>,
        map: &MapBuffers<'_>,
        making: &Making<'_>,
    ) -> Result<()> {
        // Without rows, the map of this launch loses all its slots.
        let nothing = self.shape.rows == 0 && (making.params.blocks == 0 || self.shape.tokens == 0);
        if self.row_bytes == 0 || nothing {
            return making.finish(target);
        }
        let zero_blocks = self.shape.zero_blocks();
        let params = PermuteParams {
            at: *at,
            map: RowMapParams::new(&self.shape, map, zero_blocks),
            row_bytes: self.row_bytes as u64,
            prob_type: Prob::code(self.prob),
            behind_map: u32::from(making.before),
            scale_blocks: self.scales.blocks as u32,
            unused: 0,
            scale_ld: self.scales.in_line as u64,
            out_scale_ld: self.scales.out_line as u64,
            making: making.params,
        };
        let grid = Grid::linear(params.making.blocks + zero_blocks + self.shape.tokens as u32, ROW_THREADS);
        launch(target, KernelId::PermuteFwd, grid, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::row_map::Layout;

    #[test]
    fn lines_of_scales_hold_all_rows() -> Result<()> {
        let shape = MapShape { tokens: 5, rows: 6, layout: Layout::Mask { experts: 1 } };
        let plan = PermutePlan::new(shape, 256, None)?;
        let lines = |in_line, out_line| Some(ScaleLines { blocks: 2, in_line, out_line });
        assert!(plan.with_scales(lines(5, 8)).is_ok());
        assert!(plan.with_scales(lines(4, 8)).is_err());
        assert!(plan.with_scales(lines(8, 5)).is_err());
        Ok(())
    }

    #[test]
    fn rows_are_whole_elements() {
        let shape = MapShape { tokens: 1, rows: 1, layout: Layout::Mask { experts: 1 } };
        assert!(PermutePlan::new(shape, 4, None).is_ok());
        assert!(PermutePlan::new(shape, 3, None).is_err());
    }
}
