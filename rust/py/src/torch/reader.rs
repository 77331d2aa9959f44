//! torch tensors as borrowed views, and the C entry points that make the reads cheap.
//!
//! With torch ≥ 2.10 a tensor is read through `torch.Tensor.__dlpack_c_exchange_api__` (40 ns), else through Python
//! attributes (350 ns). `TE_FAST_NO_EXCHANGE=1` forces the second method. A test checks that both give the same views.
#![expect(unsafe_code, reason = "the DLPack exchange table is a C table; every block names who guarantees it")]

use std::ffi::{CStr, c_int, c_void};

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyString};
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::cuda::device::Stream;
use te_fast_core::{Error, Result};

const CAPSULE: &CStr = c"dlpack_exchange_api";
const DL_CPU: i32 = 1;
const DL_CUDA: i32 = 2;
/// Major version of the table that this file was written for.
const DLPACK_MAJOR: u32 = 1;

/// `DLTensor` of dlpack.h 1.3.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLPackExchangeAPI` of dlpack.h 1.3; entries that are not used keep their place.
#[repr(C)]
struct ExchangeTable {
    major: u32,
    minor: u32,
    previous: *mut c_void,
    allocator: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    work_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// How tensors are read in this process.
#[derive(Debug)]
pub(crate) struct Reader {
    table: Option<&'static ExchangeTable>,
    attributes: Attributes,
    raw_stream: Option<Py<PyAny>>,
    /// `torch.Tensor.data_ptr`.
    data_ptr: Py<PyAny>,
}

#[derive(Debug)]
struct Attributes {
    data_ptr: Py<PyString>,
    shape: Py<PyString>,
    stride: Py<PyString>,
    dtype: Py<PyString>,
    device: Py<PyString>,
    dtypes: Vec<(Py<PyAny>, DType)>,
}

impl std::fmt::Debug for ExchangeTable {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "ExchangeTable {}.{}", self.major, self.minor)
    }
}

// SAFETY: the table is static data of torch, read only.
unsafe impl Send for ExchangeTable {}
// SAFETY: as above.
unsafe impl Sync for ExchangeTable {}

impl Reader {
    /// The fastest reader that this torch has; without `exchange`, Python attributes.
    pub(crate) fn new(py: Python<'_>, dtypes: Vec<(Py<PyAny>, DType)>, exchange: bool) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let table = if exchange { exchange_table(&torch.getattr("Tensor")?) } else { None };
        let raw_stream = torch.getattr("_C")?.getattr("_cuda_getCurrentRawStream").ok().map(Bound::unbind);
        let name = |text| PyString::intern(py, text).unbind();
        let attributes = Attributes {
            data_ptr: name("data_ptr"),
            shape: name("shape"),
            stride: name("stride"),
            dtype: name("dtype"),
            device: name("device"),
            dtypes,
        };
        let data_ptr = torch.getattr("Tensor")?.getattr("data_ptr")?.unbind();
        Ok(Self { table, attributes, raw_stream, data_ptr })
    }

    /// The view of a tensor; `None` for tensors that no kernel can read (fake and wrapper tensors, other devices and
    /// types).
    #[inline]
    pub(crate) fn read<'a>(&self, tensor: &'a Bound<'_, PyAny>) -> PyResult<Option<TensorView<'a>>> {
        match self.table {
            Some(ExchangeTable { tensor_from_object: Some(read), .. }) => Ok(read_exchange(*read, tensor, false)),
            _ => self.read_attributes(tensor),
        }
    }

    /// The address of a tensor's first byte; an error that names `what` if it has no memory.
    fn address(&self, tensor: &Bound<'_, PyAny>, what: &'static str) -> Result<u64> {
        let address = self.data_ptr.bind(tensor.py()).call1((tensor,)).and_then(|address| address.extract::<i64>());
        match address {
            Ok(address) if address > 0 => Ok(address as u64), // CPython reads signed numbers sooner
            _ => Ok(view_of(self, tensor, what)?.data().address() as u64),
        }
    }

    /// Shape and type of a tensor without its memory, also of a wrapper, which has no memory.
    #[inline]
    pub(crate) fn read_outside<'a>(&self, tensor: &'a Bound<'_, PyAny>) -> PyResult<Option<TensorView<'a>>> {
        if let Some(ExchangeTable { tensor_from_object: Some(read), .. }) = self.table
            && let Some(view) = read_exchange(*read, tensor, true)
        {
            return Ok(TensorView::new(DevPtr::null(), view.device(), view.dtype(), view.shape(), None));
        }
        let Some((dtype, device)) = self.type_and_device(tensor)? else { return Ok(None) };
        let shape = tensor.getattr(&self.attributes.shape)?.extract::<Vec<i64>>()?;
        Ok(TensorView::new(DevPtr::null(), device, dtype, &shape, None))
    }

    fn type_and_device(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<(DType, Device)>> {
        let (py, names) = (tensor.py(), &self.attributes);
        let dtype = tensor.getattr(&names.dtype)?;
        let Some(dtype) = names.dtypes.iter().find(|(object, _)| object.bind(py).is(&dtype)).map(|(_, dtype)| *dtype)
        else {
            return Ok(None);
        };
        let device = tensor.getattr(&names.device)?;
        Ok(match device.getattr("type")?.extract::<&str>()? {
            "cpu" => Some((dtype, Device::Cpu)),
            "cuda" => Some((dtype, Device::Cuda(device.getattr("index")?.extract()?))),
            _ => None,
        })
    }

    fn read_attributes<'a>(&self, tensor: &'a Bound<'_, PyAny>) -> PyResult<Option<TensorView<'a>>> {
        let names = &self.attributes;
        let Some((dtype, device)) = self.type_and_device(tensor)? else { return Ok(None) };
        let Ok(address) = tensor.call_method0(&names.data_ptr) else { return Ok(None) };
        let address = address.extract::<u64>()?;
        let shape = tensor.getattr(&names.shape)?.extract::<Vec<i64>>()?;
        let strides = tensor.call_method0(&names.stride)?.extract::<Vec<i64>>()?;
        if address == 0 && shape.iter().all(|&size| size > 0) {
            return Ok(None);
        }
        // SAFETY: torch keeps the memory as long as the tensor object lives, and the view borrows the object.
        let data = unsafe { DevPtr::from_address(address) };
        Ok(TensorView::new(data, device, dtype, &shape, Some(&strides)))
    }

    /// torch's current stream of a device; the default stream for the CPU.
    #[inline]
    pub(crate) fn stream(&self, py: Python<'_>, device: Device) -> PyResult<Stream> {
        let Device::Cuda(ordinal) = device else { return Ok(Stream::DEFAULT) };
        if let Some(ExchangeTable { work_stream: Some(current), .. }) = self.table {
            let mut stream = std::ptr::null_mut();
            // SAFETY: writes one stream handle; the device exists, since a tensor lives on it.
            if unsafe { current(DL_CUDA, i32::from(ordinal), &raw mut stream) } == 0 {
                // SAFETY: torch's current stream, which it keeps for the life of the process; one that a user brought to
                // torch (ExternalStream) has to live as long as what runs on it, as torch asks for its own kernels.
                return Ok(unsafe { Stream::from_raw(stream as u64) });
            }
            if let Some(error) = PyErr::take(py) {
                return Err(error);
            }
        }
        match &self.raw_stream {
            Some(current) => {
                let stream = current.bind(py).call1((ordinal,))?.extract()?;
                // SAFETY: as above.
                Ok(unsafe { Stream::from_raw(stream) })
            }
            None => Ok(Stream::DEFAULT),
        }
    }
}

#[inline]
fn read_exchange<'a>(
    read: unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int,
    tensor: &'a Bound<'_, PyAny>,
    without_memory: bool,
) -> Option<TensorView<'a>> {
    let mut raw = std::mem::MaybeUninit::<DlTensor>::uninit();
    // SAFETY: torch's function for a live object; on success it fills the struct with borrowed pointers.
    let status = unsafe { read(tensor.as_ptr().cast(), raw.as_mut_ptr()) };
    if status != 0 {
        drop(PyErr::take(tensor.py()));
        return None;
    }
    // SAFETY: the call succeeded, so every field is set.
    let raw = unsafe { raw.assume_init() };
    let device = match raw.device_type {
        DL_CPU => Device::Cpu,
        DL_CUDA => Device::Cuda(u16::try_from(raw.device_id).ok()?),
        _ => return None,
    };
    let dtype = dtype_of(raw.code, raw.bits)?;
    let dims = usize::try_from(raw.ndim).ok()?;
    // SAFETY: torch points shape at `ndim` sizes that live as long as the tensor's geometry, at least this call.
    let shape = unsafe { sizes(raw.shape, dims) };
    // SAFETY: the same for the strides.
    let strides = unsafe { sizes(raw.strides, dims) };
    if raw.data.is_null() && !without_memory && shape.iter().all(|&size| size > 0) {
        return None; // a fake, functorch or wrapper tensor
    }
    let address = if raw.data.is_null() { 0 } else { raw.data as u64 + raw.byte_offset };
    // SAFETY: torch keeps the memory as long as the tensor object lives, and the view borrows the object.
    let data = unsafe { DevPtr::from_address(address) };
    TensorView::new(data, device, dtype, shape, (!raw.strides.is_null()).then_some(strides))
}

/// # Safety
/// `sizes` is null or points at `dims` values that live for `'a`.
unsafe fn sizes<'a>(sizes: *const i64, dims: usize) -> &'a [i64] {
    if sizes.is_null() || dims == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(sizes, dims) }
}

fn dtype_of(code: u8, bits: u8) -> Option<DType> {
    Some(match (code, bits) {
        (2, 32) => DType::F32,
        (2, 16) => DType::F16,
        (2, 64) => DType::F64,
        (4, 16) => DType::Bf16,
        (0, 8) => DType::I8,
        (0, 16) => DType::I16,
        (0, 32) => DType::I32,
        (0, 64) => DType::I64,
        (1, 8) => DType::U8,
        (6, 8) => DType::Bool,
        (10, 8) => DType::E4m3,
        (12, 8) => DType::E5m2,
        _ => return None,
    })
}

fn exchange_table(tensor_type: &Bound<'_, PyAny>) -> Option<&'static ExchangeTable> {
    let capsule = tensor_type.getattr("__dlpack_c_exchange_api__").ok()?;
    let capsule = capsule.cast::<PyCapsule>().ok()?;
    let pointer = capsule.pointer_checked(Some(CAPSULE)).ok()?;
    // SAFETY: the capsule's name says what it points at, and torch never frees the table.
    let table = unsafe { pointer.cast::<ExchangeTable>().as_ref() };
    (table.major == DLPACK_MAJOR && table.tensor_from_object.is_some()).then_some(table)
}

/// A tensor that the native side keeps: an FP8 weight, scales. The memory lives as long as this value, which has its
/// own tensor object: an assignment to `data` of a user's tensor would free the memory.
#[derive(Debug)]
pub(crate) struct Held {
    tensor: Py<PyAny>,
    address: u64,
}

impl Held {
    /// Keeps `tensor`, which has no other owner.
    pub(crate) fn new(reader: &Reader, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let address = reader.address(tensor, "buffer").map_err(crate::error::to_python)?;
        Ok(Self { tensor: tensor.clone().unbind(), address })
    }

    /// Keeps a user's `tensor`, which was read as `view`, during a call. As with a view, nobody may assign to its
    /// `data` meanwhile.
    pub(crate) fn seen(tensor: &Bound<'_, PyAny>, view: &TensorView<'_>) -> Self {
        Self { tensor: tensor.clone().unbind(), address: view.data().address() as u64 }
    }

    /// Keeps the memory of a `tensor` with other owners.
    pub(crate) fn alias(reader: &Reader, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::new(reader, &tensor.call_method0("detach")?)
    }

    /// Its first byte.
    #[inline]
    pub(crate) fn ptr(&self) -> DevPtr<'_> {
        // SAFETY: the tensor object is self's own, so that its storage lives. torch reallocates a storage in its place
        // where somebody resizes it, which is not to be done to tensors of te_fast.
        unsafe { DevPtr::from_address(self.address) }
    }

    /// The tensor itself.
    pub(crate) fn tensor<'a, 'py>(&'a self, py: Python<'py>) -> &'a Bound<'py, PyAny> {
        self.tensor.bind(py)
    }

    /// Keeps the memory alive until the work of `stream`, which did not allocate it, is done.
    pub(crate) fn record_stream(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        self.tensor.bind(stream.py()).call_method1("record_stream", (stream,)).map(drop)
    }
}

/// The view of a tensor, or an error that names `what`.
pub(crate) fn view_of<'a>(reader: &Reader, tensor: &'a Bound<'_, PyAny>, what: &'static str) -> Result<TensorView<'a>> {
    match reader.read(tensor) {
        Ok(Some(view)) => Ok(view),
        Ok(None) | Err(_) => Err(unreadable(tensor, what)),
    }
}

#[cold]
fn unreadable(tensor: &Bound<'_, PyAny>, what: &'static str) -> Error {
    let name = tensor.get_type().name().map_or_else(|_| "another object".to_string(), |name| name.to_string());
    let part = |name: &str| tensor.getattr(name).ok().map(|value| value.to_string());
    let got = match (part("dtype"), part("device"), part("layout")) {
        (Some(dtype), Some(device), Some(layout)) => format!("a {name} of {dtype} on {device}, {layout}"),
        _ => name,
    };
    Error::dtype("te_fast", what, "a plain CPU or CUDA tensor with memory of its own", got)
}

unsafe extern "C" {
    /// `CPython`'s; PyO3 does not declare it.
    fn PyInstanceMethod_New(function: *mut pyo3::ffi::PyObject) -> *mut pyo3::ffi::PyObject;
}

/// `object.__dict__` of an object that has one.
#[inline]
pub(crate) fn instance_dict<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: a live object; returns a new reference, or null with an exception set.
    let dict = unsafe { pyo3::ffi::PyObject_GenericGetDict(object.as_ptr(), std::ptr::null_mut()) };
    // SAFETY: the pointer is owned by us, and null means an exception.
    let dict = unsafe { Bound::from_owned_ptr_or_err(object.py(), dict) }?;
    Ok(dict.cast_into::<PyDict>()?)
}

/// A builtin that binds like a Python function when it is found on a class: `__call__` without a Python frame.
#[pyfunction]
pub(crate) fn instance_method<'py>(function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: takes a borrowed reference and returns a new one or null with an exception set.
    let method = unsafe { PyInstanceMethod_New(function.as_ptr()) };
    // SAFETY: the pointer is owned by us, and null means an exception.
    unsafe { Bound::from_owned_ptr_or_err(function.py(), method) }
}
