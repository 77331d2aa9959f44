"""Arguments of the wrong class: the error names the function, the argument and the given class."""

from __future__ import annotations

import pytest
import torch

import te_fast.pytorch as te
from te_fast import TeFastError
from te_fast.errors import DtypeError, ShapeError

X, PROBS = torch.randn(8, 16), torch.rand(8, 4)
MASK = torch.tensor([False, True, True, False]).expand(8, 4).contiguous()
SPLITS, ORDER = torch.tensor([4, 4]), torch.tensor([1, 0])
OUT, _, MAP = te.moe_permute_with_probs(X, PROBS, MASK, num_out_tokens=16)

CALLS = {
    te.moe_permute: {"inp": X, "routing_map": MASK, "num_out_tokens": 16},
    te.moe_permute_with_probs: {
        "inp": X,
        "probs": PROBS,
        "routing_map": MASK,
        "num_out_tokens": 16,
    },
    te.moe_permute_and_pad_with_probs: {
        "inp": X,
        "probs": PROBS,
        "routing_map": MASK,
        "tokens_per_expert": MASK.sum(0),
        "align_size": 16,
    },
    te.moe_permute_and_quantize: {
        "inp": X,
        "probs": PROBS,
        "routing_map": MASK,
        "num_out_tokens": 16,
        "align_size": 4,
        "scale": torch.ones(1),
        "amax": torch.zeros(1),
    },
    te.moe_unpermute: {
        "inp": OUT,
        "row_id_map": MAP,
        "merging_probs": PROBS,
        "restore_shape": X.shape,
        "pad_offsets": torch.zeros(4, dtype=torch.int64),
    },
    te.moe_sort_chunks_by_index: {"inp": X, "split_sizes": SPLITS, "sorted_index": ORDER},
    te.moe_sort_chunks_by_index_with_probs: {
        "inp": X,
        "probs": X[:, 0].contiguous(),
        "split_sizes": SPLITS,
        "sorted_index": ORDER,
    },
    te.Fp8Padding(2, 16): {"inp": X, "m_splits": [4, 4]},
    te.Fp8Unpadding(2, 16): {"inp": torch.randn(32, 16), "m_splits": [4, 4]},
}
CASES = [
    pytest.param(
        function, name, id=f"{getattr(function, '__name__', type(function).__name__)}-{name}"
    )
    for function, arguments in CALLS.items()
    for name in arguments
]


@pytest.mark.parametrize(("function", "name"), CASES)
def test_good_and_bad(function, name):
    arguments = CALLS[function]
    function(**arguments)
    op = getattr(function, "__name__", type(function).__name__)
    for bad in ([None, 1], 1.5, "a", object(), {}, (torch.ones(2),)):
        with pytest.raises(TeFastError, match=name) as caught:
            function(**{**arguments, name: bad})
        if isinstance(caught.value, DtypeError) and "must be a" in str(caught.value):
            assert type(bad).__name__ in str(caught.value)
        assert str(caught.value).startswith(f"{op}: ")


@pytest.mark.parametrize("name", ["inp", "routing_map"])
def test_none_is_no_tensor(name):
    arguments = CALLS[te.moe_permute_with_probs]
    with pytest.raises(DtypeError, match=f"(?i){name} must be .*tensor.*, got None"):
        te.moe_permute_with_probs(**{**arguments, name: None})


def test_an_error_from_elsewhere_stays_what_it_is():
    class Strange(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_args, **_kwargs):
            message = "not mine"
            raise AttributeError(message)

    with pytest.raises(AttributeError, match="not mine"):
        te.moe_permute(X.as_subclass(Strange), MASK, 16)


@pytest.mark.parametrize("name", ["inp", "probs"])
@pytest.mark.parametrize(
    "function",
    [
        te.moe_permute_with_probs,
        te.moe_permute_and_pad_with_probs,
        te.moe_sort_chunks_by_index_with_probs,
    ],
    ids=lambda function: function.__name__,
)
def test_shapes_are_refused_by_the_functions_own_name(function, name):
    arguments = CALLS[function]
    bad = arguments[name][None] if name == "probs" else arguments[name][0]
    with pytest.raises(ShapeError, match=f"^{function.__name__}: {name} must be"):
        function(**{**arguments, name: bad})
