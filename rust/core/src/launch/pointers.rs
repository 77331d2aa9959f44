//! The pointers of an op, declared once: addresses when it runs, places while a program is compiled. Kernels that take
//! them in this order have them as the head of their parameters (`params!`).

/// Defines a struct of one field per pointer, generic in the type of a pointer. In the default all pointers are absent.
#[macro_export]
macro_rules! pointers {
    ($(#[$doc:meta])* pub struct $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct $name<P> { $($(#[$field_doc])* pub $field: P,)* }

        impl<P> $name<P> {
            /// The same struct, with `to` applied to each pointer.
            #[inline]
            pub fn map<Q>(&self, mut to: impl FnMut(&P) -> Q) -> $name<Q> {
                $name { $($field: to(&self.$field),)* }
            }

            /// Calls `visit` with every pointer.
            pub fn each(&self, mut visit: impl FnMut(&P)) {
                $(visit(&self.$field);)*
            }
        }
    };
}
