//! Plans and programs of random sizes: a plan has the requested sizes, an impossible plan is an error, and nothing
//! panics. Arithmetic that would overflow panics in a test. `make fuzz` runs a hundred times as many cases.
use proptest::prelude::*;
use te_fast_core::base::config::Config;
use te_fast_core::base::dtype::Device;
use te_fast_core::ops::activation::{Activation, ActivationPlan, ActivationSpec};
use te_fast_core::ops::activation_backward::{ActivationBackwardPlan, ActivationBackwardSpec};
use te_fast_core::ops::cast::{CastPlan, CastSpec};
use te_fast_core::ops::cast_block::{BlockShape, CastBlockPlan, CastBlockSpec};
use te_fast_core::ops::norm::NormPlan;
use te_fast_core::ops::norm_spec::{NormKind, NormSpec};
use te_fast_core::program::{Chain, KeptProgram, LinearCall, Op, OuterKinds, Program, ProgramKey};
use te_fast_core::recipe::definition::Recipe;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::Limits;
use te_fast_core::{Float, Fp8};

/// Sizes around every limit of a launch, up to sizes that no tensor has.
fn size() -> impl Strategy<Value = usize> {
    let edges: Vec<usize> =
        vec![0, 1, 16, 127, 128, 129, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62];
    prop_oneof![
        6 => 0_usize..5000,
        3 => (prop::sample::select(edges), -2_isize..3).prop_map(|(edge, by)| edge.saturating_add_signed(by)),
        1 => any::<usize>(),
    ]
}

fn float() -> impl Strategy<Value = Float> + Clone {
    prop::sample::select(vec![Float::F32, Float::F16, Float::Bf16])
}

fn fp8() -> impl Strategy<Value = Fp8> + Clone {
    prop::sample::select(vec![Fp8::E4m3, Fp8::E5m2])
}

fn activation() -> impl Strategy<Value = Activation> + Clone {
    prop::sample::select(vec![
        Activation::Gelu,
        Activation::Geglu,
        Activation::Glu,
        Activation::Relu,
        Activation::Swiglu,
        Activation::ClampedSwiglu { limit: 7.0, alpha: 1.702, offset: 1.0 },
        Activation::SituGlu { beta1: 4.0, beta2: 4.0 },
    ])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn casts((rows, cols) in (size(), size()), (input, output) in (float(), fp8()), flags in any::<[bool; 4]>(), processors in 0_u32..200) {
        let [rowwise, columnwise, dbias, reverse] = flags;
        let spec = CastSpec { rows, cols, input, output, rowwise, columnwise, dbias, reverse, processors };
        if let Ok(plan) = CastPlan::new(spec) {
            prop_assert_eq!(plan.out_bytes(), if rowwise { rows * cols } else { 0 });
            let transposed = if columnwise { rows * cols } else { 0 };
            prop_assert!(plan.out_t_bytes() >= transposed);
            prop_assert_eq!(plan.dbias_bytes(), if dbias { cols * input.size() } else { 0 });
            let _ = (plan.counter_bytes(), plan.partial_bytes());
        }
    }

    #[test]
    fn block_casts((rows, cols) in (size(), size()), (input, output) in (float(), fp8()), flags in any::<[bool; 5]>()) {
        let [rowwise, columnwise, pow2, byte_scales_t, flat] = flags;
        let block = if flat { BlockShape::OneDimensional } else { BlockShape::TwoDimensional };
        let spec = CastBlockSpec { rows, cols, input, output, block, rowwise, columnwise, eps: 0.0, pow2, byte_scales_t };
        if let Ok(plan) = CastBlockPlan::new(spec) {
            prop_assert_eq!(plan.out_bytes(), if rowwise { rows * cols } else { 0 });
            let transposed = if columnwise { rows * cols } else { 0 };
            prop_assert!(plan.out_t_bytes() >= transposed);
            let _ = (plan.scale_bytes(), plan.scale_t_bytes());
        }
    }

    #[test]
    fn norms(
        (rows, cols) in (size(), size()),
        (input, weight, output) in (float(), float(), prop::option::of(fp8())),
        flags in any::<[bool; 7]>(),
        (multiprocessors, shared_bytes, clusters) in (1_u32..200, 48_000_u32..232_448, any::<bool>()),
    ) {
        let [layer_norm, zero_centered_gamma, residual, high, rowwise, columnwise, stats] = flags;
        let kind = if layer_norm { NormKind::LayerNorm } else { NormKind::RmsNorm };
        let limits = Limits { multiprocessors, shared_bytes, clusters };
        let spec = NormSpec {
            rows, cols, kind, input, weight, zero_centered_gamma, eps: 1e-5, residual, high, fp8: output, rowwise, columnwise,
            stats, measures: None, limits,
        };
        if let Ok(plan) = NormPlan::new(spec) {
            prop_assert_eq!(plan.y_bytes(), rows * cols * input.size());
            prop_assert_eq!(plan.out_bytes(), if rowwise && output.is_some() { rows * cols } else { 0 });
            let _ = plan.out_t_bytes();
        }
    }

    #[test]
    fn activations(
        (rows, cols, interleave) in (size(), size(), prop_oneof![Just(0), size()]),
        (function, input, output) in (activation(), float(), prop::option::of(fp8())),
        flags in any::<[bool; 5]>(),
        row_scale in prop::option::of(float()),
        processors in 0_u32..200,
    ) {
        let [high, rowwise, columnwise, dbias, row_scale_grad] = flags;
        let spec = ActivationSpec {
            rows, cols, activation: function, interleave, input, high, fp8: output, rowwise, columnwise, row_scale, measures: None,
        };
        if let Ok(plan) = ActivationPlan::new(spec) {
            prop_assert_eq!(plan.y_bytes(), if high { rows * cols * input.size() } else { 0 });
            let _ = (plan.out_bytes(), plan.out_t_bytes());
        }
        let spec = ActivationBackwardSpec {
            rows, cols, activation: function, interleave, input, high, fp8: output, rowwise, columnwise, dbias, row_scale,
            row_scale_grad, measures: None, processors,
        };
        if let Ok(plan) = ActivationBackwardPlan::new(spec) {
            let halves = if function.is_gated() { 2 } else { 1 };
            prop_assert_eq!(plan.dx_bytes(), if high { rows * cols * halves * input.size() } else { 0 });
            let _ = (plan.out_bytes(), plan.out_t_bytes(), plan.dbias_bytes(), plan.counter_bytes(), plan.partial_bytes());
        }
    }

    #[test]
    fn programs(
        ops in prop::collection::vec(0_usize..12, 1..8),
        (function, rows, other) in (activation(), size(), size()),
        (recipe, flags, activation) in (0_usize..4, any::<[bool; 8]>(), float()),
    ) {
        let [any_rows, input_grad, param_grad, extra_grad, deferred, save_original_input, in_place, gamma] = flags;
        let mut chain = Chain::default();
        let mut cols = 64;
        let mut begin = 0;
        for (index, choice) in ops.into_iter().enumerate() {
            let op = match choice {
                0..=2 => Op::Linear { inputs: cols, outputs: if choice == 2 { other } else { 64 * (choice + 1) }, groups: None },
                3 => Op::Bias { size: cols, groups: None },
                4 | 5 => Op::Norm {
                    kind: if choice == 4 { NormKind::LayerNorm } else { NormKind::RmsNorm },
                    cols, eps: 1e-5, zero_centered_gamma: gamma,
                },
                6 => Op::Activation { function, interleave: 0, scaled: gamma, cache_quantized_input: in_place, recompute: !in_place },
                7 => Op::AddExtraInput { in_place },
                8 => Op::MakeExtraOutput { in_place },
                9 => Op::Residual,
                10 => Op::AddResidual { begin },
                _ => Op::ConstantScale { scale: 2.0 },
            };
            chain.push(format!("{index}"), op);
            match op {
                Op::Residual => begin = index,
                Op::Linear { outputs, .. } => cols = outputs,
                Op::Activation { .. } if function.is_gated() => cols /= 2,
                _ => {}
            }
        }
        let recipe = [None, Some(&Recipe::DELAYED), Some(&Recipe::CURRENT), Some(&Recipe::BLOCK)][recipe];
        let key = ProgramKey {
            epoch: recipe.map(|_| 1),
            cols: 64,
            activation,
            device: Device::Cpu,
            any_rows,
            input_grad,
            params: vec![(activation, param_grad); chain.params()],
            extras: vec![(activation.into(), extra_grad); chain.extra_inputs()],
            linears: vec![LinearCall { deferred, save_original_input }; chain.linears()],
            outer: OuterKinds::default(),
        };
        let config = Config { synchronise: false, check_device: true, exchange_table: true, graphs: true, weights_together: true };
        let mut dispatcher = Dispatcher::new(config);
        if let Ok(program) = Program::new(&mut dispatcher, &chain, key, recipe) {
            let mut kept = KeptProgram::new(std::sync::Arc::new(program));
            for rows in [rows, 32] {
                if let Ok(sized) = kept.sized(&mut dispatcher, rows) {
                    prop_assert_eq!(sized.rows(), rows);
                    prop_assert!(sized.deferred_bytes().len() <= chain.linears());
                }
            }
        }
    }
}
