"""Weights that are quantised tensors: makes them in modules, and keeps them quantised."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from te_fast.errors import StateError, UnsupportedError
from te_fast.recipe import Recipe
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.tensor.float8 import Float8Quantizer
from te_fast.tensor.hybrid_tensor import HybridQuantizedTensor
from te_fast.tensor.of_recipe import ONE, Stack, quantizer_of, slot_of
from te_fast.tensor.quantizer import Float8QuantizerBase
from te_fast.tensor.sharded import measure_together, reduce_maximum
from te_fast.tensor.storage import QuantizedTensorStorage
from te_fast.tensor.tensor import Float8TensorBase

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: A tensor's own attributes, as opposed to those that other libraries set.
_OWN = ("_value", "_quantizer", "_is_part", "_loaded")
#: Values in high precision of the weights of optimizers that were loaded, by the weights' quantizers.
_masters: WeakKeyDictionary[Float8Quantizer, weakref.ref[torch.Tensor]] = WeakKeyDictionary()


def is_quantized(parameter: Any) -> bool:
    """Tell whether a parameter is a quantised tensor."""
    return isinstance(parameter, Float8TensorBase)


def quantized_part(parameter: Any) -> Any:
    """Return a parameter that is a quantised tensor, or this rank's part of one that ranks share; None for others."""
    part = getattr(parameter, "_local_tensor", parameter)
    return part if is_quantized(part) else None


def settle_shard(parameter: Any) -> bool:
    """Let ranks measure their parts of a quantised weight together; tell whether a parameter is such a part.

    FSDP2 gathers the bytes of all ranks under one scale. A checkpoint may be loaded before the first gather.
    """
    part = getattr(parameter, "_local_tensor", None)
    if not isinstance(part, (Float8TensorBase, HybridQuantizedTensor)):
        return False
    part.__dict__.pop("_is_part", None)  # the rest of a shorter shard's memory is padding
    group = _group_of_shards(parameter)
    if group is not None:
        measure_together(part, group)
    return is_quantized(part)


def as_read(tensor: Any) -> Any:
    """Return a tensor as kernels read it: dequantised, if it is an IdentityTensor or a tensor of two values.

    Parameters
    ----------
    tensor : Any
        Any tensor; a plain or FP8 one returns as it is.
    """
    if isinstance(tensor, QuantizedTensorStorage) and not isinstance(tensor, Float8TensorBase):
        return tensor.dequantize()
    return tensor


def weight_quantizer(
    recipe: Recipe, state: DelayedScalingRecipeState | None, slot: int, stack: Stack = ONE
) -> Float8QuantizerBase:
    """Return the quantizer of a weight under a recipe.

    It makes the column layout if gradients are enabled.

    Parameters
    ----------
    recipe : Recipe
        Delayed, current or block scaling.
    state : DelayedScalingRecipeState, optional
        Scales of delayed scaling.
    slot : int
        The weight's index among them; for a stack, the index of its first value.
    stack : Stack
        Description of the values of experts' weights; one value by default.
    """
    usage = {"rowwise": True, "columnwise": torch.is_grad_enabled()}
    return quantizer_of(recipe, "weight", state, slot, **usage, stack=stack)


def point_at(parameter: Any, state: Any, slot: int, stack: Stack = ONE) -> None:
    """Let a weight of delayed scaling be quantised with a state's current scale tensor."""
    quantizer = parameter._quantizer
    if isinstance(quantizer, Float8Quantizer) and isinstance(state, DelayedScalingRecipeState):
        quantizer.scale, quantizer.amax = slot_of(state, slot, stack)


def note_master(parameter: Any, master: torch.Tensor) -> None:
    """Note the values in high precision that a rank's part of a loaded parameter is quantised from.

    Nothing happens unless ranks have parts that follow delayed scaling. A model may be loaded before its optimizer or
    after it, so the part's maximum is restored now, and again when scales are loaded.
    """
    quantizer = _quantizer_of_part(parameter)
    # A stack has a maximum for each of its experts.
    if isinstance(quantizer, Float8Quantizer) and quantizer.amax.numel() == 1:
        _masters[quantizer] = weakref.ref(master)
        _restore_maximum(quantizer)


def restore_maxima(module: torch.nn.Module) -> None:
    """Let the loaded histories of a module have the maxima of this rank's parts of its parameters.

    Until the end of the next forward's region reduces them, each rank has the maximum of its own part. A checkpoint has
    the maximum of one rank only, since all ranks write their scales under the same name.
    """
    for parameter in module.parameters(recurse=False):
        quantizer = _quantizer_of_part(parameter)
        if isinstance(quantizer, Float8Quantizer):
            _restore_maximum(quantizer)


def _quantizer_of_part(parameter: Any) -> Any:
    # to_local() returns another tensor, with a quantizer of its own.
    return getattr(getattr(parameter, "_local_tensor", None), "_quantizer", None)


def _restore_maximum(quantizer: Float8Quantizer) -> None:
    noted = _masters.get(quantizer)
    master = None if noted is None else noted()
    if master is None or master.numel() == 0:
        return
    with torch.no_grad():
        kept, own = quantizer.amax, master.abs().amax()
        # 0 says that a forward has used the weight since: its maximum is already in the history.
        kept.copy_(torch.where(kept > 0, torch.maximum(kept, own.to(kept)), kept))


def quantized_parameter(
    parameter: torch.Tensor, quantizer: Float8QuantizerBase, *, preserves: bool
) -> torch.nn.Parameter:
    """Return a quantised parameter with the attributes of a plain one.

    Parameters
    ----------
    parameter : torch.nn.Parameter
        Values.
    quantizer : Float8QuantizerBase
        The quantizer of the values.
    preserves : bool
        Also keep the values on the CPU.
    """
    values = parameter.detach()
    local = getattr(values, "_local_tensor", values)
    if local is not values:
        _check_is_no_stack(values)
        group = _group_of_shards(values)
        if group is not None:
            reduce_maximum(quantizer, group)
    with torch.no_grad():
        quantized = quantizer.quantize(local)
        if local is not values:
            quantized = _sharded_as(values, quantized)
    made: Any = torch.nn.Parameter(quantized, requires_grad=parameter.requires_grad)
    made.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in made.__dict__})
    if preserves:
        keep_init_value(getattr(made, "_local_tensor", made), local)
    return made


def _check_is_no_stack(whole: Any) -> None:
    if whole.dim() > 2:
        message = (
            "quantized_model_init: FSDP2 gathers no stack of experts' weights in FP8, got one of shape "
            f"{list(whole.shape)}; make the layer without single_grouped_weight, or without quantized_model_init"
        )
        raise UnsupportedError(message)


def _group_of_shards(whole: Any) -> Any:
    """Return the ranks that have shards of a weight; None if each rank has the whole weight."""
    mesh, shards = whole.device_mesh, [place.is_shard() for place in whole.placements]
    if not any(shards):
        return None
    return mesh.get_group(shards.index(True)) if sum(shards) == 1 else mesh._flatten().get_group()


def _sharded_as(whole: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with another local shard; FSDP2 shards before parameters have memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
    )


def keep_init_value(parameter: Any, values: torch.Tensor) -> None:
    """Keep the values that a weight was initialised with, on the CPU."""
    parameter._high_precision_init_val = values.to("cpu", copy=True)
    parameter.get_high_precision_init_val = types.MethodType(_get_init_value, parameter)
    parameter.clear_high_precision_init_val = types.MethodType(_clear_init_value, parameter)


def _get_init_value(parameter: Any) -> torch.Tensor | None:
    return getattr(parameter, "_high_precision_init_val", None)


def _clear_init_value(parameter: Any) -> None:
    if hasattr(parameter, "_high_precision_init_val"):
        del parameter._high_precision_init_val


def initialise_quantized(parameter: Any, init: Callable[[torch.Tensor], Any]) -> None:
    """Initialise a quantised weight, in high precision."""
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    init(values)
    parameter.quantize_(values)
    if _get_init_value(parameter) is not None:
        keep_init_value(parameter, values)


def check_recipe(parameter: Any, recipe: Recipe, owner: str, name: str) -> None:
    """Raise unless a recipe quantises weights as this weight is quantised.

    Raises
    ------
    StateError
        If it does not.
    """
    quantizer = parameter._quantizer
    expected = None if quantizer is None else quantizer._get_compatible_recipe()
    if expected is not None and not isinstance(recipe, expected):
        message = (
            f"{owner}: Recipe mismatch for {name}: it was quantised for {expected.__name__}, and the region's recipe "
            f"is {type(recipe).__name__}; give autocast the recipe of quantized_model_init"
        )
        raise StateError(message)


def keep_quantized(fn: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Apply a function of ``nn.Module._apply``, so that a quantised tensor stays quantised.

    ``module.bfloat16()`` and its kin change only the nominal type.
    """
    if not isinstance(tensor, Float8TensorBase):
        return fn(tensor)
    probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    if probe.dtype not in _FLOATS:
        return fn(tensor)
    made: Any = tensor
    if probe.device != tensor.device:
        moves = (
            tensor.to
            if not tensor.is_meta
            else lambda device: torch.empty_like(tensor, device=device)
        )
        made = moves(probe.device)
    return made if made.dtype == probe.dtype else made.to_dtype(probe.dtype)


def attributes_of(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return attributes that others have set on quantised parameters; replacing the tensors would lose them."""
    return {
        name: {key: value for key, value in parameter.__dict__.items() if key not in _OWN}
        for name, parameter in module._parameters.items()
        if parameter is not None and is_quantized(parameter)
    }


def restore_attributes(module: torch.nn.Module, kept: dict[str, dict[str, Any]]) -> None:
    """Set these attributes again."""
    for name, attributes in kept.items():
        parameter = module._parameters[name]
        if parameter is not None:
            parameter.__dict__.update(attributes)
