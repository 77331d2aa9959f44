// Many tensors in one launch: their addresses are kernel parameters, so that no table on the device has to be kept
// alive.
#pragma once

#include <cstdint>

#include "common/constants.cuh"

namespace te_fast::quantize {

struct ManyEntry {
    const void* x;     // contiguous [rows, cols]
    uint8_t* out;      // null: none
    uint8_t* out_t;    // null: none
    float* scale;      // of blocks: none; amax_many writes it, cast_many reads it
    float* scale_inv;  // the tensor's, null: none; or those of the row layout's blocks
    float* other;      // *other is raised to max |x|, null: none; or the scales of the transposed layout's blocks
    uint32_t rows, cols;
    uint32_t chunks;  // blocks of amax_many that have it
    uint32_t unused;
};

struct CastManyParams {
    void* workspace;  // an AmaxWorkspace for each entry
    uint32_t entries;
    uint32_t pow2;
    float eps;
    float fp8_max;
    uint32_t first[kManyTensors];  // block of each entry, ascending; entry 0 has block 0
    ManyEntry entry[kManyTensors];
};
static_assert(sizeof(CastManyParams) == kCastManyParamsBytes, "kernel parameters end at 32764 bytes");

// The entry that has a block of the launch. Of entries that begin at the same one, all but the last are empty.
__device__ inline uint32_t find_entry(const CastManyParams& p, uint32_t block) {
    uint32_t low = 0, high = p.entries;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (p.first[middle] <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace te_fast::quantize
