//! The memory of quantised weights. torch allocates it, and this module owns it for core's cache.

use std::sync::Arc;

use pyo3::intern;
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

/// Layouts in one allocation begin on multiples of this, as torch's own allocations do.
const ALIGNMENT: usize = 512;
/// Largest number of bytes that weights which are quantised together share in one allocation.
const MOST_SHARED: usize = 64 << 20;
/// The share of all their bytes that one allocation may have: its memory is free again when the last of its weights is.
const SHARES: usize = 8;

/// Memory of one layout of a weight: a tensor, or a part of one that others share.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Arc<Held>,
    offset: usize,
    bytes: usize,
}

impl Buffer {
    fn new(py: Python<'_>, state: &State, device: Device, bytes: usize) -> PyResult<Self> {
        let tensor = state.bytes(py, device, bytes)?;
        Ok(Self { memory: Arc::new(Held::new(&state.reader, &tensor)?), offset: 0, bytes })
    }

    /// Its first byte.
    #[inline]
    pub(crate) fn ptr(&self) -> DevPtr<'_> {
        self.memory.ptr().offset(self.offset)
    }

    /// A new tensor on the same bytes, for other owners, which refers to no other tensor.
    pub(crate) fn shared<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let whole = self.memory.tensor(py);
        let part = whole.call_method1(intern!(py, "narrow"), (0, self.offset, self.bytes))?;
        part.call_method0(intern!(py, "detach"))
    }

    fn record_stream(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        self.memory.record_stream(stream)
    }
}

/// Memory of a quantised weight, and the storage of the original weight.
#[derive(Debug)]
pub(crate) struct WeightMemory {
    /// The row layout, which only forward reads.
    pub(crate) row: Option<Arc<Buffer>>,
    /// The column layout, for backward.
    pub(crate) col: Option<Arc<Buffer>>,
    /// torch's weak reference to the weight's storage: while it is alive, no other memory has its address.
    pub(crate) storage: Py<PyAny>,
}

impl WeightMemory {
    /// The existing buffers.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &Arc<Buffer>> {
        [&self.row, &self.col].into_iter().flatten()
    }
}

/// A quantised weight.
pub(crate) type CachedWeight = KeptWeight<WeightMemory>;

pub(crate) fn weight_buffer(weight: &CachedWeight) -> WeightBuffer<'_> {
    let WeightMemory { row, col, .. } = &weight.memory;
    WeightBuffer { row: address(row.as_ref()), col: address(col.as_ref()), layout: weight.record.layout }
}

fn address(buffer: Option<&Arc<Buffer>>) -> DevPtr<'_> {
    buffer.map_or(DevPtr::null(), |buffer| buffer.ptr())
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

/// A weight that is to be quantised: torch's weak reference to the storage of the original weight, its properties, and a
/// weight whose buffers it takes if they have no other owner.
pub(crate) struct Wanted {
    pub(crate) storage: Py<PyAny>,
    pub(crate) record: WeightRecord,
    pub(crate) former: Former<WeightMemory>,
}

impl Wanted {
    /// The former row and column layouts, if they fit, and the bytes of those that must be allocated.
    fn split(&mut self) -> [(Option<Arc<Buffer>>, usize); 2] {
        let WeightRecord { layout, device, .. } = &self.record;
        let fits = |kept: &CachedWeight| kept.record.device == *device && kept.record.layout == *layout;
        let former = self.former.take().and_then(Arc::into_inner).filter(fits).map(|kept| kept.memory);
        let (row, col) = former.map_or((None, None), |memory| (memory.row, memory.col));
        [(row, layout.row_bytes), (col, layout.col_bytes)].map(|(former, bytes)| {
            let own = former.filter(|buffer| Arc::strong_count(buffer) == 1);
            let missing = if own.is_some() { 0 } else { bytes };
            (own, missing)
        })
    }
}

/// Buffers for a quantised weight.
pub(crate) fn make_weight(py: Python<'_>, state: &State, mut wanted: Wanted) -> PyResult<CachedWeight> {
    let device = wanted.record.device;
    let buffer = |(own, missing): (Option<Arc<Buffer>>, usize)| match missing {
        0 => Ok(own),
        bytes => Buffer::new(py, state, device, bytes).map(|made| Some(Arc::new(made))),
    };
    let [row, col] = wanted.split();
    let (row, col) = (buffer(row)?, buffer(col)?);
    Ok(KeptWeight::new(wanted.record, WeightMemory { row, col, storage: wanted.storage }))
}

/// Buffers for weights of one device that one launch quantises, in the order of their use. Adjacent weights share
/// allocations, since an allocation takes the host longer than the rest of a weight's preparation.
pub(crate) fn make_weights(py: Python<'_>, state: &State, mut wanted: Vec<Wanted>) -> PyResult<Vec<CachedWeight>> {
    let Some(first) = wanted.first() else { return Ok(Vec::new()) };
    let device = first.record.device;
    let (mut rows, mut cols): (Vec<_>, Vec<_>) = wanted.iter_mut().map(Wanted::split).map(<(_, _)>::from).unzip();
    let all: usize = rows.iter().chain(&cols).map(|(_, missing)| missing.next_multiple_of(ALIGNMENT)).sum();
    let most = (all / SHARES).min(MOST_SHARED);
    for layouts in [&mut rows, &mut cols] {
        let mut rest = layouts.as_mut_slice();
        while !rest.is_empty() {
            let (mut count, mut bytes) = (0, 0);
            while let Some((_, missing)) = rest.get(count)
                && (bytes == 0 || bytes + missing.next_multiple_of(ALIGNMENT) <= most)
            {
                bytes += missing.next_multiple_of(ALIGNMENT);
                count += 1;
            }
            let (share, others) = rest.split_at_mut(count);
            allocate(py, state, (device, bytes), share)?;
            rest = others;
        }
    }
    let made = wanted.into_iter().zip(rows).zip(cols).map(|((wanted, (row, _)), (col, _))| {
        KeptWeight::new(wanted.record, WeightMemory { row, col, storage: wanted.storage })
    });
    Ok(made.collect())
}

/// Fills the missing buffers of a share with parts of one allocation.
fn allocate(
    py: Python<'_>,
    state: &State,
    (device, bytes): (Device, usize),
    share: &mut [(Option<Arc<Buffer>>, usize)],
) -> PyResult<()> {
    if bytes == 0 {
        return Ok(());
    }
    let memory = Buffer::new(py, state, device, bytes)?.memory;
    let mut offset = 0;
    for (buffer, missing) in share.iter_mut().filter(|(_, missing)| *missing != 0) {
        *buffer = Some(Arc::new(Buffer { memory: Arc::clone(&memory), offset, bytes: *missing }));
        offset += missing.next_multiple_of(ALIGNMENT);
    }
    Ok(())
}
