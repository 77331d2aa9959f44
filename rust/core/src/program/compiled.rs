//! A chain compiled for one key.

use std::sync::OnceLock;

use te_fast_kernels::Float;

use crate::base::dtype::DType;
use crate::base::error::{Error, ErrorKind, Result};
use crate::program::bindings::{Bindings, CallTable};
use crate::program::chain::{Chain, OP, Op, ProgramKey};
use crate::program::compile::{Compiled, grad_dtype};
use crate::program::edge::QuantizedKind;
use crate::program::facts::Facts;
use crate::program::linear_op::WeightCast;
use crate::program::port::Port;
use crate::program::sized::SizedProgram;
use crate::program::weight_grad::WeightGradPlan;
use crate::program::work::FlowName;
use crate::quant::value::WeightLayout;
use crate::recipe::definition::Recipe;
use crate::runtime::dispatcher::Dispatcher;

/// A step for `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explained {
    /// Names of the launches.
    pub text: &'static str,
    /// First and last op that the step computes.
    pub ops: (usize, usize),
    /// What multiplies, and why; empty for launches that are no matrix product, and on the host.
    pub reason: &'static str,
}

/// A chain compiled for one key, for any number of rows.
#[derive(Debug)]
pub struct Program {
    facts: Facts,
    compiled: Compiled,
    /// The same without hand-overs, for row counts for which cuBLASLt has no such GEMM.
    plain: OnceLock<Compiled>,
    grad_dtypes: Vec<Float>,
    /// Columns and types.
    extra_outputs: Vec<(usize, Float)>,
    graphs: bool,
}

impl AsRef<Self> for Program {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// Largest number of elements of a value. No memory holds more, and bytes of smaller buffers can be computed without
/// overflow checks.
const MAX_ELEMENTS: usize = 1 << 48;

fn check_elements(what: &'static str, rows: usize, cols: usize) -> Result<()> {
    if rows.checked_mul(cols).is_some_and(|count| count <= MAX_ELEMENTS) {
        return Ok(());
    }
    Err(Error::shape(OP, what, format_args!("at most {MAX_ELEMENTS} elements"), format_args!("{rows} x {cols}")))
}

impl Program {
    /// Compiles `chain`; in FP8 under `recipe`, in high precision without. The device must be current.
    ///
    /// # Errors
    /// Ops that do not fit each other or the key (naming the op), or a feature that the device or cuBLAS lacks.
    pub fn new(dispatcher: &mut Dispatcher, chain: &Chain, key: ProgramKey, recipe: Option<&Recipe>) -> Result<Self> {
        for link in chain.links() {
            if let Op::Linear { inputs, outputs, groups } = link.op {
                let rows = outputs.saturating_mul(groups.map_or(1, |groups| groups.count));
                check_elements("the weight", rows, inputs).map_err(|error| error.within(&link.label))?;
            }
        }
        let facts = Facts::new(dispatcher, chain, key, recipe)?;
        let compiled = Compiled::new(dispatcher, &facts, true)?;
        let links = chain.links().iter().zip(&facts.edges);
        let activation = facts.key.activation;
        Ok(Self {
            compiled,
            plain: OnceLock::new(),
            grad_dtypes: (0..chain.params()).map(|param| grad_dtype(&facts, param)).collect(),
            extra_outputs: links.filter_map(|(link, edge)| link.op.extra_output_of(edge.cols, activation)).collect(),
            graphs: dispatcher.config.graphs && !dispatcher.config.synchronise,
            facts,
        })
    }

    /// The program for a number of rows.
    #[cold]
    pub(crate) fn size(&self, dispatcher: &mut Dispatcher, rows: usize) -> Result<SizedProgram> {
        let widest = self.facts.edges.iter().map(|edge| edge.cols).max().unwrap_or(0);
        let most = rows.max(1).saturating_mul(self.facts.chain.rows_of_one());
        check_elements("the input or a value behind it", most, widest)?;
        match SizedProgram::new(dispatcher, &self.facts, &self.compiled, (rows, self.graphs)) {
            Err(error) if self.compiled.hands_over && matches!(error.kind(), ErrorKind::Cublas { .. }) => {
                let plain = self.without_handovers(dispatcher)?;
                SizedProgram::new(dispatcher, &self.facts, plain, (rows, self.graphs))
            }
            sized => sized,
        }
    }

    fn without_handovers(&self, dispatcher: &mut Dispatcher) -> Result<&Compiled> {
        if let Some(plain) = self.plain.get() {
            return Ok(plain);
        }
        let made = Compiled::new(dispatcher, &self.facts, false)?;
        Ok(self.plain.get_or_init(|| made))
    }

    /// The key of the program.
    #[must_use]
    pub const fn key(&self) -> &ProgramKey {
        &self.facts.key
    }

    /// The recipe in it.
    #[must_use]
    pub const fn recipe(&self) -> Option<&Recipe> {
        self.facts.recipe.as_ref()
    }

    /// The arguments of a call, in memory that is kept between calls.
    #[must_use]
    pub fn call<'t, 'a>(&'t self, table: &'t mut CallTable) -> Bindings<'t, 'a> {
        table.fill(&self.facts.ports)
    }

    /// The extra inputs whose memory forward writes to.
    #[must_use]
    pub fn written_extra_inputs(&self) -> &[usize] {
        self.facts.chain.written_extra_inputs()
    }

    /// Place of the output: [`Port::Output`], or a tensor that it is identical to.
    #[must_use]
    pub const fn output(&self) -> Port {
        self.compiled.output
    }

    /// The same for each extra output.
    #[must_use]
    pub fn extra_outputs(&self) -> &[Port] {
        &self.compiled.extra_outputs
    }

    /// Place of the input's gradient: [`Port::GradInput`], or a tensor that it is identical to.
    #[must_use]
    pub const fn grad_input(&self) -> Port {
        self.compiled.grad_input
    }

    /// The same for each extra input.
    #[must_use]
    pub fn grad_extras(&self) -> &[Port] {
        &self.compiled.grad_extras
    }

    /// The format of a quantised output, if the call asks for one.
    #[must_use]
    pub fn output_kind(&self) -> Option<QuantizedKind> {
        self.facts.output_kind()
    }

    /// The format of a quantised gradient of the input, if the call asks for one.
    #[must_use]
    pub fn grad_input_kind(&self) -> Option<QuantizedKind> {
        self.facts.grad_input_kind()
    }

    /// Whether the last op's backward reads a quantised gradient as it is.
    #[must_use]
    pub fn takes_grad(&self, kind: QuantizedKind) -> bool {
        self.facts.takes_grad(kind).is_some()
    }

    /// Columns of the output.
    #[must_use]
    pub fn out_cols(&self) -> usize {
        self.facts.edges.last().map_or(self.facts.key.cols, |edge| edge.cols)
    }

    /// Columns of the output and of each extra output.
    pub fn result_cols(&self) -> impl Iterator<Item = usize> + '_ {
        std::iter::once(self.out_cols()).chain(self.extra_outputs.iter().map(|&(cols, _)| cols))
    }

    /// Columns of the edges: the input of each op, and the output.
    pub fn widths(&self) -> impl Iterator<Item = usize> + '_ {
        self.facts.edges.iter().map(|edge| edge.cols)
    }

    /// Columns and type of each extra output.
    #[must_use]
    pub fn extra_output_kinds(&self) -> &[(usize, Float)] {
        &self.extra_outputs
    }

    /// Columns of an extra input.
    #[must_use]
    pub fn cols_of_extra(&self, index: usize) -> usize {
        self.facts.extent_of(Port::Extra(index as u16), 1).0
    }

    /// Type that a parameter's gradient is written in.
    #[must_use]
    pub fn grad_dtype(&self, param: usize) -> Float {
        self.grad_dtypes[param]
    }

    /// The call's own tensors (input, extra inputs and outputs, parameters) that backward reads.
    #[must_use]
    pub fn reads(&self) -> &[Port] {
        &self.compiled.reads
    }

    /// A linear op's weight among the parameters.
    #[must_use]
    pub fn linear_param(&self, linear: usize) -> usize {
        self.facts.chain.linear_params()[linear]
    }

    /// Whether a linear op's weight gradient is delayed until `backward_dw`.
    #[must_use]
    pub fn is_deferred(&self, linear: usize) -> bool {
        self.facts.linears[linear].deferred
    }

    /// Whether backward reads the quantised weight of a linear op.
    #[must_use]
    pub fn reads_weight(&self, linear: usize) -> bool {
        self.facts.linears[linear].input_grad
    }

    /// Number of experts of a linear op; 1 for a dense one.
    #[must_use]
    pub fn groups(&self, linear: usize) -> usize {
        self.facts.linears[linear].groups.map_or(1, |groups| groups.count)
    }

    /// How a linear op's quantised weight lies in memory; empty in high precision.
    #[must_use]
    pub fn weight_layout(&self, linear: usize) -> WeightLayout {
        self.facts.linears[linear].weight_layout()
    }

    /// How a linear op's weight is quantised together with other weights; none for experts, for 1 x 128 blocks and in
    /// high precision.
    #[must_use]
    pub fn weight_cast(&self, linear: usize) -> Option<WeightCast> {
        self.facts.linears[linear].weight_cast()
    }

    /// The GEMM of a weight gradient that is added to, or written to, the caller's `main_grad`.
    ///
    /// # Errors
    /// See [`Dispatcher::gemm`].
    pub fn weight_grad_plan(
        &self,
        dispatcher: &mut Dispatcher,
        rows: usize,
        linear: usize,
        (d, accumulate): (DType, bool),
        address: usize,
    ) -> Result<WeightGradPlan> {
        let alignment = 1_usize << address.trailing_zeros().min(8);
        let linear = &self.facts.linears[linear];
        linear.wgrad(dispatcher, linear.rows.count(rows), (d, accumulate), alignment as u16)
    }

    /// The launches of forward and of backward for the rows of `sized`.
    #[must_use]
    pub fn explain(&self, sized: &SizedProgram) -> [Vec<Explained>; 2] {
        let compiled = self.plain.get().filter(|_| !sized.hands_over()).unwrap_or(&self.compiled);
        [FlowName::Forward, FlowName::Backward].map(|flow| {
            let steps = compiled.flows.steps(flow).iter().zip(sized.reasons(flow));
            steps.map(|(step, reason)| Explained { text: step.text, ops: step.ops, reason }).collect()
        })
    }

    /// Why fusions did not apply.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.compiled.notes
    }
}
