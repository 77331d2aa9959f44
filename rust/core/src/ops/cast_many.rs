//! Casts of many tensors to FP8 in one launch: weights after an optimizer step.
//!
//! The tensors' addresses are kernel parameters, so that no table on the device has to be kept, and a captured launch
//! has its own copy.

use te_fast_kernels::constants::quantize::{self, BLOCKS_CURRENT_MANY, CURRENT_WORKSPACE_BYTES, MANY_TENSORS};
use te_fast_kernels::constants::tile::{TILE, TILE_THREADS};
use te_fast_kernels::{Float, Fp8, Half, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::amax::{ScaleRule, check_eps};
use crate::ops::cast::{aligned, check_columns, tiles};
use crate::ops::cast_current::{Blocks, check_tiles};
use crate::params;

const OP: &str = "cast_many";

/// One tensor of a launch.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ManyEntry<'a> {
    /// Input `[rows, cols]`, contiguous.
    pub x: DevPtr<'a>,
    /// Bytes of the row layout, or null.
    pub out: DevPtr<'a>,
    /// Bytes of the transposed layout, or null.
    pub out_t: DevPtr<'a>,
    /// One f32, if it is given; else null.
    pub scale: DevPtr<'a>,
    /// One f32 or null; of blocks the scales of the row layout.
    pub scale_inv: DevPtr<'a>,
    /// One f32 to raise to the amax, or null; of blocks the scales of the transposed layout.
    pub other: DevPtr<'a>,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

impl ManyEntry<'_> {
    const EMPTY: Self = Self {
        x: DevPtr::null(),
        out: DevPtr::null(),
        out_t: DevPtr::null(),
        scale: DevPtr::null(),
        scale_inv: DevPtr::null(),
        other: DevPtr::null(),
        rows: 0,
        cols: 0,
    };
}

params! {
    /// Parameters of `cast_many_*`, `cast_block_many_*` and `cast_current_many_*`, rounded or not.
    pub struct CastManyParams<'a> [quantize::CAST_MANY_PARAMS_BYTES] for CastMany | CastBlockMany | CastCurrentMany | CastManyRounded | CastBlockManyRounded | CastCurrentManyRounded => host::cast_many::run {
        /// What the blocks of each tensor exchange under current scaling.
        pub workspace: DevPtr<'a>,
        /// Entries in use.
        pub entries: u32,
        /// Round scales down to powers of two.
        pub pow2: u32,
        /// Smallest amax.
        pub eps: f32,
        /// Largest value of the FP8 type.
        pub fp8_max: f32,
        /// Tiles that a block keeps under current scaling.
        pub slots: u32,
        /// 0.
        pub unused: u32,
        /// First block of each entry; modulo the number of blocks under current scaling, whose blocks cast many tiles each.
        pub first: [u32; MANY_TENSORS],
        /// The entries.
        pub entry: [ManyEntry<'a>; MANY_TENSORS],
    }
}

/// What is cast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ManyInputs {
    /// Elements of this type, as they are.
    Plain(Float),
    /// float32 elements, rounded to this type first: master weights, as if they had been copied to a weight of 16 bits.
    Rounded(Half),
}

impl ManyInputs {
    /// Whether there are kernels for a cast to this type. Weights with masters are E4M3 in every recipe.
    #[must_use]
    pub const fn casts_to(self, output: Fp8) -> bool {
        matches!((self, output), (Self::Plain(_), _) | (Self::Rounded(_), Fp8::E4m3))
    }

    const fn cast(self, output: Fp8, scales: ManyScales) -> KernelId {
        match (self, scales) {
            (Self::Plain(input), ManyScales::Given) => KernelId::CastMany(input, output),
            (Self::Plain(input), ManyScales::Current(_)) => KernelId::CastCurrentMany(input, output),
            (Self::Plain(input), ManyScales::Block { .. }) => KernelId::CastBlockMany(input, output),
            (Self::Rounded(input), ManyScales::Given) => KernelId::CastManyRounded(input),
            (Self::Rounded(input), ManyScales::Current(_)) => KernelId::CastCurrentManyRounded(input),
            (Self::Rounded(input), ManyScales::Block { .. }) => KernelId::CastBlockManyRounded(input),
        }
    }

    /// Of what is cast.
    const fn element_bytes(self) -> usize {
        match self {
            Self::Plain(input) => input.size(),
            Self::Rounded(_) => size_of::<u16>(),
        }
    }
}

/// The source of the scales of many tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ManyScales {
    /// Given scales; maxima are raised.
    Given,
    /// Each tensor's own scale, from its amax.
    Current(ScaleRule),
    /// One scale for each block of 128 x 128.
    Block {
        /// Smallest amax.
        eps: f32,
        /// Round scales down to powers of two.
        pow2: bool,
    },
}

/// A tensor to cast, and its destination.
#[derive(Clone, Copy, Debug)]
pub struct TensorCast<'a> {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Input, contiguous.
    pub x: DevPtr<'a>,
    /// Row layout, or null.
    pub out: DevPtr<'a>,
    /// Transposed layout, 16-byte aligned, or null.
    pub out_t: DevPtr<'a>,
    /// The tensor's inverse scale, or the scales of the row layout's blocks.
    pub scale_inv: DevPtr<'a>,
    /// Scales of the transposed layout's blocks.
    pub scale_inv_t: DevPtr<'a>,
    /// The given scale.
    pub scale: DevPtr<'a>,
    /// Maximum to raise with given scales, or null.
    pub amax: DevPtr<'a>,
}

/// Casts of many tensors of one type by one rule.
#[derive(Clone, Copy, Debug)]
pub struct CastManyPlan {
    input: ManyInputs,
    output: Fp8,
    scales: ManyScales,
}

impl CastManyPlan {
    /// The most tensors of a launch.
    pub const MOST: usize = MANY_TENSORS;
    /// Bytes of counters that a run uses; the counters are zero between launches.
    pub const COUNTER_BYTES: usize = MANY_TENSORS * CURRENT_WORKSPACE_BYTES;

    /// Checks the rule.
    ///
    /// # Errors
    /// An epsilon that is negative or not a number; inputs that are not cast to such a type.
    pub fn new(input: ManyInputs, output: Fp8, scales: ManyScales) -> Result<Self> {
        if !input.casts_to(output) {
            return Err(Error::unsupported(OP, "rounded tensors are cast to E4M3 alone"));
        }
        match scales {
            ManyScales::Current(ScaleRule { eps, .. }) | ManyScales::Block { eps, .. } => check_eps(OP, eps)?,
            ManyScales::Given => {}
        }
        Ok(Self { input, output, scales })
    }

    /// Casts all of them: one launch for up to [`CastManyPlan::MOST`]. `counters` is [`CastManyPlan::COUNTER_BYTES`].
    ///
    /// # Errors
    /// A shape beyond what a launch can index, a buffer that is null or misaligned, or a launch fails. Nothing is
    /// launched before all tensors are checked.
    pub fn run<'a>(&self, target: &mut Target<'_>, casts: &[TensorCast<'a>], counters: DevPtr<'a>) -> Result<()> {
        let host = target.is_host();
        casts.iter().try_for_each(|cast| self.check(cast, host))?;
        casts.chunks(Self::MOST).try_for_each(|casts| self.launch(target, casts, counters))
    }

    fn check(&self, cast: &TensorCast<'_>, host: bool) -> Result<()> {
        let &TensorCast { rows, cols, .. } = cast;
        check_columns(OP, cols)?;
        let (tiles_rows, tiles_cols) = tiles(OP, rows, cols)?;
        check_tiles(OP, u64::from(tiles_rows) * u64::from(tiles_cols))?;
        if i32::try_from(rows).is_err() {
            return Err(Error::shape(OP, "the number of rows", "below 2**31", rows));
        }
        let (filled, blocks) = (rows != 0 && cols != 0, matches!(self.scales, ManyScales::Block { .. }));
        let missing = (filled && (cast.x.is_null() || (cast.out.is_null() && cast.out_t.is_null())))
            || (filled && blocks && !cast.out.is_null() && cast.scale_inv.is_null())
            || (filled && blocks && !cast.out_t.is_null() && cast.scale_inv_t.is_null())
            || (self.scales == ManyScales::Given && cast.scale.is_null());
        if missing {
            return Err(Error::value(OP, "a buffer that a tensor needs is null"));
        }
        if host { Ok(()) } else { aligned(OP, "the transposed output", cast.out_t) }
    }

    fn launch<'a>(&self, target: &mut Target<'_>, casts: &[TensorCast<'a>], workspace: DevPtr<'a>) -> Result<()> {
        let (input, output) = (self.input, self.output);
        let (eps, pow2) = match self.scales {
            ManyScales::Given => (0.0, false),
            ManyScales::Current(ScaleRule { eps, pow2, .. }) | ManyScales::Block { eps, pow2 } => (eps, pow2),
        };
        let mut params = CastManyParams {
            workspace,
            entries: casts.len() as u32,
            pow2: u32::from(pow2),
            eps,
            fp8_max: output.max(),
            slots: 0,
            unused: 0,
            first: [0; MANY_TENSORS],
            entry: std::array::from_fn(|_| ManyEntry::EMPTY),
        };
        for (cast, entry) in casts.iter().zip(&mut params.entry) {
            *entry = self.entry(cast);
        }
        // A tensor without elements still has an inverse scale, unless scales belong to blocks.
        let least = u32::from(!matches!(self.scales, ManyScales::Block { .. }));
        let tiles = place(&mut params, least)?;
        let grid = match self.scales {
            ManyScales::Current(_) => {
                let blocks = Blocks::of(target, tiles.into(), input.element_bytes(), BLOCKS_CURRENT_MANY);
                params.slots = blocks.slots;
                params.first.iter_mut().for_each(|first| *first %= blocks.grid.blocks[0].max(1));
                blocks.grid
            }
            _ => Grid::linear(tiles, TILE_THREADS),
        };
        launch(target, input.cast(output, self.scales), grid, &params)
    }

    fn entry<'a>(&self, cast: &TensorCast<'a>) -> ManyEntry<'a> {
        let &TensorCast { rows, cols, x, out, out_t, scale_inv, .. } = cast;
        let (scale, other) = match self.scales {
            ManyScales::Given => (cast.scale, cast.amax),
            ManyScales::Current(_) => (DevPtr::null(), DevPtr::null()),
            ManyScales::Block { .. } => (DevPtr::null(), cast.scale_inv_t),
        };
        ManyEntry { x, out, out_t, scale, scale_inv, other, rows: rows as u32, cols: cols as u32 }
    }
}

/// Tiles of a tensor, at least this many.
fn tiles_of(entry: &ManyEntry<'_>, least: u32) -> u64 {
    let [rows, cols] = [entry.rows, entry.cols].map(|size| u64::from(size).div_ceil(TILE as u64));
    (rows * cols).max(least.into())
}

/// Assigns a block for each of its tiles to every entry; returns the number of blocks.
fn place(params: &mut CastManyParams<'_>, least: u32) -> Result<u32> {
    let mut blocks = 0_u64;
    for (entry, first) in params.entry.iter().zip(&mut params.first).take(params.entries as usize) {
        *first = blocks as u32;
        blocks += tiles_of(entry, least);
        check_blocks(blocks)?;
    }
    Ok(blocks as u32)
}

fn check_blocks(blocks: u64) -> Result<()> {
    if i32::try_from(blocks).is_ok() {
        return Ok(());
    }
    Err(Error::shape(OP, "the blocks of all tensors together", "below 2**31", blocks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::trace::Trace;

    #[test]
    fn nothing_is_launched_where_one_tensor_lacks_a_buffer() -> Result<()> {
        let mut trace = Trace::default();
        let (mut x, mut out, mut scale) = ([1.0_f32; 16], [7_u8; 16], [1.0_f32]);
        let whole = TensorCast {
            rows: 4,
            cols: 4,
            x: DevPtr::from_slice(&mut x),
            out: DevPtr::from_slice(&mut out),
            out_t: DevPtr::null(),
            scale_inv: DevPtr::null(),
            scale_inv_t: DevPtr::null(),
            scale: DevPtr::from_slice(&mut scale),
            amax: DevPtr::null(),
        };
        let plan = CastManyPlan::new(ManyInputs::Plain(Float::F32), Fp8::E4m3, ManyScales::Given)?;
        let lacking = TensorCast { scale: DevPtr::null(), ..whole };
        assert!(plan.run(&mut Target::host(&mut trace), &[whole, lacking], DevPtr::null()).is_err());
        assert_eq!(out, [7; 16]);
        Ok(())
    }

    fn params_of(shapes: &[(u32, u32)]) -> CastManyParams<'static> {
        let mut params = CastManyParams {
            workspace: DevPtr::null(),
            entries: shapes.len() as u32,
            pow2: 0,
            eps: 0.0,
            fp8_max: 0.0,
            slots: 0,
            unused: 0,
            first: [0; MANY_TENSORS],
            entry: std::array::from_fn(|_| ManyEntry::EMPTY),
        };
        for (&(rows, cols), entry) in shapes.iter().zip(&mut params.entry) {
            *entry = ManyEntry { rows, cols, ..*entry };
        }
        params
    }

    #[test]
    fn tensors_without_elements_have_no_tiles_of_blocks() -> Result<()> {
        let mut params = params_of(&[(129, 128), (0, 128), (128, 513)]);
        assert_eq!(place(&mut params, 0)?, 7);
        assert_eq!(params.first[..3], [0, 2, 2]);
        Ok(())
    }
}
