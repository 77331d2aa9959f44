//! Host kernel of `cuda/moe/permute.cu`, and the reader of row maps for host kernels (`cuda/moe/routing.cuh`).

use te_fast_kernels::KernelId;

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::host::permute_map;
use crate::ops::permute::PermuteParams;
use crate::ops::row_map::RowMapParams;

/// A slot of a token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// Row of the permuted tensor; none if it was dropped.
    pub(crate) row: Option<usize>,
    /// Index among the token's probabilities.
    pub(crate) column: usize,
}

/// A row map on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostMap<'a> {
    map: &'a [i32],
    pad_offsets: &'a [i64],
    ends: &'a [i32],
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    experts: usize,
    top_k: usize,
    partials: usize,
}

impl<'a> HostMap<'a> {
    pub(crate) fn new(p: &RowMapParams<'a>) -> Self {
        let (tokens, experts, top_k) = (p.tokens as usize, p.experts as usize, p.top_k as usize);
        let entries = if experts == 0 { tokens * top_k } else { tokens * (2 * experts + 1) };
        let partials = if p.zero_blocks == 0 { 0 } else { p.partials as usize };
        Self {
            map: p.map.slice(entries),
            pad_offsets: p.pad_offsets.slice(experts),
            ends: p.ends.slice(partials * experts.max(1)),
            tokens,
            rows: p.rows as usize,
            experts,
            top_k,
            partials,
        }
    }

    /// Columns of the probabilities.
    pub(crate) fn slots(&self) -> usize {
        if self.experts == 0 { self.top_k } else { self.experts }
    }

    fn inside(&self, row: i64) -> Option<usize> {
        usize::try_from(row).ok().filter(|&row| row < self.rows)
    }

    /// The slots of a token, in the order of the map.
    pub(crate) fn token(&self, token: usize) -> impl Iterator<Item = Slot> + '_ {
        let width = 2 * self.experts + 1;
        let count = if self.experts == 0 {
            self.top_k
        } else {
            self.map[token * width + 2 * self.experts].clamp(0, self.experts as i32) as usize
        };
        (0..count).map(move |k| {
            if self.experts == 0 {
                return Slot { row: self.inside(i64::from(self.map[k * self.tokens + token])), column: k };
            }
            let entry = &self.map[token * width..];
            let (row, expert) = (i64::from(entry[k]), usize::try_from(entry[self.experts + k]).unwrap_or(usize::MAX));
            if row < 0 || expert >= self.experts {
                return Slot { row: None, column: 0 };
            }
            Slot { row: self.inside(row + self.pad_offsets.get(expert).copied().unwrap_or(0)), column: expert }
        })
    }

    /// Rows that no token fills, ascending.
    pub(crate) fn gaps(&self) -> impl Iterator<Item = usize> + '_ {
        let groups = self.experts.max(1);
        let mut ends = vec![0_i32; groups];
        for part in self.ends.chunks(groups).take(self.partials) {
            ends.iter_mut().zip(part).for_each(|(end, &other)| *end = (*end).max(other));
        }
        for group in 1..groups {
            ends[group] = ends[group].max(ends[group - 1]);
        }
        let mut group = if self.pad_offsets.is_empty() { groups - 1 } else { 0 };
        (0..self.rows)
            .map(move |p| {
                while group + 1 < groups && self.pad_offsets[group + 1] <= p as i64 {
                    group += 1;
                }
                ends[group] as usize + p
            })
            .take_while(|&row| row < self.rows)
    }
}

/// Bytes of a probability of type `code`.
pub(crate) const fn prob_bytes(code: u32) -> usize {
    match code {
        0 => 4,
        3 => 8,
        _ => 2,
    }
}

/// Probability `i` as f32.
pub(crate) fn load_prob(probs: DevPtr<'_>, i: usize, code: u32) -> f32 {
    let at = probs.offset(i * prob_bytes(code));
    match code {
        0 => at.slice::<f32>(1)[0],
        1 => at.slice::<half::f16>(1)[0].to_f32(),
        2 => at.slice::<half::bf16>(1)[0].to_f32(),
        _ => at.slice::<f64>(1)[0] as f32,
    }
}

/// Whether probability `i` is exactly 0. A small f64 may be nonzero although its f32 is 0.
pub(crate) fn is_zero_prob(probs: DevPtr<'_>, i: usize, code: u32) -> bool {
    if code == 3 { probs.offset(i * 8).slice::<f64>(1)[0] == 0.0 } else { load_prob(probs, i, code) == 0.0 }
}

/// Writes probability `i`, rounded to its type.
pub(crate) fn store_prob(probs: DevPtr<'_>, i: usize, code: u32, value: f32) {
    let at = probs.offset(i * prob_bytes(code));
    match code {
        0 => at.slice_mut::<f32>(1)[0] = value,
        1 => at.slice_mut::<half::f16>(1)[0] = half::f16::from_f32(value),
        2 => at.slice_mut::<half::bf16>(1)[0] = half::bf16::from_f32(value),
        _ => at.slice_mut::<f64>(1)[0] = f64::from(value),
    }
}

/// Copies the bits of a probability.
pub(crate) fn copy_prob(from: DevPtr<'_>, i: usize, to: DevPtr<'_>, j: usize, code: u32) {
    let bytes = prob_bytes(code);
    to.offset(j * bytes).slice_mut::<u8>(bytes).copy_from_slice(from.offset(i * bytes).slice::<u8>(bytes));
}

/// Runs `permute_fwd`.
///
/// # Errors
/// An unknown type of routing map.
pub(crate) fn run(p: &PermuteParams<'_>, id: KernelId) -> Result<()> {
    permute_map::run(&p.making, id)?;
    let map = HostMap::new(&p.map);
    let bytes = p.row_bytes as usize;
    let (x, out) = (p.x.slice::<u8>(map.tokens * bytes), p.out.slice_mut::<u8>(map.rows * bytes));
    let numbers = p.numbers.slice_mut::<i32>(map.rows);
    for row in map.gaps() {
        out[row * bytes..][..bytes].fill(0);
        if let Some(number) = numbers.get_mut(row) {
            *number = 0;
        }
        if !p.out_probs.is_null() {
            store_prob(p.out_probs, row, p.prob_type, 0.0);
        }
    }
    for token in 0..map.tokens {
        for Slot { row, column } in map.token(token) {
            let Some(row) = row else { continue };
            let from = token * map.slots() + column;
            let mut zero = false;
            if !p.probs.is_null() {
                copy_prob(p.probs, from, p.out_probs, row, p.prob_type);
                zero = is_zero_prob(p.probs, from, p.prob_type);
            }
            let number = token as i32 + 1;
            if let Some(beside) = numbers.get_mut(row) {
                *beside = number;
            }
            let to = &mut out[row * bytes..][..bytes];
            if p.x.is_null() {
                to.copy_from_slice(&if zero { -number } else { number }.to_ne_bytes());
                continue;
            }
            if zero { to.fill(0) } else { to.copy_from_slice(&x[token * bytes..][..bytes]) }
        }
    }
    if p.making.blocks != 0 {
        strike_dropped(&p.map);
    }
    Ok(())
}

/// Removes the slots without a row from a mask map that was made for these rows: the first ones of each token.
pub(crate) fn strike_dropped(p: &RowMapParams<'_>) {
    let experts = p.experts as usize;
    if experts == 0 {
        return;
    }
    let pads = p.pad_offsets.slice::<i64>(experts);
    let width = 2 * experts + 1;
    for entry in p.map.slice_mut::<i32>(p.tokens as usize * width).chunks_mut(width) {
        let count = entry[2 * experts] as usize;
        let fits = |&k: &usize| {
            let pad = pads.get(entry[experts + k] as usize).copied().unwrap_or(0);
            i64::from(entry[k]) + pad < p.rows as i64
        };
        let dropped = (0..count).take_while(|k| !fits(k)).count();
        entry.copy_within(dropped..count, 0);
        entry.copy_within(experts + dropped..experts + count, experts);
        entry[2 * experts] = (count - dropped) as i32;
    }
}
