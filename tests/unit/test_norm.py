"""te_fast.pytorch.LayerNorm and RMSNorm: the modules around the operations of test_ops_basic.py."""

import copy

import pytest
import torch

import norm_reference as reference
import te_fast.pytorch as te
from te_fast.dispatch import NormFunction
from te_fast.errors import ArgumentError, ShapeError, UnsupportedError

NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_that_of_torch_with_its_state(name, dtype):
    torch.default_generator.manual_seed(0)
    plain = NORMS[name](96, eps=1e-4, dtype=dtype)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    norm = getattr(te, name)(96, 1e-4, device="cpu", params_dtype=dtype)
    norm.load_state_dict(plain.state_dict())
    assert list(norm.state_dict()) == list(plain.state_dict())
    function = NormFunction(name, 1e-4)
    gamma, beta = norm.weight.detach(), getattr(norm, "bias", None)
    for _ in range(2):
        x = torch.randn(5, 7, 96).to(dtype).requires_grad_()
        grad = torch.randn(5, 7, 96).to(dtype)
        for parameter in norm.parameters():
            parameter.grad = None
        y = norm(x)
        y.backward(grad)
        rows, dy = x.detach().view(35, 96), grad.view(35, 96)
        expected, _, _ = reference.normalise(rows, gamma, function, beta)
        assert reference.near(
            y.view(35, 96), expected, reference.tolerance(rows, gamma, function, beta)
        )
        wanted = reference.differentiate(dy, rows, gamma, function)
        bounds = reference.gradient_tolerances(dy, rows, gamma, function)
        got = (x.grad.view(35, 96), *(parameter.grad for parameter in norm.parameters()))
        for each, want, bound in zip(got, wanted, bounds, strict=False):
            assert reference.near(each, want, bound)


@pytest.mark.parametrize("name", NORMS)
def test_norm_fuses_in_a_chain(name):
    norm = getattr(te, name)(32, device="cpu", zero_centered_gamma=True)
    assert torch.equal(norm.weight, torch.zeros(32))
    chain = te.ops.Sequential(norm, te.ops.Linear(32, 16, device="cpu"))
    x = torch.randn(8, 32)
    assert torch.allclose(chain(x), chain[1](norm(x)), atol=1e-6)
    assert "LayerNorm" in chain.explain() or "RMSNorm" in chain.explain()


@pytest.mark.parametrize("name", NORMS)
def test_parameters_are_marked_for_sequence_parallelism(name):
    norm = getattr(te, name)(hidden_size=16, sequence_parallel=True, device="meta")
    norm.reset_parameters()
    assert all(parameter.sequence_parallel is True for parameter in norm.parameters())
    norm = getattr(te, name)(16, device="cpu")
    assert not any(hasattr(parameter, "sequence_parallel") for parameter in norm.parameters())


def test_hooks_and_copies():
    norm = te.LayerNorm(16, device="cpu")
    x = torch.randn(4, 16)
    expected = norm(x)
    assert torch.equal(copy.deepcopy(norm)(x), expected)
    norm.register_forward_hook(lambda *_: torch.zeros(1))
    assert torch.equal(norm(x), torch.zeros(1))


def test_bad_arguments():
    with pytest.raises(ArgumentError, match="normalized_shape is missing"):
        te.LayerNorm(device="cpu")
    with pytest.raises(ArgumentError, match="hidden_size is the old name"):
        te.LayerNorm(16, hidden_size=16, device="cpu")
    with pytest.raises(ArgumentError, match="params_dtype is the old name"):
        te.RMSNorm(16, params_dtype=torch.float32, dtype=torch.float32, device="cpu")
    with pytest.raises(RuntimeError):  # Transformer Engine raises this class too
        te.RMSNorm(device="cpu")
    with pytest.raises(UnsupportedError, match="sm_margin"):
        te.RMSNorm(16, sm_margin=4, device="cpu")
    norm = te.LayerNorm(16, device="cpu")
    for _ in range(2):
        with pytest.raises(ShapeError):
            norm(torch.zeros(4, 15))
    with pytest.warns(DeprecationWarning, match="defer_init"):
        norm.reset_parameters(defer_init=True)


@pytest.mark.parametrize(
    ("name", "method"),
    [("LayerNorm", "reset_layer_norm_parameters"), ("RMSNorm", "reset_rms_norm_parameters")],
)
def test_reset_by_its_old_name(name, method):
    norm = getattr(te, name)(16, device="cpu")
    norm.weight.data.zero_()
    with pytest.warns(DeprecationWarning, match="reset_parameters"):
        getattr(norm, method)()
    assert (norm.weight == 1).all()
