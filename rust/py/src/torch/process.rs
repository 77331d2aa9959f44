//! The binding's state for the whole process: the dispatcher, the tensor reader and handles of torch.

use std::sync::Mutex;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};
use smallvec::SmallVec;
use te_fast_core::base::config::Config;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::Context;
use te_fast_core::cuda::memory::take_retired;
use te_fast_core::program::CallTable;
use te_fast_core::runtime::dispatcher::Dispatcher;

use crate::error::{IntoPython, to_python};
use crate::torch::reader::{Reader, view_of};

/// The dispatcher; the GIL and Python's borrow rules stand in for a lock.
#[pyclass(module = "te_fast._native", name = "Dispatcher")]
#[derive(Debug)]
pub(crate) struct DispatcherCell(pub(crate) Dispatcher);

/// Dimensions of the sizes that are kept.
const KEPT_DIMS: usize = 2;
const KEPT_SIZES: usize = 64;

/// Arguments of torch's allocators for repeated sizes, since making and freeing the tuples takes a quarter of an
/// allocation's time. Each size maps to one slot, which holds the last size.
#[pyclass(module = "te_fast._native", name = "AllocationArguments")]
#[derive(Debug)]
pub(crate) struct AllocationArguments([Option<(SizeKey, Py<PyTuple>)>; KEPT_SIZES]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SizeKey {
    size: [i64; KEPT_DIMS],
    dims: usize,
    dtype: DType,
}

impl SizeKey {
    /// None for more dimensions than are kept.
    #[inline]
    fn new(size: &[i64], dtype: DType) -> Option<Self> {
        let mut key = Self { size: [0; KEPT_DIMS], dims: size.len(), dtype };
        key.size.get_mut(..size.len())?.copy_from_slice(size);
        Some(key)
    }

    #[inline]
    fn place(&self) -> usize {
        let mix = |hash: u64, &size: &i64| (hash ^ size as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (self.size.iter().fold(self.dtype as u64, mix) >> 32) as usize % KEPT_SIZES
    }
}

/// Names of attributes that are read while a handle is borrowed: the first `intern!` of a name lets other threads in.
#[derive(Debug)]
pub(crate) struct Names {
    pub(crate) cdata: Py<PyString>,
    pub(crate) grad: Py<PyString>,
    pub(crate) is_leaf: Py<PyString>,
    pub(crate) requires_grad: Py<PyString>,
    pub(crate) version: Py<PyString>,
}

/// The kind of an argument that should be a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorKind {
    /// Of exactly torch's types.
    Plain,
    /// Of a subclass.
    Subclass,
    /// No tensor.
    None,
}

/// torch's functions and types that calls use.
#[derive(Debug)]
pub(crate) struct Torch {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) parameter: Py<PyAny>,
    pub(crate) empty_cpu: Py<PyAny>,
    pub(crate) empty_cuda: Option<Py<PyAny>>,
    /// `(tensor, size, stride, offset)`: a tensor in the same storage, unknown to autograd. It is cheaper than any view
    /// of torch.
    reinterpret: Option<Py<PyAny>>,
    pub(crate) is_grad_enabled: Py<PyAny>,
    pub(crate) is_autocast_enabled: Py<PyAny>,
    /// Owners of a tensor in C++: one for its Python object, others for autograd's nodes.
    pub(crate) use_count: Option<Py<PyAny>>,
    /// Number of modes that see every operator: tracers, and those of users.
    dispatch_modes: Py<PyAny>,
    is_tracing: Py<PyAny>,
    /// Whether operators are recorded by a profiler.
    profiler_enabled: Py<PyAny>,
    pub(crate) linear: Py<PyAny>,
    pub(crate) storage_weak_ref: Py<PyAny>,
    pub(crate) storage_expired: Py<PyAny>,
    pub(crate) current_graph_task_id: Py<PyAny>,
    /// Whether the current backward retains its graph; true outside of a backward.
    pub(crate) retains_graph: Option<Py<PyAny>>,
    /// The class of autograd contexts, and torch's own method; None if another function stood there already.
    function_ctx: Py<PyAny>,
    save_for_backward: Option<Py<PyAny>>,
    pub(crate) module: Py<PyAny>,
    pub(crate) global_hooks: [Py<PyDict>; 4],
    pub(crate) names: Names,
    devices: Option<CurrentDevice>,
    dtypes: Vec<(DType, Py<PyAny>)>,
}

/// Free tables of addresses: a call takes one and returns it, so that steady state makes none. No call waits here; a
/// call that finds the list in use makes its own table.
#[derive(Debug, Default)]
pub(crate) struct Tables(Mutex<Vec<CallTable>>);

impl Tables {
    #[inline]
    pub(crate) fn take(&self) -> CallTable {
        self.0.try_lock().ok().and_then(|mut tables| tables.pop()).unwrap_or_default()
    }

    #[inline]
    pub(crate) fn give_back(&self, table: CallTable) {
        if let Ok(mut tables) = self.0.try_lock() {
            tables.push(table);
        }
    }
}

/// Process state of the binding.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) cell: Py<DispatcherCell>,
    arguments: Py<AllocationArguments>,
    pub(crate) reader: Reader,
    pub(crate) torch: Torch,
    pub(crate) tables: Tables,
}

/// The state, made at first use.
#[inline]
pub(crate) fn state(py: Python<'_>) -> PyResult<&State> {
    static STATE: PyOnceLock<State> = PyOnceLock::new();
    STATE.get_or_try_init(py, || State::new(py))
}

const DTYPES: [(&str, DType); 12] = [
    ("float32", DType::F32),
    ("float16", DType::F16),
    ("bfloat16", DType::Bf16),
    ("float64", DType::F64),
    ("uint8", DType::U8),
    ("int8", DType::I8),
    ("int16", DType::I16),
    ("int32", DType::I32),
    ("int64", DType::I64),
    ("bool", DType::Bool),
    ("float8_e4m3fn", DType::E4m3),
    ("float8_e5m2", DType::E5m2),
];

const _: () = {
    let mut index = 0;
    while index < DTYPES.len() {
        assert!(DTYPES[index].1 as usize == index);
        index += 1;
    }
};

impl State {
    fn new(py: Python<'_>) -> PyResult<Self> {
        let torch = Torch::new(py)?;
        let by_object = torch.dtypes.iter().map(|(dtype, object)| (object.clone_ref(py), *dtype)).collect();
        let config = Config::from_environment();
        let cell = Py::new(py, DispatcherCell(Dispatcher::new(config)))?;
        let arguments = Py::new(py, AllocationArguments([const { None }; KEPT_SIZES]))?;
        Ok(Self {
            cell,
            arguments,
            reader: Reader::new(py, by_object, config.exchange_table)?,
            torch,
            tables: Tables::default(),
        })
    }

    /// The dispatcher for a stretch without calls into Python.
    #[inline]
    pub(crate) fn dispatcher<'py>(&self, py: Python<'py>) -> PyResult<PyRefMut<'py, DispatcherCell>> {
        Ok(self.cell.bind(py).try_borrow_mut()?)
    }

    /// Makes `device` current until the guard is dropped.
    #[inline]
    pub(crate) fn guard<'py>(&self, py: Python<'py>, device: Device) -> PyResult<Guard<'py>> {
        let mut guard = Guard { py, torch: None, context: None };
        let Device::Cuda(ordinal) = device else { return Ok(guard) };
        let mut dispatcher = self.dispatcher(py)?;
        guard.context = dispatcher.0.make_current(device).python()?;
        if dispatcher.0.torch_may_differ()
            && let Some(devices) = &self.torch.devices
        {
            drop(dispatcher);
            guard.torch = devices.switch(py, ordinal)?;
            let mut dispatcher = self.dispatcher(py)?;
            dispatcher.0.trace.counters.guard_switches += u64::from(guard.torch.is_some());
        }
        Ok(guard)
    }

    /// A new tensor of torch's own, uninitialised; the device must be current.
    #[inline]
    pub(crate) fn empty<'py>(
        &self,
        py: Python<'py>,
        device: Device,
        size: &Bound<'py, PyTuple>,
        stride: &Bound<'py, PyTuple>,
        dtype: DType,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.allocator(py, device)?.call1((size, stride, self.torch.dtype(py, dtype)))
    }

    #[inline]
    fn allocator<'a, 'py>(&'a self, py: Python<'py>, device: Device) -> PyResult<&'a Bound<'py, PyAny>> {
        match (device, &self.torch.empty_cuda) {
            (Device::Cpu, _) => Ok(self.torch.empty_cpu.bind(py)),
            (Device::Cuda(_), Some(empty)) => Ok(empty.bind(py)),
            (Device::Cuda(_), None) => {
                Err(to_python(te_fast_core::Error::unsupported("allocation", "this torch was built without CUDA")))
            }
        }
    }

    /// (size, stride, dtype) of a contiguous tensor. The cache is not borrowed while Python objects are made, since
    /// Python may collect garbage and run foreign code.
    #[inline]
    fn arguments<'py>(&self, py: Python<'py>, size: &[i64], dtype: DType) -> PyResult<Bound<'py, PyTuple>> {
        let key = SizeKey::new(size, dtype);
        if let Some(key) = key
            && let Some((kept, tuple)) = &self.arguments.bind(py).try_borrow()?.0[key.place()]
            && *kept == key
        {
            return Ok(tuple.bind(py).clone());
        }
        let stride = PyTuple::new(py, contiguous_strides(size))?;
        let tuple = (PyTuple::new(py, size)?, stride, self.torch.dtype(py, dtype)).into_pyobject(py)?;
        if let Some(key) = key {
            let former =
                self.arguments.bind(py).try_borrow_mut()?.0[key.place()].replace((key, tuple.clone().unbind()));
            drop(former);
        }
        Ok(tuple)
    }

    /// A contiguous tensor of `size`.
    pub(crate) fn empty_sized<'py>(
        &self,
        py: Python<'py>,
        device: Device,
        size: &[i64],
        dtype: DType,
    ) -> PyResult<Bound<'py, PyAny>> {
        let arguments = self.arguments(py, size, dtype)?;
        self.allocator(py, device)?.call1(arguments)
    }

    /// A buffer of bytes.
    #[inline]
    pub(crate) fn bytes<'py>(&self, py: Python<'py>, device: Device, count: usize) -> PyResult<Bound<'py, PyAny>> {
        self.empty_sized(py, device, &[count as i64], DType::U8)
    }
}

impl State {
    /// A buffer of bytes; none for zero.
    #[inline]
    pub(crate) fn optional_bytes<'py>(
        &self,
        py: Python<'py>,
        device: Device,
        count: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if count == 0 { Ok(None) } else { self.bytes(py, device, count).map(Some) }
    }

    /// First byte of a tensor that the caller holds; null for none.
    #[inline]
    pub(crate) fn pointer<'a>(&self, tensor: Option<&'a Bound<'_, PyAny>>) -> te_fast_core::Result<DevPtr<'a>> {
        match tensor {
            Some(tensor) => Ok(view_of(&self.reader, tensor, "a buffer")?.data()),
            None => Ok(DevPtr::null()),
        }
    }
}

/// torch's method; None if another function has replaced it, as Megatron-LM's watch over saved tensors does.
fn own_save_for_backward(class: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
    let present = class.getattr("save_for_backward")?;
    let module = class.py().import("torch.autograd.function")?;
    // Wrappers may copy a function's name and module, but not its code.
    let files = (file_of(&present), module.getattr("once_differentiable").and_then(|other| file_of(&other)));
    let is_own = match files {
        (Ok(file), Ok(own)) => file.eq(own)?,
        _ => false,
    };
    Ok(is_own.then(|| present.unbind()))
}

fn file_of<'py>(function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    function.getattr("__code__")?.getattr("co_filename")
}

/// Strides of a contiguous tensor.
pub(crate) fn contiguous_strides(size: &[i64]) -> SmallVec<[i64; 4]> {
    let mut strides = SmallVec::from_elem(1, size.len());
    for i in (1..size.len()).rev() {
        strides[i - 1] = strides[i] * size[i].max(1);
    }
    strides
}

impl Torch {
    fn new(py: Python<'_>) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let native = torch.getattr("_C")?;
        let guards = native.getattr("_dynamo")?.getattr("guards")?;
        let modules = py.import("torch.nn.modules.module")?;
        let hooks = |name: &str| -> PyResult<Py<PyDict>> { Ok(modules.getattr(name)?.cast_into::<PyDict>()?.unbind()) };
        let dtypes = DTYPES
            .iter()
            .map(|&(name, dtype)| Ok((dtype, torch.getattr(name)?.unbind())))
            .collect::<PyResult<Vec<_>>>()?;
        let function_ctx = py.import("torch.autograd.function")?.getattr("FunctionCtx")?;
        let any_autocast =
            native.getattr("_is_any_autocast_enabled").or_else(|_| torch.getattr("is_autocast_enabled"))?;
        Ok(Self {
            tensor: torch.getattr("Tensor")?.unbind(),
            parameter: py.import("torch.nn")?.getattr("Parameter")?.unbind(),
            empty_cpu: guards.getattr("_empty_strided_cpu")?.unbind(),
            empty_cuda: guards.getattr("_empty_strided_cuda").ok().map(Bound::unbind),
            reinterpret: guards.getattr("_reinterpret_tensor").ok().map(Bound::unbind),
            is_grad_enabled: native.getattr("is_grad_enabled").or_else(|_| torch.getattr("is_grad_enabled"))?.unbind(),
            is_autocast_enabled: any_autocast.unbind(),
            use_count: torch.getattr("Tensor")?.getattr("_use_count").ok().map(Bound::unbind),
            dispatch_modes: native.getattr("_len_torch_dispatch_stack")?.unbind(),
            is_tracing: native.getattr("_is_tracing")?.unbind(),
            profiler_enabled: native.getattr("_autograd")?.getattr("_profiler_enabled")?.unbind(),
            storage_weak_ref: py.import("torch.multiprocessing.reductions")?.getattr("StorageWeakRef")?.unbind(),
            storage_expired: torch.getattr("UntypedStorage")?.getattr("_expired")?.unbind(),
            current_graph_task_id: native.getattr("_current_graph_task_id")?.unbind(),
            retains_graph: native
                .getattr("_autograd")
                .and_then(|autograd| autograd.getattr("_get_current_graph_task_keep_graph"))
                .ok()
                .map(Bound::unbind),
            linear: native.getattr("_nn")?.getattr("linear")?.unbind(),
            save_for_backward: own_save_for_backward(&function_ctx)?,
            function_ctx: function_ctx.unbind(),
            module: modules.getattr("Module")?.unbind(),
            global_hooks: [
                hooks("_global_forward_hooks")?,
                hooks("_global_forward_pre_hooks")?,
                hooks("_global_backward_hooks")?,
                hooks("_global_backward_pre_hooks")?,
            ],
            names: Names {
                cdata: PyString::intern(py, "cdata").unbind(),
                grad: PyString::intern(py, "grad").unbind(),
                is_leaf: PyString::intern(py, "is_leaf").unbind(),
                requires_grad: PyString::intern(py, "requires_grad").unbind(),
                version: PyString::intern(py, "_version").unbind(),
            },
            devices: CurrentDevice::new(&native),
            dtypes,
        })
    }

    /// torch's object for an element type.
    #[inline]
    pub(crate) fn dtype<'a, 'py>(&'a self, py: Python<'py>, dtype: DType) -> &'a Bound<'py, PyAny> {
        self.dtypes[dtype as usize].1.bind(py) // the table is in the order of the enum
    }

    /// Saves tensors for backward by torch's method, or by a function that has replaced that method.
    #[inline]
    pub(crate) fn save_for_backward(&self, ctx: &Bound<'_, PyAny>, tensors: Bound<'_, PyTuple>) -> PyResult<()> {
        let py = ctx.py();
        let name = intern!(py, "save_for_backward");
        let present = self.function_ctx.bind(py).getattr(name)?;
        if self.save_for_backward.as_ref().is_some_and(|own| present.is(own)) {
            return ctx.setattr(intern!(py, "to_save"), tensors);
        }
        ctx.call_method1(name, tensors).map(drop)
    }

    /// Calls a module by `nn.Module.__call__`, which tracers may have replaced.
    #[cold]
    pub(crate) fn call_module<'py>(
        &self,
        arguments: &Bound<'py, PyTuple>,
        keywords: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = arguments.py();
        self.module.bind(py).getattr(intern!(py, "__call__"))?.call(arguments, Some(keywords))
    }

    /// A contiguous tensor of `size` in the storage of a contiguous one, `offset` elements behind its first, which autograd
    /// does not know of. The storage has to reach so far.
    pub(crate) fn in_storage_of<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        size: &[i64],
        offset: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.alias(&Self::to_alias(tensor, size, &contiguous_strides(size), offset)?)
    }

    /// What [`Self::alias`] takes to make a tensor in the storage of a contiguous one.
    pub(crate) fn to_alias<'py>(
        tensor: &Bound<'py, PyAny>,
        size: &[i64],
        stride: &[i64],
        offset: i64,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let py = tensor.py();
        (tensor, PyTuple::new(py, size)?, PyTuple::new(py, stride)?, offset).into_pyobject(py)
    }

    /// Such a tensor, another one in each call.
    pub(crate) fn alias<'py>(&self, alike: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        let py = alike.py();
        if let Some(reinterpret) = &self.reinterpret {
            return reinterpret.bind(py).call1(alike.clone());
        }
        let (tensor, offset) = (alike.get_item(0)?, alike.get_item(3)?.extract::<i64>()?);
        let first = tensor.call_method0(intern!(py, "storage_offset"))?.extract::<i64>()?;
        let own = tensor.call_method0(intern!(py, "detach"))?;
        own.call_method1(intern!(py, "as_strided"), (alike.get_item(1)?, alike.get_item(2)?, first + offset))
    }

    /// Whether `torch.jit.trace` watches, which would take the results of native launches for constants;
    /// [`crate::error::traced_by_jit`] says so.
    #[inline]
    pub(crate) fn is_jit_tracing(&self, py: Python<'_>) -> PyResult<bool> {
        self.is_tracing.bind(py).call0()?.is_truthy()
    }

    /// Whether no mode or tracer is active, which could not see a native call.
    #[inline]
    pub(crate) fn is_unobserved(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(!self.dispatch_modes.bind(py).call0()?.is_truthy()?)
    }

    /// The same, including profilers.
    #[inline]
    pub(crate) fn is_unwatched(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.is_unobserved(py)? && !self.profiler_enabled.bind(py).call0()?.is_truthy()?)
    }

    /// A tensor that the native side may read directly: of exactly torch's types, not a subclass.
    #[inline]
    pub(crate) fn is_plain(&self, object: &Bound<'_, PyAny>) -> bool {
        let kind = object.get_type();
        kind.as_ptr() == self.tensor.as_ptr() || kind.as_ptr() == self.parameter.as_ptr()
    }

    /// Whether the argument is a real tensor, not a tracer's stand-in; and whether the native side may read it.
    #[inline]
    pub(crate) fn kind_of(&self, object: &Bound<'_, PyAny>) -> TensorKind {
        if self.is_plain(object) {
            TensorKind::Plain
        } else if object.is_instance(self.tensor.bind(object.py())).unwrap_or(false) {
            TensorKind::Subclass
        } else {
            TensorKind::None
        }
    }
}

/// torch's functions for its current device. It may differ from CUDA's: when torch returns to a device without a
/// context, it only notes the device, and its allocations use this note.
#[derive(Debug)]
struct CurrentDevice {
    get: Py<PyAny>,
    exchange: Py<PyAny>,
    go_back: Py<PyAny>,
}

impl CurrentDevice {
    /// None where torch was built without CUDA.
    fn new(native: &Bound<'_, PyAny>) -> Option<Self> {
        let function = |name: &str| native.getattr(name).ok().map(Bound::unbind);
        Some(Self {
            get: function("_cuda_getDevice")?,
            exchange: function("_cuda_exchangeDevice")?,
            go_back: function("_cuda_maybeExchangeDevice")?,
        })
    }

    /// Makes `ordinal` torch's current device, if it is not; returns the function and argument that restore the former
    /// one.
    #[inline]
    fn switch<'py>(&self, py: Python<'py>, ordinal: u16) -> PyResult<Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
        if self.get.bind(py).call0()?.extract::<i32>()? == i32::from(ordinal) {
            return Ok(None);
        }
        let former = self.exchange.bind(py).call1((ordinal,))?;
        Ok(Some((self.go_back.bind(py).clone(), former)))
    }
}

/// Puts the former device back when dropped.
#[must_use]
pub(crate) struct Guard<'py> {
    py: Python<'py>,
    torch: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    context: Option<Context>,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some((go_back, former)) = self.torch.take() {
            // torch returned this device a moment ago; an error now cannot be reported.
            let _ = go_back.call1((former,));
        }
        if let Some(former) = self.context.take() {
            // The driver accepted the context a moment ago; an error now cannot be reported.
            let _ = former.restore();
        }
        // The call is over and has nothing borrowed. Freeing outgrown memory waits for the device, and other threads
        // may run meanwhile.
        let retired = take_retired();
        if !retired.is_empty() {
            self.py.detach(move || drop(retired));
        }
    }
}
