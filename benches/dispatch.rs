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
use te_fast_core::autocast::Request;
use te_fast_core::config::Config;
use te_fast_core::device_memory::DeviceBuffer;
use te_fast_core::dispatch::{Dispatcher, Memory, Place};
use te_fast_core::driver::Stream;
use te_fast_core::kernel::{Backend, DevPtr};
use te_fast_core::layer::{Microbatch, PlanCache, WeightRecord, WeightToken};
use te_fast_core::linear::{Forward, LinearKey, LinearPlan, Slot, WeightBuffer};
use te_fast_core::recipe::{Needs, Recipe};
use te_fast_core::tensor::{DType, Device};
use te_fast_core::trace::Recording;

/// Forwards between two synchronisations.
const BURST: usize = 20;
const ROWS: usize = 256;
const FEATURES: usize = 1024;
const HOST: Place = Place { device: Device::Cpu, stream: Stream(0) };
const RECIPES: [(&str, Recipe); 3] =
    [("delayed", Recipe::DELAYED), ("current", Recipe::CURRENT), ("block", Recipe::BLOCK)];

fn key() -> LinearKey {
    LinearKey {
        epoch: 1,
        rows: ROWS,
        activation: Float::Bf16,
        weight: Float::Bf16,
        device: Device::Cpu,
        needs: Needs::default(),
        bias_grad: false,
        bias: false,
        any_rows: false,
    }
}

/// A weight that is kept and has not changed.
fn record(plan: &LinearPlan) -> WeightRecord {
    WeightRecord {
        token: WeightToken { address: 64, version: Some(1), dtype: DType::Bf16 },
        device: Device::Cpu,
        segments: plan.weight_segments(),
        epoch: 1,
        generation: 0,
        cache_epoch: 0,
        training: false,
        optimizer_steps: 0,
    }
}

/// A forward with a cached weight, the plan looked up and the weight found to serve; `recording` says whether it also
/// computes.
fn forward(criterion: &mut Criterion, group: &str, recording: Recording) {
    let mut group = criterion.benchmark_group(group);
    for (name, recipe) in RECIPES {
        let mut dispatcher =
            Dispatcher::new(Config { synchronise: false, check_device: true, exchange_table: true, graphs: true });
        let plan = Arc::new(LinearPlan::new(&mut dispatcher, &recipe, key(), FEATURES, FEATURES).unwrap());
        let mut plans = PlanCache::default();
        plans.insert(Arc::clone(&plan), ());
        let kept = record(&plan);
        let mut x = vec![0x3f80_u16; ROWS * FEATURES];
        let mut y = vec![0_u16; ROWS * FEATURES];
        let mut weight = vec![0_u64; plan.weight_segments().bytes.div_ceil(8)];
        let (mut scale, mut amax) = ([1.0_f32], [0.0_f32]);
        let slot = Slot { scale: DevPtr::from_slice(&mut scale), amax: DevPtr::from_slice(&mut amax) };
        let slots = if recipe.is_delayed() { [slot, Slot::NONE] } else { [Slot::NONE; 2] };
        let io = Forward {
            x: DevPtr::from_slice(&mut x),
            fresh_weight: None,
            weight: WeightBuffer { data: DevPtr::from_slice(&mut weight), segments: plan.weight_segments() },
            bias: DevPtr::null(),
            y: DevPtr::from_slice(&mut y),
            saved: DevPtr::null(),
            slots,
            skip_weight: DevPtr::null(),
        };
        dispatcher.trace.record(recording);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let (plan, ()) = plans.get(black_box(&key())).unwrap();
                assert!(black_box(&kept).serves(&record(plan), Microbatch::Unknown, false));
                let mut lane = dispatcher.lane(HOST, plan.forward_scratch(), Memory::Own).unwrap();
                plan.forward(&mut lane, black_box(&io)).unwrap();
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
        let mut dispatcher =
            Dispatcher::new(Config { synchronise: false, check_device: true, exchange_table: true, graphs: true });
        let request = Request { enabled: true, calibrating: false, graph: false, recipe: Some(recipe), group: 0 };
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let former = dispatcher.autocast.enter(black_box(&request)).unwrap();
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
    let mut dispatcher =
        Dispatcher::new(Config { synchronise: false, check_device: true, exchange_table: true, graphs: true });
    let place = Place { device: Device::Cuda(0), stream: Stream(0) };
    if let Err(error) = dispatcher.make_current(place.device) {
        println!("linear_fwd_cuda: skipped, {error}");
        return;
    }
    let mut group = criterion.benchmark_group("linear_fwd_cuda");
    for (name, recipe) in RECIPES {
        let plan =
            LinearPlan::new(&mut dispatcher, &recipe, LinearKey { device: place.device, ..key() }, FEATURES, FEATURES);
        let plan = plan.unwrap();
        let bytes = [2 * ROWS * FEATURES, 2 * ROWS * FEATURES, plan.weight_segments().bytes, 256];
        let buffers = bytes.map(|bytes| DeviceBuffer::allocate(bytes).unwrap());
        let [x, y, weight, scales] = &buffers;
        {
            let mut lane = dispatcher.lane(place, 0, Memory::Own).unwrap();
            if let Backend::Cuda(queue) = &mut lane.target.backend {
                buffers.iter().zip(bytes).for_each(|(buffer, bytes)| queue.zero(buffer.ptr(), bytes).unwrap());
            }
        }
        let slot = Slot { scale: scales.ptr(), amax: scales.ptr().offset(64) };
        let io = Forward {
            x: x.ptr(),
            fresh_weight: None,
            weight: WeightBuffer { data: weight.ptr(), segments: plan.weight_segments() },
            bias: DevPtr::null(),
            y: y.ptr(),
            saved: DevPtr::null(),
            slots: if recipe.is_delayed() { [slot, Slot::NONE] } else { [Slot::NONE; 2] },
            skip_weight: DevPtr::null(),
        };
        group.bench_function(name, |bencher| {
            // Bursts between synchronisations, so that the launch queue does not fill up.
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for burst in (0..iterations).step_by(BURST) {
                    let mut lane = dispatcher.lane(place, plan.forward_scratch(), Memory::Own).unwrap();
                    if let Backend::Cuda(queue) = &lane.target.backend {
                        queue.synchronise().unwrap();
                    }
                    let begin = Instant::now();
                    for _ in burst..iterations.min(burst + BURST as u64) {
                        plan.forward(&mut lane, black_box(&io)).unwrap();
                    }
                    spent += begin.elapsed();
                }
                spent
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bookkeeping, host_backend, autocast, cuda);
criterion_main!(benches);
