//! Gradient of the activation functions in one pass: in high precision, as FP8 in either layout, with the bias
//! gradient of the linear layer before and the gradient of a factor per row.

use te_fast_kernels::constants::activation as constants;
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::target::{Target, launch};
use crate::ops::activation::{Activation, Constants, Shape, Tiling, check_outputs};
use crate::ops::amax::{ScaleNumbers, ScaleRule, check_measured, check_measures};
use crate::ops::cast::{aligned, scaled};
use crate::ops::strips::StripPlan;
use crate::runtime::lane::MEASURE_COUNTERS_AT;
use crate::{params, pointers};

params! {
    /// Parameters of `activation_backward_*` and `activation_gated_backward_*`.
    pub struct ActivationBackwardParams<'a> [constants::ACTIVATION_BACKWARD_PARAMS_BYTES] for ActivationBackward | ActivationGatedBackward
        => host::activation_backward::run {
        ..ActivationBackwardPointers,
        /// Rows.
        pub rows: u64,
        /// Columns of the result.
        pub cols: u64,
        /// Leading dimension of `out_t`.
        pub ld_t: u64,
        /// Of the curve.
        pub constants: Constants,
        /// The walk.
        pub strips: StripPlan,
        /// Number of the curve.
        pub curve: u32,
        /// Type of `row_scale` and its gradient, as [`Float`].
        pub row_scale_kind: u32,
        /// Columns of one block of interleaved halves; 0: side by side.
        pub interleave: u32,
        /// FP8 type: 0 is E4M3, 1 is E5M2.
        pub e5m2: u32,
        /// Of the scale that is measured.
        pub rule: ScaleNumbers,
    }
}

/// The description of an activation's gradient, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each named where it is set")]
pub struct ActivationBackwardSpec {
    /// Rows.
    pub rows: usize,
    /// Columns of the forward's result.
    pub cols: usize,
    /// The function.
    pub activation: Activation,
    /// Gated: the halves alternate in blocks of this many columns; 0: side by side.
    pub interleave: usize,
    /// Type of the forward's input, of both gradients in high precision and of the column sums.
    pub input: Float,
    /// Write the gradient in high precision.
    pub high: bool,
    /// Type of the FP8 gradient; `None` casts nothing.
    pub fp8: Option<Fp8>,
    /// Write the FP8 row layout.
    pub rowwise: bool,
    /// Write the FP8 transposed layout.
    pub columnwise: bool,
    /// Write the column sums of the gradient.
    pub dbias: bool,
    /// Type of a factor per row of the forward's result, if there is one.
    pub row_scale: Option<Float>,
    /// Write that factor's gradient, in its type.
    pub row_scale_grad: bool,
    /// Compute the scale for a later cast of the high-precision gradient; only if this op casts nothing.
    pub measures: Option<ScaleRule>,
    /// Multiprocessors of the device (any number for the host backend).
    pub processors: u32,
}

pointers! {
    /// Buffers of one gradient; null if the plan does not use them.
    pub struct ActivationBackwardPointers {
        /// Gradient of the result `[rows, cols]`, contiguous.
        dy,
        /// Input of the forward `[rows, halves * cols]`, contiguous.
        x,
        /// [`ActivationBackwardPlan::dx_bytes`].
        dx,
        /// [`ActivationBackwardPlan::out_bytes`], any alignment; 8 bytes is fast.
        out,
        /// [`ActivationBackwardPlan::out_t_bytes`], 16-byte aligned.
        out_t,
        /// Factors `[rows]`.
        row_scale,
        /// Their gradient `[rows]`.
        row_scale_grad,
        /// One f32.
        scale,
        /// One f32 that receives `1 / scale`, or null.
        scale_inv,
        /// One f32 that is raised to the amax of the unrounded, unscaled gradient, or null.
        amax,
        /// One f32, or null; 1.0 leaves every output as it is.
        noop,
        /// One f32 that receives the scale which the gradient in high precision is quantised with.
        measured,
        /// [`AMAX_WORKSPACE_BYTES`](te_fast_kernels::constants::quantize::AMAX_WORKSPACE_BYTES) for that, apart from `counters`,
        /// zeroed once when allocated. One launch at a time may use them.
        measure_counters,
        /// [`ActivationBackwardPlan::dbias_bytes`].
        dbias,
        /// [`ActivationBackwardPlan::partial_bytes`], 16-byte aligned, of any content.
        partial,
        /// [`ActivationBackwardPlan::counter_bytes`], zeroed once when allocated. One launch at a time may use them.
        counters,
    }
}

/// A checked gradient: kernel and grid are chosen.
#[derive(Clone, Copy, Debug)]
pub struct ActivationBackwardPlan {
    spec: ActivationBackwardSpec,
    kernel: KernelId,
    tiling: Tiling,
}

const OP: &str = "activation_backward";

/// Blocks that one multiprocessor of a Hopper runs at once.
const fn resident_blocks(gated: bool, input: Float) -> u32 {
    match (gated, input) {
        (false, _) => constants::BACKWARD_BLOCKS,
        (true, Float::Bf16) => constants::GATED_BACKWARD_BLOCKS_BF16,
        (true, _) => constants::GATED_BACKWARD_BLOCKS,
    }
}

/// Dynamic shared memory of a block.
const fn shared_bytes(gated: bool, input: Float) -> u32 {
    match (gated, input) {
        (false, _) => constants::BACKWARD_SHARED,
        (true, Float::F32) => constants::GATED_BACKWARD_SHARED_F32,
        (true, _) => constants::GATED_BACKWARD_SHARED,
    }
}

impl ActivationBackwardPlan {
    /// Checks `spec` and picks the kernel.
    ///
    /// # Errors
    /// A shape beyond what a launch or the counters can index, an interleave size or constants that do not fit, the
    /// gradient of a factor that is not there, or nothing to write.
    pub fn new(spec: ActivationBackwardSpec) -> Result<Self> {
        let ActivationBackwardSpec { rows, cols, activation, interleave, input, .. } = spec;
        let other = spec.high || spec.dbias || spec.row_scale_grad;
        check_outputs(OP, other, spec.fp8, spec.rowwise || spec.columnwise)?;
        check_measures(OP, spec.measures.as_ref(), spec.high && spec.fp8.is_none())?;
        if spec.row_scale_grad && spec.row_scale.is_none() {
            return Err(Error::value(OP, "the gradient of the row scale needs a row scale"));
        }
        // Single tiles are fastest, but each tile would write its own partial sums.
        let sums = spec.dbias || spec.row_scale_grad;
        let resident = sums.then(|| spec.processors * resident_blocks(activation.is_gated(), input));
        let tiling = Shape { op: OP, rows, cols, activation, interleave }.tiling(spec.columnwise, resident)?;
        let kernel = if activation.is_gated() {
            KernelId::ActivationGatedBackward(input)
        } else {
            KernelId::ActivationBackward(input)
        };
        let plan = Self { spec, kernel, tiling };
        if plan.counter_bytes() > MEASURE_COUNTERS_AT {
            let counters = plan.counter_bytes() / size_of::<u32>();
            return Err(Error::shape(OP, "rows and columns", "of at most 16320 arrival counters", counters));
        }
        Ok(plan)
    }

    /// The spec of the plan.
    #[must_use]
    pub const fn spec(&self) -> &ActivationBackwardSpec {
        &self.spec
    }

    /// Columns of the forward's input.
    const fn input_cols(&self) -> usize {
        self.spec.activation.halves() * self.spec.cols
    }

    /// Leading dimension of the transposed layout: rows, rounded up to 16; the padding is zero.
    #[must_use]
    pub const fn transposed_ld(&self) -> usize {
        self.tiling.ld_t
    }

    /// Size of the gradient in high precision.
    #[must_use]
    pub const fn dx_bytes(&self) -> usize {
        if self.spec.high { self.spec.rows * self.input_cols() * self.spec.input.size() } else { 0 }
    }

    /// Size of the FP8 row layout.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        if self.spec.rowwise { self.spec.rows * self.input_cols() } else { 0 }
    }

    /// Size of the FP8 transposed layout.
    #[must_use]
    pub const fn out_t_bytes(&self) -> usize {
        self.tiling.ld_t * self.input_cols()
    }

    /// Size of the column sums.
    #[must_use]
    pub const fn dbias_bytes(&self) -> usize {
        if self.spec.dbias { self.input_cols() * self.spec.input.size() } else { 0 }
    }

    /// Size of the arrival counters.
    #[must_use]
    pub const fn counter_bytes(&self) -> usize {
        let StripPlan { strips, tiles_cols, .. } = self.tiling.strips;
        let columns = if self.spec.dbias { tiles_cols as usize } else { 0 };
        let rows = if self.spec.row_scale_grad { strips as usize } else { 0 };
        (columns + rows) * size_of::<u32>()
    }

    /// Size of the partial sums.
    #[must_use]
    pub const fn partial_bytes(&self) -> usize {
        let StripPlan { strips, tiles_cols, .. } = self.tiling.strips;
        let columns = if self.spec.dbias { strips as usize * self.input_cols() } else { 0 };
        let rows = if self.spec.row_scale_grad { tiles_cols as usize * self.spec.rows } else { 0 };
        (columns + rows) * size_of::<f32>()
    }

    /// Launches the gradient.
    ///
    /// # Errors
    /// A buffer that the plan needs is null or misaligned, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, buffers: &ActivationBackwardPointers<DevPtr<'_>>) -> Result<()> {
        self.check(target.is_host(), buffers)?;
        let shared = shared_bytes(self.spec.activation.is_gated(), self.spec.input);
        launch(target, self.kernel, self.tiling.grid(shared), &self.params(buffers))
    }

    #[inline]
    fn params<'a>(&self, b: &ActivationBackwardPointers<DevPtr<'a>>) -> ActivationBackwardParams<'a> {
        let spec = &self.spec;
        let (casts, sums) = (spec.fp8.is_some(), spec.dbias || spec.row_scale_grad);
        ActivationBackwardParams {
            at: ActivationBackwardPointers {
                dx: b.dx.when(spec.high),
                out: b.out.when(spec.rowwise),
                out_t: b.out_t.when(spec.columnwise),
                row_scale: b.row_scale.when(spec.row_scale.is_some()),
                row_scale_grad: b.row_scale_grad.when(spec.row_scale_grad),
                scale: b.scale.when(casts),
                scale_inv: b.scale_inv.when(casts),
                amax: b.amax.when(casts),
                measured: b.measured.when(spec.measures.is_some()),
                measure_counters: b.measure_counters.when(spec.measures.is_some()),
                dbias: b.dbias.when(spec.dbias),
                partial: b.partial.when(sums),
                counters: b.counters.when(sums),
                ..*b
            },
            rows: spec.rows as u64,
            cols: spec.cols as u64,
            ld_t: self.tiling.ld_t as u64,
            constants: spec.activation.constants(),
            strips: self.tiling.strips,
            curve: spec.activation.curve() as u32,
            row_scale_kind: spec.row_scale.map_or(0, |float| float as u32),
            interleave: spec.interleave as u32,
            e5m2: u32::from(spec.fp8 == Some(Fp8::E5m2)),
            rule: spec.measures.map_or_else(ScaleNumbers::default, ScaleNumbers::from),
        }
    }

    /// Checks that every buffer that the kernel uses is present and aligned.
    fn check(&self, host: bool, b: &ActivationBackwardPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        let filled = spec.rows != 0 && spec.cols != 0;
        let sums = (spec.dbias && spec.cols != 0) || (spec.row_scale_grad && spec.rows != 0);
        let missing = (filled
            && (b.dy.is_null()
                || b.x.is_null()
                || (spec.high && b.dx.is_null())
                || (spec.rowwise && b.out.is_null())
                || (spec.columnwise && b.out_t.is_null())
                || (spec.row_scale.is_some() && b.row_scale.is_null())))
            || (spec.dbias && spec.cols != 0 && b.dbias.is_null())
            || (spec.row_scale_grad && spec.rows != 0 && b.row_scale_grad.is_null())
            // The host backend sums without a workspace.
            || (!host && sums && (b.counters.is_null() || b.partial.is_null()));
        if missing {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        scaled(OP, spec.fp8, b.scale)?;
        check_measured(OP, spec.measures.is_some(), host, (b.measured, b.measure_counters))?;
        if !host && spec.columnwise {
            aligned(OP, "the transposed output", b.out_t)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: ActivationBackwardSpec = ActivationBackwardSpec {
        rows: 130,
        cols: 24,
        activation: Activation::Swiglu,
        interleave: 8,
        input: Float::Bf16,
        high: true,
        fp8: Some(Fp8::E5m2),
        rowwise: true,
        columnwise: true,
        dbias: true,
        row_scale: Some(Float::F32),
        row_scale_grad: true,
        measures: None,
        processors: 132,
    };

    #[test]
    fn sizes_follow_the_outputs() -> Result<()> {
        let plan = ActivationBackwardPlan::new(SPEC)?;
        assert_eq!((plan.dx_bytes(), plan.out_bytes(), plan.out_t_bytes()), (130 * 96, 130 * 48, 144 * 48));
        assert_eq!((plan.dbias_bytes(), plan.counter_bytes()), (96, 4 * (1 + 2)));
        assert_eq!(plan.partial_bytes(), 4 * (2 * 48 + 130));
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let refused = |spec| assert!(ActivationBackwardPlan::new(spec).is_err(), "{spec:?}");
        refused(ActivationBackwardSpec { row_scale: None, ..SPEC });
        refused(ActivationBackwardSpec { interleave: 7, ..SPEC });
        refused(ActivationBackwardSpec { cols: 128 * 16384, ..SPEC });
        let nothing = ActivationBackwardSpec { fp8: None, rowwise: false, columnwise: false, high: false, ..SPEC };
        refused(ActivationBackwardSpec { dbias: false, row_scale_grad: false, ..nothing });
        assert!(ActivationBackwardPlan::new(nothing).is_ok());
    }
}
