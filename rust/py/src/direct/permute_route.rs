//! The preparation of every permutation of tokens: read its inputs, check its route, make the tensors of the map.

use pyo3::prelude::*;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::launch::target::Target;
use te_fast_core::ops::permute_map::{Making, MapPlan, MapPointers, MapSpec, Routing};
use te_fast_core::ops::row_map::{Layout, MapBuffers, MapShape, Prob};
use te_fast_core::runtime::lane::Workspace;
use te_fast_core::{Error, Float};

use crate::direct::call::{DirectCall, Input};
use crate::error::IntoPython;
use crate::torch::process::State;

/// Rows, routing map and probabilities as the caller gave them, made contiguous.
pub(crate) struct TokenInputs<'a, 'py> {
    inp: Input<'a, 'py>,
    routing_map: Input<'a, 'py>,
    probs: Option<Input<'a, 'py>>,
}

/// The same, read.
pub(crate) struct TokenViews<'a> {
    pub(crate) x: TensorView<'a>,
    pub(crate) routing: TensorView<'a>,
    probs: Option<TensorView<'a>>,
}

impl<'a, 'py> TokenInputs<'a, 'py> {
    pub(crate) fn new(
        state: &State,
        inp: &'a Bound<'py, PyAny>,
        routing_map: &'a Bound<'py, PyAny>,
        probs: Option<&'a Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        Ok(Self {
            inp: Input::new(state, inp, "inp")?,
            routing_map: Input::new(state, routing_map, "routing_map")?,
            probs: Input::optional(state, probs, "probs")?,
        })
    }

    pub(crate) fn views(&self, state: &State) -> PyResult<TokenViews<'_>> {
        Ok(TokenViews {
            x: self.inp.view(state)?,
            routing: self.routing_map.view(state)?,
            probs: self.probs.as_ref().map(|probs| probs.view(state)).transpose()?,
        })
    }
}

impl<'a> TokenViews<'a> {
    /// Pointer to the probabilities, null for none.
    pub(crate) fn probs(&self) -> DevPtr<'a> {
        self.probs.as_ref().map_or(DevPtr::null(), TensorView::data)
    }
}

/// The caller's options of the permutation.
#[derive(Clone, Copy)]
pub(crate) struct RouteSpec {
    pub(crate) rows: usize,
    pub(crate) align: usize,
    pub(crate) index: bool,
}

/// A checked route: sizes and types, and the plan of its map.
pub(crate) struct Route {
    pub(crate) cols: usize,
    pub(crate) float: Float,
    pub(crate) prob: Option<Prob>,
    pub(crate) shape: MapShape,
    pub(crate) plan: MapPlan,
}

impl Route {
    pub(crate) fn new(call: &DirectCall<'_, '_>, views: &TokenViews<'_>, spec: RouteSpec) -> PyResult<Self> {
        let (tokens, cols) = call.matrix(&views.x, "inp")?;
        let float = call.float(&views.x, "inp")?;
        let (layout, routing) = routing_of(call, &views.routing, spec.index, tokens)?;
        let shape = MapShape { tokens, rows: spec.rows, layout };
        let prob = call.probs(views.probs.as_ref(), tokens, shape.slots())?;
        let plan = MapPlan::new(MapSpec { shape, routing, align: spec.align.max(1), leads: true }).python()?;
        Ok(Self { cols, float, prob, shape, plan })
    }

    /// The same with a map that also fills a number of words of 16 bytes.
    pub(crate) fn filling(self, words: u32) -> Self {
        Self { plan: self.plan.filling(words), ..self }
    }

    /// The ends of the experts' rows, if the caller keeps none, and the memory for the map.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.ends_bytes() + self.plan.scratch_bytes().next_multiple_of(256)
    }

    fn ends_bytes(&self) -> usize {
        (4 * self.plan.experts()).next_multiple_of(256)
    }

    /// The map as the permutation's launch makes and reads it.
    pub(crate) fn making<'a>(
        &self,
        target: &mut Target<'_>,
        outputs: &MapPointers<DevPtr<'a>>,
        workspace: Workspace<'a>,
    ) -> te_fast_core::Result<(Making<'a>, MapBuffers<'a>)> {
        let Workspace { scratch, counters: state, .. } = workspace;
        let ends = if outputs.ends.is_null() { scratch } else { outputs.ends };
        let outputs = MapPointers { ends, counts: scratch.offset(self.ends_bytes()), state, ..*outputs };
        self.plan.make(target, &outputs)
    }
}

/// The tensors that a permutation returns.
pub(crate) struct Permuted<'py> {
    pub(crate) out: Bound<'py, PyAny>,
    pub(crate) probs: Option<Bound<'py, PyAny>>,
    pub(crate) map: MapTensors<'py>,
}

impl<'py> Permuted<'py> {
    pub(crate) fn new(call: &DirectCall<'_, 'py>, route: &Route, dtype: DType, wanted: Wanted) -> PyResult<Self> {
        let rows = route.shape.rows as i64;
        Ok(Self {
            map: MapTensors::new(call, &route.shape, &route.plan, wanted)?,
            out: call.empty(&[rows, route.cols as i64], dtype)?,
            probs: route.prob.map(|prob| call.empty(&[rows], prob.into())).transpose()?,
        })
    }
}

/// A routing map in the form of the map kernel.
pub(crate) fn routing_of(
    call: &DirectCall<'_, '_>,
    view: &TensorView<'_>,
    index: bool,
    tokens: usize,
) -> PyResult<(Layout, Routing)> {
    call.same_device(view, "routing_map")?;
    let &[rows, columns] = view.shape() else {
        return Err(Error::shape(call.op, "routing_map", "of two dimensions", format_args!("{:?}", view.shape())))
            .python();
    };
    if rows as usize != tokens {
        return Err(Error::shape(call.op, "routing_map", format_args!("of {tokens} rows, one per token"), rows))
            .python();
    }
    let routing = match (Routing::of_mask(view.dtype()).filter(|_| !index), view.dtype()) {
        (Some(mask), _) => mask,
        (None, DType::I32) => Routing::Index,
        (None, other) if !index => {
            return Err(Error::dtype(call.op, "a routing mask", "bool or an integer type of 8, 32 or 64 bits", other))
                .python();
        }
        (None, other) => return Err(Error::dtype(call.op, "routing indices", "torch.int32", other)).python(),
    };
    let columns = columns as usize;
    let layout = if index { Layout::Index { top_k: columns } } else { Layout::Mask { experts: columns } };
    Ok((layout, routing))
}

/// The tensors that a map kernel writes.
pub(crate) struct MapTensors<'py> {
    pub(crate) row_id_map: Bound<'py, PyAny>,
    pub(crate) ends: Option<Bound<'py, PyAny>>,
    pub(crate) pad_offsets: Option<Bound<'py, PyAny>>,
    pub(crate) padded_counts: Option<Bound<'py, PyAny>>,
}

/// The options of a map call.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) pads: bool,
    pub(crate) ends: bool,
}

impl<'py> MapTensors<'py> {
    pub(crate) fn new(call: &DirectCall<'_, 'py>, shape: &MapShape, plan: &MapPlan, wanted: Wanted) -> PyResult<Self> {
        let experts = plan.experts() as i64;
        let map_size = match shape.layout {
            Layout::Mask { experts } => vec![shape.tokens as i64, 2 * experts as i64 + 1],
            Layout::Index { top_k } => vec![(shape.tokens * top_k) as i64],
        };
        let per_expert = |wanted: bool, dtype| wanted.then(|| call.empty(&[experts], dtype)).transpose();
        Ok(Self {
            row_id_map: call.empty(&map_size, DType::I32)?,
            ends: per_expert(wanted.ends, DType::I32)?,
            pad_offsets: per_expert(wanted.pads, DType::I64)?,
            padded_counts: per_expert(wanted.pads, DType::I64)?,
        })
    }
}

/// Pointers of the map's tensors; counts, state and totals are the caller's to set.
pub(crate) fn map_outputs<'a>(
    call: &DirectCall<'_, '_>,
    routing: &TensorView<'a>,
    map: &'a MapTensors<'_>,
) -> PyResult<MapPointers<DevPtr<'a>>> {
    let pointer = |tensor: Option<&'a Bound<'_, PyAny>>| call.state.pointer(tensor).python();
    Ok(MapPointers {
        routing: routing.data(),
        row_id_map: pointer(Some(&map.row_id_map))?,
        ends: pointer(map.ends.as_ref())?,
        pad_offsets: pointer(map.pad_offsets.as_ref())?,
        padded_counts: pointer(map.padded_counts.as_ref())?,
        ..MapPointers::default()
    })
}
