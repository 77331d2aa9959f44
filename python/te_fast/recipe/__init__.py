"""Quantisation recipes, with Transformer Engine's names, fields and defaults.

A recipe is a mutable dataclass. Its native form is derived when the recipe is first used, and again after any attribute
was assigned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from te_fast import _config
from te_fast.recipe.base import (
    Format,
    MMParams,
    QParams,
    Recipe,
    require,
    takes_any_keyword,
)
from te_fast.recipe.identity import identity_of

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]

_NVFP4_4OVER6_SCOPES = ("none", "weights", "activations", "all")
_NVFP4_4OVER6_ERROR_MODES = ("MAE", "MSE")
_QUANTIZATIONS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_GEMMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")

_FAST = MMParams(use_split_accumulator=False)
_SPLIT = MMParams(use_split_accumulator=True)


@takes_any_keyword
@dataclass(repr=False)
class DelayedScaling(Recipe):
    """Scale from the absolute maxima of earlier iterations.

    Parameters
    ----------
    margin : int, default = 0
        Scales are lowered by ``2 ** margin``.
    fp8_format : {Format.E4M3, Format.HYBRID}, default = Format.HYBRID
        Number formats of the forward and backward pass.
    amax_history_len : int, default = 1024
        Length of the window of absolute maxima.
    amax_compute_algo : {'max', 'most_recent', Callable}, default = 'max'
        Picks the maximum that the scale comes from, or ``f(amax_history) -> amax``.
    scaling_factor_compute_algo : Callable, default = None
        ``f(amax, old_scale, fp8_max, recipe) -> scale``. By default
        ``fp8_max / amax / 2 ** margin``.
    reduce_amax : bool, default = True
        Reduce the maxima over the ``amax_reduction_group`` of :class:`autocast`.
    fp8_dpa, fp8_mha : bool, default = False
        For attention layers; kept for Transformer Engine's sake.
    backward_override : None
        Must be ``None``.

    See Also
    --------
    te_fast.pytorch.autocast : takes a recipe.

    Examples
    --------
    >>> from te_fast.common.recipe import DelayedScaling
    >>> recipe = DelayedScaling(amax_history_len=16)
    >>> recipe.amax_history_len
    16
    """

    _scaling: ClassVar[str] = "delayed"

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Any], Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _config.BACKWARD_OVERRIDE

    def _validate(self) -> None:
        super()._validate()
        require(
            self.backward_override is None,
            "DelayedScaling: only backward_override=None is supported, "
            f"got {self.backward_override!r}",
        )
        require(
            callable(self.amax_compute_algo) or self.amax_compute_algo in ("max", "most_recent"),
            "DelayedScaling: amax_compute_algo must be 'max', 'most_recent' or a callable, "
            f"got {self.amax_compute_algo!r}",
        )
        algorithm = self.scaling_factor_compute_algo
        require(
            algorithm is None or callable(algorithm),
            "DelayedScaling: scaling_factor_compute_algo must be None or a callable, "
            f"got {algorithm!r}",
        )
        require(
            isinstance(self.amax_history_len, int) and self.amax_history_len >= 1,
            f"DelayedScaling: amax_history_len must be an int >= 1, got {self.amax_history_len!r}",
        )
        require(
            isinstance(self.margin, int) and abs(self.margin) <= 126,
            f"DelayedScaling: margin must be an int within -126..126, got {self.margin!r}",
        )

    def _repr_items(self) -> list[tuple[str, Any]]:
        names = ("amax_history_len", "reduce_amax", "fp8_dpa", "fp8_mha", "backward_override")
        items = [("margin", self.margin), ("format", self.fp8_format)]
        return items + [(name, getattr(self, name)) for name in names]

    def _describe(self) -> dict[str, Any]:
        # Recipes with equal numbers behave alike. Numbers of callables that have gone are used again: 16 bits do.
        algorithms = self.amax_compute_algo, self.scaling_factor_compute_algo
        of_amax, of_scale = [identity_of(one).number if callable(one) else 0 for one in algorithms]
        return {
            **super()._describe(),
            "margin": self.margin,
            "history_len": self.amax_history_len,
            "most_recent": self.amax_compute_algo == "most_recent",
            "reduce_amax": bool(self.reduce_amax),
            "custom": of_amax << 16 | of_scale,
        }


def _quantizations(recipe: Recipe) -> dict[str, Any]:
    quantizations: list[QParams] = [getattr(recipe, name) for name in _QUANTIZATIONS]
    gemms: list[MMParams] = [getattr(recipe, name) for name in _GEMMS]
    return {
        "power_2_scale": tuple(bool(one.power_2_scale) for one in quantizations),
        "amax_epsilon": tuple(float(one.amax_epsilon) for one in quantizations),
        "split_accumulator": tuple(bool(one.use_split_accumulator) for one in gemms),
    }


def _set_power_2_scales(
    recipe: Recipe, power_2_scale: bool, base: type[Recipe] | None = None
) -> None:
    """Set the scales' rounding of the three quantisations; with a `base`, not of those that a subclass has replaced."""
    for name in _QUANTIZATIONS:
        quantization: QParams = getattr(recipe, name)
        if base is not None and quantization is not getattr(base, name):
            continue
        if quantization.power_2_scale != power_2_scale:
            setattr(recipe, name, replace(quantization, power_2_scale=power_2_scale))


@takes_any_keyword
@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """Scale from the tensor's own absolute maximum.

    ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad`` may be assigned a
    :class:`QParams` of their own.

    Parameters
    ----------
    use_power_2_scales : bool, default = False
        Round scales down to powers of two; sets ``power_2_scale`` of all three quantisations. The
        environment variable ``NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1`` changes the default.
    fp8_format : {Format.E4M3, Format.HYBRID}, default = Format.HYBRID
        Number formats of the forward and backward pass.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad : MMParams
        Accumulation; fast in the forward pass, split in the backward pass by default.
    fp8_dpa, fp8_mha : bool, default = False
        For attention layers; kept for Transformer Engine's sake.
    backward_override : {None, 'high_precision', 'dequantized'}, default = None
        Backward on the quantised operands, on kept high-precision ones, or on dequantised ones.

    See Also
    --------
    te_fast.pytorch.autocast : takes a recipe.

    Examples
    --------
    >>> from te_fast.common.recipe import Float8CurrentScaling
    >>> recipe = Float8CurrentScaling(use_power_2_scales=True)
    >>> recipe.fp8_quant_fwd_inp.power_2_scale
    True
    """

    _scaling: ClassVar[str] = "current"

    use_power_2_scales: bool = _config.POWER_2_SCALES
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp = QParams(power_2_scale=_config.POWER_2_SCALES)
    fp8_quant_fwd_weight = QParams(power_2_scale=_config.POWER_2_SCALES)
    fp8_quant_bwd_grad = QParams(power_2_scale=_config.POWER_2_SCALES)
    fp8_gemm_fprop: MMParams = _FAST
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _config.BACKWARD_OVERRIDE

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign; the flag reaches the three quantisations."""
        is_default = name not in vars(self) and value == getattr(type(self), name, None)
        super().__setattr__(name, value)
        if name == "use_power_2_scales":
            # The constructor's default leaves a subclass's attributes alone.
            _set_power_2_scales(self, bool(value), Float8CurrentScaling if is_default else None)

    def _repr_items(self) -> list[tuple[str, Any]]:
        names = (*_QUANTIZATIONS, *_GEMMS, "fp8_dpa", "fp8_mha", "backward_override")
        return [("format", self.fp8_format)] + [(name, getattr(self, name)) for name in names]

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), **_quantizations(self)}


@takes_any_keyword
@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """Scale 1x32 blocks with E8M0 scales; needs a Blackwell GPU.

    Parameters
    ----------
    margin : int, default = 0
        Not used.
    fp8_format : {Format.E4M3, Format.HYBRID}, default = Format.E4M3
        Number formats of the forward and backward pass.
    fp8_dpa, fp8_mha : bool, default = False
        For attention layers; kept for Transformer Engine's sake.
    backward_override : {None, 'high_precision', 'dequantized'}, default = None
        As in :class:`Float8CurrentScaling`.
    enable_2d_quantization : bool, default = False
        Scale weights in 32x32 blocks.

    See Also
    --------
    Float8BlockScaling : What Hopper has.

    Examples
    --------
    >>> from te_fast.common import recipe
    >>> recipe.MXFP8BlockScaling().mxfp8()
    True
    """

    _scaling: ClassVar[str] = "mxfp8"

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _config.BACKWARD_OVERRIDE
    enable_2d_quantization: bool = False

    def _repr_items(self) -> list[tuple[str, Any]]:
        return [("margin", self.margin), *super()._repr_items()]


@takes_any_keyword
@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """Scale 1x128 blocks of inputs and gradients and 128x128 blocks of weights.

    The quantised tensor and its transpose have blocks of their own: where both are needed, both
    are made from the high-precision tensor.

    Parameters
    ----------
    use_f32_scales : bool, default = False
        Allow any FP32 scale; powers of two otherwise. The environment variable
        ``NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1`` changes the default.
    fp8_format : {Format.E4M3, Format.HYBRID}, default = Format.E4M3
        Number formats of the forward and backward pass.
    x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim : {1, 2}, default = 1, 2, 1
        1x128 or 128x128 blocks. Two operands of one GEMM cannot both have 128x128 blocks.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad : MMParams
        Must use the split accumulator.
    fp8_dpa, fp8_mha : bool, default = False
        Must be ``False``.
    backward_override : {None, 'high_precision', 'dequantized'}, default = None
        As in :class:`Float8CurrentScaling`.

    See Also
    --------
    te_fast.pytorch.autocast : takes a recipe.

    Examples
    --------
    >>> from te_fast.common.recipe import Float8BlockScaling
    >>> recipe = Float8BlockScaling(use_f32_scales=True)
    >>> recipe.fp8_quant_fwd_inp.power_2_scale
    False
    """

    _scaling: ClassVar[str] = "block"

    use_f32_scales: bool = _config.F32_BLOCK_SCALES
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp = QParams(power_2_scale=not _config.F32_BLOCK_SCALES)
    fp8_quant_fwd_weight = QParams(power_2_scale=not _config.F32_BLOCK_SCALES)
    fp8_quant_bwd_grad = QParams(power_2_scale=not _config.F32_BLOCK_SCALES)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = _SPLIT
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _config.BACKWARD_OVERRIDE

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign; the flag reaches the three quantisations."""
        is_default = name not in vars(self) and value == getattr(type(self), name, None)
        super().__setattr__(name, value)
        if name == "use_f32_scales":
            # The constructor's default leaves a subclass's attributes alone.
            _set_power_2_scales(self, not value, Float8BlockScaling if is_default else None)

    def _dimensions(self) -> tuple[int, int, int]:
        return (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)

    def _validate(self) -> None:
        super()._validate()
        for name, dimension in zip(("x", "w", "grad"), self._dimensions(), strict=True):
            require(
                dimension in (1, 2),
                f"Float8BlockScaling: Only 1D or 2D blocks supported for {name}, got {dimension!r}",
            )
        require(
            self._dimensions().count(2) <= 1,
            "Float8BlockScaling: 2D by 2D block gemm not supported.",
        )
        for name in _GEMMS:
            gemm = getattr(self, name)
            got = type(gemm).__name__
            require(
                isinstance(gemm, MMParams),
                f"Float8BlockScaling: {name} must be an MMParams, got {got}.",
            )
            require(
                gemm.use_split_accumulator,
                f"Float8BlockScaling: Split accumulator required for {name.rpartition('_')[2]}.",
            )
        require(
            not self.fp8_dpa and not self.fp8_mha,
            "Float8BlockScaling: FP8 attention is not supported.",
        )

    def _repr_items(self) -> list[tuple[str, Any]]:
        blocks = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        names = (*_QUANTIZATIONS, *blocks, *_GEMMS, "fp8_dpa", "fp8_mha", "backward_override")
        return [("format", self.fp8_format)] + [(name, getattr(self, name)) for name in names]

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(),
            **_quantizations(self),
            "block": self._dimensions(),
        }


@takes_any_keyword
@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """Scale 1x16 blocks of 4-bit values in two levels; needs a Blackwell GPU.

    Parameters
    ----------
    disable_rht, disable_stochastic_rounding, disable_2d_quantization : bool, default = False
        Leave out one of the recipe's techniques.
    row_scaled_activation : bool, default = False
        One second-level scale per row of an activation.
    nvfp4_4over6 : {'none', 'weights', 'activations', 'all'}, default = 'none'
        Tensors that choose between two block scales.
    nvfp4_4over6_e4m3_use_256 : {'none', 'weights', 'activations', 'all'}, default = 'all'
        Tensors whose first-level scales are bounded by 256.
    nvfp4_4over6_err_mode : {'MAE', 'MSE'}, default = 'MAE'
        Error that the choice minimises.
    fp4_format, fp8_format : Format
        ``E2M1`` and ``E4M3``.
    fp8_dpa, fp8_mha : bool, default = False
        For attention layers; kept for Transformer Engine's sake.
    backward_override : {None, 'high_precision', 'dequantized'}, default = None
        As in :class:`Float8CurrentScaling`.

    See Also
    --------
    Float8BlockScaling : What Hopper has.

    Examples
    --------
    >>> from te_fast.common import recipe
    >>> recipe.NVFP4BlockScaling().nvfp4()
    True
    """

    _scaling: ClassVar[str] = "nvfp4"

    disable_rht: bool = _config.NVFP4_DISABLE_RHT
    disable_stochastic_rounding: bool = _config.NVFP4_DISABLE_STOCHASTIC_ROUNDING
    disable_2d_quantization: bool = _config.NVFP4_DISABLE_2D_QUANTIZATION
    row_scaled_activation: bool = _config.NVFP4_ROW_SCALED_ACTIVATION
    nvfp4_4over6: str = _config.NVFP4_4OVER6
    nvfp4_4over6_e4m3_use_256: str = _config.NVFP4_4OVER6_E4M3_USE_256
    nvfp4_4over6_err_mode: str = _config.NVFP4_4OVER6_ERR_MODE
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _config.BACKWARD_OVERRIDE

    def _validate(self) -> None:
        super()._validate()
        prefix = type(self).__name__
        require(self.fp4_format is Format.E2M1, f"{prefix}: fp4_format must be E2M1")
        require(self.fp8_format is Format.E4M3, f"{prefix}: fp8_format must be E4M3")
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            value = getattr(self, name)
            require(
                value in _NVFP4_4OVER6_SCOPES,
                f"{prefix}: {name} must be one of {_NVFP4_4OVER6_SCOPES}, got {value!r}",
            )
        require(
            self.nvfp4_4over6_err_mode in _NVFP4_4OVER6_ERROR_MODES,
            f"{prefix}: nvfp4_4over6_err_mode must be one of {_NVFP4_4OVER6_ERROR_MODES}, "
            f"got {self.nvfp4_4over6_err_mode!r}",
        )

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """Quantisation of inputs."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """Quantisation of weights."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """Quantisation of gradients."""
        return QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )


@takes_any_keyword
@dataclass(repr=False)
class CustomRecipe(Recipe):
    """Give each layer a recipe of its own, for instance high precision to the last ones.

    A layer or operation asks the factory for each operand when it first runs, and gets the recipe that the quantizers
    are those of:

    - `DelayedScalingRequest`, `Float8CurrentScalingQuantizer` or `Float8BlockQuantizer` for all operands: that
      recipe, with the quantizers' options;
    - `IdentityQuantizer` for all operands: high precision;
    - `HybridQuantizer` of an FP8 quantizer by rows and an `IdentityQuantizer` by columns for input and weight, and an
      `IdentityQuantizer` for the gradient: that recipe with ``backward_override="high_precision"``, or
      ``"dequantized"`` if ``columnwise_source="rowwise_dequantized"``.

    Other combinations raise, and so do operands of two recipes in one layer, ``LayerNormMLP`` or group of operations.

    Parameters
    ----------
    qfactory : Callable
        Called with a :class:`te_fast.pytorch.QuantizerRole`, or with None for a tensor whose reader is unknown; returns
        a quantizer or a :class:`te_fast.pytorch.DelayedScalingRequest`. It must give equal answers to equal roles.
    fp8_format : Format, default = Format.HYBRID
        The number format that code reads from the recipe; layers take the quantizers' formats.
    fp8_dpa, fp8_mha : bool, default = False
        For attention layers; kept for Transformer Engine's sake.
    backward_override : {None, 'high_precision', 'dequantized'}, default = None
        As in :class:`Float8CurrentScaling`, for all layers in FP8; the factory's answers for gradients have no effect
        then.
    quantization_alignment : int, default = 128
        Rows that grouped operands are padded to.

    Raises
    ------
    RecipeError
        If `qfactory` is no callable, or `quantization_alignment` is not positive.

    See Also
    --------
    te_fast.pytorch.autocast : takes a recipe.

    Examples
    --------
    The layer ``head`` runs in high precision, the others under current scaling:

    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.common.recipe import CustomRecipe
    >>> from te_fast.pytorch.custom_recipes.quantizer_factories import current_scaling_factory
    >>> def factory(role):
    ...     if role is not None and role.name == "head":
    ...         return te.IdentityQuantizer()
    ...     return current_scaling_factory(role)
    >>> body = te.Linear(32, 32, name="body", device="cpu")
    >>> head = te.Linear(32, 16, name="head", device="cpu")
    >>> with te.autocast(recipe=CustomRecipe(qfactory=factory)):
    ...     y = head(body(torch.ones(8, 32)))
    >>> body.fp8, head.fp8
    (True, False)
    """

    _scaling: ClassVar[str] = "custom"

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _config.BACKWARD_OVERRIDE
    quantization_alignment: int = 128

    def _validate(self) -> None:
        super()._validate()
        require(
            callable(self.qfactory),
            f"CustomRecipe: qfactory must be a callable, got {self.qfactory!r}",
        )
        require(
            isinstance(self.quantization_alignment, int) and self.quantization_alignment > 0,
            "CustomRecipe: quantization_alignment must be positive, an int >= 1, got "
            f"{self.quantization_alignment!r}",
        )

    def _repr_items(self) -> list[tuple[str, Any]]:
        names = ("qfactory", "backward_override", "quantization_alignment")
        return [(name, getattr(self, name)) for name in names]

    def _describe(self) -> dict[str, Any]:
        # Attention asks recipes about FP8, so that regions whose recipes differ in it differ.
        flags = 2 * bool(self.fp8_dpa) + bool(self.fp8_mha)
        return {**super()._describe(), "factory": 4 * identity_of(self.qfactory).number + flags}
