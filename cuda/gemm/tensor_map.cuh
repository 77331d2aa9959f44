// Copies of tiles between a tensor and shared memory by the copy engine (TMA), and barriers across a cluster.
// A tensor's shape and the tile's are in a map that the host has encoded; tiles beyond the tensor are zeros, and are
// not stored.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"

namespace te_fast::gemm {

// CUtensorMap of cuda.h.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// prefetch.tensormap: a map among the kernel's parameters is read ahead.
__device__ inline void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// cp.async.bulk.tensor.2d, .3d: copies the tile at these coordinates, innermost first, to shared memory, and counts its
// bytes at `barrier`.
__device__ inline void load_tile(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}
__device__ inline void load_tile(uint32_t to, const TensorMap& map, uint32_t barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same to the same place of every block of the cluster in `blocks`, whose barriers of the same place are told.
__device__ inline void load_tile_to(uint16_t blocks, uint32_t to, const TensorMap& map, uint32_t barrier, int x,
                                    int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, "
        "{%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}

// cp.async.bulk.tensor.3d: shared memory to the tile.
__device__ inline void store_tile(const TensorMap& map, uint32_t from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// cp.async.bulk.commit_group: the thread's stores since the last group become a group.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: until all but the thread's latest `kLeft` groups have been read from shared memory.
template <int kLeft>
__device__ inline void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// fence.proxy.async: shared memory that the thread has written is seen by the copy engine and the tensor cores.
__device__ inline void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// mapa, mbarrier.arrive: an arrival at the barrier of the same place in block `rank` of the cluster. It orders no
// memory between blocks (.release.cluster costs a fence of the whole GPU): the waiting thread only overwrites data that
// has been read.
__device__ inline void arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{ .reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// stmatrix.x4: four 8 x 8 matrices of 16-bit elements, as tensor cores leave them, to shared memory; lane i brings the
// address of row i % 8 of matrix i / 8.
__device__ inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// st.shared.v2.f32, .v4.u32 and ld.shared.v4.u32, v2.f32, f32 by address.
__device__ inline void store_shared(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
__device__ inline void store_shared(uint32_t address, const uint4& value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}
__device__ inline uint4 load_shared(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ inline uint32_t load_shared_word(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
__device__ inline float load_shared_float(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}
__device__ inline float2 load_shared_float2(uint32_t address) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
    return value;
}

}  // namespace te_fast::gemm
