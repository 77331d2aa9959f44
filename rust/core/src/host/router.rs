//! Host kernels of `cuda/moe/router.cu`.

use half::{bf16, f16};
use te_fast_kernels::constants::moe;
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host::fp8::Real;
use crate::ops::router::{RouterBalancedParams, RouterBwdParams, RouterParams};

/// Added to sums of scores, so that they are not zero.
const EPS: f32 = 1e-20;
/// Softplus is the identity from here on.
const LINEAR_FROM: f32 = 20.0;

/// Runs `router_fwd_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &RouterParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::RouterFwd(Float::F32) => forward::<f32>(p, None),
        KernelId::RouterFwd(Float::F16) => forward::<f16>(p, None),
        KernelId::RouterFwd(Float::Bf16) => forward::<bf16>(p, None),
        _ => return Err(Error::state("router", id.symbol())),
    }
    Ok(())
}

/// Runs `router_balanced_fwd_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run_balanced(p: &RouterBalancedParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::RouterBalanced(Float::F32) => forward::<f32>(&p.route, Some(p)),
        KernelId::RouterBalanced(Float::F16) => forward::<f16>(&p.route, Some(p)),
        KernelId::RouterBalanced(Float::Bf16) => forward::<bf16>(&p.route, Some(p)),
        _ => return Err(Error::state("router", id.symbol())),
    }
    Ok(())
}

/// Runs `router_bwd_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run_bwd(p: &RouterBwdParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::RouterBwd(Float::F32) => backward::<f32>(p),
        KernelId::RouterBwd(Float::F16) => backward::<f16>(p),
        KernelId::RouterBwd(Float::Bf16) => backward::<bf16>(p),
        _ => return Err(Error::state("router", id.symbol())),
    }
    Ok(())
}

fn softmax(x: &mut [f32]) {
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for x in &mut *x {
        *x = (*x - largest).exp();
    }
    divide_by_sum(x, 0.0);
}

/// Divides values by their sum plus a small number.
fn divide_by_sum(x: &mut [f32], eps: f32) {
    let sum = x.iter().sum::<f32>() + eps;
    for x in x {
        *x /= sum;
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn sqrt_softplus(x: f32) -> f32 {
    if x > LINEAR_FROM { x.sqrt() } else { x.exp().ln_1p().sqrt() }
}

/// A number that orders as values do, NaN above all and -0 as 0; never 0.
fn key(value: f32) -> u32 {
    if value.is_nan() {
        return u32::MAX;
    }
    let bits = (value + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// The indices of the largest values, best first; the first one among equals.
fn best(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(key(values[at])));
    order.truncate(count);
    order
}

/// Scores, with minus infinity for experts outside of the best groups.
fn in_best_groups(choice: &mut [f32], topk: usize, groups: usize, group_topk: usize) {
    let width = choice.len() / groups;
    let sum = |group: &[f32]| best(group, topk / group_topk).into_iter().fold(0.0, |sum, at| sum + group[at]);
    let sums: Vec<f32> = choice.chunks(width).map(sum).collect();
    let kept = best(&sums, group_topk);
    for (group, values) in choice.chunks_mut(width).enumerate() {
        if !kept.contains(&group) {
            values.fill(f32::NEG_INFINITY);
        }
    }
}

/// Counts the bias that each expert lacks, of a token with these scores and these values for the choice.
fn count_lacks(p: &RouterBalancedParams<'_>, scores: &[f32], choice: &[f32]) {
    let bins = p.bins as usize;
    let [lower, upper] = *p.bounds.slice::<f32>(2) else { return };
    let scale = p.bins as f32 / (upper - lower);
    let topk = p.route.topk as usize;
    let cutoff = choice[best(choice, topk + 1)[topk]];
    let histogram = p.histogram.slice_mut::<i32>(scores.len() * bins);
    for (score, counts) in scores.iter().zip(histogram.chunks_mut(bins)) {
        let bin = ((cutoff - score - lower) * scale).floor() as i32; // saturates; NaN is 0
        counts[(bin.max(0) as usize).min(bins - 1)] += 1;
    }
}

fn forward<T: Real>(p: &RouterParams<'_>, balanced: Option<&RouterBalancedParams<'_>>) {
    let (experts, topk) = (p.experts as usize, p.topk as usize);
    let logits = p.logits.slice::<T>(p.tokens as usize * experts);
    let bias = p.bias.slice::<f32>(experts);
    for (token, row) in logits.chunks(experts).enumerate() {
        let mut scores: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
        match p.score {
            moe::SCORE_SOFTMAX if p.over == moe::OVER_CHOSEN => {}
            moe::SCORE_SOFTMAX => softmax(&mut scores),
            moe::SCORE_SIGMOID => scores.iter_mut().for_each(|x| *x = sigmoid(*x)),
            _ => scores.iter_mut().for_each(|x| *x = sqrt_softplus(*x)),
        }
        let first = token * experts;
        let mut saved = scores.clone();
        if p.over == moe::OVER_ALL && p.score != moe::SCORE_SOFTMAX {
            divide_by_sum(&mut scores, EPS);
        }
        let biased = |expert: usize| scores[expert] + bias.get(expert).copied().unwrap_or(0.0);
        let mut choice: Vec<f32> = (0..experts).map(biased).collect();
        if p.groups != 0 {
            in_best_groups(&mut choice, topk, p.groups as usize, p.group_topk as usize);
        }
        let chosen = best(&choice, topk);
        note(p, token, &chosen);
        if let Some(balanced) = balanced {
            count_lacks(balanced, &scores, &choice);
        }
        if p.over == moe::OVER_ALL {
            let probs = p.probs.offset(4 * first).slice_mut::<f32>(experts);
            probs.copy_from_slice(&scores);
        } else {
            let mut values: Vec<f32> = chosen
                .iter()
                .map(|&expert| if bias.is_empty() { scores[expert] } else { biased(expert) - bias[expert] })
                .collect();
            if p.over == moe::OVER_CHOSEN && p.score == moe::SCORE_SOFTMAX {
                softmax(&mut values);
                saved.fill(0.0);
                chosen.iter().zip(&values).for_each(|(&expert, &value)| saved[expert] = value);
            } else if p.score != moe::SCORE_SOFTMAX && topk > 1 {
                divide_by_sum(&mut values, EPS);
            }
            let probs = p.probs.offset(size_of::<T>() * first).slice_mut::<T>(experts);
            probs.fill(T::from_f32(0.0));
            chosen.iter().zip(&values).for_each(|(&expert, &value)| probs[expert] = T::from_f32(value * p.factor));
        }
        if !p.scores.is_null() {
            p.scores.offset(4 * first).slice_mut::<f32>(experts).copy_from_slice(&saved);
        }
    }
}

/// Writes the experts of a token in every requested form.
fn note(p: &RouterParams<'_>, token: usize, chosen: &[usize]) {
    let experts = p.experts as usize;
    let map = p.map.offset(token * experts).slice_mut::<u8>(if p.map.is_null() { 0 } else { experts });
    map.fill(0);
    let width = experts.div_ceil(8);
    let bits = p.bits.offset(token * width).slice_mut::<u8>(if p.bits.is_null() { 0 } else { width });
    bits.fill(0);
    for (place, &expert) in chosen.iter().enumerate() {
        if let Some(byte) = map.get_mut(expert) {
            *byte = 1;
        }
        if let Some(byte) = bits.get_mut(expert / 8) {
            *byte |= 1 << (expert % 8);
        }
        store_index(p.indices, token * chosen.len() + place, p.index_bytes, expert);
    }
}

fn store_index(indices: DevPtr<'_>, at: usize, bytes: u32, expert: usize) {
    let bytes = bytes as usize;
    let to = indices.offset(at * bytes).slice_mut::<u8>(if indices.is_null() { 0 } else { bytes });
    to.copy_from_slice(&(expert as u64).to_le_bytes()[..to.len()]);
}

fn backward<T: Real>(p: &RouterBwdParams<'_>) {
    let experts = p.experts as usize;
    let count = p.tokens as usize * experts;
    let (scores, dlogits) = (p.scores.slice::<f32>(count), p.dlogits.slice_mut::<T>(count));
    let is_all = p.over == moe::OVER_ALL;
    for (token, (scores, out)) in scores.chunks(experts).zip(dlogits.chunks_mut(experts)).enumerate() {
        let first = token * experts;
        let map = p.map.offset(first).slice::<u8>(experts);
        let chosen = |expert: usize| is_all || map[expert] != 0;
        let grad = |expert: usize| {
            if is_all {
                p.grad.offset(4 * (first + expert)).slice::<f32>(1)[0]
            } else if chosen(expert) {
                p.grad.offset(size_of::<T>() * (first + expert)).slice::<T>(1)[0].to_f32() * p.factor
            } else {
                0.0
            }
        };
        let among = || (0..experts).filter(|&expert| chosen(expert));
        let dot: f32 = among().map(|expert| grad(expert) * scores[expert]).sum();
        let sum = among().map(|expert| scores[expert]).sum::<f32>() + EPS;
        let normalises = is_all || p.topk > 1;
        for (expert, out) in out.iter_mut().enumerate() {
            let y = scores[expert];
            if p.score == moe::SCORE_SOFTMAX {
                let wanted = p.over != moe::OVER_CHOSEN || chosen(expert);
                *out = T::from_f32(if wanted { y * (grad(expert) - dot) } else { 0.0 });
                continue;
            }
            let slope =
                if p.score == moe::SCORE_SIGMOID { y * (1.0 - y) } else { -(-y * y).exp_m1() / (2.0 * y + EPS) };
            let above = if normalises { grad(expert) / sum - dot / (sum * sum) } else { grad(expert) };
            *out = T::from_f32(if chosen(expert) { above * slope } else { 0.0 });
        }
    }
}
