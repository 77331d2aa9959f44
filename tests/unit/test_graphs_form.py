"""Layers in traces: a graph fits layers of one form, and a layer that changes gets another graph."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

import te_fast.pytorch as te
from graphs import error_of, needs_compile
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.errors import UnsupportedError

pytestmark = [needs_compile, pytest.mark.every_torch, pytest.mark.usefixtures("fresh_dynamo")]

OPTIONS = {"params_dtype": torch.bfloat16, "device": "cpu"}


def layer_of(**options):
    return te.Linear(32, 32, **OPTIONS, **options)


def call(layer, x):
    return layer(x)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def in_fp8(function, *given):
    with te.autocast(recipe=Float8CurrentScaling()):
        return function(*given)


def test_layers_of_one_program_that_return_other_things_share_no_graph():
    """The bias that is returned is no part of the program, so that both layers have the same one."""
    plain, with_bias = layer_of(bias=False), layer_of(return_bias=True)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for layer in (plain, with_bias, plain):
        eager, traced = (in_fp8(function, layer, x) for function in (call, compiled))
        if layer is plain:
            assert torch.equal(eager, traced)
        else:
            assert isinstance(traced, tuple)
            assert torch.equal(eager[0], traced[0])
            assert traced[1] is layer.bias
    assert graphs() == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_of_another_type_is_refused_as_in_eager(dtype):
    """Torch does not look at parameters again while the dictionaries of their modules are the same."""
    layers = torch.nn.Sequential(
        te.Linear(32, 32, device="cpu"), te.LayerNormLinear(32, 32, device="cpu")
    )
    x = torch.randn(16, 32)
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        in_fp8(compiled, x)
    layers.to(dtype)
    assert "DtypeError" in error_of(in_fp8, layers, x)
    assert "DtypeError" in error_of(in_fp8, compiled, x)
    torch.compiler.reset()
    x = x.to(dtype)
    if dtype == torch.bfloat16:
        assert torch.equal(in_fp8(compiled, x), in_fp8(layers, x))


def test_a_changed_layer_gets_another_graph():
    layer = layer_of()
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(in_fp8(compiled, x), in_fp8(layer, x))
    layer.return_bias, layer.apply_bias = True, False
    (y, bias), (eager, _) = in_fp8(compiled, x), in_fp8(layer, x)
    assert torch.equal(y, eager)
    assert bias is layer.bias
    layer.return_bias, layer.apply_bias = False, True
    assert torch.equal(in_fp8(compiled, x), in_fp8(layer, x))


def test_parameters_are_read_where_they_are():
    """A parameter that was replaced, and one that became a plain tensor, as sharding leaves it."""
    layer = layer_of(bias=False)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    in_fp8(compiled, x)
    layer.weight = torch.nn.Parameter(torch.randn(32, 32, dtype=torch.bfloat16))
    assert torch.equal(in_fp8(compiled, x), in_fp8(layer, x))
    weight = layer.weight.detach().clone()
    del layer._parameters["weight"]
    layer.weight = weight
    traced = in_fp8(compiled, x)
    expected = layer_of(bias=False)
    expected.weight = torch.nn.Parameter(weight)
    assert torch.equal(traced, in_fp8(expected, x))


def compiled_and_unfrozen(layer, run):
    """Compile a layer whose weight is frozen, train the weight from then on, and return its gradient."""
    layer.weight.requires_grad_(False)
    x = torch.randn(16, 32, dtype=layer.weight.dtype, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    run(compiled, x).sum().backward()
    assert layer.weight.grad is None
    layer.weight.requires_grad_(True)
    run(compiled, x).sum().backward()
    found, layer.weight.grad = layer.weight.grad, None
    return x, found


def test_a_frozen_weight_that_trains_later_gets_a_gradient():
    plain = torch.nn.Linear(32, 32, bias=False)
    if compiled_and_unfrozen(plain, lambda compiled, x: compiled(x))[1] is None:
        pytest.skip("this release of torch misses the change in its own layers, too")
    layer = layer_of(bias=False)
    x, found = compiled_and_unfrozen(layer, in_fp8)
    in_fp8(layer, x).sum().backward()
    assert torch.equal(found, layer.weight.grad)


def test_what_cannot_be_traced_is_refused_with_the_layers_name():
    layer = layer_of(bias=False, name="fp8")
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: layer(x, fp8_grad=True), fullgraph=True, backend="aot_eager")
    # torch 2.8 tells only the type of an error that it meets in a trace.
    with pytest.raises(
        (UnsupportedError, torch._dynamo.exc.Unsupported),
        match=r"fp8: fp8_output and fp8_grad|raised exception \w+\(UnsupportedError\)",
    ):
        in_fp8(compiled, x)


def test_layers_that_are_not_called_keep_their_recipes():
    """A trace prepares all layers of a kind; it says nothing of those that have another recipe."""
    other, traced = (te.Linear(16, 16, device="cpu") for _ in range(2))
    x = torch.randn(16, 16)
    with te.autocast(recipe=Float8CurrentScaling()):
        wanted = other(x)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    with te.autocast(recipe=DelayedScaling()):
        compiled(x)
    assert isinstance(other.fp8_meta["recipe"], Float8CurrentScaling)
    with te.autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(other(x), wanted)
