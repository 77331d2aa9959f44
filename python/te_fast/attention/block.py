"""A layer without dropout as one autograd node: norm and projections, attention, and the part behind attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_fast.attention.choice import choice_for, switches
from te_fast.attention.dot_product import DotProductAttention, recipe_for_fp8
from te_fast.attention.kernels import Kernel
from te_fast.attention.learned import Uses
from te_fast.attention.multi_head import MultiheadAttention
from te_fast.attention.rope import Waves, are_native
from te_fast.attention.scores import Scores
from te_fast.attention.simple import SimpleCall
from te_fast.attention.tail import Noted, Tail
from te_fast.layers.layernorm_linear import LayerNormLinear
from te_fast.layers.layernorm_mlp import LayerNormMLP
from te_fast.layers.linear import Linear
from te_fast.runtime import native
from te_fast.runtime.compiling import is_unseen
from te_fast.runtime.module_hooks import are_called_plainly
from te_fast.tensor.of_factory import may_fuse


class Attending(NamedTuple):
    """Attention in a call, from the product of queries, keys and values to merged heads, with its backward.

    Attributes
    ----------
    kernel : Kernel
        The kernel of torch.
    scores : Scores
        How scores are computed.
    split : tuple
        Cosines and sines or None, heads, whether channels are rotated in adjacent pairs, and the order of the heads'
        dimensions, as ``native.split_rotated`` takes them.
    out_of : tuple of int
        Order of the dimensions of the kernel's result that makes it a result of the layer.
    uses : Uses, optional
        The calls so far, until the kernel's launches are known.
    repeated : native.RepeatedAttention, optional
        The launches, which ``native.cut_apply`` makes in place of :meth:`run` and :meth:`grad`.
    """

    kernel: Kernel
    scores: Scores
    split: tuple[Any, ...]
    out_of: tuple[int, ...]
    uses: Uses | None = None
    repeated: native.RepeatedAttention | None = None

    def counted(self) -> Attending:
        """Note a call of a kernel whose launches may become known; return how it runs."""
        uses = self.uses
        if uses is None:
            return self
        uses.count()
        return self._replace(uses=None, repeated=uses.repeated) if uses.is_settled else self

    def run(self, mixed: torch.Tensor, trains: bool) -> tuple[torch.Tensor, Any, Any]:
        """Attend; return merged heads, and tensors and sizes for backward."""
        q, k, v = native.split_rotated(mixed, True, *self.split)
        scores = self.scores
        out, others, sizes = self.kernel.forward(
            q, k, v, scores.dropout, scores.rule.right == 0, scores.scale, trains
        )
        context = out.permute(self.out_of).flatten(2)
        return context, ((q, k, v, out, *others) if trains else ()), sizes

    def grad(
        self, sizes: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], grad: torch.Tensor
    ) -> torch.Tensor:
        """Return the product's gradient, from that of merged heads."""
        q, k, v, out, *others = tensors
        _, heads, _, order = self.split
        scores = self.scores
        of_heads = grad.view(*grad.shape[:2], heads.queries, heads.channels).permute(order)
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.kernel.backward(
            *(of_heads, q, k, v, out, others, sizes),
            *(scores.dropout, scores.rule.right == 0, scores.scale),
        )
        joined: torch.Tensor = native.join_rotated(grads, *self.split)
        return joined


class Block:
    """The layers of a block, which calls run as two programs with attention between them.

    Parameters
    ----------
    first : LayerNormLinear
        Norm, and the projections of queries, keys and values.
    tail : Tail
        The part behind attention.
    """

    def __init__(self, first: LayerNormLinear, tail: Tail) -> None:
        self._first, self._tail = first, tail
        self._handles = first._handles
        program = self._program = native.Program(first.name)
        # The input is the residual connection, too: this program's backward adds both of its gradients.
        program.make_extra_output("residual", False)
        first._append_ops(program, lambda: None)

    def noted(self) -> list[Noted]:
        """Return the modules within, with the names of attributes and children that :meth:`takes` reads."""
        names = ("checkpoint", "_exchange", "_handles", "return_layernorm_output", "return_bias")
        return [(self._first, names), *self._tail.noted()]

    def is_of(self, first: LayerNormLinear, tail: Tail) -> bool:
        """Tell whether the programs still belong to these layers."""
        return self._tail is tail and first.__dict__.get("_handles") is self._handles

    @staticmethod
    def takes(first: Any, hidden: torch.Tensor, waves: tuple[Waves, Waves] | None) -> bool:
        """Tell whether one node computes the same as calls of the layers, given that the tail takes the call."""
        of_q, of_k = waves or ((), ())
        return (
            type(first) is LayerNormLinear
            and hidden.dim() == 3
            and not (first.checkpoint or first._exchange or first.return_layernorm_output)
            and not first.return_bias
            and are_called_plainly(first)
            and are_native(hidden, *of_q, *of_k)
        )

    def attending(self, hidden: torch.Tensor, call: SimpleCall) -> Attending | None:
        """Return how attention runs; None if torch chooses a kernel that is not called without autograd.

        Parameters
        ----------
        hidden : torch.Tensor
            ``(s, b, hidden)`` or ``(b, s, hidden)``, the layer's input.
        call : SimpleCall
            How the layer attends.
        """
        orders = into, out_of = call.orders()
        how = {"interleaved": call.interleaved, "trains": torch.is_grad_enabled()}
        choice = choice_for(hidden, call.heads, orders, call.scores, **how)
        if choice is None:
            return None
        split = (_angles(call.waves), call.heads, call.interleaved, into)
        found = Attending(choice.kernel, call.scores, split, out_of, choice.uses)
        return found if choice.uses is None else found.counted()

    def __call__(
        self, hidden: torch.Tensor, between: Attending, is_first_microbatch: bool | None
    ) -> torch.Tensor | None:
        """Return the layer's result; None if the layers must be called one by one, in which case nothing has run.

        Parameters
        ----------
        hidden : torch.Tensor
            ``(s, b, hidden)`` or ``(b, s, hidden)``, the layer's input.
        between : Attending
            How attention runs.
        is_first_microbatch : bool, optional
            As :meth:`te_fast.pytorch.Linear.forward` takes it.
        """
        first = None if is_first_microbatch is None else bool(is_first_microbatch)
        y: torch.Tensor | None = native.cut_apply(
            (self._program, self._first), (self._tail.program, self._tail), hidden, between, first
        )
        return y


def _angles(waves: tuple[Waves, Waves] | None) -> tuple[torch.Tensor, ...] | None:
    return None if waves is None else (*waves[0], *waves[1])


class KnownCall:
    """A call that ran in one node: the next one like it needs no other checks.

    Parameters
    ----------
    block : Block
        The block.
    hidden : torch.Tensor
        The input.
    call : SimpleCall
        How the layer attended.
    between : Attending
        How attention ran.
    owner : tuple
        The layer, and the names of attributes and children that the checks have read. The call does not refer to it.
    noted : Sequence
        The same of modules within.
    """

    __slots__ = ("_between", "_block", "_call", "_has_angles", "_key", "_snapshot")

    def __init__(
        self,
        block: Block,
        hidden: torch.Tensor,
        call: SimpleCall,
        between: Attending,
        owner: Noted,
        noted: Sequence[Noted],
    ) -> None:
        self._block, self._has_angles = block, call.waves is not None
        # Cosines and sines come anew with every call.
        self._call = call._replace(waves=None)
        self._between = between._replace(split=(None, *between.split[1:]))
        self._key = _key_of(hidden)
        self._snapshot = native.Snapshot(*owner, [*noted, *block.noted()])

    def __call__(
        self, owner: Any, hidden: torch.Tensor, angles: Any, is_first_microbatch: bool | None
    ) -> torch.Tensor | None:
        """Return the layer's result; None if the call is another one, in which case nothing has run."""
        if (
            (angles is not None) is not self._has_angles
            or not is_unseen(hidden)  # a tracer's shapes must not be compared with numbers
            or not self._snapshot.holds(owner)
            or _forwards() != _OWN_FORWARDS
            or _key_of(hidden) != self._key
        ):
            return None
        between = self._between
        if between.uses is not None:
            between = self._between = between.counted()
        if angles is not None:
            waves = self._call.waves_of(hidden, angles)
            if not are_native(hidden, *waves[0], *waves[1]):
                return None
            between = between._replace(split=(_angles(waves), *between.split[1:]))
        return self._block(hidden, between, is_first_microbatch)


def _forwards() -> tuple[Any, ...]:
    """Return the forwards of the classes within a block; attributes by name cost less than a loop over modules."""
    return (
        MultiheadAttention.forward,
        DotProductAttention.forward,
        LayerNormLinear.forward,
        Linear.forward,
        LayerNormMLP.forward,
    )


#: Those that the classes were made with. Others may replace them later.
_OWN_FORWARDS = _forwards()


def _key_of(hidden: torch.Tensor) -> tuple[Any, ...]:
    """Return what the checks read outside of modules."""
    enabled, *_, epoch = native.autocast_region()
    return (
        *(hidden.shape, hidden.dtype, hidden.device, hidden.layout, torch.is_grad_enabled()),
        *(enabled, epoch if enabled else None, enabled and recipe_for_fp8()[1], may_fuse()),
        *switches(),
    )
