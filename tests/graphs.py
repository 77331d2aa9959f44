"""A model in a graph beside the same model called eagerly: steps of training, bit for bit."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo.guards

import te_fast.pytorch as te
from te_fast.runtime.compiling import CAN_COMPILE

# torch empties the processor's caches for every graph to log the time of its guards: a tenth of a small graph's cost.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

needs_compile = pytest.mark.skipif(
    not CAN_COMPILE, reason="traces of torch before 2.8 do not read attributes of native objects"
)


def compiled(function: Any, **options: Any) -> Any:
    """Compile without a graph break; the compiler generates kernels only where a test asks for them."""
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


def refusal_of(function: Any, *arguments: Any) -> str:
    """The error of a compiled call with its causes: in old releases of torch only a cause has the message."""
    return error_of(compiled(function), *arguments)


def error_of(function: Any, *arguments: Any) -> str:
    """The error of a call with its causes."""
    with pytest.raises(Exception) as caught:
        function(*arguments)
    messages: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        messages.append(f"{error} {error!r}")
        error = error.__cause__ or error.__context__
    return "\n".join(messages)


def states_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Scales and histories of every layer and operation under delayed scaling."""
    found = []
    for module in model.modules():
        metas = [
            getattr(module, "fp8_meta", None) or {},
            *(getattr(module, "_fp8_metas", None) or {}).values(),
        ]
        for meta in metas:
            for key in ("scaling_fwd", "scaling_bwd"):
                if meta is not None and key in meta:
                    found += [meta[key].scale, meta[key].amax_history]
    return found


def region(recipe: Any) -> Any:
    """The autocast region of a recipe; none without one."""
    return nullcontext() if recipe is None else te.autocast(recipe=recipe)


def assert_trains_alike(
    model: torch.nn.Module,
    recipe: Any,
    forward: Any,
    *,
    rows: tuple[int, ...] = (16, 32, 48, 16),
    cols: int = 32,
    microbatches: tuple[bool | None, ...] = (None,),
    options: dict[str, Any] | None = None,
) -> None:
    """Train a copy by a compiled `forward(model, x, recipe, is_first_microbatch)`, beside the eager model.

    Outputs, gradients, ``main_grad``, scales and histories are compared after every step.
    """
    eager, graphed = model, copy.deepcopy(model)
    for module in (eager, graphed):
        for parameter in module.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad = torch.zeros_like(parameter)
    run = compiled(forward, **(options or {}))
    kind = next(model.parameters(), torch.empty(0))
    for count in rows:
        for is_first in microbatches:
            x = torch.randn(count, cols, dtype=kind.dtype, device=kind.device)
            inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
            y = forward(eager, inputs[0], recipe, is_first)
            z = run(graphed, inputs[1], recipe, is_first)
            assert torch.equal(y, z)
            dy = torch.randn_like(y)
            y.backward(dy)
            z.backward(dy)
            assert torch.equal(inputs[0].grad, inputs[1].grad)
        _step_alike(eager, graphed)


def _step_alike(eager: torch.nn.Module, graphed: torch.nn.Module) -> None:
    """Compare gradients and states, and step both models."""
    for (name, one), other in zip(eager.named_parameters(), graphed.parameters(), strict=True):
        grads = [getattr(parameter, "main_grad", parameter.grad) for parameter in (one, other)]
        assert (grads[0] is None) == (grads[1] is None), name
        if grads[0] is None:
            continue
        assert torch.equal(*grads), name
        with torch.no_grad():
            for parameter, grad in zip((one, other), grads, strict=True):
                parameter -= 0.1 * grad
                parameter.grad = None
    for one, other in zip(states_of(eager), states_of(graphed), strict=True):
        assert torch.equal(one, other)
