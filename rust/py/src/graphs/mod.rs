//! Programs as operators of a compiler's graph call them: tensors that are read, tensors that are written to, nothing kept that
//! a graph should know of. Tensors are two-dimensional: rows of columns.

pub(crate) mod backward;
pub(crate) mod call;
pub(crate) mod entry;
pub(crate) mod forward;
mod given;
mod kinds;
mod launch;
mod operands;
pub(crate) mod registry;
pub(crate) mod slots;
mod weights;

const OP: &str = "ops";
