//! Parameters that are quantised tensors, in a compiled call: each is two tensors, bytes and scales, or a stack of them.
//!
//! Python takes them apart when torch dispatches an operator, so that a graph has only inner tensors. The trace decides
//! which layout backward reads.

use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::Device;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::program::Program;
use te_fast_core::quant::value::Quantized;

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::call::TracedCall;
use crate::graphs::kinds::GivenKind;
use crate::graphs::operands::{Operand, Operands};
use crate::tensor::given::check_layout;
use crate::tensor::value::QuantizedValue;
use crate::torch::process::State;

/// The parameters of a forward: operands for plain ones, and the row layout of quantised ones.
pub(super) struct Params<'a, 'py> {
    pub(super) views: SmallVec<[TensorView<'a>; 6]>,
    /// Of a quantised one, its bytes.
    pub(super) operands: SmallVec<[Operand<'a, 'py>; 6]>,
    given: SmallVec<[(usize, Quantized<'a>); 2]>,
}

impl<'a, 'py> Params<'a, 'py> {
    /// Takes them from the call's tensors.
    pub(super) fn take(traced: &TracedCall, from: &mut Operands<'a, 'py>) -> Result<Self, Failure> {
        let mut params = Self { views: SmallVec::new(), operands: SmallVec::new(), given: SmallVec::new() };
        for (param, kind) in traced.given.iter().enumerate() {
            let operand = from.take()?;
            params.operands.push(operand);
            let Some(kind) = kind else {
                params.views.push(operand.view);
                continue;
            };
            let scale = from.take()?.view;
            let nominal = nominal(traced, param, operand.view.device())?;
            params.given.push((param, layout(*kind, (&operand.view, &scale), &nominal, false)?));
            params.views.push(nominal);
        }
        Ok(params)
    }

    /// The row layout of a weight that is a quantised parameter.
    pub(super) fn row_of(&self, param: usize) -> Option<Quantized<'a>> {
        self.given.iter().find(|(known, _)| *known == param).map(|&(_, row)| row)
    }
}

/// The view of a quantised parameter: shape and type, without memory.
fn nominal<'a>(traced: &TracedCall, param: usize, device: Device) -> Result<TensorView<'a>, Failure> {
    let shape = &traced.param_shapes[param];
    let view = TensorView::new(DevPtr::null(), device, traced.key.params[param].0.into(), shape, None);
    view.ok_or_else(|| Error::shape(OP, "a quantised parameter", "of few dimensions", format!("{shape:?}")).into())
}

fn layout<'a>(
    kind: GivenKind,
    (data, scale): (&TensorView<'a>, &TensorView<'a>),
    nominal: &TensorView<'_>,
    columnwise: bool,
) -> Result<Quantized<'a>, Failure> {
    check_layout((kind.block, kind.groups), (data, scale), (nominal.device(), nominal), columnwise)?;
    Ok(Quantized { data: data.data(), scale: scale.data() })
}

/// A weight's layout that backward reads.
pub(super) enum Layout<'a, 'py> {
    There(Quantized<'a>),
    /// The column layout, made for this backward, since the parameter has no valid one.
    Made(Bound<'py, PyAny>, Bound<'py, PyAny>),
}

impl<'a, 'py> Layout<'a, 'py> {
    /// Takes that of a linear op's weight from the call's tensors, if that is a quantised parameter.
    pub(super) fn take(
        traced: &TracedCall,
        (program, linear): (&Program, usize),
        from: &mut Operands<'a, 'py>,
    ) -> Result<Option<Self>, Failure> {
        let param = program.linear_param(linear);
        let Some(kind) = traced.given[param] else { return Ok(None) };
        let (data, scale) = (from.take()?, from.take()?);
        let nominal = nominal(traced, param, traced.key.device)?;
        let given = layout(kind, (&data.view, &scale.view), &nominal, kind.columnwise)?;
        if kind.columnwise || !program.weight_layout(linear).usage.columnwise {
            return Ok(Some(Self::There(given)));
        }
        let py = data.object.py();
        let row = [data.object.clone(), scale.object.clone()];
        let value = QuantizedValue::of_row((kind.block, kind.groups), kind.fp8, row);
        let (col, col_scale) = value.columns(py, false)?;
        Ok(Some(Self::Made(col, col_scale.unwrap_or_else(|| scale.object.clone()))))
    }

    /// Addresses in row and column layout of a program that reads `columnwise`.
    pub(super) fn layouts(&'a self, state: &State, columnwise: bool) -> Result<[Quantized<'a>; 2], Error> {
        let one = match self {
            Self::There(given) => *given,
            Self::Made(data, scale) => {
                Quantized { data: state.pointer(Some(data))?, scale: state.pointer(Some(scale))? }
            }
        };
        Ok(if columnwise { [Quantized::NONE, one] } else { [one, Quantized::NONE] })
    }
}
