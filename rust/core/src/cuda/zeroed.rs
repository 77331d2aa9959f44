//! Counters that are zero, each for one launch.
//!
//! Some kernels of cuBLASLt take the numbers of their tiles from a counter of 4 bytes in the workspace, which cuBLASLt
//! zeroes before each launch. With the waits around it, that takes the GPU about 4 us (H100, training steps of
//! `benches/transformer_layer.py`). A learned launch takes a counter of its own instead, and one launch zeroes many.

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::cuda::device::{Stream, fill_with_zero};

/// Bytes of a counter. A launch that needs more zeros has to make them itself.
pub(crate) const COUNTER: usize = 16;
/// Bytes that are zeroed together.
const ZONE: usize = 4096;

/// Counters of one stream, whose launches run one after another.
///
/// Graphs of the stream's launches have a zone of their own. A graph zeroes it before its first counter, since the graph
/// of another flow, or the same graph, has used the zone before.
#[derive(Debug)]
pub struct ZeroedCounters {
    address: u64,
    /// Bytes of the stream's zone, and of the graphs', that are used.
    used: [usize; 2],
    /// Which of both is in use.
    zone: usize,
}

impl ZeroedCounters {
    /// Bytes of memory that they need.
    pub const BYTES: usize = 2 * ZONE;

    /// Counters in memory that is zero, or that an earlier launch of the stream zeroes.
    #[must_use]
    pub fn new(memory: DevPtr<'_>) -> Self {
        Self { address: memory.address() as u64, used: [0, ZONE], zone: 0 }
    }

    /// The address of the next counter. If all have been used, a launch on the stream zeroes them first.
    ///
    /// # Errors
    /// The driver's refusal of that launch.
    #[inline]
    pub(crate) fn take(&mut self, stream: Stream) -> Result<u64> {
        let (first, used) = (self.address + (self.zone * ZONE) as u64, &mut self.used[self.zone]);
        if *used >= ZONE {
            fill_with_zero(stream, first, ZONE)?;
            *used = 0;
        }
        let counter = first + *used as u64;
        *used += COUNTER;
        Ok(counter)
    }

    /// The next launches are captured for a graph of the stream.
    pub(crate) fn begin_graph(&mut self) {
        self.used[1] = ZONE;
        self.zone = 1;
    }

    /// The next launches run.
    pub(crate) fn end_graph(&mut self) {
        self.zone = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_a_stream_are_all_different_while_no_launch_zeroes_them() -> Result<()> {
        let mut memory = vec![0_u64; ZeroedCounters::BYTES / 8];
        let mut counters = ZeroedCounters::new(DevPtr::from_slice(&mut memory));
        let first = counters.address;
        let taken = (0..ZONE / COUNTER).map(|_| counters.take(Stream::DEFAULT)).collect::<Result<Vec<_>>>()?;
        let wanted: Vec<u64> = (0..ZONE / COUNTER).map(|number| first + (number * COUNTER) as u64).collect();
        assert_eq!(taken, wanted);
        Ok(())
    }

    #[test]
    fn a_graph_takes_nothing_from_the_stream() -> Result<()> {
        let mut memory = vec![0_u64; ZeroedCounters::BYTES / 8];
        let mut counters = ZeroedCounters::new(DevPtr::from_slice(&mut memory));
        let first = counters.take(Stream::DEFAULT)?;
        counters.begin_graph();
        assert!(counters.used[1] >= ZONE, "a graph zeroes its counters before the first");
        counters.end_graph();
        assert_eq!(counters.take(Stream::DEFAULT)?, first + COUNTER as u64);
        Ok(())
    }
}
