//! CUDA graphs of launches that te_fast repeats on the same addresses: one call of the driver instead of dozens.
#![expect(unsafe_code, reason = "calls into the CUDA driver; every block names who guarantees its arguments")]

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::driver::{CudaQueue, Stream, check};
use crate::error::Result;

/// Launches that were captured once, ready to run again.
#[derive(Debug)]
pub struct Graph {
    exec: CUgraphExec,
}

// SAFETY: an executable graph is a handle of the driver, not memory of one thread.
unsafe impl Send for Graph {}
// SAFETY: as above; launches of one graph order themselves.
unsafe impl Sync for Graph {}

/// A stream that nothing else runs on, for captures: the legacy default stream cannot be captured.
#[derive(Debug)]
pub(crate) struct CaptureStream(Stream);

impl CaptureStream {
    fn new() -> Result<Self> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one stream handle; a context is current. It lives as long as the process.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Self(Stream(stream as u64)))
    }
}

impl Graph {
    /// Captures what `launches` sends to the queue, which is the capture's own stream meanwhile; nothing runs.
    ///
    /// # Errors
    /// What `launches` returned, or the driver's refusal.
    pub fn capture(queue: &mut CudaQueue<'_>, launches: impl FnOnce(&mut CudaQueue<'_>) -> Result<()>) -> Result<Self> {
        let stream = match &queue.device.capture_stream {
            Some(CaptureStream(stream)) => *stream,
            None => queue.device.capture_stream.insert(CaptureStream::new()?).0,
        };
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the capture stream of this device, whose context is current; nothing is captured on it.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) })?;
        let own = std::mem::replace(&mut queue.stream, stream);
        let launched = launches(queue);
        queue.stream = own;
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: ends the capture that was begun above; writes one graph, or null if it was invalidated.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream.raw(), &raw mut graph) });
        let made = launched.and(ended).and_then(|()| {
            let mut exec = std::ptr::null_mut();
            // SAFETY: a complete graph; writes one handle.
            check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) })?;
            Ok(Self { exec })
        });
        if !graph.is_null() {
            // SAFETY: made by the capture, destroyed once; the executable graph does not need it.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        made
    }

    /// Runs the launches again, in stream order.
    ///
    /// # Errors
    /// The driver's refusal.
    #[inline]
    pub fn launch(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live executable graph of the current context; every address in it belongs to tensors of this call,
        // which the caller compared with those of the capture.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `capture`, destroyed once; the driver keeps it until launches in flight are over.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}
