"""States of models that ranks share, for ``torch.distributed.checkpoint``, as DTensors.

A layer's own state has a rank's shares as plain tensors, as in Transformer Engine. A writer of distributed checkpoints
takes plain tensors of several ranks for copies of one tensor, and keeps only one of them. DTensors can be loaded by any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_fast.errors import DtypeError, StateError, UnsupportedError
from te_fast.runtime.collectives import get_distributed_world_size
from te_fast.tensor.dtensors import sharded_like
from te_fast.tensor.tensor import Float8TensorBase

#: The end of the keys of delayed scaling's states.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a parameter.

    Attributes
    ----------
    dim : int
        The dimension along which ranks have equal shares.
    group : torch.distributed.ProcessGroup or None
        The ranks; None if one rank has the whole parameter.
    parts : int
        Number of matrices along that dimension; ranks have a share of each.
    is_summed : bool
        Ranks have whole tensors, whose sum is what counts. A checkpoint has the sum, and each rank loads an equal share
        of it, so that any number of ranks computes the same.
    """

    dim: int
    group: Any
    parts: int = 1
    is_summed: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 if self.group is None else get_distributed_world_size(self.group)


def shares_by_marks(module: torch.nn.Module, group: Any) -> dict[str, Share]:
    """Return the shares of a module's parameters, as they are marked for Megatron-LM."""
    return {
        name: Share(parameter.partition_dim, group)  # type: ignore[attr-defined]
        for name, parameter in module.named_parameters(recurse=False)
        if getattr(parameter, "tensor_model_parallel", False)
    }


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        message = f"{function}: model must be a torch.nn.Module, got {type(model).__name__}"
        raise DtypeError(message)


def _each(model: torch.nn.Module) -> Iterator[tuple[str, str, Share | None, Any]]:
    """Return each key of a model's state, its key in a checkpoint of all ranks, its share, and its value."""
    shares: dict[str, Share] = {}
    renamed: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        begin = f"{prefix}." if prefix else ""
        shares_of = getattr(module, "_shares_of_parameters", None)
        if shares_of is not None:
            shares |= {begin + name: share for name, share in shares_of().items()}
        names_of = getattr(module, "_names_of_all_ranks", None)
        if names_of is not None:
            renamed |= {begin + name: begin + other for name, other in names_of().items()}
    for name, value in model.state_dict().items():
        share = shares.get(name)
        if share is not None and share.ranks == 1 and share.parts == 1:
            share = None  # one rank, or the ranks of FSDP2, have the whole
        yield name, renamed.get(name, name), share, value


def _in_high_precision(value: Any) -> Any:
    """Return a quantised tensor, or one that FSDP2 has sharded, in high precision, and all other values as they are."""
    local = getattr(value, "_local_tensor", value)
    if not isinstance(local, Float8TensorBase):
        return value
    return sharded_like(value, local.dequantize())


def _shared(name: str, value: torch.Tensor, share: Share) -> torch.Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    if isinstance(value, DTensor):
        what = "is a share of tensor parallelism" if share.ranks > 1 else "is of two matrices"
        message = (
            f"sharded_state_dict: {name} {what} and sharded by FSDP2, too, which is not supported yet; gather it first "
            "(fully_shard's unshard)"
        )
        if share.ranks == 1:
            message += (
                ", or save a model without tensor parallelism by get_model_state_dict of torch"
            )
        raise UnsupportedError(message)
    if share.is_summed:
        return _sum(value, share)
    dim = share.dim
    if share.parts > 1:
        value = value.view(*value.shape[:dim], share.parts, -1, *value.shape[dim + 1 :])
        dim += 1
    if share.ranks == 1:
        return value
    mesh = DeviceMesh.from_group(share.group, value.device.type)
    return DTensor.from_local(value, mesh, [Shard(dim)], run_check=False)


def _sum(value: torch.Tensor, share: Share) -> torch.Tensor:
    whole = value.detach().to(torch.float32, copy=True)
    torch.distributed.all_reduce(whole, group=share.group)
    return whole.to(value.dtype)


def sharded_state_dict(model: torch.nn.Module, *, scaling_states: bool = True) -> dict[str, Any]:
    """Return a model's state for ``torch.distributed.checkpoint``, with shared parameters as DTensors.

    ``model.state_dict()`` has a rank's own shares under the same keys on all ranks: ``dcp.save`` takes such tensors for
    copies, and keeps only one rank's. FP8 weights are converted to high precision, so that models in BF16 can load
    them, too. Experts of :class:`te_fast.pytorch.MoE` have their numbers among those of all ranks. The two matrices of
    a gated MLP are ``(2, ffn_hidden_size, hidden_size)``.

    Parameters
    ----------
    model : torch.nn.Module
        A model with layers of te_fast, and others. The states of delayed scaling are assumed to be the same on all
        ranks, which is true if `amax_reduction_group` has these ranks.
    scaling_states : bool, default = True
        Include the states of delayed scaling (``_extra_state``), which a checkpoint of a model in BF16 lacks.

    Returns
    -------
    dict
        Tensors in the memory of the parameters, except FP8 weights, which are copies, and the biases of row-parallel
        ``ops.Linear``: each rank adds its own, so the state has their sum.

    Raises
    ------
    UnsupportedError
        If a share, or a parameter of two matrices, is also sharded by FSDP2.
    DtypeError
        If the model is no module.

    See Also
    --------
    load_sharded_state_dict : The other way.

    Examples
    --------
    >>> import te_fast
    >>> import te_fast.pytorch as te
    >>> layer = te.LayerNormMLP(32, 64, activation="swiglu", device="cpu")
    >>> tuple(te_fast.sharded_state_dict(layer)["fc1_weight"].shape)
    (2, 64, 32)
    """
    _check_model("sharded_state_dict", model)
    state: dict[str, Any] = {}
    for name, key, share, value in _each(model):
        if not scaling_states and key.endswith(_EXTRA_STATE):
            continue
        value = _in_high_precision(value)
        state[key] = value if share is None else _shared(name, value, share)
    return state


def load_sharded_state_dict(
    model: torch.nn.Module, state: Mapping[str, Any], strict: bool = True
) -> Any:
    """Load a state from :func:`sharded_state_dict`, which ``dcp.load`` has filled, into a model.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Its FP8 weights are quantised again.
    state : dict
        Of :func:`sharded_state_dict`.
    strict : bool, default = True
        As of ``load_state_dict``.

    Returns
    -------
    NamedTuple
        As of ``load_state_dict``.

    Raises
    ------
    StateError
        If a share has another number of elements than the model's.
    DtypeError
        If the model is no module, or the state no mapping.

    See Also
    --------
    sharded_state_dict : What is loaded.

    Examples
    --------
    >>> import te_fast
    >>> import te_fast.pytorch as te
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> te_fast.load_sharded_state_dict(layer, te_fast.sharded_state_dict(layer))
    <All keys matched successfully>
    """
    from torch.distributed.tensor import DTensor

    _check_model("load_sharded_state_dict", model)
    if not isinstance(state, Mapping):
        message = f"load_sharded_state_dict: state must be a mapping of names to tensors, got {type(state).__name__}"
        raise DtypeError(message)
    found = dict(state)
    own: dict[str, Any] = {}
    for name, key, share, value in _each(model):
        if key not in found:
            if key.endswith(_EXTRA_STATE):  # the model keeps its own state
                own[name] = value
            continue
        given = found.pop(key)
        given = given.to_local() if isinstance(given, DTensor) and share is not None else given
        if share is not None and given.numel() != value.numel():
            message = (
                f"load_sharded_state_dict: this rank's share of {key} must have the shape {list(value.shape)}, got "
                f"{list(given.shape)}; fill a state of sharded_state_dict of this very model by dcp.load"
            )
            raise StateError(message)
        own[name] = given if share is None else given.reshape(value.shape)
        if share is not None and share.is_summed:
            own[name] = own[name] / share.ranks
    return model.load_state_dict(own | found, strict=strict)
