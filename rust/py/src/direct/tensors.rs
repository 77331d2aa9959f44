//! Checks of tensors in direct calls, for the wrappers of `te_fast.dispatch`.

use std::ops::Range;

use pyo3::prelude::*;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::{Error, Fp8};

use crate::direct::call::DirectCall;
use crate::error::IntoPython;
use crate::torch::process::State;
use crate::torch::reader::view_of;

/// An FP8 type by its name.
pub(crate) fn fp8_named(name: &str) -> PyResult<Fp8> {
    match name {
        "e4m3" => Ok(Fp8::E4m3),
        "e5m2" => Ok(Fp8::E5m2),
        other => Err(Error::value("fp8", format!("type must be e4m3 or e5m2, got {other:?}"))).python(),
    }
}

/// A contiguous view with aligned elements.
pub(crate) fn contiguous<'a>(
    state: &State,
    tensor: &'a Bound<'_, PyAny>,
    op: &'static str,
    what: &'static str,
) -> PyResult<TensorView<'a>> {
    let view = view_of(&state.reader, tensor, what).python()?;
    if !view.is_contiguous() {
        return Err(Error::layout(op, what, "contiguous", format!("strides {:?}", view.strides()))).python();
    }
    Ok(view)
}

/// A contiguous tensor of the call's device, as `(rows, cols)`.
pub(crate) fn matrix<'a>(
    call: &DirectCall<'_, '_>,
    tensor: &'a Bound<'_, PyAny>,
    what: &'static str,
) -> PyResult<TensorView<'a>> {
    let view = view_of(&call.state.reader, tensor, what).python()?;
    call.same_device(&view, what)?;
    if view.numel() != 0 && !view.is_contiguous() {
        return Err(Error::layout(call.op, what, "contiguous", format_args!("strides {:?}", view.strides()))).python();
    }
    Ok(view)
}

/// An optional tensor of `count` elements of `dtype`; null for none.
pub(crate) fn sized<'a>(
    call: &DirectCall<'_, '_>,
    tensor: Option<&'a Bound<'_, PyAny>>,
    what: &'static str,
    dtype: DType,
    count: usize,
) -> PyResult<DevPtr<'a>> {
    let Some(tensor) = tensor else { return Ok(DevPtr::null()) };
    let view = matrix(call, tensor, what)?;
    call.dtype(&view, what, dtype)?;
    if view.numel() != count {
        return Err(Error::shape(call.op, what, format_args!("{count} elements"), view.numel())).python();
    }
    Ok(view.data())
}

/// One float32 beside `like`; null for none.
pub(crate) fn single_f32<'a>(
    state: &State,
    tensor: Option<&'a Bound<'_, PyAny>>,
    what: &'static str,
    like: &TensorView<'_>,
) -> PyResult<DevPtr<'a>> {
    let Some(tensor) = tensor else { return Ok(DevPtr::null()) };
    let view = view_of(&state.reader, tensor, what).python()?;
    if view.dtype() != DType::F32 || view.numel() != 1 || view.device() != like.device() {
        return Err(Error::shape(
            "quantize",
            what,
            "one float32 on the input's device",
            format!("{:?} {} on {}", view.shape(), view.dtype(), view.device()),
        ))
        .python();
    }
    Ok(view.data())
}

type OptionalTensor<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// Refuses outputs that share memory with another tensor of the call, since kernels read and write in any order.
pub(crate) fn check_apart(
    state: &State,
    op: &'static str,
    inputs: &[OptionalTensor<'_, '_>],
    outputs: &[OptionalTensor<'_, '_>],
) -> PyResult<()> {
    let mut taken = Vec::with_capacity(inputs.len() + outputs.len());
    for (index, tensor) in inputs.iter().chain(outputs).enumerate() {
        let Some(tensor) = tensor else { continue };
        let view = view_of(&state.reader, tensor, "a tensor").python()?;
        let begin = view.data().address();
        let bytes = begin..begin + view.numel() * view.dtype().size();
        let overlaps = |other: &Range<usize>| other.start < bytes.end && bytes.start < other.end;
        if index >= inputs.len() && taken.iter().any(overlaps) {
            let got = format_args!("{:?} of {}, in which another one lies", view.shape(), view.dtype());
            return Err(Error::layout(op, "an output", "in memory of its own", got)).python();
        }
        taken.push(bytes);
    }
    Ok(())
}

/// The FP8 type that the layouts agree on.
pub(crate) fn fp8_of(call: &DirectCall<'_, '_>, layouts: [&Option<Bound<'_, PyAny>>; 2]) -> PyResult<Option<Fp8>> {
    let mut found = None;
    for tensor in layouts.into_iter().flatten() {
        let view = matrix(call, tensor, "the FP8 output")?;
        let fp8 = match view.dtype() {
            DType::E4m3 => Fp8::E4m3,
            DType::E5m2 => Fp8::E5m2,
            other => {
                let expected = "torch.float8_e4m3fn or torch.float8_e5m2";
                return Err(Error::dtype(call.op, "the FP8 output", expected, other)).python();
            }
        };
        if found.is_some_and(|found| found != fp8) {
            return Err(Error::dtype(call.op, "the transposed output", "of the row layout's type", view.dtype()))
                .python();
        }
        found = Some(fp8);
    }
    Ok(found)
}

/// Opens a call on the device of `x`, which is contiguous.
pub(crate) fn start<'s, 'py>(
    state: &'s State,
    py: Python<'py>,
    op: &'static str,
    x: &TensorView<'_>,
) -> PyResult<DirectCall<'s, 'py>> {
    let call = DirectCall::new(state, py, op, x.device())?;
    if x.numel() == 0 || x.is_contiguous() {
        return Ok(call);
    }
    Err(Error::layout(op, "x", "contiguous", format_args!("strides {:?}", x.strides()))).python()
}
