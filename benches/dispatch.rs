//! Host time of the dispatcher: bookkeeping alone with the recorder, whole forwards on the host backend, and on a GPU
//! where there is one.
//!
//! `cargo bench --package te_fast_core [-- FILTER]`; ids are `group/recipe`.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a bench stops at the first error, and tells what it skips"
)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use te_fast_core::Float;
use te_fast_core::base::config::Config;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::Stream;
use te_fast_core::cuda::memory::DeviceBuffer;
use te_fast_core::launch::target::Backend;
use te_fast_core::launch::trace::Recording;
use te_fast_core::program::{
    Bindings, CallTable, Chain, KeptProgram, LinearCall, Op, OuterKinds, Port, Program, ProgramKey,
};
use te_fast_core::quant::value::{LinearSlots, Slot, WeightBuffer};
use te_fast_core::quant::weight::{Microbatch, WeightRecord, WeightToken};
use te_fast_core::recipe::definition::Recipe;
use te_fast_core::recipe::region::Request;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::{Memory, Place};

const CONFIG: Config =
    Config { synchronise: false, check_device: true, exchange_table: true, graphs: true, weights_together: true };
/// Forwards between two synchronisations.
const BURST: usize = 20;
const ROWS: usize = 256;
const FEATURES: usize = 1024;
const HOST: Place = Place { device: Device::Cpu, stream: Stream::DEFAULT };
const RECIPES: [(&str, Recipe); 3] =
    [("delayed", Recipe::DELAYED), ("current", Recipe::CURRENT), ("block", Recipe::BLOCK)];

/// A program of one linear op without gradients.
fn linear(dispatcher: &mut Dispatcher, recipe: &Recipe, device: Device) -> Program {
    let mut chain = Chain::default();
    chain.push("linear".into(), Op::Linear { inputs: FEATURES, outputs: FEATURES, groups: None });
    program(dispatcher, &chain, recipe, device, false)
}

fn program(dispatcher: &mut Dispatcher, chain: &Chain, recipe: &Recipe, device: Device, grads: bool) -> Program {
    let key = ProgramKey {
        epoch: Some(1),
        cols: FEATURES,
        activation: Float::Bf16,
        device,
        any_rows: false,
        input_grad: grads,
        params: vec![(Float::Bf16, grads); chain.params()],
        extras: Vec::new(),
        linears: vec![LinearCall::default(); chain.linears()],
        outer: OuterKinds::default(),
    };
    Program::new(dispatcher, chain, key, Some(recipe)).unwrap()
}

/// A weight that is kept and has not changed.
fn record(program: &Program) -> WeightRecord {
    WeightRecord {
        token: WeightToken { address: 64, version: Some(1), dtype: DType::Bf16 },
        device: Device::Cpu,
        layout: program.weight_layout(0),
        epoch: 1,
        generation: 0,
        cache_epoch: 0,
        training: false,
        optimizer_steps: 0,
    }
}

/// What a forward of [`linear`] brings.
#[derive(Clone, Copy)]
struct Tensors<'a> {
    x: DevPtr<'a>,
    y: DevPtr<'a>,
    weight: WeightBuffer<'a>,
    slots: LinearSlots<'a>,
}

impl<'a> Tensors<'a> {
    fn bind<'t>(&self, program: &'t Program, table: &'t mut CallTable) -> Bindings<'t, 'a> {
        let mut call = program.call(table);
        call.set(Port::Input, self.x);
        call.set(Port::Output, self.y);
        call.set_weight(0, &self.weight);
        call.set_slots(0, &self.slots);
        call
    }
}

fn slots<'a>(recipe: &Recipe, scale: DevPtr<'a>, amax: DevPtr<'a>) -> LinearSlots<'a> {
    let slot = if recipe.is_delayed() { Slot { scale, amax } } else { Slot::NONE };
    LinearSlots { input: slot, weight: slot, grad: slot, ..LinearSlots::NONE }
}

/// A forward with a cached weight, the row count looked up and the weight found to serve; `recording` says whether it also
/// computes.
fn forward(criterion: &mut Criterion, group: &str, recording: Recording) {
    let mut group = criterion.benchmark_group(group);
    for (name, recipe) in RECIPES {
        let mut dispatcher = Dispatcher::new(CONFIG);
        let program = Arc::new(linear(&mut dispatcher, &recipe, Device::Cpu));
        let mut sizes = KeptProgram::new(Arc::clone(&program));
        let (kept, layout) = (record(&program), program.weight_layout(0));
        let mut x = vec![0x3f80_u16; ROWS * FEATURES];
        let mut y = vec![0_u16; ROWS * FEATURES];
        let mut weight = vec![0_u64; layout.bytes().div_ceil(8)];
        let (mut scale, mut amax) = ([1.0_f32], [0.0_f32]);
        let tensors = Tensors {
            x: DevPtr::from_slice(&mut x),
            y: DevPtr::from_slice(&mut y),
            weight: WeightBuffer::contiguous(DevPtr::from_slice(&mut weight), layout),
            slots: slots(&recipe, DevPtr::from_slice(&mut scale), DevPtr::from_slice(&mut amax)),
        };
        let mut table = CallTable::default();
        dispatcher.trace.record(recording);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let sized = sizes.sized(&mut dispatcher, black_box(ROWS)).unwrap();
                assert!(black_box(&kept).serves(&record(&program), Microbatch::Unknown, false));
                let call = black_box(&tensors).bind(&program, &mut table);
                let mut lane = dispatcher.lane(HOST, sized.forward_scratch(), Memory::Own).unwrap();
                sized.run_forward(&mut lane, call).unwrap();
            });
        });
    }
    group.finish();
}

/// A row count that was not there before: what it costs beside cuBLAS's own search, per linear op of a chain of eight
/// with gradients.
fn new_row_count(criterion: &mut Criterion) {
    const LINEARS: u32 = 8;
    let mut group = criterion.benchmark_group("program_new_row_count_per_linear");
    for (name, recipe) in RECIPES {
        let mut chain = Chain::default();
        (0..LINEARS).for_each(|_| {
            chain.push("linear".into(), Op::Linear { inputs: FEATURES, outputs: FEATURES, groups: None });
        });
        let mut dispatcher = Dispatcher::new(CONFIG);
        let program = program(&mut dispatcher, &chain, &recipe, Device::Cpu, true);
        let mut sizes = KeptProgram::new(Arc::new(program));
        let mut rows = 0;
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let begin = Instant::now();
                for _ in 0..iterations {
                    rows += 8;
                    black_box(sizes.sized(&mut dispatcher, rows).unwrap());
                }
                begin.elapsed() / LINEARS
            });
        });
    }
    group.finish();
}

fn bookkeeping(criterion: &mut Criterion) {
    forward(criterion, "linear_fwd_bookkeeping", Recording::Only);
}

fn host_backend(criterion: &mut Criterion) {
    forward(criterion, "linear_fwd_host", Recording::Off);
}

fn autocast(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("autocast_enter_exit");
    for (name, recipe) in RECIPES {
        let mut dispatcher = Dispatcher::new(CONFIG);
        let request = Request { enabled: true, calibrating: false, graph: false, recipe: Some(recipe), group: 0 };
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let former = dispatcher.autocast.enter(black_box(&request), None).unwrap();
                dispatcher.autocast.exit(&former, false)
            });
        });
    }
    group.finish();
}

/// The same forward on the first GPU, where there is one: host time of its launches.
///
/// cuBLASLt is found as torch's copy would be: put its folder (`nvidia/cu13/lib` of site-packages) on
/// `LD_LIBRARY_PATH`.
fn cuda(criterion: &mut Criterion) {
    let mut dispatcher = Dispatcher::new(CONFIG);
    let place = Place { device: Device::Cuda(0), stream: Stream::DEFAULT };
    if let Err(error) = dispatcher.make_current(place.device) {
        println!("linear_fwd_cuda: skipped, {error}");
        return;
    }
    let mut group = criterion.benchmark_group("linear_fwd_cuda");
    for (name, recipe) in RECIPES {
        let program = Arc::new(linear(&mut dispatcher, &recipe, place.device));
        let sized = KeptProgram::new(Arc::clone(&program)).sized(&mut dispatcher, ROWS).unwrap();
        let layout = program.weight_layout(0);
        let bytes = [2 * ROWS * FEATURES, 2 * ROWS * FEATURES, layout.bytes(), 256];
        let buffers = bytes.map(|bytes| DeviceBuffer::allocate(bytes).unwrap());
        let [x, y, weight, scales] = &buffers;
        {
            let mut lane = dispatcher.lane(place, 0, Memory::Own).unwrap();
            if let Backend::Cuda(queue) = &mut lane.target.backend {
                for buffer in &buffers {
                    buffer.zero(queue).unwrap();
                }
            }
        }
        let tensors = Tensors {
            x: x.ptr(),
            y: y.ptr(),
            weight: WeightBuffer::contiguous(weight.ptr(), layout),
            slots: slots(&recipe, scales.ptr(), scales.ptr().offset(64)),
        };
        let mut table = CallTable::default();
        group.bench_function(name, |bencher| {
            // Bursts between synchronisations, so that the launch queue does not fill up.
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for burst in (0..iterations).step_by(BURST) {
                    let mut lane = dispatcher.lane(place, sized.forward_scratch(), Memory::Own).unwrap();
                    if let Backend::Cuda(queue) = &lane.target.backend {
                        queue.synchronise().unwrap();
                    }
                    let begin = Instant::now();
                    for _ in burst..iterations.min(burst + BURST as u64) {
                        let call = black_box(&tensors).bind(&program, &mut table);
                        sized.run_forward(&mut lane, call).unwrap();
                    }
                    spent += begin.elapsed();
                }
                spent
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bookkeeping, new_row_count, host_backend, autocast, cuda);
criterion_main!(benches);
