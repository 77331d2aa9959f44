//! Typed kernel parameters: the structs that launches copy, each bound to the kernels that take it.

use te_fast_kernels::KernelId;

use crate::base::error::Result;

/// Seals [`Params`], so that only [`params!`] implements it.
pub(crate) mod sealed {
    /// A struct whose layout `params!` has checked.
    pub trait Sealed {}
}

/// Parameters of a kernel. A launch copies their bytes, and the host backend runs on the same struct. Kernels read the
/// bytes as their own struct, so only `params!` may define one, without padding.
pub trait Params: sealed::Sealed {
    /// Whether the kernel takes this struct.
    fn accepts(id: KernelId) -> bool;

    /// Runs the host kernel of `id`.
    ///
    /// # Errors
    /// Faults that only the kernel can find; the plan has checked shapes.
    fn run_host(&self, id: KernelId) -> Result<()>;
}

/// Defines a `#[repr(C)]` parameter struct, asserts its size (the `.cu` file asserts it of its own struct) and binds it
/// to the families of [`KernelId`] that take it; `run` is the host kernel, `fn(&Params, KernelId) -> Result<()>`. With
/// `..Pointers,` the struct begins with the op's pointers in their order, and they can be read as its own fields.
macro_rules! params {
    (
        $(#[$doc:meta])*
        pub struct $name:ident<$life:lifetime> [$size:expr] for $($family:ident)|+ => $run:path {
            $(..$pointers:ident,)?
            $($(#[$field_doc:meta])* pub $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct $name<$life> {
            $(
                /// The op's pointers.
                pub at: $pointers<$crate::base::pointer::DevPtr<$life>>,
            )?
            $($(#[$field_doc])* pub $field: $type,)*
        }

        $(
            impl<$life> std::ops::Deref for $name<$life> {
                type Target = $pointers<$crate::base::pointer::DevPtr<$life>>;

                #[inline]
                fn deref(&self) -> &Self::Target {
                    &self.at
                }
            }
        )?

        const _: () = assert!(std::mem::size_of::<$name<'static>>() == $size);
        // No padding: every byte that the launch copies and the recorder reads is a field.
        const _: () = {
            #[allow(clippy::extra_unused_lifetimes, reason = "the types of pointer fields name it")]
            const fn fields<$life>() -> usize {
                0 $(+ std::mem::size_of::<$pointers<$crate::base::pointer::DevPtr<$life>>>())?
                    $(+ std::mem::size_of::<$type>())*
            }
            assert!(fields() == $size);
        };

        impl $crate::launch::params::sealed::Sealed for $name<'_> {}

        impl $crate::launch::params::Params for $name<'_> {
            fn accepts(id: te_fast_kernels::KernelId) -> bool {
                matches!(id, $(te_fast_kernels::KernelId::$family { .. })|+)
            }

            fn run_host(&self, id: te_fast_kernels::KernelId) -> $crate::base::error::Result<()> {
                $run(self, id)
            }
        }
    };
}

pub(crate) use params;
