//! Compiles the backward of linear ops: the gradient's layouts, the two GEMMs, and what waits for `backward_dw`.

use crate::gemm::problem::GemmPointers;
use crate::ops::affine::{AffinePointers, AffineSpec};
use crate::ops::dequantize::DequantizePointers;
use crate::program::backward_compiler::Compiler;
use crate::program::buffer::{Arena, At};
use crate::program::cast::Cast;
use crate::program::chain::Link;
use crate::program::edge::{LayoutAt, Layouts, Rows, Value};
use crate::program::forward_compiler::{Fused, Kept};
use crate::program::linear_op::{BackwardOperands, LinearOp, Product};
use crate::program::port::{LinearPort, Port};
use crate::program::work::{FlowName, Work, quantised};
use crate::quant::quantizer::QuantPointers;

impl<'a> Compiler<'a> {
    pub(super) fn linear(&mut self, index: usize, link: &Link, grad: &mut Value) {
        let op: &'a LinearOp = &self.facts.linears[link.linear];
        let mut kept = match self.left.kept[index] {
            Kept::Linear { x } => Some(x),
            _ => None,
        };
        let dy = if op.backward() == BackwardOperands::Quantized {
            self.quantized_grad(index, link.linear, grad, kept.as_mut())
        } else {
            self.plain_grad(index, link.linear, grad)
        };
        if op.input_grad {
            self.input_grad(index, link, dy.row, grad);
        }
        if let Some(x) = kept {
            self.weight_grad(index, link, dy.col, x);
        }
    }

    fn input_grad(&mut self, index: usize, link: &Link, dy: LayoutAt, grad: &mut Value) {
        // The products of experts add to nothing.
        let accumulate = self.branch_before(index).filter(|_| self.facts.linears[link.linear].groups.is_none());
        let d = match accumulate {
            Some(branch) => branch,
            None => self.place_of(index),
        };
        let w = self.weight_operand(index, link);
        let at = GemmPointers {
            x: dy.data,
            x_scale: dy.scale,
            w: w.data,
            w_scale: w.scale,
            d,
            workspace: At::of(Port::Workspace),
            ..GemmPointers::default()
        };
        let text = if accumulate.is_some() { "dgrad gemm + add" } else { "dgrad gemm" };
        let product = Product::InputGrad { accumulate: accumulate.is_some() };
        let splits = self.facts.splits_of(index);
        self.step(Work::Gemm { linear: link.linear, product, at, splits }, index, text);
        *grad = Value::high(d);
    }

    /// The weight's gradient, now or when it is asked for.
    fn weight_grad(&mut self, index: usize, link: &Link, dy: LayoutAt, x: LayoutAt) {
        let op = &self.facts.linears[link.linear];
        if !op.weight_grad {
            return;
        }
        let flow = if op.deferred { FlowName::Waiting(link.linear) } else { FlowName::Backward };
        let x = match (op.x_again(), op.keeps_row()) {
            (Some(again), _) => self.input_again(index, link.linear, again, (flow, x.data)),
            (None, true) => self.dequantized_input(index, link.linear, x),
            (None, false) => x,
        };
        let at = GemmPointers {
            x: dy.data,
            x_scale: dy.scale,
            w: x.data,
            w_scale: x.scale,
            d: self.param_grad(link.param),
            workspace: At::of(Port::Workspace),
            ..GemmPointers::default()
        };
        let splits = self.facts.splits_of(index);
        let work = Work::Gemm { linear: link.linear, product: Product::WeightGrad, at, splits };
        self.step_of(flow, Rows::Input, work, index, "wgrad gemm");
    }

    /// The input that forward left in high precision, quantised as the weight's gradient takes it.
    fn input_again(&mut self, index: usize, linear: usize, cast: &Cast, (flow, x): (FlowName, At)) -> LayoutAt {
        let mut buffer = || self.buffer(flow.scratch());
        let col = LayoutAt { data: buffer(), scale: buffer() };
        let scratch = buffer();
        let Fused { slot, .. } = Fused::of_input(linear, Layouts::default());
        let splits = self.facts.splits_of(index);
        let at = QuantPointers { splits, ..quantised(x, &Layouts { col, ..Layouts::default() }, slot, scratch) };
        let work = Work::Quantize { cast: *cast, unpacks: None, at };
        self.step_of(flow, Rows::Input, work, index, "transposed cast of the kept input");
        col
    }

    /// The input that forward left in FP8, back in high precision.
    fn dequantized_input(&mut self, index: usize, linear: usize, x: LayoutAt) -> LayoutAt {
        let Some((spec, rows)) = self.facts.linears[linear].dequantize(false) else { return x };
        let at = DequantizePointers { q: x.data, out: self.for_weight_grad(linear), scale_inv: x.scale };
        self.step_of(FlowName::Backward, rows, Work::Dequantize { spec, at }, index, "dequantise the input");
        LayoutAt::high(at.out)
    }

    /// The weight as the input's gradient takes it.
    fn weight_operand(&mut self, index: usize, link: &Link) -> LayoutAt {
        let (op, number) = (&self.facts.linears[link.linear], link.linear as u16);
        let param = At::of(Port::Param(link.param as u16));
        let converted = self.left.converted[link.linear];
        let own = |part| At::of(Port::Linear(number, part));
        match op.backward() {
            BackwardOperands::Quantized => LayoutAt { data: own(LinearPort::Col), scale: own(LinearPort::ColScale) },
            BackwardOperands::High if converted.is_some() => LayoutAt::high(converted),
            BackwardOperands::High if op.weight == op.activation => LayoutAt::high(param),
            BackwardOperands::High => {
                let (rows, cols, input, output) = (Rows::Fixed(op.weight_rows()), op.inputs, op.weight, op.activation);
                let spec = AffineSpec { rows: 0, cols, input, output, row: input, alpha: 1.0 };
                let at = AffinePointers { x: param, y: self.scratch(), ..AffinePointers::default() };
                self.step_of(FlowName::Backward, rows, Work::Affine { spec, at }, index, "convert weight");
                LayoutAt::high(at.y)
            }
            BackwardOperands::Dequantized => {
                let Some((spec, rows)) = op.dequantize(true) else { return LayoutAt::high(param) };
                let (q, scale_inv) = (own(LinearPort::Row), own(LinearPort::RowScale));
                let at = DequantizePointers { q, out: self.scratch(), scale_inv };
                let work = Work::Dequantize { spec, at };
                self.step_of(FlowName::Backward, rows, work, index, "dequantise the weight");
                LayoutAt::high(at.out)
            }
        }
    }

    /// The gradient in FP8: as the op behind left it, or by a launch of its own. That one makes the scales f32 again that
    /// were kept of the input as bytes.
    fn quantized_grad(
        &mut self,
        index: usize,
        linear: usize,
        grad: &mut Value,
        kept: Option<&mut LayoutAt>,
    ) -> Layouts {
        if let Some(layouts) = grad.quantized.take() {
            return layouts;
        }
        let op = &self.facts.linears[linear];
        let Some(cast) = op.dy() else { return Layouts::default() };
        let Fused { layouts, slot } = Fused::of_grad(linear, self.grad_layouts(linear));
        let mut at = quantised(grad.high, &layouts, slot, self.scratch());
        at.dbias = std::mem::take(&mut self.bias_grad);
        at.splits = self.facts.splits_of(index);
        let packed = kept.and_then(|x| op.packed_input().map(|cast| (x, *cast)));
        let unpacks = packed.map(|(x, cast)| {
            at.packed = x.scale;
            at.unpacked = self.for_weight_grad(linear);
            x.scale = at.unpacked;
            cast
        });
        let text = match (layouts.col.is_some(), at.dbias.is_some()) {
            (false, false) => "cast",
            (true, false) => "cast + transpose",
            (false, true) => "cast + bias gradient",
            (true, true) => "cast + transpose + bias gradient",
        };
        self.step(Work::Quantize { cast: *cast, unpacks, at }, index, text);
        layouts
    }

    /// The gradient in high precision; copied where the weight's gradient waits for it.
    fn plain_grad(&mut self, index: usize, linear: usize, grad: &Value) -> Layouts {
        let row = LayoutAt::high(grad.high);
        let op = &self.facts.linears[linear];
        if !op.deferred {
            return Layouts { row, col: row };
        }
        let (cols, input) = (op.outputs, op.activation);
        let spec = AffineSpec { rows: 0, cols, input, output: input, row: input, alpha: 1.0 };
        let y = self.buffer(Arena::Deferred(linear as u16));
        let at = AffinePointers { x: grad.high, y, ..AffinePointers::default() };
        self.step(Work::Affine { spec, at }, index, "keep gradient");
        Layouts { row, col: LayoutAt::high(y) }
    }
}
