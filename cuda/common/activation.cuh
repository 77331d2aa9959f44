// What the activation kernels share: where the halves of a gated tensor lie, eight elements of one row in and out,
// and the cast of a tile that waits in shared memory.
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

// One half as a map of columns, for store_transposed.
template <bool kGated>
struct HalfColumn {
    Halves<kGated> halves;
    int half;
    __device__ size_t operator()(size_t col) const { return halves.column(static_cast<uint32_t>(col), half); }
};

// A thread's patch in a tensor of halves: its first element in half 0, and how far it reaches.
template <bool kGated>
struct PatchPlace {
    size_t first, stride;  // elements
    uint32_t to_linear;
    int rows, width;            // inside the tensor, rows 0 where the width is
    uint32_t interleave, left;  // gated: columns before the first block's end

    __device__ PatchPlace(const TilePlace& place, const Halves<kGated>& halves)
        : stride(halves.stride()), to_linear(halves.to_linear()), width(place.width()), interleave(halves.interleave) {
        const uint32_t col = static_cast<uint32_t>(place.col());
        first = place.row(0) * stride + halves.column(col, 0);
        left = interleave == 0 ? kPatch : interleave - col % interleave;
        const size_t below = place.row(0) < place.rows && width > 0 ? place.rows - place.row(0) : 0;
        rows = static_cast<int>(min(below, static_cast<size_t>(kPatch)));
    }

    // Where row `i` of the patch begins in half `half`.
    __device__ size_t at(int i, int half) const { return first + i * stride + half * to_linear; }

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

// Each thread keeps the bytes of its patch in its own eight slots, in row order, until the tile is stored.
__device__ inline uint2& own_slot(TransposeBuffer& buffer, const TilePlace& place, int i) {
    return buffer.slot[place.patch_row * kPatch + i][place.patch_col];
}

// Where the FP8 bytes of a tile go.
struct Fp8Outputs {
    uint8_t* out;    // null: none
    uint8_t* out_t;  // null: none
    size_t ld_t;
};

// Stores the tile that lies in the own slots of `buffer` in row layout, transposed or both. Contains barriers if it
// is stored transposed; the buffer is in use up to the block's end.
template <bool kVectors, bool kGated>
__device__ inline void store_tile(const Fp8Outputs& to, const TilePlace& place, const Halves<kGated>& halves, int half,
                                  TransposeBuffer& buffer) {
    uint2 bytes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) bytes[i] = own_slot(buffer, place, i);
    if (to.out != nullptr) {
        const PatchPlace<kGated> patch(place, halves);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            if (i >= patch.rows) break;
            uint8_t* line = to.out + patch.at(i, half);
            if constexpr (kVectors) {
                *reinterpret_cast<uint2*>(line) = bytes[i];
            } else {
                patch.for_columns([&](int c, uint32_t offset) {
                    line[offset] = static_cast<uint8_t>((c < 4 ? bytes[i].x : bytes[i].y) >> (8 * (c % 4)));
                });
            }
        }
    }
    if (to.out_t != nullptr) {
        clear_outside(bytes, place);
        __syncthreads();
        store_transposed(to.out_t, to.ld_t, place, bytes, buffer, HalfColumn<kGated>{halves, half});
    }
}

}  // namespace te_fast
