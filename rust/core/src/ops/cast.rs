//! Per-tensor scaled cast to FP8: row layout, transposed layout or both, with or without the bias gradient.
//! Delayed scaling calls it with an amax to raise, current scaling after [`crate::ops::amax`].

use te_fast_kernels::constants::quantize::{self, CAST_TRANSPOSE_SHARED, SPAN, SUMMING_BLOCKS, THREADS};
use te_fast_kernels::constants::tile::{TILE, TILE_THREADS, TRANSPOSED_ALIGN};
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::strips::StripPlan;
use crate::{params, pointers};

params! {
    /// Parameters of `cast_*`.
    pub struct CastParams<'a> [quantize::CAST_PARAMS_BYTES] for Cast => host::cast::run {
        /// Input, `count` elements.
        pub x: DevPtr<'a>,
        /// FP8 bytes.
        pub out: DevPtr<'a>,
        /// One f32.
        pub scale: DevPtr<'a>,
        /// One f32, or null.
        pub scale_inv: DevPtr<'a>,
        /// One f32 that is raised to the input's amax, or null.
        pub amax: DevPtr<'a>,
        /// One f32, or null; 1.0 leaves every output as it is.
        pub noop: DevPtr<'a>,
        /// Elements.
        pub count: u64,
        /// Walk the tensor from its end.
        pub reverse: u32,
        /// Zero.
        pub unused: u32,
    }
}

params! {
    /// Parameters of `cast_transpose_*` and `cast_transpose_dbias_*`.
    pub struct CastTransposeParams<'a> [quantize::CAST_TRANSPOSE_PARAMS_BYTES] for CastTranspose | CastTransposeDbias => host::cast::run_transpose {
        ..CastPointers,
        /// Rows of the input.
        pub rows: u64,
        /// Columns of the input.
        pub cols: u64,
        /// Leading dimension of `out_t`.
        pub ld_t: u64,
        /// The walk.
        pub strips: StripPlan,
        /// Walk the tensor from its end.
        pub reverse: u32,
    }
}

/// The description of a cast, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each named where it is set")]
pub struct CastSpec {
    /// Rows of the input.
    pub rows: usize,
    /// Columns of the input.
    pub cols: usize,
    /// Type of the input.
    pub input: Float,
    /// Type of the output.
    pub output: Fp8,
    /// Write the row layout.
    pub rowwise: bool,
    /// Write the transposed layout.
    pub columnwise: bool,
    /// Write the column sums of the input. Alone (neither layout) it needs no scale.
    pub dbias: bool,
    /// Walk the tensor from its end, which is still in L2 after an amax pass.
    pub reverse: bool,
    /// Multiprocessors of the device (any number for the host backend).
    pub processors: u32,
}

impl CastSpec {
    /// Only the column sums of a tensor.
    #[must_use]
    pub const fn column_sums(rows: usize, cols: usize, input: Float, processors: u32) -> Self {
        let (rowwise, columnwise, dbias, reverse) = (false, false, true, false);
        Self { rows, cols, input, output: Fp8::E4m3, rowwise, columnwise, dbias, reverse, processors }
    }
}

pointers! {
    /// Buffers of one cast; null if the plan does not use them.
    pub struct CastPointers {
        /// Input `[rows, cols]`, contiguous.
        x,
        /// [`CastPlan::out_bytes`], any alignment; 8 bytes is fast.
        out,
        /// [`CastPlan::out_t_bytes`], 16-byte aligned.
        out_t,
        /// One f32.
        scale,
        /// One f32 that receives `1 / scale`, or null.
        scale_inv,
        /// One f32 that is raised to the amax of `x`, or null.
        amax,
        /// One f32, or null; 1.0 leaves every output as it is.
        noop,
        /// [`CastPlan::dbias_bytes`].
        dbias,
        /// [`CastPlan::partial_bytes`], 16-byte aligned, of any content.
        partial,
        /// [`CastPlan::counter_bytes`], zeroed once when allocated. One launch at a time may use them.
        counters,
    }
}

/// A checked cast: kernel and grid are chosen.
#[derive(Clone, Copy, Debug)]
pub struct CastPlan {
    spec: CastSpec,
    kernel: KernelId,
    grid: Grid,
    ld_t: usize,
    strips: StripPlan,
}

impl CastPlan {
    /// Checks `spec` and picks the kernel.
    ///
    /// # Errors
    /// A shape beyond what a launch can index, or nothing to write.
    pub fn new(spec: CastSpec) -> Result<Self> {
        if !(spec.rowwise || spec.columnwise || spec.dbias) {
            return Err(Error::value("cast", "no output is asked for; ask for rowwise, columnwise or dbias"));
        }
        if spec.columnwise || spec.dbias {
            check_columns("cast", spec.cols)?;
        }
        let ld_t = if spec.columnwise { spec.rows.next_multiple_of(TRANSPOSED_ALIGN) } else { 0 };
        let (tiles_rows, tiles_cols) = tiles("cast", spec.rows, spec.cols)?;
        // An empty tensor still has a scale_inv or a bias gradient to write.
        let (tiles_rows, tiles_cols) = (tiles_rows.max(1), tiles_cols.max(1));
        let (input, output) = (spec.input, spec.output);
        // Single tiles are fastest, but each tile would write its own partial sums.
        let strips = if spec.dbias {
            StripPlan::balanced(tiles_rows, tiles_cols, spec.processors * SUMMING_BLOCKS)
        } else {
            StripPlan::single_tiles(tiles_rows, tiles_cols)
        };
        let tiled = Grid::linear(strips.strips * tiles_cols, TILE_THREADS).with_shared(CAST_TRANSPOSE_SHARED);
        let (kernel, grid) = match (spec.columnwise, spec.dbias) {
            (_, true) => (KernelId::CastTransposeDbias(input, output), tiled),
            (true, false) => (KernelId::CastTranspose(input, output), tiled),
            (false, false) => {
                let blocks = (spec.rows * spec.cols).div_ceil(SPAN).max(1);
                (KernelId::Cast(input, output), Grid::linear(blocks as u32, THREADS))
            }
        };
        Ok(Self { spec, kernel, grid, ld_t, strips })
    }

    /// The spec of the plan.
    #[must_use]
    pub const fn spec(&self) -> &CastSpec {
        &self.spec
    }

    /// Leading dimension of the transposed layout: rows, rounded up to 16; the padding is zero.
    #[must_use]
    pub const fn transposed_ld(&self) -> usize {
        self.ld_t
    }

    /// Size of the row layout.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        if self.spec.rowwise { self.spec.rows * self.spec.cols } else { 0 }
    }

    /// Size of the transposed layout.
    #[must_use]
    pub const fn out_t_bytes(&self) -> usize {
        self.ld_t * self.spec.cols
    }

    /// Size of the bias gradient.
    #[must_use]
    pub const fn dbias_bytes(&self) -> usize {
        if self.spec.dbias { self.spec.cols * self.spec.input.size() } else { 0 }
    }

    /// Size of the arrival counters.
    #[must_use]
    pub const fn counter_bytes(&self) -> usize {
        if self.spec.dbias { self.strips.tiles_cols as usize * size_of::<u32>() } else { 0 }
    }

    /// Size of the strips' sums.
    #[must_use]
    pub const fn partial_bytes(&self) -> usize {
        if self.spec.dbias { self.strips.strips as usize * self.spec.cols * size_of::<f32>() } else { 0 }
    }

    /// Launches the cast.
    ///
    /// # Errors
    /// A buffer that the plan needs is null or misaligned, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, buffers: &CastPointers<DevPtr<'_>>) -> Result<()> {
        self.check(target.is_host(), buffers)?;
        let (b, spec) = (buffers, &self.spec);
        if let KernelId::Cast(..) = self.kernel {
            let params = CastParams {
                x: b.x,
                out: b.out,
                scale: b.scale,
                scale_inv: b.scale_inv,
                amax: b.amax,
                noop: b.noop,
                count: (spec.rows * spec.cols) as u64,
                reverse: u32::from(spec.reverse),
                unused: 0,
            };
            return launch(target, self.kernel, self.grid, &params);
        }
        let casts = spec.rowwise || spec.columnwise;
        let params = CastTransposeParams {
            at: CastPointers {
                out: b.out.when(spec.rowwise),
                out_t: b.out_t.when(spec.columnwise),
                scale: b.scale.when(casts),
                scale_inv: b.scale_inv.when(casts),
                dbias: b.dbias.when(spec.dbias),
                partial: b.partial.when(spec.dbias),
                counters: b.counters.when(spec.dbias),
                ..*b
            },
            rows: spec.rows as u64,
            cols: spec.cols as u64,
            ld_t: self.ld_t as u64,
            strips: self.strips,
            reverse: u32::from(spec.reverse),
        };
        launch(target, self.kernel, self.grid, &params)
    }

    /// Checks that every buffer that the kernel uses is present and aligned.
    fn check(&self, host: bool, b: &CastPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        let filled = spec.rows != 0 && spec.cols != 0;
        let casts = spec.rowwise || spec.columnwise;
        // The host backend sums columns without a workspace.
        let missing = (filled && b.x.is_null())
            || (filled && spec.rowwise && b.out.is_null())
            || (filled && spec.columnwise && b.out_t.is_null())
            || (casts && b.scale.is_null())
            || (spec.dbias
                && spec.cols != 0
                && (b.dbias.is_null() || (!host && (b.counters.is_null() || b.partial.is_null()))));
        if missing {
            return Err(Error::value("cast", "a buffer that the plan needs is null"));
        }
        if !host && spec.columnwise {
            aligned("cast", "the transposed output", b.out_t)?;
        }
        Ok(())
    }
}

/// Tiles along rows and columns, checked to be launchable as one grid.
pub(crate) fn tiles(op: &'static str, rows: usize, cols: usize) -> Result<(u32, u32)> {
    let (tiles_rows, tiles_cols) = (rows.div_ceil(TILE), cols.div_ceil(TILE));
    let fits = tiles_rows.max(1).checked_mul(tiles_cols.max(1)).is_some_and(|tiles| i32::try_from(tiles).is_ok());
    if fits {
        Ok((tiles_rows as u32, tiles_cols as u32))
    } else {
        Err(Error::shape(op, "the number of 128 x 128 tiles", "below 2**31", format_args!("{rows} x {cols} elements")))
    }
}

/// Checks the number of columns, which kernels with tiles count in 32 bits.
pub(crate) fn check_columns(op: &'static str, cols: usize) -> Result<()> {
    if i32::try_from(cols).is_ok() {
        return Ok(());
    }
    Err(Error::shape(op, "the number of columns", "below 2**31", cols))
}

/// Checks that an FP8 output has a scale.
pub(crate) fn scaled(op: &'static str, fp8: Option<Fp8>, scale: DevPtr<'_>) -> Result<()> {
    if fp8.is_none() || !scale.is_null() {
        return Ok(());
    }
    Err(Error::value(op, "an FP8 output needs a scale, one float32 on the device of x"))
}

/// Checks that a pointer is a multiple of 16 bytes.
#[inline]
pub(crate) fn aligned(op: &'static str, what: &'static str, pointer: DevPtr<'_>) -> Result<()> {
    if pointer.is_aligned(16) {
        Ok(())
    } else {
        Err(Error::layout(op, what, "aligned to 16 bytes", format_args!("address {:#x}", pointer.address())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: CastSpec = CastSpec {
        rows: 130,
        cols: 24,
        input: Float::Bf16,
        output: Fp8::E4m3,
        rowwise: true,
        columnwise: true,
        dbias: true,
        reverse: false,
        processors: 132,
    };

    #[test]
    fn sizes_follow_the_layouts() -> Result<()> {
        let plan = CastPlan::new(SPEC)?;
        assert_eq!((plan.transposed_ld(), plan.out_bytes(), plan.out_t_bytes()), (144, 130 * 24, 144 * 24));
        assert_eq!((plan.dbias_bytes(), plan.counter_bytes(), plan.partial_bytes()), (48, 4, 2 * 24 * 4));
        let row = CastPlan::new(CastSpec { columnwise: false, dbias: false, ..SPEC })?;
        assert_eq!((row.out_t_bytes(), row.dbias_bytes(), row.partial_bytes()), (0, 0, 0));
        assert_eq!(row.kernel, KernelId::Cast(Float::Bf16, Fp8::E4m3));
        Ok(())
    }

    #[test]
    fn nothing_to_write_is_an_error() {
        assert!(CastPlan::new(CastSpec { rowwise: false, columnwise: false, dbias: false, ..SPEC }).is_err());
        assert!(CastPlan::new(CastSpec { rows: 1 << 40, cols: 1 << 20, ..SPEC }).is_err());
        // A kernel without tiles has no limit of columns.
        let long = CastSpec { rows: 1, cols: 1 << 32, ..SPEC };
        assert!(CastPlan::new(long).is_err());
        assert!(CastPlan::new(CastSpec { columnwise: false, dbias: false, ..long }).is_ok());
    }
}
