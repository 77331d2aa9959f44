"""Programs as operators of a graph.

A program is one operator, its backward another. Both read the tensors of one list, write to those of another, and
return nothing. The graph allocates the tensors that they write to (results, tensors for backward, quantised weights),
so that a compiler plans their memory. Kept quantised weights and ``main_grad`` are tensors of the graph, too.

Scales and histories of delayed scaling are not: a graph's handle stands for its program and the program's scales. Each
forward under delayed scaling, and each update of its scales, writes the graph's order tensor (nothing is really
written), so that a compiler keeps them all, in their order.

Everything else about a call is one native object, the ``TracedCall`` that was made when the call was traced. Graphs
refer to it by a number, which is computed from its content. Tensors of operators are two-dimensional, rows of columns.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from te_fast.errors import ShapeError, UnsupportedError
from te_fast.graphs.refusal import raise_problem, refusal
from te_fast.graphs.region import entered, key_of_region, order, recipe_of
from te_fast.graphs.traced import Described, Facts, Kind, Place, Traced, calls, facts_of
from te_fast.runtime import native
from te_fast.runtime.capturing import is_in_capture, update_scales_behind_backward
from te_fast.runtime.compiling import PLAIN
from te_fast.runtime.delayed import native_recipe
from te_fast.runtime.library import register
from te_fast.runtime.main_grad import main_grad_of
from te_fast.runtime.parts import joined
from te_fast.runtime.recompute import tracing
from te_fast.tensor.primary import is_quantized
from te_fast.tensor.stacks import check_alike
from te_fast.tensor.storage import QuantizedTensorStorage

Tensors = Sequence[torch.Tensor]


# Calls off the straight path ------------------------------------------------------------------------


def _forward_otherwise(
    reads: list[torch.Tensor],
    writes: list[torch.Tensor],
    handle: torch.Tensor,
    call: native.TracedCall,
) -> None:
    """Run a forward on no rows, or with rows padded for its GEMMs."""
    facts, rows = calls[call.text], reads[0].shape[0]
    outputs = _count_new(facts.outputs)
    if rows == 0:
        memory = 0 if facts.kept else len(facts.memory)
        for result in writes[: outputs + facts.has_saved + memory]:
            result.zero_()
        return
    missing = call.missing_rows(rows)
    given = 1 + len(facts.extra_widths)
    padded = [_padded(tensor, missing) for tensor in reads[:given]]
    made = [tensor.new_empty((rows + missing, tensor.shape[1])) for tensor in writes[:outputs]]
    native.traced_forward(padded + reads[given:], made + writes[outputs:], handle, facts.number)
    _give_rows(made, writes[:outputs])


def _backward_otherwise(
    reads: list[torch.Tensor],
    writes: list[torch.Tensor],
    handle: torch.Tensor,
    call: native.TracedCall,
) -> None:
    """Run a backward on no rows, or with rows padded for its GEMMs."""
    facts, rows = calls[call.text], reads[0].shape[0]
    kinds = _new_grads(facts)
    if rows == 0:
        overwritten = [True] * len(kinds) + [call.overwritten[index] for index in facts.fused]
        for result, is_set in zip(writes, overwritten, strict=False):  # the handle may follow
            if is_set:
                result.zero_()
        native.traced_on_nothing(handle, facts.number)
        return
    missing = call.missing_rows(rows)
    of_rows = [True] * len(facts.widths) + [False] * facts.has_saved
    for kind, index in facts.reads:
        of_rows += [False] * len(facts.parts[index]) if kind == "param" else [True]
    of_rows += [False] * (len(reads) - len(of_rows))
    padded = [
        _padded(tensor, missing) if has_rows else tensor
        for tensor, has_rows in zip(reads, of_rows, strict=True)
    ]
    made = [
        tensor if is_param else tensor.new_empty((rows + missing, tensor.shape[1]))
        for tensor, is_param in zip(writes, kinds, strict=False)
    ]
    native.traced_backward(padded, made + writes[len(kinds) :], handle, facts.number)
    _give_rows(made, writes[: len(kinds)])


def _padded(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor  # counts of experts' rows, to which the new rows do not belong
    return functional.pad(tensor, (0, 0, 0, missing))


def _give_rows(made: Tensors, results: Tensors) -> None:
    for one, result in zip(made, results, strict=True):
        if one is not result:
            result.copy_(one[: result.shape[0]])


def _count_new(places: Sequence[Place | None]) -> int:
    return sum(place == ("new", 0) for place in places)


def _new_grads(facts: Facts) -> list[bool]:
    """Return, for each gradient of backward in order, whether it belongs to a parameter."""
    extras = _count_new(facts.grad_extras)
    is_input = _count_new([facts.grad_input])
    return [False] * is_input + [True] * _count_new(facts.grad_params) + [False] * extras


def _after_backward(grad: torch.Tensor) -> None:
    """Update the gradients' scales after the current backward, when all layers have raised their maxima.

    Replays of a CUDA graph run nothing on the host, so the graph itself must end with the update. A graph that has both
    directions, as make_fx traces a whole step, runs in no backward of torch's.
    """
    is_captured = grad.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured or torch._C._current_graph_task_id() < 0:
        update_scales_behind_backward()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(update_scales_behind_backward)


native.traced_install(_forward_otherwise, _backward_otherwise, _after_backward)


# Operators ------------------------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    """Return nothing; the operators have no results for a trace to make."""


_SCHEMA = "(Tensor[] reads, Tensor(a!)[] writes, Tensor program, int call) -> ()"
_forward = register(f"program_forward{_SCHEMA}", native.traced_forward, _nothing)
_backward = register(f"program_backward{_SCHEMA}", native.traced_backward, _nothing)


class _Forward(torch._ops.OpOverload[..., None]):
    """The forward operator; calls go straight to the native side if no mode, tracer or profiler is active."""

    __call__ = native.instance_method(native.traced_forward_call)


class _Backward(torch._ops.OpOverload[..., None]):
    """The backward operator, likewise."""

    __call__ = native.instance_method(native.traced_backward_call)


# torch's dispatcher converts every argument twice, which takes longer than the call itself.
_forward.__class__ = _Forward
_backward.__class__ = _Backward


def _update(programs: list[torch.Tensor], order_tensor: torch.Tensor, number: int) -> None:
    """Update scales at the end of a graph's region, unless that region is inside of one around the call."""
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
    *_, depth, _ = native.autocast_region()
    # The end of the outermost region updates. It does not see what a CUDA graph replays.
    if depth == 0 or is_in_capture(order_tensor):
        native.traced_update_scales(programs, native_recipe(recipe))


def _keep_scale(scale: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Copy a scale behind the update that wrote the order tensor last."""
    return scale.clone()


register("update_scales(Tensor[] programs, Tensor(a!) order, int recipe) -> ()", _update, _nothing)
register("keep_scale(Tensor scale, Tensor order) -> Tensor", _keep_scale, _keep_scale)


# Autograd -------------------------------------------------------------------------------------------


def _with_real_tensors() -> AbstractContextManager[None]:
    """Let operators take tensors of te_fast's own, such as handles, beside a user's fake tensors.

    Where torch.compile traces this, it knows them already.
    """
    fake = None if is_dynamo_compiling() else sys.modules.get("torch._subclasses.fake_tensor")
    return nullcontext() if fake is None else _with_real(fake.fake_tensor_tls)


@contextmanager
def _with_real(state: Any) -> Iterator[None]:
    former = state.allow_non_fake_inputs_override
    state.allow_non_fake_inputs_override = True
    try:
        yield
    finally:
        state.allow_non_fake_inputs_override = former


class _Program(torch.autograd.Function):
    """Arguments: handle, text of the call, numbers and places of tensors, dummy gradients, then the tensors.

    There is a number for each kind: the input, extra inputs, parts of parameters, kept scales, the order tensor, memory
    of kept weights, and ``main_grad``. A tensor that is given several times, such as a weight that two layers share, is
    one argument with several places, since dynamo takes no tensor twice.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        # If the first four had names, dynamo would take a call with two tensors for one without a context.
        handle, text, (counts, places), dummies = given[:4]
        facts = facts_of(text)
        tensors = [given[4 + place] for place in places]
        (x,), extras, params, scales, ordered, kept, main_grads = _split(tensors, counts)
        rows = x.shape[0]
        made = [
            x.new_empty((rows, cols))
            for cols, place in zip(facts.widths, facts.outputs, strict=True)
            if place[0] == "new"
        ]
        saved = []
        if facts.has_saved:
            base, step, per = facts.saved
            saved = [x.new_empty((base + step * ((rows + per - 1) // per),), dtype=torch.uint8)]
        memory = kept or [x.new_empty((size,), dtype=torch.uint8) for size in facts.memory]
        with _with_real_tensors():
            torch.ops.te_fast.program_forward(
                [x, *extras, *params, *scales],
                [*made, *saved, *memory, *ordered],
                handle,
                facts.number,
            )
        tensors_of = {"input": [x], "extra": extras}
        outputs = _placed(facts.outputs, made, tensors_of, 1)
        if facts.any_grad:
            tensors_of["output"] = outputs[1:]
            tensors_of["memory"] = memory
            parts = _split(params, [len(rows) for rows in facts.parts])
            reads = [
                tensor
                for kind, index in (*facts.reads, *facts.weights_of_backward)
                for tensor in (parts[index] if kind == "param" else [tensors_of[kind][index]])
            ]
            ctx.call = (text, dummies, len(saved) + len(reads), places, sum(counts[3:]))
            ctx.save_for_backward(handle, *saved, *reads, *main_grads)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        text, dummies, read, places_of_given, others = ctx.call
        facts = facts_of(text)
        tensors = list(ctx.saved_tensors)  # in a trace, torch 2.8 unpacks a tuple by a star
        handle, kept = tensors[0], tensors[1:]
        at = int(facts.has_saved)
        for kind, index in facts.reads:
            count = len(facts.parts[index]) if kind == "param" else 1
            if kind == "param" and index in facts.given:
                kept[at : at + count] = [part.dequantize() for part in kept[at : at + count]]
            at += count
        dys = [grad.contiguous() for grad in grads]
        rows = dys[0].shape[0]
        made = []
        if facts.grad_input == ("new", 0):
            made.append(dys[0].new_empty((rows, facts.cols)))
        for place, shape, dtype in zip(
            facts.grad_params, facts.param_shapes, facts.grad_dtypes, strict=True
        ):
            if place is not None:
                made.append(dys[0].new_empty(shape, dtype=dtype))
        kinds = zip(facts.grad_extras, facts.extra_widths, facts.extra_dtypes, strict=True)
        for place, cols, dtype in kinds:
            if place == ("new", 0):
                made.append(dys[0].new_empty((rows, cols), dtype=dtype))
        # The handle stands for what is not in the graph: tensors that a deferred gradient leaves to backward_dw(), and
        # the main_grads of parts.
        written = [*made, *kept[read:], *([handle] if facts.writes_elsewhere else [])]
        with _with_real_tensors():
            torch.ops.te_fast.program_backward([*dys, *kept[:read]], written, handle, facts.number)
        places = (facts.grad_input, *facts.grad_params, *facts.grad_extras)
        first_extra = 1 + len(facts.parts)
        results = _placed(places, made, {"grad": dys}, first_extra)
        parts = _grads_of_parts(facts, results[1:first_extra])
        # A parameter's hooks run only if it gets a gradient tensor of its own.
        for index, shape, dtype, is_zero in dummies:
            make = dys[0].new_zeros if is_zero else dys[0].new_empty
            parts[index] = make(shape, dtype=dtype)
        extras = results[first_extra:]
        found = [results[0], *extras, *parts, *[None] * others]
        return (None, None, None, None, *_summed(found, places_of_given))


def _summed(grads: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return a gradient for each argument: the sum of those of its places, None without one."""
    found: list[Any] = [None] * (max(places) + 1)
    for grad, place in zip(grads, places, strict=True):
        former = found[place]
        if grad is not None:
            found[place] = grad if former is None else former + grad
    return found


def _grads_of_parts(facts: Facts, wholes: Sequence[Any]) -> list[Any]:
    """Return the gradients of all parts, from those of whole parameters; None for parts that want none."""
    found: list[Any] = []
    for whole, rows, wanted in zip(wholes, facts.parts, facts.part_grads, strict=True):
        if whole is None or len(rows) == 1:
            found += [whole] * len(rows)
            continue
        pieces = whole.split(list(rows))
        found += [
            piece if is_wanted else None for piece, is_wanted in zip(pieces, wanted, strict=True)
        ]
    return found


def _placed(
    places: Sequence[Place | None],
    made: Tensors,
    others: dict[str, list[torch.Tensor]],
    first_sibling: int,
) -> list[Any]:
    """Return the tensors of places: new tensors, in order, and copies of other tensors.

    Extra outputs, and gradients of extra inputs, can be the tensors of siblings, which begin at `first_sibling`.
    """
    found: list[Any] = []
    new = 0
    for place in places:
        if place is None:
            found.append(None)
        elif place[0] == "new":
            found.append(made[new])
            new += 1
        else:
            kind, index = place
            found.append(others[kind][index].clone() if kind in others else None)
    for at, place in enumerate(places):
        if place is not None and place[0] in ("output", "extra grad"):
            found[at] = found[first_sibling + place[1]].clone()
    return found


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
    params: tuple[tuple[torch.Tensor, ...], ...],
    is_first_microbatch: bool | None,
) -> Any:
    """Run a program as an operator.

    Parameters
    ----------
    traced : Traced
        The program.
    owner : object
        The owner of the scales of its linear operations.
    x : torch.Tensor
        ``(..., cols)``.
    extras : tuple of torch.Tensor
        Extra inputs, ``(..., cols)`` or ``(...)``.
    params : tuple of tuples of torch.Tensor
        The parts of each of its parameters, in order; a parameter in one piece is its own part.
    is_first_microbatch : bool, optional
        As of :class:`te_fast.pytorch.Linear`.

    Returns
    -------
    torch.Tensor or tuple
        Output; with extra outputs, and those.

    Raises
    ------
    ShapeError
        If `x` is a scalar.
    UnsupportedError
        If `x` is in FP8 and a linear operation would read its bytes, which the operator does not take.
    """
    enabled, epoch, recipe = key_of_region()
    inside = entered.region
    grads = torch.is_grad_enabled()
    if x.dim() == 0:
        message = (
            f"{traced.name}: a traced call takes tensors of at least one dimension, got a scalar"
        )
        raise ShapeError(message)
    if is_quantized(x) and enabled and traced.reads_bytes():
        message = (
            f"{traced.name}: a compiled function passes no quantised input to a linear operation that would read "
            "its FP8 bytes; give the input's dequantize(), or call the layer outside of the compiled function"
        )
        raise UnsupportedError(message)
    x = _dequantized(x)
    extras = tuple([_dequantized(extra) for extra in extras])
    if not enabled:
        params = tuple([tuple([_dequantized(part) for part in parts]) for parts in params])
    # Columns belong to a program: operator.index makes a number of what a trace with dynamic=True has not fixed.
    cols = operator.index(x.shape[-1])
    given = [_as_matrix(extra, x) for extra in extras]
    inputs = [x.reshape(-1, cols), *given]
    parts = [part for one in params for part in one]
    within = (enabled, recipe, inside is not None)
    if not (grads and any([tensor.requires_grad for tensor in (x, *extras, *parts)])):
        kinds = tuple([_kind_of(one) for one in params])
        text, problem = traced.exported(within, cols, kinds)
        raise_problem(problem)
        if text:
            return _exported(text, owner, (inputs, params), x.shape[:-1])
    wants = [grads and tensor.requires_grad for tensor in (x, *extras)]
    described = _described(inputs, wants, params)
    is_first = None if inside is None else inside.is_first
    how = (is_first_microbatch, is_first, tracing.keeps_scales)
    key = f"{enabled} {epoch} {recipe} {how} {described}"
    key = key.replace(".", " ")  # the key becomes the name of an attribute
    problem = traced.prepare(key, described, len(extras), within, how)
    raise_problem(problem)
    text = getattr(traced, key)
    facts = facts_of(text)
    scales, ordered = _of_delayed(traced, owner, facts, x.device) if facts.is_delayed else ([], [])
    kept = [*getattr(traced, facts.kept)] if facts.kept else []
    main_grads = [main_grad_of(params[index][0], traced.name) for index in facts.fused]
    dummies = _dummies(facts, params)
    lists = [inputs[:1], given, parts, scales, ordered, kept, main_grads]
    counts = tuple([len(tensors) for tensors in lists])
    tensors, places = _once([tensor for tensors in lists for tensor in tensors])
    out = _Program.apply(traced.handle, text, (counts, places), dummies, *tensors)
    leading = x.shape[:-1]
    if len(facts.widths) == 1:
        return out.view(*leading, facts.widths[0])
    return tuple(
        [part.view(*leading, width) for part, width in zip(out, facts.widths, strict=True)]
    )


def _once(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Return tensors without repetition, and the place of each given one among them."""
    numbers: dict[torch.Tensor, int] = {}
    found: list[torch.Tensor] = []
    places = []
    for tensor in tensors:
        number = len(found)
        if type(tensor) in PLAIN:  # Dynamo finds no others in a dictionary
            number = numbers.setdefault(tensor, number)
        if number == len(found):
            found.append(tensor)
        places.append(number)
    return found, tuple(places)


def _dequantized(part: Any) -> Any:
    return part.dequantize() if isinstance(part, QuantizedTensorStorage) else part


def _dummies(
    facts: Facts, params: Sequence[Tensors]
) -> tuple[tuple[int, tuple[int, ...], torch.dtype, bool], ...]:
    """Return parts whose hooks need a dummy gradient: number among all parts, shape, type, whether it is zero."""
    dummies = []
    number = 0
    for index, parts in enumerate(params):
        is_fused = index in (*facts.fused, *facts.fused_parts, *facts.fused_later)
        for part, is_wanted in zip(parts, facts.part_grads[index], strict=True):
            if is_fused and is_wanted and hasattr(part, "grad_added_to_main_grad"):
                part.grad_added_to_main_grad = True
                is_zero = getattr(part, "zero_out_wgrad", False)
                dummies.append((number, _sizes(part), part.dtype, is_zero))
            number += 1
    return tuple(dummies)


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple([operator.index(size) for size in tensor.shape])


def _as_matrix(extra: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return an extra input as rows of columns; counts of experts' rows are one row."""
    if not extra.is_floating_point():
        return extra.reshape(1, -1)
    return extra.reshape(-1, extra.shape[-1] if extra.dim() == x.dim() else 1)


def _exported(
    text: str,
    owner: Any,
    tensors: tuple[list[torch.Tensor], tuple[tuple[torch.Tensor, ...], ...]],
    leading: Sequence[int],
) -> Any:
    """Run a program as the operator of a saved graph."""
    scales = []
    if '"DelayedScaling"' in text:
        scales = [state._scale for state in owner._delayed_states_of_linears(forward=True)]
    inputs, params = tensors
    if '"parts": [' in text:  # a stack of experts is not copied at each call
        given = [part for parts in params for part in parts]
    else:
        given = [joined(list(parts)) for parts in params]
    outs = torch.ops.te_fast.inference(inputs[0], inputs[1:], given, scales, text)
    outs = [out.view(*leading, out.shape[-1]) for out in outs]
    return outs[0] if len(outs) == 1 else tuple(outs)


def _described(
    inputs: Tensors, wants: Sequence[bool], params: Sequence[Tensors]
) -> tuple[Described, ...]:
    """Return the descriptions of input, extra inputs and parameters for :meth:`Traced.prepare`, without rows."""
    found: list[Described] = []
    for tensor, wanted in zip(inputs, wants, strict=True):
        shape: tuple[int, ...] = (1, operator.index(tensor.shape[-1]))
        found.append((shape, tensor.dtype, tensor.device, None, ((1, wanted, False),)))
    is_trained = torch.is_grad_enabled()
    for parts in params:
        shapes = [_sizes(part) for part in parts]
        rows = sum([shape[0] for shape in shapes])
        described = tuple(
            [
                (shape[0], is_trained and part.requires_grad, len(parts) == 1 and _overwrites(part))
                for shape, part in zip(shapes, parts, strict=True)
            ]
        )
        first = parts[0]
        shape = (rows, *shapes[0][1:])
        found.append((shape, first.dtype, first.device, _kind_of(parts), described))
    return tuple(found)


def _overwrites(part: Any) -> bool:
    return bool(getattr(part, "overwrite_main_grad", False))


def _kind_of(parts: Sequence[Any]) -> Kind | None:
    """Return how a parameter is quantised, if it is."""
    if not is_quantized(parts[0]):
        return None
    check_alike(parts)
    value = parts[0]._value
    has_col = all([part._value.col_is_valid for part in parts])
    return value.block, value.fp8, has_col, value.groups if len(parts) == 1 else len(parts)


def _of_delayed(
    traced: Any, owner: Any, facts: Facts, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return kept scales and the order tensor of a call under delayed scaling, and report it to the graph's region."""
    inside = entered.region
    if tracing.keeps_scales and inside is not None:
        message = (
            f"{traced.name}: under delayed scaling, a region inside of a compiled function takes no recomputed "
            "layers (checkpoint); enter the region around the call"
        )
        raise refusal(message)
    ordered = getattr(order, str(device))
    scales = []
    if tracing.keeps_scales:
        # A recomputation quantises with these copies, even if the scales have been updated by then.
        states = owner._delayed_states_of_linears(forward=True)
        with _with_real_tensors():
            scales = [torch.ops.te_fast.keep_scale(state._scale, ordered) for state in states]
    if inside is not None:
        inside.use(inside.number, traced.handle, ordered)
        if facts.any_grad:
            inside.is_first = False
    return scales, [ordered]
