//! Delayed scaling between steps: all scales of a direction from their histories, in one launch.
//!
//! Forward scales are due when the outermost autocast region ends, backward scales when the region's first FP8 layer
//! has finished its backward. The binding calls this module once per device. If ranks reduce maxima, the binding first
//! gathers the maxima of a bucket into one tensor, reduces it, and passes it to the update.

use std::sync::Arc;

use te_fast_kernels::Fp8;

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::ops::scale_update::{AmaxChoice, LiveAmax, ScaleEntry, ScaleUpdatePlan, gather_amax};
use crate::recipe::definition::{AmaxAlgorithm, Recipe};
use crate::recipe::slots::{AmaxSlots, Bucket, Direction};
use crate::runtime::dispatcher::Dispatcher;
use crate::runtime::lane::Place;

/// The slots of a bucket whose maxima [`gather`] wrote. They live as long as this does.
#[derive(Debug)]
pub struct Gathered {
    bucket: Arc<Bucket>,
    /// With the number of the first tensor.
    members: Vec<(Arc<AmaxSlots>, u32)>,
}

impl Gathered {
    /// The bucket.
    #[must_use]
    pub fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    /// The slots that were not replaced meanwhile.
    fn current(&self) -> impl Iterator<Item = &(Arc<AmaxSlots>, u32)> {
        self.members.iter().filter(|(slots, _)| !slots.is_retired())
    }
}

/// The maxima of a bucket, reduced over ranks.
#[derive(Clone, Copy, Debug)]
pub struct Reduced<'a> {
    /// Whose.
    pub gathered: &'a Gathered,
    /// f32 `(bucket.tensors())`, as [`gather`] wrote them and the ranks reduced them.
    pub maxima: DevPtr<'a>,
}

/// Gathers the live maxima of a bucket's slots in `maxima`, f32 `(bucket.tensors())`. For freed slots it writes 0; with
/// `keeps_gone` it leaves the number that the caller has written there to mark them for other ranks. The bucket's
/// device must be current.
///
/// # Errors
/// A launch's refusal.
pub fn gather(
    dispatcher: &mut Dispatcher,
    bucket: &Arc<Bucket>,
    place: Place,
    maxima: DevPtr<'_>,
    keeps_gone: bool,
) -> Result<Gathered> {
    let mut members = Vec::with_capacity(bucket.members().len());
    let mut without = Vec::new();
    for member in bucket.members() {
        match member.slots() {
            Some(slots) => members.push((slots, member.first)),
            None if keeps_gone && member.is_gone() => {}
            None => without.push(LiveAmax { live: DevPtr::null(), first: member.first, count: member.count }),
        }
    }
    let live =
        members.iter().map(|(slots, first)| LiveAmax { live: slots.history(), first: *first, count: slots.count() });
    let live: Vec<_> = live.chain(without).collect();
    gather_amax(&mut dispatcher.target(place)?, &live, maxima)?;
    Ok(Gathered { bucket: Arc::clone(bucket), members })
}

/// How a recipe makes scales from maxima.
#[derive(Clone, Copy, Debug)]
struct Rule {
    choice: AmaxChoice,
    margin: f32,
    fp8: Fp8,
}

impl Rule {
    fn new(direction: Direction, recipe: &Recipe) -> Self {
        let choice = match recipe.delayed.algorithm {
            AmaxAlgorithm::Max => AmaxChoice::Max,
            AmaxAlgorithm::MostRecent => AmaxChoice::MostRecent,
        };
        Self { choice, margin: recipe.delayed.margin as f32, fp8: direction.fp8_of(recipe) }
    }
}

/// Histories that are rolled in the same way.
struct Launch<'a> {
    plan: ScaleUpdatePlan,
    history_len: u32,
    choice: AmaxChoice,
    entries: Vec<ScaleEntry<'a>>,
}

/// Updates the scales of every layer on `place.device` that ran in `direction` since the last update, and those of the
/// buckets of that device in `reduced`, from the reduced maxima. The device must be current.
///
/// # Errors
/// A launch's refusal; the layers are then still due.
pub fn update(dispatcher: &mut Dispatcher, direction: Direction, place: Place, reduced: &[Reduced<'_>]) -> Result<()> {
    let of_this_device = || reduced.iter().filter(|reduced| reduced.gathered.bucket.device == place.device);
    of_this_device().flat_map(|reduced| reduced.gathered.current()).for_each(|(slots, _)| slots.clear_ran());
    let mut due = Vec::new();
    dispatcher.autocast.take_due(direction, place.device, |slots, recipe| {
        due.push((slots, Rule::new(direction, recipe)));
    });
    let done = launch(dispatcher, direction, place, of_this_device(), &due);
    match done {
        Ok(0) => {}
        Ok(_) if direction == Direction::Forward => dispatcher.forward_generation += 1,
        Ok(_) => {}
        Err(_) => {
            // Those that were updated have a zero in the live row, for which another update is the identity.
            let all = of_this_device().flat_map(|reduced| reduced.gathered.current()).map(|(slots, _)| slots);
            all.chain(due.iter().map(|(slots, _)| slots)).for_each(|slots| dispatcher.autocast.mark_ran(slots));
        }
    }
    done.map(drop)
}

/// Updates forward scales that a graph has used under one recipe, all on `place.device`. The device must be current.
///
/// # Errors
/// A launch's refusal; the scales are then still due.
pub fn update_used(dispatcher: &mut Dispatcher, recipe: &Recipe, place: Place, used: &[Arc<AmaxSlots>]) -> Result<()> {
    let mut launches = Vec::with_capacity(1);
    let slots = used.iter().map(|slots| (&**slots, DevPtr::null()));
    add(&mut launches, Rule::new(Direction::Forward, recipe), slots)?;
    for Launch { plan, entries, .. } in &launches {
        plan.run(&mut dispatcher.target(place)?, entries)?;
    }
    for slots in used {
        slots.clear_ran();
    }
    dispatcher.forward_generation += 1;
    Ok(())
}

/// Launches the updates; returns their number.
fn launch<'a>(
    dispatcher: &mut Dispatcher,
    direction: Direction,
    place: Place,
    reduced: impl Iterator<Item = &'a Reduced<'a>>,
    due: &'a [(Arc<AmaxSlots>, Rule)],
) -> Result<usize> {
    let mut launches: Vec<Launch<'a>> = Vec::with_capacity(1);
    for Reduced { gathered, maxima } in reduced {
        let rule = Rule::new(direction, &gathered.bucket.recipe);
        let slots = gathered.current().map(|(slots, first)| (&**slots, maxima.offset(4 * *first as usize)));
        add(&mut launches, rule, slots)?;
    }
    for (slots, rule) in due {
        add(&mut launches, *rule, std::iter::once((&**slots, DevPtr::null())))?;
    }
    for Launch { plan, entries, .. } in &launches {
        plan.run(&mut dispatcher.target(place)?, entries)?;
    }
    Ok(launches.len())
}

/// Adds slots of one recipe, each with its reduced maxima.
fn add<'a>(
    launches: &mut Vec<Launch<'a>>,
    Rule { choice, margin, fp8 }: Rule,
    members: impl Iterator<Item = (&'a AmaxSlots, DevPtr<'a>)>,
) -> Result<()> {
    let max_scaled = ScaleUpdatePlan::new(1, choice, margin)?.max_scaled(fp8);
    for (slots, reduced) in members {
        let entry =
            ScaleEntry { history: slots.history(), scale: slots.scale(), reduced, count: slots.count(), max_scaled };
        push(launches, entry, (slots.history_len(), choice, margin))?;
    }
    Ok(())
}

/// Adds an entry to the launch of its kind.
fn push<'a>(
    launches: &mut Vec<Launch<'a>>,
    entry: ScaleEntry<'a>,
    (history_len, choice, margin): (u32, AmaxChoice, f32),
) -> Result<()> {
    let alike = |known: &&mut Launch<'_>| (known.history_len, known.choice) == (history_len, choice);
    if let Some(launch) = launches.iter_mut().find(alike) {
        launch.entries.push(entry);
        return Ok(());
    }
    let plan = ScaleUpdatePlan::new(history_len as usize, choice, margin)?;
    launches.push(Launch { plan, history_len, choice, entries: vec![entry] });
    Ok(())
}

#[cfg(test)]
#[path = "update_tests.rs"]
mod tests;
