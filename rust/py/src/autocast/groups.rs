//! Process groups as numbers. An address cannot identify a group, since another group may reuse it later.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

/// All groups so far; a group's number is its index, from 1.
#[pyclass(module = "te_fast._native")]
#[derive(Debug, Default)]
struct Groups(Vec<Group>);

#[derive(Debug)]
enum Group {
    Known(Py<PyWeakrefReference>),
    /// A group without weak references; it is kept as long as the process.
    Held(Py<PyAny>),
}

impl Group {
    fn object<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Known(group) => group.bind(py).upgrade(),
            Self::Held(group) => Some(group.bind(py).clone()),
        }
    }
}

fn groups(py: Python<'_>) -> PyResult<&Bound<'_, Groups>> {
    static GROUPS: PyOnceLock<Py<Groups>> = PyOnceLock::new();
    Ok(GROUPS.get_or_try_init(py, || Py::new(py, Groups::default()))?.bind(py))
}

/// The number of a group, which no other group has or gets; 0 for none, which is the default group.
pub(super) fn number_of(group: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
    group.map_or(Ok(0), number)
}

#[cold]
fn number(group: &Bound<'_, PyAny>) -> PyResult<u64> {
    let groups = groups(group.py())?;
    if let Some(known) = find(&*groups.try_borrow()?, group) {
        return Ok(known);
    }
    // Making a reference may run foreign code, so nothing is borrowed meanwhile, and another thread may be faster.
    let new = PyWeakrefReference::new(group)
        .map_or_else(|_| Group::Held(group.clone().unbind()), |reference| Group::Known(reference.unbind()));
    let mut groups = groups.try_borrow_mut()?;
    if let Some(known) = find(&groups, group) {
        return Ok(known);
    }
    groups.0.push(new);
    Ok(groups.0.len() as u64)
}

fn find(groups: &Groups, group: &Bound<'_, PyAny>) -> Option<u64> {
    let is_it = |known: &Group| known.object(group.py()).is_some_and(|object| object.is(group));
    groups.0.iter().rposition(is_it).map(|at| at as u64 + 1)
}

/// The group of a number, if it lives; none for the default group.
pub(super) fn object_of(py: Python<'_>, number: u64) -> PyResult<Option<Bound<'_, PyAny>>> {
    let Some(at) = (number as usize).checked_sub(1) else { return Ok(None) };
    Ok(groups(py)?.try_borrow()?.0.get(at).and_then(|group| group.object(py)))
}
