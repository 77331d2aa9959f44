"""A feed-forward block: norm, linear layer, activation, linear layer, as one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from te_fast.layers.load_torch import copies_of, copy_all
from te_fast.layers.parameters import (
    check_sizes,
    constant,
    held,
    initialise,
    options_of,
    refuse_userbuffers,
)
from te_fast.layers.program import ProgramLayer
from te_fast.parallel.checkpoint import Share
from te_fast.parallel.ranks import divided
from te_fast.runtime import native
from te_fast.runtime.arguments import check_flags, check_functions, check_numbers
from te_fast.runtime.calls import layer_call_method
from te_fast.runtime.collectives import mark_share

if TYPE_CHECKING:
    from te_fast.layers.load_torch import Source

_UNGATED = ("gelu", "qgelu", "relu", "srelu", "silu")
# fc1 has twice the rows: first the rows that are activated, then their factors.
_GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")
_PARAMETERS = {"clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}}


class LayerNormMLP(ProgramLayer):
    """Apply ``y = activation(norm(x) W₁ᵀ + b₁) W₂ᵀ + b₂``, in FP8 inside :class:`te_fast.pytorch.autocast`.

    Norm and activation write the FP8 inputs of the matrix products themselves.

    Parameters
    ----------
    hidden_size, ffn_hidden_size : int
        Sizes of input and result, and of the activation's result. In FP8 both are multiples of 16.
    eps : float, default = 1e-5
        Added to the variance.
    sequence_parallel : bool, default = False
        Each rank has only its own rows of input and result. It has no effect with one rank.
    tp_group : torch.distributed.ProcessGroup, optional
        Ranks that share the layer. If it is missing and `tp_size` is above 1, set it by
        :meth:`set_tensor_parallel_group`.
    tp_size : int, default = 1
        Number of these ranks.
    return_bias : bool, default = False
        Return the second bias beside the result, not added.
    get_rng_state_tracker : Callable, optional
        Gives the random number generator's tracker that initialisation forks.
    init_method, output_layer_init_method : Callable, optional
        Initialise the first and the second weight in place; normal with standard deviation 0.023 by
        default.
    bias : bool, default = True
        Have biases, zero at first.
    normalization : {'LayerNorm', 'RMSNorm', None}, default = 'LayerNorm'
        The norm. None, which Transformer Engine does not have, leaves it out.
    activation : str, default = 'gelu'
        ``gelu``, ``qgelu``, ``relu``, ``srelu``, ``silu``, or a gated one: ``geglu``, ``glu``, ``qgeglu``, ``reglu``,
        ``sreglu``, ``swiglu``, ``clamped_swiglu``. A gated activation activates the first half of the first linear
        layer's result and multiplies it by the second half.
    activation_params : dict, optional
        For ``clamped_swiglu``: ``limit`` (7.0), ``alpha`` (1.702), ``glu_linear_offset`` (1.0).
    fuse_wgrad_accumulation : bool, default = False
        Add the weights' gradients to their ``main_grad``, as :class:`te_fast.pytorch.Linear` does.
    params_dtype : torch.dtype, optional
        Type of the parameters; ``torch.get_default_dtype()`` by default.
    return_layernorm_output : bool, default = False
        Return the norm's result as well, in high precision.
    return_layernorm_output_gathered : bool, default = False
        Return it with the rows of all ranks, under `sequence_parallel`.
    seq_length, micro_batch_size : int, optional
        Transformer Engine compiles for these sizes ahead of time; te_fast does not compile.
    set_parallel_mode : bool, default = False
        Have the ranks of `tp_group` share the layer: the first weight by column, the second by row.
    zero_centered_gamma : bool, default = False
        The norm multiplies by ``1 + layer_norm_weight``.
    device : torch.device or str, default = 'cuda'
        Where the parameters are made; None is torch's default device, and ``'meta'`` defers to
        :meth:`reset_parameters`.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad : bool
        Userbuffers; not supported yet.
    name : str, optional
        Name in messages.
    delay_wgrad_compute : bool, default = False
        Leave the weights' gradients to :meth:`backward_dw`.
    symmetric_ar_type : str, optional
        Not supported yet.
    checkpoint : bool, default = False
        Keep only the input for backward, which runs the layer again.

    Attributes
    ----------
    layer_norm_weight, layer_norm_bias : torch.nn.Parameter
        ``(hidden_size,)``; None where the norm has none.
    fc1_weight, fc1_bias : torch.nn.Parameter
        ``(ffn_hidden_size, hidden_size)`` and ``(ffn_hidden_size,)``, with twice the rows for gated
        activations. Without biases, an empty tensor.
    fc2_weight, fc2_bias : torch.nn.Parameter
        ``(hidden_size, ffn_hidden_size)`` and ``(hidden_size,)``.

    Raises
    ------
    UnsupportedError
        For an argument that te_fast does not support yet, and an unknown activation.
    DeviceError
        If `device` is a GPU and none can be used.
    ShapeError
        If `normalization` is unknown, or an argument needs a norm and there is none.
    DtypeError
        If `activation_params` do not fit the activation.

    See Also
    --------
    te_fast.pytorch.autocast : the region in which layers quantise.
    te_fast.pytorch.ops.Sequential : chains of any operations.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te

    >>> layer = te.LayerNormMLP(64, 256, activation="swiglu", device="cpu")
    >>> with te.autocast():
    ...     y = layer(torch.ones(16, 64))
    >>> tuple(y.shape), tuple(layer.fc1_weight.shape)
    ((16, 64), (512, 64))
    """

    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor
    _FEATURES = "hidden_size"
    _LINEARS = ("fc1_weight", "fc2_weight")
    _CONSTANTS = ProgramLayer._CONSTANTS | {"activation", "activation_params"}

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str | None = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__(name)
        self._check_norm(normalization, optional=True)
        needs_norm = {
            "return_layernorm_output": return_layernorm_output,
            "return_layernorm_output_gathered": return_layernorm_output_gathered,
            "zero_centered_gamma": zero_centered_gamma,
        }
        for argument, is_set in needs_norm.items():
            if is_set and normalization is None:
                message = f"{self.name}: {argument} needs a norm, and normalization is None"
                raise ShapeError(message)
        refuse_userbuffers(self.name, locals())
        self._share_among_ranks(tp_group, tp_size, sequence_parallel=sequence_parallel)
        check_sizes(self.name, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        check_numbers(self.name, eps=eps)
        check_flags(
            self.name,
            bias=bias,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
            zero_centered_gamma=zero_centered_gamma,
        )
        check_functions(
            self.name,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            get_rng_state_tracker=get_rng_state_tracker,
        )
        if self.sequence_parallel and not set_parallel_mode:
            message = f"{self.name}: sequence_parallel needs set_parallel_mode=True, else it has no collectives"
            raise ArgumentError(message)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.size_per_partition = divided(
            self.name, "ffn_hidden_size", ffn_hidden_size, self.tp_size
        )
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = bool(zero_centered_gamma)
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.activation, self.activation_params = activation, activation_params
        self._activation_floats()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.set_parallel_mode = set_parallel_mode
        self.checkpoint = checkpoint
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = None
        self.init_method, self.output_layer_init_method = init_method, output_layer_init_method
        self.fp8_meta["num_gemms"] = len(self._LINEARS)
        options = options_of(params_dtype, device, self.name)
        self._make_parameters(options)
        self._make_native()
        self.reset_parameters(defer_init=options["device"].type == "meta")

    def _activation_floats(self) -> dict[str, Any]:
        """Return the activation's numbers: the given ones, and defaults."""
        activation, given = self.activation, self.activation_params
        if activation not in (*_UNGATED, *_GATED):
            known = ", ".join((*_UNGATED, *_GATED))
            message = f"{self.name}: activation must be one of {known}, got {activation!r}"
            raise UnsupportedError(message)
        if given is not None and not isinstance(given, Mapping):
            message = f"{self.name}: activation_params must be a dict, got {type(given).__name__} {given!r}"
            raise DtypeError(message)
        floats: dict[str, Any] = dict(_PARAMETERS.get(activation, {}))
        for key, value in (given or {}).items():
            if key not in floats:
                message = (
                    f"{self.name}: activation_params of {activation} may have {sorted(floats)}, got "
                    f"{key!r}"
                )
                raise DtypeError(message)
            if not isinstance(value, int | float) or not math.isfinite(value):
                message = f"{self.name}: activation_params[{key!r}] must be a finite number, got {value!r}"
                raise DtypeError(message)
            floats[key] = float(value)
        return floats

    def _names_of_linears(self) -> tuple[str, ...]:
        return tuple([".".join(filter(None, (self._role_name, part))) for part in ("fc1", "fc2")])

    def _make_parameters(self, options: dict[str, Any]) -> None:
        hidden, ffn = self.hidden_size, self.size_per_partition
        self._make_norm_parameters(hidden, options)
        self._fc1_rows = 2 * ffn if self.activation in _GATED else ffn
        for name, rows, cols in (("fc1", self._fc1_rows, hidden), ("fc2", hidden, ffn)):
            weight = torch.nn.Parameter(torch.empty(rows, cols, **options))
            self.register_parameter(f"{name}_weight", weight)
            if self.use_bias:
                bias = torch.nn.Parameter(torch.empty(rows, **options))
                self.register_parameter(f"{name}_bias", bias)
            else:
                setattr(self, f"{name}_bias", torch.empty(0, **options))

    # The program -------------------------------------------------------------------------

    def _input_size(self) -> int:
        return self.hidden_size

    def _split_mode(self) -> str | None:
        return "both" if self.set_parallel_mode else None

    def _append_linears(
        self, program: native.Program, observe: Callable[[], None], *, biased: bool
    ) -> None:
        hidden, ffn, rows = self.hidden_size, self.size_per_partition, self._fc1_rows
        handles, parameters = self._handles, self._parameters
        observe()
        program.linear("fc1", handles["fc1_weight"], parameters, "fc1_weight", hidden, rows)
        if self.use_bias:
            program.bias("fc1_bias", parameters, "fc1_bias", rows)
        program.activation("activation", self.activation, **self._activation_floats())
        observe()
        program.linear("fc2", handles["fc2_weight"], parameters, "fc2_weight", ffn, hidden)
        if biased:
            program.bias("fc2_bias", parameters, "fc2_bias", hidden)

    def _used_parameters(
        self, is_first_microbatch: bool | None
    ) -> tuple[dict[str, torch.Tensor], int | None]:
        biases = {"fc1_bias": self.use_bias, "fc2_bias": self.apply_bias}
        names = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
        used = [name for name in names if biases.get(name, True)]
        return {name: getattr(self, name) for name in (*self._norm_names(), *used)}, None

    def _sizes_of_parameters(self) -> dict[str, tuple[int, ...]]:
        hidden, ffn, rows = self.hidden_size, self.size_per_partition, self._fc1_rows
        weights: dict[str, tuple[int, ...]] = {
            "fc1_weight": (rows, hidden),
            "fc2_weight": (hidden, ffn),
        }
        biases: dict[str, tuple[int, ...]] = {"fc1_bias": (rows,), "fc2_bias": (hidden,)}
        return weights | (biases if self.use_bias else {}) | self._sizes_of_norm()

    def _linear_weights(self) -> tuple[str, ...]:
        return self._LINEARS

    def _returned_bias(self) -> torch.Tensor:
        return self.fc2_bias

    def _returned_bias_name(self) -> str:
        return "fc2_bias"

    def _whole_weight(self) -> torch.Tensor:
        return self.fc1_weight

    # Parameters ----------------------------------------------------------------------------------

    def _shares_of_parameters(self) -> dict[str, Share]:
        """Return which parameters ranks share; a gated activation's parameters have two matrices each."""
        shares = super()._shares_of_parameters()
        if self.activation in _GATED:
            for name in ("fc1_weight", "fc1_bias")[: 1 + self.use_bias]:
                group = shares[name].group if name in shares else None
                shares[name] = Share(0, group, parts=2)
        return shares

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters; parameters on the meta device get memory first.

        Parameters
        ----------
        defer_init : bool, default = False
            Do nothing yet.
        """
        if defer_init:
            return
        self._reset_norm()
        inits = {"fc1": self.init_method, "fc2": self.output_layer_init_method}
        for name, weight in held(self, [f"{linear}_weight" for linear in inits]):
            linear = name.removesuffix("_weight")
            initialise(self, weight, inits[linear], forks=True)
            self._quantize_weight(name)
            weight = getattr(self, name)
            mark_share(weight, True, dim=[*inits].index(linear), stride=1)
            if self.delay_wgrad_compute:
                weight.skip_backward_post_hook = True
        for name, bias in held(self, ("fc1_bias", "fc2_bias") if self.use_bias else ()):
            initialise(self, bias, constant(0.0), forks=False)
            if name == "fc1_bias":
                mark_share(bias, True, dim=0, stride=1)
            elif self.set_parallel_mode:
                bias.sequence_parallel = self.sequence_parallel
        self._drop_weight_cache()

    def load_torch(
        self,
        layer_norm: Source | None = None,
        fc1: Source | Sequence[Source] | None = None,
        fc2: Source | None = None,
    ) -> None:
        """Copy the parameters of ``torch.nn`` modules, all of them and in their shapes.

        Parameters
        ----------
        layer_norm : torch.nn.LayerNorm or torch.nn.RMSNorm, or its state dict, optional
            For ``layer_norm_weight`` (minus 1 with `zero_centered_gamma`) and ``layer_norm_bias``.
        fc1 : torch.nn.Linear or its state dict, or a sequence of them, optional
            For ``fc1_weight`` and ``fc1_bias``; the rows of several modules follow one another, as for a gated
            activation: the activated half, then its factor.
        fc2 : torch.nn.Linear or its state dict, optional
            For ``fc2_weight`` and ``fc2_bias``.

        Raises
        ------
        ShapeError
            If a parameter is missing or unknown, or its shape differs. Nothing has changed then.
        DtypeError
            If an argument is neither a module nor a state dict.
        DeviceError
            If a parameter of either side is on the meta device.
        """
        copies = self._norm_copies(layer_norm)
        kinds = ("weight", "bias") if self.use_bias else ("weight",)
        for name, source in (("fc1", fc1), ("fc2", fc2)):
            if source is not None:
                targets = {kind: [getattr(self, f"{name}_{kind}")] for kind in kinds}
                copies += copies_of(targets, source, f"{self.name}: {name}")
        copy_all(copies)

    # Forward -------------------------------------------------------------------------------------

    # `layer(x)` enters here, without the cost of nn.Module.__call__ if there are no hooks.
    __call__ = layer_call_method

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Apply the layer.

        Parameters
        ----------
        inp : torch.Tensor
            ``(..., hidden_size)``, of the parameters' type unless under ``torch.autocast``.
        is_first_microbatch : bool, optional
            As :meth:`te_fast.pytorch.Linear.forward` takes it.

        Returns
        -------
        torch.Tensor or tuple
            ``(..., hidden_size)``; then, with `return_bias`, the second bias; then, with
            `return_layernorm_output`, the norm's result.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If the input does not fit; in FP8, if its rows are no multiple of 8 and
            :func:`te_fast.auto_pad` is off.
        """
        result: Any = native.layer_forward(self, inp, is_first_microbatch)
        return result

    _called_forward = forward

    def extra_repr(self) -> str:
        """Sizes, bias, norm and activation, then type, recipe and parallel arguments."""
        return self._repr_of(
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            bias=self.use_bias,
            normalization=self.normalization,
            eps=self.eps,
            activation=self.activation,
        )
