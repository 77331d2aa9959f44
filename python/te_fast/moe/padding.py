"""Padding of grouped GEMM inputs to the row counts that FP8 needs, and its reverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_fast.errors import ShapeError
from te_fast.moe import arguments
from te_fast.moe import kernels as impl
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.runtime.support import get_align_size_for_quantization

if TYPE_CHECKING:
    from collections.abc import Sequence


def _align_of_recipe() -> int:
    return get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())


# torch.compiler.assume_constant_result sets this attribute, too, but imports torch._dynamo.
_align_of_recipe._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Aligned(torch.nn.Module):
    """Base of padding modules: the number of splits, and the alignment, which the first forward's recipe decides."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if not (arguments.is_integer(num_gemms) and num_gemms > 0):
            msg = f"{type(self).__name__}: num_gemms must be a positive integer, got {num_gemms!r}"
            raise ShapeError(msg)
        if align_size is not None and not (arguments.is_integer(align_size) and align_size > 0):
            msg = (
                f"{type(self).__name__}: align_size must be a positive integer, got {align_size!r}"
            )
            raise ShapeError(msg)
        self.num_gemms = num_gemms
        self.align_size = align_size

    def _checked(
        self, inp: torch.Tensor, m_splits: torch.Tensor | Sequence[int]
    ) -> tuple[int, torch.Tensor]:
        """Return the alignment, by default the recipe's, and `inp` as a matrix."""
        if len(m_splits) != self.num_gemms:
            msg = (
                f"{type(self).__name__}: m_splits must have {self.num_gemms} entries, one per GEMM, "
                f"got {len(m_splits)}"
            )
            raise ShapeError(msg)
        if not self.align_size:
            self.align_size = _align_of_recipe()
        if inp.dim() == 2:
            return self.align_size, inp
        if inp.dim() == 0:
            msg = f"{type(self).__name__}: inp must be (rows, hidden), got a tensor without dimensions"
            raise ShapeError(msg)
        return self.align_size, inp.reshape(inp.shape[:-1].numel(), inp.size(-1))


class Fp8Padding(_Aligned):
    """Pad every split of a grouped GEMM's input with zero rows to a multiple of ``align_size``.

    Parameters
    ----------
    num_gemms : int
        Number of GEMMs, which is the number of splits.
    align_size : int, optional
        Multiple to pad to. By default the recipe of the first forward decides: 32 for MXFP8, 128 for
        NVFP4, else 16.

    See Also
    --------
    Fp8Unpadding : Takes the padding away.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> padded, splits = te.Fp8Padding(2, 16)(torch.ones(20, 8), [5, 15])
    >>> padded.shape, splits
    (torch.Size([32, 8]), [16, 16])
    """

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: list[int] | torch.Tensor,
        *,
        num_out_tokens: int | None = None,
    ) -> tuple[torch.Tensor, list[int] | torch.Tensor]:
        """Pad.

        Parameters
        ----------
        inp : torch.Tensor
            Rows of all splits, ``(sum(m_splits), hidden)``.
        m_splits : list of int or torch.Tensor
            Rows of every split. A tensor on the input's device is not read on the host.
        num_out_tokens : int, optional
            Rows of the result, the rest of which is zero; by default as many as a list needs, or the most
            that a tensor can need.

        Returns
        -------
        tuple
            Padded rows, and the padded splits in the form of ``m_splits``. An input that needs no padding is returned
            as it is.
        """
        try:
            align, rows_of = self._checked(inp, m_splits)
            if isinstance(m_splits, torch.Tensor):
                most = rows_of.size(0) + self.num_gemms * (align - 1)
                rows = most // align * align if num_out_tokens is None else num_out_tokens
                out, _, padded = impl.move_rows(
                    rows_of, None, m_splits, None, impl.PAD, align, rows
                )
                return out, padded
            splits = m_splits if type(m_splits) is list else list(m_splits)
            out, padded = impl.move_by_list(rows_of, splits, impl.PAD, align, num_out_tokens)
            return (inp, m_splits) if out is None else (out, padded)
        except (AttributeError, TypeError) as error:
            raise arguments.blame(
                type(self).__name__, error, locals(), ("num_out_tokens",)
            ) from None


class Fp8Unpadding(_Aligned):
    """Remove the padding of :class:`Fp8Padding`.

    Parameters
    ----------
    num_gemms : int
        Number of GEMMs, which is the number of splits.
    align_size : int, optional
        Multiple that was padded to; by default as for :class:`Fp8Padding`.

    See Also
    --------
    Fp8Padding : Brings the padding.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> padded, splits = te.Fp8Padding(2, 16)(torch.ones(20, 8), [5, 15])
    >>> te.Fp8Unpadding(2, 16)(padded, [5, 15]).shape
    torch.Size([20, 8])
    """

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: list[int] | torch.Tensor,
        *,
        num_out_tokens: int | None = None,
    ) -> torch.Tensor:
        """Unpad.

        Parameters
        ----------
        inp : torch.Tensor
            Padded rows.
        m_splits : list of int or torch.Tensor
            Rows of every split without padding.
        num_out_tokens : int, optional
            Rows of the result, the rest of which is zero; by default as many as a list needs, or those of
            ``inp`` for a tensor.

        Returns
        -------
        torch.Tensor
            Rows ``(sum(m_splits), hidden)``. An input without padding is returned as it is.
        """
        try:
            align, rows_of = self._checked(inp, m_splits)
            if isinstance(m_splits, torch.Tensor):
                rows = rows_of.size(0) if num_out_tokens is None else num_out_tokens
                return impl.move_rows(rows_of, None, m_splits, None, impl.UNPAD, align, rows)[0]
            splits = m_splits if type(m_splits) is list else list(m_splits)
            out, _ = impl.move_by_list(rows_of, splits, impl.UNPAD, align, num_out_tokens)
            return inp if out is None else out
        except (AttributeError, TypeError) as error:
            raise arguments.blame(
                type(self).__name__, error, locals(), ("num_out_tokens",)
            ) from None
