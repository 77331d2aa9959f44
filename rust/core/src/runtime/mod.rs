//! The dispatcher, which outlives calls, and the lanes that calls run on.

pub mod dispatcher;
pub mod lane;
