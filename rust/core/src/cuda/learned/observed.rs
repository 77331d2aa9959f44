//! The launches of a call that takes tensors, and allocates its results and its workspace itself.
//!
//! The call is captured several times, each time with other tensors. Nothing runs. In all captures, each word of the
//! launches' parameters must be a number that never differs, or an address at the same place of the same tensor, or of the
//! workspace. The workspace is memory that the call has allocated and freed again: whatever the driver knows as memory, and
//! no tensor has. Its words must lie no further apart than the bytes that the call has allocated. Later calls
//! write the addresses of their own tensors and workspace into the parameters. If the workspace has several blocks, nobody
//! knows where each ends, and a later call's workspace has room for all of them behind the last word.

use std::ffi::c_void;

use cudarc::driver::sys::{CUpointer_attribute, CUstreamCaptureMode};

use crate::base::error::{Error, Result};
use crate::cuda::device::{CudaQueue, Stream};
use crate::cuda::functions::{Functions, SUCCESS, functions};
use crate::cuda::graph::Captured;
use crate::cuda::learned::steps::{Fill, Parameters, Rule, Shape, Step};

/// Number of captures that the rules must explain.
pub const CAPTURES: usize = 3;

/// No memory has an address below this one, so that the driver need not be asked about small numbers.
const LOWEST: u64 = 1 << 20;

/// Memory of a tensor that the call was given, or has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Address of the first byte.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The launches of one call under capture, none of which has run.
#[derive(Debug)]
pub struct Observed(Vec<Step>);

impl Observed {
    /// Captures what `call` sends to `stream`, which is not the legacy default stream. Returns what `call` does, and its
    /// launches, if they can be repeated. `call` may allocate memory.
    ///
    /// # Errors
    /// The driver's refusal of a capture, in which case `call` did not run.
    pub fn of<R>(stream: Stream, major: u32, call: impl FnOnce() -> R) -> Result<(R, Option<Self>)> {
        // Allocators ask the driver for memory, which the stricter modes forbid.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let (result, captured) = Captured::on(stream, mode, call)?;
        let steps = captured.ok().and_then(|captured| Self::read(&captured, major));
        Ok((result, steps.map(Self)))
    }

    fn read(captured: &Captured, major: u32) -> Option<Vec<Step>> {
        let (calls, nodes) = (functions().ok()?, captured.nodes_in_order().ok()??);
        nodes.into_iter().map(|node| Step::of(calls, node, major, Parameters::Any)).collect()
    }
}

/// The launches of a call, ready for other tensors.
#[derive(Debug)]
pub struct Repeated {
    calls: &'static Functions,
    steps: Vec<(Step, Vec<Rule>)>,
    tensors: usize,
    workspace_bytes: usize,
}

impl Repeated {
    /// The launches that [`CAPTURES`] captures have in common. Each comes with the memory of the call's tensors, in one
    /// order. `workspace` is the bytes of the workspace, and the number of its blocks. None if the captures differ in
    /// anything but addresses.
    #[must_use]
    pub fn of(captures: Vec<(Observed, Vec<Span>)>, workspace: (usize, usize)) -> Option<Self> {
        let calls = functions().ok()?;
        let captures: Vec<_> = captures.into_iter().map(|(observed, spans)| (observed.0, spans)).collect();
        let rules = rules_of(&captures, workspace.0 as u64, |address| is_memory(calls, address))?;
        let (steps, spans) = captures.into_iter().next()?;
        let workspace_bytes = room_for(workspace, &rules, spans.len());
        let steps = steps.into_iter().zip(rules).collect();
        Some(Self { calls, steps, tensors: spans.len(), workspace_bytes })
    }

    /// Bytes of private memory of a call.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Number of launches.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there are none, which is never so.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Makes the launches with the addresses of a call: its tensors' in the order of the captures, then its workspace's.
    /// The tensors are of the sizes, layouts and alignments that those of the captures had.
    ///
    /// # Errors
    /// Another number of addresses, or the driver's refusal.
    #[inline]
    pub fn launch(&mut self, queue: &CudaQueue<'_>, addresses: &[u64]) -> Result<()> {
        if addresses.len() != self.tensors + 1 {
            let got = format_args!("{} addresses", addresses.len());
            return Err(Error::shape("repeat", "a call", format_args!("{} addresses", self.tensors + 1), got));
        }
        for (step, rules) in &mut self.steps {
            step.launch(self.calls, queue.stream, rules, addresses)?;
        }
        Ok(())
    }
}

/// A word in one capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// A byte of a tensor.
    Tensor {
        index: usize,
        offset: u64,
    },
    /// A byte of other memory.
    Elsewhere(u64),
    Number(u64),
}

impl Word {
    fn of(value: u64, spans: &[Span], is_memory: &impl Fn(u64) -> bool) -> Self {
        let holds = |span: &Span| value.checked_sub(span.address).is_some_and(|offset| offset < span.bytes);
        match spans.iter().position(holds) {
            Some(index) => Self::Tensor { index, offset: value - spans[index].address },
            None if is_memory(value) => Self::Elsewhere(value),
            None => Self::Number(value),
        }
    }
}

/// The rules of each launch; none if the captures differ in more than addresses.
fn rules_of(
    captures: &[(Vec<Step>, Vec<Span>)],
    workspace_bytes: u64,
    is_memory: impl Fn(u64) -> bool,
) -> Option<Vec<Vec<Rule>>> {
    let [(first, spans), others @ ..] = captures else { return None };
    let are_alike = |(steps, theirs): &(Vec<Step>, Vec<Span>)| {
        let sizes_agree = theirs.len() == spans.len() && theirs.iter().zip(spans).all(|(a, b)| a.bytes == b.bytes);
        sizes_agree && steps.len() == first.len() && steps.iter().zip(first).all(|(a, b)| a.shape == b.shape)
    };
    if first.is_empty() || captures.len() != CAPTURES || !others.iter().all(are_alike) || captures.iter().any(overlap) {
        return None;
    }
    let word_of = |capture: usize, step: usize, word: usize| {
        let (steps, spans) = &captures[capture];
        Word::of(steps[step].words[word], spans, &is_memory)
    };
    let begins = begins_of_workspace(first, word_of)?;
    let sizes: Vec<u64> = spans.iter().map(|span| span.bytes).chain([workspace_bytes]).collect();
    // A word as a rule, the workspace as the last address; a number has none.
    let placed = |capture: usize, step: usize, word: usize| match word_of(capture, step, word) {
        Word::Tensor { index, offset } => Ok(Rule { word, address: index, offset }),
        Word::Elsewhere(address) => Ok(Rule { word, address: spans.len(), offset: address - begins[capture] }),
        Word::Number(number) => Err(number),
    };
    let rules_of_step = |step: usize| {
        let filled = match first[step].shape {
            Shape::Fill(Fill { element_bytes, elements, .. }) => u64::from(element_bytes) * elements as u64,
            Shape::Kernel(_) => 1,
        };
        let mut rules = Vec::new();
        for word in 0..first[step].words.len() {
            let origin = placed(0, step, word);
            if (1..CAPTURES).any(|capture| placed(capture, step, word) != origin) {
                return None;
            }
            match origin {
                Ok(rule) if rule.offset + filled <= sizes[rule.address] => rules.push(rule),
                Ok(_) => return None,
                Err(_) if matches!(first[step].shape, Shape::Fill(_)) => return None,
                Err(_) => {}
            }
        }
        Some(rules)
    };
    (0..first.len()).map(rules_of_step).collect()
}

/// The lowest byte of the workspace that a launch names, in each capture; none if all captures have the same. Such memory
/// may be the library's own, which other calls use, too.
fn begins_of_workspace(steps: &[Step], word_of: impl Fn(usize, usize, usize) -> Word) -> Option<[u64; CAPTURES]> {
    let mut begins = [u64::MAX; CAPTURES];
    for (capture, begin) in begins.iter_mut().enumerate() {
        for (step, of_step) in steps.iter().enumerate() {
            for word in 0..of_step.words.len() {
                if let Word::Elsewhere(address) = word_of(capture, step, word) {
                    *begin = address.min(*begin);
                }
            }
        }
    }
    let is_same = begins.iter().all(|&begin| begin == begins[0]);
    (begins[0] == u64::MAX || !is_same).then_some(begins)
}

/// Bytes that hold a workspace of so many bytes and blocks, whose address is number `address`.
fn room_for((bytes, blocks): (usize, usize), rules: &[Vec<Rule>], address: usize) -> usize {
    let furthest = rules.iter().flatten().filter(|rule| rule.address == address).map(|rule| rule.offset).max();
    if blocks > 1 { bytes + furthest.unwrap_or(0) as usize } else { bytes }
}

/// Whether two tensors of a capture share memory.
fn overlap((_, spans): &(Vec<Step>, Vec<Span>)) -> bool {
    let mut sorted: Vec<Span> = spans.iter().copied().filter(|span| span.bytes != 0).collect();
    sorted.sort_unstable_by_key(|span| span.address);
    sorted.windows(2).any(|pair| pair[0].address + pair[0].bytes > pair[1].address)
}

/// Whether the driver knows the address as that of memory.
#[expect(unsafe_code, reason = "asks the driver about a number, which need not be an address")]
fn is_memory(calls: &Functions, address: u64) -> bool {
    if address < LOWEST {
        return false;
    }
    let mut kind = 0_u32;
    let name = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32;
    // SAFETY: writes one number; any number may stand for the address.
    let status = unsafe { (calls.cuPointerGetAttribute)((&raw mut kind).cast::<c_void>(), name, address) };
    status == SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENSORS: [u64; 2] = [4096, 512];
    const WORKSPACE: u64 = 1024;
    /// All that the driver knows as memory.
    const MEMORY: std::ops::Range<u64> = 0x7000_0000_0000..0x7000_1000_0000;

    /// Tensors of a capture, and the address of its workspace.
    fn memory(capture: usize) -> (Vec<Span>, u64) {
        let mut address = MEMORY.start + 0x10_0000 * (capture as u64 * 7 % 5 + 1);
        let spans = TENSORS.map(|bytes| {
            address += 0x2000;
            Span { address, bytes }
        });
        (spans.to_vec(), address + 0x2000 + 512 * capture as u64)
    }

    fn fill(to: u64, elements: usize) -> Step {
        Step { shape: Shape::Fill(Fill { value: 0, element_bytes: 4, elements }), words: vec![to] }
    }

    /// One launch a capture, whose words `make` names.
    fn captures(make: impl Fn(usize, &[Span], u64) -> Vec<u64>) -> Vec<(Vec<Step>, Vec<Span>)> {
        (0..CAPTURES)
            .map(|capture| {
                let (spans, workspace) = memory(capture);
                let words = make(capture, &spans, workspace);
                (vec![Step { words, ..fill(0, 1) }], spans)
            })
            .collect()
    }

    fn rules(captures: &[(Vec<Step>, Vec<Span>)]) -> Option<Vec<Vec<Rule>>> {
        rules_of(captures, WORKSPACE, |address| MEMORY.contains(&address))
    }

    #[test]
    fn words_are_places_of_tensors_and_of_the_workspace() {
        let found = rules(&captures(|_, spans, workspace| {
            vec![spans[1].address, workspace + 512, spans[0].address + 4092, workspace, spans[0].address]
        }));
        let rule = |word, address, offset| Rule { word, address, offset };
        let wanted = vec![rule(0, 1, 0), rule(1, 2, 512), rule(2, 0, 4092), rule(3, 2, 0), rule(4, 0, 0)];
        assert_eq!(found, Some(vec![wanted]));
    }

    #[test]
    fn a_kernel_may_have_numbers_and_a_fill_may_not() {
        use crate::cuda::learned::steps::Kernel;
        let of = |number: fn(usize) -> u64| {
            let mut all = captures(|capture, spans, _| vec![number(capture), spans[0].address]);
            for (steps, _) in &mut all {
                steps[0].shape = Shape::Kernel(Kernel::NONE);
            }
            rules(&all)
        };
        assert_eq!(of(|_| 7), Some(vec![vec![Rule { word: 1, address: 0, offset: 0 }]]));
        assert_eq!(of(|capture| capture as u64), None);
        assert_eq!(rules(&captures(|_, _, _| vec![7])), None);
    }

    #[test]
    fn memory_that_belongs_to_nothing_is_not_learned() {
        // The same address of unknown memory each time, alone and beside a workspace; one that moves otherwise; one too far
        // away.
        assert_eq!(rules(&captures(|_, spans, _| vec![spans[0].address, MEMORY.start])), None);
        assert_eq!(rules(&captures(|_, _, workspace| vec![workspace, MEMORY.start])), None);
        assert_eq!(rules(&captures(|capture, _, workspace| vec![workspace, workspace + 4 * capture as u64])), None);
        assert_eq!(rules(&captures(|_, _, workspace| vec![workspace, workspace + WORKSPACE])), None);
        assert_eq!(
            rules(&captures(|_, spans, _| vec![spans[0].address + 4096])).map(|rules| rules[0][0].address),
            Some(2)
        );
        // A tensor's place that differs, or another tensor.
        assert_eq!(rules(&captures(|capture, spans, _| vec![spans[0].address + capture as u64])), None);
        assert_eq!(rules(&captures(|capture, spans, _| vec![spans[capture & 1].address])), None);
    }

    #[test]
    fn a_workspace_of_several_blocks_has_room_behind_the_last_one() {
        let rule = |address, offset| Rule { word: 0, address, offset };
        let rules = [vec![rule(0, 900), rule(2, 0)], vec![rule(2, 640)]];
        assert_eq!(room_for((1024, 1), &rules, 2), 1024);
        assert_eq!(room_for((1024, 2), &rules, 2), 1664);
        assert_eq!(room_for((1024, 2), &rules, 3), 1024);
    }

    #[test]
    fn fills_stay_inside_of_their_memory() {
        let of = |offset: u64, elements| {
            let all: Vec<_> = (0..CAPTURES)
                .map(|capture| {
                    let (spans, _) = memory(capture);
                    (vec![fill(spans[1].address + offset, elements)], spans)
                })
                .collect();
            rules(&all).is_some()
        };
        assert!(of(0, 128) && of(508, 1));
        assert!(!of(0, 129) && !of(508, 2));
    }

    #[test]
    fn captures_that_differ_are_not_learned() {
        let alike = || captures(|_, spans, _| vec![spans[0].address]);
        assert!(rules(&alike()).is_some());
        assert!(rules(&alike()[1..]).is_none() && rules(&[]).is_none());
        let mut others = alike();
        others[1].0.push(fill(0, 1));
        assert!(rules(&others).is_none());
        let mut others = alike();
        others[2].0[0].shape = Shape::Fill(Fill { value: 1, element_bytes: 4, elements: 1 });
        assert!(rules(&others).is_none());
        let mut others = alike();
        others[1].1[1].bytes += 1;
        assert!(rules(&others).is_none());
        // Tensors that share memory have no place of their own.
        let mut others = alike();
        others[0].1[1].address = others[0].1[0].address + 4095;
        assert!(rules(&others).is_none());
    }
}
