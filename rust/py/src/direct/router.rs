//! Routers of mixtures for Python: read the tensors, allocate the requested outputs, run the plan.

use pyo3::prelude::*;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::router::{
    BalancePointers, Over, RouterBwdPointers, RouterPlan, RouterPointers, RouterSpec, Score,
};
use te_fast_core::{Error, Float};

use crate::direct::call::{DirectCall, Input};
use crate::error::IntoPython;
use crate::torch::process::{State, state};

const OP: &str = "router";

/// How a router chooses: topk, groups, groups of a token, scores, the normalised experts, factor.
pub(crate) type Choice<'a> = (usize, usize, usize, &'a str, &'a str, f32);

/// The choice, for any number of tokens.
pub(crate) fn spec_of(
    (topk, groups, group_topk, score, over, factor): Choice<'_>,
    input: Float,
) -> Result<RouterSpec, Error> {
    let score = match score {
        "softmax" => Score::Softmax,
        "sigmoid" => Score::Sigmoid,
        "sqrtsoftplus" => Score::SqrtSoftplus,
        other => return Err(Error::value(OP, format!("no scores are called {other:?}"))),
    };
    let over = match over {
        "chosen" => Over::Chosen,
        "before" => Over::Before,
        "all" => Over::All,
        other => return Err(Error::value(OP, format!("nothing that is normalised is called {other:?}"))),
    };
    let (tokens, experts, index_bytes) = (0, 0, 0);
    Ok(RouterSpec { tokens, experts, topk, groups: (groups, group_topk), score, over, factor, input, index_bytes })
}

/// Tokens and experts of a tensor.
fn sizes(view: &TensorView<'_>) -> (usize, usize) {
    let experts = view.shape().last().map_or(0, |&experts| experts as usize);
    (view.numel() / experts.max(1), experts)
}

fn data<'a>(view: Option<&TensorView<'a>>) -> DevPtr<'a> {
    view.map_or(DevPtr::null(), TensorView::data)
}

/// A histogram that a router adds to, and the bounds of its bins.
pub(crate) struct Balance<'a, 'py> {
    histogram: Input<'a, 'py>,
    bounds: Input<'a, 'py>,
}

impl<'a, 'py> Balance<'a, 'py> {
    fn new(state: &State, (histogram, bounds): &'a (Bound<'py, PyAny>, Bound<'py, PyAny>)) -> PyResult<Self> {
        let histogram = Input::new(state, histogram, "qb_histogram")?;
        Ok(Self { histogram, bounds: Input::new(state, bounds, "qb_bin_bounds")? })
    }

    /// The checked pointers, and the number of bins.
    fn pointers<'b>(
        &'b self,
        call: &DirectCall<'_, 'py>,
        experts: usize,
    ) -> PyResult<(BalancePointers<DevPtr<'b>>, usize)> {
        if self.histogram.is_copy() {
            return Err(Error::value(OP, "qb_histogram is written in place and must be contiguous")).python();
        }
        let (histogram, bounds) = (self.histogram.view(call.state)?, self.bounds.view(call.state)?);
        for (view, what, dtype) in [(&histogram, "qb_histogram", DType::I32), (&bounds, "qb_bin_bounds", DType::F32)] {
            call.same_device(view, what)?;
            call.dtype(view, what, dtype)?;
        }
        call.shape(&bounds, "qb_bin_bounds", &[2])?;
        let bins = histogram.shape().last().map_or(0, |&bins| bins);
        call.shape(&histogram, "qb_histogram", &[experts as i64, bins])?;
        Ok((BalancePointers { histogram: histogram.data(), bounds: bounds.data() }, bins as usize))
    }
}

/// Probabilities, scores for backward, map and its bits; the last three only on request. Writes `indices`, and adds to the
/// histogram of `balance`.
#[pyfunction]
#[pyo3(signature = (logits, bias, choice, indices, wanted, balance = None, /))]
pub(crate) fn router_forward<'py>(
    logits: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    choice: Choice<'_>,
    indices: Option<&Bound<'py, PyAny>>,
    wanted: (bool, bool, bool),
    balance: Option<&Bound<'py, PyAny>>,
) -> PyResult<[Option<Bound<'py, PyAny>>; 4]> {
    let py = logits.py();
    let state = state(py)?;
    let (logits, bias) = (Input::new(state, logits, "logits")?, Input::optional(state, bias, "expert_bias")?);
    let indices = Input::optional(state, indices, "topk_indices")?;
    let view = logits.view(state)?;
    let call = DirectCall::new(state, py, OP, view.device())?;
    let input = call.float(&view, "logits")?;
    let (tokens, experts) = sizes(&view);
    let bias = bias.as_ref().map(|bias| bias.view(state)).transpose()?;
    if let Some(bias) = &bias {
        call.same_device(bias, "expert_bias")?;
        call.dtype(bias, "expert_bias", DType::F32)?;
        call.shape(bias, "expert_bias", &[experts as i64])?;
    }
    let indices = indices.as_ref().map(|indices| indices.view(state)).transpose()?;
    let mut spec = RouterSpec { tokens, experts, ..spec_of(choice, input).python()? };
    if let Some(indices) = &indices {
        call.same_device(indices, "topk_indices")?;
        if indices.numel() != tokens * spec.topk {
            let expected = format!("{tokens} x {} experts", spec.topk);
            return Err(Error::shape(OP, "topk_indices", expected, indices.numel())).python();
        }
        spec.index_bytes = match indices.dtype() {
            DType::I16 => 2,
            DType::I32 => 4,
            DType::I64 => 8,
            other => return Err(Error::dtype(OP, "topk_indices", "integers of 16, 32 or 64 bits", other)).python(),
        };
    }
    let balance = balance.map(PyAnyMethods::extract).transpose()?;
    let balance = balance.as_ref().map(|balance| Balance::new(state, balance)).transpose()?;
    let balance = balance.as_ref().map(|balance| balance.pointers(&call, experts)).transpose()?;
    let plan = RouterPlan::new(spec).python()?;
    let (shape, (scores, map, bits)) = (view.shape(), wanted);
    let mut in_bits = shape.to_vec();
    in_bits.iter_mut().rev().take(1).for_each(|last| *last = experts.div_ceil(8) as i64);
    let make = |wanted: bool, shape: &[i64], dtype| wanted.then(|| call.empty(shape, dtype)).transpose();
    let probs = make(true, shape, if spec.over == Over::All { DType::F32 } else { input.into() })?;
    let scores = make(scores, shape, DType::F32)?;
    let map = make(map, shape, DType::Bool)?;
    let bits = make(bits, &in_bits, DType::U8)?;
    let at = RouterPointers {
        logits: view.data(),
        bias: data(bias.as_ref()),
        probs: call.pointer(probs.as_ref())?,
        scores: call.pointer(scores.as_ref())?,
        map: call.pointer(map.as_ref())?,
        bits: call.pointer(bits.as_ref())?,
        indices: data(indices.as_ref()),
    };
    call.run(0, |target, _| match &balance {
        None => plan.run(target, &at),
        Some((balance, bins)) => plan.run_balanced(target, &at, balance, *bins),
    })?;
    Ok([probs, scores, map, bits])
}

/// Gradient of the logits, in `dlogits`.
#[pyfunction]
#[pyo3(signature = (grad, scores, map, choice, dlogits, /))]
pub(crate) fn router_backward<'py>(
    grad: &Bound<'py, PyAny>,
    scores: &Bound<'py, PyAny>,
    map: Option<&Bound<'py, PyAny>>,
    choice: Choice<'_>,
    dlogits: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let py = grad.py();
    let state = state(py)?;
    let (grad, scores) = (Input::new(state, grad, "the gradient")?, Input::new(state, scores, "the scores")?);
    let (map, dlogits) = (Input::optional(state, map, "the map")?, Input::new(state, dlogits, "the logits' gradient")?);
    let (grad, scores, dlogits) = (grad.view(state)?, scores.view(state)?, dlogits.view(state)?);
    let map = map.as_ref().map(|map| map.view(state)).transpose()?;
    let call = DirectCall::new(state, py, OP, scores.device())?;
    let input = call.float(&dlogits, "the logits' gradient")?;
    let (tokens, experts) = sizes(&scores);
    let spec = RouterSpec { tokens, experts, groups: (0, 0), ..spec_of(choice, input).python()? };
    let is_all = spec.over == Over::All;
    let shape = scores.shape();
    for (view, what) in [(&grad, "the gradient"), (&dlogits, "the logits' gradient")] {
        call.same_device(view, what)?;
        call.shape(view, what, shape)?;
    }
    call.dtype(&grad, "the gradient", if is_all { DType::F32 } else { input.into() })?;
    call.dtype(&scores, "the scores", DType::F32)?;
    match &map {
        Some(map) => {
            call.same_device(map, "the map")?;
            call.dtype(map, "the map", DType::Bool)?;
            call.shape(map, "the map", shape)?;
        }
        None if !is_all => return Err(Error::value(OP, "the gradient of probabilities needs the map")).python(),
        None => {}
    }
    let plan = RouterPlan::new(spec).python()?;
    let at = RouterBwdPointers {
        grad: grad.data(),
        scores: scores.data(),
        map: data(map.as_ref()),
        dlogits: dlogits.data(),
    };
    call.run(0, |target, _| plan.run_bwd(target, &at))
}
