"""te_fast.pytorch.MoE as one program on the GPU: the bits of its parts, in poisoned memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
import te_fast.pytorch as te  # noqa: E402
from routed import ALL, KINDS, make, same_bits, step, tensors  # noqa: E402
from te_fast.experts.program import is_one_program  # noqa: E402

pytestmark = pytest.mark.gpu

if not is_one_program(make("cuda").experts):
    pytest.skip("needs kernels for the products of experts", allow_module_level=True)


def poison():
    """Leave bytes of 255, which are NaN in every type, in the memory that the next tensors get."""
    torch.cuda.synchronize()
    sizes = [1 << 25] * 4 + [1 << 20] * 64 + [1 << 12] * 64
    kept = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    del kept


def dirty_scratch(block, recipe):
    """Leave NaN in the program's own memory."""
    given = tensors(600, "cuda")
    given[0].fill_(float("nan"))
    given[1].fill_(float("nan"))
    step(block, given, recipe, as_program=True)


@pytest.mark.parametrize("options", [{}, {"ffn": 256}, {"ffn": 256, "interleave": 32}], ids=str)
@pytest.mark.parametrize("tokens", [1, 150, 1027])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_bits_of_the_parts(name, kind, tokens, options):
    """With the second width, the gradient of the activation is quantised as it is computed."""
    if tokens == 1 and kind != "even":
        return
    recipe, given = ALL[name](), tensors(tokens, "cuda", kind=kind)
    results = []
    for as_program in (True, False):
        block = make("cuda", **options)
        if as_program and name != "delayed":  # its maxima would come from the NaN
            dirty_scratch(block, recipe)
        runs = []
        for _ in range(3):  # the second is captured, the third replayed
            poison()
            runs += step(block, given, recipe, as_program=as_program)
        results.append(runs)
    assert same_bits(*results)


@pytest.mark.parametrize(
    "options", [{"bias": True}, {"delay_wgrad_compute": True}, {"activation": "srelu"}], ids=str
)
@pytest.mark.parametrize("name", ALL)
def test_bits_with_options(name, options):
    recipe, given = ALL[name](), tensors(300, "cuda")
    results = []
    for as_program in (True, False):
        block = make("cuda", **options)
        poison()
        results.append(step(block, given, recipe, as_program=as_program))
    assert same_bits(*results)


@pytest.mark.parametrize("name", ALL)
def test_near_the_host(name):
    """Sums in another order move one operand in thirty by a step of FP8; tests above compare parts bit for bit."""
    recipe = ALL[name]()
    on_host = step(make("cpu"), tensors(200, "cpu"), recipe, as_program=True)
    on_gpu = step(make("cuda"), tensors(200, "cuda"), recipe, as_program=True)
    for wanted, got in zip(on_host, on_gpu, strict=True):
        difference = (got.cpu().double() - wanted.double()).norm()
        assert difference <= 4e-2 * wanted.double().norm() + 1e-12


@pytest.mark.parametrize("name", ["high", "current", "block"])
def test_other_masks_in_the_same_memory(name):
    """Replays of the program's own graphs read the current masks."""
    recipe, block = ALL[name](), make("cuda")
    memory = tensors(256, "cuda")
    for kind in KINDS * 3:
        for own, new in zip(memory, tensors(256, "cuda", kind=kind), strict=True):
            own.copy_(new)
        mine = step(block, memory, recipe, as_program=True)
        theirs = step(block, memory, recipe, as_program=False)
        assert same_bits(mine, theirs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_nothing_waits_for_the_gpu():
    block, recipe = make("cuda"), ALL["current"]()
    x = torch.randn(256, 272, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run():
        with te.autocast(recipe=recipe):
            block(x).float().sum().backward()

    run()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
