//! Checks of a program's tensors in every call: a compiled program is found by types, and relies on sizes.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::program::{Chain, Op, Program};

use crate::error::Failure;
use crate::program::handle::Parameter;
use crate::program::tensors::Tensors;

const OP: &str = "ops";

/// Refuses tensors of a forward that do not fit the chain; `widths` are the columns of its edges.
pub(crate) fn check(
    py: Python<'_>,
    (chain, params): (&Chain, &[Parameter]),
    tensors: &Tensors<'_>,
    rows: usize,
    widths: impl Iterator<Item = usize>,
) -> Result<(), Failure> {
    let x = &tensors.x;
    let needs_rows = chain.links().iter().find(|link| !link.op.is_elementwise());
    if let (Some(link), true) = (needs_rows, x.shape().is_empty()) {
        let expected = format!("a tensor of at least one dimension, as op {} takes it", link.label);
        return Err(Error::shape(OP, "the input", expected, "a scalar").into());
    }
    for (param, view) in params.iter().zip(&tensors.params) {
        let name = param.name.bind(py);
        if view.device() != x.device() {
            if tensors.params[0].device() == x.device() {
                let expected = format!("{}, where the input is (it is {name}; move it with .to())", x.device());
                return Err(Error::device(OP, "a parameter", expected, view.device()).into());
            }
            let expected = format!("{}, where parameter {name} is (move one with .to())", view.device());
            return Err(Error::device(OP, "the input", expected, x.device()).into());
        }
    }
    chain.check_params(tensors.params.iter().map(TensorView::shape))?;
    if tensors.extras.is_empty() {
        return Ok(());
    }
    for (link, cols) in chain.links().iter().zip(widths) {
        for (number, extra) in tensors.extras[link.extra_input..][..link.extra_inputs()].iter().enumerate() {
            if extra.device() != x.device() {
                let expected = format!("{}, where the input of op {} is", x.device(), link.label);
                return Err(Error::device(OP, "an extra input", expected, extra.device()).into());
            }
            link.check_extra(number, extra.shape(), (rows, cols), extra.dtype(), x.dtype())?;
            if matches!(link.op, Op::AddExtraInput { .. }) && leading(extra) != leading(x) {
                let expected =
                    format!("the leading dimensions of the input, {:?}, as op {} adds it", x.shape(), link.label);
                return Err(Error::shape(OP, "an extra input", expected, format!("{:?}", extra.shape())).into());
            }
        }
    }
    Ok(())
}

/// All dimensions but the last, without ones at the front, which addition ignores.
fn leading<'a>(tensor: &'a TensorView<'_>) -> &'a [i64] {
    let sizes = tensor.shape().split_last().map_or(&[][..], |(_, sizes)| sizes);
    &sizes[sizes.iter().take_while(|&&size| size == 1).count()..]
}

/// Refuses a gradient of the output, or of extra output `index - 1`, that a Python op made with another shape or type
/// than its tensor.
pub(crate) fn check_grad(program: &Program, rows: usize, index: usize, grad: &TensorView<'_>) -> Result<(), Error> {
    let key = program.key();
    let (what, (cols, dtype)) = if index == 0 {
        ("the gradient of the output", (program.out_cols(), key.activation))
    } else {
        ("the gradient of an extra output", program.extra_output_kinds()[index - 1])
    };
    let (dtype, device) = (DType::from(dtype), key.device);
    if grad.dtype() != dtype || grad.device() != device {
        let got = format!("{} on {}", grad.dtype(), grad.device());
        return Err(Error::dtype(OP, what, format!("{dtype} on {device}, {rows} rows of {cols}"), got));
    }
    if grad.numel() != rows * cols || (grad.numel() != 0 && grad.cols() != cols && !grad.shape().is_empty()) {
        let expected = format!("{dtype} on {device}, {rows} rows of {cols}, as its tensor");
        return Err(Error::shape(OP, what, expected, format!("a tensor of shape {:?}", grad.shape())));
    }
    Ok(())
}
