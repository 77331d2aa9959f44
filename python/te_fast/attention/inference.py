"""Key-value caches of inference: the sequences of each step, and their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from te_fast.attention.caches import NonPagedKVCacheManager, PagedKVCacheManager
from te_fast.errors import DtypeError, ShapeError, StateError
from te_fast.layers.parameters import check_sizes
from te_fast.runtime import capturing
from te_fast.runtime.device import gpu_or_default


def _check_step(step_dict: Any) -> None:
    """Raise unless the argument of a step has numbers of tokens by sequence."""
    if not isinstance(step_dict, Mapping):
        message = (
            "InferenceParams: pre_step takes the new tokens by sequence, an OrderedDict, got "
            f"{type(step_dict).__name__}"
        )
        raise DtypeError(message)
    for name, tokens in step_dict.items():
        check_sizes("InferenceParams", **{f"the new tokens of sequence {name!r}": tokens})


def check_caches(layer: str, params: Any) -> None:
    """Raise unless the argument of a call has caches.

    Raises
    ------
    DtypeError
        If it is no :class:`InferenceParams`.
    """
    if not isinstance(params, InferenceParams):
        message = (
            f"{layer}: inference_params must be an InferenceParams, got {type(params).__name__}"
        )
        raise DtypeError(message)


class InferenceParams:
    """Key-value caches of a model's layers during inference. They keep numbers alone: keys and values get no gradients.

    Before each step, call :meth:`pre_step` with the sequences of the step and the number of tokens of each. Then call
    the layers with ``inference_params``, a mask type with padding, and the cumulative lengths of the new tokens.

    Parameters
    ----------
    max_batch_size, max_sequence_length : int
        Sequences of a step, and tokens of a sequence.
    num_heads_kv, head_dim_k : int
        Heads of keys and values, and channels of a key.
    dtype : torch.dtype
        Type of the caches.
    head_dim_v : int, optional
        Channels of a value; those of a key by default.
    is_paged : bool, default = False
        Give sequences pages as they grow, instead of room for the longest at once.
    total_num_pages, page_size : int, optional
        Pages, ``max_batch_size · max_sequence_length / page_size``, and tokens of each, a divisor of
        `max_sequence_length`.
    max_ctx_len : int, optional
        New tokens of a sequence in a step at most; needed by ``qkv_format='thd'``.
    qkv_format : {'bshd', 'sbhd', 'thd'}, default = 'bshd'
        Format of the new tokens.
    custom_cache_manager : type, optional
        Class of a cache manager of the user's own.

    Raises
    ------
    ShapeError
        If a size is missing, or sizes do not fit.
    DtypeError
        If a size is no integer, or `dtype` no type of torch.

    See Also
    --------
    MultiheadAttention : Reads and writes the caches.
    TransformerLayer : Passes the caches on.

    Examples
    --------
    >>> import torch
    >>> from collections import OrderedDict
    >>> import te_fast.pytorch as te
    >>> layer = te.TransformerLayer(32, 64, 2, layer_number=1, attn_input_format="bshd", device="cpu").eval()
    >>> params = te.InferenceParams(1, 16, 2, 16, torch.float32)
    >>> with torch.no_grad():
    ...     for tokens in (4, 1):
    ...         params.pre_step(OrderedDict({0: tokens}))
    ...         y = layer(torch.randn(1, tokens, 32), self_attn_mask_type="padding_causal", inference_params=params)
    >>> y.shape
    torch.Size([1, 1, 32])
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        for name, value in (
            ("num_heads_kv", num_heads_kv),
            ("head_dim_k", head_dim_k),
            ("dtype", dtype),
        ):
            if value is None:
                message = f"InferenceParams: {name} is missing"
                raise ShapeError(message)
        check_sizes(
            "InferenceParams",
            max_batch_size=max_batch_size,
            max_sequence_length=max_sequence_length,
            num_heads_kv=num_heads_kv,
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_k if head_dim_v is None else head_dim_v,
            max_ctx_len=0 if max_ctx_len is None else max_ctx_len,
        )
        if not isinstance(dtype, torch.dtype):
            message = f"InferenceParams: dtype must be a torch.dtype, got {type(dtype).__name__} {dtype!r}"
            raise DtypeError(message)
        if qkv_format not in ("bshd", "sbhd", "thd"):
            message = (
                f"InferenceParams: qkv_format must be 'bshd', 'sbhd' or 'thd', got {qkv_format!r}"
            )
            raise ShapeError(message)
        if qkv_format == "thd" and max_ctx_len is None:
            message = "InferenceParams: max_ctx_len is missing, which qkv_format='thd' needs"
            raise ShapeError(message)
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.is_paged = is_paged
        self.max_ctx_len = max_ctx_len
        sizes: dict[str, Any] = {
            "max_batch_size": max_batch_size,
            "max_seqlen": max_sequence_length,
            "num_heads": num_heads_kv,
            "head_dim_k": head_dim_k,
            "dtype": dtype,
            "head_dim_v": self.head_dim_v,
        }
        kind: Any = PagedKVCacheManager if is_paged else NonPagedKVCacheManager
        if is_paged:
            self._check_pages(total_num_pages, page_size)
            self.total_num_pages, self.page_size = total_num_pages, page_size
            sizes |= {"total_num_pages": total_num_pages, "page_size": page_size}
        with torch.inference_mode(False):  # as of the caches
            self.cache_manager: Any = (custom_cache_manager or kind)(**sizes)
            self._make_lengths()
        self.cache_qkv_format = "bshd"
        self._take_format(qkv_format)
        self.sequences_pre_step: OrderedDict[Any, int] = OrderedDict()
        self.sequences: OrderedDict[Any, int] = OrderedDict()
        self.batch_size = 0
        #: New tokens of all sequences in the step, and of the longest one; None before the first step.
        self._new_tokens: tuple[int, int] | None = None
        #: Which module has written the caches of a layer in this step.
        self._writers: dict[int, int] = {}

    def _make_lengths(self) -> None:
        kind: dict[str, Any] = {"dtype": torch.int32, "device": gpu_or_default()}
        self.cu_seqlens_q = torch.zeros(self.max_batch_size + 1, **kind)
        self.cu_seqlens_kv = torch.zeros(self.max_batch_size + 1, **kind)
        self.pre_step_seqlens = torch.zeros(self.max_batch_size, **kind)

    def _check_pages(self, total_num_pages: int | None, page_size: int | None) -> None:
        check_sizes("InferenceParams", page_size=0 if page_size is None else page_size)
        if not page_size or self.max_sequence_length % page_size != 0:
            message = (
                "InferenceParams: page_size must divide max_sequence_length = "
                f"{self.max_sequence_length}, got {page_size}"
            )
            raise ShapeError(message)
        wanted = self.max_batch_size * (self.max_sequence_length // page_size)
        if total_num_pages != wanted:
            message = (
                "InferenceParams: total_num_pages must be max_batch_size * max_sequence_length / page_size = "
                f"{wanted}, got {total_num_pages}"
            )
            raise ShapeError(message)

    def _take_format(self, qkv_format: str) -> None:
        self.input_qkv_format = qkv_format
        is_same = qkv_format == self.cache_qkv_format
        self.output_qkv_format = qkv_format if is_same else f"{qkv_format}_2{self.cache_qkv_format}"

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences = OrderedDict()
        self._new_tokens = None
        self.cache_manager.reset()

    def __repr__(self) -> str:
        """Type and sizes of the caches."""
        sizes = (
            f"total_pages={self.total_num_pages}, page_size={self.page_size}, num_heads={self.num_heads_kv}"
            if self.is_paged
            else f"max_batch_size={self.max_batch_size}, max_seqlen={self.max_sequence_length}, "
            f"num_heads={self.num_heads_kv}"
        )
        return (
            f"dtype={self.dtype}, is_paged={self.is_paged}, {sizes}, head_dim_k={self.head_dim_k}, "
            f"head_dim_v={self.head_dim_v}"
        )

    def allocate_memory(self, layer_number: int) -> None:
        """Make the caches of a layer; its first call does, too."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """Say which sequences the next step has.

        Parameters
        ----------
        step_dict : collections.OrderedDict
            New tokens by sequence, in the order of the batch: first the continued sequences of the previous step, then
            new ones.

        Raises
        ------
        DtypeError
            If the argument is no mapping, or a number of tokens no integer.
        ShapeError
            If sequences are in another order, there are more sequences or tokens than room, or a number is negative.
        StateError
            If all pages are taken.
        """
        _check_step(step_dict)
        order = list(dict.fromkeys([*filter(step_dict.__contains__, self.sequences), *step_dict]))
        if list(step_dict) != order:
            message = f"InferenceParams: the sequences of this step must be in the order {order}, got {list(step_dict)}"
            raise ShapeError(message)
        self.sequences = self.cache_manager.pre_step(step_dict)
        self._writers = {}
        self.batch_size = len(step_dict)
        new = [step_dict[name] for name in self.sequences]
        before = [
            length - tokens for length, tokens in zip(self.sequences.values(), new, strict=True)
        ]
        self._new_tokens = sum(new), max(new, default=0)
        self.sequences_pre_step = OrderedDict(zip(self.sequences, before, strict=True))
        rest = [0] * (self.max_batch_size - self.batch_size)
        self.pre_step_seqlens.copy_(torch.tensor([*before, *rest], dtype=torch.int32))
        for ends, lengths in (
            (self.cu_seqlens_q, new),
            (self.cu_seqlens_kv, list(self.sequences.values())),
        ):
            ends.copy_(torch.tensor([0, *lengths, *rest], dtype=torch.int32).cumsum(0))

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """Return the tokens of each sequence before the step: ``(max_batch_size,)``, int32."""
        return self.pre_step_seqlens

    def extent_of(self, q: torch.Tensor, qkv_format: str, layer: str) -> tuple[int, int]:
        """Return how many rows of the cache queries attend to, and how many tokens of each.

        Raises
        ------
        StateError
            If there is no step.
        ShapeError
            If the step has more sequences or tokens than the queries.
        """
        if capturing.is_in_capture(
            q
        ):  # a graph is replayed when there are more sequences and they have grown
            batch, longest = self.max_batch_size, self.max_sequence_length
        else:
            batch, longest = self.batch_size, max(self.sequences.values(), default=0)
            self._check_tokens(q, qkv_format, layer)
        if qkv_format == "thd":
            return batch, longest
        rows = q.shape[qkv_format.index("b")]  # may be more than the sequences of the step
        if not self.batch_size <= rows <= self.max_batch_size:
            message = (
                f"{layer}: the batch has {rows} rows; the inference_params have {self.batch_size} sequences in this "
                f"step and room for {self.max_batch_size}; pass a row for each sequence"
            )
            raise ShapeError(message)
        return rows, longest

    def _check_tokens(self, q: torch.Tensor, qkv_format: str, layer: str) -> None:
        """Raise if the step has more tokens than the queries; more queries than tokens are padding."""
        if self._new_tokens is None:
            message = (
                f"{layer}: call pre_step of the inference_params before the layers of each step"
            )
            raise StateError(message)
        total, longest = self._new_tokens
        if qkv_format == "thd":
            got, wanted = q.shape[0], total
        else:
            got, wanted = q.shape[qkv_format.index("s")], longest
        if got < wanted:
            message = (
                f"{layer}: there must be {wanted} tokens or more in {qkv_format}, as pre_step of the inference_params "
                f"was told, got {got}"
            )
            raise ShapeError(message)
        if qkv_format == "thd" and self.max_ctx_len is not None and longest > self.max_ctx_len:
            message = (
                f"{layer}: a sequence has {longest} new tokens, and the inference_params have max_ctx_len = "
                f"{self.max_ctx_len}"
            )
            raise ShapeError(message)

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, gathered from pages: ``(batch, max_sequence_length, heads, d)``."""
        return self.pages_of_rows(layer_number, self.batch_size)

    def pages_of_rows(self, layer_number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, gathered from pages, of the first rows of the batch."""
        table = self.cache_manager.page_table[:rows].long()
        keys, values = (
            cache[table].flatten(1, 2) for cache in self.cache_manager.cache[layer_number]
        )
        return keys, values

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, str]:
        """Keep a layer's new keys and values.

        Parameters
        ----------
        layer_number : int
            The layer.
        new_k, new_v : torch.Tensor
            In `qkv_format`.
        qkv_format : {'bshd', 'sbhd', 'thd'}
            Format of the new tokens.

        Returns
        -------
        tuple
            Keys and values of the cache, cumulative lengths of queries and of keys, the longest length of keys, and
            the format of all, as ``'thd_2bshd'``.

        Raises
        ------
        DtypeError
            If the new keys are not of the caches' type.
        ShapeError
            If the new keys or values are not of the caches' heads and channels.
        """
        if new_k.dtype != self.dtype:
            message = (
                f"InferenceParams: the caches are {self.dtype}, and the new keys {new_k.dtype}"
            )
            raise DtypeError(message)
        heads, d_k, d_v = self.num_heads_kv, self.head_dim_k, self.head_dim_v
        if new_k.shape[-2:] != (heads, d_k) or new_v.shape[-2:] != (heads, d_v):
            message = (
                f"InferenceParams: the caches have {heads} heads of {d_k} channels of keys and {d_v} of values, got "
                f"new keys {list(new_k.shape)} and values {list(new_v.shape)}"
            )
            raise ShapeError(message)
        self._take_format(qkv_format)
        ends = self.cu_seqlens_q, self.cu_seqlens_kv
        keys, values = self.cache_manager.step(layer_number, new_k, new_v, *ends, qkv_format)
        return keys, values, *ends, self.max_sequence_length, self.output_qkv_format
