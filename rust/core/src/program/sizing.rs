//! Turns the steps of a program into launches for one row count: plans with their grids, and the bytes of every buffer.

use crate::base::error::{Error, Result};
use crate::gemm::problem::GemmPointers;
use crate::ops::activation::{ActivationPlan, ActivationSpec};
use crate::ops::activation_backward::{ActivationBackwardPlan, ActivationBackwardSpec};
use crate::ops::activation_groups::ActivationGroupsPlan;
use crate::ops::affine::{AffinePlan, AffineSpec};
use crate::ops::cast::{CastPlan, CastSpec};
use crate::ops::dequantize::{DequantizePlan, DequantizeSpec};
use crate::ops::grouped_gemm::GroupedGemmPointers;
use crate::ops::norm::NormPlan;
use crate::ops::norm_backward::{NormBackwardPlan, NormBackwardSpec};
use crate::ops::norm_spec::NormSpec;
use crate::ops::route::{RoutePlan, RouteSpec, Way};
use crate::ops::router::{RouterPlan, RouterSpec};
use crate::ops::sum_groups::{SumGroupsPlan, SumGroupsSpec};
use crate::ops::transpose::{TransposePlan, TransposeSpec};
use crate::program::buffer::At;
use crate::program::cast::Cast;
use crate::program::chain::OP;
use crate::program::edge::Rows;
use crate::program::facts::Facts;
use crate::program::linear_op::{ALIGNMENT, Product};
use crate::program::planned::Planned;
use crate::program::port::{Cell, Port};
use crate::program::weight_grad::WeightGradPlan;
use crate::program::work::{Step, Work};
use crate::quant::quantizer::{QuantPlan, QuantPointers};
use crate::runtime::dispatcher::Dispatcher;

/// Bytes of one f32, padded so that the next buffer stays aligned.
const SCALE_BYTES: usize = 16;

/// The state of sizing for one row count.
pub(crate) struct Sizing<'a> {
    dispatcher: &'a mut Dispatcher,
    facts: &'a Facts,
    rows: usize,
    /// Bytes of each buffer, as given by the step that writes it.
    bytes: Vec<Option<usize>>,
}

impl<'a> Sizing<'a> {
    pub(crate) fn new(dispatcher: &'a mut Dispatcher, facts: &'a Facts, rows: usize, buffers: usize) -> Self {
        Self { dispatcher, facts, rows, bytes: vec![None; buffers] }
    }

    /// The launches of `steps`; an error names the op.
    pub(crate) fn launches(&mut self, steps: &[Step]) -> Result<Vec<Planned>> {
        let facts = self.facts;
        let mut list = Vec::with_capacity(steps.len());
        for step in steps {
            list.push(self.launch(step).map_err(|error| facts.within(step.ops.0, error))?);
        }
        Ok(list)
    }

    /// Bytes of each buffer that `steps` use, once all launches are made.
    pub(crate) fn bytes<'s>(self, flows: impl Iterator<Item = &'s [Step]>) -> Result<Vec<usize>> {
        let mut missing = false;
        flows.flatten().for_each(|step| {
            step.work.each(|at| {
                let Port::Buffer(index) = at.port else { return };
                missing |= self.bytes[usize::from(index)].is_none();
            });
        });
        if missing {
            return Err(Error::state(OP, "a step uses a buffer that no step writes; report this"));
        }
        Ok(self.bytes.into_iter().map(|bytes| bytes.unwrap_or(0)).collect())
    }

    const fn count(&self, rows: Rows) -> usize {
        rows.count(self.rows)
    }

    fn cell(&self, at: At) -> Cell {
        Cell { number: self.facts.ports.of(at.port) as u32, offset: at.offset }
    }

    /// Notes the bytes that a step writes at a place.
    fn writes(&mut self, at: At, bytes: usize) {
        if let Port::Buffer(index) = at.port {
            let known = &mut self.bytes[usize::from(index)];
            *known = Some(known.unwrap_or(0).max(at.offset as usize + bytes));
        }
    }

    fn launch(&mut self, step: &Step) -> Result<Planned> {
        let rows = self.count(step.rows);
        match &step.work {
            Work::Quantize { cast, unpacks, at } => self.quantize(cast, unpacks.as_ref(), at, rows),
            Work::Weight { plan, at } => {
                self.quantizes(plan, at);
                Ok(Planned::Weight(*plan, at.map(|&at| self.cell(at))))
            }
            Work::Gemm { linear, product, at, splits } => self.gemm((*linear, *product), at, *splits, rows),
            Work::SumGroups { spec, at } => {
                let plan = SumGroupsPlan::new(SumGroupsSpec { rows, ..*spec })?;
                self.writes(at.sums, plan.sums_bytes());
                Ok(Planned::SumGroups(plan, at.map(|&at| self.cell(at))))
            }
            Work::Handover(values) => {
                for value in values {
                    self.writes(value.inverse, SCALE_BYTES);
                }
                let cells = values.iter().map(|value| value.each().map(|&at| self.cell(at))).collect();
                Ok(Planned::Handover(cells))
            }
            Work::Norm { .. } | Work::NormBackward { .. } => self.norm(&step.work, rows),
            Work::Activation { .. } | Work::ActivationBackward { .. } | Work::ActivationGroups { .. } => {
                self.activation(&step.work, rows)
            }
            Work::Affine { .. }
            | Work::ColumnSums { .. }
            | Work::Dequantize { .. }
            | Work::Transpose { .. }
            | Work::Unpack { .. }
            | Work::Route { .. } => self.simple(&step.work, rows),
            Work::Router { .. } | Work::RouterBackward { .. } | Work::RouterGemm { .. } => {
                self.router(&step.work, rows)
            }
        }
    }

    fn router(&mut self, work: &Work, rows: usize) -> Result<Planned> {
        match work {
            Work::Router { spec, at } => {
                let plan = RouterPlan::new(RouterSpec { tokens: rows, ..*spec })?;
                self.writes(at.probs, plan.prob_bytes());
                self.writes(at.scores, plan.score_bytes());
                self.writes(at.map, plan.map_bytes());
                Ok(Planned::Router(plan, at.map(|&at| self.cell(at))))
            }
            Work::RouterBackward { spec, at } => {
                let plan = RouterPlan::new(RouterSpec { tokens: rows, ..*spec })?;
                self.writes(at.dlogits, plan.logit_bytes());
                Ok(Planned::RouterBackward(plan, at.map(|&at| self.cell(at))))
            }
            Work::RouterGemm { product, at } => {
                let plan = self.dispatcher.gemm(self.facts.key.device, product.problem(rows))?;
                self.writes(at.d, plan.problem().m * plan.problem().ldd * plan.problem().d.size());
                Ok(Planned::Gemm(plan, at.map(|&at| self.cell(at))))
            }
            _ => Err(Error::state(OP, "not a router")),
        }
    }

    fn quantize(
        &mut self,
        cast: &Cast,
        unpacks: Option<&Cast>,
        at: &QuantPointers<At>,
        rows: usize,
    ) -> Result<Planned> {
        let mut plan = cast.plan(rows)?;
        if let Some(other) = unpacks {
            let count = other.plan(self.count(other.edge().rows))?.byte_scales();
            plan = plan.unpacking(count);
            self.writes(at.unpacked, size_of::<f32>() * count);
        }
        self.quantizes(&plan, at);
        Ok(Planned::Quantize(plan, at.map(|&at| self.cell(at))))
    }

    fn quantizes(&mut self, plan: &QuantPlan, at: &QuantPointers<At>) {
        self.writes(at.row, plan.row_bytes());
        self.writes(at.row_scale, plan.row_scale_bytes());
        self.writes(at.col, plan.col_bytes());
        self.writes(at.col_scale, plan.col_scale_bytes());
        self.writes(at.scratch, plan.scratch_bytes());
    }

    fn gemm(
        &mut self,
        (linear, product): (usize, Product),
        at: &GemmPointers<At>,
        splits: At,
        rows: usize,
    ) -> Result<Planned> {
        let op = &self.facts.linears[linear];
        let (pointers, counts) = (at.map(|&at| self.cell(at)), self.cell(splits));
        if matches!(product, Product::WeightGrad) {
            // A delayed gradient gets its destination only in `backward_dw`.
            let own = (op.weight_grad_dtype().into(), false);
            let plan = if op.deferred { None } else { Some(op.wgrad(self.dispatcher, rows, own, ALIGNMENT)?) };
            self.writes(at.d, plan.as_ref().map_or(0, WeightGradPlan::bytes));
            return Ok(Planned::WeightGrad(linear, plan, pointers, counts));
        }
        if let Some(plan) = op.grouped_plan(self.dispatcher, rows, product)? {
            self.writes(at.d, plan.spec().rows * plan.spec().n * plan.spec().d.size());
            return Ok(Planned::GroupedGemm(plan, GroupedGemmPointers::of(&pointers, counts)));
        }
        let plan = op.plan(self.dispatcher, rows, product)?;
        self.writes(at.d, plan.problem().m * plan.problem().ldd * plan.problem().d.size());
        self.writes(at.d_amax, SCALE_BYTES);
        Ok(Planned::Gemm(plan, pointers))
    }

    fn norm(&mut self, work: &Work, rows: usize) -> Result<Planned> {
        match work {
            Work::Norm { spec, at } => {
                let plan = NormPlan::new(NormSpec { rows, ..*spec })?;
                let stats = size_of::<f32>() * rows;
                let outputs = [(at.y, plan.y_bytes()), (at.sum, plan.y_bytes()), (at.mean, stats), (at.rstd, stats)];
                for (at, bytes) in outputs {
                    self.writes(at, bytes);
                }
                self.casts(at.out, plan.out_bytes(), at.out_t, plan.out_t_bytes(), at.scale_inv);
                self.writes(at.measured, SCALE_BYTES);
                Ok(Planned::Norm(plan, at.map(|&at| self.cell(at))))
            }
            Work::NormBackward { spec, at } => {
                let plan = NormBackwardPlan::new(NormBackwardSpec { rows, ..*spec })?;
                self.writes(at.dx, rows * spec.cols * spec.input.size());
                self.writes(at.partial, plan.partial_bytes());
                Ok(Planned::NormBackward(plan, at.map(|&at| self.cell(at))))
            }
            _ => Err(Error::state(OP, "not a norm")),
        }
    }

    fn activation(&mut self, work: &Work, rows: usize) -> Result<Planned> {
        match work {
            Work::Activation { spec, at } => {
                let plan = ActivationPlan::new(ActivationSpec { rows, ..*spec })?;
                self.writes(at.y, plan.y_bytes());
                self.casts(at.out, plan.out_bytes(), at.out_t, plan.out_t_bytes(), at.scale_inv);
                self.writes(at.measured, SCALE_BYTES);
                Ok(Planned::Activation(plan, at.map(|&at| self.cell(at))))
            }
            Work::ActivationBackward { spec, at } => {
                let plan = ActivationBackwardPlan::new(ActivationBackwardSpec { rows, ..*spec })?;
                self.writes(at.dx, plan.dx_bytes());
                self.writes(at.partial, plan.partial_bytes());
                self.writes(at.row_scale_grad, spec.row_scale.map_or(0, |float| rows * float.size()));
                self.casts(at.out, plan.out_bytes(), at.out_t, plan.out_t_bytes(), at.scale_inv);
                self.writes(at.measured, SCALE_BYTES);
                Ok(Planned::ActivationBackward(plan, at.map(|&at| self.cell(at))))
            }
            Work::ActivationGroups { spec, at } => {
                let plan = ActivationGroupsPlan::new(spec.with_rows(rows))?;
                let cast = plan.cast();
                self.writes(at.out, cast.out_bytes());
                self.writes(at.scale_inv, cast.scale_bytes());
                self.writes(at.out_t, cast.out_t_bytes());
                self.writes(at.scale_inv_t, cast.scale_t_bytes());
                self.writes(at.row_scale_grad, plan.row_scale_grad_bytes());
                self.writes(at.sums, plan.sums_bytes());
                Ok(Planned::ActivationGroups(plan, at.map(|&at| self.cell(at))))
            }
            _ => Err(Error::state(OP, "not an activation")),
        }
    }

    /// The FP8 layouts of a kernel that computes and quantises.
    fn casts(&mut self, row: At, row_bytes: usize, col: At, col_bytes: usize, scale: At) {
        self.writes(row, row_bytes);
        self.writes(col, col_bytes);
        self.writes(scale, SCALE_BYTES);
    }

    fn simple(&mut self, work: &Work, rows: usize) -> Result<Planned> {
        match work {
            Work::Affine { spec, at } => {
                let plan = AffinePlan::new(AffineSpec { rows, ..*spec })?;
                self.writes(at.y, plan.y_bytes());
                Ok(Planned::Affine(plan, at.map(|&at| self.cell(at))))
            }
            Work::ColumnSums { spec, at } => {
                let plan = CastPlan::new(CastSpec { rows, ..*spec })?;
                self.writes(at.partial, plan.partial_bytes());
                Ok(Planned::ColumnSums(plan, at.map(|&at| self.cell(at))))
            }
            Work::Dequantize { spec, at } => {
                let plan = DequantizePlan::new(DequantizeSpec { rows, ..*spec })?;
                self.writes(at.out, plan.out_bytes());
                Ok(Planned::Dequantize(plan, at.map(|&at| self.cell(at))))
            }
            Work::Transpose { spec, at } => {
                let plan = TransposePlan::new(TransposeSpec { rows, ..*spec })?;
                self.writes(at.out_t, plan.out_bytes());
                self.writes(at.scale_t, plan.scale_bytes());
                Ok(Planned::Transpose(plan, at.map(|&at| self.cell(at))))
            }
            Work::Route { spec, at } => {
                let plan = RoutePlan::new(RouteSpec { tokens: rows, ..*spec })?;
                self.writes(at.out, plan.out_bytes());
                if spec.way == Way::Back {
                    self.writes(at.probs, plan.prob_bytes());
                }
                if matches!(spec.way, Way::Out(_) | Way::Numbers(_)) {
                    self.writes(at.factors, plan.factor_bytes());
                    self.writes(at.row_id_map, plan.map_bytes());
                    self.writes(at.ends, plan.ends_bytes());
                    self.writes(at.splits, plan.split_bytes());
                    self.writes(at.scratch, plan.scratch_bytes());
                }
                Ok(Planned::Route(plan, at.map(|&at| self.cell(at))))
            }
            Work::Unpack { cast, packed, unpacked } => {
                let count = cast.plan(rows)?.byte_scales();
                self.writes(*unpacked, size_of::<f32>() * count);
                Ok(Planned::Unpack(count, [packed, unpacked].map(|&at| self.cell(at))))
            }
            _ => Err(Error::state(OP, "not such an op")),
        }
    }
}
