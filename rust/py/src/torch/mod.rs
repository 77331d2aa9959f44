//! torch at arm's length: its tensors, allocations, devices and functions.

pub(crate) mod operand;
pub(crate) mod process;
pub(crate) mod reader;
