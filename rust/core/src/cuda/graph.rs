//! CUDA graphs of launches that te_fast repeats on the same addresses: one call of the driver instead of dozens.
#![expect(unsafe_code, reason = "calls into the CUDA driver; every block names who guarantees its arguments")]

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::base::error::Result;
use crate::cuda::context::PrimaryContext;
use crate::cuda::device::{CudaQueue, Stream};
use crate::cuda::functions::{Functions, check, functions};

/// Launches that were captured once, ready to run again.
#[derive(Debug)]
pub struct Graph {
    exec: CUgraphExec,
    context: PrimaryContext,
    calls: &'static Functions,
}

// SAFETY: an executable graph is a handle of the driver, not memory of one thread.
unsafe impl Send for Graph {}
// SAFETY: as above; launches of one graph order themselves.
unsafe impl Sync for Graph {}

impl Graph {
    /// Captures what `launches` sends to the queue, which is the capture's own stream meanwhile; nothing runs.
    ///
    /// # Errors
    /// What `launches` returned, or the driver's refusal.
    pub fn capture(queue: &mut CudaQueue<'_>, launches: impl FnOnce(&mut CudaQueue<'_>) -> Result<()>) -> Result<Self> {
        let (calls, context) = (functions()?, PrimaryContext::current()?);
        let stream = queue.device.capture_stream()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the capture stream of this device, whose context is current; nothing is captured on it.
        check("cuStreamBeginCapture", unsafe { (calls.cuStreamBeginCapture_v2)(stream.raw(), mode) })?;
        let own = std::mem::replace(&mut queue.stream, stream);
        let launched = launches(queue);
        queue.stream = own;
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: ends the capture that was begun above; writes one graph, or null if it was invalidated.
        let ended = check("cuStreamEndCapture", unsafe { (calls.cuStreamEndCapture)(stream.raw(), &raw mut graph) });
        let made = launched.and(ended).and_then(|()| {
            let mut exec = std::ptr::null_mut();
            // SAFETY: a complete graph; writes one handle.
            check("cuGraphInstantiate", unsafe { (calls.cuGraphInstantiateWithFlags)(&raw mut exec, graph, 0) })?;
            Ok(Self { exec, context, calls })
        });
        if !graph.is_null() {
            // SAFETY: made by the capture, destroyed once; the executable graph does not need it.
            let _ = unsafe { (calls.cuGraphDestroy)(graph) };
        }
        made
    }

    /// Runs the launches again, in stream order.
    ///
    /// # Errors
    /// The driver's refusal.
    #[inline]
    pub(crate) fn launch(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live executable graph of the current context; every address in it belongs to tensors of this call,
        // which the caller compared with those of the capture.
        check("cuGraphLaunch", unsafe { (self.calls.cuGraphLaunch)(self.exec, stream.raw()) })
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
