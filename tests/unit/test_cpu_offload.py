"""Saved tensors in the host's memory: gradients do not change, and few layers have tensors on the device.

Here the device is the CPU itself: copies are made at once, and released memory is free at once.
"""

import contextlib
import gc
import weakref

import pytest
import torch

import te_fast.pytorch as te
from selection import sampled
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import ArgumentError, StateError
from te_fast.offload import kept

RECIPES = [None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(kept, "DEVICES", ("cpu",))
    monkeypatch.setattr(kept, "SMALLEST", 256)


@pytest.fixture
def copies(monkeypatch):
    """Counts copies out and back."""
    counted = {"out": 0, "back": 0}
    for name, key in (("start_offload", "out"), ("start_reload", "back")):
        former = getattr(kept.Kept, name)

        def counting(self, *args, former=former, key=key):
            before = self._on_host, self._on_device
            former(self, *args)
            counted[key] += (self._on_host, self._on_device) != before

        monkeypatch.setattr(kept.Kept, name, counting)
    return counted


def layers_of(count):
    generator = torch.Generator().manual_seed(5)
    layers = []
    for number in range(count):
        make = te.LayerNormLinear if number % 2 else te.Linear
        layer = make(32, 32, device="cpu", params_dtype=torch.float32)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(32, 32, generator=generator) / 6)
        layers.append(layer)
    return layers


def gradients(recipe, context=None, synchronize=None, layers=None, between=None, passes=1):
    layers = layers_of(4) if layers is None else layers
    inputs = [torch.randn(16, 32).requires_grad_() for _ in range(passes)]
    results = []
    for x in inputs:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            for layer in layers:
                if context is None:
                    x = torch.tanh(layer(x))
                    continue
                with context:
                    x = torch.tanh(layer(x))
                x = synchronize(x)
        results.append(x)
        if between is not None:
            between()
    for y in results:
        y.square().sum().backward()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return [leaf.grad for leaf in (*inputs, *parameters)]


def assert_same(got, wanted):
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("recipe", "count", "passes", "retain"),
    sampled(RECIPES, [0, 1, 2], [1, 2], [False, True]),
    ids=lambda value: None if isinstance(value, int) else type(value).__name__,
)
def test_gradients_are_those_without(recipe, count, passes, retain, copies):
    torch.manual_seed(1)
    wanted = gradients(recipe, passes=passes)
    torch.manual_seed(1)
    context, synchronize = te.get_cpu_offload_context(
        True, count, 4, retain_pinned_cpu_buffers=retain
    )
    got = gradients(recipe, context, synchronize, passes=passes)
    assert_same(got, wanted)
    assert copies["out"] >= count * passes
    assert copies["back"] == copies["out"]


@pytest.mark.slow
def test_few_layers_lie_on_the_device(monkeypatch):
    """Of four layers two are offloaded: layer 0 is gone when layer 2 begins, and back when layer 2's backward ends."""
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number):
            saved = x.detach().clone()
            alive[number] = weakref.ref(saved)
            ctx.save_for_backward(saved)
            ctx.number = number
            seen.append(("forward", number, on_device()))
            return x * x

        @staticmethod
        def backward(ctx, grad):
            seen.append(("backward", ctx.number, on_device()))
            (saved,) = ctx.saved_tensors
            return 2 * saved * grad, None

    alive = {}
    context, synchronize = te.get_cpu_offload_context(True, 2, 4)

    def on_device():
        gc.collect()
        passes = context._synchronizer._now
        return [
            number
            for number, layer in enumerate(passes.layers[:2])
            if any(each._on_device is not None for each in layer.kept.values())
        ]

    x = start = torch.full((256,), 1.1, dtype=torch.float64).requires_grad_()
    for number in range(4):
        with context:
            x = Square.apply(x, number)
        x = synchronize(x)
    x.sum().backward()
    assert torch.allclose(start.grad, 16 * start.detach() ** 15)
    assert seen == [
        ("forward", 0, []),
        ("forward", 1, [0]),
        ("forward", 2, [1]),
        ("forward", 3, []),
        ("backward", 3, []),
        ("backward", 2, [1]),
        ("backward", 1, [0, 1]),
        ("backward", 0, [0]),
    ]
    # No tensor of the offloaded layers is left on the device.
    assert on_device() == []


def test_a_graph_that_is_kept_is_run_again(copies):
    layers = layers_of(3)
    context, synchronize = te.get_cpu_offload_context(True, 1, 3)
    x = torch.randn(16, 32)
    for layer in layers:
        with context:
            x = layer(x)
        x = synchronize(x)
    loss = x.sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for layer in layers for parameter in layer.parameters()]
    loss.backward()
    again = [parameter.grad for layer in layers for parameter in layer.parameters()]
    assert_same(again, [2 * grad for grad in first])
    assert copies["back"] == 2 * copies["out"] > 0


class Streams(kept.Stream):
    """Copies that are never waited for unless somebody asks, on a stream that is named."""

    def __init__(self):
        self.waits = []

    def copy(self, target, source):
        target.copy_(source)
        return "copy"

    def current(self):
        return "compute"

    def wait(self, event, stream=None):
        self.waits.append((event, stream))


@pytest.mark.parametrize("is_read", [False, True])
def test_memory_that_is_still_written_is_freed_behind_the_copy(is_read):
    """As after an error in a backward that has begun to copy back."""
    streams = Streams()
    memory = kept.Kept(torch.zeros(1024), streams)
    memory.watch(torch.zeros(1024))
    assert memory.start_offload()
    memory.release()
    memory.start_reload()
    if is_read:
        memory.get()
    streams.waits.clear()
    del memory
    assert streams.waits == ([] if is_read else [("copy", "compute")])


@pytest.mark.parametrize("way", ["release", "drop"])
def test_memory_that_is_let_go_during_the_copy_back_is_freed_behind_it(way):
    """As by `release_activation_forward_gpu_memory` after `start_reload_layer`, or on another stream."""
    streams = Streams()
    memory = kept.Kept(torch.arange(1024.0), streams)
    memory.watch(torch.zeros(1024))
    assert memory.start_offload()
    memory.release()
    memory.start_reload()
    streams.waits.clear()
    if way == "drop":
        streams.current = lambda: "another"
    getattr(memory, way)()
    assert ("copy", "compute") in streams.waits
    assert memory._on_device is None
    streams.waits.clear()
    assert torch.equal(memory.get().view(torch.float32), torch.arange(1024.0))  # copied once more
    assert streams.waits == [("copy", None)]
    streams.waits.clear()
    del memory  # nothing is written any more
    assert streams.waits == []


def test_a_tensor_that_is_saved_twice_is_copied_once(copies):
    context, synchronize = te.get_cpu_offload_context(True, 1, 3)
    weight, x = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
    with context:
        y = x @ weight + x @ (weight * 2) + (x * 2) @ weight
    synchronize(y)
    assert copies["out"] == 2  # x and x * 2


def test_tensors_that_share_memory_are_copied_together(copies):
    """As queries, keys and values of one product, and as an output in several shapes."""
    torch.manual_seed(3)
    whole, leaves = (
        torch.randn(16, 3, 32),
        [torch.ones(16, 32, requires_grad=True) for _ in range(4)],
    )
    parts = [*whole.unbind(1), whole.view(-1)[: 16 * 32].view(16, 32)]
    context, synchronize = te.get_cpu_offload_context(True, 1, 3)
    with context:
        y = sum(leaf * part for leaf, part in zip(leaves, parts, strict=True))
    (memory,) = context._synchronizer._now.layers[0].kept.values()
    wanted = [part.clone() for part in parts]
    synchronize(y)
    assert copies["out"] == 1
    assert memory.on_host.numel() == whole.numel() * 4
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == whole.nbytes / 2**20
    memory.release()
    whole.zero_()
    y.sum().backward()
    assert copies["back"] == 1
    assert_same([leaf.grad for leaf in leaves], wanted)


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(backward_override="high_precision")])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_weights_of_parts_stay(kind, recipe):
    context, _ = te.get_cpu_offload_context(True, 1, 3)
    options = {"bias": False, "device": "cpu"}
    if kind == "GroupedLinear":
        layer, extras = te.GroupedLinear(3, 64, 96, **options), ([8, 0, 8],)
    else:
        layer, extras = getattr(te, kind)(64, 96, parameters_split=("q", "k", "v"), **options), ()
    with context, te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(torch.ones(16, 64, requires_grad=True), *extras)
    kept = context._synchronizer._now.layers[0].kept.values()
    assert all(one.on_host is None or one.on_host.nbytes < 96 * 64 * 4 for one in kept)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_small_part_that_is_saved_first_leaves_with_the_others(copies):
    whole, leaves = (
        torch.randn(8, 16, 32),
        [torch.ones(n, 16, 32, requires_grad=True) for n in (1, 7)],
    )
    context, synchronize = te.get_cpu_offload_context(True, 1, 3)
    with context:
        y = (leaves[0] * whole[:1]).sum() + (leaves[1] * whole[1:]).sum()
    synchronize(y)
    assert copies["out"] == 1
    (memory,) = context._synchronizer._now.layers[0].kept.values()
    memory.release()
    y.backward()
    assert_same([leaf.grad for leaf in leaves], [whole[:1], whole[1:]])


def test_a_write_after_the_copy_is_not_read():
    context, synchronize, controller = te.get_cpu_offload_context(
        True, model_layers=1, manual_synchronization=True
    )
    given, leaf = torch.randn(32, 64), torch.ones(32, 64, requires_grad=True)
    wanted = given.clone()
    with context:
        y = leaf * given
    synchronize(y)
    controller.start_offload_layer(0)
    given.add_(1)
    y.sum().backward()
    assert torch.equal(leaf.grad, wanted)


def test_a_second_offload_of_a_layer_shares_no_buffer(copies):
    context, synchronize, controller = te.get_cpu_offload_context(
        True, model_layers=1, manual_synchronization=True, retain_pinned_cpu_buffers=True
    )
    for _ in range(2):
        given = [torch.randn(16, 32) for _ in range(2)]
        leaves = [torch.ones(16, 32, requires_grad=True) for _ in range(2)]
        with context:
            products = [leaf * each for leaf, each in zip(leaves, given, strict=True)]
            y = products[1] * 1.0
        synchronize(y)
        controller.start_offload_layer(0)
        if _ == 0:
            del products[0]  # the first of the saved tensors
            controller.start_offload_layer(0)
        controller.release_activation_forward_gpu_memory(0)
        for product in products:
            product.sum().backward()
        for leaf, each in list(zip(leaves, given, strict=True))[1 - _ :]:
            assert torch.equal(leaf.grad, each)


def test_a_small_part_of_memory_stays(copies):
    whole, leaf = torch.randn(8, 16, 32), torch.ones(16, 32, requires_grad=True)
    context, _ = te.get_cpu_offload_context(True, 1, 3)
    with context:
        y = leaf * whole[3]
    assert copies["out"] == 0
    y.sum().backward()
    assert torch.equal(leaf.grad, whole[3])


@pytest.mark.parametrize("kind", ["parameter", "view", "small", "marked", "overlapping"])
def test_what_stays(kind, copies):
    context, _ = te.get_cpu_offload_context(True, 1, 3)
    given = {
        "parameter": lambda: torch.nn.Parameter(torch.ones(32, 32), requires_grad=False),
        "view": lambda: torch.nn.Parameter(torch.ones(32, 32), requires_grad=False).t(),
        "small": lambda: torch.ones(15, 17),
        "marked": lambda: torch.ones(32, 32),
        "overlapping": lambda: torch.ones(1, 32).expand(32, 32),
    }[kind]()
    if kind == "marked":
        te.mark_not_offload(given, None)
    with context:
        y = torch.ones_like(given).requires_grad_() * given
    assert copies["out"] == 0
    y.sum().backward()


def test_strides_come_back():
    context, synchronize = te.get_cpu_offload_context(True, 1, 3)
    given, leaf = torch.randn(32, 64).t(), torch.ones(64, 32, requires_grad=True)
    with context:
        y = leaf * given
        saved = context._synchronizer.push(given)
    (memory,) = context._synchronizer._now.layers[0].kept.values()
    synchronize(y)
    memory.release()
    assert saved.get().stride() == given.stride()
    assert torch.equal(saved.get(), given)
    y.sum().backward()
    assert torch.equal(leaf.grad, given)


def test_a_write_in_place_is_seen():
    context, synchronize = te.get_cpu_offload_context(True, 1, 3)
    given, leaf = torch.randn(32, 64), torch.ones(32, 64, requires_grad=True)
    with context:
        y = leaf * given
        given.add_(1)
    synchronize(y)
    with pytest.raises(StateError, match="modified in place"):
        y.sum().backward()


def test_by_hand(copies):
    torch.manual_seed(1)
    wanted = gradients(None)
    torch.manual_seed(1)
    context, synchronize, controller = te.get_cpu_offload_context(
        True, model_layers=4, manual_synchronization=True
    )
    assert isinstance(controller, te.ManualOffloadSynchronizer)

    def between():
        assert copies == {"out": 0, "back": 0}
        controller.start_offload_layer(0)
        controller.start_offload_layer(2)
        for layer in (0, 1, 2):
            controller.release_activation_forward_gpu_memory(layer)
        assert copies["out"] > 0
        controller.start_reload_layer(2)

    assert_same(gradients(None, context, synchronize, between=between), wanted)
    assert copies["back"] == copies["out"]
    with pytest.raises(ArgumentError, match="from 0 to 3, got 4"):
        controller.start_offload_layer(4)


def test_buffers_that_are_kept(monkeypatch):
    context, synchronize = te.get_cpu_offload_context(True, 1, 4, retain_pinned_cpu_buffers=True)
    layers, addresses = layers_of(4), []
    for _ in range(3):
        gradients(Float8CurrentScaling(), context, synchronize, layers)
        held = context._synchronizer._buffers[0]
        addresses.append([buffer.data_ptr() for buffer in held.values()])
    assert addresses[0] == addresses[1] == addresses[2] != []


def test_nothing_to_do():
    old = {"enabled": True, "offload_activations": False, "offload_weights": True}
    for options in ({}, old):
        for manual in (False, True):
            warns = pytest.warns(DeprecationWarning, match="offload_weights")
            with warns if options else contextlib.nullcontext():
                context, function, *rest = te.get_cpu_offload_context(
                    manual_synchronization=manual, **options
                )
            assert rest == [None] * manual
            with context:
                x = torch.ones(2)
            assert function(x) is x


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_layers": 3, "model_layers": 3}, "num_layers must be below model_layers = 3, got 3"),
        ({"offload_activations": False}, "nothing is to be offloaded"),
        ({"num_layers": 1, "model_layers": 3, "offload_stream": 1}, "manual_synchronization"),
    ],
)
def test_bad_arguments(options, match):
    with pytest.raises(ArgumentError, match=match):
        te.get_cpu_offload_context(True, **options)


def test_calls_out_of_order():
    context, synchronize = te.get_cpu_offload_context(True, 1, 3)
    x = torch.ones(32, 32, requires_grad=True)
    with pytest.raises(StateError, match="outside of the context"):
        synchronize(x)
    with context:
        y = x * 2
        with pytest.raises(StateError, match="outside of the context"):
            synchronize(y)
        with pytest.raises(StateError, match="has not been left"):
            context.__enter__()
    with pytest.raises(ArgumentError, match="gradient function"):
        synchronize(x)
    with pytest.warns(UserWarning, match="no copy runs beside"):
        te.get_cpu_offload_context(True, 2, 3)


_seen = []


class _Times(torch.autograd.Function):
    """A product that saves its second factor, as users' functions do."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x * factor.dequantize()

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        _seen.append(factor)
        return grad * factor.dequantize(), None


QUANTIZERS = {
    "current": lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu"),
    "blocks": lambda: te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
}


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_bytes_of_a_quantised_tensor_are_copied(kind, copies):
    _seen.clear()
    context, synchronize = te.get_cpu_offload_context(True, 1, 3)
    factor = QUANTIZERS[kind]()(torch.randn(32, 64, generator=torch.Generator().manual_seed(7)))
    x = torch.ones(32, 64, requires_grad=True)
    with context:
        y = _Times.apply(x, factor)
    synchronize(y)
    assert copies["out"] == 2  # both layouts; the scales are too small
    kept = list(context._synchronizer._now.layers[0].kept.values())
    for one in kept:
        one.release()
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, 2 * factor.dequantize())
    assert [type(one) for one in _seen] == [type(factor)] * 2
    assert all(one.get_usages() == factor.get_usages() for one in _seen)
    assert factor._quantizer is not None
    assert torch.equal(_seen[0].dequantize(), factor.dequantize())


@pytest.mark.parametrize("kind", ["marked", "parameter"])
def test_quantised_tensors_that_stay(kind, copies):
    context, _ = te.get_cpu_offload_context(True, 1, 3)
    factor = QUANTIZERS["current"]()(torch.ones(32, 64))
    if kind == "marked":
        te.mark_not_offload(factor)
    else:
        factor = torch.nn.Parameter(factor, requires_grad=False)
    with context:
        _Times.apply(torch.ones(32, 64, requires_grad=True), factor)
    assert copies["out"] == 0
