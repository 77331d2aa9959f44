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

}  // namespace te_fast
