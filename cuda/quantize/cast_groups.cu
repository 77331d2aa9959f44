// Casts to FP8 of tensors whose rows belong to groups, the experts of a mixture, all groups in one launch.
//
//   counted: `splits` says on the device how many rows each group has; they follow each other in x, out and the row
//            layout's scales. In out_t [cols, ld_t] group e begins at column sum of up(rows, 128) over the groups
//            before it, zeros behind its rows up to the next one.
//   equal:   every group has `rows` rows; out_t is a stack [groups, cols, ld_t].
//
//   amax_groups         partial[e][part] = max |x| over a part of the group's elements
//   cast_groups         q = fp8(float(x) * scale[e])     scale_inv[e] = 1 / scale[e]
//                       scale[e] is given, and max |x| raises amax[e]; or it follows from the maxima of the parts
//   cast_block_groups   as cast_block.cu does it, 1 x 128 of counted groups, 128 x 128 of equal ones; blocks along the
//                       rows begin anew with every group. The scales of equal groups are a stack.
//
// With `numbers`, x has the rows of tokens, and row r of a counted group is that of token |numbers[r]| - 1 (as
// moe/permute.cu numbers them): a permutation and a cast in one pass. A number of 0 is a row of zeros, and so is a
// negative one unless all are gathered. Maxima then come from those of tokens:
//   amax_tokens         token_max[t] = max |x[t]|
// Blocks go down the columns of tiles, so that columns of x, which are read several times, stay in the L2 cache.
//
// Counts beyond `rows` are cut off, and negative ones are zero, so that nothing is read or written past the tensor.
//
// Launch: 256 threads. amax_tokens: a warp per token. amax_groups: parts * groups blocks. Others: tiles_cols times the
//         most strips of 128 rows that the groups can have; blocks without a strip end at once.
// Needs:  contiguous x, any alignment; out_t 16-byte aligned, ld_t a multiple of 16; at most 1024 groups.
// Moves:  sizeof(In) bytes per element for amax_groups; sizeof(In) + 1 byte per element and layout for the others, and
//         the scales.

#include "quantize/cast_groups.cuh"
#include "quantize/tensor.cuh"

namespace te_fast::quantize {

// The row of x that a number stands for; negative for a row of zeros.
__device__ inline int32_t source_of(const CastGroupsParams& p, int32_t number) {
    return (number < 0 && p.gathers_all != 0 ? -number : number) - 1;
}

// The source of a group's rows.
template <Floating In>
__device__ inline const In* source_rows(const CastGroupsParams& p, const CastBlockParams& b) {
    return static_cast<const In*>(p.numbers == nullptr ? b.x : p.x);
}

// The thread's patch of a group's tile; zeros outside.
template <bool kVectors, Floating In>
__device__ inline void load_group_patch(const CastGroupsParams& p, const CastBlockParams& b, const GroupRows& group,
                                        const TilePlace& place, const PatchPlace<false>& patch,
                                        Raw8<In> (&raw)[kPatch]) {
    if (p.numbers == nullptr) return load_patch<kVectors>(b, patch, raw);
    // A warp has 16 rows. Each lane reads the number of one, so that one load brings those of all.
    constexpr uint32_t kRows = 2 * kPatch;
    const uint32_t lane = threadIdx.x % 32;
    const size_t row = place.row0 + threadIdx.x / 32 * kRows + lane % kRows;
    const int32_t own = row < place.rows ? source_of(p, __ldg(p.numbers + group.first + row)) : -1;
    const In* x = static_cast<const In*>(p.x) + place.col();
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const int32_t source = __shfl_sync(kFullWarp, own, lane / kPatches * kPatch + i);
        raw[i] = zero8<In>();
        if (source < 0 || patch.width == 0) continue;
        const In* from = x + static_cast<uint64_t>(static_cast<uint32_t>(source)) * patch.stride;
        raw[i] = kVectors ? load8<In>(from) : load8_partial<In>(from, patch.width);
    }
}

// A warp has a token.
template <Floating In>
__device__ void amax_tokens(const CastGroupsParams& p) {
    if (is_noop(p)) return;
    const uint64_t token = uint64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
    if (token >= p.tokens) return;
    const In* x = static_cast<const In*>(p.x) + token * p.cols;
    const bool vectors = is_aligned(x, 16) && p.cols % 8 == 0;
    constexpr int kUnroll = 4;
    Raw8<In> acc = zero8<In>();
    for (uint64_t base = threadIdx.x % 32 * 8; base < p.cols; base += uint64_t{kUnroll} * 32 * 8) {
        Raw8<In> raw[kUnroll];
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) {
            const uint64_t i = base + static_cast<uint64_t>(step) * 32 * 8;
            raw[step] = zero8<In>();
            if (vectors && i < p.cols) {
                raw[step] = load8<In>(x + i);
            } else if (i < p.cols) {
                raw[step] = load8_partial<In>(x + i, static_cast<int>(min(p.cols - i, uint64_t{8})));
            }
        }
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) absmax_into<In>(acc, raw[step]);
    }
    const float amax = warp_max(absmax8<In>(acc));
    if (threadIdx.x % 32 == 0) p.token_max[token] = amax;
}

// The maximum of a part of a group's rows, from those of their tokens.
__device__ inline float gathered_max(const CastGroupsParams& p, const GroupRows& group, uint32_t part) {
    const uint32_t each = (group.rows + p.parts - 1) / p.parts;
    const uint32_t begin = min(part * each, group.rows), end = min(begin + each, group.rows);
    float amax = 0.0f;
    for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
        const int32_t source = source_of(p, p.numbers[group.first + i]);
        if (source >= 0) amax = fmaxf(amax, p.token_max[source]);
    }
    return amax;
}

template <Floating In>
__device__ void amax_groups(const CastGroupsParams& p) {
    if (is_noop(p)) return;
    __shared__ float scratch[kThreads / 32];
    const uint32_t index = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    const auto rows = static_cast<uint32_t>(p.rows);
    GroupRows group{index * rows, rows, 0, index};
    if (p.equal == 0) rows_of_group<kThreads>(p.splits, index, p.rows, group);
    if (p.numbers != nullptr) {
        const float found = block_max<kThreads>(gathered_max(p, group, part), scratch);
        if (threadIdx.x == 0) p.partial[blockIdx.x] = found;
        return;
    }
    const uint64_t count = group.rows * p.cols;
    const uint64_t share = (count + p.parts - 1) / p.parts, each = (share + 7) / 8 * 8;
    const uint64_t begin = min(part * each, count), end = min(begin + each, count);
    const In* x = static_cast<const In*>(p.x) + group.first * p.cols;
    const bool vectors = is_aligned(x, 16);
    constexpr int kUnroll = 4;
    Raw8<In> acc = zero8<In>();
    for (uint64_t base = begin + threadIdx.x * 8; base < end; base += uint64_t{kUnroll} * kThreads * 8) {
        Raw8<In> raw[kUnroll];
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) {
            const uint64_t i = base + static_cast<uint64_t>(step) * kThreads * 8;
            raw[step] = zero8<In>();
            if (vectors && i + 8 <= end) {
                raw[step] = load8<In>(x + i);
            } else if (i < end) {
                raw[step] = load8_partial<In>(x + i, static_cast<int>(min(end - i, uint64_t{8})));
            }
        }
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) absmax_into<In>(acc, raw[step]);
    }
    const float amax = block_max<kThreads>(absmax8<In>(acc), scratch);
    if (threadIdx.x == 0) p.partial[blockIdx.x] = amax;
}

template <bool kVectors, Floating In, Fp8 Out>
__device__ void cast_group_tile(const CastGroupsParams& p, const CastBlockParams& b, const GroupRows& group,
                                const TilePlace& place, float scale, float* amax, BlockShared<In>& shared) {
    const PatchPlace<false> patch(place, {b.cols, 0});
    Raw8<In> raw[kPatch];
    load_group_patch<kVectors>(p, b, group, place, patch, raw);
    cast_tile<kVectors, In, Out>(b, place, patch, raw, scale, amax, shared);
}

template <Floating In, Fp8 Out>
__device__ void cast_groups(const CastGroupsParams& p) {
    if (is_noop(p)) return;
    __shared__ BlockShared<In> shared;
    __shared__ float group_scale;
    if (blockIdx.x == 0 && p.scale_inv != nullptr) {
        for (uint32_t group = threadIdx.x; group < p.groups; group += kTileThreads) {
            p.scale_inv[group] = __frcp_rn(scale_of(p, group));
        }
    }
    GroupRows group;
    uint32_t tile_row;
    uint32_t tile_col;
    if (!find_tile(p, group, tile_row, tile_col)) return;
    if (threadIdx.x == 0) group_scale = scale_of(p, group.index);
    __syncthreads();
    const CastBlockParams b = of_group(p, group, sizeof(In));
    const TilePlace place(min(b.rows, (tile_row + uint64_t{1}) * kTile), b.cols, tile_row, tile_col);
    float* amax = p.amax == nullptr ? nullptr : p.amax + static_cast<size_t>(group.index) * p.stride;
    const bool vectors = rows_are_vectors<In>(source_rows<In>(p, b), b.out, b.cols);
    vectors ? cast_group_tile<true, In, Out>(p, b, group, place, group_scale, amax, shared)
            : cast_group_tile<false, In, Out>(p, b, group, place, group_scale, amax, shared);
}

template <Floating In, Fp8 Out, bool kVectors>
__device__ void cast_block_group_1d(const CastGroupsParams& p, const CastBlockParams& b, const GroupRows& group,
                                    const TilePlace& place, BlockShared<In>& shared) {
    const PatchPlace<false> patch(place, {b.cols, 0});
    Raw8<In> raw[kPatch];
    load_group_patch<kVectors>(p, b, group, place, patch, raw);
    // The next group's scales are behind those of this one.
    cast_block_1d<kVectors, In, Out>(b, place, patch, raw, b.rows, shared);
}

template <bool kTwoDimensional, Floating In, Fp8 Out>
__device__ void cast_block_groups(const CastGroupsParams& p) {
    if (is_noop(p)) return;
    __shared__ BlockShared<In> shared;
    GroupRows group;
    uint32_t tile_row;
    uint32_t tile_col;
    if (!find_tile(p, group, tile_row, tile_col)) return;
    const CastBlockParams b = of_group(p, group, sizeof(In));
    const TilePlace place(min(b.rows, (tile_row + uint64_t{1}) * kTile), b.cols, tile_row, tile_col);
    const bool vectors = rows_are_vectors<In>(source_rows<In>(p, b), b.out, b.cols);
    if constexpr (kTwoDimensional) {
        vectors ? cast_block_2d<true, In, Out>(b, place, shared) : cast_block_2d<false, In, Out>(b, place, shared);
    } else {
        vectors ? cast_block_group_1d<In, Out, true>(p, b, group, place, shared)
                : cast_block_group_1d<In, Out, false>(p, b, group, place, shared);
    }
}

// As kBlocks, with fewer blocks where a kernel would spill: the place of the group takes registers.
template <Floating In>
constexpr int kFewerBlocks = kBlocks<In> > 1 ? kBlocks<In> - 1 : 1;
template <Floating In>
constexpr int kRowBlocks = std::same_as<In, f16> ? kFewerBlocks<In> : kBlocks<In>;
template <Floating In>
constexpr int kSquareBlocks = kFewerBlocks<In> > 1 ? kFewerBlocks<In> - 1 : 1;

#define AMAX(symbol, maxima)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ CastGroupsParams p) { \
        ptx::wait_for_prior_grids();                                                                            \
        maxima(p);                                                                                              \
    }

AMAX(amax_tokens_f32, amax_tokens<f32>)
AMAX(amax_tokens_f16, amax_tokens<f16>)
AMAX(amax_tokens_bf16, amax_tokens<bf16>)
AMAX(amax_groups_f32, amax_groups<f32>)
AMAX(amax_groups_f16, amax_groups<f16>)
AMAX(amax_groups_bf16, amax_groups<bf16>)

#define INSTANCE(symbol, cast, blocks)                                 \
    extern "C" __global__ void __launch_bounds__(kTileThreads, blocks) \
        symbol(const __grid_constant__ CastGroupsParams p) {           \
        ptx::wait_for_prior_grids();                                   \
        cast(p);                                                       \
    }
#define TENSOR(symbol, in, out) INSTANCE(symbol, (cast_groups<in, out>), kBlocks<in>)
#define BLOCKS_1D(symbol, in, out) INSTANCE(symbol, (cast_block_groups<false, in, out>), kRowBlocks<in>)
#define BLOCKS_2D(symbol, in, out) INSTANCE(symbol, (cast_block_groups<true, in, out>), kSquareBlocks<in>)

TENSOR(cast_groups_f32_e4m3, f32, e4m3)
TENSOR(cast_groups_f32_e5m2, f32, e5m2)
TENSOR(cast_groups_f16_e4m3, f16, e4m3)
TENSOR(cast_groups_f16_e5m2, f16, e5m2)
TENSOR(cast_groups_bf16_e4m3, bf16, e4m3)
TENSOR(cast_groups_bf16_e5m2, bf16, e5m2)
BLOCKS_1D(cast_block_groups_1d_f32_e4m3, f32, e4m3)
BLOCKS_1D(cast_block_groups_1d_f32_e5m2, f32, e5m2)
BLOCKS_1D(cast_block_groups_1d_f16_e4m3, f16, e4m3)
BLOCKS_1D(cast_block_groups_1d_f16_e5m2, f16, e5m2)
BLOCKS_1D(cast_block_groups_1d_bf16_e4m3, bf16, e4m3)
BLOCKS_1D(cast_block_groups_1d_bf16_e5m2, bf16, e5m2)
BLOCKS_2D(cast_block_groups_2d_f32_e4m3, f32, e4m3)
BLOCKS_2D(cast_block_groups_2d_f32_e5m2, f32, e5m2)
BLOCKS_2D(cast_block_groups_2d_f16_e4m3, f16, e4m3)
BLOCKS_2D(cast_block_groups_2d_f16_e5m2, f16, e5m2)
BLOCKS_2D(cast_block_groups_2d_bf16_e4m3, bf16, e4m3)
BLOCKS_2D(cast_block_groups_2d_bf16_e5m2, bf16, e5m2)

}  // namespace te_fast::quantize
