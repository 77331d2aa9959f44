//! Matrix products: the problem, its plan, and the one call that runs it on either backend.
//!
//! Everything is stated for row-major tensors: `D[m, n] = X[m, k] · W[n, k]ᵀ + bias`, where an operand may also be
//! stored with k outermost. A plan is built once per problem and shared by every layer that has it.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::cublaslt::{CublasLt, CublasPlan, NOT_SUPPORTED};
use crate::driver::CudaDevice;
use crate::error::{Error, ErrorKind, Result};
use crate::host::gemm as host_gemm;
use crate::kernel::{Backend, DevPtr, Target};
use crate::tensor::DType;

/// Scratch memory that cuBLASLt may use, bytes (what torch gives it on Hopper).
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// Plans that are kept although no layer holds them.
const IDLE_PLANS: usize = 1024;

/// Elements of an operand that cuBLAS always takes.
const PART_ELEMENTS: usize = 1 << 30;
/// Parts start where scales of every mode are aligned to 16 bytes.
const PART_GRANULE: usize = 512;

/// How an operand's scale is laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ScaleMode {
    /// A high-precision operand.
    #[default]
    None,
    /// One FP32 scale for the tensor.
    Tensor,
    /// One FP32 scale per 1 × 128 elements along k, stored `(⌈k/128⌉, up4(outer))`.
    Block1d,
    /// One FP32 scale per 128 × 128 elements, stored `(⌈outer/128⌉, up4(⌈k/128⌉))`.
    Block2d,
}

/// One operand's type and layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Element type.
    pub dtype: DType,
    /// Scales.
    pub scale: ScaleMode,
    /// Elements between two rows as stored.
    pub ld: usize,
    /// Stored `[k, outer]` instead of `[outer, k]`; FP8 tensor cores on Hopper do not take it.
    pub k_outermost: bool,
}

/// A matrix product, without its pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Contraction length.
    pub k: usize,
    /// First operand, `m × k`.
    pub x: Operand,
    /// Second operand, `n × k`.
    pub w: Operand,
    /// Type of the result.
    pub d: DType,
    /// Elements between two rows of the result.
    pub ldd: usize,
    /// Type of a bias of n elements, added to every row.
    pub bias: Option<DType>,
    /// `D += …` instead of `D = …`.
    pub accumulate: bool,
    /// Hopper's faster FP8 accumulation, which keeps fewer bits (TE: no split accumulator).
    pub fast_accumulation: bool,
    /// Bytes that every pointer is a multiple of.
    pub alignment: u16,
}

/// Pointers of one call.
#[derive(Clone, Copy, Debug)]
pub struct GemmIo<'a> {
    /// First operand.
    pub x: DevPtr<'a>,
    /// Its inverse scales; null for high precision.
    pub x_scale: DevPtr<'a>,
    /// Second operand.
    pub w: DevPtr<'a>,
    /// Its inverse scales.
    pub w_scale: DevPtr<'a>,
    /// Bias, null without.
    pub bias: DevPtr<'a>,
    /// Result.
    pub d: DevPtr<'a>,
    /// [`WORKSPACE_BYTES`] bytes on a GPU; null on the host.
    pub workspace: DevPtr<'a>,
}

/// A problem made ready for one device.
#[derive(Debug)]
pub struct GemmPlan {
    problem: Problem,
    /// One part, or several along k where cuBLAS cannot index the operands at once; none on the host.
    parts: Vec<Part>,
}

/// A stretch of the contraction.
#[derive(Debug)]
struct Part {
    cublas: CublasPlan,
    accumulate: bool,
    /// Bytes from the operands' and scales' first bytes.
    offsets: Offsets,
}

#[derive(Clone, Copy, Debug, Default)]
struct Offsets {
    x: usize,
    x_scale: usize,
    w: usize,
    w_scale: usize,
}

impl GemmPlan {
    /// The problem it solves.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Runs it; nothing is done when the result is empty.
    ///
    /// # Errors
    /// cuBLASLt's refusal.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, io: &GemmIo<'_>) -> Result<()> {
        if self.problem.m == 0 || self.problem.n == 0 || !target.trace.on_gemm(&self.problem) {
            return Ok(());
        }
        match (&mut target.backend, self.parts.as_slice()) {
            (Backend::Cuda(queue), [part]) => part.cublas.run(queue.stream, io, part.accumulate),
            (Backend::Cuda(queue), [_, _, ..]) => self.parts.iter().try_for_each(|part| {
                let offsets = part.offsets;
                let io = GemmIo {
                    x: io.x.offset(offsets.x),
                    x_scale: io.x_scale.offset(offsets.x_scale),
                    w: io.w.offset(offsets.w),
                    w_scale: io.w_scale.offset(offsets.w_scale),
                    ..*io
                };
                part.cublas.run(queue.stream, &io, part.accumulate)
            }),
            (Backend::Host, []) => host_gemm::run(&self.problem, io),
            _ => Err(Error::state("gemm", "a plan was run on another device than it was made for")),
        }
    }
}

/// Plans of one device.
#[derive(Debug, Default)]
pub struct GemmPlans {
    cublas: Option<CublasLt>,
    plans: FxHashMap<Problem, Arc<GemmPlan>>,
}

impl GemmPlans {
    /// The plan of `problem`, built at first use.
    ///
    /// # Errors
    /// Shapes or layouts that the device cannot take, or cuBLASLt's refusal. With a CUDA device, its context must be
    /// current.
    pub fn get(&mut self, device: Option<&CudaDevice>, problem: Problem) -> Result<Arc<GemmPlan>> {
        if let Some(plan) = self.plans.get(&problem) {
            return Ok(Arc::clone(plan));
        }
        problem.check()?;
        let mut parts = Vec::new();
        if device.is_some() && problem.m != 0 && problem.n != 0 {
            let cublas = match &mut self.cublas {
                Some(cublas) => cublas,
                none => none.insert(CublasLt::open()?),
            };
            parts = make_parts(cublas, &problem)?;
        }
        if self.plans.len() >= IDLE_PLANS {
            self.plans.retain(|_, plan| Arc::strong_count(plan) > 1);
        }
        let plan = Arc::new(GemmPlan { problem, parts });
        self.plans.insert(problem, Arc::clone(&plan));
        Ok(plan)
    }

    /// How many plans are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }
}

/// The whole problem; or, where cuBLAS has no algorithm for operands this large, parts along k.
fn make_parts(cublas: &CublasLt, problem: &Problem) -> Result<Vec<Part>> {
    let refused = match cublas.plan(problem) {
        Ok(cublas) => return Ok(vec![Part { cublas, accumulate: problem.accumulate, offsets: Offsets::default() }]),
        Err(error) => error,
    };
    let unsupported = matches!(refused.kind(), ErrorKind::Cublas { status: NOT_SUPPORTED, .. });
    let largest = problem.m.max(problem.n);
    if !unsupported || problem.bias.is_some() || largest.saturating_mul(problem.k) <= PART_ELEMENTS {
        return Err(refused);
    }
    let step = (PART_ELEMENTS / largest).next_multiple_of(PART_GRANULE);
    (0..problem.k)
        .step_by(step)
        .map(|start| {
            let accumulate = problem.accumulate || start != 0;
            let part = Problem { k: step.min(problem.k - start), accumulate, ..*problem };
            let offsets = Offsets {
                x: problem.x.offset(start),
                x_scale: problem.x.scale_offset(start, problem.m),
                w: problem.w.offset(start),
                w_scale: problem.w.scale_offset(start, problem.n),
            };
            Ok(Part { cublas: cublas.plan(&part)?, accumulate, offsets })
        })
        .collect()
}

impl Operand {
    /// Bytes to the element of the first row with this k.
    const fn offset(&self, k: usize) -> usize {
        self.dtype.size() * if self.k_outermost { k * self.ld } else { k }
    }

    /// Bytes to the scale of the first row with this k, a multiple of [`PART_GRANULE`].
    const fn scale_offset(&self, k: usize, outer: usize) -> usize {
        let block = k / 128;
        size_of::<f32>()
            * match self.scale {
                ScaleMode::None | ScaleMode::Tensor => 0,
                ScaleMode::Block1d => block * outer.next_multiple_of(4),
                ScaleMode::Block2d => block,
            }
    }
}

impl Problem {
    /// An FP8 operand's k must be a multiple of 16; cuBLAS on Hopper is wrong beyond leading dimensions of 2³¹ bytes.
    fn check(&self) -> Result<()> {
        for (what, operand, outer) in [("x", self.x, self.m), ("w", self.w, self.n)] {
            let inner = if operand.k_outermost { outer } else { self.k };
            if operand.ld < inner {
                return Err(Error::layout("gemm", "leading dimension", format!("at least {inner} for {what}"), operand.ld));
            }
            if operand.ld.saturating_mul(operand.dtype.size()) > i32::MAX as usize {
                return Err(Error::unsupported("gemm", format!("rows of {what} span over 2^31 bytes, which cuBLAS gets wrong on Hopper; split the matrix")));
            }
            if operand.scale != ScaleMode::None && (operand.k_outermost || !operand.ld.is_multiple_of(16)) {
                return Err(Error::layout("gemm", "an FP8 operand", format!("stored [outer, k] with a leading dimension that is a multiple of 16 ({what})"), operand.ld));
            }
        }
        if self.x.dtype == DType::E5m2 && self.w.dtype == DType::E5m2 {
            return Err(Error::unsupported("gemm", "E5M2 times E5M2 has no tensor-core instruction; use E4M3 for one operand"));
        }
        if self.x.scale == ScaleMode::Block2d && self.w.scale == ScaleMode::Block2d {
            return Err(Error::unsupported("gemm", "128x128 by 128x128 block scales are not supported; one operand must have 1x128 scales"));
        }
        Ok(())
    }
}
