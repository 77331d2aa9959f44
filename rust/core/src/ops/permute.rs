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
        /// i32 `[rows]`: the number of the row's token plus one, 0 for a row without a token; null for none, as of a plan of
        /// numbers.
        numbers,
    }
}

/// A checked permutation of rows.
#[derive(Clone, Copy, Debug)]
pub struct PermutePlan {
    shape: MapShape,
    row_bytes: usize,
    prob: Option<Prob>,
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
        Ok(Self { shape, row_bytes, prob })
    }

    /// The same with numbers instead of rows: the number of the row's token plus one, negative if the slot's
    /// probability is 0, and 0 for a row without a token.
    ///
    /// # Errors
    /// Sizes beyond what a launch can index.
    pub fn of_numbers(shape: MapShape, prob: Option<Prob>) -> Result<Self> {
        shape.check("permute")?;
        Ok(Self { shape, row_bytes: size_of::<i32>(), prob })
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
    fn rows_are_whole_elements() {
        let shape = MapShape { tokens: 1, rows: 1, layout: Layout::Mask { experts: 1 } };
        assert!(PermutePlan::new(shape, 4, None).is_ok());
        assert!(PermutePlan::new(shape, 3, None).is_err());
    }
}
