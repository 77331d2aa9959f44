//! Quantised tensors of users: the native half of `te_fast.tensor`.

mod dequantize;
pub(crate) mod given;
pub(crate) mod handed;
pub(crate) mod in_place;
pub(crate) mod kind;
pub(crate) mod many;
pub(crate) mod scale;
pub(crate) mod stack;
pub(crate) mod value;
