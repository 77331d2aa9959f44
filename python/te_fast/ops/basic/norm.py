"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from te_fast.errors import ArgumentError, UnsupportedError
from te_fast.ops.basic.native import NativeOperation
from te_fast.ops.common import parameter_options, sizes_of, to_real
from te_fast.ops.op import ALONE, Beside
from te_fast.runtime.arguments import check_numbers


class Norm(NativeOperation):
    """A normalisation over the last dimensions, with learnt factors.

    Parameters
    ----------
    normalized_shape : int or iterable of int
        Dimensions that are normalised together.
    eps : float, default = 1e-5
        Added to the variance, or mean square.
    device, dtype : optional
        As of :class:`BasicLinear`.
    zero_centered_gamma : bool, default = False
        The factor is ``1 + weight``, and the weight zero at first.
    sm_margin : int or dict, default = 0
        Multiprocessors left to other kernels; only 0 is supported.
    """

    _constant_names = frozenset({"eps", "zero_centered_gamma"})
    #: Name in the native program.
    _kind: ClassVar[str]
    weight: torch.Tensor

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_numbers(name, eps=eps)
        given = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        shape = sizes_of(given, name, "normalized_shape")
        if not shape or any(size < 1 for size in shape):
            message = f"{name}: normalized_shape must be positive sizes, got {normalized_shape!r}"
            raise ArgumentError(message)
        margins = sm_margin.values() if isinstance(sm_margin, dict) else (sm_margin,)
        if any(margins):
            message = f"{name}: sm_margin is not supported yet; leave it at its default"
            raise UnsupportedError(message)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        options = parameter_options(device, dtype, name)
        for parameter in self._needed_names:
            self.register_parameter(parameter, torch.nn.Parameter(torch.empty(shape, **options)))
        if options["device"].type != "meta":
            self.reset_parameters()

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        """Dimensions that are normalised together."""
        return tuple(self.weight.shape)

    def reset_parameters(self) -> None:
        """Initialise the parameters; parameters on the meta device get memory first."""
        weight = to_real(self, "weight")
        torch.nn.init.constant_(weight, 0.0 if self.zero_centered_gamma else 1.0)
        if "bias" in self._needed_names:
            torch.nn.init.zeros_(to_real(self, "bias"))

    def pre_first_fuser_forward(self) -> None:
        """Give parameters on the meta device memory."""
        if self.weight.is_meta:
            self.reset_parameters()

    def _is_native(self, beside: Beside = ALONE) -> bool:
        # Native programs normalise only the last dimension.
        return len(self.normalized_shape) == 1 and super()._is_native(beside)

    def _append_to(self, program: Any, label: str) -> None:
        program.norm(
            label,
            self._kind,
            self._parameters,
            "weight",
            "bias" if "bias" in self._needed_names else None,
            self.weight.numel(),
            self.eps,
            bool(self.zero_centered_gamma),
        )

    def _matrix(self, x: torch.Tensor) -> torch.Tensor:
        dims = len(self.normalized_shape)
        if dims > 1 and x.shape[x.dim() - dims :] == self.weight.shape:
            return x.flatten(x.dim() - dims)
        return x

    def _restored(self, y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return y.view(shape)

    def extra_repr(self) -> str:
        """Shape and options."""
        return (
            f"{self.normalized_shape}, eps={self.eps}, "
            f"zero_centered_gamma={self.zero_centered_gamma}"
        )


class LayerNorm(Norm):
    """``(x - mean) / sqrt(variance + eps) · γ + β``.

    See Also
    --------
    RMSNorm : Without the mean.
    te_fast.pytorch.LayerNorm : The layer.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.LayerNorm(2, device="cpu")(torch.tensor([[3.0, 5.0]]))
    tensor([[-1.0000,  1.0000]], grad_fn=<ProgramBackward>)
    """

    _kind = "LayerNorm"
    _needed_names = ("weight", "bias")
    bias: torch.Tensor


class RMSNorm(Norm):
    """``x / sqrt(mean(x²) + eps) · γ``.

    See Also
    --------
    LayerNorm : With the mean.
    te_fast.pytorch.RMSNorm : The layer.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.RMSNorm(2, device="cpu")(torch.tensor([[1.0, 1.0]]))
    tensor([[1.0000, 1.0000]], grad_fn=<ProgramBackward>)
    """

    _kind = "RMSNorm"
    _needed_names = ("weight",)
