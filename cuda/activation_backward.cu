// Gradient of the activation functions: dx in high precision, as FP8 in row layout, transposed layout or both, with
// optional column sums and the optional gradient of the row scale.
//
//   d[r][c]  = dy[r][c] * s[r]                         s is 1 without row_scale
//   dx[r][c] = d * act'(x)                             gated: dg = d * act'(g) * lin(l), dl = d * act(g) * lin'(l)
//   ds[r]    = sum over c of dy[r][c] * act(x[r][c])   gated: * lin(l)
//   dbias[c] = sum over r of dx[r][c]
//   out, out_t, amax: as in activation.cu, of dx       dx stays in FP32 before all of these
//
// Sums are in f32 in a fixed order. ds: 8 columns; a tree over the 16 patches of a tile; the tiles t of each of 8
// classes t % 8; the classes. dbias: 8 rows; two such groups; the 8 pairs of a tile; tiles and classes as above.
//
// Launch: activation_backward, activation_gated_backward: blocks = tiles_cols * tiles_rows, tiles_cols = ceil(cols /
//         128), tiles_rows = ceil(max(rows, ld_t) / 128), both at least 1; 256 threads.
// Needs:  as activation.cu. dbias, ds: counters zeroed once at allocation, they are zero again after each launch.
// Moves:  sizeof(In) per element of dy and of x, and per element of dx sizeof(In) for dx and 1 byte per FP8 layout
//         written; dbias adds 8 bytes per column of dx and tile, ds 8 bytes per row and tile.

#include "common/activation.cuh"
#include "common/reduce.cuh"

namespace te_fast {

struct ActivationBackwardParams {
    const void* dy;
    const void* x;
    void* dx;               // null: none
    uint8_t* out;           // null: none
    uint8_t* out_t;         // null: none
    const void* row_scale;  // null: none
    void* drow_scale;       // null: none
    const float* scale;     // null: no cast
    float* scale_inv;       // null: none
    float* amax;            // null: none; else *amax = max(*amax, |dx|)
    const float* noop;      // null: none; *noop == 1 leaves every output as it is
    void* dbias;            // null: none
    float* partial;         // dbias: [tiles_rows][halves * cols], then ds: [tiles_cols][rows]
    unsigned* counters;     // dbias: [halves * tiles_cols * 4], then ds: [tiles_rows]
    uint64_t rows, cols, ld_t;
    CurveConstants constants;
    uint32_t curve, row_scale_kind, interleave, e5m2, tiles_rows, tiles_cols, unused;
};
static_assert(sizeof(ActivationBackwardParams) == 184);

constexpr int kWarps = kTileThreads / 32;
constexpr int kSumWarps = kTile / 32;  // each finishes 32 columns of a half

template <bool kGated>
struct BackwardShared {
    TransposeBuffer tile[Halves<kGated>::kCount];
    float sums[Halves<kGated>::kCount][kWarps][kTile];
};

// What the threads of a block keep of the rows they have passed.
template <bool kGated>
struct Totals {
    float amax = 0.0f;
    float columns[Halves<kGated>::kCount][8] = {};  // sums of this thread's 8 rows
};

template <Floating In, bool kGated>
struct RowInputs {
    Raw8<In> dy, x[Halves<kGated>::kCount];
};

// Rows whose loads are under way at once.
template <bool kVectors, Floating In>
constexpr int kBackwardRows = kVectors && sizeof(In) == 2 ? 2 : 1;

// What the eight elements of a row have in common.
struct RowFactor {
    const void* scale;  // null: 1
    uint32_t kind;
    float* dots;  // null: none; this tile's sums of dy * y, by row
};

// Eight elements of one row: d * s into `d`, and the sum over the tile's row of dy * y into row.dots.
template <bool kGated, Floating In, typename ActivationCurve>
__device__ inline void differentiate8(const RowInputs<In, kGated>& in, const ActivationCurve& curve,
                                      const RowFactor& factor, size_t row, bool inside,
                                      float (&d)[Halves<kGated>::kCount][8]) {
    float dy[8], x[8];
    ValueSlope act[8], lin[8];
    unpack8<In>(in.dy, dy);
    unpack8<In>(in.x[0], x);
#pragma unroll
    for (int c = 0; c < 8; ++c) act[c] = curve.pair(x[c]);
    if constexpr (kGated) {
        unpack8<In>(in.x[1], x);
#pragma unroll
        for (int c = 0; c < 8; ++c) lin[c] = curve.linear_pair(x[c]);
    }
    if (factor.dots != nullptr) {
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) dot = fmaf(dy[c], kGated ? act[c].value * lin[c].value : act[c].value, dot);
#pragma unroll
        for (int lane = kPatches / 2; lane > 0; lane /= 2) dot += __shfl_xor_sync(kFullWarp, dot, lane);
        if (threadIdx.x % kPatches == 0 && inside) factor.dots[row] = dot;
    }
    if (factor.scale != nullptr && inside) {
        const float s = load_float(factor.scale, row, factor.kind);
#pragma unroll
        for (int c = 0; c < 8; ++c) dy[c] *= s;
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        d[0][c] = dy[c] * act[c].slope;
        if constexpr (kGated) {
            d[0][c] = dy[c] * lin[c].value * act[c].slope;
            d[1][c] = dy[c] * act[c].value * lin[c].slope;
        }
    }
}

// The tile's rows: dx stored, the bytes left in the own slots, this tile's part of ds in `partial`.
template <bool kVectors, bool kGated, Floating In, typename ActivationCurve>
__device__ Totals<kGated> differentiate_rows(const ActivationBackwardParams& p, const TilePlace& place,
                                             const ActivationCurve& curve, BackwardShared<kGated>& shared) {
    constexpr int kStep = kBackwardRows<kVectors, In>, kCount = Halves<kGated>::kCount;
    const Halves<kGated> halves{place.cols, p.interleave};
    const PatchPlace<kGated> patch(place, halves);
    const PatchPlace<false> dy_patch(place, {place.cols, 0});
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    RowFactor factor{p.row_scale, p.row_scale_kind, nullptr};
    if (p.drow_scale != nullptr) {
        const size_t before = p.dbias == nullptr ? 0 : p.tiles_rows * halves.stride();
        factor.dots = p.partial + before + place.col0 / kTile * place.rows;
    }
    Totals<kGated> totals;
#pragma unroll 1
    for (int step = 0; step < kPatch; step += kStep) {
        RowInputs<In, kGated> in[kStep];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            in[i].dy = load_row8<kVectors>(static_cast<const In*>(p.dy), dy_patch, step + i, 0);
#pragma unroll
            for (int half = 0; half < kCount; ++half) {
                in[i].x[half] = load_row8<kVectors>(static_cast<const In*>(p.x), patch, step + i, half);
            }
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            float d[kCount][8];
            // The first column of the tile is inside in every thread that stores a dot.
            differentiate8<kGated, In>(in[i], curve, factor, place.row(step + i), step + i < patch.rows, d);
#pragma unroll
            for (int half = 0; half < kCount; ++half) {
#pragma unroll
                for (int c = 0; c < 8; ++c) totals.columns[half][c] += d[half][c];
                if (p.dx != nullptr) store_row8<kVectors>(static_cast<In*>(p.dx), patch, step + i, half, d[half]);
                if (p.scale != nullptr) {
                    absmax_into(totals.amax, d[half]);
                    own_slot(shared.tile[half], place, step + i) =
                        p.e5m2 != 0 ? encode8<e5m2>(d[half], scale) : encode8<e4m3>(d[half], scale);
                }
            }
        }
    }
    return totals;
}

// Sums the columns of the tile, writes them to `partial` and counts the arrival. True in a warp that was the last to
// arrive for its 32 columns. Contains one barrier.
template <bool kGated>
__device__ bool sum_columns(const ActivationBackwardParams& p, const TilePlace& place, Totals<kGated>& totals,
                            BackwardShared<kGated>& shared) {
    constexpr int kCount = Halves<kGated>::kCount;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < kCount; ++half) {
        float (&total)[8] = totals.columns[half];
#pragma unroll
        for (int c = 0; c < 8; ++c) total[c] += __shfl_xor_sync(kFullWarp, total[c], kPatches);
        if (lane < kPatches) {
#pragma unroll
            for (int c = 0; c < 8; c += 4) {
                *reinterpret_cast<float4*>(&shared.sums[half][warp][lane * kPatch + c]) =
                    make_float4(total[c], total[c + 1], total[c + 2], total[c + 3]);
            }
        }
    }
    __syncthreads();
    if (warp >= kCount * kSumWarps) return false;
    const int half = warp / kSumWarps;
    const size_t local = threadIdx.x % kTile, col = place.col0 + local;
    float sum = shared.sums[half][0][local];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum += shared.sums[half][i][local];
    const size_t stride = kCount * place.cols;
    if (col < place.cols) p.partial[place.row0 / kTile * stride + half * place.cols + col] = sum;
    __threadfence();
    __syncwarp();
    const size_t counter = (half * p.tiles_cols + place.col0 / kTile) * kSumWarps + warp % kSumWarps;
    unsigned arrived = 0;
    if (lane == 0) arrived = atomicInc(p.counters + counter, p.tiles_rows - 1);
    return __shfl_sync(kFullWarp, arrived, 0) == p.tiles_rows - 1;
}

// Sum of `count` partial results that lie `stride` apart, which other blocks wrote.
__device__ inline float sum_partials(const float* from, uint64_t count, size_t stride) {
    constexpr uint64_t kClasses = 8;
    float total[kClasses] = {};
#pragma unroll 2
    for (uint64_t tile = 0; tile < count; tile += kClasses) {
#pragma unroll
        for (uint64_t i = 0; i < kClasses; ++i) {
            if (tile + i < count) total[i] += __ldcg(from + (tile + i) * stride);
        }
    }
#pragma unroll
    for (uint64_t i = 1; i < kClasses; ++i) total[0] += total[i];
    return total[0];
}

// The warp that arrived last for its 32 columns adds the tiles' sums.
template <bool kGated, Floating In>
__device__ void finish_columns(const ActivationBackwardParams& p, const TilePlace& place) {
    const Halves<kGated> halves{place.cols, p.interleave};
    const int half = threadIdx.x / kTile;
    const size_t col = place.col0 + threadIdx.x % kTile;
    __threadfence();
    if (col >= place.cols) return;
    const float sum =
        sum_partials(p.partial + half * place.cols + col, ceil_div<uint64_t>(p.rows, kTile), halves.stride());
    static_cast<In*>(p.dbias)[halves.column(static_cast<uint32_t>(col), half)] = from_float<In>(sum);
}

// The block that arrives last for its 128 rows adds the tiles' parts of ds. Contains barriers.
template <bool kGated>
__device__ void finish_rows(const ActivationBackwardParams& p, const TilePlace& place) {
    const Halves<kGated> halves{place.cols, p.interleave};
    const bool sums = p.dbias != nullptr;
    unsigned* counters = p.counters + (sums ? halves.kCount * p.tiles_cols * kSumWarps : 0);
    if (!is_last_block(counters + place.row0 / kTile, p.tiles_cols)) return;
    const size_t row = place.row0 + threadIdx.x;
    if (threadIdx.x >= kTile || row >= place.rows) return;
    const float* from = p.partial + (sums ? p.tiles_rows * halves.stride() : 0) + row;
    store_float(p.drow_scale, row, p.row_scale_kind, sum_partials(from, p.tiles_cols, place.rows));
}

// Blocks per multiprocessor that the registers are capped for: the most without a spill.
template <bool kGated, Floating In>
constexpr int kBackwardBlocks = kGated || kTileBlocks<In> < 3 ? 2 : 3;

template <bool kGated, Floating In>
__device__ void activation_backward(const ActivationBackwardParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const TilePlace place(p.rows, p.cols, blockIdx.x / p.tiles_cols, blockIdx.x % p.tiles_cols);
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);

    __shared__ BackwardShared<kGated> shared;
    const Halves<kGated> halves{place.cols, p.interleave};
    const bool vectors = halves.keeps_vectors() && is_aligned(p.x, 16) && is_aligned(p.dy, 16) &&
                         is_aligned(p.dx, 16) && is_aligned(p.out, 8);
    Totals<kGated> totals;
    with_curve<kGated>(p.curve, p.constants, [&](const auto& curve) {
        totals = vectors ? differentiate_rows<true, kGated, In>(p, place, curve, shared)
                         : differentiate_rows<false, kGated, In>(p, place, curve, shared);
    });
    // Before the tile's stores: the fence inside waits for every store its thread has made.
    const bool last = p.dbias != nullptr && sum_columns(p, place, totals, shared);
    if (p.scale != nullptr) {
        if (p.amax != nullptr) {
            const float amax = warp_max(totals.amax);
            if (threadIdx.x % 32 == 0) atomic_max_nonnegative(p.amax, amax);
        }
        const Fp8Outputs outputs{p.out, p.out_t, p.ld_t};
#pragma unroll
        for (int half = 0; half < halves.kCount; ++half) {
            if (vectors) {
                store_tile<true>(outputs, place, halves, half, shared.tile[half]);
            } else {
                store_tile<false>(outputs, place, halves, half, shared.tile[half]);
            }
        }
    }
    if (last) finish_columns<kGated, In>(p, place);
    if (p.drow_scale != nullptr) finish_rows<kGated>(p, place);
}

}  // namespace te_fast

#define INSTANCE(symbol, gated, in)                                                                                   \
    extern "C" __global__ void __launch_bounds__(te_fast::kTileThreads, te_fast::kBackwardBlocks<gated, te_fast::in>) \
        symbol(const __grid_constant__ te_fast::ActivationBackwardParams p) {                                         \
        te_fast::ptx::wait_for_prior_grids();                                                                         \
        te_fast::activation_backward<gated, te_fast::in>(p);                                                          \
    }

INSTANCE(activation_backward_f32, false, f32)
INSTANCE(activation_backward_f16, false, f16)
INSTANCE(activation_backward_bf16, false, bf16)
INSTANCE(activation_gated_backward_f32, true, f32)
INSTANCE(activation_gated_backward_f16, true, f16)
INSTANCE(activation_gated_backward_bf16, true, bf16)
