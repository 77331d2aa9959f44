"""Attention as an operator of compiled code: torch's results, before and after its launches are learned."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.attention import in_graphs, learned
from te_fast.attention.in_graphs import attend

# Torch warns of its own graphs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

HEADS, CHANNELS = 4, 64
SCALE = CHANNELS**-0.5
#: The call at which launches are learned, in these tests. Earlier ones go through torch.
CALLS = 4


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(learned, "CALLS", CALLS)
    monkeypatch.setattr(learned, "_learned", [])
    monkeypatch.setattr(in_graphs, "_uses", {})
    torch.compiler.reset()


def count():
    return dispatch.counters()["learned_attentions"]


def poison():
    """Leave NaN in the memory that the next tensors get."""
    blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(16)]
    small = [torch.full((1 << 12,), float("nan"), device="cuda") for _ in range(64)]
    del blocks, small


def packed(batch, tokens, groups, dtype, fmt="bshd"):
    """Queries, keys and values as views of one product."""
    sizes = (batch, tokens) if fmt == "bshd" else (tokens, batch)
    product = torch.randn(*sizes, HEADS + 2 * groups, CHANNELS, device="cuda").to(dtype)
    order = (0, 2, 1, 3) if fmt == "bshd" else (1, 2, 0, 3)
    return [t.permute(order) for t in product.split([HEADS, groups, groups], 2)]


def exact(q, k, v, grad, *, is_causal):
    """Gradients of plain products in FP64."""
    own = [t.detach().double().requires_grad_() for t in (q, k, v)]
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in own[1:])
    scores = own[0] @ k.transpose(-1, -2) * SCALE
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    (scores.softmax(-1) @ v).backward(grad.double())
    return [t.grad for t in own]


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    ("batch", "tokens", "groups", "is_causal", "dtype"),
    [
        (2, 256, HEADS, True, torch.bfloat16),
        (1, 333, HEADS, True, torch.bfloat16),
        (2, 128, 2, False, torch.float16),
    ],
)
def test_results_are_those_of_torch(batch, tokens, groups, is_causal, dtype, fmt):
    before = count()
    for call in range(CALLS + 4):  # the last five make launches that are known
        keeper = torch.empty(1 + 4096 * call, device="cuda")
        tensors = packed(batch, tokens, groups, dtype, fmt)
        options = in_graphs.Options(is_causal, SCALE)
        right, *_ = in_graphs._forward_by_torch(options, True, *tensors)
        poison()
        out, sums = attend(*tensors, is_causal, SCALE, True)
        assert torch.equal(out, right)
        grad = torch.randn_like(out)
        poison()
        grads = in_graphs._differentiate(grad, *tensors, out, sums, is_causal, SCALE)
        for got, want in zip(grads, exact(*tensors, grad, is_causal=is_causal), strict=True):
            assert distance(got, want) < 2e-2
        del keeper
    trial, later = 1, 5
    assert count() == before + 2 * (trial + later)


def test_inference_and_other_layouts():
    for call in range(CALLS + 8):
        tensors = packed(2, 192, HEADS, torch.bfloat16)
        if call % 2:  # the kind that is learned has the layout of the first call
            tensors = [t.contiguous() for t in tensors]
        options = in_graphs.Options(True, SCALE)
        right, *_ = in_graphs._forward_by_torch(options, False, *tensors)
        poison()
        out, left = attend(*tensors, True, SCALE, False)
        assert torch.equal(out, right)
        assert left.numel() == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("rotates", [False, True])
def test_compiled_layers_train_like_eager_ones(mode, rotates):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    hidden = HEADS * CHANNELS
    layer = te.TransformerLayer(
        hidden,
        2 * hidden,
        HEADS,
        params_dtype=torch.bfloat16,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        device="cuda",
        **options,
    )
    given = {}
    if rotates:
        given["rotary_pos_emb"] = te.RotaryPositionEmbedding(CHANNELS)(160).cuda()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    before = count()
    for _ in range(CALLS + 4):
        x = torch.randn(2, 160, hidden, device="cuda").bfloat16()
        results = []
        for call in (layer, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            leaf = x.clone().requires_grad_()
            y = call(leaf, **given)
            y.float().square().mean().backward()
            grads = [parameter.grad.clone() for parameter in layer.parameters()]
            results.append([y.detach().clone(), leaf.grad.clone(), *grads])
            layer.zero_grad()
        for eager, other in zip(*results, strict=True):
            assert distance(other, eager) < 2e-2
    if mode == "default":
        assert count() > before
