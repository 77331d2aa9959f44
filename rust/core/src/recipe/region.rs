//! Autocast regions: what is asked for, what is then in force, and what a region replaced.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::recipe::definition::Recipe;

/// What a region's caller keeps with it, the objects that it was given say. Nothing here looks into it, or drops the last
/// reference to it: `AutocastState::pop_released` hands it back, since the drop may run anything.
pub type Given = Arc<dyn Any + Send + Sync>;

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
    /// Process group of the amax reduction, as a number that no other group ever has; 0 is the default group.
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

/// What was in force where a region was entered, and which thread entered it.
#[derive(Clone)]
pub struct Former {
    /// The region that was in force.
    pub region: Region,
    /// What its caller keeps with it.
    pub given: Option<Given>,
    /// [`thread_number`](crate::recipe::scopes::thread_number) of that thread.
    pub thread: u64,
}

impl fmt::Debug for Former {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Former({:?}, thread {})", self.region, self.thread)
    }
}
