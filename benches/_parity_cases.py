"""Modules that `parity.py` runs in both libraries: every layer, operation, function of experts and optimizer.

A case makes a module from classes and functions that both libraries have under the same names. The module takes
``(rows, COLS)`` and returns one tensor or several.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

__all__ = ["COLS", "Given", "Library", "Make", "cases"]

COLS = 256
EXPERTS, TOPK = 4, 2
HEADS, BATCH = 4, 2
ACTIVATIONS = [
    "gelu",
    "geglu",
    "glu",
    "qgelu",
    "qgeglu",
    "relu",
    "reglu",
    "srelu",
    "sreglu",
    "silu",
    "swiglu",
    "clamped_swiglu",
]
ACTIVATION_OPS = (
    *("GELU", "QGELU", "ReLU", "SReLU", "SiLU"),
    *("GEGLU", "GLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU", "ClampedSwiGLU", "SiTUGLU"),
)
SCALED_OPS = ("ScaledSwiGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU")


@dataclass(frozen=True)
class Library:
    """One of the two libraries, by Transformer Engine's names."""

    pytorch: Any
    recipe: Any

    def submodule(self, name: str) -> Any:
        """Return a module within ``pytorch``."""
        return importlib.import_module(f"{self.pytorch.__name__}.{name}")


@dataclass(frozen=True)
class Given:
    """The case of a module; ``recipe`` is the recipe of the region around its calls."""

    dtype: torch.dtype
    device: torch.device
    recipe: Any

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of layers."""
        return {"params_dtype": self.dtype, "device": self.device}


Make = Callable[[Library, Given], torch.nn.Module]


def layer(
    kind: str, sizes: tuple[int, ...], extra: dict[str, Any], library: Library, given: Given
) -> torch.nn.Module:
    """Make a layer or a norm."""
    made: torch.nn.Module = getattr(library.pytorch, kind)(*sizes, **extra, **given.keywords)
    return made


def layers() -> Iterator[tuple[str, Make]]:
    """Yield layers and norms by name."""
    sizes = (COLS, 2 * COLS)
    yield "Linear", partial(layer, "Linear", sizes, {})
    yield "Linear, no bias", partial(layer, "Linear", sizes, {"bias": False})
    for norm in ("LayerNorm", "RMSNorm"):
        yield norm, partial(layer, norm, (COLS,), {})
        extra = {"normalization": norm}
        yield f"LayerNormLinear, {norm}", partial(layer, "LayerNormLinear", sizes, extra)
    for activation in ACTIVATIONS:
        made = partial(layer, "LayerNormMLP", sizes, {"activation": activation})
        yield f"LayerNormMLP, {activation}", made


class Recomputed(torch.nn.Module):
    """A layer whose activations are computed again in backward."""

    def __init__(self, library: Library, given: Given) -> None:
        super().__init__()
        self.checkpoint = library.pytorch.checkpoint
        self.inner = library.pytorch.LayerNormMLP(COLS, COLS, **given.keywords)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer under recomputation."""
        result: torch.Tensor = self.checkpoint(self.inner, x)
        return result


class HandedOn(torch.nn.Module):
    """Two layers, with a quantised tensor between them where the scale is one."""

    def __init__(self, library: Library, given: Given) -> None:
        super().__init__()
        self.is_quantized = given.recipe is not None and not given.recipe.float8_block_scaling()
        self.first = library.pytorch.Linear(COLS, COLS, **given.keywords)
        self.second = library.pytorch.Linear(COLS, COLS, **given.keywords)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply twice."""
        result: torch.Tensor = self.second(self.first(x, fp8_output=self.is_quantized))
        return result


def quantized(make: Make, library: Library, given: Given) -> torch.nn.Module:
    """Make a module whose weights are quantised tensors, where there is a recipe for them."""
    region: AbstractContextManager[Any] = nullcontext()
    if given.recipe is not None:
        region = library.pytorch.quantized_model_init(recipe=given.recipe)
    with region:
        return make(library, given)


def quantized_values() -> Iterator[tuple[str, Make]]:
    """Yield layers with FP8 weights, and layers that hand FP8 tensors on, by name."""
    for kind in ("Linear", "LayerNormLinear", "LayerNormMLP"):
        made = partial(layer, kind, (COLS, 2 * COLS), {})
        yield f"FP8 weights: {kind}", partial(quantized, made)
    yield "FP8 weights: ops.Linear", partial(quantized, partial(chain, (LINEAR,)))
    yield "FP8 weights: GroupedLinear", partial(quantized, partial(Grouped, padded=False))
    yield "FP8 between layers: Linear, Linear", HandedOn
    yield "LayerNormMLP, recomputed", Recomputed


class Op(NamedTuple):
    """An operation: its class, its arguments, and whether it has parameters."""

    kind: str
    arguments: tuple[Any, ...] = ()
    has_parameters: bool = False


def chain(parts: tuple[Op, ...], library: Library, given: Given) -> torch.nn.Module:
    """Make a ``Sequential`` of operations."""
    ops = library.pytorch.ops
    keywords = {"dtype": given.dtype, "device": given.device}
    made = [
        getattr(ops, part.kind)(*part.arguments, **(keywords if part.has_parameters else {}))
        for part in parts
    ]
    sequential: torch.nn.Module = ops.Sequential(*made)
    return sequential


class WithExtras(torch.nn.Module):
    """A chain with extra inputs, which are made from the input."""

    def __init__(self, inner: torch.nn.Module, extras: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        self.inner, self.extras = inner, extras

    def forward(self, x: torch.Tensor) -> Any:
        """Run the chain."""
        return self.inner(x, *self.extras(x))


def with_extras(
    parts: tuple[Op, ...],
    extras: Callable[..., tuple[Any, ...]],
    library: Library,
    given: Given,
) -> torch.nn.Module:
    """Make a chain with extra inputs."""
    return WithExtras(chain(parts, library, given), extras)


def probabilities(x: torch.Tensor) -> tuple[torch.Tensor]:
    """Return a number for each row, which gets a gradient."""
    return (x[:, 0].float().sigmoid(),)


def splits(x: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the rows of each expert; one expert has none."""
    rows = x.shape[0]
    return (torch.tensor([rows // 2, 0, rows // 4, rows // 4], device=x.device),)


def expert_extras(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the arguments of an experts' feed-forward block beside its rows."""
    return (*splits(x), *probabilities(x), *splits(x))


LINEAR = Op("Linear", (COLS, COLS), has_parameters=True)
SINGLE_OPS = (
    LINEAR,
    Op("BasicLinear", (COLS, COLS), has_parameters=True),
    Op("Bias", (COLS,), has_parameters=True),
    Op("LayerNorm", (COLS,), has_parameters=True),
    Op("RMSNorm", (COLS,), has_parameters=True),
    Op("L2Normalization"),
    Op("ConstantScale", (0.5,)),
    Op("Identity"),
    Op("Reshape", ((-1, COLS // 2),)),
    Op("Dropout", (0.0,)),
    Op("MakeExtraOutput"),
    *map(Op, ACTIVATION_OPS),
)
GROUPED = Op("GroupedLinear", (EXPERTS, COLS, COLS), has_parameters=True)


def ops() -> Iterator[tuple[str, Make]]:
    """Yield fusible operations, alone and in chains, by name."""
    for op in SINGLE_OPS:
        yield f"ops.{op.kind}", partial(chain, (op,))
    for name in ACTIVATION_OPS:
        yield f"ops: Linear, {name}", partial(chain, (LINEAR, Op(name)))
    yield "ops: Quantize, Linear", partial(chain, (Op("Quantize", (True, True)), LINEAR))
    norm = Op("LayerNorm", (COLS,), has_parameters=True)
    yield "ops: LayerNorm, Linear, GELU, Linear", partial(chain, (norm, LINEAR, Op("GELU"), LINEAR))
    residual = (LINEAR, Op("AddExtraInput"))
    yield "ops: Linear, AddExtraInput", partial(with_extras, residual, lambda x: (x,))
    for name in SCALED_OPS:
        yield f"ops.{name}", partial(with_extras, (Op(name),), probabilities)
    yield "ops.GroupedLinear", partial(with_extras, (GROUPED,), splits)
    second = Op("GroupedLinear", (EXPERTS, COLS // 2, COLS), has_parameters=True)
    experts = (GROUPED, Op("ScaledSwiGLU"), second)
    name = "ops: GroupedLinear, ScaledSwiGLU, GroupedLinear"
    yield name, partial(with_extras, experts, expert_extras)


class Attention(torch.nn.Module):
    """Attention whose queries, keys and values are one input."""

    def __init__(self, mask: str, library: Library, given: Given, *, softcap: float = 0.0) -> None:
        super().__init__()
        del given
        options = {"attn_mask_type": mask, "attention_dropout": 0.0, "softcap": softcap}
        self.inner = library.pytorch.DotProductAttention(HEADS, COLS // HEADS, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend within sequences of half the rows."""
        heads = x.view(-1, BATCH, HEADS, COLS // HEADS)
        result: torch.Tensor = self.inner(heads, 0.5 * heads, 2 * heads)
        return result.reshape(x.shape)


class Sequences(torch.nn.Module):
    """A layer of sequences; the rows are two sequences."""

    def __init__(
        self,
        kind: str,
        arguments: dict[str, Any],
        library: Library,
        given: Given,
        *,
        rotated: bool,
    ) -> None:
        super().__init__()
        te = library.pytorch
        self.embedding = te.RotaryPositionEmbedding(COLS // HEADS) if rotated else None
        sizes = (COLS, COLS, HEADS) if kind == "TransformerLayer" else (COLS, HEADS)
        self.inner = getattr(te, kind)(*sizes, attention_dropout=0.0, **arguments, **given.keywords)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer, with rotated queries and keys where asked."""
        sequences = x.view(-1, BATCH, COLS)
        keywords = {}
        if self.embedding is not None:
            keywords["rotary_pos_emb"] = self.embedding(sequences.shape[0]).to(x.device)
        result: torch.Tensor = self.inner(sequences, **keywords)
        return result.reshape(x.shape)


def attention() -> Iterator[tuple[str, Make]]:
    """Yield attention and whole transformer layers by name."""
    for mask in ("no_mask", "causal"):
        yield f"DotProductAttention, {mask}", partial(Attention, mask)
    yield "DotProductAttention, capped", partial(Attention, "causal", softcap=2.0)
    normed = {"input_layernorm": True}
    yield "MultiheadAttention", partial(Sequences, "MultiheadAttention", {}, rotated=False)
    yield (
        "MultiheadAttention, norm",
        partial(Sequences, "MultiheadAttention", normed, rotated=False),
    )
    plain = {"hidden_dropout": 0.0}
    yield "TransformerLayer", partial(Sequences, "TransformerLayer", plain, rotated=False)
    llama = {
        **plain,
        "num_gqa_groups": HEADS // 2,
        "bias": False,
        "normalization": "RMSNorm",
        "activation": "swiglu",
    }
    yield (
        "TransformerLayer, as Llama's",
        partial(Sequences, "TransformerLayer", llama, rotated=True),
    )


class Grouped(torch.nn.Module):
    """`GroupedLinear` over padded rows, whose padding is removed from the result."""

    def __init__(self, library: Library, given: Given, *, padded: bool) -> None:
        super().__init__()
        te = library.pytorch
        self.inner = te.GroupedLinear(EXPERTS, COLS, COLS, **given.keywords)
        self.padding = te.Fp8Padding(EXPERTS) if padded else None
        self.unpadding = te.Fp8Unpadding(EXPERTS) if padded else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of each expert by its weight."""
        counts: list[int] = splits(x)[0].tolist()
        if self.padding is None or self.unpadding is None:
            result: torch.Tensor = self.inner(x, counts)
            return result
        uneven = [counts[0] - 3, counts[1] + 1, counts[2] + 2, counts[3]]
        rows, padded = self.padding(x, uneven)
        unpadded: torch.Tensor = self.unpadding(self.inner(rows, padded), uneven)
        return unpadded


def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send each token to two experts: probabilities and experts of each, and the map of all."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(x.shape[0], EXPERTS, generator=generator).to(x.device)
    weights, experts = scores.topk(TOPK, dim=-1)
    routing = torch.zeros_like(scores, dtype=torch.int32).scatter_(1, experts, 1)
    return weights, experts, routing


class Routed(torch.nn.Module):
    """Tokens permuted to their experts and merged again."""

    def __init__(self, kind: str, library: Library, given: Given) -> None:
        super().__init__()
        del given
        self.te, self.kind = library.pytorch, kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Permute, pad or sort, and merge."""
        weights, experts, routing = route(x)
        if self.kind == "expert indices":
            chosen = experts.to(torch.int32)
            rows, order = self.te.moe_permute(x, chosen, chosen.numel(), map_type="index")
            return rows, self.te.moe_unpermute(rows, order, weights, map_type="index")
        probs = x[:, :EXPERTS].float().sigmoid() * routing
        merged = {"restore_shape": x.shape, "map_type": "mask"}
        if self.kind == "routing mask":
            rows, probs, order = self.te.moe_permute_with_probs(x, probs, routing, TOPK * len(x))
        else:
            rows, probs, order, merged["pad_offsets"], _ = self.te.moe_permute_and_pad_with_probs(
                x, probs, routing, routing.sum(dim=0), 16
            )
        weighted = rows * probs.unsqueeze(-1).to(rows.dtype)
        return rows, probs, self.te.moe_unpermute(weighted, order, **merged)


class Sorted(torch.nn.Module):
    """Chunks of rows in another order, without and with probabilities."""

    def __init__(self, library: Library, given: Given) -> None:
        super().__init__()
        del given
        self.te = library.pytorch

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sort twice."""
        (sizes,) = splits(x)
        order = torch.tensor([2, 0, 3, 1], device=x.device)
        rows = self.te.moe_sort_chunks_by_index(x, sizes, order)
        (probs,) = probabilities(x)
        return (rows, *self.te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order))


class Router(torch.nn.Module):
    """The functions of a router, whose logits are columns of the input."""

    def __init__(self, score: str, library: Library, given: Given) -> None:
        super().__init__()
        del given
        self.score, self.router = score, library.submodule("router")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Choose experts, and compute the loss that balances them."""
        logits = x[:, : 4 * EXPERTS].float()
        probs, chosen = self.router.fused_topk_with_score_function(
            logits,
            TOPK,
            use_pre_softmax=False,
            num_groups=None,
            group_topk=None,
            scaling_factor=None,
            score_function=self.score,
            expert_bias=None,
        )
        _, scores = self.router.fused_compute_score_for_moe_aux_loss(logits, TOPK, self.score)
        tokens = chosen.sum(dim=0)
        total, experts = len(x), logits.shape[1]
        loss = self.router.fused_moe_aux_loss(scores, tokens, total, experts, TOPK, 0.01)
        return probs, chosen, scores, loss


def experts() -> Iterator[tuple[str, Make]]:
    """Yield the parts of mixtures of experts, by name."""
    yield "GroupedLinear", partial(Grouped, padded=False)
    yield "GroupedLinear, padded", partial(Grouped, padded=True)
    for kind in ("expert indices", "routing mask", "routing mask, padded"):
        yield f"MoE permutation, {kind}", partial(Routed, kind)
    yield "MoE permutation, chunks", Sorted
    for score in ("softmax", "sigmoid"):
        yield f"MoE router, {score}", partial(Router, score)


class Loss(torch.nn.Module):
    """Cross entropy of the rows as logits."""

    def __init__(self, smoothing: float, library: Library, given: Given) -> None:
        super().__init__()
        del given
        self.smoothing, self.function = smoothing, library.pytorch.parallel_cross_entropy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token; Transformer Engine writes over the logits."""
        logits = (4 * x).view(-1, BATCH, COLS)
        targets = torch.arange(len(x), device=x.device).view(-1, BATCH) % COLS
        result: torch.Tensor = self.function(logits, targets, label_smoothing=self.smoothing)
        return result


class Stepped(torch.nn.Module):
    """A parameter after a step of an optimizer; its gradient is the input.

    The parameter of `FusedSGD` is in FP32, because Transformer Engine's `FusedSGD` silently skips BF16 parameters.
    """

    def __init__(self, kind: str, options: dict[str, Any], library: Library, given: Given) -> None:
        super().__init__()
        dtype = torch.float32 if kind == "FusedSGD" else given.dtype
        self.weight = torch.nn.Parameter(torch.zeros(COLS, dtype=dtype, device=given.device))
        self.optimizer: Any = None
        self.make = partial(getattr(library.submodule("optimizers"), kind), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Step; the first one makes the optimizer, when the parameter has its value."""
        if self.optimizer is None:
            self.optimizer = self.make([self.weight])
        self.weight.grad = x.detach()[0].to(self.weight.dtype, copy=True)
        self.optimizer.step()
        return self.weight.detach().clone()


def training() -> Iterator[tuple[str, Make]]:
    """Yield losses and optimizers by name."""
    yield "cross entropy", partial(Loss, 0.0)
    yield "cross entropy, smoothed", partial(Loss, 0.1)
    adam = {"lr": 1e-2, "weight_decay": 0.1}
    yield "FusedAdam", partial(Stepped, "FusedAdam", adam)
    masters = {**adam, "master_weights": True}
    yield "FusedAdam, master weights", partial(Stepped, "FusedAdam", masters)
    yield "FusedSGD", partial(Stepped, "FusedSGD", {"lr": 1e-2, "momentum": 0.9})


def cases() -> dict[str, Make]:
    """Return all modules by name; each function is wrapped in a module."""
    kinds = (layers(), quantized_values(), ops(), attention(), experts(), training())
    return {name: make for kind in kinds for name, make in kind}
