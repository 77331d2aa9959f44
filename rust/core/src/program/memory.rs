//! Where the values of a program lie: places that are fixed when it is compiled, addresses that a call brings.

use crate::dispatch::aligned;
use crate::kernel::DevPtr;

/// Something that a step reads or writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Place {
    /// Nothing: a null pointer.
    #[default]
    None,
    /// The chain's input.
    Input,
    /// An extra input, in chain order.
    Extra(u16),
    /// The chain's output.
    Output,
    /// An extra output.
    ExtraOutput(u16),
    /// A parameter, in chain order.
    Param(u16),
    /// A private buffer of the call.
    Scratch(u16),
    /// A buffer that forward leaves to backward.
    Saved(u16),
    /// Gradient of the output.
    GradOutput,
    /// Gradient of an extra output.
    GradExtraOutput(u16),
    /// Gradient of the input.
    GradInput,
    /// Gradient of an extra input.
    GradExtra(u16),
    /// Gradient of a parameter.
    GradParam(u16),
    /// Quantised or plain gradient that waits for `backward_dw`, per linear layer.
    Deferred(u16),
}

/// A place and the bytes from its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) place: Place,
    pub(crate) offset: usize,
}

impl At {
    pub(crate) const NONE: Self = Self::of(Place::None);

    pub(crate) const fn of(place: Place) -> Self {
        Self { place, offset: 0 }
    }

    pub(crate) const fn plus(self, bytes: usize) -> Self {
        Self { place: self.place, offset: self.offset + bytes }
    }

    pub(crate) fn is_some(self) -> bool {
        self.place != Place::None
    }
}

/// Private buffers of one direction: those whose lives do not overlap share memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    buffers: Vec<Buffer>,
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    bytes: usize,
    first: usize,
    last: usize,
}

impl Scratch {
    /// A buffer that lives from `step` on.
    pub(crate) fn allocate(&mut self, bytes: usize, step: usize) -> At {
        self.buffers.push(Buffer { bytes: aligned(bytes), first: step, last: step });
        At::of(Place::Scratch((self.buffers.len() - 1) as u16))
    }

    /// `step` reads or writes the place.
    pub(crate) fn touch(&mut self, at: At, step: usize) {
        if let Place::Scratch(index) = at.place {
            let buffer = &mut self.buffers[usize::from(index)];
            buffer.last = buffer.last.max(step);
            buffer.first = buffer.first.min(step);
        }
    }

    /// Offsets of the buffers, and the bytes of all: each goes to the lowest gap among those that live with it.
    pub(crate) fn layout(&self) -> (Vec<usize>, usize) {
        let mut order: Vec<usize> = (0..self.buffers.len()).collect();
        order.sort_by_key(|&index| std::cmp::Reverse(self.buffers[index].bytes));
        let mut offsets = vec![0; self.buffers.len()];
        let mut placed: Vec<usize> = Vec::new();
        let mut total = 0;
        for index in order {
            let buffer = self.buffers[index];
            let mut taken: Vec<(usize, usize)> = placed
                .iter()
                .filter(|&&other| {
                    let other = &self.buffers[other];
                    other.first <= buffer.last && buffer.first <= other.last
                })
                .map(|&other| (offsets[other], offsets[other] + self.buffers[other].bytes))
                .collect();
            taken.sort_unstable();
            let mut offset = 0;
            for (start, end) in taken {
                if offset + buffer.bytes <= start {
                    break;
                }
                offset = offset.max(end);
            }
            offsets[index] = offset;
            total = total.max(offset + buffer.bytes);
            placed.push(index);
        }
        (offsets, total)
    }
}

/// Buffers that forward leaves to backward, one behind the other in one allocation.
#[derive(Debug, Default)]
pub(crate) struct Saved {
    pub(crate) offsets: Vec<usize>,
    pub(crate) bytes: usize,
}

impl Saved {
    pub(crate) fn allocate(&mut self, bytes: usize) -> At {
        self.offsets.push(self.bytes);
        self.bytes += aligned(bytes);
        At::of(Place::Saved((self.offsets.len() - 1) as u16))
    }
}

/// Addresses of one call; slices that the direction does not use are empty.
#[derive(Clone, Copy, Debug)]
pub struct Bindings<'a> {
    /// The chain's input.
    pub input: DevPtr<'a>,
    /// Extra inputs.
    pub extras: &'a [DevPtr<'a>],
    /// The chain's output.
    pub output: DevPtr<'a>,
    /// Extra outputs.
    pub extra_outputs: &'a [DevPtr<'a>],
    /// Parameters in chain order.
    pub params: &'a [DevPtr<'a>],
    /// What forward leaves to backward.
    pub saved: DevPtr<'a>,
    /// Gradient of the output.
    pub grad_output: DevPtr<'a>,
    /// Gradients of the extra outputs.
    pub grad_extra_outputs: &'a [DevPtr<'a>],
    /// Gradient of the input.
    pub grad_input: DevPtr<'a>,
    /// Gradients of the extra inputs.
    pub grad_extras: &'a [DevPtr<'a>],
    /// Gradients of the parameters.
    pub grad_params: &'a [DevPtr<'a>],
    /// Gradients that wait for `backward_dw`, per linear layer.
    pub deferred: &'a [DevPtr<'a>],
}

impl Bindings<'_> {
    /// No address at all.
    pub const NONE: Self = Self {
        input: DevPtr::null(),
        extras: &[],
        output: DevPtr::null(),
        extra_outputs: &[],
        params: &[],
        saved: DevPtr::null(),
        grad_output: DevPtr::null(),
        grad_extra_outputs: &[],
        grad_input: DevPtr::null(),
        grad_extras: &[],
        grad_params: &[],
        deferred: &[],
    };
}

/// Addresses of a call with the offsets of its program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resolver<'a> {
    pub(crate) bindings: &'a Bindings<'a>,
    pub(crate) scratch: DevPtr<'a>,
    pub(crate) scratch_offsets: &'a [usize],
    pub(crate) saved_offsets: &'a [usize],
}

impl<'a> Resolver<'a> {
    #[inline]
    pub(crate) fn get(&self, at: At) -> DevPtr<'a> {
        let b = self.bindings;
        let pick = |list: &[DevPtr<'a>], index: u16| list.get(usize::from(index)).copied().unwrap_or(DevPtr::null());
        let base = match at.place {
            Place::None => return DevPtr::null(),
            Place::Input => b.input,
            Place::Extra(index) => pick(b.extras, index),
            Place::Output => b.output,
            Place::ExtraOutput(index) => pick(b.extra_outputs, index),
            Place::Param(index) => pick(b.params, index),
            Place::Scratch(index) => self.scratch.offset(self.scratch_offsets[usize::from(index)]),
            Place::Saved(index) => b.saved.offset(self.saved_offsets[usize::from(index)]),
            Place::GradOutput => b.grad_output,
            Place::GradExtraOutput(index) => pick(b.grad_extra_outputs, index),
            Place::GradInput => b.grad_input,
            Place::GradExtra(index) => pick(b.grad_extras, index),
            Place::GradParam(index) => pick(b.grad_params, index),
            Place::Deferred(index) => pick(b.deferred, index),
        };
        base.offset(at.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_share_memory_only_when_their_lives_are_apart() {
        let mut scratch = Scratch::default();
        let a = scratch.allocate(1000, 0);
        scratch.touch(a, 1);
        let b = scratch.allocate(500, 1);
        scratch.touch(b, 2);
        let c = scratch.allocate(700, 2);
        scratch.touch(c, 3);
        let (offsets, total) = scratch.layout();
        assert_eq!(offsets, [0, 1024, 0]);
        assert_eq!(total, 1024 + 512);
    }
}
