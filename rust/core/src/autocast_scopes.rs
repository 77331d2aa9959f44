//! Which thread is in which autocast region. Every thread has its own; one that has entered none sees another's, so
//! that threads which work for one inside of a region are inside of it, too.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::autocast::Region;

/// A number of this thread's own, never given twice.
#[must_use]
#[inline]
pub fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|&number| number)
}

/// What was in force where a region was entered, and which thread entered it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Former {
    /// The region that was in force.
    pub region: Region,
    /// [`thread_number`] of that thread.
    pub thread: u64,
}

/// The regions of one thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope {
    thread: u64,
    /// The innermost one.
    pub(crate) region: Region,
    /// Regions entered and not left, those that the thread began inside of with them.
    pub(crate) depth: u32,
    /// The thread began inside of so many regions of another, and ends with its last own one.
    borrowed: Option<u32>,
    /// Regions that were put in force without being entered, and not taken back: the thread needs its scope till then.
    pub(crate) held: u32,
}

impl Scope {
    const IDLE: Self = Self { thread: 0, region: Region::HIGH_PRECISION, depth: 0, borrowed: None, held: 0 };

    fn is_idle(&self) -> bool {
        self.depth == 0 && self.region.epoch == 0 && self.held == 0
    }

    /// Set without a region having been entered, or left.
    fn is_nobodys(&self) -> bool {
        self.thread == 0 || self.is_idle()
    }

    fn is_over(&self) -> bool {
        self.held == 0 && (self.is_idle() || self.borrowed.is_some_and(|begun| self.depth <= begun))
    }

    /// What to go back to.
    pub(crate) fn former(&self) -> Former {
        Former { region: self.region, thread: self.thread }
    }
}

/// The scopes of all threads that are in a region: one, as a rule, and then nobody asks which thread it is.
#[derive(Debug)]
pub(crate) struct Scopes {
    top: Scope,
    others: Vec<Scope>,
}

impl Default for Scopes {
    fn default() -> Self {
        Self { top: Scope::IDLE, others: Vec::new() }
    }
}

impl Scopes {
    /// The scope that this thread sees: its own, else the one that did not begin inside of another.
    #[inline]
    pub(crate) fn seen(&mut self) -> &mut Scope {
        if self.others.is_empty() { &mut self.top } else { self.seen_of_many() }
    }

    #[cold]
    fn seen_of_many(&mut self) -> &mut Scope {
        if self.find(thread_number()) || self.top.borrowed.is_none() {
            return &mut self.top;
        }
        let Self { top, others } = self;
        others.iter_mut().find(|scope| scope.borrowed.is_none()).unwrap_or(top)
    }

    /// Whether this thread has a scope of its own.
    pub(crate) fn has_own(&mut self) -> bool {
        self.find(thread_number()) && !self.top.is_idle()
    }

    /// This thread's own scope; a new one begins with what the thread sees.
    #[inline]
    pub(crate) fn own(&mut self) -> &mut Scope {
        self.of(thread_number())
    }

    /// The scope of the thread that entered a region, whichever thread leaves it.
    #[inline]
    pub(crate) fn entered(&mut self, former: &Former) -> &mut Scope {
        self.of(former.thread)
    }

    #[inline]
    fn of(&mut self, thread: u64) -> &mut Scope {
        if self.top.thread != thread && !self.find(thread) {
            if self.top.is_nobodys() {
                self.top.thread = thread;
            } else {
                let seen = *self.seen();
                let own = Scope { thread, borrowed: Some(seen.depth), held: 0, ..seen };
                self.others.push(std::mem::replace(&mut self.top, own));
            }
        }
        &mut self.top
    }

    /// Puts a thread's scope on top, if there is one.
    fn find(&mut self, thread: u64) -> bool {
        if self.top.thread == thread {
            return true;
        }
        let Some(at) = self.others.iter().position(|scope| scope.thread == thread) else { return false };
        std::mem::swap(&mut self.top, &mut self.others[at]);
        true
    }

    /// Drops scopes whose threads have left their last region.
    #[inline]
    pub(crate) fn end(&mut self) {
        if !self.others.is_empty() {
            self.others.retain(|scope| !scope.is_over());
        }
        if self.top.is_over() && (self.top.borrowed.is_some() || !self.others.is_empty()) {
            self.top = self.others.pop().unwrap_or(Scope::IDLE);
        }
        if let Some(depth) = self.top.borrowed
            && self.others.iter().all(|scope| scope.borrowed.is_some())
        {
            // Whose regions it began inside of has left them: its own are the outermost now.
            self.top.depth = self.top.depth.saturating_sub(depth);
            self.top.borrowed = Some(0);
        }
    }
}
