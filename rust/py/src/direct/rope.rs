//! The rotation of queries and keys: `te_fast.attention.rope` calls it with views of their product.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::rope::{Turn, rotate as rotate_heads};

use crate::direct::call::DirectCall;
use crate::error::IntoPython;
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

/// One tensor of heads: input, output, cosines and sines.
#[derive(FromPyObject)]
pub(crate) struct TurnArguments<'py> {
    #[pyo3(item(0))]
    input: Bound<'py, PyAny>,
    #[pyo3(item(1))]
    output: Bound<'py, PyAny>,
    #[pyo3(item(2))]
    cos: Option<Bound<'py, PyAny>>,
    #[pyo3(item(3))]
    sin: Option<Bound<'py, PyAny>>,
}

impl TurnArguments<'_> {
    fn read(&self, state: &State) -> PyResult<Turn<'_>> {
        let view = |tensor, what| -> PyResult<TensorView<'_>> { view_of(&state.reader, tensor, what).python() };
        let waves = match (&self.cos, &self.sin) {
            (Some(cos), Some(sin)) => Some([view(cos, "cosines")?, view(sin, "sines")?]),
            _ => None,
        };
        Ok(Turn { input: view(&self.input, "heads")?, output: view(&self.output, "the output")?, waves })
    }
}

/// Rotates the heads of up to three tensors in one launch.
#[pyfunction]
#[pyo3(signature = (turns, interleaved, transposed, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts lists by value")]
pub(crate) fn rotate(
    py: Python<'_>,
    turns: Vec<TurnArguments<'_>>,
    interleaved: bool,
    transposed: bool,
) -> PyResult<()> {
    let state = state(py)?;
    let Some(first) = turns.first() else { return Ok(()) };
    let device = first.read(state)?.input.device();
    let call = DirectCall::new(state, py, "rotate", device)?;
    let mut read = [None; 3];
    if turns.len() > read.len() {
        return Err(Error::value("rotate", format_args!("at most 3 tensors, got {}", turns.len()))).python();
    }
    for (slot, turn) in read.iter_mut().zip(&turns) {
        let turn = turn.read(state)?;
        for (view, what) in [(&turn.input, "heads"), (&turn.output, "the output")] {
            call.same_device(view, what)?;
        }
        for wave in turn.waves.iter().flatten() {
            call.same_device(wave, "cosines and sines")?;
        }
        *slot = Some(turn);
    }
    call.run(0, |target, _| rotate_heads(target, &read, interleaved, transposed))
}
