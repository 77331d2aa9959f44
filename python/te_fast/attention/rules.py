"""Which keys a query may attend to: mask types, windows and diagonals, and the masks and biases that they stand for."""

from __future__ import annotations

import math
import warnings
from enum import Enum
from typing import Any, NamedTuple

import torch

from te_fast.errors import DtypeError, ShapeError

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
FORMATS = ("sbhd", "bshd", "thd")
BIAS_TYPES = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
DISPATCHES = ("auto", "grouped")


class CPLoadBalancingStrategy(Enum):
    """Which tokens each rank of a context-parallel group has.

    See Also
    --------
    DotProductAttention : Takes a strategy with a group of ranks.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> te.CPLoadBalancingStrategy("dual_chunk_swap").name
    'DUAL_CHUNK_SWAP'
    """

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


class Rule(NamedTuple):
    """A mask type, a window and an alignment together.

    Attributes
    ----------
    kind : str
        The mask type, under its one name.
    left, right : int
        Keys before and behind the diagonal that a query attends to; -1 is all of them.
    bottom_right : bool
        The diagonal ends in the last query and the last key, instead of beginning in the first ones.
    """

    kind: str
    left: int
    right: int
    bottom_right: bool

    @property
    def is_padded(self) -> bool:
        """Whether sequences have lengths of their own."""
        return "padding" in self.kind

    @property
    def is_banded(self) -> bool:
        """Whether the distance between query and key matters."""
        return self.left >= 0 or self.right >= 0


def mask_type_of(name: str, layer: str) -> str:
    """Return a mask type under its one name.

    Raises
    ------
    ShapeError
        If the name is unknown.
    """
    kind = str(name).replace(",", "_")
    kind = "padding_causal" if kind == "causal_padding" else kind
    if kind not in MASK_TYPES:
        message = f"{layer}: attn_mask_type must be one of {', '.join(MASK_TYPES)}, got {name!r}"
        raise ShapeError(message)
    return kind


def sizes_of(window: Any, layer: str) -> tuple[int, int]:
    """Return the sizes of a window.

    Raises
    ------
    DtypeError
        If they are not two integers in order.
    """
    try:
        # operator.index would fix the sizes of a trace with dynamic=True.
        sizes = [int(size) for size in window[:] if not isinstance(size, (float, str))]
        fits = len(sizes) == len(window) == 2
    except (TypeError, ValueError, LookupError):
        fits = False
    if not fits:
        message = f"{layer}: window_size must be two integers, got {window!r}"
        raise DtypeError(message)
    return sizes[0], sizes[1]


def check_mask(layer: str, mask_type: str, window: Any = None) -> None:
    """Raise unless a mask type is known and a window has two sizes. Calls may give others, so that they may not fit.

    Raises
    ------
    ShapeError
        If the name is unknown.
    DtypeError
        If the window is not two integers.
    """
    mask_type_of(mask_type, layer)
    if window is not None:
        sizes_of(window, layer)


def _window(kind: str, window: Any, layer: str) -> tuple[int, int]:
    """Return the window that a mask type and an argument give, as Transformer Engine reads them."""
    is_causal = "causal" in kind
    if window is None:
        return (-1, 0) if is_causal else (-1, -1)
    left, right = sizes_of(window, layer)
    expected = "(-1, 0) or (>=0, 0)" if is_causal else "(-1, -1) or (>=0, >=0)"
    fits = right == 0 if is_causal else (left, right) == (-1, -1) or min(left, right) >= 0
    if fits and left >= -1:
        return left, right
    is_near = (left, right) == (-1, -1) or left >= 0 if is_causal else (left, right) == (-1, 0)
    if not is_near:
        message = f"{layer}: window_size must be {expected} for attn_mask_type={kind!r}, got {(left, right)}"
        raise ShapeError(message)
    message = f"{layer}: window_size should be {expected} for attn_mask_type={kind!r}, got {(left, right)}"
    warnings.warn(message, UserWarning, stacklevel=4)
    return (left, 0) if is_causal else (-1, -1)


def rule_of(mask_type: str, window: Any, bottom_right: bool | None, layer: str) -> Rule:
    """Return the rule of a mask type, a window and an alignment.

    Parameters
    ----------
    mask_type : str
        One of ``MASK_TYPES``.
    window : tuple of int, optional
        Keys before and behind the diagonal; all that the mask type allows by default.
    bottom_right : bool, optional
        Whether windows and ALiBi use the bottom right diagonal, if the mask type does not say; the default is True.
    layer : str
        Name in messages.

    Raises
    ------
    ShapeError
        If the arguments contradict each other, or a name is unknown.
    """
    kind = mask_type_of(mask_type, layer)
    left, right = _window(kind, window, layer)
    if kind in ("causal", "padding_causal"):
        bottom_right = False
    elif bottom_right is None or kind.endswith("bottom_right"):
        bottom_right = True
    return Rule(kind, left, right, bool(bottom_right))


class Kept(NamedTuple):
    """Which positions of padded sequences are real: ``(batch, queries)`` and ``(batch, keys)``, True for real ones."""

    queries: torch.Tensor
    keys: torch.Tensor


def kept_of_lengths(ends: torch.Tensor, size: int) -> torch.Tensor:
    """Return which of `size` positions are real, from cumulative lengths ``(batch + 1,)``: ``(batch, size)``."""
    lengths = (ends[1:] - ends[:-1]).unsqueeze(1)
    return torch.arange(size, device=ends.device) < lengths


def offsets(rule: Rule, queries: int, keys: int, kept: Kept | None) -> Any:
    """Return the offset of the diagonal: an int, or one per sequence ``(batch, 1, 1, 1)``."""
    if not rule.bottom_right:
        return 0
    if not rule.is_padded or kept is None:
        return keys - queries
    return (kept.keys.sum(1) - kept.queries.sum(1)).view(-1, 1, 1, 1)


def _distances(rule: Rule, sizes: tuple[int, int], kept: Kept | None, device: Any) -> torch.Tensor:
    """Return how far behind the diagonal a key is: ``(1 or batch, 1, queries, keys)``."""
    queries, keys = sizes
    rows = torch.arange(queries, device=device).view(1, 1, -1, 1)
    cols = torch.arange(keys, device=device).view(1, 1, 1, -1)
    return cols - rows - offsets(rule, queries, keys, kept)


def allowed(
    rule: Rule,
    sizes: tuple[int, int],
    kept: Kept | None,
    masked: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Return which keys each query attends to; None if every query attends to all keys.

    Parameters
    ----------
    rule : Rule
        The rule.
    sizes : tuple of int
        Queries and keys of a sequence.
    kept : Kept, optional
        Real positions of padded sequences.
    masked : torch.Tensor, optional
        The mask of ``arbitrary``: True where a query does not attend.
    device : torch.device
        Where the mask is made.

    Returns
    -------
    torch.Tensor or None
        bool, broadcastable to ``(batch, heads, queries, keys)``.
    """
    parts = []
    if rule.is_banded:
        far = _distances(rule, sizes, kept, device)
        if rule.left >= 0:
            parts.append(far >= -rule.left)
        if rule.right >= 0:
            parts.append(far <= rule.right)
    if kept is not None and rule.is_padded:
        parts.append(kept.queries[:, None, :, None])
        parts.append(kept.keys[:, None, None, :])
    if masked is not None:
        parts.append(masked.logical_not())
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask


def default_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Return the slopes of ALiBi (https://arxiv.org/abs/2108.12409, section 3), one a head, in FP32.

    They are computed on the device: nothing is copied there.
    """
    whole = 2 ** math.floor(math.log2(heads))
    kind: dict[str, Any] = {"dtype": torch.float32, "device": device}
    steps = torch.arange(1, whole + 1, **kind)
    between = torch.arange(1, 2 * (heads - whole) + 1, 2, **kind)
    return torch.cat((torch.exp2(steps * (-8.0 / whole)), torch.exp2(between * (-4.0 / whole))))


def alibi(
    rule: Rule, sizes: tuple[int, int], kept: Kept | None, slopes: torch.Tensor
) -> torch.Tensor:
    """Return ALiBi's bias ``-slope · |distance from the diagonal|`` in FP32.

    Parameters
    ----------
    rule : Rule
        The rule that gives the diagonal.
    sizes : tuple of int
        Queries and keys of a sequence.
    kept : Kept, optional
        Real positions of padded sequences.
    slopes : torch.Tensor
        ``(heads,)`` or ``(batch, heads)``.

    Returns
    -------
    torch.Tensor
        ``(1 or batch, heads, queries, keys)``.
    """
    wide = slopes.float()
    wide = wide[None] if wide.dim() == 1 else wide
    return _distances(rule, sizes, kept, slopes.device).abs().neg() * wide[:, :, None, None]
