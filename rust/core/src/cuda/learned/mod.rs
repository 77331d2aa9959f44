//! Launches of a library's call, learned from captures of it, and repeated without the library.
//!
//! Two ways lead to them. A call that takes addresses is given invented ones (`invented`). A call that takes tensors, and
//! allocates memory itself, is observed (`observed`).

pub(crate) mod invented;
pub mod observed;
mod steps;
