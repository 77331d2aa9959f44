// Stores a tile's sums, or adds them to the result, through shared memory, in chunks of 128 bytes by 64 rows, which the
// copy engine moves.
#pragma once

#include "gemm/grouped_sums.cuh"

namespace te_fast::gemm {

// Two adjacent results as a word of two 16-bit elements.
__device__ inline uint32_t pack(uint32_t kind, float x, float y) {
    return kind == kFloatF16 ? pack2<f16>(x, y) : pack2<bf16>(x, y);
}

// A chunk of a warpgroup's results, 64 rows by 128 bytes, to shared memory, swizzled.
template <typename K, int kPart, bool kWide>
__device__ inline void write_chunk(const GroupedParams& p, const TileSums<K>& sums, uint32_t chunk) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if constexpr (kWide) {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const int line = warp * 16 + lane / 4 + 8 * high;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int word = 2 * j + lane % 4 / 2, i = 4 * (4 * kPart + j) + 2 * high;
                store_shared(chunk + line * kLine + ((word ^ (line & 7)) << 4) + lane % 2 * 8, sums[i], sums[i + 1]);
            }
        }
    } else {
        const int line = warp * 16 + lane % 16, side = lane / 16;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const int i = 4 * (8 * kPart + j);
            store_matrices(chunk + line * kLine + (((j + side) ^ (line & 7)) << 4),
                           pack(p.d_type, sums[i], sums[i + 1]), pack(p.d_type, sums[i + 2], sums[i + 3]),
                           pack(p.d_type, sums[i + 4], sums[i + 5]), pack(p.d_type, sums[i + 6], sums[i + 7]));
        }
    }
}

// The first `rows` rows of a chunk, by the threads of a warpgroup: those behind them are another group's.
template <bool kWide>
__device__ inline void copy_chunk(const GroupedParams& p, uint32_t chunk, int row, int rows, int column) {
    constexpr int kSize = kWide ? 4 : 2;
    const int thread = threadIdx.x % 128, word = thread % 8;
    const uint64_t first = column + word * (16 / kSize);
    if (first >= p.n) return;
    for (int line = thread / 8; line < rows; line += 16) {
        const uint4 value = load_shared(chunk + line * kLine + ((word ^ (line & 7)) << 4));
        char* to = static_cast<char*>(p.result) + ((static_cast<uint64_t>(row) + line) * p.n + first) * kSize;
        *reinterpret_cast<uint4*>(to) = value;
    }
}

// Adds the values that the copy engine has loaded to the sums.
template <typename K, int kPart, bool kWide>
__device__ inline void add_chunk(const GroupedParams& p, TileSums<K>& sums, uint32_t chunk) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
        const int line = warp * 16 + lane / 4 + 8 * high;
        const uint32_t at = chunk + line * kLine;
#pragma unroll
        for (int j = 0; j < (kWide ? 4 : 8); ++j) {
            const int i = 4 * ((kWide ? 4 : 8) * kPart + j) + 2 * high;
            float2 old;
            if constexpr (kWide) {
                old = load_shared_float2(at + (((2 * j + lane % 4 / 2) ^ (line & 7)) << 4) + lane % 2 * 8);
            } else {
                const uint32_t pair = load_shared_word(at + ((j ^ (line & 7)) << 4) + lane % 4 * 4);
                old = p.d_type == kFloatF16 ? unpack2<f16>(pair) : unpack2<bf16>(pair);
            }
            sums[i] += old.x;
            sums[i + 1] += old.y;
        }
    }
    __syncwarp();
}

// A warpgroup's 64 rows to the chunks, as many at a time as there is room for.
template <typename K, bool kWide>
__device__ void store_chunks(const GroupedParams& p, Worker<K>& worker, TileSums<K>& sums, const Corner& corner) {
    constexpr int kPerChunk = kWide ? 32 : 64, kParts = K::kColumns / kPerChunk;
    const Block<K>& block = worker.block;
    const int warpgroup = worker.warpgroup;
    const int rows = corner.rows_left - 64 * warpgroup, row = corner.row + 64 * warpgroup;
    const int chunks = chunks_of<K>(p, corner);
    const auto write = [&]<int kFrom, int kPart>() {
        if constexpr (kPart < K::kChunks && kFrom + kPart < kParts) {
            const uint32_t chunk = block.chunk(warpgroup, kPart);
            if constexpr (K::kAdds) {
                if (p.accumulate != 0) add_chunk<K, kFrom + kPart, kWide>(p, sums, chunk);
            }
            write_chunk<K, kFrom + kPart, kWide>(p, sums, chunk);
        }
    };
    const auto store = [&]<int kFrom>() {
        if constexpr (kFrom < kParts) {
            if (kFrom >= chunks) return;
            ptx::wait(block.free(), worker.parity);
            worker.parity ^= 1;
            if (rows > 0) {
                write.template operator()<kFrom, 0>();
                write.template operator()<kFrom, 1>();
                write.template operator()<kFrom, 2>();
                write.template operator()<kFrom, 3>();
                publish_shared();
                if (K::kByRows && rows < 64) {
                    ptx::sync_threads(2 + warpgroup, 128);
                    for (int part = 0; part < min(K::kChunks, kParts - kFrom); ++part) {
                        copy_chunk<kWide>(p, block.chunk(warpgroup, part), row, rows,
                                          corner.column + (kFrom + part) * kPerChunk);
                    }
                }
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::arrive(block.ready());
        }
    };
    store.template operator()<0>();
    store.template operator()<K::kChunks>();
    static_assert(2 * K::kChunks >= kParts && K::kChunks <= 4);
}

// A warpgroup's sums: scaled, with the bias, to memory.
template <typename K>
__device__ void store(const GroupedParams& p, Worker<K>& worker, TileSums<K>& sums, const Place& place,
                      const Corner& corner) {
    if constexpr (K::kOneScale) {
        const float scale = p.a_scale_inv[place.group] * p.b_scale_inv[place.group];
#pragma unroll
        for (int i = 0; i < K::kColumns / 2; ++i) sums[i] *= scale;
    }
    if constexpr (K::kByRows) {
        if (p.bias != nullptr) {
            const uint32_t* pairs = static_cast<const uint32_t*>(p.bias) + place.group * (p.n / 2) + threadIdx.x % 4;
            const bool half = p.bias_type == kFloatF16;
#pragma unroll
            for (int j = 0; j < K::kColumns / 8; ++j) {
                const int column = corner.column + 8 * j;
                const uint32_t pair = column < p.n ? __ldg(pairs + column / 2) : 0;
                const float2 f16_pair = unpack2<f16>(pair), bf16_pair = unpack2<bf16>(pair);
                const float x = half ? f16_pair.x : bf16_pair.x, y = half ? f16_pair.y : bf16_pair.y;
                sums[4 * j] += x;
                sums[4 * j + 1] += y;
                sums[4 * j + 2] += x;
                sums[4 * j + 3] += y;
            }
        }
    }
    if (p.d_type == kFloatF32) {
        store_chunks<K, true>(p, worker, sums, corner);
    } else {
        store_chunks<K, false>(p, worker, sums, corner);
    }
}

}  // namespace te_fast::gemm
