"""Attention in graphs of ``torch.compile``: cuDNN's kernels as operators, whose launches are learned.

torch's own operators take the host about 60 us a forward and 100 us a backward in compiled code (H200, by a sampling
profiler; the script is not kept). These operators call the same kernels. Once the launches of a kind of call are known
(:mod:`te_fast.attention.learned`), they make them without torch. Flash attention stays torch's operator: the workspace
of its backward is several blocks of memory, so its launches cannot be learned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from te_fast.attention.kernels import ON_GPUS, ON_THE_HOST
from te_fast.attention.learned import CAPTURES, TOLERANCE, Uses, are_learned, launches_of
from te_fast.ops.common import autocast_dtype
from te_fast.runtime import native
from te_fast.runtime.compiling import PLAIN, is_unseen
from te_fast.runtime.library import register, register_gradient

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: torch's numbers of the kernels that are called here.
_CUDNN, _ON_THE_HOST = 3, 1
#: Kinds of calls that are remembered.
_KINDS = 512
#: The longest sequence of the call for which torch is asked to choose a kernel.
_TOKENS = 256


class Options(NamedTuple):
    """The arguments of a call beside its tensors.

    Attributes
    ----------
    is_causal : bool
        Whether a query attends to no later key.
    scale : float
        Factor of the products of queries and keys.
    """

    is_causal: bool
    scale: float


def _number_on(device: torch.device) -> int:
    """Return torch's number of the kernel that is called here."""
    return _ON_THE_HOST if device.type == "cpu" else _CUDNN


def _kernel_on(device: torch.device) -> Any:
    """Return the :class:`~te_fast.attention.kernels.Kernel`; None if this torch has none with known arguments."""
    kernels = ON_THE_HOST if device.type == "cpu" else ON_GPUS
    return kernels[_number_on(device)]()


def is_chosen(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    trains: bool,
) -> bool:
    """Tell whether torch chooses the kernel that is called here.

    A trace calls this function once and takes its answer as a constant, as torch's own operators are chosen once.

    Parameters
    ----------
    heads : tuple of int
        Heads of queries, heads of keys and values, channels of a head.
    dtype, device
        Of the tensors.
    is_causal : bool
        Whether a query attends to no later key.
    trains : bool
        Whether a backward follows.
    """
    queries, groups, channels = heads
    if torch.are_deterministic_algorithms_enabled() or (device.type != "cpu" and channels % 8):
        return False  # torch pads channels
    if torch._C._are_functorch_transforms_active():
        return False  # the operator's gradient is a node of autograd, which they do not take
    if device.type != "cpu" and not torch.cuda.is_available():
        return False  # fake tensors of a GPU that is not there
    options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": trains}
    q, k, v = (torch.empty(2, n, _TOKENS, channels, **options) for n in (queries, groups, groups))
    how: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": queries != groups}
    number: int = torch._fused_sdp_choice(q, k, v, **how)
    return number == _number_on(device) and _kernel_on(device) is not None


is_chosen._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attend_in_graph(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> torch.Tensor | None:
    """Attend in a trace; return None if torch's own operator has to.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(batch, heads, tokens, channels)``.
    is_causal : bool
        Whether a query attends to no later key.
    scale : float
        Factor of the products of queries and keys.
    """
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN) or q.is_meta:
        return None
    # Importing te_fast does not import it, but a compiler does.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    queries, keys = q.shape[2], k.shape[2]
    if q.shape[3] != v.shape[3] or (is_causal and guard_or_true(queries != keys)):
        return None
    if guard_or_true(queries == 1) or guard_or_true(keys == 1):
        return None  # cuDNN may refuse a single token; sizes that depend on data may be one
    if not (q.stride(3) == 1 and k.stride(3) == 1 and v.stride(3) == 1):
        return None  # the kernels read a head's channels side by side
    if autocast_dtype(q) not in (None, q.dtype):
        return None  # torch's operator casts
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    # Numbers of heads and channels are constants of a graph, also where sizes are dynamic.
    heads = int(q.shape[1]), int(k.shape[1]), int(q.shape[3])
    if not is_chosen(heads, q.dtype, q.device, is_causal, trains):
        return None
    out: torch.Tensor = attend(q, k, v, is_causal, scale, trains)[0]
    return out


# Calls of torch -------------------------------------------------------------------------------------


def _sums_shape(q: torch.Tensor, trains: bool) -> tuple[int, ...]:
    return tuple(q.shape[:3]) if trains else (0,)


def _left(q: torch.Tensor, k: torch.Tensor, sums: torch.Tensor) -> Any:
    """Return what else a kernel's backward takes: tensors and sizes. Numbers for dropout are not read without it."""
    if q.device.type == "cpu":
        return (sums,), ()
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    return (sums.unsqueeze(-1), seed, offset, None, None), (q.shape[2], k.shape[2])


def _is_laid_as(tensor: torch.Tensor, alike: torch.Tensor) -> bool:
    """Tell whether a tensor is laid as graphs expect: without gaps, its dimensions in the order of `alike`'s."""
    strides = torch.empty_like(alike, device="meta").stride()
    triples = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all([size == 1 or own == other for size, own, other in triples])


def _laid_as(tensor: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
    return tensor if _is_laid_as(tensor, alike) else torch.empty_like(alike).copy_(tensor)


def _forward_by_torch(options: Options, trains: bool, q: Any, k: Any, v: Any) -> Any:
    return _kernel_on(q.device).forward(q, k, v, 0.0, options.is_causal, options.scale, trains)


def _backward_by_torch(
    options: Options, grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any
) -> Triple:
    others, sizes = _left(q, k, sums)
    found: Triple = _kernel_on(q.device).backward(
        *(grad, q, k, v, out, others, sizes), *(0.0, options.is_causal, options.scale)
    )
    return found


# Calls whose launches are learned -------------------------------------------------------------------


class Pass(NamedTuple):
    """A kind of forward or backward.

    Attributes
    ----------
    options : Options
        Its arguments beside the tensors.
    trains : bool
        Whether a backward follows; true of a backward.
    is_backward : bool
        Whether it is a backward.
    layouts : tuple
        Sizes and strides of queries, keys and values, and of a backward's gradient.
    dtype : torch.dtype
        The tensors' type.
    device : torch.device
        A GPU.
    """

    options: Options
    trains: bool
    is_backward: bool
    layouts: tuple[tuple[Any, Any], ...]
    dtype: torch.dtype
    device: torch.device

    def observe(self) -> native.RepeatedCall | None:
        """Return launches that agree with torch; None if they cannot be repeated."""
        trials = [self._tensors(seed) for seed in range(CAPTURES)]
        calls: list[Callable[[], Any]] = [partial(self._call, tensors) for tensors in trials]
        calls[0]()  # builds kernels, which a capture forbids
        torch.cuda.current_stream().synchronize()
        launches, made = launches_of(calls, self._results, trials)
        if launches is None or not self._are_laid_right(made, trials[0]):
            return None
        found = native.RepeatedCall(launches, trials[0], made)
        return found if self._agrees(found, trials[-1]) else None

    def _tensors(self, seed: int) -> list[torch.Tensor]:
        # A generator of its own leaves the user's numbers alone.
        generator = torch.Generator(self.device).manual_seed(seed)
        made = []
        for sizes, strides in self.layouts:
            tensor = torch.empty_strided(sizes, strides, dtype=self.dtype, device=self.device)
            made.append(tensor.normal_(generator=generator))
        if not self.is_backward:
            return made
        q, k, v, grad = made
        out, (sums, *_), _ = _forward_by_torch(self.options, True, q, k, v)
        return [grad, q, k, v, _laid_as(out, q), sums.view(q.shape[:3])]

    def _call(self, tensors: list[torch.Tensor]) -> Any:
        if self.is_backward:
            return _backward_by_torch(self.options, *tensors)
        return _forward_by_torch(self.options, self.trains, *tensors)

    def _results(self, found: Any) -> list[torch.Tensor]:
        if self.is_backward:
            return list(found)
        out, (sums, *_), _ = found
        return [out, sums.view(out.shape[:3])] if self.trains else [out]

    def _are_laid_right(self, made: list[torch.Tensor], given: list[torch.Tensor]) -> bool:
        """Tell whether torch's results are laid as graphs expect."""
        alike = given[1:4] if self.is_backward else given[:1]
        return all([_is_laid_as(one, other) for one, other in zip(made, alike, strict=False)])

    def _agrees(self, repeated: native.RepeatedCall, tensors: list[torch.Tensor]) -> bool:
        """Tell whether launches that are repeated give torch's results on random tensors."""
        made = repeated.run(*tensors)
        expected = self._results(self._call(tensors))
        if made is None:
            return False
        pairs = list(zip(made, expected, strict=True))
        if not self.is_backward:
            return all(torch.equal(one, other) for one, other in pairs)
        # A kernel may add in any order. A comparison with NaN is false.
        errors = [(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs]
        return all(bool(error < TOLERANCE) for error in errors)


_uses: dict[Any, Uses | None] = {}


def _uses_of(
    options: Options, trains: bool, grad: torch.Tensor | None, *tensors: torch.Tensor
) -> Uses | None:
    """Return the calls of a kind; None if its launches are never learned."""
    q, k = tensors[0], tensors[1]
    key = (options, trains, grad is None, q.shape, k.shape, q.dtype, q.device)
    try:
        return _uses[key]
    except KeyError:
        pass
    if len(_uses) >= _KINDS:
        _uses.clear()
    given = tensors if grad is None else (*tensors, grad)
    layouts = tuple((tensor.shape, tensor.stride()) for tensor in given)
    kind = Pass(options, trains, grad is not None, layouts, q.dtype, q.device)
    size = sum(tensor.numel() for tensor in tensors) * q.element_size()
    found = _uses[key] = Uses(kind) if are_learned(q.device, size) else None
    return found


def _repeated(uses: Uses | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Make launches that are known; return None if torch has to make them."""
    if uses is None:
        return None
    if not uses.is_settled:
        uses.count()
    repeated: native.RepeatedCall | None = uses.repeated
    return None if repeated is None else repeated.run(*tensors)


# Operators ------------------------------------------------------------------------------------------


def _forward_run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    trains: bool,
) -> Pair:
    options = Options(is_causal, scale)
    if q.numel() == 0 or k.numel() == 0:
        zeros = torch.zeros_like(q)
        return zeros, q.new_zeros(_sums_shape(q, trains), dtype=torch.float32)
    made = _repeated(_uses_of(options, trains, None, q, k, v), q, k, v)
    if made is None:
        out, (sums, *_), _ = _forward_by_torch(options, trains, q, k, v)
        made = _laid_as(out, q), sums.reshape(q.shape[:3]).contiguous() if trains else sums
    # Without a backward, kernels differ in what they leave.
    return made[0], made[1] if trains else q.new_empty((0,), dtype=torch.float32)


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Pair:
    del k, v
    return torch.empty_like(q), q.new_empty(_sums_shape(q, given[-1]), dtype=torch.float32)


attend = register(
    "attend(Tensor q, Tensor k, Tensor v, bool is_causal, float scale, bool trains) -> (Tensor, Tensor)",
    _forward_run,
    _forward_fake,
)


def _backward_run(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Triple:
    options = Options(is_causal, scale)
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    tensors = grad, q, k, v, out, sums
    made = _repeated(_uses_of(options, True, grad, q, k, v), *tensors)
    if made is None:
        made = _backward_by_torch(options, *tensors)
        made = tuple(_laid_as(one, other) for one, other in zip(made, (q, k, v), strict=True))
    of_q, of_k, of_v = made
    return of_q, of_k, of_v


def _backward_fake(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> Triple:
    del grad, given
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_differentiate = register(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, bool is_causal, float scale) "
    "-> (Tensor, Tensor, Tensor)",
    _backward_run,
    _backward_fake,
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, is_causal, scale, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = is_causal, scale


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
    return *_differentiate(grad, *ctx.saved_tensors, *ctx.options), *[None] * 3


register_gradient(attend, _setup, _backward)


class _Attend(torch._ops.OpOverload):
    """The forward operator, called past torch's dispatcher where nothing but compiled code sees the call."""

    def __call__(self, *given: Any, **named: Any) -> Pair:
        if named or not _is_direct(*given[:3]):
            return super().__call__(*given, **named)
        return _forward_run(*given)


class _Differentiate(torch._ops.OpOverload):
    """The backward operator, likewise."""

    def __call__(self, *given: Any, **named: Any) -> Triple:
        if named or not _is_direct(*given[:4]):
            return super().__call__(*given, **named)
        return _backward_run(*given)


def _is_direct(*tensors: torch.Tensor) -> bool:
    needs = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])
    return not needs and is_unseen(*tensors) and not torch._C._autograd._profiler_enabled()


attend.__class__ = _Attend
_differentiate.__class__ = _Differentiate
