//! The arguments of a call: addresses by port, and plans of weight gradients that go into `main_grad`.

use crate::base::pointer::{AddressTable, Addresses, DevPtr};
use crate::program::port::{Cell, LinearPort, Port, PortNumbers};
use crate::program::weight_grad::WeightGradPlan;
use crate::quant::value::{LinearSlots, Quantized, WeightBuffer};
use crate::runtime::lane::Workspace;

/// The memory of [`Bindings`], kept between calls so that these allocate nothing.
#[derive(Debug, Default)]
pub struct CallTable {
    addresses: AddressTable,
    weight_grads: Vec<Option<WeightGradPlan>>,
    /// For each such result, its type and whether it is added to, as numbers.
    variants: Vec<u32>,
}

impl CallTable {
    pub(crate) fn fill<'t, 'a>(&'t mut self, ports: &'t PortNumbers) -> Bindings<'t, 'a> {
        self.weight_grads.clear();
        self.weight_grads.resize(ports.linears(), None);
        self.variants.clear();
        self.variants.resize(ports.linears(), 0);
        Bindings {
            ports,
            addresses: self.addresses.fill(ports.len()),
            weight_grads: &mut self.weight_grads,
            variants: &mut self.variants,
        }
    }
}

/// The arguments of one call; ports that it does not set are null.
#[derive(Debug)]
pub struct Bindings<'t, 'a> {
    ports: &'t PortNumbers,
    addresses: Addresses<'t, 'a>,
    weight_grads: &'t mut [Option<WeightGradPlan>],
    variants: &'t mut [u32],
}

impl<'a> Bindings<'_, 'a> {
    /// The address of `port`.
    #[inline]
    pub fn set(&mut self, port: Port, address: DevPtr<'a>) {
        self.addresses.set(self.ports.of(port), address);
    }

    /// The memory of a linear op's quantised weight.
    pub fn set_weight(&mut self, linear: usize, weight: &WeightBuffer<'a>) {
        self.set_layouts(linear, weight.row(), weight.col());
    }

    /// The same by layouts; layouts that the program does not read may be missing.
    pub fn set_layouts(&mut self, linear: usize, row: Quantized<'a>, col: Quantized<'a>) {
        let parts = [
            (LinearPort::Row, row.data),
            (LinearPort::RowScale, row.scale),
            (LinearPort::Col, col.data),
            (LinearPort::ColScale, col.scale),
        ];
        self.set_linear(linear, parts);
    }

    /// Ports of a linear op.
    #[inline]
    fn set_linear<const N: usize>(&mut self, linear: usize, parts: [(LinearPort, DevPtr<'a>); N]) {
        let Some(first) = self.ports.linear(linear) else { return };
        for (part, address) in parts {
            self.addresses.set(first + part as usize, address);
        }
    }

    /// The weight in high precision that this call quantises.
    pub fn set_fresh_weight(&mut self, linear: usize, weight: DevPtr<'a>) {
        self.set_linear(linear, [(LinearPort::Fresh, weight)]);
    }

    /// A linear op's slots of delayed scaling.
    pub fn set_slots(&mut self, linear: usize, slots: &LinearSlots<'a>) {
        let parts = [
            (LinearPort::InputScale, slots.input.scale),
            (LinearPort::InputAmax, slots.input.amax),
            (LinearPort::WeightScale, slots.weight.scale),
            (LinearPort::WeightAmax, slots.weight.amax),
            (LinearPort::GradScale, slots.grad.scale),
            (LinearPort::GradAmax, slots.grad.amax),
            (LinearPort::OutputScale, slots.output.scale),
            (LinearPort::OutputAmax, slots.output.amax),
            (LinearPort::GradInputScale, slots.grad_input.scale),
            (LinearPort::GradInputAmax, slots.grad_input.amax),
        ];
        self.set_linear(linear, parts);
    }

    /// The memory of a linear op's delayed weight gradient.
    pub fn set_deferred(&mut self, linear: usize, kept: DevPtr<'a>) {
        self.set_linear(linear, [(LinearPort::Deferred, kept)]);
    }

    /// A linear op's weight gradient goes through this plan, from
    /// [`Program::weight_grad_plan`](crate::program::Program::weight_grad_plan).
    pub fn set_weight_grad(&mut self, linear: usize, plan: WeightGradPlan) {
        let (dtype, accumulate) = plan.kind();
        self.variants[linear] = 1 + 2 * dtype as u32 + u32::from(accumulate);
        self.weight_grads[linear] = Some(plan);
    }

    pub(crate) fn set_workspace(&mut self, workspace: &Workspace<'a>) {
        self.set(Port::Workspace, workspace.gemm);
        self.set(Port::Counters, workspace.counters);
        self.set(Port::Scratch, workspace.scratch);
    }

    /// Sets buffer number `number`, `offset` bytes from the address `base`.
    #[inline]
    pub(crate) fn set_buffer(&mut self, number: u32, base: u32, offset: usize) {
        let address = self.addresses.get(base as usize).offset(offset);
        self.addresses.set(number as usize, address);
    }

    /// Makes room for `buffers` buffers.
    pub(crate) fn grow(&mut self, buffers: usize) {
        self.addresses.grow(self.ports.len() + buffers);
    }

    #[inline]
    pub(crate) fn at(&self, cell: Cell) -> DevPtr<'a> {
        self.addresses.get(cell.number as usize).offset(cell.offset as usize)
    }

    pub(crate) fn weight_grad(&self, linear: usize) -> Option<&WeightGradPlan> {
        self.weight_grads.get(linear)?.as_ref()
    }

    /// Everything that the launches of a call depend on beyond its program and stream: the addresses, and the kinds of
    /// its weight gradients.
    pub(crate) fn numbers(&self) -> (&[u64], &[u32]) {
        (self.addresses.numbers(self.ports.len()), self.variants)
    }
}
