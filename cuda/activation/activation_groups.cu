// Gated activation of rows that belong to groups, the experts of a mixture, times a factor per row, as FP8 in row
// layout, transposed layout or both: the activation and the cast of groups in one launch, with the bits of both.
//
//   y[r][c] = bf16(act(g[r][c]) * lin(l[r][c]) * s[r])     g and l the halves of x, s is 1 without row_scale
//
//   activation_cast_groups        y as cast_groups casts it
//   activation_cast_block_groups  y as cast_block_groups_1d casts it        (both of quantize/cast_groups.cu)
//
// Launch: as the casts of counted groups; 256 threads, 64 KiB of dynamic shared memory.
// Needs:  contiguous x, 16-byte aligned; out 8-byte aligned; cols and interleave multiples of 8. The rest as the casts.
// Moves:  4 bytes per element of y, 1 byte per element and layout, and the scales.

#include "activation/groups.cuh"

namespace te_fast::activation {

// Eight elements of a row times the row's factor.
template <typename Kind>
__device__ inline void activate_row(const ActivationGroupsParams& p, const RowInputs<true, false, bf16>& in,
                                    const Kind& curve, uint64_t row, bool inside, float (&y)[8]) {
    activate8<true, bf16>(in, curve, y);
    if (p.row_scale == nullptr || !inside) return;
    const float s = load_float(p.row_scale, row, p.row_scale_kind);
#pragma unroll
    for (int c = 0; c < 8; ++c) y[c] *= s;
}

template <bool kBlocks, Fp8 Out>
__device__ void activate_groups(const ActivationGroupsParams& p) {
    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    auto& shared = *reinterpret_cast<GroupsShared*>(dynamic);
    if constexpr (!kBlocks) write_inverse_scales(p.cast);
    GroupTile tile;
    if (!tile.find(p.cast)) return;
    const TilePlace place = tile.place(p.cast.cols);
    const PatchPlace<true> patch(place, {p.cast.cols, p.interleave});
    ask_halves(static_cast<const bf16*>(p.cast.x) + tile.group.first * 2 * p.cast.cols, patch, shared);
    if constexpr (!kBlocks) find_scale(p.cast, tile.group.index);
    with_curve<true>(p.curve, p.constants, [&](const auto& curve) {
#pragma unroll 1
        for (int i = 0; i < kPatch; ++i) {
            await_halves(i);
            RowInputs<true, false, bf16> in;
#pragma unroll
            for (int half = 0; half < 2; ++half) in.tensor[half].word[0] = shared.half[half][i][threadIdx.x];
            float y[8];
            const bool inside = i < patch.rows;
            activate_row(p, in, curve, tile.group.first + place.row(i), inside, y);
            shared.half[0][i][threadIdx.x] = (inside ? pack8<bf16>(y) : zero8<bf16>()).word[0];
        }
    });
    cast_results<kBlocks, Out>(p.cast, tile, tile.col, 0, shared);
}

#define INSTANCE(symbol, blocks, out)                                         \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kGroupsBlocks) \
        symbol(const __grid_constant__ ActivationGroupsParams p) {            \
        ptx::wait_for_prior_grids();                                          \
        activate_groups<blocks, out>(p);                                      \
    }

INSTANCE(activation_cast_groups_e4m3, false, e4m3)
INSTANCE(activation_cast_groups_e5m2, false, e5m2)
INSTANCE(activation_cast_block_groups_e4m3, true, e4m3)
INSTANCE(activation_cast_block_groups_e5m2, true, e5m2)

}  // namespace te_fast::activation
