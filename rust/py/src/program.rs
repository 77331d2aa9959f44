//! Chains of ops as Python builds them: the ops, where their parameters are found, and what is kept between calls.

use std::collections::VecDeque;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use te_fast_core::Error;
use te_fast_core::autocast::{AmaxSlots, Region};
use te_fast_core::ops::norm::NormKind;
use te_fast_core::program::{Chain, LinearSlots, Op, Program};
use te_fast_core::tensor::TensorView;

use crate::error::IntoPython;
use crate::layer::{deferral_number, slot};
use crate::program_functions::activation_named;
use crate::replay::Replay;
use crate::state::contiguous_strides;
use crate::weight::{Described, WeightCache};

/// Compiled programs and shapes of one chain that are kept; those that vary without end displace the oldest.
const KEPT: usize = 64;

/// Delayed-scaling slots of a linear op, valid for one epoch.
#[derive(Clone, Debug)]
pub(crate) struct OpSlots {
    pub(crate) epoch: u64,
    pub(crate) forward: Arc<AmaxSlots>,
    pub(crate) backward: Arc<AmaxSlots>,
    forward_base: usize,
    backward_base: usize,
}

impl OpSlots {
    /// Whether calls in regions of `epoch` may use them: they are its op's still.
    #[inline]
    pub(crate) fn serve(&self, epoch: u64) -> bool {
        self.epoch == epoch && !self.forward.is_retired() && !self.backward.is_retired()
    }

    pub(crate) fn slots(&self) -> LinearSlots<'_> {
        LinearSlots {
            input: slot(&self.forward, self.forward_base),
            weight: slot(&self.forward, self.forward_base + 1),
            grad: slot(&self.backward, self.backward_base),
        }
    }

    /// The same, with the forward scales of a call that is repeated.
    pub(crate) fn replayed<'a>(&'a self, replay: &'a Replay) -> LinearSlots<'a> {
        let (input, weight) = (replay.slot(self.forward_base), replay.slot(self.forward_base + 1));
        LinearSlots { input, weight, ..self.slots() }
    }
}

/// A weight gradient put off until `backward_dw`.
#[derive(Debug)]
pub(crate) struct WaitingGrad {
    /// [`deferral_number`].
    number: u64,
    /// What it is computed from; none after a forward on zero rows.
    pub(crate) rows: Option<WaitingRows>,
    pub(crate) overwrite_main_grad: bool,
}

impl WaitingGrad {
    pub(crate) fn new(rows: Option<WaitingRows>, overwrite_main_grad: bool) -> Self {
        Self { number: deferral_number(), rows, overwrite_main_grad }
    }
}

/// Operands of a weight gradient that was put off.
#[derive(Debug)]
pub(crate) struct WaitingRows {
    pub(crate) program: Arc<Program>,
    pub(crate) linear: usize,
    /// The saved tensors of the node, and its gradient.
    pub(crate) saved: Py<PyTuple>,
    pub(crate) grad: Py<PyAny>,
}

/// What a linear op inside a program keeps between calls.
#[pyclass(module = "te_fast._native", name = "WeightHandle")]
#[derive(Debug)]
pub(crate) struct WeightHandle {
    name: String,
    pub(crate) cache: WeightCache,
    pub(crate) slots: Option<OpSlots>,
    pub(crate) waiting: VecDeque<WaitingGrad>,
    /// The weight's gradient is added to `main_grad`.
    #[pyo3(get, set)]
    pub(crate) fuse_wgrad_accumulation: bool,
    /// The weight's gradient waits for `backward_dw`.
    #[pyo3(get, set)]
    pub(crate) delay_wgrad_compute: bool,
}

#[pymethods]
impl WeightHandle {
    #[new]
    fn new(name: String) -> Self {
        Self {
            name,
            cache: WeightCache::default(),
            slots: None,
            waiting: VecDeque::new(),
            fuse_wgrad_accumulation: false,
            delay_wgrad_compute: false,
        }
    }

    /// Name in messages.
    #[getter]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Forgets the quantised weight: the next forward quantises it again.
    fn drop_weight_cache(slf: &Bound<'_, Self>) -> PyResult<()> {
        let former = slf.try_borrow_mut()?.cache.clear();
        drop(former);
        Ok(())
    }

    /// Forgets amax slots: the next forward sets them up again.
    fn drop_slots(&mut self) {
        self.slots = None;
    }

    /// Uses these delayed-scaling slots for regions of `epoch`: input and weight from `forward_base` on, the output's
    /// gradient at `backward_base`.
    fn set_slots(
        &mut self,
        epoch: u64,
        forward: &crate::autocast::SlotsHandle,
        backward: &crate::autocast::SlotsHandle,
        forward_base: usize,
        backward_base: usize,
    ) -> PyResult<()> {
        let forward = forward.slots(&self.name, true, forward_base + 2)?;
        let backward = backward.slots(&self.name, false, backward_base + 1)?;
        self.slots = Some(OpSlots { epoch, forward, backward, forward_base, backward_base });
        Ok(())
    }

    /// Number of weight gradients that wait for `backward_dw`.
    fn deferred_count(&self) -> usize {
        self.waiting.len()
    }

    /// [`deferral_number`] of the first of them, or None.
    fn oldest_deferral(&self) -> Option<u64> {
        self.waiting.front().map(|waiting| waiting.number)
    }

    /// The quantised weight: (buffer, bytes, has row layout, has column layout), or None.
    fn weight_cache<'py>(&self, py: Python<'py>) -> PyResult<Option<Described<'py>>> {
        self.cache.describe(py)
    }
}

/// Where a parameter is found at every call.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) parameters: Py<PyDict>,
    pub(crate) name: Py<PyString>,
}

/// Shapes of one call as Python tuples, so that a forward builds none.
#[derive(Debug)]
pub(crate) struct Shapes {
    x: Vec<i64>,
    pub(crate) input: Tuples,
    pub(crate) output: Tuples,
    pub(crate) extra_outputs: Vec<Tuples>,
}

/// Size and strides of a contiguous tensor.
#[derive(Debug)]
pub(crate) struct Tuples {
    pub(crate) size: Py<PyTuple>,
    pub(crate) stride: Py<PyTuple>,
}

impl Tuples {
    pub(crate) fn new(py: Python<'_>, size: &[i64]) -> PyResult<Self> {
        let stride = PyTuple::new(py, contiguous_strides(size))?.unbind();
        Ok(Self { size: PyTuple::new(py, size)?.unbind(), stride })
    }
}

/// A program with what calls of it need from Python.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) program: Arc<Program>,
    pub(crate) saved_size: Option<Py<PyTuple>>,
    /// Of each parameter.
    pub(crate) params: Vec<Tuples>,
}

/// A chain of native ops.
#[pyclass(module = "te_fast._native", name = "Program")]
#[derive(Debug)]
pub(crate) struct ProgramHandle {
    pub(crate) name: String,
    pub(crate) chain: Chain,
    pub(crate) params: Vec<Parameter>,
    pub(crate) weights: Vec<Py<WeightHandle>>,
    /// Parameters must have the input's type.
    #[pyo3(get, set)]
    pub(crate) strict_types: bool,
    /// Region of the last forward, if that was in FP8: what a recomputation during backward repeats.
    pub(crate) last_region: Option<Region>,
    compiled: Vec<Arc<Compiled>>,
    shapes: Vec<Arc<Shapes>>,
}

impl ProgramHandle {
    fn parameter(&mut self, parameters: &Bound<'_, PyDict>, name: &str) {
        let name = PyString::intern(parameters.py(), name).unbind();
        self.params.push(Parameter { parameters: parameters.clone().unbind(), name });
    }

    /// What a linear op keeps, and its weight among the parameters; none behind the last op. Nothing stays borrowed, so
    /// that what is done for one op may run Python code.
    pub(crate) fn linear_at(handle: &Bound<'_, Self>, number: usize) -> PyResult<Option<(Py<WeightHandle>, usize)>> {
        let program = handle.try_borrow()?;
        let weight = program.weights.get(number).map(|weight| weight.clone_ref(handle.py()));
        Ok(weight.map(|weight| (weight, program.chain.linear_params()[number])))
    }

    /// Linear ops whose weight gradient waits for `backward_dw`.
    pub(crate) fn deferred(&self, py: Python<'_>) -> PyResult<Vec<bool>> {
        self.weights.iter().map(|weight| Ok(weight.bind(py).try_borrow()?.delay_wgrad_compute)).collect()
    }

    /// The compiled program that `fits`; the last one used is found first.
    #[inline]
    pub(crate) fn find(&mut self, fits: impl Fn(&Program) -> bool) -> Option<Arc<Compiled>> {
        let index = self.compiled.iter().rposition(|compiled| fits(&compiled.program))?;
        let last = self.compiled.len() - 1;
        self.compiled.swap(index, last);
        self.compiled.last().map(Arc::clone)
    }

    pub(crate) fn insert(&mut self, compiled: &Arc<Compiled>) {
        if self.compiled.len() >= KEPT {
            self.compiled.remove(0);
        }
        self.compiled.push(Arc::clone(compiled));
    }

    /// Tuples for an input of this shape; the widths of output and extra outputs follow from it.
    #[inline]
    pub(crate) fn shapes(
        &mut self,
        py: Python<'_>,
        x: &TensorView<'_>,
        out_cols: usize,
        extra_cols: &[usize],
    ) -> PyResult<Arc<Shapes>> {
        if let Some(known) = self.shapes.iter().rev().find(|known| known.x == x.shape()) {
            return Ok(Arc::clone(known));
        }
        let with_cols = |cols: usize| {
            let mut size = x.shape().to_vec();
            if let Some(last) = size.last_mut() {
                *last = cols as i64;
            }
            Tuples::new(py, &size)
        };
        let shapes = Arc::new(Shapes {
            x: x.shape().to_vec(),
            input: Tuples::new(py, x.shape())?,
            output: with_cols(out_cols)?,
            extra_outputs: extra_cols.iter().map(|&cols| with_cols(cols)).collect::<PyResult<_>>()?,
        });
        if self.shapes.len() >= KEPT {
            self.shapes.remove(0);
        }
        self.shapes.push(Arc::clone(&shapes));
        Ok(shapes)
    }
}

#[pymethods]
impl ProgramHandle {
    #[new]
    fn new(name: String) -> Self {
        Self {
            name,
            chain: Chain::default(),
            params: Vec::new(),
            weights: Vec::new(),
            strict_types: false,
            last_region: None,
            compiled: Vec::new(),
            shapes: Vec::new(),
        }
    }

    /// Appends `x · Wᵀ`.
    fn linear(
        &mut self,
        label: String,
        handle: &Bound<'_, WeightHandle>,
        parameters: &Bound<'_, PyDict>,
        weight: &str,
        in_features: usize,
        out_features: usize,
    ) {
        self.chain.push(label, Op::Linear { inputs: in_features, outputs: out_features });
        self.parameter(parameters, weight);
        self.weights.push(handle.clone().unbind());
    }

    /// Appends `x + b`.
    fn bias(&mut self, label: String, parameters: &Bound<'_, PyDict>, name: &str, size: usize) {
        self.chain.push(label, Op::Bias { size });
        self.parameter(parameters, name);
    }

    /// Appends a normalisation of rows.
    #[expect(clippy::too_many_arguments, reason = "a Python method's arguments")]
    fn norm(
        &mut self,
        label: String,
        kind: &str,
        parameters: &Bound<'_, PyDict>,
        weight: &str,
        bias: Option<&str>,
        cols: usize,
        eps: f64,
        zero_centered_gamma: bool,
    ) -> PyResult<()> {
        let kind = match (kind, bias) {
            ("LayerNorm", Some(_)) => NormKind::LayerNorm,
            ("RMSNorm", None) => NormKind::RmsNorm,
            _ => {
                let message = format!("{label}: a norm is LayerNorm with a bias or RMSNorm without, got {kind:?}");
                return Err(Error::value("ops", message)).python();
            }
        };
        self.chain.push(label, Op::Norm { kind, cols, eps: eps as f32, zero_centered_gamma });
        self.parameter(parameters, weight);
        if let Some(bias) = bias {
            self.parameter(parameters, bias);
        }
        Ok(())
    }

    /// Appends an activation function; keywords are its constants.
    #[pyo3(signature = (label, kind, *, interleave=0, scaled=false, cache_quantized_input=false, **constants))]
    fn activation(
        &mut self,
        label: String,
        kind: &str,
        interleave: usize,
        scaled: bool,
        cache_quantized_input: bool,
        constants: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let function = activation_named(kind, constants)?;
        self.chain.push(label, Op::Activation { function, interleave, scaled, cache_quantized_input });
        Ok(())
    }

    /// Appends `x + extra`.
    fn add_extra_input(&mut self, label: String, in_place: bool) {
        self.chain.push(label, Op::AddExtraInput { in_place });
    }

    /// Appends an op that hands its input out as well.
    fn make_extra_output(&mut self, label: String, in_place: bool) {
        self.chain.push(label, Op::MakeExtraOutput { in_place });
    }

    /// Appends `scale · x`.
    fn constant_scale(&mut self, label: String, scale: f64) {
        self.chain.push(label, Op::ConstantScale { scale: scale as f32 });
    }

    /// Appends `x`.
    fn identity(&mut self, label: String) {
        self.chain.push(label, Op::Identity);
    }

    /// Extra inputs of all ops.
    #[getter]
    fn num_extra_inputs(&self) -> usize {
        self.chain.extra_inputs()
    }

    /// Extra outputs of all ops.
    #[getter]
    fn num_extra_outputs(&self) -> usize {
        self.chain.extra_outputs()
    }

    /// Columns of the output and of each extra output, for an input of `cols` columns.
    fn widths(&self, cols: usize) -> PyResult<Vec<usize>> {
        let widths = self.chain.widths(cols).map_err(|error| crate::error::named(&error, Some(&self.name)))?;
        let links = self.chain.links().iter().zip(&widths);
        let extra = links.filter(|(link, _)| link.op.extra_outputs() != 0).map(|(_, &cols)| cols);
        Ok(widths.last().copied().into_iter().chain(extra).collect())
    }

    /// Number of compiled programs held.
    fn plan_count(&self) -> usize {
        self.compiled.len()
    }

    /// Forgets compiled programs.
    fn drop_plans(&mut self) {
        self.compiled.clear();
        self.shapes.clear();
    }

    /// Each compiled program: its key, the launches of forward and backward with the ops they compute, and why fusions
    /// did not apply.
    fn explain<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.compiled
            .iter()
            .map(|compiled| {
                let program = &compiled.program;
                let key = program.key();
                let scaling =
                    program.recipe().map_or("high precision".into(), |recipe| format!("{:?}", recipe.scaling));
                let entry = PyDict::new(py);
                let [forward, backward] = program.explain().map(|steps| {
                    steps
                        .iter()
                        .map(|step| (step.text, (step.ops.0..=step.ops.1).collect::<Vec<_>>()))
                        .collect::<Vec<_>>()
                });
                let gradients = if key.any_grad() { "gradients" } else { "no gradients" };
                let text = format!(
                    "{} x {} {}, {scaling}, {gradients}",
                    key.rows,
                    key.cols,
                    crate::program_functions::type_name(key.activation)
                );
                entry.set_item("key", text)?;
                entry.set_item("forward", forward)?;
                entry.set_item("backward", backward)?;
                entry.set_item("notes", program.notes())?;
                Ok(entry)
            })
            .collect()
    }
}
