//! Programs as operators of a compiled graph. An operator reads some tensors, writes others, and keeps no state that
//! the graph should know. Tensors are two-dimensional: rows of columns.

pub(crate) mod backward;
pub(crate) mod call;
pub(crate) mod entry;
pub(crate) mod forward;
mod given;
mod kinds;
mod launch;
mod main_grads;
mod operands;
mod packing;
mod parts;
pub(crate) mod registry;
pub(crate) mod slots;
mod weights;

const OP: &str = "ops";
