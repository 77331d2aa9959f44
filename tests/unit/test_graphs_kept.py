"""Weights that compiled calls keep: each program that has a weight finds what another one has quantised."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.pytorch import ops
from te_fast.runtime.compiling import CAN_COMPILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_COMPILE, reason="torch cannot trace native calls"),
]
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
#: So small that nothing is dropped.
RARELY = 1e-30


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(1)


def both(module):
    return torch.compile(module, backend="eager"), copy.deepcopy(module), module


def agree(compiled, eager, *, autocast=False):
    x = X.view(4, 4, 64) if isinstance(eager, te.TransformerLayer) else X
    found = []
    for each in (compiled, eager):
        with (
            torch.no_grad(),
            te.autocast(recipe=Float8CurrentScaling()),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            found.append(each(x))
    return torch.equal(*found)


def chain(*between):
    return ops.Sequential(ops.Linear(64, 64, device="cpu"), *between)


@pytest.mark.parametrize("name", ["layer", "chain"])
def test_in_training_after_evaluation(name):
    if name == "layer":
        rates = {"hidden_dropout": RARELY, "attention_dropout": 0.0}
        module = te.TransformerLayer(64, 128, 4, device="cpu", **rates)
    else:
        module = chain(ops.Dropout(RARELY), ops.Linear(64, 64, device="cpu"))
    compiled, eager, module = both(module)
    for _ in range(2):
        for training in (False, True):
            module.train(training)
            assert agree(compiled, eager.train(training))
        with torch.no_grad():
            for each in (module, eager):
                for parameter in each.parameters():
                    parameter.mul_(2)


def test_of_a_chain_that_grows():
    compiled, eager, module = both(chain(ops.GELU()))
    assert agree(compiled, eager)
    for each in (module, eager):
        each.append(ops.ReLU())
    assert agree(compiled, eager)


def test_in_another_type():
    compiled, eager, _ = both(chain(ops.GELU()))
    assert agree(compiled, eager)
    assert agree(compiled, eager, autocast=True)
    assert agree(compiled, eager)


def test_of_a_part_by_itself():
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    compiled, eager, module = both(te.TransformerLayer(64, 128, 4, device="cpu", **rates))
    assert agree(compiled, eager)
    part, of_eager = module.layernorm_mlp, eager.layernorm_mlp
    assert agree(lambda x: torch.compile(part, backend="eager")(x)[0], lambda x: of_eager(x)[0])


def test_in_microbatches_with_and_without_gradients_of_the_input():
    """They need the first product's weight in other layouts, but the second one's in the same."""
    compiled, eager, _ = both(chain(ops.GELU(), ops.Linear(64, 64, device="cpu")))
    for scale, is_first, wants in (
        (1, True, True),
        (1, False, False),
        (2, True, False),
        (2, False, True),
    ):
        found = []
        for each in (compiled, eager):
            x = (scale * X).requires_grad_(wants)
            with te.autocast(recipe=Float8CurrentScaling()):
                y = each(x, is_first_microbatch=is_first)
            y.square().sum().backward()
            found.append((y, x.grad if wants else y))
        assert all(map(torch.equal, *found))
