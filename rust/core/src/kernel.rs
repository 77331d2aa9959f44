//! The launch seam: typed kernel parameters, device pointers and the queue that launches go to.
//!
//! A kernel is a [`KernelId`] and one `#[repr(C)]` parameter struct. [`launch`] sends the pair to the CUDA
//! driver, or runs the Rust kernel of the same id on CPU memory, and tells the [`Trace`] either way.
//!
//! The promise that launches rest on has two halves. A kernel reads and writes only what its head comment in `cuda/*.cu`
//! says, for the sizes and types that its plan (`ops/*.rs`) has checked. A [`DevPtr`] knows its address alone, so that
//! whoever fills a plan's buffers brings as many bytes as the plan names, and keeps outputs apart from all else: programs
//! and layers by allocating them so, `rust/py/src/dispatch_tensors.rs` by comparing the tensors of a direct call.
#![expect(unsafe_code, reason = "pointers become slices for host kernels; every block names who guarantees it")]

use std::marker::PhantomData;

use te_fast_kernels::KernelId;

use crate::driver::CudaQueue;
use crate::error::Result;
use crate::trace::Trace;

/// A device address (host address for CPU tensors) that is valid for `'a`; null where a kernel allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct DevPtr<'a> {
    address: u64,
    memory: PhantomData<&'a mut u8>,
}

impl<'a> DevPtr<'a> {
    /// The null pointer: "absent", where a parameter is optional.
    #[must_use]
    pub const fn null() -> Self {
        Self { address: 0, memory: PhantomData }
    }

    /// A pointer to memory at `address`.
    ///
    /// # Safety
    /// The memory must stay allocated for `'a`, and nothing else may hold Rust references into it meanwhile.
    #[must_use]
    pub const unsafe fn from_address(address: u64) -> Self {
        Self { address, memory: PhantomData }
    }

    /// A host buffer, for tests, benches and host scratch memory.
    #[must_use]
    pub fn from_slice<T: Element>(slice: &'a mut [T]) -> Self {
        Self { address: slice.as_mut_ptr() as u64, memory: PhantomData }
    }

    /// The address as a number.
    #[must_use]
    pub const fn address(self) -> usize {
        self.address as usize
    }

    /// Whether it is absent.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.address == 0
    }

    /// The pointer `bytes` further on; null stays null.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        if self.address == 0 { self } else { Self { address: self.address + bytes as u64, memory: PhantomData } }
    }

    /// `len` elements as the kernel's head comment promises them; empty for null. For host kernels alone.
    #[must_use]
    pub(crate) fn slice<T: Element>(self, len: usize) -> &'a [T] {
        if self.address == 0 || len == 0 {
            return &[];
        }
        // SAFETY: whoever filled the plan's buffers brought one of `len` elements (the promise at the head of this file),
        // and the view it came from keeps it borrowed for 'a. T is plain data, so any bytes are a value.
        unsafe { std::slice::from_raw_parts(self.address as *const T, len) }
    }

    /// As [`DevPtr::slice`], to write. A kernel's outputs do not overlap its inputs or each other.
    #[must_use]
    pub(crate) fn slice_mut<T: Element>(self, len: usize) -> &'a mut [T] {
        if self.address == 0 || len == 0 {
            return &mut [];
        }
        // SAFETY: as in `slice`; exclusive because a host kernel takes each output parameter once, and outputs lie apart.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, len) }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Plain data that host kernels may view memory as.
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {}

macro_rules! elements {
    ($($type:ty),*) => { $(impl sealed::Sealed for $type {} impl Element for $type {})* };
}
elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::f16, half::bf16);

/// Parameters of a kernel: their bytes are what the launch copies, and the host backend runs on the same struct.
pub trait Params {
    /// Whether the kernel takes this struct.
    fn accepts(id: KernelId) -> bool;

    /// Runs the host kernel of `id`.
    ///
    /// # Errors
    /// Only what the kernel itself can find wrong; shapes were checked by the plan.
    fn run_host(&self, id: KernelId) -> Result<()>;
}

/// Defines a `#[repr(C)]` parameter struct, asserts its size (the `.cu` file asserts the same number) and binds it
/// to the families of [`KernelId`] that take it; `run` is the host kernel, `fn(&Params, KernelId) -> Result<()>`.
#[macro_export]
macro_rules! params {
    (
        $(#[$doc:meta])*
        pub struct $name:ident<$life:lifetime> [$size:literal] for $($family:ident)|+ => $run:path {
            $($(#[$field_doc:meta])* pub $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct $name<$life> { $($(#[$field_doc])* pub $field: $type,)* }

        const _: () = assert!(std::mem::size_of::<$name<'static>>() == $size);
        // No padding: every byte that the launch copies and the recorder reads is a field.
        const _: () = {
            #[allow(clippy::extra_unused_lifetimes, reason = "the types of pointer fields name it")]
            const fn fields<$life>() -> usize { 0 $(+ std::mem::size_of::<$type>())* }
            assert!(fields() == $size);
        };

        impl $crate::kernel::Params for $name<'_> {
            fn accepts(id: te_fast_kernels::KernelId) -> bool {
                matches!(id, $(te_fast_kernels::KernelId::$family { .. })|+)
            }

            fn run_host(&self, id: te_fast_kernels::KernelId) -> $crate::error::Result<()> {
                $run(self, id)
            }
        }
    };
}

/// Launch geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Thread blocks.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes; at most what the kernel's instance was loaded with.
    pub shared_bytes: u32,
    /// Blocks of a cluster, which divides `blocks[0]`; 1 for a launch without clusters.
    pub cluster: u32,
}

impl Grid {
    /// A one-dimensional grid without dynamic shared memory.
    #[must_use]
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared_bytes: 0, cluster: 1 }
    }

    /// The same with dynamic shared memory.
    #[must_use]
    pub const fn with_shared(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// The same in clusters of `blocks` blocks.
    #[must_use]
    pub const fn with_cluster(mut self, blocks: u32) -> Self {
        self.cluster = blocks;
        self
    }

    /// Whether there is nothing to launch.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.blocks[0] == 0 || self.blocks[1] == 0 || self.blocks[2] == 0
    }
}

/// Where launches run.
#[derive(Debug)]
pub enum Backend<'d> {
    /// One CUDA stream of one device, whose context is current.
    Cuda(CudaQueue<'d>),
    /// Rust kernels on this thread and rayon's.
    Host,
}

/// Where launches of one call go, in order.
#[derive(Debug)]
pub struct Target<'d> {
    /// The backend.
    pub backend: Backend<'d>,
    /// Who is told.
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
/// The driver's refusal of the launch, or what the host kernel found wrong.
#[inline]
pub fn launch<P: Params>(target: &mut Target<'_>, id: KernelId, grid: Grid, params: &P) -> Result<()> {
    debug_assert!(P::accepts(id), "{} does not take this parameter struct", id.symbol());
    if grid.is_empty() {
        return Ok(());
    }
    if !target.trace.on_launch(id, grid, as_bytes(params)) {
        return Ok(());
    }
    match &mut target.backend {
        Backend::Cuda(queue) => queue.launch(id, grid, std::ptr::from_ref(params).cast()),
        Backend::Host => params.run_host(id),
    }
}

/// The struct's bytes, as the recorder keeps them.
fn as_bytes<P: Params>(params: &P) -> &[u8] {
    // SAFETY: `params!` asserts that the struct has no padding, so every byte is initialised; the slice borrows it.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast(), std::mem::size_of::<P>()) }
}
