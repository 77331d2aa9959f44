//! Many values that are quantised together: weights after an optimizer step.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;
use smallvec::SmallVec;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::amax::ScaleRule;
use te_fast_core::ops::cast_many::{CastManyPlan, ManyInputs, ManyScales, TensorCast};
use te_fast_core::recipe::definition::Block;
use te_fast_core::recipe::usage::Usage;
use te_fast_core::{Error, Fp8, Half};

use crate::direct::call::DirectCall;
use crate::direct::tensors::{contiguous, single_f32};
use crate::error::IntoPython;
use crate::tensor::given::given;
use crate::tensor::value::{QuantizedValue, Rule, Targets};
use crate::torch::process::{State, state};
use crate::torch::reader::{instance_dict, view_of};

const OP: &str = "quantize";

/// A value, what it is quantised from, and how its quantizer casts.
struct Job<'py> {
    value: Bound<'py, QuantizedValue>,
    x: Bound<'py, PyAny>,
    /// Where the tensor is, and its type: values of others are rounded to it first.
    nominal: Option<(Device, DType)>,
    usage: (bool, bool),
    rule: Rule,
    /// Scale and maximum of delayed scaling.
    scale: Option<Bound<'py, PyAny>>,
    amax: Option<Bound<'py, PyAny>>,
}

/// What `Float8QuantizerBase._cast` says: block, groups and FP8 type; layouts; rule; scale and maximum.
type Cast<'py> =
    ((u8, usize, Bound<'py, PyString>), (bool, bool), Rule, (Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>));

/// What the values of one launch have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kind {
    device: Device,
    input: ManyInputs,
    output: Fp8,
    scales: ManyScales,
}

/// Writes plain tensors into quantised ones, as `quantize_` does each; those that are alike by one launch. The numbers of those
/// whose quantizers do more than a cast, which are not written.
#[pyfunction]
#[pyo3(signature = (tensors, sources, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn requantize<'py>(
    py: Python<'py>,
    tensors: Vec<Bound<'py, PyAny>>,
    sources: Vec<Bound<'py, PyAny>>,
) -> PyResult<Vec<usize>> {
    let state = state(py)?;
    let (mut jobs, mut written, mut left) = (Vec::with_capacity(tensors.len()), Vec::new(), Vec::new());
    for (number, (tensor, x)) in tensors.iter().zip(&sources).enumerate() {
        match Job::new(state, tensor, x)? {
            Some(job) => {
                jobs.push(job);
                written.push(tensor);
            }
            None => left.push(number),
        }
    }
    quantize_all(state, py, &jobs)?;
    note_writes(py, &written, &jobs)?;
    Ok(left)
}

/// Rounds master weights to the nominal types of quantised weights, and quantises them into these; false, and nothing is
/// written, unless each master is all of its weight, and an update of that is a cast.
#[pyfunction]
#[pyo3(signature = (weights, masters, starts, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn quantize_whole<'py>(
    py: Python<'py>,
    weights: Vec<Bound<'py, PyAny>>,
    masters: Vec<Bound<'py, PyAny>>,
    starts: Vec<Option<i64>>,
) -> PyResult<bool> {
    let state = state(py)?;
    if weights.len() != masters.len() || weights.len() != starts.len() || starts.iter().flatten().any(|&at| at != 0) {
        return Ok(false);
    }
    let mut jobs = Vec::with_capacity(weights.len());
    for (weight, master) in weights.iter().zip(&masters) {
        match Job::new(state, weight, master)? {
            Some(job) if job.is_whole(state)? => jobs.push(Job { nominal: nominal(state, weight)?, ..job }),
            _ => return Ok(false),
        }
    }
    quantize_all(state, py, &jobs)?;
    let written: Vec<_> = weights.iter().collect();
    note_writes(py, &written, &jobs)?;
    Ok(true)
}

/// Where a weight is, and its type in name.
fn nominal(state: &State, weight: &Bound<'_, PyAny>) -> PyResult<Option<(Device, DType)>> {
    let Some(outside) = state.reader.read_outside(weight)? else {
        return Err(Error::value(OP, "a weight is on no device that te_fast knows")).python();
    };
    Ok(Some((outside.device(), outside.dtype())))
}

/// Tells autograd that tensors were written: these, and their bytes, which graphs save in their place. Both layouts of bytes hold
/// the same at the versions that they have then.
fn note_writes(py: Python<'_>, tensors: &[&Bound<'_, PyAny>], jobs: &[Job<'_>]) -> PyResult<()> {
    static INCREMENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if tensors.is_empty() {
        return Ok(());
    }
    let increment = INCREMENT.import(py, "torch.autograd.graph", "increment_version")?;
    let mut written: Vec<Bound<'_, PyAny>> = Vec::with_capacity(3 * tensors.len());
    for (tensor, job) in tensors.iter().zip(jobs) {
        written.push((*tensor).clone());
        written.extend(QuantizedValue::snapshot(&job.value)?.bytes(py));
    }
    if increment.call1((&written,)).is_err() {
        // Inference tensors have no versions.
        let mut counted = Vec::with_capacity(written.len());
        for tensor in written {
            if !tensor.call_method0(intern!(py, "is_inference"))?.is_truthy()? {
                counted.push(tensor);
            }
        }
        increment.call1((counted,))?;
    }
    jobs.iter().try_for_each(|job| QuantizedValue::snapshot(&job.value).map(|value| value.agree(py)))
}

fn quantize_all<'py>(state: &State, py: Python<'py>, jobs: &[Job<'py>]) -> PyResult<()> {
    // A single tensor that is cast as it is needs none of this.
    let pays = jobs.len() > 1 || jobs.iter().any(|job| job.nominal.is_some());
    let together = pays && state.dispatcher(py)?.0.config.weights_together;
    let mut kinds: SmallVec<[(Kind, Vec<Read<'_, 'py>>); 1]> = SmallVec::new();
    let mut alone = Vec::new();
    for job in jobs {
        let read = if together { Some(Read { job, x: source(state, &job.value, &job.x)? }) } else { None };
        let kind = read.as_ref().map(Read::kind).transpose()?.flatten();
        match (read, kind) {
            (Some(read), Some(kind)) => match kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, members)) => members.push(read),
                None => kinds.push((kind, vec![read])),
            },
            _ => alone.push(job),
        }
    }
    for (kind, members) in kinds {
        let is_worth_it = members.len() > 1 || matches!(kind.input, ManyInputs::Rounded(_));
        if !is_worth_it || !by_one_launch(state, py, kind, &members)? {
            alone.extend(members.into_iter().map(|read| read.job));
        }
    }
    alone.into_iter().try_for_each(|job| {
        let Job { value, usage, rule, scale, amax, .. } = job;
        let x = job.rounded(state, py)?;
        let view = source(state, value, &x)?;
        QuantizedValue::quantize_view(value, &view, *usage, *rule, scale.as_ref(), amax.as_ref(), None)
    })
}

impl<'py> Job<'py> {
    /// None where an update of the tensor is more than a cast.
    fn new(state: &State, tensor: &Bound<'py, PyAny>, x: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let py = tensor.py();
        let Some(value) = given(state, tensor) else { return Ok(None) };
        let Some(quantizer) = instance_dict(tensor)?.get_item(intern!(py, "_quantizer"))? else { return Ok(None) };
        let Some(cast) = quantizer.getattr_opt(intern!(py, "_cast"))? else { return Ok(None) };
        let cast = cast.call0()?.extract::<Option<Cast<'py>>>()?;
        let Some(((block, groups, fp8), usage, rule, (scale, amax))) = cast else { return Ok(None) };
        let is_like = {
            let value = value.try_borrow()?;
            value.is_of(block, groups) && fp8 == value.fp8()
        };
        Ok(is_like.then(|| Self { value, x: x.clone(), nominal: None, usage, rule, scale, amax }))
    }

    /// The values, in the tensor's type and on its device if they were to be rounded.
    fn rounded(&self, state: &State, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Some((device, dtype)) = self.nominal else { return Ok(self.x.clone()) };
        let rounded = {
            let x = view_of(&state.reader, &self.x, "a master weight").python()?;
            if (x.device(), x.dtype()) == (device, dtype) {
                return Ok(self.x.clone());
            }
            state.empty_sized(py, device, x.shape(), dtype)?
        };
        let _guard = state.guard(py, device)?;
        rounded.call_method1(intern!(py, "copy_"), (self.x.call_method0(intern!(py, "detach"))?,))
    }

    /// What its launch casts, of values of such a type on such a device; None where no launch does.
    fn inputs(&self, device: Device, values: DType, output: Fp8) -> Option<ManyInputs> {
        let plain = values.as_float().map(ManyInputs::Plain);
        let Some((place, nominal)) = self.nominal else { return plain };
        let inputs = match (values, nominal) {
            _ if place != device => None,
            _ if values == nominal => plain,
            (DType::F32, DType::F16) => Some(ManyInputs::Rounded(Half::F16)),
            (DType::F32, DType::Bf16) => Some(ManyInputs::Rounded(Half::Bf16)),
            _ => None,
        };
        inputs.filter(|inputs| inputs.casts_to(output))
    }

    /// Whether a master weight is all of a weight with a row layout, and flat or of its shape.
    fn is_whole(&self, state: &State) -> PyResult<bool> {
        let (block, _) = self.value.try_borrow()?.block_and_type();
        let row = QuantizedValue::snapshot(&self.value)?.part(self.value.py(), false);
        let (Some((row, _)), true) = (row, state.torch.is_plain(&self.x)) else { return Ok(false) };
        let (Some(row), Some(master)) = (state.reader.read(&row)?, state.reader.read(&self.x)?) else {
            return Ok(false);
        };
        let is_all = row.numel() == master.numel() && row.numel() != 0;
        let is_shaped = master.shape().len() == 1 || master.shape() == row.shape();
        Ok(block != Block::Row && is_all && is_shaped && master.is_contiguous())
    }
}

/// What a value is quantised from. A flat tensor has the elements of all rows.
fn source<'a>(state: &State, value: &Bound<'_, QuantizedValue>, x: &'a Bound<'_, PyAny>) -> PyResult<TensorView<'a>> {
    let view = contiguous(state, x, OP, "x")?;
    if view.shape().len() != 1 {
        return Ok(view);
    }
    let Some((row, _)) = QuantizedValue::snapshot(value)?.part(value.py(), false) else { return Ok(view) };
    let row = view_of(&state.reader, &row, "data of the quantised tensor").python()?;
    let shaped = TensorView::new(view.data(), view.device(), view.dtype(), row.shape(), None);
    Ok(shaped.filter(|shaped| shaped.numel() == view.numel()).unwrap_or(view))
}

/// A job, and what its value is quantised from.
struct Read<'a, 'py> {
    job: &'a Job<'py>,
    x: TensorView<'a>,
}

impl Read<'_, '_> {
    /// None for what is quantised alone: stacks, blocks of 1 x 128, no elements, and what is refused there.
    fn kind(&self) -> PyResult<Option<Kind>> {
        let Self { job, x } = self;
        let Job { value, usage, rule, scale, .. } = job;
        let (block, output, groups) = {
            let value = value.try_borrow()?;
            let (block, output) = value.block_and_type();
            (block, output, value.groups())
        };
        let (current, eps, pow2) = *rule;
        let scales = match (block, current) {
            (Block::Tensor, true) => ManyScales::Current(ScaleRule { output, eps, pow2 }),
            (Block::Tensor, false) if scale.is_some() => ManyScales::Given,
            (Block::Square, _) => ManyScales::Block { eps, pow2 },
            _ => return Ok(None),
        };
        let Some(input) = job.inputs(x.device(), x.dtype(), output) else { return Ok(None) };
        let is_whole = groups == 1 && x.numel() != 0 && (usage.0 || usage.1);
        Ok(is_whole.then_some(Kind { device: x.device(), input, output, scales }))
    }
}

/// A value that is about to be written.
struct Prepared<'a, 'py> {
    x: &'a TensorView<'a>,
    targets: Targets<'py>,
    scale: DevPtr<'a>,
    amax: DevPtr<'a>,
}

/// False where two of them have the same memory: the one that comes last is to be seen there.
fn by_one_launch(state: &State, py: Python<'_>, kind: Kind, jobs: &[Read<'_, '_>]) -> PyResult<bool> {
    let plan = CastManyPlan::new(kind.input, kind.output, kind.scales).python()?;
    let call = DirectCall::new(state, py, OP, kind.device)?;
    let mut prepared = Vec::with_capacity(jobs.len());
    for Read { job: Job { value, usage, scale, amax, .. }, x } in jobs {
        let usage = Usage { rowwise: usage.0, columnwise: usage.1 };
        let scale = single_f32(state, scale.as_ref(), "scale", x)?;
        let amax = single_f32(state, amax.as_ref(), "amax", x)?;
        let targets = QuantizedValue::snapshot(value)?.targets(&call, x, usage, false)?;
        prepared.push(Prepared { x, targets, scale, amax });
    }
    let casts = prepared.iter().map(|one| one.cast(state)).collect::<PyResult<Vec<_>>>()?;
    let layouts = |cast: &TensorCast<'_>| [cast.out, cast.out_t].map(DevPtr::address);
    let mut written: Vec<usize> = casts.iter().flat_map(layouts).filter(|&address| address != 0).collect();
    written.sort_unstable();
    if written.windows(2).any(|pair| pair[0] == pair[1]) {
        return Ok(false);
    }
    call.with_counters(CastManyPlan::COUNTER_BYTES, 0, |lane| {
        plan.run(&mut lane.target, &casts, lane.workspace.counters)
    })?;
    drop(casts);
    for (read, Prepared { targets, .. }) in jobs.iter().zip(prepared) {
        QuantizedValue::take(&read.job.value, targets)?;
    }
    Ok(true)
}

impl Prepared<'_, '_> {
    fn cast(&self, state: &State) -> PyResult<TensorCast<'_>> {
        let pointer = |tensor| state.pointer(tensor).python();
        let Targets { row, row_scale, col, col_scale } = &self.targets;
        Ok(TensorCast {
            rows: self.x.rows(),
            cols: self.x.cols(),
            x: self.x.data(),
            out: pointer(row.as_ref().map(|row| &row.written))?,
            out_t: pointer(col.as_ref().map(|col| &col.written))?,
            scale_inv: pointer(row_scale.as_ref())?,
            scale_inv_t: pointer(col_scale.as_ref())?,
            scale: self.scale,
            amax: self.amax,
        })
    }
}
