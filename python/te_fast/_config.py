"""Every environment variable that the Python side reads, read once, at import.

docs/reference/envvars.md says what each one means; the native side has ``config.rs``.
"""

from __future__ import annotations

import os


def _flag(name: str) -> bool:
    return os.environ.get(name, "0") == "1"


BACKWARD_OVERRIDE = os.environ.get("NVTE_BACKWARD_OVERRIDE")
DEBUG = _flag("TE_FAST_DEBUG")
POWER_2_SCALES = _flag("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
F32_BLOCK_SCALES = _flag("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
UNFUSED_UPDATE = _flag("NVTE_UNFUSED_FP8_UPDATE")

NVFP4_DISABLE_RHT = _flag("NVTE_NVFP4_DISABLE_RHT")
NVFP4_DISABLE_STOCHASTIC_ROUNDING = _flag("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
NVFP4_DISABLE_2D_QUANTIZATION = _flag("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
NVFP4_ROW_SCALED_ACTIVATION = _flag("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
NVFP4_4OVER6 = os.environ.get("NVTE_NVFP4_4OVER6", "none")
NVFP4_4OVER6_E4M3_USE_256 = os.environ.get("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all")
NVFP4_4OVER6_ERR_MODE = os.environ.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper()
