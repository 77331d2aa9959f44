"""Every environment variable that the Python side reads, read once, at import.

docs/reference/envvars.md says what each one means; the native side has ``config.rs``.
"""

from __future__ import annotations

import os
from functools import cache

from te_fast.errors import ArgumentError


def _flag(name: str) -> bool:
    return os.environ.get(name, "0") == "1"


def _own(name: str, values: tuple[str, ...] = ("0", "1")) -> bool:
    """Read a switch of te_fast's own; Transformer Engine's switches take what they take there."""
    given = os.environ.get(name)
    if given is not None and given not in values:
        message = (
            f"{name} must be one of {', '.join(values)}, got {given!r}; unset it for the default"
        )
        raise ArgumentError(message)
    return given == "1"


BACKWARD_OVERRIDE = os.environ.get("NVTE_BACKWARD_OVERRIDE")
DEBUG = _own("TE_FAST_DEBUG")
EXPERT_LOOP = _own("TE_FAST_EXPERT_LOOP")
POWER_2_SCALES = _flag("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
F32_BLOCK_SCALES = _flag("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
UNFUSED_UPDATE = _flag("NVTE_UNFUSED_FP8_UPDATE")
#: Whether functions of `te_fast.pytorch.jit` are compiled.
TORCH_COMPILE = os.environ.get("NVTE_TORCH_COMPILE", "1") != "0"
#: All streams share one queue of the GPU: work starts in the order in which it is given.
ONE_QUEUE = _flag("CUDA_DEVICE_MAX_CONNECTIONS")

# The native side reads these; it has no way to refuse a value.
for _name in ("SYNC", "GRAPHS", "LEARN", "WEIGHTS_TOGETHER", "EXACT", "NO_EXCHANGE"):
    _own(f"TE_FAST_{_name}")
_own("TE_FAST_OWN_GEMM", ("0", "1", "grouped"))

NVFP4_DISABLE_RHT = _flag("NVTE_NVFP4_DISABLE_RHT")
NVFP4_DISABLE_STOCHASTIC_ROUNDING = _flag("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
NVFP4_DISABLE_2D_QUANTIZATION = _flag("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
NVFP4_ROW_SCALED_ACTIVATION = _flag("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
NVFP4_4OVER6 = os.environ.get("NVTE_NVFP4_4OVER6", "none")
NVFP4_4OVER6_E4M3_USE_256 = os.environ.get("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all")
NVFP4_4OVER6_ERR_MODE = os.environ.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper()


def attention_backends() -> tuple[bool, bool, bool]:
    """Return whether flash attention, other fused kernels and the plain formula may be taken.

    Read whenever a module is made: Megatron sets the variables after it has imported everything.
    """
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    flash, fused, unfused = (os.environ.get(name, "1") != "0" for name in names)
    return flash, fused, unfused


def attention_is_deterministic() -> bool:
    """Return whether attention must give the same bits in every run; read as :func:`attention_backends`."""
    return os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


@cache
def nvtx_is_enabled() -> bool:
    """Return whether NVTX ranges are made; read when the first range is asked for."""
    return _flag("NVTE_NVTX_ENABLED")
