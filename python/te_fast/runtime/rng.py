"""Named states of the GPU's random numbers, which captured graphs advance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_fast.errors import ArgumentKeyError, ArgumentNameError, DtypeError

# States of the process's trackers; a graph registers those that are generators.
_active: dict[str, Any] = {}
# The state that the CPU's generator has been set to; it advances there alone.
_on_cpu: torch.Generator | None = None


def graph_safe_rng_available() -> bool:
    """Return whether torch has random number states that captured graphs can advance; all supported releases do.

    See Also
    --------
    te_fast.pytorch.CudaRNGStatesTracker : Has such states.

    Examples
    --------
    >>> from te_fast.pytorch import distributed
    >>> distributed.graph_safe_rng_available()
    True
    """
    needed = ("graphsafe_set_state", "graphsafe_get_state", "clone_state")
    has_register = hasattr(torch.cuda.CUDAGraph, "register_generator_state")
    return has_register and all(hasattr(torch.Generator, name) for name in needed)


def get_all_rng_states() -> dict[str, Any]:
    """Return the last states of :class:`CudaRNGStatesTracker`, by name.

    See Also
    --------
    set_all_rng_states : Exchanges them.

    Examples
    --------
    >>> from te_fast.pytorch import distributed
    >>> sorted(distributed.get_all_rng_states())
    []
    """
    return _active


def set_all_rng_states(states: dict[str, Any]) -> None:
    """Replace the states that :func:`get_all_rng_states` returns.

    Parameters
    ----------
    states : dict
        States by name; the dict itself is kept.

    See Also
    --------
    get_all_rng_states : Returns them.

    Examples
    --------
    >>> from te_fast.pytorch import distributed
    >>> distributed.set_all_rng_states(distributed.get_all_rng_states())
    """
    global _active
    _active = states


def _current_generator() -> torch.Generator:
    """Return the generator of the current GPU's kernels; the CPU's generator without a GPU."""
    if not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _made(seed: int) -> torch.Generator:
    generator = _current_generator()
    if generator is torch.default_generator:
        return torch.Generator().manual_seed(seed)
    state = generator.clone_state()
    state.manual_seed(seed)
    return state


def _note_on_cpu() -> None:
    """Let the state in force on the CPU be where the generator is."""
    if _on_cpu is not None:
        _on_cpu.set_state(torch.default_generator.get_state())


@contextmanager
def repeating() -> Iterator[None]:
    """Let a recomputation have the CPU's generator as it finds it, also inside of a use of a state by its caller."""
    global _on_cpu
    outer, _on_cpu = _on_cpu, None
    try:
        yield
    finally:
        _on_cpu = outer


@contextmanager
def _drawing_on_cpu_from(state: torch.Generator) -> Iterator[None]:
    """Copy a state to the generator and back: only generators of GPUs can share their states."""
    global _on_cpu
    generator, outer = torch.default_generator, _on_cpu
    _note_on_cpu()
    former = generator.get_state()
    generator.set_state(state.get_state())
    _on_cpu = state
    try:
        yield
    finally:
        _note_on_cpu()
        _on_cpu = outer
        generator.set_state(former if outer is None else outer.get_state())


@contextmanager
def _drawing_from(state: torch.Generator) -> Iterator[None]:
    """Replace the generator that kernels draw from."""
    generator = _current_generator()
    if generator is torch.default_generator:
        with _drawing_on_cpu_from(state):
            yield
        return
    lent = generator.graphsafe_get_state()
    generator.graphsafe_set_state(state)
    try:
        yield
    finally:
        generator.graphsafe_set_state(lent)


class CudaRNGStatesTracker:
    """States of the GPU's random numbers by name; one of them is in force at a time.

    Ranks that share a model draw the same numbers in some places and different ones in others. States are generators,
    so that captured graphs advance them. Without a GPU they are the CPU's.

    See Also
    --------
    te_fast.pytorch.checkpoint : Takes a function that returns one.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> tracker = te.CudaRNGStatesTracker()
    >>> tracker.get_states()
    {}
    """

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Drop all states and seeds."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Any]:
        """Return the states by name, in a new dict."""
        _note_on_cpu()
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """Replace all states.

        Parameters
        ----------
        states : dict
            States by name, as :meth:`get_states` returns them.

        Raises
        ------
        DtypeError
            If a state is no generator, or `states` is no dict; all states stay as they were.
        """
        if not isinstance(states, dict):
            message = (
                "CudaRNGStatesTracker.set_states: states must be a dict of generators, got "
                f"{type(states).__name__}"
            )
            raise DtypeError(message)
        for name, state in states.items():
            if not hasattr(state, "manual_seed"):  # Megatron-LM's tracker has tensors
                got = "a tensor" if isinstance(state, torch.Tensor) else type(state).__name__
                message = (
                    f"CudaRNGStatesTracker.set_states: state {name!r} must be a torch.Generator, as get_states() "
                    f"returns, got {got}"
                )
                raise DtypeError(message)
        self.states_ = states
        set_all_rng_states(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state.

        Parameters
        ----------
        name : str
            Its name.
        seed : int
            Seed of its numbers.

        Raises
        ------
        ArgumentNameError
            If there is a state of that name, or of that seed, or the seed has more than 64 bits.
        DtypeError
            If the seed is no integer.
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            message = (
                f"CudaRNGStatesTracker.add: the seed of {name!r} must be an integer, got {seed!r}"
            )
            raise DtypeError(message)
        if not -(2**63) <= seed < 2**64:
            message = (
                f"CudaRNGStatesTracker.add: the seed of {name!r} must have 64 bits, got {seed}"
            )
            raise ArgumentNameError(message)
        if seed in self.seeds_:
            message = f"CudaRNGStatesTracker.add: seed {seed} is that of another state; every state needs its own"
            raise ArgumentNameError(message)
        if name in self.states_:
            message = (
                f"CudaRNGStatesTracker.add: there is a state {name!r} already; reset() forgets all"
            )
            raise ArgumentNameError(message)
        self.states_[name] = _made(seed)
        self.seeds_.add(seed)
        set_all_rng_states(self.states_)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a state for a while; it continues where its last use ended.

        Parameters
        ----------
        name : str, default = 'model-parallel-rng'
            Name of the state.

        Raises
        ------
        ArgumentKeyError
            If there is no state of that name.
        """
        if name not in self.states_:
            known = ", ".join(map(repr, self.states_)) or "none"
            message = (
                f"CudaRNGStatesTracker.fork: no state {name!r}, there are {known}; add() it first"
            )
            raise ArgumentKeyError(message)
        with _drawing_from(self.states_[name]):
            yield
