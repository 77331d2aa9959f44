//! Private buffers of a program. Compilation decides which buffers there are; the rows of a call decide their sizes and
//! places.

use crate::program::port::Port;
use crate::runtime::lane::aligned;

/// A port and an offset in bytes, which does not depend on rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) port: Port,
    pub(crate) offset: u32,
}

impl At {
    pub(crate) const NONE: Self = Self::of(Port::None);

    pub(crate) const fn of(port: Port) -> Self {
        Self { port, offset: 0 }
    }

    pub(crate) const fn plus(self, bytes: usize) -> Self {
        Self { port: self.port, offset: self.offset + bytes as u32 }
    }

    pub(crate) fn is_some(self) -> bool {
        self.port != Port::None
    }
}

/// The allocation that a buffer is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arena {
    /// Private memory of a flow, by the flow's number: buffers whose lives do not overlap share it.
    Scratch(u16),
    /// Tensors that forward saves for backward.
    Saved,
    /// Operands of a linear op's delayed weight gradient.
    Deferred(u16),
}

/// A buffer, and the first and last step of its flow that use it.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    arena: Arena,
    first: usize,
    last: usize,
}

/// The buffers of a program.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    list: Vec<Buffer>,
}

/// Places of a program's buffers in their arenas for one row count.
#[derive(Debug)]
pub(crate) struct Placement {
    pub(crate) offsets: Vec<usize>,
    /// Bytes of each flow's scratch.
    pub(crate) scratch: Vec<usize>,
    pub(crate) saved: usize,
    /// Bytes per linear op.
    pub(crate) deferred: Vec<usize>,
}

impl Buffers {
    pub(crate) fn add(&mut self, arena: Arena) -> At {
        self.list.push(Buffer { arena, first: usize::MAX, last: 0 });
        At::of(Port::Buffer((self.list.len() - 1) as u16))
    }

    /// Step `step` of the flow with this scratch reads or writes it.
    pub(crate) fn touch(&mut self, at: At, scratch: Arena, step: usize) {
        if let Port::Buffer(index) = at.port {
            let buffer = &mut self.list[usize::from(index)];
            debug_assert!(
                !matches!(buffer.arena, Arena::Scratch(_)) || buffer.arena == scratch,
                "a flow uses another one's scratch"
            );
            buffer.last = buffer.last.max(step);
            buffer.first = buffer.first.min(step);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// The arena of each.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = Arena> + '_ {
        self.list.iter().map(|buffer| buffer.arena)
    }

    /// Places buffers of `bytes` for `flows` flows and `linears` linear ops.
    pub(crate) fn place(&self, bytes: &[usize], flows: usize, linears: usize) -> Placement {
        let mut placement =
            Placement { offsets: vec![0; bytes.len()], scratch: vec![0; flows], saved: 0, deferred: vec![0; linears] };
        for (index, (buffer, &bytes)) in self.list.iter().zip(bytes).enumerate() {
            let end = match buffer.arena {
                Arena::Scratch(_) => continue,
                Arena::Saved => &mut placement.saved,
                Arena::Deferred(linear) => &mut placement.deferred[usize::from(linear)],
            };
            placement.offsets[index] = *end;
            *end += aligned(bytes);
        }
        self.share(bytes, &mut placement);
        placement
    }

    /// Places scratch buffers, the largest first, each in the lowest gap among the buffers that live at the same time.
    fn share(&self, bytes: &[usize], placement: &mut Placement) {
        let mut order = Vec::with_capacity(self.list.len());
        for (index, (buffer, &bytes)) in self.list.iter().zip(bytes).enumerate() {
            if let (Arena::Scratch(flow), true) = (buffer.arena, buffer.first <= buffer.last) {
                order.push((flow, aligned(bytes), index));
            }
        }
        order.sort_by_key(|&(flow, size, _)| (flow, std::cmp::Reverse(size)));
        let (mut placed, mut taken): (Vec<Placed>, Vec<(usize, usize)>) = (Vec::with_capacity(order.len()), Vec::new());
        let mut current = None;
        for (flow, size, index) in order {
            if current.replace(flow) != Some(flow) {
                placed.clear();
            }
            let Buffer { first, last, .. } = self.list[index];
            taken.clear();
            let beside = placed.iter().filter(|other| other.first <= last && first <= other.last);
            taken.extend(beside.map(|other| (other.start, other.end)));
            taken.sort_unstable();
            let mut start = 0;
            for &(from, to) in &taken {
                if start + size <= from {
                    break;
                }
                start = start.max(to);
            }
            let end = start + size;
            placed.push(Placed { first, last, start, end });
            placement.offsets[index] = start;
            let total = &mut placement.scratch[usize::from(flow)];
            *total = end.max(*total);
        }
    }
}

/// A placed buffer: first and last step, and its range of bytes.
#[derive(Clone, Copy, Debug)]
struct Placed {
    first: usize,
    last: usize,
    start: usize,
    end: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_share_memory_only_when_their_lives_are_apart() {
        let mut buffers = Buffers::default();
        let list = [(0, 1), (1, 2), (2, 3)].map(|(first, last)| {
            let at = buffers.add(Arena::Scratch(0));
            buffers.touch(at, Arena::Scratch(0), first);
            buffers.touch(at, Arena::Scratch(0), last);
            at
        });
        assert_eq!(list[2], At::of(Port::Buffer(2)));
        let placement = buffers.place(&[1000, 500, 700], 1, 0);
        assert_eq!(placement.offsets, [0, 1024, 0]);
        assert_eq!(placement.scratch, [1024 + 512]);
    }

    #[test]
    fn flows_share_nothing_with_each_other_nor_with_what_is_kept() {
        let mut buffers = Buffers::default();
        for arena in [Arena::Scratch(0), Arena::Scratch(1), Arena::Saved, Arena::Saved, Arena::Deferred(0)] {
            let at = buffers.add(arena);
            buffers.touch(at, arena, 0);
        }
        let placement = buffers.place(&[300, 10, 20, 30, 40], 2, 1);
        assert_eq!(placement.offsets, [0, 0, 0, 256, 0]);
        assert_eq!((placement.scratch, placement.saved, placement.deferred), (vec![512, 256], 512, vec![256]));
    }
}
