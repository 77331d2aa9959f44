"""The FP8 linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from te_fast.errors import ShapeError, StateError
from te_fast.pytorch import _high_precision, _ops, _scale_tape
from te_fast.pytorch._global_state import autocast_state
from te_fast.pytorch._overridden import OverriddenLinear
from te_fast.pytorch._parameters import check_sizes, options_of, refuse
from te_fast.pytorch._split import SplitLinear

__all__ = ["Linear"]


class Linear(SplitLinear):
    """Apply ``y = x Wᵀ + b``, in FP8 inside :class:`te_fast.pytorch.autocast`.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last dimension. In FP8 both are multiples of 16.
    sequence_parallel, tp_group, tp_size : optional
        Tensor parallelism; groups of one rank only so far.
    fuse_wgrad_accumulation : bool, default = False
        Add the weight's gradient to ``weight.main_grad`` in the GEMM. It is overwritten instead when
        ``is_first_microbatch=True``, or ``weight.overwrite_main_grad`` is set.
    get_rng_state_tracker : Callable, optional
        Gives the random number generator's tracker that initialisation forks.
    rng_tracker_name : str, optional
        Name of the state to fork.
    init_method : Callable, optional
        Initialises the weight in place; normal with standard deviation 0.023 by default.
    bias : bool, default = True
        Have a bias, zero at first.
    return_bias : bool, default = False
        Return ``(y, bias)`` with the bias not added.
    params_dtype : torch.dtype, optional
        Type of the parameters; ``torch.get_default_dtype()`` by default.
    parallel_mode : {'column', 'row'}, optional
        Which dimension would be split; marks the parameters.
    parameters_split : tuple of str or dict of str to int, optional
        Names of parts that the parameters are split into along dimension 0, equal or of given sizes.
    device : torch.device or str, default = 'cuda'
        Where the parameters are made; None is torch's default device, and ``'meta'`` defers to
        :meth:`reset_parameters`.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name : optional
        Userbuffers; not supported yet.
    delay_wgrad_compute : bool, default = False
        Leave the weight's gradient to :meth:`backward_dw`.
    symmetric_ar_type : str, optional
        Not supported yet.
    save_original_input : bool, default = False
        Keep the input as it is for backward and quantise it again there. Not with delayed scaling.
    name : str, optional
        Name in messages.

    Attributes
    ----------
    weight : torch.nn.Parameter
        ``(out_features, in_features)``.
    bias : torch.nn.Parameter
        ``(out_features,)``; an empty tensor without one.

    Raises
    ------
    UnsupportedError
        For an argument that te_fast does not support yet.
    DeviceError
        If `device` is a GPU and none can be used.
    ShapeError
        If a size is negative, or `parameters_split` is empty or does not add up to `out_features`.
    DtypeError
        If a size is no integer, or `params_dtype` no type that layers compute in.
    """

    _handle: _ops.LinearHandle
    # What runs under a recipe with backward_override, once there was one.
    _overridden: OverriddenLinear | None
    _NATIVE = ("_handle", "_overridden")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        device: torch.device | str | None = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        unsupported = {
            "sequence_parallel": sequence_parallel,
            "tp_size": tp_size != 1,
            "ub_overlap_ag": ub_overlap_ag,
            "ub_overlap_rs": ub_overlap_rs,
            "ub_overlap_rs_dgrad": ub_overlap_rs_dgrad,
            "ub_bulk_dgrad": ub_bulk_dgrad,
            "ub_bulk_wgrad": ub_bulk_wgrad,
            "ub_name": ub_name is not None,
            "symmetric_ar_type": symmetric_ar_type is not None,
        }
        refuse(self.name, unsupported)
        if parallel_mode not in (None, "column", "row"):
            message = (
                f"{self.name}: parallel_mode must be None, 'column' or 'row', got {parallel_mode!r}"
            )
            raise ShapeError(message)
        self.set_tensor_parallel_group(tp_group)
        check_sizes(self.name, in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.parallel_mode = parallel_mode
        self.ub_name = ub_name
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.init_method = init_method
        self._deferred: list[tuple[int, torch.Tensor, torch.Tensor, bool]] = []
        options = options_of(params_dtype, device, self.name)
        self._make_linear_parameters(parameters_split, options)
        self._make_native()
        self.save_original_input = save_original_input
        self.reset_parameters(defer_init=options["device"].type == "meta")

    def _make_native(self) -> None:
        handle = _ops.LinearHandle(
            self.name,
            self.in_features,
            self.out_features,
            apply_bias=self.apply_bias,
            return_bias=self.return_bias,
            # The parts' gradients reach their main_grad where the concatenation is undone.
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation and self._parts is None,
            delay_wgrad_compute=self.delay_wgrad_compute,
            whole=self._parts is None,
        )
        handle.save_original_input = self.__dict__.get("_save_original_input", False)
        self.__dict__["_handle"] = handle
        self.__dict__["_overridden"] = None

    def _weight_handles(self) -> dict[str, Any]:
        handles: dict[str, Any] = {"weight": self._handle}
        if self._overridden is not None:
            handles["weight, backward_override"] = self._overridden.handle
        return handles

    def _plan_count(self) -> int:
        count = self._handle.plan_count()
        return count if self._overridden is None else count + self._overridden.program.plan_count()

    def _set_slots(self, epoch: int, forward: Any, backward: Any) -> None:
        self._handle.set_slots(epoch, forward, backward)

    @property
    def save_original_input(self) -> bool:
        """Whether backward quantises the original input again."""
        return bool(self.__dict__["_save_original_input"])

    @save_original_input.setter
    def save_original_input(self, value: bool) -> None:
        self.__dict__["_save_original_input"] = bool(value)
        self._handle.save_original_input = bool(value)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters, after making those real that are on the meta device.

        Parameters
        ----------
        defer_init : bool, default = False
            Do nothing yet.
        """
        if defer_init:
            return
        self._reset_linear()
        self._drop_weight_cache()

    # `layer(x)` enters here: nn.Module.__call__ without its cost where no hook asks for it.
    __call__ = _ops.linear_call_method

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Apply the layer.

        Parameters
        ----------
        inp : torch.Tensor
            ``(..., in_features)``, of the parameters' type unless under ``torch.autocast``.
        is_first_microbatch : bool, optional
            True: quantise the weight and keep it. False: use the kept one. None: quantise it if it
            has changed. A kept weight is never used once the parameter has changed.
        fp8_output, fp8_grad : bool, default = False
            Not supported yet.

        Returns
        -------
        torch.Tensor or tuple
            ``(..., out_features)``; with `return_bias`, and the bias.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If the input does not fit; in FP8, if its rows are no multiple of 8 and
            :func:`te_fast.auto_pad` is off.
        """
        refuse(self.name, {"fp8_output": bool(fp8_output), "fp8_grad": bool(fp8_grad)})
        result: Any = _ops.linear_forward(self, inp, is_first_microbatch)
        return result

    _called_forward = forward

    def _with_bias(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self._bias() if self.use_bias else getattr(self, self.bias_names[0])
        return out, bias.to(out.dtype)

    def _forward_general(self, inp: Any, is_first_microbatch: bool | None) -> Any:
        """Forward of calls that the native fast path does not take."""
        device = getattr(self, self.weight_names[0]).device
        self._check_input(inp, "in_features", self.in_features, device)
        self.set_activation_dtype(inp)
        weight, version = self._weight(overwrite=is_first_microbatch is True)
        bias = self._bias() if self.apply_bias else None
        if autocast_state.fp8_enabled and inp.numel() > 0:
            self._refuse_functorch("in FP8; call the layer outside of te_fast.pytorch.autocast")
            inp = inp.to(self.activation_dtype)
            padding = _ops.padding_of(inp)
            x = inp if padding is None else padding.pad(inp)
            if not _ops.autocast_recipe().overrides_backward:
                mixed = weight.dtype != inp.dtype
                out = _ops.linear_apply(
                    self, self._handle, x, weight, bias, is_first_microbatch, mixed, version
                )
            else:
                run = self._override()
                out = run(self, x, weight, bias, version, is_first_microbatch)
            if padding is not None:
                out = padding.cut(out)
        else:
            if autocast_state.fp8_enabled:
                # Other ranks may have rows, and reduce their maxima with this one.
                self.init_fp8_metadata(self.fp8_meta["num_gemms"])
            out = self._high_precision(inp, weight, bias, is_first_microbatch)
        return self._with_bias(out) if self.return_bias else out

    def _override(self) -> OverriddenLinear:
        """Return what runs under a recipe with ``backward_override``."""
        run = self._overridden
        if run is None:
            sizes = self.in_features, self.out_features
            run = OverriddenLinear(self.name, *sizes, bias=self.apply_bias)
            run.handle.fuse_wgrad_accumulation = (
                self.fuse_wgrad_accumulation and self._parts is None
            )
            run.handle.delay_wgrad_compute = self.delay_wgrad_compute
            self.__dict__["_overridden"] = run
        return run

    def _high_precision(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        if autocast_state.fp8_calibration:
            self._calibrate(inp, weight)
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            inp = inp.to(self.activation_dtype)
            bias = None if bias is None else bias.to(inp.dtype)
            return _high_precision.linear(inp, weight, bias, self, is_first_microbatch is True)
        return functional.linear(inp, weight, bias)

    def _calibrate(self, inp: torch.Tensor, weight: torch.Tensor) -> None:
        """Take the absolute maxima that FP8 would, while computing in high precision."""
        self.init_fp8_metadata(self.fp8_meta["num_gemms"])
        state = self.fp8_meta.get("scaling_fwd")
        if state is None or not self.fp8_meta["recipe"].delayed() or inp.numel() == 0:
            return
        if _scale_tape.is_second():
            return
        with torch.no_grad():
            maxima = torch.stack([tensor.abs().amax().float() for tensor in (inp, weight)])
            live = state.amax_history[0]
            live[:2] = torch.maximum(live[:2], maxima)
        state.slots.mark_ran()

    def backward_dw(self) -> None:
        """Compute the weight's gradient of the oldest backward that left it.

        Raises
        ------
        StateError
            If no backward did.
        """
        if not self.delay_wgrad_compute:
            return
        # Forwards in FP8, under an override, and in high precision or on no rows leave theirs in different places.
        overridden = None if self._overridden is None else self._overridden.handle
        waiting: dict[int, Any] = {number: None for number, *_ in self._deferred[:1]}
        for handle in (self._handle, overridden):
            number = None if handle is None else handle.oldest_deferral()
            if number is not None:
                waiting[number] = handle
        if not waiting:
            message = f"{self.name}: backward_dw() was called without a backward before it"
            raise StateError(message)
        self._check_main_grads()
        dw = self._deferred_gradient(waiting[min(waiting)])
        if dw is not None:
            self._give_deferred(dw)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def _deferred_gradient(self, handle: Any) -> torch.Tensor | None:
        """Compute the oldest gradient that waits with a native handle, or in high precision without."""
        parameters = [getattr(self, name) for name in self.weight_names]
        if handle is None:
            _, x, grad, overwrite = self._deferred[0]
            dw = _high_precision.weight_gradient(self, parameters, x, grad, overwrite=overwrite)
            del self._deferred[0]
            return dw
        is_whole = self._parts is None
        fuse = self.fuse_wgrad_accumulation and is_whole
        if handle is self._handle:
            return _ops.linear_backward_dw(handle, parameters[0], fuse)
        whole = parameters[0] if is_whole else self._weight(overwrite=False)[0].detach()
        return _ops.program_backward_dw(handle, whole, fuse)

    def extra_repr(self) -> str:
        """Sizes and bias, as ``torch.nn.Linear`` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
