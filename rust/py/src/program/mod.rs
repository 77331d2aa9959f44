//! Layers and chains of ops: programs that Python builds, and their calls.

pub(crate) mod asked;
pub(crate) mod backward;
pub(crate) mod buffers;
pub(crate) mod check;
pub(crate) mod cut;
pub(crate) mod deferred;
pub(crate) mod entry;
pub(crate) mod forward;
pub(crate) mod functions;
pub(crate) mod handle;
mod launch;
pub(crate) mod main_grad;
pub(crate) mod member;
pub(crate) mod module_call;
pub(crate) mod nothing;
mod observed;
pub(crate) mod optimizer_writes;
pub(crate) mod part_grads;
pub(crate) mod parts;
pub(crate) mod steps;
pub(crate) mod tensors;
pub(crate) mod together;
mod transfers;
pub(crate) mod weight;
pub(crate) mod weight_memory;
