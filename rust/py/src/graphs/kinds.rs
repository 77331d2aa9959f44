//! The formats of quantised parameters, as noted by a trace.

use te_fast_core::program::Program;
use te_fast_core::recipe::definition::{Block, Recipe};
use te_fast_core::{Error, Fp8};

use crate::direct::tensors::fp8_named;
use crate::error::Failure;
use crate::graphs::OP;
use crate::tensor::given::check_weight_kind;
use crate::tensor::kind::block_numbered;

/// How a parameter is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GivenKind {
    pub(super) block: Block,
    pub(super) fp8: Fp8,
    /// Whether backward reads its column layout, which exists.
    pub(super) columnwise: bool,
}

impl GivenKind {
    /// Those of a program's parameters, of block, FP8 type, and whether there is a column layout.
    pub(super) fn of_params(
        described: &[Option<(u8, String, bool)>],
        program: &Program,
        recipe: Option<&Recipe>,
    ) -> Result<Vec<Option<Self>>, Failure> {
        let linear_of = |param| (0..program.key().linears.len()).find(|&at| program.linear_param(at) == param);
        let one = |(param, described): (usize, &Option<(u8, String, bool)>)| {
            let Some((block, fp8, has_col)) = described else { return Ok(None) };
            let (Some(linear), Some(recipe)) = (linear_of(param), recipe) else {
                let message = "a quantised parameter that is no weight of a linear op; dequantize() it";
                return Err(Error::unsupported(OP, message).into());
            };
            let (block, fp8) = (block_numbered(*block)?, fp8_named(fp8)?);
            check_weight_kind((block, fp8), recipe)?;
            let columnwise = *has_col && program.weight_layout(linear).usage.columnwise;
            Ok(Some(Self { block, fp8, columnwise }))
        };
        described.iter().enumerate().map(one).collect()
    }
}
