"""benches/parity.py finds differences, and finds none where there is none: te_fast beside itself, on the CPU."""

import math
import types

import pytest
import torch

import parity

X = torch.empty(32, parity.COLS, dtype=torch.bfloat16)


@pytest.mark.parametrize("case", parity.cases())
def test_every_case_runs_and_equals_itself(case):
    # One recipe each: which one does not matter here.
    recipe = list(parity.recipes())[len(case) % 5]
    found = parity.compare(parity.own(), parity.own(), case, recipe, X)
    assert found["output"] == 0
    assert set(found.values()) == {0.0}


def test_delayed_scaling_has_all_quantities():
    found = parity.compare(parity.own(), parity.own(), "Linear", "delayed", X)
    assert list(found) == list(parity.QUANTITIES)


def test_another_recipe_is_found_in_every_quantity():
    own = parity.own()
    other = types.SimpleNamespace(
        DelayedScaling=lambda: own.recipe.DelayedScaling(
            fp8_format=own.recipe.Format.E4M3, margin=1
        )
    )
    changed = parity.Library(own.pytorch, other)
    found = parity.compare(own, changed, "LayerNormMLP, swiglu", "delayed", X)
    assert all(0 < value < math.inf for value in found.values()), found
    assert list(found) == list(parity.QUANTITIES)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 4.0], [3.0, 0.0], 4 / 3),
        ([1.0], [1.0, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([math.nan, 2.0], [math.nan, 1.0], 1.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
    ],
)
def test_difference(ours, theirs, expected):
    assert parity.difference(torch.tensor(ours), torch.tensor(theirs)) == pytest.approx(expected)


def test_without_transformer_engine_the_bench_says_so(monkeypatch, capsys):
    monkeypatch.setattr(parity, "installed", lambda: None)
    monkeypatch.setattr("sys.argv", ["parity.py"])
    assert parity.main() == 0
    assert "not installed" in capsys.readouterr().out
