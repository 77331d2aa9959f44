//! What both directions of a chain are compiled from.

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::program::buffer::At;
use crate::program::chain::{Chain, Link, Op, ProgramKey};
use crate::program::edge::{Edge, Kind, Rows};
use crate::program::linear_op::LinearOp;
use crate::program::port::{Port, PortCounts, PortNumbers};
use crate::recipe::definition::Recipe;
use crate::runtime::dispatcher::Dispatcher;
use crate::runtime::lane::Limits;

/// A chain, a key, and what follows from the two.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) chain: Chain,
    pub(crate) key: ProgramKey,
    /// None in high precision.
    pub(crate) recipe: Option<Recipe>,
    /// The input of each op, and the output.
    pub(crate) edges: Vec<Edge>,
    pub(crate) linears: Vec<LinearOp>,
    /// For each op, and behind the last, whether anything before wants a gradient.
    pub(crate) grads_before: Vec<bool>,
    pub(crate) limits: Limits,
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
        let edges: Vec<Edge> =
            chain.widths(key.cols)?.into_iter().map(|cols| Edge { rows: Rows::Input, cols, kind }).collect();
        let grads_before = grads_before(chain, &key);
        let limits = dispatcher.limits(key.device)?;
        let linears = linear_indices(chain)
            .map(|index| {
                let op = LinearOp::new(chain, index, &key, recipe, (grads_before[index], limits.multiprocessors));
                op.map_err(|error| error.within(&chain.links()[index].label))
            })
            .collect::<Result<_>>()?;
        let ports = PortNumbers::new(PortCounts {
            extras: chain.extra_inputs(),
            extra_outputs: chain.extra_outputs(),
            params: chain.params(),
            linears: chain.linears(),
        });
        Ok(Self { chain: chain.clone(), key, recipe: recipe.copied(), edges, linears, grads_before, limits, ports })
    }

    pub(crate) fn label(&self, index: usize) -> &str {
        self.chain.links().get(index).map_or("", |link| &link.label)
    }

    /// An error of the op at `index`.
    pub(crate) fn within(&self, index: usize, error: Error) -> Error {
        error.within(self.label(index))
    }

    /// Elements and type of a tensor of the call's, of those that backward reads, for `rows` rows.
    pub(crate) fn extent_of(&self, port: Port, rows: usize) -> (usize, DType) {
        let key = &self.key;
        let activation = key.activation.into();
        let ops = || self.chain.links().iter().zip(&self.edges);
        match port {
            Port::Input => (rows * key.cols, activation),
            Port::Extra(index) => {
                let takes = |link: &Link| link.op.extra_inputs() != 0 && link.extra_input == usize::from(index);
                let elements = ops().find(|(link, _)| takes(link)).map_or(0, |(link, edge)| match link.op {
                    Op::AddExtraInput { .. } => rows * edge.cols,
                    Op::Linear { groups: Some(groups), .. } => groups.count,
                    _ => rows,
                });
                (elements, key.extras[usize::from(index)].0)
            }
            Port::ExtraOutput(index) => {
                let makes = |link: &Link| link.op.extra_outputs() != 0 && link.extra_output == usize::from(index);
                (rows * ops().find(|(link, _)| makes(link)).map_or(0, |(_, edge)| edge.cols), activation)
            }
            Port::Param(index) => {
                let owns = |link: &&Link| (link.param..link.param + link.op.params()).contains(&usize::from(index));
                let elements = self.chain.links().iter().find(owns).map_or(0, |link| match link.op {
                    Op::Linear { inputs, outputs, groups } => {
                        inputs * outputs * groups.map_or(1, |groups| groups.count)
                    }
                    Op::Bias { size, groups } => size * groups.unwrap_or(1),
                    Op::Norm { cols, .. } => cols,
                    _ => 0,
                });
                (elements, key.params[usize::from(index)].0.into())
            }
            _ => (0, activation),
        }
    }

    /// Where the counts of the rows of experts are that the op at `index` takes: a linear op, or the bias behind one.
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

    /// The op of each linear op.
    pub(crate) fn linear_indices(&self) -> impl Iterator<Item = usize> + '_ {
        linear_indices(&self.chain)
    }
}

fn linear_indices(chain: &Chain) -> impl Iterator<Item = usize> + '_ {
    chain.links().iter().enumerate().filter(|(_, link)| matches!(link.op, Op::Linear { .. })).map(|(index, _)| index)
}

/// For each op, and behind the last, whether anything before wants a gradient.
fn grads_before(chain: &Chain, key: &ProgramKey) -> Vec<bool> {
    let mut wanted = key.input_grad;
    let mut list = vec![wanted];
    for link in chain.links() {
        let params = link.param..link.param + link.op.params();
        let extras = link.extra_input..link.extra_input + link.op.extra_inputs();
        wanted |= key.params[params].iter().any(|&(_, grad)| grad) || key.extras[extras].iter().any(|&(_, grad)| grad);
        list.push(wanted);
    }
    list
}
