"""Activation checkpointing: gradients and scales are those of a run without checkpoints, bit for bit."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_fast
import te_fast.pytorch as te
from selection import pairs, sampled
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import DtypeError, RanksError, StateError
from te_fast.pytorch.distributed import (
    activation_recompute_forward,
    get_activation_recompute_contexts,
    get_all_rng_states,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
    set_all_rng_states,
)
from te_fast.runtime import recompute

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]()


OPTIONS = {"device": "cpu", "params_dtype": torch.bfloat16}


def linear(seed):
    torch.default_generator.manual_seed(seed)
    return te.Linear(64, 64, **OPTIONS)


def mlp(seed, **options):
    torch.default_generator.manual_seed(seed)
    return te.LayerNormMLP(64, 64, normalization=None, **OPTIONS, **options)


def recomputed_mlp(seed):
    """An MLP whose own recomputation is inside of the other recomputation."""
    return mlp(seed, checkpoint=True)


def chain(seed):
    torch.default_generator.manual_seed(seed)
    options = {"device": "cpu", "dtype": torch.bfloat16}
    return te.ops.Sequential(
        te.ops.Linear(64, 64, **options),
        te.ops.GELU(),
        te.ops.Linear(64, 64, bias=False, **options),
    )


def mixed_chain(seed):
    """Two groups of ops, with a torch module in between."""
    torch.default_generator.manual_seed(seed)
    options = {"device": "cpu", "dtype": torch.bfloat16}
    ops = te.ops.Linear(64, 64, **options), nn.Tanh(), te.ops.Linear(64, 64, **options)
    return te.ops.Sequential(*ops)


def frozen_chain(seed):
    """A chain whose linear ops pass FP8 to each other: only the first op has a weight gradient."""
    torch.default_generator.manual_seed(seed)
    options = {"device": "cpu", "dtype": torch.bfloat16}
    made = te.ops.Sequential(*(te.ops.Linear(64, 64, **options) for _ in range(3)))
    made[1:].requires_grad_(False)
    return made


def norm_linear(seed):
    torch.default_generator.manual_seed(seed)
    return te.LayerNormLinear(64, 64, **OPTIONS)


def norm_mlp(seed):
    torch.default_generator.manual_seed(seed)
    return te.LayerNormMLP(64, 64, activation="swiglu", **OPTIONS)


def recomputed_norm_mlp(seed):
    torch.default_generator.manual_seed(seed)
    return te.LayerNormMLP(64, 64, activation="swiglu", checkpoint=True, **OPTIONS)


def norm_chain(seed):
    """A residual around a norm and two linear ops."""
    torch.default_generator.manual_seed(seed)
    options = {"device": "cpu", "dtype": torch.bfloat16}
    make, add = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    return te.ops.Sequential(
        make,
        te.ops.RMSNorm(64, **options),
        te.ops.Linear(64, 64, **options),
        te.ops.GELU(),
        te.ops.Linear(64, 64, bias=False, **options),
        add,
    )


#: Functions that make a layer with recomputation of its own, and functions that make the same layer without it.
PLAIN = {recomputed_mlp: mlp, recomputed_norm_mlp: norm_mlp}
MAKES = [mlp, recomputed_mlp, chain, mixed_chain, frozen_chain]
MAKES += [norm_linear, norm_mlp, recomputed_norm_mlp, norm_chain]


class Tracker:
    """A tracker like CudaRNGStatesTracker, whose state is a number."""

    state = 1

    def get_states(self):
        return self.state

    def set_states(self, state):
        self.state = state


class Net(nn.Module):
    """Three layers, the middle one called twice; any of them checkpointed."""

    def __init__(self, checkpointed, reentrant=True, nested=False, make=linear):
        super().__init__()
        self.layers = nn.ModuleList([make(seed) for seed in range(3)])
        self.checkpointed, self.reentrant, self.nested = checkpointed, reentrant, nested

    def run(self, function, x):
        return te.checkpoint(function, x, use_reentrant=self.reentrant)

    def block(self, x):
        inner = self.layers[1]
        x = self.run(inner, x) if self.nested else inner(x)
        return nn.functional.gelu(inner(x))

    def forward(self, x):
        if "all" in self.checkpointed:
            return self.run(lambda x: self.layers[2](self.block(self.layers[0](x))), x)
        x = self.run(self.layers[0], x) if 0 in self.checkpointed else self.layers[0](x)
        x = self.run(self.block, x) if 1 in self.checkpointed else self.block(x)
        return self.run(self.layers[2], x) if 2 in self.checkpointed else self.layers[2](x)


def scales(net):
    states = []
    for module in net.modules():
        if hasattr(module, "fp8_meta"):
            states += [module.fp8_meta.get(key) for key in ("scaling_fwd", "scaling_bwd")]
        elif hasattr(module, "_delayed_state"):
            states += [module._delayed_state(mode) for mode in ("forward", "backward")]
    states = [state for state in states if state is not None]
    return [tensor.clone() for state in states for tensor in (state.scale, state.amax_history)]


def train(net, recipe, *, steps=4, region_inside=False, in_flight=1, input_grad=True):
    """Return everything that a few steps leave; scales change strongly from step to step."""
    seen = []
    torch.default_generator.manual_seed(11)
    for i in range(steps):
        pairs = []
        for _ in range(in_flight):
            x = (torch.randn(32, 64) * 3**i).bfloat16().requires_grad_(input_grad)
            if region_inside:

                def function(x):
                    with te.autocast(recipe=recipe):
                        return net(x)

                y = te.checkpoint(function, x) if region_inside == "checkpoint" else function(x)
            else:
                with te.autocast(recipe=recipe):
                    y = net(x)
            pairs.append((x, y))
        for x, y in pairs:
            y.backward(torch.randn(32, 64).bfloat16() * 2**i)
            seen += [y.detach(), *([x.grad] if input_grad else [])]
        grads = [parameter.grad for parameter in net.parameters()]
        seen += [grad.clone() for grad in grads if grad is not None] + scales(net)
        net.zero_grad()
    return seen


def check(net, plain, recipe, **options):
    got, wanted = train(net, recipe, **options), train(plain, recipe, **options)
    assert len(got) == len(wanted)
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(one, other), index


@pytest.mark.parametrize(
    ("recipe", "checkpointed", "reentrant"),
    sampled(RECIPES, [[0], [1], [2], [0, 1, 2], ["all"]], [True, False]),
    ids=str,
    indirect=["recipe"],
)
def test_nothing_differs(recipe, checkpointed, reentrant):
    check(Net(checkpointed, reentrant), Net([]), recipe)


@pytest.mark.parametrize(
    ("recipe", "make", "reentrant"), sampled(RECIPES, MAKES, [True, False]), indirect=["recipe"]
)
def test_layers_that_are_programs(recipe, make, reentrant):
    plain = PLAIN.get(make, make)
    check(Net(["all"], reentrant, make=make), Net([], make=plain), recipe)


@pytest.mark.parametrize(
    ("make", "reentrant"), pairs(MAKES, [True, False], quick=[mlp, norm_linear])
)
def test_programs_several_forwards_before_their_backwards(make, reentrant):
    net = Net([0, 1, 2], reentrant, make=make)
    plain = Net([], make=PLAIN.get(make, make))
    check(net, plain, DelayedScaling(amax_history_len=4), in_flight=3)


@pytest.mark.parametrize("make", [linear, mlp], ids=lambda make: make.__name__)
def test_first_layer_is_frozen(make):
    """The first layer has no node in backward, so the next layer's node updates the backward scales."""
    nets = Net(["all"], reentrant=False, make=make), Net([], make=make)
    for net in nets:
        for parameter in net.layers[0].parameters():
            parameter.requires_grad_(False)
    check(*nets, DelayedScaling(amax_history_len=4), input_grad=False)


class NetOfConstants(Net):
    """A net that begins with a layer that runs without gradients."""

    def forward(self, x):
        def function(x):
            with torch.no_grad():
                constant = self.layers[0](torch.ones_like(x))
            return self.layers[2](self.block(x + constant))

        return self.run(function, x) if self.checkpointed else function(x)


WITHOUT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@WITHOUT
@REENTRANT
@pytest.mark.parametrize("make", [linear, mixed_chain], ids=lambda make: make.__name__)
def test_the_first_layer_runs_without_gradients(make, reentrant):
    """Another node updates the backward scales, whether or not the phases are nested."""
    nets = NetOfConstants("all", reentrant, True, make), NetOfConstants("", make=make)
    check(*nets, DelayedScaling(amax_history_len=4))


@WITHOUT
@REENTRANT
def test_a_checkpoint_without_gradients_is_not_the_first(reentrant):
    """Neither without gradients altogether nor without an input that needs one."""
    recipe = DelayedScaling(amax_history_len=4)
    for without in (torch.no_grad, torch.enable_grad):

        class First(Net):
            def forward(self, x, without=without):
                with without():
                    constant = self.run(self.layers[0], torch.ones_like(x)).detach()
                return self.layers[2](x + constant)

        nets = First([0], reentrant), First([])
        nets[1].run = lambda function, x: function(x)
        for net in nets:
            net.layers[0].requires_grad_(False)
        check(*nets, recipe)


CONTEXTS = {"context_fn": get_activation_recompute_contexts, "use_reentrant": False}


class NetOfContexts(Net):
    """A net that gives the regions to the checkpoint function, as MosaicML's Composer does."""

    def __init__(self, checkpointed, function):
        super().__init__(checkpointed)
        self.function = function

    def run(self, function, x):
        return self.function(function, x, **CONTEXTS)


@pytest.mark.parametrize(
    ("recipe", "function", "checkpointed", "in_flight"),
    sampled(RECIPES, [te.checkpoint, torch_checkpoint], [[0, 1, 2], ["all"]], [1, 3]),
    indirect=["recipe"],
)
def test_regions_for_a_checkpoint(recipe, function, checkpointed, in_flight):
    check(NetOfContexts(checkpointed, function), Net([]), recipe, in_flight=in_flight)


def test_a_graph_that_is_kept_takes_its_scales_twice():
    layer, recipe = linear(0), DelayedScaling(amax_history_len=4)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with te.autocast(recipe=recipe):
        y = torch_checkpoint(layer, x, **CONTEXTS)
    grads = []
    for _ in range(2):
        x.grad = None
        y.sum().backward(retain_graph=True)
        grads.append(x.grad)
        with te.autocast(recipe=recipe):
            layer(x * 8)
    assert torch.equal(*grads)


@REENTRANT
@pytest.mark.parametrize("make", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_a_bias_that_is_returned_stays_a_parameter(recipe, reentrant, make):
    """Megatron-LM's linear layers return the bias for a fused addition."""
    found = []
    for checkpointed in (False, True):
        torch.default_generator.manual_seed(0)
        layer = make(64, 64, return_bias=True, **OPTIONS)
        bias = layer.fc2_bias if make is te.LayerNormMLP else layer.bias
        for _ in range(2):
            x = torch.randn(32, 64).bfloat16().requires_grad_()
            options = {"use_reentrant": reentrant}
            with te.autocast(recipe=recipe):
                y, returned = te.checkpoint(layer, x, **options) if checkpointed else layer(x)
            assert bias.is_leaf
            (y + returned).square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, one, other))


@REENTRANT
@pytest.mark.parametrize("bias", ["none", "frozen"])
@pytest.mark.parametrize("make", [te.Linear, te.LayerNormMLP])
def test_a_returned_bias_that_does_not_train_stays_a_leaf(make, bias, reentrant):
    layer = make(64, 64, return_bias=True, bias=bias == "frozen", **OPTIONS)
    name = "fc2_bias" if make is te.LayerNormMLP else "bias"
    getattr(layer, name).requires_grad_(False)
    x = torch.ones(32, 64).bfloat16().requires_grad_()
    for _ in range(2):
        y, _ = te.checkpoint(layer, x, use_reentrant=reentrant)
        kept = getattr(layer, name)
        assert kept.is_leaf
        assert not kept.requires_grad
        y.sum().backward()


@pytest.mark.parametrize(
    ("recipe", "reentrant"), sampled(RECIPES, [True, False]), indirect=["recipe"]
)
def test_nested(recipe, reentrant):
    check(Net([0, 1], reentrant, nested=True), Net([]), recipe)


@pytest.mark.parametrize(
    ("recipe", "reentrant"), sampled(RECIPES, [True, False]), indirect=["recipe"]
)
def test_several_forwards_before_their_backwards(recipe, reentrant):
    check(Net([0, 1, 2], reentrant), Net([]), recipe, in_flight=3)


def test_the_region_is_inside(recipe):
    got = train(Net([]), recipe, region_inside="checkpoint")
    wanted = train(Net([]), recipe, region_inside=True)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_backward_inside_another_region():
    """The second run is in the region of the first run, whatever region surrounds the backward."""
    results = []
    for checkpointed in ([], [1]):
        net = Net(checkpointed)
        x = torch.ones(32, 64, dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(recipe=DelayedScaling()):
            y = net(x)
        with te.autocast(recipe=Float8CurrentScaling()):
            y.sum().backward()
            assert te.FP8GlobalStateManager.get_fp8_recipe().float8_current_scaling()
        results.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@REENTRANT
def test_outside_of_fp8(reentrant):
    net, plain = Net([0, 1, 2], reentrant), Net([])
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    net(x).sum().backward()
    got, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(got, x.grad)


def test_quantize_repeats_its_scale():
    """In the second run the op rounds with the first run's scale, and records no maximum."""
    found = []
    for checkpointed in (False, True):
        quantize = te.ops.Quantize()
        for number in range(4):
            x = (torch.arange(1.0, 65.0).view(8, 8) * 3**number).requires_grad_()
            with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4)):
                run = te.checkpoint if checkpointed else lambda f, *a, **_: f(*a)
                y = run(lambda t, q=quantize: q(t * t).square(), x, use_reentrant=False)
            y.sum().backward()
            state = quantize._delayed_state("forward")
            found.append((y.detach(), x.grad, state.scale.clone(), state.amax_history.clone()))
    for plain, again in zip(found[:4], found[4:], strict=True):
        assert all(map(torch.equal, plain, again))


@REENTRANT
@pytest.mark.parametrize("forward", [False, True])
def test_quantize_of_gradients_alone_updates_its_scale(forward, reentrant):
    found = []
    for checkpointed in (False, True):
        quantize = te.ops.Quantize(forward=forward, backward=True)
        for number in range(4):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
            with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4)):
                run = te.checkpoint if checkpointed else lambda f, *a, **_: f(*a)
                y = run(quantize, x, use_reentrant=reentrant)
            y.backward(torch.linspace(-1, 1, 64).view(8, 8) * 3**number)
            state = quantize._delayed_state("backward")
            found.append((x.grad, state.scale.clone(), state.amax_history.clone()))
    assert found[3][1] != 1
    for plain, again in zip(found[:4], found[4:], strict=True):
        assert all(map(torch.equal, plain, again))


def test_retained_graph_runs_again():
    layer = linear(0)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with te.autocast(recipe=DelayedScaling()):
        y = te.checkpoint(layer, x)
    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad.clone(), None
    y.sum().backward()
    assert torch.equal(x.grad, first)


def test_phases():
    seen = []

    def function(x):
        phase = is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()
        seen.append(phase)
        return x * 2

    x = torch.ones(2, requires_grad=True)
    with te.autocast():
        y = te.checkpoint(function, x)
    y.sum().backward()
    te.checkpoint(function, x).sum().backward()
    assert seen == [(True, False), (True, True), (False, False), (False, True)]
    assert not is_fp8_activation_recompute_enabled()
    assert not in_fp8_activation_recompute_phase()


def test_phases_by_hand():
    """Megatron-LM's own checkpointing enters the phases in this way."""
    layer, x = linear(0), torch.randn(32, 64).bfloat16()
    recipe = DelayedScaling()
    with te.autocast(recipe=recipe), activation_recompute_forward(True, False):
        first = layer(x).detach()
    assert layer.fp8_meta["scaling_fwd"].scale[0] != 1
    history = layer.fp8_meta["scaling_fwd"].amax_history.clone()
    with te.autocast(recipe=recipe, _graph=True), activation_recompute_forward(True, True):
        again = layer(x)
    assert torch.equal(first, again)
    assert torch.equal(history, layer.fp8_meta["scaling_fwd"].amax_history)
    with (
        te.autocast(recipe=recipe),
        activation_recompute_forward(True, True),
        pytest.raises(StateError, match="more often"),
    ):
        layer(x)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert not torch.equal(layer(x), first)  # scales have changed


def test_an_exception_leaves_no_phase():
    def function(x):
        raise KeyError("from the function")

    x = torch.ones(2, requires_grad=True)
    with te.autocast(), pytest.raises(KeyError):
        te.checkpoint(function, x)
    assert not is_fp8_activation_recompute_enabled()
    assert not in_fp8_activation_recompute_phase()


def test_errors_of_ranks_are_of_transformer_engines_class():
    with pytest.raises(RuntimeError, match="get_distributed_rank: .*init_process_group") as raised:
        te.distributed.get_distributed_rank()
    assert isinstance(raised.value, RanksError)
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    mark = te.distributed.set_tensor_model_parallel_attributes
    mark(weight, True, 0, 1)
    with pytest.raises(StateError, match="tensor_model_parallel, partition_dim, partition_stride"):
        mark(weight, False, 1, 1)
    assert weight.tensor_model_parallel
    assert weight.partition_dim == 0


def test_arguments():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(DtypeError, match="first argument"):
        te.checkpoint(torch.sin, 1.0, distribute_saved_activations=True)
    with pytest.raises(RanksError, match="needs a process group"):
        te.checkpoint(torch.sin, x, distribute_saved_activations=True)
    with pytest.raises(DtypeError, match="checkpoint: function must be callable, got NoneType"):
        te.checkpoint(None, x)
    with pytest.raises(DtypeError, match="get_rng_state_tracker must be a function, got int 3"):
        te.checkpoint(torch.sin, x, get_rng_state_tracker=3)

    def scaled(x, *, factor):
        return x * factor

    for reentrant in (True, False):
        te.checkpoint(scaled, x, factor=3, use_reentrant=reentrant).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 3.0))
        x.grad = None
    for reentrant in (True, False):
        te.checkpoint(torch.sin, x, preserve_rng_state=False, use_reentrant=reentrant)
    with pytest.warns(DeprecationWarning, match="by keyword"):
        y = te.checkpoint(torch.sin, False, Tracker, None, x)
    assert torch.equal(y, torch.sin(x))


@REENTRANT
def test_states_of_a_random_number_tracker(reentrant):
    tracker = Tracker()

    def function(x):
        tracker.state += 1
        return x.sin() * tracker.state

    x = torch.ones(2, requires_grad=True)
    y = te.checkpoint(function, x, get_rng_state_tracker=lambda: tracker, use_reentrant=reentrant)
    tracker.state = 40
    y.sum().backward()
    assert torch.allclose(x.grad, 2 * torch.cos(torch.ones(2)))
    assert tracker.state == 40


@pytest.fixture
def tracker():
    """A tracker with one state, which other tests do not see."""
    former, tracker = get_all_rng_states(), te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    yield tracker
    set_all_rng_states(former)


@REENTRANT
def test_dropout_of_a_tracker_is_repeated(tracker, reentrant):
    def function(x):
        with tracker.fork():
            return torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(64, requires_grad=True)
    options = {"get_rng_state_tracker": lambda: tracker, "use_reentrant": reentrant}
    y = te.checkpoint(function, x, **options)
    after = tracker.get_states()["model-parallel-rng"].get_state()
    for _ in range(2):
        x.grad = None
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, y)
        assert torch.equal(tracker.get_states()["model-parallel-rng"].get_state(), after)


@pytest.mark.parametrize("kind", ["split", "torch autocast", "rows to pad"])
def test_torchs_own_after_the_region_repeats_it(recipe, kind):
    """The recomputation repeats the region even where a call leaves the native fast path."""
    options = {"parameters_split": ("q", "k")} if kind == "split" else {}
    dtype = torch.float32 if kind == "torch autocast" else torch.bfloat16
    found = []
    te_fast.auto_pad(kind == "rows to pad")
    try:
        for remade in (False, True):
            torch.default_generator.manual_seed(0)
            layer = te.Linear(64, 64, device="cpu", params_dtype=dtype, **options)
            x = torch.randn(13 if kind == "rows to pad" else 32, 64, dtype=dtype).requires_grad_()

            def function(x, layer=layer):
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "torch autocast"):
                    return layer(x).float()

            with te.autocast(recipe=recipe):
                y = torch_checkpoint(function, x, use_reentrant=False) if remade else function(x)
            if recipe.delayed():  # the second run uses current scales: make them the first run's
                layer.fp8_meta["scaling_fwd"].reset()
            y.square().sum().backward()
            found.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    finally:
        te_fast.auto_pad(False)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@REENTRANT
def test_torchs_own_outside_of_fp8(reentrant):
    """torch's checkpoint ends a recomputation by an exception, which is no error of the layer."""
    layer = linear(0)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    layer(x).sum().backward()
    wanted, x.grad = x.grad, None
    torch_checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, wanted)


@REENTRANT
@pytest.mark.parametrize("make", [linear, norm_linear, norm_mlp, recomputed_norm_mlp])
def test_a_calibration_takes_its_maxima_once(make, reentrant):
    recipe, found = RECIPES["delayed"](), []
    x = torch.linspace(-2, 2, 32 * 64).view(32, 64).bfloat16().requires_grad_()
    for checkpointed in (False, True):
        layer = make(0)
        with te.autocast(enabled=False, calibrating=True, recipe=recipe):
            y = te.checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
        y.sum().backward()
        found.append(scales(layer))
    assert all(map(torch.equal, *found))


def python_chain(seed):
    """A group with an operation that runs in Python."""
    torch.default_generator.manual_seed(seed)
    options = {"device": "cpu", "dtype": torch.bfloat16}
    ops = te.ops.Linear(64, 64, **options), te.ops.Quantize(), te.ops.Linear(64, 64, **options)
    return te.ops.Sequential(*ops)


@pytest.mark.parametrize(
    ("recipe", "make", "reentrant"),
    sampled(RECIPES, [linear, norm_mlp, recomputed_norm_mlp, chain, python_chain], [True, False]),
    indirect=["recipe"],
)
def test_high_precision_stays_so_where_a_forward_in_fp8_follows(recipe, make, reentrant):
    """The recomputation repeats its own forward, whatever region the layer last ran in."""
    found = []
    for checkpointed in (False, True):
        layer = make(0)
        x, other = (torch.randn(32, 64).bfloat16().requires_grad_() for _ in range(2))
        with torch.no_grad():
            x.copy_(torch.linspace(-2, 2, 32 * 64).view(32, 64))
        y = te.checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
        with te.autocast(recipe=recipe):
            layer(other)
        y.square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("rows", [16, 13])
def test_torchs_own_repeats_the_region_of_operations_in_python(rows):
    """Both runs pad the rows, and round them to FP8 outside of any native program."""
    options = {"device": "cpu", "dtype": torch.bfloat16}
    te_fast.auto_pad(True)
    try:
        for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
            found = []
            for remade in (False, True):
                torch.default_generator.manual_seed(0)
                linears = [te.ops.Linear(64, 64, **options) for _ in range(2)]
                layer = te.ops.Sequential(linears[0], te.ops.Quantize(), te.ops.SReLU(), linears[1])
                x = torch.randn(rows, 64, dtype=torch.bfloat16).requires_grad_()
                with te.autocast(enabled=True, recipe=recipe):
                    y = torch_checkpoint(layer, x, use_reentrant=False) if remade else layer(x)
                y.sum().backward()
                found.append((y.detach(), x.grad, *(p.grad for p in layer.parameters())))
            assert all(map(torch.equal, *found))
    finally:
        te_fast.auto_pad(False)


def test_phases_of_two_threads_end_with_their_regions():
    """Two threads may leave in any order: no flag stays on, and neither thread sees the other's phase."""
    turns, seen = [threading.Event() for _ in range(4)], {}

    def flags():
        return is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()

    def first():
        with te.autocast():
            with activation_recompute_forward(True, False):
                turns[0].set()
                turns[1].wait(10)
                seen["first, both inside"] = flags()
            seen["first, left"] = flags()
            turns[2].set()
            turns[3].wait(10)

    def second():
        turns[0].wait(10)
        with te.autocast():
            with activation_recompute_forward(True, True):
                turns[1].set()
                turns[2].wait(10)
                seen["second, first left"] = flags()
            seen["second, left"] = flags()
        turns[3].set()

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {
        "first, both inside": (True, False),
        "first, left": (False, False),
        "second, first left": (True, True),
        "second, left": (False, False),
    }
    assert flags() == (False, False)


@REENTRANT
def test_phases_in_a_region_that_the_function_enters(reentrant):
    layer, seen = linear(0), []

    def function(x):
        with te.autocast(recipe=DelayedScaling()):
            phase = is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()
            seen.append(phase)
            return layer(x)

    x = torch.randn(32, 64).bfloat16().requires_grad_()
    te.checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert seen == [(True, False), (True, True)]
    assert not is_fp8_activation_recompute_enabled()


@pytest.mark.parametrize("make", [linear, norm_linear, norm_mlp])
def test_a_recomputed_layer_has_a_place_in_the_recompute_buffer(make):
    manager, key = te.FP8GlobalStateManager, "global_fp8_buffer_pos_fwd_recompute"
    layers = [make(0), make(1)]
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with te.autocast(recipe=DelayedScaling()):
        for layer in layers:
            layer(x)
            assert key not in layer.fp8_meta
        for layer in layers:
            te.checkpoint(layer, x).sum().backward()
    places = [layer.fp8_meta[key] for layer in layers]
    buffer = manager.quantization_state.fp8_tensors_recompute_buffer
    assert places[1] == places[0] + 1 == len(buffer) - 1
    # The layers have already restored their own scales.
    with pytest.raises(StateError, match="copy_forward_fp8_meta_tensors_for_recompute"):
        manager.get_old_fp8_meta_tensors_for_recompute(layers[0].fp8_meta)
    manager.reset()
    manager.copy_forward_fp8_meta_tensors_for_recompute(layers[1].fp8_meta)
    manager.get_old_fp8_meta_tensors_for_recompute(layers[1].fp8_meta)
    assert layers[1].fp8_meta[key] == 0


def test_an_old_call_has_a_group(monkeypatch):
    """Early Transformer Engine took the group by position; the first argument is shared among its ranks alone."""
    groups = []

    def share(x, group, new_buffer):
        groups.append(group)
        return x.reshape(-1).clone()

    def whole(x, group):
        groups.append(group)
        return x

    monkeypatch.setattr(recompute, "split_tensor_into_1d_equal_chunks", share)
    monkeypatch.setattr(recompute, "gather_split_1d_tensor", whole)
    monkeypatch.setattr(recompute, "is_initialized", lambda: True)
    group, x = torch.distributed.ProcessGroup(0, 1), torch.ones(2, requires_grad=True)
    with pytest.warns(DeprecationWarning, match="by keyword"):
        te.checkpoint(torch.sin, True, Tracker, group, x).sum().backward()
    assert groups == [group, group]
    assert torch.equal(x.grad, torch.cos(x))
