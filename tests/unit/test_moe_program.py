"""te_fast.pytorch.MoE as one program: the bits of its parts called one by one, and its launches."""

import copy
import pickle

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from recipes import RECIPES
from routed import ALL, EXPERTS, KINDS, TOPK, make, same_bits, step, tensors
from selection import sampled
from te_fast.experts import mixture as mixture_module
from te_fast.runtime import native

TOKENS = 150


def option(value):
    """The id of options in a case."""
    return next(iter(value)) if isinstance(value, dict) else None


def both(given, recipe, steps=1, **options):
    dtype = given[0].dtype
    results = []
    for as_program in (True, False):
        block = make("cpu", dtype, **options)
        runs = [step(block, given, recipe, as_program=as_program) for _ in range(steps)]
        states = [op.get_extra_state() for op in block.experts]
        results.append(([tensor for run in runs for tensor in run], states))
    return results


@pytest.mark.parametrize(
    ("name", "kind"),
    sampled(
        ALL,
        KINDS,
        quick=[("high", "nan"), ("delayed", "empty"), ("current", "zeros"), ("block", "few")],
    ),
)
def test_bits_of_the_parts(name, kind):
    given = tensors(TOKENS, "cpu", kind=kind)
    (mine, states), (theirs, other_states) = both(given, ALL[name](), steps=2)
    assert same_bits(mine, theirs)
    for state, other in zip(states, other_states, strict=True):
        assert (state is None) == (other is None)
        assert state is None or torch.equal(state, other)


@pytest.mark.parametrize("name", ALL)
def test_rows_without_a_probability_still_have_its_gradient(name):
    """The permutation leaves zeros where a probability is zero, as Transformer Engine's does; the biases remain."""
    given = tensors(TOKENS, "cpu", kind="zeros")
    (mine, _), (theirs, _) = both(given, ALL[name](), bias=True)
    assert same_bits(mine, theirs)
    assert mine[2][0].any()


@pytest.mark.parametrize(
    ("name", "options"),
    sampled(
        ALL,
        [
            {"bias": True},
            {"activation": "srelu", "single_grouped_weight": True},
            {"delay_wgrad_compute": True},
            {"activation_recompute_in_mlp": True},
            {"activation": "clamped_qgeglu"},
        ],
    ),
    ids=option,
)
def test_bits_with_options(name, options):
    if name == "delayed" and "activation_recompute_in_mlp" in options:
        return  # delayed scaling refuses this option
    given = tensors(37, "cpu", torch.float32 if name == "high" else torch.bfloat16)
    (mine, _), (theirs, _) = both(given, ALL[name](), **options)
    assert same_bits(mine, theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    sampled(
        RECIPES,
        [
            {"interleave": 32},
            {"interleave": 64},
            {"delay_wgrad_compute": True},
            {"activation_recompute_in_mlp": True},
            {"activation": "situglu"},
            {"bias": True},
        ],
        quick=[
            ("current", {"interleave": 32}),
            ("block", {"activation": "situglu"}),
        ],
    ),
    ids=option,
)
def test_bits_where_the_activation_quantises_in_both_directions(name, options):
    """Half of the first products' columns are whole blocks of 128."""
    if name == "delayed" and "activation_recompute_in_mlp" in options:
        return
    given = tensors(TOKENS, "cpu", kind="nan")
    (mine, states), (theirs, other_states) = both(given, ALL[name](), steps=2, ffn=256, **options)
    assert same_bits(mine, theirs)
    if name == "delayed":
        assert all(map(torch.equal, states[::2], other_states[::2]))


@pytest.mark.parametrize(
    ("dtype", "tokens"), sampled([torch.float16, torch.float32], [1, 2, 129]), ids=str
)
def test_bits_of_other_types_and_sizes(dtype, tokens):
    given = tensors(tokens, "cpu", dtype)
    for name in ("current", "block"):
        (mine, _), (theirs, _) = both(given, ALL[name]())
        assert same_bits(mine, theirs)


def launches(block, which):
    """Of the program without the router."""
    (plan,) = block._mixture.program.program.explain()
    return [text for text, _ in plan[which]]


@pytest.mark.parametrize(
    ("dtype", "ffn"), sampled([torch.bfloat16, torch.float16], [144, 256]), ids=str
)
def test_rows_are_gathered_and_activated_as_they_are_quantised(dtype, ffn):
    block = make("cpu", dtype, ffn)
    given = tensors(TOKENS, "cpu", dtype)
    cast_weight = ["weight cast, if it changed"]
    for name, weight in (("high", []), ("current", cast_weight), ("block", cast_weight)):
        block._mixture.forget()
        step(block, given, ALL[name](), as_program=True)
        moved = ["permute"] if name == "high" else ["numbers of the permuted rows"]
        casts = [] if name == "high" else ["gather + cast + transpose"]
        own = [] if name == "high" else ["cast + transpose"]
        act, act_back = ["activation", *own], ["activation backward", *own]
        if name == "block" and dtype == torch.bfloat16:
            act = ["activation + cast + transpose"]
            act_back = ["activation backward + cast + transpose"] if ffn == 256 else act_back
        assert launches(block, "forward") == [
            *[*moved, *casts, *weight, "grouped gemm"],
            *[*act, *weight, "grouped gemm", "unpermute"],
        ]
        back = ["unpermute backward"] if name == "high" else ["gather + cast + transpose"]
        assert launches(block, "backward") == [
            *[*back, "dgrad gemm", "wgrad gemm"],
            *[*act_back, "dgrad gemm", "wgrad gemm", "permute backward"],
        ]


def test_explains_itself():
    block = make("cpu", bias=True)
    assert "not compiled yet" in block.explain()
    x, *_ = tensors(16, "cpu")
    with te.autocast(recipe=ALL["block"]()):
        block(x)
    text = block.explain()
    assert (
        "gather + cast + transpose  [0: GroupedLinear]" in text
        or "gather + cast  [0: GroupedLinear]" in text
    )
    assert "grouped gemm + bias  [0: GroupedLinear]" in text
    assert "activation + cast  [1: ScaledSwiGLU]" in text or (
        "activation + cast + transpose  [1: ScaledSwiGLU]" in text
    )
    assert "gradients of the biases read it in high precision" in text
    assert "unpermute  [unpermute]" in text


def nodes_behind(tensor):
    """All autograd nodes that a backward from this tensor runs."""
    found, left = [], [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.append(node)
            left += [behind for behind, _ in node.next_functions]
    return found


def test_block_is_one_node():
    block = make("cpu")
    x, *_ = tensors(8, "cpu")
    y = block(x.view(2, 4, -1).requires_grad_())
    nodes = nodes_behind(y)
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    assert len(leaves) == 2 * EXPERTS + 2  # experts, router and tokens
    assert all(any(p is leaf for leaf in leaves) for p in block.parameters())
    assert [node for node in nodes if not hasattr(node, "variable")] == [y.grad_fn]


def test_balancing_loss_is_a_second_node():
    block = make("cpu", aux_loss_coeff=0.1)
    x, *_ = tensors(8, "cpu")
    y, loss = block(x.view(2, 4, -1))
    nodes = [node for node in nodes_behind(loss) if not hasattr(node, "variable")]
    assert nodes == [loss.grad_fn, y.grad_fn]


def test_each_direction_is_one_native_call(monkeypatch):
    block = make("cpu")
    calls = []
    kept = native.program_apply
    monkeypatch.setattr(
        native, "program_apply", lambda *given: calls.append(given[0]) or kept(*given)
    )
    x, grad, *_ = tensors(16, "cpu")
    block(x.requires_grad_()).backward(grad)
    assert calls == [block._mixture.routed.program]


def test_calls_that_somebody_looks_at_are_made_one_by_one():
    block = make("cpu")
    x, *_ = tensors(16, "cpu")
    wanted = block(x)
    seen = []
    block.experts.register_forward_hook(lambda *_: seen.append("experts"))
    torch.testing.assert_close(block(x), wanted)
    assert seen == ["experts"]
    other = make("cpu")
    other.experts[1].register_forward_hook(lambda *_: seen.append("activation"))
    torch.testing.assert_close(other(x), wanted)


def test_what_changes_is_another_program():
    block = make("cpu")
    x, *_ = tensors(16, "cpu")
    block(x)
    first = block._mixture.routed
    block(x)
    assert block._mixture.routed is first
    block.experts[1].activation_recompute_in_mlp = True
    block.experts[1] = te.ops.ScaledClampedQGeGLU()
    y = block(x)
    assert block._mixture.routed is not first
    assert torch.equal(y, make("cpu", activation="clamped_qgeglu")(x))
    half = block.to(torch.float32)
    assert half(x).dtype == torch.float32


def test_copies_make_programs_of_their_own():
    block = make("cpu")
    x, *_ = tensors(16, "cpu")
    y = block(x)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert other._mixture.routed is None
        assert torch.equal(other(x), y)
        with torch.no_grad():
            other.experts[2].weight0.zero_()
        assert torch.equal(block(x), y)


@pytest.mark.parametrize("name", ["high", "delayed", "current", "block"])
def test_under_torch_autocast(name, monkeypatch):
    results = []
    for as_program in (True, False):
        if not as_program:
            monkeypatch.setattr(mixture_module, "takes", lambda *_: False)
        block = make("cpu", torch.float32)
        x, grad, *_ = tensors(24, "cpu", torch.float32)
        x.requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16),
            te.autocast(enabled=name != "high", recipe=ALL[name]()),
        ):
            y = block(x)
        assert y.dtype == torch.bfloat16
        y.backward(grad.bfloat16())
        results.append([y.detach(), x.grad, *[p.grad for p in block.parameters()]])
    # Parts that are called one by one cast the gradients of a token's rows before they sum them.
    (_, mine, *_), (_, theirs, *_) = results
    torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-8 * theirs.abs().max().item())
    assert same_bits(*[[y, *grads] for y, _, *grads in results])


@pytest.mark.parametrize(
    ("name", "use_reentrant"), sampled(["high", "delayed", "block"], [False, True])
)
def test_recomputed_block(name, use_reentrant):
    x, grad, *_ = tensors(24, "cpu")
    results = []
    for again in (False, True):
        block = make("cpu")
        own = x.clone().requires_grad_()
        with te.autocast(enabled=name != "high", recipe=ALL[name]()):
            y = te.checkpoint(block, own, use_reentrant=use_reentrant) if again else block(own)
        y.backward(grad)
        results.append([y.detach(), own.grad, *[p.grad for p in block.parameters()]])
    assert same_bits(*results)


def test_main_grads_and_microbatches():
    results = []
    given = tensors(40, "cpu")
    for as_program in (True, False):
        block = make("cpu", accumulate_into_main_grad=True, single_grouped_weight=True)
        for parameter in block.experts.parameters():
            parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
        for is_first in (True, False):
            run = step(block, given, ALL["block"](), as_program=as_program, is_first=is_first)
        grads = [parameter.main_grad for parameter in block.experts.parameters()]
        results.append([*run[:3], *grads])
    assert same_bits(*results)


def test_bad_masks():
    block = make("cpu")
    x, _, mask, probs = tensors(16, "cpu")
    program = block._mixture.program_of(block.experts, block.topk)
    for bad_mask, bad_probs, error, match in (
        (mask[:8], probs, te_fast.ShapeError, "16 rows of 6"),
        (mask.float(), probs, te_fast.DtypeError, "routing map"),
        (mask, probs.double(), te_fast.DtypeError, "probabilities"),
        (mask, probs[:, :3], te_fast.ShapeError, "16 rows of 6"),
    ):
        with pytest.raises(error, match=match):
            program(x, (bad_mask, bad_probs), None)


def test_programs_refuse_what_is_no_way_there_and_back():
    def chain(*names):
        program = native.Program("p")
        for name in names:
            if name == "permute":
                program.permute("permute", EXPERTS, TOPK)
            elif name == "unpermute":
                program.unpermute("unpermute")
            elif name == "add":
                program.add_extra_input("add", False)
            else:
                program.activation("act", "swiglu", scaled=name == "scaled")
        return program

    x, _, mask, probs = tensors(16, "cpu")
    for names, extras, match in (
        (["permute", "scaled"], (mask, probs), "without its way back"),
        (["unpermute"], (), "no permutation"),
        (["permute", "plain", "unpermute"], (mask, probs), "one activation"),
        (["permute", "scaled", "scaled", "unpermute"], (mask, probs), "one activation"),
        (["permute", "add", "scaled", "unpermute"], (mask, probs, x), "tensors of the caller"),
    ):
        with pytest.raises(te_fast.UnsupportedError, match=match):
            native.program_apply(chain(*names), object(), x, extras, None, (), None)


def test_another_number_of_experts_for_a_token_is_another_program():
    """`topk` is an attribute that users may set between calls."""
    block, x = make("cpu", torch.float32), torch.randn(24, 272)
    block(x)
    block.topk = 3
    changed = block(x)
    other = make("cpu", torch.float32)
    other.topk = 3
    assert torch.equal(changed, other(x))
    block.topk = 2
    assert not torch.equal(block(x), changed)
