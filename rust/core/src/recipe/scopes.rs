//! The autocast regions of threads. Every thread has its own regions. A thread that has entered none uses another
//! thread's, so that worker threads share the region of the thread that they work for.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::recipe::region::{Former, Given, Region};

/// A unique number of this thread.
#[must_use]
#[inline]
pub fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|&number| number)
}

/// The regions of one thread.
#[derive(Clone)]
pub(crate) struct Scope {
    thread: u64,
    /// The innermost one.
    pub(crate) region: Region,
    /// The caller's data.
    pub(crate) given: Option<Given>,
    /// Number of regions that were entered and not left, including those of the other thread in which this thread
    /// began.
    pub(crate) depth: u32,
    /// Number of regions of another thread in which this thread began; the scope ends with the thread's last own
    /// region.
    borrowed: Option<u32>,
    /// Number of regions that were put in force without an entry, and not restored; the thread needs its scope until
    /// then.
    pub(crate) held: u32,
}

impl fmt::Debug for Scope {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { thread, region, depth, borrowed, held, .. } = self;
        write!(formatter, "Scope(thread {thread}, {region:?}, depth {depth}, borrowed {borrowed:?}, held {held})")
    }
}

impl Scope {
    const IDLE: Self =
        Self { thread: 0, region: Region::HIGH_PRECISION, given: None, depth: 0, borrowed: None, held: 0 };

    fn is_idle(&self) -> bool {
        self.depth == 0 && self.region.epoch == 0 && self.held == 0
    }

    /// Whether the region was changed without an entry or exit.
    fn is_nobodys(&self) -> bool {
        self.thread == 0 || self.is_idle()
    }

    fn is_over(&self) -> bool {
        self.held == 0 && (self.is_idle() || self.borrowed.is_some_and(|begun| self.depth <= begun))
    }

    /// The region to restore.
    pub(crate) fn former(&self) -> Former {
        Former { region: self.region, given: self.given.clone(), thread: self.thread }
    }
}

/// The scopes of all threads that are in a region. Usually there is one, and the thread need not be looked up.
#[derive(Debug)]
pub(crate) struct Scopes {
    top: Scope,
    others: Vec<Scope>,
    released: Released,
}

/// Callers' data of finished scopes.
#[derive(Default)]
pub(crate) struct Released(Vec<Given>);

impl fmt::Debug for Released {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Released({})", self.0.len())
    }
}

impl Default for Scopes {
    fn default() -> Self {
        Self { top: Scope::IDLE, others: Vec::new(), released: Released::default() }
    }
}

impl Scopes {
    /// The scope that this thread uses: its own, else the scope that did not begin inside of another one.
    #[inline]
    pub(crate) fn seen(&mut self) -> &mut Scope {
        if self.others.is_empty() { &mut self.top } else { self.seen_of_many() }
    }

    #[cold]
    fn seen_of_many(&mut self) -> &mut Scope {
        if self.find(thread_number()) || self.top.borrowed.is_none() {
            return &mut self.top;
        }
        let Self { top, others, .. } = self;
        others.iter_mut().find(|scope| scope.borrowed.is_none()).unwrap_or(top)
    }

    /// Whether this thread has a scope of its own.
    pub(crate) fn has_own(&mut self) -> bool {
        self.find(thread_number()) && !self.top.is_idle()
    }

    /// This thread's own scope; a new scope begins with the region that the thread uses.
    #[inline]
    pub(crate) fn own(&mut self) -> &mut Scope {
        self.of(thread_number())
    }

    /// Puts another region in force for this thread; returns the former one.
    pub(crate) fn replace(&mut self, region: Region, given: Option<Given>) -> Former {
        let scope = self.own();
        let former = scope.former(); // which has what was given, so that nothing is dropped here
        scope.region = region;
        scope.given = given;
        former
    }

    /// Restores the region that [`Scopes::replace`] replaced, for the thread of that call, even if another thread asks;
    /// returns its scope.
    pub(crate) fn restore(&mut self, former: &Former) -> &mut Scope {
        let scope = self.of(former.thread);
        scope.region = former.region;
        let given = std::mem::replace(&mut scope.given, former.given.clone());
        self.release(given);
        &mut self.top // where `of` leaves it
    }

    /// Keeps data for [`Scopes::pop_released`] that must not be dropped here.
    pub(crate) fn release(&mut self, given: Option<Given>) {
        self.released.0.extend(given);
    }

    /// The data of a finished scope.
    pub(crate) fn pop_released(&mut self) -> Option<Given> {
        self.released.0.pop()
    }

    /// Back to no scope at all.
    pub(crate) fn clear(&mut self) {
        let top = std::mem::replace(&mut self.top, Scope::IDLE);
        let given = std::iter::once(top).chain(self.others.drain(..)).filter_map(|scope| scope.given);
        self.released.0.extend(given);
    }

    #[inline]
    fn of(&mut self, thread: u64) -> &mut Scope {
        if self.top.thread != thread && !self.find(thread) {
            if self.top.is_nobodys() {
                self.top.thread = thread;
            } else {
                let seen = self.seen().clone();
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

    /// Ends scopes whose threads have left their last region.
    #[inline]
    pub(crate) fn end(&mut self) {
        let mut at = 0;
        while at < self.others.len() {
            if self.others[at].is_over() {
                let over = self.others.remove(at);
                self.release(over.given);
            } else {
                at += 1;
            }
        }
        if self.top.is_over() && (self.top.borrowed.is_some() || !self.others.is_empty()) {
            let next = self.others.pop().unwrap_or(Scope::IDLE);
            let over = std::mem::replace(&mut self.top, next);
            self.release(over.given);
        }
        if let Some(depth) = self.top.borrowed
            && self.others.iter().all(|scope| scope.borrowed.is_some())
        {
            // The thread whose regions it began in has left them, so its own regions are the outermost now.
            self.top.depth = self.top.depth.saturating_sub(depth);
            self.top.borrowed = Some(0);
        }
    }
}
