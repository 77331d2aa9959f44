//! Autocast regions for Python.

use std::sync::{Arc, OnceLock};

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyDict, PyString, PyTuple};
use te_fast_core::Error;
use te_fast_core::recipe::definition::Recipe;
use te_fast_core::recipe::region::{Former, Given, Request};
use te_fast_core::recipe::slots::Due;

use crate::autocast::groups;
use crate::autocast::recipe::NativeRecipe;
use crate::error::{IntoPython, to_python};
use crate::layer::module::Argument;
use crate::torch::process::{State, state};

/// Recipe and process group of a region, as the user passed them; the dispatcher keeps them with the region.
#[derive(Debug)]
struct RegionObjects {
    recipe: Option<Object>,
    group: Option<Object>,
}

/// Functions of Python that the binding calls, set once by `te_fast.pytorch.quantization`.
#[derive(Debug)]
struct Callbacks {
    /// `prepare(recipe | None) -> recipe`, with its native form in `_native`.
    prepare: Py<PyAny>,
    /// `update(without_grad)`, called when forward scales are due.
    update: Py<PyAny>,
    /// The attribute that holds a recipe's native form.
    native: Py<PyString>,
}

/// Functions that run at the end of an outermost region, before forward scales are updated.
type AtEnd = fn(Python<'_>) -> PyResult<()>;

static AT_END: OnceLock<AtEnd> = OnceLock::new();

/// Lets the ends of outermost regions run `at_end` from now on.
pub(crate) fn run_at_end(at_end: AtEnd) {
    AT_END.get_or_init(|| at_end);
}

static CALLBACKS: PyOnceLock<Callbacks> = PyOnceLock::new();

fn callbacks(py: Python<'_>) -> PyResult<&Callbacks> {
    CALLBACKS.get(py).ok_or_else(|| to_python(Error::state("autocast", "te_fast.pytorch has not been imported")))
}

/// Sets the functions that the binding calls: `prepare(recipe | None) -> recipe` and `update(without_grad)`.
#[pyfunction]
#[pyo3(signature = (prepare, update, /))]
pub(crate) fn autocast_callbacks(py: Python<'_>, prepare: Py<PyAny>, update: Py<PyAny>) {
    let native = PyString::intern(py, "_native").unbind();
    CALLBACKS.get_or_init(py, || Callbacks { prepare, update, native });
}

/// Drops the objects of finished regions. A drop may run foreign code, so nothing is borrowed meanwhile.
pub(super) fn release(py: Python<'_>, state: &State) -> PyResult<()> {
    loop {
        let released = state.dispatcher(py)?.0.autocast.pop_released();
        if released.is_none() {
            return Ok(());
        }
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
    recipe: Option<Object>,
    group: Option<Object>,
    former: Option<Former>,
}

/// A flag by its truth value, as in Transformer Engine; a recipe is refused.
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
            former: None,
        })
    }

    /// Puts the region in force.
    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        enter(&slf)?;
        Ok(slf)
    }

    /// Puts the former region back in force, and updates the forward scales that are due.
    ///
    /// An error of the update does not take the place of an exception that leaves the region. The update's maxima stay for
    /// the next one.
    #[pyo3(signature = (*exception))]
    fn __exit__(slf: &Bound<'_, Self>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let py = slf.py();
        let callbacks = callbacks(py)?;
        let state = state(py)?;
        let (former, enabled, updates) = {
            let mut region = slf.try_borrow_mut()?;
            let updates = (region.enabled || region.calibrating) && !region.graph;
            (region.former.take(), region.enabled, updates)
        };
        let Some(former) = former else {
            return Err(to_python(Error::state("autocast", "left without having been entered")));
        };
        let (due, ends) = {
            let autocast = &mut state.dispatcher(py)?.0.autocast;
            (autocast.exit(&former, updates), autocast.depth() == 0)
        };
        drop(former);
        if let Some(at_end) = AT_END.get().filter(|_| ends) {
            at_end(py)?;
        }
        release(py, state)?;
        // After an exception the next region's end updates. A rank that fails alone would wait for the others here.
        if due != Due::Nothing && exception.get_item(0).map_or(true, |kind| kind.is_none()) {
            // Without gradients only calibration updates, for the calibration of a trained model.
            callbacks.update.bind(py).call1((!enabled,))?;
        }
        Ok(())
    }
}

/// Puts a region in force. The object is not borrowed while Python runs, since foreign code may use it.
fn enter(region: &Bound<'_, AutocastRegion>) -> PyResult<()> {
    let py = region.py();
    let callbacks = callbacks(py)?;
    let state = state(py)?;
    let clone = |object: &Option<Object>| object.as_ref().map(|object| object.clone_ref(py));
    let (enabled, calibrating, graph, mut recipe, group) = {
        let region = region.try_borrow()?;
        (region.enabled, region.calibrating, region.graph, clone(&region.recipe), clone(&region.group))
    };
    let native = if enabled || calibrating { Some(native_of(callbacks, py, &mut recipe)?) } else { None };
    let number = groups::number_of(group.as_ref().map(|group| group.bind(py)))?;
    let given = given_of(recipe, group);
    let request = Request { enabled, calibrating, graph, recipe: native, group: number };
    let mut region = region.try_borrow_mut()?;
    if region.former.is_some() {
        let message = "an instance cannot be entered more than once concurrently";
        return Err(to_python(Error::state("autocast", message)));
    }
    let former = state.dispatcher(py)?.0.autocast.enter(&request, given.clone()).python()?;
    region.former = Some(former);
    Ok(())
}

/// The native form of a recipe. Python makes it if there is none, and passes the default recipe for `None`.
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
    let request = request_of(py, recipe.as_ref(), (enabled, calibrating, graph), group.as_ref())?;
    let state = state(py)?;
    let given = given_of(recipe, group);
    state.dispatcher(py)?.0.autocast.set(&request, given.clone()).python()?;
    release(py, state)
}

/// The objects that the dispatcher keeps with a region, if any.
pub(super) fn given_of(recipe: Option<Object>, group: Option<Object>) -> Option<Given> {
    if recipe.is_none() && group.is_none() { None } else { Some(Arc::new(RegionObjects { recipe, group })) }
}

/// The request of a region; the recipe must have its native form.
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
    Ok(Request { enabled, calibrating, graph, recipe, group: groups::number_of(group.map(|group| group.bind(py)))? })
}

type OptionalObject = Option<Object>;

/// Recipe and process group of the region in force, as they were given.
#[pyfunction]
pub(crate) fn autocast_objects(py: Python<'_>) -> PyResult<(OptionalObject, OptionalObject)> {
    let given = state(py)?.dispatcher(py)?.0.autocast.given().cloned();
    let objects = given.as_deref().and_then(|given| given.downcast_ref::<RegionObjects>());
    let clone = |object: &OptionalObject| object.as_ref().map(|object| object.clone_ref(py));
    Ok(objects.map_or((None, None), |given| (clone(&given.recipe), clone(&given.group))))
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

/// Whether layers quantise or calibrate by the recipes that a factory gives them.
#[pyfunction]
pub(crate) fn autocast_is_of_factory(py: Python<'_>) -> PyResult<bool> {
    Ok(state(py)?.dispatcher(py)?.0.autocast.current().is_of_factory())
}

/// Overwrites the number of regions entered.
#[pyfunction]
#[pyo3(signature = (depth, /))]
pub(crate) fn autocast_set_depth(py: Python<'_>, depth: u32) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.autocast.set_depth(depth);
    Ok(())
}

/// Restores the state of a fresh process; layers keep their slots.
#[pyfunction]
pub(crate) fn autocast_reset(py: Python<'_>) -> PyResult<()> {
    let state = state(py)?;
    state.dispatcher(py)?.0.autocast.reset();
    release(py, state)
}

/// The region in force in this thread, as attributes that are guards of a compiled graph.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct CurrentRegion;

#[pymethods]
#[expect(clippy::unused_self, reason = "attributes of a Python object")]
impl CurrentRegion {
    #[new]
    const fn new() -> Self {
        Self
    }

    /// Layers quantise.
    #[getter]
    fn enabled(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(state(py)?.dispatcher(py)?.0.autocast.current().enabled)
    }

    /// Layers record absolute maxima without quantising.
    #[getter]
    fn calibrating(&self, py: Python<'_>) -> PyResult<bool> {
        let mut dispatcher = state(py)?.dispatcher(py)?;
        let region = dispatcher.0.autocast.current();
        Ok(region.calibrating && !region.enabled)
    }

    /// Layers quantise or calibrate by the recipes that a factory gives them.
    #[getter]
    fn is_of_factory(&self, py: Python<'_>) -> PyResult<bool> {
        autocast_is_of_factory(py)
    }

    /// Equal if layers must behave in the same way.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(state(py)?.dispatcher(py)?.0.autocast.current().epoch)
    }
}
