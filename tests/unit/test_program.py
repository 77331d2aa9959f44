"""Native op programs against torch.nn.functional, on the host backend."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fast.pytorch as te
from chains import CHAINS, case, results
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import DtypeError, ShapeError, StateError
from te_fast.pytorch import _ops

RECIPES = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling]


@pytest.mark.parametrize("name", CHAINS)
def test_high_precision_is_torch(name: str) -> None:
    chain, x, extras, grads = case(CHAINS[name])
    ours = results(chain, chain, x, extras, grads)
    theirs = results(chain, chain.reference, x, extras, grads)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [name for name in CHAINS if "linear" in str(CHAINS[name])])
def test_fp8_is_torch_to_fp8_rounding(name: str, recipe: Any) -> None:
    chain, x, extras, grads = case(CHAINS[name])
    if recipe is DelayedScaling:  # the first step measures
        with te.autocast(recipe=recipe()):
            results(chain, chain, x, extras, grads)
    with te.autocast(recipe=recipe()):
        ours = results(chain, chain, x, extras, grads)
    theirs = results(chain, chain.reference, x, extras, grads)
    for got, expected in zip(ours, theirs, strict=True):
        # E5M2 gradients carry 2 bits: 6 % per factor, up to three GEMMs in a row; the sign that a ReLU
        # sees may flip.
        assert (got - expected).norm() <= (0.2 if name == "relu" else 0.16) * expected.norm()


@pytest.mark.parametrize("name", ["three", "residual", "branch_in_place"])
def test_frozen_parts_get_no_gradient_and_others_the_same(name: str) -> None:
    chain, x, extras, grads = case(CHAINS[name])
    full = results(chain, chain, x, extras, grads)
    first = next(chain.parameters())
    first.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    chain.zero_grad(set_to_none=True)
    out = chain(leaf, *[extra.clone() for extra in extras])
    outputs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(outputs, [grad.clone() for grad in grads[: len(outputs)]])
    assert first.grad is None
    torch.testing.assert_close(leaf.grad, full[len(outputs)])
    for parameter, expected in zip(list(chain.parameters())[1:], full[-1:0:-1], strict=False):
        assert parameter.grad is not None
        assert expected.numel()


class Packed:
    """Counts what is packed, and hands copies on."""

    count = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor.clone()


def test_retain_graph_saved_tensor_hooks_and_checkpoint_change_nothing() -> None:
    chain, x, _, grads = case(CHAINS["three"])
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        with te.autocast(recipe=recipe):
            expected = results(chain, chain, x, [], grads)
            leaf = x.clone().requires_grad_()
            y = chain(leaf)
            y.backward(grads[0], retain_graph=True)
            once = leaf.grad.clone()  # type: ignore[union-attr]
            y.backward(grads[0])
            torch.testing.assert_close(leaf.grad, 2 * once, rtol=0, atol=0)
            torch.testing.assert_close(once, expected[1], rtol=0, atol=0)
            pack = Packed()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                got = results(chain, chain, x, [], grads)
            assert pack.count
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            for reentrant in (True, False):
                got = results(
                    chain,
                    lambda t, mode=reentrant: checkpoint(chain, t, use_reentrant=mode),
                    x,
                    [],
                    grads,
                )
                torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_weight_is_quantised_once_and_again_after_a_change() -> None:
    chain, x, _, _ = case(CHAINS["three"])

    def casts(first: bool | None = None) -> int:
        before = te_counters()["weight_casts"]
        with te.autocast(recipe=Float8CurrentScaling()), torch.no_grad():
            chain(x, first=first)
        return te_counters()["weight_casts"] - before

    assert casts() == 3
    assert casts() == 0
    with torch.no_grad():
        chain.p2.add_(1.0)
    assert casts() == 1
    assert casts(first=True) == 3
    assert casts(first=False) == 0
    chain.p0.data = chain.p0.data.clone()
    assert casts() == 1


def te_counters() -> dict[str, int]:
    return dict(_ops.native.counters())


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_main_grad_and_delayed_weight_gradients(recipe: Any) -> None:
    chain, x, _, grads = case(CHAINS["three"])
    enabled = recipe is not None
    region = {"enabled": enabled, "recipe": recipe() if enabled else None}
    if recipe is DelayedScaling:
        with te.autocast(**region):
            results(chain, chain, x, [], grads)
    with te.autocast(**region):
        expected = results(chain, chain, x, [], grads)
    weights = [chain.p0, chain.p2, chain.p4]
    wanted = [expected[index].clone() for index in (2, 4, 5)]
    for handle, weight in zip(chain.handles, weights, strict=True):
        handle.fuse_wgrad_accumulation = True
        weight.main_grad = torch.ones(weight.shape, dtype=torch.float32)
    chain.zero_grad(set_to_none=True)
    with te.autocast(**region):
        chain(x).backward(grads[0])
    for weight, grad in zip(weights, wanted, strict=True):
        assert weight.grad is None
        # Delayed scales moved between the two steps.
        bound = 0.16 if recipe is DelayedScaling else 1e-6
        assert (weight.main_grad - 1.0 - grad).norm() <= bound * grad.norm()
    if recipe is DelayedScaling:
        return  # scales have moved; what follows compares bits
    for handle in chain.handles:
        handle.fuse_wgrad_accumulation = False
        handle.delay_wgrad_compute = True
    chain.zero_grad(set_to_none=True)
    with te.autocast(**region):
        chain(x).backward(grads[0])
    gc.collect()
    for handle, weight, grad in zip(chain.handles, weights, wanted, strict=True):
        assert weight.grad is None
        assert handle.deferred_count() == 1
        got = _ops.program_backward_dw(handle, weight, False)
        torch.testing.assert_close(got, grad, rtol=0, atol=0)
    with pytest.raises(StateError, match="without a backward"):
        _ops.program_backward_dw(chain.handles[0], weights[0], False)


def test_programs_are_kept_per_key_and_explained() -> None:
    chain, x, _, grads = case(CHAINS["three"])
    with torch.no_grad():
        chain(x)
        chain(x)
    assert chain.program.plan_count() == 1
    results(chain, chain, x, [], grads)
    with te.autocast(recipe=Float8CurrentScaling()):
        results(chain, chain, x, [], grads)
    assert chain.program.plan_count() == 3
    plans = chain.program.explain()
    assert [text for text, _ in plans[0]["forward"]] == ["gemm + bias", "gemm", "gemm + bias"]
    assert plans[0]["backward"] == []
    assert "cast + transpose" in [text for text, _ in plans[2]["forward"]]
    chain.program.drop_plans()
    assert chain.program.plan_count() == 0


def test_zero_rows_have_empty_outputs_and_zero_gradients() -> None:
    chain, x, _, _ = case(CHAINS["three"])
    leaf = x[:, :0].clone().requires_grad_()
    y = chain(leaf)
    assert y.shape == (2, 0, 32)
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape
    assert all(p.grad is not None and not p.grad.any() for p in chain.parameters())


def test_strided_inputs_and_parameters_work() -> None:
    chain, x, _, grads = case(CHAINS["three"])
    expected = results(chain, chain, x, [], grads)
    strided = torch.empty(2, x.shape[1], 64)[..., ::2]
    strided.copy_(x)
    chain.p0 = torch.nn.Parameter(chain.p0.detach().t().contiguous().t())
    got = [chain(strided), expected[0]]
    torch.testing.assert_close(got[0], got[1])


def test_bad_input_is_named() -> None:
    chain, x, extras, _ = case(CHAINS["add"])
    with pytest.raises(ShapeError, match=r"must be 32 as op 0: linear takes it"):
        chain(x[..., :31], *extras)
    with pytest.raises(ValueError, match="expected 1 extra inputs, got 0"):
        chain(x)
    with pytest.raises(ShapeError, match="op 1: add"):
        chain(x, extras[0][..., :8])
    with pytest.raises(DtypeError, match="op 1: add"):
        chain(x, extras[0].half())
    chain.program.strict_types = True
    chain.program.drop_plans()
    with pytest.raises(TypeError, match="parameter p0"):
        chain(x.half(), extras[0].half())
    with (
        te.autocast(recipe=Float8CurrentScaling()),
        pytest.raises(ValueError, match=r"0: linear: .*multiple of 8"),
    ):
        chain(x[:, :5], extras[0][:, :5])


def test_a_weight_changed_before_backward_is_refused() -> None:
    chain, x, _, grads = case(CHAINS["three"])
    with te.autocast(recipe=Float8CurrentScaling()):
        y = chain(x.clone().requires_grad_())
    with torch.no_grad():
        chain.p2.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grads[0])


def test_differentiating_twice_raises() -> None:
    chain, x, _, _ = case(CHAINS["linear"])
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(chain(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_torch_autocast_sets_the_type() -> None:
    chain, x, _, grads = case(CHAINS["three"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = chain(x)
        expected = chain.reference(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected.float(), rtol=0.05, atol=0.05)
    y.backward(grads[0].bfloat16())
    assert chain.p0.grad is not None
    assert chain.p0.grad.dtype == torch.float32
