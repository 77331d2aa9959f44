//! Attention by the launches of torch's kernels, without torch.

pub(crate) mod call;
pub(crate) mod observed;
pub(crate) mod repeated;
