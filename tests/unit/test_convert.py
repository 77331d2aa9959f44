"""convert: results, gradients and states are those of the model; unknown modules stay, and are reported."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import te_fast
import te_fast.pytorch as te
from llama_like import (
    MLP,
    DynamicCache,
    Experts,
    Layer,
    MixtureOfExperts,
    Model,
    StaticCache,
    loss_of,
)
from recipes import RECIPES
from selection import quickly, sampled
from te_fast.common.recipe import DelayedScaling
from te_fast.convert.experts import ExpertsForward
from te_fast.convert.forwards import DecoderForward
from te_fast.errors import DtypeError, ShapeError, StateError, TeFastError
from te_fast.runtime.compiling import CAN_COMPILE

TOKENS = torch.randint(1, 96, (2, 16), generator=torch.Generator().manual_seed(3))


def relative(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-6)).item()


def step(model, recipe=None, **options):
    model.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        loss = loss_of(model, TOKENS, **options)
    loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def compare(model, other, bound=1e-4, **options):
    loss, grads = step(model, **options)
    wanted, known = step(other, **options)
    assert abs(loss - wanted) <= bound * abs(wanted)
    assert grads.keys() == known.keys()
    for name, grad in grads.items():
        assert relative(grad, known[name]) < bound or known[name].norm() < 1e-5, name


MODELS = {
    "llama": {},
    "qwen2": {"bias": True},
    "qwen3": {"head_norms": True},
    "gemma": {
        "centred": True,
        "mlp": lambda: MLP(64, 96, nn.GELU(approximate="tanh")),
    },
    "mlp with biases": {"mlp": lambda: MLP(64, 96, bias=True)},
    "tuples": {"as_tuple": True},
    "eager": {"how": "eager"},
}


@pytest.mark.parametrize("name", MODELS)
def test_decoders_compute_what_they_did(name):
    model, other = Model(**MODELS[name]), Model(**MODELS[name])
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    report = te_fast.convert(model)
    assert list(report.converted.values()).count("decoder layer") == 2
    assert report.left == {"lm_head": "lm_head is excluded"}
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[n] for n, parameter in model.named_parameters())
    ways = model.layers[0].ways
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()
    mask[0, :, :, :5] = False
    mask[0, 0].fill_diagonal_(True)
    added = torch.zeros(2, 1, 16, 16).masked_fill(~mask, -1e9)
    for options in ({"attention_mask": mask}, {"attention_mask": added}):
        compare(model, other, **options)
    if name != "eager":
        compare(model, other)
    assert model.layers[0].ways == ways


def test_fp8(recipe):
    model, other = Model(), Model()
    te_fast.convert(model)
    for _ in range(2):
        loss, grads = step(model, recipe)
        wanted, known = step(other)
        assert abs(loss - wanted) < 2e-2
        assert all(relative(grad, known[name]) < 0.3 for name, grad in grads.items())
        assert any(relative(grad, known[name]) > 1e-4 for name, grad in grads.items())
    assert list(model.state_dict()) == list(other.state_dict())


@pytest.mark.parametrize("recipe", quickly(RECIPES, "block", slow=RECIPES), indirect=True)
def test_training_follows_the_model(recipe):
    model = Model()
    te_fast.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with te.autocast(recipe=recipe):
            loss = loss_of(model, TOKENS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    # Training has changed the model's own parameters.
    other = Model()
    other.load_state_dict(model.state_dict())
    with te.autocast(recipe=recipe):
        assert abs(loss_of(model, TOKENS).item() - loss_of(other, TOKENS).item()) < 5e-2


def mixtral(**options):
    return Model(mlp=lambda: MixtureOfExperts(**options))


def test_mixtures_compute_what_they_did():
    model, other = mixtral(), mixtral()
    report = te_fast.convert(model)
    assert report.converted["layers.0.mlp.experts"] == "experts"
    assert report.converted["layers.0"] == "attention of a decoder layer"
    assert list(report.left) == ["lm_head"]
    ways = model.layers[0].mlp.experts.ways
    compare(model, other)
    assert model.layers[0].mlp.experts.ways == ways
    assert list(model.state_dict()) == list(other.state_dict())
    # The experts also take calls without tokens, and calls that te_fast's program does not cover.
    experts, own = model.layers[0].mlp.experts, other.layers[0].mlp.experts
    numbers = torch.zeros(0, 2, dtype=torch.long)
    assert experts(torch.zeros(0, 64), numbers, torch.zeros(0, 2)).shape == (0, 64)
    x, scores = torch.randn(16, 64), torch.rand(16, 4)
    for topk in (1, 3):  # another number of experts per token
        weights, numbers = scores.topk(topk, -1)
        assert relative(experts(x, numbers, weights), own(x, numbers, weights)) < 1e-5
    assert torch.equal(experts(x, numbers=numbers, weights=weights), own(x, numbers, weights))
    assert te_fast.convert.undo(model) == len(report.converted)
    assert step(model)[0] == step(other)[0]


@pytest.mark.parametrize("recipe", quickly(RECIPES, "block", slow=RECIPES), indirect=True)
def test_mixtures_in_fp8(recipe):
    model, other = mixtral().bfloat16(), mixtral().bfloat16()
    te_fast.convert(model)
    loss, grads = step(model, recipe)
    wanted, known = step(other)
    assert abs(loss - wanted) < 3e-2 * wanted
    for name in ("gate_up_proj", "down_proj"):
        name = f"layers.1.mlp.experts.{name}"
        assert 1e-4 < relative(grads[name], known[name]) < 0.3
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert step(copied, recipe)[0] == step(model, recipe)[0]
    scales = te_fast.convert.scaling_state(model)
    te_fast.convert.load_scaling_state(copied, scales)


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
def test_mixtures_compile():
    model, other = mixtral(), mixtral()
    te_fast.convert(model)
    x = torch.randn(16, 64)
    weights, numbers = torch.rand(16, 4).topk(2, -1)
    compiled = torch.compile(model.layers[0].mlp.experts, fullgraph=True, backend="aot_eager")
    wanted = other.layers[0].mlp.experts(x, numbers, weights)
    assert relative(compiled(x, numbers, weights), wanted) < 1e-5
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda experts: setattr(experts, "act_fn", nn.GELU()), "act_fn is no activation"),
        (lambda experts: setattr(experts, "act_fn", nn.Sigmoid()), "glu as activation"),
        (lambda experts: experts.register_parameter("bias", nn.Parameter(torch.ones(3))), "bias"),
        (
            lambda experts: setattr(
                experts, "gate_up_proj", nn.Parameter(experts.gate_up_proj.detach().mT.clone())
            ),
            "no stacks for torch.nn.functional.linear",
        ),
        (lambda experts: experts.register_forward_hook(lambda *_: None), "has hooks"),
    ],
)
def test_experts_of_another_kind_are_left(change, why):
    model = mixtral()
    change(model.layers[1].mlp.experts)
    report = te_fast.convert(model)
    assert why in report.left["layers.1.mlp.experts"]
    assert "layers.0.mlp.experts" in report.converted


def test_experts_that_only_look_like_them_are_left(monkeypatch):
    model = mixtral()
    own = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda *given: 1.5 * own(*given))
    report = te_fast.convert(model)
    assert "computes something else" in report.left["layers.0.mlp.experts"]


@pytest.mark.parametrize(("recipe", "in_fp8"), sampled(RECIPES, [True, False]), indirect=["recipe"])
def test_what_follows_attention_computes_what_its_layers_do(recipe, in_fp8, monkeypatch):
    """Gradients of residual sums differ by one rounding, because the norm's backward adds before it rounds."""
    model = Model().bfloat16()
    te_fast.convert(model)
    other, recipe = copy.deepcopy(model), recipe if in_fp8 else None
    tails, tail_for = [], DecoderForward._tail_for

    def noted(*given):
        tails.append(tail_for(*given))
        return tails[-1]

    monkeypatch.setattr(DecoderForward, "_tail_for", noted)
    loss, grads = step(model, recipe)
    assert tails
    assert None not in tails
    monkeypatch.setattr(DecoderForward, "_tail_for", lambda *_: None)
    wanted, known = step(other, recipe)
    assert loss == wanted
    distances = [relative(grad, known[name]) for name, grad in grads.items()]
    # A value that E5M2 rounds the other way differs by an eighth of itself.
    assert max(distances) < (0.1 if in_fp8 else 2e-2), distances


def test_a_block_that_only_looks_like_one_is_left():
    model, other = Model(multiplier=0.5), Model(multiplier=0.5)
    report = te_fast.convert(model)
    assert "layers.0" not in report.converted
    assert report.left["layers.0"] == "layers.0 computes something else than Llama's layer"
    assert report.converted["layers.0.mlp.up_proj"] == "linear layer"
    assert "left layers.0 and 1 more: it computes something else" in str(report)
    compare(model, other)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_by_a_function_is_seen(training):
    model = Model(mlp=lambda: MLP(64, 96, dropout=0.1)).train(training)
    state = torch.random.get_rng_state()
    report = te_fast.convert(model)
    assert "layers.0 draws random numbers in training" in report.left["layers.0"]
    assert report.converted["layers.0.mlp.up_proj"] == "linear layer"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training == training for module in model.modules())


def test_norms_of_all_heads_at_once_are_left():
    model, other = Model(whole_norms=True), Model(whole_norms=True)
    report = te_fast.convert(model)
    assert (
        report.left["layers.0"] == "layers.0.self_attn has norms of 64 channels, its heads have 16"
    )
    assert report.converted["layers.0.mlp.gate_proj"] == "linear layer"
    compare(model, other)


def test_what_te_fast_cannot_compute_is_left(monkeypatch):
    def refuse(*_, **__):
        message = "no"
        raise ShapeError(message)

    monkeypatch.setattr(DecoderForward, "run", refuse)
    monkeypatch.setattr(ExpertsForward, "run", refuse)
    report = te_fast.convert(mixtral())
    for name in ("layers.0", "layers.0.mlp.experts"):
        assert report.left[name] == f"te_fast cannot compute {name}: ShapeError: no"


def test_other_feed_forward_blocks_stay():
    def routed():
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))

    model, other = Model(mlp=routed), Model(mlp=routed)
    report = te_fast.convert(model)
    assert report.converted["layers.1"] == "attention of a decoder layer"
    assert report.left["layers.1.mlp"].startswith("layers.1.mlp has no down_proj")
    compare(model, other)


@pytest.mark.parametrize("options", [{}, {"head_norms": True}, {"how": "eager"}], ids=str)
@pytest.mark.parametrize("grads", [True, False])
def test_an_empty_cache_takes_keys_and_values(options, grads):
    """Transformers makes such a cache in every call, also in training, unless use_cache=False."""
    model, other = Model(**options), Model(**options)
    te_fast.convert(model)
    ways, mask = model.layers[0].ways, None
    if "how" in options:
        mask = torch.full((1, 1, 16, 16), torch.finfo(torch.float32).min).triu(1)
    caches = DynamicCache(), DynamicCache()
    with torch.set_grad_enabled(grads):
        pairs = zip((model, other), caches, strict=True)
        y, wanted = (m(TOKENS, attention_mask=mask, past_key_values=cache) for m, cache in pairs)
    assert model.layers[0].ways == ways
    assert relative(y, wanted) < 1e-5
    assert caches[0].layers.keys() == {0, 1}
    for mine, theirs in zip(caches[0].layers.values(), caches[1].layers.values(), strict=True):
        for part, known in zip(mine, theirs, strict=True):
            assert part.shape == known.shape
            assert relative(part, known) < 1e-5
    if grads:
        grads = [
            torch.autograd.grad(out.square().sum(), m.lm_head.weight)
            for out, m in ((y, model), (wanted, other))
        ]
        assert relative(grads[0][0], grads[1][0]) < 1e-4
    # The cache is not empty in the next call, which therefore runs the layers' own forward.
    more = torch.zeros(1, 1, 16, 32)
    model(TOKENS, attention_mask=more, past_key_values=caches[0])
    assert model.layers[0].ways == ways + 1
    assert caches[0].get_seq_length() == 32


@pytest.mark.parametrize(
    "options", [{"past_key_values": StaticCache()}, {"output_attentions": True}]
)
def test_calls_that_are_not_for_it_go_the_layers_way(options):
    model, other = Model(), Model()
    te_fast.convert(model)
    ways = model.layers[0].ways
    compare(model, other, **options)
    assert model.layers[0].ways == ways + 1


def test_modules_that_change_are_seen():
    model, other = Model(), Model()
    te_fast.convert(model)
    ways = model.layers[0].ways
    seen = []
    handle = model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append(1))
    compare(model, other)
    assert seen == [1]
    assert model.layers[0].ways == ways + 1
    handle.remove()
    for each in (model, other):
        torch.manual_seed(1)
        each.layers[1].mlp.up_proj = nn.Linear(64, 96, bias=False)
    compare(model, other)
    for each in (model, other):
        each.layers[0].self_attn.q_proj.weight = nn.Parameter(torch.ones(64, 64) * 0.01)
    compare(model, other)
    assert model.layers[0].ways == ways + 1


def test_products_read_weights_in_one_piece():
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    te_fast.convert(model)
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    for first, second in (
        (attention.q_proj.weight, attention.k_proj.weight),
        (attention.k_proj.weight, attention.v_proj.weight),
        (mlp.gate_proj.weight, mlp.up_proj.weight),
    ):
        end = first.data_ptr() + first.numel() * first.element_size()
        assert second.data_ptr() == end
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_memory_of_others_stays():
    model, other = Model(), Model()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for parameter in model.parameters():
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    te_fast.convert(model)
    assert all(p.untyped_storage().data_ptr() == flat.data_ptr() for p in model.parameters())
    compare(model, other)


def test_copies_and_pickles_are_models_of_their_own():
    model = Model()
    te_fast.convert(model)
    wanted = step(model)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert abs(step(other)[0] - wanted) < 1e-5
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert step(model)[0] == wanted
        assert step(other)[0] != wanted
        te_fast.convert.undo(other)
    te_fast.convert.undo(model)


def test_moved_and_cast():
    model = Model()
    te_fast.convert(model)
    wanted = step(model)[0]
    assert abs(step(model.bfloat16())[0] - wanted) < 5e-2
    assert model.layers[0].mlp.up_proj.weight.grad.dtype == torch.bfloat16


def test_training_behind_inference():
    model, other = Model(1), Model(1)
    te_fast.convert(model)
    with torch.inference_mode():
        wanted = other(TOKENS)
        assert relative(model(TOKENS), wanted) < 1e-5
    compare(model, other)


@pytest.mark.parametrize(
    ("recipe", "use_reentrant"), sampled(RECIPES, [False, True]), indirect=["recipe"]
)
def test_recomputed(recipe, use_reentrant):
    layer = Layer()
    te_fast.convert(layer)
    x = torch.randn(2, 16, 64, requires_grad=True)
    angles = torch.randn(1, 16, 8).repeat(1, 1, 2)
    waves = (angles.cos(), angles.sin())

    def run(x):
        with te.autocast(recipe=recipe):
            return layer(x, position_embeddings=waves)

    run(x)
    other = copy.deepcopy(layer)
    run(x).sum().backward()
    wanted = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
    layer, x.grad = other, None
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=use_reentrant).sum().backward()
    for mine, theirs in zip([x.grad, *(p.grad for p in layer.parameters())], wanted, strict=True):
        assert relative(mine, theirs) < 0.1


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
def test_compiled():
    model, other = Model(1), Model(1)
    te_fast.convert(model)
    compare(
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        torch.compile(other, backend="eager"),
    )
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
def test_layers_that_are_compiled_one_by_one_share_a_graph():
    """More of them than torch compiles a function for; results and gradients have the bits of eager calls."""
    torch.manual_seed(0)
    model = Model(9)
    te_fast.convert(model)
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for layer in twin.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    tokens = torch.randint(0, 64, (2, 16))
    results = []
    for one in (model, twin):
        with te.autocast(recipe=DelayedScaling()), te_fast.dispatch.record() as launches:
            y = one(tokens)
        y.square().sum().backward()
        grads = [parameter.grad for parameter in one.parameters()]
        results.append(([y, *grads], [launch.name for launch in launches]))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


def sequential():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.LayerNorm(32),
        nn.Linear(32, 64),
        nn.GELU(approximate="tanh"),
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.RMSNorm(32, eps=1e-5),
        nn.Linear(32, 48, bias=False),
        nn.Linear(48, 5),
    )


def test_sequential():
    model, other = sequential(), sequential()
    report = te_fast.convert(model)
    assert report.converted[""] == "norm + feed-forward block and norm + linear layer"
    assert report.left == {"7": "7 has 5 channels, which is no multiple of 16"}
    x = torch.randn(16, 32)
    assert torch.allclose(model(x), other(x), atol=1e-5)
    grads = [torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (model, other)]
    assert all(relative(*pair) < 1e-4 for pair in zip(*grads, strict=True))
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(model(x), other(x), atol=1e-5)
    assert seen == [1]
    model[4] = nn.Identity()
    assert not torch.allclose(model(x), other(x), atol=1e-5)
    assert te_fast.convert.undo(model) == 4


def test_twice_is_refused_and_undone():
    model, other = Model(), Model()
    with pytest.raises(StateError, match="nothing of this model has been converted"):
        te_fast.convert.undo(model)
    first = te_fast.convert(model)
    with pytest.raises(StateError, match="layers.0 has been converted"):
        te_fast.convert(model)
    assert te_fast.convert.undo(model) == len(first.converted)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert step(model)[0] == step(other)[0]
    assert te_fast.convert(model).converted == first.converted


def test_dry_run_changes_nothing():
    model, other = Model(), Model()
    pointers = [p.data_ptr() for p in model.parameters()]
    report = te_fast.convert(model, dry_run=True)
    assert str(report).startswith("te_fast.convert would convert: 2 x decoder layer, 14 x linear")
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert step(model)[0] == step(other)[0]
    assert report.converted == te_fast.convert(model).converted


def test_random_numbers_and_modes_are_as_before():
    model = Model()
    model.layers[0].eval()
    state = torch.random.get_rng_state()
    te_fast.convert(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.layers[0].mlp.training
    assert model.layers[1].mlp.training


def test_wrappers():
    model = Model()
    layer = model.layers[0]
    old = layer.forward
    layer.forward = lambda *args, **kwargs: old(*args, **kwargs)
    report = te_fast.convert(model)
    assert "has a forward of its own" in report.left["layers.0"]
    del layer.forward
    wrapped = model.layers[1]
    wrapped._old_forward, wrapped.forward = wrapped.forward, lambda *args, **kw: None
    with pytest.raises(StateError, match="layers.1 has been wrapped since"):
        te_fast.convert.undo(model)
    assert "forward" in model.layers[0].mlp.up_proj.__dict__


def test_bad_models(tmp_path):
    with pytest.raises(DtypeError, match="convert: expected a torch.nn.Module, got dict"):
        te_fast.convert({})
    with pytest.raises(DtypeError, match="undo: expected a torch.nn.Module, got NoneType"):
        te_fast.convert.undo(None)
    model = nn.Linear(16, 16)
    model.compile(backend="eager")
    with pytest.raises(StateError, match="is compiled"):
        te_fast.convert(model)
    tied = Model()
    tied.layers[0].mlp.up_proj.weight = tied.layers[1].mlp.up_proj.weight
    report = te_fast.convert(tied)
    assert report.left["layers.0"] == "layers.0 shares parameters with another module"
    assert "layers.0.mlp.up_proj" in report.left


def test_modules_that_run_twice():
    model, other = Model(), Model()
    for one in (model, other):
        one.layers.append(one.layers[0])
    report = te_fast.convert(model)
    assert list(report.converted.values()).count("decoder layer") == 2
    assert not any("shares" in why for why in report.left.values())
    compare(model, other)
    compare(model, other, bound=0.5, recipe=DelayedScaling())
    te_fast.convert.undo(model)
    compare(model, other, bound=1e-6)


@pytest.mark.parametrize("exclude", ["layers", ("mlp", "layers.1")])
def test_excluded(exclude):
    report = te_fast.convert(Model(), exclude=exclude)
    assert "layers.1" in report.left
    if exclude == "layers":
        assert set(report.converted) == {"lm_head"}
    else:
        assert report.left["layers.0.mlp.up_proj"].endswith("is excluded")


@pytest.mark.parametrize(
    ("exclude", "why"),
    [(None, "pass \\(\\) to exclude no module"), (3, "got int"), ([3], "contain names, got int")],
)
def test_names_to_exclude_that_are_none(exclude, why):
    with pytest.raises(DtypeError, match=why):
        te_fast.convert(Model(1), exclude=exclude)


def test_names_to_exclude_that_no_module_has():
    report = te_fast.convert(Model(1), exclude=("lm_head", "q_porj", "layers.9", "classifier"))
    assert report.unmatched == ("q_porj", "layers.9")
    assert "exclude names no module: q_porj, layers.9" in str(report)
    assert "exclude names" not in str(te_fast.convert(Model(1)))


def test_the_model_itself_has_a_name_in_the_report():
    report = te_fast.convert(nn.Linear(16, 5))
    assert report.left == {"": "the model has 5 channels, which is no multiple of 16"}
    assert "left the model: it has 5 channels" in str(report)


FP64 = {
    "norm and block": sequential,
    "decoder": lambda: Model(1),
    "mixture": lambda: mixtral().layers[0].mlp,
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", FP64)
def test_fp64(kind, before):
    torch.manual_seed(11)
    model = FP64[kind]()
    other = copy.deepcopy(model).double()
    if before:
        te_fast.convert(model.double())
    else:
        te_fast.convert(model)
        model.double()
    size = 32 if kind == "norm and block" else 64
    x = TOKENS if kind == "decoder" else torch.randn(16, size, dtype=torch.float64)
    y, wanted = model(x), other(x)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)


CONSTANTS = {
    "eps": lambda model: setattr(model.layers[0].input_layernorm, "variance_epsilon", 1.0),
    "second eps": lambda model: setattr(
        model.layers[0].post_attention_layernorm, "variance_epsilon", 1.0
    ),
    "scaling": lambda model: setattr(model.layers[0].self_attn, "scaling", 0.9),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_change_are_seen(name):
    model, other = Model(1), Model(1)
    te_fast.convert(model)
    model = copy.deepcopy(model)
    for each in (model, other):
        CONSTANTS[name](each)
    compare(model, other)


def test_eps_of_a_norm_in_a_sequence_that_changes_is_seen():
    model, other = sequential(), sequential()
    te_fast.convert(model)
    x = torch.randn(16, 32)
    for each in (model, other):
        each[0].eps = 1.0
    assert torch.allclose(model(x), other(x), atol=1e-5)


@pytest.mark.parametrize("kind", [lambda: Model(1, bias=True), sequential])
def test_functional_call(kind):
    """Parameters of a functional call are tensors, and those of the next call are the model's own again."""
    model, other = kind(), kind()
    te_fast.convert(model)
    x = TOKENS if isinstance(model, Model) else torch.randn(16, 32)
    before = model(x)
    results = []
    for each in (model, other):
        given = {n: (p.detach() * 1.1).requires_grad_() for n, p in each.named_parameters()}
        y = torch.func.functional_call(each, given, (x,))
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), list(given.values()))])
    assert all(relative(*pair) < 1e-4 for pair in zip(*results, strict=True))
    assert torch.equal(model(x), before)
    assert relative(results[0][0], before) > 1e-2


@pytest.mark.parametrize("size", [(32,), (16, 32)])
@pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
def test_a_converted_module_is_exported_by_itself(size):
    model, x = nn.Linear(32, 32), torch.randn(*size)
    te_fast.convert(model)
    program = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), nn.functional.linear(x, *model.parameters()))


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.*:FutureWarning")
def test_scripted_modules_stay():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32)))
    model = nn.Sequential(scripted, nn.Linear(32, 32))
    x = torch.randn(16, 32)
    wanted = model(x)
    assert te_fast.convert(model).converted == {"1": "linear layer"}
    torch.testing.assert_close(model(x), wanted)


def test_command_line(capsys):
    assert te_fast.convert.main(["--dry-run", "llama_like:make"]) == 0
    shown = capsys.readouterr().out
    assert "would convert: 2 x decoder layer (not tried), 14 x linear layer" in shown
    assert "layers.1.self_attn.o_proj: linear layer" in shown
    for bad, why in (
        ("nothing", "expected package.module:function"),
        (":make", "expected package.module:function"),
        ("llama_like:none", "has no 'none'"),
        ("no_such_module:make", "No module named"),
        ("llama_like:loss_of", "missing 2 required positional arguments"),
        ("llama_like:StaticCache", "got StaticCache"),
    ):
        with pytest.raises(SystemExit):
            te_fast.convert.main([bad])
        assert why in capsys.readouterr().err


def test_errors_are_te_fasts():
    with pytest.raises(TeFastError):
        te_fast.convert(None)


def trained(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    recipe = DelayedScaling(amax_history_len=4)
    losses = []
    for _ in range(steps):
        losses.append(step(model, recipe)[0])
        optimizer.step()
    return losses


def test_a_restart_with_its_scales_goes_on_as_if_there_was_none(tmp_path):
    model = nn.Sequential(Model(), nn.LayerNorm(96), nn.Linear(96, 96))
    te_fast.convert(model, exclude=())
    keys = list(model.state_dict())
    trained(model, 3)
    assert list(model.state_dict()) == keys
    torch.save(
        {"model": model.state_dict(), "scales": te_fast.convert.scaling_state(model)},
        tmp_path / "checkpoint.pt",
    )
    wanted = trained(model, 3)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert {"0.layers.0.qkv", "0.layers.1.feed_forward", "1"} <= saved["scales"].keys()
    for is_loaded in (True, False):
        other = nn.Sequential(Model(), nn.LayerNorm(96), nn.Linear(96, 96))
        te_fast.convert(other, exclude=())
        other.load_state_dict(saved["model"])
        if is_loaded:
            te_fast.convert.load_scaling_state(other, saved["scales"])
        assert (trained(other, 3) == wanted) == is_loaded


def test_scales_that_do_not_fit_change_nothing():
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    with pytest.raises(StateError, match="nothing of this model has been converted"):
        te_fast.convert.scaling_state(model)
    te_fast.convert(model, exclude=())
    assert te_fast.convert.scaling_state(model) == {}
    with te.autocast(recipe=DelayedScaling()):
        model(torch.randn(16, 32)).sum().backward()
    known = te_fast.convert.scaling_state(model)
    for wrong, match in (
        ({"0": known["0"] * 0 + 7}, "_extra_state"),
        ({"0": known["0"], "9": known["0"]}, "no converted layer '9'"),
    ):
        with pytest.raises(StateError, match=match):
            te_fast.convert.load_scaling_state(model, wrong)
    with pytest.raises(DtypeError, match="expected a mapping"):
        te_fast.convert.load_scaling_state(model, [known])
    again = te_fast.convert.scaling_state(model)
    assert all(torch.equal(again[name], state) for name, state in known.items())


@pytest.mark.every_torch
@pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
@pytest.mark.parametrize(
    "recompute", quickly([False, True], True, slow=[False, True]), ids=["kept", "recomputed"]
)
def test_a_graph_reads_parameters_that_were_exchanged(recompute):
    """FSDP2 exchanges parameters before a compiled block runs; torchtitan's loop also checkpoints the block."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
    )
    te_fast.convert(model)
    for module in model:
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(parameter.detach() * 2)
    plain = copy.deepcopy(model)
    te_fast.convert.undo(plain)
    x = torch.randn(16, 32)

    def run(x):
        if recompute:
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return model(x)

    y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    y.square().mean().backward()
    expected = plain(x)
    expected.square().mean().backward()
    torch.testing.assert_close(y, expected)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
