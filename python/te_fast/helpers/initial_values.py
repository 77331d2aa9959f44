"""Functions that initialise parameters in place, for `init_method` and its kin."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Init = Callable[[torch.Tensor], torch.Tensor]


def init_method_normal(sigma: float) -> Init:
    """Return a function that fills a tensor with normal values of mean 0.

    Parameters
    ----------
    sigma : float
        Standard deviation.

    Returns
    -------
    callable
        Takes a tensor of any shape, fills it and returns it.

    See Also
    --------
    scaled_init_method_normal : The same, smaller in deep models.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import init_method_normal
    >>> init_method_normal(0.0)(torch.ones(2))
    tensor([0., 0.])
    """

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.init.normal_(tensor, mean=0.0, std=sigma)

    return fill


def scaled_init_method_normal(sigma: float, num_layers: int) -> Init:
    """Return a function that fills a tensor with normal values for the last weight of a residual branch.

    Parameters
    ----------
    sigma : float
        Standard deviation in a model without depth.
    num_layers : int
        Layers of the model; the standard deviation is ``sigma / sqrt(2 * num_layers)``.

    Returns
    -------
    callable
        Takes a tensor of any shape, fills it and returns it.

    See Also
    --------
    init_method_normal : Without the layers.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import scaled_init_method_normal
    >>> scaled_init_method_normal(0.02, 8)(torch.empty(4, 2)).shape
    torch.Size([4, 2])
    """
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def init_method_constant(val: float) -> Init:
    """Return a function that fills a tensor with a number.

    Parameters
    ----------
    val : float
        The number.

    Returns
    -------
    callable
        Takes a tensor of any shape, fills it and returns it.

    See Also
    --------
    init_method_normal : Random values.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import init_method_constant
    >>> init_method_constant(0.5)(torch.empty(2))
    tensor([0.5000, 0.5000])
    """

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.init.constant_(tensor, val)

    return fill


def get_default_init_method() -> Init:
    """Return the function that fills weights where the user gives none: normal values of standard deviation 0.023.

    See Also
    --------
    init_method_normal : Another standard deviation.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import get_default_init_method
    >>> get_default_init_method()(torch.empty(3)).shape
    torch.Size([3])
    """
    return init_method_normal(0.023)
