"""A linear layer of many experts, each of which has its own number of rows."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from te_fast import _config
from te_fast.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from te_fast.graphs.form import forward_traced
from te_fast.graphs.refusal import refusal
from te_fast.layers.missing import name_the_wrong_one
from te_fast.layers.parameters import (
    Init,
    check_functions,
    check_sizes,
    constant,
    held,
    initialise,
    normal,
    options_of,
    refuse,
)
from te_fast.layers.parts import PartedLayer, concatenate
from te_fast.ops.expert_loop import ExpertLoop, Experts, is_needed, is_never_needed, read_counts
from te_fast.parallel.agreement import compare_experts_in_debug
from te_fast.runtime import native, scale_tape
from te_fast.runtime.caller_memory import check_buffer
from te_fast.runtime.calls import grouped_layer_call_method
from te_fast.runtime.capturing import is_graph_capturing
from te_fast.runtime.collectives import mark_share
from te_fast.runtime.compiling import is_traced
from te_fast.runtime.global_state import autocast_state
from te_fast.runtime.inputs import check_input, refuse_nested
from te_fast.runtime.parts import fit_state, joined, lay_together
from te_fast.runtime.splits import check_in_debug
from te_fast.tensor.of_factory import own_region
from te_fast.tensor.of_recipe import ONE, Stack
from te_fast.tensor.primary import is_quantized
from te_fast.tensor.stacks import fill_experts

#: Number of host-side counts whose copies a layer keeps on the device.
_KEPT_SPLITS = 16
#: A block of a kernel finds the expert of its rows by a scan over all.
_MAX_GROUPS = 1024
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _index_in_graph(count: Any) -> int:
    """Return a count as an integer; ``operator.index`` would bind the graph to the value of a number."""
    if isinstance(count, (int, torch.SymInt)):  # traces of torch 2.8 know no unions
        return count  # type: ignore[return-value]
    if isinstance(
        count, float
    ):  # an error of operator.index would be an internal error of the trace
        message = "a count must be an integer"
        raise TypeError(message)
    return operator.index(count)


class GroupedLinear(PartedLayer):
    """Apply ``y = x W_eᵀ + b_e`` to the rows of each expert ``e``, in FP8 inside :class:`te_fast.pytorch.autocast`.

    The rows of the experts follow each other. One launch serves all experts. The counts may lie on the device; the host
    does not read them.

    Parameters
    ----------
    num_gemms : int
        Number of experts.
    in_features, out_features : int
        Sizes of the last dimension. In FP8 both are multiples of 16.
    sequence_parallel : bool, default = False
        Noted where ``tp_size`` is larger than 1; the layer does no communication.
    fuse_wgrad_accumulation : bool, default = False
        Add the weights' gradients to their ``main_grad``; the product itself adds if these are adjacent in memory.
        See Notes.
    tp_group : ProcessGroup, optional
        Noted; the layer does no communication.
    tp_size : int, default = 1
        Ranks that the features are divided among, as `parallel_mode` says.
    get_rng_state_tracker : Callable, optional
        Gives the random number generator's tracker that initialisation forks.
    rng_tracker_name : str, optional
        Name of the state to fork.
    init_method : Callable, optional
        Initialises each weight in place; normal with standard deviation 0.023 by default.
    bias : bool, default = True
        Have biases, zero at first.
    return_bias : bool, default = False
        Return ``(y, biases)`` with the biases not added.
    params_dtype : torch.dtype, optional
        Type of the parameters; ``torch.get_default_dtype()`` by default.
    parallel_mode : {'column', 'row'}, optional
        Which features `tp_size` divides: those of the output, or of the input.
    device : torch.device or str, default = 'cuda'
        Where the parameters are made; ``'meta'`` defers to :meth:`reset_parameters`.
    ub_overlap_rs, ub_overlap_ag, ub_name : optional
        Userbuffers; not supported.
    delay_wgrad_compute : bool, default = False
        Leave the weights' gradients to :meth:`backward_dw`.
    save_original_input : bool, default = False
        Keep the input as it is for backward and quantise it again there. Not with delayed scaling.
    single_grouped_weight : bool, default = False
        One parameter ``weight`` of ``(num_gemms, out_features, in_features)`` instead of one for each expert.
    single_grouped_bias : bool, default = False
        The same for the biases.
    name : str, optional
        Name in messages.
    use_grouped_tensor : bool, optional
        Has no effect: te_fast has one path, which takes counts on the device.

    Attributes
    ----------
    weight0, weight1, ... : torch.nn.Parameter
        ``(out_features, in_features)`` each, in one memory.
    bias0, bias1, ... : torch.nn.Parameter
        ``(out_features,)`` each; empty tensors without biases.

    Raises
    ------
    ShapeError
        If a size is negative, `num_gemms` is not 1 to 1024, `parallel_mode` does not exist, or `tp_size` does not
        divide the features.
    ArgumentError
        For Userbuffers, and if `tp_size` is larger than 1 with biases that the layer would add.
    DtypeError
        If a size is not an integer, or layers do not compute in `params_dtype`.

    See Also
    --------
    te_fast.pytorch.moe_permute_and_pad_with_probs : rows in the order of experts.
    te_fast.pytorch.ops.GroupedLinear : the same as a fusible operation.

    Notes
    -----
    Gradients that go into ``main_grad`` do not pass through torch's autograd. If no weight has a hook before
    the forward, the first trained weight stands for all in torch's graph. Hooks that come later are then not
    called for the others, and ``inputs`` of ``backward`` has to contain the first. Hooks are those of a weight,
    and those of its node (``AccumulateGrad``), which data parallelism has. A weight with
    ``grad_added_to_main_grad`` counts as one with hooks.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te

    >>> layer = te.GroupedLinear(3, 32, 16, device="cpu")
    >>> y = layer(torch.ones(8, 32), [5, 0, 3])
    >>> y.sum().backward()
    >>> tuple(y.shape), layer.weight1.grad.abs().sum().item()
    ((8, 16), 0.0)
    """

    _FEATURES = "in_features"
    _LINEARS = ("weight",)
    _KIND = "grouped_linear"
    normalization = None
    zero_centered_gamma = False
    layer_norm_weight = None
    layer_norm_bias = None

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | None = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        if ub_overlap_rs or ub_overlap_ag:
            message = f"{self.name}: GroupedLinear has no Userbuffers; leave ub_overlap_rs and ub_overlap_ag at False"
            raise ArgumentError(message)
        if use_grouped_tensor is not None and not isinstance(use_grouped_tensor, bool):
            got = type(use_grouped_tensor).__name__
            message = f"{self.name}: use_grouped_tensor must be a bool or None, got {got}"
            raise DtypeError(message)
        check_sizes(
            self.name,
            num_gemms=num_gemms,
            in_features=in_features,
            out_features=out_features,
        )
        self._share_among_ranks(tp_group, tp_size, sequence_parallel=sequence_parallel)
        if not 1 <= num_gemms <= _MAX_GROUPS:
            message = f"{self.name}: num_gemms must be 1 to {_MAX_GROUPS}, got {num_gemms}"
            raise ShapeError(message)
        self.num_gemms = num_gemms
        self.fp8_meta["num_gemms"] = num_gemms
        self.in_features, self.out_features = self._divided(
            in_features, out_features, parallel_mode, self.tp_size
        )
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        if self.tp_size > 1 and bias and not return_bias:
            message = (
                f"{self.name}: biases are not added on several ranks; pass bias=False, return_bias=True or "
                "tp_size=1"
            )
            raise ArgumentError(message)
        self.parallel_mode = parallel_mode
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.ub_name = ub_name
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.init_method = init_method
        self.single_grouped_weight = bool(single_grouped_weight)
        self.single_grouped_bias = bool(single_grouped_bias and bias)
        self.use_grouped_tensor = use_grouped_tensor
        options = options_of(params_dtype, device, self.name)
        self._make_parameters(options)
        self._make_native()
        self.save_original_input = save_original_input
        self.reset_parameters(defer_init=options["device"].type == "meta")

    def _divided(
        self, inputs: int, outputs: int, mode: str | None, tp_size: int
    ) -> tuple[int, int]:
        """Return the features of this rank."""
        if mode not in (None, "column", "row"):
            message = f"{self.name}: parallel_mode must be None, 'column' or 'row', got {mode!r}"
            raise ShapeError(message)
        if mode is None or tp_size <= 1:
            return inputs, outputs
        name, size = ("out_features", outputs) if mode == "column" else ("in_features", inputs)
        if size % tp_size != 0:
            message = f"{self.name}: {name} must be a multiple of tp_size = {tp_size}, got {size}"
            raise ShapeError(message)
        return (inputs, outputs // tp_size) if mode == "column" else (inputs // tp_size, outputs)

    # The program -------------------------------------------------------------------------

    def _append_ops(self, program: native.Program, observe: Callable[[], None]) -> None:
        observe()
        count, handle = self.num_gemms, self._handles["weight"]
        sizes = self.in_features, self.out_features
        slots = self._FORWARD_SLOTS, self._BACKWARD_SLOTS
        names = self.weight_names
        program.grouped_linear("linear", handle, self._parameters, names, count, *sizes, slots)
        if self.fuse_wgrad_accumulation and self._has_parts():
            program.fuse_parts()
        if self.apply_bias:
            names = self.bias_names
            program.grouped_bias("bias", self._parameters, names, count, self.out_features)

    def _split_mode(self) -> None:
        """Return that the layer has no collective: the code that routes tokens to experts has them."""
        return

    def _make_native(self) -> None:
        super()._make_native()
        # The last one is the GPU on which one launch serves all experts, as the last call of `forward` found.
        self.__dict__.update(_loop=None, _looped_region=None, _one_launch_on=None)
        # In no pickle: torch.load may put counts elsewhere than their keys say.
        self._splits_on_device: OrderedDict[Any, torch.Tensor] = OrderedDict()
        self._handles["weight"].save_original_input = self.__dict__.get(
            "_save_original_input", False
        )

    def _has_parts(self) -> bool:
        return not self.single_grouped_weight

    def _is_whole(self) -> bool:
        return self.single_grouped_weight

    def _returns_bias(self) -> bool:
        return False  # forward() returns all of them

    def _used_parameters(
        self, is_first_microbatch: bool | None
    ) -> tuple[dict[str, torch.Tensor], int | None]:
        version: int | None = None
        parts: list[torch.Tensor] = [getattr(self, name) for name in self.weight_names]
        weight = parts[0]
        if not self.single_grouped_weight:
            weight, version = concatenate(parts, self, overwrite=is_first_microbatch is True)
        used = {"weight": weight}
        return (used | {"bias": self._bias()} if self.apply_bias else used), version

    def _sizes_of_parameters(self) -> dict[str, tuple[int, ...]]:
        stack = (self.num_gemms,)
        weight, bias = (self.out_features, self.in_features), (self.out_features,)
        if self.single_grouped_weight:
            weight = (*stack, *weight)  # type: ignore[assignment]
        if self.single_grouped_bias:
            bias = (*stack, *bias)  # type: ignore[assignment]
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(self.weight_names, weight)
        return sizes | (dict.fromkeys(self.bias_names, bias) if self.use_bias else {})

    def _traced_names(self) -> tuple[tuple[str, ...], ...]:
        kinds = (self.weight_names, self.bias_names) if self.apply_bias else (self.weight_names,)
        return tuple(tuple(names) for names in kinds)

    def _bias(self) -> torch.Tensor:
        return joined([getattr(self, name) for name in self.bias_names])

    @property
    def save_original_input(self) -> bool:
        """Whether backward quantises the original input again."""
        return bool(self.__dict__["_save_original_input"])

    @save_original_input.setter
    def save_original_input(self, value: bool) -> None:
        self.__dict__["_save_original_input"] = bool(value)
        self._handles["weight"].save_original_input = bool(value)
        self.__dict__["_loop"] = self.__dict__["_looped_region"] = None

    # Experts one by one ---------------------------------------------------------------------------

    _NATIVE = (*PartedLayer._NATIVE, "_loop", "_looped_region", "_splits_on_device")

    def _weight_handles(self) -> dict[str, Any]:
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        experts = () if loop is None else enumerate(loop.handles)
        return self._handles | {f"expert {number}": handle for number, handle in experts}

    def _set_slots(self, epoch: int, forward: Any, backward: Any) -> None:
        super()._set_slots(epoch, forward, backward)
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        if loop is not None:
            loop.set_slots(epoch, forward, backward)

    def _experts(self) -> Experts:
        """Return the arguments of a loop over the experts."""
        return Experts(
            owner=self,
            name=self.name,
            inputs=self.in_features,
            outputs=self.out_features,
            weights=self.weight_names,
            biases=self.bias_names if self.apply_bias else None,
            number=self.num_gemms,
            fuse=self.fuse_wgrad_accumulation,
            later=self.delay_wgrad_compute,
            save_original_input=self.save_original_input,
            slots=(self._FORWARD_SLOTS, self._BACKWARD_SLOTS),
        )

    def backward_dw(self) -> None:
        """Compute the weights' gradients of the oldest backward that left them; frozen weights leave none."""
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        if loop is None or not loop.has_deferred():
            if any(handle.deferred_count() for handle in self._handles.values()):
                super().backward_dw()
            return
        loop.compute_deferred()
        if not is_graph_capturing():
            self._trigger_wgrad_accumulation_and_reduce_hooks()

    # Parameters ----------------------------------------------------------------------------------

    def _make_parameters(self, options: dict[str, Any]) -> None:
        count, inputs, outputs = self.num_gemms, self.in_features, self.out_features
        numbers = range(count)
        stack = torch.empty(count, outputs, inputs, **options)
        one_weight, one_bias = self.single_grouped_weight, self.single_grouped_bias
        self.weight_names = ["weight"] if one_weight else [f"weight{i}" for i in numbers]
        self.bias_names = ["bias"] if one_bias else [f"bias{i}" for i in numbers]
        made = [*zip(self.weight_names, [stack] if one_weight else stack, strict=True)]
        if not self.use_bias:
            for name in self.bias_names:
                setattr(self, name, torch.empty(0, **options))
        else:
            stack = torch.empty(count, outputs, **options)
            biases = [*zip(self.bias_names, [stack] if one_bias else stack, strict=True)]
            # In Transformer Engine's order, since optimizers' states belong to parameters by their order.
            if one_weight or one_bias:
                made = [*made, *biases] if one_bias else [*biases, *made]
            else:
                made = [one for pair in zip(made, biases, strict=True) for one in pair]
        for name, part in made:
            self.register_parameter(name, torch.nn.Parameter(part))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters; parameters on the meta device get memory first.

        Parameters
        ----------
        defer_init : bool, default = False
            Do nothing yet.
        """
        if defer_init:
            return
        is_row = self.parallel_mode == "row"
        for name, weight in held(self, self.weight_names):
            initialise(self, weight, self._init_of_weight(), forks=True)
            self._quantize_weight(name)
            weight = getattr(self, name)
            if self.parallel_mode is not None:
                mark_share(
                    weight, True, dim=int(is_row) + int(self.single_grouped_weight), stride=1
                )
            if self.delay_wgrad_compute:
                weight.skip_backward_post_hook = True
        for _, bias in held(self, self.bias_names if self.use_bias else ()):
            initialise(self, bias, constant(0.0), forks=False)
            if is_row:
                bias.sequence_parallel = self.sequence_parallel
            elif self.parallel_mode is not None:
                mark_share(bias, True, dim=0, stride=1)
        lay_together(self._of_parts())
        self._lay_quantized_together()
        self._drop_weight_cache()

    def _init_of_weight(self) -> Init | None:
        """Return the function that initialises a weight, expert by expert."""
        if not self.single_grouped_weight:
            return self.init_method
        check_functions(self.name, init_method=self.init_method)
        return partial(fill_experts, init=self.init_method or normal)

    def _linear_weights(self) -> tuple[str, ...]:
        return tuple(self.weight_names)

    def _stack_of_weight(self) -> Stack:
        return Stack(self.num_gemms, self._FORWARD_SLOTS) if self.single_grouped_weight else ONE

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        singles = {"weight": self.single_grouped_weight, "bias": self.single_grouped_bias}
        fit_state(state_dict, prefix, self.num_gemms, singles)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # Counts --------------------------------------------------------------------------------------

    def _splits(self, m_splits: Any, inp: torch.Tensor) -> torch.Tensor:
        """Return the counts as int64 on the input's device, without reading counts that are on a GPU.

        Raises
        ------
        DtypeError, ShapeError, DeviceError
            If the counts are not integers, not one for each expert, or on another GPU, or if counts on the host do not
            add up to the rows.
        """
        if not isinstance(m_splits, torch.Tensor):
            return self._placed(self._counts(m_splits), inp)
        self._check_kind(m_splits, inp)
        if m_splits.is_cpu:
            counts = tuple(m_splits.tolist())
            if not inp.is_cpu:
                return self._placed(counts, inp)
            self._check_counts(counts, inp)
        else:
            check_in_debug(self.name, m_splits, inp)
        if m_splits.dtype is not torch.int64:
            m_splits = m_splits.to(torch.int64)
        return m_splits if m_splits.is_contiguous() else m_splits.contiguous()

    def _splits_in_graph(self, m_splits: Any, inp: torch.Tensor) -> torch.Tensor:
        """Return the counts as int64 on the input's device.

        The trace checks a list, and the graph itself the values of a tensor on the host. Nothing reads counts on a GPU.

        Raises
        ------
        DtypeError, ShapeError, DeviceError
            As of :meth:`_splits`.
        """
        if not isinstance(m_splits, torch.Tensor):
            self._check_counts(self._counts(m_splits, _index_in_graph), inp)
            return torch.tensor(m_splits, dtype=torch.int64, device=inp.device)
        self._check_kind(m_splits, inp)
        if m_splits.is_cpu:
            rows: Any = 1
            for size in inp.shape[:-1]:  # numel() would bind an export to the number
                rows = rows * size
            fits = (m_splits.min() >= 0) & (m_splits.sum() == rows)
            # Without the layer's name: layers of one kind share a graph.
            message = "GroupedLinear: m_splits must not be negative, and must add up to the rows of the input"
            torch._assert_async(fits, message)
        return m_splits.to(device=inp.device, dtype=torch.int64)

    def _check_kind(self, m_splits: torch.Tensor, inp: torch.Tensor) -> None:
        """Check all of a tensor of counts but its values."""
        if m_splits.dtype not in _INTEGERS:
            message = f"{self.name}: m_splits must be integers, got a tensor of {m_splits.dtype}"
            raise DtypeError(message)
        if m_splits.shape != (self.num_gemms,):
            message = (
                f"{self.name}: m_splits must be one count for each of the {self.num_gemms} experts, got a tensor of "
                f"shape {list(m_splits.shape)}"
            )
            raise ShapeError(message)
        if not m_splits.is_cpu and m_splits.device != inp.device:
            message = (
                f"{self.name}: m_splits must be on the host or on {inp.device}, where the input is, got "
                f"{m_splits.device}"
            )
            raise DeviceError(message)

    def _counts(
        self, m_splits: Any, index: Callable[[Any], int] = operator.index
    ) -> tuple[int, ...]:
        counts: tuple[int, ...] | None
        try:
            counts = tuple(map(index, m_splits))
        except TypeError:
            counts = None  # traces of torch 2.8 know no "raise from"
        if counts is None:
            message = f"{self.name}: m_splits must be a list of integers or an integer tensor, got {m_splits!r}"
            raise DtypeError(message)
        if len(counts) != self.num_gemms:
            message = (
                f"{self.name}: m_splits must be one count for each of the {self.num_gemms} experts, "
                f"got {len(counts)}"
            )
            raise ShapeError(message)
        return counts

    def _check_counts(self, counts: Sequence[int], inp: torch.Tensor) -> None:
        refuse_nested(self, inp)
        rows = inp.shape[:-1].numel()
        if min(counts) < 0:
            message = f"{self.name}: m_splits must not be negative, got {list(counts)}"
            raise ShapeError(message)
        if sum(counts) != rows:
            message = (
                f"{self.name}: m_splits must add up to the {rows} rows of the input, got a sum of {sum(counts)}; "
                "leave the other rows out"
            )
            raise ShapeError(message)

    def _placed(self, counts: tuple[int, ...], inp: torch.Tensor) -> torch.Tensor:
        """Return counts of the host on the input's device, kept from an earlier call or made now."""
        self._check_counts(counts, inp)
        kept, key = self._splits_on_device, (counts, inp.device)
        if key not in kept:
            with torch.inference_mode(mode=False):  # later calls may keep it for their backward
                kept[key] = torch.tensor(counts, dtype=torch.int64, device=inp.device)
            if len(kept) > _KEPT_SPLITS:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    # Forward -------------------------------------------------------------------------------------

    # `layer(x, counts)` enters here, without the cost of nn.Module.__call__ if there are no hooks.
    __call__ = grouped_layer_call_method

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Apply the layer.

        Parameters
        ----------
        inp : torch.Tensor
            ``(..., in_features)``, of the parameters' type unless under ``torch.autocast``.
        m_splits : list of int or torch.Tensor
            Rows of each expert. The host does not read counts on the GPU: counts beyond the rows of `inp` are cut off,
            and rows of the result that belong to no expert are not written. Counts on the host must add up to the rows.
            Experts that run one by one are an exception: the host reads their counts (see Notes).
        is_first_microbatch : bool, optional
            True: quantise the weights and keep them. False: use the kept ones. None: quantise them if they have
            changed.
        out, dgrad_out : torch.Tensor, optional
            ``(rows, out_features)`` and ``(rows, in_features)`` memory for the result and the input's gradient.

        Returns
        -------
        torch.Tensor or tuple
            ``(..., out_features)``; with `return_bias`, the biases behind it, a list or their stack.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If the input or the counts do not fit.

        Notes
        -----
        Experts run one by one with operands in FP32, with lines that are no multiples of 16 bytes, in a region whose
        recipe has ``backward_override="dequantized"``, and on GPUs other than Hopper's. There cuBLASLt multiplies all
        experts at once without a bias and block scales, if its version is known to be right and a trial at the first
        call agrees.
        """
        if not isinstance(inp, torch.Tensor):
            check_input(self, inp, "in_features", self.in_features, torch.device("cpu"))
        if is_first_microbatch is not None:
            is_first_microbatch = bool(is_first_microbatch)
        traced = is_traced(inp)
        if not traced and out is None and dgrad_out is None:
            y: Any = native.grouped_layer_straight(self, inp, m_splits, is_first_microbatch)
            if y is not None:
                return y
        own = None if traced else own_region(self)
        if own is not None:
            with own:
                return GroupedLinear.forward(
                    self, inp, m_splits, is_first_microbatch, out, dgrad_out
                )
        looped = None if traced else self.__dict__.get("_looped_region")
        if looped is not None and scale_tape.is_repeating():
            with scale_tape.recorded_region(looped):
                return GroupedLinear.forward(
                    self, inp, m_splits, is_first_microbatch, out, dgrad_out
                )
        if traced:
            return self._forward_any(inp, m_splits, is_first_microbatch, out, dgrad_out)
        try:
            return self._forward_any(inp, m_splits, is_first_microbatch, out, dgrad_out)
        except (AttributeError, RuntimeError, TypeError):
            name_the_wrong_one(self, self._sizes_of_parameters())
            raise

    _called_forward = forward

    def _forward_any(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None,
        out: torch.Tensor | None,
        dgrad_out: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Run the forward of calls that the native side does not take at once, by the recipe of the region in force."""
        traced = is_traced(inp)
        if not traced:
            compare_experts_in_debug(self, inp, m_splits)
        biased = self.use_bias and not self.return_bias
        if is_needed(inp, self.in_features, self.out_features, biased=biased):
            given = out is not None or dgrad_out is not None
            refuse(self.name, {"out or dgrad_out of experts that run one by one": given})
            if not traced:
                self._note_looped_region()
            return self._with_biases(self._looped(inp, m_splits, is_first_microbatch))
        if not traced:
            self.__dict__["_looped_region"] = None
            self._note_one_launch(inp)
        splits = self._splits_in_graph(m_splits, inp) if traced else self._splits(m_splits, inp)
        buffers = None
        if out is not None or dgrad_out is not None:
            if traced:
                message = f"{self.name}: a graph takes no out or dgrad_out; leave them out, or call the layer outside"
                raise refusal(message)
            buffers = self._memory_of_caller(inp, out, dgrad_out)
        y = None
        if not traced:
            y = native.grouped_layer_forward(self, inp, splits, is_first_microbatch, buffers)
        if y is None:
            y = self._general(inp, splits, is_first_microbatch, buffers)
        return self._with_biases(y) if self.return_bias else y

    def _note_looped_region(self) -> None:
        """Note the region for a forward that torch's checkpoint repeats outside of it, in place of the program's."""
        self._program.forget_region()
        self.__dict__["_one_launch_on"] = None
        enabled, calibrates, is_graph, is_first, *_ = native.autocast_region()
        objects = native.autocast_objects()
        region = (enabled, calibrates, *objects, is_first, is_graph) if enabled else None
        self.__dict__["_looped_region"] = region

    def _note_one_launch(self, inp: torch.Tensor) -> None:
        """Let later calls on the GPU of the input go to the native side at once."""
        if _config.EXPERT_LOOP or _config.DEBUG:  # both must see each call
            return
        if is_never_needed(inp, self.in_features, self.out_features):
            self.__dict__["_one_launch_on"] = inp.device.index

    def _with_biases(self, y: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Any]:
        if not self.return_bias:
            return y
        if not self.use_bias:
            return y, [getattr(self, name) for name in self.bias_names]
        biases = [getattr(self, name).to(y.dtype) for name in self.bias_names]
        return y, biases[0] if self.single_grouped_bias else biases

    def _looped(
        self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        """Forward of experts one by one."""
        if is_traced(inp):
            message = (
                f"{self.name}: experts that run one by one, as on this GPU, cannot be traced; call the layer outside "
                "of torch.compile, by torch.compiler.disable"
            )
            raise refusal(message)
        device = getattr(self, self.weight_names[0]).device
        check_input(self, inp, "in_features", self.in_features, device)
        self.set_activation_dtype(inp)
        self._refuse_functorch("here; call torch.nn layers inside of them")
        counts = self._counts_on_host(m_splits, inp)
        self._note_region()
        x = self._plain_input(inp, enabled=False).reshape(-1, self.in_features)
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        if loop is None:
            loop = self.__dict__["_loop"] = ExpertLoop(self._experts())
        y = loop.apply(x, counts, is_first_microbatch)
        if autocast_state.fp8_calibration and not autocast_state.fp8_enabled:
            weights = [getattr(self, name) for name in self.weight_names]
            plain = [w.dequantize() if is_quantized(w) else w for w in weights]
            self._take_maxima([x], [joined(plain)], torch.tensor(counts))
        return y.view(*inp.shape[:-1], self.out_features)

    def _counts_on_host(self, m_splits: Any, inp: torch.Tensor) -> list[int]:
        """Return the counts. Counts on a GPU are read, and cut off at the rows of the input.

        Raises
        ------
        UnsupportedError
            If the counts are on a GPU while a graph is captured.
        DtypeError, ShapeError, DeviceError
            As of :meth:`_splits`.
        """
        if not isinstance(m_splits, torch.Tensor):
            counts = self._counts(m_splits)
            self._check_counts(counts, inp)
            return list(counts)
        return read_counts(self._splits(m_splits, inp), inp.shape[:-1].numel(), self.name)

    def _memory_of_caller(self, inp: torch.Tensor, out: Any, dgrad_out: Any) -> native.Buffers:
        """Check the caller's memory, and return it."""
        kind = inp.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inp.dtype
        rows = inp.shape[:-1].numel()
        for name, buffer, cols in (
            ("out", out, self.out_features),
            ("dgrad_out", dgrad_out, self.in_features),
        ):
            if buffer is None:
                continue
            check_buffer(self.name, name, buffer, ((rows, cols),), dtype, inp)
        return native.Buffers(out, dgrad_out)

    def _general(
        self,
        inp: Any,
        splits: torch.Tensor,
        is_first_microbatch: bool | None,
        buffers: native.Buffers | None,
    ) -> torch.Tensor:
        """Run the forward of calls that need Python."""
        if is_traced(inp):
            return forward_traced(self, inp, is_first_microbatch, splits)
        parameters, version = self._used_parameters(is_first_microbatch)
        check_input(self, inp, "in_features", self.in_features, parameters["weight"].device)
        self.set_activation_dtype(inp)
        self._refuse_functorch("here; call torch.nn layers inside of them")
        return self._forward_on(parameters, version, inp, is_first_microbatch, (splits,), buffers)

    def _record(
        self,
        state: Any,
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        *extras: torch.Tensor,
    ) -> None:
        live, stride = state.amax_history[0], self._FORWARD_SLOTS
        weights = [w.dequantize() if is_quantized(w) else w for w in weights]
        counts = extras[0].tolist()
        rows = inputs[0].reshape(-1, self.in_features).split(counts)
        stack = weights[0].view(self.num_gemms, -1)
        zero = live.new_zeros(())
        maxima = [part.abs().amax().float() if part.numel() else zero for part in rows]
        own = slice(0, self.num_gemms * stride, stride)
        live[own] = torch.maximum(live[own], torch.stack(maxima))
        own = slice(1, self.num_gemms * stride, stride)
        live[own] = torch.maximum(live[own], stack.abs().amax(1).float())
        state.slots.mark_ran()

    def extra_repr(self) -> str:
        """Sizes and bias, then type, recipe and parallel arguments."""
        return self._repr_of(
            num_gemms=self.num_gemms,
            in_features=self.in_features,
            out_features=self.out_features,
            bias=self.use_bias,
        )
