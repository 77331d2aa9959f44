"""``make_graphed_callables``: modules whose forward and backward are replayed CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from te_fast.errors import ArgumentError, DeviceError, DtypeError, StateError, UnsupportedError
from te_fast.graphed import arguments
from te_fast.graphed.arguments import Options
from te_fast.graphed.inputs import Inputs
from te_fast.graphed.memory import memory_of
from te_fast.graphed.order import Order, from_chunks, shared_inputs, without_order
from te_fast.graphed.recorder import CudaRecorder
from te_fast.graphed.replay import GraphedCallable
from te_fast.graphed.run import Run, Shared, waits_for_weight_gradients
from te_fast.graphed.scales import restore_fp8_tensors, save_fp8_tensors
from te_fast.graphed.skip import SkipFlag
from te_fast.recipe import CustomRecipe, Recipe
from te_fast.runtime.capturing import set_capture_end, set_capture_start
from te_fast.runtime.inner_layers import parts_of
from te_fast.tensor.of_factory import own_recipe

_NAME = "make_graphed_callables"

#: Makes the recorder; tests replace it by a recorder on the host.
recorder_of: Callable[[Any], Any] = CudaRecorder


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Sequence[float] | None = None,
    _num_layers_per_chunk: int | Sequence[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[Any] | None = None,
) -> Any:
    """Capture forward and backward of modules as CUDA graphs, which later calls replay.

    The capture restores scales, histories, gradients, ``main_grad``, buffers and random numbers. Each
    replay overwrites the results of the one before it.

    Parameters
    ----------
    modules : torch.nn.Module or tuple of torch.nn.Module
        The modules to capture.
    sample_args : tuple of torch.Tensor, or sequence of such tuples
        Positional arguments, for each module or, with `_order`, for each forward. Graphs read these tensors: calls copy
        theirs into them.
    num_warmup_iters : int, default = 3
        Runs before the capture, at least 1.
    allow_unused_input : bool, default = False
        Accept inputs that require gradients and get none.
    sample_kwargs : dict, or sequence of dict, optional
        Keyword arguments: tensors, or constants of the graph.
    enabled : bool or tuple of bool, optional
        Whether modules quantise. With ``False`` a module never quantises, in any region. By default it does not
        quantise, and must not be called in a region that quantises.
    calibrating : bool, default = False
        As in :class:`autocast`.
    recipe : Recipe, optional
        As in :class:`autocast`.
    amax_reduction_group : torch.distributed.ProcessGroup, optional
        As in :class:`autocast`.
    cache_quantized_params : bool, default = False
        A call with ``is_first_microbatch=True`` quantises the weights, and a call with ``False`` uses the FP8 weights
        of an earlier call; every call must pass one of the two. Without this option each replay quantises.
    fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group, fp8_weight_caching : optional
        Deprecated names of the five arguments above.
    _order : sequence of int or float, optional
        Order of a pipeline's forwards and backwards: chunks of modules by their numbers from 1, negative for
        backward, and -c - 0.5 for the weight gradients of chunk c. The result has a callable for each forward.
    _num_layers_per_chunk : int or sequence of int, optional
        Number of modules in each chunk.
    pool : optional
        Memory pool, of ``torch.cuda.graph_pool_handle()``.
    retain_graph_in_backward : bool, default = False
        Backward can be replayed several times.
    _reuse_graph_input_output_buffers : bool, default = False
        A forward takes over the buffers of an earlier one whose backward is over; with `_order`, in training.
    clone_param_grads_on_return : bool, default = True
        Copy the gradients of parameters. Without this option the next replay overwrites them.
    pre_warmup_hook, post_warmup_hook : callable, optional
        Called once before and after all warm-ups.
    capture_time_hooks : sequence of dict, optional
        For each module, hooks by kind (``forward_pre_hooks``, ``forward_hooks``, ``backward_pre_hooks``,
        ``backward_hooks``) and a name of any sort. They are called with the module around warm-ups and captures, must
        return None, and are not part of the graphs.

    Returns
    -------
    torch.nn.Module, or tuple
        The modules, whose calls now replay; with `_order` a callable for each forward. They have
        ``backward_dw()``, which replays the weight gradients of layers that delay theirs, and ``reset()``, which frees
        the graphs.

    Raises
    ------
    ArgumentError, ShapeError, DtypeError
        If arguments do not fit each other.
    StateError
        If modules have hooks, or cannot be captured as they are.
    DeviceError
        Without a GPU.
    UnsupportedError
        If the factory of a ``CustomRecipe`` gives delayed scaling to a layer.

    See Also
    --------
    autocast : Around the replays.
    torch.cuda.make_graphed_callables : torch's.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> layer = te.Linear(32, 32)  # doctest: +SKIP
    >>> x = torch.randn(16, 32, device="cuda", requires_grad=True)  # doctest: +SKIP
    >>> layer = te.make_graphed_callables(layer, (x,), enabled=True)  # doctest: +SKIP
    >>> with te.autocast():  # doctest: +SKIP
    ...     layer(x).sum().backward()
    """
    is_one = not isinstance(modules, tuple)
    if is_one:
        modules, sample_args = (modules,), (sample_args,) if _order is None else sample_args
        sample_kwargs = (sample_kwargs,) if isinstance(sample_kwargs, dict) else sample_kwargs
    arguments.check_sequence("sample_args", sample_args)
    if sample_kwargs is None:
        sample_kwargs = tuple({} for _ in sample_args)
    quantization = arguments.quantization(
        len(modules),
        enabled=(enabled, fp8_enabled),
        calibrating=(calibrating, fp8_calibrating),
        recipe=(recipe, fp8_recipe),
        amax_reduction_group=(amax_reduction_group, fp8_group),
        cache_quantized_params=(cache_quantized_params, fp8_weight_caching),
    )
    options = Options(
        num_warmup_iters,
        allow_unused_input,
        retain_graph_in_backward,
        _reuse_graph_input_output_buffers,
        clone_param_grads_on_return,
        pre_warmup_hook,
        post_warmup_hook,
        arguments.capture_time_hooks(capture_time_hooks, len(modules)),
    )
    order = _order_of(_order, _num_layers_per_chunk, len(modules), sample_args, sample_kwargs)
    is_training = arguments.check_modules(modules)
    _check_options(options, has_order=_order is not None, is_training=is_training)
    recorder = recorder_of(pool)
    _refuse_delayed_layers(modules, quantization)
    flag = SkipFlag(recorder.device if quantization.caches_weights else None)
    shared = Shared(options, quantization, recorder, memory_of(pool), is_training, flag)
    runs = _make_runs(order, modules, (sample_args, sample_kwargs), shared)
    with _as_before(modules, shared):
        _warm_up(order, runs, shared)
        _capture(order, runs, shared)
    results = [_result(run, replaces=_order is None) for run in runs]
    return results[0] if is_one and _order is None else tuple(results)


def _order_of(
    order: Sequence[float] | None,
    layers: int | Sequence[int] | None,
    count: int,
    args: Sequence[Any],
    kwargs: Sequence[Any],
) -> Order:
    if order is not None:
        arguments.check_sequence("_order", order)
    wanted = count if order is None else len(args)
    arguments.check_counts(wanted, args, kwargs)
    return without_order(count) if order is None else from_chunks(order, layers, count, len(args))


def _check_options(options: Options, *, has_order: bool, is_training: bool) -> None:
    iterations = options.num_warmup_iters
    if not isinstance(iterations, int) or iterations < 1:
        message = (
            f"{_NAME}: num_warmup_iters must be 1 at least, got {iterations!r}: what lasts, like scales, must "
            "not be made in a graph"
        )
        raise ArgumentError(message)
    for name in ("pre_warmup_hook", "post_warmup_hook"):
        hook = getattr(options, name)
        if hook is not None and not callable(hook):
            message = f"{_NAME}: {name} must be a function without arguments, got {hook!r}"
            raise DtypeError(message)
    if options.reuse_buffers and not has_order:
        message = f"{_NAME}: _reuse_graph_input_output_buffers needs _order, which says when a forward is over"
        raise ArgumentError(message)
    if options.reuse_buffers and not is_training:
        message = f"{_NAME}: _reuse_graph_input_output_buffers needs modules in training mode"
        raise StateError(message)
    if torch.is_autocast_enabled() and torch.is_autocast_cache_enabled():
        message = (
            f"{_NAME}: torch.autocast keeps casts of weights, which a graph would read after they are gone; pass it "
            "cache_enabled=False"
        )
        raise StateError(message)


def _make_runs(
    order: Order, modules: Sequence[torch.nn.Module], samples: tuple[Any, Any], shared: Shared
) -> list[Run]:
    """Return the runs, with the tensors that some of them share."""
    runs = []
    for number, args, kwargs in zip(order.callables, *samples, strict=True):
        module = modules[number]
        if waits_for_weight_gradients(module):
            message = (
                f"{_NAME}: {type(module).__name__} has weight gradients waiting; call backward_dw() before the "
                "capture"
            )
            raise StateError(message)
        name = getattr(module, "name", type(module).__name__)
        taken = {id(parameter) for parameter in module.parameters()}
        inputs = Inputs(name, args, kwargs, taken)
        _check_devices(name, [*inputs.tensors, *module.parameters()], shared.recorder.device)
        runs.append(Run(number, module, inputs, shared))
    if shared.options.reuse_buffers:
        owners = shared_inputs(order, [run.inputs.signature() for run in runs])
        for run, owner in zip(runs, owners, strict=True):
            run.inputs.share(runs[owner].inputs)
    return runs


def _check_devices(name: str, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raise unless all tensors are on the device of the capture: of other tensors a graph would keep the values."""
    for tensor in tensors:
        if tensor.device != device:
            message = (
                f"{_NAME}: samples and parameters of {name} must be on {device}, the current device, got a tensor on "
                f"{tensor.device}"
            )
            raise DeviceError(message)


def _refuse_delayed_layers(modules: Sequence[torch.nn.Module], quantization: Any) -> None:
    """Raise if a factory gives delayed scaling to a layer: replays update scales by the recipe of the whole graph."""
    recipe: Recipe | None = quantization.recipe
    if not isinstance(recipe, CustomRecipe):
        return
    quantised = [
        module for module, enabled in zip(modules, quantization.enabled, strict=True) if enabled
    ]
    parts: list[Any] = [part for module in quantised for part in parts_of(module)]
    for part in parts:
        if not getattr(part, "_linear_roles", list)():
            continue
        own = own_recipe(part, recipe)
        if own is not None and own.delayed():
            message = (
                f"{_NAME}: the factory of the CustomRecipe gives delayed scaling to {part._state_name()}, which graphs "
                "do not support; let the factory give a quantizer without a history, or capture under DelayedScaling"
            )
            raise UnsupportedError(message)


@contextmanager
def _as_before(modules: Sequence[torch.nn.Module], shared: Shared) -> Iterator[None]:
    """Restore scales, buffers and random numbers at the end of the context."""
    quantization = shared.quantization
    buffers = [buffer for module in modules for buffer in module.buffers()]
    contents = [buffer.clone() for buffer in buffers]
    saved = save_fp8_tensors(modules, quantization.recipe)
    set_capture_start()
    try:
        with shared.recorder.keep_random_numbers(), shared.flag.in_force():
            yield
    finally:
        set_capture_end()
        restore_fp8_tensors(modules, saved)
        with torch.no_grad():
            for buffer, content in zip(buffers, contents, strict=True):
                buffer.copy_(content)


def _warm_up(order: Order, runs: Sequence[Run], shared: Shared) -> None:
    options = shared.options
    with shared.recorder.warm_up():
        if options.pre_warmup_hook is not None:
            options.pre_warmup_hook()
        for _ in range(options.num_warmup_iters):
            for kind, number in order.steps:
                if kind == "forward" or shared.is_training:
                    runs[number].warm_up(kind)
            _check_weight_gradients(order, runs)
        if options.post_warmup_hook is not None:
            options.post_warmup_hook()
    for run in runs:
        run.forget_autograd()
        if not shared.quantization.caches_weights:
            run.forget_weights()


def _check_weight_gradients(order: Order, runs: Sequence[Run]) -> None:
    """Raise if weight gradients are left after all steps, or a step had none to compute."""
    for run in runs:
        if waits_for_weight_gradients(run.module):
            while waits_for_weight_gradients(run.module):
                run.run_weight_gradients()
            message = (
                f"{_NAME}: {run.name} delays its weight gradients (delay_wgrad_compute) and _order does not say "
                "when they are computed; add -c - 0.5 for each backward -c"
            )
            raise StateError(message)
    if order.places_weight_gradients:
        for kind, number in order.steps:
            if kind == "weight gradients" and not runs[number].delays_weight_gradients:
                message = (
                    f"{_NAME}: _order has weight gradients of {runs[number].name}, which computes them in its "
                    "backward; make its layers with delay_wgrad_compute=True, in training mode, or leave them out"
                )
                raise StateError(message)


def _capture(order: Order, runs: Sequence[Run], shared: Shared) -> None:
    first = shared.memory.take_steps(len(order.steps))
    output_grads: dict[Any, list[torch.Tensor]] = {}
    # The last backward of the same chunk, and that of the chunk before.
    before: Run | None = None
    last_of_chunk: Run | None = None
    for index, (kind, number) in enumerate(order.steps):
        run = runs[number]
        if kind == "backward":
            is_shared = shared.options.reuse_buffers and not run.delays_weight_gradients
            run.use_output_grads(output_grads if is_shared else {})
        run.capture(kind, first + index)
        if kind != "backward":
            continue
        if not shared.options.retain_graph:
            run.forget_autograd()
        if not shared.options.reuse_buffers:
            continue
        # The gradients of inputs are read by the next backward of the chunk, and those of the whole chunk by another
        # rank, until the end of the next chunk's backward.
        run.release(outputs=True)
        if before is not None:
            before.release(inputs=True)
        before = run
        if number == order.chunks[index][0]:
            if last_of_chunk is not None:
                last_of_chunk.release(inputs=True)
            last_of_chunk, before = run, None
    for run in runs:
        run.finish()


def _result(run: Run, *, replaces: bool) -> Any:
    graphed = GraphedCallable(run, run.module.forward)
    if not replaces:
        return graphed
    graphed.replaces_forward()
    return run.module
