"""The state of delayed scaling as the pickle that Transformer Engine's loader reads.

Objects of its classes are named, never made: the bytes say what its loader is to make. So writing needs no
Transformer Engine, and runs nothing.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from te_fast.recipe import DelayedScaling
    from te_fast.state.extra_state import ExtraState

_RECIPES = "transformer_engine.common.recipe"
_RECIPE_FIELDS = ("margin", "amax_history_len", "reduce_amax", "fp8_dpa", "fp8_mha")
_DIRECTIONS = {
    "forward": ("scale_fwd", "amax_history_fwd"),
    "backward": ("scale_bwd", "amax_history_bwd"),
}


def write(state: ExtraState) -> torch.Tensor:
    """Write a state for Transformer Engine.

    Parameters
    ----------
    state : ExtraState
        Of a layer, which has three tensors a GEMM forward and two backward, or of an operation of ``te.ops``, whose
        state is kept by direction.

    Returns
    -------
    torch.Tensor
        CPU bytes.
    """
    forward, backward = state.scale_fwd.numel(), state.scale_bwd.numel()
    gemms = backward // 2
    is_layer = gemms > 0 and (forward, backward) == (3 * gemms, 2 * gemms)
    if is_layer:
        keys = [key for pair in _DIRECTIONS.values() for key in pair]
        items = _part(state, keys, {"num_gemms": gemms})
    else:
        items = {
            mode: _dictionary(_part(state, keys, {}))
            for mode, keys in _DIRECTIONS.items()
            if getattr(state, keys[0]).numel()
        }
    data = b"\x80\x03" + _dictionary(items) + b"."
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _part(state: ExtraState, keys: Any, extra: dict[str, int]) -> dict[str, bytes]:
    tensors = {key: _opcodes(getattr(state, key).detach().cpu().clone()) for key in keys}
    return {"recipe": _recipe(state.recipe)} | tensors | {"extra_fp8_variables": _opcodes(extra)}


def _recipe(recipe: DelayedScaling) -> bytes:
    """Opcodes that make a recipe without its constructor, and set its fields."""
    algorithm = recipe.amax_compute_algo
    values: dict[str, Any] = {name: getattr(recipe, name) for name in _RECIPE_FIELDS}
    # Algorithms of the user's own cannot be written; they come back as the default.
    values["amax_compute_algo"] = algorithm if isinstance(algorithm, str) else "max"
    values |= {"scaling_factor_compute_algo": None, "backward_override": None}
    fields = {name: _opcodes(value) for name, value in values.items()}
    helper = b"c" + f"{_RECIPES}\n_FormatHelper\n".encode()
    made = helper + _opcodes(tuple(recipe.fp8_format.value)) + b"\x81"
    fields["fp8_format"] = b"c" + f"{_RECIPES}\nFormat\n".encode() + made + b"\x85R"
    return b"c" + f"{_RECIPES}\nDelayedScaling\n".encode() + b")\x81" + _dictionary(fields) + b"b"


def _opcodes(value: Any) -> bytes:
    """Opcodes of one object, without the pickle's head and end. Each uses memo numbers for itself alone."""
    return pickle.dumps(value, protocol=3)[2:-1]


def _dictionary(items: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(_opcodes(key) + item for key, item in items.items()) + b"u"
