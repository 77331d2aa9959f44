//! Host kernel of `cuda/moe/permute_scales.cu`.

use te_fast_kernels::KernelId;

use crate::base::error::Result;
use crate::ops::permute_scales::PermuteScalesParams;

/// Runs `permute_scales`.
///
/// # Errors
/// None.
#[expect(clippy::unnecessary_wraps, reason = "the signature of host kernels")]
pub(crate) fn run(p: &PermuteScalesParams<'_>, _: KernelId) -> Result<()> {
    let (lines, in_line, out_line) = (p.lines as usize, p.in_line as usize, p.out_line as usize);
    let numbers = p.numbers.slice::<i32>(p.rows as usize);
    for line in 0..lines {
        let from = p.scales.offset(4 * line * in_line).slice::<f32>(p.tokens as usize);
        let to = p.out.offset(4 * line * out_line).slice_mut::<f32>(out_line);
        to.fill(0.0);
        for (scale, &number) in to.iter_mut().zip(numbers) {
            let token = usize::try_from(i64::from(number) - 1).ok();
            *scale = token.and_then(|token| from.get(token)).copied().unwrap_or(0.0);
        }
    }
    Ok(())
}
