//! The products of a router of tokens, in f32.

use te_fast_kernels::Float;

use crate::gemm::problem::{Operand, Problem, ScaleMode};
use crate::program::chain::Router;
use crate::program::linear_op::LinearOp;

/// One of the products of a router, for any number of tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterProduct {
    kind: ProductKind,
    experts: usize,
    cols: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ProductKind {
    /// `x · Wᵀ`.
    Logits,
    /// `dlogits · W`, written or added.
    TokensGrad { accumulate: bool },
    /// `dlogitsᵀ · x`.
    WeightGrad,
}

impl RouterProduct {
    pub(crate) const fn new(router: &Router, kind: ProductKind) -> Self {
        Self { kind, experts: router.choice.experts, cols: router.cols }
    }

    pub(crate) fn problem(&self, tokens: usize) -> Problem {
        let Self { experts, cols, .. } = *self;
        let operand = |ld, k_outermost| Operand { dtype: Float::F32.into(), scale: ScaleMode::None, ld, k_outermost };
        let plain = |sizes, x, w| LinearOp::plain(sizes, x, w, Float::F32);
        match self.kind {
            ProductKind::Logits => plain([tokens, experts, cols], operand(cols, false), operand(cols, false)),
            ProductKind::TokensGrad { accumulate } => {
                let problem = plain([tokens, cols, experts], operand(experts, false), operand(cols, true));
                Problem { accumulate, ..problem }
            }
            ProductKind::WeightGrad => plain([experts, cols, tokens], operand(experts, true), operand(cols, true)),
        }
    }
}
