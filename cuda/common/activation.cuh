// What the activation kernels share: where the halves of a gated tensor lie, eight elements of one row in and out,
// and the cast of a tile that waits in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activation_math.cuh"
#include "tile.cuh"

namespace te_fast {

enum class FloatKind : uint32_t { kF32, kF16, kBf16 };  // as `Float` in ids.rs

__device__ inline float load_float(const void* from, size_t index, uint32_t kind) {
    switch (static_cast<FloatKind>(kind)) {
        case FloatKind::kF32:
            return static_cast<const f32*>(from)[index];
        case FloatKind::kF16:
            return to_float(static_cast<const f16*>(from)[index]);
        default:
            return to_float(static_cast<const bf16*>(from)[index]);
    }
}

__device__ inline void store_float(void* to, size_t index, uint32_t kind, float x) {
    switch (static_cast<FloatKind>(kind)) {
        case FloatKind::kF32:
            static_cast<f32*>(to)[index] = x;
            break;
        case FloatKind::kF16:
            static_cast<f16*>(to)[index] = from_float<f16>(x);
            break;
        default:
            static_cast<bf16*>(to)[index] = from_float<bf16>(x);
            break;
    }
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
    // Column in x of `col` of half 0 (activated) or 1 (linear); the plan keeps cols below 2^31.
    __device__ uint32_t column(uint32_t col, int half) const {
        if constexpr (!kGated) return col;
        if (interleave == 0) return col + half * static_cast<uint32_t>(cols);
        return col + (col / interleave + half) * interleave;
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

// Eight elements of row `row` of a tensor of halves, from column place.col() of half `half`; zeros outside.
template <bool kVectors, bool kGated, Floating In>
__device__ inline Raw8<In> load_half8(const In* x, const TilePlace& place, const Halves<kGated>& halves, size_t row,
                                      int half) {
    const int width = place.width();
    if (row >= place.rows || width == 0) return zero8<In>();
    const In* from = x + row * halves.stride();
    const uint32_t col = static_cast<uint32_t>(place.col());
    if constexpr (kVectors) {
        return load8<In>(from + halves.column(col, half));
    } else {
        float values[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            values[c] = c < width ? to_float(from[halves.column(col + c, half)]) : 0.0f;
        }
        return pack8<In>(values);
    }
}

// The way back: rounds eight values to Out and stores those inside.
template <bool kVectors, bool kGated, Floating Out>
__device__ inline void store_half8(Out* to, const TilePlace& place, const Halves<kGated>& halves, size_t row, int half,
                                   const float (&values)[8]) {
    const int width = place.width();
    if (row >= place.rows || width == 0) return;
    to += row * halves.stride();
    const uint32_t col = static_cast<uint32_t>(place.col());
    if constexpr (kVectors) {
        store8<Out>(to + halves.column(col, half), pack8<Out>(values));
    } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            if (c < width) to[halves.column(col + c, half)] = from_float<Out>(values[c]);
        }
    }
}

// Rows whose loads are under way at once.
template <bool kVectors, Floating In>
constexpr int kRowsAtOnce = kVectors && sizeof(In) == 2 ? 2 : 1;

// Eight scaled values as FP8.
template <Fp8 Out>
__device__ inline uint2 encode8(const float (&x)[8], float scale) {
    return make_uint2(fp8_pair<Out>(x[0] * scale, x[1] * scale) | (fp8_pair<Out>(x[2] * scale, x[3] * scale) << 16),
                      fp8_pair<Out>(x[4] * scale, x[5] * scale) | (fp8_pair<Out>(x[6] * scale, x[7] * scale) << 16));
}

// Raises `amax` to the largest of eight magnitudes, NaN aside.
__device__ inline void absmax_into(float& amax, const float (&x)[8]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) amax = fmaxf(amax, fabsf(x[c]));
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
    const int width = place.width();
    if (to.out != nullptr && width != 0) {
        uint8_t* line = to.out + place.row(0) * halves.stride();
        const uint32_t col = static_cast<uint32_t>(place.col()), first = halves.column(col, half);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            if (place.row(i) >= place.rows) break;
            if constexpr (kVectors) {
                *reinterpret_cast<uint2*>(line + first) = bytes[i];
            } else {
                for (int c = 0; c < width; ++c) {
                    const uint32_t word = c < 4 ? bytes[i].x : bytes[i].y;
                    line[halves.column(col + c, half)] = static_cast<uint8_t>(word >> (8 * (c % 4)));
                }
            }
            line += halves.stride();
        }
    }
    if (to.out_t != nullptr) {
        clear_outside(bytes, place);
        __syncthreads();
        store_transposed(to.out_t, to.ld_t, place, bytes, buffer, HalfColumn<kGated>{halves, half});
    }
}

}  // namespace te_fast
