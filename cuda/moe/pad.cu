// Rows moved in segments: padding and unpadding of grouped GEMM inputs, and chunk sorting.
//
//   out[r] = x[in_start(s) + r - out_start(s)] for the segment s that row r of out lies in, while it is inside the
//   segment's length; behind it (padding, the end of a larger buffer) zero, except that sorting keeps rows past all
//   chunks in their place. Probabilities, one per row, move along.
//
//   kPad:   segment s has splits[s] rows of x; in out each starts at a multiple of `align`
//   kUnpad: the reverse
//   kSort:  segment j of out is chunk index[j] of x        kUnsort: the reverse
//
// Launch: any number of blocks of 256 threads, a warp per row, strided; shared memory 12 bytes per split.
// Needs:  at most 4096 splits (1024 when they are passed by value); contiguous x and out, row_bytes even; negative
//         splits count as 0, indices outside [0, count) as empty chunks. Rows outside x read as zero.
// Moves:  2 row_bytes per row.

#include "common/constants.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/scan.cuh"
#include "common/vec.cuh"

namespace te_fast::moe {

constexpr int kVectors = 8;  // 16-byte words in flight per lane

enum class Move : uint32_t { kPad = kMovePad, kUnpad = kMoveUnpad, kSort = kMoveSort, kUnsort = kMoveUnsort };
enum class IntType : uint32_t { kI32 = 0, kI64 = 1 };

struct PadRowsParams {
    const uint8_t* x;
    uint8_t* out;
    const uint8_t* probs;  // null: none
    uint8_t* out_probs;
    const void* splits;   // null: `inline_splits`
    const void* index;    // of the chunks, sorting alone
    void* padded_splits;  // padding alone, in the type of splits; null: none
    uint64_t in_rows, out_rows;
    uint64_t row_bytes;
    uint32_t prob_bytes;
    uint32_t count;
    uint32_t align;
    Move move;
    IntType split_type;
    IntType index_type;
    int32_t inline_splits[kInlineSplits];
};
static_assert(sizeof(PadRowsParams) == kPadRowsParamsBytes);

// Dynamic shared memory: three arrays of `count`.
struct Segments {
    uint32_t* out_start;
    uint32_t* in_start;
    uint32_t* length;
};

__device__ inline uint32_t split_size(const PadRowsParams& p, uint32_t i) {
    int64_t size;
    if (p.splits == nullptr) {
        size = p.inline_splits[i];
    } else if (p.split_type == IntType::kI32) {
        size = static_cast<const int32_t*>(p.splits)[i];
    } else {
        size = static_cast<const int64_t*>(p.splits)[i];
    }
    const int64_t most = static_cast<int64_t>(max(p.in_rows, p.out_rows));
    return static_cast<uint32_t>(max(int64_t{0}, min(size, most)));
}

__device__ inline uint32_t chunk_at(const PadRowsParams& p, uint32_t j) {
    const int64_t chunk = p.index_type == IntType::kI32 ? static_cast<const int32_t*>(p.index)[j]
                                                        : static_cast<const int64_t*>(p.index)[j];
    return chunk >= 0 && chunk < p.count ? static_cast<uint32_t>(chunk) : p.count;
}

// to[i] = sum of size(i') over i' < i; every thread of the block. Ends with a barrier.
template <typename Size>
__device__ uint32_t exclusive_sums(uint32_t count, uint32_t* to, Size size) {
    __shared__ uint32_t scratch[kPadThreads / 32];
    uint32_t carried = 0;
    for (uint32_t first = 0; first < count; first += kPadThreads) {
        const uint32_t i = first + threadIdx.x;
        const uint32_t mine = i < count ? size(i) : 0;
        uint32_t total;
        const uint32_t through = block_scan<kPadThreads>(mine, Sum{}, scratch, total);
        if (i < count) to[i] = carried + through - mine;
        carried += total;
    }
    __syncthreads();
    return carried;
}

// Fills the segments; returns the number of rows that they cover in out.
__device__ uint32_t load_segments(const PadRowsParams& p, const Segments& s) {
    const auto size = [&](uint32_t i) { return split_size(p, i); };
    const auto padded = [&](uint32_t i) { return round_up(split_size(p, i), p.align); };
    if (p.move == Move::kPad || p.move == Move::kUnpad) {
        for (uint32_t i = threadIdx.x; i < p.count; i += kPadThreads) s.length[i] = split_size(p, i);
        const bool pad = p.move == Move::kPad;
        const uint32_t plain_rows = exclusive_sums(p.count, pad ? s.in_start : s.out_start, size);
        const uint32_t padded_rows = exclusive_sums(p.count, pad ? s.out_start : s.in_start, padded);
        return pad ? padded_rows : plain_rows;
    }
    // Where chunk c starts in its own order, and segment j in the sorted one.
    uint32_t* chunk_start = p.move == Move::kSort ? s.length : s.out_start;
    uint32_t* sorted_start = p.move == Move::kSort ? s.out_start : s.length;
    exclusive_sums(p.count, chunk_start, size);
    const auto chunk_size = [&](uint32_t j) {
        const uint32_t c = chunk_at(p, j);
        return c < p.count ? split_size(p, c) : 0;
    };
    const uint32_t rows = exclusive_sums(p.count, sorted_start, chunk_size);
    for (uint32_t i = threadIdx.x; i < p.count; i += kPadThreads) s.in_start[i] = 0xffffffffu;
    __syncthreads();
    for (uint32_t j = threadIdx.x; j < p.count; j += kPadThreads) {
        const uint32_t c = chunk_at(p, j);
        if (c == p.count) continue;
        if (p.move == Move::kSort) {
            s.in_start[j] = chunk_start[c];
        } else {
            s.in_start[c] = sorted_start[j];
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.count; i += kPadThreads)
        s.length[i] = p.move == Move::kSort ? chunk_size(i) : split_size(p, i);
    __syncthreads();
    return rows;
}

__device__ inline void write_padded_splits(const PadRowsParams& p) {
    for (uint32_t i = threadIdx.x; i < p.count; i += kPadThreads) {
        const uint32_t padded = round_up(split_size(p, i), p.align);
        if (p.split_type == IntType::kI32) {
            static_cast<int32_t*>(p.padded_splits)[i] = static_cast<int32_t>(padded);
        } else {
            static_cast<int64_t*>(p.padded_splits)[i] = padded;
        }
    }
}

// Row of x that row `row` of out comes from; at or past in_rows for a zero row.
__device__ inline uint64_t source_row(const PadRowsParams& p, const Segments& s, uint64_t row, uint32_t covered) {
    const bool sorts = p.move == Move::kSort || p.move == Move::kUnsort;
    if (row >= covered || p.count == 0) return sorts ? row : p.in_rows;
    uint32_t low = 0, high = p.count - 1;
    while (low < high) {
        const uint32_t middle = (low + high + 1) / 2;
        if (s.out_start[middle] <= row) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const uint32_t inside = static_cast<uint32_t>(row) - s.out_start[low];
    if (inside >= s.length[low] || s.in_start[low] == 0xffffffffu) return p.in_rows;
    return static_cast<uint64_t>(s.in_start[low]) + inside;
}

template <typename Word>
__device__ inline void copy_row(const PadRowsParams& p, uint64_t row, uint64_t source) {
    const uint64_t words = p.row_bytes / sizeof(Word);
    const bool inside = source < p.in_rows;
    const Word* from = reinterpret_cast<const Word*>(p.x + (inside ? source : 0) * p.row_bytes);
    Word* to = reinterpret_cast<Word*>(p.out + row * p.row_bytes);
    for (uint64_t first = threadIdx.x % 32; first < words; first += 32 * kVectors) {
        Word word[kVectors];
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
            const uint64_t at = first + j * 32;
            word[j] = Word{};
            if (!inside || at >= words) continue;
            if constexpr (sizeof(Word) == 16) {
                word[j] = ptx::load_once(from + at);
            } else {
                word[j] = from[at];
            }
        }
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
            const uint64_t at = first + j * 32;
            if (at < words) to[at] = word[j];
        }
    }
}

__device__ inline void copy_prob(const PadRowsParams& p, uint64_t row, uint64_t source) {
    const bool inside = source < p.in_rows;
    for (uint32_t i = threadIdx.x % 32; i < p.prob_bytes; i += 32) {
        p.out_probs[row * p.prob_bytes + i] = inside ? p.probs[source * p.prob_bytes + i] : 0;
    }
}

__device__ inline void move_rows(const PadRowsParams& p) {
    extern __shared__ uint32_t table[];
    ptx::wait_for_prior_grids();
    const Segments segments{table, table + p.count, table + 2 * p.count};
    const uint32_t covered = load_segments(p, segments);
    if (p.padded_splits != nullptr && blockIdx.x == 0) write_padded_splits(p);
    const bool vectors = p.row_bytes % 16 == 0 && is_aligned(p.x, 16) && is_aligned(p.out, 16);
    constexpr int kWarps = kPadThreads / 32;
    for (uint64_t row = static_cast<uint64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < p.out_rows;
         row += static_cast<uint64_t>(gridDim.x) * kWarps) {
        const uint64_t source = source_row(p, segments, row, covered);
        vectors ? copy_row<uint4>(p, row, source) : copy_row<uint16_t>(p, row, source);
        if (p.probs != nullptr) copy_prob(p, row, source);
    }
}

extern "C" __global__ void __launch_bounds__(kPadThreads) pad_rows(const __grid_constant__ PadRowsParams p) {
    move_rows(p);
}

}  // namespace te_fast::moe
