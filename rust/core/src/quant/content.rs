//! Tells whether two layouts of a quantised tensor hold the same values.
//!
//! Views, parameters and their `data` are different tensors on the same bytes, so they share one record of these bytes.
//! In the record a number stands for the values; layouts that were written together have the same number.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(1);

/// The content of one layout's bytes.
#[derive(Clone, Debug)]
pub struct Content(Arc<Facts>);

#[derive(Debug)]
struct Facts {
    values: AtomicU64,
    /// torch's versions of both layouts' bytes when they were last known to agree; none for inference tensors.
    versions: [AtomicU64; 2],
}

/// torch's versions of the bytes in row and column layout.
pub type Versions = [Option<u64>; 2];

const NO_VERSION: u64 = u64::MAX;

impl Default for Content {
    fn default() -> Self {
        Self::new()
    }
}

impl Content {
    /// Values that differ from all others.
    #[must_use]
    pub fn new() -> Self {
        let versions = [AtomicU64::new(NO_VERSION), AtomicU64::new(NO_VERSION)];
        Self(Arc::new(Facts { values: AtomicU64::new(next()), versions }))
    }

    /// Notes that other values were written.
    pub fn write(&self) {
        self.0.values.store(next(), Ordering::Relaxed);
    }

    /// Notes that the column layout with this content has the values of `row`.
    pub fn agree(&self, row: &Self, versions: Versions) {
        self.0.values.store(row.values(), Ordering::Relaxed);
        for (known, version) in self.0.versions.iter().zip(versions) {
            known.store(version.unwrap_or(NO_VERSION), Ordering::Relaxed);
        }
    }

    /// Whether the column layout with this content has the values of `row`. Versions show torch operations that write
    /// only one layout; code that writes both is trusted.
    #[must_use]
    pub fn agrees(&self, row: &Self, versions: Versions) -> bool {
        let [row_moved, col_moved] = [0, 1].map(|layout: usize| {
            let known = self.0.versions[layout].load(Ordering::Relaxed);
            versions[layout].is_some_and(|version| known != NO_VERSION && known != version)
        });
        self.values() == row.values() && (!row_moved || col_moved)
    }

    /// The number of its values.
    #[must_use]
    pub fn values(&self) -> u64 {
        self.0.values.load(Ordering::Relaxed)
    }
}

fn next() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSIONS: Versions = [Some(3), Some(5)];

    fn agreeing() -> (Content, Content) {
        let (row, col) = (Content::new(), Content::new());
        assert!(!col.agrees(&row, VERSIONS));
        col.agree(&row, VERSIONS);
        assert!(col.agrees(&row, VERSIONS));
        (row, col)
    }

    #[test]
    fn a_write_of_one_layout_is_seen_by_every_tensor_over_the_bytes() {
        let (row, col) = agreeing();
        let (other_row, other_col) = (row.clone(), col.clone());
        row.write();
        assert!(!other_col.agrees(&other_row, VERSIONS));
        other_col.agree(&other_row, VERSIONS);
        assert!(col.agrees(&row, VERSIONS));
    }

    #[test]
    fn versions_tell_of_the_operations_of_others() {
        let (row, col) = agreeing();
        assert!(!col.agrees(&row, [Some(4), Some(5)]));
        assert!(col.agrees(&row, [Some(4), Some(6)]));
        assert!(col.agrees(&row, [None, None]));
    }
}
