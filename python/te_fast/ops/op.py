"""Base classes of fusible operations, from which users derive their own."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

from te_fast.errors import ArgumentError, ArgumentIndexError, StateError, TeFastError
from te_fast.ops.recipe_state import RecipeStateModule
from te_fast.parallel.ranks import NO_EXCHANGE, Exchange, reduced_sharing
from te_fast.runtime.calls import call_through_forward, program_call_method
from te_fast.runtime.compiling import is_in_graph
from te_fast.tensor.quantizer import Float8QuantizerBase

if TYPE_CHECKING:
    from te_fast.ops.fuser import OperationFuser
    from te_fast.recipe import Recipe

#: Tensors of each basic operation, as its methods return them.
PerOp = Iterable[Iterable[torch.Tensor | None]]


#: All operations, of which those by themselves may share graphs.
_operations: WeakSet[FusibleOperation] = WeakSet()


class Beside(NamedTuple):
    """Whether an operation's results go straight to linear operations, which quantise them themselves."""

    #: Whether the operation before it is a linear one, which quantises the gradient of its input.
    gradient: bool = False
    #: Whether the operation behind it is a linear one, which quantises its output.
    output: bool = False


ALONE = Beside()


class OperationContext:
    """The tensors and attributes that one operation keeps from forward to backward.

    Attributes
    ----------
    requires_grad : bool
        Whether the operation has a backward.
    to_save : tuple of torch.Tensor or None
        PerOp to keep; set by :meth:`save_for_backward`.
    saved_tensors : tuple of torch.Tensor or None
        The same tensors, in backward.
    beside : Beside
        The quantisation that linear operations beside it do.
    is_first_microbatch : bool or None
        The call's argument of this name.

    See Also
    --------
    BasicOperation : Is given one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ctx = ops.OperationContext()
    >>> ctx.save_for_backward(torch.ones(2))
    >>> len(ctx.to_save)
    1
    """

    requires_grad = True
    beside = ALONE
    is_first_microbatch: bool | None = None
    to_save: tuple[torch.Tensor | None, ...] | None = None
    saved_tensors: tuple[torch.Tensor | None, ...] | None = None

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors for backward."""
        self.to_save = tensors


class FusibleOperation(torch.nn.Module, metaclass=abc.ABCMeta):
    """An operation that :class:`te_fast.pytorch.ops.Sequential` may fuse with its neighbours.

    See Also
    --------
    BasicOperation : One operation.
    FusedOperation : Several.

    Examples
    --------
    >>> from te_fast.pytorch import ops
    >>> isinstance(ops.ReLU(), ops.FusibleOperation)
    True
    """

    _own_fuser: OperationFuser | None = None
    #: Makes a group of operations; the module of groups puts its class here.
    _make_fuser: ClassVar[type[OperationFuser]]

    @property
    @abc.abstractmethod
    def is_fused_op(self) -> bool:
        """Whether this stands for several basic operations."""

    def pre_first_fuser_forward(self) -> None:
        """Prepare for the first forward."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Prepare for a forward.

        Parameters
        ----------
        requires_grad : bool
            Whether the operation will have a backward.
        """

    @abc.abstractmethod
    def get_input_quantizer(self) -> Float8QuantizerBase | None:
        """Return the quantizer of the input, or None."""

    @abc.abstractmethod
    def get_grad_output_quantizer(self) -> Float8QuantizerBase | None:
        """Return the quantizer of the output's gradient, or None."""

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, PerOp]:
        """Run forward; lists have one entry per basic operation.

        Parameters
        ----------
        basic_op_ctxs : list of OperationContext
            Contexts of the basic operations, which keep tensors for backward.
        input_ : torch.Tensor
            Input.
        basic_op_extra_inputs : list of tuple of torch.Tensor
            Extra inputs of the basic operations.
        prev_op_grad_output_quantizer, next_op_input_quantizer : None
            Always None in te_fast.
        basic_op_kwargs : list of dict
            Keyword arguments of the basic operations.

        Returns
        -------
        torch.Tensor
            Output.
        iterable of iterable of torch.Tensor
            Extra outputs of the basic operations.
        """
        message = f"{type(self).__name__} has no fuser_forward"
        raise NotImplementedError(message)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor | None, PerOp, PerOp]:
        """Run backward; lists have one entry per basic operation.

        Parameters
        ----------
        basic_op_ctxs : list of OperationContext
            Contexts of the basic operations, with the tensors of forward.
        grad_output : torch.Tensor
            Gradient of the output.
        basic_op_grad_extra_outputs : list of tuple of torch.Tensor or None
            Gradients of the extra outputs.

        Returns
        -------
        torch.Tensor
            Gradient of the input.
        iterable of iterable of torch.Tensor
            Gradients of the basic operations' parameters.
        iterable of iterable of torch.Tensor
            Gradients of the basic operations' extra inputs.
        """
        message = f"{type(self).__name__} has no fuser_backward"
        raise NotImplementedError(message)

    def __init__(self) -> None:
        super().__init__()
        _operations.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copied or pickled state."""
        super().__setstate__(state)
        _operations.add(self)

    def _fuser(self) -> OperationFuser:
        """Return the group that runs this single operation, made at first use."""
        fuser = self._own_fuser
        if fuser is None or fuser._channels_stale:
            fuser = self.__dict__["_own_fuser"] = self._make_fuser([self])
            fuser.runs_for(self)
        return fuser

    def _prepare_fuser(self) -> None:
        """Make the groups of this operation and of those of its class that are in none.

        They may share a graph. One without a group would not fit the graph of this one.
        """
        self._fuser()
        for other in list(_operations):
            if type(other) is type(self) and not other.__dict__.get("_capturing_fusers"):
                with contextlib.suppress(TeFastError):  # its own call raises it
                    other._fuser()

    _prepare_fuser._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _group(self) -> OperationFuser:
        """Return the group that runs this single operation, also if a trace is its first use."""
        if is_in_graph():
            self._prepare_fuser()
        return self._fuser()

    def _init_delayed_scaling(self) -> None:
        """Register scales; called when the operation runs by itself and the region is new."""
        self._fuser()._init_delayed_scaling()

    def __init_subclass__(cls, **options: Any) -> None:
        """Let subclasses that override ``forward`` be called as any module."""
        super().__init_subclass__(**options)
        call_through_forward(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let deep copies share process groups."""
        names = "tensor_parallel_group", "process_group"
        groups = [self.__dict__.get(name) for name in names]
        return reduced_sharing(super().__reduce_ex__(protocol), groups)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out references to containers and native objects."""
        dropped = (
            "_own_fuser",
            "_capturing_fusers",
            "_direct_program",
            "_direct_call",
            "_own_program",
        )
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in dropped}


class BasicOperation(FusibleOperation, RecipeStateModule, metaclass=abc.ABCMeta):
    """One operation, with its parameters and state.

    A subclass writes :meth:`op_forward` and :meth:`op_backward` in torch code, or, with extra inputs
    or outputs, ``fuser_forward`` and ``fuser_backward``.

    Attributes
    ----------
    num_extra_inputs, num_extra_outputs : int
        Extra inputs and outputs of a forward.
    supports_float8_block_scaling : bool
        Whether the operation supports block scaling; te_fast does not use it.

    See Also
    --------
    FusedOperation : Stands for several.
    Sequential : Runs them.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> class Double(ops.BasicOperation):
    ...     def op_forward(self, ctx, x, **options):
    ...         return 2 * x
    ...
    ...     def op_backward(self, ctx, grad):
    ...         return 2 * grad, ()
    ...
    >>> ops.Sequential(Double(), ops.ReLU())(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 4.]])
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    supports_float8_block_scaling: bool = True
    #: Attributes that a native program contains as constants; a change compiles it again.
    _constant_names: ClassVar[frozenset[str]] = frozenset()
    #: Attributes that say whether a native program has the operation.
    _mode_names: ClassVar[frozenset[str]] = frozenset()
    #: Whether the next operation begins another program, so that nothing fuses across.
    _ends_program: ClassVar[bool] = False
    #: Whether the first extra input is added to the input, and must have its type.
    _adds_extra: ClassVar[bool] = False
    #: Whether extra output and output are both the input.
    _hands_input_out: ClassVar[bool] = False
    #: Whether the first extra input counts the rows of experts.
    _counts_rows: ClassVar[bool] = False
    #: Whether the native form quantises its input and the gradient of its output itself.
    _takes_to_fp8: ClassVar[bool] = False
    #: Whether the gradient of the input is the gradient of the output, unchanged.
    _hands_gradient_on: ClassVar[bool] = False
    #: Parameters that it always has.
    _needed_names: Sequence[str] = ()
    #: The collectives before and behind it.
    _exchange: Exchange = NO_EXCHANGE
    #: The operation's collective along the first dimension, as :class:`te_fast.parallel.in_graphs.Ranks` names it.
    _collective: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self._extra_input_channels: dict[int, str] = {}
        self._extra_output_channels: dict[int, tuple[str, bool]] = {}

    @property
    def is_fused_op(self) -> bool:
        """False."""
        return False

    def get_input_quantizer(self) -> Float8QuantizerBase | None:
        """Return the quantizer of the input, or None."""
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Float8QuantizerBase | None:
        """Return the quantizer of the output's gradient, or None."""
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    @abc.abstractmethod
    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run forward.

        Parameters
        ----------
        ctx : OperationContext
            Keeps tensors and attributes for backward.
        input_ : torch.Tensor
            Input.
        prev_op_grad_output_quantizer, next_op_input_quantizer : None
            Always None in te_fast.
        **kwargs
            Keyword arguments that the caller passed as ``op_kwargs`` of this operation.

        Returns
        -------
        torch.Tensor
            Output.
        """

    @abc.abstractmethod
    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Iterable[torch.Tensor | None]]:
        """Run backward.

        Parameters
        ----------
        ctx : OperationContext
            The context of forward.
        grad_output : torch.Tensor
            Gradient of the output.

        Returns
        -------
        torch.Tensor
            Gradient of the input.
        iterable of torch.Tensor
            Gradients of the parameters.
        """

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, PerOp]:
        """Run :meth:`op_forward`."""
        self._refuse_extra_tensors("fuser_forward", "op_forward")
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor | None, PerOp, PerOp]:
        """Run :meth:`op_backward`."""
        self._refuse_extra_tensors("fuser_backward", "op_backward")
        result: Any = self.op_backward(basic_op_ctxs[0], grad_output)
        if not isinstance(result, tuple | list) or len(result) != 2:
            message = (
                f"{type(self).__name__}.op_backward must return the gradient of the input and those of "
                f"the parameters, got a {type(result).__name__}"
            )
            raise StateError(message)
        grad_input, grad_params = result
        return grad_input, [grad_params], [()]

    def _refuse_extra_tensors(self, wanted: str, other: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            message = (
                f"{type(self).__name__} has {self.num_extra_inputs} extra inputs and "
                f"{self.num_extra_outputs} extra outputs: it must override {wanted}, not {other}"
            )
            raise StateError(message)

    # Channels -------------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, channel: str | None) -> None:
        """Take an extra input from an earlier operation of the same group, not from the caller.

        Parameters
        ----------
        index : int
            Which of the extra inputs.
        channel : str, optional
            Name that the earlier operation's output has; ``None`` gives it back to the caller.
        """
        self._check_slot("input", index, self.num_extra_inputs, channel)
        if channel is None:
            self._extra_input_channels.pop(index, None)
        else:
            self._extra_input_channels[index] = channel
        self._channels_changed()

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> None:
        """Name an extra output, for later operations of the same group.

        Parameters
        ----------
        index : int
            Which of the extra outputs.
        channel : str, optional
            Its name; ``None`` takes the name away and returns the output to the caller.
        output_to_caller : bool, default = True
            Return it to the caller, too.
        """
        self._check_slot("output", index, self.num_extra_outputs, channel)
        if not isinstance(output_to_caller, bool):
            message = (
                f"{type(self).__name__}: output_to_caller must be a bool, got {output_to_caller!r}"
            )
            raise ArgumentError(message)
        if channel is None:
            self._extra_output_channels.pop(index, None)
        else:
            self._extra_output_channels[index] = (channel, output_to_caller)
        self._channels_changed()

    def _check_slot(self, kind: str, index: int, count: int, channel: Any) -> None:
        if not isinstance(index, int) or not 0 <= index < count:
            message = (
                f"{type(self).__name__}: extra {kind} {index!r} is out of range: there are {count}"
            )
            raise ArgumentIndexError(message)
        if channel is not None and (not isinstance(channel, str) or not channel):
            message = (
                f"{type(self).__name__}: a channel's name must be a non-empty string, or None for no channel, "
                f"got {channel!r}"
            )
            raise ArgumentError(message)

    def _channels_changed(self) -> None:
        for fuser in self.__dict__.get("_capturing_fusers", ()):
            fuser._forget(stale=True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and drop the programs that contain it as a constant."""
        super().__setattr__(name, value)
        # torch.nn.utils.parametrize removes a parameter that programs read; the next plan raises an error.
        if name in self._constant_names or name == "parametrizations":
            self.__dict__.pop("_own_program", None)
            for fuser in self.__dict__.get("_capturing_fusers", ()):
                fuser._forget()
        if name in self._mode_names:
            for fuser in self.__dict__.get("_capturing_fusers", ()):
                fuser._mode_changed()

    def _captured_by(self, fuser: OperationFuser) -> None:
        self.__dict__.setdefault("_capturing_fusers", WeakSet()).add(fuser)

    # Running --------------------------------------------------------------------------------------

    def _is_native(self, beside: Beside = ALONE) -> bool:
        """Tell whether a native program runs this: it has a native form, and no method is overridden by the user."""
        own = type(self)
        return own._append_to is not BasicOperation._append_to and all(
            getattr(own, name).__module__.startswith("te_fast.") for name in _OVERRIDABLE
        )

    def _is_in_parts(self) -> bool:
        """Tell whether each expert has a parameter, which programs beside Python operations do not take."""
        return False

    def _parts_of_parameters(self) -> list[tuple[torch.Tensor, ...]] | None:
        """Return the parts of each parameter of programs; None if no parameter has parts."""
        return None

    def _fused_parts(self) -> Sequence[torch.Tensor]:
        """Return the parts of parameters whose gradients go into their ``main_grad``."""
        return ()

    def _counts_of_rows(self, counts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the extra input that counts the rows of experts, in the programs' type."""
        raise NotImplementedError

    def _result_type(
        self,
        dtype: torch.dtype,
        extras: tuple[torch.dtype, ...],
        autocast: torch.dtype | None,
    ) -> torch.dtype:
        """Return the type of the result, given those of the inputs and of ``torch.autocast``."""
        return dtype

    def _torch_function(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a torch function for a forward outside of programs, with torch's gradient, or None."""
        return None

    def _append_to(self, program: Any, label: str) -> None:
        """Append this to a native program."""
        message = f"{label} is no native operation"
        raise NotImplementedError(message)

    def _init_scales(self, recipe: Recipe, epoch: int) -> None:
        """Make delayed scaling's state for a region that is new to the group."""
        self.reset_recipe_state(recipe=recipe)
        self._take_part()
        self._set_slots(epoch)

    def _set_slots(self, epoch: int) -> None:
        """Register delayed scaling's state with the native half."""

    # `op(x)` enters here: the native program runs at once if there is no hook and no option.
    __call__ = program_call_method

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        is_first_microbatch: bool | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Apply the operation by itself."""
        return self._group()(
            input,
            *extra_inputs,
            basic_op_kwargs=[kwargs] if kwargs else None,
            is_first_microbatch=is_first_microbatch,
        )

    _called_forward = forward


_OVERRIDABLE = (
    "op_forward",
    "op_backward",
    "fuser_forward",
    "fuser_backward",
    "pre_fuser_forward",
    "num_quantizers",
)


class FusedOperation(FusibleOperation):
    """An operation that stands for several basic operations, and has no state of its own.

    Parameters
    ----------
    basic_ops : iterable of FusibleOperation
        The basic operations, in order.

    See Also
    --------
    BasicOperation : What it stands for.
    register_forward_fusion : Registers a function that returns it.

    Examples
    --------
    >>> from te_fast.pytorch import ops
    >>> fused = ops.FusedOperation((ops.ReLU(), ops.ConstantScale(2.0)))
    >>> len(fused.basic_ops)
    2
    """

    basic_ops: torch.nn.ModuleList

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        if len(self.basic_ops) == 0:
            message = f"{type(self).__name__}: a fused operation needs basic operations, got none"
            raise ArgumentError(message)

    @property
    def is_fused_op(self) -> bool:
        """True."""
        return True

    def get_input_quantizer(self) -> Float8QuantizerBase | None:
        """Return the quantizer of the first operation's input, or None."""
        first: FusibleOperation = self._parts()[0]
        return first.get_input_quantizer()

    def get_grad_output_quantizer(self) -> Float8QuantizerBase | None:
        """Return the quantizer of the last operation's output gradient, or None."""
        last: FusibleOperation = self._parts()[-1]
        return last.get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        """Prepare all basic operations."""
        for op in self._parts():
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Prepare all basic operations."""
        for op in self._parts():
            op.pre_fuser_forward(requires_grad=requires_grad)

    def _parts(self) -> list[Any]:
        return list(self.basic_ops)

    # As of BasicOperation.
    __call__ = program_call_method

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Apply the operation by itself."""
        return self._group()(
            input,
            *extra_inputs,
            basic_op_kwargs=basic_op_kwargs,
            is_first_microbatch=is_first_microbatch,
        )

    _called_forward = forward
