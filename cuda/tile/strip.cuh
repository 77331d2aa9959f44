// The walk of the activation kernels. A block goes down one column of tiles. While it works on a row, the next rows are
// prefetched into shared memory, across the ends of tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tile/transpose.cuh"

namespace te_fast::tile {

// How columns of tiles are cut: `count[k]` strips of `tiles[k]` tiles each, level by level from the top. Blocks start
// in the order of their strips: long ones keep loads under way, short ones at the end let all multiprocessors finish
// together.
struct StripPlan {
    static constexpr int kLevels = kStripLevels;
    uint32_t tiles_rows, tiles_cols;
    uint32_t strips;  // of one column
    uint32_t count[kLevels], tiles[kLevels];
};

// Consecutive tiles of one column of tiles: those of this block.
struct Strip {
    uint32_t index, tile_col, first, tiles;

    // Strips lie row-major: neighbours in the grid read neighbouring columns.
    __device__ explicit Strip(const StripPlan& plan, uint32_t block = ptx::block_index()) : first(0), tiles(0) {
        index = block / plan.tiles_cols;
        tile_col = block - index * plan.tiles_cols;
        uint32_t before = index;
#pragma unroll
        for (int level = 0; level < StripPlan::kLevels; ++level) {
            const uint32_t passed = min(before, plan.count[level]);
            first += passed * plan.tiles[level];
            before -= passed;
            if (passed < plan.count[level] && tiles == 0) tiles = plan.tiles[level];
        }
        tiles = min(tiles, plan.tiles_rows - first);
    }

    __device__ size_t first_row() const { return static_cast<size_t>(first) * kTile; }
    // The first tile of a tensor that ends where the strip does.
    __device__ TilePlace top(size_t rows, size_t cols) const {
        return {min(rows, (static_cast<size_t>(first) + tiles) * kTile), cols, first, tile_col};
    }
};

// Prefetched rows of `kTensors` inputs. Each thread copies the data that it reads itself, so that no thread waits for
// others.
template <int kTensors, Floating In>
struct RowRing {
    static constexpr int kWords = sizeof(In) / 2;
    static constexpr int kDepth = kTensors == 3 ? 2 : (kTensors == 1 ? 8 : 4) / kWords;
    static_assert(kPatch % kDepth == 0);
    uint4 slot[kDepth][kTensors][kWords][kTileThreads];
};

// Whether a multiprocessor has shared memory for more than two blocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool kManyBlocks = true;
#else
constexpr bool kManyBlocks = false;
#endif

template <bool kGated, bool kGradient>
constexpr int kInputs = Halves<kGated>::kCount + (kGradient ? 1 : 0);

// Eight elements of a row of each input.
template <bool kGated, bool kGradient, Floating In>
struct RowInputs {
    Raw8<In> tensor[kInputs<kGated, kGradient>];  // the halves of x, then dy
};

// Hands a thread the rows of its patches in order: through the ring, or element by element. The caller moves the
// patches on.
template <bool kVectors, bool kGated, bool kGradient, Floating In>
class RowReader {
    static constexpr int kHalves = Halves<kGated>::kCount;
    using Ring = RowRing<kInputs<kGated, kGradient>, In>;
    static constexpr int kAhead = Ring::kDepth - 1;
    const In* x_;
    const In* dy_;  // through the ring: of the next row to ask for
    const PatchPlace<kGated>& patch_;
    const PatchPlace<false>& dy_patch_;
    Ring& ring_;

    __device__ void copy(int slot, int tensor, const In* from, bool inside) {
#pragma unroll
        for (int word = 0; word < Ring::kWords; ++word) {
            // Two words of a thread lie in one sector.
            ptx::copy_async16<(Ring::kWords > 1)>(&ring_.slot[slot][tensor][word][threadIdx.x],
                                                  reinterpret_cast<const uint4*>(from) + word, inside);
        }
    }

    // Asks for row `i` of the patch, from 8 on of the one below; zeros outside.
    __device__ void ask(int i) {
        const int row = i < kPatch ? i : i + kTile - kPatch, slot = i % Ring::kDepth;
        const bool inside = row < patch_.rows;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) copy(slot, half, x_ + patch_.at(row, half), inside);
        if constexpr (kGradient) {
            copy(slot, kHalves, dy_, inside);
            const uint32_t step = i % kPatch == kPatch - 1 ? kTile - kPatch + 1 : 1;
            dy_ += static_cast<uint64_t>(step) * dy_patch_.stride;
        }
        ptx::commit_copies();
    }

  public:
    __device__ RowReader(const void* x, const void* dy, const PatchPlace<kGated>& patch,
                         const PatchPlace<false>& dy_patch, Ring& ring)
        : x_(static_cast<const In*>(x)),
          dy_(static_cast<const In*>(dy)),
          patch_(patch),
          dy_patch_(dy_patch),
          ring_(ring) {
        if constexpr (kVectors) {
            if constexpr (kGradient) dy_ += dy_patch.first;
#pragma unroll
            for (int i = 0; i < kAhead; ++i) ask(i);
        }
    }

    // Row `i` of the patch.
    __device__ RowInputs<kGated, kGradient, In> read(int i) {
        RowInputs<kGated, kGradient, In> in;
        if constexpr (kVectors) {
            ask(i + kAhead);
            ptx::wait_copies<kAhead>();
#pragma unroll
            for (int tensor = 0; tensor < kInputs<kGated, kGradient>; ++tensor) {
#pragma unroll
                for (int word = 0; word < Ring::kWords; ++word) {
                    in.tensor[tensor].word[word] = ring_.slot[i % Ring::kDepth][tensor][word][threadIdx.x];
                }
            }
        } else {
#pragma unroll
            for (int half = 0; half < kHalves; ++half) in.tensor[half] = load_row8<false>(x_, patch_, i, half);
            if constexpr (kGradient) in.tensor[kHalves] = load_row8<false>(dy_, dy_patch_, i, 0);
        }
        return in;
    }
};

}  // namespace te_fast::tile
