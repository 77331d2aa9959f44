//! A chain of ops as it was built: each op, its number of tensors, and the width of its output.

use te_fast_kernels::Float;

use crate::base::dtype::{DType, Device};
use crate::base::error::{Error, Result};
use crate::ops::activation::Activation;
use crate::ops::norm_spec::NormKind;
use crate::ops::permute_map::Routing;
use crate::ops::router::RouterSpec;
use crate::program::edge::{QuantizedKind, Rows};
use crate::recipe::usage::Usage;

pub(crate) const OP: &str = "ops";

/// The experts of a linear op: a stack of weights, and adjacent rows that an extra input counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Number of experts.
    pub count: usize,
    /// Slots of delayed scaling from one expert to the next, forward and backward.
    pub slots: [usize; 2],
}

/// A router of tokens: the scores of `x · Wᵀ`, the experts of each token and their probabilities, all in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Columns of the tokens.
    pub cols: usize,
    /// How it chooses, for any number of tokens, with f32 logits.
    pub choice: RouterSpec,
    /// Two extra inputs: a bias of each expert that affects only the choice, and memory for the number of each expert's
    /// tokens, i64, which forward writes.
    pub biased: bool,
    /// The logits are an extra output, whose gradient goes back into them.
    pub logits: bool,
}

/// One op of a chain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// `x · Wᵀ`; one parameter `[outputs, inputs]`. With experts: a stack of weights, and an extra input that counts
    /// the rows of each expert on the device.
    Linear {
        /// Columns of the input.
        inputs: usize,
        /// Columns of the output.
        outputs: usize,
        /// The experts; none for a weight that all rows share.
        groups: Option<Groups>,
    },
    /// `x + b`; one parameter `[size]`. With experts, right behind their linear op: a stack of biases.
    Bias {
        /// Columns.
        size: usize,
        /// How many experts; none for a bias that all rows share.
        groups: Option<usize>,
    },
    /// Normalisation of each row; one parameter `[cols]`, two with a bias.
    Norm {
        /// Which.
        kind: NormKind,
        /// Columns.
        cols: usize,
        /// Added to the variance.
        eps: f32,
        /// The weight is `1 + gamma`.
        zero_centered_gamma: bool,
    },
    /// An activation function; gated ones halve the columns.
    Activation {
        /// The function, with its constants.
        function: Activation,
        /// Columns of one half that alternate with those of the other; 0 for one half after the other.
        interleave: usize,
        /// An extra input scales each row of the output.
        scaled: bool,
        /// Backward reads the input from FP8.
        cache_quantized_input: bool,
        /// The linear op behind does not keep the result: its backward computes it again.
        recompute: bool,
    },
    /// `x + extra`; one extra input.
    AddExtraInput {
        /// The result goes into the extra input's memory.
        in_place: bool,
    },
    /// Also returns `x`; one extra output.
    MakeExtraOutput {
        /// Gradients are added in the memory of the extra output's gradient.
        in_place: bool,
    },
    /// `x`, which an [`Op::AddResidual`] adds later.
    Residual,
    /// `x` plus the value of the [`Op::Residual`] at this index.
    AddResidual {
        /// The index.
        begin: usize,
    },
    /// `scale · x`.
    ConstantScale {
        /// The factor.
        scale: f32,
    },
    /// `x`.
    Identity,
    /// `x`, and the mask and the probabilities for the [`Op::Permute`] right behind; one parameter `[experts, cols]`.
    Router(Router),
    /// The rows of tokens, one copy for every expert of a token, ordered by expert. Two extra inputs, if no
    /// [`Op::Router`] is before it: a mask `[rows, experts]` and probabilities of the same shape. Ops between it and
    /// [`Op::Unpermute`] take counts of experts' rows and factors of rows from it, instead of from extra inputs.
    Permute {
        /// Number of experts.
        experts: usize,
        /// The most experts of a token.
        topk: usize,
        /// The mask and the probabilities are a router's.
        routed: bool,
    },
    /// The sum of the rows of each token.
    Unpermute,
}

impl Op {
    /// Parameters of the op.
    #[must_use]
    pub const fn params(&self) -> usize {
        match self {
            Self::Linear { .. } | Self::Bias { .. } | Self::Norm { kind: NormKind::RmsNorm, .. } | Self::Router(_) => 1,
            Self::Norm { kind: NormKind::LayerNorm, .. } => 2,
            _ => 0,
        }
    }

    /// Whether the op is elementwise, so that it also takes a tensor without dimensions.
    #[must_use]
    pub const fn is_elementwise(&self) -> bool {
        match self {
            Self::Linear { .. }
            | Self::Bias { .. }
            | Self::Norm { .. }
            | Self::Router(_)
            | Self::Permute { .. }
            | Self::Unpermute => false,
            Self::Activation { function, scaled, .. } => !(function.is_gated() || *scaled),
            _ => true,
        }
    }

    /// Whether the op computes in the type of `torch.autocast`, for inputs of any type.
    #[must_use]
    pub const fn follows_autocast(&self) -> bool {
        matches!(self, Self::Linear { .. } | Self::Norm { .. } | Self::Activation { .. })
    }

    /// Extra inputs of the op, if it is not behind an [`Op::Permute`].
    const fn extra_inputs(&self) -> usize {
        match self {
            Self::AddExtraInput { .. }
            | Self::Activation { scaled: true, .. }
            | Self::Linear { groups: Some(_), .. } => 1,
            Self::Router(Router { biased: true, .. }) | Self::Permute { routed: false, .. } => 2,
            _ => 0,
        }
    }

    /// Extra outputs of the op.
    #[must_use]
    pub const fn extra_outputs(&self) -> usize {
        matches!(self, Self::MakeExtraOutput { .. } | Self::Router(Router { logits: true, .. })) as usize
    }

    /// Columns and type of its extra output, for an input of `cols` columns of type `activation`.
    #[must_use]
    pub const fn extra_output_of(&self, cols: usize, activation: Float) -> Option<(usize, Float)> {
        match self {
            Self::MakeExtraOutput { .. } => Some((cols, activation)),
            Self::Router(Router { choice, logits: true, .. }) => Some((choice.experts, Float::F32)),
            _ => None,
        }
    }
}

/// An op with its name in messages and the indices of its tensors in the chain.
#[derive(Clone, Debug)]
pub struct Link {
    /// The op.
    pub op: Op,
    /// Position and type, for messages.
    pub label: String,
    /// Its first parameter.
    pub param: usize,
    /// Its extra input, or the next one's.
    pub extra_input: usize,
    /// Its extra output, or the next one's.
    pub extra_output: usize,
    /// Its number among the linear ops, or the next one's.
    pub linear: usize,
    /// The [`Op::Permute`] whose rows the op works on.
    pub permuted_by: Option<usize>,
}

impl Link {
    /// Extra inputs of the op.
    #[must_use]
    pub const fn extra_inputs(&self) -> usize {
        match (self.permuted_by, &self.op) {
            (Some(_), Op::Linear { .. } | Op::Activation { .. }) => 0,
            (_, op) => op.extra_inputs(),
        }
    }

    /// The extra input of a router with biases that receives the number of each expert's tokens.
    pub(crate) const fn counts_input(&self) -> usize {
        self.extra_input + 1
    }
}

/// Ops in order.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    links: Vec<Link>,
    params: usize,
    extra_inputs: usize,
    extra_outputs: usize,
    linear_params: Vec<usize>,
    written_extra_inputs: Vec<usize>,
    /// The [`Op::Permute`] whose rows the next op works on.
    permuted_by: Option<usize>,
}

impl Chain {
    /// Appends an op.
    pub fn push(&mut self, label: String, op: Op) {
        let link = Link {
            op,
            label,
            param: self.params,
            extra_input: self.extra_inputs,
            extra_output: self.extra_outputs,
            linear: self.linears(),
            permuted_by: self.permuted_by,
        };
        match op {
            Op::Permute { .. } => self.permuted_by = Some(self.links.len()),
            Op::Unpermute => self.permuted_by = None,
            _ => {}
        }
        match op {
            Op::Linear { .. } => self.linear_params.push(self.params),
            Op::AddExtraInput { in_place: true } => self.written_extra_inputs.push(self.extra_inputs),
            Op::Router(Router { biased: true, .. }) => self.written_extra_inputs.push(link.counts_input()),
            _ => {}
        }
        self.params += op.params();
        self.extra_inputs += link.extra_inputs();
        self.extra_outputs += op.extra_outputs();
        self.links.push(link);
    }

    /// Rows of edge `index`: the input of that op, or the output.
    pub(crate) fn rows_of(&self, index: usize) -> Rows {
        let by = self.links.get(index).map_or(self.permuted_by, |link| link.permuted_by);
        match by.map(|by| self.links[by].op) {
            Some(Op::Permute { topk, .. }) => Rows::Each(topk),
            _ => Rows::Input,
        }
    }

    /// The most rows that an edge has for each of the input's.
    pub(crate) fn rows_of_one(&self) -> usize {
        (0..=self.links.len()).map(|index| self.rows_of(index).count(1)).max().unwrap_or(1)
    }

    /// Whether all GEMMs take any number of rows.
    #[must_use]
    pub fn takes_any_rows(&self) -> bool {
        self.links.iter().any(|link| matches!(link.op, Op::Permute { .. }))
            && self.links.iter().all(|link| !matches!(link.op, Op::Linear { groups: None, .. }))
    }

    /// Refuses routers and permutations that do not fit the ops behind them.
    ///
    /// # Errors
    /// Names the op.
    pub(crate) fn check_permutations(&self) -> Result<()> {
        self.check_routers()?;
        let wrong = |link: &Link, message: &str| Err(Error::unsupported(OP, message.to_owned()).within(&link.label));
        for (index, link) in self.links.iter().enumerate() {
            let behind = || self.links.iter().filter(|other| other.permuted_by == Some(index));
            let scaled = |link: &&Link| matches!(link.op, Op::Activation { scaled: true, .. });
            match link.op {
                Op::Permute { .. } if link.permuted_by.is_some() => {
                    return wrong(link, "rows of experts are not permuted again");
                }
                Op::Permute { .. } if !behind().any(|other| other.op == Op::Unpermute) => {
                    return wrong(link, "a permutation without its way back");
                }
                Op::Permute { .. } if behind().filter(scaled).count() != 1 => {
                    return wrong(
                        link,
                        "the probabilities go to one activation between the permutation and its way back",
                    );
                }
                Op::Unpermute if link.permuted_by.is_none() => {
                    return wrong(link, "the way back of no permutation");
                }
                Op::AddExtraInput { .. } | Op::MakeExtraOutput { .. } if link.permuted_by.is_some() => {
                    return wrong(link, "tensors of the caller's among the rows of experts");
                }
                Op::Residual | Op::AddResidual { .. } if link.permuted_by.is_some() => {
                    return wrong(link, "a residual connection among the rows of experts");
                }
                Op::Linear { groups, .. } => {
                    let by = link.permuted_by.map(|by| self.links[by].op);
                    if let Some(Op::Permute { experts, .. }) = by
                        && groups.is_none_or(|groups| groups.count != experts)
                    {
                        return wrong(link, "as many experts as rows are permuted for");
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Refuses routers without their permutation.
    fn check_routers(&self) -> Result<()> {
        let of_router = |op: Op| match op {
            Op::Router(Router { choice, .. }) => Some((choice.experts, choice.topk)),
            _ => None,
        };
        let of_permutation = |op: Op| match op {
            Op::Permute { experts, topk, routed: true } => Some((experts, topk)),
            _ => None,
        };
        let ops = || self.links.iter().map(|link| Some(link.op));
        let pairs = std::iter::once(None).chain(ops()).zip(ops().chain(std::iter::once(None)));
        for (index, (before, behind)) in pairs.enumerate() {
            if before.and_then(of_router) != behind.and_then(of_permutation) {
                let is_router = before.and_then(of_router).is_some();
                let link = &self.links[index - usize::from(is_router)];
                let message = "a router goes right before the permutation of its experts";
                return Err(Error::unsupported(OP, message).within(&link.label));
            }
        }
        Ok(())
    }

    /// The ops.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Parameters of all ops.
    #[must_use]
    pub const fn params(&self) -> usize {
        self.params
    }

    /// Extra inputs of all ops.
    #[must_use]
    pub const fn extra_inputs(&self) -> usize {
        self.extra_inputs
    }

    /// Extra outputs of all ops.
    #[must_use]
    pub const fn extra_outputs(&self) -> usize {
        self.extra_outputs
    }

    /// The linear op that reads the bytes of an input in FP8: the first op of all. Another first op reads dequantised
    /// values.
    #[must_use]
    pub fn reads_fp8(&self) -> Option<&Link> {
        let first = self.links.iter().find(|link| link.op != Op::Identity);
        first.filter(|link| matches!(link.op, Op::Linear { groups: None, .. }))
    }

    /// The extra inputs whose memory forward writes to.
    #[must_use]
    pub fn written_extra_inputs(&self) -> &[usize] {
        &self.written_extra_inputs
    }

    /// The bias that the product of the linear op at `index` adds: a bias right behind the op, with experts if the op
    /// has experts.
    #[must_use]
    pub fn bias_behind(&self, index: usize) -> Option<usize> {
        let (Op::Linear { groups, .. }, Op::Bias { groups: biases, .. }) =
            (self.links.get(index)?.op, self.links.get(index + 1)?.op)
        else {
            return None;
        };
        (groups.map(|groups| groups.count) == biases).then_some(index + 1)
    }

    /// The activation before the linear op at `index` whose result backward computes again.
    #[must_use]
    pub fn recomputed_before(&self, index: usize) -> Option<usize> {
        let before = self.links[..index].iter().rposition(|link| link.op != Op::Identity)?;
        matches!(self.links[before].op, Op::Activation { recompute: true, .. }).then_some(before)
    }

    /// Columns of the first op's input, if they are fixed.
    #[must_use]
    pub fn input_cols(&self) -> Option<usize> {
        let keeps = |op: &Op| !matches!(op, Op::MakeExtraOutput { .. });
        match self.links.iter().find(|link| keeps(&link.op))?.op {
            Op::Linear { inputs, .. } => Some(inputs),
            Op::Bias { size, .. } => Some(size),
            Op::Norm { cols, .. } | Op::Router(Router { cols, .. }) => Some(cols),
            _ => None,
        }
    }

    /// Linear ops.
    #[must_use]
    pub fn linears(&self) -> usize {
        self.linear_params.len()
    }

    /// Whether the whole chain computes in the type of `torch.autocast`, so that its inputs may be cast to it at once:
    /// the first op computes in this type, and no later op adds a tensor that keeps its own type.
    #[must_use]
    pub fn follows_autocast(&self) -> bool {
        self.links.first().is_some_and(|first| first.op.follows_autocast()) && self.extra_inputs() == 0
    }

    /// The weight of each linear op among the parameters.
    #[must_use]
    pub fn linear_params(&self) -> &[usize] {
        &self.linear_params
    }

    /// Refuses parameters whose shapes do not fit the ops.
    ///
    /// # Errors
    /// Names the op.
    pub fn check_params<'a>(&self, shapes: impl Iterator<Item = &'a [i64]>) -> Result<()> {
        let owners = self.links.iter().flat_map(|link| std::iter::repeat_n(link, link.op.params()));
        for (link, shape) in owners.zip(shapes) {
            let fits = match link.op {
                Op::Linear { inputs, outputs, groups } => {
                    fits_stack(shape, groups.map(|groups| groups.count), &[outputs, inputs])
                }
                Op::Bias { size, groups } => fits_stack(shape, groups, &[size]),
                Op::Norm { cols, .. } => shape.iter().product::<i64>() == cols as i64,
                Op::Router(Router { cols, choice, .. }) => fits_stack(shape, None, &[choice.experts, cols]),
                _ => true,
            };
            if !fits {
                let expected = format!("of the sizes that op {} was made with", link.label);
                return Err(Error::shape(OP, "a parameter", expected, format!("{shape:?}")));
            }
        }
        Ok(())
    }

    /// Columns of the edges for an input of `cols` columns: edge `i` is the input of op `i`, and the last edge is the
    /// output.
    ///
    /// # Errors
    /// An op that takes another number of columns; a residual connection that does not begin and end once.
    pub fn widths(&self, cols: usize) -> Result<Vec<usize>> {
        let mut width = cols;
        let mut begun = Vec::new();
        let mut widths = Vec::with_capacity(self.links.len() + 1);
        widths.push(width);
        for (index, link) in self.links.iter().enumerate() {
            width = link.width(width)?;
            widths.push(width);
            match link.op {
                Op::Residual => begun.push(index),
                Op::AddResidual { begin } => {
                    let Some(place) = begun.iter().position(|&other| other == begin) else {
                        let message = "a residual connection that does not begin before, or has ended";
                        return Err(Error::unsupported(OP, message).within(&link.label));
                    };
                    begun.swap_remove(place);
                    if widths[begin] != width {
                        let expected = format!("{} columns, as where the residual connection begins", widths[begin]);
                        return Err(Error::shape(OP, "the sum", expected, format!("{width}")).within(&link.label));
                    }
                }
                _ => {}
            }
        }
        match begun.first() {
            Some(&index) => {
                let message = "a residual connection without an end";
                Err(Error::unsupported(OP, message).within(&self.links[index].label))
            }
            None => Ok(widths),
        }
    }
}

impl Link {
    /// Refuses extra input `number` of the op if it does not fit an edge of `rows` by `cols`.
    ///
    /// # Errors
    /// Names the op.
    pub fn check_extra(
        &self,
        number: usize,
        shape: &[i64],
        (rows, cols): (usize, usize),
        got: DType,
        wanted: DType,
    ) -> Result<()> {
        let count = shape.iter().product::<i64>();
        let fits = match self.op {
            Op::Permute { experts, .. } => {
                self.check_routing(number, got)?;
                shape.len() == 2 && shape[0] == rows as i64 && shape[1] == experts as i64
            }
            Op::AddExtraInput { .. } => {
                if got != wanted {
                    let expected = format!("{wanted}, the type of the input of op {}", self.label);
                    return Err(Error::dtype(OP, "an extra input", expected, got));
                }
                count == (rows * cols) as i64 && shape.last().is_none_or(|&last| last == cols as i64)
            }
            Op::Linear { groups: Some(groups), .. } => {
                if got != DType::I64 {
                    let expected = format!("{}, as op {} counts the rows of its experts", DType::I64, self.label);
                    return Err(Error::dtype(OP, "m_splits", expected, got));
                }
                count == groups.count as i64 && shape.last() == Some(&count)
            }
            Op::Router(Router { choice, .. }) => {
                self.check_routing(number, got)?;
                count == choice.experts as i64
            }
            _ => {
                if got.as_float().is_none() {
                    let expected = format!("float32, float16 or bfloat16, as op {} takes it", self.label);
                    return Err(Error::dtype(OP, "an extra input", expected, got));
                }
                count == rows as i64
            }
        };
        if fits {
            return Ok(());
        }
        let expected = match self.op {
            Op::AddExtraInput { .. } => format!("{rows} rows of {cols}, as the input of op {}", self.label),
            Op::Permute { experts, .. } => format!("{rows} rows of {experts}, the experts of op {}", self.label),
            Op::Router(Router { choice, .. }) => {
                format!("one value for each of the {} experts of op {}", choice.experts, self.label)
            }
            Op::Linear { groups: Some(groups), .. } => {
                format!("{} counts, the rows of each expert of op {}", groups.count, self.label)
            }
            _ => format!("one value for each of the {rows} rows of op {}", self.label),
        };
        Err(Error::shape(OP, "an extra input", expected, format!("a tensor of shape {shape:?}")))
    }

    /// Refuses a type of extra input `number` of a router or a permutation.
    fn check_routing(&self, number: usize, got: DType) -> Result<()> {
        const FLOATS: &str = "float32, float16 or bfloat16";
        let (fits, what, expected) = match (self.op, number) {
            (Op::Router(_), 0) => (got.as_float().is_some(), "the bias of the experts", FLOATS),
            (Op::Router(_), _) => (got == DType::I64, "the counts of the experts' tokens", "int64"),
            (_, 0) => (Routing::of_mask(got).is_some(), "the routing map", "bool or integers of 8, 32 or 64 bits"),
            _ => (got.as_float().is_some(), "the probabilities", FLOATS),
        };
        if fits {
            return Ok(());
        }
        Err(Error::dtype(OP, what, format!("{expected}, as op {} takes it", self.label), got))
    }

    fn width(&self, cols: usize) -> Result<usize> {
        let wrong = |expected: usize| {
            let expected = format!("{expected} as op {} takes it", self.label);
            Err(Error::shape(OP, "the last dimension of the input", expected, cols))
        };
        match self.op {
            Op::Linear { inputs, outputs, .. } if inputs == cols => Ok(outputs),
            Op::Linear { inputs, .. } => wrong(inputs),
            Op::Bias { size, .. } if size != cols => wrong(size),
            Op::Norm { cols: expected, .. } | Op::Router(Router { cols: expected, .. }) if expected != cols => {
                wrong(expected)
            }
            Op::Activation { function, interleave, .. } if function.is_gated() => {
                let granule = if interleave == 0 { 2 } else { 2 * interleave };
                if cols.is_multiple_of(granule) {
                    Ok(cols / 2)
                } else {
                    let expected = format!("a multiple of {granule} for the gated op {}", self.label);
                    Err(Error::shape(OP, "the last dimension of the input", expected, cols))
                }
            }
            _ => Ok(cols),
        }
    }
}

/// The key of a program: the properties that it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramKey {
    /// Epoch of the autocast region; none outside of one.
    pub epoch: Option<u64>,
    /// Columns of the input.
    pub cols: usize,
    /// Type of every edge.
    pub activation: Float,
    /// Device of everything.
    pub device: Device,
    /// Whether row counts that are not multiples of 8 are accepted.
    pub any_rows: bool,
    /// Whether the gradient of the input is needed.
    pub input_grad: bool,
    /// Type of each parameter, and whether its gradient is needed.
    pub params: Vec<(Float, bool)>,
    /// Type of each extra input, and whether its gradient is needed.
    pub extras: Vec<(DType, bool)>,
    /// How each linear op is called.
    pub linears: Vec<LinearCall>,
    /// Quantised inputs and results.
    pub outer: OuterKinds,
}

/// The quantised inputs and results of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OuterKinds {
    /// The input is quantised already.
    pub input: Option<QuantizedKind>,
    /// Layouts of a quantised output.
    pub output: Option<Usage>,
    /// The gradient of the output is quantised already.
    pub grad_output: Option<QuantizedKind>,
    /// The gradient of the input must be quantised.
    pub grad_input: bool,
}

/// Options of a call for one linear op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearCall {
    /// The weight gradient is delayed until `backward_dw`.
    pub deferred: bool,
    /// Backward reads the input in high precision and quantises it again; delayed scaling refuses it.
    pub save_original_input: bool,
}

impl ProgramKey {
    /// Whether any gradient is needed.
    #[must_use]
    pub fn any_grad(&self) -> bool {
        self.input_grad || self.params.iter().any(|&(_, grad)| grad) || self.extras.iter().any(|&(_, grad)| grad)
    }
}

/// Whether a parameter has this shape; with experts, a stack of such, whose first two dimensions may be merged.
fn fits_stack(shape: &[i64], groups: Option<usize>, one: &[usize]) -> bool {
    let is = |shape: &[i64], first: usize, rest: &[usize]| {
        shape.len() == rest.len() + 1
            && shape[0] == first as i64
            && shape[1..].iter().zip(rest).all(|(&size, &wanted)| size == wanted as i64)
    };
    match groups {
        None => is(shape, one[0], &one[1..]),
        Some(count) => is(shape, count * one[0], &one[1..]) || is(shape, count, one),
    }
}
