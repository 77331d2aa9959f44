"""Attention in compiled code: operators that call torch's kernels, with the numbers of plain products in FP64."""

from contextlib import nullcontext

import pytest
import torch
from torch._C._dynamo.guards import assert_size_stride
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import UserError
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_fast.pytorch as te
from graphs import needs_compile
from te_fast.attention import in_graphs
from te_fast.attention.in_graphs import Options, attend, is_chosen
from te_fast.attention.learned import Uses

HEADS, CHANNELS = 4, 16
SCALE = CHANNELS**-0.5
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_state(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(in_graphs, "_uses", {})


def leaves(batch=2, queries=12, keys=12, groups=HEADS, dtype=torch.float32):
    """Queries, keys and values as views of wider products, so that their strides have gaps."""
    sizes = [(queries, HEADS), (keys, groups), (keys, groups)]
    wide = [torch.randn(batch, n, heads, 2 * CHANNELS, dtype=dtype) for n, heads in sizes]
    return [t[..., :CHANNELS].transpose(1, 2).detach().requires_grad_() for t in wide]


def expected(q, k, v, grad, *, is_causal):
    """Attention of plain products in FP64, and its gradients."""
    own = [t.detach().double().requires_grad_() for t in (q, k, v)]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in own[1:])
    scores = own[0] @ k.transpose(-1, -2) * SCALE
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    out = scores.softmax(-1) @ v
    out.backward(grad.double())
    return out, [t.grad for t in own]


def needs_kernel(groups=HEADS, dtype=torch.float32, is_causal=True):
    if not is_chosen((HEADS, groups, CHANNELS), dtype, CPU, is_causal, True):
        pytest.skip("this torch has no such kernel on the host")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_numbers(groups, is_causal, dtype, bound):
    tensors = leaves(groups=groups, dtype=dtype)
    needs_kernel(groups, dtype, is_causal)
    out, sums = attend(*tensors, is_causal, SCALE, True)
    grad = torch.randn_like(out)
    out.backward(grad)
    right, grads = expected(*tensors, grad, is_causal=is_causal)
    for got, want in zip((out, *(t.grad for t in tensors)), (right, *grads), strict=True):
        assert (got.double() - want).norm() <= bound * want.norm()
    assert sums.shape == (2, HEADS, 12)
    assert sums.is_contiguous()


@needs_compile
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("sizes", [(2, 12, 12), (1, 1, 1), (0, 12, 12), (2, 0, 12), (2, 12, 0)])
def test_results_lie_as_graphs_expect(sizes, trains):
    """A graph plans with the layout of fake tensors."""
    tensors = leaves(*sizes)
    needs_kernel(is_causal=False)
    given = (False, SCALE, trains)
    with torch.no_grad():
        real = attend(*tensors, *given)
        fakes = [torch.empty_strided(t.shape, t.stride(), device="meta") for t in tensors]
        fake = attend(*fakes, *given)
        for got, planned in zip(real, fake, strict=True):
            assert got.dtype == planned.dtype
            assert_size_stride(got, tuple(planned.shape), planned.stride())
        if not trains:
            return
        grad = torch.randn_like(real[0])
        grads = in_graphs._differentiate(grad, *tensors, *real, *given[:2])
    for got, leaf in zip(grads, tensors, strict=True):
        assert_size_stride(got, tuple(leaf.shape), torch.empty_like(leaf).stride())
        if 0 in sizes:
            assert not got.any()


def graph_of(call, *tensors):
    """Compile a call; return its result and the text of the graph."""
    texts = []

    def backend(module, _):
        texts.append(module.print_readable(print_output=False))
        return module.forward

    torch.compiler.reset()
    out = torch.compile(call, fullgraph=True, backend=backend)(*tensors)
    (text,) = texts
    return out, text


def of_tokens(*sizes):
    """The same without gradients, ``(batch, tokens, heads, channels)``."""
    return [t.detach().transpose(1, 2) for t in leaves(*sizes)]


def core(**options):
    given = {"attention_dropout": 0.0, "qkv_format": "bshd", "attn_mask_type": "causal"} | options
    return te.DotProductAttention(HEADS, CHANNELS, **given)


@needs_compile
@pytest.mark.parametrize(
    ("options", "sizes", "is_operator"),
    [
        ({}, (2, 12, 12), True),
        ({"attn_mask_type": "no_mask"}, (2, 12, 12), True),
        ({"attn_mask_type": "no_mask"}, (2, 12, 7), True),
        ({"attn_mask_type": "no_mask"}, (2, 1, 7), False),
        ({"attention_dropout": 0.1}, (2, 12, 12), False),
        ({"window_size": (2, 0)}, (2, 12, 12), False),
    ],
)
def test_calls_that_are_operators(options, sizes, is_operator):
    needs_kernel()
    tensors = of_tokens(*sizes)
    out, text = graph_of(core(**options), *tensors)
    assert ("te_fast.attend" in text) is is_operator
    if options.get("attention_dropout", 0.0) == 0.0:
        assert torch.equal(out, core(**options)(*tensors))


@needs_compile
def test_a_trace_keeps_what_the_user_has_chosen():
    """Kernels that the user forbids are not called; torch's own operator raises or takes another one."""
    needs_kernel()
    layer = core()

    def call(*tensors):
        with sdpa_kernel(SDPBackend.MATH):
            return layer(*tensors)

    tensors = of_tokens()
    assert "te_fast.attend" not in graph_of(call, *tensors)[1]
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_chosen((HEADS, HEADS, CHANNELS), torch.float32, CPU, True, True)
    finally:
        torch.use_deterministic_algorithms(False)


@needs_compile
@pytest.mark.parametrize("which", range(3))
def test_channels_that_do_not_lie_side_by_side(which):
    """torch's fused kernels read them side by side; torch's choice refuses other tensors."""
    needs_kernel()
    tensors = of_tokens()
    tensors[which] = tensors[which].transpose(1, 3).contiguous().transpose(1, 3)
    out, text = graph_of(core(), *tensors)
    assert "te_fast.attend" not in text
    heads = [t.transpose(1, 2) for t in tensors]
    right, _ = expected(*heads, torch.zeros_like(heads[0]), is_causal=True)
    assert (out.double() - right.transpose(1, 2).flatten(2)).norm() <= 1e-5 * right.norm()


@needs_compile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_attention_has_the_type_of_eager_code(dtype):
    layer, tensors = core(), of_tokens()
    with torch.autocast("cpu", dtype):
        out, text = graph_of(layer, *tensors)
        assert "te_fast.attend" not in text
        assert out.dtype == dtype
        assert torch.equal(out, layer(*tensors))


@needs_compile
def test_under_autocast_heads_of_its_type_are_the_operators():
    needs_kernel(dtype=torch.bfloat16)
    layer, tensors = core(), [t.bfloat16() for t in of_tokens()]
    with torch.autocast("cpu", torch.bfloat16):
        out, text = graph_of(layer, *tensors)
        assert "te_fast.attend" in text
        assert torch.equal(out, layer(*tensors))


@needs_compile
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_without_memory(device):
    layer = core()
    with nullcontext() if device == "meta" else FakeTensorMode():
        tensors = [torch.empty(2, 12, HEADS, CHANNELS, device=device) for _ in range(3)]
        out, text = graph_of(layer, *tensors)
    assert out.shape == (2, 12, HEADS * CHANNELS)
    assert "te_fast.attend" not in text or device != "meta"


def test_a_machine_without_a_gpu_may_trace_for_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    heads = (HEADS, HEADS, CHANNELS)
    assert not is_chosen(heads, torch.bfloat16, torch.device("cuda"), True, True)


def test_the_operators_take_arguments_by_name():
    """Passes over graphs may write them so."""
    tensors = [t.detach() for t in leaves()]
    needs_kernel()
    how = {"is_causal": True, "scale": SCALE}
    made = attend(*tensors, **how, trains=True)
    grads = in_graphs._differentiate(torch.ones_like(made[0]), *tensors, *made, **how)
    same = in_graphs._differentiate(torch.ones_like(made[0]), *tensors, *made, True, SCALE)
    assert torch.equal(made[0], attend(*tensors, True, SCALE, True)[0])
    assert all(torch.equal(one, other) for one, other in zip(grads, same, strict=True))


@needs_compile
def test_gradients_by_transforms_of_functions():
    layer, tensors = core(), of_tokens()

    def loss(*tensors):
        return layer(*tensors).square().sum()

    def grads(*tensors):
        return torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)

    torch.compiler.reset()
    found = torch.compile(grads, fullgraph=True, backend="eager")(*tensors)
    for one, other in zip(found, grads(*tensors), strict=True):
        assert torch.equal(one, other)


@needs_compile
def test_sizes_are_dynamic():
    needs_kernel()
    layer, texts = core(), []

    def backend(module, _):
        texts.append(module)
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for batch, tokens in ((2, 12), (3, 20), (4, 7)):
        tensors = of_tokens(batch, tokens, tokens)
        assert torch.equal(compiled(*tensors), layer(*tensors))
    assert len(texts) == 1


@needs_compile
def test_a_compiled_layer_trains_as_an_eager_one():
    needs_kernel(dtype=torch.bfloat16)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    layer = te.TransformerLayer(
        HEADS * CHANNELS, 128, HEADS, device="cpu", params_dtype=torch.bfloat16, **options
    )
    x = torch.randn(2, 12, HEADS * CHANNELS, dtype=torch.bfloat16)
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.compiler.reset()
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = call(leaf)
        out.float().square().mean().backward()
        weights = [layer.self_attention.proj.weight, layer.layernorm_mlp.fc1_weight]
        results.append([out, leaf.grad, *(weight.grad for weight in weights)])
    for eager, compiled in zip(*results, strict=True):
        assert (eager.float() - compiled.float()).norm() <= 5e-3 * eager.float().norm()


@needs_compile
@pytest.mark.parametrize("kind", ["causal", "no_mask"])
def test_sizes_may_depend_on_data(kind):
    """Nothing is known of such a size; torch's own operator takes it since some release."""
    layer, (x, *_) = core(attn_mask_type=kind), of_tokens()

    def compiled(call):
        torch.compiler.reset()
        given = x.clone()
        mark_unbacked(given, 1)
        return torch.compile(call, fullgraph=True, backend="aot_eager")(given)

    def by_torch(x):
        q = x.transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    try:
        compiled(by_torch)
    except UserError:
        pytest.skip("this torch's own operator does not")
    torch.testing.assert_close(compiled(lambda x: layer(x, x, x)), layer(x, x, x))


# Launches that are learned --------------------------------------------------------------------------


class Repeated:
    """Stands for learned launches: takes tensors of one size of batch."""

    def __init__(self, batch, made):
        self.batch, self.made, self.calls = batch, made, 0

    def run(self, *given):
        self.calls += 1
        return self.made if given[0].shape[0] == self.batch else None


def test_known_launches_replace_torchs_call_until_tensors_differ(monkeypatch):
    uses = Uses(None)
    tensors = [t.detach() for t in leaves()]
    marked = torch.full_like(tensors[0], 7.0), torch.zeros(2, HEADS, 12)
    uses.repeated, uses.is_settled = Repeated(2, marked), True
    monkeypatch.setattr(in_graphs, "_uses_of", lambda *_: uses)
    needs_kernel()
    given = (True, SCALE, True)
    assert attend(*tensors, *given)[0] is marked[0]
    other = [t.detach() for t in leaves(batch=3)]
    out, _ = attend(*other, *given)
    right, _ = expected(*other, torch.randn_like(out), is_causal=True)
    assert (out.double() - right).norm() <= 1e-5 * right.norm()
    assert uses.repeated.calls == 2


def test_kinds_of_calls_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(in_graphs, "_KINDS", 3)
    options = Options(True, SCALE)
    for tokens in range(1, 6):
        tensors = leaves(2, tokens, tokens)
        assert in_graphs._uses_of(options, True, None, *tensors) is None  # no GPU
        assert len(in_graphs._uses) <= 3
