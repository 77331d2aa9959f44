// A thread's share of the rows that its team has in registers, and their statistics.
#pragma once

#include "norm.cuh"

namespace te_fast {

// A thread's vectors of its team's rows: on their way in shared memory, where only this thread reads them, then in
// registers. A warp has neighbouring runs of 256 columns, so that all distances within a row are constants.
template <int kRows, Floating In>
struct RowPart {
    static constexpr int kVectors = kSlots<In> / kRows, kWords = sizeof(In) / 2, kRun = 256;
    Raw8<In> slot[kRows][kVectors];
    uint32_t col;  // of the first vector
    int vectors;   // inside the row
    bool plain;    // all of the warp's columns are, and nothing but x is read, through the ring
    uint4* ring;

    __device__ RowPart(const NormParams& p, uint4* dynamic, const Team& team)
        : col(team.rank / 32 * kRun * kVectors + team.rank % 32 * 8),
          vectors(col >= p.cols ? 0 : static_cast<int>(min(ceil_div<uint32_t>(p.cols - col, kRun), kVectors))),
          plain(__all_sync(kFullWarp, vectors == kVectors) && p.residual == nullptr && p.ring == 1),
          ring(dynamic + threadIdx.x / 32 * (kHeldBytes * 2) + threadIdx.x % 32) {}

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

    // Sends for what of the rows from `row0` on comes through the ring.
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

    // Else the compiler keeps the floats that it has made of a word instead of the word.
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

    // Sums and sums of squares of each row over the lanes, by matrix units. Of the product [X; 1] * Xt, X being
    // eight columns of eight lanes' elements, the upper half has the squares on its diagonal, the lower half sums.
    __device__ void add_up(float (&sums)[2 * kRows]) const {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
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

    // Sums of squared distances from the means, over the team.
    __device__ void add_squares(const NormParams& p, Team& team, Shared& shared, const float (&mean)[kRows],
                                float (&squares)[kRows]) {
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            squares[row] = 0.0f;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                if (i < vectors) add_squares8<true, In>(slot[row][i], mean[row], 8, squares[row]);
            }
        }
        forget();
        team.sum<kRows>(squares, shared);
    }

    // Statistics of the rows. Once these are in registers, those from `next` on are sent for.
    __device__ void stats(const NormParams& p, Team& team, Shared& shared, size_t next, Stats (&stats)[kRows]) {
        const float share = 1.0f / static_cast<float>(p.cols);
        float mean[kRows] = {}, squares[kRows];
        if constexpr (sizeof(In) == 2) {
            float sums[2 * kRows];
            add_up(sums);
            ask(p, next);
            team.sum<2 * kRows>(sums, shared);
            bool cancels = false;
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
                if (p.rms == 0) mean[row] = sums[row] * share;
                squares[row] = fmaf(-sums[row], mean[row], sums[kRows + row]);
                cancels |= sums[row] * mean[row] > 4.0f * squares[row];
            }
            // A mean far from 0 leaves little of the difference: once more, from the mean.
            if (cancels) add_squares(p, team, shared, mean, squares);
        } else {
            if (p.rms == 0) {
#pragma unroll
                for (int row = 0; row < kRows; ++row) {
#pragma unroll
                    for (int i = 0; i < kVectors; ++i) mean[row] += sum8<In>(slot[row][i]);
                }
            }
            ask(p, next);
            if (p.rms == 0) {
                team.sum<kRows>(mean, shared);
#pragma unroll
                for (int row = 0; row < kRows; ++row) mean[row] *= share;
            }
            add_squares(p, team, shared, mean, squares);
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) stats[row] = {mean[row], rstd_of(p, squares[row])};
    }
};

}  // namespace te_fast
