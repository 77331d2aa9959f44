"""Router functions against loops over tokens in FP64."""

import pytest
import torch

import te_fast
from graphs import needs_compile
from selection import quickly, sampled
from te_fast import dispatch
from te_fast.moe import choice
from te_fast.pytorch import router

TOKENS, EXPERTS = 24, 16
ALL = ["softmax", "sigmoid", "sqrtsoftplus"]


def logits(dtype=torch.float32, tokens=TOKENS, experts=EXPERTS):
    torch.default_generator.manual_seed(tokens + experts)
    return (2 * torch.randn(tokens, experts)).to(dtype).requires_grad_()


def scores_of(x, function):
    if function == "softmax":
        return torch.softmax(x, -1)
    if function == "sigmoid":
        return torch.sigmoid(x)
    return torch.nn.functional.softplus(x).sqrt()


def chosen_of(values, count):
    """Indices of the largest values; of equal values, the first are chosen."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return sorted(order[:count])


def reference(x, topk, pre, groups, group_topk, factor, function, bias):
    """Compute each token by itself, in FP64 with torch's autograd."""
    x = x.detach().double().requires_grad_()
    rows, maps = [], []
    for token in x:
        scores = token if function == "softmax" and not pre else scores_of(token, function)
        choice = scores.detach() + (0 if bias is None else bias.double())
        if groups is not None:
            width = EXPERTS // groups
            best = [
                sum(sorted(choice[g * width : (g + 1) * width].tolist())[-(topk // group_topk) :])
                for g in range(groups)
            ]
            kept = chosen_of(best, group_topk)
            allowed = torch.tensor([e // width in kept for e in range(EXPERTS)])
            choice = choice.masked_fill(~allowed, -torch.inf)
        chosen = chosen_of(choice.tolist(), topk)
        values = scores[chosen]
        if function == "softmax" and not pre:
            values = torch.softmax(values, -1)
        elif function != "softmax" and topk > 1:
            values = values / (values.sum() + 1e-20)
        index = torch.tensor(chosen)
        rows.append(
            torch.zeros(EXPERTS, dtype=torch.float64).scatter(0, index, values * (factor or 1))
        )
        maps.append(torch.zeros(EXPERTS, dtype=torch.bool).scatter(0, index, True))
    return torch.stack(rows), torch.stack(maps), x


@pytest.mark.parametrize(
    ("case", "topk", "groups", "dtype"),
    sampled(
        [*ALL, "softmax before", "sigmoid biased", "sqrtsoftplus biased"],
        [1, 4],
        [(None, None), (4, 2)],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_probabilities_map_and_gradient(case, topk, groups, dtype):
    function, _, how = case.partition(" ")
    if groups[0] and topk == 1:
        groups = (4, 1)
    bias = torch.linspace(-0.3, 0.3, EXPERTS) if how == "biased" else None
    x = logits(dtype)
    arguments = (topk, how == "before", *groups, 2.5, function, bias)
    probs, chosen = router.fused_topk_with_score_function(x, *arguments)
    wanted, map_, leaf = reference(x, *arguments)
    assert probs.dtype == dtype
    assert torch.equal(chosen, map_)
    room = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(probs.double(), wanted, rtol=4 * room, atol=4 * room)
    torch.default_generator.manual_seed(1)
    grad = torch.randn(TOKENS, EXPERTS).to(dtype)
    probs.backward(grad)
    wanted.backward(grad.double())
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.double(), leaf.grad, rtol=8 * room, atol=8 * room)


def by_torch(monkeypatch, function, *arguments):
    """Call a function with torch operations alone, as for tensors that the kernels do not take."""
    with monkeypatch.context() as patch:
        patch.setattr(choice, "takes", lambda *_: False)
        return function(*arguments)


def edges(x):
    """Return a copy with special values, each kind in a token of its own."""
    x = x.clone()
    for token, value in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42)):
        x[token, 1::3] = value
    x[7] = 0.0
    x[8] = -float("inf")
    x[9, ::2] = x[9, -1]
    return x


@pytest.mark.parametrize(
    ("case", "experts"),
    sampled([*ALL, "softmax before", "sigmoid biased"], [1, 8, 33, 128, 200, 1024]),
)
def test_kernels_choose_as_torch_does(case, experts, monkeypatch):
    function, _, how = case.partition(" ")
    x = edges(logits(experts=experts).detach())
    topk = min(experts, 8)
    bias = torch.linspace(-0.3, 0.3, experts) if how == "biased" else None
    for groups in ((None, None), (8, 4)):
        if groups[0] and (experts % 8 or experts < 16):
            continue
        indices = [torch.empty(TOKENS, topk, dtype=torch.int32) for _ in range(2)]
        given = [
            (x, topk, how == "before", *groups, 2.5, function, bias, "bytemap", own)
            for own in (None, *indices)
        ]
        run = router.fused_topk_with_score_function
        probs, chosen = run(*given[0])
        wanted, map_ = by_torch(monkeypatch, run, *given[0])
        assert torch.equal(chosen, map_)
        torch.testing.assert_close(probs, wanted, rtol=1e-5, atol=1e-7, equal_nan=True)
        run(*given[1])
        by_torch(monkeypatch, run, *given[2])
        assert torch.equal(*indices)
    run = router.fused_compute_score_for_moe_aux_loss
    chosen, scores = run(x, topk, function)
    map_, wanted = by_torch(monkeypatch, run, x, topk, function)
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-7, equal_nan=True)
    plain = torch.arange(TOKENS) > 9  # rounding may make other values equal in the other tokens
    assert torch.equal(chosen[plain], map_[plain])


@pytest.mark.parametrize("experts", [8, 200, 1024])
@pytest.mark.parametrize("case", [*ALL, "softmax before"])
def test_gradients_of_kernels_are_torchs(case, experts, monkeypatch):
    function, _, how = case.partition(" ")
    grad = torch.randn(TOKENS, experts)

    def gradients():
        own = logits(experts=experts)
        given = (6, how == "before", None, None, 1.5, function, None)
        probs, _ = router.fused_topk_with_score_function(own, *given)
        _, scores = router.fused_compute_score_for_moe_aux_loss(own, 6, function)
        return torch.autograd.grad((probs * grad).sum() + (scores * grad).sum(), own)[0]

    wanted = by_torch(monkeypatch, gradients)
    torch.testing.assert_close(gradients(), wanted, rtol=1e-4, atol=1e-6)


def test_more_experts_than_kernels_take():
    x = logits(experts=1500)
    probs, chosen = router.fused_topk_with_score_function(
        x, 4, False, None, None, None, "softmax", None
    )
    assert torch.equal(chosen.sum(-1), torch.full((TOKENS,), 4))
    probs.square().sum().backward()
    assert x.grad.isfinite().all()


def test_odd_memory_of_logits_and_indices():
    x = logits(experts=40).detach()
    given = (3, False, None, None, None, "sigmoid", None)
    probs, chosen = router.fused_topk_with_score_function(x, *given)
    strided = torch.zeros(TOKENS, 80)[:, ::2].copy_(x)
    again, _ = router.fused_topk_with_score_function(strided, *given)
    assert torch.equal(again, probs)
    for indices in (
        torch.zeros(3, TOKENS, dtype=torch.int64).t(),
        torch.zeros(TOKENS, 6, dtype=torch.int16)[:, ::2],
    ):
        router.fused_topk_with_score_function(x, *given, topk_indices=indices)
        found = torch.zeros_like(chosen).scatter(-1, indices.long(), True)
        assert torch.equal(found, chosen)
    empty, none = router.fused_topk_with_score_function(x[:0], *given)
    assert empty.shape == none.shape == (0, 40)


def test_one_launch_each_way():
    x = logits(experts=40)
    with dispatch.record() as launches:
        probs, _ = router.fused_topk_with_score_function(
            x, 3, False, None, None, None, "softmax", None
        )
        probs.backward(torch.ones_like(probs))
    assert [launch.name for launch in launches] == ["router_fwd_f32", "router_bwd_f32"]


def test_no_second_gradient():
    x = logits()
    probs, _ = router.fused_topk_with_score_function(x, 3, True, None, None, None, "softmax", None)
    with pytest.raises(te_fast.UnsupportedError, match="router"):
        torch.autograd.grad(probs.sum(), x, create_graph=True)


@needs_compile
@pytest.mark.parametrize("function", quickly(ALL, "sigmoid"))
def test_compiled_with_the_bits_of_eager(function):
    def run(x, indices):
        probs, _ = router.fused_topk_with_score_function(
            x, 3, False, 4, 1, 2.0, function, None, topk_indices=indices
        )
        chosen, scores = router.fused_compute_score_for_moe_aux_loss(x, 3, function, "bitmap_u8")
        return probs, chosen, scores

    results = []
    torch.compiler.reset()
    for how in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        x, indices = logits(), torch.zeros(TOKENS, 3, dtype=torch.int32)
        probs, chosen, scores = how(x, indices)
        (probs.square().sum() + scores.square().sum()).backward()
        results.append([probs, chosen, scores, indices, x.grad])
    assert all(map(torch.equal, *results))


def test_equal_scores_choose_the_first_experts():
    _, chosen = router.fused_topk_with_score_function(
        torch.zeros(3, 8), 3, False, None, None, None, "sigmoid", None
    )
    assert torch.equal(chosen, torch.tensor([[True] * 3 + [False] * 5] * 3))


@pytest.mark.parametrize("experts", [8, 13, 64])
def test_bitmaps_and_indices_are_the_same_map(experts):
    x = logits(experts=experts).detach().view(4, 6, experts)
    given = (x, 3, True, None, None, None, "softmax", None)
    probs, chosen = router.fused_topk_with_score_function(*given)
    for form in ("bitmap_u8", router.RoutingMapFormat.BITMAP_U8, 1):
        _, bits = router.fused_topk_with_score_function(*given, form)
        assert bits.shape == (4, 6, -(-experts // 8))
        assert bits.dtype == torch.uint8
        for expert in range(experts):
            own = (bits[..., expert // 8] >> (expert % 8)) & 1
            assert torch.equal(own.bool(), chosen[..., expert])
    for dtype in (torch.int16, torch.int32, torch.int64):
        buffer = torch.full((4, 6, 3), -1, dtype=dtype)
        same, indices = router.fused_topk_with_score_function(*given, topk_indices=buffer)
        assert indices is buffer
        assert torch.equal(same, probs)
        found = torch.zeros_like(chosen).scatter(-1, buffer.long(), True)
        assert torch.equal(found, chosen)


@pytest.mark.parametrize("function", ALL)
def test_extreme_logits_have_finite_gradients(function):
    x = torch.tensor([[1e4, -1e4, 0.0, 30.0, -200.0, 200.0]], requires_grad=True)
    probs, _ = router.fused_topk_with_score_function(x, 6, True, None, None, None, function, None)
    probs.sum().backward()
    assert probs.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("function", ALL)
def test_scores_for_the_loss(function):
    x = logits(torch.bfloat16)
    chosen, scores = router.fused_compute_score_for_moe_aux_loss(x, 3, function)
    leaf = x.detach().double().requires_grad_()
    wanted = scores_of(leaf, function)
    wanted = wanted / wanted.sum(-1, keepdim=True)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen.sum(-1), torch.full((TOKENS,), 3))
    assert (
        scores.masked_fill(chosen, -1).amax(-1) <= scores.masked_fill(~chosen, 2).amin(-1)
    ).all()
    torch.default_generator.manual_seed(2)
    grad = torch.randn(TOKENS, EXPERTS)
    scores.backward(grad)
    wanted.backward(grad.double())
    torch.testing.assert_close(x.grad.double(), leaf.grad, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("total", [TOKENS, torch.tensor(TOKENS)], ids=["int", "tensor"])
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16], ids=str
)
def test_loss(dtype, total):
    probs = torch.softmax(logits(), -1).detach().requires_grad_()
    counts = torch.arange(EXPERTS).to(dtype)
    loss = router.fused_moe_aux_loss(probs, counts, total, EXPERTS, 2, 0.01)
    factor = EXPERTS * 0.01 / (2 * TOKENS**2)
    wanted = (probs.detach().double().sum(0) * counts.double()).sum() * factor
    assert loss.shape == ()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    loss.backward()
    spread = (counts.double() * factor).expand(TOKENS, EXPERTS)
    torch.testing.assert_close(probs.grad.double(), spread, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"logits": torch.zeros(2, 4, dtype=torch.float64)}, ValueError),
        ({"topk": 0}, ValueError),
        ({"topk": 5}, ValueError),
        ({"topk": 2.0}, TypeError),
        ({"topk": "2"}, TypeError),
        ({"topk": True}, TypeError),
        ({"logits": None}, TypeError),
        ({"scaling_factor": "2"}, TypeError),
        ({"num_groups": 4.0}, TypeError),
        ({"expert_bias": [0.0] * 4}, TypeError),
        ({"expert_bias": torch.zeros(4, dtype=torch.bfloat16)}, TypeError),
        ({"score_function": "relu"}, ValueError),
        ({"expert_bias": torch.zeros(4), "score_function": "softmax"}, ValueError),
        ({"expert_bias": torch.zeros(3)}, ValueError),
        ({"num_groups": 3, "group_topk": 1}, ValueError),
        ({"num_groups": 2, "group_topk": 3}, ValueError),
        ({"routing_map_format": "dense"}, ValueError),
        ({"routing_map_format": 2}, ValueError),
        ({"routing_map_format": 1.0}, TypeError),
        ({"topk_indices": torch.zeros(2, 3, dtype=torch.int64)}, ValueError),
        ({"topk_indices": [[0, 1], [0, 1]]}, TypeError),
        ({"topk_indices": torch.zeros(2, 2, dtype=torch.bool)}, TypeError),
        ({"topk_indices": torch.zeros(2, 2, dtype=torch.uint8)}, TypeError),
        ({"topk_indices": torch.zeros(2, 2, dtype=torch.complex64)}, TypeError),
        (
            {"topk_indices": torch.zeros(2, 2).int(), "routing_map_format": "bitmap_u8"},
            ValueError,
        ),
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
        "expert_bias": None,
    }
    with pytest.raises(error, match=f"router: .*{next(iter(change))[:5]}") as caught:
        router.fused_topk_with_score_function(**good | change)
    assert isinstance(caught.value, te_fast.TeFastError)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokens_per_expert": torch.zeros(3)}, ValueError),
        ({"tokens_per_expert": torch.zeros(4, dtype=torch.bool)}, TypeError),
        ({"tokens_per_expert": [1, 1, 1, 1]}, TypeError),
        ({"tokens_per_expert": torch.zeros(4, device="meta")}, RuntimeError),
        ({"probs": torch.zeros(2, 4, dtype=torch.int64)}, TypeError),
        ({"probs": torch.zeros(2, 4, dtype=torch.float64)}, TypeError),
        ({"total_num_tokens": 0}, ValueError),
        ({"total_num_tokens": -2}, ValueError),
        ({"total_num_tokens": "2"}, TypeError),
        ({"total_num_tokens": torch.ones(2)}, ValueError),
        ({"num_experts": 3}, ValueError),
        ({"num_experts": 0}, ValueError),
        ({"topk": 0}, ValueError),
        ({"coeff": "x"}, TypeError),
    ],
    ids=str,
)
def test_bad_arguments_of_the_loss(change, error):
    good = {
        "probs": torch.zeros(2, 4),
        "tokens_per_expert": torch.zeros(4),
        "total_num_tokens": 2,
        "num_experts": 4,
        "topk": 1,
        "coeff": 1.0,
    }
    with pytest.raises(error, match=f"router: .*{next(iter(change))}") as caught:
        router.fused_moe_aux_loss(**good | change)
    assert isinstance(caught.value, te_fast.TeFastError)
