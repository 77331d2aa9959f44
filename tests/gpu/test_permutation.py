"""MoE permutation on the GPU: the host kernels' results bit for bit; sync-free, capturable, deterministic."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import te_fast.pytorch as te  # noqa: E402
from permutation_reference import make_case, permute_reference, rows_of  # noqa: E402
from te_fast.pytorch import permutation  # noqa: E402

pytestmark = pytest.mark.gpu

# Tokens, experts, top_k, hidden and kind of routing.
CASES = [
    (1, 1, 1, 16, "random"),
    (7, 5, 2, 16, "random"),
    (300, 1024, 1, 16, "all"),
    (513, 17, 3, 8200, "random"),
    (1000, 12, 4, 48, "one"),
    (1000, 12, 4, 48, "none"),
    (4095, 64, 6, 144, "holes"),
    (4096, 256, 8, 264, "random"),
    (5000, 1024, 16, 16, "random"),
    (40000, 8, 2, 16, "random"),
    (33, 9, 2, 7, "holes"),
]
DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float64),
]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).cpu()


def same(device_value, host_value, what):
    assert torch.equal(bits(device_value), bits(host_value)), what


def defined(row_id_map):
    """The entries that Transformer Engine defines, zeros elsewhere."""
    row_id_map = row_id_map.cpu()
    count = row_id_map[:, -1:]
    place = torch.arange(row_id_map.size(1) // 2)
    keep = torch.cat([place < count, place < count, count >= 0], 1)
    return torch.where(keep, row_id_map, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize("extra", [-5, 0, 70])
def test_cuda_equals_host(case, dtypes, extra):
    tokens, experts, top_k, hidden, kind = case
    data = make_case(
        tokens, experts, top_k, hidden, kind=kind, dtype=dtypes[0], prob_dtype=dtypes[1], zeros=True
    )
    rows = max(0, int(permute_reference(data, 16, None)[3].sum()) + extra)
    results = []
    for device in ("cpu", "cuda"):
        here = data.to(device)
        here.x.requires_grad_()
        here.probs.requires_grad_()
        out, probs, row_id_map, offsets, padded = te.moe_permute_and_pad_with_probs(
            here.x, here.probs, here.mask, None, 16, num_out_tokens=rows
        )
        generator = torch.Generator().manual_seed(1)
        y = torch.randn(rows, hidden, generator=generator).to(dtypes[0]).to(device).requires_grad_()
        weights = torch.rand(tokens, experts, generator=generator).to(dtypes[1]).to(device)
        weights.requires_grad_()
        merged = te.moe_unpermute(y, row_id_map, weights, here.x.shape, pad_offsets=offsets)
        plain = te.moe_unpermute(y.detach(), row_id_map, None, here.x.shape, pad_offsets=offsets)
        grads = [
            torch.randn(t.shape, generator=generator).to(t.dtype).to(device)
            for t in (out, probs, merged)
        ]
        torch.autograd.backward([out, probs, merged], grads)
        exact = [out, probs, defined(row_id_map), offsets, padded, merged, plain]
        exact += [here.x.grad, here.probs.grad, y.grad]
        results.append((exact, weights.grad))
    names = [
        "out",
        "probs",
        "row_id_map",
        "pad_offsets",
        "padded",
        "merged",
        "plain",
        "dx",
        "dprobs",
        "dy",
    ]
    for host, cuda, name in zip(results[0][0], results[1][0], names, strict=False):
        same(cuda, host, name)
    if rows:
        # Sums over `hidden` in another order: eps * sqrt(hidden) for FP32, a rounding of the type for 16 bits.
        tolerance = 1e-4 if dtypes[1].itemsize >= 4 else 2e-2
        torch.testing.assert_close(
            results[1][1].cpu().float(),
            results[0][1].float(),
            rtol=tolerance,
            atol=tolerance * hidden**0.5,
        )


@pytest.mark.parametrize("rows", [0, 1, 777, 1500])
def test_dropped_rows_are_not_in_the_map(rows):
    case = make_case(600, 130, 3, 16, dtype=torch.bfloat16)
    here = case.to("cuda")
    kept = case.mask & (rows_of(case.mask) < rows)
    count = kept.sum(1)
    for row_id_map in (
        te.moe_permute(here.x, here.mask, rows)[1],
        te.moe_permute_with_probs(here.x, here.probs, here.mask, rows)[2],
        te.moe_permute_and_quantize(here.x, here.probs, here.mask, rows)[3],
        te.moe_permute_and_quantize(
            here.x, None, here.mask, rows, scale=here.x.new_ones(1).float()
        )[3],
    ):
        assert torch.equal(row_id_map[:, -1].cpu(), count.int())
        host = te.moe_permute(case.x, case.mask, rows)[1]
        assert torch.equal(defined(row_id_map), defined(host))


def test_maps_that_are_given_stay_as_they_are():
    case = make_case(600, 130, 3, 16).to("cuda")
    _, row_id_map = te.moe_permute(case.x, case.mask, case.routed)
    before = defined(row_id_map)
    y = torch.randn(700, 16, device="cuda", requires_grad=True)  # fewer rows than the map has
    te.moe_unpermute(y, row_id_map, restore_shape=case.x.shape).sum().backward()
    assert torch.equal(defined(row_id_map), before)


@pytest.mark.parametrize("hidden", [16, 144, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("per_tensor", [True, False])
def test_quantize_cuda_equals_host(hidden, dtype, fp8, per_tensor):
    case = make_case(333, 12, 3, hidden, dtype=dtype, zeros=True)
    results = []
    for device in ("cpu", "cuda"):
        here = case.to(device)
        scale = torch.tensor([2.5], device=device) if per_tensor else None
        amax = torch.zeros(1, device=device) if per_tensor else None
        result = te.moe_permute_and_quantize(
            here.x,
            here.probs,
            here.mask,
            1300,
            align_size=16,
            fp8_dtype=fp8,
            scale=scale,
            amax=amax,
        )
        results.append([value for value in (*result[:3], *result[4:], amax) if value is not None])
    for host, cuda in zip(*results, strict=True):
        same(cuda, host, "quantize")


def test_block_scales_of_calls_that_follow_each_other():
    """Each call waits for its own scales, regardless of those that an earlier call left in the stream's memory."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    calls = []
    for seed in range(24):
        tokens, experts, top_k, hidden = [(2000, 64, 6, 1280), (77, 5, 3, 528), (900, 256, 8, 144)][
            seed % 3
        ]
        case = make_case(
            tokens, experts, top_k, hidden, dtype=torch.bfloat16, zeros=True, seed=seed
        )
        rows = tokens * top_k + (300 if seed % 2 else -20)
        calls.append((case, case.to("cuda"), rows, streams[seed // 3 % 2]))
    torch.cuda.synchronize()
    results = []
    for _, here, rows, stream in calls:
        with torch.cuda.stream(stream):
            results.append(te.moe_permute_and_quantize(here.x, here.probs, here.mask, rows))
    torch.cuda.synchronize()
    for (case, _, rows, _), cuda in zip(calls, results, strict=True):
        host = te.moe_permute_and_quantize(case.x, case.probs, case.mask, rows)
        for name, on_cuda, on_host in zip(("data", "scale_inv", "probs"), cuda, host, strict=False):
            same(on_cuda, on_host, name)


def test_captured_block_scales_are_those_of_each_replay():
    case = make_case(300, 24, 3, 400, dtype=torch.bfloat16).to("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = te.moe_permute_and_quantize(case.x, case.probs, case.mask, 1000, align_size=16)
    for seed in range(5):
        fresh = make_case(300, 24, 3, 400, dtype=torch.bfloat16, seed=seed + 10)
        for to, value in ((case.x, fresh.x), (case.probs, fresh.probs), (case.mask, fresh.mask)):
            to.copy_(value)
        captured[1].fill_(float("nan"))
        graph.replay()
        te.moe_permute_and_quantize(case.x[:9], None, case.mask[:9], 27)  # eager between replays
        host = te.moe_permute_and_quantize(fresh.x, fresh.probs, fresh.mask, 1000, align_size=16)
        for name, on_cuda, on_host in zip(("data", "scale_inv"), captured, host, strict=False):
            same(on_cuda, on_host, name)


@pytest.mark.parametrize("shape", [(64, 3, 24, 40), (4097, 8, 264, 30000), (999, 5, 7, 0)])
def test_index_cuda_equals_host(shape):
    tokens, top_k, hidden, num_out = shape
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    indices = torch.randint(-1, 128, (tokens, top_k), generator=generator, dtype=torch.int32)
    probs = torch.rand(tokens, top_k, generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        leaf = x.clone().to(device).requires_grad_()
        out, row_id_map = te.moe_permute(leaf, indices.to(device), num_out, map_type="index")
        merged = te.moe_unpermute(out, row_id_map, probs.to(device), map_type="index")
        merged.backward(torch.ones_like(merged))
        results.append([out, row_id_map, merged, leaf.grad])
    for host, cuda in zip(*results, strict=True):
        same(cuda, host, "index")


def test_pad_and_sort_cuda_equal_host():
    generator = torch.Generator().manual_seed(4)
    splits = torch.randint(0, 60, (700,), generator=generator)
    order = torch.randperm(700, generator=generator)
    x = torch.randn(int(splits.sum()) + 4, 136, generator=generator).bfloat16()
    probs = torch.rand(len(x), generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        leaf, values = (t.clone().to(device).requires_grad_() for t in (x, probs))
        sizes = splits.to(device)
        out, moved = te.moe_sort_chunks_by_index_with_probs(leaf, values, sizes, order.to(device))
        padded, _ = te.Fp8Padding(700, 16)(leaf[:-4], splits.tolist())
        on_device, _ = te.Fp8Padding(700, 16)(leaf[:-4].detach(), sizes)
        back = te.Fp8Unpadding(700, 16)(padded, splits.tolist())
        weight = torch.arange(len(out), device=device, dtype=torch.float32)[:, None]
        ((out * weight).sum() + (moved * weight[:, 0]).sum() + padded.sum()).backward()
        results.append([out, moved, padded, on_device, back, leaf.grad, values.grad])
    for host, cuda in zip(*results, strict=True):
        same(cuda, host, "pad and sort")


# torch warns that the mode is a prototype after it has set it.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_sync_free_forms_do_not_synchronise():
    case = make_case(256, 8, 2, 64, dtype=torch.bfloat16).to("cuda")
    counts = case.mask.sum(0)
    run_all(case, counts)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run_all(case, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_all(case, counts):
    out, _, row_id_map, offsets, _ = te.moe_permute_and_pad_with_probs(
        case.x, case.probs, case.mask, counts, 16, num_out_tokens=640
    )
    merged = te.moe_unpermute(out, row_id_map, case.probs, case.x.shape, pad_offsets=offsets)
    permuted, _, same_map = te.moe_permute_with_probs(case.x, case.probs, case.mask, 512)
    chunks = te.moe_sort_chunks_by_index(permuted, counts, torch.arange(8, device="cuda").flip(0))
    padded, _ = te.Fp8Padding(8, 16)(permuted, counts)
    plain = te.Fp8Unpadding(8, 16)(padded, counts, num_out_tokens=512)
    fp8 = te.moe_permute_and_quantize(case.x, case.probs, case.mask, 640, align_size=16)
    return out, merged, permuted, same_map[:, -1], chunks, padded, plain, fp8[0], fp8[1]


def test_captured_from_the_first_call_and_replayed_on_new_routings():
    case = make_case(300, 24, 3, 128, dtype=torch.bfloat16).to("cuda")
    counts = case.mask.sum(0)
    graph = torch.cuda.CUDAGraph()
    small = make_case(8, 24, 3, 128, dtype=torch.bfloat16).to("cuda")
    with torch.cuda.graph(graph):
        captured = permutation.moe_permute_and_pad_with_probs(
            case.x, case.probs, case.mask, counts, 16, num_out_tokens=1400
        )
        merged = te.moe_unpermute(
            captured[0], captured[2], case.probs, case.x.shape, pad_offsets=captured[3]
        )
    for seed in range(5):
        fresh = make_case(300, 24, 3, 128, dtype=torch.bfloat16, seed=seed + 10)
        for to, value in ((case.x, fresh.x), (case.probs, fresh.probs), (case.mask, fresh.mask)):
            to.copy_(value)
        captured[0].fill_(float("nan"))
        graph.replay()
        te.moe_permute_with_probs(small.x, small.probs, small.mask, 24)  # eager between replays
        expected, expected_probs, offsets, padded = permute_reference(fresh, 16, 1400)
        same(captured[0], expected, "out")
        same(captured[1], expected_probs, "probs")
        same(captured[3], offsets, "offsets")
        same(captured[4], padded, "padded")
        host = te.moe_permute_and_pad_with_probs(
            fresh.x, fresh.probs, fresh.mask, None, 16, num_out_tokens=1400
        )
        same(
            merged,
            te.moe_unpermute(host[0], host[2], fresh.probs, fresh.x.shape, pad_offsets=host[3]),
            "merged",
        )


def test_streams_side_by_side_and_run_to_run():
    cases = [
        make_case(2048, 64, 4, 256, dtype=torch.bfloat16, seed=seed).to("cuda") for seed in range(4)
    ]
    rows = 2048 * 4 + 64 * 15
    expected = [
        te.moe_permute_and_pad_with_probs(c.x, c.probs, c.mask, None, 16, num_out_tokens=rows)
        for c in cases
    ]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(20):
        results = []
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(
                    te.moe_permute_and_pad_with_probs(
                        case.x, case.probs, case.mask, None, 16, num_out_tokens=rows
                    )
                )
        torch.cuda.synchronize()
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result[0], wanted[0])
            assert torch.equal(result[1], wanted[1])
    case, (out, _, row_id_map, offsets, _) = cases[0], expected[0]
    first = None
    for _ in range(5):
        probs = case.probs.clone().requires_grad_()
        te.moe_unpermute(
            out, row_id_map, probs, case.x.shape, pad_offsets=offsets
        ).float().sum().backward()
        first = probs.grad if first is None else first
        assert torch.equal(probs.grad, first)


def test_canaries_behind_small_outputs():
    case = make_case(500, 16, 4, 64, dtype=torch.bfloat16).to("cuda")
    permutation.moe_dropped_rows("cuda", reset=True)
    before = [torch.full((1 << 16,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(8)]
    out, probs, row_id_map = te.moe_permute_with_probs(case.x, case.probs, case.mask, 100)
    after = [torch.full((1 << 16,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(8)]
    expected, expected_probs, _, _ = permute_reference(
        make_case(500, 16, 4, 64, dtype=torch.bfloat16), 1, 100
    )
    same(out, expected, "out")
    same(probs, expected_probs, "probs")
    for canary in before + after:
        assert (canary == 0x5A).all()
    assert permutation.moe_dropped_rows("cuda", reset=True) == 1900
    te.moe_unpermute(out, row_id_map, case.probs, case.x.shape)


def test_more_than_2_to_the_31_elements():
    tokens, experts, hidden = 40_000, 8, 7168
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randint(
        -100, 100, (tokens, hidden), generator=generator, device="cuda", dtype=torch.int32
    ).bfloat16()
    mask = torch.ones(tokens, experts, dtype=torch.bool, device="cuda")
    out, row_id_map = te.moe_permute(x, mask, tokens * experts)
    assert out.numel() > 2**31
    for expert in range(experts):
        assert torch.equal(out[expert * tokens : (expert + 1) * tokens], x), expert
    merged = te.moe_unpermute(out, row_id_map, restore_shape=x.shape)
    assert torch.equal(merged, (x.float() * experts).bfloat16())


def test_mixed_devices_are_refused():
    case = make_case(4, 2, 1, 16)
    with pytest.raises(RuntimeError, match="must be on the input's device cuda:0, got cpu"):
        te.moe_permute_with_probs(case.x.cuda(), case.probs, case.mask.cuda(), 4)
    with pytest.raises(RuntimeError, match="routing_map must be on"):
        te.moe_permute(case.x.cuda(), case.mask, 4)
