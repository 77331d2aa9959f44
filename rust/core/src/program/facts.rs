//! The common input of the compilation of both directions.

use te_fast_kernels::constants::tile::TRANSPOSED_ALIGN;
use te_fast_kernels::{Float, Fp8};

use crate::base::dtype::{DType, Device};
use crate::base::error::{Error, Result};
use crate::ops::cast_groups::Gather;
use crate::program::buffer::At;
use crate::program::cast::Cast;
use crate::program::chain::{Chain, Link, Op, ProgramKey, Router};
use crate::program::edge::{Edge, Kind, QuantizedKind, Rows};
use crate::program::linear_op::LinearOp;
use crate::program::port::{Beside, Outer, Port, PortCounts, PortNumbers};
use crate::quant::quantizer::QuantSpec;
use crate::recipe::definition::{Block, Quantization, Recipe};
use crate::recipe::usage::Usage;
use crate::runtime::dispatcher::Dispatcher;
use crate::runtime::lane::Limits;

/// A chain, a key, and facts that follow from both.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) chain: Chain,
    pub(crate) key: ProgramKey,
    /// None in high precision.
    pub(crate) recipe: Option<Recipe>,
    /// The input of each op, and the output.
    pub(crate) edges: Vec<Edge>,
    pub(crate) linears: Vec<LinearOp>,
    /// For each op, and after the last one, whether an earlier tensor needs a gradient.
    pub(crate) grads_before: Vec<bool>,
    pub(crate) limits: Limits,
    /// Whether the device has the kernels that are made for Hopper alone; the host has them all.
    pub(crate) is_hopper: bool,
    pub(crate) ports: PortNumbers,
}

impl Facts {
    pub(crate) fn new(
        dispatcher: &mut Dispatcher,
        chain: &Chain,
        key: ProgramKey,
        recipe: Option<&Recipe>,
    ) -> Result<Self> {
        let kind = Kind::High(key.activation);
        chain.check_permutations()?;
        let widths = chain.widths(key.cols)?.into_iter().enumerate();
        let edges: Vec<Edge> = widths.map(|(index, cols)| Edge { rows: chain.rows_of(index), cols, kind }).collect();
        let grads_before = grads_before(chain, &key);
        let limits = dispatcher.limits(key.device)?;
        let is_hopper = match key.device {
            Device::Cpu => true,
            Device::Cuda(ordinal) => dispatcher.facts(ordinal)?.is_hopper(),
        };
        let mut linears: Vec<LinearOp> = linear_indices(chain)
            .map(|index| {
                let op = LinearOp::new(chain, index, &key, recipe, (grads_before[index], limits.multiprocessors));
                op.map_err(|error| error.within(&chain.links()[index].label))
            })
            .collect::<Result<_>>()?;
        if let (Some(given), Some(link)) = (&key.outer.input, chain.reads_fp8())
            && let Some(linear) = linears.get_mut(link.linear)
        {
            linear.take(*given).map_err(|error| error.within(&link.label))?;
        }
        let ports = PortNumbers::new(PortCounts {
            extras: chain.extra_inputs(),
            extra_outputs: chain.extra_outputs(),
            params: chain.params(),
            linears: chain.linears(),
        });
        let (chain, recipe) = (chain.clone(), recipe.copied());
        Ok(Self { chain, key, recipe, edges, linears, grads_before, limits, is_hopper, ports })
    }

    pub(crate) fn label(&self, index: usize) -> &str {
        self.chain.links().get(index).map_or("", |link| &link.label)
    }

    /// An error of the op at `index`.
    pub(crate) fn within(&self, index: usize, error: Error) -> Error {
        error.within(self.label(index))
    }

    /// Elements and type of a call's tensor that backward reads, for `rows` rows.
    pub(crate) fn extent_of(&self, port: Port, rows: usize) -> (usize, DType) {
        let key = &self.key;
        let activation = key.activation.into();
        let ops = || self.chain.links().iter().zip(&self.edges);
        match port {
            Port::Input => (rows * key.cols, if key.outer.input.is_some() { DType::U8 } else { activation }),
            Port::Beside(Outer::Input, part) => {
                let (of_rows, of_cols) =
                    key.outer.input.map_or((0, 0), |kind| (kind.scales(rows, key.cols), kind.scales(key.cols, rows)));
                match part {
                    Beside::RowScale => (of_rows, DType::F32),
                    Beside::Col => (rows.next_multiple_of(TRANSPOSED_ALIGN) * key.cols, DType::U8),
                    Beside::ColScale => (of_cols, DType::F32),
                }
            }
            Port::Extra(index) => {
                let takes = |link: &Link| {
                    (link.extra_input..link.extra_input + link.extra_inputs()).contains(&usize::from(index))
                };
                let elements = ops().find(|(link, _)| takes(link)).map_or(0, |(link, edge)| match link.op {
                    Op::AddExtraInput { .. } => rows * edge.cols,
                    Op::Linear { groups: Some(groups), .. } => groups.count,
                    Op::Permute { experts, .. } => rows * experts,
                    Op::Router(Router { choice, .. }) => choice.experts,
                    _ => rows,
                });
                (elements, key.extras[usize::from(index)].0)
            }
            Port::ExtraOutput(index) => {
                let made = ops()
                    .filter(|(link, _)| link.extra_output == usize::from(index))
                    .find_map(|(link, edge)| link.op.extra_output_of(edge.cols, key.activation));
                made.map_or((0, activation), |(cols, dtype)| (rows * cols, dtype.into()))
            }
            Port::Param(index) => {
                let owns = |link: &&Link| (link.param..link.param + link.op.params()).contains(&usize::from(index));
                let elements = self.chain.links().iter().find(owns).map_or(0, |link| match link.op {
                    Op::Linear { inputs, outputs, groups } => {
                        inputs * outputs * groups.map_or(1, |groups| groups.count)
                    }
                    Op::Bias { size, groups } => size * groups.unwrap_or(1),
                    Op::Norm { cols, .. } => cols,
                    Op::Router(Router { cols, choice, .. }) => cols * choice.experts,
                    _ => 0,
                });
                (elements, key.params[usize::from(index)].0.into())
            }
            _ => (0, activation),
        }
    }

    /// Type of the factors of an activation's rows, and whether their gradient is needed. The factors are an extra
    /// input, or the probabilities that the rows were permuted with.
    fn factors_of(&self, link: &Link) -> (DType, bool) {
        match link.permuted_by {
            None => self.key.extras[link.extra_input],
            Some(by) => self.probs_of(by),
        }
    }

    /// Type of the probabilities of the permutation at `by`, and whether their gradient is needed. A router's are f32.
    pub(crate) fn probs_of(&self, by: usize) -> (DType, bool) {
        let link = &self.chain.links()[by];
        match link.op {
            Op::Permute { routed: true, .. } => (DType::F32, self.grads_before[by]),
            _ => self.key.extras[link.extra_input + 1],
        }
    }

    /// Whether the gradient of these factors is needed.
    pub(crate) fn wants_factors(&self, link: &Link) -> bool {
        self.factors_of(link).1
    }

    /// How the linear op at `index` gathers the rows of tokens; with `all`, also rows with probability 0.
    pub(crate) fn gather(&self, index: usize, all: bool) -> Gather {
        Gather { each: self.chain.rows_of(index).count(1), all }
    }

    /// Type of these factors.
    pub(crate) fn factor_type(&self, link: &Link) -> Option<Float> {
        self.factors_of(link).0.as_float()
    }

    /// The extra input with the counts of the rows of experts that the op at `index` takes: a linear op, or the bias behind
    /// one.
    pub(crate) fn splits_of(&self, index: usize) -> At {
        let counts = |link: &Link| match link.op {
            Op::Linear { groups: Some(_), .. } => At::of(Port::Extra(link.extra_input as u16)),
            _ => At::NONE,
        };
        let links = self.chain.links();
        match links[index].op {
            Op::Bias { groups: Some(_), .. } if index != 0 => counts(&links[index - 1]),
            _ => counts(&links[index]),
        }
    }

    /// How the output is quantised, with the requested layouts.
    pub(crate) fn output_cast(&self) -> Option<Cast> {
        let (recipe, usage) = (self.recipe.as_ref()?, self.key.outer.output?);
        let cols = self.edges.last()?.cols;
        Some(self.outer_cast(recipe, (recipe.input, recipe.fwd), cols, usage))
    }

    /// The format of a quantised output.
    pub(crate) fn output_kind(&self) -> Option<QuantizedKind> {
        let (recipe, usage) = (self.recipe.as_ref()?, self.key.outer.output?);
        Some(QuantizedKind { dtype: recipe.fwd, block: recipe.input.block, usage })
    }

    /// The same for the gradient of the input.
    pub(crate) fn grad_input_kind(&self) -> Option<QuantizedKind> {
        let usage = self.grad_input_cast()?.usage();
        let recipe = self.recipe.as_ref()?;
        Some(QuantizedKind { dtype: recipe.bwd, block: recipe.grad.block, usage })
    }

    /// How the gradient of the input is quantised. Under delayed scaling it has only the row layout, which may come out
    /// of a GEMM. Blocks of 1x128 need the original values for their column layout.
    pub(crate) fn grad_input_cast(&self) -> Option<Cast> {
        let recipe = self.recipe.as_ref().filter(|_| self.key.outer.grad_input && self.key.input_grad)?;
        let usage = Usage { rowwise: true, columnwise: !recipe.is_delayed() };
        Some(self.outer_cast(recipe, (recipe.grad, recipe.bwd), self.key.cols, usage))
    }

    fn outer_cast(&self, recipe: &Recipe, to: (Quantization, Fp8), cols: usize, usage: Usage) -> Cast {
        let ((quantization, output), scaling, input) = (to, recipe.scaling, self.key.activation);
        let (dbias, processors) = (false, self.limits.multiprocessors);
        let (rows, groups) = (0, None);
        let spec = QuantSpec { scaling, quantization, rows, cols, input, output, usage, dbias, groups, processors };
        Cast::new(Rows::Input, spec)
    }

    /// Index of the linear op, maybe with a bias behind it, whose result is the chain's, if its GEMMs read a gradient
    /// in FP8.
    pub(crate) fn takes_grad(&self, kind: QuantizedKind) -> Option<usize> {
        let links = self.chain.links();
        let recipe = self.recipe.as_ref()?;
        let mut behind = links.iter().enumerate().rev().filter(|(_, link)| link.op != Op::Identity);
        let (mut index, mut link) = behind.next()?;
        if let Op::Bias { .. } = link.op {
            // The linear op's plans include a bias right behind it.
            (index, link) = (index.checked_sub(1)?, links.get(index.checked_sub(1)?)?);
        }
        let Op::Linear { groups: None, .. } = link.op else { return None };
        let op = &self.linears[link.linear];
        let dy = op.dy()?;
        // Blocks of 1x128 need the original values for their column layout, and delayed gradients keep their operands
        // in their own memory.
        let is_whole = kind.block != Block::Row || (kind.usage.columnwise && !op.deferred) || !dy.usage().columnwise;
        let fits = kind.usage.rowwise && kind.dtype == recipe.bwd && kind.block == recipe.grad.block && is_whole;
        fits.then_some(index)
    }

    /// The op of each linear op.
    pub(crate) fn linear_indices(&self) -> impl Iterator<Item = usize> + '_ {
        linear_indices(&self.chain)
    }
}

fn linear_indices(chain: &Chain) -> impl Iterator<Item = usize> + '_ {
    chain.links().iter().enumerate().filter(|(_, link)| matches!(link.op, Op::Linear { .. })).map(|(index, _)| index)
}

/// For each op, and after the last one, whether an earlier tensor needs a gradient.
fn grads_before(chain: &Chain, key: &ProgramKey) -> Vec<bool> {
    let mut wanted = key.input_grad;
    let mut list = vec![wanted];
    for link in chain.links() {
        let params = link.param..link.param + link.op.params();
        let extras = link.extra_input..link.extra_input + link.extra_inputs();
        wanted |= key.params[params].iter().any(|&(_, grad)| grad) || key.extras[extras].iter().any(|&(_, grad)| grad);
        list.push(wanted);
    }
    list
}
