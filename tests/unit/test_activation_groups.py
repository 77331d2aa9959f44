"""Activations of experts' rows into FP8 in one launch, on the host backend: against plain torch, and by two calls."""

import pytest
import torch

import te_fast
from expert_activations import NAMES, SPLITS, Case, check_by_torch, check_groups, same_bits
from recipes import RECIPES
from selection import sampled
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.dispatch import ActivationFunction


@pytest.mark.parametrize(("name", "splits", "interleave"), sampled(NAMES, SPLITS[:3], [0, 8, 64]))
def test_against_torch(name, splits, interleave):
    recipe = RECIPES[name]()
    case = Case(splits, 128, ActivationFunction("reglu", interleave))
    for gradient in (False, True):
        options = case.options(recipe)
        if gradient:
            found, _ = dispatch.activation_groups_backward(
                case.dy, case.x, case.function, case.counts, recipe, **options
            )
        else:
            found = dispatch.activation_groups(
                case.x, case.function, case.counts, recipe, **options
            )
        values = case.by_torch(gradient=gradient)
        check_by_torch(found, values, splits, recipe, options, gradient=gradient)


@pytest.mark.parametrize(
    ("name", "splits", "factor"), sampled(NAMES, SPLITS, [torch.float32, torch.bfloat16, None])
)
def test_has_the_bits_of_two_calls(name, splits, factor):
    recipe = RECIPES[name]()
    for cols, function in [
        (128, ActivationFunction("swiglu")),
        (256, ActivationFunction("clamped_swiglu", 32, 1.5, 1.3, -0.25)),
        (136, ActivationFunction("geglu")),
        (16, ActivationFunction("situ_glu", 16)),
    ]:
        case = Case(splits, cols, function, behind=3, factor=factor)
        pairs = [(case.forward(recipe), case.forward_by_two(recipe))]
        if cols % 128 == 0:
            pairs.append((case.backward(recipe), case.backward_by_two(recipe)))
        for found, wanted in pairs:
            check_groups(found[0], wanted[0], splits, block=name == "block")
            for mine, theirs in zip(found[1:], wanted[1:], strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or same_bits(mine, theirs)


def test_one_layout():
    recipe, case = Float8BlockScaling(), Case([3, 130], 128, ActivationFunction("swiglu"))
    both, _ = case.forward(recipe)
    row = dispatch.activation_groups(
        case.x, case.function, case.counts, recipe, row_scale=case.row_scale
    )
    assert row.columnwise_data is None
    assert torch.equal(row.rowwise_data, both.rowwise_data)
    column, _ = dispatch.activation_groups_backward(
        case.dy,
        case.x,
        case.function,
        case.counts,
        recipe,
        row_scale=case.row_scale,
        rowwise=False,
        columnwise=True,
    )
    assert column.rowwise_data is None
    assert torch.equal(column.columnwise_data, case.backward(recipe)[0].columnwise_data)


def test_what_has_no_kernel_is_refused_by_name():
    swiglu, block = ActivationFunction("swiglu"), Float8BlockScaling()
    case = Case([3], 128, swiglu)

    def forward(x=case.x, function=swiglu, recipe=block, **options):
        return dispatch.activation_groups(x, function, case.counts, recipe, **options)

    def backward(cols, function=swiglu):
        x, dy = torch.ones(3, 2 * cols).bfloat16(), torch.ones(3, cols).bfloat16()
        return dispatch.activation_groups_backward(dy, x, function, case.counts, block)

    for call, words in [
        (lambda: forward(function=ActivationFunction("gelu")), "gated"),
        (lambda: forward(case.x.half()), "bfloat16"),
        (lambda: forward(recipe=Float8CurrentScaling()), "needs the maxima"),
        (lambda: forward(case.x[:, :24].contiguous()), "rows of 8 columns"),
        (lambda: forward(function=ActivationFunction("swiglu", 4)), "rows of 8 columns"),
        (lambda: backward(144), "128 columns"),
        (lambda: backward(384, ActivationFunction("swiglu", 96)), "128 columns"),
    ]:
        with pytest.raises(te_fast.UnsupportedError, match=words):
            call()
    with pytest.raises(ValueError, match="leave scale"):
        forward(scale=torch.ones(1))
    with pytest.raises(ValueError, match="even number"):
        forward(torch.ones(3, 15).bfloat16())
    with pytest.raises(ValueError, match="null"):
        forward(recipe=DelayedScaling())
    with pytest.raises(te_fast.ShapeError, match="row_scale"):
        forward(row_scale=torch.ones(2))
