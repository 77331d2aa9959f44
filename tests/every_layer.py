"""A small layer of every kind that has weights, on the CPU, for tests of properties that all layers share."""

from __future__ import annotations

import pytest

import te_fast.pytorch as te

LAYERS = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "split": lambda: te.Linear(32, 32, parameters_split=("a", "b"), device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, device="cpu"),
    "ops.Linear": lambda: te.ops.Linear(32, 32, device="cpu"),
    "ops.Sequential": lambda: te.ops.Sequential(
        te.ops.Quantize(), te.ops.Linear(32, 32, device="cpu"), te.ops.GELU()
    ),
}

every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
