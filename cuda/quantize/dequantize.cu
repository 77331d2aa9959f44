// FP8 back to high precision: out[r][c] = from_float(float(q[r][c]) * scale_inv of its block).
//
//   dequantize: one scale.  _1d: scale_inv [ceil(cols/128)][scale_ld], one per row and 128 columns.
//   _2d: scale_inv [ceil(rows/128)][scale_ld], one per 128 x 128.
// A transposed layout [cols, ld_t] is dequantised as the tensor it is: rows = cols of the original, ld = ld_t.
//
// Launch: blocks = max(1, ceil(ceil(cols / 8) * rows / 1024)); 256 threads, each four groups of eight elements.
// Needs:  q [rows, ld] with ld >= cols, contiguous out; any alignment.
// Moves:  1 + sizeof(Out) bytes per element.

#include "common/constants.cuh"
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/vec.cuh"

namespace te_fast::quantize {

constexpr int kSteps = kSpan / (kThreads * 8);

struct DequantizeParams {
    const uint8_t* q;
    void* out;
    const float* scale_inv;
    uint64_t rows, cols, ld;
    uint64_t scale_ld;  // last dimension of scale_inv; block kernels alone
};
static_assert(sizeof(DequantizeParams) == kDequantizeParamsBytes);

enum class Blocks { kNone, kOneDimensional, kTwoDimensional };

__device__ inline uint2 load_bytes(const uint8_t* from, int count) {
    if (count == 8 && is_aligned(from, 8)) return *reinterpret_cast<const uint2*>(from);
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < count) word[i / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i % 4));
    }
    return make_uint2(word[0], word[1]);
}

template <Blocks kBlocks>
__device__ inline float scale_of(const DequantizeParams& p, uint64_t row, uint64_t col) {
    if constexpr (kBlocks == Blocks::kNone) {
        return *p.scale_inv;
    } else if constexpr (kBlocks == Blocks::kOneDimensional) {
        return p.scale_inv[col / tile::kTile * p.scale_ld + row];
    } else {
        return p.scale_inv[row / tile::kTile * p.scale_ld + col / tile::kTile];
    }
}

template <Blocks kBlocks, Fp8 In, Floating Out>
__device__ void dequantize(const DequantizeParams& p) {
    const uint64_t groups_per_row = ceil_div<uint64_t>(p.cols, 8), groups = groups_per_row * p.rows;
    Out* out = static_cast<Out*>(p.out);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint64_t group = (static_cast<uint64_t>(blockIdx.x) * kSteps + step) * kThreads + threadIdx.x;
        if (group >= groups) return;
        const uint64_t row = group / groups_per_row, col = group % groups_per_row * 8;
        const int count = static_cast<int>(min(p.cols - col, uint64_t{8}));
        const float scale = scale_of<kBlocks>(p, row, col);
        float x[8];
        decode8<In>(load_bytes(p.q + row * p.ld + col, count), x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= scale;
        Out* to = out + row * p.cols + col;
        if (count == 8 && is_aligned(to, 16)) {
            store8<Out>(to, pack8<Out>(x));
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i < count) to[i] = from_float<Out>(x[i]);
            }
        }
    }
}

#define INSTANCE(symbol, blocks, in, out)                                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ DequantizeParams p) { \
        ptx::wait_for_prior_grids();                                                                            \
        dequantize<Blocks::blocks, in, out>(p);                                                                 \
    }

INSTANCE(dequantize_e4m3_f32, kNone, e4m3, f32)
INSTANCE(dequantize_e4m3_f16, kNone, e4m3, f16)
INSTANCE(dequantize_e4m3_bf16, kNone, e4m3, bf16)
INSTANCE(dequantize_e5m2_f32, kNone, e5m2, f32)
INSTANCE(dequantize_e5m2_f16, kNone, e5m2, f16)
INSTANCE(dequantize_e5m2_bf16, kNone, e5m2, bf16)
INSTANCE(dequantize_1d_e4m3_f32, kOneDimensional, e4m3, f32)
INSTANCE(dequantize_1d_e4m3_f16, kOneDimensional, e4m3, f16)
INSTANCE(dequantize_1d_e4m3_bf16, kOneDimensional, e4m3, bf16)
INSTANCE(dequantize_1d_e5m2_f32, kOneDimensional, e5m2, f32)
INSTANCE(dequantize_1d_e5m2_f16, kOneDimensional, e5m2, f16)
INSTANCE(dequantize_1d_e5m2_bf16, kOneDimensional, e5m2, bf16)
INSTANCE(dequantize_2d_e4m3_f32, kTwoDimensional, e4m3, f32)
INSTANCE(dequantize_2d_e4m3_f16, kTwoDimensional, e4m3, f16)
INSTANCE(dequantize_2d_e4m3_bf16, kTwoDimensional, e4m3, bf16)
INSTANCE(dequantize_2d_e5m2_f32, kTwoDimensional, e5m2, f32)
INSTANCE(dequantize_2d_e5m2_f16, kTwoDimensional, e5m2, f16)
INSTANCE(dequantize_2d_e5m2_bf16, kTwoDimensional, e5m2, bf16)

}  // namespace te_fast::quantize
