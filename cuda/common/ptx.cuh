// All inline assembly of te_fast: one function per instruction.
#pragma once

#include <cstdint>

namespace te_fast::ptx {

// ld.global.L1::no_allocate.v4.u32: data that this block reads once.
__device__ inline uint4 load_once(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// ld.global.nc.f32 under a predicate: otherwise the register keeps its value.
__device__ inline void load_where(bool wanted, float& value, const float* from) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0;\n@p ld.global.nc.f32 %0, [%1]; }"
                 : "+f"(value)
                 : "l"(from), "r"(static_cast<int>(wanted)));
}

// ld.global.v4.u32: data whose sectors another load of the thread reads too; it finds them in the first-level cache.
__device__ inline uint4 load(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// st.global.v4.u32 with the cache policy evict_last: part of a line whose rest other blocks write soon. It stays in the
// second-level cache until they have, and goes to memory as one.
__device__ inline void store_part_of_line(uint4* address, const uint4& value) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;"
                 : "=l"(policy));  // computed for each store, since keeping it would cost two registers
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w), "l"(policy)
                 : "memory");
}

// ld.relaxed.gpu: a word as it is in memory now, which another block may write meanwhile; never from the first-level
// cache.
__device__ inline uint32_t load_relaxed(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// ld.acquire.gpu: as load_relaxed; writes of another block before its release of the word are visible afterwards.
__device__ inline uint32_t load_acquire(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Four such words, 16-byte aligned, each for itself.
__device__ inline void load_relaxed(const uint32_t* address, uint32_t* value) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
                 : "l"(address)
                 : "memory");
}

// st.relaxed.gpu: a word that load_relaxed of another block sees, old or new.
__device__ inline void store_relaxed(uint32_t* address, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// bar.sync: until `threads` threads of the block, whole warps, have come to barrier `id` (0 is that of __syncthreads).
__device__ inline void sync_threads(unsigned id, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: counts among the `threads` that sync_threads waits for, and does not wait.
__device__ inline void arrive_threads(unsigned id, unsigned threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// No instruction: the compiler takes the words for new ones, so that it does not keep values derived from them (eight
// floats instead of four words) in registers until their next use.
__device__ inline void forget(uint4& words) {
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// The same for a number that addresses are computed from: they are computed again instead of kept.
__device__ inline void forget(uint32_t& number) { asm volatile("" : "+r"(number)); }
__device__ inline void forget(uint8_t*& address) { asm volatile("" : "+l"(address)); }

// mov %tid.x: reads threadIdx.x again, for code that has no register to keep it.
__device__ inline uint32_t thread_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// mov %ctaid.x: blockIdx.x read again, likewise.
__device__ inline uint32_t block_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// griddepcontrol.wait: until every grid before this one in the stream has finished and its writes are visible.
// First statement of each kernel that is launched with programmatic stream serialisation, which saves the host 0.5 us.
__device__ inline void wait_for_prior_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: the next grid may start once every block has come here; its reads of this grid's
// results still wait in wait_for_prior_grids.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kBulkCopies = true;
#else
constexpr bool kBulkCopies = false;  // the functions that need them are not called
#endif

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// mbarrier.init: a barrier in shared memory whose phases end with `count` arrivals and the bytes they announced.
// Others see it after init_barriers_done and a barrier of the block.
__device__ inline void init_barrier(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void init_barrier(uint64_t& barrier, uint32_t count) {
    init_barrier(shared_address(&barrier), count);
}

// fence.mbarrier_init: the copy engine sees the barriers too.
__device__ inline void init_barriers_done() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// mbarrier.arrive.
__device__ inline void arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ inline void arrive(uint64_t& barrier) { arrive(shared_address(&barrier)); }

// mbarrier.arrive.expect_tx: an arrival that announces `bytes` of copies.
__device__ inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
#endif
}
__device__ inline void arrive_expecting(uint64_t& barrier, uint32_t bytes) {
    arrive_expecting(shared_address(&barrier), bytes);
}

// mbarrier.try_wait.parity until the phase of this parity has ended.
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done;\n"
        "again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again%=; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}
__device__ inline void wait(uint64_t& barrier, uint32_t parity) { wait(shared_address(&barrier), parity); }

// Alignment of shared memory that copies fill. If lines of 128 bytes do not begin together on both sides, each sector
// is fetched twice; a single static variable before the dynamic memory causes that.
constexpr int kCopyAlign = 128;

// cp.async.bulk.shared.global: `bytes`, a multiple of 16, between 16-byte aligned addresses, by the copy engine, which
// tells the barrier.
__device__ inline void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t& barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
#endif
}

// cp.async.shared.global: 16 bytes that the thread finds in shared memory after wait_copies; zeros unless `inside`.
// Past the first-level cache, or, where another copy of the thread has the other half of the sector, through it
// (kApart).
template <bool kApart = false>
__device__ inline void copy_async16(void* shared, const void* global, bool inside) {
    if constexpr (kApart) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                     "r"(inside ? 16 : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                     "r"(inside ? 16 : 0)
                     : "memory");
    }
}

// cp.async.commit_group: the thread's copies since the last group become a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: until all but the thread's latest `kLeft` groups have arrived.
template <int kLeft>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// mma.m16n8k16: d += a * b, 16 x 16 by 16 x 8 elements of 16 bits each, row by column, sums in FP32.
__device__ inline void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ex2.approx.ftz.f32: 2^x within 2 ulp; a result below 2^-126 is 0.
__device__ inline float exp2_fast(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// rcp.approx.ftz.f32: 1 / x within 1 ulp; a result below 2^-126 is 0.
__device__ inline float reciprocal_fast(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

#if __CUDA_ARCH__ >= 900
// %cluster_ctarank: this block's number in its cluster.
__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// barrier.cluster.arrive and .wait: until every thread of the cluster has come here; their writes are visible.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// %cluster_nctarank: how many blocks the cluster has, 1 for a launch without clusters.
__device__ inline uint32_t cluster_blocks() {
    uint32_t blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}

// st.async, mapa: writes a number to the address of block `rank` that corresponds to `to`, and counts four bytes at
// that block's `barrier`.
__device__ inline void send(float* to, float value, uint64_t& barrier, uint32_t rank) {
    asm volatile(
        "{ .reg .b32 there, that;\n"
        "mapa.shared::cluster.u32 there, %0, %3;\n"
        "mapa.shared::cluster.u32 that, %2, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [that]; }" ::"r"(
            shared_address(to)),
        "f"(value), "r"(shared_address(&barrier)), "r"(rank)
        : "memory");
}

// mbarrier.try_wait.parity, then .acquire.cluster: waits for data from other blocks. Only the last try has cluster
// scope, since each such try invalidates L1.
__device__ inline void wait_sent(uint64_t& barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again%=;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; }" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}
#endif

}  // namespace te_fast::ptx
