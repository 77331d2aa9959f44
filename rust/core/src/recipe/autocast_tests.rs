use proptest::prelude::*;

use super::*;
use crate::base::dtype::DType;
use crate::base::pointer::DevPtr;
use crate::recipe::definition::Delayed;
use crate::recipe::slots::Member;

const OFF: Request = Request { enabled: false, calibrating: false, graph: false, recipe: None, group: 0 };
const ON: Request = Request { enabled: true, recipe: Some(Recipe::DELAYED), ..OFF };

struct Leaked(DevPtr<'static>, DevPtr<'static>);

impl SlotMemory for Leaked {
    fn history(&self) -> DevPtr<'_> {
        self.0
    }

    fn scale(&self) -> DevPtr<'_> {
        self.1
    }
}

fn leaked() -> Leaked {
    Leaked(
        DevPtr::from_slice(Box::leak(Box::new([0.0_f32; 12]))),
        DevPtr::from_slice(Box::leak(Box::new([1.0_f32; 3]))),
    )
}

fn slots_of(state: &mut AutocastState, direction: Direction, recipe: Recipe) -> Arc<AmaxSlots> {
    let memory = leaked();
    let history = TensorView::new(memory.0, Device::Cpu, DType::F32, &[4, 3], None).unwrap();
    let scale = TensorView::new(memory.1, Device::Cpu, DType::F32, &[3], None).unwrap();
    let plan = state.plan_slots(direction, recipe, 0, &history, &scale).unwrap();
    state.register(plan, Box::new(memory), None)
}

fn local() -> Recipe {
    Recipe { delayed: Delayed { reduce_amax: false, ..Delayed::DEFAULT }, ..Recipe::DELAYED }
}

#[test]
fn equal_content_keeps_the_epoch_and_any_change_moves_it() {
    let mut state = AutocastState::default();
    assert_eq!(state.current().epoch, 0);
    let former = state.enter(&ON, None).unwrap();
    let epoch = state.current().epoch;
    assert_ne!(epoch, 0);
    assert_eq!(state.exit(&former, true), Due::Nothing);
    assert_eq!(state.current().epoch, 0);

    let mut seen = vec![0, epoch];
    for request in [
        Request { recipe: Some(Recipe::CURRENT), ..ON },
        Request { recipe: Some(Recipe::BLOCK), ..ON },
        Request { calibrating: true, ..ON },
        Request { calibrating: true, enabled: false, ..ON },
        Request { group: 77, ..ON },
        Request { recipe: Some(local()), ..ON },
    ] {
        for _ in 0..2 {
            let former = state.enter(&request, None).unwrap();
            let epoch = state.current().epoch;
            assert_eq!(seen.contains(&epoch), seen.last() == Some(&epoch));
            if seen.last() != Some(&epoch) {
                seen.push(epoch);
            }
            state.exit(&former, true);
        }
    }
    state.enter(&ON, None).unwrap();
    assert_eq!(state.current().epoch, epoch);
    state.enter(&OFF, None).unwrap();
    assert_eq!(state.current().epoch, 0);
}

#[test]
fn nested_regions_restore_and_the_first_module_flag_follows_the_snapshot() {
    let mut state = AutocastState::default();
    let outside = state.enter(&ON, None).unwrap();
    assert!(state.current().is_first_fp8_module);
    let outer = state.enter(&OFF, None).unwrap();
    assert!(state.take_first_fp8_module());
    assert!(!state.take_first_fp8_module());
    assert_eq!(state.exit(&outer, false), Due::Nothing);
    assert!(state.current().enabled && state.take_first_fp8_module());
    assert_eq!(state.depth(), 1);
    state.exit(&outside, true);
    assert_eq!((state.depth(), *state.current()), (0, Region::HIGH_PRECISION));
}

#[test]
fn a_failed_entry_changes_nothing() {
    let mut state = AutocastState::default();
    let missing = Request { enabled: true, ..OFF };
    assert!(state.enter(&missing, None).is_err());
    let mut recipe = Recipe::DELAYED;
    recipe.delayed.history_len = 0;
    assert!(state.enter(&Request { recipe: Some(recipe), ..ON }, None).is_err());
    assert_eq!((state.depth(), *state.current()), (0, Region::HIGH_PRECISION));
}

#[test]
fn only_slots_that_ran_are_due_and_they_die_with_their_owner() {
    let mut state = AutocastState::default();
    let first = slots_of(&mut state, Direction::Forward, local());
    let second = slots_of(&mut state, Direction::Forward, local());
    assert!(first.id() < second.id());
    let former = state.enter(&ON, None).unwrap();
    state.mark_ran(&second);
    assert_eq!(state.exit(&former, true), Due::Ran);
    let mut due = Vec::new();
    assert_eq!(state.due_device(Direction::Forward), Some(Device::Cpu));
    state.take_due(Direction::Forward, Device::Cuda(0), |slots, _| due.push(slots.id()));
    assert!(due.is_empty() && state.due(Direction::Forward) == Due::Ran);
    state.take_due(Direction::Forward, Device::Cpu, |slots, _| due.push(slots.id()));
    assert_eq!(due, [second.id()]);
    assert_eq!(state.due(Direction::Forward), Due::Nothing);

    drop(second);
    assert!(!first.ran());
    assert_eq!(state.registered(Direction::Forward), 1);
}

#[test]
fn slots_that_were_replaced_pass_on_that_they_ran() {
    let mut state = AutocastState::default();
    let old = slots_of(&mut state, Direction::Backward, local());
    let memory = leaked();
    let history = TensorView::new(memory.0, Device::Cpu, DType::F32, &[4, 3], None).unwrap();
    let scale = TensorView::new(memory.1, Device::Cpu, DType::F32, &[3], None).unwrap();
    let recipe = Recipe { delayed: Delayed { margin: 1, ..local().delayed }, ..local() };
    let plan = state.plan_slots(Direction::Backward, recipe, 0, &history, &scale).unwrap();
    let new = state.register(plan, Box::new(memory), Some(&old));
    state.mark_ran(&old);
    let mut due = Vec::new();
    state.take_due(Direction::Backward, Device::Cpu, |slots, recipe| due.push((slots.id(), recipe.delayed.margin)));
    assert_eq!(due, [(new.id(), 1)]);
    assert!(!old.ran());
}

#[test]
fn reducing_and_custom_recipes_are_due_at_every_exit_until_their_layer_dies() {
    let mut state = AutocastState::default();
    let slots = slots_of(&mut state, Direction::Backward, Recipe::DELAYED);
    assert_eq!(state.due(Direction::Backward), Due::Unconditional);
    assert_eq!(state.due(Direction::Forward), Due::Nothing);
    drop(slots);
    state.take_due(Direction::Backward, Device::Cpu, |_, _| {});
    assert_eq!(state.due(Direction::Backward), Due::Nothing);
}

#[test]
fn only_the_outermost_exit_of_a_region_that_updates_is_due() {
    let mut state = AutocastState::default();
    let slots = slots_of(&mut state, Direction::Forward, local());
    state.mark_ran(&slots);
    let outer = state.enter(&ON, None).unwrap();
    let inner = state.enter(&ON, None).unwrap();
    assert_eq!(state.exit(&inner, true), Due::Nothing);
    assert_eq!(state.exit(&outer, false), Due::Nothing);
    let former = state.enter(&OFF, None).unwrap();
    assert_eq!(state.exit(&former, false), Due::Nothing);
    let calibrating = Request { calibrating: true, enabled: false, ..ON };
    let former = state.enter(&calibrating, None).unwrap();
    assert_eq!(state.exit(&former, true), Due::Ran);
    state.reset();
    assert_eq!(state.due(Direction::Forward), Due::Nothing);
}

#[test]
fn wrong_buffers_are_refused() {
    let mut state = AutocastState::default();
    let mut memory = vec![0.0_f32; 12];
    let data = DevPtr::from_slice(&mut memory);
    let view = |dtype, shape: &[i64]| TensorView::new(data, Device::Cpu, dtype, shape, None).unwrap();
    let scale = view(DType::F32, &[3]);
    for (history, scale) in [
        (view(DType::F32, &[4, 2]), scale),
        (view(DType::F32, &[12]), scale),
        (view(DType::F16, &[4, 3]), scale),
        (view(DType::F32, &[0, 3]), scale),
        (view(DType::F32, &[4, 3]), view(DType::F32, &[3, 1])),
    ] {
        assert!(state.plan_slots(Direction::Forward, Recipe::DELAYED, 0, &history, &scale).is_err());
    }
    let history = view(DType::F32, &[4, 3]);
    assert!(state.plan_slots(Direction::Forward, Recipe::CURRENT, 0, &history, &scale).is_err());
}

/// Runs `body` in a thread of its own.
fn elsewhere<T: Send>(state: &mut AutocastState, body: impl FnOnce(&mut AutocastState) -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(|| body(state)).join().unwrap())
}

const BLOCK: Request = Request { recipe: Some(Recipe::BLOCK), ..ON };

#[test]
fn a_thread_that_has_entered_no_region_is_in_that_of_another() {
    let mut state = AutocastState::default();
    let former = state.enter(&ON, None).unwrap();
    let inside = *state.current();
    assert_eq!(elsewhere(&mut state, |state| (*state.current(), state.depth())), (inside, 1));
    assert!(elsewhere(&mut state, AutocastState::take_first_fp8_module));
    assert!(!state.take_first_fp8_module());
    // A region of its own inside of that one, which is not the outermost.
    let slots = slots_of(&mut state, Direction::Forward, Recipe::DELAYED);
    state.mark_ran(&slots);
    let seen = elsewhere(&mut state, |state| {
        let former = state.enter(&BLOCK, None).unwrap();
        let own = state.current().recipe;
        assert_eq!((state.depth(), state.exit(&former, true)), (2, Due::Nothing));
        (own, state.current().recipe)
    });
    assert_eq!(seen, (Recipe::BLOCK, Recipe::DELAYED));
    assert_eq!((state.current().epoch, state.depth()), (inside.epoch, 1));
    state.exit(&former, false);
    assert_eq!((state.current().epoch, state.depth()), (0, 0));
}

#[test]
fn threads_do_not_leave_each_others_regions() {
    let mut state = AutocastState::default();
    let mine = state.enter(&ON, None).unwrap();
    let theirs = elsewhere(&mut state, |state| state.enter(&BLOCK, None).unwrap());
    assert_eq!(state.current().recipe, Recipe::DELAYED);
    state.exit(&mine, false);
    // Their region is still in force, and not theirs alone: nobody else is in one, so that it is the outermost.
    assert_eq!((state.current().recipe, state.depth()), (Recipe::BLOCK, 1));
    let slots = slots_of(&mut state, Direction::Forward, Recipe::DELAYED);
    state.mark_ran(&slots);
    // A region may be left by another thread than the one that entered it.
    assert_eq!(state.exit(&theirs, true), Due::Ran);
    assert_eq!((state.current().epoch, state.depth()), (0, 0));

    let theirs = elsewhere(&mut state, |state| state.enter(&BLOCK, None).unwrap());
    let mine = state.enter(&ON, None).unwrap();
    state.exit(&theirs, false);
    assert_eq!((state.current().recipe, state.depth()), (Recipe::DELAYED, 1));
    state.exit(&mine, false);
    assert_eq!((state.current().epoch, state.depth()), (0, 0));
}

#[test]
fn what_was_set_without_a_region_is_what_the_next_one_is_in() {
    let mut state = AutocastState::default();
    let slots = slots_of(&mut state, Direction::Forward, Recipe::DELAYED);
    state.set(&ON, None).unwrap();
    state.set_depth(1);
    let former = state.enter(&BLOCK, None).unwrap();
    state.mark_ran(&slots);
    assert_eq!((state.depth(), state.exit(&former, true)), (2, Due::Nothing));
    assert_eq!((state.current().recipe, state.depth()), (Recipe::DELAYED, 1));
    // So is that of another thread, as backward's is where a forward is run again.
    let due = elsewhere(&mut state, |state| {
        let former = state.enter(&BLOCK, None).unwrap();
        state.exit(&former, true)
    });
    assert_eq!((due, state.depth()), (Due::Nothing, 1));
    state.set_depth(0);
    state.set(&OFF, None).unwrap();
    assert_eq!(state.current().epoch, 0);
}

#[test]
fn a_region_is_repeated_by_the_thread_that_asks() {
    let mut state = AutocastState::default();
    let former = state.enter(&BLOCK, None).unwrap();
    let recorded = *state.current();
    state.exit(&former, false);
    let outer = state.enter(&ON, None).unwrap();
    elsewhere(&mut state, |state| {
        let former = state.repeat(&recorded);
        assert_eq!(state.current().recipe, Recipe::BLOCK);
        state.exit(&former, false);
        assert_eq!(state.current().recipe, Recipe::DELAYED);
        // What is set without entering holds for whoever sees that region.
        state.set(&BLOCK, None).unwrap();
    });
    assert_eq!((state.current().recipe, state.depth()), (Recipe::BLOCK, 1));
    state.exit(&outer, false);
    assert_eq!((state.current().epoch, state.depth()), (0, 0));
}

#[test]
fn a_recorded_region_is_that_of_its_thread() {
    let mut state = AutocastState::default();
    let slots = slots_of(&mut state, Direction::Forward, Recipe::DELAYED);
    let theirs = elsewhere(&mut state, |state| state.enter(&ON, None).unwrap());
    let recorded = state.hold(&BLOCK, None).unwrap();
    assert_eq!((state.current().recipe, state.held()), (Recipe::BLOCK, (true, true)));
    assert_eq!(elsewhere(&mut state, AutocastState::held), (false, false));
    state.exit(&theirs, false);
    assert_eq!((state.current().recipe, state.held()), (Recipe::BLOCK, (true, true)));
    state.take_back(&recorded);
    assert!(!state.held().0);
    // The other thread's region was seen before; nobody is in one now.
    assert_eq!((state.current().epoch, state.depth()), (0, 0));

    // Regions inside are the outermost still, also where high precision was recorded.
    let recorded = state.hold(&OFF, None).unwrap();
    let inner = state.enter(&ON, None).unwrap();
    state.mark_ran(&slots);
    assert_eq!(state.exit(&inner, true), Due::Ran);
    assert!(state.held().0);
    state.take_back(&recorded);
    assert_eq!((state.current().epoch, state.held()), (0, (false, false)));
}

#[test]
fn what_a_region_was_given_is_handed_back_when_nothing_needs_it() {
    let mut state = AutocastState::default();
    let (first, second): (Given, Given) = (Arc::new(1_u8), Arc::new(2_u8));
    let number = |state: &mut AutocastState| state.given().map(|given| *given.downcast_ref::<u8>().unwrap());
    let outer = state.enter(&ON, Some(first)).unwrap();
    let inner = state.enter(&BLOCK, Some(second)).unwrap();
    assert_eq!(number(&mut state), Some(2));
    // A thread that works for this one sees the same, and a region of its own puts it back.
    elsewhere(&mut state, |state| {
        let former = state.enter(&OFF, None).unwrap();
        assert_eq!(number(state), None);
        state.exit(&former, false);
        assert_eq!(number(state), Some(2));
    });
    while state.pop_released().is_some() {}
    // Repeating a region leaves the objects as they are.
    let repeated = state.repeat(&Region::HIGH_PRECISION);
    assert_eq!(number(&mut state), Some(2));
    state.exit(&repeated, false);
    state.exit(&inner, false);
    assert_eq!(number(&mut state), Some(1));
    drop((inner, repeated));
    let mut released = Vec::new();
    while let Some(given) = state.pop_released() {
        released.push(given);
    }
    assert!(released.iter().all(|given| given.downcast_ref::<u8>() == Some(&2)));
    assert_eq!(Arc::strong_count(&released[0]), released.len());
    state.exit(&outer, false);
    assert_eq!((number(&mut state), state.pop_released().is_some()), (None, true));
}

#[test]
fn a_phase_of_recomputation_is_that_of_its_thread_and_of_those_that_work_for_it() {
    let mut state = AutocastState::default();
    assert!(!state.recomputes());
    let own = state.enter_phase();
    assert_eq!(state.phase_thread(), Some(own));
    assert_eq!(elsewhere(&mut state, AutocastState::phase_thread), Some(own));
    // A thread in a region of its own works for nobody.
    elsewhere(&mut state, |state| {
        let former = state.enter(&ON, None).unwrap();
        assert!(!state.recomputes());
        let theirs = state.enter_phase();
        assert_eq!(state.phase_thread(), Some(theirs));
        assert_ne!(theirs, own);
        state.leave_phase(theirs);
        state.exit(&former, false);
    });
    state.enter_phase();
    state.leave_phase(own);
    assert!(state.recomputes());
    state.leave_phase(own);
    assert!(!state.recomputes());
}

/// For each bucket, its group and the ids of its slots.
fn buckets_of(state: &mut AutocastState) -> Vec<(u64, Vec<u64>)> {
    let ids =
        |bucket: &Arc<Bucket>| bucket.members().iter().filter_map(Member::slots).map(|slots| slots.id()).collect();
    state.buckets(Direction::Forward).iter().map(|bucket| (bucket.group, ids(bucket))).collect()
}

fn slots_in(state: &mut AutocastState, recipe: Recipe, group: u64, former: Option<&AmaxSlots>) -> Arc<AmaxSlots> {
    let memory = leaked();
    let history = TensorView::new(memory.0, Device::Cpu, DType::F32, &[4, 3], None).unwrap();
    let scale = TensorView::new(memory.1, Device::Cpu, DType::F32, &[3], None).unwrap();
    let plan = state.plan_slots(Direction::Forward, recipe, group, &history, &scale).unwrap();
    state.register(plan, Box::new(memory), former)
}

#[test]
fn buckets_hold_those_that_take_part_in_the_order_of_their_places() {
    let mut state = AutocastState::default();
    let [first, second, third, copy] = [0, 7, 0, 0].map(|group| slots_in(&mut state, Recipe::DELAYED, group, None));
    assert!(buckets_of(&mut state).is_empty());
    for slots in [&third, &second, &first, &third] {
        state.take_part(slots);
    }
    assert_eq!(buckets_of(&mut state), [(0, vec![third.id(), first.id()]), (7, vec![second.id()])]);
    assert_eq!(state.buckets(Direction::Forward)[0].tensors(), 6);
    assert!(state.buckets(Direction::Backward).is_empty());
    let known = Arc::as_ptr(&state.buckets(Direction::Forward)[0]);
    assert_eq!(Arc::as_ptr(&state.buckets(Direction::Forward)[0]), known, "made anew without a change");
    // Slots that take others' place have it, under another recipe or group, too; what ran is not asked.
    let moved = slots_in(&mut state, local(), 0, Some(&third));
    assert_eq!(buckets_of(&mut state), [(0, vec![moved.id()]), (7, vec![second.id()]), (0, vec![first.id()])]);
    let back = slots_in(&mut state, Recipe::DELAYED, 7, Some(&moved));
    assert_eq!(buckets_of(&mut state), [(7, vec![back.id(), second.id()]), (0, vec![first.id()])]);
    state.take_part(&copy);
    drop(second);
    first.withdraw();
    assert_eq!(buckets_of(&mut state), [(7, vec![back.id()]), (0, vec![copy.id()])]);
    state.mark_all_ran(Direction::Forward);
    let mut due = Vec::new();
    state.take_due(Direction::Forward, Device::Cpu, |slots, _| due.push(slots.id()));
    due.sort_unstable();
    assert_eq!(due, [copy.id(), back.id()]);
}

/// Tensors of the first bucket.
fn tensors_of(state: &mut AutocastState) -> u32 {
    state.buckets(Direction::Forward).first().map_or(0, |bucket| bucket.tensors())
}

#[test]
fn slots_that_are_gone_keep_their_place_until_they_are_gone_on_all_ranks() {
    let mut state = AutocastState::default();
    let [first, second, third] = [0; 3].map(|group| slots_in(&mut state, Recipe::DELAYED, group, None));
    for slots in [&first, &second, &third] {
        state.take_part(slots);
    }
    first.withdraw();
    drop(second);
    assert_eq!(buckets_of(&mut state), [(0, vec![third.id()])]);
    assert_eq!(tensors_of(&mut state), 9);
    let bucket = Arc::clone(&state.buckets(Direction::Forward)[0]);
    assert!(bucket.has_gone() && !bucket.is_gone());
    // Another rank has the first one, with no maximum; nobody has the second.
    let reduced = [0.0, 0.0, 0.0, -1.0, -1.0, -1.0, 2.0, 0.0, 0.0];
    state.forget_gone(Direction::Forward, &bucket, Some(&reduced));
    assert_eq!(tensors_of(&mut state), 6);
    assert_eq!(state.participants(Direction::Forward).len(), 1);
    let bucket = Arc::clone(&state.buckets(Direction::Forward)[0]);
    state.forget_gone(Direction::Forward, &bucket, None);
    assert_eq!(tensors_of(&mut state), 3);
    drop(third);
    assert_eq!(tensors_of(&mut state), 3);
    state.forget_all_gone(Direction::Forward);
    assert_eq!(tensors_of(&mut state), 0);
}

#[test]
fn ranks_agree_again_when_other_slots_take_part_and_not_when_the_same_are_registered_anew() {
    let mut state = AutocastState::default();
    let first = slots_in(&mut state, Recipe::DELAYED, 0, None);
    state.take_part(&first);
    assert!(!state.buckets(Direction::Forward)[0].is_agreed());
    state.buckets(Direction::Forward)[0].agree();
    let _anew = slots_in(&mut state, Recipe::DELAYED, 0, Some(&first));
    assert!(state.buckets(Direction::Forward)[0].is_agreed());
    let looks: Vec<_> = (0..20).filter(|_| state.buckets(Direction::Forward)[0].looks_for_gone()).collect();
    let second = slots_in(&mut state, Recipe::DELAYED, 0, None);
    state.take_part(&second);
    assert!(!state.buckets(Direction::Forward)[0].is_agreed());
    let others: Vec<_> = (20..40).filter(|_| state.buckets(Direction::Forward)[0].looks_for_gone()).collect();
    assert_eq!((looks, others), (vec![15], vec![31]));
}

proptest! {
    /// Any well-nested sequence of regions ends where it began, and on the way the region is the innermost one's.
    #[test]
    fn regions_nest(depth in 1_usize..6, kinds in prop::collection::vec(0_usize..4, 6)) {
        let requests = [OFF, ON, Request { recipe: Some(Recipe::BLOCK), ..ON }, Request { calibrating: true, ..ON }];
        let mut state = AutocastState::default();
        let mut former = Vec::new();
        for &kind in &kinds[..depth] {
            former.push((state.enter(&requests[kind], None).unwrap(), kind));
            prop_assert_eq!(state.current().enabled, requests[kind].enabled);
            prop_assert_eq!(state.depth() as usize, former.len());
        }
        while let Some((region, kind)) = former.pop() {
            state.exit(&region, requests[kind].enabled);
            prop_assert_eq!(*state.current(), region.region);
        }
        prop_assert_eq!(state.depth(), 0);
    }
}

#[test]
fn ranks_reduce_in_step_until_no_rank_has_slots() {
    let mut state = AutocastState::default();
    let [first, second] = [0; 2].map(|group| slots_in(&mut state, Recipe::DELAYED, group, None));
    for slots in [first, second] {
        state.take_part(&slots);
    }
    let mut exit_with = |reduced: &[f32]| {
        let bucket = Arc::clone(&state.buckets(Direction::Forward)[0]);
        state.forget_gone(Direction::Forward, &bucket, Some(reduced));
        state.take_due(Direction::Forward, Device::Cpu, |_, _| {});
        state.due(Direction::Forward)
    };
    // Both are gone here; another rank has the second one still.
    assert_eq!(exit_with(&[-1.0, -1.0, -1.0, 2.0, 0.0, 0.0]), Due::Unconditional);
    assert_eq!(exit_with(&[-1.0, -1.0, -1.0]), Due::Nothing);
}
