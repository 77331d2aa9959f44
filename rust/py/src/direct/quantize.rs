//! The dispatcher for direct use from Python: `te_fast.dispatch` wraps these.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::cuda::device as driver;
use te_fast_core::gemm::problem::{Epilogue, Factor, GemmPointers, Operand, Problem, ScaleMode};
use te_fast_core::launch::trace::{CLOCK, Recording};
use te_fast_core::ops::cast_block::{BlockShape, scale_shape};
use te_fast_core::ops::dequantize::{DequantizePlan, DequantizePointers, DequantizeSpec};
use te_fast_core::quant::quantizer::{QuantPlan, QuantPointers, QuantSpec};
use te_fast_core::recipe::definition::Block;
use te_fast_core::recipe::usage::Usage;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::Place;
use te_fast_core::{Error, Fp8};

use crate::autocast::recipe::NativeRecipe;
use crate::direct::tensors::check_apart;
use crate::error::IntoPython;
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

/// Columns per row of one scale in block scaling.
const GRANULE: usize = 16;

/// Version of the CUDA driver, as 13000 for 13.0; raises without a usable one.
#[pyfunction]
pub(crate) fn cuda_driver_version() -> PyResult<i32> {
    driver::driver().python()
}

/// Whether tensors are read through DLPack's exchange table.
#[pyfunction]
pub(crate) fn has_exchange_table(py: Python<'_>) -> PyResult<bool> {
    Ok(state(py)?.reader.is_fast())
}

/// (compute capabilities with machine code, bytes of all images).
#[pyfunction]
pub(crate) fn image_facts() -> (Vec<u32>, usize) {
    let bytes = te_fast_core::Image::ALL.iter().map(|&image| te_fast_core::image_bytes(image).len()).sum();
    (te_fast_core::architectures().to_vec(), bytes)
}

/// Facts of a CUDA device: capability, multiprocessors, L2 bytes, shared bytes a block.
#[pyfunction]
#[pyo3(signature = (ordinal, /))]
pub(crate) fn device_facts(py: Python<'_>, ordinal: u16) -> PyResult<((u32, u32), u32, u32, u32)> {
    let mut dispatcher = state(py)?.dispatcher(py)?;
    let facts = dispatcher.0.facts(ordinal).python()?;
    Ok((facts.capability, facts.multiprocessors, facts.l2_bytes, facts.shared_bytes))
}

/// Counters since the last reset.
#[pyfunction]
pub(crate) fn counters(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let counters = state(py)?.dispatcher(py)?.0.trace.counters;
    let dict = PyDict::new(py);
    for (name, value) in [
        ("launches", counters.launches),
        ("gemms", counters.gemms),
        ("plan_hits", counters.plan_hits),
        ("plan_misses", counters.plan_misses),
        ("guard_switches", counters.guard_switches),
        ("weight_casts", counters.weight_casts),
        ("allocations", counters.allocations),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// Counters to zero.
#[pyfunction]
pub(crate) fn reset_counters(py: Python<'_>) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.trace.reset();
    Ok(())
}

/// Starts noting launches ("tee": they run too, "only": they do not), or stops ("off").
#[pyfunction]
#[pyo3(signature = (mode, /))]
pub(crate) fn record(py: Python<'_>, mode: &str) -> PyResult<()> {
    let recording = match mode {
        "off" => Recording::Off,
        "tee" => Recording::Tee,
        "only" => Recording::Only,
        other => return Err(Error::value("record", format!("mode must be off, tee or only, got {other:?}"))).python(),
    };
    let mut dispatcher = state(py)?.dispatcher(py)?;
    if dispatcher.0.trace.recording() == Recording::Only {
        dispatcher.0.cache_epoch += 1;
    }
    dispatcher.0.trace.record(recording);
    Ok(())
}

/// Noted launches: (name, blocks, threads, shared bytes, parameter bytes, GEMM problem or None).
#[pyfunction]
pub(crate) fn recorded(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let launches = state(py)?.dispatcher(py)?.0.trace.launches().to_vec();
    let list = PyList::empty(py);
    for launch in launches {
        let problem = launch.problem.map(|problem| format!("{problem:?}"));
        list.append((
            launch.name,
            launch.grid.blocks,
            launch.grid.threads,
            launch.grid.shared_bytes,
            launch.params.as_slice(),
            problem,
        ))?;
    }
    Ok(list)
}

/// Turns the clock of a forward's stages on, from zero, or off.
#[pyfunction]
#[pyo3(signature = (on, /))]
pub(crate) fn stage_clock(on: bool) {
    CLOCK.run(on);
}

/// (stage, nanoseconds) since the clock was turned on.
#[pyfunction]
pub(crate) fn stage_nanoseconds() -> Vec<(&'static str, u64)> {
    CLOCK.spent().collect()
}

/// Per device: (name, GEMM plans, private bytes, streams).
#[pyfunction]
pub(crate) fn inventory(py: Python<'_>) -> PyResult<Vec<(String, usize, usize, usize)>> {
    let all = state(py)?.dispatcher(py)?.0.inventory();
    Ok(all.into_iter().map(|(device, plans, bytes, streams)| (device.to_string(), plans, bytes, streams)).collect())
}

/// Gives private memory back to the devices, which waits for them; other threads run meanwhile.
#[pyfunction]
pub(crate) fn release_memory(py: Python<'_>) -> PyResult<()> {
    let memory = state(py)?.dispatcher(py)?.0.take_memory();
    py.detach(move || drop(memory));
    Ok(())
}

/// Loads every kernel onto a device; how many there are. Other threads run meanwhile.
#[pyfunction]
#[pyo3(signature = (ordinal, /))]
pub(crate) fn load_kernels(py: Python<'_>, ordinal: u16) -> PyResult<usize> {
    py.detach(|| te_fast_core::cuda::images::load_kernels(ordinal)).python()
}

/// Whether row counts that are no multiple of 8 are taken; returns the former setting.
#[pyfunction]
#[pyo3(signature = (enabled, /))]
pub(crate) fn set_auto_pad(py: Python<'_>, enabled: bool) -> PyResult<bool> {
    Ok(std::mem::replace(&mut state(py)?.dispatcher(py)?.0.auto_pad, enabled))
}

/// An optimizer has made a step: weights may have changed, whether torch's version counters tell or not.
#[pyfunction]
pub(crate) fn note_optimizer_step(py: Python<'_>) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.optimizer_steps += 1;
    Ok(())
}

/// Rows that the current region's FP8 GEMMs need behind `rows`, where the user lets them be appended.
#[pyfunction]
#[pyo3(signature = (rows, /))]
pub(crate) fn rows_to_pad(py: Python<'_>, rows: usize) -> PyResult<usize> {
    Ok(state(py)?.dispatcher(py)?.0.rows_to_pad(rows))
}

/// Whether each call compares the tensors' device with the current one; returns the former setting.
#[pyfunction]
#[pyo3(signature = (enabled, /))]
pub(crate) fn set_check_device(py: Python<'_>, enabled: bool) -> PyResult<bool> {
    Ok(std::mem::replace(&mut state(py)?.dispatcher(py)?.0.config.check_device, enabled))
}

fn fp8_named(name: &str) -> PyResult<Fp8> {
    match name {
        "e4m3" => Ok(Fp8::E4m3),
        "e5m2" => Ok(Fp8::E5m2),
        other => Err(Error::value("fp8", format!("type must be e4m3 or e5m2, got {other:?}"))).python(),
    }
}

/// A contiguous view whose elements lie where they claim to.
fn contiguous<'a>(
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

fn single_f32<'a>(
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

/// Quantises `x` as the operand `role` of a GEMM under `recipe`: (row data, row scales, column data, column scales,
/// column sums), None where not asked for.
#[pyfunction]
#[pyo3(signature = (x, recipe, role, rowwise, columnwise, scale, amax, dbias, /))]
pub(crate) fn quantize<'py>(
    x: &Bound<'py, PyAny>,
    recipe: &Bound<'py, NativeRecipe>,
    role: &str,
    rowwise: bool,
    columnwise: bool,
    scale: Option<&Bound<'py, PyAny>>,
    amax: Option<&Bound<'py, PyAny>>,
    dbias: bool,
) -> PyResult<[Option<Bound<'py, PyAny>>; 5]> {
    let py = x.py();
    let state = state(py)?;
    let view = contiguous(state, x, "quantize", "x")?;
    let recipe = recipe.get().0;
    let (quantization, output) = match role {
        "input" => (recipe.input, recipe.fwd),
        "weight" => (recipe.weight, recipe.fwd),
        "grad" => (recipe.grad, recipe.bwd),
        other => {
            return Err(Error::value("quantize", format!("role must be input, weight or grad, got {other:?}")))
                .python();
        }
    };
    let Some(input) = view.dtype().as_float() else {
        return Err(Error::dtype("quantize", "x", "float32, float16 or bfloat16", view.dtype())).python();
    };
    let scale = single_f32(state, scale, "scale", &view)?;
    if recipe.is_delayed() && scale.is_null() {
        return Err(Error::value("quantize", "delayed scaling needs a scale")).python();
    }
    let (rows, cols, device) = (view.rows(), view.cols(), view.device());
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    let processors = state.dispatcher(py)?.0.multiprocessors(device).python()?;
    let usage = Usage { rowwise, columnwise };
    let plan = QuantPlan::new(&QuantSpec {
        scaling: recipe.scaling,
        quantization,
        rows,
        cols,
        input,
        output,
        usage,
        dbias,
        processors,
    })
    .python()?;

    let block = match quantization.block {
        Block::Tensor => None,
        Block::Row => Some(BlockShape::OneDimensional),
        Block::Square => Some(BlockShape::TwoDimensional),
    };
    let scales = |rows, cols| -> Vec<i64> {
        block.map_or_else(|| vec![1], |block| scale_shape(block, rows, cols).iter().map(|&size| size as i64).collect())
    };
    let make =
        |wanted: bool, size: &[i64], dtype| wanted.then(|| state.empty_sized(py, device, size, dtype)).transpose();
    let row = make(rowwise, view.shape(), DType::U8)?;
    let row_scale = make(rowwise, &scales(rows, cols), DType::F32)?;
    let col = make(columnwise, &[cols as i64, rows.next_multiple_of(GRANULE) as i64], DType::U8)?;
    let col_scale = if rowwise && columnwise && plan.shares_scale() {
        row_scale.clone()
    } else {
        make(columnwise, &scales(cols, rows), DType::F32)?
    };
    let sums = make(dbias, &[cols as i64], input.into())?;
    let external = Dispatcher::external_bytes(place, plan.scratch_bytes()).python()?;
    let scratch = state.optional_bytes(py, device, external.bytes())?;
    let memory = external.memory(state.pointer(scratch.as_ref()).python()?);
    let io = QuantPointers {
        x: view.data(),
        row: state.pointer(row.as_ref()).python()?,
        row_scale: state.pointer(row_scale.as_ref()).python()?,
        col: state.pointer(col.as_ref()).python()?,
        col_scale: state.pointer(col_scale.as_ref()).python()?,
        scale,
        amax: single_f32(state, amax, "amax", &view)?,
        dbias: state.pointer(sums.as_ref()).python()?,
        ..QuantPointers::default()
    };
    {
        let mut dispatcher = state.dispatcher(py)?;
        let mut lane = dispatcher.0.lane(place, plan.scratch_bytes(), memory).python()?;
        let (scratch, counters) = (lane.workspace.scratch, lane.workspace.counters);
        plan.run(&mut lane.target, &QuantPointers { scratch, counters, ..io }).python()?;
    }
    Ok([row, row_scale, col, col_scale, sums])
}

/// FP8 bytes `[rows, ld]` back to `dtype` `[rows, cols]`; `block` is 0 (one scale), 1 (1x128) or 2 (128x128).
#[pyfunction]
#[pyo3(signature = (data, scale_inv, fp8, block, cols, out, /))]
pub(crate) fn dequantize<'py>(
    data: &Bound<'py, PyAny>,
    scale_inv: &Bound<'py, PyAny>,
    fp8: &str,
    block: u8,
    cols: usize,
    out: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let py = data.py();
    let state = state(py)?;
    let q = contiguous(state, data, "dequantize", "data")?;
    let scales = contiguous(state, scale_inv, "dequantize", "scale_inv")?;
    let result = contiguous(state, out, "dequantize", "out")?;
    let (rows, ld) = (q.rows(), q.cols());
    let Some(output) = result.dtype().as_float() else {
        return Err(Error::dtype("dequantize", "out", "float32, float16 or bfloat16", result.dtype())).python();
    };
    let block = match block {
        0 => None,
        1 => Some(BlockShape::OneDimensional),
        _ => Some(BlockShape::TwoDimensional),
    };
    let expected = block.map_or(1, |block| scale_shape(block, rows, cols).iter().product());
    if q.dtype().size() != 1
        || result.numel() != rows * cols
        || scales.numel() != expected
        || scales.dtype() != DType::F32
    {
        let got = format!("{:?}, {:?} and {:?}", q.shape(), scales.shape(), result.shape());
        return Err(Error::shape(
            "dequantize",
            "data, scale_inv and out",
            format!("bytes [{rows}, {ld}], {expected} float32 scales and {rows} x {cols} results"),
            got,
        ))
        .python();
    }
    if q.device() != scales.device() || q.device() != result.device() {
        return Err(Error::device("dequantize", "scale_inv and out", q.device(), result.device())).python();
    }
    check_apart(state, "dequantize", &[Some(data), Some(scale_inv)], &[Some(out)])?;
    let plan =
        DequantizePlan::new(DequantizeSpec { rows, cols, ld, input: fp8_named(fp8)?, output, block }).python()?;
    let _guard = state.guard(py, q.device())?;
    let place = Place { device: q.device(), stream: state.reader.stream(py, q.device())? };
    let mut dispatcher = state.dispatcher(py)?;
    let mut target = dispatcher.0.target(place).python()?;
    let pointers = DequantizePointers { q: q.data(), out: result.data(), scale_inv: scales.data() };
    plan.run(&mut target, &pointers).python()
}

/// One operand of [`gemm`]: (tensor, "e4m3" | "e5m2" | None, scales or None, scale mode 0-3, k outermost).
type OperandArguments<'py> = (Bound<'py, PyAny>, Option<String>, Option<Bound<'py, PyAny>>, u8, bool);

/// `d (+)= x · wᵀ + bias`.
#[pyfunction]
#[pyo3(signature = (x, w, d, bias, accumulate, fast_accumulation, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn gemm<'py>(
    x: OperandArguments<'py>,
    w: OperandArguments<'py>,
    d: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    accumulate: bool,
    fast_accumulation: bool,
) -> PyResult<()> {
    let (py, state) = (d.py(), state(d.py())?);
    let result = contiguous(state, d, "gemm", "d")?;
    let device = result.device();
    let (x_view, x_operand, m, k) = operand(state, &x, "x")?;
    let (w_view, w_operand, n, w_k) = operand(state, &w, "w")?;
    let bias_view = bias.map(|bias| contiguous(state, bias, "gemm", "bias")).transpose()?;
    if k != w_k || result.rows() != m || result.cols() != n || bias_view.is_some_and(|bias| bias.numel() != n) {
        let got = format!("x {:?}, w {:?}, d {:?}", x_view.shape(), w_view.shape(), result.shape());
        return Err(Error::shape("gemm", "the operands", "x [m, k], w [n, k], out [m, n] and bias [n]", got)).python();
    }
    let mut others = [Some(x_view), Some(w_view), bias_view].into_iter().flatten().map(|view| view.device());
    if let Some(other) = others.find(|&other| other != device) {
        return Err(Error::device("gemm", "every operand", device, other)).python();
    }
    check_apart(state, "gemm", &[Some(&x.0), Some(&w.0), bias], &[Some(d)])?;
    let pointers = [x_view.data(), w_view.data(), result.data()];
    let alignment = pointers.iter().map(|pointer| pointer.address().trailing_zeros().min(8)).min().unwrap_or(0);
    let problem = Problem {
        m,
        n,
        k,
        x: x_operand,
        w: w_operand,
        d: result.dtype(),
        ldd: n,
        bias: bias_view.map(|bias| bias.dtype()),
        alpha: Factor::ONE,
        epilogue: Epilogue::None,
        accumulate,
        fast_accumulation,
        alignment: 1 << alignment,
    };
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    let external = Dispatcher::external_bytes(place, 0).python()?;
    let scratch = state.optional_bytes(py, device, external.bytes())?;
    let memory = external.memory(state.pointer(scratch.as_ref()).python()?);
    let io = GemmPointers {
        x: x_view.data(),
        x_scale: state.pointer(x.2.as_ref()).python()?,
        w: w_view.data(),
        w_scale: state.pointer(w.2.as_ref()).python()?,
        bias: bias_view.map_or(DevPtr::null(), |bias| bias.data()),
        d: result.data(),
        ..GemmPointers::default()
    };
    let mut dispatcher = state.dispatcher(py)?;
    let plan = dispatcher.0.gemm(device, problem).python()?;
    let mut lane = dispatcher.0.lane(place, 0, memory).python()?;
    let workspace = lane.workspace.gemm;
    plan.run(&mut lane.target, &GemmPointers { workspace, ..io }).python()
}

fn operand<'a>(
    state: &State,
    arguments: &'a OperandArguments<'_>,
    what: &'static str,
) -> PyResult<(TensorView<'a>, Operand, usize, usize)> {
    let (tensor, fp8, scales, mode, k_outermost) = arguments;
    let view = contiguous(state, tensor, "gemm", what)?;
    let dtype = match fp8 {
        Some(name) => fp8_named(name)?.into(),
        None => view.dtype(),
    };
    if fp8.is_some() && view.dtype().size() != 1 {
        return Err(Error::dtype("gemm", what, "bytes for an FP8 operand", view.dtype())).python();
    }
    let (rows, cols) = (view.rows(), view.cols());
    let (outer, k) = if *k_outermost { (cols, rows) } else { (rows, cols) };
    let (scale, expected) = match mode {
        0 => (ScaleMode::None, 0),
        1 => (ScaleMode::Tensor, 1),
        2 => (ScaleMode::Block1d, scale_shape(BlockShape::OneDimensional, outer, k).iter().product()),
        _ => (ScaleMode::Block2d, scale_shape(BlockShape::TwoDimensional, outer, k).iter().product()),
    };
    let given = match scales {
        Some(scales) => {
            let scales = contiguous(state, scales, "gemm", "scale_inv")?;
            if scales.dtype() == DType::F32 && scales.device() == view.device() { scales.numel() } else { usize::MAX }
        }
        None => 0,
    };
    if given != expected || (scale == ScaleMode::None) != fp8.is_none() {
        return Err(Error::shape(
            "gemm",
            "scale_inv",
            format!("{expected} float32 on the operand's device ({what})"),
            format!("{given} elements"),
        ))
        .python();
    }
    Ok((view, Operand { dtype, scale, ld: cols, k_outermost: *k_outermost }, outer, k))
}
