"""Quantizers that a :class:`CustomRecipe`'s factory answers with where an operand stays in high precision."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from te_fast.errors import ArgumentError, UnsupportedError
from te_fast.recipe import CustomRecipe, Recipe
from te_fast.recipe.roles import QuantizerRequest
from te_fast.tensor.quantizer import Quantizer


class _OfFactories(Quantizer):
    """A quantizer that only layers and operations read."""

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """Raise.

        Raises
        ------
        UnsupportedError
            Always: layers and operations read the settings, and no tensor is made.
        """
        message = (
            f"{type(self).__name__} makes no tensors here: it tells layers and operations under a CustomRecipe which "
            "operands stay in high precision; keep the plain tensor instead"
        )
        raise UnsupportedError(message)

    def _get_compatible_recipe(self) -> type[Recipe]:
        return CustomRecipe

    def is_requantization_safe(self) -> bool:
        """Tell whether quantising dequantised values again depends only on these values: yes."""
        return True


class IdentityQuantizer(_OfFactories):
    """Keep an operand in high precision.

    Parameters
    ----------
    dtype : torch.dtype, optional
        A type that the operand is cast to; layers and operations only take None, which keeps the operand's type.
    rowwise, columnwise : bool, default = True
        No effect.

    See Also
    --------
    te_fast.common.recipe.CustomRecipe : Whose factory returns such quantizers.
    HybridQuantizer : High precision in backward alone.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.common.recipe import CustomRecipe
    >>> layer, x = te.Linear(32, 16, device="cpu"), torch.rand(8, 32)
    >>> with te.autocast(recipe=CustomRecipe(qfactory=lambda role: te.IdentityQuantizer())):
    ...     y = layer(x)
    >>> torch.equal(y, layer(x))
    True
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype


class HybridQuantizer(_OfFactories):
    """Quantise an operand differently for forward, which reads rows, and backward, which reads columns.

    Parameters
    ----------
    rowwise_quantizer, columnwise_quantizer : Quantizer
        Two objects. Layers and operations take an FP8 quantizer for rows together with an equal one, or with an
        :class:`IdentityQuantizer`, for columns: backward then runs in high precision.
    columnwise_source : {'original', 'rowwise_dequantized'}, default = 'original'
        The values that backward reads: those of the operand, or those that its FP8 numbers stand for.

    Raises
    ------
    ArgumentError
        If a quantizer is none, or both are one object, or the source is unknown.

    See Also
    --------
    te_fast.common.recipe.CustomRecipe : Whose factory returns such quantizers.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> rows = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    >>> te.HybridQuantizer(
    ...     rowwise_quantizer=rows, columnwise_quantizer=te.IdentityQuantizer()
    ... ).columnwise_source
    'original'
    """

    _COLUMNWISE_SOURCES: ClassVar[tuple[str, ...]] = ("original", "rowwise_dequantized")

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: Literal["original", "rowwise_dequantized"] = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        given = (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer))
        for name, quantizer in given:
            if isinstance(quantizer, QuantizerRequest):
                message = (
                    "HybridQuantizer does not support nested QuantizerRequest objects: a factory returns "
                    f"{type(quantizer).__name__} for the whole operand, got one as {name}_quantizer"
                )
                raise ArgumentError(message)
            if not isinstance(quantizer, Quantizer):
                message = f"HybridQuantizer: {name}_quantizer must be a Quantizer, got {type(quantizer).__name__}"
                raise ArgumentError(message)
        if rowwise_quantizer is columnwise_quantizer:
            message = "HybridQuantizer: distinct quantizers are required for rows and columns, got one for both"
            raise ArgumentError(message)
        if columnwise_source not in self._COLUMNWISE_SOURCES:
            known = self._COLUMNWISE_SOURCES
            message = f"HybridQuantizer: columnwise_source must be one of {known}, got {columnwise_source!r}"
            raise ArgumentError(message)
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    def copy(self) -> HybridQuantizer:
        """Return another quantizer with the same settings, over copies of both quantizers."""
        made: HybridQuantizer = super().copy()
        made.rowwise_quantizer = self.rowwise_quantizer.copy()
        made.columnwise_quantizer = self.columnwise_quantizer.copy()
        return made
