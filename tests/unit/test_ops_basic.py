"""Every op alone against plain torch in FP64: as the native program runs it, and in Python."""

import copy
import math

import pytest
import torch

import ops_reference as ref
import te_fast.pytorch as te
from ops_reference import leaf
from selection import every_pair, sampled
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.errors import (
    ArgumentError,
    DtypeError,
    ShapeError,
    StateError,
    TeFastError,
    UnsupportedError,
)
from te_fast.ops import chain as chains
from te_fast.pytorch import ops

CPU = {"device": "cpu"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Bounds relative to the largest magnitude: a rounding to the type, and FP32 sums in another order.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}

UNARY = {
    "GELU": ref.gelu,
    "QGELU": ref.qgelu,
    "ReLU": ref.relu,
    "SReLU": ref.srelu,
    "SiLU": ref.silu,
}
GATED = {
    "GLU": ref.gated(ref.sigmoid),
    "GEGLU": ref.gated(ref.gelu),
    "QGEGLU": ref.gated(ref.qgelu),
    "ReGLU": ref.gated(ref.relu),
    "SReGLU": ref.gated(ref.srelu),
    "SwiGLU": ref.gated(ref.silu),
    "ClampedSwiGLU": ref.clamped_swiglu,
    "SiTUGLU": ref.situ_glu,
}
SCALED = {
    "ScaledSReLU": ref.srelu,
    "ScaledSwiGLU": ref.gated(ref.silu),
    "ScaledClampedQGeGLU": ref.clamped_swiglu,
    "ScaledSiTUGLU": ref.situ_glu,
}


def in_python(op):
    """The same op as a subclass of the user's own, so that its Python methods run."""
    kind = type(op)

    def fuser_forward(self, *args, **kwargs):
        return kind.fuser_forward(self, *args, **kwargs)

    op.__class__ = type(f"My{kind.__name__}", (kind,), {"fuser_forward": fuser_forward})
    assert not op._is_native()
    return op


@pytest.fixture(params=["native", "python"])
def way(request):
    return in_python if request.param == "python" else lambda op: op


def close(got, expected, dtype, slack=1.0):
    assert got.dtype == dtype
    assert got.shape == expected.shape
    # Where terms cancel, as in a LayerNorm of one column, the error is relative to the terms.
    bound = ROUNDING[dtype] * slack * max(float(expected.detach().abs().max()), 1.0)
    assert (got.double() - expected.double()).abs().max() <= bound


def compare(op, formula, inputs, dtype, slack=1.0):
    """Compare forward and backward of ``op(*inputs)`` with the formula of the inputs and parameters."""
    y = op(*inputs)
    wide = [tensor.detach().double().requires_grad_() for tensor in (*inputs, *op.parameters())]
    expected = formula(*wide)
    close(y, expected, dtype, slack)
    grad = leaf(*y.shape, dtype=dtype, seed=9).detach()
    y.backward(grad)
    expected.backward(grad.double())
    for got, want in zip((*inputs, *op.parameters()), wide, strict=True):
        close(got.grad, want.grad, got.dtype, slack)


@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    sampled(UNARY, DTYPES, ["native", "python"], quick=every_pair),
    indirect=["way"],
)
def test_activation(name, dtype, way):
    compare(way(getattr(ops, name)()), UNARY[name], [leaf(5, 3, 24, dtype=dtype, scale=2)], dtype)


@pytest.mark.parametrize(
    ("name", "interleave", "dtype", "way"),
    sampled(GATED, [None, 1, 4, 8], DTYPES, ["native", "python"], quick=every_pair),
    indirect=["way"],
)
def test_gated_activation(name, interleave, dtype, way):
    op = way(getattr(ops, name)(glu_interleave_size=interleave))
    x = leaf(5, 3, 32, dtype=dtype, scale=4)
    compare(op, lambda x: GATED[name](x, interleave), [x], dtype)


def test_gated_activations_take_the_first_half_for_the_gate():
    x = torch.tensor([[3.0, -2.0, 10.0, 100.0]])
    assert torch.equal(ops.ReGLU()(x), torch.tensor([[30.0, 0.0]]))


def test_constants_of_activations(way):
    x = leaf(7, 32, scale=4)
    op = way(ops.ClampedSwiGLU(limit=2.0, alpha=1.1, glu_linear_offset=0.25))
    compare(op, lambda x: ref.clamped_swiglu(x, None, 2.0, 1.1, 0.25), [x], torch.float32)
    x = leaf(7, 32, scale=4)
    op = way(ops.SiTUGLU(1.5, beta2=3.0))
    compare(op, lambda x: ref.situ_glu(x, None, 1.5, 3.0), [x], torch.float32)


@pytest.mark.parametrize(
    ("name", "interleave", "dtype", "way"),
    sampled(SCALED, [None, 4], DTYPES, ["native", "python"], quick=every_pair),
    indirect=["way"],
)
def test_scaled_activation(name, interleave, dtype, way):
    formula = SCALED[name]
    options = {} if name == "ScaledSReLU" else {"glu_interleave_size": interleave}
    op = way(getattr(ops, name)(**options))

    def scaled(x, scales):
        return formula(x, *options.values()) * scales[..., None]

    inputs = [leaf(5, 3, 32, dtype=dtype, scale=2), leaf(5, 3, dtype=dtype, seed=1)]
    compare(op, scaled, inputs, dtype, slack=2)


EXACT = {
    **{name: lambda dtype, name=name: getattr(ops, name)() for name in (*UNARY, *GATED, *SCALED)},
    "cached": lambda dtype: ops.GELU(cache_quantized_input=True),
    "LayerNorm": lambda dtype: ops.LayerNorm(64, device="cpu", dtype=dtype),
    "RMSNorm": lambda dtype: ops.RMSNorm(64, device="cpu", dtype=dtype),
    "BasicLinear": lambda dtype: ops.BasicLinear(64, 32, device="cpu", dtype=dtype),
}


@pytest.mark.parametrize(
    ("name", "dtype", "rows"), sampled(EXACT, DTYPES, [6, 0], quick=every_pair)
)
def test_python_methods_have_the_bits_of_the_native_program(name, dtype, rows):
    op = EXACT[name](dtype)
    inputs = [leaf(3, rows, 64, dtype=dtype, scale=2)]
    inputs += [leaf(3, rows, seed=1)] if name in SCALED else []
    found = []
    for run in (lambda op: op, in_python):
        tensors = [*inputs, *op.parameters()]
        for tensor in tensors:
            tensor.grad = None
        y = run(op)(*inputs)
        y.backward(leaf(*y.shape, dtype=dtype, seed=9).detach())
        found.append([y, *(tensor.grad for tensor in tensors)])
    assert all(map(torch.equal, *found))
    assert [tensor.dtype for tensor in found[0]] == [tensor.dtype for tensor in found[1]]


@pytest.mark.parametrize("name", ["GELU", "SwiGLU", "ScaledSwiGLU"])
def test_python_methods_compute_fp64_in_fp32(name):
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = [leaf(5, 64).detach().to(dtype).requires_grad_()]
        inputs += [leaf(5, seed=1)] if name in SCALED else []
        y = in_python(getattr(ops, name)())(*inputs)
        y.backward(leaf(*y.shape, seed=9).detach().to(dtype))
        assert y.dtype == inputs[0].grad.dtype == dtype
        found.append([y.float(), *(tensor.grad.float() for tensor in inputs)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("op", [ops.GELU, ops.SwiGLU])
def test_cached_input_is_rounded_to_fp8(op, way):
    x = leaf(8, 32, dtype=torch.bfloat16)
    grad = leaf(8, 32, dtype=torch.bfloat16, seed=3).detach()
    y = way(op(cache_quantized_input=True))(x)
    exact = op()(x.detach())
    assert torch.equal(y, exact)
    grad = grad[:, : y.shape[-1]]
    y.backward(grad)
    scale = 448.0 / x.detach().abs().max().float()
    rounded = (x.detach().float() * scale).to(torch.float8_e4m3fn).float() / scale
    other = rounded.double().requires_grad_()
    {ops.GELU: ref.gelu, ops.SwiGLU: ref.gated(ref.silu)}[op](other).backward(grad.double())
    close(x.grad, other.grad, torch.bfloat16, slack=2)


@pytest.mark.parametrize(
    ("cols", "zero_centered", "dtype", "way"),
    sampled([1, 17, 64, 1000], [False, True], DTYPES, ["native", "python"], quick=every_pair),
    indirect=["way"],
)
def test_norms(cols, zero_centered, dtype, way):
    for name, formula in (("LayerNorm", ref.layer_norm), ("RMSNorm", ref.rms_norm)):
        op = getattr(ops, name)(
            cols, eps=1e-3, zero_centered_gamma=zero_centered, device="cpu", dtype=dtype
        )
        start = 0.0 if zero_centered else 1.0
        assert torch.equal(op.weight, torch.full((cols,), start, dtype=dtype))
        for seed, parameter in enumerate(op.parameters()):
            parameter.data.copy_(leaf(cols, seed=seed).detach())
        x = leaf(6, 5, cols, dtype=dtype, seed=5)

        def reference(x, *parameters, formula=formula):
            return formula(x, *parameters, eps=1e-3, zero_centered=zero_centered)

        compare(way(op), reference, [x], dtype, slack=8)


def test_norm_over_several_dimensions():
    op = ops.LayerNorm((4, 6), device="cpu")
    assert op.weight.shape == (4, 6)
    for seed, parameter in enumerate(op.parameters()):
        parameter.data.copy_(leaf(4, 6, seed=seed).detach())

    def reference(x, weight, bias):
        return torch.nn.functional.layer_norm(x, (4, 6), weight, bias)

    compare(op, reference, [leaf(3, 4, 6, seed=5)], torch.float32, slack=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_bias(dtype, way):
    op = ops.BasicLinear(32, 16, device="cpu", dtype=dtype)
    compare(way(op), lambda x, w: x @ w.T, [leaf(3, 8, 32, dtype=dtype)], dtype)
    op = ops.Bias(16, device="cpu", dtype=dtype)
    op.bias.data.copy_(leaf(16).detach())
    compare(way(op), lambda x, b: x + b, [leaf(3, 8, 16, dtype=dtype)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_without_parameters(dtype, way):
    x = leaf(3, 4, 16, dtype=dtype)
    compare(way(ops.ConstantScale(-1.5)), lambda x: -1.5 * x, [x], dtype)
    for identity in (ops.Identity(), ops.AllReduce(), ops.AllGather(), ops.ReduceScatter()):
        compare(way(identity), lambda x: x, [leaf(3, 4, 16, dtype=dtype)], dtype)
    inputs = [leaf(3, 4, 16, dtype=dtype), leaf(3, 4, 16, dtype=dtype, seed=1)]
    compare(way(ops.AddExtraInput()), lambda x, extra: x + extra, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_python_ops(dtype):
    x = leaf(3, 4, 16, dtype=dtype)
    compare(ops.L2Normalization(), ref.l2_normalization, [x], dtype, slack=2)
    compare(ops.Reshape((2, -1)), lambda x: x.reshape(2, 96), [leaf(3, 4, 16, dtype=dtype)], dtype)


def test_dropout():
    op = ops.Dropout(0.25)
    x = torch.ones(100, 100, requires_grad=True)
    torch.default_generator.manual_seed(3)
    y = op(x)
    kept = y != 0
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / 0.75))
    assert 0.73 < kept.float().mean() < 0.77
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(op.eval()(x), x)


def test_dropout_of_no_rows():
    dropout = ops.Dropout(0.5)
    for module in (dropout, ops.Sequential(dropout, ops.Linear(16, 16, device="cpu"))):
        x = torch.empty(0, 16, requires_grad=True)
        module(x).sum().backward()
        assert x.grad.shape == (0, 16)


def test_dropout_that_drops_nothing_runs_natively():
    torch.manual_seed(4)
    first, last = (ops.Linear(16, 16, device="cpu") for _ in range(2))
    dropout = ops.Dropout(0.5)
    module = ops.Sequential(first, dropout, last)
    expected = ops.Sequential(first, last)
    x = leaf(4, 16)

    def is_native():
        return "Python operation Dropout" not in module.explain()

    module(x)
    assert not is_native()
    for native in (module.eval, lambda: setattr(dropout.train(), "dropout_probability", 0.0)):
        native()
        assert is_native()
        state = torch.get_rng_state()
        assert torch.equal(module(x), expected(x))
        assert torch.equal(torch.get_rng_state(), state)
        module.train()
    dropout.dropout_probability = 0.5
    assert not is_native()
    assert not torch.equal(module(x), expected(x))


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling, DelayedScaling])
def test_dropout_between_linear_ops_is_torchs_own(recipe, monkeypatch):
    """Random numbers and gradients are those of layers one by one; known calls do not go through the plan."""
    torch.manual_seed(6)
    first, dropout, last = ops.Linear(16, 32, **CPU), ops.Dropout(0.25), ops.Linear(32, 16, **CPU)
    module = ops.Sequential(first, dropout, last)
    apart = [copy.deepcopy(layer) for layer in (first, last)]

    def run_all(x):
        x = apart[0](x)
        return apart[1](torch.native_dropout(x, dropout.dropout_probability, True)[0])

    def run(forward, parameters, number):
        torch.manual_seed(number)
        x = leaf(16, 16, seed=number)
        enabled = recipe is not None
        with te.autocast(enabled=enabled, recipe=recipe() if enabled else None):
            y = forward(x)
        y.backward(leaf(16, 16, seed=9).detach())
        grads = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        return y, x.grad, *grads

    for number in range(4):
        if number == 2:
            monkeypatch.setattr(chains, "run_native", None)
        dropout.dropout_probability = 0.25 + number / 8
        got = run(module, [*module.parameters()], number)
        expected = run(run_all, [p for layer in apart for p in layer.parameters()], number)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert (got[0] != 0).any()


@pytest.mark.parametrize("change", ["hook", "type", "rows", "autocast", "mode"])
def test_a_call_between_those_with_dropout_that_are_known(change):
    torch.manual_seed(7)
    first, dropout, last = ops.Linear(16, 32, **CPU), ops.Dropout(0.5), ops.Linear(32, 16, **CPU)
    module = ops.Sequential(first, dropout, last)
    for _ in range(2):
        module(leaf(16, 16))
    x, seen, dtype = leaf(16, 16), [], torch.float32
    if change == "hook":
        module.register_forward_hook(lambda *_: seen.append(True))
    elif change == "type":
        x, dtype = leaf(16, 16, dtype=torch.float64), torch.float32
    elif change == "rows":
        x = leaf(2, 4, 16)
    elif change == "mode":
        module.eval()
    elif change == "autocast":
        dtype = torch.bfloat16
    torch.manual_seed(8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
        y = module(x)
    assert y.dtype == dtype
    assert bool(seen) == (change == "hook")
    torch.manual_seed(8)
    weights = [p.detach().to(dtype) for p in module.parameters()]
    hidden = torch.nn.functional.linear(x.detach().to(dtype), *weights[:2])
    if change != "mode":
        hidden = torch.native_dropout(hidden, 0.5, True)[0]
    expected = torch.nn.functional.linear(hidden, *weights[2:])
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y.detach(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_dropout_that_drops_nothing_takes_any_type(dtype):
    x = torch.arange(32).reshape(2, 16).to(dtype)
    module = ops.Sequential(ops.Dropout(0.5)).eval()
    assert torch.equal(module(x), x)
    module = ops.Sequential(ops.Dropout(0.0), ops.Linear(16, 16, device="cpu"))
    if dtype.is_floating_point:
        assert torch.equal(module(x), module(x.float()))


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: ops.Dropout(0.5), torch.int64),
        (ops.L2Normalization, torch.int64),
        (ops.L2Normalization, torch.complex64),
    ],
)
def test_python_ops_refuse_types_that_they_cannot_compute_in(make, dtype):
    for module in (make(), ops.Sequential(make(), ops.L2Normalization())):
        with pytest.raises(DtypeError, match=r"floating.* type, got torch\."):
            module(torch.ones(2, 4, dtype=dtype))


@pytest.mark.parametrize("in_place", [False, True])
def test_extra_output(in_place, way):
    op = way(ops.MakeExtraOutput(in_place=in_place))
    x = leaf(4, 8)
    y, extra = op(x)
    assert torch.equal(y, x)
    assert torch.equal(extra, x)
    (y * 2 + extra * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 5.0))
    for used in range(2):
        x.grad = None
        op(x)[used].sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


def test_extra_input_in_place_takes_its_memory():
    extra = torch.ones(4, 8)
    y = in_python(ops.AddExtraInput(in_place=True))(torch.full((4, 8), 2.0), extra)
    assert torch.equal(extra, torch.full((4, 8), 3.0))
    assert y.data_ptr() == extra.data_ptr()


@pytest.mark.parametrize(
    "extra",
    [
        lambda: torch.arange(32.0).view(8, 4).t(),
        lambda: torch.arange(64.0).view(4, 16)[:, ::2],
    ],
    ids=["transposed", "every second"],
)
def test_strided_extra_input_in_place_takes_its_memory(extra, way):
    extra, x = extra(), torch.full((4, 8), 2.0)
    wanted, version = extra + x, extra._version
    y = way(ops.AddExtraInput(in_place=True))(x, extra)
    assert torch.equal(extra, wanted)
    assert torch.equal(y, wanted)
    assert extra._version > version


def test_expanded_extra_input_in_place_is_refused(way):
    extra = torch.ones(1, 8)
    with pytest.raises((ShapeError, RuntimeError)):
        way(ops.AddExtraInput(in_place=True))(torch.ones(4, 8), extra.expand(4, 8))
    assert extra.eq(1).all()


def test_initial_values():
    torch.default_generator.manual_seed(5)
    op = ops.BasicLinear(64, 48, device="cpu")
    torch.default_generator.manual_seed(5)
    assert torch.equal(op.weight, torch.nn.Linear(64, 48, bias=False).weight)
    assert torch.equal(ops.Linear(64, 48, device="cpu").bias, torch.zeros(48))
    assert ops.Linear(64, 48, bias=False, device="cpu").bias is None
    op = ops.BasicLinear(8, 8, device="cpu", dtype=torch.bfloat16)
    assert op.weight.dtype == torch.bfloat16


def test_weight_is_initialised_under_the_tracker():
    forked = []

    class Tracker:
        def fork(self):
            forked.append(True)
            return torch.random.fork_rng(devices=[])

    ops.Linear(8, 8, device="cpu", rng_state_tracker_function=Tracker)
    assert forked == [True]


def test_meta_parameters_become_real_at_the_first_forward():
    chain = ops.Sequential(
        ops.LayerNorm(16, device="meta", zero_centered_gamma=True),
        ops.Linear(16, 8, device="meta"),
        ops.RMSNorm(8, device="meta"),
    )
    assert all(parameter.is_meta for parameter in chain.parameters())
    if torch.cuda.is_available():
        pytest.skip("they go to the GPU")
    assert chain(torch.randn(4, 16)).shape == (4, 8)
    assert not any(parameter.is_meta for parameter in chain.parameters())
    assert torch.equal(chain[0].weight, torch.zeros(16))
    assert chain[1].weight.abs().max() > 0


def test_reset_parameters_of_meta_ops():
    op = ops.Linear(16, 8, device="meta")
    op.reset_parameters()
    assert not op.weight.is_meta
    assert op.basic_ops[0].weight is op.weight
    assert torch.equal(op.bias.cpu(), torch.zeros(8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.BasicLinear(8, 8, device="cpu", dtype=torch.int8), "dtype must be"),
        (lambda: ops.BasicLinear(8, 8, tensor_parallel_mode="both"), "tensor_parallel_mode"),
        (lambda: ops.SwiGLU(glu_interleave_size=0), "glu_interleave_size"),
        (lambda: ops.SiTUGLU(beta1=0.0), "beta1 must be positive"),
        (lambda: ops.SiTUGLU(beta1=math.inf), "beta1 must be positive and finite, got inf"),
        (lambda: ops.SiTUGLU(beta2=math.nan), "beta2 must be positive"),
        (lambda: ops.SiTUGLU(beta2="4"), "beta2 must be positive and finite, got '4'"),
        (lambda: ops.ScaledSiTUGLU(beta1=None), "beta1 must be positive"),
        (lambda: ops.ScaledSiTUGLU(beta2=-math.inf), "beta2 must be positive"),
        (lambda: ops.SiTUGLU(beta1=torch.ones(2)), "beta1 must be positive"),
        (lambda: ops.ClampedSwiGLU(limit=-1.0), "limit must be positive"),
        (lambda: ops.Dropout(1.0), "p must be"),
        (lambda: ops.LayerNorm((), device="cpu"), "normalized_shape"),
        (lambda: ops.FusedOperation([]), "needs basic operations"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.BasicLinear(8, 8, device="cpu", userbuffers_options={"a": 1}), "userbuffers"),
        (lambda: ops.LayerNorm(8, device="cpu", sm_margin=2), "sm_margin"),
        (lambda: ops.RMSNorm(8, device="cpu", sm_margin={"forward": 1}), "sm_margin"),
        (lambda: ops.fused.ForwardLinearBiasAdd, "explain"),
    ],
)
def test_what_is_not_supported_says_so(make, message):
    with pytest.raises(UnsupportedError, match=message):
        make()


def test_what_is_not_there_can_be_asked_for():
    assert not hasattr(ops.fused, "ForwardLinearBiasAdd")
    with pytest.raises(ImportError):
        from te_fast.pytorch.ops.fused import ForwardLinearBiasAdd  # noqa: F401


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (lambda: ops.BasicLinear(8, 8, device="cpu"), [(2, 7)]),
        (lambda: ops.BasicLinear(8, 8, device="cpu"), [()]),
        (lambda: ops.Bias(8, device="cpu"), [(2, 7)]),
        (lambda: ops.LayerNorm(8, device="cpu"), [(2, 7)]),
        (lambda: ops.SwiGLU(), [(2, 7)]),
        (lambda: ops.SwiGLU(glu_interleave_size=4), [(2, 12)]),
        (lambda: ops.AddExtraInput(), [(2, 8), (2, 1)]),
        (lambda: ops.AddExtraInput(), [(4, 4, 8), (2, 8, 8)]),
        (lambda: ops.AddExtraInput(), [(4, 4, 8), (16, 8)]),
        (lambda: ops.ScaledSwiGLU(), [(2, 8), (4,)]),
    ],
)
def test_shapes_that_do_not_fit(op, shapes, way):
    op = way(op())
    with pytest.raises(ShapeError):
        op(*(torch.zeros(shape) for shape in shapes))


def test_reshape_that_does_not_fit():
    with pytest.raises(ShapeError, match="Reshape"):
        ops.Reshape((3, -1))(torch.zeros(4, 4))


def test_inputs_that_are_no_tensors():
    with pytest.raises(DtypeError, match="0: GELU.*must be a torch.Tensor, got list"):
        ops.GELU()([1.0])
    with pytest.raises(UnsupportedError, match="subclasses"):
        ops.GELU()(torch.zeros(2).as_subclass(type("T", (torch.Tensor,), {})))
    with pytest.raises(DtypeError):
        ops.GELU()(torch.zeros(2, 2, dtype=torch.int64))


def test_ops_with_extra_tensors_have_no_op_forward():
    with pytest.raises(StateError, match="fuser_forward"):
        ops.AddExtraInput().op_forward(None, torch.zeros(2))


# Scalars and types -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "formula"),
    [
        (lambda: ops.ConstantScale(-2.5), lambda x: -2.5 * x),
        (ops.Identity, lambda x: x),
        (ops.GELU, ref.gelu),
    ],
)
def test_a_scalar_has_elements_but_no_rows(op, formula, way):
    compare(way(op()), formula, [torch.tensor(1.5, requires_grad=True)], torch.float32)


def test_a_scalar_is_added():
    x, extra = torch.tensor(1.5), torch.tensor(2.0)
    y, before = ops.Sequential(ops.MakeExtraOutput(), ops.AddExtraInput())(x, extra)
    assert (y.shape, y.item(), before.item()) == ((), 3.5, 1.5)


@pytest.mark.parametrize(
    "op",
    [
        lambda: ops.Linear(1, 5, device="cpu"),
        lambda: ops.Bias(1, device="cpu"),
        lambda: ops.RMSNorm(1, device="cpu"),
        ops.SwiGLU,
    ],
)
def test_ops_on_rows_refuse_a_scalar(op):
    with pytest.raises(ShapeError, match="scalar|multiple of 2"):
        op()(torch.tensor(1.5))


PARAMETRIC = {
    "linear": (
        lambda **options: ops.Linear(16, 16, **options),
        lambda x, w, b: x @ w.T + b,
    ),
    "layer_norm": (lambda **options: ops.LayerNorm(16, **options), ref.layer_norm),
    "rms_norm": (lambda **options: ops.RMSNorm(16, **options), ref.rms_norm),
}


@pytest.mark.parametrize(
    ("name", "input_type", "weight_type", "way"),
    sampled(PARAMETRIC, DTYPES, DTYPES, ["native", "python"], quick=every_pair),
    indirect=["way"],
)
def test_linear_and_norms_compute_in_the_type_of_their_weights(name, input_type, weight_type, way):
    make, formula = PARAMETRIC[name]
    op = make(device="cpu", dtype=weight_type)
    op = op if name == "linear" else way(op)
    ref.randomise(op)
    x = leaf(4, 16, dtype=input_type)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, *op.parameters())]
    expected = formula(wide[0].to(weight_type).double(), *wide[1:])
    y = op(x)
    close(y, expected, weight_type, slack=4)
    grad = leaf(4, 16, dtype=weight_type, seed=3).detach()
    y.backward(grad)
    expected.backward(grad.double())
    coarse = max(ROUNDING[input_type], ROUNDING[weight_type])
    for got, want in zip((x, *op.parameters()), wide, strict=True):
        assert got.grad.dtype == got.dtype
        assert (got.grad.double() - want.grad).abs().max() <= 4 * coarse * want.grad.abs().max()
    assert op(x[:0]).dtype == weight_type
    # A program that was compiled for one type serves no other type.
    assert op(x.detach().to(weight_type)).dtype == weight_type
    assert op(x).dtype == weight_type


def test_a_bias_computes_in_the_wider_type(way):
    bias = way(ops.Bias(8, device="cpu", dtype=torch.bfloat16))
    assert bias(leaf(2, 8)).dtype == torch.float32
    assert bias(leaf(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert ops.Bias(8, device="cpu")(leaf(2, 8, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ops.ConstantScale("a"), "ConstantScale: scale"),
        (lambda: ops.ConstantScale(torch.ones(32)), "ConstantScale: scale"),
        (lambda: ops.L2Normalization(eps="a"), "L2Normalization: eps"),
        (lambda: te.LayerNorm(32, eps="a", device="cpu"), "LayerNorm: eps"),
        (lambda: te.LayerNorm("a", device="cpu"), "LayerNorm: normalized_shape"),
        (lambda: ops.RMSNorm(2.5, device="cpu"), "RMSNorm: normalized_shape"),
        (lambda: ops.Reshape("ab"), "Reshape: shape"),
        (lambda: ops.Reshape(5), "Reshape: shape"),
        (lambda: ops.Dropout("a"), "Dropout: p"),
        (lambda: ops.Bias("a"), "Bias: size"),
        (lambda: ops.Linear(2.5, 4), "Linear: in_features"),
        (lambda: ops.Linear(4, None), "Linear: out_features"),
        (lambda: ops.BasicLinear("a", 4), "BasicLinear: in_features"),
        (lambda: ops.BasicLinear(4, True), "BasicLinear: out_features"),
        (lambda: ops.Quantize(forward="a"), "Quantize: forward"),
    ],
)
def test_wrong_constants_are_refused_at_construction(make, name):
    with pytest.raises(TypeError, match=f"^{name} must be") as caught:
        make()
    assert isinstance(caught.value, TeFastError)


def test_constants_may_be_tensors_of_one_number():
    assert torch.equal(
        ops.ConstantScale(torch.tensor(0.5))(torch.ones(2, 2)), torch.full((2, 2), 0.5)
    )


def test_negative_sizes():
    with pytest.raises(ShapeError, match="^Bias: size must not be negative, got -1"):
        ops.Bias(-1)
    with pytest.raises(ShapeError, match="^Linear: out_features must not be negative, got -1"):
        ops.Linear(4, -1)
