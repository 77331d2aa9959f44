//! What a decision about modules has read, to tell later whether the decision still holds.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::layer::module::{has_no_global_hook, is_unhooked};
use crate::torch::process::state;
use crate::torch::reader::instance_dict;

/// A module's attributes and children by name: a child where there is one of the name, else an attribute.
#[derive(Debug)]
struct Noted(Vec<(Py<PyString>, Option<Py<PyAny>>)>);

/// The dictionaries of a module.
struct Dictionaries<'py> {
    attributes: Bound<'py, PyDict>,
    children: Option<Bound<'py, PyDict>>,
}

impl<'py> Dictionaries<'py> {
    fn of(module: &Bound<'py, PyAny>) -> PyResult<Self> {
        let attributes = instance_dict(module)?;
        let children = attributes.get_item(intern!(module.py(), "_modules"))?;
        Ok(Self { attributes, children: children.and_then(|found| found.cast_into().ok()) })
    }

    fn get(&self, name: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
        if let Some(children) = &self.children
            && let Some(child) = children.get_item(name)?
        {
            return Ok(Some(child));
        }
        self.attributes.get_item(name)
    }
}

impl Noted {
    fn of(module: &Bound<'_, PyAny>, names: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let found = Dictionaries::of(module)?;
        let one = |name: Bound<'_, PyAny>| {
            let name = name.cast_into::<PyString>()?;
            let value = found.get(&name)?.map(Bound::unbind);
            Ok((name.unbind(), value))
        };
        names.iter().map(one).collect::<PyResult<_>>().map(Self)
    }

    fn holds(&self, module: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (py, found) = (module.py(), Dictionaries::of(module)?);
        for (name, noted) in &self.0 {
            let same = match (found.get(name.bind(py))?, noted) {
                (Some(now), Some(noted)) => now.is(noted),
                (None, None) => true,
                _ => false,
            };
            if !same {
                return Ok(false);
            }
        }
        is_unhooked(&found.attributes)
    }

    fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0.iter().filter_map(|(_, value)| value.as_ref()).try_for_each(|value| visit.call(value))
    }
}

/// Attributes and children of modules that are called plainly: of an owner, and of modules within. A snapshot does not refer
/// to its owner, which may keep it.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct Snapshot {
    of_owner: Noted,
    within: Vec<(Py<PyAny>, Noted)>,
}

#[pymethods]
impl Snapshot {
    /// Notes the owner's attributes and children of these names, and those of modules.
    #[new]
    #[pyo3(signature = (owner, names, modules, /))]
    fn new(owner: &Bound<'_, PyAny>, names: &Bound<'_, PyTuple>, modules: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut within = Vec::new();
        for entry in modules.try_iter()? {
            let (module, names) = entry?.extract::<(Bound<'_, PyAny>, Bound<'_, PyTuple>)>()?;
            let noted = Noted::of(&module, &names)?;
            within.push((module.unbind(), noted));
        }
        Ok(Self { of_owner: Noted::of(owner, names)?, within })
    }

    /// Whether all of them are the same objects, and owner and modules have no hooks and no `forward` of their own.
    fn holds(&self, owner: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = owner.py();
        if !self.of_owner.holds(owner)? {
            return Ok(false);
        }
        for (module, noted) in &self.within {
            if !noted.holds(module.bind(py))? {
                return Ok(false);
            }
        }
        Ok(has_no_global_hook(state(py)?, py))
    }

    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.of_owner.visit(&visit)?;
        self.within.iter().try_for_each(|(module, noted)| {
            visit.call(module)?;
            noted.visit(&visit)
        })
    }
}
