"""The words by which blocks of a permutation meet: no other launch uses them, and they are zero again afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import te_fast.pytorch as te  # noqa: E402
from permutation_reference import make_case  # noqa: E402
from te_fast import dispatch  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS = 4096 * 4 + 64 * 15


def cases(count, tokens=4096):
    return [
        make_case(tokens, 64, 4, 512, dtype=torch.bfloat16, seed=seed).to("cuda")
        for seed in range(count)
    ]


def permute(case):
    """Rows, probabilities, padding, and the same rows in FP8 with their scales."""
    out, probs, _, offsets, padded = te.moe_permute_and_pad_with_probs(
        case.x, case.probs, case.mask, None, 16, num_out_tokens=ROWS
    )
    data, scales = te.moe_permute_and_quantize(case.x, case.probs, case.mask, ROWS, align_size=16)[
        :2
    ]
    return out, probs, offsets, padded, data.view(torch.uint8), scales


def assert_equal(got, expected):
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def captured(body):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = body()
    return graph, results


def test_graphs_replayed_at_once_share_nothing_however_many_were_captured():
    first, last = cases(2)
    expected = [permute(first), permute(last)]
    small = make_case(8, 4, 1, 16, dtype=torch.bfloat16).to("cuda")

    def many():  # enough captured launches to use up a limited number of words
        for _ in range(12_287):
            te.moe_permute_with_probs(small.x, small.probs, small.mask, 8)

    graphs = [captured(lambda: permute(first))]
    between, _ = captured(many)
    graphs.append(captured(lambda: permute(last)))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, got), exact in zip(graphs, expected, strict=True):
        assert_equal(got, exact)
    del between


def test_memory_of_a_graph_may_serve_others_between_replays():
    (case,) = cases(1)
    expected = permute(case)

    def body():
        results = permute(case)
        # torch gives the permutations' own memory to these tensors, which a replay fills afterwards.
        others = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in SIZES]
        return results, others

    graph, (results, others) = captured(body)
    for _ in range(3):
        for tensor in results:
            tensor.view(torch.uint8).fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(results, expected)
        assert all((tensor == 7).all() for tensor in others)


SIZES = [128, 4096, 1 << 16, 1 << 20, 1 << 21, 1 << 22]


def test_permutations_and_gradients_of_norms_take_turns_with_a_streams_counters():
    function = dispatch.NormFunction("LayerNorm")
    (case,) = cases(1)
    x = torch.randn(700, 1024, device="cuda")
    gamma, mean, rstd = torch.randn(1024, device="cuda"), x.mean(1), x.var(1).rsqrt()

    def gradients():
        out = dispatch.norm_gradients(x, gamma, function)
        return dispatch.norm_backward(x, x, gamma, mean, rstd, function, out)

    expected, exact = permute(case), gradients()
    for _ in range(20):
        assert_equal(permute(case), expected)
        assert_equal(gradients(), exact)


def test_permutations_start_while_others_fill_the_gpu():
    """Blocks of two launches start as they find room; waiting blocks never keep out the blocks that they wait for."""
    several = cases(4)
    expected = [permute(case) for case in several]
    streams = [torch.cuda.Stream() for _ in several]
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    results = [None] * len(several)
    for _ in range(30):
        a @ a
        for index, (case, stream) in enumerate(zip(several, streams, strict=True)):
            with torch.cuda.stream(stream):
                results[index] = permute(case)
    torch.cuda.synchronize()
    for got, exact in zip(results, expected, strict=True):
        assert_equal(got, exact)


RACE = """
import sys
import torch
import te_fast.pytorch as te

tokens, experts = 65536, 4
x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
full = torch.ones(tokens, experts, dtype=torch.bool).pin_memory()
none = torch.zeros(tokens, experts, dtype=torch.bool).pin_memory()
mask = full.cuda()
te.moe_permute_and_quantize(x, None, mask, tokens * experts)
torch.cuda.synchronize()
other = torch.cuda.Stream()
for _ in range(30):
    mask.copy_(full)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(40):  # by the copy engine, beside the kernel
            mask.copy_(none, non_blocking=True)
            mask.copy_(full, non_blocking=True)
    try:
        scales = te.moe_permute_and_quantize(x, None, mask, tokens * experts)[1]
        torch.cuda.synchronize()
        if scales.isnan().any().item():
            sys.exit("scales are NaN and nothing was said")
    except RuntimeError as error:
        print("failed:", error)
        break
else:
    print("no race")
"""


def test_a_routing_map_that_changes_meanwhile_fails_the_launch(tmp_path):
    """Unfilled rows give an error, not NaN scales. The process then loses its GPU, so a new process runs it."""
    script = tmp_path / "race.py"
    script.write_text(RACE)
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300
    )
    assert "scales are NaN" not in result.stderr
    if "no race" in result.stdout:
        pytest.skip("the copies came before or behind every permutation")
    assert "failed:" in result.stdout, result.stderr
