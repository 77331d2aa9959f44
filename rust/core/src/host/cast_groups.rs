//! Host kernels of `cuda/quantize/cast_groups.cu`.

use half::{bf16, f16};
use rayon::prelude::*;
use te_fast_kernels::constants::tile::TILE;
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host::cast::{tensor_amax_bits, transpose_with};
use crate::host::fp8::{
    Format, PARALLEL_FROM, Real, amax_bits, dispatch_types, is_noop, magnitude_bits, scale_from_amax,
};
use crate::host::groups::{GroupRows, counted, equal};
use crate::ops::cast_groups::CastGroupsParams;

/// Runs `amax_groups_*`, `cast_groups_*` and `cast_block_groups_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &CastGroupsParams<'_>, id: KernelId) -> Result<()> {
    if is_noop(p.noop) {
        return Ok(());
    }
    match id {
        KernelId::AmaxTokens(Float::F32) => token_maxima::<f32>(p),
        KernelId::AmaxTokens(Float::F16) => token_maxima::<f16>(p),
        KernelId::AmaxTokens(Float::Bf16) => token_maxima::<bf16>(p),
        KernelId::AmaxGroups(_) if !p.numbers.is_null() => gathered_maxima(p),
        KernelId::AmaxGroups(Float::F32) => maxima::<f32>(p),
        KernelId::AmaxGroups(Float::F16) => maxima::<f16>(p),
        KernelId::AmaxGroups(Float::Bf16) => maxima::<bf16>(p),
        KernelId::CastGroups(input, output) => dispatch_types!(input, output, cast(p)),
        KernelId::CastBlockGroups1d(input, output) => dispatch_types!(input, output, cast_1d(p)),
        KernelId::CastBlockGroups2d(input, output) => dispatch_types!(input, output, cast_2d(p)),
        _ => return Err(Error::state("cast_groups", id.symbol())),
    }
    Ok(())
}

fn groups_of(p: &CastGroupsParams<'_>) -> Vec<GroupRows> {
    let (groups, rows) = (p.groups as usize, p.rows as usize);
    if p.equal != 0 { equal(groups, rows) } else { counted(p.splits, groups, rows) }
}

/// The input, whose rows may be gathered.
struct Values<'a, T> {
    x: &'a [T],
    numbers: &'a [i32],
    cols: usize,
    all: bool,
    /// The number of a row without a token.
    zeros: Vec<T>,
}

impl<'a, T: Real> Values<'a, T> {
    fn of(p: &CastGroupsParams<'a>) -> Self {
        let rows = if p.equal != 0 { p.groups as usize * p.rows as usize } else { p.rows as usize };
        let rows = if p.numbers.is_null() { rows } else { p.tokens as usize };
        let cols = p.cols as usize;
        let (x, numbers) = (p.x.slice(rows * cols), p.numbers.slice(p.rows as usize));
        let zeros = if numbers.is_empty() { Vec::new() } else { vec![T::from_f32(0.0); cols] };
        Self { x, numbers, cols, all: p.gathers_all != 0, zeros }
    }

    fn row(&self, row: usize) -> &[T] {
        let row = match self.numbers.get(row) {
            None => row,
            Some(&number) => match source_of(number, self.all) {
                Some(token) => token,
                None => return &self.zeros,
            },
        };
        &self.x[row * self.cols..][..self.cols]
    }

    fn at(&self, row: usize, col: usize) -> f32 {
        self.row(row)[col].to_f32()
    }

    /// Largest magnitude of the rows of a group.
    fn amax_bits(&self, group: &GroupRows) -> u32 {
        if self.numbers.is_empty() {
            return tensor_amax_bits(&self.x[group.first * self.cols..][..group.rows * self.cols]);
        }
        let rows = group.first..group.first + group.rows;
        rows.map(|row| tensor_amax_bits(self.row(row))).max().unwrap_or(0)
    }
}

/// The row that a number stands for; none for zeros.
fn source_of(number: i32, all: bool) -> Option<usize> {
    if number > 0 || (all && number < 0) { Some(number.unsigned_abs() as usize - 1) } else { None }
}

/// Maxima of the rows of tokens.
fn token_maxima<T: Real>(p: &CastGroupsParams<'_>) {
    let (cols, tokens) = (p.cols as usize, p.tokens as usize);
    let x = p.x.slice::<T>(tokens * cols);
    let maxima = p.token_max.slice_mut::<f32>(tokens);
    for (amax, row) in maxima.iter_mut().zip(x.chunks(cols.max(1))) {
        *amax = f32::from_bits(tensor_amax_bits(row));
    }
}

/// The same as [`maxima`], from the maxima of tokens.
fn gathered_maxima(p: &CastGroupsParams<'_>) {
    let parts = p.parts as usize;
    let (numbers, token_max) = (p.numbers.slice::<i32>(p.rows as usize), p.token_max.slice::<f32>(p.tokens as usize));
    let partial = p.partial.slice_mut::<f32>(p.groups as usize * parts);
    for (group, partial) in groups_of(p).iter().zip(partial.chunks_mut(parts.max(1))) {
        let sources = numbers[group.first..][..group.rows].iter().filter_map(|&n| source_of(n, p.gathers_all != 0));
        partial.fill(0.0);
        partial[0] = sources.fold(0.0, |amax, token| token_max[token].max(amax));
    }
}

/// The first part of a group gets the group's maximum, the other parts get zero.
fn maxima<T: Real>(p: &CastGroupsParams<'_>) {
    let (values, parts) = (Values::<T>::of(p), p.parts as usize);
    let partial = p.partial.slice_mut::<f32>(p.groups as usize * parts);
    for (group, partial) in groups_of(p).iter().zip(partial.chunks_mut(parts.max(1))) {
        partial.fill(0.0);
        partial[0] = f32::from_bits(values.amax_bits(group));
    }
}

fn cast<T: Real, F: Format>(p: &CastGroupsParams<'_>) {
    let (values, parts, stride) = (Values::<T>::of(p), p.parts as usize, p.stride as usize);
    let groups = groups_of(p);
    let scales: Vec<f32> = (0..groups.len())
        .map(|group| {
            if parts == 0 {
                return p.scale.offset(4 * group * stride).slice::<f32>(1)[0];
            }
            let partial = &p.partial.slice::<f32>(groups.len() * parts)[group * parts..][..parts];
            let amax = partial.iter().fold(0.0_f32, |amax, &part| amax.max(part));
            scale_from_amax(amax, p.fp8_max, p.eps, f32::MAX, p.pow2 != 0)
        })
        .collect();
    p.scale_inv.slice_mut::<f32>(groups.len()).iter_mut().zip(&scales).for_each(|(out, scale)| *out = 1.0 / scale);
    for (index, group) in groups.iter().enumerate() {
        if let [slot] = p.amax.offset(4 * index * stride).slice_mut::<u32>(1) {
            *slot = (*slot).max(values.amax_bits(group));
        }
    }
    let byte =
        |group: usize, row: usize, col: usize| F::encode(values.at(groups[group].first + row, col) * scales[group]);
    write(p, &groups, byte);
}

/// Writes the requested layouts from `byte(group, row of the group, column)`.
fn write(p: &CastGroupsParams<'_>, groups: &[GroupRows], byte: impl Fn(usize, usize, usize) -> u8 + Sync) {
    let (cols, ld) = (p.cols as usize, p.ld_t as usize);
    for (index, group) in groups.iter().enumerate() {
        let out = p.out.offset(group.first * cols).slice_mut::<u8>(group.rows * cols);
        let line = |(row, out): (usize, &mut [u8])| {
            out.iter_mut().enumerate().for_each(|(col, out)| *out = byte(index, row, col));
        };
        if out.len() < PARALLEL_FROM {
            out.chunks_mut(cols.max(1)).enumerate().for_each(line);
        } else {
            out.par_chunks_mut(cols).enumerate().for_each(line);
        }
    }
    if p.equal != 0 {
        for (index, group) in groups.iter().enumerate() {
            let out_t = p.out_t.offset(index * cols * ld);
            transpose_with(out_t, group.rows, cols, ld, |row, col| byte(index, row, col));
        }
        return;
    }
    let line = |(col, out): (usize, &mut [u8])| {
        for (index, group) in groups.iter().enumerate() {
            let end = ld.min(group.padded + group.rows.next_multiple_of(TILE));
            for (row, out) in out[group.padded..end].iter_mut().enumerate() {
                *out = if row < group.rows { byte(index, row, col) } else { 0 };
            }
        }
    };
    let out_t = p.out_t.slice_mut::<u8>(cols * ld);
    if out_t.len() < PARALLEL_FROM {
        out_t.chunks_mut(ld.max(1)).enumerate().for_each(line);
    } else {
        out_t.par_chunks_mut(ld).enumerate().for_each(line);
    }
}

fn block_scale<T: Real, F: Format>(p: &CastGroupsParams<'_>, bits: u32) -> f32 {
    scale_from_amax(f32::from_bits(bits), F::FP8.max(), p.eps, T::MAX, p.pow2 != 0)
}

/// Blocks of 1 x 128 of counted groups; those of the transposed layout begin anew with every group.
fn cast_1d<T: Real, F: Format>(p: &CastGroupsParams<'_>) {
    let (cols, groups) = (p.cols as usize, groups_of(p));
    let (values, blocks) = (Values::<T>::of(p), cols.div_ceil(TILE));
    let (ld, ld_t) = (p.scale_ld as usize, p.scale_ld_t as usize);
    let rows: usize = groups.iter().map(|group| group.rows).sum();
    if !p.out.is_null() {
        let inverse = p.scale_inv.slice_mut::<f32>(blocks * ld);
        let out = p.out.slice_mut::<u8>(rows * cols);
        for (row, out) in out.chunks_mut(cols.max(1)).enumerate() {
            for (block, (out, x)) in out.chunks_mut(TILE).zip(values.row(row).chunks(TILE)).enumerate() {
                let scale = block_scale::<T, F>(p, amax_bits(x));
                inverse[block * ld + row] = 1.0 / scale;
                out.iter_mut().zip(x).for_each(|(out, x)| *out = F::encode(x.to_f32() * scale));
            }
        }
    }
    if p.out_t.is_null() {
        return;
    }
    let inverse = p.scale_inv_t.slice_mut::<f32>(p.ld_t as usize / TILE * ld_t);
    let mut scales = vec![0.0_f32; p.ld_t as usize / TILE * cols];
    for group in &groups {
        for tile in 0..group.rows.div_ceil(TILE) {
            let line = group.padded / TILE + tile;
            let mut amax = vec![0_u32; cols];
            for row in tile * TILE..group.rows.min((tile + 1) * TILE) {
                amax.iter_mut()
                    .zip(values.row(group.first + row))
                    .for_each(|(amax, &x)| *amax = (*amax).max(magnitude_bits(x)));
            }
            for (col, amax) in amax.into_iter().enumerate() {
                let scale = block_scale::<T, F>(p, amax);
                scales[line * cols + col] = scale;
                inverse[line * ld_t + col] = 1.0 / scale;
            }
            inverse[line * ld_t + cols..(line + 1) * ld_t].fill(0.0);
        }
    }
    let without_rows =
        CastGroupsParams { at: crate::ops::cast_groups::CastGroupsPointers { out: DevPtr::null(), ..p.at }, ..*p };
    write(&without_rows, &groups, |group, row, col| {
        let group = &groups[group];
        F::encode(values.at(group.first + row, col) * scales[(group.padded + row) / TILE * cols + col])
    });
}

/// Blocks of 128 x 128 of equal groups.
fn cast_2d<T: Real, F: Format>(p: &CastGroupsParams<'_>) {
    let (rows, cols, groups) = (p.rows as usize, p.cols as usize, groups_of(p));
    let (lines, blocks) = (rows.div_ceil(TILE), cols.div_ceil(TILE));
    let (x, ld, ld_t) = (Values::<T>::of(p).x, p.scale_ld as usize, p.scale_ld_t as usize);
    let mut scales = vec![0.0_f32; groups.len() * lines * blocks];
    let at = |index: usize| {
        let (group, line, block) = (index / (lines * blocks), index / blocks % lines, index % blocks);
        let amax = (line * TILE..rows.min((line + 1) * TILE))
            .map(|row| amax_bits(&x[(group * rows + row) * cols..][block * TILE..cols.min((block + 1) * TILE)]))
            .max();
        block_scale::<T, F>(p, amax.unwrap_or(0))
    };
    scales.par_iter_mut().enumerate().for_each(|(index, scale)| *scale = at(index));
    for group in 0..groups.len() {
        let scale = |line: usize, block: usize| scales[(group * lines + line) * blocks + block];
        let inverse = p.scale_inv.offset(4 * group * lines * ld).slice_mut::<f32>(lines * ld);
        for (line, out) in inverse.chunks_mut(ld.max(1)).enumerate().filter(|_| !p.out.is_null()) {
            let value = |block: usize| if block < blocks { 1.0 / scale(line, block) } else { 0.0 };
            out.iter_mut().enumerate().for_each(|(block, out)| *out = value(block));
        }
        if p.out_t.is_null() {
            continue;
        }
        let inverse = p.scale_inv_t.offset(4 * group * blocks * ld_t).slice_mut::<f32>(blocks * ld_t);
        for (block, out) in inverse.chunks_mut(ld_t.max(1)).enumerate() {
            let value = |line: usize| if line < lines { 1.0 / scale(line, block) } else { 0.0 };
            out.iter_mut().enumerate().for_each(|(line, out)| *out = value(line));
        }
    }
    write(p, &groups, |group, row, col| {
        let scale = scales[(group * lines + row / TILE) * blocks + col / TILE];
        F::encode(x[(group * rows + row) * cols + col].to_f32() * scale)
    });
}
