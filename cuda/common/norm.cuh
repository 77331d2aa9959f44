// What the forward norm kernels share: their parameters, sums over the threads of a row, eight elements normalised and
// stored, and the strip of bytes that is stored transposed.
#pragma once

#include "reduce.cuh"
#include "row.cuh"
#include "tile.cuh"

namespace te_fast {

struct NormParams {
    const void* x;
    const void* residual;  // null: none
    void* sum;             // s, with a residual
    const void* gamma;
    const void* beta;    // null: none
    void* y;             // null: none
    float* mean;         // null: none
    float* rstd;         // null: none
    uint8_t* out;        // null: none
    uint8_t* out_t;      // null: none
    const float* scale;  // null: no cast
    float* scale_inv;    // null: none
    float* amax;         // null: none; else *amax = max(*amax, |y|)
    const float* noop;   // null: none; *noop == 1 leaves every output as it is
    uint64_t rows, ld_t;
    uint32_t cols;
    float eps;
    uint32_t team, strip, chunk;
    uint32_t ring;  // tensors that come through shared memory: none, x, x and the residual
    uint32_t weight_kind, rms, zero_centered, e5m2;
};
static_assert(sizeof(NormParams) == 168);

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kMaxStrip = 64;  // rows of a block at a time; ops/norm.rs keeps to it
constexpr int kHeldBytes = 128;  // of its team's rows that a thread holds; ops/norm.rs counts on it
template <Floating In>
constexpr int kSlots = kHeldBytes / (8 * sizeof(In));  // vectors of eight elements
constexpr int kMaxSums = 8;                            // of a team at a time

struct Shared {
    float parts[2][kMaxSums][kWarps];
    float mean[kMaxStrip], rstd[kMaxStrip];
};

struct Stats {
    float mean, rstd;
};

// The threads that have rows to themselves.
struct Team {
    uint32_t threads, id, rank;
    uint32_t turn = 0;

    __device__ explicit Team(uint32_t threads)
        : threads(threads), id(threadIdx.x / threads), rank(threadIdx.x % threads) {}

    // Sums over the team, several at a time, the same bits in each thread. Lanes come to have one row each (32 / kRows
    // of them the same), so that a shuffle adds for several rows. Two buffers: who writes to one again has passed the
    // barrier that everybody comes to after having read it.
    template <int kSums>
    __device__ void sum(float (&x)[kSums], Shared& shared) {
        constexpr uint32_t kLanes = 32 / kSums;
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int half = kSums / 2, bit = 16; half > 0; half /= 2, bit /= 2) {
            const bool upper = (lane & bit) != 0;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float give = upper ? x[i] : x[i + half];
                x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(kFullWarp, give, bit);
            }
        }
        float own = add_lanes<kLanes>(x[0]);
        const uint32_t sum = lane / kLanes, warps = threads / 32;
        if (warps > 1) {
            float* parts = shared.parts[turn ^= 1][sum];
            if (lane % kLanes == 0) parts[threadIdx.x / 32] = own;
            __syncwarp();
            ptx::sync_threads(id + 1, threads);
            own = 0.0f;
            for (uint32_t warp = lane % kLanes; warp < warps; warp += kLanes) own += parts[id * warps + warp];
            own = add_lanes<kLanes>(own);
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i) x[i] = __shfl_sync(kFullWarp, own, i * kLanes);
    }

  private:
    template <uint32_t kLanes>
    __device__ static float add_lanes(float x) {
#pragma unroll
        for (int bit = kLanes / 2; bit > 0; bit /= 2) x += __shfl_xor_sync(kFullWarp, x, bit);
        return x;
    }
};

// The rounded sum of eight elements: backward, which reads it, sees the numbers that were normalised.
template <Floating In>
__device__ inline Raw8<In> add8(const Raw8<In>& x, const Raw8<In>& residual) {
    float a[8], b[8];
    unpack8<In>(x, a);
    unpack8<In>(residual, b);
#pragma unroll
    for (int c = 0; c < 8; ++c) a[c] += b[c];
    return pack8<In>(a);
}

template <Floating In>
__device__ inline float sum8(const Raw8<In>& raw) {
    float x[8];
    unpack8<In>(raw, x);
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Adds the squared distances of `width` elements from `mean` to `total`.
template <bool kVectors, Floating In>
__device__ inline void add_squares8(const Raw8<In>& raw, float mean, int width, float& total) {
    float x[8];
    unpack8<In>(raw, x);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float d = x[c] - mean;
        if (kVectors || c < width) total = fmaf(d, d, total);
    }
}

__device__ inline float rstd_of(const NormParams& p, float squares) {
    return rsqrtf(fmaf(squares, 1.0f / static_cast<float>(p.cols), p.eps));
}

__device__ inline void store_stats(const NormParams& p, size_t row, const Stats& stats) {
    if (p.mean != nullptr) p.mean[row] = stats.mean;
    if (p.rstd != nullptr) p.rstd[row] = stats.rstd;
}

// Factors and summands of eight columns.
struct Weights {
    float gamma[8], beta[8];
};

template <bool kVectors>
__device__ inline Weights load_weights(const NormParams& p, size_t col, int width) {
    Weights weights = {};
    load_weight8<kVectors>(p.gamma, p.weight_kind, col, width, weights.gamma);
    if (p.beta != nullptr) load_weight8<kVectors>(p.beta, p.weight_kind, col, width, weights.beta);
    const float one = p.zero_centered != 0 ? 1.0f : 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) weights.gamma[c] += one;
    return weights;
}

// Where eight columns of a row go.
struct Outputs {
    uint8_t *y, *out;
    int width;  // columns inside, of eight
};

// Normalises eight elements, stores what is asked for, and returns the bytes. `amax` is raised.
template <bool kVectors, Floating In>
__device__ inline uint2 normalise8(const NormParams& p, const Raw8<In>& raw, const Stats& stats, const Weights& weights,
                                   const Outputs& to, float scale, float& amax) {
    float y[8];
    unpack8<In>(raw, y);
    const float shift = -stats.mean * stats.rstd;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        // FP32 has instructions to spare, and digits that the other form loses where the mean is far from 0.
        const float z = sizeof(In) == 4 ? (y[c] - stats.mean) * stats.rstd : fmaf(y[c], stats.rstd, shift);
        y[c] = fmaf(z, weights.gamma[c], weights.beta[c]);
    }
    if (p.y != nullptr) store_part<kVectors, In>(to.y, 0, to.width, pack8<In>(y));
    if (p.scale == nullptr) return make_uint2(0, 0);
    if constexpr (!kVectors) {
        // A row of NaN or Inf has made something of the zeros behind its end.
#pragma unroll
        for (int c = 0; c < 8; ++c) y[c] = c < to.width ? y[c] : 0.0f;
    }
    absmax_into(amax, y);
    const uint2 bytes = p.e5m2 != 0 ? encode8<e5m2>(y, scale) : encode8<e4m3>(y, scale);
    if (p.out != nullptr) {
        if constexpr (kVectors) {
            *reinterpret_cast<uint2*>(to.out) = bytes;
        } else {
            store_bytes_partial(to.out, bytes, to.width);
        }
    }
    return bytes;
}

template <Floating In>
__device__ inline Outputs outputs_at(const NormParams& p, size_t index, int width) {
    return {static_cast<uint8_t*>(p.y) + index * sizeof(In), p.out + index, width};
}

// Where the bytes of `strip` rows wait until they are stored transposed, 32 rows at a time. Rows from 16 on keep 64
// bytes the other way round, so that both halves are read from different banks. kPair: the halves are two blocks'.
template <bool kPair>
struct Stage {
    uint8_t* bytes;
    uint32_t chunk;

    __device__ uint2& at(uint32_t row, uint32_t col) const {
        return *reinterpret_cast<uint2*>(bytes + row * chunk + (col ^ ((row & 16) << 2)));
    }

    // Four columns of 16 rows.
    __device__ void read(uint32_t half, uint32_t col, uint32_t (&rows)[4][4]) const {
        const uint8_t* from = bytes + (col ^ (half << 6)) + half * 16 * chunk;
#if __CUDA_ARCH__ >= 900
        if constexpr (kPair) from = ptx::of_rank(bytes + col, half);
#endif
#pragma unroll
        for (int i = 0; i < 16; ++i) rows[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(from + i * chunk);
    }
};

// Barrier of the blocks that share a strip.
template <bool kPair>
__device__ inline void sync_strip() {
    __syncwarp();  // lanes part at the ragged end of a row, and these barriers are of whole warps
    if constexpr (kPair) {
#if __CUDA_ARCH__ >= 900
        ptx::cluster_arrive();
        ptx::cluster_wait();
#endif
    } else {
        __syncthreads();
    }
}

// This block's number among those that share a strip.
template <bool kPair>
__device__ inline uint32_t strip_rank() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kPair) return ptx::cluster_rank();
#endif
    return 0;
}

// Writes 32 rows from `row0` on and `cols` columns from `col0` on transposed. Of a pair each block has every other
// group of 256 columns.
template <bool kPair>
__device__ void store_strip(const NormParams& p, const Stage<kPair>& stage, size_t row0, size_t col0, uint32_t cols) {
    const uint32_t items = 2 * ceil_div<uint32_t>(cols, 4), blocks = kPair ? 2 : 1;
    for (uint32_t item = threadIdx.x + strip_rank<kPair>() * blockDim.x; item < items; item += blocks * blockDim.x) {
        const uint32_t half = item % 2, col = item / 2 * 4;
        if (row0 + half * 16 >= p.ld_t) continue;
        uint32_t rows[4][4];
        stage.read(half, col, rows);
#pragma unroll
        for (int i = 0; i < 4; ++i) transpose_bytes(rows[i]);
        uint8_t* to = p.out_t + (col0 + col) * p.ld_t + row0 + half * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (col + i >= cols) break;
            *reinterpret_cast<uint4*>(to + i * p.ld_t) = make_uint4(rows[0][i], rows[1][i], rows[2][i], rows[3][i]);
        }
    }
}

}  // namespace te_fast
