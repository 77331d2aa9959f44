"""Transformer Engine's checks of models under torch's first FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast.errors import DtypeError, StateError


def _is_ours(module: torch.nn.Module) -> bool:
    # With te_fast_alias, classes have the second name.
    names = ("te_fast.", "transformer_engine.")
    return any(kind.__module__.startswith(names) for kind in type(module).__mro__)


def has_te_modules(network: torch.nn.Module | Callable[..., Any]) -> bool:
    """Return whether a network has te_fast's modules; True for objects that are not modules, since they are opaque.

    Parameters
    ----------
    network : torch.nn.Module or Callable
        The network.

    See Also
    --------
    te_fast.pytorch.distributed.prepare_te_modules_for_fsdp : checks them.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> te.distributed.has_te_modules(torch.nn.Sequential(te.Linear(16, 16, device="cpu")))
    True
    >>> te.distributed.has_te_modules(torch.nn.Linear(16, 16))
    False
    """
    return not isinstance(network, torch.nn.Module) or any(map(_is_ours, network.modules()))


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Check that a model under ``FullyShardedDataParallel`` can be trained.

    Transformer Engine shares FP8 copies of weights, and saved activations, among the ranks here. te_fast shares
    neither: an FP8 copy that the optimizer will change is freed in the backward of its layer, and activations belong to
    a rank's own data.

    Parameters
    ----------
    fsdp_root : torch.distributed.fsdp.FullyShardedDataParallel
        A model.

    Raises
    ------
    DtypeError
        If it is not wrapped.
    StateError
        If a layer within has FP8 weights: FSDP2 (``fully_shard``) takes these.

    See Also
    --------
    te_fast.pytorch.distributed.checkpoint : saves memory between forward and backward.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> from torch.distributed.fsdp import FullyShardedDataParallel
    >>> model = FullyShardedDataParallel(te.Linear(16, 16))  # doctest: +SKIP
    >>> te.distributed.prepare_te_modules_for_fsdp(model)  # doctest: +SKIP
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(fsdp_root, FullyShardedDataParallel):
        kind = type(fsdp_root).__name__
        message = f"prepare_te_modules_for_fsdp: expected a FullyShardedDataParallel, got {kind}"
        raise DtypeError(message)
    for module in fsdp_root.modules():
        if getattr(module, "primary_weights_in_fp8", False):
            message = (
                f"prepare_te_modules_for_fsdp: {type(module).__name__} has FP8 weights, which FullyShardedDataParallel "
                "cannot shard; use torch.distributed.fsdp.fully_shard, or make the model without quantized_model_init"
            )
            raise StateError(message)
