//! Numbers that a kernel and the code that launches it must agree on. Rust takes them from here; `build.rs` writes them
//! into `common/constants.cuh`, which the kernels include: `norm::MAX_STRIP` is `te_fast::norm::kMaxStrip` there. So
//! each number stands in one place.

use super::ids::Float;

/// Constants of one namespace: its name, and the names and values in it.
pub type Namespace = (&'static str, &'static [(&'static str, u64)]);

macro_rules! constants {
    ($(
        $(#[$namespace_doc:meta])*
        $namespace:ident { $($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)* }
    )*) => {
        $(
            $(#[$namespace_doc])*
            pub mod $namespace {
                #[allow(unused_imports, reason = "some values are made of others")]
                use super::*;
                $($(#[$doc])* pub const $name: $type = $value;)*
            }
        )*

        /// All of them, for `build.rs`.
        pub const NAMESPACES: &[Namespace] =
            &[$((stringify!($namespace), &[$((stringify!($name), $namespace::$name as u64)),*])),*];
    };
}

constants! {
    /// Constants of all families.
    common {
        /// Threads of a warp.
        WARP: u32 = 32;
        /// Elements that a thread loads or stores at a time.
        VECTOR: usize = 8;
        /// Code of a tensor of f32 whose type is known at run time.
        FLOAT_F32: u32 = Float::F32 as u32;
        /// The same of f16.
        FLOAT_F16: u32 = Float::F16 as u32;
        /// The same of bf16.
        FLOAT_BF16: u32 = Float::Bf16 as u32;
    }

    /// The tile that casts with a transposed layout and activations work in.
    tile {
        /// Rows and columns of it; also the side of a scaling block.
        TILE: usize = 128;
        /// Threads of the block that works in it.
        TILE_THREADS: u32 = 256;
        /// Rows of a transposed layout are padded to this multiple, as FP8 GEMMs need.
        TRANSPOSED_ALIGN: usize = 16;
        /// Lengths of strips in a column of tiles.
        STRIP_LEVELS: usize = 3;
    }

    /// Casts, scales, dequantisation.
    quantize {
        /// Threads of a block, but for those below.
        THREADS: u32 = 256;
        /// Elements that a block takes at a time, of kernels that see no rows.
        SPAN: usize = 8192;
        /// Bytes that the blocks of an amax exchange.
        AMAX_WORKSPACE_BYTES: usize = 8;
        /// Dynamic shared memory of a cast with a transposed layout.
        CAST_TRANSPOSE_SHARED: u32 = 48 << 10;
        /// Blocks of it that one multiprocessor of a Hopper runs at once, where columns are summed.
        SUMMING_BLOCKS: u32 = 3;
        /// An inverse block scale of zero as a byte; others are biased exponents.
        ZERO_SCALE_BYTE: u8 = 255;
        /// Largest number of entries of a `scale_update` or `amax_gather`, limited by the size of kernel parameters.
        MANY_ENTRIES: usize = 1020;
        /// The same with parameters that cost the host almost nothing.
        FEW_ENTRIES: usize = 62;
        /// Largest number of tensors of a `cast_many`, limited by the size of kernel parameters.
        MANY_TENSORS: usize = 544;
        /// Bytes that the blocks of a tensor exchange in a `cast_current`.
        CURRENT_WORKSPACE_BYTES: usize = 32;
        /// The most tiles that a block of it keeps.
        CURRENT_SLOTS: usize = 3;
        /// Blocks of a multiprocessor that the registers of a cast of a tile are capped for, of 16-bit tensors: the most
        /// without a spill, on a Hopper, before Ada, and elsewhere.
        BLOCKS_HOPPER: u32 = 4;
        /// See [`BLOCKS_HOPPER`].
        BLOCKS_EARLY: u32 = 2;
        /// See [`BLOCKS_HOPPER`].
        BLOCKS_ELSEWHERE: u32 = 3;
        /// The same of f32.
        BLOCKS_F32: u32 = 2;
        /// The same of a `cast_current_many`.
        BLOCKS_CURRENT_MANY: u32 = 2;
        /// Size of `CastCurrentParams`.
        CAST_CURRENT_PARAMS_BYTES: usize = 96;
        /// Scales of 128 x 128 blocks are padded to a multiple of this.
        SCALE_ALIGN: usize = 4;
        /// Size of `CastManyParams`.
        CAST_MANY_PARAMS_BYTES: usize = 32 + (4 + 56) * MANY_TENSORS;
        /// Entries of a `handover`.
        HANDOVER_ENTRIES: usize = 32;
        /// Size of `ScaleUpdateFewParams`.
        SCALE_UPDATE_FEW_PARAMS_BYTES: usize = 16 + 32 * FEW_ENTRIES;
        /// Size of `ScaleUpdateParams`.
        SCALE_UPDATE_PARAMS_BYTES: usize = 16 + 32 * MANY_ENTRIES;
        /// Size of `AmaxGatherFewParams`.
        AMAX_GATHER_FEW_PARAMS_BYTES: usize = 16 + 16 * FEW_ENTRIES;
        /// Size of `AmaxGatherParams`.
        AMAX_GATHER_PARAMS_BYTES: usize = 16 + 16 * MANY_ENTRIES;
        /// Size of `AffineParams`.
        AFFINE_PARAMS_BYTES: usize = 64;
        /// Size of `CastParams`.
        CAST_PARAMS_BYTES: usize = 64;
        /// Size of `CastBlockParams`.
        CAST_BLOCK_PARAMS_BYTES: usize = 136;
        /// Size of `UnpackScalesParams`.
        UNPACK_SCALES_PARAMS_BYTES: usize = 24;
        /// Size of `CastGroupsParams`.
        CAST_GROUPS_PARAMS_BYTES: usize = 184;
        /// Columns that a block of a `sum_groups` has.
        SUM_GROUPS_COLS: usize = common::WARP as usize * common::VECTOR;
        /// Rows that it adds to different sums.
        SUM_GROUPS_LANES: usize = 8;
        /// Size of `SumGroupsParams`.
        SUM_GROUPS_PARAMS_BYTES: usize = 64;
        /// Size of `AmaxParams`.
        AMAX_PARAMS_BYTES: usize = 72;
        /// Size of `ScaleFromAmaxParams`.
        SCALE_FROM_AMAX_PARAMS_BYTES: usize = 40;
        /// Size of `DequantizeParams`.
        DEQUANTIZE_PARAMS_BYTES: usize = 56;
        /// Size of `TransposeParams`.
        TRANSPOSE_PARAMS_BYTES: usize = 72;
        /// Size of `CastTransposeParams`.
        CAST_TRANSPOSE_PARAMS_BYTES: usize = 144;
        /// Size of `HandoverParams`.
        HANDOVER_PARAMS_BYTES: usize = 8 + 32 * HANDOVER_ENTRIES;
    }

    /// Matrix products of groups of rows.
    gemm {
        /// Threads of a block: a warpgroup that moves tiles, two that multiply.
        GROUPED_THREADS: u32 = 384;
        /// Dynamic shared memory of a block: all that there is.
        GROUPED_SHARED: u32 = 227 << 10;
        /// Columns of a tile of products by rows, and of weight gradients that are stored.
        GROUPED_COLUMNS: usize = 256;
        /// The same of weight gradients that may be added to the result.
        GROUPED_COLUMNS_WGRAD: usize = 128;
        /// The same of FP8 weight gradients whose sums stay in the tensor cores.
        GROUPED_COLUMNS_WGRAD_FAST: usize = 192;
        /// Size of `GroupedParams`.
        GROUPED_PARAMS_BYTES: usize = 768;
        /// Arrays of addresses in a table of groups: A, B, D, and the scales of A and B.
        GROUPED_ADDRESSES: usize = 5;
        /// Arrays of sizes behind these: rows, n, k, and the pitch of operands with the rows innermost.
        GROUPED_SIZES: usize = 4;
        /// Size of `GroupedTablesParams`.
        GROUPED_TABLES_PARAMS_BYTES: usize = 144;
    }

    /// Activation functions.
    activation {
        /// Dynamic shared memory of the forward.
        SHARED: u32 = 48 << 10;
        /// Of the gradient.
        BACKWARD_SHARED: u32 = 48 << 10;
        /// Of the gradient of a gated one, of 16-bit elements.
        GATED_BACKWARD_SHARED: u32 = 56 << 10;
        /// The same of f32.
        GATED_BACKWARD_SHARED_F32: u32 = 80 << 10;
        /// Of both directions of rows that belong to groups: a tile of the two halves.
        GROUPS_SHARED: u32 = 64 << 10;
        /// Blocks of the gradient that one multiprocessor of a Hopper runs at once.
        BACKWARD_BLOCKS: u32 = 4;
        /// The same of a gated one of bf16.
        GATED_BACKWARD_BLOCKS_BF16: u32 = 3;
        /// The same of the other types.
        GATED_BACKWARD_BLOCKS: u32 = 2;
        /// Numbers of the curves.
        CURVE_GELU: u32 = 0;
        /// `g * sigmoid(alpha g)`.
        CURVE_SWISH: u32 = 1;
        /// The same with clamps and an offset.
        CURVE_CLAMPED: u32 = 2;
        /// `max(g, 0)`.
        CURVE_RELU: u32 = 3;
        /// `max(g, 0)^2`.
        CURVE_SQUARED_RELU: u32 = 4;
        /// `sigmoid(g)`.
        CURVE_SIGMOID: u32 = 5;
        /// Bounded swish.
        CURVE_SITU: u32 = 6;
        /// Size of `ActivationBackwardParams`.
        ACTIVATION_BACKWARD_PARAMS_BYTES: usize = 240;
        /// Size of `ActivationGroupsParams`.
        ACTIVATION_GROUPS_PARAMS_BYTES: usize = 256;
        /// Size of `ActivationParams`.
        ACTIVATION_PARAMS_BYTES: usize = 200;
    }

    /// Norms.
    norm {
        /// The most threads of a block of a forward norm.
        THREADS: u32 = 512;
        /// Bytes of its team's rows that a thread of it holds.
        HELD_BYTES: usize = 128;
        /// Columns of a thread, with the transposed layout.
        TRANSPOSED_COLUMNS: usize = 16;
        /// Multiple of the columns of a block.
        CHUNK: usize = 128;
        /// Rows of a block at a time that static shared memory has room for.
        MAX_STRIP: u32 = 64;
        /// The most blocks of a cluster, forward and backward.
        MAX_BLOCKS: u32 = 8;
        /// Threads of a block that has several rows a warp.
        SHORT_THREADS: u32 = 128;
        /// Bytes of these rows that a thread holds.
        SHORT_BYTES: usize = 64;
        /// Blocks of them that a multiprocessor of a Hopper runs at once.
        SHORT_BLOCKS: u32 = 8;
        /// The same with the transposed layout.
        SHORT_TRANSPOSE_BLOCKS: u32 = 6;
        /// Threads of a block of a gradient that holds rows, and of one that sums them.
        BACKWARD_THREADS: u32 = 512;
        /// Groups of eight columns that a thread of it has, where rows are short.
        FEW_SLOTS: usize = 2;
        /// The same where rows are long.
        MANY_SLOTS: usize = 3;
        /// The most stages of the ring that its rows come through.
        MAX_STAGES: usize = 8;
        /// Threads of a block that has a tile of a gradient.
        TILE_THREADS: u32 = 256;
        /// Columns of the tile.
        TILE_COLS: usize = 128;
        /// Rows that it passes over at a time.
        TILE_STEP: usize = 16;
        /// Size of `NormParams`.
        NORM_PARAMS_BYTES: usize = 200;
        /// Size of `NormBackwardParams`.
        NORM_BACKWARD_PARAMS_BYTES: usize = 128;
    }

    /// Rotary position embeddings.
    attention {
        /// Threads of a block.
        ROTATE_THREADS: u32 = 256;
        /// Heads that a thread rotates by the same cosines and sines.
        ROTATE_HEADS: u32 = 8;
        /// Tensors of heads in one launch.
        ROTATE_PARTS: usize = 3;
        /// Size of `RotateParams`.
        ROTATE_PARAMS_BYTES: usize = 128 + 96 * ROTATE_PARTS;
    }

    /// Losses.
    loss {
        /// Threads of a block, which has a row of logits.
        ROW_THREADS: u32 = 512;
        /// Size of `CrossEntropyParams`.
        CROSS_ENTROPY_PARAMS_BYTES: usize = 64;
        /// Size of `CrossEntropyBwdParams`.
        CROSS_ENTROPY_BWD_PARAMS_BYTES: usize = 88;
    }

    /// Permutations of rows.
    moe {
        /// The most experts, and slots of a token.
        MAX_EXPERTS: usize = 1024;
        /// Threads of a block that has one token.
        ROW_THREADS: u32 = 128;
        /// Threads of a block of a map by itself.
        MAP_THREADS: u32 = 256;
        /// Threads of a block that looks for the ends of the experts' rows.
        ENDS_THREADS: u32 = 512;
        /// The most tiles of a map: 32 experts of a chunk of tokens each.
        MAX_TILES: usize = 512;
        /// Groups of 32 tokens whose bits a block of a map keeps in shared memory.
        MAP_GROUPS: usize = 64;
        /// The same of a map in front of rows.
        LEADING_MAP_GROUPS: usize = 16;
        /// Bytes of counters by which the blocks of a launch that makes a map synchronise.
        STATE_BYTES: usize = 128;
        /// Bytes of a word of the memory that a map's blocks fill with ones.
        FILL_WORD: usize = 16;
        /// Elements of one FP8 store.
        CAST_CHUNK: usize = 16;
        /// Rows whose scales a warp puts in their places at once.
        PIECE_ROWS: usize = common::WARP as usize;
        /// Scales of each of these rows.
        PIECE_SCALES: usize = 8;
        /// The number of no token, for a row of zeros.
        ZERO_ROW: u32 = 0xffff_fffe;
        /// Splits that travel by value.
        INLINE_SPLITS: usize = 1024;
        /// Threads of a block that moves rows in segments, a warp each.
        PAD_THREADS: u32 = 256;
        /// Codes of these moves.
        MOVE_PAD: u32 = 0;
        /// The reverse.
        MOVE_UNPAD: u32 = 1;
        /// Chunks sorted.
        MOVE_SORT: u32 = 2;
        /// The reverse.
        MOVE_UNSORT: u32 = 3;
        /// Codes of the types of probabilities.
        PROB_F32: u32 = 0;
        /// IEEE binary16.
        PROB_F16: u32 = 1;
        /// bfloat16.
        PROB_BF16: u32 = 2;
        /// IEEE binary64.
        PROB_F64: u32 = 3;
        /// Codes of routing maps: a mask of bytes.
        ROUTING_MASK8: u32 = 0;
        /// A mask of 32-bit integers.
        ROUTING_MASK32: u32 = 1;
        /// A mask of 64-bit integers.
        ROUTING_MASK64: u32 = 2;
        /// Experts' numbers.
        ROUTING_INDEX: u32 = 3;
        /// Codes of scores: softmax.
        SCORE_SOFTMAX: u32 = 0;
        /// Sigmoid.
        SCORE_SIGMOID: u32 = 1;
        /// The root of softplus.
        SCORE_SQRTSOFTPLUS: u32 = 2;
        /// Codes of the experts that a router normalises: the chosen experts.
        OVER_CHOSEN: u32 = 0;
        /// All experts, before the choice.
        OVER_BEFORE: u32 = 1;
        /// All experts, for a balancing loss.
        OVER_ALL: u32 = 2;
        /// Size of `RouterParams`.
        ROUTER_PARAMS_BYTES: usize = 96;
        /// Size of `RouterBalancedParams`.
        ROUTER_BALANCED_PARAMS_BYTES: usize = 120;
        /// Size of `RouterBwdParams`.
        ROUTER_BWD_PARAMS_BYTES: usize = 64;
        /// Size of `UnpermuteParams`.
        UNPERMUTE_PARAMS_BYTES: usize = 112;
        /// Size of `UnpermuteBwdParams`.
        UNPERMUTE_BWD_PARAMS_BYTES: usize = 112;
        /// Size of `PermuteEndsParams`.
        PERMUTE_ENDS_PARAMS_BYTES: usize = 32;
        /// Size of `PermuteCastParams`.
        PERMUTE_CAST_PARAMS_BYTES: usize = 288;
        /// Size of `PermuteParams`.
        PERMUTE_PARAMS_BYTES: usize = 240;
        /// Threads of a block that gathers scales.
        SCALE_THREADS: u32 = 512;
        /// Rows whose scales one of its threads gathers at once.
        SCALE_ROWS: usize = 8;
        /// Lines of scales that a block gathers.
        SCALE_LINES: usize = 2;
        /// Size of `PermuteScalesParams`.
        PERMUTE_SCALES_PARAMS_BYTES: usize = 56;
        /// Size of `PermuteDroppedParams`.
        PERMUTE_DROPPED_PARAMS_BYTES: usize = 24;
        /// Size of `PadRowsParams`.
        PAD_ROWS_PARAMS_BYTES: usize = 104 + 4 * INLINE_SPLITS;
        /// Size of `RowMap`.
        ROW_MAP_BYTES: usize = 56;
        /// Size of `MakeMapParams`.
        MAKE_MAP_PARAMS_BYTES: usize = 128;
    }
}
