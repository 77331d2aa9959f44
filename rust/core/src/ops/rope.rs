//! Rotary position embeddings: rotate heads by the angles of their rows, up to three tensors of heads in one launch.

use te_fast_kernels::constants::attention::{ROTATE_HEADS, ROTATE_PARAMS_BYTES, ROTATE_PARTS, ROTATE_THREADS};
use te_fast_kernels::constants::common::VECTOR;
use te_fast_kernels::{Float, KernelId};

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::base::tensor::TensorView;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::{params, pointers};

const OP: &str = "rotate";
/// Alignment of vectors of elements and of their addresses, in bytes.
const ALIGN: usize = 16;

/// Heads of one tensor, for the kernel. Strides are in elements: of both dimensions of rows, of groups, and of the
/// heads of a group.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RotatePart {
    /// Heads; 0 for no tensor.
    pub heads: u32,
    /// Heads of a group.
    pub per_group: u32,
    /// Channels that are rotated.
    pub width: u32,
    /// Threads of a row.
    pub units: u32,
    /// Strides of the input.
    pub in_stride: [i64; 4],
    /// Strides of the output.
    pub out_stride: [i64; 4],
    /// Strides of cosines and sines by row.
    pub wave_stride: [i64; 2],
}

params! {
    /// Parameters of `rotate_*`.
    pub struct RotateParams<'a> [ROTATE_PARAMS_BYTES] for Rotate => host::rope::run {
        ..RotatePointers,
        /// Rows, in two dimensions.
        pub rows: [u64; 2],
        /// Channels of a head.
        pub channels: u32,
        /// Adjacent channels make a pair.
        pub interleaved: u32,
        /// Rotate in the direction of the gradient.
        pub transposed: u32,
        /// 16-byte accesses.
        pub wide: u32,
        /// The tensors.
        pub part: [RotatePart; ROTATE_PARTS],
    }
}

pointers! {
    /// Tensors; null if absent.
    pub struct RotatePointers {
        /// Queries.
        q,
        /// Keys.
        k,
        /// Values.
        v,
        /// Rotated queries; may be `q` with the same strides.
        q_out,
        /// Rotated keys.
        k_out,
        /// Copied values.
        v_out,
        /// Cosines of queries, or null: these are copied.
        q_cos,
        /// Of keys.
        k_cos,
        /// Of values.
        v_cos,
        /// Sines of queries, signed.
        q_sin,
        /// Of keys.
        k_sin,
        /// Of values.
        v_sin,
    }
}

/// One tensor of heads: its input and output, and the cosines and sines of its rotation.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'v> {
    /// `(rows, heads, channels)`, `(rows, rows, heads, channels)` or `(rows, rows, groups, heads of a group, channels)`.
    pub input: TensorView<'v>,
    /// The same heads, likewise.
    pub output: TensorView<'v>,
    /// Cosines and signed sines, `(rows or 1, rows or 1, 1, width)` or `(rows or 1, 1, width)`, f32; none to copy.
    pub waves: Option<[TensorView<'v>; 2]>,
}

/// Heads of a view.
#[derive(Clone, Copy, Debug)]
struct Heads {
    rows: [i64; 2],
    count: i64,
    per_group: Option<i64>,
    channels: i64,
    strides: [i64; 4],
}

impl Heads {
    fn of(view: &TensorView<'_>) -> Result<Self> {
        let (shape, strides) = (view.shape(), view.strides());
        let heads = match (shape, strides) {
            (&[rows, heads, channels], &[row, head, _]) => {
                Self { rows: [rows, 1], count: heads, per_group: None, channels, strides: [row, 0, 0, head] }
            }
            (&[a, b, heads, channels], &[first, second, head, _]) => {
                Self { rows: [a, b], count: heads, per_group: None, channels, strides: [first, second, 0, head] }
            }
            (&[a, b, groups, inside, channels], &[first, second, group, head, _]) => Self {
                rows: [a, b],
                count: groups * inside,
                per_group: Some(inside),
                channels,
                strides: [first, second, group, head],
            },
            _ => return Err(Error::shape(OP, "heads", "of three to five dimensions", format_args!("{shape:?}"))),
        };
        if heads.channels > 1 && strides.last() != Some(&1) && !shape.contains(&0) {
            return Err(Error::layout(OP, "channels", "side by side", format_args!("strides {strides:?}")));
        }
        Ok(heads)
    }

    /// Strides for a number of heads per group.
    fn grouped(&self, per_group: i64) -> [i64; 4] {
        let [first, second, group, head] = self.strides;
        [first, second, if self.per_group.is_some() { group } else { per_group * head }, head]
    }
}

/// Strides by row of cosines or sines; 0 if all rows share one.
fn wave_strides(wave: &TensorView<'_>, heads: &Heads) -> Result<(i64, [i64; 2])> {
    let (rows, strides, width) = match (wave.shape(), wave.strides()) {
        (&[a, 1, width], &[first, _, _]) => ([a, 1], [first, 0], width),
        (&[a, b, 1, width], &[first, second, _, _]) => ([a, b], [first, second], width),
        (shape, _) => {
            return Err(Error::shape(OP, "cosines and sines", "(rows, rows, 1, channels)", format_args!("{shape:?}")));
        }
    };
    let fits = rows.iter().zip(heads.rows).all(|(&have, rows)| have == 1 || have == rows);
    if !fits || width > heads.channels || width % 2 != 0 || (width > 1 && wave.strides().last() != Some(&1)) {
        let expected = format_args!("for {:?} rows, of at most {} channels", heads.rows, heads.channels);
        return Err(Error::shape(OP, "cosines and sines", expected, format_args!("{:?}", wave.shape())));
    }
    if wave.dtype() != DType::F32 {
        return Err(Error::dtype(OP, "cosines and sines", DType::F32, wave.dtype()));
    }
    let of_row = |index: usize| if rows[index] == 1 { 0 } else { strides[index] };
    Ok((width, [of_row(0), of_row(1)]))
}

fn part_of(turn: &Turn<'_>) -> Result<(RotatePart, Heads)> {
    let (input, output) = (Heads::of(&turn.input)?, Heads::of(&turn.output)?);
    let (expected, got) = ((input.rows, input.count, input.channels), (output.rows, output.count, output.channels));
    if expected != got {
        return Err(Error::shape(OP, "the output", format_args!("{expected:?}"), format_args!("{got:?}")));
    }
    let per_group = match (input.per_group, output.per_group) {
        (Some(a), Some(b)) if a != b => return Err(Error::shape(OP, "heads of a group of the output", a, b)),
        (a, b) => a.or(b).unwrap_or(input.count),
    };
    let mut part = RotatePart {
        heads: input.count as u32,
        per_group: per_group.max(1) as u32,
        in_stride: input.grouped(per_group),
        out_stride: output.grouped(per_group),
        ..RotatePart::default()
    };
    if let Some([cos, sin]) = &turn.waves {
        let (width, strides) = wave_strides(cos, &input)?;
        if wave_strides(sin, &input)? != (width, strides) {
            return Err(Error::shape(OP, "sines", "laid out as cosines", format_args!("{:?}", sin.shape())));
        }
        (part.width, part.wave_stride) = (width as u32, strides);
    }
    Ok((part, input))
}

fn is_wide(turn: &Turn<'_>, part: &RotatePart, channels: i64) -> bool {
    let step = 2 * VECTOR as i64;
    let apart = part.in_stride.iter().chain(&part.out_stride).all(|stride| stride % VECTOR as i64 == 0);
    let waves = turn.waves.iter().flatten().all(|wave| wave.is_aligned(ALIGN));
    channels % step == 0
        && i64::from(part.width) % step == 0
        && apart
        && waves
        && part.wave_stride.iter().all(|stride| stride % 4 == 0)
        && turn.input.is_aligned(ALIGN)
        && turn.output.is_aligned(ALIGN)
}

/// Rotates heads.
///
/// # Errors
/// Shapes, types or layouts that do not fit, or the launch fails.
pub fn rotate(
    target: &mut Target<'_>,
    turns: &[Option<Turn<'_>>; ROTATE_PARTS],
    interleaved: bool,
    transposed: bool,
) -> Result<()> {
    let mut found: Option<(Heads, Float)> = None;
    let mut part = [RotatePart::default(); ROTATE_PARTS];
    let mut wide = true;
    for (part, turn) in part.iter_mut().zip(turns) {
        let Some(turn) = turn else { continue };
        let heads = checked(turn, part, &mut found)?;
        wide &= is_wide(turn, part, heads.channels);
    }
    let Some((heads, kind)) = found else { return Ok(()) };
    let side = if wide { VECTOR } else { 1 };
    let chunks = (heads.channels as u32).div_ceil(2 * side as u32);
    for part in &mut part {
        part.units = part.heads.div_ceil(ROTATE_HEADS) * chunks;
    }
    let threads = part.iter().map(|part| u64::from(part.units)).sum::<u64>() * (heads.rows[0] * heads.rows[1]) as u64;
    let blocks = threads.div_ceil(u64::from(ROTATE_THREADS));
    if i32::try_from(blocks).is_err() {
        return Err(Error::shape(OP, "rows", "below 2**31 blocks", format_args!("{:?}", heads.rows)));
    }
    if blocks == 0 {
        return Ok(());
    }
    let params = RotateParams {
        at: pointers_of(turns),
        rows: heads.rows.map(|rows| rows as u64),
        channels: heads.channels as u32,
        interleaved: u32::from(interleaved),
        transposed: u32::from(transposed),
        wide: u32::from(wide),
        part,
    };
    launch(target, KernelId::Rotate(kind), Grid::linear(blocks as u32, ROTATE_THREADS), &params)
}

/// Checks one tensor beside those `found` before it.
fn checked(turn: &Turn<'_>, part: &mut RotatePart, found: &mut Option<(Heads, Float)>) -> Result<Heads> {
    let (own, heads) = part_of(turn)?;
    *part = own;
    let dtype = turn.input.dtype();
    let Some(kind) = dtype.as_float() else {
        return Err(Error::dtype(OP, "heads", "torch.float32, torch.float16 or torch.bfloat16", dtype));
    };
    if turn.output.dtype() != dtype {
        return Err(Error::dtype(OP, "the output", dtype, turn.output.dtype()));
    }
    if let Some((first, first_kind)) = found {
        if (first.rows, first.channels) != (heads.rows, heads.channels) {
            let expected = format_args!("{:?} rows of {} channels", first.rows, first.channels);
            return Err(Error::shape(OP, "heads", expected, format_args!("{:?}", turn.input.shape())));
        }
        if *first_kind != kind {
            return Err(Error::dtype(OP, "heads", DType::from(*first_kind), dtype));
        }
    } else {
        *found = Some((heads, kind));
    }
    Ok(heads)
}

fn pointers_of<'v>(turns: &[Option<Turn<'v>>; ROTATE_PARTS]) -> RotatePointers<DevPtr<'v>> {
    let of = |pick: fn(&Turn<'v>) -> Option<DevPtr<'v>>| {
        turns.each_ref().map(|turn| turn.as_ref().and_then(pick).unwrap_or_default())
    };
    let [q, k, v] = of(|turn| Some(turn.input.data()));
    let [q_out, k_out, v_out] = of(|turn| Some(turn.output.data()));
    let [q_cos, k_cos, v_cos] = of(|turn| turn.waves.map(|[cos, _]| cos.data()));
    let [q_sin, k_sin, v_sin] = of(|turn| turn.waves.map(|[_, sin]| sin.data()));
    RotatePointers { q, k, v, q_out, k_out, v_out, q_cos, k_cos, v_cos, q_sin, k_sin, v_sin }
}
