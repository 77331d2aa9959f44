//! The weights that the last step used, quantised by one launch when a call asks for the first of them after an optimizer step.
//!
//! A weight takes part only if torch has counted a write to it since, or if the optimizer that stepped has its very parameter: then
//! it was written in the order of the stream. Memory that is written behind torch's back, as gathers of sharded weights do ahead of
//! their layers, is read by its own call alone.

use std::sync::{Arc, Mutex};

use pyo3::intern;
use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::ops::cast_many::ManyScales;
use te_fast_core::program::WeightCast;
use te_fast_core::quant::cache::Former;
use te_fast_core::quant::together::{Kind, Together};
use te_fast_core::quant::value::Slot;
use te_fast_core::quant::weight::WeightRecord;
use te_fast_core::runtime::lane::{Memory, Place};

use crate::autocast::region::run_at_end;
use crate::error::Failure;
use crate::hooks::hooks;
use crate::program::member::{Held, Joining, Member, Sources};
use crate::program::parts::Joined;
use crate::program::weight::{OpSlots, WeightHandle, recycle};
use crate::program::weight_memory::{
    CachedWeight, Wanted, WeightMemory, is_gone, make_weights, share_with, weight_buffer,
};
use crate::torch::process::State;
use crate::torch::reader::instance_dict;

/// Which weights are quantised together. Nobody waits here: who finds it in use quantises alone.
static TOGETHER: Mutex<Together<Arc<Member>>> = Mutex::new(Together::new());

/// What the weight of a call was quantised from.
pub(crate) struct Source<'a, 'py> {
    /// What the program read.
    pub(crate) param: &'a Bound<'py, PyAny>,
    pub(crate) index: usize,
    /// Of which parameters it is joined, if it is.
    pub(crate) joined: Option<&'a Joined>,
}

fn kind_of(record: &WeightRecord, place: Place) -> Kind {
    Kind { place, epoch: record.epoch, dtype: record.token.dtype, training: record.training }
}

/// The weight that a launch has left for a call that would quantise `wanted` itself, after that launch if it is due.
#[inline]
pub(crate) fn ready(
    state: &State,
    handle: &Bound<'_, WeightHandle>,
    wanted: &WeightRecord,
    cast: &WeightCast,
    place: Place,
) -> Result<Option<Arc<CachedWeight>>, Failure> {
    if let Some(weight) = take(state, handle, wanted, place)? {
        return Ok(Some(weight));
    }
    let kind = kind_of(wanted, place);
    if !TOGETHER.try_lock().is_ok_and(|together| together.is_due(&kind, wanted.optimizer_steps)) {
        return Ok(None);
    }
    launch(state, handle.py(), (&kind, cast), wanted)?;
    take(state, handle, wanted, place)
}

fn take(
    state: &State,
    handle: &Bound<'_, WeightHandle>,
    wanted: &WeightRecord,
    place: Place,
) -> Result<Option<Arc<CachedWeight>>, Failure> {
    let py = handle.py();
    let Some((weight, writer)) = handle.try_borrow_mut()?.cache.take_ready() else { return Ok(None) };
    if weight.record != *wanted || is_gone(&weight.memory.storage, py, state)? {
        handle.try_borrow_mut()?.cache.note_miss();
        return Ok(None);
    }
    if writer != place.stream {
        share_with(py, &weight, place, writer)?;
    }
    Ok(Some(weight))
}

/// Notes that a call has quantised a weight, alone or not: the next launch is to have it, too.
pub(crate) fn join(
    state: &State,
    handle: &Bound<'_, WeightHandle>,
    weight: &CachedWeight,
    cast: WeightCast,
    source: &Source<'_, '_>,
    (place, was_alone): (Place, bool),
) -> Result<(), Failure> {
    let record = weight.record;
    if record.token.version.is_none() || (was_alone && !handle.try_borrow_mut()?.cache.may_join()) {
        return Ok(());
    }
    let (tensors, first) = source.tensors(handle.py());
    let former = handle.try_borrow_mut()?.joining.take();
    let known = former.filter(|known| known.sources.are(handle.py(), (&tensors, first)));
    let (member, sources) = match known {
        Some(known) => (known.member, known.sources),
        None => match Sources::new(state, (&tensors, first))? {
            Some(sources) => (Arc::new(Member::new(handle)?), sources),
            None => return Ok(()),
        },
    };
    let storage = weight.memory.storage.clone_ref(handle.py());
    let joining = Joining { member: Arc::clone(&member), sources, storage, record, cast };
    let former = handle.try_borrow_mut()?.joining.replace(joining);
    drop(former);
    if let Ok(mut together) = TOGETHER.try_lock() {
        together.join(kind_of(&record, place), |round| member.is_new_to(round).then_some(member));
    }
    Ok(())
}

impl<'py> Source<'_, 'py> {
    /// The tensors whose versions make the weight's, and which of them it begins with.
    fn tensors(&self, py: Python<'py>) -> (SmallVec<[Bound<'py, PyAny>; 4]>, usize) {
        let Some(joined) = self.joined else { return (SmallVec::from_iter([self.param.clone()]), 0) };
        let (mut tensors, mut first) = (SmallVec::new(), 0);
        for (index, (_, parts, _)) in joined.shares().enumerate().filter(|(_, (share, ..))| share.is_weight()) {
            if index == self.index {
                first = tensors.len();
            }
            tensors.extend(parts.iter().map(|part| part.bind(py).clone()));
        }
        (tensors, first)
    }
}

/// A member whose tensors are held.
struct Alive<'py> {
    member: Arc<Member>,
    handle: Bound<'py, WeightHandle>,
    sources: Held<'py>,
}

/// One that is to be quantised.
struct Due<'a, 'py> {
    alive: &'a Alive<'py>,
    x: DevPtr<'a>,
    storage: Py<PyAny>,
    record: WeightRecord,
    cast: WeightCast,
    slots: Option<OpSlots>,
}

#[cold]
fn launch(
    state: &State,
    py: Python<'_>,
    (kind, cast): (&Kind, &WeightCast),
    wanted: &WeightRecord,
) -> Result<(), Failure> {
    let Ok((members, pending)) = TOGETHER.try_lock().map(|mut together| together.begin(kind, wanted.optimizer_steps))
    else {
        return Ok(());
    };
    forget(py, pending)?;
    let mut alive = Vec::with_capacity(members.len());
    for member in members {
        alive.extend(alive_of(py, member)?);
    }
    let mut due = Vec::with_capacity(alive.len());
    for alive in &alive {
        due.extend(due_of(state, alive, cast, wanted)?);
    }
    if due.len() < 2 {
        return Ok(());
    }
    let mut wanted = Vec::with_capacity(due.len());
    for due in &due {
        let former = recycle(&due.alive.handle, (kind.place, false))?;
        wanted.push(Wanted { storage: due.storage.clone_ref(py), record: due.record, former });
    }
    let made: Vec<_> = match make_weights(py, state, wanted) {
        Ok(made) => made.into_iter().map(Arc::new).collect(),
        Err(error) if is_out_of_memory(py, &error) => {
            if let Ok(mut together) = TOGETHER.try_lock() {
                together.refuse(kind);
            }
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    run_at_end(forget_unused);
    run(state, py, kind.place, cast, (&due, &made))?;
    let (mut formers, mut launched) = (Vec::<Former<WeightMemory>>::new(), Vec::with_capacity(due.len()));
    for (Due { alive, .. }, weight) in due.iter().zip(made) {
        formers.extend(alive.handle.try_borrow_mut()?.cache.make_ready(weight, kind.place.stream).map(Some));
        launched.push(Arc::clone(&alive.member));
    }
    drop(formers);
    if let Ok(mut together) = TOGETHER.try_lock() {
        together.launched(kind, launched);
    }
    Ok(())
}

/// A weight with its tensors; none if its layer or one of its parts is gone, or its quantised weight was dropped.
fn alive_of(py: Python<'_>, member: Arc<Member>) -> Result<Option<Alive<'_>>, Failure> {
    let Some(handle) = member.handle::<WeightHandle>(py)? else { return Ok(None) };
    let borrowed = handle.try_borrow()?;
    let joining = borrowed.joining.as_ref().filter(|own| Arc::ptr_eq(&own.member, &member));
    let sources = joining.and_then(|joining| joining.sources.held(py));
    drop(borrowed);
    Ok(sources.map(|sources| Alive { member, handle, sources }))
}

/// How a member must be quantised now. None if no write to it is known, or if its type or address has changed. The weight's
/// own call checks whether its storage is still the same one.
fn due_of<'a, 'py>(
    state: &State,
    alive: &'a Alive<'py>,
    cast: &WeightCast,
    wanted: &WeightRecord,
) -> Result<Option<Due<'a, 'py>>, Failure> {
    let Some((x, token)) = alive.sources.read(state)? else { return Ok(None) };
    let borrowed = alive.handle.try_borrow()?;
    let Some(Joining { storage, record, cast: own, .. }) = &borrowed.joining else { return Ok(None) };
    let was = record.token;
    let written = token.version != was.version || alive.sources.is_written_since(record.optimizer_steps);
    let moved = (token.address, token.dtype) == (was.address, was.dtype) && written;
    let slots = borrowed.slots.as_ref().filter(|slots| slots.serve(record.epoch));
    let lacks_slots = own.scales == ManyScales::Given && slots.is_none();
    if !moved || !own.is_with(cast) || lacks_slots {
        return Ok(None);
    }
    let &WeightRecord { generation, cache_epoch, optimizer_steps, .. } = wanted;
    let record = WeightRecord { token, generation, cache_epoch, optimizer_steps, ..*record };
    let (storage, slots) = (storage.clone_ref(alive.handle.py()), slots.cloned());
    Ok(Some(Due { alive, x, storage, record, cast: *own, slots }))
}

fn run(
    state: &State,
    py: Python<'_>,
    place: Place,
    cast: &WeightCast,
    (due, made): (&[Due<'_, '_>], &[Arc<CachedWeight>]),
) -> Result<(), Failure> {
    let casts: Vec<_> = due
        .iter()
        .zip(made)
        .map(|(due, weight)| {
            due.cast.of(due.x, &weight_buffer(weight), due.slots.as_ref().map_or(Slot::NONE, OpSlots::weight))
        })
        .collect();
    let plan = cast.plan()?;
    let mut dispatcher = state.dispatcher(py)?;
    let mut lane = dispatcher.0.lane(place, 0, Memory::Own)?;
    let counters: DevPtr<'_> = lane.workspace.counters;
    plan.run(&mut lane.target, &casts, counters)?;
    lane.target.trace.counters.weight_casts += casts.len() as u64;
    Ok(())
}

fn is_out_of_memory(py: Python<'_>, error: &PyErr) -> bool {
    let class = py.import(intern!(py, "torch")).and_then(|torch| torch.getattr(intern!(py, "OutOfMemoryError")));
    class.is_ok_and(|class| error.is_instance(py, &class))
}

/// Whether a layer's weights may be quantised before its call. A hook in front of it may write them through `weight.data`.
pub(super) fn may_run_ahead(owner: &Bound<'_, PyAny>) -> PyResult<bool> {
    // A program that is called by itself may have an owner without attributes.
    let Ok(attributes) = instance_dict(owner) else { return Ok(true) };
    let hooks = attributes.get_item(intern!(owner.py(), "_forward_pre_hooks"))?;
    hooks.map_or(Ok(true), |hooks| Ok(!hooks.is_truthy()?))
}

/// Drops what no call has come for.
fn forget(py: Python<'_>, members: Vec<Arc<Member>>) -> PyResult<()> {
    for member in members {
        let Some(handle) = member.handle::<WeightHandle>(py)? else { continue };
        let mut borrowed = handle.try_borrow_mut()?;
        let unused = borrowed.cache.take_ready();
        let mut raised = None;
        if unused.is_some() {
            borrowed.cache.note_miss();
            let is_given = borrowed.joining.as_ref().is_some_and(|joining| joining.cast.scales == ManyScales::Given);
            raised = borrowed.slots.as_ref().filter(|_| is_given).and_then(OpSlots::weight_of_idle_layer);
        }
        drop(borrowed);
        drop(unused);
        if let Some(slot) = raised {
            // The launch has raised a maximum of a layer that has not run.
            hooks(py)?.forget_maximum.bind(py).call1(slot)?;
        }
    }
    Ok(())
}

/// The outermost region ends: what no call in it has come for goes.
fn forget_unused(py: Python<'_>) -> PyResult<()> {
    let Ok(mut together) = TOGETHER.try_lock() else { return Ok(()) };
    if !together.has_pending() {
        return Ok(());
    }
    let pending = together.take_pending();
    drop(together);
    forget(py, pending)
}
