"""Routers on the GPU against torch operations, in poisoned memory, with tokens and experts that hit each tail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
from te_fast.moe import choice  # noqa: E402
from te_fast.pytorch import router  # noqa: E402

pytestmark = pytest.mark.gpu

SCORES = ("softmax", "softmax before", "sigmoid", "sigmoid biased", "sqrtsoftplus")
SIZES = [
    (1, 1),
    (3, 8),
    (4, 31),
    (5, 32),
    (130, 33),
    (257, 128),
    (1000, 256),
    (4096, 64),
    (77, 1024),
]


def poison():
    torch.cuda.synchronize()
    kept = [torch.full((1 << 23,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    kept += [torch.full((1 << 12,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del kept


def by_torch(monkeypatch, function, *arguments):
    with monkeypatch.context() as patch:
        patch.setattr(choice, "takes", lambda *_: False)
        return function(*arguments)


def is_settled(scores, topk):
    """Tokens whose choice does not depend on the rounding of a score's last bit."""
    ordered = scores.float().sort(-1, descending=True).values
    if topk == ordered.shape[-1]:
        return torch.ones(len(ordered), dtype=torch.bool, device=ordered.device)
    return ordered[:, topk - 1] - ordered[:, topk] > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "experts"), SIZES)
@pytest.mark.parametrize("case", SCORES)
def test_kernels_are_near_torch(case, tokens, experts, dtype, monkeypatch):
    function, _, how = case.partition(" ")
    torch.manual_seed(tokens + experts)
    # Logits are distinct in every type: equal logits would hide a wrong order.
    x = torch.randn(tokens, experts, device="cuda").to(dtype)
    bias = torch.linspace(-0.3, 0.3, experts, device="cuda") if how == "biased" else None
    topk = min(experts, 8)
    grad = torch.randn(tokens, experts, device="cuda").to(dtype)
    for groups in ((None, None), (8, 4)):
        if groups[0] and (experts % 8 or experts < 16):
            continue

        def run(groups=groups):
            own = x.clone().requires_grad_()
            indices = torch.full((tokens, topk), -1, dtype=torch.int32, device="cuda")
            given = (own, topk, how == "before", *groups, 2.5, function, bias)
            probs, chosen = router.fused_topk_with_score_function(*given)
            again, _ = router.fused_topk_with_score_function(*given, topk_indices=indices)
            map_, scores = router.fused_compute_score_for_moe_aux_loss(own, topk, function)
            first = torch.autograd.grad(probs, own, grad)[0]
            second = torch.autograd.grad(scores, own, grad.float())[0]
            found = torch.zeros_like(chosen).scatter(-1, indices.long(), True)
            assert torch.equal(found, chosen)
            assert torch.equal(again, probs)
            return probs, chosen, scores, map_, first, second

        poison()
        mine, theirs = run(), by_torch(monkeypatch, run)
        same = (mine[1] == theirs[1]).all(-1)
        if function == "softmax" and how != "before":
            assert same.all()  # logits are compared without rounding
        assert same.float().mean() > 0.98
        room = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
        for index in (0, 4):
            torch.testing.assert_close(mine[index][same], theirs[index][same], rtol=room, atol=room)
        torch.testing.assert_close(mine[2], theirs[2], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine[5], theirs[5], rtol=room, atol=room)
        settled = is_settled(theirs[2], topk)
        assert torch.equal(mine[3][settled], theirs[3][settled])


def test_edge_values_as_on_the_host():
    x = torch.zeros(12, 40)
    for token, value in enumerate(
        (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, 1e30)
    ):
        x[token, 1::3] = value
    x[7] = -float("inf")
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        given = (6, False, 4, 2, None, score, None, "bitmap_u8")
        probs, bits = router.fused_topk_with_score_function(x, *given)
        poison()
        on_gpu, their_bits = router.fused_topk_with_score_function(x.cuda(), *given)
        assert torch.equal(their_bits.cpu(), bits)
        torch.testing.assert_close(on_gpu.cpu(), probs, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_the_same_bits_every_time():
    x = torch.randn(4096, 256, device="cuda", requires_grad=True)
    results = []
    for _ in range(5):
        probs, chosen = router.fused_topk_with_score_function(
            x, 8, False, 8, 4, 2.5, "sigmoid", None
        )
        results.append((probs, chosen, *torch.autograd.grad(probs.square().sum(), x)))
    assert all(
        torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True)
    )
