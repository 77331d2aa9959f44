"""The functions of te_fast.pytorch.jit, beside torch's own and its autograd."""

import pytest
import torch

from te_fast.errors import ArgumentError
from te_fast.helpers import fused_functions
from te_fast.pytorch import jit


def plain(function):
    """The function that `lazy_compile` has wrapped: a compiler of C++ would take minutes here."""
    return function.__wrapped__


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)


def random(*shape, dtype=torch.float32, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2
    return values.to(dtype)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def close(found, expected, dtype):
    tolerance = {"rtol": 4e-2, "atol": 4e-2} if dtype is torch.bfloat16 else {"atol": 2e-6}
    return torch.allclose(found.double(), expected.double(), **tolerance)


@DTYPES
@pytest.mark.parametrize("rows", [1, 7, 0])
def test_gelu_and_its_gradient(dtype, rows):
    x, bias = random(rows, 16, dtype=dtype), random(16, dtype=dtype, seed=1)
    grad = random(rows, 16, dtype=dtype, seed=2)
    for b in (bias, None, bias[:0]):
        has_bias = b is not None and b.numel() > 0
        wide = x.double().requires_grad_()
        wide_bias = (b if has_bias else torch.zeros(16)).double().requires_grad_()
        expected = torch.nn.functional.gelu(wide + wide_bias, approximate="tanh")
        expected.backward(grad.double())
        assert close(jit.bias_gelu_fused(x, b), expected, dtype)
        db, dx = jit.bgrad_dgelu_fused(grad, x, b)
        assert close(dx, wide.grad, dtype)
        if has_bias:
            assert torch.equal(db, dx.sum(0))
        else:
            assert db is None


@DTYPES
def test_l2_norm_and_its_gradient(dtype):
    x, grad, eps = random(5, 16, dtype=dtype), random(5, 16, dtype=dtype, seed=1), 1e-3
    x[2] = 0.0
    wide = x.double().requires_grad_()
    scale = (wide.square().sum(-1, keepdim=True) + eps).rsqrt()
    (wide * scale).backward(grad.double())
    found, kept = jit.l2normalization_fwd_fused(x, eps)
    assert (found.dtype, kept.dtype) == (dtype, torch.float32)
    assert torch.equal(jit.l2normalization_fused(x, eps), found)
    assert close(found, wide * scale, dtype)
    assert torch.allclose(kept.double(), scale, rtol=1e-6)
    dx = jit.l2normalization_backward_fused(grad, x, kept, eps)
    assert dx.dtype is dtype
    assert torch.allclose(dx.double(), wide.grad, rtol=1e-2, atol=1e-2 * wide.grad.abs().max())


def test_values_that_are_not_finite():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    found = jit.bias_gelu_fused(x, None)
    assert torch.equal(found.isnan(), torch.tensor([True, False, True, False]))
    assert found[1] == torch.inf


@pytest.mark.parametrize("prob", [0.0, 0.4])
def test_bias_dropout_and_residual(prob):
    x, bias, residual = random(6, 8), random(8, seed=1), random(6, 8, seed=2)
    torch.manual_seed(3)
    expected = residual + torch.nn.functional.dropout(x + bias, prob)
    for function in (
        jit.bias_dropout_add_fused_train,
        jit.get_bias_dropout_add(True),
        plain(jit.bias_dropout_add_fused_train_),
        lambda *given: jit.bias_dropout_add(*given, True),
    ):
        torch.manual_seed(3)
        assert torch.equal(function(x, bias, residual, prob), expected)
    for function in (
        jit.bias_dropout_add_fused_inference,
        jit.get_bias_dropout_add(False),
        plain(jit.bias_dropout_add_fused_inference_),
    ):
        assert torch.equal(function(x, bias, residual, prob), residual + (x + bias))


def test_training_has_gradients_without_grad_mode_and_no_autocast():
    x = random(4, 8).requires_grad_()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = jit.bias_dropout_add_fused_train(x, random(8), random(4, 8), 0.0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 8))


def test_a_function_is_compiled_at_its_first_call(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)

    @jit.lazy_compile
    def double(x):
        """Double a number."""
        return 2 * x

    assert (double.__name__, double.__doc__) == ("double", "Double a number.")
    assert compiled == []
    assert [double(2), double(x=3)] == [4, 6]
    assert compiled == [double.__wrapped__]


def test_the_environment_turns_compilation_off(fresh):
    code = (
        "import os; os.environ['NVTE_TORCH_COMPILE'] = '0'\n"
        "import torch; torch.compile = None\n"
        "from te_fast.pytorch import jit\n"
        "print(jit.bias_gelu_fused(torch.zeros(2), torch.zeros(2)).tolist())"
    )
    assert fresh(code).strip() == "[0.0, 0.0]"
    assert jit.jit_fuser is jit.dropout_fuser is jit.lazy_compile
    assert jit.set_jit_fusion_options() is None


@pytest.mark.parametrize(
    ("warm", "names", "shape"),
    [
        ("bias_dropout_add", ["bias_dropout_add_fused_train"], (2, 3, 8)),
        ("bias_gelu", ["bias_gelu_fused_", "gelu_fused_"], (6, 8)),
        ("l2normalization", ["l2normalization_fused_", "l2normalization_fwd_fused_"], (6, 8)),
    ],
)
def test_warming_up_calls_for_all_types_and_leaves_random_numbers_alone(
    warm, names, shape, monkeypatch
):
    seen = set()
    for name in names:
        function = getattr(fused_functions, name)

        def call(x, *rest, function=function, name=name):
            seen.add((name, x.shape, x.dtype, x.requires_grad))
            return function(x, *rest)

        monkeypatch.setattr(fused_functions, name, call)
    before = torch.get_rng_state()
    getattr(jit, f"warmup_jit_{warm}_all_dtypes")(8, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)
    types = (torch.float32, torch.bfloat16, torch.float16)
    expected = {(name, shape, dtype, g) for name in names for dtype in types for g in (False, True)}
    if warm == "l2normalization":
        expected = {call for call in expected if call[3] == (call[0] == names[1])}
    assert seen == expected


def test_functions_that_dynamo_does_not_trace():
    import torch._dynamo

    @jit.no_torch_dynamo()
    def outside(x):
        return x + torch.compiler.is_compiling()

    assert outside.__name__ == "outside"
    assert torch.equal(outside(torch.ones(2)), torch.ones(2))
    seen = []

    def reason(given):
        seen.append(sorted(given))
        return "a scale" if given.get("scale") is not None else None

    @jit.no_torch_dynamo(when=reason)
    def scaled(x, scale=None):
        return x * (1 if scale is None else scale)

    assert torch.equal(scaled(torch.ones(2), 3), torch.full((2,), 3.0))
    assert seen == []  # nobody traces
    found = torch._dynamo.optimize("eager", nopython=True)(lambda x: scaled(x) + 1)(torch.ones(2))
    assert torch.equal(found, torch.full((2,), 2.0))
    with pytest.warns(UserWarning, match="a scale cannot be traced"):
        found = torch._dynamo.optimize("eager")(lambda x: scaled(x, scale=3) + 1)(torch.ones(2))
    assert torch.equal(found, torch.full((2,), 4.0))


def test_a_function_of_unnamed_arguments_is_refused():
    with pytest.raises(ArgumentError, match=r"must not take \*args, as f does"):

        @jit.no_torch_dynamo(when=lambda given: None)
        def f(*args):
            return args
