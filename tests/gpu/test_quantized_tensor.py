"""Quantised tensors on a GPU against equal tensors on the host backend: bytes, scales, layouts, moves, optimizers."""

import pytest
import torch

import te_fast.pytorch as te
from quantized_tensors import KINDS, layout, parts, quantizer, scales_there, values
from recipes import RECIPES
from te_fast.pytorch.tensor.utils import quantize_master_weights

pytestmark = pytest.mark.gpu


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("shape", [(256, 512), (3, 32, 144), (7, 130), (0, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_are_those_of_the_host(kind, shape, dtype):
    x = torch.randn(shape).to(dtype)
    tensor = quantizer(kind, device="cuda")(x.cuda())
    if x.numel():
        for turned in (False, True):
            matrix = x.reshape(-1, x.shape[-1])
            source = matrix.t().contiguous() if turned else matrix
            data, scales, _ = layout(source, kind)
            row, row_scale, col, col_scale = parts(tensor)
            got, scale = (col, col_scale) if turned else (row, row_scale)
            assert torch.equal(got.cpu().reshape(source.shape), data)
            assert torch.equal(*scales_there(scale.cpu(), scales))
        assert torch.equal(tensor.dequantize().cpu(), values(x, kind))
    assert tensor.device.type == "cuda"


def test_the_column_layout_is_made_of_the_row_layout():
    for kind in ("delayed", "current", "2d"):
        x = torch.randn(256, 384).bfloat16()
        both = quantizer(kind, device="cuda")(x.cuda())
        rows = quantizer(kind, columnwise=False, device="cuda")(x.cuda())
        rows.update_usage(columnwise_usage=True)
        assert torch.equal(parts(rows)[2], parts(both)[2])


def test_moves_between_devices(kind):
    x = torch.randn(256, 384).bfloat16()
    host = quantizer(kind)(x)
    moved = host.cuda()
    assert type(moved) is type(host)
    assert torch.equal(moved.dequantize().cpu(), host.dequantize())
    moved.quantize_(x.cuda() * 2)
    assert torch.equal(moved.cpu().dequantize(), values(x * 2, kind))
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(host)
    module.cuda()
    assert type(module.weight) is type(host)
    assert module.weight.is_cuda


@pytest.mark.parametrize(
    # Capturable steps of one tensor round differently from steps of a list, which torch uses for plain tensors.
    "options",
    [{}, {"foreach": True}, {"fused": True}, {"capturable": True, "foreach": False}],
)
def test_optimizers_step(kind, options):
    x, grad = torch.randn(256, 384).bfloat16(), torch.randn(256, 384).bfloat16()
    parameter = torch.nn.Parameter(quantizer(kind, device="cuda")(x.cuda()))
    plain = torch.nn.Parameter(values(x, kind).cuda())
    for weight in (parameter, plain):
        weight.grad = grad.cuda()
        torch.optim.Adam([weight], lr=0.125, **options).step()
    assert torch.equal(parameter.dequantize().cpu(), values(plain.cpu(), kind))


@pytest.mark.parametrize("recipe_name", ["delayed", "current", "block"])
def test_layers_with_quantised_weights(recipe_name):
    recipe = RECIPES[recipe_name]()
    results = []
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        mine = te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16)
    plain = te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter, other in zip(mine.parameters(), plain.parameters(), strict=True):
            other.copy_(getattr(parameter, "get_high_precision_init_val", parameter.clone)())
    x = torch.randn(128, 256, device="cuda").bfloat16()
    for layer in (mine, plain):
        inp = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(inp)
        y.backward(torch.ones_like(y))
        results.append([y, inp.grad, *(parameter.grad for parameter in layer.parameters())])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_a_graph_under_capture_reads_the_weight_of_its_replay():
    recipe = RECIPES["current"]()
    with te.quantized_model_init(recipe=recipe), torch.no_grad():
        layer = te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda").bfloat16()

    def run():
        with torch.no_grad(), te.autocast(recipe=recipe):
            return layer(x)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(256, 256, device="cuda").bfloat16())
    graph.replay()
    assert torch.equal(y, run())


@pytest.mark.parametrize("name", ["delayed", "current", "2d"])
def test_master_weights_make_the_bytes_of_the_host(name):
    values, master = torch.randn(256, 384).bfloat16(), torch.randn(256 * 384)
    weights = [
        torch.nn.Parameter(quantizer(name, device=device)(values.to(device)))
        for device in ("cpu", "cuda")
    ]
    for weight in weights:
        part = master[1000:70000].to(weight.device)
        quantize_master_weights([weight], [part], [1000], None)
    for got, expected in zip(parts(weights[1])[:2], parts(weights[0])[:2], strict=True):
        assert torch.equal(got.cpu(), expected)
