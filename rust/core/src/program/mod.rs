//! Chains of ops, compiled to programs: each direction is a list of launches on places that are decided beforehand.
//!
//! A [`Chain`] lists ops, a [`ProgramKey`] describes a call, a [`Program`] is compiled for a key, and a
//! [`SizedProgram`] runs for one row count. A call passes addresses ([`Bindings`]) and decides nothing.

mod activation_groups;
mod backward;
mod backward_compiler;
mod backward_linear;
mod bindings;
mod buffer;
mod cache;
mod cast;
mod chain;
mod compile;
mod compiled;
mod edge;
mod facts;
mod forward;
mod forward_compiler;
mod forward_handover;
mod forward_linear;
mod linear_op;
mod pieces;
mod planned;
mod port;
mod replay;
mod router_product;
mod routers;
mod routes;
mod sized;
mod sizing;
mod weight_grad;
mod work;

pub use bindings::{Bindings, CallTable};
pub use cache::{KeptProgram, ProgramCache};
pub use chain::{Chain, Groups, LinearCall, Link, Op, OuterKinds, ProgramKey, Router};
pub use compiled::{Explained, Program};
pub use edge::QuantizedKind;
pub use linear_op::WeightCast;
pub use pieces::{Pause, Script, Transfer};
pub use port::{Beside, LinearPort, Outer, Port};
pub use sized::SizedProgram;
pub use weight_grad::WeightGradPlan;
pub use work::FlowName;
