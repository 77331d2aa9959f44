//! In steady state a forward allocates nothing on the heap: counted, with the recorder in place of the kernels.
#![expect(clippy::unwrap_used, reason = "a test stops at the first error")]

use te_fast_core::Float;
use te_fast_core::config::Config;
use te_fast_core::dispatch::{Dispatcher, Memory, Place};
use te_fast_core::driver::Stream;
use te_fast_core::kernel::DevPtr;
use te_fast_core::layer::{Microbatch, PlanCache, WeightRecord, WeightToken};
use te_fast_core::linear::{Backward, Forward, LinearKey, LinearPlan, Slot, WeightBuffer};
use te_fast_core::recipe::{Needs, Recipe};
use te_fast_core::tensor::{DType, Device};
use te_fast_core::trace::Recording;

const PLACE: Place = Place { device: Device::Cpu, stream: Stream(0) };

fn key(grads: bool) -> LinearKey {
    LinearKey {
        epoch: 1,
        rows: 32,
        activation: Float::Bf16,
        weight: Float::Bf16,
        device: Device::Cpu,
        needs: Needs { input_grad: grads, weight_grad: grads, ..Needs::default() },
        bias_grad: grads,
        bias: false,
        any_rows: false,
    }
}

fn step(recipe: &Recipe, grads: bool) -> u64 {
    let config = Config { synchronise: false, check_device: true, exchange_table: true, graphs: true };
    let mut dispatcher = Dispatcher::new(config);
    let mut plans = PlanCache::default();
    let plan = LinearPlan::new(&mut dispatcher, recipe, key(grads), 64, 48).unwrap();
    plans.insert(plan.into(), ());
    dispatcher.trace.record(Recording::Only);
    let mut memory = vec![0_u64; 1 << 16];
    let mut scale = [1.0_f32; 2];
    let pointer = DevPtr::from_slice(&mut memory);
    let slot = Slot { scale: DevPtr::from_slice(&mut scale), amax: pointer };
    let slot = if recipe.is_delayed() { slot } else { Slot::NONE };
    let mut run = || {
        let (plan, ()) = plans.get(&key(grads)).unwrap();
        let segments = plan.weight_segments();
        let token = WeightToken { address: 64, version: Some(1), dtype: DType::Bf16 };
        let record = WeightRecord {
            token,
            device: Device::Cpu,
            segments,
            epoch: 1,
            generation: 0,
            cache_epoch: 0,
            training: grads,
            optimizer_steps: 0,
        };
        assert!(record.serves(&record, Microbatch::Unknown, false));
        let weight = WeightBuffer { data: pointer, segments };
        let (none, saved) = (DevPtr::null(), if grads { pointer } else { DevPtr::null() });
        let io = Forward {
            x: pointer,
            fresh_weight: None,
            weight,
            bias: none,
            y: pointer,
            saved,
            slots: [slot; 2],
            skip_weight: none,
        };
        plan.forward(&mut dispatcher.lane(PLACE, plan.forward_scratch(), Memory::Own).unwrap(), &io).unwrap();
        if grads {
            let io = Backward {
                dy: pointer,
                x: none,
                saved,
                weight,
                dx: pointer,
                dw: pointer,
                db: pointer,
                slot,
                input_slot: Slot::NONE,
                kept_dy: none,
            };
            plan.backward(&mut dispatcher.lane(PLACE, plan.backward_scratch(), Memory::Own).unwrap(), &io).unwrap();
        }
    };
    run(); // scratch memory grows once
    allocation_counter::measure(|| {
        for _ in 0..10 {
            run();
        }
    })
    .count_total
}

#[test]
fn a_step_allocates_nothing() {
    for recipe in [Recipe::DELAYED, Recipe::CURRENT, Recipe::BLOCK] {
        for grads in [false, true] {
            assert_eq!(step(&recipe, grads), 0, "{:?}, gradients {grads}", recipe.scaling);
        }
    }
}

#[test]
fn the_counter_counts() {
    let counted = allocation_counter::measure(|| drop(std::hint::black_box(vec![1_u8; 100])));
    assert_eq!(counted.count_total, 1);
}
