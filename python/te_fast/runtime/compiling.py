"""Tells whether a compiler traces native calls as operators, and marks tensors for it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.compiler import is_compiling

_Key = torch._C._TorchDispatchModeKey
_TRACERS = (_Key.FAKE, _Key.PROXY, _Key.FUNCTIONAL)

#: Whether ``torch.autocast`` is on for any kind of device; some releases lack the cheap function.
is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

#: The first release of torch whose traces read attributes of native objects.
CAN_COMPILE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

#: Types of tensors that are no wrappers and no stand-ins.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_in_graph() -> bool:
    """Tell whether this code is traced. Older releases break the graph at a native call, and run it."""
    return CAN_COMPILE and is_compiling()


def is_traced(x: Any) -> bool:
    """Tell whether a call is traced, by the tensor's own tracer or one that watches all operators."""
    if is_in_graph():
        return True
    if type(x) in PLAIN and not torch._C._len_torch_dispatch_stack():
        return False
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(x, fake.FakeTensor):
        return True
    if not torch._C._len_torch_dispatch_stack():  # all modes, including those of tracers
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def is_watched(x: Any) -> bool:
    """Tell whether a call is traced, as :func:`is_traced`, before torch 2.8, too."""
    return is_compiling() or is_traced(x)


def behind(module: Any) -> Any:
    """Return the module that a stand-in of ``torch.export`` stands for, which the caller may keep.

    Where a model has a module in two places, the trace calls stand-ins. They hold the trace and its graph.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    stand_in = getattr(tracer, "_AttrProxy", None)
    return module if stand_in is None or not isinstance(module, stand_in) else module.get_base()


def is_unseen(*tensors: torch.Tensor) -> bool:
    """Tell whether only autograd observes computations with the tensors: no compiler, no mode, no subclass."""
    return not (
        is_compiling()
        or torch._C._len_torch_dispatch_stack()  # tracers, and others that watch all operators
        or torch._C._are_functorch_transforms_active()
        or any([type(tensor) not in PLAIN for tensor in tensors])
    )


def is_exporting() -> bool:
    """Tell whether ``torch.export`` traces. A trace calls this function; torch's own is always true in traced code."""
    return CAN_COMPILE and torch.compiler.is_exporting()


is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def static(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as static for CUDA graphs, so that they read and write it in place."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.mark_static_address(tensor, guard=False)
    return tensor
