//! Attention of heads that lie packed in the columns of a product, by the launches of torch's kernel.
//!
//! torch chooses a kernel by shapes, types and settings, and calls it through several layers, which cost more host time
//! than the launches (`benches/transformer_layer.py`). A plan has the launches of one such kernel, forward and backward, as
//! they were observed (`cuda/learned/observed.rs`), and makes them for other tensors of the same shapes and layouts.

use crate::base::dtype::{DType, Device};
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::base::tensor::TensorView;
use crate::cuda::learned::observed::Repeated;
use crate::launch::target::{Backend, Target};
use crate::ops::packed_heads::{PackedHeads, Waves, join};
use crate::runtime::lane::aligned;

const OP: &str = "attention";

/// Bytes that torch's kernels expect addresses to be a multiple of.
pub const ALIGNMENT: usize = 16;

/// Sizes and strides of a gradient, `(batch, heads, tokens, channels)`, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradLayout {
    /// Sizes.
    pub sizes: [i64; 4],
    /// Strides.
    pub strides: [i64; 4],
}

impl GradLayout {
    /// The layout of a view without gaps; none of another view.
    #[must_use]
    pub fn of(view: &TensorView<'_>) -> Option<Self> {
        let (sizes, strides) = (view.shape().try_into().ok()?, view.strides().try_into().ok()?);
        let mut dims: [(i64, i64); 4] = std::array::from_fn(|dim| (view.strides()[dim], view.shape()[dim]));
        dims.sort_unstable();
        let mut expected = 1;
        for (stride, size) in dims {
            if size != 1 && stride != expected {
                return None;
            }
            expected *= size;
        }
        Some(Self { sizes, strides })
    }

    fn elements(&self) -> usize {
        self.sizes.iter().map(|&size| size as usize).product()
    }
}

/// The backward of a plan.
#[derive(Debug)]
struct Backward {
    launches: Repeated,
    /// Of queries, keys and values.
    grads: [GradLayout; 3],
}

/// The launches of attention for products of one shape, type and device.
#[derive(Debug)]
pub struct AttentionPlan {
    heads: PackedHeads,
    interleaved: bool,
    /// The order of dimensions that makes `(..., heads, channels)` what the kernel takes.
    order: [usize; 4],
    dtype: DType,
    device: Device,
    forward: Repeated,
    backward: Option<Backward>,
}

/// Tensors that a backward reads: product, result and sums of the forward, and the gradient of the result.
pub type Read<'v> = [DevPtr<'v>; 4];

impl AttentionPlan {
    /// A plan for tensors like `product`. `forward` takes the product, the result and, where there is a backward, the sums
    /// of exponentials; `backward` these, the result's gradient, and the gradients of queries, keys and values.
    ///
    /// # Errors
    /// An order that is none of four dimensions.
    pub fn new(
        (heads, interleaved, order): (PackedHeads, bool, [usize; 4]),
        product: &TensorView<'_>,
        forward: Repeated,
        backward: Option<(Repeated, [GradLayout; 3])>,
    ) -> Result<Self> {
        let mut dims = order;
        dims.sort_unstable();
        if dims != [0, 1, 2, 3] {
            return Err(Error::shape(OP, "the order", "of four dimensions, each once", format_args!("{order:?}")));
        }
        let backward = backward.map(|(launches, grads)| Backward { launches, grads });
        let (dtype, device) = (product.dtype(), product.device());
        Ok(Self { heads, interleaved, order, dtype, device, forward, backward })
    }

    /// Where queries, keys and values are in the product.
    #[must_use]
    pub fn heads(&self) -> &PackedHeads {
        &self.heads
    }

    /// Whether rotation turns adjacent channels.
    #[must_use]
    pub fn interleaved(&self) -> bool {
        self.interleaved
    }

    /// Bytes of private memory of a forward.
    #[must_use]
    pub fn forward_bytes(&self) -> usize {
        self.forward.workspace_bytes()
    }

    /// Bytes of private memory of a backward: the gradients of queries, keys and values, and the kernel's workspace.
    #[must_use]
    pub fn backward_bytes(&self) -> usize {
        let Some(Backward { launches, grads }) = &self.backward else { return 0 };
        launches.workspace_bytes() + grads.iter().map(|grad| self.bytes_of(grad)).sum::<usize>()
    }

    fn bytes_of(&self, grad: &GradLayout) -> usize {
        aligned(grad.elements() * self.dtype.size())
    }

    /// Attends. `product` has what [`crate::ops::packed_heads::split`] leaves in its place; `sums` is null where no
    /// backward follows.
    ///
    /// # Errors
    /// A misaligned address, or the driver's refusal.
    pub fn forward(
        &mut self,
        target: &mut Target<'_>,
        [product, out, sums]: [DevPtr<'_>; 3],
        workspace: DevPtr<'_>,
    ) -> Result<()> {
        let Target { backend: Backend::Cuda(queue), trace } = target else { return Err(on_the_host()) };
        trace.counters.learned_attentions += 1;
        if self.backward.is_some() {
            self.forward.launch(queue, &addresses([product, out, sums, workspace])?)
        } else {
            self.forward.launch(queue, &addresses([product, out, workspace])?)
        }
    }

    /// Writes the gradient of the product into `into`.
    ///
    /// # Errors
    /// A plan without a backward, a misaligned address, or the driver's refusal.
    pub fn backward(
        &mut self,
        target: &mut Target<'_>,
        [product, out, sums, grad]: Read<'_>,
        waves: &Waves<'_>,
        into: &TensorView<'_>,
        scratch: DevPtr<'_>,
    ) -> Result<()> {
        let bytes = self.backward.as_ref().map(|own| own.grads.map(|grad| self.bytes_of(&grad)));
        let (Some(Backward { launches, grads }), Some([q_bytes, k_bytes, v_bytes])) = (&mut self.backward, bytes)
        else {
            return Err(Error::state(OP, "a forward that left nothing for a backward; report this"));
        };
        let Target { backend: Backend::Cuda(queue), trace } = target else { return Err(on_the_host()) };
        trace.counters.learned_attentions += 1;
        let (of_k, of_v) = (scratch.offset(q_bytes), scratch.offset(q_bytes + k_bytes));
        let workspace = scratch.offset(q_bytes + k_bytes + v_bytes);
        launches.launch(queue, &addresses([product, out, sums, grad, scratch, of_k, of_v, workspace])?)?;
        let mut views = [*into; 3];
        for ((view, layout), data) in views.iter_mut().zip(grads).zip([scratch, of_k, of_v]) {
            let grad = TensorView::new(data, self.device, self.dtype, &layout.sizes, Some(&layout.strides));
            *view = grad.and_then(|grad| grad.unpermuted(&self.order)).ok_or_else(|| {
                Error::shape(OP, "a gradient", "of four dimensions", format_args!("{:?}", layout.sizes))
            })?;
        }
        join(target, &self.heads, &views, into, waves, self.interleaved)
    }
}

/// Addresses for launches.
fn addresses<const N: usize>(pointers: [DevPtr<'_>; N]) -> Result<[u64; N]> {
    if let Some(pointer) = pointers.iter().find(|pointer| !pointer.is_aligned(ALIGNMENT)) {
        let got = format_args!("address {:#x}", pointer.address());
        return Err(Error::shape(OP, "memory", format_args!("a multiple of {ALIGNMENT} bytes"), got));
    }
    Ok(pointers.map(|pointer| pointer.address() as u64))
}

/// The error for a plan or a call without a GPU.
#[cold]
#[must_use]
pub fn on_the_host() -> Error {
    Error::state(OP, "launches of a GPU's kernel were asked for on the host; report this")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(sizes: [i64; 4], strides: [i64; 4]) -> Option<GradLayout> {
        GradLayout::of(&TensorView::new(DevPtr::null(), Device::Cpu, DType::Bf16, &sizes, Some(&strides))?)
    }

    #[test]
    fn layouts_without_gaps_are_taken_in_any_order() {
        // (batch, heads, tokens, channels) in memory as (tokens, batch, heads, channels).
        let found = layout([2, 4, 8, 16], [64, 16, 128, 1]);
        assert_eq!(found.map(|found| found.elements()), Some(1024));
        assert!(layout([2, 4, 8, 16], [512, 128, 16, 1]).is_some());
        // A dimension of one has any stride.
        assert!(layout([1, 4, 8, 16], [7, 16, 64, 1]).is_some());
    }

    #[test]
    fn layouts_with_gaps_or_overlaps_are_not() {
        assert_eq!(layout([2, 4, 8, 16], [1536, 16, 192, 1]), None);
        assert_eq!(layout([2, 4, 8, 16], [0, 16, 64, 1]), None);
        assert_eq!(layout([2, 4, 8, 16], [512, 128, 16, 2]), None);
        let three = TensorView::new(DevPtr::null(), Device::Cpu, DType::Bf16, &[4, 8, 16], None);
        assert_eq!(three.and_then(|view| GradLayout::of(&view)), None);
    }
}
