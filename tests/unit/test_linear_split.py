"""A Linear whose parameters are split."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import te_fast.pytorch as te
from linear_layers import close, expected, inputs, make
from te_fast import dispatch
from te_fast.common.recipe import Float8CurrentScaling

# The gradient of the whole weight has the weight's type. Parts of that gradient are added to main_grad.
PARTS = torch.bfloat16


@pytest.mark.parametrize("split", [("q", "k", "v"), {"q_": 16, "kv_": 32}], ids=str)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_parameters_split(split, fp8):
    layer, plain = make(parameters_split=split), make()
    names = [name.removesuffix("_") for name in split]
    assert set(dict(layer.named_parameters())) == {
        f"{name}_{kind}" for name in names for kind in ("weight", "bias")
    }
    with torch.no_grad():
        plain.weight.copy_(torch.cat([getattr(layer, f"{name}_weight") for name in names]))
        plain.bias.copy_(torch.cat([getattr(layer, f"{name}_bias") for name in names]))
    x, grad = inputs(32, layer)
    for _ in range(2):
        ys = []
        for each in (layer, plain):
            each.zero_grad()
            with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
                ys.append(each(x))
            ys[-1].backward(grad)
        assert torch.equal(*ys)
        got = torch.cat([getattr(layer, f"{name}_weight").grad for name in names])
        assert torch.equal(got, plain.weight.grad)
        with torch.no_grad():  # a part that changes is quantised anew
            getattr(layer, f"{names[0]}_weight").add_(0.25)
            plain.weight[: getattr(layer, f"{names[0]}_weight").shape[0]].add_(0.25)


@pytest.mark.parametrize("trained", ["all", "one"])
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("copied", [False, True], ids=["made", "copied"])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_a_part_that_changes_between_forward_and_backward(fp8, copied, later, trained):
    layer = make(parameters_split=("a", "b"), delay_wgrad_compute=later)
    if copied:  # parts of a copy have versions of their own
        layer = copy.deepcopy(layer)
    layer.b_weight.requires_grad_(trained == "all")
    x, grad = inputs(32, layer)
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        y = layer(x)
    with torch.no_grad():
        layer.b_weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_a_layer_that_keeps_its_result_is_freed(fp8):
    layer = make(parameters_split=("a", "b"))
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        layer.kept = [layer(inputs(32, layer)[0])]
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_parameters_split_into_main_grad(fp8):
    layer = make(parameters_split=("a", "b"), fuse_wgrad_accumulation=True)
    x, grad = inputs(32, layer)
    wanted = expected(layer, x, grad, "current" if fp8 else None)["dw"]
    for first, base in ((None, 2.0), (True, 0.0)):
        for weight in (layer.a_weight, layer.b_weight):
            weight.main_grad = torch.full((24, 64), 2.0)
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            y = layer(x, is_first_microbatch=first)
        y.backward(grad)
        got = torch.cat([layer.a_weight.main_grad, layer.b_weight.main_grad])
        close(got, base + wanted, PARTS)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("first", [None, True])
def test_frozen_parts_get_no_gradient(fp8, delay, fuse, first):
    options = {"delay_wgrad_compute": delay, "fuse_wgrad_accumulation": fuse}
    layer = make(parameters_split=("a", "b"), **options)
    x, grad = inputs(32, layer)
    layer.b_weight.requires_grad_(False)  # b_weight has no main_grad either
    layer.a_weight.main_grad = torch.full((24, 64), 2.0)
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        y = layer(x, is_first_microbatch=first)
    y.backward(grad)
    layer.backward_dw()
    assert layer.b_weight.grad is None
    assert not hasattr(layer.b_weight, "main_grad")
    wanted = expected(layer, x, grad, "current" if fp8 else None)["dw"][:24]
    if fuse:
        close(layer.a_weight.main_grad, (0.0 if first else 2.0) + wanted, PARTS)
    else:
        close(layer.a_weight.grad, wanted, torch.bfloat16)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
@pytest.mark.parametrize("first", [None, True])
def test_parts_wait_for_their_delayed_gradient(fp8, first):
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
    layer = make(parameters_split=("a", "b"), **options)
    x, grad = inputs(32, layer)
    parts = layer.a_weight, layer.b_weight
    for part in parts:
        part.main_grad = torch.full((24, 64), 2.0)
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        y = layer(x, is_first_microbatch=first)
    y.backward(grad)
    assert all(part.grad is None for part in parts)
    layer.backward_dw()
    wanted = expected(layer, x, grad, "current" if fp8 else None)["dw"]
    got = torch.cat([part.main_grad for part in parts])
    close(got, (0.0 if first else 2.0) + wanted, PARTS)


def test_parameters_split_errors():
    with pytest.raises(ValueError, match="add up"):
        make(parameters_split={"a": 16, "b": 16})
    with pytest.raises(ValueError, match="at least one"):
        make(parameters_split=())
    with pytest.raises(TypeError, match="tuple"):
        make(parameters_split=3)


def _copied(layer):
    return copy.deepcopy(layer)


def _pickled(layer):
    return pickle.loads(pickle.dumps(layer))


def _moved(layer):
    return layer.to(torch.bfloat16)


def _filled(layer):
    made = te.Linear(32, 48, parameters_split=("q", "k", "v"), device="meta").to_empty(device="cpu")
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.parametrize("way", [_copied, _pickled, _moved, _filled])
def test_parts_of_a_copy_are_one_memory(way):
    layer = te.Linear(32, 48, parameters_split=("q", "k", "v"), device="cpu")
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    other = way(layer)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, before[name].to(parameter.dtype))
    for kind, cols in (("weight", 32), ("bias", 1)):
        parts = [getattr(other, f"{part}_{kind}") for part in "qkv"]
        steps = [part.data_ptr() - parts[0].data_ptr() for part in parts]
        assert steps == [0, *(n * 16 * cols * parts[0].element_size() for n in (1, 2))]
    x = torch.randn(16, 32, dtype=other.q_weight.dtype)
    with te.autocast(recipe=Float8CurrentScaling()):
        with dispatch.record() as first:
            y = other(x, is_first_microbatch=True)
        with dispatch.record() as later:
            assert torch.equal(other(x, is_first_microbatch=False), y)
    # The later call does not quantise the weight.
    assert len(later) == len(first) - 1


def test_parts_in_memory_of_the_callers_stay_there():
    layer = te.Linear(32, 48, parameters_split=("q", "k", "v"), bias=False, device="cpu")
    buffer = torch.randn(4, 16, 32)
    for row, part in zip((buffer[3], buffer[0], buffer[2]), "qkv", strict=True):
        getattr(layer, f"{part}_weight").data = row
    layer.to(torch.float32)  # this call moves nothing
    assert layer.q_weight.data_ptr() == buffer[3].data_ptr()


def test_frozen_parts_that_were_made_in_inference_mode():
    """They have no version counter, and let gradients pass to the input."""
    layer = make(parameters_split=("q", "k", "v")).requires_grad_(False)
    with torch.inference_mode():
        served = make(parameters_split=("q", "k", "v")).requires_grad_(False)
        served.load_state_dict(layer.state_dict())
    x, grad = inputs(32, layer)
    found = []
    for each in (layer, served):
        own = x.detach().clone().requires_grad_()
        each(own).backward(grad)
        found.append(own.grad)
    assert torch.equal(*found)
