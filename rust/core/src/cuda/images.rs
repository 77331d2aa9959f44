//! Images of machine code: each is loaded once per process, for all devices.
#![expect(unsafe_code, reason = "calls into the CUDA driver; every block names who guarantees its arguments")]

use std::ffi::CString;
use std::sync::OnceLock;

use cudarc::driver::sys::{CUfunction, CUkernel, CUlibrary};
use te_fast_kernels::{Image, KernelId, architectures, image_bytes};

use crate::base::error::{Error, ErrorKind, Result};
use crate::cuda::context::{PrimaryContext, capability_of};
use crate::cuda::device::HOPPER;
use crate::cuda::functions::{SUCCESS, check, failure, functions};

/// The kernel's image, loaded at first use. A failure is tried again at the next one.
///
/// # Errors
/// A build without images, an image without machine code for any GPU here, or the driver's refusal.
pub(crate) fn library(id: KernelId) -> Result<CUlibrary> {
    // Handles are never 0. No thread waits for another thread's load, since a load may wait for the device. If two
    // threads load at once, the later copy is not used.
    static LIBRARIES: [OnceLock<usize>; Image::ALL.len()] = [const { OnceLock::new() }; Image::ALL.len()];
    let known = &LIBRARIES[id.image() as usize];
    if let Some(&library) = known.get() {
        return Ok(library as CUlibrary);
    }
    let library = load(id)? as usize;
    Ok(*known.get_or_init(|| library) as CUlibrary)
}

fn missing(id: KernelId, reason: String) -> Error {
    ErrorKind::KernelMissing { symbol: id.symbol(), reason }.into()
}

#[cold]
fn load(id: KernelId) -> Result<CUlibrary> {
    let bytes = image_bytes(id.image());
    if bytes.is_empty() {
        let reason = "this wheel was built without CUDA (TE_FAST_SKIP_CUDA=1); install a wheel built with nvcc";
        return Err(missing(id, reason.into()));
    }
    let load = functions()?.cuLibraryLoadData;
    let mut library = std::ptr::null_mut();
    let none = std::ptr::null_mut();
    // SAFETY: the image is a complete fatbin with static lifetime; no JIT or library options are passed.
    let status = unsafe {
        load(
            &raw mut library,
            bytes.as_ptr().cast(),
            none,
            std::ptr::null_mut(),
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            0,
        )
    };
    if status == SUCCESS {
        return Ok(library);
    }
    let words = failure("cuLibraryLoadData", status);
    Err(missing(id, format!("{words}; this wheel holds machine code for {:?}", architectures())))
}

/// The kernel's function in the current context, into which its machine code goes now.
///
/// # Errors
/// As [`library`]; an image without the kernel, or without machine code for this device.
pub(crate) fn function(id: KernelId) -> Result<CUfunction> {
    let calls = functions()?;
    let library = library(id)?;
    let name = CString::new(id.symbol()).map_err(|_| missing(id, "its name holds a NUL".into()))?;
    let mut kernel: CUkernel = std::ptr::null_mut();
    // SAFETY: a loaded library and a NUL-terminated name; writes one handle.
    let status = unsafe { (calls.cuLibraryGetKernel)(&raw mut kernel, library, name.as_ptr()) };
    if status != SUCCESS {
        return Err(missing(id, failure("cuLibraryGetKernel", status).to_string()));
    }
    let mut function = std::ptr::null_mut();
    // SAFETY: a kernel of a loaded library; a device's context is current (Target's contract, or `load_kernels`).
    check("cuKernelGetFunction", unsafe { (calls.cuKernelGetFunction)(&raw mut function, kernel) })?;
    Ok(function)
}

/// Loads every kernel onto a device that has it, and returns their number. It needs no dispatcher, so that other
/// threads may run meanwhile.
///
/// # Errors
/// No usable driver, no such device, or a build without images.
pub fn load_kernels(ordinal: u16) -> Result<usize> {
    let capability = capability_of(ordinal)?;
    PrimaryContext::retain(ordinal)?.with(|| {
        KernelId::all().filter(|id| !id.image().is_hopper_only() || capability == HOPPER).try_fold(0, |count, id| {
            function(id)?;
            Ok(count + 1)
        })
    })
}
