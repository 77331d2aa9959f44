//! A program is compiled once and sized for each row count.
#![expect(clippy::unwrap_used, reason = "a test stops at the first error")]

use std::sync::Arc;

use te_fast_core::Float;
use te_fast_core::base::config::Config;
use te_fast_core::base::dtype::Device;
use te_fast_core::program::{Chain, KeptProgram, LinearCall, Op, OuterKinds, Program, ProgramKey};
use te_fast_core::recipe::definition::Recipe;
use te_fast_core::runtime::dispatcher::Dispatcher;

fn dispatcher() -> Dispatcher {
    Dispatcher::new(Config {
        synchronise: false,
        check_device: true,
        exchange_table: true,
        graphs: true,
        weights_together: true,
    })
}

fn program(dispatcher: &mut Dispatcher, recipe: &Recipe, any_rows: bool) -> KeptProgram<Program> {
    let mut chain = Chain::default();
    chain.push("0 (first)".into(), Op::Linear { inputs: 64, outputs: 128, groups: None });
    chain.push("1 (second)".into(), Op::Linear { inputs: 128, outputs: 64, groups: None });
    let key = ProgramKey {
        epoch: Some(1),
        cols: 64,
        activation: Float::Bf16,
        device: Device::Cpu,
        any_rows,
        input_grad: true,
        params: vec![(Float::Bf16, true); 2],
        extras: Vec::new(),
        linears: vec![LinearCall::default(); 2],
        outer: OuterKinds::default(),
    };
    KeptProgram::new(Arc::new(Program::new(dispatcher, &chain, key, Some(recipe)).unwrap()))
}

#[test]
fn a_row_count_is_found_again() {
    let mut dispatcher = dispatcher();
    let mut program = program(&mut dispatcher, &Recipe::CURRENT, false);
    let [first, other, again] = [32, 40, 32].map(|rows| program.sized(&mut dispatcher, rows).unwrap());
    assert!(Arc::ptr_eq(&first, &again) && !Arc::ptr_eq(&first, &other));
    assert_eq!((first.rows(), other.rows()), (32, 40));
    assert_eq!((dispatcher.trace.counters.plan_misses, dispatcher.trace.counters.plan_hits), (2, 1));
}

#[test]
fn row_counts_used_longest_ago_go_first() {
    let mut dispatcher = dispatcher();
    let mut program = program(&mut dispatcher, &Recipe::DELAYED, false);
    for rows in (1..=256).chain([1, 257]) {
        program.sized(&mut dispatcher, 8 * rows).unwrap();
    }
    let kept: Vec<_> = program.all_sized().iter().map(|sized| sized.rows()).collect();
    assert_eq!(kept.len(), 256);
    assert_eq!(kept[254..], [8, 8 * 257]);
    assert!(!kept.contains(&16) && kept.contains(&24));
}

#[test]
fn buffers_are_as_large_as_the_rows_ask_for() {
    for recipe in [Recipe::DELAYED, Recipe::CURRENT, Recipe::BLOCK] {
        let mut dispatcher = dispatcher();
        let mut program = program(&mut dispatcher, &recipe, false);
        let [few, many] = [128, 1024].map(|rows| program.sized(&mut dispatcher, rows).unwrap());
        // The transposed inputs of both ops in FP8, and their scales.
        assert!((1024 * (64 + 128)..1024 * (64 + 128) * 5 / 4).contains(&many.saved_bytes()), "{many:?}");
        assert!(few.saved_bytes() < many.saved_bytes() && few.forward_scratch() < many.forward_scratch());
        assert!(few.backward_scratch() < many.backward_scratch());
    }
}

#[test]
fn rows_that_an_op_does_not_take_are_refused_in_its_name() {
    let mut dispatcher = dispatcher();
    let mut strict = program(&mut dispatcher, &Recipe::DELAYED, false);
    let error = strict.sized(&mut dispatcher, 12).unwrap_err().to_string();
    assert!(error.contains("0 (first)") && error.contains("a multiple of 8 for FP8 (append 4 rows"), "{error}");
    assert!(strict.all_sized().is_empty());
    let mut padded = program(&mut dispatcher, &Recipe::DELAYED, true);
    assert_eq!(padded.sized(&mut dispatcher, 12).unwrap().rows(), 12);
}
