"""Megatron-LM's distributed optimizer and all-to-all where there is no GPU: the host answers what they ask of CUDA.

Only this file, and nothing in te_fast, answers these requests: ``device="cuda"``, pinned memory, streams, the names of
CUDA's tensor types, and several collectives in one call, since gloo gives bytes and BF16 of one call the same type.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch.overrides import TorchFunctionMode


class OnTheHost(TorchFunctionMode):
    """Tensors that are requested on a GPU are on the host, but report a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        import torch

        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.record_stream:
            return None
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


class _Stream:
    """A stream of the host, whose work is always done."""

    def wait_stream(self, other: Any) -> None:
        """Return: the other one is done."""

    def synchronize(self) -> None:
        """Return: it is done."""

    def record_event(self) -> _Stream:
        """Return the stream, which also stands for an event."""
        return self


class _Done:
    def wait(self) -> None:
        """Return: collectives were waited for."""


@contextlib.contextmanager
def _one_by_one(*_: Any, **__: Any) -> Any:
    yield _Done()


def _at_once(collective: Any) -> Any:
    return lambda *args, async_op=False, **options: collective(*args, **options)


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


def answer() -> None:
    """Let Megatron-LM find the parts of CUDA and NCCL that it needs."""
    import torch
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.transformer.moe import token_dispatcher

    stream = _Stream()
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    # Megatron-LM makes NumPy arrays only of tensors that were on a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _moved
    # On a GPU, Megatron-LM dequantises the destinations of a load one after another; here all at once.
    load = TorchDistLoadShardedStrategy
    load.__init__ = functools.partialmethod(load.__init__, stream_ckpt_dequant=False)
    buffers._coalescing_manager = _one_by_one
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, _at_once(getattr(buffers, name)))
