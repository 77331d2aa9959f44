"""CUDA graphs for captures; only this module calls torch.cuda for graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from te_fast.errors import DeviceError
from te_fast.runtime.rng import get_all_rng_states
from te_fast.runtime.weak_tensors import make_weak_ref

T = TypeVar("T")


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run the graph again, on the memory of its capture."""

    def reset(self) -> None:
        """Free the graph."""


class Recorder(Protocol):
    """Captures functions."""

    #: The device of the captures.
    device: torch.device

    def warm_up(self) -> Any:
        """Return a context for runs before the first capture."""

    def keep_random_numbers(self) -> Any:
        """Return a context that restores the states of random numbers at its end."""

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """Return a function's graph, and the function's result."""

    def weak(self, x: T) -> T:
        """Return tensors of graphs that let later captures use their memory."""


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off: the destruction of another graph would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaRecorder:
    """Captures CUDA graphs into one pool of memory.

    Parameters
    ----------
    pool : optional
        The pool's handle; one of its own by default.

    Raises
    ------
    DeviceError
        Without a GPU.
    """

    def __init__(self, pool: Any = None) -> None:
        if not torch.cuda.is_available():
            message = "make_graphed_callables: CUDA graphs need a GPU, and torch sees none"
            raise DeviceError(message)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        states = get_all_rng_states().values()
        self._generators = [state for state in states if isinstance(state, torch.Generator)]

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run on a stream of its own, with the GPU idle before and after."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
        torch.cuda.synchronize()

    @contextmanager
    def keep_random_numbers(self) -> Iterator[None]:
        """Restore the states of the current GPU's generator and of trackers."""
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        generators = [default, *self._generators]
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """Capture a function on the current GPU."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with _without_garbage_collection(), torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return graph, result

    def weak(self, x: T) -> T:
        """Return tensors that do not own their memory."""
        alias: T = make_weak_ref(x)
        return alias
