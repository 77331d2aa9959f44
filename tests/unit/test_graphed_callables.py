"""``make_graphed_callables`` against eager calls, bit for bit: graphs on the host stand in for CUDA graphs."""

import contextlib
import copy
import itertools
import warnings

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from graphed import (
    ORDERS,
    assert_pipelines_alike,
    assert_same,
    assert_stepped_alike,
    both,
    quantising,
)
from graphs import needs_compile, region, states_of
from host_graphs import install
from recipes import RECIPES
from selection import sampled
from te_fast.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from te_fast.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    StateError,
    TeFastError,
    UnsupportedError,
)
from te_fast.pytorch.custom_recipes import quantizer_factories

ROWS, COLS = 16, 32
CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    recorder = install(monkeypatch)
    te.FP8GlobalStateManager.reset()
    yield recorder
    te.FP8GlobalStateManager.reset()


def sample(rows=ROWS, cols=COLS, *, grad=True):
    return torch.randn(rows, cols, requires_grad=grad)


class Block(torch.nn.Module):
    """A norm and a layer in FP8, with torch around them."""

    def __init__(self):
        super().__init__()
        self.layer = te.LayerNormLinear(COLS, COLS, **CPU)
        self.torch = torch.nn.Linear(COLS, COLS)
        self.dropout = torch.nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, scale=None, *, gate=True, residual=None):
        self.calls += 1
        y = torch.relu(self.torch(self.dropout(self.layer(x))))
        if scale is not None:
            y = y * scale
        if residual is not None:
            y = y + residual
        return (y + x if gate else y), {
            "sum": y.sum(1),
            "rows": torch.tensor(x.shape[0]),
            "no": None,
        }


def test_no_quantised_weight_stays_behind_a_capture(recipe):
    """Warm-ups use one weight several times, as microbatches do; graphs quantise weights for themselves."""
    layer = te.LayerNormMLP(COLS, 64, **CPU)
    # After an optimizer's first step, a weight without a gradient counts as unchanged.
    torch.optim.SGD(layer.parameters()).step()
    te.make_graphed_callables(layer, (sample(),), num_warmup_iters=3, enabled=True, recipe=recipe)
    assert not layer._fp8_workspaces


def converted():
    """A model of ``torch.nn``, whose layers of te_fast are in no module's tree."""
    parts = torch.nn.LayerNorm(COLS), torch.nn.Linear(COLS, 64), torch.nn.ReLU()
    inner = torch.nn.Sequential(*parts, torch.nn.Linear(64, COLS))
    model = torch.nn.Sequential(inner, torch.nn.Tanh(), torch.nn.Linear(COLS, COLS))
    te_fast.convert(model)
    return model


MODELS = {
    "converted": converted,
    "Linear": lambda: te.Linear(COLS, COLS, **CPU),
    "LayerNormMLP": lambda: te.LayerNormMLP(COLS, 64, **CPU),
    "Sequential": lambda: te.ops.Sequential(
        te.ops.RMSNorm(COLS, **CPU),
        te.ops.Linear(COLS, 64, **CPU),
        te.ops.GELU(),
        te.ops.Linear(64, COLS, **CPU),
    ),
    "checkpointed": lambda: te.LayerNormMLP(COLS, 64, checkpoint=True, **CPU),
}


# Training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "kind"), sampled(MODELS, [None, *RECIPES]))
def test_a_graphed_model_trains_as_an_eager_one(graphs, make, kind):
    recipe = None if kind is None else RECIPES[kind]()
    eager = MODELS[make]()
    model = copy.deepcopy(eager)
    graphed = graphs.graphed(model, (sample(),), **quantising(recipe))
    assert graphed is model
    for _ in range(4):
        both((eager, graphed), recipe, sample(), torch.randn(ROWS, COLS))
        assert_stepped_alike(eager, graphed)
    assert graphs.replays == 8


def test_scales_of_converted_modules_follow_replays(graphs):
    """te_fast's layers are behind the forwards of such modules, where no walk through the tree finds them."""
    recipe = DelayedScaling(amax_history_len=4)
    eager = converted()
    graphed = graphs.graphed(copy.deepcopy(eager), (sample(),), **quantising(recipe))
    for factor in (1.0, 3.0, 9.0):
        both((eager, graphed), recipe, factor * sample(), torch.randn(ROWS, COLS))
        assert_stepped_alike(eager, graphed)
        one, two = (te_fast.convert.scaling_state(model) for model in (eager, graphed))
        assert list(one) == list(two) == ["0.0", "2"]
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_nested_arguments_and_results_random_numbers_and_buffers(graphs, recipe):
    eager = Block()
    model = copy.deepcopy(eager)
    given = {"residual": sample(), "gate": False}
    samples = sample(), sample(ROWS, 1, grad=False)
    generator = torch.default_generator.get_state()
    graphed = graphs.graphed(model, samples, sample_kwargs=given, **quantising(recipe))
    assert torch.equal(torch.default_generator.get_state(), generator)
    assert model.calls == 0
    for _ in range(3):
        scale, residual = sample(ROWS, 1, grad=False), sample()
        both(
            (eager, graphed),
            recipe,
            sample(),
            torch.randn(ROWS, COLS),
            scale,
            residual=residual,
            gate=False,
        )
        assert model.calls == eager.calls
        assert_stepped_alike(eager, graphed)
    assert model.unused.grad is None


def test_capturing_leaves_no_trace(graphs, recipe):
    model = te.LayerNormMLP(COLS, 64, fuse_wgrad_accumulation=True, **CPU)
    for p in model.parameters():
        p.main_grad = torch.randn_like(p)
        p.grad_added_to_main_grad = False
    x = sample()
    with te.autocast(recipe=recipe):
        y = model(x)
        y.sum().backward()  # records some maxima
        before = [t.clone() for t in states_of(model)]
        grads = [
            (p.grad, p.main_grad.clone(), p.grad_added_to_main_grad) for p in model.parameters()
        ]
        former = x.grad.clone()
        graphs.graphed(model, (x,), **quantising(recipe))
        assert all(torch.equal(a, b) for a, b in zip(before, states_of(model), strict=True))
        for p, (grad, main_grad, added) in zip(model.parameters(), grads, strict=True):
            assert p.grad is grad
            assert torch.equal(p.main_grad, main_grad)
            assert p.grad_added_to_main_grad == added
        assert torch.equal(x.grad, former)
        assert not te.graph.is_graph_capturing()
        is_delayed = bool(before)
        scales = [t.clone() for t in states_of(model)]
    # The region's end takes in the maxima that were there before the capture.
    assert is_delayed == any(
        not torch.equal(a, b) for a, b in zip(scales, states_of(model), strict=True)
    )


def test_scales_of_a_history_of_another_length_are_cut_before_the_capture(graphs):
    model = te.Linear(COLS, COLS, **CPU)
    with te.autocast(recipe=DelayedScaling(amax_history_len=8)):
        model(sample()).sum().backward()
    eager = copy.deepcopy(model)
    recipe = DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=recipe):
        eager(sample(0))  # the layers take over the new history length
    graphed = graphs.graphed(model, (sample(),), **quantising(recipe))
    for _ in range(3):
        both((eager, graphed), recipe, sample(), torch.randn(ROWS, COLS))
        for one, two in zip(states_of(eager), states_of(graphed), strict=True):
            assert torch.equal(one, two)


def test_graphed_and_eager_layers_in_one_region(graphs, recipe):
    """The first layer of a region updates the gradients' scales, whether the layer is graphed or eager."""
    for order in ((0, 1), (1, 0)):
        eager = torch.nn.ModuleList(
            [te.Linear(COLS, COLS, **CPU), te.LayerNormLinear(COLS, COLS, **CPU)]
        )
        mixed = copy.deepcopy(eager)
        graphs.graphed(mixed[0], (sample(),), **quantising(recipe))
        for _ in range(3):
            x, dy = sample(), torch.randn(ROWS, COLS)
            for model in (eager, mixed):
                with region(recipe):
                    y = model[order[1]](model[order[0]](x))
                y.backward(dy)
            assert_stepped_alike(eager, mixed)


@pytest.mark.parametrize("enabled", [True, (True, False, True)], ids=["all", "some"])
def test_several_callables(graphs, recipe, enabled):
    eager = torch.nn.ModuleList([te.Linear(COLS, COLS, **CPU) for _ in range(3)])
    model = copy.deepcopy(eager)
    flags = enabled if isinstance(enabled, tuple) else (enabled,) * 3
    graphed = graphs.graphed(
        tuple(model), tuple((sample(),) for _ in model), recipe=recipe, enabled=enabled
    )
    assert graphed == tuple(model)
    for _ in range(3):
        x, dy = sample(), torch.randn(ROWS, COLS)
        results = []
        for layers in (eager, graphed):
            given = x.clone().detach().requires_grad_()
            with te.autocast(recipe=recipe):
                y = given
                for layer, flag in zip(layers, flags, strict=True):
                    with te.autocast(enabled=flag, recipe=recipe):
                        y = layer(y)
            y.backward(dy)
            results.append([y, given.grad])
        assert_same(*results)
        assert_stepped_alike(eager, model)
    # Layers that were captured in high precision stay in high precision in any region.
    if enabled is not True:
        with te.autocast(recipe=recipe), torch.no_grad():
            assert torch.equal(
                graphed[1](x), torch.nn.functional.linear(x, model[1].weight, model[1].bias)
            )


def test_evaluation_is_captured_without_a_backward(graphs, recipe):
    eager = te.LayerNormMLP(COLS, 64, **CPU).eval()
    graphed = graphs.graphed(copy.deepcopy(eager), (sample(),), **quantising(recipe))
    for _ in range(2):
        with torch.no_grad():
            both((eager, graphed), recipe, sample(grad=False))
    with te.autocast(recipe=recipe), pytest.raises(StateError, match="captured without a backward"):
        graphed(sample())
    graphed.train()
    eager.train()
    both((eager, graphed), recipe, sample(), torch.randn(ROWS, COLS))  # the module's own forward
    assert graphs.replays == 2


def test_calibration_takes_maxima_in_graphs(graphs):
    eager = te.Linear(COLS, COLS, **CPU)
    recipe = DelayedScaling()
    graphed = graphs.graphed(copy.deepcopy(eager), (sample(),), calibrating=True, recipe=recipe)
    for _ in range(2):
        x = sample()
        results = []
        for model in (eager, graphed):
            with te.autocast(enabled=False, calibrating=True, recipe=recipe):
                results.append(model(x))
        assert_same(*results)
        states = list(zip(states_of(eager), states_of(graphed), strict=True))
        assert states
        assert all(torch.equal(a, b) for a, b in states)


def test_a_checkpoint_within(graphs, recipe):
    class Checkpointed(torch.nn.Module):
        def __init__(self, *, use_reentrant):
            super().__init__()
            self.layer = te.Linear(COLS, COLS, **CPU)
            self.use_reentrant = use_reentrant

        def forward(self, x):
            return te.checkpoint(
                self.layer, x, use_reentrant=self.use_reentrant, preserve_rng_state=False
            )

    for use_reentrant in (True, False):
        eager = Checkpointed(use_reentrant=use_reentrant)
        graphed = graphs.graphed(copy.deepcopy(eager), (sample(),), **quantising(recipe))
        for _ in range(2):
            both((eager, graphed), recipe, sample(), torch.randn(ROWS, COLS))
            assert_stepped_alike(eager, graphed)


def test_hooks_of_parameters_do_not_run_at_capture(graphs):
    """Such a hook may step an optimizer."""
    model, calls = te.Linear(COLS, COLS, **CPU), []
    model.weight.register_post_accumulate_grad_hook(calls.append)
    graphed = graphs.graphed(model, (sample(),))
    assert calls == []
    graphed(sample()).sum().backward()
    assert len(calls) == 1


def test_the_same_tensor_twice_gets_each_gradient_once(graphs):
    class Product(torch.nn.Module):
        def forward(self, a, b):
            return a * b

    x = sample()
    graphed = graphs.graphed(Product(), (x, x))
    y = sample()
    graphed(y, y).sum().backward()
    assert torch.equal(y.grad, 2 * y)
    a, b = sample(), sample()
    graphed(a, b).sum().backward()
    assert torch.equal(a.grad, b)


# Pipelines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "order", "chunks", "reuse"),
    sampled(RECIPES, [pytest.param(*case) for case in ORDERS.values()], [False, True]),
    indirect=["recipe"],
)
def test_microbatches_in_the_order_of_a_pipeline(graphs, recipe, order, chunks, reuse):
    layers, microbatches = 2, len(order) // chunks // 2
    eager = torch.nn.ModuleList(
        [te.LayerNormLinear(COLS, COLS, **CPU) for _ in range(layers * chunks)]
    )
    model = copy.deepcopy(eager)
    samples = [(sample(),) for _ in range(layers * chunks * microbatches)]
    graphed = graphs.graphed(
        tuple(model),
        samples,
        _order=order,
        _num_layers_per_chunk=layers,
        _reuse_graph_input_output_buffers=reuse,
        **quantising(recipe),
    )
    assert len(graphed) == len(samples)
    # Inputs can share memory if some forward follows a backward.
    lives_end = any(a < 0 < b for a, b in itertools.pairwise(order))
    shared = len({id(one._run.inputs.tensors[0]) for one in graphed})
    assert (shared < len(samples)) == (reuse and lives_end)
    for _ in range(2):
        shape = chunks, microbatches, ROWS, COLS
        assert_pipelines_alike(
            order, layers, (eager, model, graphed), recipe, torch.randn(shape), torch.randn(shape)
        )


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("kind", [None, *RECIPES])
def test_delayed_weight_gradients(graphs, kind, fuse):
    recipe = None if kind is None else RECIPES[kind]()
    eager = te.LayerNormMLP(COLS, 64, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse, **CPU)
    model = copy.deepcopy(eager)
    hooked = []
    for one in (eager, model):
        for p in one.parameters():
            if fuse:
                p.main_grad = torch.ones_like(p)
        one.register_wgrad_accumulation_and_reduce_hooks(lambda one=one: hooked.append(one))
    graphed = graphs.graphed(model, (sample(),), **quantising(recipe))
    assert hooked == []
    for _ in range(3):
        both((eager, graphed), recipe, sample(), torch.randn(ROWS, COLS))
        assert model.fc1_weight.grad is None
        eager.backward_dw()
        graphed.backward_dw()
        assert hooked == [eager, model]
        hooked.clear()
        if fuse:
            for one in (eager, model):
                one.layer_norm_weight.main_grad.copy_(one.layer_norm_weight.grad)
        assert_stepped_alike(eager, graphed)
    with pytest.raises(StateError, match="without a backward before it"):
        graphed.backward_dw()


def test_weight_gradients_have_places_in_an_order(graphs, recipe):
    eager = te.Linear(COLS, COLS, delay_wgrad_compute=True, **CPU)
    model = copy.deepcopy(eager)
    order = [1, 1, -1, -1.5, -1, -1.5]
    one, two = graphs.graphed(
        (model,),
        [(sample(),), (sample(),)],
        _order=order,
        _num_layers_per_chunk=[1],
        **quantising(recipe),
    )
    for _ in range(2):
        inputs, losses = torch.randn(2, ROWS, COLS), torch.randn(2, ROWS, COLS)
        results = []
        # The models run one after the other, because an update takes in the maxima that wait in both.
        for runs in ((eager, eager), (one, two)):
            with te.autocast(recipe=recipe):
                outputs = [run(x) for run, x in zip(runs, inputs, strict=True)]
            for run, y, dy in zip(runs, outputs, losses, strict=True):
                y.backward(dy)
                run.backward_dw()
            results.append(outputs)
        te.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        assert_same(*results)
        assert_stepped_alike(eager, model)


def test_an_order_must_say_when_delayed_weight_gradients_are_computed(graphs):
    layer = te.Linear(COLS, COLS, delay_wgrad_compute=True, **CPU)
    with pytest.raises(StateError, match="_order does not say when they are computed"):
        graphs.graphed((layer,), [(sample(),)], _order=[1, -1])
    layer(sample()).sum().backward()
    layer.backward_dw()  # the refused capture left no gradient to compute
    with pytest.raises(StateError, match="without a backward"):
        layer.backward_dw()
    plain = te.Linear(COLS, COLS, **CPU)
    with pytest.raises(StateError, match="which computes them in its backward"):
        graphs.graphed((plain,), [(sample(),)], _order=[1, -1, -1.5], _num_layers_per_chunk=[1])
    layer(sample()).sum().backward()
    with pytest.raises(StateError, match="has weight gradients waiting"):
        graphs.graphed(layer, (sample(),))


# main_grad, cached weights --------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [False, True], ids=["alone", "flag"])
@pytest.mark.parametrize("input_grad", [False, True], ids=["frozen", "input"])
def test_gradients_that_are_added_to_main_grad(graphs, recipe, flag, input_grad):
    """The backward is replayed even where nothing else needs a gradient."""
    eager = te.Linear(COLS, COLS, bias=False, fuse_wgrad_accumulation=True, **CPU)
    model = copy.deepcopy(eager)
    for layer in (eager, model):
        layer.weight.main_grad = torch.ones(COLS, COLS)
        if flag:
            layer.weight.grad_added_to_main_grad = False
    graphed = graphs.graphed(model, (sample(grad=input_grad),), **quantising(recipe))
    for _ in range(2):
        for layer in (eager, model):
            if flag:
                layer.weight.grad_added_to_main_grad = False
        both((eager, graphed), recipe, sample(grad=input_grad), torch.randn(ROWS, COLS))
        assert getattr(model.weight, "grad_added_to_main_grad", False) == flag
        assert (model.weight.grad is None) == (eager.weight.grad is None)
        assert_stepped_alike(eager, graphed)
    model.weight.main_grad = torch.zeros(COLS, COLS)
    with te.autocast(recipe=recipe):
        y = graphed(sample(grad=input_grad))
    with pytest.raises(StateError, match="main_grad lies elsewhere"):
        y.sum().backward()


def test_weights_are_quantised_where_the_call_says_so(graphs, recipe):
    eager = te.Linear(COLS, COLS, **CPU)
    model = copy.deepcopy(eager)
    graphed = graphs.graphed(model, (sample(),), cache_quantized_params=True, **quantising(recipe))
    for _ in range(2):
        for first in (True, False, False):
            results = []
            x, dy = sample(), torch.randn(ROWS, COLS)
            for layer in (eager, graphed):
                with te.autocast(recipe=recipe):
                    y = layer(x, is_first_microbatch=first)
                y.backward(dy)
                results.append(y)
            assert_same(*results)
        assert_stepped_alike(eager, model)
    with torch.no_grad(), te.autocast(recipe=recipe):
        before = graphed(x, is_first_microbatch=False).clone()
        model.weight.mul_(-2)
        assert torch.equal(graphed(x, is_first_microbatch=False), before)
        assert not torch.equal(graphed(x, is_first_microbatch=True), before)
        for keywords in ({}, {"is_first_microbatch": None}, {"is_first_microbatch": 1}):
            with pytest.raises(ArgumentError, match="must say is_first_microbatch=True or False"):
                graphed(x, **keywords)


def test_the_flag_of_cached_weights_is_the_captures_own(graphs):
    """Other code may set or reset another flag, and other captures do not read this capture's flag."""
    recipe, manager = Float8CurrentScaling(), te.FP8GlobalStateManager
    layer, other = te.Linear(COLS, COLS, **CPU), te.Linear(COLS, COLS, **CPU)
    graphed = captured(graphs, recipe, layer, cache_quantized_params=True)
    assert manager.get_skip_fp8_weight_update_tensor() is None
    manager.set_skip_fp8_weight_update_tensor(True)
    others = manager.get_skip_fp8_weight_update_tensor()
    uncached = captured(graphs, recipe, other)
    assert manager.get_skip_fp8_weight_update_tensor() is others
    x = sample()
    with torch.no_grad(), te.autocast(recipe=recipe):
        first = graphed(x, is_first_microbatch=True).clone()
        layer.weight.mul_(-1)
        assert torch.equal(graphed(x, is_first_microbatch=False), first)
        assert torch.equal(graphed(x, is_first_microbatch=True), 2 * layer.bias - first)
        # Graphs without a cache quantise weights anew, whatever the flag says.
        before = uncached(x).clone()
        other.weight.mul_(-1)
        assert torch.equal(uncached(x), 2 * other.bias - before)
    manager.reset()
    with torch.no_grad(), te.autocast(recipe=recipe):
        now = graphed(x, is_first_microbatch=True).clone()
        layer.weight.mul_(-1)
        assert torch.equal(graphed(x, is_first_microbatch=False), now)


def test_without_a_cache_any_microbatch_may_be_named(graphs, recipe):
    eager = te.Linear(COLS, COLS, **CPU)
    graphed = graphs.graphed(copy.deepcopy(eager), (sample(),), **quantising(recipe))
    # With False an eager layer keeps the weight that it quantised before. Under delayed scaling that weight has an
    # earlier scale, so the results differ.
    for first in (True, None) if recipe.delayed() else (True, False, None):
        both((eager, graphed), recipe, sample(), None, is_first_microbatch=first)


# Refused calls --------------------------------------------------------------------------------------


def captured(graphs, recipe=None, model=None, **options):
    model = te.Linear(COLS, COLS, **CPU) if model is None else model
    return graphs.graphed(model, (sample(),), **quantising(recipe), **options)


def test_a_region_of_another_recipe_is_an_error(graphs, recipe):
    graphed = captured(graphs, recipe)
    other = Float8CurrentScaling() if recipe.delayed() else DelayedScaling()
    with (
        te.autocast(recipe=other),
        pytest.raises(StateError, match="captured under .* called under"),
    ):
        graphed(sample())
    with pytest.raises(StateError, match="called under no region that quantises"):
        graphed(sample())
    same = copy.deepcopy(recipe)
    with te.autocast(recipe=same):
        graphed(sample())
    plain = graphs.graphed(te.Linear(COLS, COLS, **CPU), (sample(),))
    with te.autocast(recipe=recipe), pytest.raises(StateError, match="without low precision"):
        plain(sample())


def test_parameters_that_were_replaced_or_moved_are_an_error(graphs, recipe):
    def replace(layer):
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())

    def exchange(layer):
        layer.bias.data = layer.bias.data.clone()

    def cast(layer):
        layer.double()

    for change, name in ((replace, "weight"), (exchange, "bias"), (cast, "weight")):
        graphed = captured(graphs, recipe)
        change(graphed)
        replays = graphs.replays
        with (
            te.autocast(recipe=recipe),
            pytest.raises(StateError, match=f"parameter {name} was replaced"),
        ):
            graphed(sample())
        assert graphs.replays == replays
    # Parameters may change in place.
    eager, graphed = te.Linear(COLS, COLS, **CPU), captured(graphs, recipe)
    graphed.load_state_dict(eager.state_dict())
    both((eager, graphed), recipe, sample())


class Scaled(torch.nn.Module):
    """A chain of modules, and a buffer."""

    def __init__(self):
        super().__init__()
        self.chain = torch.nn.Sequential(te.Linear(COLS, COLS, **CPU), te.Linear(COLS, COLS, **CPU))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.chain(x) * self.scale


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.chain.__setitem__(1, te.Linear(COLS, COLS, **CPU)), "submodule chain.1 was"),
        (lambda m: m.chain.append(torch.nn.ReLU()), "submodule chain.2 was"),
        (lambda m: m.chain.__delitem__(1), "submodule chain.1 was"),
        (lambda m: setattr(m, "scale", torch.zeros(1)), "buffer scale was replaced"),
        (lambda m: setattr(m.scale, "data", torch.zeros(1)), "buffer scale was replaced"),
    ],
)
def test_submodules_and_buffers_that_were_replaced_are_an_error(graphs, change, match):
    graphed = graphs.graphed(Scaled(), (sample(),))
    x = sample()
    graphed.scale.fill_(2)  # buffers may change in place
    torch.testing.assert_close(graphed(x), graphed.chain(x) * 2)
    change(graphed)
    with pytest.raises(StateError, match=match):
        graphed(sample())


def test_parameters_that_train_since_the_capture_are_an_error(graphs):
    layer = te.Linear(COLS, COLS, **CPU)
    layer.weight.requires_grad_(False)
    graphed = graphs.graphed(layer, (sample(),))
    graphed.weight.requires_grad_(True)
    with pytest.raises(StateError, match="parameter weight requires a gradient, which it did not"):
        graphed(sample())
    with torch.no_grad():
        graphed(sample())


def test_a_parameter_with_main_grad_that_was_frozen_since_the_capture_is_an_error(graphs):
    layer = te.Linear(COLS, COLS, fuse_wgrad_accumulation=True, **CPU)
    layer.weight.main_grad = torch.zeros(COLS, COLS)
    graphed = graphs.graphed(layer, (sample(),))
    graphed.weight.requires_grad_(False)
    with pytest.raises(StateError, match=r"weight was frozen since .* main_grad"):
        graphed(sample())


def test_scales_that_were_exchanged_are_an_error(graphs):
    recipe = DelayedScaling(amax_history_len=4)
    graphed = captured(graphs, recipe)
    graphed.reset()
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        graphed(sample()).sum().backward()
    graphed = captured(graphs, recipe, graphed)
    state = graphed.fp8_meta["scaling_fwd"]
    state.amax_history = state.amax_history.clone()
    with (
        te.autocast(recipe=recipe),
        pytest.raises(StateError, match="its scales of delayed scaling lie"),
    ):
        graphed(sample())


def test_arguments_unlike_the_samples_are_errors(graphs):
    block = Block()
    graphed = graphs.graphed(
        block, (sample(),), sample_kwargs={"gate": True, "residual": sample(grad=False)}
    )
    fine = {"gate": True, "residual": sample(grad=False)}
    graphed(sample(), **fine)
    graphed(sample(), **fine, scale=None)
    replays = graphs.replays
    for error, message, args, kwargs in (
        (ShapeError, r"expected \[16, 32\], got \[1, 32\]", (sample(1),), fine),
        (DtypeError, "expected torch.float32", (sample().double(),), fine),
        (DtypeError, "expected a tensor", (3.0,), fine),
        (DeviceError, "got a tensor on meta", (sample().to("meta"),), fine),
        (ArgumentError, "structure of the samples", (), fine),
        (ArgumentError, "structure of the samples", (sample(), sample()), fine),
        (ArgumentError, "'residual' was captured and is missing", (sample(),), {"gate": True}),
        (ArgumentError, "'scale' was not captured", (sample(),), {**fine, "scale": sample()}),
        (ArgumentError, "True is a constant", (sample(),), {**fine, "gate": False}),
        (StateError, "its sample did not", (sample(),), {**fine, "residual": sample()}),
    ):
        with pytest.raises(error, match=message):
            graphed(*args, **kwargs)
    assert graphs.replays == replays
    with torch.no_grad():
        graphed(sample(), **{**fine, "residual": sample()})


def test_calls_that_overwrite_what_a_backward_reads_are_errors(graphs, recipe):
    graphed = captured(graphs, recipe)

    def call(layer):
        with te.autocast(recipe=recipe):
            return layer(sample())

    first, second = call(graphed), call(graphed)
    second.sum().backward()
    with pytest.raises(StateError, match="was overwritten by graph of Layer"):
        first.sum().backward()
    with pytest.raises(StateError, match="retain_graph_in_backward=True"):
        second.sum().backward()
    del first, second
    call(graphed).sum().backward()

    a, b = (te.Linear(COLS, COLS, **CPU) for _ in range(2))
    graphs.graphed((a, b), ((sample(),), (sample(),)), **quantising(recipe))
    y, z = call(a), call(b)
    y.sum().backward()
    with pytest.raises(StateError, match="in the order of their capture"):
        z.sum().backward()
    # A call is right if its backward comes before the next call.
    call(a).sum().backward()
    call(b).sum().backward()


def test_a_retained_graph_is_differentiated_again(graphs, recipe):
    eager = te.Linear(COLS, COLS, **CPU)
    graphed = captured(graphs, recipe, copy.deepcopy(eager), retain_graph_in_backward=True)
    x, results = sample(), []
    for layer in (eager, graphed):
        with te.autocast(recipe=recipe):
            y = layer(x)
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        results.append(layer.weight.grad)
    assert torch.equal(*results)


def test_gradients_of_parameters_are_their_own_unless_told(graphs):
    for clones in (True, False):
        graphed = captured(graphs, clone_param_grads_on_return=clones)
        graphed(sample()).sum().backward()
        kept = graphed.weight.grad
        before = kept.clone()
        graphed.weight.grad = None
        graphed(sample()).sum().backward()
        assert torch.equal(kept, before) == clones


def test_marks_that_parameters_get_after_the_capture_change_no_gradient(graphs):
    graphed = captured(graphs)
    graphed.weight.skip_backward_post_hook = True
    graphed(sample()).sum().backward()
    kept = graphed.weight.grad
    before = kept.clone()
    graphed.weight.grad = None
    graphed(sample()).sum().backward()
    assert torch.equal(kept, before)


def test_reset_gives_the_module_back(graphs, recipe):
    eager = te.Linear(COLS, COLS, delay_wgrad_compute=True, **CPU)
    model = copy.deepcopy(eager)
    graphed = captured(graphs, recipe, model)
    with pytest.raises(StateError, match="cannot be copied"):
        copy.deepcopy(graphed)
    with pytest.raises(StateError, match="replays graphs already"):
        captured(graphs, recipe, torch.nn.Sequential(graphed))
    x = sample()
    with te.autocast(recipe=recipe):
        y = graphed(x)
        eager(x)
    graphed.reset()
    with pytest.raises(StateError, match="freed it"):
        y.sum().backward()
    replays = graphs.replays
    both((eager, model), recipe, sample(), torch.randn(ROWS, COLS))
    eager.backward_dw()
    model.backward_dw()
    assert torch.equal(eager.weight.grad, model.weight.grad)
    assert graphs.replays == replays
    copy.deepcopy(model)
    run = graphs.graphed(
        (model,), [(sample(),)], _order=[1, -1, -1.5], _num_layers_per_chunk=1, **quantising(recipe)
    )
    run[0].reset()
    run[0].reset()
    with te.autocast(recipe=recipe), pytest.raises(StateError, match="freed it"):
        run[0](sample())


def test_modules_that_cannot_be_captured(graphs, monkeypatch):
    def layer():
        return te.Linear(COLS, COLS, **CPU)

    hooked = layer()
    hooked.register_forward_hook(lambda *_: None)
    trained = layer()
    trained.register_buffer("buffer", torch.ones(1, requires_grad=True))
    for error, message, modules, options in (
        (DtypeError, "must be torch.nn.Modules", lambda x: x, {}),
        (StateError, "has hooks", hooked, {}),
        (StateError, "buffers that require gradients", trained, {}),
        (ArgumentError, "1 at least, got 0", layer(), {"num_warmup_iters": 0}),
        (ArgumentError, "needs _order", layer(), {"_reuse_graph_input_output_buffers": True}),
        (DtypeError, "enabled must be a bool", layer(), {"enabled": 1}),
        (DtypeError, "recipe must be an object", layer(), {"enabled": True, "recipe": "fp8"}),
        (ArgumentError, "an entry for each of 1", layer(), {"enabled": (True, False)}),
        (ArgumentError, "an entry for each of 1", layer(), {"capture_time_hooks": []}),
        (ArgumentError, "has 'hooks'", layer(), {"capture_time_hooks": [{"hooks": {}}]}),
    ):
        with pytest.raises(error, match=message):
            te.make_graphed_callables(modules, (sample(),), **options)
        assert not te.graph.is_graph_capturing()
    pair = (layer(), layer().eval())
    with pytest.raises(StateError, match="some modules are in training mode"):
        te.make_graphed_callables(pair, ((sample(),), (sample(),)))
    with pytest.raises(ShapeError, match="an entry for each of 2, got 1"):
        te.make_graphed_callables((layer(), layer()), ((sample(),),))
    with pytest.raises(DtypeError, match="must be tensors"):
        te.make_graphed_callables(layer(), (sample(), 3))
    for model, x in ((layer(), sample().to("meta")), (layer().to("meta"), sample())):
        with pytest.raises(
            DeviceError, match="must be on cpu, the current device, got a tensor on meta"
        ):
            te.make_graphed_callables(model, (x,))
    with pytest.raises(DtypeError, match="must be a tuple"):
        te.make_graphed_callables(layer(), sample())
    with pytest.raises(StateError, match="modules in training mode"):
        te.make_graphed_callables(
            (layer().eval(),), [(sample(),)], _order=[1, -1], _reuse_graph_input_output_buffers=True
        )
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda: True)
    with pytest.raises(StateError, match="cache_enabled=False"):
        te.make_graphed_callables(layer(), (sample(),))


def test_inputs_without_gradient_are_told(graphs):
    class Ignores(torch.nn.Module):
        def forward(self, x, other):
            return 2 * x

    samples = (sample(), sample())
    with pytest.raises(StateError, match="allow_unused_input=True"):
        graphs.graphed(Ignores(), samples)
    graphed = graphs.graphed(Ignores(), samples, allow_unused_input=True)
    x, other = sample(), sample()
    graphed(x, other).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert other.grad is None


def test_a_capture_that_fails_leaves_no_trace(graphs):
    class Fails(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.count = te.Linear(COLS, COLS, **CPU), 0

        def forward(self, x):
            self.count += 1
            if self.count == 2:
                message = "on purpose"
                raise ValueError(message)
            return self.layer(x)

    model = Fails()
    with pytest.raises(ValueError, match="on purpose"):
        graphs.graphed(model, (sample(),), **quantising(DelayedScaling()))
    assert not te.graph.is_graph_capturing()
    assert te.FP8GlobalStateManager.get_autocast_state()[0] is False
    for state in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(
            model.layer.fp8_meta[state].scale, torch.ones_like(model.layer.fp8_meta[state].scale)
        )
    assert "forward" not in model.__dict__


def test_without_a_gpu_there_are_no_cuda_graphs(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="need a GPU"):
        te.make_graphed_callables(te.Linear(COLS, COLS, **CPU), (sample(),))


# Names, hooks, streams ------------------------------------------------------------------------------


def test_names_of_old_warn_and_win(graphs):
    recipe = Float8CurrentScaling()
    old = {
        "fp8_enabled": True,
        "fp8_calibrating": False,
        "fp8_recipe": recipe,
        "fp8_weight_caching": True,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphed = graphs.graphed(te.Linear(COLS, COLS, **CPU), (sample(),), **old)
    assert {str(w.message).split()[1] for w in caught} == set(old)
    assert all(w.category is DeprecationWarning for w in caught)
    with te.autocast(recipe=recipe):
        graphed(sample(), is_first_microbatch=True)
    for name, value in (*old.items(), ("fp8_group", object())):
        new = {
            "fp8_enabled": "enabled",
            "fp8_calibrating": "calibrating",
            "fp8_recipe": "recipe",
            "fp8_group": "amax_reduction_group",
            "fp8_weight_caching": "cache_quantized_params",
        }[name]
        with pytest.raises(ValueError, match=f"{name} is the deprecated name of {new}"):
            te.make_graphed_callables(
                te.Linear(COLS, COLS, **CPU), (sample(),), **{name: value, new: value}
            )


def test_hooks_beside_the_capture(graphs):
    calls = []
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    model = te.Linear(COLS, COLS, **CPU)
    hooks = {kind: {0: lambda module, kind=kind: calls.append((kind, module))} for kind in kinds}
    graphed = graphs.graphed(
        model,
        (sample(),),
        num_warmup_iters=2,
        pre_warmup_hook=lambda: calls.append("before"),
        post_warmup_hook=lambda: calls.append("behind"),
        capture_time_hooks=[hooks],
    )
    once = [(kind, model) for kind in kinds]
    assert calls == ["before", *once, *once, "behind", *once]
    graphed(sample()).sum().backward()
    assert len(calls) == 14
    returns = {"forward_hooks": {"a": lambda module: 1}}
    with pytest.raises(StateError, match="must return None, one of forward_hooks"):
        graphs.graphed(te.Linear(COLS, COLS, **CPU), (sample(),), capture_time_hooks=[returns])


@pytest.mark.slow
@needs_compile
def test_replays_stay_outside_of_compiled_code_whoever_is_imported_first(fresh):
    for lines in ("import torch._dynamo, te_fast.pytorch", "import te_fast.pytorch, torch._dynamo"):
        fresh(f"""
{lines}
te_fast.pytorch.make_graphed_callables
from te_fast.graphed.replay import GraphedCallable
assert getattr(GraphedCallable.__call__, "_torchdynamo_disable", False)
""")


@needs_compile
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_calls_replays_from_outside(graphs, recipe):
    eager = te.Linear(COLS, COLS, **CPU)
    graphed = captured(graphs, recipe, copy.deepcopy(eager))
    run = torch.compile(lambda model, x: torch.relu(model(2 * x)), backend="eager")
    for _ in range(2):
        x, dy = sample(), torch.randn(ROWS, COLS)
        results = []
        for model in (lambda model, x: torch.relu(model(2 * x)), eager), (run, graphed):
            with te.autocast(recipe=recipe):
                y = model[0](model[1], x)
            y.backward(dy)
            results.append(y)
        assert_same(*results)
        assert_stepped_alike(eager, graphed)
    whole = torch.compile(lambda x: graphed(x), backend="eager", fullgraph=True)
    with (
        te.autocast(recipe=recipe),
        pytest.raises(torch._dynamo.exc.Unsupported, match="replays graphs"),
    ):
        whole(sample())


def test_a_stream_of_the_callers(graphs, monkeypatch):
    """The current stream waits for the caller's stream or an event on that stream; equal streams do not wait."""
    notes = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            notes.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            notes.append(f"{self.name} waits for {event}")

    current, other = Stream("current"), Stream("other")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    eager = te.Linear(COLS, COLS, **CPU)
    graphed = captured(graphs, None, copy.deepcopy(eager))
    for stream, event, expected in (
        (current, None, []),
        (other, None, ["other waits for current", "current waits for other"]),
        (other, "event", ["other waits for current", "current waits for event"]),
    ):
        notes.clear()
        x = sample()
        y = graphed(x, cuda_graph_stream=stream, cuda_graph_event=event)
        assert torch.equal(y, eager(x))
        y.sum().backward()
        assert notes == 2 * expected


def test_errors_are_those_of_transformer_engine(graphs):
    """Code that is written for Transformer Engine catches these classes."""
    layer = te.Linear(COLS, COLS, **CPU)
    with pytest.raises(TypeError):
        te.make_graphed_callables(torch.relu, (sample(),))
    with pytest.raises(ValueError, match="_order"):
        te.make_graphed_callables((layer,), [(sample(),)], _order=[1])
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError):
        te.make_graphed_callables(layer, (sample(),))
    with pytest.raises(TeFastError):
        te.make_graphed_callables(layer, (sample(),))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sample_kwargs": 3}, "sample_kwargs must be a list or tuple, got a int"),
        ({"capture_time_hooks": [3]}, "entries of capture_time_hooks must be dicts"),
        ({"capture_time_hooks": {"forward_hooks": {}}}, "must be a list .*, got a dict"),
        ({"capture_time_hooks": [{"forward_hooks": [print]}]}, "forward_hooks of .* dict of fun"),
        ({"pre_warmup_hook": 3}, "pre_warmup_hook must be a function"),
        ({"post_warmup_hook": 3}, "post_warmup_hook must be a function"),
        ({"_order": "abc"}, "_order must be a list or tuple, got a str"),
        ({"_order": [1, None]}, "_order has None, a NoneType"),
        ({"amax_reduction_group": "x"}, "amax_reduction_group must be a torch.distributed"),
        ({"recipe": "delayed", "enabled": False}, "recipe must be an object of a class"),
    ],
)
def test_arguments_of_other_classes_are_errors(graphs, options, match):
    with pytest.raises(DtypeError, match=match):
        graphs.graphed((te.Linear(COLS, COLS, **CPU),), ((sample(),),), **options)


# FP8 weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caches", [False, True])
def test_weights_that_are_quantised_tensors(graphs, recipe, caches):
    """Graphs read the quantised weights in place, so that a replay sees what an optimizer has written."""
    with te.quantized_model_init(recipe=recipe):
        eager = te.LayerNormMLP(COLS, 64, **CPU)
    model = copy.deepcopy(eager)
    graphed = graphs.graphed(
        model, (sample(),), cache_quantized_params=caches, **quantising(recipe)
    )
    for first in (True, False, True):
        keywords = {"is_first_microbatch": first} if caches else {}
        x, dy = sample(), torch.randn(ROWS, COLS)
        results = []
        for layer in (eager, graphed):
            with te.autocast(recipe=recipe):
                y = layer(x, **keywords)
            y.backward(dy)
            results.append(y)
        assert_same(*results)
        assert_stepped_alike(eager, model)
        for one, other in zip(eager.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_column_layouts_that_the_warm_up_makes(graphs):
    """Megatron-LM captures before its optimizer has made the column layouts."""
    recipe = Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        model = te.Linear(COLS, COLS, **CPU)
    eager = copy.deepcopy(model)
    model.weight.update_usage(columnwise_usage=False)
    assert not model.weight._value.col_is_valid
    graphed = captured(graphs, recipe, model)
    x, dy = sample(), torch.randn(ROWS, COLS)
    for _ in range(2):
        results = []
        for layer in (eager, graphed):
            with te.autocast(recipe=recipe):
                y = layer(x)
            y.backward(dy)
            results.append(y)
        assert_same(*results)


def test_a_weight_whose_bytes_are_elsewhere_raises(graphs):
    recipe = Float8CurrentScaling()
    exchanges = {
        "data": lambda weight: setattr(weight, "data", torch.randn(COLS, COLS)),
        "bytes": lambda weight: setattr(weight, "_data", weight._data.clone()),
        "columns": lambda weight: weight._data.add_(0),
    }
    for exchange in exchanges.values():
        with te.quantized_model_init(recipe=recipe):
            model = te.Linear(COLS, COLS, **CPU)
        graphed = captured(graphs, recipe, model)
        x = sample()
        with te.autocast(recipe=recipe):
            graphed(x)
            exchange(model.weight)
            with pytest.raises(StateError, match="parameter weight was replaced or moved"):
                graphed(x)


def test_layers_with_recipes_of_their_own(graphs):
    """A graph holds what the factory gave to each layer at the capture; scales of delayed scaling would not follow."""

    def factory(role):
        if role is not None and role.name == "head":
            return te.IdentityQuantizer()
        return quantizer_factories.current_scaling_factory(role)

    recipe = CustomRecipe(qfactory=factory)
    torch.manual_seed(3)
    names = ("body", "head")
    eager = torch.nn.Sequential(*[te.Linear(COLS, COLS, name=name, **CPU) for name in names])
    graphed = graphs.graphed(copy.deepcopy(eager), (sample(),), **quantising(recipe))
    for _ in range(3):
        both((eager, graphed), recipe, sample(), torch.randn(ROWS, COLS))
        assert_stepped_alike(eager, graphed)
    delayed = CustomRecipe(qfactory=quantizer_factories.delayed_scaling_factory)
    with pytest.raises(UnsupportedError, match="delayed scaling to body"):
        te.make_graphed_callables(copy.deepcopy(eager), (sample(),), **quantising(delayed))
