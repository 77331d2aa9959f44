// The 128 x 128 tile that every cast to FP8 works in: how 256 threads load it, store it in row layout and store it
// transposed. A thread holds a patch of 8 rows x 8 columns in registers; the transpose goes through 16 KiB of
// shared memory, swizzled so that neither side has bank conflicts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fp8.cuh"
#include "math.cuh"
#include "vec.cuh"

namespace te_fast {

constexpr int kTile = 128;
constexpr int kTileThreads = 256;
constexpr int kPatch = 8;
constexpr int kPatches = kTile / kPatch;  // along either side

// Blocks per multiprocessor that the registers are capped for: the most without a spill, architecture by architecture.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kNarrowTileBlocks = 4;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kNarrowTileBlocks = 2;  // conversion in software needs more
#else
constexpr int kNarrowTileBlocks = 3;
#endif
template <Floating In>
constexpr int kTileBlocks = sizeof(In) == 4 ? 2 : kNarrowTileBlocks;

// Transposed tile: [column][slot], a slot being the 8 bytes of one patch column. Slot s of column c lies at
// s ^ (c / 8): the 16 threads that write together (equal s, c / 8 = 0..15) meet 16 different slots, and those that
// read 16 bytes together (equal c) still find neighbouring slots side by side, swapped where c / 8 is odd.
struct alignas(16) TransposeBuffer {
    uint2 slot[kTile][kPatches];
};

// Where a tile lies and what this thread holds of it.
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

// Loads the thread's patch; zeros outside the tensor.
template <bool kVectors, Floating In>
__device__ inline void load_patch(Raw8<In> (&patch)[kPatch], const In* x, const TilePlace& place) {
    const In* from = x + place.row(0) * place.cols + place.col();
    const int width = place.width();
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        patch[i] = zero8<In>();
        if (place.row(i) < place.rows && width > 0) {
            patch[i] = kVectors ? load8<In>(from + i * place.cols) : load8_partial<In>(from + i * place.cols, width);
        }
    }
}

// Stores row `i` of the patch in row layout.
template <bool kVectors>
__device__ inline void store_patch_row(uint8_t* out, const TilePlace& place, int i, uint2 bytes) {
    const int width = place.width();
    if (place.row(i) >= place.rows || width == 0) return;
    uint8_t* to = out + place.row(i) * place.cols + place.col();
    if constexpr (kVectors) {
        *reinterpret_cast<uint2*>(to) = bytes;
    } else {
        store_bytes_partial(to, bytes, width);
    }
}

// Bytes of rows outside the tensor become zero, whatever the scale made of them.
__device__ inline void clear_outside(uint2 (&bytes)[kPatch], const TilePlace& place) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        if (place.row(i) >= place.rows) bytes[i] = make_uint2(0, 0);
    }
}

// Column `col` of the tile's tensor is column `col` of the output.
struct SameColumn {
    __device__ size_t operator()(size_t col) const { return col; }
};

// Writes the tile transposed: out_t[column(col)][row] with leading dimension `ld` (a multiple of 16, 16-byte aligned
// base), rows up to `ld` included. Contains one barrier, before which nothing of `buffer` may be in use.
template <typename Column = SameColumn>
__device__ inline void store_transposed(uint8_t* out_t, size_t ld, const TilePlace& place, const uint2 (&bytes)[kPatch],
                                        TransposeBuffer& buffer, Column column = {}) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            low[i] = half == 0 ? bytes[i].x : bytes[i].y;
            high[i] = half == 0 ? bytes[4 + i].x : bytes[4 + i].y;
        }
        transpose_bytes(low);
        transpose_bytes(high);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int col = place.patch_col * kPatch + half * 4 + i;
            buffer.slot[col][place.patch_row ^ place.patch_col] = make_uint2(low[i], high[i]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kTile * kTile / 16 / kTileThreads; ++step) {
        const int item = step * kTileThreads + static_cast<int>(threadIdx.x);
        const int col = item / 8, chunk = item % 8;  // 16 rows each
        const size_t row = place.row0 + chunk * 16;
        if (place.col0 + col >= place.cols || row >= ld) continue;
        const int key = col / kPatch;
        uint4 value = *reinterpret_cast<const uint4*>(&buffer.slot[col][2 * (chunk ^ (key / 2))]);
        if (key % 2 != 0) value = make_uint4(value.z, value.w, value.x, value.y);
        *reinterpret_cast<uint4*>(out_t + column(place.col0 + col) * ld + row) = value;
    }
}

}  // namespace te_fast
