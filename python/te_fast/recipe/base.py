"""Number formats, options, and the base class of recipes."""

from __future__ import annotations

import functools
import operator
import warnings
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeVar

from te_fast.errors import RecipeError

_BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")

# Keywords of older versions of Transformer Engine, with the values that are te_fast's behaviour.
_OLD_KEYWORDS: dict[str, Any] = {
    "interval": 1,
    "override_linear_precision": (False, False, False),
}

# Attributes of an instance that are derived from its fields.
_DERIVED = frozenset({"_cached_repr", "_native"})


class _FormatHelper(NamedTuple):
    """Largest values of a format in each direction."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Number formats of the quantised tensors.

    Attributes
    ----------
    E2M1 :
        All tensors in 4 bits.
    E4M3 :
        All tensors in E4M3.
    E5M2 :
        All tensors in E5M2.
    HYBRID :
        E4M3 in the forward pass, E5M2 for gradients.

    See Also
    --------
    Recipe : Has one.

    Examples
    --------
    >>> from te_fast.common.recipe import Format
    >>> Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd
    (448, 57344)
    """

    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclass(frozen=True)
class MMParams:
    """Options of a matrix product.

    Parameters
    ----------
    use_split_accumulator : bool, default = True
        Promote partial sums to FP32; ``False`` is the tensor cores' fast accumulation.

    See Also
    --------
    QParams : Of the casts.

    Examples
    --------
    >>> from te_fast.common import recipe
    >>> recipe.MMParams(use_split_accumulator=False)
    MMParams(use_split_accumulator=False)
    """

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Options of a quantisation.

    Parameters
    ----------
    power_2_scale : bool, default = False
        Round scales down to powers of two.
    amax_epsilon : float, default = 0.0
        Least absolute maximum that a scale is computed from.
    random_hadamard_transform : bool, default = False
        NVFP4 only.
    stochastic_rounding : bool, default = False
        NVFP4 only.
    fp4_2d_quantization : bool, default = False
        NVFP4 only.

    See Also
    --------
    MMParams : Of the products.

    Examples
    --------
    >>> from te_fast.common import recipe
    >>> recipe.QParams(power_2_scale=True).power_2_scale
    True
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def require(condition: bool, message: str) -> None:
    """Raise :class:`RecipeError` unless ``condition`` holds."""
    if not condition:
        raise RecipeError(message)


class Recipe:
    """Base of all recipes.

    The predicates are class methods, as in Transformer Engine.

    See Also
    --------
    te_fast.pytorch.autocast : Takes one.

    Examples
    --------
    >>> from te_fast.common import recipe
    >>> isinstance(recipe.Float8CurrentScaling(), recipe.Recipe)
    True
    """

    # The dispatcher's name of the kind.
    _scaling: ClassVar[str] = ""

    fp8_format: Format
    backward_override: str | None
    _cached_repr: str | None = None
    # The native form of the fields; assigning an attribute drops it.
    _native: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign, and drop values that were derived from the old one."""
        object.__setattr__(self, name, value)
        if name not in _DERIVED:
            object.__setattr__(self, "_cached_repr", None)
            object.__setattr__(self, "_native", None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave derived attributes out."""
        return {name: value for name, value in vars(self).items() if name not in _DERIVED}

    def __repr__(self) -> str:
        """List the fields that distinguish recipes."""
        if self._cached_repr is None:
            fields = ", ".join(
                f"{label}={getattr(value, 'name', value)}" for label, value in self._repr_items()
            )
            self._cached_repr = f"recipe_type={type(self).__name__}, {fields}"
        return self._cached_repr

    def _repr_items(self) -> list[tuple[str, Any]]:
        return [("format", self.fp8_format), ("backward_override", self.backward_override)]

    def _validate(self) -> None:
        """Raise :class:`RecipeError` if the fields contradict each other."""
        require(
            self.backward_override in _BACKWARD_OVERRIDES,
            f"{type(self).__name__}: backward_override (NVTE_BACKWARD_OVERRIDE) must be one of "
            f"None, 'high_precision' and 'dequantized', got {self.backward_override!r}",
        )
        require(
            isinstance(self.fp8_format, Format),
            f"{type(self).__name__}: fp8_format must be a Format, got {self.fp8_format!r}",
        )
        require(
            self.fp8_format is not Format.E5M2,
            f"{type(self).__name__}: Pure E5M2 training is not supported.",
        )
        require(
            self.fp8_format is not Format.E2M1,
            f"{type(self).__name__}: fp8_format must be E4M3 or HYBRID, got E2M1",
        )

    def __post_init__(self) -> None:
        """Check the fields."""
        self._validate()

    def _describe(self) -> dict[str, Any]:
        """Check the fields and return the recipe's native form."""
        self._validate()
        forward = Format.E4M3 if self.fp8_format is Format.HYBRID else self.fp8_format
        backward = Format.E5M2 if self.fp8_format is Format.HYBRID else self.fp8_format
        return {
            "scaling": self._scaling,
            "fwd": forward.name.lower(),
            "bwd": backward.name.lower(),
            "backward_override": self.backward_override,
        }

    def _number_in_graphs(self) -> int:
        """Return the number of the described content, which becomes a guard of a graph under trace."""
        # A number, also in a trace with dynamic=True, which would leave it open.
        return operator.index(self._native.number)

    def _describe_to_dispatcher(self) -> tuple[str, str] | None:
        """Describe the recipe to the dispatcher for regions in graphs; another module replaces this method.

        Returns class and message of an error, if there is one.
        """
        raise NotImplementedError

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4 block scaling."""
        return cls._scaling == "nvfp4"

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8 block scaling."""
        return cls._scaling == "mxfp8"

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is delayed scaling."""
        return cls._scaling == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is per-tensor current scaling."""
        return cls._scaling == "current"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether each tensor has one scale."""
        return cls._scaling in ("delayed", "current")

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is FP8 block scaling."""
        return cls._scaling == "block"

    @classmethod
    def custom(cls) -> bool:
        """Whether the user makes the quantizers."""
        return cls._scaling == "custom"


_Recipe = TypeVar("_Recipe", bound=Recipe)
# Megatron-LM also passes its layers' keywords to recipes, where they have no effect.
_KEYWORDS_OF_LAYERS = {"device", "params_dtype"}


def takes_any_keyword(cls: type[_Recipe]) -> type[_Recipe]:
    """Accept keywords that are not fields, as Transformer Engine does, and warn about them."""
    make: Any = cls.__init__
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(make)
    def init(self: _Recipe, *args: Any, **keywords: Any) -> None:
        others = {name: keywords.pop(name) for name in keywords.keys() - names}
        make(self, *args, **keywords)
        told = [
            name
            for name in others.keys() - _KEYWORDS_OF_LAYERS
            if others[name] != _OLD_KEYWORDS.get(name, others)
        ]
        if told:
            message = f"{type(self).__name__}: {', '.join(sorted(told))}: no such field, no effect"
            warnings.warn(message, UserWarning, stacklevel=2)

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls
