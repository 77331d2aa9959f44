"""Gradients of experts with separate ``main_grad`` buffers, on the GPU: in the buffers' type, exact where sums are."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import te_fast.pytorch as te  # noqa: E402
from te_fast.common.recipe import DelayedScaling  # noqa: E402

pytestmark = pytest.mark.gpu

SIZE = 256


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_gradients_are_rounded_to_the_type_of_main_grad_alone(fp8, later):
    counts = [512, 0, 384]
    random = torch.Generator("cuda").manual_seed(5)
    options = {"generator": random, "device": "cuda"}
    x = torch.randint(-7, 8, (sum(counts), SIZE), **options).bfloat16().requires_grad_()
    dy = torch.randint(1, 4, (sum(counts), SIZE), **options).bfloat16()
    layer = te.GroupedLinear(
        len(counts),
        SIZE,
        SIZE,
        bias=False,
        params_dtype=torch.bfloat16,
        fuse_wgrad_accumulation=True,
        delay_wgrad_compute=later,
    )
    buffers = torch.arange(3 * SIZE * SIZE, dtype=torch.float32, device="cuda") % 7
    buffers = list(buffers.view(3, SIZE, SIZE))[::-1]  # the order of Megatron-LM's buffers
    expected = []
    for number, (a, b) in enumerate(zip(x.detach().split(counts), dy.split(counts), strict=True)):
        getattr(layer, f"weight{number}").main_grad = buffers[number]
        expected.append(buffers[number].double() + b.double().T @ a.double())
    assert (expected[0] != expected[0].bfloat16()).any()
    # The memory that the gradient may get is not zero.
    poison = torch.full((3, SIZE, SIZE), float("nan"), device="cuda")
    del poison
    with te.autocast(enabled=fp8, recipe=DelayedScaling()):
        y = layer(x, counts)
    y.backward(dy)
    if later:
        layer.backward_dw()
    for number, sums in enumerate(expected):
        assert torch.equal(getattr(layer, f"weight{number}").main_grad.double(), sums)
