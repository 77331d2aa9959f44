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

}  // namespace te_fast::ptx
