"""Autocast regions. Entering and leaving one are native; Python checks and describes its recipe."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import DtypeError
from te_fast.recipe import Recipe
from te_fast.runtime import delayed, native, scale_tape
from te_fast.runtime.delayed import native_recipe
from te_fast.runtime.global_state import autocast_state, default_recipe
from te_fast.runtime.support import check_recipe_support, kind_of_device

if TYPE_CHECKING:
    from typing_extensions import Self

# Kinds of recipes that the device supports; if GPUs differ, with the kind of device.
_supported: set[tuple[str, tuple[int, int] | None]] = set()


def _check_support(recipe: Recipe) -> None:
    """Raise unless the current device can run a recipe; checked once per kind of recipe and device."""
    kind = recipe._scaling, kind_of_device()
    if kind in _supported:
        return
    check_recipe_support(recipe)
    _supported.add(kind)
    if kind[1] is not None:
        autocast.__enter__ = _enter_checked  # type: ignore[assignment, method-assign]


def _enter_checked(region: autocast) -> autocast:
    """Enter a region if GPUs differ: the recipe may have been checked only for another device."""
    native.AutocastRegion.__enter__(region)
    enabled, calibrating, *_ = native.autocast_region()
    if enabled or calibrating:
        try:
            _check_support(native.autocast_objects()[0])
        except BaseException:
            region.__exit__(None, None, None)
            raise
    return region


def prepare_recipe(recipe: Recipe | None) -> Recipe:
    """Describe a recipe to the dispatcher, once it is known to run here."""
    if recipe is None:
        recipe = default_recipe()
    if not isinstance(recipe, Recipe):
        message = (
            "autocast: recipe must be an object of a class of te_fast.common.recipe, got "
            f"{recipe!r}"
        )
        raise DtypeError(message)
    _check_support(recipe)
    native_recipe(recipe)
    return recipe


def _update(without_grad: bool) -> None:
    """Update the forward scales at the end of a region.

    A region that a recomputation enters again has no maxima of its own. Those that are due are of other forwards.
    """
    trains = torch.is_grad_enabled() or scale_tape.is_to_be_repeated()
    if (without_grad or trains) and not scale_tape.is_second():
        delayed.update_scales(forward=True)


native.autocast_callbacks(prepare_recipe, _update)


class autocast(native.AutocastRegion):
    """Run layers in low precision.

    Parameters
    ----------
    enabled : bool, default = True
        Quantise.
    calibrating : bool, default = False
        Record absolute maxima for delayed scaling even if layers do not quantise, and update the scales from them.
    recipe : Recipe, optional
        The recipe; by default the device's default recipe.
    amax_reduction_group : torch.distributed.ProcessGroup, optional
        Ranks that the maxima of delayed scaling are reduced over; all by default.
    _graph : bool, default = False
        The region is part of a graph whose wrapper updates the scales.

    Notes
    -----
    Delayed scaling updates forward scales when the outermost region ends, if gradients are enabled
    there, and backward scales when the first FP8 layer of the region has finished its backward.
    A region that an exception leaves updates nothing; the next one updates for both.

    Each thread has its own regions. A thread that has entered none uses the region of another thread. An update of
    delayed scaling covers the layers of all threads.

    See Also
    --------
    te_fast.common.recipe : the recipes.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.common.recipe import Float8CurrentScaling
    >>> layer = te.Linear(32, 16, device="cpu")
    >>> region = te.autocast(recipe=Float8CurrentScaling())
    >>> with region:
    ...     y = layer(torch.ones(16, 32))
    >>> layer.fp8, layer.fp8_meta["recipe"].float8_current_scaling()
    (True, True)
    """

    __slots__ = ()

    if TYPE_CHECKING:
        # The constructor is native.
        def __new__(  # noqa: D102
            cls,
            enabled: bool = True,
            calibrating: bool = False,
            recipe: Recipe | None = None,
            amax_reduction_group: torch.distributed.ProcessGroup | None = None,
            _graph: bool = False,
        ) -> Self: ...

    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in (
                ("enabled", True),
                ("calibrating", False),
                ("recipe", None),
                ("amax_reduction_group", None),
                ("_graph", False),
            )
        ]
    )


def _warn_of_fp8_autocast() -> None:
    message = "fp8_autocast is deprecated: use autocast(recipe=..., amax_reduction_group=...)"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


# A trace cannot look into warnings.warn, and runs this instead.
_warn_of_fp8_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """Return an :class:`autocast`; deprecated, with the older argument names.

    Parameters
    ----------
    enabled, calibrating, _graph : bool
        As in :class:`autocast`.
    fp8_recipe : Recipe, optional
        ``recipe`` of :class:`autocast`.
    fp8_group : torch.distributed.ProcessGroup, optional
        ``amax_reduction_group`` of :class:`autocast`.

    See Also
    --------
    autocast : What to call instead.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     with te.fp8_autocast(enabled=True):
    ...         y = te.Linear(32, 32, device="cpu")(torch.ones(16, 32))
    >>> y.shape
    torch.Size([16, 32])
    """
    _warn_of_fp8_autocast()
    return autocast(
        enabled=enabled,
        calibrating=calibrating,
        recipe=fp8_recipe,
        amax_reduction_group=fp8_group,
        _graph=_graph,
    )


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Make layers and operations whose weights are quantised tensors, without a copy in high precision.

    Parameters
    ----------
    enabled : bool, default = True
        Whether to.
    recipe : Recipe, optional
        Recipe of the weights, and of the regions that they are used in; the default recipe by default.
    preserve_high_precision_init_val : bool, default = False
        Keep each weight as it was initialised, on the CPU, for master weights: ``get_high_precision_init_val()`` of the
        parameter returns it, ``clear_high_precision_init_val()`` frees it.

    Raises
    ------
    DeviceError
        If the device cannot run the recipe.

    See Also
    --------
    autocast : In which such layers run.

    Notes
    -----
    Weights have both layouts. If gradients are disabled, they have only the row layout, in half the memory.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> with te.quantized_model_init():
    ...     layer = te.Linear(32, 32, device="cpu")
    >>> type(layer.weight).__name__
    'Float8Tensor'
    """
    recipe = prepare_recipe(recipe) if enabled else None
    names = ("fp8_parameters", "high_precision_init_val", "model_recipe")
    former = [getattr(autocast_state, name) for name in names]
    wanted = (bool(enabled), bool(preserve_high_precision_init_val), recipe)
    for name, value in zip(names, wanted, strict=True):
        setattr(autocast_state, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, former, strict=True):
            setattr(autocast_state, name, value)


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Any:
    """Return a :func:`quantized_model_init`; deprecated.

    Parameters
    ----------
    enabled, preserve_high_precision_init_val : bool
        As in :func:`quantized_model_init`.
    recipe : Recipe, optional
        As in :func:`quantized_model_init`.

    See Also
    --------
    quantized_model_init : What to call instead.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     with te.fp8_model_init():
    ...         layer = te.Linear(32, 32, device="cpu")
    >>> type(layer.weight).__name__
    'Float8Tensor'
    """
    message = "fp8_model_init is deprecated: use quantized_model_init"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
