"""Errors of Linear and their messages."""

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from linear_layers import inputs, make
from te_fast.common.recipe import MXFP8BlockScaling


def test_bad_input_is_named(recipe):
    layer = make(name="proj")
    x, _ = inputs(32, layer)
    cases = [
        (lambda: layer(x[:, :32]), ValueError, "proj: .*in_features = 64"),
        (lambda: layer(x[:3]), ValueError, "proj: .*append 5 rows"),
        (lambda: layer(x.float()), TypeError, "proj: .*bfloat16"),
        (lambda: layer(x.to("meta")), RuntimeError, "proj: .*cpu"),
        (lambda: layer("x"), TypeError, "proj: .*str"),
        (lambda: layer(torch.tensor(1.0, dtype=torch.bfloat16)), ValueError, "proj: .*in_features"),
    ]
    for call, kind, message in cases:
        with te.autocast(recipe=recipe), pytest.raises(kind, match=message) as raised:
            call()
        assert isinstance(raised.value, te_fast.TeFastError)


@pytest.mark.parametrize(
    "options",
    [
        {"ub_overlap_ag": True},
        {"ub_overlap_rs": True},
        {"ub_overlap_rs_dgrad": True},
        {"ub_bulk_dgrad": True},
        {"ub_bulk_wgrad": True},
        {"symmetric_ar_type": "multimem_all_reduce"},
    ],
    ids=str,
)
def test_unsupported_arguments_are_named(options):
    with pytest.raises(te_fast.UnsupportedError, match=next(iter(options))):
        make(**options)


def test_unaligned_features():
    for layer in (make(40, 48), make(64, 40)):
        x, grad = inputs(32, layer)
        with te.autocast(), pytest.raises(ValueError, match="multiple of"):
            layer(x).backward(grad)


def test_blackwell_recipes_raise():
    with pytest.raises(RuntimeError, match="MXFP8"), te.autocast(recipe=MXFP8BlockScaling()):
        pass
