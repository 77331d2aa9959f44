// Scaled cast to FP8 in row layout, transposed layout or both, with optional column sums.
//
//   q[r][c] = fp8(float(x[r][c]) * scale)     out[r][c] = q[r][c]     out_t[c][r] = q[r][c], 0 for rows <= r < ld_t
//   dbias[c] = sum over r of float(x[r][c])   (f32; the order: 8 rows; two such groups; the 8 pairs of a tile; the
//                                              tiles t of each of 8 classes t % 8; the classes)
//
// Launch: cast_transpose: blocks = tiles_cols * tiles_rows with tiles_rows = ceil(max(rows, ld_t) / 128); 256 threads.
// Needs:  contiguous x; any rows, cols, alignment of x and out; ld_t a multiple of 16, out_t 16-byte aligned.
//         out or out_t may be null. dbias: counters zeroed once at allocation, they are zero again after each launch.
// Moves:  sizeof(In) + 1 byte per element and per layout written; dbias adds 8 bytes per column and tile.

#include "common/reduce.cuh"
#include "common/tile.cuh"

namespace te_fast {

struct CastTransposeParams {
    const void* x;
    uint8_t* out;        // null: none
    uint8_t* out_t;      // null: none
    const float* scale;  // null: no cast, column sums alone
    float* scale_inv;    // null: none
    float* amax;         // null: none; else *amax = max(*amax, |x|)
    const float* noop;   // null: none; *noop == 1 leaves every output as it is
    void* dbias;         // dbias kernels alone
    float* partial;      // [tiles_rows][cols]
    unsigned* counters;  // [4 * tiles_cols]
    uint64_t rows, cols, ld_t;
    uint32_t tiles_rows, tiles_cols;
    uint32_t reverse;  // walk the tensor from its end, where a preceding amax pass left it in L2
    uint32_t zero;     // 0
};
static_assert(sizeof(CastTransposeParams) == 120);

constexpr int kWarps = kTileThreads / 32;
template <bool kDbias>
struct Shared {
    TransposeBuffer transpose;
    float sums[kDbias ? kWarps : 1][kTile];
};

constexpr int kSumWarps = kTile / 32;  // each finishes 32 columns

// Sums the columns of the tile, writes them to `partial` and counts the arrival, in the order that the head comment
// gives. True in a warp that was the last to arrive for its 32 columns. This comes before the tile's stores, because
// the fence waits for every store its thread has made. Contains one barrier.
template <Floating In>
__device__ bool sum_columns(const CastTransposeParams& p, const TilePlace& place, const Raw8<In> (&patch)[kPatch],
                            float (&sums)[kWarps][kTile]) {
    float total[8];
    unpack8<In>(patch[0], total);
#pragma unroll
    for (int i = 1; i < kPatch; ++i) {
        float x[8];
        unpack8<In>(patch[i], x);
#pragma unroll
        for (int c = 0; c < 8; ++c) total[c] += x[c];
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) total[c] += __shfl_xor_sync(kFullWarp, total[c], kPatches);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < kPatches) {
#pragma unroll
        for (int c = 0; c < 8; c += 4) {
            *reinterpret_cast<float4*>(&sums[warp][lane * kPatch + c]) =
                make_float4(total[c], total[c + 1], total[c + 2], total[c + 3]);
        }
    }
    __syncthreads();
    if (warp >= kSumWarps) return false;
    float sum = sums[0][threadIdx.x];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum += sums[i][threadIdx.x];
    const size_t col = place.col0 + threadIdx.x;
    if (col < place.cols) p.partial[(place.row0 / kTile) * place.cols + col] = sum;
    __threadfence();
    __syncwarp();
    unsigned arrived = 0;
    if (lane == 0) arrived = atomicInc(p.counters + (place.col0 / kTile) * kSumWarps + warp, p.tiles_rows - 1);
    return __shfl_sync(kFullWarp, arrived, 0) == p.tiles_rows - 1;
}

// The warp that arrived last for its 32 columns adds the tiles' sums.
template <Floating In>
__device__ void finish_columns(const CastTransposeParams& p, size_t col) {
    constexpr uint64_t kClasses = 8;
    __threadfence();
    if (col >= p.cols) return;
    float total[kClasses] = {};
    const uint64_t tiles = ceil_div<uint64_t>(p.rows, kTile);
#pragma unroll 2
    for (uint64_t tile = 0; tile < tiles; tile += kClasses) {
#pragma unroll
        for (uint64_t i = 0; i < kClasses; ++i) {
            if (tile + i < tiles) total[i] += __ldcg(p.partial + (tile + i) * p.cols + col);
        }
    }
#pragma unroll
    for (uint64_t i = 1; i < kClasses; ++i) total[0] += total[i];
    static_cast<In*>(p.dbias)[col] = from_float<In>(total[0]);
}

template <bool kVectors, bool kDbias, Floating In, Fp8 Out>
__device__ void cast_tile(const CastTransposeParams& p, const TilePlace& place, Shared<kDbias>& shared) {
    Raw8<In> patch[kPatch];
    load_patch<kVectors, In>(patch, static_cast<const In*>(p.x), place);
    bool last = false;
    if constexpr (kDbias) {
        last = sum_columns<In>(p, place, patch, shared.sums);
        // A zero that the compiler cannot see: else it keeps the 64 floats of the sums for the cast, and spills.
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
#pragma unroll
            for (int j = 0; j < static_cast<int>(sizeof(In) / 2); ++j) {
                uint4& word = patch[i].word[j];
                word = make_uint4(word.x ^ p.zero, word.y ^ p.zero, word.z ^ p.zero, word.w ^ p.zero);
            }
        }
    }
    if (p.amax != nullptr) {
        Raw8<In> acc = zero8<In>();
#pragma unroll
        for (int i = 0; i < kPatch; ++i) absmax_into<In>(acc, patch[i]);
        const float amax = warp_max(absmax8<In>(acc));
        if (threadIdx.x % 32 == 0) atomic_max_nonnegative(p.amax, amax);
    }
    if (p.scale != nullptr) {
        const float scale = *p.scale;
        uint2 bytes[kPatch];
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            bytes[i] = cast8<Out, In>(patch[i], scale);
            if (p.out != nullptr) store_patch_row<kVectors>(p.out, place, i, bytes[i]);
        }
        if (p.out_t != nullptr) {
            clear_outside(bytes, place);
            store_transposed(p.out_t, p.ld_t, place, bytes, shared.transpose);
        }
    }
    if (kDbias && last) finish_columns<In>(p, place.col0 + threadIdx.x);
}

template <bool kDbias, Floating In, Fp8 Out>
__device__ void cast_transpose(const CastTransposeParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const uint32_t index = p.reverse != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const TilePlace place(p.rows, p.cols, index / p.tiles_cols, index % p.tiles_cols);
    if (index == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);

    __shared__ Shared<kDbias> shared;
    if (rows_are_vectors<In>(static_cast<const In*>(p.x), p.out, p.cols)) {
        cast_tile<true, kDbias, In, Out>(p, place, shared);
    } else {
        cast_tile<false, kDbias, In, Out>(p, place, shared);
    }
}

}  // namespace te_fast

#define INSTANCE(symbol, dbias, in, out)                                                                   \
    extern "C" __global__ void __launch_bounds__(te_fast::kTileThreads, te_fast::kTileBlocks<te_fast::in>) \
        symbol(const __grid_constant__ te_fast::CastTransposeParams p) {                                   \
        te_fast::ptx::wait_for_prior_grids();                                                              \
        te_fast::cast_transpose<dbias, te_fast::in, te_fast::out>(p);                                      \
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
