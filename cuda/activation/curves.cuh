// Activation functions and their derivatives in FP32. Each curve is y = act(g) or, gated, y = act(g) * lin(l).
//
//   gelu     g * sigmoid(2 k (g + 0.044715 g^3)), k = sqrt(2 / pi): 0.5 g (1 + tanh(k (g + 0.044715 g^3)))
//   swish    g * sigmoid(alpha g)                 alpha 1: SiLU, 1.702: quick GELU
//   clamped  min(g, limit) * sigmoid(alpha min(g, limit)),  lin = clamp(l, -limit, limit) + offset
//   relu     max(g, 0)
//   srelu    max(g, 0)^2
//   sigmoid  sigmoid(g)
//   situ     beta1 tanh(g / beta1) sigmoid(g),              lin = beta2 tanh(l / beta2)
//
// sigmoid and tanh come from 2^x and 1/x of the special-function unit: 5e-7 of the value, except that results below
// 2^-118 may be 0. NaN stays NaN everywhere; the gradient of a clamp is 1 at its ends, that of max(g, 0) is 0 at 0.
#pragma once

#include <cstdint>

#include "common/constants.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"

namespace te_fast::activation {

enum class CurveKind : uint32_t {
    kGelu = kCurveGelu,
    kSwish = kCurveSwish,
    kClamped = kCurveClamped,
    kRelu = kCurveRelu,
    kSquaredRelu = kCurveSquaredRelu,
    kSigmoid = kCurveSigmoid,
    kSitu = kCurveSitu,
};

// Constants of the curves that have some; 0 elsewhere.
struct CurveConstants {
    float alpha, limit, offset, beta1, beta2;
};

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kGeluLinear = 1.5957691216057308f;      // 2 k
constexpr float kGeluCubic = 0.07135481627159999f;      // 2 k 0.044715
constexpr float kGeluSlopeCubic = 0.2140644488147999f;  // its derivative, over g^2

struct ValueSlope {
    float value, slope;
};

// sigmoid(-t / log2(e)).
__device__ inline float sigmoid_exp2(float t) { return ptx::reciprocal_fast(1.0f + ptx::exp2_fast(t)); }

// sigmoid and 1 - sigmoid of -t / log2(e), both to full relative precision, except that `rest` is 0 where `value` is 0;
// its factor is 0 there, too.
struct SigmoidPair {
    float value, rest;
    __device__ explicit SigmoidPair(float t) {
        const float z = ptx::exp2_fast(t);
        value = ptx::reciprocal_fast(1.0f + z);
        rest = fminf(z, kF32Max) * value;  // infinity times zero would be NaN
    }
};

// tanh(y) and its derivative.
__device__ inline ValueSlope tanh_pair(float y) {
    const float z = ptx::exp2_fast(-2.0f * kLog2E * fabsf(y)), r = ptx::reciprocal_fast(1.0f + z), t = y * y;
    // Minimax over [0, 0.6] of (tanh(y) / y - 1) / y^2, to 3e-9.
    float poly = -0.005895157810300589f;
    poly = fmaf(poly, t, 0.020795971155166626f);
    poly = fmaf(poly, t, -0.053783830255270004f);
    poly = fmaf(poly, t, 0.13331924378871918f);
    poly = fmaf(poly, t, -0.33333298563957214f);
    const float small = fmaf(y * t, poly, y), large = copysignf((1.0f - z) * r, y);
    return {fabsf(y) < 0.6f ? small : large, 4.0f * z * r * r};
}

// The linear half of curves without a function for it.
struct PlainLinear {
    __device__ float linear(float l) const { return l; }
    __device__ ValueSlope linear_pair(float l) const { return {l, 1.0f}; }
};

template <CurveKind kKind>
struct Curve;

template <>
struct Curve<CurveKind::kGelu> : PlainLinear {
    __device__ explicit Curve(const CurveConstants&) {}
    __device__ float exponent(float g) const { return g * fmaf(-kGeluCubic * kLog2E, g * g, -kGeluLinear * kLog2E); }
    __device__ float value(float g) const { return g * sigmoid_exp2(exponent(g)); }
    __device__ ValueSlope pair(float g) const {
        const SigmoidPair s(exponent(g));
        const float y = g * s.value;
        // If the square is capped, the product with s.rest is correctly 0.
        return {y, fmaf(y * s.rest, fmaf(kGeluSlopeCubic, fminf(g * g, 1e10f), kGeluLinear), s.value)};
    }
};

template <>
struct Curve<CurveKind::kSwish> : PlainLinear {
    float alpha, rate;
    __device__ explicit Curve(const CurveConstants& c) : alpha(c.alpha), rate(-c.alpha * kLog2E) {}
    __device__ float value(float g) const { return g * sigmoid_exp2(rate * g); }
    __device__ ValueSlope pair(float g) const {
        const SigmoidPair s(rate * g);
        const float y = g * s.value;
        return {y, fmaf(alpha * s.rest, y, s.value)};
    }
};

template <>
struct Curve<CurveKind::kClamped> {
    Curve<CurveKind::kSwish> swish;
    float limit, offset;
    __device__ explicit Curve(const CurveConstants& c) : swish(c), limit(c.limit), offset(c.offset) {}
    // Comparisons rather than fminf, which would drop NaN.
    __device__ float value(float g) const { return swish.value(g > limit ? limit : g); }
    __device__ ValueSlope pair(float g) const {
        const ValueSlope result = swish.pair(g > limit ? limit : g);
        return {result.value, g <= limit ? result.slope : 0.0f};
    }
    __device__ float linear(float l) const {
        const float low = l < -limit ? -limit : l;
        return (low > limit ? limit : low) + offset;
    }
    __device__ ValueSlope linear_pair(float l) const { return {linear(l), fabsf(l) <= limit ? 1.0f : 0.0f}; }
};

template <>
struct Curve<CurveKind::kRelu> : PlainLinear {
    __device__ explicit Curve(const CurveConstants&) {}
    __device__ float value(float g) const { return g <= 0.0f ? 0.0f : g; }
    __device__ ValueSlope pair(float g) const { return {value(g), g <= 0.0f ? 0.0f : 1.0f}; }
};

template <>
struct Curve<CurveKind::kSquaredRelu> : PlainLinear {
    __device__ explicit Curve(const CurveConstants&) {}
    __device__ float value(float g) const { return g <= 0.0f ? 0.0f : g * g; }
    __device__ ValueSlope pair(float g) const { return {value(g), g <= 0.0f ? 0.0f : 2.0f * g}; }
};

template <>
struct Curve<CurveKind::kSigmoid> : PlainLinear {
    __device__ explicit Curve(const CurveConstants&) {}
    __device__ float value(float g) const { return sigmoid_exp2(-kLog2E * g); }
    __device__ ValueSlope pair(float g) const {
        const SigmoidPair s(-kLog2E * g);
        return {s.value, s.value * s.rest};
    }
};

template <>
struct Curve<CurveKind::kSitu> {
    float beta1, beta2, inverse1, inverse2;
    __device__ explicit Curve(const CurveConstants& c)
        : beta1(c.beta1), beta2(c.beta2), inverse1(__frcp_rn(c.beta1)), inverse2(__frcp_rn(c.beta2)) {}
    __device__ float value(float g) const { return beta1 * tanh_pair(g * inverse1).value * sigmoid_exp2(-kLog2E * g); }
    __device__ ValueSlope pair(float g) const {
        const ValueSlope bounded = tanh_pair(g * inverse1);
        const SigmoidPair s(-kLog2E * g);
        const float y = beta1 * bounded.value * s.value;
        return {y, fmaf(y, s.rest, bounded.slope * s.value)};
    }
    __device__ float linear(float l) const { return beta2 * tanh_pair(l * inverse2).value; }
    __device__ ValueSlope linear_pair(float l) const {
        const ValueSlope bounded = tanh_pair(l * inverse2);
        return {beta2 * bounded.value, bounded.slope};
    }
};

// Calls `body` with the curve of `kind`; the branch is the same for the whole grid. kClamped, kSigmoid and kSitu are
// always gated.
template <bool kGated, typename Body>
__device__ __forceinline__ void with_curve(uint32_t kind, const CurveConstants& constants, Body body) {
    switch (static_cast<CurveKind>(kind)) {
        case CurveKind::kGelu:
            return body(Curve<CurveKind::kGelu>(constants));
        case CurveKind::kSwish:
            return body(Curve<CurveKind::kSwish>(constants));
        case CurveKind::kRelu:
            return body(Curve<CurveKind::kRelu>(constants));
        case CurveKind::kSquaredRelu:
            return body(Curve<CurveKind::kSquaredRelu>(constants));
        default:
            break;
    }
    if constexpr (kGated) {
        switch (static_cast<CurveKind>(kind)) {
            case CurveKind::kClamped:
                return body(Curve<CurveKind::kClamped>(constants));
            case CurveKind::kSigmoid:
                return body(Curve<CurveKind::kSigmoid>(constants));
            default:
                return body(Curve<CurveKind::kSitu>(constants));
        }
    }
}

// A curve that is looked up for each row, for kernels in which code size matters more than time.
struct AnyCurve {
    uint32_t kind;
    const CurveConstants& constants;
};

}  // namespace te_fast::activation
