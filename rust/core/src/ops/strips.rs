//! The walk of activation kernels over a tensor: columns of tiles, cut into strips, one block per strip.
//! The mirror of `StripPlan` in `cuda/tile/strip.cuh`.

use te_fast_kernels::constants::tile::STRIP_LEVELS;

/// Strips of a tensor, from the top of each column of tiles: `count[k]` strips of `tiles[k]` tiles, level by level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct StripPlan {
    /// Tiles along the rows.
    pub tiles_rows: u32,
    /// Tiles along the columns.
    pub tiles_cols: u32,
    /// Strips of one column of tiles.
    pub strips: u32,
    /// Strips of each level.
    pub count: [u32; STRIP_LEVELS],
    /// Their tiles; the last strip may have fewer.
    pub tiles: [u32; STRIP_LEVELS],
}

/// From this length on it pays to cut strips into long and short ones. Shorter strips leave so few tiles for the short
/// ones that the fixed cost of a strip outweighs the gain.
const LONG: u32 = 6;
/// Largest number of strips of a column to consider; only very tall tensors, which have many waves anyway, would need
/// more.
const MOST: u32 = 256;
/// Tiles of the longest strip: its rows fit 31 bits.
const LONGEST: u32 = 1 << 23;

impl StripPlan {
    /// Every tile by itself.
    pub(crate) const fn single_tiles(tiles_rows: u32, tiles_cols: u32) -> Self {
        Self { tiles_rows, tiles_cols, strips: tiles_rows, count: [tiles_rows, 0, 0], tiles: [1, 0, 0] }
    }

    /// The number of equal strips of a column with the shortest time; the smallest such number.
    fn quickest(tiles_rows: u32, tiles_cols: u32, resident: u32) -> u32 {
        let mut best = (u64::MAX, 1);
        for count in tiles_rows.div_ceil(LONGEST).max(1)..=tiles_rows.clamp(1, MOST) {
            // Full waves without a remainder are a lower bound for this number of strips, or more.
            let least = u64::from(tiles_cols) * (2 * u64::from(tiles_rows) + u64::from(count));
            if least >= best.0.saturating_mul(u64::from(resident)) {
                break;
            }
            let time = time(tiles_rows, tiles_cols, resident, count);
            if time < best.0 {
                best = (time, count);
            }
        }
        best.1
    }

    /// Strips for `resident` blocks that run at once. Strips are equal, with the shortest waves. If they are long, the
    /// lower quarter becomes short strips, which go to the first free multiprocessor.
    pub(crate) fn balanced(tiles_rows: u32, tiles_cols: u32, resident: u32) -> Self {
        let count = Self::quickest(tiles_rows, tiles_cols, resident.max(1));
        let equal = tiles_rows.div_ceil(count);
        if equal < LONG {
            let strips = tiles_rows.div_ceil(equal.max(1));
            return Self { tiles_rows, tiles_cols, strips, count: [strips, 0, 0], tiles: [equal, 0, 0] };
        }
        let long = equal * 3 / 4;
        let left = tiles_rows.saturating_sub(count * long);
        let medium = long / 4;
        let medium_count = left / 2 / medium.max(1);
        let short_count = left - medium_count * medium;
        Self {
            tiles_rows,
            tiles_cols,
            strips: count + medium_count + short_count,
            count: [count, medium_count, short_count],
            tiles: [long, medium, 1],
        }
    }
}

/// Time of `count` equal strips of a column, in half tiles; a strip has a fixed cost of half a tile.
const fn time(tiles_rows: u32, tiles_cols: u32, resident: u32, count: u32) -> u64 {
    let blocks = tiles_cols as u64 * count as u64;
    blocks.div_ceil(resident as u64) * (2 * tiles_rows.div_ceil(count) as u64 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_count_of_equal_strips_is_quicker() {
        for tiles_rows in (1..200).chain([256, 1000, 4096, 1 << 20]) {
            for tiles_cols in [1, 7, 64, 300, 5000] {
                for resident in [1, 264, 396, 528] {
                    let time = |count: &u32| time(tiles_rows, tiles_cols, resident, *count);
                    let quickest = (1..=tiles_rows.min(MOST)).min_by_key(time);
                    assert_eq!(Some(StripPlan::quickest(tiles_rows, tiles_cols, resident)), quickest);
                }
            }
        }
    }

    #[test]
    fn strips_cover_every_tile_once() {
        for tiles_rows in (1..200).chain([1000, 4096, 1 << 20]) {
            for tiles_cols in [1, 7, 64, 300, 5000] {
                for resident in [1, 264, 396, 528] {
                    let plan = StripPlan::balanced(tiles_rows, tiles_cols, resident);
                    let levels = || plan.count.iter().zip(&plan.tiles);
                    assert_eq!(plan.count.iter().sum::<u32>(), plan.strips, "{plan:?}");
                    let covered: u32 = levels().map(|(count, tiles)| count * tiles).sum();
                    let last = levels().filter(|(count, _)| **count != 0).map(|(_, tiles)| *tiles).next_back();
                    assert!(covered >= tiles_rows && covered - tiles_rows < last.unwrap_or(0), "{plan:?}");
                }
            }
        }
    }

    #[test]
    fn strips_fit_the_machine() {
        let levels = |plan: StripPlan| (plan.count, plan.tiles);
        // Measured on an H200 (cuda/notes-activation.md).
        assert_eq!(levels(StripPlan::balanced(64, 64, 396)), ([6, 4, 8], [8, 2, 1]));
        assert_eq!(levels(StripPlan::balanced(32, 32, 264)), ([8, 0, 0], [4, 0, 0]));
        assert_eq!(levels(StripPlan::balanced(2, 8, 396)), ([2, 0, 0], [1, 0, 0]));
        assert_eq!(StripPlan::single_tiles(5, 3).strips, 5);
    }
}
