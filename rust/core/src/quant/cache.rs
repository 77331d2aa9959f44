//! The cache of a linear op's quantised weight: which weight a call uses, and how long it is kept.
//!
//! The binding owns the memory (`M`). This module decides which weight a call uses, and whether a weight outlives its
//! backward. A weight that the next optimizer step will change is freed by the backward of its forward. It is kept if
//! `is_first_microbatch` asks for it, or if the previous step used its weight more than once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::error::Result;
use crate::cuda::device::Stream;
use crate::quant::graph_memory::GraphMemory;
use crate::quant::weight::{Microbatch, WeightRecord};

/// Number of kept weights for graphs that may be captured later, since calls before the capture may use several recipes
/// and layouts.
const SPARE: usize = 8;
/// Largest number of misses that is counted.
const MOST_MISSES: u32 = 10;

/// A quantised weight.
#[derive(Debug)]
pub struct KeptWeight<M> {
    /// How it was quantised.
    pub record: WeightRecord,
    /// Owner of its bytes.
    pub memory: M,
    /// Whether a backward has computed the weight's gradient since.
    has_gradient: AtomicBool,
}

impl<M> KeptWeight<M> {
    /// A weight that is quantised into `memory`.
    pub const fn new(record: WeightRecord, memory: M) -> Self {
        Self { record, memory, has_gradient: AtomicBool::new(false) }
    }

    /// A backward computes the gradient of the weight.
    pub fn note_gradient(&self) {
        self.has_gradient.store(true, Ordering::Relaxed);
    }

    /// Whether one has.
    #[must_use]
    pub fn has_gradient(&self) -> bool {
        self.has_gradient.load(Ordering::Relaxed)
    }
}

/// The result of a look-up.
#[derive(Debug)]
pub enum Candidate<M> {
    /// No kept weight can be used.
    None,
    /// This weight can be used.
    Serves(Arc<KeptWeight<M>>),
    /// Only optimizers have stepped since: this weight can be used if it is frozen.
    ServesIfFrozen(Arc<KeptWeight<M>>),
}

/// How long a freshly quantised weight is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Until it can no longer be used.
    Long,
    /// Not at all: the optimizer will change it, and backward has its own share. [`WeightCache`] keeps it nevertheless
    /// if the previous step used it again.
    WhileNeeded,
    /// For calls of the graph under capture with `is_first_microbatch=False`: its bytes exist only when the graph runs.
    ForCapture,
    /// Not at all, under capture: only calls with `is_first_microbatch=False` use another call's weight, and later
    /// launches reuse the memory.
    WhileCaptured,
}

/// The cache of a linear op's weight.
#[derive(Debug)]
pub struct WeightCache<M> {
    kept: Option<Arc<KeptWeight<M>>>,
    /// Record of the last weight that was left to its backward.
    passing: Option<WeightRecord>,
    /// Whether a weight was needed again after it was freed; later weights are kept then.
    is_used_again: bool,
    /// Whether the kept weight has been reused.
    was_reused: bool,
    /// Streams that may read it without waiting; the first one wrote it.
    streams: Vec<Stream>,
    captured: Option<Arc<KeptWeight<M>>>,
    /// A weight that was quantised together with others, and its stream, for the next call.
    ready: Option<(Arc<KeptWeight<M>>, Stream)>,
    /// How often such a weight was not used, and how often this weight is still to be quantised alone.
    misses: u32,
    alone: u32,
    /// Weights that captured graphs quantise unless a flag on the device says to skip that.
    skippable: GraphMemory<Arc<KeptWeight<M>>>,
}

impl<M> Default for WeightCache<M> {
    fn default() -> Self {
        Self {
            kept: None,
            passing: None,
            is_used_again: false,
            was_reused: false,
            streams: Vec::new(),
            captured: None,
            ready: None,
            misses: 0,
            alone: 0,
            skippable: GraphMemory::default(),
        }
    }
}

/// A weight that is no longer kept. Its drop may run foreign code, so it is dropped when nothing is borrowed.
pub type Former<M> = Option<Arc<KeptWeight<M>>>;

impl<M> WeightCache<M> {
    /// The kept weight, if there is one.
    #[must_use]
    pub fn kept(&self) -> Option<&Arc<KeptWeight<M>>> {
        self.kept.as_ref()
    }

    /// Drops the kept weight, so that the next forward quantises again. Weights of captured graphs stay; `of_graphs`
    /// also drops the weight for later microbatches of a graph under capture.
    #[must_use]
    pub fn clear(&mut self, of_graphs: bool) -> [Former<M>; 3] {
        self.passing = None;
        self.is_used_again = false;
        let captured = if of_graphs { self.captured.take() } else { None };
        [self.kept.take(), captured, self.take_ready().map(|(weight, _)| weight)]
    }

    /// Leaves a weight that was quantised with others on `stream` to the next call; returns an unused earlier one.
    #[must_use]
    pub fn make_ready(&mut self, weight: Arc<KeptWeight<M>>, stream: Stream) -> Former<M> {
        self.ready.replace((weight, stream)).map(|(weight, _)| weight)
    }

    /// Takes that weight, and the stream that wrote it.
    #[inline]
    pub fn take_ready(&mut self) -> Option<(Arc<KeptWeight<M>>, Stream)> {
        self.ready.take()
    }

    /// Notes that the weight was not used. The more often this happens, the longer the weight is quantised alone.
    pub fn note_miss(&mut self) {
        self.misses = (self.misses + 1).min(MOST_MISSES);
        self.alone = 1 << self.misses;
    }

    /// Notes that a call has quantised this weight alone; returns whether it may join others next time.
    pub fn may_join(&mut self) -> bool {
        let may = self.alone == 0;
        self.alone = self.alone.saturating_sub(1);
        may
    }

    /// Looks up the weight for a call that would quantise `wanted`.
    #[inline]
    pub fn find(&mut self, wanted: &WeightRecord, microbatch: Microbatch, capturing: bool) -> Candidate<M> {
        let known = self.captured.as_ref().filter(|_| capturing).or(self.kept.as_ref());
        if let Some(known) = known {
            return Self::judge(Arc::clone(known), wanted, microbatch, capturing);
        }
        if self.passing.take().is_some_and(|record| record.serves(wanted, Microbatch::Unknown, capturing)) {
            self.is_used_again = true;
        }
        Candidate::None
    }

    fn judge(
        known: Arc<KeptWeight<M>>,
        wanted: &WeightRecord,
        microbatch: Microbatch,
        capturing: bool,
    ) -> Candidate<M> {
        if known.record.serves(wanted, microbatch, capturing) {
            return Candidate::Serves(known);
        }
        let unstepped = WeightRecord { optimizer_steps: known.record.optimizer_steps, ..*wanted };
        if known.record.serves(&unstepped, microbatch, capturing) {
            return Candidate::ServesIfFrozen(known);
        }
        Candidate::None
    }

    /// Notes that a call on `stream` reads the kept weight; returns the stream to wait for at its first read.
    #[inline]
    pub fn reused_on(&mut self, stream: Stream) -> Option<Stream> {
        self.was_reused = true;
        if self.streams.contains(&stream) {
            return None;
        }
        self.streams.push(stream);
        self.streams.first().copied()
    }

    /// The kept weight, whose memory a fresh one may take when no other stream reads it.
    pub fn recycle(&mut self, stream: Stream, capturing: bool) -> Former<M> {
        if capturing || self.streams.as_slice() != [stream] {
            return None;
        }
        self.note_change();
        self.kept.take()
    }

    /// Notes that the kept weight can no longer be used.
    fn note_change(&mut self) {
        if self.kept.is_some() {
            self.is_used_again &= self.was_reused;
        }
    }

    /// Keeps a weight of this call. Called only after success, so that a failed call leaves none.
    #[must_use]
    pub fn keep(&mut self, weight: &Arc<KeptWeight<M>>, stream: Stream, keep: Keep) -> Former<M> {
        match keep {
            Keep::ForCapture => return self.captured.replace(Arc::clone(weight)),
            Keep::WhileCaptured => return self.captured.take(),
            Keep::Long | Keep::WhileNeeded => {}
        }
        self.note_change();
        self.was_reused = false;
        self.streams.clear();
        self.streams.push(stream);
        if keep == Keep::WhileNeeded && !self.is_used_again {
            self.passing = Some(weight.record);
            return self.kept.take();
        }
        self.passing = None;
        self.kept.replace(Arc::clone(weight))
    }

    /// Whether later calls may use this weight.
    #[must_use]
    pub fn holds(&self, weight: &Arc<KeptWeight<M>>) -> bool {
        [&self.kept, &self.captured].into_iter().flatten().any(|kept| Arc::ptr_eq(kept, weight))
    }

    /// The weight of graphs that can skip its quantisation, if there is one for such calls.
    #[must_use]
    pub fn skippable(&self, wanted: &WeightRecord) -> Option<Arc<KeptWeight<M>>> {
        self.skippable.find(|kept| kept.record.is_of_the_same_call(wanted)).cloned()
    }

    /// Keeps such a weight for the graph under `capture`, or for a later graph; returns an evicted one.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn keep_skippable(
        &mut self,
        weight: &Arc<KeptWeight<M>>,
        capture: Option<Stream>,
    ) -> Result<Vec<Arc<KeptWeight<M>>>> {
        if self.skippable.note(|known| Arc::ptr_eq(known, weight), capture)? {
            return Ok(Vec::new());
        }
        self.skippable.keep(Arc::clone(weight), capture)?;
        Ok(self.skippable.release(SPARE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::{DType, Device};
    use crate::quant::value::WeightLayout;
    use crate::quant::weight::WeightToken;
    use crate::recipe::usage::Usage;

    const STREAM: Stream = Stream::DEFAULT;

    fn record(version: u64, steps: u64) -> WeightRecord {
        let usage = Usage { rowwise: true, columnwise: true };
        WeightRecord {
            token: WeightToken { address: 4096, version: Some(version), dtype: DType::Bf16 },
            device: Device::Cpu,
            layout: WeightLayout { usage, ..WeightLayout::default() },
            epoch: 1,
            generation: 0,
            cache_epoch: 0,
            training: true,
            optimizer_steps: steps,
        }
    }

    /// A forward: the weight that it used, and whether it quantised one.
    fn forward(cache: &mut WeightCache<()>, wanted: WeightRecord) -> (Arc<KeptWeight<()>>, bool) {
        if let Candidate::Serves(weight) = cache.find(&wanted, Microbatch::Unknown, false) {
            let _ = cache.reused_on(STREAM);
            return (weight, false);
        }
        let weight = Arc::new(KeptWeight::new(wanted, ()));
        drop(cache.keep(&weight, STREAM, Keep::WhileNeeded));
        (weight, true)
    }

    #[test]
    fn a_weight_that_changes_every_step_is_left_to_its_backward() {
        let mut cache = WeightCache::default();
        for step in 0..3 {
            let (weight, fresh) = forward(&mut cache, record(step, step));
            assert!(fresh && !cache.holds(&weight));
            assert_eq!(Arc::strong_count(&weight), 1);
        }
    }

    #[test]
    fn gradient_accumulation_keeps_it_from_the_second_microbatch_on() {
        let mut cache = WeightCache::default();
        let quantised: Vec<bool> =
            [0, 0, 0, 1, 1, 1].into_iter().map(|step| forward(&mut cache, record(step, step)).1).collect();
        assert_eq!(quantised, [true, true, false, true, false, false]);
    }

    #[test]
    fn it_is_kept_no_longer_once_a_step_has_not_used_it_again() {
        let mut cache = WeightCache::default();
        for step in [0, 0, 1, 2] {
            let _ = forward(&mut cache, record(step, step));
        }
        assert!(cache.kept().is_none());
    }

    #[test]
    fn a_graph_keeps_what_its_later_microbatches_take_and_nothing_else() {
        let mut cache = WeightCache::default();
        let eager = Arc::new(KeptWeight::new(record(0, 0), ()));
        drop(cache.keep(&eager, STREAM, Keep::Long));
        let weight = Arc::new(KeptWeight::new(record(0, 0), ()));
        assert!(cache.keep(&weight, STREAM, Keep::ForCapture).is_none());
        assert!(matches!(cache.find(&record(0, 0), Microbatch::Later, true), Candidate::Serves(_)));
        assert!(matches!(cache.find(&record(0, 0), Microbatch::Unknown, true), Candidate::None));
        let other = Arc::new(KeptWeight::new(record(0, 0), ()));
        assert!(cache.keep(&other, STREAM, Keep::WhileCaptured).is_some_and(|former| Arc::ptr_eq(&former, &weight)));
        assert!(!cache.holds(&other) && cache.holds(&eager));
        drop(cache.keep(&weight, STREAM, Keep::ForCapture));
        assert!(cache.clear(false).iter().flatten().any(|former| Arc::ptr_eq(former, &eager)));
        assert!(!cache.holds(&eager) && cache.holds(&weight));
    }

    #[test]
    fn optimizer_steps_alone_leave_a_frozen_weight_as_it_is() {
        let mut cache = WeightCache::default();
        let weight = Arc::new(KeptWeight::new(record(0, 0), ()));
        drop(cache.keep(&weight, STREAM, Keep::Long));
        let found = |wanted, microbatch| {
            let mut cache = WeightCache { kept: Some(Arc::clone(&weight)), ..WeightCache::default() };
            cache.find(&wanted, microbatch, false)
        };
        assert!(matches!(found(record(0, 1), Microbatch::Unknown), Candidate::ServesIfFrozen(_)));
        assert!(matches!(found(record(0, 0), Microbatch::Unknown), Candidate::Serves(_)));
        assert!(matches!(found(record(1, 0), Microbatch::Unknown), Candidate::None));
        assert!(matches!(found(record(0, 0), Microbatch::First), Candidate::None));
    }

    #[test]
    fn a_weight_that_nobody_came_for_is_quantised_alone_for_a_while() {
        let mut cache = WeightCache::<()>::default();
        assert!(cache.may_join());
        for expected in [2, 4, 8] {
            cache.note_miss();
            let alone = (0..100).take_while(|_| !cache.may_join()).count();
            assert_eq!(alone, expected);
        }
        let weight = Arc::new(KeptWeight::new(record(0, 0), ()));
        assert!(cache.make_ready(Arc::clone(&weight), STREAM).is_none());
        assert!(cache.clear(true).iter().flatten().any(|former| Arc::ptr_eq(former, &weight)));
        assert!(cache.take_ready().is_none());
    }

    #[test]
    fn weights_that_graphs_may_skip_are_no_more_than_calls_need() -> Result<()> {
        let mut cache = WeightCache::default();
        let mut released = Vec::new();
        for epoch in 0..20 {
            let wanted = WeightRecord { epoch, ..record(0, 0) };
            assert!(cache.skippable(&wanted).is_none());
            let weight = Arc::new(KeptWeight::new(wanted, ()));
            released.extend(cache.keep_skippable(&weight, None)?);
            assert!(cache.keep_skippable(&weight, None)?.is_empty());
            assert!(cache.skippable(&wanted).is_some_and(|known| Arc::ptr_eq(&known, &weight)));
        }
        let epochs: Vec<u64> = released.iter().map(|weight| weight.record.epoch).collect();
        assert_eq!(epochs, (0..20 - SPARE as u64).collect::<Vec<_>>());
        Ok(())
    }
}
