//! Counters that are zero, each for one launch.
//!
//! Some kernels of cuBLASLt take the numbers of their tiles from a counter of 4 bytes in the workspace, which cuBLASLt
//! zeroes before each launch. With the waits around it, that takes the GPU about 4 us (H100, training steps of
//! `benches/transformer_layer.py`). A learned launch takes a counter of its own instead, and one launch zeroes many.
//!
//! A graph of te_fast's own has its counters for itself, since it runs with the same ones each time. It may run once after
//! each launch that zeroes the counters of all graphs: in a training loop, that is one launch a step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::cuda::device::{Stream, fill_with_zero};

/// Bytes of a counter. A launch that needs more zeros has to make them itself.
pub(crate) const COUNTER: usize = 16;
/// Bytes of counters that are zeroed together: a stream's, and its graphs'.
const ZONE: usize = 4 << 10;
const GRAPHS_ZONE: usize = 64 << 10;

/// Counters of one stream, whose launches run one after another.
#[derive(Debug)]
pub struct ZeroedCounters {
    address: u64,
    /// Bytes that are used.
    used: usize,
    graphs: Arc<GraphsZone>,
    /// Counters of the graph under capture. Inside of a user's graph none is captured.
    taken: Option<Vec<u32>>,
}

/// Counters of a stream's graphs.
#[derive(Debug)]
struct GraphsZone {
    address: u64,
    /// Numbers of counters that no graph has. The first counter is for graphs that find none: they zero it themselves.
    free: Mutex<Vec<u32>>,
    /// How often all of them have been zeroed.
    epoch: AtomicU64,
}

/// Counters of a graph, given back with the graph.
#[derive(Debug)]
pub(crate) struct GraphCounters {
    zone: Arc<GraphsZone>,
    taken: Vec<u32>,
    /// The epoch of the last launch.
    epoch: AtomicU64,
}

impl ZeroedCounters {
    /// Bytes of memory that a stream's counters need: these and its graphs'.
    pub const BYTES: usize = Self::BYTES_WITHOUT_GRAPHS + GRAPHS_ZONE;
    /// The same where te_fast makes no graphs: while a user's graph is captured.
    pub const BYTES_WITHOUT_GRAPHS: usize = ZONE;

    /// Counters in memory that is zero, or that an earlier launch of the stream zeroes.
    #[must_use]
    pub fn new(memory: DevPtr<'_>) -> Self {
        let address = memory.address() as u64;
        let free = (1..(GRAPHS_ZONE / COUNTER) as u32).rev().collect();
        let graphs = GraphsZone { address: address + ZONE as u64, free: Mutex::new(free), epoch: AtomicU64::new(0) };
        Self { address, used: 0, graphs: Arc::new(graphs), taken: None }
    }

    /// The address of the next counter. If all have been used, a launch on the stream zeroes them first.
    ///
    /// # Errors
    /// The driver's refusal of that launch.
    #[inline]
    pub(crate) fn take(&mut self, stream: Stream) -> Result<u64> {
        if let Some(taken) = &mut self.taken {
            return self.graphs.take(stream, taken);
        }
        if self.used >= ZONE {
            fill_with_zero(stream, self.address, ZONE)?;
            self.used = 0;
        }
        self.used += COUNTER;
        Ok(self.address + (self.used - COUNTER) as u64)
    }

    /// The next launches are captured for a graph of the stream.
    pub(crate) fn begin_graph(&mut self) {
        self.taken = Some(Vec::new());
    }

    /// The next launches run; returns the graph's counters.
    pub(crate) fn end_graph(&mut self) -> GraphCounters {
        let zone = Arc::clone(&self.graphs);
        // Graphs that are gone may have used the counters since they were zeroed.
        let epoch = AtomicU64::new(zone.epoch.load(Ordering::Relaxed));
        GraphCounters { zone, taken: self.taken.take().unwrap_or_default(), epoch }
    }

    /// Zeroes the counters of all graphs, if this graph has run since they were last zeroed. False for a graph whose counters
    /// were in other memory.
    ///
    /// # Errors
    /// The driver's refusal of the launch.
    #[inline]
    pub(crate) fn prepare(&self, graph: &GraphCounters, stream: Stream) -> Result<bool> {
        if !Arc::ptr_eq(&self.graphs, &graph.zone) {
            return Ok(false);
        }
        graph.begin(|| fill_with_zero(stream, self.graphs.address, GRAPHS_ZONE)).map(|()| true)
    }
}

impl GraphsZone {
    #[cold]
    fn take(&self, stream: Stream, taken: &mut Vec<u32>) -> Result<u64> {
        let Some(number) = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop() else {
            fill_with_zero(stream, self.address, COUNTER)?;
            return Ok(self.address);
        };
        taken.push(number);
        Ok(self.address + u64::from(number) * COUNTER as u64)
    }
}

impl GraphCounters {
    /// Before a launch: `zero` zeroes the counters of all graphs if this graph has run since they were last zeroed.
    #[inline]
    fn begin(&self, zero: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut epoch = self.zone.epoch.load(Ordering::Relaxed);
        if self.epoch.load(Ordering::Relaxed) == epoch {
            zero()?;
            epoch += 1;
            self.zone.epoch.store(epoch, Ordering::Relaxed);
        }
        self.epoch.store(epoch, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the graph has none.
    pub(crate) fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }
}

impl Drop for GraphCounters {
    fn drop(&mut self) {
        self.zone.free.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(memory: &mut [u64]) -> ZeroedCounters {
        ZeroedCounters::new(DevPtr::from_slice(memory))
    }

    #[test]
    fn counters_of_a_stream_are_all_different_while_no_launch_zeroes_them() -> Result<()> {
        let mut memory = vec![0_u64; ZeroedCounters::BYTES / 8];
        let mut counters = counters(&mut memory);
        let first = counters.address;
        let taken = (0..ZONE / COUNTER).map(|_| counters.take(Stream::DEFAULT)).collect::<Result<Vec<_>>>()?;
        let wanted: Vec<u64> = (0..ZONE / COUNTER).map(|number| first + (number * COUNTER) as u64).collect();
        assert_eq!(taken, wanted);
        Ok(())
    }

    #[test]
    fn graphs_have_counters_of_their_own_and_give_them_back() -> Result<()> {
        let mut memory = vec![0_u64; ZeroedCounters::BYTES / 8];
        let mut counters = counters(&mut memory);
        let (stream, end) = (Stream::DEFAULT, counters.address + ZeroedCounters::BYTES as u64);
        let before = counters.take(stream)?;
        counters.begin_graph();
        let one = [counters.take(stream)?, counters.take(stream)?];
        let first = counters.end_graph();
        counters.begin_graph();
        let two = counters.take(stream)?;
        let second = counters.end_graph();
        assert_eq!(counters.take(stream)?, before + COUNTER as u64);
        let beyond = counters.address + ZONE as u64;
        assert!([one[0], one[1], two].iter().all(|&at| at > beyond && at < end));
        assert!(one[0] != one[1] && !one.contains(&two));
        drop(first);
        counters.begin_graph();
        let again = counters.take(stream)?;
        assert!(one.contains(&again) && again != two);
        drop(second);
        Ok(())
    }

    /// Whether counters are zeroed before each of these launches.
    fn zeroed_before(launches: &[&GraphCounters]) -> Result<Vec<bool>> {
        let begun = launches.iter().map(|graph| {
            let mut zeroed = false;
            graph.begin(|| {
                zeroed = true;
                Ok(())
            })?;
            Ok(zeroed)
        });
        begun.collect()
    }

    #[test]
    fn counters_are_zeroed_once_a_round_of_all_graphs() -> Result<()> {
        let mut memory = vec![0_u64; ZeroedCounters::BYTES / 8];
        let mut counters = counters(&mut memory);
        let mut graph = || -> Result<GraphCounters> {
            counters.begin_graph();
            counters.take(Stream::DEFAULT)?;
            Ok(counters.end_graph())
        };
        let (one, two) = (graph()?, graph()?);
        // A new graph may have a counter that a former graph has used. Later launches zero it for both.
        assert_eq!(zeroed_before(&[&one, &two, &one, &two, &one, &one])?, [true, false, true, false, true, true]);
        drop(one);
        let three = graph()?;
        assert_eq!(zeroed_before(&[&three, &two])?, [true, false]);
        Ok(())
    }

    #[test]
    fn counters_that_could_not_be_zeroed_are_zeroed_by_the_next_launch() -> Result<()> {
        let mut memory = vec![0_u64; ZeroedCounters::BYTES / 8];
        let mut counters = counters(&mut memory);
        counters.begin_graph();
        counters.take(Stream::DEFAULT)?;
        let graph = counters.end_graph();
        assert!(graph.begin(|| Err(crate::base::error::Error::state("graph", "refused"))).is_err());
        assert_eq!(zeroed_before(&[&graph, &graph])?, [true, true]);
        Ok(())
    }

    #[test]
    fn a_graph_of_other_memory_does_not_run() -> Result<()> {
        let (mut memory, mut other) = (vec![0_u64; ZeroedCounters::BYTES / 8], vec![0_u64; ZeroedCounters::BYTES / 8]);
        let (mut counters, others) = (counters(&mut memory), counters(&mut other));
        counters.begin_graph();
        counters.take(Stream::DEFAULT)?;
        assert!(!others.prepare(&counters.end_graph(), Stream::DEFAULT)?);
        Ok(())
    }
}
