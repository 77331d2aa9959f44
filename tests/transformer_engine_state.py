"""The state of delayed scaling as Transformer Engine writes it, for tests that read it."""

import pickle

import torch

from te_fast.state.extra_state import pack

KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
RECIPE_FIELDS = ("margin", "amax_compute_algo", "reduce_amax", "fp8_dpa", "fp8_mha")


def pack_layer(state):
    """Write a layer's state as Transformer Engine does, which reads it as a pickle."""
    if state is None:
        return pack(None)
    items = {"recipe": _recipe_fragment(state.recipe), **_tensor_fragments(state, KEYS)}
    items["extra_fp8_variables"] = _fragment({"num_gemms": state.scale_fwd.numel() // 3})
    return _pickled(items)


def pack_op(state):
    """Write an op's state as Transformer Engine does: a dictionary by direction."""
    if state is None:
        return pack(None)
    items = {}
    for mode, keys in (("forward", KEYS[:2]), ("backward", KEYS[2:])):
        if getattr(state, keys[0]).numel():
            parts = {"recipe": _recipe_fragment(state.recipe), **_tensor_fragments(state, keys)}
            parts["extra_fp8_variables"] = _fragment({})
            items[mode] = _dictionary(parts)
    return _pickled(items)


def _pickled(items):
    return torch.frombuffer(bytearray(b"\x80\x03" + _dictionary(items) + b"."), dtype=torch.uint8)


def _tensor_fragments(state, keys):
    return {key: _fragment(getattr(state, key).detach().cpu().clone()) for key in keys}


def _recipe_fragment(recipe):
    module = "transformer_engine.common.recipe"
    value = _fragment(tuple(recipe.fp8_format.value))
    number_format = f"c{module}\nFormat\nc{module}\n_FormatHelper\n".encode() + value + b"\x81\x85R"
    values = {name: getattr(recipe, name) for name in (*RECIPE_FIELDS, "amax_history_len")}
    values.update(scaling_factor_compute_algo=None, backward_override=None)
    if callable(recipe.amax_compute_algo):
        values["amax_compute_algo"] = "max"
    fields = {name: _fragment(item) for name, item in values.items()}
    fields["fp8_format"] = number_format
    return f"c{module}\nDelayedScaling\n".encode() + b")\x81" + _dictionary(fields) + b"b"


def _fragment(value):
    """Return the opcodes of one object, without the pickle's head and end.

    Fragments use the same memo numbers, each only for itself.
    """
    return pickle.dumps(value, protocol=3)[2:-1]


def _dictionary(fragments):
    return b"}(" + b"".join(_fragment(key) + item for key, item in fragments.items()) + b"u"
