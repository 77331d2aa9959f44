//! Parameters in several parts along dimension 0: autograd sees the parts, a program reads the whole.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;
use te_fast_core::quant::weight::Microbatch;

use crate::program::handle::ProgramHandle;
use crate::program::observed::LoneEdge;
use crate::program::tensors::{Flags, Objects, parameters};
use crate::tensor::given::given;
use crate::tensor::stack::{end_of_storage, stacked};
use crate::tensor::value::QuantizedValue;
use crate::torch::process::State;

/// The parameters of one call, some of which are joined from parts.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct Joined {
    /// The whole parameters for the program, until its forward has run. A whole needs a gradient if a part does.
    wholes: Mutex<SmallVec<[Py<PyAny>; 4]>>,
    /// The parts; a parameter in one piece is its own part.
    parts: SmallVec<[Py<PyAny>; 8]>,
    /// Whether each part of a joined parameter needed a gradient in forward; false for a parameter in one piece. Behind the
    /// first that did, only parts are read whose gradients go into `main_grad`: autograd drops other gradients by itself.
    trained: Flags,
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
    role: Role,
    /// The part that autograd gets for all parts, if nothing observes the others; none if autograd gets all.
    pub(crate) edge: Option<usize>,
    /// If the whole is a copy: a number of the places of its parts.
    copied: Option<usize>,
    count: usize,
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The weight of a linear op.
    Weight,
    /// One, the gradients of whose parts go into their `main_grad`.
    FusedWeight,
    Other,
}

impl Share {
    /// Whether it is the weight of a linear op.
    pub(crate) fn is_weight(&self) -> bool {
        self.role != Role::Other
    }

    /// Whether the gradients of its parts go into their `main_grad`.
    pub(crate) fn fuses(&self) -> bool {
        self.role == Role::FusedWeight
    }
}

#[pymethods]
impl Joined {
    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Ok(wholes) = self.wholes.try_lock() {
            wholes.iter().try_for_each(|whole| visit.call(whole))?;
        }
        self.parts.iter().try_for_each(|part| visit.call(part))
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
        let fuses = shares.iter().any(Share::fuses);
        let has_grads = fuses && state.torch.is_grad_enabled.bind(py).call0()?.is_truthy()?;
        let (mut pass, mut wholes, mut rest) = (Pass::new(state, parts.len()), Objects::new(), parts.as_slice());
        for share in &mut shares {
            let (own, behind) = rest.split_at(share.count);
            rest = behind;
            if !share.is_split {
                if !pass.read_whole(share, &own[0])? {
                    return Ok(None);
                }
                wholes.push(own[0].clone());
                continue;
            }
            pass.begin(share, has_grads);
            let Some((whole, copied)) = join(state, own, &mut share.rows, |part, address| pass.read(part, address))?
            else {
                return Ok(None);
            };
            share.copied = copied.then_some(pass.places);
            share.edge = pass.edge.take().and_then(LoneEdge::found);
            if pass.has_trained {
                whole.setattr(intern!(py, "requires_grad"), true)?;
            }
            wholes.push(whole);
        }
        let Pass { trained, version, .. } = pass;
        let joined = Self {
            wholes: Mutex::new(wholes.iter().map(|whole| whole.clone().unbind()).collect()),
            parts: parts.into_iter().map(Bound::unbind).collect(),
            trained,
            shares,
            version,
        };
        Ok(Some((Bound::new(py, joined)?, wholes)))
    }

    /// Hands the whole parameters to the forward of the program. They are not kept: a copy of parts that are not adjacent
    /// is as large as the weight, and backward reads it only where it was saved for it.
    pub(crate) fn take_wholes<'py>(&self, py: Python<'py>) -> Objects<'py> {
        let wholes = std::mem::take(&mut *self.wholes.lock().unwrap_or_else(PoisonError::into_inner));
        wholes.into_iter().map(|whole| whole.into_bound(py)).collect()
    }

    /// If a whole parameter is a copy of its parts, a number of their places, and the first of them.
    pub(crate) fn copied(&self, param: usize) -> Option<(usize, &Py<PyAny>)> {
        let place = self.shares.get(param)?.copied?;
        self.shares().nth(param).and_then(|(_, parts, _)| Some((place, parts.first()?)))
    }

    /// Whether a whole parameter is a copy of its parts.
    pub(crate) fn is_copied(&self, param: usize) -> bool {
        self.copied(param).is_some()
    }

    fn has_copied_weights(&self) -> bool {
        self.shares.iter().any(|share| share.is_weight() && share.copied.is_some())
    }

    /// The parts that autograd gets, in order.
    pub(crate) fn edges(&self) -> impl Iterator<Item = &Py<PyAny>> {
        self.shares().flat_map(|(share, parts, _)| match share.edge {
            Some(edge) => &parts[edge..=edge],
            None => parts,
        })
    }

    /// How many these are.
    pub(crate) fn edge_count(&self) -> usize {
        self.shares.iter().map(|share| share.edge.map_or(share.count, |_| 1)).sum()
    }

    /// Version of the whole weights. A copy has one of its own, unless the caller says when the weights change: the parts
    /// may have got other memory, of which only the places are known.
    pub(crate) fn version(&self, microbatch: Microbatch) -> u64 {
        if microbatch == Microbatch::Unknown && self.has_copied_weights() { version_of_copy() } else { self.version }
    }

    /// Whether a part needs a gradient.
    pub(crate) fn is_trained(&self) -> bool {
        self.trained.contains(&true)
    }

    /// For each parameter, its share, its parts, and which of them needed a gradient in forward.
    pub(crate) fn shares(&self) -> impl Iterator<Item = (&Share, &[Py<PyAny>], &[bool])> {
        let mut rest = (self.parts.as_slice(), self.trained.as_slice());
        self.shares.iter().map(move |share| {
            let (parts, trained) = (rest.0.split_at(share.count), rest.1.split_at(share.count));
            rest = (parts.1, trained.1);
            (share, parts.0, trained.0)
        })
    }

    /// Whether a part of a weight that was read without a copy has changed since.
    pub(crate) fn was_changed(&self, state: &State, py: Python<'_>) -> PyResult<bool> {
        if self.has_copied_weights() {
            return Ok(false);
        }
        let mut version = Some(0);
        for (share, parts, _) in self.shares() {
            for part in parts.iter().filter(|_| share.is_weight()) {
                let own = version_of(state, part.bind(py))?;
                version = version.zip(own).map(|(version, own)| version + own);
            }
        }
        Ok(version != Some(self.version))
    }
}

/// The present parameters of a program, joined where they are in parts. None if one must be read in Python: it is gone, is no
/// plain tensor, or is quantised outside of FP8, where the layer warns about the cost.
#[inline]
pub(crate) fn present<'py>(
    state: &State,
    program: &Bound<'py, ProgramHandle>,
    in_fp8: bool,
) -> PyResult<Option<(Option<Bound<'py, Joined>>, Objects<'py>)>> {
    if !program.try_borrow()?.has_parts() {
        return Ok(parameters(state, program, in_fp8)?.map(|params| (None, params)));
    }
    let Some((joined, params)) = Joined::of(state, program)? else { return Ok(None) };
    let is_readable = in_fp8 || params.iter().all(|param| given(state, param).is_none());
    Ok(is_readable.then_some((Some(joined), params)))
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
        let role = match program.chain.linear_params().contains(&index) {
            true if param.fuses => Role::FusedWeight,
            true => Role::Weight,
            false => Role::Other,
        };
        let (is_split, count) = (!param.parts.is_empty(), param.names().len());
        shares.push(Share { rows, is_split, role, edge: None, copied: None, count });
    }
    Ok(Some((parts, shares)))
}

/// What a call reads of each part beside its memory, in one pass over all.
struct Pass<'a> {
    state: &'a State,
    trained: Flags,
    version: u64,
    /// Of the present parameter, which begins at this part.
    from: usize,
    is_weight: bool,
    fuses: bool,
    has_trained: bool,
    edge: Option<LoneEdge>,
    /// A number of the addresses of its parts.
    places: usize,
}

impl<'a> Pass<'a> {
    fn new(state: &'a State, parts: usize) -> Self {
        let trained = Flags::with_capacity(parts);
        Self {
            state,
            trained,
            version: 0,
            from: 0,
            is_weight: false,
            fuses: false,
            has_trained: false,
            edge: None,
            places: 0,
        }
    }

    /// Begins with a parameter of several parts.
    fn begin(&mut self, share: &Share, has_grads: bool) {
        (self.from, self.has_trained, self.places) = (self.trained.len(), false, 0);
        (self.is_weight, self.fuses) = (share.is_weight(), share.fuses());
        self.edge = (self.fuses && has_grads).then(LoneEdge::default);
    }

    /// Reads a part; false if it has no version.
    #[inline]
    fn read(&mut self, part: &Bound<'_, PyAny>, address: usize) -> PyResult<bool> {
        self.places = self.places.rotate_left(7) ^ address;
        let Some(version) = version_of(self.state, part)? else { return Ok(false) };
        if self.is_weight {
            self.version += version;
        }
        let is_known = self.has_trained && !self.fuses;
        let is_trained = is_known || part.getattr(&self.state.torch.names.requires_grad)?.is_truthy()?;
        self.has_trained |= is_trained;
        if let (true, Some(edge)) = (is_trained, &mut self.edge) {
            edge.note(self.state, part, self.trained.len() - self.from)?;
        }
        self.trained.push(is_trained);
        Ok(true)
    }

    /// Reads a parameter in one piece.
    fn read_whole(&mut self, share: &Share, whole: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some(version) = version_of(self.state, whole)? else { return Ok(false) };
        if share.is_weight() {
            self.version += version;
        }
        self.trained.push(false);
        Ok(true)
    }
}

/// A number that changes whenever a part may have changed; none if it has no version.
#[inline]
fn version_of(state: &State, part: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if let Some(value) = given(state, part) {
        // The numbers of values never fall.
        return Ok(Some(QuantizedValue::stamp(&value)?.unwrap_or(0)));
    }
    match part.getattr(&state.torch.names.version) {
        Ok(version) => Ok(Some(version.extract::<i64>()? as u64)), // CPython reads signed numbers sooner
        Err(error) if error.is_instance_of::<PyRuntimeError>(part.py()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The parts as one tensor, if they are adjacent in one storage, else a copy (true); none if they do not fit each
/// other, or if `note`, which sees each of them and its address, says so.
pub(crate) fn join<'py>(
    state: &State,
    parts: &[Bound<'py, PyAny>],
    rows: &mut SmallVec<[i64; 4]>,
    mut note: impl FnMut(&Bound<'py, PyAny>, usize) -> PyResult<bool>,
) -> PyResult<Option<(Bound<'py, PyAny>, bool)>> {
    let py = parts[0].py();
    if let Some(value) = given(state, &parts[0]) {
        for part in parts {
            if !note(part, 0)? {
                return Ok(None);
            }
        }
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
        if !note(part, view.data().address())? {
            return Ok(None);
        }
    }
    if adjacent && end <= end_of_storage(&parts[0])? {
        let mut size: SmallVec<[i64; 2]> = first.shape().into();
        size[0] = rows.iter().sum();
        let whole = state.torch.in_storage_of(&parts[0], &size, 0)?;
        // As `whole_of` in runtime/parts.py: the parts, which are parameters, keep its memory.
        whole.setattr(intern!(py, "_TE_do_not_offload"), true)?;
        return Ok(Some((whole, false)));
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
