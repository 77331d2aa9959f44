"""The recipe that the quantizers of a layer's operands are those of.

A :class:`CustomRecipe`'s factory names a quantizer for each operand. te_fast's programs quantise all operands of their
linear operations by one recipe, so the quantizers of a layer must be those of one recipe; layers may differ. An
`IdentityQuantizer` for all operands means high precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from te_fast.errors import ArgumentError, RecipeError, UnsupportedError
from te_fast.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    QParams,
    Recipe,
)
from te_fast.recipe.roles import DelayedScalingRequest, QuantizerRole
from te_fast.tensor.blockwise import Float8BlockQuantizer
from te_fast.tensor.dtypes import DType
from te_fast.tensor.float8 import Float8CurrentScalingQuantizer
from te_fast.tensor.hybrid_tensor import HybridQuantizer
from te_fast.tensor.identity_tensor import IdentityQuantizer

Kind = Literal["linear", "grouped_linear", ""]


class LinearRoles(NamedTuple):
    """What a factory is asked for one linear operation; None where the reader of a tensor is unknown."""

    input: QuantizerRole
    weight: QuantizerRole
    grad_output: QuantizerRole
    #: The others, whose quantizers `fp8_output` and `fp8_grad` would use.
    output: QuantizerRole | None = None
    grad_input: QuantizerRole | None = None


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


class Answer:
    """What a factory answers for one layer or group of operations.

    Parameters
    ----------
    name : str
        Its name in messages.
    factory : Callable
        The factory.
    override : str or None
        ``backward_override`` of the :class:`CustomRecipe`.

    Attributes
    ----------
    output, grad_input : Any
        Answers for the last output and the first input's gradient, after :meth:`recipe_of`.
    """

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
            if content_of(other) != content_of(first):
                message = (
                    f"{shown(other)} for {roles.weight} and {shown(first)} for {linears[0].weight}, which run as one "
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
            kinds = shown(x.rows), shown(weight.rows)
            message = f"{kinds[0]} for {roles.input} and {kinds[1]} for {roles.weight}; both must be in FP8"
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
            is_one = settings_of(operand.rows) == settings_of(operand.columns)
            if not is_one or operand.rows is None or operand.source != "original":
                message = (
                    f"{shown(operand.rows)} by rows and {shown(operand.columns)} by columns ({operand.source}) for "
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
            kinds = ", ".join(shown(part) for part in given)
            message = (
                f"quantizers of several recipes for {roles.weight.name or 'one layer'} ({kinds})"
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
        listed = ", ".join(f"{role}: {kind.name}" for role, kind in zip(roles, kinds, strict=False))
        message = f"{listed}; inputs and weights must be E4M3, and gradients E4M3 or E5M2"
        raise self._unsupported(message)


def content_of(own: Recipe | None) -> dict[str, Any] | None:
    """Return what decides how a recipe quantises."""
    return None if own is None else own._describe()


def settings_of(answer: Any) -> tuple[Any, ...] | None:
    """Return what decides how a quantizer rounds."""
    if answer is None or isinstance(answer, DelayedScalingRequest):
        return None if answer is None else (answer,)
    fields = ("dtype", "force_pow_2_scales", "amax_epsilon", "block_scaling_dim")
    return (type(answer), *[getattr(answer, field, None) for field in fields])


def shown(part: Any) -> str:
    """Return how messages name a quantizer, a recipe, or None for high precision."""
    if part is None:
        return "high precision"
    return "high precision" if isinstance(part, IdentityQuantizer) else type(part).__name__
