//! Chains of ops as Python builds them: the ops, the places of their parameters, and the state between calls.

use std::sync::{Arc, OnceLock};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;
use te_fast_core::ops::norm_spec::NormKind;
use te_fast_core::ops::router::RouterSpec;
use te_fast_core::program::{
    Chain, Explained, Groups, KeptProgram, LinearCall, Op, Program, ProgramCache, QuantizedKind, Router,
};
use te_fast_core::recipe::region::Region;
use te_fast_core::{Error, Float};

use crate::direct::router::{Choice, spec_of};
use crate::error::{Failure, IntoPython};
use crate::program::functions::activation_named;
use crate::program::weight::WeightHandle;
use crate::tensor::handed::quantizer_of;
use crate::torch::process::contiguous_strides;

/// Number of kept shapes of one chain; a new shape beyond it replaces the oldest.
const SHAPES: usize = 64;

/// The place where calls find a parameter.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) parameters: Py<PyDict>,
    pub(crate) name: Py<PyString>,
    /// Names of its parts along dimension 0; empty for a parameter in one piece.
    pub(crate) parts: Vec<Py<PyString>>,
    /// Whether the gradients of its parts go into their `main_grad`.
    pub(crate) fuses: bool,
}

impl Parameter {
    /// The parameter, if it exists.
    #[inline]
    pub(crate) fn get<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.parameters.bind(py).get_item(self.name.bind(py))
    }

    /// Names of its parts, or its own name.
    #[inline]
    pub(crate) fn names(&self) -> &[Py<PyString>] {
        if self.parts.is_empty() { std::slice::from_ref(&self.name) } else { &self.parts }
    }
}

/// The path of a layer outside of FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutsideFp8 {
    /// The program.
    Program,
    /// torch's own linear function: the one linear op of the program, and its bias.
    Torch,
    /// The layer's general path.
    General,
}

/// Shapes of one call as Python tuples, so that a forward builds none.
#[derive(Debug)]
pub(crate) struct Shapes {
    x: Vec<i64>,
    pub(crate) input: Tuples,
    pub(crate) output: Tuples,
    pub(crate) extra_outputs: Vec<Tuples>,
}

impl Shapes {
    fn new(py: Python<'_>, x: &[i64], program: &Program) -> PyResult<Self> {
        let with_cols = |cols: usize| {
            let mut size = x.to_vec();
            if let Some(last) = size.last_mut() {
                *last = cols as i64;
            }
            Tuples::new(py, &size)
        };
        Ok(Self {
            x: x.to_vec(),
            input: Tuples::new(py, x)?,
            output: with_cols(program.out_cols())?,
            extra_outputs: program
                .extra_output_kinds()
                .iter()
                .map(|&(cols, _)| with_cols(cols))
                .collect::<PyResult<_>>()?,
        })
    }
}

/// Size and strides of a contiguous tensor.
#[derive(Debug)]
pub(crate) struct Tuples {
    pub(crate) shape: SmallVec<[i64; 4]>,
    pub(crate) size: Py<PyTuple>,
    pub(crate) stride: Py<PyTuple>,
}

impl Tuples {
    pub(crate) fn new(py: Python<'_>, size: &[i64]) -> PyResult<Self> {
        let stride = PyTuple::new(py, contiguous_strides(size))?.unbind();
        Ok(Self { shape: size.into(), size: PyTuple::new(py, size)?.unbind(), stride })
    }
}

/// A program, with data from Python for its calls.
#[derive(Debug)]
pub(crate) struct PyProgram {
    pub(crate) program: Arc<Program>,
    /// For each parameter.
    pub(crate) params: Vec<Tuples>,
    /// The quantizers of a quantised output and of a quantised gradient of the input; made at first use.
    quantizers: [OnceLock<Py<PyAny>>; 2],
}

impl PyProgram {
    pub(crate) fn new(program: Arc<Program>, params: Vec<Tuples>) -> Self {
        Self { program, params, quantizers: [const { OnceLock::new() }; 2] }
    }

    /// The quantizer of a quantised output, or of a quantised gradient of the input.
    pub(crate) fn quantizer<'py>(
        &self,
        owner: &Bound<'py, PyAny>,
        kind: QuantizedKind,
        is_grad: bool,
    ) -> Result<Bound<'py, PyAny>, Failure> {
        let py = owner.py();
        let slot = &self.quantizers[usize::from(is_grad)];
        if let Some(known) = slot.get() {
            return Ok(known.bind(py).clone());
        }
        let made = quantizer_of(owner, kind, is_grad)?;
        let _ = slot.set(made.clone_ref(py)); // another thread may have been faster
        Ok(made.into_bound(py))
    }
}

impl AsRef<Program> for PyProgram {
    fn as_ref(&self) -> &Program {
        &self.program
    }
}

/// A chain of native ops.
#[pyclass(module = "te_fast._native", name = "Program", weakref)]
#[derive(Debug)]
pub(crate) struct ProgramHandle {
    pub(crate) name: String,
    pub(crate) chain: Chain,
    pub(crate) params: Vec<Parameter>,
    pub(crate) weights: Vec<Py<WeightHandle>>,
    pub(crate) outside_fp8: OutsideFp8,
    /// Whether calls of the layer that need no Python go straight to the program.
    #[pyo3(get, set)]
    pub(crate) is_direct: bool,
    /// A bias that the layer returns beside its result.
    returned_bias: Option<Parameter>,
    /// Region of the last forward, if it was in FP8, for a recomputation during backward.
    pub(crate) last_region: Option<Region>,
    /// If a compiled forward of this program was the first FP8 layer of its region, the number of that region; the
    /// number changes when another region has begun.
    pub(crate) first_module: Option<u64>,
    /// Whether a backward has asked for the update that belongs to [`Self::first_module`].
    pub(crate) first_module_done: bool,
    /// Number of updates of the scales before the last compiled forward.
    pub(crate) traced_generation: u64,
    pub(crate) programs: ProgramCache<PyProgram>,
    shapes: Vec<Arc<Shapes>>,
}

impl ProgramHandle {
    fn parameter(&mut self, parameters: &Bound<'_, PyDict>, name: &str, parts: &[String]) {
        let interned = |name: &str| PyString::intern(parameters.py(), name).unbind();
        let (name, parts) = (interned(name), parts.iter().map(|part| interned(part)).collect());
        self.params.push(Parameter { parameters: parameters.clone().unbind(), name, parts, fuses: false });
    }

    /// A stack of parameters, by the names of its parts; a single name is the stack's own, unless it ends in a number.
    fn stack(&mut self, parameters: &Bound<'_, PyDict>, name: &str, parts: &[String]) -> PyResult<()> {
        match parts {
            [] => Err(Error::value("ops", format!("a stack of {name}s needs a name"))).python(),
            [whole] if whole == name => {
                self.parameter(parameters, whole, &[]);
                Ok(())
            }
            parts => {
                self.parameter(parameters, name, parts);
                Ok(())
            }
        }
    }

    /// Whether a parameter consists of parts.
    #[inline]
    pub(crate) fn has_parts(&self) -> bool {
        self.params.iter().any(|param| !param.parts.is_empty())
    }

    /// Whether a bias is returned beside the result, and this bias; none if it is no parameter any more: parametrised,
    /// pruned, or removed.
    #[inline]
    pub(crate) fn returned_bias<'py>(handle: &Bound<'py, Self>) -> PyResult<(bool, Option<Bound<'py, PyAny>>)> {
        match &handle.try_borrow()?.returned_bias {
            Some(bias) => Ok((true, bias.get(handle.py())?.filter(|bias| !bias.is_none()))),
            None => Ok((false, None)),
        }
    }

    /// The handle of a linear op, and its weight's index among the parameters; none after the last op. Nothing stays
    /// borrowed, so that work for one op may run Python code.
    pub(crate) fn linear_at(handle: &Bound<'_, Self>, number: usize) -> PyResult<Option<(Py<WeightHandle>, usize)>> {
        let program = handle.try_borrow()?;
        let weight = program.weights.get(number).map(|weight| weight.clone_ref(handle.py()));
        Ok(weight.map(|weight| (weight, program.chain.linear_params()[number])))
    }

    /// Whether every linear op has slots of delayed scaling for regions of `epoch`.
    pub(crate) fn has_slots(&self, py: Python<'_>, epoch: u64) -> PyResult<bool> {
        for weight in &self.weights {
            if weight.bind(py).try_borrow()?.slots.as_ref().is_none_or(|slots| !slots.serve(epoch)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// How each linear op is called.
    pub(crate) fn linear_calls(&self, py: Python<'_>) -> PyResult<SmallVec<[LinearCall; 4]>> {
        let call = |weight: &Py<WeightHandle>| {
            let weight = weight.bind(py).try_borrow()?;
            let (deferred, save_original_input) = (weight.delay_wgrad_compute, weight.save_original_input);
            Ok(LinearCall { deferred, save_original_input })
        };
        self.weights.iter().map(call).collect()
    }

    /// Tuples for an input of this shape; the widths of output and extra outputs follow from it. Nothing is borrowed
    /// while they are made, since Python may collect garbage and run foreign code.
    #[inline]
    pub(crate) fn shapes(handle: &Bound<'_, Self>, x: &[i64], program: &Program) -> PyResult<Arc<Shapes>> {
        if let Some(known) = handle.try_borrow()?.shapes.iter().rev().find(|known| known.x == x) {
            return Ok(Arc::clone(known));
        }
        let shapes = Arc::new(Shapes::new(handle.py(), x, program)?);
        let mut handle = handle.try_borrow_mut()?;
        if handle.shapes.len() >= SHAPES {
            handle.shapes.remove(0);
        }
        handle.shapes.push(Arc::clone(&shapes));
        Ok(shapes)
    }
}

#[pymethods]
impl ProgramHandle {
    #[new]
    #[pyo3(signature = (name, /, *, outside_fp8="program"))]
    fn new(name: String, outside_fp8: &str) -> PyResult<Self> {
        let outside_fp8 = match outside_fp8 {
            "program" => OutsideFp8::Program,
            "torch" => OutsideFp8::Torch,
            "general" => OutsideFp8::General,
            other => return Err(Error::value("ops", format!("nothing outside of FP8 is called {other:?}"))).python(),
        };
        Ok(Self {
            name,
            chain: Chain::default(),
            params: Vec::new(),
            weights: Vec::new(),
            outside_fp8,
            is_direct: false,
            returned_bias: None,
            last_region: None,
            first_module: None,
            first_module_done: false,
            traced_generation: 0,
            programs: ProgramCache::default(),
            shapes: Vec::new(),
        })
    }

    /// Lets calls of the layer return the bias of this name beside the result, in the result's type.
    fn return_bias(&mut self, parameters: &Bound<'_, PyDict>, name: &str) {
        let name = PyString::intern(parameters.py(), name).unbind();
        self.returned_bias =
            Some(Parameter { parameters: parameters.clone().unbind(), name, parts: Vec::new(), fuses: false });
    }

    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for parameter in self.params.iter().chain(&self.returned_bias) {
            visit.call(&parameter.parameters)?;
        }
        self.weights.iter().try_for_each(|weight| visit.call(weight))
    }

    fn __clear__(&mut self) {
        self.params.clear();
        self.weights.clear();
        self.returned_bias = None;
    }

    /// Appends `x · Wᵀ`, of a weight that may consist of `parts` along dimension 0.
    #[pyo3(signature = (label, handle, parameters, weight, in_features, out_features, parts=Vec::new()))]
    #[expect(clippy::needless_pass_by_value, reason = "a Python method's argument")]
    fn linear(
        &mut self,
        label: String,
        handle: &Bound<'_, WeightHandle>,
        parameters: &Bound<'_, PyDict>,
        weight: &str,
        in_features: usize,
        out_features: usize,
        parts: Vec<String>,
    ) {
        self.chain.push(label, Op::Linear { inputs: in_features, outputs: out_features, groups: None });
        self.parameter(parameters, weight, &parts);
        self.weights.push(handle.clone().unbind());
    }

    /// Lets the gradients of the parts of the last linear op's weight go into their `main_grad`.
    fn fuse_parts(&mut self) {
        if let Some(&weight) = self.chain.linear_params().last()
            && let Some(weight) = self.params.get_mut(weight)
        {
            weight.fuses = true;
        }
    }

    /// Appends `x + b`, of a bias that may consist of `parts`.
    #[pyo3(signature = (label, parameters, name, size, parts=Vec::new()))]
    #[expect(clippy::needless_pass_by_value, reason = "a Python method's argument")]
    fn bias(&mut self, label: String, parameters: &Bound<'_, PyDict>, name: &str, size: usize, parts: Vec<String>) {
        self.chain.push(label, Op::Bias { size, groups: None });
        self.parameter(parameters, name, &parts);
    }

    /// Appends `x · Wᵀ` of experts, whose rows an extra input counts. `weights` names the experts' weights, or the stack of
    /// them alone; `slots` are those of delayed scaling from one expert to the next, forward and backward.
    #[expect(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "a Python method's arguments")]
    fn grouped_linear(
        &mut self,
        label: String,
        handle: &Bound<'_, WeightHandle>,
        parameters: &Bound<'_, PyDict>,
        weights: Vec<String>,
        num_groups: usize,
        in_features: usize,
        out_features: usize,
        slots: (usize, usize),
    ) -> PyResult<()> {
        let groups = Groups { count: num_groups, slots: slots.into() };
        self.chain.push(label, Op::Linear { inputs: in_features, outputs: out_features, groups: Some(groups) });
        self.stack(parameters, "weight", &weights)?;
        self.weights.push(handle.clone().unbind());
        Ok(())
    }

    /// Appends the biases of such an op, right behind it; `biases` names them, or the stack of them alone.
    #[expect(clippy::needless_pass_by_value, reason = "a Python method's argument")]
    fn grouped_bias(
        &mut self,
        label: String,
        parameters: &Bound<'_, PyDict>,
        biases: Vec<String>,
        num_groups: usize,
        size: usize,
    ) -> PyResult<()> {
        self.chain.push(label, Op::Bias { size, groups: Some(num_groups) });
        self.stack(parameters, "bias", &biases)
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
        self.parameter(parameters, weight, &[]);
        if let Some(bias) = bias {
            self.parameter(parameters, bias, &[]);
        }
        Ok(())
    }

    /// Appends an activation function; keywords are its constants.
    #[pyo3(signature = (label, kind, *, interleave=0, scaled=false, cache_quantized_input=false, recompute=false, **constants))]
    fn activation(
        &mut self,
        label: String,
        kind: &str,
        interleave: usize,
        scaled: bool,
        cache_quantized_input: bool,
        recompute: bool,
        constants: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let function = activation_named(kind, constants)?;
        let op = Op::Activation { function, interleave, scaled, cache_quantized_input, recompute };
        self.chain.push(label, op);
        Ok(())
    }

    /// Appends `x + extra`.
    fn add_extra_input(&mut self, label: String, in_place: bool) {
        self.chain.push(label, Op::AddExtraInput { in_place });
    }

    /// Appends an op that also returns its input.
    fn make_extra_output(&mut self, label: String, in_place: bool) {
        self.chain.push(label, Op::MakeExtraOutput { in_place });
    }

    /// Begins a residual connection; returns its number, for its end.
    fn residual(&mut self, label: String) -> usize {
        self.chain.push(label, Op::Residual);
        self.chain.links().len() - 1
    }

    /// Appends the sum of `x` and the beginning of a residual connection.
    fn add_residual(&mut self, label: String, begin: usize) {
        self.chain.push(label, Op::AddResidual { begin });
    }

    /// Appends `scale · x`.
    fn constant_scale(&mut self, label: String, scale: f64) {
        self.chain.push(label, Op::ConstantScale { scale: scale as f32 });
    }

    /// Appends a router of tokens; the permutation right behind moves the rows by its choice. With `biased`, extra inputs
    /// are a bias of the experts and memory for the numbers of their tokens. With `logits`, an extra output are the logits.
    #[pyo3(signature = (label, parameters, weight, num_experts, cols, choice, *, biased, logits))]
    #[expect(clippy::too_many_arguments, reason = "a Python method's arguments")]
    fn router(
        &mut self,
        label: String,
        parameters: &Bound<'_, PyDict>,
        weight: &str,
        num_experts: usize,
        cols: usize,
        choice: Choice<'_>,
        biased: bool,
        logits: bool,
    ) -> PyResult<()> {
        let choice = RouterSpec { experts: num_experts, ..spec_of(choice, Float::F32).python()? };
        self.chain.push(label, Op::Router(Router { cols, choice, biased, logits }));
        self.parameter(parameters, weight, &[]);
        Ok(())
    }

    /// Appends a permutation of tokens' rows to experts, by the router before it or by extra inputs of a mask and
    /// probabilities. Ops behind it take counts and factors of the rows from it.
    #[pyo3(signature = (label, num_experts, topk, *, routed=false))]
    fn permute(&mut self, label: String, num_experts: usize, topk: usize, routed: bool) {
        self.chain.push(label, Op::Permute { experts: num_experts, topk, routed });
    }

    /// Appends the inverse permutation, which sums each token's rows.
    fn unpermute(&mut self, label: String) {
        self.chain.push(label, Op::Unpermute);
    }

    /// Appends `x`.
    fn identity(&mut self, label: String) {
        self.chain.push(label, Op::Identity);
    }

    /// Text of the properties that programs of one kind share: ops with their sizes and constants, and options of
    /// linear ops.
    #[getter]
    fn signature(&self, py: Python<'_>) -> PyResult<String> {
        let ops: Vec<_> = self.chain.links().iter().map(|link| link.op).collect();
        let fuses = self.weights.iter().map(|weight| Ok(weight.bind(py).try_borrow()?.fuse_wgrad_accumulation));
        let fuses = fuses.collect::<PyResult<Vec<_>>>()?;
        let parts: Vec<_> = self.params.iter().map(|param| (param.parts.len(), param.fuses)).collect();
        Ok(format!("{ops:?} {:?} {fuses:?} {parts:?}", self.linear_calls(py)?))
    }

    /// Whether calls in FP8 read the bytes of a quantised input; if not, they read its dequantised values.
    #[getter]
    fn reads_fp8(&self) -> bool {
        self.chain.reads_fp8().is_some()
    }

    /// Whether a parameter consists of parts.
    #[getter(has_parts)]
    fn has_some_parts(&self) -> bool {
        self.has_parts()
    }

    /// The present parts of each parameter, from its module.
    fn parameter_parts<'py>(&self, py: Python<'py>) -> PyResult<Vec<Vec<Bound<'py, PyAny>>>> {
        let parts = |param: &Parameter| {
            let found = param.names().iter().map(|name| {
                let part = param.parameters.bind(py).get_item(name)?;
                part.ok_or_else(|| {
                    let message = format!("{}: parameter {} was removed", self.name, name.bind(py));
                    crate::error::to_python(Error::state("ops", message))
                })
            });
            found.collect::<PyResult<Vec<_>>>()
        };
        self.params.iter().map(parts).collect()
    }

    /// Ops of the chain.
    #[getter]
    fn num_ops(&self) -> usize {
        self.chain.links().len()
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
        let extra = links.filter_map(|(link, &cols)| link.op.extra_output_of(cols, Float::F32));
        Ok(widths.last().copied().into_iter().chain(extra.map(|(cols, _)| cols)).collect())
    }

    /// Number of compiled programs, counting each row count.
    fn plan_count(&self) -> usize {
        self.programs.iter().map(|kept| kept.all_sized().len()).sum()
    }

    /// Notes that the last forward ran in another way than by the program, so that the program repeats no region.
    fn forget_region(&mut self) {
        self.last_region = None;
    }

    /// Drops compiled programs.
    fn drop_plans(slf: &Bound<'_, Self>) -> PyResult<()> {
        let mut handle = slf.try_borrow_mut()?;
        let former = (std::mem::take(&mut handle.programs), std::mem::take(&mut handle.shapes));
        drop(handle);
        drop(former);
        Ok(())
    }

    /// Each compiled program and row count: the key, the launches of forward and backward with the ops they compute, and why fusions
    /// did not apply.
    fn explain<'py>(slf: &Bound<'py, Self>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let py = slf.py();
        let sizes = |kept: &KeptProgram<PyProgram>| {
            let program = Arc::clone(&kept.compiled().program);
            kept.all_sized().into_iter().map(move |sized| (Arc::clone(&program), sized))
        };
        let all: Vec<_> = slf.try_borrow()?.programs.iter().flat_map(sizes).collect();
        all.into_iter()
            .map(|(program, sized)| {
                let key = program.key();
                let scaling =
                    program.recipe().map_or("high precision".into(), |recipe| format!("{:?}", recipe.scaling));
                let entry = PyDict::new(py);
                let [forward, backward] = program.explain(&sized).map(|steps| {
                    let named = |step: &Explained| match step.reason {
                        "" => step.text.into(),
                        reason => format!("{}, by {reason}", step.text),
                    };
                    steps
                        .iter()
                        .map(|step| (named(step), (step.ops.0..=step.ops.1).collect::<Vec<_>>()))
                        .collect::<Vec<_>>()
                });
                let gradients = if key.any_grad() { "gradients" } else { "no gradients" };
                let text = format!(
                    "{} x {} {}, {scaling}, {gradients}",
                    sized.rows(),
                    key.cols,
                    crate::program::functions::type_name(key.activation)
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
