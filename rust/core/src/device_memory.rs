//! Device memory that the dispatcher keeps for itself, apart from torch's allocator.
#![expect(unsafe_code, reason = "calls into the CUDA driver that own the memory they name")]

use cudarc::driver::sys;

use crate::driver::check;
use crate::error::Result;
use crate::kernel::DevPtr;

/// Device memory that te_fast owns for as long as the process runs or the value lives.
#[derive(Debug)]
pub struct DeviceBuffer {
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes on the current device.
    ///
    /// # Errors
    /// Out of memory, or a capture in progress that forbids allocation.
    pub fn allocate(bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: writes one device address; the device's context is current.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1)) })?;
        Ok(Self { address, bytes })
    }

    /// Bytes allocated.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
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
        // SAFETY: allocated in `allocate`, freed once. cuMemFree waits for work that uses it; an error at process end,
        // when the driver is gone, leaves nothing to do.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}
