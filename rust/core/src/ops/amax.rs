//! Current scaling: the amax of a tensor and its scale in one launch, or in two launches if ranks reduce the amax in
//! between.

use te_fast_kernels::constants::common::WARP;
use te_fast_kernels::constants::quantize::{self, AMAX_WORKSPACE_BYTES, SPAN, THREADS};
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::{params, pointers};

/// Blocks per multiprocessor; more blocks would only add atomics.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;

params! {
    /// Parameters of `amax_*`.
    pub struct AmaxParams<'a> [quantize::AMAX_PARAMS_BYTES] for Amax => host::amax::run {
        ..AmaxPointers,
        /// Elements.
        pub count: u64,
        /// Largest value of the FP8 type.
        pub fp8_max: f32,
        /// Smallest amax.
        pub eps: f32,
        /// Round the scale down to a power of two.
        pub pow2: u32,
        /// Zero.
        pub unused: u32,
    }
}

params! {
    /// Parameters of `scale_from_amax`.
    pub struct ScaleFromAmaxParams<'a> [quantize::SCALE_FROM_AMAX_PARAMS_BYTES] for ScaleFromAmax => host::amax::run_scale {
        /// One f32.
        pub amax: DevPtr<'a>,
        /// One f32.
        pub scale: DevPtr<'a>,
        /// One f32, or null.
        pub scale_inv: DevPtr<'a>,
        /// Largest value of the FP8 type.
        pub fp8_max: f32,
        /// Smallest amax.
        pub eps: f32,
        /// Round the scale down to a power of two.
        pub pow2: u32,
        /// Zero.
        pub unused: u32,
    }
}

/// How a scale follows from an amax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleRule {
    /// Type of the later cast.
    pub output: Fp8,
    /// Smallest amax.
    pub eps: f32,
    /// Round the scale down to a power of two.
    pub pow2: bool,
}

/// The same as kernels have it among their parameters.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ScaleNumbers {
    /// Largest value of the FP8 type.
    pub fp8_max: f32,
    /// Smallest amax.
    pub eps: f32,
    /// Round the scale down to a power of two.
    pub pow2: u32,
    /// Zero.
    pub unused: u32,
}

impl From<ScaleRule> for ScaleNumbers {
    fn from(rule: ScaleRule) -> Self {
        Self { fp8_max: rule.output.max(), eps: rule.eps, pow2: u32::from(rule.pow2), unused: 0 }
    }
}

pointers! {
    /// Buffers of one amax launch.
    pub struct AmaxPointers {
        /// Input, contiguous.
        x,
        /// [`AmaxPlan::WORKSPACE_BYTES`], zeroed once when allocated. One launch at a time may use it.
        workspace,
        /// One f32 that receives the amax, or null.
        amax,
        /// One f32 that receives the scale; null stops after the amax.
        scale,
        /// One f32 that receives `1 / scale`, or null.
        scale_inv,
        /// One f32, or null; 1.0 leaves every output as it is.
        noop,
    }
}

/// A checked amax pass.
#[derive(Clone, Copy, Debug)]
pub struct AmaxPlan {
    kernel: KernelId,
    grid: Grid,
    count: usize,
    rule: ScaleRule,
}

impl AmaxPlan {
    /// Size of the workspace.
    pub const WORKSPACE_BYTES: usize = AMAX_WORKSPACE_BYTES;

    /// A pass over `count` elements on a device with `multiprocessors` (any number for the host backend).
    ///
    /// # Errors
    /// An epsilon that is negative or not a number.
    pub fn new(count: usize, input: Float, rule: ScaleRule, multiprocessors: u32) -> Result<Self> {
        check_eps("amax", rule.eps)?;
        let most = (multiprocessors * BLOCKS_PER_MULTIPROCESSOR).max(1);
        let blocks = (count.div_ceil(SPAN).min(most as usize) as u32).max(1);
        Ok(Self { kernel: KernelId::Amax(input), grid: Grid::linear(blocks, THREADS), count, rule })
    }

    /// Launches the pass.
    ///
    /// # Errors
    /// A buffer that is needed is null, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, b: &AmaxPointers<DevPtr<'_>>) -> Result<()> {
        let missing = (self.count != 0 && b.x.is_null()) || (b.workspace.is_null() && !target.is_host());
        if missing || (b.amax.is_null() && b.scale.is_null()) {
            return Err(Error::value("amax", "a buffer that the plan needs is null"));
        }
        let params = AmaxParams {
            at: *b,
            count: self.count as u64,
            fp8_max: self.rule.output.max(),
            eps: self.rule.eps,
            pow2: u32::from(self.rule.pow2),
            unused: 0,
        };
        launch(target, self.kernel, self.grid, &params)
    }
}

/// Writes the scale of the amax at `amax`, and its inverse unless that is null.
///
/// # Errors
/// A null buffer, or the launch fails.
#[inline]
pub fn scale_from_amax(
    target: &mut Target<'_>,
    rule: &ScaleRule,
    amax: DevPtr<'_>,
    scale: DevPtr<'_>,
    scale_inv: DevPtr<'_>,
) -> Result<()> {
    if amax.is_null() || scale.is_null() {
        return Err(Error::value("scale_from_amax", "amax and scale must not be null"));
    }
    let params = ScaleFromAmaxParams {
        amax,
        scale,
        scale_inv,
        fp8_max: rule.output.max(),
        eps: rule.eps,
        pow2: u32::from(rule.pow2),
        unused: 0,
    };
    launch(target, KernelId::ScaleFromAmax, Grid::linear(1, WARP), &params)
}

/// Checks that a scale is measured only for a result that is stored in high precision and not cast here.
pub(crate) fn check_measures(op: &'static str, rule: Option<&ScaleRule>, fits: bool) -> Result<()> {
    let Some(rule) = rule else { return Ok(()) };
    check_eps(op, rule.eps)?;
    if fits { Ok(()) } else { Err(Error::value(op, "a scale is measured of a result in high precision alone")) }
}

/// Checks that there is memory for the scale, and the blocks' counters.
pub(crate) fn check_measured(
    op: &'static str,
    measures: bool,
    host: bool,
    (measured, counters): (DevPtr<'_>, DevPtr<'_>),
) -> Result<()> {
    if measures && (measured.is_null() || (counters.is_null() && !host)) {
        return Err(Error::value(op, "the scale that is measured has no place, or no counters"));
    }
    Ok(())
}

/// Checks that an epsilon is a number of at least 0.
pub(crate) fn check_eps(op: &'static str, eps: f32) -> Result<()> {
    if eps >= 0.0 { Ok(()) } else { Err(Error::value(op, format_args!("amax_epsilon must be at least 0, got {eps}"))) }
}
