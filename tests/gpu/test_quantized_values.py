"""Quantised tensors between layers on the GPU: the bytes and numbers of the host backend."""

import pytest
import torch

import te_fast.pytorch as te
from quantized_tensors import parts, quantizer
from recipes import RECIPES, name_of

pytestmark = pytest.mark.gpu
INPUT = {"delayed": "delayed", "current": "current", "block": "1d"}


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def layers(device):
    torch.manual_seed(0)
    made = [
        te.Linear(*sizes, params_dtype=torch.bfloat16, device="cpu")
        for sizes in ((256, 384), (384, 128))
    ]
    return [layer.to(device) for layer in made]


@pytest.mark.parametrize("shape", [(1, 16), (33, 48), (128, 128), (200, 264), (1024, 4096)])
@pytest.mark.parametrize("kind", ["current", "2d"])
def test_column_layouts_are_made_of_row_layouts(kind, shape):
    made = [
        quantizer(kind, columnwise=False, device=d)(randn(*shape).to(d)) for d in ("cpu", "cuda")
    ]
    for tensor in made:
        tensor.update_usage(columnwise_usage=True)
    for host, device in zip(*map(parts, made), strict=True):
        assert torch.equal(host, device.cpu())


@pytest.mark.parametrize("rows", [64, 72])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_layers_hand_fp8_on(in_fp8, rows, recipe):
    """Forward and backward with results in FP8, against the host; sums in another order may round to the next byte."""
    found = []
    for device in ("cpu", "cuda"):
        first, second = layers(device)
        x = randn(rows, 256).to(device).requires_grad_()
        for _ in range(3):  # graphs are replayed from the second call on
            x.grad = None
            for layer in (first, second):
                layer.zero_grad()
            with te.autocast(recipe=recipe):
                h = first(x, fp8_output=in_fp8)
                y = second(h, fp8_grad=in_fp8)
            y.backward(randn(rows, 128, seed=1).to(device))
        gradients = [
            parameter.grad for layer in (first, second) for parameter in layer.parameters()
        ]
        found.append([y.detach(), x.grad, *gradients])
        assert isinstance(h, te.QuantizedTensor) == in_fp8
    for host, device in zip(*found, strict=True):
        error = (host.double() - device.cpu().double()).abs().max()
        assert error <= 2**-4 * host.double().abs().max()


def test_a_given_input_has_the_bits_of_a_plain_one(recipe):
    name = name_of(recipe)
    layer, _ = layers("cuda")
    x, grad = randn(64, 256).cuda(), randn(64, 384, seed=1).cuda()
    made = quantizer(INPUT[name], device="cuda")
    if name == "delayed":
        made.scale.fill_(1.0)
    results = []
    for leaf in (x.clone(), made(x).detach()):
        if name == "delayed":
            layer, _ = layers("cuda")
        leaf.requires_grad_()
        layer.zero_grad()
        with te.autocast(recipe=RECIPES[name]()):
            y = layer(leaf)
        y.backward(grad)
        results.append(
            [y.detach(), leaf.grad, *(parameter.grad for parameter in layer.parameters())]
        )
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["delayed", "current", "1d"])
@pytest.mark.parametrize("hidden", [256, 16640])  # more blocks of scales than a block has threads
@pytest.mark.parametrize("align", [0, 16])
def test_permuted_rows_have_the_bytes_of_the_host(kind, hidden, align):
    generator = torch.Generator().manual_seed(1)
    mask, probs = (torch.rand(63, 8, generator=generator) for _ in range(2))
    mask = mask < 0.3
    found = []
    for device in ("cpu", "cuda"):
        q = quantizer(kind, device=device)(randn(63, hidden).to(device))
        given = mask.to(device)
        if align:
            arguments = (q, probs.to(device), given, given.sum(0), align)
            out, *_ = te.moe_permute_and_pad_with_probs(*arguments)
        else:
            out, _ = te.moe_permute(q, given, int(mask.sum()))
        found.append(parts(out)[:2])
    for host, device in zip(*found, strict=True):
        assert torch.equal(host, device.cpu())
