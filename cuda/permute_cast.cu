// MoE permutation straight into FP8: every token's row is read and quantised once and written to each destination.
//
//   per tensor: q = fp8(float(x) * scale), saturating          *amax = max(*amax, max |x|) over the rows written
//   blocks:     scale = scale_from_amax(max |x|) over 128 consecutive elements of a row, q = fp8(float(x) * scale),
//               scale_inv[block, row] = 1 / scale
//   bit for bit what casting the permuted rows gives; rows that no token fills and slots of probability 0 are zero rows
//   and, with blocks, have the scale of a zero block.
//
// The GEMM wants the inverse scales of neighbouring rows side by side, and neighbouring rows come from different
// tokens: four bytes are written at a time. The rows of an expert come in the order of their tokens, so that L2 puts
// the bytes of a sector together.
//
// Launch: zero_blocks + tokens blocks, 128 threads; the first zero_blocks clear rows, the others take one token each.
// Needs:  contiguous x [T, cols] and out [rows, cols], both 16-byte aligned, cols % 16 == 0; scale_inv
//         [blocks, scale_ld], scale_ld >= rows: columns from `rows` on are written zero; zero_blocks > 0 with rows.
// Moves:  sizeof(In) T cols + rows cols bytes, 4 blocks rows for the scales, and the map.

#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/routing.cuh"
#include "common/vec.cuh"

namespace te_fast {

constexpr int kBlock = 128;  // elements that share a scale
constexpr int kChunk = 16;   // elements of one FP8 store

// Blocks per multiprocessor. Tokens with few experts want many, to hide the wait for the map; without the hardware's
// conversion to FP8, and by sm_89's compiler, they are given more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kCastBlocks = 8;
#else
constexpr int kCastBlocks = 12;
#endif

struct PermuteCastParams {
    const void* x;
    uint8_t* out;
    const void* probs;  // null: none
    void* out_probs;
    const float* scale;  // per tensor; null with blocks
    float* amax;         // per tensor; null: none
    float* scale_inv;    // blocks; null per tensor
    uint64_t scale_ld;
    RowMap map;
    uint32_t cols;
    float eps;
    uint32_t pow2;
    ProbType prob_type;
    float zero_scale;  // inverse scale of a zero block
    uint32_t unused;

    __device__ uint32_t blocks() const { return ceil_div(cols, uint32_t{kBlock}); }
    __device__ float& inverse(uint32_t block, uint64_t row) const { return scale_inv[block * scale_ld + row]; }
};
static_assert(sizeof(PermuteCastParams) == 144);  // always launched behind the row map, as permute.cu's behind_map

struct CastShared {
    union {
        Slots slots;
        Gaps gaps;
    };
    bool zero[kMaxExperts];
    float amax[kRowThreads / 32];
};

template <Floating In, Fp8 Out>
__device__ inline float block_scale(const PermuteCastParams& p, float amax) {
    return scale_from_amax(amax, Out::kMax, p.eps, kMaxFinite<In>, p.pow2 != 0);
}

// Rows that no token fills, and the columns of the scales behind the last row.
__device__ inline void clear_gaps(const PermuteCastParams& p, Gaps& gaps) {
    load_gaps(p.map, gaps);
    if (blockIdx.x == 0 && p.scale_inv != nullptr) {
        const uint32_t behind = static_cast<uint32_t>(p.scale_ld - p.map.rows);
        for (uint32_t i = threadIdx.x; i < p.blocks() * behind; i += kRowThreads) {
            p.inverse(i / behind, p.map.rows + i % behind) = 0.0f;
        }
    }
    for (uint64_t i = blockIdx.x;; i += p.map.zero_blocks) {
        const uint64_t row = gap_row(p.map, gaps, i);
        if (row >= p.map.rows) return;
        zero_row<kRowThreads>(p.out + row * p.cols, p.cols);
        if (p.scale_inv != nullptr) {
            for (uint32_t block = threadIdx.x; block < p.blocks(); block += kRowThreads) {
                p.inverse(block, row) = p.zero_scale;
            }
        }
        if (threadIdx.x == 0 && p.out_probs != nullptr) store_prob(p.out_probs, row, p.prob_type, 0.0f);
    }
}

// Moves the probabilities, notes which slots are zero; whether any slot takes the row itself.
__device__ inline bool permute_probs(const PermuteCastParams& p, uint64_t token, int count, CastShared& shared) {
    bool any = false;
    for (int k = threadIdx.x; k < count; k += kRowThreads) {
        shared.zero[k] = false;
        if (shared.slots.row[k] < 0) continue;
        const uint64_t row = static_cast<uint64_t>(shared.slots.row[k]);
        if (p.probs != nullptr) {
            const uint64_t from = token * p.map.slots() + shared.slots.column[k];
            copy_prob(p.probs, from, p.out_probs, row, p.prob_type);
            shared.zero[k] = load_prob(p.probs, from, p.prob_type) == 0.0f;
        }
        any |= !shared.zero[k];
    }
    return __syncthreads_or(any) != 0;
}

// Sixteen elements of a row.
template <Floating In>
struct Chunk {
    Raw8<In> half[2];

    __device__ void load(const In* from) {
        half[0] = load8<In>(from);
        half[1] = load8<In>(from + 8);
    }
    __device__ float absmax() const { return fmaxf(absmax8<In>(half[0]), absmax8<In>(half[1])); }

    template <Fp8 Out>
    __device__ uint4 cast(float scale) const {
        const uint2 low = cast8<Out, In>(half[0], scale), high = cast8<Out, In>(half[1], scale);
        return make_uint4(low.x, low.y, high.x, high.y);
    }
};

// Maximum over the eight lanes that hold one block.
__device__ inline float block_amax(float x) {
#pragma unroll
    for (int lane = 4; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lane));
    return x;
}

// Quantises the chunks at base + j * kRowThreads + threadIdx.x, with `scale` the ones of their blocks; the largest
// magnitude among them.
template <int kChunks, Floating In, Fp8 Out>
__device__ inline float quantise(const PermuteCastParams& p, const Chunk<In> (&chunk)[kChunks], uint4 (&bytes)[kChunks],
                                 float (&scale)[kChunks]) {
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
        const float largest = chunk[j].absmax();
        if (p.scale_inv == nullptr) {
            amax = fmaxf(amax, largest);
            scale[j] = *p.scale;
        } else {
            scale[j] = block_scale<In, Out>(p, block_amax(largest));
        }
        bytes[j] = chunk[j].template cast<Out>(scale[j]);
    }
    return amax;
}

// The eight lanes of a block store its inverse scale for a destination each.
template <int kChunks>
__device__ inline void store_scales(const PermuteCastParams& p, const CastShared& shared, int count, uint32_t base,
                                    const float (&scale)[kChunks]) {
    float inverse[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) inverse[j] = __frcp_rn(scale[j]);
    for (int k = static_cast<int>(threadIdx.x % 8); k < count; k += 8) {
        if (shared.slots.row[k] < 0) continue;
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const uint32_t block = (base + j * kRowThreads + threadIdx.x) / 8;
            if (block >= p.blocks()) break;
            p.inverse(block, shared.slots.row[k]) = shared.zero[k] ? p.zero_scale : inverse[j];
        }
    }
}

template <int kChunks, Floating In, Fp8 Out>
__device__ void cast_token(const PermuteCastParams& p, CastShared& shared) {
    const uint64_t token = blockIdx.x - p.map.zero_blocks;
    const uint32_t chunks = p.cols / kChunk;
    const In* x = static_cast<const In*>(p.x) + token * p.cols;
    int count = 0;
    bool any = false;
    float amax = 0.0f;
    for (uint32_t base = 0; base < chunks; base += kChunks * kRowThreads) {
        Chunk<In> chunk[kChunks];
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const uint32_t at = base + j * kRowThreads + threadIdx.x;
            chunk[j].half[0] = chunk[j].half[1] = zero8<In>();
            if (at < chunks) chunk[j].load(x + static_cast<uint64_t>(at) * kChunk);
        }
        if (base == 0) {
            ptx::wait_for_prior_grids();
            count = load_slots<kRowThreads>(p.map, token, shared.slots);
            any = permute_probs(p, token, count, shared);
        }
        uint4 bytes[kChunks];
        float scale[kChunks];
        amax = fmaxf(amax, quantise<kChunks, In, Out>(p, chunk, bytes, scale));
        if (p.scale_inv != nullptr) store_scales<kChunks>(p, shared, count, base, scale);
        for (int k = 0; k < count; ++k) {
            if (shared.slots.row[k] < 0) continue;
            uint4* to = reinterpret_cast<uint4*>(p.out + static_cast<uint64_t>(shared.slots.row[k]) * p.cols);
            const bool zero = shared.zero[k];
#pragma unroll
            for (int j = 0; j < kChunks; ++j) {
                const uint32_t at = base + j * kRowThreads + threadIdx.x;
                if (at < chunks) to[at] = zero ? make_uint4(0, 0, 0, 0) : bytes[j];
            }
        }
    }
    if (p.amax == nullptr || !any) return;
    amax = block_max<kRowThreads>(amax, shared.amax);
    if (threadIdx.x == 0) atomic_max_nonnegative(p.amax, amax);
}

template <Floating In, Fp8 Out>
__device__ void permute_cast(const PermuteCastParams& p) {
    __shared__ CastShared shared;
    if (blockIdx.x < p.map.zero_blocks) {
        ptx::wait_for_prior_grids();
        return clear_gaps(p, shared.gaps);
    }
    cast_token<sizeof(In) == 4 ? 1 : 2, In, Out>(p, shared);
}

}  // namespace te_fast

#define INSTANCE(symbol, in, out)                                                            \
    extern "C" __global__ void __launch_bounds__(te_fast::kRowThreads, te_fast::kCastBlocks) \
        symbol(const __grid_constant__ te_fast::PermuteCastParams p) {                       \
        te_fast::permute_cast<te_fast::in, te_fast::out>(p);                                 \
    }

INSTANCE(permute_cast_f32_e4m3, f32, e4m3)
INSTANCE(permute_cast_f32_e5m2, f32, e5m2)
INSTANCE(permute_cast_f16_e4m3, f16, e4m3)
INSTANCE(permute_cast_f16_e5m2, f16, e5m2)
INSTANCE(permute_cast_bf16_e4m3, bf16, e4m3)
INSTANCE(permute_cast_bf16_e5m2, bf16, e5m2)
