"""The memory of tensors that autograd has saved, on its way to the host and back."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import StateError
from te_fast.runtime.parts import DO_NOT_OFFLOAD
from te_fast.tensor.storage import QuantizedTensorStorage

#: Copies of smaller tensors would cost more than they free.
SMALLEST = 256 * 1024
#: Devices whose tensors are offloaded.
DEVICES = ("cuda",)


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
            setattr(tensor, DO_NOT_OFFLOAD, True)


def _may_leave(tensor: torch.Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    is_weight = isinstance(tensor, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter)
    return not (is_weight or hasattr(tensor, DO_NOT_OFFLOAD) or hasattr(base, DO_NOT_OFFLOAD))


def is_taken_apart(tensor: torch.Tensor) -> bool:
    """Tell whether a saved tensor is a quantised one, whose bytes and scales are tensors to copy."""
    return isinstance(tensor, QuantizedTensorStorage) and _may_leave(tensor)


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Tell whether to copy a saved tensor: it and its memory must be large, on a GPU, and no weight's."""
    return (
        tensor.device.type in DEVICES
        and tensor.numel() >= SMALLEST
        and _may_leave(tensor)
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
        # An expanded tensor has less memory than elements.
        and tensor.untyped_storage().nbytes() >= SMALLEST * tensor.element_size()
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


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

    def current(self) -> Any:
        """Return the current stream; None without one."""
        return None if self._stream is None else torch.cuda.current_stream()

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let a stream, by default the current one, wait for a copy."""
        if event is not None:
            (stream or torch.cuda.current_stream()).wait_event(event)


class Kept:
    """The memory of saved tensors: on the device, on the host, or both.

    Tensors of one layer that share memory share one of these: queries, keys and values of one product, or attention's
    output and the input of the projection. The whole memory is copied if they cover half of it; else it stays.

    Parameters
    ----------
    tensor : torch.Tensor
        One of the tensors.
    stream : Stream
        Stream of the copies.
    """

    #: The stream that frees the memory of a copy back, until it has waited for the copy.
    _frees: Any = None

    def __init__(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._stream = stream
        self._device = tensor.device
        # The saved tensors with their versions, which the bytes do not share.
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._on_device: torch.Tensor | None = _bytes_of(tensor)
        self._on_host: torch.Tensor | None = None
        self._left: Any = None
        self._came: Any = None

    def __del__(self) -> None:
        """Let memory that is still written be used again only after the copy: backward may end early, by an error."""
        self._own_again()

    def _own_again(self) -> None:
        """Let the stream that the memory belongs to wait for a copy back that nobody has waited for."""
        if self._frees is not None:
            self._stream.wait(self._came, self._frees)
            self._frees = None

    @property
    def on_host(self) -> torch.Tensor | None:
        """The copy in the host's memory."""
        return self._on_host

    def watch(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was saved, so that later writes to it are seen."""
        self._watched.append((tensor.detach(), tensor._version))

    def _was_written(self) -> bool:
        return any(tensor._version != version for tensor, version in self._watched)

    def _is_covered(self, size: int) -> bool:
        # Other parts may belong to tensors that keep the memory: samples of one batch, for instance.
        parts = {(t.storage_offset(), t.dtype, t.shape, t.stride()): t for t, _ in self._watched}
        return 2 * sum(t.numel() * t.element_size() for t in parts.values()) >= size

    def start_offload(self, buffer: torch.Tensor | None = None) -> bool:
        """Begin to copy to the host's memory, pinned, into a buffer of an earlier step if it fits; tell whether."""
        source = self._on_device
        if source is None or self._on_host is not None or self._was_written():
            return False
        if not self._is_covered(source.numel()):
            return False
        if buffer is None or buffer.shape != source.shape:
            is_pinned = source.device.type == "cuda"
            buffer = torch.empty_like(source, device="cpu", pin_memory=is_pinned)
        self._on_host = buffer
        self._left = self._stream.copy(buffer, source)
        return True

    def release(self) -> None:
        """Free the device's memory after the copy out of it."""
        if self._on_host is not None and self._on_device is not None:
            self._stream.wait(self._left)
            self._own_again()  # a caller may release what it has begun to copy back
            self._on_device = None
            self._watched.clear()

    def start_reload(self) -> None:
        """Begin to copy back."""
        if self._on_device is not None or self._on_host is None:
            return
        # From the current stream's memory, which reads the tensor only after the copy.
        self._on_device = torch.empty_like(self._on_host, device=self._device)
        self._frees = self._stream.current()
        self._came = self._stream.copy(self._on_device, self._on_host)

    def get(self) -> torch.Tensor:
        """Return the bytes on the device, for work of the current stream.

        Raises
        ------
        StateError
            If they were modified before they were copied.
        """
        if self._on_host is not None and self._was_written():
            self.release()  # the host has what was saved
        self.start_reload()
        self._wait()
        whole = self._on_device
        if whole is None or self._was_written():
            message = (
                "cpu_offload: a tensor that backward needs has been modified in place since it was saved, before the "
                "end of its layer's forward"
            )
            raise StateError(message)
        return whole

    def _wait(self) -> None:
        self._stream.wait(self._came)  # each stream that reads it
        if self._frees is not None and self._stream.current() == self._frees:
            self._frees = None

    def drop(self) -> None:
        """Drop the device's copy if the host has one; the next use copies it back."""
        if self._on_host is not None:
            self._wait()
            self._own_again()  # the current stream may be another than that of the copy's memory
            self._on_device = None
            self._watched.clear()


class Saved:
    """A saved tensor: its memory, and its place in there.

    Parameters
    ----------
    tensor : torch.Tensor
        The tensor.
    kept : Kept
        Its memory.
    """

    def __init__(self, tensor: torch.Tensor, kept: Kept) -> None:
        self._kept, self._dtype = kept, tensor.dtype
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def get(self) -> torch.Tensor:
        """Return the tensor on the device, for work of the current stream; raises as `Kept.get` does."""
        whole = self._kept.get()
        tensor = torch.empty(0, dtype=self._dtype, device=whole.device)
        return tensor.set_(whole.untyped_storage(), *self._place)
