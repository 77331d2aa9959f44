// FP8 products of groups of rows (gemm/grouped.cuh): by rows, and weight gradients whose operands have the rows
// innermost. Sums: `fast` and `split` under one scale per group and operand, `block` under 1 x 128 scales of A, and 128
// x 128 of B (by rows) or 1 x 128.
//
// Launch: one block per multiprocessor, in clusters of one or two, 384 threads, kGroupedShared bytes of shared memory.
// Needs:  16-byte aligned operands with lines of a multiple of 16 bytes; D's lines, too. Weight gradients: groups at
//         multiples of 128, zeros between them.
// Moves:  A once for every two tiles of columns, B once for every eight tiles of rows, D once.

#include "gemm/grouped.cuh"

namespace te_fast::gemm {

#define INSTANCE(symbol, a, sums, by_rows, columns)                                                                    \
    extern "C" __global__ void __launch_bounds__(kGroupedThreads, 1) symbol(const __grid_constant__ GroupedParams p) { \
        grouped<Kind<Element::a, Element::kE4m3, Sums::sums, by_rows, false, false, columns>>(p);                      \
    }

INSTANCE(grouped_rows_fast_e4m3, kE4m3, kFast, true, kGroupedColumns)
INSTANCE(grouped_rows_fast_e5m2, kE5m2, kFast, true, kGroupedColumns)
INSTANCE(grouped_rows_split_e4m3, kE4m3, kSplit, true, kGroupedColumns)
INSTANCE(grouped_rows_split_e5m2, kE5m2, kSplit, true, kGroupedColumns)
INSTANCE(grouped_rows_block_e4m3, kE4m3, kBlock, true, kGroupedColumns)
INSTANCE(grouped_rows_block_e5m2, kE5m2, kBlock, true, kGroupedColumns)
INSTANCE(grouped_wgrad_fast_e4m3, kE4m3, kFast, false, kGroupedColumnsWgradFast)
INSTANCE(grouped_wgrad_fast_e5m2, kE5m2, kFast, false, kGroupedColumnsWgradFast)
INSTANCE(grouped_wgrad_split_e4m3, kE4m3, kSplit, false, kGroupedColumnsWgrad)
INSTANCE(grouped_wgrad_split_e5m2, kE5m2, kSplit, false, kGroupedColumnsWgrad)
INSTANCE(grouped_wgrad_block_e4m3, kE4m3, kBlock, false, kGroupedColumnsWgrad)
INSTANCE(grouped_wgrad_block_e5m2, kE5m2, kBlock, false, kGroupedColumnsWgrad)
INSTANCE(grouped_wgrad_stored_split_e4m3, kE4m3, kSplit, false, kGroupedColumns)
INSTANCE(grouped_wgrad_stored_split_e5m2, kE5m2, kSplit, false, kGroupedColumns)
INSTANCE(grouped_wgrad_stored_block_e4m3, kE4m3, kBlock, false, kGroupedColumns)
INSTANCE(grouped_wgrad_stored_block_e5m2, kE5m2, kBlock, false, kGroupedColumns)

}  // namespace te_fast::gemm
