"""The router of te_fast.pytorch.MoE inside of the block's program, against FP64 and against the program's parts."""

import copy
import gc
import weakref

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from routed import same_bits
from routed_blocks import (
    ALL,
    EXPERTS,
    FFN,
    HIDDEN,
    TOPK,
    WAYS,
    logits_and_gradients,
    loss_and_gradients,
    make,
    parts,
    reference,
    tensors,
)
from selection import sampled
from te_fast.runtime import native
from te_fast.runtime.compiling import is_unseen

#: Largest differences over the norm of a tensor, by the type of the experts; gradients of experts are sums of few rows.
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def near(got, wanted, dtype):
    difference = (got.double() - wanted).norm().item()
    assert difference <= NEAR[dtype] * wanted.norm().item() + 1e-12


def check(block, x, grad):
    """Compare a step with the reference; the program with the router must have run."""
    wanted, wanted_loss, counts, leaves = reference(block, x)
    if block.aux_loss_coeff:
        (wanted_loss + (wanted * grad.double()).sum()).backward()
    else:
        wanted.backward(grad.double())
    y, loss, grads = loss_and_gradients(block, x, grad)
    assert block._mixture.routed is not None
    assert block._mixture.program is None
    near(y, wanted.detach(), x.dtype)
    if block.aux_loss_coeff:
        torch.testing.assert_close(loss.double(), wanted_loss.detach(), rtol=1e-5, atol=0)
    for name, found in grads.items():
        if found is None:
            continue
        theirs = leaves[name].grad
        near(found, torch.zeros_like(found.double()) if theirs is None else theirs, x.dtype)
    return counts


@pytest.mark.parametrize(("way", "dtype", "coeff"), sampled(WAYS, NEAR, [0.0, 0.3]), ids=str)
def test_block_is_the_references(way, dtype, coeff):
    block = make(dtype=dtype, aux_loss_coeff=coeff, **WAYS[way])
    counts = check(block, *tensors(dtype=dtype))
    if block.expert_bias is not None:
        assert torch.equal(block.tokens_per_expert, counts)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    sampled([(16, 16, 1, 1), (48, 32, 33, 3), (16, 32, 200, 8)], [(1,), (7,), (2, 3, 5)]),
    ids=str,
)
def test_sizes(sizes, shape):
    check(make(sizes=sizes, aux_loss_coeff=0.1), *tensors(shape, hidden=sizes[0]))


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    sampled(ALL, ["softmax", "biased groups"], [torch.bfloat16, torch.float32]),
    ids=str,
)
def test_bits_of_the_parts(name, way, dtype):
    """Result and experts have the bits of a program that gets the router's mask; the router's sums are near FP64."""
    block = make(dtype=dtype, aux_loss_coeff=0.1, **WAYS[way])
    other = copy.deepcopy(block)
    x, grad = tensors(dtype=dtype)
    for _ in range(2):
        y, logits, grads, grad_logits = logits_and_gradients(block, x, grad, ALL[name]())
        other._router = block._router
        wanted, theirs = parts(other, logits, x, grad, grad_logits, ALL[name]())
        experts = [key for key in grads if key.startswith("experts")]
        assert same_bits(
            [y, *[grads[key] for key in experts]], [wanted, *[theirs[key] for key in experts]]
        )
        near(logits, x.detach().double() @ block.router.detach().double().t(), torch.float32)
        near(grads["router"], theirs["router"], torch.float32)
        # Rounded once to the tokens' type.
        torch.testing.assert_close(
            grads["x"].double(),
            theirs["x"],
            rtol=1.01 * 2**-8 if dtype == torch.bfloat16 else 1e-5,
            atol=1e-5,
        )
    for mine, their in zip(block.experts, other.experts, strict=True):
        state, other_state = mine.get_extra_state(), their.get_extra_state()
        assert (state is None) == (other_state is None)
        assert state is None or torch.equal(state, other_state)


@pytest.mark.parametrize(
    ("name", "frozen"),
    sampled(
        ["high", "delayed", "block"],
        ["router", "experts", "input", "input and router", "but router", "all"],
    ),
)
def test_what_wants_no_gradient_gets_none(name, frozen):
    recipe = ALL[name]()
    x, grad = tensors(dtype=torch.bfloat16)
    *_, whole = loss_and_gradients(make(dtype=torch.bfloat16), x, grad, recipe)
    block = make(dtype=torch.bfloat16)
    block.router.requires_grad_(frozen not in ("router", "input and router", "all"))
    block.experts.requires_grad_(frozen not in ("experts", "but router", "all"))
    x.requires_grad_(frozen not in ("input", "input and router", "but router", "all"))
    if frozen == "all":
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            assert not block(x).requires_grad
        return
    *_, grads = loss_and_gradients(block, x, grad, recipe)
    leaves = dict(block.named_parameters()) | {"x": x}
    for key, found in grads.items():
        assert (found is not None) == leaves[key].requires_grad
        assert found is None or torch.equal(found, whole[key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_router_of_another_type(dtype):
    """After ``.half()`` or ``.bfloat16()`` of the module; the router still computes in FP32."""
    block = make(**WAYS["biased"]).to(dtype)
    assert (block.router.dtype, block.expert_bias.dtype) == (dtype, torch.float32)
    check(block, *tensors(dtype=dtype))
    assert block.router.grad.dtype == dtype


def test_router_in_fp64_is_torchs():
    """A type that the program does not take."""
    block = make()
    block.router = torch.nn.Parameter(block.router.detach().double())
    x, grad = tensors()
    y, _, grads = loss_and_gradients(block, x, grad)
    assert block._mixture.routed is None
    other, _, theirs = loss_and_gradients(make(), x, grad)
    torch.testing.assert_close(y, other)
    torch.testing.assert_close(grads["router"].float(), theirs["router"])


@pytest.mark.parametrize("name", ["high", "delayed", "current", "block"])
def test_without_gradients(name):
    block = make(dtype=torch.bfloat16, aux_loss_coeff=0.1, **WAYS["biased"])
    x, _ = tensors(dtype=torch.bfloat16)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), te.autocast(enabled=name != "high", recipe=ALL[name]()):
            y, loss = block(x.detach())
        assert not y.requires_grad
        assert not loss.requires_grad
    assert block.tokens_per_expert.sum() == 2 * 39 * TOPK
    block.eval()
    with torch.no_grad():
        block(x)
    assert block.tokens_per_expert.sum() == 2 * 39 * TOPK


def test_tokens_without_gradients_train_the_router():
    x, grad = tensors()
    check(make(aux_loss_coeff=0.1), x.detach(), grad)


def test_one_expert_for_all_tokens():
    block = make(score_function="sigmoid", expert_bias=True)
    with torch.no_grad():
        block.expert_bias.zero_()[5] = 100.0
        block.expert_bias[1] = 50.0
    check(block, *tensors((40,)))
    assert block.tokens_per_expert.tolist() == [0, 40, 0, 0, 0, 40, 0, 0]
    assert not block.experts[0].weight3.grad.any()


@pytest.mark.parametrize("name", ["high", "block"])
@pytest.mark.parametrize("way", ["softmax", "biased"])
def test_tokens_with_nan_stay_alone(way, name):
    recipe = ALL[name]()
    block = make(dtype=torch.bfloat16, aux_loss_coeff=0.1, **WAYS[way])
    x, grad = tensors((20,), torch.bfloat16)
    wanted, _, whole = loss_and_gradients(block, x, torch.zeros_like(grad), recipe)
    assert not any(whole[key].any() for key in whole if key.startswith("experts"))
    with torch.no_grad():
        x[7] = torch.nan
    y, loss, grads = loss_and_gradients(block, x, grad, recipe)
    assert y[7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(y[others], wanted[others])
    assert loss.isnan()
    assert grads["x"].shape == x.shape


@pytest.mark.parametrize("name", ["high", "current", "block"])
def test_strided_tokens(name):
    x, grad = tensors((6, 8), torch.bfloat16)
    x = x.detach().transpose(0, 1).requires_grad_()
    plain = x.detach().contiguous().requires_grad_()
    block = make(dtype=torch.bfloat16, aux_loss_coeff=0.1)
    mine, theirs = (
        loss_and_gradients(block, some, grad.transpose(0, 1), ALL[name]()) for some in (x, plain)
    )
    assert torch.equal(mine[0], theirs[0])
    assert all(torch.equal(mine[2][key], theirs[2][key]) for key in mine[2])


@pytest.mark.parametrize("name", ["current", "block"])
def test_microbatches_and_main_grads(name):
    """The router's gradient goes to ``grad``, whatever the experts' do; FP8 weights serve both microbatches."""
    block = make(dtype=torch.bfloat16, accumulate_into_main_grad=True, single_grouped_weight=True)
    for parameter in block.experts.parameters():
        parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
    x, grad = tensors(dtype=torch.bfloat16)
    first = None
    for is_first in (True, False):
        with te.autocast(recipe=ALL[name]()):
            y = block(x, is_first_microbatch=is_first)
        y.backward(grad)
        if first is None:
            first = (
                block.router.grad.clone(),
                [p.main_grad.clone() for p in block.experts.parameters()],
            )
    router, experts = first
    torch.testing.assert_close(block.router.grad, 2 * router, rtol=1e-2, atol=1e-3)
    for parameter, once in zip(block.experts.parameters(), experts, strict=True):
        torch.testing.assert_close(parameter.main_grad, 2 * once, rtol=2e-2, atol=1e-2)


def test_weight_gradients_later():
    x, grad = tensors()
    *_, wanted = loss_and_gradients(make(), x, grad)
    block = make(delay_wgrad_compute=True)
    *_, grads = loss_and_gradients(block, x, grad)
    assert torch.equal(grads["router"], wanted["router"])
    assert grads["experts.0.weight0"] is None
    block.backward_dw()
    assert torch.equal(block.experts[0].weight0.grad, wanted["experts.0.weight0"])


def test_hooks_of_the_parameter_run():
    block, seen = make(), []
    block.router.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    x, grad = tensors()
    loss_and_gradients(block, x, grad)
    assert seen == [(EXPERTS, HIDDEN)]


def test_options_that_change_between_calls():
    block = make(**WAYS["sigmoid"])
    x, _ = tensors()
    block(x)
    former = block._mixture.routed
    for name, value in (("scaling_factor", 2.0), ("aux_loss_coeff", 0.1), ("topk", 3)):
        setattr(block, name, value)
        made = block(x)
        assert block._mixture.routed is not former
        former = block._mixture.routed
        assert isinstance(made, tuple) == (block.aux_loss_coeff != 0)
    other = make(
        sizes=(HIDDEN, FFN, EXPERTS, 3), scaling_factor=2.0, aux_loss_coeff=0.1, **WAYS["sigmoid"]
    )
    assert all(map(torch.equal, made, other(x)))


def test_updates_of_the_bias_reach_the_next_call():
    block = make(score_function="sigmoid", expert_bias=True)
    x, grad = tensors()
    for _ in range(3):
        counts = block.tokens_per_expert + check(block, x, grad)
        assert counts.sum() == 39 * TOPK * 2
        block.tokens_per_expert.div_(2, rounding_mode="floor")
        block.update_expert_bias(0.3)
        assert not block.tokens_per_expert.any()


def test_state_is_as_it_was():
    block = make(aux_loss_coeff=0.1, **WAYS["biased"])
    x, grad = tensors()
    before = {key: value.clone() for key, value in block.state_dict().items() if value is not None}
    loss_and_gradients(block, x, grad)
    after = {key: value for key, value in block.state_dict().items() if value is not None}
    assert list(after) == list(before)
    assert {"router", "expert_bias"} <= set(after)
    assert "tokens_per_expert" not in after
    assert all(torch.equal(after[key], before[key]) for key in ("router", "expert_bias"))


def launches(block, which):
    (plan,) = block._mixture.routed.program.explain()
    return [text for text, _ in plan[which]]


@pytest.mark.parametrize("coeff", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches(dtype, coeff):
    block = make(dtype=dtype, aux_loss_coeff=coeff)
    loss_and_gradients(block, *tensors(dtype=dtype))
    converted = dtype == torch.bfloat16
    forward, backward = launches(block, "forward"), launches(block, "backward")
    own = ["gemm", "router", "permute"]
    assert forward[: forward.index("permute") + 1] == ["convert tokens", *own] if converted else own
    assert backward[backward.index("permute backward") :] == [
        "permute backward",
        "router backward",
        *(["add"] if coeff else []),
        "wgrad gemm",
        *(["dgrad gemm", "add"] if converted else ["dgrad gemm + add"]),
    ]


def test_explains_itself():
    block = make(dtype=torch.bfloat16, aux_loss_coeff=0.1, **WAYS["biased"])
    loss_and_gradients(block, *tensors(dtype=torch.bfloat16))
    text = block.explain()
    for line in (
        "convert tokens  [router]",
        "router  [router]",
        "permute  [permute]",
        "add  [router]",
    ):
        assert line in text


@pytest.mark.slow
def test_nothing_is_kept_after_a_step():
    block = make(dtype=torch.bfloat16, aux_loss_coeff=0.1, **WAYS["biased"])
    x, grad = tensors(dtype=torch.bfloat16)

    def step():
        loss_and_gradients(block, x, grad, ALL["block"]())
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    step()
    counts = [step() for _ in range(3)]
    assert counts[-1] <= counts[0]
    program = block._mixture.routed.program
    assert program.plan_count() == 1
    gone = weakref.ref(program)
    block._mixture.forget()
    del program
    gc.collect()
    assert gone() is None


def test_no_second_gradient():
    x, grad = tensors()
    (dx,) = torch.autograd.grad(make()(x), x, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


def test_a_changed_router_refuses_its_backward():
    """FP32 weights are read again in backward."""
    block = make()
    x, grad = tensors()
    y = block(x)
    with torch.no_grad():
        block.router.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.backward(grad)


class _Own(torch.nn.Parameter):
    pass


def _unlike(kind):
    """A block and tokens that the program with the router does not take."""
    if kind == "autocast":
        return make(), tensors(), torch.autocast("cpu", torch.bfloat16)
    block, given = make(dtype=torch.bfloat16 if kind == "type" else torch.float32), tensors()
    if kind == "hook":
        block.experts.register_forward_hook(lambda *_: None)
    if kind == "subclass":
        block.router = _Own(block.router.detach())
    return block, given, torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("kind", ["autocast", "type", "hook", "subclass"])
def test_other_calls_route_before_the_program(kind):
    block, (x, grad), context = _unlike(kind)
    wanted, _, _, leaves = reference(block, x)
    wanted.backward(grad.double())
    with context:
        y = block(x)
    y.backward(grad.to(y.dtype))
    if block._mixture.routed is not None:
        assert block._mixture.routed.program.plan_count() == 0
    dtype = torch.float32 if y.dtype == torch.float32 else torch.bfloat16
    near(y, wanted.detach(), dtype)
    # The router reads tokens of FP32 also where the experts compute in BF16.
    near(block.router.grad, leaves["router"].grad, dtype)
    near(x.grad, leaves["x"].grad, dtype)


def test_torch_func_is_refused_by_name():
    block, (x, _) = make(), tensors()
    with pytest.raises(te_fast.UnsupportedError, match=r"MoE: torch\.func"):
        torch.func.vmap(block)(x)


def test_those_who_look_see_torchs_operators():
    class Own(torch.Tensor):
        pass

    x = torch.ones(2)
    assert is_unseen(x, torch.nn.Parameter(x))
    assert not is_unseen(x, x.as_subclass(Own))
    assert not torch.func.vmap(lambda row: torch.tensor(is_unseen(row)))(torch.ones(3, 2)).any()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert not is_unseen(x)


def chain(*ops, experts=EXPERTS, topk=TOPK, biased=False, choice=None):
    program = native.Program("Own")
    weights = {"router": torch.ones(EXPERTS, HIDDEN)}
    for op in ops:
        if op == "router":
            how = choice or (TOPK, 0, 0, "sigmoid", "chosen", 1.0)
            program.router(
                "gate", weights, "router", EXPERTS, HIDDEN, how, biased=biased, logits=False
            )
        elif op in ("permute", "routed"):
            program.permute("move", experts, topk, routed=op == "routed")
        elif op == "unpermute":
            program.unpermute("back")
        else:
            program.activation("act", "srelu", scaled=op == "scaled")
    return program


def call(program, x, extras=()):
    return native.program_apply(program, object(), x, extras, None, None, None)


WHOLE = ("router", "routed", "scaled", "unpermute")


def test_programs_refuse_a_router_without_its_permutation():
    x, _ = tensors()
    for ops, options in (
        (("router", "plain"), {}),
        (("router",), {}),
        (("routed", "scaled", "unpermute"), {}),
        (("router", "plain", "routed", "scaled", "unpermute"), {}),
        (WHOLE, {"experts": 4}),
        (WHOLE, {"topk": 3}),
        (("router", "permute", "scaled", "unpermute"), {}),
    ):
        program = chain(*ops, **options)
        extras = (torch.ones(3, 13, dtype=torch.bool),) * program.num_extra_inputs
        with pytest.raises(te_fast.TeFastError, match="Own"):
            call(program, x.detach(), extras)
    with pytest.raises(
        te_fast.UnsupportedError, match="gate: .*before the permutation of its experts"
    ):
        call(chain("router", "plain"), x)


def test_programs_name_what_does_not_fit():
    x, _ = tensors()
    x = x.detach()
    bias, counts = torch.zeros(EXPERTS), torch.zeros(EXPERTS, dtype=torch.int64)
    program = chain(*WHOLE, biased=True)
    y = call(program, x, (bias, counts))
    assert counts.sum() == 39 * TOPK
    assert y.shape == x.shape
    for extras, error, match in (
        ((bias[:4].clone(), counts), te_fast.ShapeError, "Own: .*8 experts of op gate"),
        ((bias, counts[:4].clone()), te_fast.ShapeError, "Own: .*8 experts of op gate"),
        ((bias.double(), counts), te_fast.DtypeError, "bias of the experts"),
        ((bias, counts.int()), te_fast.DtypeError, "counts of the experts"),
        ((bias,), ValueError, "expected 2 extra inputs, got 1"),
    ):
        with pytest.raises(error, match=match):
            call(program, x, extras)
    with pytest.raises(te_fast.ShapeError, match="gate"):
        call(program, x[..., :16].contiguous(), (bias, counts))
    with pytest.raises(te_fast.ShapeError, match="groups that divide"):
        call(chain(*WHOLE, choice=(TOPK, 3, 1, "sigmoid", "chosen", 1.0)), x)
    with pytest.raises(ValueError, match="no scores are called"):
        chain("router", choice=(TOPK, 0, 0, "tanh", "chosen", 1.0))


def test_blocks_name_what_does_not_fit():
    block = make()
    with pytest.raises(te_fast.ShapeError, match="MoE: .*hidden_size = 32"):
        block(torch.ones(3, 16))
    block.router = torch.nn.Parameter(torch.ones(EXPERTS, 16))
    with pytest.raises(te_fast.ShapeError, match="MoE: .*op router"):
        block(torch.ones(3, HIDDEN))
