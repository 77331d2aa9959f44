"""The loss of Transformers' language models, by te_fast's kernels."""

from __future__ import annotations

import sys
from typing import Any

import torch

from te_fast.losses.cross_entropy import parallel_cross_entropy

#: The loss in reports.
WHAT = "loss"
#: Its name in `exclude`, as Transformers' models call it.
NAME = "loss_function"
#: The attribute in which Transformers' models keep a loss of their own instead of their type's.
KEY = "_loss_function"


def has_causal_loss(model: Any) -> bool:
    """Tell whether a module is a language model with the loss that Transformers has for its type.

    Parameters
    ----------
    model : torch.nn.Module
        Any module.
    """
    transformers: Any = sys.modules.get("transformers")
    theirs: Any = sys.modules.get("transformers.loss.loss_utils")
    if transformers is None or theirs is None:
        return False
    if not isinstance(model, transformers.PreTrainedModel) or KEY in model.__dict__:
        return False
    # Earlier releases have no place for another loss.
    if getattr(getattr(type(model), "loss_function", None), "fset", None) is None:
        return False
    kind = getattr(model, "loss_type", None)
    return theirs.LOSS_MAPPING.get(kind) is theirs.ForCausalLMLoss


def causal_loss(
    logits: torch.Tensor,
    labels: Any,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the mean cross entropy of each token and its next token, as Transformers' ``ForCausalLMLoss``.

    Transformers makes a copy of the logits in FP32, and their gradient likewise. These kernels read the logits once for
    the loss, and once for the gradient, in their own type.

    Parameters
    ----------
    logits : torch.Tensor
        ``(batch, tokens, vocabulary)``.
    labels : torch.Tensor
        Integers ``(batch, tokens)``: the tokens. The logits of a token are compared with the token that follows.
    vocab_size : int
        The vocabulary.
    num_items_in_batch : int or torch.Tensor, optional
        Divides the sum of the losses; by default the number of labels that are not ignored.
    ignore_index : int, default = -100
        Label without loss.
    shift_labels : torch.Tensor, optional
        For each token the one that follows, in place of `labels`.
    **_
        Other arguments, which Transformers' loss ignores, too.

    Returns
    -------
    torch.Tensor
        A number in FP32.
    """
    if shift_labels is None:
        shift_labels = labels.roll(-1, -1)
        shift_labels[..., -1:] = ignore_index
    targets = shift_labels.reshape(-1).to(logits.device)
    losses = parallel_cross_entropy(
        logits.reshape(-1, vocab_size), targets, ignore_idx=ignore_index
    )
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum()
    elif isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(losses.device)
    return losses.sum() / num_items_in_batch
