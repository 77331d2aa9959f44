"""Second derivatives: te_fast refuses those that it cannot compute, by an error that names the layer."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import te_fast.pytorch as te
from selection import sampled
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.errors import UnsupportedError
from te_fast.pytorch import ops
from te_fast.pytorch.router import fused_topk_with_score_function

KIND = {"device": "cpu"}
#: torch's forward mode compiles some of its own functions when it begins.
TORCHS_WARNING = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")


class Doubled(ops.BasicOperation):
    """An operation in Python."""

    def op_forward(self, ctx, input_, **_):
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


def _sequential(*between):
    return ops.Sequential(ops.Linear(32, 48, **KIND), *between, ops.Linear(48, 32, **KIND))


#: Constructors, and the names that the errors must have.
LAYERS = {
    "linear": (lambda: te.Linear(32, 32, name="mine", **KIND), "mine"),
    "layernorm_linear": (lambda: te.LayerNormLinear(32, 32, name="mine", **KIND), "mine"),
    "layernorm_mlp": (lambda: te.LayerNormMLP(32, 64, name="mine", **KIND), "mine"),
    "recomputed": (lambda: te.LayerNormMLP(32, 64, checkpoint=True, name="mine", **KIND), "mine"),
    "deferred": (lambda: te.Linear(32, 32, delay_wgrad_compute=True, name="mine", **KIND), "mine"),
    "norm": (lambda: te.RMSNorm(32, **KIND), "RMSNorm"),
    "chain": (_sequential, "Sequential|ops 0-1"),
    "python": (lambda: _sequential(Doubled()), "ops 0-2"),
    "experts": (lambda: te.GroupedLinear(2, 32, 32, name="mine", **KIND), "mine"),
    "moe": (lambda: te.MoE(32, 48, num_experts=4, topk=2, **KIND), "MoE"),
    "block": (
        lambda: te.TransformerLayer(
            32, 64, 4, attention_dropout=0.0, hidden_dropout=0.0, name="mine", **KIND
        ),
        "mine",
    ),
}


def _applied(kind, layer, x):
    if kind == "experts":
        return layer(x, [x.shape[0] - 4, 4] if len(x) else [0, 0])
    return layer(x[:, None])[:, 0] if kind == "block" else layer(x)


def _tokens(rows=16):
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_()


@pytest.mark.parametrize(("kind", "in_fp8"), sampled(LAYERS, [False, True]))
def test_a_second_derivative_is_refused_by_name(kind, in_fp8):
    make, name = LAYERS[kind]
    layer, x = make(), _tokens()
    with te.autocast(enabled=in_fp8, recipe=Float8CurrentScaling()):
        y = _applied(kind, layer, x)
    # The gradient that backward gets is constant: torch's own once_differentiable would let this pass.
    (plain,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(dx, plain)
    if kind == "linear" and not in_fp8:  # torch's own product
        assert dx.square().sum().requires_grad
        return
    with pytest.raises(UnsupportedError, match=f"({name}).*: its gradient .* without create_graph"):
        dx.square().sum().backward()


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "linear"])
def test_a_second_derivative_for_given_tensors_is_refused_by_name(kind):
    """torch.autograd.grad runs only what leads to these tensors, and takes the rest for constants."""
    make, name = LAYERS[kind]
    layer, x = make(), _tokens()
    weights = [p for p in layer.parameters() if p.requires_grad]
    y = _applied(kind, layer, x.sin())
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    message = f"({name}).*: its gradient .* without create_graph"
    for given in (x, weights[0]):
        with pytest.raises(UnsupportedError, match=message):
            torch.autograd.grad((x.sin() * dx).sum(), given, retain_graph=True)


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "linear"])
def test_a_derivative_for_the_gradient_that_backward_got_is_refused_by_name(kind):
    """So torch.autograd.functional.jvp computes tangents: it takes gradients that lead nowhere for zeros."""
    make, name = LAYERS[kind]
    layer, x = make(), _tokens()
    y = _applied(kind, layer, x)
    given = torch.ones_like(y).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, given, create_graph=True)
    message = f"({name}).*: its gradient .* without create_graph"
    with pytest.raises(UnsupportedError, match=message):
        torch.autograd.grad(dx.sum(), given, allow_unused=True)
    with pytest.raises(UnsupportedError, match=message):
        torch.autograd.functional.jvp(
            lambda x: _applied(kind, layer, x), x.detach(), torch.ones(16, 32)
        )


@TORCHS_WARNING
@pytest.mark.parametrize(("kind", "in_fp8"), sampled(LAYERS, [False, True]))
def test_a_derivative_in_forward_mode_is_refused_by_name(kind, in_fp8):
    if kind == "linear" and not in_fp8:
        pytest.skip("torch's own")
    make, name = LAYERS[kind]
    layer, x = make(), _tokens()
    with forward_ad.dual_level(), te.autocast(enabled=in_fp8, recipe=Float8CurrentScaling()):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(UnsupportedError, match=f"({name}).*: there is no derivative"):
            _applied(kind, layer, dual)


@TORCHS_WARNING
@pytest.mark.parametrize(
    "name", ["moe_permute", "moe_sort_chunks_by_index", "router", "parallel_cross_entropy"]
)
def test_functions_have_no_derivative_in_forward_mode(name):
    x = _tokens()
    calls = {
        "moe_permute": lambda x: te.moe_permute(x, torch.ones(16, 2, dtype=torch.bool)),
        "moe_sort_chunks_by_index": lambda x: te.moe_sort_chunks_by_index(
            x, torch.tensor([8, 8]), torch.tensor([1, 0])
        ),
        "router": lambda x: fused_topk_with_score_function(
            x, 2, False, None, None, None, "softmax", None
        ),
        "parallel_cross_entropy": lambda x: te.parallel_cross_entropy(
            x, torch.zeros(16, dtype=torch.long)
        ),
    }
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(UnsupportedError, match=f"{name}: there is no derivative"):
            calls[name](dual)


def test_a_linear_layer_outside_of_fp8_is_torchs():
    layer, x = te.Linear(32, 32, **KIND), _tokens()
    (dx,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(dx.sum(), x)
    known = torch.nn.functional.linear(x, layer.weight, layer.bias)
    (dx,) = torch.autograd.grad(known.pow(3).sum(), x, create_graph=True)
    assert torch.allclose(found, torch.autograd.grad(dx.sum(), x)[0])


@pytest.mark.parametrize("kind", ["layernorm_linear", "norm", "chain", "experts"])
def test_no_rows(kind):
    layer, x = LAYERS[kind][0](), _tokens(0)
    (dx,) = torch.autograd.grad(_applied(kind, layer, x).sum(), x, create_graph=True)
    assert dx.shape == (0, 32)
    with pytest.raises(UnsupportedError, match="its gradient cannot be differentiated again"):
        dx.sum().backward()


def test_parameters_get_their_gradients():
    """``create_graph=True`` alone is no error."""
    layer, x = te.LayerNormMLP(32, 64, **KIND), _tokens()
    layer(x).square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    with pytest.warns(UserWarning, match="create_graph=True"):
        layer(x).square().sum().backward(create_graph=True)
    assert all(torch.equal(p.grad, wanted[name]) for name, p in layer.named_parameters())
    layer.zero_grad()


def test_a_gradient_in_fp8_is_refused():
    first = te.Linear(32, 32, name="first", **KIND)
    x = _tokens()
    with te.autocast(recipe=Float8CurrentScaling()):
        y = first(x, fp8_grad=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="^first: its gradient"):
        dx.sum().backward()


def test_conversions_of_quantised_tensors_are_differentiable():
    """Casts have the gradient of the identity, which can be differentiated."""
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    x = _tokens()
    y = quantizer(x).dequantize()
    (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    assert torch.equal(second, 6 * y)


def _permuted(function, *, padded=False):
    def run(x):
        mask = torch.zeros(len(x), 4, dtype=torch.bool)
        mask[:, :2] = True
        probs = torch.rand(len(x), 4) * mask
        if padded:
            counts = mask.sum(0)
            return te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)[0]
        if function == "moe_permute":
            return te.moe_permute(x, mask, 2 * len(x))[0]
        return te.moe_permute_with_probs(x, probs, mask, 2 * len(x))[0]

    return run


@pytest.mark.parametrize(
    ("function", "padded"),
    [
        ("moe_permute", False),
        ("moe_permute_with_probs", False),
        ("moe_permute_and_pad_with_probs", True),
    ],
)
def test_permutations_name_the_function_that_was_called(function, padded):
    x = _tokens()
    y = _permuted(function, padded=padded)(x)
    with pytest.raises(UnsupportedError, match=f"^{function}: its gradient"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_scores_of_many_experts():
    """More experts than kernels take are torch's operations but one."""
    x = torch.randn(2, 2000, requires_grad=True)
    probs, _ = te.router.fused_topk_with_score_function(
        x, 2, False, None, None, None, "sqrtsoftplus", None
    )
    (dx,) = torch.autograd.grad(probs.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="^router: its gradient"):
        dx.sum().backward()
