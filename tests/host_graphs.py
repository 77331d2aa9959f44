"""Graphs on the host: a replay runs the captured function again on the same tensors, and leaves no other trace on the
host."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

import te_fast.pytorch as te
from te_fast.graphed import make
from te_fast.graphed.arguments import GRAPHED
from te_fast.runtime import capturing, delayed, native
from te_fast.runtime.global_state import autocast_state

_FLAG = "grad_added_to_main_grad"
_REPLACED = ("forward", "backward_dw", "reset")


class HostGraph:
    """A function that a replay runs again; its results are written over those of the capture."""

    def __init__(self, recorder: HostRecorder, run: Any) -> None:
        self._recorder, self._run = recorder, run
        self._is_grad_enabled = torch.is_grad_enabled()
        self._flag = autocast_state.skip_fp8_weight_update_tensor
        self.result = run()
        self._static = [
            value.detach() if isinstance(value, torch.Tensor) else None for value in self.result
        ]
        self.is_reset = False

    def replay(self) -> None:
        """Run the function again."""
        assert not self.is_reset
        self._recorder.replays += 1
        with torch.set_grad_enabled(self._is_grad_enabled), self._without_traces():
            fresh = self._run()
        with torch.no_grad():
            for static, value in zip(self._static, fresh, strict=True):
                if static is not None:
                    static.copy_(value)

    def reset(self) -> None:
        """Free it."""
        self.is_reset = True

    @contextmanager
    def _without_traces(self) -> Any:
        """Undo changes that a replayed CUDA graph would not make: marks of scales, flags of parameters, hooks."""
        states = delayed.states(forward=True) + delayed.states(forward=False)
        ran = [state.slots.ran for state in states]
        modules = [part for module in self._recorder.modules for part in module.modules()]
        parameters = [
            p for part in modules for p in part.parameters(recurse=False) if hasattr(p, _FLAG)
        ]
        # The modules' own methods again, as when they were captured.
        taken = [
            (part, {name: part.__dict__.pop(name) for name in _REPLACED if name in part.__dict__})
            for part in modules
            if GRAPHED in part.__dict__
        ]
        flags = [p.grad_added_to_main_grad for p in parameters]
        is_first, flag = native.autocast_region()[3], autocast_state.skip_fp8_weight_update_tensor
        autocast_state.skip_fp8_weight_update_tensor = self._flag
        capturing.set_capture_start()
        yield
        capturing.set_capture_end()
        for part, attributes in taken:
            part.__dict__.update(attributes)
        autocast_state.skip_fp8_weight_update_tensor = flag
        native.autocast_set_first(is_first)
        for state, did in zip(states, ran, strict=True):
            (state.slots.mark_ran if did else state.slots.clear_ran)()
        for parameter, value in zip(parameters, flags, strict=True):
            parameter.grad_added_to_main_grad = value


class HostRecorder:
    """Captures for the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        #: The captured function.
        self.modules: list[torch.nn.Module] = []
        self.replays = 0

    @contextmanager
    def warm_up(self) -> Any:
        """Do nothing."""
        yield

    @contextmanager
    def keep_random_numbers(self) -> Any:
        """Restore the CPU's generator."""
        state = torch.default_generator.get_state()
        yield
        torch.default_generator.set_state(state)

    def graphed(self, modules: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``make_graphed_callables``."""
        self.modules += modules if isinstance(modules, tuple) else (modules,)
        return te.make_graphed_callables(modules, *args, **kwargs)

    def capture(self, run: Any) -> Any:
        """Run a function and keep it."""
        graph = HostGraph(self, run)
        return graph, graph.result

    def weak(self, x: Any) -> Any:
        """Return the tensors themselves: captures on the host do not share memory."""
        return x


def install(monkeypatch: Any) -> HostRecorder:
    """Let ``make_graphed_callables`` capture on the host."""
    recorder = HostRecorder()
    monkeypatch.setattr(make, "recorder_of", lambda pool: recorder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return recorder
