"""The linear operation with its bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast.errors import ArgumentError
from te_fast.ops.basic.basic_linear import BasicLinear, parallelism
from te_fast.ops.basic.bias import Bias
from te_fast.ops.basic.identity import AllReduce, ReduceScatter
from te_fast.ops.op import FusedOperation, FusibleOperation
from te_fast.parallel.checkpoint import Share
from te_fast.parallel.ranks import divided
from te_fast.runtime.arguments import check_sizes


class Linear(FusedOperation):
    """Apply ``y = x Wᵀ + b``: :class:`BasicLinear`, and :class:`Bias` unless ``bias=False``.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last dimension. In FP8 both are multiples of 16.
    bias : bool, default = True
        Have a bias, zero at first.
    device, dtype, tensor_parallel_mode, tensor_parallel_group, sequence_parallel, \
rng_state_tracker_function, accumulate_into_main_grad
        As of :class:`BasicLinear`. In a row-parallel operation each rank has its own bias; the result has their sum.

    Attributes
    ----------
    weight : torch.nn.Parameter
        The weight of the basic operation, which owns it.
    bias : torch.nn.Parameter or None
        The same.

    See Also
    --------
    te_fast.pytorch.Linear : The layer.
    BasicLinear : Without a bias.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch import ops
    >>> chain = ops.Sequential(ops.Linear(32, 64, device="cpu"), ops.GELU(), ops.Linear(64, 32, device="cpu"))
    >>> with te.autocast():
    ...     y = chain(torch.ones(16, 32))
    >>> y.shape
    torch.Size([16, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: torch.distributed.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        mode, size = parallelism("Linear", tensor_parallel_mode, tensor_parallel_group)
        is_row = mode == "row"
        linear = BasicLinear(
            divided("Linear", "in_features", in_features, size) if is_row else in_features,
            out_features,
            device=device,
            dtype=dtype,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
            # The result of a row-parallel operation is reduced after its bias.
            tensor_parallel_mode=None if is_row else mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
        )
        ops: list[FusibleOperation] = [linear]
        if bias:
            # In a row-parallel operation each rank adds its own bias before the sum, as in Transformer Engine.
            whole = out_features * size if is_row else out_features
            added = Bias(
                whole,
                device=device,
                dtype=dtype,
                tensor_parallel=mode is not None,
                tensor_parallel_group=tensor_parallel_group,
            )
            added._is_summed = is_row
            ops.append(added)
        if is_row:
            reduce = ReduceScatter if sequence_parallel else AllReduce
            ops.append(reduce(tensor_parallel_group))
        super().__init__(ops)
        self._bias_index = 1 if bias else None
        self.tensor_parallel_group = tensor_parallel_group
        self._is_row = is_row

    def _shares_of_parameters(self) -> dict[str, Share]:
        """Return which parameters ranks share, beside those that the operations know of."""
        if not self._is_row:
            return {}
        group = self.tensor_parallel_group
        return {
            "basic_ops.0.weight": Share(
                1, torch.distributed.group.WORLD if group is None else group
            )
        }

    @property
    def name(self) -> str:
        """The name that a :class:`CustomRecipe`'s factory is told; empty until it is set, before the first forward."""
        return str(getattr(self._owner("weight"), "name", ""))

    @name.setter
    def name(self, name: str) -> None:
        self._owner("weight").name = name

    @property
    def in_features(self) -> int:
        """Size of the input's last dimension."""
        return self._owner("weight").in_features

    @property
    def out_features(self) -> int:
        """Size of the output's last dimension."""
        return self._owner("weight").out_features

    @property
    def weight(self) -> torch.Tensor:
        """The weight ``(out_features, in_features)``."""
        return self._owner("weight").weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias ``(out_features,)``."""
        return None if self._bias_index is None else self._owner("bias").bias

    def _owner(self, name: str) -> Any:
        if name == "bias":
            if self._bias_index is None:
                message = "Linear: there is no bias to set; construct the operation with bias=True"
                raise ArgumentError(message)
            return self.basic_ops[self._bias_index]
        return self.basic_ops[0]

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Give a parameter to the basic operation that owns it."""
        if name not in ("weight", "bias"):
            super().register_parameter(name, param)
        elif param is not None or self._bias_index is not None:
            self._owner(name).register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Initialise weight and bias; parameters on the meta device get memory first."""
        for name in ("weight", "bias")[: 1 if self._bias_index is None else 2]:
            self._owner(name).reset_parameters()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # A checkpoint of torch.nn.Linear names the parameters without their owners.
        owners = {"weight": 0, "bias": self._bias_index}
        for name, index in owners.items():
            key = f"{prefix}basic_ops.{index}.{name}"
            if index is not None and prefix + name in state_dict and key not in state_dict:
                state_dict[key] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *rest)
