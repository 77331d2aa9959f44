"""A call holds no borrowed object while Python code runs, since that code may use the same object.

Python up to 3.11 may collect garbage at each allocation of a call, which runs Python code. Where torch has no exchange
table, Python code may also run at every attribute that a call reads.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = {"device": "cpu"}


@contextmanager
def at_every_collection(programs: list) -> Iterator[list[Exception]]:
    """Use the dispatcher and the programs in every garbage collection, and collect as often as possible."""
    failures: list[Exception] = []

    def use(phase: str, _info: dict) -> None:
        if phase == "start":
            try:
                dispatch.counters()
                for program in programs:
                    program.plan_count()
            except RuntimeError as error:
                failures.append(error)

    thresholds = gc.get_threshold()
    # Python keeps small tuples that were freed, and collects only where it makes new ones.
    held = [(number, number) for number in range(5000)]
    gc.callbacks.append(use)
    gc.set_threshold(1, 10_000, 10_000)
    try:
        yield failures
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(use)
        del held


def steps(layers: list[torch.nn.Module], rows: int) -> None:
    for recipe in (DelayedScaling(), Float8CurrentScaling(), None):
        for layer in layers:
            x = torch.randn(rows, 32, requires_grad=True)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                layer(x).sum().backward()
            if layer is layers[-1]:
                layer.backward_dw()


def steps_of_experts(layer: te.GroupedLinear, rows: int) -> None:
    for recipe in (DelayedScaling(), Float8CurrentScaling(), None):
        x = torch.randn(rows, 32, requires_grad=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            layer(x, [rows - 4, 1, 0, 3]).sum().backward()


def experts_with_main_grad() -> te.GroupedLinear:
    layer = te.GroupedLinear(4, 32, 32, fuse_wgrad_accumulation=True, **CPU)
    for number, buffer in enumerate(torch.zeros(4, 32, 32)):
        weight = getattr(layer, f"weight{number}")
        weight.main_grad, weight.grad_added_to_main_grad = buffer, False
    return layer


def run() -> None:
    torch.manual_seed(0)
    layers = [
        te.Linear(32, 32, **CPU),
        te.LayerNormMLP(32, 64, **CPU),
        te.Linear(32, 32, fuse_wgrad_accumulation=True, **CPU),
        te.Linear(32, 32, delay_wgrad_compute=True, **CPU),
    ]
    layers[2].weight.main_grad = torch.zeros(32, 32)
    experts = [te.GroupedLinear(4, 32, 32, **CPU), experts_with_main_grad()]
    programs = [layer.__dict__["_program"] for layer in [*layers, *experts]]
    x, w = torch.randn(16, 32), torch.randn(8, 32)
    product = torch.empty(16, 8)
    with warnings.catch_warnings(), at_every_collection(programs) as failures:
        warnings.simplefilter("ignore")  # the recipe changes
        for rows in range(8, 64, 8):
            steps(layers, rows)
            for layer in experts:
                steps_of_experts(layer, rows)
        with dispatch.record() as launches:
            layers[1](x)
        q, other = (dispatch.quantize(tensor, Float8CurrentScaling()) for tensor in (x, w))
        dispatch.gemm(q, other, product)
    assert not failures, failures[:3]
    assert launches
    torch.testing.assert_close(product, dispatch.dequantize(q) @ dispatch.dequantize(other).T)


def test_calls_have_nothing_borrowed_where_python_collects_garbage():
    run()


@pytest.mark.slow
def test_nor_where_tensors_are_read_by_their_attributes(fresh):
    fresh(
        f"""
import os, sys
os.environ["TE_FAST_NO_EXCHANGE"] = "1"
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_reentry
test_reentry.run()
"""
    )


def test_a_strided_extra_input_that_an_op_writes_to_has_the_gradients_of_others():
    """The backward of the next op reads the sum, which lies in the copy of the strided input."""
    x, extra = torch.randn(16, 32), torch.randn(32, 16).t()
    found = []
    for given in (extra, extra.contiguous()):
        chain = te.ops.Sequential(te.ops.AddExtraInput(in_place=True), te.ops.SiLU())
        leaves = x.clone().requires_grad_(), given.clone().requires_grad_()
        assert leaves[1].is_contiguous() == given.is_contiguous()
        y = chain(leaves[0], leaves[1] * 1.0)
        y.sum().backward()
        found.append((y, leaves[0].grad, leaves[1].grad))
    expected = torch.nn.functional.silu(x + extra)
    for ours, others in zip(*found, strict=True):
        assert torch.equal(ours, others)
    torch.testing.assert_close(found[0][0], expected)
