// LayerNorm and RMSNorm of rows, with an optional residual before and an optional cast to FP8 after.
//
//   s[r][c] = In(x[r][c] + residual[r][c])                    x itself without a residual
//   mean[r] = sum over c of s[r][c] / cols                    0 for RMSNorm
//   rstd[r] = 1 / sqrt(sum over c of (s[r][c] - mean[r])^2 / cols + eps)
//   y[r][c] = (s[r][c] - mean[r]) * rstd[r] * gamma[c] + beta[c]     zero-centred: gamma[c] + 1
//   measured = the scale that follows from max |y|, y rounded as it is stored; for the cast behind, current scaling
//   out[r][c] = fp8(y[r][c] * scale)     out_t[c][r] = out[r][c], 0 for rows <= r < ld_t     amax = max |y|
//
// All of it is FP32, y included on its way to FP8, and (s - mean) * rstd one FMA for 16-bit In. A team of warps has a
// row, neighbouring columns each warp; the variance is that of sums and squares, or, where these cancel, and of FP32, a
// second sum about the mean. A 16-bit row with an infinity is NaN, RMSNorm's too: its sum times its mean of zero is.
//
// Launch: norm:           a team holds two rows in registers, 64 bytes of each a thread, or one, 128 bytes, while the
//                         next are on their way to shared memory. Any number of blocks; strip = rows that the teams of
//                         a block hold.
//         norm_transpose: 16 columns and 128 bytes a thread; a block collects the bytes of `strip` = 16, 32 or 64 rows
//                         in shared memory.
//         norm_long:      any cols; `strip` rows at a time, 32 with out_t, `chunk` columns of them at a time.
//         At most 512 threads. Dynamic shared memory: ring * 128 bytes per thread; then, for two rows, 8 * chunk, with
//         out_t strip * chunk bytes. In clusters of up to eight blocks, but for norm_long, these have `chunk` columns
//         of each row each.
// Needs:  contiguous tensors, any alignment but that of out_t, 16 bytes; cols >= 1; ld_t a multiple of 16; chunk a
//         multiple of 128, and times the blocks of a cluster at least cols but for norm_long; team a multiple of 32
//         that divides blockDim and is large enough for chunk columns.
// Moves:  per element sizeof(In) for x, for the residual, for the sum and for y, 1 byte per FP8 layout written;
//         norm_long, and every kernel for tensors without 16-byte loads, reads its input three times.

#include "norm/forward_part.cuh"

namespace te_fast::norm {

enum class Way { kRows, kTransposed, kLong };

// The place of gamma and beta between groups of rows: global memory, registers or shared memory.
enum class Keep { kNot, kRegisters, kShared };

template <Keep kKeep, int kVectors>
struct Kept {
    // The weights that are loaded before the first rows: all of a thread's, or the usual number in shared memory.
    static constexpr int kFirst = kKeep == Keep::kRegisters ? kVectors : 2;
    Weights own[kKeep == Keep::kRegisters ? kVectors : 1];
    WeightPlanes planes;

    // `room`: of the planes. Asks for `raw`, which keep() takes.
    template <typename Part>
    __device__ Kept(const NormParams& p, const Part& part, uint32_t col0, uint4* room, WeightVectors<kFirst>& raw)
        : planes{reinterpret_cast<float4*>(room), p.chunk / 8} {
        if constexpr (kKeep == Keep::kShared) {
            const uint32_t items = planes.items(p, col0), i = threadIdx.x;
            const uint32_t count = i >= items ? 0 : min(ceil_div(items - i, blockDim.x), uint32_t{kFirst});
            raw.load(p, col0 + 8 * i, 8 * blockDim.x, static_cast<int>(count));
        } else if constexpr (kKeep == Keep::kRegisters) {
            raw.load(p, part.col, Part::kRun, part.vectors);
        }
    }

    // Contains a barrier of the block for the planes.
    __device__ void keep(const NormParams& p, uint32_t col0, const WeightVectors<kFirst>& raw) {
        if constexpr (kKeep == Keep::kShared) {
            Weights first[kFirst];
            raw.unpack(p, first);
#pragma unroll
            for (int k = 0; k < kFirst; ++k) {
                const uint32_t i = threadIdx.x + k * blockDim.x;
                if (i < planes.items(p, col0)) planes.store(i, first[k]);
            }
            planes.fill<true>(p, col0, kFirst * blockDim.x);
            __syncthreads();
        } else if constexpr (kKeep == Keep::kRegisters) {
            raw.unpack(p, own);
        }
    }
};

// Normalises a thread's part of the rows from `row0` on; `put` takes the bytes.
template <Store kStore, Keep kKeep, int kRows, int kVectors, Floating In, typename Put>
__device__ __forceinline__ void normalise(const NormParams& p, const RowPart<kRows, kVectors, In>& part,
                                          const Stats (&stats)[kRows], size_t row0, const Kept<kKeep, kVectors>& kept,
                                          float scale, float& amax, Put put) {
    using Part = RowPart<kRows, kVectors, In>;
    constexpr bool kWhole = kStore != Store::kAny;
    const size_t index = row0 * p.cols + part.col;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
        if (!kWhole && k >= part.vectors) break;
        Weights loaded;
        if constexpr (kKeep == Keep::kNot) loaded = load_weights<true>(p, part.col + k * Part::kRun, 8);
        if constexpr (kKeep == Keep::kShared) loaded = kept.planes.read(part.own + k * Part::kRun);
        const Weights& weights = kKeep == Keep::kRegisters ? kept.own[k] : loaded;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            uint2 bytes = make_uint2(0, 0);
            if (kWhole || row0 + row < p.rows) {
                const Outputs to = outputs_at<In>(p, index + row * p.cols + k * Part::kRun, 8);
                bytes = normalise8<true, In, kStore>(p, part.slot[row][k], stats[row], weights, to, scale, amax);
            }
            put(row, part.own + k * Part::kRun, bytes);
        }
    }
}

// Rows that teams hold in registers, strip after strip. Behind the ring: the weights, or the bytes to be transposed.
template <Way kWay, Keep kKeep, int kRows, int kVectors, Floating In>
__device__ float norm_rows(const NormParams& p, ForwardShared& shared, uint4* dynamic) {
    constexpr bool kTransposed = kWay == Way::kTransposed;
    using Part = RowPart<kRows, kVectors, In>;
    ForwardTeam team(p.team);
    team.join_cluster(shared);
    Part part(p, dynamic, team);
    const uint32_t end = static_cast<uint32_t>(kTransposed ? p.ld_t : p.rows);  // with a stride below 2^31: ops/norm.rs
    const uint32_t clusters = gridDim.x / team.blocks, cluster = blockIdx.x / team.blocks;
    const uint32_t rows = blockDim.x / p.team * kRows, stride = clusters * p.strip;
    // Rows that are stored transposed together are adjacent. Other rows go first to one team of each block, then to the
    // next, so that all multiprocessors share the last round.
    const uint32_t first = kTransposed ? team.id * kRows : 0;
    uint32_t strip0 = kTransposed ? cluster * p.strip : (team.id * clusters + cluster) * kRows;
    uint4* behind = dynamic + p.ring * Part::ring_words();
    const uint32_t col0 = team.block * p.chunk;
    WeightVectors<Kept<kKeep, kVectors>::kFirst> weights;
    Kept<kKeep, kVectors> kept(p, part, col0, behind, weights);
    if (first < p.strip) part.ask(p, strip0 + first);  // before anything that waits
    kept.keep(p, col0, weights);
    team.await_cluster();
    const Stage stage{reinterpret_cast<uint8_t*>(behind), p.strip};
    const Store store = usual_store(p);
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    float amax = 0.0f;
    for (; strip0 < end; strip0 += stride) {
        for (uint32_t i = first; i < p.strip; i += rows) {
            const uint32_t row0 = strip0 + i;
            part.load(p, row0);
            const Stats mine = part.stats(p, team, shared, i + rows < p.strip ? row0 + rows : strip0 + stride + first);
            if (team.rank < kRows * Part::kLanes && team.rank % Part::kLanes == 0 && team.block == 0 &&
                row0 + Part::lane_row() < p.rows) {
                store_stats(p, row0 + Part::lane_row(), mine);
            }
            Stats stats[kRows];
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
                stats[row] = {Part::of_row(mine.mean, row), Part::of_row(mine.rstd, row)};
            }
            const auto put = [&](uint32_t row, uint32_t col, uint2 bytes) {
                if constexpr (kTransposed) stage.write(i + row, col, bytes);
            };
            const bool whole = part.is_whole(p, row0);
            if (whole && store == Store::kE4m3) {
                normalise<Store::kE4m3, kKeep>(p, part, stats, row0, kept, scale, amax, put);
            } else if (!kTransposed && whole && store == Store::kHigh) {
                normalise<Store::kHigh, kKeep>(p, part, stats, row0, kept, scale, amax, put);
            } else {
                normalise<Store::kAny, kKeep>(p, part, stats, row0, kept, scale, amax, put);
            }
            __syncwarp();  // lanes part at the ragged end of a row
        }
        if constexpr (kTransposed) {
            __syncthreads();
            if (col0 < p.cols) store_strip<true>(p, stage, strip0, col0, min(p.cols - col0, p.chunk));
            __syncthreads();
        }
    }
    ptx::wait_copies<0>();
    return amax;
}

// Statistics of a row of any length and alignment, of which `cols` columns are read: all, or none by a team that has no
// row but meets the others' barriers. With a residual the sum is stored on the way.
template <bool kVectors, Floating In>
__device__ Stats read_stats(const NormParams& p, size_t row, size_t cols, ForwardTeam& team, ForwardShared& shared) {
    const size_t first = row * p.cols, step = 8 * team.threads;
    const void* from = p.residual == nullptr ? p.x : p.sum;
    float mean[1] = {}, squares[1] = {};
    for (size_t col = 8 * team.rank; col < cols; col += step) {
        const int width = width_at(col, p.cols);
        Raw8<In> raw = load_part<kVectors, In>(p.x, first + col, width);
        if (p.residual != nullptr) {
            raw = add8<In>(raw, load_part<kVectors, In>(p.residual, first + col, width));
            store_part<kVectors, In, true>(p.sum, first + col, width, raw);
        }
        mean[0] += sum8<In>(raw);
    }
    const float total = team.sum<1>(mean, shared);
    mean[0] = p.rms != 0 ? 0.0f : total / static_cast<float>(p.cols);
    for (size_t col = 8 * team.rank; col < cols; col += step) {
        const int width = width_at(col, p.cols);
        add_squares8<kVectors, In>(load_part<kVectors, In>(from, first + col, width), mean[0], width, squares[0]);
    }
    const float square = team.sum<1>(squares, shared);
    // Of 16-bit elements, as where they are in registers: an infinity makes NaN of all its row.
    return {mean[0], rstd_of(p, sizeof(In) == 2 && p.rms != 0 ? fmaf(-total, mean[0], square) : square)};
}

// Rows that teams read again for each use: rows that do not fit into registers, and rows without 16-byte loads.
template <bool kVectors, Floating In>
__device__ float norm_again(const NormParams& p, ForwardShared& shared, uint4* dynamic) {
    ForwardTeam team(p.team);
    const Stage stage{reinterpret_cast<uint8_t*>(dynamic + p.ring * (blockDim.x * (kHeldBytes / 16))), p.strip};
    const uint32_t teams = blockDim.x / p.team;
    const void* from = p.residual == nullptr ? p.x : p.sum;
    const size_t end = p.out_t == nullptr ? p.rows : p.ld_t, stride = static_cast<size_t>(gridDim.x) * p.strip;
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    float amax = 0.0f;
    for (size_t row0 = blockIdx.x * static_cast<size_t>(p.strip); row0 < end; row0 += stride) {
        // Teams pass their barriers equally often, since race detectors count them.
        const uint32_t rows = static_cast<uint32_t>(min(static_cast<size_t>(p.strip), p.rows - min(p.rows, row0)));
        for (uint32_t first = 0; first < rows; first += teams) {
            const uint32_t i = first + team.id;
            const bool mine = i < rows;
            const Stats stats = read_stats<kVectors, In>(p, row0 + i, mine ? p.cols : 0, team, shared);
            if (mine && team.rank == 0) {
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
                        bytes = normalise8<kVectors, In, Store::kAny, true>(
                            p, raw, stats, load_weights<kVectors>(p, col, width),
                            outputs_at<In>(p, row * p.cols + col, width), scale, amax);
                    }
                    if (p.out_t != nullptr) stage.write(i, at, bytes);
                }
            }
            if (p.out_t == nullptr) continue;
            __syncthreads();
            store_strip<false>(p, stage, row0, col0, cols);
            __syncthreads();
        }
        __syncthreads();
    }
    return amax;
}

template <Way kWay, Floating In>
__device__ float norm_by(const NormParams& p, bool vectors, ForwardShared& shared, uint4* dynamic) {
    if (!vectors) return norm_again<false, In>(p, shared, dynamic);
    if constexpr (kWay == Way::kLong) {
        return norm_again<true, In>(p, shared, dynamic);
    } else {
        constexpr int kSize = sizeof(In);
        if constexpr (kWay == Way::kTransposed) {
            return norm_rows<kWay, Keep::kRegisters, kHeldBytes / kTransposedColumns / kSize, kTransposedColumns / 8,
                             In>(p, shared, dynamic);
        } else {
            if (p.chunk * kSize <= 64 * p.team)
                return norm_rows<kWay, Keep::kShared, 2, 8 / kSize, In>(p, shared, dynamic);
            return norm_rows<kWay, Keep::kNot, 1, 16 / kSize, In>(p, shared, dynamic);
        }
    }
}

template <Way kWay, Floating In>
__device__ void norm(const NormParams& p) {
    __shared__ ForwardShared shared;
    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    with_amax<In>(p, [&] { return norm_by<kWay, In>(p, all_vectors(p), shared, dynamic); });
}

#define INSTANCE(symbol, way, in)                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ NormParams p) { \
        ptx::wait_for_prior_grids();                                                                      \
        norm<Way::way, in>(p);                                                                            \
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

}  // namespace te_fast::norm
