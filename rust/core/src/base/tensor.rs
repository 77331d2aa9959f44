//! Borrowed tensors: address, type and layout of the elements. The binding makes views from torch tensors; operations
//! read them and never outlive them.
//!
//! The caller keeps memory alive across streams: the memory is torch's, and torch's caching allocator orders reuse by
//! the stream of the allocation.

use crate::base::dtype::{DType, Device};
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;

/// Most dimensions a view can have.
pub const MAX_DIMS: usize = 8;

/// A tensor borrowed for the length of one call.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    data: DevPtr<'a>,
    device: Device,
    dtype: DType,
    ndim: u8,
    shape: [i64; MAX_DIMS],
    strides: [i64; MAX_DIMS],
}

impl<'a> TensorView<'a> {
    /// A view of `data`; `None` when there are more than [`MAX_DIMS`] dimensions or the lengths differ.
    /// Without strides the view is row-major contiguous.
    #[must_use]
    pub fn new(data: DevPtr<'a>, device: Device, dtype: DType, shape: &[i64], strides: Option<&[i64]>) -> Option<Self> {
        if shape.len() > MAX_DIMS || strides.is_some_and(|strides| strides.len() != shape.len()) {
            return None;
        }
        let mut view =
            Self { data, device, dtype, ndim: shape.len() as u8, shape: [0; MAX_DIMS], strides: [0; MAX_DIMS] };
        view.shape[..shape.len()].copy_from_slice(shape);
        if let Some(strides) = strides {
            view.strides[..strides.len()].copy_from_slice(strides);
        } else {
            let mut step = 1;
            for (stride, &size) in view.strides[..shape.len()].iter_mut().zip(shape).rev() {
                *stride = step;
                step *= size.max(1);
            }
        }
        Some(view)
    }

    /// The view whose dimension `i` is dimension `order[i]` of this one; none if `order` is not an order of all.
    #[must_use]
    pub fn permuted(&self, order: &[usize]) -> Option<Self> {
        let mut view = *self;
        let mut seen = 0_u32;
        for (at, &dim) in order.iter().enumerate() {
            *view.shape.get_mut(at)? = *self.shape().get(dim)?;
            view.strides[at] = self.strides[dim];
            seen |= 1 << dim;
        }
        (order.len() == self.shape().len() && seen.count_ones() as usize == order.len()).then_some(view)
    }

    /// The view that [`Self::permuted`] makes this one of; none if `order` is not an order of all dimensions.
    #[must_use]
    pub fn unpermuted(&self, order: &[usize]) -> Option<Self> {
        let mut back = [0; MAX_DIMS];
        for (at, &dim) in order.iter().enumerate() {
            *back.get_mut(dim)? = at;
        }
        self.permuted(back.get(..order.len())?)
    }

    /// First element.
    #[must_use]
    pub fn data(&self) -> DevPtr<'a> {
        self.data
    }

    /// Where it lives.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        &self.shape[..usize::from(self.ndim)]
    }

    /// Strides in elements.
    #[must_use]
    pub fn strides(&self) -> &[i64] {
        &self.strides[..usize::from(self.ndim)]
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape().iter().map(|&size| size as usize).product()
    }

    /// Last dimension; 1 for a scalar.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shape().last().map_or(1, |&size| size as usize)
    }

    /// Product of all dimensions but the last.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape().split_last().map_or(1, |(_, leading)| leading.iter().map(|&size| size as usize).product())
    }

    /// Row-major without gaps; sizes of one do not count, as in torch.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&size, &stride) in self.shape().iter().zip(self.strides()).rev() {
            if size != 1 {
                if stride != expected {
                    return self.shape().contains(&0);
                }
                expected *= size;
            }
        }
        true
    }

    /// Refuses a tensor unlike the one that forward saved, since a saved-tensor hook may return any tensor.
    ///
    /// # Errors
    /// Another number of elements, type or device.
    pub fn check_saved(&self, op: &'static str, elements: usize, dtype: DType, device: Device) -> Result<()> {
        if (self.numel(), self.dtype, self.device) == (elements, dtype, device) {
            return Ok(());
        }
        let expected = format!(
            "{elements} elements of {dtype} on {device}, as forward saved it (saved-tensor hooks have to bring back what they were given)"
        );
        let got = format!("{} of {} on {}", self.numel(), self.dtype, self.device);
        Err(Error::shape(op, "a saved tensor", expected, got))
    }

    /// Whether the first element lies on a multiple of `bytes`.
    #[must_use]
    pub fn is_aligned(&self, bytes: usize) -> bool {
        self.data.address().is_multiple_of(bytes)
    }
}
