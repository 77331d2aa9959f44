//! Notes which weights an optimizer has written, since torch's fused optimizers do not increase versions.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use pyo3::prelude::*;

use crate::torch::process::state;

/// For each parameter of a living optimizer, the number of the optimizer's last step.
type LastSteps = HashMap<usize, Arc<AtomicU64>>;

static LAST_STEPS: LazyLock<Mutex<LastSteps>> = LazyLock::new(Mutex::default);

/// The parameters of an optimizer, by their addresses, which are unique since the optimizer keeps the parameters alive.
#[pyclass(frozen, module = "te_fast._native")]
pub(crate) struct OptimizerWrites {
    last_step: Arc<AtomicU64>,
    addresses: Vec<usize>,
}

#[pymethods]
impl OptimizerWrites {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts lists by value")]
    fn new(parameters: Vec<Bound<'_, PyAny>>) -> Self {
        let last_step = Arc::new(AtomicU64::new(0));
        let addresses: Vec<usize> = parameters.iter().map(address).collect();
        if let Ok(mut known) = LAST_STEPS.lock() {
            known.extend(addresses.iter().map(|address| (*address, Arc::clone(&last_step))));
        }
        Self { last_step, addresses }
    }

    /// Whether these are still the parameters.
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts lists by value")]
    fn is_of(&self, parameters: Vec<Bound<'_, PyAny>>) -> bool {
        parameters.iter().map(address).eq(self.addresses.iter().copied())
    }

    /// Notes a step of the optimizer: weights may have changed, even if torch's version counters have not.
    fn note_step(&self, py: Python<'_>) -> PyResult<()> {
        let steps = {
            let steps = &mut state(py)?.dispatcher(py)?.0.optimizer_steps;
            *steps += 1;
            *steps
        };
        self.last_step.store(steps, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for OptimizerWrites {
    fn drop(&mut self) {
        let Ok(mut known) = LAST_STEPS.lock() else { return };
        for address in &self.addresses {
            if known.get(address).is_some_and(|last_step| Arc::ptr_eq(last_step, &self.last_step)) {
                known.remove(address);
            }
        }
    }
}

/// Whether an optimizer that has `parameter` has stepped since step number `steps` of all.
pub(crate) fn written_since(parameter: &Bound<'_, PyAny>, steps: u64) -> bool {
    let Ok(known) = LAST_STEPS.lock() else { return false };
    known.get(&address(parameter)).is_some_and(|last_step| last_step.load(Ordering::Relaxed) > steps)
}

fn address(parameter: &Bound<'_, PyAny>) -> usize {
    parameter.as_ptr() as usize
}
