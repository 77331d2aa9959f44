"""The FP8 linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast.errors import ShapeError
from te_fast.layers.parameters import check_sizes, options_of, refuse_userbuffers
from te_fast.layers.parts import watch
from te_fast.layers.split import SplitLinear
from te_fast.runtime import high_precision
from te_fast.runtime.arguments import check_flags, check_functions
from te_fast.runtime.global_state import autocast_state
from te_fast.runtime.inputs import check_input, refuse_nested
from te_fast.tensor.primary import is_quantized


class Linear(SplitLinear):
    """Apply ``y = x Wᵀ + b``, in FP8 inside :class:`te_fast.pytorch.autocast`.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last dimension. In FP8 both are multiples of 16.
    sequence_parallel : bool, default = False
        Each rank has only its own rows of the tensors that are not split by columns: the input of a column-parallel
        layer is gathered, the result of a row-parallel one reduced and shared out. It has no effect with one rank.
    tp_group : torch.distributed.ProcessGroup, optional
        Ranks that share the layer. If it is missing and `tp_size` is above 1, set it by
        :meth:`set_tensor_parallel_group`.
    tp_size : int, default = 1
        Number of these ranks.
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
        Which dimension of the weight ranks share: ``column`` is `out_features`, ``row`` is `in_features`.
    parameters_split : tuple of str or dict of str to int, optional
        Names of parts that the parameters are split into along dimension 0, equal or of given sizes.
    device : torch.device or str, default = 'cuda'
        Where the parameters are made; None is torch's default device, and ``'meta'`` defers to
        :meth:`reset_parameters`.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad : bool
        Userbuffers; not supported yet.
    ub_name : str, optional
        Name of the layer's buffers; it has no effect without Userbuffers.
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
        If a size is not an integer, a flag neither true nor false, or a function not callable, or if layers do not
        compute in `params_dtype`.

    See Also
    --------
    te_fast.pytorch.autocast : the region in which layers quantise.
    te_fast.pytorch.LayerNormLinear : with a norm in front.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te

    >>> layer = te.Linear(64, 32, device="cpu")
    >>> with te.autocast():
    ...     y = layer(torch.ones(16, 64))
    >>> y.sum().backward()
    >>> tuple(y.shape), tuple(layer.weight.grad.shape)
    ((16, 32), (32, 64))
    """

    normalization = None
    zero_centered_gamma = False
    layer_norm_weight = None
    layer_norm_bias = None

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
        refuse_userbuffers(self.name, locals())
        if parallel_mode not in (None, "column", "row"):
            message = (
                f"{self.name}: parallel_mode must be None, 'column' or 'row', got {parallel_mode!r}"
            )
            raise ShapeError(message)
        self._share_among_ranks(tp_group, tp_size, sequence_parallel=sequence_parallel)
        check_sizes(self.name, in_features=in_features, out_features=out_features)
        check_flags(
            self.name,
            bias=bias,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        check_functions(
            self.name, init_method=init_method, get_rng_state_tracker=get_rng_state_tracker
        )
        self._divide_features(in_features, out_features, parallel_mode)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.ub_name = ub_name
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.init_method = init_method
        options = options_of(params_dtype, device, self.name)
        self._make_linear_parameters(parameters_split, options)
        self._make_native()
        self.save_original_input = save_original_input
        self.reset_parameters(defer_init=options["device"].type == "meta")

    def _make_native(self) -> None:
        super()._make_native()
        self._handles["weight"].save_original_input = self.__dict__.get(
            "_save_original_input", False
        )

    def _outside_fp8(self) -> str:
        # torch does not compute gradients that go into main_grad or are delayed.
        return "general" if self.fuse_wgrad_accumulation or self.delay_wgrad_compute else "torch"

    @property
    def save_original_input(self) -> bool:
        """Whether backward quantises the original input again."""
        return bool(self.__dict__["_save_original_input"])

    @save_original_input.setter
    def save_original_input(self, value: bool) -> None:
        self.__dict__["_save_original_input"] = bool(value)
        self._handles["weight"].save_original_input = bool(value)

    def _forward_in_region(self, inp: Any, is_first_microbatch: bool | None, **in_fp8: Any) -> Any:
        """Run the forward of calls that the native fast path does not take, by the recipe of the region in force."""
        if autocast_state.fp8_enabled:
            refuse_nested(self, inp)
        # A parametrization may compute the weight anew at each access, so it is read once.
        parameters, version = self._used_parameters(is_first_microbatch)
        device = parameters["weight"].device
        check_input(self, inp, "in_features", self.in_features, device)
        self.set_activation_dtype(inp)
        if self._exchange or (autocast_state.fp8_enabled and self.in_features != 0):
            self._refuse_functorch("in FP8; call the layer outside of te_fast.pytorch.autocast")
            out = self._forward_on(parameters, version, inp, is_first_microbatch, **in_fp8)
        else:
            if is_quantized(inp):
                inp = inp.dequantize()
            out = self._high_precision(inp, parameters, is_first_microbatch)
        return self._with_bias(out) if self.return_bias else out

    def _high_precision(
        self,
        inp: torch.Tensor,
        parameters: dict[str, torch.Tensor],
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        parameter, bias = parameters["weight"], parameters.get("bias")
        weight = parameter
        if is_quantized(parameter):
            self._note_dequantized()
            weight = parameter.dequantize()
        if autocast_state.fp8_calibration:
            self._take_maxima([inp], [weight])
        # If this forward is repeated, it must not repeat the region of an earlier one.
        self._program.forget_region()
        handle = self._handles["weight"]
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            inp = inp.to(self.activation_dtype)
        out = high_precision.linear(
            inp,
            weight,
            bias,
            handle,
            parameter=parameter if self._parts is None else None,
            overwrite=is_first_microbatch is True,
        )
        if self._parts is not None and inp.requires_grad:
            watch(self, weight, out)
        return out

    def extra_repr(self) -> str:
        """Sizes and bias, as ``torch.nn.Linear`` shows them, then type, recipe and parallel arguments."""
        return self._repr_of(
            in_features=self.in_features, out_features=self.out_features, bias=self.use_bias
        )
