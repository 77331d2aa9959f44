//! Compiles the backward of linear ops: the gradient's layouts, the two GEMMs, and delayed weight gradients.

use te_fast_kernels::{Float, Fp8};

use crate::base::error::{ErrorKind, Result};
use crate::gemm::problem::GemmPointers;
use crate::ops::activation::{ActivationPointers, ActivationSpec};
use crate::ops::affine::{AffinePointers, AffineSpec};
use crate::ops::dequantize::DequantizePointers;
use crate::ops::transpose::{TransposePointers, TransposeSpec};
use crate::program::backward_compiler::Compiler;
use crate::program::buffer::{Arena, At};
use crate::program::cast::Cast;
use crate::program::chain::{Link, Op};
use crate::program::edge::{LayoutAt, Layouts, Rows, Value};
use crate::program::forward_compiler::{Fused, Kept, slot};
use crate::program::forward_handover::PROBE_ROWS;
use crate::program::linear_op::{BackwardOperands, LinearOp, Product};
use crate::program::port::{Beside, LinearPort, Outer, Port};
use crate::program::work::{FlowName, SlotAt, StoredAt, Work, quantised};
use crate::quant::quantizer::QuantPointers;

impl<'a> Compiler<'a> {
    pub(super) fn linear(&mut self, index: usize, link: &Link, grad: &mut Value) -> Result<()> {
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
            self.input_grad(index, link, dy.row, grad)?;
        }
        if matches!(self.left.kept[index], Kept::Recomputed) {
            kept = self.recomputed_for_experts(index).or_else(|| self.recomputed_input(link.linear));
        }
        if let Some(x) = kept {
            self.weight_grad(index, link, dy.col, x);
        }
        Ok(())
    }

    /// Computes the result of the preceding activation again.
    fn recomputed_input(&mut self, linear: usize) -> Option<LayoutAt> {
        let facts = self.facts;
        let index = facts.linears[linear].recomputed?;
        let link = &facts.chain.links()[index];
        let (kept, Op::Activation { function, interleave, .. }) = (self.left.kept[index], link.op) else { return None };
        let Kept::Activation { row_scale, .. } = kept else { return None };
        let spec = ActivationSpec {
            rows: 0,
            cols: facts.edges[index + 1].cols,
            activation: function,
            interleave,
            input: facts.key.activation,
            high: true,
            fp8: None,
            rowwise: false,
            columnwise: false,
            row_scale: if row_scale.is_some() { facts.factor_type(link) } else { None },
            measures: None,
        };
        let x = self.activation_input(index, &kept);
        let at = ActivationPointers { x, y: self.for_weight_grad(linear), row_scale, ..ActivationPointers::default() };
        self.step(Work::Activation { spec, at }, index, "activation again");
        Some(LayoutAt::high(at.y))
    }

    fn input_grad(&mut self, index: usize, link: &Link, dy: LayoutAt, grad: &mut Value) -> Result<()> {
        // The products of experts do not add to their result.
        let accumulate = self.branch_before(index).filter(|_| self.facts.linears[link.linear].groups.is_none());
        let w = self.weight_operand(index, link);
        let stored = if accumulate.is_none() { self.store_grad_input(index, link.linear)? } else { None };
        let d = match (accumulate, stored) {
            (Some(branch), _) => branch,
            (None, Some(_)) => At::of(Port::GradInput),
            (None, None) => self.place_of(index),
        };
        let at = GemmPointers {
            x: dy.data,
            x_scale: dy.scale,
            w: w.data,
            w_scale: w.scale,
            d,
            d_scale: stored.map_or(At::NONE, |(_, beside)| beside.slot.scale),
            d_amax: stored.map_or(At::NONE, |(_, beside)| beside.found),
            workspace: At::of(Port::Workspace),
            ..GemmPointers::default()
        };
        let text = match (accumulate, stored) {
            (Some(_), _) => "dgrad gemm + add",
            (None, Some(_)) => "dgrad gemm, in FP8",
            (None, None) => "dgrad gemm",
        };
        let product = Product::InputGrad { accumulate: accumulate.is_some(), into: stored.map(|(dtype, _)| dtype) };
        let splits = self.left.splits_of(self.facts, index);
        self.step(Work::Gemm { linear: link.linear, product, at, splits }, index, text);
        if let Some((_, beside)) = stored {
            self.step(Work::Handover(vec![beside]), index, "scale and maximum of the input's gradient");
        }
        *grad = Value::high(d);
        Ok(())
    }

    /// The FP8 type in which the GEMM of the op at `index` stores the gradient of the chain's input, and the places
    /// beside it, if its scale is known beforehand.
    fn store_grad_input(&mut self, index: usize, linear: usize) -> Result<Option<(Fp8, StoredAt)>> {
        let facts = self.facts;
        let (Some(kind), Some(recipe)) = (facts.grad_input_kind(), facts.recipe.as_ref()) else { return Ok(None) };
        let is_first = facts.chain.links()[..index].iter().all(|link| link.op == Op::Identity);
        let is_dense = facts.linears[linear].groups.is_none(); // products of experts store high precision
        if !(self.stores_fp8 && is_dense && is_first && recipe.is_delayed()) {
            return Ok(None);
        }
        let product = Product::InputGrad { accumulate: false, into: Some(kind.dtype) };
        match facts.linears[linear].plan(self.dispatcher, PROBE_ROWS, product) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::Cublas { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
        (self.out.hands_over, self.out.grad_input_is_row) = (true, true);
        let inverse = At::of(Port::Beside(Outer::GradInput, Beside::RowScale));
        let slot = slot(linear, LinearPort::GradInputScale, LinearPort::GradInputAmax);
        Ok(Some((kind.dtype, StoredAt { slot, inverse, found: self.scratch() })))
    }

    /// The weight's gradient, now or delayed.
    fn weight_grad(&mut self, index: usize, link: &Link, dy: LayoutAt, x: LayoutAt) {
        let op = &self.facts.linears[link.linear];
        if !op.weight_grad {
            return;
        }
        let flow = if op.deferred { FlowName::Waiting(link.linear) } else { FlowName::Backward };
        // An input with scales is one that has been quantised already.
        let x = match (op.x_again().filter(|_| !x.scale.is_some()), op.keeps_row()) {
            (Some(again), _) => self.input_again(index, link.linear, again, (flow, x.data)),
            (None, true) => match op.transposes_input() {
                Some(spec) => self.transposed(index, spec, x, flow),
                None => self.dequantized_input(index, link.linear, x),
            },
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
        let splits = self.left.splits_of(self.facts, index);
        let work = Work::Gemm { linear: link.linear, product: Product::WeightGrad, at, splits };
        self.step_of(flow, op.rows, work, index, "wgrad gemm");
    }

    /// The column layout, from the row layout.
    fn transposed(&mut self, index: usize, spec: TransposeSpec, row: LayoutAt, flow: FlowName) -> LayoutAt {
        let data = self.buffer(flow.scratch());
        let scale = if spec.block_scales { self.buffer(flow.scratch()) } else { row.scale };
        let at = TransposePointers { q: row.data, out_t: data, scale: row.scale, scale_t: scale };
        let rows = self.facts.edges[index].rows;
        self.step_of(flow, rows, Work::Transpose { spec, at }, index, "transpose");
        LayoutAt { data, scale }
    }

    /// The input that forward saved in high precision, quantised for the weight gradient.
    fn input_again(&mut self, index: usize, linear: usize, cast: &Cast, (flow, x): (FlowName, At)) -> LayoutAt {
        let mut buffer = || self.buffer(flow.scratch());
        let col = LayoutAt { data: buffer(), scale: buffer() };
        let scratch = buffer();
        let Fused { slot, .. } = Fused::of_input(linear, Layouts::default());
        let (splits, numbers) = (self.left.splits_of(self.facts, index), self.left.numbers[linear]);
        let to = Layouts { col, ..Layouts::default() };
        let at = QuantPointers { splits, numbers, ..quantised(x, &to, slot, scratch) };
        let cast = if numbers.is_some() { cast.gathering(self.facts.gather(index, false)) } else { *cast };
        let work = Work::Quantize { cast, unpacks: None, at };
        self.step_of(flow, self.facts.edges[index].rows, work, index, "transposed cast of the kept input");
        col
    }

    /// The input that forward saved in FP8, dequantised.
    fn dequantized_input(&mut self, index: usize, linear: usize, x: LayoutAt) -> LayoutAt {
        let Some((spec, rows)) = self.facts.linears[linear].dequantize(false) else { return x };
        let at = DequantizePointers { q: x.data, out: self.for_weight_grad(linear), scale_inv: x.scale };
        self.step_of(FlowName::Backward, rows, Work::Dequantize { spec, at }, index, "dequantise the input");
        LayoutAt::high(at.out)
    }

    /// The weight, for the gradient of the input.
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
                let spec = AffineSpec::convert(cols, input, output);
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

    /// The gradient in FP8: as the next op wrote it, or by a separate launch. That launch also unpacks the input's
    /// scales that were saved as bytes.
    fn quantized_grad(
        &mut self,
        index: usize,
        linear: usize,
        grad: &mut Value,
        kept: Option<&mut LayoutAt>,
    ) -> Layouts {
        if let Some(layouts) = grad.quantized.take() {
            return self.given_grad(index, linear, layouts, kept);
        }
        let op = &self.facts.linears[linear];
        let Some(cast) = op.dy() else { return Layouts::default() };
        let Fused { layouts, slot } = Fused::of_grad(linear, self.grad_layouts(linear));
        let (cast, slot) = match grad.scale.take() {
            Some(scale) => (cast.with_known_scale(), SlotAt { scale, amax: At::NONE }),
            None => (*cast, slot),
        };
        let mut at = quantised(grad.high, &layouts, slot, self.scratch());
        at.dbias = std::mem::take(&mut self.bias_grad);
        (at.splits, at.numbers) = (self.left.splits_of(self.facts, index), grad.numbers);
        let cast = if grad.numbers.is_some() { cast.gathering(self.facts.gather(index, true)) } else { cast };
        let packed = kept.and_then(|x| op.packed_input().map(|cast| (x, *cast)));
        let unpacks = packed.map(|(x, cast)| {
            at.packed = x.scale;
            at.unpacked = self.for_weight_grad(linear);
            x.scale = at.unpacked;
            cast
        });
        let text = match (layouts.col.is_some(), at.dbias.is_some()) {
            (false, _) if grad.numbers.is_some() => "gather + cast",
            (true, _) if grad.numbers.is_some() => "gather + cast + transpose",
            (false, false) => "cast",
            (true, false) => "cast + transpose",
            (false, true) => "cast + bias gradient",
            (true, true) => "cast + transpose + bias gradient",
        };
        self.step(Work::Quantize { cast, unpacks, at }, index, text);
        layouts
    }

    /// The gradient in FP8 as the call passes it, or as an activation wrote it, with the layout that the weight
    /// gradient reads.
    fn given_grad(&mut self, index: usize, linear: usize, given: Layouts, kept: Option<&mut LayoutAt>) -> Layouts {
        let op = &self.facts.linears[linear];
        let mut layouts = given;
        if let (Some(kind), Some(dy)) = (self.facts.key.outer.grad_output, op.dy())
            && given.row.data.port == Port::GradOutput
        {
            if dy.usage().columnwise && (op.deferred || !given.col.is_some()) {
                let spec = kind.transpose(op.outputs);
                let data = self.for_weight_grad(linear);
                // A delayed gradient has no tensors of the call except saved ones.
                let copies = op.deferred || spec.block_scales;
                let scale = if spec.block_scales { self.for_weight_grad(linear) } else { given.row.scale };
                let at = TransposePointers { q: given.row.data, out_t: data, scale: given.row.scale, scale_t: scale };
                self.step(Work::Transpose { spec, at }, index, "transpose the gradient");
                layouts.col = LayoutAt { data, scale };
                if copies && !spec.block_scales {
                    layouts.col.scale = self.copied_scale(index, linear, given.row.scale);
                }
            }
            if let Some((x, cast)) = kept.and_then(|x| op.packed_input().map(|cast| (x, *cast))) {
                let unpacked = self.for_weight_grad(linear);
                self.step(Work::Unpack { cast, packed: x.scale, unpacked }, index, "scales of the kept input");
                x.scale = unpacked;
            }
        }
        layouts
    }

    /// Copies one scale for a delayed weight gradient.
    fn copied_scale(&mut self, index: usize, linear: usize, scale: At) -> At {
        let y = self.for_weight_grad(linear);
        let (input, cols) = (Float::F32, 1);
        let spec = AffineSpec::of(cols, input, 1.0);
        let at = AffinePointers { x: scale, y, ..AffinePointers::default() };
        self.step_of(FlowName::Backward, Rows::Fixed(1), Work::Affine { spec, at }, index, "keep the gradient's scale");
        y
    }

    /// The gradient in high precision; copied if the weight gradient is delayed.
    fn plain_grad(&mut self, index: usize, linear: usize, grad: &Value) -> Layouts {
        let row = LayoutAt::high(grad.high);
        let op = &self.facts.linears[linear];
        if !op.deferred {
            return Layouts { row, col: row };
        }
        let (cols, input) = (op.outputs, op.activation);
        let spec = AffineSpec::of(cols, input, 1.0);
        let y = self.buffer(Arena::Deferred(linear as u16));
        let at = AffinePointers { x: grad.high, y, ..AffinePointers::default() };
        self.step(Work::Affine { spec, at }, index, "keep gradient");
        Layouts { row, col: LayoutAt::high(y) }
    }
}
