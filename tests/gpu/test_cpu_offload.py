"""Saved tensors in pinned memory: gradients are unchanged, memory is less, copies run on a stream of their own."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.offload.kept import Kept, Stream

pytestmark = pytest.mark.gpu
ROWS, SIZE, LAYERS = 4096, 1024, 8
RECIPES = [None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()]


def layers():
    torch.manual_seed(3)
    return [
        te.LayerNormMLP(SIZE, 4 * SIZE, params_dtype=torch.bfloat16, device="cuda")
        for _ in range(LAYERS)
    ]


def step(model, recipe, context=None, synchronize=None):
    """Gradients of a step, and the largest memory between forward and backward."""
    torch.manual_seed(4)
    x = start = torch.randn(ROWS, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        for layer in model:
            if context is None:
                x = layer(x)
                continue
            with context:
                x = layer(x)
            x = synchronize(x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    x.float().square().mean().backward()
    grads = [start.grad, *(parameter.grad for layer in model for parameter in layer.parameters())]
    for layer in model:
        layer.zero_grad(set_to_none=True)
    return grads, held


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_gradients_and_memory(recipe, retain):
    plain, offloaded = layers(), layers()
    context, synchronize = te.get_cpu_offload_context(
        True, LAYERS - 2, LAYERS, retain_pinned_cpu_buffers=retain
    )
    for _ in range(3):
        wanted, most = step(plain, recipe)
        got, least = step(offloaded, recipe, context, synchronize)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    saved = most - torch.cuda.memory_allocated()
    assert least < most - 0.5 * saved


def test_by_hand_on_a_stream_of_the_users():
    stream = torch.cuda.Stream()
    plain, offloaded = layers(), layers()
    context, synchronize, controller = te.get_cpu_offload_context(
        True, model_layers=LAYERS, manual_synchronization=True, offload_stream=stream
    )
    wanted, _ = step(plain, None)
    torch.manual_seed(4)
    x = start = torch.randn(ROWS, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for number, layer in enumerate(offloaded):
        with context:
            x = layer(x)
        x = synchronize(x)
        controller.start_offload_layer(number)
    for number in range(LAYERS):
        controller.release_activation_forward_gpu_memory(number)
    for number in reversed(range(LAYERS)):
        controller.start_reload_layer(number)
    x.float().square().mean().backward()
    assert torch.equal(start.grad, wanted[0])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_all_that_attention_saves_leaves_the_device(recipe):
    """Queries, keys and values are parts of one tensor; its output is also the input of the projection."""
    torch.manual_seed(3)
    attention = te.MultiheadAttention(
        SIZE, 16, attention_dropout=0.0, params_dtype=torch.bfloat16, device="cuda"
    )
    context, synchronize, controller = te.get_cpu_offload_context(
        True, model_layers=1, manual_synchronization=True
    )
    found = []
    for offloads in (None, False, True):  # the first step makes what layers keep
        x = torch.ones(ROWS // 8, 8, SIZE, device="cuda", dtype=torch.bfloat16).requires_grad_()
        x.data.normal_(generator=torch.Generator("cuda").manual_seed(4))
        with te.autocast(enabled=recipe is not None, recipe=recipe), context:
            y = attention(x)
        y = synchronize(y)
        before = torch.cuda.memory_allocated()
        if offloads:
            controller.start_offload_layer(0)
            controller.release_activation_forward_gpu_memory(0)
            # Queries, keys, values and the output. The caller holds x and y.
            assert torch.cuda.memory_allocated() <= before - 4 * x.nbytes
            controller.start_reload_layer(0)
            assert torch.cuda.memory_allocated() <= before + x.nbytes
        y.float().square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in attention.parameters())])
        attention.zero_grad(set_to_none=True)
    # Attention's kernel for gradients adds in any order, and delayed scaling's scales differ from step to step.
    for kept, moved in zip(found[1], found[2], strict=True):
        assert (kept.double() - moved.double()).norm() <= 0.05 * kept.double().norm()


@pytest.mark.parametrize("way", ["error", "release", "drop"])
def test_memory_that_is_still_written_is_used_again_only_behind_the_copy(way):
    """As after an error in a backward that has begun to copy back, or if the caller releases such memory."""
    size = 64 << 20
    for number in range(10):
        memory = Kept(torch.full((size,), number, dtype=torch.uint8, device="cuda"), Stream())
        memory.watch(memory._on_device)
        assert memory.start_offload()
        memory.release()
        torch.cuda.synchronize()
        memory.start_reload()
        place = memory._on_device.data_ptr()
        if way == "error":
            del memory
        elif way == "release":
            memory.release()
        else:
            with torch.cuda.stream(torch.cuda.Stream()):
                memory.drop()
        other = torch.full((size,), 100, dtype=torch.uint8, device="cuda")
        assert other.data_ptr() == place
        torch.cuda.synchronize()
        assert bool((other == 100).all())
        del other
