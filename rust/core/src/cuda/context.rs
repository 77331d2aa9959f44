//! Devices' primary contexts, which torch uses, too, and the current context of a thread.
#![expect(unsafe_code, reason = "calls into the CUDA driver; every block names who guarantees its arguments")]

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute};

use crate::base::error::Result;
use crate::cuda::functions::{check, functions};

/// The device of an ordinal among the process's visible devices.
///
/// # Errors
/// No usable driver, or no such device.
pub(crate) fn device_of(ordinal: u16) -> Result<CUdevice> {
    let mut device = 0;
    // SAFETY: writes one device handle; the driver is initialised.
    check("cuDeviceGet", unsafe { (functions()?.cuDeviceGet)(&raw mut device, i32::from(ordinal)) })?;
    Ok(device)
}

/// A fact of a device.
///
/// # Errors
/// No usable driver, or no such device.
pub(crate) fn attribute_of(ordinal: u16, attribute: CUdevice_attribute) -> Result<u32> {
    let device = device_of(ordinal)?;
    let mut value = 0;
    // SAFETY: writes one integer for a valid device.
    check("cuDeviceGetAttribute", unsafe { (functions()?.cuDeviceGetAttribute)(&raw mut value, attribute, device) })?;
    Ok(value as u32)
}

/// Its compute capability, major and minor.
///
/// # Errors
/// No usable driver, or no such device.
pub(crate) fn capability_of(ordinal: u16) -> Result<(u32, u32)> {
    Ok((
        attribute_of(ordinal, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute_of(ordinal, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

/// This thread's context; null for none.
fn current() -> Result<CUcontext> {
    let mut current = std::ptr::null_mut();
    // SAFETY: writes one context handle of this thread, null when there is none.
    check("cuCtxGetCurrent", unsafe { (functions()?.cuCtxGetCurrent)(&raw mut current) })?;
    Ok(current)
}

/// # Safety
/// The context is null, or one that is not destroyed.
unsafe fn set_current(context: CUcontext) -> Result<()> {
    // SAFETY: the caller's promise; the driver accepts null.
    check("cuCtxSetCurrent", unsafe { (functions()?.cuCtxSetCurrent)(context) })
}

/// A device's primary context; it belongs to the process, not to a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrimaryContext(usize);

impl PrimaryContext {
    /// The primary context of a device, retained for the life of the process, as torch does.
    ///
    /// # Errors
    /// No usable driver, or no such device.
    pub(crate) fn retain(ordinal: u16) -> Result<Self> {
        let device = device_of(ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: a device of this process; writes one context handle.
        check("cuDevicePrimaryCtxRetain", unsafe {
            (functions()?.cuDevicePrimaryCtxRetain)(&raw mut context, device)
        })?;
        Ok(Self(context as usize))
    }

    /// The current context of this thread. torch or te_fast made it current, and retains it for the life of the
    /// process.
    ///
    /// # Errors
    /// The driver's refusal.
    pub(crate) fn current() -> Result<Self> {
        Ok(Self(current()? as usize))
    }

    /// Makes the context current on this thread if it is not; returns the context to restore.
    ///
    /// # Errors
    /// The driver's refusal.
    #[inline]
    pub(crate) fn make_current(self) -> Result<Option<Context>> {
        let former = current()?;
        if former as usize == self.0 {
            return Ok(None);
        }
        // SAFETY: retained and never released.
        unsafe { set_current(self.0 as CUcontext) }?;
        Ok(Some(Context(former)))
    }

    /// Runs `body` in this context, on a thread that may have another context or none.
    ///
    /// # Errors
    /// The error of `body`, or the driver's refusal.
    pub(crate) fn with<T>(self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let former = self.make_current()?;
        let result = body();
        if let Some(former) = former {
            former.restore()?;
        }
        result
    }
}

/// A context to restore after a switch.
#[derive(Debug)]
#[must_use]
pub struct Context(CUcontext);

impl Context {
    /// Whether the thread had no context.
    pub(crate) const fn is_none(&self) -> bool {
        self.0.is_null()
    }

    /// Makes this context current again.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn restore(self) -> Result<()> {
        // SAFETY: it was current on this thread a moment ago, or null.
        unsafe { set_current(self.0) }
    }
}
