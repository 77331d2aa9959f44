//! cuBLASLt, usually the copy that torch has loaded: one handle per device and one descriptor set per problem.
//!
//! This code avoids known defects of released versions: split-K with CONFIG_ID 66 gives wrong results on sm_90 (fixed
//! in 13.8), so heuristic results that use it are passed over; C scales hang FP8 with beta (fixed in 13.2), so none is
//! ever set; leading dimensions over 2³¹ bytes are refused in `gemm/problem.rs`.
#![expect(unsafe_code, reason = "calls into cuBLASLt; every block names who guarantees its arguments")]

use std::ffi::c_void;
use std::fmt::Debug;
use std::mem::size_of;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::cublaslt::sys::{
    self, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulPreference_t,
    cublasLtMatrixLayout_t,
};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use crate::base::config::learns_launches;
use crate::base::dtype::DType;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::device::{CudaQueue, Stream};
use crate::cuda::learned::Learned;
use crate::cuda::lt_attributes::{self as attribute, data_type};
use crate::gemm::problem::{Epilogue, GemmPointers, Operand, Problem, ScaleMode, WORKSPACE_BYTES};

/// Take the loaded copy; if there is none, load the system's.
const RTLD_NOLOAD: i32 = 4;
/// First version with 1×128 and 128×128 scale modes on Hopper.
const BLOCK_SCALING_VERSION: usize = 120_900;
/// First version whose split-K of CONFIG_ID 66 is right.
const SPLIT_K_FIXED_VERSION: usize = 130_800;
/// Placeholder for a pointer while a plan is made: aligned, never read.
pub(super) const ANY_ADDRESS: u64 = 256;
/// Number of heuristic results to consider.
const CANDIDATES: usize = 8;
/// Pointers of a call.
const POINTERS: usize = size_of::<GemmPointers<u64>>() / size_of::<u64>();
/// The workspace's place among them.
const WORKSPACE: usize = POINTERS - 1;
/// Number of calls outside of graphs after which a plan's launches are learned; learning takes as long as 15 calls.
const CALLS_BEFORE_LEARNING: u32 = 8;
/// Alignment of the addresses of scales and of a result's maximum, in bytes: cuBLASLt refuses others.
const SCALE_ALIGNMENT: u64 = 16;
/// Alignment of the workspace, in bytes.
const WORKSPACE_ALIGNMENT: u64 = 256;

/// `cublasStatus_t` as an integer: a newer cuBLASLt may return a status that cudarc's enum does not have.
pub(super) type Status = u32;

/// `cublasLtMatmulHeuristicResult_t`, with such a status.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct HeuristicResult {
    algorithm: cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
    status: Status,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = assert!(size_of::<HeuristicResult>() == size_of::<sys::cublasLtMatmulHeuristicResult_t>());

impl HeuristicResult {
    const NONE: Self = Self {
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
    pub(super) desc_create: unsafe extern "C" fn(*mut cublasLtMatmulDesc_t, u32, u32) -> Status,
    pub(super) desc_destroy: unsafe extern "C" fn(cublasLtMatmulDesc_t) -> Status,
    pub(super) desc_set: unsafe extern "C" fn(cublasLtMatmulDesc_t, u32, *const c_void, usize) -> Status,
    layout_create: unsafe extern "C" fn(*mut cublasLtMatrixLayout_t, u32, u64, u64, i64) -> Status,
    /// None before cuBLAS 13.2.
    pub(super) grouped_layout_create: Option<CreateGroupedLayout>,
    pub(super) layout_set: unsafe extern "C" fn(cublasLtMatrixLayout_t, u32, *const c_void, usize) -> Status,
    pub(super) layout_destroy: unsafe extern "C" fn(cublasLtMatrixLayout_t) -> Status,
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
    algo_set: unsafe extern "C" fn(*mut cublasLtMatmulAlgo_t, u32, *const c_void, usize) -> Status,
    algo_check: unsafe extern "C" fn(
        cublasLtHandle_t,
        cublasLtMatmulDesc_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        *const cublasLtMatmulAlgo_t,
        *mut HeuristicResult,
    ) -> Status,
    algo_get: unsafe extern "C" fn(*const cublasLtMatmulAlgo_t, u32, *mut c_void, usize, *mut usize) -> Status,
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

    /// Descriptors and algorithm for `problem`.
    ///
    /// # Errors
    /// A type or scale mode that this cuBLAS does not have, or no algorithm for the problem.
    pub fn plan(&self, problem: &Problem) -> Result<CublasPlan> {
        for dtype in [problem.x.dtype, problem.w.dtype, problem.d] {
            if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16 | DType::E4m3 | DType::E5m2) {
                return Err(Error::dtype("gemm", "an operand", "float32, float16, bfloat16 or FP8", dtype));
            }
        }
        let block = |operand: Operand| matches!(operand.scale, ScaleMode::Block1d | ScaleMode::Block2d);
        let version = self.api.version;
        if (block(problem.x) || block(problem.w)) && version < BLOCK_SCALING_VERSION {
            let message = format!(
                "FP8 block scaling needs a torch built for CUDA 12.9 or newer: this one brought cuBLAS {version}"
            );
            return Err(Error::unsupported("gemm", message));
        }
        let mut plan = CublasPlan::empty(self.api, self.handle);
        plan.describe(problem)?;
        (plan.algorithm, plan.workspace_bytes) = self.algorithm(&plan, problem)?;
        Ok(plan)
    }

    /// The heuristic's best correct algorithm. For small results with a long contraction the heuristic may name only
    /// defective split-K algorithms; then its first one is used without splitting. The number is the bytes of workspace
    /// that the algorithm uses.
    fn algorithm(&self, plan: &CublasPlan, problem: &Problem) -> Result<(cublasLtMatmulAlgo_t, usize)> {
        let alignment = u64::from(problem.alignment);
        let [a, b, c, d] = attribute::PREF_MIN_ALIGNMENT.map(|name| (name, alignment, size_of::<u32>()));
        let workspace = (attribute::PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES as u64, size_of::<u64>());
        let layouts = [plan.w, plan.x, plan.c, plan.d];
        let usable = self.candidates(plan.desc, layouts, &[workspace, a, b, c, d], problem)?;
        let sound = usable.iter().find(|(algorithm, _)| !self.is_defective(algorithm)).copied();
        sound
            .or_else(|| usable.first().and_then(|&(favourite, _)| self.without_split(plan, favourite)))
            .ok_or_else(|| failure("cublasLtMatmulAlgoGetHeuristic (no algorithm)", NOT_SUPPORTED, problem))
    }

    /// The heuristic's algorithms, best first, and the bytes of workspace that each uses. Preferences are attributes,
    /// their values and the sizes of these.
    pub(super) fn candidates(
        &self,
        desc: cublasLtMatmulDesc_t,
        [w, x, c, d]: [cublasLtMatrixLayout_t; 4],
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
                    desc,
                    w,
                    x,
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

    /// The algorithm with the contraction in one part, if it can run so.
    fn without_split(
        &self,
        plan: &CublasPlan,
        mut algorithm: cublasLtMatmulAlgo_t,
    ) -> Option<(cublasLtMatmulAlgo_t, usize)> {
        for (name, value) in [(attribute::ALGO_SPLITK_NUM, 1_i32), (attribute::ALGO_REDUCTION_SCHEME, 0)] {
            // SAFETY: an algorithm from the heuristic and a value of the attribute's size.
            let status =
                unsafe { (self.api.algo_set)(&raw mut algorithm, name, (&raw const value).cast(), size_of::<i32>()) };
            if status != 0 {
                return None;
            }
        }
        let mut result = HeuristicResult::NONE;
        // SAFETY: live handle, descriptors and algorithm; writes one result.
        let status = unsafe {
            (self.api.algo_check)(
                self.handle,
                plan.desc,
                plan.w,
                plan.x,
                plan.c,
                plan.d,
                &raw const algorithm,
                &raw mut result,
            )
        };
        let bytes = result.workspace_bytes;
        (status == 0 && bytes <= WORKSPACE_BYTES).then_some((algorithm, bytes))
    }

    /// Split-K with CONFIG_ID 66: wrong results on compute capability 9.0 before cuBLAS 13.8.
    fn is_defective(&self, algorithm: &cublasLtMatmulAlgo_t) -> bool {
        if self.api.version >= SPLIT_K_FIXED_VERSION {
            return false;
        }
        let get = |name: u32| {
            let mut value: i32 = 0;
            let mut written = 0;
            // SAFETY: an algorithm from the heuristic; writes at most one integer.
            let status = unsafe {
                (self.api.algo_get)(algorithm, name, (&raw mut value).cast(), size_of::<i32>(), &raw mut written)
            };
            (status == 0).then_some(value)
        };
        get(attribute::ALGO_ID) == Some(66) && get(attribute::ALGO_SPLITK_NUM).is_some_and(|parts| parts > 1)
    }
}

/// How a plan's product is launched.
#[derive(Debug)]
enum Way {
    /// By cuBLASLt, which has made so many calls outside of captures.
    Library { calls: u32 },
    /// As cuBLASLt did.
    Learned(Learned<POINTERS>),
    /// By cuBLASLt for ever: something else than the addresses decides about its launches.
    LibraryAlone,
}

/// One problem's descriptors; pointers are set per call.
#[derive(Debug)]
pub struct CublasPlan {
    api: &'static Api,
    handle: cublasLtHandle_t,
    desc: cublasLtMatmulDesc_t,
    x: cublasLtMatrixLayout_t,
    w: cublasLtMatrixLayout_t,
    c: cublasLtMatrixLayout_t,
    d: cublasLtMatrixLayout_t,
    algorithm: cublasLtMatmulAlgo_t,
    /// Bytes of workspace that the algorithm uses.
    workspace_bytes: usize,
    has_bias: bool,
    has_scales: bool,
    stores_fp8: bool,
    /// Alignment of each pointer of a call, in bytes; 0 for pointers that calls do not have.
    alignments: [u64; POINTERS],
    /// A call that writes pointers into `desc` or into the launches holds this lock until they have been read.
    way: Mutex<Way>,
}

// SAFETY: descriptors are plain memory of cuBLASLt, not bound to a thread.
unsafe impl Send for CublasPlan {}
// SAFETY: of what &self reaches, `run` alone writes, to the memory behind `desc`, and it holds `way` meanwhile; layouts,
// handle and algorithm are only read, which cuBLASLt allows from several threads.
unsafe impl Sync for CublasPlan {}

impl CublasPlan {
    fn empty(api: &'static Api, handle: cublasLtHandle_t) -> Self {
        Self {
            api,
            handle,
            desc: std::ptr::null_mut(),
            x: std::ptr::null_mut(),
            w: std::ptr::null_mut(),
            c: std::ptr::null_mut(),
            d: std::ptr::null_mut(),
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace_bytes: 0,
            has_bias: false,
            has_scales: false,
            stores_fp8: false,
            alignments: [0; POINTERS],
            way: Mutex::new(Way::Library { calls: 0 }),
        }
    }

    /// Row-major D = X·Wᵀ is column-major Dᵀ = W·Xᵀ, so cuBLAS's A is W and its B is X.
    fn describe(&mut self, problem: &Problem) -> Result<()> {
        let api = self.api;
        // SAFETY: writes one handle, destroyed by Drop.
        let status = unsafe { (api.desc_create)(&raw mut self.desc, attribute::COMPUTE_32F, data_type(DType::F32)) };
        check("cublasLtMatmulDescCreate", status, problem)?;
        let op_w = if problem.w.k_outermost { attribute::OP_N } else { attribute::OP_T };
        let op_x = if problem.x.k_outermost { attribute::OP_T } else { attribute::OP_N };
        self.set(attribute::DESC_TRANSA, &op_w, problem)?;
        self.set(attribute::DESC_TRANSB, &op_x, problem)?;
        self.has_scales = problem.x.scale != ScaleMode::None;
        if self.has_scales {
            self.set(attribute::DESC_FAST_ACCUM, &i8::from(problem.fast_accumulation), problem)?;
        }
        for (name, operand) in [(attribute::DESC_A_SCALE_MODE, problem.w), (attribute::DESC_B_SCALE_MODE, problem.x)] {
            match operand.scale {
                ScaleMode::Block1d => self.set(name, &attribute::SCALE_VEC128, problem)?,
                ScaleMode::Block2d => self.set(name, &attribute::SCALE_BLK128X128, problem)?,
                ScaleMode::None | ScaleMode::Tensor => {}
            }
        }
        if self.has_scales {
            // The heuristic refuses block modes without scale pointers; it does not read through them.
            let status = self.set_pointer(attribute::DESC_A_SCALE_POINTER, ANY_ADDRESS)
                | self.set_pointer(attribute::DESC_B_SCALE_POINTER, ANY_ADDRESS);
            check("cublasLtMatmulDescSetAttribute", status, problem)?;
        }
        if let Some(bias) = problem.bias {
            self.has_bias = true;
            self.set(attribute::DESC_BIAS_DATA_TYPE, &(data_type(bias) as i32), problem)?;
        }
        let epilogue = match problem.epilogue {
            Epilogue::None => 0,
            Epilogue::Relu => attribute::EPILOGUE_RELU,
            Epilogue::Gelu => attribute::EPILOGUE_GELU,
        } | if self.has_bias { attribute::EPILOGUE_BIAS } else { 0 };
        if epilogue != 0 {
            self.set(attribute::DESC_EPILOGUE, &epilogue, problem)?;
        }
        self.stores_fp8 = matches!(problem.d, DType::E4m3 | DType::E5m2);
        if self.stores_fp8 {
            let status = self.set_pointer(attribute::DESC_D_SCALE_POINTER, ANY_ADDRESS)
                | self.set_pointer(attribute::DESC_AMAX_D_POINTER, ANY_ADDRESS);
            check("cublasLtMatmulDescSetAttribute", status, problem)?;
        }
        self.w = self.layout(&problem.w, problem.n, problem)?;
        self.x = self.layout(&problem.x, problem.m, problem)?;
        // There is no FP8 C; without beta it is not read.
        let c = if self.stores_fp8 { problem.bias.unwrap_or(DType::Bf16) } else { problem.d };
        self.c = self.matrix(c, problem.n, problem.m, problem.ldd, problem)?;
        self.d = self.matrix(problem.d, problem.n, problem.m, problem.ldd, problem)?;
        self.alignments = self.alignments_of(problem);
        Ok(())
    }

    /// What each pointer is a multiple of.
    fn alignments_of(&self, problem: &Problem) -> [u64; POINTERS] {
        let given = u64::from(problem.alignment);
        let of_scale = |mode: ScaleMode| if mode == ScaleMode::None { 0 } else { SCALE_ALIGNMENT };
        let result = if self.stores_fp8 { SCALE_ALIGNMENT } else { 0 };
        in_a_row(&GemmPointers {
            x: given,
            x_scale: of_scale(problem.x.scale),
            w: given,
            w_scale: of_scale(problem.w.scale),
            bias: problem.bias.map_or(0, |_| given),
            d: given,
            d_scale: result,
            d_amax: result,
            workspace: WORKSPACE_ALIGNMENT,
        })
    }

    fn layout(&self, operand: &Operand, outer: usize, problem: &Problem) -> Result<cublasLtMatrixLayout_t> {
        let (rows, cols) = if operand.k_outermost { (outer, problem.k) } else { (problem.k, outer) };
        self.matrix(operand.dtype, rows, cols, operand.ld, problem)
    }

    fn matrix(
        &self,
        dtype: DType,
        rows: usize,
        cols: usize,
        ld: usize,
        problem: &Problem,
    ) -> Result<cublasLtMatrixLayout_t> {
        let mut layout = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed by Drop of the plan it is stored in.
        let status =
            unsafe { (self.api.layout_create)(&raw mut layout, data_type(dtype), rows as u64, cols as u64, ld as i64) };
        check("cublasLtMatrixLayoutCreate", status, problem)?;
        Ok(layout)
    }

    fn set<T>(&self, name: u32, value: &T, problem: &Problem) -> Result<()> {
        // SAFETY: a live descriptor and a value of the attribute's size.
        let status = unsafe { (self.api.desc_set)(self.desc, name, std::ptr::from_ref(value).cast(), size_of::<T>()) };
        check("cublasLtMatmulDescSetAttribute", status, problem)
    }

    #[inline]
    fn set_pointer(&self, name: u32, address: u64) -> Status {
        // SAFETY: a live descriptor; pointer attributes are 8 bytes.
        unsafe { (self.api.desc_set)(self.desc, name, (&raw const address).cast(), size_of::<u64>()) }
    }

    /// Launches the product; returns whether learned launches were used, without cuBLASLt.
    ///
    /// # Errors
    /// The refusal of cuBLASLt or of the driver.
    #[inline]
    pub(crate) fn run(
        &self,
        queue: &mut CudaQueue<'_>,
        io: &GemmPointers<DevPtr<'_>>,
        problem: &Problem,
    ) -> Result<bool> {
        let io = io.map(|pointer| pointer.address() as u64);
        // Calls hold the GIL, so the lock is never contended and costs one exchange of a word.
        let mut way = self.way.lock().unwrap_or_else(PoisonError::into_inner);
        if let Way::Learned(learned) = &mut *way {
            return learned.launch(queue, in_a_row(&io)).map(|()| true);
        }
        self.call(queue.stream, &io, problem)?;
        if let Way::Library { calls } = &mut *way {
            *calls = calls.saturating_add(1);
            if *calls >= CALLS_BEFORE_LEARNING {
                self.learn(queue, &mut way, problem)?;
            }
        }
        Ok(false)
    }

    /// Learns the launches, unless something is under capture: then a later call does.
    #[cold]
    fn learn(&self, queue: &mut CudaQueue<'_>, way: &mut Way, problem: &Problem) -> Result<()> {
        if queue.is_capturing()? {
            return Ok(());
        }
        let call = |stream, addresses: &[u64; POINTERS]| {
            let mut next = addresses.iter();
            let io = GemmPointers::<u64>::default().map(|_| next.next().copied().unwrap_or_default());
            self.call(stream, &io, problem)
        };
        let workspace = (WORKSPACE, self.workspace_bytes);
        let learned = if learns_launches() { Learned::learn(queue, &self.alignments, workspace, call) } else { None };
        *way = learned.map_or(Way::LibraryAlone, Way::Learned);
        Ok(())
    }

    /// Lets cuBLASLt launch the product; the caller holds `way`.
    fn call(&self, stream: Stream, io: &GemmPointers<u64>, problem: &Problem) -> Result<()> {
        let mut status = 0;
        if self.has_scales {
            status |= self.set_pointer(attribute::DESC_A_SCALE_POINTER, io.w_scale);
            status |= self.set_pointer(attribute::DESC_B_SCALE_POINTER, io.x_scale);
        }
        if self.has_bias {
            status |= self.set_pointer(attribute::DESC_BIAS_POINTER, io.bias);
        }
        if self.stores_fp8 {
            status |= self.set_pointer(attribute::DESC_D_SCALE_POINTER, io.d_scale);
            status |= self.set_pointer(attribute::DESC_AMAX_D_POINTER, io.d_amax);
        }
        let alpha = problem.alpha.value();
        let beta = f32::from(u8::from(problem.accumulate));
        let d = io.d as *mut c_void;
        // C is not read and may be null. It must be null for an FP8 D, since C has no FP8 type and cuBLASLt would
        // refuse it "in place".
        let c: *const c_void = if self.stores_fp8 { std::ptr::null() } else { d };
        if status == 0 {
            // SAFETY: descriptors were made for this problem; the plan that owns the call checked sizes and the
            // pointers are on this device, or nothing runs; alpha and beta are read during the call (host pointer mode).
            status = unsafe {
                (self.api.matmul)(
                    self.handle,
                    self.desc,
                    (&raw const alpha).cast(),
                    io.w as *const c_void,
                    self.w,
                    io.x as *const c_void,
                    self.x,
                    (&raw const beta).cast(),
                    c,
                    self.c,
                    d,
                    self.d,
                    &raw const self.algorithm,
                    io.workspace as *mut c_void,
                    WORKSPACE_BYTES,
                    stream.0 as *mut c_void,
                )
            };
        }
        if status == 0 {
            return Ok(());
        }
        Err(ErrorKind::Cublas { call: "cublasLtMatmul", status, what: format!("{io:x?}") }.into())
    }
}

/// The pointers of a call in their order.
#[inline]
fn in_a_row(io: &GemmPointers<u64>) -> [u64; POINTERS] {
    let (mut row, mut next) = ([0; POINTERS], 0);
    io.each(|&address| {
        row[next] = address;
        next += 1;
    });
    row
}

impl Drop for CublasPlan {
    fn drop(&mut self) {
        for layout in [self.x, self.w, self.c, self.d] {
            if !layout.is_null() {
                // SAFETY: created by this plan, destroyed once.
                let _ = unsafe { (self.api.layout_destroy)(layout) };
            }
        }
        if !self.desc.is_null() {
            // SAFETY: as above.
            let _ = unsafe { (self.api.desc_destroy)(self.desc) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_the_last_pointer() {
        let row = in_a_row(&GemmPointers { workspace: 7, ..GemmPointers::default() });
        assert_eq!(row.iter().position(|&address| address == 7), Some(WORKSPACE));
    }
}
