// Common parts of the forward norm kernels: parameters, sums over the threads of a row, normalisation and store of
// eight elements, and the strip of bytes that is stored transposed.
#pragma once

#include "common/constants.cuh"
#include "common/fp8.cuh"
#include "common/measure.cuh"
#include "norm/row.cuh"
#include "tile/transpose.cuh"

namespace te_fast::norm {

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
    float* measured;     // null: none; the scale that y is quantised with, where it is not cast here
    AmaxWorkspace* workspace;
    uint64_t rows, ld_t;
    uint32_t cols;
    float eps;
    uint32_t team, strip, chunk;
    uint32_t ring;  // tensors that come through shared memory: none, x, x and the residual
    uint32_t weight_kind, rms, zero_centered, e5m2;
    ScaleRule rule;  // of `measured`
};
static_assert(sizeof(NormParams) == kNormParamsBytes);

constexpr int kWarps = kThreads / 32;
constexpr int kMaxSums = 8;  // of a team at a time

struct ForwardShared {
    uint64_t sent[2][kWarps];
    float parts[2][kMaxSums][kWarps * kMaxBlocks];
    float mean[kMaxStrip], rstd[kMaxStrip];
};

struct Stats {
    float mean, rstd;
};

// The threads that have rows to themselves: of one block, or as many of each block of a cluster.
struct ForwardTeam {
    uint32_t threads, id, rank;  // in this block
    uint32_t blocks = 1, block = 0;
    uint32_t turn = 0;

    __device__ explicit ForwardTeam(uint32_t threads)
        : threads(threads), id(threadIdx.x / threads), rank(threadIdx.x % threads) {}

    // The blocks of a cluster, if there is one, have their rows together. All threads; await_cluster before a sum.
    __device__ void join_cluster(ForwardShared& shared) {
#if __CUDA_ARCH__ >= 900
        blocks = ptx::cluster_blocks();
        block = ptx::cluster_rank();
        if (blocks == 1) return;
        if (threadIdx.x < 2 * kWarps) ptx::init_barrier(shared.sent[0][threadIdx.x], 1);
        ptx::init_barriers_done();
        ptx::cluster_arrive();
#endif
    }

    // Until every block of the cluster has joined and can be sent to.
    __device__ void await_cluster() const {
#if __CUDA_ARCH__ >= 900
        if (blocks == 1) return;
        __syncwarp();
        ptx::cluster_wait();
#endif
    }

    // Lanes of a sum, whose number is lane / kLanes.
    template <int kSums>
    static constexpr uint32_t kLanes = 32 / kSums;

    // Sums over the team, several at a time: the same bits in each lane of a sum, in each warp. A shuffle adds for
    // several sums, since lanes come to have one each. With two buffers, a thread that writes to one again has passed a
    // barrier that every thread reaches after reading it.
    template <int kSums>
    __device__ float sum(float (&x)[kSums], ForwardShared& shared) {
        const uint32_t lane = threadIdx.x % 32, first = lane % kLanes<kSums>;
#pragma unroll
        for (int half = kSums / 2, bit = 16; half > 0; half /= 2, bit /= 2) {
            const bool upper = (lane & bit) != 0;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float give = upper ? x[i] : x[i + half];
                x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(kFullWarp, give, bit);
            }
        }
        float own = add_lanes<kLanes<kSums>>(x[0]);
        const uint32_t warps = threads / 32 * blocks;  // block by block
        if (warps == 1) return own;
        float* parts = shared.parts[turn % 2][lane / kLanes<kSums>] + id * warps;
        share<kSums>(own, parts + block * (threads / 32) + rank / 32, first, shared);
        own = 0.0f;
        for (uint32_t from = first; from < warps; from += kWarps) {
#pragma unroll
            for (uint32_t i = 0; i < kWarps; i += kLanes<kSums>) own += from + i < warps ? parts[from + i] : 0.0f;
        }
        ++turn;
        return add_lanes<kLanes<kSums>>(own);
    }

  private:
    // The warp's part to every block, until all are there.
    template <int kSums>
    __device__ void share(float own, float* to, uint32_t first, ForwardShared& shared) {
        if (blocks == 1) {
            if (first == 0) *to = own;
            __syncwarp();
            ptx::sync_threads(id + 1, threads);
            return;
        }
#if __CUDA_ARCH__ >= 900
        uint64_t& sent = shared.sent[turn % 2][id];
        if (rank == 0) ptx::arrive_expecting(sent, kSums * sizeof(float) * (threads / 32) * blocks);
        for (uint32_t other = first; other < blocks; other += kLanes<kSums>) ptx::send(to, own, sent, other);
        __syncwarp();
        ptx::wait_sent(sent, turn / 2 % 2);
#endif
    }

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

// The same of kCount vectors, `step` columns apart, in memory format: all loads are in flight before the first one is
// awaited, together with the loads between load and unpack.
template <int kCount>
struct WeightVectors {
    uint4 word[kCount][2][2];  // of gamma, of beta; FP32 has two

    // The first `count` of them, zeros for the rest.
    __device__ void load(const NormParams& p, size_t col, size_t step, int count) {
        const bool wide = static_cast<FloatKind>(p.weight_kind) == FloatKind::kF32;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
            for (int tensor = 0; tensor < 2; ++tensor) {
                const void* from = tensor == 0 ? p.gamma : p.beta;
                const bool there = i < count && from != nullptr;
                const auto* at = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(from) +
                                                                (col + i * step) * (wide ? 4 : 2));
                word[i][tensor][0] = there ? __ldg(at) : make_uint4(0, 0, 0, 0);
                word[i][tensor][1] = there && wide ? __ldg(at + 1) : make_uint4(0, 0, 0, 0);
            }
        }
    }

    __device__ void unpack(const NormParams& p, Weights (&weights)[kCount]) const {
        switch (static_cast<FloatKind>(p.weight_kind)) {
            case FloatKind::kF32:
                return unpack_as<f32>(p, weights);
            case FloatKind::kF16:
                return unpack_as<f16>(p, weights);
            default:
                return unpack_as<bf16>(p, weights);
        }
    }

  private:
    template <Floating W>
    __device__ void unpack_as(const NormParams& p, Weights (&weights)[kCount]) const {
        const float one = p.zero_centered != 0 ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            Raw8<W> gamma, beta;
#pragma unroll
            for (int half = 0; half < static_cast<int>(sizeof(W) / 2); ++half) {
                gamma.word[half] = word[i][0][half];
                beta.word[half] = word[i][1][half];
            }
            unpack8<W>(gamma, weights[i].gamma);
            unpack8<W>(beta, weights[i].beta);
#pragma unroll
            for (int c = 0; c < 8; ++c) weights[i].gamma[c] += one;
        }
    }
};

// Weights of a block's columns in shared memory: in four planes, so that 16 bytes of each lane lie side by side.
struct WeightPlanes {
    float4* planes;
    uint32_t size;

    // Items of eight columns that are there.
    __device__ uint32_t items(const NormParams& p, uint32_t col0) const {
        return col0 >= p.cols ? 0 : min(size, ceil_div(p.cols - col0, 8u));
    }

    // From item `first` on.
    template <bool kVectors>
    __device__ void fill(const NormParams& p, uint32_t col0, uint32_t first = 0) const {
        for (uint32_t i = first + threadIdx.x; i < items(p, col0); i += blockDim.x) {
            store(i, load_weights<kVectors>(p, col0 + 8 * i, width_at(col0 + 8 * i, p.cols)));
        }
    }

    __device__ void store(uint32_t i, const Weights& w) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float *g = w.gamma + 4 * half, *b = w.beta + 4 * half;
            planes[half * size + i] = make_float4(g[0], g[1], g[2], g[3]);
            planes[(2 + half) * size + i] = make_float4(b[0], b[1], b[2], b[3]);
        }
    }

    // Of eight columns from `col` of the block's on.
    __device__ Weights read(uint32_t col) const {
        Weights w;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 g = planes[half * size + col / 8], b = planes[(2 + half) * size + col / 8];
            float *gamma = w.gamma + 4 * half, *beta = w.beta + 4 * half;
            gamma[0] = g.x, gamma[1] = g.y, gamma[2] = g.z, gamma[3] = g.w;
            beta[0] = b.x, beta[1] = b.y, beta[2] = b.z, beta[3] = b.w;
        }
        return w;
    }
};

// The outputs to store; the two usual cases of rows of whole vectors are separate, without branches inside.
enum class Store { kAny, kHigh, kE4m3 };

__device__ inline Store usual_store(const NormParams& p) {
    if (p.scale == nullptr) return p.y != nullptr ? Store::kHigh : Store::kAny;
    return p.y == nullptr && p.out != nullptr && p.e5m2 == 0 ? Store::kE4m3 : Store::kAny;
}

// The destination of eight columns of a row.
struct Outputs {
    uint8_t *y, *out;
    int width;  // columns inside, of eight
};

// Normalises eight elements, stores the requested outputs, and returns the bytes. Raises `amax`.
template <bool kVectors, Floating In, Store kStore = Store::kAny, bool kAlone = false>
__device__ inline uint2 normalise8(const NormParams& p, const Raw8<In>& raw, const Stats& stats, const Weights& weights,
                                   const Outputs& to, float scale, float& amax) {
    constexpr bool kAny = kStore == Store::kAny;
    float y[8];
    unpack8<In>(raw, y);
    const float shift = -stats.mean * stats.rstd;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        // FP32 can afford the instructions, and the other form loses digits if the mean is far from 0.
        const float z = sizeof(In) == 4 ? (y[c] - stats.mean) * stats.rstd : fmaf(y[c], stats.rstd, shift);
        y[c] = fmaf(z, weights.gamma[c], weights.beta[c]);
    }
    if (kStore == Store::kHigh || (kAny && p.y != nullptr))
        store_part<kVectors, In, kAlone>(to.y, 0, to.width, pack8<In>(y));
    if constexpr (!kVectors) {
        // A row with NaN or Inf turns the zeros after its end into NaN.
#pragma unroll
        for (int c = 0; c < 8; ++c) y[c] = c < to.width ? y[c] : 0.0f;
    }
    absmax_into(amax, y);
    if (kStore == Store::kHigh || (kAny && p.scale == nullptr)) return make_uint2(0, 0);
    const uint2 bytes = kAny && p.e5m2 != 0 ? encode8<e5m2>(y, scale) : encode8<e4m3>(y, scale);
    if (!kAny || p.out != nullptr) {
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

// Whether every row allows 16-byte accesses.
__device__ inline bool all_vectors(const NormParams& p) {
    return p.cols % 8 == 0 && is_aligned(p.x, 16) && is_aligned(p.residual, 16) && is_aligned(p.sum, 16) &&
           is_aligned(p.gamma, 16) && is_aligned(p.beta, 16) && is_aligned(p.y, 16) && is_aligned(p.out, 8);
}

// The frame of a launch around `rows()`, which returns the thread's maximum of |y|.
template <Floating In, typename Rows>
__device__ inline void with_amax(const NormParams& p, Rows rows) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);
    float amax = rows();
    if (p.scale != nullptr && p.amax != nullptr) {
        amax = warp_max(amax);
        if (threadIdx.x % 32 == 0) atomic_max_nonnegative(p.amax, amax);
    }
    if (p.measured != nullptr) write_measured<In>(p.measured, p.workspace, p.rule, amax);
}

// The buffer for the bytes of a strip of 16, 32 or 64 rows until they are stored transposed: 128 columns after 128
// columns, row after row, so that rows are a constant distance apart. Groups of 16 rows keep pieces of 64 and of 32
// bytes the other way round, so that those of one column are read from different banks.
struct Stage {
    static constexpr uint32_t kPiece = kChunk;
    uint8_t* bytes;
    uint32_t strip;

    __device__ uint8_t* at(uint32_t row, uint32_t col) const {
        const uint32_t turned = (col % kPiece) ^ ((row & 16) << 2) ^ (row & 32);
        return bytes + col / kPiece * (strip * kPiece) + row * kPiece + turned;
    }

    __device__ void write(uint32_t row, uint32_t col, uint2 value) const {
        *reinterpret_cast<uint2*>(at(row, col)) = value;
    }

    // Four columns of the 16 rows from `row` on.
    __device__ void read(uint32_t row, uint32_t col, uint32_t (&rows)[4][4]) const {
        const uint8_t* from = at(row, col);
#pragma unroll
        for (int i = 0; i < 16; ++i) rows[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(from + i * kPiece);
    }
};

// Writes the rows of a strip from `row0` on and `cols` columns from `col0` on transposed. kInTurn: other blocks write
// the strips beside it at about the same time.
template <bool kInTurn>
__device__ inline void store_strip(const NormParams& p, const Stage& stage, size_t row0, size_t col0, uint32_t cols) {
    const uint32_t bits = stage.strip / 32;  // 1, 2 or 4 groups of 16 rows
    const uint32_t items = ceil_div<uint32_t>(cols, 4) << bits, group = threadIdx.x & ((1u << bits) - 1);
    const uint32_t row = group * 16, step = (blockDim.x >> bits) * 4;  // threads keep to their rows
    if (row0 + row >= p.ld_t) return;
    uint32_t col = (threadIdx.x >> bits) * 4;
    uint8_t* to = p.out_t + (col0 + col) * p.ld_t + row0 + row;
    for (uint32_t item = threadIdx.x; item < items; item += blockDim.x, col += step, to += step * p.ld_t) {
        uint32_t rows[4][4];
        stage.read(row, col, rows);
#pragma unroll
        for (int i = 0; i < 4; ++i) tile::transpose_bytes(rows[i]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (col + i >= cols) break;
            auto* column = reinterpret_cast<uint4*>(to + i * p.ld_t);
            const uint4 bytes = make_uint4(rows[0][i], rows[1][i], rows[2][i], rows[3][i]);
            if constexpr (kInTurn) {
                ptx::store_part_of_line(column, bytes);
            } else {
                *column = bytes;
            }
        }
    }
}

}  // namespace te_fast::norm
