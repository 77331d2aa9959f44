//! The buffers of delayed scaling: the slots of a layer in one direction, the registry of all slots of a direction, and
//! the buckets of slots whose maxima ranks reduce together.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use te_fast_kernels::Fp8;

use crate::base::dtype::{DType, Device};
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::base::tensor::TensorView;
use crate::recipe::definition::Recipe;

/// Which pass a scale belongs to: inputs and weights are updated after forward, gradients after backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Direction {
    /// Inputs and weights.
    Forward,
    /// Gradients.
    Backward,
}

impl Direction {
    /// The type that the direction's tensors are quantised to.
    #[must_use]
    pub const fn fp8_of(self, recipe: &Recipe) -> Fp8 {
        match self {
            Self::Forward => recipe.fwd,
            Self::Backward => recipe.bwd,
        }
    }
}

/// Owner of a pair of delayed-scaling buffers.
pub trait SlotMemory: Send + Sync {
    /// The history, f32 `(history_len, count)`.
    fn history(&self) -> DevPtr<'_>;
    /// The scales, f32 `(count)`.
    fn scale(&self) -> DevPtr<'_>;
}

/// A change among the slots that take part.
#[derive(Debug, Default)]
struct Changes {
    /// Any change: the buckets must be made again.
    any: AtomicBool,
    /// Some slots were freed.
    gone: AtomicBool,
}

/// A layer's part in updates, shared by the slots that replace each other.
#[derive(Debug, Default)]
struct Part {
    /// The slots take part, at a place in the order of first forwards.
    has_place: AtomicBool,
    /// The owner of the tensors is gone.
    gone: AtomicBool,
}

impl Part {
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

/// The delayed-scaling buffers of one layer in one direction. The layer owns the slots; when the last owner drops them,
/// the registry drops its entry.
pub struct AmaxSlots {
    id: u64,
    direction: Direction,
    recipe_id: u32,
    group: u64,
    device: Device,
    history_len: u32,
    count: u32,
    /// Shared with the slots that replace these.
    ran: Arc<AtomicBool>,
    /// Other slots have replaced these; calls that began before may still hold these.
    retired: AtomicBool,
    /// Shared with the slots that replace these.
    part: Arc<Part>,
    /// The registry's.
    changes: Arc<Changes>,
    memory: Box<dyn SlotMemory>,
}

impl fmt::Debug for AmaxSlots {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "AmaxSlots({:?}, {} x {} on {})", self.direction, self.history_len, self.count, self.device)
    }
}

impl AmaxSlots {
    /// Number of these slots, unique in the process and ascending in the order of registration.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Pass whose scales these are.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Device of the buffers.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The history, f32 `(history_len, count)`; row 0 is live: kernels raise it to the maximum.
    #[must_use]
    #[inline]
    pub fn history(&self) -> DevPtr<'_> {
        self.memory.history()
    }

    /// The scales, f32 `(count)`.
    #[must_use]
    #[inline]
    pub fn scale(&self) -> DevPtr<'_> {
        self.memory.scale()
    }

    /// Whether the layer ran since the last update.
    #[must_use]
    pub fn ran(&self) -> bool {
        self.ran.load(Ordering::Relaxed)
    }

    /// Whether other slots have replaced these; the layer must then use those.
    #[must_use]
    #[inline]
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// Clears the mark that the layer ran, since the caller has updated the scales itself.
    pub fn clear_ran(&self) {
        self.ran.store(false, Ordering::Relaxed);
    }

    /// Takes no part in updates from now on, unless the layer runs, because the owner of the tensors is gone. If other
    /// slots have replaced these, nothing changes.
    pub fn withdraw(&self) {
        if !self.is_retired() {
            self.part.gone.store(true, Ordering::Relaxed);
            self.changes.gone.store(true, Ordering::Relaxed);
            self.changes.any.store(true, Ordering::Relaxed);
        }
    }

    /// Rows of the history.
    #[must_use]
    pub fn history_len(&self) -> u32 {
        self.history_len
    }

    /// Tensors.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }
}

impl Drop for AmaxSlots {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// The work that is due at a region's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Due {
    /// Nothing.
    Nothing = 0,
    /// No layer ran, but a bucket is updated at every exit, for users' algorithms or together with other ranks.
    Unconditional = 1,
    /// Layers ran.
    Ran = 2,
}

/// Slots of one recipe, group and device that take part in updates even if their layers did not run, since ranks reduce
/// their maxima together. Their order is that of the layers' first forwards. It is the same on every rank that runs the
/// same model, even if a rank also has copies and loaded checkpoints.
///
/// Ranks free their layers at different times, some only when a garbage collector runs. So freed slots keep their place
/// until they are freed on all ranks: see [`Bucket::looks_for_gone`].
#[derive(Debug)]
pub struct Bucket {
    recipe_id: u32,
    /// The recipe.
    pub recipe: Recipe,
    /// Process group of the reduction.
    pub group: u64,
    /// Device of the buffers.
    pub device: Device,
    members: Vec<Member>,
    tensors: u32,
    /// Whether the ranks have compared this bucket.
    agreed: AtomicBool,
    /// Reductions so far of this recipe, group and device, as many as on the other ranks.
    reductions: AtomicU64,
}

/// Interval, in reductions, of the search for slots that are freed on all ranks, since it makes the host wait for the
/// device.
const REDUCTIONS_PER_LOOK: u64 = 16;

/// Slots of a bucket.
#[derive(Debug)]
pub struct Member {
    slots: Weak<AmaxSlots>,
    part: Arc<Part>,
    /// Number of the first tensor.
    pub first: u32,
    /// Tensors.
    pub count: u32,
}

impl Member {
    /// The slots; none if they are freed or replaced.
    #[must_use]
    pub fn slots(&self) -> Option<Arc<AmaxSlots>> {
        if self.part.is_gone() { None } else { self.slots.upgrade().filter(|slots| !slots.is_retired()) }
    }

    /// Whether the owner of the tensors is gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.part.is_gone()
    }
}

impl Bucket {
    /// Tensors of all slots.
    #[must_use]
    pub fn tensors(&self) -> u32 {
        self.tensors
    }

    /// The slots in their order.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Whether some slots are freed.
    #[must_use]
    pub fn has_gone(&self) -> bool {
        self.members.iter().any(Member::is_gone)
    }

    /// Whether all slots are freed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.members.iter().all(Member::is_gone)
    }

    /// Whether the ranks have compared this bucket and its numbers of tensors.
    #[must_use]
    pub fn is_agreed(&self) -> bool {
        self.agreed.load(Ordering::Relaxed)
    }

    /// Notes that the ranks have compared it.
    pub fn agree(&self) {
        self.agreed.store(true, Ordering::Relaxed);
    }

    /// Notes a reduction; returns whether all ranks search for freed slots after it.
    pub fn looks_for_gone(&self) -> bool {
        (self.reductions.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(REDUCTIONS_PER_LOOK)
    }

    fn key(&self) -> (u32, u64, Device) {
        (self.recipe_id, self.group, self.device)
    }
}

/// Checked properties of new slots, without their memory; made by `AutocastState::plan_slots`.
#[derive(Clone, Copy, Debug)]
pub struct SlotsPlan {
    direction: Direction,
    recipe_id: u32,
    is_unconditional: bool,
    group: u64,
    device: Device,
    history_len: u32,
    count: u32,
}

impl SlotsPlan {
    /// Slots of a history f32 `(history_len, count)` and scales f32 `(count)`, both contiguous.
    pub(crate) fn new(
        direction: Direction,
        (recipe, recipe_id): (&Recipe, u32),
        group: u64,
        history: &TensorView<'_>,
        scale: &TensorView<'_>,
    ) -> Result<Self> {
        check_slots(history, scale)?;
        Ok(Self {
            direction,
            recipe_id,
            is_unconditional: is_unconditional(recipe),
            group,
            device: history.device(),
            history_len: history.shape()[0] as u32,
            count: scale.shape()[0] as u32,
        })
    }

    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }
}

/// Entry of slots in updates, which outlives freed slots.
#[derive(Debug)]
struct Participant {
    slots: Weak<AmaxSlots>,
    part: Arc<Part>,
    recipe_id: u32,
    group: u64,
    device: Device,
    count: u32,
}

impl Participant {
    fn new(slots: &Arc<AmaxSlots>) -> Self {
        let AmaxSlots { recipe_id, group, device, count, .. } = **slots;
        Self { slots: Arc::downgrade(slots), part: Arc::clone(&slots.part), recipe_id, group, device, count }
    }

    fn key(&self) -> (u32, u64, Device) {
        (self.recipe_id, self.group, self.device)
    }
}

/// Registered slots of one direction.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    slots: Vec<Weak<AmaxSlots>>,
    /// The slots that take part, in order.
    participants: Vec<Participant>,
    ran: bool,
    /// Whether some bucket needs an update at every exit.
    unconditional: bool,
    buckets: Vec<Arc<Bucket>>,
    changes: Arc<Changes>,
}

const fn is_unconditional(recipe: &Recipe) -> bool {
    recipe.delayed.reduce_amax || recipe.delayed.custom != 0
}

impl Registry {
    /// Registers slots, which replace `former`.
    pub(crate) fn register(
        &mut self,
        id: u64,
        plan: SlotsPlan,
        memory: Box<dyn SlotMemory>,
        former: Option<&AmaxSlots>,
    ) -> Arc<AmaxSlots> {
        let SlotsPlan { direction, recipe_id, is_unconditional, group, device, history_len, count } = plan;
        let slots = Arc::new(AmaxSlots {
            id,
            direction,
            recipe_id,
            group,
            device,
            history_len,
            count,
            ran: former.map_or_else(Arc::default, |former| Arc::clone(&former.ran)),
            retired: AtomicBool::new(false),
            part: former.map_or_else(Arc::default, |former| Arc::clone(&former.part)),
            changes: Arc::clone(&self.changes),
            memory,
        });
        if let Some(former) = former {
            former.retired.store(true, Ordering::Relaxed);
            if let Some(at) = self.participants.iter().position(|known| Arc::ptr_eq(&known.part, &slots.part)) {
                self.participants[at] = Participant::new(&slots);
            }
        }
        self.changes.any.store(true, Ordering::Relaxed);
        self.unconditional |= is_unconditional;
        self.slots.retain(|slots| slots.upgrade().is_some_and(|slots| !slots.is_retired()));
        self.slots.push(Arc::downgrade(&slots));
        slots
    }

    /// Gives slots the next place, if they have none.
    pub(crate) fn take_part(&mut self, slots: &Arc<AmaxSlots>) {
        if !slots.part.has_place.swap(true, Ordering::Relaxed) {
            self.participants.push(Participant::new(slots));
            self.changes.any.store(true, Ordering::Relaxed);
        }
    }

    /// Removes freed slots from a bucket: all of them, or those that are freed on all ranks, whose reduced maxima are
    /// negative.
    pub(crate) fn forget_gone(&mut self, bucket: &Bucket, reduced: Option<&[f32]>) {
        let is_over = |member: &&Member| {
            let unknown = reduced.is_none_or(|maxima| maxima.get(member.first as usize).is_some_and(|&max| max < 0.0));
            member.is_gone() && unknown
        };
        for member in bucket.members.iter().filter(is_over) {
            self.participants.retain(|known| !Arc::ptr_eq(&known.part, &member.part));
            self.changes.any.store(true, Ordering::Relaxed);
        }
    }

    /// Removes all freed slots, if there are no other ranks.
    pub(crate) fn forget_all_gone(&mut self) {
        if self.changes.gone.swap(false, Ordering::Relaxed) {
            self.participants.retain(|known| !known.part.is_gone());
            self.changes.any.store(true, Ordering::Relaxed);
        }
    }

    /// Notes that some slots' layer ran.
    #[inline]
    pub(crate) fn mark_ran(&mut self, slots: &AmaxSlots) {
        slots.ran.store(true, Ordering::Relaxed);
        self.ran = true;
    }

    pub(crate) fn due(&self) -> Due {
        match (self.ran, self.unconditional) {
            (true, _) => Due::Ran,
            (false, true) => Due::Unconditional,
            (false, false) => Due::Nothing,
        }
    }

    /// The living slots.
    pub(crate) fn living(&self) -> impl Iterator<Item = Arc<AmaxSlots>> {
        self.slots.iter().filter_map(Weak::upgrade)
    }

    /// The living slots that take part in updates, in order.
    pub(crate) fn participants(&self) -> Vec<Arc<AmaxSlots>> {
        let there = self.participants.iter().filter(|known| !known.part.is_gone());
        there.filter_map(|known| known.slots.upgrade()).collect()
    }

    /// A device with slots whose layers ran.
    pub(crate) fn due_device(&self) -> Option<Device> {
        if self.ran { self.living().find(|slots| slots.ran()).map(|slots| slots.device) } else { None }
    }

    /// Clears the marks of layers that ran.
    pub(crate) fn forget_ran(&mut self) {
        self.ran = false;
        self.living().for_each(|slots| slots.clear_ran());
    }

    /// Buckets of the slots that take part, by recipe, group and device, ordered by their first slots.
    pub(crate) fn buckets(&mut self, recipes: &[Recipe]) -> &[Arc<Bucket>] {
        if self.changes.any.swap(false, Ordering::Relaxed) {
            self.make_buckets(recipes);
        }
        &self.buckets
    }

    #[cold]
    fn make_buckets(&mut self, recipes: &[Recipe]) {
        let mut buckets: Vec<Bucket> = Vec::new();
        for known in &self.participants {
            let Some(recipe) = recipes.get(known.recipe_id as usize - 1) else { continue };
            let at = buckets.iter().position(|bucket| bucket.key() == known.key()).unwrap_or_else(|| {
                let former = self.buckets.iter().find(|bucket| bucket.key() == known.key());
                let reductions = former.map_or(0, |former| former.reductions.load(Ordering::Relaxed));
                buckets.push(Bucket {
                    recipe_id: known.recipe_id,
                    recipe: *recipe,
                    group: known.group,
                    device: known.device,
                    members: Vec::new(),
                    tensors: 0,
                    agreed: AtomicBool::new(false),
                    reductions: AtomicU64::new(reductions),
                });
                buckets.len() - 1
            });
            let (bucket, slots, part) = (&mut buckets[at], Weak::clone(&known.slots), Arc::clone(&known.part));
            bucket.members.push(Member { slots, part, first: bucket.tensors, count: known.count });
            bucket.tensors += known.count;
        }
        let counts = |bucket: &Bucket| bucket.members.iter().map(|member| member.count).collect::<Vec<_>>();
        for bucket in &buckets {
            let alike = |former: &&Arc<Bucket>| former.key() == bucket.key() && counts(former) == counts(bucket);
            if self.buckets.iter().find(alike).is_some_and(|former| former.is_agreed()) {
                bucket.agree();
            }
        }
        self.buckets = buckets.into_iter().map(Arc::new).collect();
    }

    /// As `AutocastState::take_due`.
    pub(crate) fn take_due(
        &mut self,
        recipes: &[Recipe],
        device: Device,
        mut visit: impl FnMut(Arc<AmaxSlots>, &Recipe),
    ) {
        if !self.ran && !self.changes.any.load(Ordering::Relaxed) {
            return;
        }
        // Slots that are freed here may live on other ranks, which then reduce at every exit.
        let reduces = |known: &Participant| recipes.get(known.recipe_id as usize - 1).is_some_and(is_unconditional);
        let (mut unconditional, mut ran) = (self.participants.iter().any(reduces), false);
        self.slots.retain(|weak| {
            let Some(slots) = weak.upgrade() else { return false };
            let Some(recipe) = recipes.get(slots.recipe_id as usize - 1) else { return false };
            unconditional |= is_unconditional(recipe);
            if slots.device != device {
                ran |= slots.ran();
            } else if slots.ran.swap(false, Ordering::Relaxed) {
                visit(slots, recipe);
            }
            true
        });
        self.unconditional = unconditional;
        self.ran = ran;
    }
}

/// Refuses a history and scales that do not belong together.
pub(crate) fn check_slots(history: &TensorView<'_>, scale: &TensorView<'_>) -> Result<()> {
    const OP: &str = "amax_slots";
    for (what, tensor) in [("amax_history", history), ("scale", scale)] {
        if tensor.dtype() != DType::F32 {
            return Err(Error::dtype(OP, what, DType::F32, tensor.dtype()));
        }
        if !tensor.is_contiguous() {
            return Err(Error::layout(OP, what, "contiguous", format!("strides {:?}", tensor.strides())));
        }
    }
    let (&[history_len, count], &[scales]) = (history.shape(), scale.shape()) else {
        let got = format!("{:?} and {:?}", history.shape(), scale.shape());
        return Err(Error::shape(OP, "(amax_history, scale)", "(history_len, tensors) and (tensors)", got));
    };
    if history_len < 1 || history_len > i64::from(u32::MAX) || count < 1 || count > i64::from(u32::MAX) {
        return Err(Error::shape(
            OP,
            "amax_history",
            "of at least one row and column",
            format!("{:?}", history.shape()),
        ));
    }
    if scales != count {
        return Err(Error::shape(OP, "scale", format!("{count} elements"), scales));
    }
    if history.device() != scale.device() {
        return Err(Error::device(OP, "scale", history.device(), scale.device()));
    }
    Ok(())
}
