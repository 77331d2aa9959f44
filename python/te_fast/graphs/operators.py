"""Programs as operators of a graph.

A program is one operator, its backward another. Both take tensors and return new ones. State that a graph must know
of is an argument that an operator writes to: maxima of delayed scaling, memory of quantised weights that are kept,
``main_grad``. A call without such state is an operator without side effects, which a compiler may drop or merge.

Everything else about a call is one native object, the ``TracedCall`` that was made when the call was traced. Graphs
name it by its text, which is made of its content. Sizes of results follow from it and the number of rows, so that
tracing runs no kernel. Tensors of operators are two-dimensional, rows of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from te_fast.errors import ShapeError, StateError, UnsupportedError
from te_fast.graphs.region import entered, key_of_region, recipe_of
from te_fast.graphs.traced import Facts, Traced, calls, facts_of, traced_of
from te_fast.runtime import native
from te_fast.runtime.capturing import update_scales_behind_backward
from te_fast.runtime.delayed import native_recipe
from te_fast.runtime.main_grad import main_grad_of

Tensors = Sequence[torch.Tensor]

_library = torch.library.Library("te_fast", "FRAGMENT")


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph records what is done to a tensor now: its replays run nothing on the host."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _padded(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    return functional.pad(tensor, (0, 0, 0, missing))


# Forward --------------------------------------------------------------------------------------------


def _forward(
    x: torch.Tensor,
    extras: list[torch.Tensor],
    params: list[torch.Tensor],
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    kept: list[torch.Tensor],
    handle: torch.Tensor,
    text: str,
) -> list[torch.Tensor]:
    traced, facts = traced_of(handle), calls[text]
    rows = x.shape[0]
    if rows == 0:
        return [result.zero_() for result in _forward_fake(x, text)]
    if facts.is_delayed:
        if not facts.call.is_inside and _is_captured(x):
            message = (
                f"{traced.name}: a CUDA graph does not mark the layers of delayed scaling whose scales the region "
                "around it is to update; enter the region inside of the compiled function"
            )
            raise StateError(message)
        native.traced_note_first(traced.program, facts.call)
    missing = facts.call.missing_rows(rows)
    if missing:
        x, extras = _padded(x, missing), [_padded(extra, missing) for extra in extras]
    results: list[torch.Tensor] = native.traced_forward(
        traced.program, traced.owner(), facts.call, x, extras, params, histories, scales, kept
    )
    if missing:
        outputs = len(facts.widths)
        results[:outputs] = [result[:rows] for result in results[:outputs]]
    return results


def _forward_fake(x: torch.Tensor, text: str) -> list[torch.Tensor]:
    facts = calls[text]
    rows = x.shape[0]
    results = [x.new_empty((rows, cols)) for cols in facts.widths]
    if facts.has_saved:
        base, step, per = facts.saved
        size = base + step * ((rows + per - 1) // per)
        results.append(x.new_empty((size,), dtype=torch.uint8))
    return results + [x.new_empty((size,), dtype=torch.uint8) for size in facts.passing]


# Backward -------------------------------------------------------------------------------------------


def _backward(
    grads: list[torch.Tensor],
    saved: list[torch.Tensor],
    reads: list[torch.Tensor],
    weights: list[torch.Tensor],
    params: list[torch.Tensor],
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    main_grads: list[torch.Tensor],
    handle: torch.Tensor,
    text: str,
    cols: int,
) -> list[torch.Tensor]:
    traced, facts = traced_of(handle), calls[text]
    rows = grads[0].shape[0]
    if rows == 0:
        return _backward_of_nothing(traced, facts, grads, params, main_grads, text, cols)
    if facts.deferred and _is_captured(grads[0]):
        message = (
            f"{traced.name}: delay_wgrad_compute leaves tensors to backward_dw(), which a CUDA graph would "
            "overwrite; compile without CUDA graphs"
        )
        raise StateError(message)
    missing = facts.call.missing_rows(rows)
    if missing:
        grads = [_padded(grad, missing) for grad in grads]
        kinds = [kind for kind, _ in facts.reads]
        reads = [
            tensor if kind == "param" else _padded(tensor, missing)
            for tensor, kind in zip(reads, kinds, strict=True)
        ]
    results, is_last = native.traced_backward(
        traced.program,
        facts.call,
        saved[0] if saved else None,
        reads,
        weights,
        grads,
        params,
        histories,
        scales,
        main_grads,
    )
    if missing:
        results = [
            result if is_param else result[:rows]
            for result, (is_param, _) in zip(results, facts.new_grads, strict=True)
        ]
    if is_last and _is_captured(grads[0]):
        update_scales_behind_backward()
    elif is_last:
        # Behind the whole backward: then all gradients that it quantises have left their maxima.
        torch.autograd.Variable._execution_engine.queue_callback(update_scales_behind_backward)
    return results


def _backward_of_nothing(
    traced: Traced,
    facts: Facts,
    grads: list[torch.Tensor],
    params: list[torch.Tensor],
    main_grads: list[torch.Tensor],
    text: str,
    cols: int,
) -> list[torch.Tensor]:
    if facts.call.overwrites_main_grad:
        for grad in main_grads:
            grad.zero_()
    if facts.deferred:
        wanted = [index in facts.deferred for index in range(len(params))]
        native.program_grads_of_nothing(traced.program, tuple(params), wanted, False)
    return [result.zero_() for result in _backward_fake(grads, params, text, cols)]


def _backward_fake(
    grads: list[torch.Tensor], params: list[torch.Tensor], text: str, cols: int
) -> list[torch.Tensor]:
    facts, dy = calls[text], grads[0]
    rows = dy.shape[0]
    results = []
    for is_param, index in facts.new_grads:
        if is_param:
            dtype = facts.grad_dtypes[index]
            results.append(params[index].new_empty(params[index].shape, dtype=dtype))
        else:
            results.append(dy.new_empty((rows, cols if index < 0 else facts.extra_widths[index])))
    return results


# Operators ------------------------------------------------------------------------------------------
#
# torch's functionalisation takes no list of results from an operator that writes to arguments, so that there is one
# such operator for each number of results.

_FORWARD = "Tensor x, Tensor[] extras, Tensor[] params"
_FORWARD_STATE = "Tensor(a!)[] histories, Tensor[] scales, Tensor(b!)[] kept"
_BACKWARD = "Tensor[] grads, Tensor[] saved, Tensor[] reads, Tensor[] weights, Tensor[] params"
_BACKWARD_STATE = "Tensor(a!)[] histories, Tensor[] scales, Tensor(b!)[] main_grads"
_CALL = "Tensor program, str call"


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(f"{name}{schema}")
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"te_fast::{name}", fake, lib=_library)


def _pure_forward(x: Any, extras: Any, params: Any, handle: torch.Tensor, text: str) -> Any:
    return _forward(x, extras, params, [], [], [], handle, text)


def _pure_backward(
    grads: Any,
    saved: Any,
    reads: Any,
    weights: Any,
    params: Any,
    handle: torch.Tensor,
    text: str,
    cols: int,
) -> Any:
    return _backward(grads, saved, reads, weights, params, [], [], [], handle, text, cols)


_register(
    "program_forward",
    f"({_FORWARD}, {_CALL}) -> Tensor[]",
    _pure_forward,
    lambda x, extras, params, handle, text: _forward_fake(x, text),
)
_register(
    "program_backward",
    f"({_BACKWARD}, {_CALL}, int cols) -> Tensor[]",
    _pure_backward,
    lambda grads, saved, reads, weights, params, handle, text, cols: _backward_fake(
        grads, params, text, cols
    ),
)

_defined: set[str] = set()


def _packed(results: list[torch.Tensor]) -> Any:
    """Return results as an operator of so many returns them."""
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def define(facts: Facts) -> None:
    """Define the operators with state that calls of this kind use, once."""
    if facts.is_delayed or facts.kept:
        _define_one("forward", facts.forward_results)
    if facts.is_delayed or facts.fused or facts.deferred:
        _define_one("backward", len(facts.new_grads))


Traced.define = define


def _define_one(direction: str, results: int) -> None:
    name = f"program_{direction}_{results}_"
    if name in _defined:
        return
    _defined.add(name)
    returned = f"({', '.join(['Tensor'] * results)})" if results != 1 else "Tensor"
    if direction == "forward":
        _register(
            name,
            f"({_FORWARD}, {_FORWARD_STATE}, {_CALL}) -> {returned}",
            lambda *arguments: _packed(_forward(*arguments)),
            lambda x, extras, params, histories, scales, kept, handle, text: _packed(
                _forward_fake(x, text)
            ),
        )
    else:
        _register(
            name,
            f"({_BACKWARD}, {_BACKWARD_STATE}, {_CALL}, int cols) -> {returned}",
            lambda *arguments: _packed(_backward(*arguments)),
            lambda grads, saved, reads, weights, params, h, s, m, handle, text, cols: _packed(
                _backward_fake(grads, params, text, cols)
            ),
        )


def _update(histories: list[torch.Tensor], scales: list[torch.Tensor], number: int) -> None:
    recipe: Any = recipe_of(number)
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
        and recipe.reduce_amax
    ):
        message = (
            "delayed scaling reduces maxima over ranks where its region ends, which a graph does not do; enter the "
            "region around the compiled function"
        )
        raise UnsupportedError(message)
    native.traced_update_scales(histories, scales, native_recipe(recipe))


_register(
    "update_scales",
    "(Tensor(a!)[] histories, Tensor(b!)[] scales, int recipe) -> ()",
    _update,
    lambda histories, scales, recipe: None,
)


# Autograd -------------------------------------------------------------------------------------------


class _Program(torch.autograd.Function):
    """Arguments: handle, text of the call, numbers of tensors of each kind, dummy gradients, then the tensors.

    Kinds are the input, extra inputs, parameters, histories and scales of forward, those of backward, memory of kept
    weights, and ``main_grad``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handle: torch.Tensor,
        text: str,
        counts: tuple[int, ...],
        dummies: tuple[tuple[int, bool], ...],
        *tensors: torch.Tensor,
    ) -> Any:
        facts = facts_of(text)
        x, extras, params, histories, scales, _, _, kept, _ = _split(tensors, counts)
        results: Any
        if len(histories) + len(kept) == 0:
            results = torch.ops.te_fast.program_forward(x[0], extras, params, handle, text)
        else:
            name = f"program_forward_{facts.forward_results}_"
            operator = getattr(torch.ops.te_fast, name)
            results = operator(x[0], extras, params, histories, scales, kept, handle, text)
            if facts.forward_results == 1:
                results = (results,)
        outputs = len(facts.widths)
        if facts.any_grad:
            by_kind = {"input": x, "extra": extras, "param": params, "output": results[1:]}
            reads = [by_kind[kind][index] for kind, index in facts.reads]
            rest = list(results[outputs:])
            if facts.kept:
                rest += [kept[at] for at in facts.kept_for_backward]
            ctx.call = (text, counts, dummies, x[0].shape[1], len(rest), len(reads))
            ctx.save_for_backward(handle, *rest, *reads, *tensors[1 + len(extras) :])
        return tuple(results[:outputs]) if outputs > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        text, counts, dummies, cols, rest, reads = ctx.call
        facts = facts_of(text)
        handle, *saved = ctx.saved_tensors
        others = (0, 0, *counts[2:])
        _, _, params, _, _, histories, scales, _, main_grads = _split(saved[rest + reads :], others)
        weights = saved[int(facts.has_saved) : rest]
        arguments = (
            [grad.contiguous() for grad in grads],
            saved[: int(facts.has_saved)],
            saved[rest : rest + reads],
            weights,
            params,
        )
        new = facts.new_grads
        results: Any
        if len(histories) + len(main_grads) + len(facts.deferred) == 0:
            results = torch.ops.te_fast.program_backward(*arguments, handle, text, cols)
        else:
            operator = getattr(torch.ops.te_fast, f"program_backward_{len(new)}_")
            results = operator(*arguments, histories, scales, main_grads, handle, text, cols)
            if len(new) == 1:
                results = (results,)
        dx, extras, parameters = None, [None] * counts[1], [None] * counts[2]
        for position, (is_param, index) in enumerate(new):
            if is_param:
                parameters[index] = results[position]
            elif index < 0:
                dx = results[position]
            else:
                extras[index] = results[position]
        # With a gradient of its own, a parameter's hooks fire.
        for index, is_zero in dummies:
            make = torch.zeros_like if is_zero else torch.empty_like
            parameters[index] = make(params[index])
        return (None, None, None, None, dx, *extras, *parameters, *[None] * sum(counts[3:]))


def _split(tensors: Tensors, counts: Sequence[int]) -> list[list[torch.Tensor]]:
    parts, start = [], 0
    for count in counts:
        parts.append(list(tensors[start : start + count]))
        start += count
    return parts


def apply(
    traced: Traced,
    owner: Any,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    params: tuple[torch.Tensor, ...],
    is_first_microbatch: bool | None,
) -> Any:
    """Run a program as an operator.

    Parameters
    ----------
    traced : Traced
        The program.
    owner : object
        What has the scales of its linear operations.
    x : torch.Tensor
        ``(..., cols)``.
    extras : tuple of torch.Tensor
        Extra inputs, ``(..., cols)`` or ``(...)``.
    params : tuple of torch.Tensor
        Its parameters, in order.
    is_first_microbatch : bool, optional
        As of :class:`te_fast.pytorch.Linear`.

    Returns
    -------
    torch.Tensor or tuple
        Output; with extra outputs, and those.
    """
    enabled, epoch, recipe = key_of_region()
    inside = entered.region
    grads = torch.is_grad_enabled()
    if x.dim() == 0:
        message = (
            f"{traced.name}: a traced call takes tensors of at least one dimension, got a scalar"
        )
        raise ShapeError(message)
    cols = x.shape[-1]
    given = [
        extra.reshape(-1, extra.shape[-1] if extra.dim() == x.dim() else 1) for extra in extras
    ]
    tensors = [x.reshape(-1, cols), *given, *params]
    wants = tuple([grads and tensor.requires_grad for tensor in (x, *extras, *params)])
    described = _described(tensors, len(extras))
    overwrites = False
    for parameter in params:
        overwrites = overwrites or getattr(parameter, "overwrite_main_grad", False)
    is_first = None if inside is None else inside.is_first
    key = f"{enabled} {epoch} {recipe} {is_first} {is_first_microbatch} {overwrites} {wants} {described}"
    traced.prepare(
        key,
        is_first_microbatch,
        described,
        len(extras),
        wants,
        (enabled, recipe, inside is not None),
        is_first,
        overwrites,
    )
    text = traced.texts[key]
    facts = facts_of(text)
    states: list[list[torch.Tensor]] = [[], [], [], []]
    if facts.is_delayed:
        states = _states(owner, inside, any_grad=facts.any_grad)
    kept = traced.kept[facts.kept] if facts.kept else []
    main_grads = [main_grad_of(params[index]) for index in facts.fused]
    dummies = []
    for index in (*facts.fused, *facts.fused_later):
        if hasattr(params[index], "grad_added_to_main_grad"):
            params[index].grad_added_to_main_grad = True  # type: ignore[attr-defined]
            dummies.append((index, getattr(params[index], "zero_out_wgrad", False)))
    parts = [tensors[:1], given, list(params), *states, kept, main_grads]
    counts = tuple([len(part) for part in parts])
    out = _Program.apply(
        traced.handle,
        text,
        counts,
        tuple(dummies),
        *[tensor for part in parts for tensor in part],
    )
    leading = x.shape[:-1]
    if len(facts.widths) == 1:
        return out.view(*leading, facts.widths[0])
    return tuple(
        [part.view(*leading, width) for part, width in zip(out, facts.widths, strict=True)]
    )


def _described(tensors: Tensors, extras: int) -> tuple[Any, ...]:
    """Return shape, type and device of input, extra inputs and parameters; the rows of the former do not matter."""
    shapes = [
        (1, tensor.shape[-1]) if index <= extras else tuple(tensor.shape)
        for index, tensor in enumerate(tensors)
    ]
    return tuple([(shape, t.dtype, t.device) for shape, t in zip(shapes, tensors, strict=True)])


def _states(owner: Any, inside: Any, *, any_grad: bool) -> list[list[torch.Tensor]]:
    """Return histories and scales of both directions, and tell the region that the graph is in of forward's."""
    forward = owner._delayed_states_of_linears(forward=True)
    backward = owner._delayed_states_of_linears(forward=False) if any_grad else []
    states = [
        [state._amax_history for state in forward],
        [state._scale for state in forward],
        [state._amax_history for state in backward],
        [state._scale for state in backward],
    ]
    if inside is not None:
        inside.use(inside.number, owner, states[0], states[1])
        if any_grad:
            inside.is_first = False
    return states
