"""Rotary position embeddings (https://arxiv.org/abs/2104.09864): the angles, and the rotation of queries and keys."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from te_fast.attention import operators
from te_fast.attention.arguments import check_places
from te_fast.attention.shares import WHOLE, ContextShare, share_of
from te_fast.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from te_fast.layers.parameters import check_sizes
from te_fast.runtime import native
from te_fast.runtime.arguments import check_numbers, check_tensors
from te_fast.runtime.compiling import is_exporting, is_unseen
from te_fast.runtime.device import default_device

_OP = "apply_rotary_pos_emb"
#: Cosines and sines, with the sign that the rotation has for the channel.
Waves = tuple[torch.Tensor, torch.Tensor]


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of rotary position embeddings.

    Parameters
    ----------
    dim : int
        Channels of a head.
    rotary_percent : float, default = 1.0
        Share of them that is rotated.
    seq_len_interpolation_factor : int, optional
        Positions are divided by it (https://arxiv.org/abs/2306.15595).
    pretrained_max_position_embeddings : int, optional
        Positions that the model has been trained on; needed by `seq_len_interpolation_factor`. Sequences longer than
        both arguments allow are compressed to that length.
    rotary_base : float, default = 10000.0
        Base of the angles.
    interleaved : bool, default = False
        Rotate channels 2i and 2i + 1 together, instead of i and i + dim / 2.

    Attributes
    ----------
    inv_freq : torch.Tensor
        Buffer ``(dim / 2,)``, FP32: angle per position. On the GPU if there is one.

    Raises
    ------
    DtypeError, ShapeError
        If an argument is no number, or `dim` is negative.

    See Also
    --------
    te_fast.pytorch.attention.rope.apply_rotary_pos_emb : Rotates by the angles.
    TransformerLayer : Takes them as `rotary_pos_emb`.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> angles = te.RotaryPositionEmbedding(16)(8)
    >>> angles.shape
    torch.Size([8, 1, 1, 16])
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        check_numbers(owner, rotary_percent=rotary_percent, rotary_base=rotary_base)
        if rotary_percent < 1.0 and isinstance(dim, int | float):
            dim = int(dim * rotary_percent)
        # As in Transformer Engine, a width that is divided by heads may be a float.
        check_sizes(owner, dim=int(dim) if isinstance(dim, float) else dim)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.rotary_base = rotary_base
        device = torch.device("cuda") if torch.cuda.is_available() else default_device()
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", 1.0 / (rotary_base ** (steps / dim)))
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return the angles of `max_seq_len` positions from `offset` on.

        Parameters
        ----------
        max_seq_len : int
            Positions.
        offset : int, default = 0
            The first of them.

        Returns
        -------
        torch.Tensor
            ``(max_seq_len, 1, 1, dim)``, FP32, each angle once for either channel of its pair.

        Raises
        ------
        DtypeError, ShapeError
            If `max_seq_len` is no integer, or negative, or `offset` no number.
        """
        if not isinstance(max_seq_len, int) or max_seq_len < 0:
            check_sizes(type(self).__name__, max_seq_len=max_seq_len)
        check_numbers(type(self).__name__, offset=offset)
        with torch.autocast(self.inv_freq.device.type, enabled=False):
            kind: dict[str, Any] = {"device": self.inv_freq.device, "dtype": self.inv_freq.dtype}
            positions = torch.arange(max_seq_len, **kind) + offset
            trained, factor = (
                self.pretrained_max_position_embeddings,
                self.seq_len_interpolation_factor,
            )
            if trained is not None and factor is not None:
                is_longer = max_seq_len > trained * factor
                positions = positions * (1 / (max_seq_len / trained if is_longer else factor))
            angles = torch.outer(positions, self.inv_freq)
        paired = (
            angles.repeat_interleave(2, dim=-1)
            if self.interleaved
            else torch.cat((angles, angles), dim=-1)
        )
        return paired[:, None, None, :]


def _turned(t: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return every pair of channels ``(a, b)`` as ``(b, a)``."""
    if interleaved:
        return t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return t.roll(t.shape[-1] // 2, -1)


def _signs(width: int, interleaved: bool, like: torch.Tensor) -> torch.Tensor:
    """Return -1 for the first channel of every pair, 1 for the second."""
    half = torch.ones(width // 2, dtype=like.dtype, device=like.device)
    signs = torch.stack((-half, half))
    return signs.t().reshape(-1) if interleaved else signs.reshape(-1)


def _waves(freqs: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines, and sines with the sign that the rotation has for the channel, in FP32."""
    wide = freqs.float()
    return wide.cos(), wide.sin() * _signs(wide.shape[-1], interleaved, wide)


class LastWaves:
    """Keeps the cosines and sines of the last angles, since all layers of a model use the same angles."""

    def __init__(self) -> None:
        # One assignment, since another thread may run between any two statements.
        self._last: tuple[tuple[weakref.ref[Any], ...], Any, Waves, tuple[int, int]] | None = None

    def of(
        self, angles: tuple[torch.Tensor, ...], key: tuple[Any, ...], make: Callable[[], Waves]
    ) -> Waves:
        """Return the kept result of `make` if key and tensors are the same and unchanged, else call `make`."""
        if not is_unseen():  # tensors of a trace or a transform mean nothing outside of it
            return make()
        stamps = []
        for t in angles:
            if t.requires_grad or t.is_inference():
                return make()
            stamps += [t._version, t.data_ptr()]
        stream = None
        if angles[0].is_cuda:
            # A tensor of a graph has its values only after the graph has run.
            if torch.cuda.is_current_stream_capturing():
                return make()
            # Another stream would not wait for this one.
            stream = torch._C._cuda_getCurrentRawStream(angles[0].device.index)
        now = (key, stream, stamps)
        last = self._last
        if last is not None:
            refs, then, waves, versions = last
            is_same = versions == (waves[0]._version, waves[1]._version)  # a hook may write to them
            if is_same and then == now and all(map(_refers_to, refs, angles)):
                return waves
        waves = make()
        if not waves[0].is_inference():  # a backward could not save inference tensors
            versions = waves[0]._version, waves[1]._version
            self._last = (tuple([weakref.ref(t) for t in angles]), now, waves, versions)
        return waves


def _refers_to(ref: weakref.ref[torch.Tensor], t: torch.Tensor) -> bool:
    return ref() is t


_last_waves = LastWaves()


def _combined(
    t: torch.Tensor, waves: Waves, interleaved: bool, heads: int, transposed: bool
) -> torch.Tensor:
    """Rotate the first channels of the first heads, or rotate them back, in FP32 and round once: torch's operations."""
    cos, sin = waves
    if transposed:
        sin = _turned(sin, interleaved)
    width, (count, channels) = cos.shape[-1], t.shape[-2:]
    part = t[..., :heads, :width] if (heads, width) != (count, channels) else t
    turned = part * cos + _turned(part, interleaved) * sin
    if part is t:
        # torch 2.11 loses the gradient of a traced function that returns the result of a conversion to its own type.
        return turned if turned.dtype == t.dtype else turned.to(t.dtype)
    out = torch.empty_like(t)
    out[..., :heads, :width] = turned
    if width < channels:
        out[..., :heads, width:] = t[..., :heads, width:]
    if heads < count:
        out[..., heads:, :] = t[..., heads:, :]
    return out


_NATIVE = (torch.float32, torch.float16, torch.bfloat16)


def are_native(*tensors: torch.Tensor) -> bool:
    """Tell whether the kernel takes tensors: plain tensors of its types that are not traced."""
    return is_unseen(*tensors) and all(
        [t.dtype in _NATIVE and t.layout is torch.strided for t in tensors]
    )


def _is_an_operator(*tensors: torch.Tensor) -> bool:
    """Tell whether a trace is to hold the kernel itself. An export is not: it runs where no attention is imported."""
    return is_compiling() and not is_exporting() and all([t.dtype in _NATIVE for t in tensors])


def _rows(t: torch.Tensor) -> torch.Tensor:
    """Return heads whose channels lie side by side."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


class _Rotate(torch.autograd.Function):
    """Rotates heads; backward rotates gradients back and needs only the cosines and sines."""

    @staticmethod
    def forward(
        ctx: Any,
        t: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        heads: int,
        transposed: bool = False,
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how = interleaved, heads, transposed
        if not are_native(t, cos, sin):
            return _combined(t, (cos, sin), interleaved, heads, transposed)
        t = _rows(t)
        # As of Transformer Engine's kernel: callers may view the result.
        out = torch.empty_like(t, memory_format=torch.contiguous_format)
        turns: list[Any] = [(t, out, cos, sin)]
        if heads < t.shape[-2]:
            turns = [
                (t[..., :heads, :], out[..., :heads, :], cos, sin),
                (t[..., heads:, :], out[..., heads:, :], None, None),
            ]
        native.rotate(turns, bool(interleaved), transposed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        interleaved, heads, transposed = ctx.how
        dt = _Rotate.apply(grad, *ctx.saved_tensors, interleaved, heads, not transposed)
        return dt, None, None, None, None, None


def _rotated(
    t: torch.Tensor, waves: Waves, interleaved: bool, heads: int, transposed: bool = False
) -> torch.Tensor:
    """Rotate the first heads by one node of autograd; ``torch.func`` takes none, and gets operations of torch."""
    if not is_compiling() and torch._C._are_functorch_transforms_active():
        return _combined(t, waves, interleaved, heads, transposed)
    out: torch.Tensor = _Rotate.apply(t, *waves, interleaved, heads, transposed)
    return out


class Heads(NamedTuple):
    """Where queries, keys and values lie in the columns of their product.

    Parameters
    ----------
    queries, groups, channels : int
        Heads of queries, heads of keys and of values, channels of each.
    is_grouped : bool
        Each group has its queries, its key and its value side by side, as in Megatron-LM; else all queries come first,
        then all keys, then all values.
    """

    queries: int
    groups: int
    channels: int
    is_grouped: bool = False

    @property
    def columns(self) -> int:
        """Columns of the product."""
        return (self.queries + 2 * self.groups) * self.channels

    @property
    def per_group(self) -> int:
        """Queries of a group."""
        return self.queries // self.groups

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values as views ``(..., heads, d)``, or ``(..., groups, heads, d)`` of groups."""
        if self.is_grouped:
            shape = (*packed.shape[:-1], self.groups, self.per_group + 2, self.channels)
            return packed.view(shape).split_with_sizes((self.per_group, 1, 1), -2)
        shape = (*packed.shape[:-1], self.queries + 2 * self.groups, self.channels)
        return packed.view(shape).split_with_sizes((self.queries, self.groups, self.groups), -2)

    def split(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, ``(..., heads, d)``; copies if groups interleave them."""
        parts = self.parts(packed)
        return tuple([part.flatten(-3, -2) for part in parts]) if self.is_grouped else parts


class _Split(torch.autograd.Function):
    """Splits a product into queries, keys and values; backward writes one gradient of all three."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, in_place: bool, *given: Any) -> Any:
        ctx.given = given
        return native.split_rotated(packed, in_place, *given)

    @staticmethod
    def backward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # second derivatives need an autograd node
            return _Join.apply(q, k, v, *ctx.given), None, None, None, None, None
        return native.join_rotated((q, k, v), *ctx.given), None, None, None, None, None


class _Join(torch.autograd.Function):
    """Joins the gradients of queries, keys and values: the transpose of :class:`_Split`."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
    ) -> torch.Tensor:
        ctx.given = given
        return native.join_rotated((q, k, v), *given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *_Split.apply(grad.contiguous(), False, *ctx.given), None, None, None, None


# Python's `Function.apply` looks for functorch's transforms, which `are_native` has excluded.
_apply_split = super(torch.autograd.Function, _Split).apply


def split_rotated(
    packed: torch.Tensor,
    waves: tuple[Waves, Waves] | None,
    heads: Heads,
    *,
    interleaved: bool = False,
    in_place: bool,
    order: tuple[int, ...] | None = None,
) -> Any:
    """Return queries, keys and values of their product, with queries and keys rotated, in FP32 and rounded once.

    Plain tensors take one autograd node. Its backward writes the product's gradient in one launch. Compiled functions
    hold both as operators.

    Parameters
    ----------
    packed : torch.Tensor
        ``(..., columns)``, in two or three dimensions.
    waves : tuple, optional
        Cosines and signed sines of queries and of keys, as they broadcast to ``(..., heads, d)``. Without them nothing
        rotates.
    heads : Heads
        The order of the columns.
    interleaved : bool, default = False
        Which channels make a pair.
    in_place : bool
        The results may take the product's memory, since it has no other reader.
    order : tuple of int, optional
        Order of the results' dimensions, as :meth:`torch.Tensor.permute` takes it.

    Returns
    -------
    tuple of torch.Tensor
        ``(..., heads, d)`` each, or in the order that is asked for.
    """
    of_q: Any
    of_k: Any
    of_q, of_k = waves or ((), ())
    # Dynamo compares tensors, and no tuples.
    are_alike = waves is None or all([q is k for q, k in zip(*waves, strict=True)])
    checked = of_q if are_alike else (*of_q, *of_k)
    if (waves is not None or in_place) and are_native(packed, *checked):
        angles = None if waves is None else (*of_q, *of_k)
        return _apply_split(packed.contiguous(), in_place, angles, heads, bool(interleaved), order)
    if waves is None:
        parts = heads.split(packed)
    elif _is_an_operator(packed, *checked) and not heads.is_grouped:
        sizes = [heads.queries, heads.groups, heads.channels]
        parts = operators.split_rotated(packed, *of_q, *of_k, sizes, interleaved)
    elif are_alike and not heads.is_grouped:
        whole = packed.unflatten(-1, (-1, heads.channels))
        turned = _rotated(whole, of_q, interleaved, heads.queries + heads.groups)
        parts = turned.split_with_sizes((heads.queries, heads.groups, heads.groups), -2)
    else:
        q, k, v = heads.split(packed)
        q = _rotated(q, of_q, interleaved, heads.queries)
        parts = q, _rotated(k, of_k, interleaved, heads.groups), v
    return parts if order is None else tuple([part.permute(order) for part in parts])


def waves_of(
    freqs: torch.Tensor,
    shape: torch.Size,
    tensor_format: str,
    start_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    share: ContextShare = WHOLE,
    *,
    interleaved: bool,
) -> Waves:
    """Return cosines and signed sines of the angles that :func:`angles_of` finds, in FP32.

    Parameters
    ----------
    freqs, shape, tensor_format, start_positions, cu_seqlens, share
        As of :func:`angles_of`.
    interleaved : bool
        Which channels make a pair.
    """
    if start_positions is None and tensor_format != "thd":
        length = shape[1 if tensor_format == "bshd" else 0]
        return _last_waves.of(
            (freqs,),
            (interleaved, tensor_format, length, share),
            lambda: _waves(angles_of(freqs, shape, tensor_format, share=share), interleaved),
        )
    placed = angles_of(freqs, shape, tensor_format, start_positions, cu_seqlens, share)
    return _waves(placed, interleaved)


def rotate(
    t: torch.Tensor, waves: Waves, *, interleaved: bool, transposed: bool = False
) -> torch.Tensor:
    """Rotate heads by waves, in FP32, rounding once to their type.

    Parameters
    ----------
    t : torch.Tensor
        ``(..., heads, d)``.
    waves : tuple of torch.Tensor
        As of :func:`waves_of`.
    interleaved : bool
        Which channels make a pair.
    transposed : bool
        Rotate gradients back.
    """
    return _rotated(t, waves, interleaved, t.shape[-2], transposed)


def signed_waves(cos: torch.Tensor, sin: torch.Tensor) -> Waves:
    """Return cosines and sines of pairs ``(i, i + d / 2)`` as :func:`rotate` takes them, in FP32."""
    wide = sin.float()
    return cos.float(), wide * _signs(wide.shape[-1], False, wide)


def _rotate_rounding(t: torch.Tensor, freqs: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate with cosines and sines, and every product, rounded to the type of the heads."""
    cos, sin = (wave.to(t.dtype) for wave in _waves(freqs, interleaved))
    width = freqs.shape[-1]
    part = t[..., :width]
    turned = part * cos + _turned(part, interleaved) * sin
    return torch.cat((turned, t[..., width:]), dim=-1)


def _check(t: Any, freqs: Any, tensor_format: str) -> None:
    check_tensors(_OP, t=t, freqs=freqs)
    if tensor_format not in ("sbhd", "bshd", "thd"):
        message = f"{_OP}: tensor_format must be 'sbhd', 'bshd' or 'thd', got {tensor_format!r}"
        raise ShapeError(message)
    if t.dim() != len(tensor_format):
        message = f"{_OP}: a tensor in {tensor_format} has {len(tensor_format)} dimensions, got shape {list(t.shape)}"
        raise ShapeError(message)
    fits = freqs.dim() == 4 and freqs.shape[-1] <= t.shape[-1] and freqs.shape[-1] % 2 == 0
    if not fits or freqs.shape[2] not in (1, t.shape[-2]):
        message = (
            f"{_OP}: freqs must be (positions, 1, 1, channels) with an even number of channels, at most the "
            f"{t.shape[-1]} of the heads, got {list(freqs.shape)}"
        )
        raise ShapeError(message)
    if freqs.device != t.device:
        message = f"{_OP}: freqs must be on {t.device}, where the heads are, got {freqs.device}"
        raise DeviceError(message)


def angles_of(
    freqs: torch.Tensor,
    shape: torch.Size,
    tensor_format: str,
    start_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    share: ContextShare = WHOLE,
) -> torch.Tensor:
    """Return the angles of each position of heads in a format, as they broadcast to those.

    Parameters
    ----------
    freqs : torch.Tensor
        ``(positions, 1, 1, d_rot)``, or ``(positions, batch, 1, d_rot)`` without `start_positions` and `cu_seqlens`.
    shape : torch.Size
        Of the heads.
    tensor_format : {'sbhd', 'bshd', 'thd'}
        Their format.
    start_positions : torch.Tensor, optional
        ``(batch,)``, the position of each sequence's first token.
    cu_seqlens : torch.Tensor, optional
        ``(batch + 1,)``, where sequences begin in ``thd``, those of all ranks together.
    share : ContextShare
        The tokens of this rank.

    Raises
    ------
    ShapeError
        If there are fewer angles than positions, or for another number of sequences, channels make no pairs, or ranks
        share an odd number of tokens; if
        `start_positions` or `cu_seqlens` are no vectors of as many integers as there are sequences.
    DtypeError, DeviceError
        If angles are complex; if `start_positions` or `cu_seqlens` are no tensors of integers, or on another device.
    """
    if freqs.dim() != 4 or freqs.shape[-1] % 2:
        message = (
            f"{_OP}: angles must be (positions, 1, 1, channels) with an even number of channels, got "
            f"{list(freqs.shape)}"
        )
        raise ShapeError(message)
    if freqs.is_complex():  # waves, as some models keep them
        message = f"{_OP}: angles must be real, got {freqs.dtype}; pass waves.angle(), once for each channel"
        raise DtypeError(message)
    batch = None if tensor_format == "thd" else shape[0 if tensor_format == "bshd" else 1]
    places = {"start_positions": start_positions, "cu_seqlens": cu_seqlens}
    check_places(_OP, freqs.device, batch, places)
    # Sequences that begin anywhere pick their angles from those of all.
    own = 1 if batch is None or start_positions is not None else batch
    if freqs.shape[1] != 1 and freqs.shape[1] != own:
        message = (
            f"{_OP}: angles must be {'for 1 sequence' if own == 1 else f'for 1 or {own} sequences'}, got "
            f"{list(freqs.shape)}"
        )
        raise ShapeError(message)
    if tensor_format == "thd":
        assert cu_seqlens is not None
        if share.ranks != 1:
            cu_seqlens = cu_seqlens // share.ranks
        rows = torch.arange(shape[0], device=freqs.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
        last = cu_seqlens.shape[0] - 2
        sequence = sequence.clamp_max(last)
        positions = rows - cu_seqlens[sequence]
        if share.ranks != 1:
            positions = share.positions(positions, cu_seqlens.diff()[sequence] // 2)
        if start_positions is not None:
            positions = positions + start_positions[sequence]
        # Rows after the last sequence belong to no sequence, and are not read.
        return freqs[positions.clamp(0, freqs.shape[0] - 1), 0]
    batch_first = tensor_format == "bshd"
    length = shape[1] if batch_first else shape[0]
    if length * share.ranks > freqs.shape[0]:
        message = f"{_OP}: there are angles for {freqs.shape[0]} positions, and {length * share.ranks} tokens"
        raise ShapeError(message)
    if share.ranks != 1 and share.is_balanced and length % 2:
        message = f"{_OP}: under context parallelism a rank has two chunks of each sequence, got {length} tokens"
        raise ShapeError(message)
    if start_positions is None:
        if share.ranks != 1:
            found = torch.cat([freqs[begin:end] for begin, end in share.ranges(length)])
            return found.transpose(0, 1) if batch_first else found
        if length == freqs.shape[0]:
            return freqs.transpose(0, 1) if batch_first else freqs
        return freqs[:length].transpose(0, 1) if batch_first else freqs[:length]
    steps = share.positions(torch.arange(length, device=freqs.device), length // 2)
    positions = start_positions[:batch, None] + steps
    found = freqs[positions.clamp(0, freqs.shape[0] - 1), 0]  # (batch, length, 1, d_rot)
    return found if batch_first else found.transpose(0, 1)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate queries or keys.

    Parameters
    ----------
    t : torch.Tensor
        ``(s, b, h, d)``, ``(b, s, h, d)`` or ``(t, h, d)``.
    freqs : torch.Tensor
        Angles ``(positions, 1, 1, d_rot)``, FP32; the channels behind the first ``d_rot`` stay. Dense formats without
        `start_positions` also take ``(positions, b, 1, d_rot)``.
    tensor_format : {'sbhd', 'bshd', 'thd'}, default = 'sbhd'
        Format of `t`.
    start_positions : torch.Tensor, optional
        ``(b,)``, the position of each sequence's first token; 0 by default.
    interleaved : bool, default = False
        Rotate channels 2i and 2i + 1 together, instead of i and i + d_rot / 2.
    fused : bool, default = False
        Compute in FP32 and round once, as Transformer Engine's kernel; else every product is rounded to the type of
        `t`, as by its formula.
    cu_seqlens : torch.Tensor, optional
        ``(b + 1,)``, int32: where sequences begin in ``thd``.
    cp_size, cp_rank : int
        Context parallelism: the number of ranks that share each sequence, and this one's. A sequence has two chunks a
        rank; `t` has chunk ``cp_rank`` and chunk ``2 cp_size - 1 - cp_rank`` of each, `freqs` and `cu_seqlens` are
        those of whole sequences, whose lengths are multiples of ``2 cp_size``.

    Returns
    -------
    torch.Tensor
        Of the shape and type of `t`.

    Raises
    ------
    ShapeError
        If a shape or format does not fit, or `cu_seqlens` is missing.
    DtypeError, DeviceError
        If an argument is no tensor, or on another device than the heads.
    ArgumentError
        If `cp_rank` is none of the ranks.

    See Also
    --------
    apply_fused_qkv_rotary_pos_emb : Splits and rotates the product of queries, keys and values.
    te_fast.pytorch.RotaryPositionEmbedding : Makes the angles.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.attention.rope import apply_rotary_pos_emb
    >>> angles = te.RotaryPositionEmbedding(16)(8).cpu()
    >>> q = torch.randn(8, 2, 4, 16)
    >>> rotated = apply_rotary_pos_emb(q, angles)
    >>> torch.equal(rotated[0], q[0]), torch.equal(rotated[1], q[1])
    (True, False)
    """
    share = share_of(cp_size, cp_rank, _OP)
    _check(t, freqs, tensor_format)
    if tensor_format == "thd" and cu_seqlens is None:
        message = f"{_OP}: cu_seqlens must say where sequences begin when tensor_format is 'thd'"
        raise ShapeError(message)
    if fused:
        placed = waves_of(
            freqs,
            t.shape,
            tensor_format,
            start_positions,
            cu_seqlens,
            share,
            interleaved=interleaved,
        )
        return rotate(t, placed, interleaved=interleaved)
    angles = angles_of(freqs, t.shape, tensor_format, start_positions, cu_seqlens, share)
    return _rotate_rounding(t, angles, interleaved=interleaved)


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the product of queries, keys and values, and rotate the first two.

    Parameters
    ----------
    qkv : torch.Tensor
        ``(s, b, groups, sum of the split)`` or ``(b, s, groups, sum of the split)``.
    q_freqs, k_freqs : torch.Tensor
        Angles of queries and of keys, as of :func:`apply_rotary_pos_emb`.
    qkv_split_arg_list : list of int
        Channels of queries, keys and values of a group; those of queries are a multiple of those of keys.
    tensor_format : {'sbhd', 'bshd'}, default = 'sbhd'
        Format of `qkv`.
    start_positions, interleaved, cp_size, cp_rank : optional
        As of :func:`apply_rotary_pos_emb`.
    cu_seqlens : torch.Tensor, optional
        Of ``thd``, which this function does not take.

    Returns
    -------
    tuple of torch.Tensor
        Queries ``(.., .., groups · queries per group, d)``, keys and values ``(.., .., groups, d)``.

    Raises
    ------
    ShapeError
        If a shape or format does not fit.
    DtypeError, DeviceError
        If an argument is no tensor, or on another device than the product.
    ArgumentError
        If `cp_rank` is none of the ranks.
    UnsupportedError
        For ``thd``.

    See Also
    --------
    apply_rotary_pos_emb : Rotates one tensor.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb
    >>> angles = te.RotaryPositionEmbedding(16)(8).cpu()
    >>> qkv = torch.randn(8, 2, 4, 3 * 16)
    >>> q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, [16, 16, 16])
    >>> q.shape
    torch.Size([8, 2, 4, 16])
    """
    if tensor_format == "thd":
        message = "apply_fused_qkv_rotary_pos_emb: tensor_format='thd' is not supported"
        raise UnsupportedError(message)
    share = share_of(cp_size, cp_rank, "apply_fused_qkv_rotary_pos_emb")
    check_tensors("apply_fused_qkv_rotary_pos_emb", qkv=qkv, q_freqs=q_freqs, k_freqs=k_freqs)
    is_list = isinstance(qkv_split_arg_list, list | tuple)
    sizes: list[Any] = list(qkv_split_arg_list) if is_list else [qkv_split_arg_list]
    for size in sizes:
        check_sizes("apply_fused_qkv_rotary_pos_emb", qkv_split_arg_list=size)
    if (
        qkv.dim() != 4
        or len(sizes) != 3
        or sum(sizes) != qkv.shape[-1]
        or sizes[1] == 0
        or sizes[0] % sizes[1]
        or sizes[2] != sizes[1]
    ):
        message = (
            "apply_fused_qkv_rotary_pos_emb: qkv_split_arg_list must add up to the last of qkv's four dimensions, "
            f"queries a multiple of keys, values as many as keys, got {sizes} for qkv of shape {list(qkv.shape)}"
        )
        raise ShapeError(message)
    groups = qkv.shape[2]
    heads = Heads(groups * (sizes[0] // sizes[1]), groups, sizes[1], is_grouped=True)
    angles = (q_freqs, k_freqs)
    for freqs in angles:
        _check(qkv.new_empty(0, 0, 0, sizes[1]), freqs, tensor_format)
    of_q, of_k = (
        waves_of(
            freqs, qkv.shape, tensor_format, start_positions, share=share, interleaved=interleaved
        )
        for freqs in angles
    )
    packed = qkv.flatten(-2)
    q, k, v = split_rotated(packed, (of_q, of_k), heads, interleaved=interleaved, in_place=False)
    return q, k, v.contiguous()
