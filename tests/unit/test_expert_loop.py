"""Experts that run one by one, as on GPUs without grouped kernels.

In FP8 they have the bits of the one launch, and outside of FP8 those of `Linear` layers.
"""

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

import te_fast.pytorch as te
from graphs import needs_compile, refusal_of
from grouped_layers import SPLITS, grads, inputs, make, step, with_biases
from linear_layers import DTYPES, casts, close
from recipes import RECIPES
from selection import sampled
from te_fast import _config
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.ops import cublas_groups, expert_loop
from te_fast.tensor import stacks

ALL = {"high": lambda: None, **RECIPES}


@pytest.fixture
def one_by_one(monkeypatch):
    """Turns the loop on or off."""
    return lambda on=True: monkeypatch.setattr(_config, "EXPERT_LOOP", on)


@pytest.mark.parametrize(
    ("dtype", "lines", "where", "looped"),
    [
        (torch.bfloat16, (64, 96), nullcontext, False),
        (torch.float16, (8, 16), nullcontext, False),
        (torch.bfloat16, (64, 100), nullcontext, True),
        (torch.bfloat16, (69, 64), nullcontext, True),
        (torch.float32, (64, 96), nullcontext, True),
        (torch.float32, (64, 96), lambda: in_autocast(), False),
        (torch.float32, (64, 100), lambda: in_autocast(), True),
        (torch.float32, (64, 96), lambda: in_fp8(), False),
        (torch.float32, (64, 96), lambda: in_fp8("high_precision"), True),
        (torch.bfloat16, (64, 96), lambda: in_fp8("high_precision"), False),
        (torch.bfloat16, (64, 96), lambda: in_fp8("dequantized"), True),
        (torch.bfloat16, (64, 96), lambda: in_fp8("dequantized", enabled=False), False),
    ],
)
def test_what_one_launch_on_a_gpu_takes(dtype, lines, where, looped, monkeypatch):
    """The test needs no GPU: a stand-in for the tensor has a device and a type."""
    monkeypatch.setattr(expert_loop, "has_kernels", lambda _: True)
    x = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
    with where():
        assert expert_loop.is_needed(x, *lines) is looped
        assert expert_loop.is_needed(x, *lines, biased=True) is looped


@pytest.mark.parametrize(
    ("dtype", "where", "asked"),
    [
        (torch.bfloat16, nullcontext, ["bfloat16"]),
        (torch.float16, nullcontext, ["float16"]),
        (torch.float32, nullcontext, None),
        (torch.float32, lambda: in_autocast(), ["bfloat16"]),
        (torch.float32, lambda: in_fp8(), ["fp8"]),
        (torch.bfloat16, lambda: in_fp8("high_precision"), ["bfloat16", "fp8"]),
        (torch.bfloat16, lambda: in_fp8(kind=DelayedScaling), ["fp8"]),
        (torch.bfloat16, lambda: in_fp8(kind=Float8BlockScaling), None),
    ],
)
def test_what_cublas_takes_on_gpus_without_kernels(dtype, where, asked, monkeypatch):
    """None: experts run one by one whatever cuBLASLt has."""
    questions, answer = [], True

    def multiplies(index, operands):
        questions.append(operands)
        return answer

    monkeypatch.setattr(expert_loop, "has_kernels", lambda _: False)
    monkeypatch.setattr(cublas_groups, "multiplies", multiplies)
    x = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
    with where():
        assert expert_loop.is_needed(x, 64, 96) is (asked is None)
        assert questions == (asked or [])
        assert expert_loop.is_needed(x, 64, 96, biased=True)  # cuBLASLt adds no biases of groups
        answer = False
        assert expert_loop.is_needed(x, 64, 96)


def agree(name, found, dtype=torch.float32):
    """Check that the loop's tensors are those of one launch; outside of FP8 torch sums in another order."""
    for one, other in zip(*found, strict=True):
        if name == "high" and one.numel():
            close(other, one.double(), dtype)
        else:
            assert torch.equal(one, other)


@contextmanager
def in_autocast():
    """Do what torch.autocast("cuda", torch.bfloat16) does with a GPU; without a GPU the torch context has no effect."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def in_fp8(override=None, *, kind=Float8CurrentScaling, enabled=True):
    return te.autocast(enabled=enabled, recipe=kind(backward_override=override))


@pytest.mark.parametrize(("name", "dtype", "single"), sampled(ALL, DTYPES, [False, True]), ids=str)
def test_steps_have_the_bits_of_one_launch(name, dtype, single, one_by_one):
    found, biases = [], []
    for loop in (False, True):
        one_by_one(loop)
        options = {"single_grouped_weight": single, "single_grouped_bias": single}
        layer = make(dtype=dtype, **options)
        x, grad = inputs(layer, dtype=dtype)
        for _ in range(2):  # delayed scaling has measured scales from the second step on
            x.grad = None
            layer.zero_grad()
            y = step(layer, x, grad, ALL[name]())
        found.append((y, x.grad, grads(layer)))
        biases.append(grads(layer, "bias"))
        if name == "delayed":
            # The loop does not quantise the weight of an expert without rows, so only other scales are equal.
            busy = torch.tensor(SPLITS) != 0
            states = [layer.fp8_meta[f"scaling_{way}"].scale for way in ("fwd", "bwd")]
            found[-1] += tuple(scale.view(len(SPLITS), -1)[busy] for scale in states)
    agree(name, found, dtype)
    close(biases[1], biases[0].double(), dtype)
    assert not found[1][2][torch.tensor(SPLITS) == 0].any()


@pytest.mark.parametrize(
    ("name", "splits"), sampled(ALL, [[5], [0], [0, 0, 0], [0, 300], [1] * 17]), ids=str
)
def test_splits(name, splits, one_by_one):
    found = []
    for loop in (False, True):
        one_by_one(loop)
        layer = make(len(splits), 32, 16)
        x, grad = inputs(layer, splits)
        y = step(layer, x, grad, ALL[name](), torch.tensor(splits))
        found.append((y, x.grad, grads(layer)))
    agree(name, found)


@pytest.mark.parametrize(
    ("fuse", "later", "single", "dtype"),
    sampled([False, True], [False, True], [False, True], DTYPES),
    ids=str,
)
def test_outside_of_fp8_bits_are_those_of_linear_layers(fuse, later, single, dtype, one_by_one):
    one_by_one()
    options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": later, "bias": not single}
    layer = make(dtype=dtype, single_grouped_weight=single, **options)
    experts = [
        te.Linear(144, 48, device="cpu", params_dtype=dtype, **options) for _ in range(len(SPLITS))
    ]
    whole = (
        layer.weight if single else torch.stack([getattr(layer, f"weight{e}") for e in range(8)])
    )
    buffer, parts = torch.ones(2, len(SPLITS), 48, 144)
    for number, expert in enumerate(experts):
        with torch.no_grad():
            expert.weight.copy_(whole[number])
            if not single:
                expert.bias.copy_(getattr(layer, f"bias{number}"))
        expert.weight.main_grad = parts[number]
    weights = [getattr(layer, name) for name in layer.weight_names]
    for weight, part in zip(weights, [buffer] if single else buffer, strict=True):
        weight.main_grad = part
    x, grad = inputs(layer, dtype=dtype)
    own = x.detach().clone().requires_grad_()
    layer(x, SPLITS).backward(grad)
    y = torch.cat([expert(part) for expert, part in zip(experts, own.split(SPLITS), strict=True)])
    y.backward(grad)
    for module in (layer, *experts) if later else ():
        module.backward_dw()
    assert torch.equal(layer(x, SPLITS), y)
    assert torch.equal(x.grad, own.grad)
    if fuse:
        assert torch.equal(buffer, parts)
        assert not torch.equal(buffer, torch.ones_like(buffer))
        return
    theirs = [expert.weight.grad for expert in experts]
    assert torch.equal(grads(layer), torch.stack(theirs))
    if not single:
        theirs = [expert.bias.grad for expert in experts]
        assert torch.equal(grads(layer, "bias"), torch.stack(theirs))


@pytest.mark.parametrize(
    ("fuse", "later", "single", "recipe"),
    sampled([False, True], [False, True], [False, True], RECIPES),
    indirect=["recipe"],
)
def test_weight_gradients_go_where_they_are_asked_for(fuse, later, single, recipe, one_by_one):
    found = []
    for loop in (False, True):
        one_by_one(loop)
        options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": later}
        layer = make(bias=False, single_grouped_weight=single, **options)
        buffer = torch.ones(len(SPLITS), 48, 144)
        weights = [getattr(layer, name) for name in layer.weight_names]
        for weight, part in zip(weights, [buffer] if single else buffer, strict=True):
            weight.main_grad = part
        x, grad = inputs(layer)
        step(layer, x, grad, recipe)
        if later:
            assert all(weight.grad is None for weight in weights)
            called = []
            layer.register_wgrad_accumulation_and_reduce_hooks(
                lambda called=called: called.append(1)
            )
            layer.backward_dw()
            layer.backward_dw()  # nothing is left
            assert called == [1]
        found.append((x.grad, buffer if fuse else grads(layer)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
def test_weights_in_fp8(single, recipe, one_by_one):
    found = []
    for loop in (False, True):
        one_by_one(loop)
        torch.manual_seed(3)
        with te.quantized_model_init(recipe=recipe):
            layer = make(bias=False, single_grouped_weight=single)
        x, grad = inputs(layer)
        y = step(layer, x, grad, recipe)
        found.append((y, x.grad, grads(layer)))
    assert all(map(torch.equal, *found))


def test_weights_are_quantised_once_a_step(recipe, one_by_one):
    one_by_one()
    layer = make()
    x, grad = inputs(layer)

    def run(first):
        step(layer, x, grad, recipe, is_first_microbatch=first)

    busy = sum(count != 0 for count in SPLITS)
    assert casts(lambda: run(True)) == busy
    assert casts(lambda: run(False)) == 0
    with torch.no_grad():
        layer.weight4.mul_(2.0)
    assert 1 <= casts(lambda: run(False)) <= busy


def test_returned_biases_leading_dimensions_and_copies(one_by_one):
    one_by_one()
    layer = make(return_bias=True)
    x, _ = inputs(layer)
    x, splits = x.detach()[:344].view(4, 86, -1), [0, 70, 1, 0, 129, 128, 16, 0]
    y, biases = layer(x, splits)
    assert y.shape == (4, 86, 48)
    assert len(biases) == 8
    assert torch.equal(copy.deepcopy(layer)(x, splits)[0], y)


def test_recomputation_and_calibration(recipe, one_by_one):
    one_by_one()
    layer, other = make(), make()
    x, grad = inputs(layer)
    own = x.detach().clone().requires_grad_()
    y = step(layer, x, grad, recipe)
    with te.autocast(recipe=recipe):
        again = te.checkpoint(other, own, SPLITS)
    again.backward(grad)
    assert torch.equal(again, y)
    assert torch.equal(own.grad, x.grad)
    layer = make()
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
        layer(x, SPLITS)
    seen = layer.fp8_meta["scaling_fwd"].amax_history.amax(0)
    for number, part in enumerate(x.detach().split(SPLITS)):
        assert seen[3 * number] == (part.abs().amax().float() if part.numel() else 0.0)


def test_what_the_loop_does_not_take(one_by_one):
    one_by_one()
    layer = make()
    x, _ = inputs(layer)
    with pytest.raises(NotImplementedError, match="dgrad_out"):
        layer(x, SPLITS, out=torch.empty(len(x), 48, dtype=x.dtype))
    with pytest.raises(ValueError, match="add up"):
        layer(x, [1] * 8)
    with pytest.raises(ValueError, match="in_features"):
        layer(x[:, :8], SPLITS)


def test_counts_on_a_gpu_are_cut_off_at_the_rows(one_by_one):
    one_by_one()
    layer = make(3, 32, 16, bias=False)
    x, _ = inputs(layer, [10, 4, 2])
    layer._splits = lambda counts, inp: counts  # as if the counts were on a GPU
    y = layer(x, torch.tensor([10, -3, 1 << 40]))
    assert torch.equal(y, layer(x, torch.tensor([10, 0, 6])))
    y = layer(x, torch.tensor([10, 0, 2]))  # the last rows belong to no expert
    y.sum().backward()
    assert not y[12:].any()
    assert not x.grad[12:].any()


def trio(single=False, **options):
    torch.default_generator.manual_seed(5)
    kinds = {"single_grouped_weight": single, "single_grouped_bias": single}
    return with_biases(
        te.ops.Sequential(
            te.ops.GroupedLinear(len(SPLITS), 64, 96, device="cpu", **kinds, **options),
            te.ops.ScaledSwiGLU(),
            te.ops.GroupedLinear(len(SPLITS), 48, 64, device="cpu", **kinds, **options),
        )
    )


@pytest.mark.parametrize(("name", "later", "single"), sampled(ALL, [False, True], [False, True]))
def test_operations_have_the_bits_of_one_program(name, later, single, one_by_one):
    splits, found, biases = torch.tensor(SPLITS), [], []
    for loop in (False, True):
        one_by_one(loop)
        model = trio(single, delay_wgrad_compute=later)
        torch.default_generator.manual_seed(6)
        x, grad = torch.randn(2, sum(SPLITS), 64)
        x, probs = x.requires_grad_(), torch.rand(sum(SPLITS), requires_grad=True)
        for _ in range(2):
            x.grad = probs.grad = None
            model.zero_grad()
            with te.autocast(enabled=name != "high", recipe=ALL[name]()):
                y = model(x, splits, probs, splits)
            y.backward(grad)
            for place in (2, 0) if later else ():
                model[place].backward_dw()
        named = dict(model.named_parameters())
        grads = [p.grad for key, p in named.items() if "weight" in key]
        biases.append([p.grad for key, p in named.items() if "bias" in key])
        found.append((y, x.grad, probs.grad, *grads))
    agree(name, found)
    for mine, theirs in zip(*biases, strict=True):
        close(mine, theirs.double(), torch.float32)


def test_operations_that_move_are_looked_at_again(one_by_one):
    one_by_one(False)
    model, splits = trio(delay_wgrad_compute=True), torch.tensor(SPLITS)
    x, probs = torch.randn(sum(SPLITS), 64), torch.rand(sum(SPLITS))
    y = model(x, splits, probs, splits)
    assert model.explain().count("native program") == 1
    one_by_one()
    model.to("cpu")  # stands for a GPU without the kernels
    again = model(x, splits, probs, splits)
    assert "Python operation GroupedLinear" in model.explain()
    torch.testing.assert_close(again, y)
    for result in (y, again):  # either path's delayed gradients are found
        model.zero_grad()
        result.sum().backward()
        model[2].backward_dw()
        assert model[2].weight4.grad.any()
    grad = model[2].weight4.grad.clone()
    model[2].backward_dw()  # nothing is left
    assert torch.equal(model[2].weight4.grad, grad)


def test_whole_blocks(recipe, one_by_one):
    found = []
    for loop in (False, True):
        one_by_one(loop)
        torch.default_generator.manual_seed(3)
        block = te.MoE(64, 48, num_experts=4, topk=2, device="cpu", aux_loss_coeff=0.1)
        x = torch.randn(40, 64, requires_grad=True)
        with te.autocast(recipe=recipe):
            y, loss = block(x)
        (y.sum() + loss).backward()
        found.append((y, x.grad, *(p.grad for p in block.parameters())))
        copy.deepcopy(block)(x.detach())
    # Without a program, the router's products are torch's: sums in FP32 of another order.
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@needs_compile
def test_tracing_is_refused_by_name(one_by_one):
    one_by_one()
    layer = make()
    x, _ = inputs(layer)
    torch.compiler.reset()
    message = refusal_of(layer, x, torch.tensor(SPLITS))
    # torch 2.8 may hide the message, but names the class of the error then.
    assert "one by one" in message or "UnsupportedError" in message


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_a_forward_that_torch_repeats(override, loop, use_reentrant, one_by_one):
    """Under "dequantized" the experts run one by one in any case."""
    one_by_one(loop)
    recipe = Float8CurrentScaling(backward_override=override)
    layer = make()
    other = copy.deepcopy(layer)
    x, grad = inputs(layer)
    own = x.detach().clone().requires_grad_()
    y = step(layer, x, grad, recipe)
    with te.autocast(recipe=recipe):
        again = torch.utils.checkpoint.checkpoint(other, own, SPLITS, use_reentrant=use_reentrant)
    again.backward(grad)
    assert torch.equal(again, y)
    assert torch.equal(own.grad, x.grad)
    assert torch.equal(grads(other), grads(layer))


@pytest.mark.parametrize(
    ("single", "later", "recipe"),
    sampled([False, True], [False, True], RECIPES),
    indirect=["recipe"],
)
def test_quantised_weights_outside_of_fp8_add_to_main_grad(single, later, recipe, one_by_one):
    found = []
    for loop in (False, True):
        one_by_one(loop)
        torch.manual_seed(3)
        with te.quantized_model_init(recipe=recipe):
            layer = make(
                bias=False,
                single_grouped_weight=single,
                fuse_wgrad_accumulation=True,
                delay_wgrad_compute=later,
            )
        buffer = torch.ones(len(SPLITS), 48, 144)
        weights = [getattr(layer, name) for name in layer.weight_names]
        for weight, part in zip(weights, [buffer] if single else buffer, strict=True):
            weight.main_grad = part
        x, grad = inputs(layer)
        with pytest.warns(UserWarning, match="dequantised"):
            layer(x, SPLITS).backward(grad)
        if later:
            layer.backward_dw()
        found.append((x.grad, buffer))
    agree("high", found, torch.bfloat16)
    assert not torch.equal(buffer, torch.ones_like(buffer))


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_a_quantised_weight_of_a_linear_layer_outside_of_fp8_adds_to_main_grad(later, recipe):
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(
            32,
            16,
            bias=False,
            device="cpu",
            params_dtype=torch.float32,
            fuse_wgrad_accumulation=True,
            delay_wgrad_compute=later,
        )
    layer.weight.main_grad = torch.ones(16, 32)
    x, grad = torch.randn(8, 32, requires_grad=True), torch.randn(8, 16)
    with pytest.warns(UserWarning, match="dequantised"):
        y = layer(x)
    y.backward(grad)
    if later:
        layer.backward_dw()
    weight = layer.weight.dequantize().detach()
    torch.testing.assert_close(y, x @ weight.T)
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(layer.weight.main_grad, 1 + grad.T @ x.detach())


@pytest.mark.parametrize("before", ["none", "current"])
def test_an_earlier_call_does_not_choose_the_path_of_other_recipes(before):
    torch.manual_seed(0)
    chain = te.ops.Sequential(te.ops.GroupedLinear(3, 32, 48, device="cpu", dtype=torch.float32))
    x, counts = torch.randn(48, 32), torch.tensor([16, 0, 32])
    fresh = copy.deepcopy(chain)
    with torch.no_grad(), in_fp8(None) if before == "current" else nullcontext():
        chain(x, counts)
    results = []
    for one in (fresh, chain):
        with in_fp8("dequantized"):
            results.append(one(x, counts))
            results[-1].square().sum().backward()
    assert torch.equal(*results)
    for one, other in zip(fresh.parameters(), chain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("fp8", [False, True])
def test_delayed_gradients_of_partly_frozen_experts(frozen, fuse, fp8, one_by_one):
    one_by_one()
    layer = te.ops.GroupedLinear(
        2, 64, 64, device="cpu", delay_wgrad_compute=True, accumulate_into_main_grad=fuse
    )
    layer._parameters[f"weight{frozen}"].requires_grad_(False)
    weights = [layer.weight0, layer.weight1]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    x = torch.ones(32, 64, requires_grad=True)
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        layer(x, torch.tensor([16, 16])).sum().backward()
    layer.backward_dw()
    grads = [weight.main_grad if fuse else weight.grad for weight in weights]
    torch.testing.assert_close(grads[1 - frozen], torch.full((64, 64), 16.0))
    assert grads[frozen] is None or not grads[frozen].any()


def test_the_expert_of_a_stack_of_one(recipe, one_by_one):
    with te.quantized_model_init(recipe=recipe):
        layer = te.GroupedLinear(1, 128, 256, bias=False, device="cpu", single_grouped_weight=True)
    (expert,) = stacks.experts_of(layer.weight)
    assert torch.equal(expert.dequantize(), layer.weight.dequantize()[0])
    found = []
    for loop in (False, True):
        one_by_one(loop)
        x = torch.linspace(-1, 1, 16 * 128).view(16, 128).requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(x, [16])
        y[:, ::2].sum().backward()
        found.append((y, x.grad))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 0.1 * other.norm()
