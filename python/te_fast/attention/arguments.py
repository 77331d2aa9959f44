"""Which arguments attention takes: checks of a call's tensors against the layer, and against each other.

Values of lengths are compared where the host has them. On the GPU it would have to wait for them.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fast.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from te_fast.layers.parameters import check_sizes
from te_fast.runtime.arguments import check_numbers, check_tensors
from te_fast.runtime.compiling import is_unseen
from te_fast.runtime.inputs import refuse_nested

if TYPE_CHECKING:
    from te_fast.attention.scores import Scores

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Lengths(NamedTuple):
    """Where the sequences of queries and keys lie: cumulative lengths and starts, and the longest lengths."""

    q: torch.Tensor | None = None
    kv: torch.Tensor | None = None
    q_starts: torch.Tensor | None = None
    kv_starts: torch.Tensor | None = None
    longest_q: int | None = None
    longest_kv: int | None = None


# Constructors -------------------------------------------------------------------------------------


def check_name(layer: str, argument: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise unless an argument is one of the known names.

    Raises
    ------
    ShapeError
        With the known names.
    """
    if value not in known:
        message = f"{layer}: {argument} must be one of {', '.join(map(repr, known))}, got {value!r}"
        raise ShapeError(message)


def channels_of(layer: str, kv_channels: Any) -> tuple[int, int]:
    """Return the channels of a key and of a value.

    Raises
    ------
    DtypeError, ShapeError
        If they are no integers of 0 or more, or not one or two.
    """
    given = tuple(kv_channels) if isinstance(kv_channels, tuple | list) else (kv_channels,) * 2
    if len(given) != 2:
        message = (
            f"{layer}: kv_channels must be an integer, or the channels of a key and of a value, got "
            f"{kv_channels!r}"
        )
        raise ShapeError(message)
    for channels in given:
        check_sizes(layer, kv_channels=channels)
    return given


def checked_probability(layer: str, argument: str, value: Any) -> Any:
    """Return a probability.

    Raises
    ------
    DtypeError
        If it is no number.
    ArgumentError
        If it is not between 0 and 1.
    """
    check_numbers(layer, **{argument: value})
    if not 0.0 <= value <= 1.0:
        message = f"{layer}: {argument} must be from 0 to 1, got {value!r}"
        raise ArgumentError(message)
    return value


# Queries, keys and values -------------------------------------------------------------------------


def unpacked(
    layer: str, packed: tuple[Any, Any], heads: tuple[Any, Any, Any], fmt: str, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values; some of them may be given as one tensor."""
    qkv, kv = packed
    q, k, v = heads
    if dim not in (-3, -2):
        message = f"{layer}: qkv_interleave_dim must be -3 or -2, got {dim}"
        raise ShapeError(message)
    given = qkv if qkv is not None else kv
    name, parts = ("qkv_layer", 3) if qkv is not None else ("kv_layer", 2)
    alone = (q, k, v) if qkv is not None else (k, v)
    if (qkv is not None and kv is not None) or any(part is not None for part in alone):
        message = f"{layer}: {name} stands for tensors that are given, too; pass one of them"
        raise ShapeError(message)
    check_tensors(layer, **{name: given})
    if given.dim() != len(fmt) + 1 or given.shape[dim] != parts or (qkv is None and q is None):
        message = (
            f"{layer}: {name} must have {len(fmt) + 1} dimensions in {fmt}, of which dimension {dim} has size {parts}, "
            f"{'' if qkv is not None else 'beside query_layer, '}got shape {list(given.shape)}"
        )
        raise ShapeError(message)
    if qkv is not None:
        q, k, v = given.unbind(dim)
    else:
        k, v = given.unbind(dim)
    return q, k, v


def check_heads(attention: Any, heads: Any, fmt: str) -> None:
    """Raise unless queries, keys and values fit the module and each other."""
    q, k, v = heads
    for name, tensor in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
        if not isinstance(tensor, torch.Tensor):
            message = (
                f"{attention.name}: {name} must be a torch.Tensor, got {type(tensor).__name__}"
            )
            raise (ShapeError if tensor is None else DtypeError)(message)
        refuse_nested(attention, tensor, "packed sequences, qkv_format='thd' and cu_seqlens_q")
        if tensor.dim() != len(fmt):
            message = f"{attention.name}: {name} must have {len(fmt)} dimensions in {fmt}, got {list(tensor.shape)}"
            raise ShapeError(message)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        message = (
            f"{attention.name}: queries, keys and values must be of one type, torch.float32, float16, bfloat16 or "
            f"float64, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
        raise DtypeError(message)
    if not q.device == k.device == v.device:
        devices = ", ".join(str(tensor.device) for tensor in heads)
        message = f"{attention.name}: queries, keys and values must be on one device, got {devices}"
        raise DeviceError(message)
    key, value = (
        attention.hidden_size_per_attention_head_k,
        attention.hidden_size_per_attention_head_v,
    )
    expected = (
        ("query_layer", q, attention._heads_here, key),
        ("key_layer", k, attention.num_gqa_groups_per_partition, key),
        ("value_layer", v, attention.num_gqa_groups_per_partition, value),
    )
    for name, tensor, count, channels in expected:
        if tensor.shape[-2] != count or tensor.shape[-1] != channels:
            message = (
                f"{attention.name}: {name} must have {count} heads of {channels} channels, got "
                f"{tensor.shape[-2]} of {tensor.shape[-1]}"
            )
            raise ShapeError(message)
    batch = None if fmt == "thd" else fmt.index("b")
    if k.shape[:-2] != v.shape[:-2] or (batch is not None and q.shape[batch] != k.shape[batch]):
        message = (
            f"{attention.name}: keys and values must be of the same tokens, and of as many sequences as queries, got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)} in {fmt}"
        )
        raise ShapeError(message)


def angles_of_heads(angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the angles of queries and of keys, which a layer takes as one tensor or as two.

    Raises
    ------
    DtypeError
        If they are neither.
    """
    if isinstance(angles, torch.Tensor):
        return angles, angles
    is_pair = isinstance(angles, tuple) and len(angles) == 2
    if not is_pair or not all([isinstance(part, torch.Tensor) for part in angles]):
        message = (
            "MultiheadAttention: rotary_pos_emb must be a torch.Tensor, or a tuple of those of queries and of keys, "
            f"got {type(angles).__name__}"
        )
        raise DtypeError(message)
    return angles


def check_angles(layer: str, angles: torch.Tensor, params: Any, ends: Any) -> None:
    """Raise if a sequence is longer than there are angles, where the host has its length.

    Parameters
    ----------
    layer : str
        Name in messages.
    angles : torch.Tensor
        ``(positions, 1, 1, channels)``.
    params : InferenceParams, optional
        Caches, which have the sequences.
    ends : torch.Tensor, optional
        Cumulative lengths of packed sequences.
    """
    if angles.dim() != 4 or not is_unseen(angles):
        return
    lengths: list[int] = []
    if params is not None:
        lengths = list(params.sequences.values())
    elif isinstance(ends, torch.Tensor) and ends.dim() == 1 and ends.device.type == "cpu":
        lengths = [end - begin for begin, end in pairwise(ends.tolist())] if is_unseen(ends) else []
    longest = max(lengths, default=0)
    if longest > angles.shape[0]:
        message = (
            f"{layer}: rotary_pos_emb has angles for {angles.shape[0]} positions, and there is a sequence of {longest} "
            "tokens; make angles for the longest sequence"
        )
        raise ShapeError(message)


# Lengths ------------------------------------------------------------------------------------------


def _check_cumulative(
    attention: Any, name: str, ends: Any, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise unless cumulative lengths are a vector of integers where the heads are."""
    if not isinstance(ends, torch.Tensor):
        message = f"{attention.name}: {name} must be a torch.Tensor, got {type(ends).__name__}"
        raise (ShapeError if ends is None else DtypeError)(message)
    if ends.dim() != 1 or ends.dtype not in dtypes:
        message = (
            f"{attention.name}: {name} must be (batch + 1,) of {' or '.join(map(str, dtypes))}, got {ends.dtype} "
            f"{list(ends.shape)}"
        )
        raise ShapeError(message)
    _check_place(attention, name, ends, device)


def _lengths_of(attention: Any, name: str, ends: torch.Tensor) -> list[int] | None:
    """Return the lengths of sequences; None if the host would have to wait for them.

    Raises
    ------
    ShapeError
        If a length is negative.
    """
    if ends.device.type != "cpu" or not is_unseen(ends):
        return None
    lengths = [end - begin for begin, end in pairwise(ends.tolist())]
    if any(length < 0 for length in lengths):
        message = f"{attention.name}: {name} must not decrease, got {ends.tolist()}"
        raise ShapeError(message)
    return lengths


def check_lengths(
    attention: Any, given: tuple[Any, Any], sizes: tuple[int, int, int], device: torch.device
) -> None:
    """Raise unless cumulative lengths fit padded queries and keys.

    Parameters
    ----------
    attention : DotProductAttention
        The layer.
    given : tuple
        Cumulative lengths of queries and of keys.
    sizes : tuple of int
        Sequences, and the tokens of queries and of keys that there is room for.
    device : torch.device
        Where the heads are.
    """
    batch, *rooms = sizes
    for name, ends, room in zip(("cu_seqlens_q", "cu_seqlens_kv"), given, rooms, strict=True):
        _check_cumulative(attention, name, ends, (torch.int32, torch.int64), device)
        if ends.shape[0] < batch + 1:
            message = f"{attention.name}: {name} must be (batch + 1,) = ({batch + 1},), got {list(ends.shape)}"
            raise ShapeError(message)
        lengths = _lengths_of(attention, name, ends[: batch + 1])
        if lengths is not None and max(lengths, default=0) > room:
            message = f"{attention.name}: {name} has a sequence of {max(lengths)} tokens, and there are {room}"
            raise ShapeError(message)


def check_packing(
    attention: Any, side: str, tensor: torch.Tensor, given: tuple[Any, Any, Any], ranks: int = 1
) -> None:
    """Raise unless lengths, starts and the longest length fit packed queries or keys.

    The contents of tensors on a GPU are not read, since the host would wait for them.

    Parameters
    ----------
    attention : DotProductAttention
        The layer.
    side : {'q', 'kv'}
        Whether the tensor has queries or keys.
    tensor : torch.Tensor
        ``(tokens, heads, d)``.
    given : tuple
        Cumulative lengths, cumulative starts or None, and the longest length or None.
    ranks : int, default = 1
        Number of ranks that share the tokens of sequences. Each has its part of a sequence and of its padding.
    """
    (ends, starts, longest), name = given, f"cu_seqlens_{side}"
    if ends is None:
        message = f"{attention.name}: qkv_format='thd' needs {name}, (batch + 1,) of torch.int32, got None"
        raise ShapeError(message)
    _check_cumulative(attention, name, ends, (torch.int32,), tensor.device)
    if longest is not None and (not isinstance(longest, int) or longest < 0):
        check_sizes(attention.name, **{f"max_seqlen_{side}": longest})
    if starts is None:
        starts = ends
    else:
        _check_cumulative(attention, f"{name}_padded", starts, (torch.int32,), tensor.device)
        if starts.shape != ends.shape:
            message = (
                f"{attention.name}: {name}_padded must have the {ends.shape[0]} elements of {name}, got "
                f"{starts.shape[0]}"
            )
            raise ShapeError(message)
    lengths = _lengths_of(attention, name, ends)
    if not lengths or not is_unseen(starts):
        return
    if longest is not None and max(lengths) > longest:
        message = f"{attention.name}: max_seqlen_{side} must be at least {max(lengths)}, as {name} says, got {longest}"
        raise ShapeError(message)
    begins = starts.tolist()
    # A sequence must end before the next one begins, and the last one before the tensor ends.
    tokens = tensor.shape[0] * ranks
    limits = [*begins[1:-1], tokens]
    fits = [
        end + length <= limit for end, length, limit in zip(begins, lengths, limits, strict=False)
    ]
    if begins[0] < 0 or not all(fits):
        message = (
            f"{attention.name}: {name} and {name}_padded must name rows of the tensor, which has {tokens}, "
            f"each once, got {ends.tolist()} and {begins}"
        )
        raise ShapeError(message)


def checked_cap(attention: Any, cap: Any) -> float:
    """Return the bound of scores of a call.

    Raises
    ------
    DtypeError
        If the bound is no number.
    ShapeError
        If it is negative or not finite.
    """
    try:
        # Comparisons, since functions of math refuse the numbers of a trace with dynamic=True.
        fits = 0.0 <= cap < math.inf
    except (TypeError, RuntimeError):  # of texts, and of several numbers
        check_numbers(attention.name, softcap=cap)
        raise
    if not fits:
        message = f"{attention.name}: softcap must be finite and not negative, got {cap!r}"
        raise ShapeError(message)
    return cap


# Masks and biases ---------------------------------------------------------------------------------


def check_padding(
    attention: Any, mask: Any, sizes: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padding masks of queries and of keys.

    Parameters
    ----------
    attention : DotProductAttention
        The layer.
    mask : torch.Tensor or tuple
        The argument of the call.
    sizes : tuple of int
        Sequences, queries and keys.
    device : torch.device
        Where the heads are.
    """
    batch, *rooms = sizes
    pair = tuple(mask) if isinstance(mask, (tuple, list)) else (mask, mask)
    if len(pair) != 2:
        message = f"{attention.name}: attention_mask must be a tensor, or a tuple of two of them, got {len(pair)}"
        raise ShapeError(message)
    for part, size in zip(pair, rooms, strict=True):
        if not isinstance(part, torch.Tensor) or part.dtype != torch.bool:
            got = part.dtype if isinstance(part, torch.Tensor) else type(part).__name__
            message = f"{attention.name}: attention_mask must be of torch.bool, got {got}"
            raise DtypeError(message)
        if part.numel() != batch * size or part.dim() == 0 or part.shape[0] != batch:
            message = (
                f"{attention.name}: a padding mask must have shape {[batch, 1, 1, size]}, got {list(part.shape)}; "
                "cross attention takes two, for queries and for keys"
            )
            raise ShapeError(message)
        _check_place(attention, "attention_mask", part, device)
    return pair


def _check_place(attention: Any, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        message = f"{attention.name}: {name} must be on {device}, as queries and keys are, got {tensor.device}"
        raise DeviceError(message)


def check_scores(
    attention: Any, sizes: tuple[int, int, int, int], device: torch.device, how: Scores
) -> None:
    """Raise unless mask, bias and slopes broadcast to the scores ``(batch, heads, queries, keys)``."""
    masked, (_, bias, slopes) = how.masked, how.bias
    if masked is None and bias is None and slopes is None:
        return
    for name, tensor, wanted in (
        ("attention_mask", masked, sizes),
        ("core_attention_bias", bias, sizes),
        ("alibi_slopes", slopes, sizes[:2]),
    ):
        if tensor is None:
            continue
        _check_place(attention, name, tensor, device)
        shape = tuple(tensor.shape)
        whole = (1,) * (len(wanted) - len(shape)) + shape
        fits = [size in (1, most) for size, most in zip(whole, wanted, strict=False)]
        if len(whole) != len(wanted) or not all(fits):
            message = f"{attention.name}: {name} must be {list(wanted)}, or broadcast to it, got {list(shape)}"
            raise ShapeError(message)


def check_bias(attention: Any, tensor: Any, slopes: Any, heads: int) -> None:
    """Raise unless a bias is a tensor of four dimensions, and slopes are a tensor of all heads."""
    for name, given in (("core_attention_bias", tensor), ("alibi_slopes", slopes)):
        if given is not None and not isinstance(given, torch.Tensor):
            message = f"{attention.name}: {name} must be a torch.Tensor, got {type(given).__name__}"
            raise DtypeError(message)
    if tensor is not None and tensor.dim() != 4:
        message = (
            f"{attention.name}: core_attention_bias must be (1 or batch, 1 or heads, 1 or queries, keys), got "
            f"{list(tensor.shape)}"
        )
        raise ShapeError(message)
    if slopes is not None and (slopes.dim() not in (1, 2) or slopes.shape[-1] != heads):
        message = f"{attention.name}: alibi_slopes must be ({heads},) or (batch, {heads}), got {list(slopes.shape)}"
        raise ShapeError(message)


# Rotary embeddings --------------------------------------------------------------------------------


def check_places(
    op: str, device: torch.device, batch: int | None, places: dict[str, torch.Tensor | None]
) -> None:
    """Raise unless tensors can say where sequences begin.

    Parameters
    ----------
    op : str
        Name of the function, for messages.
    device : torch.device
        Where the angles are.
    batch : int, optional
        Number of sequences; without it, ``cu_seqlens`` says it.
    places : dict
        ``start_positions`` and ``cu_seqlens``.

    Raises
    ------
    DtypeError, DeviceError
        If one is no tensor of integers, or on another device.
    ShapeError
        If one has another number of dimensions than 1, or there are fewer start positions than sequences.
    """
    for name, tensor in places.items():
        if tensor is None:
            continue
        check_tensors(op, **{name: tensor})
        if tensor.device != device:
            message = f"{op}: {name} must be on {device}, where the angles are, got {tensor.device}"
            raise DeviceError(message)
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            message = f"{op}: {name} must be integers, got {tensor.dtype}"
            raise DtypeError(message)
        if tensor.dim() != 1 or (name == "cu_seqlens" and tensor.shape[0] == 0):
            message = f"{op}: {name} must be a vector with an element or more, got shape {list(tensor.shape)}"
            raise ShapeError(message)
    starts, ends = places["start_positions"], places["cu_seqlens"]
    if batch is None:
        assert ends is not None
        batch = ends.shape[0] - 1
    if starts is not None and starts.shape[0] < batch:
        message = f"{op}: start_positions must have one for each of {batch} sequences, got {starts.shape[0]}"
        raise ShapeError(message)
