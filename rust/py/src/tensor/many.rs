//! Many values that are quantised together: weights after an optimizer step.

use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::base::dtype::Device;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::amax::ScaleRule;
use te_fast_core::ops::cast_many::{CastManyPlan, ManyScales, TensorCast};
use te_fast_core::recipe::definition::Block;
use te_fast_core::recipe::usage::Usage;
use te_fast_core::{Float, Fp8};

use crate::direct::call::DirectCall;
use crate::direct::tensors::{contiguous, single_f32};
use crate::error::IntoPython;
use crate::tensor::given::given;
use crate::tensor::value::{QuantizedValue, Rule, Targets};
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

const OP: &str = "quantize";

/// A value, what it is quantised from, layouts, scale rule, and scale and maximum of delayed scaling.
type Job<'py> = (
    Bound<'py, QuantizedValue>,
    Bound<'py, PyAny>,
    (bool, bool),
    Rule,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);

/// What the values of one launch have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kind {
    device: Device,
    input: Float,
    output: Fp8,
    scales: ManyScales,
}

/// Quantises many values, as `QuantizedValue.quantize` does each; those that are alike by one launch.
#[pyfunction]
#[pyo3(signature = (jobs, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn quantize_values(py: Python<'_>, jobs: Vec<Job<'_>>) -> PyResult<()> {
    let state = state(py)?;
    let together = jobs.len() > 1 && state.dispatcher(py)?.0.config.weights_together;
    let mut kinds: SmallVec<[(Kind, Vec<&Job<'_>>); 1]> = SmallVec::new();
    let mut alone = Vec::new();
    for job in &jobs {
        match if together { kind_of(state, job)? } else { None } {
            None => alone.push(job),
            Some(kind) => match kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, members)) => members.push(job),
                None => kinds.push((kind, vec![job])),
            },
        }
    }
    for (kind, members) in kinds {
        if members.len() < 2 || !by_one_launch(state, py, kind, &members)? {
            alone.extend(members);
        }
    }
    alone.into_iter().try_for_each(|(value, x, usage, rule, scale, amax)| {
        let view = source(state, value, x)?;
        QuantizedValue::quantize_view(value, &view, *usage, *rule, scale.as_ref(), amax.as_ref(), None)
    })
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

/// The native values of weights that master weights are all of, each from its first element on: with a row layout, and one
/// value each. None if one of them is not such, or if a master is neither flat nor of its weight's shape.
#[pyfunction]
#[pyo3(signature = (weights, masters, starts, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn whole_values<'py>(
    py: Python<'py>,
    weights: Vec<Bound<'py, PyAny>>,
    masters: Vec<Bound<'py, PyAny>>,
    starts: Vec<Option<i64>>,
) -> PyResult<Option<Vec<Bound<'py, QuantizedValue>>>> {
    let state = state(py)?;
    if weights.len() != masters.len() || weights.len() != starts.len() || starts.iter().flatten().any(|&at| at != 0) {
        return Ok(None);
    }
    let mut values = Vec::with_capacity(weights.len());
    for (weight, master) in weights.iter().zip(&masters) {
        let Some(value) = given(state, weight).filter(|_| state.torch.is_plain(master)) else { return Ok(None) };
        let (block, groups) = value.try_borrow()?.block_and_groups();
        let row = QuantizedValue::snapshot(&value)?.part(py, false);
        let (Some((row, _)), Ok(Some(master))) = (row, state.reader.read(master)) else { return Ok(None) };
        let is_like = |row: &TensorView<'_>| master.shape().len() == 1 || master.shape() == row.shape();
        let is_whole = view_of(&state.reader, &row, "data")
            .is_ok_and(|row| row.numel() == master.numel() && row.numel() != 0 && is_like(&row));
        if groups != 1 || block == Block::Row || !is_whole || !master.is_contiguous() {
            return Ok(None);
        }
        values.push(value);
    }
    Ok(Some(values))
}

/// None for what is quantised alone: stacks, blocks of 1 x 128, no elements, and what is refused there.
fn kind_of(state: &State, (value, x, usage, rule, scale, _): &Job<'_>) -> PyResult<Option<Kind>> {
    let view = source(state, value, x)?;
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
    let Some(input) = view.dtype().as_float() else { return Ok(None) };
    let is_whole = groups == 1 && view.numel() != 0 && (usage.0 || usage.1);
    Ok(is_whole.then_some(Kind { device: view.device(), input, output, scales }))
}

/// A value that is about to be written.
struct Prepared<'a, 'py> {
    x: TensorView<'a>,
    targets: Targets<'py>,
    scale: DevPtr<'a>,
    amax: DevPtr<'a>,
}

/// False where two of them have the same memory: the one that comes last is to be seen there.
fn by_one_launch(state: &State, py: Python<'_>, kind: Kind, jobs: &[&Job<'_>]) -> PyResult<bool> {
    let plan = CastManyPlan::new(kind.input, kind.output, kind.scales).python()?;
    let call = DirectCall::new(state, py, OP, kind.device)?;
    let mut prepared = Vec::with_capacity(jobs.len());
    for (value, x, usage, _, scale, amax) in jobs {
        let x = source(state, value, x)?;
        let usage = Usage { rowwise: usage.0, columnwise: usage.1 };
        let scale = single_f32(state, scale.as_ref(), "scale", &x)?;
        let amax = single_f32(state, amax.as_ref(), "amax", &x)?;
        let targets = QuantizedValue::snapshot(value)?.targets(&call, &x, usage, false)?;
        prepared.push(Prepared { x, targets, scale, amax });
    }
    let casts = prepared.iter().map(|one| one.cast(state)).collect::<PyResult<Vec<_>>>()?;
    let layouts = |cast: &TensorCast<'_>| [cast.out, cast.out_t].map(DevPtr::address);
    let mut written: Vec<usize> = casts.iter().flat_map(layouts).filter(|&address| address != 0).collect();
    written.sort_unstable();
    if written.windows(2).any(|pair| pair[0] == pair[1]) {
        return Ok(false);
    }
    call.with_counters(CastManyPlan::COUNTER_BYTES, plan.scratch_bytes(casts.len()), |lane| {
        plan.run(&mut lane.target, &casts, (lane.workspace.scratch, lane.workspace.counters))
    })?;
    drop(casts);
    for ((value, ..), Prepared { targets, .. }) in jobs.iter().zip(prepared) {
        QuantizedValue::take(value, targets)?;
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
