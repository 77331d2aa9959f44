//! The autocast state: the innermost region, and the delayed-scaling buffers that are due for an update. Layers read
//! [`AutocastState::current`] on every call; a plan made under its epoch holds as long as the epoch does.
//!
//! Regions nest by snapshots: entering returns the former region, and leaving restores it, also out of order, as in
//! Transformer Engine. Threads have their own regions ([`crate::recipe::scopes`]); all threads share the buffers.

use std::sync::Arc;

use crate::base::dtype::Device;
use crate::base::error::{Error, Result};
use crate::base::tensor::TensorView;
use crate::recipe::definition::Recipe;
use crate::recipe::region::{Former, Given, Region, Request};
use crate::recipe::scopes::{Scopes, thread_number};
use crate::recipe::slots::{AmaxSlots, Bucket, Direction, Due, Registry, SlotMemory, SlotsPlan};

/// The autocast state of the process. The dispatcher owns it and passes it by `&mut`.
#[derive(Debug)]
pub struct AutocastState {
    scopes: Scopes,
    recipes: Vec<Recipe>,
    groups: Vec<u64>,
    /// Threads in a phase of activation recomputation, one entry per phase: layers of delayed scaling record their
    /// scales in the first phase, and use them again in the second.
    phases: Vec<u64>,
    registries: [Registry; 2],
    next_id: u64,
    /// Number of outermost regions in which an FP8 layer has run.
    first_modules: u64,
}

impl Default for AutocastState {
    fn default() -> Self {
        Self {
            scopes: Scopes::default(),
            recipes: Vec::new(),
            groups: Vec::new(),
            phases: Vec::new(),
            registries: [Registry::default(), Registry::default()],
            next_id: 1,
            first_modules: 0,
        }
    }
}

impl AutocastState {
    /// The innermost region of this thread.
    #[inline]
    pub fn current(&mut self) -> &Region {
        &self.scopes.seen().region
    }

    /// Number of regions that were entered and not left.
    pub fn depth(&mut self) -> u32 {
        self.scopes.seen().depth
    }

    /// Overwrites the number of entered regions, for callers that restore a snapshot.
    pub fn set_depth(&mut self, depth: u32) {
        self.scopes.seen().depth = depth;
        self.scopes.end();
    }

    /// The caller's data of the innermost region.
    pub fn given(&mut self) -> Option<&Given> {
        self.scopes.seen().given.as_ref()
    }

    /// A caller's data of a finished region; drop it where foreign code may run.
    pub fn pop_released(&mut self) -> Option<Given> {
        self.scopes.pop_released()
    }

    /// Enters a region and returns the former one for [`AutocastState::exit`]. `given` is the caller's data of the
    /// region.
    ///
    /// # Errors
    /// As [`AutocastState::set`]; nothing has changed then.
    pub fn enter(&mut self, request: &Request, given: Option<Given>) -> Result<Former> {
        let mut region = self.region(request)?;
        region.is_first_fp8_module |= self.scopes.own().depth == 0;
        let former = self.scopes.replace(region, given);
        self.scopes.own().depth += 1;
        Ok(former)
    }

    /// Enters a recorded region again, for a recomputation.
    pub fn repeat(&mut self, region: &Region) -> Former {
        let given = self.given().cloned();
        self.repeat_with(region, given)
    }

    /// The same, with the caller's data.
    pub fn repeat_with(&mut self, region: &Region, given: Option<Given>) -> Former {
        let former = self.scopes.replace(*region, given);
        self.scopes.own().depth += 1;
        former
    }

    /// Puts a recorded region in force for this thread, without entering it, until [`AutocastState::take_back`].
    ///
    /// # Errors
    /// As [`AutocastState::set`]; nothing has changed then.
    pub fn hold(&mut self, request: &Request, given: Option<Given>) -> Result<Former> {
        let region = Region { is_first_fp8_module: false, ..self.region(request)? };
        let former = self.scopes.replace(region, given);
        self.scopes.own().held += 1;
        Ok(former)
    }

    /// Restores the region that [`AutocastState::hold`] replaced.
    pub fn take_back(&mut self, former: &Former) {
        let scope = self.scopes.restore(former);
        scope.held = scope.held.saturating_sub(1);
        self.scopes.end();
    }

    /// Whether the region in force is a recorded one, so that layers have none of their own to repeat; and whether this
    /// thread has regions of its own.
    pub fn held(&mut self) -> (bool, bool) {
        (self.scopes.seen().held != 0, self.scopes.has_own())
    }

    /// Leaves the innermost region for `former`, and returns which forward scales are due. `updates` tells whether the
    /// region updates them: it quantised or calibrated, and was not part of a graph. The caller must check whether
    /// gradients are enabled; without gradients only calibration updates.
    pub fn exit(&mut self, former: &Former, updates: bool) -> Due {
        let scope = self.scopes.restore(former);
        scope.depth = scope.depth.saturating_sub(1);
        let ends = scope.depth == 0 && updates;
        self.scopes.end();
        if ends { self.due(Direction::Forward) } else { Due::Nothing }
    }

    /// Changes the region in force without entering one.
    ///
    /// # Errors
    /// The recipe is invalid, or missing where it is needed; nothing has changed then.
    pub fn set(&mut self, request: &Request, given: Option<Given>) -> Result<()> {
        let region = self.region(request)?;
        let scope = self.scopes.seen();
        scope.region = region;
        let former = std::mem::replace(&mut scope.given, given);
        self.scopes.release(former);
        self.scopes.end();
        Ok(())
    }

    /// Puts this thread into a phase of activation recomputation; returns the thread's number, for
    /// [`AutocastState::leave_phase`].
    pub fn enter_phase(&mut self) -> u64 {
        let thread = thread_number();
        self.phases.push(thread);
        thread
    }

    /// Ends the last phase of a thread.
    pub fn leave_phase(&mut self, thread: u64) {
        if let Some(at) = self.phases.iter().rposition(|&known| known == thread) {
            self.phases.remove(at);
        }
    }

    /// The thread whose phases of activation recomputation apply to this thread: itself, or, if it has no region, the
    /// thread that it works for.
    pub fn phase_thread(&mut self) -> Option<u64> {
        let &first = self.phases.first()?;
        let own = thread_number();
        if self.phases.contains(&own) {
            return Some(own);
        }
        if self.scopes.has_own() { None } else { Some(first) }
    }

    /// Whether this thread's layers of delayed scaling must note or read scales on a tape.
    #[inline]
    pub fn recomputes(&mut self) -> bool {
        !self.phases.is_empty() && self.phase_thread().is_some()
    }

    fn region(&mut self, request: &Request) -> Result<Region> {
        let active = request.enabled || request.calibrating;
        let (recipe, recipe_id) = match request.recipe {
            Some(recipe) => (recipe, self.intern(recipe)?),
            None if active => return Err(Error::value("autocast", "a region that quantises needs a recipe")),
            None => (Region::HIGH_PRECISION.recipe, 0),
        };
        Ok(Region {
            epoch: if active { self.epoch(request, recipe_id) } else { 0 },
            enabled: request.enabled,
            calibrating: request.calibrating,
            graph: request.graph,
            is_first_fp8_module: self.current().is_first_fp8_module,
            recipe,
            recipe_id,
            group: request.group,
        })
    }

    /// Restores the state of a fresh process, except the registered slots, which live as long as their layers.
    pub fn reset(&mut self) {
        self.scopes.clear();
        self.phases.clear();
        self.registries.iter_mut().for_each(Registry::forget_ran);
    }

    /// Whether the caller is the first FP8 layer of the outermost region; true once. Its backward runs last, and
    /// updates the backward scales.
    pub fn take_first_fp8_module(&mut self) -> bool {
        let is_first = std::mem::replace(&mut self.scopes.seen().region.is_first_fp8_module, false);
        self.first_modules += u64::from(is_first);
        is_first
    }

    /// Number of outermost regions in which an FP8 layer has run; it changes with each such region.
    #[must_use]
    pub const fn first_modules(&self) -> u64 {
        self.first_modules
    }

    /// Overwrites the next result of [`AutocastState::take_first_fp8_module`].
    pub fn set_first_fp8_module(&mut self, is_first: bool) {
        self.scopes.seen().region.is_first_fp8_module = is_first;
    }

    /// The recipe of an index.
    #[must_use]
    pub fn recipe(&self, recipe_id: u32) -> Option<&Recipe> {
        self.recipes.get((recipe_id as usize).checked_sub(1)?)
    }

    /// The index of a recipe's content; the same for equal content.
    ///
    /// # Errors
    /// The recipe is invalid.
    pub fn intern(&mut self, recipe: Recipe) -> Result<u32> {
        if let Some(index) = self.recipes.iter().rposition(|known| *known == recipe) {
            return Ok(index as u32 + 1);
        }
        recipe.validate()?;
        self.recipes.push(recipe);
        Ok(self.recipes.len() as u32)
    }

    /// Whether any recipe so far has algorithms of the user.
    #[must_use]
    pub fn has_own_algorithms(&self) -> bool {
        self.recipes.iter().any(|recipe| recipe.delayed.custom != 0)
    }

    fn epoch(&mut self, request: &Request, recipe_id: u32) -> u64 {
        let group = self.groups.iter().position(|&known| known == request.group).unwrap_or_else(|| {
            self.groups.push(request.group);
            self.groups.len() - 1
        });
        u64::from(recipe_id) << 32
            | (group as u64 & 0x3fff_ffff) << 2
            | u64::from(request.enabled) << 1
            | u64::from(request.calibrating)
    }

    /// Checks whether a layer's buffers can be registered: `history` f32 `(history_len, count)`, `scale` f32 `(count)`,
    /// both contiguous. Ranks of `group` reduce their maxima together.
    ///
    /// # Errors
    /// The tensors do not fit each other, or the recipe is not one of delayed scaling.
    pub fn plan_slots(
        &mut self,
        direction: Direction,
        recipe: Recipe,
        group: u64,
        history: &TensorView<'_>,
        scale: &TensorView<'_>,
    ) -> Result<SlotsPlan> {
        if !recipe.is_delayed() {
            return Err(Error::value("amax_slots", "only delayed scaling keeps scales between steps"));
        }
        let recipe_id = self.intern(recipe)?;
        SlotsPlan::new(direction, (&recipe, recipe_id), group, history, scale)
    }

    /// Registers buffers, which `memory` owns. With `former`, they replace other slots of the same layer.
    pub fn register(
        &mut self,
        plan: SlotsPlan,
        memory: Box<dyn SlotMemory>,
        former: Option<&AmaxSlots>,
    ) -> Arc<AmaxSlots> {
        let id = self.next_id;
        self.next_id += 1;
        self.registries[plan.direction() as usize].register(id, plan, memory, former)
    }

    /// Lets slots take part in updates from now on, even if their layer does not run: at their present place, or the
    /// next one. Copies and loaded states take no part before, since they may exist on one rank only, and the other
    /// ranks would not reduce with it.
    pub fn take_part(&mut self, slots: &Arc<AmaxSlots>) {
        self.registries[slots.direction() as usize].take_part(slots);
    }

    /// Removes freed slots from a bucket: all of them if there are no other ranks, else those that are freed on all
    /// ranks, for which `reduced` has a negative number.
    pub fn forget_gone(&mut self, direction: Direction, bucket: &Bucket, reduced: Option<&[f32]>) {
        self.registries[direction as usize].forget_gone(bucket, reduced);
    }

    /// Removes all freed slots from the updates of a direction without a reduction.
    pub fn forget_all_gone(&mut self, direction: Direction) {
        self.registries[direction as usize].forget_all_gone();
    }

    /// Notes that a layer has raised maxima of its slots, which take part in the next update.
    #[inline]
    pub fn mark_ran(&mut self, slots: &AmaxSlots) {
        self.registries[slots.direction() as usize].mark_ran(slots);
    }

    /// Notes the same for all slots in updates, after a replayed graph may have run their layers.
    pub fn mark_all_ran(&mut self, direction: Direction) {
        let registry = &mut self.registries[direction as usize];
        registry.participants().iter().for_each(|slots| registry.mark_ran(slots));
    }

    /// Whether an update of this direction has anything to do.
    #[must_use]
    pub fn due(&self, direction: Direction) -> Due {
        self.registries[direction as usize].due()
    }

    /// Number of living slots of a direction.
    #[must_use]
    pub fn registered(&self, direction: Direction) -> usize {
        self.registries[direction as usize].living().count()
    }

    /// The slots that take part in updates, in the order of their places.
    #[must_use]
    pub fn participants(&self, direction: Direction) -> Vec<Arc<AmaxSlots>> {
        self.registries[direction as usize].participants()
    }

    /// The same in buckets of recipe, group and device, ordered by their first slots; the buckets are made again only
    /// after a change.
    pub fn buckets(&mut self, direction: Direction) -> &[Arc<Bucket>] {
        self.registries[direction as usize].buckets(&self.recipes)
    }

    /// A device with slots whose layers ran.
    #[must_use]
    pub fn due_device(&self, direction: Direction) -> Option<Device> {
        self.registries[direction as usize].due_device()
    }

    /// Returns the slots of `device` whose layers ran, and clears these marks; drops the slots of freed layers.
    ///
    /// Slots whose layer did not run are left out: their live row is zero, for which the update is the identity.
    pub fn take_due(&mut self, direction: Direction, device: Device, visit: impl FnMut(Arc<AmaxSlots>, &Recipe)) {
        self.registries[direction as usize].take_due(&self.recipes, device, visit);
    }
}

#[cfg(test)]
#[path = "autocast_tests.rs"]
mod tests;
