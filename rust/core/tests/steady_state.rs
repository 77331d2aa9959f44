//! Counts allocations: in steady state a call of a program allocates nothing on the heap. The recorder replaces the
//! kernels.
#![expect(clippy::unwrap_used, reason = "a test stops at the first error")]

use std::sync::Arc;

use te_fast_core::Float;
use te_fast_core::base::config::Config;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::Stream;
use te_fast_core::launch::trace::Recording;
use te_fast_core::ops::activation::Activation;
use te_fast_core::ops::norm_spec::NormKind;
use te_fast_core::program::{
    Bindings, CallTable, Chain, KeptProgram, LinearCall, LinearPort, Op, OuterKinds, Port, Program, ProgramKey,
};
use te_fast_core::quant::value::{LinearSlots, Slot, WeightBuffer};
use te_fast_core::quant::weight::{Microbatch, WeightRecord, WeightToken};
use te_fast_core::recipe::definition::Recipe;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::{Memory, Place};

const PLACE: Place = Place { device: Device::Cpu, stream: Stream::DEFAULT };
const RECIPES: [Recipe; 3] = [Recipe::DELAYED, Recipe::CURRENT, Recipe::BLOCK];

fn linear(chain: &mut Chain, inputs: usize, outputs: usize) {
    chain.push("linear".into(), Op::Linear { inputs, outputs, groups: None });
    chain.push("bias".into(), Op::Bias { size: outputs, groups: None });
}

fn one_linear() -> Chain {
    let mut chain = Chain::default();
    linear(&mut chain, 64, 48);
    chain
}

/// Norm, linear, GELU, linear.
fn mlp() -> Chain {
    let mut chain = Chain::default();
    let (kind, zero_centered_gamma) = (NormKind::LayerNorm, false);
    chain.push("norm".into(), Op::Norm { kind, cols: 64, eps: 1e-5, zero_centered_gamma });
    linear(&mut chain, 64, 128);
    let (function, interleave, scaled, cache_quantized_input) = (Activation::Gelu, 0, false, false);
    chain.push("gelu".into(), Op::Activation { function, interleave, scaled, cache_quantized_input, recompute: false });
    linear(&mut chain, 128, 64);
    chain
}

fn program(dispatcher: &mut Dispatcher, chain: &Chain, recipe: &Recipe, grads: bool, call: LinearCall) -> Program {
    let key = ProgramKey {
        epoch: Some(1),
        cols: 64,
        activation: Float::Bf16,
        device: Device::Cpu,
        any_rows: false,
        input_grad: grads,
        params: vec![(Float::Bf16, grads); chain.params()],
        extras: Vec::new(),
        linears: vec![call; chain.linears()],
        outer: OuterKinds::default(),
    };
    Program::new(dispatcher, chain, key, Some(recipe)).unwrap()
}

/// A kept weight that has not changed.
fn serves(program: &Program, linear: usize) -> bool {
    let record = WeightRecord {
        token: WeightToken { address: 64, version: Some(1), dtype: DType::Bf16 },
        device: Device::Cpu,
        layout: program.weight_layout(linear),
        epoch: 1,
        generation: 0,
        cache_epoch: 0,
        training: program.key().any_grad(),
        optimizer_steps: 0,
    };
    record.serves(&record, Microbatch::Unknown, false)
}

/// Memory for all tensors, since nothing is launched.
#[derive(Clone, Copy)]
struct Everywhere<'a> {
    pointer: DevPtr<'a>,
    slot: Slot<'a>,
}

fn bind<'t, 'a>(
    program: &'t Program,
    table: &'t mut CallTable,
    memory: Everywhere<'a>,
    linears: usize,
) -> Bindings<'t, 'a> {
    let Everywhere { pointer, slot } = memory;
    let mut call = program.call(table);
    for port in [Port::Input, Port::Output, Port::Saved, Port::GradOutput, Port::GradInput] {
        call.set(port, pointer);
    }
    for param in 0..program.key().params.len() {
        call.set(Port::Param(param as u16), pointer);
        call.set(Port::GradParam(param as u16), pointer);
    }
    for linear in 0..linears {
        assert!(serves(program, linear));
        call.set_weight(linear, &WeightBuffer::contiguous(pointer, program.weight_layout(linear)));
        call.set_slots(linear, &LinearSlots { input: slot, weight: slot, grad: slot, ..LinearSlots::NONE });
        call.set(Port::Linear(linear as u16, LinearPort::Deferred), pointer);
    }
    call
}

/// Allocations of ten steps that go through two row counts.
fn steps(chain: &Chain, recipe: &Recipe, grads: bool, options: LinearCall) -> u64 {
    let config =
        Config { synchronise: false, check_device: true, exchange_table: true, graphs: true, weights_together: true };
    let mut dispatcher = Dispatcher::new(config);
    let program = Arc::new(program(&mut dispatcher, chain, recipe, grads, options));
    let mut kept = KeptProgram::new(Arc::clone(&program));
    dispatcher.trace.record(Recording::Only);
    let (mut memory, mut scale, mut amax) = (vec![0_u64; 1 << 16], [1.0_f32; 2], [0.0_f32; 2]);
    let slot = Slot { scale: DevPtr::from_slice(&mut scale), amax: DevPtr::from_slice(&mut amax) };
    let slot = if recipe.is_delayed() { slot } else { Slot::NONE };
    let memory = Everywhere { pointer: DevPtr::from_slice(&mut memory), slot };
    let (mut table, linears) = (CallTable::default(), chain.linears());
    let mut step = |rows: usize| {
        let sized = kept.sized(&mut dispatcher, rows).unwrap();
        let call = bind(&program, &mut table, memory, linears);
        let mut lane = dispatcher.lane(PLACE, sized.forward_scratch(), Memory::Own).unwrap();
        sized.run_forward(&mut lane, call).unwrap();
        if !grads {
            return;
        }
        let call = bind(&program, &mut table, memory, linears);
        let mut lane = dispatcher.lane(PLACE, sized.backward_scratch(), Memory::Own).unwrap();
        sized.run_backward(&mut lane, call).unwrap();
        for linear in (0..linears).filter(|&linear| program.is_deferred(linear)) {
            let kind = (DType::F32, true);
            let plan = program.weight_grad_plan(&mut dispatcher, rows, linear, kind, 256).unwrap();
            let mut call = bind(&program, &mut table, memory, linears);
            call.set_weight_grad(linear, plan);
            let mut lane = dispatcher.lane(PLACE, sized.waiting_scratch(linear), Memory::Own).unwrap();
            sized.run_waiting(&mut lane, linear, call).unwrap();
        }
    };
    // Scratch memory grows, and row counts are sized, once.
    step(32);
    step(40);
    let counted = allocation_counter::measure(|| {
        for _ in 0..5 {
            step(32);
            step(40);
        }
    });
    counted.count_total
}

#[test]
fn a_step_allocates_nothing() {
    for (name, chain) in [("one linear", one_linear()), ("mlp", mlp())] {
        for recipe in &RECIPES {
            for grads in [false, true] {
                let count = steps(&chain, recipe, grads, LinearCall::default());
                assert_eq!(count, 0, "{name}, {:?}, gradients {grads}", recipe.scaling);
            }
        }
    }
}

#[test]
fn neither_does_a_weight_gradient_that_waited() {
    for recipe in &RECIPES {
        for save_original_input in [false, !recipe.is_delayed()] {
            let count = steps(&mlp(), recipe, true, LinearCall { deferred: true, save_original_input });
            assert_eq!(count, 0, "{:?}, {save_original_input}", recipe.scaling);
        }
    }
}

#[test]
fn the_counter_counts() {
    let counted = allocation_counter::measure(|| drop(std::hint::black_box(vec![1_u8; 100])));
    assert_eq!(counted.count_total, 1);
}
