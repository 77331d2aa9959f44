// Eight elements of a row whose length need not be a multiple of eight, and of the weights that its columns share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/vec.cuh"

namespace te_fast::norm {

// How many of the eight columns from `col` on are inside.
__device__ inline int width_at(size_t col, size_t cols) {
    return col >= cols ? 0 : static_cast<int>(min(cols - col, static_cast<size_t>(8)));
}

template <bool kVectors, Floating T>
__device__ inline Raw8<T> load_part(const void* from, size_t index, int width) {
    if (width == 0) return zero8<T>();
    const T* at = static_cast<const T*>(from) + index;
    return kVectors ? load8<T>(at) : load8_partial<T>(at, width);
}

template <bool kVectors, Floating T, bool kAlone = false>
__device__ inline void store_part(void* to, size_t index, int width, const Raw8<T>& raw) {
    T* at = static_cast<T*>(to) + index;
    if constexpr (kVectors) {
        store8<T, kAlone>(at, raw);
    } else {
        float x[8];
        unpack8<T>(raw, x);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            if (c < width) at[c] = from_float<T>(x[c]);
        }
    }
}

// Eight elements of gamma or beta, which stay in the first-level cache from row to row.
template <bool kVectors, Floating W>
__device__ inline void load_weight8(const void* from, size_t col, int width, float (&w)[8]) {
    const W* at = static_cast<const W*>(from) + col;
    if constexpr (kVectors) {
        Raw8<W> raw;
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(W) / 2); ++i)
            raw.word[i] = __ldg(reinterpret_cast<const uint4*>(at) + i);
        unpack8<W>(raw, w);
    } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) w[c] = c < width ? to_float(at[c]) : 0.0f;
    }
}

template <bool kVectors>
__device__ inline void load_weight8(const void* from, uint32_t kind, size_t col, int width, float (&w)[8]) {
    switch (static_cast<FloatKind>(kind)) {
        case FloatKind::kF32:
            return load_weight8<kVectors, f32>(from, col, width, w);
        case FloatKind::kF16:
            return load_weight8<kVectors, f16>(from, col, width, w);
        default:
            return load_weight8<kVectors, bf16>(from, col, width, w);
    }
}

}  // namespace te_fast::norm
