//! Every environment variable that the native side reads, read once.

use std::sync::OnceLock;

/// Settings of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "switches that do not depend on each other")]
pub struct Config {
    /// `TE_FAST_SYNC=1`: wait after every launch, so that an error names the launch that made it.
    pub synchronise: bool,
    /// `NVTE_SET_CUDA_DEVICE=0`: trust the caller that the current device is the tensors' device.
    pub check_device: bool,
    /// Read tensors through DLPack's exchange table if torch has one; `TE_FAST_NO_EXCHANGE=1` turns this off.
    pub exchange_table: bool,
    /// Run programs whose addresses repeat as one CUDA graph; `TE_FAST_GRAPHS=0` turns this off.
    pub graphs: bool,
    /// After an optimizer step one launch quantises all weights; `TE_FAST_WEIGHTS_TOGETHER=0` turns this off.
    pub weights_together: bool,
}

impl Config {
    /// The settings of the environment.
    #[must_use]
    pub fn from_environment() -> Self {
        Self {
            synchronise: flag("TE_FAST_SYNC", false),
            check_device: flag("NVTE_SET_CUDA_DEVICE", true),
            exchange_table: !flag("TE_FAST_NO_EXCHANGE", false),
            graphs: flag("TE_FAST_GRAPHS", true),
            weights_together: flag("TE_FAST_WEIGHTS_TOGETHER", true),
        }
    }
}

/// `TE_FAST_EXACT=1`: FP8 products of the host have the bits of Hopper's tensor cores.
#[must_use]
pub fn exact() -> bool {
    static EXACT: OnceLock<bool> = OnceLock::new();
    *EXACT.get_or_init(|| flag("TE_FAST_EXACT", false))
}

/// `TE_FAST_LEARN=0` turns it off: launches of matrix products are learned from cuBLASLt and repeated without it.
#[must_use]
pub fn learns_launches() -> bool {
    static LEARNS: OnceLock<bool> = OnceLock::new();
    *LEARNS.get_or_init(|| flag("TE_FAST_LEARN", true))
}

/// Whether dense products run by the kernels of `cuda/gemm/` where these are as fast as cuBLASLt: unless
/// `TE_FAST_OWN_GEMM` is `0` or `grouped`.
#[must_use]
pub fn multiplies_dense() -> bool {
    static DENSE: OnceLock<bool> = OnceLock::new();
    *DENSE.get_or_init(|| flag("TE_FAST_OWN_GEMM", true) && !is("TE_FAST_OWN_GEMM", "grouped"))
}

/// Whether products of groups run by these kernels wherever they can: unless `TE_FAST_OWN_GEMM=0`, with which cuBLASLt
/// goes first.
#[must_use]
pub fn multiplies_groups() -> bool {
    static GROUPS: OnceLock<bool> = OnceLock::new();
    *GROUPS.get_or_init(|| flag("TE_FAST_OWN_GEMM", true))
}

fn is(name: &str, value: &str) -> bool {
    std::env::var(name).is_ok_and(|given| given == value)
}

fn flag(name: &str, default: bool) -> bool {
    match std::env::var(name) {
        Ok(value) => value != "0" && !value.is_empty(),
        Err(_) => default,
    }
}
