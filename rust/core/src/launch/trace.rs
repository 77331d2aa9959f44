//! Counters of launches, which always run, and a recorder that notes launches for tests and benches.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use te_fast_kernels::KernelId;

use crate::gemm::grouped::GroupedGemmSpec;
use crate::gemm::problem::Problem;
use crate::launch::grid::Grid;

/// Counts since the process started or since [`Trace::reset`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Kernels launched or run.
    pub launches: u64,
    /// Matrix products launched or run.
    pub gemms: u64,
    /// Parts of them that were launched as learned, without cuBLASLt.
    pub learned_gemms: u64,
    /// Forwards and backwards of attention that were launched as learned, without torch.
    pub learned_attentions: u64,
    /// Plans found.
    pub plan_hits: u64,
    /// Plans built.
    pub plan_misses: u64,
    /// Times the current device had to be switched.
    pub guard_switches: u64,
    /// Weights quantised.
    pub weight_casts: u64,
    /// Device buffers that te_fast allocated for itself (scratch, workspaces); torch's own are not counted.
    pub allocations: u64,
}

impl Counters {
    /// The counts since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            launches: self.launches - before.launches,
            gemms: self.gemms - before.gemms,
            learned_gemms: self.learned_gemms - before.learned_gemms,
            learned_attentions: self.learned_attentions - before.learned_attentions,
            plan_hits: self.plan_hits - before.plan_hits,
            plan_misses: self.plan_misses - before.plan_misses,
            guard_switches: self.guard_switches - before.guard_switches,
            weight_casts: self.weight_casts - before.weight_casts,
            allocations: self.allocations - before.allocations,
        }
    }

    /// Adds the counts of another call, which this one repeats.
    pub fn add(&mut self, other: &Self) {
        self.launches += other.launches;
        self.gemms += other.gemms;
        self.learned_gemms += other.learned_gemms;
        self.learned_attentions += other.learned_attentions;
        self.plan_hits += other.plan_hits;
        self.plan_misses += other.plan_misses;
        self.guard_switches += other.guard_switches;
        self.weight_casts += other.weight_casts;
        self.allocations += other.allocations;
    }
}

/// The handling of a launch beside the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recording {
    /// Launch only.
    #[default]
    Off,
    /// Note and launch.
    Tee,
    /// Count, do not launch: pure bookkeeping, for benches.
    Only,
}

/// One noted launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Symbol of the kernel, `gemm` or `grouped_gemm`.
    pub name: &'static str,
    /// Geometry; zero for a GEMM.
    pub grid: Grid,
    /// Bytes of the parameter struct; none for a GEMM.
    pub params: Vec<u8>,
    /// The problem of a GEMM.
    pub problem: Option<Problem>,
    /// The problem of a grouped GEMM.
    pub grouped: Option<GroupedGemmSpec>,
}

impl Launch {
    /// A matrix product; the library or the plan decides its geometry.
    fn of_a_product(name: &'static str) -> Self {
        let nowhere = Grid { blocks: [0; 3], threads: 0, shared_bytes: 0, cluster: 1 };
        Self { name, grid: nowhere, params: Vec::new(), problem: None, grouped: None }
    }
}

/// Counters and recorder of a dispatcher.
#[derive(Debug, Default)]
pub struct Trace {
    /// The counters.
    pub counters: Counters,
    recording: Recording,
    launches: Vec<Launch>,
}

impl Trace {
    /// Starts or stops noting launches; a start drops earlier notes.
    pub fn record(&mut self, recording: Recording) {
        self.recording = recording;
        if recording != Recording::Off {
            self.launches.clear();
        }
    }

    /// Whether launches are noted, and made.
    #[must_use]
    pub fn recording(&self) -> Recording {
        self.recording
    }

    /// The launches since the recorder started.
    #[must_use]
    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// Counters to zero.
    pub fn reset(&mut self) {
        self.counters = Counters::default();
    }

    /// Counts a kernel; false when it must not be launched.
    #[inline]
    pub(crate) fn on_launch(&mut self, id: KernelId, grid: Grid, params: &[u8]) -> bool {
        self.counters.launches += 1;
        self.recording == Recording::Off
            || self.note(|| Launch { name: id.symbol(), grid, params: params.to_vec(), problem: None, grouped: None })
    }

    /// Counts a matrix product; false when it must not be launched.
    #[inline]
    pub(crate) fn on_gemm(&mut self, problem: &Problem) -> bool {
        self.counters.gemms += 1;
        if self.recording == Recording::Off {
            return true;
        }
        self.note(|| Launch { problem: Some(*problem), ..Launch::of_a_product("gemm") })
    }

    /// Counts the matrix product of a group of experts; false when it must not be launched.
    #[inline]
    pub(crate) fn on_grouped_gemm(&mut self, spec: &GroupedGemmSpec) -> bool {
        self.counters.gemms += 1;
        if self.recording == Recording::Off {
            return true;
        }
        self.note(|| Launch { grouped: Some(*spec), ..Launch::of_a_product("grouped_gemm") })
    }

    #[cold]
    fn note(&mut self, launch: impl FnOnce() -> Launch) -> bool {
        if self.recording == Recording::Only {
            // Benches run this millions of times, so only Tee notes launches.
            return false;
        }
        self.launches.push(launch());
        true
    }
}

/// A part of a forward, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Stage {
    /// Tensors are read and checked.
    Read,
    /// Device, plan and quantised weight are looked up.
    Plan,
    /// Output, saved and private memory is allocated.
    Allocate,
    /// Operands are quantised.
    Cast,
    /// The matrix product is launched.
    Gemm,
    /// The result is kept and wrapped.
    Finish,
}

impl Stage {
    /// Every stage with its name.
    pub const ALL: [(Stage, &'static str); 6] = [
        (Stage::Read, "read tensors"),
        (Stage::Plan, "plan and weight cache"),
        (Stage::Allocate, "allocate"),
        (Stage::Cast, "quantise"),
        (Stage::Gemm, "matrix product"),
        (Stage::Finish, "finish"),
    ];
}

/// Host time per stage, for the latency report. Off, a mark costs one load.
#[derive(Debug)]
pub struct StageClock {
    on: AtomicBool,
    last: AtomicU64,
    spent: [AtomicU64; Stage::ALL.len()],
}

/// The clock of the process.
pub static CLOCK: StageClock = StageClock {
    on: AtomicBool::new(false),
    last: AtomicU64::new(0),
    spent: [const { AtomicU64::new(0) }; Stage::ALL.len()],
};

impl StageClock {
    /// Turns the clock on, from zero, or off.
    pub fn run(&self, on: bool) {
        if on {
            self.spent.iter().for_each(|spent| spent.store(0, Ordering::Relaxed));
        }
        self.on.store(on, Ordering::Relaxed);
    }

    /// The first stage begins.
    #[inline]
    pub fn start(&self) {
        if self.on.load(Ordering::Relaxed) {
            self.last.store(now(), Ordering::Relaxed);
        }
    }

    /// `stage` ends, and the next one begins.
    #[inline]
    pub fn mark(&self, stage: Stage) {
        if self.on.load(Ordering::Relaxed) {
            let now = now();
            let begun = self.last.swap(now, Ordering::Relaxed);
            self.spent[stage as usize].fetch_add(now.saturating_sub(begun), Ordering::Relaxed);
        }
    }

    /// Nanoseconds per stage.
    pub fn spent(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Stage::ALL.iter().map(|&(stage, name)| (name, self.spent[stage as usize].load(Ordering::Relaxed)))
    }
}

#[cold]
fn now() -> u64 {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    EPOCH.get_or_init(Instant::now).elapsed().as_nanos() as u64
}
