"""benches/parity.py finds differences, and finds none between te_fast and te_fast itself, on the CPU."""

import json
import math
import types

import pytest
import torch

import parity
import te_fast.pytorch as te
from te_fast.pytorch import ops, optimizers, router

# These are a class that only te_fast has, classes that need ranks, and base classes.
NOT_COMPARED = {te.MoE, ops.AllGather, ops.AllReduce, ops.ReduceScatter, ops.OperationFuser}
NOT_COMPARED |= {ops.FusibleOperation, ops.BasicOperation, ops.FusedOperation}
X = torch.empty(64, parity.COLS, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(parity.cases()))
def test_every_case_runs_and_equals_itself(case):
    # Each case runs with one recipe, and any recipe serves this test.
    recipe = list(parity.recipes())[len(case) % 5]
    found = parity.compare(parity.own(), parity.own(), case, recipe, X)
    assert found["output"] == 0
    assert set(found.values()) == {0.0}


class Watched:
    """A module that notes which of its names are asked for."""

    def __init__(self, module, asked):
        self.module, self.asked = module, asked
        self.__name__ = module.__name__

    def __getattr__(self, name):
        value = getattr(self.module, name)
        self.asked.add(value if callable(value) else None)
        return Watched(value, self.asked) if isinstance(value, types.ModuleType) else value


def test_every_class_and_function_of_both_libraries_has_a_case():
    asked = set()
    own = parity.own()
    library = parity.Library(Watched(own.pytorch, asked), own.recipe)
    recipe = own.recipe.Float8CurrentScaling()
    given = parity.Given(torch.float32, torch.device("cpu"), recipe)
    for name, make in parity.cases().items():
        module = make(library, given)
        asked.update(map(type, module.modules()))
        if name.startswith(("MoE", "cross entropy")):
            module(X.float())
    wanted = {getattr(te, name) for name in te.__all__ if name.startswith("moe_")}
    wanted -= {te.moe_permute_and_quantize}
    wanted |= {te.parallel_cross_entropy, te.checkpoint, te.quantized_model_init}
    for module in (te, ops):
        values = [getattr(module, name) for name in module.__all__]
        wanted |= {v for v in values if isinstance(v, type) and issubclass(v, torch.nn.Module)}
    assert {value.__name__ for value in wanted - NOT_COMPARED - asked} == set()


def test_every_function_of_routers_and_every_optimizer_has_a_case(monkeypatch):
    asked = set()
    watched = {"router": Watched(router, asked), "optimizers": Watched(optimizers, asked)}
    monkeypatch.setattr(parity.Library, "submodule", lambda _, name: watched[name])
    given = parity.Given(torch.float32, torch.device("cpu"), None)
    for name, make in parity.cases().items():
        if name.startswith(("MoE router", "Fused")):
            make(parity.own(), given)(X.float())
    enums = {router.RoutingMapFormat, router.QBHistogramMode}
    wanted = {getattr(router, name) for name in router.__all__} - enums
    wanted |= {optimizers.FusedAdam, optimizers.FusedSGD}
    assert wanted <= asked


def test_delayed_scaling_has_all_quantities():
    found = parity.compare(parity.own(), parity.own(), "Linear", "delayed", X)
    assert list(found) == list(parity.QUANTITIES)


def test_another_recipe_is_found_in_every_quantity():
    own = parity.own()
    other = types.SimpleNamespace(
        DelayedScaling=lambda: own.recipe.DelayedScaling(
            fp8_format=own.recipe.Format.E4M3, margin=1
        )
    )
    changed = parity.Library(own.pytorch, other)
    found = parity.compare(own, changed, "LayerNormMLP, swiglu", "delayed", X)
    assert all(0 < value < math.inf for value in found.values()), found
    assert list(found) == list(parity.QUANTITIES)


class Lacking:
    """te_fast's names without linear layers."""

    def __getattr__(self, name):
        if name == "Linear":
            raise TypeError("no linear layers\nat all")
        return getattr(te, name)


def test_who_refuses_a_case_is_named():
    own = parity.own()
    lacking = parity.Library(Lacking(), own.recipe)
    with pytest.raises(parity.RefusedError, match="^te_fast: TypeError: no linear layers$") as one:
        parity.compare(lacking, own, "Linear", "none", X)
    assert one.value.libraries == {"te_fast"}
    with pytest.raises(parity.RefusedError, match="Transformer Engine: TypeError") as both:
        parity.compare(lacking, lacking, "Linear", "none", X)
    assert both.value.libraries == {"te_fast", "Transformer Engine"}


def test_a_case_that_raises_is_a_row_and_not_the_end(monkeypatch, capsys, tmp_path):
    own = parity.own()
    monkeypatch.setattr(parity, "installed", lambda: parity.Library(Lacking(), own.recipe))
    out = tmp_path / "parity.json"
    monkeypatch.setattr("sys.argv", ["parity.py", "--device=cpu", "--only=Norm", f"--out={out}"])
    chosen = ("LayerNorm", "LayerNormLinear, RMSNorm")
    made = {name: make for name, make in parity.cases().items() if name in chosen}
    made["FP8 between layers, Norm"] = parity.cases()["FP8 between layers: Linear, Linear"]
    monkeypatch.setattr(parity, "cases", lambda: made)
    assert parity.main() == 0
    written = json.loads(out.read_text())
    refused = {f"FP8 between layers, Norm; {recipe}" for recipe in parity.recipes()}
    assert set(written["failures"]) == refused
    details = written["figures"].pop("details")
    assert len(details) == len(chosen) * len(parity.recipes())
    assert all(found["output"] == 0 for found in details)
    expected = dict.fromkeys(made, 0.0) | {"FP8 between layers, Norm": "refused"}
    assert written["figures"] == dict.fromkeys(parity.recipes(), expected)
    assert "no linear layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 4.0], [3.0, 0.0], 4 / 3),
        ([1.0], [1.0, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([math.nan, 2.0], [math.nan, 1.0], 1.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
    ],
)
def test_difference(ours, theirs, expected):
    assert parity.difference(torch.tensor(ours), torch.tensor(theirs)) == pytest.approx(expected)


def test_differences_of_key_biases_are_measured_by_value_biases():
    ours, theirs = torch.tensor([3e-5, 0.0]), torch.tensor([0.0, 4e-5])
    assert parity.difference(ours, theirs, torch.tensor([5.0, 0.0])) == pytest.approx(1e-5)
    assert parity.in_place_of("inner.qkv.key_bias") == "inner.qkv.value_bias"
    assert parity.in_place_of("inner.qkv.key_weight") == "inner.qkv.key_weight"


@pytest.mark.parametrize("case", ["MultiheadAttention", "MultiheadAttention, norm"])
def test_gradients_of_key_biases_are_roundings(case):
    (step, *_) = parity.run(parity.own(), case, "none", X)
    gradients = step["parameter gradients"]
    keys = [name for name in gradients if name.endswith("key_bias")]
    assert keys
    for name in keys:
        assert gradients[name].norm() < 1e-2 * gradients[parity.in_place_of(name)].norm()


@pytest.mark.parametrize("case", parity.NOT_COMPARABLE)
def test_what_cannot_be_compared_is_left_out(case):
    name = next(one for one in parity.cases() if one.startswith(case))
    found = parity.compare(parity.own(), parity.own(), name, "delayed", X)
    assert set(found) & parity.NOT_COMPARABLE[case][0] == set()
    assert "output" in found


def test_without_transformer_engine_the_bench_says_so(monkeypatch, capsys):
    monkeypatch.setattr(parity, "installed", lambda: None)
    monkeypatch.setattr("sys.argv", ["parity.py"])
    assert parity.main() == 0
    assert "not installed" in capsys.readouterr().out
