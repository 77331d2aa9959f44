"""Experts on the GPU: FP8 weights, experts one by one, recomputation, biases with factors, counts beyond the rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
import te_fast  # noqa: E402
import te_fast.pytorch as te  # noqa: E402
from grouped_layers import with_biases  # noqa: E402
from recipes import RECIPES  # noqa: E402
from te_fast import _config  # noqa: E402

pytestmark = pytest.mark.gpu

ALL = {"high": lambda: None, **RECIPES}
SPLITS = [0, 70, 1, 0, 129, 128, 16, 0]
ROWS = sum(SPLITS)
OPTIONS = {"device": "cuda", "params_dtype": torch.bfloat16, "bias": False}


def make(recipe=None, **options):
    torch.manual_seed(3)
    with te.quantized_model_init(
        enabled=recipe is not None, recipe=recipe, preserve_high_precision_init_val=True
    ):
        return te.GroupedLinear(len(SPLITS), 272, 144, **OPTIONS, **options)


def inputs(rows=ROWS):
    torch.manual_seed(4)
    x = torch.randn(rows, 272, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(rows, 144, device="cuda", dtype=torch.bfloat16)


def step(layer, x, grad, recipe, counts=None):
    counts = torch.tensor(SPLITS, device="cuda") if counts is None else counts
    x.grad = None
    layer.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, counts)
    y.backward(grad)
    return [y.detach(), x.grad, *[parameter.grad for parameter in layer.parameters()]]


def near(got, wanted, room):
    difference = (got.double() - wanted.double()).norm()
    assert difference <= room * wanted.double().norm() + 1e-12


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_in_fp8_have_the_bits_of_plain_ones(name, single):
    recipe = RECIPES[name]()
    mine, plain = make(recipe, single_grouped_weight=single), make(single_grouped_weight=single)
    with torch.no_grad():
        for weight, other in zip(mine.parameters(), plain.parameters(), strict=True):
            other.copy_(weight.get_high_precision_init_val())
    x, grad = inputs()
    results = [step(layer, x, grad, recipe) for layer in (mine, plain)]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_in_fp8_train(name, single):
    recipe = RECIPES[name]()
    layer = make(recipe, single_grouped_weight=single)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True)
    x, grad = inputs()
    before = [parameter.dequantize() for parameter in layer.parameters()]
    for _ in range(3):
        step(layer, x, grad, recipe)
        optimizer.step()
    after = [parameter.dequantize() for parameter in layer.parameters()]
    assert all(torch.isfinite(values).all() for values in after)
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_in_fp8_one_by_one(name, single, monkeypatch):
    """The weights' scales lie one behind the other, and cuBLASLt reads only the first of them."""
    recipe, results = RECIPES[name](), []
    for loop in (False, True):
        monkeypatch.setattr(_config, "EXPERT_LOOP", loop)
        torch.manual_seed(3)
        with te.quantized_model_init(recipe=recipe):
            layer = make(single_grouped_weight=single)
        x, grad = inputs()
        results.append(step(layer, x, grad, recipe))
    for wanted, got in zip(*results, strict=True):
        near(got, wanted, 2e-2)


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
@pytest.mark.parametrize("on_device", [False, True], ids=["list", "device"])
@pytest.mark.parametrize("name", ALL)
def test_experts_one_by_one_are_near_one_launch(name, on_device, single, monkeypatch):
    layer, recipe = make(single_grouped_weight=single), ALL[name]()
    x, grad = inputs()
    counts = torch.tensor(SPLITS, device="cuda") if on_device else list(SPLITS)
    results = []
    for loop in (False, True):
        monkeypatch.setattr(_config, "EXPERT_LOOP", loop)
        if name == "delayed":
            layer = make(single_grouped_weight=single)
        results.append(step(layer, x, grad, recipe, counts))
    for wanted, got in zip(*results, strict=True):
        near(got, wanted, 2e-2)


@pytest.mark.parametrize("on_device", [False, True], ids=["list", "device"])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.float32, (96, 64)), (torch.bfloat16, (69, 276)), (torch.float16, (64, 36))],
    ids=str,
)
def test_types_and_sizes_without_a_kernel_run_one_by_one(dtype, sizes, on_device):
    """As in Transformer Engine, which multiplies them with cuBLAS."""
    layer = te.GroupedLinear(len(SPLITS), *sizes, params_dtype=dtype, device="cuda")
    torch.manual_seed(1)
    x = torch.randn(sum(SPLITS), sizes[0], dtype=dtype, device="cuda", requires_grad=True)
    grad = torch.randn(sum(SPLITS), sizes[1], dtype=dtype, device="cuda")
    y = layer(x, torch.tensor(SPLITS, device="cuda") if on_device else list(SPLITS))
    y.backward(grad)
    bound = 1e-2 if dtype.itemsize == 2 else 1e-3
    parts = zip(*[t.double().split(list(SPLITS)) for t in (x, y, grad, x.grad)], strict=True)
    for number, (rows, out, of_out, of_rows) in enumerate(parts):
        weight, bias = getattr(layer, f"weight{number}"), getattr(layer, f"bias{number}")
        near(out, rows @ weight.double().T + bias.double(), bound)
        near(of_rows, of_out @ weight.double(), bound)
        near(weight.grad.double(), of_out.T @ rows, bound)
        near(bias.grad.double(), of_out.sum(0), bound)


def test_blocks_one_by_one(monkeypatch):
    results = []
    for loop in (False, True):
        monkeypatch.setattr(_config, "EXPERT_LOOP", loop)
        torch.manual_seed(0)
        block = te.MoE(128, 96, num_experts=8, topk=2, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(256, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        y = block(x)
        y.sum().backward()
        results.append([y, x.grad, *[parameter.grad for parameter in block.parameters()]])
    for wanted, got in zip(*results, strict=True):
        near(got, wanted, 2e-2)


def trio(recompute=False, scale_bias=False):
    torch.manual_seed(6)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    return with_biases(
        te.ops.Sequential(
            te.ops.GroupedLinear(len(SPLITS), 64, 192, bias=False, **options),
            te.ops.ScaledSwiGLU(activation_recompute_in_mlp=recompute),
            te.ops.GroupedLinear(
                len(SPLITS), 96, 64, bias=scale_bias, scale_bias=scale_bias, **options
            ),
        )
    )


@pytest.mark.parametrize("name", ["high", "current", "block"])
def test_recomputed_activations_change_no_bits(name):
    results = []
    for recompute in (False, True):
        model, recipe = trio(recompute), ALL[name]()
        torch.manual_seed(7)
        x = torch.randn(ROWS, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        probs = torch.rand(ROWS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        counts = torch.tensor(SPLITS, device="cuda")
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, counts, probs, counts)
        y.float().square().sum().backward()
        results.append([y, x.grad, probs.grad, *[p.grad for p in model.parameters()]])
    assert all(map(torch.equal, *results))


def test_scaled_biases_are_those_of_each_row():
    model = trio(scale_bias=True)
    counts = torch.tensor(SPLITS, device="cuda")
    x = torch.zeros(ROWS, 64, device="cuda", dtype=torch.bfloat16)
    probs = torch.rand(ROWS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = model(x, counts, probs, counts, probs)
    biases = torch.stack([model[2].get_parameter(f"bias{i}") for i in range(len(SPLITS))])
    expert = torch.repeat_interleave(torch.arange(len(SPLITS), device="cuda"), counts)
    assert torch.equal(y, biases[expert] * probs[:, None])
    y.float().sum().backward()
    near(probs.grad, biases[expert].sum(1), 2e-2)


@pytest.mark.parametrize("name", ["high", "current", "block"])
def test_what_counts_exceed_is_cut_off(name):
    recipe = ALL[name]()
    splits, taken = [0, 300, 0, 50, 0, 0, 0, 0], [0, 200, 0, 0, 0, 0, 0, 0]
    x, grad = inputs(200)
    wanted = step(make(), x, grad, recipe, torch.tensor(taken, device="cuda"))
    wanted = [tensor.clone() for tensor in wanted]
    poison = [torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del poison
    got = step(make(), x, grad, recipe, torch.tensor(splits, device="cuda"))
    assert all(map(torch.equal, got, wanted))


def test_debugging_reports_counts_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(_config, "DEBUG", True)
    x, grad = inputs(200)
    for bad in ([300, 0, 0, 0, 0, 0, 0, 0], [-1, 5, 0, 0, 0, 0, 0, 0]):
        with pytest.raises(te_fast.ShapeError, match="TE_FAST_DEBUG"):
            step(make(), x, grad, None, torch.tensor(bad, device="cuda"))
