// Delayed scaling: rolls the amax histories of all tensors of a direction and derives their next scales.
//
// Per tensor c of an entry, history h[0..L) (slot 0 is the live one that casts maximise into):
//   last = reduced[c] if given and not 0, else h[0]
//   if last != 0:  h[i] = h[i + 1] for i < L - 1, h[L - 1] = last, then h[0] = 0
//                  a = max over the rolled window, the value that slot 0 loses included ("max"), or last
//                  if a finite and > 0: scale = fp8_max * 2^-margin / a, F32 max where that is infinite
//
// Launch: blocks of 256 threads, one column of them per entry; the blocks of a column share the entry's tensors.
//         scale_update_few takes the same with a small parameter struct.
// Needs:  h [L, n] and scale [n] contiguous; every entry of a launch has the same L.
// Moves:  8 bytes per history slot.
//
// amax_gather, before it where ranks reduce their maxima: gathered[first + c] = live[c] for all tensors c of an entry,
// 0 where live is null; live is slot 0 of the histories. One block of 32 threads per entry. amax_gather_few is to it
// what scale_update_few is to scale_update.

#include "common/constants.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

namespace te_fast::quantize {

constexpr int kSlots = 4;  // slots of a history per thread and barrier: TE's default of 1024 takes one

struct ScaleEntry {
    float* history;
    float* scale;
    const float* reduced;  // null: none
    uint32_t count;        // tensors
    float max_scaled;      // fp8_max * 2^-margin
};

template <int kEntries>
struct ScaleUpdateParams {
    uint64_t history_len;
    uint32_t entries;
    uint32_t most_recent;
    ScaleEntry entry[kEntries];
};
static_assert(sizeof(ScaleUpdateParams<kFewEntries>) == kScaleUpdateFewParamsBytes);
static_assert(sizeof(ScaleUpdateParams<kManyEntries>) == kScaleUpdateParamsBytes,
              "kernel parameters end at 32764 bytes");

// Rolls one history in place and returns the maximum over the window, in every thread.
__device__ inline float roll(float* history, uint64_t length, uint64_t stride, float last, float* scratch) {
    float amax = 0.0f;
    for (uint64_t base = 0; base < length; base += kSlots * kThreads) {
        float next[kSlots];
#pragma unroll
        for (int k = 0; k < kSlots; ++k) {
            const uint64_t i = base + k * kThreads + threadIdx.x;
            next[k] = i + 1 < length ? history[(i + 1) * stride] : i < length ? last : 0.0f;
            amax = fmaxf(amax, next[k]);
        }
        __syncthreads();  // all of this span is read before any of it is written
#pragma unroll
        for (int k = 0; k < kSlots; ++k) {
            const uint64_t i = base + k * kThreads + threadIdx.x;
            if (i < length) history[i * stride] = i == 0 ? 0.0f : next[k];
        }
    }
    amax = block_max<kThreads>(amax, scratch);
    __syncthreads();
    return amax;
}

template <int kEntries>
__device__ void scale_update(const ScaleUpdateParams<kEntries>& p) {
    __shared__ float scratch[kThreads / 32];
    const ScaleEntry& entry = p.entry[blockIdx.x];
    for (uint32_t c = blockIdx.y; c < entry.count; c += gridDim.y) {
        float* history = entry.history + c;
        const float reduced = entry.reduced == nullptr ? 0.0f : entry.reduced[c];
        const float last = reduced != 0.0f ? reduced : history[0];
        if (last == 0.0f) continue;
        __syncthreads();  // every thread has read slot 0
        const float window = roll(history, p.history_len, entry.count, last, scratch);
        const float amax = p.most_recent != 0 ? last : window;
        if (threadIdx.x == 0 && amax > 0.0f && !isinf(amax)) {
            const float scale = __fdiv_rn(entry.max_scaled, amax);
            entry.scale[c] = isinf(scale) ? kF32Max : scale;
        }
    }
}

struct LiveAmax {
    const float* live;  // null: 0
    uint32_t first;
    uint32_t count;
};

template <int kEntries>
struct AmaxGatherParams {
    float* gathered;
    uint32_t entries;
    uint32_t unused;
    LiveAmax entry[kEntries];
};
static_assert(sizeof(AmaxGatherParams<kFewEntries>) == kAmaxGatherFewParamsBytes);
static_assert(sizeof(AmaxGatherParams<kManyEntries>) == kAmaxGatherParamsBytes);

template <int kEntries>
__device__ void amax_gather(const AmaxGatherParams<kEntries>& p) {
    const LiveAmax& entry = p.entry[blockIdx.x];
    for (uint32_t c = threadIdx.x; c < entry.count; c += kWarp) {
        p.gathered[static_cast<uint64_t>(entry.first) + c] = entry.live == nullptr ? 0.0f : entry.live[c];
    }
}

#define INSTANCE(symbol, entries)                                      \
    extern "C" __global__ void __launch_bounds__(kThreads)             \
        symbol(const __grid_constant__ ScaleUpdateParams<entries> p) { \
        scale_update<entries>(p);                                      \
    }

INSTANCE(scale_update, kManyEntries)
INSTANCE(scale_update_few, kFewEntries)

#define GATHER_INSTANCE(symbol, entries)                                                                              \
    extern "C" __global__ void __launch_bounds__(kWarp) symbol(const __grid_constant__ AmaxGatherParams<entries> p) { \
        amax_gather<entries>(p);                                                                                      \
    }

GATHER_INSTANCE(amax_gather, kManyEntries)
GATHER_INSTANCE(amax_gather_few, kFewEntries)

}  // namespace te_fast::quantize
