//! LayerNorm and RMSNorm of rows: with a residual added before, the result in high precision, as FP8 in row layout,
//! transposed layout or both. The gradient is in [`crate::ops::norm_backward`].

use te_fast_kernels::{Float, Fp8, KernelId};

use crate::dispatch::Limits;
use crate::error::{Error, Result};
use crate::host;
use crate::kernel::{DevPtr, Grid, Target, launch};
use crate::ops::activation::check_outputs;
use crate::ops::cast::{TRANSPOSED_ALIGN, aligned};
use crate::params;

/// Which statistics a row is normalised by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Mean and variance.
    LayerNorm,
    /// Mean square.
    RmsNorm,
}

/// What a norm does, apart from where its buffers are.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "outputs are asked for one by one")]
pub struct NormSpec {
    /// Rows.
    pub rows: usize,
    /// Columns, which one row's statistics are over; at least 1.
    pub cols: usize,
    /// Statistics.
    pub kind: NormKind,
    /// Type of the input, the residual, the sum and the result in high precision.
    pub input: Float,
    /// Type of gamma and beta.
    pub weight: Float,
    /// Factors are `gamma + 1`.
    pub zero_centered_gamma: bool,
    /// What is added to the variance; not negative.
    pub eps: f32,
    /// Add a residual first, and write the sum.
    pub residual: bool,
    /// Write the result in high precision.
    pub high: bool,
    /// Type of the FP8 result; `None` casts nothing.
    pub fp8: Option<Fp8>,
    /// Write the FP8 row layout.
    pub rowwise: bool,
    /// Write the FP8 transposed layout.
    pub columnwise: bool,
    /// Write the statistics.
    pub stats: bool,
    /// What a launch can have on the device.
    pub limits: Limits,
}

params! {
    /// Parameters of `norm_*`, `norm_transpose_*` and `norm_long_*`.
    pub struct NormParams<'a> [168] for Norm | NormTranspose | NormLong => host::norm::run {
        /// Input `[rows, cols]`.
        pub x: DevPtr<'a>,
        /// What is added to it, or null.
        pub residual: DevPtr<'a>,
        /// The rounded sum, with a residual.
        pub sum: DevPtr<'a>,
        /// Factors `[cols]`.
        pub gamma: DevPtr<'a>,
        /// Summands `[cols]`, or null.
        pub beta: DevPtr<'a>,
        /// Result `[rows, cols]` in the input's type, or null.
        pub y: DevPtr<'a>,
        /// f32 `[rows]`, or null.
        pub mean: DevPtr<'a>,
        /// f32 `[rows]`, or null.
        pub rstd: DevPtr<'a>,
        /// FP8 bytes `[rows, cols]`, or null.
        pub out: DevPtr<'a>,
        /// FP8 bytes `[cols, ld_t]`, or null.
        pub out_t: DevPtr<'a>,
        /// One f32; null casts nothing.
        pub scale: DevPtr<'a>,
        /// One f32, or null.
        pub scale_inv: DevPtr<'a>,
        /// One f32 that is raised to the result's amax, or null.
        pub amax: DevPtr<'a>,
        /// One f32, or null; 1.0 leaves every output as it is.
        pub noop: DevPtr<'a>,
        /// Rows.
        pub rows: u64,
        /// Columns.
        pub cols: u64,
        /// Leading dimension of `out_t`.
        pub ld_t: u64,
        /// What is added to the variance.
        pub eps: f32,
        /// Threads that have a row.
        pub team: u32,
        /// Rows that a block has at a time.
        pub strip: u32,
        /// Columns that a block has at a time.
        pub chunk: u32,
        /// Type of gamma and beta, as [`Float`].
        pub weight_kind: u32,
        /// 1: no mean.
        pub rms: u32,
        /// 1: factors are gamma + 1.
        pub zero_centered: u32,
        /// FP8 type: 0 is E4M3, 1 is E5M2.
        pub e5m2: u32,
    }
}

/// Buffers of one norm; null where the plan has no use for one.
#[derive(Clone, Copy, Debug)]
pub struct NormBuffers<'a> {
    /// Input `[rows, cols]`, contiguous; any alignment, 16 bytes is fast, as for every other tensor here.
    pub x: DevPtr<'a>,
    /// What is added to it, as `x`.
    pub residual: DevPtr<'a>,
    /// Receives the sum, as `x`.
    pub sum: DevPtr<'a>,
    /// Factors `[cols]`.
    pub gamma: DevPtr<'a>,
    /// Summands `[cols]`, or null.
    pub beta: DevPtr<'a>,
    /// [`NormPlan::y_bytes`].
    pub y: DevPtr<'a>,
    /// f32 `[rows]`; null for RMSNorm, which has none.
    pub mean: DevPtr<'a>,
    /// f32 `[rows]`.
    pub rstd: DevPtr<'a>,
    /// [`NormPlan::out_bytes`].
    pub out: DevPtr<'a>,
    /// [`NormPlan::out_t_bytes`], 16-byte aligned.
    pub out_t: DevPtr<'a>,
    /// One f32.
    pub scale: DevPtr<'a>,
    /// One f32 that receives `1 / scale`, or null.
    pub scale_inv: DevPtr<'a>,
    /// One f32 that is raised to the amax of the unrounded, unscaled result, or null.
    pub amax: DevPtr<'a>,
    /// One f32, or null; 1.0 leaves every output as it is.
    pub noop: DevPtr<'a>,
}

impl NormBuffers<'_> {
    /// No buffer at all; callers set those that their plan needs.
    pub const NONE: Self = Self {
        x: DevPtr::null(),
        residual: DevPtr::null(),
        sum: DevPtr::null(),
        gamma: DevPtr::null(),
        beta: DevPtr::null(),
        y: DevPtr::null(),
        mean: DevPtr::null(),
        rstd: DevPtr::null(),
        out: DevPtr::null(),
        out_t: DevPtr::null(),
        scale: DevPtr::null(),
        scale_inv: DevPtr::null(),
        amax: DevPtr::null(),
        noop: DevPtr::null(),
    };
}

/// A checked norm: kernel, grid and the share of each block are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormPlan {
    spec: NormSpec,
    kernel: KernelId,
    grid: Grid,
    ld_t: usize,
    team: u32,
    strip: u32,
    chunk: u32,
}

const OP: &str = "norm";
const MAX_THREADS: u32 = 1024;
/// Threads of a block of rows that share nothing.
const ROW_THREADS: u32 = 256;
/// Sizes of a team; a block has at most 15 that are larger than a warp, one barrier each.
const TEAMS: [u32; 5] = [32, 128, 256, 512, 1024];
/// Bytes of its row that a thread holds in registers.
const HELD_BYTES: usize = 64;
/// Rows whose bytes are stored transposed together.
const STRIPS: [u32; 2] = [32, 16];
/// What chunks are a multiple of.
const CHUNK: usize = 128;
/// Static shared memory of a block, and what the driver keeps.
const RESERVED_SHARED: u32 = 2048;

/// The smallest team that can hold a row in registers.
pub(crate) fn team_for(cols: usize, input: Float) -> Option<u32> {
    TEAMS.into_iter().find(|&team| cols <= team as usize * HELD_BYTES / input.size())
}

impl NormPlan {
    /// Checks `spec`, picks the kernel and shares out the rows.
    ///
    /// # Errors
    /// A shape beyond what a launch can index, an eps that is negative or NaN, or nothing to write.
    pub fn new(spec: NormSpec) -> Result<Self> {
        let NormSpec { rows, cols, input, .. } = spec;
        check_outputs(OP, spec.high || spec.stats || spec.residual, spec.fp8, spec.rowwise || spec.columnwise)?;
        check_shape(OP, rows, cols)?;
        if spec.eps.is_nan() || spec.eps < 0.0 {
            return Err(Error::value(OP, format_args!("eps must not be negative, got {}", spec.eps)));
        }
        let ld_t = if spec.columnwise { rows.next_multiple_of(TRANSPOSED_ALIGN) } else { 0 };
        let whole = cols.next_multiple_of(CHUNK);
        let shared =
            (spec.limits.shared_bytes.saturating_sub(RESERVED_SHARED) as usize).max(STRIPS[1] as usize * CHUNK);
        let team = team_for(cols, input);
        let strip = STRIPS.into_iter().find(|&strip| strip as usize * whole <= shared);
        // The plan without its grid's size, and the threads of a block.
        let plan = |kernel, team, strip, chunk: usize| Self {
            spec,
            kernel,
            grid: Grid::linear(1, MAX_THREADS),
            ld_t,
            team,
            strip,
            chunk: chunk as u32,
        };
        let mut plan = match (spec.columnwise, team, strip) {
            (false, Some(team), _) => plan(KernelId::Norm(input), team, ROW_THREADS.max(team) / team, whole),
            (false, None, _) => plan(KernelId::NormLong(input), MAX_THREADS, 1, whole),
            (true, Some(team), Some(strip)) => plan(KernelId::NormTranspose(input), team, strip, whole),
            (true, _, _) => {
                let strip = STRIPS[1];
                let most = shared / strip as usize / CHUNK * CHUNK;
                plan(KernelId::NormLong(input), MAX_THREADS, strip, whole.min(most))
            }
        };
        let strips = rows.max(ld_t).div_ceil(plan.strip as usize).max(1);
        let blocks = match plan.kernel {
            KernelId::NormTranspose(_) => strips.min(spec.limits.multiprocessors.max(1) as usize),
            _ => strips,
        };
        let blocks = i32::try_from(blocks).map_err(|_| Error::shape(OP, "the number of rows", "below 2**31", rows))?;
        let threads = if matches!(plan.kernel, KernelId::Norm(_)) { ROW_THREADS.max(plan.team) } else { MAX_THREADS };
        let stage = if spec.columnwise { plan.strip * plan.chunk } else { 0 };
        plan.grid = Grid::linear(blocks as u32, threads).with_shared(stage);
        Ok(plan)
    }

    /// What the plan was made for.
    #[must_use]
    pub const fn spec(&self) -> &NormSpec {
        &self.spec
    }

    /// Leading dimension of the transposed layout: rows, rounded up to 16; the padding is zero.
    #[must_use]
    pub const fn transposed_ld(&self) -> usize {
        self.ld_t
    }

    /// Size of the result in high precision, and of the sum.
    #[must_use]
    pub const fn y_bytes(&self) -> usize {
        self.spec.rows * self.spec.cols * self.spec.input.size()
    }

    /// Size of the FP8 row layout.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        if self.spec.rowwise { self.spec.rows * self.spec.cols } else { 0 }
    }

    /// Size of the FP8 transposed layout.
    #[must_use]
    pub const fn out_t_bytes(&self) -> usize {
        self.ld_t * self.spec.cols
    }

    /// Launches the norm.
    ///
    /// # Errors
    /// A buffer that the plan needs is null or misaligned, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, buffers: &NormBuffers<'_>) -> Result<()> {
        self.check(target.is_host(), buffers)?;
        let (b, spec) = (buffers, &self.spec);
        let used = |wanted: bool, pointer| if wanted { pointer } else { DevPtr::null() };
        let casts = spec.fp8.is_some();
        let params = NormParams {
            x: b.x,
            residual: used(spec.residual, b.residual),
            sum: used(spec.residual, b.sum),
            gamma: b.gamma,
            beta: b.beta,
            y: used(spec.high, b.y),
            mean: used(spec.stats && spec.kind == NormKind::LayerNorm, b.mean),
            rstd: used(spec.stats, b.rstd),
            out: used(spec.rowwise, b.out),
            out_t: used(spec.columnwise, b.out_t),
            scale: used(casts, b.scale),
            scale_inv: used(casts, b.scale_inv),
            amax: used(casts, b.amax),
            noop: b.noop,
            rows: spec.rows as u64,
            cols: spec.cols as u64,
            ld_t: self.ld_t as u64,
            eps: spec.eps,
            team: self.team,
            strip: self.strip,
            chunk: self.chunk,
            weight_kind: spec.weight as u32,
            rms: u32::from(spec.kind == NormKind::RmsNorm),
            zero_centered: u32::from(spec.zero_centered_gamma),
            e5m2: u32::from(spec.fp8 == Some(Fp8::E5m2)),
        };
        launch(target, self.kernel, self.grid, &params)
    }

    /// Every buffer that the kernel will use is there, and aligned where it must be.
    fn check(&self, host: bool, b: &NormBuffers<'_>) -> Result<()> {
        let spec = &self.spec;
        let missing = (spec.rows != 0
            && (b.x.is_null()
                || b.gamma.is_null()
                || (spec.residual && (b.residual.is_null() || b.sum.is_null()))
                || (spec.high && b.y.is_null())
                || (spec.stats && (b.rstd.is_null() || (spec.kind == NormKind::LayerNorm && b.mean.is_null())))
                || (spec.rowwise && b.out.is_null())
                || (spec.columnwise && b.out_t.is_null())))
            || (spec.fp8.is_some() && b.scale.is_null());
        if missing {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        if !host && spec.columnwise {
            aligned(OP, "the transposed output", b.out_t)?;
        }
        Ok(())
    }
}

/// Rows have something to be normalised over, and columns can be counted in 32 bits.
pub(crate) fn check_shape(op: &'static str, rows: usize, cols: usize) -> Result<()> {
    if cols == 0 || i32::try_from(cols).is_err() {
        return Err(Error::shape(op, "the number of columns", "from 1 to 2**31 - 1", cols));
    }
    if rows.checked_mul(cols).and_then(|count| count.checked_mul(4)).is_none() {
        return Err(Error::shape(op, "the tensor", "of a size that memory can have", format_args!("{rows} x {cols}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: Limits = Limits { multiprocessors: 132, shared_bytes: 232_448 };
    const ADA: Limits = Limits { multiprocessors: 128, shared_bytes: 101_376 };

    fn plan(rows: usize, cols: usize, input: Float, columnwise: bool, limits: Limits) -> Result<NormPlan> {
        NormPlan::new(NormSpec {
            rows,
            cols,
            kind: NormKind::LayerNorm,
            input,
            weight: input,
            zero_centered_gamma: false,
            eps: 1e-5,
            residual: false,
            high: !columnwise,
            fp8: columnwise.then_some(Fp8::E4m3),
            rowwise: false,
            columnwise,
            stats: true,
            limits,
        })
    }

    #[test]
    fn every_length_has_a_launch_within_the_limits() -> Result<()> {
        for limits in [HOPPER, ADA, Limits { multiprocessors: 1, shared_bytes: 0 }] {
            for input in [Float::F32, Float::Bf16] {
                for cols in [1, 7, 1024, 1025, 4096, 8192, 12_288, 16_384, 32_768, 32_769, 65_536, 1 << 20] {
                    for columnwise in [false, true] {
                        let plan = plan(1000, cols, input, columnwise, limits)?;
                        let Grid { blocks, threads, shared_bytes } = plan.grid;
                        assert!(shared_bytes <= limits.shared_bytes.max(RESERVED_SHARED), "{plan:?}");
                        assert_eq!((threads % plan.team, plan.chunk % CHUNK as u32), (0, 0), "{plan:?}");
                        assert!(blocks[0] >= 1 && threads <= MAX_THREADS, "{plan:?}");
                        if matches!(plan.kernel, KernelId::NormLong(_)) {
                            assert_eq!(blocks[0] as usize, plan.spec.rows.max(plan.ld_t).div_ceil(plan.strip as usize));
                        } else {
                            assert!(cols <= plan.team as usize * HELD_BYTES / input.size(), "{plan:?}");
                            assert!(plan.chunk as usize >= cols, "{plan:?}");
                        }
                        if columnwise {
                            assert!(plan.strip == 16 || plan.strip == 32, "{plan:?}");
                            assert_eq!(shared_bytes, plan.strip * plan.chunk);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn rows_go_where_they_fit() -> Result<()> {
        let kernel = |cols, columnwise, limits| plan(4096, cols, Float::Bf16, columnwise, limits).map(|p| p.kernel);
        assert_eq!(kernel(8192, false, HOPPER)?, KernelId::Norm(Float::Bf16));
        assert_eq!(kernel(8192, true, HOPPER)?, KernelId::NormTranspose(Float::Bf16));
        assert_eq!(kernel(8192, true, ADA)?, KernelId::NormLong(Float::Bf16));
        assert_eq!(kernel(65_536, false, HOPPER)?, KernelId::NormLong(Float::Bf16));
        assert!(plan(4, 0, Float::F32, false, HOPPER).is_err());
        assert!(plan(usize::MAX / 8, 64, Float::F32, false, HOPPER).is_err());
        Ok(())
    }
}
