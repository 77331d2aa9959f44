// Loads and stores of eight elements: one 16-byte access where alignment allows it, single elements where not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/ptx.cuh"
#include "common/types.cuh"

namespace te_fast {

__device__ inline bool is_aligned(const void* pointer, unsigned bytes) {
    return (reinterpret_cast<uintptr_t>(pointer) & (bytes - 1)) == 0;
}

// 16-byte loads of elements that are read once; `from` is 16-byte aligned. kApart: the thread's other half of a sector
// of 32 bytes comes by another load, as for the two words of eight f32.
template <Floating T, bool kApart = sizeof(T) == 4>
__device__ inline Raw8<T> load8(const T* from) {
    Raw8<T> raw;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
        const uint4* at = reinterpret_cast<const uint4*>(from) + i;
        raw.word[i] = kApart ? ptx::load(at) : ptx::load_once(at);
    }
    return raw;
}

template <Floating T>
__device__ inline Raw8<T> zero8() {
    Raw8<T> raw;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) raw.word[i] = make_uint4(0, 0, 0, 0);
    return raw;
}

// The first `count` of eight elements one by one, zeros behind them.
template <Floating T>
__device__ inline Raw8<T> load8_partial(const T* from, int count) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i < count ? to_float(from[i]) : 0.0f;
    return pack8<T>(x);
}

template <Floating T>
__device__ inline void store8(T* to, const Raw8<T>& raw) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) reinterpret_cast<uint4*>(to)[i] = raw.word[i];
}

// The first `count` of eight bytes one by one.
__device__ inline void store_bytes_partial(uint8_t* to, uint2 bytes, int count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < count) to[i] = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)));
    }
}

}  // namespace te_fast
