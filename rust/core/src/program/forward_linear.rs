//! Compiles the forward of linear ops: operands, what fuses behind the GEMM, and where the result goes.

use std::sync::Arc;

use te_fast_kernels::Float;

use crate::error::Result;
use crate::gemm::Epilogue;
use crate::ops::activation::Activation;
use crate::ops::affine::{AffinePlan, AffineSpec};
use crate::program::chain::{Link, Op};
use crate::program::forward::{Compiler, Kept, Value};
use crate::program::linear_op::Tail;
use crate::program::memory::{At, Place};
use crate::program::step::{Action, Operand, QuantAt, UnpackAt};
use crate::quantizer::QuantPlan;

/// What a GEMM and its tail are called, by the precision of the result.
struct Text {
    high: &'static str,
    fp8: &'static str,
}

impl Text {
    const fn of(text: &'static str) -> Self {
        Self { high: text, fp8: text }
    }
}

impl Compiler<'_> {
    pub(super) fn linear(&mut self, index: usize, link: &Link, value: &mut Value) -> Result<usize> {
        let linear = link.linear;
        let (tail, d, next, text) = self.tail(index);
        if self.facts.linears[linear].keeps_high() {
            self.out.kept[index] = Kept::Linear { x: QuantAt { data: value.high, scale: At::NONE } };
        }
        let x = if let Some(quantized) = &self.facts.linears[linear].quantized {
            let plan = quantized.x;
            self.quantized_input(index, linear, plan, value)
        } else {
            Operand::high(value.high)
        };
        let w = self.weight_operand(index, link)?;
        let bias = if tail.bias { self.bias(index + 1)? } else { At::NONE };
        let handed_over = if d.is_none() { self.hand_over(index, next, tail)? } else { None };
        let (plan, d, handover, text) = if let Some((plan, row)) = &handed_over {
            (Arc::clone(plan), row.data, row.scale, text.fp8)
        } else {
            let d = match d {
                Some(extra) => extra,
                None => self.place_of(next),
            };
            (self.facts.linears[linear].fprop(self.dispatcher, tail, None)?, d, At::NONE, text.high)
        };
        for operand in [x, w] {
            if let Operand::At(at) = operand {
                self.touch(&[at.data, at.scale]);
            }
        }
        self.touch(&[bias, d, handover]);
        self.step(Action::Gemm { plan, x, w, bias, d, handover }, (index, next - 1), text);
        *value = match handed_over {
            Some((_, row)) => Value { high: At::NONE, quantized: Some((row, QuantAt::default())) },
            None => Value { high: d, quantized: None },
        };
        Ok(next)
    }

    /// What is fused behind the GEMM of the linear op at `index`, where the result goes if that is settled by it, the
    /// next op, and the name of the whole.
    fn tail(&mut self, index: usize) -> (Tail, Option<At>, usize, Text) {
        let mut tail = Tail { bias: false, alpha: 1.0, epilogue: Epilogue::None, accumulate: false };
        let mut next = index + 1;
        tail.bias = matches!(self.op_at(next), Some(Op::Bias { .. }));
        next += usize::from(tail.bias);
        let extra = |at: Option<&Link>| match at {
            Some(link) if matches!(link.op, Op::AddExtraInput { in_place: true }) => {
                Some(At::of(Place::Extra(link.extra_input as u16)))
            }
            _ => None,
        };
        if let Some(extra) = extra(self.link(next)) {
            tail.accumulate = true;
            return (tail, Some(extra), next + 1, Text::of(if tail.bias { "gemm + bias + add" } else { "gemm + add" }));
        }
        if let (false, Some(Op::ConstantScale { scale }), Some(extra)) =
            (tail.bias, self.op_at(next), extra(self.link(next + 1)))
        {
            (tail.alpha, tail.accumulate) = (scale, true);
            return (tail, Some(extra), next + 2, Text::of("gemm + scale + add"));
        }
        if let Some(epilogue) = self.epilogue(next) {
            tail.epilogue = epilogue;
            let text = match (tail.bias, epilogue) {
                (true, Epilogue::Gelu) => Text { high: "gemm + bias + gelu", fp8: "gemm + bias + gelu, in FP8" },
                (true, _) => Text { high: "gemm + bias + relu", fp8: "gemm + bias + relu, in FP8" },
                (false, Epilogue::Gelu) => Text { high: "gemm + gelu", fp8: "gemm + gelu, in FP8" },
                (false, _) => Text { high: "gemm + relu", fp8: "gemm + relu, in FP8" },
            };
            return (tail, None, next + 1, text);
        }
        let text = if tail.bias {
            Text { high: "gemm + bias", fp8: "gemm + bias, in FP8" }
        } else {
            Text { high: "gemm", fp8: "gemm, in FP8" }
        };
        (tail, None, next, text)
    }

    /// cuBLASLt's epilogue for the activation at `index`: where backward needs its input, it is not computed away.
    fn epilogue(&mut self, index: usize) -> Option<Epilogue> {
        let Some(Op::Activation { function, scaled: false, .. }) = self.op_at(index) else { return None };
        let epilogue = match function {
            Activation::Gelu => Epilogue::Gelu,
            Activation::Relu => Epilogue::Relu,
            _ => return None,
        };
        let reason = if self.runs_backward(index) {
            "backward needs the activation's input"
        } else if self.facts.recipe.is_some_and(|recipe| !recipe.is_per_tensor()) {
            "cuBLASLt has no activation behind block-scaled operands"
        } else {
            return Some(epilogue);
        };
        let label = &self.facts.chain.links()[index].label;
        self.out.notes.push(format!("{label} is not an epilogue of the GEMM before it: {reason}"));
        None
    }

    /// The input of a linear op in FP8: as the op before left it, or by a launch of its own.
    fn quantized_input(&mut self, index: usize, linear: usize, plan: QuantPlan, value: &mut Value) -> Operand {
        let (row, col) = if let Some(layouts) = value.quantized.take() {
            layouts
        } else {
            let to = self.fused(linear);
            let spare = self.scratch(plan.scratch_bytes());
            self.touch(&[value.high, spare]);
            let text = if to.col.data.is_some() { "cast + transpose" } else { "cast" };
            let unpack = UnpackAt::default();
            let action = Action::Quantize { plan, x: value.high, to, dbias: At::NONE, spare, unpack };
            self.step(action, (index, index), text);
            (to.row, to.col)
        };
        if col.data.is_some() {
            self.out.kept[index] = Kept::Linear { x: col };
        } else if self.facts.linears[linear].keeps_row() {
            self.out.kept[index] = Kept::Linear { x: row };
        }
        Operand::At(row)
    }

    /// The weight: quantised if the kept one does not serve, or converted, or as it is.
    fn weight_operand(&mut self, index: usize, link: &Link) -> Result<Operand> {
        let linear = &self.facts.linears[link.linear];
        let param = At::of(Place::Param(link.param as u16));
        if let Some(quantized) = &linear.quantized {
            let plan = quantized.w;
            let spare = self.scratch(plan.scratch_bytes());
            self.touch(&[spare]);
            self.step(
                Action::Weight { linear: link.linear, plan, spare },
                (index, index),
                "weight cast, if it changed",
            );
            return Ok(Operand::WeightRow(link.linear));
        }
        if linear.weight == linear.activation {
            return Ok(Operand::high(param));
        }
        let (outputs, inputs, input_grad, from) = (linear.outputs, linear.inputs, linear.input_grad, linear.weight);
        let bytes = outputs * inputs * self.facts.key.activation.size();
        let to = if input_grad { self.out.saved.allocate(bytes) } else { self.scratch(bytes) };
        self.convert(index, param, (outputs, inputs), from, to)?;
        self.out.converted[link.linear] = to;
        Ok(Operand::high(to))
    }

    /// A bias in the type that the GEMM takes.
    fn bias(&mut self, index: usize) -> Result<At> {
        let link = &self.facts.chain.links()[index];
        let (from, wanted) = (self.facts.key.params[link.param].0, self.facts.linears[link.linear - 1].bias_dtype());
        let param = At::of(Place::Param(link.param as u16));
        let Op::Bias { size } = link.op else { return Ok(param) };
        if from == wanted {
            return Ok(param);
        }
        let to = self.scratch(size * wanted.size());
        let plan =
            AffinePlan::new(AffineSpec { rows: 1, cols: size, input: from, output: wanted, row: from, alpha: 1.0 })?;
        self.touch(&[to]);
        self.step(Action::Affine { plan, x: param, r: At::NONE, b: At::NONE, y: to }, (index, index), "convert bias");
        Ok(to)
    }

    fn convert(&mut self, index: usize, x: At, (rows, cols): (usize, usize), from: Float, y: At) -> Result<()> {
        let output = self.facts.key.activation;
        let plan = AffinePlan::new(AffineSpec { rows, cols, input: from, output, row: from, alpha: 1.0 })?;
        self.touch(&[y]);
        self.step(Action::Affine { plan, x, r: At::NONE, b: At::NONE, y }, (index, index), "convert weight");
        Ok(())
    }
}
