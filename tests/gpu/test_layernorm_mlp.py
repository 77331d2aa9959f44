"""LayerNormLinear and LayerNormMLP on the GPU: against FP64 references and the host backend, in graphs; launches."""

import pytest
import torch

import compound_reference as chain
import te_fast
import te_fast.pytorch as te
from compound_layers import (
    KINDS,
    PRECISE,
    QUANTIZED,
    RECIPES,
    assert_close,
    clear,
    data,
    gradients,
    make,
    step,
)
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# FP8 products of the GPU keep some 14 bits of a sum. The next quantised operands move as if rounded to FP16.
ON_GPU = QUANTIZED | {torch.float32: QUANTIZED[torch.float16]}


def layer_and_data(kind, rows, inputs, outputs, dtype, **options):
    layer = make(kind, inputs, outputs, dtype, device="cuda", **options)
    return (layer, *data(layer, rows, dtype, "cuda"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("shape", [(256, 1024, 512), (40, 144, 272), (7, 48, 80)], ids=str)
def test_high_precision(kind, normalization, dtype, shape):
    layer, x, grad = layer_and_data(kind, *shape, dtype, normalization=normalization)
    wanted = chain.exact(layer, x, grad)
    y = step(layer, x, grad)
    # torch's FP32 products may run in TF32 on request only; sums are longer than on the host's shapes.
    assert_close({"y": y, **gradients(layer, x)}, wanted, 2 * PRECISE[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 1024, 512), (40, 144, 272), (8, 16, 16)], ids=str)
def test_fp8_against_references_and_host(kind, name, dtype, shape):
    layer, x, grad = layer_and_data(kind, *shape, dtype)
    wanted = chain.quantized(layer, x, grad, name)
    y = step(layer, x, grad, RECIPES[name]())
    assert_close({"y": y, **gradients(layer, x)}, wanted, 1.5 * ON_GPU[dtype])
    host = make(kind, *shape[1:], dtype)
    host_x = x.detach().cpu().requires_grad_()
    host_y = step(host, host_x, grad.cpu(), RECIPES[name]())
    same = {key: value.to("cuda") for key, value in gradients(host, host_x).items()}
    assert_close({"y": y, **gradients(layer, x)}, {"y": host_y.cuda(), **same}, ON_GPU[dtype])


@pytest.mark.parametrize("activation", chain.ACTIVATIONS)
@pytest.mark.parametrize("name", [None, *RECIPES])
def test_activations(activation, name):
    layer, x, grad = layer_and_data("mlp", 64, 256, 128, torch.float32, activation=activation)
    if name is None:
        wanted, bound = chain.exact(layer, x, grad), 1e-5
    else:
        wanted, bound = chain.quantized(layer, x, grad, name), ON_GPU[torch.float32]
    y = step(layer, x, grad, RECIPES[name]() if name else None)
    assert_close({"y": y, **gradients(layer, x)}, wanted, bound)


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_checkpoint_is_the_same_step(name):
    layers = [
        layer_and_data("mlp", 64, 256, 128, torch.bfloat16, checkpoint=flag)[0]
        for flag in (True, False)
    ]
    x, grad = data(layers[0], 64, torch.bfloat16, "cuda")
    for _ in range(3):
        found = []
        for layer in layers:
            clear(layer, x)
            y = step(layer, x, grad, RECIPES[name]() if name else None)
            found.append({"y": y.detach(), **gradients(layer, x)})
        assert_close(found[0], found[1], 0)


def kept_bytes(layer, rows, hidden):
    """Bytes that a forward leaves allocated beside its output."""
    with te.autocast(recipe=DelayedScaling()):
        for _ in range(2):
            x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            x = x * 1
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated() - x.nbytes
            y = layer(x)
            del x
            kept = torch.cuda.memory_allocated() - before - y.nbytes
            y.sum().backward()
            del y
    return kept


def test_memory_kept_for_backward():
    options = {"device": "cuda", "params_dtype": torch.bfloat16}
    plain = te.LayerNormMLP(1024, 4096, **options)
    frugal = te.LayerNormMLP(1024, 4096, checkpoint=True, **options)
    rows = 1024
    # In FP8, one byte an element: the outputs of norm and activation. In BF16: the input and fc1's output. The rest are
    # statistics, and the weights in both layouts, since a second forward of the region used the weights again.
    wanted = rows * (1024 + 4096) + 2 * rows * (1024 + 4096) + 2 * 2 * 1024 * 4096
    assert kept_bytes(plain, rows, 1024) <= 1.02 * wanted
    assert kept_bytes(frugal, rows, 1024) <= 1.02 * 2 * rows * 1024


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("first", [None, False], ids=["requantised", "cached"])
def test_graph_replays_equal_eager(kind, name, first):
    layer, x, _ = layer_and_data(kind, 64, 256, 128, torch.bfloat16)
    recipe = RECIPES[name]()
    inputs = [torch.randn_like(x) for _ in range(4)]
    with te.autocast(recipe=recipe), torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(x, is_first_microbatch=None if first is None else True)
        torch.cuda.current_stream().wait_stream(side)
        static = x.detach().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(static, is_first_microbatch=first)
        expected = [layer(source, is_first_microbatch=first) for source in inputs]
        for i in range(100):
            static.copy_(inputs[i % 4])
            graph.replay()
            assert torch.equal(out, expected[i % 4]), i


@pytest.mark.parametrize("kind", KINDS)
def test_whole_step_in_a_graph(kind):
    layer, x, grad = layer_and_data(kind, 64, 256, 128, torch.bfloat16)
    recipe = Float8CurrentScaling()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            clear(layer, x)
            step(layer, x, grad, recipe)
    torch.cuda.current_stream().wait_stream(side)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(layer, x, grad, recipe)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        for parameter in layer.parameters():
            parameter.add_(0.01)
    graph.replay()
    torch.cuda.synchronize()
    replayed = {key: value.clone() for key, value in gradients(layer, x).items()}
    layer.zero_grad(set_to_none=True)
    x.grad = None
    step(layer, x, grad, recipe)
    assert_close(gradients(layer, x), replayed, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_is_added_to(kind):
    layer, x, grad = layer_and_data(
        kind, 64, 256, 128, torch.bfloat16, fuse_wgrad_accumulation=True
    )
    plain = make(kind, 256, 128, torch.bfloat16, device="cuda")
    recipe = Float8CurrentScaling()
    step(plain, x, grad, recipe)
    names = [weight for weight, _ in chain.linears(layer)]
    for name in names:
        weight = getattr(layer, name)
        weight.main_grad = torch.ones(weight.shape, device="cuda")
    step(layer, x, grad, recipe)
    got = {name: getattr(layer, name).main_grad - 1 for name in names}
    assert_close(got, {name: getattr(plain, name).grad for name in names}, 4e-3)


def test_launches_of_a_forward_with_cached_weights():
    layer, x, grad = layer_and_data("mlp", 256, 1024, 2048, torch.bfloat16)
    recipe = DelayedScaling()
    step(layer, x, grad, recipe)
    with te.autocast(recipe=recipe):
        for _ in range(2):  # a weight is kept when it is used again
            layer(x)
        with te_fast.dispatch.record() as launches:
            layer(x)
    names = [launch.name for launch in launches]
    assert names.count("gemm") == 2
    assert len(names) <= 4, names


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_layer_on_a_gpu_that_is_not_the_current_one(kind):
    layer = make(kind, 256, 128, torch.bfloat16, device="cuda:1")
    x, grad = data(layer, 64, torch.bfloat16, "cuda:1")
    here = make(kind, 256, 128, torch.bfloat16, device="cuda:0")
    twin = x.detach().to("cuda:0").requires_grad_()
    y, wanted = (
        step(layer, x, grad, DelayedScaling()),
        step(here, twin, grad.to("cuda:0"), DelayedScaling()),
    )
    assert torch.equal(y.to("cuda:0"), wanted)
    assert torch.equal(x.grad.to("cuda:0"), twin.grad)
