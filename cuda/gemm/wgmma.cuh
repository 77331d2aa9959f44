// Hopper's warpgroup matrix instructions and the register allocation that goes with them: one function per instruction.
// They exist only for sm_90a.
#pragma once

#include <cstdint>

namespace te_fast::gemm {

enum class Element { kE4m3, kE5m2, kF16, kBf16 };

constexpr bool is_fp8(Element element) { return element == Element::kE4m3 || element == Element::kE5m2; }
constexpr int bytes_of(Element element) { return is_fp8(element) ? 1 : 2; }

// wgmma.fence: registers that the warpgroup has written are seen by the products that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: the products since the last one become a group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: until all but the latest `kLeft` groups are done.
template <int kLeft>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// No instruction: running products write these registers, so the compiler must not move their uses across this line.
template <int kCount>
__device__ inline void hold(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// setmaxnreg: the warpgroup releases registers, or takes released ones.
template <int kCount>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Descriptor of a product's operand in shared memory: a tile in lines of 128 bytes, swizzled by 128 bytes, at a
// multiple of 1024; groups of 8 lines lie 1024 bytes apart. Of lines across the summed dimension, one 64-wide column of
// them lies kApart bytes from the next. The lower word says where: the address in the block, without its place in the
// cluster, in words of 16 bytes; so many are added for a tile further on.
template <uint32_t kApart = 16>
__device__ inline uint32_t tile_word(uint32_t address) {
    return (address & 0x3ffff) >> 4 | (kApart >> 4) << 16;
}
__device__ inline uint64_t tile_descriptor(uint32_t word) {
    constexpr uint32_t kSwizzle128 = 1u << 30;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(word), "r"(kSwizzle128 | 1024 >> 4));
    return descriptor;
}

// wgmma.mma_async m64nNkK: d (+)= a * b, 64 rows of a by N rows of b, sums in FP32. Operands of 16 bits may have their
// lines across the summed dimension.
template <Element kA, Element kB, int kN, bool kAcrossA, bool kAcrossB>
__device__ inline void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool add);

#define TE_OPERANDS8(i)                                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define TE_OPERANDS64                                                                                         \
    TE_OPERANDS8(0), TE_OPERANDS8(8), TE_OPERANDS8(16), TE_OPERANDS8(24), TE_OPERANDS8(32), TE_OPERANDS8(40), \
        TE_OPERANDS8(48), TE_OPERANDS8(56)
#define TE_OPERANDS96 TE_OPERANDS64, TE_OPERANDS8(64), TE_OPERANDS8(72), TE_OPERANDS8(80), TE_OPERANDS8(88)
#define TE_OPERANDS128 TE_OPERANDS96, TE_OPERANDS8(96), TE_OPERANDS8(104), TE_OPERANDS8(112), TE_OPERANDS8(120)
#define TE_NAMES64                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TE_NAMES96                                                                                                \
    TE_NAMES64                                                                                                    \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
    "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TE_NAMES128                                                                                                    \
    TE_NAMES96                                                                                                         \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
    "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define TE_WGMMA_FP8(ea, eb, n, names, operands, na, nb, np, ta, tb)                                             \
    template <>                                                                                                  \
    __device__ inline void wgmma<ea, eb, n, false, false>(float (&d)[n / 2], uint64_t a, uint64_t b, bool add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " np                                                        \
                     ", 0;\n"                                                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." ta "." tb " {" names "}, " na ", " nb     \
                     ", p, 1, 1; }"                                                                              \
                     : operands                                                                                  \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                              \
    }
#define TE_WGMMA_16(e, n, names, operands, na, nb, np, across_a, across_b, ta, tb, t)                                \
    template <>                                                                                                      \
    __device__ inline void wgmma<e, e, n, across_a, across_b>(float (&d)[n / 2], uint64_t a, uint64_t b, bool add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " np                                                            \
                     ", 0;\n"                                                                                        \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." t "." t " {" names "}, " na ", " nb           \
                     ", p, 1, 1, " ta ", " tb "; }"                                                                  \
                     : operands                                                                                      \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                  \
    }

TE_WGMMA_FP8(Element::kE4m3, Element::kE4m3, 128, TE_NAMES64, TE_OPERANDS64, "%64", "%65", "%66", "e4m3", "e4m3")
TE_WGMMA_FP8(Element::kE5m2, Element::kE4m3, 128, TE_NAMES64, TE_OPERANDS64, "%64", "%65", "%66", "e5m2", "e4m3")
TE_WGMMA_FP8(Element::kE4m3, Element::kE4m3, 192, TE_NAMES96, TE_OPERANDS96, "%96", "%97", "%98", "e4m3", "e4m3")
TE_WGMMA_FP8(Element::kE4m3, Element::kE4m3, 256, TE_NAMES128, TE_OPERANDS128, "%128", "%129", "%130", "e4m3", "e4m3")
TE_WGMMA_FP8(Element::kE5m2, Element::kE4m3, 192, TE_NAMES96, TE_OPERANDS96, "%96", "%97", "%98", "e5m2", "e4m3")
TE_WGMMA_FP8(Element::kE5m2, Element::kE4m3, 256, TE_NAMES128, TE_OPERANDS128, "%128", "%129", "%130", "e5m2", "e4m3")
TE_WGMMA_16(Element::kBf16, 256, TE_NAMES128, TE_OPERANDS128, "%128", "%129", "%130", false, false, "0", "0", "bf16")
TE_WGMMA_16(Element::kBf16, 256, TE_NAMES128, TE_OPERANDS128, "%128", "%129", "%130", false, true, "0", "1", "bf16")
TE_WGMMA_16(Element::kBf16, 256, TE_NAMES128, TE_OPERANDS128, "%128", "%129", "%130", true, true, "1", "1", "bf16")
TE_WGMMA_16(Element::kBf16, 128, TE_NAMES64, TE_OPERANDS64, "%64", "%65", "%66", true, true, "1", "1", "bf16")
TE_WGMMA_16(Element::kF16, 256, TE_NAMES128, TE_OPERANDS128, "%128", "%129", "%130", false, false, "0", "0", "f16")
TE_WGMMA_16(Element::kF16, 256, TE_NAMES128, TE_OPERANDS128, "%128", "%129", "%130", false, true, "0", "1", "f16")
TE_WGMMA_16(Element::kF16, 256, TE_NAMES128, TE_OPERANDS128, "%128", "%129", "%130", true, true, "1", "1", "f16")
TE_WGMMA_16(Element::kF16, 128, TE_NAMES64, TE_OPERANDS64, "%64", "%65", "%66", true, true, "1", "1", "f16")

}  // namespace te_fast::gemm
