//! The ports of a call, and the number of each in the call's address table.

/// A tensor of a call, or a part of it, that a program reads or writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Port {
    /// Nothing: a null pointer.
    #[default]
    None,
    /// The chain's input.
    Input,
    /// The chain's output.
    Output,
    /// Tensors that forward saves for backward.
    Saved,
    /// Gradient of the output.
    GradOutput,
    /// Gradient of the input.
    GradInput,
    /// A device float, or null; if it is 1, the quantisation of weights does nothing.
    SkipWeights,
    /// cuBLAS's workspace; the lane's.
    Workspace,
    /// Counters that are zero between launches; the lane's.
    Counters,
    /// Private memory of the direction; the lane's.
    Scratch,
    /// An extra input, in chain order.
    Extra(u16),
    /// An extra output.
    ExtraOutput(u16),
    /// A parameter, in chain order.
    Param(u16),
    /// Gradient of an extra output.
    GradExtraOutput(u16),
    /// Gradient of an extra input.
    GradExtra(u16),
    /// Gradient of a parameter.
    GradParam(u16),
    /// A port of a linear op, by the op's number.
    Linear(u16, LinearPort),
    /// A part of a value in FP8 other than its row layout, which is at the value's own port.
    Beside(Outer, Beside),
    /// A private buffer of the program.
    Buffer(u16),
}

/// A value that a call passes or receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Outer {
    /// The chain's input.
    Input,
    /// The chain's output.
    Output,
    /// Gradient of the output.
    GradOutput,
    /// Gradient of the input.
    GradInput,
}

impl Outer {
    /// The value's port; in FP8, of its row layout.
    #[must_use]
    pub const fn port(self) -> Port {
        match self {
            Self::Input => Port::Input,
            Self::Output => Port::Output,
            Self::GradOutput => Port::GradOutput,
            Self::GradInput => Port::GradInput,
        }
    }
}

/// Parts of a value in FP8 other than its row layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Beside {
    /// Scales of the row layout.
    RowScale,
    /// The column layout.
    Col,
    /// Its scales; a scale that both layouts share is with the row layout.
    ColScale,
}

/// The ports of a linear op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum LinearPort {
    /// Row layout of the quantised weight.
    Row,
    /// Its scales.
    RowScale,
    /// Column layout of the quantised weight.
    Col,
    /// Its scales.
    ColScale,
    /// The weight in high precision, if this call quantises it; null if the kept FP8 weight is used.
    Fresh,
    /// Scale of the input under delayed scaling.
    InputScale,
    /// Maximum of the input, to raise.
    InputAmax,
    /// Scale of the weight.
    WeightScale,
    /// Maximum of the weight.
    WeightAmax,
    /// Scale of the output's gradient.
    GradScale,
    /// Maximum of it.
    GradAmax,
    /// Scale of an output in FP8.
    OutputScale,
    /// Maximum of it.
    OutputAmax,
    /// Scale of a gradient of the input in FP8.
    GradInputScale,
    /// Maximum of it.
    GradInputAmax,
    /// Operands of the delayed weight gradient: [`deferred_bytes`](crate::program::SizedProgram::deferred_bytes).
    Deferred,
}

impl Port {
    /// Operands of a linear op's delayed weight gradient.
    pub(crate) const fn deferred(linear: u16) -> Self {
        Self::Linear(linear, LinearPort::Deferred)
    }
}

const LINEAR_PORTS: usize = LinearPort::Deferred as usize + 1;
/// Ports that every chain has.
const SINGLE: usize = FIRST_BESIDE + (Outer::GradInput as usize + 1) * BESIDES;
const FIRST_BESIDE: usize = 10;
const BESIDES: usize = Beside::ColScale as usize + 1;

/// The numbers of a chain's ports of each kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortCounts {
    pub(crate) extras: usize,
    pub(crate) extra_outputs: usize,
    pub(crate) params: usize,
    pub(crate) linears: usize,
}

/// The number of each port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortNumbers(PortCounts);

impl PortNumbers {
    pub(crate) const fn new(counts: PortCounts) -> Self {
        Self(counts)
    }

    /// Number of ports that a call passes; buffers follow.
    pub(crate) const fn len(&self) -> usize {
        let PortCounts { extras, extra_outputs, params, linears } = self.0;
        SINGLE + 2 * (extras + extra_outputs + params) + LINEAR_PORTS * linears
    }

    /// Linear ops.
    pub(crate) const fn linears(&self) -> usize {
        self.0.linears
    }

    /// The first number of a linear op's ports, which are adjacent; none if the chain has no such op.
    #[inline]
    pub(crate) const fn linear(&self, index: usize) -> Option<usize> {
        let PortCounts { extras, extra_outputs, params, linears } = self.0;
        if index < linears { Some(SINGLE + 2 * (extras + extra_outputs + params) + LINEAR_PORTS * index) } else { None }
    }

    /// The number of `port`; 0 for a port that the chain does not have.
    #[inline]
    pub(crate) fn of(&self, port: Port) -> usize {
        let PortCounts { extras, extra_outputs, params, .. } = self.0;
        let within = |before: usize, index: u16, count: usize| {
            debug_assert!(usize::from(index) < count, "{port:?} of {count}");
            if usize::from(index) < count { SINGLE + before + usize::from(index) } else { 0 }
        };
        let tensors = extras + extra_outputs + params;
        match port {
            Port::Input => 1,
            Port::Output => 2,
            Port::Saved => 3,
            Port::GradOutput => 4,
            Port::GradInput => 5,
            Port::SkipWeights => 6,
            Port::Workspace => 7,
            Port::Counters => 8,
            Port::Scratch => 9,
            Port::Beside(outer, part) => FIRST_BESIDE + BESIDES * outer as usize + part as usize,
            Port::Extra(index) => within(0, index, extras),
            Port::ExtraOutput(index) => within(extras, index, extra_outputs),
            Port::Param(index) => within(extras + extra_outputs, index, params),
            Port::GradExtra(index) => within(tensors, index, extras),
            Port::GradExtraOutput(index) => within(tensors + extras, index, extra_outputs),
            Port::GradParam(index) => within(tensors + extras + extra_outputs, index, params),
            Port::Linear(index, part) => self.linear(usize::from(index)).map_or(0, |first| first + part as usize),
            Port::None => 0,
            Port::Buffer(index) => self.len() + usize::from(index),
        }
    }
}

/// Number of an address, and bytes from there.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cell {
    pub(crate) number: u32,
    pub(crate) offset: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_has_a_number_of_its_own() {
        let numbers = PortNumbers::new(PortCounts { extras: 2, extra_outputs: 1, params: 3, linears: 2 });
        let many = |count: u16, port: fn(u16) -> Port| (0..count).map(port).collect::<Vec<_>>();
        let mut ports = vec![Port::None, Port::Input, Port::Output, Port::Saved, Port::GradOutput, Port::GradInput];
        ports.extend([Port::SkipWeights, Port::Workspace, Port::Counters, Port::Scratch]);
        for outer in [Outer::Input, Outer::Output, Outer::GradOutput, Outer::GradInput] {
            ports.extend([Beside::RowScale, Beside::Col, Beside::ColScale].map(|part| Port::Beside(outer, part)));
        }
        ports.extend(many(2, Port::Extra).into_iter().chain(many(1, Port::ExtraOutput)).chain(many(3, Port::Param)));
        ports.extend(many(2, Port::GradExtra).into_iter().chain(many(1, Port::GradExtraOutput)));
        ports.extend(many(3, Port::GradParam));
        for part in [LinearPort::Row, LinearPort::Fresh, LinearPort::GradAmax, LinearPort::Deferred] {
            ports.extend([Port::Linear(0, part), Port::Linear(1, part)]);
        }
        ports.extend([Port::Buffer(0), Port::Buffer(1)]);
        let mut found: Vec<usize> = ports.iter().map(|&port| numbers.of(port)).collect();
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), ports.len());
        assert_eq!(numbers.of(Port::Linear(1, LinearPort::Deferred)) + 1, numbers.len());
        assert_eq!(numbers.of(Port::Buffer(0)), numbers.len());
    }
}
