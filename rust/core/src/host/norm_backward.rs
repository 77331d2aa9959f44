//! Host kernels of `cuda/norm/norm_backward.cu` and `cuda/norm/norm_backward_long.cu`. Sums over rows and columns are
//! in f64, so that they are at least as accurate as the GPU's. The summands are FP32, as on the GPU.

use half::{bf16, f16};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::host::fp8::Real;
use crate::host::rows::{Values, for_row_groups};
use crate::ops::norm_backward::NormBackwardParams;

/// Runs `norm_backward_*`, `norm_backward_cluster_*`, `norm_backward_sums_*` and `norm_backward_tiles_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &NormBackwardParams<'_>, id: KernelId) -> Result<()> {
    let (KernelId::NormBackward(input)
    | KernelId::NormBackwardWide(input)
    | KernelId::NormBackwardElements(input)
    | KernelId::NormBackwardCluster(input)
    | KernelId::NormBackwardClusterElements(input)
    | KernelId::NormBackwardSums(input)
    | KernelId::NormBackwardTiles(input)) = id
    else {
        return Err(Error::state("norm_backward", id.symbol()));
    };
    match input {
        Float::F32 => step::<f32>(p, id),
        Float::F16 => step::<f16>(p, id),
        Float::Bf16 => step::<bf16>(p, id),
    }
    Ok(())
}

fn step<T: Real>(p: &NormBackwardParams<'_>, id: KernelId) {
    let norm = Norm::<T>::new(p);
    match id {
        KernelId::NormBackwardSums(_) => norm.sums(p),
        KernelId::NormBackwardTiles(_) => {
            let sums = p.sums.slice::<f32>(2 * norm.rows);
            norm.gradients(p, |row| Means { plain: sums[2 * row], normed: sums[2 * row + 1] });
        }
        _ => norm.gradients(p, |row| norm.means(row)),
    }
}

/// Means over a row of `g * dy` and of `g * dy * h`.
#[derive(Clone, Copy)]
struct Means {
    plain: f32,
    normed: f32,
}

/// The norm's inputs.
struct Norm<'a, T> {
    dy: &'a [T],
    x: &'a [T],
    add: &'a [T],
    factors: Vec<f32>,
    mean: &'a [f32],
    rstd: &'a [f32],
    rows: usize,
    cols: usize,
}

impl<'a, T: Real> Norm<'a, T> {
    fn new(p: &NormBackwardParams<'a>) -> Self {
        let (rows, cols) = (p.rows as usize, p.cols as usize);
        let gamma = Values::new(p.gamma, p.weight_kind);
        let one = if p.zero_centered != 0 { 1.0 } else { 0.0 };
        Self {
            dy: p.dy.slice(rows * cols),
            x: p.x.slice(rows * cols),
            add: p.add.slice(rows * cols),
            factors: (0..cols).map(|col| gamma.get(col) + one).collect(),
            mean: p.mean.slice(rows),
            rstd: p.rstd.slice(rows),
            rows,
            cols,
        }
    }

    /// Columns of a row: the factor, the gradient and the normalised element.
    fn row(&self, row: usize) -> impl Iterator<Item = (f32, f32, f32)> + '_ {
        let (mean, rstd) = (self.mean.get(row).map_or(0.0, |&mean| mean), self.rstd[row]);
        let elements = row * self.cols..(row + 1) * self.cols;
        let pairs = self.dy[elements.clone()].iter().zip(&self.x[elements]);
        self.factors.iter().zip(pairs).map(move |(&g, (dy, x))| (g, dy.to_f32(), (x.to_f32() - mean) * rstd))
    }

    fn means(&self, row: usize) -> Means {
        let (plain, normed) = self.row(row).fold((0.0, 0.0), |(plain, normed), (g, dy, h)| {
            let up = f64::from(g * dy);
            (plain + up, normed + up * f64::from(h))
        });
        let count = self.cols as f64;
        // RMSNorm subtracts no mean.
        Means {
            plain: if self.mean.is_empty() { 0.0 } else { (plain / count) as f32 },
            normed: (normed / count) as f32,
        }
    }

    fn sums(&self, p: &NormBackwardParams<'_>) {
        for_row_groups(self.rows, self.x.len(), |group| {
            for row in group {
                let Means { plain, normed } = self.means(row);
                p.sums.offset(8 * row).slice_mut::<f32>(2).copy_from_slice(&[plain, normed]);
            }
        });
    }

    fn gradients(&self, p: &NormBackwardParams<'_>, means: impl Fn(usize) -> Means + Sync) {
        let cols = self.cols;
        let groups = for_row_groups(self.rows, self.x.len(), |group| {
            let mut sums = vec![(0.0_f64, 0.0_f64); cols];
            for row in group {
                for ((dgamma, dbeta), (_, dy, h)) in sums.iter_mut().zip(self.row(row)) {
                    *dgamma += f64::from(dy) * f64::from(h);
                    *dbeta += f64::from(dy);
                }
                let dx = p.dx.offset(row * cols * size_of::<T>()).slice_mut::<T>(cols);
                if !dx.is_empty() {
                    self.store(row, means(row), dx);
                }
            }
            sums
        });
        let (dgamma, dbeta) = (Values::new(p.dgamma, p.weight_kind), Values::new(p.dbeta, p.weight_kind));
        for col in 0..cols {
            let (g, b) = groups.iter().fold((0.0, 0.0), |(g, b), sums| (g + sums[col].0, b + sums[col].1));
            dgamma.set(col, g as f32);
            dbeta.set(col, b as f32);
        }
    }

    fn store(&self, row: usize, means: Means, dx: &mut [T]) {
        let rstd = self.rstd[row];
        for (col, (out, (g, dy, h))) in dx.iter_mut().zip(self.row(row)).enumerate() {
            let value = (g * dy - means.plain - h * means.normed) * rstd;
            let add = self.add.get(row * self.cols + col);
            *out = T::from_f32(add.map_or(value, |add| value + add.to_f32()));
        }
    }
}
