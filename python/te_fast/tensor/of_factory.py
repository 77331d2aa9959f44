"""The regions in which layers run under a :class:`CustomRecipe`: each by the recipe that the factory gives it."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from te_fast.errors import UnsupportedError
from te_fast.recipe import CustomRecipe, Recipe
from te_fast.recipe.identity import Identity, identity_of
from te_fast.recipe.roles import DelayedScalingRequest
from te_fast.runtime import native, scale_tape
from te_fast.runtime.autocast import prepare_recipe
from te_fast.runtime.compiling import is_in_graph
from te_fast.tensor.answers import Answer, LinearRoles, content_of, settings_of, shown
from te_fast.tensor.of_recipe import quantizer_of

#: What a factory gave to an owner.
_known: WeakKeyDictionary[Any, _Given] = WeakKeyDictionary()
#: The same of the modules that fuse the layers within.
_shared: WeakKeyDictionary[Any, _Shared] = WeakKeyDictionary()
#: Such modules whose last forward has called the layers one by one, since a factory gave them different recipes.
_apart: WeakSet[Any] = WeakSet()


class _Thread(threading.local):
    #: Whether modules call their layers one by one, as in the forward that is repeated.
    calls_layers = False


_thread = _Thread()


class _Given(NamedTuple):
    """The recipe of an owner, and the factory and override that it follows from."""

    factory: Identity
    override: str | None
    recipe: Recipe | None
    #: Answers for the last output and the first input's gradient.
    output: Any
    grad_input: Any


#: A module, the name of a module in it, and that module.
_Link = tuple[weakref.ref[Any], str, weakref.ref[Any]]


class _Shared(NamedTuple):
    """The recipe of all layers within a module, if it is one, and the modules that were asked."""

    factory: Identity
    override: str | None
    links: list[_Link]
    agree: bool
    recipe: Recipe | None

    def holds(self) -> bool:
        """Tell whether the module still consists of these modules."""
        for module, name, child in self.links:
            owner = module()
            if owner is None or owner._modules.get(name) is not child():
                return False
        return True


def own_region(
    owner: Any, *, fp8_output: bool = False, fp8_grad: bool = False
) -> _OwnRegion | None:
    """Return the region of the recipe that the factory in force gives to an owner; None without a factory in force.

    Parameters
    ----------
    owner : TransformerEngineBaseModule or OperationFuser
        Has `_linear_roles()`, the roles of its linear operations, and `_state_name()`, its name in messages.
    fp8_output, fp8_grad : bool
        The call returns a result in FP8.

    Raises
    ------
    UnsupportedError, ArgumentError
        As of :func:`own_recipe`, and if the factory gives another quantizer for such a result than the recipe has.
    """
    if not native.autocast_is_of_factory():
        return None
    recipe, group = native.autocast_objects()
    given = _given(owner, recipe)
    if fp8_output:
        _check_result(owner, given, is_grad=False)
    if fp8_grad:
        _check_result(owner, given, is_grad=True)
    return _OwnRegion(given.recipe, group)


def _check_result(owner: Any, given: _Given, *, is_grad: bool) -> None:
    """Raise if a factory gives another quantizer for a result in FP8 than the owner's recipe has."""
    own, answer = given.recipe, given.grad_input if is_grad else given.output
    if own is None or (own.delayed() and isinstance(answer, DelayedScalingRequest)):
        return
    kind = own._scaling
    if not own.delayed():
        role = "grad" if is_grad else "input"
        made = quantizer_of(own, role, None, 0, rowwise=True, columnwise=True)
        if settings_of(answer) == settings_of(made):
            return
        kind = f"{type(made).__name__} of {made.dtype.name}"
    option, what = ("fp8_grad", "the input's gradient") if is_grad else ("fp8_output", "the output")
    got = shown(answer) if answer is not None else "no quantizer"
    message = (
        f"{owner._state_name()}: {option}=True quantises {what} by the layer's recipe ({kind}), and the factory of "
        f"the CustomRecipe gives {got}; give the same for its role, or leave {option} at False"
    )
    raise UnsupportedError(message)


def in_shared_region(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a module that fuses the layers within run in their region, if a factory gives all of them one recipe.

    Parameters
    ----------
    forward : Callable
        The module's forward.
    """

    @functools.wraps(forward)
    def in_region(self: Any, *arguments: Any, **options: Any) -> Any:
        if is_in_graph():
            return forward(self, *arguments, **options)
        if native.autocast_is_of_factory():
            recipe, group = native.autocast_objects()
            shared = _shared_of(self, recipe)
            if shared.agree:
                _apart.discard(self)
                with _OwnRegion(shared.recipe, group):
                    return forward(self, *arguments, **options)
            _apart.add(self)
        elif _apart and self in _apart:
            if scale_tape.is_repeating():
                with _calling_layers():
                    return forward(self, *arguments, **options)
            _apart.discard(self)
        return forward(self, *arguments, **options)

    return in_region


@contextmanager
def _calling_layers() -> Iterator[None]:
    former, _thread.calls_layers = _thread.calls_layers, True
    try:
        yield
    finally:
        _thread.calls_layers = former


def may_fuse() -> bool:
    """Tell whether a module may run its layers as one program; not if they may have different recipes."""
    return not (_thread.calls_layers or native.autocast_is_of_factory())


def _shared_of(module: Any, recipe: CustomRecipe) -> _Shared:
    factory, override = identity_of(recipe.qfactory), recipe.backward_override
    known = _shared.get(module)
    if (
        known is not None
        and known.factory is factory
        and known.override == override
        and known.holds()
    ):
        return known
    owners = [part for part in module.modules() if _has_linears(part)]
    # Other modules may change, since they have no recipe.
    links: list[_Link] = [
        (weakref.ref(part), name, weakref.ref(child))
        for part in module.modules()
        for name, child in part._modules.items()
        if child is not None and any(map(_has_linears, child.modules()))
    ]
    recipes = [own_recipe(owner, recipe) for owner in owners]
    contents = [content_of(own) for own in recipes]
    # Attention itself refuses a recipe that asks for FP8 in it.
    agree = (
        bool(recipes)
        and contents == contents[:1] * len(contents)
        and not (recipe.fp8_dpa or recipe.fp8_mha)
    )
    made = _shared[module] = _Shared(factory, override, links, agree, recipes[0] if agree else None)
    return made


def _has_linears(module: Any) -> bool:
    roles: list[LinearRoles] = getattr(module, "_linear_roles", list)()
    return any([asked.weight.module_type for asked in roles])


class _OwnRegion:
    """A region within that of the factory: quantises by a recipe, or runs in high precision.

    The first FP8 layer in any of these is the first of the outer region, whose end updates scales.
    """

    __slots__ = ("_group", "_inner", "_recipe")

    def __init__(self, recipe: Recipe | None, group: Any) -> None:
        self._recipe = recipe
        self._group = group
        self._inner: Any = None

    def __enter__(self) -> None:
        enabled, calibrates, is_graph, is_first, *_ = native.autocast_region()
        is_quantised = self._recipe is not None
        flags = enabled and is_quantised, calibrates and is_quantised, is_graph
        self._inner = native.HeldRegion(self._recipe, *flags, self._group)
        native.autocast_set_first(is_first)

    def __exit__(self, *exception: object) -> None:
        is_first = native.autocast_region()[3]
        self._inner.take_back()
        native.autocast_set_first(is_first)


def own_recipe(owner: Any, recipe: Recipe | None) -> Recipe | None:
    """Return the recipe that a factory gives to an owner; None for high precision. Other recipes return as they are.

    The factory is called once for each operand, and again if another factory comes.

    Parameters
    ----------
    owner : TransformerEngineBaseModule or OperationFuser
        As of :func:`own_region`.
    recipe : Recipe, optional
        Has the factory, if it is a :class:`CustomRecipe`.

    Raises
    ------
    UnsupportedError
        If the quantizers of the owner's operands are not those of one recipe.
    ArgumentError
        If the factory returns no quantizer.
    """
    return _given(owner, recipe).recipe if isinstance(recipe, CustomRecipe) else recipe


def _given(owner: Any, recipe: CustomRecipe) -> _Given:
    factory, override = identity_of(recipe.qfactory), recipe.backward_override
    known = _known.get(owner)
    if known is None or known.factory is not factory or known.override != override:
        answer = Answer(owner._state_name(), recipe.qfactory, override)
        found = answer.recipe_of(owner._linear_roles())
        if found is not None:
            prepare_recipe(found)
        known = _known[owner] = _Given(factory, override, found, answer.output, answer.grad_input)
    return known


def forget(owner: Any) -> None:
    """Let the factory be asked again for an owner, whose roles have changed."""
    _known.pop(owner, None)
