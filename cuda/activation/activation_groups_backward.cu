// Gradient of a gated activation of rows that belong to groups, the experts of a mixture, as FP8 in row layout,
// transposed layout or both, and the optional gradient of the factors of rows: the gradient of the activation and the
// cast of groups in one launch, with the bits of both.
//
//   dx[r][..] = bf16(dg, dl)     ds[r]     as activation_backward.cu has them
//
//   activation_backward_cast_groups        dx as cast_groups casts it
//   activation_backward_cast_block_groups  dx as cast_block_groups_1d casts it        (both of quantize/cast_groups.cu)
//
// A tile of the forward's result makes two tiles of dx, one after the other: those of the two halves, or, where these
// alternate inside of a tile, two adjacent ones with columns of both.
//
// ds is summed in the order of activation_backward.cu; the block that comes last for 128 rows of a group adds the
// tiles.
//
// Launch: as the casts of counted groups, tiles of the forward's result; 256 threads, 64 KiB of dynamic shared memory.
// Needs:  contiguous dy and x, 16-byte aligned; out 8-byte aligned; half of the columns of dx a multiple of 128,
//         interleave a divisor of 128 that 8 divides, or a multiple of 128. counters zeroed once at allocation, they
//         are zero again after each launch. The rest as the casts.
// Moves:  6 bytes per element of dy, 2 bytes per element and layout, the scales; ds adds 8 bytes per row and tile.

#include "activation/groups.cuh"
#include "tile/column_sums.cuh"

namespace te_fast::activation {

// Where the columns of a tile of the forward's result lie in dx: in two tiles.
struct ResultTiles {
    uint32_t cols;        // of the forward's result
    uint32_t interleave;  // 0 where the halves do not alternate inside of a tile

    // Column `col` of half `half` as one of 2 * 128 columns.
    __device__ uint32_t column(uint32_t col, uint32_t half) const {
        if (interleave == 0) return half * kTile + col;
        return col + (col / interleave + half) * interleave;
    }
};

// The block that comes last for the rows of its tile adds the columns of tiles. Contains barriers.
__device__ inline void sum_tiles(const ActivationGroupsParams& p, const GroupTile& tile) {
    const uint32_t strip = ptx::block_index() / p.cast.tiles_cols;
    if (!is_last_block(p.counters + strip, p.cast.tiles_cols)) return;
    const uint64_t begin = tile.group.first + tile.row * kTile + threadIdx.x;
    const uint64_t end = tile.group.first + min(tile.group.rows, (tile.row + 1) * kTile);
    for (uint64_t row = begin; row < end; row += kTileThreads) {
        const float sum = sum_partials(p.sums + row, p.cast.tiles_cols, p.cast.rows);
        store_float(p.drow_scale, row, p.row_scale_kind, sum);
    }
}

template <bool kBlocks, Fp8 Out>
__device__ void differentiate_groups(const ActivationGroupsParams& p) {
    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    auto& shared = *reinterpret_cast<GroupsShared*>(dynamic);
    if constexpr (!kBlocks) write_inverse_scales(p.cast);
    GroupTile tile;
    if (!tile.find(p.cast)) return;
    const uint64_t cols = p.cast.cols / 2;
    const Halves<true> halves{cols, p.interleave};
    const bool alternate = p.interleave % kTile != 0;
    {
        const TilePlace place = tile.place(cols);
        const PatchPlace<true> patch(place, halves);
        const PatchPlace<false> dy_patch(place, {cols, 0});
        const bf16* dy = static_cast<const bf16*>(p.dy) + tile.group.first * cols;
        ask_halves(static_cast<const bf16*>(p.cast.x) + tile.group.first * p.cast.cols, patch, shared);
        if constexpr (!kBlocks) find_scale(p.cast, tile.group.index);
        Raw8<bf16> next = load_row8<true>(dy, dy_patch, 0, 0);
        const RowFactor factor{p.row_scale, p.row_scale_kind,
                               p.drow_scale == nullptr ? nullptr : p.sums + tile.col * p.cast.rows};
        // The columns of a row stay with the half of a warp that has the row.
        const ResultTiles tiles{static_cast<uint32_t>(cols), alternate ? p.interleave : 0};
        uint32_t to[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t column = tiles.column(place.patch_col * kPatch, half);
            const uint32_t thread = place.patch_row * kPatches + column % kTile / kPatch;
            to[half] = column / kTile * kPatch * kTileThreads + thread;
        }
        with_curve<true>(p.curve, p.constants, [&](const auto& curve) {
#pragma unroll 1
            for (int i = 0; i < kPatch; ++i) {
                RowInputs<true, true, bf16> in;
                in.tensor[2] = next;
                if (i + 1 < kPatch) next = load_row8<true>(dy, dy_patch, i + 1, 0);
                await_halves(i);
#pragma unroll
                for (int half = 0; half < 2; ++half) in.tensor[half].word[0] = shared.half[half][i][threadIdx.x];
                const bool inside = i < patch.rows;
                float d[2][8];
                differentiate8<false, true, bf16>(in, curve, factor, tile.group.first + place.row(i), inside, d);
                __syncwarp();  // the row has been read
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    shared.slot[to[half] + i * kTileThreads] = (inside ? pack8<bf16>(d[half]) : zero8<bf16>()).word[0];
                }
            }
        });
        __syncwarp();
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const uint32_t tile_col = alternate ? 2 * tile.col + half : halves.column(tile.col * kTile, half) / kTile;
        cast_results<kBlocks, Out>(p.cast, tile, tile_col, half, shared);
    }
    if (p.drow_scale != nullptr) sum_tiles(p, tile);
}

#define INSTANCE(symbol, blocks, out)                                         \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kGroupsBlocks) \
        symbol(const __grid_constant__ ActivationGroupsParams p) {            \
        ptx::wait_for_prior_grids();                                          \
        differentiate_groups<blocks, out>(p);                                 \
    }

INSTANCE(activation_backward_cast_groups_e4m3, false, e4m3)
INSTANCE(activation_backward_cast_groups_e5m2, false, e5m2)
INSTANCE(activation_backward_cast_block_groups_e4m3, true, e4m3)
INSTANCE(activation_backward_cast_block_groups_e5m2, true, e5m2)

}  // namespace te_fast::activation
