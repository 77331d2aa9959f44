//! Recipes, autocast regions and delayed-scaling slots for Python.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use te_fast_core::Fp8;
use te_fast_core::autocast::{AmaxSlots, Direction, Region, Request, SlotMemory};
use te_fast_core::delayed;
use te_fast_core::dispatch::Place;
use te_fast_core::kernel::DevPtr;
use te_fast_core::recipe::{
    AmaxAlgorithm, BackwardOverride, Block, Delayed, PerGemm, Quantization, Recipe, Scaling,
};

use crate::error::IntoPython;
use crate::state::state;
use crate::tensor::{Held, view_of};

/// A recipe in the dispatcher's terms.
#[pyclass(module = "te_fast._native", name = "Recipe", frozen, eq, skip_from_py_object)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NativeRecipe(pub(crate) Recipe);

/// The option of `options` that `name` names.
fn choose<T: Copy>(what: &str, name: &str, options: &[(&str, T)]) -> PyResult<T> {
    let found = options.iter().find(|(option, _)| *option == name).map(|&(_, value)| value);
    found.ok_or_else(|| PyValueError::new_err(format!("recipe: unknown {what} {name:?}")))
}

#[pymethods]
impl NativeRecipe {
    #[new]
    #[pyo3(signature = (
        *, scaling, fwd, bwd, backward_override=None, power_2_scale=(false, false, false),
        amax_epsilon=(0.0, 0.0, 0.0), block=(0, 0, 0), split_accumulator=(false, true, true),
        margin=0, history_len=1024, most_recent=false, reduce_amax=true, custom=0
    ))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of a Python constructor")]
    fn new(
        scaling: &str,
        fwd: &str,
        bwd: &str,
        backward_override: Option<&str>,
        power_2_scale: (bool, bool, bool),
        amax_epsilon: (f32, f32, f32),
        block: (u8, u8, u8),
        split_accumulator: (bool, bool, bool),
        margin: i32,
        history_len: u32,
        most_recent: bool,
        reduce_amax: bool,
        custom: u32,
    ) -> PyResult<Self> {
        let formats = [("e4m3", Fp8::E4m3), ("e5m2", Fp8::E5m2)];
        let scalings = [
            ("delayed", Scaling::Delayed),
            ("current", Scaling::Current),
            ("block", Scaling::Block),
            ("mxfp8", Scaling::Mxfp8),
            ("nvfp4", Scaling::Nvfp4),
            ("custom", Scaling::Custom),
        ];
        let overrides = [
            ("", BackwardOverride::None),
            ("high_precision", BackwardOverride::HighPrecision),
            ("dequantized", BackwardOverride::Dequantized),
        ];
        let quantization = |power_2_scale, amax_epsilon, block| Quantization {
            power_2_scale,
            amax_epsilon,
            block: match block {
                0 => Block::Tensor,
                1 => Block::Row,
                _ => Block::Square,
            },
        };
        let algorithm = if most_recent { AmaxAlgorithm::MostRecent } else { AmaxAlgorithm::Max };
        let recipe = Recipe {
            scaling: choose("scaling", scaling, &scalings)?,
            fwd: choose("format", fwd, &formats)?,
            bwd: choose("format", bwd, &formats)?,
            input: quantization(power_2_scale.0, amax_epsilon.0, block.0),
            weight: quantization(power_2_scale.1, amax_epsilon.1, block.1),
            grad: quantization(power_2_scale.2, amax_epsilon.2, block.2),
            split_accumulator: PerGemm {
                fprop: split_accumulator.0,
                dgrad: split_accumulator.1,
                wgrad: split_accumulator.2,
            },
            delayed: Delayed { margin, history_len, algorithm, reduce_amax, custom },
            backward_override: choose("backward_override", backward_override.unwrap_or(""), &overrides)?,
        };
        recipe.validate().python()?;
        Ok(Self(recipe))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// A region to go back to.
#[pyclass(module = "te_fast._native", name = "Region", frozen, skip_from_py_object)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Snapshot(Region);

/// A flag of a public signature, where anything with a truth value goes.
#[inline]
fn flag(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    value.is_truthy()
}

#[inline]
fn request(
    recipe: Option<&Bound<'_, NativeRecipe>>,
    enabled: &Bound<'_, PyAny>,
    calibrating: &Bound<'_, PyAny>,
    graph: &Bound<'_, PyAny>,
    group: &Bound<'_, PyAny>,
) -> PyResult<Request> {
    Ok(Request {
        enabled: flag(enabled)?,
        calibrating: flag(calibrating)?,
        graph: flag(graph)?,
        recipe: recipe.map(|recipe| recipe.get().0),
        group: if group.is_none() { 0 } else { group.as_ptr() as u64 },
    })
}

/// Enters a region; returns the one that was in force.
#[pyfunction]
#[pyo3(signature = (recipe, enabled, calibrating, graph, group, /))]
pub(crate) fn autocast_enter<'py>(
    py: Python<'py>,
    recipe: Option<&Bound<'py, NativeRecipe>>,
    enabled: &Bound<'py, PyAny>,
    calibrating: &Bound<'py, PyAny>,
    graph: &Bound<'py, PyAny>,
    group: &Bound<'py, PyAny>,
) -> PyResult<Snapshot> {
    let request = request(recipe, enabled, calibrating, graph, group)?;
    let former = state(py)?.dispatcher(py)?.0.autocast.enter(&request).python()?;
    Ok(Snapshot(former))
}

/// Leaves the region that was entered with these flags; returns what is due: nothing (0), buckets that are updated
/// at every exit (1), layers that ran (2).
#[pyfunction]
#[pyo3(signature = (former, enabled, calibrating, graph, /))]
pub(crate) fn autocast_exit(
    former: &Bound<'_, Snapshot>,
    enabled: &Bound<'_, PyAny>,
    calibrating: &Bound<'_, PyAny>,
    graph: &Bound<'_, PyAny>,
) -> PyResult<u8> {
    let py = former.py();
    let active = flag(enabled)? || flag(calibrating)?;
    let updates = active && !flag(graph)?;
    Ok(state(py)?.dispatcher(py)?.0.autocast.exit(&former.get().0, updates) as u8)
}

/// Changes the region in force without entering one.
#[pyfunction]
#[pyo3(signature = (recipe, enabled, calibrating, graph, group, /))]
pub(crate) fn autocast_set<'py>(
    py: Python<'py>,
    recipe: Option<&Bound<'py, NativeRecipe>>,
    enabled: &Bound<'py, PyAny>,
    calibrating: &Bound<'py, PyAny>,
    graph: &Bound<'py, PyAny>,
    group: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let request = request(recipe, enabled, calibrating, graph, group)?;
    state(py)?.dispatcher(py)?.0.autocast.set(&request).python()
}

/// The region in force: (enabled, calibrating, graph, is first FP8 module, depth, epoch).
#[pyfunction]
pub(crate) fn autocast_region(py: Python<'_>) -> PyResult<(bool, bool, bool, bool, u32, u64)> {
    let dispatcher = state(py)?.dispatcher(py)?;
    let autocast = &dispatcher.0.autocast;
    let region = autocast.current();
    let flags = (region.enabled, region.calibrating, region.graph, region.is_first_fp8_module);
    Ok((flags.0, flags.1, flags.2, flags.3, autocast.depth(), region.epoch))
}

/// Whether the caller is the first FP8 module of the outermost region; true once.
#[pyfunction]
pub(crate) fn autocast_take_first(py: Python<'_>) -> PyResult<bool> {
    Ok(state(py)?.dispatcher(py)?.0.autocast.take_first_fp8_module())
}

/// Overwrites whether the next FP8 module is the first one.
#[pyfunction]
#[pyo3(signature = (is_first, /))]
pub(crate) fn autocast_set_first(py: Python<'_>, is_first: bool) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.autocast.set_first_fp8_module(is_first);
    Ok(())
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
    /// The slots themselves.
    pub(crate) fn slots(&self) -> Arc<AmaxSlots> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl SlotsHandle {
    #[new]
    #[pyo3(signature = (amax_history, scale, recipe, group, forward, /))]
    fn new(
        amax_history: &Bound<'_, PyAny>,
        scale: &Bound<'_, PyAny>,
        recipe: &Bound<'_, NativeRecipe>,
        group: &Bound<'_, PyAny>,
        forward: bool,
    ) -> PyResult<Self> {
        let py = scale.py();
        let state = state(py)?;
        let reader = &state.reader;
        let views = (view_of(reader, amax_history, "amax_history").python()?, view_of(reader, scale, "scale").python()?);
        let memory = Buffers { history: Held::new(reader, amax_history)?, scale: Held::new(reader, scale)? };
        let group = if group.is_none() { 0 } else { group.as_ptr() as u64 };
        let mut dispatcher = state.dispatcher(py)?;
        let autocast = &mut dispatcher.0.autocast;
        let slots = autocast.register(direction(forward), recipe.get().0, group, &views.0, &views.1, Box::new(memory));
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
