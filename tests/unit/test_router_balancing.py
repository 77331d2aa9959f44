"""Quantile balancing of routers against loops over tokens and experts, in NumPy's float32 where bits matter."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import te_fast
from graphs import needs_compile
from selection import every_value, quickly, sampled
from te_fast import dispatch
from te_fast.moe import balancing, choice
from te_fast.pytorch import router

MODES = ["two_kernel", "fused_atomic"]


def call(x, topk, bias, histogram, bounds, mode="fused_atomic", **more):
    given = {"qb_histogram": histogram, "qb_bin_bounds": bounds, "qb_histogram_mode": mode}
    return router.fused_topk_with_score_function(
        x, topk, False, None, None, 2.5, "sigmoid", bias, **given, **more
    )


def plain(x, topk, bias, **more):
    return router.fused_topk_with_score_function(
        x, topk, False, None, None, 2.5, "sigmoid", bias, **more
    )


def sigmoid(value):
    """Of values whose result is the same for any implementation."""
    return {0.0: 0.5, math.inf: 1.0, -math.inf: 0.0}.get(value, math.nan)


def in_order(values):
    """Experts, best first: NaN above all, the first of equal ones first."""

    def rank(expert):
        value = values[expert]
        return (0, 0.0, expert) if np.isnan(value) else (1, -value, expert)

    return sorted(range(len(values)), key=rank)


@np.errstate(all="ignore")
def counted(scores, bias, topk, bounds, bins):
    """Count in float32, one operation after the other."""
    lower, upper = np.float32(bounds[0]), np.float32(bounds[1])
    scale = np.float32(bins) / (upper - lower)
    counts = np.zeros((len(bias), bins), dtype=np.int32)
    for row in scores:
        values = [np.float32(score) + np.float32(own) for score, own in zip(row, bias, strict=True)]
        cutoff = values[in_order(values)[topk]]
        for expert, score in enumerate(row):
            place = np.floor((cutoff - np.float32(score) - lower) * scale)
            last = 0 if np.isnan(place) else min(max(float(place), 0.0), bins - 1)
            counts[expert, int(last)] += 1
    return torch.from_numpy(counts)


BOUNDS = {
    "all inside": (-2.0, 2.0),
    "many outside": (-0.1, 0.07),
    "all below": (5.0, 6.0),
    "all above": (-9.0, -8.0),
    "odd": (-1.2345678, 0.7654321),
    "on edges": (-1.0, 1.0),
    "huge": (-3e38, 3e38),
    "tiny": (0.0, 1e-45),
}


def special(tokens, experts):
    """Zeros, infinities and NaN, whose sigmoid has no rounding, with many ties."""
    torch.default_generator.manual_seed(experts)
    kinds = torch.tensor([0.0, 0.0, math.inf, -math.inf, math.nan])
    weights = torch.tensor([4.0, 4.0, 2.0, 2.0, 0.5])
    x = kinds[torch.multinomial(weights, tokens * experts, replacement=True)]
    x = x.view(tokens, experts)
    x[0], x[1], x[2], x[3] = 0.0, math.nan, math.inf, -math.inf
    return x


@pytest.mark.parametrize(
    ("experts", "case", "by"),
    sampled(
        [2, 33, 130],
        BOUNDS,
        ["kernel", "torch"],
        quick=[
            (130, "odd", "torch"),
            *((33, *case) for case in every_value(BOUNDS, ["kernel", "torch"])),
        ],
    ),
)
def test_bins_have_the_bits_of_float32(experts, case, by, monkeypatch):
    bounds = torch.tensor(BOUNDS[case])
    x = special(9, experts)
    torch.default_generator.manual_seed(3)
    biases = 0.3 * torch.randn(experts), (torch.arange(experts) % 4 - 2) / 8
    if by == "torch":
        monkeypatch.setattr(choice, "takes", lambda *_: False)
    scores = [[sigmoid(value) for value in row] for row in x.tolist()]
    for bias in biases:
        for topk in {1, (experts + 1) // 2, experts - 1}:
            for bins in (1, 7, 1000):
                wanted = counted(scores, bias.numpy(), topk, BOUNDS[case], bins)
                for dtype in (torch.float32, torch.float16, torch.bfloat16):
                    histogram = torch.zeros_like(wanted)
                    call(x.to(dtype), topk, bias, histogram, bounds)
                    assert torch.equal(histogram, wanted)


def values_on_edges(rng, bins):
    """Return a bias and bounds whose place is so near an edge that other orders of the arithmetic find another bin."""
    one, half = np.float32(1), np.float32(0.5)
    while True:
        lower, upper = np.sort(rng.uniform(-2, 2, 2).astype(np.float32))
        edge = lower + np.float32(rng.integers(1, bins)) * ((upper - lower) / np.float32(bins))
        own = edge
        cutoff, scale = half + own, np.float32(bins) / (upper - lower)
        others = (
            (cutoff - half - lower) * (np.float32(bins) * (one / (upper - lower))),
            (cutoff - (half + lower)) * scale,
            (cutoff - half - lower) / ((upper - lower) / np.float32(bins)),
        )
        place = np.floor((cutoff - half - lower) * scale)
        yield own, (lower, upper), [place != np.floor(other) for other in others]


@pytest.mark.parametrize("by", ["kernel", "torch"])
@pytest.mark.parametrize("bins", [7, 1000])
def test_arithmetic_is_in_one_order(bins, by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(choice, "takes", lambda *_: False)
    rng, found = np.random.default_rng(bins), np.zeros(3, dtype=int)
    for own, bounds, differs in values_on_edges(rng, bins):
        if not any(differs):
            continue
        found += differs
        bias = np.array([own + np.float32(1), own], dtype=np.float32)
        histogram = torch.zeros(2, bins, dtype=torch.int32)
        call(torch.zeros(1, 2), 1, torch.from_numpy(bias), histogram, torch.tensor(bounds))
        assert torch.equal(histogram, counted([[0.5, 0.5]], bias, 1, bounds, bins))
        if found.min() > 20:
            break


def reference(x, topk, bias, bounds, bins):
    """Return the places of tokens' experts in FP64, and whether rounding may move each to another bin."""
    scores = 1 / (1 + (-x.detach().double()).exp())
    biased = scores + bias.double()
    cutoff = biased.sort(-1, descending=True).values[:, topk : topk + 1]
    lower, upper = bounds.double()
    places = (cutoff - scores - lower) * bins / (upper - lower)
    return places.floor().clamp(0, bins - 1).long(), (places - places.round()).abs() < 1e-6 * bins


def counts_of(places, bins):
    return torch.stack([torch.bincount(column, minlength=bins) for column in places.t()])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "bins"),
    [(1, 2, 1, 4), (65, 64, 8, 50), (129, 200, 16, 1000), (33, 1024, 32, 10), (9, 1500, 4, 20)],
)
def test_random_logits(tokens, experts, topk, bins, mode):
    torch.default_generator.manual_seed(tokens)
    x, bias = torch.randn(tokens, experts), torch.linspace(-0.2, 0.2, experts)
    bounds = torch.stack((bias.min() - 0.3, bias.max() + 0.3))
    places, is_open = reference(x, topk, bias, bounds, bins)
    histogram = torch.zeros(experts, bins, dtype=torch.int32)
    call(x, topk, bias, histogram, bounds, mode)
    assert histogram.sum(1).eq(tokens).all()
    moved = (histogram - counts_of(places, bins)).abs().sum(1)
    assert (moved <= 2 * is_open.sum(0)).all()
    assert is_open.float().mean() < 0.02
    assert torch.count_nonzero(histogram) >= min(experts, bins)


@pytest.mark.parametrize("experts", [40, 1500])
def test_choice_and_gradient_are_those_without_a_histogram(experts):
    torch.default_generator.manual_seed(5)
    logits = torch.randn(4, 6, experts)
    bias, bounds = 0.1 * torch.randn(experts), torch.tensor([-1.0, 1.0])
    grad, given = torch.randn(4, 6, experts), []
    for histogram in (None, torch.zeros(experts, 30, dtype=torch.int32)):
        x = logits.clone().requires_grad_()
        made = plain(x, 5, bias) if histogram is None else call(x, 5, bias, histogram, bounds)
        made[0].backward(grad)
        given.append((*made, x.grad))
    assert all(map(torch.equal, *given))
    leaf = logits.double().requires_grad_()
    scores = 1 / (1 + (-leaf).exp())
    chosen = torch.where(given[1][1], scores, 0)
    assert given[1][1].sum(-1).eq(5).all()
    (2.5 * chosen / chosen.sum(-1, keepdim=True)).backward(grad.double())
    torch.testing.assert_close(given[1][2].double(), leaf.grad, rtol=1e-4, atol=1e-6)


def test_ties_at_the_cutoff_drop_the_last_expert():
    x = torch.tensor([[0.0, math.inf, 0.0, 0.0, -math.inf]])
    histogram = torch.zeros(5, 4, dtype=torch.int32)
    _, chosen = call(x, 3, torch.zeros(5), histogram, torch.tensor([-1.0, 1.0]))
    assert chosen.tolist() == [[True, True, True, False, False]]
    # Lacks are 0, -0.5 and 0.5, on lower edges of bins.
    assert histogram.argmax(1).tolist() == [2, 1, 2, 2, 3]


@pytest.mark.parametrize("mode", MODES)
def test_every_form_of_the_choice(mode):
    torch.default_generator.manual_seed(6)
    x, bias, bounds = torch.randn(3, 7, 21), torch.randn(21), torch.tensor([-3.0, 3.0])
    wanted = torch.zeros(21, 16, dtype=torch.int32)
    _, chosen = call(x, 4, bias, wanted, bounds, "two_kernel")
    histogram = torch.zeros_like(wanted)
    _, bits = call(x, 4, bias, histogram, bounds, mode, routing_map_format="bitmap_u8")
    assert torch.equal(histogram, wanted)
    for expert in range(21):
        assert torch.equal((bits[..., expert // 8] >> expert % 8 & 1).bool(), chosen[..., expert])
    for dtype in (torch.int16, torch.int32, torch.int64):
        indices = torch.full((3, 7, 4), -1, dtype=dtype)
        _, same = call(x, 4, bias, histogram.zero_(), bounds, mode, topk_indices=indices)
        assert same is indices
        assert torch.equal(torch.zeros_like(chosen).scatter(-1, indices.long(), True), chosen)
        assert torch.equal(histogram, wanted)
    strided = torch.zeros(3, 7, 42)[..., ::2].copy_(x)
    call(strided, 4, bias, histogram.zero_(), bounds, mode)
    assert torch.equal(histogram, wanted)


@pytest.mark.parametrize("by", ["kernel", "torch"])
def test_microbatches_add_up_in_place(by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(choice, "takes", lambda *_: False)
    torch.default_generator.manual_seed(7)
    x, bias, bounds = torch.randn(40, 8), torch.randn(8), torch.tensor([-2.0, 2.0])
    whole, parts = (torch.full((8, 5), 100, dtype=torch.int32) for _ in range(2))
    call(x, 3, bias, whole, bounds)
    address, version = parts.data_ptr(), parts._version
    for part in x.split([11, 0, 29]):
        probs, chosen = call(part, 3, bias, parts, bounds)
        assert probs.shape == chosen.shape == part.shape
    assert torch.equal(parts, whole)
    assert parts.sum() == 8 * 5 * 100 + 40 * 8
    assert parts.data_ptr() == address
    assert parts._version > version
    assert plain(x[:0], 3, bias)[0].shape == (0, 8)


def test_one_launch():
    given = torch.randn(6, 8), 3, torch.zeros(8)
    histogram, bounds = torch.zeros(8, 5, dtype=torch.int32), torch.tensor([-1.0, 1.0])
    with dispatch.record() as launches:
        call(*given, histogram, bounds)
        plain(*given)
    assert [one.name for one in launches] == ["router_balanced_fwd_f32", "router_fwd_f32"]


def test_bounds_are_read_once_for_each_version(monkeypatch):
    read = []
    monkeypatch.setattr(
        balancing.math, "isfinite", lambda value: read.append(value) or -9 < value < 9
    )
    given = torch.randn(6, 8), 3, torch.zeros(8), torch.zeros(8, 5, dtype=torch.int32)
    bounds = torch.tensor([-1.0, 1.0])
    for _ in range(3):
        call(*given, bounds)
    assert read == [-1.0, 1.0]
    bounds.mul_(2.0)
    call(*given, bounds)
    assert read == [-1.0, 1.0, -2.0, 2.0]
    before = given[3].clone()
    bounds.fill_(0.0)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"lower < upper, got \[0.0, 0.0\]"):
            call(*given, bounds)
    assert torch.equal(given[3], before)
    with torch.inference_mode():
        own = torch.tensor([-1.0, 1.0])
        call(*given, own)
        own.fill_(0.0)
        with pytest.raises(ValueError, match="lower < upper"):
            call(*given, own)


@pytest.mark.parametrize(
    "values", [(1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (0.0, math.inf), (-math.inf, 0.0)], ids=str
)
@pytest.mark.parametrize("mode", MODES)
def test_bounds_in_disorder(values, mode):
    histogram = torch.zeros(8, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="router: .*finite with lower < upper") as caught:
        call(torch.randn(6, 8), 3, torch.zeros(8), histogram, torch.tensor(values), mode)
    assert isinstance(caught.value, te_fast.TeFastError)
    assert not histogram.any()


def test_a_capture_does_not_read_bounds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bounds = SimpleNamespace(is_cuda=True, device="cuda:0", is_inference=lambda: False, _version=3)
    with pytest.raises(RuntimeError, match="before the capture") as caught:
        balancing.check_bounds(bounds)
    assert isinstance(caught.value, te_fast.errors.StateError)
    bounds._te_fast_checked_version = 3
    balancing.check_bounds(bounds)
    bounds._version = 4
    with pytest.raises(RuntimeError, match="before the capture"):
        balancing.check_bounds(bounds)


INT = torch.zeros(4, 6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"qb_histogram": None}, ValueError),
        ({"qb_bin_bounds": None}, ValueError),
        ({"qb_histogram_mode": None}, ValueError),
        ({"qb_histogram_mode": "atomic"}, ValueError),
        ({"qb_histogram_mode": router.QBHistogramMode.TWO_KERNEL}, ValueError),
        ({"qb_histogram_mode": []}, TypeError),
        ({"score_function": "softmax", "expert_bias": None}, ValueError),
        ({"score_function": "sqrtsoftplus"}, ValueError),
        ({"expert_bias": None}, ValueError),
        ({"num_groups": 2, "group_topk": 1}, ValueError),
        ({"group_topk": 1}, ValueError),
        ({"topk": 4}, RuntimeError),
        ({"qb_histogram": [[0] * 6] * 4}, TypeError),
        ({"qb_histogram": INT.long()}, RuntimeError),
        ({"qb_histogram": INT[:3]}, RuntimeError),
        ({"qb_histogram": INT[:, :0]}, RuntimeError),
        ({"qb_histogram": INT[0]}, RuntimeError),
        ({"qb_histogram": torch.zeros(6, 4, dtype=torch.int32).t()}, RuntimeError),
        ({"qb_histogram": INT.to("meta")}, RuntimeError),
        ({"qb_bin_bounds": (-1.0, 1.0)}, TypeError),
        ({"qb_bin_bounds": torch.tensor([-1.0, 1.0], dtype=torch.float64)}, RuntimeError),
        ({"qb_bin_bounds": torch.zeros(3)}, RuntimeError),
        ({"qb_bin_bounds": torch.zeros(1, 2)}, RuntimeError),
        ({"qb_bin_bounds": torch.tensor([-1.0, 0.0, 1.0])[::2]}, RuntimeError),
        ({"qb_bin_bounds": torch.zeros(2, device="meta")}, RuntimeError),
    ],
    ids=str,
)
def test_bad_arguments(change, error):
    good = {
        "logits": torch.zeros(2, 4),
        "topk": 2,
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "sigmoid",
        "expert_bias": torch.zeros(4),
        "qb_histogram": INT.clone(),
        "qb_bin_bounds": torch.tensor([-1.0, 1.0]),
        "qb_histogram_mode": "two_kernel",
    }
    name = next(iter(change)).partition("_mode")[0]
    with pytest.raises(error, match=f"router: .*{name}") as caught:
        router.fused_topk_with_score_function(**good | change)
    assert isinstance(caught.value, te_fast.TeFastError)
    assert not good["qb_histogram"].any()


def test_modes_have_transformer_engines_names_and_numbers():
    assert {one.name: int(one) for one in router.QBHistogramMode} == {
        "TWO_KERNEL": 0,
        "FUSED_ATOMIC": 1,
    }
    assert router.QBHistogramMode.__module__ == "te_fast.pytorch.router"


@needs_compile
@pytest.mark.parametrize("experts", quickly([40, 1500], 40, slow=[40, 1500]))
def test_compiled_with_the_bits_of_eager(experts):
    def run(x, bias, histogram, bounds, indices):
        first, chosen = call(x, 3, bias, histogram, bounds)
        second, _ = call(x * 2, 3, bias, histogram, bounds, topk_indices=indices)
        return first + second, chosen

    results = []
    torch.compiler.reset()
    for how in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        torch.default_generator.manual_seed(8)
        x, bias = torch.randn(9, experts, requires_grad=True), torch.randn(experts)
        histogram, bounds = torch.ones(experts, 30, dtype=torch.int32), torch.tensor([-3.0, 3.0])
        indices = torch.zeros(9, 3, dtype=torch.int32)
        probs, chosen = how(x, bias, histogram, bounds, indices)
        probs.square().sum().backward()
        results.append([probs, chosen, x.grad, histogram, indices])
    assert all(map(torch.equal, *results))
    assert results[1][3].sum() == experts * (30 + 2 * 9)
    assert bounds._te_fast_checked_version == bounds._version
    bounds.fill_(1.0)
    with pytest.raises(ValueError, match="lower < upper"):
        how(x, bias, histogram, bounds, indices)
