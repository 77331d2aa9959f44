// Routers of mixtures: scores of logits, the experts of each token and their probabilities; and the gradient.
//
//   s = softmax(x), sigmoid(x) or sqrt(softplus(x))         of all experts; softmax over the chosen ones: s = x
//   chosen: the topk largest s + bias, of equal ones the first, NaN above all; with groups, only those of the best
//           group_topk groups, which have the largest sums of their topk / group_topk best
//   probs = factor * v, 0 where not chosen                  v = (s + bias) - bias
//           over chosen: v = softmax of the chosen, or v / (sum of the chosen + 1e-20) where topk > 1
//           over all:    probs = s, or s / (sum of s + 1e-20), float32, no factor
//   scores: what backward reads: s, of softmax over the chosen the result
//
//   dx, with g = grad * factor, sums over what was normalised:
//           softmax  s (g - sum g s)                         others  ds * slope(x)
//           ds = g / S - (sum g s) / S^2, S = sum s + 1e-20; ds = g where nothing was normalised
//           slope: s (1 - s); of the root of softplus sigmoid(x) / (2 s + 1e-20), where sigmoid(x) = 1 - exp(-s^2)
//
// router_balanced_fwd: sigmoid scores over the chosen, no groups, and a histogram per expert of the bias that it lacks
// in a token. With c, the (topk + 1)th of the values s + bias in the order of the choice:
//
//   bin = floor((c - s - lower) * (bins / (upper - lower)))  clamped to 0 .. bins - 1; 0 for NaN
//   histogram[expert, bin] += 1                              sums of integers, the same in any order
//
// All arithmetic is float32.
//
// Launch: ceil(tokens / 4) blocks of 128 threads, a warp per token; a lane has experts lane, lane + 32, ...
// Needs:  contiguous tensors; experts <= 1024, topk <= experts, groups that divide the experts.
// Moves:  per expert sizeof(In) of the logits and of the probabilities, 4 of the scores, 1 of the map; backward too.
//         The balanced kernel adds 1 to an int32 per expert. Lanes of a warp add to different experts, so no two of
//         them meet.

#include <cstddef>
#include <type_traits>

#include "common/constants.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace te_fast::moe {

struct RouterParams {
    const void* logits;
    const float* bias;  // null: none
    void* probs;
    float* scores;  // null: none
    uint8_t* map;   // null: none
    uint8_t* bits;  // null: none
    void* indices;  // null: none
    uint64_t tokens;
    uint32_t experts, topk;
    uint32_t groups, group_topk;  // 0: no groups
    uint32_t score, over;
    float factor;
    uint32_t index_bytes;
};
static_assert(sizeof(RouterParams) == kRouterParamsBytes);

struct RouterBalancedParams {
    int32_t* histogram;   // [experts, bins]
    const float* bounds;  // lower, upper
    uint64_t bins;        // below 2**31
    RouterParams route;
};
static_assert(sizeof(RouterBalancedParams) == kRouterBalancedParamsBytes);

struct RouterBwdParams {
    const void* grad;
    const float* scores;
    const uint8_t* map;  // null: all experts
    void* dlogits;
    uint64_t tokens;
    uint32_t experts, topk;
    uint32_t score, over;
    float factor;
    uint32_t unused;
};
static_assert(sizeof(RouterBwdParams) == kRouterBwdParamsBytes);

constexpr int kWarps = kRowThreads / 32;
constexpr float kEps = 1e-20f;
constexpr float kLinearFrom = 20.0f;  // softplus is the identity from here on
constexpr float kMinusInfinity = -__builtin_huge_valf();

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float sqrt_softplus(float x) { return sqrtf(x > kLinearFrom ? x : log1pf(expf(x))); }

// Orders as values do, NaN above all and -0 as 0; never 0.
__device__ inline uint32_t key_of(float value) {
    if (isnan(value)) return ~0u;
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits >> 31 == 0 ? bits | 1u << 31 : ~bits;
}

__device__ inline float value_of(uint32_t key) { return __uint_as_float(key >> 31 != 0 ? key ^ 1u << 31 : ~key); }

// Softmax of those of the lanes' elements that `inside` names.
template <int kEach, typename Inside>
__device__ inline void softmax(float (&x)[kEach], Inside inside) {
    float largest = kMinusInfinity, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (inside(j)) largest = fmaxf(largest, x[j]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (!inside(j)) continue;
        x[j] = expf(x[j] - largest);
        sum += x[j];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (inside(j)) x[j] /= sum;
    }
}

// The largest key of the warp and the first expert that has it, of those that `inside` names; its key becomes 0.
template <int kEach, typename Inside>
__device__ inline uint32_t take_best(uint32_t (&key)[kEach], uint32_t& best, Inside inside) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t own = 0, at = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (key[j] > own && inside(j)) own = key[j], at = j;
    }
    best = __reduce_max_sync(kFullWarp, own);
    const uint32_t expert = __reduce_min_sync(kFullWarp, own == best && own != 0 ? lane + 32 * at : ~0u);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (expert == lane + 32 * j) key[j] = 0;
    }
    return expert;
}

// Gives experts outside of the best groups the lowest keys. `sums` is the warp's.
template <int kEach>
__device__ inline void keep_best_groups(const RouterParams& p, uint32_t (&key)[kEach], uint32_t* sums) {
    const uint32_t lane = threadIdx.x % 32, width = p.experts / p.groups, each = p.topk / p.group_topk;
    uint32_t left[kEach], best;
#pragma unroll
    for (int j = 0; j < kEach; ++j) left[j] = key[j];
#pragma unroll 1
    for (uint32_t group = 0; group < p.groups; ++group) {
        const auto inside = [&](int j) { return (lane + 32 * j) / width == group; };
        float sum = 0.0f;
#pragma unroll 1
        for (uint32_t i = 0; i < each; ++i) {
            take_best(left, best, inside);
            sum += value_of(best);
        }
        if (lane == 0) sums[group] = key_of(sum);
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = 0; i < p.group_topk; ++i) {
        uint32_t own = 0, at = ~0u;
#pragma unroll 1
        for (uint32_t group = lane; group < p.groups; group += 32) {
            if (sums[group] > own) own = sums[group], at = group;
        }
        best = __reduce_max_sync(kFullWarp, own);
        const uint32_t group = __reduce_min_sync(kFullWarp, own == best ? at : ~0u);
        __syncwarp();  // all have read the sums
        if (lane == 0) sums[group] = 0;
        __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (key[j] != 0 && sums[(lane + 32 * j) / width] != 0) key[j] = key_of(kMinusInfinity);
    }
}

__device__ inline void store_index(const RouterParams& p, uint64_t at, uint32_t expert) {
    if (p.index_bytes == 2) static_cast<int16_t*>(p.indices)[at] = static_cast<int16_t>(expert);
    if (p.index_bytes == 4) static_cast<int32_t*>(p.indices)[at] = static_cast<int32_t>(expert);
    if (p.index_bytes == 8) static_cast<int64_t*>(p.indices)[at] = expert;
}

// The scores of the lane's experts, and the scores for backward.
template <int kEach, Floating In>
__device__ inline void load_scores(const RouterParams& p, uint64_t token, float (&s)[kEach]) {
    const uint32_t lane = threadIdx.x % 32;
    const In* logits = static_cast<const In*>(p.logits) + token * p.experts;
    float* saved = p.scores == nullptr ? nullptr : p.scores + token * p.experts;
    const auto inside = [&](int j) { return lane + 32 * j < p.experts; };
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        s[j] = inside(j) ? to_float(logits[lane + 32 * j]) : 0.0f;
    }
    if (p.score == kScoreSigmoid) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) s[j] = sigmoid(s[j]);
    } else if (p.score == kScoreSqrtsoftplus) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) s[j] = sqrt_softplus(s[j]);
    } else if (p.over != kOverChosen) {
        softmax(s, inside);
    } else {
        return;  // the choice comes first
    }
    if (saved == nullptr) return;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (inside(j)) saved[lane + 32 * j] = s[j];
    }
}

// Divides by the sum of the elements that `inside` names.
template <int kEach, typename Inside>
__device__ inline void divide_by_sum(float (&s)[kEach], Inside inside) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (inside(j)) sum += s[j];
    }
    sum = warp_sum(sum) + kEps;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (inside(j)) s[j] /= sum;
    }
}

// Counts the bias that each of the lane's experts lacks, and turns the scores into the values of the probabilities.
// `key` are the keys that the choice has left.
template <int kEach>
__device__ inline void count_lacks(const RouterBalancedParams& p, uint32_t (&key)[kEach], float (&s)[kEach]) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t best;
    take_best(key, best, [](int) { return true; });
    const float cutoff = value_of(best);
    const float lower = p.bounds[0], scale = static_cast<float>(p.bins) / (p.bounds[1] - lower);
    const int last = static_cast<int>(p.bins) - 1;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const uint32_t expert = lane + 32 * j;
        if (expert >= p.route.experts) continue;
        const int bin = __float2int_rd((cutoff - s[j] - lower) * scale);  // saturates; NaN is 0
        atomicAdd(&p.histogram[expert * p.bins + max(0, min(bin, last))], 1);
        const float bias = p.route.bias[expert];  // read again, since registers are short
        s[j] = s[j] + bias - bias;
    }
}

// `balanced` is null without a histogram.
template <int kEach, Floating In, typename Balanced = std::nullptr_t>
__device__ void route(const RouterParams& p, uint64_t token, uint32_t* sums, Balanced balanced = nullptr) {
    constexpr bool kCounts = !std::is_null_pointer_v<Balanced>;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t first = token * p.experts;
    const auto inside = [&](int j) { return lane + 32 * j < p.experts; };
    float s[kEach];
    load_scores<kEach, In>(p, token, s);
    if (p.over == kOverAll && p.score != kScoreSoftmax) divide_by_sum(s, inside);
    uint32_t key[kEach], chosen = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const float bias = p.bias != nullptr && inside(j) ? p.bias[lane + 32 * j] : 0.0f;
        const float biased = s[j] + bias;
        key[j] = inside(j) ? key_of(biased) : 0;
        if (!kCounts && p.bias != nullptr) s[j] = biased - bias;
    }
    if (p.groups != 0) keep_best_groups(p, key, sums);
#pragma unroll 1
    for (uint32_t k = 0; k < p.topk; ++k) {
        uint32_t best;
        const uint32_t expert = take_best(key, best, [](int) { return true; });
        if (expert % 32 == lane) chosen |= 1u << (expert / 32);
        if (p.indices != nullptr && lane == 0) store_index(p, token * p.topk + k, expert);
    }
    if constexpr (kCounts) count_lacks(*balanced, key, s);
    const auto is_chosen = [&](int j) { return (chosen >> j & 1) != 0; };
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const uint32_t expert = lane + 32 * j;
        if (p.map != nullptr && inside(j)) p.map[first + expert] = is_chosen(j);
        const uint32_t word = __ballot_sync(kFullWarp, is_chosen(j));
        const uint32_t width = (p.experts + 7) / 8, byte = 4 * j + lane;
        if (p.bits != nullptr && lane < 4 && byte < width) p.bits[token * width + byte] = word >> (8 * lane) & 0xff;
    }
    if (p.over == kOverAll) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            if (inside(j)) static_cast<float*>(p.probs)[first + lane + 32 * j] = s[j];
        }
        return;
    }
    if (p.score == kScoreSoftmax && p.over == kOverChosen) {
        softmax(s, is_chosen);
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            if (p.scores != nullptr && inside(j)) p.scores[first + lane + 32 * j] = is_chosen(j) ? s[j] : 0.0f;
        }
    } else if (p.score != kScoreSoftmax && p.topk > 1) {
        divide_by_sum(s, is_chosen);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const float value = is_chosen(j) ? s[j] * p.factor : 0.0f;
        if (inside(j)) static_cast<In*>(p.probs)[first + lane + 32 * j] = from_float<In>(value);
    }
}

template <int kEach, Floating In>
__device__ void route_back(const RouterBwdParams& p, uint64_t token) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t first = token * p.experts;
    const bool all = p.over == kOverAll;
    float y[kEach], g[kEach], dot = 0.0f, sum = 0.0f;
    uint32_t chosen = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const uint32_t expert = lane + 32 * j;
        y[j] = g[j] = 0.0f;
        if (expert >= p.experts) continue;
        y[j] = p.scores[first + expert];
        if (!all && p.map[first + expert] == 0) continue;
        chosen |= 1u << j;
        g[j] = all ? static_cast<const float*>(p.grad)[first + expert]
                   : to_float(static_cast<const In*>(p.grad)[first + expert]) * p.factor;
        dot += g[j] * y[j];
        sum += y[j];
    }
    dot = warp_sum(dot);
    sum = warp_sum(sum) + kEps;
    const bool normalises = all || p.topk > 1;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const uint32_t expert = lane + 32 * j;
        if (expert >= p.experts) continue;
        const bool is_chosen = (chosen >> j & 1) != 0;
        float d = 0.0f;
        if (p.score == kScoreSoftmax) {
            if (is_chosen || p.over != kOverChosen) d = y[j] * (g[j] - dot);
        } else if (is_chosen) {
            const float slope =
                p.score == kScoreSigmoid ? y[j] * (1.0f - y[j]) : -expm1f(-y[j] * y[j]) / (2.0f * y[j] + kEps);
            d = (normalises ? g[j] / sum - dot / (sum * sum) : g[j]) * slope;
        }
        static_cast<In*>(p.dlogits)[first + expert] = from_float<In>(d);
    }
}

// Calls `run` with the least number of experts per lane that holds all.
template <typename Run>
__device__ inline void by_width(uint32_t experts, Run run) {
    if (experts <= 32) {
        run(std::integral_constant<int, 1>{});
    } else if (experts <= 128) {
        run(std::integral_constant<int, 4>{});
    } else if (experts <= 256) {
        run(std::integral_constant<int, 8>{});
    } else {
        run(std::integral_constant<int, 32>{});
    }
}

#define INSTANCE(type)                                                                                          \
    extern "C" __global__ void __launch_bounds__(kRowThreads)                                                   \
        router_fwd_##type(const __grid_constant__ RouterParams p) {                                             \
        __shared__ uint32_t sums[kWarps][kMaxExperts];                                                          \
        ptx::wait_for_prior_grids();                                                                            \
        const uint32_t warp = threadIdx.x / 32;                                                                 \
        const uint64_t token = uint64_t{blockIdx.x} * kWarps + warp;                                            \
        if (token >= p.tokens) return;                                                                          \
        by_width(p.experts, [&](auto each) { route<decltype(each)::value, type>(p, token, sums[warp]); });      \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(kRowThreads)                                                   \
        router_balanced_fwd_##type(const __grid_constant__ RouterBalancedParams p) {                            \
        ptx::wait_for_prior_grids();                                                                            \
        const uint64_t token = uint64_t{blockIdx.x} * kWarps + threadIdx.x / 32;                                \
        if (token >= p.route.tokens) return;                                                                    \
        RouterParams own = p.route;                                                                             \
        own.score = kScoreSigmoid, own.over = kOverChosen, own.groups = 0; /* drops the code of the others */   \
        by_width(own.experts, [&](auto each) { route<decltype(each)::value, type>(own, token, nullptr, &p); }); \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(kRowThreads)                                                   \
        router_bwd_##type(const __grid_constant__ RouterBwdParams p) {                                          \
        ptx::wait_for_prior_grids();                                                                            \
        const uint64_t token = uint64_t{blockIdx.x} * kWarps + threadIdx.x / 32;                                \
        if (token >= p.tokens) return;                                                                          \
        by_width(p.experts, [&](auto each) { route_back<decltype(each)::value, type>(p, token); });             \
    }

INSTANCE(f32)
INSTANCE(f16)
INSTANCE(bf16)

}  // namespace te_fast::moe
