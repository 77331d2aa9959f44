//! Values of cuBLASLt's attribute enums (cublasLt.h 13.1; those of grouped products 13.8), which are stable across versions.

use crate::base::dtype::DType;

pub(crate) const DESC_POINTER_MODE: u32 = 2;
pub(crate) const DESC_TRANSA: u32 = 3;
pub(crate) const DESC_TRANSB: u32 = 4;
pub(crate) const DESC_EPILOGUE: u32 = 7;
pub(crate) const DESC_BIAS_POINTER: u32 = 8;
pub(crate) const DESC_A_SCALE_POINTER: u32 = 17;
pub(crate) const DESC_B_SCALE_POINTER: u32 = 18;
pub(crate) const DESC_D_SCALE_POINTER: u32 = 20;
pub(crate) const DESC_AMAX_D_POINTER: u32 = 21;
pub(crate) const DESC_FAST_ACCUM: u32 = 25;
pub(crate) const DESC_BIAS_DATA_TYPE: u32 = 26;
pub(crate) const DESC_A_SCALE_MODE: u32 = 31;
pub(crate) const DESC_B_SCALE_MODE: u32 = 32;
pub(crate) const PREF_MAX_WORKSPACE_BYTES: u32 = 1;
pub(crate) const PREF_MIN_ALIGNMENT: [u32; 4] = [5, 6, 7, 8];
pub(crate) const PREF_GROUPED_AVERAGE_REDUCTION_DIM: u32 = 13;
pub(crate) const PREF_GROUPED_AVERAGE_ROWS: u32 = 14;
pub(crate) const PREF_GROUPED_AVERAGE_COLS: u32 = 15;
pub(crate) const LAYOUT_ROWS_ARRAY: u32 = 9;
pub(crate) const LAYOUT_COLS_ARRAY: u32 = 10;
pub(crate) const LAYOUT_LD_ARRAY: u32 = 11;
pub(crate) const ALGO_ID: u32 = 0;
pub(crate) const ALGO_SPLITK_NUM: u32 = 2;
pub(crate) const ALGO_REDUCTION_SCHEME: u32 = 3;
/// Epilogues are bits: `RELU_BIAS` is both.
pub(crate) const EPILOGUE_RELU: u32 = 2;
pub(crate) const EPILOGUE_BIAS: u32 = 4;
pub(crate) const EPILOGUE_GELU: u32 = 32;
pub(crate) const COMPUTE_32F: u32 = 68;
pub(crate) const POINTER_MODE_DEVICE: i32 = 1;
pub(crate) const OP_N: i32 = 0;
pub(crate) const OP_T: i32 = 1;
pub(crate) const SCALE_VEC128: i32 = 4;
pub(crate) const SCALE_BLK128X128: i32 = 5;
pub(crate) const SCALE_PER_GROUP: i32 = 6;

/// `cudaDataType`.
pub(crate) const fn data_type(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 2,
        DType::Bf16 => 14,
        DType::E4m3 => 28,
        DType::E5m2 => 29,
        _ => 0, // CUDA_R_32F; `CublasLt::plan` lets nothing else through.
    }
}
