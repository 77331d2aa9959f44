//! cuBLASLt, usually the copy that torch has loaded: its functions, one handle per device, and descriptors of products.
#![expect(unsafe_code, reason = "calls into cuBLASLt; every block names who guarantees its arguments")]

use std::ffi::c_void;
use std::fmt::Debug;
use std::mem::size_of;
use std::sync::OnceLock;

use cudarc::cublaslt::sys::{
    self, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulPreference_t,
    cublasLtMatrixLayout_t,
};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use crate::base::dtype::DType;
use crate::base::error::{Error, ErrorKind, Result};
use crate::cuda::lt::attributes::{self as attribute, data_type};

/// Take the loaded copy; if there is none, load the system's.
const RTLD_NOLOAD: i32 = 4;
/// Placeholder for a pointer while a plan is made: aligned, never read.
pub(super) const ANY_ADDRESS: u64 = 256;
/// Number of heuristic results to consider.
const CANDIDATES: usize = 8;

/// `cublasStatus_t` as an integer: a newer cuBLASLt may return a status that cudarc's enum does not have.
pub(super) type Status = u32;

/// `cublasLtMatmulHeuristicResult_t`, with such a status.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct HeuristicResult {
    algorithm: cublasLtMatmulAlgo_t,
    pub(super) workspace_bytes: usize,
    status: Status,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = assert!(size_of::<HeuristicResult>() == size_of::<sys::cublasLtMatmulHeuristicResult_t>());

impl HeuristicResult {
    pub(super) const NONE: Self = Self {
        algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
        workspace_bytes: 0,
        status: 0,
        waves: 0.0,
        reserved: [0; 4],
    };
}

/// cuBLAS has no algorithm for the problem.
pub const NOT_SUPPORTED: Status = 15;

/// `cublasLtGroupedMatrixLayoutCreate`: layout, type, groups, and arrays of rows, columns and leading dimensions.
pub(super) type CreateGroupedLayout =
    unsafe extern "C" fn(*mut cublasLtMatrixLayout_t, u32, i32, *const c_void, *const c_void, *const c_void) -> Status;

/// Entry points, resolved once.
#[derive(Debug)]
pub(super) struct Api {
    pub(super) version: usize,
    create: unsafe extern "C" fn(*mut cublasLtHandle_t) -> Status,
    desc_create: unsafe extern "C" fn(*mut cublasLtMatmulDesc_t, u32, u32) -> Status,
    desc_destroy: unsafe extern "C" fn(cublasLtMatmulDesc_t) -> Status,
    desc_set: unsafe extern "C" fn(cublasLtMatmulDesc_t, u32, *const c_void, usize) -> Status,
    pub(super) layout_create: unsafe extern "C" fn(*mut cublasLtMatrixLayout_t, u32, u64, u64, i64) -> Status,
    /// None before cuBLAS 13.2.
    pub(super) grouped_layout_create: Option<CreateGroupedLayout>,
    pub(super) layout_set: unsafe extern "C" fn(cublasLtMatrixLayout_t, u32, *const c_void, usize) -> Status,
    layout_destroy: unsafe extern "C" fn(cublasLtMatrixLayout_t) -> Status,
    pref_create: unsafe extern "C" fn(*mut cublasLtMatmulPreference_t) -> Status,
    pref_destroy: unsafe extern "C" fn(cublasLtMatmulPreference_t) -> Status,
    pref_set: unsafe extern "C" fn(cublasLtMatmulPreference_t, u32, *const c_void, usize) -> Status,
    heuristic: unsafe extern "C" fn(
        cublasLtHandle_t,
        cublasLtMatmulDesc_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatmulPreference_t,
        i32,
        *mut HeuristicResult,
        *mut i32,
    ) -> Status,
    pub(super) algo_set: unsafe extern "C" fn(*mut cublasLtMatmulAlgo_t, u32, *const c_void, usize) -> Status,
    pub(super) algo_check: unsafe extern "C" fn(
        cublasLtHandle_t,
        cublasLtMatmulDesc_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        *const cublasLtMatmulAlgo_t,
        *mut HeuristicResult,
    ) -> Status,
    pub(super) algo_get:
        unsafe extern "C" fn(*const cublasLtMatmulAlgo_t, u32, *mut c_void, usize, *mut usize) -> Status,
    pub(super) matmul: unsafe extern "C" fn(
        cublasLtHandle_t,
        cublasLtMatmulDesc_t,
        *const c_void,
        *const c_void,
        cublasLtMatrixLayout_t,
        *const c_void,
        cublasLtMatrixLayout_t,
        *const c_void,
        *const c_void,
        cublasLtMatrixLayout_t,
        *mut c_void,
        cublasLtMatrixLayout_t,
        *const cublasLtMatmulAlgo_t,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> Status,
}

fn api() -> Result<&'static Api> {
    static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    API.get_or_init(load).as_ref().map_err(|reason| Error::unsupported("gemm", reason))
}

fn load() -> std::result::Result<Api, String> {
    let names = ["libcublasLt.so.13", "libcublasLt.so.12"];
    let open = |flags: i32| {
        // SAFETY: opening runs the library's initialisers; cuBLASLt's have no preconditions. With RTLD_NOLOAD nothing
        // new is loaded at all.
        names.iter().find_map(|&name| unsafe { Library::open(Some(name), flags) }.ok())
    };
    let library = open(RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD).or_else(|| open(RTLD_LAZY | RTLD_LOCAL)).ok_or(
        "cuBLASLt (libcublasLt.so.13 or .so.12) is neither loaded nor found: import a CUDA build of torch first",
    )?;
    macro_rules! symbol {
        ($name:literal) => {
            // SAFETY: the type is the one that cublasLt.h declares for this name, with enums as their integers.
            *unsafe { library.get($name) }.map_err(|error| format!("cuBLASLt lacks a function: {error}"))?
        };
    }
    // SAFETY: the declared type of cublasLtGetVersion.
    let version: libloading::os::unix::Symbol<unsafe extern "C" fn() -> usize> =
        unsafe { library.get(b"cublasLtGetVersion\0") }.map_err(|error| error.to_string())?;
    let api = Api {
        // SAFETY: takes nothing, returns a number.
        version: unsafe { version() },
        create: symbol!(b"cublasLtCreate\0"),
        desc_create: symbol!(b"cublasLtMatmulDescCreate\0"),
        desc_destroy: symbol!(b"cublasLtMatmulDescDestroy\0"),
        desc_set: symbol!(b"cublasLtMatmulDescSetAttribute\0"),
        layout_create: symbol!(b"cublasLtMatrixLayoutCreate\0"),
        // SAFETY: the type is the one that cublasLt.h declares for this name.
        grouped_layout_create: unsafe { library.get(b"cublasLtGroupedMatrixLayoutCreate\0") }
            .ok()
            .map(|create| *create),
        layout_set: symbol!(b"cublasLtMatrixLayoutSetAttribute\0"),
        layout_destroy: symbol!(b"cublasLtMatrixLayoutDestroy\0"),
        pref_create: symbol!(b"cublasLtMatmulPreferenceCreate\0"),
        pref_destroy: symbol!(b"cublasLtMatmulPreferenceDestroy\0"),
        pref_set: symbol!(b"cublasLtMatmulPreferenceSetAttribute\0"),
        heuristic: symbol!(b"cublasLtMatmulAlgoGetHeuristic\0"),
        algo_set: symbol!(b"cublasLtMatmulAlgoConfigSetAttribute\0"),
        algo_check: symbol!(b"cublasLtMatmulAlgoCheck\0"),
        algo_get: symbol!(b"cublasLtMatmulAlgoConfigGetAttribute\0"),
        matmul: symbol!(b"cublasLtMatmul\0"),
    };
    std::mem::forget(library); // never unloaded: the pointers above are used for the life of the process
    Ok(api)
}

pub(super) fn check(call: &'static str, status: Status, problem: &dyn Debug) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(failure(call, status, problem)) }
}

#[cold]
#[inline(never)]
pub(super) fn failure(call: &'static str, status: Status, problem: &dyn Debug) -> Error {
    ErrorKind::Cublas { call, status, what: format!("{problem:?}") }.into()
}

/// The descriptors of a product: of the operation, and of its matrices.
#[derive(Debug)]
pub(super) struct Descriptors<const MATRICES: usize> {
    pub(super) api: &'static Api,
    pub(super) operation: cublasLtMatmulDesc_t,
    /// Null until they are made.
    pub(super) matrices: [cublasLtMatrixLayout_t; MATRICES],
}

impl<const MATRICES: usize> Descriptors<MATRICES> {
    /// An operation that sums in FP32.
    pub(super) fn new(api: &'static Api, problem: &dyn Debug) -> Result<Self> {
        let mut operation = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed by Drop.
        let status = unsafe { (api.desc_create)(&raw mut operation, attribute::COMPUTE_32F, data_type(DType::F32)) };
        check("cublasLtMatmulDescCreate", status, problem)?;
        Ok(Self { api, operation, matrices: [std::ptr::null_mut(); MATRICES] })
    }

    /// Sets an attribute of the operation to a value of its size.
    #[inline]
    pub(super) fn set<T>(&self, name: u32, value: &T) -> Status {
        // SAFETY: a live descriptor and a value of the attribute's size.
        unsafe { (self.api.desc_set)(self.operation, name, std::ptr::from_ref(value).cast(), size_of::<T>()) }
    }
}

impl<const MATRICES: usize> Drop for Descriptors<MATRICES> {
    fn drop(&mut self) {
        for matrix in self.matrices.into_iter().filter(|matrix| !matrix.is_null()) {
            // SAFETY: made for these descriptors, destroyed once.
            let _ = unsafe { (self.api.layout_destroy)(matrix) };
        }
        // SAFETY: as above.
        let _ = unsafe { (self.api.desc_destroy)(self.operation) };
    }
}

/// cuBLASLt for one device.
#[derive(Debug)]
pub struct CublasLt {
    pub(super) api: &'static Api,
    pub(super) handle: cublasLtHandle_t,
}

// SAFETY: a cuBLASLt handle may be used from any thread; it holds no thread's state.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    /// A handle on the current device.
    ///
    /// # Errors
    /// No cuBLASLt in the process, or its refusal.
    pub fn open() -> Result<Self> {
        let api = api()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle; the device's context is current.
        let status = unsafe { (api.create)(&raw mut handle) };
        if status != 0 {
            return Err(ErrorKind::Cublas { call: "cublasLtCreate", status, what: "creating the handle".into() }.into());
        }
        Ok(Self { api, handle })
    }

    /// The heuristic's algorithms, best first, and the bytes of workspace that each uses. Preferences are attributes,
    /// their values and the sizes of these.
    pub(super) fn candidates(
        &self,
        operation: cublasLtMatmulDesc_t,
        [a, b, c, d]: [cublasLtMatrixLayout_t; 4],
        preferences: &[(u32, u64, usize)],
        problem: &dyn Debug,
    ) -> Result<Vec<(cublasLtMatmulAlgo_t, usize)>> {
        let api = self.api;
        let mut preference = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed below.
        check("cublasLtMatmulPreferenceCreate", unsafe { (api.pref_create)(&raw mut preference) }, problem)?;
        let prepared = preferences.iter().try_for_each(|&(name, value, bytes)| {
            // SAFETY: a live preference and a value of the attribute's size; the first bytes of a number are its lowest.
            let status = unsafe { (api.pref_set)(preference, name, (&raw const value).cast(), bytes) };
            check("cublasLtMatmulPreferenceSetAttribute", status, problem)
        });
        let mut results = [HeuristicResult::NONE; CANDIDATES]; // cuBLASLt overwrites the first `found`
        let mut found = 0;
        let status = prepared.and_then(|()| {
            // SAFETY: live handle, descriptors and preference; room for CANDIDATES results.
            let status = unsafe {
                (api.heuristic)(
                    self.handle,
                    operation,
                    a,
                    b,
                    c,
                    d,
                    preference,
                    CANDIDATES as i32,
                    results.as_mut_ptr(),
                    &raw mut found,
                )
            };
            check("cublasLtMatmulAlgoGetHeuristic", status, problem)
        });
        // SAFETY: created above, destroyed once.
        let _ = unsafe { (api.pref_destroy)(preference) };
        status?;
        let usable = results.iter().take(found as usize).filter(|result| result.status == 0);
        Ok(usable.map(|result| (result.algorithm, result.workspace_bytes)).collect())
    }
}
