"""te_fast beside Transformer Engine, in one process on a GPU: `pytest -m te tests/parity`.

The bounds say where the two libraries round differently; everything else is equal bit for bit.
"""

import itertools

import pytest
import torch

import parity

# Warnings of Transformer Engine and of the compilers that it uses are not te_fast's.
pytestmark = [pytest.mark.te, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

# If a share of the numbers differs by one step of their type, the difference is about the step times the root of the
# share. A step is at most 2**-8 of a number in BF16, 2**-3 in E4M3 and 2**-2 in E5M2.
FP8_OF_ROUNDED = 5e-2
FP8_OF_NORM = 5e-3
BF16_TWICE = 5e-3
BF16_ONCE = 5e-4
FP32_SUMS = 2e-6

#: The greatest difference and its reason. The first entry whose name begins a case's name counts.
BOUNDS = {
    # Transformer Engine stores a value in BF16 between two kernels that te_fast has fused. After two roundings one
    # operand in thirty differs by a step of E4M3: 2.3e-2 for the operand, and the same for its products.
    "LayerNormMLP": FP8_OF_ROUNDED,
    "FP8 weights: LayerNormMLP": FP8_OF_ROUNDED,
    "ops: ": FP8_OF_ROUNDED,
    # Norms sum in another order. One result in a thousand differs by a step of BF16, and one by a step of E4M3.
    "LayerNormLinear": FP8_OF_NORM,
    "FP8 weights: LayerNormLinear": FP8_OF_NORM,
    "LayerNorm": BF16_ONCE,
    "RMSNorm": BF16_ONCE,
    # The factor of a row is multiplied to a result that Transformer Engine has rounded to BF16.
    "ops.Scaled": BF16_TWICE,
    "ops.Linear": 0.0,
    "ops.BasicLinear": 0.0,
    "ops.GroupedLinear": 0.0,
    # Exponentials and roots by other functions: their last bit in FP32, which rarely reaches BF16.
    "ops.": BF16_ONCE,
    # Attention is another library's kernel: probabilities that are rounded to BF16 at another place, in each product of
    # two.
    "DotProductAttention": 2 * BF16_TWICE,
    # Attention's differences, quantised for the next product: one operand in thirty differs by a step of E4M3.
    "MultiheadAttention": FP8_OF_ROUNDED,
    # The Llama block's gradient of queries and keys passes attention and two products: two such differences.
    "TransformerLayer": 2 * FP8_OF_ROUNDED,
    # Transformer Engine rounds the weights of experts to BF16, and the sum after every expert; te_fast computes in FP32
    # and rounds once. te_fast is 1.7e-3 away from the exact sum, Transformer Engine 2.5e-3.
    "MoE permutation, expert indices": BF16_TWICE,
    "MoE permutation": 0.0,
    # Sums and exponentials in FP32, in another order.
    "MoE router": FP32_SUMS,
    "cross entropy": FP32_SUMS,
    "FusedAdam": 0.0,
    "FusedSGD": FP32_SUMS,
    # The same casts and the same products.
    "FP8 weights: ": 0.0,
    "FP8 between layers": 0.0,
    "GroupedLinear": 0.0,
    "Linear": 0.0,
}


CASES = list(itertools.product(parity.cases(), parity.recipes()))


@pytest.mark.parametrize(("case", "recipe"), CASES)
def test_differences_are_within_their_bounds(theirs, case, recipe):
    x = torch.empty(parity.ROWS, parity.COLS, dtype=torch.bfloat16, device="cuda")
    bound = next(value for name, value in BOUNDS.items() if case.startswith(name))
    try:
        found = parity.compare(parity.own(), theirs, case, recipe, x)
    except parity.RefusedError as error:
        if "te_fast" in error.libraries and "Transformer Engine" not in error.libraries:
            raise
        pytest.skip(f"Transformer Engine refuses the case: {error}")
    assert "output" in found
    assert {name: value for name, value in found.items() if value > bound} == {}
