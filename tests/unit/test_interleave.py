"""The order of weights of gated activations: against explicit indices, and through the activations."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast.errors import TeFastError


def indices(rows, size):
    """Return the source row of each row of the interleaved tensor."""
    half = rows // 2
    return [
        start + part * half + row
        for start in range(0, half, size)
        for part in range(2)
        for row in range(size)
    ]


@pytest.mark.parametrize("shape", [(48,), (48, 3), (48, 2, 5), (0, 4)])
@pytest.mark.parametrize("size", [1, 4, 8, 24])
def test_blocks_of_gates_and_linear_units_in_turn(shape, size):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + size))
    y = te.interleave_glu_tensor(x, size)
    assert torch.equal(y, x[indices(shape[0], size)])
    assert y.is_contiguous()
    assert not y.numel() or y.data_ptr() != x.data_ptr()
    assert torch.equal(te.deinterleave_glu_tensor(y, size), x)


def test_strided_tensors_and_gradients():
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).t().requires_grad_()
    y = te.interleave_glu_tensor(x, 4)
    assert torch.equal(y, x[indices(16, 4)])
    (grad,) = torch.autograd.grad(y, x, y.detach())
    assert torch.equal(grad, x.detach())


@pytest.mark.parametrize("op", [te.ops.SwiGLU, te.ops.GEGLU, te.ops.ClampedSwiGLU])
def test_activations_take_the_blocks(op):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    blocks = te.interleave_glu_tensor(x.t(), 16).t().contiguous()
    assert torch.equal(op(glu_interleave_size=16)(blocks), op()(x))


@pytest.mark.parametrize("function", [te.interleave_glu_tensor, te.deinterleave_glu_tensor])
def test_what_does_not_fit(function):
    for size in (0, -4, 2.0, "4"):
        with pytest.raises(ValueError, match="interleave_size must be a positive integer") as error:
            function(torch.zeros(16), size)
        assert isinstance(error.value, TeFastError)
    for x in (torch.zeros(12), torch.zeros(())):
        with pytest.raises(ValueError, match="multiple of 2 \\* interleave_size = 8") as error:
            function(x, 4)
        assert isinstance(error.value, TeFastError)
