//! Programs as operators of a compiler's graph call them: tensors in, new tensors out, nothing kept that a graph should know
//! of. Tensors are two-dimensional: rows of columns.

pub(crate) mod backward;
pub(crate) mod call;
pub(crate) mod forward;
pub(crate) mod slots;
mod weights;

const OP: &str = "ops";
