"""States of delayed scaling as Transformer Engine pickles them.

Python's own writer would name te_fast's recipe classes, and needs classes to be importable. So this module writes the
opcodes for Transformer Engine's classes itself; only plain values go through Python's writer.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from te_fast.recipe import DelayedScaling
    from te_fast.state.extra_state import ExtraState

_RECIPE_MODULE = "transformer_engine.common.recipe"
_KEYS = {
    "forward": ("scale_fwd", "amax_history_fwd"),
    "backward": ("scale_bwd", "amax_history_bwd"),
}
_PROTOCOL = 3
_RECIPE_FIELDS = (
    "margin",
    "amax_history_len",
    "amax_compute_algo",
    "reduce_amax",
    "fp8_dpa",
    "fp8_mha",
)


def write(state: ExtraState) -> torch.Tensor:
    """Write the state of a layer or of an op, chosen by the number of tensors.

    Parameters
    ----------
    state : ExtraState
        State of a layer, which has three tensors per GEMM forward and two backward, or of an operation of ``te.ops``.

    Returns
    -------
    torch.Tensor
        CPU bytes.
    """
    forward, backward = state.scale_fwd.numel(), state.scale_bwd.numel()
    gemms = backward // 2
    is_layer = gemms > 0 and (forward, backward) == (3 * gemms, 2 * gemms)
    data = layer_state(state) if is_layer else op_state(state)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def layer_state(state: ExtraState) -> bytes:
    """Write the state of a layer.

    Parameters
    ----------
    state : ExtraState
        Scales and histories, in the layer's order of tensors.
    """
    variables = {"num_gemms": state.scale_fwd.numel() // 3, "fp8_checkpoint": True}
    parts = {"recipe": _recipe(state.recipe)}
    for keys in _KEYS.values():
        parts.update(_tensors(state, keys))
    return _pickled({**parts, "extra_fp8_variables": _fragment(variables)})


def op_state(state: ExtraState) -> bytes:
    """Write the state of an op of ``transformer_engine.pytorch.ops``, for each direction that has tensors.

    Parameters
    ----------
    state : ExtraState
        Scales and histories.
    """
    directions = {}
    for direction, keys in _KEYS.items():
        if getattr(state, keys[0]).numel():
            parts = {"recipe": _recipe(state.recipe), **_tensors(state, keys)}
            parts["extra_fp8_variables"] = _fragment({})
            directions[direction] = _dictionary(parts)
    return _pickled(directions)


def _pickled(fragments: Mapping[str, bytes]) -> bytes:
    return bytes((0x80, _PROTOCOL)) + _dictionary(fragments) + pickle.STOP


def _tensors(state: ExtraState, keys: tuple[str, ...]) -> dict[str, bytes]:
    return {key: _tensor(getattr(state, key)) for key in keys}


def _tensor(tensor: torch.Tensor) -> bytes:
    """Return the opcodes of a tensor; ``pickle`` would write the names of Megatron-LM's replacements of torch."""
    plain = tensor.detach().cpu().float().clone(memory_format=torch.contiguous_format)
    stored = io.BytesIO()
    torch.save(plain._typed_storage(), stored, _use_new_zipfile_serialization=False)
    load = _global("_load_from_bytes", "torch.storage") + _fragment(stored.getvalue())
    rest = (0, tuple(plain.shape), plain.stride(), False)
    return (
        _global("_rebuild_tensor_v2", "torch._utils")
        + (pickle.MARK + load + pickle.TUPLE1 + pickle.REDUCE)
        + b"".join(map(_fragment, rest))
        + (_global("OrderedDict", "collections") + pickle.EMPTY_TUPLE + pickle.REDUCE)
        + (pickle.TUPLE + pickle.REDUCE)
    )


def _global(name: str, module: str = _RECIPE_MODULE) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _recipe(recipe: DelayedScaling) -> bytes:
    helper = _global("_FormatHelper") + _fragment(tuple(recipe.fp8_format.value)) + pickle.NEWOBJ
    number_format = _global("Format") + helper + pickle.TUPLE1 + pickle.REDUCE
    values = {name: getattr(recipe, name) for name in _RECIPE_FIELDS}
    values.update(scaling_factor_compute_algo=None, backward_override=None)
    if callable(recipe.amax_compute_algo):
        # Users' algorithms cannot be written; a loaded recipe has the default instead.
        values["amax_compute_algo"] = "max"
    fields = {name: _fragment(value) for name, value in values.items()}
    fields["fp8_format"] = number_format
    made = _global("DelayedScaling") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return made + _dictionary(fields) + pickle.BUILD


def _fragment(value: Any) -> bytes:
    """Return the opcodes of one object, without the pickle's head and end.

    Fragments use the same memo numbers, each only within itself.
    """
    return pickle.dumps(value, protocol=_PROTOCOL)[2:-1]


def _dictionary(fragments: Mapping[str, bytes]) -> bytes:
    items = b"".join(_fragment(key) + item for key, item in fragments.items())
    return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
