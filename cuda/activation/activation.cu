// Activation functions: y in high precision, as FP8 in row layout, transposed layout or both.
//
//   y[r][c] = act(x[r][c]) * s[r]        gated: y[r][c] = act(g[r][c]) * lin(l[r][c]) * s[r], g and l the halves of x
//   measured = the scale that follows from max |y|, y rounded as it is stored; for the cast behind, current scaling
//   out[r][c] = fp8(y[r][c] * scale)     out_t[c][r] = out[r][c], 0 for rows <= r < ld_t     amax = max |y|
//
// y stays in FP32 between the two; `act` and `lin` are those of activation/curves.cuh; s is 1 without row_scale.
//
// Launch: activation, activation_gated: blocks = plan.tiles_cols * plan.strips, tiles_cols = ceil(cols / 128) and
//         tiles_rows = ceil(rows / 128), both at least 1; 256 threads; 48 KiB of dynamic shared memory. The plan is any
//         that covers the tiles (tile/strip.cuh).
// Needs:  contiguous tensors; any rows, cols, alignment of x, y and out; ld_t a multiple of 16, out_t 16-byte aligned;
//         interleave 0 or a divisor of cols.
// Moves:  sizeof(In) per element of x, and per element of y sizeof(In) for y and 1 byte per FP8 layout written.

#include "activation/row.cuh"
#include "common/fp8.cuh"
#include "common/measure.cuh"

namespace te_fast::activation {

using namespace tile;

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
    float* measured;        // null: none; the scale that y is quantised with, where it is not cast here
    AmaxWorkspace* workspace;
    uint64_t rows, cols, ld_t;
    CurveConstants constants;
    StripPlan plan;
    uint32_t curve, row_scale_kind, interleave, e5m2;
    ScaleRule rule;  // of `measured`
};
static_assert(sizeof(ActivationParams) == kActivationParamsBytes);

template <bool kGated, Floating In>
struct ForwardShared {
    TransposeBuffer tile;
    RowRing<kInputs<kGated, false>, In> ring;
};
static_assert(sizeof(ForwardShared<false, bf16>) == kShared && sizeof(ForwardShared<false, f32>) == kShared);
static_assert(sizeof(ForwardShared<true, bf16>) == kShared && sizeof(ForwardShared<true, f32>) == kShared);

// The rows of the strip. Returns max |y| of the thread. `kCasts`: it is known that y is cast, written in row layout and
// nowhere in high precision, and that there is no row scale.
template <bool kVectors, bool kCasts, bool kGated, Floating In, typename ActivationCurve>
__device__ __forceinline__ float activate_rows(const ActivationParams& p, const Strip& strip,
                                               const ActivationCurve& curve, ForwardShared<kGated, In>& shared) {
    TilePlace place = strip.top(p.rows, p.cols);
    PatchPlace<kGated> from(place, {p.cols, p.interleave});
    PatchPlace<false> to(place, {p.cols, 0});
    RowReader<kVectors, kGated, false, In> reader(p.x, nullptr, from, to, shared.ring);
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    float amax = 0.0f;
    const auto do_row = [&](int i, uint2& bytes) {
        float y[8];
        activate8<kGated, In>(reader.read(i), curve, y);
        if (!kCasts && p.row_scale != nullptr && i < to.rows) {
            const float s = load_float(p.row_scale, place.row(i), p.row_scale_kind);
#pragma unroll
            for (int c = 0; c < 8; ++c) y[c] *= s;
        }
        if (!kCasts && p.y != nullptr) store_row8<kVectors>(static_cast<In*>(p.y), to, i, 0, y);
        absmax_into(amax, y);
        if (!kCasts && p.scale == nullptr) return;
        bytes = p.e5m2 != 0 ? encode8<e5m2>(y, scale) : encode8<e4m3>(y, scale);
        if (kCasts || p.out != nullptr) store_bytes8<kVectors>(p.out, to, i, 0, bytes);
    };
#pragma unroll 1
    for (uint32_t left = strip.tiles; left > 0; --left) {
        if constexpr (kCasts) {
#pragma unroll 1
            for (int above = 0; above < kPatch; above += RowGroup::kRows) {
                RowGroup group;
#pragma unroll
                for (int i = 0; i < RowGroup::kRows; ++i) do_row(above + i, group.row[i]);
                if (p.out_t == nullptr) continue;
                if (above == 0) __syncthreads();  // the tile before has been read
                group.put(shared.tile, above);
            }
        } else {
            if (p.out_t != nullptr) __syncthreads();  // the tile before has been read
#pragma unroll 1
            for (int i = 0; i < kPatch; ++i) do_row(i, own_slot(shared.tile, i));
            if (p.out_t != nullptr) put_slots(shared.tile);
        }
        if (p.out_t != nullptr) {
            clear_rows(shared.tile, to.rows);
            __syncthreads();
            store_columns<false>(p.out_t, p.ld_t, place.row0, strip.tile_col * kTile, {p.cols, 0}, 0, shared.tile);
        }
        place.row0 += kTile;
        from.descend();
        to.descend();
    }
    return amax;
}

// Blocks per multiprocessor that the registers are capped for: the most without a spill.
template <bool kGated>
constexpr int kForwardBlocks = !kManyBlocks ? 2
                               : kGated     ? 3
                                            : 4;

template <bool kGated, Floating In>
__device__ __forceinline__ void activation(const ActivationParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const Strip strip(p.plan);
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);

    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    auto& shared = *reinterpret_cast<ForwardShared<kGated, In>*>(dynamic);
    const bool vectors = Halves<kGated>{p.cols, p.interleave}.keeps_vectors() && is_aligned(p.x, 16) &&
                         is_aligned(p.y, 16) && is_aligned(p.out, 8);
    float amax = 0.0f;
    const AnyCurve any{p.curve, p.constants};
    if (!vectors) {
        amax = activate_rows<false, false, kGated, In>(p, strip, any, shared);
    } else if (p.scale == nullptr || p.out == nullptr || p.y != nullptr || p.row_scale != nullptr) {
        amax = activate_rows<true, false, kGated, In>(p, strip, any, shared);
    } else {
        with_curve<kGated>(p.curve, p.constants, [&](const auto& curve) {
            amax = activate_rows<true, true, kGated, In>(p, strip, curve, shared);
        });
    }
    if (p.scale != nullptr && p.amax != nullptr) {
        amax = warp_max(amax);
        if (threadIdx.x % 32 == 0) atomic_max_nonnegative(p.amax, amax);
    }
    if (p.measured != nullptr) write_measured<In>(p.measured, p.workspace, p.rule, amax);
}

#define INSTANCE(symbol, gated, in)                                                   \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kForwardBlocks<gated>) \
        symbol(const __grid_constant__ ActivationParams p) {                          \
        ptx::wait_for_prior_grids();                                                  \
        activation<gated, in>(p);                                                     \
    }

INSTANCE(activation_f32, false, f32)
INSTANCE(activation_f16, false, f16)
INSTANCE(activation_bf16, false, bf16)
INSTANCE(activation_gated_f32, true, f32)
INSTANCE(activation_gated_f16, true, f16)
INSTANCE(activation_gated_bf16, true, bf16)

}  // namespace te_fast::activation
