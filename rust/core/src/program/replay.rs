//! Decides when a direction of a program runs as one CUDA graph: when every address of a call was seen before.
//!
//! torch's allocator hands the same memory out step after step, so that a training loop repeats its addresses. The
//! launches of a call depend on its addresses alone, so that a graph of an earlier call with the same addresses is the
//! same work. Two calls with equal addresses make a graph; later ones launch it.

use std::sync::{Mutex, TryLockError};

use crate::error::Result;
use crate::graph::Graph;
use crate::kernel::{Backend, Target};
use crate::trace::{Counters, Recording};

/// Fewer launches than this are made one by one.
const WORTHWHILE: usize = 3;
/// Graphs, and address lists that were seen once, that are kept.
const KEPT: usize = 4;
/// After this many graphs, each must have been launched `PAYS` times on the average for more to be made.
const TRIALS: u32 = 8;
const PAYS: u32 = 8;

/// What is known of one direction's calls.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Address lists that were seen once, the oldest first.
    seen: Vec<Vec<u64>>,
    graphs: Vec<Entry>,
    captures: u32,
    launches: u32,
    current: Vec<u64>,
}

#[derive(Debug)]
struct Entry {
    addresses: Vec<u64>,
    graph: Graph,
    counters: Counters,
}

impl Replay {
    /// Makes the launches of `run`, as a graph if that pays; `addresses` lists everything that they depend on.
    pub(crate) fn run(
        &self,
        enabled: bool,
        steps: usize,
        target: &mut Target<'_>,
        addresses: impl FnOnce(&mut Vec<u64>),
        mut run: impl FnMut(&mut Target<'_>) -> Result<()>,
    ) -> Result<()> {
        let Backend::Cuda(queue) = &target.backend else { return run(target) };
        if !enabled || steps < WORTHWHILE || target.trace.recording() != Recording::Off || queue.is_capturing()? {
            return run(target);
        }
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return run(target),
        };
        let state = &mut *state;
        state.current.clear();
        addresses(&mut state.current);
        state.current.push(queue.stream.0);
        if let Some(index) = state.graphs.iter().rposition(|entry| entry.addresses == state.current) {
            state.launches = state.launches.saturating_add(1);
            let entry = &state.graphs[index];
            entry.graph.launch(queue.stream)?;
            target.trace.counters.add(&entry.counters);
            return Ok(());
        }
        let Some(index) = state.seen.iter().position(|seen| *seen == state.current) else {
            if state.captures < TRIALS || state.launches >= PAYS * state.captures {
                if state.seen.len() >= KEPT {
                    state.seen.remove(0);
                }
                state.seen.push(state.current.clone());
            }
            return run(target);
        };
        let addresses = state.seen.remove(index);
        state.captures += 1;
        let before = target.trace.counters;
        let Ok(graph) = capture(target, &mut run) else {
            // What cannot be captured runs as it did before; its own errors show then.
            target.trace.counters = before;
            return run(target);
        };
        let counters = target.trace.counters.since(&before);
        if let Backend::Cuda(queue) = &target.backend {
            graph.launch(queue.stream)?;
        }
        if state.graphs.len() >= KEPT {
            state.graphs.remove(0);
        }
        state.graphs.push(Entry { addresses, graph, counters });
        Ok(())
    }
}

fn capture(target: &mut Target<'_>, run: &mut impl FnMut(&mut Target<'_>) -> Result<()>) -> Result<Graph> {
    let Target { backend: Backend::Cuda(queue), trace } = target else {
        return Err(crate::error::Error::state("graph", "the host backend has none"));
    };
    Graph::capture(queue, |queue| {
        let queue = crate::driver::CudaQueue { device: &mut *queue.device, stream: queue.stream };
        run(&mut Target { backend: Backend::Cuda(queue), trace })
    })
}
