//! The CUDA driver: devices, contexts, kernels and launches.
//!
//! Calls go through cudarc's `sys` bindings, which resolve each function at its first use. [`driver`] makes sure
//! beforehand that there is a library and that it is new enough for the images, so nothing is missing later.
#![expect(unsafe_code, reason = "calls into the CUDA driver; every block names who guarantees its arguments")]

use std::ffi::{CStr, CString, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice_attribute, CUfunction, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue as Value, CUlibrary, CUresult, CUstream, CUstreamCaptureStatus,
};
use te_fast_kernels::{Image, KernelId, architectures, image_bytes};

use crate::driver_functions::FUNCTIONS;
use crate::error::{Error, ErrorKind, Result};
use crate::graph::CaptureStream;
use crate::kernel::{DevPtr, Grid};

/// First driver that loads machine code made by nvcc 13.0.
const MINIMUM_DRIVER: i32 = 13_000;

/// A CUDA stream; zero is the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

impl Stream {
    pub(crate) const fn raw(self) -> CUstream {
        self.0 as CUstream
    }
}

#[inline]
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(call, result)) }
}

#[cold]
#[inline(never)]
fn failure(call: &'static str, result: CUresult) -> Error {
    let mut text = std::ptr::null();
    // SAFETY: cuGetErrorString writes a pointer to a static string, or null for an unknown code.
    let _ = unsafe { sys::cuGetErrorString(result, &raw mut text) };
    let text = if text.is_null() {
        "unknown error".to_string()
    } else {
        // SAFETY: the driver returned a NUL-terminated string with static lifetime.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    ErrorKind::Driver { call, code: result as u32, text }.into()
}

fn no_driver(reason: impl Into<String>) -> Error {
    ErrorKind::NoDriver { reason: reason.into() }.into()
}

/// Initialises the driver once; the version it reports, as `13000` for 13.0.
///
/// # Errors
/// [`ErrorKind::NoDriver`] without a driver, without a GPU, or with a driver older than the images need.
pub fn driver() -> Result<i32> {
    static STATE: OnceLock<std::result::Result<i32, String>> = OnceLock::new();
    STATE.get_or_init(initialise).clone().map_err(no_driver)
}

fn initialise() -> std::result::Result<i32, String> {
    // SAFETY: only looks for the library; no CUDA function runs.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver library (libcuda.so.1) was found".into());
    }
    // SAFETY: the library was found.
    let library = unsafe { sys::culib() };
    let lacks = |name: &&CStr| {
        // SAFETY: the address is only looked up, never called.
        unsafe { library.get::<*const c_void>(name.to_bytes_with_nul()) }.is_err()
    };
    let missing: Vec<_> = FUNCTIONS.iter().copied().filter(lacks).collect();
    if missing.contains(&c"cuDriverGetVersion") {
        return Err("the CUDA driver library (libcuda.so.1) that was found has no cuDriverGetVersion; it is no driver, check LD_LIBRARY_PATH".into());
    }
    let mut version = 0;
    // SAFETY: cuDriverGetVersion may be called before cuInit and writes one integer.
    let result = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if result != CUresult::CUDA_SUCCESS {
        return Err(format!("cuDriverGetVersion failed with {}", result as u32));
    }
    if version < MINIMUM_DRIVER {
        return Err(format!(
            "the driver supports CUDA {}.{}, and te_fast's kernels need a driver for CUDA {}.{} (release 580) or newer; update the NVIDIA driver",
            version / 1000,
            version % 1000 / 10,
            MINIMUM_DRIVER / 1000,
            MINIMUM_DRIVER % 1000 / 10,
        ));
    }
    if let Some(name) = missing.first() {
        return Err(format!(
            "the CUDA driver library (libcuda.so.1) says that it supports CUDA {}.{} and lacks {}; it is incomplete, check LD_LIBRARY_PATH or install the NVIDIA driver again",
            version / 1000,
            version % 1000 / 10,
            name.to_string_lossy(),
        ));
    }
    // SAFETY: cuInit takes a flag that must be 0.
    let result = unsafe { sys::cuInit(0) };
    if result != CUresult::CUDA_SUCCESS {
        return Err(format!("cuInit failed with {} (no GPU, or none visible)", result as u32));
    }
    Ok(version)
}

/// Devices that the process sees.
///
/// # Errors
/// No usable driver.
pub fn device_count() -> Result<u32> {
    driver()?;
    let mut count = 0;
    // SAFETY: writes one integer; the driver is initialised.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
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

/// A device with its primary context and the kernels loaded so far.
#[derive(Debug)]
pub struct CudaDevice {
    facts: DeviceFacts,
    context: CUcontext,
    synchronise: bool,
    libraries: [Option<CUlibrary>; Image::ALL.len()],
    functions: Box<[Option<CUfunction>; KernelId::COUNT]>,
    variables: [Option<u64>; Image::ALL.len()],
    pub(crate) capture_stream: Option<CaptureStream>,
}

// SAFETY: driver handles (contexts, libraries, functions) are process-wide names, not memory of one thread, and the
// driver's functions may be called from any thread. What a call needs, its context being current, is established per
// call by `make_current`. The struct's own tables change only through &mut self.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; nothing is written through &self.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// Opens the device: retains the primary context that torch uses too.
    ///
    /// # Errors
    /// No usable driver, or no such device. `synchronise` makes every launch wait and report its own errors.
    pub fn open(ordinal: u16, synchronise: bool) -> Result<Self> {
        driver()?;
        let mut device = 0;
        // SAFETY: writes one device handle; the driver is initialised.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, i32::from(ordinal)) })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one context handle; retained for the life of the process, as torch does.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        let attribute = |attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: writes one integer for a valid device.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
            Ok(value as u32)
        };
        let facts = DeviceFacts {
            ordinal,
            capability: (
                attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            shared_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        };
        Ok(Self {
            facts,
            context,
            synchronise,
            libraries: [None; Image::ALL.len()],
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

    /// Makes this device's context current on this thread when it is not; the context to go back to.
    ///
    /// # Errors
    /// The driver's refusal.
    #[inline]
    pub fn make_current(&self) -> Result<Option<Context>> {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one context handle of this thread, null when there is none.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        if current == self.context {
            return Ok(None);
        }
        // SAFETY: the context was retained at opening and is never released.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })?;
        // A thread without a context stands on device 0, as the CUDA runtime counts; taking the context away from it
        // again would make torch set one up at its next call.
        Ok((!current.is_null() || self.facts.ordinal != 0).then_some(Context(current)))
    }

    fn function(&mut self, id: KernelId) -> Result<CUfunction> {
        if let Some(function) = self.functions[id.index()] {
            return Ok(function);
        }
        let library = self.library(id)?;
        let missing = |reason: String| Error::from(ErrorKind::KernelMissing { symbol: id.symbol(), reason });
        let name = CString::new(id.symbol()).map_err(|_| missing("its name holds a NUL".into()))?;
        let mut kernel = std::ptr::null_mut();
        // SAFETY: a loaded library and a NUL-terminated name; writes one handle.
        let result = unsafe { sys::cuLibraryGetKernel(&raw mut kernel, library, name.as_ptr()) };
        if result != CUresult::CUDA_SUCCESS {
            return Err(missing(failure("cuLibraryGetKernel", result).to_string()));
        }
        let mut function = std::ptr::null_mut();
        // SAFETY: a kernel of a loaded library; the device's context is current (Target's contract).
        check("cuKernelGetFunction", unsafe { sys::cuKernelGetFunction(&raw mut function, kernel) })?;
        let mut fixed = 0;
        // SAFETY: writes one integer for a valid function.
        check("cuFuncGetAttribute", unsafe {
            sys::cuFuncGetAttribute(&raw mut fixed, CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        })?;
        let dynamic = self.facts.shared_bytes as i32 - fixed;
        // SAFETY: the value is within the device's opt-in limit.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(
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
    pub fn variable(&mut self, id: KernelId, name: &CStr) -> Result<DevPtr<'static>> {
        let known = self.variables[id.image() as usize];
        let address = if let Some(address) = known { address } else { self.find_variable(id, name)? };
        // SAFETY: the image stays loaded for the life of the process, and only kernels touch its variables.
        Ok(unsafe { DevPtr::from_address(address) })
    }

    #[cold]
    fn find_variable(&mut self, id: KernelId, name: &CStr) -> Result<u64> {
        let library = self.library(id)?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: a loaded library and a NUL-terminated name; writes one address of the current context and a size.
        check("cuLibraryGetGlobal", unsafe {
            sys::cuLibraryGetGlobal(&raw mut address, &raw mut bytes, library, name.as_ptr())
        })?;
        self.variables[id.image() as usize] = Some(address);
        Ok(address)
    }

    fn library(&mut self, id: KernelId) -> Result<CUlibrary> {
        let image = id.image();
        if let Some(library) = self.libraries[image as usize] {
            return Ok(library);
        }
        let missing = |reason: String| Error::from(ErrorKind::KernelMissing { symbol: id.symbol(), reason });
        let bytes = image_bytes(image);
        if bytes.is_empty() {
            return Err(missing(
                "this wheel was built without CUDA (TE_FAST_SKIP_CUDA=1); install a wheel built with nvcc".into(),
            ));
        }
        let mut library = std::ptr::null_mut();
        let none = std::ptr::null_mut();
        // SAFETY: the image is a complete fatbin with static lifetime; no JIT or library options are passed.
        let result = unsafe {
            sys::cuLibraryLoadData(
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
        if result != CUresult::CUDA_SUCCESS {
            let (major, minor) = self.facts.capability;
            return Err(missing(format!(
                "{}; the GPU is sm_{major}{minor} and this wheel holds machine code for {:?}",
                failure("cuLibraryLoadData", result),
                architectures()
            )));
        }
        self.libraries[image as usize] = Some(library);
        Ok(library)
    }
}

/// A context to go back to after a switch.
#[derive(Debug)]
#[must_use]
pub struct Context(CUcontext);

impl Context {
    /// Makes it current again.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn restore(self) -> Result<()> {
        // SAFETY: it was current on this thread a moment ago, or null, which the driver accepts.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0) })
    }
}

/// A stream of a device whose context is current.
#[derive(Debug)]
pub struct CudaQueue<'d> {
    /// The device.
    pub device: &'d mut CudaDevice,
    /// The stream.
    pub stream: Stream,
}

impl CudaQueue<'_> {
    /// Launches `id` with the parameter struct at `params`.
    ///
    /// # Errors
    /// A kernel that is not in the images, or the driver's refusal.
    #[inline]
    pub fn launch(&mut self, id: KernelId, grid: Grid, params: *const c_void) -> Result<()> {
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
        // The kernel waits for the grids before it itself, so the launch need not: 0.5 us less on the host.
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
        let mut arguments = [params.cast_mut()];
        // SAFETY: `params` outlives the call, which copies it; `launch` in kernel.rs bound its type to `id`.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), std::ptr::null_mut())
        })?;
        if self.device.synchronise { self.synchronise() } else { Ok(()) }
    }

    /// Waits for the stream.
    ///
    /// # Errors
    /// What any earlier launch of the stream did wrong.
    #[cold]
    pub fn synchronise(&self) -> Result<()> {
        // SAFETY: a stream of the current context.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream.raw()) })
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
    pub fn zero(&self, memory: DevPtr<'_>, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's buffer holds `bytes` bytes on this device.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(memory.address() as u64, 0, bytes, self.stream.raw()) })
    }
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
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a valid stream handle of the current context; writes one status.
    check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream.raw(), &raw mut status) })?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Makes `waiting` wait for everything that `finished` has been given so far.
///
/// # Errors
/// The driver's refusal.
#[cold]
pub fn wait_for(waiting: Stream, finished: Stream) -> Result<()> {
    let mut event = std::ptr::null_mut();
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: writes one event handle; a context is current.
    check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
    // SAFETY: a live event and a stream that torch keeps for the life of the process; one that a user brought to torch
    // (ExternalStream) has to live as long as the layers that ran on it, as torch asks for its tensors, too.
    let recorded = check("cuEventRecord", unsafe { sys::cuEventRecord(event, finished.raw()) });
    let waited = recorded.and_then(|()| {
        // SAFETY: the same event, and a stream of the current context.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(waiting.raw(), event, 0) })
    });
    // SAFETY: created above, destroyed once; the driver keeps it until the wait is over.
    let _ = unsafe { sys::cuEventDestroy_v2(event) };
    waited
}
