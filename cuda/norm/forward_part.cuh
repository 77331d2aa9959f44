// A thread's share of the rows that its team has in registers, and their statistics.
#pragma once

#include "norm/forward.cuh"

namespace te_fast::norm {

// A thread's vectors of its team's rows: on their way in shared memory, where only this thread reads them, then in
// registers. A warp has neighbouring runs of 256 columns, so that all distances within a row are constants.
template <int kRows, int kVectors, Floating In>
struct RowPart {
    static_assert(kRows * kVectors * 8 * sizeof(In) == kHeldBytes);
    static constexpr int kWords = sizeof(In) / 2, kRun = 256;
    static constexpr int kSums = sizeof(In) == 2 ? 2 * kRows : kRows;
    static constexpr uint32_t kLanes = ForwardTeam::kLanes<kSums>;
    Raw8<In> slot[kRows][kVectors];
    uint32_t own;  // first vector's column of the block's
    uint32_t col;  // and of the row's
    int vectors;   // inside the row
    bool plain;    // all of the warp's columns are, and nothing but x is read, through the ring
    uint4* ring;

    __device__ RowPart(const NormParams& p, uint4* dynamic, const ForwardTeam& team)
        : own(team.rank / 32 * kRun * kVectors + team.rank % 32 * 8),
          col(team.block * p.chunk + own),
          vectors(inside(min(p.cols, (team.block + 1) * p.chunk))),
          plain(__all_sync(kFullWarp, vectors == kVectors) && p.residual == nullptr && p.ring == 1),
          ring(dynamic + threadIdx.x / 32 * (kHeldBytes * 2) + threadIdx.x % 32) {}

    __device__ int inside(uint32_t end) const {
        return col >= end ? 0 : static_cast<int>(min(ceil_div<uint32_t>(end - col, kRun), kVectors));
    }

    // Words of the ring from one tensor to the next.
    __device__ static uint32_t ring_words() { return blockDim.x * (kHeldBytes / 16); }

    __device__ uint4* place(int row, int i, int word) const {
        return ring + ((row * kVectors + i) * kWords + word) * 32;
    }

    // Whether the rows from `row0` on, and the columns of the warp, are all there, and come through the ring alone.
    __device__ bool is_whole(const NormParams& p, size_t row0) const { return plain && row0 + kRows <= p.rows; }

    template <bool kWhole>
    __device__ void ask(const NormParams& p, const void* tensor, size_t row0, uint32_t shift) const {
        const auto* line = static_cast<const uint8_t*>(tensor) + (row0 * p.cols + col) * sizeof(In);
#pragma unroll
        for (int row = 0; row < kRows; ++row, line += p.cols * sizeof(In)) {
            if (!kWhole && row0 + row >= p.rows) break;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                if (!kWhole && i >= vectors) break;
#pragma unroll
                for (int word = 0; word < kWords; ++word) {
                    ptx::copy_async16(place(row, i, word) + shift, line + i * kRun * sizeof(In) + 16 * word, true);
                }
            }
        }
    }

    // Prefetches the part of the rows from `row0` on that comes through the ring.
    __device__ void ask(const NormParams& p, size_t row0) const {
        if (is_whole(p, row0)) {
            ask<true>(p, p.x, row0, 0);
        } else {
            if (p.ring > 0) ask<false>(p, p.x, row0, 0);
            if (p.ring > 1) ask<false>(p, p.residual, row0, ring_words());
        }
        ptx::commit_copies();
    }

    __device__ Raw8<In> arrived(int row, int i, uint32_t shift) const {
        Raw8<In> raw;
#pragma unroll
        for (int word = 0; word < kWords; ++word) raw.word[word] = place(row, i, word)[shift];
        return raw;
    }

    // The rows themselves, zeros behind the last one, and their sums stored where there are any.
    __device__ void load(const NormParams& p, size_t row0) {
        ptx::wait_copies<0>();
        if (is_whole(p, row0)) {
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
#pragma unroll
                for (int i = 0; i < kVectors; ++i) slot[row][i] = arrived(row, i, 0);
            }
            return;
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const size_t index = (row0 + row) * p.cols + col;
            const In *x = static_cast<const In*>(p.x) + index, *residual = static_cast<const In*>(p.residual) + index;
            In* sum = static_cast<In*>(p.sum) + index;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                slot[row][i] = zero8<In>();
                if (i >= vectors || row0 + row >= p.rows) continue;
                slot[row][i] = p.ring > 0 ? arrived(row, i, 0) : load8<In>(x + i * kRun);
                if (p.residual == nullptr) continue;
                const Raw8<In> other = p.ring > 1 ? arrived(row, i, ring_words()) : load8<In>(residual + i * kRun);
                slot[row][i] = add8<In>(slot[row][i], other);
                store8<In>(sum + i * kRun, slot[row][i]);
            }
        }
    }

    // Sums of each row over the lanes, then, of 16-bit elements, of their squares: by matrix units. Of the product
    // [X; 1] * Xt, X being eight columns of eight lanes' elements, the upper half has the squares on its diagonal, the
    // lower half sums.
    __device__ void add_up(float (&sums)[kSums]) const {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            if constexpr (sizeof(In) == 4) {
                sums[row] = 0.0f;
#pragma unroll
                for (int i = 0; i < kVectors; ++i) sums[row] += sum8<In>(slot[row][i]);
            } else {
                float d[4] = {};
#pragma unroll
                for (int i = 0; i < kVectors; ++i) {
                    const uint4 word = slot[row][i].word[0];
                    if constexpr (std::same_as<In, bf16>) {
                        ptx::mma_bf16(d, word.x, 0x3f803f80, word.y, 0x3f803f80, word.x, word.y);
                        ptx::mma_bf16(d, word.z, 0x3f803f80, word.w, 0x3f803f80, word.z, word.w);
                    } else {
                        ptx::mma_f16(d, word.x, 0x3c003c00, word.y, 0x3c003c00, word.x, word.y);
                        ptx::mma_f16(d, word.z, 0x3c003c00, word.w, 0x3c003c00, word.z, word.w);
                    }
                }
                sums[row] = 0.125f * (d[2] + d[3]);  // eight lanes have the same
                sums[kRows + row] = lane % 4 != lane / 8 ? 0.0f : lane / 4 % 2 == 0 ? d[0] : d[1];
            }
        }
    }

    // Otherwise the compiler would keep the floats of a word instead of the word.
    __device__ void forget() {
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
#pragma unroll
                for (int word = 0; word < kWords; ++word) ptx::forget(slot[row][i].word[word]);
            }
        }
    }

    // The row whose statistics this lane has.
    __device__ static uint32_t lane_row() { return threadIdx.x % 32 / kLanes % kRows; }

    // The number that the lanes of `row` have.
    __device__ static float of_row(float x, int row) { return __shfl_sync(kFullWarp, x, row * kLanes); }

    // Sum of squared distances of this lane's row from its mean, over the team.
    __device__ float add_squares(ForwardTeam& team, ForwardShared& shared, float mean) {
        float squares[kRows];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const float center = of_row(mean, row);
            squares[row] = 0.0f;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                if (i < vectors) add_squares8<true, In>(slot[row][i], center, 8, squares[row]);
            }
        }
        forget();
        const float total = team.sum<kRows>(squares, shared);
        return __shfl_sync(kFullWarp, total, lane_row() * ForwardTeam::kLanes<kRows>);
    }

    // Statistics of this lane's row. Once the rows are in registers, the rows from `next` on are prefetched.
    __device__ Stats stats(const NormParams& p, ForwardTeam& team, ForwardShared& shared, size_t next) {
        const float share = 1.0f / static_cast<float>(p.cols);
        float sums[kSums];
        add_up(sums);
        ask(p, next);
        const float total = team.sum<kSums>(sums, shared);
        if constexpr (sizeof(In) == 4) {
            const float mean = p.rms != 0 ? 0.0f : total * share;
            return {mean, rstd_of(p, add_squares(team, shared, mean))};
        } else {
            const float other = __shfl_xor_sync(kFullWarp, total, 16);
            const bool upper = threadIdx.x % 32 >= 16;
            const float sum = upper ? other : total, square = upper ? total : other;
            const float mean = p.rms != 0 ? 0.0f : sum * share;
            float squares = fmaf(-sum, mean, square);
            // The difference of sums cancels if the mean is far from 0, so it is computed again about the mean.
            if (__any_sync(kFullWarp, sum * mean > 4.0f * squares)) squares = add_squares(team, shared, mean);
            return {mean, rstd_of(p, squares)};
        }
    }
};

}  // namespace te_fast::norm
