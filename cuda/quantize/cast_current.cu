// Current scaling in one launch: the largest magnitude of a tensor, the scale that follows, and the cast to FP8 in row
// layout, transposed layout or both. Blocks keep what they have read until the scale is known.
//
//   amax = max |x|     scale = fp8_max / max(amax, eps)  (scale_from_amax)     scale_inv = 1 / scale
//   q    = fp8(float(x) * scale)
//
//   cast_current               one tensor
//   cast_current_many          many, each with a scale of its own
//   cast_current_many_rounded  the same of round(x), x in FP32: master weights, as if they had been copied to a weight
//                              of 16 bits first
//
// A block takes tiles of a tensor from a counter, reads them, raises the maximum, and keeps as many as it has slots for
// in shared memory. Then it takes tiles that no block keeps: those are read again for the cast, the latest ones first,
// since L2 has them. While other blocks read a tensor's last tiles, a block with a free slot reads the next tensor's.
//
// Of many tensors, one of fewer tiles than there are blocks has a block for each tile. The blocks of the next tensor
// begin where its blocks end, so that small tensors are cast side by side.
//
// A block waits only for tiles that running blocks have taken: a grid of any size ends, under any other load.
//
// Launch: blocks of 256 threads, no more than there are tiles or run at once; `slots` slots of dynamic shared memory.
// Needs:  contiguous x, any rows, cols and alignment of x and out; out_t [cols, rows rounded up to 16] 16-byte aligned;
//         workspace zeroed once at allocation, it is zero again after each launch; one launch at a time may use it.
//         cast_current_many streams its stores: few of the tensors are read soon.
// Moves:  sizeof(In) bytes per element, as many again of the tiles that no block keeps; 1 byte per element and layout.

#include "common/measure.cuh"
#include "quantize/many.cuh"

namespace te_fast::quantize {

// What the blocks exchange about a tensor.
struct CurrentWorkspace {
    // Tiles that blocks have taken: in the low word those to keep, from the first on; in the high word others, from the
    // last on.
    unsigned long long taken;
    float amax;
    unsigned read;   // tiles that have raised it
    unsigned again;  // of these, those that no block keeps
    unsigned cast;   // of those, the ones that blocks have taken for the cast
    unsigned left;   // of the first tensor alone: blocks that are done with all tensors
    unsigned unused;
};
static_assert(sizeof(CurrentWorkspace) == kCurrentWorkspaceBytes);

struct CastCurrentParams {
    CurrentWorkspace* workspace;
    const float* noop;  // null: none; *noop == 1 leaves every output as it is
    ScaleRule rule;
    uint32_t slots;
    uint32_t unused;
    ManyEntry entry;
};
static_assert(sizeof(CastCurrentParams) == kCastCurrentParamsBytes);

constexpr uint32_t kNone = ~0u;

// The answer of thread 0, in all threads. Contains barriers, before and after the question.
template <typename Question>
__device__ inline uint32_t ask_one(Question question) {
    __shared__ uint32_t answer;
    __syncthreads();
    if (threadIdx.x == 0) answer = question();
    __syncthreads();
    return answer;
}

// Thread 0's turn at one of the counters, under way while the block works on its last tile.
struct Ticket {
    unsigned long long before;

    // To read a tile for the first time.
    __device__ void read_next(CurrentWorkspace& workspace, bool keep) {
        if (threadIdx.x == 0) before = atomicAdd(&workspace.taken, keep ? 1ull : 1ull << 32);
    }
    // The tile; none if all have been taken.
    __device__ uint32_t tile_to_read(uint32_t tiles, bool keep) const {
        const auto kept = static_cast<uint32_t>(before), others = static_cast<uint32_t>(before >> 32);
        if (uint64_t{kept} + others >= tiles) return kNone;
        return keep ? kept : tiles - 1 - others;
    }
    // To cast a tile that no block keeps, once all have been read.
    __device__ void cast_next(CurrentWorkspace& workspace, uint32_t again) {
        if (threadIdx.x == 0 && again != 0) before = atomicAdd(&workspace.cast, 1);
    }
    __device__ uint32_t tile_to_cast(uint32_t tiles, uint32_t again) const {
        return again != 0 && before < again ? tiles - again + static_cast<uint32_t>(before) : kNone;
    }
};

// Raises the maximum to a tile's. Contains a barrier, before which `scratch` must not be in use.
template <Floating In>
__device__ inline void raise_amax(CurrentWorkspace& workspace, const Raw8<In> (&raw)[kPatch], bool keep,
                                  float* scratch) {
    Raw8<In> acc = zero8<In>();
#pragma unroll
    for (int i = 0; i < kPatch; ++i) absmax_into<In>(acc, raw[i]);
    const float amax = block_max<kTileThreads>(absmax8<In>(acc), scratch);
    if (threadIdx.x != 0) return;
    atomicMax(reinterpret_cast<unsigned*>(&workspace.amax), __float_as_uint(amax));  // not negative
    if (!keep) atomicAdd(&workspace.again, 1);
    __threadfence();
    atomicAdd(&workspace.read, 1);
}

// Of a tensor whose tiles have all raised the maximum.
struct Known {
    float scale;
    uint32_t again;  // tiles that no block keeps
};
// Waits for it; the same in all threads. Contains barriers.
__device__ inline Known wait_for(CurrentWorkspace& workspace, uint32_t tiles, const ScaleRule& rule) {
    __shared__ Known known;
    __syncthreads();
    if (threadIdx.x == 0) {
        volatile CurrentWorkspace& seen = workspace;
        while (seen.read != tiles) {
        }
        __threadfence();
        const float amax = seen.amax;
        known = {rule.scale(amax), seen.again};
    }
    __syncthreads();
    return known;
}

// A slot's part of a thread, which no other thread reads.
template <Floating In>
__device__ inline uint4* slot_of(uint32_t slot) {
    extern __shared__ uint4 slots[];
    return slots + slot * (sizeof(Raw8<In>) / sizeof(uint4)) * kPatch * kTileThreads + threadIdx.x;
}
template <Floating In>
__device__ inline void keep_patch(uint32_t slot, const Raw8<In> (&raw)[kPatch]) {
    constexpr int kWords = sizeof(Raw8<In>) / sizeof(uint4);
    uint4* to = slot_of<In>(slot);
#pragma unroll
    for (int i = 0; i < kPatch * kWords; ++i) to[i * kTileThreads] = raw[i / kWords].word[i % kWords];
}
template <Floating In>
__device__ inline void kept_patch(uint32_t slot, Raw8<In> (&raw)[kPatch]) {
    constexpr int kWords = sizeof(Raw8<In>) / sizeof(uint4);
    const uint4* from = slot_of<In>(slot);
#pragma unroll
    for (int i = 0; i < kPatch * kWords; ++i) raw[i / kWords].word[i % kWords] = from[i * kTileThreads];
}

// One of the tensors of a launch.
struct Tensor {
    const CastBlockParams b;
    const uint32_t tiles;  // one at least, so that a tensor without elements has a scale

    __device__ Tensor(const ManyEntry& entry, const ScaleRule& rule)
        : b(of_entry(entry, rule.eps, rule.pow2)), tiles(max(b.tiles_rows * b.tiles_cols, 1u)) {}
};

// A slot's tile.
struct Kept {
    uint32_t tensor, tile;
};

// The one tensor of a launch.
struct OneTensor {
    __device__ uint32_t from(uint32_t tensor) const { return tensor; }
};
// The tensors of many that a block works on, a bit each.
struct OwnTensors {
    const uint32_t (&words)[kManyTensors / 32];

    // The first one from `tensor` on; kManyTensors if there is none.
    __device__ uint32_t from(uint32_t tensor) const {
        for (; tensor < kManyTensors; tensor = (tensor / 32 + 1) * 32) {
            const uint32_t bits = words[tensor / 32] >> tensor % 32;
            if (bits != 0) return tensor + __ffs(bits) - 1;
        }
        return kManyTensors;
    }
};
static_assert(kManyTensors % 32 == 0);

// Notes them, each warp some words. A barrier must follow.
__device__ inline void note_own(const CastManyParams& p, const ScaleRule& rule, uint32_t (&words)[kManyTensors / 32]) {
    for (uint32_t i = threadIdx.x; i < kManyTensors; i += kTileThreads) {
        bool is_own = false;
        if (i < p.entries) {
            const uint32_t first = p.first[i], block = blockIdx.x;
            const uint32_t ahead = block >= first ? block - first : block + gridDim.x - first;
            is_own = ahead < Tensor(p.entry[i], rule).tiles;
        }
        const uint32_t bits = __ballot_sync(kFullWarp, is_own);
        if (i % 32 == 0) words[i / 32] = bits;
    }
}

// A block: its slots, and where it is among the tensors.
template <Floating Stored, Floating In, Fp8 Out, Read kRead, typename Tensors>
struct Caster {
    const ManyEntry* entry;
    uint32_t entries;
    Tensors tensors;
    ScaleRule rule;
    uint32_t slots;
    CurrentWorkspace* workspace;
    BlockShared<In>& shared;
    Kept* kept;
    uint32_t oldest = 0, count = 0;  // of the slots
    uint32_t reading;                // the tensor whose tiles are read
    Ticket ticket;
    bool has_ticket = false, keep = false;

    __device__ static bool takes_vectors(const CastBlockParams& b) {
        return rows_are_vectors<Stored>(static_cast<const Stored*>(b.x), b.out, b.cols);
    }
    __device__ static void load(const CastBlockParams& b, uint32_t tile, Raw8<In> (&raw)[kPatch]) {
        const PatchPlace<false> patch(place_of(b, tile), {b.cols, 0});
        takes_vectors(b) ? load_patch_as<true, Stored>(b, patch, raw) : load_patch_as<false, Stored>(b, patch, raw);
    }
    // Before it, all threads must have passed a barrier since the last cast.
    __device__ void cast(const CastBlockParams& b, uint32_t tile, const Raw8<In> (&raw)[kPatch], float scale) const {
        const TilePlace place = place_of(b, tile);
        const PatchPlace<false> patch(place, {b.cols, 0});
        if (tile == 0 && threadIdx.x == 0 && b.scale_inv != nullptr) *b.scale_inv = __frcp_rn(scale);
        takes_vectors(b) ? cast_tile<true, In, Out, kRead>(b, place, patch, raw, scale, nullptr, shared)
                         : cast_tile<false, In, Out, kRead>(b, place, patch, raw, scale, nullptr, shared);
    }

    // Whether to read on before `casting` is cast: until it has been read, then as long as a slot is free.
    __device__ bool reads_on(uint32_t casting) const {
        return reading < entries && (reading == casting || count < slots);
    }
    __device__ void take(uint32_t tensor) {
        keep = count < slots;
        ticket.read_next(workspace[tensor], keep);
        has_ticket = true;
    }
    __device__ void read(uint32_t casting) {
        while (reads_on(casting)) {
            const Tensor tensor(entry[reading], rule);
            if (!has_ticket) take(reading);
            const uint32_t tile = ask_one([&] { return ticket.tile_to_read(tensor.tiles, keep); });
            has_ticket = false;
            if (tile == kNone) {
                reading = tensors.from(reading + 1);
                continue;
            }
            Raw8<In> raw[kPatch];
            load(tensor.b, tile, raw);
            const bool keep_this = keep;
            const uint32_t slot = (oldest + count) % slots;
            if (keep_this) ++count;
            if (reads_on(casting)) take(reading);
            raise_amax<In>(workspace[reading], raw, keep_this, shared.warp_max);
            if (!keep_this) continue;
            keep_patch<In>(slot, raw);
            if (threadIdx.x == 0) kept[slot] = {reading, tile};
        }
    }

    __device__ void cast_all(uint32_t casting) {
        const Tensor tensor(entry[casting], rule);
        const auto [scale, again] = wait_for(workspace[casting], tensor.tiles, rule);
        Ticket other;
        other.cast_next(workspace[casting], again);
        for (; count > 0 && kept[oldest].tensor == casting; --count, oldest = (oldest + 1) % slots) {
            Raw8<In> raw[kPatch];
            kept_patch<In>(oldest, raw);
            cast(tensor.b, kept[oldest].tile, raw, scale);
            __syncthreads();
        }
        for (;;) {
            const uint32_t tile = ask_one([&, again = again] { return other.tile_to_cast(tensor.tiles, again); });
            if (tile == kNone) break;
            Raw8<In> raw[kPatch];
            load(tensor.b, tile, raw);
            other.cast_next(workspace[casting], again);
            cast(tensor.b, tile, raw, scale);
        }
    }
};

template <Floating Stored, Floating In, Fp8 Out, Read kRead, typename Tensors>
__device__ void cast_tensors(const ManyEntry* entry, uint32_t entries, Tensors tensors, const ScaleRule& rule,
                             uint32_t slots, CurrentWorkspace* workspace) {
    __shared__ Kept kept[kCurrentSlots];
    __shared__ BlockShared<In> shared;
    const uint32_t first = tensors.from(0);
    Caster<Stored, In, Out, kRead, Tensors> caster{entry, entries, tensors, rule, slots, workspace, shared, kept};
    caster.reading = first;
    for (uint32_t casting = first; casting < entries; casting = tensors.from(casting + 1)) {
        caster.read(casting);
        caster.cast_all(casting);
    }
    // The last block leaves the workspaces as they were.
    if (ask_one([&] { return uint32_t{atomicInc(&workspace->left, gridDim.x - 1) == gridDim.x - 1}; }) == 0) return;
    for (uint32_t i = threadIdx.x; i < entries; i += kTileThreads) workspace[i] = CurrentWorkspace{};
}

template <Floating In, Fp8 Out>
__device__ void cast_current(const CastCurrentParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    cast_tensors<In, In, Out, Read::kSoon>(&p.entry, 1, OneTensor{}, p.rule, p.slots, p.workspace);
}

template <Floating Stored, Floating In, Fp8 Out>
__device__ void cast_current_many(const CastManyParams& p) {
    const ScaleRule rule{p.fp8_max, p.eps, p.pow2, 0};
    __shared__ uint32_t own[kManyTensors / 32];
    note_own(p, rule, own);
    __syncthreads();
    cast_tensors<Stored, In, Out, Read::kLate>(p.entry, p.entries, OwnTensors{own}, rule, p.slots,
                                               static_cast<CurrentWorkspace*>(p.workspace));
}

#define INSTANCE(symbol, in, out)                                           \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kBlocks<in>) \
        symbol(const __grid_constant__ CastCurrentParams p) {               \
        ptx::wait_for_prior_grids();                                        \
        cast_current<in, out>(p);                                           \
    }

INSTANCE(cast_current_f32_e4m3, f32, e4m3)
INSTANCE(cast_current_f32_e5m2, f32, e5m2)
INSTANCE(cast_current_f16_e4m3, f16, e4m3)
INSTANCE(cast_current_f16_e5m2, f16, e5m2)
INSTANCE(cast_current_bf16_e4m3, bf16, e4m3)
INSTANCE(cast_current_bf16_e5m2, bf16, e5m2)

#define MANY_INSTANCE(symbol, stored, in, out)                                     \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kBlocksCurrentMany) \
        symbol(const __grid_constant__ CastManyParams p) {                         \
        ptx::wait_for_prior_grids();                                               \
        cast_current_many<stored, in, out>(p);                                     \
    }

MANY_INSTANCE(cast_current_many_f32_e4m3, f32, f32, e4m3)
MANY_INSTANCE(cast_current_many_f32_e5m2, f32, f32, e5m2)
MANY_INSTANCE(cast_current_many_f16_e4m3, f16, f16, e4m3)
MANY_INSTANCE(cast_current_many_f16_e5m2, f16, f16, e5m2)
MANY_INSTANCE(cast_current_many_bf16_e4m3, bf16, bf16, e4m3)
MANY_INSTANCE(cast_current_many_bf16_e5m2, bf16, bf16, e5m2)
MANY_INSTANCE(cast_current_many_rounded_f16, f32, f16, e4m3)
MANY_INSTANCE(cast_current_many_rounded_bf16, f32, bf16, e4m3)

}  // namespace te_fast::quantize
