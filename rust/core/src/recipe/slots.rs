//! The buffers of delayed scaling: those of a layer in one direction, and the registry of all of one direction, with
//! those among them whose maxima ranks reduce together.

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

/// The delayed-scaling buffers of one layer in one direction. The layer owns it; when the last owner drops it, the
/// registry forgets it.
pub struct AmaxSlots {
    id: u64,
    direction: Direction,
    recipe_id: u32,
    group: u64,
    device: Device,
    history_len: u32,
    count: u32,
    /// Shared with the slots that take these ones' place.
    ran: Arc<AtomicBool>,
    /// Others have taken their place; calls that began before may still hold these.
    retired: AtomicBool,
    /// Place in the order of first forwards, from 1, while they take part in updates without having run; 0 else.
    place: AtomicU64,
    /// The registry's: something has changed in who takes part.
    stale: Arc<AtomicBool>,
    memory: Box<dyn SlotMemory>,
}

impl fmt::Debug for AmaxSlots {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "AmaxSlots({:?}, {} x {} on {})", self.direction, self.history_len, self.count, self.device)
    }
}

impl AmaxSlots {
    /// Number that names these slots for the length of the process; ascending in the order of registration.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Pass whose scales these are.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Where the buffers live.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The history, f32 `(history_len, count)`; row 0 is live: kernels take the maximum into it.
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

    /// Whether others have taken their place: the layer has to ask for those.
    #[must_use]
    #[inline]
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// Forgets that the layer ran: its caller has updated the scales itself.
    pub fn clear_ran(&self) {
        self.ran.store(false, Ordering::Relaxed);
    }

    /// Takes no part in updates from now on, unless the layer runs: whoever had the tensors is gone.
    pub fn withdraw(&self) {
        self.place.store(0, Ordering::Relaxed);
        self.stale.store(true, Ordering::Relaxed);
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

    fn place(&self) -> u64 {
        if self.is_retired() { 0 } else { self.place.load(Ordering::Relaxed) }
    }
}

impl Drop for AmaxSlots {
    fn drop(&mut self) {
        self.stale.store(true, Ordering::Relaxed);
    }
}

/// What a region's end leaves to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Due {
    /// Nothing.
    Nothing = 0,
    /// No layer ran, but a bucket is updated at every exit: with the user's algorithms, or in step with other ranks.
    Unconditional = 1,
    /// Layers ran.
    Ran = 2,
}

/// Slots of one recipe, group and device that take part in updates whether their layers ran or not: ranks reduce their
/// maxima together, whose order is that of the layers' first forwards. It is the same on every rank that runs the same
/// model, whatever copies and loaded checkpoints one of them has besides.
#[derive(Debug)]
pub struct Bucket {
    recipe_id: u32,
    /// The recipe.
    pub recipe: Recipe,
    /// Process group of the reduction.
    pub group: u64,
    /// Where the buffers live.
    pub device: Device,
    /// With the number of the first tensor, and how many there are.
    members: Vec<(Weak<AmaxSlots>, u32, u32)>,
    tensors: u32,
}

impl Bucket {
    /// Tensors of all slots.
    #[must_use]
    pub fn tensors(&self) -> u32 {
        self.tensors
    }

    /// The slots in their order, each with the number of its first tensor and of all of them; none in the place of those
    /// that are gone by now.
    #[must_use]
    pub fn members(&self) -> impl ExactSizeIterator<Item = (Option<Arc<AmaxSlots>>, u32, u32)> {
        let living = |slots: &Weak<AmaxSlots>| slots.upgrade().filter(|slots| !slots.is_retired());
        self.members.iter().map(move |(slots, first, count)| (living(slots), *first, *count))
    }
}

/// What new slots are, but for their memory: what `AutocastState::plan_slots` has found right.
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

/// Registered slots of one direction.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    slots: Vec<Weak<AmaxSlots>>,
    ran: bool,
    /// Some bucket wants an update at every exit.
    unconditional: bool,
    buckets: Vec<Arc<Bucket>>,
    /// The buckets are to be made anew: slots took up or left their place, or died.
    stale: Arc<AtomicBool>,
}

const fn is_unconditional(recipe: &Recipe) -> bool {
    recipe.delayed.reduce_amax || recipe.delayed.custom != 0
}

impl Registry {
    /// Registers slots; they take the place of `former`.
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
            place: AtomicU64::new(former.map_or(0, AmaxSlots::place)),
            stale: Arc::clone(&self.stale),
            memory,
        });
        if let Some(former) = former {
            former.retired.store(true, Ordering::Relaxed);
        }
        self.stale.store(true, Ordering::Relaxed);
        self.unconditional |= is_unconditional;
        self.slots.retain(|slots| slots.upgrade().is_some_and(|slots| !slots.is_retired()));
        self.slots.push(Arc::downgrade(&slots));
        slots
    }

    /// Gives slots a place, if they have none; `next` is the next free one.
    pub(crate) fn take_part(&self, slots: &AmaxSlots, next: &mut u64) {
        if slots.place.load(Ordering::Relaxed) == 0 {
            slots.place.store(*next, Ordering::Relaxed);
            *next += 1;
            self.stale.store(true, Ordering::Relaxed);
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

    /// Those that take part in updates, in the order of their places.
    pub(crate) fn participants(&self) -> Vec<Arc<AmaxSlots>> {
        let mut all: Vec<_> = self.living().filter(|slots| slots.place() != 0).collect();
        all.sort_by_key(|slots| slots.place());
        all
    }

    /// A device with slots whose layers ran.
    pub(crate) fn due_device(&self) -> Option<Device> {
        if self.ran { self.living().find(|slots| slots.ran()).map(|slots| slots.device) } else { None }
    }

    /// Forgets that layers ran.
    pub(crate) fn forget_ran(&mut self) {
        self.ran = false;
        self.living().for_each(|slots| slots.clear_ran());
    }

    /// What takes part, by recipe, group and device, each at the place of its first slots.
    pub(crate) fn buckets(&mut self, recipes: &[Recipe]) -> &[Arc<Bucket>] {
        if self.stale.swap(false, Ordering::Relaxed) {
            self.make_buckets(recipes);
        }
        &self.buckets
    }

    #[cold]
    fn make_buckets(&mut self, recipes: &[Recipe]) {
        let mut buckets: Vec<Bucket> = Vec::new();
        for slots in self.participants() {
            let Some(recipe) = recipes.get(slots.recipe_id as usize - 1) else { continue };
            let (recipe_id, group, device) = (slots.recipe_id, slots.group, slots.device);
            let known = |bucket: &Bucket| (bucket.recipe_id, bucket.group, bucket.device) == (recipe_id, group, device);
            let at = buckets.iter().position(known).unwrap_or_else(|| {
                let empty = Bucket { recipe_id, recipe: *recipe, group, device, members: Vec::new(), tensors: 0 };
                buckets.push(empty);
                buckets.len() - 1
            });
            let bucket = &mut buckets[at];
            bucket.members.push((Arc::downgrade(&slots), bucket.tensors, slots.count));
            bucket.tensors += slots.count;
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
        if !self.ran && !self.stale.load(Ordering::Relaxed) {
            return;
        }
        let (mut unconditional, mut ran) = (false, false);
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
