"""Attention that is launched as learned from torch: torch's results, wherever tensors lie.

The first calls of a layer go through torch, later calls do not. Outputs are compared bit for bit. cuDNN's backward adds
in any order, so gradients are compared with those in FP64 of the same numbers, and may be as far away as torch's are.
"""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.attention import choice, learned
from te_fast.attention.learned import Kind, learn
from te_fast.common.recipe import DelayedScaling

pytestmark = pytest.mark.gpu

HIDDEN, HEADS = 512, 4
#: The call at which launches are learned, in these tests. Earlier ones go through torch.
CALLS = 4


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(learned, "CALLS", CALLS)
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(learned, "_learned", [])


def layer_of(**options):
    torch.manual_seed(0)
    given = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "fuse_qkv_params": True,
        "attn_input_format": "bshd",
        "params_dtype": torch.bfloat16,
        "qkv_weight_interleaved": False,
        "device": "cuda",
    }
    return te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, **given | options)


def tokens(*shape, seed=1, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, HIDDEN, generator=generator, device="cuda").to(dtype)
    return x.requires_grad_()


def poison():
    """Leave NaN in the memory that the next tensors get."""
    blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(16)]
    small = [torch.full((1 << 12,), float("nan"), device="cuda") for _ in range(64)]
    del blocks, small


def step(layer, x, **options):
    """One step at new addresses, on memory full of NaN: result, gradient of the input, gradients of the parameters."""
    keeper = torch.empty(int(torch.randint(1, 1 << 16, ())), device="cuda")
    x = x.detach().clone().requires_grad_()
    poison()
    y = layer(x, **options)
    poison()
    y.backward(torch.ones_like(y))
    grads = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    del keeper
    return y.detach(), x.grad, grads


def count():
    return dispatch.counters()["learned_attentions"]


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


CASES = {
    "bshd": ((2, 384), {}),
    "sbhd": ((256, 3), {"attn_input_format": "sbhd"}),
    "causal": ((2, 320), {"self_attn_mask_type": "causal"}),
    "odd length": ((1, 333), {"self_attn_mask_type": "causal"}),
    "short": ((4, 64), {}),
    "groups": ((2, 256), {"num_gqa_groups": 2}),
    "float16": ((2, 256), {"params_dtype": torch.float16}),
    "long": ((1, 2048), {"self_attn_mask_type": "causal"}),
}


@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_torch(case, rotates):
    shape, options = CASES[case]
    options = {"self_attn_mask_type": "no_mask"} | options
    layer = layer_of(**options)
    x = tokens(*shape, dtype=options.get("params_dtype", torch.bfloat16))
    given = {}
    if rotates:
        length = shape[0] if options.get("attn_input_format") == "sbhd" else shape[1]
        given["rotary_pos_emb"] = te.RotaryPositionEmbedding(HIDDEN // HEADS)(length).cuda()
    before = count()
    theirs = [step(layer, x, **given) for _ in range(CALLS - 1)]
    assert count() == before
    ours = [step(layer, x, **given)]
    before = count()
    ours += [step(layer, x, **given) for _ in range(3)]
    assert count() == before + 6, "the launches were not learned"
    spread = max(
        distance(a, b) for run in theirs[1:] for a, b in zip(run[2], theirs[0][2], strict=True)
    )
    for y, of_x, grads in ours:
        assert torch.equal(y, theirs[0][0])
        assert distance(of_x, theirs[0][1]) < 1e-2
        for mine, other in zip(grads, theirs[0][2], strict=True):
            assert torch.isfinite(mine).all()
            assert distance(mine, other) <= 4 * spread + 2e-3


@pytest.mark.parametrize("length", [128, 512])
def test_flash_attention_gives_its_results(length):
    layer = layer_of(self_attn_mask_type="causal")
    x = tokens(1, length)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        theirs = [step(layer, x) for _ in range(CALLS - 1)]
        # Whether the launches can be learned depends on the memory that torch's kernel asks for.
        ours = [step(layer, x) for _ in range(4)]
    for y, of_x, grads in ours:
        assert torch.equal(y, theirs[0][0])
        assert distance(of_x, theirs[0][1]) < 1e-2
        for mine, other in zip(grads, theirs[0][2], strict=True):
            assert distance(mine, other) < 1e-2


def test_regions_and_inference():
    layer = layer_of(self_attn_mask_type="causal")
    x = tokens(2, 256)

    def run():
        with torch.no_grad(), te.autocast(recipe=DelayedScaling()):
            poison()
            return layer(x)

    results = [run() for _ in range(CALLS + 1)]
    before = count()
    results += [run() for _ in range(3)]
    assert count() == before + 3
    # The scales settle in the first calls.
    assert torch.equal(results[-1], results[CALLS - 2])


def test_layers_share_launches_and_other_lengths_do_not():
    first, second = layer_of(), layer_of()
    x = tokens(2, 128)
    for _ in range(CALLS + 1):
        step(first, x)
    before = count()
    step(second, x)
    assert count() == before + 2
    step(first, tokens(2, 192))
    assert count() == before + 2


def test_users_graphs_contain_the_launches():
    layer = layer_of(self_attn_mask_type="causal")
    x = tokens(2, 256)
    for _ in range(CALLS + 2):
        step(layer, x)
    others = [tokens(2, 256, seed=seed) for seed in range(2, 5)]
    expected = [step(layer, other) for other in others]
    static, grad = x.detach().clone().requires_grad_(), torch.ones_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(static).backward(grad)
    torch.cuda.current_stream().wait_stream(stream)
    static.grad = None
    graph = torch.cuda.CUDAGraph()
    before = count()
    with torch.cuda.graph(graph):
        y = layer(static)
        y.backward(grad)
    assert count() == before + 2
    for other, (result, of_x, _) in zip(others, expected, strict=True):
        with torch.no_grad():
            static.copy_(other)
            static.grad.zero_()
            graph.replay()
        assert torch.equal(y, result)
        assert distance(static.grad, of_x) < 1e-2


def test_nothing_is_learned_under_capture():
    layer = layer_of()
    x = tokens(2, 96).detach()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(CALLS):  # the first call only decides how the next ones are called
            layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = layer(x)
    before = count()
    with torch.no_grad():
        expected = [layer(x) for _ in range(3)]
    assert count() > before, "the capture has settled the kind"
    graph.replay()
    assert all(torch.equal(y, other) for other in expected)


def test_saved_tensors_may_move():
    layer = layer_of(self_attn_mask_type="causal")
    x = tokens(2, 256)
    for _ in range(CALLS + 1):
        _, expected, _ = step(layer, x)
    before = count()
    with torch.autograd.graph.save_on_cpu():
        _, moved, _ = step(layer, x)
    assert count() == before + 2
    assert distance(moved, expected) < 1e-2

    def shifted(tensor):
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        return memory[1:].copy_(tensor.reshape(-1)).view(tensor.shape)

    with torch.autograd.graph.saved_tensors_hooks(shifted, lambda tensor: tensor):
        _, moved, _ = step(layer, x)
    assert distance(moved, expected) < 1e-2


def test_a_saved_tensor_that_was_written_raises():
    layer = layer_of()
    x = tokens(2, 128)
    for _ in range(CALLS + 1):
        step(layer, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor[:1]):
        y = layer(x)
        with pytest.raises(ValueError, match="saved-tensor hooks"):
            y.sum().backward()


def test_threads_and_streams():
    layers = [layer_of(self_attn_mask_type="causal") for _ in range(3)]
    x = tokens(2, 256)
    expected = step(layers[0], x)
    for _ in range(CALLS + 1):
        step(layers[0], x)
    failures = []

    def work(layer):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    y, of_x, _ = step(layer, x)
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(y, expected[0]) or distance(of_x, expected[1]) > 1e-2:
                        failures.append("another result")
        except Exception as error:
            failures.append(error)

    torch.cuda.synchronize()
    before = count()
    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert count() > before


def kind_of(layer, x):
    layer(x)
    return layer.__dict__["_known"]._between.uses._kind


def test_learning_leaves_random_numbers_and_memory_alone():
    layer = layer_of(self_attn_mask_type="causal")
    kind = kind_of(layer, tokens(2, 512))
    torch.cuda.synchronize()
    state, cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert learned._thread().run(lambda: learn(kind)) is not None
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    assert learned._thread().run(lambda: learn(kind)) is not None
    torch.cuda.synchronize()
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert torch.equal(cpu, torch.get_rng_state())
    assert torch.cuda.memory_reserved() <= reserved


def test_what_cannot_be_captured_is_not_learned():
    layer = layer_of()
    kind = kind_of(layer, tokens(2, 160))

    def waits(*given):
        torch.cuda.current_stream().synchronize()
        return kind.kernel.forward(*given)

    def fails(*given):
        raise RuntimeError("no such kernel")

    numbers = iter(range(100))

    def differs(q, *given):
        return kind.kernel.forward(q * (1 + next(numbers)), *given)

    for forward in (waits, fails, differs):
        kernel = kind.kernel._replace(forward=forward)
        assert (
            learned._thread().run(lambda kernel=kernel: learn(kind._replace(kernel=kernel))) is None
        )
    # The next call runs as before.
    step(layer, tokens(2, 160))


def test_a_trial_that_differs_is_not_learned(monkeypatch):
    layer = layer_of()
    kind = kind_of(layer, tokens(2, 224))
    monkeypatch.setattr(learned, "TOLERANCE", 0.0)
    assert learned._thread().run(lambda: learn(kind)) is None


def test_kinds_that_are_not_learned():
    layer = layer_of()
    kind = kind_of(layer, tokens(2, 128))
    assert kind.can_be_learned()
    assert not kind._replace(device=torch.device("cpu")).can_be_learned()
    assert not kind._replace(shape=torch.Size((64, 4096))).can_be_learned()
    assert isinstance(kind, Kind)
    before, dropped = count(), layer_of(attention_dropout=0.5)
    for _ in range(CALLS + 2):
        step(dropped, tokens(2, 128))
    assert count() == before


SCRIPT = """
import torch, te_fast.pytorch as te
from te_fast import dispatch
from te_fast.attention import learned
learned.CALLS = 2
layer = te.TransformerLayer(256, 512, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd",
                            params_dtype=torch.bfloat16, device="cuda")
x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
for _ in range(6):
    layer(x).sum().backward()
print(dispatch.counters()["learned_attentions"])
"""


@pytest.mark.parametrize(("setting", "learns"), [("1", True), ("0", False)])
def test_the_environment_turns_learning_off(setting, learns):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TE_FAST_LEARN": setting},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (int(run.stdout.splitlines()[-1]) > 0) is learns
