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
/// Parts start where results and biases of every type are aligned to [`Problem::alignment`].
const PART_GRANULE: usize = 128;

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

/// What a GEMM does to its result before it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Epilogue {
    /// Nothing beyond the bias.
    #[default]
    None,
    /// GELU, tanh approximation, after the bias.
    Gelu,
    /// `max(x, 0)` after the bias.
    Relu,
}

/// A factor that takes part in a plan's key: equal bits, equal plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor(u32);

impl Factor {
    /// One.
    pub const ONE: Self = Self(0x3f80_0000);

    /// The factor of this value.
    #[must_use]
    pub const fn new(value: f32) -> Self {
        Self(value.to_bits())
    }

    /// Its value.
    #[must_use]
    pub const fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
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
    /// Type of the result; FP8 is stored under a given scale, and its maximum is found.
    pub d: DType,
    /// Elements between two rows of the result.
    pub ldd: usize,
    /// Type of a bias of n elements, added to every row.
    pub bias: Option<DType>,
    /// Factor of the product, before bias and addition.
    pub alpha: Factor,
    /// What follows the bias.
    pub epilogue: Epilogue,
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
    /// Scale of an FP8 result, 16-byte aligned; null for others.
    pub d_scale: DevPtr<'a>,
    /// Set to the maximum of an FP8 result before scaling, 16-byte aligned; null for others.
    pub d_amax: DevPtr<'a>,
    /// [`WORKSPACE_BYTES`] bytes on a GPU; null on the host.
    pub workspace: DevPtr<'a>,
}

impl GemmIo<'_> {
    /// No pointer at all.
    pub const NONE: Self = Self {
        x: DevPtr::null(),
        x_scale: DevPtr::null(),
        w: DevPtr::null(),
        w_scale: DevPtr::null(),
        bias: DevPtr::null(),
        d: DevPtr::null(),
        d_scale: DevPtr::null(),
        d_amax: DevPtr::null(),
        workspace: DevPtr::null(),
    };
}

/// A problem made ready for one device.
#[derive(Debug)]
pub struct GemmPlan {
    problem: Problem,
    /// One part, or several along n where cuBLAS cannot index the second operand at once; none on the host.
    parts: Vec<Part>,
}

/// Some columns of the result.
#[derive(Debug)]
struct Part {
    cublas: CublasPlan,
    /// Bytes from the second operand's, the bias's and the result's first bytes.
    offsets: [usize; 3],
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
            (Backend::Cuda(queue), [part]) => part.cublas.run(queue.stream, io, &self.problem),
            (Backend::Cuda(queue), [_, _, ..]) => self.parts.iter().try_for_each(|part| {
                let [w, bias, d] = part.offsets;
                let io = GemmIo { w: io.w.offset(w), bias: io.bias.offset(bias), d: io.d.offset(d), ..*io };
                part.cublas.run(queue.stream, &io, &self.problem)
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

/// The whole problem; or, where cuBLAS has no algorithm for a second operand this large, parts of its rows.
fn make_parts(cublas: &CublasLt, problem: &Problem) -> Result<Vec<Part>> {
    let refused = match cublas.plan(problem) {
        Ok(cublas) => return Ok(vec![Part { cublas, offsets: [0; 3] }]),
        Err(error) => error,
    };
    let unsupported = matches!(refused.kind(), ErrorKind::Cublas { status: NOT_SUPPORTED, .. });
    let small = problem.n.saturating_mul(problem.w.ld) <= PART_ELEMENTS;
    let splittable = matches!(problem.w.scale, ScaleMode::None | ScaleMode::Tensor) && !problem.w.k_outermost;
    if !unsupported || small || !splittable {
        return Err(refused);
    }
    let step = (PART_ELEMENTS / problem.w.ld).max(1).next_multiple_of(PART_GRANULE);
    (0..problem.n)
        .step_by(step)
        .map(|start| {
            let part = Problem { n: step.min(problem.n - start), ..*problem };
            let w = start * problem.w.ld * problem.w.dtype.size();
            let bias = start * problem.bias.map_or(0, DType::size);
            Ok(Part { cublas: cublas.plan(&part)?, offsets: [w, bias, start * problem.d.size()] })
        })
        .collect()
}

impl Problem {
    /// An FP8 operand's k must be a multiple of 16; cuBLAS on Hopper is wrong beyond leading dimensions of 2³¹ bytes.
    fn check(&self) -> Result<()> {
        for (what, operand, outer) in [("x", self.x, self.m), ("w", self.w, self.n)] {
            let inner = if operand.k_outermost { outer } else { self.k };
            if operand.ld < inner {
                return Err(Error::layout(
                    "gemm",
                    "leading dimension",
                    format!("at least {inner} for {what}"),
                    operand.ld,
                ));
            }
            if operand.ld.saturating_mul(operand.dtype.size()) > i32::MAX as usize {
                return Err(Error::unsupported(
                    "gemm",
                    format!("rows of {what} span over 2^31 bytes, which cuBLAS gets wrong on Hopper; split the matrix"),
                ));
            }
            if operand.scale != ScaleMode::None && (operand.k_outermost || !operand.ld.is_multiple_of(16)) {
                return Err(Error::layout(
                    "gemm",
                    "an FP8 operand",
                    format!("stored [outer, k] with a leading dimension that is a multiple of 16 ({what})"),
                    operand.ld,
                ));
            }
        }
        if self.x.dtype == DType::E5m2 && self.w.dtype == DType::E5m2 {
            return Err(Error::unsupported(
                "gemm",
                "E5M2 times E5M2 has no tensor-core instruction; use E4M3 for one operand",
            ));
        }
        if self.x.scale == ScaleMode::Block2d && self.w.scale == ScaleMode::Block2d {
            return Err(Error::unsupported(
                "gemm",
                "128x128 by 128x128 block scales are not supported; one operand must have 1x128 scales",
            ));
        }
        Ok(())
    }
}
