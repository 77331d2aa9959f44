//! Names of activation functions and types, as Python writes them.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use te_fast_core::ops::activation::Activation;
use te_fast_core::{Error, Float};

use crate::error::IntoPython;

const OP: &str = "activation";

/// Constants of activation functions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Constants {
    pub(crate) limit: f32,
    pub(crate) alpha: f32,
    pub(crate) offset: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
}

impl Default for Constants {
    /// Transformer Engine's.
    fn default() -> Self {
        Self { limit: 7.0, alpha: 1.702, offset: 1.0, beta1: 4.0, beta2: 25.0 }
    }
}

/// An activation function by Transformer Engine's name.
pub(crate) fn activation_of(op: &'static str, name: &str, constants: &Constants) -> PyResult<Activation> {
    let &Constants { limit, alpha, offset, beta1, beta2 } = constants;
    Ok(match name {
        "gelu" => Activation::Gelu,
        "geglu" => Activation::Geglu,
        "glu" => Activation::Glu,
        "qgelu" => Activation::Qgelu,
        "qgeglu" => Activation::Qgeglu,
        "relu" => Activation::Relu,
        "reglu" => Activation::Reglu,
        "srelu" => Activation::Srelu,
        "sreglu" => Activation::Sreglu,
        "silu" => Activation::Silu,
        "swiglu" => Activation::Swiglu,
        "clamped_swiglu" => Activation::ClampedSwiglu { limit, alpha, offset },
        "situ_glu" => Activation::SituGlu { beta1, beta2 },
        other => return Err(Error::value(op, format!("there is no activation {other:?}"))).python(),
    })
}

/// The same with constants from keywords.
pub(crate) fn activation_named(name: &str, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Activation> {
    let mut constants = Constants::default();
    for (key, value) in keywords.into_iter().flatten() {
        let (key, value) = (key.extract::<String>()?, value.extract::<f64>()? as f32);
        let constant = match (name, key.as_str()) {
            ("clamped_swiglu", "limit") => &mut constants.limit,
            ("clamped_swiglu", "alpha") => &mut constants.alpha,
            ("clamped_swiglu", "glu_linear_offset") => &mut constants.offset,
            ("situ_glu", "beta1") => &mut constants.beta1,
            ("situ_glu", "beta2") => &mut constants.beta2,
            _ => return Err(Error::value(OP, format!("{name} has no constant {key:?}"))).python(),
        };
        *constant = value;
    }
    activation_of(OP, name, &constants)
}

/// torch's name of a type.
pub(crate) const fn type_name(dtype: Float) -> &'static str {
    match dtype {
        Float::F32 => "float32",
        Float::F16 => "float16",
        Float::Bf16 => "bfloat16",
    }
}
