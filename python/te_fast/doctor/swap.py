"""te_fast's counterparts of a script's modules, and the time of one module of each kind before and after.

The doctor copies a model without its memory, so that it neither calls the script's modules nor keeps them alive. When
the script has ended, it makes one module of each kind anew with other numbers, and times it on the device.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from te_fast.convert import PARTS, convert
from te_fast.doctor.trace import Owner
from te_fast.doctor.watch import Example, Shape
from te_fast.errors import TeFastError
from te_fast.profiling.regions import region
from te_fast.profiling.timing import wait

ROUNDS, CALLS = 7, 5


@dataclass
class Swap:
    """te_fast's counterpart of modules of one kind.

    Attributes
    ----------
    owner : Owner
        The modules.
    what : str
        Name of the counterpart.
    calls : int
        Calls of them a step.
    before, after : float, optional
        Microseconds of a forward and backward until the device is done, of the module as it is and of te_fast's.
    why : str
        Why there are no figures.
    """

    owner: Owner
    what: str
    calls: int = 0
    before: float | None = None
    after: float | None = None
    why: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "name": self.owner.name,
            "class": self.owner.kind,
            "what": self.what,
            "calls": self.calls,
            "before_us": None if self.before is None else round(self.before, 2),
            "after_us": None if self.after is None else round(self.after, 2),
            "why": self.why,
        }


def _without_memory(model: torch.nn.Module) -> torch.nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        memo[id(parameter)] = empty
    memo |= {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    return _not_compiled(copy.deepcopy(model, memo))


def _not_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Remove the wrappers of torch.compile from modules."""
    for module in list(model.modules()):
        module._compiled_call_impl = None
        for name, child in list(module.named_children()):
            setattr(module, name, getattr(child, "_orig_mod", child))
    return getattr(model, "_orig_mod", model)


class Sketch:
    """A model's structure, and te_fast's counterparts of its modules.

    Parameters
    ----------
    model : torch.nn.Module
        The model; no reference to it is kept.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.kinds: dict[Owner, tuple[str, torch.nn.Module]] = {}
        self.why = ""
        try:
            self._model = _without_memory(model)
        except Exception as error:  # a model's own `__deepcopy__` may raise anything
            self.why = f"the model cannot be copied: {type(error).__name__}: {error}"
            return
        self._find_foreign()
        try:
            converted = convert(self._model, dry_run=True).converted
        except TeFastError as error:
            self.why = str(error)
            return
        # A model whose mask or loss changes computes by the layers within.
        computing = [name for name, what in converted.items() if what not in PARTS]
        for name in computing:
            if not any(other != name and _is_in(name, other) for other in computing):
                self._add(name, converted[name])

    def _add(self, name: str, what: str) -> None:
        module = self._model.get_submodule(name)
        shown = ".".join("*" if part.isdigit() else part for part in name.split("."))
        self.kinds.setdefault(Owner(shown, type(module).__name__), (what, module))

    def _find_foreign(self) -> None:
        """Note Transformer Engine's modules, which te_fast has under the same names."""
        import te_fast.pytorch as te

        for name, module in self._model.named_modules():
            kind = type(module)
            foreign = kind.__module__.split(".")[0] == "transformer_engine"
            # With te_fast_alias, te_fast's own modules have this name, too.
            if foreign and getattr(te, kind.__name__, kind) is not kind:
                self._add(name, f"te_fast.pytorch.{kind.__name__}")


def _is_in(name: str, other: str) -> bool:
    return other == "" or name.startswith(other + ".")


def _tensor(shape: Shape, device: torch.device) -> torch.Tensor:
    if shape.dtype.is_floating_point:
        made = torch.randn(shape.sizes, device=device).to(shape.dtype)
        return made.requires_grad_()
    return torch.zeros(shape.sizes, dtype=shape.dtype, device=device)


def _arguments(example: Any, device: torch.device) -> Any:
    if isinstance(example, Shape):
        return _tensor(example, device)
    if isinstance(example, tuple | list):
        return type(example)(_arguments(part, device) for part in example)
    if isinstance(example, dict):
        return {name: _arguments(part, device) for name, part in example.items()}
    return example


def _made(sketch: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a module with memory and random numbers."""
    module = copy.deepcopy(sketch).to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.02).add_(float(tensor.dim() < 2))
            else:
                tensor.zero_()
    return module


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _step(module: torch.nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
    def step() -> None:
        outs = [out for out in _tensors(module(*args, **kwargs)) if out.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        for parameter in module.parameters():
            parameter.grad = None

    return step


def measure(
    sketch: torch.nn.Module, example: Example, device: torch.device, recipe: str
) -> tuple[float, float]:
    """Time a module as it is and converted to te_fast.

    Parameters
    ----------
    sketch : torch.nn.Module
        A module without memory, which `convert` knows.
    example : tuple
        Arguments of its calls.
    device : torch.device
        Where to run.
    recipe : str
        Name of the recipe.

    Returns
    -------
    tuple of float
        Microseconds of a forward and backward until the device is done, before and after.
    """
    args, kwargs = _arguments(example[0], device), _arguments(example[1], device)
    plain = _made(sketch, device)
    converted = copy.deepcopy(plain)
    convert(converted, exclude=())
    bodies = [
        (_step(plain, args, kwargs), region("none")),
        (_step(converted, args, kwargs), region(recipe)),
    ]
    times: list[list[float]] = [[], []]
    for turn in range(ROUNDS + 1):
        for taken, (body, inside) in zip(times, bodies, strict=True):
            with inside:
                wait(device)
                begin = time.perf_counter_ns()
                for _ in repeat(None, CALLS):
                    body()
                wait(device)
                if turn:  # the first turn loads kernels and searches for algorithms
                    taken.append((time.perf_counter_ns() - begin) / (CALLS * 1e3))
    before, after = (statistics.median(taken) for taken in times)
    return before, after


def swaps(
    sketches: Sequence[Sketch],
    examples: dict[Owner, Example],
    calls: dict[Owner, int],
    recipe: str,
) -> list[Swap]:
    """Return te_fast's counterparts of the modules of models, with figures if the models are on a GPU.

    Parameters
    ----------
    sketches : sequence of Sketch
        The models.
    examples : dict
        Arguments of the modules' calls.
    calls : dict
        Their calls a step.
    recipe : str
        Name of the recipe that is timed.

    Returns
    -------
    list of Swap
        One for each kind of module.
    """
    found: list[Swap] = []
    for sketch in sketches:
        for owner, (what, module) in sketch.kinds.items():
            swap = Swap(owner, what, calls.get(owner, 0))
            found.append(swap)
            if what.startswith("te_fast.pytorch."):
                swap.why = "change the import"
            elif sketch.device.type != "cuda":
                swap.why = "timed on a GPU only"
            elif owner not in examples:
                swap.why = "not called by itself"
            else:
                try:
                    swap.before, swap.after = measure(
                        module, examples[owner], sketch.device, recipe
                    )
                except (
                    Exception
                ) as error:  # foreign modules with made-up arguments may raise anything
                    swap.why = f"not timed: {type(error).__name__}: {' '.join(str(error).split())}"
    return found
