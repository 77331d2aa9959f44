// Activation functions: y in high precision, as FP8 in row layout, transposed layout or both.
//
//   y[r][c] = act(x[r][c]) * s[r]        gated: y[r][c] = act(g[r][c]) * lin(l[r][c]) * s[r], g and l the halves of x
//   out[r][c] = fp8(y[r][c] * scale)     out_t[c][r] = out[r][c], 0 for rows <= r < ld_t     amax = max |y|
//
// y stays in FP32 between the two; `act` and `lin` are those of common/activation_math.cuh; s is 1 without row_scale.
//
// Launch: activation, activation_gated: blocks = ceil(cols / 128) * ceil(max(rows, ld_t) / 128); 256 threads.
// Needs:  contiguous tensors; any rows, cols, alignment of x, y and out; ld_t a multiple of 16, out_t 16-byte aligned;
//         interleave 0 or a divisor of cols.
// Moves:  sizeof(In) per element of x, and per element of y sizeof(In) for y and 1 byte per FP8 layout written.

#include "common/activation.cuh"
#include "common/reduce.cuh"

namespace te_fast {

struct ActivationParams {
    const void* x;
    void* y;                // null: none
    uint8_t* out;           // null: none
    uint8_t* out_t;         // null: none
    const void* row_scale;  // null: none
    const float* scale;     // null: no cast
    float* scale_inv;       // null: none
    float* amax;            // null: none; else *amax = max(*amax, |y|)
    const float* noop;      // null: none; *noop == 1 leaves every output as it is
    uint64_t rows, cols, ld_t;
    CurveConstants constants;
    uint32_t curve, row_scale_kind, interleave, e5m2, tiles_cols;
};
static_assert(sizeof(ActivationParams) == 136);

// Rows whose loads are under way at once.
template <bool kVectors, Floating In>
constexpr int kForwardRows = !kVectors         ? 1
                             : sizeof(In) == 2 ? 4
                                               : 2;

// The tile's rows: y stored, the bytes left in the own slots of `buffer`. Returns max |y| of the thread.
template <bool kVectors, bool kGated, Floating In, typename ActivationCurve>
__device__ float activate_rows(const ActivationParams& p, const TilePlace& place, const ActivationCurve& curve,
                               TransposeBuffer& buffer) {
    constexpr int kStep = kForwardRows<kVectors, In>, kCount = Halves<kGated>::kCount;
    const In* x = static_cast<const In*>(p.x);
    const PatchPlace<kGated> from(place, {place.cols, p.interleave});
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    float amax = 0.0f;
#pragma unroll 1
    for (int step = 0; step < kPatch; step += kStep) {
        Raw8<In> raw[kStep][kCount];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
#pragma unroll
            for (int half = 0; half < kCount; ++half) raw[i][half] = load_row8<kVectors>(x, from, step + i, half);
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            float y[8];
            unpack8<In>(raw[i][0], y);
#pragma unroll
            for (int c = 0; c < 8; ++c) y[c] = curve.value(y[c]);
            if constexpr (kGated) {
                float l[8];
                unpack8<In>(raw[i][1], l);
#pragma unroll
                for (int c = 0; c < 8; ++c) y[c] *= curve.linear(l[c]);
            }
            if (p.row_scale != nullptr && step + i < from.rows) {
                const float s = load_float(p.row_scale, place.row(step + i), p.row_scale_kind);
#pragma unroll
                for (int c = 0; c < 8; ++c) y[c] *= s;
            }
            if (p.y != nullptr) {
                const PatchPlace<false> to(place, {place.cols, 0});
                store_row8<kVectors>(static_cast<In*>(p.y), to, step + i, 0, y);
            }
            if (p.scale != nullptr) {
                absmax_into(amax, y);
                own_slot(buffer, place, step + i) = p.e5m2 != 0 ? encode8<e5m2>(y, scale) : encode8<e4m3>(y, scale);
            }
        }
    }
    return amax;
}

// Blocks per multiprocessor that the registers are capped for: the most without a spill.
template <bool kGated, Floating In>
constexpr int kForwardBlocks = kGated && kTileBlocks<In> > 3 ? 3 : kTileBlocks<In>;

template <bool kGated, Floating In>
__device__ void activation(const ActivationParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const TilePlace place(p.rows, p.cols, blockIdx.x / p.tiles_cols, blockIdx.x % p.tiles_cols);
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);

    __shared__ TransposeBuffer buffer;
    const bool vectors = Halves<kGated>{place.cols, p.interleave}.keeps_vectors() && is_aligned(p.x, 16) &&
                         is_aligned(p.y, 16) && is_aligned(p.out, 8);
    float amax = 0.0f;
    with_curve<kGated>(p.curve, p.constants, [&](const auto& curve) {
        amax = vectors ? activate_rows<true, kGated, In>(p, place, curve, buffer)
                       : activate_rows<false, kGated, In>(p, place, curve, buffer);
    });
    if (p.scale == nullptr) return;
    if (p.amax != nullptr) {
        amax = warp_max(amax);
        if (threadIdx.x % 32 == 0) atomic_max_nonnegative(p.amax, amax);
    }
    const Fp8Outputs outputs{p.out, p.out_t, p.ld_t};
    const Halves<false> whole{place.cols, 0};
    if (vectors) {
        store_tile<true>(outputs, place, whole, 0, buffer);
    } else {
        store_tile<false>(outputs, place, whole, 0, buffer);
    }
}

}  // namespace te_fast

#define INSTANCE(symbol, gated, in)                                                                                  \
    extern "C" __global__ void __launch_bounds__(te_fast::kTileThreads, te_fast::kForwardBlocks<gated, te_fast::in>) \
        symbol(const __grid_constant__ te_fast::ActivationParams p) {                                                \
        te_fast::ptx::wait_for_prior_grids();                                                                        \
        te_fast::activation<gated, te_fast::in>(p);                                                                  \
    }

INSTANCE(activation_f32, false, f32)
INSTANCE(activation_f16, false, f16)
INSTANCE(activation_bf16, false, bf16)
INSTANCE(activation_gated_f32, true, f32)
INSTANCE(activation_gated_f16, true, f16)
INSTANCE(activation_gated_bf16, true, bf16)
