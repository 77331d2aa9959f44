//! Autocast regions: the request, the region in force, and the region that it replaced.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::recipe::definition::Recipe;

/// The caller's data of a region, for instance the recipe object. This crate neither reads it nor drops the last
/// reference to it: `AutocastState::pop_released` returns it, since its drop may run foreign code.
pub type Given = Arc<dyn Any + Send + Sync>;

/// The request of an autocast region.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Layers quantise.
    pub enabled: bool,
    /// Layers record absolute maxima, even if they do not quantise.
    pub calibrating: bool,
    /// The region is part of a captured graph: its caller updates the scales.
    pub graph: bool,
    /// The recipe; it may be none if neither flag is set.
    pub recipe: Option<Recipe>,
    /// Process group of the amax reduction, as a number that no other group ever has; 0 is the default group.
    pub group: u64,
}

/// The region in force.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
pub struct Region {
    /// Equal exactly if layers must behave in the same way: a function of the flags, the recipe's content and the
    /// group. [`Region::HIGH_PRECISION`]'s epoch, 0, means that nothing is quantised or recorded.
    pub epoch: u64,
    /// Layers quantise.
    pub enabled: bool,
    /// Layers record absolute maxima.
    pub calibrating: bool,
    /// The region's caller updates the scales.
    pub graph: bool,
    /// No FP8 layer has run in the outermost region yet.
    pub is_first_fp8_module: bool,
    /// The recipe; the default recipe if the region has none.
    pub recipe: Recipe,
    /// Index of the recipe's content, from 1; 0 if the region has no recipe.
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

    /// Whether layers quantise or calibrate, each by the recipe that a factory of the user's gives it.
    #[must_use]
    pub const fn is_of_factory(&self) -> bool {
        (self.enabled || self.calibrating) && self.recipe.is_custom()
    }

    /// Whether layers keep absolute maxima for a later scale: quantising with delayed scaling, or calibrating for it.
    #[must_use]
    pub const fn records_amax(&self) -> bool {
        (self.enabled || self.calibrating) && self.recipe.is_delayed()
    }
}

/// The former region at an entry, and the thread that entered.
#[derive(Clone)]
pub struct Former {
    /// The region that was in force.
    pub region: Region,
    /// The caller's data.
    pub given: Option<Given>,
    /// [`thread_number`](crate::recipe::scopes::thread_number) of that thread.
    pub thread: u64,
}

impl fmt::Debug for Former {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Former({:?}, thread {})", self.region, self.thread)
    }
}
