//! The quantised weight that a layer keeps between calls: its buffer, who may read it, and whether it still serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use te_fast_core::dispatch::Place;
use te_fast_core::driver::{self, Stream};
use te_fast_core::layer::{Microbatch, WeightRecord};
use te_fast_core::linear::WeightBuffer;
use te_fast_core::tensor::Device;

use crate::error::Failure;
use crate::state::State;
use crate::tensor::Held;

/// A quantised weight.
#[derive(Debug)]
pub(crate) struct CachedWeight {
    pub(crate) record: WeightRecord,
    pub(crate) buffer: Held,
    pub(crate) bytes: usize,
    /// torch's weak reference to the weight's storage: while it is alive, no other memory has its address.
    pub(crate) storage: Py<PyAny>,
    /// A backward has computed the weight's gradient since.
    has_gradient: AtomicBool,
}

impl CachedWeight {
    /// A backward computes the gradient of the weight.
    pub(crate) fn note_gradient(&self) {
        self.has_gradient.store(true, Ordering::Relaxed);
    }

    /// Whether somebody may have taken the weight's gradient and written the weight through `weight.data`, which moves
    /// no version: a gradient was there, none is now, and no optimizer of torch's has ever told of a step.
    fn may_be_updated(&self, state: &State, parameter: &Bound<'_, PyAny>, wanted: &WeightRecord) -> PyResult<bool> {
        if wanted.optimizer_steps != 0 || !wanted.training || !self.has_gradient.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let names = &state.torch.names;
        // Of a tensor that torch computed, none can be seen.
        Ok(!parameter.getattr(&names.is_leaf)?.is_truthy()? || parameter.getattr(&names.grad)?.is_none())
    }

    pub(crate) fn weight_buffer(&self) -> WeightBuffer<'_> {
        WeightBuffer { data: self.buffer.ptr(), segments: self.record.segments }
    }

    /// Whether the memory that it was read from was freed: its address may be another tensor's by now.
    fn is_gone(&self, py: Python<'_>, state: &State) -> PyResult<bool> {
        let reference = self.storage.bind(py).getattr(&state.torch.names.cdata)?;
        state.torch.storage_expired.bind(py).call1((reference,))?.is_truthy()
    }
}

/// What a layer keeps of its weight.
#[derive(Debug, Default)]
pub(crate) struct WeightCache {
    pub(crate) kept: Option<Arc<CachedWeight>>,
    /// Streams that may read it without waiting; the first one wrote it.
    streams: Vec<Stream>,
    /// The weight of a graph under capture: its bytes exist when the graph runs, not now.
    captured: Option<Arc<CachedWeight>>,
    /// Weights that captured graphs quantise where a flag on the device does not tell them to skip it. The graphs hold
    /// their addresses, so that they live as long as the layer.
    skippable: Vec<Arc<CachedWeight>>,
    /// Memory of kept weights that captured graphs read, by its address: replays come when others may be kept.
    read_by_graphs: Vec<(usize, Py<PyAny>)>,
}

/// What Python is told of a kept weight.
pub(crate) type Described<'py> = (Bound<'py, PyAny>, usize, bool, bool);

/// A weight that is kept no longer. The end of one runs Python code, torch's weak reference has a `__del__`, and so lets
/// other threads in: it is dropped when nothing is borrowed.
pub(crate) type Former = Option<Arc<CachedWeight>>;

impl WeightCache {
    /// Forgets it: the next forward quantises the weight again. What captured graphs read stays.
    #[must_use]
    pub(crate) fn clear(&mut self) -> [Former; 2] {
        [self.kept.take(), self.captured.take()]
    }

    /// The quantised weight, if the one that is kept serves a call that would quantise `wanted` itself.
    #[inline]
    pub(crate) fn reusable(
        &mut self,
        py: Python<'_>,
        state: &State,
        parameter: &Bound<'_, PyAny>,
        wanted: &WeightRecord,
        microbatch: Microbatch,
        (place, capturing): (Place, bool),
    ) -> Result<Option<Arc<CachedWeight>>, Failure> {
        let Some(kept) = self.captured.as_ref().filter(|_| capturing).or(self.kept.as_ref()) else { return Ok(None) };
        if !kept.record.serves(wanted, microbatch, capturing) || kept.is_gone(py, state)? {
            return Ok(None);
        }
        if microbatch == Microbatch::Unknown && kept.may_be_updated(state, parameter, wanted)? {
            return Ok(None);
        }
        let kept = Arc::clone(kept);
        if capturing {
            self.keep_for_graphs(py, &kept)?;
        } else if !self.streams.contains(&place.stream) {
            self.share_with(py, place)?;
        }
        Ok(Some(kept))
    }

    /// Has a weight's memory live as long as the layer. The memory alone: where the weight is quantised anew in it, replays
    /// read that.
    #[cold]
    fn keep_for_graphs(&mut self, py: Python<'_>, kept: &CachedWeight) -> PyResult<()> {
        let address = kept.buffer.ptr().address();
        if self.read_by_graphs.iter().all(|&(known, _)| known != address) {
            self.read_by_graphs.push((address, kept.buffer.shared(py)?.unbind()));
        }
        Ok(())
    }

    /// The weight of graphs that can skip its quantisation, if there is one for such calls.
    pub(crate) fn skippable(&self, wanted: &WeightRecord) -> Option<Arc<CachedWeight>> {
        let fits = |kept: &&Arc<CachedWeight>| {
            let (there, needed) = (&kept.record, wanted);
            there.token.address == needed.token.address
                && there.token.dtype == needed.token.dtype
                && there.device == needed.device
                && there.segments == needed.segments
                && there.epoch == needed.epoch
        };
        self.skippable.iter().find(fits).cloned()
    }

    /// Keeps one of those.
    pub(crate) fn keep_skippable(&mut self, weight: &Arc<CachedWeight>) {
        if !self.skippable.iter().any(|known| Arc::ptr_eq(known, weight)) {
            self.skippable.push(Arc::clone(weight));
        }
    }

    /// Orders another stream's reads of the kept weight behind the stream that wrote it.
    #[cold]
    fn share_with(&mut self, py: Python<'_>, place: Place) -> Result<(), Failure> {
        if let Some(&writer) = self.streams.first() {
            driver::wait_for(place.stream, writer)?;
        }
        if let (Some(kept), Device::Cuda(ordinal)) = (&self.kept, place.device) {
            let stream = py.import("torch.cuda")?.getattr("current_stream")?.call1((ordinal,))?;
            kept.buffer.record_stream(&stream)?;
        }
        self.streams.push(place.stream);
        Ok(())
    }

    /// The kept weight, whose memory a fresh one may take when no other stream reads it.
    pub(crate) fn recycle(&mut self, place: Place, capturing: bool) -> Former {
        if capturing || self.streams.as_slice() != [place.stream] { None } else { self.kept.take() }
    }

    /// Keeps a weight that was quantised by this call. Only afterwards: a call that failed leaves none behind.
    #[must_use]
    pub(crate) fn keep(&mut self, weight: &Arc<CachedWeight>, place: Place, capturing: bool) -> Former {
        if capturing {
            return self.captured.replace(Arc::clone(weight));
        }
        self.streams.clear();
        self.streams.push(place.stream);
        self.kept.replace(Arc::clone(weight))
    }

    /// (buffer, bytes, has row layout, has column layout), or None.
    pub(crate) fn describe<'py>(&self, py: Python<'py>) -> PyResult<Option<Described<'py>>> {
        let Some(kept) = &self.kept else { return Ok(None) };
        let usage = kept.record.segments.usage;
        Ok(Some((kept.buffer.shared(py)?, kept.bytes, usage.rowwise, usage.columnwise)))
    }
}

/// A buffer for a quantised weight, that of `former` if nobody else has it, and the storage that it is read from.
pub(crate) fn make_weight(
    py: Python<'_>,
    state: &State,
    parameter: &Bound<'_, PyAny>,
    record: WeightRecord,
    former: Former,
) -> Result<CachedWeight, Failure> {
    let fits = |kept: &CachedWeight| kept.record.device == record.device && kept.bytes >= record.segments.bytes;
    let (buffer, bytes) = if let Some(kept) = former.and_then(Arc::into_inner).filter(fits) {
        (kept.buffer, kept.bytes)
    } else {
        let tensor = state.bytes(py, record.device, record.segments.bytes)?;
        (Held::new(&state.reader, &tensor)?, record.segments.bytes)
    };
    let storage = parameter.call_method0(intern!(py, "untyped_storage"))?;
    let storage = state.torch.storage_weak_ref.bind(py).call1((storage,))?.unbind();
    Ok(CachedWeight { record, buffer, bytes, storage, has_gradient: AtomicBool::new(false) })
}
