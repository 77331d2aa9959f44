"""Marks captures of CUDA graphs whose wrapper updates the scales of delayed scaling at each replay."""

from __future__ import annotations

import torch

from te_fast.runtime import delayed, native


class _Phase:
    is_capturing = False


def set_capture_start() -> None:
    """Begin a phase of warm-ups and captures: backwards update no scales until :func:`set_capture_end`.

    See Also
    --------
    set_capture_end : Ends the phase.
    te_fast.pytorch.make_graphed_callables : Captures modules, and calls both.

    Examples
    --------
    >>> from te_fast.pytorch.graph import is_graph_capturing, set_capture_end, set_capture_start
    >>> set_capture_start()
    >>> is_graph_capturing()
    True
    >>> set_capture_end()
    """
    _Phase.is_capturing = True
    native.set_graph_phase(True)


def set_capture_end() -> None:
    """End the phase that :func:`set_capture_start` began.

    See Also
    --------
    set_capture_start : Begins the phase.

    Examples
    --------
    >>> from te_fast.pytorch.graph import is_graph_capturing, set_capture_end
    >>> set_capture_end()
    >>> is_graph_capturing()
    False
    """
    _Phase.is_capturing = False
    native.set_graph_phase(False)


def is_graph_capturing() -> bool:
    """Return whether a phase that :func:`set_capture_start` began is active.

    See Also
    --------
    set_capture_start : Begins such a phase.

    Examples
    --------
    >>> from te_fast.pytorch.graph import is_graph_capturing
    >>> is_graph_capturing()
    False
    """
    return _Phase.is_capturing


def is_in_capture(t: torch.Tensor) -> bool:
    """Return whether work on a tensor becomes part of a graph, or warms up for one."""
    return _Phase.is_capturing or (t.is_cuda and torch.cuda.is_current_stream_capturing())


def update_scales_behind_backward() -> None:
    """Update the gradients' scales after the backward of a region's first layer; replays do so themselves."""
    if not _Phase.is_capturing:
        delayed.update_scales(forward=False)
