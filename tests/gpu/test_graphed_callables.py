"""``make_graphed_callables`` on a GPU: bit for bit as eager calls, in its memory, random numbers and streams."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import te_fast.pytorch as te
from graphed import (
    ORDERS,
    assert_pipelines_alike,
    assert_same,
    assert_stepped_alike,
    both,
    quantising,
)
from graphs import region
from recipes import RECIPES
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.errors import StateError
from te_fast.runtime import weak_tensors

pytestmark = [
    pytest.mark.gpu,
    # torch's own warning about the first product on one of autograd's threads.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA"),
]

ROWS, COLS = 64, 256
OPTIONS = {"params_dtype": torch.bfloat16, "device": "cuda"}
OPS = {"dtype": torch.bfloat16, "device": "cuda"}
MODELS = {
    "Linear": lambda: te.Linear(COLS, COLS, **OPTIONS),
    "LayerNormLinear": lambda: te.LayerNormLinear(COLS, COLS, normalization="RMSNorm", **OPTIONS),
    "LayerNormMLP": lambda: te.LayerNormMLP(COLS, 512, activation="swiglu", **OPTIONS),
    "recomputed": lambda: te.LayerNormMLP(COLS, 512, checkpoint=True, **OPTIONS),
    "Sequential": lambda: te.ops.Sequential(
        te.ops.RMSNorm(COLS, **OPS),
        te.ops.Linear(COLS, 512, **OPS),
        te.ops.GELU(),
        te.ops.Linear(512, COLS, **OPS),
    ),
}


@pytest.fixture(autouse=True)
def _reset():
    te.FP8GlobalStateManager.reset()
    yield
    te.FP8GlobalStateManager.reset()


def sample(rows=ROWS, *, grad=True):
    return torch.randn(rows, COLS, dtype=torch.bfloat16, device="cuda", requires_grad=grad)


def losses():
    return torch.randn(ROWS, COLS, dtype=torch.bfloat16, device="cuda")


class Block(torch.nn.Module):
    """A block with dropout in place of attention: two layers, a residual, a mask."""

    def __init__(self):
        super().__init__()
        self.first = te.LayerNormLinear(COLS, COLS, **OPTIONS)
        self.second = te.LayerNormMLP(COLS, 512, **OPTIONS)
        self.dropout = torch.nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), device="cuda"))

    def forward(self, x, mask=None, *, scale=1.0):
        self.calls += 1
        y = x + self.dropout(self.first(x))
        if mask is not None:
            y = torch.where(mask, y, 0)
        return scale * (y + self.second(y)), {"mean": y.float().mean(1), "none": None}


@pytest.mark.parametrize("kind", [None, *RECIPES])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_graphed_model_trains_as_an_eager_one(make, kind):
    recipe = None if kind is None else RECIPES[kind]()
    eager = make()
    model = copy.deepcopy(eager)
    graphed = te.make_graphed_callables(model, (sample(),), **quantising(recipe))
    for _ in range(6):
        both((eager, graphed), recipe, sample(), losses())
        assert_stepped_alike(eager, graphed)


@pytest.mark.parametrize("kind", RECIPES)
def test_blocks_with_dropout_keywords_and_buffers(kind):
    recipe = RECIPES[kind]()
    eager = Block()
    model = copy.deepcopy(eager)
    mask, x = torch.rand(ROWS, 1, device="cuda") > 0.5, sample()
    state = torch.cuda.get_rng_state()
    graphed = te.make_graphed_callables(
        model, (x,), sample_kwargs={"mask": mask, "scale": 2.0}, **quantising(recipe)
    )
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert model.calls == 0
    for _ in range(4):
        mask = torch.rand(ROWS, 1, device="cuda") > 0.5
        both((eager, graphed), recipe, sample(), losses(), mask=mask, scale=2.0)
        assert_stepped_alike(eager, graphed)
        assert model.calls == eager.calls
    with region(recipe):
        one, two = (graphed(sample(), mask=mask, scale=2.0)[0].clone() for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("reuse", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("kind", [None, *RECIPES])
@pytest.mark.parametrize(("order", "chunks"), ORDERS.values(), ids=ORDERS)
def test_microbatches_in_the_order_of_a_pipeline(order, chunks, kind, reuse):
    recipe = None if kind is None else RECIPES[kind]()
    layers, microbatches = 2, len(order) // chunks // 2
    eager = torch.nn.ModuleList(
        [te.LayerNormMLP(COLS, 512, **OPTIONS) for _ in range(layers * chunks)]
    )
    model = copy.deepcopy(eager)
    graphed = te.make_graphed_callables(
        tuple(model),
        [(sample(),) for _ in range(layers * chunks * microbatches)],
        _order=order,
        _num_layers_per_chunk=layers,
        _reuse_graph_input_output_buffers=reuse,
        **quantising(recipe),
    )
    shape = chunks, microbatches, ROWS, COLS
    for _ in range(3):
        inputs, grads = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        assert_pipelines_alike(order, layers, (eager, model, graphed), recipe, inputs, grads)


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("kind", [None, *RECIPES])
def test_delayed_weight_gradients(kind, fuse):
    recipe = None if kind is None else RECIPES[kind]()
    eager = te.LayerNormMLP(
        COLS, 512, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse, **OPTIONS
    )
    model = copy.deepcopy(eager)
    for one in (eager, model) if fuse else ():
        for p in one.parameters():
            p.main_grad = torch.ones_like(p, dtype=torch.float32)
            p.grad_added_to_main_grad = False
    graphed = te.make_graphed_callables(model, (sample(),), **quantising(recipe))
    for _ in range(3):
        both((eager, graphed), recipe, sample(), losses())
        for one in (eager, graphed):
            one.backward_dw()
        for one, two in zip(eager.parameters(), model.parameters(), strict=True):
            if fuse:
                assert torch.equal(one.main_grad, two.main_grad)
                assert one.grad_added_to_main_grad == two.grad_added_to_main_grad
            else:
                assert torch.equal(one.grad, two.grad)
                one.grad = two.grad = None


def test_weight_gradients_of_microbatches_in_flight():
    recipe = Float8CurrentScaling()
    eager = te.Linear(COLS, COLS, delay_wgrad_compute=True, **OPTIONS)
    model = copy.deepcopy(eager)
    runs = te.make_graphed_callables(
        (model,),
        [(sample(),), (sample(),)],
        _order=[1, 1, -1, -1.5, -1, -1.5],
        _num_layers_per_chunk=[1],
        _reuse_graph_input_output_buffers=True,
        **quantising(recipe),
    )
    for _ in range(2):
        inputs, grads = [sample(grad=False) for _ in range(2)], [losses() for _ in range(2)]
        for callables in ((eager, eager), runs):
            with te.autocast(recipe=recipe):
                outputs = [run(x) for run, x in zip(callables, inputs, strict=True)]
            for run, y, dy in zip(callables, outputs, grads, strict=True):
                y.backward(dy)
                run.backward_dw()
        assert_stepped_alike(eager, model)


@pytest.mark.parametrize("kind", RECIPES)
def test_weights_are_quantised_where_the_call_says_so(kind):
    recipe = RECIPES[kind]()
    eager = te.LayerNormMLP(COLS, 512, **OPTIONS)
    model = copy.deepcopy(eager)
    graphed = te.make_graphed_callables(
        model, (sample(),), cache_quantized_params=True, **quantising(recipe)
    )
    for _ in range(3):
        for first in (True, False, False):
            both((eager, graphed), recipe, sample(), losses(), is_first_microbatch=first)
        assert_stepped_alike(eager, model)
    x = sample()
    with torch.no_grad(), te.autocast(recipe=recipe):
        before = graphed(x, is_first_microbatch=False).clone()
        model.fc1_weight.mul_(-2)
        assert torch.equal(graphed(x, is_first_microbatch=False), before)
        assert not torch.equal(graphed(x, is_first_microbatch=True), before)


@pytest.mark.parametrize("kind", RECIPES)
def test_graphed_and_eager_layers_in_one_region(kind):
    recipe = RECIPES[kind]()
    eager = torch.nn.ModuleList([te.Linear(COLS, COLS, **OPTIONS) for _ in range(2)])
    mixed = copy.deepcopy(eager)
    te.make_graphed_callables(mixed[0], (sample(),), **quantising(recipe))
    for order in ((0, 1), (1, 0)):
        for _ in range(2):
            x, dy = sample(), losses()
            for model in (eager, mixed):
                with region(recipe):
                    y = model[order[1]](model[order[0]](x))
                y.backward(dy)
            assert_stepped_alike(eager, mixed)


def test_evaluation():
    recipe = DelayedScaling()
    eager = te.LayerNormMLP(COLS, 512, **OPTIONS).eval()
    graphed = te.make_graphed_callables(
        copy.deepcopy(eager), (sample(grad=False),), **quantising(recipe)
    )
    with torch.no_grad():
        for _ in range(3):
            both((eager, graphed), recipe, sample(grad=False))
    with torch.inference_mode():
        both((eager, graphed), recipe, sample(grad=False))


def test_replays_launch_nothing_of_the_hosts():
    recipe = DelayedScaling()
    graphed = te.make_graphed_callables(
        te.LayerNormMLP(COLS, 512, **OPTIONS), (sample(),), **quantising(recipe)
    )
    x = sample(grad=False)
    with te.autocast(recipe=recipe), torch.no_grad():
        graphed(x)
        before = dispatch.counters()
        for _ in range(5):
            graphed(x)
        after = dispatch.counters()
    assert after["launches"] == before["launches"]
    assert after["gemms"] == before["gemms"]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", RECIPES)
def test_a_checkpoint_within(kind, use_reentrant):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = te.LayerNormMLP(COLS, 512, **OPTIONS)

        def forward(self, x):
            return te.checkpoint(
                self.layer, x, use_reentrant=use_reentrant, preserve_rng_state=False
            )

    recipe = RECIPES[kind]()
    eager = Checkpointed()
    graphed = te.make_graphed_callables(copy.deepcopy(eager), (sample(),), **quantising(recipe))
    for _ in range(4):
        both((eager, graphed), recipe, sample(), losses())
        assert_stepped_alike(eager, graphed)


# Memory, random numbers, streams --------------------------------------------------------------------


def test_captures_may_share_a_pool():
    recipe, pool = Float8CurrentScaling(), torch.cuda.graph_pool_handle()
    eager = torch.nn.ModuleList([te.LayerNormMLP(COLS, 512, **OPTIONS) for _ in range(2)])
    model = copy.deepcopy(eager)
    for layer in model:
        te.make_graphed_callables(layer, (sample(),), pool=pool, **quantising(recipe))
    for _ in range(3):
        for one, two in zip(eager, model, strict=True):
            both((one, two), recipe, sample(), losses())
        assert_stepped_alike(eager, model)
    # The second was captured after the first had ended: if both are in flight, they overwrite each other.
    with te.autocast(recipe=recipe):
        y, z = model[0](sample()), model[1](sample())
    z.sum().backward()
    with pytest.raises(StateError, match="was overwritten"):
        y.sum().backward()


def memory_of(**options):
    """Bytes that a pipeline of many microbatches takes, one after another."""
    layers = tuple(te.LayerNormMLP(COLS, 512, **OPTIONS) for _ in range(2))
    count = 8
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    samples = [(sample(8192),) for _ in range(2 * count)]
    graphed = te.make_graphed_callables(
        layers, samples, _order=[1, -1] * count, _num_layers_per_chunk=2, **options
    )
    del samples
    gc.collect()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved() - before
    for one in graphed:
        one.reset()
    del graphed, one
    gc.collect()
    torch.cuda.empty_cache()
    return taken, torch.cuda.memory_reserved() - before


def test_shared_buffers_take_less_and_a_reset_frees_all():
    own, left = memory_of()
    shared, left_of_shared = memory_of(_reuse_graph_input_output_buffers=True)
    assert shared < 0.6 * own
    assert max(left, left_of_shared) < own / 4


def test_reset_gives_the_module_back():
    recipe = DelayedScaling()
    eager = te.LayerNormMLP(COLS, 512, **OPTIONS)
    model = copy.deepcopy(eager)
    graphed = te.make_graphed_callables(model, (sample(),), **quantising(recipe))
    both((eager, graphed), recipe, sample(), losses())
    graphed.reset()
    gc.collect()
    assert_stepped_alike(eager, model)
    both((eager, model), recipe, sample(), losses())
    assert_stepped_alike(eager, model)


def test_weak_tensors_do_not_keep_memory():
    tensor = torch.arange(1 << 20, device="cuda", dtype=torch.float32).view(1024, 1024)[:, 1:]
    alias = te.utils.make_weak_ref(tensor)
    assert torch.equal(alias, tensor)
    assert (alias.data_ptr(), alias.stride(), alias.dtype) == (
        tensor.data_ptr(),
        tensor.stride(),
        tensor.dtype,
    )
    before = torch.cuda.memory_allocated()
    del tensor
    assert torch.cuda.memory_allocated() < before
    assert weak_tensors.make_weak_ref(torch.ones(1)).device.type == "cpu"


def test_graphs_advance_the_states_of_trackers():
    former = te.distributed.get_all_rng_states()
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1234)

    class Drops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = te.Linear(COLS, COLS, **OPTIONS)

        def forward(self, x):
            with tracker.fork():
                y = torch.nn.functional.dropout(self.layer(x), 0.5)
            return torch.nn.functional.dropout(y, 0.5)

    eager = Drops()
    graphed = te.make_graphed_callables(copy.deepcopy(eager), (sample(),))
    x, results = sample(), []
    for model in (eager, graphed):
        torch.manual_seed(5)
        tracker.reset()
        state = next(iter(te.distributed.get_all_rng_states().values()))
        state.manual_seed(99)
        tracker.set_states({"model-parallel-rng": state})
        results.append([model(x).clone() for _ in range(3)])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(results[1][0], results[1][1])
    te.distributed.set_all_rng_states(former)


@pytest.mark.parametrize("with_event", [False, True])
def test_replays_on_a_stream_of_the_callers(with_event):
    recipe = DelayedScaling()
    eager = te.LayerNormMLP(COLS, 512, **OPTIONS)
    graphed = te.make_graphed_callables(copy.deepcopy(eager), (sample(),), **quantising(recipe))
    stream = torch.cuda.Stream()
    keywords = {"cuda_graph_stream": stream}
    for _ in range(3):
        x, dy, results = sample(), losses(), []
        for model, options in ((eager, {}), (graphed, keywords)):
            given = x.detach().clone().requires_grad_()
            with te.autocast(recipe=recipe):
                y = model(given, **options)
            y.backward(dy)
            results.append([y, given.grad])
        assert_same(*results)
        assert_stepped_alike(eager, graphed)
    if with_event:
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            event.record()
        # With gradients: without them, the eager chain hands FP8 on between its products, and the graph does not.
        with te.autocast(recipe=recipe):
            y = graphed(x, **keywords, cuda_graph_event=event)
            torch.cuda.synchronize()
            assert torch.equal(y, eager(x))


# Refusals -------------------------------------------------------------------------------------------


def test_replays_that_would_be_wrong_are_errors():
    recipe = DelayedScaling()
    graphed = te.make_graphed_callables(
        te.Linear(COLS, COLS, **OPTIONS), (sample(),), **quantising(recipe)
    )
    with (
        te.autocast(recipe=Float8CurrentScaling()),
        pytest.raises(StateError, match="called under"),
    ):
        graphed(sample())
    with te.autocast(recipe=recipe):
        first, _ = graphed(sample()), graphed(sample())
        with pytest.raises(StateError, match="was overwritten"):
            first.sum().backward()
        graphed.weight = torch.nn.Parameter(graphed.weight.detach().clone())
        with pytest.raises(StateError, match="was replaced or moved"):
            graphed(sample())
