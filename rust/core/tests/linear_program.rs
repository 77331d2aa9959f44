//! A program of one linear op has the bits of its separate quantisations and products, on the host backend.
#![expect(clippy::unwrap_used, reason = "a test stops at the first error")]

use std::sync::Arc;

use te_fast_core::base::config::Config;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::error::Result;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::Stream;
use te_fast_core::gemm::problem::{Epilogue, Factor, GemmPointers, Operand, Problem, ScaleMode};
use te_fast_core::program::{
    Bindings, CallTable, Chain, KeptProgram, LinearCall, LinearPort, Op, OuterKinds, Port, Program, ProgramKey,
};
use te_fast_core::quant::quantizer::{QuantPlan, QuantPointers, QuantSpec};
use te_fast_core::quant::value::{LinearSlots, Slot, WeightBuffer};
use te_fast_core::recipe::definition::{Block, Recipe};
use te_fast_core::recipe::usage::Usage;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::{Lane, Memory, Place};
use te_fast_core::{Float, Fp8};

const PLACE: Place = Place { device: Device::Cpu, stream: Stream::DEFAULT };
const ROWS: usize = 40;
const INPUTS: usize = 144;
const OUTPUTS: usize = 160;

/// A call: recipe, and the gradients that it needs.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
struct Case {
    recipe: Recipe,
    bias: bool,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    deferred: bool,
    save_original_input: bool,
}

/// Operands of a call, the same for both sides.
struct Operands {
    x: Vec<f32>,
    w: Vec<f32>,
    b: Vec<u16>,
    dy: Vec<f32>,
    scales: [Vec<f32>; 3],
    amaxes: [Vec<f32>; 3],
}

/// The results of a call.
#[derive(Debug, PartialEq)]
struct Results {
    y: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
    db: Vec<f32>,
    amaxes: [Vec<f32>; 3],
}

fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / (1 << 24) as f32 - 0.5) * if state & 0xf000 == 0 { 40.0 } else { 2.0 }
        })
        .collect()
}

impl Operands {
    fn new() -> Self {
        Self {
            x: values(ROWS * INPUTS, 1),
            w: values(OUTPUTS * INPUTS, 2),
            b: values(OUTPUTS, 3).into_iter().map(|value| (value.to_bits() >> 16) as u16).collect(),
            dy: values(ROWS * OUTPUTS, 4),
            scales: [3.0, 5.0, 7.0].map(|scale| vec![scale]),
            amaxes: [0.5, 0.25, 0.125].map(|amax| vec![amax]),
        }
    }

    fn slots<'a>(scales: &'a mut [Vec<f32>; 3], amaxes: &'a mut [Vec<f32>; 3], recipe: &Recipe) -> [Slot<'a>; 3] {
        if !recipe.is_delayed() {
            return [Slot::NONE; 3];
        }
        let mut pairs = scales.iter_mut().zip(amaxes.iter_mut());
        [(); 3].map(|()| {
            let (scale, amax) = pairs.next().unwrap();
            Slot { scale: DevPtr::from_slice(scale), amax: DevPtr::from_slice(amax) }
        })
    }
}

impl Results {
    fn new(operands: &Operands) -> Self {
        Self {
            y: vec![0.0; ROWS * OUTPUTS],
            dx: vec![0.0; ROWS * INPUTS],
            dw: vec![0.0; OUTPUTS * INPUTS],
            db: vec![0.0; OUTPUTS],
            amaxes: operands.amaxes.clone(),
        }
    }
}

fn dispatcher() -> Dispatcher {
    Dispatcher::new(Config {
        synchronise: false,
        check_device: true,
        exchange_table: true,
        graphs: true,
        weights_together: true,
    })
}

fn bytes(count: usize) -> Vec<u64> {
    vec![0; count.div_ceil(8).max(1)]
}

/// One operand in both layouts.
struct Layouts {
    row: Vec<u64>,
    row_scale: Vec<u64>,
    col: Vec<u64>,
    col_scale: Vec<u64>,
}

/// Quantises `values`, and sums their columns into `dbias` if that is not null.
fn quantized(
    dispatcher: &mut Dispatcher,
    spec: QuantSpec,
    values: DevPtr<'_>,
    slot: &Slot<'_>,
    dbias: DevPtr<'_>,
) -> Result<Layouts> {
    let usage = Usage { rowwise: true, columnwise: true };
    let plan = QuantPlan::new(&QuantSpec { usage, dbias: !dbias.is_null(), ..spec })?;
    let mut layouts = Layouts {
        row: bytes(plan.row_bytes()),
        row_scale: bytes(plan.row_scale_bytes()),
        col: bytes(plan.col_bytes()),
        col_scale: bytes(plan.col_scale_bytes()),
    };
    let Lane { mut target, workspace } = dispatcher.lane(PLACE, plan.scratch_bytes(), Memory::Own)?;
    let pointers = QuantPointers {
        x: values,
        row: DevPtr::from_slice(&mut layouts.row),
        row_scale: DevPtr::from_slice(&mut layouts.row_scale),
        col: DevPtr::from_slice(&mut layouts.col),
        col_scale: DevPtr::from_slice(&mut layouts.col_scale),
        scale: slot.scale,
        amax: slot.amax,
        dbias,
        scratch: workspace.scratch,
        counters: workspace.counters,
        ..QuantPointers::default()
    };
    plan.run(&mut target, &pointers)?;
    if plan.shares_scale() {
        layouts.col_scale.clone_from(&layouts.row_scale);
    }
    Ok(layouts)
}

/// `d = x · wᵀ + bias`, on FP8 operands of rows of `k`.
fn product(
    dispatcher: &mut Dispatcher,
    [m, n, k]: [usize; 3],
    (x, x_scale, x_kind): (&mut [u64], &mut [u64], (Fp8, Block)),
    (w, w_scale, w_kind): (&mut [u64], &mut [u64], (Fp8, Block)),
    (bias, d): (DevPtr<'_>, DevPtr<'_>),
) -> Result<()> {
    let operand = |(dtype, block): (Fp8, Block)| {
        let scale = match block {
            Block::Tensor => ScaleMode::Tensor,
            Block::Row => ScaleMode::Block1d,
            Block::Square => ScaleMode::Block2d,
        };
        Operand { dtype: dtype.into(), scale, ld: k, k_outermost: false }
    };
    let problem = Problem {
        m,
        n,
        k,
        x: operand(x_kind),
        w: operand(w_kind),
        d: DType::F32,
        ldd: n,
        bias: (!bias.is_null()).then_some(DType::Bf16),
        alpha: Factor::ONE,
        epilogue: Epilogue::None,
        accumulate: false,
        fast_accumulation: false,
        exact: false,
        alignment: 256,
    };
    let plan = dispatcher.gemm(Device::Cpu, problem)?;
    let pointers = GemmPointers {
        x: DevPtr::from_slice(x),
        x_scale: DevPtr::from_slice(x_scale),
        w: DevPtr::from_slice(w),
        w_scale: DevPtr::from_slice(w_scale),
        bias,
        d,
        ..GemmPointers::default()
    };
    plan.run(&mut dispatcher.lane(PLACE, 0, Memory::Own)?.target, &pointers)
}

/// The expected results, from separate quantisations and products.
fn by_parts(case: &Case) -> Result<Results> {
    let mut dispatcher = dispatcher();
    let Case { recipe, bias, input_grad, weight_grad, bias_grad, .. } = *case;
    let mut operands = Operands::new();
    let mut results = Results::new(&operands);
    let Operands { x, w, b, dy, scales, .. } = &mut operands;
    let [input, weight, grad] = Operands::slots(scales, &mut results.amaxes, &recipe);
    let spec = |rows, cols, quantization, output| QuantSpec {
        scaling: recipe.scaling,
        quantization,
        rows,
        cols,
        input: Float::F32,
        output,
        usage: Usage::default(),
        dbias: false,
        groups: None,
        processors: 1,
    };
    let (x, w, none) = (DevPtr::from_slice(x), DevPtr::from_slice(w), DevPtr::null());
    let mut x = quantized(&mut dispatcher, spec(ROWS, INPUTS, recipe.input, recipe.fwd), x, &input, none)?;
    let mut w = quantized(&mut dispatcher, spec(OUTPUTS, INPUTS, recipe.weight, recipe.fwd), w, &weight, none)?;
    let (x_kind, w_kind) = ((recipe.fwd, recipe.input.block), (recipe.fwd, recipe.weight.block));
    let to = (if bias { DevPtr::from_slice(b) } else { none }, DevPtr::from_slice(&mut results.y));
    let (left, right) =
        ((&mut x.row[..], &mut x.row_scale[..], x_kind), (&mut w.row[..], &mut w.row_scale[..], w_kind));
    product(&mut dispatcher, [ROWS, OUTPUTS, INPUTS], left, right, to)?;
    if !(input_grad || weight_grad) {
        return Ok(results);
    }
    let db = if bias_grad { DevPtr::from_slice(&mut results.db) } else { none };
    let dy = DevPtr::from_slice(dy);
    let mut dy = quantized(&mut dispatcher, spec(ROWS, OUTPUTS, recipe.grad, recipe.bwd), dy, &grad, db)?;
    let kind = (recipe.bwd, recipe.grad.block);
    if input_grad {
        let to = (none, DevPtr::from_slice(&mut results.dx));
        let left = (&mut dy.row[..], &mut dy.row_scale[..], kind);
        let right = (&mut w.col[..], &mut w.col_scale[..], w_kind);
        product(&mut dispatcher, [ROWS, INPUTS, OUTPUTS], left, right, to)?;
    }
    if weight_grad {
        let to = (none, DevPtr::from_slice(&mut results.dw));
        let left = (&mut dy.col[..], &mut dy.col_scale[..], kind);
        let right = (&mut x.col[..], &mut x.col_scale[..], x_kind);
        product(&mut dispatcher, [OUTPUTS, INPUTS, ROWS.next_multiple_of(16)], left, right, to)?;
    }
    Ok(results)
}

fn program(dispatcher: &mut Dispatcher, case: &Case) -> Result<Program> {
    let Case { recipe, bias, input_grad, weight_grad, bias_grad, deferred, save_original_input } = *case;
    let mut chain = Chain::default();
    chain.push("linear".into(), Op::Linear { inputs: INPUTS, outputs: OUTPUTS, groups: None });
    let mut params = vec![(Float::F32, weight_grad)];
    if bias {
        chain.push("bias".into(), Op::Bias { size: OUTPUTS, groups: None });
        params.push((Float::Bf16, bias_grad));
    }
    let key = ProgramKey {
        epoch: Some(1),
        cols: INPUTS,
        activation: Float::F32,
        device: Device::Cpu,
        any_rows: false,
        input_grad,
        params,
        extras: Vec::new(),
        linears: vec![LinearCall { deferred, save_original_input }],
        outer: OuterKinds::default(),
    };
    Program::new(dispatcher, &chain, key, Some(&recipe))
}

fn bind<'t, 'a>(
    program: &'t Program,
    table: &'t mut CallTable,
    ports: &[(Port, DevPtr<'a>)],
    (weight, slots): (&WeightBuffer<'a>, &LinearSlots<'a>),
) -> Bindings<'t, 'a> {
    let mut call = program.call(table);
    for &(port, address) in ports {
        call.set(port, address);
    }
    call.set_weight(0, weight);
    call.set_slots(0, slots);
    call
}

fn by_program(case: &Case) -> Result<Results> {
    let mut dispatcher = dispatcher();
    let program = Arc::new(program(&mut dispatcher, case)?);
    let sized = KeptProgram::new(Arc::clone(&program)).sized(&mut dispatcher, ROWS)?;
    let mut operands = Operands::new();
    let mut results = Results::new(&operands);
    let (mut saved, mut weight, mut kept) =
        (bytes(sized.saved_bytes()), bytes(program.weight_layout(0).bytes()), bytes(sized.deferred_bytes()[0]));
    let Operands { x, w, b, dy, scales, .. } = &mut operands;
    let [input, weight_slot, grad] = Operands::slots(scales, &mut results.amaxes, &case.recipe);
    let w = DevPtr::from_slice(w);
    let mut ports = vec![
        (Port::Input, DevPtr::from_slice(x)),
        (Port::Output, DevPtr::from_slice(&mut results.y)),
        (Port::Param(0), w),
        (Port::GradParam(0), DevPtr::from_slice(&mut results.dw)),
        (Port::Saved, DevPtr::from_slice(&mut saved)),
        (Port::Linear(0, LinearPort::Deferred), DevPtr::from_slice(&mut kept)),
        (Port::GradOutput, DevPtr::from_slice(dy)),
        (Port::GradInput, DevPtr::from_slice(&mut results.dx)),
    ];
    if case.bias {
        ports.push((Port::Param(1), DevPtr::from_slice(b)));
        ports.push((Port::GradParam(1), DevPtr::from_slice(&mut results.db)));
    }
    let buffer = WeightBuffer::contiguous(DevPtr::from_slice(&mut weight), program.weight_layout(0));
    let slots = LinearSlots { input, weight: weight_slot, grad, ..LinearSlots::NONE };
    let mut table = CallTable::default();
    let mut call = bind(&program, &mut table, &ports, (&buffer, &slots));
    call.set_fresh_weight(0, w);
    sized.run_forward(&mut dispatcher.lane(PLACE, sized.forward_scratch(), Memory::Own)?, call)?;
    let call = bind(&program, &mut table, &ports, (&buffer, &slots));
    sized.run_backward(&mut dispatcher.lane(PLACE, sized.backward_scratch(), Memory::Own)?, call)?;
    if case.deferred && case.weight_grad {
        let mut call = bind(&program, &mut table, &ports, (&buffer, &slots));
        call.set_weight_grad(0, program.weight_grad_plan(&mut dispatcher, ROWS, 0, (DType::F32, false), 256)?);
        sized.run_waiting(&mut dispatcher.lane(PLACE, sized.waiting_scratch(0), Memory::Own)?, 0, call)?;
    }
    Ok(results)
}

fn cases(recipe: Recipe) -> impl Iterator<Item = Case> {
    (0_u32..64).filter_map(move |bits| {
        let on = |bit: u32| bits & (1 << bit) != 0;
        let (bias, bias_grad, deferred, save_original_input) = (on(0), on(1), on(2), on(3));
        let (input_grad, weight_grad) = (on(4), on(5));
        // If the gradient is not in FP8, no quantisation sums its columns.
        let sums = bias && (input_grad || weight_grad);
        let sensible = (!bias_grad || sums) && (weight_grad || !(deferred || save_original_input));
        sensible.then_some(Case { recipe, bias, input_grad, weight_grad, bias_grad, deferred, save_original_input })
    })
}

#[test]
fn a_program_of_one_linear_op_has_the_bits_of_its_parts() {
    for recipe in [Recipe::DELAYED, Recipe::CURRENT, Recipe::BLOCK] {
        for case in cases(recipe).filter(|case| !(recipe.is_delayed() && case.save_original_input)) {
            assert_eq!(by_program(&case).unwrap(), by_parts(&case).unwrap(), "{case:?}");
        }
    }
}

#[test]
fn delayed_scaling_refuses_to_save_the_original_input() {
    for case in cases(Recipe::DELAYED).filter(|case| case.save_original_input) {
        let error = by_program(&case).unwrap_err().to_string();
        assert!(error.contains("save_original_input=True does not go with delayed scaling"), "{error}");
    }
}

#[test]
fn a_saved_original_input_leaves_nothing_to_keep() {
    for recipe in [Recipe::CURRENT, Recipe::BLOCK] {
        for case in cases(recipe).filter(|case| case.weight_grad) {
            let mut dispatcher = dispatcher();
            let program = Arc::new(program(&mut dispatcher, &case).unwrap());
            let sized = KeptProgram::new(Arc::clone(&program)).sized(&mut dispatcher, ROWS).unwrap();
            assert_eq!(sized.saved_bytes() == 0, case.save_original_input, "{case:?}");
            let reads_input = program.reads().contains(&Port::Input);
            assert_eq!(reads_input, case.save_original_input, "{case:?}");
        }
    }
}
