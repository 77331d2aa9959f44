//! Plans of matrix products. A plan is built once per problem, shared by all layers with that problem, and runs on
//! either backend.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use te_fast_kernels::constants::gemm::GROUPED_COLUMNS;

use crate::base::config::{multiplies_dense, multiplies_groups};
use crate::base::dtype::DType;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::device::{CudaDevice, DeviceFacts};
use crate::cuda::lt::api::{CublasLt, NOT_SUPPORTED};
use crate::cuda::lt::dense::CublasPlan;
use crate::cuda::lt::grouped::GroupedCublasPlan;
use crate::cuda::tensor_map::ALIGNMENT;
use crate::gemm::grouped::{BLOCK, GroupedGemmSpec, GroupedKind, GroupedScaling};
use crate::gemm::problem::{Epilogue, Factor, GemmPointers, Problem, ScaleMode};
use crate::host::gemm as host_gemm;
use crate::host::threads;
use crate::launch::target::{Backend, Target};
use crate::ops::grouped_gemm::{GroupedGemmPlan, GroupedGemmPointers};

/// Number of kept plans that no layer holds, in addition to the plans that layers hold.
const IDLE_PLANS: usize = 1024;

/// Elements of an operand that cuBLAS always takes.
const PART_ELEMENTS: usize = 1 << 30;
/// Parts start where results and biases of every type are aligned to [`Problem::alignment`].
const PART_GRANULE: usize = 128;

/// Fewest rows of a product for which the kernel of `cuda/gemm/` is as fast as cuBLASLt, and the share of multiprocessors
/// that its tiles keep busy then, in hundredths (`cuda/README.md` has the figures).
const OWN_ROWS: usize = 4096;
const OWN_BUSY_PERCENT: usize = 99;

/// A problem made ready for one device.
#[derive(Debug)]
pub struct GemmPlan {
    problem: Problem,
    solver: Solver,
    /// Why it is this solver.
    reason: &'static str,
}

/// What multiplies.
#[derive(Debug)]
enum Solver {
    /// The host backend; also products without a result.
    Host,
    /// One part, or several along n where cuBLAS cannot index the second operand at once.
    CublasLt(Vec<Part>),
    /// A kernel of `cuda/gemm/`, with one group.
    Own(GroupedGemmPlan),
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
    pub fn run(&self, target: &mut Target<'_>, io: &GemmPointers<DevPtr<'_>>) -> Result<()> {
        if self.problem.m == 0 || self.problem.n == 0 || !target.trace.on_gemm(&self.problem) {
            return Ok(());
        }
        let Target { backend, trace } = target;
        match (backend, &self.solver) {
            (Backend::Cuda(queue), Solver::Own(plan)) => {
                plan.launch(queue, &GroupedGemmPointers::of(io, DevPtr::null()))
            }
            (Backend::Cuda(queue), Solver::CublasLt(parts)) => parts.iter().try_for_each(|part| {
                let [w, bias, d] = part.offsets;
                let io = GemmPointers { w: io.w.offset(w), bias: io.bias.offset(bias), d: io.d.offset(d), ..*io };
                trace.counters.learned_gemms += u64::from(part.cublas.run(queue, &io, &self.problem)?);
                Ok(())
            }),
            (Backend::Host, Solver::Host) => {
                threads::prepare();
                host_gemm::run(&self.problem, io)
            }
            _ => Err(Error::state("gemm", "a plan was run on another device than it was made for")),
        }
    }

    /// What multiplies, and why; empty on the host.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        self.reason
    }
}

/// Plans of one device.
#[derive(Debug, Default)]
pub struct GemmPlans {
    cublas: Option<CublasLt>,
    plans: FxHashMap<Problem, Arc<GemmPlan>>,
    /// Number of plans that layers held at the last clean-up. The next clean-up waits until there are twice as many, so
    /// that the cost of a new plan does not depend on their number.
    held: usize,
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
        let (solver, reason) = match device {
            Some(device) if problem.m != 0 && problem.n != 0 => self.solver(device, &problem)?,
            _ => (Solver::Host, ""),
        };
        if self.plans.len() >= IDLE_PLANS + 2 * self.held {
            self.plans.retain(|_, plan| Arc::strong_count(plan) > 1);
            self.held = self.plans.len();
        }
        let plan = Arc::new(GemmPlan { problem, solver, reason });
        self.plans.insert(problem, Arc::clone(&plan));
        Ok(plan)
    }

    /// The plan of a grouped product: by the kernel of `cuda/gemm/`, else by cuBLASLt where that is taken.
    ///
    /// # Errors
    /// See [`GroupedGemmPlan::new`].
    pub fn grouped(&mut self, device: &CudaDevice, spec: GroupedGemmSpec) -> Result<GroupedGemmPlan> {
        let (plan, facts) = (GroupedGemmPlan::new(spec)?, device.facts());
        if plan.runs_on(facts) && multiplies_groups() {
            return Ok(plan);
        }
        // A plan without either says so when it is run.
        Ok(match self.by_cublas(device, &spec) {
            Ok(cublas) => plan.by_cublas(cublas),
            Err(_) => plan,
        })
    }

    /// cuBLASLt's plan of a grouped product.
    pub(crate) fn by_cublas(&mut self, device: &CudaDevice, spec: &GroupedGemmSpec) -> Result<GroupedCublasPlan> {
        GroupedCublasPlan::new(self.cublas()?, device.facts().capability, spec)
    }

    /// cuBLASLt, opened at first use.
    fn cublas(&mut self) -> Result<&mut CublasLt> {
        Ok(match &mut self.cublas {
            Some(cublas) => cublas,
            none => none.insert(CublasLt::open()?),
        })
    }

    /// What multiplies on a GPU, and why.
    fn solver(&mut self, device: &CudaDevice, problem: &Problem) -> Result<(Solver, &'static str)> {
        let reason = match own(device.facts(), problem) {
            Ok(plan) => return Ok((Solver::Own(plan), "te_fast's kernel: its tiles fill the multiprocessors")),
            Err(reason) => reason,
        };
        Ok((Solver::CublasLt(make_parts(self.cublas()?, problem)?), reason))
    }

    /// Number of plans.
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

/// Whether tiles of the kernels of `cuda/gemm/` leave few multiprocessors idle in their last turn.
fn keeps_busy(m: usize, n: usize, multiprocessors: usize) -> bool {
    let tiles = m.div_ceil(BLOCK) * n.div_ceil(GROUPED_COLUMNS);
    100 * tiles >= OWN_BUSY_PERCENT * multiprocessors * tiles.div_ceil(multiprocessors)
}

/// The product of one group by a kernel of `cuda/gemm/`, where it is as fast as cuBLASLt's; else why it is not taken.
fn own(facts: &DeviceFacts, problem: &Problem) -> std::result::Result<GroupedGemmPlan, &'static str> {
    let &Problem { m, n, k, x, w, d, ldd, bias, alpha, epilogue, accumulate, alignment, .. } = problem;
    if !multiplies_dense() {
        return Err("cuBLASLt: TE_FAST_OWN_GEMM is 0");
    }
    if (x.scale, w.scale) != (ScaleMode::Block1d, ScaleMode::Block2d) {
        return Err("cuBLASLt: it is faster for all products but those of 1 x 128 by 128 x 128 scales");
    }
    // The kernel reads a bias in pairs of elements, and a bias may lie anywhere.
    let plain = bias.is_none() && alpha == Factor::ONE && epilogue == Epilogue::None && !accumulate;
    let lies_well = (x.ld, w.ld, ldd) == (k, k, n) && usize::from(alignment).is_multiple_of(ALIGNMENT);
    if !plain || !lies_well {
        return Err(
            "cuBLASLt: te_fast's kernel takes contiguous tensors at multiples of 16 bytes, and has no epilogue",
        );
    }
    if m < OWN_ROWS || !keeps_busy(m, n, facts.multiprocessors as usize) {
        return Err("cuBLASLt: te_fast's kernel is as fast only where many tiles fill the multiprocessors");
    }
    let spec = GroupedGemmSpec {
        kind: GroupedKind::Rows,
        groups: 1,
        rows: m,
        counted: m,
        n,
        k,
        a: x.dtype,
        b: w.dtype,
        d,
        scaling: GroupedScaling::Block,
        bias: None,
        accumulate: false,
        fast_accumulation: false,
        b_k_outermost: false,
        align: 1,
        scale_pitch: m.next_multiple_of(4),
    };
    let plan = GroupedGemmPlan::new(spec).ok().filter(|plan| plan.runs_on(facts));
    plan.ok_or("cuBLASLt: there is no kernel of te_fast's for these types, sizes and this GPU")
}

/// The whole problem, or parts of its rows if cuBLAS has no algorithm for a second operand of this size.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::problem::{Epilogue, Factor, Operand};

    fn problem(m: usize) -> Problem {
        let operand = Operand { dtype: DType::F32, scale: ScaleMode::None, ld: 8, k_outermost: false };
        Problem {
            m,
            n: 8,
            k: 8,
            x: operand,
            w: operand,
            d: DType::F32,
            ldd: 8,
            bias: None,
            alpha: Factor::ONE,
            epilogue: Epilogue::None,
            accumulate: false,
            fast_accumulation: false,
            exact: false,
            alignment: 256,
        }
    }

    #[test]
    fn tiles_that_fill_the_last_turn_keep_all_busy() {
        for (m, n, busy) in [
            (4219, 1016, true),   // 132 tiles
            (4219, 1032, false),  // 165 of 264
            (4096, 1024, false),  // 128 of 132
            (2048, 22016, false), // 1376 of 1452
            (8192, 22016, true),  // 5504 of 5544
        ] {
            assert_eq!(keeps_busy(m, n, 132), busy, "{m} x {n}");
        }
    }

    #[test]
    fn plans_that_nobody_holds_are_bounded_and_those_held_stay() -> Result<()> {
        let mut plans = GemmPlans::default();
        let held = (0..500).map(|m| plans.get(None, problem(m))).collect::<Result<Vec<_>>>()?;
        for m in 500..10_000 {
            plans.get(None, problem(m))?;
            assert!(plans.len() <= IDLE_PLANS + 2 * held.len());
        }
        let built = plans.len();
        for (m, plan) in held.iter().enumerate() {
            assert!(Arc::ptr_eq(plan, &plans.get(None, problem(m))?));
        }
        assert_eq!(plans.len(), built);
        Ok(())
    }
}
