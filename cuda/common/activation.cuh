// What the activation kernels share: where the halves of a gated tensor lie, eight elements of one row in and out,
// and the transposed tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activation_math.cuh"
#include "tile.cuh"

namespace te_fast {

// Where column `col` of y lies in a row of x: activated and linear halves side by side, or, with interleave > 0, in
// alternating blocks of that many columns. A tensor that is not gated has the activated half alone.
template <bool kGated>
struct Halves {
    static constexpr int kCount = kGated ? 2 : 1;
    size_t cols;
    uint32_t interleave;

    // Elements of one row of x.
    __device__ size_t stride() const { return kCount * cols; }
    // From a column of the activated half to the one of the linear half that it meets.
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

// The way back: rounds eight values to Out and stores those inside.
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

// The other way for FP8: bytes of row `i`.
template <bool kVectors, bool kGated>
__device__ inline void store_bytes8(uint8_t* to, const PatchPlace<kGated>& patch, int i, int half, uint2 bytes) {
    if (i >= patch.rows) return;
    to += patch.at(i, half);
    if constexpr (kVectors) {
        *reinterpret_cast<uint2*>(to) = bytes;
    } else {
        patch.for_columns([&](int c, uint32_t offset) {
            to[offset] = static_cast<uint8_t>((c < 4 ? bytes.x : bytes.y) >> (8 * (c % 4)));
        });
    }
}

// FP8 bytes of four rows of a patch on their way into the transposed tile.
struct RowGroup {
    static constexpr int kRows = 4;
    uint2 row[kRows] = {};

    // Puts rows `above` .. `above` + 3 of the patch into the tile. Slots lie as in store_transposed, except that odd
    // patch rows have their words swapped: the 32 threads of a warp write to 32 banks.
    __device__ void put(TransposeBuffer& buffer, int above) const {
        const uint32_t thread = ptx::thread_index(), patch_row = thread / kPatches, patch_col = thread % kPatches;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t columns[4];
#pragma unroll
            for (int i = 0; i < kRows; ++i) columns[i] = half == 0 ? row[i].x : row[i].y;
            transpose_bytes(columns);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint2& slot = buffer.slot[patch_col * kPatch + 4 * half + i][patch_row ^ patch_col];
                reinterpret_cast<uint32_t*>(&slot)[(above / kRows) ^ (patch_row & 1)] = columns[i];
            }
        }
    }
};

// Clears the bytes of rows from `rows` on of the patch in the transposed tile: outside the tensor they are zero,
// whatever curve and scale made of them.
__device__ inline void clear_rows(TransposeBuffer& buffer, int rows) {
    if (rows >= kPatch) return;
    const uint32_t thread = ptx::thread_index(), patch_row = thread / kPatches, patch_col = thread % kPatches;
    const uint64_t kept = (uint64_t{1} << 8 * max(rows, 0)) - 1;  // row 0 in the lowest byte
    const uint32_t low = static_cast<uint32_t>(kept), high = static_cast<uint32_t>(kept >> 32);
    const uint2 mask = patch_row % 2 == 0 ? make_uint2(low, high) : make_uint2(high, low);  // as RowGroup::put has them
#pragma unroll 1
    for (int c = 0; c < kPatch; ++c) {
        uint2& slot = buffer.slot[patch_col * kPatch + c][patch_row ^ patch_col];
        slot = make_uint2(slot.x & mask.x, slot.y & mask.y);
    }
}

// Where a thread may keep the bytes of row `i` of its patch until put_slots.
__device__ inline uint2& own_slot(TransposeBuffer& buffer, int i) {
    const uint32_t thread = ptx::thread_index();
    return buffer.slot[thread / kPatches * kPatch + i][thread % kPatches];
}

// Transposes the tile in place: from the own slots to where RowGroups put it. Contains a barrier.
__device__ inline void put_slots(TransposeBuffer& buffer) {
    RowGroup groups[2];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) groups[i / RowGroup::kRows].row[i % RowGroup::kRows] = own_slot(buffer, i);
    __syncthreads();
    groups[0].put(buffer, 0);
    groups[1].put(buffer, RowGroup::kRows);
}

// Sixteen rows of a column of the tile that RowGroups left.
__device__ inline uint4 column_rows(const TransposeBuffer& buffer, uint32_t col, uint32_t chunk) {
    const uint32_t key = col / kPatch;
    const uint4 value = *reinterpret_cast<const uint4*>(&buffer.slot[col][2 * (chunk ^ (key / 2))]);
    return key % 2 != 0 ? make_uint4(value.z, value.w, value.y, value.x)
                        : make_uint4(value.x, value.y, value.w, value.z);
}

// Writes the tile that RowGroups left, which starts at row `row0` and column `col0` of half `half`: out_t[column][row],
// rows up to `ld` included.
template <bool kGated>
__device__ inline void store_columns(uint8_t* out_t, size_t ld, size_t row0, uint32_t col0,
                                     const Halves<kGated>& halves, int half, const TransposeBuffer& buffer) {
    const uint32_t thread = ptx::thread_index(), chunk = thread % 8;  // 16 rows each
    const size_t row = row0 + chunk * 16;
    if (row >= ld) return;
#pragma unroll 1
    for (uint32_t local = thread / 8; local < kTile; local += kTileThreads / 8) {
        const uint32_t col = col0 + local;
        if (col >= halves.cols) break;
        *reinterpret_cast<uint4*>(out_t + halves.column(col, half) * ld + row) = column_rows(buffer, local, chunk);
    }
}

}  // namespace te_fast
