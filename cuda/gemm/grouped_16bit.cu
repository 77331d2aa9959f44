// Products of groups of rows of 16-bit operands (gemm/grouped.cuh): by rows, by rows of a second operand whose lines
// lie across the summed dimension (the input's gradient reads the weights as they are), and weight gradients, whose
// operands both lie so.
//
// Launch: one block per multiprocessor, in clusters of one or two, 384 threads, kGroupedShared bytes of shared memory.
// Needs:  16-byte aligned operands with lines of a multiple of 16 bytes; D's lines, too.
// Moves:  A once for every two tiles of columns, B once for every eight tiles of rows, D once.

#include "gemm/grouped.cuh"

namespace te_fast::gemm {

#define INSTANCE(symbol, element, by_rows, across_a, across_b, columns)                                                \
    extern "C" __global__ void __launch_bounds__(kGroupedThreads, 1) symbol(const __grid_constant__ GroupedParams p) { \
        grouped<Kind<Element::element, Element::element, Sums::kFast, by_rows, across_a, across_b, columns>>(p);       \
    }

INSTANCE(grouped_rows_bf16, kBf16, true, false, false, kGroupedColumns)
INSTANCE(grouped_rows_f16, kF16, true, false, false, kGroupedColumns)
INSTANCE(grouped_rows_across_bf16, kBf16, true, false, true, kGroupedColumns)
INSTANCE(grouped_rows_across_f16, kF16, true, false, true, kGroupedColumns)
INSTANCE(grouped_wgrad_bf16, kBf16, false, true, true, kGroupedColumnsWgrad)
INSTANCE(grouped_wgrad_f16, kF16, false, true, true, kGroupedColumnsWgrad)
INSTANCE(grouped_wgrad_stored_bf16, kBf16, false, true, true, kGroupedColumns)
INSTANCE(grouped_wgrad_stored_f16, kF16, false, true, true, kGroupedColumns)

}  // namespace te_fast::gemm
