"""Common properties of Linear, LayerNormLinear and LayerNormMLP, beyond their numbers."""

import copy
import sys
import threading
import warnings

import pytest
import torch

import te_fast.pytorch as te
from selection import sampled
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from te_fast.errors import DeviceError, DtypeError, ShapeError, StateError, UnsupportedError
from te_fast.layers.base import TransformerEngineBaseModule
from te_fast.pytorch.quantization import DelayedScalingRecipeState

LAYERS = (te.Linear, te.LayerNormLinear, te.LayerNormMLP)
RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def make(layer, **options):
    torch.default_generator.manual_seed(7)
    return layer(64, 96, **{"device": "cpu"} | options)


def run(module, recipe, x=X, **options):
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x, **options)


def hooked(module):
    """The module with a hook that does nothing, so that `nn.Module.__call__` runs."""
    module.register_forward_hook(lambda *_: None)
    return module


# Regions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"return_bias": True}], ids=["direct", "general"])
@pytest.mark.parametrize("first", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_another_type_of_recipe_is_warned_of_once(layer, first, options):
    module = make(layer, **options)
    second = next(cls for cls in RECIPES if cls is not first)
    changed = f"Recipe type changed from {first.__name__} to {second.__name__}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(module, first())
        run(module, None)
        run(module, first(fp8_format=first().fp8_format))
    with pytest.warns(UserWarning, match=changed) as caught:
        run(module, second())
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(module, second())
        run(copy.deepcopy(module), second())


@pytest.mark.parametrize("options", [{}, {"return_bias": True}], ids=["direct", "general"])
@pytest.mark.parametrize("layer", LAYERS)
def test_attributes_show_the_last_region(layer, options):
    module = make(layer, **options)
    assert (module.fp8, module.fp8_initialized, module.fp8_meta["recipe"]) == (False, False, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the recipe changes
        for recipe in (cls() for cls in RECIPES):
            run(module, recipe)
            assert module.fp8
            assert module.fp8_initialized
            assert module.fp8_meta["recipe"] is recipe


@pytest.mark.parametrize("wrong", ["delayed", DelayedScaling, 3], ids=str)
def test_a_recipe_that_is_none(wrong):
    with pytest.raises(DtypeError, match="recipe must be an object"), te.autocast(recipe=wrong):
        pass
    assert not te.FP8GlobalStateManager.is_fp8_enabled()


# Weights -----------------------------------------------------------------------------------------

# The script runs in a process of its own, because optimizers of other tests would affect its result.
OWN_LOOP = """
import copy, sys
import torch
import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import Float8BlockScaling, Float8CurrentScaling

def step(layer, recipe, x):
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.square().mean().backward()
    return y

x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
for make in (te.Linear, te.LayerNormLinear, te.LayerNormMLP):
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        layer = make(64, 96, device="cpu")
        seen = copy.deepcopy(layer)
        for _ in range(3):
            assert torch.equal(step(layer, recipe, x), step(seen, recipe, x)), make
            for one, other in zip(layer.parameters(), seen.parameters()):
                one.data.sub_(10 * one.grad)
                with torch.no_grad():
                    other.sub_(10 * other.grad)
                one.grad = other.grad = None
        step(layer, recipe, x)
        before = dispatch.counters()["weight_casts"]
        step(layer, recipe, x)  # gradients add up: nothing was written
        assert dispatch.counters()["weight_casts"] == before, make
"""


def test_a_loop_of_ones_own_may_write_through_data(fresh):
    assert fresh(OWN_LOOP) == ""


# Arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "recipe"), sampled(LAYERS, [None, *RECIPES]))
def test_is_first_microbatch_is_taken_by_its_truth(layer, recipe):
    def main_grad(flag, prepare):
        module = prepare(make(layer, fuse_wgrad_accumulation=True))
        for parameter in module.parameters():
            parameter.main_grad = torch.ones_like(parameter)
        run(module, recipe and recipe(), is_first_microbatch=flag).sum().backward()
        name = "fc1_weight" if layer is te.LayerNormMLP else "weight"
        return getattr(module, name).main_grad

    for flag in (True, False):
        wanted = main_grad(flag, lambda module: module)
        for same in (int(flag), torch.tensor(flag)):
            for prepare in (hooked, lambda module: module):
                assert torch.equal(main_grad(same, prepare), wanted)
    assert not torch.equal(main_grad(1, hooked), main_grad(0, hooked))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("layer", [te.Linear, te.LayerNormLinear])
def test_parts_without_a_bias_to_return(layer, recipe):
    whole = make(layer, bias=False, return_bias=True)
    parts = make(layer, bias=False, return_bias=True, parameters_split=("a", "b"))
    with torch.no_grad():
        parts.a_weight.copy_(whole.weight[:48])
        parts.b_weight.copy_(whole.weight[48:])
    (wanted, none), (got, also_none) = (run(one, recipe and recipe()) for one in (whole, parts))
    assert torch.equal(got, wanted)
    assert none.numel() == also_none.numel() == 0


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("layer", [te.Linear, te.LayerNormLinear])
def test_parts_under_an_autocast_of_another_type(layer, recipe):
    whole = make(layer, params_dtype=torch.bfloat16)
    parts = make(layer, params_dtype=torch.bfloat16, parameters_split=("a", "b"))
    # The new b_weight is no longer next to a_weight in memory.
    parts.b_weight = torch.nn.Parameter(whole.weight[48:].detach().clone())
    with torch.no_grad():
        parts.a_weight.copy_(whole.weight[:48])
    ys = []
    for module in (whole, parts):
        with torch.autocast("cpu", dtype=torch.float16):
            ys.append(run(module, recipe and recipe()))
        ys[-1].float().sum().backward()
    assert ys[0].dtype is torch.float16
    assert torch.equal(*ys)
    assert torch.equal(torch.cat([parts.a_weight.grad, parts.b_weight.grad]), whole.weight.grad)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("activation", "relu", {}),
        ("normalization", "RMSNorm", {}),
        ("activation_params", {"limit": 0.1}, {"activation": "clamped_swiglu"}),
    ],
)
def test_options_of_the_mlp_may_be_set_later(name, value, options, recipe):
    module = make(te.LayerNormMLP, **options)
    wanted = make(te.LayerNormMLP, **options | {name: value})
    wanted.load_state_dict(module.state_dict(), strict=False)
    with torch.no_grad():  # no_grad keeps the scales
        former = run(module, recipe and recipe())
        setattr(module, name, value)
        got = run(module, recipe and recipe())
        assert torch.equal(got, run(wanted, recipe and recipe()))
    assert not torch.equal(got, former)


@pytest.mark.parametrize("value", [0, 1, None])
@pytest.mark.parametrize(
    ("layer", "option"),
    [
        (te.LayerNormLinear, "zero_centered_gamma"),
        (te.LayerNormMLP, "zero_centered_gamma"),
        (te.LayerNormLinear, "return_layernorm_output"),
        (te.Linear, "fuse_wgrad_accumulation"),
        (te.Linear, "delay_wgrad_compute"),
    ],
)
def test_options_are_taken_by_their_truth(layer, option, value):
    """Configurations have 0, 1 and null for them."""
    made, expected = (make(layer, **{option: given}) for given in (value, bool(value)))
    expected.load_state_dict(made.state_dict())
    results = [module(X) for module in (made, expected)]
    for ours, theirs in zip(*map(as_tuple, results), strict=True):
        assert torch.equal(ours, theirs)


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("value", [0, 1, None])
def test_a_norm_takes_its_option_by_its_truth(value):
    given, expected = (
        te.RMSNorm(64, zero_centered_gamma=gamma, device="cpu") for gamma in (value, bool(value))
    )
    assert torch.equal(given(X), expected(X))


def test_an_option_that_cannot_be_set_leaves_the_layer_as_it_was():
    module = make(te.LayerNormMLP)
    y = module(X)
    with pytest.raises(UnsupportedError, match="activation"):
        module.activation = "tanh"
    assert module.activation == "gelu"
    assert torch.equal(module(X), y)


@pytest.mark.parametrize("layer", LAYERS)
def test_arguments_that_no_layer_can_have_are_named(layer):
    first = "hidden_size" if layer is te.LayerNormMLP else "in_features"
    for wrong, error in (
        (64.0, DtypeError),
        ("64", DtypeError),
        (None, DtypeError),
        (-64, ShapeError),
    ):
        with pytest.raises(error, match=rf"Layer_\d+: {first} must .*{wrong}"):
            layer(wrong, 96, device="cpu")
    for wrong in (torch.float8_e4m3fn, torch.int32, "bfloat16"):
        with pytest.raises(DtypeError, match=r"Layer_\d+: params_dtype must be .*got .*autocast"):
            make(layer, params_dtype=wrong)
    if layer is not te.LayerNormMLP:
        with pytest.raises(
            DtypeError, match=r"parameters_split must name the parts.*got \[48, 48\]"
        ):
            make(layer, parameters_split=(48, 48))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("part", ["layer_norm", "return", "use", "apply_", "_", ""])
@pytest.mark.parametrize("layer", [te.Linear, te.LayerNormLinear])
def test_names_of_parts_that_would_replace_attributes(layer, part, bias):
    # Transformer Engine loses the norm, or an option of the layer.
    with pytest.raises(KeyError, match=r"Layer_\d+: parameters_split must .*: attribute '.*exists"):
        layer(32, 32, device="cpu", bias=bias, parameters_split=(part, "c"))
    names = ["a_weight", "b_weight"]
    assert layer(32, 32, device="cpu", parameters_split=("a", "b__")).weight_names == names


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_an_input_that_cannot_be_read_is_told_apart(layer, recipe):
    module = make(layer)
    with pytest.raises(
        DtypeError, match=r"Layer_\d+: .* the input must be a plain .* on cpu, torch.spa"
    ):
        run(module, recipe(), X.to_sparse())


@pytest.mark.parametrize(
    ("layer", "grad"),
    sampled(LAYERS, [False, True], quick=[(te.Linear, False), (te.LayerNormLinear, True)]),
)
def test_threads_share_a_layer(layer, grad):
    """Threads once failed on a handle that another thread had borrowed while it ran Python code."""
    module, recipe = make(layer), Float8CurrentScaling()
    with torch.set_grad_enabled(grad):
        expected = run(module, recipe).detach()
    failures = []

    def steps():
        x = X.clone().requires_grad_(grad)
        for step in range(100):
            y = run(module, recipe, x, is_first_microbatch=step % 2 == 0)
            if grad:
                y.sum().backward()
            assert torch.equal(y, expected)

    def work():
        try:
            with torch.set_grad_enabled(grad):
                steps()
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures, failures[0]


# Parameters without memory -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_forward_on_the_meta_device_says_what_to_do(layer, recipe):
    module = make(layer, device="meta")
    x = X.to("meta")
    if layer is te.Linear and recipe is None:  # te.Linear runs here, as nn.Linear does
        assert module(x).shape == (16, 96)
        return
    for one in (x, X):
        with pytest.raises(DeviceError, match="reset_parameters"):
            run(module, recipe and recipe(), one)
    if layer is not te.LayerNormMLP:
        parts = make(layer, device="meta", parameters_split=("a", "b"))
        with pytest.raises(DeviceError, match="reset_parameters"):
            run(parts, recipe and recipe(), x)
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert torch.isfinite(run(module, recipe and recipe())).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_no_device_is_torchs_default_one(layer):
    module = make(layer, device=None)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert torch.equal(run(module, None), run(make(layer), None))
    with torch.device("meta"):
        deferred = make(layer, device=None)
    assert all(parameter.is_meta for parameter in deferred.parameters())
    deferred.to_empty(device="cpu")
    deferred.load_state_dict(module.state_dict())
    assert torch.equal(run(deferred, None), run(module, None))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layer", [*LAYERS, te.GroupedLinear])
def test_a_reset_leaves_parameters_that_the_layer_does_not_hold(layer, device):
    """BioNeMo's Mixtral keeps experts in one parameter of its own; layers have plain views of it."""
    sizes = (2, 64, 96) if layer is te.GroupedLinear else (64, 96)
    module = layer(*sizes, device=device)
    weights = [name for name, parameter in module.named_parameters() if parameter.dim() == 2]
    views = {name: torch.full_like(module._parameters.pop(name), 3.0) for name in weights}
    for name, view in views.items():
        object.__setattr__(module, name, view)
    module.reset_parameters()
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert weights
    for name, view in views.items():
        assert getattr(module, name) is view
        assert view.is_meta or torch.equal(view, torch.full_like(view, 3.0))


@pytest.mark.parametrize("layer", LAYERS)
def test_scales_are_loaded_before_the_parameters_have_memory(layer):
    source = make(layer)
    for _ in range(2):
        run(source, DelayedScaling()).sum().backward()
    saved = source.state_dict()
    module = make(layer, device="meta")
    module.set_extra_state(saved["_extra_state"])
    module.to_empty(device="cpu")
    module.load_state_dict({name: saved[name] for name, _ in source.named_parameters()})
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(module.fp8_meta[key].scale.cpu(), source.fp8_meta[key].scale)
    assert torch.equal(run(module, DelayedScaling()), run(source, DelayedScaling()))


@pytest.mark.parametrize("layer", LAYERS)
def test_scales_of_another_layer_are_refused(layer):
    """The dispatcher would read past the end of scale tensors that are too small."""
    module = make(layer)
    recipe = DelayedScaling(amax_history_len=4)
    run(module, recipe).sum().backward()
    wanted = module(X)
    forward, backward = (module.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd"))
    few = DelayedScalingRecipeState(recipe, mode="forward", num_quantizers=1, device="cpu")
    for wrong in (few, backward):
        module.fp8_meta["scaling_fwd"] = wrong
        module._drop_slots()
        with pytest.raises(
            ShapeError, match=r"Layer_\d+: .*scaling_fwd must .* at least . tensors"
        ):
            run(module, recipe)
    module.fp8_meta["scaling_fwd"] = forward
    assert torch.isfinite(run(module, recipe)).all()
    assert torch.equal(module(X), wanted)


# The base class ----------------------------------------------------------------------------------


class Own(TransformerEngineBaseModule):
    """A layer of the user's own, with scales and no native half."""

    def __init__(self):
        super().__init__()
        self.return_bias = True

    def forward(self, x):
        return x


def test_layers_of_the_users_own():
    module, loaded = Own(), Own()
    with te.autocast(recipe=DelayedScaling()):
        module.init_fp8_metadata()
    module.fp8_meta["scaling_fwd"].scale.fill_(3.0)
    loaded.load_state_dict(module.state_dict())
    for one in (loaded, copy.deepcopy(module), module.half()):
        assert one.fp8_meta["scaling_fwd"].scale.tolist() == [3.0] * 3
        one.reset_fp8_meta_tensors()
        assert one.fp8_meta["scaling_fwd"].scale.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "recipe", [None, DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()]
)
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_split_parameters_made_in_inference_mode(kind, recipe):
    """Such parameters run as ordinary ones do, also after a change; a call that would train them raises an error."""
    found = []
    for inference in (True, False):
        torch.default_generator.manual_seed(0)
        with torch.inference_mode(inference):
            layer = kind(32, 32, parameters_split=("a", "b"), device="cpu")
        x = torch.randn(16, 32)
        for _ in range(2):
            for mode in (torch.inference_mode(), torch.no_grad()):
                with mode, te.autocast(enabled=recipe is not None, recipe=recipe):
                    found.append(layer(x))
            with torch.inference_mode(inference), torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(1.5)
        if inference:
            with (
                te.autocast(enabled=recipe is not None, recipe=recipe),
                pytest.raises(StateError, match=r"inference_mode\(\), and get no gradients"),
            ):
                layer(x)
    assert all(map(torch.equal, found[:4], found[4:]))
    assert not torch.equal(found[0], found[2])


# Parts -------------------------------------------------------------------------------------------

SPLIT = (te.Linear, te.LayerNormLinear)


def gradients(module, recipe, x=X, **options):
    leaf = x.clone().requires_grad_()
    y = run(module, recipe, leaf, **options)
    y.backward(y.detach())
    return [y, leaf.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", SPLIT)
def test_parts_are_joined_without_python(layer, recipe, monkeypatch):
    split = make(layer, parameters_split={"a": 64, "b": 32})
    general = hooked(copy.deepcopy(split))
    general._program.is_direct = False
    wanted = [gradients(general, recipe()), run(general, recipe())]
    monkeypatch.setattr(layer, "_forward_general", None)
    with torch.no_grad():
        run(split, recipe())
    got = [gradients(split, recipe()), run(split, recipe())]
    assert all(map(torch.equal, got[0], wanted[0]))
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("layer", SPLIT)
def test_parts_that_lie_apart_are_joined_in_a_copy(layer, recipe):
    split, apart = (make(layer, parameters_split=("a", "b")) for _ in range(2))
    for name, parameter in list(apart.named_parameters()):
        setattr(
            apart, name, torch.nn.Parameter(torch.cat([parameter, parameter])[: len(parameter)])
        )
    for _ in range(2):
        each = [gradients(module, recipe and recipe()) for module in (split, apart)]
        assert all(map(torch.equal, *each))
        with torch.no_grad():
            for module in (split, apart):
                module.b_weight.mul_(1.5)
                module.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", SPLIT)
@pytest.mark.parametrize("part", ["a_weight", "b_weight"])
def test_a_part_that_changes_before_backward_is_refused(layer, recipe, part):
    module = make(layer, parameters_split=("a", "b"))
    y = run(module, recipe(), X.clone().requires_grad_())
    with torch.no_grad():
        getattr(module, part).add_(1.0)
    with pytest.raises(StateError, match="a part of the weight was modified"):
        y.sum().backward()


@pytest.mark.parametrize("layer", SPLIT)
def test_frozen_parts_of_a_layer_that_joins_them(layer):
    module, whole = make(layer, parameters_split=("a", "b")), make(layer)
    module.a_weight.requires_grad_(False)
    module.b_bias.requires_grad_(False)
    recipe = Float8CurrentScaling()
    got, wanted = gradients(module, recipe), gradients(whole, recipe)
    assert torch.equal(got[1], wanted[1])
    assert module.a_weight.grad is None
    assert module.b_bias.grad is None
    assert torch.equal(module.b_weight.grad, whole.weight.grad[48:])
    assert torch.equal(module.a_bias.grad, whole.bias.grad[:48])


@pytest.mark.parametrize("first", [None, True])
def test_parts_mark_that_their_gradient_is_in_main_grad(first):
    module, whole = (
        make(te.Linear, parameters_split=("a", "b"), fuse_wgrad_accumulation=True),
        make(te.Linear),
    )
    gradients(whole, Float8CurrentScaling())
    parts = module.a_weight, module.b_weight
    for part in parts:
        part.main_grad = torch.ones_like(part)
        part.grad_added_to_main_grad = False
    module.b_weight.overwrite_main_grad = True
    gradients(module, Float8CurrentScaling(), is_first_microbatch=first)
    assert all(part.grad_added_to_main_grad for part in parts)
    added = 0.0 if first else 1.0
    assert torch.equal(parts[0].main_grad, whole.weight.grad[:48] + added)
    assert torch.equal(parts[1].main_grad, whole.weight.grad[48:])


def test_the_largest_numbers_of_the_last_recipe():
    layer, x = te.Linear(16, 16, device="cpu"), torch.randn(16, 16)
    for kind, numbers in ((Format.HYBRID, (448.0, 57344.0)), (Format.E4M3, (448.0, 448.0))):
        with te.autocast(recipe=DelayedScaling(fp8_format=kind)):
            layer(x)
        assert (layer.fp8_meta["fp8_max_fwd"], layer.fp8_meta["fp8_max_bwd"]) == numbers
