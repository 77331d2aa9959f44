// Work that the blocks of a launch finish together once all of them have come to the same point.
//
// Blocks wait for each other only after every block of the grid has started, so that all blocks that they wait for are
// running. A grid of any size therefore ends, for any other load of the device and any order of starts, and the blocks
// can use the grid's numbers. A block that comes before all have started does not wait, and the others do its share.
#pragma once

#include <cstdint>

namespace te_fast {

// Four u32, zeroed once at allocation; zero again after each launch. At most 65535 blocks.
struct Rendezvous {
    unsigned started;
    unsigned arrived;  // low half: blocks that came; high half: those of them that did not wait
    unsigned item;
    unsigned left;

    // First, in every block.
    __device__ void enter() {
        if (threadIdx.x == 0) atomicAdd(&started, 1);
    }

    // True when every block has arrived and what it wrote before is visible; false in a block that need not wait.
    // Contains barriers.
    __device__ bool meet() {
        const bool waits =
            threadIdx.x == 0 && read(started) == gridDim.x;  // in flight while the fence waits for stores
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned came = atomicAdd(&arrived, waits ? 1 : kAbsent + 1) + 1;
            while (waits && came % kAbsent != gridDim.x) came = read(arrived);
            __threadfence();
            state() = waits ? came / kAbsent == 0 ? kAll : kSome : kGone;
        }
        __syncthreads();
        return state() != kGone;
    }

    // The items of a block that has met the others: its own items if all blocks wait, else items that no block has
    // taken yet. The same in all threads. May contain barriers.
    __device__ unsigned first() { return state() == kAll ? blockIdx.x : take(); }
    __device__ unsigned next(unsigned before) { return state() == kAll ? before + gridDim.x : take(); }

    // After meet: requests the block's place among the leaving blocks, if it will not take items. The answer, which
    // leave needs, is in flight while the block works.
    __device__ unsigned start_leaving() { return threadIdx.x == 0 && state() != kSome ? leave_place() : 0; }

    // Last, in every block.
    __device__ void leave(unsigned place) {
        if (threadIdx.x != 0) return;
        if (state() == kSome) place = leave_place();
        if (place != gridDim.x - 1) return;
        started = 0;
        arrived = 0;
        item = 0;
    }

  private:
    enum State { kGone, kSome, kAll };
    static constexpr unsigned kAbsent = 1u << 16;

    __device__ static State& state() {
        __shared__ State state;
        return state;
    }

    __device__ unsigned leave_place() { return atomicInc(&left, gridDim.x - 1); }

    __device__ unsigned take() {
        __shared__ unsigned taken;
        __syncthreads();
        if (threadIdx.x == 0) taken = atomicAdd(&item, 1);
        __syncthreads();
        return taken;
    }

    __device__ static unsigned read(unsigned& counter) { return *static_cast<volatile unsigned*>(&counter); }
};

}  // namespace te_fast
