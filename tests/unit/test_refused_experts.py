"""Traces of experts that te_fast refuses: a fallback to eager code is told once, and ``fullgraph`` raises."""

from __future__ import annotations

import pytest
import torch

from graphs import needs_compile
from te_fast.errors import ShapeError
from te_fast.experts.exchange import ExpertRanks
from te_fast.graphs import refusal

pytestmark = [needs_compile]


class Alone(ExpertRanks):
    """The ranks, without a process group; an eager call gets as far as the comparison of ranks."""

    def __init__(self):
        self.name = "block"

    def _kind(self, rows, *, needs_rows):
        message = "eager"
        raise ShapeError(message)


def _run(rows):
    return Alone().apply(lambda *_: rows, rows, torch.tensor([1, 1]), rows[:, 0])


def test_experts_of_several_ranks_tell_that_they_run_eagerly(monkeypatch):
    monkeypatch.setattr(refusal, "_told", set())
    torch.compiler.reset()
    compiled = torch.compile(_run, backend="eager")
    with (
        pytest.warns(UserWarning, match="block: .*ep_group.* leaves this code to eager mode"),
        pytest.raises(ShapeError, match="eager"),
    ):
        compiled(torch.ones(2, 4))


def test_fullgraph_raises():
    torch.compiler.reset()
    with pytest.raises(Exception, match="ep_group|Observed exception"):
        torch.compile(_run, backend="eager", fullgraph=True)(torch.ones(2, 4))
