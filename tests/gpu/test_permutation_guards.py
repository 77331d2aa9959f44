"""MoE permutation on the GPU: memory outside of the results does not change; torch.compile gives eager's bits."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import te_fast.pytorch as te  # noqa: E402
from permutation_reference import make_case  # noqa: E402
from te_fast.runtime import native  # noqa: E402

pytestmark = pytest.mark.gpu

PATTERN = 0x5A
SEGMENTS = 4  # of two megabytes, from which torch serves allocations up to one megabyte
CASES = [
    (4, 1024, 1, 16, "all"),
    (33, 9, 2, 7, "holes"),
    (513, 17, 3, 40, "random"),
    (500, 12, 4, 48, "one"),
    (64, 5, 2, 144, "none"),
    (1000, 8, 2, 96, "random"),
]


def assert_only_results_are_written(body):
    """Serve the allocations of `body` from memory full of a pattern; all but its results must keep it."""
    pool = torch.cuda.MemPool()
    # A backward of another thread would not allocate from the pool.
    with torch.cuda.use_mem_pool(pool), torch.autograd.set_multithreading_enabled(False):
        fill = [
            torch.full((1 << 20,), PATTERN, dtype=torch.uint8, device="cuda")
            for _ in range(2 * SEGMENTS)
        ]
        torch.cuda.synchronize()
        # MemPool.snapshot tells the memory of the pool, too, but torch 2.11 corrupts Python's heap in it: it gives back
        # a reference, which it does not own, to the number of the pool. Python frees numbers above 256.
        pieces = [(value.data_ptr(), value.numel()) for value in fill]
        del fill
        results = [value for value in body() if value is not None]
        torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    ends = [(v.data_ptr(), v.data_ptr() + v.numel() * v.element_size()) for v in results]
    inside = 0
    for address, size in pieces:
        held = torch.empty(size, dtype=torch.uint8)
        copied = driver.cuMemcpyDtoH_v2(
            ctypes.c_void_p(held.data_ptr()), ctypes.c_uint64(address), ctypes.c_size_t(size)
        )
        assert copied == 0
        for begin, end in ends:
            first, last = max(begin - address, 0), min(end - address, size)
            if first < last:
                held[first:last] = PATTERN
                inside += last - first
        assert (held == PATTERN).all()
    assert inside == sum(end - begin for begin, end in ends)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("extra", [-5, 0, 3])
def test_permutations_write_their_results_alone(case, dtype, extra):
    tokens, experts, top_k, hidden, kind = case
    data = make_case(tokens, experts, top_k, hidden, kind=kind, dtype=dtype, zeros=True).to("cuda")
    align = 16 if kind != "all" else 1
    counts = data.mask.sum(0)
    rows = max(0, int(((counts + align - 1) // align * align).sum()) + extra)
    mask = data.mask
    x, probs = data.x.requires_grad_(), data.probs.requires_grad_()
    kept = {}

    def permute():
        kept["forward"] = te.moe_permute_and_pad_with_probs(
            x, probs, mask, None, align, num_out_tokens=rows
        )
        out, _, row_id_map, *_ = kept["forward"]
        return [*kept["forward"], row_id_map._te_fast_ends[0]]

    assert_only_results_are_written(permute)
    out, permuted, row_id_map, offsets, _ = kept["forward"]
    assert_only_results_are_written(lambda: native.moe_map(mask, align, False))
    if not out.numel():
        return
    grads = [torch.randn_like(out), torch.randn_like(permuted)]
    assert_only_results_are_written(
        lambda: torch.autograd.grad([out, permuted], [x, probs], grads, retain_graph=True)
    )
    y, weights = torch.randn_like(out).requires_grad_(), torch.rand_like(probs).requires_grad_()

    def merge():
        kept["merged"] = te.moe_unpermute(y, row_id_map, weights, x.shape, pad_offsets=offsets)
        return [kept["merged"]]

    assert_only_results_are_written(merge)
    gradient = torch.randn_like(x)
    assert_only_results_are_written(
        lambda: torch.autograd.grad([kept["merged"]], [y, weights], gradient)
    )
    if hidden % 16 == 0:
        for scale in (None, torch.ones(1, device="cuda")):
            assert_only_results_are_written(
                lambda scale=scale: te.moe_permute_and_quantize(
                    x.detach(), probs.detach(), mask, rows, align_size=align, scale=scale
                )
            )


def test_other_moves_write_their_results_alone():
    x = torch.randn(500, 24, device="cuda")
    values = torch.rand(500, device="cuda")
    indices = torch.randint(-1, 40, (500, 3), dtype=torch.int32, device="cuda")
    listed = [3, 0, 130, 367]
    splits = torch.tensor(listed, device="cuda")
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    padding, unpadding = te.Fp8Padding(4, 16), te.Fp8Unpadding(4, 16)
    padded, _ = padding(x, listed)
    for rows in (-1, 1000):
        assert_only_results_are_written(
            lambda rows=rows: te.moe_permute(x, indices, rows, map_type="index")
        )
    assert_only_results_are_written(lambda: [padding(x, listed)[0]])
    assert_only_results_are_written(lambda: padding(x, splits))
    assert_only_results_are_written(lambda: [unpadding(padded, listed)])
    assert_only_results_are_written(lambda: [unpadding(padded, splits)])
    assert_only_results_are_written(
        lambda: te.moe_sort_chunks_by_index_with_probs(x, values, splits, order)
    )


def results_of(function, *tensors):
    """Results of a function and its gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    outs = [value for value in function(*leaves) if value is not None]
    moving = [value for value in outs if value.requires_grad]
    generator = torch.Generator(device="cuda").manual_seed(5)
    grads = [torch.randn(v.shape, generator=generator, device="cuda").to(v.dtype) for v in moving]
    if moving:
        torch.autograd.backward(moving, grads)
    # Only a part of a map is defined, so the merged rows are compared instead.
    outs = [value for value in outs if value.dtype != torch.int32]
    return [*outs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def functions(case):
    """Every public function, by name."""
    rows, shape, mask = 1400, case.x.shape, case.mask
    indices = torch.randint(0, 24, (300, 2), dtype=torch.int32, device="cuda")
    listed = [100, 0, 190, 10]
    splits, order = torch.tensor(listed, device="cuda"), torch.tensor([2, 0, 3, 1], device="cuda")
    padding, unpadding = te.Fp8Padding(4, 16), te.Fp8Unpadding(4, 16)
    counts = mask.sum(0).tolist()

    def with_probs(x, probs):
        out, permuted, row_id_map = te.moe_permute_with_probs(x, probs, mask, rows)
        return out, permuted, te.moe_unpermute(out * 2, row_id_map, probs, shape)

    def with_padding(x, probs):
        out, permuted, row_id_map, offsets, padded = te.moe_permute_and_pad_with_probs(
            x, probs, mask, None, 16, num_out_tokens=rows
        )
        merged = te.moe_unpermute(out, row_id_map, None, shape, pad_offsets=offsets)
        return out, permuted, offsets, padded, merged

    def with_counts(x, probs):
        return te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)[:2]

    def without_probs(x, probs):
        out, row_id_map = te.moe_permute(x, mask, rows)
        return (te.moe_unpermute(out, row_id_map, restore_shape=shape),)

    def by_index(x, probs):
        out, row_id_map = te.moe_permute(x, indices, 600, map_type="index")
        return out, te.moe_unpermute(out, row_id_map, probs[:, :2].contiguous(), map_type="index")

    def quantized(x, probs):
        block = te.moe_permute_and_quantize(x.detach(), probs.detach(), mask, rows, align_size=16)
        scaled = te.moe_permute_and_quantize(
            x.detach(), None, mask, rows, scale=torch.ones(1, device="cuda")
        )
        return block[0].view(torch.uint8), block[1], block[2], scaled[0].view(torch.uint8)

    def sorted_chunks(x, probs):
        out, moved = te.moe_sort_chunks_by_index_with_probs(
            x, probs[:, 0].contiguous(), splits, order
        )
        return out, moved, te.moe_sort_chunks_by_index(x, splits, order)

    def padded_by_list(x, probs):
        out, _ = padding(x, listed)
        return out, unpadding(out * 2, listed)

    def padded_by_tensor(x, probs):
        out, padded = padding(x, splits, num_out_tokens=400)
        return out, padded, unpadding(out, splits, num_out_tokens=300)

    return {
        function.__name__: function
        for function in (
            with_probs,
            with_padding,
            with_counts,
            without_probs,
            by_index,
            quantized,
            sorted_chunks,
            padded_by_list,
            padded_by_tensor,
        )
    }


NAMES = [
    "with_probs",
    "with_padding",
    "with_counts",
    "without_probs",
    "by_index",
    "quantized",
    "sorted_chunks",
    "padded_by_list",
    "padded_by_tensor",
]


# torch 2.11 warns of torch.jit, which it uses itself, where inductor is imported first.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(name, backend):
    case = make_case(300, 24, 3, 128, dtype=torch.bfloat16, zeros=True).to("cuda")
    function = functions(case)[name]
    expected = results_of(function, case.x, case.probs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    got = results_of(compiled, case.x, case.probs)
    assert len(got) == len(expected)
    for value, wanted in zip(got, expected, strict=True):
        assert torch.equal(value, wanted)
