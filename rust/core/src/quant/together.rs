//! Chooses the weights that one launch quantises: all that the last step used, when a call needs the first of them
//! after an optimizer step.
//!
//! The binding provides the weights (`T`). The lists last for one step: a weight that a call has quantised joins the
//! next launch, and every launch begins a new list, so that unused weights drop out by themselves.

use crate::base::dtype::DType;
use crate::runtime::lane::Place;

/// Properties that all weights of one launch share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Device, and the stream whose order they follow.
    pub place: Place,
    /// Epoch of the region, hence the recipe.
    pub epoch: u64,
    /// Type of the weights.
    pub dtype: DType,
    /// Whether their calls need gradients.
    pub training: bool,
}

impl Kind {
    /// Whether two kinds differ at most in gradients.
    fn is_beside(&self, other: &Self) -> bool {
        Self { training: other.training, ..*self } == *other
    }
}

#[derive(Debug)]
struct Group<T> {
    kind: Kind,
    /// Weights of the next launch.
    members: Vec<T>,
    /// Weights of the last launch that calls may still use.
    pending: Vec<T>,
    /// Number of launches so far; a weight notes this number when it joins.
    round: u64,
    /// Optimizer steps at the last launch.
    steps: u64,
    /// Whether there was too little memory for all weights at once.
    refused: bool,
}

/// The weights of all kinds.
#[derive(Debug)]
pub struct Together<T>(Vec<Group<T>>);

impl<T> Default for Together<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Together<T> {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a weight that a call has quantised to the next launch: `join` gets the number of the launch, and returns
    /// whether the weight is new to it.
    pub fn join(&mut self, kind: Kind, join: impl FnOnce(u64) -> Option<T>) {
        let index = self.0.iter().position(|group| group.kind == kind).unwrap_or_else(|| {
            let (members, pending) = (Vec::new(), Vec::new());
            self.0.push(Group { kind, members, pending, round: 1, steps: 0, refused: false });
            self.0.len() - 1
        });
        let group = &mut self.0[index];
        if !group.refused {
            group.members.extend(join(group.round));
        }
    }

    /// Whether a call for a weight of `kind` is the first after an optimizer step. Only calls with gradients, or only
    /// calls without, begin a launch, since a checkpoint's recomputation in backward must find little memory in use.
    #[must_use]
    #[inline]
    pub fn is_due(&self, kind: &Kind, steps: u64) -> bool {
        let mut same = self.0.iter().filter(|group| group.kind.is_beside(kind));
        steps != 0
            && self.0.iter().any(|group| group.kind == *kind && group.members.len() > 1)
            && same.all(|group| group.steps != steps)
    }

    /// Begins a launch; returns its members, and the unused members of the last one.
    pub fn begin(&mut self, kind: &Kind, steps: u64) -> (Vec<T>, Vec<T>) {
        let Some(group) = self.0.iter_mut().find(|group| group.kind == *kind) else { return Default::default() };
        group.round += 1;
        group.steps = steps;
        (std::mem::take(&mut group.members), std::mem::take(&mut group.pending))
    }

    /// Notes the weights that were launched.
    pub fn launched(&mut self, kind: &Kind, weights: Vec<T>) {
        if let Some(group) = self.0.iter_mut().find(|group| group.kind == *kind) {
            group.pending = weights;
        }
    }

    /// Notes that there is too little memory for all weights at once; no weights of `kind` take part any more.
    pub fn refuse(&mut self, kind: &Kind) {
        if let Some(group) = self.0.iter_mut().find(|group| group.kind == *kind) {
            group.refused = true;
        }
    }

    /// Members of past launches that no call will use any more.
    pub fn take_pending(&mut self) -> Vec<T> {
        self.0.iter_mut().flat_map(|group| std::mem::take(&mut group.pending)).collect()
    }

    /// Whether there are such.
    #[must_use]
    #[inline]
    pub fn has_pending(&self) -> bool {
        self.0.iter().any(|group| !group.pending.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::Device;
    use crate::cuda::device::Stream;

    fn kind(training: bool) -> Kind {
        let place = Place { device: Device::Cpu, stream: Stream::DEFAULT };
        Kind { place, epoch: 1, dtype: DType::Bf16, training }
    }

    fn with(members: &[u32]) -> Together<u32> {
        let mut together = Together::default();
        for &member in members {
            together.join(kind(true), |_| Some(member));
        }
        together
    }

    #[test]
    fn a_launch_is_due_once_after_each_optimizer_step() {
        let mut together = with(&[1, 2]);
        assert!(!together.is_due(&kind(true), 0));
        assert!(together.is_due(&kind(true), 1));
        assert_eq!(together.begin(&kind(true), 1), (vec![1, 2], vec![]));
        together.launched(&kind(true), vec![1, 2]);
        for member in [3, 4] {
            together.join(kind(true), |round| (round == 2).then_some(member));
        }
        assert!(!together.is_due(&kind(true), 1));
        assert!(together.has_pending());
        assert_eq!(together.begin(&kind(true), 2), (vec![3, 4], vec![1, 2]));
        assert!(!together.has_pending());
    }

    #[test]
    fn what_is_repeated_with_gradients_in_backward_has_no_launch_of_its_own() {
        let mut together = with(&[1, 2]);
        for member in [1, 2] {
            together.join(kind(false), |_| Some(member));
        }
        let _ = together.begin(&kind(false), 5);
        assert!(!together.is_due(&kind(true), 5));
        assert!(together.is_due(&kind(true), 6));
    }

    #[test]
    fn one_weight_or_a_refused_kind_is_no_launch() {
        let mut together = with(&[1]);
        assert!(!together.is_due(&kind(true), 1));
        together.refuse(&kind(true));
        together.join(kind(true), |_| Some(2));
        assert!(!together.is_due(&kind(true), 1));
    }
}
