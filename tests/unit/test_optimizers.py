"""FusedAdam and FusedSGD beside plain FP64 arithmetic."""

import copy
import importlib
import pickle

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import ArgumentError, ShapeError, StateError, TeFastError, UnsupportedError
from te_fast.optimizers import stored
from te_fast.pytorch import optimizers
from te_fast.pytorch.optimizers import (
    FusedAdam,
    FusedSGD,
)

SHAPES = [(16, 32), (7,), (3, 5, 2), (1,)]
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Adam:
    """Adam in FP64 as in the paper, with weight decay apart from the gradient or added to the gradient."""

    def __init__(self, weights, *, adamw=True, correct=True):
        self.weights = [weight.detach().double() for weight in weights]
        self.m = [torch.zeros_like(weight) for weight in self.weights]
        self.v = [torch.zeros_like(weight) for weight in self.weights]
        self.step_count, self.adamw, self.correct = 0, adamw, correct

    def step(self, grads):
        (beta1, beta2), lr, decay = OPTIONS["betas"], OPTIONS["lr"], OPTIONS["weight_decay"]
        self.step_count += 1
        for w, m, v, grad in zip(self.weights, self.m, self.v, grads, strict=True):
            g = grad.double() if self.adamw else grad.double() + decay * w
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g * g)
            first = 1 - beta1**self.step_count if self.correct else 1.0
            second = 1 - beta2**self.step_count if self.correct else 1.0
            update = (m / first) / ((v / second).sqrt() + OPTIONS["eps"])
            w.sub_(lr * (update + (decay * w if self.adamw else 0.0)))


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def gradients(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def train(optimizer, weights, reference, steps=4, dtype=torch.float32, name="grad"):
    for step in range(steps):
        grads = gradients(step, dtype)
        for weight, grad in zip(weights, grads, strict=True):
            setattr(weight, name, grad.clone())
        optimizer.step()
        if reference is not None:
            reference.step(grads)


def difference(weights, reference):
    return max(
        float((got.detach().double() - wanted).abs().max())
        for got, wanted in zip(weights, reference, strict=True)
    )


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("adamw", [True, False])
def test_adam_is_that_of_fp64(adamw, correct, capturable):
    weights = parameters()
    reference = Adam(weights, adamw=adamw, correct=correct)
    options = {"adam_w_mode": adamw, "bias_correction": correct, "capturable": capturable}
    optimizer = FusedAdam(weights, **OPTIONS, **options)
    train(optimizer, weights, reference)
    assert difference(weights, reference.weights) < 2e-6
    assert int(optimizer.param_groups[0]["step"]) == 4


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("remainders", [False, True])
def test_master_weights_are_fp32(dtype, grad_dtype, remainders):
    weights = parameters(dtype)
    reference = Adam(weights)
    optimizer = FusedAdam(
        weights,
        **OPTIONS,
        master_weights=True,
        use_decoupled_grad=True,
        store_param_remainders=remainders,
    )
    train(optimizer, weights, reference, dtype=grad_dtype, name="decoupled_grad")
    keeps_remainders = remainders and dtype is torch.bfloat16
    for weight, wanted in zip(weights, reference.weights, strict=True):
        master = optimizer.state[weight]["master_param"]
        assert master.dtype is (torch.int16 if keeps_remainders else torch.float32)
        if keeps_remainders:
            master = stored.join(weight.detach(), master)
            # Halves round away from zero, so that a weight is within this bound of its master.
            assert (weight.double() - master.double()).abs().max() <= 2.0**-8 * master.abs().max()
        else:
            assert torch.equal(weight.detach(), master.to(dtype))
        assert (master.double() - wanted).abs().max() < 2e-6
    optimizer.zero_grad()
    assert all(weight.decoupled_grad is None for weight in weights)


def test_a_state_that_is_not_there_is_named():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([weight])
    with pytest.raises(KeyError, match="initialize_state") as caught:
        optimizer.get_unscaled_state(weight, "exp_avg")
    assert isinstance(caught.value, TeFastError)
    assert not optimizer.state
    optimizer.set_scaled_state(weight, "exp_avg", torch.ones(4))
    weight.grad = torch.ones(4)
    with pytest.raises(TeFastError, match=r"no state 'exp_avg_sq', only \['exp_avg'\]"):
        optimizer.step()


@pytest.mark.parametrize(
    ("first", "second", "tolerance"),
    [
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float16, 2e-3),
        (torch.uint8, torch.float32, 3e-2),
        (torch.uint8, torch.float16, 3e-2),
    ],
)
def test_moments_of_fewer_bits(first, second, tolerance):
    weights = parameters()
    reference = Adam(weights)
    optimizer = FusedAdam(weights, **OPTIONS, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    train(optimizer, weights, reference)
    assert difference(weights, reference.weights) < tolerance
    for weight, m, v in zip(weights, reference.m, reference.v, strict=True):
        for name, wanted, dtype in (("exp_avg", m, first), ("exp_avg_sq", v, second)):
            kept, values = optimizer.state[weight][name], optimizer.get_unscaled_state(weight, name)
            size = 1 if dtype is torch.uint8 else torch.empty(0, dtype=dtype).element_size()
            held = kept._data if dtype is torch.uint8 else kept
            assert held.element_size() == size
            assert (values.double() - wanted).abs().max() <= 0.07 * wanted.abs().max()


@pytest.mark.parametrize(
    "options",
    [
        {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
        {"master_weights": True, "master_weight_dtype": torch.float16},
    ],
)
def test_a_parameter_may_be_one_number(options):
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = FusedAdam([weight], lr=0.5, **options)
    for _ in range(2):
        weight.grad = torch.tensor(2.0)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert weight.shape == ()
    assert abs(weight.item()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_states_with_scales_take_any_magnitude(dtype):
    weight = torch.nn.Parameter(torch.zeros(4))
    tiny = [[number, 0.0, -number, number / 2] for number in (1e-20, 1e-36, 1e-38)]
    for values in ([0.0, 0.0, 0.0, 0.0], *tiny, [1e30, -1e30, 0.0, 1e29]):
        kept, scale = stored.make(weight.detach(), dtype)
        stored.write(kept, scale, torch.tensor(values))
        got = stored.read(kept, scale)
        assert torch.allclose(got, torch.tensor(values), rtol=0.07, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_a_weight_without_gradients_stays_where_it_is(dtype):
    """The second moment decays to numbers whose scale has no finite reciprocal, as for an expert without tokens."""
    weight = torch.nn.Parameter(torch.ones(2, 4))
    optimizer = FusedAdam([weight], betas=(0.9, 0.5), exp_avg_sq_dtype=dtype)
    for step in range(160):
        weight.grad = torch.tensor([[0.0] * 4, [float(step == 0)] * 4])
        optimizer.step()
    assert torch.equal(weight[0], torch.ones(4))
    assert weight[1].isfinite().all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
def test_remainders_are_the_bits_that_bf16_lacks(bits):
    edges = [0, 1 << 31, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F808000, 1]
    words = torch.tensor(bits + edges, dtype=torch.int64)
    values = (words - ((words >> 31) << 32)).to(torch.int32).view(torch.float32)
    rounded = torch.empty(values.shape, dtype=torch.bfloat16)
    remainder = torch.empty(values.shape, dtype=torch.int16)
    stored.split(values, rounded, remainder)
    again = stored.join(rounded, remainder)
    is_nan = values.isnan()
    assert torch.equal(again.isnan(), is_nan)
    assert torch.equal(rounded.isnan(), is_nan)
    assert torch.equal(again[~is_nan].view(torch.int32), values[~is_nan].view(torch.int32))
    finite = values.isfinite() & (values.abs() < 3e38)
    step = torch.where(finite, values, 0.0).double().abs() * 2.0**-8 + 1e-38
    assert ((rounded.double() - values.double()).abs() <= step)[finite].all()


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()]
)
def test_quantised_parameters_are_their_masters_quantised(recipe):
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(128, 128, bias=False, device="cpu", params_dtype=torch.float32)
    start = layer.weight.dequantize()
    optimizer = FusedAdam(layer.parameters(), **OPTIONS, master_weights=True)
    twin = torch.nn.Parameter(start.clone())
    plain = FusedAdam([twin], **OPTIONS)
    for seed in range(2):
        grad = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))
        layer.weight.grad, twin.grad = grad, grad.clone()
        optimizer.step()
        plain.step()
    assert torch.equal(optimizer.state[layer.weight]["master_param"], twin.detach())
    expected = copy.deepcopy(layer.weight._quantizer)(twin.detach())
    assert torch.equal(layer.weight.dequantize(), expected.dequantize())


def test_quantised_parameters_need_master_weights():
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = te.Linear(16, 16, bias=False, device="cpu", params_dtype=torch.float32)
    layer.weight.grad = torch.ones(16, 16)
    with pytest.raises(StateError, match="master_weights=True"):
        FusedAdam(layer.parameters()).step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capturable": True},
        {"master_weights": True, "store_param_remainders": True},
        {"master_weights": True, "master_weight_dtype": torch.float16},
        {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.bfloat16},
        {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    ],
    ids=str,
)
def test_a_loaded_state_goes_on_where_it_was(options):
    weights = parameters(torch.bfloat16)
    optimizer = FusedAdam(weights, **OPTIONS, **options)
    train(optimizer, weights, None, steps=3, dtype=torch.bfloat16)
    kept = copy.deepcopy(optimizer.state_dict())
    for state in kept["state"].values():
        for name, value in state.items():
            is_remainder = name == "master_param" and "store_param_remainders" in options
            assert value.dtype is (torch.int16 if is_remainder else torch.float32)
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    other = FusedAdam(twins, **OPTIONS, **options)
    other.load_state_dict(kept)
    for each, own in ((optimizer, weights), (other, twins)):
        for weight, grad in zip(own, gradients(9, torch.bfloat16), strict=True):
            weight.grad = grad
        each.step()
        assert int(each.param_groups[0]["step"]) == 4
    for weight, twin in zip(weights, twins, strict=True):
        # FP16 and FP8 states are scaled anew when they are loaded, which rounds them again.
        exact = not {torch.float16, torch.uint8} & set(options.values())
        assert torch.allclose(weight, twin, rtol=0 if exact else 2**-7, atol=0 if exact else 1e-3)


def test_hooks_of_loading_change_and_see_states():
    weight, other = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    saved, made = FusedAdam([weight]), FusedAdam([other])
    weight.grad = torch.ones_like(weight)
    saved.step()

    def double(optimizer, state):
        states = {
            number: {name: value * 2 for name, value in values.items()}
            for number, values in state["state"].items()
        }
        return {**state, "state": states}

    seen = []
    made.register_load_state_dict_pre_hook(double)
    made.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    for _ in range(2):
        made.load_state_dict(saved.state_dict())
        for name, value in saved.state[weight].items():
            assert torch.equal(made.state[other][name], value * 2)
    assert seen == [1, 1]
    assert made.param_groups[0]["step"] == 1
    assert len(made._optimizer_load_state_dict_pre_hooks) == 1


def test_states_of_another_kind_are_refused():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    kept = FusedAdam([weight], master_weights=True, store_param_remainders=True)
    kept.step()
    other = FusedAdam([weight], master_weights=True)
    with pytest.raises(StateError, match="store_param_remainders") as raised:
        other.load_state_dict(kept.state_dict())
    assert isinstance(raised.value, AssertionError)  # Transformer Engine's


def _wide(state):
    state["exp_avg"] = state["exp_avg"][:1]


def _flat(state):
    state["exp_avg_sq"] = torch.zeros(3)


def _less(state):
    del state["master_param"]


def _more(state):
    state["momentum"] = torch.zeros(2, 4)


def _other(state):
    state["exp_avg"] = "text"


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (_wide, r"exp_avg of a parameter of shape \[2, 4\] .* got \[1, 4\]"),
        (_flat, r"exp_avg_sq of a parameter .* got \[3\]"),
        (_less, "the state of parameter 1 lacks master_param"),
        (_more, "no state 'momentum'"),
        (_other, "exp_avg must be torch.float32, got str"),
    ],
)
def test_a_state_that_does_not_fit_leaves_the_optimizers_own(spoil, match):
    weights = [torch.nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = FusedAdam(weights, master_weights=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(kept)
    other["state"][0]["exp_avg"].fill_(7.0)
    other["param_groups"][0]["lr"] = 5.0
    spoil(other["state"][1])
    with pytest.raises(StateError, match=match):
        optimizer.load_state_dict(other)
    left = optimizer.state_dict()
    assert left["param_groups"] == kept["param_groups"]
    for number, state in kept["state"].items():
        for name, value in state.items():
            assert torch.equal(left["state"][number][name], value)
    with pytest.raises(ArgumentError, match=r"groups of \[1\] parameters, and the state of \[2\]"):
        FusedAdam(weights[:1]).load_state_dict(kept)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize(
    "make",
    [
        lambda w: FusedAdam(w, **OPTIONS, master_weights=True, exp_avg_dtype=torch.float16),
        lambda w: FusedAdam(w, **OPTIONS, capturable=True),
        lambda w: FusedSGD(w, lr=0.1, momentum=0.5),
    ],
)
def test_copies_of_optimizers_go_on(make, copied):
    weights = parameters()
    both = [make(weights)]
    for step in range(2):
        for optimizer in both:
            group = optimizer.param_groups[0]
            optimizer.zero_grad()
            for weight, grad in zip(group["params"], gradients(step), strict=True):
                weight.grad = grad
            optimizer.step()
        if step == 0:
            both.append(copied(both[0]))
    one, other = (optimizer.param_groups[0]["params"] for optimizer in both)
    for weight, twin in zip(one, other, strict=True):
        assert weight is not twin
        assert torch.equal(weight, twin)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (FusedAdam, {"lr": -1.0}),
        (FusedAdam, {"eps": -1.0}),
        (FusedAdam, {"weight_decay": "much"}),
        (FusedAdam, {"betas": 0.9}),
        (FusedAdam, {"betas": (0.9, 1.0)}),
        (FusedSGD, {"lr": -1.0}),
        (FusedSGD, {"lr": 0.1, "momentum": -1.0}),
        (FusedSGD, {"lr": 0.1, "nesterov": True}),
    ],
)
def test_numbers_that_no_step_can_use(optimizer, options):
    name = next(reversed(options))
    with pytest.raises(ArgumentError, match=f"{optimizer.__name__}: {name}"):
        optimizer(parameters(), **options)


class Scaler:
    """The part of a GradScaler that FusedAdam uses."""

    def __init__(self, scale, found):
        self.scale, self.found = torch.tensor(scale), torch.tensor([float(found)])

    def is_enabled(self):
        return True

    def _check_inf_per_device(self, optimizer):
        return {torch.device("cpu"): self.found}

    def _get_scale_async(self):
        return self.scale


def test_a_scaled_step_is_skipped_on_the_device():
    weights = parameters()
    reference = Adam(weights)
    optimizer = FusedAdam(weights, **OPTIONS, capturable=True)
    for step, found in enumerate((False, True, False)):
        grads = gradients(step)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad * 1024
        optimizer.step(grad_scaler=Scaler(1024.0, found))
        if not found:
            reference.step(grads)
    assert int(optimizer.param_groups[0]["step"]) == 2
    assert difference(weights, reference.weights) < 2e-6


def test_gradients_that_were_unscaled_are_not_unscaled_again():
    """Clipping needs ``GradScaler.unscale_`` before the step."""
    weights, plain = parameters(), parameters()
    optimizer, other = FusedAdam(weights, **OPTIONS, capturable=True), FusedAdam(plain, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        factor = scaler.scale(torch.ones(()))
        for weight, same, grad in zip(weights, plain, gradients(step), strict=True):
            weight.grad, same.grad = grad * factor, grad
        scaler.unscale_(optimizer)
        with pytest.warns(FutureWarning):
            scaler.step(optimizer)
        scaler.update()
        other.step()
        assert difference(weights, [same.detach().double() for same in plain]) < 2e-6
        assert all(torch.allclose(w.grad, p.grad) for w, p in zip(weights, plain, strict=True))


def _transposed(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _with_gaps(tensor):
    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


@pytest.mark.parametrize("of_grad", [torch.clone, _transposed, _with_gaps])
@pytest.mark.parametrize("of_weight", [torch.clone, _transposed, _with_gaps])
@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "remainders": True}]
)
def test_memory_may_lie_in_any_order(of_weight, of_grad, options):
    """Torch's kernels read all tensors of a parameter as flat memory."""
    dtype = options.get("dtype", torch.float32)
    master = {"master_weights": True, "store_param_remainders": "remainders" in options}
    kinds = [FusedAdam, lambda weights, lr: FusedAdam(weights, lr=lr, **master)]
    if of_weight is not _with_gaps and dtype is torch.float32:
        kinds.append(lambda weights, lr: FusedSGD(weights, lr=lr, momentum=0.9))
    for make in kinds:
        values = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
        weight, same = torch.nn.Parameter(of_weight(values)), torch.nn.Parameter(values.clone())
        optimizers = [make([weight], lr=0.1), make([same], lr=0.1)]
        for step in range(3):
            grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
            weight.grad, same.grad = of_grad(grad), grad.clone()
            for optimizer in optimizers:
                optimizer.step()
            if step == 1:  # a checkpoint may have another order
                state = copy.deepcopy(optimizers[0].state_dict())
                for values in state["state"].values():
                    values |= {name: value.contiguous() for name, value in values.items()}
                optimizers[0].load_state_dict(state)
        assert torch.equal(weight, same)


def test_sgd_refuses_parameters_with_gaps():
    weight = torch.nn.Parameter(_with_gaps(torch.ones(4, 6)))
    weight.grad = torch.ones(4, 6)
    with pytest.raises(UnsupportedError, match="FusedSGD: .* gaps, .* strides"):
        FusedSGD([weight], lr=0.1).step()


def test_capturable_takes_rates_that_are_numbers():
    """A scheduler assigns them, a new group has one, and so has a state that was saved without `capturable`."""
    weights, plain = parameters(), parameters()
    options = {"lr": 0.02, "weight_decay": 0.1}
    optimizers = FusedAdam(weights[:2], capturable=True, **options), FusedAdam(plain[:2], **options)
    for step in range(4):
        if step == 1:
            optimizers[0].add_param_group({"params": weights[2:], "lr": 0.5})
            optimizers[1].add_param_group({"params": plain[2:], "lr": 0.5})
        if step == 2:
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.3
        if step == 3:
            optimizers[0].load_state_dict(optimizers[1].state_dict())
        for weight, other, grad in zip(weights, plain, gradients(step), strict=True):
            weight.grad = other.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, plain, strict=True))


def test_capturable_takes_a_tensor_as_its_rate(recwarn):
    rate = torch.tensor(0.25)
    (group,) = FusedAdam(parameters(), lr=rate, capturable=True).param_groups
    assert group["lr"] == rate
    assert group["lr"] is not rate
    assert not recwarn


def test_groups_of_capturable_have_rates_of_their_own():
    weights = parameters()
    groups = [{"params": weights[:2]}, {"params": weights[2:]}]
    first, second = FusedAdam(groups, lr=0.25, capturable=True).param_groups
    first["lr"].fill_(0.5)
    assert second["lr"] == 0.25


@pytest.mark.parametrize("master", [False, True], ids=["plain", "master"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_scaled_step_leaves_unscaled_gradients(dtype, master):
    """Transformer Engine's kernel does the same, and so does torch's."""
    weights = [torch.nn.Parameter(weight.detach().to(dtype)) for weight in parameters()]
    optimizer = FusedAdam(weights, lr=1e-3, capturable=True, master_weights=master)
    for found in (True, False):
        for weight in weights:
            weight.grad = torch.full_like(weight, 64.0)
        optimizer.step(grad_scaler=Scaler(1024.0, found))
        wanted = 64.0 if found else 64.0 / 1024
        assert all(torch.equal(w.grad, torch.full_like(w, wanted)) for w in weights)


def test_parameters_without_gradients_and_groups_without_parameters():
    weights = parameters()
    optimizer = FusedAdam([{"params": weights}, {"params": []}], **OPTIONS)
    before = [weight.detach().clone() for weight in weights]
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert not torch.equal(before[0], weights[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1:], weights[1:], strict=True))
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    assert optimizer.step(lambda: 5.0) == 5.0


def test_a_step_is_seen_by_layers():
    """The weights are views of one flat buffer, which a distributed optimizer writes."""
    layer = te.Linear(32, 32, bias=False, device="cpu", params_dtype=torch.bfloat16)
    flat = torch.empty(32 * 32, dtype=torch.bfloat16)
    flat.copy_(layer.weight.detach().reshape(-1))
    layer.weight.data = flat.view(32, 32)
    main = torch.nn.Parameter(flat.float())
    optimizer = FusedAdam([main], lr=0.5)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(3):
        with te.autocast(recipe=Float8CurrentScaling()), torch.no_grad():
            got = layer(x)
            fresh = te.Linear(32, 32, bias=False, device="cpu", params_dtype=torch.bfloat16)
            fresh.weight.data.copy_(layer.weight)
            assert torch.equal(got, fresh(x))
        main.grad = torch.randn_like(main)
        optimizer.step()
        # Like a gather, this write does not change the version of the weight.
        torch._foreach_copy_([flat.detach().view(-1).data], [main.detach()])


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"exp_avg_dtype": torch.int8},
        {"master_weights": True, "master_weight_dtype": torch.bfloat16},
        {"capturable": True, "master_weights": True, "master_weight_dtype": torch.float16},
        {"capturable": True, "exp_avg_dtype": torch.bfloat16},
        {"capturable": True, "master_weights": True, "store_param_remainders": True},
    ],
    ids=str,
)
def test_adam_refuses_by_name(options):
    with pytest.raises(UnsupportedError, match=next(reversed(options))):
        FusedAdam(parameters(), **options)


def test_adam_refuses_other_parameters_and_gradients():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(UnsupportedError, match="float64"):
        FusedAdam([weight]).step()
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.eye(2).to_sparse()
    with pytest.raises(UnsupportedError, match="sparse"):
        FusedAdam([weight]).step()
    scaler = Scaler(1.0, found=False)
    with pytest.raises(UnsupportedError, match="capturable=True"):
        FusedAdam(parameters()).step(grad_scaler=scaler)


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_adam_refuses_gradients_of_another_size(count, master_weights):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.decoupled_grad = torch.ones(count)
    made = FusedAdam([weight], use_decoupled_grad=True, master_weights=master_weights)
    with pytest.raises(ShapeError, match=rf"\[2, 2\] .* got shape \[{count}\]") as raised:
        made.step()
    assert isinstance(raised.value, RuntimeError)
    assert torch.equal(weight, torch.ones(2, 2))
    assert not any(made.state.values())
    assert "step" not in made.param_groups[0]


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_may_be_flat(scaled):
    flat, shaped = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    shaped.decoupled_grad = torch.arange(24.0).reshape(4, 6)
    flat.decoupled_grad = shaped.decoupled_grad.flatten().clone()
    scaler = Scaler(2.0, found=False) if scaled else None
    for weight in (flat, shaped):
        FusedAdam([weight], use_decoupled_grad=True, capturable=scaled).step(grad_scaler=scaler)
    assert torch.equal(flat, shaped)
    assert torch.equal(flat.decoupled_grad, shaped.decoupled_grad.flatten())
    assert flat.decoupled_grad[2] == (1.0 if scaled else 2.0)


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedSGD])
def test_rates_may_be_numbers_of_numpy(optimizer):
    weight, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    weight.grad, other.grad = torch.ones(3), torch.ones(3)
    rate = numpy.float32(0.25)
    optimizer([weight], lr=rate).step()
    optimizer([other], lr=0.25).step()
    assert torch.equal(weight, other)


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedSGD])
def test_a_refused_step_changes_nothing(optimizer):
    first, second = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    made = optimizer([{"params": [first]}, {"params": [second]}], lr=0.1)
    first.grad, second.grad = torch.eye(2), torch.eye(2).to_sparse()
    with pytest.raises(UnsupportedError, match=f"{optimizer.__name__}: sparse gradients"):
        made.step()
    assert torch.equal(first, torch.ones(2, 2))
    assert not any(made.state.values())
    assert not any("step" in group for group in made.param_groups)


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedSGD])
def test_set_grad_none_is_an_old_name(optimizer):
    with pytest.warns(DeprecationWarning, match="set_to_none"):
        made = optimizer(parameters(), lr=0.1, set_grad_none=False)
    weight = made.param_groups[0]["params"][0]
    weight.grad = torch.ones_like(weight)
    made.zero_grad()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    with pytest.raises(ArgumentError, match="set_grad_none=False"):
        made.zero_grad(set_to_none=True)


def test_sgd_is_that_of_fp64():
    weights = parameters()
    reference = [weight.detach().double() for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in reference]
    optimizer = FusedSGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    for step in range(3):
        for weight, grad, w, m in zip(weights, gradients(step), reference, momenta, strict=True):
            weight.grad = grad.clone()
            g = grad.double() + 0.01 * w
            m.mul_(0.9).add_(g) if step else m.copy_(g)
            w.sub_(0.1 * (g + 0.9 * m))
        optimizer.step()
    assert difference(weights, reference) < 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_takes_parameters_whose_first_gradient_comes_later(nesterov):
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    weights, reference = parameters(), parameters()
    optimizers = FusedSGD(weights, **options), torch.optim.SGD(reference, fused=False, **options)
    for step in range(4):
        for at, grad in enumerate(gradients(step)):
            weights[at].grad = grad.clone() if step > at else None
            reference[at].grad = weights[at].grad
        for optimizer in optimizers:
            optimizer.step()
    assert difference(weights, [weight.detach().double() for weight in reference]) < 1e-6
    assert all(
        (weight != first).any() for weight, first in zip(weights[:3], parameters()[:3], strict=True)
    )


def test_sgds_skipped_first_step_leaves_no_momentum(monkeypatch):
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, torch.nan))
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedSGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(4)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
    optimizer.step()
    assert torch.equal(weight, torch.ones(4))
    assert not optimizer.state[weight]["momentum_buffer"].any()


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgds_first_step_is_torchs(dampening):
    weights, reference = parameters(), parameters()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening}
    for some, optimizer in (
        (weights, FusedSGD(weights, **options)),
        (reference, torch.optim.SGD(reference, fused=True, **options)),
    ):
        for weight, grad in zip(some, gradients(0), strict=True):
            weight.grad = grad.clone()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True))


@pytest.mark.parametrize("name", ["wd_after_momentum", "materialize_master_grads"])
def test_sgd_refuses_by_name(name):
    with pytest.raises(UnsupportedError, match=name):
        FusedSGD(parameters(), lr=0.1, **{name: name == "wd_after_momentum"})
    with pytest.raises(ArgumentError, match="lr"):
        FusedSGD(parameters())


def test_modules_of_optimizers_have_the_same_classes():
    for module, names in {
        "fused_adam": ["FusedAdam"],
        "fused_sgd": ["FusedSGD"],
        "multi_tensor_apply": ["MultiTensorApply", "multi_tensor_applier"],
    }.items():
        loaded = importlib.import_module(f"{optimizers.__name__}.{module}")
        assert [getattr(loaded, name) for name in names] == [
            getattr(optimizers, name) for name in names
        ]
