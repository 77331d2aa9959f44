//! A group of ops that dropout divides: programs that run one after the other, with functions of torch between them.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::tensor::TensorView;

use crate::program::asked::InFp8;
use crate::program::entry::{cast_and_apply, in_region_of_last_forward};
use crate::program::handle::ProgramHandle;
use crate::program::tensors::{Objects, parameters};
use crate::torch::process::{State, state};

/// Kinds of calls that are remembered.
const KINDS: usize = 64;

#[derive(Debug)]
enum Step {
    Program(Py<ProgramHandle>),
    /// Takes a tensor and returns a tensor, with a gradient of torch.
    Function(Py<PyAny>),
}

/// The properties of a call that decide whether it succeeds, given that another call with the same ones did.
#[derive(Debug, PartialEq, Eq)]
struct Kind {
    epoch: u64,
    grad_mode: bool,
    dtype: DType,
    device: Device,
    shape: SmallVec<[i64; 4]>,
}

impl Kind {
    fn of(state: &State, py: Python<'_>, x: &TensorView<'_>) -> PyResult<Self> {
        let grad_mode = state.torch.is_grad_enabled.bind(py).call0()?.is_truthy()?;
        let epoch = state.dispatcher(py)?.0.autocast.current().epoch;
        Ok(Self { epoch, grad_mode, dtype: x.dtype(), device: x.device(), shape: x.shape().into() })
    }
}

/// The programs and functions of a group of ops, if the group has nothing else.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct ProgramSteps {
    steps: Vec<Step>,
    /// Calls that have succeeded.
    known: Mutex<Vec<Kind>>,
}

#[pymethods]
impl ProgramSteps {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts lists by value")]
    fn new(steps: Vec<Bound<'_, PyAny>>) -> Self {
        let step = |step: &Bound<'_, PyAny>| match step.cast::<ProgramHandle>() {
            Ok(program) => Step::Program(program.clone().unbind()),
            Err(_) => Step::Function(step.clone().unbind()),
        };
        Self { steps: steps.iter().map(step).collect(), known: Mutex::default() }
    }

    /// Notes that a call on this input has succeeded in the region in force. Under delayed scaling, calls of unknown kinds go
    /// through Python, which can undo a call that fails.
    fn learn(&self, x: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = state(x.py())?;
        let Some(view) = state.reader.read(x)? else { return Ok(()) };
        let kind = Kind::of(state, x.py(), &view)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(&kind) {
            if known.len() >= KINDS {
                known.clear();
            }
            known.push(kind);
        }
        Ok(())
    }

    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.steps.iter().try_for_each(|step| match step {
            Step::Program(program) => visit.call(program),
            Step::Function(function) => visit.call(function),
        })
    }
}

impl ProgramSteps {
    /// Runs the steps on a plain tensor for the module `owner`. None if the call must go through Python, which casts, undoes
    /// the changes of a failed call, or raises.
    pub(crate) fn run<'py>(
        &self,
        state: &State,
        owner: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
        is_first_microbatch: Option<bool>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = x.py();
        let Some(params) = self.parameters(state, x)? else { return Ok(None) };
        let (mut y, mut params) = (x.clone(), params.iter());
        for step in &self.steps {
            y = match step {
                Step::Function(function) => function.bind(py).call1((y,))?,
                Step::Program(program) => {
                    let program = program.bind(py);
                    let params = params.next().map_or(&[][..], SmallVec::as_slice);
                    in_region_of_last_forward(state, program, || {
                        let asked = ((is_first_microbatch.into(), None), InFp8::default(), None);
                        cast_and_apply((program, owner), &y, &[], (params, None), asked)
                    })?
                }
            };
        }
        Ok(Some(y))
    }

    /// The parameters of each program, if all programs take the call without casts.
    fn parameters<'py>(&self, state: &State, x: &Bound<'py, PyAny>) -> PyResult<Option<SmallVec<[Objects<'py>; 2]>>> {
        let py = x.py();
        if state.torch.is_autocast_enabled.bind(py).call0()?.is_truthy()? {
            return Ok(None);
        }
        let Some(view) = state.reader.read(x)?.filter(|view| view.dtype().as_float().is_some()) else {
            return Ok(None);
        };
        let region = *state.dispatcher(py)?.0.autocast.current();
        if region.enabled && region.recipe.is_delayed() && !self.knows(&Kind::of(state, py, &view)?) {
            return Ok(None);
        }
        let mut all = SmallVec::new();
        for step in &self.steps {
            let Step::Program(program) = step else { continue };
            let Some(params) = parameters(state, program.bind(py), region.enabled)? else { return Ok(None) };
            for param in &params {
                if state.reader.read(param)?.is_some_and(|param| param.dtype() != view.dtype()) {
                    return Ok(None);
                }
            }
            all.push(params);
        }
        // A checkpoint that repeats a forward may leave it with an exception once it has what it needs.
        let is_repeated = region.enabled
            && region.recipe.is_delayed()
            && state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? >= 0;
        Ok((!is_repeated).then_some(all))
    }

    fn knows(&self, kind: &Kind) -> bool {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).contains(kind)
    }
}
