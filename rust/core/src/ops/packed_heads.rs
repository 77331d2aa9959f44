//! Queries, keys and values in the columns of one product: they are split apart, queries and keys rotated, and their
//! gradients are joined.

use te_fast_kernels::constants::attention::ROTATE_PARTS;

use crate::base::error::{Error, Result};
use crate::base::tensor::{MAX_DIMS, TensorView};
use crate::launch::target::Target;
use crate::ops::rope::{Turn, rotate};

const OP: &str = "rotate";

/// Cosines and signed sines of queries and of keys; none where nothing rotates.
pub type Waves<'v> = Option<[[TensorView<'v>; 2]; 2]>;

/// Where queries, keys and values are in the columns of their product.
#[derive(Clone, Copy, Debug)]
pub struct PackedHeads {
    queries: i64,
    groups: i64,
    channels: i64,
    is_grouped: bool,
}

impl PackedHeads {
    /// Heads of queries, heads of keys and of values, and channels of each. With `is_grouped` each group has its queries,
    /// its key and its value side by side; else all queries come first, then all keys, then all values.
    ///
    /// # Errors
    /// Negative numbers, or queries that the groups cannot share.
    pub fn new([queries, groups, channels]: [i64; 3], is_grouped: bool) -> Result<Self> {
        if [queries, groups, channels].iter().any(|&count| count < 0) || groups == 0 || queries % groups != 0 {
            let got = format_args!("{queries} for {groups} groups of {channels} channels");
            return Err(Error::shape(OP, "heads of queries", "a multiple of the groups", got));
        }
        Ok(Self { queries, groups, channels, is_grouped })
    }

    /// Columns of the product.
    #[must_use]
    pub const fn columns(&self) -> i64 {
        (self.queries + 2 * self.groups) * self.channels
    }

    /// The same heads with all queries first.
    #[must_use]
    pub const fn ungrouped(&self) -> Self {
        Self { is_grouped: false, ..*self }
    }

    /// Whether the heads of queries follow each other at one distance, as those of keys and of values do.
    #[must_use]
    pub const fn are_views(&self) -> bool {
        !self.is_grouped || self.queries == self.groups
    }

    /// Columns before the first head of queries, of keys and of values.
    #[must_use]
    pub const fn offsets(&self) -> [i64; 3] {
        let queries = if self.is_grouped { self.queries / self.groups } else { self.queries };
        let keys = if self.is_grouped { 1 } else { self.groups };
        [0, queries * self.channels, (queries + keys) * self.channels]
    }

    /// Queries, keys and values of a product `(..., columns)`, as views `(..., heads, channels)`.
    ///
    /// # Errors
    /// A product that is not contiguous, or has other columns or dimensions.
    pub fn views<'v>(&self, product: &TensorView<'v>) -> Result<[TensorView<'v>; 3]> {
        let stride = if self.is_grouped { 3 * self.channels } else { self.channels };
        let heads = [self.queries, self.groups, self.groups];
        self.each(product, product.shape(), heads.map(|heads| [(heads, stride), (self.channels, 1)]))
    }

    /// The same as [`Turn`] takes them, whatever the order of heads.
    fn parts<'v>(&self, product: &TensorView<'v>) -> Result<[TensorView<'v>; 3]> {
        if self.are_views() {
            return self.views(product);
        }
        let [channels, queries] = [self.channels, self.queries / self.groups];
        let group = (self.groups, (queries + 2) * channels);
        let heads = [queries, 1, 1].map(|heads| [group, (heads, channels), (channels, 1)]);
        let shape = match *product.shape() {
            [rows, columns] => &[rows, 1, columns],
            _ => product.shape(),
        };
        self.each(product, shape, heads)
    }

    /// Views of the product, seen in a shape; the sizes and strides of `inner` stand in place of its columns.
    fn each<'v, const N: usize>(
        &self,
        product: &TensorView<'v>,
        shape: &[i64],
        inner: [[(i64, i64); N]; 3],
    ) -> Result<[TensorView<'v>; 3]> {
        let wrong = || {
            let expected = format_args!("contiguous rows of {} columns", self.columns());
            let got = format_args!("shape {:?} with strides {:?}", product.shape(), product.strides());
            Error::shape(OP, "the product", expected, got)
        };
        let (Some((&columns, leading)), true) = (shape.split_last(), product.is_contiguous()) else {
            return Err(wrong());
        };
        if columns != self.columns() || !(1..=2).contains(&leading.len()) {
            return Err(wrong());
        }
        let mut dims = [(0, 0); MAX_DIMS];
        let mut stride = columns;
        for (dim, &size) in dims[..leading.len()].iter_mut().zip(leading).rev() {
            *dim = (size, stride);
            stride *= size;
        }
        let count = leading.len() + N;
        let mut views = [*product; 3];
        for ((view, inner), offset) in views.iter_mut().zip(inner).zip(self.offsets()) {
            dims[leading.len()..count].copy_from_slice(&inner);
            let (sizes, strides) = (dims.map(|(size, _)| size), dims.map(|(_, stride)| stride));
            let data = product.data().offset(offset as usize * product.dtype().size());
            let (device, dtype) = (product.device(), product.dtype());
            *view = TensorView::new(data, device, dtype, &sizes[..count], Some(&strides[..count])).ok_or_else(wrong)?;
        }
        Ok(views)
    }
}

/// Writes queries, keys and values of `product` into `into`, all queries first. Without `into` they stay where they are,
/// and only what rotates is written.
///
/// # Errors
/// Shapes, types or layouts that do not fit, or the launch fails.
pub fn split(
    target: &mut Target<'_>,
    heads: &PackedHeads,
    product: &TensorView<'_>,
    into: Option<&TensorView<'_>>,
    waves: &Waves<'_>,
    interleaved: bool,
) -> Result<()> {
    let inputs = heads.parts(product)?;
    let turns = match into {
        Some(into) => turns(&inputs, &heads.ungrouped().views(into)?, waves),
        None => turns(&inputs, &inputs, waves).map(|turn| turn.filter(|turn| turn.waves.is_some())),
    };
    rotate(target, &turns, interleaved, false)
}

/// Writes the gradients of queries, keys and values, those of queries and keys rotated back, into the gradient of their
/// product.
///
/// # Errors
/// As of [`split`].
pub fn join(
    target: &mut Target<'_>,
    heads: &PackedHeads,
    grads: &[TensorView<'_>; 3],
    into: &TensorView<'_>,
    waves: &Waves<'_>,
    interleaved: bool,
) -> Result<()> {
    rotate(target, &turns(grads, &heads.parts(into)?, waves), interleaved, true)
}

/// What [`rotate`] is given; values never rotate.
fn turns<'v>(
    inputs: &[TensorView<'v>; 3],
    outputs: &[TensorView<'v>; 3],
    waves: &Waves<'v>,
) -> [Option<Turn<'v>>; ROTATE_PARTS] {
    let [of_queries, of_keys] = waves.map_or([None; 2], |waves| waves.map(Some));
    let waves = [of_queries, of_keys, None];
    std::array::from_fn(|at| Some(Turn { input: inputs[at], output: outputs[at], waves: waves[at] }))
}
