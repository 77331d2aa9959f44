"""Programs as one operator without state, which ``torch.export`` writes for inference and other processes load.

The operator has everything in its arguments: the ops and the recipe as text, the parameters and the scales of delayed
scaling as tensors. So a program that was saved runs wherever ``te_fast.pytorch`` has been imported. A process makes a
native program and FP8 weights from a text, and keeps them as long as the parameters live.
"""

from __future__ import annotations

import dataclasses
import json
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
from te_fast.tensor.blockwise import Float8BlockwiseQTensor
from te_fast.tensor.float8 import Float8Tensor

Tensors = list[torch.Tensor]

_OPTIONS = {"MMParams": MMParams, "QParams": QParams}
_PLAIN_OPS = ("add_extra_input", "add_residual", "constant_scale", "identity")


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

    def linear(self, label: str, _handle: Any, _of: Any, _weight: str, *sizes: Any) -> None:
        """Note a linear op; its weight counts as one tensor, even if it consists of parts."""
        self.ops.append(["linear", label, *sizes[:2]])

    def fuse_parts(self) -> None:
        """Note nothing, since inference has no gradients."""

    def bias(self, label: str, _of: Any, _name: str, size: int, _parts: Any = ()) -> None:
        """Note a bias."""
        self.ops.append(["bias", label, size])

    def norm(self, label: str, kind: str, _of: Any, _weight: str, bias: Any, *rest: Any) -> None:
        """Note a norm."""
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
        For each quantised parameter: block, FP8 type, whether it has a column layout, and number of values.

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
        described["recipe"] = [type(recipe).__name__, fields]
    given = {index: kind[:2] for index, kind in enumerate(kinds) if kind is not None}
    if given:
        described["quantized"] = given
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
        try:
            described = json.loads(text)
            self._recipe = _recipe_of(described.get("recipe"))
            self._program = native.Program(described["name"])
            self._handles: list[native.WeightHandle] = []
            for kind, label, *arguments in described["ops"]:
                self._append(kind, label, arguments)
            #: Block and FP8 type of the quantised parameters; calls pass each of them as bytes and scales.
            self._quantized = {
                int(index): (int(block), str(fp8))
                for index, (block, fp8) in described.get("quantized", {}).items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            message = f"te_fast::inference: the text of a program is damaged: {error}"
            raise StateError(message) from error
        self._device = device
        self._states: list[tuple[DelayedScalingRecipeState, DelayedScalingRecipeState]] = []
        self._sizes: list[int] = []

    def _append(self, kind: str, label: str, arguments: list[Any]) -> None:
        # Calls bring the parameters; the program has no module to find them in.
        nowhere: dict[str, Any] = {}
        if kind == "linear":
            self._handles.append(native.WeightHandle(label))
            self._program.linear(label, self._handles[-1], nowhere, label, *arguments)
        elif kind == "bias":
            self._program.bias(label, nowhere, label, *arguments)
        elif kind == "norm":
            norm, has_bias, *rest = arguments
            bias = "bias" if has_bias else None
            self._program.norm(label, norm, nowhere, label, bias, *rest)
        elif kind == "activation":
            function, options = arguments
            self._program.activation(label, function, **options)
        elif kind in _PLAIN_OPS or kind in ("make_extra_output", "residual"):
            getattr(self._program, kind)(label, *arguments)
        else:
            message = f"there is no op {kind!r}"
            raise ValueError(message)

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

    def _whole(self, params: Tensors, dtype: torch.dtype) -> Tensors:
        """Return the parameters; quantised ones are put together again from bytes and scales."""
        given = iter(params)
        whole: Tensors = []
        for parameter in given:
            kind = self._quantized.get(len(whole))
            if kind is None:
                whole.append(parameter)
                continue
            value = native.QuantizedValue(*kind, parameter, next(given), None, None)
            quantized_class = Float8BlockwiseQTensor if kind[0] else Float8Tensor
            whole.append(quantized_class._of_value(value, parameter.shape, dtype, None))
        return whole

    def __call__(self, x: torch.Tensor, extras: Tensors, params: Tensors, scales: Tensors) -> Any:
        """Run the program in a region of its own."""
        region = native.HeldRegion(self._recipe, self._recipe is not None, False, False, None)
        try:
            if scales:
                self._sizes = [scale.numel() for scale in scales]
                if not self._states:
                    self._init_delayed_scaling()
                # Updates of the states must not matter: every call uses the scales that were saved.
                for (forward, _), scale in zip(self._states, scales, strict=True):
                    forward._scale.copy_(scale)
            return native.program_apply(
                self._program,
                self,
                x,
                tuple(extras),
                None,
                tuple(self._whole(params, x.dtype)),
                None,
            )
        finally:
            region.take_back()


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
    for tensor in out if isinstance(out, tuple) else (out,):
        # An operator must return new tensors.
        is_shared = tensor.numel() > 0 and tensor.data_ptr() in taken
        found.append(tensor.clone() if is_shared else tensor)
        taken.append(tensor.data_ptr())
    return found


def _fake(x: torch.Tensor, _extras: Any, _params: Any, _scales: Any, program: str) -> Tensors:
    return [x.new_empty((x.shape[0], width)) for width in json.loads(program)["widths"]]


register(
    "inference(Tensor x, Tensor[] extras, Tensor[] params, Tensor[] scales, str program) -> Tensor[]",
    _inference,
    _fake,
)
