"""torch.export of experts: the programs compute the bits of eager code, here and in another process."""

from __future__ import annotations

import contextlib

import pytest
import torch

import te_fast.pytorch as te
from selection import quickly, sampled
from te_fast import _config
from te_fast.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from te_fast.errors import UnsupportedError
from te_fast.pytorch import ops
from te_fast.runtime.compiling import CAN_COMPILE

pytestmark = [
    pytest.mark.every_torch,
    pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later"),
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
    pytest.mark.filterwarnings("ignore:No complete tensor found in the group"),
]
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
KIND = {"device": "cpu"}
LOAD = """
import torch, te_fast.pytorch as te
program = torch.export.load({path!r} + ".pt2").module()
for given, wanted in torch.load({path!r} + ".pt"):
    for _ in range(2):
        made = program(*given)
        made = made if isinstance(made, tuple) else (made,)
        assert all(map(torch.equal, made, wanted)), len(given[0])
print("equal")
"""


def rows_of(seed, rows):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)) * 3


def as_tuple(made):
    return made if isinstance(made, tuple) else (made,)


class Products(torch.nn.Module):
    """A layer of experts, and a chain with an activation between two products of experts."""

    def __init__(self, recipe, *, experts=3, single=False, quantized=False):
        super().__init__()
        torch.manual_seed(0)
        self.recipe = recipe
        init = te.quantized_model_init(recipe=recipe) if quantized else contextlib.nullcontext()
        with init:
            self.layer = te.GroupedLinear(
                experts,
                32,
                48,
                single_grouped_weight=single,
                single_grouped_bias=single,
                name="experts",
                **KIND,
            )
            self.chain = ops.Sequential(
                ops.GroupedLinear(experts, 48, 64, single_grouped_weight=single, **KIND),
                ops.ScaledSwiGLU(),
                ops.GroupedLinear(experts, 32, 32, bias=False, **KIND),
            )

    def forward(self, x, counts, factors):
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.chain(self.layer(x, counts), counts, factors, counts)


ROWS = torch.export.Dim("rows", min=8, max=4096)


def exported(model, given, shapes, *, strict):
    with torch.no_grad():
        return torch.export.export(model, given, dynamic_shapes=shapes, strict=strict)


def given_to_products(rows, experts=3):
    counts = torch.zeros(experts, dtype=torch.int64)
    counts[0] += 5
    counts[-1] += rows - 5
    return rows_of(rows, rows), counts, torch.rand(rows)


def exported_products(model, *, strict, experts=3):
    shapes = {"x": {0: ROWS}, "counts": None, "factors": {0: ROWS}}
    return exported(model, given_to_products(16, experts), shapes, strict=strict)


# A process that has not run the model takes seconds to load its program.
ELSEWHERE = pytest.mark.parametrize("elsewhere", quickly([False, True], False, slow=[False, True]))


def here(script):
    """Run a script in this process."""
    exec(script, {})
    return "equal\n"


def assert_alike(run, program, model, cases, path):
    """Compare with eager code, and so what a script loads that `run` runs."""
    with torch.no_grad():
        pairs = [(given, as_tuple(model(*given))) for given in cases]
    for given, wanted in pairs:
        assert all(map(torch.equal, as_tuple(program.module()(*given)), wanted))
    if run is not None:
        torch.export.save(program, f"{path}.pt2")
        torch.save(pairs, f"{path}.pt")
        assert run(LOAD.format(path=str(path))).endswith("equal\n")


@pytest.mark.parametrize(
    ("name", "strict", "single"),
    sampled(
        RECIPES,
        [False, True],
        [False, True],
        quick=[
            ("none", False, False),
            ("delayed", False, True),
            ("current", False, True),
            ("block", False, False),
        ],
    ),
)
def test_products_have_the_bits_of_eager_code(name, strict, single):
    model = Products(RECIPES[name], single=single)
    for _ in range(2):  # the scales are no longer the initial ones
        model(*given_to_products(24)).sum().backward()
    program = exported_products(model, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("te_fast.inference.default") == 2
    assert not any("te_fast.program" in target for target in targets)
    assert_alike(None, program, model, map(given_to_products, (16, 40)), None)


@ELSEWHERE
@pytest.mark.parametrize("name", quickly(["none", "delayed", "block"], "delayed"))
def test_another_process_computes_the_same_products(tmp_path, fresh, name, elsewhere):
    model = Products(RECIPES[name])
    model(*given_to_products(24)).sum().backward()
    program = exported_products(model, strict=False)
    run = fresh if elsewhere else here
    assert_alike(run, program, model, map(given_to_products, (16, 40)), tmp_path / name)


@ELSEWHERE
@pytest.mark.parametrize("single", quickly([False, True], True, slow=[False]))
@pytest.mark.parametrize("name", quickly(["delayed", "current", "block"], "current"))
def test_weights_in_fp8_are_saved_as_they_are(tmp_path, fresh, name, single, elsewhere):
    model = Products(RECIPES[name], single=single, quantized=True)
    program = exported_products(model, strict=False)
    assert not any("dequantize" in str(node.target) for node in program.graph.nodes)
    run = fresh if elsewhere else here
    assert_alike(run, program, model, map(given_to_products, (16, 40)), tmp_path / name)


def test_the_products_are_those_of_torch():
    model = Products(None)
    program = exported_products(model, strict=False).module()
    x, counts, factors = given_to_products(24)
    found, chunks = [], zip(x.split(counts.tolist()), factors.split(counts.tolist()), strict=True)
    first, last = model.chain[0], model.chain[2]
    for expert, (rows, factor) in enumerate(chunks):
        y = rows
        for module in (model.layer, first):
            weight, bias = (getattr(module, f"{kind}{expert}") for kind in ("weight", "bias"))
            y = torch.nn.functional.linear(y, weight, bias)
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up * factor[:, None]
        found.append(y @ getattr(last, f"weight{expert}").t())
    assert torch.allclose(program(x, counts, factors), torch.cat(found), rtol=1e-4, atol=1e-5)


def test_one_expert_and_no_rows():
    model = Products(Float8CurrentScaling(), experts=1)
    program = exported_products(model, strict=False, experts=1)
    assert_alike(None, program, model, [given_to_products(24, 1)], None)
    [text] = [n.args[-1] for n in program.graph.nodes if "inference" in str(n.target)][:1]
    params = [model.layer.weight0, model.layer.bias0]
    nothing = torch.zeros(0, 32)
    counts = torch.zeros(1, 1, dtype=torch.int64)
    [y] = torch.ops.te_fast.inference(nothing, [counts], params, [], text)
    assert y.shape == (0, 48)


class Listed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = te.GroupedLinear(2, 32, 32, name="experts", **KIND)

    def forward(self, x):
        return self.experts(x, [4, 12])


@pytest.mark.parametrize("strict", [False, True])
def test_a_list_of_counts_is_a_constant(strict):
    model, x = Listed(), rows_of(0, 16)
    program = exported(model, (x,), None, strict=strict)
    assert len(program.graph_signature.user_inputs) == 1
    with torch.no_grad():
        assert torch.equal(program.module()(x), model(x))
        with pytest.raises(Exception, match="16"):  # torch's own class, by release
            program.module()(rows_of(0, 24))


def test_counts_on_the_host_are_checked_by_the_program():
    model = Products(None)
    program = exported_products(model, strict=False).module()
    x, counts, factors = given_to_products(24)
    with pytest.raises(RuntimeError, match="m_splits must not be negative, and must add up"):
        program(x, counts - 1, factors)


def test_other_weights_are_quantised_anew_and_none_is_kept_alive():
    model = Products(Float8CurrentScaling())
    program = exported_products(model, strict=False).module()
    given = given_to_products(24)
    before = program(*given)
    with torch.no_grad():
        program.chain._modules["2"].weight2.mul_(-2)
        program.chain._modules["2"].weight0.mul_(-2)
    assert torch.equal(program(*given), -2 * before)


def test_leading_dimensions_are_kept():
    model = Listed()
    x = rows_of(0, 16).view(2, 8, 32)
    program = exported(model, (x,), None, strict=False)
    with torch.no_grad():
        assert torch.equal(program.module()(x), model(x))


def test_experts_one_by_one_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(_config, "EXPERT_LOOP", True)
    with pytest.raises(UnsupportedError, match="experts: experts that run one by one"):
        exported(Listed(), (rows_of(0, 16),), None, strict=False)


class Counted(torch.nn.Module):
    """A layer in a region."""

    def __init__(self, layer, recipe):
        super().__init__()
        self.layer, self.recipe = layer, recipe

    def forward(self, x, counts):
        with te.autocast(recipe=self.recipe):
            return self.layer(x, counts)


@pytest.mark.parametrize("kind", ["layer", "chain"])
def test_a_recipe_whose_experts_run_one_by_one(kind):
    """Its backward has the override, which an export does not have."""
    recipe = Float8CurrentScaling(backward_override="dequantized")
    if kind == "layer":
        layer = te.GroupedLinear(3, 32, 48, **KIND)
    else:
        layer = ops.Sequential(ops.GroupedLinear(3, 32, 48, **KIND))
    model, (x, counts, _) = Counted(layer, recipe), given_to_products(16)
    for _ in range(2):  # an eager call runs the experts one by one, and leaves exports as they are
        program = exported(model, (x, counts), None, strict=False).module()
        with torch.no_grad():
            assert torch.equal(program(x, counts), model(x, counts))


def test_recipes_of_factories_are_refused():
    def factory(_):
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")

    model = Products(CustomRecipe(qfactory=factory))
    with pytest.raises(UnsupportedError):
        exported_products(model, strict=False)


# A whole mixture of experts ---------------------------------------------------------------------------

BLOCKS = {
    "softmax": {},
    "biases": {"single_grouped_weight": True, "bias": True},
    "expert_bias": {"score_function": "sigmoid", "expert_bias": True},
    "loss": {"aux_loss_coeff": 0.1, "activation": "srelu"},
    "all": {
        "score_function": "sqrtsoftplus",
        "expert_bias": True,
        "aux_loss_coeff": 0.1,
        "num_groups": 2,
        "group_topk": 1,
    },
}


class Mixture(torch.nn.Module):
    def __init__(self, recipe, *, quantized=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.recipe = recipe
        init = te.quantized_model_init(recipe=recipe) if quantized else contextlib.nullcontext()
        with init:
            self.block = te.MoE(32, 48, num_experts=4, topk=2, **options, **KIND)
        if self.block.expert_bias is not None:
            self.block.expert_bias.copy_(torch.tensor([0.4, -0.3, 0.2, -0.1]))

    def forward(self, x):
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.block(x)


def trained(name, *, recipe=None, **options):
    model = Mixture(RECIPES[recipe or "none"], **BLOCKS[name], **options)
    for seed in range(2):
        sum(part.sum() for part in as_tuple(model(rows_of(seed, 24)))).backward()
    return model.eval()


def exported_mixture(model, *, strict=False):
    return exported(model, (rows_of(9, 16),), {"x": {0: ROWS}}, strict=strict)


@pytest.mark.parametrize(
    ("block", "strict"),
    sampled(
        BLOCKS,
        [False, True],
        quick=[("biases", False), ("loss", False), ("all", False), ("expert_bias", True)],
    ),
)
@pytest.mark.parametrize("name", quickly(["none", "delayed", "current", "block"], "delayed"))
def test_a_mixture_is_one_operator_with_the_bits_of_eager_code(name, block, strict):
    model = trained(block, recipe=name)
    program = exported_mixture(model, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if "te_fast" in str(node.target)]
    has_loss = model.block.aux_loss_coeff != 0.0
    assert targets == ["te_fast.inference.default"] + ["te_fast.moe_router.default"] * has_loss
    assert_alike(None, program, model, [(rows_of(3, 24),), (rows_of(4, 40),)], None)


@ELSEWHERE
@pytest.mark.parametrize("quantized", quickly([False, True], True, slow=[False]))
def test_another_process_computes_the_same_mixture(tmp_path, fresh, quantized, elsewhere):
    model = trained("all", recipe="current", quantized=quantized)
    cases = [(rows_of(3, 24),), (rows_of(4, 40),)]
    run = fresh if elsewhere else here
    assert_alike(run, exported_mixture(model), model, cases, tmp_path / "mixture")


def test_a_mixture_counts_tokens_while_it_is_trained():
    model = trained("expert_bias").train()
    program = exported_mixture(model).module()
    x = rows_of(3, 24)
    counts = program.block.tokens_per_expert
    counts.zero_()
    model.block.tokens_per_expert.zero_()
    with torch.no_grad():
        model(x)
    wanted = model.block.tokens_per_expert.clone()
    counts.zero_()
    program(x)
    assert wanted.sum() == 48
    assert torch.equal(counts, wanted)


def test_values_that_are_not_finite_and_no_tokens():
    model = trained("all")
    program = exported_mixture(model)
    x = rows_of(3, 24)
    x[0], x[1], x[2, 0] = 0.0, torch.nan, torch.inf
    with torch.no_grad():
        found, wanted = program.module()(x), model(x)
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found, wanted, strict=True)
    )
    assert found[0][1].isnan().all()
    [node] = [n for n in program.graph.nodes if "inference" in str(n.target)]
    block = model.block
    weights = [*block.router[None], *block.experts.parameters()]
    bias = block.expert_bias
    y, logits, counts = torch.ops.te_fast.inference(x[:0], [bias], weights, [], node.args[-1])
    assert (y.shape, logits.shape, logits.dtype) == ((0, 32), (0, 4), torch.float32)
    assert counts.tolist() == [0, 0, 0, 0]


def test_tokens_of_another_type_are_routed_by_torch():
    model = trained("softmax", recipe="current")
    given = (rows_of(9, 16).bfloat16(),)
    program = exported(model, given, {"x": {0: ROWS}}, strict=False)
    targets = [str(node.target) for node in program.graph.nodes if "te_fast" in str(node.target)]
    assert targets[0] == "te_fast.moe_router.default"
    assert_alike(None, program, model, [(rows_of(3, 24).bfloat16(),)], None)


def test_torch_autocast():
    model = trained("softmax")

    class Cast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.model(x)

    cast, given = Cast(), (rows_of(9, 16).bfloat16(),)
    program = exported(cast, given, {"x": {0: ROWS}}, strict=False)
    assert_alike(None, program, cast, [(rows_of(3, 24).bfloat16(),)], None)


class Routed(torch.nn.Module):
    """The functions of a router."""

    def forward(self, x):
        probs, chosen = te.router.fused_topk_with_score_function(
            x, 2, False, None, None, 1.5, "sigmoid", None
        )
        bits = te.router.fused_topk_with_score_function(
            x, 2, True, 2, 1, None, "softmax", None, "bitmap_u8"
        )[1]
        mask, scores = te.router.fused_compute_score_for_moe_aux_loss(x, 2, "softmax")
        counts = mask.sum(0)
        loss = te.router.fused_moe_aux_loss(scores, counts, x.shape[0], 8, 2, 0.1)
        return probs, chosen, bits, loss


@pytest.mark.parametrize("strict", quickly([False, True], False, slow=[False, True]))
def test_the_functions_of_a_router(tmp_path, fresh, strict):
    model = Routed()
    tokens = [
        torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (16, 40)
    ]
    tokens[1][0], tokens[1][1] = 0.0, torch.nan
    program = exported(model, (tokens[0],), {"x": {0: ROWS}}, strict=strict)
    torch.export.save(program, f"{tmp_path}/router.pt2")
    cases = [(tokens[0],), (tokens[1][2:],)]
    assert_alike(fresh if strict else None, program, model, cases, tmp_path / "router")
