// Eight elements of a row, forward and backward: for tensors (activation.cu, activation_backward.cu) and for groups of
// rows (activation_groups.cu, activation_groups_backward.cu), so that both have the same bits.
#pragma once

#include "activation/curves.cuh"
#include "common/reduce.cuh"
#include "tile/strip.cuh"

namespace te_fast::activation {

using namespace tile;

// Eight elements of y before the row's factor.
template <bool kGated, Floating In, typename ActivationCurve>
__device__ inline void activate8(const RowInputs<kGated, false, In>& in, const ActivationCurve& curve, float (&y)[8]) {
    if constexpr (std::same_as<ActivationCurve, AnyCurve>) {
        return with_curve<kGated>(curve.kind, curve.constants, [&](const auto& c) { activate8<kGated, In>(in, c, y); });
    } else {
        unpack8<In>(in.tensor[0], y);
#pragma unroll
        for (int c = 0; c < 8; ++c) y[c] = curve.value(y[c]);
        if constexpr (kGated) {
            float l[8];
            unpack8<In>(in.tensor[1], l);
#pragma unroll
            for (int c = 0; c < 8; ++c) y[c] *= curve.linear(l[c]);
        }
    }
}

// Data that the eight elements of a row share.
struct RowFactor {
    const void* scale;  // null: 1
    uint32_t kind;
    float* dots;  // null: none; this column of tiles' sums of dy * y, by row
};

// Eight elements of one row: d * s into `d`, and the sum over the tile's row of dy * y into row.dots.
template <bool kCasts, bool kGated, Floating In, typename ActivationCurve>
__device__ inline void differentiate8(const RowInputs<kGated, true, In>& in, const ActivationCurve& curve,
                                      const RowFactor& factor, size_t row, bool inside,
                                      float (&d)[Halves<kGated>::kCount][8]) {
    float dy[8], g[8], l[8];
    unpack8<In>(in.tensor[Halves<kGated>::kCount], dy);
    unpack8<In>(in.tensor[0], g);
    if constexpr (kGated) unpack8<In>(in.tensor[1], l);
    float s = 1.0f, dot = 0.0f;
    if (!kCasts && factor.scale != nullptr && inside) s = load_float(factor.scale, row, factor.kind);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const ValueSlope act = curve.pair(g[c]);
        if constexpr (kGated) {
            const ValueSlope lin = curve.linear_pair(l[c]);
            if constexpr (!kCasts) dot = fmaf(dy[c], act.value * lin.value, dot);
            const float up = kCasts ? dy[c] : dy[c] * s;
            d[0][c] = up * lin.value * act.slope;
            d[1][c] = up * act.value * lin.slope;
        } else {
            if constexpr (!kCasts) dot = fmaf(dy[c], act.value, dot);
            d[0][c] = (kCasts ? dy[c] : dy[c] * s) * act.slope;
        }
    }
    if (!kCasts && factor.dots != nullptr) {
#pragma unroll
        for (int lane = kPatches / 2; lane > 0; lane /= 2) dot += __shfl_xor_sync(kFullWarp, dot, lane);
        // The first column of the tile is inside in every thread that stores.
        if (threadIdx.x % kPatches == 0 && inside) factor.dots[row] = dot;
    }
}

template <bool kCasts, bool kGated, Floating In>
__device__ inline void differentiate8(const RowInputs<kGated, true, In>& in, const AnyCurve& any,
                                      const RowFactor& factor, size_t row, bool inside,
                                      float (&d)[Halves<kGated>::kCount][8]) {
    with_curve<kGated>(any.kind, any.constants, [&](const auto& curve) {
        differentiate8<kCasts, kGated, In>(in, curve, factor, row, inside, d);
    });
}

}  // namespace te_fast::activation
