"""The tensors that a forward of Linear keeps for its backward."""

import pytest
import torch

import te_fast.pytorch as te
from linear_layers import DTYPES, inputs, make, step
from recipes import RECIPES
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling
from te_fast.errors import ShapeError


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
@pytest.mark.parametrize("name", ["current", "block"])
def test_save_original_input(name):
    layer, plain = make(save_original_input=True), make()
    x, grad = inputs(32, layer)
    for each in (layer, plain):
        step(each, x, grad, RECIPES[name]())
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    with (
        te.autocast(recipe=DelayedScaling()),
        pytest.raises(ValueError, match="save_original_input"),
    ):
        layer(x)


def test_saved_tensor_hooks_see_what_is_kept(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step(layer, x, grad, recipe)
    assert len(packed) == 1
    assert packed[0].dtype == torch.uint8
    got = layer.weight.grad.clone()
    layer.zero_grad()
    if not recipe.delayed():
        assert torch.equal(step(layer, x, grad, recipe), y)
        assert torch.equal(layer.weight.grad, got)


@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}], ids=["now", "later"])
@pytest.mark.parametrize("keeps_input", [False, True], ids=["quantised", "input"])
def test_saved_tensors_that_a_hook_changed_are_refused(recipe, keeps_input, options):
    if keeps_input and recipe.delayed():
        pytest.skip("delayed scaling keeps no input")
    layer = make(256, 128, save_original_input=keeps_input, **options)
    x, grad = inputs(64, layer)
    for unpack in (
        lambda tensor: tensor.flatten()[:16],  # backward would read past the end of this tensor
        lambda tensor: tensor.float(),
        lambda tensor: tensor.half() if tensor.is_floating_point() else tensor.view(torch.int8),
    ):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack)
        with te.autocast(recipe=recipe), hooks:
            y = layer(x)
        with pytest.raises(ShapeError, match=r"Layer_\d+: ops: a saved tensor must be \d+ elem"):
            y.backward(grad)


def kept_bytes(layer, x, recipe):
    """Tensors that a forward keeps for backward."""
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(packed.append, lambda tensor: tensor)
    with hooks, te.autocast(recipe=recipe):
        layer(x)
    return packed


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_bytes_kept_for_backward(recipe, frozen):
    layer = make(512, 256, bias=False)
    layer.weight.requires_grad_(not frozen)
    x, _ = inputs(512, layer)
    kept = sum(tensor.nbytes for tensor in kept_bytes(layer, x, recipe))
    assert kept <= (0 if frozen else 1.02 * x.numel())


def test_full_scales_are_kept_as_they_are():
    layer = make(512, 256, bias=False)
    x, _ = inputs(512, layer)
    (kept,) = kept_bytes(layer, x, Float8BlockScaling(use_f32_scales=True))
    assert kept.nbytes == x.numel() + x.numel() // 128 * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 512), (200, 272), (8, 16)], ids=str)
def test_scales_kept_as_bytes_change_no_gradient(shape, dtype):
    rows, width = shape
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(7)).mul(3).to(dtype)
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4, 1e-30, 5e4]
    for column, value in enumerate([*edges, float("inf"), float("nan")]):
        x[: (rows + 1) // 2, column] = value
        x[-1, column] = value
    x[:, 10] = info.smallest_normal / 8
    gradients = []
    for save_original_input in (False, True):  # True quantises again, with FP32 scales
        layer = make(width, 48, dtype, save_original_input=save_original_input)
        _, grad = inputs(rows, layer, dtype)
        step(layer, x, grad, Float8BlockScaling())
        gradients.append(layer.weight.grad)
    assert torch.equal(gradients[0].nan_to_num(nan=-1.5), gradients[1].nan_to_num(nan=-1.5))
    assert gradients[0].isfinite().sum() > gradients[0].numel() // 4


def test_a_deferred_weight_gradient_reads_scales_kept_as_bytes():
    layer = make(256, 48, delay_wgrad_compute=True)
    plain = make(256, 48)
    x, grad = inputs(128, layer)
    step(plain, x, grad, Float8BlockScaling())
    step(layer, x, grad, Float8BlockScaling())
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
