//! Matrix products of groups of rows (the experts of a mixture), all groups in one launch.
//!
//! The rows of group `e` begin at the sum of `up(split, align)` over the groups before it. The splits are on the
//! device, and the host does not read them: `rows` is a capacity.

use std::sync::Arc;

use te_fast_kernels::constants::common;
use te_fast_kernels::constants::gemm::{
    GROUPED_COLUMNS, GROUPED_COLUMNS_WGRAD, GROUPED_COLUMNS_WGRAD_FAST, GROUPED_PARAMS_BYTES, GROUPED_SHARED,
    GROUPED_TABLES_PARAMS_BYTES, GROUPED_THREADS,
};
use te_fast_kernels::{Fp8, Half, KernelId, image_bytes};

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::device::{CudaQueue, DeviceFacts};
use crate::cuda::lt::grouped::GroupedCublasPlan;
use crate::cuda::tensor_map::{ALIGNMENT, TensorMap, Tiles};
pub use crate::gemm::grouped::{BLOCK, GroupedGemmSpec, GroupedKind, GroupedScaling};
use crate::gemm::problem::GemmPointers;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Backend, Target};
use crate::{params, pointers};

const OP: &str = "grouped gemm";

pointers! {
    /// Tensors of one grouped product.
    pub struct GroupedGemmPointers {
        /// First operand.
        a,
        /// Its inverse scales; null for high precision.
        a_scale,
        /// Second operand.
        b,
        /// Its inverse scales.
        b_scale,
        /// Rows of every group, i64; null where one group has all rows.
        splits,
        /// Bias, null without.
        bias,
        /// Result. Rows of no group stay as they are. With addition, so does the matrix of an empty group.
        d,
        /// [`WORKSPACE_BYTES`](crate::gemm::problem::WORKSPACE_BYTES) bytes on a GPU; null on the host.
        workspace,
    }
}

impl<P: Copy> GroupedGemmPointers<P> {
    /// Those of a dense product's tensors.
    pub(crate) fn of(at: &GemmPointers<P>, splits: P) -> Self {
        let &GemmPointers { x: a, x_scale: a_scale, w: b, w_scale: b_scale, bias, d, workspace, .. } = at;
        Self { a, a_scale, b, b_scale, splits, bias, d, workspace }
    }
}

params! {
    /// Parameters of the kernels in `cuda/gemm/`.
    pub struct GroupedParams<'a> [GROUPED_PARAMS_BYTES] for GroupedRowsFast | GroupedRowsSplit | GroupedRowsBlock
        | GroupedWgradFast | GroupedWgradSplit | GroupedWgradBlock | GroupedWgradStoredSplit | GroupedWgradStoredBlock
        | GroupedRows | GroupedRowsAcross | GroupedWgrad | GroupedWgradStored
        => on_gpus_alone {
        /// A, B, D, and block scales of A and B.
        pub maps: [TensorMap; 5],
        /// One scale of A per group.
        pub a_scale: DevPtr<'a>,
        /// The same of B, or its 128 x 128 scales.
        pub b_scale: DevPtr<'a>,
        /// Rows of every group; null where one group has all rows.
        pub splits: DevPtr<'a>,
        /// Bias, null without.
        pub bias: DevPtr<'a>,
        /// D.
        pub result: DevPtr<'a>,
        /// See [`GroupedGemmSpec`].
        pub rows: u64,
        /// See [`GroupedGemmSpec`].
        pub n: u64,
        /// See [`GroupedGemmSpec`].
        pub k: u64,
        /// See [`GroupedGemmSpec`].
        pub groups: u32,
        /// See [`GroupedGemmSpec`].
        pub align: u32,
        /// Type of D.
        pub d_type: u32,
        /// Type of the bias.
        pub bias_type: u32,
        /// 1 to add to D.
        pub accumulate: u32,
        /// Scales from one row of B's 128 x 128 blocks to the next.
        pub b_scale_pitch: u32,
        /// See [`GroupedGemmSpec`].
        pub counted: u64,
        /// Up to a multiple of the maps' alignment.
        pub unused: [u64; 4],
    }
}

params! {
    /// Parameters of `grouped_tables`.
    pub struct GroupedTablesParams<'a> [GROUPED_TABLES_PARAMS_BYTES] for GroupedTables => on_gpus_alone {
        /// Rows of every group; null where one group has all rows.
        pub splits: DevPtr<'a>,
        /// First operand.
        pub a: DevPtr<'a>,
        /// Second operand.
        pub b: DevPtr<'a>,
        /// Result.
        pub d: DevPtr<'a>,
        /// One scale of A per group.
        pub a_scale: DevPtr<'a>,
        /// The same of B.
        pub b_scale: DevPtr<'a>,
        /// The table that is written.
        pub table: DevPtr<'a>,
        /// Bytes from a row of A to the next one.
        pub a_row: u64,
        /// The same of B.
        pub b_row: u64,
        /// Bytes from a group of B to the next one.
        pub b_group: u64,
        /// Bytes from a row of D to the next one.
        pub d_row: u64,
        /// Bytes from a group of D to the next one.
        pub d_group: u64,
        /// See [`GroupedGemmSpec`].
        pub rows: u64,
        /// See [`GroupedGemmSpec`].
        pub counted: u64,
        /// See [`GroupedGemmSpec`].
        pub groups: u32,
        /// See [`GroupedGemmSpec`].
        pub align: u32,
        /// See [`GroupedGemmSpec`].
        pub n: u32,
        /// See [`GroupedGemmSpec`].
        pub k: u32,
        /// Elements of a line of operands that have the rows innermost.
        pub pitch: u32,
        /// 1 if the zeros behind a group's rows count as its rows.
        pub padded: u32,
        /// 1 to add to D.
        pub accumulate: u32,
        /// Zero.
        pub unused: u32,
    }
}

/// The spec, for the host, which supports more types than the kernels.
fn on_gpus_alone<P>(_: &P, id: KernelId) -> Result<()> {
    Err(Error::state(OP, id.symbol()))
}

/// A checked grouped product.
#[derive(Clone, Debug)]
pub struct GroupedGemmPlan {
    spec: GroupedGemmSpec,
    /// The kernel of Hopper, where it takes the product.
    kernel: Option<Kernel>,
    /// cuBLASLt's product, where it is taken.
    cublas: Option<Arc<GroupedCublasPlan>>,
}

/// A kernel of `cuda/gemm/`.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    id: KernelId,
    /// Columns of its tile.
    columns: usize,
    /// Whether pairs of blocks that share the rows of A are faster than blocks alone (`cuda/README.md`).
    in_pairs: bool,
}

impl GroupedGemmPlan {
    /// Checks `spec`.
    ///
    /// # Errors
    /// Types, scales or options that no grouped product takes.
    pub fn new(spec: GroupedGemmSpec) -> Result<Self> {
        let fp8 = |dtype| matches!(dtype, DType::E4m3 | DType::E5m2);
        let scaled = spec.scaling != GroupedScaling::None;
        if fp8(spec.a) != scaled || fp8(spec.b) != scaled || (!scaled && spec.a != spec.b) {
            let expected = if scaled { "FP8 operands" } else { "two operands of float32, float16 or bfloat16" };
            return Err(Error::dtype(OP, "an operand", expected, if fp8(spec.a) == scaled { spec.b } else { spec.a }));
        }
        if !scaled && spec.a.as_float().is_none() {
            return Err(Error::dtype(OP, "an operand", "float32, float16 or bfloat16", spec.a));
        }
        if spec.a == DType::E5m2 && spec.b == DType::E5m2 {
            let message = "no kernel multiplies E5M2 by E5M2; use E4M3 for one operand";
            return Err(Error::unsupported(OP, message));
        }
        for dtype in [Some(spec.d), spec.bias].into_iter().flatten() {
            if dtype.as_float().is_none() {
                return Err(Error::dtype(OP, "the result or bias", "float32, float16 or bfloat16", dtype));
            }
        }
        let rows = spec.kind == GroupedKind::Rows;
        if rows && spec.accumulate || !rows && spec.bias.is_some() {
            return Err(Error::unsupported(
                OP,
                "a bias goes with rows, an addition to the result with weight gradients",
            ));
        }
        if spec.b_k_outermost && (!rows || scaled) {
            let message = "only high-precision products of rows take B with k outermost; FP8 has its column layout";
            return Err(Error::unsupported(OP, message));
        }
        if spec.align != 1 && !spec.align.is_multiple_of(16) || spec.align == 0 {
            return Err(Error::value(OP, "groups begin at multiples of 1 or of a multiple of 16"));
        }
        if rows && spec.scaling == GroupedScaling::Block && spec.scale_pitch < spec.rows {
            let expected = format!("a pitch of at least {} for the rows' scales", spec.rows);
            return Err(Error::layout(OP, "scale_pitch", expected, spec.scale_pitch));
        }
        if !rows && scaled && !spec.align.is_multiple_of(BLOCK) {
            let expected = "groups at multiples of 128 for an FP8 weight gradient";
            return Err(Error::layout(OP, "align", expected, spec.align));
        }
        Ok(Self { spec, kernel: kernel_of(&spec), cublas: None })
    }

    /// The same product by cuBLASLt.
    #[must_use]
    pub(crate) fn by_cublas(self, plan: GroupedCublasPlan) -> Self {
        Self { cublas: Some(Arc::new(plan)), ..self }
    }

    /// The spec of the plan.
    #[must_use]
    pub const fn spec(&self) -> &GroupedGemmSpec {
        &self.spec
    }

    /// What multiplies, and why; empty for te_fast's kernel, and on the host.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self.cublas {
            Some(_) => "cuBLASLt: te_fast's kernel does not take it on this GPU, or TE_FAST_OWN_GEMM is 0",
            None => "",
        }
    }

    /// Whether a device has a kernel of te_fast's for the product. The host always has one.
    #[must_use]
    pub fn runs_on(&self, facts: &DeviceFacts) -> bool {
        self.kernel.is_some_and(|kernel| facts.is_hopper() && !image_bytes(kernel.id.image()).is_empty())
    }

    /// Runs the product; does nothing without groups, rows or columns of the result.
    ///
    /// # Errors
    /// A null buffer, or the launch fails.
    pub fn run(&self, target: &mut Target<'_>, at: &GroupedGemmPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        if spec.groups == 0 || spec.n == 0 || (spec.k == 0 || spec.rows == 0) && spec.kind == GroupedKind::Rows {
            return Ok(());
        }
        if !target.trace.on_grouped_gemm(spec) {
            return Ok(());
        }
        match &mut target.backend {
            Backend::Host => host::grouped_gemm::run(spec, at),
            Backend::Cuda(queue) => self.launch(queue, at),
        }
    }

    /// Launches the product's kernel, past the trace: for the plan of a dense product, whose own trace has it.
    pub(crate) fn launch(&self, queue: &mut CudaQueue<'_>, at: &GroupedGemmPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        let own = self.kernel.filter(|_| self.runs_on(queue.device.facts()));
        let bytes = spec.groups * spec.n * spec.k * spec.d.size();
        match (&self.cublas, own) {
            (None, None) => Err(self.missing(queue.device.facts())),
            _ if spec.rows == 0 && spec.accumulate => Ok(()),
            _ if spec.rows == 0 => queue.zero(at.d, bytes),
            (Some(cublas), _) => self.launch_cublas(queue, at, cublas),
            (None, Some(kernel)) => self.launch_own(queue, at, kernel),
        }
    }

    fn launch_cublas(
        &self,
        queue: &mut CudaQueue<'_>,
        at: &GroupedGemmPointers<DevPtr<'_>>,
        cublas: &GroupedCublasPlan,
    ) -> Result<()> {
        if at.workspace.is_null() {
            return Err(Error::state(OP, "cuBLASLt's workspace is missing"));
        }
        let grid = Grid::linear(1, 32);
        queue.launch(KernelId::GroupedTables, grid, &self.tables(at, cublas.table(at.workspace)))?;
        cublas.run(queue.stream, at.workspace)
    }

    fn tables<'a>(&self, at: &GroupedGemmPointers<DevPtr<'a>>, table: DevPtr<'a>) -> GroupedTablesParams<'a> {
        let &GroupedGemmSpec { kind, groups, rows, counted, n, k, a, b, d, scaling, .. } = &self.spec;
        let by_rows = kind == GroupedKind::Rows;
        let padded = !by_rows && scaling != GroupedScaling::None;
        let matrix = n * k;
        // Operands of a weight gradient in FP8 have the rows innermost.
        let (a_row, b_row, b_group, d_row, d_group) = match (by_rows, padded) {
            (true, _) => (k * a.size(), 0, matrix * b.size(), n * d.size(), 0),
            (false, true) => (a.size(), b.size(), 0, 0, matrix * d.size()),
            (false, false) => (n * a.size(), k * b.size(), 0, 0, matrix * d.size()),
        };
        GroupedTablesParams {
            splits: at.splits,
            a: at.a,
            b: at.b,
            d: at.d,
            a_scale: at.a_scale,
            b_scale: at.b_scale,
            table,
            a_row: a_row as u64,
            b_row: b_row as u64,
            b_group: b_group as u64,
            d_row: d_row as u64,
            d_group: d_group as u64,
            rows: rows as u64,
            counted: counted as u64,
            groups: groups as u32,
            align: self.spec.align as u32,
            n: n as u32,
            k: k as u32,
            pitch: rows as u32,
            padded: u32::from(padded),
            accumulate: u32::from(self.spec.accumulate),
            unused: 0,
        }
    }

    fn launch_own(
        &self,
        queue: &mut CudaQueue<'_>,
        at: &GroupedGemmPointers<DevPtr<'_>>,
        kernel: Kernel,
    ) -> Result<()> {
        let spec = &self.spec;
        let kernel = wider(spec, kernel, queue.device.facts().multiprocessors as usize);
        let params = self.params(at, kernel.columns)?;
        let width = if spec.kind == GroupedKind::Rows { spec.n } else { spec.k };
        // A pair needs two tiles side by side.
        let cluster = if kernel.in_pairs && width.div_ceil(kernel.columns).is_multiple_of(2) { 2 } else { 1 };
        let blocks = queue.device.facts().multiprocessors / cluster * cluster;
        let grid = Grid::linear(blocks, GROUPED_THREADS).with_shared(GROUPED_SHARED).with_cluster(cluster);
        queue.launch(kernel.id, grid, &params)
    }

    fn missing(&self, facts: &DeviceFacts) -> Error {
        let spec = &self.spec;
        let (major, minor) = facts.capability;
        Error::unsupported(
            OP,
            format_args!(
                "there is no kernel for {} by {} with n = {}, k = {} on a GPU of sm_{major}{minor}: it takes sm_90, FP8, float16 or \
                 bfloat16, and lines of multiples of 16 bytes; nor is cuBLASLt's taken",
                spec.a, spec.b, spec.n, spec.k
            ),
        )
    }

    /// Maps of A, B, D, and of the block scales of A and B.
    fn maps(&self, at: &GroupedGemmPointers<DevPtr<'_>>, columns: usize) -> Result<[TensorMap; 5]> {
        let &GroupedGemmSpec { groups, rows, n, k, a, b, d, scaling, .. } = &self.spec;
        let (wide, line) = (columns as u32, (LINE / a.size()) as u32);
        let d_line = (LINE / d.size()) as u32;
        let scales = |base, sizes, count| {
            TensorMap::new(OP, base, &Tiles { dtype: DType::F32, sizes, tile: [count, 1], swizzled: false })
        };
        let up4 = |count: usize| count.next_multiple_of(4);
        let block = scaling == GroupedScaling::Block;
        let mut maps = [TensorMap::NONE; 5];
        match self.spec.kind {
            GroupedKind::Rows => {
                maps[0] = tiles(at.a, a, [k, rows], [line, HALF])?;
                maps[1] = if self.spec.b_k_outermost {
                    tiles(at.b, b, [n, k, groups], [line, line, 1])?
                } else {
                    tiles(at.b, b, [k, n, groups], [line, wide, 1])?
                };
                maps[2] = tiles(at.d, d, [n, rows, 1], [d_line, HALF, 1])?;
                if block {
                    maps[3] = scales(at.a_scale, [self.spec.scale_pitch, k.div_ceil(BLOCK)], ROW_SCALES)?;
                }
            }
            GroupedKind::WeightGradient => {
                let inner = scaling != GroupedScaling::None;
                maps[0] = tiles(at.a, a, if inner { [rows, n] } else { [n, rows] }, [line, HALF])?;
                maps[1] = if inner {
                    tiles(at.b, b, [rows, k, 1], [line, wide, 1])?
                } else {
                    tiles(at.b, b, [k, rows, 1], [line, line, 1])?
                };
                maps[2] = tiles(at.d, d, [k, n, groups], [d_line, HALF, 1])?;
                if block {
                    maps[3] = scales(at.a_scale, [up4(n), rows.div_ceil(BLOCK)], BLOCK as u32)?;
                    maps[4] = scales(at.b_scale, [up4(k), rows.div_ceil(BLOCK)], wide)?;
                }
            }
        }
        Ok(maps)
    }

    fn params<'a>(&self, at: &GroupedGemmPointers<DevPtr<'a>>, columns: usize) -> Result<GroupedParams<'a>> {
        let &GroupedGemmSpec { groups, rows, counted, n, k, d, .. } = &self.spec;
        let code = |dtype| match dtype {
            DType::F16 => common::FLOAT_F16,
            DType::F32 => common::FLOAT_F32,
            _ => common::FLOAT_BF16,
        };
        Ok(GroupedParams {
            maps: self.maps(at, columns)?,
            a_scale: at.a_scale,
            b_scale: at.b_scale,
            splits: at.splits,
            bias: at.bias,
            result: at.d,
            rows: rows as u64,
            n: n as u64,
            k: k as u64,
            groups: groups as u32,
            align: self.spec.align as u32,
            d_type: code(d),
            bias_type: self.spec.bias.map_or(0, code),
            accumulate: u32::from(self.spec.accumulate),
            b_scale_pitch: k.div_ceil(BLOCK).next_multiple_of(4) as u32,
            counted: counted as u64,
            unused: [0; 4],
        })
    }
}

/// Bytes of a line of a tile.
const LINE: usize = 128;
/// Rows that a warpgroup has of a tile.
const HALF: u32 = 64;
/// Scales of a tile's rows, which begin at a multiple of four.
const ROW_SCALES: u32 = BLOCK as u32 + 4;

/// The map of an operand, whose tiles the tensor cores read.
fn tiles<const N: usize>(base: DevPtr<'_>, dtype: DType, sizes: [usize; N], tile: [u32; N]) -> Result<TensorMap> {
    TensorMap::new(OP, base, &Tiles { dtype, sizes, tile, swizzled: true })
}

/// A weight gradient that is stored takes wider tiles, if these keep all multiprocessors busy.
fn wider(spec: &GroupedGemmSpec, kernel: Kernel, multiprocessors: usize) -> Kernel {
    let id = match kernel.id {
        KernelId::GroupedWgradSplit(fp8) => KernelId::GroupedWgradStoredSplit(fp8),
        KernelId::GroupedWgradBlock(fp8) => KernelId::GroupedWgradStoredBlock(fp8),
        KernelId::GroupedWgrad(half) => KernelId::GroupedWgradStored(half),
        _ => return kernel,
    };
    let tiles = spec.groups * spec.n.div_ceil(BLOCK) * spec.k.div_ceil(GROUPED_COLUMNS);
    if spec.accumulate || tiles < multiprocessors {
        return kernel;
    }
    Kernel { id, columns: GROUPED_COLUMNS, ..kernel }
}

/// The kernel of Hopper.
fn kernel_of(spec: &GroupedGemmSpec) -> Option<Kernel> {
    let whole = |count: usize, dtype: DType| (count * dtype.size()).is_multiple_of(ALIGNMENT);
    let indexed = |count: usize| count < i32::MAX as usize;
    let rows = spec.kind == GroupedKind::Rows;
    let lines = match (rows, spec.scaling) {
        (true, _) if spec.b_k_outermost => whole(spec.k, spec.a) && whole(spec.n, spec.b) && whole(spec.n, spec.d),
        (true, _) => whole(spec.k, spec.a) && whole(spec.n, spec.d) && spec.scale_pitch.is_multiple_of(4),
        (false, GroupedScaling::None) => whole(spec.n, spec.a) && whole(spec.k, spec.b) && whole(spec.k, spec.d),
        (false, _) => whole(spec.rows, spec.a) && whole(spec.k, spec.d),
    };
    let tiles = spec.rows.div_ceil(BLOCK).checked_add(spec.groups)?.checked_mul(spec.n.max(spec.k).div_ceil(64))?;
    let sizes = [spec.rows, spec.n, spec.k, spec.groups, tiles].into_iter().all(indexed);
    if !lines || !sizes || spec.bias == Some(DType::F32) {
        return None;
    }
    let first = match spec.a {
        DType::E4m3 => Ok(Fp8::E4m3),
        DType::E5m2 => Ok(Fp8::E5m2),
        DType::F16 => Err(Half::F16),
        DType::Bf16 => Err(Half::Bf16),
        _ => return None,
    };
    let kernel = |id, columns, in_pairs| Some(Kernel { id, columns, in_pairs });
    match (first, spec.scaling, spec.fast_accumulation) {
        (Ok(_), ..) if spec.b != DType::E4m3 => None,
        (Err(half), ..) if !rows => kernel(KernelId::GroupedWgrad(half), GROUPED_COLUMNS_WGRAD, true),
        (Err(half), ..) if spec.b_k_outermost => kernel(KernelId::GroupedRowsAcross(half), GROUPED_COLUMNS, false),
        (Err(half), ..) => kernel(KernelId::GroupedRows(half), GROUPED_COLUMNS, false),
        (Ok(fp8), GroupedScaling::Block, _) if rows => kernel(KernelId::GroupedRowsBlock(fp8), GROUPED_COLUMNS, true),
        (Ok(fp8), GroupedScaling::Block, _) => kernel(KernelId::GroupedWgradBlock(fp8), GROUPED_COLUMNS_WGRAD, true),
        (Ok(fp8), _, true) if rows => kernel(KernelId::GroupedRowsFast(fp8), GROUPED_COLUMNS, true),
        (Ok(fp8), _, false) if rows => kernel(KernelId::GroupedRowsSplit(fp8), GROUPED_COLUMNS, true),
        (Ok(fp8), _, true) => kernel(KernelId::GroupedWgradFast(fp8), GROUPED_COLUMNS_WGRAD_FAST, false),
        (Ok(fp8), _, false) => kernel(KernelId::GroupedWgradSplit(fp8), GROUPED_COLUMNS_WGRAD, true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A weight gradient of four experts under block scales, by multiprocessors of an H200.
    fn chosen(n: usize, k: usize, accumulate: bool) -> Option<(KernelId, usize)> {
        let spec = GroupedGemmSpec {
            kind: GroupedKind::WeightGradient,
            groups: 4,
            rows: 4096,
            counted: 4096,
            n,
            k,
            a: DType::E5m2,
            b: DType::E4m3,
            d: DType::Bf16,
            scaling: GroupedScaling::Block,
            bias: None,
            accumulate,
            fast_accumulation: false,
            b_k_outermost: false,
            align: BLOCK,
            scale_pitch: 0,
        };
        let kernel = wider(&spec, kernel_of(&spec)?, 132);
        Some((kernel.id, kernel.columns))
    }

    #[test]
    fn stored_weight_gradients_of_many_tiles_have_wider_ones() {
        let usual = Some((KernelId::GroupedWgradBlock(Fp8::E5m2), GROUPED_COLUMNS_WGRAD));
        let wide = Some((KernelId::GroupedWgradStoredBlock(Fp8::E5m2), GROUPED_COLUMNS));
        // 4 x 11 x 3 tiles are one for each multiprocessor.
        assert_eq!(chosen(11 * 128, 3 * 256, false), wide);
        assert_eq!(chosen(10 * 128 + 8, 2 * 256 + 16, false), wide);
        assert_eq!(chosen(10 * 128, 3 * 256, false), usual);
        assert_eq!(chosen(11 * 128, 3 * 256, true), usual);
    }
}
