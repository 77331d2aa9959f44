"""Ways to train a Llama: BF16, te_fast.convert, and Transformer Engine and torchao where they can be imported."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import te_fast
import te_fast.pytorch as te
from _harness import RECIPES, peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


@dataclass
class Way:
    """Preparation of a model before training, and the region of its forwards."""

    name: str
    change: Callable[[torch.nn.Module], object] = lambda model: model
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_compiled: bool = False


def _swap(linear: Any, model: torch.nn.Module) -> None:
    """Replace torch's linear layers by a library's, except the head."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                weight = child.weight
                kind = {"params_dtype": weight.dtype, "device": weight.device}
                made = linear(child.in_features, child.out_features, bias=False, **kind)
                with torch.no_grad():
                    made.weight.copy_(weight)
                setattr(module, name, made)


def _is_no_head(_: object, name: str) -> bool:
    return "lm_head" not in name


def ways(recipes: list[str]) -> Iterator[Way]:
    """Yield every way that can be imported, BF16 first."""
    for is_compiled, how in ((False, "eager"), (True, "compiled")):
        yield Way(f"BF16, {how}", is_compiled=is_compiled)
    for recipe in recipes:
        region = partial(te.autocast, recipe=RECIPES[recipe]())
        for is_compiled, how in ((False, "eager"), (True, "compiled")):
            yield Way(f"te_fast.convert {recipe}, {how}", te_fast.convert, region, is_compiled)
    theirs = peer()
    if theirs is not None:
        for recipe in recipes:
            own = getattr(theirs.recipe, RECIPES[recipe].__name__)()
            region = partial(theirs.pytorch.autocast, enabled=True, recipe=own)
            swap = partial(_swap, theirs.pytorch.Linear)
            yield Way(f"Transformer Engine {recipe}, eager", swap, region)
    if importlib.util.find_spec("torchao") is not None:
        convert = importlib.import_module("torchao.float8").convert_to_float8_training
        change = partial(convert, module_filter_fn=_is_no_head)
        yield Way("torchao float8, compiled", change, is_compiled=True)
