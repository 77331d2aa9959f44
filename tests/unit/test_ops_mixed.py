"""Groups in which native segments and Python operations share a recipe, types and a container."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Format
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
