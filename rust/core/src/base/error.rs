//! The error type of the core. It holds values, not prose, so that the binding can choose the Python class, and the
//! message can name the expected value, the actual value and the remedy.

use std::fmt::{self, Display};

/// Result of every fallible operation of the core; `Result<()>` is one word wide.
pub type Result<T> = std::result::Result<T, Error>;

/// A boxed [`ErrorKind`].
#[derive(Debug)]
pub struct Error(Box<ErrorKind>);

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A dimension, rank or element count does not fit.
    #[error("{op}: {what} must be {expected}, got {got}")]
    Shape {
        /// Operation that checked.
        op: &'static str,
        /// Argument or property.
        what: &'static str,
        /// The expected value, with the remedy if there is one.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// An element type does not fit.
    #[error("{op}: {what} must be {expected}, got {got}")]
    Dtype {
        /// Operation that checked.
        op: &'static str,
        /// Argument.
        what: &'static str,
        /// Accepted types.
        expected: String,
        /// The actual type.
        got: String,
    },
    /// Memory that is not laid out as needed: strides, alignment.
    #[error("{op}: {what} must be {expected}, got {got}")]
    Layout {
        /// Operation that checked.
        op: &'static str,
        /// Argument.
        what: &'static str,
        /// Layout needed.
        expected: String,
        /// The actual layout.
        got: String,
    },
    /// A tensor on the wrong device.
    #[error("{op}: {what} must be on {expected}, got {got}")]
    Device {
        /// Operation that checked.
        op: &'static str,
        /// Argument.
        what: &'static str,
        /// Device needed.
        expected: String,
        /// The actual device.
        got: String,
    },
    /// A value of an argument or a state that the operation refuses.
    #[error("{op}: {message}")]
    Value {
        /// Operation that checked.
        op: &'static str,
        /// The fault and the remedy.
        message: String,
    },
    /// A call that does not fit the state the object is in.
    #[error("{op}: {message}")]
    State {
        /// Operation that checked.
        op: &'static str,
        /// The fault and the remedy.
        message: String,
    },
    /// Something this build, GPU or library version cannot do.
    #[error("{op}: {message}")]
    Unsupported {
        /// Operation that checked.
        op: &'static str,
        /// The missing feature and the remedy.
        message: String,
    },
    /// A kernel that is in no image of this build, or not for this GPU.
    #[error("kernel {symbol} is not available on this device: {reason}")]
    KernelMissing {
        /// Symbol of the kernel.
        symbol: &'static str,
        /// Why.
        reason: String,
    },
    /// A CUDA driver call failed.
    #[error(
        "{call} failed with {code}: {text}. CUDA reports errors late: this one may come from an earlier launch; TE_FAST_SYNC=1 makes each launch report its own"
    )]
    Driver {
        /// Driver function.
        call: &'static str,
        /// `CUresult` value.
        code: u32,
        /// The driver's own words.
        text: String,
    },
    /// A cuBLASLt call failed.
    #[error("{call} failed with cuBLAS status {status} ({what})")]
    Cublas {
        /// cuBLASLt function.
        call: &'static str,
        /// `cublasStatus_t` value.
        status: u32,
        /// The problem of the call.
        what: String,
    },
    /// There is no usable CUDA driver.
    #[error("CUDA is not usable here: {reason}. te_fast layers on CPU tensors work without it")]
    NoDriver {
        /// The reason.
        reason: String,
    },
    /// Another error, with its place in front.
    #[error("{place}: {error}")]
    Within {
        /// The op of a chain.
        place: String,
        /// The error of that op.
        error: Error,
    },
}

impl Error {
    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> &ErrorKind {
        match &*self.0 {
            ErrorKind::Within { error, .. } => error.kind(),
            kind => kind,
        }
    }

    /// The same error, with its place.
    #[cold]
    #[must_use]
    pub fn within(self, place: impl Display) -> Self {
        let place = place.to_string();
        // Errors of a layer of one op already begin with the op's name.
        if self.to_string().strip_prefix(&place).is_some_and(|rest| rest.starts_with(": ")) {
            return self;
        }
        ErrorKind::Within { place, error: self }.into()
    }
}

/// Constructors of errors, each by the name of its kind.
macro_rules! constructors {
    ($($name:ident => $kind:ident),* ; $($message:ident => $of_message:ident),*) => {
        impl Error {
            $(
                #[doc = concat!("An [`ErrorKind::", stringify!($kind), "`].")]
                #[cold]
                #[inline(never)]
                pub fn $name(op: &'static str, what: &'static str, expected: impl Display, got: impl Display) -> Self {
                    ErrorKind::$kind { op, what, expected: expected.to_string(), got: got.to_string() }.into()
                }
            )*
            $(
                #[doc = concat!("An [`ErrorKind::", stringify!($of_message), "`].")]
                #[cold]
                #[inline(never)]
                pub fn $message(op: &'static str, message: impl Display) -> Self {
                    ErrorKind::$of_message { op, message: message.to_string() }.into()
                }
            )*
        }
    };
}
constructors!(
    shape => Shape, dtype => Dtype, layout => Layout, device => Device;
    value => Value, state => State, unsupported => Unsupported
);

impl From<ErrorKind> for Error {
    #[cold]
    #[inline(never)]
    fn from(kind: ErrorKind) -> Self {
        Self(Box::new(kind))
    }
}

impl Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for Error {}
