"""Scales that norms and activations find on the GPU have the bits of launches that read tensors for the maximum."""

import pytest
import torch

from measured_scales import ACTIVATIONS, NORMS, SPECIAL, check, check_backward

pytestmark = pytest.mark.gpu
# Short rows, rows of a block, rows of a cluster, and longer rows; strips and tiles that are not whole.
SHAPES = [(40, 96), (8, 32), (136, 288), (2048, 1024), (24, 8192), (16, 16416), (8, 100000)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [*NORMS, *ACTIVATIONS])
def test_a_chain_has_the_bits_of_its_ops(kind, dtype, shape):
    check(kind, dtype, "cuda", *shape, "plain")


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("kind", [*NORMS, *ACTIVATIONS])
def test_special_values(kind, special):
    for dtype in (torch.bfloat16, torch.float16):
        check(kind, dtype, "cuda", 136, 288, special)


@pytest.mark.parametrize("rows", [16, 136, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gradients_have_the_bits_of_ops_apart(kind, dtype, rows):
    check_backward(kind, dtype, "cuda", rows)
