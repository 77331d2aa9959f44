//! Addresses for kernels: numbers on a GPU, memory of this process on the host.
//!
//! A [`DevPtr`] knows only its address. The caller of a plan must pass buffers of the sizes that the plan names, and
//! outputs that overlap no other buffer. Programs guarantee this by their allocations, `rust/py/src/direct/tensors.rs`
//! by comparing the tensors of a direct call.
#![expect(unsafe_code, reason = "pointers become slices for host kernels; every block names who guarantees it")]

use std::marker::PhantomData;

/// A device address (host address for CPU tensors) that is valid for `'a`; null where a kernel allows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct DevPtr<'a> {
    address: u64,
    memory: PhantomData<&'a mut u8>,
}

impl<'a> DevPtr<'a> {
    /// The null pointer: "absent", where a parameter is optional.
    #[must_use]
    pub const fn null() -> Self {
        Self { address: 0, memory: PhantomData }
    }

    /// A pointer to memory at `address`.
    ///
    /// # Safety
    /// The memory must stay allocated for `'a`, and nothing else may hold Rust references into it meanwhile.
    #[must_use]
    pub const unsafe fn from_address(address: u64) -> Self {
        Self { address, memory: PhantomData }
    }

    /// A host buffer, for tests, benches and host scratch memory.
    #[must_use]
    pub fn from_slice<T: Element>(slice: &'a mut [T]) -> Self {
        Self { address: slice.as_mut_ptr() as u64, memory: PhantomData }
    }

    /// The address as a number.
    #[must_use]
    pub const fn address(self) -> usize {
        self.address as usize
    }

    /// Whether it is absent.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.address == 0
    }

    /// Whether the address is a multiple of `bytes`, as null is.
    #[must_use]
    pub const fn is_aligned(self, bytes: usize) -> bool {
        self.address().is_multiple_of(bytes)
    }

    /// The pointer if it is `wanted`, else null.
    #[must_use]
    pub const fn when(self, wanted: bool) -> Self {
        if wanted { self } else { Self::null() }
    }

    /// The pointer `bytes` further on; null stays null.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        if self.address == 0 { self } else { Self { address: self.address + bytes as u64, memory: PhantomData } }
    }

    /// `len` elements, as the kernel's head comment promises; empty for null. Only for host kernels.
    #[must_use]
    pub(crate) fn slice<T: Element>(self, len: usize) -> &'a [T] {
        if self.address == 0 || len == 0 {
            return &[];
        }
        // SAFETY: whoever filled the plan's buffers brought one of `len` elements (the promise at the head of this file),
        // and the view it came from keeps it borrowed for 'a. T is plain data, so any bytes are a value.
        unsafe { std::slice::from_raw_parts(self.address as *const T, len) }
    }

    /// As [`DevPtr::slice`], for writing. A kernel's outputs do not overlap its inputs or each other.
    #[must_use]
    pub(crate) fn slice_mut<T: Element>(self, len: usize) -> &'a mut [T] {
        if self.address == 0 || len == 0 {
            return &mut [];
        }
        // SAFETY: as in `slice`; exclusive because a host kernel takes each output parameter once, and outputs lie apart.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, len) }
    }
}

/// Addresses of a call by number. The table is kept between calls only for its memory: its content is valid while
/// [`Addresses`] fills it.
#[derive(Debug, Default)]
pub struct AddressTable {
    list: Vec<u64>,
}

impl AddressTable {
    /// Clears the last call's addresses; all become null.
    pub fn fill<'a>(&mut self, len: usize) -> Addresses<'_, 'a> {
        self.list.clear();
        self.list.resize(len, 0);
        Addresses { list: &mut self.list, memory: PhantomData }
    }
}

/// An [`AddressTable`] that is being filled and read; every address in it is valid for `'a`. Number 0 stays null.
#[derive(Debug)]
pub struct Addresses<'t, 'a> {
    list: &'t mut Vec<u64>,
    memory: PhantomData<DevPtr<'a>>,
}

impl<'a> Addresses<'_, 'a> {
    /// Sets the address of number `index`.
    #[inline]
    pub fn set(&mut self, index: usize, address: DevPtr<'a>) {
        if index != 0
            && let Some(place) = self.list.get_mut(index)
        {
            *place = address.address;
        }
    }

    /// The address of number `index`; null for numbers that the table does not have.
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> DevPtr<'a> {
        DevPtr { address: self.list.get(index).copied().unwrap_or(0), memory: PhantomData }
    }

    /// Makes room for numbers below `len`.
    #[inline]
    pub fn grow(&mut self, len: usize) {
        if self.list.len() < len {
            self.list.resize(len, 0);
        }
    }

    /// The first `len` addresses as numbers.
    #[inline]
    #[must_use]
    pub fn numbers(&self, len: usize) -> &[u64] {
        &self.list[..len.min(self.list.len())]
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Plain data that host kernels may view memory as.
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {}

macro_rules! elements {
    ($($type:ty),*) => { $(impl sealed::Sealed for $type {} impl Element for $type {})* };
}
elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::f16, half::bf16);
