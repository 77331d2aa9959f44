//! The memory of quantised weights. torch allocates it, and this module owns it for core's cache.

use std::sync::Arc;

use pyo3::prelude::*;
use te_fast_core::base::dtype::Device;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::{Stream, wait_for};
use te_fast_core::quant::cache::{Former, KeptWeight};
use te_fast_core::quant::value::WeightBuffer;
use te_fast_core::quant::weight::WeightRecord;
use te_fast_core::runtime::lane::Place;

use crate::error::Failure;
use crate::torch::process::State;
use crate::torch::reader::Held;

/// Memory of a quantised weight, and the storage of the original weight.
#[derive(Debug)]
pub(crate) struct WeightMemory {
    /// The row layout, which only forward reads.
    pub(crate) row: Option<Arc<Held>>,
    /// The column layout, for backward.
    pub(crate) col: Option<Arc<Held>>,
    /// torch's weak reference to the weight's storage: while it is alive, no other memory has its address.
    pub(crate) storage: Py<PyAny>,
}

impl WeightMemory {
    /// The existing buffers.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &Arc<Held>> {
        [&self.row, &self.col].into_iter().flatten()
    }
}

/// A quantised weight.
pub(crate) type CachedWeight = KeptWeight<WeightMemory>;

pub(crate) fn weight_buffer(weight: &CachedWeight) -> WeightBuffer<'_> {
    let WeightMemory { row, col, .. } = &weight.memory;
    WeightBuffer { row: address(row.as_ref()), col: address(col.as_ref()), layout: weight.record.layout }
}

fn address(buffer: Option<&Arc<Held>>) -> DevPtr<'_> {
    buffer.map_or(DevPtr::null(), |held| held.ptr())
}

/// The part of a weight that backward reads if the weight is not kept: without the row layout, which forward frees.
pub(crate) fn for_backward(py: Python<'_>, weight: Arc<CachedWeight>) -> Arc<CachedWeight> {
    let WeightMemory { col, storage, .. } = &weight.memory;
    if col.is_none() {
        return weight;
    }
    let memory = WeightMemory { row: None, col: col.clone(), storage: storage.clone_ref(py) };
    Arc::new(KeptWeight::new(weight.record, memory))
}

/// Whether user code may have used the weight's gradient to write the weight through `weight.data`, which increases no
/// version: there was a gradient, it is gone, and no torch optimizer has ever made a step.
pub(crate) fn may_be_updated(
    kept: &CachedWeight,
    state: &State,
    parameter: &Bound<'_, PyAny>,
    wanted: &WeightRecord,
) -> PyResult<bool> {
    if wanted.optimizer_steps != 0 || !wanted.training || !kept.has_gradient() {
        return Ok(false);
    }
    let names = &state.torch.names;
    // A tensor that torch computed has no visible gradient.
    Ok(!parameter.getattr(&names.is_leaf)?.is_truthy()? || parameter.getattr(&names.grad)?.is_none())
}

/// Whether the memory that a weight was read from was freed, so that another tensor may have its address.
pub(crate) fn is_gone(storage: &Py<PyAny>, py: Python<'_>, state: &State) -> PyResult<bool> {
    let reference = storage.bind(py).getattr(&state.torch.names.cdata)?;
    state.torch.storage_expired.bind(py).call1((reference,))?.is_truthy()
}

/// Orders another stream's reads of a kept weight after the stream that wrote it.
#[cold]
pub(crate) fn share_with(py: Python<'_>, kept: &CachedWeight, place: Place, writer: Stream) -> Result<(), Failure> {
    let Device::Cuda(ordinal) = place.device else { return Ok(()) };
    wait_for(place.stream, writer)?;
    let stream = py.import("torch.cuda")?.getattr("current_stream")?.call1((ordinal,))?;
    for buffer in kept.memory.buffers() {
        buffer.record_stream(&stream)?;
    }
    Ok(())
}

/// Buffers for a quantised weight (those of `former` if it has no other owner), with torch's weak reference to the storage
/// of the original weight.
pub(crate) fn make_weight(
    py: Python<'_>,
    state: &State,
    storage: Py<PyAny>,
    record: WeightRecord,
    former: Former<WeightMemory>,
) -> PyResult<CachedWeight> {
    let layout = &record.layout;
    let fits = |kept: &CachedWeight| kept.record.device == record.device && kept.record.layout == *layout;
    let former = former.and_then(Arc::into_inner).filter(fits).map(|kept| kept.memory);
    let (former_row, former_col) = former.map_or((None, None), |memory| (memory.row, memory.col));
    let buffer = |bytes: usize, former: Option<Arc<Held>>| -> PyResult<Option<Arc<Held>>> {
        if bytes == 0 {
            return Ok(None);
        }
        if let Some(held) = former.filter(|held| Arc::strong_count(held) == 1) {
            return Ok(Some(held));
        }
        let tensor = state.bytes(py, record.device, bytes)?;
        Ok(Some(Arc::new(Held::new(&state.reader, &tensor)?)))
    };
    let (row, col) = (buffer(layout.row_bytes, former_row)?, buffer(layout.col_bytes, former_col)?);
    Ok(KeptWeight::new(record, WeightMemory { row, col, storage }))
}
