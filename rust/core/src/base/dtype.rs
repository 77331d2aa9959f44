//! Element types and devices of tensors.

use std::fmt;

use te_fast_kernels::{Float, Fp8};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE binary64.
    F64,
    /// Unsigned byte; also raw FP8 bytes.
    U8,
    /// Signed byte.
    I8,
    /// 16-bit integer.
    I16,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
    /// Boolean byte.
    Bool,
    /// FP8 E4M3 (finite only).
    E4m3,
    /// FP8 E5M2.
    E5m2,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool | Self::E4m3 | Self::E5m2 => 1,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }

    /// The high-precision type that kernels take, if it is one.
    #[must_use]
    pub const fn as_float(self) -> Option<Float> {
        match self {
            Self::F32 => Some(Float::F32),
            Self::F16 => Some(Float::F16),
            Self::Bf16 => Some(Float::Bf16),
            _ => None,
        }
    }
}

impl From<Float> for DType {
    fn from(float: Float) -> Self {
        match float {
            Float::F32 => Self::F32,
            Float::F16 => Self::F16,
            Float::Bf16 => Self::Bf16,
        }
    }
}

impl From<Fp8> for DType {
    fn from(fp8: Fp8) -> Self {
        match fp8 {
            Fp8::E4m3 => Self::E4m3,
            Fp8::E5m2 => Self::E5m2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::F32 => "torch.float32",
            Self::F16 => "torch.float16",
            Self::Bf16 => "torch.bfloat16",
            Self::F64 => "torch.float64",
            Self::U8 => "torch.uint8",
            Self::I8 => "torch.int8",
            Self::I16 => "torch.int16",
            Self::I32 => "torch.int32",
            Self::I64 => "torch.int64",
            Self::Bool => "torch.bool",
            Self::E4m3 => "torch.float8_e4m3fn",
            Self::E5m2 => "torch.float8_e5m2",
        })
    }
}

/// Where a tensor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory: the Rust backend.
    Cpu,
    /// CUDA device of this ordinal.
    Cuda(u16),
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(ordinal) => write!(formatter, "cuda:{ordinal}"),
        }
    }
}
