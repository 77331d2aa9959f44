//! LayerNorm and RMSNorm of rows: with a residual added before, the result in high precision, as FP8 in row layout,
//! transposed layout or both. The gradient is in [`crate::ops::norm_backward`].

use te_fast_kernels::Fp8;
use te_fast_kernels::constants::norm;
use te_fast_kernels::constants::tile::TRANSPOSED_ALIGN;

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::activation::check_outputs;
use crate::ops::amax::{ScaleNumbers, check_measured, check_measures};
use crate::ops::cast::{aligned, scaled};
use crate::ops::norm_share::Share;
use crate::ops::norm_spec::{NormKind, NormSpec};
use crate::{params, pointers};

params! {
    /// Parameters of `norm_*`, `norm_transpose_*`, `norm_long_*`, `norm_short_*` and `norm_short_transpose_*`.
    pub struct NormParams<'a> [norm::NORM_PARAMS_BYTES] for Norm | NormTranspose | NormLong | NormShort | NormShortTranspose
        => host::norm::run {
        ..NormPointers,
        /// Rows.
        pub rows: u64,
        /// Leading dimension of `out_t`.
        pub ld_t: u64,
        /// Columns.
        pub cols: u32,
        /// Added to the variance.
        pub eps: f32,
        /// Threads of a block that share a row, or the block's columns of a row.
        pub team: u32,
        /// Rows that a block works on at a time.
        pub strip: u32,
        /// Columns that a block works on at a time.
        pub chunk: u32,
        /// Tensors that come through shared memory: none, x, x and the residual.
        pub ring: u32,
        /// Type of gamma and beta, as [`Float`](te_fast_kernels::Float).
        pub weight_kind: u32,
        /// 1: no mean.
        pub rms: u32,
        /// 1: factors are gamma + 1.
        pub zero_centered: u32,
        /// FP8 type: 0 is E4M3, 1 is E5M2.
        pub e5m2: u32,
        /// Of the scale that is measured.
        pub rule: ScaleNumbers,
    }
}

pointers! {
    /// Buffers of one norm; null if the plan does not use them.
    pub struct NormPointers {
        /// Input `[rows, cols]`, contiguous; any alignment, 16 bytes is fast, as for every other tensor here.
        x,
        /// The residual, as `x`.
        residual,
        /// Receives the sum, as `x`.
        sum,
        /// Factors `[cols]`.
        gamma,
        /// Summands `[cols]`, or null.
        beta,
        /// [`NormPlan::y_bytes`].
        y,
        /// f32 `[rows]`; null for RMSNorm, which has none.
        mean,
        /// f32 `[rows]`.
        rstd,
        /// [`NormPlan::out_bytes`].
        out,
        /// [`NormPlan::out_t_bytes`], 16-byte aligned.
        out_t,
        /// One f32.
        scale,
        /// One f32 that receives `1 / scale`, or null.
        scale_inv,
        /// One f32 that is raised to the amax of the unrounded, unscaled result, or null.
        amax,
        /// One f32, or null; 1.0 leaves every output as it is.
        noop,
        /// One f32 that receives the scale which the result in high precision is quantised with.
        measured,
        /// [`AMAX_WORKSPACE_BYTES`](te_fast_kernels::constants::quantize::AMAX_WORKSPACE_BYTES) for that, zeroed once when
        /// allocated. One launch at a time may use them.
        counters,
    }
}

/// A checked norm: kernel, grid and the share of each block are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormPlan {
    spec: NormSpec,
    share: Share,
    grid: Grid,
    ld_t: usize,
}

const OP: &str = "norm";

impl NormPlan {
    /// Checks `spec`, picks the kernel and divides the rows among blocks.
    ///
    /// # Errors
    /// A shape beyond what a launch can index, an eps that is negative or NaN, or nothing to write.
    pub fn new(spec: NormSpec) -> Result<Self> {
        let NormSpec { rows, cols, columnwise, .. } = spec;
        check_outputs(OP, spec.high || spec.stats || spec.residual, spec.fp8, spec.rowwise || columnwise)?;
        check_measures(OP, spec.measures.as_ref(), spec.high && spec.fp8.is_none())?;
        check_shape(OP, rows, cols)?;
        if spec.eps.is_nan() || spec.eps < 0.0 {
            return Err(Error::value(OP, format_args!("eps must not be negative, got {}", spec.eps)));
        }
        let ld_t = if columnwise { rows.next_multiple_of(TRANSPOSED_ALIGN) } else { 0 };
        let (share, bytes) = Share::new(&spec);
        let strips = rows.max(ld_t).div_ceil(share.strip as usize).max(1);
        let blocks = share.grid_blocks(strips, &spec.limits) as u32;
        let grid = Grid::linear(blocks, share.threads).with_shared(bytes as u32).with_cluster(share.blocks);
        Ok(Self { spec, share, grid, ld_t })
    }

    /// The spec of the plan.
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
    pub fn run(&self, target: &mut Target<'_>, buffers: &NormPointers<DevPtr<'_>>) -> Result<()> {
        self.check(target.is_host(), buffers)?;
        let (b, spec) = (buffers, &self.spec);
        let casts = spec.fp8.is_some();
        let params = NormParams {
            at: NormPointers {
                residual: b.residual.when(spec.residual),
                sum: b.sum.when(spec.residual),
                y: b.y.when(spec.high),
                mean: b.mean.when(spec.stats && spec.kind == NormKind::LayerNorm),
                rstd: b.rstd.when(spec.stats),
                out: b.out.when(spec.rowwise),
                out_t: b.out_t.when(spec.columnwise),
                scale: b.scale.when(casts),
                scale_inv: b.scale_inv.when(casts),
                amax: b.amax.when(casts),
                measured: b.measured.when(spec.measures.is_some()),
                counters: b.counters.when(spec.measures.is_some()),
                ..*b
            },
            rows: spec.rows as u64,
            ld_t: self.ld_t as u64,
            cols: spec.cols as u32,
            eps: spec.eps,
            team: self.share.team,
            strip: self.share.strip,
            chunk: self.share.chunk,
            ring: self.share.ring,
            weight_kind: spec.weight as u32,
            rms: u32::from(spec.kind == NormKind::RmsNorm),
            zero_centered: u32::from(spec.zero_centered_gamma),
            e5m2: u32::from(spec.fp8 == Some(Fp8::E5m2)),
            rule: spec.measures.map_or_else(ScaleNumbers::default, ScaleNumbers::from),
        };
        launch(target, self.share.kernel, self.grid, &params)
    }

    /// Checks that every buffer that the kernel uses is present and aligned.
    fn check(&self, host: bool, b: &NormPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        let missing = spec.rows != 0
            && (b.x.is_null()
                || b.gamma.is_null()
                || (spec.residual && (b.residual.is_null() || b.sum.is_null()))
                || (spec.high && b.y.is_null())
                || (spec.stats && (b.rstd.is_null() || (spec.kind == NormKind::LayerNorm && b.mean.is_null())))
                || (spec.rowwise && b.out.is_null())
                || (spec.columnwise && b.out_t.is_null()));
        if missing {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        scaled(OP, spec.fp8, b.scale)?;
        check_measured(OP, spec.measures.is_some(), host, (b.measured, b.counters))?;
        if !host && spec.columnwise {
            aligned(OP, "the transposed output", b.out_t)?;
        }
        Ok(())
    }
}

/// Checks that there are columns, and that 32 bits can count them.
pub(crate) fn check_shape(op: &'static str, rows: usize, cols: usize) -> Result<()> {
    if cols == 0 || i32::try_from(cols).is_err() {
        return Err(Error::shape(op, "the number of columns", "from 1 to 2**31 - 1", cols));
    }
    if i32::try_from(rows).is_err() {
        return Err(Error::shape(op, "the number of rows", "below 2**31", rows));
    }
    if rows.checked_mul(cols).and_then(|count| count.checked_mul(4)).is_none() {
        return Err(Error::shape(op, "the tensor", "of a size that memory can have", format_args!("{rows} x {cols}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use te_fast_kernels::constants::norm::{CHUNK, HELD_BYTES, MAX_BLOCKS, MAX_STRIP, THREADS, TRANSPOSED_COLUMNS};
    use te_fast_kernels::{Float, KernelId};

    use super::*;
    use crate::ops::norm_share::{SHORT_COLUMNS, WEIGHT_BYTES};
    use crate::runtime::lane::Limits;

    const HOPPER: Limits = Limits { multiprocessors: 132, shared_bytes: 232_448, clusters: true };
    const ADA: Limits = Limits { multiprocessors: 128, shared_bytes: 101_376, clusters: false };

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
            measures: None,
            limits,
        })
    }

    #[test]
    fn every_length_has_a_launch_within_the_limits() -> Result<()> {
        for limits in [HOPPER, ADA, Limits { shared_bytes: 48 << 10, ..ADA }] {
            for input in [Float::F32, Float::Bf16] {
                for cols in [
                    1,
                    7,
                    32,
                    100,
                    128,
                    256,
                    257,
                    1024,
                    1025,
                    4096,
                    8192,
                    12_288,
                    16_384,
                    32_768,
                    32_769,
                    65_536,
                    1 << 20,
                    4100,
                    9000,
                ] {
                    for columnwise in [false, true] {
                        for rows in [1, 77, 1000, 1_000_000] {
                            check(&plan(rows, cols, input, columnwise, limits)?, limits);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn check(plan: &NormPlan, limits: Limits) {
        let NormPlan { spec, share, grid, .. } = plan;
        let strips = spec.rows.max(plan.ld_t).div_ceil(share.strip as usize);
        let lanes = if spec.cols <= SHORT_COLUMNS { 1 } else { 32 };
        assert!(grid.shared_bytes <= limits.shared_bytes, "{plan:?}");
        assert_eq!((grid.threads % share.team, share.team % lanes, share.chunk % CHUNK as u32), (0, 0, 0), "{plan:?}");
        let most = if lanes == 1 { grid.threads } else { MAX_STRIP };
        assert!((1..=most).contains(&share.strip), "{plan:?}");
        assert!(grid.blocks[0] >= 1 && grid.threads <= THREADS, "{plan:?}");
        if let KernelId::NormLong(_) = share.kernel {
            assert_eq!(grid.blocks[0] as usize, strips);
        } else if lanes == 1 {
            assert!(share.team.is_power_of_two() && (4..=32).contains(&share.team), "{plan:?}");
            assert!((share.team as usize) * 8 >= spec.cols && share.chunk as usize >= spec.cols, "{plan:?}");
            assert_eq!((grid.threads, grid.cluster), (128, 1), "{plan:?}");
            let held = 128 / share.team as usize * (8 / spec.input.size());
            assert!(spec.columnwise || share.strip as usize == held, "{plan:?}");
            let stage = if spec.columnwise { share.strip } else { 0 };
            assert_eq!(grid.shared_bytes, (8 + stage) * share.chunk, "{plan:?}");
        } else {
            assert!((((share.blocks - 1) * share.chunk) as usize) < spec.cols, "a block has no columns: {plan:?}");
            let team = share.team as usize;
            let held = if spec.columnwise { TRANSPOSED_COLUMNS } else { HELD_BYTES / spec.input.size() };
            assert!((share.chunk as usize).min(spec.cols) <= team * held, "{plan:?}");
            assert!((share.chunk * share.blocks) as usize >= spec.cols, "{plan:?}");
            assert!(grid.cluster <= if limits.clusters { MAX_BLOCKS } else { 1 }, "{plan:?}");
            assert!(grid.blocks[0].is_multiple_of(grid.cluster), "{plan:?}");
            // From this the kernel knows whether it has two rows at a time, and keeps their weights.
            let bytes = share.chunk as usize * spec.input.size();
            let two = !spec.columnwise && bytes <= 64 * team;
            let ring = share.ring as usize * share.threads as usize * HELD_BYTES;
            assert!(!two || grid.shared_bytes as usize == ring + WEIGHT_BYTES * share.chunk as usize, "{plan:?}");
            assert!(two || spec.columnwise || share.strip == share.threads / share.team, "{plan:?}");
        }
        if spec.columnwise {
            assert!([32, 64].contains(&share.strip), "{plan:?}");
        }
    }

    #[test]
    fn few_strips_are_shared_by_more_blocks() -> Result<()> {
        for (rows, cols, expected) in [
            (64, 1024, (2, 32)),
            (64, 4096, (8, 32)),
            (512, 4096, (4, 32)),
            (1024, 4096, (2, 32)),
            (2048, 4096, (2, 32)),
            (3072, 4096, (1, 32)),
            (4096, 4096, (2, 64)),
            (2048, 8192, (2, 32)),
            (2048, 16_384, (8, 32)),
            (77, 4100, (4, 32)),
        ] {
            let NormPlan { share, .. } = plan(rows, cols, Float::Bf16, true, HOPPER)?;
            assert_eq!((share.blocks, share.strip), expected, "{rows} x {cols}");
            assert_eq!(plan(rows, cols, Float::Bf16, true, ADA)?.share.blocks, 1);
        }
        Ok(())
    }

    #[test]
    fn rows_go_where_they_fit() -> Result<()> {
        let share = |cols, columnwise, limits| {
            plan(8192, cols, Float::Bf16, columnwise, limits).map(|p| (p.share.kernel, p.share.blocks, p.share.strip))
        };
        let (norm, transpose) = (KernelId::Norm(Float::Bf16), KernelId::NormTranspose(Float::Bf16));
        let long = KernelId::NormLong(Float::Bf16);
        let (short, short_transpose) = (KernelId::NormShort(Float::Bf16), KernelId::NormShortTranspose(Float::Bf16));
        assert_eq!(share(3, false, HOPPER)?, (short, 1, 128));
        assert_eq!(share(64, false, ADA)?, (short, 1, 64));
        assert_eq!(share(128, false, HOPPER)?, (short, 1, 32));
        assert_eq!(share(256, false, HOPPER)?, (short, 1, 16));
        assert_eq!(share(257, false, HOPPER)?, (norm, 1, 32));
        assert_eq!(share(128, true, HOPPER)?, (short_transpose, 1, 32));
        assert_eq!(share(8192, false, HOPPER)?, (norm, 1, 4));
        assert_eq!(share(16_384, false, HOPPER)?, (norm, 2, 4));
        assert_eq!(share(65_536, false, HOPPER)?, (norm, 8, 4));
        assert_eq!(share(16_384, false, ADA)?, (norm, 1, 2));
        assert_eq!(share(32_768, false, ADA)?, (norm, 1, 1));
        assert_eq!(share(65_536, false, ADA)?, (long, 1, 1));
        assert_eq!(share(1024, true, HOPPER)?, (transpose, 1, 64));
        assert_eq!(share(4096, true, HOPPER)?, (transpose, 2, 64));
        assert_eq!(share(8192, true, HOPPER)?, (transpose, 2, 32));
        assert_eq!(share(32_768, true, HOPPER)?, (transpose, 8, 32));
        assert_eq!(share(65_536, true, HOPPER)?, (long, 1, 32));
        assert_eq!(share(2048, true, ADA)?, (transpose, 1, 32));
        assert_eq!(share(8192, true, ADA)?, (long, 1, 32));
        assert!(plan(4, 0, Float::F32, false, HOPPER).is_err());
        assert!(plan(usize::MAX / 8, 64, Float::F32, false, HOPPER).is_err());
        Ok(())
    }
}
