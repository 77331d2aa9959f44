//! The CUDA driver's functions that te_fast calls, looked up once through the library's handle.
//!
//! cudarc has the driver's types. te_fast does not call cudarc's functions, because they return an enum: a status of a
//! newer driver that cudarc does not know would be undefined behaviour. Here all statuses are integers.
#![expect(
    unsafe_code,
    reason = "looks functions up and calls those that come before a device; every block says why it may"
)]

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr,
    CUevent, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec, CUgraphNode, CUhostFn, CUjit_option, CUkernel,
    CUlaunchConfig, CUlibrary, CUlibraryOption, CUstream, CUstreamCaptureMode, CUtensorMap, CUuserObject,
};

use crate::base::error::{Error, ErrorKind, Result};

/// First driver that loads machine code made by nvcc 13.0.
const MINIMUM_DRIVER: i32 = 13_000;

/// `CUresult` as an integer.
pub(crate) type Status = u32;

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: Status = 0;

macro_rules! functions {
    ($($name:ident($($type:ty),*),)*) => {
        /// Pointers to the driver's functions, by their names; arguments are those of cuda.h.
        #[derive(Debug)]
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> Status,)*
        }

        impl Functions {
            /// All functions, or the name of the first that `library` lacks.
            #[expect(non_snake_case, reason = "the driver's names")]
            fn find(library: &Library<'_>) -> std::result::Result<Self, &'static str> {
                $(
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: the type is the one that cuda.h declares for this name, statuses as their integers.
                    let $name = unsafe { library.get(name) }.ok_or(stringify!($name))?;
                )*
                Ok(Self { $($name,)* })
            }
        }
    };
}

functions! {
    cuCtxGetCurrent(*mut CUcontext),
    cuCtxSetCurrent(CUcontext),
    cuDeviceGet(*mut CUdevice, c_int),
    cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice),
    cuDeviceGetCount(*mut c_int),
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice),
    cuEventCreate(*mut CUevent, c_uint),
    cuEventDestroy_v2(CUevent),
    cuEventRecord(CUevent, CUstream),
    cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction),
    cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize),
    cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int),
    cuGetErrorString(Status, *mut *const c_char),
    cuGraphDestroy(CUgraph),
    cuGraphExecDestroy(CUgraphExec),
    cuGraphGetEdges(CUgraph, *mut CUgraphNode, *mut CUgraphNode, *mut usize),
    cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize),
    cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong),
    cuGraphKernelNodeGetAttribute(CUgraphNode, c_uint, *mut c_void),
    cuGraphKernelNodeGetParams_v2(CUgraphNode, *mut CUDA_KERNEL_NODE_PARAMS),
    cuGraphLaunch(CUgraphExec, CUstream),
    cuGraphMemsetNodeGetParams(CUgraphNode, *mut CUDA_MEMSET_NODE_PARAMS),
    cuGraphNodeGetType(CUgraphNode, *mut c_uint),
    cuGraphRetainUserObject(CUgraph, CUuserObject, c_uint, c_uint),
    cuInit(c_uint),
    cuKernelGetFunction(*mut CUfunction, CUkernel),
    cuKernelGetParamInfo(CUkernel, usize, *mut usize, *mut usize),
    cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void),
    cuLibraryGetGlobal(*mut CUdeviceptr, *mut usize, CUlibrary, *const c_char),
    cuLibraryGetKernel(*mut CUkernel, CUlibrary, *const c_char),
    cuLibraryLoadData(
        *mut CUlibrary,
        *const c_void,
        *mut CUjit_option,
        *mut *mut c_void,
        c_uint,
        *mut CUlibraryOption,
        *mut *mut c_void,
        c_uint
    ),
    cuMemAlloc_v2(*mut CUdeviceptr, usize),
    cuMemFree_v2(CUdeviceptr),
    cuMemsetD32Async(CUdeviceptr, c_uint, usize, CUstream),
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream),
    cuPointerGetAttribute(*mut c_void, c_uint, CUdeviceptr),
    cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode),
    cuStreamCreate(*mut CUstream, c_uint),
    cuStreamEndCapture(CUstream, *mut CUgraph),
    cuStreamGetCaptureInfo_v2(
        CUstream,
        *mut c_uint,
        *mut c_ulonglong,
        *mut CUgraph,
        *mut *const CUgraphNode,
        *mut usize
    ),
    cuStreamIsCapturing(CUstream, *mut c_uint),
    cuStreamSynchronize(CUstream),
    cuStreamWaitEvent(CUstream, CUevent, c_uint),
    cuTensorMapEncodeTiled(
        *mut CUtensorMap,
        c_uint,
        c_uint,
        *mut c_void,
        *const u64,
        *const u64,
        *const u32,
        *const u32,
        c_uint,
        c_uint,
        c_uint,
        c_uint
    ),
    cuUserObjectCreate(*mut CUuserObject, *mut c_void, CUhostFn, c_uint, c_uint),
    cuUserObjectRelease(CUuserObject, c_uint),
}

/// The driver's library.
struct Library<'a>(&'a dyn Fn(&str) -> Option<*const c_void>);

impl Library<'_> {
    /// The function of this name, which ends in NUL.
    ///
    /// # Safety
    /// `F` is the type of a pointer to it.
    unsafe fn get<F: Copy>(&self, name: &str) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
        let address = (self.0)(name)?;
        // SAFETY: an address that is not null, of as many bytes; the caller's promise of the type.
        Some(unsafe { std::mem::transmute_copy(&address) })
    }
}

/// The driver once it is initialised.
#[derive(Debug)]
pub(crate) struct Driver {
    /// The driver's version, `13000` for 13.0.
    pub(crate) version: i32,
    /// Its functions.
    pub(crate) functions: Functions,
}

/// The driver, initialised at first use.
///
/// # Errors
/// [`ErrorKind::NoDriver`] without a driver, without a GPU, or with a driver older than the images need.
#[inline]
pub(crate) fn driver() -> Result<&'static Driver> {
    static STATE: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
    STATE.get_or_init(initialise).as_ref().map_err(|reason| no_driver(reason))
}

/// The driver's functions, as [`driver`] finds them.
///
/// # Errors
/// No usable driver.
#[inline]
pub(crate) fn functions() -> Result<&'static Functions> {
    Ok(&driver()?.functions)
}

#[cold]
fn no_driver(reason: &str) -> Error {
    ErrorKind::NoDriver { reason: reason.into() }.into()
}

fn initialise() -> std::result::Result<Driver, String> {
    // SAFETY: only looks for the library; no CUDA function runs.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver library (libcuda.so.1) was found".into());
    }
    // SAFETY: the library was found. It is never unloaded.
    let handle = unsafe { sys::culib() };
    let address = |name: &str| {
        // SAFETY: the address is only looked up; its type comes with the name in `functions!`.
        let found = unsafe { handle.get::<*const c_void>(name.as_bytes()) }.ok()?;
        (!found.is_null()).then_some(*found)
    };
    let library = Library(&address);
    // SAFETY: the type that cuda.h declares.
    let get_version = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> Status>("cuDriverGetVersion\0") };
    let Some(get_version) = get_version else {
        return Err("the CUDA driver library (libcuda.so.1) that was found has no cuDriverGetVersion; it is no driver, check LD_LIBRARY_PATH".into());
    };
    let mut version = 0;
    // SAFETY: cuDriverGetVersion may be called before cuInit and writes one integer.
    let status = unsafe { get_version(&raw mut version) };
    if status != SUCCESS {
        return Err(format!("cuDriverGetVersion failed with {status}"));
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
    let functions = Functions::find(&library).map_err(|name| {
        format!(
            "the CUDA driver library (libcuda.so.1) says that it supports CUDA {}.{} and lacks {name}; it is incomplete, check LD_LIBRARY_PATH or install the NVIDIA driver again",
            version / 1000,
            version % 1000 / 10,
        )
    })?;
    // SAFETY: cuInit takes a flag that must be 0.
    let status = unsafe { (functions.cuInit)(0) };
    if status != SUCCESS {
        return Err(format!("cuInit failed with {status} (no GPU, or none visible)"));
    }
    Ok(Driver { version, functions })
}

/// An error unless the driver's `call` succeeded.
///
/// # Errors
/// [`ErrorKind::Driver`] with the status and the driver's words for it.
#[inline]
pub(crate) fn check(call: &'static str, status: Status) -> Result<()> {
    if status == SUCCESS { Ok(()) } else { Err(failure(call, status)) }
}

#[cold]
#[inline(never)]
pub(crate) fn failure(call: &'static str, status: Status) -> Error {
    ErrorKind::Driver { call, code: status, text: words(status).unwrap_or_else(|| "unknown error".into()) }.into()
}

/// The driver's text for a status; none for an unknown status.
fn words(status: Status) -> Option<String> {
    let mut text = std::ptr::null();
    let functions = functions().ok()?;
    // SAFETY: writes a pointer to a static string, or null for an unknown status.
    let _ = unsafe { (functions.cuGetErrorString)(status, &raw mut text) };
    if text.is_null() {
        return None;
    }
    // SAFETY: the driver returned a NUL-terminated string with static lifetime.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
