"""The router of te_fast.pytorch.MoE inside of the block's program on the GPU, in poisoned memory and in graphs."""

from __future__ import annotations

import copy
import sys
from itertools import product
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
from recipes import RECIPES  # noqa: E402
from routed import same_bits  # noqa: E402
from routed_blocks import (  # noqa: E402
    ALL,
    WAYS,
    logits_and_gradients,
    loss_and_gradients,
    make,
    parts,
    reference,
    tensors,
)
from te_fast.experts.program import is_one_program  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = (128, 96, 16, 4)

if not is_one_program(make("cuda", torch.bfloat16, SIZES).experts):
    pytest.skip("needs kernels for the products of experts", allow_module_level=True)


def poison():
    """Leave bytes of 255, which are NaN in every type, in the memory that the next tensors get."""
    torch.cuda.synchronize()
    sizes = [1 << 25] * 4 + [1 << 20] * 64 + [1 << 12] * 64
    kept = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    del kept


def error_of(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(1, (128, 96, 8, 2)), (257, (256, 64, 33, 3)), (1000, (512, 32, 256, 4))],
    ids=str,
)
@pytest.mark.parametrize("way", ["softmax", "biased"])
def test_values_gradients_and_bits(way, tokens, sizes, dtype):
    block = make("cuda", dtype, sizes, aux_loss_coeff=0.1, **WAYS[way])
    x, grad = tensors((tokens,), dtype, "cuda", sizes[0])
    y, loss, grads = loss_and_gradients(block, x, grad)
    for _ in range(4):  # the second is captured, later ones are replayed
        poison()
        again, loss_again, grads_again = loss_and_gradients(block, x, grad)
        assert same_bits([again], [y])
        assert torch.equal(loss_again, loss)
        assert all(torch.equal(grads_again[key], grads[key]) for key in grads)
    wanted, wanted_loss, counts, leaves = reference(block, x)
    ((wanted * grad.double()).sum() + wanted_loss).backward()
    if block.expert_bias is not None:
        assert torch.equal(block.tokens_per_expert, 5 * counts)
    near, near_grads = (1e-4, 1e-4) if dtype == torch.float32 else (2e-2, 4e-2)
    assert error_of(y, wanted.detach()) < near
    torch.testing.assert_close(loss.double(), wanted_loss.detach(), rtol=1e-4, atol=0)
    for key in ("router", "x"):
        assert error_of(grads[key], leaves[key].grad) < near_grads


# Experts in FP32 have no kernels outside of FP8, so that their block is no program.
PROGRAMS = [*product(ALL, [torch.bfloat16]), *product(RECIPES, [torch.float32])]


@pytest.mark.parametrize("way", ["softmax", "biased groups"])
@pytest.mark.parametrize(("name", "dtype"), PROGRAMS, ids=str)
def test_bits_of_the_parts(name, dtype, way):
    """Result and experts have the bits of a program that gets the router's mask; the router's sums are near FP64."""
    block = make("cuda", dtype, SIZES, aux_loss_coeff=0.1, **WAYS[way])
    other = copy.deepcopy(block)
    x, grad = tensors((150,), dtype, "cuda", SIZES[0])
    for _ in range(3):
        poison()
        y, logits, grads, grad_logits = logits_and_gradients(block, x, grad, ALL[name]())
        other._router = block._router
        wanted, theirs = parts(other, logits, x, grad, grad_logits, ALL[name]())
        experts = [key for key in grads if key.startswith("experts")]
        mine = [y, *[grads[key] for key in experts]]
        assert same_bits(mine, [wanted, *[theirs[key] for key in experts]])
        assert error_of(grads["router"], theirs["router"]) < 1e-5
        # Rounded once to the tokens' type.
        rtol = 1.01 * 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(grads["x"].double(), theirs["x"], rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_router_of_another_type(dtype):
    block = make("cuda", sizes=SIZES, **WAYS["biased"]).to(dtype)
    x, grad = tensors((200,), dtype, "cuda", SIZES[0])
    poison()
    _, _, grads = loss_and_gradients(block, x, grad)
    assert grads["router"].dtype == dtype
    wanted, _, _, leaves = reference(block, x)
    wanted.backward(grad.double())
    assert error_of(grads["router"], leaves["router"].grad) < 2e-2


@pytest.mark.parametrize("name", ALL)
def test_near_the_host(name):
    """Sums in another order move one operand in thirty by a step of FP8."""
    steps = []
    for device in ("cpu", "cuda"):
        block = make(device, torch.bfloat16, SIZES, aux_loss_coeff=0.1, **WAYS["biased"])
        x, grad = tensors((200,), torch.bfloat16, device, SIZES[0])
        y, loss, grads = loss_and_gradients(block, x, grad, ALL[name]())
        steps.append({"y": y, "loss": loss} | grads)
    for key, wanted in steps[0].items():
        assert error_of(steps[1][key].cpu(), wanted.double()) < 4e-2


# Eager steps run on another stream than the capture, whose nodes accumulate on theirs.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("way", ["softmax", "biased groups"])
@pytest.mark.parametrize("name", ["high", "current", "block"])
def test_replays_other_counts_with_eagers_bits(name, way):
    block = make("cuda", torch.bfloat16, SIZES, aux_loss_coeff=0.1, **WAYS[way])
    eager = copy.deepcopy(block)
    memory, grad = tensors((256,), torch.bfloat16, "cuda", SIZES[0])

    def step(model, x):
        y, loss, grads = loss_and_gradients(model, x, grad, ALL[name]())
        return [y, loss.view(1), *grads.values()]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(block, memory)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(block, memory)
    if block.expert_bias is not None:
        block.tokens_per_expert.zero_()
    for seed in range(20):
        torch.manual_seed(seed)
        with torch.no_grad():
            memory.copy_(torch.randn_like(memory) * (1 + seed))
            memory[: 8 * seed] = memory[0]  # many tokens with the same experts
        graph.replay()
        assert same_bits(captured, step(eager, memory))
    if block.expert_bias is not None:
        assert torch.equal(block.tokens_per_expert, eager.tokens_per_expert)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_nothing_waits_for_the_gpu():
    block = make("cuda", torch.bfloat16, SIZES, aux_loss_coeff=0.1, **WAYS["biased"])
    x, grad = tensors((256,), torch.bfloat16, "cuda", SIZES[0])
    loss_and_gradients(block, x, grad, ALL["current"]())
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        loss_and_gradients(block, x, grad, ALL["current"]())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow():
    block = make("cuda", torch.bfloat16, SIZES, aux_loss_coeff=0.1, **WAYS["biased"])
    x, grad = tensors((256,), torch.bfloat16, "cuda", SIZES[0])
    used = []
    for _ in range(8):
        loss_and_gradients(block, x, grad, ALL["block"]())
        used.append(torch.cuda.memory_allocated())
    assert used[3] == used[-1]
