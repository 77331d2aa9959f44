"""Memory of key-value caches: where the keys and values of sequences lie, for every layer."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from te_fast.errors import ShapeError, StateError
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
            self._show(layer_number)

    def _show(self, layer_number: int) -> None:
        """Make the caches of a layer, which are views of its rows."""
        keys, values = (rows[:-1].unflatten(0, self._sizes) for rows in self._rows[layer_number])
        self.cache[layer_number] = keys, values

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what views the rows: a pickle would part it from them."""
        others = {n: caches for n, caches in self.cache.items() if n not in self._rows}
        return {**self.__dict__, "cache": others}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copied or pickled state, and make the caches of its rows."""
        self.__dict__.update(state)
        with torch.inference_mode(False):
            for layer_number in self._rows:
                self._show(layer_number)

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
