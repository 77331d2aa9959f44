"""Cross entropy against FP64 logarithms of softmax, on one rank and with a vocabulary that ranks share."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import te_fast.pytorch as te
from cross_entropy_rank import CASES, IGNORED, losses_of, problem
from selection import quickly
from te_fast.errors import (
    ArgumentError,
    ArgumentIndexError,
    DtypeError,
    ShapeError,
    UnsupportedError,
)
from te_fast.pytorch.cross_entropy import parallel_cross_entropy
from te_fast.runtime.compiling import CAN_COMPILE

TESTS = Path(__file__).parents[1]


def reference(logits, target, grad, case):
    """Losses, and the gradient of logits in the logits' type."""
    wide = logits.double().requires_grad_()
    smoothing, columns = case["label_smoothing"], logits.shape[-1]
    logs = wide - torch.logsumexp(wide, -1, keepdim=True)
    wanted = torch.nn.functional.one_hot(target, columns) * (1.0 - smoothing) + smoothing / columns
    losses = -torch.where(wanted > 0, logs * wanted, 0.0).sum(-1)
    counts = target != IGNORED
    losses = torch.where(counts, losses, 0.0)
    if case["reduce_loss"]:
        losses = (losses.sum() / counts.sum()).reshape(1)
    losses.backward((grad.sum().reshape(1) if case["reduce_loss"] else grad).double())
    return losses.detach(), wide.grad.to(logits.dtype)


def check(got, case):
    logits, target, grad = problem(case["dtype"], case["hidden"])
    losses, gradient = reference(logits, target, grad, case)
    assert got[0].dtype is torch.float32
    assert got[0].shape == losses.shape
    assert torch.allclose(got[0].double(), losses, rtol=1e-6, atol=1e-5)
    assert got[1].dtype is case["dtype"]
    tolerance = 2**-7 if case["dtype"] is torch.bfloat16 else 2e-4 if case["hidden"] else 1e-5
    assert torch.allclose(got[1].double(), gradient.double(), rtol=tolerance, atol=1e-6)
    assert not got[1][target == IGNORED].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_one_rank(case):
    check(losses_of(*problem(case["dtype"], case["hidden"]), case, None), case)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("ranks", quickly([2, 4], 2))
def test_a_vocabulary_that_ranks_share(fresh, tmp_path, ranks):
    program = (
        "import runpy, sys; sys.argv[1:] = {}; sys.path.insert(0, {!r}); "
        "runpy.run_module('cross_entropy_rank', run_name='__main__')"
    )
    arguments = [[str(rank), str(ranks), str(tmp_path)] for rank in range(ranks)]
    fresh.together(*(program.format(given, str(TESTS)) for given in arguments))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for case, *parts in zip(2 * CASES, *found, strict=True):
        losses = [part[0] for part in parts]
        assert all(torch.equal(losses[0], loss) for loss in losses)
        check((losses[0], torch.cat([part[1] for part in parts], -1)), case)


def test_nothing_but_ignored_targets():
    logits = torch.randn(3, 4, requires_grad=True)
    target = torch.full((3,), -100)
    loss = parallel_cross_entropy(logits, target, reduce_loss=True)
    loss.backward()
    assert loss.shape == (1,)
    assert loss.item() == 0.0
    assert not logits.grad.any()
    assert parallel_cross_entropy(torch.empty(0, 4), torch.empty(0, dtype=torch.int32)).shape == (
        0,
    )


def test_losses_have_the_shape_of_the_logits():
    logits, target = torch.randn(2, 3, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    assert parallel_cross_entropy(logits, target).shape == (2, 3)
    assert parallel_cross_entropy(logits, target, reduce_loss=True).shape == (1,)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_backward_keeps_no_gradient_and_rounds_last(smoothing):
    """The factor of a loss comes before the gradient is rounded to BF16."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 2, 7, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, 7, (4, 2), generator=generator)
    target[3, 1] = IGNORED
    factors = torch.rand(4, 2, generator=generator)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        losses = parallel_cross_entropy(logits, target, smoothing, ignore_idx=IGNORED)
    of_rows = [t.numel() for t in kept if t.dtype is not torch.bfloat16]
    assert [t.data_ptr() for t in kept if t.dtype is torch.bfloat16] == [logits.data_ptr()]
    assert sum(of_rows) == 3 * target.numel()
    case = {"label_smoothing": smoothing, "reduce_loss": False}
    for _ in range(2):
        (got,) = torch.autograd.grad(losses, logits, factors, retain_graph=True)
        _, wide = reference(logits.detach().float(), target, factors, case)
        assert torch.equal(got, wide.bfloat16())
        assert not got[3, 1].any()
    (gradient,) = torch.autograd.grad(losses, logits, factors, create_graph=True)
    with pytest.raises(UnsupportedError, match="parallel_cross_entropy: .* differentiated again"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [1, 7, 50257])
def test_rows_of_any_length(dtype, smoothing, columns):
    generator = torch.Generator().manual_seed(columns)
    logits = (6 * torch.randn(5, columns, generator=generator)).to(dtype)
    target = torch.randint(0, columns, (5,), generator=generator)
    target[3] = -100
    grad = torch.randn(5, generator=generator)
    leaf = logits.clone().requires_grad_()
    losses = parallel_cross_entropy(leaf, target, smoothing)
    losses.backward(grad)
    wide = logits.double().requires_grad_()
    options = {"reduction": "none", "label_smoothing": smoothing}
    wanted = torch.nn.functional.cross_entropy(wide, target, **options)
    wanted.backward(grad.double())
    assert torch.allclose(losses.double(), wanted, rtol=2e-6, atol=1e-6)
    rounding = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-8}[dtype]
    smallest = torch.finfo(dtype).smallest_normal if dtype is torch.float16 else 1e-7
    assert torch.allclose(leaf.grad.double(), wide.grad, rtol=rounding, atol=smallest)


def test_one_gradient_for_all_rows():
    """The gradient of a sum is one number for all rows, as a tensor without strides."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 40, generator=generator)
    target = torch.randint(0, 40, (6,), generator=generator)
    found = []
    for loss in (lambda t: t.sum(), lambda t: (t * torch.ones(6)).sum()):
        leaf = logits.clone().requires_grad_()
        loss(parallel_cross_entropy(leaf, target)).backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
    assert torch.allclose(found[0].sum(1), torch.zeros(6), atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_odd_logits(smoothing):
    """Minus infinity, infinity, NaN, numbers far apart, and rows of equal logits."""
    infinity, most = torch.inf, 1e37
    logits = torch.tensor(
        [
            [-infinity, 1.0, 2.0, -infinity],
            [-infinity] * 4,
            [infinity, 0.0, 0.0, 0.0],
            [0.0, torch.nan, -infinity, 0.0],
            [most, -most, 0.0, 1.0],
            [-most] * 4,
            [1e-45, -0.0, 0.0, -1e-45],
        ]
    )
    target = torch.tensor([1, 0, 1, 0, 0, 2, 3])
    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    losses = parallel_cross_entropy(leaf, target, smoothing)
    losses.sum().backward()
    wanted = torch.nn.functional.cross_entropy(
        wide, target, reduction="none", label_smoothing=smoothing
    )
    wanted.sum().backward()
    assert torch.allclose(losses, wanted.float(), rtol=1e-6, equal_nan=True)
    rows = [0, 4, 5, 6]  # torch's gradients of the others are NaN in other places
    assert torch.allclose(leaf.grad[rows], wide.grad.float()[rows], atol=1e-7)
    assert leaf.grad[1:4].isnan().any(1).all()


def test_logits_that_change_before_backward_are_noticed():
    logits = torch.randn(3, 4).requires_grad_() * 1.0
    losses = parallel_cross_entropy(logits, torch.tensor([0, 1, 2]))
    logits.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_strided_logits_of_other_types(dtype):
    generator = torch.Generator().manual_seed(6)
    base = torch.randn(3, 9, 2, generator=generator).to(dtype)
    target = torch.randint(0, 9, (3, 2), generator=generator)
    case = {"label_smoothing": 0.1, "reduce_loss": False}
    leaf = base.clone().requires_grad_()
    losses = parallel_cross_entropy(leaf.transpose(1, 2), target, 0.1, ignore_idx=IGNORED)
    losses.backward(torch.ones(3, 2))
    expected, gradient = reference(base.transpose(1, 2), target, torch.ones(3, 2), case)
    assert torch.allclose(losses.double(), expected, atol=1e-6)
    assert leaf.grad.dtype is dtype
    assert torch.allclose(leaf.grad.transpose(1, 2).double(), gradient.double(), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_logits(dtype):
    target = torch.tensor([0, 5, IGNORED])
    logits = torch.randn(6, 3).to(dtype).requires_grad_()
    rows = logits.detach().t().contiguous().requires_grad_()
    for leaf, given in ((logits, logits.t()), (rows, rows)):
        parallel_cross_entropy(given, target, 0.1, ignore_idx=IGNORED).sum().backward()
        assert leaf.grad is not None
    assert torch.equal(logits.grad.t(), rows.grad)


def test_transforms_allocate_the_gradient():
    logits, target = torch.randn(3, 4), torch.tensor([0, 1, -100])
    kept = logits.clone()
    found, known = (
        torch.func.grad(lambda x, f=f: f(x, target).sum())(logits)
        for f in (
            partial(parallel_cross_entropy, overwrite_input=True),
            partial(torch.nn.functional.cross_entropy, reduction="none"),
        )
    )
    torch.testing.assert_close(found, known)
    assert torch.equal(logits, kept)


@pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_any_number_of_rows(strict):
    class Model(torch.nn.Module):
        def forward(self, logits, target):
            return parallel_cross_entropy(logits, target, 0.1)

    logits, target = torch.randn(4, 2, 16), torch.randint(0, 16, (4, 2))
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    program = torch.export.export(
        Model(), (logits, target), dynamic_shapes=(rows, rows), strict=strict
    )
    for given in ((logits, target), (logits[:3], target[:3])):
        torch.testing.assert_close(program.module()(*given), Model()(*given))


def test_without_gradients_nothing_is_kept():
    logits, target = torch.randn(3, 4), torch.tensor([0, -100, 2])
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    assert torch.equal(parallel_cross_entropy(logits, target), expected)
    with torch.no_grad():
        found = parallel_cross_entropy(logits.requires_grad_(), target)
    assert torch.equal(found, expected)
    assert not found.requires_grad


def test_a_logit_that_is_nan_stays_in_its_row():
    logits = torch.randn(3, 4)
    logits[1, 2] = torch.nan
    logits.requires_grad_()
    losses = parallel_cross_entropy(logits, torch.tensor([0, 1, 2]))
    losses.sum().backward()
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.grad.isnan().any(1).tolist() == [False, True, False]


def test_targets_made_in_inference_mode():
    with torch.inference_mode():
        target = torch.tensor([0, 1, 2])
    logits = torch.randn(3, 4, requires_grad=True)
    wanted = torch.nn.functional.cross_entropy(logits, target.clone(), reduction="none")
    losses = parallel_cross_entropy(logits, target)
    losses.sum().backward()
    torch.testing.assert_close(losses, wanted)
    assert logits.grad.any()


def test_the_old_name_of_the_logits():
    logits, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.warns(FutureWarning, match="give inp"):
        old = te.parallel_cross_entropy(None, target, _input=logits)
    assert torch.equal(old, te.parallel_cross_entropy(logits, target))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"\[2, 3, 4\].*\[2, 4\]"):
        parallel_cross_entropy(torch.ones(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(DtypeError, match="float32"):
        parallel_cross_entropy(torch.ones(2, 4), torch.ones(2))
    with pytest.raises(DtypeError, match="int64"):
        parallel_cross_entropy(torch.ones(2, 4, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    with pytest.raises(DtypeError, match="got list and Tensor"):
        parallel_cross_entropy([1.0], torch.zeros(1, dtype=torch.long))
    with pytest.raises(ArgumentError, match="label_smoothing must be from 0 to 1, got 2"):
        parallel_cross_entropy(torch.ones(2, 4), torch.zeros(2, dtype=torch.long), 2.0)
    with pytest.raises(DtypeError, match="label_smoothing must be a number, got NoneType"):
        parallel_cross_entropy(torch.ones(2, 4), torch.zeros(2, dtype=torch.long), None)
    with pytest.raises(DtypeError, match="ignore_idx must be an integer, got NoneType"):
        parallel_cross_entropy(torch.ones(1, 4), torch.zeros(1, dtype=torch.long), ignore_idx=None)
    with pytest.raises(DtypeError, match="ignore_idx must be an integer, got Tensor"):
        parallel_cross_entropy(
            torch.ones(1, 4), torch.zeros(1, dtype=torch.long), ignore_idx=torch.tensor(3.0)
        )
    with pytest.raises(ArgumentError, match="ignore_idx must be an integer of 64 bits, got 9223"):
        parallel_cross_entropy(torch.ones(1, 4), torch.zeros(1, dtype=torch.long), ignore_idx=2**63)
    with pytest.raises(DtypeError, match="complex64"):
        parallel_cross_entropy(torch.ones(2, 4), torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("target", [4, -1])
def test_a_target_outside_of_the_vocabulary_is_refused(target, grad):
    logits = torch.ones(1, 4, requires_grad=grad)
    with pytest.raises(ArgumentIndexError, match="targets must be from 0 to below the 4 columns"):
        parallel_cross_entropy(logits, torch.tensor([target]))


def test_a_vocabulary_of_nothing():
    logits = torch.empty(2, 0, requires_grad=True)
    parallel_cross_entropy(logits, torch.full((2,), -100)).sum().backward()
    assert logits.grad.shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduce", [False, True])
def test_logits_are_overwritten_by_their_gradient(dtype, smoothing, reduce):
    generator = torch.Generator().manual_seed(7)
    logits = (4 * torch.randn(3, 5, 33, generator=generator)).to(dtype)
    target = torch.randint(0, 33, (3, 5), generator=generator)
    target[1, 2] = IGNORED
    grad = torch.rand((), generator=generator).expand(3, 5)
    case = {"label_smoothing": smoothing, "reduce_loss": reduce}
    losses, wanted = reference(logits, target, grad / 15 if reduce else grad, case)
    leaf = logits.clone().requires_grad_()
    inp = leaf * 1.0
    got = parallel_cross_entropy(inp, target, ignore_idx=IGNORED, overwrite_input=True, **case)
    assert torch.allclose(got.double(), losses, rtol=1e-6, atol=1e-5)
    assert torch.equal(inp, logits)
    (gradient,) = torch.autograd.grad(
        got, inp, ((grad.sum() / 15).reshape(1) if reduce else grad), retain_graph=True
    )
    assert gradient.data_ptr() == inp.data_ptr()
    tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-5
    assert torch.allclose(gradient.double(), wanted.double(), rtol=tolerance, atol=1e-6)
    assert not gradient[1, 2].any()
    with pytest.raises(RuntimeError, match="overwrite_input"):
        torch.autograd.grad(got.sum(), inp)


def test_what_is_overwritten_is_contiguous_and_noticed_by_others():
    logits = torch.randn(8, 2, 3).permute(1, 2, 0).requires_grad_()
    target = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="overwrite_input=True needs contiguous logits"):
        parallel_cross_entropy(logits, target, overwrite_input=True)
    inp = torch.randn(2, 3, 8).requires_grad_() * 1.0
    other = (inp**2).sum()
    parallel_cross_entropy(inp, target, overwrite_input=True).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
