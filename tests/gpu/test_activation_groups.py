"""Activations of experts' rows into FP8 in one kernel: against plain torch and two launches, in poisoned memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
from expert_activations import (  # noqa: E402
    FUNCTIONS,
    NAMES,
    SPLITS,
    Case,
    check_by_torch,
    check_groups,
    rows_of,
    same_bits,
)
from recipes import RECIPES  # noqa: E402
from te_fast import dispatch  # noqa: E402
from te_fast.dispatch import ActivationFunction  # noqa: E402

pytestmark = pytest.mark.gpu

LONG = [[0, 4096, 1, 0, 130], [16] * 65, [3] * 1024]


def poisoned(run):
    """Results in memory that held bytes of 255: memory of the same sizes was freed with them just before."""
    for _ in range(2):
        found = run()
        torch.cuda.synchronize()
        for tensor in (*found[0], *found[2:]):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(255)
        del found
    return run()


def check(found, wanted, case, *, block):
    check_groups(found[0], wanted[0], case.splits, block=block)
    rows = min(sum(rows_of(case.splits)), case.rows)
    if found[1] is not None:
        assert same_bits(found[1], wanted[1])
    for mine, theirs in zip(found[2:], wanted[2:], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or same_bits(mine[:rows], theirs[:rows])


def compare_with_two_launches(name, splits, cols, function, factor):
    recipe = RECIPES[name]()
    case = Case(splits, cols, function, behind=7, factor=factor, device="cuda")
    found = poisoned(lambda: case.forward(recipe))
    check(found, case.forward_by_two(recipe), case, block=name == "block")
    if cols % 128 == 0:
        found = poisoned(lambda: case.backward(recipe))
        check(found, case.backward_by_two(recipe), case, block=name == "block")


@pytest.mark.parametrize(
    "function", FUNCTIONS, ids=lambda function: f"{function.name}-{function.interleave}"
)
@pytest.mark.parametrize("splits", SPLITS, ids=lambda splits: f"{len(splits)} groups")
@pytest.mark.parametrize("name", NAMES)
def test_has_the_bits_of_two_launches(name, splits, function):
    for cols in (128, 256, 144, 136, 16):
        if not function.interleave or cols % function.interleave == 0:
            factor = {128: torch.float32, 144: None}.get(cols, torch.bfloat16)
            compare_with_two_launches(name, splits, cols, function, factor)


@pytest.mark.parametrize("interleave", [0, 32])
@pytest.mark.parametrize("splits", LONG, ids=lambda splits: f"{len(splits)} groups")
@pytest.mark.parametrize("name", NAMES)
def test_many_tiles_have_the_bits_of_two_launches(name, splits, interleave):
    function = ActivationFunction("swiglu", interleave)
    for cols in (128, 2048):
        compare_with_two_launches(name, splits, cols, function, torch.float32)


@pytest.mark.parametrize("interleave", [0, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    "splits", [*SPLITS, LONG[0]], ids=lambda splits: f"{len(splits)} groups of {max(splits)}"
)
@pytest.mark.parametrize("name", NAMES)
def test_against_torch(name, splits, interleave):
    recipe = RECIPES[name]()
    case = Case(splits, 256, ActivationFunction("reglu", interleave), device="cuda")
    for gradient in (False, True):
        options = case.options(recipe)
        if gradient:
            found, factors = dispatch.activation_groups_backward(
                case.dy, case.x, case.function, case.counts, recipe, **options
            )
            check_factors(case, factors)
        else:
            found = dispatch.activation_groups(
                case.x, case.function, case.counts, recipe, **options
            )
        values = case.by_torch(gradient=gradient)
        check_by_torch(found, values, splits, recipe, options, gradient=gradient)


def check_factors(case, found):
    """The gradient of the factors, near sums in FP64."""
    rows = min(sum(rows_of(case.splits)), case.rows)
    plain = Case(case.splits, case.cols, case.function, factor=None, device="cuda")
    y, dy = plain.by_torch(gradient=False).double(), case.dy.double()
    room = (y * dy).abs().sum(1) * 2.0**-8 + 1e-6
    assert ((found.double() - (y * dy).sum(1)).abs() <= room)[:rows].all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_no_group_are_left_alone(name):
    recipe = RECIPES[name]()
    case = Case([100, 0, 130], 128, ActivationFunction("swiglu"), behind=200, device="cuda")
    for run in (case.forward, case.backward):
        found = poisoned(lambda run=run: run(recipe))
        assert (found[0].rowwise_data[230:] == 255).all()
        for factors in found[2:]:
            assert factors[230:].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_one_layout(name):
    recipe = RECIPES[name]()
    case = Case([100, 0, 130], 256, ActivationFunction("swiglu", 32), device="cuda")
    options = case.options(recipe)
    for layouts in ((True, False), (False, True)):
        options |= dict(zip(("rowwise", "columnwise"), layouts, strict=True))
        whole = case.forward(recipe)[0], case.backward(recipe)[0]
        forward = dispatch.activation_groups(case.x, case.function, case.counts, recipe, **options)
        backward, _ = dispatch.activation_groups_backward(
            case.dy, case.x, case.function, case.counts, recipe, **options
        )
        for found, wanted in zip((forward, backward), whole, strict=True):
            assert (found.rowwise_data is not None, found.columnwise_data is not None) == layouts
            if layouts[0]:
                assert torch.equal(found.rowwise_data, wanted.rowwise_data)
            else:
                assert torch.equal(found.columnwise_data[:, :256], wanted.columnwise_data[:, :256])


def test_replays_with_other_counts():
    recipe = RECIPES["block"]()
    case = Case([100, 0, 130], 128, ActivationFunction("swiglu"), device="cuda")
    case.backward(recipe)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.forward(recipe), case.backward(recipe)
    for splits in ([1, 229, 0], [100, 0, 130], [0, 0, 230]):
        case.counts.copy_(torch.tensor(splits))
        case.splits = splits
        graph.replay()
        for mine, theirs in zip(
            found, (case.forward_by_two(recipe), case.backward_by_two(recipe)), strict=True
        ):
            check(mine, theirs, case, block=True)
