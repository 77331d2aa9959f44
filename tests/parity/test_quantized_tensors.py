"""Quantised tensors beside Transformer Engine's, bit for bit, on a GPU: `pytest -m te tests/parity`.

Bytes, scales and transposes are compared after a cast, after construction, after an optimizer's steps and after a cast
of master weights. Both libraries have the same names, so each function takes the library.
"""

import copy
import datetime
import importlib

import pytest
import torch

import parity

# Warnings of Transformer Engine are not te_fast's.
pytestmark = [pytest.mark.te, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

KINDS = ("delayed", "current", "current, powers of two", "1x128", "128x128")
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
PARTS = (
    *("_data", "_scale_inv", "_transpose"),
    *("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"),
)
ROWS, COLS = 256, 384


@pytest.fixture(scope="module")
def libraries(theirs):
    return parity.own(), theirs


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    timeout = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timeout)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def quantizer(library, kind, fmt, *, rowwise=True, columnwise=True):
    te = library.pytorch
    dtype = {"e4m3": te.DType.kFloat8E4M3, "e5m2": te.DType.kFloat8E5M2}[fmt]
    usage = {"rowwise": rowwise, "columnwise": columnwise}
    if kind == "delayed":
        scale = torch.full((1,), 3.0, device="cuda")
        return te.Float8Quantizer(scale, torch.zeros(1, device="cuda"), dtype, **usage)
    if kind.startswith("current"):
        device, powers = torch.device("cuda"), "powers" in kind
        return te.Float8CurrentScalingQuantizer(dtype, device, force_pow_2_scales=powers, **usage)
    return te.Float8BlockQuantizer(dtype, block_scaling_dim=1 if kind == "1x128" else 2, **usage)


def contents(tensor):
    """Bytes and scales of all layouts. Padding of block scales is nobody's."""
    found = {}
    rows, cols = tensor.shape.numel() // tensor.shape[-1], tensor.shape[-1]
    for name in PARTS:
        part = getattr(tensor, name, None)
        if part is None or (name == "_transpose" and getattr(tensor, "_transpose_invalid", False)):
            continue
        if name.endswith("wise_scale_inv"):
            length = cols if name.startswith("_columnwise") else rows
            if tensor._is_2D_scaled:
                length = -(-(rows + cols - length) // 128)
            part = part[:, :length]
        rows_of = (-1, part.shape[-1]) if part.dim() else ()
        found[name] = part.detach().clone().view(rows_of)
    return found


def check(ours, theirs):
    """Both have the same layouts with equal bytes and scales."""
    assert sorted(ours) == sorted(theirs)
    for name, part in ours.items():
        other = theirs[name].reshape(part.shape)
        integers = {1: torch.uint8, 4: torch.int32}[part.element_size()]
        assert torch.equal(part.view(integers), other.contiguous().view(integers)), name


def values(case):
    generator = torch.Generator("cuda").manual_seed(7)
    x = torch.randn(ROWS, COLS, device="cuda", generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, (ROWS, COLS), device="cuda", generator=generator))
    if case == "zeros":
        x = torch.zeros_like(x).copysign(x)
    elif case == "small":
        x = x.sign() * torch.finfo(torch.bfloat16).smallest_normal
        x[::3] *= 2.0**-6  # subnormal numbers in BF16
    elif case == "large":
        x[5, 7], x[130, 200] = torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max
    elif case == "infinite":
        x[3, 4], x[200, 300] = torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ["random", "zeros", "small", "large", "infinite"])
def test_casts(libraries, kind, fmt, dtype, case):
    x = values(case).to(dtype)
    for usage in ((True, True), (True, False)):
        made = [
            quantizer(each, kind, fmt, rowwise=usage[0], columnwise=usage[1])(x)
            for each in libraries
        ]
        check(*map(contents, made))
        plain = [each.dequantize() for each in made]
        torch.testing.assert_close(*plain, rtol=0.0, atol=0.0, equal_nan=True)


def made(library, recipe, init):
    """A layer whose weight is quantised at construction, and its parameter."""
    te = library.pytorch
    kind = getattr(library.recipe, recipe)()
    with te.quantized_model_init(enabled=True, recipe=kind):
        layer = te.Linear(
            *(COLS, ROWS), bias=False, params_dtype=torch.bfloat16, init_method=init, device="cuda"
        )
    return layer, kind


def initial(weight):
    generator = torch.Generator("cuda").manual_seed(3)
    with torch.no_grad():
        return weight.copy_(torch.randn(weight.shape, device="cuda", generator=generator) / 16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_construction_and_steps_of_an_optimizer(libraries, recipe):
    both = [made(library, recipe, initial) for library in libraries]
    weights = [layer.weight for layer, _ in both]
    check(*map(contents, weights))
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    generator = torch.Generator("cuda").manual_seed(5)
    for _ in range(3):
        gradient = torch.randn(ROWS, COLS, device="cuda", generator=generator).bfloat16()
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
        check(*map(contents, weights))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("start", [None, 1000])
def test_casts_of_master_weights(libraries, group, recipe, start):
    results = []
    generator = torch.Generator("cuda").manual_seed(9)
    master = torch.randn(ROWS * COLS, device="cuda", generator=generator) / 8
    if start is not None:
        master = master[start : start + 5000].clone()
    for library in libraries:
        layer, kind = made(library, recipe, initial)
        x = torch.ones(32, COLS, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with library.pytorch.autocast(enabled=True, recipe=kind):
            layer(x).sum().backward()
        utils = importlib.import_module(f"{library.pytorch.__name__}.tensor.utils")
        given = ([layer.weight], [copy.deepcopy(master)], [start or 0], group)
        utils.cast_master_weights_to_fp8(*given)
        utils.post_all_gather_processing([layer.weight])
        found = contents(layer.weight)
        if start is not None:
            # Of the bytes of other ranks nobody knows anything before they are gathered.
            found = {name: part for name, part in found.items() if "scale" in name} | {
                name: part.view(-1)[start : start + len(master)]
                for name, part in found.items()
                if name in {"_data", "_rowwise_data"}
            }
        results.append(found)
    check(*results)
