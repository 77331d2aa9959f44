use proptest::prelude::*;

use super::*;
use crate::kernel::DevPtr;
use crate::recipe::Delayed;
use crate::tensor::DType;

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
    state.register(direction, recipe, &history, &scale, Box::new(memory), None).unwrap()
}

fn local() -> Recipe {
    Recipe { delayed: Delayed { reduce_amax: false, ..Delayed::DEFAULT }, ..Recipe::DELAYED }
}

#[test]
fn equal_content_keeps_the_epoch_and_any_change_moves_it() {
    let mut state = AutocastState::default();
    assert_eq!(state.current().epoch, 0);
    let former = state.enter(&ON).unwrap();
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
            let former = state.enter(&request).unwrap();
            let epoch = state.current().epoch;
            assert_eq!(seen.contains(&epoch), seen.last() == Some(&epoch));
            if seen.last() != Some(&epoch) {
                seen.push(epoch);
            }
            state.exit(&former, true);
        }
    }
    state.enter(&ON).unwrap();
    assert_eq!(state.current().epoch, epoch);
    state.enter(&OFF).unwrap();
    assert_eq!(state.current().epoch, 0);
}

#[test]
fn nested_regions_restore_and_the_first_module_flag_follows_the_snapshot() {
    let mut state = AutocastState::default();
    let outside = state.enter(&ON).unwrap();
    assert!(state.current().is_first_fp8_module);
    let outer = state.enter(&OFF).unwrap();
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
    assert!(state.enter(&missing).is_err());
    let mut recipe = Recipe::DELAYED;
    recipe.delayed.history_len = 0;
    assert!(state.enter(&Request { recipe: Some(recipe), ..ON }).is_err());
    assert_eq!((state.depth(), *state.current()), (0, Region::HIGH_PRECISION));
}

#[test]
fn only_slots_that_ran_are_due_and_they_die_with_their_owner() {
    let mut state = AutocastState::default();
    let first = slots_of(&mut state, Direction::Forward, local());
    let second = slots_of(&mut state, Direction::Forward, local());
    assert!(first.id() < second.id());
    let former = state.enter(&ON).unwrap();
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
    let new = state.register(Direction::Backward, recipe, &history, &scale, Box::new(memory), Some(&old)).unwrap();
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
    let outer = state.enter(&ON).unwrap();
    let inner = state.enter(&ON).unwrap();
    assert_eq!(state.exit(&inner, true), Due::Nothing);
    assert_eq!(state.exit(&outer, false), Due::Nothing);
    let former = state.enter(&OFF).unwrap();
    assert_eq!(state.exit(&former, false), Due::Nothing);
    let calibrating = Request { calibrating: true, enabled: false, ..ON };
    let former = state.enter(&calibrating).unwrap();
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
        assert!(
            state.register(Direction::Forward, Recipe::DELAYED, &history, &scale, Box::new(leaked()), None).is_err()
        );
    }
    let history = view(DType::F32, &[4, 3]);
    assert!(state.register(Direction::Forward, Recipe::CURRENT, &history, &scale, Box::new(leaked()), None).is_err());
}

/// Runs `body` in a thread of its own.
fn elsewhere<T: Send>(state: &mut AutocastState, body: impl FnOnce(&mut AutocastState) -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(|| body(state)).join().unwrap())
}

const BLOCK: Request = Request { recipe: Some(Recipe::BLOCK), ..ON };

#[test]
fn a_thread_that_has_entered_no_region_is_in_that_of_another() {
    let mut state = AutocastState::default();
    let former = state.enter(&ON).unwrap();
    let inside = *state.current();
    assert_eq!(elsewhere(&mut state, |state| (*state.current(), state.depth())), (inside, 1));
    assert!(elsewhere(&mut state, AutocastState::take_first_fp8_module));
    assert!(!state.take_first_fp8_module());
    // A region of its own inside of that one, which is not the outermost.
    let slots = slots_of(&mut state, Direction::Forward, Recipe::DELAYED);
    state.mark_ran(&slots);
    let seen = elsewhere(&mut state, |state| {
        let former = state.enter(&BLOCK).unwrap();
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
    let mine = state.enter(&ON).unwrap();
    let theirs = elsewhere(&mut state, |state| state.enter(&BLOCK).unwrap());
    assert_eq!(state.current().recipe, Recipe::DELAYED);
    state.exit(&mine, false);
    // Their region is still in force, and not theirs alone: nobody else is in one, so that it is the outermost.
    assert_eq!((state.current().recipe, state.depth()), (Recipe::BLOCK, 1));
    let slots = slots_of(&mut state, Direction::Forward, Recipe::DELAYED);
    state.mark_ran(&slots);
    // A region may be left by another thread than the one that entered it.
    assert_eq!(state.exit(&theirs, true), Due::Ran);
    assert_eq!((state.current().epoch, state.depth()), (0, 0));

    let theirs = elsewhere(&mut state, |state| state.enter(&BLOCK).unwrap());
    let mine = state.enter(&ON).unwrap();
    state.exit(&theirs, false);
    assert_eq!((state.current().recipe, state.depth()), (Recipe::DELAYED, 1));
    state.exit(&mine, false);
    assert_eq!((state.current().epoch, state.depth()), (0, 0));
}

#[test]
fn what_was_set_without_a_region_is_what_the_next_one_is_in() {
    let mut state = AutocastState::default();
    let slots = slots_of(&mut state, Direction::Forward, Recipe::DELAYED);
    state.set(&ON).unwrap();
    state.set_depth(1);
    let former = state.enter(&BLOCK).unwrap();
    state.mark_ran(&slots);
    assert_eq!((state.depth(), state.exit(&former, true)), (2, Due::Nothing));
    assert_eq!((state.current().recipe, state.depth()), (Recipe::DELAYED, 1));
    // So is that of another thread, as backward's is where a forward is run again.
    let due = elsewhere(&mut state, |state| {
        let former = state.enter(&BLOCK).unwrap();
        state.exit(&former, true)
    });
    assert_eq!((due, state.depth()), (Due::Nothing, 1));
    state.set_depth(0);
    state.set(&OFF).unwrap();
    assert_eq!(state.current().epoch, 0);
}

#[test]
fn a_region_is_repeated_by_the_thread_that_asks() {
    let mut state = AutocastState::default();
    let former = state.enter(&BLOCK).unwrap();
    let recorded = *state.current();
    state.exit(&former, false);
    let outer = state.enter(&ON).unwrap();
    elsewhere(&mut state, |state| {
        let former = state.repeat(&recorded);
        assert_eq!(state.current().recipe, Recipe::BLOCK);
        state.exit(&former, false);
        assert_eq!(state.current().recipe, Recipe::DELAYED);
        // What is set without entering holds for whoever sees that region.
        state.set(&BLOCK).unwrap();
    });
    assert_eq!((state.current().recipe, state.depth()), (Recipe::BLOCK, 1));
    state.exit(&outer, false);
    assert_eq!((state.current().epoch, state.depth()), (0, 0));
}

#[test]
fn a_recorded_region_is_that_of_its_thread() {
    let mut state = AutocastState::default();
    let slots = slots_of(&mut state, Direction::Forward, Recipe::DELAYED);
    let theirs = elsewhere(&mut state, |state| state.enter(&ON).unwrap());
    let recorded = state.hold(&BLOCK).unwrap();
    assert_eq!((state.current().recipe, state.held()), (Recipe::BLOCK, (true, true)));
    assert_eq!(elsewhere(&mut state, AutocastState::held), (false, false));
    state.exit(&theirs, false);
    assert_eq!((state.current().recipe, state.held()), (Recipe::BLOCK, (true, true)));
    state.take_back(&recorded);
    assert!(!state.held().0);
    // The other thread's region was seen before; nobody is in one now.
    assert_eq!((state.current().epoch, state.depth()), (0, 0));

    // Regions inside are the outermost still, also where high precision was recorded.
    let recorded = state.hold(&OFF).unwrap();
    let inner = state.enter(&ON).unwrap();
    state.mark_ran(&slots);
    assert_eq!(state.exit(&inner, true), Due::Ran);
    assert!(state.held().0);
    state.take_back(&recorded);
    assert_eq!((state.current().epoch, state.held()), (0, (false, false)));
}

proptest! {
    /// Any well-nested sequence of regions ends where it began, and on the way the region is the innermost one's.
    #[test]
    fn regions_nest(depth in 1_usize..6, kinds in prop::collection::vec(0_usize..4, 6)) {
        let requests = [OFF, ON, Request { recipe: Some(Recipe::BLOCK), ..ON }, Request { calibrating: true, ..ON }];
        let mut state = AutocastState::default();
        let mut former = Vec::new();
        for &kind in &kinds[..depth] {
            former.push((state.enter(&requests[kind]).unwrap(), kind));
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
