//! Products of groups by cuBLASLt, for GPUs that have no kernel in `cuda/gemm/`: one call for all groups, whose sizes and
//! addresses cuBLASLt reads on the device from a table (`cuda/gemm/grouped_tables.cu` writes it).
//!
//! cuBLAS calls this product experimental. Versions with known faults are refused, by NVIDIA's release notes up to
//! CUDA 13.4 Update 1: before 13.4 its heuristic may find nothing on Blackwell, and from 13.7 on results may be wrong
//! there (6798616, not fixed in 13.8). On Hopper, which needs it for comparisons alone, calls that share a workspace may
//! hang before 13.7 (6456362), and results are wrong with factors on the host before 13.8 (6681084).
#![expect(unsafe_code, reason = "calls into cuBLASLt; every block names who guarantees its arguments")]

use std::ffi::c_void;
use std::mem::size_of;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::sys::{cublasLtHandle_t, cublasLtMatmulAlgo_t};
use te_fast_kernels::constants::gemm::{GROUPED_ADDRESSES, GROUPED_SIZES};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::device::Stream;
use crate::cuda::lt::api::{
    ANY_ADDRESS, CreateGroupedLayout, CublasLt, Descriptors, NOT_SUPPORTED, Status, check, failure,
};
use crate::cuda::lt::attributes::{self as attribute, data_type};
use crate::gemm::grouped::{GroupedGemmSpec, GroupedKind, GroupedScaling};
use crate::gemm::problem::WORKSPACE_BYTES;

const OP: &str = "grouped gemm";
/// Alignment of operands and results, in bytes.
const ALIGNMENT: u64 = 16;
/// Alignment of the table, which lies behind the workspace.
const TABLE_ALIGNMENT: usize = 256;

/// The versions of cuBLAS, as `[first, end)`, whose product of groups is taken on a GPU of this compute capability.
const fn versions(capability: (u32, u32)) -> Option<(usize, usize)> {
    match capability {
        (9, 0) => Some((130_800, usize::MAX)),
        (10, 0 | 3) => Some((130_400, 130_700)),
        _ => None,
    }
}

/// Offsets of a table's arrays, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Table {
    groups: usize,
}

/// An array of addresses.
#[derive(Clone, Copy, Debug)]
enum Addresses {
    A,
    B,
    D,
    AScale,
    BScale,
}

/// An array of sizes.
#[derive(Clone, Copy, Debug)]
enum Sizes {
    Rows,
    N,
    K,
    Pitch,
}

impl Table {
    const fn addresses(self, of: Addresses) -> u64 {
        (of as usize * size_of::<u64>() * self.groups) as u64
    }

    const fn sizes(self, of: Sizes) -> u64 {
        ((GROUPED_ADDRESSES * size_of::<u64>() + of as usize * size_of::<i32>()) * self.groups) as u64
    }

    /// The factor of the product, then that of the former result.
    const fn factors(self) -> u64 {
        ((GROUPED_ADDRESSES * size_of::<u64>() + GROUPED_SIZES * size_of::<i32>()) * self.groups) as u64
    }

    const fn bytes(self) -> usize {
        self.factors() as usize + 2 * size_of::<f32>()
    }

    /// Where it begins in the workspace, whose bytes before it are cuBLASLt's.
    fn offset(self) -> Option<usize> {
        WORKSPACE_BYTES.checked_sub(self.bytes().next_multiple_of(TABLE_ALIGNMENT)).filter(|&rest| rest != 0)
    }
}

/// Sizes of a matrix as cuBLASLt sees it, column by column, and whether it is read transposed.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    rows: Sizes,
    cols: Sizes,
    ld: Sizes,
    transposed: bool,
}

/// B, A and D. Row-major `D = A·Bᵀ` is column-major `Dᵀ = B·Aᵀ`, so that cuBLAS's first operand is B.
fn matrices(spec: &GroupedGemmSpec) -> [Matrix; 3] {
    use Sizes::{K, N, Pitch, Rows};
    let matrix = |rows, cols, ld, transposed| Matrix { rows, cols, ld, transposed };
    match (spec.kind, spec.scaling) {
        (GroupedKind::Rows, _) => {
            let b = if spec.b_k_outermost { matrix(N, K, N, false) } else { matrix(K, N, K, true) };
            [b, matrix(K, Rows, K, false), matrix(N, Rows, N, false)]
        }
        (GroupedKind::WeightGradient, GroupedScaling::None) => {
            [matrix(K, Rows, K, false), matrix(N, Rows, N, true), matrix(K, N, K, false)]
        }
        (GroupedKind::WeightGradient, _) => {
            [matrix(Rows, K, Pitch, true), matrix(Rows, N, Pitch, false), matrix(K, N, K, false)]
        }
    }
}

/// One product's descriptors; the table's address is set when it changes.
#[derive(Debug)]
pub struct GroupedCublasPlan {
    handle: cublasLtHandle_t,
    /// Of B, A and D.
    descriptors: Descriptors<3>,
    matrices: [Matrix; 3],
    algorithm: cublasLtMatmulAlgo_t,
    table: Table,
    /// Where the table begins in the workspace.
    offset: usize,
    is_scaled: bool,
    /// The table's address in the descriptors. A call holds this lock until cuBLASLt has read them.
    address: Mutex<u64>,
}

// SAFETY: descriptors are plain memory of cuBLASLt, not bound to a thread.
unsafe impl Send for GroupedCublasPlan {}
// SAFETY: of what &self reaches, `run` alone writes, to the memory behind the descriptors, and it holds `address` meanwhile.
unsafe impl Sync for GroupedCublasPlan {}

impl GroupedCublasPlan {
    /// Descriptors and algorithm for a product on a GPU of this compute capability.
    ///
    /// # Errors
    /// A product, a GPU or a version of cuBLAS for which cuBLASLt's is not taken, or its refusal.
    pub fn new(cublas: &CublasLt, capability: (u32, u32), spec: &GroupedGemmSpec) -> Result<Self> {
        let &CublasLt { api, handle } = cublas;
        let refused = |reason: String| Error::unsupported(OP, reason);
        let is_known = versions(capability).is_some_and(|(first, end)| (first..end).contains(&api.version));
        let (true, Some(create)) = (is_known, api.grouped_layout_create) else {
            let (major, minor) = capability;
            let version = api.version;
            return Err(refused(format!(
                "cuBLAS {version} is not known to multiply groups rightly on a GPU of sm_{major}{minor}"
            )));
        };
        let table = Table { groups: spec.groups };
        let offset = table.offset().filter(|_| i32::try_from(spec.rows.max(spec.n).max(spec.k)).is_ok());
        let (None, false, Some(offset)) = (spec.bias, spec.scaling == GroupedScaling::Block, offset) else {
            return Err(refused(
                "cuBLASLt multiplies groups without a bias and block scales, of sizes below 2^31".into(),
            ));
        };
        let mut plan = Self {
            handle,
            descriptors: Descriptors::new(api, spec)?,
            matrices: matrices(spec),
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            table,
            offset,
            is_scaled: spec.scaling != GroupedScaling::None,
            address: Mutex::new(0),
        };
        plan.describe(create, spec)?;
        plan.algorithm = plan.choose(cublas, spec)?;
        Ok(plan)
    }

    fn describe(&mut self, create: CreateGroupedLayout, spec: &GroupedGemmSpec) -> Result<()> {
        let [b, a, _] = self.matrices;
        let operation = |matrix: Matrix| if matrix.transposed { attribute::OP_T } else { attribute::OP_N };
        let to = &mut self.descriptors;
        let mut status = to.set(attribute::DESC_TRANSA, &operation(b))
            | to.set(attribute::DESC_TRANSB, &operation(a))
            | to.set(attribute::DESC_POINTER_MODE, &attribute::POINTER_MODE_DEVICE);
        if self.is_scaled {
            status |= to.set(attribute::DESC_FAST_ACCUM, &i8::from(spec.fast_accumulation))
                | to.set(attribute::DESC_A_SCALE_MODE, &attribute::SCALE_PER_GROUP)
                | to.set(attribute::DESC_B_SCALE_MODE, &attribute::SCALE_PER_GROUP)
                | to.set(attribute::DESC_A_SCALE_POINTER, &ANY_ADDRESS)
                | to.set(attribute::DESC_B_SCALE_POINTER, &ANY_ADDRESS);
        }
        check("cublasLtMatmulDescSetAttribute", status, spec)?;
        for (matrix, dtype) in to.matrices.iter_mut().zip([spec.b, spec.a, spec.d]) {
            let any = ANY_ADDRESS as *const c_void;
            // SAFETY: writes one handle, destroyed with the others; the arrays are the device's, and not read here.
            let status = unsafe { create(matrix, data_type(dtype), spec.groups as i32, any, any, any) };
            check("cublasLtGroupedMatrixLayoutCreate", status, spec)?;
        }
        Ok(())
    }

    /// The heuristic's first algorithm, for groups of equal size.
    fn choose(&self, cublas: &CublasLt, spec: &GroupedGemmSpec) -> Result<cublasLtMatmulAlgo_t> {
        let each = (spec.rows / spec.groups.max(1)).max(1);
        let (rows, cols, depth) = match spec.kind {
            GroupedKind::Rows => (spec.n, each, spec.k),
            GroupedKind::WeightGradient => (spec.k, spec.n, each),
        };
        let number = |name, value: usize| (name, value as u64, size_of::<u64>());
        let aligned = |name| (name, ALIGNMENT, size_of::<u32>());
        let [a, b, c, d] = attribute::PREF_MIN_ALIGNMENT.map(aligned);
        let preferences = [
            number(attribute::PREF_MAX_WORKSPACE_BYTES, self.offset),
            number(attribute::PREF_GROUPED_AVERAGE_ROWS, rows),
            number(attribute::PREF_GROUPED_AVERAGE_COLS, cols),
            number(attribute::PREF_GROUPED_AVERAGE_REDUCTION_DIM, depth),
            a,
            b,
            c,
            d,
        ];
        let Descriptors { operation, matrices: [b, a, d], .. } = self.descriptors;
        let found = cublas.candidates(operation, [b, a, d, d], &preferences, spec)?;
        let none = || failure("cublasLtMatmulAlgoGetHeuristic (no algorithm)", NOT_SUPPORTED, spec);
        found.first().map(|&(algorithm, _)| algorithm).ok_or_else(none)
    }

    /// The table, in a workspace of [`WORKSPACE_BYTES`].
    pub(crate) const fn table<'a>(&self, workspace: DevPtr<'a>) -> DevPtr<'a> {
        workspace.offset(self.offset)
    }

    /// Launches the product, whose table is in the workspace.
    ///
    /// # Errors
    /// cuBLASLt's refusal.
    pub(crate) fn run(&self, stream: Stream, workspace: DevPtr<'_>) -> Result<()> {
        let table = self.table(workspace).address() as u64;
        let mut address = self.address.lock().unwrap_or_else(PoisonError::into_inner);
        if *address != table {
            *address = 0;
            check("cublasLtMatrixLayoutSetAttribute", self.point(table), self)?;
            *address = table;
        }
        let array = |of| (table + self.table.addresses(of)) as *mut c_void;
        let factors = table + self.table.factors();
        let &Descriptors { api, operation, matrices: [b, a, d] } = &self.descriptors;
        // SAFETY: descriptors were made for this product; the caller wrote the table, on this stream and device, and
        // checked the tensors that its addresses are in. C is D, of the same layout.
        let status = unsafe {
            (api.matmul)(
                self.handle,
                operation,
                factors as *const c_void,
                array(Addresses::B),
                b,
                array(Addresses::A),
                a,
                (factors + size_of::<f32>() as u64) as *const c_void,
                array(Addresses::D),
                d,
                array(Addresses::D),
                d,
                &raw const self.algorithm,
                workspace.address() as *mut c_void,
                self.offset,
                stream.0 as *mut c_void,
            )
        };
        if status == 0 {
            return Ok(());
        }
        Err(ErrorKind::Cublas { call: "cublasLtMatmul", status, what: format!("{self:?}") }.into())
    }

    /// Sets the addresses of a table's arrays in the descriptors.
    fn point(&self, table: u64) -> Status {
        let (mut status, to) = (0, &self.descriptors);
        for (&layout, matrix) in to.matrices.iter().zip(&self.matrices) {
            for (name, sizes) in [
                (attribute::LAYOUT_ROWS_ARRAY, matrix.rows),
                (attribute::LAYOUT_COLS_ARRAY, matrix.cols),
                (attribute::LAYOUT_LD_ARRAY, matrix.ld),
            ] {
                let array = table + self.table.sizes(sizes);
                // SAFETY: a live layout; the attribute is an address.
                status |= unsafe { (to.api.layout_set)(layout, name, (&raw const array).cast(), size_of::<u64>()) };
            }
        }
        if self.is_scaled {
            status |= to.set(attribute::DESC_A_SCALE_POINTER, &(table + self.table.addresses(Addresses::BScale)))
                | to.set(attribute::DESC_B_SCALE_POINTER, &(table + self.table.addresses(Addresses::AScale)));
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_a_table_lie_behind_each_other() {
        let table = Table { groups: 3 };
        assert_eq!(table.addresses(Addresses::A), 0);
        assert_eq!(table.addresses(Addresses::BScale), 4 * 24);
        assert_eq!(table.sizes(Sizes::Rows), 5 * 24);
        assert_eq!(table.sizes(Sizes::Pitch), 5 * 24 + 3 * 12);
        assert_eq!((table.factors(), table.bytes()), (168, 176));
        assert_eq!(table.offset(), Some(WORKSPACE_BYTES - 256));
        assert_eq!(Table { groups: 1 << 20 }.offset(), None);
    }

    #[test]
    fn versions_with_known_faults_are_not_taken() {
        let taken =
            |capability, version| versions(capability).is_some_and(|(first, end)| (first..end).contains(&version));
        for (capability, version, expected) in [
            ((10, 0), 130_300, false),
            ((10, 0), 130_400, true),
            ((10, 3), 130_602, true),
            ((10, 0), 130_800, false),
            ((9, 0), 130_602, false),
            ((9, 0), 130_802, true),
            ((8, 9), 130_602, false),
            ((12, 0), 130_602, false),
        ] {
            assert_eq!(taken(capability, version), expected, "{capability:?} {version}");
        }
    }
}
