// Cross entropy of rows of logits, in float32, and its gradient.
//
//   m = max x, s = sum exp(x - m)                           of all columns, in one pass
//   whole rows: loss = log s - (1 - a) (x[t] - m) - a / columns * sum (x - m)
//               0 where t is ignored; infinite where no column is t
//               statistics: m, log s                        where backward wants them
//   parts:      statistics: m, s, sum (x - m), with 0 for m where all x are minus infinity
//
//   dx = (exp(x - m - log s) - a / vocabulary - (1 - a) [column is t]) * grad, 0 where t is ignored
//
// a is the label smoothing, t the target. Sums of x - m are made of x - x[0]: they round as the spread of logits does,
// not as their size. Without smoothing there are none, since logits of minus infinity have no mean.
//
// Launch: a block of 512 threads per row.
// Needs:  contiguous logits, fewer than 2**31 columns and rows. dlogits may be the logits.
// Moves:  sizeof(In) per logit; backward twice as much. Rows that are ignored are not read.

#include "common/constants.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace te_fast::loss {

struct CrossEntropyParams {
    const void* logits;
    const int64_t* target;  // null: a part of each row
    float* losses;          // likewise
    float* statistics;      // [2 or 3, rows], or null
    uint64_t rows, columns;
    int64_t ignored;  // of whole rows
    float smoothing;
    uint32_t unused;
};
static_assert(sizeof(CrossEntropyParams) == kCrossEntropyParamsBytes);

struct CrossEntropyBwdParams {
    const void* logits;
    const int64_t* target;
    const float* statistics;  // [2, rows]: m, log s
    const float* grad;
    const float* vocabulary;  // columns of all parts; null: this part's
    void* dlogits;
    uint64_t rows, columns;
    uint64_t grad_stride;  // 0: one gradient for all rows
    int64_t ignored;
    float smoothing;
    uint32_t unused;
};
static_assert(sizeof(CrossEntropyBwdParams) == kCrossEntropyBwdParamsBytes);

constexpr int kBatch = 4;  // groups of eight elements that a thread loads before it uses them
constexpr float kMinusInfinity = -__builtin_huge_valf();

// The columns of a row that 16-byte accesses take, and the single ones at both ends.
struct Span {
    uint32_t lead, vectors, singles;

    template <Floating T>
    __device__ static Span of(const T* row, const void* other, uint32_t columns) {
        const auto address = reinterpret_cast<uintptr_t>(row);
        const bool same = ((address ^ reinterpret_cast<uintptr_t>(other)) & 15) == 0;
        if (!same) return {0, 0, columns};
        const uint32_t lead = min(columns, static_cast<uint32_t>((16 - (address & 15)) % 16 / sizeof(T)));
        const uint32_t vectors = (columns - lead) / kVector;
        return {lead, vectors, columns - vectors * kVector};
    }

    __device__ uint32_t single(uint32_t index) const { return index < lead ? index : index + vectors * kVector; }
};

struct Sums {
    float largest = kMinusInfinity, sum = 0.0f, total = 0.0f;

    // What exp subtracts: a finite number as long as all logits are minus infinity, so that 0 and NaN come of them.
    __device__ static float base(float largest) { return largest == kMinusInfinity ? 0.0f : largest; }

    template <int kCount>
    __device__ void take(const float (&x)[kCount], bool adds, float origin) {
        float most = largest;
#pragma unroll
        for (int i = 0; i < kCount; ++i) most = fmaxf(most, x[i]);
        if (most != largest) {
            sum *= expf(largest - most);
            largest = most;
        }
        const float from = base(most);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum += expf(x[i] - from);
        if (!adds) return;
#pragma unroll
        for (int i = 0; i < kCount; ++i) total += x[i] - origin;
    }
};

// Sum over the block in every thread; `scratch` holds one float per warp.
__device__ inline float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int warp = 1; warp < static_cast<int>(kRowThreads / 32); ++warp) x += scratch[warp];
    return x;
}

// Sums over the thread's columns of a row.
template <Floating In>
__device__ Sums thread_sums(const In* x, const Span& span, bool adds, float origin) {
    Sums own;
    constexpr uint32_t kStep = kBatch * kRowThreads;
    uint32_t at = threadIdx.x;
    for (; at + kStep - kRowThreads < span.vectors; at += kStep) {
        Raw8<In> raw[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) raw[i] = load8(x + span.lead + kVector * (at + i * kRowThreads));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            float values[kVector];
            unpack8<In>(raw[i], values);
            own.take(values, adds, origin);
        }
    }
    for (; at < span.vectors; at += kRowThreads) {
        float values[kVector];
        unpack8<In>(load8(x + span.lead + kVector * at), values);
        own.take(values, adds, origin);
    }
    for (uint32_t i = threadIdx.x; i < span.singles; i += kRowThreads) {
        const float value[1] = {to_float(x[span.single(i)])};
        own.take(value, adds, origin);
    }
    return own;
}

template <Floating In>
__device__ void cross_entropy(const CrossEntropyParams& p) {
    __shared__ float scratch[3][kRowThreads / 32];
    const uint64_t row = blockIdx.x;
    const bool whole = p.losses != nullptr;
    const int64_t target = whole ? p.target[row] : 0;
    if (whole && target == p.ignored) {
        if (threadIdx.x == 0) {
            p.losses[row] = 0.0f;
            if (p.statistics != nullptr) p.statistics[row] = p.statistics[p.rows + row] = 0.0f;
        }
        return;
    }
    const auto columns = static_cast<uint32_t>(p.columns);
    const In* x = static_cast<const In*>(p.logits) + row * p.columns;
    const Span span = Span::of(x, x, columns);
    const bool adds = p.smoothing != 0.0f;
    float origin = adds && columns != 0 ? to_float(x[0]) : 0.0f;
    if (!isfinite(origin)) origin = 0.0f;

    const Sums own = thread_sums(x, span, adds, origin);
    const float largest = block_max<kRowThreads>(own.largest, scratch[0]);
    const float sum = block_sum(own.sum * expf(own.largest - Sums::base(largest)), scratch[1]);
    const float total = adds ? block_sum(own.total, scratch[2]) + p.columns * (origin - Sums::base(largest)) : 0.0f;
    if (threadIdx.x != 0) return;
    if (whole) {
        const bool is_here = target >= 0 && target < static_cast<int64_t>(p.columns);
        const float log_sum = logf(sum), wanted = is_here ? to_float(x[target]) - largest : kMinusInfinity;
        float loss = log_sum - (1.0f - p.smoothing) * wanted;
        if (adds) loss -= p.smoothing / p.columns * total;
        p.losses[row] = loss;
        if (p.statistics != nullptr) {
            p.statistics[row] = largest;
            p.statistics[p.rows + row] = log_sum;
        }
    } else {
        p.statistics[row] = largest;
        p.statistics[p.rows + row] = sum;
        p.statistics[2 * p.rows + row] = total;
    }
}

template <Floating In>
__device__ void cross_entropy_bwd(const CrossEntropyBwdParams& p) {
    const uint64_t row = blockIdx.x;
    const int64_t target = p.target[row];
    const auto columns = static_cast<uint32_t>(p.columns);
    const In* x = static_cast<const In*>(p.logits) + row * p.columns;
    In* dx = static_cast<In*>(p.dlogits) + row * p.columns;
    const Span span = Span::of(dx, x, columns);
    const bool is_ignored = target == p.ignored;
    const float largest = p.statistics[row], log_sum = p.statistics[p.rows + row];
    const float grad = p.grad[row * p.grad_stride];
    const float uniform =
        p.smoothing == 0.0f ? 0.0f : p.smoothing / (p.vocabulary == nullptr ? p.columns : *p.vocabulary);
    const float chosen = 1.0f - p.smoothing;
    const auto value = [&](float logit, uint32_t column) {
        float share = expf((logit - largest) - log_sum) - uniform;
        if (column == target) share -= chosen;
        return share * grad;
    };

    constexpr uint32_t kStep = kBatch * kRowThreads;
    uint32_t at = threadIdx.x;
    const auto store = [&](const Raw8<In>& raw, uint32_t vector) {
        const uint32_t column = span.lead + kVector * vector;
        float values[kVector];
        unpack8<In>(raw, values);
#pragma unroll
        for (int i = 0; i < static_cast<int>(kVector); ++i) values[i] = value(values[i], column + i);
        store8<In>(dx + column, pack8<In>(values));
    };
    if (is_ignored) {
        for (; at < span.vectors; at += kRowThreads) store8<In>(dx + span.lead + kVector * at, zero8<In>());
        for (uint32_t i = threadIdx.x; i < span.singles; i += kRowThreads) dx[span.single(i)] = from_float<In>(0.0f);
        return;
    }
    for (; at + kStep - kRowThreads < span.vectors; at += kStep) {
        Raw8<In> raw[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) raw[i] = load8(x + span.lead + kVector * (at + i * kRowThreads));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) store(raw[i], at + i * kRowThreads);
    }
    for (; at < span.vectors; at += kRowThreads) store(load8(x + span.lead + kVector * at), at);
    for (uint32_t i = threadIdx.x; i < span.singles; i += kRowThreads) {
        const uint32_t column = span.single(i);
        dx[column] = from_float<In>(value(to_float(x[column]), column));
    }
}

#define INSTANCE(symbol, body, params, in)                                                               \
    extern "C" __global__ void __launch_bounds__(kRowThreads) symbol(const __grid_constant__ params p) { \
        ptx::wait_for_prior_grids();                                                                     \
        body<in>(p);                                                                                     \
    }

INSTANCE(cross_entropy_f32, cross_entropy, CrossEntropyParams, f32)
INSTANCE(cross_entropy_f16, cross_entropy, CrossEntropyParams, f16)
INSTANCE(cross_entropy_bf16, cross_entropy, CrossEntropyParams, bf16)
INSTANCE(cross_entropy_bwd_f32, cross_entropy_bwd, CrossEntropyBwdParams, f32)
INSTANCE(cross_entropy_bwd_f16, cross_entropy_bwd, CrossEntropyBwdParams, f16)
INSTANCE(cross_entropy_bwd_bf16, cross_entropy_bwd, CrossEntropyBwdParams, bf16)

}  // namespace te_fast::loss
