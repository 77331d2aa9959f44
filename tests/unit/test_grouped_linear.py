"""te_fast.pytorch.GroupedLinear on the host backend, against FP64 products of each expert's quantised operands."""

import copy
import pickle
import weakref

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from graphs import needs_compile
from grouped_layers import (
    SPLITS,
    biases,
    expected_step,
    grads,
    inputs,
    make,
    stack,
    step,
)
from linear_layers import DTYPES, casts, close
from recipes import RECIPES
from selection import quickly, sampled

ALL = {"high": lambda: None, **RECIPES}


def name_of(name):
    return None if name == "high" else name


def check(layer, x, y, wanted, dtype):
    close(y, wanted["y"], dtype)
    close(x.grad, wanted["dx"], dtype)
    close(grads(layer), wanted["dw"], dtype)
    if layer.apply_bias:
        close(grads(layer, "bias"), wanted["db"], dtype)


@pytest.mark.parametrize(("name", "bias", "dtype"), sampled(ALL, [True, False], DTYPES), ids=str)
def test_whole_step_is_each_experts_product(name, bias, dtype):
    layer = make(dtype=dtype, bias=bias)
    x, grad = inputs(layer, dtype=dtype)
    wanted = expected_step(layer, x, grad, name_of(name))
    y = step(layer, x, grad, ALL[name]())
    assert y.dtype == dtype
    assert y.shape == (sum(SPLITS), 48)
    check(layer, x, y, wanted, dtype)


@pytest.mark.parametrize(
    ("name", "splits"), sampled(ALL, [[5], [0], [0, 0, 0], [0, 300], [1] * 65]), ids=str
)
def test_splits(name, splits):
    layer = make(len(splits), 32, 16)
    x, grad = inputs(layer, splits)
    wanted = expected_step(layer, x, grad, name_of(name), splits)
    y = step(layer, x, grad, ALL[name](), splits)
    assert y.shape == (sum(splits), 16)
    if sum(splits):
        check(layer, x, y, wanted, torch.bfloat16)
    else:
        assert not grads(layer).any()
        assert not grads(layer, "bias").any()
    empty = torch.tensor(splits) == 0
    assert not grads(layer)[empty].any()


@pytest.mark.parametrize("name", ALL)
def test_kinds_of_parameters_and_counts_change_no_bits(name):
    x, grad = inputs(make())
    results = []
    for options in ({}, {"single_grouped_weight": True, "single_grouped_bias": True}):
        for counts in (
            list(SPLITS),
            tuple(SPLITS),
            torch.tensor(SPLITS),
            torch.tensor(SPLITS, dtype=torch.int32),
            torch.tensor(SPLITS).repeat_interleave(2)[::2],
        ):
            layer, own = make(**options), x.detach().clone().requires_grad_()
            y = step(layer, own, grad, ALL[name](), counts)
            results.append((y, own.grad, grads(layer), grads(layer, "bias")))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


def test_leading_dimensions():
    layer = make()
    x, _ = inputs(layer)
    x = x.detach()[:344]
    splits = [0, 70, 1, 0, 129, 128, 16, 0]
    y = layer(x, splits)
    assert torch.equal(layer(x.view(4, 86, -1), splits), y.view(4, 86, -1))
    assert torch.equal(layer(x.t().contiguous().t(), splits), y)


@pytest.mark.parametrize("name", ALL)
def test_frozen_parameters_and_inputs(name):
    layer = make()
    x, grad = inputs(layer)
    wanted = expected_step(layer, x, grad, name_of(name))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    y = step(layer, x, grad, ALL[name]())
    close(y, wanted["y"], torch.bfloat16)
    close(x.grad, wanted["dx"], torch.bfloat16)
    assert all(parameter.grad is None for parameter in layer.parameters())
    layer = make()
    layer.weight2.requires_grad_(False)
    step(layer, x.detach(), grad, ALL[name]())
    assert layer.weight2.grad is None
    close(layer.weight4.grad, wanted["dw"][4], torch.bfloat16)


def test_without_gradients(recipe):
    layer = make()
    x, grad = inputs(layer)
    y = step(layer, x, grad, recipe)
    with torch.no_grad(), te.autocast(recipe=recipe):
        again = layer(x, SPLITS)
    if not recipe.delayed():  # delayed scales have changed since
        assert torch.equal(again, y)
    assert not again.requires_grad


def test_an_evaluation_before_a_step_with_the_same_counts():
    """The layer keeps counts; tensors of inference mode cannot be kept for backward."""
    layer = make(2)
    x, grad = inputs(layer, [16, 16])
    with torch.inference_mode():
        layer(x, [16, 16])
    layer(x, [16, 16]).backward(grad)
    assert x.grad.isfinite().all()


def test_gradients_are_views_of_one_memory():
    layer = make()
    x, grad = inputs(layer)
    step(layer, x, grad, None)
    first, second = layer.weight0.grad, layer.weight1.grad
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_return_bias():
    layer = make(return_bias=True)
    x, grad = inputs(layer)
    y, returned = layer(x, SPLITS)
    assert len(returned) == len(SPLITS)
    assert all(map(torch.equal, returned, biases(layer)))
    wanted = expected_step(layer, x, grad, None)
    close(y, wanted["y"], torch.bfloat16)
    single = make(return_bias=True, single_grouped_bias=True)
    _, bias = single(x, SPLITS)
    assert torch.equal(bias, single.bias)


@pytest.mark.parametrize(
    ("name", "later", "kept"), sampled(ALL, [False, True], ["adjacent", "apart", "single"])
)
def test_main_grad(name, later, kept):
    options = {"single_grouped_weight": kept == "single"}
    layer = make(fuse_wgrad_accumulation=True, delay_wgrad_compute=later, **options)
    x, grad = inputs(layer)
    wanted = expected_step(layer, x, grad, name_of(name))["dw"]
    before = torch.randn(len(SPLITS), 48, 144)
    buffer = before.clone()
    if kept == "single":
        layer.weight.main_grad = buffer
    for number, weight in enumerate([] if kept == "single" else stack(layer)):
        weight.main_grad = buffer[number] if kept == "adjacent" else buffer[number].clone()

    def found():
        return grads(layer, of=lambda parameter: parameter.main_grad)

    def run(**options):
        step(layer, x, grad, ALL[name](), **options)
        assert all(layer.get_parameter(n).grad is None for n in layer.weight_names)
        if later:
            layer.backward_dw()

    run()
    close(found() - before, wanted, torch.bfloat16)
    close(grads(layer, "bias"), expected_step(layer, x, grad, name_of(name))["db"], torch.bfloat16)
    empty = torch.tensor(SPLITS) == 0
    assert torch.equal(found()[empty], before[empty])
    if name != "delayed":  # the second step has other delayed scales
        run(is_first_microbatch=True)
        close(found(), wanted, torch.bfloat16)
        assert not found()[empty].any()


def test_dummy_gradients_where_main_grad_was_added_to():
    layer = make(fuse_wgrad_accumulation=True)
    x, grad = inputs(layer)
    for weight in stack(layer):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = True
    step(layer, x, grad, None)
    for weight in stack(layer):
        assert weight.grad_added_to_main_grad
        assert not weight.grad.any()


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
@pytest.mark.parametrize("name", ALL)
def test_backward_dw(name, single):
    layer = make(delay_wgrad_compute=True, single_grouped_weight=single)
    x, grad = inputs(layer)
    wanted = expected_step(layer, x, grad, name_of(name))
    step(layer, x, grad, ALL[name]())
    assert all(layer.get_parameter(n).grad is None for n in layer.weight_names)
    assert layer.get_parameter(layer.weight_names[0]).skip_backward_post_hook
    called = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    for _ in range(2):  # the second call finds nothing, as in Transformer Engine
        layer.backward_dw()
        assert called == [1]
        close(grads(layer), wanted["dw"], torch.bfloat16)


@pytest.mark.parametrize("name", ["high", "current"])
def test_frozen_weights_leave_no_gradients(name):
    layer = make(delay_wgrad_compute=True)
    layer.requires_grad_(False)
    x, grad = inputs(layer)
    step(layer, x, grad, ALL[name]())
    layer.backward_dw()
    assert x.grad.any()
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("name", ["high", "current", "block"])
def test_save_original_input_changes_no_bits(name):
    x, grad = inputs(make())
    kept = []
    for save in (False, True):
        layer, own = make(save_original_input=save), x.detach().clone().requires_grad_()
        y = step(layer, own, grad, ALL[name]())
        kept.append((y, own.grad, grads(layer)))
    assert all(map(torch.equal, *kept))


def test_save_original_input_does_not_go_with_delayed_scaling():
    layer = make(save_original_input=True)
    x, _ = inputs(layer)
    with te.autocast(recipe=RECIPES["delayed"]()), pytest.raises(ValueError, match="save_original"):
        layer(x, SPLITS)


def test_weights_are_quantised_once_a_step(recipe):
    layer = make()
    x, grad = inputs(layer)

    def run(first):
        step(layer, x, grad, recipe, is_first_microbatch=first)

    assert casts(lambda: run(True)) == 1
    assert casts(lambda: run(False)) == 0
    with torch.no_grad():
        layer.weight3.mul_(2.0)
    assert casts(lambda: run(False)) == 1


@pytest.mark.parametrize("first", [1, 0])
def test_microbatches_by_the_truth_of_a_number(first, recipe):
    layer = make()
    x, _ = inputs(layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        y = layer(x, SPLITS, is_first_microbatch=True)
        assert torch.equal(layer(x, SPLITS, is_first_microbatch=first), y)


def test_buffers_of_the_caller(recipe):
    layer = make()
    x, grad = inputs(layer)
    y = step(layer, x, grad, recipe)
    rows = sum(SPLITS)
    out = torch.full((rows, 48), torch.nan, dtype=x.dtype)
    dgrad = torch.full((rows, 144), torch.nan, dtype=x.dtype)
    layer, own = make(), x.detach().clone().requires_grad_()
    between = own * 1.0
    seen = []
    between.register_hook(lambda grad: seen.append(grad.data_ptr()))
    given = step(layer, between, grad, recipe, out=out, dgrad_out=dgrad)
    assert given.data_ptr() == out.data_ptr()
    assert torch.equal(out, y)
    assert torch.equal(dgrad, x.grad)
    assert seen == [dgrad.data_ptr()]
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert layer(x.view(2, rows // 2, 144), SPLITS, out=out).shape == (2, rows // 2, 48)
    assert out.isfinite().all()


@pytest.mark.parametrize("which", ["out", "dgrad_out"])
def test_bad_buffers(which):
    layer = make()
    x, _ = inputs(layer)
    cols = 48 if which == "out" else 144
    good = torch.empty(sum(SPLITS), cols, dtype=x.dtype)
    for bad in (
        good[1:],
        good.float(),
        torch.empty(sum(SPLITS), 2 * cols, dtype=x.dtype)[:, ::2],
        good.to("meta"),
        good.clone().requires_grad_(),
        torch.empty(cols, sum(SPLITS), dtype=x.dtype),
    ):
        with pytest.raises((ValueError, RuntimeError), match=which):
            layer(x, SPLITS, **{which: bad})
    with pytest.raises(TypeError, match=which):
        layer(x, SPLITS, **{which: [1.0]})
    square = te.GroupedLinear(2, 16, 16, device="cpu")
    x = torch.randn(12, 16)
    with pytest.raises(ValueError, match=f"{which} must not share memory"):
        square(x[:8], [3, 5], **{which: x[4:]})
    square(x[:4], [3, 1], **{which: x[4:8]})


def test_copies_and_moves_keep_one_memory(tmp_path):
    layer = make()
    x, _ = inputs(layer)
    y = layer(x, SPLITS)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(layer).float().bfloat16(),
    ):
        parts = stack(other)
        size = parts[0].numel() * parts[0].element_size()
        assert [part.data_ptr() - parts[0].data_ptr() for part in parts] == [
            size * number for number in range(len(parts))
        ]
        assert torch.equal(other(x, SPLITS), y)


def test_parts_that_lie_apart(recipe):
    layer, other = make(), make()
    x, grad = inputs(layer)
    wanted = step(layer, x, grad, recipe)
    for weight in stack(other):
        weight.data = weight.data.clone()
    own = x.detach().clone().requires_grad_()
    assert torch.equal(step(other, own, grad, recipe), wanted)
    assert torch.equal(own.grad, x.grad)
    assert torch.equal(grads(other), grads(layer))


def test_meta_device_defers():
    layer = te.GroupedLinear(3, 16, 8, device="meta")
    assert layer.weight0.is_meta
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert torch.isfinite(layer(torch.ones(6, 16), [1, 2, 3])).all()


def test_initialisation():
    layer = te.GroupedLinear(4, 256, 128, device="cpu")
    assert layer.weight0.std().item() == pytest.approx(0.023, rel=0.05)
    assert not torch.equal(layer.weight0, layer.weight1)
    assert not layer.bias3.any()
    ones = te.GroupedLinear(2, 8, 8, device="cpu", init_method=torch.nn.init.ones_)
    assert all((weight == 1).all() for weight in stack(ones))


# State ----------------------------------------------------------------------------------------------


def test_state_dict_names_and_slot_order():
    layer = make(3, 32, 16)
    x, grad = inputs(layer, [10, 0, 7])
    for _ in range(2):
        step(layer, x, grad, RECIPES["delayed"](), [10, 0, 7])
    names = set(layer.state_dict())
    assert names == {
        *(f"{kind}{i}" for kind in ("weight", "bias") for i in range(3)),
        "_extra_state",
    }
    forward, backward = (layer.fp8_meta[f"scaling_{way}"] for way in ("fwd", "bwd"))
    assert forward.scale.shape == (9,)
    assert backward.scale.shape == (6,)
    parts, dys = x.detach().split([10, 0, 7]), grad.split([10, 0, 7])
    for number, (part, dy) in enumerate(zip(parts, dys, strict=True)):
        history = forward.amax_history[:, 3 * number : 3 * number + 2].amax(0)
        amax = part.abs().amax().float() if part.numel() else torch.tensor(0.0)
        assert history[0] == amax
        assert history[1] == stack(layer)[number].abs().amax().float()
        amax = dy.abs().amax().float() if dy.numel() else torch.tensor(0.0)
        assert backward.amax_history[:, 2 * number].amax() == amax


@pytest.mark.parametrize(
    "options", [{}, {"single_grouped_weight": True, "single_grouped_bias": True}]
)
def test_checkpoints_go_both_ways(options):
    layer = make(3, 32, 16)
    x, grad = inputs(layer, [10, 0, 7])
    for _ in range(2):
        step(layer, x, grad, RECIPES["delayed"](), [10, 0, 7])
    other = te.GroupedLinear(3, 32, 16, device="cpu", params_dtype=torch.bfloat16, **options)
    other.load_state_dict(layer.state_dict())
    back = te.GroupedLinear(3, 32, 16, device="cpu", params_dtype=torch.bfloat16)
    back.load_state_dict(other.state_dict())
    for one in (other, back):
        with torch.no_grad(), te.autocast(recipe=RECIPES["delayed"]()):
            found = one(x, [10, 0, 7])
        with torch.no_grad(), te.autocast(recipe=RECIPES["delayed"]()):
            assert torch.equal(found, layer(x, [10, 0, 7]))


def test_delayed_scaling_takes_each_experts_scale_in_the_next_step():
    layer = make(2, 64, 32, bias=False)
    x, grad = inputs(layer, [24, 8])
    recipe = RECIPES["delayed"]()
    step(layer, x, grad, recipe, [24, 8])
    y = step(layer, x, grad, recipe, [24, 8])
    scale = layer.fp8_meta["scaling_fwd"].scale
    assert scale[0] != scale[3]
    values = []
    for number, own in enumerate(x.detach().split([24, 8])):
        xs, ws = scale[3 * number].double(), scale[3 * number + 1].double()
        q = (own.double() * xs).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() / xs
        w = (stack(layer)[number].double() * ws).float().clamp(-448, 448)
        values.append(q @ (w.to(torch.float8_e4m3fn).double() / ws).t())
    close(y, torch.cat(values), torch.bfloat16)


def test_calibration_takes_each_experts_maxima():
    layer = make()
    x, _ = inputs(layer)
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
        layer(x, SPLITS)
    state = layer.fp8_meta["scaling_fwd"]
    seen = state.amax_history.amax(0)
    for number, own in enumerate(x.detach().split(SPLITS)):
        assert seen[3 * number] == (own.abs().amax().float() if own.numel() else 0.0)
        assert seen[3 * number + 1] == stack(layer)[number].abs().amax().float()


def test_recomputation(recipe):
    layer, other = make(), make()
    x, grad = inputs(layer)
    own = x.detach().clone().requires_grad_()
    y = step(layer, x, grad, recipe)
    with te.autocast(recipe=recipe):
        again = te.checkpoint(other, own, SPLITS)
    again.backward(grad)
    assert torch.equal(again, y)
    assert torch.equal(own.grad, x.grad)
    assert torch.equal(grads(other), grads(layer))


def test_torch_autocast():
    layer = make(dtype=torch.float32)
    x, _ = inputs(layer, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=RECIPES["current"]()):
        y = layer(x, SPLITS)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight4.grad.dtype == torch.float32


# Edge values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["current", "block", "delayed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-40, 3e38])
def test_one_experts_values_stay_with_it(name, value):
    splits = [20, 0, 30, 14]
    layer = make(4, 64, 32)
    x, grad = inputs(layer, splits)
    clean = step(layer, x, grad, RECIPES[name](), splits).detach(), x.grad, grads(layer)
    other, own = make(4, 64, 32), x.detach().clone()
    own[25, 3] = value
    own.requires_grad_()
    y = step(other, own, grad, RECIPES[name](), splits)
    rest = [*range(20), *range(50, 64)]
    assert torch.equal(y[rest], clean[0][rest])
    assert torch.equal(own.grad, clean[1])
    for number in (0, 1, 3):
        assert torch.equal(grads(other)[number], clean[2][number])
    if name == "block":  # a scale covers only 128 elements
        same = [row for row in range(20, 50) if row != 25]
        assert torch.equal(y[same], clean[0][same])


# Bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("splits", "error", "words"),
    [
        ([1, 2], ValueError, "each of the 3 experts"),
        (torch.tensor([[1, 2, 3]]), ValueError, "shape"),
        ([1, 2, 4], ValueError, "add up to the 6 rows"),
        (torch.tensor([1, 2, 4]), ValueError, "add up to the 6 rows"),
        ([7, -1, 0], ValueError, "negative"),
        (torch.tensor([7, -1, 0]), ValueError, "negative"),
        ([1.0, 2.0, 3.0], TypeError, "integers"),
        (torch.tensor([1.0, 2.0, 3.0]), TypeError, "integers"),
        (6, TypeError, "list of integers"),
        (torch.tensor([1, 2, 3], device="meta"), RuntimeError, "host or on cpu"),
    ],
)
def test_bad_splits(splits, error, words):
    layer = te.GroupedLinear(3, 16, 8, device="cpu")
    with pytest.raises(error, match=words) as caught:
        layer(torch.ones(6, 16), splits)
    assert isinstance(caught.value, te_fast.TeFastError)


def test_bad_inputs():
    layer = te.GroupedLinear(2, 16, 8, device="cpu")
    with pytest.raises(ValueError, match="in_features"):
        layer(torch.ones(6, 8), [3, 3])
    with pytest.raises(TypeError, match=r"torch\.float16"):
        layer(torch.ones(6, 16, dtype=torch.float16), [3, 3])
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        layer([1.0], [3, 3])
    layer = te.GroupedLinear(2, 24, 8, device="cpu")
    with te.autocast(recipe=RECIPES["block"]()), pytest.raises(ValueError, match="16"):
        layer(torch.ones(6, 24), [3, 3])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_gemms": 0}, ValueError),
        ({"num_gemms": 1025}, ValueError),
        ({"num_gemms": -1}, ValueError),
        ({"num_gemms": True}, TypeError),
        ({"in_features": 1.5}, TypeError),
        ({"parallel_mode": "both"}, ValueError),
        ({"ub_overlap_ag": True}, ValueError),
        ({"ub_overlap_rs": True}, ValueError),
        ({"use_grouped_tensor": 1}, TypeError),
        ({"tp_size": 2, "parallel_mode": "row"}, ValueError),
        ({"tp_size": 3, "parallel_mode": "row", "bias": False}, ValueError),
    ],
    ids=str,
)
def test_bad_options(options, error):
    given = {"num_gemms": 2, "in_features": 16, "out_features": 8} | options
    with pytest.raises(error):
        te.GroupedLinear(**given, device="cpu")


def test_tensor_parallelism_divides_features_alone():
    column = te.GroupedLinear(2, 16, 8, device="cpu", tp_size=2, parallel_mode="column", bias=False)
    row = te.GroupedLinear(2, 16, 8, device="cpu", tp_size=2, parallel_mode="row", bias=False)
    assert (column.weight0.shape, row.weight0.shape) == ((4, 16), (8, 8))
    assert (column.weight0.partition_dim, row.weight1.partition_dim) == (0, 1)
    assert row(torch.ones(4, 8), [2, 2]).shape == (4, 8)


# In graphs ------------------------------------------------------------------------------------------


@needs_compile
@pytest.mark.parametrize(
    ("name", "single"),
    quickly([("high", False), ("current", False), ("block", True)], ("block", True)),
)
def test_compiled_whole_with_the_bits_of_eager(name, single):
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    layer, x_grad = make(**options), inputs(make())
    x, grad = x_grad
    recipe = ALL[name]()
    y = step(layer, x, grad, recipe)
    wanted = x.grad, grads(layer), grads(layer, "bias")
    layer.zero_grad()
    own = x.detach().clone().requires_grad_()

    def run(x, counts):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return layer(x, counts)

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    again = compiled(own, torch.tensor(SPLITS))
    again.backward(grad)
    assert torch.equal(again, y)
    assert all(map(torch.equal, (own.grad, grads(layer), grads(layer, "bias")), wanted))
    with torch.no_grad():  # the same graph takes other counts
        other = [344, 0, 0, 0, 0, 0, 0, 0]
        assert torch.equal(compiled(x.detach(), torch.tensor(other)), run(x.detach(), other))


@pytest.mark.every_torch
@needs_compile
@pytest.mark.parametrize(
    ("splits", "error", "words"),
    [
        pytest.param([5, 0, 99], ValueError, "add up to the 14 rows", marks=pytest.mark.slow),
        pytest.param([5, -4, 13], ValueError, "must not be negative", marks=pytest.mark.slow),
        ([5, 9], ValueError, "one count for each of the 3 experts"),
        pytest.param([5.0, 0.0, 9.0], TypeError, "integers", marks=pytest.mark.slow),
        (torch.tensor([5.9, 0.0, 8.1]), TypeError, "integers"),
        pytest.param(torch.tensor([True] * 3), TypeError, "integers", marks=pytest.mark.slow),
        pytest.param(
            torch.tensor([5, 9]),
            ValueError,
            "one count for each of the 3 experts",
            marks=pytest.mark.slow,
        ),
        (torch.tensor([5, 0, 3]), RuntimeError, "add up to the rows"),
        (torch.tensor([5, -4, 13]), RuntimeError, "must not be negative"),
    ],
    ids=str,
)
def test_bad_splits_of_compiled_layers(splits, error, words):
    torch.compiler.reset()
    compiled = torch.compile(te.GroupedLinear(3, 32, 16, device="cpu"), backend="aot_eager")
    with pytest.raises(error, match=words):
        compiled(torch.randn(14, 32), splits)


@pytest.mark.every_torch
@needs_compile
def test_compiled_layers_take_lists_of_other_counts():
    torch.compiler.reset()
    layer = te.GroupedLinear(3, 32, 16, device="cpu")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(14, 32)
    for splits in ([5, 0, 9], [4, 2, 8], [3, 6, 5], [7, 4, 3]):
        assert torch.equal(compiled(x, splits), layer(x, splits))


@pytest.mark.parametrize("name", ["current", "block"])
def test_one_quantized_expert_has_a_backward_in_high_precision(name):
    kind = type(RECIPES[name]())
    with te.quantized_model_init(recipe=kind()):
        layer = te.GroupedLinear(1, 128, 256, bias=False, device="cpu")
    x = torch.randn(16, 128, requires_grad=True)
    with te.autocast(recipe=kind(backward_override="high_precision")):
        y = layer(x, [16])
    y.sum().backward()
    wanted = layer.weight0.dequantize().sum(0).expand_as(x)
    close(x.grad, wanted.double(), torch.float32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["weight0", "bias0", "weight1", "bias1"]),
        ({"bias": False}, ["weight0", "weight1"]),
        ({"single_grouped_weight": True}, ["bias0", "bias1", "weight"]),
        ({"single_grouped_bias": True}, ["weight0", "weight1", "bias"]),
        ({"single_grouped_weight": True, "single_grouped_bias": True}, ["weight", "bias"]),
    ],
)
def test_parameters_are_in_transformer_engines_order(options, expected):
    # Transformer Engine 2.20.2 registers parameters in this order, by which optimizers find their states.
    layer = te.GroupedLinear(2, 16, 16, device="cpu", **options)
    assert [name for name, _ in layer.named_parameters()] == expected
    with te.quantized_model_init(recipe=te_fast.common.recipe.Float8CurrentScaling()):
        layer = te.GroupedLinear(2, 16, 16, device="cpu", **options)
    assert [name for name, _ in layer.named_parameters()] == expected


def test_the_gpu_of_a_former_call_does_not_travel():
    layer = te.GroupedLinear(2, 32, 32, device="cpu")
    layer.__dict__["_one_launch_on"] = 0
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.__dict__["_one_launch_on"] is None


def test_counts_do_not_travel(tmp_path):
    """torch.load puts all tensors of a file where it is told to."""
    layer = make(2)
    x, _ = inputs(layer, [16, 16])
    y = layer(x, [16, 16])
    torch.save(layer, tmp_path / "layer.pt")
    other = torch.load(tmp_path / "layer.pt", map_location="meta", weights_only=False)
    other.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(other(x, [16, 16]), y)


@pytest.mark.parametrize(
    "make_module",
    [
        lambda: te.GroupedLinear(3, 32, 48, device="cpu"),
        lambda: te.ops.GroupedLinear(3, 32, 48, device="cpu"),
        lambda: te.Linear(32, 48, parameters_split=("query", "key", "value"), device="cpu"),
    ],
)
def test_entries_of_a_state_have_storages_of_their_own(make_module):
    # Accelerate keeps one of several tensors of a storage, and safetensors' save_model refuses them.
    module = make_module()
    state = module.state_dict()
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert len(storages) == len(state) == 6
    for name, tensor in state.items():
        parameter = module.get_parameter(name)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert tensor.data_ptr() == parameter.data_ptr(), name
        version = parameter._version
        tensor.fill_(3.0)
        assert bool((parameter == 3).all()), name
        assert parameter._version > version, name
    other = make_module()
    other.load_state_dict(state)
    assert all(bool((parameter == 3).all()) for parameter in other.parameters())
    entry = weakref.ref(tensor)
    del state, tensor
    assert entry() is None
