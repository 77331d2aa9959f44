"""The forwards of converted modules: te_fast's layers, with the parameters of the module."""

from __future__ import annotations

import types
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling

from te_fast.attention.block import Block
from te_fast.attention.dot_product import DotProductAttention
from te_fast.attention.rope import (
    Heads,
    LastWaves,
    Waves,
    rotate,
    signed_waves,
    split_rotated,
)
from te_fast.attention.simple import SimpleCall, attend_product, simple_scores
from te_fast.attention.tail import Tail
from te_fast.convert.gated import GatedMLP
from te_fast.convert.known import EPSILONS, FLASH, Attention, Decoder, Norm, implementation_of
from te_fast.convert.packing import Place
from te_fast.layers.layernorm_linear import LayerNormLinear
from te_fast.layers.layernorm_mlp import LayerNormMLP
from te_fast.layers.linear import Linear
from te_fast.layers.norm import LayerNorm, RMSNorm
from te_fast.layers.program import ProgramLayer
from te_fast.runtime import native
from te_fast.runtime.compiling import is_exporting
from te_fast.runtime.module_hooks import has_hooks

Tie = tuple[str, torch.nn.Module, str]
#: Attributes of norms and attention whose values te_fast's layers take at the conversion.
CONSTANTS = (*EPSILONS, "head_dim", "scaling", "attention_dropout")
#: A module, and its children that a conversion depends on.
Watched = tuple[torch.nn.Module, Sequence[tuple[str, torch.nn.Module]]]


class Tied:
    """A layer of te_fast whose parameters are those of other modules.

    The layer is in no module's tree: states, optimizers and wrappers see only the modules that have the parameters.

    Parameters
    ----------
    layer : torch.nn.Module
        The layer, made on the meta device.
    ties : sequence of tuple
        Name in the layer, the module that has the parameter, its name in the module.
    """

    def __init__(self, layer: Any, ties: Sequence[Tie]) -> None:
        self.layer = layer
        self.ties = list(ties)
        modules = {id(module): module for _, module, _ in ties}.values()
        self._missing = [
            (module, theirs)
            for module in modules
            for theirs, parameter in module._parameters.items()
            if parameter is None
        ]
        if isinstance(layer, ProgramLayer):
            layer.note_ties({name: (module, theirs) for name, module, theirs in ties})
        self.refresh()

    def fits(self) -> bool:
        """Tell whether the modules have parameters where they had some, and nowhere else.

        Pruning and parametrisations take a parameter away.
        """
        has_all = all(module._parameters.get(theirs) is not None for _, module, theirs in self.ties)
        return has_all and self._has_no_others()

    fits._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _has_no_others(self) -> bool:
        # A loop is faster here than all(), and this runs in every call.
        for module, theirs in self._missing:  # noqa: SIM110
            if module._parameters.get(theirs) is not None:
                return False
        return True

    def refresh(self) -> bool:
        """Take the modules' parameters again if they have changed: sharding replaces them around every call.

        Returns
        -------
        bool
            As :meth:`fits`. If it is false, the layer computes something else than the modules.
        """
        if is_compiling():
            return self.fits()
        own = self.layer._parameters
        for name, module, theirs in self.ties:
            parameter = module._parameters.get(theirs)
            if own[name] is not parameter:
                if parameter is None:
                    return False
                if isinstance(parameter, torch.nn.Parameter):
                    setattr(self.layer, name, parameter)
                else:  # torch.func.functional_call puts tensors in the parameters' places
                    own[name] = parameter
        return self._has_no_others()

    def __call__(self, x: torch.Tensor) -> Any:
        """Call the layer, which has the modules' parameters since the last :meth:`refresh`."""
        # Hooks of all modules belong to calls of the model's modules, and this layer is none of them.
        if is_compiling() or native.are_called_plainly():
            return self.layer(x)
        return self.layer.forward(x)


def _options(weight: torch.Tensor, *, bias: bool) -> dict[str, Any]:
    return {"device": "meta", "params_dtype": weight.dtype, "bias": bias}


def _tied(own: str, module: torch.nn.Module, prefix: str = "") -> list[Tie]:
    """Return the ties of a weight and, if there is one, its bias."""
    kinds = ("weight",) if module._parameters.get("bias") is None else ("weight", "bias")
    return [(f"{own}{kind}", module, f"{prefix}{kind}") for kind in kinds]


def _norm_options(norm: Norm) -> dict[str, Any]:
    return {
        "eps": norm.eps,
        "normalization": norm.kind,
        "zero_centered_gamma": norm.zero_centered,
    }


class Forward:
    """A forward that replaces a module's own."""

    #: The forward's name in reports.
    what = ""

    def packed(self) -> list[list[Place]]:
        """Return groups of parameters that are read as one tensor if they are adjacent in memory."""
        return []

    def layers(self) -> dict[str, Tied]:
        """Return te_fast's layers by their names within the module."""
        raise NotImplementedError

    def inner_layers(self) -> list[torch.nn.Module]:
        """Return te_fast's layers, for what looks for all layers of a model."""
        return [tied.layer for tied in self.layers().values()]

    @property
    def __code__(self) -> types.CodeType:
        """Return the code of the call; ``torch.export`` reads it from every forward, to tell where that is."""
        return type(self).__call__.__code__


class OwnedForward(Forward):
    """A forward that refers to its module, and in a copy to the copied module."""

    _owner: weakref.ref[Any]
    #: Modules, names of attributes, and their values at the conversion.
    _constants: Sequence[tuple[torch.nn.Module, str, Any]] = ()

    def _watched(self) -> Sequence[Watched]:
        """Return the modules that the conversion found."""
        raise NotImplementedError

    def _note_constants(self, modules: Sequence[torch.nn.Module]) -> None:
        """Note the attributes of modules whose values are in te_fast's layers."""
        self._constants = [
            (module, name, getattr(module, name))
            for module in modules
            for name in CONSTANTS
            if hasattr(module, name)
        ]

    def _is_current(self) -> bool:
        """Tell whether te_fast's layers compute what the modules would.

        Modules, parameters and constants must be those of the conversion, and the modules' calls run nothing else.
        """
        for module, name, value in self._constants:
            if getattr(module, name) != value:
                return False
        if not is_compiling():
            for tied in self.layers().values():
                if not tied.refresh():
                    return False
            return (
                native.are_as_found(self._watched())
                and native.are_called_plainly()  # no hooks of all modules
                and not self._has_other_forwards()
            )
        for owner, known in self._watched():
            children = owner._modules
            for name, module in known:
                if children.get(name) is not module:
                    return False
        return not self._is_changed()

    def _has_other_forwards(self) -> bool:
        """Tell whether a wrapper has replaced the forward of one of the modules."""
        for _, known in self._watched():
            for _, module in known:
                own = module.__dict__
                if "forward" in own and not isinstance(own["forward"], Forward):
                    return True
        return False

    def _is_changed(self) -> bool:
        """Tell whether modules have hooks, other forwards or other parameters.

        A trace sees no later ones, as with torch's own modules.
        """
        hooks = any(has_hooks(module) for _, known in self._watched() for _, module in known)
        fits = all(tied.fits() for tied in self.layers().values())
        return hooks or self._has_other_forwards() or not fits

    _is_changed._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """Store the module itself, since weak references are not copied."""
        return self.__dict__ | {"_owner": self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Refer to the copy's own module."""
        self.__dict__.update(state | {"_owner": weakref.ref(state["_owner"])})


class LinearForward(OwnedForward):
    """A ``torch.nn.Linear`` by :class:`te_fast.pytorch.Linear`.

    A module whose parameters have been pruned or parametrised runs its own forward.
    """

    what = "linear layer"

    def __init__(self, module: torch.nn.Linear, name: str) -> None:
        self._owner = weakref.ref(module)
        sizes = module.in_features, module.out_features
        options = _options(module.weight, bias=module.bias is not None)
        self.tied = Tied(Linear(*sizes, name=name, **options), _tied("", module))

    def layers(self) -> dict[str, Tied]:
        """Return the layer."""
        return {"": self.tied}

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        if not self.tied.refresh():
            owner: Any = self._owner()
            return type(owner).forward(owner, input)
        y: torch.Tensor = self.tied(input)
        return y


class NormForward(OwnedForward):
    """A norm by itself. Compiled code runs the module's own, which a compiler joins with its neighbours."""

    what = "norm"

    def __init__(self, norm: Norm, module: torch.nn.Module) -> None:
        self._owner = weakref.ref(module)
        self._note_constants([module])
        weight: Any = module._parameters["weight"]
        kind = LayerNorm if norm.kind == "LayerNorm" else RMSNorm
        options: dict[str, Any] = {"device": "meta", "dtype": weight.dtype}
        layer = kind(
            weight.shape[0], eps=norm.eps, zero_centered_gamma=norm.zero_centered, **options
        )
        self.tied = Tied(layer, _tied("", module))

    def layers(self) -> dict[str, Tied]:
        """Return nothing: norms by themselves have no scales."""
        return {}

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the norm."""
        owner: Any = self._owner()
        x = hidden_states
        if (
            is_compiling()
            or x.dtype != owner.weight.dtype
            or x.dtype is torch.float64
            or x.is_meta  # torch has no autocast there, and the norm's own forward computes shapes
            or torch.is_autocast_enabled(x.device.type)
            or any([getattr(module, name) != value for module, name, value in self._constants])
            or not self.tied.refresh()
        ):
            return type(owner).forward(owner, x)
        y: torch.Tensor = self.tied(x)
        return y


def norm_and_linear(
    norm: Norm, module: torch.nn.Module, linear: torch.nn.Linear, name: str
) -> Tied:
    """Return a norm and the linear layer behind it as one layer."""
    options = _options(linear.weight, bias=linear.bias is not None) | _norm_options(norm)
    layer = LayerNormLinear(linear.in_features, linear.out_features, name=name, **options)
    return Tied(layer, [*_tied("layer_norm_", module), *_tied("", linear)])


def norm_and_mlp(
    norm: Norm,
    module: torch.nn.Module,
    linears: tuple[torch.nn.Linear, torch.nn.Linear],
    activation: str,
    name: str,
) -> Tied:
    """Return a norm and two linear layers with an activation between as one layer."""
    first, second = linears
    options = _options(first.weight, bias=first.bias is not None) | _norm_options(norm)
    sizes = first.in_features, first.out_features
    layer = LayerNormMLP(*sizes, activation=activation, name=name, **options)
    ties = [*_tied("layer_norm_", module), *_tied("fc1_", first), *_tied("fc2_", second)]
    return Tied(layer, ties)


class SequentialForward(OwnedForward):
    """A ``torch.nn.Sequential``, with norms and the linear layers behind them as one.

    Parameters
    ----------
    module : torch.nn.Sequential
        The module.
    fused : dict of int to tuple
        By the index of a norm: the fused layer, and the number of modules that it replaces.
    what : str
        Name in reports.
    """

    def __init__(
        self, module: torch.nn.Sequential, fused: dict[int, tuple[Tied, int]], what: str
    ) -> None:
        self._owner = weakref.ref(module)
        self.fused, self.what = fused, what
        self._known = list(module._modules.items())
        inside = [range(at, at + count) for at, (_, count) in fused.items()]
        self._fused = [self._known[place] for places in inside for place in places]
        self._note_constants([self._known[at][1] for at in fused])

    def _watched(self) -> Sequence[Watched]:
        owner: Any = self._owner()
        return [(owner, self._fused)]

    def layers(self) -> dict[str, Tied]:
        """Return the fused layers by the names of their norms."""
        return {self._known[place][0]: tied for place, (tied, _) in self.fused.items()}

    def __call__(self, input: torch.Tensor) -> Any:
        """Run the modules, one by one in FP64, and if a module was changed since the conversion."""
        owner: Any = self._owner()
        if (
            not isinstance(input, torch.Tensor)
            or input.dtype is torch.float64
            or list(owner._modules.items()) != self._known
            or not self._is_current()
        ):
            return type(owner).forward(owner, input)
        place, x = 0, input
        while place < len(self._known):
            tied, count = self.fused.get(place, (None, 1))
            x = self._known[place][1](x) if tied is None else tied(x)
            place += count
        return x


_last_waves = LastWaves()


def _waves_of(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and signed sines as they broadcast to ``(batch, tokens, heads, channels)``, in FP32."""
    return _last_waves.of((cos, sin), (), lambda: signed_waves(cos.unsqueeze(2), sin.unsqueeze(2)))


def _attention_parts(found: Attention, norm: Norm, first: torch.nn.Module, name: str) -> Any:
    """Return norm and projections as one layer, attention, and the last projection."""
    module = found.module
    parts = {"query": found.heads, "key": found.groups, "value": found.groups}
    sizes = {part: heads * found.channels for part, heads in parts.items()}
    options = _options(module.q_proj.weight, bias=found.has_bias) | _norm_options(norm)
    hidden = module.q_proj.in_features
    qkv = LayerNormLinear(
        hidden, sum(sizes.values()), parameters_split=sizes, name=f"{name}.qkv", **options
    )
    ties = _tied("layer_norm_", first)
    for part, letter in zip(sizes, "qkv", strict=True):
        ties += _tied(f"{part}_", getattr(module, f"{letter}_proj"))
    core = DotProductAttention(
        found.heads,
        found.channels,
        num_gqa_groups=found.groups,
        qkv_format="bshd",
        softmax_scale=found.scale,
        attention_dropout=float(getattr(module, "attention_dropout", 0.0) or 0.0),
        name=f"{name}.core_attention",
    )
    out = module.o_proj
    last = Linear(
        out.in_features,
        out.out_features,
        name=f"{name}.o_proj",
        **_options(out.weight, bias=out.bias is not None),
    )
    return Tied(qkv, ties), core, Tied(last, _tied("", out))


class DecoderForward(OwnedForward):
    """A decoder layer like Llama's: norm and projections, attention, projection, norm and feed-forward block.

    Other calls run the layer's own forward: calls with key-value caches, lengths of packed sequences, or weights to
    return.

    Parameters
    ----------
    found : Decoder
        The layer.
    name : str
        Its name.
    """

    def __init__(self, found: Decoder, name: str) -> None:
        layer, attention = found.layer, found.attention
        self._owner = weakref.ref(layer)
        self.is_tuple = False
        self.what = "decoder layer" if found.activation else "attention of a decoder layer"
        self._heads = Heads(attention.heads, attention.groups, attention.channels)
        self._has_head_norms = attention.head_norms is not None
        first = layer.input_layernorm
        parts = _attention_parts(attention, found.norms[0], first, name)
        self.qkv, self.core, self.out = parts
        self.mlp: Tied | None = None
        self._tail: Tail | None = None
        self._block: Block | None = None
        self._found = [(attention.module, list(attention.module._modules.items()))]
        own = [("input_layernorm", first), ("self_attn", attention.module)]
        if found.activation is not None:
            mlp, second = layer.mlp, layer.post_attention_layernorm
            self.mlp = _gated_mlp(mlp, second, found, f"{name}.mlp")
            self._found.append((mlp, list(mlp._modules.items())))
            own += [("post_attention_layernorm", second), ("mlp", mlp)]
        self._found.append((layer, own))
        self._note_constants([attention.module, *[part for name, part in own if "norm" in name]])
        self._find_tail()

    def _watched(self) -> Sequence[Watched]:
        return self._found

    def __getstate__(self) -> dict[str, Any]:
        """Leave native programs out; the copy makes its own."""
        return super().__getstate__() | {"_tail": None, "_block": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Refer to the copy's own module, and make the native programs."""
        super().__setstate__(state)
        self._find_tail()

    def packed(self) -> list[list[Place]]:
        """Return weights and biases of queries, keys and values, and of both halves of the feed-forward block."""
        groups = []
        named: list[tuple[Tied, tuple[str, ...]]] = [(self.qkv, ("query_", "key_", "value_"))]
        if self.mlp is not None:
            named.append((self.mlp, ("gate_", "up_")))
        for tied, parts in named:
            places = {own: (module, theirs) for own, module, theirs in tied.ties}
            for kind in ("weight", "bias"):
                found = [places[f"{part}{kind}"] for part in parts if f"{part}{kind}" in places]
                groups += [found] if len(found) == len(parts) else []
        return groups

    def layers(self) -> dict[str, Tied]:
        """Return norm and projections, the last projection, and norm and feed-forward block."""
        found = {"qkv": self.qkv, "out": self.out}
        return found if self.mlp is None else found | {"feed_forward": self.mlp}

    def _is_for(self, hidden: torch.Tensor, given: dict[str, Any], places: tuple[Any, ...]) -> bool:
        """Tell whether a call is one of training: it has a mask and angles, and no cache and no weights to return."""
        mask, angles = given.get("attention_mask"), given.get("position_embeddings")
        if places or not isinstance(angles, tuple) or hidden.dtype is torch.float64:
            return False
        if mask is None:
            if not self._is_causal(hidden, given):
                return False
        elif not isinstance(mask, torch.Tensor) or mask.dim() != 4:
            return False
        for name in ("past_key_value", "cu_seq_lens_q", "head_mask"):
            if given.get(name) is not None:
                return False
        cache = given.get("past_key_values")
        if cache is not None and (self.is_tuple or not self._is_empty(cache)):
            return False
        if given.get("output_attentions") or given.get("is_causal") is False:
            return False
        return self._is_current()

    def _is_causal(self, hidden: torch.Tensor, given: dict[str, Any]) -> bool:
        """Tell whether the layer's own attention would hide later tokens without a mask, and no others.

        Attention by flash_attn takes windows and lengths of packed sequences from other arguments.
        """
        owner: Any = self._owner()
        attention = owner.self_attn
        if getattr(attention, "is_causal", True) is not True:
            return False
        how = implementation_of(attention)
        if not how.startswith(FLASH):
            return how == "sdpa"
        config = getattr(attention, "config", None)
        window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        if hidden.shape[0] == 1 and given.get("position_ids") is not None:
            return False
        return window is None or hidden.shape[1] <= window

    def _is_empty(self, cache: Any) -> bool:
        """Tell whether a cache is empty and returns only the new keys and values, as in Transformers' first call."""
        owner: Any = self._owner()
        if type(cache).__name__ != "DynamicCache":
            return False
        return bool(cache.get_seq_length(owner.self_attn.layer_idx) == 0)

    def __call__(self, hidden_states: torch.Tensor, *places: Any, **given: Any) -> Any:
        """Run te_fast's layers, or the layer's own forward if te_fast's layers do not support the call."""
        owner: Any = self._owner()
        mask = given.get("attention_mask")
        # CausalForward passes an empty mask where attention hides later tokens by itself.
        if isinstance(mask, torch.Tensor) and mask.numel() == 0:
            given["attention_mask"] = None
        if not self._is_for(hidden_states, given, places):
            return type(owner).forward(owner, hidden_states, *places, **given)
        y = self.run(hidden_states, **given)
        return (y,) if self.is_tuple else y

    def run(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Run te_fast's layers.

        Parameters
        ----------
        hidden_states : torch.Tensor
            ``(batch, tokens, hidden)``.
        attention_mask : torch.Tensor, optional
            ``(batch, 1, tokens, tokens)``: bool, True where a query attends, or a bias of the scores.
        position_embeddings : tuple of torch.Tensor
            Cosines and sines, ``(1 or batch, tokens, channels)``.
        past_key_values : optional
            An empty cache, which takes keys and values.
        """
        owner: Any = self._owner()
        waves = _waves_of(*position_embeddings)
        tail = self._tail_for(hidden_states)
        if tail is not None and attention_mask is None and past_key_values is None:
            y = self._in_one_node(tail, hidden_states, waves)
            if y is not None:
                return y
        in_graph = self._tail_in_graph(hidden_states) if is_compiling() else None
        mixed = self.qkv(hidden_states)
        context = self._attended(mixed, waves, attention_mask, past_key_values)
        if tail is not None:
            return tail(context, hidden_states, None)
        if in_graph is not None:
            behind: Any = self._tail
            return behind.call_in_graph(in_graph, context, hidden_states, None)
        h = hidden_states + self.out(context)
        if self.mlp is not None:
            return h + self.mlp(h)
        return h + owner.mlp(owner.post_attention_layernorm(h))

    def _tail_for(self, hidden: torch.Tensor) -> Tail | None:
        """Return the program of the part behind attention; None if it does not support a call."""
        if self.mlp is None or is_compiling() or hidden.is_meta:
            return None
        if torch.is_autocast_enabled(hidden.device.type):
            return None
        tail = self._find_tail()
        return tail if tail is not None and tail.takes(hidden) else None

    def _find_tail(self) -> Tail | None:
        """Return the program of the part behind attention, which belongs to the layers as they are.

        Every layer has it from the beginning: one without would not fit the graph of another.
        """
        if self.mlp is None:
            return None
        proj, mlp = self.out.layer, self.mlp.layer
        if not mlp.has_plain_halves():
            return None
        if self._tail is None or not self._tail.is_of(proj, mlp):
            self._tail = Tail(proj, mlp, mlp.name)
        return self._tail

    def _may_have_tail_in_graphs(self) -> bool:
        """Tell whether graphs may hold the part behind attention as one program, which a trace finds as ``_tail``.

        Runs once in a trace, on the real layer.
        """
        tail = None if is_exporting() else self._find_tail()
        return tail is not None and tail.has_plain_layers()

    _may_have_tail_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _tail_in_graph(self, hidden: torch.Tensor) -> Any:
        """Return the parameters of the part behind attention in a trace; None if its layers are operators each."""
        if (
            self.mlp is None
            or torch.is_autocast_enabled(hidden.device.type)
            or not self._may_have_tail_in_graphs()
        ):
            return None
        tail: Any = self._tail
        return tail.parameters_in_graph((self.out.layer, self.mlp.layer), hidden)

    def _in_one_node(self, tail: Tail, hidden: torch.Tensor, waves: Waves) -> torch.Tensor | None:
        """Return the layer's result; None if the layers must be called one by one."""
        scores = None if self._has_head_norms else simple_scores(self._core())
        if scores is None:
            return None
        call = SimpleCall(self.qkv.layer, (waves, waves), self._heads, "bshd", scores, False)
        if not Block.takes(call.first, hidden, call.waves):
            return None
        if self._block is None or not self._block.is_of(call.first, tail):
            self._block = Block(call.first, tail)
        between = self._block.attending(hidden, call)
        return None if between is None else self._block(hidden, between, None)

    def _core(self) -> DotProductAttention:
        """Return attention itself, in the module's mode."""
        owner: Any = self._owner()
        self.core.__dict__["training"] = owner.training
        return self.core

    def _attended(
        self, mixed: torch.Tensor, waves: Waves, mask: torch.Tensor | None, cache: Any
    ) -> torch.Tensor:
        """Return the heads of attention, merged."""
        owner: Any = self._owner()
        core, heads = self._core(), self._heads
        note = None
        if cache is not None:
            note = partial(cache.update, layer_idx=owner.self_attn.layer_idx)
        scores = None
        if mask is None and not self._has_head_norms and not is_compiling():
            scores = simple_scores(core)
        if scores is not None:
            how: dict[str, Any] = {"in_place": True, "note": note}
            return attend_product(mixed, (waves, waves), heads, "bshd", scores, **how)
        if self._has_head_norms:
            q, k, v = heads.split(mixed)
            q, k = owner.self_attn.q_norm(q), owner.self_attn.k_norm(k)
            q, k = (rotate(t, waves, interleaved=False) for t in (q, k))
        else:
            q, k, v = split_rotated(mixed, (waves, waves), heads, interleaved=False, in_place=True)
        if note is not None:
            k, v = (t.transpose(1, 2) for t in note(k.transpose(1, 2), v.transpose(1, 2)))
        return self._attend(q, k, v, mask)

    def _attend(self, q: Any, k: Any, v: Any, mask: torch.Tensor | None) -> torch.Tensor:
        core = self.core
        if mask is None:
            return core(q, k, v)
        mask = mask[..., : k.shape[1]]
        if mask.dtype == torch.bool:
            return core(q, k, v, mask.logical_not(), attn_mask_type="arbitrary")
        bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": mask}
        return core(q, k, v, attn_mask_type="no_mask", **bias)


def _gated_mlp(mlp: Any, norm: torch.nn.Module, found: Decoder, name: str) -> Tied:
    options = _options(mlp.gate_proj.weight, bias=mlp.gate_proj.bias is not None)
    options |= _norm_options(found.norms[1])
    sizes = mlp.gate_proj.in_features, mlp.gate_proj.out_features
    layer = GatedMLP(*sizes, activation=found.activation or "", name=name, **options)
    ties = _tied("layer_norm_", norm)
    for own, part in (("gate_", "gate_proj"), ("up_", "up_proj"), ("fc2_", "down_proj")):
        ties += _tied(own, getattr(mlp, part))
    return Tied(layer, ties)
