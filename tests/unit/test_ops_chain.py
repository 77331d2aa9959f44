"""Chains of ops against plain torch in FP64: native ones, and those with Python ops and fusions."""

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ops_reference as ref
from ops_reference import ROUNDING, close, compare, leaf, randomise
from products import check_types
from selection import quickly
from te_fast import dispatch
from te_fast.errors import ShapeError, StateError
from te_fast.pytorch import ops


class LearnableScale(ops.BasicOperation):
    """The user's own op of Transformer Engine's documentation."""

    def __init__(self, value=1.0):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(value))

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(self.scale, input_)
        return (self.scale * input_).to(input_.dtype)

    def op_backward(self, ctx, grad_output):
        scale, x = ctx.saved_tensors
        return scale * grad_output, ((x.float() * grad_output.float()).sum(),)


class Split(ops.BasicOperation):
    """Two extra inputs and two extra outputs, one of them of integers."""

    num_extra_inputs = 2
    num_extra_outputs = 2

    def op_forward(self, *_, **__):
        raise AssertionError

    op_backward = op_forward

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        a, b = basic_op_extra_inputs[0]
        basic_op_ctxs[0].save_for_backward(input_, a, b)
        return input_ * a, [(input_ * b, input_.argmax(-1))]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, a, b = basic_op_ctxs[0].saved_tensors
        extra, integers = basic_op_grad_extra_outputs[0]
        assert integers is None
        return grad_output * a + extra * b, [()], [(grad_output * x, extra * x)]


def mlp(dtype=torch.float32, *between):
    options = {"device": "cpu", "dtype": dtype}
    return randomise(
        ops.Sequential(
            ops.LayerNorm(16, **options),
            ops.Linear(16, 64, **options),
            *between,
            ops.SwiGLU(),
            ops.Linear(32, 16, **options),
        )
    )


def mlp_formula(x, gamma, beta, w1, b1, w2, b2):
    h = ref.layer_norm(x, gamma, beta) @ w1.T + b1
    return ref.gated(ref.silu)(h) @ w2.T + b2


@pytest.fixture(params=["native", "python", "plain module"])
def between(request):
    """No module, an op of the user's own, or a plain module for the middle of a chain; none changes values."""

    class Nothing(ops.Identity):
        def op_forward(self, ctx, input_, **_):
            return input_

    return {"native": [], "python": [Nothing()], "plain module": [torch.nn.Identity()]}[
        request.param
    ]


# Chains -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ROUNDING)
def test_mlp(dtype, between):
    compare(mlp(dtype, *between), mlp_formula, [leaf(3, 8, 16, dtype=dtype)])


@pytest.mark.parametrize("activation", ["GELU", "QGELU", "ReLU", "SReLU", "SiLU"])
def test_linear_and_activation(activation, between):
    options = {"device": "cpu"}
    module = ops.Sequential(
        ops.RMSNorm(16, zero_centered_gamma=True, **options),
        ops.Linear(16, 32, **options),
        getattr(ops, activation)(),
        *between,
        ops.Linear(32, 16, bias=False, **options),
    )
    function = getattr(ref, activation.lower())

    def formula(x, gamma, w1, b1, w2):
        return function(ref.rms_norm(x, gamma, zero_centered=True) @ w1.T + b1) @ w2.T

    compare(randomise(module), formula, [leaf(8, 16)])


@pytest.mark.parametrize("in_place", [False, True])
def test_residual_block(in_place, between):
    """The block has all of the fusion list: linear + bias + add, linear + scale + add, extra output + norm."""
    options = {"device": "cpu"}
    module = ops.Sequential(
        ops.MakeExtraOutput(in_place=in_place),
        ops.RMSNorm(16, **options),
        ops.Linear(16, 16, **options),
        *between,
        ops.AddExtraInput(in_place=in_place),
        ops.MakeExtraOutput(in_place=in_place),
        ops.BasicLinear(16, 16, **options),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(in_place=in_place),
    )

    def formula(x, first, second, gamma, w1, b1, w2):
        middle = ref.rms_norm(x, gamma) @ w1.T + b1 + first
        return middle @ w2.T * 0.5 + second, x, middle

    inputs = [leaf(8, 16), *(leaf(8, 16, seed=seed) for seed in (1, 2))]
    if not in_place:
        compare(randomise(module), formula, inputs, count=3)
        return
    # In place, the chain overwrites the caller's tensors and gradients, so the chain gets copies.
    copies = [tensor.detach().clone() for tensor in inputs[1:]]
    outputs = randomise(module)(inputs[0], *(copy.clone() for copy in copies))
    wide = [t.detach().double() for t in (inputs[0], *copies, *module.parameters())]
    for got, want in zip(outputs, formula(*wide), strict=True):
        close(got, want)
    torch.autograd.backward(outputs, [torch.ones(8, 16) for _ in outputs])
    x = wide[0].clone().requires_grad_()
    torch.autograd.backward(
        formula(x, *wide[1:]), [torch.ones(8, 16, dtype=torch.float64) for _ in outputs]
    )
    close(inputs[0].grad, x.grad)


def test_scaled_activation_in_a_chain(between):
    module = ops.Sequential(
        ops.Linear(16, 64, device="cpu"),
        *between,
        ops.ScaledSwiGLU(glu_interleave_size=8),
        ops.BasicLinear(32, 16, device="cpu"),
    )

    def formula(x, scales, w1, b1, w2):
        return (ref.gated(ref.silu)(x @ w1.T + b1, 8) * scales[..., None]) @ w2.T

    compare(randomise(module), formula, [leaf(8, 16), leaf(8, seed=1)])


def test_shapes_and_strides(between):
    module = mlp(torch.float32, *between)
    for shape in ((16,), (1, 16), (7, 16), (2, 3, 5, 16)):
        compare(module, mlp_formula, [leaf(*shape)])
        for parameter in module.parameters():
            parameter.grad = None
    x = leaf(16, 8)
    assert torch.allclose(module(x.t()), module(x.t().contiguous()), atol=1e-6)
    y = module(leaf(0, 16))
    assert y.shape == (0, 16)
    y.sum().backward()
    assert all(not p.grad.any() for p in module.parameters() if p.grad is not None)


def test_torch_autocast(between):
    module = mlp(torch.float32, *between)
    x = leaf(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    expected = mlp_formula(*(t.detach().double() for t in (x, *module.parameters())))
    close(y, expected)
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_under_torch_autocast_have_types_that_cublas_takes(dtype, compute):
    op = randomise(ops.Linear(16, 24, bias=False, device="cpu", dtype=dtype))
    x = leaf(8, 16, dtype=dtype)
    with dispatch.record() as launches:
        with torch.autocast("cpu", dtype=compute):
            y = op(x)
        assert y.dtype == compute
        grad = torch.randn(8, 24).to(compute)
        y.backward(grad)
    check_types(launches)
    assert x.grad.dtype == op.weight.grad.dtype == dtype
    close(op.weight.grad.to(compute), grad.double().t() @ x.detach().to(compute).double())
    close(x.grad.to(compute), grad.double() @ op.weight.detach().to(compute).double())


# Autograd -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["input", "norm", "weights", "all but the last", "all"])
def test_frozen_parts(frozen, between):
    module = mlp(torch.float32, *between)
    x = leaf(8, 16)
    if frozen in ("input", "all"):
        x = x.detach()
    parts = list(module.named_parameters())
    for name, parameter in parts:
        parameter.requires_grad_(
            {
                "input": True,
                "norm": not name.startswith("0."),
                "weights": parameter.dim() == 1,
                "all but the last": name == parts[-1][0],
                "all": False,
            }[frozen]
        )
    if frozen == "all":
        assert not module(x).requires_grad
        return
    compare(module, mlp_formula, [x])


def test_no_grad(between):
    module = mlp(torch.float32, *between)
    x = leaf(8, 16)
    with torch.no_grad():
        y = module(x)
    assert not y.requires_grad
    assert torch.equal(y, module(x))
    with torch.inference_mode():
        assert torch.equal(module(x), y)


def test_retained_graphs(between):
    module = mlp(torch.float32, *between)
    x = leaf(8, 16)
    y = module(x)
    grad = torch.randn(8, 16)
    once = torch.autograd.grad(y, [x, *module.parameters()], grad, retain_graph=True)
    again = torch.autograd.grad(y, [x, *module.parameters()], grad)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, grad)


def test_second_derivatives_are_refused(between):
    x = leaf(8, 16)
    (dx,) = torch.autograd.grad(mlp(torch.float32, *between)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


def test_saved_tensors_go_through_hooks(between):
    module = mlp(torch.float32, *between)
    x = leaf(8, 16)
    expected = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    assert packed
    got = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, between):
    module = mlp(torch.float32, *between)
    x = leaf(8, 16)
    expected = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    for tensor, want in zip((x, *module.parameters()), expected, strict=True):
        assert torch.equal(tensor.grad, want)


def test_a_saved_tensor_that_was_written_to_is_noticed():
    module = ops.Sequential(ops.GELU(), LearnableScale())
    x = torch.randn(4, 8)
    x.requires_grad_()
    y = module(x)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "between",
    quickly(
        ["native", "python", "plain module"],
        "plain module",
        slow=["native", "python", "plain module"],
    ),
    indirect=True,
)
def test_nothing_outlives_backward(between):
    module = mlp(torch.float32, *between)
    x = leaf(8, 16)
    y = module(x)
    alive = weakref.ref(y.grad_fn)
    y.sum().backward()
    del y
    gc.collect()
    assert alive() is None


@pytest.mark.every_torch
@pytest.mark.parametrize(
    "between",
    quickly(
        ["native", "python", "plain module"], "native", slow=["native", "python", "plain module"]
    ),
    indirect=True,
)
@pytest.mark.filterwarnings("ignore")  # dynamo's own code causes warnings
def test_torch_compile_is_right_where_it_may_break_the_graph(between):
    module = mlp(torch.float32, *between)
    x = leaf(8, 16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(module(x)) * 2, backend="eager")
    for _ in range(2):
        expected = torch.autograd.grad((torch.relu(module(x)) * 2).sum(), x)
        got = torch.autograd.grad(compiled(x).sum(), x)
        assert torch.equal(got[0], expected[0])


# The user's own ops -------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 2, 5])
def test_own_op_in_a_chain(position):
    module = mlp()
    module.insert(position, LearnableScale(1.5))

    def formula(x, *parameters):
        parameters = list(parameters)
        scale = parameters.pop({0: 0, 2: 4, 5: 6}[position])
        if position == 0:
            return mlp_formula(x * scale, *parameters)
        gamma, beta, w1, b1, w2, b2 = parameters
        h = ref.layer_norm(x, gamma, beta) @ w1.T + b1
        if position == 2:
            h = h * scale
        y = ref.gated(ref.silu)(h) @ w2.T + b2
        return y * scale if position == 5 else y

    module.append(ops.Identity())
    compare(module, formula, [leaf(8, 16)])


def test_own_op_with_extra_tensors():
    module = ops.Sequential(ops.ConstantScale(2.0), Split(), ops.ConstantScale(3.0))
    x, a, b = leaf(4, 8), leaf(4, 8, seed=1), leaf(4, 8, seed=2)
    y, extra, integers = module(x, a, b)
    assert torch.allclose(y, 6 * x * a)
    assert torch.allclose(extra, 2 * x * b)
    assert torch.equal(integers, x.argmax(-1))
    assert not integers.requires_grad
    (y.sum() + extra.sum()).backward()
    assert torch.allclose(x.grad, (6 * a + 2 * b).detach(), atol=1e-6)
    assert torch.allclose(a.grad, (6 * x).detach(), atol=1e-6)
    assert torch.allclose(b.grad, (2 * x).detach(), atol=1e-6)


def test_subclass_of_a_native_op_runs_its_own_methods():
    class Louder(ops.ReLU):
        def op_forward(self, ctx, input_, **options):
            return 2 * super().op_forward(ctx, input_, **options)

        def op_backward(self, ctx, grad_output):
            return super().op_backward(ctx, 2 * grad_output)

    class Renamed(ops.ReLU):
        pass

    assert Renamed()._is_native()
    compare(ops.Sequential(Louder(), Renamed()), lambda x: 2 * ref.relu(x), [leaf(4, 8)])


def test_own_linear_accumulates_into_main_grad():
    class Own(ops.BasicLinear):
        def op_forward(self, *args, **kwargs):
            return super().op_forward(*args, **kwargs)

    for kind in (ops.BasicLinear, Own):
        op = kind(8, 4, device="cpu", accumulate_into_main_grad=True)
        x = leaf(6, 8)
        op.weight.main_grad = torch.ones(4, 8)
        op(x).sum().backward()
        expected = 1 + torch.ones(4, 6) @ x.detach()
        assert torch.allclose(op.weight.main_grad, expected, atol=1e-5)
        assert op.weight.grad is None
        del op.weight.main_grad
        with pytest.raises(StateError, match="main_grad"):
            op(x).sum().backward()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda self, ctx, grad: (grad, (None, None)), "0: LearnableScale: backward returned 2"),
    ],
)
def test_wrong_results_of_own_ops(result, message):
    kind = type("LearnableScale", (LearnableScale,), {"op_backward": result})
    with pytest.raises(StateError, match=message):
        ops.Sequential(kind())(leaf(2, 4)).sum().backward()


def test_wrong_gradient_of_an_own_op():
    class Cut(LearnableScale):
        def op_backward(self, ctx, grad_output):
            return grad_output[:1], (None,)

    chain = ops.Sequential(ops.Linear(16, 16, device="cpu"), Cut())
    message = (
        r"1: Cut: backward returned a gradient of shape \[1, 16\] of its input of shape \[8, 16\]"
    )
    with pytest.raises(ShapeError, match=message):
        chain(leaf(8, 16)).sum().backward()


def test_wrong_gradient_of_an_extra_output_that_an_own_op_took():
    class Cut(Split):
        num_extra_inputs, num_extra_outputs = 1, 0

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
            return input_ + basic_op_extra_inputs[0][0], [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            return grad_output, [()], [(grad_output[:1],)]

    make = ops.MakeExtraOutput()
    make.set_extra_output_channel(0, "c", output_to_caller=False)
    cut = Cut()
    cut.set_extra_input_channel(0, "c")
    chain = ops.Sequential(ops.Linear(16, 16, device="cpu"), make, cut)
    with pytest.raises(ShapeError, match="the gradient of an extra output must be .* 8 rows of 16"):
        chain(leaf(8, 16)).sum().backward()


def test_wrong_number_of_extra_outputs():
    class Fewer(Split):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_, [()]

    with pytest.raises(StateError, match=r"1: Fewer: Fewer returned \[0\].*expected \[2\]"):
        ops.Sequential(ops.GELU(), Fewer())(leaf(2, 4), leaf(2, 4), leaf(2, 4))


def test_an_op_that_fails_leaves_the_chain_usable():
    class Failing(ops.BasicOperation):
        fail = True

        def op_forward(self, ctx, input_, **_):
            if self.fail:
                message = "no"
                raise ZeroDivisionError(message)
            return input_

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    failing = Failing()
    module = mlp(torch.float32, failing)
    with pytest.raises(ZeroDivisionError):
        module(leaf(8, 16))
    failing.fail = False
    compare(module, mlp_formula, [leaf(8, 16)])


# Types --------------------------------------------------------------------------------------------


def test_types_change_where_an_op_has_a_weight_of_another(between):
    wide, narrow = {"device": "cpu"}, {"device": "cpu", "dtype": torch.bfloat16}
    module = randomise(
        ops.Sequential(
            ops.MakeExtraOutput(),
            ops.Linear(16, 16, **narrow),
            ops.GELU(),
            *between,
            ops.MakeExtraOutput(),
            ops.RMSNorm(16, **wide),
            ops.SiLU(),
            ops.Linear(16, 8, bias=False, **narrow),
        )
    )

    def formula(x, w1, b1, gamma, w2):
        h = ref.gelu(x @ w1.T + b1)
        return ref.silu(ref.rms_norm(h, gamma)) @ w2.T, x, h

    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        module.zero_grad()
        x = leaf(4, 16, dtype=dtype)
        outputs = module(x)
        assert [y.dtype for y in outputs] == [torch.bfloat16, dtype, torch.bfloat16]
        tensors = [x, *module.parameters()]
        inputs = [tensor.detach().double().requires_grad_() for tensor in tensors]
        expected = formula(*inputs)
        grads = [leaf(*y.shape, dtype=y.dtype, seed=5 + i).detach() for i, y in enumerate(outputs)]
        torch.autograd.backward(outputs, grads)
        torch.autograd.backward(expected, [grad.double() for grad in grads])
        bound = ROUNDING[torch.bfloat16]
        for got, want in (
            *zip(outputs, expected, strict=True),
            *((t.grad, i.grad) for t, i in zip(tensors, inputs, strict=True)),
        ):
            assert (got.double() - want).abs().max() <= bound * want.abs().max()
        assert [t.grad.dtype for t in tensors] == [t.dtype for t in tensors]


def test_half_of_a_module_that_has_run():
    module = mlp()
    x = leaf(4, 16)
    assert module(x).dtype == torch.float32
    module[-1].half()
    assert module(x).dtype == torch.float16
    module.bfloat16()
    y = module(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    assert "in torch.bfloat16" in module.explain()


def test_a_fused_backward_finds_the_type_of_the_linear_op():
    """The fused operation is written as in Transformer Engine's documentation."""

    class LinearScale(ops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            x, weight = basic_op_ctxs[1].saved_tensors
            dtype = basic_op_ctxs[1].dtype
            dx = grad_output.double() @ (self.basic_ops[0].scale * weight.double())
            dw = grad_output.double().T @ x.double()
            return dx.to(dtype), [(), (dw.to(dtype),)], [(), ()]

    def fuse(group, **_):
        return [LinearScale(group)]

    module = ops.Sequential(ops.ConstantScale(1.25), ops.Linear(8, 8, bias=False, device="cpu"))
    ops.register_backward_fusion(fuse)
    try:
        compare(randomise(module), lambda x, w: 1.25 * x @ w.T, [leaf(4, 8)])
        group = module._module_groups[0]
        ((fused, indices),) = group._backward_ops
        assert (type(fused), indices) == (LinearScale, [0, 1])
        assert [indices for _, indices in group._forward_ops] == [[0], [1]]
    finally:
        ops.OperationFuser.backward_fusion_functions.remove(fuse)
