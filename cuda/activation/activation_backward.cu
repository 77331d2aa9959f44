// Gradient of the activation functions: dx in high precision, as FP8 in row layout, transposed layout or both, with
// optional column sums and the optional gradient of the row scale.
//
//   d[r][c]  = dy[r][c] * s[r]                         s is 1 without row_scale
//   dx[r][c] = d * act'(x)                             gated: dg = d * act'(g) * lin(l), dl = d * act(g) * lin'(l)
//   ds[r]    = sum over c of dy[r][c] * act(x[r][c])   gated: * lin(l)
//   dbias[c] = sum over r of dx[r][c]
//   measured, out, out_t, amax: as in activation.cu, of dx       dx stays in FP32 before all of these
//
// Sums are in f32 in an order that shape and plan fix. ds: 8 columns; a tree over the 16 patches of a tile; the
// tiles t of each of 8 classes t % 8; the classes. dbias: tile/column_sums.cuh.
//
// Launch: activation_backward, activation_gated_backward: blocks = plan.tiles_cols * plan.strips, tiles_cols =
//         ceil(cols / 128) and tiles_rows = ceil(rows / 128), both at least 1; 256 threads; dynamic shared memory
//         48 KiB, gated 56 KiB, gated f32 80 KiB.
// Needs:  as activation.cu. dbias, ds: counters zeroed once at allocation, they are zero again after each launch.
// Moves:  sizeof(In) per element of dy and of x, and per element of dx sizeof(In) for dx and 1 byte per FP8 layout
//         written; dbias adds 8 bytes per column of dx and strip, ds 8 bytes per row and tile.

#include "activation/row.cuh"
#include "common/fp8.cuh"
#include "common/measure.cuh"
#include "tile/column_sums.cuh"

namespace te_fast::activation {

using namespace tile;

struct ActivationBackwardParams {
    const void* dy;
    const void* x;
    void* dx;               // null: none
    uint8_t* out;           // null: none
    uint8_t* out_t;         // null: none
    const void* row_scale;  // null: none
    void* drow_scale;       // null: none
    const float* scale;     // null: no cast
    float* scale_inv;       // null: none
    float* amax;            // null: none; else *amax = max(*amax, |dx|)
    const float* noop;      // null: none; *noop == 1 leaves every output as it is
    float* measured;        // null: none; the scale that dx is quantised with, where it is not cast here
    AmaxWorkspace* workspace;
    void* dbias;         // null: none
    float* partial;      // dbias: [strips][halves * cols], then ds: [tiles_cols][rows]
    unsigned* counters;  // dbias: [tiles_cols], then ds: [strips]
    uint64_t rows, cols, ld_t;
    CurveConstants constants;
    StripPlan plan;
    uint32_t curve, row_scale_kind, interleave, e5m2;
    ScaleRule rule;  // of `measured`
};
static_assert(sizeof(ActivationBackwardParams) == kActivationBackwardParamsBytes);

template <bool kGated, Floating In>
struct BackwardShared {
    TransposeBuffer tile[Halves<kGated>::kCount];
    union {
        RowRing<kInputs<kGated, true>, In> ring;  // while rows are read
        WarpTotals<Halves<kGated>::kCount> sums;  // after that
    };
};
static_assert(sizeof(BackwardShared<false, bf16>) == kBackwardShared);
static_assert(sizeof(BackwardShared<false, f32>) == kBackwardShared);
static_assert(sizeof(BackwardShared<true, bf16>) == kGatedBackwardShared);
static_assert(sizeof(BackwardShared<true, f32>) == kGatedBackwardSharedF32);

// Floats of `partial` that the column sums take.
template <bool kGated>
__device__ inline size_t column_partials(const ActivationBackwardParams& p) {
    return p.dbias == nullptr ? 0 : static_cast<size_t>(p.plan.strips) * Halves<kGated>::kCount * p.cols;
}

// A thread's sums over the rows it has passed.
template <bool kGated>
struct Totals {
    float amax = 0.0f;
    ColumnTotals<Halves<kGated>::kCount> columns = {};

    __device__ void add(int half, const float (&d)[8]) {
#pragma unroll
        for (int c = 0; c < 8; ++c) columns[half][c] += d[c];
    }
};

// The tile at `row0` and `col0`, which lies transposed in shared memory and of which `rows` rows from the thread's
// patch on are inside the tensor. Contains a barrier.
template <bool kGated, Floating In>
__device__ __forceinline__ void store_transposed_halves(const ActivationBackwardParams& p, size_t row0, uint32_t col0,
                                                        int rows, BackwardShared<kGated, In>& shared) {
    constexpr int kCount = Halves<kGated>::kCount;
    const Halves<kGated> halves{p.cols, p.interleave};
#pragma unroll
    for (int half = 0; half < kCount; ++half) clear_rows(shared.tile[half], rows);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < kCount; ++half) {
        store_columns<kGated>(p.out_t, p.ld_t, row0, col0, halves, half, shared.tile[half]);
    }
}

// The rows of the strip: dx stored in every form, this column of tiles' part of ds in `partial`. `kCasts`: it is known
// that dx is cast, written in row layout and nowhere in high precision, and that there is no row scale.
template <bool kVectors, bool kCasts, bool kGated, Floating In, typename ActivationCurve>
__device__ __forceinline__ Totals<kGated> differentiate_rows(const ActivationBackwardParams& p, const Strip& strip,
                                                             const ActivationCurve& curve,
                                                             BackwardShared<kGated, In>& shared) {
    constexpr int kCount = Halves<kGated>::kCount;
    TilePlace place = strip.top(p.rows, p.cols);
    PatchPlace<kGated> patch(place, {p.cols, p.interleave});
    PatchPlace<false> dy_patch(place, {p.cols, 0});
    RowReader<kVectors, kGated, true, In> reader(p.x, p.dy, patch, dy_patch, shared.ring);
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    float* dots = p.partial + column_partials<kGated>(p) + strip.tile_col * p.rows;
    const RowFactor factor{p.row_scale, p.row_scale_kind, p.drow_scale == nullptr ? nullptr : dots};
    Totals<kGated> totals;
    // Row `i`; keep(half, bytes) takes its bytes.
    const auto do_row = [&](int i, auto keep) {
        float d[kCount][8];
        differentiate8<kCasts, kGated, In>(reader.read(i), curve, factor, place.row(i), i < patch.rows, d);
#pragma unroll
        for (int half = 0; half < kCount; ++half) {
            totals.add(half, d[half]);
            if (!kCasts && p.dx != nullptr) store_row8<kVectors>(static_cast<In*>(p.dx), patch, i, half, d[half]);
            absmax_into(totals.amax, d[half]);
            if (!kCasts && p.scale == nullptr) continue;
            const uint2 bytes = p.e5m2 != 0 ? encode8<e5m2>(d[half], scale) : encode8<e4m3>(d[half], scale);
            if (kCasts || p.out != nullptr) store_bytes8<kVectors>(p.out, patch, i, half, bytes);
            keep(half, bytes);
        }
    };
#pragma unroll 1
    for (uint32_t left = strip.tiles; left > 0; --left) {
        if constexpr (kCasts) {
#pragma unroll 1
            for (int above = 0; above < kPatch; above += RowGroup::kRows) {
                RowGroup groups[kCount];
#pragma unroll
                for (int i = 0; i < RowGroup::kRows; ++i) {
                    do_row(above + i, [&](int half, uint2 bytes) { groups[half].row[i] = bytes; });
                }
                if (p.out_t == nullptr) continue;
                if (above == 0) __syncthreads();  // the tile before has been read
#pragma unroll
                for (int half = 0; half < kCount; ++half) groups[half].put(shared.tile[half], above);
            }
        } else {
            if (p.out_t != nullptr) __syncthreads();  // the tile before has been read
#pragma unroll 1
            for (int i = 0; i < kPatch; ++i) {
                do_row(i, [&](int half, uint2 bytes) { own_slot(shared.tile[half], i) = bytes; });
            }
#pragma unroll
            for (int half = 0; half < kCount; ++half) {
                if (p.out_t != nullptr) put_slots(shared.tile[half]);
            }
        }
        if (p.out_t != nullptr) store_transposed_halves(p, place.row0, strip.tile_col * kTile, patch.rows, shared);
        place.row0 += kTile;
        patch.descend();
        dy_patch.descend();
    }
    return totals;
}

// The block that arrives last for the rows of its strip adds the columns of tiles. Contains barriers.
template <bool kGated>
__device__ void sum_rows(const ActivationBackwardParams& p) {
    const Strip strip(p.plan);
    unsigned* counters = p.counters + (p.dbias == nullptr ? 0 : p.plan.tiles_cols);
    if (!is_last_block(counters + strip.index, p.plan.tiles_cols)) return;
    const float* from = p.partial + column_partials<kGated>(p);
    const size_t end = strip.top(p.rows, p.cols).rows;
    for (size_t row = strip.first_row() + threadIdx.x; row < end; row += kTileThreads) {
        store_float(p.drow_scale, row, p.row_scale_kind, sum_partials(from + row, p.plan.tiles_cols, p.rows));
    }
}

// Blocks per multiprocessor that the registers are capped for: the most without a spill, architecture by architecture.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kNarrowGatedBlocks = kGatedBackwardBlocksBf16;
#else
constexpr int kNarrowGatedBlocks = 2;
#endif
template <bool kGated, Floating In>
constexpr int kResidentBlocks = kGated        ? (std::same_as<In, bf16> ? kNarrowGatedBlocks : kGatedBackwardBlocks)
                                : kManyBlocks ? kBackwardBlocks
                                              : 2;

template <bool kGated, Floating In>
__device__ __forceinline__ void activation_backward(const ActivationBackwardParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const Strip strip(p.plan);
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);

    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    auto& shared = *reinterpret_cast<BackwardShared<kGated, In>*>(dynamic);
    const Halves<kGated> halves{p.cols, p.interleave};
    const bool vectors = halves.keeps_vectors() && is_aligned(p.x, 16) && is_aligned(p.dy, 16) &&
                         is_aligned(p.dx, 16) && is_aligned(p.out, 8);
    Totals<kGated> totals;
    const AnyCurve any{p.curve, p.constants};
    if (!vectors) {
        totals = differentiate_rows<false, false, kGated, In>(p, strip, any, shared);
    } else if (p.scale == nullptr || p.out == nullptr || p.dx != nullptr || p.row_scale != nullptr) {
        totals = differentiate_rows<true, false, kGated, In>(p, strip, any, shared);
    } else {
        with_curve<kGated>(p.curve, p.constants, [&](const auto& curve) {
            totals = differentiate_rows<true, true, kGated, In>(p, strip, curve, shared);
        });
    }
    if (p.scale != nullptr && p.amax != nullptr) {
        const float amax = warp_max(totals.amax);
        if (threadIdx.x % 32 == 0) atomic_max_nonnegative(p.amax, amax);
    }
    if (p.measured != nullptr) write_measured<In>(p.measured, p.workspace, p.rule, totals.amax);
    if (p.dbias != nullptr) {
        // Computed again, since keeping the value across the rows would cost registers.
        sum_columns<kGated>(Strip(p.plan), totals.columns, shared.sums, p.plan.strips, halves, p.partial, p.counters,
                            static_cast<In*>(p.dbias));
    }
    if (p.drow_scale != nullptr) sum_rows<kGated>(p);
}

#define INSTANCE(symbol, gated, in)                                                        \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kResidentBlocks<gated, in>) \
        symbol(const __grid_constant__ ActivationBackwardParams p) {                       \
        ptx::wait_for_prior_grids();                                                       \
        activation_backward<gated, in>(p);                                                 \
    }

INSTANCE(activation_backward_f32, false, f32)
INSTANCE(activation_backward_f16, false, f16)
INSTANCE(activation_backward_bf16, false, bf16)
INSTANCE(activation_gated_backward_f32, true, f32)
INSTANCE(activation_gated_backward_f16, true, f16)
INSTANCE(activation_gated_backward_bf16, true, bf16)

}  // namespace te_fast::activation
