// Rotary position embeddings: rotates heads by the angles of their rows, in FP32, and rounds once.
//
//   out[a] = in[a] cos[a] + in[b] sin[a],   out[b] = in[b] cos[b] + in[a] sin[b]
//
// for the pairs (a, b) = (i, i + width / 2), or (2i, 2i + 1) when interleaved. `sin` has the sign that the rotation has
// for the channel. The gradient is the transpose: sin[a] and sin[b] change places. Channels from `width` on are copied.
// Up to three tensors of heads go together: queries, keys and values of one product, into or out of it.
//
// Launch: a thread per row, eight heads and sixteen channels (two without vectors); 256 threads.
// Needs:  any strides but of channels, which lie side by side; `wide`: all of it on 16 bytes, channels and width
// multiples
//         of 16. out may be in, with the same strides.
// Moves:  2 sizeof(T) bytes per element, and 8 per row and channel for cosines and sines.

#include "common/constants.cuh"
#include "common/vec.cuh"

namespace te_fast::attention {

struct RotatePart {
    uint32_t heads;      // 0: none
    uint32_t per_group;  // head h is h % per_group of group h / per_group
    uint32_t width;      // channels that turn
    uint32_t units;      // threads of a row
    // Rows of both dimensions, groups, heads of a group; in elements.
    int64_t in_stride[4];
    int64_t out_stride[4];
    int64_t wave_stride[2];
};

struct RotateParams {
    const void* in[kRotateParts];
    void* out[kRotateParts];
    const f32* cos[kRotateParts];
    const f32* sin[kRotateParts];
    uint64_t rows[2];
    uint32_t channels;
    uint32_t interleaved;
    uint32_t transposed;
    uint32_t wide;
    RotatePart part[kRotateParts];
};
static_assert(sizeof(RotateParams) == kRotateParamsBytes);

// kSide channels of either side of a pair.
template <Floating T, int kSide>
__device__ inline void load_pairs(const T* from, uint32_t low, uint32_t high, uint32_t last, bool interleaved,
                                  float (&a)[kSide], float (&b)[kSide]) {
    if constexpr (kSide == 1) {
        a[0] = to_float(from[low]);
        b[0] = high < last ? to_float(from[high]) : 0.0f;
    } else {
        float x[16];
        float (&head)[8] = *reinterpret_cast<float (*)[8]>(x);
        float (&tail)[8] = *reinterpret_cast<float (*)[8]>(x + 8);
        unpack8<T>(load8<T>(from + low), head);
        unpack8<T>(load8<T>(from + high), tail);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            a[i] = interleaved ? x[2 * i] : x[i];
            b[i] = interleaved ? x[2 * i + 1] : x[8 + i];
        }
    }
}

template <Floating T, int kSide>
__device__ inline void store_pairs(T* to, uint32_t low, uint32_t high, uint32_t last, bool interleaved,
                                   const float (&a)[kSide], const float (&b)[kSide]) {
    if constexpr (kSide == 1) {
        to[low] = from_float<T>(a[0]);
        if (high < last) to[high] = from_float<T>(b[0]);
    } else {
        float head[8], tail[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int first = i / 2, second = 4 + i / 2;
            head[i] = interleaved ? (i % 2 == 0 ? a[first] : b[first]) : a[i];
            tail[i] = interleaved ? (i % 2 == 0 ? a[second] : b[second]) : b[i];
        }
        store8<T>(to + low, pack8<T>(head));
        store8<T>(to + high, pack8<T>(tail));
    }
}

// One thread's channels of kRotateHeads heads: `unit` says which.
template <Floating T, int kSide>
__device__ inline void rotate_heads(const RotateParams& p, const RotatePart& part, int index, uint64_t row,
                                    uint32_t unit) {
    const uint32_t chunks = (p.channels + 2 * kSide - 1) / (2 * kSide);
    const uint32_t chunk = unit % chunks, first = unit / chunks * kRotateHeads;
    const uint32_t pairs = part.width / 2, turning = pairs / kSide;
    const bool turns = chunk < turning, interleaved = p.interleaved != 0;
    uint32_t low = chunk * kSide, high = low + pairs;
    if (!turns || interleaved) {  // copied channels and interleaved pairs are adjacent
        low = chunk * 2 * kSide;
        high = low + kSide;
    }
    const uint64_t row0 = row / p.rows[1], row1 = row - row0 * p.rows[1];
    float cos_a[kSide], cos_b[kSide], sin_a[kSide], sin_b[kSide];
    if (turns) {
        const int64_t at = row0 * part.wave_stride[0] + row1 * part.wave_stride[1];
        load_pairs<f32, kSide>(p.cos[index] + at, low, high, p.channels, interleaved, cos_a, cos_b);
        if (p.transposed != 0) {
            load_pairs<f32, kSide>(p.sin[index] + at, low, high, p.channels, interleaved, sin_b, sin_a);
        } else {
            load_pairs<f32, kSide>(p.sin[index] + at, low, high, p.channels, interleaved, sin_a, sin_b);
        }
    }
    const T* in = static_cast<const T*>(p.in[index]) + row0 * part.in_stride[0] + row1 * part.in_stride[1];
    T* out = static_cast<T*>(p.out[index]) + row0 * part.out_stride[0] + row1 * part.out_stride[1];
    const uint32_t end = min(part.heads, first + kRotateHeads);
#pragma unroll 2
    for (uint32_t head = first; head < end; ++head) {
        const uint32_t group = head / part.per_group, inside = head - group * part.per_group;
        const T* from = in + group * part.in_stride[2] + inside * part.in_stride[3];
        T* to = out + group * part.out_stride[2] + inside * part.out_stride[3];
        float a[kSide], b[kSide];
        load_pairs<T, kSide>(from, low, high, p.channels, turns && interleaved, a, b);
        if (turns) {
#pragma unroll
            for (int i = 0; i < kSide; ++i) {
                // No fused multiply-add, so that the bits equal the host's.
                const float x = a[i], y = b[i];
                a[i] = __fadd_rn(__fmul_rn(x, cos_a[i]), __fmul_rn(y, sin_a[i]));
                b[i] = __fadd_rn(__fmul_rn(y, cos_b[i]), __fmul_rn(x, sin_b[i]));
            }
        }
        store_pairs<T, kSide>(to, low, high, p.channels, turns && interleaved, a, b);
    }
}

template <Floating T>
__device__ void rotate(const RotateParams& p) {
    const uint32_t units = p.part[0].units + p.part[1].units + p.part[2].units;
    const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * kRotateThreads + threadIdx.x;
    const uint64_t row = thread / units;
    if (row >= p.rows[0] * p.rows[1]) return;
    uint32_t unit = static_cast<uint32_t>(thread - row * units);
#pragma unroll
    for (int index = 0; index < kRotateParts; ++index) {
        const RotatePart& part = p.part[index];
        if (unit < part.units) {
            if (p.wide != 0) {
                rotate_heads<T, 8>(p, part, index, row, unit);
            } else {
                rotate_heads<T, 1>(p, part, index, row, unit);
            }
            return;
        }
        unit -= part.units;
    }
}

#define INSTANCE(symbol, type)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kRotateThreads) symbol(const __grid_constant__ RotateParams p) { \
        ptx::wait_for_prior_grids();                                                                              \
        rotate<type>(p);                                                                                          \
    }

INSTANCE(rotate_f32, f32)
INSTANCE(rotate_f16, f16)
INSTANCE(rotate_bf16, bf16)

}  // namespace te_fast::attention
