//! What outlives a call: the dispatcher, and the lanes that calls run on.

pub mod dispatcher;
pub mod lane;
