//! Precompiled CUDA kernels: the fatbin images that `build.rs` made of `cuda/*/*.cu`, and the table of their symbols.
//! `te_fast_core` loads an image at first use of one of its kernels.

pub mod constants;
pub mod ids;

pub use ids::{Float, Fp8, Half, Image, KernelId};

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The fatbin of one image; empty when the crate was built with `TE_FAST_SKIP_CUDA=1`, or without the one architecture that
/// the image is for.
#[must_use]
pub const fn image_bytes(image: Image) -> &'static [u8] {
    IMAGE_BYTES[image as usize]
}

/// Compute capabilities (as `90` for 9.0) that the images hold machine code for, ascending; empty without CUDA.
#[must_use]
pub const fn architectures() -> &'static [u32] {
    ARCHITECTURES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_dense_and_symbols_unique() {
        let mut symbols = std::collections::BTreeSet::new();
        for (expected, id) in KernelId::all().enumerate() {
            assert_eq!(id.index(), expected);
            assert!(symbols.insert(id.symbol()), "{} twice", id.symbol());
            let _ = id.image();
        }
        assert_eq!(symbols.len(), KernelId::COUNT);
    }
}
