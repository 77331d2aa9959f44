// The rows of groups, whose counts are on the device: a warp walks the groups, 32 at a time, one per lane.
#pragma once

#include <cstdint>

#include "common/types.cuh"

namespace te_fast::gemm {

template <bool kByRows>
class Walk {
  public:
    // Groups begin at multiples of `align`. Their counts add up to `counted` rows at most, and with the rows between
    // groups to `rows`; where casts have padded groups, which is so unless groups cut the rows of the result (kByRows),
    // `counted` is less. Null splits: one group has all rows.
    __device__ Walk(const int64_t* splits, int groups, int rows, int counted, int align)
        : splits_(splits), groups_(groups), rows_(rows), counted_(counted), align_(align) {
        load();
    }

    // The group of lane 0.
    __device__ int first() const { return first_; }
    // Whether this lane has a group.
    __device__ bool is_group() const { return first_ + static_cast<int>(threadIdx.x % 32) < groups_; }
    // The first row of this lane's group, and its number of rows.
    __device__ int start() const { return start_; }
    __device__ int rows() const { return count_; }

    // Goes to the next 32 groups; false if there are none.
    __device__ bool next() {
        first_ += 32;
        if (first_ >= groups_) return false;
        rows_before_ = __shfl_sync(~0u, rows_end_, 31);
        if constexpr (!kByRows) counted_before_ = __shfl_sync(~0u, counted_end_, 31);
        load();
        return true;
    }

  private:
    // A split is cut off at the end of the memory. Sums stay below 2^32, since each of two terms is at most the number
    // of rows.
    __device__ void load() {
        const int lane = threadIdx.x % 32;
        int64_t given = 0;
        if (first_ + lane < groups_) given = splits_ == nullptr ? counted_ : splits_[first_ + lane];
        const auto all = static_cast<uint32_t>(rows_), counted = static_cast<uint32_t>(counted_);
        auto rows = static_cast<uint32_t>(min(max(given, int64_t{0}), static_cast<int64_t>(counted_)));
        if constexpr (!kByRows) {
            // Splits beyond the rows were cut off before the groups were padded.
            uint32_t sum = rows;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const uint32_t other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum = min(sum + other, counted);
            }
            counted_end_ = min(counted_before_ + sum, counted);
            const uint32_t before = __shfl_up_sync(~0u, counted_end_, 1);
            rows = counted_end_ - (lane == 0 ? counted_before_ : before);
        }
        const uint32_t taken = min((rows + align_ - 1) / align_ * align_, all);
        uint32_t sum = taken;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum = min(sum + other, all);
        }
        rows_end_ = min(rows_before_ + sum, all);
        const uint32_t before = __shfl_up_sync(~0u, rows_end_, 1);
        start_ = static_cast<int>(lane == 0 ? rows_before_ : before);
        count_ = min(static_cast<int>(rows), rows_ - start_);
    }

    const int64_t* splits_;
    int groups_, rows_, counted_, align_;
    int first_ = 0;
    uint32_t rows_before_ = 0, rows_end_;
    uint32_t counted_before_ = 0, counted_end_ = 0;
    int start_, count_;
};

}  // namespace te_fast::gemm
