"""FP8 for models of other libraries, in one line.

From Python::

    print(te_fast.convert(model))

From the shell, to see what ``convert`` would do::

    python -m te_fast.convert --dry-run package.module:make_model
    python -m te_fast.convert --dry-run hf:path/of/a/configuration

The module itself is callable: ``te_fast.convert(...)`` is :func:`te_fast.convert.convert`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from te_fast.convert import known
from te_fast.convert import loss as of_loss
from te_fast.convert.experts import ExpertsForward, experts, is_experts, try_experts
from te_fast.convert.forwards import (
    DecoderForward,
    Forward,
    LinearForward,
    NormForward,
    SequentialForward,
    norm_and_linear,
    norm_and_mlp,
)
from te_fast.convert.known import Left, leave
from te_fast.convert.loss import causal_loss, has_causal_loss
from te_fast.convert.masks import CausalForward, makes_masks
from te_fast.convert.packing import pack
from te_fast.convert.rotary import RotaryForward, is_constant
from te_fast.convert.scales import converted as converted_modules
from te_fast.convert.scales import load_scaling_state, scaling_state
from te_fast.errors import ArgumentError, DtypeError, StateError, TeFastError
from te_fast.runtime.autocast import autocast, quantized_model_init

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Report", "convert", "load_scaling_state", "main", "scaling_state", "undo"]

#: Names of layers that compute logits: their rounding errors go straight into the loss.
HEADS = ("lm_head", "embed_out", "output", "score", "classifier", "logits", "head")
#: What is replaced in a model, and is nothing by itself.
PARTS = (CausalForward.what, RotaryForward.what, of_loss.WHAT)
#: The name of the model itself in messages.
ROOT = "the model"
_KEY = "forward"
_UNGATED = {torch.nn.ReLU: "relu", torch.nn.SiLU: "silu"}


@dataclass(frozen=True)
class Report:
    """A report of a conversion, or of a dry run.

    Attributes
    ----------
    converted : dict of str to str
        What became of each converted module, by name.
    left : dict of str to str
        Why modules were left as they are, by name.
    dry_run : bool
        Nothing was changed.
    unmatched : tuple of str
        Names in `exclude` that no module has, except the default ones.

    See Also
    --------
    convert : Returns one.

    Examples
    --------
    >>> import torch
    >>> import te_fast
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 64))
    >>> te_fast.convert(model, dry_run=True).converted
    {'': 'norm + linear layer', '1': 'linear layer'}
    """

    converted: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    unmatched: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the number of modules of each kind, and every reason with its first module."""
        counts = Counter(self.converted.values())
        title = "te_fast.convert would convert" if self.dry_run else "te_fast.convert converted"
        lines = [
            f"{title}: " + (", ".join(f"{n} x {what}" for what, n in counts.items()) or "nothing")
        ]
        grouped: dict[str, list[str]] = {}
        for name, why in self.left.items():
            shown = name or ROOT
            grouped.setdefault(why.replace(shown, "it"), []).append(shown)
        for why, names in grouped.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  left {names[0]}{others}: {why}")
        if self.unmatched:
            lines.append(f"  exclude names no module: {', '.join(self.unmatched)}")
        return "\n".join(lines)


class _Plan:
    """Forwards by module; made before anything of the model changes."""

    def __init__(self, model: torch.nn.Module, exclude: Sequence[str]) -> None:
        self.exclude = tuple(exclude)
        self.forwards: list[tuple[str, torch.nn.Module, Forward]] = []
        self.left: dict[str, str] = {}
        # A module that runs several times, or has several names, shares its parameters with no other module.
        self._uses = Counter(id(p) for m in model.modules() for p in m._parameters.values())
        # Scripted modules have their own forwards, which convert cannot replace.
        modules = [
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        for name, module in modules:
            if known.is_decoder(module):
                self._take(name, module, self._decoder)
            elif is_experts(module):
                self._take(name, module, self._experts)
            elif type(module) is torch.nn.Sequential:
                self._sequential(name, module)
        decoders = {
            module for _, module, forward in self.forwards if isinstance(forward, DecoderForward)
        }
        for name, module in modules:
            if isinstance(module, torch.nn.Linear):
                self._take(name, module, self._linear)
            elif makes_masks(module) and decoders.issuperset(module.layers):
                self._around_decoders(name, module)
        #: Language models whose loss is replaced.
        self.losses = [
            (name, module)
            for name, module in modules
            if decoders.intersection(module.modules())
            and has_causal_loss(module)
            and not self._is_excluded(f"{name}.{of_loss.NAME}")
        ]

    def _take(self, name: str, module: torch.nn.Module, make: Any) -> None:
        try:
            self.forwards.append((name, module, make(name or ROOT, module)))
        except Left as left:
            self.left[name] = str(left)

    def _is_excluded(self, name: str) -> bool:
        return any(part in self.exclude for part in (name, *name.split(".")))

    def _linear(self, name: str, module: Any) -> Forward:
        if self._is_excluded(name):
            leave(f"{name} is excluded")
        if self._uses[id(module.weight)] > 1:
            leave(f"{name} shares its weight with another module")
        return LinearForward(known.linear(module, name), name)

    def _decoder(self, name: str, module: Any) -> Forward:
        if self._is_excluded(name):
            leave(f"{name} is excluded")
        found = known.decoder(module, name)
        if any(self._uses[id(parameter)] > 1 for parameter in module.parameters()):
            leave(f"{name} shares parameters with another module")
        is_tuple = known.try_decoder(found, name, lambda: DecoderForward(found, name).run)
        forward = DecoderForward(found, name)
        forward.is_tuple = is_tuple
        if found.activation is None and not any(map(is_experts, module.mlp.modules())):
            self.left[f"{name}.mlp"] = found.reason
        return forward

    def _experts(self, name: str, module: Any) -> Forward:
        if self._is_excluded(name):
            leave(f"{name} is excluded")
        found = experts(module, name)
        if any(self._uses[id(parameter)] > 1 for parameter in module.parameters()):
            leave(f"{name} shares parameters with another module")
        try_experts(found, name, lambda: ExpertsForward(found, name).run)
        return ExpertsForward(found, name)

    def _around_decoders(self, name: str, module: Any) -> None:
        """Take what a model computes before and behind its decoder layers, all of which are converted."""
        if "forward" not in module.__dict__ and not self._is_excluded(name):
            self.forwards.append((name, module, CausalForward(module)))
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if self._is_excluded(path) or "forward" in child.__dict__:
                continue
            if key == "rotary_emb" and is_constant(child):
                self.forwards.append((path, child, RotaryForward(child)))
            elif key == "norm":
                self._take(path, child, self._norm)

    def _norm(self, name: str, module: Any) -> Forward:
        return NormForward(known.norm(module, name), module)

    def _sequential(self, name: str, module: torch.nn.Sequential) -> None:
        fused: dict[int, Any] = {}
        whats: list[str] = []
        items, place = list(module._modules.items()), 0
        while place < len(items):
            count = 1
            try:
                made, count, what = self._norm_and(
                    name or ROOT, [child for _, child in items[place:]]
                )
                fused[place] = (made, count)
                whats.append(what)
            except Left:
                pass
            place += count
        if not fused or "forward" in module.__dict__ or self._is_excluded(name):
            return
        what = " and ".join(dict.fromkeys(whats))
        self.forwards.append((name, module, SequentialForward(module, fused, what)))

    def _norm_and(self, name: str, modules: list[Any]) -> tuple[Any, int, str]:
        """Return a fused layer for the first modules of a list, and their number."""
        if len(modules) < 2:
            leave(f"{name} has no more")
        first = known.linear(modules[1], f"{name}[1]")
        found = known.norm(modules[0], f"{name}[0]")
        if (
            modules[0].weight.shape != (first.in_features,)
            or modules[0].weight.dtype != first.weight.dtype
            or first.weight.dtype is torch.float64  # as linear layers alone, not with norms
        ):
            leave(f"{name}[0] is of another size or type")
        activation = _UNGATED.get(type(modules[2])) if len(modules) > 3 else None
        if (
            len(modules) > 3
            and type(modules[2]) is torch.nn.GELU
            and modules[2].approximate == "tanh"
        ):
            activation = "gelu"
        if activation is not None:
            try:
                second = known.linear(modules[3], f"{name}[3]")
            except Left:
                second = None
            if second is not None and (
                second.in_features == first.out_features
                and second.out_features == first.in_features
                and (second.bias is None) == (first.bias is None)
            ):
                made = norm_and_mlp(found, modules[0], (first, second), activation, name)
                return made, 4, "norm + feed-forward block"
        return norm_and_linear(found, modules[0], first, name), 2, "norm + linear layer"

    def apply(self) -> None:
        """Change the model."""
        lays = [pack(group) for _, _, forward in self.forwards for group in forward.packed()]
        for lay in lays:
            if lay is not None:
                lay()
        for _, module, forward in self.forwards:
            module.__dict__[_KEY] = forward
        for _, module in self.losses:
            module.__dict__[of_loss.KEY] = causal_loss


def _expect_module(model: Any, function: str) -> None:
    if not isinstance(model, torch.nn.Module):
        message = f"{function}: expected a torch.nn.Module, got {type(model).__name__}"
        raise DtypeError(message)


def _names(exclude: Any) -> tuple[str, ...]:
    """Return the names to exclude.

    Raises
    ------
    DtypeError
        If they are no strings.
    """
    names = (exclude,) if isinstance(exclude, str) else exclude
    if not isinstance(names, Iterable):
        message = (
            f"convert: exclude must be an iterable of names, got {type(exclude).__name__}; "
            "pass () to exclude no module"
        )
        raise DtypeError(message)
    names = tuple(names)
    for name in names:
        if not isinstance(name, str):
            message = f"convert: exclude must contain names, got {type(name).__name__}"
            raise DtypeError(message)
    return names


def _unmatched(model: torch.nn.Module, exclude: tuple[str, ...]) -> tuple[str, ...]:
    """Return names that no module has; models have some of the default ones."""
    found = {part for name, _ in model.named_modules() for part in (name, *name.split("."))}
    found.add(of_loss.NAME)
    return tuple(name for name in exclude if name not in found and name not in HEADS)


def _refuse(model: Any) -> None:
    _expect_module(model, "convert")
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get(_KEY), Forward):
            shown = name or ROOT
            message = f"convert: {shown} has been converted already; te_fast.convert.undo(model) restores it"
            raise StateError(message)
        is_compiled = module.__dict__.get("_compiled_call_impl") is not None
        if is_compiled or type(module).__name__ == "OptimizedModule":
            message = f"convert: {name or ROOT} is compiled; convert first, and compile the result"
            raise StateError(message)


def convert(
    model: torch.nn.Module, *, exclude: Iterable[str] = HEADS, dry_run: bool = False
) -> Report:
    """Let a model's modules compute by te_fast's layers.

    Four kinds of modules get another ``forward``: decoder layers like those of Llama, Mistral and Qwen, experts like
    those of Mixtral, norms with the linear layers behind them in ``torch.nn.Sequential``, and all linear layers. Around
    decoder layers of Transformers' models, the mask, the angles, the last norm and the loss are replaced, too.
    Modules, parameters, names and states stay as they are. In ``te_fast.pytorch.autocast`` the modules compute in FP8,
    elsewhere in the parameters' type. ``convert`` recognises a block by its parts and then tries it with random
    parameters; a block that computes something else stays as it is.

    Parameters
    ----------
    model : torch.nn.Module
        The model, on its device, before ``torch.compile`` and before sharding by FSDP2.
    exclude : iterable of str
        Names of modules to leave as they are: the whole path, or its last part. By default, layers that compute logits.
        ``"loss_function"`` names the loss.
    dry_run : bool, default = False
        Return the report and change nothing.

    Returns
    -------
    Report
        What was converted, and why the rest was left.

    Raises
    ------
    StateError
        If the model has been converted, or is compiled. Nothing has changed then.
    DtypeError
        If it is no module, or `exclude` does not consist of names.

    See Also
    --------
    undo : Restores the model.
    scaling_state : Returns the scales for a checkpoint.

    Notes
    -----
    Weights that one matrix product reads (queries, keys and values; both halves of a feed-forward block) are moved to
    adjacent memory; they stay the same parameters with the same values. Parameters in a buffer of another library stay
    where they are, and every call joins them.

    Examples
    --------
    >>> import torch
    >>> import te_fast
    >>> import te_fast.pytorch as te
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 64))
    >>> print(te_fast.convert(model))
    te_fast.convert converted: 1 x norm + linear layer, 1 x linear layer
    >>> with te.autocast():
    ...     y = model(torch.ones(16, 32))
    >>> y.shape
    torch.Size([16, 64])
    """
    _refuse(model)
    names = _names(exclude)
    # The trials compute in the parameters' type, and the layers get the model's parameters, wherever this is called.
    with autocast(enabled=False), quantized_model_init(enabled=False):
        plan = _Plan(model, names)
    converted = {name: _shown(module, forward) for name, module, forward in plan.forwards}
    converted |= {name: of_loss.WHAT for name, _ in plan.losses}
    if not dry_run:
        plan.apply()
    return Report(converted, plan.left, dry_run, _unmatched(model, names))


def _shown(module: torch.nn.Module, forward: Forward) -> str:
    """Return a forward's name; a block on the meta device is known by its parts alone."""
    is_untried = isinstance(forward, DecoderForward | ExpertsForward | SequentialForward)
    if is_untried and any(parameter.is_meta for parameter in module.parameters()):
        return f"{forward.what} (not tried)"
    return forward.what


def undo(model: torch.nn.Module) -> int:
    """Undo :func:`convert`; parameters keep their values.

    Parameters
    ----------
    model : torch.nn.Module
        The model.

    Returns
    -------
    int
        Number of restored modules.

    Raises
    ------
    StateError
        If no module of the model has been converted, or a wrapper has replaced a converted forward since. Remove such a
        wrapper first.
    DtypeError
        If it is no module.

    See Also
    --------
    convert : Converts a model.

    Examples
    --------
    >>> import torch
    >>> import te_fast
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 64))
    >>> report = te_fast.convert(model)
    >>> te_fast.convert.undo(model)
    2
    """
    _expect_module(model, "undo")
    found = [module for _, module, _ in converted_modules(model)]
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("_old_forward"), Forward):
            message = (
                f"undo: {name} has been wrapped since (_old_forward); take the wrapper away first"
            )
            raise StateError(message)
    if not found:
        message = "undo: nothing of this model has been converted"
        raise StateError(message)
    for module in found:
        del module.__dict__[_KEY]
    losses = [
        module for module in model.modules() if module.__dict__.get(of_loss.KEY) is causal_loss
    ]
    for module in losses:
        del module.__dict__[of_loss.KEY]
    return len(found) + len(losses)


def _load(target: str) -> torch.nn.Module:
    """Return a model on the meta device, made by a function or from a configuration."""
    kind, _, rest = target.partition(":")
    if not kind or not rest:
        message = f"expected package.module:function or hf:path, got {target!r}"
        raise ArgumentError(message)
    with torch.device("meta"):
        if kind == "hf":
            transformers: Any = importlib.import_module("transformers")
            try:
                config = transformers.AutoConfig.from_pretrained(rest, local_files_only=True)
            except (ValueError, OSError) as error:
                message = f"{target} has no configuration that Transformers knows: {error}"
                raise ArgumentError(message) from error
            return _made(target, partial(transformers.AutoModelForCausalLM.from_config, config))
        function = getattr(importlib.import_module(kind), rest, None)
        if function is None:
            message = f"module {kind!r} has no {rest!r}"
            raise ArgumentError(message)
        return _made(target, function)


def _made(target: str, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    try:
        return make()
    except Exception as error:
        message = f"{target} makes no model when it is called without arguments: {type(error).__name__}: {error}"
        raise ArgumentError(message) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m te_fast.convert``.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command line; that of the process by default.

    Returns
    -------
    int
        0.

    See Also
    --------
    convert : The same in Python.

    Examples
    --------
    >>> from te_fast.convert import main
    >>> main(["--dry-run", "package.module:make_model"])  # doctest: +SKIP
    """
    summary = "Report what te_fast.convert would do with a model."
    parser = argparse.ArgumentParser(prog="python -m te_fast.convert", description=summary)
    parser.add_argument(
        "model", help="package.module:function that makes it, or hf:<directory of a configuration>"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="accepted for clarity: the command never changes a model, and makes it without memory",
    )
    parser.add_argument(
        "--exclude", nargs="*", default=list(HEADS), help="names of modules to leave as they are"
    )
    options = parser.parse_args(arguments)
    try:
        report = convert(_load(options.model), exclude=options.exclude, dry_run=True)
    except (TeFastError, ImportError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    print(report)
    for name, what in report.converted.items():
        print(f"    {name or ROOT}: {what}")
    return 0


_Report = Report


class CallableModule(types.ModuleType):
    """A callable module, so that ``te_fast.convert(...)`` works although ``te_fast.convert`` is a submodule.

    Its attributes tell type checkers what the module has.
    """

    __call__ = staticmethod(convert)
    Report = _Report
    convert = staticmethod(convert)
    load_scaling_state = staticmethod(load_scaling_state)
    main = staticmethod(main)
    scaling_state = staticmethod(scaling_state)
    undo = staticmethod(undo)


sys.modules[__name__].__class__ = CallableModule
