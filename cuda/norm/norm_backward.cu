// Gradient of LayerNorm and RMSNorm for rows that a block, or the blocks of a cluster together, hold.
//
//   h[r][c]   = (x[r][c] - mean[r]) * rstd[r]      mean is 0 for RMSNorm
//   g[c]      = gamma[c]                           zero-centred: gamma[c] + 1
//   a[r]      = sum over c of g[c] * dy[r][c] / cols           0 for RMSNorm
//   b[r]      = sum over c of g[c] * dy[r][c] * h[r][c] / cols
//   dx[r][c]  = rstd[r] * (g[c] * dy[r][c] - a[r] - h[r][c] * b[r]) + add[r][c]
//   dgamma[c] = sum over r of dy[r][c] * h[r][c]   dbeta[c] = sum over r of dy[r][c]
//
// All of it is FP32, and h one FMA for 16-bit In. A team of threads has a row, and a thread the same columns of each
// row that its team comes to: their sums stay in registers. The copy engine brings the rows of a block's teams, which
// lie side by side, to a ring in shared memory. dgamma and dbeta are summed in this order: the rows of a team; the
// teams of a block; every 16th block; the 16 classes.
//
// Launch: norm_backward, norm_backward_wide: up to 65535 blocks of 512 threads; shared memory for stages * (2 or, with
//         add, 3) rows per team and for 16 KiB * ceil(cols / (8 * team)).
//         norm_backward_cluster: the same in clusters of up to 8 blocks, which have `chunk` columns of each row each.
//         norm_backward_elements, norm_backward_cluster_elements: the same for tensors of any alignment.
// Needs:  contiguous tensors, 16-byte aligned, cols a multiple of 8 but for *_elements; 1 <= cols <= 16 * team, for
//         norm_backward_wide and norm_backward_elements 24 * team; team a power of two from 4 to 512; stages 2 to 8.
//         norm_backward_cluster*: team 512; chunk a multiple of 8, at most 16 * team, and times the blocks of a cluster
//         at least cols.
//         dgamma, dbeta: partial f32 [2][blocks][cols, or chunk, up to a multiple of 8 * team], 16-byte aligned; four
//         counters.
// Moves:  sizeof(In) per element of dy, x, add and dx; 16 bytes per column and block for dgamma and dbeta.

#include "common/rendezvous.cuh"
#include "norm/backward_team.cuh"

namespace te_fast::norm {

constexpr uint32_t kFlight = 9;      // partial sums that a thread has under way: those of 144 blocks
constexpr uint32_t kItemWords = 32;  // words of four columns that a block finishes at a time, one per lane

// The source of a row: the copy engine's ring in shared memory, or global memory, by 16 bytes or by elements.
enum class Source { kRing, kVectors, kElements };

// The rows of all teams of a block, which lie side by side in memory: stages of dy, x and add each.
template <bool kCluster, Floating In>
struct Ring {
    uint8_t* memory;
    Span<kCluster> span;
    uint32_t rows, operand_bytes, stage_bytes;
    uint32_t stage = 0, parity = 0;

    __device__ Ring(const NormBackwardParams& p, const Span<kCluster>& span, void* memory)
        : memory(static_cast<uint8_t*>(memory)),
          span(span),
          rows(kBackwardThreads / p.team),
          operand_bytes(rows * span.width(p) * static_cast<uint32_t>(sizeof(In))),
          stage_bytes(operand_bytes * (p.add == nullptr ? 2 : 3)) {}

    // Whether this thread asks for an operand: the first one of each of the first warps, so that none is long about it.
    __device__ bool asks(const NormBackwardParams& p) const {
        const uint32_t thread = ptx::thread_index();
        return thread % 32 == 0 && thread < (p.add == nullptr ? 2 : 3) * 32;
    }

    // Asks for the thread's operand of the rows from `row0` on, if there are any.
    __device__ void request(const NormBackwardParams& p, BackwardShared& shared, uint32_t stage, uint32_t row0) const {
        if (row0 >= p.rows) return;
        const uint32_t operand = ptx::thread_index() / 32, left = p.rows - row0;
        const uint32_t bytes = left < rows ? left * span.width(p) * static_cast<uint32_t>(sizeof(In)) : operand_bytes;
        const void* tensor = operand == 0 ? p.dy : operand == 1 ? p.x : p.add;
        ptx::arrive_expecting(shared.full[stage], bytes);
        ptx::copy_bulk(memory + stage * stage_bytes + operand * operand_bytes,
                       static_cast<const In*>(tensor) + static_cast<size_t>(row0) * p.cols + span.first(), bytes,
                       shared.full[stage]);
    }

    // Rounds that are asked for ahead. More of them would only share the bandwidth that the next round waits for.
    __device__ static uint32_t ahead(const NormBackwardParams& p) { return min(2, p.stages - 1); }

    // Begins; the block's rows are every `stride`th from `row0` on. Contains a barrier.
    __device__ void start(const NormBackwardParams& p, BackwardShared& shared, uint32_t row0, uint32_t stride) const {
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < p.stages; ++i) {
                ptx::init_barrier(shared.full[i], p.add == nullptr ? 2 : 3);
                ptx::init_barrier(shared.empty[i], kWarps);
            }
            ptx::init_barriers_done();
        }
        __syncthreads();
        if (!asks(p)) return;
        for (uint32_t i = 0; i < ahead(p); ++i) request(p, shared, i, row0 + i * stride);
    }

    // In round `round`, whose first row is `row0`: asks for the rows that come `ahead` rounds later.
    __device__ void refill(const NormBackwardParams& p, BackwardShared& shared, uint32_t round, uint32_t row0,
                           uint32_t stride) const {
        const uint32_t later = ahead(p);
        row0 += later * stride;
        if (!asks(p) || row0 >= p.rows) return;
        const bool wraps = stage + later >= p.stages;
        const uint32_t next = wraps ? stage + later - p.stages : stage + later;
        if (round + later >= p.stages) ptx::wait(shared.empty[next], wraps ? parity : parity ^ 1);
        request(p, shared, next, row0);
    }

    // This warp has read the stage.
    __device__ void release(const NormBackwardParams& p, BackwardShared& shared) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::arrive(shared.empty[stage]);
        parity ^= stage + 1 == p.stages;
        stage = stage + 1 == p.stages ? 0 : stage + 1;
    }

    __device__ Raw8<In> read(uint32_t operand, size_t element) const {
        const auto* from = reinterpret_cast<const uint4*>(memory + stage * stage_bytes + operand * operand_bytes) +
                           element * sizeof(In) / sizeof(uint4);
        Raw8<In> raw;
#pragma unroll
        for (int j = 0; j < static_cast<int>(sizeof(In) / 2); ++j) raw.word[j] = from[j];
        return raw;
    }
};

// A thread's sums of its columns.
template <int kSlots>
struct ColumnSums {
    float dgamma[kSlots][8] = {}, dbeta[kSlots][8] = {};
};

// Statistics of a team's rows, the `k`th being `first + k * stride`: each lane reads those of one row in as many as the
// team has lanes in a warp, long before they are needed.
struct StatsQueue {
    const NormBackwardParams& p;
    uint32_t lanes, row, stride;  // a power of two; of this lane's next read
    RowStats now, following;

    __device__ StatsQueue(const NormBackwardParams& p, const BackwardTeam& team, uint32_t first, uint32_t stride)
        : p(p), lanes(min(team.threads, 32u)), row(first + threadIdx.x % lanes * stride), stride(stride) {
        following = read();
        now = following;
    }

    // Of the `k`th row; in ascending order, and in all threads of a warp.
    __device__ RowStats at(uint32_t k) {
        const int lane = static_cast<int>(k & (lanes - 1)), width = static_cast<int>(lanes);
        if (lane == 0) {
            now = following;
            following = read();
        }
        return {__shfl_sync(kFullWarp, now.mean, lane, width), __shfl_sync(kFullWarp, now.rstd, lane, width)};
    }

  private:
    __device__ RowStats read() {
        const RowStats stats = load_stats(p, row);
        ptx::forget(stride);  // not the product, which would stay in a register
        row += lanes * stride;
        return stats;
    }
};

// A cluster's kernel would spill otherwise.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif

// The rows of a block's teams, and their sums.
template <Source kSource, bool kCluster, Floating In, int kSlots>
struct Rows {
    static constexpr bool kRing = kSource == Source::kRing;
    // Values that are used twice stay in registers if there are enough.
    static constexpr bool kKept = kSlots <= 2 && sizeof(In) == 2 && !(kCluster && kFewRegisters);
    const NormBackwardParams& p;
    BackwardShared& shared;
    BackwardTeam& team;
    Span<kCluster> span;
    Ring<kCluster, In> ring;
    float factor[kSlots][8];
    ColumnSums<kSlots> total;
    Columns8 kept[kKept ? kSlots : 1];

    __device__ Rows(const NormBackwardParams& p, BackwardShared& shared, BackwardTeam& team, void* memory)
        : p(p), shared(shared), team(team), span(p), ring(p, span, memory) {}

    // Of the block's column `col` of a row.
    __device__ size_t index(uint32_t row, uint32_t col) const {
        return static_cast<size_t>(row) * p.cols + span.first() + col;
    }

    __device__ Raw8<In> read(uint32_t operand, const void* tensor, uint32_t row, uint32_t col) const {
        if constexpr (kRing) {
            return ring.read(operand, team.id * span.width(p) + col);
        } else {
            return load_part<kSource == Source::kVectors, In>(tensor, index(row, col), width_at(col, span.width(p)));
        }
    }

    // The columns of slot `i`.
    __device__ Columns8 load(uint32_t row, int i, const RowStats& stats) const {
        if constexpr (!kRing) ptx::forget(row);
        const uint32_t col = team.col(i);
        Columns8 part(read(0, p.dy, row, col), read(1, p.x, row, col));
        part.normalise<In>(stats);
        return part;
    }

    __device__ RowSums sum(uint32_t row, const RowStats& stats) {
        RowSums sums{0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            if (row >= p.rows || team.col(i) >= span.width(p)) continue;
            Columns8 part = load(row, i, stats);
            part.add_to(total.dgamma[i], total.dbeta[i]);
            part.weigh(factor[i]);
            part.add_to(sums);
            if constexpr (kKept) kept[i] = part;
        }
        return sums;
    }

    // The columns of slot `i` once more, weighed.
    __device__ Columns8 again(uint32_t row, int i, const RowStats& stats) const {
        if constexpr (kKept) {
            return kept[i];
        } else {
            Columns8 part = load(row, i, stats);
            part.weigh(factor[i]);
            return part;
        }
    }

    __device__ void store(uint32_t row, const RowStats& stats, const RowSums& means) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            const uint32_t col = team.col(i);
            if (row >= p.rows || col >= span.width(p)) continue;
            float dx[8];
            again(row, i, stats).gradient(stats, means, dx);
            if (p.add != nullptr) {
                float add[8];
                unpack8<In>(read(2, p.add, row, col), add);
#pragma unroll
                for (int c = 0; c < 8; ++c) dx[c] += add[c];
            }
            store_part<kSource != Source::kElements, In>(p.dx, index(row, col), width_at(col, span.width(p)),
                                                         pack8<In>(dx));
        }
    }

    __device__ void run() {
        const uint32_t stride = gridDim.x / span.blocks() * ring.rows;
        const float reciprocal = __frcp_rn(static_cast<float>(p.cols));
        uint32_t row0 = blockIdx.x / span.blocks() * ring.rows;
        BackwardTeam::join<kCluster>(shared);
        if constexpr (kRing) ring.start(p, shared, row0, stride);
        StatsQueue queue(p, team, row0 + team.id, stride);
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            load_factor<false>(p, span.first() + team.col(i), width_at(team.col(i), span.width(p)), factor[i]);
        }
#pragma unroll 1
        for (uint32_t k = 0; row0 < p.rows; row0 += stride, ++k) {
            const uint32_t row = row0 + team.id;
            const RowStats stats = kRing ? queue.at(k) : load_stats(p, row);
            if constexpr (kRing) ptx::wait(shared.full[ring.stage], ring.parity);
            RowSums sums = sum(row, stats);
            if constexpr (kRing) {
                ring.refill(p, shared, k, row0, stride);
                __syncwarp();
            }
            if (p.dx != nullptr) {
                team.add(sums, shared, span);
                sums.finish(p, reciprocal);
                store(row, stats, sums);
            }
            if constexpr (kRing) ring.release(p, shared);
        }
    }
};

// How a block publishes sums of columns: words of four, slot by slot, the first words of the threads of a team before
// their second ones, so that neighbours write side by side. The last slot's may lie outside and are left out.
struct Words {
    uint32_t team, count;

    // Of blocks that have up to `cols` columns.
    __device__ Words(uint32_t team, uint32_t cols) : team(team), count(2 * team * ceil_div(cols, 8 * team)) {}

    // First of the columns of a word.
    __device__ uint32_t col(uint32_t word) const {
        return 8 * (word / (2 * team) * team + word % team) + 4 * (word / team % 2);
    }
};

// The block's sums of its columns, those of its teams added, to `to`. Contains barriers unless a team is the block.
template <int kSlots>
__device__ void publish(const Words& layout, uint32_t width, const BackwardTeam& team, float (&total)[kSlots][8],
                        float4* scratch, float4* to) {
    if (team.threads == kBackwardThreads) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            if (team.col(i) >= width) break;
            float4* words = to + 2 * i * kBackwardThreads + threadIdx.x;
            words[0] = make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
            words[kBackwardThreads] = make_float4(total[i][4], total[i][5], total[i][6], total[i][7]);
        }
        return;
    }
    __syncthreads();
    const uint32_t apart = max(team.threads, 32u);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            for (uint32_t lane = 16; lane >= team.threads; lane /= 2) {
                total[i][c] += __shfl_xor_sync(kFullWarp, total[i][c], lane);
            }
        }
        if (2 * i * team.threads >= layout.count) continue;
        float4* words = scratch + 2 * i * kBackwardThreads + threadIdx.x;
        words[0] = make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
        words[kBackwardThreads] = make_float4(total[i][4], total[i][5], total[i][6], total[i][7]);
    }
    __syncthreads();
    for (uint32_t word = threadIdx.x; word < layout.count; word += kBackwardThreads) {
        if (layout.col(word) >= width) continue;
        const float4* from = scratch + word / team.threads * kBackwardThreads + word % team.threads;
        float4 sum = from[0];
        for (uint32_t other = apart; other < kBackwardThreads; other += apart) {
#pragma unroll
            for (int i = 0; i < 4; ++i) element(sum, i) += (&from[other].x)[i];
        }
        to[word] = sum;
    }
}

// Adds the sums that the blocks with the columns of `span` have published in the 32 words from `first` on. Contains
// barriers.
template <bool kCluster>
__device__ inline void finish_words(const NormBackwardParams& p, const Words& layout, const Span<kCluster>& span,
                                    const float4* from, void* to, uint32_t first, BackwardShared& shared) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = gridDim.x / span.blocks();
    const bool inside = first + lane < layout.count && layout.col(first + lane) < span.width(p);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    from += static_cast<size_t>(span.block()) * layout.count + first + lane;
    for (uint32_t before = warp; before < blocks; before += kWarps * kFlight) {
        float4 part[kFlight];
#pragma unroll
        for (uint32_t i = 0; i < kFlight; ++i) {
            const uint32_t block = before + i * kWarps;
            part[i] = inside && block < blocks
                          ? __ldcg(from + static_cast<size_t>(block) * span.blocks() * layout.count)
                          : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (uint32_t i = 0; i < kFlight; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) element(sum, j) += element(part[i], j);
        }
    }
    __syncthreads();  // the sums of the item before have been read
    shared.columns[warp][lane] = sum;
    __syncthreads();
    const uint32_t word = first + threadIdx.x / 4, col = layout.col(word) + threadIdx.x % 4;
    if (threadIdx.x >= 4 * kItemWords || word >= layout.count || col >= span.width(p)) return;
    float total = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kWarps; ++i) total += (&shared.columns[i][0].x)[threadIdx.x];
    store_float(to, span.first() + col, p.weight_kind, total);
}

template <Source kSource, bool kCluster, int kSlots, Floating In>
__device__ void norm_backward(const NormBackwardParams& p, BackwardShared& shared, uint4* dynamic) {
    auto& rendezvous = *reinterpret_cast<Rendezvous*>(p.counters);
    const bool summed = p.dgamma != nullptr || p.dbeta != nullptr;
    if (summed) rendezvous.enter();
    BackwardTeam team(p.team);
    Rows<kSource, kCluster, In, kSlots> rows(p, shared, team, dynamic);
    rows.run();
    if (!summed) return;
    auto* scratch = reinterpret_cast<float4*>(dynamic);
    const Span<kCluster> span(p);
    const Words layout(p.team, span.most(p));
    const size_t size = static_cast<size_t>(gridDim.x) * layout.count,
                 own = static_cast<size_t>(blockIdx.x) * layout.count;
    auto* const partial = reinterpret_cast<float4*>(p.partial);
    float4* const dbeta_partial = partial + (p.dgamma == nullptr ? 0 : size);
    if (p.dgamma != nullptr) publish(layout, span.width(p), team, rows.total.dgamma, scratch, partial + own);
    if (p.dbeta != nullptr) publish(layout, span.width(p), team, rows.total.dbeta, scratch, dbeta_partial + own);
    const bool works = rendezvous.meet();
    const unsigned place = rendezvous.start_leaving();
    if (works) {
        const uint32_t of_block = ceil_div(layout.count, kItemWords), of_each = of_block * span.blocks();
        const uint32_t of_dgamma = p.dgamma == nullptr ? 0 : of_each;
        const uint32_t items = of_dgamma + (p.dbeta == nullptr ? 0 : of_each);
        for (uint32_t item = rendezvous.first(); item < items; item = rendezvous.next(item)) {
            const bool is_dgamma = item < of_dgamma;
            const uint32_t number = is_dgamma ? item : item - of_dgamma, first = number % of_block * kItemWords;
            const Span<kCluster> theirs = span.of_block(p, number / of_block);
            if (layout.col(first) >= theirs.width(p)) continue;
            finish_words(p, layout, theirs, is_dgamma ? partial : dbeta_partial, is_dgamma ? p.dgamma : p.dbeta, first,
                         shared);
        }
    }
    rendezvous.leave(place);
}

// Rows that allow 16-byte loads.
template <bool kCluster, int kSlots, Floating In>
__device__ void norm_backward(const NormBackwardParams& p) {
    __shared__ BackwardShared shared;
    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    norm_backward<ptx::kBulkCopies ? Source::kRing : Source::kVectors, kCluster, kSlots, In>(p, shared, dynamic);
}

// Those that do not.
template <bool kCluster, Floating In>
__device__ void norm_backward_elements(const NormBackwardParams& p) {
    __shared__ BackwardShared shared;
    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    if (kCluster || p.cols <= 8 * kFewSlots * p.team) {
        norm_backward<Source::kElements, kCluster, kFewSlots, In>(p, shared, dynamic);
    } else if constexpr (!kCluster) {
        norm_backward<Source::kElements, kCluster, kManySlots, In>(p, shared, dynamic);
    }
}

#define INSTANCE(symbol, in, cluster, slots)                          \
    extern "C" __global__ void __launch_bounds__(kBackwardThreads, 1) \
        symbol(const __grid_constant__ NormBackwardParams p) {        \
        ptx::wait_for_prior_grids();                                  \
        norm_backward<cluster, slots, in>(p);                         \
    }

INSTANCE(norm_backward_f32, f32, false, kFewSlots)
INSTANCE(norm_backward_f16, f16, false, kFewSlots)
INSTANCE(norm_backward_bf16, bf16, false, kFewSlots)
INSTANCE(norm_backward_wide_f32, f32, false, kManySlots)
INSTANCE(norm_backward_wide_f16, f16, false, kManySlots)
INSTANCE(norm_backward_wide_bf16, bf16, false, kManySlots)
INSTANCE(norm_backward_cluster_f32, f32, true, kFewSlots)
INSTANCE(norm_backward_cluster_f16, f16, true, kFewSlots)
INSTANCE(norm_backward_cluster_bf16, bf16, true, kFewSlots)

#define ELEMENTS_INSTANCE(symbol, in, cluster)                        \
    extern "C" __global__ void __launch_bounds__(kBackwardThreads, 1) \
        symbol(const __grid_constant__ NormBackwardParams p) {        \
        ptx::wait_for_prior_grids();                                  \
        norm_backward_elements<cluster, in>(p);                       \
    }

ELEMENTS_INSTANCE(norm_backward_elements_f32, f32, false)
ELEMENTS_INSTANCE(norm_backward_elements_f16, f16, false)
ELEMENTS_INSTANCE(norm_backward_elements_bf16, bf16, false)
ELEMENTS_INSTANCE(norm_backward_cluster_elements_f32, f32, true)
ELEMENTS_INSTANCE(norm_backward_cluster_elements_f16, f16, true)
ELEMENTS_INSTANCE(norm_backward_cluster_elements_bf16, bf16, true)

}  // namespace te_fast::norm
