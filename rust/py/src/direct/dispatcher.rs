//! The dispatcher itself for Python: facts of driver and devices, counters and recorder, memory, settings.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use te_fast_core::Error;
use te_fast_core::cuda::device as driver;
use te_fast_core::launch::trace::{CLOCK, Recording};

use crate::error::IntoPython;
use crate::torch::process::state;

/// Version of the CUDA driver, as 13000 for 13.0; raises without a usable one.
#[pyfunction]
pub(crate) fn cuda_driver_version() -> PyResult<i32> {
    driver::driver().python()
}

/// Facts of a CUDA device: capability, multiprocessors, L2 bytes, shared bytes a block.
#[pyfunction]
#[pyo3(signature = (ordinal, /))]
pub(crate) fn device_facts(py: Python<'_>, ordinal: u16) -> PyResult<((u32, u32), u32, u32, u32)> {
    let mut dispatcher = state(py)?.dispatcher(py)?;
    let facts = dispatcher.0.facts(ordinal).python()?;
    Ok((facts.capability, facts.multiprocessors, facts.l2_bytes, facts.shared_bytes))
}

/// Counters since the last reset.
#[pyfunction]
pub(crate) fn counters(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let counters = state(py)?.dispatcher(py)?.0.trace.counters;
    let dict = PyDict::new(py);
    for (name, value) in [
        ("launches", counters.launches),
        ("gemms", counters.gemms),
        ("learned_gemms", counters.learned_gemms),
        ("learned_attentions", counters.learned_attentions),
        ("plan_hits", counters.plan_hits),
        ("plan_misses", counters.plan_misses),
        ("guard_switches", counters.guard_switches),
        ("weight_casts", counters.weight_casts),
        ("allocations", counters.allocations),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// Counters to zero.
#[pyfunction]
pub(crate) fn reset_counters(py: Python<'_>) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.trace.reset();
    Ok(())
}

/// Starts noting launches ("tee": they run too, "only": they do not), or stops ("off").
#[pyfunction]
#[pyo3(signature = (mode, /))]
pub(crate) fn record(py: Python<'_>, mode: &str) -> PyResult<()> {
    let recording = match mode {
        "off" => Recording::Off,
        "tee" => Recording::Tee,
        "only" => Recording::Only,
        other => return Err(Error::value("record", format!("mode must be off, tee or only, got {other:?}"))).python(),
    };
    let mut dispatcher = state(py)?.dispatcher(py)?;
    if dispatcher.0.trace.recording() == Recording::Only {
        dispatcher.0.cache_epoch += 1;
    }
    dispatcher.0.trace.record(recording);
    Ok(())
}

/// Noted launches: (name, blocks, threads, shared bytes, parameter bytes, GEMM problem or None).
#[pyfunction]
pub(crate) fn recorded(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let launches = state(py)?.dispatcher(py)?.0.trace.launches().to_vec();
    let list = PyList::empty(py);
    for launch in launches {
        let problem = launch.problem.map(|problem| format!("{problem:?}"));
        list.append((
            launch.name,
            launch.grid.blocks,
            launch.grid.threads,
            launch.grid.shared_bytes,
            launch.params.as_slice(),
            problem,
        ))?;
    }
    Ok(list)
}

/// Turns the clock of a forward's stages on, from zero, or off.
#[pyfunction]
#[pyo3(signature = (on, /))]
pub(crate) fn stage_clock(on: bool) {
    CLOCK.run(on);
}

/// (stage, nanoseconds) since the clock was turned on.
#[pyfunction]
pub(crate) fn stage_nanoseconds() -> Vec<(&'static str, u64)> {
    CLOCK.spent().collect()
}

/// Per device: (name, GEMM plans, private bytes, streams).
#[pyfunction]
pub(crate) fn inventory(py: Python<'_>) -> PyResult<Vec<(String, usize, usize, usize)>> {
    let all = state(py)?.dispatcher(py)?.0.inventory();
    Ok(all.into_iter().map(|(device, plans, bytes, streams)| (device.to_string(), plans, bytes, streams)).collect())
}

/// Frees private memory, which waits for the devices; other threads run meanwhile.
#[pyfunction]
pub(crate) fn release_memory(py: Python<'_>) -> PyResult<()> {
    let memory = state(py)?.dispatcher(py)?.0.take_memory();
    py.detach(move || drop(memory));
    Ok(())
}

/// Loads every kernel onto a device, and returns their number. Other threads run meanwhile.
#[pyfunction]
#[pyo3(signature = (ordinal, /))]
pub(crate) fn load_kernels(py: Python<'_>, ordinal: u16) -> PyResult<usize> {
    py.detach(|| te_fast_core::cuda::images::load_kernels(ordinal)).python()
}

/// Sets whether row counts that are not multiples of 8 are accepted; returns the former setting.
#[pyfunction]
#[pyo3(signature = (enabled, /))]
pub(crate) fn set_auto_pad(py: Python<'_>, enabled: bool) -> PyResult<bool> {
    Ok(std::mem::replace(&mut state(py)?.dispatcher(py)?.0.auto_pad, enabled))
}

/// Number of rows to append to `rows` for the current region's FP8 GEMMs, if the user allows it.
#[pyfunction]
#[pyo3(signature = (rows, /))]
pub(crate) fn rows_to_pad(py: Python<'_>, rows: usize) -> PyResult<usize> {
    Ok(state(py)?.dispatcher(py)?.0.rows_to_pad(rows))
}

/// Sets whether each call compares the tensors' device with the current one; returns the former setting.
#[pyfunction]
#[pyo3(signature = (enabled, /))]
pub(crate) fn set_check_device(py: Python<'_>, enabled: bool) -> PyResult<bool> {
    Ok(std::mem::replace(&mut state(py)?.dispatcher(py)?.0.config.check_device, enabled))
}
