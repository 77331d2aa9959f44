"""te_fast.pytorch.MoE against a loop over tokens and experts in FP64."""

import copy

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from graphs import needs_compile
from grouped_layers import with_biases
from linear_layers import close
from recipes import RECIPES
from selection import quickly

HIDDEN, FFN, EXPERTS, TOPK = 32, 48, 6, 2
ALL = {"high": lambda: None, **RECIPES}


def make(**options):
    torch.default_generator.manual_seed(3)
    dtype = options.pop("dtype", torch.float32)
    return with_biases(te.MoE(HIDDEN, FFN, EXPERTS, TOPK, device="cpu", dtype=dtype, **options))


def tensors(shape=(3, 13), dtype=torch.float32):
    torch.default_generator.manual_seed(4)
    x = torch.randn(*shape, HIDDEN).to(dtype).requires_grad_()
    return x, torch.randn(*shape, HIDDEN).to(dtype)


def act(name, y):
    if name == "srelu":
        return torch.relu(y) ** 2
    a, b = y.chunk(2, -1)
    return torch.nn.functional.silu(a) * b


def reference(block, x):
    """Return the result, and the leaves that collect its gradients."""
    leaves = {
        name: p.detach().double().requires_grad_() for name, p in block.named_parameters()
    } | {"x": x.detach().double().requires_grad_()}
    outputs = []
    for token in leaves["x"].reshape(-1, HIDDEN):
        logits = leaves["router"] @ token
        scores = logits if block.score_function == "softmax" else torch.sigmoid(logits)
        order = scores.detach() + (0 if block.expert_bias is None else block.expert_bias.double())
        best = order.sort(descending=True, stable=True).indices[:TOPK].tolist()
        values = scores[best]
        weights = (
            torch.softmax(values, -1)
            if block.score_function == "softmax"
            else values / values.sum()
        )
        total = 0
        for weight, expert in zip(weights, best, strict=True):
            h = leaves[f"experts.0.weight{expert}"] @ token
            bias = leaves.get(f"experts.0.bias{expert}")
            h = act(block.activation, h if bias is None else h + bias) * weight
            total = total + leaves[f"experts.2.weight{expert}"] @ h
        outputs.append(total)
    return torch.stack(outputs).view(x.shape), leaves


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "options",
    [{}, {"score_function": "sigmoid", "expert_bias": True}, {"activation": "srelu"}],
    ids=["swiglu", "sigmoid", "srelu"],
)
def test_block_is_torchs(options, bias):
    block = make(bias=bias, **options)
    if block.expert_bias is not None:
        block.expert_bias.copy_(torch.linspace(-0.5, 0.5, EXPERTS))
    x, grad = tensors()
    wanted, leaves = reference(block, x)
    wanted.backward(grad.double())
    y = block(x)
    y.backward(grad)
    close(y, wanted.detach(), torch.float32)
    close(x.grad, leaves["x"].grad, torch.float32)
    for name, parameter in block.named_parameters():
        found = leaves[name].grad
        if found is None:
            assert not parameter.grad.any()
        else:
            close(parameter.grad, found, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_is_near(name, dtype):
    block = make(dtype=dtype)
    x, grad = tensors(dtype=dtype)
    wanted, leaves = reference(block, x)
    wanted.backward(grad.double())
    for _ in range(2):
        x.grad = None
        block.zero_grad()
        with te.autocast(recipe=RECIPES[name]()):
            y = block(x)
        y.backward(grad)

    def near(got, wanted):
        assert ((got.double() - wanted).norm() / wanted.norm()).item() < 0.15

    near(y, wanted.detach())
    near(x.grad, leaves["x"].grad)
    near(block.router.grad, leaves["router"].grad)
    near(block.experts[0].weight2.grad, leaves["experts.0.weight2"].grad)


@pytest.mark.parametrize("name", ALL)
def test_a_token_alone_has_the_bits_that_it_has_among_others(name):
    if name in ("current", "delayed"):  # these scales depend on all rows of an expert
        return
    block = make(dtype=torch.bfloat16)
    x, _ = tensors(dtype=torch.bfloat16)
    with torch.no_grad(), te.autocast(enabled=name != "high", recipe=ALL[name]()):
        assert torch.equal(block(x[1:2, 4:5]), block(x)[1:2, 4:5])


def test_balancing_loss():
    block = make(aux_loss_coeff=0.1)
    x, _ = tensors()
    y, loss = block(x)
    assert torch.equal(y, make()(x))
    logits = x.detach().double().reshape(-1, HIDDEN) @ block.router.detach().double().t()
    scores = torch.softmax(logits, -1)
    tokens = scores.shape[0]
    counts = torch.zeros(EXPERTS, dtype=torch.float64)
    for row in scores:
        counts[row.topk(TOPK).indices] += 1
    wanted = (scores.sum(0) * counts).sum() * EXPERTS * 0.1 / (TOPK * tokens**2)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    loss.backward()
    assert block.router.grad.any()
    assert not any(p.grad.any() for p in block.experts.parameters())


def test_expert_bias_follows_the_load():
    block = make(score_function="sigmoid", expert_bias=True)
    x, _ = tensors()
    block(x)
    counts = block.tokens_per_expert.clone()
    assert counts.sum() == x[..., 0].numel() * TOPK
    block.update_expert_bias(0.5)
    wanted = 0.5 * torch.sign(counts.float().mean() - counts)
    assert torch.equal(block.expert_bias, wanted)
    assert not block.tokens_per_expert.any()
    block.eval()(x)
    assert not block.tokens_per_expert.any()
    assert "expert_bias" in block.state_dict()
    with pytest.raises(ValueError, match="expert_bias"):
        make().update_expert_bias()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_checkpoint_counts_tokens_once(reentrant, hooked):
    block = make(score_function="sigmoid", expert_bias=True, aux_loss_coeff=0.1)
    if hooked:
        block.experts.register_forward_hook(lambda *_: None)
    x, _ = tensors()
    for run in (te.checkpoint, torch.utils.checkpoint.checkpoint):
        block.tokens_per_expert.zero_()
        y, loss = run(block, x, use_reentrant=reentrant)
        (y.sum() + loss).backward()
        assert block.tokens_per_expert.sum() == x[..., 0].numel() * TOPK


def test_no_tokens():
    block = make(aux_loss_coeff=0.1)
    x = torch.ones(0, HIDDEN, requires_grad=True)
    y, loss = block(x)
    (y.sum() + loss).backward()
    assert y.shape == (0, HIDDEN)
    assert all(not parameter.grad.any() for parameter in block.parameters())


def test_weight_gradients_later():
    block, later = make(), make(delay_wgrad_compute=True)
    x, grad = tensors()
    block(x).backward(grad)
    later(x).backward(grad)
    assert later.experts[0].weight1.grad is None
    later.backward_dw()
    for mine, theirs in zip(later.parameters(), block.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("frozen", [0, 2])
def test_weight_gradients_later_beside_a_frozen_product(frozen):
    block, later = make(), make(delay_wgrad_compute=True)
    x, grad = tensors()
    for each in (block, later):
        each.experts[frozen].requires_grad_(False)
        each(x).backward(grad)
    for _ in range(2):  # the second call finds nothing
        later.backward_dw()
        for mine, theirs in zip(later.parameters(), block.parameters(), strict=True):
            assert (mine.grad is None) == (not mine.requires_grad)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("fuse", [False, True])
def test_weight_gradients_of_one_quantised_expert_later(recipe, fuse):
    x, grad = tensors()
    got = []
    for later in (False, True):
        torch.default_generator.manual_seed(3)
        options = {"delay_wgrad_compute": later, "accumulate_into_main_grad": fuse, "device": "cpu"}
        with te.quantized_model_init(recipe=recipe):
            block = te.MoE(HIDDEN, FFN, 1, 1, **options)
        weights = [block.experts[place].weight0 for place in (0, 2)]
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)
        with te.autocast(recipe=recipe):
            block(x).backward(grad)
        block.backward_dw()
        got.append([weight.main_grad if fuse else weight.grad for weight in weights])
    for expected, deferred in zip(*got, strict=True):
        assert expected.any()
        assert torch.equal(deferred, expected)


def test_copies_and_checkpoints():
    block = make()
    x, _ = tensors()
    y = block(x)
    assert torch.equal(copy.deepcopy(block)(x), y)
    other = te.MoE(HIDDEN, FFN, EXPERTS, TOPK, device="cpu")
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(x), y)


@pytest.mark.parametrize("quantized", [False, True])
def test_checkpoints_of_single_and_of_several_parameters(recipe, quantized):
    options = {"bias": True, "device": "cpu"}
    blocks = []
    for single in (False, True, False):
        with te.quantized_model_init(enabled=quantized, recipe=recipe):
            block = te.MoE(HIDDEN, FFN, EXPERTS, TOPK, single_grouped_weight=single, **options)
        if blocks:
            block.load_state_dict(blocks[-1].state_dict())
        blocks.append(block)
    x, _ = tensors()
    y, *others = [block(x) for block in blocks]
    # A scale that is computed anew differs in its last bit.
    assert all(torch.allclose(other, y, atol=1e-5) for other in others)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"topk": 0}, ValueError),
        ({"topk": 9}, ValueError),
        ({"activation": "tanh"}, ValueError),
        ({"expert_bias": True}, ValueError),
        ({"activation": ["swiglu"]}, ValueError),
        ({"hidden_size": 0}, ValueError),
        ({"ffn_hidden_size": 0}, ValueError),
        ({"num_experts": 4.0}, TypeError),
        ({"topk": 2.0}, TypeError),
        ({"topk": "2"}, TypeError),
        ({"score_function": "foo"}, ValueError),
        ({"num_groups": 3}, ValueError),
        ({"scaling_factor": "x"}, TypeError),
        ({"aux_loss_coeff": None}, TypeError),
        ({"ep_group": 3}, TypeError),
    ],
    ids=str,
)
def test_bad_options(options, error):
    given = {"hidden_size": 8, "ffn_hidden_size": 8, "num_experts": 4, "topk": 2} | options
    with pytest.raises(error, match=next(iter(options))) as caught:
        te.MoE(**given, device="cpu")
    assert isinstance(caught.value, te_fast.TeFastError)


@pytest.mark.parametrize(
    ("inp", "error"),
    [
        (torch.ones(3, 8), te_fast.ShapeError),
        (torch.ones(3, HIDDEN, dtype=torch.int64), te_fast.DtypeError),
        (torch.ones(3, HIDDEN, dtype=torch.complex64), te_fast.DtypeError),
        (torch.ones(3, HIDDEN, dtype=torch.float64), te_fast.DtypeError),
        (None, te_fast.DtypeError),
        ([[1.0] * HIDDEN], te_fast.DtypeError),
    ],
    ids=["columns", "int64", "complex64", "float64", "none", "list"],
)
def test_bad_inputs(inp, error):
    with pytest.raises(error, match="MoE: the input"):
        make()(inp)


def biased(**options):
    return make(score_function="sigmoid", expert_bias=True, **options)


def test_a_reset_starts_from_no_bias_and_no_counts():
    block = biased()
    block.expert_bias.fill_(3.0)
    block.tokens_per_expert.fill_(5)
    block.reset_parameters()
    assert not block.expert_bias.any()
    assert not block.tokens_per_expert.any()


@pytest.mark.parametrize("gives_memory", [True, False], ids=["to_empty", "reset"])
def test_a_block_from_the_meta_device_starts_from_no_bias(gives_memory):
    options = {"score_function": "sigmoid", "expert_bias": True, "device": "meta"}
    block = te.MoE(HIDDEN, FFN, EXPERTS, TOPK, **options)
    if gives_memory:
        block.to_empty(device="cpu")
        block.expert_bias.fill_(float("nan"))
        block.tokens_per_expert.fill_(-7)
    for module in block.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    x, _ = tensors()
    assert block(x).isfinite().all()
    assert not block.expert_bias.any()
    assert block.tokens_per_expert.sum() == 39 * TOPK


def test_a_state_that_is_assigned_to_a_meta_block():
    source = biased()
    source.expert_bias.copy_(torch.linspace(-0.5, 0.5, EXPERTS))
    options = {"score_function": "sigmoid", "expert_bias": True, "device": "meta"}
    block = te.MoE(HIDDEN, FFN, EXPERTS, TOPK, **options)
    block.load_state_dict(source.state_dict(), assign=True)
    x, _ = tensors()
    assert torch.equal(block(x), source(x))
    assert torch.equal(block.tokens_per_expert, source.tokens_per_expert)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_bias_stays_in_float32(dtype):
    block = biased()
    bias = torch.linspace(-0.5, 0.5, EXPERTS)
    block.expert_bias.copy_(bias)
    block.to(dtype)
    assert block.expert_bias.dtype == torch.float32
    assert torch.equal(block.expert_bias, bias)
    block.tokens_per_expert[0] = 60
    block.update_expert_bias(1e-5)
    torch.testing.assert_close(block.expert_bias[0], bias[0] - 1e-5, rtol=0, atol=1e-8)
    other = biased()
    state = {
        name: value.to(dtype) for name, value in other.state_dict().items() if value is not None
    }
    other.load_state_dict(state, assign=True, strict=False)
    assert other.expert_bias.dtype == torch.float32


@pytest.mark.every_torch
@needs_compile
@pytest.mark.parametrize("single", quickly([False, True], True))
@pytest.mark.parametrize("name", ["block"])
def test_compiled_as_eager(name, single):
    block = make(single_grouped_weight=single, bias=True)
    recipe = ALL[name]()
    x, grad = tensors()

    def run(x):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return block(x)

    y = run(x)
    y.backward(grad)
    wanted = [x.grad, *[parameter.grad for parameter in block.parameters()]]
    block.zero_grad()
    own = x.detach().clone().requires_grad_()
    torch.compiler.reset()
    again = torch.compile(run, backend="aot_eager")(own)
    again.backward(grad)
    # In eager code the router's products are te_fast's, in compiled code torch's: sums in FP32 of another order.
    torch.testing.assert_close(again, y, rtol=1e-5, atol=1e-6)
    found = [own.grad, *[parameter.grad for parameter in block.parameters()]]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["program", "operations"])
def test_a_call_that_fails_counts_no_tokens(dtype):
    block = te.MoE(
        24, 40, 4, 2, score_function="sigmoid", expert_bias=True, device="cpu", dtype=dtype
    )
    with te.autocast(), pytest.raises(te_fast.errors.ShapeError, match="multiple of 16"):
        block(torch.ones(8, 24))
    assert not block.tokens_per_expert.any()
    assert block(torch.ones(8, 24)).isfinite().all()
    assert block.tokens_per_expert.sum() == 16


@pytest.mark.parametrize("name", [None, "current"])
def test_a_parametrized_router(name):
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2.0 * weight

    block, recipe = make(), ALL[name or "high"]()
    wanted = copy.deepcopy(block)
    x, grad = tensors()
    block(x)  # the program of a plain router is not used then
    torch.nn.utils.parametrize.register_parametrization(block, "router", Doubled())
    with torch.no_grad():
        wanted.router.mul_(2.0)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        got, expected = block(x), wanted(x)
    torch.testing.assert_close(got, expected)
    got.backward(grad)
    expected.backward(grad)
    original = block.parametrizations.router.original
    torch.testing.assert_close(original.grad, 2.0 * wanted.router.grad, rtol=1e-4, atol=1e-5)
