"""`CustomRecipe`: a factory gives each layer the recipe that its quantizers are those of, or high precision."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import te_fast.pytorch as te
from graphs import needs_compile, refusal_of
from selection import sampled
from te_fast.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
)
from te_fast.errors import ArgumentError, RecipeError, UnsupportedError
from te_fast.pytorch import ops
from te_fast.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx
from te_fast.pytorch.custom_recipes import quantizer_factories as factories
from te_fast.runtime import autocast as autocast_regions
from te_fast.runtime import support

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
PLAIN = {
    "delayed": (factories.delayed_scaling_factory, DelayedScaling),
    "current": (factories.current_scaling_factory, Float8CurrentScaling),
    "block": (factories.float8_block_scaling_factory, Float8BlockScaling),
}
LAYERS = {
    "linear": lambda: te.Linear(32, 48, device="cpu"),
    "layernorm_linear": lambda: te.LayerNormLinear(32, 48, device="cpu"),
    "layernorm_mlp": lambda: te.LayerNormMLP(32, 64, device="cpu"),
    "ops": lambda: ops.Sequential(
        ops.RMSNorm(32, device="cpu"), ops.Linear(32, 64, device="cpu"), ops.SwiGLU()
    ),
    "basic_linear": lambda: ops.BasicLinear(32, 48, device="cpu"),
    "user_op": lambda: ops.Sequential(
        ops.Linear(32, 32, device="cpu"), ops.Dropout(0.0), ops.Linear(32, 16, device="cpu")
    ),
    "plain_module": lambda: ops.Sequential(
        ops.Linear(32, 32, device="cpu"), torch.nn.Tanh(), ops.Linear(32, 16, device="cpu")
    ),
    "attention": lambda: te.TransformerLayer(
        32, 64, 2, device="cpu", attention_dropout=0.0, hidden_dropout=0.0
    ),
    "mixture": lambda: te.MoE(32, 64, 4, 2, device="cpu"),
}


def projection_in_high_precision(role):
    if role is not None and role.name.endswith(".proj"):
        return te.IdentityQuantizer()
    return factories.current_scaling_factory(role)


def decoder(**options):
    torch.manual_seed(5)
    options |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "name": "decoder"}
    return te.TransformerLayer(32, 64, 2, device="cpu", **options)


def test_a_layer_with_two_recipes_runs_its_parts_alone():
    layer = decoder()
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    x = torch.randn(16, 2, 32)
    with te.autocast(recipe=CustomRecipe(qfactory=projection_in_high_precision)):
        y = layer(x)
    assert (attention.layernorm_qkv.fp8, attention.proj.fp8, mlp.fp8) == (True, False, True)
    seen = {}
    attention.core_attention.register_forward_hook(lambda *given: seen.update(context=given[2]))
    with te.autocast(recipe=Float8CurrentScaling()):
        layer(x)  # the hook lets the layer call its parts
        with te.autocast(enabled=False):
            hidden, bias = attention.proj(seen["context"])
            hidden = hidden + bias + x
        result, bias = mlp(hidden)
    torch.testing.assert_close(y, result + bias + hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_repeated_forward_of_layers_with_two_recipes_runs_its_parts_alone(use_reentrant):
    recipe, found = CustomRecipe(qfactory=projection_in_high_precision), []
    for is_repeated in (False, True):
        model = decoder()
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with te.autocast(recipe=recipe):
            y = (
                torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
                if is_repeated
                else model(x)
            )
        y.square().sum().backward()
        found.append([y, x.grad, *[p.grad for p in model.parameters()]])
    assert_equal(*found)


class Grouped(torch.nn.Module):
    """A layer of experts as a module of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = te.GroupedLinear(3, 32, 48, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x, [16, 0, x.shape[0] - 16])
        assert isinstance(y, torch.Tensor)
        return y


LAYERS["grouped"] = Grouped


def pair(name):
    """Two equal modules."""
    torch.manual_seed(1)
    made = LAYERS[name]()
    return made, copy.deepcopy(made)


def steps(module, recipe, *, count=3, enabled=True):
    """Results and gradients of training steps on random data, and the parameters behind them."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _ in range(count):
        x = (
            torch.randn(32, 1, 32).squeeze(1)
            if not is_attention(module)
            else torch.randn(16, 2, 32)
        )
        x.requires_grad_()
        with te.autocast(enabled=enabled, recipe=recipe):
            y = module(x)
        y.backward(torch.randn_like(y))
        seen += [y.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seen + [parameter.detach().clone() for parameter in module.parameters()]


def is_attention(module):
    return isinstance(module, te.TransformerLayer)


def assert_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "kind"), sampled(LAYERS, PLAIN))
def test_a_factory_of_one_recipe_trains_as_the_recipe_does(name, kind):
    factory, plain = PLAIN[kind]
    first, second = pair(name)
    assert_equal(steps(first, plain()), steps(second, CustomRecipe(qfactory=factory)))


@pytest.mark.parametrize("name", LAYERS)
def test_identity_for_all_operands_is_high_precision(name):
    first, second = pair(name)
    recipe = CustomRecipe(qfactory=factories.high_precision_factory)
    assert_equal(steps(first, None, enabled=False), steps(second, recipe))


def half_hybrid(source, forward):
    def factory(role):
        if role is not None and role.tensor_type == "grad_output":
            return te.IdentityQuantizer()
        return te.HybridQuantizer(
            rowwise_quantizer=forward(role),
            columnwise_quantizer=te.IdentityQuantizer(),
            columnwise_source=source,
        )

    return factory


@pytest.mark.parametrize(
    ("name", "source", "override", "kind"),
    sampled(
        ["linear", "layernorm_mlp", "ops", "grouped"],
        [
            pytest.param("original", "high_precision"),
            pytest.param("rowwise_dequantized", "dequantized"),
        ],
        ["current", "block"],
    ),
)
def test_identity_by_columns_is_a_backward_override(name, source, override, kind):
    factory, plain = PLAIN[kind]
    recipes = (
        plain(backward_override=override),
        CustomRecipe(qfactory=half_hybrid(source, factory)),
        CustomRecipe(qfactory=factory, backward_override=override),
    )
    expected, *others = (
        steps(module, recipe) for module, recipe in zip(triple(name), recipes, strict=True)
    )
    for other in others:
        assert_equal(expected, other)


def triple(name):
    first, second = pair(name)
    return first, second, copy.deepcopy(second)


def test_a_hybrid_of_equal_quantizers_is_one_quantizer():
    def factory(role):
        made = [factories.current_scaling_factory(role) for _ in range(2)]
        return te.HybridQuantizer(rowwise_quantizer=made[0], columnwise_quantizer=made[1])

    first, second = pair("linear")
    assert_equal(
        steps(first, Float8CurrentScaling()), steps(second, CustomRecipe(qfactory=factory))
    )


def test_options_of_quantizers_reach_the_casts():
    def current(role):
        made = factories.current_scaling_factory(role)
        made.force_pow_2_scales = True
        made.amax_epsilon = 0.5
        return made

    def block(role):
        made = factories.float8_block_scaling_factory(role)
        made.force_pow_2_scales = False
        return made

    plain = Float8CurrentScaling(use_power_2_scales=True)
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(plain, name, type(plain.fp8_quant_fwd_inp)(power_2_scale=True, amax_epsilon=0.5))
    first, second = pair("linear")
    assert_equal(steps(first, plain), steps(second, CustomRecipe(qfactory=current)))
    first, second = pair("linear")
    expected = steps(first, Float8BlockScaling(use_f32_scales=True))
    assert_equal(expected, steps(second, CustomRecipe(qfactory=block)))


def test_requests_reach_delayed_scaling():
    def factory(role):
        return te.DelayedScalingRequest(
            fp8_format=Format.E4M3, margin=2, amax_history_len=3, amax_compute_algo="most_recent"
        )

    plain = DelayedScaling(
        fp8_format=Format.E4M3, margin=2, amax_history_len=3, amax_compute_algo="most_recent"
    )
    first, second = pair("layernorm_mlp")
    assert_equal(
        steps(first, plain, count=5), steps(second, CustomRecipe(qfactory=factory), count=5)
    )
    states = [module.fp8_meta["scaling_fwd"] for module in (first, second)]
    assert_equal(*([state.scale, state.amax_history] for state in states))


class Model(torch.nn.Module):
    """Layers with names, some of which differ in their recipes."""

    def __init__(self, names) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [te.Linear(32, 32, device="cpu", name=name) for name in names]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


BY_NAME = {
    "delayed": factories.delayed_scaling_factory,
    "current": factories.current_scaling_factory,
    "block": factories.float8_block_scaling_factory,
    "plain": factories.high_precision_factory,
}


def factory_by_name(role):
    return BY_NAME["plain" if role is None else role.name.partition(".")[0]](role)


class Nested(torch.nn.Module):
    """The same layers, each in a region of its own recipe; delayed scaling updates its scales by hand."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        for layer in self.model.layers:
            kind = layer.name.partition(".")[0]
            recipe = None if kind == "plain" else PLAIN[kind][1]()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                x = layer(x)
        return x


def test_layers_have_different_recipes():
    names = ["current", "plain", "block", "current.2"]
    torch.manual_seed(3)
    model = Model(names)
    other = copy.deepcopy(model)
    expected = steps(Nested(other), None, enabled=False)
    assert_equal(expected, steps(model, CustomRecipe(qfactory=factory_by_name)))
    assert [layer.fp8 for layer in model.layers] == [True, False, True, True]
    kinds = [type(layer.fp8_meta["recipe"]).__name__ for layer in model.layers]
    assert kinds == [
        "Float8CurrentScaling",
        "NoneType",
        "Float8BlockScaling",
        "Float8CurrentScaling",
    ]


def test_delayed_layers_among_others_update_their_scales_once_a_step():
    torch.manual_seed(3)
    mixed = Model(["current", "delayed.1", "plain", "delayed.2"])
    recipe = CustomRecipe(qfactory=factory_by_name)
    steps(mixed, recipe, count=4)
    delayed = [layer for layer in mixed.layers if layer.name.startswith("delayed")]
    for layer in delayed:
        for key in ("scaling_fwd", "scaling_bwd"):
            history = layer.fp8_meta[key].amax_history
            # One row for each step: the newest maximum moves to the end of the window, and row 0 becomes zero.
            assert (history[-4:, 0] > 0).all()
            assert history[0, 0] == 0
            assert (history[1:-4, 0] == 0).all()


def test_the_factory_is_asked_once_for_each_operand():
    asked = []

    def factory(role):
        asked.append(role)
        return factories.current_scaling_factory(role)

    layer = te.Linear(32, 32, device="cpu", name="proj")
    for _ in range(2):
        with te.autocast(recipe=CustomRecipe(qfactory=factory)):
            layer(torch.randn(16, 32, requires_grad=True)).sum().backward()
    role = te.QuantizerRole
    operands = [role("linear", kind, "proj") for kind in ("input", "weight", "grad_output")]
    assert asked == [*operands, None, None]
    layer.output_quantizer_role = role("linear", "input", "next")
    asked.clear()
    with te.autocast(recipe=CustomRecipe(qfactory=factory)):
        layer(torch.randn(16, 32))
    assert asked == [*operands, role("linear", "input", "next"), None]


def test_roles():
    role = te.QuantizerRole
    mlp = te.LayerNormMLP(32, 64, device="cpu", name="mlp")
    fc1, fc2 = (
        [role("linear", kind, f"mlp.{part}") for kind in ("input", "weight", "grad_output")]
        for part in ("fc1", "fc2")
    )
    forward = mlp.get_quantizer_roles(fwd=True, num_quantizers=6)
    assert forward == [fc1[0], fc1[1], fc2[0], fc2[0], fc2[1], None]
    backward = mlp.get_quantizer_roles(fwd=False, num_quantizers=4)
    assert backward == [fc1[2], None, fc2[2], fc1[2]]
    unnamed = te.LayerNormMLP(32, 64, device="cpu")
    assert unnamed.get_quantizer_roles(fwd=True, num_quantizers=1)[0].name == "fc1"
    assert te.Linear(32, 32, device="cpu").get_quantizer_roles(fwd=True, num_quantizers=2)[
        1
    ] == role("linear", "weight", "")
    grouped = te.GroupedLinear(2, 32, 32, device="cpu", name="experts")
    first, *_, last = grouped.get_quantizer_roles(fwd=True, num_quantizers=6)
    assert (first, last) == (role("grouped_linear", "input", "experts"), None)
    op = ops.BasicLinear(32, 32, device="cpu")
    assert op.get_quantizer_roles("backward") == [role("linear", "grad_output", "")]
    assert ops.ReLU().get_quantizer_roles("forward") is None
    assert str(role()) == "QuantizerRole()"
    layer = te.TransformerLayer(32, 64, 2, device="cpu", name="decoder")
    names = {
        asked.name
        for module in layer.modules()
        if hasattr(module, "get_quantizer_roles")
        for asked in module.get_quantizer_roles(fwd=True, num_quantizers=4)
        if asked is not None
    }
    assert names == {
        "decoder.self_attention.layernorm_linear_qkv",
        "decoder.self_attention.proj",
        "decoder.layernorm_mlp.fc1",
        "decoder.layernorm_mlp.fc2",
    }


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
@torch.no_grad()
def test_another_factory_is_asked_anew():
    layer = te.Linear(32, 32, device="cpu")
    x = torch.randn(16, 32)
    expected = []
    for _, plain in PLAIN.values():
        with te.autocast(recipe=plain()):
            expected.append(layer(x))
    for (factory, _), y in zip(PLAIN.values(), expected, strict=True):
        recipe = CustomRecipe(qfactory=factory)
        with te.autocast(recipe=recipe):
            assert_equal([layer(x)], [y])
    recipe.qfactory = factories.high_precision_factory  # a recipe may be changed
    with te.autocast(recipe=recipe):
        y = layer(x)
    assert_equal([y], [layer(x)])


@pytest.mark.parametrize(
    ("checkpoint", "kind", "use_reentrant"),
    sampled([te.checkpoint, torch.utils.checkpoint.checkpoint], [*PLAIN, "plain"], [True, False]),
)
def test_recomputation_repeats_the_layers_own_recipe(checkpoint, kind, use_reentrant):
    class Recomputed(torch.nn.Module):
        def __init__(self, layer) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=use_reentrant)

    first, second = pair("layernorm_linear")
    plain = PLAIN[kind][1]() if kind in PLAIN else None
    expected = steps(Recomputed(first), plain, enabled=plain is not None)
    recipe = CustomRecipe(qfactory=BY_NAME[kind])
    assert_equal(expected, steps(Recomputed(second), recipe))


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("make", [te.Linear, ops.BasicLinear])
def test_quantised_weights_follow_the_factory(make, kind):
    factory, plain = PLAIN[kind]
    recipe = CustomRecipe(qfactory=factory)
    made = []
    for one in (plain(), recipe):
        torch.manual_seed(4)
        with te.quantized_model_init(recipe=one):
            made.append(make(32, 48, device="cpu"))
    assert type(made[0].weight) is type(made[1].weight)
    assert_equal(*([layer.weight.dequantize()] for layer in made))
    assert_equal(steps(made[0], plain()), steps(made[1], recipe))


def test_modules_with_weights_of_a_factory_pickle():
    recipe = CustomRecipe(qfactory=lambda role: factories.current_scaling_factory(role))
    with te.quantized_model_init(recipe=recipe):
        made = [te.Linear(32, 32, device="cpu"), ops.BasicLinear(32, 32, device="cpu")]
    x = torch.randn(16, 32)
    for module in made:
        other = pickle.loads(pickle.dumps(module))
        with te.autocast(recipe=recipe):
            assert_equal([other(x)], [module(x)])


@pytest.mark.parametrize("kind", ["current", "plain"])
def test_experts_write_into_memory_of_the_callers(kind):
    layer = te.GroupedLinear(2, 32, 48, device="cpu")
    x, out = torch.randn(32, 32), torch.empty(32, 48)
    with te.autocast(recipe=CustomRecipe(qfactory=BY_NAME[kind])):
        y = layer(x, [16, 16], out=out)
        assert y.data_ptr() == out.data_ptr()
        assert_equal([y], [layer(x, [16, 16])])


def test_weights_in_high_precision_stay_plain_in_quantized_model_init():
    recipe = CustomRecipe(qfactory=factory_by_name)
    with te.quantized_model_init(recipe=recipe):
        model = Model(["plain", "current"])
    assert [type(layer.weight).__name__ for layer in model.layers] == ["Parameter", "Float8Tensor"]
    steps(model, recipe)


def test_layers_copy_and_pickle_after_a_region_of_a_factory():
    layer = te.LayerNormMLP(32, 64, device="cpu")
    recipe = CustomRecipe(qfactory=lambda role: factories.current_scaling_factory(role))
    x = torch.randn(16, 32)
    with te.autocast(recipe=recipe):
        y = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert_equal([other(x)], [y])


def test_outer_regions_stay_in_force():
    layer = te.Linear(32, 32, device="cpu", name="plain")
    recipe = CustomRecipe(qfactory=factory_by_name)
    manager = te.FP8GlobalStateManager
    with te.autocast(recipe=recipe):
        layer(torch.randn(16, 32))
        assert manager.is_fp8_enabled()
        assert manager.get_fp8_recipe() is recipe
        with te.autocast(recipe=Float8CurrentScaling()):
            layer(torch.randn(16, 32))
            assert layer.fp8
    assert not manager.is_fp8_enabled()


def test_an_error_in_a_layer_leaves_the_outer_region():
    layer = te.Linear(32, 32, device="cpu")
    recipe = CustomRecipe(qfactory=factories.current_scaling_factory)
    with te.autocast(recipe=recipe):
        with pytest.raises(ValueError, match=layer.name):
            layer(torch.randn(16, 33))
        assert te.FP8GlobalStateManager.get_fp8_recipe() is recipe
        assert layer(torch.randn(16, 32)).shape == (16, 32)


def mixed(**answers):
    def factory(role):
        kind = "input" if role is None else role.tensor_type
        return answers.get(kind, factories.current_scaling_factory)(role)

    return factory


WRONG = {
    "none": (lambda role: None, "returned None for module_type=linear"),
    "no quantizer": (lambda role: 3, "int for module_type=linear"),
    "high precision input": (mixed(input=factories.high_precision_factory), "high precision"),
    "high precision gradient": (mixed(grad_output=factories.high_precision_factory), "backward"),
    "two recipes": (mixed(weight=factories.float8_block_scaling_factory), "several recipes"),
    "wrong format": (
        mixed(weight=lambda role: te.Float8CurrentScalingQuantizer(E5M2)),
        "must be E4M3",
    ),
    "scale of the user's": (
        mixed(weight=lambda role: te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)),
        "Float8Quantizer for",
    ),
    "reduction": (
        mixed(input=lambda role: te.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)),
        "with_amax_reduction",
    ),
    "type": (mixed(input=lambda role: te.IdentityQuantizer(dtype=torch.float16)), "dtype=None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_answers_that_no_recipe_has_are_named(case):
    factory, message = WRONG[case]
    layer = te.Linear(32, 32, device="cpu", name="proj")
    kind = ArgumentError if case == "none" else UnsupportedError
    with (
        te.autocast(recipe=CustomRecipe(qfactory=factory)),
        pytest.raises(kind, match=message) as caught,
    ):
        layer(torch.randn(16, 32))
    assert "proj" in str(caught.value)


def test_two_recipes_in_one_program_are_refused():
    mlp = te.LayerNormMLP(32, 64, device="cpu", name="mlp")

    def factory(role):
        if role is not None and role.name == "mlp.fc2":
            return te.IdentityQuantizer()
        return factories.current_scaling_factory(role)

    with (
        te.autocast(recipe=CustomRecipe(qfactory=factory)),
        pytest.raises(
            UnsupportedError, match=r"mlp.*high precision for .*mlp.fc2.*separate modules"
        ),
    ):
        mlp(torch.randn(16, 32))


def test_bad_arguments():
    with pytest.raises(RecipeError, match="qfactory must be a callable"):
        CustomRecipe(qfactory=3)
    with pytest.raises(ValueError, match="quantization_alignment must be positive"):
        CustomRecipe(qfactory=print, quantization_alignment=0)
    one = te.Float8CurrentScalingQuantizer(E4M3)
    with pytest.raises(ValueError, match="distinct"):
        te.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=one)
    with pytest.raises(TypeError, match="nested QuantizerRequest"):
        te.HybridQuantizer(rowwise_quantizer=te.DelayedScalingRequest(), columnwise_quantizer=one)
    with pytest.raises(TypeError, match="must be a Quantizer"):
        te.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=None)
    with pytest.raises(ValueError, match="columnwise_source"):
        te.HybridQuantizer(
            rowwise_quantizer=one,
            columnwise_quantizer=te.IdentityQuantizer(),
            columnwise_source="rows",
        )
    two = te.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=te.IdentityQuantizer())
    two.internal = True
    other = two.copy()
    assert other.internal
    assert other.rowwise_quantizer is not one
    assert (other.rowwise_quantizer.dtype, other.rowwise_quantizer.columnwise_usage) == (
        E4M3,
        False,
    )


def test_support_is_checked_for_the_layers_own_recipe(monkeypatch):
    monkeypatch.setattr(support, "check_fp8_block_scaling_support", lambda: (False, "no blocks"))
    monkeypatch.setattr(autocast_regions, "_supported", set())
    recipe = CustomRecipe(qfactory=factory_by_name)
    current, block = (te.Linear(32, 32, device="cpu", name=name) for name in ("current", "block"))
    with te.autocast(recipe=recipe):
        current(torch.randn(16, 32))
        with pytest.raises(RuntimeError, match="no blocks"):
            block(torch.randn(16, 32))


@needs_compile
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_inside", [False, True])
def test_compiled_functions_say_that_they_take_no_factory(is_inside):
    layer = te.Linear(32, 32, device="cpu")
    recipe = CustomRecipe(qfactory=factories.current_scaling_factory)

    def inside(x):
        with te.autocast(recipe=recipe):
            return layer(x)

    with te.autocast(enabled=not is_inside, recipe=recipe):
        message = refusal_of(inside if is_inside else layer, torch.randn(16, 32))
    # torch 2.8 may hide the message, but names the class of the error then.
    assert "CustomRecipe cannot be in force" in message or "UnsupportedError" in message


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_quantize_alone_asks_for_a_bare_role(mode):
    asked = []

    def factory(role):
        asked.append(role)
        return factories.current_scaling_factory(role)

    op = ops.Quantize(forward=mode == "forward", backward=mode == "backward")
    x = torch.randn(16, 16, requires_grad=True)
    with te.autocast(recipe=CustomRecipe(qfactory=factory)):
        y = op(x)
    y.sum().backward()
    assert set(asked) == {te.QuantizerRole(), None}
    if mode == "forward":
        assert type(y).__name__ == "Float8Tensor"


def test_indices_lead_to_the_quantizers_of_the_layers_own_recipe():
    layer = te.LayerNormMLP(32, 64, device="cpu")
    with te.autocast(recipe=CustomRecipe(qfactory=factories.float8_block_scaling_factory)):
        layer(torch.randn(16, 32))
    forward, backward = layer.quantizers["scaling_fwd"], layer.quantizers["scaling_bwd"]
    index = FP8FwdTensorIdx
    weights = [forward[place] for place in (index.GEMM1_WEIGHT, index.GEMM2_WEIGHT)]
    inputs = [forward[place] for place in (index.GEMM1_INPUT, index.GEMM2_INPUT)]
    grads = [
        backward[place] for place in (FP8BwdTensorIdx.GRAD_OUTPUT1, FP8BwdTensorIdx.GRAD_OUTPUT2)
    ]
    assert [quantizer.block_scaling_dim for quantizer in (*weights, *inputs, *grads)] == [
        2,
        2,
        1,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("kind", [*PLAIN, "plain"])
def test_calibration_records_what_the_layers_own_recipe_needs(kind):
    first, second = pair("layernorm_mlp")
    x = torch.randn(16, 32)
    plain = PLAIN[kind][1]() if kind in PLAIN else None
    recipe = CustomRecipe(qfactory=BY_NAME[kind])
    results = []
    for module, one in ((first, plain), (second, recipe)):
        with torch.no_grad(), te.autocast(enabled=False, calibrating=one is not None, recipe=one):
            results.append([module(x)])
    assert_equal(*results)
    states = [module.fp8_meta.get("scaling_fwd") for module in (first, second)]
    assert (states[1] is not None) == (kind == "delayed")
    if kind == "delayed":
        assert (states[1].amax_history[-1] > 0).any()
        assert_equal(*([state.scale, state.amax_history] for state in states))


@pytest.mark.parametrize("kind", PLAIN)
def test_results_in_fp8_have_the_quantizers_of_the_factory_or_are_refused(kind):
    factory, plain = PLAIN[kind]

    def for_all(role):
        """Answers of one kind for every role: the gradient of the input is that of another layer's output."""
        return factory(te.QuantizerRole("linear", "grad_output") if role == "gradient" else role)

    made = {}
    for name, recipe in (("plain", plain()), ("factory", CustomRecipe(qfactory=for_all))):
        torch.manual_seed(6)
        layer = te.Linear(32, 32, device="cpu")
        layer.grad_input_quantizer_role = "gradient" if name == "factory" else None
        x = torch.randn(16, 32, requires_grad=True)
        with te.autocast(recipe=recipe):
            y = layer(x, fp8_output=True, fp8_grad=kind != "block")
        y.backward(torch.ones(16, 32))
        made[name] = [y.dequantize(), layer.weight.grad]
    assert_equal(*made.values())


@pytest.mark.parametrize("option", ["fp8_output", "fp8_grad"])
def test_another_quantizer_for_a_result_in_fp8_is_refused(option):
    layer = te.Linear(32, 32, device="cpu", name="proj")

    def factory(role):
        if role is None:  # the output and the input's gradient
            return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)
        return factories.current_scaling_factory(role)

    x = torch.randn(16, 32, requires_grad=True)
    with (
        te.autocast(recipe=CustomRecipe(qfactory=factory)),
        pytest.raises(UnsupportedError, match=f"proj: {option}=True.*Float8BlockQuantizer"),
    ):
        layer(x, **{option: True}).sum().backward()


def test_algorithms_of_delayed_scaling_tell_recipes_apart():
    mlp = te.LayerNormMLP(32, 64, device="cpu", name="mlp")

    def factory(role):
        is_last = role is not None and role.name == "mlp.fc2"
        return te.DelayedScalingRequest(amax_compute_algo="most_recent" if is_last else "max")

    with (
        te.autocast(recipe=CustomRecipe(qfactory=factory)),
        pytest.raises(UnsupportedError, match="separate modules"),
    ):
        mlp(torch.randn(16, 32))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("twice", [False, True])
def test_repeated_layers_update_scales_as_the_recipe_does(use_reentrant, twice):
    def stack():
        torch.manual_seed(3)
        return torch.nn.ModuleList([te.Linear(32, 32, device="cpu") for _ in range(3)])

    class Repeated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()

        def forward(self, x):
            for layer in (*self.layers, *(self.layers if twice else ())):
                x = te.checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    models = Repeated(), Repeated()
    recipe = CustomRecipe(qfactory=factories.delayed_scaling_factory)
    assert_equal(steps(models[0], DelayedScaling()), steps(models[1], recipe))
    for one, other in zip(*(model.layers for model in models), strict=True):
        for key in ("scaling_fwd", "scaling_bwd"):
            states = [layer.fp8_meta[key] for layer in (one, other)]
            assert_equal(*([state.scale, state.amax_history] for state in states))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_layer_that_leaves_fp8_is_repeated_outside_of_it(use_reentrant):
    layer, other = pair("linear")
    steps(layer, Float8CurrentScaling(), count=1)
    other.load_state_dict(layer.state_dict())
    recipe = CustomRecipe(qfactory=factories.high_precision_factory)
    x = torch.randn(16, 32)
    found = []
    for module, is_repeated in ((other, False), (layer, True)):
        given = x.clone().requires_grad_()
        module.zero_grad()
        with te.autocast(recipe=recipe):
            y = (
                torch.utils.checkpoint.checkpoint(module, given, use_reentrant=use_reentrant)
                if is_repeated
                else module(given)
            )
        y.square().sum().backward()
        found.append([y, given.grad, module.weight.grad])
    assert_equal(*found)


def test_a_factory_does_not_keep_its_model():
    class Owner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = te.Linear(32, 32, device="cpu")

        def factory(self, role):
            return factories.current_scaling_factory(role)

        def forward(self, x):
            with te.autocast(recipe=CustomRecipe(qfactory=self.factory)):
                return self.layer(x)

    model, fused = Owner(), decoder()
    fused.layernorm_mlp.owner = [fused]
    with torch.no_grad(), te.autocast(recipe=CustomRecipe(qfactory=model.factory)):
        first, second = model(torch.ones(16, 32)), model(torch.ones(16, 32))
        fused(torch.ones(16, 2, 32))
    assert_equal([first], [second])
    gone = weakref.ref(model), weakref.ref(fused)
    del model, fused
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_factories_that_come_and_go_take_no_new_numbers():
    numbers = set()
    for _ in range(20):
        recipe = CustomRecipe(qfactory=lambda role: factories.current_scaling_factory(role))
        numbers.add(recipe._describe()["factory"])
        del recipe
    assert len(numbers) == 1

    class Unhashable:
        __hash__ = None

        def __call__(self, role):
            return factories.high_precision_factory(role)

    layer = te.Linear(32, 32, device="cpu")
    with te.autocast(recipe=CustomRecipe(qfactory=Unhashable())):
        y = layer(torch.ones(16, 32))
    assert_equal([y], [layer(torch.ones(16, 32))])


def test_attention_in_fp8_is_refused_in_a_layer_of_one_recipe():
    recipe = CustomRecipe(qfactory=factories.current_scaling_factory, fp8_dpa=True)
    with te.autocast(recipe=recipe), pytest.raises(UnsupportedError, match="fp8_dpa"):
        decoder()(torch.randn(16, 2, 32))


def test_a_changed_layer_is_asked_anew():
    layer = decoder()
    recipe = CustomRecipe(qfactory=projection_in_high_precision)
    x = torch.randn(16, 2, 32)
    with te.autocast(recipe=recipe):
        layer(x)
        layer.self_attention.proj = te.Linear(32, 32, device="cpu", name="other", return_bias=True)
        layer(x)
    assert layer.self_attention.proj.fp8


def test_results_in_fp8_of_the_plain_recipe_are_not_those_of_the_factory():
    layer = te.Linear(32, 32, device="cpu", name="proj")

    def factory(role):
        return te.IdentityQuantizer() if role is None else factories.current_scaling_factory(role)

    recipe, x = CustomRecipe(qfactory=factory), torch.randn(16, 32)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            layer(x)
            with pytest.raises(UnsupportedError, match="fp8_output=True.*gives high precision"):
                layer(x, fp8_output=True)
        with te.autocast(recipe=Float8CurrentScaling()):
            assert type(layer(x, fp8_output=True)).__name__ == "Float8Tensor"


def test_names_of_operations_reach_the_factory():
    asked = set()

    def factory(role):
        asked.add(None if role is None else role.name)
        return factories.current_scaling_factory(role)

    first, second = (ops.Linear(32, 32, device="cpu") for _ in range(2))
    first.name, second.name = "first", "second"
    with te.autocast(recipe=CustomRecipe(qfactory=factory)):
        ops.Sequential(first, torch.nn.Identity(), second)(torch.randn(16, 32))
    assert asked == {"first", "second", None}


def test_modules_made_for_quantised_weights_pickle():
    recipe = CustomRecipe(qfactory=lambda role: factories.current_scaling_factory(role))
    with te.quantized_model_init(recipe=recipe):
        layer = decoder(fuse_qkv_params=True)
        meta = te.Linear(32, 32, device="meta")
    other = pickle.loads(pickle.dumps(layer))
    pickle.dumps(meta)
    x = torch.randn(16, 2, 32)
    with te.autocast(recipe=recipe):
        assert_equal([other(x)], [layer(x)])
