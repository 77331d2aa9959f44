"""Ops inside of an FP8 region: against te_fast.pytorch.Linear, and against plain torch with FP8's error."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compound_reference
import te_fast
import te_fast.pytorch as te
from compound_layers import QUANTIZED, assert_close
from ops_reference import leaf, randomise
from selection import sampled
from te_fast import dispatch
from te_fast.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
)
from te_fast.errors import ShapeError, StateError
from te_fast.pytorch import ops
from te_fast.state.extra_state import unpack
from te_fast.state.pickle_writer import op_state

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]()


class Nothing(ops.Identity):
    """An op of the user's own that does nothing, so that the chain runs in Python."""

    def op_forward(self, ctx, input_, **_):
        return input_


@pytest.fixture(params=["native", "python"])
def between(request):
    return [] if request.param == "native" else [Nothing()]


def linears(*between, bias=True, dtype=torch.bfloat16):
    """Two linear ops in a chain, and layers with the same parameters."""
    options = {"device": "cpu", "dtype": dtype, "bias": bias}
    chain = ops.Sequential(ops.Linear(64, 48, **options), *between, ops.Linear(48, 32, **options))
    randomise(chain)
    layers = [
        te.Linear(*sizes, device="cpu", params_dtype=dtype, bias=bias)
        for sizes in ((64, 48), (48, 32))
    ]
    for layer, op in zip(layers, (chain[0], chain[-1]), strict=True):
        layer.weight.data.copy_(op.weight)
        if bias:
            layer.bias.data.copy_(op.bias)
    return chain, torch.nn.Sequential(*layers)


def step(module, x, grad, recipe, **options):
    with te.autocast(recipe=recipe):
        y = module(x, **options)
    y.backward(grad)
    return y


def distance(got, expected):
    difference = (got.detach().double() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm())


def close(got, expected, bound):
    assert got.shape == expected.shape
    assert distance(got, expected) <= bound


def compare(chain, layers, recipe, steps=3, bound=0.0, rows=16):
    for number in range(steps):
        xs = [leaf(rows, 64, dtype=torch.bfloat16, seed=number) for _ in range(2)]
        grad = leaf(rows, 32, dtype=torch.bfloat16, seed=number + 7).detach()
        y, expected = (step(m, x, grad, recipe) for m, x in zip((chain, layers), xs, strict=True))
        close(y, expected, bound)
        close(xs[0].grad, xs[1].grad, bound)
        for got, want in zip(chain.parameters(), layers.parameters(), strict=True):
            close(got.grad, want.grad, bound)
            got.grad = want.grad = None


# A result that stays in FP8 from one linear op to the next is not rounded to BF16 on the way.
HAND_OVER = 2**-8


@pytest.mark.parametrize("bias", [False, True])
def test_one_linear_is_the_layer(recipe, bias):
    for rows in (8, 16, 32):
        chain, layers = linears(bias=bias)
        x = [leaf(rows, 64, dtype=torch.bfloat16) for _ in range(2)]
        grad = leaf(rows, 48, dtype=torch.bfloat16, seed=1).detach()
        y = step(chain[0], x[0], grad, recipe)
        expected = step(layers[0], x[1], grad, recipe)
        assert torch.equal(y, expected)
        assert torch.equal(x[0].grad, x[1].grad)
        for got, want in zip(chain[0].parameters(), layers[0].parameters(), strict=True):
            close(got.grad, want.grad, 2**-9 if bias else 0.0)


def test_linear_chain(recipe, between):
    compare(*linears(*between), recipe, bound=HAND_OVER * 4)


@pytest.mark.parametrize(
    ("name", "activation", "dtype", "between"),
    sampled(
        RECIPES,
        ["GELU", "SiLU", "ReLU", "SReLU", "SwiGLU", "GEGLU"],
        [torch.float32, torch.bfloat16],
        ["native", "python"],
    ),
    indirect=["between"],
)
def test_mlp(name, activation, dtype, between):
    """Plain torch quantises the reference's operands, as in tests of :class:`te_fast.pytorch.LayerNormMLP`."""
    options = {"device": "cpu", "dtype": dtype}
    gated = activation.endswith("GLU")
    chain = randomise(
        ops.Sequential(
            ops.LayerNorm(64, **options),
            ops.Linear(64, 256, **options),
            *between,
            getattr(ops, activation)(),
            ops.Linear(128 if gated else 256, 64, **options),
        )
    )
    layer = te.LayerNormMLP(
        64, 128 if gated else 256, activation=activation.lower(), device="cpu", params_dtype=dtype
    )
    for own, parameter in zip(layer.parameters(), chain.parameters(), strict=True):
        parameter.data.copy_(parameter.bfloat16())  # FP8 products take a bias in BF16
        own.data.copy_(parameter)
    x = leaf(32, 64, dtype=dtype)
    grad = leaf(32, 64, dtype=dtype, seed=7).detach()
    wanted = compound_reference.quantized(layer, x, grad, name)
    y = step(chain, x, grad, RECIPES[name]())
    found = {
        f"d{name}": p.grad
        for (name, _), p in zip(layer.named_parameters(), chain.parameters(), strict=True)
    }
    # Where rounding to BF16 moves a value across 0, the derivative of a ReLU jumps.
    jumps = dtype == torch.bfloat16 and activation == "ReLU"
    assert_close({"y": y, "dx": x.grad, **found}, wanted, 0.1 if jumps else QUANTIZED[dtype])


@pytest.mark.parametrize(
    ("recipe", "activation", "between"),
    sampled(RECIPES, ["GELU", "QGELU", "SiLU", "ReLU", "SwiGLU", "ReGLU"], ["native", "python"]),
    indirect=["recipe", "between"],
)
def test_a_chain_is_what_its_ops_are_alone(recipe, activation, between):
    """Results differ where a value that is not rounded to BF16 first rounds to the neighbouring FP8 value."""
    gated = activation.endswith("GLU")
    options = {"device": "cpu", "dtype": torch.bfloat16}
    chain = randomise(
        ops.Sequential(
            ops.MakeExtraOutput(),
            ops.RMSNorm(64, **options),
            ops.Linear(64, 256, **options),
            *between,
            getattr(ops, activation)(),
            ops.Linear(128 if gated else 256, 64, bias=False, **options),
            ops.ConstantScale(0.5),
            ops.AddExtraInput(),
        )
    )
    alone = copy.deepcopy(chain)

    def one_by_one(x, extra):
        outputs = []
        for op in alone:
            x = op(x, extra) if isinstance(op, ops.AddExtraInput) else op(x)
            if isinstance(x, tuple):
                outputs.append(x[1])
                x = x[0]
        return x, *outputs

    for number in range(3):
        results = []
        for run, module in ((chain, chain), (one_by_one, alone)):
            module.zero_grad()
            inputs = [leaf(32, 64, dtype=torch.bfloat16, seed=seed + number) for seed in (0, 50)]
            with te.autocast(recipe=recipe):
                outputs = run(*inputs)
            grads = [leaf(32, 64, dtype=torch.bfloat16, seed=seed).detach() for seed in (7, 8)]
            torch.autograd.backward(outputs, grads)
            gradients = [tensor.grad for tensor in (*inputs, *module.parameters())]
            results.append([*outputs, *gradients])
        # Where a value crosses 0, the derivative of a ReLU jumps.
        bound = 0.1 if "Re" in activation else 0.06
        for got, want in zip(*results, strict=True):
            close(got, want, bound)


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
def test_region_of_another_recipe():
    chain, layers = linears()
    for make in (*RECIPES.values(), *RECIPES.values()):
        compare(chain, layers, make(), steps=1, bound=HAND_OVER * 4)
    compare(chain, layers, None, steps=0)
    x = leaf(16, 64, dtype=torch.bfloat16)
    close(chain(x), layers(x), 2**-8)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_rows_are_padded_where_they_may_be(rows, between):
    with pytest.raises(ValueError, match="multiple of 8"):
        compare(*linears(*between), Float8BlockScaling(), rows=rows)
    former = te_fast.auto_pad(True)
    try:
        compare(*linears(*between), Float8BlockScaling(), rows=rows, bound=HAND_OVER * 4)
    finally:
        te_fast.auto_pad(former)


def test_frozen_weights(recipe, between):
    chain, _ = linears(*between)
    for parameter in chain.parameters():
        parameter.requires_grad_(False)
    x = leaf(16, 64, dtype=torch.bfloat16)
    step(chain, x, torch.ones(16, 32, dtype=torch.bfloat16), recipe)
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in chain.parameters())
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert not chain(x).requires_grad


@pytest.mark.parametrize("recipe", ["current", "block"], indirect=True)
def test_retained_graphs(recipe, between):
    # Delayed scaling is left out: its first backward changes the scales that a second backward uses.
    chain, _ = linears(*between)
    x = leaf(16, 64, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe):
        y = chain(x)
    tensors = [x, *chain.parameters()]
    once = torch.autograd.grad(y.sum(), tensors, retain_graph=True)
    again = torch.autograd.grad(y.sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("outside", [False, True])
def test_activation_checkpointing(outside, between):
    chain, _ = linears(*between)
    x = leaf(16, 64, dtype=torch.bfloat16)
    recipe = Float8CurrentScaling()

    def run(x):
        with te.autocast(recipe=recipe, enabled=not outside):
            return chain(x)

    def forward():
        with te.autocast(recipe=recipe, enabled=outside):
            return checkpoint(chain if outside else run, x, use_reentrant=False)

    with te.autocast(recipe=recipe):
        expected = torch.autograd.grad(chain(x).sum(), [x, *chain.parameters()])
    got = torch.autograd.grad(forward().sum(), [x, *chain.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_weights_are_cached_over_microbatches(recipe):
    chain, _ = linears()
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    casts = []
    for is_first in (True, False, False, None, True):
        dispatch.reset_counters()
        with te.autocast(recipe=recipe), torch.no_grad():
            chain(x, is_first_microbatch=is_first)
        casts.append(dispatch.counters()["weight_casts"])
    assert casts[0] == 2
    assert casts[1:3] == [0, 0]
    assert casts[4] == 2


@pytest.mark.parametrize("depth", ["op", "chain", "model"])
def test_kept_weights_can_be_dropped(recipe, depth):
    """A layer does not notice writes through `weight.data`, so the caller drops the kept weights."""
    chain, _ = linears()
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe), torch.no_grad():
        before = chain(x)
        chain[0].weight.data.zero_()
        dropped = {"op": chain[0], "chain": chain, "model": torch.nn.ModuleList([chain])}[depth]
        dispatch.drop_weight_cache(dropped)
        after = chain(x)
        assert not torch.equal(after, before)
        assert torch.equal(after, copy.deepcopy(chain)(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_bias_behind_an_identity_gets_its_gradient(recipe, frozen):
    """The gradient's cast does not sum a bias gradient behind an identity, which once was uninitialised memory."""
    linear, bias = ops.BasicLinear(64, 48, device="cpu"), ops.Bias(48, device="cpu")
    linear.weight.requires_grad_(not frozen)
    x, grad = leaf(16, 64), leaf(16, 48, seed=7).detach()
    step(ops.Sequential(linear, ops.AllReduce(), bias), x, grad, recipe)
    close(bias.bias.grad, grad.double().sum(0), 1e-6)


def test_first_microbatches_are_told_by_truth(between):
    """Chains accept any true or false value from the first call on, as layers do."""
    chain, _ = linears(*between)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    casts = []
    for is_first in (1, 0, torch.tensor(False), torch.tensor(True)):
        dispatch.reset_counters()
        with te.autocast(recipe=Float8CurrentScaling()), torch.no_grad():
            chain(x, is_first_microbatch=is_first)
        casts.append(dispatch.counters()["weight_casts"])
    assert casts == [2, 0, 0, 2]


def test_an_optimizer_step_renews_cached_weights(recipe):
    chain, layers = linears()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (chain, layers)]
    for number in range(3):
        grad = leaf(16, 32, dtype=torch.bfloat16, seed=number).detach()
        results = []
        for module, optimizer in zip((chain, layers), optimizers, strict=True):
            x = leaf(16, 64, dtype=torch.bfloat16, seed=number)
            optimizer.zero_grad()
            results.append(step(module, x, grad, recipe))
            optimizer.step()
        close(*results, HAND_OVER * 4)


def test_main_grad(recipe, between):
    options = {"device": "cpu", "dtype": torch.bfloat16, "accumulate_into_main_grad": True}
    chain = randomise(ops.Sequential(ops.Linear(64, 48, **options), *between))
    weight = chain[0].weight
    weight.main_grad = torch.ones(48, 64)
    x = leaf(16, 64, dtype=torch.bfloat16)
    step(chain, x, torch.ones(16, 48, dtype=torch.bfloat16), recipe)
    assert weight.grad is None
    expected = 1 + torch.ones(48, 16) @ x.detach().float()
    close(weight.main_grad, expected, 0.05)


@pytest.mark.parametrize("first", [None, False, True])
def test_main_grad_of_no_rows(recipe, between, first):
    options = {"device": "cpu", "dtype": torch.bfloat16, "accumulate_into_main_grad": True}
    chain = randomise(ops.Sequential(ops.Linear(64, 48, **options), *between))
    weight = chain[0].weight
    weight.main_grad = torch.ones(48, 64)
    weight.grad_added_to_main_grad = False
    x = leaf(0, 64, dtype=torch.bfloat16)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = chain(x, is_first_microbatch=first)
    y.sum().backward()
    assert (weight.main_grad == (0.0 if first else 1.0)).all()
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    assert not chain[0].bias.grad.any()
    assert x.grad.shape == (0, 64)


# Delayed scaling ----------------------------------------------------------------------------------


def scales(op):
    return [op._delayed_state(mode).scale for mode in ("forward", "backward")]


def test_scales_are_those_of_the_layer(between):
    recipe = DelayedScaling(amax_history_len=4)
    chain, layers = linears(*between)
    for number in range(5):
        grad = leaf(16, 32, dtype=torch.bfloat16, seed=number + 7).detach()
        for module in (chain, layers):
            step(module, leaf(16, 64, dtype=torch.bfloat16, seed=number), grad, recipe)
        forward, backward = scales(chain[0].basic_ops[0])
        assert forward.shape == (2,)
        assert backward.shape == (1,)
        meta = layers[0].fp8_meta
        assert torch.equal(forward, meta["scaling_fwd"].scale[:2])
        assert torch.allclose(backward, meta["scaling_bwd"].scale[:1], rtol=0.1)
    assert not torch.equal(forward, torch.ones(2))
    assert scales(chain[0].basic_ops[1] if False else chain[-1].basic_ops[0])[0].shape == (2,)


class Failing(Nothing):
    fail = False

    def op_forward(self, ctx, input_, **_):
        if self.fail:
            message = "on purpose"
            raise ZeroDivisionError(message)
        return input_


def late_failure(kind):
    """Return a chain, and a way to run it that may fail behind its first linear op."""
    torch.default_generator.manual_seed(5)
    options = {"device": "cpu", "dtype": torch.bfloat16}
    first, second = ops.Linear(64, 48, **options), ops.Linear(48, 64, **options)
    if kind == "own op":
        failing = Failing()
        chain = ops.Sequential(first, failing, second)

        def run(x, *, fail):
            failing.fail = fail
            return chain(x)

        return chain, run, (ZeroDivisionError, "on purpose")
    if kind == "reshape":
        chain = ops.Sequential(first, ops.Reshape((16, 48)), second)
        return chain, lambda x, *, fail: chain(x[: 8 if fail else 16]), (ShapeError, "Reshape")
    if kind == "dropout":
        dropout = ops.Dropout(1e-12)
        chain = ops.Sequential(first, dropout, second)

        def run(x, *, fail):
            dropout.dropout_probability = 2.0 if fail else 1e-12
            return chain(x[: 8 if fail else 16])

        return chain, run, (RuntimeError, "bernoulli_")
    if kind == "channel":
        make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
        make.set_extra_output_channel(0, "residual", output_to_caller=False)
        add.set_extra_input_channel(0, "residual")
        chain = ops.Sequential(make, first, second, add, ops.AddExtraInput())
    else:
        chain = ops.Sequential(first, torch.nn.Tanh(), second, ops.AddExtraInput())

    def run(x, *, fail):
        return chain(x, torch.zeros_like(x)[: 8 if fail else None])

    return chain, run, (ShapeError, "AddExtraInput")


LATE = pytest.mark.parametrize("kind", ["own op", "reshape", "dropout", "channel", "plain module"])


def late_state(chain):
    found = []
    for module in chain.modules():
        if isinstance(module, ops.BasicLinear):
            states = [module._delayed_state(mode) for mode in ("forward", "backward")]
            found += [t.clone() for s in states for t in (s.scale, s.amax_history)]
    return found


@LATE
@pytest.mark.parametrize("is_of_factory", [False, True])
def test_a_failed_forward_leaves_the_scales_as_they_were(kind, is_of_factory):
    chain, run, (error, message) = late_failure(kind)
    recipe = DelayedScaling(amax_history_len=4)
    if is_of_factory:
        recipe = CustomRecipe(qfactory=lambda role: te.DelayedScalingRequest(amax_history_len=4))
    with te.autocast(recipe=recipe):
        y = run(leaf(16, 64, dtype=torch.bfloat16), fail=False)
    y.backward(torch.ones_like(y))
    before = late_state(chain)
    x = 100 * leaf(16, 64, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe):
        with pytest.raises(error, match=message):
            run(x, fail=True)
        assert all(map(torch.equal, late_state(chain), before))
    assert all(map(torch.equal, late_state(chain), before))
    with pytest.raises(error, match=message), te.autocast(recipe=recipe):
        run(x, fail=True)
    assert all(map(torch.equal, late_state(chain), before))


@LATE
@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_forward_leaves_no_trace_in_what_follows(kind, at):
    """The first forward or a later one fails; the same region then continues as if nothing had failed."""
    left = []
    for fails in (False, True):
        chain, run, (error, _) = late_failure(kind)
        recipe = DelayedScaling(amax_history_len=4)
        for number in range(4):
            x = leaf(16, 64, dtype=torch.bfloat16, seed=number)
            with te.autocast(recipe=recipe):
                if fails and number == at:
                    with pytest.raises(error):
                        run(100 * x, fail=True)
                y = run(x, fail=False)
            y.backward(torch.ones_like(y) * 3**number)
            left += [y, x.grad, *(p.grad.clone() for p in chain.parameters()), *late_state(chain)]
            chain.zero_grad()
    half = len(left) // 2
    assert all(map(torch.equal, left[:half], left[half:]))


def trained(recipe=None):
    chain, _ = linears()
    recipe = recipe or DelayedScaling(amax_history_len=4, margin=1, amax_compute_algo="most_recent")
    grad = leaf(16, 32, dtype=torch.bfloat16, seed=7).detach()
    for number in range(3):
        step(chain, leaf(16, 64, dtype=torch.bfloat16, seed=number), grad, recipe)
    return chain, recipe


def infer(chain, recipe):
    with torch.no_grad(), te.autocast(recipe=copy.copy(recipe)):
        return chain(leaf(16, 64, dtype=torch.bfloat16, seed=9))


def test_checkpoint_keeps_the_scales():
    chain, recipe = trained()
    state = chain.state_dict()
    assert [key for key in state if key.endswith("_extra_state")] == [
        "0.basic_ops.0._extra_state",
        "1.basic_ops.0._extra_state",
    ]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other, _ = linears()
    infer(other, recipe)
    other.load_state_dict(torch.load(file, weights_only=True))
    for index in range(2):
        for got, want in zip(
            scales(other[index].basic_ops[0]), scales(chain[index].basic_ops[0]), strict=True
        ):
            assert torch.equal(got, want)
    assert torch.equal(infer(other, recipe), infer(chain, recipe))


@pytest.mark.parametrize("loads", [1, 2])
def test_checkpoint_of_an_op_without_parameters(loads):
    """Quantize does not know its device before it runs; the linear op in front creates scales, too."""
    chain, other = (
        ops.Sequential(ops.Linear(64, 48, device="cpu"), ops.ReLU(), ops.Quantize(backward=True))
        for _ in range(2)
    )
    recipe = DelayedScaling(amax_history_len=4)
    for number in range(2):
        step(chain, leaf(16, 64, seed=number), leaf(16, 48, seed=7).detach(), recipe)
    for _ in range(loads):
        other.load_state_dict(chain.state_dict())
    for got, want in zip(scales(other[2]), scales(chain[2]), strict=True):
        assert torch.equal(got, want)
        assert (got != 1).all()
    assert torch.equal(infer(other, recipe), infer(chain, recipe))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_keep_scales_of_their_own(duplicate):
    chain, recipe = trained()
    other = duplicate(chain)
    before = [scale.clone() for scale in scales(chain[0].basic_ops[0])]
    assert torch.equal(infer(other, recipe), infer(chain, recipe))
    grad = torch.ones(16, 32, dtype=torch.bfloat16)
    step(other, 50 * leaf(16, 64, dtype=torch.bfloat16).detach(), grad, recipe)
    assert torch.equal(scales(chain[0].basic_ops[0])[1], before[1])


def test_states_of_transformer_engine_load():
    chain, recipe = trained()
    other, _ = linears()
    state = other.state_dict()
    for index in range(2):
        key = f"{index}.basic_ops.0._extra_state"
        own = unpack(chain.state_dict()[key], layer="test")
        state[key] = torch.frombuffer(bytearray(op_state(own)), dtype=torch.uint8)
        state[f"{index}.basic_ops.1._extra_state"] = torch.empty(0, dtype=torch.uint8)
    other.load_state_dict(state)
    for got, want in zip(scales(other[0].basic_ops[0]), scales(chain[0].basic_ops[0]), strict=True):
        assert torch.equal(got, want)
    assert other[0].basic_ops[0]._fp8_metas["forward"]["recipe"].margin == 1
    assert torch.equal(infer(other, recipe), infer(chain, recipe))


def test_states_that_do_not_fit_are_refused():
    chain, _ = trained()
    layer = te.Linear(64, 48, device="cpu", params_dtype=torch.bfloat16)
    grad = torch.ones(16, 48, dtype=torch.bfloat16)
    step(layer, leaf(16, 64, dtype=torch.bfloat16), grad, DelayedScaling())
    before = [scale.clone() for scale in scales(chain[0].basic_ops[0])]
    op = chain[0].basic_ops[0]
    with pytest.raises(StateError, match="belongs to another op"):
        op.set_extra_state(layer.state_dict()["_extra_state"])
    with pytest.raises(StateError, match="cannot read _extra_state"):
        op.set_extra_state(torch.ones(7, dtype=torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(scales(op), before, strict=True))
    op.reset_recipe_state(recipe=None)
    assert "0.basic_ops.0._extra_state" not in chain.state_dict()


def test_history_length_follows_the_recipe():
    chain, _ = trained()
    grad = torch.ones(16, 32, dtype=torch.bfloat16)
    step(chain, leaf(16, 64, dtype=torch.bfloat16), grad, DelayedScaling(amax_history_len=9))
    state = chain[0].basic_ops[0]._delayed_state("forward")
    assert state.amax_history.shape == (9, 2)


# Quantize -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True)])
def test_quantize(recipe, forward, backward):
    op = ops.Quantize(forward=forward, backward=backward)
    x = leaf(16, 128, dtype=torch.bfloat16)
    grad = leaf(16, 128, dtype=torch.bfloat16, seed=1).detach()
    y = step(op, x, grad, recipe)
    options = {}
    if recipe.delayed():
        options = {"scale": torch.ones(1), "amax": torch.zeros(1)}
    for got, source, role, wanted in (
        (y, x.detach(), "input", forward),
        (x.grad, grad, "grad", backward),
    ):
        quantized = dispatch.quantize(source, recipe, role=role, **options)
        rounded = dispatch.dequantize(quantized, torch.bfloat16)
        assert torch.equal(got, rounded if wanted else source)
        assert not torch.equal(rounded, source)
    assert torch.equal(op(x), x)


def growing_steps(chain, recipe, cols):
    """Results and gradients of steps whose growing inputs saturate under delayed scaling."""
    results = []
    for number in range(4):
        x = leaf(32, cols, dtype=torch.bfloat16, seed=number)
        with torch.no_grad():
            x.mul_(1 + number)
        chain.zero_grad()
        with te.autocast(recipe=recipe):
            y = chain(x)
        y.backward(leaf(*y.shape, dtype=torch.bfloat16, seed=9).detach() * (1 + number))
        results += [y, x.grad, *(parameter.grad for parameter in chain.parameters())]
    return results


@pytest.mark.parametrize(
    ("recipe", "forward", "backward", "bias", "native"),
    sampled(
        RECIPES,
        [
            pytest.param(True, False),
            pytest.param(False, True),
            pytest.param(True, True),
        ],
        [True, False],
        [True, False],
    ),
    indirect=["recipe"],
)
def test_linear_ops_beside_quantize_round(recipe, forward, backward, bias, native):
    """Quantize beside a linear op uses the linear op's own quantisation; two scales would saturate twice."""
    options = {"device": "cpu", "dtype": torch.bfloat16, "bias": bias}
    first, second = ops.Linear(64, 48, **options), ops.Linear(48, 32, **options)
    between = [] if native else [Nothing()]
    quantize = ops.Quantize(forward=forward, backward=backward)
    chain = ops.Sequential(*between, first, quantize, second, *between)
    randomise(chain)
    plain = copy.deepcopy(ops.Sequential(*between, first, second, *between))
    ours, theirs = (growing_steps(c, copy.deepcopy(recipe), 64) for c in (chain, plain))
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(got, wanted)
    assert quantize._delayed_state("forward") is quantize._delayed_state("backward") is None
    assert ("Python operation" in ops_of(chain)) != native


def ops_of(chain):
    return "".join(line for line in chain.explain().splitlines(keepends=True) if "note" not in line)


def test_quantize_before_a_linear_op_rounds_the_gradient_alone(recipe):
    options = {"device": "cpu", "dtype": torch.bfloat16}
    quantize, linear = ops.Quantize(forward=True, backward=True), ops.Linear(64, 48, **options)
    chain = ops.Sequential(quantize, linear)
    randomise(chain)
    plain = ops.Sequential(copy.deepcopy(linear))
    ours, theirs = (growing_steps(c, copy.deepcopy(recipe), 64) for c in (chain, plain))
    of_each = len(ours) // 4
    for number, (got, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if number % of_each != 1:
            assert torch.equal(got, wanted)
    dx = theirs[1]
    scale = {"scale": torch.ones(1), "amax": torch.zeros(1)} if recipe.delayed() else {}
    rounded = dispatch.dequantize(dispatch.quantize(dx, recipe, role="grad", **scale), dx.dtype)
    assert torch.equal(ours[1], rounded)
    assert not torch.equal(rounded, dx)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override_leaves_the_gradient_of_quantize(override):
    recipe = Float8CurrentScaling(backward_override=override)
    x = leaf(16, 128, dtype=torch.bfloat16)
    grad = leaf(16, 128, dtype=torch.bfloat16, seed=1).detach()
    y = step(ops.Quantize(forward=True, backward=True), x, grad, recipe)
    assert not torch.equal(y, x)
    assert torch.equal(x.grad, grad)


def test_quantize_keeps_scales():
    op = ops.Quantize(forward=True, backward=True)
    recipe = DelayedScaling(amax_history_len=2, fp8_format=Format.HYBRID)
    x = torch.full((8, 16), 3.0, requires_grad=True)
    for _ in range(2):
        step(op, x, torch.full((8, 16), 5.0), recipe)
    assert torch.equal(op._delayed_state("forward").scale, torch.tensor([448 / 3.0]))
    assert torch.equal(op._delayed_state("backward").scale, torch.tensor([57344 / 5.0]))
    other = ops.Quantize(forward=True, backward=True)
    other.load_state_dict(op.state_dict())
    assert torch.equal(other._delayed_state("forward").scale, torch.tensor([448 / 3.0]))
    one_way = ops.Quantize()
    step(one_way, x, torch.full((8, 16), 5.0), recipe)
    again = ops.Quantize()
    again.load_state_dict(one_way.state_dict())
    assert again._delayed_state("backward") is None
    assert torch.equal(
        again._delayed_state("forward").scale, one_way._delayed_state("forward").scale
    )
