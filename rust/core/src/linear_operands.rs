//! The operands of an FP8 linear layer: how each is quantised, and where its layouts lie in a buffer.

use te_fast_kernels::{Float, Fp8};

use crate::dispatch::aligned;
use crate::error::Result;
use crate::kernel::DevPtr;
use crate::linear::LinearKey;
use crate::ops::cast_block::Unpack;
use crate::quantizer::{QuantPlan, QuantSpec, Quantized};
use crate::recipe::{Quantization, Recipe, Usage, Usages};

/// Byte offsets of one operand's quantised layouts in a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    pub(crate) row: usize,
    pub(crate) row_scale: usize,
    pub(crate) col: usize,
    pub(crate) col_scale: usize,
    /// Layouts that are there.
    pub usage: Usage,
    /// Bytes of the buffer up to the end of these.
    pub bytes: usize,
}

impl Segments {
    /// Lays the layouts of `plan` that `usage` names out behind `start`.
    pub(crate) fn behind(start: usize, plan: &QuantPlan, usage: Usage) -> Self {
        let mut bytes = start;
        let mut take = |count: usize| {
            let offset = bytes;
            bytes = aligned(offset + count);
            offset
        };
        let mut segments = Self { usage, ..Self::default() };
        if usage.rowwise {
            segments.row = take(plan.row_bytes());
            segments.row_scale = take(plan.row_scale_bytes());
        }
        if usage.columnwise {
            segments.col = take(plan.col_bytes());
            let shared = usage.rowwise && plan.shares_scale();
            segments.col_scale = if shared { segments.row_scale } else { take(plan.col_scale_bytes()) };
        }
        Self { bytes, ..segments }
    }

    /// Where the layouts lie, as numbers.
    pub(crate) const fn offsets(self) -> [usize; 4] {
        [self.row, self.row_scale, self.col, self.col_scale]
    }

    /// The row layout in `buffer`; null pointers when it is not there.
    #[must_use]
    pub fn row(self, buffer: DevPtr<'_>) -> Quantized<'_> {
        if self.usage.rowwise {
            Quantized { data: buffer.offset(self.row), scale: buffer.offset(self.row_scale) }
        } else {
            Quantized::NONE
        }
    }

    /// The column layout in `buffer`; null pointers when it is not there.
    #[must_use]
    pub fn col(self, buffer: DevPtr<'_>) -> Quantized<'_> {
        if self.usage.columnwise {
            Quantized { data: buffer.offset(self.col), scale: buffer.offset(self.col_scale) }
        } else {
            Quantized::NONE
        }
    }
}

/// Where backward has the f32 scales of an input whose scales were kept as bytes: behind the gradient's layouts, whose
/// cast unpacks them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnpackedScales {
    at: usize,
    count: usize,
}

impl UnpackedScales {
    /// Takes the room for those of `x` behind `dy`; none where they were kept as they are.
    pub(crate) fn behind(dy: &mut Segments, x: &QuantPlan) -> Option<Self> {
        let (at, count) = (dy.bytes, x.byte_scales());
        dy.bytes = aligned(at + 4 * count);
        (count != 0).then_some(Self { at, count })
    }

    /// What the gradient's cast is to unpack.
    #[inline]
    pub(crate) fn unpack<'a>(self, packed: DevPtr<'a>, buffer: DevPtr<'a>) -> Unpack<'a> {
        Unpack { packed, unpacked: self.of(buffer), count: self.count }
    }

    /// Bytes from the beginning of the buffer.
    pub(crate) const fn offset(self) -> usize {
        self.at
    }

    /// How many.
    pub(crate) const fn count(self) -> usize {
        self.count
    }

    /// The f32 scales.
    #[inline]
    pub(crate) fn of(self, buffer: DevPtr<'_>) -> DevPtr<'_> {
        buffer.offset(self.at)
    }
}

/// What the quantisations of a layer's operands are planned from.
pub(crate) struct OperandSpecs<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) key: &'a LinearKey,
    pub(crate) usages: Usages,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) processors: u32,
}

impl OperandSpecs<'_> {
    /// Layout of an input that is quantised again in backward.
    pub(crate) const AGAIN: Usage = Usage { rowwise: false, columnwise: true };

    pub(crate) fn x(&self) -> Result<QuantPlan> {
        self.plan(self.input(), self.usages.input(), false)?.with_byte_scales()
    }

    pub(crate) fn w(&self) -> Result<QuantPlan> {
        let Self { recipe, key, .. } = self;
        self.plan(
            (self.out_features, self.in_features, key.weight, recipe.fwd, recipe.weight),
            self.usages.weight(),
            false,
        )
    }

    /// The gradient of the output; none where nothing reads it.
    pub(crate) fn dy(&self) -> Result<Option<QuantPlan>> {
        let Self { recipe, key, .. } = self;
        let usage = self.usages.grad_output();
        let tensor = (key.rows, self.out_features, key.activation, recipe.bwd, recipe.grad);
        (!usage.is_empty()).then(|| self.plan(tensor, usage, key.bias_grad)).transpose()
    }

    /// The input once more, in backward.
    pub(crate) fn x_again(&self) -> Result<Option<QuantPlan>> {
        let needs = self.key.needs;
        let again = needs.save_original_input && needs.weight_grad;
        again.then(|| self.plan(self.input(), Self::AGAIN, false)).transpose()
    }

    fn input(&self) -> Tensor {
        let Self { recipe, key, .. } = self;
        (key.rows, self.in_features, key.activation, recipe.fwd, recipe.input)
    }

    fn plan(&self, (rows, cols, input, output, quantization): Tensor, usage: Usage, dbias: bool) -> Result<QuantPlan> {
        let (scaling, processors) = (self.recipe.scaling, self.processors);
        QuantPlan::new(&QuantSpec { scaling, quantization, rows, cols, input, output, usage, dbias, processors })
    }
}

/// Rows, columns, type, type to quantise to, and how.
type Tensor = (usize, usize, Float, Fp8, Quantization);
