// Scaled cast to FP8 in row layout, transposed layout or both, with optional column sums.
//
//   q[r][c] = fp8(float(x[r][c]) * scale)     out[r][c] = q[r][c]     out_t[c][r] = q[r][c], 0 for rows <= r < ld_t
//   dbias[c] = sum over r of float(x[r][c])   (in f32: each thread 8 rows in order, the 16 row groups of a tile in
//                                              order, the tiles t of 8 classes t % 8 in order, the classes in order)
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
    unsigned* counters;  // [tiles_cols]
    uint64_t rows, cols, ld_t;
    uint32_t tiles_rows, tiles_cols;
    uint32_t reverse;    // walk the tensor from its end, where a preceding amax pass left it in L2
    uint32_t unused;
};
static_assert(sizeof(CastTransposeParams) == 120);

// Shared memory of a block; the parts are in use one after the other, with barriers between.
union Shared {
    TransposeBuffer transpose;
    float sums[kPatches][kTile];
    float warp_max[kTileThreads / 32];
};

// Sums the eight columns of each patch over the tile, in the order that the head comment gives.
template <Floating In>
__device__ void write_partial_sums(const Raw8<In> (&patch)[kPatch], const TilePlace& place, float* partial,
                                   float (&sums)[kPatches][kTile]) {
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
    for (int c = 0; c < 8; c += 4) {
        *reinterpret_cast<float4*>(&sums[place.patch_row][place.patch_col * kPatch + c]) =
            make_float4(total[c], total[c + 1], total[c + 2], total[c + 3]);
    }
    __syncthreads();
    const size_t col = place.col0 + threadIdx.x;
    if (threadIdx.x >= kTile || col >= place.cols || place.row0 >= place.rows) return;
    float sum = sums[0][threadIdx.x];
#pragma unroll
    for (int i = 1; i < kPatches; ++i) sum += sums[i][threadIdx.x];
    partial[(place.row0 / kTile) * place.cols + col] = sum;
}

// The last block of a column of tiles adds the tiles' sums.
template <Floating In>
__device__ void reduce_partial_sums(const CastTransposeParams& p, size_t col0, float (&sums)[kPatches][kTile]) {
    constexpr int kClasses = kTileThreads / 32;
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    float total[4] = {0, 0, 0, 0};
    const uint32_t tiles = static_cast<uint32_t>(ceil_div<uint64_t>(p.rows, kTile));
#pragma unroll 4
    for (uint32_t tile = group; tile < tiles; tile += kClasses) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const size_t col = col0 + i * 32 + lane;
            if (col < p.cols) total[i] += __ldcg(p.partial + tile * p.cols + col);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[group][i * 32 + lane] = total[i];
    __syncthreads();
    const size_t col = col0 + threadIdx.x;
    if (threadIdx.x >= kTile || col >= p.cols) return;
    float sum = sums[0][threadIdx.x];
#pragma unroll
    for (int i = 1; i < kClasses; ++i) sum += sums[i][threadIdx.x];
    static_cast<In*>(p.dbias)[col] = from_float<In>(sum);
}

template <bool kVectors, bool kDbias, Floating In, Fp8 Out>
__device__ void cast_tile(const CastTransposeParams& p, const TilePlace& place, Shared& shared) {
    Raw8<In> patch[kPatch];
    load_patch<kVectors, In>(patch, static_cast<const In*>(p.x), place);
    if (p.amax != nullptr) {
        Raw8<In> acc = zero8<In>();
#pragma unroll
        for (int i = 0; i < kPatch; ++i) absmax_into<In>(acc, patch[i]);
        const float amax = block_max<kTileThreads>(absmax8<In>(acc), shared.warp_max);
        if (threadIdx.x == 0) atomic_max_nonnegative(p.amax, amax);
        __syncthreads();
    }
    if constexpr (kDbias) {
        write_partial_sums<In>(patch, place, p.partial, shared.sums);
        __syncthreads();
    }
    if (p.scale == nullptr) return;  // column sums alone

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

template <bool kDbias, Floating In, Fp8 Out>
__device__ void cast_transpose(const CastTransposeParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const uint32_t index = p.reverse != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const TilePlace place(p.rows, p.cols, index / p.tiles_cols, index % p.tiles_cols);
    if (index == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);

    __shared__ Shared shared;
    if (rows_are_vectors<In>(static_cast<const In*>(p.x), p.out, p.cols)) {
        cast_tile<true, kDbias, In, Out>(p, place, shared);
    } else {
        cast_tile<false, kDbias, In, Out>(p, place, shared);
    }
    if constexpr (kDbias) {
        if (is_last_block(p.counters + index % p.tiles_cols, p.tiles_rows)) {
            reduce_partial_sums<In>(p, place.col0, shared.sums);
        }
    }
}

}  // namespace te_fast

#define INSTANCE(symbol, dbias, in, out)                                                                 \
    extern "C" __global__ void __launch_bounds__(te_fast::kTileThreads, te_fast::kTileBlocks<te_fast::in, dbias>) \
        symbol(const __grid_constant__ te_fast::CastTransposeParams p) {                                 \
        te_fast::cast_transpose<dbias, te_fast::in, te_fast::out>(p);                                    \
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
