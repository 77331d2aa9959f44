//! Binds the tensors of an operator's call to the ports of its program.

use smallvec::SmallVec;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::program::{Bindings, Port};
use te_fast_core::quant::value::{Quantized, WeightBuffer};

use crate::graphs::slots::CallSlots;

/// The tensors that one call reads and writes.
#[derive(Default)]
pub(super) struct Launch<'a> {
    ports: SmallVec<[(Port, DevPtr<'a>); 12]>,
    /// The quantised weight of each linear op in FP8.
    pub(super) weights: SmallVec<[WeightBuffer<'a>; 2]>,
    /// Row and column layout of a linear op's weight that is a quantised parameter.
    pub(super) given: SmallVec<[(usize, [Quantized<'a>; 2]); 2]>,
    /// The slots of each linear op under delayed scaling.
    pub(super) slots: SmallVec<[CallSlots<'a>; 2]>,
}

impl<'a> Launch<'a> {
    pub(super) fn set(&mut self, port: Port, address: DevPtr<'a>) {
        self.ports.push((port, address));
    }

    pub(super) fn bind<'b>(&'b self, call: &mut Bindings<'_, 'b>)
    where
        'a: 'b,
    {
        for &(port, address) in &self.ports {
            call.set(port, address);
        }
        for (linear, weight) in self.weights.iter().enumerate() {
            call.set_weight(linear, weight);
        }
        for &(linear, [row, col]) in &self.given {
            call.set_layouts(linear, row, col);
        }
        for (linear, slots) in self.slots.iter().enumerate() {
            call.set_slots(linear, &slots.addresses());
        }
    }
}
