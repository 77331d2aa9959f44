"""te_fast beside Transformer Engine, in one process on a GPU: `pytest -m te tests/parity`.

The bounds say where the two libraries round differently; everything else is equal bit for bit.
"""

import itertools

import pytest
import torch

import parity

# What Transformer Engine and the compilers that it uses warn of is not te_fast's.
pytestmark = [pytest.mark.te, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

#: Where the difference may be more than nothing, with the reason. The first name that a case begins with counts.
BOUNDS = {
    # Transformer Engine rounds to BF16 between two kernels that te_fast has as one: one operand in thirty lies a step
    # of FP8 beside.
    "LayerNormMLP": 5e-2,
    "ops: ": 5e-2,
    # Single roundings of norms, which sum in another order; in FP8 an operand in a thousand lies a step beside.
    "LayerNormLinear": 5e-3,
    "LayerNorm": 2e-3,
    "RMSNorm": 2e-3,
    "ops.": 5e-3,
    # Attention is another library's kernel, and softmax in BF16 hands its differences on.
    "DotProductAttention": 2e-2,
    "MultiheadAttention": 5e-2,
    "TransformerLayer": 5e-2,
    # Sums of the merged rows, and of the experts' products, in another order.
    "MoE": 5e-3,
    "GroupedLinear": 5e-3,
    "FP8 weights: LayerNormMLP": 5e-2,
    "FP8 weights: ": 5e-3,
    "FP8 between layers": 0.0,
    # FP32 sums in another order, rounded to BF16 once.
    "cross entropy": 5e-3,
    "Fused": 5e-3,
    "Linear": 0.0,
}


CASES = list(itertools.product(parity.cases(), parity.recipes()))


@pytest.fixture(scope="module")
def theirs():
    library = parity.installed()
    if library is None:
        pytest.skip("Transformer Engine is not installed")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return library


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
