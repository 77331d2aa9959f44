// The transpose of FP8 bytes: a tile through 16 KiB of shared memory, swizzled so that neither side has bank conflicts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/ptx.cuh"
#include "tile/patch.cuh"

namespace te_fast::tile {

// Transposes a 4 x 4 byte matrix held as one word per row.
__device__ inline void transpose_bytes(uint32_t (&word)[4]) {
    const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140);
    const uint32_t low23 = __byte_perm(word[2], word[3], 0x5140);
    const uint32_t high01 = __byte_perm(word[0], word[1], 0x7362);
    const uint32_t high23 = __byte_perm(word[2], word[3], 0x7362);
    word[0] = __byte_perm(low01, low23, 0x5410);
    word[1] = __byte_perm(low01, low23, 0x7632);
    word[2] = __byte_perm(high01, high23, 0x5410);
    word[3] = __byte_perm(high01, high23, 0x7632);
}

// Transposed tile: [column][slot], a slot being the 8 bytes of one patch column. Slot s of column c lies at
// s ^ (c / 8): the 16 threads that write together (equal s, c / 8 = 0..15) meet 16 different slots, and those that
// read 16 bytes together (equal c) still find neighbouring slots side by side, swapped where c / 8 is odd. A slot is
// two words of four rows, which odd slots have swapped: the 32 threads of a warp that write one word each meet 32
// banks.
struct alignas(16) TransposeBuffer {
    uint2 slot[kTile][kPatches];
};

// FP8 bytes of four rows of a patch on their way into the transposed tile.
struct RowGroup {
    static constexpr int kRows = 4;
    uint2 row[kRows] = {};

    // Puts rows `above` .. `above` + 3 of the patch into the tile.
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

// Puts all rows of the patch into the tile.
__device__ inline void put_patch(TransposeBuffer& buffer, const uint2 (&row)[kPatch]) {
    const uint32_t thread = ptx::thread_index(), patch_row = thread / kPatches, patch_col = thread % kPatches;
    const bool swapped = patch_row % 2 != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            upper[i] = half == 0 ? row[i].x : row[i].y;
            lower[i] = half == 0 ? row[4 + i].x : row[4 + i].y;
        }
        transpose_bytes(upper);
        transpose_bytes(lower);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            buffer.slot[patch_col * kPatch + 4 * half + i][patch_row ^ patch_col] =
                swapped ? make_uint2(lower[i], upper[i]) : make_uint2(upper[i], lower[i]);
        }
    }
}

// Clears the bytes of rows from `rows` on of the patch in the transposed tile: outside the tensor they are zero,
// whatever curve and scale made of them.
__device__ inline void clear_rows(TransposeBuffer& buffer, int rows) {
    if (rows >= kPatch) return;
    const uint32_t thread = ptx::thread_index(), patch_row = thread / kPatches, patch_col = thread % kPatches;
    const uint64_t kept = (uint64_t{1} << 8 * max(rows, 0)) - 1;  // row 0 in the lowest byte
    const uint32_t low = static_cast<uint32_t>(kept), high = static_cast<uint32_t>(kept >> 32);
    const uint2 mask = patch_row % 2 == 0 ? make_uint2(low, high) : make_uint2(high, low);  // as the buffer has them
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

// Sixteen rows of a column of the tile.
__device__ inline uint4 column_rows(const TransposeBuffer& buffer, uint32_t col, uint32_t chunk) {
    const uint32_t key = col / kPatch;
    const uint4 value = *reinterpret_cast<const uint4*>(&buffer.slot[col][2 * (chunk ^ (key / 2))]);
    return key % 2 != 0 ? make_uint4(value.z, value.w, value.y, value.x)
                        : make_uint4(value.x, value.y, value.w, value.z);
}

// Writes the tile, which starts at row `row0` and column `col0` of half `half`: out_t[column][row] with leading
// dimension `ld` (a multiple of 16, 16-byte aligned base), rows up to `ld` included. A thread has kTogether columns
// under way.
template <bool kGated, int kTogether = 1, Read kRead = Read::kSoon>
__device__ inline void store_columns(uint8_t* out_t, size_t ld, size_t row0, uint32_t col0,
                                     const Halves<kGated>& halves, int half, const TransposeBuffer& buffer) {
    const uint32_t thread = ptx::thread_index(), chunk = thread % 8;  // 16 rows each
    const size_t row = row0 + chunk * kTransposedAlign;
    if (row >= ld) return;
#pragma unroll kTogether
    for (uint32_t local = thread / 8; local < kTile; local += kTileThreads / 8) {
        const uint32_t col = col0 + local;
        if (col >= halves.cols) break;
        store<kRead>(reinterpret_cast<uint4*>(out_t + halves.column(col, half) * ld + row),
                     column_rows(buffer, local, chunk));
    }
}

}  // namespace te_fast::tile
