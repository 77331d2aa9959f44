//! Core errors as the Python classes of `te_fast.errors`.

use pyo3::prelude::*;
use pyo3::pycell::{PyBorrowError, PyBorrowMutError};
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use te_fast_core::{Error, ErrorKind};

/// Core error → Python exception; every class derives from `TeFastError` and the built-in that TE raises.
#[cold]
#[expect(clippy::needless_pass_by_value, reason = "map_err hands it over")]
pub(crate) fn to_python(error: Error) -> PyErr {
    named(&error, None)
}

/// The same, with the name of the layer in front.
#[cold]
pub(crate) fn named(error: &Error, layer: Option<&str>) -> PyErr {
    let class = match error.kind() {
        ErrorKind::Shape { .. } | ErrorKind::Value { .. } | ErrorKind::Layout { .. } => "ShapeError",
        ErrorKind::Dtype { .. } => "DtypeError",
        ErrorKind::Device { .. } => "DeviceError",
        ErrorKind::State { .. } => "StateError",
        ErrorKind::Unsupported { .. } | ErrorKind::KernelMissing { .. } => "UnsupportedError",
        ErrorKind::Driver { .. } | ErrorKind::Cublas { .. } | ErrorKind::NoDriver { .. } => "CudaError",
        _ => "TeFastError",
    };
    of_class(class, layer.map_or_else(|| error.to_string(), |layer| format!("{layer}: {error}")))
}

/// An error of a class of `te_fast.errors`.
fn of_class(class: &str, message: String) -> PyErr {
    Python::attach(|py| match class_of(py, class) {
        Ok(class) => PyErr::from_type(class, message),
        Err(import_error) => import_error,
    })
}

/// The refusal of a call of a layer, or another operation, that `torch.jit.trace` watches.
#[cold]
pub(crate) fn traced_by_jit(name: &str) -> PyErr {
    of_class(
        "UnsupportedError",
        format!(
            "{name}: torch.jit.trace cannot see te_fast's launches and would take their results for constants; use torch.export or torch.compile"
        ),
    )
}

fn class_of<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("te_fast.errors").map(|module| module.into_any().unbind()))?;
    Ok(module.bind(py).getattr(name)?.cast_into::<PyType>()?)
}

/// `?` on core results in functions that return Python errors.
pub(crate) trait IntoPython<T> {
    /// The value, or the Python exception.
    fn python(self) -> PyResult<T>;
}

impl<T> IntoPython<T> for te_fast_core::Result<T> {
    fn python(self) -> PyResult<T> {
        self.map_err(to_python)
    }
}

/// A core error, which gets the layer's name in front, or a Python error, which does not.
#[derive(Debug)]
pub(crate) enum Failure {
    Core(Error),
    Python(PyErr),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Core(error)
    }
}

macro_rules! from_python {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::Python(error.into())
            }
        })*
    };
}
from_python!(PyErr, PyBorrowError, PyBorrowMutError);

impl Failure {
    /// The Python exception, with the name of the layer.
    #[cold]
    pub(crate) fn named(self, layer: Option<&str>) -> PyErr {
        match self {
            Self::Core(error) => named(&error, layer),
            Self::Python(error) => error,
        }
    }
}
