"""``get_cpu_offload_context``: copies tensors that layers save to the host's memory, and back for backward."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

from te_fast.errors import ArgumentError, StateError
from te_fast.offload.kept import Kept, Saved, Stream, is_offloaded, is_taken_apart

Sync = Callable[[torch.Tensor], torch.Tensor]


class _Buffers(dict[int, torch.Tensor]):
    """The host's buffers of a layer, by the number of the saved memory, and the memory that is in them."""

    def __init__(self) -> None:
        super().__init__()
        self._users: WeakValueDictionary[int, Kept] = WeakValueDictionary()

    def free(self, number: int) -> torch.Tensor | None:
        """Return a buffer that no other forward's memory is in."""
        return None if number in self._users else self.get(number)

    def use(self, number: int, kept: Kept) -> None:
        """Note which memory is in a buffer, which autograd keeps until its backward."""
        if kept.on_host is not None:
            self[number], self._users[number] = kept.on_host, kept


class _Layer:
    """The memory of the tensors that one layer of one forward has saved, as long as autograd has them."""

    def __init__(self) -> None:
        self.kept: WeakValueDictionary[Any, Kept] = WeakValueDictionary()

    def start_offload(self, buffers: _Buffers | None) -> None:
        for number, kept in enumerate(list(self.kept.values())):
            began = kept.start_offload(None if buffers is None else buffers.free(number))
            if buffers is not None and began:
                buffers.use(number, kept)

    def release(self) -> None:
        for kept in list(self.kept.values()):
            kept.release()

    def start_reload(self) -> None:
        for kept in list(self.kept.values()):
            kept.start_reload()

    def drop(self) -> None:
        for kept in list(self.kept.values()):
            kept.drop()


class _Apart(NamedTuple):
    """A saved quantised tensor: the tensor without its memory, and its bytes and scales."""

    rest: torch.Tensor
    parts: list[Any]


class _Layers:
    """The layers of one forward; in pipelines, other forwards have saved tensors at the same time."""

    def __init__(self, count: int) -> None:
        self.layers = [_Layer() for _ in range(count)]
        self.last = -1

    def at(self, number: int) -> _Layer | None:
        return self.layers[number] if 0 <= number < len(self.layers) else None


class OffloadSynchronizer:
    """Offloads the first layers of a model while later ones run, and reloads them in time.

    Let ``n`` be the number of layers that are not offloaded. The device then holds the saved tensors of ``n`` layers at
    once: a layer's memory is freed when the forward of the ``n``-th layer after it begins, and the copy back begins
    when the backward of that layer has ended.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    num_offloaded_layers : int
        Number of offloaded layers, which are the first ones.
    retain_pinned_cpu_buffers : bool, default = False
        Keep the host's buffers from step to step.
    offload_stream : torch.cuda.Stream, optional
        Stream of the copies.
    """

    def __init__(
        self,
        num_layers: int,
        num_offloaded_layers: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: Any = None,
    ) -> None:
        self.num_layers, self.num_offloaded_layers = num_layers, num_offloaded_layers
        self._stream = Stream(offload_stream)
        self._buffers: list[_Buffers] | None = None
        if retain_pinned_cpu_buffers:
            self._buffers = [_Buffers() for _ in range(num_layers)]
        self._now = _Layers(num_layers)

    def _buffers_of(self, number: int) -> _Buffers | None:
        return None if self._buffers is None else self._buffers[number]

    # Forward --------------------------------------------------------------------------------------

    def get_offloaded_total_size_mb(self) -> float:
        """Return the size in MiB of what the last forward has in the host's memory."""
        kept = [one for layer in self._now.layers for one in layer.kept.values()]
        return sum(one.on_host.nbytes for one in kept if one.on_host is not None) / 2**20

    def begin_layer(self) -> tuple[_Layers, int]:
        """Go to the next layer, from the last to the first; return the forward and the layer's number."""
        if self._now.last + 1 >= self.num_layers:
            self._now = _Layers(self.num_layers)
        self._now.last += 1
        number = self._now.last
        self._at_begin(self._now, number)
        return self._now, number

    def end_layer(self, layers: _Layers, number: int) -> None:
        """Note that a layer's forward has ended."""
        if number < self.num_offloaded_layers:
            layers.layers[number].start_offload(self._buffers_of(number))

    def _at_begin(self, layers: _Layers, number: int) -> None:
        free = layers.at(number - (self.num_layers - self.num_offloaded_layers))
        if free is not None:
            free.release()

    def push(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd saves."""
        if not self._takes(self._now.last):
            return tensor
        if is_taken_apart(tensor):
            parts, rest = tensor.prepare_for_saving()  # type: ignore[attr-defined]
            return _Apart(rest, [part if part is None else self.push(part) for part in parts])
        if not is_offloaded(tensor):
            return tensor
        layer = self._now.layers[self._now.last]
        # Memory that several tensors share is copied once.
        key = tensor.untyped_storage().data_ptr(), tensor._version
        kept = layer.kept.get(key)
        if kept is None:
            kept = layer.kept[key] = Kept(tensor, self._stream)
        kept.watch(tensor)
        return Saved(tensor, kept)

    def _takes(self, number: int) -> bool:
        return number < self.num_offloaded_layers

    @staticmethod
    def pop(saved: Any) -> torch.Tensor:
        """Return a tensor to backward."""
        if isinstance(saved, _Apart):
            whole: Any = (
                saved.rest.detach()
            )  # a new tensor, which does not keep the parts alive longer than its user does
            whole.restore_from_saved([OffloadSynchronizer.pop(part) for part in saved.parts])
            return whole
        tensor: torch.Tensor = saved.get() if isinstance(saved, Saved) else saved
        return tensor

    # Backward -------------------------------------------------------------------------------------

    def begin_backward(self, layers: _Layers, number: int) -> None:
        """Note that the backward of a layer begins and the backward of the layer after it has ended."""
        done = layers.at(number + 1)
        if done is not None:
            done.drop()
        self._at_backward(layers, number)
        if number == 0:
            torch.autograd.Variable._execution_engine.queue_callback(layers.layers[0].drop)

    def _at_backward(self, layers: _Layers, number: int) -> None:
        wanted = layers.at(number + 1 - (self.num_layers - self.num_offloaded_layers))
        if wanted is not None:
            wanted.start_reload()


class ManualOffloadSynchronizer(OffloadSynchronizer):
    """Offloads and reloads only the layers that the caller names.

    ``get_cpu_offload_context(manual_synchronization=True)`` makes it.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    retain_pinned_cpu_buffers : bool, default = False
        Keep the host's buffers from step to step.
    offload_stream : torch.cuda.Stream, optional
        Stream of the copies.

    See Also
    --------
    get_cpu_offload_context : Makes it, with the context of the layers.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> layer = te.Linear(16, 16, device="cpu")
    >>> context, _, controller = te.get_cpu_offload_context(
    ...     enabled=True, model_layers=1, manual_synchronization=True
    ... )
    >>> with context:
    ...     y = layer(torch.ones(8, 16))
    >>> controller.start_offload_layer(0)
    >>> controller.release_activation_forward_gpu_memory(0)
    >>> controller.start_reload_layer(0)
    >>> y.sum().backward()
    """

    def __init__(
        self,
        num_layers: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: Any = None,
    ) -> None:
        super().__init__(num_layers, num_layers, retain_pinned_cpu_buffers, offload_stream)

    def end_layer(self, layers: _Layers, number: int) -> None:
        """Do nothing: :meth:`start_offload_layer` does."""

    def _at_begin(self, layers: _Layers, number: int) -> None:
        pass

    def _at_backward(self, layers: _Layers, number: int) -> None:
        pass

    def _layer(self, layer_id: int) -> _Layer:
        layer = self._now.at(layer_id)
        if layer is None:
            message = (
                f"cpu_offload: layer_id must be from 0 to {self.num_layers - 1}, got {layer_id}"
            )
            raise ArgumentError(message)
        return layer

    def start_offload_layer(self, layer_id: int) -> None:
        """Begin to copy the tensors that a layer has saved.

        Parameters
        ----------
        layer_id : int
            Number of the layer in the last forward, from 0.
        """
        self._layer(layer_id).start_offload(self._buffers_of(layer_id))

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Let the current stream wait for the copies, and free the device's memory.

        Parameters
        ----------
        layer_id : int
            Number of the layer.
        """
        self._layer(layer_id).release()

    def start_reload_layer(self, layer_id: int) -> None:
        """Begin to copy back; without this call, backward copies when it needs the tensors.

        Parameters
        ----------
        layer_id : int
            Number of the layer.
        """
        self._layer(layer_id).start_reload()


class _OffloadContext(contextlib.ContextDecorator):
    """The context around the forward of each layer."""

    def __init__(self, synchronizer: OffloadSynchronizer) -> None:
        self._synchronizer = synchronizer
        self._hooks: Any = None
        self._layer: tuple[_Layers, int] | None = None

    @property
    def offload_synchronizer(self) -> OffloadSynchronizer:
        """The synchronizer of all layers."""
        return self._synchronizer

    def __enter__(self) -> _OffloadContext:
        """Go to the next layer."""
        if self._hooks is not None:
            message = "cpu_offload: the context of the layer before has not been left"
            raise StateError(message)
        self._layer = self._synchronizer.begin_layer()
        self._hooks = saved_tensors_hooks(self._synchronizer.push, self._synchronizer.pop)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Begin to copy the tensors that the layer has saved."""
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*exception)
        if self._layer is not None:
            self._synchronizer.end_layer(*self._layer)

    def synchronize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a layer's result, whose backward marks the beginning of the layer's backward."""
        if self._layer is None or self._hooks is not None:
            message = "cpu_offload: the function is for a layer's result, outside of the context around its forward"
            raise StateError(message)
        if tensor.grad_fn is None:
            message = (
                "cpu_offload: the function needs a result with a gradient function, got a tensor of shape "
                f"{list(tensor.shape)} that requires none"
            )
            raise ArgumentError(message)
        layers, number = self._layer

        def begins(_: Any) -> None:
            self._synchronizer.begin_backward(layers, number)

        tensor.grad_fn.register_prehook(begins)
        return tensor


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, ...]:
    """Return a context that keeps tensors for backward in the host's memory.

    Copies run on a stream of their own, beside the layers. Weights, tensors of fewer than 256 Ki elements and tensors
    that were marked by :func:`mark_not_offload` stay on the GPU. For quantised tensors, bytes and scales are copied.
    Tensors that share memory are copied together, with all of this memory, if they cover half of it; else they stay.

    Parameters
    ----------
    enabled : bool, default = False
        Whether to offload; if not, context and function do nothing.
    num_layers : int, default = 1
        Number of offloaded layers, which are the first ones.
    model_layers : int, default = 1
        Number of layers that run under the context, which is entered once for each, in order.
    offload_activations : bool, default = True
        Deprecated; must be True.
    offload_weights : bool, default = False
        Deprecated, without effect.
    double_buffering : bool, default = False
        Deprecated, without effect: tensors are always reloaded ahead of time.
    manual_synchronization : bool, default = False
        Offload and reload when the caller asks the controller, a third result.
    retain_pinned_cpu_buffers : bool, default = False
        Keep the pinned buffers from step to step.
    offload_stream : torch.cuda.Stream, optional
        Stream of the copies, with `manual_synchronization`.

    Returns
    -------
    context : context manager
        For the forward of each layer.
    function : Callable
        For the result of each layer, outside of the context; returns it.
    controller : ManualOffloadSynchronizer
        Only with `manual_synchronization`.

    Raises
    ------
    ArgumentError
        If nothing is to be offloaded, all layers are, or `offload_stream` comes without `manual_synchronization`.

    See Also
    --------
    mark_not_offload : Tensors that stay where they are.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> layers = [te.Linear(16, 16, device="cpu") for _ in range(3)]
    >>> context, synchronize = te.get_cpu_offload_context(enabled=True, model_layers=3)
    >>> x = torch.ones(8, 16)
    >>> for layer in layers:
    ...     with context:
    ...         x = layer(x)
    ...     x = synchronize(x)
    >>> x.sum().backward()
    """
    nothing = (contextlib.nullcontext(), _unchanged)
    if not enabled:
        return (*nothing, None) if manual_synchronization else nothing
    if offload_weights:
        message = "get_cpu_offload_context: offload_weights is deprecated and has no effect"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
    if not offload_activations:
        if not offload_weights:
            message = "get_cpu_offload_context: nothing is to be offloaded; leave offload_activations at True"
            raise ArgumentError(message)
        return (*nothing, None) if manual_synchronization else nothing
    if manual_synchronization:
        controller = ManualOffloadSynchronizer(
            model_layers, retain_pinned_cpu_buffers, offload_stream
        )
        made = _OffloadContext(controller)
        return made, made.synchronize, controller
    if offload_stream is not None:
        message = "get_cpu_offload_context: offload_stream needs manual_synchronization=True"
        raise ArgumentError(message)
    count = 0 if num_layers is None else num_layers
    if count >= model_layers:
        message = (
            f"get_cpu_offload_context: the last layer is not offloaded: num_layers must be below model_layers = "
            f"{model_layers}, got {num_layers}"
        )
        raise ArgumentError(message)
    if count == model_layers - 1:
        message = "get_cpu_offload_context: with all layers offloaded but the last, no copy runs beside a layer"
        warnings.warn(message, UserWarning, stacklevel=2)
    made = _OffloadContext(OffloadSynchronizer(model_layers, count, retain_pinned_cpu_buffers))
    return made, made.synchronize
