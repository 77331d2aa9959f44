// Integer helpers and the scale formula that every FP8 recipe shares.
#pragma once

#include <cuda_runtime.h>

#include <concepts>
#include <cstdint>

namespace te_fast {

template <std::integral T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <std::integral T>
__host__ __device__ constexpr T round_up(T a, T b) {
    return ceil_div(a, b) * b;
}

constexpr float kF32Max = 3.402823466e+38f;

// scale = fp8_max / max(amax, eps), 1 where amax is 0, infinite or NaN, `for_inf` where the quotient overflows;
// with `pow2` the mantissa is cleared last. A NaN amax fails every comparison and so gives 1.
__device__ inline float scale_from_amax(float amax, float fp8_max, float eps, float for_inf, bool pow2) {
    if (amax < eps) amax = eps;
    if (!(amax > 0.0f) || isinf(amax)) return 1.0f;
    float scale = __fdiv_rn(fp8_max, amax);
    if (isinf(scale)) scale = for_inf;
    return pow2 ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

// Transposes a 4 x 4 byte matrix held as one word per row.
__device__ inline void transpose_bytes(uint32_t (&word)[4]) {
    const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140);
    const uint32_t low23 = __byte_perm(word[2], word[3], 0x5140);
    const uint32_t high01 = __byte_perm(word[0], word[1], 0x7362);
    const uint32_t high23 = __byte_perm(word[2], word[3], 0x7362);
    word[0] = __byte_perm(low01, low23, 0x5410);
    word[1] = __byte_perm(low01, low23, 0x7632);
    word[2] = __byte_perm(high01, high23, 0x5410);
    word[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace te_fast
