//! The autocast state: what the innermost region asks for, and which delayed-scaling buffers are due.
//! Layers read [`AutocastState::current`] on every call; a plan made under its epoch holds as long as the epoch does.
//!
//! Regions nest by snapshots: entering returns the region that was in force, leaving puts it back, also out of order, as
//! in Transformer Engine. Threads have regions of their own ([`crate::autocast_scopes`]); the buffers are the process's.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use te_fast_kernels::Fp8;

pub use crate::autocast_scopes::Former;
use crate::autocast_scopes::Scopes;
use crate::delayed::check_slots;
use crate::error::{Error, Result};
use crate::kernel::DevPtr;
use crate::recipe::Recipe;
use crate::tensor::{Device, TensorView};

/// Which pass a scale belongs to: inputs and weights are updated after forward, gradients after backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Direction {
    /// Inputs and weights.
    Forward,
    /// Gradients.
    Backward,
}

/// What an autocast region asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Layers quantise.
    pub enabled: bool,
    /// Layers record absolute maxima, also where they do not quantise.
    pub calibrating: bool,
    /// The region is part of a captured graph: its caller updates the scales.
    pub graph: bool,
    /// The recipe; none will do while neither flag is set.
    pub recipe: Option<Recipe>,
    /// Process group of the amax reduction, as an opaque number; 0 is the default group.
    pub group: u64,
}

/// The region in force.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
pub struct Region {
    /// Equal exactly when layers must behave alike: a function of the flags, the recipe's content and the group.
    /// [`Region::HIGH_PRECISION`]'s epoch, 0, means that nothing is quantised or recorded.
    pub epoch: u64,
    /// Layers quantise.
    pub enabled: bool,
    /// Layers record absolute maxima.
    pub calibrating: bool,
    /// The region's caller updates the scales.
    pub graph: bool,
    /// No FP8 layer has run in the outermost region yet.
    pub is_first_fp8_module: bool,
    /// The recipe; the default one where the region names none.
    pub recipe: Recipe,
    /// Index of the recipe's content, from 1; 0 where the region names none.
    pub recipe_id: u32,
    /// Process group of the amax reduction.
    pub group: u64,
}

impl Region {
    /// Outside of every region.
    pub const HIGH_PRECISION: Self = Self {
        epoch: 0,
        enabled: false,
        calibrating: false,
        graph: false,
        is_first_fp8_module: false,
        recipe: Recipe::DELAYED,
        recipe_id: 0,
        group: 0,
    };

    /// Whether layers keep absolute maxima for a later scale: quantising with delayed scaling, or calibrating for it.
    #[must_use]
    pub const fn records_amax(&self) -> bool {
        (self.enabled || self.calibrating) && self.recipe.is_delayed()
    }
}

/// Owner of a pair of delayed-scaling buffers.
pub trait SlotMemory: Send + Sync {
    /// The history, f32 `(history_len, count)`.
    fn history(&self) -> DevPtr<'_>;
    /// The scales, f32 `(count)`.
    fn scale(&self) -> DevPtr<'_>;
}

/// The delayed-scaling buffers of one layer in one direction. The layer owns it; when the last owner drops it, the
/// registry forgets it.
pub struct AmaxSlots {
    id: u64,
    direction: Direction,
    recipe_id: u32,
    device: Device,
    history_len: u32,
    count: u32,
    /// Shared with the slots that take these ones' place.
    ran: Arc<AtomicBool>,
    /// Others have taken their place; calls that began before may still hold these.
    retired: AtomicBool,
    memory: Box<dyn SlotMemory>,
}

impl fmt::Debug for AmaxSlots {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "AmaxSlots({:?}, {} x {} on {})", self.direction, self.history_len, self.count, self.device)
    }
}

impl AmaxSlots {
    /// Number that names these slots for the length of the process; ascending in the order of registration.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Pass whose scales these are.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Where the buffers live.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The history, f32 `(history_len, count)`; row 0 is live: kernels take the maximum into it.
    #[must_use]
    #[inline]
    pub fn history(&self) -> DevPtr<'_> {
        self.memory.history()
    }

    /// The scales, f32 `(count)`.
    #[must_use]
    #[inline]
    pub fn scale(&self) -> DevPtr<'_> {
        self.memory.scale()
    }

    /// Whether the layer ran since the last update.
    #[must_use]
    pub fn ran(&self) -> bool {
        self.ran.load(Ordering::Relaxed)
    }

    /// Whether others have taken their place: the layer has to ask for those.
    #[must_use]
    #[inline]
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// Forgets that the layer ran: its caller has updated the scales itself.
    pub fn clear_ran(&self) {
        self.ran.store(false, Ordering::Relaxed);
    }

    /// Rows of the history.
    #[must_use]
    pub fn history_len(&self) -> u32 {
        self.history_len
    }

    /// Tensors.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// What [`AutocastState::exit`] leaves to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Due {
    /// Nothing.
    Nothing = 0,
    /// No layer ran, but a bucket is updated at every exit: with the user's algorithms, or in step with other ranks.
    Unconditional = 1,
    /// Layers ran.
    Ran = 2,
}

/// Registered slots of one direction.
#[derive(Debug, Default)]
struct Registry {
    slots: Vec<Weak<AmaxSlots>>,
    ran: bool,
    /// Some bucket wants an update at every exit.
    unconditional: bool,
}

/// The autocast state of the process. The dispatcher owns it and passes it by `&mut`.
#[derive(Debug)]
pub struct AutocastState {
    scopes: Scopes,
    recipes: Vec<Recipe>,
    groups: Vec<u64>,
    /// Layers of delayed scaling ask Python which scales to use: activation recomputation records them in its first
    /// phase and uses them again in its second.
    pub recompute: bool,
    registries: [Registry; 2],
    next_id: u64,
}

impl Default for AutocastState {
    fn default() -> Self {
        Self {
            scopes: Scopes::default(),
            recipes: Vec::new(),
            groups: Vec::new(),
            recompute: false,
            registries: [Registry::default(), Registry::default()],
            next_id: 1,
        }
    }
}

impl AutocastState {
    /// The innermost region of this thread.
    #[inline]
    pub fn current(&mut self) -> &Region {
        &self.scopes.seen().region
    }

    /// Number of regions entered and not left.
    pub fn depth(&mut self) -> u32 {
        self.scopes.seen().depth
    }

    /// Overwrites the number of regions entered, for callers that restore a state of their own.
    pub fn set_depth(&mut self, depth: u32) {
        self.scopes.seen().depth = depth;
        self.scopes.end();
    }

    /// Enters a region and returns the one that was in force, to be handed to [`AutocastState::exit`].
    ///
    /// # Errors
    /// As [`AutocastState::set`]; nothing has changed then.
    pub fn enter(&mut self, request: &Request) -> Result<Former> {
        let mut region = self.region(request)?;
        let scope = self.scopes.own();
        let former = scope.former();
        region.is_first_fp8_module |= scope.depth == 0;
        scope.region = region;
        scope.depth += 1;
        Ok(former)
    }

    /// Enters a region as it was recorded, to do again what was done in it.
    pub fn repeat(&mut self, region: &Region) -> Former {
        let scope = self.scopes.own();
        let former = scope.former();
        scope.region = *region;
        scope.depth += 1;
        former
    }

    /// Puts a recorded region in force for this thread, without entering it, until [`AutocastState::take_back`].
    ///
    /// # Errors
    /// As [`AutocastState::set`]; nothing has changed then.
    pub fn hold(&mut self, request: &Request) -> Result<Former> {
        let region = Region { is_first_fp8_module: false, ..self.region(request)? };
        let scope = self.scopes.own();
        let former = scope.former();
        scope.region = region;
        scope.held += 1;
        Ok(former)
    }

    /// Puts back what [`AutocastState::hold`] replaced.
    pub fn take_back(&mut self, former: &Former) {
        let scope = self.scopes.entered(former);
        scope.region = former.region;
        scope.held = scope.held.saturating_sub(1);
        self.scopes.end();
    }

    /// Whether the region in force is a recorded one, so that layers have none of their own to repeat; and whether this
    /// thread has regions of its own.
    pub fn held(&mut self) -> (bool, bool) {
        (self.scopes.seen().held != 0, self.scopes.has_own())
    }

    /// Leaves the innermost region for `former`, and says what is then due of the forward scales. `updates` is whether
    /// that region updates them: it quantised or calibrated, and was no graph's. Whether gradients are enabled is
    /// the caller's to ask: without them only calibration updates.
    pub fn exit(&mut self, former: &Former, updates: bool) -> Due {
        let scope = self.scopes.entered(former);
        scope.region = former.region;
        scope.depth = scope.depth.saturating_sub(1);
        let ends = scope.depth == 0 && updates;
        self.scopes.end();
        if ends { self.due(Direction::Forward) } else { Due::Nothing }
    }

    /// Changes the region in force without entering one.
    ///
    /// # Errors
    /// The recipe is invalid, or missing where it is needed; nothing has changed then.
    pub fn set(&mut self, request: &Request) -> Result<()> {
        let region = self.region(request)?;
        self.scopes.seen().region = region;
        self.scopes.end();
        Ok(())
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

    /// Back to the state of a fresh process, but for the registered slots: they live as long as their layers.
    pub fn reset(&mut self) {
        self.scopes = Scopes::default();
        self.recompute = false;
        for registry in &mut self.registries {
            registry.ran = false;
            for slots in registry.slots.iter().filter_map(Weak::upgrade) {
                slots.ran.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Whether the caller is the first FP8 layer of the outermost region; true once. Its backward is the last one,
    /// and updates the backward scales.
    pub fn take_first_fp8_module(&mut self) -> bool {
        std::mem::replace(&mut self.scopes.seen().region.is_first_fp8_module, false)
    }

    /// Overwrites what [`AutocastState::take_first_fp8_module`] will answer.
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

    /// Registers a layer's buffers: `history` f32 `(history_len, count)`, `scale` f32 `(count)`, both contiguous.
    /// `memory` owns them. With `former`, they take the place of other slots of the same layer.
    ///
    /// # Errors
    /// The tensors do not fit each other, or the recipe is not one of delayed scaling.
    pub fn register(
        &mut self,
        direction: Direction,
        recipe: Recipe,
        history: &TensorView<'_>,
        scale: &TensorView<'_>,
        memory: Box<dyn SlotMemory>,
        former: Option<&AmaxSlots>,
    ) -> Result<Arc<AmaxSlots>> {
        check_slots(history, scale)?;
        if !recipe.is_delayed() {
            return Err(Error::value("amax_slots", "only delayed scaling keeps scales between steps"));
        }
        let recipe_id = self.intern(recipe)?;
        let slots = Arc::new(AmaxSlots {
            id: self.next_id,
            direction,
            recipe_id,
            device: history.device(),
            history_len: history.shape()[0] as u32,
            count: scale.shape()[0] as u32,
            ran: former.map_or_else(Arc::default, |former| Arc::clone(&former.ran)),
            retired: AtomicBool::new(false),
            memory,
        });
        self.next_id += 1;
        if let Some(former) = former {
            former.retired.store(true, Ordering::Relaxed);
        }
        let registry = &mut self.registries[direction as usize];
        registry.unconditional |= recipe.delayed.reduce_amax || recipe.delayed.custom != 0;
        registry.slots.retain(|slots| slots.upgrade().is_some_and(|slots| !slots.is_retired()));
        registry.slots.push(Arc::downgrade(&slots));
        Ok(slots)
    }

    /// Notes that a layer has taken maxima into its slots: they take part in the next update.
    #[inline]
    pub fn mark_ran(&mut self, slots: &AmaxSlots) {
        slots.ran.store(true, Ordering::Relaxed);
        self.registries[slots.direction as usize].ran = true;
    }

    /// Whether an update of this direction has anything to do.
    #[must_use]
    pub fn due(&self, direction: Direction) -> Due {
        let registry = &self.registries[direction as usize];
        match (registry.ran, registry.unconditional) {
            (true, _) => Due::Ran,
            (false, true) => Due::Unconditional,
            (false, false) => Due::Nothing,
        }
    }

    /// Number of living slots of a direction.
    #[must_use]
    pub fn registered(&self, direction: Direction) -> usize {
        self.registries[direction as usize].slots.iter().filter(|slots| slots.strong_count() > 0).count()
    }

    /// A device with slots whose layers ran.
    #[must_use]
    pub fn due_device(&self, direction: Direction) -> Option<Device> {
        let registry = &self.registries[direction as usize];
        let mut live = registry.slots.iter().filter_map(Weak::upgrade);
        if registry.ran { live.find(|slots| slots.ran()).map(|slots| slots.device) } else { None }
    }

    /// Hands over the slots of `device` whose layers ran, and forgets that they did; drops those of dead layers.
    ///
    /// Slots whose layer did not run hold a zero in the live row, for which the update is the identity: they stay out.
    pub fn take_due(&mut self, direction: Direction, device: Device, mut visit: impl FnMut(Arc<AmaxSlots>, &Recipe)) {
        let Self { registries, recipes, .. } = self;
        let registry = &mut registries[direction as usize];
        let (mut unconditional, mut ran) = (false, false);
        registry.slots.retain(|weak| {
            let Some(slots) = weak.upgrade() else { return false };
            let Some(recipe) = recipes.get(slots.recipe_id as usize - 1) else { return false };
            unconditional |= recipe.delayed.reduce_amax || recipe.delayed.custom != 0;
            if slots.device != device {
                ran |= slots.ran();
            } else if slots.ran.swap(false, Ordering::Relaxed) {
                visit(slots, recipe);
            }
            true
        });
        registry.unconditional = unconditional;
        registry.ran = ran;
    }
}

/// The type that a direction's tensors are quantised to.
#[must_use]
pub const fn fp8_of(recipe: &Recipe, direction: Direction) -> Fp8 {
    match direction {
        Direction::Forward => recipe.fwd,
        Direction::Backward => recipe.bwd,
    }
}

#[cfg(test)]
#[path = "autocast_tests.rs"]
mod tests;
