//! The dispatcher, which owns device states, plans, counters and the autocast state.
//!
//! It is passed by `&mut`, so the hot path takes no lock. A call asks it for a [`Lane`]: the launch target of one
//! device and stream together with the private memory that the call may use.

use std::sync::Arc;

use crate::base::config::Config;
use crate::base::dtype::Device;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::device::{Context, CudaDevice, CudaQueue, DeviceFacts, Stream, device_count, is_capturing};
use crate::cuda::memory::{DeviceBuffer, retire};
use crate::cuda::zeroed::ZeroedCounters;
use crate::gemm::grouped::GroupedGemmSpec;
use crate::gemm::plan::{GemmPlan, GemmPlans};
use crate::gemm::problem::{Problem, WORKSPACE_BYTES};
use crate::launch::target::{Backend, Target};
use crate::launch::trace::Trace;
use crate::ops::grouped_gemm::GroupedGemmPlan;
use crate::recipe::autocast::AutocastState;
use crate::runtime::lane::{
    CAPTURED_ZEROED_BYTES, CLUSTERS_FROM, COUNTER_BYTES, External, Lane, Limits, Memory, OWN_SCRATCH_LIMIT, Place,
    Workspace, ZEROED_BYTES, aligned,
};

/// Private memory of a stream grows by at least this much, so that it does not grow often.
const SCRATCH_STEP: usize = 1 << 20;

#[derive(Debug)]
struct StreamState {
    stream: Stream,
    fixed: DeviceBuffer,
    zeroed: ZeroedCounters,
    scratch: Option<DeviceBuffer>,
}

#[derive(Debug)]
struct DeviceState {
    cuda: CudaDevice,
    gemms: GemmPlans,
    streams: Vec<StreamState>,
    /// The counters of the call under capture.
    captured: Option<ZeroedCounters>,
}

#[derive(Debug)]
struct HostState {
    gemms: GemmPlans,
    counters: Vec<u64>,
    scratch: Vec<u64>,
}

/// Everything that outlives a call, for the whole process.
#[derive(Debug)]
pub struct Dispatcher {
    /// Settings.
    pub config: Config,
    /// Counters and recorder.
    pub trace: Trace,
    /// Autocast regions and delayed-scaling buffers.
    pub autocast: AutocastState,
    /// Number of updates of the forward scales; a cached weight is valid only for the scales of its update.
    pub forward_generation: u64,
    /// Changes when launches were only recorded, since their results do not exist.
    pub cache_epoch: u64,
    /// Steps that torch optimizers have made in this process.
    pub optimizer_steps: u64,
    /// `te_fast.auto_pad`: whether row counts that are not multiples of 8 are accepted.
    pub auto_pad: bool,
    /// Whether a wrapper of graphs warms up and captures: between Python's `set_capture_start` and `set_capture_end`.
    pub graph_phase: bool,
    /// Whether the process sees more than one device; false until a device is open.
    several_devices: bool,
    devices: Vec<Option<Box<DeviceState>>>,
    host: HostState,
}

impl Dispatcher {
    /// A dispatcher that has touched no device.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            trace: Trace::default(),
            autocast: AutocastState::default(),
            forward_generation: 0,
            cache_epoch: 0,
            optimizer_steps: 0,
            auto_pad: false,
            graph_phase: false,
            several_devices: false,
            devices: Vec::new(),
            host: HostState { gemms: GemmPlans::default(), counters: vec![0; COUNTER_BYTES / 8], scratch: Vec::new() },
        }
    }

    /// Number of rows to append to `rows` for the region's FP8 GEMMs, if the user allows it.
    #[must_use]
    pub fn rows_to_pad(&mut self, rows: usize) -> usize {
        let region = self.autocast.current();
        if self.auto_pad && region.enabled { region.recipe.missing_rows(rows) } else { 0 }
    }

    /// Makes `device` the current one of this thread, if it is not; returns the one to restore.
    ///
    /// # Errors
    /// No driver, no such device.
    #[inline]
    pub fn make_current(&mut self, device: Device) -> Result<Option<Context>> {
        let Device::Cuda(ordinal) = device else { return Ok(None) };
        if !self.config.check_device && self.devices.get(usize::from(ordinal)).is_some_and(Option::is_some) {
            return Ok(None);
        }
        let former = self.device(ordinal)?.cuda.make_current()?;
        if former.is_some() {
            self.trace.counters.guard_switches += 1;
        }
        Ok(former)
    }

    /// Whether torch's current device may differ from CUDA's, which must be checked after [`Dispatcher::make_current`];
    /// not with one device, and not if the caller is trusted.
    #[must_use]
    pub const fn torch_may_differ(&self) -> bool {
        self.several_devices && self.config.check_device
    }

    /// Facts of a device, read once per process and device.
    ///
    /// # Errors
    /// No driver, no such device.
    pub fn facts(&mut self, ordinal: u16) -> Result<&DeviceFacts> {
        Ok(self.device(ordinal)?.cuda.facts())
    }

    /// Streaming multiprocessors, which plans size their grids by; 1 on the host.
    ///
    /// # Errors
    /// No driver, no such device.
    pub fn multiprocessors(&mut self, device: Device) -> Result<u32> {
        match device {
            Device::Cpu => Ok(1),
            Device::Cuda(ordinal) => Ok(self.facts(ordinal)?.multiprocessors),
        }
    }

    /// The device's limits for launches; small numbers on the host, which does not use them.
    ///
    /// # Errors
    /// No driver, no such device.
    pub fn limits(&mut self, device: Device) -> Result<Limits> {
        let Device::Cuda(ordinal) = device else {
            return Ok(Limits { multiprocessors: 1, shared_bytes: 48 << 10, clusters: false });
        };
        let &DeviceFacts { capability, multiprocessors, shared_bytes, .. } = self.facts(ordinal)?;
        Ok(Limits { multiprocessors, shared_bytes, clusters: capability >= CLUSTERS_FROM })
    }

    #[inline]
    fn device(&mut self, ordinal: u16) -> Result<&mut DeviceState> {
        let index = usize::from(ordinal);
        if self.devices.get(index).is_none_or(Option::is_none) {
            self.open(ordinal)?;
        }
        match self.devices.get_mut(index) {
            Some(Some(state)) => Ok(state),
            _ => Err(Error::state("device", format!("cuda:{ordinal} could not be opened"))),
        }
    }

    #[cold]
    fn open(&mut self, ordinal: u16) -> Result<()> {
        let cuda = CudaDevice::open(ordinal, self.config.synchronise)?;
        self.several_devices = device_count()? > 1;
        let index = usize::from(ordinal);
        if self.devices.len() <= index {
            self.devices.resize_with(index + 1, || None);
        }
        let (gemms, streams) = (GemmPlans::default(), Vec::new());
        self.devices[index] = Some(Box::new(DeviceState { cuda, gemms, streams, captured: None }));
        Ok(())
    }

    /// The plan of a matrix product on a device whose context is current.
    ///
    /// # Errors
    /// See [`GemmPlans::get`].
    pub fn gemm(&mut self, device: Device, problem: Problem) -> Result<Arc<GemmPlan>> {
        match device {
            Device::Cpu => self.host.gemms.get(None, problem),
            Device::Cuda(ordinal) => {
                let state = self.device(ordinal)?;
                state.gemms.get(Some(&state.cuda), problem)
            }
        }
    }

    /// The plan of a grouped product on a device, which must be current.
    ///
    /// # Errors
    /// See [`GroupedGemmPlan::new`].
    pub fn grouped_gemm(&mut self, device: Device, spec: GroupedGemmSpec) -> Result<GroupedGemmPlan> {
        match device {
            Device::Cpu => GroupedGemmPlan::new(spec),
            Device::Cuda(ordinal) => {
                let state = self.device(ordinal)?;
                state.gemms.grouped(&state.cuda, spec)
            }
        }
    }

    /// Whether cuBLASLt has a grouped product on a GPU, which must be current, in a version that is trusted.
    ///
    /// # Errors
    /// No driver.
    pub fn cublas_multiplies(&mut self, ordinal: u16, spec: &GroupedGemmSpec) -> Result<bool> {
        let state = self.device(ordinal)?;
        Ok(state.gemms.by_cublas(&state.cuda, spec).is_ok())
    }

    /// Bytes that the caller must allocate for a call that needs `scratch` bytes of private memory; zero if the
    /// stream's own memory suffices.
    ///
    /// # Errors
    /// The driver's refusal to say whether a graph is being captured.
    #[inline]
    pub fn external_bytes(place: Place, scratch: usize) -> Result<External> {
        if matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)? {
            return Ok(External::Everything(aligned(WORKSPACE_BYTES + CAPTURED_ZEROED_BYTES) + scratch));
        }
        Ok(if scratch > OWN_SCRATCH_LIMIT { External::Scratch(scratch) } else { External::None })
    }

    /// The same for a call that pauses, in which another call of the stream may run: it shares no scratch memory.
    ///
    /// # Errors
    /// The driver's refusal to say whether a graph is being captured.
    pub fn external_paused(place: Place, scratch: usize) -> Result<External> {
        Ok(match Self::external_bytes(place, scratch)? {
            External::None if scratch != 0 => External::Scratch(scratch),
            other => other,
        })
    }

    /// The same for a call without matrix products that uses `counters` bytes of counters.
    ///
    /// # Errors
    /// The driver's refusal to say whether a graph is being captured.
    #[inline]
    pub fn external_counted(place: Place, counters: usize, scratch: usize) -> Result<External> {
        match Self::external_bytes(place, scratch)? {
            External::Everything(_) => Ok(External::Counted { counters, scratch }),
            other => Ok(other),
        }
    }

    /// A launch target on `place` with `scratch` bytes of private memory; the device must be current.
    ///
    /// # Errors
    /// No driver, or no memory.
    #[inline]
    pub fn lane<'d>(&'d mut self, place: Place, scratch: usize, memory: Memory<'d>) -> Result<Lane<'d>> {
        match place.device {
            Device::Cpu => Ok(self.host_lane(scratch, memory)),
            Device::Cuda(ordinal) => self.cuda_lane(ordinal, place.stream, scratch, memory),
        }
    }

    /// A launch target for kernels without private memory; the device must be current.
    ///
    /// # Errors
    /// No driver.
    pub fn target(&mut self, place: Place) -> Result<Target<'_>> {
        let Device::Cuda(ordinal) = place.device else { return Ok(Target::host(&mut self.trace)) };
        self.device(ordinal)?;
        let Self { trace, devices, .. } = self;
        match devices.get_mut(usize::from(ordinal)) {
            Some(Some(state)) => {
                let queue = CudaQueue { device: &mut state.cuda, stream: place.stream, zeroed: None };
                Ok(Target { backend: Backend::Cuda(queue), trace })
            }
            _ => Err(Error::state("device", "not open")),
        }
    }

    fn host_lane<'d>(&'d mut self, scratch: usize, memory: Memory<'d>) -> Lane<'d> {
        let Self { trace, host, .. } = self;
        let words = scratch.div_ceil(8);
        let scratch = match memory {
            Memory::Scratch(scratch) | Memory::Everything(scratch) => scratch,
            Memory::Counted { memory, counters } => memory.offset(aligned(counters)),
            Memory::Own => {
                if host.scratch.len() < words {
                    trace.counters.allocations += 1;
                    host.scratch = vec![0; words];
                }
                DevPtr::from_slice(&mut host.scratch)
            }
        };
        let workspace = Workspace { gemm: DevPtr::null(), counters: DevPtr::from_slice(&mut host.counters), scratch };
        Lane { target: Target { backend: Backend::Host, trace }, workspace }
    }

    #[inline]
    fn cuda_lane<'d>(
        &'d mut self,
        ordinal: u16,
        stream: Stream,
        scratch: usize,
        memory: Memory<'d>,
    ) -> Result<Lane<'d>> {
        self.device(ordinal)?;
        let Self { trace, devices, .. } = self;
        let Some(Some(state)) = devices.get_mut(usize::from(ordinal)) else {
            return Err(Error::state("device", "not open"));
        };
        let DeviceState { cuda, streams, captured, .. } = &mut **state;
        let mut queue = CudaQueue { device: cuda, stream, zeroed: None };
        let given = match memory {
            Memory::Own => None,
            Memory::Scratch(scratch) => Some(scratch),
            Memory::Everything(memory) => {
                let scratch = memory.offset(aligned(WORKSPACE_BYTES + CAPTURED_ZEROED_BYTES));
                let workspace = Workspace { gemm: memory, counters: memory.offset(WORKSPACE_BYTES), scratch };
                queue.zeroed = Some(captured.insert(zeroed_in(memory)));
                return captured_lane(queue, trace, workspace, CAPTURED_ZEROED_BYTES);
            }
            Memory::Counted { memory, counters } => {
                let scratch = memory.offset(aligned(counters));
                let workspace = Workspace { gemm: DevPtr::null(), counters: memory, scratch };
                return captured_lane(queue, trace, workspace, counters);
            }
        };
        let index = match streams.iter().position(|state| state.stream == stream) {
            Some(index) => index,
            None => open_stream(streams, &queue, trace)?,
        };
        let StreamState { fixed, zeroed, scratch: own, .. } = &mut streams[index];
        queue.zeroed = Some(zeroed);
        let scratch = match given {
            Some(scratch) => scratch,
            None => own_scratch(own, scratch, trace)?,
        };
        let fixed = fixed.ptr();
        let workspace = Workspace { gemm: fixed, counters: fixed.offset(WORKSPACE_BYTES), scratch };
        Ok(Lane { target: Target { backend: Backend::Cuda(queue), trace }, workspace })
    }

    /// Number of GEMM plans, bytes of private memory and streams seen, per device.
    #[must_use]
    pub fn inventory(&self) -> Vec<(Device, usize, usize, usize)> {
        let host = (Device::Cpu, self.host.gemms.len(), 8 * (self.host.scratch.len() + self.host.counters.len()), 0);
        let devices = self.devices.iter().flatten().map(|state| {
            let bytes = state.streams.iter().map(StreamState::bytes).sum();
            (Device::Cuda(state.cuda.facts().ordinal), state.gemms.len(), bytes, state.streams.len())
        });
        std::iter::once(host).chain(devices).collect()
    }

    /// Takes the private memory of every stream; later calls allocate again.
    pub fn take_memory(&mut self) -> PrivateMemory {
        self.host.scratch = Vec::new();
        PrivateMemory(self.devices.iter_mut().flatten().flat_map(|state| std::mem::take(&mut state.streams)).collect())
    }
}

/// Private memory that no later call uses. Its drop frees the memory, on any thread, and waits for running kernels; so
/// do not drop it while the dispatcher is borrowed.
#[derive(Debug)]
#[must_use]
pub struct PrivateMemory(#[expect(dead_code, reason = "held to be dropped")] Vec<StreamState>);

/// A lane with private memory in the pool of a graph under capture. Each replay clears the counters, since other
/// tensors of the graph may share their memory.
#[cold]
fn captured_lane<'d>(
    queue: CudaQueue<'d>,
    trace: &'d mut Trace,
    workspace: Workspace<'d>,
    counters: usize,
) -> Result<Lane<'d>> {
    queue.zero(workspace.counters, counters)?;
    Ok(Lane { target: Target { backend: Backend::Cuda(queue), trace }, workspace })
}

#[cold]
fn open_stream(streams: &mut Vec<StreamState>, queue: &CudaQueue<'_>, trace: &mut Trace) -> Result<usize> {
    let fixed = DeviceBuffer::allocate(WORKSPACE_BYTES + ZEROED_BYTES)?;
    trace.counters.allocations += 1;
    queue.zero(fixed.ptr().offset(WORKSPACE_BYTES), ZEROED_BYTES)?;
    let zeroed = zeroed_in(fixed.ptr());
    streams.push(StreamState { stream: queue.stream, fixed, zeroed, scratch: None });
    Ok(streams.len() - 1)
}

/// The counters of learned launches, behind the workspace and the other counters.
fn zeroed_in(fixed: DevPtr<'_>) -> ZeroedCounters {
    ZeroedCounters::new(fixed.offset(WORKSPACE_BYTES + COUNTER_BYTES))
}

impl StreamState {
    fn bytes(&self) -> usize {
        self.fixed.bytes() + self.scratch.as_ref().map_or(0, DeviceBuffer::bytes)
    }
}

#[inline]
fn own_scratch<'a>(own: &'a mut Option<DeviceBuffer>, bytes: usize, trace: &mut Trace) -> Result<DevPtr<'a>> {
    if bytes != 0 && own.as_ref().is_none_or(|scratch| scratch.bytes() < bytes) {
        grow(own, bytes, trace)?;
    }
    Ok(own.as_ref().map_or(DevPtr::null(), DeviceBuffer::ptr))
}

#[cold]
fn grow(own: &mut Option<DeviceBuffer>, bytes: usize, trace: &mut Trace) -> Result<()> {
    let size = (bytes * 2).next_multiple_of(SCRATCH_STEP).min(OWN_SCRATCH_LIMIT).max(bytes);
    let larger = DeviceBuffer::allocate(size)?;
    if let Some(smaller) = own.replace(larger) {
        retire(smaller); // launches in flight use it
    }
    trace.counters.allocations += 1;
    Ok(())
}
