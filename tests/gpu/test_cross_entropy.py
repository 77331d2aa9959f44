"""The kernels of cross entropy on the GPU against FP64 logarithms of softmax."""

from __future__ import annotations

import pytest
import torch

from te_fast.pytorch.cross_entropy import parallel_cross_entropy
from te_fast.runtime import native

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def reference(logits, target, grad, smoothing, ignored=-100):
    wide = logits.double().requires_grad_()
    options = {"reduction": "none", "label_smoothing": smoothing, "ignore_index": ignored}
    losses = torch.nn.functional.cross_entropy(wide, target, **options)
    losses.backward(grad.double())
    return losses.detach(), wide.grad


def problem(rows, columns, dtype, shift=0):
    """Logits whose memory begins `shift` elements behind an aligned address, in memory that is poisoned around them."""
    generator = torch.Generator("cuda").manual_seed(rows + columns + shift)
    memory = torch.full((rows * columns + 32,), torch.nan, device="cuda", dtype=dtype)
    logits = memory[shift : shift + rows * columns].view(rows, columns)
    logits.copy_(5 * torch.randn(rows, columns, device="cuda", generator=generator))
    target = torch.randint(0, columns, (rows,), device="cuda", generator=generator)
    target[::7] = -100
    return logits, target, torch.randn(rows, device="cuda", generator=generator)


def check(logits, target, grad, smoothing, *, overwrites=False):
    before = logits.clone()
    wanted, gradient = reference(before, target, grad, smoothing)
    leaf = logits.detach().requires_grad_()
    given = leaf.view_as(leaf) if overwrites else leaf
    losses = parallel_cross_entropy(given, target, smoothing, overwrite_input=overwrites)
    torch.testing.assert_close(losses.double(), wanted, rtol=3e-6, atol=3e-6)
    (got,) = torch.autograd.grad(losses, given, grad)
    rounding = ROUNDING[logits.dtype]
    # A probability minus one is as exact as the probability.
    torch.testing.assert_close(got.double(), gradient, rtol=rounding, atol=1e-6)
    assert not got[target == -100].any()
    if overwrites:
        assert got.data_ptr() == logits.data_ptr()
    else:
        assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [1, 5, 8, 4095, 4096, 16384, 32000, 50257])
def test_rows_of_any_length(dtype, smoothing, columns):
    check(*problem(64, columns, dtype), smoothing)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [1, 3, 8])
@pytest.mark.parametrize("columns", [40, 20001])
def test_rows_that_begin_anywhere(dtype, shift, columns):
    check(*problem(9, columns, dtype, shift), 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [33, 32000])
def test_logits_overwritten_by_their_gradient(dtype, columns):
    check(*problem(50, columns, dtype), 0.0, overwrites=True)


def test_many_rows_of_few_columns():
    check(*problem(70000, 16, torch.bfloat16), 0.0)


def test_the_host_has_the_same_numbers():
    logits, target, grad = problem(33, 1000, torch.bfloat16)
    found = []
    for device in ("cuda", "cpu"):
        leaf = logits.to(device).detach().requires_grad_()
        losses = parallel_cross_entropy(leaf, target.to(device), 0.2)
        losses.backward(grad.to(device))
        found.append((losses.cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_odd_logits(smoothing):
    infinity, most = torch.inf, 1e33
    logits = torch.zeros(7, 2000, device="cuda")
    logits[0, 1000:] = -infinity
    logits[1] = -infinity
    logits[2, 1999] = infinity
    logits[3, 5] = torch.nan
    logits[4, 7], logits[4, 8] = most, -most
    logits[5] = -most
    logits[6, ::2] = -0.0
    target = torch.tensor([1, 0, 1, 0, 7, 2, 3], device="cuda")
    losses = parallel_cross_entropy(logits, target, smoothing)
    wanted, _ = reference(logits, target, torch.ones(7, device="cuda"), smoothing)
    torch.testing.assert_close(losses, wanted.float(), equal_nan=True)
    assert losses.isnan().tolist() == [False, True, True, True, False, False, False]


def test_a_target_outside_of_the_vocabulary_has_an_infinite_loss():
    logits = torch.randn(3, 64, device="cuda", requires_grad=True)
    losses = parallel_cross_entropy(logits, torch.tensor([64, -1, 3], device="cuda"))
    losses[2].backward()
    assert losses.isinf().tolist() == [True, True, False]
    assert not logits.grad[:2].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_parts_of_rows(smoothing):
    """What a rank knows of its columns, against FP64."""
    logits, _, _ = problem(40, 3001, torch.bfloat16)
    logits[3] = -torch.inf
    largest, sums, total = native.cross_entropy_part(logits, smoothing)
    wide = logits.double()
    most = wide.amax(1)
    base = most.masked_fill(most == -torch.inf, 0.0)[:, None]
    assert torch.equal(largest, most.float())
    torch.testing.assert_close(sums.double(), (wide - base).exp().sum(1), rtol=1e-6, atol=0.0)
    wanted = (wide - base).sum(1) if smoothing else torch.zeros_like(most)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-3)


def test_the_gradient_of_a_part():
    """A rank's columns of a vocabulary of 4000, whose targets may be elsewhere (-1)."""
    logits, target, grad = problem(40, 1000, torch.float32)
    target[target == -100] = -1
    largest = logits.amax(1) + 1.0  # another rank's
    log_sum = (logits - largest[:, None]).exp().sum(1).mul(3.0).log()
    vocabulary = torch.tensor(4000.0, device="cuda")
    found = torch.full_like(logits, torch.nan)
    statistics = torch.stack([largest, log_sum])
    given = (logits, target, statistics, grad, vocabulary, found, -(2**63), 0.2)
    native.cross_entropy_backward(*given)
    share = (logits.double() - largest[:, None] - log_sum[:, None]).exp() - 0.2 / 4000
    here = target >= 0
    share[here, target[here]] -= 0.8
    torch.testing.assert_close(found.double(), share * grad[:, None], rtol=1e-5, atol=1e-6)


def test_a_graph_of_the_users():
    logits, target, grad = problem(64, 32000, torch.bfloat16)
    leaf = logits.detach().requires_grad_()

    def step():
        losses = parallel_cross_entropy(leaf, target)
        return losses, torch.autograd.grad(losses, leaf, grad)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            losses, gradient = step()
    logits.mul_(0.5)
    graph.replay()
    wanted, wide = reference(logits, target, grad, 0.0)
    torch.testing.assert_close(losses.double(), wanted, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(gradient.double(), wide, rtol=2**-7, atol=1e-6)


def test_logits_take_no_memory_in_fp32():
    logits, target, _ = problem(2048, 32000, torch.bfloat16)
    leaf = logits.detach().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    parallel_cross_entropy(leaf, target, reduce_loss=True).backward()
    assert torch.cuda.max_memory_allocated() - before <= logits.nbytes + (4 << 20)
