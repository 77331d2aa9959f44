// Scaled cast to FP8 in row layout, transposed layout or both, with optional column sums.
//
//   q[r][c] = fp8(float(x[r][c]) * scale)     out[r][c] = q[r][c]     out_t[c][r] = q[r][c], 0 for rows <= r < ld_t
//   dbias[c] = sum over r of float(x[r][c])   (f32, in the order of tile/column_sums.cuh)
//
// Launch: blocks = plan.tiles_cols * plan.strips, tiles_cols = ceil(cols / 128) and tiles_rows = ceil(rows / 128), both
//         at least 1; 256 threads; 48 KiB of dynamic shared memory. The plan is any that covers the tiles.
// Needs:  contiguous x; any rows, cols, alignment of x and out; ld_t a multiple of 16, out_t 16-byte aligned.
//         out or out_t may be null. dbias: counters zeroed once at allocation, they are zero again after each launch.
// Moves:  sizeof(In) + 1 byte per element and per layout written; dbias adds 8 bytes per column and strip.

#include "common/constants.cuh"
#include "common/fp8.cuh"
#include "tile/column_sums.cuh"

namespace te_fast::quantize {

using namespace tile;

struct CastTransposeParams {
    const void* x;
    uint8_t* out;        // null: none
    uint8_t* out_t;      // null: none
    const float* scale;  // null: no cast, column sums alone
    float* scale_inv;    // null: none
    float* amax;         // null: none; else *amax = max(*amax, |x|)
    const float* noop;   // null: none; *noop == 1 leaves every output as it is
    void* dbias;         // dbias kernels alone
    float* partial;      // [strips][cols]
    unsigned* counters;  // [tiles_cols]
    uint64_t rows, cols, ld_t;
    StripPlan plan;
    uint32_t reverse;  // walk the tensor from its end, where a preceding amax pass left it in L2
};
static_assert(sizeof(CastTransposeParams) == kCastTransposeParamsBytes);

template <Floating In>
struct CastShared {
    TransposeBuffer tile;
    union {
        RowRing<1, In> ring;  // while rows are read
        WarpTotals<1> sums;   // after that
    };
};
static_assert(sizeof(CastShared<bf16>) == kCastTransposeShared && sizeof(CastShared<f32>) == kCastTransposeShared);

// The rows of the strip.
template <bool kVectors, bool kDbias, Floating In, Fp8 Out>
__device__ __forceinline__ void cast_rows(const CastTransposeParams& p, const Strip& strip, CastShared<In>& shared,
                                          ColumnTotals<1>& totals) {
    TilePlace place = strip.top(p.rows, p.cols);
    PatchPlace<false> patch(place, {p.cols, 0});
    RowReader<kVectors, false, false, In> reader(p.x, nullptr, patch, patch, shared.ring);
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    Raw8<In> amax = zero8<In>();
#pragma unroll 1
    for (uint32_t left = strip.tiles; left > 0; --left) {
#pragma unroll 1
        for (int above = 0; above < kPatch; above += RowGroup::kRows) {
            RowGroup group;
#pragma unroll
            for (int i = 0; i < RowGroup::kRows; ++i) {
                const Raw8<In> raw = reader.read(above + i).tensor[0];
                absmax_into<In>(amax, raw);
                if constexpr (kDbias) {
                    float x[8];
                    unpack8<In>(raw, x);
#pragma unroll
                    for (int c = 0; c < 8; ++c) totals[0][c] += x[c];
                }
                group.row[i] = cast8<Out, In>(raw, scale);
                if (p.out != nullptr) store_bytes8<kVectors>(p.out, patch, above + i, 0, group.row[i]);
            }
            if (p.out_t == nullptr) continue;
            if (above == 0) __syncthreads();  // the tile before has been read
            group.put(shared.tile, above);
        }
        if (p.out_t != nullptr) {
            clear_rows(shared.tile, patch.rows);
            __syncthreads();
            store_columns<false>(p.out_t, p.ld_t, place.row0, strip.tile_col * kTile, {p.cols, 0}, 0, shared.tile);
        }
        place.row0 += kTile;
        patch.descend();
    }
    if (p.amax != nullptr) {
        const float largest = warp_max(absmax8<In>(amax));
        if (threadIdx.x % 32 == 0) atomic_max_nonnegative(p.amax, largest);
    }
}

// Blocks per multiprocessor that the registers are capped for: the most without a spill.
template <bool kDbias>
constexpr int kCastBlocks = !kManyBlocks ? 2
                            : kDbias     ? kSummingBlocks
                                         : 4;

template <bool kDbias, Floating In, Fp8 Out>
__device__ void cast_transpose(const CastTransposeParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const Strip strip(p.plan, p.reverse != 0 ? gridDim.x - 1 - ptx::block_index() : ptx::block_index());
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);

    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    auto& shared = *reinterpret_cast<CastShared<In>*>(dynamic);
    ColumnTotals<1> totals = {};
    if (rows_are_vectors<In>(static_cast<const In*>(p.x), p.out, p.cols)) {
        cast_rows<true, kDbias, In, Out>(p, strip, shared, totals);
    } else {
        cast_rows<false, kDbias, In, Out>(p, strip, shared, totals);
    }
    if constexpr (kDbias) {
        sum_columns<false>(strip, totals, shared.sums, p.plan.strips, {p.cols, 0}, p.partial, p.counters,
                           static_cast<In*>(p.dbias));
    }
}

#define INSTANCE(symbol, dbias, in, out)                                           \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kCastBlocks<dbias>) \
        symbol(const __grid_constant__ CastTransposeParams p) {                    \
        ptx::wait_for_prior_grids();                                               \
        cast_transpose<dbias, in, out>(p);                                         \
    }

INSTANCE(cast_transpose_f32_e4m3, false, f32, e4m3)
INSTANCE(cast_transpose_f32_e5m2, false, f32, e5m2)
INSTANCE(cast_transpose_f16_e4m3, false, f16, e4m3)
INSTANCE(cast_transpose_f16_e5m2, false, f16, e5m2)
INSTANCE(cast_transpose_bf16_e4m3, false, bf16, e4m3)
INSTANCE(cast_transpose_bf16_e5m2, false, bf16, e5m2)
INSTANCE(cast_transpose_dbias_f32_e4m3, true, f32, e4m3)
INSTANCE(cast_transpose_dbias_f32_e5m2, true, f32, e5m2)
INSTANCE(cast_transpose_dbias_f16_e4m3, true, f16, e4m3)
INSTANCE(cast_transpose_dbias_f16_e5m2, true, f16, e5m2)
INSTANCE(cast_transpose_dbias_bf16_e4m3, true, bf16, e4m3)
INSTANCE(cast_transpose_dbias_bf16_e5m2, true, bf16, e5m2)

}  // namespace te_fast::quantize
