//! The handle of a linear op, which lives between calls: its quantised weight, its slots of delayed scaling, its
//! delayed gradients.

use std::collections::VecDeque;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::Stream;
use te_fast_core::program::{Program, SizedProgram};
use te_fast_core::quant::cache::{Candidate, Former, WeightCache as CoreCache};
use te_fast_core::quant::graph_memory::GraphMemory;
use te_fast_core::quant::value::{LinearSlots, Slot};
use te_fast_core::quant::weight::{Microbatch, WeightRecord};
use te_fast_core::recipe::slots::AmaxSlots;
use te_fast_core::runtime::lane::Place;

use crate::autocast::recompute::RecordedScales;
use crate::error::Failure;
use crate::program::member::Joining;
use crate::program::weight_memory::{CachedWeight, WeightMemory, is_gone, may_be_updated, share_with};
use crate::torch::process::State;

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
    /// Whether calls in regions of `epoch` may use them, since they still belong to the op.
    #[inline]
    pub(crate) fn serve(&self, epoch: u64) -> bool {
        self.epoch == epoch && !self.forward.is_retired() && !self.backward.is_retired()
    }

    /// The weight's alone.
    pub(crate) fn weight(&self) -> Slot<'_> {
        slot(&self.forward, self.forward_base + 1)
    }

    /// The number of the forward slots, and the weight's index among them; none if the layer has run since their last update.
    pub(crate) fn weight_of_idle_layer(&self) -> Option<(u64, usize)> {
        (!self.forward.ran()).then(|| (self.forward.id(), self.forward_base + 1))
    }

    pub(crate) fn slots(&self) -> LinearSlots<'_> {
        LinearSlots {
            input: slot(&self.forward, self.forward_base),
            weight: self.weight(),
            grad: slot(&self.backward, self.backward_base),
            output: slot(&self.forward, self.forward_base + 2),
            grad_input: slot(&self.backward, self.backward_base + 1),
        }
    }

    /// The same, with a copy of the forward scales.
    pub(crate) fn with_scales<'a>(&'a self, scales: DevPtr<'a>) -> LinearSlots<'a> {
        let own = self.slots();
        let copied = |slot: Slot<'a>, index: usize| Slot { scale: scales.offset(4 * index), ..slot };
        let (input, weight) = (copied(own.input, self.forward_base), copied(own.weight, self.forward_base + 1));
        LinearSlots { input, weight, ..own }
    }

    /// The same, with the forward scales of a recomputed call.
    pub(crate) fn replayed<'a>(&'a self, replay: &'a RecordedScales) -> LinearSlots<'a> {
        let (input, weight) = (replay.slot(self.forward_base), replay.slot(self.forward_base + 1));
        LinearSlots { input, weight, ..self.slots() }
    }
}

/// A quantised weight in memory that compiled calls pass. The memory is the program's own for its layout, or a copy by
/// the compiler, so that its address does not identify it.
#[derive(Debug)]
pub(crate) struct TracedWeight {
    pub(crate) record: WeightRecord,
    /// torch's weak reference to the storage of the weight.
    pub(crate) storage: Py<PyAny>,
    /// The stream that wrote it.
    pub(crate) writer: Stream,
}

/// A weight gradient that is delayed until `backward_dw`.
#[derive(Debug)]
pub(crate) struct WaitingGrad {
    pub(crate) operands: WaitingOperands,
    pub(crate) overwrite_main_grad: bool,
}

/// The operands of such a gradient.
#[derive(Debug)]
pub(crate) enum WaitingOperands {
    /// Nothing: the forward was on zero rows.
    NoRows,
    /// Operands that a program has kept.
    Kept(WaitingRows),
    /// Input and gradient of a product that torch computed.
    Plain {
        /// `(rows, in_features)`.
        x: Py<PyAny>,
        /// `(rows, out_features)`.
        grad: Py<PyAny>,
    },
}

/// Operands of a delayed weight gradient, as kept by a program.
#[derive(Debug)]
pub(crate) struct WaitingRows {
    pub(crate) program: Arc<Program>,
    pub(crate) sized: Arc<SizedProgram>,
    pub(crate) linear: usize,
    /// The saved tensors of the node, and its gradient.
    pub(crate) saved: Py<PyTuple>,
    pub(crate) grad: Py<PyAny>,
}

/// One tensor's slot of a direction; none if the owner does not have it.
fn slot(slots: &AmaxSlots, index: usize) -> Slot<'_> {
    if index >= slots.count() as usize {
        return Slot::NONE;
    }
    Slot { scale: slots.scale().offset(4 * index), amax: slots.history().offset(4 * index) }
}

/// The handle of a linear op inside of a program.
#[pyclass(module = "te_fast._native", name = "WeightHandle", weakref)]
#[derive(Debug)]
pub(crate) struct WeightHandle {
    name: String,
    pub(crate) cache: WeightCache,
    /// Memory of kept weights that captured graphs read, by address, since replays come when other weights may be kept.
    pub(crate) read_by_graphs: GraphMemory<(usize, Py<PyAny>)>,
    pub(crate) slots: Option<OpSlots>,
    /// torch's weak reference to the storage of the weight that was quantised last.
    pub(crate) storage: Option<Py<PyAny>>,
    /// Its member in launches that quantise all weights.
    pub(crate) joining: Option<Joining>,
    /// The last weights that compiled calls have quantised into their memory.
    pub(crate) traced: Option<TracedWeight>,
    pub(crate) waiting: VecDeque<WaitingGrad>,
    /// Whether the weight's gradient is added to `main_grad`.
    #[pyo3(get, set)]
    pub(crate) fuse_wgrad_accumulation: bool,
    /// Whether the weight's gradient is delayed until `backward_dw`.
    #[pyo3(get, set)]
    pub(crate) delay_wgrad_compute: bool,
    /// Whether the input is saved as it is for backward, which quantises it again.
    #[pyo3(get, set)]
    pub(crate) save_original_input: bool,
}

#[pymethods]
impl WeightHandle {
    #[new]
    fn new(name: String) -> Self {
        Self {
            name,
            cache: WeightCache::default(),
            read_by_graphs: GraphMemory::default(),
            slots: None,
            storage: None,
            joining: None,
            traced: None,
            waiting: VecDeque::new(),
            fuse_wgrad_accumulation: false,
            delay_wgrad_compute: false,
            save_original_input: false,
        }
    }

    /// Name in messages.
    #[getter]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Drops the quantised weight, so that the next forward quantises it again. Without `of_graphs`, weights from a
    /// capture stay.
    #[pyo3(signature = (of_graphs=true))]
    fn drop_weight_cache(slf: &Bound<'_, Self>, of_graphs: bool) -> PyResult<()> {
        let (former, traced, joining) = {
            let mut handle = slf.try_borrow_mut()?;
            (handle.cache.clear(of_graphs), handle.traced.take(), handle.joining.take())
        };
        drop((former, traced, joining));
        Ok(())
    }

    /// Drops amax slots; the next forward sets them up again.
    fn drop_slots(&mut self) {
        self.slots = None;
    }

    /// Uses these delayed-scaling slots for regions of `epoch`: input and weight from `forward_base` on, the output's
    /// gradient at `backward_base`.
    fn set_slots(
        &mut self,
        epoch: u64,
        forward: &crate::autocast::slots::SlotsHandle,
        backward: &crate::autocast::slots::SlotsHandle,
        forward_base: usize,
        backward_base: usize,
    ) -> PyResult<()> {
        let forward = forward.slots(&self.name, true, forward_base + 2)?;
        let backward = backward.slots(&self.name, false, backward_base + 1)?;
        self.slots = Some(OpSlots { epoch, forward, backward, forward_base, backward_base });
        Ok(())
    }

    /// Number of delayed weight gradients.
    fn deferred_count(&self) -> usize {
        self.waiting.len()
    }

    /// Drops the delayed gradients of a backward that then failed: all but the oldest `kept`.
    fn forget_deferred(slf: &Bound<'_, Self>, kept: usize) -> PyResult<()> {
        let mut handle = slf.try_borrow_mut()?;
        let behind = kept.min(handle.waiting.len());
        let forgotten = handle.waiting.split_off(behind);
        drop(handle);
        drop(forgotten);
        Ok(())
    }

    /// Delays the weight gradient `gradᵀ · x`, after those that are delayed already.
    fn defer(&mut self, x: Py<PyAny>, grad: Py<PyAny>, overwrite_main_grad: bool) {
        self.waiting.push_back(WaitingGrad { operands: WaitingOperands::Plain { x, grad }, overwrite_main_grad });
    }

    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.waiting.iter().try_for_each(|waiting| match &waiting.operands {
            WaitingOperands::NoRows => Ok(()),
            WaitingOperands::Kept(rows) => visit.call(&rows.saved).and_then(|()| visit.call(&rows.grad)),
            WaitingOperands::Plain { x, grad } => visit.call(x).and_then(|()| visit.call(grad)),
        })
    }

    fn __clear__(&mut self) {
        self.waiting.clear();
    }

    /// The quantised weight: (buffer, bytes, has row layout, has column layout), or None.
    fn weight_cache<'py>(slf: &Bound<'py, Self>) -> PyResult<Option<Described<'py>>> {
        describe(slf)
    }
}

/// The cache of a linear op's weight.
pub(crate) type WeightCache = CoreCache<WeightMemory>;

/// A kept weight's description for Python.
pub(crate) type Described<'py> = (Bound<'py, PyAny>, usize, bool, bool);

/// The quantised weight of `handle`, if a call that would quantise `wanted` can use it. Nothing is borrowed during
/// calls of torch, which may let other threads in.
#[inline]
pub(crate) fn reusable(
    state: &State,
    handle: &Bound<'_, WeightHandle>,
    parameter: &Bound<'_, PyAny>,
    wanted: &WeightRecord,
    microbatch: Microbatch,
    (place, capturing): (Place, bool),
) -> Result<Option<Arc<CachedWeight>>, Failure> {
    let py = handle.py();
    let found = handle.try_borrow_mut()?.cache.find(wanted, microbatch, capturing);
    let kept = match found {
        Candidate::None => return Ok(None),
        Candidate::Serves(kept) => kept,
        Candidate::ServesIfFrozen(kept) => {
            if parameter.getattr(&state.torch.names.requires_grad)?.is_truthy()? {
                return Ok(None);
            }
            kept
        }
    };
    if is_gone(&kept.memory.storage, py, state)?
        || (microbatch == Microbatch::Unknown && may_be_updated(&kept, state, parameter, wanted)?)
    {
        return Ok(None);
    }
    if capturing {
        keep_for_graph(handle, &kept, place.stream)?;
        return Ok(Some(kept));
    }
    let writer = handle.try_borrow_mut()?.cache.reused_on(place.stream);
    if let Some(writer) = writer {
        share_with(py, &kept, place, writer)?;
    }
    Ok(Some(kept))
}

/// torch's weak reference to the storage of a weight: that of an earlier call, or a new one, whose class is Python's and
/// costs microseconds. As long as a reference exists, no other storage has its number.
pub(crate) fn storage_of(
    state: &State,
    handle: &Bound<'_, WeightHandle>,
    parameter: &Bound<'_, PyAny>,
) -> PyResult<Py<PyAny>> {
    let py = handle.py();
    let storage = parameter.call_method0(intern!(py, "untyped_storage"))?;
    let number = storage.getattr(intern!(py, "_cdata"))?;
    let known = handle.try_borrow()?.storage.as_ref().map(|known| known.clone_ref(py));
    if let Some(known) = known
        && known.bind(py).getattr(&state.torch.names.cdata)?.eq(number)?
    {
        return Ok(known);
    }
    let made = state.torch.storage_weak_ref.bind(py).call1((storage,))?.unbind();
    let former = handle.try_borrow_mut()?.storage.replace(made.clone_ref(py));
    drop(former);
    Ok(made)
}

/// Keeps a weight's memory alive as long as the graph under capture on `stream`. If the weight is quantised again in
/// this memory, replays read the new values.
#[cold]
fn keep_for_graph(handle: &Bound<'_, WeightHandle>, kept: &CachedWeight, stream: Stream) -> Result<(), Failure> {
    for buffer in kept.memory.buffers() {
        let address = buffer.ptr().address();
        if handle.try_borrow()?.read_by_graphs.note(|&(known, _)| known == address, Some(stream))? {
            continue;
        }
        let memory = buffer.shared(handle.py())?.unbind();
        handle.try_borrow_mut()?.read_by_graphs.keep((address, memory), Some(stream))?;
    }
    Ok(())
}

/// The kept weight, whose memory a new one may take if it has no other reader. Drops the memory of destroyed graphs.
pub(crate) fn recycle(
    handle: &Bound<'_, WeightHandle>,
    (place, capturing): (Place, bool),
) -> PyResult<Former<WeightMemory>> {
    let mut weight = handle.try_borrow_mut()?;
    let (former, unread) = (weight.cache.recycle(place.stream, capturing), weight.read_by_graphs.release(0));
    drop(weight);
    drop(unread);
    Ok(former)
}

/// (buffer, bytes, has row layout, has column layout), or None.
pub(crate) fn describe<'py>(handle: &Bound<'py, WeightHandle>) -> PyResult<Option<Described<'py>>> {
    let Some(kept) = handle.try_borrow()?.cache.kept().map(Arc::clone) else { return Ok(None) };
    let layout = &kept.record.layout;
    let Some(first) = kept.memory.buffers().next() else { return Ok(None) };
    Ok(Some((first.shared(handle.py())?, layout.bytes(), layout.usage.rowwise, layout.usage.columnwise)))
}
