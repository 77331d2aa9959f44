//! Routers of mixtures: scores of logits, the experts of each token and their probabilities, in one launch; and the gradient.

use te_fast_kernels::constants::common::WARP;
use te_fast_kernels::constants::moe::{self, MAX_EXPERTS, ROW_THREADS};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::{params, pointers};

const OP: &str = "router";

/// Scores of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Score {
    /// Softmax.
    Softmax = moe::SCORE_SOFTMAX,
    /// Sigmoid.
    Sigmoid = moe::SCORE_SIGMOID,
    /// The root of softplus.
    SqrtSoftplus = moe::SCORE_SQRTSOFTPLUS,
}

/// What is normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Over {
    /// The scores of the chosen experts: softmax over their logits, other scores divided by their sum.
    Chosen = moe::OVER_CHOSEN,
    /// Softmax over all experts before the choice, without a normalisation after it.
    Before = moe::OVER_BEFORE,
    /// The scores of all experts, for a balancing loss; all of them have gradients.
    All = moe::OVER_ALL,
}

/// How a router chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSpec {
    /// Tokens.
    pub tokens: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub topk: usize,
    /// Number of groups of experts, and of the groups that a token's experts may come from; 0 without groups.
    pub groups: (usize, usize),
    /// Scores.
    pub score: Score,
    /// What is normalised.
    pub over: Over,
    /// Factor of the probabilities.
    pub factor: f32,
    /// Type of the logits.
    pub input: Float,
    /// Bytes of an index.
    pub index_bytes: usize,
}

pointers! {
    /// Buffers of a router.
    pub struct RouterPointers {
        /// `[tokens, experts]`.
        logits,
        /// f32 per expert, added only for the choice; or null.
        bias,
        /// `[tokens, experts]` in the type of the logits, zero for experts that are not chosen; [`Over::All`]: f32.
        probs,
        /// f32 `[tokens, experts]` for backward, or null; for softmax over the chosen experts, its result.
        scores,
        /// A byte for each expert of each token, or null.
        map,
        /// The same in bits, `[tokens, ceil(experts / 8)]`, or null.
        bits,
        /// `[tokens, topk]` experts, best first, or null.
        indices,
    }
}

pointers! {
    /// Buffers of a histogram of the biases that experts lack.
    pub struct BalancePointers {
        /// i32 `[experts, bins]`, to which the router adds.
        histogram,
        /// f32, the lower and the upper bound of the bins.
        bounds,
    }
}

pointers! {
    /// Buffers of a router's backward.
    pub struct RouterBwdPointers {
        /// Gradient of the probabilities, of their type.
        grad,
        /// Scores that forward has saved.
        scores,
        /// Bytes of the map; null of [`Over::All`].
        map,
        /// Gradient of the logits.
        dlogits,
    }
}

params! {
    /// Parameters of `router_fwd_*`.
    pub struct RouterParams<'a> [moe::ROUTER_PARAMS_BYTES] for RouterFwd => host::router::run {
        ..RouterPointers,
        /// Tokens.
        pub tokens: u64,
        /// Experts.
        pub experts: u32,
        /// Experts of a token.
        pub topk: u32,
        /// Groups of experts; 0 for none.
        pub groups: u32,
        /// Groups that a token's experts come from.
        pub group_topk: u32,
        /// [`Score`].
        pub score: u32,
        /// [`Over`].
        pub over: u32,
        /// Factor of the probabilities.
        pub factor: f32,
        /// Bytes of an index.
        pub index_bytes: u32,
    }
}

params! {
    /// Parameters of `router_balanced_fwd_*`.
    pub struct RouterBalancedParams<'a> [moe::ROUTER_BALANCED_PARAMS_BYTES] for RouterBalanced
        => host::router::run_balanced {
        ..BalancePointers,
        /// Bins of an expert.
        pub bins: u64,
        /// The router's own.
        pub route: RouterParams<'a>,
    }
}

params! {
    /// Parameters of `router_bwd_*`.
    pub struct RouterBwdParams<'a> [moe::ROUTER_BWD_PARAMS_BYTES] for RouterBwd => host::router::run_bwd {
        ..RouterBwdPointers,
        /// Tokens.
        pub tokens: u64,
        /// Experts.
        pub experts: u32,
        /// Experts of a token.
        pub topk: u32,
        /// [`Score`].
        pub score: u32,
        /// [`Over`].
        pub over: u32,
        /// Factor of the probabilities.
        pub factor: f32,
        /// Zero.
        pub unused: u32,
    }
}

/// A checked router.
#[derive(Clone, Copy, Debug)]
pub struct RouterPlan {
    spec: RouterSpec,
    grid: Grid,
}

impl RouterPlan {
    /// Checks the sizes.
    ///
    /// # Errors
    /// More experts than a warp holds, more tokens than a launch can index, or an invalid choice.
    pub fn new(spec: RouterSpec) -> Result<Self> {
        let RouterSpec { tokens, experts, topk, groups: (groups, group_topk), .. } = spec;
        if !(1..=MAX_EXPERTS).contains(&experts) {
            return Err(Error::shape(OP, "experts", format_args!("1 to {MAX_EXPERTS}"), experts));
        }
        if !(1..=experts).contains(&topk) {
            return Err(Error::shape(OP, "topk", format_args!("1 to the {experts} experts"), topk));
        }
        let divides = groups != 0
            && experts.is_multiple_of(groups)
            && (1..=groups).contains(&group_topk)
            && topk.is_multiple_of(group_topk)
            && topk <= group_topk * (experts / groups);
        if groups != 0 && !divides {
            let expected = format!("groups that divide the {experts} experts, and of which the best hold {topk}");
            return Err(Error::shape(OP, "num_groups and group_topk", expected, format!("{groups} and {group_topk}")));
        }
        let blocks = tokens.div_ceil((ROW_THREADS / WARP) as usize);
        match i32::try_from(blocks) {
            Ok(blocks) => Ok(Self { spec, grid: Grid::linear(blocks as u32, ROW_THREADS) }),
            Err(_) => Err(Error::shape(OP, "tokens", "below 2**33", tokens)),
        }
    }

    /// Bytes of the logits, or of their gradient.
    #[must_use]
    pub const fn logit_bytes(&self) -> usize {
        self.map_bytes() * self.spec.input.size()
    }

    /// Bytes of the probabilities.
    #[must_use]
    pub fn prob_bytes(&self) -> usize {
        if self.spec.over == Over::All { self.score_bytes() } else { self.logit_bytes() }
    }

    /// Bytes of the scores for backward.
    #[must_use]
    pub const fn score_bytes(&self) -> usize {
        self.map_bytes() * size_of::<f32>()
    }

    /// Bytes of the map.
    #[must_use]
    pub const fn map_bytes(&self) -> usize {
        self.spec.tokens * self.spec.experts
    }

    /// Launches the forward.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(&self, target: &mut Target<'_>, at: &RouterPointers<DevPtr<'_>>) -> Result<()> {
        if self.spec.tokens == 0 {
            return Ok(());
        }
        launch(target, KernelId::RouterFwd(self.spec.input), self.grid, &self.params(at))
    }

    /// Launches the forward, which also adds each token's biases that experts lack to a histogram of `bins` bins.
    ///
    /// # Errors
    /// A router that is not of sigmoid scores with a bias and without groups, no expert beside the chosen ones, no bins or
    /// too many, or the driver's refusal.
    pub fn run_balanced(
        &self,
        target: &mut Target<'_>,
        at: &RouterPointers<DevPtr<'_>>,
        balance: &BalancePointers<DevPtr<'_>>,
        bins: usize,
    ) -> Result<()> {
        let RouterSpec { tokens, experts, topk, groups, score, over, input, .. } = self.spec;
        if score != Score::Sigmoid || over != Over::Chosen || groups.0 != 0 || at.bias.is_null() {
            return Err(Error::value(OP, "a histogram needs sigmoid scores, a bias of the experts, and no groups"));
        }
        if topk >= experts {
            return Err(Error::shape(OP, "topk", format_args!("below the {experts} experts of a histogram"), topk));
        }
        if !(1..=i32::MAX as usize).contains(&bins) {
            return Err(Error::shape(OP, "bins of the histogram", "1 to 2**31 - 1", bins));
        }
        if tokens == 0 {
            return Ok(());
        }
        let params = RouterBalancedParams { at: *balance, bins: bins as u64, route: self.params(at) };
        launch(target, KernelId::RouterBalanced(input), self.grid, &params)
    }

    fn params<'a>(&self, at: &RouterPointers<DevPtr<'a>>) -> RouterParams<'a> {
        let RouterSpec {
            tokens, experts, topk, groups: (groups, group_topk), score, over, factor, index_bytes, ..
        } = self.spec;
        RouterParams {
            at: *at,
            tokens: tokens as u64,
            experts: experts as u32,
            topk: topk as u32,
            groups: groups as u32,
            group_topk: group_topk as u32,
            score: score as u32,
            over: over as u32,
            factor,
            index_bytes: index_bytes as u32,
        }
    }

    /// Launches the backward.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run_bwd(&self, target: &mut Target<'_>, at: &RouterBwdPointers<DevPtr<'_>>) -> Result<()> {
        let RouterSpec { tokens, experts, topk, score, over, factor, input, .. } = self.spec;
        if tokens == 0 {
            return Ok(());
        }
        let params = RouterBwdParams {
            at: *at,
            tokens: tokens as u64,
            experts: experts as u32,
            topk: topk as u32,
            score: score as u32,
            over: over as u32,
            factor,
            unused: 0,
        };
        launch(target, KernelId::RouterBwd(input), self.grid, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::trace::Trace;

    #[test]
    fn choices_that_are_none_are_refused() {
        let spec = RouterSpec {
            tokens: 5,
            experts: 16,
            topk: 4,
            groups: (4, 2),
            score: Score::Sigmoid,
            over: Over::Chosen,
            factor: 1.0,
            input: Float::F32,
            index_bytes: 0,
        };
        assert!(RouterPlan::new(spec).is_ok());
        for (experts, topk, groups) in
            [(1025, 4, (0, 0)), (16, 0, (0, 0)), (16, 17, (0, 0)), (16, 4, (3, 1)), (16, 6, (8, 2))]
        {
            assert!(RouterPlan::new(RouterSpec { experts, topk, groups, ..spec }).is_err());
        }
    }

    #[test]
    fn histograms_of_other_routers_are_refused() {
        let spec = RouterSpec {
            tokens: 0,
            experts: 16,
            topk: 4,
            groups: (0, 0),
            score: Score::Sigmoid,
            over: Over::Chosen,
            factor: 1.0,
            input: Float::F32,
            index_bytes: 0,
        };
        let mut bias = [0.0_f32; 16];
        let at = RouterPointers { bias: DevPtr::from_slice(&mut bias), ..RouterPointers::default() };
        let run = |spec, at: &RouterPointers<DevPtr<'_>>, bins| {
            let plan = RouterPlan::new(spec)?;
            plan.run_balanced(&mut Target::host(&mut Trace::default()), at, &BalancePointers::default(), bins)
        };
        assert!(run(spec, &at, 10).is_ok());
        assert!(run(spec, &RouterPointers::default(), 10).is_err());
        assert!(run(spec, &at, 0).is_err());
        assert!(run(spec, &at, 1 << 31).is_err());
        assert!(run(RouterSpec { topk: 16, ..spec }, &at, 10).is_err());
        assert!(run(RouterSpec { groups: (4, 2), ..spec }, &at, 10).is_err());
        assert!(run(RouterSpec { score: Score::Softmax, ..spec }, &at, 10).is_err());
        assert!(run(RouterSpec { over: Over::All, ..spec }, &at, 10).is_err());
    }
}
