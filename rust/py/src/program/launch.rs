//! The launches of a forward: addresses, memory, and the pauses of its transfers.

use pyo3::prelude::*;
use te_fast_core::launch::trace::{CLOCK, Stage};
use te_fast_core::program::{Bindings, FlowName, Outer, Port, Program, SizedProgram};
use te_fast_core::runtime::lane::{Memory, Place};

use crate::error::Failure;
use crate::program::forward::{Call, Output, Prepared, Results};
use crate::program::tensors::Tensors;
use crate::program::weight_memory::weight_buffer;

impl<'py> Call<'_, 'py> {
    pub(crate) fn launch(
        &self,
        tensors: &Tensors<'_>,
        (program, sized): (&Program, &SizedProgram),
        results: &Results<'py>,
        prepared: &[Prepared<'py>],
        place: Place,
        skip: Option<&Bound<'py, PyAny>>,
    ) -> Result<(), Failure> {
        let (py, state) = (self.x.py(), self.state);
        let (bytes, transfers) = (sized.forward_scratch(), &self.transfers);
        let external = transfers.external(place, bytes)?;
        let scratch = state.optional_bytes(py, place.device, external.bytes())?;
        let memory: Memory<'_> = external.memory(state.pointer(scratch.as_ref())?);
        let mut script = None;
        loop {
            let mut table = state.tables.take();
            let mut call = program.call(&mut table);
            call.set(Port::SkipWeights, state.pointer(skip)?);
            self.bind_tensors(&mut call, tensors, program, results)?;
            self.bind_weights(&mut call, tensors, prepared)?;
            CLOCK.mark(Stage::Allocate);
            let mut dispatcher = state.dispatcher(py)?;
            let pause = if transfers.is_empty() {
                sized.run_forward(&mut dispatcher.0.lane(place, bytes, memory)?, call)?;
                None
            } else {
                let flow = (sized, FlowName::Forward, place.device);
                let script = transfers.script(state, &mut dispatcher.0, flow, &mut script)?;
                let mut lane = dispatcher.0.lane(place, bytes, memory)?;
                if script.is_plain() {
                    sized.run_forward(&mut lane, call)?;
                    None
                } else {
                    sized.resume(script, &mut lane, call)?
                }
            };
            if pause.is_none() {
                // A recomputation raises no maximum.
                let first_runs = prepared.iter().filter(|weight| weight.replay.is_none());
                for slots in first_runs.filter_map(|weight| weight.slots.as_ref()) {
                    dispatcher.0.autocast.mark_ran(&slots.forward);
                }
            }
            drop(dispatcher);
            state.tables.give_back(table);
            let Some(pause) = pause else { return Ok(()) };
            transfers.act(pause, results.y.high())?;
        }
    }

    /// Weights and scales.
    fn bind_weights<'b>(
        &self,
        call: &mut Bindings<'_, 'b>,
        tensors: &'b Tensors<'_>,
        prepared: &'b [Prepared<'py>],
    ) -> Result<(), Failure> {
        for (linear, weight) in prepared.iter().enumerate() {
            if let Some(quantized) = &weight.quantized {
                call.set_weight(linear, &weight_buffer(quantized));
            }
            if let Some(given) = &weight.given {
                let [row, col] = given.layouts(self.state)?;
                call.set_layouts(linear, row, col);
            }
            if let Some(param) = weight.fresh.filter(|_| !weight.is_ready) {
                call.set_fresh_weight(linear, tensors.params[param].data());
            }
            call.set_slots(linear, &weight.slots());
        }
        Ok(())
    }

    /// Inputs, results and parameters.
    fn bind_tensors<'b>(
        &self,
        call: &mut Bindings<'_, 'b>,
        tensors: &'b Tensors<'_>,
        program: &Program,
        results: &'b Results<'py>,
    ) -> Result<(), Failure>
    where
        'py: 'b,
    {
        let (py, state) = (self.x.py(), self.state);
        match tensors.handed(state, py)? {
            Some(handed) => handed.bind((Outer::Input, call)),
            None => call.set(Port::Input, tensors.x.data()),
        }
        call.set(Port::Saved, state.pointer(results.saved.as_ref())?);
        match &results.y {
            Output::InFp8(made) => made.bind(state, (Outer::Output, call))?,
            Output::High(y) if program.output() == Port::Output => call.set(Port::Output, state.pointer(Some(y))?),
            Output::High(_) => {}
        }
        for (index, tensor) in results.extra_outputs.iter().enumerate() {
            call.set(Port::ExtraOutput(index as u16), state.pointer(Some(tensor))?);
        }
        for (index, view) in tensors.extras.iter().enumerate() {
            call.set(Port::Extra(index as u16), view.data());
        }
        for (index, view) in tensors.params.iter().enumerate() {
            call.set(Port::Param(index as u16), view.data());
        }
        Ok(())
    }
}
