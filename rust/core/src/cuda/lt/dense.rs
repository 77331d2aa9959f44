//! Dense products by cuBLASLt: one descriptor set per problem.
//!
//! This code avoids known defects of released versions: split-K with CONFIG_ID 66 gives wrong results on sm_90 (fixed
//! in 13.8), so heuristic results that use it are passed over; C scales hang FP8 with beta (fixed in 13.2), so none is
//! ever set; leading dimensions over 2³¹ bytes are refused in `gemm/problem.rs`.
#![expect(unsafe_code, reason = "calls into cuBLASLt; every block names who guarantees its arguments")]

use std::ffi::c_void;
use std::mem::size_of;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::sys::{cublasLtHandle_t, cublasLtMatmulAlgo_t};

use crate::base::config::learns_launches;
use crate::base::dtype::DType;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::device::{CudaQueue, Stream};
use crate::cuda::learned::invented::Learned;
use crate::cuda::lt::api::{
    ANY_ADDRESS, CublasLt, Descriptors, HeuristicResult, NOT_SUPPORTED, Status, check, failure,
};
use crate::cuda::lt::attributes::{self as attribute, data_type};
use crate::gemm::problem::{Epilogue, GemmPointers, Operand, Problem, ScaleMode, WORKSPACE_BYTES};

/// First version with 1×128 and 128×128 scale modes on Hopper.
const BLOCK_SCALING_VERSION: usize = 120_900;
/// First version whose split-K of CONFIG_ID 66 is right.
const SPLIT_K_FIXED_VERSION: usize = 130_800;
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

impl CublasLt {
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
        let mut plan = CublasPlan::new(self, problem)?;
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
        let Descriptors { operation, matrices, .. } = plan.descriptors;
        let usable = self.candidates(operation, matrices, &[workspace, a, b, c, d], problem)?;
        let sound = usable.iter().find(|(algorithm, _)| !self.is_defective(algorithm)).copied();
        sound
            .or_else(|| usable.first().and_then(|&(favourite, _)| self.without_split(plan, favourite)))
            .ok_or_else(|| failure("cublasLtMatmulAlgoGetHeuristic (no algorithm)", NOT_SUPPORTED, problem))
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
        let Descriptors { operation, matrices: [w, x, c, d], .. } = plan.descriptors;
        // SAFETY: live handle, descriptors and algorithm; writes one result.
        let status =
            unsafe { (self.api.algo_check)(self.handle, operation, w, x, c, d, &raw const algorithm, &raw mut result) };
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
    handle: cublasLtHandle_t,
    /// Of cuBLAS's A, B, C and D: W, X, C and D.
    descriptors: Descriptors<4>,
    algorithm: cublasLtMatmulAlgo_t,
    /// Bytes of workspace that the algorithm uses.
    workspace_bytes: usize,
    has_bias: bool,
    has_scales: bool,
    stores_fp8: bool,
    /// Alignment of each pointer of a call, in bytes; 0 for pointers that calls do not have.
    alignments: [u64; POINTERS],
    /// A call that writes pointers into `descriptors` or into the launches holds this lock until they have been read.
    way: Mutex<Way>,
}

// SAFETY: descriptors are plain memory of cuBLASLt, not bound to a thread.
unsafe impl Send for CublasPlan {}
// SAFETY: of what &self reaches, `run` alone writes, to the memory behind `descriptors`, and it holds `way` meanwhile; layouts,
// handle and algorithm are only read, which cuBLASLt allows from several threads.
unsafe impl Sync for CublasPlan {}

impl CublasPlan {
    /// Row-major D = X·Wᵀ is column-major Dᵀ = W·Xᵀ, so cuBLAS's A is W and its B is X.
    fn new(cublas: &CublasLt, problem: &Problem) -> Result<Self> {
        let mut plan = Self {
            handle: cublas.handle,
            descriptors: Descriptors::new(cublas.api, problem)?,
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace_bytes: 0,
            has_bias: problem.bias.is_some(),
            has_scales: problem.x.scale != ScaleMode::None,
            stores_fp8: matches!(problem.d, DType::E4m3 | DType::E5m2),
            alignments: [0; POINTERS],
            way: Mutex::new(Way::Library { calls: 0 }),
        };
        plan.describe(problem)?;
        plan.alignments = plan.alignments_of(problem);
        Ok(plan)
    }

    fn describe(&mut self, problem: &Problem) -> Result<()> {
        let op_w = if problem.w.k_outermost { attribute::OP_N } else { attribute::OP_T };
        let op_x = if problem.x.k_outermost { attribute::OP_T } else { attribute::OP_N };
        self.set(attribute::DESC_TRANSA, &op_w, problem)?;
        self.set(attribute::DESC_TRANSB, &op_x, problem)?;
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
        if self.stores_fp8 {
            let status = self.set_pointer(attribute::DESC_D_SCALE_POINTER, ANY_ADDRESS)
                | self.set_pointer(attribute::DESC_AMAX_D_POINTER, ANY_ADDRESS);
            check("cublasLtMatmulDescSetAttribute", status, problem)?;
        }
        // There is no FP8 C; without beta it is not read.
        let c = if self.stores_fp8 { problem.bias.unwrap_or(DType::Bf16) } else { problem.d };
        let result = |dtype| (dtype, problem.n, problem.m, problem.ldd);
        let made = [
            Self::operand(&problem.w, problem.n, problem.k),
            Self::operand(&problem.x, problem.m, problem.k),
            result(c),
            result(problem.d),
        ];
        let api = self.descriptors.api;
        for (matrix, (dtype, rows, cols, ld)) in self.descriptors.matrices.iter_mut().zip(made) {
            // SAFETY: writes one handle, destroyed with the descriptors.
            let status = unsafe { (api.layout_create)(matrix, data_type(dtype), rows as u64, cols as u64, ld as i64) };
            check("cublasLtMatrixLayoutCreate", status, problem)?;
        }
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

    /// Type, rows, columns and leading dimension of an operand.
    const fn operand(operand: &Operand, outer: usize, k: usize) -> (DType, usize, usize, usize) {
        let (rows, cols) = if operand.k_outermost { (outer, k) } else { (k, outer) };
        (operand.dtype, rows, cols, operand.ld)
    }

    fn set<T>(&self, name: u32, value: &T, problem: &Problem) -> Result<()> {
        check("cublasLtMatmulDescSetAttribute", self.descriptors.set(name, value), problem)
    }

    #[inline]
    fn set_pointer(&self, name: u32, address: u64) -> Status {
        self.descriptors.set(name, &address)
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
        let &Descriptors { api, operation, matrices: [w, x, c_matrix, d_matrix] } = &self.descriptors;
        if status == 0 {
            // SAFETY: descriptors were made for this problem; the plan that owns the call checked sizes and the
            // pointers are on this device, or nothing runs; alpha and beta are read during the call (host pointer mode).
            status = unsafe {
                (api.matmul)(
                    self.handle,
                    operation,
                    (&raw const alpha).cast(),
                    io.w as *const c_void,
                    w,
                    io.x as *const c_void,
                    x,
                    (&raw const beta).cast(),
                    c,
                    c_matrix,
                    d,
                    d_matrix,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_the_last_pointer() {
        let row = in_a_row(&GemmPointers { workspace: 7, ..GemmPointers::default() });
        assert_eq!(row.iter().position(|&address| address == 7), Some(WORKSPACE));
    }
}
