//! Compiles a chain's forward: the launches, their places, and the tensors that they save for backward.

use te_fast_kernels::{Float, Fp8};

use crate::base::error::{Error, Result};
use crate::ops::activation::{ActivationPointers, ActivationSpec};
use crate::ops::affine::{AffinePointers, AffineSpec};
use crate::ops::dequantize::{DequantizePointers, DequantizeSpec};
use crate::ops::norm::NormPointers;
use crate::ops::norm_spec::{NormKind, NormSpec};
use crate::program::buffer::At;
use crate::program::cast::Cast;
use crate::program::chain::{Link, OP, Op};
use crate::program::edge::{LayoutAt, Layouts, Value};
use crate::program::facts::Facts;
use crate::program::forward_compiler::{Compiler, Forward, Fused, Kept, slot};
use crate::program::port::{LinearPort, Outer, Port};
use crate::program::work::{SlotAt, Work, quantised};
use crate::quant::quantizer::QuantSpec;
use crate::recipe::definition::{Quantization, Scaling};
use crate::recipe::usage::Usage;
use crate::runtime::dispatcher::Dispatcher;

/// Compiles the forward; GEMMs hand FP8 over if `handovers` allows it and it pays.
pub(crate) fn compile(dispatcher: &mut Dispatcher, facts: &Facts, handovers: bool) -> Result<Forward> {
    let mut compiler = Compiler::new(dispatcher, facts, handovers);
    if handovers && compiler.handovers_possible() {
        compiler.begin_handovers();
        compiler.run()?;
        if compiler.handovers_pay() {
            compiler.end_handovers();
            return Ok(compiler.out);
        }
        compiler = Compiler::new(dispatcher, facts, handovers);
    }
    compiler.run()?;
    Ok(compiler.out)
}

impl Compiler<'_> {
    fn run(&mut self) -> Result<()> {
        let facts = self.facts;
        let count = facts.chain.links().len();
        let mut value = self.input();
        let mut index = 0;
        while index < count {
            let link = &facts.chain.links()[index];
            index = self.op(index, link, &mut value).map_err(|error| facts.within(index, error))?;
        }
        self.output(&value)
    }

    /// The input: quantised as the call passes it if a linear op reads it so, else in high precision.
    fn input(&mut self) -> Value {
        let facts = self.facts;
        let Some(given) = facts.key.outer.input else { return Value::high(At::of(Port::Input)) };
        let layouts = Layouts::outer(Outer::Input, given);
        let (consumer, handed_out) = self.consumer(0);
        if let (Some(link), false) = (self.link(consumer), handed_out)
            && matches!(link.op, Op::Linear { .. })
            && facts.linears[link.linear].given.is_some()
        {
            return Value::quantized(layouts);
        }
        let to = self.place_of(0);
        let spec = given.dequantize(facts.key.cols, facts.key.activation);
        let at = DequantizePointers { q: layouts.row.data, out: to, scale_inv: layouts.row.scale };
        self.step(Work::Dequantize { spec, at }, (0, 0), "dequantise the input");
        Value::high(to)
    }

    /// The output: at the place where the last op wrote it, or quantised.
    fn output(&mut self, value: &Value) -> Result<()> {
        let facts = self.facts;
        let (Some(cast), Some(kind)) = (facts.output_cast(), facts.output_kind()) else {
            self.out.output = value.high.port;
            return Ok(());
        };
        self.out.output = Port::Output;
        if self.out.output_is_row {
            return Ok(()); // the GEMM has stored it in FP8
        }
        let last = facts.chain.links().len() - 1;
        let Some(linear) = facts.linears.len().checked_sub(1) else {
            return Err(Error::unsupported(OP, "an output in FP8 of a chain without a linear op"));
        };
        let slot = slot(linear, LinearPort::OutputScale, LinearPort::OutputAmax);
        let at = quantised(value.high, &Layouts::outer(Outer::Output, kind), slot, self.scratch());
        let rows = facts.edges[last + 1].rows;
        self.step_on(rows, Work::Quantize { cast, unpacks: None, at }, (last, last), "cast of the output");
        Ok(())
    }

    /// Compiles the op at `index` with the ops that fuse behind it; returns the next op.
    fn op(&mut self, index: usize, link: &Link, value: &mut Value) -> Result<usize> {
        match link.op {
            Op::Identity => Ok(index + 1),
            Op::MakeExtraOutput { .. } => {
                self.out.extra_outputs.push(value.high.port);
                Ok(index + 1)
            }
            Op::Residual => {
                self.residuals[index] = value.high;
                Ok(index + 1)
            }
            Op::AddResidual { begin } => {
                self.affine(index, value, 1.0, self.residuals[begin], None, "add");
                Ok(index + 1)
            }
            Op::Linear { .. } => self.linear(index, link, value),
            Op::Norm { .. } => {
                self.norm(index, At::NONE, At::NONE, value);
                Ok(index + 1)
            }
            Op::Activation { .. } => {
                self.activation(index, value);
                Ok(index + 1)
            }
            Op::AddExtraInput { in_place } => Ok(self.add(index, link, in_place, value)),
            Op::Bias { .. } => {
                let row = (Port::Param(link.param as u16), self.facts.key.params[link.param].0);
                self.affine(index, value, 1.0, At::NONE, Some(row), "bias");
                Ok(index + 1)
            }
            Op::ConstantScale { scale } => {
                self.affine(index, value, scale, At::NONE, None, "scale");
                Ok(index + 1)
            }
            Op::Router(router) => {
                self.router(index, link, router, value.high);
                Ok(index + 1)
            }
            Op::Permute { .. } => self.permute(index, link, value),
            Op::Unpermute => Ok(self.unpermute(index, value)),
        }
    }

    fn norm(&mut self, index: usize, residual: At, sum: At, value: &mut Value) {
        let link = &self.facts.chain.links()[index];
        let Op::Norm { kind, cols, eps, zero_centered_gamma } = link.op else { return };
        let fp8 = self.fp8_consumer(index + 1);
        if fp8.is_none() {
            self.note_unfused(index, "norm", None);
        }
        let high = fp8.is_none_or(|(_, handed_out)| handed_out);
        let stats = self.runs_backward(index);
        let Fused { layouts: to, slot } = fp8.map_or(Fused::NONE, |(linear, _)| self.fused(linear));
        let y = if high { self.place_of(index + 1) } else { At::NONE };
        let layer_norm = matches!(kind, NormKind::LayerNorm);
        let mut stat = |wanted: bool| if wanted { self.saved() } else { At::NONE };
        let (mean, rstd) = (stat(stats && layer_norm), stat(stats));
        let measured = self.measured(index + 1);
        let x = value.high;
        if stats {
            let x = if residual.is_some() { sum } else { x };
            self.out.left.kept[index] = Kept::Norm { x, mean, rstd };
        }
        let spec = NormSpec {
            rows: 0,
            cols,
            kind,
            input: self.facts.key.activation,
            weight: self.facts.key.params[link.param].0,
            zero_centered_gamma,
            eps,
            residual: residual.is_some(),
            high,
            fp8: fp8.and(self.facts.recipe.as_ref()).map(|recipe| recipe.fwd),
            rowwise: to.row.is_some(),
            columnwise: to.col.is_some(),
            stats,
            measures: measured.map(|(_, rule)| rule),
            limits: self.facts.limits,
        };
        let at = NormPointers {
            x,
            residual,
            sum,
            gamma: At::of(Port::Param(link.param as u16)),
            beta: if layer_norm { At::of(Port::Param(link.param as u16 + 1)) } else { At::NONE },
            y,
            mean,
            rstd,
            out: to.row.data,
            out_t: to.col.data,
            scale: slot.scale,
            scale_inv: to.scale_inv(),
            amax: slot.amax,
            noop: At::NONE,
            measured: measured.map_or(At::NONE, |(at, _)| at),
            counters: At::of(Port::Counters),
        };
        let first = if residual.is_some() { self.before(index) } else { index };
        self.step(Work::Norm { spec, at }, (first, index), norm_text(&spec));
        *value = Value { quantized: fp8.map(|_| to), scale: measured.map(|(at, _)| at), ..Value::high(y) };
    }

    /// The residual addition that fuses into the norm at `index`.
    fn before(&self, index: usize) -> usize {
        (0..index).rev().find(|&at| matches!(self.op_at(at), Some(Op::AddExtraInput { .. }))).unwrap_or(index)
    }

    fn add(&mut self, index: usize, link: &Link, in_place: bool, value: &mut Value) -> usize {
        let extra = At::of(Port::Extra(link.extra_input as u16));
        let (consumer, handed_out) = self.consumer(index + 1);
        if in_place {
            self.affine(index, value, 1.0, extra, None, "add in place");
            return index + 1;
        }
        if !matches!(self.op_at(consumer), Some(Op::Norm { .. })) {
            self.affine(index, value, 1.0, extra, None, "add");
            return index + 1;
        }
        let sum = self.place_of(index + 1);
        if handed_out {
            for between in index + 1..consumer {
                match self.facts.chain.links()[between].op {
                    Op::MakeExtraOutput { .. } => self.out.extra_outputs.push(sum.port),
                    Op::Residual => self.residuals[between] = sum,
                    _ => {}
                }
            }
        }
        self.norm(consumer, extra, sum, value);
        consumer + 1
    }

    /// `alpha · x + r + b` into edge `index + 1`.
    fn affine(
        &mut self,
        index: usize,
        value: &mut Value,
        alpha: f32,
        r: At,
        row: Option<(Port, Float)>,
        text: &'static str,
    ) {
        let in_place = matches!(self.op_at(index), Some(Op::AddExtraInput { in_place: true }));
        let y = if in_place { r } else { self.place_of(index + 1) };
        let (cols, input) = (self.facts.edges[index].cols, self.facts.key.activation);
        let (b, row) = row.map_or((At::NONE, input), |(port, dtype)| (At::of(port), dtype));
        let spec = AffineSpec { row, ..AffineSpec::of(cols, input, alpha) };
        let at = AffinePointers { x: value.high, r, b, y };
        self.step(Work::Affine { spec, at }, (index, index), text);
        *value = Value::high(y);
    }

    fn activation(&mut self, index: usize, value: &mut Value) {
        let link = &self.facts.chain.links()[index];
        let Op::Activation { function, interleave, scaled, cache_quantized_input, .. } = link.op else { return };
        let row_scale = if scaled { self.out.left.factors_of(link) } else { At::NONE };
        let for_experts = self.experts_behind(index);
        if self.runs_backward(index) {
            let quantized = cache_quantized_input.then(|| self.keep_in_fp8(index, value.high));
            self.out.left.kept[index] = Kept::Activation { x: value.high, quantized, row_scale };
        }
        if let Some(Ok(experts)) = for_experts {
            return self.activation_for_experts(index, experts, row_scale, value);
        }
        let fp8 = self.fp8_consumer(index + 1);
        if fp8.is_none() {
            self.note_unfused(index, "activation", for_experts.and_then(std::result::Result::err));
        }
        let high = fp8.is_none_or(|(_, handed_out)| handed_out);
        let Fused { layouts: to, slot } = fp8.map_or(Fused::NONE, |(linear, _)| self.fused(linear));
        let y = if high { self.place_of(index + 1) } else { At::NONE };
        let measured = self.measured(index + 1);
        let spec = ActivationSpec {
            rows: 0,
            cols: self.facts.edges[index + 1].cols,
            activation: function,
            interleave,
            input: self.facts.key.activation,
            high,
            fp8: fp8.and(self.facts.recipe.as_ref()).map(|recipe| recipe.fwd),
            rowwise: to.row.is_some(),
            columnwise: to.col.is_some(),
            row_scale: if scaled { self.facts.factor_type(link) } else { None },
            measures: measured.map(|(_, rule)| rule),
        };
        let at = ActivationPointers {
            x: value.high,
            y,
            out: to.row.data,
            out_t: to.col.data,
            row_scale,
            scale: slot.scale,
            scale_inv: to.scale_inv(),
            amax: slot.amax,
            noop: At::NONE,
            measured: measured.map_or(At::NONE, |(at, _)| at),
            counters: At::of(Port::Counters),
        };
        let text = match (to.row.is_some(), to.col.is_some()) {
            (false, _) => "activation",
            (true, false) => "activation + cast",
            (true, true) => "activation + cast + transpose",
        };
        self.step(Work::Activation { spec, at }, (index, index), text);
        *value = Value { quantized: fp8.map(|_| to), scale: measured.map(|(at, _)| at), ..Value::high(y) };
    }

    /// Saves an activation's input for backward in FP8 under current scaling, to save memory; returns how backward
    /// reads it.
    fn keep_in_fp8(&mut self, index: usize, x: At) -> (DequantizeSpec, LayoutAt) {
        let (edge, input) = (self.facts.edges[index], self.facts.key.activation);
        let spec = QuantSpec {
            scaling: Scaling::Current,
            quantization: Quantization::PER_TENSOR,
            rows: 0,
            cols: edge.cols,
            input,
            output: Fp8::E4m3,
            usage: Usage { rowwise: true, columnwise: false },
            dbias: false,
            groups: None,
            processors: self.facts.limits.multiprocessors,
        };
        let cast = Cast::new(edge.rows, spec);
        let row = LayoutAt { data: self.saved(), scale: self.saved() };
        let at = quantised(x, &Layouts { row, ..Layouts::default() }, SlotAt::NONE, self.scratch());
        self.step(Work::Quantize { cast, unpacks: None, at }, (index, index), "cast of the kept input");
        let (cols, output) = (edge.cols, input);
        (DequantizeSpec { rows: 0, cols, ld: cols, input: Fp8::E4m3, output, block: None }, row)
    }
}

const fn norm_text(spec: &NormSpec) -> &'static str {
    match (spec.residual, spec.rowwise, spec.columnwise) {
        (false, false, _) => "norm",
        (false, true, false) => "norm + cast",
        (false, true, true) => "norm + cast + transpose",
        (true, false, _) => "add + norm",
        (true, true, false) => "add + norm + cast",
        (true, true, true) => "add + norm + cast + transpose",
    }
}
