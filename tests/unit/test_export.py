"""torch.export of inference: each program is one operator, and another process computes the same bits."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch

import te_fast.pytorch as te
from selection import every_value, quickly, sampled
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import StateError, UnsupportedError
from te_fast.graphs.inference import _Loaded
from te_fast.pytorch import ops
from te_fast.runtime.compiling import CAN_COMPILE

pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later"),
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
    # Parts of a weight share one memory; torch saves all of the memory, and warns.
    pytest.mark.filterwarnings("ignore:No complete tensor found in the group"),
]
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
X = torch.randn(24, 32, generator=torch.Generator().manual_seed(2)) * 3
LOAD = """
import sys, torch, te_fast.pytorch as te
program = torch.export.load({path!r} + ".pt2").module()
x, y = torch.load({path!r} + ".pt")
for _ in range(2):
    assert torch.equal(program(x), y)
with te.autocast():
    assert torch.equal(program(x), y)
assert torch.equal(program(x), y)
print("equal")
"""


class Model(torch.nn.Module):
    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        kind = {"device": "cpu"}
        self.recipe = recipe
        self.norm_linear = te.LayerNormLinear(32, 48, normalization="RMSNorm", **kind)
        self.mlp = te.LayerNormMLP(48, 64, activation="swiglu", **kind)
        self.chain = ops.Sequential(
            ops.MakeExtraOutput(),
            ops.LayerNorm(48, **kind),
            ops.Linear(48, 64, **kind),
            ops.GELU(),
            ops.ConstantScale(0.5),
            ops.Linear(64, 32, **kind),
        )
        self.split = te.Linear(32, 32, bias=False, parameters_split=("a", "b"), **kind)

    def forward(self, x):
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y, beside = self.chain(self.mlp(self.norm_linear(x)))
            return torch.relu(self.split(y)) + beside[:, :32]


class Quantized(torch.nn.Module):
    """Layers and a chain with FP8 weights."""

    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        kind = {"device": "cpu"}
        self.recipe = recipe
        with te.quantized_model_init(recipe=recipe):
            self.mlp = te.LayerNormMLP(32, 64, **kind)
            self.chain = ops.Sequential(ops.Linear(32, 64, **kind), ops.GELU())

    def forward(self, x):
        with te.autocast(recipe=self.recipe):
            return torch.relu(self.chain(self.mlp(x)))


def exported(model, *, strict):
    rows = torch.export.Dim("rows", min=8, max=4096)
    with torch.no_grad():
        return torch.export.export(
            model, (torch.randn(16, 32),), dynamic_shapes={"x": {0: rows}}, strict=strict
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(["delayed", "current", "block"], "current"))
def test_weights_in_fp8_are_saved_as_they_are(tmp_path, fresh, name):
    model = Quantized(RECIPES[name])
    for _ in range(2):
        model(torch.randn(16, 32)).sum().backward()
    program = exported(model, strict=False)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("te_fast.inference.default") == 2
    assert not any("dequantize" in target for target in targets)
    assert_loads_alike(fresh, program, model, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "strict"),
    quickly(every_value(RECIPES, (True, False)), ("delayed", False)),
)
# A process that has not run the model takes seconds to load its program.
@pytest.mark.parametrize("elsewhere", quickly([False, True], False, slow=[False, True]))
def test_another_process_computes_the_same_bits(tmp_path, fresh, name, strict, elsewhere):
    recipe = RECIPES[name]
    model = Model(recipe)
    for _ in range(2):  # the scales are no longer the initial ones
        model(torch.randn(16, 32)).sum().backward()
    program = exported(model, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("te_fast.inference.default") == (3 if recipe is None else 4)
    assert not any("te_fast.program" in target for target in targets)
    assert_loads_alike(fresh if elsewhere else here, program, model, tmp_path / name)


def here(script):
    """Run a script in this process."""
    exec(script, {})
    return "equal\n"


def assert_loads_alike(run, program, model, path):
    """Check that the saved program computes where `run` runs a script what the model computes here."""
    torch.export.save(program, f"{path}.pt2")
    with torch.no_grad():
        torch.save((X, model(X)), f"{path}.pt")
    assert run(LOAD.format(path=str(path))).endswith("equal\n")


def test_a_model_that_has_never_run_is_exported_with_its_first_scales():
    layer = te.LayerNormMLP(32, 32, device="cpu")
    with torch.no_grad(), te.autocast(recipe=DelayedScaling()):
        program = exported(layer_alone(layer), strict=False).module()
        wanted = layer(X)
    assert torch.equal(program(X), wanted)


def test_a_region_around_the_export_is_the_programs():
    layer = te.Linear(32, 32, device="cpu")
    with te.autocast(recipe=Float8CurrentScaling()):
        program = exported(layer_alone(layer), strict=False).module()
        with torch.no_grad():
            wanted = layer(X)
    assert torch.equal(program(X), wanted)
    with torch.no_grad():
        assert not torch.equal(program(X), layer(X))


def layer_alone(layer):
    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    return Alone()


def test_new_weights_are_quantised_anew():
    layer = te.Linear(32, 32, device="cpu")
    with te.autocast(recipe=Float8CurrentScaling()):
        program = exported(layer_alone(layer), strict=False).module()
    before = program(X)
    with torch.no_grad():
        program.layer.weight.mul_(-2)
        program.layer.bias.mul_(-2)
    assert torch.equal(program(X), -2 * before)


def test_other_weights_in_the_same_memory_are_quantised_anew():
    memory = torch.randn(32, 32)
    layer = te.Linear(32, 32, bias=False, device="cpu")
    layer.weight = torch.nn.Parameter(torch.from_numpy(memory.numpy()))
    with te.autocast(recipe=Float8CurrentScaling()):
        program = exported(layer_alone(layer), strict=False).module()
    del layer
    # A new tensor may take the memory of a freed tensor: neither the address nor a version tells the two apart.
    program.layer.weight = torch.nn.Parameter(torch.from_numpy(memory.numpy()))
    before = program(X)
    memory.numpy()[:] *= -2
    program.layer.weight = torch.nn.Parameter(torch.from_numpy(memory.numpy()))
    assert torch.equal(program(X), -2 * before)


@pytest.mark.parametrize("name", quickly(RECIPES, "block"))
def test_a_program_that_is_gone_leaves_nothing(name):
    recipe = RECIPES[name]

    def run():
        layer = te.LayerNormMLP(32, 32, device="cpu")
        with te.autocast(enabled=recipe is not None, recipe=recipe or DelayedScaling()):
            program = exported(layer_alone(layer), strict=False).module()
        for _ in range(2):
            program(X)
            assert weights_that_live() == before + 2
        return weakref.ref(program)

    gc.collect()
    before = weights_that_live()
    program = run()
    gc.collect()
    assert program() is None
    assert weights_that_live() == before


def weights_that_live():
    """The number of weights that programs loaded from text hold."""
    return sum(len(loaded._handles) for loaded in gc.get_objects() if type(loaded) is _Loaded)


def test_rows_that_fp8_lacks_and_no_rows():
    layer = te.LayerNormMLP(32, 32, device="cpu")
    with te.autocast(recipe=Float8CurrentScaling()):
        program = exported(layer_alone(layer), strict=False)
    [text] = [n.args[-1] for n in program.graph.nodes if "inference" in str(n.target)]
    params = list(layer.parameters())
    run = torch.ops.te_fast.inference
    assert run(torch.zeros(0, 32), [], params, [], text)[0].shape == (0, 32)
    with pytest.raises(ValueError, match="multiple of 8"):
        run(torch.zeros(7, 32), [], params, [], text)


def test_an_operation_in_python_is_exported():
    chain = ops.Sequential(ops.Linear(32, 32, device="cpu"), ops.Reshape((-1, 32)))
    with torch.no_grad():
        program = torch.export.export(chain, (X,), strict=False).module()
        assert torch.equal(program(X), chain(X))


class InTwoPlaces(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.first, self.second = module, module

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.RMSNorm(32, device="cpu"),
        lambda: ops.Linear(32, 32, device="cpu"),
        lambda: ops.Sequential(ops.RMSNorm(32, device="cpu"), ops.GELU()),
    ],
    ids=["RMSNorm", "Linear", "Sequential"],
)
def test_a_module_in_two_places_keeps_nothing_of_the_trace(make):
    """torch calls stand-ins of such modules, which hold the trace."""
    from torch.fx.experimental import proxy_tensor

    module = make()
    model = InTwoPlaces(module)
    with torch.no_grad():
        program = torch.export.export(model, (X,), strict=False)
        assert torch.equal(program.module()(X), model(X))
        assert module.__dict__["_direct_program"] is not None
    del program
    gc.collect()
    assert not any(issubclass(type(one), proxy_tensor._AttrProxy) for one in gc.get_objects())


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_that_was_exported_with_gradients_is_traced_again(strict):
    """A trace that is not strict drops the scales that it has made, while tensors are fake."""
    if strict and torch.__version__ < "2.9":
        pytest.skip("its strict traces take no tensors beside parameters and buffers")
    layer = te.Linear(32, 32, device="cpu")
    with te.autocast(recipe=DelayedScaling()):
        torch.export.export(layer_alone(layer), (X,), strict=strict)
        assert type(layer._traced.handle) is torch.Tensor
        again = torch.export.export(layer_alone(layer), (X,), strict=strict).module()
        assert torch.equal(again(X), layer(X))


def test_what_cannot_be_saved_is_refused():
    layer = te.Linear(32, 32, device="cpu")
    recipe = DelayedScaling(amax_compute_algo=lambda history: history[0])
    with te.autocast(recipe=recipe), pytest.raises(UnsupportedError, match="amax_compute_algo"):
        exported(layer_alone(layer), strict=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: "{", "damaged"),
        (lambda d: json.dumps(d | {"ops": [["explode", "x"]]}), "no op 'explode'"),
        (lambda d: json.dumps(d | {"recipe": ["Recipes", {}]}), "no recipe 'Recipes'"),
        (lambda d: json.dumps(d | {"ops": [["linear", "x", "a", 3]]}), "damaged"),
        (lambda d: json.dumps({}), "damaged"),
    ],
)
def test_a_damaged_text_is_refused(change, match):
    described = {"name": "layer", "widths": [32], "ops": [["linear", "x", 32, 32]]}
    whole = json.dumps(described)
    weight = torch.randn(32, 32)
    [y] = torch.ops.te_fast.inference(X, [], [weight], [], whole)
    assert torch.allclose(y, X @ weight.t(), atol=1e-4)
    with pytest.raises(StateError, match=match):
        torch.ops.te_fast.inference(X, [], [weight], [], change(described))


class Squared(ops.BasicOperation):
    """An operation of a user's own, whose backward is not the derivative of its forward."""

    def op_forward(self, ctx, input_, **_):
        return input_ * input_

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


class Scaled(ops.BasicOperation):
    """One with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((32,), 3.0))

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_)
        return input_ * self.scale

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * self.scale, ((grad_output * x).sum(0),)


@pytest.mark.parametrize(
    ("kind", "strict"),
    sampled([Squared, Scaled], [False, True], quick=[(Squared, False), (Scaled, False)]),
)
def test_operations_of_the_users_own(kind, strict):
    linear = ops.Linear(32, 32, device="cpu")
    chain = ops.Sequential(linear, kind())
    with torch.no_grad():
        program = torch.export.export(chain, (X,), strict=strict).module()
        found = program(X)
        y = torch.nn.functional.linear(X, *linear.parameters())
    assert torch.allclose(found, y * y if kind is Squared else 3 * y, rtol=1e-4, atol=1e-4)
    # With gradients, a program would have lost the operation's own backward.
    error = Exception if strict else UnsupportedError
    text = f"op 1: {kind.__name__}: torch.export keeps no backward"
    if strict and torch.__version__ < "2.9":  # its strict traces tell no message
        text = "Observed exception"
    with pytest.raises(error, match=text):
        torch.export.export(chain, (X,), strict=strict)


def test_operations_of_the_users_own_without_anything_to_train():
    """Nothing is lost where nothing wants a gradient."""
    program = torch.export.export(ops.Sequential(Squared()), (X,), strict=False).module()
    assert torch.equal(program(X), X * X)
