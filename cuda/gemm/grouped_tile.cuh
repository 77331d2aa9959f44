// A tile of a product of groups of rows: a kernel's template parameters, the memory that its warps share, and the
// places of tiles.
#pragma once

#include "common/constants.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"
#include "gemm/schedule.cuh"
#include "gemm/tensor_map.cuh"
#include "gemm/wgmma.cuh"

namespace te_fast::gemm {

struct GroupedParams {
    TensorMap a;               // tiles of 64 rows (or columns) by 128 bytes
    TensorMap b;               // tiles of kColumns rows by 128 bytes; 64 by 64 elements where lines lie across k
    TensorMap d;               // tiles of 64 rows by 128 bytes
    TensorMap a_scale;         // tiles of 128 scales
    TensorMap b_scale;         // the same of B (weight gradients)
    const float* a_scale_inv;  // one per group
    const float* b_scale_inv;  // the same, or 128 x 128 scales
    const int64_t* splits;     // null: one group has all rows
    const void* bias;          // 16-bit elements; null: none
    void* result;
    uint64_t rows;
    uint64_t n;  // rows of B that make columns of D, or rows of D (weight gradients)
    uint64_t k;  // summed, or columns of D (weight gradients)
    uint32_t groups;
    uint32_t align;
    uint32_t d_type;     // FloatKind
    uint32_t bias_type;  // FloatKind
    uint32_t accumulate;
    uint32_t b_scale_pitch;  // of 128 x 128 scales
    uint64_t counted;        // rows that splits may count
    uint64_t unused[4];
};
static_assert(sizeof(GroupedParams) == kGroupedParamsBytes);

enum class Sums { kFast, kSplit, kBlock };

constexpr int kRows = 128;  // of a tile
constexpr int kLine = 128;  // bytes of a row of A's and B's tiles
constexpr int kMathThreads = 256;

// Template parameters of a kernel: operands, accumulation, the dimension that groups cut, the layout of 16-bit
// operands, and columns of a tile.
template <Element kA_, Element kB_, Sums kSums_, bool kByRows_, bool kAcrossA_, bool kAcrossB_, int kColumns_>
struct Kind {
    static constexpr Element kA = kA_, kB = kB_;
    static constexpr Sums kSums = kSums_;
    static constexpr bool kByRows = kByRows_, kAcrossA = kAcrossA_, kAcrossB = kAcrossB_;
    static constexpr int kColumns = kColumns_;
    static constexpr int kDepth = kLine / bytes_of(kA);  // of k, per stage
    static constexpr int kDepthOfProduct = 32 / bytes_of(kA);
    static constexpr bool kScaled = kSums == Sums::kBlock, kOneScale = is_fp8(kA) && !kScaled;

    // Sums of 256 columns that are added outside of the tensor cores are added one half after the other.
    static constexpr bool kHalves = kSums != Sums::kFast && kColumns == 256;
    // Weight gradients that may be added to D. Wider ones are stored: there is no room for all summands at once.
    static constexpr bool kAdds = !kByRows && kColumns < 256;
    // There are registers for two steps' products of 128 columns, but not beside the scales of the columns.
    static constexpr bool kAhead = kSums == Sums::kSplit && !kHalves;

    static constexpr int kABytes = kRows * kLine;
    static constexpr int kBBytes = kColumns * kLine;
    // By rows, groups may begin anywhere, and the copy engine takes a coordinate that is a multiple of 16 bytes.
    static constexpr int kAScaleCount = kByRows ? kRows + 4 : kRows;
    static constexpr int kAScaleBytes = kScaled ? kAScaleCount * 4 : 0;
    static constexpr int kAScaleStride = (kAScaleBytes + 127) / 128 * 128;
    static constexpr int kBScaleBytes = kScaled && !kByRows ? kColumns * 4 : 0;
    static constexpr int kStageBytes = kABytes + kBBytes + kAScaleBytes + kBScaleBytes;
    static constexpr int kChunkBytes = 64 * kLine;  // of D: 64 rows by 128 bytes
    // Chunks that a warpgroup has room for: all of a tile of 16-bit elements, at least.
    static constexpr int kChunks = !kByRows ? 4 : kColumns / 64;
    static constexpr int kStoreBytes = 2 * kChunks * kChunkBytes;
    static constexpr int kBarrierBytes = 256;
    static constexpr int kStages =
        (static_cast<int>(kGroupedShared) - kStoreBytes - kBarrierBytes) / (kStageBytes - kAScaleBytes + kAScaleStride);
    static_assert(kStages >= 3 && (2 * kStages + 2) * 8 <= kBarrierBytes);
};

// Data that the warps of a block share: the layout of shared memory, the barriers, and the cluster. Tiles come first:
// swizzled ones begin at multiples of 1024.
template <typename K>
struct Block {
    uint32_t base;
    uint32_t cluster, rank;

    // Barriers. For each stage: its tiles have been loaded; they have been read, in every block of the cluster. For the
    // chunks of D: they may be written, or hold the summands; they hold the sums.
    __device__ uint32_t full(int stage) const { return base + kBarriersAt + 8 * stage; }
    __device__ uint32_t empty(int stage) const { return full(K::kStages + stage); }
    __device__ uint32_t free() const { return full(2 * K::kStages); }
    __device__ uint32_t ready() const { return full(2 * K::kStages + 1); }

    __device__ uint32_t a(int stage) const { return base + stage * K::kABytes; }
    __device__ uint32_t b(int stage) const { return base + K::kStages * K::kABytes + stage * K::kBBytes; }
    __device__ uint32_t chunk(int warpgroup, int number) const {
        return base + K::kStages * (K::kABytes + K::kBBytes) + (warpgroup * K::kChunks + number) * K::kChunkBytes;
    }
    __device__ uint32_t a_scale(int stage) const { return base + kScalesAt + stage * K::kAScaleStride; }
    __device__ uint32_t b_scale(int stage) const { return base + kBScalesAt + stage * K::kBScaleBytes; }

    static constexpr int kScalesAt = K::kStages * (K::kABytes + K::kBBytes) + K::kStoreBytes;
    static constexpr int kBScalesAt = kScalesAt + K::kStages * K::kAScaleStride;
    static constexpr int kBarriersAt = kBScalesAt + K::kStages * K::kBScaleBytes;
};

// The ring's position.
template <typename K>
struct Turn {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void next() {
        if (++stage == K::kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <typename K>
__device__ inline int steps_of(const GroupedParams& p, const Place& place) {
    return ((K::kByRows ? static_cast<int>(p.k) : place.rows) + K::kDepth - 1) / K::kDepth;
}

// First row and column of this block's tile in D, and the rows of D that are the group's from there on.
struct Corner {
    int row, column, rows_left;
};
template <typename K>
__device__ inline Corner corner_of(const GroupedParams& p, const Place& place, const Block<K>& block) {
    Corner corner;
    const int row = place.row * kRows;
    corner.row = K::kByRows ? place.start + row : row;
    corner.rows_left = (K::kByRows ? place.rows : static_cast<int>(p.n)) - row;
    corner.column = static_cast<int>(place.column * block.cluster + block.rank) * K::kColumns;
    return corner;
}

// Chunks of D that this block's tile has, of 128 bytes each.
template <typename K>
__device__ inline int chunks_of(const GroupedParams& p, const Corner& corner) {
    const int width = static_cast<int>(K::kByRows ? p.n : p.k), per_chunk = p.d_type == kFloatF32 ? 32 : 64;
    return (min(K::kColumns, max(width - corner.column, 0)) + per_chunk - 1) / per_chunk;
}

}  // namespace te_fast::gemm
