// The 128 x 128 tile that every cast with a transposed layout works in, and how its 256 threads load it and store it in
// row layout: each has a patch of 8 rows x 8 columns, of a tensor or of the two halves of a gated one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/constants.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

namespace te_fast::tile {

constexpr int kPatch = kVector;
constexpr int kPatches = kTile / kPatch;  // along either side

// The place of a tile, and this thread's patch of it.
struct TilePlace {
    size_t rows, cols;  // of the tensor
    size_t row0, col0;  // of the tile
    int patch_row, patch_col;

    __device__ TilePlace(size_t rows, size_t cols, size_t tile_row, size_t tile_col)
        : rows(rows),
          cols(cols),
          row0(tile_row * kTile),
          col0(tile_col * kTile),
          patch_row(static_cast<int>(threadIdx.x) / kPatches),
          patch_col(static_cast<int>(threadIdx.x) % kPatches) {}

    __device__ size_t row(int i) const { return row0 + patch_row * kPatch + i; }
    __device__ size_t col() const { return col0 + patch_col * kPatch; }
    // Columns of the patch inside the tensor, 0 to 8.
    __device__ int width() const {
        return col() >= cols ? 0 : static_cast<int>(min(cols - col(), static_cast<size_t>(kPatch)));
    }
};

// Whether rows of `cols` elements allow 16-byte loads and 8-byte FP8 stores everywhere.
template <Floating In>
__device__ inline bool rows_are_vectors(const In* x, const uint8_t* out, size_t cols) {
    return cols % kPatch == 0 && is_aligned(x, 16) && is_aligned(out, 8);
}

// Where column `col` of y lies in a row of x: activated and linear halves side by side, or, with interleave > 0, in
// alternating blocks of that many columns. A tensor that is not gated has the activated half alone.
template <bool kGated>
struct Halves {
    static constexpr int kCount = kGated ? 2 : 1;
    size_t cols;
    uint32_t interleave;

    // Elements of one row of x.
    __device__ size_t stride() const { return kCount * cols; }
    // Distance from a column of the activated half to its column of the linear half.
    __device__ uint32_t to_linear() const { return interleave == 0 ? static_cast<uint32_t>(cols) : interleave; }
    // Column in x of `col` of half 0 (activated) or 1 (linear); the plan keeps cols below 2^31.
    __device__ uint32_t column(uint32_t col, int half) const {
        if constexpr (!kGated) return col;
        return col + (interleave == 0 ? 0 : col / interleave * interleave) + half * to_linear();
    }
    // Whether eight columns from a multiple of eight on stay together.
    __device__ bool keeps_vectors() const { return cols % kPatch == 0 && interleave % kPatch == 0; }
};

// A thread's patch in a tensor of halves: its first element in half 0, and how far it reaches.
template <bool kGated>
struct PatchPlace {
    size_t first;  // elements
    uint32_t stride, to_linear;
    int rows, width;            // inside, from the patch's first on; rows may go beyond it, and are 0 where width is
    uint32_t interleave, left;  // gated: columns before the first block's end

    // The plan keeps rows of halves below 2^32 elements, and what one block reads below 2^31 rows.
    __device__ PatchPlace(const TilePlace& place, const Halves<kGated>& halves)
        : stride(static_cast<uint32_t>(halves.stride())),
          to_linear(halves.to_linear()),
          width(place.width()),
          interleave(halves.interleave) {
        const uint32_t col = static_cast<uint32_t>(place.col());
        first = place.row(0) * stride + halves.column(col, 0);
        left = interleave == 0 ? kPatch : interleave - col % interleave;
        rows = place.row(0) < place.rows && width > 0 ? static_cast<int>(place.rows - place.row(0)) : 0;
    }

    // To the same patch of the tile below.
    __device__ void descend() {
        first += static_cast<size_t>(kTile) * stride;
        rows -= kTile;
    }

    // Where row `i` from the patch's first on begins in half `half`.
    __device__ size_t at(int i, int half) const {
        return first + static_cast<uint64_t>(static_cast<uint32_t>(i)) * stride + half * to_linear;
    }

    // Calls `visit(c, offset)` for each of the eight columns that is inside.
    template <typename Visit>
    __device__ void for_columns(Visit visit) const {
        uint32_t offset = 0, until = left;
#pragma unroll
        for (int c = 0; c < kPatch; ++c) {
            if (c < width) visit(c, offset);
            ++offset;
            if (kGated && interleave != 0 && --until == 0) {
                offset += interleave;
                until = interleave;
            }
        }
    }
};

// Eight elements of row `i` of the patch; zeros outside.
template <bool kVectors, Floating In, bool kGated>
__device__ inline Raw8<In> load_row8(const In* x, const PatchPlace<kGated>& patch, int i, int half) {
    if (i >= patch.rows) return zero8<In>();
    const In* from = x + patch.at(i, half);
    if constexpr (kVectors) {
        return load8<In>(from);
    } else {
        float values[8] = {};
        patch.for_columns([&](int c, uint32_t offset) { values[c] = to_float(from[offset]); });
        return pack8<In>(values);
    }
}

// The inverse: rounds eight values to Out and stores those inside.
template <bool kVectors, Floating Out, bool kGated>
__device__ inline void store_row8(Out* to, const PatchPlace<kGated>& patch, int i, int half, const float (&values)[8]) {
    if (i >= patch.rows) return;
    to += patch.at(i, half);
    if constexpr (kVectors) {
        store8<Out>(to, pack8<Out>(values));
    } else {
        patch.for_columns([&](int c, uint32_t offset) { to[offset] = from_float<Out>(values[c]); });
    }
}

// When what is stored is read: by one of the next kernels, or when it has left L2 anyway.
enum class Read { kSoon, kLate };

template <Read kRead, typename Vector>
__device__ inline void store(Vector* to, const Vector& value) {
    if constexpr (kRead == Read::kSoon) {
        *to = value;
    } else {
        __stcs(to, value);  // it leaves L2 first
    }
}

// The other way for FP8: bytes of row `i`.
template <bool kVectors, Read kRead = Read::kSoon, bool kGated>
__device__ inline void store_bytes8(uint8_t* to, const PatchPlace<kGated>& patch, int i, int half, uint2 bytes) {
    if (i >= patch.rows) return;
    to += patch.at(i, half);
    if constexpr (kVectors) {
        store<kRead>(reinterpret_cast<uint2*>(to), bytes);
    } else {
        ptx::forget(to);  // one address for all columns; the compiler would keep one for each
        patch.for_columns([&](int c, uint32_t offset) {
            to[offset] = static_cast<uint8_t>((c < 4 ? bytes.x : bytes.y) >> (8 * (c % 4)));
        });
    }
}

}  // namespace te_fast::tile
