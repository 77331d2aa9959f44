"""Masks, windows and lengths as functions, beside loops over queries, keys and sequences."""

import pytest
import torch

import te_fast.pytorch as te
from selection import every_pair, sampled
from te_fast.errors import DtypeError, ShapeError
from te_fast.pytorch.attention.dot_product_attention import utils
from te_fast.pytorch.constants import AttnMaskTypes, QKVLayouts
from te_fast.runtime.compiling import CAN_COMPILE

LENGTHS = [[3, 0, 5], [1], [4, 4]]


def padding(lengths, size):
    """True where a position is behind its sequence's end: ``(batch, 1, 1, size)``."""
    rows = [[at >= length for at in range(size)] for length in lengths]
    return torch.tensor(rows).view(len(lengths), 1, 1, size)


def ends_of(lengths):
    return torch.tensor([sum(lengths[:at]) for at in range(len(lengths) + 1)], dtype=torch.int32)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_and_places_of_tokens(lengths):
    size = 5
    mask, ends = padding(lengths, size), ends_of(lengths)
    tokens = [at * size + i for at, length in enumerate(lengths) for i in range(length)]
    total = len(lengths) * size
    places = torch.tensor(tokens + [total] * (total - len(tokens))).view(-1, 1, 1)
    found = utils.get_cu_seqlens(mask)
    assert found.dtype is torch.int32
    assert torch.equal(found, ends)
    found, indices = utils.get_cu_seqlens_and_indices(mask)
    assert torch.equal(found, ends)
    assert torch.equal(indices, places)
    assert torch.equal(utils.get_indices(size, ends), places)
    assert torch.equal(utils.get_padding_mask(len(lengths), ends, None, size), mask)
    longer = torch.cat([ends, ends[-1:].repeat(2)])  # of a cache for more sequences
    both = utils.get_padding_mask(len(lengths), longer, ends, size, 6, "cross")
    assert torch.equal(both[0], mask)
    assert torch.equal(both[1], padding(lengths, 6))


def test_padding_masks_need_lengths():
    with pytest.raises(AssertionError, match="cu_seqlens_q and max_seqlen_q are missing"):
        utils.get_padding_mask(1, max_seqlen_q=3)
    with pytest.raises(ShapeError, match="cross attention needs cu_seqlens_kv"):
        utils.get_padding_mask(1, torch.tensor([0, 2]), None, 3, 3, "cross")


def test_lengths_of_full_sequences():
    device = torch.device("cpu")
    found = utils.get_full_cu_seqlens(3, 5, device)
    assert (found.tolist(), found.dtype) == ([0, 5, 10, 15], torch.int32)
    assert utils.get_full_cu_seqlens(2, 0, device).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", AttnMaskTypes)
@pytest.mark.parametrize(
    ("window", "causal", "other"),
    [
        (None, (-1, 0), (-1, -1)),
        ((-1, -1), (-1, 0), (-1, -1)),
        ((-1, 0), (-1, 0), (-1, -1)),
        ((3, 0), (3, 0), (3, 0)),
        ((3, 2), (3, 0), (3, 2)),
        ((3, -1), (3, 0), None),
        ((-1, 2), None, None),
        ((-2, 0), None, None),
    ],
)
@pytest.mark.filterwarnings("ignore:.*window_size should be")
def test_windows(kind, window, causal, other):
    expected = causal if "causal" in kind else other
    if expected is None:
        with pytest.raises(AssertionError, match="window_size must be"):
            utils.check_set_window_size(kind, window)
    else:
        assert utils.check_set_window_size(kind, window) == expected


def test_a_corrected_window_warns():
    with pytest.warns(UserWarning, match="window_size should be"):
        utils.check_set_window_size("causal", (2, 2))
    with pytest.raises(AssertionError, match="attn_mask_type must be one of"):
        utils.check_set_window_size("diagonal")


def masked(kind, queries, keys, window, bottom_right):
    """Whether a query does not attend to a key, by a loop; `queries` and `keys` are real lengths."""
    left, right = window
    right = 0 if "causal" in kind else right
    if kind.endswith("bottom_right"):
        bottom_right = True
    elif kind in ("causal", "padding_causal"):
        bottom_right = False

    def is_masked(query, key):
        if "padding" in kind and (query >= queries or key >= keys):
            return True
        diagonal = query + (keys - queries if bottom_right else 0)
        return (left >= 0 and key < diagonal - left) or (right >= 0 and key > diagonal + right)

    return is_masked


@pytest.mark.parametrize(
    ("kind", "window", "bottom_right", "kind_of"),
    sampled(
        AttnMaskTypes,
        [None, (-1, -1), (1, 0), (1, 2), (0, 0)],
        [False, True],
        ["self", "cross"],
        quick=every_pair,
    ),
)
def test_whole_masks(kind, window, bottom_right, kind_of):
    queries, keys = (5, 5) if kind_of == "self" else (4, 6)
    lengths = [(3, 3), (5, 5)] if kind_of == "self" else [(3, 6), (4, 2)]
    if "padding" in kind:
        given = padding([q for q, _ in lengths], queries)
        given = given if kind_of == "self" else (given, padding([k for _, k in lengths], keys))
    else:
        lengths, given = [(queries, keys)], None
    generator = torch.Generator().manual_seed(2)
    if kind == "arbitrary":
        given = torch.rand(1, 1, queries, keys, generator=generator) < 0.3
    expected = torch.tensor(
        [
            [
                [masked(kind, q, k, window or (-1, -1), bottom_right)(i, j) for j in range(keys)]
                for i in range(queries)
            ]
            for q, k in lengths
        ]
    )[:, None]
    expected = expected | given if kind == "arbitrary" else expected
    name, mask, of_queries, of_keys = utils.get_full_mask(
        queries, keys, kind, given, window, kind_of, bottom_right
    )
    assert torch.equal(mask.cpu(), expected)
    has_window = window is not None and window != (-1, -1)
    assert name == ("arbitrary" if has_window else kind)
    if "padding" in kind:
        assert list(zip(of_queries.tolist(), of_keys.tolist(), strict=True)) == lengths
    else:
        assert of_queries is of_keys is None


def test_masks_of_unpadded_types_take_a_mask_too():
    given = torch.tensor([[[[True, False, False]]]])
    _, mask, *_ = utils.get_full_mask(3, 3, "causal", given)
    above = torch.ones(3, 3, dtype=torch.bool).triu(1)
    assert torch.equal(mask, (above | given[0, 0])[None, None])


@pytest.mark.parametrize(
    ("layout", "cached", "expected"),
    [
        ("bs3hd", False, ("bshd",) * 3),
        ("sbh3d", False, ("sbhd",) * 3),
        ("thd_t2hd", False, ("thd",) * 3),
        ("thd_bshd_bshd", True, ("thd_2bshd", "thd", "bshd")),
        ("paged_kv_sbhd_bshd_bshd", True, ("sbhd_2bshd", "sbhd", "bshd")),
        ("paged_kv_bshd_bshd_bshd", True, ("bshd",) * 3),
    ],
)
def test_formats_of_layouts(layout, cached, expected):
    assert layout in QKVLayouts
    assert utils.get_qkv_format(layout, object() if cached else None) == expected


def test_strided_heads_are_copied():
    x = torch.randn(4, 6)
    assert utils.maybe_contiguous(x[:, ::1]).data_ptr() == x.data_ptr()
    copied = utils.maybe_contiguous(x[:, ::2])
    assert copied.is_contiguous()
    assert torch.equal(copied, x[:, ::2])


@pytest.mark.parametrize("window", [{}, {1, 2}, {0: 1, 1: 0}, "10", (1.5, 0), ([], 0), 3])
def test_windows_that_are_not_two_integers(window):
    heads = [torch.zeros(4, 1, 2, 8)] * 3
    with pytest.raises(DtypeError, match="window_size must be two integers"):
        te.DotProductAttention(2, 8, window_size=window)
    with pytest.raises(DtypeError, match="window_size must be two integers"):
        te.DotProductAttention(2, 8)(*heads, window_size=window)
    with pytest.raises(DtypeError, match="window_size must be two integers"):
        te.MultiheadAttention(16, 2, window_size=window, device="cpu")


@pytest.mark.parametrize(
    "given", [{"attn_mask_type": ["causal"]}, {"bottom_right_diagonal": {}}], ids=str
)
def test_arguments_of_a_call_that_are_no_keys(given):
    with pytest.raises((ShapeError, DtypeError), match=next(iter(given))):
        te.DotProductAttention(2, 8)(*[torch.zeros(4, 1, 2, 8)] * 3, **given)


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("get_cu_seqlens", (None,), "mask must be a torch.Tensor"),
        ("get_cu_seqlens", (torch.ones(4),), "mask must be"),
        ("get_cu_seqlens_and_indices", ([True],), "mask must be a torch.Tensor"),
        ("get_indices", (None, ends_of([2])), "max_seqlen must be an integer"),
        ("get_indices", (2, [0, 2]), "cu_seqlens must be a torch.Tensor"),
        ("get_full_cu_seqlens", (None, 2, "cpu"), "batch_size must be an integer"),
        ("get_full_mask", (4, None), "max_seqlen_kv must be an integer"),
        ("get_full_mask", (-1, 4), "max_seqlen_q must not be negative"),
        ("get_full_mask", (4, 4, "causal", None, (1, 2, 3)), "window_size must be two integers"),
    ],
)
def test_arguments_of_functions_that_fit_none(name, arguments, match):
    with pytest.raises((ShapeError, DtypeError), match=match):
        getattr(utils, name)(*arguments)


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
def test_a_graph_serves_windows_of_several_sizes(fresh_dynamo):
    layer, q, graphs = te.DotProductAttention(2, 8), torch.randn(8, 1, 2, 8), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def run(q, left):
        return layer(q, q, q, window_size=(left, 0))

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    for left in (3, 4, 5):
        assert torch.allclose(compiled(q, left), run(q, left), atol=1e-6)
    assert len(graphs) == 1
