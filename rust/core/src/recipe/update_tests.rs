use super::*;
use crate::base::config::Config;
use crate::base::dtype::{DType, Device};
use crate::base::tensor::TensorView;
use crate::cuda::device::Stream;
use crate::recipe::slots::SlotMemory;

const HOST: Place = Place { device: Device::Cpu, stream: Stream(0) };
const HISTORY: i64 = 2;

struct Leaked(DevPtr<'static>, DevPtr<'static>);

impl SlotMemory for Leaked {
    fn history(&self) -> DevPtr<'_> {
        self.0
    }

    fn scale(&self) -> DevPtr<'_> {
        self.1
    }
}

/// Slots of one tensor for each of these maxima, which take part.
fn slots_of(dispatcher: &mut Dispatcher, maxima: &[f32], former: Option<&AmaxSlots>) -> Arc<AmaxSlots> {
    let mut history = maxima.to_vec();
    history.resize(2 * maxima.len(), 0.0);
    let memory = Leaked(
        DevPtr::from_slice(Box::leak(history.into_boxed_slice())),
        DevPtr::from_slice(Box::leak(vec![1.0_f32; maxima.len()].into_boxed_slice())),
    );
    let count = maxima.len() as i64;
    let history = TensorView::new(memory.0, Device::Cpu, DType::F32, &[HISTORY, count], None).unwrap();
    let scale = TensorView::new(memory.1, Device::Cpu, DType::F32, &[count], None).unwrap();
    let autocast = &mut dispatcher.autocast;
    let plan = autocast.plan_slots(Direction::Forward, Recipe::DELAYED, 0, &history, &scale).unwrap();
    let slots = autocast.register(plan, Box::new(memory), former);
    autocast.take_part(&slots);
    slots
}

fn values(pointer: DevPtr<'_>, count: usize) -> Vec<f32> {
    pointer.slice(count).to_vec()
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

#[test]
fn reduced_maxima_are_those_that_scales_come_from() {
    let mut dispatcher = dispatcher();
    let first = slots_of(&mut dispatcher, &[2.0, 0.0, 7.0], None);
    let second = slots_of(&mut dispatcher, &[0.5], None);
    let outside = slots_of(&mut dispatcher, &[4.0], None);
    outside.withdraw();
    let bucket = Arc::clone(&dispatcher.autocast.buckets(Direction::Forward)[0]);
    let mut memory = vec![f32::NAN; bucket.tensors() as usize];
    let maxima = DevPtr::from_slice(&mut memory);
    let gathered = gather(&mut dispatcher, &bucket, HOST, maxima, false).unwrap();
    assert_eq!(values(maxima, 4), [2.0, 0.0, 7.0, 0.5]);

    // Another rank has larger ones.
    maxima.slice_mut::<f32>(4).copy_from_slice(&[8.0, 1.0, 7.0, 0.5]);
    dispatcher.autocast.mark_ran(&outside);
    dispatcher.autocast.mark_ran(&first);
    update(&mut dispatcher, Direction::Forward, HOST, &[Reduced { gathered: &gathered, maxima }]).unwrap();
    assert_eq!(values(first.scale(), 3), [56.0, 448.0, 64.0]);
    assert_eq!(values(first.history(), 6), [0.0, 0.0, 0.0, 8.0, 1.0, 7.0]);
    assert_eq!(values(second.scale(), 1), [896.0]);
    assert_eq!(values(outside.scale(), 1), [112.0]);
    assert!(!first.ran() && !outside.ran());
    assert_eq!((dispatcher.forward_generation, dispatcher.trace.counters.launches), (1, 2));
}

#[test]
fn slots_that_go_leave_a_zero_and_those_that_took_their_place_meanwhile_are_let_alone() {
    let mut dispatcher = dispatcher();
    let first = slots_of(&mut dispatcher, &[2.0, 3.0], None);
    let second = slots_of(&mut dispatcher, &[0.5], None);
    let bucket = Arc::clone(&dispatcher.autocast.buckets(Direction::Forward)[0]);
    drop(first);
    let mut memory = vec![f32::NAN; 3];
    let maxima = DevPtr::from_slice(&mut memory);
    let gathered = gather(&mut dispatcher, &bucket, HOST, maxima, false).unwrap();
    assert_eq!(values(maxima, 3), [0.0, 0.0, 0.5]);

    let third = slots_of(&mut dispatcher, &[16.0], Some(&second));
    dispatcher.autocast.mark_ran(&third);
    update(&mut dispatcher, Direction::Forward, HOST, &[Reduced { gathered: &gathered, maxima }]).unwrap();
    assert_eq!(values(second.scale(), 1), [1.0]);
    assert_eq!(values(third.scale(), 1), [28.0]);
}

#[test]
fn slots_that_are_gone_are_told_from_those_that_have_no_maximum() {
    let mut dispatcher = dispatcher();
    let [first, second, third] = [2.0, 3.0, 0.0].map(|maximum| slots_of(&mut dispatcher, &[maximum], None));
    let bucket = Arc::clone(&dispatcher.autocast.buckets(Direction::Forward)[0]);
    assert!(!bucket.has_gone());
    drop(first);
    assert!(bucket.has_gone() && !bucket.is_gone());
    let _replaced = slots_of(&mut dispatcher, &[9.0], Some(&second));
    let mut memory = vec![-1.0_f32; 3];
    let maxima = DevPtr::from_slice(&mut memory);
    gather(&mut dispatcher, &bucket, HOST, maxima, true).unwrap();
    assert_eq!(values(maxima, 3), [-1.0, 0.0, 0.0]);
    drop(third);
    gather(&mut dispatcher, &bucket, HOST, maxima, false).unwrap();
    assert_eq!(values(maxima, 3), [0.0, 0.0, 0.0]);
}

#[test]
fn many_slots_are_gathered() {
    let mut dispatcher = dispatcher();
    let numbers: Vec<f32> = (0..2500).map(|number| number as f32).collect();
    let _slots: Vec<_> = numbers.iter().map(|&number| slots_of(&mut dispatcher, &[number], None)).collect();
    let bucket = Arc::clone(&dispatcher.autocast.buckets(Direction::Forward)[0]);
    let mut memory = vec![f32::NAN; 2500];
    let maxima = DevPtr::from_slice(&mut memory);
    gather(&mut dispatcher, &bucket, HOST, maxima, false).unwrap();
    assert_eq!(values(maxima, 2500), numbers);
    assert_eq!(dispatcher.trace.counters.launches, 3);
}
