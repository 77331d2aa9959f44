//! Quantised weights of a compiled call, in memory that the call passes. The graph passes the weights of a training
//! step to backward. Without gradients, and between microbatches, later calls find the weights in this memory.

use pyo3::intern;
use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::{is_capturing, wait_for};
use te_fast_core::program::Program;
use te_fast_core::quant::value::WeightBuffer;
use te_fast_core::quant::weight::{Microbatch, WeightRecord, WeightToken};
use te_fast_core::recipe::region::Region;
use te_fast_core::runtime::lane::Place;

use crate::error::Failure;
use crate::graphs::call::TracedCall;
use crate::graphs::operands::{Operand, Operands};
use crate::program::handle::ProgramHandle;
use crate::program::tensors::requires_grad;
use crate::program::weight::{TracedWeight, WeightHandle};
use crate::program::weight_memory::is_gone;
use crate::torch::process::State;
use crate::torch::reader::view_of;

/// A forward's handling of a quantised weight.
pub(super) struct GivenWeight {
    /// The parameter to quantise now.
    pub(super) fresh: Option<usize>,
    /// The record of the weight, if calls share the memory.
    record: Option<WeightRecord>,
}

/// The memory of each linear op's quantised weight; none of a parameter that is quantised itself.
///
/// `saved` is the buffer for backward. If calls share the memory, row and column layouts are tensors, in turn.
pub(super) fn buffers<'a>(
    traced: &TracedCall,
    program: &Program,
    saved: DevPtr<'a>,
    memory: &mut Operands<'a, '_>,
) -> Result<SmallVec<[WeightBuffer<'a>; 2]>, Failure> {
    let mut list = SmallVec::new();
    if let Some(packing) = &traced.packing {
        let once = match packing.once {
            0 => DevPtr::null(),
            bytes => memory.take_sized(bytes, DType::U8, traced.key.device)?,
        };
        let linears = 0..program.key().linears.len();
        list.extend(linears.map(|linear| packing.buffer(linear, program.weight_layout(linear), (saved, once))));
        return Ok(list);
    }
    for linear in 0..program.key().linears.len() {
        let layout = program.weight_layout(linear);
        let mut take = |bytes: usize| match bytes {
            0 => Ok(DevPtr::null()),
            _ => memory.take_sized(bytes, DType::U8, traced.key.device),
        };
        let (row_bytes, col_bytes) = traced.weights[linear];
        let (row, col) = (take(row_bytes)?, take(col_bytes)?);
        list.push(WeightBuffer { row, col, layout });
    }
    Ok(list)
}

/// The weights of a forward. `objects` are the parameters and the memory.
pub(super) fn quantized(
    state: &State,
    (handle, traced, region): (&Bound<'_, ProgramHandle>, &TracedCall, &Region),
    (params, memory): (&[Operand<'_, '_>], &[Operand<'_, '_>]),
    buffers: &[WeightBuffer<'_>],
    place: Place,
) -> Result<SmallVec<[GivenWeight; 2]>, Failure> {
    let mut list = SmallVec::new();
    let mut memory = memory.iter();
    for (linear, buffer) in buffers.iter().enumerate() {
        let Some((weight, param)) = ProgramHandle::linear_at(handle, linear)? else { break };
        if traced.given[param].is_some() {
            list.push(GivenWeight { fresh: None, record: None });
            continue;
        }
        if traced.passes_weights() {
            list.push(GivenWeight { fresh: Some(param), record: None });
            continue;
        }
        let layouts = usize::from(!buffer.row.is_null()) + usize::from(!buffer.col.is_null());
        let own: SmallVec<[Operand<'_, '_>; 2]> = memory.by_ref().take(layouts).copied().collect();
        let record = record_of_call(state, &params[param], (traced, region, buffer))?;
        let weight = weight.bind(handle.py());
        let serves = serves(state, weight, (&params[param], &own), &record, traced.microbatch, place)?;
        list.push(GivenWeight { fresh: (!serves).then_some(param), record: Some(record) });
    }
    Ok(list)
}

/// How a call quantises a weight.
fn record_of_call(
    state: &State,
    param: &Operand<'_, '_>,
    (traced, region, buffer): (&TracedCall, &Region, &WeightBuffer<'_>),
) -> Result<WeightRecord, Failure> {
    let py = param.object.py();
    let versions = param.parts.iter().map(|part| part.getattr(intern!(py, "_version"))?.extract::<u64>());
    let version = versions.sum::<PyResult<u64>>().ok();
    // Its own, and not that of a copy.
    let address = view_of(&state.reader, param.object, "a parameter")?.data().address();
    let dispatcher = &state.dispatcher(py)?.0;
    Ok(WeightRecord {
        token: WeightToken { address, version, dtype: param.view.dtype() },
        device: traced.key.device,
        layout: buffer.layout,
        epoch: region.epoch,
        generation: if region.recipe.is_delayed() { dispatcher.forward_generation } else { 0 },
        cache_epoch: dispatcher.cache_epoch,
        training: traced.any_grad(),
        optimizer_steps: dispatcher.optimizer_steps,
    })
}

/// Whether an earlier call has quantised a weight as `wanted` into the `memory`.
fn serves(
    state: &State,
    weight: &Bound<'_, WeightHandle>,
    (param, memory): (&Operand<'_, '_>, &[Operand<'_, '_>]),
    wanted: &WeightRecord,
    microbatch: Microbatch,
    place: Place,
) -> Result<bool, Failure> {
    let py = weight.py();
    let capturing = matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)?;
    let mut frozen = true;
    for part in param.parts {
        frozen &= !requires_grad(part)?;
    }
    let (storage, writer) = {
        let weight = weight.try_borrow()?;
        let Some(known) = &weight.traced else { return Ok(false) };
        let steps = if frozen { known.record.optimizer_steps } else { wanted.optimizer_steps };
        let wanted = WeightRecord { optimizer_steps: steps, ..*wanted };
        if known.record.layout != wanted.layout || !known.record.serves(&wanted, microbatch, capturing) {
            return Ok(false);
        }
        (known.storage.clone_ref(py), known.writer)
    };
    if is_gone(&storage, py, state)? {
        return Ok(false);
    }
    if writer != place.stream
        && !capturing
        && let Device::Cuda(ordinal) = place.device
    {
        wait_for(place.stream, writer)?;
        let stream = py.import("torch.cuda")?.getattr("current_stream")?.call1((ordinal,))?;
        for buffer in memory {
            buffer.object.call_method1(intern!(py, "record_stream"), (&stream,))?;
        }
    }
    Ok(true)
}

/// Notes the weights in shared memory after a successful launch.
pub(super) fn note_kept(
    state: &State,
    handle: &Bound<'_, ProgramHandle>,
    params: &[Operand<'_, '_>],
    weights: &[GivenWeight],
    place: Place,
) -> Result<(), Failure> {
    let py = handle.py();
    for (linear, given) in weights.iter().enumerate() {
        if let (Some(record), Some(param)) = (given.record, given.fresh)
            && let Some((weight, _)) = ProgramHandle::linear_at(handle, linear)?
        {
            let storage = if let Some(known) = known_storage(state, weight.bind(py), &record)? {
                known
            } else {
                let storage = params[param].object.call_method0(intern!(py, "untyped_storage"))?;
                state.torch.storage_weak_ref.bind(py).call1((storage,))?.unbind()
            };
            let known = TracedWeight { record, storage, writer: place.stream };
            let former = weight.bind(py).try_borrow_mut()?.traced.replace(known);
            drop(former);
        }
    }
    Ok(())
}

/// The reference to a weight's storage from the last call, if the weight still lies there.
fn known_storage(
    state: &State,
    weight: &Bound<'_, WeightHandle>,
    record: &WeightRecord,
) -> Result<Option<Py<PyAny>>, Failure> {
    let py = weight.py();
    let storage = match &weight.try_borrow()?.traced {
        Some(known) if known.record.token.address == record.token.address => known.storage.clone_ref(py),
        _ => return Ok(None),
    };
    Ok((!is_gone(&storage, py, state)?).then_some(storage))
}
