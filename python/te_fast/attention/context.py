"""Context parallelism: ranks that share the tokens of sequences attend together.

There are two ways, which can follow each other. Ranks exchange heads for tokens, so that each attends to whole
sequences with some of the heads (https://arxiv.org/abs/2309.14509). Or each rank keeps its tokens and attends to the
keys of all ranks (:mod:`te_fast.attention.ring`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fast.attention import scores as core
from te_fast.attention.gathered import (
    Gathering,
    attend_packed_to_gathered,
    attend_to_gathered,
    max_logits_with_gathered,
)
from te_fast.attention.packed import Packing, attend_packed, inverse
from te_fast.attention.packed_shares import PackedShare
from te_fast.attention.ring import Ring, attend_in_ring
from te_fast.attention.rules import CPLoadBalancingStrategy
from te_fast.attention.scores import Scores
from te_fast.attention.shares import ContextShare
from te_fast.errors import DtypeError, ShapeError, UnsupportedError
from te_fast.ops.common import autocast_dtype, size_of_ranks
from te_fast.parallel.agreement import Agreement
from te_fast.runtime.collectives import (
    get_distributed_rank,
    get_distributed_world_size,
    named,
)
from te_fast.runtime.compiling import is_unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Packings = tuple[Packing, Packing]

#: How ranks communicate, by Transformer Engine's names.
WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")


class ContextRanks:
    """The ranks that share the tokens of sequences.

    Parameters
    ----------
    name : str
        Name of the layer.
    exchanging : torch.distributed.ProcessGroup, optional
        Ranks that exchange heads for tokens.
    attending : torch.distributed.ProcessGroup, optional
        Ranks that keep their tokens and attend to the keys of all.
    gathers : bool
        Whether the latter gather keys and values at once; otherwise these travel from rank to rank.
    is_balanced : bool
        Whether each rank has two chunks of a sequence, so that all have equal work under a causal mask.
    """

    def __init__(
        self, name: str, exchanging: Any, attending: Any, *, gathers: bool, is_balanced: bool
    ) -> None:
        self.exchanging, self.attending = exchanging, attending
        self.is_balanced = is_balanced
        self._name, self._gathers = name, gathers
        layer = f"context parallelism {exchanging is None} {gathers} {is_balanced}"
        self._groups = [group for group in (exchanging, attending) if group is not None]
        self._agreements = [Agreement(name, group, layer, "cp_group") for group in self._groups]
        inner, outer = _size_of(exchanging), _size_of(attending)
        rank = _rank_of(exchanging) + inner * _rank_of(attending)
        #: Which tokens of a sequence this rank has.
        self.share = ContextShare(inner * outer, rank, is_balanced)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        *,
        may_use_flash: bool,
    ) -> torch.Tensor:
        """Attend to the keys of all ranks: :func:`te_fast.attention.scores.attend` on this rank's tokens.

        Raises
        ------
        RanksError
            If ranks make different calls, or one is gone or late.
        """
        q, k, v = _as_autocast(q, k, v)
        self._check_alike(q, k, v, scores)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> Any:
            if self.attending is None:
                return core.attend(q, k, v, scores, may_use_flash=may_use_flash)
            if self._needs_gathered(scores):
                return attend_to_gathered(q, k, v, scores, self._gathering(may_use_flash))
            return attend_in_ring(q, k, v, self._ring(scores))

        return self._between_exchanges((q, k, v), scores, attend)

    def attend_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        packings: Packings,
        scores: Scores,
        *,
        may_use_flash: bool,
    ) -> torch.Tensor:
        """Attend within packed sequences: :func:`te_fast.attention.packed.attend_packed` on this rank's tokens.

        `packings` say where sequences lie among the tokens of all ranks.

        Raises
        ------
        RanksError
            As :meth:`attend`.
        """
        q, k, v = _as_autocast(q, k, v)
        self._check_alike(q, k, v, scores, [packing.ends.shape[0] for packing in packings])
        is_balanced = self.is_balanced

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> Any:
            if self.attending is None:
                q, k, v = (one[0].transpose(0, 1) for one in (q, k, v))
                y = attend_packed(q, k, v, packings, scores, may_use_flash=may_use_flash)
                return y.transpose(0, 1)[None]
            tokens, ranks = (q.shape[2], k.shape[2]), _size_of(self.attending)
            packed = PackedShare.of_both(packings, tokens, ranks, is_balanced)
            if self._needs_gathered(scores):
                how = self._gathering(may_use_flash)
                return attend_packed_to_gathered(q, k, v, packed, scores, how)
            ring = self._ring(scores)._replace(packed=packed, may_use_flash=may_use_flash)
            return attend_in_ring(q, k, v, ring)

        shares: Sequence[PackedShare] = ()
        if self.exchanging is not None:
            tokens = q.shape[0], k.shape[0]
            shares = PackedShare.of_both(packings, tokens, self.share.ranks, is_balanced)
        heads = tuple([one.transpose(0, 1)[None] for one in (q, k, v)])
        y = self._between_exchanges(heads, scores, attend, shares)
        return y[0].transpose(0, 1)

    def max_logits(self, q: torch.Tensor, k: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Return the largest score of each head on all ranks, ``(heads,)``."""
        return max_logits_with_gathered(q, k, scores, (self._groups, self._name, self.share))

    def max_logits_of_packed(
        self, q: torch.Tensor, k: torch.Tensor, packings: Packings, scores: Scores
    ) -> torch.Tensor:
        """Return the same for packed sequences."""
        tokens = q.shape[0], k.shape[0]
        packed = PackedShare.of_both(packings, tokens, self.share.ranks, self.is_balanced)
        heads = [one.transpose(0, 1)[None] for one in (q, k)]
        ranks = (self._groups, self._name, self.share)
        return max_logits_with_gathered(heads[0], heads[1], scores, ranks, packed)

    def _needs_gathered(self, scores: Scores) -> bool:
        return self._gathers and any(_needs_whole_keys(scores).values())

    def _gathering(self, may_use_flash: bool) -> Gathering:
        return Gathering(self.attending, self._name, self.share, may_use_flash)

    def _ring(self, scores: Scores) -> Ring:
        is_causal = scores.rule.right == 0
        how = (self._gathers, self.is_balanced, is_causal, scores.scale, self._name)
        return Ring(self.attending, *how)

    def _between_exchanges(
        self,
        heads: tuple[torch.Tensor, ...],
        scores: Scores,
        attend: Callable[..., torch.Tensor],
        packed: Sequence[PackedShare] = (),
    ) -> torch.Tensor:
        """Attend with all tokens of the ranks that exchange heads, and this rank's heads."""
        group = self.exchanging
        if group is None:
            return attend(*heads, scores)
        ranks, rank = _size_of(group), _rank_of(group)
        if scores.sink is not None:
            scores = scores._replace(sink=scores.sink.chunk(ranks)[rank])
        how = _Exchange(group, self.is_balanced, self._name)
        of_q = of_k = how
        if packed:
            of_q = how.of_packed(packed[0].places(ranks).flatten())
            of_k = (
                of_q if packed[1] is packed[0] else how.of_packed(packed[1].places(ranks).flatten())
            )
        q, k, v = _to_tokens(heads, ranks, (of_q, of_k, of_k))
        y: torch.Tensor = _Exchanged.apply(attend(q, k, v, scores), of_q, False)
        return y

    def _check_alike(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        sequences: Sequence[int] = (),
    ) -> None:
        """Raise on all ranks if they do not make the same call."""
        kept = *scores.rule[1:], scores.scale, scores.dropout, scores.softcap, *sequences
        settings = str((*kept, tuple(k.shape), tuple(v.shape)))
        given = (q, k, v) if scores.sink is None else (q, k, v, scores.sink)
        grads = torch.is_grad_enabled()
        needs = [grads and tensor.requires_grad for tensor in given]
        for agreement in self._agreements:
            # One comparison for all tensors: a kind of call is known to all ranks or to none.
            agreement.check(
                q, wanted=any(needs), needs_input=needs[0], needs=needs[1:], settings=settings
            )

    def check(self, q: torch.Tensor, k: torch.Tensor, scores: Scores) -> None:
        """Raise for what ranks cannot compute together.

        Parameters
        ----------
        q, k : torch.Tensor
            ``(batch, heads, queries of this rank, d)``, and keys likewise.
        scores : Scores
            How scores are computed.

        Raises
        ------
        ShapeError
            If heads or tokens do not divide.
        UnsupportedError
            For masks, biases and options that this way does not have.
        """
        rule, name = scores.rule, self._name
        if rule.is_padded:
            message = f"{name}: context parallelism (cp_group) takes no mask type with padding in dense formats"
            raise UnsupportedError(message)
        self._check_scores(q.shape[1], k.shape[1], scores)
        if self.is_balanced and (q.shape[2] % 2 or k.shape[2] % 2):
            message = (
                f"{name}: under context parallelism a rank has two chunks of each sequence, got {q.shape[2]} queries "
                f"and {k.shape[2]} keys; pad sequences to a multiple of {2 * self.share.ranks} tokens"
            )
            raise ShapeError(message)
        self._check_causal(q.shape[2], k.shape[2], scores)

    def check_packed(
        self, q: torch.Tensor, k: torch.Tensor, packings: Packings, scores: Scores
    ) -> None:
        """Raise for what ranks cannot compute together, as :meth:`check`.

        Parameters
        ----------
        q, k : torch.Tensor
            ``(tokens of this rank, heads, d)``, and keys likewise.
        packings : tuple of Packing
            Where sequences lie among the tokens of all ranks.
        scores : Scores
            How scores are computed.

        Raises
        ------
        ShapeError, UnsupportedError
            As :meth:`check`.
        """
        self._check_scores(q.shape[1], k.shape[1], scores)
        self._check_causal(q.shape[0], k.shape[0], scores)
        if scores.rule.is_banded and scores.rule.right != 0 and self.attending is not None:
            message = (
                f"{self._name}: context parallelism takes a window_size with keys behind a query of packed sequences "
                "with cp_comm_type='a2a' alone"
            )
            raise UnsupportedError(message)
        parts = self.share.ranks * (1 + self.is_balanced)
        starts = [packing.starts for packing in packings]
        if any(not is_unseen(one) or one.device.type != "cpu" for one in starts):
            return  # the host would wait for them
        for one, tensor, side in zip(starts, (q, k), ("q", "kv"), strict=True):
            tokens = tensor.shape[0] * self.share.ranks
            begins = one.tolist()
            fits = begins[0] == 0 and begins[-1] == tokens
            if not fits or any(begin % parts for begin in begins):
                message = (
                    f"{self._name}: under context parallelism a rank has {1 + self.is_balanced} of {parts} chunks of "
                    f"each sequence; cu_seqlens_{side} (cu_seqlens_{side}_padded, if there is padding) must hold "
                    f"multiples of {parts}, from 0 to the {tokens} tokens of all ranks, got {begins}"
                )
                raise ShapeError(message)
        if scores.rule.right == 0 and not all(
            torch.equal(*pair) for pair in (starts, [packing.ends for packing in packings])
        ):
            message = (
                f"{self._name}: a causal mask under context parallelism needs the same sequences of queries and of "
                "keys, got other cu_seqlens_kv than cu_seqlens_q"
            )
            raise ShapeError(message)

    def _check_scores(self, heads: int, groups: int, scores: Scores) -> None:
        rule, name = scores.rule, self._name
        refused = {
            "attn_mask_type='arbitrary'": rule.kind == "arbitrary",
            "a core_attention_bias": scores.bias.kind != "no_bias",
        }
        for what, is_given in refused.items():
            if is_given:
                message = f"{name}: context parallelism (cp_group) takes no {what}"
                raise UnsupportedError(message)
        for what, is_given in _needs_whole_keys(scores).items():
            if is_given and self.attending is not None and not self._gathers:
                message = f"{name}: context parallelism takes {what} with cp_comm_type='a2a' or 'all_gather' alone"
                raise UnsupportedError(message)
        ranks = _size_of(self.exchanging)
        if heads % ranks or groups % ranks:
            message = (
                f"{name}: the {ranks} ranks that exchange heads need a multiple of {ranks} heads and groups, got "
                f"{heads} and {groups}; use cp_comm_type='p2p'"
            )
            raise ShapeError(message)

    def _check_causal(self, queries: int, keys: int, scores: Scores) -> None:
        is_banded = scores.rule.right == 0 or (scores.rule.is_banded and self._gathers)
        if is_banded and queries != keys:
            message = (
                f"{self._name}: a causal mask or a window under context parallelism needs as many queries as keys, got "
                f"{queries} and {keys}"
            )
            raise ShapeError(message)


def _needs_whole_keys(scores: Scores) -> dict[str, bool]:
    """Return the options for which a query must attend to all of its keys at once, and whether they are used."""
    rule = scores.rule
    return {
        "window_size": rule.left >= 0 or rule.right > 0,
        "softmax_type": scores.sink is not None,
        "softcap": scores.softcap != 0.0,
        "attention_dropout": scores.dropout != 0.0,
    }


def _as_autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast as torch's autocast does for attention, before tensors travel: ranks compare this type, and send less."""
    dtype = autocast_dtype(q)
    if dtype is None or q.dtype == torch.float64:
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _size_of(group: Any) -> int:
    return 1 if group is None else get_distributed_world_size(group)


def _rank_of(group: Any) -> int:
    return 0 if group is None else get_distributed_rank(group)


def ranks_of(
    name: str, cp_group: Any, way: str, strategy: CPLoadBalancingStrategy
) -> ContextRanks | None:
    """Return the ranks of Transformer Engine's arguments; None if there is only one.

    Parameters
    ----------
    name : str
        Name of the layer.
    cp_group : torch.distributed.ProcessGroup or list of them
        The ranks. For ``a2a+p2p``, those that exchange heads, and those among which keys and values travel.
    way : {'p2p', 'all_gather', 'a2a', 'a2a+p2p'}
        How they communicate.
    strategy : CPLoadBalancingStrategy
        Which tokens each rank has.

    Raises
    ------
    ShapeError
        If `way` is unknown, or needs two groups and has one, or the reverse.
    DtypeError
        If an argument is no group.
    RanksError
        If this rank is not in a group.
    """
    is_list = isinstance(cp_group, (list, tuple))
    groups = list(cp_group) if is_list else [cp_group]
    for group in groups:
        if group is not None:
            size_of_ranks(group, name, "cp_group")
    if way not in WAYS:
        message = f"{name}: cp_comm_type must be one of {', '.join(WAYS)}, got {way!r}"
        raise ShapeError(message)
    if all(_size_of(group) == 1 for group in groups):
        return None
    if (way == "a2a+p2p") != (is_list and len(groups) == 2):
        message = (
            f"{name}: cp_group must be {'a list of two groups' if way == 'a2a+p2p' else 'one group'} for "
            f"cp_comm_type={way!r}, got {len(groups) if is_list else 1}"
        )
        raise (ShapeError if is_list else DtypeError)(message)
    exchanging = groups[0] if way.startswith("a2a") and _size_of(groups[0]) > 1 else None
    attending = groups[-1] if way != "a2a" and _size_of(groups[-1]) > 1 else None
    is_balanced = strategy is CPLoadBalancingStrategy.DUAL_CHUNK_SWAP
    gathers = way == "all_gather"
    return ContextRanks(name, exchanging, attending, gathers=gathers, is_balanced=is_balanced)


# Heads for tokens -----------------------------------------------------------------------------------


class _Exchange(NamedTuple):
    """An exchange of heads for tokens.

    Attributes
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    is_balanced : bool
        Whether each has two chunks of a sequence.
    name : str
        Name of the layer.
    order, back : torch.Tensor, optional
        For packed sequences, the rows of their tokens among those of rank after rank, and the reverse.
    """

    group: Any
    is_balanced: bool
    name: str
    order: torch.Tensor | None = None
    back: torch.Tensor | None = None

    def of_packed(self, places: torch.Tensor) -> _Exchange:
        """Return an exchange of the tokens of packed sequences, from the places of those of rank after rank."""
        return self._replace(order=inverse(places), back=places)

    def run(self, sent: torch.Tensor) -> torch.Tensor:
        """Send each rank its part along the first dimension."""
        received = torch.empty_like(sent)
        with named(self.name, "the exchange of heads for tokens"):
            torch.distributed.all_to_all_single(received, sent, group=self.group)
        return received

    def to_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """Take all tokens of some heads for some tokens of all heads: ``(batch, heads, tokens, d)``."""
        ranks, chunks = _size_of(self.group), 1 + self.is_balanced
        parts = heads.unflatten(1, (ranks, -1)).movedim(1, 0)
        if self.order is not None:
            rows = self.run(parts.contiguous())[:, 0].transpose(1, 2).flatten(0, 1)
            return rows.index_select(0, self.order).transpose(0, 1)[None]
        received = self.run(parts.unflatten(-2, (chunks, -1)).contiguous()).movedim(0, 2)
        batch, count, *_, length, d = received.shape
        tokens = received.new_empty(batch, count, chunks * ranks, length, d)
        tokens[:, :, :ranks] = received[:, :, :, 0]
        for rank in range(ranks * self.is_balanced):
            tokens[:, :, -1 - rank] = received[:, :, rank, 1]
        return tokens.flatten(2, 3)

    def to_heads(self, tokens: torch.Tensor) -> torch.Tensor:
        """Do the reverse; in dense formats the result lies as ``(batch, tokens, heads, d)``."""
        ranks, chunks = _size_of(self.group), 1 + self.is_balanced
        if self.back is not None:
            count = tokens.shape[2] // ranks
            rows = tokens[0].transpose(0, 1).index_select(0, self.back).unflatten(0, (ranks, count))
            received = self.run(rows.transpose(1, 2).contiguous()).flatten(0, 1)
            return received[None]
        parts = tokens.unflatten(2, (chunks * ranks, -1)).movedim(2, 0)
        sent = parts.new_empty(ranks, chunks, *parts.shape[1:])
        sent[:, 0] = parts[:ranks]
        for rank in range(ranks * self.is_balanced):
            sent[rank, 1] = parts[-1 - rank]
        received = self.run(sent).permute(2, 1, 4, 0, 3, 5)
        return received.flatten(3, 4).flatten(1, 2).transpose(1, 2)


class _Exchanged(torch.autograd.Function):
    """Tokens from heads, or heads from tokens; the gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, how: _Exchange, gives_tokens: bool) -> torch.Tensor:
        ctx.how, ctx.gives_tokens = how, gives_tokens
        return how.to_tokens(given) if gives_tokens else how.to_heads(given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Exchanged.apply(grad, ctx.how, not ctx.gives_tokens), None, None


def _to_tokens(
    heads: tuple[torch.Tensor, ...], ranks: int, ways: tuple[_Exchange, ...]
) -> tuple[torch.Tensor, ...]:
    """Exchange queries, keys and values by one collective, if their tokens and channels are alike."""
    how = ways[0]
    if len({tensor.shape[2:] for tensor in heads}) > 1 or any(way is not how for way in ways):
        return tuple([_Exchanged.apply(*one, True) for one in zip(heads, ways, strict=True)])
    of_ranks = [tensor.unflatten(1, (ranks, -1)) for tensor in heads]
    tokens = _Exchanged.apply(torch.cat(of_ranks, 2).flatten(1, 2), how, True)
    parts: tuple[torch.Tensor, ...] = tokens.split([part.shape[2] for part in of_ranks], 1)
    return parts
