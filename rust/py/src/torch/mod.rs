//! The interface to torch: its tensors, allocations, devices and functions.

pub(crate) mod operand;
pub(crate) mod process;
pub(crate) mod reader;
