//! Normalisation of rows: the plan's interface; its kernels follow.
#![allow(missing_docs, clippy::all, clippy::pedantic, dead_code)]
use crate::error::Result;
use crate::kernel::{DevPtr, Target};
use te_fast_kernels::{Float, Fp8};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    LayerNorm,
    RmsNorm,
}
#[derive(Clone, Copy, Debug)]
pub struct NormSpec {
    pub rows: usize,
    pub cols: usize,
    pub kind: NormKind,
    pub input: Float,
    pub weight: Float,
    pub zero_centered_gamma: bool,
    pub eps: f32,
    pub residual: bool,
    pub high: bool,
    pub fp8: Option<Fp8>,
    pub rowwise: bool,
    pub columnwise: bool,
    pub stats: bool,
}
#[derive(Clone, Copy, Debug)]
pub struct NormBuffers<'a> {
    pub x: DevPtr<'a>,
    pub residual: DevPtr<'a>,
    pub sum: DevPtr<'a>,
    pub gamma: DevPtr<'a>,
    pub beta: DevPtr<'a>,
    pub y: DevPtr<'a>,
    pub mean: DevPtr<'a>,
    pub rstd: DevPtr<'a>,
    pub out: DevPtr<'a>,
    pub out_t: DevPtr<'a>,
    pub scale: DevPtr<'a>,
    pub scale_inv: DevPtr<'a>,
    pub amax: DevPtr<'a>,
    pub noop: DevPtr<'a>,
}
impl NormBuffers<'_> {
    pub const NONE: Self = Self {
        x: DevPtr::null(),
        residual: DevPtr::null(),
        sum: DevPtr::null(),
        gamma: DevPtr::null(),
        beta: DevPtr::null(),
        y: DevPtr::null(),
        mean: DevPtr::null(),
        rstd: DevPtr::null(),
        out: DevPtr::null(),
        out_t: DevPtr::null(),
        scale: DevPtr::null(),
        scale_inv: DevPtr::null(),
        amax: DevPtr::null(),
        noop: DevPtr::null(),
    };
}
#[derive(Clone, Copy, Debug)]
pub struct NormPlan(NormSpec);
impl NormPlan {
    pub fn new(_: NormSpec) -> Result<Self> {
        Err(crate::error::Error::unsupported("norm", "the kernels are not built yet"))
    }
    pub fn run(&self, _: &mut Target<'_>, _: &NormBuffers<'_>) -> Result<()> {
        Ok(())
    }
}
