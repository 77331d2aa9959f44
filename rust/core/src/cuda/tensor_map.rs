//! Tensors as the copy engine of Hopper sees them: shape, pitches and the tile that it moves, encoded by the driver.
#![expect(unsafe_code, reason = "calls into the CUDA driver; the block says who guarantees its arguments")]

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::functions::{check, functions};

/// Bytes that addresses and pitches are multiples of.
pub(crate) const ALIGNMENT: usize = 16;

/// An encoded tensor: a kernel's parameter, by value.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

/// The tiles of a contiguous tensor that the engine moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles<const RANK: usize> {
    /// Type of the elements; FP8 are bytes.
    pub(crate) dtype: DType,
    /// Sizes, the innermost first.
    pub(crate) sizes: [usize; RANK],
    /// Sizes of a tile.
    pub(crate) tile: [u32; RANK],
    /// Tiles in lines of 128 bytes, whose words are exchanged so that the tensor cores read them without conflicts.
    pub(crate) swizzled: bool,
}

impl TensorMap {
    /// The parameter of a kernel that moves no such tiles.
    pub(crate) const NONE: Self = Self([0; 16]);

    /// Encodes the tensor at `base`. Sizes of 0 count as 1: such a tensor is not read.
    ///
    /// # Errors
    /// An address or a pitch that is no multiple of 16 bytes, or the driver's refusal.
    #[inline]
    pub(crate) fn new<const RANK: usize>(op: &'static str, base: DevPtr<'_>, tiles: &Tiles<RANK>) -> Result<Self> {
        let sizes = tiles.sizes.map(|size| size.max(1) as u64);
        let mut pitches = [0_u64; RANK];
        let mut pitch = tiles.dtype.size() as u64;
        for (place, size) in pitches.iter_mut().zip(sizes) {
            pitch *= size;
            *place = pitch;
        }
        // The innermost dimension has no pitch of its own.
        let pitches = &pitches[..RANK - 1];
        if !base.is_aligned(ALIGNMENT) || pitches.iter().any(|pitch| !pitch.is_multiple_of(ALIGNMENT as u64)) {
            let got = format!("address {:#x}, pitches of {pitches:?} bytes", base.address());
            return Err(Error::layout(op, "an operand", "at multiples of 16 bytes, with lines of such", got));
        }
        let mut map = Self::NONE;
        let steps = [1_u32; RANK];
        let swizzle = if tiles.swizzled {
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B
        } else {
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE
        };
        // SAFETY: writes one map; sizes, pitches, tile and steps are arrays of RANK (pitches one less) that outlive the call.
        let status = unsafe {
            (functions()?.cuTensorMapEncodeTiled)(
                (&raw mut map).cast::<CUtensorMap>(),
                element(tiles.dtype) as u32,
                RANK as u32,
                base.address() as *mut std::ffi::c_void,
                sizes.as_ptr(),
                pitches.as_ptr(),
                tiles.tile.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as u32,
                swizzle as u32,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as u32,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as u32,
            )
        };
        check("cuTensorMapEncodeTiled", status)?;
        Ok(map)
    }
}

fn element(dtype: DType) -> CUtensorMapDataType {
    match dtype {
        DType::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
}
