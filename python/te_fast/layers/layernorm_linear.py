"""A norm and the FP8 linear layer after it, as one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import ShapeError
from te_fast.layers.load_torch import copies_of, copy_all
from te_fast.layers.parameters import check_sizes, options_of, refuse, refuse_userbuffers
from te_fast.layers.split import SplitLinear
from te_fast.runtime.arguments import check_flags, check_functions, check_numbers

if TYPE_CHECKING:
    from te_fast.layers.load_torch import Source


class LayerNormLinear(SplitLinear):
    """Apply ``y = norm(x) Wᵀ + b``, in FP8 inside :class:`te_fast.pytorch.autocast`.

    The norm writes the FP8 input of the matrix product itself.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last dimension. In FP8 both are multiples of 16.
    eps : float, default = 1e-5
        Added to the variance.
    sequence_parallel : bool, default = False
        Each rank has only its own rows of the tensors that are not split by columns: the input of a column-parallel
        layer is gathered. It has no effect with one rank.
    tp_group : torch.distributed.ProcessGroup, optional
        Ranks that share the layer. If it is missing and `tp_size` is above 1, set it by
        :meth:`set_tensor_parallel_group`.
    tp_size : int, default = 1
        Number of these ranks.
    fuse_wgrad_accumulation : bool, default = False
        Add the weight's gradient to ``weight.main_grad``, as :class:`te_fast.pytorch.Linear` does.
    get_rng_state_tracker : Callable, optional
        Gives the random number generator's tracker that initialisation forks.
    init_method : Callable, optional
        Initialises the weight in place; normal with standard deviation 0.023 by default.
    bias : bool, default = True
        Have a bias, zero at first.
    normalization : {'LayerNorm', 'RMSNorm'}, default = 'LayerNorm'
        The norm.
    return_bias : bool, default = False
        Return the bias beside the result, not added.
    params_dtype : torch.dtype, optional
        Type of the parameters; ``torch.get_default_dtype()`` by default.
    parallel_mode : {'column'}, optional
        ``column``: ranks share `out_features`.
    return_layernorm_output : bool, default = False
        Return the norm's result as well, in high precision.
    return_layernorm_output_gathered : bool, default = False
        Return it with the rows of all ranks, under `sequence_parallel`.
    parameters_split : tuple of str or dict of str to int, optional
        Names of parts that weight and bias are split into along dimension 0, equal or of given sizes.
    zero_centered_gamma : bool, default = False
        The norm multiplies by ``1 + layer_norm_weight``.
    device : torch.device or str, default = 'cuda'
        Where the parameters are made; None is torch's default device, and ``'meta'`` defers to
        :meth:`reset_parameters`.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad, ub_name : optional
        Userbuffers; not supported yet.
    delay_wgrad_compute : bool, default = False
        Leave the weight's gradient to :meth:`backward_dw`.
    symmetric_ar_type : str, optional
        Not supported yet.
    name : str, optional
        Name in messages.

    Attributes
    ----------
    layer_norm_weight, layer_norm_bias : torch.nn.Parameter
        ``(in_features,)``; no bias, None, with RMSNorm.
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
        If `normalization` is unknown, or `parameters_split` is empty or does not add up.

    See Also
    --------
    te_fast.pytorch.autocast : the region in which layers quantise.
    te_fast.pytorch.LayerNormMLP : with an activation and a second linear layer behind.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te

    >>> layer = te.LayerNormLinear(64, 32, normalization="RMSNorm", device="cpu")
    >>> with te.autocast():
    ...     y = layer(torch.ones(16, 64))
    >>> tuple(y.shape)
    (16, 32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self._check_norm(normalization, optional=False)
        refuse_userbuffers(self.name, locals())
        refuse(self.name, {"parallel_mode='row'": parallel_mode == "row"})
        if parallel_mode not in (None, "column"):
            message = f"{self.name}: parallel_mode must be None or 'column', got {parallel_mode!r}"
            raise ShapeError(message)
        self._share_among_ranks(tp_group, tp_size, sequence_parallel=sequence_parallel)
        check_sizes(self.name, in_features=in_features, out_features=out_features)
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
            self.name, init_method=init_method, get_rng_state_tracker=get_rng_state_tracker
        )
        self._divide_features(in_features, out_features, parallel_mode)
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = bool(zero_centered_gamma)
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = (
            return_layernorm_output and return_layernorm_output_gathered
        )
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.ub_name = ub_name
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = None
        self.init_method = init_method
        options = options_of(params_dtype, device, self.name)
        self._make_norm_parameters(in_features, options)
        self._make_linear_parameters(parameters_split, options)
        self._make_native()
        self.reset_parameters(defer_init=options["device"].type == "meta")

    # Parameters ----------------------------------------------------------------------------------

    def load_torch(
        self, layer_norm: Source | None = None, linear: Source | Sequence[Source] | None = None
    ) -> None:
        """Copy the parameters of ``torch.nn`` modules, all of them and in their shapes.

        Parameters
        ----------
        layer_norm : torch.nn.LayerNorm or torch.nn.RMSNorm, or its state dict, optional
            For ``layer_norm_weight`` (minus 1 with `zero_centered_gamma`) and ``layer_norm_bias``.
        linear : torch.nn.Linear or its state dict, or a sequence of them, optional
            For weight and bias; the rows of several follow one another.

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
        names = {
            "weight": self.weight_names,
            **({"bias": self.bias_names} if self.use_bias else {}),
        }
        targets = {kind: [getattr(self, part) for part in parts] for kind, parts in names.items()}
        if linear is not None:
            copies += copies_of(targets, linear, f"{self.name}: linear")
        copy_all(copies)

    def extra_repr(self) -> str:
        """Sizes, bias and norm, then type, recipe and parallel arguments."""
        return self._repr_of(
            in_features=self.in_features,
            out_features=self.out_features,
            bias=self.use_bias,
            normalization=self.normalization,
            eps=self.eps,
        )
