"""Factories for :class:`CustomRecipe` that give every layer what a built-in recipe would."""

from __future__ import annotations

from te_fast.recipe.roles import DelayedScalingRequest, QuantizerRole
from te_fast.tensor.blockwise import Float8BlockQuantizer
from te_fast.tensor.dtypes import DType
from te_fast.tensor.float8 import Float8CurrentScalingQuantizer
from te_fast.tensor.identity_tensor import IdentityQuantizer

_LINEARS = ("linear", "grouped_linear")


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """Leave an operand in high precision.

    Parameters
    ----------
    role : QuantizerRole, optional
        The operand.

    See Also
    --------
    te_fast.common.recipe.CustomRecipe : Takes a factory.

    Examples
    --------
    >>> from te_fast.pytorch.custom_recipes import quantizer_factories
    >>> type(quantizer_factories.high_precision_factory(None)).__name__
    'IdentityQuantizer'
    """
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """Quantise an operand as :class:`DelayedScaling` does by default.

    Parameters
    ----------
    role : QuantizerRole, optional
        The operand.

    See Also
    --------
    te_fast.common.recipe.CustomRecipe : Takes a factory.

    Examples
    --------
    >>> from te_fast.pytorch.custom_recipes import quantizer_factories
    >>> quantizer_factories.delayed_scaling_factory(None).amax_history_len
    1024
    """
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Float8CurrentScalingQuantizer:
    """Quantise an operand as :class:`Float8CurrentScaling` does by default: gradients in E5M2, the rest in E4M3.

    Parameters
    ----------
    role : QuantizerRole, optional
        The operand.

    See Also
    --------
    te_fast.common.recipe.CustomRecipe : Takes a factory.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.custom_recipes import quantizer_factories
    >>> role = te.QuantizerRole("linear", "grad_output")
    >>> quantizer_factories.current_scaling_factory(role).dtype.name
    'kFloat8E5M2'
    """
    is_grad = role is not None and role.tensor_type == "grad_output"
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if is_grad else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    """Quantise an operand as :class:`Float8BlockScaling` does by default: weights in 128x128 blocks, the rest in 1x128.

    Parameters
    ----------
    role : QuantizerRole, optional
        The operand.

    See Also
    --------
    te_fast.common.recipe.CustomRecipe : Takes a factory.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.custom_recipes import quantizer_factories
    >>> role = te.QuantizerRole("linear", "weight")
    >>> quantizer_factories.float8_block_scaling_factory(role).block_scaling_dim
    2
    """
    is_weight = role is not None and role.module_type in _LINEARS and role.tensor_type == "weight"
    return Float8BlockQuantizer(
        DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2 if is_weight else 1
    )
