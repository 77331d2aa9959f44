//! Recipes, autocast regions, and the scales of delayed scaling.

pub mod autocast;
pub mod definition;
pub mod region;
pub mod scopes;
pub mod slots;
pub mod update;
pub mod usage;
