// y = alpha * x + r + b: scaling, addition of a tensor and of a row, conversion between types, in any combination.
// Computed in FP32 in this order, rounded once to y's type. y may be x or r of the same type.
//
// Launch: blocks = ceil(rows * ceil(cols / 8) / 256), 256 threads, eight columns of a row each.
// Needs:  contiguous x, r, y of rows x cols, b of cols; 16-byte aligned rows of all take the vector path.
// Moves:  sizeof(x) + sizeof(y) bytes per element, + sizeof(r) with r.

#include "common/constants.cuh"
#include "common/vec.cuh"

namespace te_fast::quantize {

struct AffineParams {
    const void* x;
    const void* r;  // of r_type; null: none
    const void* b;  // of b_type; null: none
    void* y;
    uint64_t rows;
    uint64_t cols;
    float alpha;
    uint32_t y_type;  // FloatKind
    uint32_t b_type;
    uint32_t r_type;
};
static_assert(sizeof(AffineParams) == kAffineParamsBytes);

template <Floating T>
__device__ void load_row(const void* from, uint64_t index, int count, float (&out)[8]) {
    const T* row = static_cast<const T*>(from) + index;
    if (count == 8 && is_aligned(row, 16)) {
        unpack8<T>(load8<T>(row), out);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = i < count ? to_float(row[i]) : 0.0f;
    }
}

__device__ void load_typed(const void* from, uint32_t type, uint64_t index, int count, float (&out)[8]) {
    if (type == 0) {
        load_row<f32>(from, index, count, out);
    } else if (type == 1) {
        load_row<f16>(from, index, count, out);
    } else {
        load_row<bf16>(from, index, count, out);
    }
}

template <Floating T>
__device__ void store_row(void* to, uint64_t index, int count, const float (&values)[8]) {
    T* row = static_cast<T*>(to) + index;
    if (count == 8 && is_aligned(row, 16)) {
        store8<T>(row, pack8<T>(values));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < count) row[i] = from_float<T>(values[i]);
        }
    }
}

template <Floating In>
__device__ void affine(const AffineParams& p) {
    const uint64_t group = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const bool whole = p.cols % 8 == 0;
    const uint64_t in_row = (p.cols + 7) / 8, groups = p.rows * in_row;
    if (group >= groups) return;
    uint64_t index = group * 8, col = 0;
    int count = 8;
    if (!whole || p.b != nullptr) {
        const uint64_t row = group / in_row;
        col = (group - row * in_row) * 8;
        index = row * p.cols + col;
        count = static_cast<int>(min(p.cols - col, uint64_t{8}));
    }
    float x[8], other[8];
    load_row<In>(p.x, index, count, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= p.alpha;
    if (p.r != nullptr) {
        load_typed(p.r, p.r_type, index, count, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __fadd_rn(x[i], other[i]);
    }
    if (p.b != nullptr) {
        load_typed(p.b, p.b_type, col, count, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __fadd_rn(x[i], other[i]);
    }
    if (p.y_type == 0) {
        store_row<f32>(p.y, index, count, x);
    } else if (p.y_type == 1) {
        store_row<f16>(p.y, index, count, x);
    } else {
        store_row<bf16>(p.y, index, count, x);
    }
}

#define INSTANCE(symbol, in)                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ AffineParams p) { \
        ptx::wait_for_prior_grids();                                                                        \
        affine<in>(p);                                                                                      \
    }

INSTANCE(affine_f32, f32)
INSTANCE(affine_f16, f16)
INSTANCE(affine_bf16, bf16)

}  // namespace te_fast::quantize
