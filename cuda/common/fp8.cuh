// FP8 conversion: saturating round-to-nearest-even with the hardware's `cvt.rn.satfinite` from sm_89 on and the
// same bits in software before. Infinity saturates; NaN becomes 0x7F whatever its sign.
#pragma once

#include <cuda_fp8.h>

#include <concepts>
#include <cstdint>

#include "common/types.cuh"

namespace te_fast {

struct e4m3 {
    static constexpr float kMax = 448.0f;
    static constexpr __nv_fp8_interpretation_t kKind = __NV_E4M3;
    static constexpr uint32_t kMantissaBits = 3;
    static constexpr uint32_t kBias = 7;
};

struct e5m2 {
    static constexpr float kMax = 57344.0f;
    static constexpr __nv_fp8_interpretation_t kKind = __NV_E5M2;
    static constexpr uint32_t kMantissaBits = 2;
    static constexpr uint32_t kBias = 15;
};

template <typename T>
concept Fp8 = std::same_as<T, e4m3> || std::same_as<T, e5m2>;

template <Fp8 Out>
__device__ inline uint32_t fp8_in_software(float x) {
    constexpr uint32_t shift = 23 - Out::kMantissaBits;
    constexpr uint32_t min_normal = (127 - Out::kBias + 1) << 23;
    // Adding 2^k with one unit in the last place equal to the smallest subnormal rounds to a multiple of it.
    constexpr uint32_t magic = (127 + 23 - (Out::kBias - 1 + Out::kMantissaBits)) << 23;
    const uint32_t bits = __float_as_uint(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;
    const uint32_t clamped = min(magnitude, __float_as_uint(Out::kMax));
    const uint32_t rounded = clamped + ((1u << (shift - 1)) - 1) + ((clamped >> shift) & 1);
    const uint32_t normal = (rounded >> shift) - ((127 - Out::kBias) << Out::kMantissaBits);
    const uint32_t subnormal = __float_as_uint(__uint_as_float(clamped) + __uint_as_float(magic)) - magic;
    return (clamped >= min_normal ? normal : subnormal) | ((bits >> 24) & 0x80u);
}

// `low` in the low byte.
template <Fp8 Out>
__device__ inline uint32_t fp8_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, Out::kKind);
#else
    return fp8_in_software<Out>(low) | (fp8_in_software<Out>(high) << 8);
#endif
}

// Eight scaled elements, the first in the lowest byte.
template <Fp8 Out, Floating In>
__device__ inline uint2 cast8(const Raw8<In>& raw, float scale) {
    float x[8];
    unpack8<In>(raw, x);
    return make_uint2(fp8_pair<Out>(x[0] * scale, x[1] * scale) | (fp8_pair<Out>(x[2] * scale, x[3] * scale) << 16),
                      fp8_pair<Out>(x[4] * scale, x[5] * scale) | (fp8_pair<Out>(x[6] * scale, x[7] * scale) << 16));
}

// The same with a scale per element.
template <Fp8 Out, Floating In>
__device__ inline uint2 cast8(const Raw8<In>& raw, const float (&scale)[8]) {
    float x[8];
    unpack8<In>(raw, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale[i];
    return make_uint2(fp8_pair<Out>(x[0], x[1]) | (fp8_pair<Out>(x[2], x[3]) << 16),
                      fp8_pair<Out>(x[4], x[5]) | (fp8_pair<Out>(x[6], x[7]) << 16));
}

// Eight scaled values as FP8.
template <Fp8 Out>
__device__ inline uint2 encode8(const float (&x)[8], float scale) {
    return make_uint2(fp8_pair<Out>(x[0] * scale, x[1] * scale) | (fp8_pair<Out>(x[2] * scale, x[3] * scale) << 16),
                      fp8_pair<Out>(x[4] * scale, x[5] * scale) | (fp8_pair<Out>(x[6] * scale, x[7] * scale) << 16));
}

// Eight FP8 bytes as floats (exact).
template <Fp8 In>
__device__ inline void decode8(uint2 bytes, float (&out)[8]) {
    const uint32_t words[2] = {bytes.x, bytes.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto pair = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (16 * (i % 2)));
        const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, In::kKind)));
        out[2 * i] = two.x;
        out[2 * i + 1] = two.y;
    }
}

}  // namespace te_fast
