//! Parameters in several parts along dimension 0: autograd sees the parts, a program reads the whole.

use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;

use crate::program::handle::ProgramHandle;
use crate::program::tensors::{Objects, requires_grad};
use crate::tensor::given::given;
use crate::tensor::stack::{end_of_storage, stacked};
use crate::tensor::value::QuantizedValue;
use crate::torch::process::State;

/// The parameters of one call, some of which are joined from parts.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct Joined {
    /// The whole parameters for the program. A whole needs a gradient if a part does.
    wholes: SmallVec<[Py<PyAny>; 4]>,
    /// The parts for autograd; a parameter in one piece is its own part.
    parts: SmallVec<[Py<PyAny>; 8]>,
    /// Whether a part needs a gradient.
    is_trained: bool,
    /// For each parameter, its share.
    shares: SmallVec<[Share; 4]>,
    version: u64,
}

/// A parameter's share of the parts.
#[derive(Debug)]
pub(crate) struct Share {
    /// Rows of each of its parts; empty for a parameter in one piece.
    pub(crate) rows: SmallVec<[i64; 4]>,
    /// Whether it is joined from parts.
    pub(crate) is_split: bool,
    /// Whether it is the weight of a linear op.
    pub(crate) is_weight: bool,
    /// Whether the whole is a copy.
    copied: bool,
    count: usize,
}

#[pymethods]
impl Joined {
    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.wholes.iter().chain(&self.parts).try_for_each(|tensor| visit.call(tensor))
    }
}

impl Joined {
    /// The present parameters of a program's modules, joined for the program. None if a part is gone, is neither a
    /// plain nor a quantised tensor, does not fit the others, or has no version (because it was made under
    /// `torch.inference_mode()`).
    pub(crate) fn of<'py>(
        state: &State,
        handle: &Bound<'py, ProgramHandle>,
    ) -> PyResult<Option<(Bound<'py, Self>, Objects<'py>)>> {
        let py = handle.py();
        let Some((parts, mut shares)) = gathered(state, handle)? else { return Ok(None) };
        let Some(version) = version_of(state, &parts, &shares)? else { return Ok(None) };
        let (mut wholes, mut is_trained, mut rest) = (Objects::new(), false, parts.as_slice());
        for share in &mut shares {
            let (own, behind) = rest.split_at(share.count);
            rest = behind;
            if !share.is_split {
                wholes.push(own[0].clone());
                continue;
            }
            let Some((whole, copied)) = join(state, own, &mut share.rows)? else { return Ok(None) };
            share.copied = copied;
            for part in own {
                if requires_grad(part)? {
                    whole.setattr(intern!(py, "requires_grad"), true)?;
                    is_trained = true;
                    break;
                }
            }
            wholes.push(whole);
        }
        let copied = shares.iter().any(|share| share.is_weight && share.copied);
        let joined = Self {
            wholes: wholes.iter().map(|whole| whole.clone().unbind()).collect(),
            parts: parts.into_iter().map(Bound::unbind).collect(),
            is_trained,
            shares,
            version: if copied { version_of_copy() } else { version },
        };
        Ok(Some((Bound::new(py, joined)?, wholes)))
    }

    /// The whole parameters for the program.
    pub(crate) fn wholes<'py>(&self, py: Python<'py>) -> Objects<'py> {
        self.wholes.iter().map(|whole| whole.bind(py).clone()).collect()
    }

    /// The parts for autograd.
    pub(crate) fn parts(&self) -> &[Py<PyAny>] {
        &self.parts
    }

    /// Version of the whole weights.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Whether a part needs a gradient.
    pub(crate) fn is_trained(&self) -> bool {
        self.is_trained
    }

    /// For each parameter, its share and its parts.
    pub(crate) fn shares(&self) -> impl Iterator<Item = (&Share, &[Py<PyAny>])> {
        let mut rest = self.parts.as_slice();
        self.shares.iter().map(move |share| {
            let (own, behind) = rest.split_at(share.count);
            rest = behind;
            (share, own)
        })
    }

    /// Whether a part of a weight that was read without a copy has changed since.
    pub(crate) fn was_changed(&self, state: &State, py: Python<'_>) -> PyResult<bool> {
        if self.shares.iter().any(|share| share.is_weight && share.copied) {
            return Ok(false);
        }
        let parts: Objects<'_> = self.parts.iter().map(|part| part.bind(py).clone()).collect();
        Ok(version_of(state, &parts, &self.shares)? != Some(self.version))
    }
}

/// A unique version for a copy.
#[pyfunction]
pub(crate) fn version_of_copy() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 62);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// All parts, and how many each parameter has.
fn gathered<'py>(
    state: &State,
    handle: &Bound<'py, ProgramHandle>,
) -> PyResult<Option<(Objects<'py>, SmallVec<[Share; 4]>)>> {
    let py = handle.py();
    let program = handle.try_borrow()?;
    let (mut parts, mut shares) = (Objects::new(), SmallVec::new());
    for (index, param) in program.params.iter().enumerate() {
        for name in param.names() {
            match param.parameters.bind(py).get_item(name)? {
                Some(part) if state.torch.is_plain(&part) || given(state, &part).is_some() => parts.push(part),
                _ => return Ok(None),
            }
        }
        let rows = SmallVec::new();
        let (is_split, is_weight) = (!param.parts.is_empty(), program.chain.linear_params().contains(&index));
        shares.push(Share { rows, is_split, is_weight, copied: false, count: param.names().len() });
    }
    Ok(Some((parts, shares)))
}

/// The parts as one tensor, if they are adjacent in one storage, else a copy (true); none if they do not fit each
/// other.
pub(crate) fn join<'py>(
    state: &State,
    parts: &[Bound<'py, PyAny>],
    rows: &mut SmallVec<[i64; 4]>,
) -> PyResult<Option<(Bound<'py, PyAny>, bool)>> {
    let py = parts[0].py();
    if let Some(value) = given(state, &parts[0]) {
        return Ok(join_quantized(state, parts, value, rows)?.map(|whole| (whole, false)));
    }
    let Some(first) = state.reader.read(&parts[0])? else { return Ok(None) };
    let (mut end, mut adjacent) = (first.data().address(), true);
    for part in parts {
        let Some(view) = state.reader.read(part)? else { return Ok(None) };
        if view.shape().is_empty()
            || view.shape()[1..] != first.shape()[1..]
            || (view.dtype(), view.device()) != (first.dtype(), first.device())
        {
            return Ok(None);
        }
        rows.push(view.shape()[0]);
        adjacent &= view.is_contiguous() && view.data().address() == end;
        end = view.data().address() + view.numel() * view.dtype().size();
    }
    if adjacent && end <= end_of_storage(&parts[0])? {
        let mut size: SmallVec<[i64; 2]> = first.shape().into();
        size[0] = rows.iter().sum();
        return Ok(Some((state.torch.in_storage_of(&parts[0], &size, 0)?, false)));
    }
    let detached = parts.iter().map(|part| part.call_method0(intern!(py, "detach"))).collect::<PyResult<Vec<_>>>()?;
    let whole = py.import(intern!(py, "torch"))?.call_method1(intern!(py, "cat"), (PyList::new(py, detached)?,))?;
    Ok(Some((whole, true)))
}

/// Quantised parts as one quantised tensor; none if they do not fit each other.
fn join_quantized<'py>(
    state: &State,
    parts: &[Bound<'py, PyAny>],
    first: Bound<'py, QuantizedValue>,
    rows: &mut SmallVec<[i64; 4]>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = first.py();
    let mut values: SmallVec<[_; 8]> = SmallVec::new();
    let nominal = intern!(py, "dtype");
    let dtype = parts[0].getattr(nominal)?;
    for part in parts {
        match given(state, part) {
            Some(value) if part.getattr(nominal)?.is(&dtype) => values.push(value),
            _ => return Ok(None),
        }
        rows.push(part.call_method1(intern!(py, "size"), (0,))?.extract()?);
    }
    drop(first);
    let Some(value) = stacked(state, py, &values)? else { return Ok(None) };
    let (all, cols) = (rows.iter().sum::<i64>(), parts[0].call_method1(intern!(py, "size"), (1,))?.extract::<i64>()?);
    let arguments = (Bound::new(py, value)?, (all, cols), dtype, py.None());
    parts[0].get_type().call_method1(intern!(py, "_of_value"), arguments).map(Some)
}

/// A number that changes whenever a weight may have changed; none if a parameter has no version.
fn version_of(state: &State, parts: &[Bound<'_, PyAny>], shares: &[Share]) -> PyResult<Option<u64>> {
    let (mut version, mut parts) = (0, parts.iter());
    for share in shares {
        for part in parts.by_ref().take(share.count) {
            if let Some(value) = given(state, part) {
                // The numbers of values never fall.
                version += QuantizedValue::stamp(&value)?.unwrap_or(0);
                continue;
            }
            match part.getattr(intern!(part.py(), "_version")) {
                Ok(counted) if share.is_weight => version += counted.extract::<u64>()?,
                Ok(_) => {}
                Err(error) if error.is_instance_of::<PyRuntimeError>(part.py()) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(Some(version))
}
