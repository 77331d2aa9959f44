//! Operations: one file per op family, each with its parameter struct, a plan that checks shapes and picks the
//! kernel and grid once, and a `run` that fills the struct and launches.

pub mod activation;
pub mod activation_backward;
pub mod activation_groups;
pub mod affine;
pub mod amax;
pub mod attention;
pub mod cast;
pub mod cast_block;
pub mod cast_current;
pub mod cast_groups;
pub mod cast_many;
pub mod cross_entropy;
pub mod dequantize;
pub mod grouped_gemm;
pub mod handover;
pub mod norm;
pub mod norm_backward;
mod norm_share;
pub mod norm_spec;
pub mod packed_heads;
pub mod pad;
pub mod permute;
pub mod permute_cast;
pub mod permute_map;
pub mod permute_merge;
pub mod permute_scales;
pub mod rope;
pub mod route;
pub mod router;
pub mod row_map;
pub mod scale_update;
pub mod strips;
pub mod sum_groups;
pub mod transpose;
