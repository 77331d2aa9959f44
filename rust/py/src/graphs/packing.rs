//! Where quantised weights lie that a graph passes from forward to backward.
//!
//! Each tensor costs a compiled call an allocation, checks, and a place among those that autograd keeps. So the layouts
//! that backward reads stand in front of forward's buffer for backward, and all others share one buffer, which ends with
//! forward.

use te_fast_core::base::pointer::DevPtr;
use te_fast_core::quant::value::{WeightBuffer, WeightLayout};

/// Kernels read each layout from a multiple of this many bytes on, as from a tensor of its own.
const ALIGNMENT: usize = 256;

/// The buffer of a layout, and where the layout begins there.
#[derive(Clone, Copy)]
enum Offset {
    Saved(usize),
    Once(usize),
}

/// Where all weights lie.
#[derive(Default)]
pub(super) struct Packing {
    /// Of each linear op, that of row and column layout.
    offsets: Vec<[Option<Offset>; 2]>,
    /// Bytes in front of forward's buffer for backward.
    pub(super) saved: usize,
    /// Bytes of the buffer that ends with forward.
    pub(super) once: usize,
}

impl Packing {
    /// Places weights by the bytes of their layouts, and by whether backward reads them: the column layout where there
    /// is one, else the row layout.
    pub(super) fn of(weights: &[(usize, usize)], reads: &[bool]) -> Self {
        let mut packing = Self::default();
        for (&(row, col), &is_read) in weights.iter().zip(reads) {
            let row = packing.place(row, is_read && col == 0);
            let col = packing.place(col, is_read);
            packing.offsets.push([row, col]);
        }
        packing
    }

    fn place(&mut self, bytes: usize, is_saved: bool) -> Option<Offset> {
        let end = if is_saved { &mut self.saved } else { &mut self.once };
        let start = *end;
        *end += bytes.next_multiple_of(ALIGNMENT);
        match (bytes, is_saved) {
            (0, _) => None,
            (_, true) => Some(Offset::Saved(start)),
            (_, false) => Some(Offset::Once(start)),
        }
    }

    /// The memory of a weight; null where a buffer is, as forward's own in backward.
    pub(super) fn buffer<'a>(
        &self,
        linear: usize,
        layout: WeightLayout,
        (saved, once): (DevPtr<'a>, DevPtr<'a>),
    ) -> WeightBuffer<'a> {
        let [row, col] = self.offsets[linear].map(|offset| match offset {
            Some(Offset::Saved(bytes)) => saved.offset(bytes),
            Some(Offset::Once(bytes)) => once.offset(bytes),
            None => DevPtr::null(),
        });
        WeightBuffer { row, col, layout }
    }
}
