//! The places of the groups among a tensor's rows, from the counts on the device.

use crate::base::pointer::DevPtr;
use te_fast_kernels::constants::tile::TILE;

/// The rows of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupRows {
    /// The first row.
    pub(crate) first: usize,
    /// Number of rows.
    pub(crate) rows: usize,
    /// The first row if each group begins at a multiple of 128.
    pub(crate) padded: usize,
}

/// The groups that `splits` counts within `capacity` rows. Negative counts are zero. Counts beyond the rows are cut
/// off, as in the kernels, which must not read past the end.
pub(crate) fn counted(splits: DevPtr<'_>, groups: usize, capacity: usize) -> Vec<GroupRows> {
    let (mut first, mut padded) = (0, 0);
    let one = |&count: &i64| {
        let rows = (count.max(0) as usize).min(capacity - first);
        let group = GroupRows { first, rows, padded };
        first += rows;
        padded += rows.next_multiple_of(TILE);
        group
    };
    splits.slice::<i64>(groups).iter().map(one).collect()
}

/// Groups of `rows` rows each.
pub(crate) fn equal(groups: usize, rows: usize) -> Vec<GroupRows> {
    (0..groups).map(|group| GroupRows { first: group * rows, rows, padded: 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_clamped_to_the_rows() {
        let mut splits = [3_i64, -5, 0, 200, 9];
        let groups = counted(DevPtr::from_slice(&mut splits), 5, 130);
        let found: Vec<_> = groups.iter().map(|group| (group.first, group.rows, group.padded)).collect();
        assert_eq!(found, [(0, 3, 0), (3, 0, 128), (3, 0, 128), (3, 127, 128), (130, 0, 256)]);
    }
}
