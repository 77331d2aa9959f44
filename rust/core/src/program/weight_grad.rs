//! The product of a linear op's weight gradient, of one weight or of a stack of experts'.

use std::sync::Arc;

use crate::base::dtype::DType;
use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::gemm::plan::GemmPlan;
use crate::gemm::problem::GemmPointers;
use crate::launch::target::Target;
use crate::ops::grouped_gemm::{GroupedGemmPlan, GroupedGemmPointers};

/// The product of a linear op's weight gradient, of one weight or of a stack.
#[derive(Clone, Debug)]
pub enum WeightGradPlan {
    /// Of one weight.
    Dense(Arc<GemmPlan>),
    /// Of a stack of experts' weights.
    Grouped(GroupedGemmPlan),
}

impl WeightGradPlan {
    /// Type of the result, and whether it is added to.
    pub(crate) fn kind(&self) -> (DType, bool) {
        match self {
            Self::Dense(plan) => (plan.problem().d, plan.problem().accumulate),
            Self::Grouped(plan) => (plan.spec().d, plan.spec().accumulate),
        }
    }

    /// Bytes of the result.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Dense(plan) => plan.problem().m * plan.problem().ldd * plan.problem().d.size(),
            Self::Grouped(plan) => plan.spec().groups * plan.spec().n * plan.spec().k * plan.spec().d.size(),
        }
    }

    /// What multiplies, and why; empty for te_fast's kernel of experts, and on the host.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Dense(plan) => plan.reason(),
            Self::Grouped(plan) => plan.reason(),
        }
    }

    /// Launches it.
    pub(crate) fn run(&self, target: &mut Target<'_>, at: &GemmPointers<DevPtr<'_>>, splits: DevPtr<'_>) -> Result<()> {
        match self {
            Self::Dense(plan) => plan.run(target, at),
            Self::Grouped(plan) => plan.run(target, &GroupedGemmPointers::of(at, splits)),
        }
    }
}
