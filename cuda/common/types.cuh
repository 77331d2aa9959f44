// Element types of the high-precision side, eight elements at a time: what every cast kernel loads per access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "common/constants.cuh"

namespace te_fast {

using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;

template <typename T>
concept Floating = std::same_as<T, f32> || std::same_as<T, f16> || std::same_as<T, bf16>;

// Largest finite value; block scaling uses it where a scale would be infinite.
template <Floating T>
__device__ constexpr float kMaxFinite = 3.402823466e+38f;
template <>
__device__ constexpr float kMaxFinite<f16> = 65504.0f;
template <>
__device__ constexpr float kMaxFinite<bf16> = 3.389531390e+38f;

__device__ inline float to_float(f32 x) { return x; }
__device__ inline float to_float(f16 x) { return __half2float(x); }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }

// Round to nearest even.
template <Floating T>
__device__ inline T from_float(float x) {
    if constexpr (std::same_as<T, f32>) {
        return x;
    } else if constexpr (std::same_as<T, f16>) {
        return __float2half_rn(x);
    } else {
        return __float2bfloat16_rn(x);
    }
}

// Elements of a type known at run time.
enum class FloatKind : uint32_t { kF32 = kFloatF32, kF16 = kFloatF16, kBf16 = kFloatBf16 };

__device__ inline float load_float(const void* from, size_t index, uint32_t kind) {
    switch (static_cast<FloatKind>(kind)) {
        case FloatKind::kF32:
            return static_cast<const f32*>(from)[index];
        case FloatKind::kF16:
            return to_float(static_cast<const f16*>(from)[index]);
        default:
            return to_float(static_cast<const bf16*>(from)[index]);
    }
}

__device__ inline void store_float(void* to, size_t index, uint32_t kind, float x) {
    switch (static_cast<FloatKind>(kind)) {
        case FloatKind::kF32:
            static_cast<f32*>(to)[index] = x;
            break;
        case FloatKind::kF16:
            static_cast<f16*>(to)[index] = from_float<f16>(x);
            break;
        default:
            static_cast<bf16*>(to)[index] = from_float<bf16>(x);
            break;
    }
}

// Eight consecutive elements as 16-byte words: one word of 16-bit types, two of f32.
template <Floating T>
struct Raw8 {
    uint4 word[sizeof(T) / 2];
};
static_assert(sizeof(Raw8<f32>) == kVector * sizeof(f32) && sizeof(Raw8<bf16>) == kVector * sizeof(bf16));

// Two packed 16-bit elements as floats.
template <Floating T>
__device__ inline float2 unpack2(uint32_t pair) {
    if constexpr (std::same_as<T, f16>) {
        return __half22float2(*reinterpret_cast<const __half2*>(&pair));
    } else {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
}

template <Floating T>
__device__ inline uint32_t pack2(float low, float high) {
    if constexpr (std::same_as<T, f16>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
}

template <Floating T>
__device__ inline void unpack8(const Raw8<T>& raw, float (&out)[8]) {
    if constexpr (std::same_as<T, f32>) {
        const uint4 a = raw.word[0], b = raw.word[1];
        const uint32_t bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = __uint_as_float(bits[i]);
    } else {
        const uint32_t pairs[4] = {raw.word[0].x, raw.word[0].y, raw.word[0].z, raw.word[0].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = unpack2<T>(pairs[i]);
            out[2 * i] = two.x;
            out[2 * i + 1] = two.y;
        }
    }
}

template <Floating T>
__device__ inline Raw8<T> pack8(const float (&x)[8]) {
    Raw8<T> raw;
    if constexpr (std::same_as<T, f32>) {
        raw.word[0] =
            make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
        raw.word[1] =
            make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7]));
    } else {
        raw.word[0] =
            make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
    }
    return raw;
}

}  // namespace te_fast
