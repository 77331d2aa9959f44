//! Host kernels of `cuda/moe/permute_map.cu`.

use std::sync::atomic::{AtomicI64, Ordering};

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::moe::FILL_WORD;

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::ops::permute_map::{MakeMapParams, PermuteDroppedParams, PermuteEndsParams, Routing};

static DROPPED: AtomicI64 = AtomicI64::new(0);

/// Runs `permute_map`, and the map's part of other kernels.
///
/// # Errors
/// An unknown type of routing map.
pub(crate) fn run(p: &MakeMapParams<'_>, _: KernelId) -> Result<()> {
    const MASK8: u32 = Routing::Mask8 as u32;
    const MASK32: u32 = Routing::Mask32 as u32;
    const MASK64: u32 = Routing::Mask64 as u32;
    const INDEX: u32 = Routing::Index as u32;
    if p.blocks == 0 {
        return Ok(());
    }
    let units = p.tokens as usize;
    let mask = units * p.experts as usize;
    p.fill.slice_mut::<u8>(FILL_WORD * p.fill_words as usize).fill(0xff);
    match p.routing_type {
        MASK8 => mask_map(p, p.routing.slice::<u8>(mask), |&value| value != 0),
        MASK32 => mask_map(p, p.routing.slice::<i32>(mask), |&value| value != 0),
        MASK64 => mask_map(p, p.routing.slice::<i64>(mask), |&value| value != 0),
        INDEX => index_map(p, p.routing.slice::<i32>(units)),
        other => return Err(Error::state("permute_map", format_args!("no routing map is of type {other}"))),
    }
    Ok(())
}

/// First row of every expert, after the permutation's outputs were written.
fn describe(p: &MakeMapParams<'_>, counts: &[usize]) -> Vec<usize> {
    let experts = counts.len();
    let (align, capacity) = (p.align as usize, usize::try_from(p.capacity).unwrap_or(usize::MAX));
    let ends = p.ends.slice_mut::<i32>(experts);
    let pad_offsets = p.pad_offsets.slice_mut::<i64>(experts);
    let padded_counts = p.padded_counts.slice_mut::<i64>(experts);
    let (mut start, mut padded_start, mut dropped) = (0, 0, 0);
    let mut starts = Vec::with_capacity(experts);
    for (expert, &count) in counts.iter().enumerate() {
        let padded = count.next_multiple_of(align);
        starts.push(start);
        if let Some(offset) = pad_offsets.get_mut(expert) {
            *offset = (padded_start - start) as i64;
        }
        if let Some(slot) = padded_counts.get_mut(expert) {
            *slot = padded as i64;
        }
        dropped += (padded_start + count).saturating_sub(capacity).min(count);
        start += count;
        padded_start += padded;
        ends[expert] = start as i32;
    }
    DROPPED.fetch_add(dropped as i64, Ordering::Relaxed);
    if let [padded, routed] = p.totals.slice_mut::<i64>(2) {
        (*padded, *routed) = (padded_start as i64, start as i64);
    }
    starts
}

fn mask_map<T>(p: &MakeMapParams<'_>, routing: &[T], routed: impl Fn(&T) -> bool) {
    let experts = p.experts as usize;
    let mut counts = vec![0; experts];
    for (i, value) in routing.iter().enumerate() {
        counts[i % experts] += usize::from(routed(value));
    }
    let mut next = describe(p, &counts);
    let width = 2 * experts + 1;
    let map = p.row_id_map.slice_mut::<i32>(p.tokens as usize * width);
    for (entry, token) in map.chunks_mut(width).zip(routing.chunks(experts)) {
        let mut at = 0;
        for expert in (0..experts).rev().filter(|&expert| routed(&token[expert])) {
            entry[at] = next[expert] as i32;
            entry[experts + at] = expert as i32;
            next[expert] += 1;
            at += 1;
        }
        entry[2 * experts] = at as i32;
    }
}

fn index_map(p: &MakeMapParams<'_>, routing: &[i32]) {
    let (experts, top_k) = (p.experts as usize, p.top_k as usize);
    let expert = |id: i32| usize::try_from(id).ok().filter(|&id| id < experts);
    let mut counts = vec![0; experts];
    routing.iter().filter_map(|&id| expert(id)).for_each(|id| counts[id] += 1);
    let mut next = describe(p, &counts);
    let map = p.row_id_map.slice_mut::<i32>(routing.len());
    let tokens = routing.len() / top_k;
    for (slot, &id) in routing.iter().enumerate() {
        let row = expert(id).map(|id| {
            next[id] += 1;
            next[id] - 1
        });
        let kept = row.filter(|&row| (row as u64) < p.capacity);
        map[slot % top_k * tokens + slot / top_k] = kept.map_or(-1, |row| row as i32);
    }
}

/// Runs `permute_ends`.
///
/// # Errors
/// None.
#[expect(clippy::unnecessary_wraps, reason = "the signature of host kernels")]
pub(crate) fn run_ends(p: &PermuteEndsParams<'_>, _: KernelId) -> Result<()> {
    let (tokens, experts, top_k) = (p.tokens as usize, p.experts as usize, p.top_k as usize);
    let groups = experts.max(1);
    let parts = tokens.div_ceil(64).clamp(1, 32);
    let ends = p.ends.slice_mut::<i32>(parts * groups);
    ends.fill(0);
    if experts == 0 {
        let map = p.row_id_map.slice::<i32>(tokens * top_k);
        ends[0] = map.iter().map(|row| row.saturating_add(1)).max().unwrap_or(0).max(0);
        return Ok(());
    }
    let width = 2 * experts + 1;
    for entry in p.row_id_map.slice::<i32>(tokens * width).chunks(width) {
        for k in 0..entry[2 * experts].clamp(0, experts as i32) as usize {
            let Some(end) = usize::try_from(entry[experts + k]).ok().filter(|&expert| expert < experts) else {
                continue;
            };
            ends[end] = ends[end].max(entry[k].saturating_add(1));
        }
    }
    Ok(())
}

/// Runs `permute_dropped`.
///
/// # Errors
/// None.
#[expect(clippy::unnecessary_wraps, reason = "the signature of host kernels")]
pub(crate) fn run_dropped(p: &PermuteDroppedParams<'_>, _: KernelId) -> Result<()> {
    let count = if p.clear == 0 { DROPPED.load(Ordering::Relaxed) } else { DROPPED.swap(0, Ordering::Relaxed) };
    write_i64(p.out, count);
    Ok(())
}

fn write_i64(to: DevPtr<'_>, value: i64) {
    if let [slot] = to.slice_mut::<i64>(1) {
        *slot = value;
    }
}
