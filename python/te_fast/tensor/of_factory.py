"""The recipe that a :class:`CustomRecipe`'s factory gives to one layer or operation.

A factory names a quantizer for each operand. te_fast's programs quantise all operands of their linear operations by
one recipe, so the quantizers of a layer must be those of one recipe; layers may differ. An `IdentityQuantizer` for all
operands means high precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from te_fast.errors import ArgumentError, UnsupportedError
from te_fast.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    QParams,
    Recipe,
)
from te_fast.recipe.roles import DelayedScalingRequest, QuantizerRole
from te_fast.runtime import native
from te_fast.runtime.autocast import autocast
from te_fast.runtime.compiling import is_in_graph
from te_fast.runtime.global_state import autocast_state
from te_fast.tensor.blockwise import Float8BlockQuantizer
from te_fast.tensor.dtypes import DType
from te_fast.tensor.float8 import Float8CurrentScalingQuantizer
from te_fast.tensor.passthrough import HybridQuantizer, IdentityQuantizer

Kind = Literal["linear", "grouped_linear", ""]
#: What a factory gave to an owner.
_known: WeakKeyDictionary[Any, _Given] = WeakKeyDictionary()


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

    key: tuple[Any, ...]
    recipe: Recipe | None
    #: Answers for the last output and the first input's gradient.
    output: Any
    grad_input: Any


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


def own_region(owner: Any) -> autocast | None:
    """Return the region of the recipe that the factory in force gives to an owner; None without a factory in force.

    Parameters
    ----------
    owner : TransformerEngineBaseModule or OperationFuser
        Has `_linear_roles()`, the roles of its linear operations, and `_state_name()`, its name in messages.

    Raises
    ------
    UnsupportedError, ArgumentError
        As of :func:`own_recipe`.
    """
    if not native.autocast_is_of_factory():
        return None
    recipe, group = native.autocast_objects()
    return _region_of(own_recipe(owner, recipe), group)


def _region_of(own: Recipe | None, group: Any) -> autocast:
    enabled, calibrates, is_graph, *_ = native.autocast_region()
    is_quantised = own is not None
    return _OwnRegion(
        enabled and is_quantised,
        calibrates and is_quantised,
        recipe=own,
        amax_reduction_group=group,
        _graph=is_graph,
    )


def in_shared_region(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a module that fuses the layers within run in their region, if a factory gives all of them one recipe.

    Parameters
    ----------
    forward : Callable
        The module's forward.
    """

    @functools.wraps(forward)
    def in_region(self: Any, *arguments: Any, **options: Any) -> Any:
        if is_in_graph() or not native.autocast_is_of_factory():
            return forward(self, *arguments, **options)
        recipe, group = native.autocast_objects()
        owners = [module for module in self.modules() if getattr(module, "_linear_roles", list)()]
        recipes = [own_recipe(owner, recipe) for owner in owners]
        if not owners or any(_content(own) != _content(recipes[0]) for own in recipes):
            return forward(self, *arguments, **options)
        with _region_of(recipes[0], group):
            return forward(self, *arguments, **options)

    return in_region


class _OwnRegion(autocast):
    """A region within that of the factory. The first FP8 layer in any of these is the first of the outer region."""

    __slots__ = ()

    def __exit__(self, *exception: object) -> None:
        is_first = native.autocast_region()[3]
        super().__exit__(*exception)
        if not is_first:
            autocast_state.is_first_fp8_module = False


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
    key = recipe.qfactory, recipe.backward_override
    known = _known.get(owner)
    if known is None or known.key != key:
        answer = _Answer(owner._state_name(), *key)
        found = answer.recipe_of(owner._linear_roles())
        known = _known[owner] = _Given(key, found, answer.output, answer.grad_input)
    return known.recipe


def forget(owner: Any) -> None:
    """Let the factory be asked again for an owner, whose roles have changed."""
    _known.pop(owner, None)


def check_outer(owner: Any, made: Any, *, is_grad: bool) -> None:
    """Raise if a factory gives another quantizer for a result in FP8 than the owner's recipe has.

    Parameters
    ----------
    owner : TransformerEngineBaseModule
        The layer that returns the result.
    made : Float8QuantizerBase
        The recipe's quantizer.
    is_grad : bool
        The result is the input's gradient.

    Raises
    ------
    UnsupportedError
        If the quantizers differ.
    """
    known = _known.get(owner)
    if known is None or known.recipe is not owner.fp8_meta["recipe"]:
        return
    answer = known.grad_input if is_grad else known.output
    given = known.recipe if isinstance(answer, DelayedScalingRequest) else answer
    agrees = given.delayed() if given is known.recipe else _settings(answer) == _settings(made)
    if not agrees:
        option, what = (
            ("fp8_grad", "the input's gradient") if is_grad else ("fp8_output", "the output")
        )
        message = (
            f"{owner._state_name()}: {option}=True quantises {what} by the layer's recipe ({made!r} of {made.dtype}), "
            f"and the factory of the CustomRecipe gives {answer!r}; give the same for its role, or leave {option} False"
        )
        raise UnsupportedError(message)


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
        return self._built(roles, (x.rows, weight.rows, rows_of_grad), override)

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
                    f"different quantizers by rows and columns for {role} ({_shown(operand.rows)} and "
                    f"{_shown(operand.columns)} of {operand.source}), or high precision for some of backward's operands"
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
        shown = ", ".join(f"{role}: {kind}" for role, kind in zip(roles, kinds, strict=False))
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
    return str(part) if isinstance(part, Recipe) else type(part).__name__
