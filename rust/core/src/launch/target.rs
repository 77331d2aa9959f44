//! The launch seam: the targets of launches, and the one function that sends launches to them.
//!
//! A kernel is a [`KernelId`] and one `#[repr(C)]` parameter struct. `launch` sends the pair to the CUDA driver, or runs the
//! Rust kernel of the same id on CPU memory, and tells the [`Trace`] either way. A kernel reads and writes only what its
//! head comment in `cuda/*/*.cu` says, for the sizes and types that its plan (`ops/*.rs`) has checked.
#![expect(unsafe_code, reason = "the recorder reads parameter structs as bytes")]

use te_fast_kernels::KernelId;

use crate::base::error::Result;
use crate::cuda::device::CudaQueue;
use crate::host::threads;
use crate::launch::grid::Grid;
use crate::launch::params::Params;
use crate::launch::trace::Trace;

/// Where launches run.
#[derive(Debug)]
pub enum Backend<'d> {
    /// One CUDA stream of one device, whose context is current.
    Cuda(CudaQueue<'d>),
    /// Rust kernels on this thread and rayon's.
    Host,
}

/// The target of one call's launches, in order.
#[derive(Debug)]
pub struct Target<'d> {
    /// The backend.
    pub backend: Backend<'d>,
    /// Counters and recorder.
    pub trace: &'d mut Trace,
}

impl<'d> Target<'d> {
    /// A target on the host backend.
    pub fn host(trace: &'d mut Trace) -> Self {
        Self { backend: Backend::Host, trace }
    }

    /// Whether launches run on the CPU.
    #[must_use]
    pub fn is_host(&self) -> bool {
        matches!(self.backend, Backend::Host)
    }
}

/// Launches kernel `id` with `params`; an empty grid launches nothing.
///
/// # Errors
/// The driver's refusal of the launch, or an error of the host kernel.
#[inline]
pub(crate) fn launch<P: Params>(target: &mut Target<'_>, id: KernelId, grid: Grid, params: &P) -> Result<()> {
    debug_assert!(P::accepts(id), "{} does not take this parameter struct", id.symbol());
    if grid.is_empty() {
        return Ok(());
    }
    if !target.trace.on_launch(id, grid, as_bytes(params)) {
        return Ok(());
    }
    match &mut target.backend {
        Backend::Cuda(queue) => queue.launch(id, grid, params),
        Backend::Host => {
            threads::prepare();
            params.run_host(id)
        }
    }
}

/// The struct's bytes, as the recorder keeps them.
fn as_bytes<P: Params>(params: &P) -> &[u8] {
    // SAFETY: `params!` asserts that the struct has no padding, so every byte is initialised; the slice borrows it.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast(), std::mem::size_of::<P>()) }
}
