"""Layers of one GEMM whose parameters may be split along dimension 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import ArgumentKeyError, DtypeError, ShapeError, StateError
from te_fast.layers.parameters import (
    Init,
    constant,
    held,
    initialise,
)
from te_fast.layers.parts import PartedLayer, concatenate
from te_fast.parallel.ranks import divided
from te_fast.runtime import native
from te_fast.runtime.arguments import check_sizes
from te_fast.runtime.calls import layer_call_method
from te_fast.runtime.collectives import mark_share
from te_fast.runtime.parts import joined
from te_fast.tensor.primary import is_quantized

if TYPE_CHECKING:
    Parts = tuple[str, ...] | dict[str, int] | None


def split_sizes(parameters_split: Parts, total: int, layer: str) -> dict[str, int] | None:
    """Return the parts' names, without trailing underscores, and sizes.

    Raises
    ------
    DtypeError
        If it is neither a tuple nor a dict, or its names are no strings.
    ShapeError
        If it is empty, or does not add up.
    """
    if parameters_split is None:
        return None
    if not isinstance(parameters_split, dict | tuple | list):
        got = type(parameters_split).__name__
        message = f"{layer}: parameters_split must be a tuple of names or a dict, got {got}"
        raise DtypeError(message)
    if not parameters_split:
        message = f"{layer}: parameters_split must name at least one part, got an empty one"
        raise ShapeError(message)
    if not all(isinstance(name, str) for name in parameters_split):
        given = list(parameters_split)
        message = f"{layer}: parameters_split must name the parts, sizes are the values of a dict; got {given}"
        raise DtypeError(message)
    if isinstance(parameters_split, dict):
        check_sizes(
            layer, **{f"parameters_split[{name!r}]": n for name, n in parameters_split.items()}
        )
        sizes = list(parameters_split.values())
    else:
        sizes = [total // len(parameters_split)] * len(parameters_split)
    if sum(sizes) != total or min(sizes) <= 0:
        message = f"{layer}: parameters_split must add up to out_features = {total}, got {sizes}"
        raise ShapeError(message)
    names = [name.rstrip("_") for name in parameters_split]
    if len(set(names)) != len(names):
        message = f"{layer}: parameters_split must name different parts, got {names}"
        raise ShapeError(message)
    return dict(zip(names, sizes, strict=True))


class SplitLinear(PartedLayer):
    """A layer of one GEMM, whose weight and bias may be split."""

    _FEATURES = "in_features"
    _HANDS_OUT_FP8 = True
    _LINEARS = ("weight",)

    in_features: int
    out_features: int
    weight: torch.Tensor
    bias: torch.Tensor
    use_bias: bool
    apply_bias: bool
    parallel_mode: str | None
    init_method: Init | None

    # The program -------------------------------------------------------------------------

    def _input_size(self) -> int:
        return self.in_features

    def _split_mode(self) -> str | None:
        return self.parallel_mode

    def _append_linears(
        self, program: native.Program, observe: Callable[[], None], *, biased: bool
    ) -> None:
        observe()
        sizes = self.in_features, self.out_features
        weights, biases = ([], []) if self._parts is None else (self.weight_names, self.bias_names)
        handle = self._handles["weight"]
        program.linear("linear", handle, self._parameters, "weight", *sizes, weights)
        if self.fuse_wgrad_accumulation and self._parts is not None:
            program.fuse_parts()
        if biased:
            program.bias("bias", self._parameters, "bias", self.out_features, biases)

    def _is_whole(self) -> bool:
        return self._parts is None

    def _used_parameters(
        self, is_first_microbatch: bool | None
    ) -> tuple[dict[str, torch.Tensor], int | None]:
        weight, version = self._weight(overwrite=is_first_microbatch is True)
        used = {name: getattr(self, name) for name in self._norm_names()} | {"weight": weight}
        return (used | {"bias": self._bias()} if self.apply_bias else used), version

    def _sizes_of_parameters(self) -> dict[str, tuple[int, ...]]:
        rows = [self.out_features] if self._parts is None else list(self._parts.values())
        weights = zip(self.weight_names, ((n, self.in_features) for n in rows), strict=True)
        biases = zip(self.bias_names, ((n,) for n in rows), strict=True)
        return dict(weights) | (dict(biases) if self.use_bias else {}) | self._sizes_of_norm()

    def _traced_names(self) -> tuple[tuple[str, ...], ...]:
        norms = [(name,) for name in self._norm_names()]
        kinds = (self.weight_names, self.bias_names) if self.apply_bias else (self.weight_names,)
        return (*norms, *[tuple(names) for names in kinds])

    def _returned_bias(self) -> torch.Tensor:
        return self._bias() if self.use_bias else getattr(self, self.bias_names[0])

    def _returned_bias_name(self) -> str:
        return self.bias_names[0]

    def _whole_weight(self) -> torch.Tensor:
        weight, _ = self._weight(overwrite=False)
        return weight.detach() if self._parts else weight

    # Parameters ----------------------------------------------------------------------------------

    def _divide_features(
        self, in_features: int, out_features: int, parallel_mode: str | None
    ) -> None:
        """Note the mode and this rank's sizes."""
        self.parallel_mode = parallel_mode
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = divided(self.name, "out_features", out_features, self.tp_size)
        elif parallel_mode == "row":
            self.in_features = divided(self.name, "in_features", in_features, self.tp_size)

    def _make_linear_parameters(self, parameters_split: Parts, options: dict[str, Any]) -> None:
        ranks = self.tp_size if self.parallel_mode == "column" else 1
        parts = split_sizes(parameters_split, self.out_features * ranks, self.name)
        if parts is not None:
            parts = {
                name: divided(self.name, f"the size of part {name!r}", size, ranks)
                for name, size in parts.items()
            }
        if self.primary_weights_in_fp8 and parts is not None and len(parts) > 1:
            message = (
                f"{self.name}: a weight of several parts (parameters_split) cannot be a quantised tensor; leave out "
                "quantized_model_init, or the parts"
            )
            raise StateError(message)
        self._parts = parts
        prefixes = [""] if parts is None else [f"{name}_" for name in parts]
        sizes = [self.out_features] if parts is None else list(parts.values())
        self.weight_names = [f"{prefix}weight" for prefix in prefixes]
        self.bias_names = [f"{prefix}bias" for prefix in prefixes]
        self._check_names_are_free(parameters_split)
        weight = torch.empty(self.out_features, self.in_features, **options)
        try:
            for name, part in zip(self.weight_names, weight.split(sizes), strict=True):
                self.register_parameter(name, torch.nn.Parameter(part))
        except KeyError as error:  # a dot, or an attribute of the class
            message = (
                f"{self.name}: parameters_split must name parts whose parameters <name>_weight a module can have, "
                f"got {list(parameters_split or ())}: {error.args[0]}"
            )
            raise ArgumentKeyError(message) from None
        if not self.use_bias:
            for name in self.bias_names:
                setattr(self, name, torch.empty(0, **options))
            return
        bias = torch.empty(self.out_features, **options)
        for name, part in zip(self.bias_names, bias.split(sizes), strict=True):
            self.register_parameter(name, torch.nn.Parameter(part))

    def _check_names_are_free(self, parameters_split: Parts) -> None:
        """Raise if a part's weight or bias has the name of another attribute, which it would replace."""
        for name in (*self.weight_names, *self.bias_names):
            if hasattr(self, name):
                message = (
                    f"{self.name}: parameters_split must name parts whose parameters <name>_weight and <name>_bias a "
                    f"module can have, got {list(parameters_split or ())}: attribute {name!r} already exists"
                )
                raise ArgumentKeyError(message)

    def _reset_linear(self) -> None:
        is_row = self.parallel_mode == "row"
        for name, weight in held(self, self.weight_names):
            initialise(self, weight, self.init_method, forks=True)
            self._quantize_weight(name)
            weight = getattr(self, name)
            mark_share(weight, True, dim=1 if is_row else 0, stride=1)
            if self.delay_wgrad_compute:
                weight.skip_backward_post_hook = True
        for _, bias in held(self, self.bias_names if self.use_bias else ()):
            initialise(self, bias, constant(0.0), forks=False)
            if is_row:
                bias.sequence_parallel = self.sequence_parallel
            elif self.parallel_mode is not None:
                mark_share(bias, True, dim=0, stride=1)

    def _has_parts(self) -> bool:
        return self._parts is not None

    def _linear_weights(self) -> tuple[str, ...]:
        return tuple(self.weight_names) if len(self.weight_names) == 1 else ()

    def _weight(self, *, overwrite: bool) -> tuple[torch.Tensor, int | None]:
        """Return the whole weight, and a version of concatenated parts."""
        if self._parts is None:
            weight = self._parameters.get("weight")  # a parametrised one is an attribute
            return self.weight if weight is None else weight, None
        parts = [getattr(self, name) for name in self.weight_names]
        if len(parts) == 1 and is_quantized(parts[0]):
            return parts[0], None
        return concatenate(parts, self, overwrite=overwrite)

    def _bias(self) -> torch.Tensor:
        if self._parts is None:
            return self.bias
        return joined([getattr(self, name) for name in self.bias_names])

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters; parameters on the meta device get memory first.

        Parameters
        ----------
        defer_init : bool, default = False
            Do nothing yet.
        """
        if defer_init:
            return
        self._reset_norm()
        self._reset_linear()
        self._drop_weight_cache()

    # Forward -------------------------------------------------------------------------------------

    # `layer(x)` enters here, without the cost of nn.Module.__call__ if there are no hooks.
    __call__ = layer_call_method

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Apply the layer.

        Parameters
        ----------
        inp : torch.Tensor
            ``(..., in_features)``, of the parameters' type unless under ``torch.autocast``. A quantised tensor is read
            as it is, and never written. Outside of FP8 regions, and for a norm, it is dequantised.
        is_first_microbatch : bool, optional
            True: quantise the weight and keep it. False: use the kept one. None: quantise it if it
            has changed. A kept weight is never used once the parameter has changed.
        fp8_output : bool, default = False
            Return a quantised tensor, in FP8 regions: :class:`Float8Tensor`, or :class:`Float8BlockwiseQTensor` under
            block scaling. It has the bytes that the next layer would make from a plain tensor; under delayed scaling
            the GEMM writes them, with the scale of the layer's output. If gradients are enabled, current and block
            scaling also write the column layout, for the next layer's weight gradient. A result without rows is a plain
            tensor.
        fp8_grad : bool, default = False
            The same for the input's gradient in backward. With a recipe's ``backward_override`` the gradient stays
            plain.

        Returns
        -------
        torch.Tensor or tuple
            ``(..., out_features)``; then, with `return_bias`, the bias; then, if the layer has
            `return_layernorm_output`, the norm's result.

        Raises
        ------
        StateError
            If the input is not quantised as the region's recipe quantises.
        ShapeError, DtypeError, DeviceError
            If the input does not fit; in FP8, if its rows are no multiple of 8 and
            :func:`te_fast.auto_pad` is off.
        """
        result: Any = native.layer_forward(self, inp, is_first_microbatch, fp8_output, fp8_grad)
        return result

    _called_forward = forward
