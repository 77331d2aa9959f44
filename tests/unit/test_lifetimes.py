"""Lifetimes: references of layers and to layers, garbage collection, and threads that share a chain."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import te_fast.pytorch as te
from selection import sampled
from te_fast.common.recipe import DelayedScaling
from te_fast.pytorch import ops

DELAYED = DelayedScaling()
MODULES = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "split": lambda: te.Linear(32, 32, parameters_split=("a", "b"), device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, device="cpu"),
    "Sequential": lambda: ops.Sequential(
        ops.LayerNorm(32, device="cpu"), ops.Linear(32, 32, device="cpu")
    ),
}


@pytest.mark.parametrize(
    ("make", "recipe"),
    sampled(MODULES, [None, DELAYED], quick=[("Linear", None), ("Sequential", DELAYED)]),
)
def test_a_module_that_its_parameters_point_at_is_collected(make, recipe):
    module = MODULES[make]()
    for parameter in module.parameters():
        parameter.main_module = module
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(2):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            module(x).sum().backward()
    alive = weakref.ref(module)
    del module, parameter
    gc.collect()
    assert alive() is None


def test_threads_share_a_chain_that_writes_an_extra_input():
    chain = ops.Sequential(ops.Linear(32, 32, device="cpu"), ops.AddExtraInput(in_place=True))
    x, extra = torch.randn(16, 32), torch.randn(16, 32)
    with torch.no_grad():
        wanted = chain(x, extra.clone())
    failures = []

    def work():
        try:
            for _ in range(300):
                with torch.no_grad():
                    assert torch.equal(chain(x, extra.clone()), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
