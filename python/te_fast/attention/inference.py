"""Key-value caches of inference: the sequences of a step, and the places of their keys and values."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from te_fast.errors import DtypeError, ShapeError, StateError
from te_fast.layers.parameters import check_sizes
from te_fast.runtime import capturing
from te_fast.runtime.device import gpu_or_default


class KVCacheManager:
    """Keeps keys and values of every layer; base class for managers of the user's own.

    Attributes
    ----------
    cache : dict of int to tuple of torch.Tensor
        Keys and values by layer number.
    sequences : collections.OrderedDict
        Tokens that are kept, by sequence.

    See Also
    --------
    NonPagedKVCacheManager, PagedKVCacheManager : The managers of te_fast.
    te_fast.pytorch.InferenceParams : Takes a manager.

    Examples
    --------
    >>> from te_fast.pytorch.attention.inference import KVCacheManager, PagedKVCacheManager
    >>> issubclass(PagedKVCacheManager, KVCacheManager)
    True
    """

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Any, Any]] = {}
        self.sequences: OrderedDict[Any, int] = OrderedDict()

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Make the memory of a layer."""
        self.cache[layer_number] = (None, None)

    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        """Note which sequences the next step has, and return their lengths after it."""
        return self.sequences

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new keys and values, and return all of them."""
        return self.cache[layer_number]


class _Places:
    """Where the new tokens of a step go: for each, its sequence, its position there, and its row among the new ones."""

    def __init__(
        self, new: torch.Tensor, cu_new: torch.Tensor, cu_all: torch.Tensor, qkv_format: str
    ) -> None:
        lengths, totals = cu_new.diff(), cu_all.diff()
        if qkv_format == "thd":
            rows = torch.arange(new.shape[0], device=new.device)
            sequence = torch.searchsorted(cu_new[1:].contiguous(), rows, right=True)
            self.is_token = sequence < lengths.shape[0]
            self.sequence = sequence.clamp_max(lengths.shape[0] - 1)
            step = rows - cu_new[self.sequence]
        else:
            batch, size = (
                (new.shape[0], new.shape[1])
                if qkv_format == "bshd"
                else (new.shape[1], new.shape[0])
            )
            self.sequence = torch.arange(batch, device=new.device).repeat_interleave(size)
            step = torch.arange(size, device=new.device).repeat(batch)
            self.is_token = step < lengths[self.sequence]
        self.position = (totals - lengths)[self.sequence] + step

    @staticmethod
    def rows_of(new: torch.Tensor, qkv_format: str) -> torch.Tensor:
        """Return new keys or values in the order of the places: ``(tokens, heads, d)``."""
        if qkv_format == "thd":
            return new
        return (new if qkv_format == "bshd" else new.transpose(0, 1)).flatten(0, 1)

    def write(self, rows: torch.Tensor, flat: torch.Tensor, values: torch.Tensor) -> None:
        """Write values, without history, into the rows `flat`. Padding goes into the last row: nothing is counted."""
        flat = torch.where(self.is_token, flat, rows.shape[0] - 1)
        rows.index_copy_(0, flat.long(), values.detach().to(rows.dtype))


class _CachesInRows(KVCacheManager):
    """Caches whose first two dimensions are one in memory, followed by a row for padding that is never read.

    Parameters
    ----------
    sizes : tuple of int
        The first two dimensions.
    num_heads, head_dim_k, head_dim_v : int
        Heads, and channels of keys and of values; those of a key by default.
    dtype : torch.dtype
        Type.
    device : torch.device
        Where they are.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        num_heads: int,
        channels: tuple[int, int | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads, self.dtype = num_heads, dtype
        self.head_dim_k = channels[0]
        self.head_dim_v = channels[0] if channels[1] is None else channels[1]
        self._sizes, self._device = sizes, device
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def allocate_memory(self, layer_number: int) -> None:
        """Make the memory of a layer, for keys and for values: the two dimensions, heads, channels."""
        count = self._sizes[0] * self._sizes[1] + 1
        kind: dict[str, Any] = {"dtype": self.dtype, "device": self._device}
        with torch.inference_mode(False):  # else no step outside of inference mode could write them
            keys, values = (
                torch.zeros(count, self.num_heads, d, **kind)
                for d in (self.head_dim_k, self.head_dim_v)
            )
            self._rows[layer_number] = keys, values
            self.cache[layer_number] = (
                keys[:-1].unflatten(0, self._sizes),
                values[:-1].unflatten(0, self._sizes),
            )

    def _write(self, layer_number: int, places: _Places, flat: torch.Tensor, new: Any) -> None:
        """Write new keys and values, given in the order of the places."""
        for rows, values in zip(self._rows[layer_number], new, strict=True):
            if values.numel():
                places.write(rows, flat, values)


class NonPagedKVCacheManager(_CachesInRows):
    """Caches with the memory of the longest sequence for every sequence of the batch.

    Parameters
    ----------
    max_batch_size, max_seqlen : int
        Sequences, and tokens of each.
    num_heads, head_dim_k : int
        Heads of keys and values, and channels of a key.
    dtype : torch.dtype
        Type of the caches.
    head_dim_v : int, optional
        Channels of a value; those of a key by default.

    See Also
    --------
    PagedKVCacheManager : Caches in pages.
    te_fast.pytorch.InferenceParams : Makes one of the two.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.attention.inference import NonPagedKVCacheManager
    >>> manager = NonPagedKVCacheManager(2, 32, num_heads=4, head_dim_k=16, dtype=torch.bfloat16)
    >>> len(manager.sequences)
    0
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
    ) -> None:
        device, channels = gpu_or_default(), (head_dim_k, head_dim_v)
        super().__init__((max_batch_size, max_seqlen), num_heads, channels, dtype, device)
        self.max_batch_size, self.max_seqlen = max_batch_size, max_seqlen
        # Number of the row that each row of the batch had in the step before.
        self.batch_indices = torch.arange(max_batch_size, dtype=torch.int32, device=device)
        self.need_reindex = False
        #: Layers whose rows are in the order of the step.
        self._in_order: set[int] = set()

    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        """Note which sequences the next step has, and return their lengths after it.

        Sequences that are missing have ended; their memory goes to new sequences. The others keep their order, and new
        sequences follow.
        """
        former = list(self.sequences)
        stay = [index for index, name in enumerate(former) if name in step_dict]
        gone = [index for index, name in enumerate(former) if name not in step_dict]
        lengths = OrderedDict((former[index], self.sequences[former[index]]) for index in stay)
        for name, tokens in step_dict.items():
            lengths[name] = lengths.get(name, 0) + tokens
        _check_lengths(lengths, self.max_batch_size, self.max_seqlen)
        order = [*stay, *gone, *range(len(former), self.max_batch_size)]
        self.need_reindex = order != list(range(self.max_batch_size))
        self.batch_indices.copy_(torch.tensor(order, dtype=torch.int32))
        self._in_order = set()
        self.sequences = lengths
        return self.sequences

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new keys and values, and return those of the batch: ``(batch, max_seqlen, heads, d)``."""
        caches = self.cache[layer_number]
        # A graph is replayed in other steps.
        is_in_capture = capturing.is_in_capture(new_k)
        if is_in_capture or (self.need_reindex and layer_number not in self._in_order):
            for cache in caches:
                cache.copy_(cache[self.batch_indices.long()])
        if not is_in_capture:  # a call that failed behind this is made again in the same step
            self._in_order.add(layer_number)
        places = _Places(new_k, cu_new_seqlens, cu_cached_seqlens, qkv_format)
        flat = places.sequence * self.max_seqlen + places.position
        new = [places.rows_of(tensor, qkv_format) for tensor in (new_k, new_v)]
        self._write(layer_number, places, flat, new)
        batch = {"bshd": new_k.shape[0], "sbhd": new_k.shape[1]}.get(
            qkv_format, self.max_batch_size
        )
        keys, values = caches
        return keys[:batch], values[:batch]


class PagedKVCacheManager(_CachesInRows):
    """Caches in pages, which sequences take as they grow.

    Parameters
    ----------
    total_num_pages, page_size : int
        Pages, and tokens of each.
    num_heads, head_dim_k : int
        Heads of keys and values, and channels of a key.
    dtype : torch.dtype
        Type of the caches.
    max_batch_size, max_seqlen : int
        Sequences, and tokens of each.
    head_dim_v : int, optional
        Channels of a value; those of a key by default.

    See Also
    --------
    NonPagedKVCacheManager : Caches without pages.
    te_fast.pytorch.InferenceParams : Makes one of the two.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.attention.inference import PagedKVCacheManager
    >>> manager = PagedKVCacheManager(
    ...     8, 16, 4, 16, torch.bfloat16, max_batch_size=2, max_seqlen=32
    ... )
    >>> len(manager.sequences)
    0
    """

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
    ) -> None:
        device, channels = gpu_or_default(), (head_dim_k, head_dim_v)
        super().__init__((total_num_pages, page_size), num_heads, channels, dtype, device)
        self.total_num_pages, self.page_size = total_num_pages, page_size
        self.max_batch_size, self.max_seqlen = max_batch_size, max_seqlen
        self.max_pages_per_seq = max_seqlen // page_size
        self.free_pages = list(range(total_num_pages))
        self.allocated_pages: dict[Any, list[int]] = {}
        shape = max_batch_size, self.max_pages_per_seq
        self.page_table = torch.zeros(shape, dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        super().reset()
        self.free_pages = list(range(self.total_num_pages))
        self.allocated_pages = {}
        self.page_table.zero_()

    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        """Note which sequences the next step has, give them pages, and return their lengths after it.

        Raises
        ------
        StateError
            If there are too few pages; nothing has changed then.
        """
        lengths = OrderedDict((name, n) for name, n in self.sequences.items() if name in step_dict)
        for name, tokens in step_dict.items():
            lengths[name] = lengths.get(name, 0) + tokens
        _check_lengths(lengths, self.max_batch_size, self.max_seqlen)
        gone = [
            page
            for name in self.sequences
            if name not in step_dict
            for page in self.allocated_pages[name]
        ]
        free = [*self.free_pages, *gone]
        pages = {name: list(self.allocated_pages.get(name, ())) for name in lengths}
        for name, length in lengths.items():
            missing = -(-length // self.page_size) - len(pages[name])
            if missing > len(free):
                raise StateError(self._full())
            pages[name] += free[:missing]
            del free[:missing]
        self.free_pages, self.allocated_pages, self.sequences = free, pages, lengths
        self.get_page_table(list(lengths))
        return self.sequences

    def get_sequence_count(self) -> int:
        """Return the number of sequences."""
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """Return the tokens of each sequence."""
        return list(self.sequences.values())

    def has_free_page(self) -> bool:
        """Return whether a page is free."""
        return bool(self.free_pages)

    def get_page_count(self, seq: Any) -> int:
        """Return the number of a sequence's pages."""
        return len(self.get_page_list(seq))

    def get_page_list(self, seq: Any) -> list[int]:
        """Return the numbers of a sequence's pages."""
        return list(self.allocated_pages.get(seq, ()))

    def get_page_table(self, sequences: list[Any]) -> torch.Tensor:
        """Write the pages of sequences into the table, ``(max_batch_size, max_pages_per_seq)``, and return it."""
        table = torch.zeros(self.page_table.shape, dtype=torch.int32)
        for row, name in enumerate(sequences):
            own = self.get_page_list(name)
            table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        return self.page_table.copy_(table)

    def allocate_page(self, seq: Any) -> None:
        """Give a sequence one more page.

        Raises
        ------
        StateError
            If all pages are taken.
        """
        if not self.has_free_page():
            raise StateError(self._full())
        self.allocated_pages.setdefault(seq, []).append(self.free_pages.pop(0))

    def allocate_sequence(self, seq: Any, context_len: int) -> None:
        """Give a new sequence the pages of its tokens."""
        for _ in range(-(-context_len // self.page_size)):
            self.allocate_page(seq)

    def deallocate_sequence(self, seq: Any) -> None:
        """Take the pages of a sequence back."""
        self.free_pages += self.allocated_pages.pop(seq, [])

    def _full(self) -> str:
        return f"InferenceParams: the {self.total_num_pages} pages of the KV cache are all taken"

    def print_cache(self) -> None:
        """Log which pages each sequence has, for debugging."""
        logger = logging.getLogger("PagedKVCacheManager")
        free = len(self.free_pages)
        used = self.total_num_pages - free
        logger.debug("pages: %s (used %s, free %s)", self.total_num_pages, used, free)
        for name, tokens in self.sequences.items():
            logger.debug(
                "sequence %s: %s tokens, pages %s", name, tokens, self.allocated_pages[name]
            )

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new keys and values, and return its pages: ``(total_num_pages, page_size, heads, d)``."""
        caches = self.cache[layer_number]
        places = _Places(new_k, cu_new_seqlens, cu_cached_seqlens, qkv_format)
        page = places.position.clamp_max(self.max_seqlen - 1) // self.page_size
        flat = (
            self.page_table[places.sequence, page] * self.page_size
            + places.position % self.page_size
        )
        new = [places.rows_of(tensor, qkv_format) for tensor in (new_k, new_v)]
        self._write(layer_number, places, flat, new)
        return caches


def _check_lengths(lengths: Mapping[Any, int], batch: int, longest: int) -> None:
    """Raise unless the sequences of a step fit into the caches."""
    if len(lengths) > batch:
        message = f"InferenceParams: there is room for {batch} sequences (max_batch_size), got {len(lengths)}"
        raise ShapeError(message)
    for name, length in lengths.items():
        if length > longest:
            message = (
                f"InferenceParams: sequence {name!r} has {length} tokens, and there is room for {longest} "
                "(max_sequence_length)"
            )
            raise ShapeError(message)


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
