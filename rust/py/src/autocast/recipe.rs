//! Recipes for Python: the native form into which `te_fast.common.recipe` translates recipes.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use te_fast_core::Fp8;
use te_fast_core::recipe::definition::{
    AmaxAlgorithm, BackwardOverride, Block, Delayed, PerGemm, Quantization, Recipe, Scaling,
};

use crate::error::IntoPython;
use crate::torch::process::state;

/// The native form of a recipe.
#[pyclass(module = "te_fast._native", name = "Recipe", frozen, eq, skip_from_py_object)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NativeRecipe(pub(crate) Recipe);

/// The option of `options` that `name` names.
fn choose<T: Copy>(what: &str, name: &str, options: &[(&str, T)]) -> PyResult<T> {
    let found = options.iter().find(|(option, _)| *option == name).map(|&(_, value)| value);
    found.ok_or_else(|| PyValueError::new_err(format!("recipe: unknown {what} {name:?}")))
}

#[pymethods]
impl NativeRecipe {
    #[new]
    #[pyo3(signature = (
        *, scaling, fwd, bwd, backward_override=None, power_2_scale=(false, false, false),
        amax_epsilon=(0.0, 0.0, 0.0), block=(0, 0, 0), split_accumulator=(false, true, true),
        margin=0, history_len=1024, most_recent=false, reduce_amax=true, custom=0,
        factory=0
    ))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of a Python constructor")]
    fn new(
        scaling: &str,
        fwd: &str,
        bwd: &str,
        backward_override: Option<&str>,
        power_2_scale: (bool, bool, bool),
        amax_epsilon: (f32, f32, f32),
        block: (u8, u8, u8),
        split_accumulator: (bool, bool, bool),
        margin: i32,
        history_len: u32,
        most_recent: bool,
        reduce_amax: bool,
        custom: u32,
        factory: u32,
    ) -> PyResult<Self> {
        let formats = [("e4m3", Fp8::E4m3), ("e5m2", Fp8::E5m2)];
        let scalings = [
            ("delayed", Scaling::Delayed),
            ("current", Scaling::Current),
            ("block", Scaling::Block),
            ("mxfp8", Scaling::Mxfp8),
            ("nvfp4", Scaling::Nvfp4),
            ("custom", Scaling::Custom),
        ];
        let overrides = [
            ("", BackwardOverride::None),
            ("high_precision", BackwardOverride::HighPrecision),
            ("dequantized", BackwardOverride::Dequantized),
        ];
        let quantization = |power_2_scale, amax_epsilon, block| Quantization {
            power_2_scale,
            amax_epsilon,
            block: match block {
                0 => Block::Tensor,
                1 => Block::Row,
                _ => Block::Square,
            },
        };
        let algorithm = if most_recent { AmaxAlgorithm::MostRecent } else { AmaxAlgorithm::Max };
        let recipe = Recipe {
            scaling: choose("scaling", scaling, &scalings)?,
            fwd: choose("format", fwd, &formats)?,
            bwd: choose("format", bwd, &formats)?,
            input: quantization(power_2_scale.0, amax_epsilon.0, block.0),
            weight: quantization(power_2_scale.1, amax_epsilon.1, block.1),
            grad: quantization(power_2_scale.2, amax_epsilon.2, block.2),
            split_accumulator: PerGemm {
                fprop: split_accumulator.0,
                dgrad: split_accumulator.1,
                wgrad: split_accumulator.2,
            },
            delayed: Delayed { margin, history_len, algorithm, reduce_amax, custom },
            backward_override: choose("backward_override", backward_override.unwrap_or(""), &overrides)?,
            factory,
        };
        recipe.validate().python()?;
        Ok(Self(recipe))
    }

    /// A number that recipes of equal content share.
    #[getter]
    fn number(&self, py: Python<'_>) -> PyResult<u32> {
        state(py)?.dispatcher(py)?.0.autocast.intern(self.0).python()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
