//! One operand's quantisation under a recipe: which casts run, and how many bytes they write.

use te_fast_kernels::{Float, Fp8};

use crate::dispatch::{COUNTER_BYTES, aligned};
use crate::error::{Error, Result};
use crate::kernel::{DevPtr, Target};
use crate::ops::amax::{AmaxBuffers, AmaxPlan, ScaleRule};
use crate::ops::cast::{CastBuffers, CastPlan, CastSpec};
use crate::ops::cast_block::{BlockShape, CastBlockBuffers, CastBlockPlan, CastBlockSpec, Unpack};
use crate::recipe::{Block, Quantization, Scaling, Usage};

const OP: &str = "quantize";
/// A tensor's scale, with room so that what follows stays aligned.
const SCALE_BYTES: usize = 16;
/// The amax pass has the first counters to itself.
const AMAX_COUNTERS: usize = 256;

/// What an operand's quantisation depends on.
#[derive(Clone, Copy, Debug)]
pub struct QuantSpec {
    /// How scales come about.
    pub scaling: Scaling,
    /// Scale options and block shape.
    pub quantization: Quantization,
    /// Rows, all leading dimensions together.
    pub rows: usize,
    /// Last dimension.
    pub cols: usize,
    /// Type to quantise.
    pub input: Float,
    /// Type to quantise to.
    pub output: Fp8,
    /// Layouts to write.
    pub usage: Usage,
    /// Sum the columns too.
    pub dbias: bool,
    /// Multiprocessors of the device.
    pub processors: u32,
}

/// One quantised layout: FP8 bytes and inverse scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantized<'a> {
    /// FP8 bytes.
    pub data: DevPtr<'a>,
    /// FP32 inverse scales.
    pub scale: DevPtr<'a>,
}

impl Quantized<'_> {
    /// Not there.
    pub const NONE: Self = Self { data: DevPtr::null(), scale: DevPtr::null() };
}

/// Pointers of one quantisation.
#[derive(Clone, Copy, Debug)]
pub struct QuantIo<'a> {
    /// High-precision input, contiguous.
    pub x: DevPtr<'a>,
    /// Row layout.
    pub row: Quantized<'a>,
    /// Column layout; per-tensor scaling writes the one scale to `row.scale`, or here when there are no rows.
    pub col: Quantized<'a>,
    /// Scale of delayed scaling.
    pub scale: DevPtr<'a>,
    /// Maximum to raise, of delayed scaling.
    pub amax: DevPtr<'a>,
    /// Device float; 1 leaves every output as it is. Null without.
    pub noop: DevPtr<'a>,
    /// Column sums; null without.
    pub dbias: DevPtr<'a>,
    /// [`QuantPlan::scratch_bytes`] bytes.
    pub scratch: DevPtr<'a>,
    /// [`COUNTER_BYTES`] bytes, zero between launches.
    pub counters: DevPtr<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Steps {
    Delayed(CastPlan),
    Current(AmaxPlan, CastPlan),
    Block(CastBlockPlan, Option<CastPlan>),
}

/// A checked quantisation of one operand.
#[derive(Clone, Copy, Debug)]
pub struct QuantPlan {
    steps: Steps,
    row_bytes: usize,
    row_scale_bytes: usize,
    col_bytes: usize,
    col_scale_bytes: usize,
    scratch_bytes: usize,
}

impl QuantPlan {
    /// Plans it.
    ///
    /// # Errors
    /// A recipe that no kernel here runs, or sizes beyond what a launch can index.
    pub fn new(spec: &QuantSpec) -> Result<Self> {
        let cast = |reverse| {
            CastPlan::new(CastSpec {
                rows: spec.rows,
                cols: spec.cols,
                input: spec.input,
                output: spec.output,
                rowwise: spec.usage.rowwise,
                columnwise: spec.usage.columnwise,
                dbias: spec.dbias,
                reverse,
                processors: spec.processors,
            })
        };
        let steps = match spec.scaling {
            Scaling::Delayed => Steps::Delayed(cast(false)?),
            Scaling::Current => {
                let Quantization { power_2_scale: pow2, amax_epsilon: eps, .. } = spec.quantization;
                let rule = ScaleRule { output: spec.output, eps, pow2 };
                Steps::Current(AmaxPlan::new(spec.rows * spec.cols, spec.input, rule, spec.processors)?, cast(true)?)
            }
            Scaling::Block => Steps::Block(block_plan(spec)?, spec.dbias.then(|| column_sums(spec)).transpose()?),
            other => return Err(Error::unsupported(OP, format!("{other:?} scaling does not run on this device"))),
        };
        let plan = Self::measure(steps);
        if plan.counter_bytes() > COUNTER_BYTES {
            return Err(Error::shape(
                OP,
                "columns of a tensor whose columns are summed",
                "at most 2,000,000",
                spec.cols,
            ));
        }
        Ok(plan)
    }

    /// The same with the column layout's scales as bytes where they are powers of two of 1×128 blocks: a quarter of
    /// the memory, for layouts that are kept. [`QuantPlan::run_unpacking`] of another operand makes them f32 again.
    ///
    /// # Errors
    /// None for a plan that was made.
    pub fn with_byte_scales(self) -> Result<Self> {
        let Steps::Block(block, sums) = self.steps else { return Ok(self) };
        let spec = *block.spec();
        if !spec.columnwise || !spec.pow2 || spec.block != BlockShape::OneDimensional {
            return Ok(self);
        }
        let block = CastBlockPlan::new(CastBlockSpec { byte_scales_t: true, ..spec })?;
        Ok(Self::measure(Steps::Block(block, sums)))
    }

    /// How many scales of the column layout are bytes; 0 where they are f32.
    #[must_use]
    pub const fn byte_scales(&self) -> usize {
        match &self.steps {
            Steps::Block(block, _) if block.spec().byte_scales_t => self.col_scale_bytes,
            _ => 0,
        }
    }

    fn measure(steps: Steps) -> Self {
        let (row_bytes, row_scale_bytes, col_bytes, col_scale_bytes) = match &steps {
            Steps::Delayed(cast) | Steps::Current(_, cast) => {
                (cast.out_bytes(), SCALE_BYTES, cast.out_t_bytes(), SCALE_BYTES)
            }
            Steps::Block(block, _) => {
                (block.out_bytes(), block.scale_bytes(), block.out_t_bytes(), block.scale_t_bytes())
            }
        };
        let partial = match &steps {
            Steps::Delayed(cast) | Steps::Current(_, cast) => cast.partial_bytes(),
            Steps::Block(_, sums) => sums.as_ref().map_or(0, CastPlan::partial_bytes),
        };
        let scratch_bytes = aligned(SCALE_BYTES) + aligned(partial);
        Self { steps, row_bytes, row_scale_bytes, col_bytes, col_scale_bytes, scratch_bytes }
    }

    fn counter_bytes(&self) -> usize {
        AMAX_COUNTERS
            + match &self.steps {
                Steps::Delayed(cast) | Steps::Current(_, cast) => cast.counter_bytes(),
                Steps::Block(_, sums) => sums.as_ref().map_or(0, CastPlan::counter_bytes),
            }
    }

    /// FP8 bytes of the row layout.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of its scales.
    #[must_use]
    pub const fn row_scale_bytes(&self) -> usize {
        self.row_scale_bytes
    }

    /// FP8 bytes of the column layout.
    #[must_use]
    pub const fn col_bytes(&self) -> usize {
        self.col_bytes
    }

    /// Bytes of its scales.
    #[must_use]
    pub const fn col_scale_bytes(&self) -> usize {
        self.col_scale_bytes
    }

    /// Whether both layouts have the one scale of the tensor.
    #[must_use]
    pub const fn shares_scale(&self) -> bool {
        !matches!(self.steps, Steps::Block(..))
    }

    /// Private bytes of one run.
    #[must_use]
    pub const fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// Launches it.
    ///
    /// # Errors
    /// A launch's refusal.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, io: &QuantIo<'_>) -> Result<()> {
        self.run_unpacking(target, io, Unpack::NONE)
    }

    /// Launches it; a block cast unpacks scales of another operand on the way.
    ///
    /// # Errors
    /// A launch's refusal.
    #[inline]
    pub fn run_unpacking(&self, target: &mut Target<'_>, io: &QuantIo<'_>, unpack: Unpack<'_>) -> Result<()> {
        let scale_inv = if io.row.data.is_null() { io.col.scale } else { io.row.scale };
        let partial = io.scratch.offset(aligned(SCALE_BYTES));
        let mut buffers = CastBuffers {
            x: io.x,
            out: io.row.data,
            out_t: io.col.data,
            scale: io.scale,
            scale_inv,
            amax: io.amax,
            noop: io.noop,
            dbias: io.dbias,
            counters: io.counters.offset(AMAX_COUNTERS),
            partial,
        };
        match &self.steps {
            Steps::Delayed(cast) => cast.run(target, &buffers),
            Steps::Current(amax, cast) => {
                let scale = io.scratch;
                let none = DevPtr::null();
                amax.run(
                    target,
                    &AmaxBuffers { x: io.x, workspace: io.counters, amax: none, scale, scale_inv, noop: io.noop },
                )?;
                buffers.scale = scale;
                buffers.scale_inv = none;
                buffers.amax = none;
                cast.run(target, &buffers)
            }
            Steps::Block(block, sums) => {
                let (out, out_t) = (io.row.data, io.col.data);
                let (scale_inv, scale_inv_t) = (io.row.scale, io.col.scale);
                let noop = io.noop;
                block.run(target, &CastBlockBuffers { x: io.x, out, out_t, scale_inv, scale_inv_t, noop, unpack })?;
                sums.as_ref().map_or(Ok(()), |sums| sums.run(target, &CastBuffers { scale: DevPtr::null(), ..buffers }))
            }
        }
    }
}

fn block_plan(spec: &QuantSpec) -> Result<CastBlockPlan> {
    let block = match spec.quantization.block {
        Block::Row => BlockShape::OneDimensional,
        Block::Square => BlockShape::TwoDimensional,
        Block::Tensor => return Err(Error::value(OP, "block scaling needs 1x128 or 128x128 blocks")),
    };
    CastBlockPlan::new(CastBlockSpec {
        rows: spec.rows,
        cols: spec.cols,
        input: spec.input,
        output: spec.output,
        block,
        rowwise: spec.usage.rowwise,
        columnwise: spec.usage.columnwise,
        eps: spec.quantization.amax_epsilon,
        pow2: spec.quantization.power_2_scale,
        byte_scales_t: false,
    })
}

/// Block casts have no fused column sums; a pass of its own makes them.
fn column_sums(spec: &QuantSpec) -> Result<CastPlan> {
    let QuantSpec { rows, cols, input, processors, .. } = *spec;
    CastPlan::new(CastSpec { reverse: true, ..CastSpec::column_sums(rows, cols, input, processors) })
}
