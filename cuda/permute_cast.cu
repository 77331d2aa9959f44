// MoE permutation straight into FP8: every token's row is read and quantised once and written to each destination.
//
//   per tensor: q = fp8(float(x) * scale), saturating          *amax = max(*amax, max |x|) over the rows written
//   blocks:     scale = scale_from_amax(max |x|) over 128 consecutive elements of a row, q = fp8(float(x) * scale),
//               scale_inv[block, row] = 1 / scale
//   bit for bit what casting the permuted rows gives; rows that no token fills and slots of probability 0 are zero rows
//   and, with blocks, have the scale of a zero block.
//
// The GEMM wants the inverse scales of neighbouring rows side by side, and neighbouring rows come from different
// tokens. So permute_cast_* leaves them per token, with the token of every row (-1 for a zero row), and
// permute_scales puts them in their places with whole-line writes.
//
// Launch: permute_cast_*: zero_blocks + tokens blocks, 128 threads; the first zero_blocks clear rows, the others take
//         one token each. permute_scales: ceil(scale_ld / 64) * ceil(blocks / 64) blocks of 256 threads.
// Needs:  contiguous x [T, cols] and out [rows, cols], both 16-byte aligned, cols % 16 == 0; token_scales [T, blocks],
//         row_tokens [rows], scale_inv [blocks, scale_ld], scale_ld >= rows: columns from `rows` on are written zero.
// Moves:  sizeof(In) T cols + rows cols bytes, 4 blocks (2 T + rows) for the scales, and the map.

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
// conversion to FP8 they need more registers, and what the compiler makes for sm_120 needs a few more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kCastBlocks = 8;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kCastBlocks = 10;
#else
constexpr int kCastBlocks = 12;
#endif

struct PermuteCastParams {
    const void* x;
    uint8_t* out;
    const void* probs;  // null: none
    void* out_probs;
    const float* scale;   // per tensor; null with blocks
    float* amax;          // per tensor; null: none
    float* token_scales;  // blocks; null per tensor
    int32_t* row_tokens;
    RowMap map;
    uint32_t cols;
    float eps;
    uint32_t pow2;
    ProbType prob_type;
};
static_assert(sizeof(PermuteCastParams) == 136);  // always launched behind its own row map, as permute.cu's behind_map

struct PermuteScalesParams {
    const float* token_scales;
    const int32_t* row_tokens;
    float* scale_inv;
    uint64_t rows;
    uint64_t scale_ld;
    uint32_t blocks;
    float zero_scale;  // inverse scale of a zero block
};
static_assert(sizeof(PermuteScalesParams) == 48);

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

__device__ inline void clear_gaps(const PermuteCastParams& p, Gaps& gaps) {
    load_gaps(p.map, gaps);
    for (uint64_t i = blockIdx.x;; i += p.map.zero_blocks) {
        const uint64_t row = gap_row(p.map, gaps, i);
        if (row >= p.map.rows) return;
        zero_row<kRowThreads>(p.out + row * p.cols, p.cols);
        if (threadIdx.x != 0) continue;
        if (p.row_tokens != nullptr) p.row_tokens[row] = -1;
        if (p.out_probs != nullptr) store_prob(p.out_probs, row, p.prob_type, 0.0f);
    }
}

// Moves the probabilities, notes which slots are zero; whether any slot takes the row itself.
__device__ inline bool permute_probs(const PermuteCastParams& p, uint64_t token, int count, CastShared& shared) {
    bool any = false;
#pragma unroll 1  // a token has fewer slots than a block has threads, as a rule; registers are scarce
    for (int k = threadIdx.x; k < count; k += kRowThreads) {
        shared.zero[k] = false;
        if (shared.slots.row[k] < 0) continue;
        const uint64_t row = static_cast<uint64_t>(shared.slots.row[k]);
        if (p.probs != nullptr) {
            const uint64_t from = token * p.map.slots() + shared.slots.column[k];
            copy_prob(p.probs, from, p.out_probs, row, p.prob_type);
            shared.zero[k] = is_zero_prob(p.probs, from, p.prob_type);
        }
        if (p.row_tokens != nullptr) p.row_tokens[row] = shared.zero[k] ? -1 : static_cast<int32_t>(token);
        any |= !shared.zero[k];
    }
    return __syncthreads_or(any) != 0;
}

// Sixteen elements of a row.
template <Floating In>
struct Chunk {
    Raw8<In> half[2];

    __device__ void load(const In* from) {
        half[0] = load8<In, true>(from);
        half[1] = load8<In, true>(from + 8);
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

// Quantises the chunks at base + j * kRowThreads + threadIdx.x; the largest magnitude among them.
template <int kChunks, Floating In, Fp8 Out>
__device__ inline float quantise(const PermuteCastParams& p, uint64_t token, uint32_t base,
                                 const Chunk<In> (&chunk)[kChunks], uint4 (&bytes)[kChunks]) {
    const bool blocks = p.token_scales != nullptr;
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
        const uint32_t at = base + j * kRowThreads + threadIdx.x;
        const float largest = chunk[j].absmax();
        if (!blocks) {
            amax = fmaxf(amax, largest);
            bytes[j] = chunk[j].template cast<Out>(*p.scale);
            continue;
        }
        const float scale = block_scale<In, Out>(p, block_amax(largest));
        bytes[j] = chunk[j].template cast<Out>(scale);
        if (threadIdx.x % 8 == 0 && at < p.cols / kChunk) {
            p.token_scales[token * ceil_div(p.cols, uint32_t{kBlock}) + at / 8] = __frcp_rn(scale);
        }
    }
    return amax;
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
        amax = fmaxf(amax, quantise<kChunks, In, Out>(p, token, base, chunk, bytes));
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
    strike_dropped<kRowThreads>(p.map, token, shared.slots, count);
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

constexpr int kScaleTile = 64;
constexpr int kScaleThreads = 256;

__device__ inline void permute_scales(const PermuteScalesParams& p) {
    __shared__ float tile[kScaleTile][kScaleTile + 1];  // [row][block], padded against bank conflicts
    __shared__ int32_t token[kScaleTile];
    ptx::wait_for_prior_grids();
    const uint32_t across = ceil_div(p.blocks, uint32_t{kScaleTile});
    const uint64_t row0 = static_cast<uint64_t>(blockIdx.x / across) * kScaleTile;
    const uint32_t block0 = blockIdx.x % across * kScaleTile;
    constexpr int kSide = kScaleThreads / kScaleTile;
    const uint32_t inner = threadIdx.x % kScaleTile, outer = threadIdx.x / kScaleTile;
    if (outer == 0) token[inner] = row0 + inner < p.rows ? p.row_tokens[row0 + inner] : -1;
    __syncthreads();
    float value[kScaleTile / kSide];  // all under way before the first is used
#pragma unroll
    for (uint32_t j = 0; j < kScaleTile / kSide; ++j) {
        const int32_t from = token[outer + j * kSide];
        const bool read = from >= 0 && block0 + inner < p.blocks;
        value[j] = row0 + outer + j * kSide < p.rows ? p.zero_scale : 0.0f;
        if (read) value[j] = p.token_scales[static_cast<uint64_t>(from) * p.blocks + block0 + inner];
    }
#pragma unroll
    for (uint32_t j = 0; j < kScaleTile / kSide; ++j) tile[outer + j * kSide][inner] = value[j];
    __syncthreads();
#pragma unroll
    for (uint32_t i = outer; i < kScaleTile; i += kSide) {
        const uint64_t row = row0 + inner;
        if (row < p.scale_ld && block0 + i < p.blocks) p.scale_inv[(block0 + i) * p.scale_ld + row] = tile[inner][i];
    }
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

extern "C" __global__ void __launch_bounds__(te_fast::kScaleThreads)
    permute_scales(const __grid_constant__ te_fast::PermuteScalesParams p) {
    te_fast::permute_scales(p);
}
