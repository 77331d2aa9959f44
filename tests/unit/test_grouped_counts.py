"""Experts' counts that exceed the rows, as counts on a GPU may, are cut off; a debug check reports them."""

import pytest
import torch

import te_fast
from grouped_layers import grads, inputs, make, step
from recipes import RECIPES
from te_fast import _config
from te_fast.runtime.splits import check_in_debug

ALL = {"high": lambda: None, **RECIPES}
ROWS = 200
#: Counts, and the counts that fit into 200 rows.
TOO_MANY = [
    ([300, 50], [200, 0]),
    ([10, 1 << 40, 7], [10, 190, 0]),
    ([130, 100, 3], [130, 70, 0]),
    ([-5, 129, 200], [0, 129, 71]),
]


@pytest.fixture
def poisoned():
    """Let torch fill uninitialised memory with NaN, also in FP8."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8, dtype=torch.uint8).eq(255).all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(("splits", "taken"), TOO_MANY, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_what_counts_exceed_is_cut_off(name, splits, taken, poisoned):
    layer, other = make(len(splits), bias=True), make(len(splits), bias=True)
    x, grad = inputs(layer, taken)
    y = step(layer, x, grad, ALL[name](), taken)
    own = x.detach().clone().requires_grad_()
    # This step leaves NaN in the engine's own memory, too.
    bad = torch.full((4 * ROWS, 144), torch.nan, dtype=x.dtype, requires_grad=True)
    step(
        make(1), bad, torch.full((4 * ROWS, 48), torch.nan, dtype=x.dtype), ALL[name](), [4 * ROWS]
    )
    other._splits = lambda counts, inp: counts  # as if the counts were on a GPU
    again = step(other, own, grad, ALL[name](), torch.tensor(splits))
    assert torch.equal(again, y)
    assert torch.equal(own.grad, x.grad)
    assert torch.equal(grads(other), grads(layer))
    assert torch.equal(grads(other, "bias"), grads(layer, "bias"))
    assert grads(other).isfinite().all()


@pytest.mark.parametrize("splits", [[3, 201], [-1, 5], [1 << 40, 1]], ids=str)
def test_debugging_reports_counts_that_do_not_fit(splits, monkeypatch):
    counts = torch.tensor(splits)
    check_in_debug("experts", counts, torch.empty(200, 1))
    monkeypatch.setattr(_config, "DEBUG", True)
    with pytest.raises(te_fast.ShapeError, match="experts: .*200 rows.*TE_FAST_DEBUG"):
        check_in_debug("experts", counts, torch.empty(200, 1))
    check_in_debug("experts", torch.tensor([3, 100]), torch.empty(200, 1))
