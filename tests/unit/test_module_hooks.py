"""Which calls of modules are their classes' own forwards alone: natively, and as traces see it."""

from __future__ import annotations

import pytest
import torch

import te_fast.pytorch as te
from te_fast.graphs.stand_ins import _are_called_plainly
from te_fast.runtime import native
from te_fast.runtime.module_hooks import are_called_plainly


def nothing(*_):
    """Do nothing, as any kind of hook."""


REGISTRIES = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]
OF_ALL_MODULES = [
    torch.nn.modules.module.register_module_forward_hook,
    torch.nn.modules.module.register_module_forward_pre_hook,
    torch.nn.modules.module.register_module_full_backward_hook,
    torch.nn.modules.module.register_module_full_backward_pre_hook,
]


@pytest.fixture(params=[are_called_plainly, _are_called_plainly], ids=["native", "traced"])
def plainly(request):
    """Both answers to the question."""
    return request.param


@pytest.fixture
def modules():
    """A layer of te_fast and a module of torch's."""
    return te.Linear(16, 16, device="cpu"), torch.nn.ReLU()


@pytest.mark.parametrize("register", REGISTRIES)
def test_a_hook_of_one_module(plainly, modules, register):
    for module in modules:
        assert plainly(*modules)
        handle = getattr(module, register)(nothing)
        assert not plainly(*modules)
        handle.remove()
    assert plainly(*modules)
    assert plainly()


@pytest.mark.parametrize("register", OF_ALL_MODULES)
def test_a_hook_of_all_modules(plainly, modules, register):
    handle = register(nothing)
    try:
        assert not plainly(*modules)
    finally:
        handle.remove()
    assert plainly(*modules)


def test_a_forward_of_the_instance_and_a_compiled_call(plainly, modules):
    for module in modules:
        module.forward = nothing
        assert not plainly(*modules)
        del module.forward
        module._compiled_call_impl = nothing
        assert not plainly(*modules)
        module._compiled_call_impl = None
        assert plainly(*modules)


@pytest.mark.parametrize("register", REGISTRIES)
def test_children_are_as_they_were_found(register):
    outer = torch.nn.Sequential(
        torch.nn.ReLU(), torch.nn.Linear(4, 4), te.Linear(16, 16, device="cpu")
    )
    watched = [(outer, list(outer.named_children())), (outer[0], [])]
    assert native.are_as_found(watched)
    for child in outer:
        handle = getattr(child, register)(nothing)
        assert not native.are_as_found(watched)
        handle.remove()
    outer[1].forward = outer[1].forward  # conversions replace forwards
    assert native.are_as_found(watched)
    kept, outer[1] = outer[1], torch.nn.Linear(4, 4)
    assert not native.are_as_found(watched)
    outer[1] = kept
    assert native.are_as_found(watched)
    del outer[2]
    assert not native.are_as_found(watched)


CLASSES = [
    te.MultiheadAttention,
    te.DotProductAttention,
    te.LayerNormLinear,
    te.Linear,
    te.LayerNormMLP,
]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_forward_that_replaces_that_of_a_class_is_called(kind, dropout, monkeypatch):
    # Without dropout of attention the layer is one node, which the second call finds without checks.
    layer = te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=dropout, device="cpu"
    )
    x = torch.randn(4, 2, 32)
    for _ in range(2):
        layer(x)
    own, calls = kind.forward, []

    def forward(self, *args, **kwargs):
        calls.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    layer(x)
    assert len(calls) == 1
    monkeypatch.undo()
    layer(x)
    assert len(calls) == 1
