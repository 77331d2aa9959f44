// LayerNorm and RMSNorm of rows, with a residual added before and a cast to FP8 behind.
//
//   s[r][c] = In(x[r][c] + residual[r][c])                    x itself without a residual
//   mean[r] = sum over c of s[r][c] / cols                    0 for RMSNorm
//   rstd[r] = 1 / sqrt(sum over c of (s[r][c] - mean[r])^2 / cols + eps)
//   y[r][c] = (s[r][c] - mean[r]) * rstd[r] * gamma[c] + beta[c]     zero-centred: gamma[c] + 1
//   out[r][c] = fp8(y[r][c] * scale)     out_t[c][r] = out[r][c], 0 for rows <= r < ld_t     amax = max |y|
//
// All of it is FP32, y included on its way to FP8. A team of whole warps has a row.
//
// Launch: norm:           a team holds its row in registers: cols <= 32 * team, FP32
//                         16 * team. Blocks = ceil(rows / strip) with
//                         strip = blockDim / team.
//         norm_transpose: the same; a block collects the bytes of `strip` rows, 16 or 32, in strip * chunk bytes of
//                         shared memory, chunk >= cols. Any number of blocks of 1024 threads.
//         norm_long:      any cols; the block is the team, strips of 1 row, or of 16 through strip * chunk bytes of
//                         shared memory with out_t. Blocks = ceil(max(rows, ld_t) / strip) of 1024 threads.
// Needs:  contiguous tensors, any alignment but that of out_t, 16 bytes; cols >= 1; ld_t and strip multiples of 16
//         with out_t; chunk a multiple of 128; team 32, 128, 256, 512 or 1024.
// Moves:  per element sizeof(In) for x, for the residual, for the sum and for y, 1 byte per FP8 layout written;
//         norm_long reads its input three times, RMSNorm twice, of which the first time from memory.

#include "common/reduce.cuh"
#include "common/row.cuh"
#include "common/tile.cuh"

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
    uint64_t rows, cols, ld_t;
    float eps;
    uint32_t team, strip, chunk;
    uint32_t weight_kind, rms, zero_centered, e5m2;
};
static_assert(sizeof(NormParams) == 168);

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;
// Vectors of eight elements that a thread holds of a row; ops/norm.rs counts on them.
template <Floating In>
constexpr int kSlots = sizeof(In) == 4 ? 2 : 4;
constexpr uint32_t kMaxStrip = 32;  // rows of a block whose bytes are stored transposed together

struct Shared {
    float sums[2][kMaxWarps];
    float mean[kMaxStrip], rstd[kMaxStrip];
};

// The threads of one row.
struct Team {
    uint32_t threads, id, rank;
    uint32_t turn = 0;

    __device__ explicit Team(uint32_t threads)
        : threads(threads), id(threadIdx.x / threads), rank(threadIdx.x % threads) {}

    // Sum over the team, the same bits in each of its threads. Two buffers: who writes to one again has passed the
    // barrier that everybody comes to after having read it.
    __device__ float sum(float x, Shared& shared) {
        x = warp_sum(x);
        if (threads == 32) return x;
        float* sums = shared.sums[turn ^= 1];
        const uint32_t lane = threadIdx.x % 32;
        if (lane == 0) sums[threadIdx.x / 32] = x;
        ptx::sync_threads(id + 1, threads);
        return warp_sum(lane < threads / 32 ? sums[id * (threads / 32) + lane] : 0.0f);
    }
};

struct Stats {
    float mean, rstd;
};

// Adds the residual to eight elements. The sum is rounded, so that backward, which reads it, sees the same numbers.
template <bool kVectors, Floating In>
__device__ inline Raw8<In> store_sum(const NormParams& p, const Raw8<In>& raw, size_t index, int width) {
    float a[8], b[8];
    unpack8<In>(raw, a);
    unpack8<In>(load_part<kVectors, In>(p.residual, index, width), b);
#pragma unroll
    for (int c = 0; c < 8; ++c) a[c] += b[c];
    const Raw8<In> sum = pack8<In>(a);
    store_part<kVectors, In>(p.sum, index, width, sum);
    return sum;
}

template <Floating In>
__device__ inline float sum8(const Raw8<In>& raw) {
    float x[8];
    unpack8<In>(raw, x);
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Sum of the squared distances of `width` elements from `mean`.
template <bool kVectors, Floating In>
__device__ inline float squares8(const Raw8<In>& raw, float mean, int width) {
    float x[8], total = 0.0f;
    unpack8<In>(raw, x);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float d = x[c] - mean;
        if (kVectors || c < width) total = fmaf(d, d, total);
    }
    return total;
}

__device__ inline float rstd_of(const NormParams& p, float squares) {
    return __frcp_rn(__fsqrt_rn(squares / static_cast<float>(p.cols) + p.eps));
}

__device__ inline void store_stats(const NormParams& p, size_t row, const Stats& stats) {
    if (p.mean != nullptr) p.mean[row] = stats.mean;
    if (p.rstd != nullptr) p.rstd[row] = stats.rstd;
}

// Normalises eight elements, stores what is asked for, and returns the bytes. `amax` is raised.
template <bool kVectors, Floating In>
__device__ inline uint2 normalise8(const NormParams& p, const Raw8<In>& raw, const Stats& stats, size_t row, size_t col,
                                   int width, float scale, float& amax) {
    float y[8], gamma[8];
    unpack8<In>(raw, y);
    load_weight8<kVectors>(p.gamma, p.weight_kind, col, width, gamma);
    const float one = p.zero_centered != 0 ? 1.0f : 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) y[c] = (y[c] - stats.mean) * stats.rstd * (gamma[c] + one);
    if (p.beta != nullptr) {
        float beta[8];
        load_weight8<kVectors>(p.beta, p.weight_kind, col, width, beta);
#pragma unroll
        for (int c = 0; c < 8; ++c) y[c] += beta[c];
    }
    const size_t index = row * p.cols + col;
    if (p.y != nullptr) store_part<kVectors, In>(p.y, index, width, pack8<In>(y));
    if (p.scale == nullptr) return make_uint2(0, 0);
    if constexpr (!kVectors) {
        // A row of NaN or Inf has made something of the zeros behind its end.
#pragma unroll
        for (int c = 0; c < 8; ++c) y[c] = c < width ? y[c] : 0.0f;
    }
    absmax_into(amax, y);
    const uint2 bytes = p.e5m2 != 0 ? encode8<e5m2>(y, scale) : encode8<e4m3>(y, scale);
    if (p.out != nullptr) {
        if constexpr (kVectors) {
            *reinterpret_cast<uint2*>(p.out + index) = bytes;
        } else {
            store_bytes_partial(p.out + index, bytes, width);
        }
    }
    return bytes;
}

// Where a row of a strip keeps the bytes of `col`: rows from 16 on keep 64 bytes the other way round, so that both
// halves of a strip are read from different banks.
__device__ inline uint8_t* staged(uint8_t* stage, uint32_t chunk, uint32_t row, uint32_t col) {
    return stage + row * chunk + (col ^ ((row & 16) << 2));
}

// Writes `strip` rows from `row0` on and `cols` columns from `col0` on, which lie in `stage`, transposed.
__device__ void store_strip(const NormParams& p, uint8_t* stage, size_t row0, size_t col0, size_t cols) {
    const uint32_t groups = p.strip / 16, words = static_cast<uint32_t>(ceil_div<size_t>(cols, 4));
    for (uint32_t item = threadIdx.x; item < words * groups; item += blockDim.x) {
        const uint32_t group = item % groups, col = item / groups * 4;
        if (row0 + group * 16 >= p.ld_t) continue;
        uint32_t low[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            low[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(staged(stage, p.chunk, group * 16 + i, col));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) transpose_bytes(low[i]);
        uint8_t* to = p.out_t + (col0 + col) * p.ld_t + row0 + group * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (col + i >= cols) break;
            *reinterpret_cast<uint4*>(to + i * p.ld_t) = make_uint4(low[0][i], low[1][i], low[2][i], low[3][i]);
        }
    }
}

// What a thread holds of its team's row: whole vectors.
template <Floating In>
struct RowPart {
    Raw8<In> slot[kSlots<In>];

    __device__ static uint32_t col(const Team& team, int i) { return 8 * (team.rank + i * team.threads); }

    __device__ void load(const NormParams& p, size_t row, uint32_t col, int i) {
        slot[i] = load_part<true, In>(p.x, row * p.cols + col, col < p.cols ? 8 : 0);
    }

    __device__ void load(const NormParams& p, const Team& team, size_t row) {
#pragma unroll
        for (int i = 0; i < kSlots<In>; ++i) load(p, row, col(team, i), i);
    }

    __device__ void add_residual(const NormParams& p, const Team& team, size_t row) {
#pragma unroll
        for (int i = 0; i < kSlots<In>; ++i) {
            const uint32_t at = col(team, i);
            if (at < p.cols) slot[i] = store_sum<true, In>(p, slot[i], row * p.cols + at, 8);
        }
    }

    __device__ void forget() {
#pragma unroll
        for (int i = 0; i < kSlots<In>; ++i) {
#pragma unroll
            for (int j = 0; j < static_cast<int>(sizeof(In) / 2); ++j) ptx::forget(slot[i].word[j]);
        }
    }

    __device__ Stats stats(const NormParams& p, Team& team, Shared& shared) {
        float mean = 0.0f, squares = 0.0f;
        if (p.rms == 0) {
#pragma unroll
            for (int i = 0; i < kSlots<In>; ++i) mean += sum8<In>(slot[i]);
            mean = team.sum(mean, shared) / static_cast<float>(p.cols);
            forget();
        }
#pragma unroll
        for (int i = 0; i < kSlots<In>; ++i) {
            if (col(team, i) < p.cols) squares += squares8<true, In>(slot[i], mean, 8);
        }
        const Stats stats{mean, rstd_of(p, team.sum(squares, shared))};
        forget();
        return stats;
    }
};

// Rows that teams hold in registers; with kTransposed strip after strip, and the next row is asked for as soon as the
// registers of this one are free.
template <bool kTransposed, Floating In>
__device__ float norm_rows(const NormParams& p, Shared& shared, uint8_t* stage) {
    Team team(p.team);
    const uint32_t teams = blockDim.x / p.team, cols = static_cast<uint32_t>(p.cols);
    const size_t end = kTransposed ? p.ld_t : p.rows, stride = static_cast<size_t>(gridDim.x) * p.strip;
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    constexpr bool ahead = kTransposed;
    float amax = 0.0f;
    RowPart<In> part;
    size_t row0 = static_cast<size_t>(blockIdx.x) * p.strip;
    if (ahead && row0 + team.id < p.rows) part.load(p, team, row0 + team.id);
    for (; row0 < end; row0 += stride) {
        for (uint32_t i = team.id; i < p.strip; i += teams) {
            const size_t row = row0 + i;
            if (row < p.rows) {
                if (!ahead) part.load(p, team, row);
                if (p.residual != nullptr) part.add_residual(p, team, row);
                const Stats stats = part.stats(p, team, shared);
                if (team.rank == 0) store_stats(p, row, stats);
                const size_t following = i + teams < p.strip ? row + teams : row0 + stride + team.id;
#pragma unroll
                for (int k = 0; k < kSlots<In>; ++k) {
                    const uint32_t col = part.col(team, k);
                    if (col >= cols) break;
                    const uint2 bytes = normalise8<true, In>(p, part.slot[k], stats, row, col, 8, scale, amax);
                    if constexpr (kTransposed) *reinterpret_cast<uint2*>(staged(stage, p.chunk, i, col)) = bytes;
                    if (ahead && following < p.rows) part.load(p, following, col, k);
                }
            } else if constexpr (kTransposed) {
                for (uint32_t col = 8 * team.rank; col < cols; col += 8 * team.threads) {
                    *reinterpret_cast<uint2*>(staged(stage, p.chunk, i, col)) = make_uint2(0, 0);
                }
            }
        }
        if constexpr (kTransposed) {
            __syncthreads();
            store_strip(p, stage, row0, 0, cols);
            __syncthreads();
        }
    }
    return amax;
}

// Statistics of a row of any length and alignment; with a residual the sum is stored on the way.
template <bool kVectors, Floating In>
__device__ Stats read_stats(const NormParams& p, size_t row, Team& team, Shared& shared) {
    const void* from = p.residual == nullptr ? p.x : p.sum;
    const size_t first = row * p.cols, step = 8 * team.threads;
    float mean = 0.0f, squares = 0.0f;
    if (p.rms == 0 || p.residual != nullptr) {
        for (size_t col = 8 * team.rank; col < p.cols; col += step) {
            const int width = width_at(col, p.cols);
            Raw8<In> raw = load_part<kVectors, In>(p.x, first + col, width);
            if (p.residual != nullptr) raw = store_sum<kVectors, In>(p, raw, first + col, width);
            mean += sum8<In>(raw);
        }
    }
    mean = p.rms != 0 ? 0.0f : team.sum(mean, shared) / static_cast<float>(p.cols);
    for (size_t col = 8 * team.rank; col < p.cols; col += step) {
        const int width = width_at(col, p.cols);
        squares += squares8<kVectors, In>(load_part<kVectors, In>(from, first + col, width), mean, width);
    }
    return {mean, rstd_of(p, team.sum(squares, shared))};
}

// Rows that teams read anew for each use: for rows that registers cannot hold, and for those without 16-byte loads.
template <bool kVectors, Floating In>
__device__ float norm_again(const NormParams& p, Shared& shared, uint8_t* stage) {
    Team team(p.team);
    const uint32_t teams = blockDim.x / p.team;
    const void* from = p.residual == nullptr ? p.x : p.sum;
    const size_t end = p.out_t == nullptr ? p.rows : p.ld_t, stride = static_cast<size_t>(gridDim.x) * p.strip;
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    float amax = 0.0f;
    for (size_t row0 = static_cast<size_t>(blockIdx.x) * p.strip; row0 < end; row0 += stride) {
        for (uint32_t i = team.id; i < p.strip && row0 + i < p.rows; i += teams) {
            const Stats stats = read_stats<kVectors, In>(p, row0 + i, team, shared);
            if (team.rank == 0) {
                store_stats(p, row0 + i, stats);
                shared.mean[i] = stats.mean;
                shared.rstd[i] = stats.rstd;
            }
        }
        __syncthreads();
        for (size_t col0 = 0; col0 < p.cols; col0 += p.chunk) {
            const uint32_t cols = static_cast<uint32_t>(min(p.cols - col0, static_cast<size_t>(p.chunk)));
            for (uint32_t i = team.id; i < p.strip; i += teams) {
                const size_t row = row0 + i;
                for (uint32_t at = 8 * team.rank; at < cols; at += 8 * team.threads) {
                    uint2 bytes = make_uint2(0, 0);
                    if (row < p.rows) {
                        const size_t col = col0 + at;
                        const int width = width_at(col, p.cols);
                        const Raw8<In> raw = load_part<kVectors, In>(from, row * p.cols + col, width);
                        const Stats stats{shared.mean[i], shared.rstd[i]};
                        bytes = normalise8<kVectors, In>(p, raw, stats, row, col, width, scale, amax);
                    }
                    if (p.out_t != nullptr) *reinterpret_cast<uint2*>(staged(stage, p.chunk, i, at)) = bytes;
                }
            }
            if (p.out_t == nullptr) continue;
            __syncthreads();
            store_strip(p, stage, row0, col0, cols);
            __syncthreads();
        }
        __syncthreads();
    }
    return amax;
}

enum class Way { kRows, kTransposed, kLong };

template <Way kWay, Floating In>
__device__ float norm_by(const NormParams& p, bool vectors, Shared& shared, uint8_t* stage) {
    if (!vectors) return norm_again<false, In>(p, shared, stage);
    if constexpr (kWay == Way::kLong) {
        return norm_again<true, In>(p, shared, stage);
    } else {
        return norm_rows<kWay == Way::kTransposed, In>(p, shared, stage);
    }
}

template <Way kWay, Floating In>
__device__ void norm(const NormParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);
    __shared__ Shared shared;
    extern __shared__ uint4 dynamic[];
    auto* stage = reinterpret_cast<uint8_t*>(dynamic);
    const bool vectors = p.cols % 8 == 0 && is_aligned(p.x, 16) && is_aligned(p.residual, 16) &&
                         is_aligned(p.sum, 16) && is_aligned(p.gamma, 16) && is_aligned(p.beta, 16) &&
                         is_aligned(p.y, 16) && is_aligned(p.out, 8);
    float amax = norm_by<kWay, In>(p, vectors, shared, stage);
    if (p.scale != nullptr && p.amax != nullptr) {
        amax = warp_max(amax);
        if (threadIdx.x % 32 == 0) atomic_max_nonnegative(p.amax, amax);
    }
}

}  // namespace te_fast

#define INSTANCE(symbol, way, in)                                      \
    extern "C" __global__ void __launch_bounds__(te_fast::kMaxThreads) \
        symbol(const __grid_constant__ te_fast::NormParams p) {        \
        te_fast::ptx::wait_for_prior_grids();                          \
        te_fast::norm<te_fast::Way::way, te_fast::in>(p);              \
    }

INSTANCE(norm_f32, kRows, f32)
INSTANCE(norm_f16, kRows, f16)
INSTANCE(norm_bf16, kRows, bf16)
INSTANCE(norm_transpose_f32, kTransposed, f32)
INSTANCE(norm_transpose_f16, kTransposed, f16)
INSTANCE(norm_transpose_bf16, kTransposed, bf16)
INSTANCE(norm_long_f32, kLong, f32)
INSTANCE(norm_long_f16, kLong, f16)
INSTANCE(norm_long_bf16, kLong, bf16)
