"""Parameters in parts, as torch's autograd sees them: gradients, hooks, retained graphs, edges that are left out."""

import weakref

import pytest
import torch

import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.pytorch import ops

EXPERTS, ROWS, SIZE = 4, 16, 32
COUNTS = [ROWS] * EXPERTS


def _layer(*, fuse, told=False, **options):
    """Return a layer without biases, whose ``main_grad`` lies in one memory."""
    torch.manual_seed(0)
    options = {"bias": False, "device": "cpu", "params_dtype": torch.bfloat16} | options
    layer = te.GroupedLinear(EXPERTS, SIZE, SIZE, fuse_wgrad_accumulation=fuse, **options)
    for weight, buffer in zip(_weights(layer), torch.zeros(EXPERTS, SIZE, SIZE), strict=True):
        if fuse:
            weight.main_grad = buffer
        if told:
            weight.grad_added_to_main_grad = False
    return layer


def _weights(layer):
    return [getattr(layer, f"weight{expert}") for expert in range(EXPERTS)]


def _operands():
    """Return small integers, which FP8 has at scales that are powers of two, and whose products' sums BF16 has."""
    random = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (ROWS * EXPERTS, SIZE), generator=random).bfloat16()
    dy = torch.randint(0, 2, (ROWS * EXPERTS, SIZE), generator=random).bfloat16()
    return (
        x,
        dy,
        [b.T @ a for a, b in zip(x.float().split(ROWS), dy.float().split(ROWS), strict=True)],
    )


def _forward(layer, x, *, fp8=True):
    with te.autocast(enabled=fp8, recipe=Float8BlockScaling()):
        return layer(x, COUNTS)


def _edges(y):
    return sum(node is not None for node, _ in y.grad_fn.next_functions)


def _into(layer, *, fuse):
    return [weight.main_grad if fuse else weight.grad for weight in _weights(layer)]


def _hook(kind, weight, seen):
    """Register a hook; returns what must live with it."""
    if kind == "tensor":
        return weight.register_hook(lambda grad: seen.append(grad))
    if kind == "post":
        return weight.register_post_accumulate_grad_hook(lambda _: seen.append(weight.grad))
    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # as data parallelism finds it
    node.register_hook(lambda _, grads: seen.append(grads[0]))
    return node


class _GivesNone(torch.autograd.Function):
    """A function whose backward gives its second input no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _runs_without_gradient(kind):
    """Tell whether torch calls a hook of a parameter that gets no gradient; torch 2.6 calls fewer than later ones."""
    x, weight, seen = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), []
    kept = _hook(kind, weight, seen)
    _GivesNone.apply(x, weight).sum().backward()
    assert kept is not None
    return bool(seen)


@pytest.mark.parametrize("kind", ["tensor", "post", "node"])
@pytest.mark.parametrize("told", [False, True], ids=["", "told"])
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_hooks_of_each_part_run_once_a_backward(fuse, told, kind):
    layer, (x, dy, wanted) = _layer(fuse=fuse, told=told), _operands()
    seen = [[] for _ in range(EXPERTS)]
    kept = [_hook(kind, weight, found) for weight, found in zip(_weights(layer), seen, strict=True)]
    for _ in range(2):
        _forward(layer, x).backward(dy)
    assert all(map(torch.equal, _into(layer, fuse=fuse), [2.0 * sums for sums in wanted]))
    has_gradient = not fuse or told
    calls = 2 if has_gradient or _runs_without_gradient(kind) else 0
    assert [len(found) for found in seen] == [calls] * EXPERTS
    for found, weight, sums in zip(seen, _weights(layer), wanted, strict=True):
        if not fuse:
            # Hooks behind the sum have seen the parameter's own gradient, to which the second backward has added.
            first = sums if kind == "tensor" else 2 * sums
            assert torch.equal(found[0], first.bfloat16())
        elif told:
            assert weight.grad_added_to_main_grad
            assert found[0].shape == weight.shape
        else:
            assert found == [None] * calls
    del kept


@pytest.mark.parametrize("expert", [1, EXPERTS - 1])
@pytest.mark.parametrize(
    "kind", ["tensor", "post", "node", "told", "fsdp", "no leaf", "in another graph"]
)
def test_a_part_that_is_observed_keeps_all_edges(kind, expert):
    layer, (x, dy, wanted) = _layer(fuse=True), _operands()
    weight, kept = _weights(layer)[expert], None
    assert _edges(_forward(layer, x)) == 1  # the input needs no gradient; one part makes the node
    if kind in ("tensor", "post", "node"):
        kept = _hook(kind, weight, [])
    elif kind == "told":
        weight.grad_added_to_main_grad = False
    elif kind == "fsdp":
        buffer = weight.main_grad
        weight.__fsdp_param__, weight.get_main_grad = True, lambda: buffer
    elif kind == "no leaf":
        source = weight.detach().clone().requires_grad_()
        buffer = weight.main_grad
        layer._parameters[f"weight{expert}"] = source * 1
        _weights(layer)[expert].main_grad = buffer
    else:
        kept = weight.sum()
    y = _forward(layer, x)
    assert _edges(y) == EXPERTS
    y.backward(dy)
    assert all(map(torch.equal, _into(layer, fuse=True), wanted))
    del kept


def test_parts_without_observers_have_one_edge_in_every_graph_in_flight():
    layer, (x, dy, wanted) = _layer(fuse=True), _operands()
    x.requires_grad_()
    results = [_forward(layer, x) for _ in range(3)]
    assert [_edges(y) for y in results] == [2] * 3
    for y in results:
        y.backward(dy)
    assert all(map(torch.equal, _into(layer, fuse=True), [3 * sums for sums in wanted]))
    assert all(weight.grad is None for weight in _weights(layer))


def test_hooks_that_are_gone_need_no_edges():
    layer, (x, dy, wanted) = _layer(fuse=True), _operands()
    handle = _weights(layer)[2].register_hook(lambda _: None)
    assert _edges(_forward(layer, x)) == EXPERTS
    handle.remove()
    node = _hook("node", _weights(layer)[1], [])
    assert _edges(_forward(layer, x)) == EXPERTS
    del node
    _forward(layer, x).backward(dy)
    assert all(map(torch.equal, _into(layer, fuse=True), wanted))


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("frozen", [[0], [1, 2], [0, 1, 3]], ids=str)
def test_frozen_parts_and_a_graph_that_is_retained(frozen, fuse):
    layer, (x, dy, wanted) = _layer(fuse=fuse), _operands()
    for expert in frozen:
        _weights(layer)[expert].requires_grad_(False)
    y = _forward(layer, x)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    for expert, found in enumerate(_into(layer, fuse=fuse)):
        if expert in frozen:
            assert found is None or not found.any()
        else:
            assert torch.equal(found, (2 * wanted[expert]).to(found.dtype))
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_gradients_that_are_asked_for(fuse):
    layer, (x, dy, wanted) = _layer(fuse=fuse), _operands()
    weights = _weights(layer)
    y = _forward(layer, x)
    found = torch.autograd.grad(y, weights, dy, allow_unused=True)
    if fuse:
        assert found == (None,) * EXPERTS
        assert all(map(torch.equal, _into(layer, fuse=True), wanted))
    else:
        assert all(map(torch.equal, found, [sums.bfloat16() for sums in wanted]))
    assert all(weight.grad is None for weight in weights)
    _forward(layer, x).backward(dy, inputs=weights)
    times = 2 if fuse else 1
    for into, sums in zip(_into(layer, fuse=fuse), wanted, strict=True):
        assert torch.equal(into, (times * sums).to(into.dtype))


def test_gradients_share_memory_and_no_element():
    layer, (x, dy, wanted) = _layer(fuse=False), _operands()
    _forward(layer, x).backward(dy)
    grads = [weight.grad for weight in _weights(layer)]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    assert all(grad.is_contiguous() and not grad._is_view() for grad in grads)
    grads[1].zero_()
    _forward(layer, x).backward(dy)
    for expert, (grad, sums) in enumerate(zip(grads, wanted, strict=True)):
        assert _weights(layer)[expert].grad is grad
        assert torch.equal(grad, ((1 if expert == 1 else 2) * sums).bfloat16())


def test_dummies_are_tensors_of_their_own_on_one_memory():
    layer, (x, dy, wanted) = _layer(fuse=True, told=True), _operands()
    _weights(layer)[2].zero_out_wgrad = True
    for _ in range(2):
        _forward(layer, x).backward(dy)
        dummies = [weight.grad for weight in _weights(layer)]
        assert len({id(dummy) for dummy in dummies}) == EXPERTS
        assert len({dummy.data_ptr() for dummy in dummies}) == 1  # taken over, not copied
        assert all(weight.grad_added_to_main_grad for weight in _weights(layer))
        assert not dummies[2].any()
        for weight in _weights(layer):
            weight.grad, weight.grad_added_to_main_grad = None, False
    assert all(map(torch.equal, _into(layer, fuse=True), [2 * sums for sums in wanted]))


def test_dummies_of_parts_of_several_sizes():
    split = {"q": SIZE, "k": 16, "v": 16}
    options = {"bias": False, "device": "cpu", "params_dtype": torch.bfloat16}
    layer = te.Linear(
        SIZE, 2 * SIZE, parameters_split=split, fuse_wgrad_accumulation=True, **options
    )
    parts = list(layer.parameters())
    for part in parts:
        part.main_grad, part.grad_added_to_main_grad = torch.zeros(part.shape), False
    x = torch.ones(ROWS, SIZE, dtype=torch.bfloat16)
    with te.autocast(recipe=Float8BlockScaling()):
        layer(x).sum().backward()
    assert all(part.grad.shape == part.shape for part in parts)
    assert all(part.grad_added_to_main_grad for part in parts)
    assert all(torch.equal(part.main_grad, torch.full(part.shape, 16.0)) for part in parts)


@pytest.mark.parametrize("case", ["apart", "aliased", "gap", "other type", "overwrite some"])
def test_main_grads_that_are_not_one_memory(case):
    layer, (x, dy, wanted) = _layer(fuse=True), _operands()
    weights = _weights(layer)
    start = [torch.full((SIZE, SIZE), 2.0)] * EXPERTS
    memory = torch.full((2 * EXPERTS, SIZE, SIZE), 2.0)
    for expert, weight in enumerate(weights):
        place = {"apart": EXPERTS - expert, "gap": 2 * expert}.get(case, expert)
        weight.main_grad = memory[place]
    wanted = [two + sums for two, sums in zip(start, wanted, strict=True)]
    if case == "aliased":
        weights[1].main_grad = weights[0].main_grad
        wanted[0] = wanted[1] = wanted[0] + wanted[1] - 2
    elif case == "other type":
        weights[3].main_grad = weights[3].main_grad.bfloat16()
        wanted[3] = wanted[3].bfloat16()
    elif case == "overwrite some":
        weights[2].overwrite_main_grad = True
        wanted[2] = wanted[2] - 2
    _forward(layer, x).backward(dy)
    assert all(map(torch.equal, _into(layer, fuse=True), wanted))


def test_one_operation_of_a_chain_accumulates_into_main_grad():
    torch.manual_seed(0)
    options = {"bias": False, "device": "cpu", "dtype": torch.bfloat16}
    fuses = [True, False]
    chain = ops.Sequential(
        *[
            ops.GroupedLinear(EXPERTS, SIZE, SIZE, accumulate_into_main_grad=fuse, **options)
            for fuse in fuses
        ]
    )
    first, second = (list(op.parameters()) for op in chain)
    for weight in first:
        weight.main_grad = torch.zeros(SIZE, SIZE)
    x, dy, _ = _operands()
    counts = torch.tensor(COUNTS)
    chain(x, counts, counts).backward(dy)
    hidden = [a @ w.float().T for a, w in zip(x.float().split(ROWS), first, strict=True)]
    for weight, part, grad in zip(second, hidden, dy.float().split(ROWS), strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(
            weight.grad.float(), grad.T @ part.bfloat16().float(), rtol=0.02, atol=0.05
        )
    assert all(weight.grad is None and weight.main_grad.any() for weight in first)


@pytest.fixture
def one_rank(tmp_path):
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_data_parallelism_of_torch_waits_for_no_part(one_rank):
    layer, (x, dy, wanted) = _layer(fuse=True), _operands()
    model = torch.nn.parallel.DistributedDataParallel(layer)
    for _ in range(3):  # it raises if a part of the step before is missing
        with te.autocast(recipe=Float8BlockScaling()):
            y = model(x, COUNTS)
        y.backward(dy)
    assert all(map(torch.equal, _into(layer, fuse=True), [3 * sums for sums in wanted]))


def _turned(layer):
    """Lay the weights in one buffer in reverse order, as Megatron-LM's buffers do."""
    weights = _weights(layer)
    buffer = torch.empty(len(weights), *weights[0].shape, dtype=weights[0].dtype)
    for weight, place in zip(weights, reversed(buffer.unbind()), strict=True):
        place.copy_(weight.data)
        weight.data = place
    return layer


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_a_copy_of_parts_is_gone_after_forward(recipe, monkeypatch):
    copies, join = [], torch.cat

    def seen(*arguments, **options):
        whole = join(*arguments, **options)
        copies.append(weakref.ref(whole))
        return whole

    plain, turned = (_layer(fuse=False) for _ in range(2))
    turned.load_state_dict(plain.state_dict())
    _turned(turned)
    found = []
    for layer in (plain, turned):
        x = _operands()[0].requires_grad_()
        monkeypatch.setattr(torch, "cat", seen)
        with te.autocast(recipe=recipe()):
            y = layer(x, COUNTS)
        monkeypatch.undo()
        assert [copy() for copy in copies] == ([] if layer is plain else [None])
        y.sum().backward()
        found.append([y, x.grad, *(weight.grad for weight in _weights(layer))])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_copies_of_parts_are_quantised_once_for_all_microbatches(recipe):
    layer = _turned(_layer(fuse=False))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    launches = []
    for _ in range(2):
        for first in (True, False, False):
            x = _operands()[0].requires_grad_()
            with dispatch.record() as recorder, te.autocast(recipe=recipe()):
                y = layer(x, COUNTS, is_first_microbatch=first)
            launches.append(len(list(recorder)))
            y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    first, later, *_ = launches
    assert later < first
    assert launches == [first, later, later] * 2
    # Who does not say when the weights change may have given a part other memory.
    x = _operands()[0].requires_grad_()
    with torch.no_grad():
        _weights(layer)[2].data = torch.zeros_like(_weights(layer)[2])
    with te.autocast(recipe=recipe()):
        y = layer(x, COUNTS)
    assert y[2 * ROWS : 3 * ROWS].eq(0).all()
