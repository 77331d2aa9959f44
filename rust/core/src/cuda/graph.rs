//! CUDA graphs of launches that te_fast repeats on the same addresses: one call of the driver instead of dozens.
#![expect(unsafe_code, reason = "calls into the CUDA driver; every block names who guarantees its arguments")]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphNode, CUstreamCaptureMode, CUuserObject, CUuserObject_flags, CUuserObjectRetain_flags,
};

use crate::base::error::Result;
use crate::cuda::context::PrimaryContext;
use crate::cuda::device::{CudaQueue, Stream};
use crate::cuda::functions::{Functions, check, functions};
use crate::cuda::zeroed::GraphCounters;

/// Launches under capture, which have not run.
#[derive(Debug)]
pub(crate) struct Captured {
    graph: CUgraph,
    calls: &'static Functions,
}

impl Captured {
    /// Captures what `launches` sends to the queue, which is the capture's own stream meanwhile.
    ///
    /// # Errors
    /// What `launches` returned, or the driver's refusal.
    pub(crate) fn of(
        queue: &mut CudaQueue<'_>,
        launches: impl FnOnce(&mut CudaQueue<'_>) -> Result<()>,
    ) -> Result<Self> {
        let stream = queue.device.capture_stream()?;
        let own = std::mem::replace(&mut queue.stream, stream);
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let captured = Self::on(stream, mode, || launches(queue));
        queue.stream = own;
        let (launched, captured) = captured?;
        launched.and(captured)
    }

    /// Captures what `work` sends to `stream`; returns what `work` does, and the launches.
    ///
    /// # Errors
    /// The driver's refusal of a capture, in which case nothing ran, or of what was captured.
    pub(crate) fn on<R>(
        stream: Stream,
        mode: CUstreamCaptureMode,
        work: impl FnOnce() -> R,
    ) -> Result<(R, Result<Self>)> {
        let calls = functions()?;
        // SAFETY: a stream of the device whose context is current; nothing is captured on it.
        check("cuStreamBeginCapture", unsafe { (calls.cuStreamBeginCapture_v2)(stream.raw(), mode) })?;
        let result = work();
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: ends the capture that was begun above; writes one graph, or null if it was invalidated.
        let ended = check("cuStreamEndCapture", unsafe { (calls.cuStreamEndCapture)(stream.raw(), &raw mut graph) });
        let captured = Self { graph, calls };
        Ok((result, ended.map(|()| captured)))
    }

    /// Its nodes, if they run one after another; none if they do not.
    ///
    /// # Errors
    /// The driver's refusal, also if one of them begins before the one before it has ended.
    pub(crate) fn nodes_in_order(&self) -> Result<Option<Vec<CUgraphNode>>> {
        let (calls, mut count) = (self.calls, 0);
        // SAFETY: a live graph; writes one number.
        check("cuGraphGetNodes", unsafe { (calls.cuGraphGetNodes)(self.graph, std::ptr::null_mut(), &raw mut count) })?;
        let mut nodes = vec![std::ptr::null_mut(); count];
        // SAFETY: as above; room for `count` nodes.
        check("cuGraphGetNodes", unsafe { (calls.cuGraphGetNodes)(self.graph, nodes.as_mut_ptr(), &raw mut count) })?;
        let mut edges = 0;
        // SAFETY: as above.
        check("cuGraphGetEdges", unsafe {
            (calls.cuGraphGetEdges)(self.graph, std::ptr::null_mut(), std::ptr::null_mut(), &raw mut edges)
        })?;
        let (mut from, mut to) = (vec![std::ptr::null_mut(); edges], vec![std::ptr::null_mut(); edges]);
        if edges == 0 {
            return Ok(in_order(&nodes, &from, &to));
        }
        // SAFETY: as above; room for `edges` nodes in each.
        check("cuGraphGetEdges", unsafe {
            (calls.cuGraphGetEdges)(self.graph, from.as_mut_ptr(), to.as_mut_ptr(), &raw mut edges)
        })?;
        Ok(in_order(&nodes, &from, &to))
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: made by the capture, destroyed once; what was instantiated of it does not need it.
            let _ = unsafe { (self.calls.cuGraphDestroy)(self.graph) };
        }
    }
}

/// Nodes in the order of the edges from each to the next; none if they are no chain.
fn in_order<T: Copy + PartialEq>(nodes: &[T], from: &[T], to: &[T]) -> Option<Vec<T>> {
    let mut ordered: Vec<T> = nodes.iter().copied().filter(|node| !to.contains(node)).collect();
    if ordered.len() != 1 || from.len() + 1 != nodes.len() {
        return None;
    }
    while ordered.len() < nodes.len() {
        let last = ordered.last()?;
        let edge = from.iter().position(|node| node == last)?;
        ordered.push(to[edge]);
    }
    Some(ordered)
}

/// Launches that were captured once, ready to run again.
#[derive(Debug)]
pub struct Graph {
    exec: CUgraphExec,
    context: PrimaryContext,
    calls: &'static Functions,
    /// Counters that its launches expect to be zero.
    counters: Option<GraphCounters>,
}

// SAFETY: an executable graph is a handle of the driver, not memory of one thread.
unsafe impl Send for Graph {}
// SAFETY: as above; launches of one graph order themselves.
unsafe impl Sync for Graph {}

impl Graph {
    /// Captures the work of `launches` on the capture's own stream; nothing runs.
    ///
    /// # Errors
    /// The error of `launches`, or the driver's refusal.
    pub fn capture(queue: &mut CudaQueue<'_>, launches: impl FnOnce(&mut CudaQueue<'_>) -> Result<()>) -> Result<Self> {
        let (calls, context) = (functions()?, PrimaryContext::current()?);
        if let Some(zeroed) = &mut queue.zeroed {
            zeroed.begin_graph();
        }
        let captured = Captured::of(queue, launches);
        let counters = queue.zeroed.as_mut().map(|zeroed| zeroed.end_graph());
        let captured = captured?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: a complete graph; writes one handle.
        check("cuGraphInstantiate", unsafe { (calls.cuGraphInstantiateWithFlags)(&raw mut exec, captured.graph, 0) })?;
        let counters = counters.filter(|counters| !counters.is_empty());
        Ok(Self { exec, context, calls, counters })
    }

    /// Runs the launches again, in stream order. Returns whether it did: not where the stream's private memory, with the
    /// graph's counters, was released.
    ///
    /// # Errors
    /// The driver's refusal.
    #[inline]
    pub(crate) fn launch(&self, queue: &CudaQueue<'_>) -> Result<bool> {
        if let Some(counters) = &self.counters {
            let zeroed = queue.zeroed.as_deref();
            if !zeroed.map_or(Ok(false), |zeroed| zeroed.prepare(counters, queue.stream))? {
                return Ok(false);
            }
        }
        // SAFETY: a live executable graph of the current context; every address in it belongs to tensors of this call,
        // which the caller compared with those of the capture.
        check("cuGraphLaunch", unsafe { (self.calls.cuGraphLaunch)(self.exec, queue.stream.raw()) }).map(|()| true)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.with(|| {
            // SAFETY: made in `capture`, in the context that is current; destroyed once. The driver keeps it until launches
            // in flight are over.
            check("cuGraphExecDestroy", unsafe { (self.calls.cuGraphExecDestroy)(self.exec) })
        });
    }
}

/// Users' graphs that contain addresses of te_fast's memory. Each graph is registered during its capture, and holds a
/// share of the memory until the graph and all its instances are destroyed.
#[derive(Debug, Default)]
pub struct GraphReaders(Arc<()>);

impl GraphReaders {
    /// Adds the graph under capture on `stream`.
    ///
    /// # Errors
    /// The driver's refusal; without a capture there is nothing to add.
    #[cold]
    pub fn add(&self, stream: Stream) -> Result<()> {
        let calls = functions()?;
        let (mut status, mut id, mut graph, mut nodes, mut count) = (0, 0, std::ptr::null_mut(), std::ptr::null(), 0);
        // SAFETY: a valid stream of the current context; writes one value through each pointer. The graph is the capture's,
        // which goes on while this call runs.
        check("cuStreamGetCaptureInfo", unsafe {
            (calls.cuStreamGetCaptureInfo_v2)(
                stream.raw(),
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut nodes,
                &raw mut count,
            )
        })?;
        if graph.is_null() {
            return Ok(());
        }
        let share = Arc::into_raw(Arc::clone(&self.0)).cast_mut().cast::<c_void>();
        let mut object: CUuserObject = std::ptr::null_mut();
        let asynchronous = CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        // SAFETY: writes one handle; `let_go` takes the share back, once, when the last reference to the object is gone.
        let made = check("cuUserObjectCreate", unsafe {
            (calls.cuUserObjectCreate)(&raw mut object, share, Some(let_go), 1, asynchronous)
        });
        if made.is_err() {
            // SAFETY: no object was made, so that the share is still this call's.
            unsafe { let_go(share) };
            return made;
        }
        let moved = CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: a graph under capture and a live object, whose one reference becomes the graph's.
        let given =
            check("cuGraphRetainUserObject", unsafe { (calls.cuGraphRetainUserObject)(graph, object, 1, moved) });
        if given.is_err() {
            // SAFETY: the reference stayed here; without it the object goes, and the share with it.
            let _ = unsafe { (calls.cuUserObjectRelease)(object, 1) };
        }
        given
    }

    /// Whether any such graph exists.
    #[must_use]
    pub fn exist(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// Releases the share of a graph, on a thread of the driver that must not call the driver.
///
/// # Safety
/// [`GraphReaders::add`] made `share`, and it is released once.
unsafe extern "C" fn let_go(share: *mut c_void) {
    // SAFETY: the caller's promise; the share is a pointer of `Arc::into_raw`.
    drop(unsafe { Arc::from_raw(share.cast::<()>()) });
}

#[cfg(test)]
mod tests {
    use super::in_order;

    #[test]
    fn nodes_of_a_chain_come_in_its_order() {
        assert_eq!(in_order(&[5, 3, 4], &[4, 3], &[5, 4]), Some(vec![3, 4, 5]));
        assert_eq!(in_order(&[1], &[], &[]), Some(vec![1]));
    }

    #[test]
    fn what_is_no_chain_has_no_order() {
        assert_eq!(in_order::<u8>(&[], &[], &[]), None);
        assert_eq!(in_order(&[1, 2], &[], &[]), None);
        assert_eq!(in_order(&[1, 2, 3], &[1, 1], &[2, 3]), None);
        assert_eq!(in_order(&[1, 2, 3], &[1, 2, 1], &[2, 3, 3]), None);
    }
}
