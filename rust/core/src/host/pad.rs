//! Host kernel of `cuda/moe/pad.cu`.

use te_fast_kernels::KernelId;

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::ops::pad::{Move, PadRowsParams};

/// Consecutive rows of the output, and their source.
#[derive(Clone, Copy, Debug)]
struct Segment {
    out_start: usize,
    in_start: usize,
    length: usize,
}

fn integers(data: DevPtr<'_>, count: usize, wide: u32) -> Vec<i64> {
    if wide == 0 {
        data.slice::<i32>(count).iter().map(|&value| i64::from(value)).collect()
    } else {
        data.slice::<i64>(count).to_vec()
    }
}

fn splits(p: &PadRowsParams<'_>) -> Vec<usize> {
    let count = p.count as usize;
    let values = if p.splits.is_null() {
        p.inline_splits[..count].iter().map(|&value| i64::from(value)).collect()
    } else {
        integers(p.splits, count, p.split_type)
    };
    let most = p.in_rows.max(p.out_rows) as i64;
    values.into_iter().map(|value| value.clamp(0, most) as usize).collect()
}

/// The start of each of `sizes`, and the end of all.
fn starts(sizes: impl Iterator<Item = usize>) -> (Vec<usize>, usize) {
    let mut end = 0;
    let starts = sizes.map(|size| {
        end += size;
        end - size
    });
    (starts.collect(), end)
}

/// The segments, and the rows of the output that they cover.
fn segments(p: &PadRowsParams<'_>) -> (Vec<Segment>, usize) {
    let sizes = splits(p);
    let (plain, plain_rows) = starts(sizes.iter().copied());
    let align = p.align as usize;
    let zip = |out: &[usize], from: &[usize]| {
        let pairs = out.iter().zip(from).zip(&sizes);
        pairs.map(|((&out_start, &in_start), &length)| Segment { out_start, in_start, length }).collect()
    };
    if p.mode == Move::Pad as u32 || p.mode == Move::Unpad as u32 {
        let (padded, padded_rows) = starts(sizes.iter().map(|size| size.next_multiple_of(align)));
        return if p.mode == Move::Pad as u32 {
            (zip(&padded, &plain), padded_rows)
        } else {
            (zip(&plain, &padded), plain_rows)
        };
    }
    let order: Vec<usize> = integers(p.index, sizes.len(), p.index_type)
        .into_iter()
        .map(|chunk| usize::try_from(chunk).unwrap_or(usize::MAX))
        .collect();
    let size = |chunk: usize| sizes.get(chunk).copied().unwrap_or(0);
    let (sorted, rows) = starts(order.iter().map(|&chunk| size(chunk)));
    if p.mode == Move::Sort as u32 {
        let moved = sorted.iter().zip(&order).map(|(&out_start, &chunk)| Segment {
            out_start,
            in_start: plain.get(chunk).copied().unwrap_or(usize::MAX),
            length: size(chunk),
        });
        return (moved.collect(), rows);
    }
    let mut back = vec![usize::MAX; sizes.len()];
    for (&start, &chunk) in sorted.iter().zip(&order) {
        if let Some(slot) = back.get_mut(chunk) {
            *slot = start;
        }
    }
    (zip(&plain, &back), rows)
}

fn write_padded_splits(p: &PadRowsParams<'_>) {
    if p.padded_splits.is_null() {
        return;
    }
    let padded = splits(p).into_iter().map(|size| size.next_multiple_of(p.align as usize));
    if p.split_type == 0 {
        let out = p.padded_splits.slice_mut::<i32>(p.count as usize);
        out.iter_mut().zip(padded).for_each(|(out, size)| *out = size as i32);
    } else {
        let out = p.padded_splits.slice_mut::<i64>(p.count as usize);
        out.iter_mut().zip(padded).for_each(|(out, size)| *out = size as i64);
    }
}

/// Runs `pad_rows`.
///
/// # Errors
/// None.
#[expect(clippy::unnecessary_wraps, reason = "the signature of host kernels")]
pub(crate) fn run(p: &PadRowsParams<'_>, _: KernelId) -> Result<()> {
    let (in_rows, out_rows, bytes) = (p.in_rows as usize, p.out_rows as usize, p.row_bytes as usize);
    let prob_bytes = if p.probs.is_null() { 0 } else { p.prob_bytes as usize };
    let (x, out) = (p.x.slice::<u8>(in_rows * bytes), p.out.slice_mut::<u8>(out_rows * bytes));
    let probs = p.probs.slice::<u8>(in_rows * prob_bytes);
    let out_probs = p.out_probs.slice_mut::<u8>(out_rows * prob_bytes);
    write_padded_splits(p);
    let (segments, covered) = segments(p);
    let sorts = p.mode == Move::Sort as u32 || p.mode == Move::Unsort as u32;
    let source = |row: usize| {
        if row >= covered || segments.is_empty() {
            return sorts.then_some(row);
        }
        let segment = segments[segments.partition_point(|segment| segment.out_start <= row) - 1];
        let inside = row - segment.out_start;
        (inside < segment.length).then(|| segment.in_start.saturating_add(inside))
    };
    for row in 0..out_rows {
        let (to, to_prob) = (&mut out[row * bytes..][..bytes], &mut out_probs[row * prob_bytes..][..prob_bytes]);
        if let Some(from) = source(row).filter(|&from| from < in_rows) {
            to.copy_from_slice(&x[from * bytes..][..bytes]);
            to_prob.copy_from_slice(&probs[from * prob_bytes..][..prob_bytes]);
        } else {
            to.fill(0);
            to_prob.fill(0);
        }
    }
    Ok(())
}
