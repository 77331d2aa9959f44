"""Calls of layers whose ``forward`` is not the layer's own: a mixin's, or a function in place of the method."""

from unittest import mock

import pytest
import torch
import torch.fx

import te_fast.pytorch as te
from te_fast import TeFastError

_CLASSES = {
    "Linear": (te.Linear, (32, 32), {"device": "cpu"}),
    "LayerNormLinear": (te.LayerNormLinear, (32, 32), {"device": "cpu"}),
    "LayerNormMLP": (te.LayerNormMLP, (32, 64), {"device": "cpu"}),
    "LayerNorm": (te.LayerNorm, (32,), {"device": "cpu"}),
    "RMSNorm": (te.RMSNorm, (32,), {"device": "cpu"}),
    "ops.Linear": (te.ops.Linear, (32, 32), {"device": "cpu"}),
    "ops.GELU": (te.ops.GELU, (), {}),
    "ops.Sequential": (te.ops.Sequential, (te.ops.GELU(),), {}),
}

every_class = pytest.mark.parametrize("name", _CLASSES)


class _Scaled:
    """A mixin like those of adapters and quantisers: it takes a keyword of its own and calls the layer's forward."""

    def forward(self, hidden, *others, factor=1.0, **keywords):
        return super().forward(hidden, *others, **keywords) * factor


@pytest.fixture
def x():
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def _scaled(forward):
    def scaled(self, inp, *others, factor=1.0, **keywords):
        return forward(self, inp, *others, **keywords) * factor

    return scaled


@every_class
def test_forward_of_a_mixin(name, x):
    base, arguments, options = _CLASSES[name]
    scaled = type("Scaled", (_Scaled, base), {})
    layer = scaled(*arguments, **options)
    expected = 3.0 * base.forward(layer, x)
    assert torch.equal(layer(x, factor=3.0), expected)
    assert torch.equal(layer(hidden=x, factor=3.0), expected)
    # The same holds for classes that derive from such a class.
    layer.__class__ = type("Derived", (scaled,), {})
    assert torch.equal(layer(x, factor=3.0), expected)


@every_class
def test_call_of_a_mixin(name, x):
    base, arguments, options = _CLASSES[name]

    class Counted:
        calls = 0

        def __call__(self, *args, **kwargs):
            self.__dict__["calls"] = self.calls + 1
            return super().__call__(*args, **kwargs)

    layer = type("Counting", (_Scaled, Counted, base), {})(*arguments, **options)
    expected = 3.0 * base.forward(layer, x)
    assert torch.equal(layer(x, factor=3.0), expected)
    assert layer.calls == 1


@every_class
@pytest.mark.parametrize("derived", [False, True])
def test_forward_of_a_class_is_exchanged(name, derived, x):
    base, arguments, options = _CLASSES[name]
    owner = type("Derived", (base,), {}) if derived else base
    layer = owner(*arguments, **options)
    plain = layer(x)
    with mock.patch.object(owner, "forward", _scaled(base.forward)):
        assert torch.equal(layer(x, factor=3.0), 3.0 * plain)
        assert torch.equal(layer(inp=x, factor=3.0), 3.0 * plain)
    assert torch.equal(layer(x), plain)


@every_class
def test_forward_of_an_instance_takes_other_keywords(name, x):
    base, arguments, options = _CLASSES[name]
    layer = base(*arguments, **options)
    expected = 3.0 * layer(x)
    layer.forward = _scaled(base.forward).__get__(layer)
    assert torch.equal(layer(x, factor=3.0), expected)
    assert torch.equal(layer(inp=x, factor=3.0), expected)


@every_class
@pytest.mark.parametrize("keywords", [{}, {"wrong": 1}], ids=str)
def test_a_call_without_input_is_a_type_error_of_forward(name, keywords):
    base, arguments, options = _CLASSES[name]
    layer = base(*arguments, **options)
    with pytest.raises(TypeError, match=r"forward\(\)"):
        layer(**keywords)


@every_class
def test_none_is_no_tensor_and_says_so(name):
    base, arguments, options = _CLASSES[name]
    layer = base(*arguments, **options)
    for call in (lambda: layer(None), lambda: layer.forward(None)):
        with pytest.raises(TeFastError, match="NoneType") as caught:
            call()
        assert isinstance(caught.value, TypeError)


class _LeafTracer(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


@every_class
def test_a_tracer_sees_the_call(name, x):
    base, arguments, options = _CLASSES[name]
    model = torch.nn.Sequential(base(*arguments, **options), torch.nn.Tanh())
    traced = torch.fx.GraphModule(model, _LeafTracer().trace(model))
    assert [node.op for node in traced.graph.nodes].count("call_module") == 2
    assert torch.equal(traced(x), model(x))


@every_class
def test_input_that_is_no_tensor_is_a_type_error(name):
    base, arguments, options = _CLASSES[name]
    with pytest.raises(TypeError, match="input must be a torch.Tensor, got int"):
        base(*arguments, **options)(1)
