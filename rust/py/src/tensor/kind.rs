//! Formats of quantised values, by Python's numbers and names.

use pyo3::PyResult;
use pyo3::exceptions::PyValueError;
use te_fast_core::Fp8;
use te_fast_core::ops::cast_block::{BlockShape, scale_shape};
use te_fast_core::recipe::definition::Block;

/// The shape of the elements that share a scale: 0 (all), 1 (1x128) or 2 (128x128).
pub(crate) fn block_numbered(number: u8) -> PyResult<Block> {
    match number {
        0 => Ok(Block::Tensor),
        1 => Ok(Block::Row),
        2 => Ok(Block::Square),
        other => Err(PyValueError::new_err(format!("block must be 0, 1 or 2, got {other}"))),
    }
}

/// An FP8 type's name.
pub(crate) const fn fp8_name(fp8: Fp8) -> &'static str {
    match fp8 {
        Fp8::E4m3 => "e4m3",
        Fp8::E5m2 => "e5m2",
    }
}

/// Number of scales of a row layout.
pub(crate) fn scale_count(block: Block, rows: usize, cols: usize) -> usize {
    block_shape(block).map_or(1, |block| scale_shape(block, rows, cols).iter().product())
}

/// The blocks of a cast; none for one scale.
pub(super) fn block_shape(block: Block) -> Option<BlockShape> {
    match block {
        Block::Tensor => None,
        Block::Row => Some(BlockShape::OneDimensional),
        Block::Square => Some(BlockShape::TwoDimensional),
    }
}
