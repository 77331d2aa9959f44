"""Experts on the GPU: casts with the host's bits, layers and blocks near it, graphs that replay other counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
import te_fast.pytorch as te  # noqa: E402
from recipes import RECIPES  # noqa: E402
from te_fast import dispatch  # noqa: E402

pytestmark = pytest.mark.gpu

ALL = {"high": lambda: None, **RECIPES}
SPLITS = [
    [0, 5, 128, 0, 129, 1, 300, 0],
    [1000],
    [0, 0, 0],
    [16] * 65,
    [3] * 1024,
    [7, 0, 4000, 129],
]


def spans(splits):
    first = padded = 0
    for rows in splits:
        yield first, rows, padded
        first, padded = first + rows, padded + -(-rows // 128) * 128


def data(rows, cols, dtype, offset=0):
    make = torch.Generator().manual_seed(rows * 31 + cols)
    whole = torch.randn(rows * cols + offset, generator=make)
    spread = torch.randint(-9, 9, whole.shape, generator=make)
    return (whole * torch.exp2(spread.float())).to(dtype)[offset:].view(rows, cols)


def compare(host, device, splits, cols, *, block):
    for first, rows, padded in spans(splits):
        whole = slice(padded, padded + -(-rows // 128) * 128)
        own = slice(first, first + rows)
        pairs = [
            (host.rowwise_data[own], device.rowwise_data[own]),
            (host.columnwise_data[:, whole], device.columnwise_data[:, whole]),
        ]
        if block:
            lines = slice(padded // 128, padded // 128 + -(-rows // 128))
            pairs += [
                (host.rowwise_scale_inv[:, own], device.rowwise_scale_inv[:, own]),
                (host.columnwise_scale_inv[lines], device.columnwise_scale_inv[lines]),
            ]
        for mine, theirs in pairs:
            assert torch.equal(
                mine.contiguous().view(torch.uint8), theirs.cpu().contiguous().view(torch.uint8)
            )
    if not block:
        assert torch.equal(host.rowwise_scale_inv, device.rowwise_scale_inv.cpu())


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("cols", [16, 136, 200, 1031])
@pytest.mark.parametrize("splits", SPLITS, ids=lambda splits: f"{len(splits)} groups")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_counted_casts_have_the_hosts_bits(name, dtype, splits, cols, offset):
    recipe, x = RECIPES[name](), data(sum(splits), cols, dtype, offset)
    counts, slots = torch.tensor(splits), {}
    if name == "delayed":
        slots = {
            "scale": torch.exp2(torch.arange(len(splits)).remainder(7) - 3.0),
            "amax": torch.full((len(splits),), 0.5),
        }
    near = {key: value.cuda() for key, value in slots.items()}
    host = dispatch.quantize_groups(x, counts, recipe, columnwise=True, **slots)
    moved = torch.empty(x.numel() + offset, dtype=dtype, device="cuda")[offset:].view_as(x).copy_(x)
    device = dispatch.quantize_groups(moved, counts.cuda(), recipe, columnwise=True, **near)
    compare(host, device, splits, cols, block=name == "block")
    if slots:
        assert torch.equal(slots["amax"], near["amax"].cpu())


@pytest.mark.parametrize(
    "splits",
    [[3, -5, 4], [200, 200], [1 << 40, 1], [1, -(1 << 62), 0] * 40 + [1 << 62, 7]],
    ids=["negative", "too many", "beyond 32 bits", "122 groups"],
)
@pytest.mark.parametrize("name", ["current", "block"])
def test_counts_that_do_not_fit_are_cut_off(name, splits):
    recipe, x = RECIPES[name](), data(130, 136, torch.bfloat16)
    host = dispatch.quantize_groups(x, torch.tensor(splits), recipe, columnwise=True)
    device = dispatch.quantize_groups(
        x.cuda(), torch.tensor(splits).cuda(), recipe, columnwise=True
    )
    taken, left = [], 130
    for split in splits:
        taken.append(max(0, min(split, left)))
        left -= taken[-1]
    compare(host, device, taken, 136, block=name == "block")


@pytest.mark.parametrize("shape", [(3, 64, 48), (2, 130, 300), (65, 256, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_stacks_have_the_hosts_bits(name, dtype, shape):
    recipe, x = RECIPES[name](), data(shape[0] * shape[1], shape[2], dtype).view(shape)
    slots = {"scale": torch.exp2(torch.arange(shape[0]).remainder(5) - 2.0)}
    slots = slots if name == "delayed" else {}
    near = {key: value.cuda() for key, value in slots.items()}
    arguments = {"role": "weight", "columnwise": True}
    host = dispatch.quantize_groups(x, None, recipe, **arguments, **slots)
    device = dispatch.quantize_groups(x.cuda(), None, recipe, **arguments, **near)
    for mine, theirs in zip(host, device, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.cpu().view(torch.uint8))


def layers(splits, inputs, outputs, dtype, **options):
    torch.manual_seed(len(splits))
    host = te.GroupedLinear(
        len(splits), inputs, outputs, device="cpu", params_dtype=dtype, **options
    )
    device = te.GroupedLinear(
        len(splits), inputs, outputs, device="cuda", params_dtype=dtype, **options
    )
    device.load_state_dict(host.state_dict())
    return host, device


def near(got, wanted, dtype):
    room = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    difference = (got.double().cpu() - wanted.double()).norm()
    assert difference <= room * wanted.double().norm() + 1e-12


@pytest.mark.parametrize("splits", [[0, 70, 1, 0, 129, 128, 16, 0], [33], [16] * 65], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_steps_are_near_the_hosts(name, dtype, bias, splits):
    host, device = layers(splits, 272, 144, dtype, bias=bias)
    x, grad = data(sum(splits), 272, torch.float32), data(sum(splits), 144, torch.float32)
    x, grad = x.clamp(-4, 4).to(dtype), grad.clamp(-4, 4).to(dtype)
    results = []
    for layer, place in ((host, "cpu"), (device, "cuda")):
        own = x.detach().clone().to(place).requires_grad_()
        counts = torch.tensor(splits, device=place)
        recipe = ALL[name]()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(own, counts)
        y.backward(grad.to(place))
        results.append([y, own.grad, *[parameter.grad for parameter in layer.parameters()]])
    for wanted, got in zip(*results, strict=True):
        near(got, wanted, dtype)


# torch warns that the mode is a prototype after it has set it.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", ALL)
def test_nothing_waits_for_the_gpu(name):
    _, layer = layers([8, 8, 8], 64, 32, torch.bfloat16, bias=True)
    x = torch.randn(24, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    counts = torch.tensor([20, 0, 4], device="cuda")
    recipe = ALL[name]()

    def step():
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            layer(x, counts).float().sum().backward()

    step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Eager steps run on another stream than the capture, whose nodes accumulate on theirs.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("name", ["high", "current", "block"])
def test_block_replays_other_counts_with_eagers_bits(name):
    torch.manual_seed(0)
    block = te.MoE(128, 96, num_experts=8, topk=2, device="cuda", dtype=torch.bfloat16)
    recipe = ALL[name]()
    x = torch.randn(256, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.randn_like(x)

    def step():
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = block(x)
        y.backward(grad)
        return y

    def clear():
        x.grad = None
        block.zero_grad(set_to_none=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            clear()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    found = [x.grad, *[parameter.grad for parameter in block.parameters()]]
    for seed in range(1000):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * (1 + seed % 20))
            x[: 8 * (seed % 33)] = x[0]  # up to all tokens have the same experts
        graph.replay()
        kept = [captured.clone(), *[tensor.clone() for tensor in found]]
        clear()
        y = step()
        wanted = [y, x.grad, *[parameter.grad for parameter in block.parameters()]]
        assert all(map(torch.equal, kept, wanted))
        x.grad = found[0]
        for parameter, tensor in zip(block.parameters(), found[1:], strict=True):
            parameter.grad = tensor
