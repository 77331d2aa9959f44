//! The host backend: a Rust kernel for every kernel id, on the same parameter structs, with the same numbers.
//! One file per op; `params!` binds them to the structs in `ops/`.

pub(crate) mod activation;
pub(crate) mod activation_backward;
pub(crate) mod activation_groups;
pub(crate) mod affine;
pub(crate) mod amax;
pub(crate) mod cast;
pub(crate) mod cast_block;
pub(crate) mod cast_current;
pub(crate) mod cast_groups;
pub(crate) mod cast_many;
pub(crate) mod cross_entropy;
pub(crate) mod dequantize;
pub(crate) mod fp8;
pub(crate) mod gemm;
pub(crate) mod grouped_gemm;
pub(crate) mod groups;
pub(crate) mod handover;
pub(crate) mod norm;
pub(crate) mod norm_backward;
pub(crate) mod pad;
pub(crate) mod permute;
pub(crate) mod permute_cast;
pub(crate) mod permute_map;
pub(crate) mod permute_merge;
pub(crate) mod permute_scales;
pub(crate) mod rope;
pub(crate) mod router;
pub(crate) mod rows;
pub(crate) mod scale_update;
pub(crate) mod sum_groups;
pub(crate) mod tensor_core;
pub(crate) mod threads;
pub(crate) mod transpose;
