"""Groups in which native segments and Python operations share a recipe, types and a container."""

import pytest
import torch

import te_fast.pytorch as te
from reference import quantized_values
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from te_fast.errors import StateError, TeFastError
from te_fast.pytorch import ops

CPU = {"device": "cpu"}


# Delayed scaling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [[ops.GELU], [lambda: ops.Linear(16, 16, bias=False, **CPU)]])
def test_gradient_scales_are_updated_behind_the_whole_backward(behind):
    quantize = ops.Quantize(forward=False, backward=True)
    chain = ops.Sequential(quantize, *(make() for make in behind))
    x = torch.ones(16, 16, requires_grad=True)
    with te.autocast(recipe=DelayedScaling(amax_history_len=2, fp8_format=Format.HYBRID)):
        y = chain(x)
    y.backward(torch.full_like(y, 4.0))
    state = quantize._delayed_state("backward")
    maximum = state.amax_history[-1]
    assert maximum > 0
    assert torch.equal(state.amax_history[0], torch.zeros(1))
    torch.testing.assert_close(state.scale, 57344 / maximum)


@pytest.mark.parametrize("front", [ops.L2Normalization, ops.GELU])
def test_a_group_under_another_recipe_is_not_the_first_of_delayed_scaling(front):
    """Regions nest, and the first group that has backward scales updates them."""
    other = ops.Sequential(front(), ops.Linear(16, 16, bias=False, **CPU))
    layers = [te.Linear(16, 16, bias=False, **CPU) for _ in range(2)]
    x = torch.ones(16, 16, requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        other(x)
        with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
            y = layers[1](layers[0](x))
    y.backward(torch.full_like(y, 4.0))
    scale = layers[1].fp8_meta["scaling_bwd"].scale[0]
    torch.testing.assert_close(scale, torch.tensor(57344 / 4.0))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("make", [te.Linear, ops.Linear])
def test_another_format_saturates_nothing(make, steps):
    torch.default_generator.manual_seed(0)
    layer = make(32, 32, **CPU)
    state = (
        (lambda mode: layer.fp8_meta[f"scaling_{mode[:1]}wd"])
        if make is te.Linear
        else layer.basic_ops[0]._delayed_state
    )
    for step in range(steps + 2):
        fp8_format = Format.HYBRID if step < steps else Format.E4M3
        x = torch.randn(16, 32, requires_grad=True)
        grad = torch.randn(16, 32)
        weight_scale = state("forward").scale[1].clone() if step else torch.ones(())
        with te.autocast(recipe=DelayedScaling(amax_history_len=4, fp8_format=fp8_format)):
            y = layer(x)
        kind = "e5m2" if step < steps else "e4m3"
        scale = state("backward").scale[0].clone()
        y.backward(grad)
        weight = quantized_values(layer.weight.detach(), "e4m3", "t", scale=weight_scale)
        expected = quantized_values(grad, kind, "t", scale=scale) @ weight
        torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-6)
        exact = grad.double() @ layer.weight.double()
        error = (x.grad.double() - exact).norm() / exact.norm()
        assert error < 0.12  # a scale of the other format would cut off most of the gradient


def test_quantize_takes_a_tensor_without_dimensions():
    x = torch.tensor(3.0, requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = ops.Quantize(backward=True)(x)
    y.backward()
    assert y.shape == ()
    assert y == 3.0
    assert x.grad == 1.0


# Containers ---------------------------------------------------------------------------------------


class Mlp(ops.Sequential):
    """A container that makes its own modules."""

    def __init__(self, size):
        super().__init__(ops.Linear(size, size, **CPU), ops.GELU(), ops.Linear(size, size, **CPU))


def test_slice_of_a_subclass():
    mlp = Mlp(8)
    tail = mlp[1:]
    assert type(tail) is ops.Sequential
    assert list(tail) == [mlp[1], mlp[2]]
    x = torch.rand(3, 8)
    assert torch.equal(tail(mlp[0](x)), mlp(x))
    assert len(mlp.pop(slice(0, 2))) == 2
    assert len(mlp) == 1


# Types --------------------------------------------------------------------------------------------


class Own(ops.Identity):
    """An operation of the user's own, which returns the type that `torch.autocast` computes in."""

    def op_forward(self, ctx, input_, **_):
        ctx.dtype = input_.dtype
        return input_.to(torch.bfloat16)

    def op_backward(self, ctx, grad_output):
        return grad_output.to(ctx.dtype), ()


def residual_branch(dtype, *front, in_place=False):
    linear = ops.Linear(32, 32, dtype=dtype, **CPU)
    torch.nn.init.uniform_(linear.bias)
    return ops.Sequential(*front, linear, ops.AddExtraInput(in_place=in_place)), linear


@pytest.mark.parametrize("region", ["narrow weights", "autocast"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("front", [[], [Own]])
def test_wide_residual_stays_wide(region, in_place, front):
    torch.default_generator.manual_seed(0)
    narrow = region == "narrow weights"
    dtype = torch.bfloat16 if narrow else torch.float32
    chain, linear = residual_branch(dtype, *(make() for make in front), in_place=in_place)
    x = torch.rand(4, 32, dtype=dtype, requires_grad=True)
    residual = torch.rand(4, 32).mul_(1000).requires_grad_(not in_place)
    wanted = residual.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not narrow):
        y = chain(x, residual)
    assert y.dtype == torch.float32
    assert (y.data_ptr() == residual.data_ptr()) is in_place
    weight, bias = linear.weight.detach().bfloat16().double(), linear.bias.detach().double()
    product = x.detach().bfloat16().double() @ weight.T
    # Product, bias and sum are rounded to BF16, the sum with the residual to FP32.
    bound = 2**-8 * (product.abs() + bias.abs() + (product + bias).abs()) + 1e-4
    assert ((y - wanted).double() - (product + bias)).abs().sub(bound).max() <= 0
    grad = torch.rand(4, 32)
    y.backward(grad)
    expected = grad.bfloat16().double() @ weight
    torch.testing.assert_close(x.grad.double(), expected, rtol=2**-8, atol=1e-5)
    assert x.grad.dtype == dtype
    if not in_place:
        assert torch.equal(residual.grad, grad)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_sum_of_two_types(dtypes, in_place):
    x, other = (torch.rand(4, 8).to(dtype).requires_grad_() for dtype in dtypes)
    wanted = dtypes[1] if in_place else torch.float32
    expected = (x.to(wanted).double() + other.to(wanted).double()).to(wanted)
    y = ops.AddExtraInput(in_place=in_place)(x, other)
    assert y.dtype == wanted
    assert torch.equal(y, expected)
    y.backward(torch.ones_like(y))
    assert [t.grad.dtype for t in (x, other)] == list(dtypes)


def test_added_output_of_another_type():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    chain = ops.Sequential(make, ops.LayerNorm(16, dtype=torch.bfloat16, **CPU), add)
    x = torch.rand(4, 16, requires_grad=True)
    y = chain(x)
    assert y.dtype == torch.float32
    normed = torch.nn.functional.layer_norm(x.detach().bfloat16().double(), (16,))
    torch.testing.assert_close((y - x).double(), normed, rtol=2**-8, atol=1e-6)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 16), rtol=0, atol=2e-6)


@pytest.mark.parametrize("front", [[], [Own]])
def test_what_computes_nothing_keeps_its_type_under_autocast(front):
    elementwise = [
        ops.Identity,
        lambda: ops.ConstantScale(3.0),
        lambda: ops.Dropout(0.5),
        lambda: ops.Reshape((2, -1)),
        lambda: ops.L2Normalization(),
        lambda: ops.Bias(16, **CPU),
        ops.Quantize,
    ]
    x = torch.rand(4, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for make in elementwise:
            assert make()(x).dtype == torch.float32
        chain = ops.Sequential(ops.MakeExtraOutput(), *(f() for f in front), ops.GELU())
        y, extra = chain(x)
        scaled = ops.ScaledSReLU()(x, torch.rand(4))
    assert y.dtype == scaled.dtype == torch.bfloat16
    assert extra.dtype == torch.float32
    assert torch.equal(extra, x)
    y.float().sum().backward()
    wide = x.detach().bfloat16().double().requires_grad_()
    torch.nn.functional.gelu(wide, approximate="tanh").sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=2**-8, atol=1e-6)


def test_linear_and_bias_compute_in_the_type_of_autocast():
    chain = ops.Sequential(ops.LayerNorm(16, **CPU), ops.Linear(16, 16, **CPU), ops.GELU())
    x = torch.rand(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert chain(x).dtype == ops.Linear(16, 16, **CPU)(x).dtype == torch.bfloat16
    assert chain.explain().count("native program") == 1


def test_factors_keep_their_type_under_autocast_in_every_call():
    """Routing probabilities in FP32 are not rounded to autocast's type, nor are their gradients."""
    torch.default_generator.manual_seed(0)
    chain = ops.Sequential(ops.ScaledSwiGLU())
    x, factors = torch.randn(8, 32).bfloat16(), torch.rand(8)
    gate, linear = x.double().chunk(2, -1)
    activated = gate * torch.sigmoid(gate) * linear
    for _ in range(3):
        leaf = factors.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = chain(x, leaf)
        exact = (activated * factors[:, None].double()).bfloat16()
        torch.testing.assert_close(y, exact, rtol=0, atol=0)
        y.sum().backward()
        torch.testing.assert_close(leaf.grad.double(), activated.sum(-1), rtol=1e-5, atol=1e-5)


# Bad input ----------------------------------------------------------------------------------------


class Refuses(torch.nn.Module):
    """A plain module that raises when it is told to."""

    refuses = False

    def forward(self, x):
        if self.refuses:
            raise OverflowError
        return x


def test_plain_module_that_raises_leaves_the_scales():
    chain = ops.Sequential(ops.Linear(16, 16, **CPU), Refuses(), ops.Linear(16, 16, **CPU))
    recipe = DelayedScaling(amax_history_len=4)

    def states():
        linears = (chain[0].basic_ops[0], chain[2].basic_ops[0])
        found = [op._delayed_state(mode) for op in linears for mode in ("forward", "backward")]
        return [tensor.clone() for state in found for tensor in (state.scale, state.amax_history)]

    for _ in range(2):
        with te.autocast(recipe=recipe):
            chain(torch.rand(16, 16)).sum().backward()
    before = states()
    chain[1].refuses = True
    with pytest.raises(OverflowError), te.autocast(recipe=recipe):
        chain(torch.full((16, 16), 100.0))
    assert all(map(torch.equal, states(), before))


@pytest.mark.parametrize("index", [2, -3])
def test_index_of_no_module(index):
    chain = ops.Sequential(ops.GELU(), ops.ReLU())
    for call in (
        lambda: chain[index],
        lambda: chain(torch.rand(2, 2), op_kwargs={index: {}}),
    ):
        with pytest.raises(IndexError, match=f"index {index} is out of range") as caught:
            call()
        assert isinstance(caught.value, TeFastError)


class Free(ops.BasicOperation):
    """An operation of the user's own whose methods return what they are told to."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, forward=None, backward=None):
        super().__init__()
        self.returned = (forward, backward)

    op_forward = op_backward = None

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        forward = self.returned[0] or (lambda x: (2 * x, [(3 * x,)]))
        return forward(input_)

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        backward = self.returned[1] or (lambda grad: (2 * grad, [()], [(None,)]))
        return backward(grad_output)


def run_free(**returned):
    chain = ops.Sequential(ops.ReLU(), Free(**returned), ops.ReLU())
    x = torch.rand(3, 4, requires_grad=True)
    y, _ = chain(x, torch.rand(3, 4))
    y.sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("forward", lambda x: x, "fuser_forward must return 2 values, got a Tensor"),
        ("forward", lambda x: (None, [(x,)]), "returned None, expected a torch.Tensor"),
        (
            "forward",
            lambda x: (x, [(7,)]),
            "extra output 0 is public, but .* returned a int for it",
        ),
        ("forward", lambda x: (x, []), "expected"),
        ("backward", lambda g: (g, [()]), "fuser_backward must return 3 values, got 2 values"),
        ("backward", lambda g: (g, [(), ()], [()]), "gradients of 2 basic ops, expected 1"),
        ("backward", lambda g: (g, [()], [(g, g)]), "2 gradients of extra inputs, the op has 1"),
    ],
)
def test_results_that_do_not_fit(method, result, message):
    with pytest.raises(StateError, match=f"op 1: Free.*{message}"):
        run_free(**{method: result})


def test_gradients_that_are_left_out():
    expected = torch.full((3, 4), 2.0)
    assert torch.equal(run_free(), expected)
    assert torch.equal(run_free(backward=lambda grad: (2 * grad, [], [])), expected)


def test_op_backward_that_returns_one_value():
    class Scale(Own):
        def op_backward(self, ctx, grad_output):
            return grad_output

    y = ops.Sequential(Scale(), ops.ReLU())(torch.rand(3, 4, requires_grad=True))
    with pytest.raises(StateError, match="Scale.op_backward must return"):
        y.sum().backward()
