"""Reports of the dispatcher: launches, counters, plans, the time of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from te_fast.dispatch.checks import expect
from te_fast.errors import ArgumentError, DtypeError
from te_fast.runtime import native


class Launch(NamedTuple):
    """One noted launch.

    See Also
    --------
    record : Notes them.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast import dispatch
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> with te.autocast(), dispatch.record() as launches:
    ...     y = layer(torch.ones(16, 32))
    >>> launches[0].threads > 0
    True
    """

    #: Symbol of the kernel, or ``gemm``.
    name: str
    #: Thread blocks; zeros for a GEMM.
    blocks: tuple[int, int, int]
    #: Threads of a block.
    threads: int
    #: Dynamic shared memory of a block, bytes.
    shared_bytes: int
    #: Bytes of the kernel's parameter struct.
    params: bytes
    #: The problem of a GEMM.
    problem: str | None


def counters() -> dict[str, int]:
    """Return the counts since the last :func:`reset_counters`.

    Returns
    -------
    dict
        ``launches``, ``gemms``, ``learned_gemms`` (those launched without cuBLASLt, as learned from it),
        ``learned_attentions`` (forwards and backwards of attention without torch, as learned from it),
        ``plan_hits``, ``plan_misses``, ``guard_switches``, ``weight_casts`` and ``allocations`` (private device
        buffers; torch's are not counted).

    See Also
    --------
    reset_counters : Sets them to zero.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.reset_counters()
    >>> sum(dispatch.counters().values())
    0
    """
    result: dict[str, int] = native.counters()
    return result


def reset_counters() -> None:
    """Set all counters to zero.

    See Also
    --------
    counters : What it resets.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.reset_counters()
    """
    native.reset_counters()


#: The blocks that note launches: their lists and the recorder's modes, the innermost last.
_open_blocks: list[tuple[list[Launch], str]] = []


def _note() -> None:
    """Give all open blocks what the recorder has noted since its last start."""
    launches = [Launch(*launch) for launch in native.recorded()]
    for noted, _ in _open_blocks:
        noted.extend(launches)


@contextmanager
def record(*, execute: bool = True) -> Iterator[list[Launch]]:
    """Note every launch of the block, in all threads of the process.

    Parameters
    ----------
    execute : bool
        False makes no launch and notes none: :func:`counters` counts them, and outputs stay
        uninitialised. Benches time bookkeeping alone in this way.

    Yields
    ------
    list of Launch
        Filled when the block ends.

    See Also
    --------
    counters : Counts alone.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast import dispatch
    >>> layer = te.Linear(32, 16, bias=False, device="cpu")
    >>> with torch.no_grad(), te.autocast(), dispatch.record() as launches:
    ...     y = layer(torch.ones(16, 32))
    >>> [launch.name for launch in launches]
    ['cast_f32_e4m3', 'cast_f32_e4m3', 'gemm']
    """
    block: tuple[list[Launch], str] = ([], "tee" if execute else "only")
    _note()
    _open_blocks.append(block)
    native.record(block[1])
    try:
        yield block[0]
    finally:
        _note()
        # Not by equality: lists of two blocks may be equal.
        _open_blocks[:] = [other for other in _open_blocks if other is not block]
        # A start drops what has been noted.
        native.record(_open_blocks[-1][1] if _open_blocks else "off")


def inventory() -> dict[str, dict[str, int]]:
    """Return the plans, memory and streams that the dispatcher holds, per device.

    Returns
    -------
    dict
        Device name to ``gemm_plans``, ``private_bytes`` and ``streams``.

    See Also
    --------
    release_memory : Gives it back.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> isinstance(dispatch.inventory(), dict)
    True
    """
    return {
        device: {"gemm_plans": plans, "private_bytes": size, "streams": streams}
        for device, plans, size, streams in native.inventory()
    }


def plan_count(layer: torch.nn.Module) -> int:
    """Return how many plans a layer holds: one per row count, data type, recipe and gradient need.

    Parameters
    ----------
    layer : te_fast.pytorch.Linear, LayerNormLinear or LayerNormMLP
        The layer.

    Raises
    ------
    DtypeError
        If it is another object.

    See Also
    --------
    drop_weight_cache : Forgets weights.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast import dispatch
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> with te.autocast():
    ...     y = layer(torch.ones(16, 32))
    >>> dispatch.plan_count(layer)
    1
    """
    count: Any = getattr(layer, "_plan_count", None)
    if count is None:
        message = f"plan_count: expected a layer of te_fast, got {type(layer).__name__}"
        raise DtypeError(message)
    return int(count())


def stage_times(layer: torch.nn.Module, *inputs: Any, calls: int = 1000) -> dict[str, float]:
    """Measure the native stages of a layer's forward.

    Parameters
    ----------
    layer : te_fast.pytorch.Linear
        The layer, in the autocast region of the caller.
    inputs
        Arguments of the call.
    calls : int
        Number of forwards to average.

    Returns
    -------
    dict
        Stage to microseconds per forward, in the order in which they run.

    Raises
    ------
    DtypeError
        If `layer` is no module.
    ArgumentError
        If `calls` is no integer of 1 or more.

    See Also
    --------
    te_fast.profile : The same beside nn.Linear.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast import dispatch
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> with torch.no_grad(), te.autocast():
    ...     stages = dispatch.stage_times(layer, torch.ones(16, 32), calls=2)
    >>> all(microseconds >= 0 for microseconds in stages.values())
    True
    """
    expect("stage_times", torch.nn.Module, layer=layer)
    if not isinstance(calls, int) or calls < 1:
        message = f"stage_times: calls must be an integer of 1 or more, got {calls!r}"
        raise ArgumentError(message)
    native.stage_clock(True)  # noqa: FBT003
    try:
        for _ in range(calls):
            layer(*inputs)
        return {name: nanoseconds / calls / 1e3 for name, nanoseconds in native.stage_nanoseconds()}
    finally:
        native.stage_clock(False)  # noqa: FBT003
