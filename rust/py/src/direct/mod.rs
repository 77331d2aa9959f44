//! `te_fast.dispatch` and the MoE functions: one call, one op.

pub(crate) mod activation;
pub(crate) mod activation_groups;
pub(crate) mod call;
pub(crate) mod cross_entropy;
pub(crate) mod dispatcher;
pub(crate) mod gemm;
pub(crate) mod grouped_gemm;
pub(crate) mod norm;
pub(crate) mod norm_backward;
pub(crate) mod permute;
pub(crate) mod permute_cast;
pub(crate) mod permute_route;
pub(crate) mod quantize;
pub(crate) mod quantize_groups;
pub(crate) mod rope;
pub(crate) mod router;
pub(crate) mod tensors;
