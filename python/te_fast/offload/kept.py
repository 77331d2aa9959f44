"""A tensor that autograd has saved, on its way to the host's memory and back."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import StateError
from te_fast.tensor.storage import QuantizedTensorStorage

#: Copies of smaller tensors would cost more than they free.
SMALLEST = 256 * 1024
#: Devices whose tensors are offloaded.
DEVICES = ("cuda",)
_MARK = "_TE_do_not_offload"


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Keep tensors on the GPU in every offloading context.

    Parameters
    ----------
    *tensors : torch.Tensor or None
        Tensors, quantised ones too.

    See Also
    --------
    te_fast.pytorch.get_cpu_offload_context : Moves all other tensors.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import mark_not_offload
    >>> mark_not_offload(torch.ones(2), None)
    """
    for tensor in tensors:
        if tensor is not None:
            setattr(tensor, _MARK, True)


def _may_leave(tensor: torch.Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    is_weight = isinstance(tensor, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter)
    return not is_weight and not hasattr(tensor, _MARK)


def is_taken_apart(tensor: torch.Tensor) -> bool:
    """Tell whether a saved tensor is a quantised one, whose bytes and scales are tensors to copy."""
    return isinstance(tensor, QuantizedTensorStorage) and _may_leave(tensor)


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Tell whether to copy a saved tensor: it must be large, on a GPU, dense, and not a weight."""
    return (
        tensor.device.type in DEVICES
        and tensor.numel() >= SMALLEST
        and _may_leave(tensor)
        and type(tensor) is torch.Tensor
        # Copies of tensors that are not dense would have other strides.
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


class Stream:
    """A stream for copies; tensors on the CPU have no stream, and are copied at once."""

    def __init__(self, stream: Any = None) -> None:
        if stream is None and torch.cuda.is_available():
            stream = torch.cuda.Stream()
        self._stream = stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy after the current stream's work; return an event after the copy."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the current stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


class Kept:
    """A saved tensor: on the device, in the host's memory, or both.

    Parameters
    ----------
    tensor : torch.Tensor
        The tensor, without a graph.
    stream : Stream
        Stream of the copies.
    """

    def __init__(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._stream = stream
        self._device = tensor.device
        self._version = tensor._version
        self._on_device: torch.Tensor | None = tensor
        self._on_host: torch.Tensor | None = None
        self._left: Any = None
        self._came: Any = None

    @property
    def on_host(self) -> torch.Tensor | None:
        """The copy in the host's memory."""
        return self._on_host

    def start_offload(self, buffer: torch.Tensor | None = None) -> None:
        """Begin to copy to the host's memory, pinned, into a buffer of an earlier step if it fits."""
        source = self._on_device
        if source is None or self._on_host is not None or source._version != self._version:
            return
        if buffer is None or _kind(buffer) != _kind(source):
            is_pinned = source.device.type == "cuda"
            buffer = torch.empty_like(source, device="cpu", pin_memory=is_pinned)
        self._on_host = buffer
        self._left = self._stream.copy(buffer, source)

    def release(self) -> None:
        """Free the device's memory after the copy out of it."""
        if self._on_host is not None and self._on_device is not None:
            self._stream.wait(self._left)
            self._on_device = None

    def start_reload(self) -> None:
        """Begin to copy back."""
        if self._on_device is not None or self._on_host is None:
            return
        # From the current stream's memory, which reads the tensor only after the copy.
        self._on_device = torch.empty_like(self._on_host, device=self._device)
        self._came = self._stream.copy(self._on_device, self._on_host)

    def get(self) -> torch.Tensor:
        """Return the tensor on the device, for work of the current stream.

        Raises
        ------
        StateError
            If it was modified before it was copied.
        """
        self.start_reload()
        self._wait()
        tensor = self._on_device
        if tensor is None or (self._on_host is None and tensor._version != self._version):
            message = (
                "cpu_offload: a tensor that backward needs has been modified in place since it was saved, before the "
                "end of its layer's forward"
            )
            raise StateError(message)
        return tensor

    def _wait(self) -> None:
        self._stream.wait(self._came)
        self._came = None

    def drop(self) -> None:
        """Drop the device's copy if the host has one; the next use copies it back."""
        if self._on_host is not None:
            self._wait()  # its memory belongs to the current stream again
            self._on_device = None
