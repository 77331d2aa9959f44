"""Recognises norms, activations and blocks of other libraries, by their structure and by trying them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn import functional

from te_fast.errors import TeFastError
from te_fast.runtime.module_hooks import has_hooks

#: Largest relative error (Frobenius) between a module and its replacement: roundings of a few operations.
_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
DTYPES = tuple(_BOUNDS)
#: Names of a norm's eps.
EPSILONS = ("variance_epsilon", "eps", "epsilon")
#: How the names of Transformers' attention by flash_attn begin.
FLASH = "flash_attention"


class Left(TeFastError):
    """Why a module is left as it is."""


def leave(why: str) -> NoReturn:
    """Raise with the reason why a module is left as it is."""
    raise Left(why)


@contextmanager
def leaving(why: str) -> Iterator[None]:
    """Leave a module as it is if its trial fails, and report the reason.

    Raises
    ------
    Left
        In place of the exception that was raised within.
    """
    try:
        yield
    except Exception as error:
        message = f"{why}: {type(error).__name__}: {error}"
        raise Left(message) from error


class Norm(NamedTuple):
    """A norm over the last dimension."""

    kind: str
    eps: float
    zero_centered: bool

    def __call__(self, x: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
        """Apply the norm with a module's parameters, in FP32 or more."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        gamma = weight.to(wide.dtype) + float(self.zero_centered)
        if self.kind == "LayerNorm":
            beta = None if bias is None else bias.to(wide.dtype)
            return functional.layer_norm(wide, wide.shape[-1:], gamma, beta, self.eps)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * gamma


def agrees(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether two results differ only by the roundings of a type."""
    if got.shape != wanted.shape:
        return False
    size = wanted.double().norm()
    error = (got.double() - wanted.double()).norm()
    return bool(torch.isfinite(error)) and bool(error <= _BOUNDS[dtype] * size)


def rounded_as(dtype: torch.dtype) -> torch.dtype:
    """Return the type that matrix products of a type are rounded as.

    Where the user allows it, torch computes those of FP32 in TF32, whose fraction has as many bits as FP16's.
    """
    return torch.float16 if dtype is torch.float32 else dtype


def refuse_wrapped(module: torch.nn.Module, name: str) -> None:
    """Raise for a module whose call is more than its class's forward.

    Raises
    ------
    Left
        With the reason.
    """
    own = module.__dict__
    if "forward" in own:
        leave(f"{name} has a forward of its own, as wrappers such as Accelerate's hooks put there")
    if own.get("_compiled_call_impl") is not None:
        leave(f"{name} is compiled; convert before compiling")
    if has_hooks(module):
        leave(f"{name} has hooks, which would not be called")
    if "parametrizations" in module._modules:
        leave(f"{name} has parametrizations")


def refuse_parameters(module: torch.nn.Module, name: str) -> None:
    """Raise unless parameters are plain tensors of a type that layers compute in.

    Raises
    ------
    Left
        With the kind of the parameter.
    """
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not torch.nn.Parameter or type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__
            leave(f"{name}.{key} is {kind}; convert before sharding or quantising")
        if parameter.dtype not in DTYPES:
            leave(f"{name}.{key} is {parameter.dtype}")


def linear(module: Any, name: str) -> torch.nn.Linear:
    """Return a linear layer that te_fast can replace.

    Raises
    ------
    Left
        If the module is not a linear layer, or FP8 does not take its sizes.
    """
    if type(module) is not torch.nn.Linear:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        leave(f"{name} is {kind}, no torch.nn.Linear")
    refuse_wrapped(module, name)
    refuse_parameters(module, name)
    for size in (module.in_features, module.out_features):
        if size % 16 or size == 0:
            leave(f"{name} has {size} channels, which is no multiple of 16")
    return module


def _is_meta(module: torch.nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


@torch.no_grad()
def norm(module: torch.nn.Module, name: str) -> Norm:
    """Return which norm a module is.

    Raises
    ------
    Left
        If te_fast does not have this norm.
    """
    refuse_wrapped(module, name)
    refuse_parameters(module, name)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    others = set(module._parameters) - {"weight", "bias"}
    shown = f"{name} ({type(module).__name__})"
    if weight is None or weight.dim() != 1 or others or module._modules:
        leave(f"{shown} is not a norm with one weight")
    if module._buffers:
        leave(f"{shown} keeps buffers, as norms over a batch do")
    eps = next((getattr(module, key) for key in EPSILONS if hasattr(module, key)), None)
    if type(module) is torch.nn.RMSNorm and eps is None:
        eps = torch.finfo(weight.dtype).eps
    if not isinstance(eps, float):
        leave(f"{shown} has no eps")
    candidates = [Norm("LayerNorm", eps, zero_centered=False)] if bias is not None else []
    if bias is None:
        candidates = [Norm("RMSNorm", eps, centred) for centred in (False, True)]
    if weight.is_meta:
        if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm) or shown.endswith("RMSNorm)"):
            return candidates[0]
        leave(f"{shown} cannot be tried on the meta device")
    # Rows of several sizes, so that eps shows, and with a mean, which RMSNorm keeps and LayerNorm takes away. There are
    # batch and tokens, so that norms over other dimensions show.
    sizes = torch.tensor([[1e-3], [1e-2], [1.0], [10.0]], device="cpu").to(weight)
    x = sizes * (random_like(weight, 1, 4, weight.shape[0]) + 1)
    with leaving(f"{shown} cannot be called on tokens"):
        y = module(x)
    for candidate in candidates:
        if agrees(y, candidate(x, module), weight.dtype):
            return candidate
    leave(f"{shown} is neither a LayerNorm nor an RMSNorm")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": functional.silu,
    "geglu": lambda x: functional.gelu(x, approximate="tanh"),
    "reglu": functional.relu,
    "qgeglu": lambda x: x * torch.sigmoid(1.702 * x),
    "glu": torch.sigmoid,
}


@torch.no_grad()
def gated_activation(function: Any, name: str) -> str:
    """Return the gated activation that has a function in its first half.

    Raises
    ------
    Left
        If te_fast does not have this activation.
    """
    if not callable(function):
        leave(f"{name} has no act_fn")
    x = torch.linspace(-6.0, 6.0, 97, device="cpu")
    y = function(x)
    for kind, known in _ACTIVATIONS.items():
        if torch.allclose(y, known(x), rtol=1e-5, atol=1e-6):
            return kind
    leave(f"{name}.act_fn is no activation that te_fast has")


def random_like(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return numbers that do not touch the state of torch's generators."""
    generator = torch.Generator("cpu").manual_seed(1234)
    return torch.randn(*shape, generator=generator, device="cpu").to(like.device, like.dtype)


@contextmanager
def random_parameters(modules: Iterable[tuple[Any, float]]) -> Iterator[None]:
    """Give modules random parameters for a while, with which every step of a block shows in its result.

    The parameters of a new model are so small that the scores of attention are nearly equal and that the sums hide what
    is added to them, so that blocks with other scores, angles or bounds would pass a trial.

    Parameters
    ----------
    modules : iterable of tuple
        A module, and how many times as large its results are as its inputs; a norm, and the middle of its weights.
    """
    former = [(module, dict(module._parameters)) for module, _ in modules]
    generators: dict[torch.device, torch.Generator] = {}
    try:
        for module, size in modules:
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                device = parameter.device
                if device not in generators:
                    generators[device] = torch.Generator(device).manual_seed(1234)
                values = torch.empty_like(parameter.detach())
                values.normal_(generator=generators[device])
                if values.dim() == 1:
                    values.mul_(0.3).add_(size if key == "weight" else 0.0)
                else:
                    values.mul_(size * values.shape[-1] ** -0.5)
                module._parameters[key] = torch.nn.Parameter(values, requires_grad=False)
        yield
    finally:
        for module, parameters in former:
            module._parameters.update(parameters)


@contextmanager
def in_mode(module: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Put a module into training or evaluation mode for a while, in which its forward may write to its buffers."""
    former = [(child, child.training, dict(child._buffers)) for child in module.modules()]
    try:
        for child, _, buffers in former:
            child.training = training
            copies = {
                name: buffer if buffer is None else buffer.clone()
                for name, buffer in buffers.items()
            }
            child._buffers.update(copies)
        yield
    finally:
        for child, mode, buffers in former:
            child.training = mode
            child._buffers.update(buffers)


def refuse_random(module: Any, name: str, run: Callable[[], Any]) -> None:
    """Raise for a module that draws random numbers in training, for instance by a dropout function.

    Raises
    ------
    Left
        If it draws any.
    """
    device = next(module.parameters()).device
    of_gpu = device.type == "cuda"
    state = partial(torch.cuda.get_rng_state, device) if of_gpu else torch.get_rng_state
    with torch.random.fork_rng([device] if of_gpu else []), in_mode(module, training=True):
        before = state()
        run()
        if not torch.equal(state(), before):
            leave(f"{name} draws random numbers in training, for instance for its own dropout")


class Attention(NamedTuple):
    """The attention of a decoder layer."""

    module: Any
    heads: int
    groups: int
    channels: int
    scale: float
    has_bias: bool
    head_norms: tuple[torch.nn.Module, torch.nn.Module] | None
    #: Transformers' implementation: without a mask, ``eager`` attends to all keys, the others to earlier keys.
    implementation: str


class Decoder(NamedTuple):
    """A decoder layer like Llama's; if it has no activation, its feed-forward block is another one."""

    layer: Any
    attention: Attention
    norms: tuple[Norm, Norm]
    activation: str | None
    #: Why there is no activation.
    reason: str


def _children(module: torch.nn.Module, needed: set[str], optional: set[str], name: str) -> None:
    found = set(module._modules)
    if missing := needed - found:
        leave(f"{name} has no {', '.join(sorted(missing))}")
    if others := found - needed - optional:
        leave(f"{name} has {', '.join(sorted(others))}, too")


def implementation_of(attention: Any) -> str:
    """Return the name of Transformers' implementation of attention, as a module's configuration has it now."""
    return getattr(getattr(attention, "config", None), "_attn_implementation", None) or "sdpa"


def _attention(module: Any, name: str) -> Attention:
    refuse_wrapped(module, name)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    _children(module, set(projections), {"q_norm", "k_norm", "rotary_emb"}, name)
    q, k, v, _ = (linear(getattr(module, part), f"{name}.{part}") for part in projections)
    d = getattr(module, "head_dim", None)
    if not isinstance(d, int) or d <= 0 or q.out_features % d or k.out_features % d:
        leave(f"{name} has no head_dim that divides its projections")
    if k.out_features != v.out_features or q.out_features % k.out_features:
        leave(f"{name} has heads of other numbers or sizes for keys and values")
    biases = [part.bias is not None for part in (q, k, v)]
    if any(biases) != all(biases):
        leave(f"{name} has biases for some of queries, keys and values")
    if ("q_norm" in module._modules) != ("k_norm" in module._modules):
        leave(f"{name} has one norm for queries and keys")
    norms = (module.q_norm, module.k_norm) if "q_norm" in module._modules else None
    for part in norms or ():
        sizes = [parameter.numel() for parameter in part.parameters()]
        if any(size != d for size in sizes):
            leave(f"{name} has norms of {sizes[0]} channels, its heads have {d}")
    how = implementation_of(module)
    if how not in ("sdpa", "eager") and not how.startswith(FLASH):
        leave(f"{name} computes attention by {how}; te_fast knows sdpa, eager and {FLASH}")
    scale = float(getattr(module, "scaling", d**-0.5))
    heads = q.out_features // d, k.out_features // d
    return Attention(module, *heads, d, scale, all(biases), norms, how)


def _gated(module: Any, name: str) -> str:
    """Return the activation of a gated feed-forward block."""
    refuse_wrapped(module, name)
    parts = ("gate_proj", "up_proj", "down_proj")
    _children(module, set(parts), {"act_fn"}, name)
    gate, up, down = (linear(getattr(module, part), f"{name}.{part}") for part in parts)
    biases = {part.bias is not None for part in (gate, up, down)}
    sizes = (gate.out_features, up.out_features, down.in_features)
    if len(set(sizes)) != 1 or len(biases) != 1:
        leave(f"{name} has projections of other sizes or biases")
    return gated_activation(getattr(module, "act_fn", None), name)


def is_decoder(module: torch.nn.Module) -> bool:
    """Tell whether a module has attention and norms where decoder layers have them."""
    return {"self_attn", "input_layernorm", "post_attention_layernorm"} <= set(module._modules)


def decoder(module: Any, name: str) -> Decoder:
    """Return the parts of a decoder layer.

    Raises
    ------
    Left
        If the module is not such a layer.
    """
    refuse_wrapped(module, name)
    needed = {"self_attn", "input_layernorm", "post_attention_layernorm", "mlp"}
    _children(module, needed, set(), name)
    attention = _attention(module.self_attn, f"{name}.self_attn")
    first = norm(module.input_layernorm, f"{name}.input_layernorm")
    second = Norm("RMSNorm", eps=0.0, zero_centered=False)
    activation, reason = None, ""
    try:
        activation = _gated(module.mlp, f"{name}.mlp")
        second = norm(module.post_attention_layernorm, f"{name}.post_attention_layernorm")
    except Left as left:
        activation, reason = None, str(left)
    if len({parameter.dtype for parameter in module.parameters()}) != 1:
        leave(f"{name} has parameters of several types")
    return Decoder(module, attention, (first, second), activation, reason)


#: Sizes of the halves of feed-forward blocks in trials, so large that models which bound them at 7 or 10 show it.
GATED = 8.0


def _sizes(found: Decoder) -> list[tuple[Any, float]]:
    """Return the modules that te_fast replaces, with their sizes for :func:`random_parameters`."""
    layer, attention = found.layer, found.attention
    scores = (
        1.0 if attention.head_norms else (2 / (attention.channels**0.5 * attention.scale)) ** 0.5
    )
    own = attention.module
    sizes = [(own.q_proj, scores), (own.k_proj, scores), (own.v_proj, 1.0), (own.o_proj, 1.0)]
    norms = [layer.input_layernorm]
    if found.activation is not None:
        norms.append(layer.post_attention_layernorm)
        mlp = layer.mlp
        sizes += [(mlp.gate_proj, GATED), (mlp.up_proj, GATED), (mlp.down_proj, 1.0)]
    middles = [0.0 if norm.zero_centered else 1.0 for norm in found.norms]
    return sizes + list(zip(norms, middles, strict=False))


@torch.no_grad()
def try_decoder(found: Decoder, name: str, make: Callable[[], Callable[..., Any]]) -> bool:
    """Compare a decoder layer with its replacement; return whether the layer returns a tuple.

    Both compute with random parameters; `make` returns a replacement that has the layer's parameters of that moment.

    Raises
    ------
    Left
        If they differ, or the layer cannot be run as Llama's.
    """
    layer, attention = found.layer, found.attention
    if _is_meta(layer):
        return False
    weight = attention.module.q_proj.weight
    tokens = 16
    x = random_like(weight, 1, tokens, weight.shape[1])
    angles = random_like(weight, 1, tokens, attention.channels // 2).float()
    angles = torch.cat((angles, angles), -1)
    waves = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    mask = None
    if attention.implementation == "eager":
        mask = torch.full((1, 1, tokens, tokens), torch.finfo(x.dtype).min).triu(1).to(x)
    given = {"attention_mask": mask, "position_embeddings": waves}
    with in_mode(layer, training=False), random_parameters(_sizes(found)):
        with leaving(f"{name} cannot be called as Llama's layer"):
            wanted = type(layer).forward(layer, x, **given)
        with leaving(f"te_fast cannot compute {name}"):
            got = make()(x, **given)
    is_tuple = isinstance(wanted, tuple)
    if is_tuple and len(wanted) != 1:
        leave(f"{name} returns {len(wanted)} values")
    if not agrees(got, wanted[0] if is_tuple else wanted, rounded_as(x.dtype)):
        leave(f"{name} computes something else than Llama's layer")
    with _without_dropout(attention.module):
        refuse_random(layer, name, lambda: type(layer).forward(layer, x, **given))
    return is_tuple


@contextmanager
def _without_dropout(attention: Any) -> Iterator[None]:
    """Turn dropout of attention off for a while; te_fast's attention has the same dropout."""
    former = attention.__dict__.get("attention_dropout")
    if former is not None:
        attention.attention_dropout = 0.0
    try:
        yield
    finally:
        if former is not None:
            attention.attention_dropout = former
