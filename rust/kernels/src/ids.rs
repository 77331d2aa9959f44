//! The identity of every kernel: one `KernelId` per shipped symbol, shared by the launch seam, the host backend
//! and `build.rs`, which compiles this file too and fails the build when an image lacks a symbol.

/// Element type of a high-precision tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Float {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
}

/// Element type of an FP8 tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Fp8 {
    /// 4 exponent bits, 3 mantissa bits, finite only, maximum 448.
    E4m3 = 0,
    /// 5 exponent bits, 2 mantissa bits, maximum 57344.
    E5m2 = 1,
}

/// Element type of a tensor of 16-bit floating-point numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Half {
    /// IEEE binary16.
    F16 = 0,
    /// bfloat16.
    Bf16 = 1,
}

impl Float {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl Fp8 {
    /// Largest finite value.
    #[must_use]
    pub const fn max(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }
}

/// Symbols of one family, in the order of its axes; the last axis varies fastest.
macro_rules! symbols {
    (() $stem:literal) => {
        &[$stem]
    };
    ((Float) $stem:literal) => {
        &[concat!($stem, "_f32"), concat!($stem, "_f16"), concat!($stem, "_bf16")]
    };
    ((Half) $stem:literal) => {
        &[concat!($stem, "_f16"), concat!($stem, "_bf16")]
    };
    ((Fp8) $stem:literal) => {
        &[concat!($stem, "_e4m3"), concat!($stem, "_e5m2")]
    };
    ((Float, Fp8) $stem:literal) => {
        &[
            concat!($stem, "_f32_e4m3"),
            concat!($stem, "_f32_e5m2"),
            concat!($stem, "_f16_e4m3"),
            concat!($stem, "_f16_e5m2"),
            concat!($stem, "_bf16_e4m3"),
            concat!($stem, "_bf16_e5m2"),
        ]
    };
    ((Fp8, Float) $stem:literal) => {
        &[
            concat!($stem, "_e4m3_f32"),
            concat!($stem, "_e4m3_f16"),
            concat!($stem, "_e4m3_bf16"),
            concat!($stem, "_e5m2_f32"),
            concat!($stem, "_e5m2_f16"),
            concat!($stem, "_e5m2_bf16"),
        ]
    };
}

/// Every member of one family, in the order of `symbols!`.
macro_rules! members {
    ($family:ident ()) => {
        [KernelId::$family].as_slice()
    };
    ($family:ident (Float)) => {
        [KernelId::$family(Float::F32), KernelId::$family(Float::F16), KernelId::$family(Float::Bf16)].as_slice()
    };
    ($family:ident (Half)) => {
        [KernelId::$family(Half::F16), KernelId::$family(Half::Bf16)].as_slice()
    };
    ($family:ident (Fp8)) => {
        [KernelId::$family(Fp8::E4m3), KernelId::$family(Fp8::E5m2)].as_slice()
    };
    ($family:ident (Float, Fp8)) => {
        [
            KernelId::$family(Float::F32, Fp8::E4m3),
            KernelId::$family(Float::F32, Fp8::E5m2),
            KernelId::$family(Float::F16, Fp8::E4m3),
            KernelId::$family(Float::F16, Fp8::E5m2),
            KernelId::$family(Float::Bf16, Fp8::E4m3),
            KernelId::$family(Float::Bf16, Fp8::E5m2),
        ]
        .as_slice()
    };
    ($family:ident (Fp8, Float)) => {
        [
            KernelId::$family(Fp8::E4m3, Float::F32),
            KernelId::$family(Fp8::E4m3, Float::F16),
            KernelId::$family(Fp8::E4m3, Float::Bf16),
            KernelId::$family(Fp8::E5m2, Float::F32),
            KernelId::$family(Fp8::E5m2, Float::F16),
            KernelId::$family(Fp8::E5m2, Float::Bf16),
        ]
        .as_slice()
    };
}

/// Position of a member inside its family.
macro_rules! position {
    ($id:expr, $family:ident ()) => {
        match $id {
            KernelId::$family => Some(0),
            _ => None,
        }
    };
    ($id:expr, $family:ident ($axis:ident)) => {
        match $id {
            KernelId::$family(a) => Some(a as usize),
            _ => None,
        }
    };
    ($id:expr, $family:ident (Float, Fp8)) => {
        match $id {
            KernelId::$family(a, b) => Some(a as usize * 2 + b as usize),
            _ => None,
        }
    };
    ($id:expr, $family:ident (Fp8, Float)) => {
        match $id {
            KernelId::$family(a, b) => Some(a as usize * 3 + b as usize),
            _ => None,
        }
    };
}

macro_rules! variant_types {
    ($($(#[$doc:meta])* $family:ident $axes:tt $stem:literal in $image:ident;)*) => {
        kernel_enum! { @build [] $($(#[$doc])* $family $axes;)* }
    };
}

macro_rules! kernel_enum {
    (@build [$($done:tt)*]) => {
        /// One precompiled kernel; the symbol of the same name in its image.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(clippy::enum_variant_names, reason = "families of one op share a stem")]
        pub enum KernelId { $($done)* }
    };
    (@build [$($done:tt)*] $(#[$doc:meta])* $family:ident (); $($rest:tt)*) => {
        kernel_enum! { @build [$($done)* $(#[$doc])* $family,] $($rest)* }
    };
    (@build [$($done:tt)*] $(#[$doc:meta])* $family:ident ($($axis:ident),+); $($rest:tt)*) => {
        kernel_enum! { @build [$($done)* $(#[$doc])* $family($($axis),+),] $($rest)* }
    };
}

macro_rules! kernels {
    ($($(#[$doc:meta])* $family:ident $axes:tt $stem:literal in $image:ident;)*) => {
        variant_types! { $($(#[$doc])* $family $axes $stem in $image;)* }

        #[repr(usize)]
        #[derive(Clone, Copy)]
        enum Family { $($family,)* }

        const FAMILIES: usize = [$(Family::$family),*].len();
        const SYMBOLS: [&[&str]; FAMILIES] = [$(symbols!($axes $stem)),*];
        const IMAGES: [Image; FAMILIES] = [$(Image::$image),*];

        impl KernelId {
            const fn place(self) -> (usize, usize) {
                $(if let Some(position) = position!(self, $family $axes) {
                    return (Family::$family as usize, position);
                })*
                (0, 0)
            }

            /// Every kernel, in the order of [`KernelId::index`].
            pub fn all() -> impl Iterator<Item = KernelId> {
                [$(members!($family $axes)),*].into_iter().flatten().copied()
            }
        }
    };
}

macro_rules! images {
    ($($image:ident = $file:literal),* $(,)?) => {
        /// One compiled `cuda/<family>/<file>.cu`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(usize)]
        pub enum Image {
            $(#[doc = concat!("`cuda/", $file, ".cu`")] $image,)*
        }

        impl Image {
            /// Every image, in the order of their discriminants.
            pub const ALL: &'static [Image] = &[$(Image::$image),*];

            /// Whether it is machine code of 9.0 alone, with the instructions that only Hopper has (`sm_90a`).
            #[must_use]
            pub const fn is_hopper_only(self) -> bool {
                matches!(
                    self,
                    Self::GroupedFp8
                        | Self::Grouped16bit
                        | Self::ActivationGroups
                        | Self::ActivationGroupsBackward
                )
            }

            /// File under `cuda/`, without its extension.
            #[must_use]
            pub const fn path(self) -> &'static str {
                match self { $(Self::$image => $file),* }
            }
        }
    };
}

images! {
    Cast = "quantize/cast",
    CastTranspose = "quantize/cast_transpose",
    CastBlock = "quantize/cast_block",
    CastGroups = "quantize/cast_groups",
    CastMany = "quantize/cast_many",
    CastCurrent = "quantize/cast_current",
    SumGroups = "quantize/sum_groups",
    Amax = "quantize/amax",
    ScaleUpdate = "quantize/scale_update",
    Dequantize = "quantize/dequantize",
    Transpose = "quantize/transpose",
    Affine = "quantize/affine",
    Handover = "quantize/handover",
    PermuteMap = "moe/permute_map",
    Permute = "moe/permute",
    PermuteScales = "moe/permute_scales",
    PermuteCast = "moe/permute_cast",
    PermuteMerge = "moe/permute_merge",
    Router = "moe/router",
    Pad = "moe/pad",
    Activation = "activation/activation",
    ActivationBackward = "activation/activation_backward",
    ActivationGroups = "activation/activation_groups",
    ActivationGroupsBackward = "activation/activation_groups_backward",
    Norm = "norm/norm",
    NormShort = "norm/norm_short",
    NormBackward = "norm/norm_backward",
    NormBackwardLong = "norm/norm_backward_long",
    GroupedFp8 = "gemm/grouped_fp8",
    Grouped16bit = "gemm/grouped_16bit",
    GroupedTables = "gemm/grouped_tables",
    Rope = "attention/rope",
    CrossEntropy = "loss/cross_entropy",
}

kernels! {
    /// Scaled cast to FP8, row layout.
    Cast(Float, Fp8) "cast" in Cast;
    /// Scaled cast to FP8 in row layout, transposed layout or both.
    CastTranspose(Float, Fp8) "cast_transpose" in CastTranspose;
    /// The same with the column sums of the input; also the sums alone.
    CastTransposeDbias(Float, Fp8) "cast_transpose_dbias" in CastTranspose;
    /// Block-scaled cast, 1 x 128.
    CastBlock1d(Float, Fp8) "cast_block_1d" in CastBlock;
    /// Block-scaled cast, 128 x 128.
    CastBlock2d(Float, Fp8) "cast_block_2d" in CastBlock;
    /// Converts block scales from bytes to floats.
    UnpackScales() "unpack_block_scales" in CastBlock;
    /// Parts of the largest magnitudes of groups of rows.
    AmaxGroups(Float) "amax_groups" in CastGroups;
    /// Maxima of the rows that groups gather.
    AmaxTokens(Float) "amax_tokens" in CastGroups;
    /// Scaled casts of groups of rows, one scale each.
    CastGroups(Float, Fp8) "cast_groups" in CastGroups;
    /// Block-scaled casts of counted groups of rows, 1 x 128.
    CastBlockGroups1d(Float, Fp8) "cast_block_groups_1d" in CastGroups;
    /// Block-scaled casts of equal groups of rows, 128 x 128.
    CastBlockGroups2d(Float, Fp8) "cast_block_groups_2d" in CastGroups;
    /// Scaled casts of many tensors.
    CastMany(Float, Fp8) "cast_many" in CastMany;
    /// Block-scaled casts of many tensors, 128 x 128.
    CastBlockMany(Float, Fp8) "cast_block_many" in CastMany;
    /// Scaled casts to E4M3 of many float32 tensors, rounded first.
    CastManyRounded(Half) "cast_many_rounded" in CastMany;
    /// Block-scaled casts to E4M3 of the same, 128 x 128.
    CastBlockManyRounded(Half) "cast_block_many_rounded" in CastMany;
    /// Cast of a tensor by the scale that follows from its largest magnitude.
    CastCurrent(Float, Fp8) "cast_current" in CastCurrent;
    /// The same of many tensors.
    CastCurrentMany(Float, Fp8) "cast_current_many" in CastCurrent;
    /// The same to E4M3 of float32 tensors, rounded first.
    CastCurrentManyRounded(Half) "cast_current_many_rounded" in CastCurrent;
    /// Sums of the rows of groups.
    SumGroups(Float) "sum_groups" in SumGroups;
    /// Largest magnitude of a tensor and the scale that follows from it.
    Amax(Float) "amax" in Amax;
    /// The scale of an amax that was reduced over ranks.
    ScaleFromAmax() "scale_from_amax" in Amax;
    /// Delayed scaling's update, many entries in one launch.
    ScaleUpdate() "scale_update" in ScaleUpdate;
    /// The same with a small parameter struct.
    ScaleUpdateFew() "scale_update_few" in ScaleUpdate;
    /// Gathers live maxima of many entries.
    AmaxGather() "amax_gather" in ScaleUpdate;
    /// The same with a small parameter struct.
    AmaxGatherFew() "amax_gather_few" in ScaleUpdate;
    /// FP8 to high precision under one scale.
    Dequantize(Fp8, Float) "dequantize" in Dequantize;
    /// FP8 to high precision, 1 x 128 scales.
    Dequantize1d(Fp8, Float) "dequantize_1d" in Dequantize;
    /// FP8 to high precision, 128 x 128 scales.
    Dequantize2d(Fp8, Float) "dequantize_2d" in Dequantize;
    /// The column layout of FP8 bytes.
    Transpose() "transpose_fp8" in Transpose;
    /// Scaling, addition and conversion.
    Affine(Float) "affine" in Affine;
    /// Scales of FP8 values that go from GEMM to GEMM.
    Handover() "handover" in Handover;
    /// Row map of an MoE permutation by itself.
    PermuteMap() "permute_map" in PermuteMap;
    /// Ends of the experts' rows, from a finished map.
    PermuteEnds() "permute_ends" in PermuteMerge;
    /// Count of dropped rows.
    PermuteDropped() "permute_dropped" in PermuteMap;
    /// MoE permutation of rows.
    PermuteFwd() "permute_fwd" in Permute;
    /// Block scales of permuted rows, by the rows' numbers.
    PermuteScales() "permute_scales" in PermuteScales;
    /// MoE permutation of rows into FP8.
    PermuteCast(Float, Fp8) "permute_cast" in PermuteCast;
    /// Gathers and sums permuted rows.
    UnpermuteFwd(Float) "unpermute_fwd" in PermuteMerge;
    /// The gradient of an unpermutation with probabilities.
    UnpermuteBwd(Float) "unpermute_bwd" in PermuteMerge;
    /// Scores, choice and probabilities of a router.
    RouterFwd(Float) "router_fwd" in Router;
    /// The same, and a histogram of the biases that experts lack.
    RouterBalanced(Float) "router_balanced_fwd" in Router;
    /// Gradient of its logits.
    RouterBwd(Float) "router_bwd" in Router;
    /// Losses of rows of logits, or the parts that ranks join.
    CrossEntropy(Float) "cross_entropy" in CrossEntropy;
    /// Gradient of the logits.
    CrossEntropyBwd(Float) "cross_entropy_bwd" in CrossEntropy;
    /// Rows moved in segments: padding, unpadding, chunk sorting.
    PadRows() "pad_rows" in Pad;
    /// Activation function, with or without a cast to FP8.
    Activation(Float) "activation" in Activation;
    /// The same of two halves.
    ActivationGated(Float) "activation_gated" in Activation;
    /// Gradient of an activation function, with or without a cast to FP8, column sums and row sums.
    ActivationBackward(Float) "activation_backward" in ActivationBackward;
    /// The same of two halves.
    ActivationGatedBackward(Float) "activation_gated_backward" in ActivationBackward;
    /// Gated activation of groups of rows of bf16 and their casts, one scale each.
    ActivationCastGroups(Fp8) "activation_cast_groups" in ActivationGroups;
    /// The same with 1 x 128 blocks.
    ActivationCastBlockGroups(Fp8) "activation_cast_block_groups" in ActivationGroups;
    /// Gradient of a gated activation of groups of rows of bf16 and its casts, one scale each.
    ActivationBackwardCastGroups(Fp8) "activation_backward_cast_groups" in ActivationGroupsBackward;
    /// The same with 1 x 128 blocks.
    ActivationBackwardCastBlockGroups(Fp8) "activation_backward_cast_block_groups" in ActivationGroupsBackward;
    /// Normalisation of rows that registers hold.
    Norm(Float) "norm" in Norm;
    /// The same with FP8 in the transposed layout.
    NormTranspose(Float) "norm_transpose" in Norm;
    /// Normalisation of rows of any length.
    NormLong(Float) "norm_long" in Norm;
    /// Normalisation of rows of which a warp has several.
    NormShort(Float) "norm_short" in NormShort;
    /// The same with FP8 in the transposed layout.
    NormShortTranspose(Float) "norm_short_transpose" in NormShort;
    /// Gradient of a norm for rows that a block holds.
    NormBackward(Float) "norm_backward" in NormBackward;
    /// The same for rows of which a thread has more columns.
    NormBackwardWide(Float) "norm_backward_wide" in NormBackward;
    /// The same for either, without 16-byte accesses.
    NormBackwardElements(Float) "norm_backward_elements" in NormBackward;
    /// The same for rows that the blocks of a cluster hold together.
    NormBackwardCluster(Float) "norm_backward_cluster" in NormBackward;
    /// The same without 16-byte accesses.
    NormBackwardClusterElements(Float) "norm_backward_cluster_elements" in NormBackward;
    /// Sums over rows that the gradient of a norm needs.
    NormBackwardSums(Float) "norm_backward_sums" in NormBackwardLong;
    /// The gradient of a norm from these sums.
    NormBackwardTiles(Float) "norm_backward_tiles" in NormBackwardLong;
    /// FP8 products of groups of rows, sums in the tensor cores.
    GroupedRowsFast(Fp8) "grouped_rows_fast" in GroupedFp8;
    /// The same, sums of every 128 in FP32.
    GroupedRowsSplit(Fp8) "grouped_rows_split" in GroupedFp8;
    /// The same under block scales.
    GroupedRowsBlock(Fp8) "grouped_rows_block" in GroupedFp8;
    /// FP8 weight gradients of groups, sums in the tensor cores.
    GroupedWgradFast(Fp8) "grouped_wgrad_fast" in GroupedFp8;
    /// The same, sums of every 128 in FP32.
    GroupedWgradSplit(Fp8) "grouped_wgrad_split" in GroupedFp8;
    /// The same under block scales.
    GroupedWgradBlock(Fp8) "grouped_wgrad_block" in GroupedFp8;
    /// `GroupedWgradSplit` of wider tiles, stored and never added to the result.
    GroupedWgradStoredSplit(Fp8) "grouped_wgrad_stored_split" in GroupedFp8;
    /// The same of `GroupedWgradBlock`.
    GroupedWgradStoredBlock(Fp8) "grouped_wgrad_stored_block" in GroupedFp8;
    /// Products of groups of rows of 16-bit elements.
    GroupedRows(Half) "grouped_rows" in Grouped16bit;
    /// The same with the second operand's lines across the summed dimension.
    GroupedRowsAcross(Half) "grouped_rows_across" in Grouped16bit;
    /// Weight gradients of groups, of 16-bit elements.
    GroupedWgrad(Half) "grouped_wgrad" in Grouped16bit;
    /// The same of wider tiles, stored and never added to the result.
    GroupedWgradStored(Half) "grouped_wgrad_stored" in Grouped16bit;
    /// Sizes and addresses of the groups of a product.
    GroupedTables() "grouped_tables" in GroupedTables;
    /// Rotary position embeddings of up to three tensors of heads.
    Rotate(Float) "rotate" in Rope;
}

const BASES: [usize; FAMILIES] = {
    let mut bases = [0; FAMILIES];
    let mut family = 1;
    while family < FAMILIES {
        bases[family] = bases[family - 1] + SYMBOLS[family - 1].len();
        family += 1;
    }
    bases
};

impl KernelId {
    /// Number of kernels.
    pub const COUNT: usize = BASES[FAMILIES - 1] + SYMBOLS[FAMILIES - 1].len();

    /// Dense index, for tables.
    #[must_use]
    pub const fn index(self) -> usize {
        let (family, position) = self.place();
        BASES[family] + position
    }

    /// Symbol in the image.
    #[must_use]
    pub const fn symbol(self) -> &'static str {
        let (family, position) = self.place();
        SYMBOLS[family][position]
    }

    /// Image that holds the symbol.
    #[must_use]
    pub const fn image(self) -> Image {
        IMAGES[self.place().0]
    }

    /// Whether the kernel waits by `ptx::wait_for_prior_grids()` before it touches memory, so that it may be launched before the
    /// grids ahead of it have finished.
    #[must_use]
    pub const fn waits_for_prior_grids(self) -> bool {
        matches!(
            self.image(),
            Image::Cast
                | Image::CastTranspose
                | Image::CastBlock
                | Image::CastGroups
                | Image::CastMany
                | Image::CastCurrent
                | Image::SumGroups
                | Image::Amax
                | Image::Dequantize
                | Image::Transpose
                | Image::Affine
                | Image::Handover
                | Image::PermuteMap
                | Image::Permute
                | Image::PermuteScales
                | Image::PermuteCast
                | Image::PermuteMerge
                | Image::Router
                | Image::Pad
                | Image::Activation
                | Image::ActivationBackward
                | Image::ActivationGroups
                | Image::ActivationGroupsBackward
                | Image::Norm
                | Image::NormShort
                | Image::NormBackward
                | Image::NormBackwardLong
                | Image::GroupedFp8
                | Image::Grouped16bit
                | Image::GroupedTables
                | Image::Rope
        )
    }
}
