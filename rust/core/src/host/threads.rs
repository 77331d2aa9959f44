//! The threads of host kernels: rayon's, of the process that ran the first kernel.
//!
//! A forked process has no other thread than the one that forked it, and a kernel would wait for rayon's for ever. There,
//! each thread runs its kernels alone.

use std::cell::Cell;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use rayon::ThreadPoolBuilder;

/// The process that has rayon's threads; 0 before the first kernel.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static IS_ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Lets this thread run host kernels.
pub(crate) fn prepare() {
    let process = process::id();
    let owner = OWNER.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed);
    if owner.is_ok() || owner == Err(process) || IS_ALONE.replace(true) {
        return;
    }
    // A thread belongs to one pool, which it cannot leave: if rayon refuses, it is in one already.
    if let Ok(pool) = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build() {
        std::mem::forget(pool);
    }
}
