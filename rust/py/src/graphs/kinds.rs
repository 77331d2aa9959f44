//! The formats of quantised parameters, as noted by a trace.

use te_fast_core::program::Program;
use te_fast_core::recipe::definition::{Block, Recipe};
use te_fast_core::{Error, Fp8};

use crate::direct::tensors::fp8_named;
use crate::error::Failure;
use crate::graphs::OP;
use crate::tensor::given::{check_groups, check_weight_kind};
use crate::tensor::kind::block_numbered;

/// How a parameter is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GivenKind {
    pub(super) block: Block,
    pub(super) fp8: Fp8,
    /// Number of values, each with its own scales: the experts of a linear op.
    pub(super) groups: usize,
    /// Whether backward reads its column layout, which exists.
    pub(super) columnwise: bool,
}

/// A quantised parameter as Python describes it: block, FP8 type, whether it has a column layout, and number of values.
pub(super) type Described = (u8, String, bool, usize);

impl GivenKind {
    /// Whether a value has one scale.
    pub(super) fn is_per_tensor(&self) -> bool {
        self.block == Block::Tensor
    }

    /// Those of a program's parameters.
    pub(super) fn of_params(
        described: &[Option<Described>],
        program: &Program,
        recipe: Option<&Recipe>,
    ) -> Result<Vec<Option<Self>>, Failure> {
        let linear_of = |param| (0..program.key().linears.len()).find(|&at| program.linear_param(at) == param);
        let one = |(param, described): (usize, &Option<Described>)| {
            let Some((block, fp8, has_col, groups)) = described else { return Ok(None) };
            let (Some(linear), Some(recipe)) = (linear_of(param), recipe) else {
                let message = "a quantised parameter that is no weight of a linear op; dequantize() it";
                return Err(Error::unsupported(OP, message).into());
            };
            check_groups(*groups, program.groups(linear))?;
            let (block, fp8) = (block_numbered(*block)?, fp8_named(fp8)?);
            check_weight_kind((block, fp8), recipe)?;
            let columnwise = *has_col && program.weight_layout(linear).usage.columnwise;
            Ok(Some(Self { block, fp8, groups: *groups, columnwise }))
        };
        described.iter().enumerate().map(one).collect()
    }
}
