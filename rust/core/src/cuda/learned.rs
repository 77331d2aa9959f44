//! The launches of a library's call, learned from captures of it.
//!
//! `cublasLtMatmul` makes the same decisions in each call of a plan: its launches depend on the problem, which the plan
//! fixes, and on the addresses of the call. So te_fast captures the call three times, each time with invented addresses.
//! Nothing runs. In all three captures, each word of the launches' parameters must be a constant, or one of the addresses
//! plus a constant. Later calls write their addresses into the parameters and launch without the library. If the captures
//! differ in any other way, nothing is learned, and the library is called as before. `benches/rows_host.py` (fresh
//! addresses) shows the host time that this saves.
#![expect(unsafe_code, reason = "reads captured graphs and launches; every block names who guarantees its arguments")]

use std::ffi::c_void;

use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUDA_MEMSET_NODE_PARAMS, CUfunction, CUgraphNode, CUlaunchAttribute,
    CUlaunchAttributeID, CUlaunchAttributeValue,
};

use crate::base::error::Result;
use crate::cuda::device::{CudaQueue, Stream};
use crate::cuda::functions::{Functions, SUCCESS, check, functions};
use crate::cuda::graph::Captured;
use crate::cuda::zeroed::COUNTER;

/// Number of captures that a rule must explain.
const CAPTURES: usize = 3;
/// The lowest invented address. Addresses of device memory lie in this range, too.
const LOWEST: u64 = 0x7000_0000_0000;
/// Size of the range of invented addresses, in bytes.
const SPREAD: u64 = 1 << 40;

/// `CU_GRAPH_NODE_TYPE_KERNEL`.
const KERNEL: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32;
/// `CU_GRAPH_NODE_TYPE_MEMSET`.
const FILL: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET as u32;
/// `CU_LAUNCH_PARAM_END`.
const END: usize = 0;
/// `CU_LAUNCH_PARAM_BUFFER_POINTER`: the entry behind it points at a kernel's parameters.
const BUFFER_POINTER: usize = 1;
/// `CU_LAUNCH_PARAM_BUFFER_SIZE`: the entry behind it points at the number of their bytes.
const BUFFER_SIZE: usize = 2;

/// The launches of one call with `N` addresses, in order.
#[derive(Debug)]
pub(crate) struct Learned<const N: usize> {
    calls: &'static Functions,
    steps: Vec<(Step, Vec<Rule>)>,
    /// The number of the workspace's address, if the workspace is a counter that the first step zeroes. Then the other
    /// steps may have any zeroed counter in its place.
    counter: Option<usize>,
}

// SAFETY: a function of the driver's is a name of the process, not memory of one thread.
unsafe impl<const N: usize> Send for Learned<N> {}

/// One launch.
#[derive(Debug)]
struct Step {
    shape: Shape,
    /// A kernel's parameters, padded to whole words; the destination of a fill.
    words: Vec<u64>,
}

/// The properties of a launch that all calls share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Kernel(Kernel),
    Fill(Fill),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kernel {
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    /// Zeros without one.
    cluster: [u32; 3],
    /// How the blocks of clusters are spread over multiprocessors.
    scheduling: u32,
    /// Bytes of the parameters.
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fill {
    value: u32,
    element_bytes: u32,
    elements: usize,
}

/// Word number `word` is address number `address` plus `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    word: usize,
    address: usize,
    offset: u64,
}

impl<const N: usize> Learned<N> {
    /// Learns the launches of `call`, which makes them on a given stream with given addresses. `alignments` has the bytes
    /// that each address is a multiple of, and 0 for an address that no call has. `workspace` is the number of the address
    /// where the call has private memory, and the bytes of it that the call uses. None if `call` fails, if the launches
    /// depend on anything but the addresses, or if a launch cannot be repeated.
    pub(crate) fn learn(
        queue: &mut CudaQueue<'_>,
        alignments: &[u64; N],
        workspace: (usize, usize),
        call: impl Fn(Stream, &[u64; N]) -> Result<()>,
    ) -> Option<Self> {
        let (calls, (major, _)) = (functions().ok()?, queue.device.facts().capability);
        let addresses: [[u64; N]; CAPTURES] = std::array::from_fn(|capture| invented(capture, alignments));
        let mut captures = Vec::with_capacity(CAPTURES);
        for addresses in &addresses {
            let captured = Captured::of(queue, |queue| call(queue.stream, addresses)).ok()?;
            let nodes = captured.nodes_in_order().ok()??;
            let steps: Option<Vec<_>> = nodes.into_iter().map(|node| Step::of(calls, node, major)).collect();
            captures.push(steps?);
        }
        let rules = rules_of(&captures, &addresses)?;
        let steps: Vec<_> = captures.swap_remove(0).into_iter().zip(rules).collect();
        let counter = is_counter(&steps, workspace).then_some(workspace.0);
        Some(Self { calls, steps, counter })
    }

    /// Makes the launches for the addresses of a call.
    ///
    /// # Errors
    /// The driver's refusal.
    #[inline]
    pub(crate) fn launch(&mut self, queue: &mut CudaQueue<'_>, mut addresses: [u64; N]) -> Result<()> {
        let mut steps = self.steps.as_mut_slice();
        if let (Some(counter), Some(zeroed)) = (self.counter, &mut queue.zeroed) {
            addresses[counter] = zeroed.take(queue.stream)?;
            steps = &mut steps[1..];
        }
        for (step, rules) in steps {
            for rule in rules.iter() {
                step.words[rule.word] = addresses[rule.address].wrapping_add(rule.offset);
            }
            step.launch(self.calls, queue.stream)?;
        }
        Ok(())
    }
}

impl Step {
    /// The launch of a captured node on a GPU of a major compute capability; none if it cannot be repeated.
    fn of(calls: &Functions, node: CUgraphNode, major: u32) -> Option<Self> {
        let mut kind = 0;
        // SAFETY: a node of a live graph; writes one number.
        let status = unsafe { (calls.cuGraphNodeGetType)(node, &raw mut kind) };
        match kind {
            _ if status != SUCCESS => None,
            KERNEL => Self::of_kernel(calls, node, major),
            FILL => Self::of_fill(calls, node),
            _ => None,
        }
    }

    fn of_kernel(calls: &Functions, node: CUgraphNode, major: u32) -> Option<Self> {
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
        let parameters = buffer_of(&captured)?;
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

    #[inline]
    fn launch(&mut self, calls: &Functions, stream: Stream) -> Result<()> {
        match self.shape {
            Shape::Kernel(kernel) => kernel.launch(calls, stream, &mut self.words),
            Shape::Fill(fill) => fill.launch(calls, stream, self.words[0]),
        }
    }
}

impl Kernel {
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

/// Addresses of one capture: far from each other, and not more aligned than required.
fn invented<const N: usize>(capture: usize, alignments: &[u64; N]) -> [u64; N] {
    std::array::from_fn(|index| match alignments[index] {
        0 => 0,
        alignment => {
            // SplitMix64 turns consecutive numbers into unrelated ones.
            let mut mixed = ((capture * N + index + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let twice = 2 * alignment;
            LOWEST + (mixed ^ (mixed >> 31)) % SPREAD / twice * twice + alignment
        }
    })
}

/// The rules of each launch; none if the captures differ in more than their addresses.
fn rules_of<const N: usize>(captures: &[Vec<Step>], addresses: &[[u64; N]; CAPTURES]) -> Option<Vec<Vec<Rule>>> {
    let [first, others @ ..] = captures else { return None };
    if first.is_empty() || others.iter().any(|other| other.len() != first.len()) {
        return None;
    }
    (0..first.len())
        .map(|step| {
            let shape = first[step].shape;
            if captures.iter().any(|steps| steps[step].shape != shape) {
                return None;
            }
            let mut rules = Vec::new();
            for word in 0..first[step].words.len() {
                let values = std::array::from_fn(|capture| captures[capture][step].words[word]);
                if let Origin::Address { index, offset } = Origin::of(values, addresses)? {
                    rules.push(Rule { word, address: index, offset });
                }
            }
            Some(rules)
        })
        .collect()
}

/// Whether the first step zeroes all of the workspace, a counter, and is the only one that fills memory.
fn is_counter(steps: &[(Step, Vec<Rule>)], (workspace, bytes): (usize, usize)) -> bool {
    let [(first, rules), others @ ..] = steps else { return false };
    let Shape::Fill(Fill { value: 0, element_bytes, elements }) = first.shape else { return false };
    bytes <= COUNTER
        && elements * element_bytes as usize == bytes
        && *rules == [Rule { word: 0, address: workspace, offset: 0 }]
        && !others.is_empty()
        && others.iter().all(|(step, _)| matches!(step.shape, Shape::Kernel(_)))
}

/// Where a word comes from.
enum Origin {
    Constant,
    Address { index: usize, offset: u64 },
}

impl Origin {
    /// The origin that explains the word's value in each capture, if one does.
    fn of<const N: usize>(values: [u64; CAPTURES], addresses: &[[u64; N]; CAPTURES]) -> Option<Self> {
        if values.iter().all(|&value| value == values[0]) {
            return Some(Self::Constant);
        }
        let offset = |index: usize, capture: usize| values[capture].wrapping_sub(addresses[capture][index]);
        let explains = |&index: &usize| (1..CAPTURES).all(|capture| offset(index, capture) == offset(index, 0));
        (0..N).find(explains).map(|index| Self::Address { index, offset: offset(index, 0) })
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

/// The parameters of a kernel that was launched with all of them in one buffer, as cuBLASLt launches its kernels for Hopper and
/// later GPUs. None if there is a pointer to each: the driver has no name for how many there are.
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

#[cfg(test)]
mod tests {
    use super::*;

    const ALIGNMENTS: [u64; 3] = [256, 16, 0];

    fn addresses() -> [[u64; 3]; CAPTURES] {
        std::array::from_fn(|capture| invented(capture, &ALIGNMENTS))
    }

    fn fill(to: u64, elements: usize) -> Step {
        Step { shape: Shape::Fill(Fill { value: 0, element_bytes: 4, elements }), words: vec![to] }
    }

    /// One step a capture, whose words `make` names.
    fn captures(make: impl Fn(usize, &[u64; 3]) -> Vec<u64>) -> Vec<Vec<Step>> {
        let steps = |(capture, known): (usize, &[u64; 3])| vec![Step { words: make(capture, known), ..fill(0, 1) }];
        addresses().iter().enumerate().map(steps).collect()
    }

    #[test]
    fn invented_addresses_are_as_aligned_as_asked_for_and_all_different() {
        let all = addresses();
        let mut seen: Vec<u64> = all.iter().flat_map(|one| one[..2].iter().copied()).collect();
        for one in all {
            assert!(one[0] % 256 == 0 && one[0] % 512 != 0 && one[1] % 16 == 0 && one[1] % 32 != 0, "{one:x?}");
            assert!(one[2] == 0 && one[0] >= LOWEST && one[0] < LOWEST + 2 * SPREAD);
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 2 * CAPTURES);
    }

    #[test]
    fn words_are_constants_or_an_address_plus_a_constant() {
        let steps = captures(|_, known| vec![7, known[1], known[0].wrapping_add(640), known[0].wrapping_sub(16), 0]);
        let rules = rules_of(&steps, &addresses());
        let rule = |word, address, offset| Rule { word, address, offset };
        let wanted = vec![rule(1, 1, 0), rule(2, 0, 640), rule(3, 0, 16_u64.wrapping_neg())];
        assert_eq!(rules, Some(vec![wanted]));
    }

    #[test]
    fn what_differs_in_another_way_is_not_learned() {
        let known = addresses();
        // A number of its own each time, half of an address, an address at another place, two addresses that took turns.
        assert_eq!(rules_of(&captures(|capture, _| vec![capture as u64]), &known), None);
        assert_eq!(rules_of(&captures(|_, known| vec![known[0] & 0xffff_ffff]), &known), None);
        assert_eq!(rules_of(&captures(|_, known| vec![known[0] << 8]), &known), None);
        assert_eq!(rules_of(&captures(|capture, known| vec![known[capture & 1]]), &known), None);
    }

    #[test]
    fn captures_of_other_launches_are_not_learned() {
        let known = addresses();
        let of = |sizes: [&[usize]; CAPTURES]| -> Vec<Vec<Step>> {
            sizes.iter().map(|sizes| sizes.iter().map(|&size| fill(0, size)).collect()).collect()
        };
        assert_eq!(rules_of(&of([&[4], &[4], &[4]]), &known), Some(vec![vec![]]));
        assert_eq!(rules_of(&of([&[4], &[4], &[8]]), &known), None);
        assert_eq!(rules_of(&of([&[4], &[4, 4], &[4]]), &known), None);
        assert_eq!(rules_of(&of([&[], &[], &[]]), &known), None);
    }

    #[test]
    fn a_counter_is_a_workspace_that_the_first_step_zeroes_whole() {
        let kernel = Kernel {
            function: std::ptr::null_mut(),
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
            cluster: [0; 3],
            scheduling: 0,
            bytes: 8,
        };
        let rule = |offset| vec![Rule { word: 0, address: 2, offset }];
        let kernel = || (Step { shape: Shape::Kernel(kernel), words: vec![0] }, rule(0));
        let zeros = |elements, offset| (fill(0, elements), rule(offset));
        assert!(is_counter(&[zeros(1, 0), kernel()], (2, 4)));
        assert!(is_counter(&[zeros(4, 0), kernel(), kernel()], (2, 16)));
        // A workspace that is larger than its zeros, too large, somewhere else, of another address, or zeroed later.
        assert!(!is_counter(&[zeros(1, 0), kernel()], (2, 8)));
        assert!(!is_counter(&[zeros(8, 0), kernel()], (2, 32)));
        assert!(!is_counter(&[zeros(1, 4), kernel()], (2, 4)));
        assert!(!is_counter(&[zeros(1, 0), kernel()], (1, 4)));
        assert!(!is_counter(&[kernel(), zeros(1, 0), kernel()], (2, 4)));
        assert!(!is_counter(&[zeros(1, 0), kernel(), zeros(1, 0)], (2, 4)));
        assert!(!is_counter(&[zeros(1, 0)], (2, 4)) && !is_counter(&[], (2, 4)));
        let ones = Step { shape: Shape::Fill(Fill { value: 1, element_bytes: 4, elements: 1 }), words: vec![0] };
        assert!(!is_counter(&[(ones, rule(0)), kernel()], (2, 4)));
    }

    #[test]
    fn bytes_are_words_with_zeros_behind_the_last() {
        assert_eq!(words_of(&[1, 0, 0, 0, 0, 0, 0, 0, 2]), [1, 2]);
        assert!(words_of(&[]).is_empty());
    }
}
