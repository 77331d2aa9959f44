"""Watch a script call its modules: steps, names, host time of forwards, and one window of torch's profiler.

The doctor replaces the class attribute ``nn.Module.__call__`` by a function that calls the original. It sets no hooks,
since hooks change the program: te_fast's layers take another path if they have hooks, and torch.compile traces hooks.
"""

from __future__ import annotations

import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from te_fast.doctor.trace import MARK, Owner, Spent, read_trace

#: Arguments of a module's call; tensors as their shape, type and need of a gradient.
Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A tensor argument of a module's call."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class Clocked:
    """Host time of a module's forwards in one step, in microseconds, without the modules in it."""

    calls: int = 0
    microseconds: float = 0.0


@dataclass
class Step:
    """One step of the clocked window."""

    microseconds: float = 0.0
    forwards: dict[Owner, Clocked] = field(default_factory=dict)


def _example(value: Any) -> Any:
    """Describe an argument without keeping it; values that are neither tensors nor plain become None."""
    if isinstance(value, torch.Tensor):
        return Shape(tuple(value.shape), value.dtype, value.device)
    if isinstance(value, tuple | list):
        return type(value)(map(_example, value)) if type(value) in (tuple, list) else None
    return value if isinstance(value, bool | int | float | str) else None


class Watch:
    """The window that is watched: steps that warm up, steps on the clock, steps under the profiler.

    A step lies between two calls of ``step()`` of the first optimizer. If there is no optimizer, each call of the first
    outermost module is a step.

    Parameters
    ----------
    skip : int
        Steps that warm up.
    steps : int
        Steps on the clock, and as many under the profiler.
    on_end : callable
        Called with the outermost modules when the window ends, while they are alive.
    """

    def __init__(
        self, skip: int, steps: int, on_end: Callable[[list[torch.nn.Module]], None]
    ) -> None:
        self.skip, self.steps = skip, steps
        self.clocked: list[Step] = []
        self.profiled: Spent | None = None
        self.profiled_steps = 0
        self.examples: dict[Owner, Example] = {}
        self.is_over = False
        #: Whether the script's own profiler ran when it was time for the doctor's, which would have ended it.
        self.profiler_is_taken = False
        #: Memory of this process at the end of the window.
        self.rank = 0
        self._on_end = on_end
        self._names: dict[int, tuple[weakref.ref[torch.nn.Module], Owner]] = {}
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        self._stacks = threading.local()
        self._count = 0  # steps that have begun
        self._begin = 0
        self._is_between = True
        self._optimizer: weakref.ref[Any] | None = None
        self._profiler: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch all modules of the process."""
        originals = dict(_callers(torch.nn.Module))
        handle = register_optimizer_step_post_hook(self._optimizer_stepped)
        for cls, original in originals.items():
            cls.__call__ = _watched(self, original)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for cls, original in originals.items():
                cls.__call__ = original  # type: ignore[method-assign]
            handle.remove()
            self.end()

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if self.is_over:
            return
        if self._optimizer is None or self._optimizer() is None:
            if (
                self._optimizer is None
            ):  # the steps counted so far were parts of the first real step
                self._drop_profile()
                self.clocked, self._count = self.clocked[-1:], 1
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._is_between = True

    def _drop_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _next_step(self) -> None:
        now = time.perf_counter_ns()
        if self.clocked and self._profiler is None:
            self.clocked[-1].microseconds = (now - self._begin) / 1e3
        self._is_between = False
        self._count += 1
        if self._count > self.skip + 2 * self.steps:
            self.end()
            return
        if self._count > self.skip + self.steps:
            self._profile_step()
            return
        self.clocked.append(Step())
        self.clocked = self.clocked[-self.steps :]
        self._begin = time.perf_counter_ns()

    def _profile_step(self) -> None:
        if self._profiler is not None:
            self.profiled_steps += 1
        elif torch._C._autograd._profiler_enabled():
            self.profiler_is_taken = True
            self.end()
        else:
            self.profiled_steps = 1
            self._start_profiler()

    def _start_profiler(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def end(self) -> None:
        """End the window; later steps are not watched."""
        if self.is_over:
            return
        self.is_over = True
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        if self.clocked and not self.clocked[-1].microseconds:
            self.clocked[-1].microseconds = (time.perf_counter_ns() - self._begin) / 1e3
        if self._profiler is not None:
            self._profiler.stop()  # waits for the GPU, once
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                self.profiled = read_trace(path)
            self._profiler = None
        self._on_end([root for ref in self._roots if (root := ref()) is not None])

    def owner_of(self, module: torch.nn.Module) -> Owner:
        """Return the owner that a module counts for: its name without numbers, and its class."""
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:
            return Owner("", type(module).__name__)
        return known[1]

    def _name(self, root: torch.nn.Module) -> None:
        """Name a module that was not called from another module, and the modules in it."""
        known = self._names.get(id(root))
        if known is not None and known[0]() is root:
            return
        self._roots.append(weakref.ref(root))
        for name, module in root.named_modules():
            shown = ".".join("*" if part.isdigit() else part for part in name.split("."))
            owner = Owner(shown, type(module).__name__)
            self._names[id(module)] = (weakref.ref(module), owner)

    def call(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module and note the time of the call."""
        stack: list[list[Any]] = self._stacks.__dict__.setdefault("frames", [])
        if stack and stack[-1][0] is module:  # a class that calls the ``__call__`` of another
            return original(module, *args, **kwargs)
        if not stack:
            self._name(module)
            is_first = bool(self._roots) and self._roots[0]() is module
            if self._is_between or (self._optimizer is None and is_first):
                self._next_step()
                if self.is_over:
                    return original(module, *args, **kwargs)
        owner = self.owner_of(module)
        if owner not in self.examples:
            self.examples[owner] = (_example(args), {k: _example(v) for k, v in kwargs.items()})
        frame = [module, 0]  # nanoseconds in modules that this one calls
        stack.append(frame)
        marked: AbstractContextManager[Any] = nullcontext()
        if self._profiler is not None:
            marked = record_function(f"{MARK}{owner.name}|{owner.kind}")
        try:
            with marked:
                begin = time.perf_counter_ns()
                try:
                    return original(module, *args, **kwargs)
                finally:
                    self._note(owner, stack, time.perf_counter_ns() - begin)
        finally:
            stack.pop()

    def _note(self, owner: Owner, stack: list[list[Any]], nanoseconds: int) -> None:
        if len(stack) > 1:
            stack[-2][1] += nanoseconds
        if self._profiler is None and self.clocked and not self.is_over:
            clocked = self.clocked[-1].forwards.setdefault(owner, Clocked())
            clocked.calls += 1
            clocked.microseconds += (nanoseconds - stack[-1][1]) / 1e3


def _callers(cls: type[torch.nn.Module]) -> Iterator[tuple[type[torch.nn.Module], Any]]:
    """Yield the classes that define ``__call__``, and their functions."""
    original = cls.__dict__.get("__call__")
    if callable(original):
        yield cls, original
    for derived in cls.__subclasses__():
        yield from _callers(derived)


def _watched(watch: Watch, original: Any) -> Callable[..., Any]:
    # te_fast's native methods contain the function, which torch.compile knows.
    function = getattr(original, "__func__", original)

    def call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # torch.jit.trace would keep the marks of the profiler, and compares two traces of a module.
        if watch.is_over or is_compiling() or torch._C._is_tracing():
            return function(self, *args, **kwargs)
        return watch.call(function, self, args, kwargs)

    return call
