"""Programs as one operator without state, which ``torch.export`` writes for inference and other processes load.

The operator has everything in its arguments: the ops and the recipe as text, the parameters and the scales of delayed
scaling as tensors. So a program that was saved runs wherever ``te_fast.pytorch`` has been imported. A process makes a
native program and FP8 weights from a text, and keeps them as long as the parameters live.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from te_fast import recipe as recipes
from te_fast.errors import StateError, UnsupportedError
from te_fast.recipe import Format, MMParams, QParams, Recipe
from te_fast.runtime import native
from te_fast.runtime.autocast import prepare_recipe
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.runtime.library import register
from te_fast.runtime.parts import joined
from te_fast.tensor.blockwise import Float8BlockwiseQTensor
from te_fast.tensor.float8 import Float8Tensor

Tensors = list[torch.Tensor]

_OPTIONS = {"MMParams": MMParams, "QParams": QParams}
_PLAIN_OPS = ("add_extra_input", "add_residual", "constant_scale", "identity", "unpermute")


class Recorder:
    """Records the calls that build a native program, in a form that does not depend on the process.

    Parameters
    ----------
    name : str
        The program's name in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.ops: list[list[Any]] = []
        self.num_extra_outputs = 0
        #: For each parameter, the tensors that calls pass for it: one, or one for each expert.
        self.parts: list[int] = []
        self.has_stacks = False
        #: Experts whose tokens a router counts, and whether it returns logits.
        self.counts = 0
        self.gives_logits = False

    def linear(self, label: str, _handle: Any, _of: Any, _weight: str, *sizes: Any) -> None:
        """Note a linear op; its weight counts as one tensor, even if it consists of parts."""
        self.parts.append(1)
        self.ops.append(["linear", label, *sizes[:2]])

    def grouped_linear(
        self, label: str, _handle: Any, _of: Any, weights: Sequence[str], *sizes: Any
    ) -> None:
        """Note the products of experts, whose weights are one stack or a tensor each."""
        self._note_stack(len(weights))
        self.ops.append(["grouped_linear", label, list(weights), *sizes])

    def grouped_bias(self, label: str, _of: Any, biases: Sequence[str], *sizes: int) -> None:
        """Note the biases of experts, likewise."""
        self._note_stack(len(biases))
        self.ops.append(["grouped_bias", label, list(biases), *sizes])

    def _note_stack(self, tensors: int) -> None:
        self.parts.append(tensors)
        self.has_stacks = True

    def router(
        self,
        label: str,
        _of: Any,
        _weight: str,
        num_experts: int,
        cols: int,
        choice: Sequence[Any],
        *,
        biased: bool,
        logits: bool,
    ) -> None:
        """Note a router, which counts the tokens of experts if it is biased."""
        self.parts.append(1)
        self.counts = num_experts if biased else 0
        self.gives_logits = logits
        self.ops.append(["router", label, num_experts, cols, list(choice), biased, logits])

    def permute(self, label: str, *sizes: int, routed: bool = False) -> None:
        """Note a permutation of the tokens to their experts."""
        self.ops.append(["permute", label, *sizes, routed])

    def fuse_parts(self) -> None:
        """Note nothing, since inference has no gradients."""

    def bias(self, label: str, _of: Any, _name: str, size: int, _parts: Any = ()) -> None:
        """Note a bias."""
        self.parts.append(1)
        self.ops.append(["bias", label, size])

    def norm(self, label: str, kind: str, _of: Any, _weight: str, bias: Any, *rest: Any) -> None:
        """Note a norm."""
        self.parts += [1] if bias is None else [1, 1]
        self.ops.append(["norm", label, kind, bias is not None, *rest])

    def activation(self, label: str, kind: str, **options: Any) -> None:
        """Note an activation and its constants."""
        self.ops.append(["activation", label, kind, options])

    def make_extra_output(self, label: str, in_place: bool) -> None:
        """Note an extra output."""
        self.num_extra_outputs += 1
        self.ops.append(["make_extra_output", label, in_place])

    def residual(self, label: str) -> int:
        """Note the beginning of a residual connection, and return its number."""
        self.ops.append(["residual", label])
        return len(self.ops) - 1

    def __getattr__(self, name: str) -> Any:
        """Note any other op, whose arguments are plain."""
        if name not in _PLAIN_OPS:
            message = (
                f"{self._name}: torch.export cannot save its {name}; export the parts of the model around it, or save "
                "the model's state_dict()"
            )
            raise UnsupportedError(message)
        return lambda label, *arguments: self.ops.append([name, label, *arguments])


def _plain(value: Any, field: str) -> Any:
    if isinstance(value, Format):
        return {"Format": value.name}
    if type(value).__name__ in _OPTIONS:
        return {type(value).__name__: dataclasses.asdict(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    message = f"torch.export: a recipe whose {field} is a {type(value).__name__} cannot be saved"
    raise UnsupportedError(message)


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        ((kind, inside),) = plain.items()
        return Format[inside] if kind == "Format" else _OPTIONS[kind](**inside)
    return plain


def describe(
    name: str,
    owner: Any,
    program: native.Program,
    recipe: Recipe | None,
    cols: int,
    kinds: Sequence[tuple[int, str, bool, int] | None] = (),
) -> str:
    """Return a program and its recipe as text.

    Parameters
    ----------
    name : str
        Name in messages.
    owner : object
        The object that built the program; ``_append_to(recorder)`` builds it again.
    program : Program
        The program.
    recipe : Recipe, optional
        Recipe of the region; None outside of FP8.
    cols : int
        Columns of the input.
    kinds : sequence
        For each parameter, None or how it is quantised: block, FP8 type, whether it has a column layout, and number
        of values.

    Raises
    ------
    UnsupportedError
        If a part of it cannot be saved.
    """
    recorder = Recorder(name)
    owner._append_to(recorder)
    described: dict[str, Any] = {"name": name, "ops": recorder.ops, "widths": program.widths(cols)}
    if recipe is not None:
        kept: Any = recipe
        fields = {f.name: _plain(getattr(kept, f.name), f.name) for f in dataclasses.fields(kept)}
        if recorder.has_stacks and "backward_override" in fields:
            fields["backward_override"] = (
                None  # kernels for all experts take none, and inference has no backward
            )
        described["recipe"] = [type(recipe).__name__, fields]
    given = {
        index: (*kind[:2], kind[3] if count == 1 else 1)
        for index, (kind, count) in enumerate(zip(kinds, recorder.parts, strict=False))
        if kind is not None
    }
    if given:
        described["quantized"] = given
    if recorder.has_stacks:
        described["parts"] = recorder.parts
    if recorder.counts:
        described["counts"] = recorder.counts
    if recorder.gives_logits:
        described["logits"] = True
    return json.dumps(described, sort_keys=True)


def _recipe_of(described: list[Any] | None) -> Recipe | None:
    if described is None:
        return None
    name, fields = described
    kind = getattr(recipes, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        message = f"te_fast::inference: there is no recipe {name!r}"
        raise StateError(message)
    recipe = kind()
    for field, plain in fields.items():
        setattr(recipe, field, _value(plain))
    return prepare_recipe(recipe)


class _Loaded:
    """A program from a text, with the FP8 weights and states of its linear ops for one set of weights."""

    def __init__(self, text: str, device: torch.device) -> None:
        #: For each op with parameters, the dictionary in which the program finds them during a call, and their names.
        self._places: list[tuple[dict[str, Any], list[str]]] = []
        self._handles: list[native.WeightHandle] = []
        try:
            described = json.loads(text)
            self._recipe = _recipe_of(described.get("recipe"))
            self._program = native.Program(described["name"])
            for kind, label, *arguments in described["ops"]:
                self._append(kind, label, arguments)
            #: Block, FP8 type and number of values of the quantised parameters; calls pass bytes and scales of each.
            self._quantized = {
                int(index): (int(block), str(fp8), int(*groups or [1]))
                for index, (block, fp8, *groups) in described.get("quantized", {}).items()
            }
            #: Tensors of each parameter, if a parameter is a stack of experts.
            self._parts: list[int] | None = described.get("parts")
            self._counts = int(described.get("counts", 0))
            self._gives_logits = bool(described.get("logits", False))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            message = f"te_fast::inference: the text of a program is damaged: {error}"
            raise StateError(message) from error
        self._device = device
        self._states: list[tuple[DelayedScalingRecipeState, DelayedScalingRecipeState]] = []
        self._sizes: list[int] = []
        #: Held by calls that put parameters into the dictionaries.
        self._lock = threading.Lock()

    def _append(self, kind: str, label: str, arguments: list[Any]) -> None:
        if kind in ("linear", "bias", "norm", "grouped_linear", "grouped_bias", "router"):
            self._append_with_parameters(kind, label, arguments)
        elif kind == "activation":
            function, options = arguments
            self._program.activation(label, function, **options)
        elif kind == "permute":
            experts, topk, routed = arguments
            self._program.permute(label, experts, topk, routed=routed)
        elif kind in _PLAIN_OPS or kind in ("make_extra_output", "residual"):
            getattr(self._program, kind)(label, *arguments)
        else:
            message = f"there is no op {kind!r}"
            raise ValueError(message)

    def _append_with_parameters(self, kind: str, label: str, arguments: list[Any]) -> None:
        program, own = self._program, dict[str, Any]()
        if kind == "linear":
            names = [label]
            program.linear(label, self._handle(label), own, label, *arguments)
        elif kind == "bias":
            names = [label]
            program.bias(label, own, label, *arguments)
        elif kind == "norm":
            norm, has_bias, *rest = arguments
            bias = "bias" if has_bias else None
            names = ["weight", "bias"] if has_bias else ["weight"]
            program.norm(label, norm, own, "weight", bias, *rest)
        elif kind == "grouped_linear":
            names, number, inputs, outputs, (forward, backward) = arguments
            handle, slots = self._handle(label), (forward, backward)
            program.grouped_linear(label, handle, own, names, number, inputs, outputs, slots)
        elif kind == "grouped_bias":
            names, *sizes = arguments
            program.grouped_bias(label, own, names, *sizes)
        else:
            experts, cols, choice, biased, logits = arguments
            names, how = ["router"], {"biased": biased, "logits": logits}
            program.router(label, own, "router", experts, cols, tuple(choice), **how)
        self._places.append((own, names))

    def _handle(self, label: str) -> native.WeightHandle:
        self._handles.append(native.WeightHandle(label))
        return self._handles[-1]

    def _init_delayed_scaling(self) -> None:
        """Make states for the scales that calls pass; the dispatcher calls this when the region is new."""
        recipe: Any = self._recipe
        options = {"device": self._device}
        self._states = [
            (
                DelayedScalingRecipeState(recipe, mode="forward", num_quantizers=size, **options),
                DelayedScalingRecipeState(recipe, mode="backward", num_quantizers=size, **options),
            )
            for size in self._sizes
        ]
        epoch = native.autocast_region()[5]
        per_linear = sum(self._sizes) // len(self._handles)
        for number, handle in enumerate(self._handles):
            # A layer has one state for all of its ops, a chain of operations one for each.
            is_shared = len(self._states) < len(self._handles)
            forward, backward = self._states[0 if is_shared else number]
            base = number * per_linear if is_shared else 0
            handle.set_slots(epoch, forward.slots, backward.slots, base, base)

    def _parameters(self, given: Tensors, dtype: torch.dtype) -> list[Tensors]:
        """Return the parts of each parameter; quantised ones are put together again from bytes and scales."""
        rest, found = iter(given), list[Tensors]()
        for first in rest:
            kind = self._quantized.get(len(found))
            count = 1 if self._parts is None else self._parts[len(found)]
            tensors = [first, *itertools.islice(rest, count * (1 if kind is None else 2) - 1)]
            if kind is not None:
                block, fp8, groups = kind
                quantized_class = Float8BlockwiseQTensor if block else Float8Tensor
                pairs = zip(tensors[::2], tensors[1::2], strict=True)
                tensors = [
                    quantized_class._of_value(
                        native.QuantizedValue(block, fp8, row, scale, None, None, groups),
                        row.shape,
                        dtype,
                        None,
                    )
                    for row, scale in pairs
                ]
            found.append(tensors)
        return found

    def __call__(
        self, x: torch.Tensor, extras: Tensors, params: Tensors, scales: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """Run the program in a region of its own.

        Behind its results, a router gives the logits and the number of each expert's tokens, if it has them.
        """
        region = native.HeldRegion(self._recipe, self._recipe is not None, False, False, None)
        try:
            if scales:
                self._sizes = [scale.numel() for scale in scales]
                if not self._states:
                    self._init_delayed_scaling()
                # Updates of the states must not matter: every call uses the scales that were saved.
                for (forward, _), scale in zip(self._states, scales, strict=True):
                    forward._scale.copy_(scale)
            found = self._parameters(params, x.dtype)
            if self._counts:  # memory for the numbers of tokens
                counts = torch.zeros(self._counts, dtype=torch.int64, device=x.device)
                extras = [extras[0].reshape(-1), counts]
            out = (
                self._run_on_parts(x, extras, found) if self._parts else self._run(x, extras, found)
            )
            made = out if isinstance(out, tuple) else (out,)
            if self._gives_logits:  # without tokens they have the tokens' type
                made = (made[0], made[1].float())
            return (*made, counts) if self._counts else made
        finally:
            region.take_back()

    def _run(self, x: torch.Tensor, extras: Tensors, params: list[Tensors] | None) -> Any:
        wholes = None if params is None else tuple([joined(parts) for parts in params])
        return native.program_apply(self._program, self, x, tuple(extras), None, wholes, None)

    def _run_on_parts(self, x: torch.Tensor, extras: Tensors, params: list[Tensors]) -> Any:
        """Run on stacks of experts, which the program reads where they are, if experts lie side by side."""
        if x.numel() == 0:  # without launches, torch joins the parts
            return self._run(x, extras, params)
        flat = iter([part for parts in params for part in parts])
        with self._lock:
            try:
                for own, names in self._places:
                    own.update(zip(names, flat, strict=False))
                return self._run(x, extras, None)
            finally:  # the program must not keep parameters alive
                for own, _ in self._places:
                    own.clear()


class _OfParameters:
    """The programs, by text, for one set of parameters."""

    def __init__(self, parameters: Tensors) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._programs: dict[tuple[str, torch.device], _Loaded] = {}

    def is_of(self, parameters: Tensors) -> bool:
        """Tell whether these are the same parameters, by identity: addresses and ids are reused by other tensors."""
        pairs = zip(self._parameters, parameters, strict=True)
        return all(reference() is parameter for reference, parameter in pairs)

    def lives(self) -> bool:
        """Tell whether all parameters are still alive."""
        return all(reference() is not None for reference in self._parameters)

    def program(self, text: str, device: torch.device) -> _Loaded:
        """Return the program of a text."""
        found = self._programs.get((text, device))
        if found is None:
            found = self._programs[text, device] = _Loaded(text, device)
        return found


# By the first parameter, whose end drops the entry, and by the ids of all.
_of_parameters: Any = WeakIdKeyDictionary()
_of_none = _OfParameters([])


def _loaded(text: str, device: torch.device, parameters: Tensors) -> _Loaded:
    if not parameters:
        return _of_none.program(text, device)
    sets = _of_parameters.setdefault(parameters[0], {})
    numbers = tuple(map(id, parameters))
    found = sets.get(numbers)
    if found is None or not found.is_of(parameters):
        for old in [key for key, kept in sets.items() if not kept.lives()]:
            del sets[old]
        found = sets[numbers] = _OfParameters(parameters)
    return found.program(text, device)


def _inference(
    x: torch.Tensor, extras: Tensors, params: Tensors, scales: Tensors, program: str
) -> Tensors:
    loaded = _loaded(program, x.device, params)
    with torch.no_grad():
        out = loaded(x, extras, params, scales)
    found: Tensors = []
    taken = [tensor.data_ptr() for tensor in (x, *extras)]
    for tensor in out:
        # An operator must return new tensors.
        is_shared = tensor.numel() > 0 and tensor.data_ptr() in taken
        found.append(tensor.clone() if is_shared else tensor)
        taken.append(tensor.data_ptr())
    return found


def _fake(x: torch.Tensor, _extras: Any, _params: Any, _scales: Any, program: str) -> Tensors:
    described = json.loads(program)
    rows = x.shape[0]
    made = [x.new_empty((rows, width)) for width in described["widths"]]
    if described.get("logits"):
        made[1] = made[1].to(torch.float32)
    if described.get("counts"):
        made.append(x.new_empty((described["counts"],), dtype=torch.int64))
    return made


register(
    "inference(Tensor x, Tensor[] extras, Tensor[] params, Tensor[] scales, str program) -> Tensor[]",
    _inference,
    _fake,
)
