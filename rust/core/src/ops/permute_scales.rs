//! Block scales of permuted rows. They lie in lines across the rows, so the permutation moves none of them: it leaves the
//! number of each row's token, and a launch behind it gathers the lines.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::moe::{self, SCALE_LINES, SCALE_ROWS, SCALE_THREADS};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::row_map::MapShape;
use crate::{params, pointers};

const OP: &str = "permute_scales";

params! {
    /// Parameters of `permute_scales`.
    pub struct PermuteScalesParams<'a> [moe::PERMUTE_SCALES_PARAMS_BYTES] for PermuteScales => host::permute_scales::run {
        ..PermuteScalesPointers,
        /// Scales in a line of tokens.
        pub in_line: u64,
        /// Scales in a line of permuted rows.
        pub out_line: u32,
        /// Permuted rows.
        pub rows: u32,
        /// Tokens.
        pub tokens: u32,
        /// Lines.
        pub lines: u32,
        /// Blocks that share a line.
        pub parts: u32,
        /// Zero.
        pub unused: u32,
    }
}

pointers! {
    /// Buffers of scales.
    pub struct PermuteScalesPointers {
        /// f32 `[lines, in_line]`.
        scales,
        /// [`PermuteScalesPlan::number_bytes`], which the permutation has filled.
        numbers,
        /// f32 `[lines, out_line]`.
        out,
    }
}

/// Scales of rows, a line for each block of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleLines {
    /// Blocks of a row.
    pub lines: usize,
    /// Length of a line of tokens.
    pub in_line: usize,
    /// Length of a line of permuted rows; the places behind the rows become zero.
    pub out_line: usize,
}

/// A checked gather of scales.
#[derive(Clone, Copy, Debug)]
pub struct PermuteScalesPlan {
    tokens: usize,
    rows: usize,
    lines: ScaleLines,
    parts: u32,
    blocks: u32,
}

impl PermuteScalesPlan {
    /// Checks the sizes; `shape` is the permutation's.
    ///
    /// # Errors
    /// Lines that are too short, or sizes beyond what a launch can index.
    pub fn new(shape: MapShape, lines: ScaleLines) -> Result<Self> {
        shape.check(OP)?;
        let MapShape { tokens, rows, .. } = shape;
        if lines.in_line < tokens || lines.out_line < rows {
            let expected = format_args!("at least {tokens} and {rows} long").to_string();
            return Err(Error::shape(OP, "lines of scales", expected, format_args!("{lines:?}")));
        }
        let parts = lines.out_line.div_ceil(SCALE_ROWS * SCALE_THREADS as usize);
        let blocks = parts.saturating_mul(lines.lines.div_ceil(SCALE_LINES));
        for (what, count) in [("the length of a line", lines.out_line), ("blocks of the launch", blocks)] {
            if i32::try_from(count).is_err() {
                return Err(Error::shape(OP, what, "below 2**31", count));
            }
        }
        Ok(Self { tokens, rows, lines, parts: parts as u32, blocks: blocks as u32 })
    }

    /// Size of the numbers.
    #[must_use]
    pub const fn number_bytes(&self) -> usize {
        self.rows * size_of::<i32>()
    }

    /// Launches it, behind the permutation.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(&self, target: &mut Target<'_>, at: &PermuteScalesPointers<DevPtr<'_>>) -> Result<()> {
        let params = PermuteScalesParams {
            at: *at,
            in_line: self.lines.in_line as u64,
            out_line: self.lines.out_line as u32,
            rows: self.rows as u32,
            tokens: self.tokens as u32,
            lines: self.lines.lines as u32,
            parts: self.parts,
            unused: 0,
        };
        launch(target, KernelId::PermuteScales, Grid::linear(self.blocks, SCALE_THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::trace::Trace;
    use crate::ops::row_map::Layout;

    fn plan(tokens: usize, rows: usize, lines: ScaleLines) -> Result<PermuteScalesPlan> {
        PermuteScalesPlan::new(MapShape { tokens, rows, layout: Layout::Mask { experts: 1 } }, lines)
    }

    #[test]
    fn lines_of_scales_hold_all_rows() {
        let lines = |in_line, out_line| ScaleLines { lines: 2, in_line, out_line };
        assert!(plan(5, 6, lines(5, 8)).is_ok());
        assert!(plan(5, 6, lines(4, 8)).is_err());
        assert!(plan(5, 6, lines(8, 5)).is_err());
    }

    #[test]
    fn blocks_cover_the_lines() -> Result<()> {
        let blocks = |lines, rows: usize| {
            let out_line = rows.next_multiple_of(4);
            plan(8, rows, ScaleLines { lines, in_line: 8, out_line }).map(|plan| (plan.parts, plan.blocks))
        };
        assert_eq!(blocks(1, 1)?, (1, 1));
        assert_eq!(blocks(130, 4097)?, (2, 130));
        assert_eq!(blocks(56, 32768)?, (8, 224));
        assert_eq!(blocks(0, 5)?.1, 0);
        assert_eq!(blocks(56, 0)?.1, 0);
        assert!(blocks(1 << 30, 1 << 20).is_err());
        Ok(())
    }

    #[test]
    fn rows_take_the_scales_of_their_tokens() -> Result<()> {
        let mut scales = [1.0_f32, 2.0, 3.0, 9.0, 4.0, 5.0, 6.0, 9.0];
        // A row of no token, and numbers that no permutation of three tokens leaves.
        let mut numbers = [3_i32, 0, 1, 4, -2];
        let mut out = [7.0_f32; 16];
        let at = PermuteScalesPointers {
            scales: DevPtr::from_slice(&mut scales),
            numbers: DevPtr::from_slice(&mut numbers),
            out: DevPtr::from_slice(&mut out),
        };
        let plan = plan(3, 5, ScaleLines { lines: 2, in_line: 4, out_line: 8 })?;
        plan.run(&mut Target::host(&mut Trace::default()), &at)?;
        assert_eq!(out.map(|scale| scale as i32), [3, 0, 1, 0, 0, 0, 0, 0, 6, 0, 4, 0, 0, 0, 0, 0]);
        Ok(())
    }
}
