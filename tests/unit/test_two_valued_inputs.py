"""Identity tensors and tensors of two values, given to whatever is not a linear layer.

An operation computes with the values that forward reads. The references dequantise these by hand, and compute in plain
torch.
"""

import pytest
import torch
from torch.nn import functional

import te_fast.pytorch as te
from graphs import needs_compile
from recipes import RECIPES
from selection import sampled
from te_fast.pytorch import ops

E4M3 = te.DType.kFloat8E4M3
WIDTH, ROWS = 64, 48


def per_tensor():
    return te.Float8CurrentScalingQuantizer(E4M3, "cpu")


def blocks():
    return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)


def two(rows, columns):
    return te.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)


QUANTIZERS = {
    "identity": te.IdentityQuantizer,
    "tensor-identity": lambda: two(per_tensor(), te.IdentityQuantizer()),
    "identity-tensor": lambda: two(te.IdentityQuantizer(), per_tensor()),
    "block-identity": lambda: two(blocks(), te.IdentityQuantizer()),
    "tensor-block": lambda: two(per_tensor(), blocks()),
}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_hand(name, x):
    """The values that forward reads, made in plain torch."""
    if name.startswith("identity"):
        return x
    if name.startswith("tensor"):
        scale = 448 / x.abs().max()
        return (x * scale).to(torch.float8_e4m3fn).float() * (1 / scale)
    columns = x.shape[-1]
    padded = functional.pad(x.reshape(-1, columns), (0, -columns % 128))
    parts = padded.view(padded.shape[0], -1, 128)
    most = parts.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448 / most)))
    made = (parts * scale).to(torch.float8_e4m3fn).float() / scale
    return made.view(padded.shape)[:, :columns].reshape(x.shape)


@pytest.fixture(params=QUANTIZERS)
def name(request):
    return request.param


def given(name, *shape, seed=0):
    """A quantised leaf, and a plain leaf of the values by hand."""
    x = randn(*shape, seed=seed)
    return QUANTIZERS[name]()(x).requires_grad_(), by_hand(name, x).clone().requires_grad_()


def agree(function, reference, name, *shape, **tolerance):
    """Compare results and gradients of a function and its reference."""
    tensor, plain = given(name, *shape)
    y, expected = function(tensor), reference(plain)
    assert type(y) is torch.Tensor
    dy = randn(*expected.shape, seed=1)
    y.backward(dy)
    expected.backward(dy)
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y, expected, **tolerance)
    torch.testing.assert_close(tensor.grad, plain.grad, **tolerance)


def layer_norm(x):
    return functional.layer_norm(x, (WIDTH,), eps=1e-5)


def rms_norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def gelu(x):
    return functional.gelu(x, approximate="tanh")


def swiglu(x):
    gate, value = x.chunk(2, -1)
    return functional.silu(gate) * value


OPERATIONS = {
    "LayerNorm": (lambda: te.LayerNorm(WIDTH, device="cpu"), layer_norm),
    "RMSNorm": (lambda: te.RMSNorm(WIDTH, device="cpu"), rms_norm),
    "ops.LayerNorm": (lambda: ops.LayerNorm(WIDTH, device="cpu"), layer_norm),
    "ops.RMSNorm": (lambda: ops.RMSNorm(WIDTH, device="cpu"), rms_norm),
    "L2Normalization": (
        lambda: ops.L2Normalization(),
        lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
    ),
    "GELU": (ops.GELU, gelu),
    "ReLU": (ops.ReLU, functional.relu),
    "SwiGLU": (ops.SwiGLU, swiglu),
    "ConstantScale": (lambda: ops.ConstantScale(2.5), lambda x: 2.5 * x),
    "Reshape": (lambda: ops.Reshape((-1, WIDTH // 2)), lambda x: x.reshape(-1, WIDTH // 2)),
    "Identity": (ops.Identity, lambda x: x + 0),
    "Bias": (lambda: ops.Bias(WIDTH, device="cpu"), lambda x: x + 0),
    "Dropout": (lambda: ops.Dropout(0.0), lambda x: x + 0),
    "chain": (
        lambda: ops.Sequential(
            ops.RMSNorm(WIDTH, device="cpu"), ops.GELU(), ops.ConstantScale(2.0)
        ),
        lambda x: 2 * gelu(rms_norm(x)),
    ),
}


@pytest.mark.parametrize(("operation", "name"), sampled(OPERATIONS, QUANTIZERS), indirect=["name"])
def test_operations_compute_with_the_values_that_forward_reads(operation, name):
    make, reference = OPERATIONS[operation]
    agree(make(), reference, name, ROWS, WIDTH)


@pytest.mark.parametrize("shape", [(1, WIDTH), (0, WIDTH), (3, 5, WIDTH)], ids=str)
def test_other_shapes(shape):
    agree(te.LayerNorm(WIDTH, device="cpu"), layer_norm, "identity", *shape)


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf")])
def test_edge_values_reach_operations(value):
    x = randn(16, 32)
    x[3, 5] = value
    for tensor in (te.IdentityQuantizer()(x), two(te.IdentityQuantizer(), per_tensor())(x)):
        y = ops.ReLU()(tensor)
        assert torch.equal(y.isnan(), functional.relu(x).isnan())
        assert torch.equal(y.nan_to_num(), functional.relu(x).nan_to_num())


def test_a_strided_tensor():
    x = randn(WIDTH, ROWS).t()
    tensor = te.IdentityQuantizer()(x)
    y = te.RMSNorm(WIDTH, device="cpu")(tensor)
    torch.testing.assert_close(y, rms_norm(x), rtol=1e-5, atol=1e-5)


def test_extra_inputs(name):
    tensor, plain = given(name, 16, 32)
    x = randn(16, 32, seed=2)
    y = ops.Sequential(ops.AddExtraInput())(x, tensor)
    y.backward(torch.ones(16, 32))
    torch.testing.assert_close(y, x + plain.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(tensor.grad, torch.ones(16, 32))


@pytest.mark.parametrize(
    ("recipe", "name"), sampled([*RECIPES, None], QUANTIZERS), indirect=["name"]
)
def test_a_fused_chain_reads_the_values(recipe, name):
    """As on a plain tensor of the values; other tests compare these with torch."""
    region = RECIPES[recipe]() if recipe else None
    results = []
    for x in given(name, 128, 128):
        torch.manual_seed(0)
        chain = ops.Sequential(
            ops.LayerNorm(128, device="cpu"), ops.Linear(128, 128, device="cpu"), ops.GELU()
        )
        with te.autocast(enabled=region is not None, recipe=region):
            y = chain(x)
        y.square().sum().backward()
        results.append((y, x.grad, *[one.grad for one in chain.parameters()]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


# Experts' rows ------------------------------------------------------------------------------------

MAP = (torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(3)) < 0.5).int()
PROBS = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(4)) * MAP


def by_expert(x):
    return torch.cat([x[MAP[:, expert] == 1] for expert in range(4)])


def test_permutation(name):
    agree(
        lambda x: te.moe_permute(x, MAP, num_out_tokens=int(MAP.sum()), map_type="mask")[0],
        by_expert,
        name,
        ROWS,
        WIDTH,
    )


def test_permutation_with_probabilities(name):
    agree(
        lambda x: te.moe_permute_with_probs(x, PROBS, MAP, num_out_tokens=int(MAP.sum()))[0],
        by_expert,
        name,
        ROWS,
        WIDTH,
    )


def test_permutation_with_padding(name):
    counts = MAP.sum(0)

    def padded(x):
        parts = [x[MAP[:, expert] == 1] for expert in range(4)]
        return torch.cat([functional.pad(part, (0, 0, 0, -len(part) % 16)) for part in parts])

    agree(
        lambda x: te.moe_permute_and_pad_with_probs(x, PROBS, MAP, counts, 16)[0],
        padded,
        name,
        ROWS,
        WIDTH,
    )


def test_unpermutation(name):
    experts = (torch.arange(ROWS).view(-1, 2) % 4).int()
    _, row_map = te.moe_permute(torch.zeros(ROWS // 2, WIDTH), experts, map_type="index")
    order = torch.argsort(experts.view(-1), stable=True)

    def merged(x):
        return torch.zeros(ROWS, WIDTH).index_copy(0, order, x).view(-1, 2, WIDTH).sum(1)

    agree(
        lambda x: te.moe_unpermute(x, row_map, torch.ones(ROWS // 2, 2), map_type="index"),
        merged,
        name,
        ROWS,
        WIDTH,
    )


def test_chunks_are_sorted(name):
    sizes, order = torch.tensor([8, 16, 24]), torch.tensor([2, 0, 1])
    agree(
        lambda x: te.moe_sort_chunks_by_index(x, sizes, order),
        lambda x: torch.cat([x[24:], x[:8], x[8:24]]),
        name,
        ROWS,
        WIDTH,
    )


@pytest.mark.parametrize("as_tensor", [False, True])
def test_padding_and_back(name, as_tensor):
    splits = [10, 20, 18]
    taken = torch.tensor(splits) if as_tensor else splits

    def padded(x):
        return torch.cat(
            [functional.pad(one, (0, 0, 0, -len(one) % 16)) for one in x.split(splits)]
        )

    def moved(x):
        rows = te.Fp8Padding(3, 16)(x, taken)[0]
        return rows[: len(padded(torch.zeros(ROWS, 1)))]

    agree(moved, padded, name, ROWS, WIDTH)
    agree(
        lambda x: te.Fp8Unpadding(3, 16)(x, taken)[:ROWS],
        lambda x: torch.cat([x[:10], x[16:36], x[48:66]]),
        name,
        80,
        WIDTH,
    )


# Compiled functions and weights -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "name"),
    sampled(
        ["LayerNorm", "GELU", "chain"],
        QUANTIZERS,
        quick=[("chain", "identity")],
    ),
    indirect=["name"],
)
@needs_compile
def test_compiled_operations(operation, name):
    make, reference = OPERATIONS[operation]
    torch._dynamo.reset()
    agree(torch.compile(make(), backend="aot_eager", fullgraph=True), reference, name, ROWS, WIDTH)


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=[needs_compile, pytest.mark.slow])]
)
def test_a_linear_layer_outside_of_fp8(name, is_compiled):
    torch._dynamo.reset()
    layer = te.Linear(WIDTH, 32, bias=False, device="cpu")
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
    agree(
        function, lambda x: x @ layer.weight.detach().t(), name, ROWS, WIDTH, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "recipe", "name"),
    sampled(
        [te.Linear, te.LayerNormLinear, te.LayerNormMLP],
        ["current", "block"],
        QUANTIZERS,
        quick=[(te.Linear, "block", "block-identity")],
    ),
    indirect=["name"],
)
@needs_compile
def test_compiled_layers_in_fp8(kind, recipe, name):
    """As on a plain tensor of the values, outside of graphs."""
    torch._dynamo.reset()
    layer = kind(128, 128, device="cpu")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for function, x in zip((compiled, layer), given(name, 128, 128), strict=True):
        layer.zero_grad()
        with te.autocast(recipe=RECIPES[recipe]()):
            y = function(x)
        y.square().sum().backward()
        results.append((y, x.grad, *[one.grad for one in layer.parameters()]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "recipe", "name"),
    sampled([te.Linear, te.LayerNormLinear, te.LayerNormMLP], [*RECIPES, None], QUANTIZERS),
    indirect=["name"],
)
def test_layers_read_such_weights(kind, recipe, name):
    """As with plain weights of the values; gradients are those of the weights."""
    region = RECIPES[recipe]() if recipe else None
    results = []
    for quantised in (True, False):
        torch.manual_seed(0)
        layer, x = kind(128, 128, device="cpu"), randn(64, 128)
        for called in [key for key, one in layer.named_parameters() if one.dim() == 2]:
            weight = getattr(layer, called).detach()
            made = QUANTIZERS[name]()(weight) if quantised else by_hand(name, weight).clone()
            setattr(layer, called, torch.nn.Parameter(made))
        for _ in range(2):  # the second call has another weight in FP8
            layer.zero_grad()
            with te.autocast(enabled=region is not None, recipe=region):
                y = layer(x)
            y.square().sum().backward()
        results.append((y, *[one.grad for one in layer.parameters()]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_experts_read_such_weights(name):
    results = []
    for quantised in (True, False):
        torch.manual_seed(0)
        layer, x = te.GroupedLinear(2, 128, 128, bias=False, device="cpu"), randn(64, 128)
        for called in ("weight0", "weight1"):
            weight = getattr(layer, called).detach()
            made = QUANTIZERS[name]()(weight) if quantised else by_hand(name, weight).clone()
            setattr(layer, called, torch.nn.Parameter(made))
        products = torch.cat([x[:24] @ layer.weight0.t(), x[24:] @ layer.weight1.t()])
        y = layer(x, [24, 40]) if quantised else products
        y.square().sum().backward()
        results.append((y, *[one.grad for one in layer.parameters()]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
