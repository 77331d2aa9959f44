"""The normalisation modules: the operations with Transformer Engine's older arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from te_fast.errors import ArgumentNameError
from te_fast.ops.basic import norm as ops


class _NormModule(ops.Norm):
    """A normalisation; also an operation that :class:`te_fast.pytorch.ops.Sequential` fuses.

    Parameters
    ----------
    normalized_shape : int or iterable of int
        Dimensions that are normalised together.
    eps : float, default = 1e-5
        Added to the variance, or mean square.
    sequence_parallel : bool, optional
        Marks the parameters, whose gradients Megatron then sums over ranks.
    params_dtype : torch.dtype, optional
        Deprecated name of `dtype`.
    zero_centered_gamma : bool, default = False
        The factor is ``1 + weight``, and the weight zero at first.
    hidden_size : int, optional
        Deprecated name of `normalized_shape`.
    **kwargs
        ``device``, ``dtype`` and ``sm_margin``, as of :class:`te_fast.pytorch.ops.LayerNorm`.
    """

    sequence_parallel: bool | None

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        for given, old, new in (
            (hidden_size, "hidden_size", "normalized_shape"),
            (params_dtype, "params_dtype", "dtype"),
        ):
            taken = normalized_shape is not None if new != "dtype" else "dtype" in kwargs
            if given is not None and taken:
                message = f"{name}: {old} is the old name of {new}; pass one of them"
                raise ArgumentNameError(message)
        shape = hidden_size if normalized_shape is None else normalized_shape
        if shape is None:
            message = f"{name}: normalized_shape is missing"
            raise ArgumentNameError(message)
        if params_dtype is not None:
            kwargs["dtype"] = params_dtype
        # Read by reset_parameters, which the constructor calls.
        self.__dict__["sequence_parallel"] = sequence_parallel
        super().__init__(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Initialise the parameters; parameters on the meta device get memory first.

        Parameters
        ----------
        defer_init : bool, optional
            Deprecated; do nothing yet.
        """
        if defer_init is not None:
            message = "reset_parameters(defer_init) is deprecated: make the module on device='meta'"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            if defer_init:
                return
        super().reset_parameters()
        if self.sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _reset_by_old_name(self, name: str) -> None:
        message = f"{type(self).__name__}.{name}: use reset_parameters instead"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        self.reset_parameters()


class LayerNorm(_NormModule, ops.LayerNorm):
    """``(x - mean) / sqrt(variance + eps) · γ + β``.

    See Also
    --------
    RMSNorm : Without the mean.
    LayerNormLinear : With the linear layer behind it.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> te.LayerNorm(32, device="cpu")(torch.randn(4, 32)).shape
    torch.Size([4, 32])
    """

    __doc__ = f"{__doc__}\n{(_NormModule.__doc__ or '').partition('fuses.')[2]}"

    def reset_layer_norm_parameters(self) -> None:
        """Initialise the parameters; deprecated: call :meth:`reset_parameters`."""
        self._reset_by_old_name("reset_layer_norm_parameters")


class RMSNorm(_NormModule, ops.RMSNorm):
    """``x / sqrt(mean(x²) + eps) · γ``.

    See Also
    --------
    LayerNorm : With the mean.
    LayerNormLinear : With the linear layer behind it.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> te.RMSNorm(32, device="cpu")(torch.randn(4, 32)).shape
    torch.Size([4, 32])
    """

    __doc__ = f"{__doc__}\n{(_NormModule.__doc__ or '').partition('fuses.')[2]}"

    def reset_rms_norm_parameters(self) -> None:
        """Initialise the parameters; deprecated: call :meth:`reset_parameters`."""
        self._reset_by_old_name("reset_rms_norm_parameters")
