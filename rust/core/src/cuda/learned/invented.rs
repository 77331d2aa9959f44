//! The launches of a library's call, learned from captures of it.
//!
//! `cublasLtMatmul` makes the same decisions in each call of a plan: its launches depend on the problem, which the plan
//! fixes, and on the addresses of the call. So te_fast captures the call three times, each time with invented addresses.
//! Nothing runs. In all three captures, each word of the launches' parameters must be a constant, or one of the addresses
//! plus a constant. Later calls write their addresses into the parameters and launch without the library. If the captures
//! differ in any other way, nothing is learned, and the library is called as before. `benches/rows_host.py` (fresh
//! addresses) shows the host time that this saves.

use crate::base::error::Result;
use crate::cuda::device::{CudaQueue, Stream};
use crate::cuda::functions::{Functions, functions};
use crate::cuda::graph::Captured;
use crate::cuda::learned::steps::{Fill, Parameters, Rule, Shape, Step};
use crate::cuda::zeroed::COUNTER;

/// Number of captures that a rule must explain.
const CAPTURES: usize = 3;
/// The lowest invented address. Addresses of device memory lie in this range, too.
const LOWEST: u64 = 0x7000_0000_0000;
/// Size of the range of invented addresses, in bytes.
const SPREAD: u64 = 1 << 40;

/// The launches of one call with `N` addresses, in order.
#[derive(Debug)]
pub(crate) struct Learned<const N: usize> {
    calls: &'static Functions,
    steps: Vec<(Step, Vec<Rule>)>,
    /// The number of the workspace's address, if the workspace is a counter that the first step zeroes. Then the other
    /// steps may have any zeroed counter in its place.
    counter: Option<usize>,
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
            let steps: Option<Vec<_>> =
                nodes.into_iter().map(|node| Step::of(calls, node, major, Parameters::InOneBuffer)).collect();
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
            step.launch(self.calls, queue.stream, rules, &addresses)?;
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::learned::steps::Kernel;

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
        let rule = |offset| vec![Rule { word: 0, address: 2, offset }];
        let kernel = || (Step { shape: Shape::Kernel(Kernel::NONE), words: vec![0] }, rule(0));
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
}
