"""Quantile balancing of routers on the GPU: bins by torch from the kernel's own scores, edge values as on the host."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
import te_fast  # noqa: E402
from te_fast.moe import choice  # noqa: E402
from te_fast.pytorch import router  # noqa: E402
from te_fast.runtime import native  # noqa: E402

pytestmark = pytest.mark.gpu

MODES = ("two_kernel", "fused_atomic")
SIZES = [
    (1, 2, 1, 3),
    (5, 32, 31, 100),
    (130, 33, 8, 7),
    (257, 128, 8, 1000),
    (1000, 256, 16, 64),
    (257, 896, 16, 1000),
    (77, 1024, 40, 1),
]


def call(x, topk, bias, histogram, bounds, mode="fused_atomic", **more):
    given = {"qb_histogram": histogram, "qb_bin_bounds": bounds, "qb_histogram_mode": mode}
    return router.fused_topk_with_score_function(
        x, topk, False, None, None, 2.5, "sigmoid", bias, **given, **more
    )


def poison():
    torch.cuda.synchronize()
    kept = [torch.full((1 << 23,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    kept += [torch.full((1 << 12,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del kept


def counted(scores, bias, topk, bounds, bins):
    """Count the bins of FP32 scores, each step of the arithmetic in FP32."""
    cutoff = (scores + bias).sort(-1, descending=True).values[:, topk : topk + 1]
    scale = torch.tensor(float(bins), device="cuda") / (bounds[1] - bounds[0])
    places = ((cutoff - scores - bounds[0]) * scale).floor().clamp(0, bins - 1).long()
    return torch.stack([torch.bincount(column, minlength=bins) for column in places.t()]).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "topk", "bins"), SIZES)
def test_bins_are_those_of_the_kernels_scores(tokens, experts, topk, bins, dtype):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, experts, device="cuda").to(dtype)
    bias = 0.2 * torch.randn(experts, device="cuda")
    bounds = torch.stack((bias.min() - 0.3, bias.max() + 0.3))
    how = choice.Choice(topk, 0, 0, "sigmoid", "chosen", 2.5)
    poison()
    _, scores, _, _ = native.router_forward(x, bias, how, None, (True, True, False))
    wanted = counted(scores, bias, topk, bounds, bins)
    grad = torch.randn(tokens, experts, device="cuda").to(dtype)
    own = x.clone().requires_grad_()
    probs, chosen = router.fused_topk_with_score_function(
        own, topk, False, None, None, 2.5, "sigmoid", bias
    )
    dlogits = torch.autograd.grad(probs, own, grad)[0]
    for mode in MODES:
        histogram = torch.zeros(experts, bins, dtype=torch.int32, device="cuda")
        for times in (1, 2):  # the second call adds
            poison()
            again, same = call(own, topk, bias, histogram, bounds, mode)
            assert torch.equal(again, probs)
            assert torch.equal(same, chosen)
            assert torch.equal(histogram, wanted * times)
        assert torch.equal(torch.autograd.grad(again, own, grad)[0], dlogits)
        for index in (torch.int16, torch.int32, torch.int64):
            indices = torch.full((tokens, topk), -1, dtype=index, device="cuda")
            call(x, topk, bias, histogram.zero_(), bounds, mode, topk_indices=indices)
            found = torch.zeros_like(chosen).scatter(-1, indices.long(), True)
            assert torch.equal(found, chosen)
            assert torch.equal(histogram, wanted)
        _, bits = call(x, topk, bias, histogram, bounds, mode, routing_map_format="bitmap_u8")
        assert torch.equal(histogram, wanted * 2)
        for expert in range(0, experts, 7):
            assert torch.equal((bits[:, expert // 8] >> expert % 8 & 1).bool(), chosen[:, expert])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "values", [(-2.0, 2.0), (-0.1, 0.07), (5.0, 6.0), (-9.0, -8.0), (-3e38, 3e38), (0.0, 1e-45)]
)
def test_edge_values_as_on_the_host(values, mode):
    torch.manual_seed(4)
    # The sigmoids of these logits have the same bits on the host.
    kinds = torch.tensor([0.0, 0.0, math.inf, -math.inf, math.nan])
    bounds = torch.tensor(values)
    for experts in (2, 33, 130, 1000):
        x = kinds[torch.randint(5, (21, experts))]
        x[0], x[1], x[2], x[3] = 0.0, math.nan, math.inf, -math.inf
        for bias in (0.3 * torch.randn(experts), (torch.arange(experts) % 4 - 2) / 8):
            for topk in (1, (experts + 1) // 2, experts - 1):
                for bins in (1, 7, 1000):
                    histogram = torch.zeros(experts, bins, dtype=torch.int32)
                    on_gpu = histogram.cuda()
                    _, chosen = call(x, topk, bias, histogram, bounds)
                    given = x.cuda(), topk, bias.cuda(), on_gpu, bounds.cuda(), mode
                    _, theirs = call(*given)
                    assert torch.equal(theirs.cpu(), chosen)
                    assert torch.equal(on_gpu.cpu(), histogram)
                    call(x[:0].cuda(), *given[1:])
                    assert torch.equal(on_gpu.cpu(), histogram)


@pytest.mark.parametrize("bins", [7, 1000])
def test_values_on_edges_of_bins_as_on_the_host(bins):
    torch.manual_seed(bins)
    x = torch.zeros(1, 2)
    for _ in range(500):
        bounds = (4 * torch.rand(2) - 2).sort().values
        edge = bounds[0] + torch.randint(1, bins, ()) * ((bounds[1] - bounds[0]) / bins)
        bias = torch.stack((edge + 1, edge))
        histogram = torch.zeros(2, bins, dtype=torch.int32)
        on_gpu = histogram.cuda()
        call(x, 1, bias, histogram, bounds)
        call(x.cuda(), 1, bias.cuda(), on_gpu, bounds.cuda())
        assert torch.equal(on_gpu.cpu(), histogram)


def test_torchs_operations_count_the_same(monkeypatch):
    monkeypatch.setattr(choice, "takes", lambda *_: False)
    torch.manual_seed(5)
    x = torch.tensor([0.0, math.inf, -math.inf, math.nan])[torch.randint(4, (50, 90))]
    bias, bounds = torch.randn(90), torch.tensor([-1.0, 1.0])
    histogram = torch.zeros(90, 30, dtype=torch.int32)
    on_gpu = histogram.cuda()
    call(x, 4, bias, histogram, bounds)
    call(x.cuda(), 4, bias.cuda(), on_gpu, bounds.cuda())
    assert torch.equal(on_gpu.cpu(), histogram)


@pytest.mark.parametrize("mode", MODES)
def test_graphs_add_at_every_replay(mode):
    torch.manual_seed(6)
    x, bias = torch.randn(300, 64, device="cuda"), torch.randn(64, device="cuda")
    bounds = torch.tensor([-3.0, 3.0], device="cuda")
    histogram = torch.zeros(64, 100, dtype=torch.int32, device="cuda")
    probs, chosen = call(x, 8, bias, histogram, bounds, mode)
    once = histogram.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own, theirs = call(x, 8, bias, histogram, bounds, mode)
    assert torch.equal(histogram, once)
    for times in (2, 3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(histogram, once * times)
    assert torch.equal(own, probs)
    assert torch.equal(theirs, chosen)


def test_a_capture_does_not_read_bounds():
    x, bias = torch.randn(30, 64, device="cuda"), torch.randn(64, device="cuda")
    bounds = torch.tensor([-3.0, 3.0], device="cuda")
    histogram = torch.zeros(64, 100, dtype=torch.int32, device="cuda")
    call(x, 8, bias, histogram.clone(), bounds)
    bounds.mul_(2.0)  # other values than those that were read
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bias.mul_(1.0)  # an empty graph would warn
        with pytest.raises(te_fast.errors.StateError, match="before the capture"):
            call(x, 8, bias, histogram, bounds)
    graph.replay()
    torch.cuda.synchronize()
    assert not histogram.any()
    call(x, 8, bias, histogram, bounds)
    assert histogram.sum() == 30 * 64


def test_compiled_with_the_bits_of_eager():
    results = []
    for how in (call, torch.compile(call, fullgraph=True)):
        torch.manual_seed(7)
        x, bias = torch.randn(300, 64, device="cuda"), torch.randn(64, device="cuda")
        bounds = torch.tensor([-3.0, 3.0], device="cuda")
        histogram = torch.ones(64, 100, dtype=torch.int32, device="cuda")
        x.requires_grad_()
        probs, chosen = how(x, 8, bias, histogram, bounds)
        probs.square().sum().backward()
        results.append((probs, chosen, histogram, x.grad))
    assert all(map(torch.equal, *results))


def test_the_same_counts_every_time():
    torch.manual_seed(8)
    x, bias = torch.randn(8192, 256, device="cuda"), torch.zeros(256, device="cuda")
    bounds = torch.tensor([-1.0, 1.0], device="cuda")
    results = []
    for _ in range(5):
        histogram = torch.zeros(256, 4, dtype=torch.int32, device="cuda")
        call(x, 8, bias, histogram, bounds)
        results.append(histogram)
    assert all(torch.equal(one, results[0]) for one in results)
    assert results[0].sum(1).eq(8192).all()
