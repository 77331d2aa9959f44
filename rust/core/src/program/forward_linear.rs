//! Compiles the forward of linear ops: operands, epilogues of the GEMM, and the place of the result.

use te_fast_kernels::Float;

use crate::base::error::Result;
use crate::gemm::problem::{Epilogue, GemmPointers};
use crate::ops::activation::Activation;
use crate::ops::affine::{AffinePointers, AffineSpec};
use crate::program::buffer::At;
use crate::program::cast::Cast;
use crate::program::chain::{Link, Op};
use crate::program::edge::{LayoutAt, Layouts, Rows, Value};
use crate::program::forward_compiler::{Compiler, Fused, Kept, slot};
use crate::program::linear_op::{Product, Tail};
use crate::program::port::{LinearPort, Port};
use crate::program::work::{SlotAt, Work, quantised};
use crate::quant::quantizer::QuantPointers;

/// Name of a GEMM with its epilogue, by the precision of the result.
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
        let (linear, facts) = (link.linear, self.facts);
        let (tail, d, next, text) = self.tail(index);
        if facts.linears[linear].keeps_high() {
            self.out.left.kept[index] = Kept::Linear { x: LayoutAt::high(value.high) };
        } else if facts.linears[linear].reads_high() {
            self.out.left.kept[index] = Kept::Recomputed;
        }
        let x = match &facts.linears[linear].casts {
            Some(casts) => self.quantized_input(index, linear, &casts.x, value),
            None => LayoutAt::high(value.high),
        };
        let w = self.weight_operand(index, link);
        let bias = if tail.bias { self.bias(index + 1) } else { At::NONE };
        // Products of experts store high precision.
        let may_store = d.is_none() && facts.linears[linear].groups.is_none();
        let handed_over = if may_store { self.hand_over(index, next, tail)? } else { None };
        let output = if may_store && handed_over.is_none() { self.store_output(index, next, tail)? } else { None };
        let stored = handed_over.or(output);
        let (result, text) = match (stored, d) {
            (Some((layouts, _)), _) => (layouts.row, text.fp8),
            (None, Some(extra)) => (LayoutAt::high(extra), text.high),
            (None, None) => (LayoutAt::high(self.place_of(next)), text.high),
        };
        let into = stored.and(facts.recipe.as_ref()).map(|recipe| recipe.fwd);
        let at = GemmPointers {
            x: x.data,
            x_scale: x.scale,
            w: w.data,
            w_scale: w.scale,
            bias,
            d: result.data,
            d_scale: stored.map_or(At::NONE, |(_, beside)| beside.slot.scale),
            d_amax: stored.map_or(At::NONE, |(_, beside)| beside.found),
            workspace: At::of(Port::Workspace),
        };
        let product = Product::Forward { tail, into };
        let splits = self.out.left.splits_of(facts, index);
        self.step(Work::Gemm { linear, product, at, splits }, (index, next - 1), text);
        if let Some((_, beside)) = output {
            self.step(Work::Handover(vec![beside]), (index, index), "scale and maximum of the output");
        }
        let high = if stored.is_some() { At::NONE } else { result.data };
        *value = Value { quantized: stored.map(|(layouts, _)| layouts), ..Value::high(high) };
        Ok(next)
    }

    /// The epilogue of the GEMM of the linear op at `index`, the place of the result if the epilogue decides it, the
    /// next op, and the name of the launch.
    fn tail(&mut self, index: usize) -> (Tail, Option<At>, usize, Text) {
        let mut tail = Tail { bias: false, alpha: 1.0, epilogue: Epilogue::None, accumulate: false };
        let mut next = index + 1;
        tail.bias = self.facts.chain.bias_behind(index).is_some();
        next += usize::from(tail.bias);
        if matches!(self.op_at(index), Some(Op::Linear { groups: Some(_), .. })) {
            return (tail, None, next, Text::of(if tail.bias { "grouped gemm + bias" } else { "grouped gemm" }));
        }
        let extra = |at: Option<&Link>| match at {
            Some(link) if matches!(link.op, Op::AddExtraInput { in_place: true }) => {
                Some(At::of(Port::Extra(link.extra_input as u16)))
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

    /// cuBLASLt's epilogue for the activation at `index`; none if backward needs the activation's input.
    fn epilogue(&mut self, index: usize) -> Option<Epilogue> {
        let Some(Op::Activation { function, scaled: false, .. }) = self.op_at(index) else { return None };
        let epilogue = match function {
            Activation::Gelu => Epilogue::Gelu,
            Activation::Relu => Epilogue::Relu,
            _ => return None,
        };
        let reason = if self.runs_backward(index) {
            "backward needs the activation's input"
        } else if self.facts.recipe.as_ref().is_some_and(|recipe| !recipe.is_per_tensor()) {
            "cuBLASLt has no activation behind block-scaled operands"
        } else {
            return Some(epilogue);
        };
        let label = self.facts.label(index);
        self.out.notes.push(format!("{label} is not an epilogue of the GEMM before it: {reason}"));
        None
    }

    /// The input of a linear op in FP8: as the previous op wrote it, or by a separate launch.
    fn quantized_input(&mut self, index: usize, linear: usize, cast: &Cast, value: &mut Value) -> LayoutAt {
        let layouts = if let Some(layouts) = value.quantized.take() {
            layouts
        } else {
            let Fused { layouts, slot } = self.fused(linear);
            let (splits, numbers) = (self.out.left.splits_of(self.facts, index), value.numbers);
            let (cast, slot) = match value.scale.take() {
                Some(scale) => (cast.with_known_scale(), SlotAt { scale, amax: At::NONE }),
                None => (*cast, slot),
            };
            let at = QuantPointers { splits, numbers, ..quantised(value.high, &layouts, slot, self.scratch()) };
            let text = match (numbers.is_some(), layouts.col.is_some()) {
                (false, false) => "cast",
                (false, true) => "cast + transpose",
                (true, false) => "gather + cast",
                (true, true) => "gather + cast + transpose",
            };
            let cast = if numbers.is_some() { cast.gathering(self.facts.gather(index, false)) } else { cast };
            self.out.left.numbers[linear] = numbers;
            self.step(Work::Quantize { cast, unpacks: None, at }, (index, index), text);
            layouts
        };
        if self.facts.linears[linear].keeps_row() {
            self.out.left.kept[index] = Kept::Linear { x: layouts.row };
        } else if layouts.col.is_some() {
            self.out.left.kept[index] = Kept::Linear { x: layouts.col };
        }
        layouts.row
    }

    /// The weight: quantised unless the kept FP8 weight is used, or converted, or as it is.
    fn weight_operand(&mut self, index: usize, link: &Link) -> LayoutAt {
        let (op, number) = (&self.facts.linears[link.linear], link.linear as u16);
        let param = At::of(Port::Param(link.param as u16));
        if let Some(casts) = &op.casts {
            let own = |part| At::of(Port::Linear(number, part));
            let slot = slot(link.linear, LinearPort::WeightScale, LinearPort::WeightAmax);
            let layout = |data, scale| LayoutAt { data: own(data), scale: own(scale) };
            let row = layout(LinearPort::Row, LinearPort::RowScale);
            let to = Layouts { row, col: layout(LinearPort::Col, LinearPort::ColScale) };
            let at = quantised(own(LinearPort::Fresh), &to, slot, self.scratch());
            let work = Work::Weight { plan: casts.w, at: QuantPointers { noop: At::of(Port::SkipWeights), ..at } };
            self.step_on(Rows::Fixed(op.weight_rows()), work, (index, index), "weight cast, if it changed");
            return row;
        }
        if op.weight == op.activation {
            return LayoutAt::high(param);
        }
        let to = self.buffer(op.input_grad);
        let (cols, input, output) = (op.inputs, op.weight, op.activation);
        let spec = AffineSpec::convert(cols, input, output);
        let at = AffinePointers { x: param, y: to, ..AffinePointers::default() };
        self.step_on(Rows::Fixed(op.weight_rows()), Work::Affine { spec, at }, (index, index), "convert weight");
        self.out.left.converted[link.linear] = to;
        LayoutAt::high(to)
    }

    /// A bias in the GEMM's type.
    fn bias(&mut self, index: usize) -> At {
        let link = &self.facts.chain.links()[index];
        let (input, output): (Float, Float) =
            (self.facts.key.params[link.param].0, self.facts.linears[link.linear - 1].bias_dtype());
        let param = At::of(Port::Param(link.param as u16));
        let Op::Bias { size, groups } = link.op else { return param };
        let cols = size * groups.unwrap_or(1);
        if input == output {
            return param;
        }
        let to = self.scratch();
        let spec = AffineSpec::convert(cols, input, output);
        let at = AffinePointers { x: param, y: to, ..AffinePointers::default() };
        self.step_on(Rows::Fixed(1), Work::Affine { spec, at }, (index, index), "convert bias");
        to
    }
}
