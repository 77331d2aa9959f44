"""Layers that are chains of native ops: Linear, LayerNormLinear and LayerNormMLP.

Such a layer is a native program. A subclass says which ops the program has and which parameters they read, and this
class runs the program.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import ShapeError, StateError, UnsupportedError
from te_fast.graphs.form import Form, forward_traced, text_of
from te_fast.graphs.traced import Traced
from te_fast.layers.base import TransformerEngineBaseModule, _callers_level
from te_fast.layers.load_torch import copies_of
from te_fast.layers.missing import name_the_wrong_one
from te_fast.layers.parameters import constant, held, initialise, refuse
from te_fast.layers.recomputed import recomputed
from te_fast.layers.segments import Segments, SegmentsInGraphs
from te_fast.parallel.ranks import Exchange, exchange_of
from te_fast.runtime import main_grad, native, recompute, scale_tape
from te_fast.runtime.capturing import is_graph_capturing
from te_fast.runtime.compiling import PLAIN, is_exporting, is_traced
from te_fast.runtime.global_state import autocast_state
from te_fast.runtime.inputs import check_input, refuse_nested
from te_fast.runtime.parameters import needed_parameter
from te_fast.tensor.of_factory import own_region
from te_fast.tensor.primary import as_read, is_quantized
from te_fast.tensor.storage import QuantizedTensorStorage

if TYPE_CHECKING:
    from te_fast.layers.load_torch import Copy, Source

_NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class ProgramLayer(TransformerEngineBaseModule):
    """A layer that is one native program: an optional norm, and the ops after it."""

    # Attributes that a subclass's constructor sets.
    eps: float
    normalization: str | None
    zero_centered_gamma: bool
    return_layernorm_output = False
    return_layernorm_output_gathered = False
    return_bias: bool
    apply_bias: bool
    fuse_wgrad_accumulation: bool
    checkpoint = False
    #: For a converted model, by name: the module that has the parameter, and the parameter's name in it.
    _tied_modules: dict[str, torch.nn.Module] = {}  # noqa: RUF012 (replaced, never written to)
    _tied_names: tuple[tuple[str, str], ...] = ()

    layer_norm_weight: torch.Tensor | None
    layer_norm_bias: torch.Tensor | None
    _handles: dict[str, native.WeightHandle]
    _program: native.Program
    #: The same program, which also returns the input of every linear op; made at the first calibration.
    _observed: native.Program | None
    _traced: Traced
    _region_epoch: int | None
    #: How the layer runs on the ranks that share it, by the collectives.
    _segments: dict[Exchange, Segments]
    _exchange: Exchange
    #: The form for tracers; set by `_prepare_on_ranks`.
    _in_graphs: SegmentsInGraphs
    _NATIVE: tuple[str, ...] = (
        "_in_graphs",
        "_handles",
        "_program",
        "_traced",
        "_observed",
        "_region_epoch",
        "_segments",
        "_exchange",
    )
    #: Attributes that say how ranks share the layer.
    _SHARING = frozenset(
        {"sequence_parallel", "tp_group", "tp_size", "parallel_mode", "set_parallel_mode"}
    )
    _CONSTANTS = TransformerEngineBaseModule._CONSTANTS | {
        "eps",
        "normalization",
        "zero_centered_gamma",
        "return_layernorm_output",
        "return_layernorm_output_gathered",
        "checkpoint",
    }

    # Methods of subclasses ------------------------------------------------------------------------

    #: Name of the argument that gives the size of the input, for messages.
    _FEATURES: str
    #: Whether calls may ask for results in FP8.
    _HANDS_OUT_FP8 = False
    #: Names of the weights of the linear ops, in order.
    _LINEARS: tuple[str, ...]

    def _input_size(self) -> int:
        """Return the columns of the input."""
        raise NotImplementedError

    def _append_linears(
        self, program: native.Program, observe: Callable[[], None], *, biased: bool
    ) -> None:
        """Append the ops after the norm; call `observe` before each linear op."""
        raise NotImplementedError

    def _split_mode(self) -> str | None:
        """Return how ranks share the layer, by the names of :func:`te_fast.parallel.ranks.exchange_of`, or None."""
        return None

    def _whole_weight(self) -> torch.Tensor:
        """Return the weight of the first linear op, in one piece."""
        raise NotImplementedError

    def _used_parameters(
        self, is_first_microbatch: bool | None
    ) -> tuple[dict[str, torch.Tensor], int | None]:
        """Return the parameters that the program reads, in op order, and a version of concatenated ones."""
        raise NotImplementedError

    def _sizes_of_parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the size of each parameter that calls read, by name; the first one says where the layer is."""
        raise NotImplementedError

    def _sizes_of_norm(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self._norm_names(), (self._input_size(),))

    def _returned_bias(self) -> torch.Tensor:
        """Return the biases that ``return_bias`` returns."""
        raise NotImplementedError

    def _returns_bias(self) -> bool:
        """Tell whether the program's result is returned with one bias beside it."""
        return self.return_bias

    def _returned_bias_name(self) -> str:
        """Return the name of the weight's attribute, for a layer whose parameters are not split."""
        raise NotImplementedError

    def _outside_fp8(self) -> str:
        """Return the path of calls outside of FP8: "program", "torch" or "general"."""
        return "program"

    def _is_whole(self) -> bool:
        """Tell whether the program reads only parameters of the layer."""
        return True

    # Construction --------------------------------------------------------------------------------

    def _check_norm(self, normalization: str | None, *, optional: bool) -> None:
        known = (*_NORMALIZATIONS, None) if optional else _NORMALIZATIONS
        if normalization not in known:
            message = (
                f"{self.name}: normalization must be one of {', '.join(map(repr, known))}, got "
                f"{normalization!r}"
            )
            raise ShapeError(message)

    def _make_norm_parameters(self, size: int, options: dict[str, Any]) -> None:
        for name in ("layer_norm_weight", "layer_norm_bias"):
            is_there = self.normalization == "LayerNorm" or (
                self.normalization == "RMSNorm" and name == "layer_norm_weight"
            )
            made = torch.nn.Parameter(torch.empty(size, **options)) if is_there else None
            self.register_parameter(name, made)

    def _reset_norm(self) -> None:
        values = {"layer_norm_weight": float(not self.zero_centered_gamma), "layer_norm_bias": 0.0}
        for name, parameter in held(self, values):
            initialise(self, parameter, constant(values[name]), forks=False)
            parameter.sequence_parallel = self.sequence_parallel

    def _append_norm(self, program: native.Program, size: int) -> None:
        if self.normalization is not None:
            bias = "layer_norm_bias" if self.normalization == "LayerNorm" else None
            program.norm(
                "layer_norm",
                self.normalization,
                self._parameters,
                "layer_norm_weight",
                bias,
                size,
                self.eps,
                bool(self.zero_centered_gamma),
            )

    def _norm_names(self) -> tuple[str, ...]:
        names = ("layer_norm_weight", "layer_norm_bias")
        # A parametrization may compute a parameter anew at each access, so none is read here.
        return names[: {"LayerNorm": 2, "RMSNorm": 1}.get(str(self.normalization), 0)]

    # The native half -----------------------------------------------------------------------------

    def _make_native(self) -> None:
        handles = {}
        for name in self._LINEARS:
            handle = native.WeightHandle(self.name)
            # The backward of the concatenation adds the parts' gradients to their main_grad.
            handle.fuse_wgrad_accumulation = bool(self.fuse_wgrad_accumulation) and self._is_whole()
            handle.delay_wgrad_compute = bool(self.delay_wgrad_compute)
            handles[name] = handle
        # In `__dict__`, so that nn.Module does not treat them as its own.
        self.__dict__["_handles"] = handles
        self.__dict__["_observed"] = None
        self.__dict__["_region_epoch"] = None
        self.__dict__["_segments"] = {}
        program = self.__dict__["_program"] = self._make_program(observed=False)
        self.__dict__["_traced"] = Traced(program, self, self.name)
        if self._returns_bias() and self._is_whole():
            name = self._returned_bias_name()
            is_parameter = name in self._parameters
            program.return_bias(self._parameters if is_parameter else self.__dict__, name)
        self._exchange_changed()

    def _exchange_changed(self) -> None:
        """Find the collectives around the linear ops, which depend on attributes that may be set at any time."""
        exchange = exchange_of(
            self._split_mode(), self.tp_size, sequence_parallel=self.sequence_parallel
        )
        self.__dict__["_exchange"] = exchange
        # The path of a call that needs no Python.
        self._program.is_direct = (
            not self.checkpoint and (self._is_whole() or not self._returns_bias()) and not exchange
        )
        for handle in self._handles.values():
            handle.delay_wgrad_compute = bool(self.delay_wgrad_compute)
        self._note_form()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; find the collectives again if they depend on it."""
        super().__setattr__(name, value)
        if name in self._SHARING and "_program" in self.__dict__:
            if name == "tp_group":
                self.__dict__["_segments"] = {}
            self._exchange_changed()

    def _make_program(self, *, observed: bool) -> native.Program:
        """Make the layer's program; an `observed` one returns the input of every linear op beside the result."""
        program = native.Program(self.name, outside_fp8=self._outside_fp8())
        self._append_to(program, observed=observed)
        return program

    def _append_to(self, program: Any, *, observed: bool = False) -> None:
        """Append the ops to a program, or to a recorder."""
        wanted = len(self._LINEARS) if observed else int(bool(self.return_layernorm_output))

        def observe() -> None:
            if program.num_extra_outputs < wanted:
                program.make_extra_output("input", False)

        self._append_ops(program, observe)

    def _append_ops(self, program: native.Program, observe: Callable[[], None]) -> None:
        """Append all of the layer's ops; call `observe` before each linear op."""
        self._append_norm(program, self._input_size())
        self._append_linears(program, observe, biased=self.apply_bias)

    def _segments_now(self) -> Segments:
        """Return how the layer runs on its ranks."""
        if self.tp_group is None:
            message = (
                f"{self.name}: the layer was made for tp_size = {self.tp_size} ranks and has no group; call "
                "set_tensor_parallel_group() before a forward"
            )
            raise StateError(message)
        exchange = self._exchange
        segments = self._segments.get(exchange)
        if segments is None:
            segments = self._segments[exchange] = self._make_segments(exchange)
        return segments

    def _make_segments(self, exchange: Exchange) -> Segments:
        head = None
        body = native.Program(self.name)
        if self.normalization is not None and exchange.before is not None:
            head = native.Program(self.name)
            self._append_norm(head, self._input_size())
        else:
            self._append_norm(body, self._input_size())
        biased = self.apply_bias and exchange.behind is None
        self._append_linears(body, lambda: None, biased=biased)
        return Segments(self, exchange, head, body)

    def _weight_handles(self) -> dict[str, Any]:
        return self._handles

    def _plan_count(self) -> int:
        programs = (self._program, self._observed)
        return sum(program.plan_count() for program in programs if program is not None)

    def _set_slots(self, epoch: int, forward: Any, backward: Any) -> None:
        for index, handle in enumerate(self._handles.values()):
            bases = index * self._FORWARD_SLOTS, index * self._BACKWARD_SLOTS
            handle.set_slots(epoch, forward, backward, *bases)

    # Forward -------------------------------------------------------------------------------------

    def _forward_general(self, inp: Any, is_first_microbatch: bool | None, **in_fp8: Any) -> Any:
        """Run the forward of calls that the native fast path does not take; `in_fp8` is `fp8_output` and `fp8_grad`."""
        if is_traced(inp):
            return forward_traced(self, inp, is_first_microbatch)
        own = own_region(self, **in_fp8)
        if own is not None:
            with own:
                return native.layer_forward(self, inp, is_first_microbatch, **in_fp8)
        try:
            return self._forward_in_region(inp, is_first_microbatch, **in_fp8)
        except (AttributeError, RuntimeError, TypeError):
            name_the_wrong_one(self, self._sizes_of_parameters())
            raise

    def _forward_in_region(self, inp: Any, is_first_microbatch: bool | None, **in_fp8: Any) -> Any:
        """Run such a forward by the recipe of the region in force."""
        self._refuse_functorch("here; call torch.nn layers inside of them")
        refuse_nested(self, inp)
        parameters, version = self._used_parameters(is_first_microbatch)
        weight = next(iter(parameters.values()))
        check_input(self, inp, self._FEATURES, getattr(self, self._FEATURES), weight.device)
        self.set_activation_dtype(inp)
        out = self._forward_on(parameters, version, inp, is_first_microbatch, **in_fp8)
        return self._with_bias(out) if self._returns_bias() else out

    def _forward_on(
        self,
        parameters: dict[str, torch.Tensor],
        version: int | None,
        inp: torch.Tensor,
        is_first_microbatch: bool | None,
        extras: tuple[torch.Tensor, ...] = (),
        buffers: native.Buffers | None = None,
        *,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Run the program on the layer's parameters, or on tensors that replace them."""
        enabled = self._note_region()
        x = self._plain_input(inp, enabled and not self._exchange)
        plain = {name: as_read(parameter) for name, parameter in parameters.items()}
        if any([plain[name] is not parameter for name, parameter in parameters.items()]):
            # Dequantised values have versions of their own, and memory that others may have had.
            parameters, version = plain, native.version_of_copy()
        if self._exchange:
            refuse(self.name, {"fp8_output": bool(fp8_output), "fp8_grad": bool(fp8_grad)})
            return self._forward_on_ranks(parameters, version, x, is_first_microbatch)
        if autocast_state.fp8_calibration and not autocast_state.fp8_enabled:
            return self._calibrate(parameters, version, x, is_first_microbatch, extras)
        if self.checkpoint and torch.is_grad_enabled() and x.numel() > 0:
            return recomputed(self, parameters, x, is_first_microbatch)
        given = tuple(parameters.values())
        return native.program_apply(
            *(self._program, self, x, extras, is_first_microbatch, given, version),
            *(buffers, fp8_output, fp8_grad),
        )

    def _note_region(self) -> bool:
        """Note the autocast region if it differs from that of the last call; tell whether it is of FP8."""
        enabled, *_, epoch = native.autocast_region()
        if not enabled:
            self._note_dequantized()
        if enabled and epoch != self._region_epoch:
            self.__dict__["_region_epoch"] = epoch
            self._enter_region()
        return bool(enabled)

    def _plain_input(self, inp: torch.Tensor, enabled: bool) -> torch.Tensor:
        """Return the input in the layer's type as a plain tensor, or quantised if the program reads it so."""
        if type(inp) in PLAIN:
            return inp if inp.dtype == self.activation_dtype else inp.to(self.activation_dtype)
        if is_quantized(inp):
            if enabled and inp.dtype == self.activation_dtype and not self.checkpoint:
                return inp
            inp = inp.dequantize(dtype=self.activation_dtype)  # type: ignore[call-arg]
        elif isinstance(inp, QuantizedTensorStorage):  # an IdentityTensor, or one of two values
            inp = inp.dequantize(dtype=self.activation_dtype)
        x = inp.to(self.activation_dtype)
        return x if type(x) in PLAIN else x.as_subclass(torch.Tensor)

    def _forward_on_ranks(
        self,
        parameters: dict[str, torch.Tensor],
        version: int | None,
        x: torch.Tensor,
        is_first_microbatch: bool | None,
    ) -> Any:
        segments = self._segments_now()
        if autocast_state.fp8_calibration and not autocast_state.fp8_enabled:
            message = (
                f"{self.name}: calibration (autocast(enabled=False, calibrating=True)) of a layer that ranks share is "
                "not supported yet; train a few steps in FP8 instead"
            )
            raise UnsupportedError(message)
        given = tuple(parameters.values())
        if self.checkpoint and torch.is_grad_enabled():
            return recompute.checkpoint(
                segments.apply, self, x, given, version, is_first_microbatch, use_reentrant=False
            )
        return segments.apply(self, x, given, version, is_first_microbatch)

    def _note_dequantized(self) -> None:
        """Warn if calls dequantise quantised weights."""
        if self._quantized_weights():
            message = f"{self.name}: the weights are quantised, and dequantised for each call outside of FP8"
            warnings.warn(message, UserWarning, stacklevel=_callers_level())

    def _with_bias(self, out: Any) -> tuple[torch.Tensor, ...]:
        y, *others = out if isinstance(out, tuple) else (out,)
        bias: Any = self._returned_bias()
        if bias is None:  # not what layers without biases return
            bias = needed_parameter(self, self._returned_bias_name(), self.name, "layer")
        return (y, bias.to(y.dtype), *others)

    def _calibrate(
        self,
        parameters: dict[str, torch.Tensor],
        version: int | None,
        x: torch.Tensor,
        is_first_microbatch: bool | None,
        extras: tuple[torch.Tensor, ...] = (),
    ) -> Any:
        """Record absolute maxima as FP8 would, while computing in high precision."""
        program = self._observed
        if program is None:
            program = self.__dict__["_observed"] = self._make_program(observed=True)
        given = tuple(parameters.values())
        y, *inputs = native.program_apply(
            program, self, x, extras, is_first_microbatch, given, version
        )
        self._take_maxima(inputs, [parameters[name] for name in self._LINEARS], *extras)
        return (y, inputs[0]) if self.return_layernorm_output else y

    def _take_maxima(
        self,
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        *extras: torch.Tensor,
    ) -> None:
        """Record the absolute maxima of the linear ops' operands in the histories."""
        self.init_fp8_metadata(self.fp8_meta["num_gemms"])
        state = self.fp8_meta.get("scaling_fwd")
        is_meant = state is not None and self.fp8_meta["recipe"].delayed() and inputs[0].numel() > 0
        if is_meant and not scale_tape.is_second():
            with torch.no_grad():
                self._record(state, inputs, weights, *extras)

    def _record(
        self,
        state: Any,
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        *_: torch.Tensor,
    ) -> None:
        live = state.amax_history[0]
        for index, tensors in enumerate(zip(inputs, weights, strict=True)):
            maxima = torch.stack([tensor.abs().amax().float() for tensor in tensors])
            base = index * self._FORWARD_SLOTS
            live[base : base + 2] = torch.maximum(live[base : base + 2], maxima)
        state.slots.mark_ran()

    # In graphs -----------------------------------------------------------------------------------

    def _traced_names(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters that the program reads, in op order; several names are parts of one."""
        return tuple((name,) for name in self._used_parameters(None)[0])

    def note_ties(self, ties: dict[str, tuple[torch.nn.Module, str]]) -> None:
        """Note whose parameters the layer's are.

        A graph reads the modules' parameters directly: it cannot replace the layer's, above all inside of a checkpoint.

        Parameters
        ----------
        ties : dict
            Name in the layer to the module that has the parameter, and the name in that module.
        """
        self.__dict__["_tied_modules"] = {name: module for name, (module, _) in ties.items()}
        self.__dict__["_tied_names"] = tuple((name, theirs) for name, (_, theirs) in ties.items())
        self._note_form()

    def _note_form(self) -> None:
        """Tell traces what the layer is; a compiled function that knows another form is compiled again."""
        form = Form(
            features=(self._FEATURES, getattr(self, self._FEATURES)),
            parameters=self._traced_names(),
            tied=self._tied_names,
            outside_fp8=self._outside_fp8(),
            is_shared=bool(self._exchange),
            is_recomputed=self.checkpoint,
            returns_bias=self._returns_bias(),
        )
        self._traced.form = text_of(form)

    def _delayed_states_of_linears(self, *, forward: bool) -> list[Any]:
        """Return the scales of the linear operations, which are parts of the layer's state."""
        return [self.fp8_meta.get("scaling_fwd" if forward else "scaling_bwd")]

    def _handles_of_linears(self) -> list[native.WeightHandle]:
        """Return the handles of the linear operations' weights."""
        return list(self._handles.values())

    def _prepare_on_ranks(self) -> None:
        """Prepare the form of a shared layer for tracers; runs once in a trace."""
        if is_exporting():
            message = (
                f"{self.name}: torch.export takes no layer that ranks share (tp_size = {self.tp_size}); export one of "
                "one rank, with the whole weights"
            )
            raise UnsupportedError(message)
        self.__dict__["_in_graphs"] = self._segments_now().in_graphs(self)
        # Calls outside of graphs compute a weight's gradient after a collective.
        for handle in self._handles.values():
            handle.delay_wgrad_compute = bool(self.delay_wgrad_compute)
            handle.save_original_input = self.__dict__.get("_save_original_input", False)

    _prepare_on_ranks._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _run_traced_on_ranks(
        self,
        x: torch.Tensor,
        params: list[tuple[torch.Tensor, ...]],
        is_first_microbatch: bool | None,
    ) -> Any:
        self._prepare_on_ranks()
        run = self._in_graphs.run
        if self.checkpoint and torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint  # as runtime/recompute.py does, and why

            return checkpoint(run, self, x, params, is_first_microbatch, use_reentrant=False)
        return run(self, x, params, is_first_microbatch)

    # Weight gradients ----------------------------------------------------------------------------

    def backward_dw(self) -> None:
        """Compute the weights' gradients of the oldest backward that left them, the last one first.

        Raises
        ------
        StateError
            If no backward left any.
        """
        if not self.delay_wgrad_compute:
            return
        waiting = [name for name, handle in self._handles.items() if handle.deferred_count()]
        if not waiting:
            message = f"{self.name}: backward_dw() was called without a backward before it"
            raise StateError(message)
        for name in reversed(waiting):
            self._compute_deferred(name, self._handles[name])
        # A graph runs no hooks; its replay runs them.
        if not is_graph_capturing():
            self._trigger_wgrad_accumulation_and_reduce_hooks()

    def _compute_deferred(self, name: str, handle: native.WeightHandle) -> None:
        weight, fuse = getattr(self, name), self.fuse_wgrad_accumulation
        dw = native.program_backward_dw(handle, weight, fuse)
        if dw is not None:
            main_grad.give(weight, dw, self.name, fuse=fuse, overwrite=False)

    # Parameters ----------------------------------------------------------------------------------

    def reset_layer_norm_parameters(self) -> None:
        """Initialise the norm's parameters; deprecated, as in Transformer Engine.

        Call :meth:`reset_parameters` instead.
        """
        message = f"{type(self).__name__}.reset_layer_norm_parameters: use reset_parameters instead"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        self._reset_norm()

    # Checkpoints of torch.nn ---------------------------------------------------------------------

    def _norm_copies(self, source: Source | None) -> list[Copy]:
        """Return the copies that load a ``torch.nn`` norm; a zero-centred weight is 1 less."""
        if source is None:
            return []
        targets = {name.rpartition("_")[2]: [getattr(self, name)] for name in self._norm_names()}
        less = {"weight": 1.0} if self.zero_centered_gamma else None
        return copies_of(targets, [source], f"{self.name}: layer_norm", less=less)
