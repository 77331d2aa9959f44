//! Activation functions: the result in high precision, as FP8 in row layout, transposed layout or both.
//! Layers call it between two linear layers; the gradient is in [`crate::ops::activation_backward`].

use te_fast_kernels::constants::activation as constants;
use te_fast_kernels::constants::tile::{TILE_THREADS, TRANSPOSED_ALIGN};
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::amax::{ScaleNumbers, ScaleRule, check_measured, check_measures};
use crate::ops::cast::{aligned, check_columns, scaled, tiles};
use crate::ops::strips::StripPlan;
use crate::{params, pointers};

/// An activation function. In a gated function the activated half `g` is the first half of the last dimension and the
/// linear half `l` is the second, unless they are interleaved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))`.
    Gelu,
    /// `gelu(g) * l`.
    Geglu,
    /// `sigmoid(g) * l`.
    Glu,
    /// `g * sigmoid(1.702 g)`.
    Qgelu,
    /// `qgelu(g) * l`.
    Qgeglu,
    /// `max(g, 0)`.
    Relu,
    /// `relu(g) * l`.
    Reglu,
    /// `max(g, 0)^2`.
    Srelu,
    /// `srelu(g) * l`.
    Sreglu,
    /// `g * sigmoid(g)`.
    Silu,
    /// `silu(g) * l`.
    Swiglu,
    /// `h * sigmoid(alpha h) * (clamp(l, -limit, limit) + offset)` with `h = min(g, limit)`.
    ClampedSwiglu {
        /// Bound of both halves, not negative.
        limit: f32,
        /// Factor inside the sigmoid.
        alpha: f32,
        /// Added to the clamped linear half.
        offset: f32,
    },
    /// `beta1 tanh(g / beta1) sigmoid(g) * beta2 tanh(l / beta2)`.
    SituGlu {
        /// Bound of the activated half, positive.
        beta1: f32,
        /// Bound of the linear half, positive.
        beta2: f32,
    },
}

/// Factor in the sigmoid of the quick GELU.
const QUICK_GELU_ALPHA: f32 = 1.702;

/// The function that a kernel applies to the activated half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Curve {
    /// Tanh GELU.
    Gelu = constants::CURVE_GELU,
    /// `g * sigmoid(alpha g)`.
    Swish = constants::CURVE_SWISH,
    /// The same with clamps and an offset.
    Clamped = constants::CURVE_CLAMPED,
    /// `max(g, 0)`.
    Relu = constants::CURVE_RELU,
    /// `max(g, 0)^2`.
    SquaredRelu = constants::CURVE_SQUARED_RELU,
    /// `sigmoid(g)`.
    Sigmoid = constants::CURVE_SIGMOID,
    /// Bounded swish.
    Situ = constants::CURVE_SITU,
}

impl Curve {
    /// The curve of a parameter struct's number.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        const ALL: [Curve; 7] =
            [Curve::Gelu, Curve::Swish, Curve::Clamped, Curve::Relu, Curve::SquaredRelu, Curve::Sigmoid, Curve::Situ];
        ALL.into_iter().find(|curve| *curve as u32 == number)
    }
}

/// Constants of a curve; zero where it has none. As `CurveConstants` in `cuda/activation/curves.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Constants {
    /// Of the swish and clamped curves.
    pub alpha: f32,
    /// Of the clamped curve.
    pub limit: f32,
    /// Of the clamped curve.
    pub offset: f32,
    /// Of the bounded swish.
    pub beta1: f32,
    /// Of the bounded swish.
    pub beta2: f32,
}

impl Activation {
    /// Whether the input has two halves.
    #[must_use]
    pub const fn is_gated(self) -> bool {
        !matches!(self, Self::Gelu | Self::Qgelu | Self::Relu | Self::Srelu | Self::Silu)
    }

    /// Columns of the input per column of the output.
    #[must_use]
    pub const fn halves(self) -> usize {
        if self.is_gated() { 2 } else { 1 }
    }

    pub(crate) const fn curve(self) -> Curve {
        match self {
            Self::Gelu | Self::Geglu => Curve::Gelu,
            Self::Qgelu | Self::Qgeglu | Self::Silu | Self::Swiglu => Curve::Swish,
            Self::Glu => Curve::Sigmoid,
            Self::Relu | Self::Reglu => Curve::Relu,
            Self::Srelu | Self::Sreglu => Curve::SquaredRelu,
            Self::ClampedSwiglu { .. } => Curve::Clamped,
            Self::SituGlu { .. } => Curve::Situ,
        }
    }

    pub(crate) fn constants(self) -> Constants {
        let none = Constants::default();
        match self {
            Self::Qgelu | Self::Qgeglu => Constants { alpha: QUICK_GELU_ALPHA, ..none },
            Self::Silu | Self::Swiglu => Constants { alpha: 1.0, ..none },
            Self::ClampedSwiglu { limit, alpha, offset } => Constants { alpha, limit, offset, ..none },
            Self::SituGlu { beta1, beta2 } => Constants { beta1, beta2, ..none },
            _ => none,
        }
    }

    fn check(self, op: &'static str) -> Result<()> {
        match self {
            Self::ClampedSwiglu { limit, .. } if limit.is_nan() || limit < 0.0 => {
                Err(Error::value(op, format_args!("limit must not be negative, got {limit}")))
            }
            Self::SituGlu { beta1, beta2 } if !(beta1 > 0.0 && beta2 > 0.0 && (beta1 + beta2).is_finite()) => Err(
                Error::value(op, format_args!("beta1 and beta2 must be positive and finite, got {beta1} and {beta2}")),
            ),
            _ => Ok(()),
        }
    }
}

/// Checks of shape and outputs for both directions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) op: &'static str,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) activation: Activation,
    pub(crate) interleave: usize,
}

/// The walk over the tensor, and the place of its transposed layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    pub(crate) strips: StripPlan,
    pub(crate) ld_t: usize,
}

impl Tiling {
    /// The grid of a kernel that takes `shared` bytes of dynamic shared memory.
    pub(crate) const fn grid(&self, shared: u32) -> Grid {
        Grid::linear(self.strips.strips * self.strips.tiles_cols, TILE_THREADS).with_shared(shared)
    }
}

impl Shape {
    /// Checks the shape and the activation's constants; strips for `resident` blocks at once, `None`: single tiles.
    pub(crate) fn tiling(&self, columnwise: bool, resident: Option<u32>) -> Result<Tiling> {
        self.activation.check(self.op)?;
        let interleave = self.interleave;
        if interleave != 0 && !(self.activation.is_gated() && self.cols.is_multiple_of(interleave)) {
            return Err(Error::shape(
                self.op,
                "the interleave size",
                format_args!("0, or for a gated activation a divisor of the {} output columns", self.cols),
                interleave,
            ));
        }
        check_columns(self.op, self.cols)?;
        let (tiles_rows, tiles_cols) = tiles(self.op, self.rows, self.cols)?;
        // An empty tensor still has a scale_inv or a bias gradient to write.
        let (tiles_rows, tiles_cols) = (tiles_rows.max(1), tiles_cols.max(1));
        let ld_t = if columnwise { self.rows.next_multiple_of(TRANSPOSED_ALIGN) } else { 0 };
        let strips = match resident {
            Some(resident) => StripPlan::balanced(tiles_rows, tiles_cols, resident),
            None => StripPlan::single_tiles(tiles_rows, tiles_cols),
        };
        Ok(Tiling { strips, ld_t })
    }
}

params! {
    /// Parameters of `activation_*` and `activation_gated_*`.
    pub struct ActivationParams<'a> [constants::ACTIVATION_PARAMS_BYTES] for Activation | ActivationGated => host::activation::run {
        ..ActivationPointers,
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
        /// Type of `row_scale`, as [`Float`].
        pub row_scale_kind: u32,
        /// Columns of one block of interleaved halves; 0: side by side.
        pub interleave: u32,
        /// FP8 type: 0 is E4M3, 1 is E5M2.
        pub e5m2: u32,
        /// Of the scale that is measured.
        pub rule: ScaleNumbers,
    }
}

/// The description of an activation, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationSpec {
    /// Rows.
    pub rows: usize,
    /// Columns of the result.
    pub cols: usize,
    /// The function.
    pub activation: Activation,
    /// Gated: the halves alternate in blocks of this many columns; 0: side by side.
    pub interleave: usize,
    /// Type of the input and of the result in high precision.
    pub input: Float,
    /// Write the result in high precision.
    pub high: bool,
    /// Type of the FP8 result; `None` casts nothing.
    pub fp8: Option<Fp8>,
    /// Write the FP8 row layout.
    pub rowwise: bool,
    /// Write the FP8 transposed layout.
    pub columnwise: bool,
    /// Type of a factor per row, if there is one.
    pub row_scale: Option<Float>,
    /// Compute the scale for a later cast of the high-precision result; only if this op casts nothing.
    pub measures: Option<ScaleRule>,
}

pointers! {
    /// Buffers of one activation; null if the plan does not use them.
    pub struct ActivationPointers {
        /// Input `[rows, halves * cols]`, contiguous.
        x,
        /// [`ActivationPlan::y_bytes`].
        y,
        /// [`ActivationPlan::out_bytes`], any alignment; 8 bytes is fast.
        out,
        /// [`ActivationPlan::out_t_bytes`], 16-byte aligned.
        out_t,
        /// Factors `[rows]`.
        row_scale,
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

/// A checked activation: kernel and grid are chosen.
#[derive(Clone, Copy, Debug)]
pub struct ActivationPlan {
    spec: ActivationSpec,
    kernel: KernelId,
    tiling: Tiling,
}

const OP: &str = "activation";

impl ActivationPlan {
    /// Checks `spec` and picks the kernel.
    ///
    /// # Errors
    /// A shape beyond what a launch can index, an interleave size or constants that do not fit, or nothing to write.
    pub fn new(spec: ActivationSpec) -> Result<Self> {
        let ActivationSpec { rows, cols, activation, interleave, input, .. } = spec;
        check_outputs(OP, spec.high, spec.fp8, spec.rowwise || spec.columnwise)?;
        check_measures(OP, spec.measures.as_ref(), spec.high && spec.fp8.is_none())?;
        let tiling = Shape { op: OP, rows, cols, activation, interleave }.tiling(spec.columnwise, None)?;
        let kernel = if activation.is_gated() { KernelId::ActivationGated(input) } else { KernelId::Activation(input) };
        Ok(Self { spec, kernel, tiling })
    }

    /// The spec of the plan.
    #[must_use]
    pub const fn spec(&self) -> &ActivationSpec {
        &self.spec
    }

    /// Leading dimension of the transposed layout: rows, rounded up to 16; the padding is zero.
    #[must_use]
    pub const fn transposed_ld(&self) -> usize {
        self.tiling.ld_t
    }

    /// Size of the result in high precision.
    #[must_use]
    pub const fn y_bytes(&self) -> usize {
        if self.spec.high { self.spec.rows * self.spec.cols * self.spec.input.size() } else { 0 }
    }

    /// Size of the FP8 row layout.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        if self.spec.rowwise { self.spec.rows * self.spec.cols } else { 0 }
    }

    /// Size of the FP8 transposed layout.
    #[must_use]
    pub const fn out_t_bytes(&self) -> usize {
        self.tiling.ld_t * self.spec.cols
    }

    /// Launches the activation.
    ///
    /// # Errors
    /// A buffer that the plan needs is null or misaligned, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, buffers: &ActivationPointers<DevPtr<'_>>) -> Result<()> {
        self.check(target.is_host(), buffers)?;
        let (b, spec) = (buffers, &self.spec);
        let casts = spec.fp8.is_some();
        let params = ActivationParams {
            at: ActivationPointers {
                y: b.y.when(spec.high),
                out: b.out.when(spec.rowwise),
                out_t: b.out_t.when(spec.columnwise),
                row_scale: b.row_scale.when(spec.row_scale.is_some()),
                scale: b.scale.when(casts),
                scale_inv: b.scale_inv.when(casts),
                amax: b.amax.when(casts),
                measured: b.measured.when(spec.measures.is_some()),
                counters: b.counters.when(spec.measures.is_some()),
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
        };
        launch(target, self.kernel, self.tiling.grid(constants::SHARED), &params)
    }

    /// Checks that every buffer that the kernel uses is present and aligned.
    fn check(&self, host: bool, b: &ActivationPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        let filled = spec.rows != 0 && spec.cols != 0;
        let missing = filled
            && (b.x.is_null()
                || (spec.high && b.y.is_null())
                || (spec.rowwise && b.out.is_null())
                || (spec.columnwise && b.out_t.is_null())
                || (spec.row_scale.is_some() && b.row_scale.is_null()));
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

/// Checks that an output is requested, and that FP8 layouts and the FP8 type come together.
pub(crate) fn check_outputs(op: &'static str, other: bool, fp8: Option<Fp8>, layouts: bool) -> Result<()> {
    if layouts != fp8.is_some() {
        return Err(Error::value(op, "an FP8 type needs a layout, rowwise or columnwise, and a layout an FP8 type"));
    }
    if layouts || other { Ok(()) } else { Err(Error::value(op, "no output is asked for")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: ActivationSpec = ActivationSpec {
        rows: 130,
        cols: 24,
        activation: Activation::Swiglu,
        interleave: 0,
        input: Float::Bf16,
        high: true,
        fp8: Some(Fp8::E4m3),
        rowwise: true,
        columnwise: true,
        row_scale: None,
        measures: None,
    };

    #[test]
    fn sizes_follow_the_outputs() -> Result<()> {
        let plan = ActivationPlan::new(SPEC)?;
        assert_eq!((plan.y_bytes(), plan.out_bytes(), plan.out_t_bytes()), (130 * 48, 130 * 24, 144 * 24));
        assert_eq!(plan.kernel, KernelId::ActivationGated(Float::Bf16));
        let high =
            ActivationSpec { fp8: None, rowwise: false, columnwise: false, activation: Activation::Gelu, ..SPEC };
        let plan = ActivationPlan::new(high)?;
        assert_eq!((plan.out_bytes(), plan.out_t_bytes(), plan.transposed_ld()), (0, 0, 0));
        assert_eq!(plan.kernel, KernelId::Activation(Float::Bf16));
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let refused = |spec| assert!(ActivationPlan::new(spec).is_err(), "{spec:?}");
        refused(ActivationSpec { fp8: None, ..SPEC });
        refused(ActivationSpec { rowwise: false, columnwise: false, ..SPEC });
        refused(ActivationSpec { fp8: None, rowwise: false, columnwise: false, high: false, ..SPEC });
        refused(ActivationSpec { interleave: 16, ..SPEC });
        refused(ActivationSpec { interleave: 8, activation: Activation::Relu, ..SPEC });
        refused(ActivationSpec { rows: 1 << 40, cols: 1 << 20, ..SPEC });
        refused(ActivationSpec { activation: Activation::SituGlu { beta1: 0.0, beta2: 25.0 }, ..SPEC });
        let clamped = Activation::ClampedSwiglu { limit: -1.0, alpha: 1.702, offset: 1.0 };
        refused(ActivationSpec { activation: clamped, ..SPEC });
    }
}
