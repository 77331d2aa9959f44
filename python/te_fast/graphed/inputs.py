"""The static inputs of a run: tensors that its graphs read, and constants."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from te_fast.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    StateError,
)

#: Keywords of a call that the callable itself does not take.
_STREAM, _EVENT, _FIRST = "cuda_graph_stream", "cuda_graph_event", "is_first_microbatch"


class Inputs:
    """The arguments that a callable is captured with, and that its calls must have.

    Parameters
    ----------
    name : str
        The callable in messages.
    args : tuple
        Sample tensors, or containers of them.
    kwargs : dict
        Keyword arguments; values that are not tensors are constants of the graph.
    taken : set of int
        Identities of tensors that other inputs have: two inputs on the same memory would each get the gradient of both.

    Raises
    ------
    DtypeError
        If `args` are not tensors.
    """

    def __init__(
        self, name: str, args: Any, kwargs: dict[str, Any], taken: set[int] | None = None
    ) -> None:
        if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
            message = (
                f"make_graphed_callables: sample_args of {name} must be a tuple and sample_kwargs a dict, got a "
                f"{type(args).__name__} and a {type(kwargs).__name__}"
            )
            raise DtypeError(message)
        self.name = name
        self.keys = tuple(kwargs)
        leaves, self._spec = tree_flatten((tuple(args), dict(kwargs)))
        for leaf in tree_flatten(tuple(args))[0]:
            if not isinstance(leaf, torch.Tensor):
                message = (
                    f"make_graphed_callables: sample_args of {name} must be tensors, got {leaf!r}; pass constants as "
                    "sample_kwargs"
                )
                raise DtypeError(message)
        self._is_flat = all(isinstance(arg, torch.Tensor) for arg in args) and len(leaves) == len(
            args
        ) + len(kwargs)
        #: The index of ``is_first_microbatch`` among the leaves.
        self._first: int | None = None
        if _FIRST in kwargs:
            before = [kwargs[key] for key in self.keys[: self.keys.index(_FIRST)]]
            self._first = len(tree_flatten((tuple(args), before))[0])
        seen = set(taken or ())
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) in seen:
                leaves[index] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            seen.add(id(leaf))
        self.leaves: list[Any] = leaves
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the capture."""
        args, kwargs = tree_unflatten(self.leaves, self._spec)
        return args, kwargs

    def signature(self) -> Hashable:
        """Return a signature; inputs with the same signature can share memory."""
        kinds = [
            (leaf.shape, leaf.dtype, leaf.layout, leaf.device, leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else repr(leaf)
            for leaf in self.leaves
        ]
        return (str(self._spec), *kinds)

    def share(self, other: Inputs) -> None:
        """Take the tensors of inputs with the same signature."""
        self.leaves, self.tensors = other.leaves, other.tensors

    def of_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, caches_weights: bool
    ) -> list[torch.Tensor]:
        """Return the tensors of a call in the order of :attr:`tensors`.

        Parameters
        ----------
        args, kwargs : tuple and dict
            The call's arguments, without stream and event.
        caches_weights : bool
            ``is_first_microbatch`` is not a constant.

        Raises
        ------
        ArgumentError
            If arguments are missing, others are there, or a constant is another one.
        ShapeError, DtypeError, DeviceError
            If a tensor is unlike the sample.
        StateError
            If a tensor requires gradients, and the sample did not.
        """
        if len(kwargs) != len(self.keys) or any(key not in kwargs for key in self.keys):
            kwargs = self._known(kwargs)
        ordered = {key: kwargs[key] for key in self.keys}
        if self._is_flat and len(args) + len(ordered) == len(self.leaves):
            leaves = [*args, *ordered.values()]
        else:
            leaves, spec = tree_flatten((args, ordered))
            if spec != self._spec:
                message = f"{self.name}: the arguments must have the structure of the samples, {self._spec}, got {spec}"
                raise ArgumentError(message)
        tensors = []
        for index, (leaf, sample) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(sample, torch.Tensor):
                self._check(leaf, sample)
                tensors.append(leaf)
            elif leaf is not sample and leaf != sample:
                if caches_weights and index == self._first:
                    continue
                message = (
                    f"{self.name}: {sample!r} is a constant of the captured graph, got {leaf!r}; capture it once more "
                    "with that"
                )
                raise ArgumentError(message)
        return tensors

    def _known(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the samples, without those that have no effect."""
        for key in self.keys:
            if key not in kwargs:
                message = f"{self.name}: keyword argument {key!r} was captured and is missing in this call"
                raise ArgumentError(message)
        unknown = [
            key
            for key, value in kwargs.items()
            if key not in self.keys and key != _FIRST and value is not None
        ]
        if unknown:
            message = (
                f"{self.name}: keyword argument {unknown[0]!r} was not captured; the sample_kwargs had "
                f"{', '.join(map(repr, self.keys)) or 'none'}"
            )
            raise ArgumentError(message)
        return kwargs

    def _check(self, tensor: Any, sample: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            message = f"{self.name}: expected a tensor as in the samples, got {tensor!r}"
            raise DtypeError(message)
        if tensor.shape != sample.shape:
            message = (
                f"{self.name}: a graph has the shapes of its samples: expected {list(sample.shape)}, got "
                f"{list(tensor.shape)}"
            )
            raise ShapeError(message)
        if tensor.dtype != sample.dtype:
            message = f"{self.name}: expected {sample.dtype}, as the sample was, got {tensor.dtype}; cast it"
            raise DtypeError(message)
        if tensor.device != sample.device:
            message = f"{self.name}: the graph was captured on {sample.device}, got a tensor on {tensor.device}"
            raise DeviceError(message)
        if tensor.requires_grad and not sample.requires_grad and torch.is_grad_enabled():
            message = (
                f"{self.name}: an input requires gradients and its sample did not, so that the graph has none; "
                "capture it with a sample that does"
            )
            raise StateError(message)


def take_stream(kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Remove stream and event from a call's keyword arguments, and return them."""
    return kwargs.pop(_STREAM, None), kwargs.pop(_EVENT, None)


def is_first_microbatch(name: str, kwargs: dict[str, Any]) -> bool:
    """Return ``is_first_microbatch`` of a call with cached weights.

    Parameters
    ----------
    name : str
        The callable in messages.
    kwargs : dict
        The call's keyword arguments.

    Raises
    ------
    ArgumentError
        If the call does not pass it.
    """
    value = kwargs.get(_FIRST)
    if not isinstance(value, bool):
        message = (
            f"{name}: captured with cache_quantized_params=True, calls must say is_first_microbatch=True or False, got "
            f"{value!r}"
        )
        raise ArgumentError(message)
    return value
