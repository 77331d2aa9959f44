//! One launch of a captured call: read from a graph's node, and repeated with other words in its parameters.
#![expect(unsafe_code, reason = "reads captured graphs and launches; every block names who guarantees its arguments")]

use std::ffi::c_void;

use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUDA_MEMSET_NODE_PARAMS, CUfunction, CUgraphNode, CUlaunchAttribute,
    CUlaunchAttributeID, CUlaunchAttributeValue,
};

use crate::base::error::Result;
use crate::cuda::device::Stream;
use crate::cuda::functions::{Functions, SUCCESS, check};

/// `CU_GRAPH_NODE_TYPE_KERNEL`.
const KERNEL: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32;
/// `CU_GRAPH_NODE_TYPE_MEMSET`.
const FILL: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET as u32;
/// `CUDA_ERROR_INVALID_VALUE`: there is no parameter of this number.
const INVALID_VALUE: u32 = sys::cudaError_enum::CUDA_ERROR_INVALID_VALUE as u32;
/// `CU_LAUNCH_PARAM_END`.
const END: usize = 0;
/// `CU_LAUNCH_PARAM_BUFFER_POINTER`: the entry behind it points at a kernel's parameters.
const BUFFER_POINTER: usize = 1;
/// `CU_LAUNCH_PARAM_BUFFER_SIZE`: the entry behind it points at the number of their bytes.
const BUFFER_SIZE: usize = 2;

/// The ways of a library to give a kernel its parameters that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parameters {
    /// All of them in one buffer, as cuBLASLt launches its kernels for Hopper and later GPUs.
    InOneBuffer,
    /// The same, or a pointer to each.
    Any,
}

/// One launch.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) shape: Shape,
    /// A kernel's parameters, padded to whole words; the destination of a fill.
    pub(crate) words: Vec<u64>,
}

// SAFETY: a function of the driver's is a name of the process, not memory of one thread.
unsafe impl Send for Step {}

/// Word number `word` is address number `address` plus `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) word: usize,
    pub(crate) address: usize,
    pub(crate) offset: u64,
}

/// The properties of a launch that all calls share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Kernel(Kernel),
    Fill(Fill),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) function: CUfunction,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    /// Zeros without one.
    pub(crate) cluster: [u32; 3],
    /// How the blocks of clusters are spread over multiprocessors.
    pub(crate) scheduling: u32,
    /// Bytes of the parameters.
    pub(crate) bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    pub(crate) value: u32,
    pub(crate) element_bytes: u32,
    pub(crate) elements: usize,
}

impl Step {
    /// The launch of a captured node on a GPU of a major compute capability; none if it cannot be repeated.
    pub(crate) fn of(calls: &Functions, node: CUgraphNode, major: u32, given: Parameters) -> Option<Self> {
        let mut kind = 0;
        // SAFETY: a node of a live graph; writes one number.
        let status = unsafe { (calls.cuGraphNodeGetType)(node, &raw mut kind) };
        match kind {
            _ if status != SUCCESS => None,
            KERNEL => Self::of_kernel(calls, node, major, given),
            FILL => Self::of_fill(calls, node),
            _ => None,
        }
    }

    fn of_kernel(calls: &Functions, node: CUgraphNode, major: u32, given: Parameters) -> Option<Self> {
        // SAFETY: zeros are valid numbers and null pointers.
        let mut captured: CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
        // SAFETY: a kernel's node of a live graph, and the struct of this version of the function.
        let status = unsafe { (calls.cuGraphKernelNodeGetParams_v2)(node, &raw mut captured) };
        if status != SUCCESS || !has_common_attributes(calls, node, major) {
            return None;
        }
        // The driver takes a kernel in the place of a function.
        let function = if captured.func.is_null() { captured.kern.cast() } else { captured.func };
        let [x, y, z, ..] = attribute(calls, node, CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as u32)?;
        let preference = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE as u32;
        let [scheduling, ..] = attribute(calls, node, preference)?;
        let parameters = match given {
            Parameters::Any if !captured.kernelParams.is_null() => gathered(calls, &captured)?,
            _ => buffer_of(&captured)?,
        };
        let kernel = Kernel {
            function,
            grid: [captured.gridDimX, captured.gridDimY, captured.gridDimZ],
            block: [captured.blockDimX, captured.blockDimY, captured.blockDimZ],
            shared_bytes: captured.sharedMemBytes,
            cluster: [x, y, z],
            scheduling,
            bytes: parameters.len(),
        };
        Some(Self { shape: Shape::Kernel(kernel), words: words_of(&parameters) })
    }

    fn of_fill(calls: &Functions, node: CUgraphNode) -> Option<Self> {
        // SAFETY: zeros are valid numbers.
        let mut fill: CUDA_MEMSET_NODE_PARAMS = unsafe { std::mem::zeroed() };
        // SAFETY: a fill's node of a live graph; writes one struct.
        let status = unsafe { (calls.cuGraphMemsetNodeGetParams)(node, &raw mut fill) };
        let CUDA_MEMSET_NODE_PARAMS { dst, value, elementSize, width, height, .. } = fill;
        let shape = Shape::Fill(Fill { value, element_bytes: elementSize, elements: width });
        let is_simple = status == SUCCESS && height <= 1 && matches!(elementSize, 1 | 4);
        is_simple.then(|| Self { shape, words: vec![dst] })
    }

    /// Launches with the words that `rules` name made of a call's addresses.
    #[inline]
    pub(crate) fn launch(
        &mut self,
        calls: &Functions,
        stream: Stream,
        rules: &[Rule],
        addresses: &[u64],
    ) -> Result<()> {
        for rule in rules {
            self.words[rule.word] = addresses[rule.address].wrapping_add(rule.offset);
        }
        match self.shape {
            Shape::Kernel(kernel) => kernel.launch(calls, stream, &mut self.words),
            Shape::Fill(fill) => fill.launch(calls, stream, self.words[0]),
        }
    }
}

impl Kernel {
    /// No kernel, for tests of rules.
    #[cfg(test)]
    pub(crate) const NONE: Self = Self {
        function: std::ptr::null_mut(),
        grid: [1; 3],
        block: [1; 3],
        shared_bytes: 0,
        cluster: [0; 3],
        scheduling: 0,
        bytes: 8,
    };

    #[inline]
    fn launch(self, calls: &Functions, stream: Stream, words: &mut [u64]) -> Result<()> {
        let Self { function, grid, block, shared_bytes, cluster, scheduling, mut bytes } = self;
        let [x, y, z] = cluster;
        let mut policy = CUlaunchAttributeValue { pad: [0; 64] };
        // SAFETY: a number lies at the beginning of every value.
        unsafe { (&raw mut policy).cast::<u32>().write(scheduling) };
        let mut attributes = [
            CUlaunchAttribute {
                id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                pad: [0; 4],
                value: CUlaunchAttributeValue {
                    clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z },
                },
            },
            CUlaunchAttribute {
                id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
                pad: [0; 4],
                value: policy,
            },
        ];
        let used = &mut attributes[usize::from(x == 0)..=usize::from(scheduling != 0)];
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared_bytes,
            hStream: stream.raw(),
            attrs: used.as_mut_ptr(),
            numAttrs: used.len() as u32,
        };
        let mut parameters: [*mut c_void; 5] = [
            BUFFER_POINTER as *mut c_void,
            words.as_mut_ptr().cast(),
            BUFFER_SIZE as *mut c_void,
            (&raw mut bytes).cast(),
            END as *mut c_void,
        ];
        // SAFETY: the library made this launch when it was captured. The caller gives it the memory that it would give to
        // the library, and the parameters outlive the call, which copies them.
        check("cuLaunchKernelEx", unsafe {
            (calls.cuLaunchKernelEx)(&raw const config, function, std::ptr::null_mut(), parameters.as_mut_ptr())
        })
    }
}

impl Fill {
    fn launch(self, calls: &Functions, stream: Stream, to: u64) -> Result<()> {
        let Self { value, element_bytes, elements } = self;
        if element_bytes == 1 {
            // SAFETY: the library filled the same part of the workspace or of the result when it was captured.
            return check("cuMemsetD8Async", unsafe {
                (calls.cuMemsetD8Async)(to, value as u8, elements, stream.raw())
            });
        }
        // SAFETY: as above.
        check("cuMemsetD32Async", unsafe { (calls.cuMemsetD32Async)(to, value, elements, stream.raw()) })
    }
}

/// Whether the launch asks for nothing that [`Step::launch`] would not ask for.
fn has_common_attributes(calls: &Functions, node: CUgraphNode, major: u32) -> bool {
    /// Access policy window, cooperative launch, domain of memory synchronisation, node that kernels update, carveout of
    /// shared memory. Edges would tell of a programmatic launch.
    const OTHERS: [u32; 5] = [1, 2, 10, 13, 14];
    /// Preferred cluster, of which GPUs before Blackwell know nothing.
    const PREFERRED_CLUSTER: u32 = 11;
    let is_unset = |id: u32| attribute(calls, node, id).is_none_or(|value| value.iter().all(|&word| word == 0));
    OTHERS.iter().all(|&id| is_unset(id)) && (major < 10 || is_unset(PREFERRED_CLUSTER))
}

/// An attribute of a kernel's node; none if the driver does not know it.
fn attribute(calls: &Functions, node: CUgraphNode, id: u32) -> Option<[u32; 16]> {
    #[repr(C, align(8))]
    struct Attribute([u32; 16]);
    const _: () = assert!(size_of::<Attribute>() == size_of::<CUlaunchAttributeValue>());
    let mut value = Attribute([0; 16]);
    // SAFETY: a kernel's node of a live graph, and room for a value of any attribute.
    let status = unsafe { (calls.cuGraphKernelNodeGetAttribute)(node, id, (&raw mut value).cast()) };
    (status == SUCCESS).then_some(value.0)
}

/// The parameters of a kernel that was launched with all of them in one buffer; none if there is a pointer to each.
fn buffer_of(captured: &CUDA_KERNEL_NODE_PARAMS) -> Option<Vec<u8>> {
    let (mut entry, mut buffer, mut bytes) = (captured.extra, std::ptr::null::<u8>(), 0);
    if entry.is_null() {
        return None;
    }
    // The list of a captured launch: names, each followed by a value, and `END`.
    let mut next = || {
        // SAFETY: nothing is read behind the list's `END`.
        let value = unsafe { entry.read() };
        entry = entry.wrapping_add(1);
        value
    };
    loop {
        match next() as usize {
            END => break,
            BUFFER_POINTER => buffer = next().cast(),
            BUFFER_SIZE => {
                let number = next().cast::<usize>();
                // SAFETY: the value of this name points at a number.
                bytes = unsafe { number.read() };
            }
            _ => return None,
        }
    }
    // SAFETY: the launch's own copy of its parameters, which lives as long as the graph.
    (!buffer.is_null()).then(|| unsafe { std::slice::from_raw_parts(buffer, bytes) }.to_vec())
}

/// Bytes as words, zeros behind the last.
fn words_of(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| {
        let mut word = [0; size_of::<u64>()];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    };
    bytes.chunks(size_of::<u64>()).map(word).collect()
}

/// The parameters of a kernel that was launched with a pointer to each, laid out as one buffer.
fn gathered(calls: &Functions, captured: &CUDA_KERNEL_NODE_PARAMS) -> Option<Vec<u8>> {
    let mut parameters = Vec::new();
    for index in 0.. {
        let (mut offset, mut bytes) = (0, 0);
        let status = if captured.func.is_null() {
            // SAFETY: the kernel of a captured launch; writes two numbers.
            unsafe { (calls.cuKernelGetParamInfo)(captured.kern, index, &raw mut offset, &raw mut bytes) }
        } else {
            // SAFETY: the function of a captured launch; writes two numbers.
            unsafe { (calls.cuFuncGetParamInfo)(captured.func, index, &raw mut offset, &raw mut bytes) }
        };
        match status {
            SUCCESS => {}
            INVALID_VALUE => break,
            _ => return None,
        }
        // SAFETY: the kernel has a parameter of this number, so that the list has an entry.
        let value = unsafe { captured.kernelParams.wrapping_add(index).read() }.cast::<u8>();
        // SAFETY: the launch's own copy of the parameter, which lives as long as the graph.
        let value = unsafe { std::slice::from_raw_parts(value, bytes) };
        if parameters.len() < offset + bytes {
            parameters.resize(offset + bytes, 0);
        }
        parameters[offset..offset + bytes].copy_from_slice(value);
    }
    Some(parameters)
}

#[cfg(test)]
mod tests {
    use super::words_of;

    #[test]
    fn bytes_are_words_with_zeros_behind_the_last() {
        assert_eq!(words_of(&[1, 0, 0, 0, 0, 0, 0, 0, 2]), [1, 2]);
        assert!(words_of(&[]).is_empty());
    }
}
