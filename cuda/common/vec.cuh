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

// Stores the two words of a lane's sector. If lanes that are neighbours have sectors side by side, they exchange a word
// and store one lane's sector together, then the other's. By itself, a lane would leave half of a sector to the next
// instruction, and the second-level cache would be busy twice as long.
__device__ inline void store_sector(uint4* to, const uint4& first, const uint4& second) {
    const uint32_t here = __activemask(), lane = threadIdx.x % 32;
    const bool odd = lane % 2 != 0;
    const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to));
    const uint32_t theirs = __shfl_xor_sync(here, address, 1);
    const uint4 sent = odd ? first : second;
    uint4 received;
    received.x = __shfl_xor_sync(here, sent.x, 1);
    received.y = __shfl_xor_sync(here, sent.y, 1);
    received.z = __shfl_xor_sync(here, sent.z, 1);
    received.w = __shfl_xor_sync(here, sent.w, 1);
    const bool both = (here >> (lane & ~1u) & 3) == 3, adjacent = both && theirs - address == (odd ? -32u : 32u);
    if (!adjacent) {
        to[0] = first;
        to[1] = second;
        return;
    }
    if (odd) --to;
    to[0] = odd ? received : first;
    to[2] = odd ? second : received;
}

// 16-byte stores of eight elements; `to` is 16-byte aligned. kAlone: without the neighbour, where the exchange gains
// nothing or finds no registers.
template <Floating T, bool kAlone = false>
__device__ inline void store8(T* to, const Raw8<T>& raw) {
    auto* words = reinterpret_cast<uint4*>(to);
    if constexpr (sizeof(T) == 4 && !kAlone) {
        store_sector(words, raw.word[0], raw.word[1]);
    } else {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) words[i] = raw.word[i];
    }
}

// The first `count` of eight bytes one by one.
__device__ inline void store_bytes_partial(uint8_t* to, uint2 bytes, int count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < count) to[i] = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)));
    }
}

}  // namespace te_fast
