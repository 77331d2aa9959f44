//! Quantised weights of a compiler's call: new tensors, which the graph hands to backward, or memory that calls bring.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::program::Program;
use te_fast_core::quant::cache::KeptWeight;
use te_fast_core::quant::value::WeightLayout;
use te_fast_core::quant::weight::{Microbatch, WeightRecord, WeightToken};
use te_fast_core::recipe::region::Region;
use te_fast_core::runtime::lane::Place;

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::call::TracedCall;
use crate::program::forward::{Call, CallWeight, CallWeights, Prepared};
use crate::program::handle::ProgramHandle;
use crate::program::tensors::Tensors;
use crate::program::weight::{OpSlots, TracedWeight, WeightHandle};
use crate::program::weight_memory::{CachedWeight, WeightMemory, is_gone, share_with};
use crate::torch::process::State;
use crate::torch::reader::{Held, view_of};

type Weights<'py> = (SmallVec<[Prepared<'py>; 2]>, Vec<Bound<'py, PyAny>>);

/// The quantised weights, of which the column layouts are results where nothing keeps them.
pub(super) fn weights<'py>(
    call: &Call<'_, 'py>,
    traced: &TracedCall,
    (tensors, program): (&Tensors<'_>, &Program),
    place: Place,
    slots: Vec<Option<OpSlots>>,
    kept: &[Bound<'py, PyAny>],
) -> Result<Weights<'py>, Failure> {
    let (py, state) = (call.x.py(), call.state);
    let (mut list, mut passing) = (SmallVec::new(), Vec::new());
    for (linear, slots) in slots.into_iter().enumerate() {
        let Some((region, _)) = &traced.region else {
            list.push(Prepared { slots, ..Prepared::high_precision(None) });
            continue;
        };
        let Some((weight, param)) = ProgramHandle::linear_at(call.handle, linear)? else { break };
        let record = record_of_call(call, traced, (tensors, param), region, program.weight_layout(linear))?;
        let memory = if traced.passes_weights() { None } else { Some(kept) };
        let (row, col) = buffers(call.state, py, (linear, &record), memory)?;
        if traced.passes_weights() && program.reads_weight(linear) {
            passing.extend(col.as_ref().or(row.as_ref()).cloned());
        }
        let held = |buffer: Option<Bound<'py, PyAny>>| -> PyResult<Option<Arc<Held>>> {
            buffer.map(|buffer| Ok(Arc::new(Held::of_call(&state.reader, &buffer)?))).transpose()
        };
        let (row, col) = (held(row)?, held(col)?);
        let quantized = Arc::new(KeptWeight::new(record, WeightMemory { row, col, storage: py.None() }));
        let reuses = !traced.passes_weights()
            && serves(state, weight.bind(py), &call.params[param], &quantized, traced.microbatch, place)?;
        let fresh = (!reuses).then_some(param);
        let reused = fresh.is_none();
        list.push(Prepared { quantized: Some(quantized), slots, fresh, reused, ..Prepared::high_precision(None) });
    }
    Ok((list, passing))
}

/// How a call quantises a weight.
fn record_of_call(
    call: &Call<'_, '_>,
    traced: &TracedCall,
    (tensors, param): (&Tensors<'_>, usize),
    region: &Region,
    layout: WeightLayout,
) -> Result<WeightRecord, Failure> {
    let py = call.x.py();
    let version = call.params[param].getattr(intern!(py, "_version")).and_then(|version| version.extract()).ok();
    let dispatcher = &call.state.dispatcher(py)?.0;
    Ok(WeightRecord {
        token: WeightToken { address: tensors.origin(param), version, dtype: tensors.params[param].dtype() },
        device: traced.key.device,
        layout,
        epoch: region.epoch,
        generation: if region.recipe.is_delayed() { dispatcher.forward_generation } else { 0 },
        cache_epoch: dispatcher.cache_epoch,
        training: traced.any_grad(),
        optimizer_steps: dispatcher.optimizer_steps,
    })
}

type Layouts<'py> = (Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

/// Memory for both layouts of a weight: that which the call brings, row and column layouts in turn, or new tensors.
fn buffers<'py>(
    state: &State,
    py: Python<'py>,
    (linear, record): (usize, &WeightRecord),
    kept: Option<&[Bound<'py, PyAny>]>,
) -> Result<Layouts<'py>, Failure> {
    let at = |index: usize, bytes: usize| -> Result<_, Failure> {
        let Some(kept) = kept else { return Ok(state.optional_bytes(py, record.device, bytes)?) };
        if bytes == 0 {
            return Ok(None);
        }
        let given = kept.get(2 * linear + index).ok_or_else(|| {
            Error::state(OP, "a compiled call brings no memory for its quantised weight; compile it again")
        })?;
        view_of(&state.reader, given, "the quantised weight")?.check_saved(OP, bytes, DType::U8, record.device)?;
        Ok(Some(given.clone()))
    };
    Ok((at(0, record.layout.row_bytes)?, at(1, record.layout.col_bytes)?))
}

/// Whether an earlier call has quantised a weight into the memory of `wanted` that serves.
fn serves(
    state: &State,
    weight: &Bound<'_, WeightHandle>,
    parameter: &Bound<'_, PyAny>,
    wanted: &CachedWeight,
    microbatch: Microbatch,
    place: Place,
) -> Result<bool, Failure> {
    let py = weight.py();
    let capturing = matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)?;
    let frozen = !parameter.getattr(&state.torch.names.requires_grad)?.is_truthy()?;
    let (storage, writer) = {
        let weight = weight.try_borrow()?;
        let Some(known) = &weight.traced else { return Ok(false) };
        let steps = if frozen { known.record.optimizer_steps } else { wanted.record.optimizer_steps };
        let wanted = WeightRecord { optimizer_steps: steps, ..wanted.record };
        if known.record.layout != wanted.layout || !known.record.serves(&wanted, microbatch, capturing) {
            return Ok(false);
        }
        (known.storage.clone_ref(py), known.writer)
    };
    if is_gone(&storage, py, state)? {
        return Ok(false);
    }
    if writer != place.stream && !capturing {
        share_with(py, wanted, place, writer)?;
    }
    Ok(true)
}

/// Remembers what was quantised into memory of the calls', after a launch that has not failed.
pub(super) fn note_kept(
    call: &Call<'_, '_>,
    prepared: SmallVec<[Prepared<'_>; 2]>,
    place: Place,
) -> Result<(), Failure> {
    let (py, state) = (call.x.py(), call.state);
    for (linear, prepared) in prepared.into_iter().enumerate() {
        if let (Some(quantized), Some(param)) = (prepared.quantized, prepared.fresh)
            && let Some((weight, _)) = ProgramHandle::linear_at(call.handle, linear)?
        {
            let storage = call.params[param].call_method0(intern!(py, "untyped_storage"))?;
            let storage = state.torch.storage_weak_ref.bind(py).call1((storage,))?.unbind();
            let known = TracedWeight { record: quantized.record, storage, writer: place.stream };
            let former = weight.bind(py).try_borrow_mut()?.traced.replace(known);
            drop(former);
        }
    }
    Ok(())
}

/// The weights as backward reads them: of each linear op that reads one, the next of the `given`.
pub(super) fn weights_of_backward(
    state: &State,
    py: Python<'_>,
    traced: &TracedCall,
    (program, given): (&Program, &[Bound<'_, PyAny>]),
    slots: Vec<Option<OpSlots>>,
) -> Result<CallWeights, Failure> {
    let mut given = given.iter();
    let mut list = CallWeights::new();
    for (linear, slots) in slots.into_iter().enumerate() {
        let layout = program.weight_layout(linear);
        let reads = traced.region.is_some() && program.reads_weight(linear);
        let given = if reads { given.next() } else { None };
        let read = |buffer: &Bound<'_, PyAny>| -> Result<_, Failure> {
            let has_col = layout.col_bytes != 0;
            let bytes = if has_col { layout.col_bytes } else { layout.row_bytes };
            let view = view_of(&state.reader, buffer, "the quantised weight")?;
            view.check_saved(OP, bytes, DType::U8, traced.key.device)?;
            let held = Some(Arc::new(Held::of_call(&state.reader, buffer)?));
            let (row, col) = if has_col { (None, held) } else { (held, None) };
            let memory = WeightMemory { row, col, storage: py.None() };
            Ok(Arc::new(KeptWeight::new(record_of(traced, layout), memory)))
        };
        list.push(CallWeight { quantized: given.map(read).transpose()?, is_given: false, slots, version: None });
    }
    Ok(list)
}

/// A record for memory whose layout alone matters.
fn record_of(traced: &TracedCall, layout: WeightLayout) -> WeightRecord {
    WeightRecord {
        token: WeightToken { address: 0, version: None, dtype: traced.key.activation.into() },
        device: traced.key.device,
        layout,
        epoch: traced.key.epoch.unwrap_or(0),
        generation: 0,
        cache_epoch: 0,
        training: true,
        optimizer_steps: 0,
    }
}
