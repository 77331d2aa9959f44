//! The CUDA driver's functions that te_fast calls: [`crate::driver`] looks for all of them before it calls any.

use std::ffi::CStr;

/// Every driver function that te_fast calls: bindings resolve each at its first use and panic without it.
pub(crate) const FUNCTIONS: [&CStr; 32] = [
    c"cuCtxGetCurrent",
    c"cuCtxSetCurrent",
    c"cuDeviceGet",
    c"cuDeviceGetAttribute",
    c"cuDeviceGetCount",
    c"cuDevicePrimaryCtxRetain",
    c"cuDriverGetVersion",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuFuncGetAttribute",
    c"cuFuncSetAttribute",
    c"cuGetErrorString",
    c"cuGraphDestroy",
    c"cuGraphExecDestroy",
    c"cuGraphInstantiateWithFlags",
    c"cuGraphLaunch",
    c"cuInit",
    c"cuKernelGetFunction",
    c"cuLaunchKernelEx",
    c"cuLibraryGetGlobal",
    c"cuLibraryGetKernel",
    c"cuLibraryLoadData",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemsetD8Async",
    c"cuStreamBeginCapture_v2",
    c"cuStreamCreate",
    c"cuStreamEndCapture",
    c"cuStreamIsCapturing",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
];

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    #[test]
    fn every_function_that_is_called_is_looked_for() {
        let sources = [include_str!("driver.rs"), include_str!("device_memory.rs"), include_str!("graph.rs")];
        let called = sources.into_iter().flat_map(|source| source.split("sys::cu").skip(1));
        for rest in called.filter(|rest| rest.starts_with(char::is_uppercase)) {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            let name = CString::new(format!("cu{}", &rest[..end])).unwrap_or_default();
            assert!(FUNCTIONS.contains(&name.as_c_str()), "{name:?}");
        }
    }
}
