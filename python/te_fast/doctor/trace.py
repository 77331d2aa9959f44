"""Read a trace of torch's profiler: host and GPU time, synchronisations and casts of each module.

A trace is what ``torch.profiler`` exports for Chrome. Modules are marked in it by ranges, and backward's nodes have the
sequence number of the operation that made them. A kernel belongs to the module that launched it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MARK = "te_fast.doctor|"
_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "Optimizer.step#"
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_OF_DRIVER = {"cuda_runtime", "cuda_driver"}
_WAITS = {
    f"{prefix}{name}"
    for prefix in ("cuda", "cu")
    for name in (
        "StreamSynchronize",
        "DeviceSynchronize",
        "CtxSynchronize",
        "EventSynchronize",
        "Memcpy",
    )
}
_FLOATS = {"float", "double", "c10::Half", "c10::BFloat16"}
_QUANTISING = ("quantize", "cast", "amax")


class Owner(NamedTuple):
    """An owner of time: modules of one class and of one name apart from numbers."""

    name: str
    kind: str

    def __str__(self) -> str:
        """Return name and class."""
        return f"{self.name} ({self.kind})" if self.name else self.kind


OUTSIDE = Owner("", "(outside of modules)")
GRADIENTS = Owner("", "(gradients added up)")


@dataclass
class Times:
    """Microseconds, launches and calls of one owner's forwards or backwards."""

    host: float = 0.0
    gpu: float = 0.0
    launches: int = 0
    synchronisations: int = 0
    casts: int = 0


@dataclass
class Spent:
    """Figures of all owners, and of the GPU as a whole."""

    forward: dict[Owner, Times] = field(default_factory=lambda: defaultdict(Times))
    backward: dict[Owner, Times] = field(default_factory=lambda: defaultdict(Times))
    #: Microseconds in which the GPU worked.
    gpu_busy: float = 0.0


class _Range(NamedTuple):
    begin: float
    end: float
    owner: Owner
    is_backward: bool


def _owner_of_mark(name: str) -> Owner | None:
    if name.startswith(MARK):
        shown, _, kind = name.removeprefix(MARK).rpartition("|")
        return Owner(shown, kind)
    if name.startswith(_OPTIMIZER):
        return Owner("", f"({name.removeprefix(_OPTIMIZER).removesuffix('.step')})")
    return None


class _Thread:
    """Nested ranges of one thread."""

    def __init__(self) -> None:
        self.ranges: list[_Range] = []
        self._open: list[_Range] = []
        self._next = 0

    def at(self, time: float) -> _Range | None:
        """Return the innermost range at a time; call it with increasing times."""
        while self._next < len(self.ranges) and self.ranges[self._next].begin <= time:
            while self._open and self._open[-1].end <= self.ranges[self._next].begin:
                self._open.pop()
            self._open.append(self.ranges[self._next])
            self._next += 1
        while self._open and self._open[-1].end <= time:
            self._open.pop()
        return self._open[-1] if self._open else None

    def own_times(self) -> Iterator[tuple[_Range, float]]:
        """Yield ranges and their microseconds without the ranges inside of them."""
        inner = [0.0] * len(self.ranges)
        open_: list[int] = []
        for index, one in enumerate(self.ranges):
            while open_ and self.ranges[open_[-1]].end <= one.begin:
                open_.pop()
            if open_:
                inner[open_[-1]] += one.end - one.begin
            open_.append(index)
        for one, nested in zip(self.ranges, inner, strict=True):
            yield one, one.end - one.begin - nested


def _by_begin(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def _is_cast(event: dict[str, Any]) -> bool:
    """Tell whether an operation copies numbers into another type."""
    if event["name"] != "aten::copy_":
        return False
    into, of = event["args"].get("Input type", ("", ""))[:2]
    is_one_number = event["args"].get("Input Dims", [None])[0] == []
    return into != of and {into, of} <= _FLOATS and not is_one_number


def _forward_ranges(events: list[dict[str, Any]]) -> dict[Any, _Thread]:
    threads: dict[Any, _Thread] = defaultdict(_Thread)
    for event in events:
        owner = _owner_of_mark(event["name"])
        if owner is not None and event["cat"] == "user_annotation":
            one = _Range(event["ts"], event["ts"] + event["dur"], owner, is_backward=False)
            threads[event["tid"]].ranges.append(one)
    return threads


def _makers(
    events: list[dict[str, Any]], threads: dict[Any, _Thread]
) -> dict[int, list[tuple[float, Owner]]]:
    """Return which module ran the operations of each sequence number, and when."""
    makers: dict[int, list[tuple[float, Owner]]] = defaultdict(list)
    for event in events:
        number = event["args"].get("Sequence number", -1)
        if event["cat"] == "cpu_op" and number >= 0 and not event["args"].get("Fwd thread id"):
            inside = threads[event["tid"]].at(event["ts"])
            makers[number].append((event["ts"], inside.owner if inside else OUTSIDE))
    return makers


def _with_backward(events: list[dict[str, Any]]) -> dict[Any, _Thread]:
    """Return the ranges of modules and of backward's nodes by thread."""
    makers = _makers(events, _forward_ranges(events))
    threads = _forward_ranges(events)
    for event in events:
        if event["cat"] != "cpu_op" or not event["name"].startswith(_NODE):
            continue
        owner = OUTSIDE
        if "AccumulateGrad" in event["name"]:
            owner = GRADIENTS
        for begin, maker in makers.get(event["args"].get("Sequence number", -1), ()):
            if begin < event["ts"]:
                owner = maker
        one = _Range(event["ts"], event["ts"] + event["dur"], owner, is_backward=True)
        threads[event["tid"]].ranges.append(one)
    for thread in threads.values():
        thread.ranges.sort(key=lambda one: (one.begin, -one.end))
    return threads


def _busy(events: Iterable[dict[str, Any]]) -> float:
    """Return the time in which at least one of some events was going on."""
    total, until = 0.0, float("-inf")
    for event in _by_begin(events):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], until))
        until = max(until, end)
    return total


def read_events(events: list[dict[str, Any]]) -> Spent:
    """Add up the events of a trace.

    Parameters
    ----------
    events : list of dict
        The complete events (``"ph": "X"``) of a trace.

    Returns
    -------
    Spent
        Times by owner.
    """
    events = _by_begin({"cat": "", "args": {}} | event for event in events if "dur" in event)
    _drop_last_wait(events)
    on_gpu: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["cat"] in _ON_GPU:
            on_gpu[event["args"].get("correlation", -1)].append(event)
    spent = Spent(gpu_busy=_busy(event for group in on_gpu.values() for event in group))
    threads = _with_backward(events)
    for thread in threads.values():
        for one, microseconds in thread.own_times():
            (spent.backward if one.is_backward else spent.forward)[one.owner].host += microseconds
    for event in events:
        if event["cat"] not in _OF_DRIVER and not _is_cast(event):
            continue
        inside = threads[event["tid"]].at(event["ts"])
        side = spent.backward if inside and inside.is_backward else spent.forward
        _count(event, side[inside.owner if inside else OUTSIDE], on_gpu)
    return spent


def _drop_last_wait(events: list[dict[str, Any]]) -> None:
    """Remove the last wait, which the profiler makes and not the script."""
    last = next((e for e in reversed(events) if e["cat"] in _OF_DRIVER), None)
    if last is not None and last["name"] == "cudaDeviceSynchronize":
        events.remove(last)


def _count(event: dict[str, Any], times: Times, on_gpu: dict[int, list[dict[str, Any]]]) -> None:
    if event["cat"] not in _OF_DRIVER:
        times.casts += 1
        return
    times.synchronisations += event["name"] in _WAITS
    caused = on_gpu.get(event["args"].get("correlation", -2), [])
    times.launches += bool(caused)
    for work in caused:
        times.gpu += work["dur"]
        name = work["name"].lower()
        times.casts += work["cat"] == "kernel" and any(word in name for word in _QUANTISING)


def read_trace(path: Path) -> Spent:
    """Add up a trace that torch's profiler has exported.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    Spent
        Times by owner.
    """
    with path.open(encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return read_events([event for event in events if event.get("ph") == "X"])
