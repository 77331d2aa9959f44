"""The autocast region of a trace: a region that the graph enters itself, or the region around the graph."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import TeFastError
from te_fast.graphs.refusal import Problem, problem_of, raise_problem, refusal
from te_fast.recipe import Recipe
from te_fast.runtime import native
from te_fast.runtime.autocast import prepare_recipe
from te_fast.runtime.compiling import static
from te_fast.runtime.recompute import tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

_NO_FACTORIES = (
    "autocast: a CustomRecipe cannot be in force inside of torch.compile; call compiled functions in regions of other "
    "recipes, or the model without torch.compile"
)
#: The region in force around a graph; its attributes are guards of the graph.
_around = native.CurrentRegion()
#: Recipes of regions that graphs enter, by the number of their content.
_recipes: dict[int, Recipe] = {}


class Order:
    """The order tensor of each device, an attribute of its name; :meth:`prepare` makes it."""

    def prepare(self, device: torch.device) -> None:
        """Make the tensor of a device, if there is none."""
        if not hasattr(self, str(device)):
            # Tensors that are made under torch.inference_mode() cannot be written outside of it.
            with torch.inference_mode(mode=False):
                setattr(self, str(device), static(torch.zeros(1, device=device)))


#: What operators write that must keep their order.
order = Order()


class _Entered:
    """The innermost region that the graph under trace has entered itself."""

    def __init__(self) -> None:
        self.region: TracedRegion | None = None


entered = _Entered()


def _number_of(recipe: Recipe | None) -> int:
    """Return the number of a recipe's content, after describing the recipe to the dispatcher."""
    recipe = prepare_recipe(recipe)
    number: int = recipe._native.number
    if number not in _recipes:
        # A copy, since the user may change the recipe.
        _recipes[number] = prepare_recipe(copy.deepcopy(recipe))
    return number


_number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _describe_to_dispatcher(recipe: Recipe) -> Problem | None:
    try:
        _number_of(recipe)
    except TeFastError as error:
        return problem_of(error)
    return None


_describe_to_dispatcher._dynamo_marked_constant = True  # type: ignore[attr-defined]
Recipe._describe_to_dispatcher = _describe_to_dispatcher  # type: ignore[method-assign, assignment]


class TracedRegion:
    """An autocast region inside of a graph: a trace enters and leaves it, a run of the graph does not."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        if calibrating or _graph or amax_reduction_group is not None:
            message = (
                "autocast: calibrating, _graph and amax_reduction_group work around a compiled function, not inside "
                "of it; enter the region where the function is called"
            )
            raise refusal(message)
        self.enabled = bool(enabled)
        self.recipe = recipe
        self.number = 0
        self.is_first = True
        self.former: TracedRegion | None = None
        #: Users of delayed scaling's scales, without repetition: number of the recipe, handle, order tensor.
        self.used: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> TracedRegion:
        """Put the region in force for the layers that are traced next."""
        if tracing.keeps_scales:
            message = (
                "autocast: in a compiled function, no region begins inside of te.checkpoint; enter the region around "
                "the call of te.checkpoint"
            )
            raise refusal(message)
        if self.enabled:
            recipe = self.recipe
            if recipe is not None and recipe.custom():
                raise refusal(_NO_FACTORIES)
            if recipe is None:
                self.number = _number_of(None)
            else:
                raise_problem(recipe._describe_to_dispatcher())
                self.number = recipe._number_in_graphs()
        self.former = entered.region
        entered.region = self
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the former region; the outermost region updates the scales that its layers have used."""
        entered.region = self.former
        if self.former is not None:
            for used in self.used:
                self.former.use(*used)
        elif torch.is_grad_enabled():
            left = self.used
            while left:
                number, _, ordered = left[0]
                alike = [used for used in left if used[0] == number and used[2] is ordered]
                left = [used for used in left if used[0] != number or used[2] is not ordered]
                handles = [handle for _, handle, _ in alike]
                torch.ops.te_fast.update_scales(handles, ordered, number)

    def use(self, number: int, handle: torch.Tensor, ordered: torch.Tensor) -> None:
        """Note scales to update when the outermost region ends, once for a layer that runs twice."""
        for _, known, _ in self.used:
            if known is handle:
                return
        self.used.append((number, handle, ordered))


def key_of_region() -> tuple[bool, int, int]:
    """Return whether layers quantise, the epoch of the region around the graph, and the inner region's recipe."""
    region = entered.region
    if region is not None:
        return region.enabled, 0, region.number
    if _around.calibrating:
        message = (
            "autocast(calibrating=True) records maxima outside of any graph; calibrate the model before "
            "it is compiled"
        )
        raise refusal(message)
    if _around.is_of_factory:
        raise refusal(_NO_FACTORIES)
    return _around.enabled, _around.epoch, 0


def recipe_of(number: int) -> Recipe:
    """Return the recipe that a graph refers to by number."""
    return _recipes[number]


@contextmanager
def _held(recipe: Recipe | None, *, enabled: bool) -> Iterator[None]:
    region = native.HeldRegion(recipe, enabled, False, False, None)
    try:
        yield
    finally:
        region.take_back()


def as_entered(region: tuple[bool, int, bool]) -> AbstractContextManager[None]:
    """Put a region in force while a call in it is described.

    The region is whether layers quantise, the number of its recipe, and whether the graph enters it.
    """
    enabled, number, is_inside = region
    if not is_inside:
        return nullcontext()
    return _held(_recipes[number] if enabled else None, enabled=enabled)
