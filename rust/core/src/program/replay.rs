//! Decides when a flow of a program runs as one CUDA graph: when all addresses of a call have been seen before.
//!
//! torch's allocator returns the same memory step after step, so that a training loop repeats its addresses. The
//! launches of a call depend only on its addresses and its rows, so a graph of an earlier call with the same addresses
//! and rows does the same work. The second call with equal addresses makes a graph, and later calls launch it. This
//! state belongs to one row count; each row count has its own graphs.
//!
//! A graph pays for every flow that launches anything. By the stage clock of `te_fast.profile` on an H200, with
//! `TE_FAST_GRAPHS=0` and without: `cuLaunchKernelEx` takes the host 4.7 us for a GEMM with its cluster, and 3.9 us for a
//! cast; a graph takes 2.7 us for the GEMM alone, and 2.8 us for both.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, TryLockError};

use crate::base::error::{Error, Result};
use crate::cuda::device::CudaQueue;
use crate::cuda::graph::Graph;
use crate::launch::target::{Backend, Target};
use crate::launch::trace::{Counters, Recording};
use crate::program::bindings::Bindings;

/// Number of kept graphs of one flow and row count, and of kept address lists that were seen once.
const KEPT: usize = 4;
/// After this many graphs, more are made only if each was launched `PAYS` times on average.
const TRIALS: u32 = 8;
const PAYS: u32 = 8;
/// Graphs of the whole process, since each takes some of the driver's memory. Beyond this number, a new graph replaces
/// an old one.
const ALIVE: usize = 2048;

static GRAPHS: AtomicUsize = AtomicUsize::new(0);

/// The state of one flow's calls.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Calls that were seen once, the oldest first.
    seen: Vec<Seen>,
    graphs: Vec<Entry>,
    captures: u32,
    launches: u32,
}

/// The properties that a call's launches depend on.
#[derive(Debug)]
struct Seen {
    stream: u64,
    addresses: Vec<u64>,
    variants: Vec<u32>,
}

#[derive(Debug)]
struct Entry {
    seen: Seen,
    graph: Graph,
    counters: Counters,
}

impl Seen {
    fn new(stream: u64, call: &Bindings<'_, '_>) -> Self {
        let (addresses, variants) = call.numbers();
        Self { stream, addresses: addresses.to_vec(), variants: variants.to_vec() }
    }

    fn is(&self, stream: u64, call: &Bindings<'_, '_>) -> bool {
        let (addresses, variants) = call.numbers();
        self.stream == stream && self.addresses == addresses && self.variants == variants
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        GRAPHS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Replay {
    /// Makes the launches of `run`, as a graph if that pays.
    pub(crate) fn run(
        &self,
        target: &mut Target<'_>,
        call: &mut Bindings<'_, '_>,
        run: impl Fn(&mut Target<'_>, &mut Bindings<'_, '_>) -> Result<()>,
    ) -> Result<()> {
        let Backend::Cuda(queue) = &target.backend else { return run(target, call) };
        if target.trace.recording() != Recording::Off || queue.is_capturing()? {
            return run(target, call);
        }
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return run(target, call),
        };
        let (state, stream) = (&mut *state, queue.stream);
        if let Some(index) = state.graphs.iter().rposition(|entry| entry.seen.is(stream.0, call)) {
            state.launches = state.launches.saturating_add(1);
            let entry = &state.graphs[index];
            if entry.graph.launch(queue)? {
                target.trace.counters.add(&entry.counters);
                return Ok(());
            }
            state.graphs.remove(index);
        }
        let Some(index) = state.seen.iter().position(|seen| seen.is(stream.0, call)) else {
            state.note(stream.0, call);
            return run(target, call);
        };
        let seen = state.seen.remove(index);
        if !state.has_room() {
            return run(target, call);
        }
        state.captures += 1;
        let before = target.trace.counters;
        let Ok(graph) = capture(target, |target| run(target, call)) else {
            // Launches that cannot be captured run as before, and then report their own errors.
            target.trace.counters = before;
            return run(target, call);
        };
        let counters = target.trace.counters.since(&before);
        let Backend::Cuda(queue) = &target.backend else { return run(target, call) };
        if !graph.launch(queue)? {
            return run(target, call);
        }
        GRAPHS.fetch_add(1, Ordering::Relaxed);
        state.graphs.push(Entry { seen, graph, counters });
        Ok(())
    }
}

impl State {
    /// A call that was not seen before.
    fn note(&mut self, stream: u64, call: &Bindings<'_, '_>) {
        if self.captures < TRIALS || self.launches >= PAYS * self.captures {
            if self.seen.len() >= KEPT {
                self.seen.remove(0);
            }
            self.seen.push(Seen::new(stream, call));
        }
    }

    /// Makes room for one more graph; fails if the process has the maximum and none of its graphs belongs to this flow.
    fn has_room(&mut self) -> bool {
        let full = GRAPHS.load(Ordering::Relaxed) >= ALIVE;
        if !self.graphs.is_empty() && (full || self.graphs.len() >= KEPT) {
            self.graphs.remove(0);
            return true;
        }
        !full
    }
}

fn capture(target: &mut Target<'_>, run: impl FnOnce(&mut Target<'_>) -> Result<()>) -> Result<Graph> {
    let Target { backend: Backend::Cuda(queue), trace } = target else {
        return Err(Error::state("graph", "the host backend has none"));
    };
    Graph::capture(queue, |queue| {
        let CudaQueue { device, stream, zeroed } = queue;
        let queue = CudaQueue { device, stream: *stream, zeroed: zeroed.as_deref_mut() };
        run(&mut Target { backend: Backend::Cuda(queue), trace })
    })
}
