// LayerNorm and RMSNorm of short rows, several per warp. norm.cu has the formulas and the arithmetic.
//
// Launch: norm_short, norm_short_transpose: 128 threads; `team` lanes, a power of two from 4 to 32, have a row, each of
//         them eight columns of it, and 64 bytes of such rows at a time. Any number of blocks; `strip` rows of a block
//         at a time, 32 or 64 where their bytes are collected to be transposed, else as many as its threads hold.
//         Dynamic shared memory: 8 * chunk bytes, with out_t strip * chunk more.
// Needs:  contiguous tensors, any alignment but that of out_t, 16 bytes; 1 <= cols <= 8 * team; ld_t a multiple of 16;
//         chunk a multiple of 128, at least cols.
// Moves:  per element sizeof(In) for x, for the residual, for the sum and for y, 1 byte per FP8 layout written.

#include "norm/forward.cuh"

namespace te_fast::norm {

// Blocks of a multiprocessor that the registers are capped for, without a spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kBlocks = 6, kTransposeBlocks = 5;  // conversion in software needs more
#else
constexpr int kBlocks = kShortBlocks, kTransposeBlocks = kShortTransposeBlocks;
#endif

// d += a * b; of a's 16 rows the upper and the lower eight are given apart.
template <Floating In>
__device__ inline void multiply(float (&d)[4], uint32_t upper0, uint32_t upper1, uint32_t lower0, uint32_t lower1,
                                uint32_t b0, uint32_t b1) {
    if constexpr (std::same_as<In, bf16>) {
        ptx::mma_bf16(d, upper0, lower0, upper1, lower1, b0, b1);
    } else {
        ptx::mma_f16(d, upper0, lower0, upper1, lower1, b0, b1);
    }
}

// A thread's eight columns of kRows rows. The lanes of a row are neighbours, and so are the rows of a warp.
template <bool kVectors, Floating In>
struct ShortRows {
    static constexpr int kRows = kVectors ? kShortBytes / 8 / sizeof(In) : 1;
    Raw8<In> slot[kRows];
    uint32_t rows, lanes;  // of the tensor; of a row
    uint32_t first, col;   // the thread's first row of the block's; its first column
    uint32_t apart;        // rows from one of the thread's to the next
    uint32_t held;         // rows of the block
    int width;             // columns inside

    __device__ explicit ShortRows(const NormParams& p) : rows(static_cast<uint32_t>(p.rows)), lanes(p.team) {
        const uint32_t bits = __ffs(lanes) - 1, lane = threadIdx.x % 32;
        apart = 32 >> bits;
        first = threadIdx.x / 32 * kRows * apart + (lane >> bits);
        held = (kShortThreads >> bits) * kRows;
        col = (lane & (lanes - 1)) * 8;
        width = kVectors ? (col < p.cols ? 8 : 0) : width_at(col, p.cols);
    }

    // Of row `r` of the thread's in the block's rows.
    __device__ uint32_t row(int r) const { return first + r * apart; }

    // Whether row `r` of those from `row0` on is there, and the columns of it.
    __device__ bool inside(uint32_t row0, int r) const { return width > 0 && row0 + row(r) < rows; }

    // Elements up to the columns of row `r` of those from `row0` on.
    __device__ size_t index(const NormParams& p, uint32_t row0, int r) const {
        return static_cast<size_t>(row0 + first) * p.cols + col + r * apart * p.cols;
    }

    __device__ Raw8<In> load(const NormParams& p, const void* from, uint32_t row0, int r) const {
        return inside(row0, r) ? load_part<kVectors, In>(from, index(p, row0, r), width) : zero8<In>();
    }

    // The rows themselves, zeros where there is nothing, and their sums stored where there are any.
    __device__ void load(const NormParams& p, uint32_t row0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) slot[r] = load(p, p.x, row0, r);
        if (p.residual == nullptr) return;
        Raw8<In> other[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) other[r] = load(p, p.residual, row0, r);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            slot[r] = add8<In>(slot[r], other[r]);
            if (inside(row0, r)) store_part<kVectors, In, true>(p.sum, index(p, row0, r), width, slot[r]);
        }
    }

    // From groups of so many lanes to the lanes of each row: the same bits in each of them.
    template <int kSums>
    __device__ void add_lanes(float (&sums)[kSums], uint32_t group) const {
        for (uint32_t bit = group; bit < lanes; bit *= 2) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) sums[i] += __shfl_xor_sync(kFullWarp, sums[i], bit);
        }
    }

    // Squared distances of each row from its mean.
    __device__ void add_squares(const float (&mean)[kRows], float (&squares)[kRows]) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            squares[r] = 0.0f;
            if (width > 0) add_squares8<kVectors, In>(slot[r], mean[r], width, squares[r]);
        }
        forget();
        add_lanes(squares, 1);
    }

    // Of 16-bit elements, the sums of each row, then those of their squares, by matrix units: X having four lanes'
    // elements in each of its eight rows, X * Xt has the squares on its diagonal, and of two of the thread's rows at a
    // time X times ones has sums.
    __device__ void add_up(float (&sums)[2 * kRows]) const {
        constexpr uint32_t kOnes = std::same_as<In, bf16> ? 0x3f803f80 : 0x3c003c00;
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int other = r + 1 < kRows ? r + 1 : r;
            const uint4 a = slot[r].word[0], b = slot[other].word[0];
            float square[4] = {}, sum[4] = {};
            multiply<In>(square, a.x, a.y, a.x, a.y, a.x, a.y);
            multiply<In>(square, a.z, a.w, a.z, a.w, a.z, a.w);
            // Row lane / 4 of the diagonal is in the lane lane / 8 of its four.
            const float own = lane / 4 % 2 == 0 ? square[0] : square[1];
            sums[kRows + r] = __shfl_sync(kFullWarp, own, (lane & 28) | lane / 8);
            if (r % 2 != 0) continue;
            multiply<In>(sum, a.x, a.y, b.x, b.y, kOnes, kOnes);
            multiply<In>(sum, a.z, a.w, b.z, b.w, kOnes, kOnes);
            sums[r] = sum[0];
            if (other != r) sums[other] = sum[2];
        }
        add_lanes(sums, 4);
    }

    __device__ void find_stats(const NormParams& p, Stats (&stats)[kRows]) {
        const float share = 1.0f / static_cast<float>(p.cols);
        float mean[kRows], squares[kRows];
        if constexpr (sizeof(In) == 4) {
            float sums[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) sums[r] = sum8<In>(slot[r]);
            add_lanes(sums, 1);
#pragma unroll
            for (int r = 0; r < kRows; ++r) mean[r] = p.rms != 0 ? 0.0f : sums[r] * share;
            add_squares(mean, squares);
        } else {
            float sums[2 * kRows];
            add_up(sums);
            bool cancelled = false;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                mean[r] = p.rms != 0 ? 0.0f : sums[r] * share;
                squares[r] = fmaf(-sums[r], mean[r], sums[kRows + r]);
                cancelled = cancelled || sums[r] * mean[r] > 4.0f * squares[r];
            }
            // The difference of sums cancels if the mean is far from 0, so it is computed again about the mean.
            if (__any_sync(kFullWarp, cancelled)) add_squares(mean, squares);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) stats[r] = {mean[r], rstd_of(p, squares[r])};
    }

    __device__ void store_stats(const NormParams& p, uint32_t row0, const Stats (&stats)[kRows]) const {
        if (col != 0) return;
        float *mean = p.mean + (row0 + first), *rstd = p.rstd + (row0 + first);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (inside(row0, r) && p.mean != nullptr) mean[r * apart] = stats[r].mean;
            if (inside(row0, r) && p.rstd != nullptr) rstd[r * apart] = stats[r].rstd;
        }
    }

    // Otherwise the compiler would keep the floats of a word instead of the word.
    __device__ void forget() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (auto& word : slot[r].word) ptx::forget(word);
        }
    }
};

// Strip after strip. The next rows are prefetched before a strip is stored transposed; its bytes are after the weights.
template <bool kTransposed, Store kStore, bool kVectors, Floating In>
__device__ float norm_strips(const NormParams& p, uint4* dynamic) {
    ShortRows<kVectors, In> part(p);
    constexpr int kRows = decltype(part)::kRows;
    const WeightPlanes planes{reinterpret_cast<float4*>(dynamic), p.chunk / 8};
    const Stage stage{reinterpret_cast<uint8_t*>(dynamic + p.chunk / 2), p.strip};
    // Below 2^31, as ops/norm.rs has checked, and a stride.
    const uint32_t end = static_cast<uint32_t>(kTransposed ? p.ld_t : p.rows), stride = gridDim.x * p.strip;
    const float scale = p.scale == nullptr ? 0.0f : *p.scale;
    float amax = 0.0f;
    uint32_t strip0 = blockIdx.x * p.strip;
    part.load(p, strip0);
    planes.fill<kVectors>(p, 0);
    __syncthreads();
    for (; strip0 < end; strip0 += stride) {
        for (uint32_t done = 0; done < p.strip; done += part.held) {
            const uint32_t row0 = strip0 + done;
            ptx::forget(part.apart);  // distances are made anew
            Stats stats[kRows];
            part.find_stats(p, stats);
            part.store_stats(p, row0, stats);
            const Weights weights = planes.read(part.col);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                uint2 bytes = make_uint2(0, 0);
                if (part.inside(row0, r)) {
                    const Outputs to = outputs_at<In>(p, part.index(p, row0, r), part.width);
                    bytes = normalise8<kVectors, In, kStore, true>(p, part.slot[r], stats[r], weights, to, scale, amax);
                }
                if constexpr (kTransposed) {
                    if (part.width > 0 && done + part.row(r) < p.strip)
                        stage.write(done + part.row(r), part.col, bytes);
                }
            }
            __syncwarp();  // lanes part at the ragged end of a row
            part.load(p, done + part.held < p.strip ? row0 + part.held : strip0 + stride);
        }
        if constexpr (kTransposed) {
            __syncthreads();
            store_strip<false>(p, stage, strip0, 0, p.cols);
            __syncthreads();
        }
    }
    return amax;
}

template <bool kTransposed, Floating In>
__device__ void norm_short(const NormParams& p) {
    extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];
    with_amax<In>(p, [&] {
        if (!all_vectors(p)) return norm_strips<kTransposed, Store::kAny, false, In>(p, dynamic);
        const Store store = usual_store(p);
        if (store == Store::kE4m3) return norm_strips<kTransposed, Store::kE4m3, true, In>(p, dynamic);
        if constexpr (!kTransposed) {
            if (store == Store::kHigh) return norm_strips<kTransposed, Store::kHigh, true, In>(p, dynamic);
        }
        return norm_strips<kTransposed, Store::kAny, true, In>(p, dynamic);
    });
}

#define INSTANCE(symbol, transposed, blocks, in)                                                                       \
    extern "C" __global__ void __launch_bounds__(kShortThreads, blocks) symbol(const __grid_constant__ NormParams p) { \
        ptx::wait_for_prior_grids();                                                                                   \
        norm_short<transposed, in>(p);                                                                                 \
    }

INSTANCE(norm_short_f32, false, kBlocks, f32)
INSTANCE(norm_short_f16, false, kBlocks, f16)
INSTANCE(norm_short_bf16, false, kBlocks, bf16)
INSTANCE(norm_short_transpose_f32, true, kTransposeBlocks, f32)
INSTANCE(norm_short_transpose_f16, true, kTransposeBlocks, f16)
INSTANCE(norm_short_transpose_bf16, true, kTransposeBlocks, bf16)

}  // namespace te_fast::norm
