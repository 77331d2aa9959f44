//! Delayed scaling between steps: all scales of a direction from their histories, in one launch.
//!
//! Forward's are due when the outermost autocast region ends, backward's when its first FP8 layer has finished its
//! backward. The binding calls this once per device that has any.

use std::sync::Arc;

use crate::autocast::{AmaxSlots, Direction, fp8_of};
use crate::dispatch::{Dispatcher, Place};
use crate::error::{Error, Result};
use crate::kernel::DevPtr;
use crate::ops::scale_update::{AmaxChoice, ScaleEntry, ScaleUpdatePlan};
use crate::recipe::AmaxAlgorithm;
use crate::tensor::{DType, TensorView};

/// Slots whose histories are rolled alike: one launch.
type Bucket = (ScaleUpdatePlan, Key, Vec<(Arc<AmaxSlots>, f32)>);
type Key = (u32, AmaxAlgorithm);

/// Updates the scales of every layer on `place.device` that ran in `direction` since the last update. The device
/// must be current.
///
/// # Errors
/// A launch's refusal; the layers are then due still.
pub fn update(dispatcher: &mut Dispatcher, direction: Direction, place: Place) -> Result<()> {
    let mut buckets: Vec<Bucket> = Vec::with_capacity(1);
    let mut failure = Ok(());
    dispatcher.autocast.take_due(direction, place.device, |slots, recipe| {
        let key = (slots.history_len(), recipe.delayed.algorithm);
        let choice = match recipe.delayed.algorithm {
            AmaxAlgorithm::Max => AmaxChoice::Max,
            AmaxAlgorithm::MostRecent => AmaxChoice::MostRecent,
        };
        match ScaleUpdatePlan::new(slots.history_len() as usize, choice, recipe.delayed.margin as f32) {
            Ok(plan) => {
                let entry = (slots, plan.max_scaled(fp8_of(recipe, direction)));
                match buckets.iter_mut().find(|(_, known, _)| *known == key) {
                    Some((_, _, entries)) => entries.push(entry),
                    None => buckets.push((plan, key, vec![entry])),
                }
            }
            Err(error) => failure = Err(error),
        }
    });
    failure?;
    for (done, (plan, _, slots)) in buckets.iter().enumerate() {
        if let Err(error) = launch(dispatcher, place, plan, slots) {
            let left = buckets[done..].iter().flat_map(|(_, _, slots)| slots);
            left.for_each(|(slots, _)| dispatcher.autocast.mark_ran(slots));
            return Err(error);
        }
    }
    if direction == Direction::Forward && !buckets.is_empty() {
        dispatcher.forward_generation += 1;
    }
    Ok(())
}

fn launch(
    dispatcher: &mut Dispatcher,
    place: Place,
    plan: &ScaleUpdatePlan,
    slots: &[(Arc<AmaxSlots>, f32)],
) -> Result<()> {
    let entries: Vec<ScaleEntry<'_>> = slots
        .iter()
        .map(|(slots, max_scaled)| ScaleEntry {
            history: slots.history(),
            scale: slots.scale(),
            reduced: DevPtr::null(),
            count: slots.count(),
            max_scaled: *max_scaled,
        })
        .collect();
    plan.run(&mut dispatcher.target(place)?, &entries)
}

/// Refuses a history and scales that do not belong together.
pub(crate) fn check_slots(history: &TensorView<'_>, scale: &TensorView<'_>) -> Result<()> {
    const OP: &str = "amax_slots";
    for (what, tensor) in [("amax_history", history), ("scale", scale)] {
        if tensor.dtype() != DType::F32 {
            return Err(Error::dtype(OP, what, DType::F32, tensor.dtype()));
        }
        if !tensor.is_contiguous() {
            return Err(Error::layout(OP, what, "contiguous", format!("strides {:?}", tensor.strides())));
        }
    }
    let (&[history_len, count], &[scales]) = (history.shape(), scale.shape()) else {
        let got = format!("{:?} and {:?}", history.shape(), scale.shape());
        return Err(Error::shape(OP, "(amax_history, scale)", "(history_len, tensors) and (tensors)", got));
    };
    if history_len < 1 || history_len > i64::from(u32::MAX) || count < 1 || count > i64::from(u32::MAX) {
        return Err(Error::shape(
            OP,
            "amax_history",
            "of at least one row and column",
            format!("{:?}", history.shape()),
        ));
    }
    if scales != count {
        return Err(Error::shape(OP, "scale", format!("{count} elements"), scales));
    }
    if history.device() != scale.device() {
        return Err(Error::device(OP, "scale", history.device(), scale.device()));
    }
    Ok(())
}
