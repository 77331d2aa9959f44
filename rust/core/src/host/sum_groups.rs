//! Host kernels of `cuda/quantize/sum_groups.cu`.

use half::{bf16, f16};
use rayon::prelude::*;
use te_fast_kernels::constants::quantize::SUM_GROUPS_LANES;
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::host::fp8::Real;
use crate::host::groups::counted;
use crate::host::rows::Values;
use crate::ops::sum_groups::SumGroupsParams;

/// Runs `sum_groups_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &SumGroupsParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::SumGroups(Float::F32) => sum::<f32>(p),
        KernelId::SumGroups(Float::F16) => sum::<f16>(p),
        KernelId::SumGroups(Float::Bf16) => sum::<bf16>(p),
        _ => return Err(Error::state("sum_groups", id.symbol())),
    }
    Ok(())
}

/// Every lane sums each eighth row, in order; the sums of the lanes are added in order.
fn sum<T: Real>(p: &SumGroupsParams<'_>) {
    let (rows, cols) = (p.rows as usize, p.cols as usize);
    let x = p.x.slice::<T>(rows * cols);
    let factor = |row: usize| Values::new(p.row_scale, p.row_scale_type).get(row);
    let groups = counted(p.splits, p.groups as usize, rows);
    let sums = p.sums.slice_mut::<T>(groups.len() * cols);
    sums.par_chunks_mut(cols.max(1)).zip(&groups).for_each(|(sums, group)| {
        let mut lanes = vec![0.0_f32; SUM_GROUPS_LANES * cols];
        for row in 0..group.rows {
            let (line, scale) = (&x[(group.first + row) * cols..][..cols], factor(group.first + row));
            let lane = &mut lanes[row % SUM_GROUPS_LANES * cols..][..cols];
            lane.iter_mut().zip(line).for_each(|(sum, x)| *sum = x.to_f32().mul_add(scale, *sum));
        }
        for (col, out) in sums.iter_mut().enumerate() {
            let total = (1..SUM_GROUPS_LANES).fold(lanes[col], |total, lane| total + lanes[lane * cols + col]);
            *out = T::from_f32(total);
        }
    });
}
