// MoE permutation straight into FP8: every token's row is read and quantised once and written to each destination.
//
//   per tensor: q = fp8(float(x) * scale), saturating          *amax = max(*amax, max |x|) over the rows written
//   blocks:     scale = scale_from_amax(max |x|) over 128 consecutive elements of a row, q = fp8(float(x) * scale),
//               scale_inv[block, row] = 1 / scale
//   the bits of casting the permuted rows; rows that no token fills and slots of probability 0 are zero rows
//   and, with blocks, have the scale of a zero block.
//
// The GEMM reads the inverse scales of adjacent rows from adjacent addresses, but adjacent rows come from different
// tokens. So each token writes its scales to memory, with the token of every row, and the last blocks of the same
// launch copy them to their places with whole-line writes. Each word shows by itself that it was written: the map's
// blocks (moe/make_map.cuh) have filled that memory with kAbsent, so no token has to wait for its stores. The last
// blocks wait only on blocks that have started, since blocks take their numbers as they start (moe/follow_map.cuh).
//
// Launch: map blocks + zero_blocks + tokens + scale_blocks blocks of 128 threads; the first ones to start make the map,
//         the next clear rows, the next take one token each. scale_blocks is 0 per tensor, else at most half as many as
//         the GPU runs at a time.
// Needs:  contiguous x [T, cols] and out [rows, cols], both 16-byte aligned, cols % 16 == 0; token_scales
//         [T, token_ld], token_ld >= blocks a multiple of 8, 32-byte aligned, and row_tokens [rows], all kAbsent;
//         scale_inv [blocks, scale_ld], scale_ld >= rows: columns from `rows` on are written zero.
// Moves:  sizeof(In) T cols + rows cols bytes, 4 blocks (2 T + rows) for the scales, and the map.

#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "moe/follow_map.cuh"
#include "moe/make_map.cuh"
#include "moe/routing.cuh"

namespace te_fast::moe {

constexpr int kBlock = tile::kTile;     // elements that share a scale
constexpr uint32_t kPause = 200;        // nanoseconds between rounds of looks at absent scales
constexpr uint32_t kRounds = 1u << 24;  // at least three seconds
using Map = MapShape<kRowThreads, kLeadingMapGroups, false>;

// Blocks per multiprocessor. Tokens with few experts need many blocks, to hide latency. Software conversion to FP8
// needs more registers, and so does the compiler's code for sm_89 and sm_120.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kCastBlocks = 8;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kCastBlocks = 9;
#else
constexpr int kCastBlocks = 10;
#endif

// Value of a word of token_scales or row_tokens until it is written. As a float it is a NaN that no arithmetic
// produces.
constexpr uint32_t kAbsent = 0xffffffff;
static_assert(kZeroRow != kAbsent);

struct PermuteCastParams {
    const void* x;
    uint8_t* out;
    const void* probs;  // null: none
    void* out_probs;
    const float* scale;      // per tensor; null with blocks
    float* amax;             // per tensor; null: none
    uint32_t* token_scales;  // floats, blocks; null per tensor
    uint32_t* row_tokens;
    uint32_t* scale_inv;  // floats
    RowMap map;
    uint32_t cols;
    float eps;
    uint32_t pow2;
    ProbType prob_type;
    uint32_t scale_ld;
    uint32_t token_ld;
    float zero_scale;  // inverse scale of a zero block
    uint32_t scale_blocks;
    MakeMapParams making;
};
static_assert(sizeof(PermuteCastParams) == kPermuteCastParamsBytes);

union PermuteCastShared {
    struct {
        Slots slots;
        bool zero[kMaxExperts];
        float amax[kRowThreads / 32];
        bool any;  // whether a slot takes the row itself
    };
    Gaps gaps;
    MapShared<Map> map;
};

template <Floating In, Fp8 Out>
__device__ inline float block_scale(const PermuteCastParams& p, float amax) {
    return scale_from_amax(amax, Out::kMax, p.eps, kMaxFinite<In>, p.pow2 != 0);
}

__device__ inline void clear_gaps(const PermuteCastParams& p, uint32_t block, Gaps& gaps) {
    load_gaps(p.map, gaps);
    for (uint64_t i = block;; i += p.map.zero_blocks) {
        const uint64_t row = gap_row(p.map, gaps, i);
        if (row >= p.map.rows) return;
        zero_row<kRowThreads>(p.out + row * p.cols, p.cols);
        if (threadIdx.x != 0) continue;
        if (p.row_tokens != nullptr) ptx::store_relaxed(p.row_tokens + row, kZeroRow);
        if (p.out_probs != nullptr) store_prob(p.out_probs, row, p.prob_type, 0.0f);
    }
}

// Moves the probabilities of a token, notes which slots are zero, and tells the rows their token.
struct MoveProb {
    const PermuteCastParams& p;
    uint32_t token;
    PermuteCastShared& shared;

    __device__ uint64_t load(uint32_t column) const {
        return p.probs == nullptr
                   ? 1
                   : prob_bits(p.probs, static_cast<uint64_t>(token) * p.map.slots() + column, p.prob_type);
    }
    __device__ void store(int k, int32_t row, uint64_t bits) const {
        const bool none = is_zero_prob(bits, p.prob_type);
        shared.zero[k] = none;
        if (row < 0) return;
        if (p.probs != nullptr) store_prob_bits(p.out_probs, row, p.prob_type, bits);
        if (p.row_tokens != nullptr) {
            ptx::store_relaxed(p.row_tokens + row, none ? kZeroRow : token);
        }
        if (!none) shared.any = true;
    }
};

// Sixteen elements of a row.
template <Floating In>
struct Chunk {
    static_assert(2 * kVector == kCastChunk);
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
__device__ inline float quantise(const PermuteCastParams& p, uint32_t token, uint32_t base,
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
        if (threadIdx.x % 8 == 0 && at < p.cols / kCastChunk) {
            ptx::store_relaxed(p.token_scales + static_cast<uint64_t>(token) * p.token_ld + at / 8,
                               __float_as_uint(__frcp_rn(scale)));
        }
    }
    return amax;
}

// This thread's chunks of the part of a row that begins at chunk `base`.
template <int kChunks, Floating In>
__device__ inline void load_chunks(const PermuteCastParams& p, uint32_t token, uint32_t base,
                                   Chunk<In> (&chunk)[kChunks]) {
    const In* x = static_cast<const In*>(p.x) + static_cast<uint64_t>(token) * p.cols;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
        const uint32_t at = base + j * kRowThreads + threadIdx.x;
        chunk[j].half[0] = chunk[j].half[1] = zero8<In>();
        if (at < p.cols / kCastChunk) chunk[j].load(x + static_cast<uint64_t>(at) * kCastChunk);
    }
}

template <int kChunks, Floating In, Fp8 Out>
__device__ inline void cast_token(const PermuteCastParams& p, uint32_t block, PermuteCastShared& shared) {
    const uint32_t token = block - p.making.blocks - p.map.zero_blocks;
    const uint32_t chunks = p.cols / kCastChunk;
    Chunk<In> chunk[kChunks];
    load_chunks(p, token, 0, chunk);  // the slots arrive while the row does
    if (threadIdx.x == 0) shared.any = false;
    const int count = find_slots<kRowThreads>(p.making, p.map, token, shared.slots, MoveProb{p, token, shared});
    __syncthreads();
    float amax = 0.0f;
    for (uint32_t base = 0;;) {
        uint4 bytes[kChunks];
        amax = fmaxf(amax, quantise<kChunks, In, Out>(p, token, base, chunk, bytes));
#pragma unroll 1
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
        base += kChunks * kRowThreads;
        if (base >= chunks) break;
        load_chunks(p, token, base, chunk);
    }
    strike_dropped<kRowThreads>(p.map, token, shared.slots, count);
    leave_map<kRowThreads>(p.making, block);
    if (p.amax == nullptr || !shared.any) return;
    amax = block_max<kRowThreads>(amax, shared.amax);
    if (threadIdx.x == 0) atomic_max_nonnegative(p.amax, amax);
}

// Puts the scales of 32 rows, a lane per row, and eight blocks in their places. False when some have not come.
__device__ inline bool place_scales(const PermuteCastParams& p, uint32_t rows32, uint32_t octet) {
    const uint32_t row = rows32 * kPieceRows + threadIdx.x % kPieceRows;
    const bool filled = row < p.map.rows;
    const uint32_t token = filled ? ptx::load_relaxed(p.row_tokens + row) : kZeroRow;
    if (__any_sync(kFullWarp, token == kAbsent)) return false;
    uint32_t scale[8];
    const uint32_t none = filled ? __float_as_uint(p.zero_scale) : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) scale[i] = none;
    if (token < kZeroRow) {
        const uint32_t* from = p.token_scales + static_cast<uint64_t>(token) * p.token_ld + octet * kPieceScales;
        ptx::load_relaxed(from, scale);
        ptx::load_relaxed(from + 4, scale + 4);
    }
    const uint32_t blocks = min(ceil_div(p.cols, uint32_t{kBlock}) - octet * kPieceScales, uint32_t{kPieceScales});
    bool absent = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) absent |= i < blocks && scale[i] == kAbsent;
    if (__any_sync(kFullWarp, absent)) return false;
    uint32_t* to = p.scale_inv + static_cast<uint64_t>(octet) * kPieceScales * p.scale_ld + row;
#pragma unroll
    for (int i = 0; i < 8; ++i, to += p.scale_ld) {
        if (i < blocks && row < p.scale_ld) *to = scale[i];
    }
    return true;
}

// The last blocks: a warp goes round its open pieces until their scales have come. If another stream changes the
// routing map while it is read, some rows are never filled and their scales never come; the launch then fails.
__device__ inline void place_all_scales(const PermuteCastParams& p, uint32_t scale_block) {
    const uint32_t octets = ceil_div(p.cols, uint32_t{kPieceScales * kBlock});
    const uint32_t pieces =
        ceil_div(p.scale_ld, uint32_t{kPieceRows}) * octets;  // of a kilobyte each: they fit into memory
    const uint32_t warps = p.scale_blocks * (kRowThreads / 32);
    uint32_t first = scale_block * (kRowThreads / 32) + threadIdx.x / 32;
#pragma unroll 1
    for (; first < pieces; first += warps * 32) {
        const uint32_t count = min(ceil_div(pieces - first, warps), 32u);
        uint32_t open = kFullWarp >> (32 - count);
#pragma unroll 1
        for (uint32_t round = 0; open != 0; ++round) {
            if (round == kRounds) __trap();
            if (round != 0) __nanosleep(kPause);
#pragma unroll 1
            for (uint32_t rest = open; rest != 0; rest &= rest - 1) {
                const uint32_t bit = __ffs(rest) - 1;
                const uint32_t piece = first + bit * warps;
                if (place_scales(p, piece / octets, piece % octets)) open &= ~(1u << bit);
            }
        }
    }
}

template <Floating In, Fp8 Out>
__device__ void permute_cast(const PermuteCastParams& p) {
    __shared__ PermuteCastShared shared;
    ptx::wait_for_prior_grids();
    const uint32_t number = take_number(p.making);
    if (number < p.making.blocks) return make_map(p.making, shared.map, number);
    const uint32_t block = number - p.making.blocks, tokens = static_cast<uint32_t>(p.map.tokens);
    if (block - p.map.zero_blocks < tokens) return cast_token<sizeof(In) == 4 ? 1 : 2, In, Out>(p, number, shared);
    await_map<kRowThreads>(p.making);
    __syncthreads();
    if (block < p.map.zero_blocks) {
        clear_gaps(p, block, shared.gaps);
    } else {
        place_all_scales(p, block - p.map.zero_blocks - tokens);
    }
    leave_map<kRowThreads>(p.making, number);
}

#define INSTANCE(symbol, in, out)                                          \
    extern "C" __global__ void __launch_bounds__(kRowThreads, kCastBlocks) \
        symbol(const __grid_constant__ PermuteCastParams p) {              \
        permute_cast<in, out>(p);                                          \
    }

INSTANCE(permute_cast_f32_e4m3, f32, e4m3)
INSTANCE(permute_cast_f32_e5m2, f32, e5m2)
INSTANCE(permute_cast_f16_e4m3, f16, e4m3)
INSTANCE(permute_cast_f16_e5m2, f16, e5m2)
INSTANCE(permute_cast_bf16_e4m3, bf16, e4m3)
INSTANCE(permute_cast_bf16_e5m2, bf16, e5m2)

}  // namespace te_fast::moe
