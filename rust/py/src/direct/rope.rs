//! The rotation of heads: of any tensors, and of queries and keys in the product that has them in its columns.
//! `te_fast.attention.rope` calls it.

use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::tensor::{MAX_DIMS, TensorView};
use te_fast_core::ops::packed_heads::{PackedHeads, Waves, join, split};
use te_fast_core::ops::rope::{Turn, rotate as rotate_heads};

use crate::direct::call::DirectCall;
use crate::error::IntoPython;
use crate::torch::operand::contiguous_copy;
use crate::torch::process::{State, Torch, state};
use crate::torch::reader::view_of;

/// One tensor of heads: input, output, cosines and sines.
#[derive(FromPyObject)]
pub(crate) struct TurnArguments<'py> {
    #[pyo3(item(0))]
    input: Bound<'py, PyAny>,
    #[pyo3(item(1))]
    output: Bound<'py, PyAny>,
    #[pyo3(item(2))]
    cos: Option<Bound<'py, PyAny>>,
    #[pyo3(item(3))]
    sin: Option<Bound<'py, PyAny>>,
}

impl TurnArguments<'_> {
    fn read(&self, state: &State) -> PyResult<Turn<'_>> {
        let view = |tensor, what| -> PyResult<TensorView<'_>> { view_of(&state.reader, tensor, what).python() };
        let waves = match (&self.cos, &self.sin) {
            (Some(cos), Some(sin)) => Some([view(cos, "cosines")?, view(sin, "sines")?]),
            _ => None,
        };
        Ok(Turn { input: view(&self.input, "heads")?, output: view(&self.output, "the output")?, waves })
    }
}

/// Rotates the heads of up to three tensors in one launch.
#[pyfunction]
#[pyo3(signature = (turns, interleaved, transposed, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts lists by value")]
pub(crate) fn rotate(
    py: Python<'_>,
    turns: Vec<TurnArguments<'_>>,
    interleaved: bool,
    transposed: bool,
) -> PyResult<()> {
    let state = state(py)?;
    let Some(first) = turns.first() else { return Ok(()) };
    let device = first.read(state)?.input.device();
    let call = DirectCall::new(state, py, "rotate", device)?;
    let mut read = [None; 3];
    if turns.len() > read.len() {
        return Err(Error::value("rotate", format_args!("at most 3 tensors, got {}", turns.len()))).python();
    }
    for (slot, turn) in read.iter_mut().zip(&turns) {
        let turn = turn.read(state)?;
        for (view, what) in [(&turn.input, "heads"), (&turn.output, "the output")] {
            call.same_device(view, what)?;
        }
        for wave in turn.waves.iter().flatten() {
            call.same_device(wave, "cosines and sines")?;
        }
        *slot = Some(turn);
    }
    call.run(0, |target, _| rotate_heads(target, &read, interleaved, transposed))
}

/// Cosines and signed sines of queries, then of keys.
pub(crate) type WaveTensors<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);
/// An order of four dimensions, as `torch.Tensor.permute` takes it.
pub(crate) type Order = (usize, usize, usize, usize);
/// Heads of queries, groups, channels, and whether the columns are grouped: `te_fast.attention.rope.Heads`.
pub(crate) type Heads = (i64, i64, i64, bool);

pub(crate) fn packed((queries, groups, channels, is_grouped): Heads) -> PyResult<PackedHeads> {
    PackedHeads::new([queries, groups, channels], is_grouped).python()
}

pub(crate) fn read_waves<'a>(call: &DirectCall<'_, '_>, waves: Option<&'a WaveTensors<'_>>) -> PyResult<Waves<'a>> {
    let Some((q_cos, q_sin, k_cos, k_sin)) = waves else { return Ok(None) };
    let read = |wave| -> PyResult<TensorView<'a>> {
        let view = view_of(&call.state.reader, wave, "cosines and sines").python()?;
        call.same_device(&view, "cosines and sines")?;
        Ok(view)
    };
    Ok(Some([[read(q_cos)?, read(q_sin)?], [read(k_cos)?, read(k_sin)?]]))
}

/// Splits a contiguous product into queries, keys and values, the first two rotated: `(..., heads, channels)` each, or in
/// another order of dimensions. The results share one memory, with `in_place` the product's where its order allows that.
#[pyfunction]
#[pyo3(signature = (product, in_place, waves, heads, interleaved, order, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn split_rotated<'py>(
    product: &Bound<'py, PyAny>,
    in_place: bool,
    waves: Option<WaveTensors<'py>>,
    heads: Heads,
    interleaved: bool,
    order: Option<Order>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let state = state(product.py())?;
    let view = view_of(&state.reader, product, "the product").python()?;
    let call = DirectCall::new(state, product.py(), "rotate", view.device())?;
    let (waves, heads) = (read_waves(&call, waves.as_ref())?, packed(heads)?);
    let stays = in_place && heads.are_views();
    let (memory, after) =
        if stays { (product.clone(), heads) } else { (call.empty(view.shape(), view.dtype())?, heads.ungrouped()) };
    let own = view_of(&state.reader, &memory, "the result").python()?;
    let into = if stays { None } else { Some(&own) };
    call.run(0, |target, _| split(target, &heads, &view, into, &waves, interleaved))?;
    let (views, offsets) = (after.views(&own).python()?, after.offsets());
    let result = |at: usize| {
        let part = match order {
            Some((a, b, c, d)) => views[at].permuted(&[a, b, c, d]).ok_or_else(|| no_order(&views[at])).python()?,
            None => views[at],
        };
        state.torch.alias(&Torch::to_alias(&memory, part.shape(), part.strides(), offsets[at])?)
    };
    Ok((result(0)?, result(1)?, result(2)?))
}

/// The transpose of [`split_rotated`]: one gradient of the product, from those of queries, keys and values.
#[pyfunction]
#[pyo3(signature = (grads, waves, heads, interleaved, order, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn join_rotated<'py>(
    grads: (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>),
    waves: Option<WaveTensors<'py>>,
    heads: Heads,
    interleaved: bool,
    order: Option<Order>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = grads.0.py();
    let (state, heads) = (state(py)?, packed(heads)?);
    let grads = [adjacent(state, &grads.0)?, adjacent(state, &grads.1)?, adjacent(state, &grads.2)?];
    let view = |grad: usize| -> PyResult<TensorView<'_>> {
        let view = view_of(&state.reader, &grads[grad], "a gradient").python()?;
        let Some((a, b, c, d)) = order else { return Ok(view) };
        view.unpermuted(&[a, b, c, d]).ok_or_else(|| no_order(&view)).python()
    };
    let views = [view(0)?, view(1)?, view(2)?];
    let call = DirectCall::new(state, py, "rotate", views[0].device())?;
    for grad in &views {
        call.same_device(grad, "a gradient")?;
    }
    let waves = read_waves(&call, waves.as_ref())?;
    let mut shape: SmallVec<[i64; MAX_DIMS]> = views[0].shape().into();
    shape.truncate(shape.len().saturating_sub(2));
    shape.push(heads.columns());
    let product = call.empty(&shape, views[0].dtype())?;
    let into = view_of(&state.reader, &product, "the product's gradient").python()?;
    call.run(0, |target, _| join(target, &heads, &views, &into, &waves, interleaved))?;
    Ok(product)
}

/// A tensor whose channels are adjacent: the tensor itself, or a copy.
fn adjacent<'py>(state: &State, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let view = view_of(&state.reader, tensor, "a gradient").python()?;
    if view.strides().last() == Some(&1) || view.shape().last() == Some(&1) {
        return Ok(tensor.clone());
    }
    contiguous_copy(tensor)
}

/// The error for an order that is none of the view's dimensions.
fn no_order(view: &TensorView<'_>) -> Error {
    Error::shape("rotate", "the order", "of all dimensions, each once", format_args!("one for {:?}", view.shape()))
}
