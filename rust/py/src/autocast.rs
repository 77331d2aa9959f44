//! Autocast regions and delayed-scaling slots for Python.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyDict, PyString, PyTuple};
use te_fast_core::Error;
use te_fast_core::autocast::{AmaxSlots, Direction, Due, Former, Request, SlotMemory};
use te_fast_core::autocast_scopes::thread_number;
use te_fast_core::delayed;
use te_fast_core::dispatch::Place;
use te_fast_core::kernel::DevPtr;
use te_fast_core::recipe::Recipe;

use crate::error::{IntoPython, named, to_python};
use crate::linear::Argument;
use crate::recipe::NativeRecipe;
use crate::state::state;
use crate::tensor::{Held, view_of};

/// Recipe and process group of a region, as they were given.
#[derive(Debug, Default)]
struct RegionObjects {
    recipe: Option<Py<PyAny>>,
    group: Option<Py<PyAny>>,
}

/// Those of the regions in force, by thread; the first is what threads without a region see.
#[pyclass(module = "te_fast._native")]
#[derive(Debug, Default)]
struct Objects(Vec<(u64, RegionObjects)>);

impl Objects {
    fn seen(&self) -> Option<&RegionObjects> {
        let thread = self.seen_thread();
        self.0.iter().find(|(known, _)| *known == thread).map(|(_, given)| given)
    }

    /// The thread whose objects this thread sees.
    fn seen_thread(&self) -> u64 {
        let thread = thread_number();
        let own = self.0.iter().any(|(known, _)| *known == thread);
        if own { thread } else { self.0.first().map_or(thread, |&(first, _)| first) }
    }

    /// Puts `given` in force for a thread, or nothing of its own; what was.
    fn replace(&mut self, thread: u64, given: Option<RegionObjects>) -> Option<RegionObjects> {
        match (self.0.iter().position(|(known, _)| *known == thread), given) {
            (Some(at), Some(given)) => Some(std::mem::replace(&mut self.0[at].1, given)),
            (Some(at), None) => Some(self.0.remove(at).1),
            (None, Some(given)) => {
                self.0.push((thread, given));
                None
            }
            (None, None) => None,
        }
    }
}

/// What the binding asks of Python, set once by `te_fast.pytorch.quantization`.
#[derive(Debug)]
struct Callbacks {
    /// `prepare(recipe | None) -> recipe`, with its native form in `_native`.
    prepare: Py<PyAny>,
    /// `update(ran, without_grad)`, called when forward scales are due.
    update: Py<PyAny>,
    /// The attribute that holds a recipe's native form.
    native: Py<PyString>,
    objects: Py<Objects>,
}

static CALLBACKS: PyOnceLock<Callbacks> = PyOnceLock::new();

fn callbacks(py: Python<'_>) -> PyResult<&Callbacks> {
    CALLBACKS
        .get(py)
        .ok_or_else(|| to_python(Error::state("autocast", "te_fast.pytorch.quantization has not been imported")))
}

/// Sets what the binding calls: `prepare(recipe | None) -> recipe` and `update(ran, without_grad)`.
#[pyfunction]
#[pyo3(signature = (prepare, update, /))]
pub(crate) fn autocast_callbacks(py: Python<'_>, prepare: Py<PyAny>, update: Py<PyAny>) -> PyResult<()> {
    let objects = Py::new(py, Objects::default())?;
    let native = PyString::intern(py, "_native").unbind();
    CALLBACKS.get_or_init(py, || Callbacks { prepare, update, native, objects });
    Ok(())
}

#[inline]
fn group_number(group: Option<&Py<PyAny>>) -> u64 {
    group.map_or(0, |group| group.as_ptr() as u64)
}

/// What a region replaced.
#[derive(Debug)]
pub(crate) struct Replaced {
    former: Former,
    given: Option<RegionObjects>,
}

impl Replaced {
    /// Notes recipe and group of a region that has taken the place of `former`.
    pub(crate) fn by(py: Python<'_>, former: Former, recipe: Option<Object>, group: Option<Object>) -> PyResult<Self> {
        let mut objects = callbacks(py)?.objects.bind(py).try_borrow_mut()?;
        Ok(Self { former, given: objects.replace(former.thread, Some(RegionObjects { recipe, group })) })
    }

    /// Puts recipe and group back.
    pub(crate) fn restore_objects(self, py: Python<'_>) -> PyResult<Former> {
        let own = callbacks(py)?.objects.bind(py).try_borrow_mut()?.replace(self.former.thread, self.given);
        drop(own); // which may run anything, so nothing is borrowed meanwhile
        Ok(self.former)
    }
}

type Object = Py<PyAny>;

/// An autocast region: the base of `te_fast.pytorch.autocast`, which documents it.
#[pyclass(module = "te_fast._native", subclass)]
#[derive(Debug)]
pub(crate) struct AutocastRegion {
    enabled: bool,
    calibrating: bool,
    graph: bool,
    recipe: Option<Py<PyAny>>,
    group: Option<Py<PyAny>>,
    replaced: Option<Replaced>,
}

/// A flag by its truth value, as Transformer Engine takes it; a recipe is none.
fn flag(name: &'static str, Argument(given): Argument<'_>, default: bool) -> PyResult<bool> {
    let Some(given) = given else { return Ok(default) };
    if let Ok(flag) = given.cast::<PyBool>() {
        return Ok(flag.is_true());
    }
    if given.hasattr(intern!(given.py(), "_native"))? {
        let got = format!("{}; recipes are given by name, recipe=", given.get_type().name()?);
        return Err(to_python(Error::dtype("autocast", name, "a bool", got)));
    }
    given.is_truthy()
}

#[cold]
fn unknown_keyword(others: &Bound<'_, PyDict>) -> PyErr {
    let name = others.keys().iter().next().map_or_else(String::new, |name| name.to_string());
    let of_old = match name.as_str() {
        "fp8_recipe" => ", which is fp8_autocast's name of recipe",
        "fp8_group" => ", which is fp8_autocast's name of amax_reduction_group",
        _ => "",
    };
    PyTypeError::new_err(format!("autocast() got an unexpected keyword argument '{name}'{of_old}"))
}

#[pymethods]
impl AutocastRegion {
    #[new]
    #[pyo3(signature = (
        enabled=Argument(None), calibrating=Argument(None), recipe=None, amax_reduction_group=None, _graph=Argument(None),
        **others
    ))]
    #[expect(clippy::used_underscore_binding, reason = "Transformer Engine's name of the argument")]
    fn new(
        enabled: Argument<'_>,
        calibrating: Argument<'_>,
        recipe: Option<Py<PyAny>>,
        amax_reduction_group: Option<Py<PyAny>>,
        _graph: Argument<'_>,
        others: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        if let Some(others) = others {
            return Err(unknown_keyword(others));
        }
        Ok(Self {
            enabled: flag("enabled", enabled, true)?,
            calibrating: flag("calibrating", calibrating, false)?,
            graph: flag("_graph", _graph, false)?,
            recipe,
            group: amax_reduction_group,
            replaced: None,
        })
    }

    /// Puts the region in force.
    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let py = slf.py();
        slf.try_borrow_mut()?.enter(py)?;
        Ok(slf)
    }

    /// Puts the former region back in force, and updates the forward scales that are due.
    #[pyo3(signature = (*_exception))]
    fn __exit__(&mut self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let Some(replaced) = self.replaced.take() else {
            return Err(to_python(Error::state("autocast", "left without having been entered")));
        };
        let callbacks = callbacks(py)?;
        let former = replaced.restore_objects(py)?;
        let updates = (self.enabled || self.calibrating) && !self.graph;
        let due = state(py)?.dispatcher(py)?.0.autocast.exit(&former, updates);
        if due != Due::Nothing {
            // Only calibration goes on without gradients, as when a trained model is calibrated.
            callbacks.update.bind(py).call1((due == Due::Ran, !self.enabled))?;
        }
        Ok(())
    }
}

impl AutocastRegion {
    fn enter(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.replaced.is_some() {
            let message = "an instance cannot be entered more than once concurrently";
            return Err(to_python(Error::state("autocast", message)));
        }
        let callbacks = callbacks(py)?;
        let mut recipe = self.recipe.as_ref().map(|recipe| recipe.clone_ref(py));
        let native = if self.enabled || self.calibrating { Some(native_of(callbacks, py, &mut recipe)?) } else { None };
        let request = Request {
            enabled: self.enabled,
            calibrating: self.calibrating,
            graph: self.graph,
            recipe: native,
            group: group_number(self.group.as_ref()),
        };
        let former = state(py)?.dispatcher(py)?.0.autocast.enter(&request).python()?;
        let group = self.group.as_ref().map(|group| group.clone_ref(py));
        self.replaced = Some(Replaced::by(py, former, recipe, group)?);
        Ok(())
    }
}

/// The native form of a recipe; Python makes it where there is none, and the default recipe for `None`.
#[inline]
fn native_of(callbacks: &Callbacks, py: Python<'_>, recipe: &mut Option<Py<PyAny>>) -> PyResult<Recipe> {
    if let Some(known) = recipe
        && let Ok(native) = known.bind(py).getattr(&callbacks.native)
        && let Ok(native) = native.cast::<NativeRecipe>()
    {
        return Ok(native.get().0);
    }
    let prepared = callbacks.prepare.bind(py).call1((recipe.as_ref(),))?;
    let native = prepared.getattr(&callbacks.native)?.cast_into::<NativeRecipe>()?.get().0;
    *recipe = Some(prepared.unbind());
    Ok(native)
}

/// Changes the region in force without entering one; the recipe must have its native form.
#[pyfunction]
#[pyo3(signature = (recipe, enabled, calibrating, graph, group, /))]
pub(crate) fn autocast_set(
    py: Python<'_>,
    recipe: Option<Py<PyAny>>,
    enabled: bool,
    calibrating: bool,
    graph: bool,
    group: Option<Py<PyAny>>,
) -> PyResult<()> {
    let callbacks = callbacks(py)?;
    let request = request_of(py, recipe.as_ref(), (enabled, calibrating, graph), group.as_ref())?;
    state(py)?.dispatcher(py)?.0.autocast.set(&request).python()?;
    let former = {
        let mut objects = callbacks.objects.bind(py).try_borrow_mut()?;
        let thread = objects.seen_thread();
        let none = recipe.is_none() && group.is_none();
        objects.replace(thread, (!none).then_some(RegionObjects { recipe, group }))
    };
    drop(former); // which may run anything
    Ok(())
}

/// What a region of these asks for; the recipe must have its native form.
pub(crate) fn request_of(
    py: Python<'_>,
    recipe: Option<&Object>,
    (enabled, calibrating, graph): (bool, bool, bool),
    group: Option<&Object>,
) -> PyResult<Request> {
    let native = |recipe: &Object| -> PyResult<_> {
        Ok(recipe.bind(py).getattr(&callbacks(py)?.native)?.cast_into::<NativeRecipe>()?.get().0)
    };
    let recipe = recipe.map(native).transpose()?;
    Ok(Request { enabled, calibrating, graph, recipe, group: group_number(group) })
}

type OptionalObject = Option<Object>;

/// Recipe and process group of the region in force, as they were given.
#[pyfunction]
pub(crate) fn autocast_objects(py: Python<'_>) -> PyResult<(OptionalObject, OptionalObject)> {
    let objects = callbacks(py)?.objects.bind(py).try_borrow()?;
    let clone = |object: &OptionalObject| object.as_ref().map(|object| object.clone_ref(py));
    Ok(objects.seen().map_or((None, None), |given| (clone(&given.recipe), clone(&given.group))))
}

/// The recipe of the region in force; in a recomputation, of the one that it repeats.
#[pyfunction]
pub(crate) fn autocast_recipe(py: Python<'_>) -> PyResult<NativeRecipe> {
    Ok(NativeRecipe(state(py)?.dispatcher(py)?.0.autocast.current().recipe))
}

/// The region in force: (enabled, calibrating, graph, is first FP8 module, depth, epoch).
#[pyfunction]
pub(crate) fn autocast_region(py: Python<'_>) -> PyResult<(bool, bool, bool, bool, u32, u64)> {
    let mut dispatcher = state(py)?.dispatcher(py)?;
    let autocast = &mut dispatcher.0.autocast;
    let region = *autocast.current();
    let flags = (region.enabled, region.calibrating, region.graph, region.is_first_fp8_module);
    Ok((flags.0, flags.1, flags.2, flags.3, autocast.depth(), region.epoch))
}

/// Overwrites the number of regions entered.
#[pyfunction]
#[pyo3(signature = (depth, /))]
pub(crate) fn autocast_set_depth(py: Python<'_>, depth: u32) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.autocast.set_depth(depth);
    Ok(())
}

/// Back to the state of a fresh process; layers keep their slots.
#[pyfunction]
pub(crate) fn autocast_reset(py: Python<'_>) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.autocast.reset();
    let former = std::mem::take(&mut *callbacks(py)?.objects.bind(py).try_borrow_mut()?);
    drop(former);
    Ok(())
}

/// Updates the scales of all layers that ran: forward's, or backward's.
#[pyfunction]
#[pyo3(signature = (forward, /))]
pub(crate) fn update_scales(py: Python<'_>, forward: bool) -> PyResult<()> {
    let direction = direction(forward);
    let state = state(py)?;
    loop {
        let device = state.dispatcher(py)?.0.autocast.due_device(direction);
        let Some(device) = device else { break };
        let _guard = state.guard(py, device)?;
        let stream = state.reader.stream(py, device)?;
        delayed::update(&mut state.dispatcher(py)?.0, direction, Place { device, stream }).python()?;
    }
    Ok(())
}

/// Tells the dispatcher that forward scales were changed by others: cached weights are older than them.
#[pyfunction]
pub(crate) fn note_scale_change(py: Python<'_>) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.forward_generation += 1;
    Ok(())
}

fn direction(forward: bool) -> Direction {
    if forward { Direction::Forward } else { Direction::Backward }
}

#[derive(Debug)]
struct Buffers {
    history: Held,
    scale: Held,
}

impl SlotMemory for Buffers {
    fn history(&self) -> DevPtr<'_> {
        self.history.ptr()
    }

    fn scale(&self) -> DevPtr<'_> {
        self.scale.ptr()
    }
}

/// The delayed-scaling buffers of one layer in one direction, known to the dispatcher as long as this lives.
#[pyclass(module = "te_fast._native", name = "AmaxSlots", frozen)]
#[derive(Debug)]
pub(crate) struct SlotsHandle(Arc<AmaxSlots>);

impl SlotsHandle {
    /// The slots themselves, for a layer that reads so many of one direction.
    pub(crate) fn slots(&self, layer: &str, forward: bool, count: usize) -> PyResult<Arc<AmaxSlots>> {
        let slots = &self.0;
        if slots.direction() == direction(forward) && slots.count() as usize >= count {
            return Ok(Arc::clone(slots));
        }
        let what = if forward { "scaling_fwd" } else { "scaling_bwd" };
        let expected = format!("scales of at least {count} tensors of that direction");
        let got = format!("{:?} scales of {}; they are another layer's", slots.direction(), slots.count());
        Err(named(&Error::shape("delayed scaling", what, expected, got), Some(layer)))
    }
}

#[pymethods]
impl SlotsHandle {
    #[new]
    #[pyo3(signature = (amax_history, scale, recipe, forward, former=None, /))]
    fn new(
        amax_history: &Bound<'_, PyAny>,
        scale: &Bound<'_, PyAny>,
        recipe: &Bound<'_, NativeRecipe>,
        forward: bool,
        former: Option<&Bound<'_, Self>>,
    ) -> PyResult<Self> {
        let py = scale.py();
        let state = state(py)?;
        let reader = &state.reader;
        let views =
            (view_of(reader, amax_history, "amax_history").python()?, view_of(reader, scale, "scale").python()?);
        let memory = Buffers { history: Held::alias(reader, amax_history)?, scale: Held::alias(reader, scale)? };
        let mut dispatcher = state.dispatcher(py)?;
        let autocast = &mut dispatcher.0.autocast;
        let former = former.map(|former| &*former.get().0);
        let recipe = recipe.get().0;
        let slots = autocast.register(direction(forward), recipe, &views.0, &views.1, Box::new(memory), former);
        slots.python().map(Self)
    }

    /// Ascends in the order of registration.
    #[getter]
    fn id(&self) -> u64 {
        self.0.id()
    }

    /// Whether the layer ran since the last update.
    #[getter]
    fn ran(&self) -> bool {
        self.0.ran()
    }

    /// Takes part in the next update.
    fn mark_ran(&self, py: Python<'_>) -> PyResult<()> {
        state(py)?.dispatcher(py)?.0.autocast.mark_ran(&self.0);
        Ok(())
    }

    /// Takes no part in the next update: the caller has updated the scales itself.
    fn clear_ran(&self) {
        self.0.clear_ran();
    }
}
