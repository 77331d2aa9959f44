//! Converts Python's description of chunks for the core.

use te_fast_core::program::{Pieces, Travel};

use crate::torch::reader::event;

/// Whether chunks arrive, the number of shares, and the handle of each chunk's event (0 on the host). At most one of
/// each kind.
pub(crate) type Chunks = Vec<(bool, usize, Vec<u64>)>;

/// The same for the core.
pub(crate) fn pieces(chunks: Chunks) -> Vec<Pieces> {
    let one = |(arriving, shares, events): (bool, usize, Vec<u64>)| {
        let travel = if arriving { Travel::Arriving } else { Travel::Leaving };
        Pieces::new(travel, shares, events.into_iter().map(event))
    };
    chunks.into_iter().map(one).collect()
}
