//! The CUDA driver: devices, contexts, kernels and launches.
#![expect(unsafe_code, reason = "calls into the CUDA driver; every block names who guarantees its arguments")]

use std::ffi::CStr;

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUfunction, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue as Value, CUstream,
};
use te_fast_kernels::{Image, KernelId, image_bytes};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::pointer::DevPtr;
pub use crate::cuda::context::Context;
use crate::cuda::context::{PrimaryContext, attribute_of, capability_of};
use crate::cuda::functions::{Functions, check, driver as initialised, functions};
use crate::cuda::images;
use crate::cuda::zeroed::ZeroedCounters;
use crate::launch::grid::Grid;
use crate::launch::params::Params;

/// A CUDA stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub(crate) u64);

impl Stream {
    /// The legacy default stream.
    pub const DEFAULT: Self = Self(0);

    /// The stream of a driver's or runtime's handle.
    ///
    /// # Safety
    /// The handle is 0, or belongs to a stream that lives as long as this value is used: the driver reads memory behind
    /// it.
    #[must_use]
    pub const unsafe fn from_raw(handle: u64) -> Self {
        Self(handle)
    }

    pub(crate) const fn raw(self) -> CUstream {
        self.0 as CUstream
    }

    /// The driver's handle.
    #[must_use]
    pub const fn handle(self) -> u64 {
        self.0
    }
}

/// Initialises the driver once; the version it reports, as `13000` for 13.0.
///
/// # Errors
/// [`ErrorKind::NoDriver`] without a driver, without a GPU, or with a driver older than the images need.
pub fn driver() -> Result<i32> {
    Ok(initialised()?.version)
}

/// `CU_STREAM_CAPTURE_STATUS_NONE`.
const NOT_CAPTURING: u32 = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;

/// Devices that the process sees.
///
/// # Errors
/// No usable driver.
pub fn device_count() -> Result<u32> {
    let mut count = 0;
    // SAFETY: writes one integer; the driver is initialised.
    check("cuDeviceGetCount", unsafe { (functions()?.cuDeviceGetCount)(&raw mut count) })?;
    Ok(count as u32)
}

/// Facts of a device, read once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Ordinal among the visible devices.
    pub ordinal: u16,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u32,
    /// Shared memory that one block may take, bytes.
    pub shared_bytes: u32,
}

/// The compute capability of GPUs for which some kernels are made alone.
pub(crate) const HOPPER: (u32, u32) = (9, 0);

impl DeviceFacts {
    /// Whether it has the kernels that are made for Hopper alone.
    #[must_use]
    pub fn is_hopper(&self) -> bool {
        self.capability == HOPPER
    }
}

/// A device with its primary context and the kernels loaded so far.
#[derive(Debug)]
pub struct CudaDevice {
    facts: DeviceFacts,
    calls: &'static Functions,
    context: PrimaryContext,
    synchronise: bool,
    functions: Box<[Option<CUfunction>; KernelId::COUNT]>,
    variables: [Option<u64>; Image::ALL.len()],
    /// A private stream for captures, since the legacy default stream cannot be captured.
    capture_stream: Option<Stream>,
}

// SAFETY: driver handles (contexts, libraries, functions) are process-wide names, not memory of one thread, and the
// driver's functions may be called from any thread. What a call needs, its context being current, is established per
// call by `make_current`. The struct's own tables change only through &mut self.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; nothing is written through &self.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// Opens the device: retains the primary context, which torch uses, too.
    ///
    /// # Errors
    /// No usable driver, or no such device. `synchronise` makes every launch wait and report its own errors.
    pub fn open(ordinal: u16, synchronise: bool) -> Result<Self> {
        let calls = functions()?;
        let context = PrimaryContext::retain(ordinal)?;
        let attribute = |which| attribute_of(ordinal, which);
        let facts = DeviceFacts {
            ordinal,
            capability: capability_of(ordinal)?,
            multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            shared_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        };
        Ok(Self {
            facts,
            calls,
            context,
            synchronise,
            functions: Box::new([None; KernelId::COUNT]),
            variables: [None; Image::ALL.len()],
            capture_stream: None,
        })
    }

    /// Facts read at opening.
    #[must_use]
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Makes this device's context current on this thread if it is not; returns the context to restore.
    ///
    /// # Errors
    /// The driver's refusal.
    #[inline]
    pub fn make_current(&self) -> Result<Option<Context>> {
        let former = self.context.make_current()?;
        // For the CUDA runtime, a thread without a context uses device 0. If the context were removed again, torch
        // would set one up at its next call.
        Ok(former.filter(|former| !former.is_none() || self.facts.ordinal != 0))
    }

    #[cold]
    fn function(&mut self, id: KernelId) -> Result<CUfunction> {
        let function = images::function(id).map_err(|error| self.not_here(id, error))?;
        let mut fixed = 0;
        // SAFETY: writes one integer for a valid function.
        check("cuFuncGetAttribute", unsafe {
            (self.calls.cuFuncGetAttribute)(
                &raw mut fixed,
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                function,
            )
        })?;
        let dynamic = self.facts.shared_bytes as i32 - fixed;
        // SAFETY: the value is within the device's opt-in limit.
        check("cuFuncSetAttribute", unsafe {
            (self.calls.cuFuncSetAttribute)(
                function,
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic,
            )
        })?;
        self.functions[id.index()] = Some(function);
        Ok(function)
    }

    /// The one device variable, `name`, of the image that holds `id`; zero before its first use.
    ///
    /// # Errors
    /// An image that cannot be loaded.
    #[inline]
    pub(crate) fn variable(&mut self, id: KernelId, name: &CStr) -> Result<DevPtr<'static>> {
        let known = self.variables[id.image() as usize];
        let address = if let Some(address) = known { address } else { self.find_variable(id, name)? };
        // SAFETY: the image stays loaded for the life of the process, and only kernels touch its variables.
        Ok(unsafe { DevPtr::from_address(address) })
    }

    #[cold]
    fn find_variable(&mut self, id: KernelId, name: &CStr) -> Result<u64> {
        let library = images::library(id)?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: a loaded library and a NUL-terminated name; writes one address of the current context and a size.
        check("cuLibraryGetGlobal", unsafe {
            (self.calls.cuLibraryGetGlobal)(&raw mut address, &raw mut bytes, library, name.as_ptr())
        })?;
        self.variables[id.image() as usize] = Some(address);
        Ok(address)
    }

    /// The stream that launches are captured on.
    ///
    /// # Errors
    /// The driver's refusal.
    pub(crate) fn capture_stream(&mut self) -> Result<Stream> {
        if let Some(stream) = self.capture_stream {
            return Ok(stream);
        }
        Ok(*self.capture_stream.insert(new_stream()?))
    }

    /// A kernel's error with the device that it is missing on.
    fn not_here(&self, id: KernelId, error: Error) -> Error {
        let (major, minor) = self.facts.capability;
        match error.kind() {
            ErrorKind::KernelMissing { reason, .. } if !image_bytes(id.image()).is_empty() => {
                let reason = format!("{reason}; the GPU is sm_{major}{minor}");
                ErrorKind::KernelMissing { symbol: id.symbol(), reason }.into()
            }
            _ => error,
        }
    }
}

/// A stream of a device whose context is current.
#[derive(Debug)]
pub struct CudaQueue<'d> {
    /// The device.
    pub device: &'d mut CudaDevice,
    /// The stream.
    pub stream: Stream,
    /// The stream's counters; none for launches without private memory.
    pub zeroed: Option<&'d mut ZeroedCounters>,
}

impl CudaQueue<'_> {
    /// Launches `id` with `params`, which must be the kernel's struct.
    ///
    /// # Errors
    /// A kernel that is not in the images, or the driver's refusal.
    #[inline]
    pub(crate) fn launch<P: Params>(&mut self, id: KernelId, grid: Grid, params: &P) -> Result<()> {
        let function = match self.device.functions[id.index()] {
            Some(function) => function,
            None => self.device.function(id)?,
        };
        let [x, y, z] = grid.blocks;
        let attribute = |id, value| CUlaunchAttribute { id, pad: [0; 4], value };
        let serial = Value { programmaticStreamSerializationAllowed: 1 };
        let cluster =
            Value { clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: grid.cluster, y: 1, z: 1 } };
        let mut attributes = [
            attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, serial),
            attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cluster),
        ];
        // The kernel itself waits for prior grids, so the launch need not, which saves 0.5 us on the host.
        let early = id.waits_for_prior_grids() && self.device.facts.capability.0 >= 9;
        let used = &mut attributes[usize::from(!early)..=usize::from(grid.cluster > 1)];
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: self.stream.raw(),
            attrs: used.as_mut_ptr(),
            numAttrs: used.len() as u32,
        };
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast()];
        // SAFETY: `params` outlives the call, which copies it; `launch` in target.rs bound its type to `id`, and the plan
        // that filled it checked the sizes of what it points at.
        check("cuLaunchKernelEx", unsafe {
            (self.device.calls.cuLaunchKernelEx)(
                &raw const config,
                function,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })?;
        if self.device.synchronise { self.synchronise() } else { Ok(()) }
    }

    /// Waits for the stream.
    ///
    /// # Errors
    /// The error of any earlier launch of the stream.
    #[cold]
    pub fn synchronise(&self) -> Result<()> {
        // SAFETY: a stream of the current context.
        check("cuStreamSynchronize", unsafe { (self.device.calls.cuStreamSynchronize)(self.stream.raw()) })
    }

    /// Whether a CUDA graph is being captured on the stream.
    ///
    /// # Errors
    /// The driver's refusal.
    #[inline]
    pub fn is_capturing(&self) -> Result<bool> {
        is_capturing(self.stream)
    }

    /// Fills `bytes` bytes with zero, in stream order.
    ///
    /// # Errors
    /// The driver's refusal.
    pub(crate) fn zero(&self, memory: DevPtr<'_>, bytes: usize) -> Result<()> {
        if bytes == 0 { Ok(()) } else { fill_with_zero(self.stream, memory.address() as u64, bytes) }
    }
}

/// Fills memory of the stream's device with zero, in stream order. The caller owns the memory.
///
/// # Errors
/// The driver's refusal.
pub(crate) fn fill_with_zero(stream: Stream, address: u64, bytes: usize) -> Result<()> {
    // SAFETY: the caller's buffer holds `bytes` bytes on the device of the stream, whose context is current.
    check("cuMemsetD8Async", unsafe { (functions()?.cuMemsetD8Async)(address, 0, bytes, stream.raw()) })
}

/// A stream of the current context that nobody else uses. It lives as long as the process.
///
/// # Errors
/// The driver's refusal.
pub fn new_stream() -> Result<Stream> {
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: writes one stream handle; a context is current.
    check("cuStreamCreate", unsafe { (functions()?.cuStreamCreate)(&raw mut stream, flags) })?;
    Ok(Stream(stream as u64))
}

/// Whether a CUDA graph is being captured on the stream; the legacy default stream cannot be captured.
///
/// # Errors
/// The driver's refusal.
#[inline]
pub fn is_capturing(stream: Stream) -> Result<bool> {
    if stream.0 == 0 {
        return Ok(false);
    }
    let mut status = NOT_CAPTURING;
    // SAFETY: a valid stream handle of the current context; writes one status.
    check("cuStreamIsCapturing", unsafe { (functions()?.cuStreamIsCapturing)(stream.raw(), &raw mut status) })?;
    Ok(status != NOT_CAPTURING)
}

/// Makes `waiting` wait for all work of `finished` so far.
///
/// # Errors
/// The driver's refusal.
#[cold]
pub fn wait_for(waiting: Stream, finished: Stream) -> Result<()> {
    let calls = functions()?;
    let mut event = std::ptr::null_mut();
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: writes one event handle; a context is current.
    check("cuEventCreate", unsafe { (calls.cuEventCreate)(&raw mut event, flags) })?;
    // SAFETY: a live event and a stream that torch keeps for the life of the process; one that a user brought to torch
    // (ExternalStream) has to live as long as the layers that ran on it, as torch asks for its tensors, too.
    let recorded = check("cuEventRecord", unsafe { (calls.cuEventRecord)(event, finished.raw()) });
    let waited = recorded.and_then(|()| {
        // SAFETY: the same event, and a stream of the current context.
        check("cuStreamWaitEvent", unsafe { (calls.cuStreamWaitEvent)(waiting.raw(), event, 0) })
    });
    // SAFETY: created above, destroyed once; the driver keeps it until the wait is over.
    let _ = unsafe { (calls.cuEventDestroy_v2)(event) };
    waited
}
