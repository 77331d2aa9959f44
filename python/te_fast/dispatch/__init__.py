"""The dispatcher for direct use: quantise, multiply, look at plans, count the launches of a forward.

These functions are the parts that the layers run on. Tensors on the CPU run on the host
backend, tensors on a GPU on torch's current stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_fast.dispatch.activations import (
    ActivationFunction,
    ActivationOutputs,
    activation,
    activation_backward,
    activation_outputs,
)
from te_fast.dispatch.checks import expect
from te_fast.dispatch.groups import (
    QuantizedGroups,
    Role,
    activation_groups,
    activation_groups_backward,
    check_recipe,
    quantize_groups,
)
from te_fast.dispatch.launches import (
    Launch,
    counters,
    inventory,
    plan_count,
    record,
    reset_counters,
    stage_times,
)
from te_fast.dispatch.norms import (
    NormFunction,
    NormGradients,
    NormOutputs,
    norm,
    norm_backward,
    norm_gradients,
    norm_outputs,
)
from te_fast.errors import DeviceError, DtypeError, ShapeError
from te_fast.recipe import Recipe
from te_fast.runtime import native
from te_fast.runtime.delayed import get_fp8_torch_dtype, native_recipe
from te_fast.runtime.inner_layers import drop_weight_caches

__all__ = [
    "ActivationFunction",
    "ActivationOutputs",
    "DeviceFacts",
    "Launch",
    "NormFunction",
    "NormGradients",
    "NormOutputs",
    "QuantizedGroups",
    "QuantizedOperand",
    "activation",
    "activation_backward",
    "activation_groups",
    "activation_groups_backward",
    "activation_outputs",
    "auto_pad",
    "counters",
    "cuda_driver_version",
    "dequantize",
    "device_facts",
    "drop_weight_cache",
    "gemm",
    "grouped_gemm",
    "inventory",
    "linear_forward",
    "load_kernels",
    "norm",
    "norm_backward",
    "norm_gradients",
    "norm_outputs",
    "plan_count",
    "quantize",
    "quantize_groups",
    "record",
    "release_memory",
    "reset_counters",
    "stage_times",
]


class DeviceFacts(NamedTuple):
    """Facts of a CUDA device, read once per device.

    See Also
    --------
    device_facts : Reads them.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.DeviceFacts._fields[0]
    'capability'
    """

    #: Compute capability, (major, minor).
    capability: tuple[int, int]
    #: Streaming multiprocessors.
    multiprocessors: int
    #: L2 cache, bytes.
    l2_bytes: int
    #: Shared memory that one block may take, bytes.
    shared_bytes: int


@dataclass(frozen=True)
class QuantizedOperand:
    """A quantised operand.

    Attributes
    ----------
    rowwise_data : torch.Tensor or None
        FP8 bytes (uint8) ``(rows, cols)``.
    rowwise_scale_inv : torch.Tensor or None
        FP32 inverse scales: ``(1,)`` per tensor, ``(ceil(cols/128), up4(rows))`` in 1x128 blocks,
        ``(ceil(rows/128), up4(ceil(cols/128)))`` in 128x128 blocks.
    columnwise_data : torch.Tensor or None
        FP8 bytes, transposed: ``(cols, rows rounded up to 16)``, the padding zero.
    columnwise_scale_inv : torch.Tensor or None
        As `rowwise_scale_inv` for the transposed tensor.
    dtype : torch.dtype
        torch.float8_e4m3fn or torch.float8_e5m2, the type of the bytes.
    block : int
        0: one scale, 1: 1x128, 2: 128x128.
    cols : int
        Columns of the tensor that was quantised.
    column_sums : torch.Tensor or None
        Sums of the columns, in the input's type.

    See Also
    --------
    quantize : Makes one.
    gemm : Takes two.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> from te_fast.common import recipe
    >>> x = dispatch.quantize(torch.ones(16, 32), recipe.Float8CurrentScaling())
    >>> x.rowwise_data.shape, x.dtype
    (torch.Size([16, 32]), torch.float8_e4m3fn)
    """

    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    dtype: torch.dtype
    block: int
    cols: int
    column_sums: torch.Tensor | None = None


def quantize(
    x: torch.Tensor,
    recipe: Recipe,
    *,
    role: Role = "input",
    rowwise: bool = True,
    columnwise: bool = False,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    column_sums: bool = False,
) -> QuantizedOperand:
    """Quantise a tensor to FP8 as an operand of a linear layer's GEMMs.

    Parameters
    ----------
    x : torch.Tensor
        float32, float16 or bfloat16 ``(..., cols)``, contiguous.
    recipe : Recipe
        Delayed, current or block scaling.
    role : {'input', 'weight', 'grad'}
        Which of the recipe's quantisations applies.
    rowwise, columnwise : bool
        Layouts to write.
    scale : torch.Tensor, optional
        One FP32 scale; delayed scaling needs it, and no other recipe takes one.
    amax : torch.Tensor, optional
        One FP32 value that is raised to the tensor's largest magnitude (delayed scaling).
    column_sums : bool
        Sum the columns in the same pass, as the gradient of a bias.

    Returns
    -------
    QuantizedOperand
        The bytes and inverse scales.

    Raises
    ------
    ShapeError, DtypeError, UnsupportedError
        If the tensor or the recipe does not fit.

    See Also
    --------
    dequantize : The way back.
    te_fast.pytorch.Quantizer : Makes tensors.

    Notes
    -----
    Elements are the saturating cast, to nearest even, of ``float(x) * scale``. Scales follow
    Transformer Engine's formulas (``common/recipe/recipe_common.cuh``).

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> from te_fast.common.recipe import Float8CurrentScaling
    >>> quantized = dispatch.quantize(torch.tensor([[1.0, -448.0]]), Float8CurrentScaling())
    >>> dispatch.dequantize(quantized).tolist()
    [[1.0, -448.0]]
    """
    check_recipe("quantize", recipe, scale, amax)
    form = native_recipe(recipe)
    parts = native.quantize(x, form, role, rowwise, columnwise, scale, amax, column_sums)
    block = {"input": 0, "weight": 1, "grad": 2}[role]
    blocks = recipe._describe().get("block", (0, 0, 0))
    dtype = get_fp8_torch_dtype(recipe, fprop_tensor=role != "grad")
    return QuantizedOperand(
        *parts[:4], dtype, blocks[block], x.shape[-1] if x.dim() else 1, parts[4]
    )


_FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def dequantize(
    tensor: QuantizedOperand,
    dtype: torch.dtype = torch.float32,
    *,
    columnwise: bool = False,
) -> torch.Tensor:
    """Return the values of a quantised tensor.

    Parameters
    ----------
    tensor : QuantizedOperand
        Bytes and inverse scales.
    dtype : torch.dtype
        float32, float16 or bfloat16.
    columnwise : bool
        Read the transposed layout; the result is transposed then, padding included.

    Returns
    -------
    torch.Tensor
        ``(rows, cols)``.

    Raises
    ------
    ShapeError
        If the tensor does not have the layout.
    DtypeError
        If it is no operand.

    See Also
    --------
    quantize : The way there.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> from te_fast.common import recipe
    >>> x = dispatch.quantize(torch.ones(16, 32), recipe.Float8CurrentScaling())
    >>> dispatch.dequantize(x).unique()
    tensor([1.])
    """
    if not isinstance(tensor, QuantizedOperand):
        message = f"dequantize: expected a QuantizedOperand, got {type(tensor).__name__}"
        raise DtypeError(message)
    data = tensor.columnwise_data if columnwise else tensor.rowwise_data
    scale_inv = tensor.columnwise_scale_inv if columnwise else tensor.rowwise_scale_inv
    if data is None or scale_inv is None:
        message = "dequantize: the tensor was not quantised in this layout"
        raise ShapeError(message)
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    name = _FP8_NAMES[tensor.dtype]
    native.dequantize(data, scale_inv, name, tensor.block, data.shape[-1], out)
    return out


def _operand(
    name: str, operand: torch.Tensor | QuantizedOperand, *, columnwise: bool, k_outermost: bool
) -> Any:
    if isinstance(operand, torch.Tensor):
        _check_layout(name, operand, given="columnwise", other="k_outermost", is_set=columnwise)
        return (operand, None, None, 0, k_outermost)
    if not isinstance(operand, QuantizedOperand):
        message = (
            f"gemm: {name} must be a tensor or a QuantizedOperand, got {type(operand).__name__}"
        )
        raise DtypeError(message)
    _check_layout(name, operand, given="k_outermost", other="columnwise", is_set=k_outermost)
    data = operand.columnwise_data if columnwise else operand.rowwise_data
    scale_inv = operand.columnwise_scale_inv if columnwise else operand.rowwise_scale_inv
    return (data, _FP8_NAMES[operand.dtype], scale_inv, operand.block + 1, False)


def _check_layout(name: str, operand: Any, *, given: str, other: str, is_set: bool) -> None:
    """Refuse an argument that says which layout the other kind of operand is read in."""
    if is_set:
        kind = type(operand).__name__
        message = (
            f"gemm: {name}_{given} does not apply to {name}, a {kind}; give {name}_{other} instead"
        )
        raise ShapeError(message)


def gemm(
    x: torch.Tensor | QuantizedOperand,
    w: torch.Tensor | QuantizedOperand,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    fast_accumulation: bool = False,
    exact: bool = False,
    x_columnwise: bool = False,
    w_columnwise: bool = False,
    x_k_outermost: bool = False,
    w_k_outermost: bool = False,
) -> torch.Tensor:
    """Compute ``out (+)= x · wᵀ + bias``.

    Parameters
    ----------
    x : torch.Tensor or QuantizedOperand
        ``(m, k)``; ``(k, m)`` with `x_k_outermost`.
    w : torch.Tensor or QuantizedOperand
        ``(n, k)``; ``(k, n)`` with `w_k_outermost`.
    out : torch.Tensor
        float32, float16 or bfloat16 ``(m, n)``, contiguous, in memory that no input has; overwritten, or
        added to.
    bias : torch.Tensor, optional
        ``(n,)``.
    accumulate : bool
        Add to `out`.
    fast_accumulation : bool
        Hopper's faster FP8 accumulation, which keeps fewer bits.
    exact : bool
        FP8 operands on the CPU: sum as Hopper's tensor cores do, with the same bits. It is slow.
        ``TE_FAST_EXACT=1`` asks for it everywhere.
    x_columnwise, w_columnwise : bool
        Take the transposed layout of a quantised operand.
    x_k_outermost, w_k_outermost : bool
        How a high-precision operand is stored.

    Returns
    -------
    torch.Tensor
        `out`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError, CudaError
        If the operands do not fit, or cuBLAS refuses the problem.

    See Also
    --------
    quantize : Makes the operands.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> from te_fast.common import recipe
    >>> x = dispatch.quantize(torch.ones(16, 32), recipe.Float8CurrentScaling())
    >>> w = dispatch.quantize(torch.ones(16, 32), recipe.Float8CurrentScaling(), role="weight")
    >>> dispatch.gemm(x, w, torch.empty(16, 16)).shape
    torch.Size([16, 16])
    """
    native.gemm(
        _operand("x", x, columnwise=x_columnwise, k_outermost=x_k_outermost),
        _operand("w", w, columnwise=w_columnwise, k_outermost=w_k_outermost),
        out,
        bias,
        accumulate,
        fast_accumulation,
        exact,
    )
    return out


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    splits: torch.Tensor,
    *,
    a_scale_inv: torch.Tensor | None = None,
    b_scale_inv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    weight_gradient: bool = False,
    accumulate: bool = False,
    fast_accumulation: bool = False,
    align: int = 1,
) -> torch.Tensor:
    """Multiply the rows of every group by a matrix of its own, in one launch.

    The rows of group ``e`` begin at the sum of the splits before it, each rounded up to `align`. The host does not read
    `splits`. If they count more rows than `a` has, the missing rows are left out.

    Parameters
    ----------
    a : torch.Tensor
        ``(rows, k)``. For a weight gradient ``(rows, n)``, or in FP8 its transpose.
    b : torch.Tensor
        ``(groups, n, k)``. For a weight gradient ``(rows, k)``, or in FP8 its transpose. An FP8 weight
        gradient has the groups at multiples of 128 rows and zeros between them.
    out : torch.Tensor
        float32, float16 or bfloat16 ``(rows, n)``, ``(groups, n, k)`` for a weight gradient; contiguous, in
        memory that no input has. Rows of no group stay as they are.
    splits : torch.Tensor
        int64 ``(groups,)``, on the device of the others.
    a_scale_inv, b_scale_inv : torch.Tensor, optional
        Inverse scales of FP8 operands, float32: ``(groups,)``; or those of blocks,
        ``(ceil(k / 128), pitch >= rows)`` and ``(groups, ceil(n / 128), ceil(k / 128) rounded up to 4)``; for a
        weight gradient ``(rows / 128, n rounded up to 4)`` and ``(rows / 128, k rounded up to 4)``.
    bias : torch.Tensor, optional
        ``(groups, n)``, added before `out` is rounded.
    weight_gradient : bool
        Sum over each group's rows: ``out[e] = a[rows of e].T @ b[rows of e]``.
    accumulate : bool
        Add to `out` (weight gradients). Groups without rows leave it as it is; else they store zeros.
    fast_accumulation : bool
        Hopper's faster FP8 accumulation, which keeps fewer bits.
    align : int
        Multiple at which groups begin: 1, or a multiple of 16.

    Returns
    -------
    torch.Tensor
        `out`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, LayoutError, UnsupportedError, CudaError
        If the operands do not fit, or the device has no kernel for them.

    See Also
    --------
    quantize_groups : Makes its operands.
    gemm : One product.

    Examples
    --------
    The first row belongs to the first matrix, the others to the second:

    >>> import torch
    >>> from te_fast import dispatch
    >>> a, b = torch.ones(3, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
    >>> dispatch.grouped_gemm(a, b, torch.empty(3, 2), torch.tensor([1, 2]))
    tensor([[1., 1.],
            [2., 2.],
            [2., 2.]])
    """
    native.grouped_gemm(
        (a, a_scale_inv),
        (b, b_scale_inv),
        out,
        splits,
        bias,
        weight_gradient,
        accumulate,
        fast_accumulation,
        align,
    )
    return out


def linear_forward(
    layer: torch.nn.Module,
    x: torch.Tensor,
    is_first_microbatch: bool | None = None,  # noqa: FBT001
) -> torch.Tensor:
    """Run a layer's forward natively, past ``nn.Module.__call__`` and its hooks.

    Parameters
    ----------
    layer : te_fast.pytorch.Linear
        The layer.
    x : torch.Tensor
        ``(..., in_features)``.
    is_first_microbatch : bool, optional
        As in :meth:`te_fast.pytorch.Linear.forward`.

    Returns
    -------
    torch.Tensor
        ``(..., out_features)``.

    Raises
    ------
    DtypeError
        If `layer` is another object.
    ShapeError, DeviceError, StateError, CudaError
        As the layer's call.

    See Also
    --------
    te_fast.pytorch.Linear : The layer.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast import dispatch
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> dispatch.linear_forward(layer, torch.ones(16, 32)).shape
    torch.Size([16, 32])
    """
    if getattr(layer, "_program", None) is None:
        message = f"linear_forward: expected a layer of te_fast, got {type(layer).__name__}"
        raise DtypeError(message)
    result: torch.Tensor = native.layer_forward(layer, x, is_first_microbatch)
    return result


def drop_weight_cache(layer: torch.nn.Module) -> None:
    """Forget the quantised weights of a layer, an op, or all that a module holds; the next forward quantises again.

    Needed only after writes that torch does not count (``weight.data.mul_()``, a kernel outside of torch): such writes
    do not change the version that the cache compares.

    Parameters
    ----------
    layer : torch.nn.Module
        A layer, an op, or a module that holds some, or that :func:`te_fast.convert` has converted.

    Raises
    ------
    DtypeError
        If it is no module.

    See Also
    --------
    release_memory : Scratch memory.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast import dispatch
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> dispatch.drop_weight_cache(layer)
    """
    expect("drop_weight_cache", torch.nn.Module, layer=layer)
    drop_weight_caches(layer)


def release_memory() -> None:
    """Free scratch memory and workspaces on all devices; calls allocate them again when needed.

    Waits for the devices; other threads run meanwhile.

    See Also
    --------
    inventory : What there is.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.release_memory()
    """
    native.release_memory()


def load_kernels(device: int | str | torch.device = 0) -> int:
    """Load every kernel onto a device now, instead of at its first use.

    The driver may wait for the device during a load. This function lets other threads run meanwhile, but a layer's call
    that loads a kernel does not. So a process whose threads drive several devices should load all kernels before its
    first collective.

    Parameters
    ----------
    device : int, str or torch.device, default = 0
        The device; one without an index is the first.

    Returns
    -------
    int
        The number of kernels.

    Raises
    ------
    CudaError
        Without a usable driver or device.
    UnsupportedError
        Where te_fast was built without CUDA, or for other GPUs.
    DeviceError
        If it is no CUDA device.

    See Also
    --------
    release_memory : Gives memory back.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.load_kernels()  # doctest: +SKIP
    """
    return int(native.load_kernels(_ordinal(device, "load_kernels")))


def _ordinal(device: int | str | torch.device, op: str) -> int:
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        message = f"{op}: expected a CUDA device, got {device!r}"
        raise DeviceError(message) from None
    if chosen.type != "cuda":
        message = f"{op}: expected a CUDA device, got {chosen}"
        raise DeviceError(message)
    return chosen.index or 0


def device_facts(device: int | str | torch.device = 0) -> DeviceFacts:
    """Return the facts of a CUDA device, cached per device.

    Parameters
    ----------
    device : int, str or torch.device, default = 0
        The device; one without an index is the first.

    Raises
    ------
    CudaError
        Without a usable driver or device.
    DeviceError
        If it is no CUDA device.

    See Also
    --------
    inventory : What the dispatcher holds there.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.device_facts(0).capability  # doctest: +SKIP
    (9, 0)
    """
    return DeviceFacts(*native.device_facts(_ordinal(device, "device_facts")))


def cuda_driver_version() -> int:
    """Return the CUDA version of the driver, 13000 for 13.0.

    Raises
    ------
    CudaError
        Without a usable driver.

    See Also
    --------
    device_facts : Facts of a device.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.cuda_driver_version()  # doctest: +SKIP
    13000
    """
    return int(native.cuda_driver_version())


def auto_pad(enabled: bool = True) -> bool:  # noqa: FBT001, FBT002
    """Take inputs with any number of rows in FP8, padding inside, instead of raising.

    Parameters
    ----------
    enabled : bool
        Whether to.

    Returns
    -------
    bool
        The former setting.

    See Also
    --------
    te_fast.pytorch.Fp8Padding : Pads the splits of grouped inputs.

    Examples
    --------
    >>> import torch
    >>> import te_fast
    >>> import te_fast.pytorch as te
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> former = te_fast.auto_pad(True)
    >>> with te.autocast():
    ...     y = layer(torch.ones(5, 32))
    >>> y.shape, te_fast.auto_pad(former)
    (torch.Size([5, 32]), True)
    """
    return bool(native.set_auto_pad(bool(enabled)))
