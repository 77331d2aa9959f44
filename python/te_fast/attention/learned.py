"""Launches of torch's attention kernels, learned from torch and repeated without torch.

torch takes several times as long on the host to call a kernel as the driver takes to launch one. So a call that comes
often is observed: torch's operators run under capture, with tensors of the same shapes, in a thread of their own. What
they would launch is then launched by te_fast, with the addresses of the call. `native.repeat_launches` refuses what it
cannot explain, and a trial compares results with torch's.

torch builds kernels for attention per thread and drops them with the thread. Here they live in a thread that does not
end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from te_fast.attention.kernels import Kernel
from te_fast.attention.rope import Heads
from te_fast.errors import TeFastError
from te_fast.runtime import native

#: Calls of one kind before it is learned. A model with varying lengths does not repeat one as often.
CALLS = 64
#: Kinds that a process learns: torch keeps a kernel for each.
KINDS = 64
#: Bytes of a product. For larger ones the GPU takes longer than the host does.
LIMIT = 32 << 20
#: Captures that must agree.
CAPTURES = 3
#: Largest error of a gradient in the trial, over the gradient's norm: a kernel may add in any order.
TOLERANCE = 1e-2


class Learnable(Protocol):
    """A kind of call whose launches may be learned."""

    @property
    def device(self) -> torch.device:
        """A GPU."""

    def observe(self) -> Any:
        """Return launches that agree with torch; None if they cannot be repeated. This stream is of nobody else."""


def are_learned(device: torch.device, size: int) -> bool:
    """Tell whether launches on a device are learned at all, for calls with tensors of so many bytes."""
    return (
        device.type == "cuda"
        and size <= LIMIT
        and native.learns_launches()
        # torch before 2.8 has no pools of memory that belong to one thread.
        and hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
    )


class Kind(NamedTuple):
    """A kind of call, from the product of queries, keys and values.

    Attributes
    ----------
    kernel : Kernel
        The kernel of torch.
    shape : torch.Size
        Of the product without its columns: ``(s, b)`` or ``(b, s)``.
    dtype : torch.dtype
        The product's type.
    device : torch.device
        A GPU.
    heads : Heads
        The product's columns.
    interleaved : bool
        Whether rotation turns adjacent channels.
    orders : tuple
        Orders of dimensions from heads in the product to those of the kernel, and back.
    is_causal : bool
        Whether attention is causal.
    scale : float
        The factor of the scores.
    trains : bool
        Whether a backward follows.
    """

    kernel: Kernel
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    heads: Heads
    interleaved: bool
    orders: tuple[Any, Any]
    is_causal: bool
    scale: float
    trains: bool

    def can_be_learned(self) -> bool:
        """Tell whether calls of the kind may be learned at all."""
        heads = self.heads
        size = self.shape.numel() * heads.columns * self.dtype.itemsize
        # Heads of grouped columns are copied, unless each group has one query.
        is_copied = heads.is_grouped and heads.queries != heads.groups
        return not is_copied and are_learned(self.device, size)

    def observe(self) -> native.RepeatedAttention | None:
        """Return launches that agree with torch; None if they cannot be repeated."""
        return _observe(self)


class Uses:
    """The calls of one kind.

    Parameters
    ----------
    kind : Learnable
        The kind.
    """

    __slots__ = ("_calls", "_is_under_way", "_kind", "is_settled", "repeated")

    def __init__(self, kind: Learnable) -> None:
        self._kind, self._calls, self._is_under_way = kind, 0, False
        #: What :meth:`Learnable.observe` has returned.
        self.repeated: Any = None
        #: Whether the launches are known, or will never be.
        self.is_settled = False

    def count(self) -> None:
        """Note a call; learn after enough of them."""
        self._calls += 1
        if self.is_settled or self._calls < CALLS or torch.cuda.is_current_stream_capturing():
            return
        if self._is_under_way:  # in another thread
            return
        self._is_under_way = True
        try:
            if len(_learned) < KINDS:
                self.repeated = _thread().run(partial(learn, self._kind))
        finally:
            self.is_settled = True
        if self.repeated is not None:
            _learned.append(self.repeated)


_learned: list[Any] = []


def learn(kind: Learnable) -> Any:
    """Return the launches of a kind; None if they cannot be learned. Runs in the thread that keeps torch's kernels.

    Parameters
    ----------
    kind : Learnable
        The kind.
    """
    with torch.cuda.device(kind.device), torch.no_grad():
        pool: Any = None
        try:
            pool = torch.cuda.MemPool()
            found = _observe_in(pool, kind)
        except (RuntimeError, TypeError, ValueError, TeFastError):
            # Whatever torch cannot do under capture, or has no memory for, runs through torch as before.
            found = None
        except BaseException:
            _pools.append(pool)
            raise
        if pool is not None and _is_in_use(pool):
            _pools.append(pool)
        return found


def _is_in_use(pool: Any) -> bool:
    try:
        segments = pool.snapshot()
    except (AttributeError, RuntimeError, TypeError):
        return True  # nothing tells
    return any(segment["allocated_size"] for segment in segments)


#: Pools that tensors of failed captures still refer to: torch must not lose such a pool.
_pools: list[Any] = []
#: A stream for each GPU, for this thread alone.
_streams: dict[int, torch.cuda.ExternalStream] = {}


def _observe_in(pool: Any, kind: Learnable) -> Any:
    index = torch.cuda.current_device()
    if index not in _streams:
        # One of torch's own streams may have other users, whose launches the capture would take.
        _streams[index] = torch.cuda.ExternalStream(native.new_stream(index), kind.device)
    stream = _streams[index]
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
        found = kind.observe()
        stream.synchronize()
    return found


class _Trial:
    """Random tensors of a kind, and torch's calls on them."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._kind = kind
        heads, into = kind.heads, kind.orders[0]
        # A generator of its own leaves the user's numbers alone.
        generator = torch.Generator(kind.device).manual_seed(seed)

        def random(columns: int) -> torch.Tensor:
            shape = (*kind.shape, columns)
            wide = torch.randn(shape, generator=generator, device=kind.device)
            return wide.to(kind.dtype)

        self.product = random(heads.columns)
        self.grad = random(heads.queries * heads.channels)
        self.parts = native.split_rotated(self.product, True, None, heads, kind.interleaved, into)
        of_heads = self.grad.view(*kind.shape, heads.queries, heads.channels)
        self._grad_of_heads = of_heads.permute(into)

    def forward(self) -> tuple[torch.Tensor, tuple[Any, ...], tuple[Any, ...]]:
        """Return torch's result, the other tensors that backward reads, and sizes."""
        kind = self._kind
        found: tuple[torch.Tensor, tuple[Any, ...], tuple[Any, ...]] = kind.kernel.forward(
            *self.parts, 0.0, kind.is_causal, kind.scale, kind.trains
        )
        return found

    def backward(self, left: tuple[torch.Tensor, tuple[Any, ...], tuple[Any, ...]]) -> Any:
        """Return torch's gradients of queries, keys and values."""
        kind = self._kind
        out, others, sizes = left
        options = (0.0, kind.is_causal, kind.scale)
        return kind.kernel.backward(self._grad_of_heads, *self.parts, out, others, sizes, *options)


def _observe(kind: Kind) -> native.RepeatedAttention | None:
    trials = [_Trial(kind, seed) for seed in range(CAPTURES)]
    # The first calls build kernels, which a capture forbids.
    left = [trial.forward() for trial in trials]
    out, (sums, *_), _ = left[0]
    context = out.permute(kind.orders[1])
    if not context.is_contiguous():
        return None
    if kind.trains:
        if not sums.is_contiguous() or sums.dtype != torch.float32:
            return None
        trials[0].backward(left[0])
    torch.cuda.current_stream().synchronize()
    forward, _ = launches_of(
        [trial.forward for trial in trials],
        lambda found: [found[0], found[1][0]] if kind.trains else [found[0]],
        [[trial.product] for trial in trials],
    )
    if forward is None:
        return None
    backward = None
    if kind.trains:
        pairs = list(zip(trials, left, strict=True))
        launches, grads = launches_of(
            [partial(trial.backward, one) for trial, one in pairs],
            list,
            [[trial.product, one[0], one[1][0], trial.grad] for trial, one in pairs],
        )
        if launches is None:
            return None
        backward = (launches, grads)
    tensors = (trials[0].product, context.flatten(2), sums if kind.trains else None)
    found = native.RepeatedAttention(
        forward, backward, tensors, kind.heads, kind.interleaved, kind.orders[0]
    )
    return found if _agrees(found, kind, trials[-1], left[-1]) else None


def launches_of(
    calls: list[Callable[[], Any]],
    results_of: Callable[[Any], list[torch.Tensor]],
    given: list[list[torch.Tensor]],
) -> tuple[native.RepeatedLaunches | None, list[torch.Tensor]]:
    """Return the launches that calls have in common, and the results of the first.

    Parameters
    ----------
    calls : list of Callable
        Calls of torch, each with tensors of its own. They return all tensors that they leave.
    results_of : Callable
        Takes what a call has returned, and returns the tensors that users of the launches provide.
    given : list of list of torch.Tensor
        The tensors of each call.
    """
    captures, kept, sizes, blocks = [], [], [], []
    for call, tensors in zip(calls, given, strict=True):
        before = _allocated()
        result, observed = native.observe_launches(tensors[0], call)
        if observed is None:
            return None, []
        size, count = (now - then for now, then in zip(_allocated(), before, strict=True))
        # What the call has allocated beside its results, it has freed again: its workspace.
        made = {tensor.untyped_storage().data_ptr(): tensor for tensor in _tensors_in(result)}
        sizes.append(max(size - sum(map(_bytes_in_allocator, made.values())), 0))
        blocks.append(count - len(made))
        captures.append((observed, [*tensors, *results_of(result)]))
        # Another call gets other memory while this call's lives.
        device = tensors[0].device
        kept.append((result, torch.empty(sizes[-1], dtype=torch.uint8, device=device)))
    launches = native.repeat_launches(captures, (min(sizes), max(*blocks, 0)))
    return launches, captures[0][1][len(given[0]) :]


def _allocated() -> tuple[int, int]:
    """Return the bytes and the number of the blocks that torch has allocated since the process began."""
    stats = torch.cuda.memory_stats()
    return stats["allocated_bytes.all.allocated"], stats["allocation.all.allocated"]


def _tensors_in(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result] if result.is_cuda and result.numel() else []
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in _tensors_in(part)]
    return []


def _bytes_in_allocator(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's memory; the allocator rounds to 512."""
    return -(-tensor.untyped_storage().nbytes() // 512) * 512


def _agrees(
    repeated: native.RepeatedAttention, kind: Kind, trial: _Trial, left: tuple[Any, ...]
) -> bool:
    """Tell whether launches that are repeated give torch's results on random tensors."""
    out, (sums, *_), _ = left
    context, saved = repeated.run(trial.product, None)
    expected = out.permute(kind.orders[1]).flatten(2)
    if not kind.trains:
        return bool(torch.equal(context, expected))
    if not torch.equal(context, expected) or not torch.equal(saved[2], sums):
        return False
    joined = repeated.grad(saved, trial.grad, None)
    grads = trial.backward(left)
    exact = native.join_rotated(grads, None, kind.heads, kind.interleaved, kind.orders[0])
    error = (joined.float() - exact.float()).norm() / exact.float().norm()
    # A comparison with NaN is false.
    return bool(error < TOLERANCE)


class _Thread:
    """A thread that runs one task after another, and never ends."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._loop, name="te_fast attention", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._answer(*self._tasks.get())

    @staticmethod
    def _answer(task: Callable[[], Any], answer: Future[Any]) -> None:
        try:
            answer.set_result(task())
        except BaseException as error:
            answer.set_exception(error)

    def run(self, task: Callable[[], Any]) -> Any:
        """Return what a task returns, or raise what it raises."""
        answer: Future[Any] = Future()
        self._tasks.put((task, answer))
        return answer.result()


_threads: list[_Thread] = []


def _thread() -> _Thread:
    if not _threads:
        _threads.append(_Thread())
    return _threads[0]


# A forked process has no other threads.
os.register_at_fork(after_in_child=_threads.clear)
