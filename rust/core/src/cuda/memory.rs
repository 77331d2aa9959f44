//! The dispatcher's private device memory, outside of torch's allocator.
#![expect(unsafe_code, reason = "calls into the CUDA driver that own the memory they name")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::cuda::context::PrimaryContext;
use crate::cuda::device::CudaQueue;
use crate::cuda::functions::{check, functions};

/// Device memory that te_fast owns for as long as the process runs or the value lives.
#[derive(Debug)]
pub struct DeviceBuffer {
    address: u64,
    bytes: usize,
    context: PrimaryContext,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes on the current device.
    ///
    /// # Errors
    /// Out of memory, or a capture in progress that forbids allocation.
    pub fn allocate(bytes: usize) -> Result<Self> {
        let context = PrimaryContext::current()?;
        let mut address = 0;
        // SAFETY: writes one device address; the device's context is current.
        check("cuMemAlloc", unsafe { (functions()?.cuMemAlloc_v2)(&raw mut address, bytes.max(1)) })?;
        Ok(Self { address, bytes, context })
    }

    /// Bytes allocated.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Fills it with zero, in the queue's order.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn zero(&self, queue: &CudaQueue<'_>) -> Result<()> {
        queue.zero(self.ptr(), self.bytes)
    }

    /// Its first byte.
    #[must_use]
    pub fn ptr(&self) -> DevPtr<'_> {
        // SAFETY: the allocation lives as long as self, which the pointer borrows.
        unsafe { DevPtr::from_address(self.address) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // The context is made current, since any thread may drop the memory and the driver frees nothing without a
        // context. An error at process end, when the driver is gone, is ignored.
        let _ = self.context.with(|| {
            // SAFETY: allocated in `allocate`, freed once; its context is current. cuMemFree waits for work that uses it.
            check("cuMemFree", unsafe { (functions()?.cuMemFree_v2)(self.address) })
        });
    }
}

static ANY_RETIRED: AtomicBool = AtomicBool::new(false);
static RETIRED: Mutex<Vec<DeviceBuffer>> = Mutex::new(Vec::new());

/// Memory that larger memory has replaced, until [`take_retired`]. Freeing it waits for the device, which must not
/// happen in the middle of a call.
#[cold]
pub(crate) fn retire(buffer: DeviceBuffer) {
    RETIRED.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    ANY_RETIRED.store(true, Ordering::Release);
}

/// The memory that was retired since the last call of this function; drop it where a wait for the device does no harm.
#[inline]
#[must_use]
pub fn take_retired() -> Vec<DeviceBuffer> {
    if ANY_RETIRED.load(Ordering::Relaxed) { take_all_retired() } else { Vec::new() }
}

#[cold]
fn take_all_retired() -> Vec<DeviceBuffer> {
    ANY_RETIRED.store(false, Ordering::Relaxed);
    std::mem::take(&mut *RETIRED.lock().unwrap_or_else(PoisonError::into_inner))
}
