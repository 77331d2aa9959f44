"""The recipe that a :class:`CustomRecipe`'s factory gives to one layer or operation.

A factory names a quantizer for each operand. te_fast's programs quantise all operands of their linear operations by
one recipe, so the quantizers of a layer must be those of one recipe; layers may differ. An `IdentityQuantizer` for all
operands means high precision.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from te_fast.errors import ArgumentError, RecipeError, UnsupportedError
from te_fast.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    QParams,
    Recipe,
)
from te_fast.recipe.identity import Identity, identity_of
from te_fast.recipe.roles import DelayedScalingRequest, QuantizerRole
from te_fast.runtime import native, scale_tape
from te_fast.runtime.autocast import prepare_recipe
from te_fast.runtime.compiling import is_in_graph
from te_fast.tensor.blockwise import Float8BlockQuantizer
from te_fast.tensor.dtypes import DType
from te_fast.tensor.float8 import Float8CurrentScalingQuantizer
from te_fast.tensor.of_recipe import quantizer_of
from te_fast.tensor.passthrough import HybridQuantizer, IdentityQuantizer

Kind = Literal["linear", "grouped_linear", ""]
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


class LinearRoles(NamedTuple):
    """What a factory is asked for one linear operation; None where the reader of a tensor is unknown."""

    input: QuantizerRole
    weight: QuantizerRole
    grad_output: QuantizerRole
    #: The others, whose quantizers `fp8_output` and `fp8_grad` would use.
    output: QuantizerRole | None = None
    grad_input: QuantizerRole | None = None


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


class _Operand(NamedTuple):
    """The quantizers of an operand; None for high precision."""

    rows: Any
    columns: Any
    source: str


def linear_roles(kind: Kind, name: str) -> LinearRoles:
    """Return what a factory is asked for a linear operation.

    Parameters
    ----------
    kind : {'linear', 'grouped_linear', ''}
        The operation; empty for tensors that no linear operation reads.
    name : str
        Its name; empty without one.
    """
    operands = LinearRoles._fields[:3] if kind else ("",) * 3
    return LinearRoles(*[QuantizerRole(kind, operand, name) for operand in operands])


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
    shown = own._scaling
    if not own.delayed():
        role = "grad" if is_grad else "input"
        made = quantizer_of(own, role, None, 0, rowwise=True, columnwise=True)
        if _settings(answer) == _settings(made):
            return
        shown = f"{type(made).__name__} of {made.dtype.name}"
    option, what = ("fp8_grad", "the input's gradient") if is_grad else ("fp8_output", "the output")
    got = _shown(answer) if answer is not None else "no quantizer"
    message = (
        f"{owner._state_name()}: {option}=True quantises {what} by the layer's recipe ({shown}), and the factory of "
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
    contents = [_content(own) for own in recipes]
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


def own_recipe(owner: Any, recipe: CustomRecipe) -> Recipe | None:
    """Return the recipe that a factory gives to an owner; None for high precision.

    The factory is called once for each operand, and again if another factory comes.

    Parameters
    ----------
    owner : TransformerEngineBaseModule or OperationFuser
        As of :func:`own_region`.
    recipe : CustomRecipe
        Has the factory.

    Raises
    ------
    UnsupportedError
        If the quantizers of the owner's operands are not those of one recipe.
    ArgumentError
        If the factory returns no quantizer.
    """
    return _given(owner, recipe).recipe


def _given(owner: Any, recipe: CustomRecipe) -> _Given:
    factory, override = identity_of(recipe.qfactory), recipe.backward_override
    known = _known.get(owner)
    if known is None or known.factory is not factory or known.override != override:
        answer = _Answer(owner._state_name(), recipe.qfactory, override)
        found = answer.recipe_of(owner._linear_roles())
        if found is not None:
            prepare_recipe(found)
        known = _known[owner] = _Given(factory, override, found, answer.output, answer.grad_input)
    return known


def forget(owner: Any) -> None:
    """Let the factory be asked again for an owner, whose roles have changed."""
    _known.pop(owner, None)


class _Answer:
    """What a factory answers for one owner."""

    def __init__(self, name: str, factory: Any, override: str | None) -> None:
        self._name = name
        self._factory = factory
        self._override = override
        self.output: Any = None
        self.grad_input: Any = None

    def recipe_of(self, linears: Sequence[LinearRoles]) -> Recipe | None:
        """Return the recipe of all linear operations."""
        given = [LinearRoles(*map(self._asked, roles)) for roles in linears]
        found = [self._of_linear(*both) for both in zip(linears, given, strict=True)]
        if not found:
            return None
        self.output, self.grad_input = given[-1].output, given[0].grad_input
        first, *others = found
        for roles, other in zip(linears[1:], others, strict=True):
            if _content(other) != _content(first):
                message = (
                    f"{_shown(other)} for {roles.weight} and {_shown(first)} for {linears[0].weight}, which run as one "
                    "program; give both one recipe, or make them separate modules"
                )
                raise self._unsupported(message)
        return first

    def _unsupported(self, message: str) -> UnsupportedError:
        return UnsupportedError(f"{self._name}: the factory of the CustomRecipe gives {message}")

    def _asked(self, role: QuantizerRole | None) -> Any:
        answer = self._factory(role)
        if answer is None:
            message = (
                f"{self._name}: the CustomRecipe qfactory returned None for {role}; return a Quantizer or a "
                "DelayedScalingRequest, and an IdentityQuantizer for high precision"
            )
            raise ArgumentError(message)
        return answer

    def _of_linear(self, roles: LinearRoles, given: LinearRoles) -> Recipe | None:
        x, weight = (
            self._operand(role, answer)
            for role, answer in ((roles.input, given.input), (roles.weight, given.weight))
        )
        # Without FP8 in backward, the gradient is not quantised.
        grad: _Operand | None = None
        override = self._override
        if override is None:
            grad = self._operand(roles.grad_output, given.grad_output)
            override = self._override_of(roles, x, weight, grad)
        if x.rows is None and weight.rows is None:
            return None
        if x.rows is None or weight.rows is None:
            shown = _shown(x.rows), _shown(weight.rows)
            message = f"{shown[0]} for {roles.input} and {shown[1]} for {roles.weight}; both must be in FP8"
            raise self._unsupported(message)
        rows_of_grad = None if override is not None or grad is None else grad.rows
        try:
            return self._built(roles, (x.rows, weight.rows, rows_of_grad), override)
        except RecipeError as error:
            message = (
                f"quantizers that no recipe has for {roles.weight.name or 'one layer'}: {error}"
            )
            raise self._unsupported(message) from error

    def _operand(self, role: QuantizerRole, answer: Any) -> _Operand:
        if isinstance(answer, HybridQuantizer):
            rows, columns = answer.rowwise_quantizer, answer.columnwise_quantizer
            return _Operand(
                self._checked(role, rows), self._checked(role, columns), answer.columnwise_source
            )
        checked = self._checked(role, answer)
        return _Operand(checked, checked, "original")

    def _checked(self, role: QuantizerRole, answer: Any) -> Any:
        """Return a quantizer or request that a recipe may have; None for high precision."""
        kind = type(answer)
        if kind is IdentityQuantizer:
            if answer.dtype is not None:
                message = f"an IdentityQuantizer of {answer.dtype} for {role}; only dtype=None is supported"
                raise self._unsupported(message)
            return None
        if kind is Float8CurrentScalingQuantizer and answer.with_amax_reduction:
            message = (
                f"a quantizer with_amax_reduction for {role}; leave it out, since layers that ranks share reduce "
                "maxima themselves"
            )
            raise self._unsupported(message)
        if kind not in (Float8CurrentScalingQuantizer, Float8BlockQuantizer, DelayedScalingRequest):
            message = (
                f"{kind.__name__} for {role}; supported are IdentityQuantizer, Float8CurrentScalingQuantizer, "
                "Float8BlockQuantizer, DelayedScalingRequest, and a HybridQuantizer of an FP8 quantizer by rows and an "
                "equal one or an IdentityQuantizer by columns"
            )
            raise self._unsupported(message)
        return answer

    def _override_of(
        self, roles: LinearRoles, x: _Operand, weight: _Operand, grad: _Operand
    ) -> str | None:
        """Return the precision of backward, if it is not that of forward."""
        columns = x.columns, weight.columns, grad.rows, grad.columns
        if all(part is None for part in columns):
            if x.rows is None:  # forward runs in high precision, too
                return None
            if x.source != weight.source:
                message = f"columns of {roles.input} and {roles.weight} from different sources"
                raise self._unsupported(message)
            return "high_precision" if x.source == "original" else "dequantized"
        for role, operand in zip(roles, (x, weight, grad), strict=False):
            is_one = _settings(operand.rows) == _settings(operand.columns)
            if not is_one or operand.rows is None or operand.source != "original":
                message = (
                    f"{_shown(operand.rows)} by rows and {_shown(operand.columns)} by columns ({operand.source}) for "
                    f"{role}; backward takes all operands in FP8, each by one quantizer, or all in high precision"
                )
                raise self._unsupported(message)
        return None

    def _built(
        self, roles: LinearRoles, rows: tuple[Any, Any, Any], override: str | None
    ) -> Recipe:
        x, weight, grad = rows
        given = [part for part in rows if part is not None]
        if len({type(part) for part in given}) != 1:
            shown = ", ".join(_shown(part) for part in given)
            message = (
                f"quantizers of several recipes for {roles.weight.name or 'one layer'} ({shown})"
            )
            raise self._unsupported(message)
        made: Any
        if isinstance(x, DelayedScalingRequest):
            if any(part != x for part in given):
                message = f"unequal requests for {roles.weight.name or 'one layer'}: {given}"
                raise self._unsupported(message)
            return DelayedScaling(
                x.margin,
                x.fp8_format,
                x.amax_history_len,
                x.amax_compute_algo,
                x.scaling_factor_compute_algo,
                x.reduce_amax,
                backward_override=override,
            )
        options: dict[str, Any] = {
            "fp8_format": self._format(roles, x, weight, grad),
            "backward_override": override,
        }
        if isinstance(x, Float8BlockQuantizer):
            dims = [part.block_scaling_dim for part in given]
            names = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
            made = Float8BlockScaling(**options, **dict(zip(names, dims, strict=False)))
        else:
            made = Float8CurrentScaling(**options)
        names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
        for name, part in zip(names, rows, strict=True):
            if part is not None:
                params = QParams(bool(part.force_pow_2_scales), float(part.amax_epsilon))
                setattr(made, name, params)
        return made

    def _format(self, roles: LinearRoles, x: Any, weight: Any, grad: Any) -> Format:
        e4m3, e5m2 = DType.kFloat8E4M3, DType.kFloat8E5M2
        kinds = x.dtype, weight.dtype, e5m2 if grad is None else grad.dtype
        if kinds == (e4m3, e4m3, e5m2):
            return Format.HYBRID
        if kinds == (e4m3,) * 3:
            return Format.E4M3
        shown = ", ".join(f"{role}: {kind.name}" for role, kind in zip(roles, kinds, strict=False))
        message = f"{shown}; inputs and weights must be E4M3, and gradients E4M3 or E5M2"
        raise self._unsupported(message)


def _content(own: Recipe | None) -> dict[str, Any] | None:
    """Return what decides how a recipe quantises."""
    return None if own is None else own._describe()


def _settings(answer: Any) -> tuple[Any, ...] | None:
    """Return what decides how a quantizer rounds."""
    if answer is None or isinstance(answer, DelayedScalingRequest):
        return None if answer is None else (answer,)
    fields = ("dtype", "force_pow_2_scales", "amax_epsilon", "block_scaling_dim")
    return (type(answer), *[getattr(answer, field, None) for field in fields])


def _shown(part: Any) -> str:
    if part is None:
        return "high precision"
    return "high precision" if isinstance(part, IdentityQuantizer) else type(part).__name__
