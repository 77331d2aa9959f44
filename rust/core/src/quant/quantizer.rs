//! One operand's quantisation under a recipe: its casts, and the bytes that they write.

use te_fast_kernels::{Float, Fp8};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::launch::target::Target;
use crate::ops::amax::{AmaxPlan, AmaxPointers, ScaleRule};
use crate::ops::cast::{CastPlan, CastPointers, CastSpec};
use crate::ops::cast_block::{BlockShape, CastBlockPlan, CastBlockPointers, CastBlockSpec};
use crate::ops::cast_current::{CastCurrentPlan, CastCurrentPointers};
use crate::ops::cast_groups::{
    CastGroupsPlan, CastGroupsPointers, CastGroupsSpec, Division, Gather, GroupScales, GroupShape,
};
use crate::pointers;
use crate::recipe::definition::{Block, Quantization, Scaling};
use crate::recipe::usage::Usage;
use crate::runtime::lane::{COUNTER_BYTES, aligned};

const OP: &str = "quantize";
/// Bytes of a tensor's scale, padded so that the next buffer stays aligned.
const SCALE_BYTES: usize = 16;
/// Largest tensor that current scaling reads and casts by one launch: blocks keep a part of it, and L2 has some of the
/// rest. At this size two launches are as fast on an H100.
const AT_ONCE_BYTES: usize = 64 << 20;
/// Current scaling alone uses the first counters.
const AMAX_COUNTERS: usize = 256;

/// The groups that an operand's rows belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantGroups {
    /// Number of groups.
    pub count: usize,
    /// How rows belong to them; the rows of a spec are those of [`GroupShape`].
    pub division: Division,
    /// Slots of delayed scaling from one group to the next.
    pub slots: usize,
    /// How rows are gathered; none for rows in the order of the groups.
    pub gather: Option<Gather>,
}

/// The description of an operand's quantisation.
#[derive(Clone, Copy, Debug)]
pub struct QuantSpec {
    /// The kind of scaling.
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
    /// Also sum the columns; not with groups.
    pub dbias: bool,
    /// Groups with their own scales; none for one tensor.
    pub groups: Option<QuantGroups>,
    /// Multiprocessors of the device.
    pub processors: u32,
}

impl QuantSpec {
    /// The cast of the rows of groups. Checks the blocks: the kernels take only those of the groups' matrix products.
    ///
    /// # Errors
    /// A recipe that no kernel here runs.
    pub fn of_groups(&self, groups: QuantGroups) -> Result<CastGroupsSpec> {
        let Quantization { power_2_scale: pow2, amax_epsilon: eps, block } = self.quantization;
        let scales = match (self.scaling, groups.division, block) {
            (Scaling::Delayed, ..) => GroupScales::Given { stride: groups.slots },
            (Scaling::Current, ..) => GroupScales::Current(ScaleRule { output: self.output, eps, pow2 }),
            (Scaling::Block, Division::Counted, Block::Row) | (Scaling::Block, Division::Equal, Block::Square) => {
                GroupScales::Block { eps, pow2 }
            }
            (Scaling::Block, ..) => {
                let message = "experts take blocks of 1x128 of inputs and gradients and of 128x128 of weights; leave the recipe's block dimensions at their defaults";
                return Err(Error::unsupported(OP, message));
            }
            (other, ..) => {
                return Err(Error::unsupported(OP, format!("{other:?} scaling does not run on this device")));
            }
        };
        let QuantSpec { rows, cols, input, output, usage, processors, .. } = *self;
        let shape = GroupShape { groups: groups.count, division: groups.division, rows, cols };
        let (rowwise, columnwise) = (usage.rowwise, usage.columnwise);
        let gather = groups.gather;
        Ok(CastGroupsSpec { shape, input, output, scales, rowwise, columnwise, gather, processors })
    }
}

pointers! {
    /// Pointers of one quantisation.
    pub struct QuantPointers {
        /// High-precision input, contiguous.
        x,
        /// Row layout.
        row,
        /// Its inverse scales.
        row_scale,
        /// Column layout.
        col,
        /// Its inverse scales; per-tensor scaling writes the one scale to `row_scale`, or here when there are no rows.
        col_scale,
        /// Scale of delayed scaling.
        scale,
        /// Maximum to raise, of delayed scaling.
        amax,
        /// Device float, or null; 1 leaves every output as it is.
        noop,
        /// Column sums, or null.
        dbias,
        /// [`QuantPlan::scratch_bytes`] bytes.
        scratch,
        /// [`COUNTER_BYTES`] bytes, zero between launches.
        counters,
        /// Scales of another operand as bytes, for [`QuantPlan::unpacking`], or null.
        packed,
        /// The destination of their f32.
        unpacked,
        /// int64 counts of the rows of groups, or null.
        splits,
        /// Numbers of the gathered rows, or null.
        numbers,
    }
}

#[derive(Clone, Copy, Debug)]
enum Steps {
    Delayed(CastPlan),
    /// One launch for all; the cast describes what it writes.
    Current(CastCurrentPlan, CastPlan),
    /// The scale, then the cast: with column sums, or of large tensors.
    CurrentApart(AmaxPlan, CastPlan),
    Block(CastBlockPlan, Option<CastPlan>),
    Groups(CastGroupsPlan),
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
        if let Some(groups) = spec.groups {
            return Ok(Self::measure(Steps::Groups(CastGroupsPlan::new(spec.of_groups(groups)?)?)));
        }
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
                let at_once = CastCurrentPlan::new(spec.rows, spec.cols, spec.input, rule);
                let fits = spec.rows * spec.cols * spec.input.size() <= AT_ONCE_BYTES;
                if let Some(at_once) = at_once.ok().filter(|_| fits && !spec.dbias) {
                    Steps::Current(at_once, cast(false)?)
                } else {
                    let amax = AmaxPlan::new(spec.rows * spec.cols, spec.input, rule, spec.processors)?;
                    Steps::CurrentApart(amax, cast(true)?)
                }
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

    /// The same with the column layout's scales as bytes if they are powers of two of 1×128 blocks, which saves three
    /// quarters of their memory in saved layouts. [`QuantPlan::unpacking`] of another operand converts them back to
    /// f32.
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

    /// Number of the column layout's scales that are bytes; 0 if they are f32.
    #[must_use]
    pub const fn byte_scales(&self) -> usize {
        match &self.steps {
            Steps::Block(block, _) if block.spec().byte_scales_t => self.col_scale_bytes,
            _ => 0,
        }
    }

    fn measure(steps: Steps) -> Self {
        let (row_bytes, row_scale_bytes, col_bytes, col_scale_bytes) = match &steps {
            Steps::Delayed(cast) | Steps::Current(_, cast) | Steps::CurrentApart(_, cast) => {
                (cast.out_bytes(), SCALE_BYTES, cast.out_t_bytes(), SCALE_BYTES)
            }
            Steps::Block(block, _) => {
                (block.out_bytes(), block.scale_bytes(), block.out_t_bytes(), block.scale_t_bytes())
            }
            Steps::Groups(groups) => {
                (groups.out_bytes(), groups.scale_bytes(), groups.out_t_bytes(), groups.scale_t_bytes())
            }
        };
        let partial = match &steps {
            Steps::Delayed(cast) | Steps::Current(_, cast) | Steps::CurrentApart(_, cast) => cast.partial_bytes(),
            Steps::Block(_, sums) => sums.as_ref().map_or(0, CastPlan::partial_bytes),
            Steps::Groups(groups) => groups.partial_bytes(),
        };
        let scratch_bytes = aligned(SCALE_BYTES) + aligned(partial);
        Self { steps, row_bytes, row_scale_bytes, col_bytes, col_scale_bytes, scratch_bytes }
    }

    fn counter_bytes(&self) -> usize {
        AMAX_COUNTERS
            + match &self.steps {
                Steps::Delayed(cast) | Steps::Current(_, cast) | Steps::CurrentApart(_, cast) => cast.counter_bytes(),
                Steps::Block(_, sums) => sums.as_ref().map_or(0, CastPlan::counter_bytes),
                Steps::Groups(_) => 0,
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

    /// Whether both layouts have the one scale of the tensor, or of each group.
    #[must_use]
    pub const fn shares_scale(&self) -> bool {
        match &self.steps {
            Steps::Delayed(_) | Steps::Current(..) | Steps::CurrentApart(..) => true,
            Steps::Block(..) => false,
            Steps::Groups(groups) => groups.shares_scale(),
        }
    }

    /// Private bytes of one run.
    #[must_use]
    pub const fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// The same, with a block cast that also unpacks `count` scales of another operand.
    #[must_use]
    pub fn unpacking(self, count: usize) -> Self {
        let steps = match self.steps {
            Steps::Block(block, sums) => Steps::Block(block.unpacking(count), sums),
            other => other,
        };
        Self { steps, ..self }
    }

    /// Launches it.
    ///
    /// # Errors
    /// A launch's refusal.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, io: &QuantPointers<DevPtr<'_>>) -> Result<()> {
        let scale_inv = if io.row.is_null() { io.col_scale } else { io.row_scale };
        let partial = io.scratch.offset(aligned(SCALE_BYTES));
        let mut cast_pointers = CastPointers {
            x: io.x,
            out: io.row,
            out_t: io.col,
            scale: io.scale,
            scale_inv,
            amax: io.amax,
            noop: io.noop,
            dbias: io.dbias,
            counters: io.counters.offset(AMAX_COUNTERS),
            partial,
        };
        match &self.steps {
            Steps::Delayed(cast) => cast.run(target, &cast_pointers),
            Steps::Current(at_once, cast) => at_once.run(target, &at_once_pointers(io, cast.spec(), scale_inv)),
            Steps::CurrentApart(amax, cast) => {
                let &QuantPointers { x, scratch: scale, counters: workspace, noop, .. } = io;
                amax.run(target, &AmaxPointers { x, workspace, scale, scale_inv, noop, ..AmaxPointers::default() })?;
                cast_pointers.scale = scale;
                cast_pointers.scale_inv = DevPtr::null();
                cast_pointers.amax = DevPtr::null();
                cast.run(target, &cast_pointers)
            }
            Steps::Groups(groups) => {
                let scale_inv = if groups.shares_scale() { scale_inv } else { io.row_scale };
                groups.run(target, &of_groups(io, scale_inv, partial))
            }
            Steps::Block(block, sums) => {
                let block_pointers = CastBlockPointers {
                    x: io.x,
                    out: io.row,
                    out_t: io.col,
                    scale_inv: io.row_scale,
                    scale_inv_t: io.col_scale,
                    noop: io.noop,
                    packed: io.packed,
                    unpacked: io.unpacked,
                };
                block.run(target, &block_pointers)?;
                let sum_pointers = CastPointers { scale: DevPtr::null(), ..cast_pointers };
                sums.as_ref().map_or(Ok(()), |sums| sums.run(target, &sum_pointers))
            }
        }
    }
}

/// The buffers of current scaling by one launch.
fn at_once_pointers<'a>(
    io: &QuantPointers<DevPtr<'a>>,
    layouts: &CastSpec,
    scale_inv: DevPtr<'a>,
) -> CastCurrentPointers<'a> {
    let &QuantPointers { x, noop, counters: workspace, .. } = io;
    let (out, out_t) = (io.row.when(layouts.rowwise), io.col.when(layouts.columnwise));
    CastCurrentPointers { x, out, out_t, scale_inv, noop, workspace }
}

/// The buffers of a quantisation of groups.
const fn of_groups<'a>(
    io: &QuantPointers<DevPtr<'a>>,
    scale_inv: DevPtr<'a>,
    partial: DevPtr<'a>,
) -> CastGroupsPointers<DevPtr<'a>> {
    let &QuantPointers { x, row: out, col: out_t, scale, col_scale: scale_inv_t, amax, noop, splits, numbers, .. } = io;
    let token_max = DevPtr::null();
    CastGroupsPointers { x, out, out_t, scale, scale_inv, scale_inv_t, amax, noop, splits, partial, token_max, numbers }
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

/// Block casts have no fused column sums; a separate pass makes them.
fn column_sums(spec: &QuantSpec) -> Result<CastPlan> {
    let QuantSpec { rows, cols, input, processors, .. } = *spec;
    CastPlan::new(CastSpec { reverse: true, ..CastSpec::column_sums(rows, cols, input, processors) })
}
