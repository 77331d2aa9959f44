// The gradient of a norm, eight columns of a row at a time, and the parameters of its kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "norm/row.cuh"

namespace te_fast::norm {

struct NormBackwardParams {
    const void* dy;
    const void* x;
    const void* gamma;
    const float* mean;  // null: RMSNorm
    const float* rstd;
    const void* add;     // null: none
    void* dx;            // null: none
    void* dgamma;        // null: none
    void* dbeta;         // null: none
    float* partial;      // sums of columns of dgamma, then of dbeta: [rows that were summed apart][cols] each
    float* sums;         // norm_backward_sums, norm_backward_tiles: RowSums [rows]
    unsigned* counters;  // zero between launches
    uint32_t rows, cols;
    uint32_t weight_kind, zero_centered;
    uint32_t team, stages;  // norm_backward
    uint32_t tiles_cols;    // norm_backward_tiles: tiles along the columns
    uint32_t chunk;         // norm_backward_tiles: rows of a tile; norm_backward_cluster: columns of a block
};
static_assert(sizeof(NormBackwardParams) == kNormBackwardParamsBytes);

// Statistics of the forward.
struct RowStats {
    float mean, rstd;
};

__device__ inline RowStats load_stats(const NormBackwardParams& p, uint32_t row) {
    if (row >= p.rows) return {0.0f, 0.0f};
    return {p.mean == nullptr ? 0.0f : __ldg(p.mean + row), __ldg(p.rstd + row)};
}

// Over a row, of g * dy and of g * dy * h: sums, in the end means.
struct RowSums {
    float plain, normed;

    __device__ void finish(const NormBackwardParams& p, float reciprocal) {
        plain = p.mean == nullptr ? 0.0f : plain * reciprocal;
        normed *= reciprocal;
    }
};

// dy and x of eight columns.
struct Columns8 {
    float dy[8], x[8];

    Columns8() = default;

    template <Floating In>
    __device__ Columns8(const Raw8<In>& raw_dy, const Raw8<In>& raw_x) {
        unpack8<In>(raw_dy, dy);
        unpack8<In>(raw_x, x);
    }

    // x, elements of In, becomes h.
    template <Floating In>
    __device__ void normalise(const RowStats& stats) {
        const float shift = -stats.mean * stats.rstd;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            // As the forward does: of FP32, one FMA would lose the digits that a mean far from 0 has in common with x.
            x[c] = sizeof(In) == 4 ? (x[c] - stats.mean) * stats.rstd : fmaf(x[c], stats.rstd, shift);
        }
    }

    // After normalise.
    __device__ void add_to(float (&dgamma)[8], float (&dbeta)[8]) const {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            dgamma[c] = fmaf(dy[c], x[c], dgamma[c]);
            dbeta[c] += dy[c];
        }
    }

    // dy becomes g * dy.
    __device__ void weigh(const float (&factor)[8]) {
#pragma unroll
        for (int c = 0; c < 8; ++c) dy[c] *= factor[c];
    }

    // After weigh.
    __device__ void add_to(RowSums& sums) const {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            sums.plain += dy[c];
            sums.normed = fmaf(dy[c], x[c], sums.normed);
        }
    }

    // After weigh.
    __device__ void gradient(const RowStats& stats, const RowSums& means, float (&dx)[8]) const {
#pragma unroll
        for (int c = 0; c < 8; ++c) dx[c] = (dy[c] + fmaf(x[c], -means.normed, -means.plain)) * stats.rstd;
    }
};

// g of eight columns; zeros behind the end of the row.
template <bool kVectors>
__device__ inline void load_factor(const NormBackwardParams& p, size_t col, int width, float (&factor)[8]) {
    load_weight8<kVectors>(p.gamma, p.weight_kind, col, width, factor);
    if (p.zero_centered == 0) return;
#pragma unroll
    for (int c = 0; c < 8; ++c) factor[c] += 1.0f;
}

template <Floating In>
__device__ inline bool rows_are_vectors(const NormBackwardParams& p) {
    return p.cols % 8 == 0 && is_aligned(p.dy, 16) && is_aligned(p.x, 16) && is_aligned(p.add, 16) &&
           is_aligned(p.dx, 16);
}

__device__ inline float& element(float4& four, int i) { return (&four.x)[i]; }

}  // namespace te_fast::norm
