"""Parameters that are deleted or replaced by tensors that the layer cannot read are named."""

import copy

import pytest
import torch

import te_fast.pytorch as te
from recipes import RECIPES
from selection import sampled
from te_fast.errors import DeviceError, MissingAttributeError, ShapeError, TeFastError

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
MAKE = {
    "Linear": lambda: te.Linear(32, 48, device="cpu"),
    "parts": lambda: te.Linear(32, 48, parameters_split={"q": 32, "k": 16}, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 48, device="cpu"),
    "RMSNorm": lambda: te.LayerNormLinear(32, 48, normalization="RMSNorm", device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, activation="swiglu", device="cpu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, 32, 48, device="cpu"),
    "stack": lambda: te.GroupedLinear(2, 32, 48, single_grouped_weight=True, device="cpu"),
}


def run(layer, recipe=None):
    with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
        return layer(X, [8, 8]) if isinstance(layer, te.GroupedLinear) else layer(X)


def each_parameter(kind):
    """Copies of a layer, with the name of a parameter."""
    layer = MAKE[kind]()
    run(layer)
    return [(copy.deepcopy(layer), name) for name, _ in layer.named_parameters()]


@pytest.mark.parametrize(("kind", "recipe"), sampled(MAKE, [None, *RECIPES]))
def test_a_deleted_parameter(kind, recipe):
    for layer, name in each_parameter(kind):
        parameter = getattr(layer, name)
        expected = run(layer).detach()
        delattr(layer, name)
        with pytest.raises(MissingAttributeError, match=rf"Layer_\d+: parameter {name} was del"):
            run(layer, recipe)
        setattr(layer, name, parameter)  # as FSDP does
        assert torch.equal(run(layer), expected)


@pytest.mark.parametrize(("kind", "recipe"), sampled(MAKE, [None, *RECIPES]))
def test_a_parameter_that_is_none(kind, recipe):
    for layer, name in each_parameter(kind):
        setattr(layer, name, None)
        if (kind, name, recipe) == ("Linear", "bias", None):  # torch's own function takes it
            expected = torch.nn.functional.linear(X, layer.weight)
            assert torch.equal(run(layer), expected)
            continue
        with pytest.raises(TeFastError, match=rf"Layer_\d+: .*({name}|NoneType)"):
            run(layer, recipe)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_bias_to_return_that_is_none(recipe):
    layer = te.Linear(32, 48, return_bias=True, device="cpu")
    layer.bias = None
    with pytest.raises(TeFastError, match=r"Layer_\d+: .*(bias|NoneType)"):
        run(layer, recipe)


OPS = {
    "LayerNorm": lambda: te.LayerNorm(32, device="cpu"),
    "RMSNorm": lambda: te.ops.RMSNorm(32, device="cpu"),
    "Linear": lambda: te.ops.Linear(32, 48, device="cpu"),
    "Bias": lambda: te.ops.Bias(32, device="cpu"),
    "Sequential": lambda: te.ops.Sequential(
        te.ops.LayerNorm(32, device="cpu"), te.ops.Linear(32, 48, device="cpu"), te.ops.GELU()
    ),
    "GroupedLinear": lambda: te.ops.GroupedLinear(2, 32, 48, device="cpu"),
}


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", OPS)
def test_a_removed_parameter_of_an_operation(kind, has_run):
    counts = (torch.tensor([8, 8]),) if kind == "GroupedLinear" else ()
    names = [name for name, _ in OPS[kind]().named_parameters()]
    for name in names:
        for remove in (delattr, lambda owner, leaf: setattr(owner, leaf, None)):
            op = OPS[kind]()
            if has_run:
                op(X, *counts)
            path, _, leaf = name.rpartition(".")
            owner = op.get_submodule(path)
            parameter = getattr(owner, leaf)
            remove(owner, leaf)
            with pytest.raises(MissingAttributeError, match=rf"op \S+: \w+: parameter {leaf} was"):
                op(X, *counts)
            setattr(owner, leaf, parameter)
            assert op(X, *counts).shape[0] == 16


@pytest.mark.parametrize("kind", MAKE)
def test_a_parameter_of_another_shape_or_device(kind):
    for layer, name in each_parameter(kind):
        former = getattr(layer, name)
        setattr(layer, name, torch.nn.Parameter(torch.randn(7)))
        with pytest.raises(ShapeError, match=r"Layer_\d+: .*\[7\]|Layer_\d+: .*sizes"):
            run(layer)
        if (kind, name) == ("Linear", "weight"):  # torch's own function takes it
            continue
        setattr(layer, name, torch.nn.Parameter(torch.empty_like(former, device="meta")))
        with pytest.raises((DeviceError, TypeError), match=r"Layer_\d+: .*meta"):
            run(layer)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_computed_parameter_is_read_once(kind):
    """A spectral norm takes a step at each access."""

    class Counted(torch.nn.Module):
        count = 0

        def forward(self, parameter):
            self.count += 1
            return parameter * 2

    for recipe in (None, *RECIPES):
        for layer, name in each_parameter(kind):
            doubled = copy.deepcopy(layer)
            with torch.no_grad():
                getattr(doubled, name).mul_(2)
            counted = Counted()
            torch.nn.utils.parametrize.register_parametrization(layer, name, counted)
            counted.count = 0
            assert torch.equal(run(layer, recipe), run(doubled, recipe))
            assert counted.count == 1, name
