"""Independent references of the FP8 recipes, in torch alone and in FP64 wherever rounding matters.

Nothing here uses te_fast: both backends are compared with these functions, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
TORCH_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
F32_MAX = torch.finfo(torch.float32).max


def to_fp8_bytes(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """FP8 bytes of FP32 values: saturating, to nearest even, every NaN as 0x7F."""
    clamped = values.float().clamp(-FP8_MAX[fmt], FP8_MAX[fmt])
    encoded = clamped.to(TORCH_FP8[fmt]).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(encoded, 0x7F), encoded)


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``float(x) * scale`` rounded once: the FP64 product of two FP32 numbers is exact."""
    return (x.double() * scale.double()).float()


def quantize_per_tensor(x: torch.Tensor, scale: torch.Tensor | float, fmt: str) -> torch.Tensor:
    """FP8 bytes of a tensor under one scale."""
    return to_fp8_bytes(
        _scaled(x, torch.as_tensor(scale, dtype=torch.float32, device=x.device)), fmt
    )


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude as FP32, NaN ignored, 0 for an empty tensor."""
    magnitudes = torch.where(x.isnan(), torch.zeros_like(x), x.abs()).float().flatten()
    return torch.cat([magnitudes, magnitudes.new_zeros(1)]).max()


def amax_to_scale(
    amax: torch.Tensor,
    fp8_max: float,
    *,
    eps: float = 0.0,
    pow2: bool = False,
    for_inf: float = F32_MAX,
) -> torch.Tensor:
    """Scale of an amax as the current and block recipes define it."""
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    usable = amax.isfinite() & (amax > 0)
    scale = (fp8_max / torch.where(usable, amax, torch.ones_like(amax)).double()).float()
    scale = torch.where(scale.isinf(), torch.full_like(scale, for_inf), scale)
    if pow2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(usable, scale, torch.ones_like(scale))


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """``1 / scale`` rounded once to FP32."""
    return (1.0 / scale.double()).float()


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(scale: torch.Tensor, last: int) -> torch.Tensor:
    out = scale.new_zeros(scale.shape[0], last)
    out[:, : scale.shape[1]] = scale
    return out


def _blocks(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Split ``x`` into ``(row blocks, rows, column blocks, cols)``, zero padded."""
    m, k = x.shape
    padded = x.new_zeros(_up(m, rows), _up(k, cols))
    padded[:m, :k] = x
    return padded.view(_up(m, rows) // rows, rows, _up(k, cols) // cols, cols)


def _block_scale(blocks: torch.Tensor, fmt: str, *, eps: float, pow2: bool) -> torch.Tensor:
    magnitudes = torch.where(blocks.isnan(), torch.zeros_like(blocks), blocks.abs()).float()
    amax = (
        magnitudes.amax(dim=(1, 3))
        if blocks.numel()
        else magnitudes.new_zeros(blocks.shape[0], blocks.shape[2])
    )
    return amax_to_scale(
        amax, FP8_MAX[fmt], eps=eps, pow2=pow2, for_inf=torch.finfo(blocks.dtype).max
    )


def quantize_1d(
    x: torch.Tensor, fmt: str, *, eps: float = 0.0, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rowwise 1 x 128: bytes ``(M, K)`` and ``scale_inv`` ``(ceil(K/128), up4(M))``.

    The columnwise layout of ``x`` is this function of ``x.t()``.
    """
    m, k = x.shape
    scale = _block_scale(_blocks(x, 1, 128), fmt, eps=eps, pow2=pow2)
    spread = scale.repeat_interleave(128, dim=1)[:, :k]
    return to_fp8_bytes(_scaled(x, spread), fmt), _padded(reciprocal(scale).t(), _up(m, 4))


def quantize_2d(
    x: torch.Tensor, fmt: str, *, eps: float = 0.0, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """128 x 128 blocks: bytes ``(M, K)`` and ``scale_inv`` ``(ceil(M/128), up4(ceil(K/128)))``."""
    m, k = x.shape
    scale = _block_scale(_blocks(x, 128, 128), fmt, eps=eps, pow2=pow2)
    spread = scale.repeat_interleave(128, dim=0)[:m].repeat_interleave(128, dim=1)[:, :k]
    return to_fp8_bytes(_scaled(x, spread), fmt), _padded(reciprocal(scale), _up(scale.shape[1], 4))


def column_sums(x: torch.Tensor, strips: Sequence[int] = ()) -> torch.Tensor:
    """Bias gradient in the order of summation that ``cuda/tile/column_sums.cuh`` documents, in the dtype of ``x``.

    ``strips`` are lengths in tiles of 128 rows; each tile is one by default, as on the host backend.
    """
    rows, cols = x.shape
    tiles = _blocks(x.float(), 128, 1).view(_up(rows, 128) // 128, 16, 8, cols)
    sums = []
    for strip in tiles.split(list(strips) or 1):
        patches = x.new_zeros(16, cols, dtype=torch.float32)
        for tile in strip:
            for i in range(8):
                patches = patches + tile[:, i]
        pairs = patches[0::2] + patches[1::2]
        total = pairs[0]
        for i in range(1, 8):
            total = total + pairs[i]
        sums.append(total)
    total = None
    for group in range(8):
        part = x.new_zeros(cols, dtype=torch.float32)
        for strip in sums[group::8]:
            part = part + strip
        total = part if total is None else total + part
    return total.to(x.dtype)


def delayed_update(
    history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: float,
    *,
    margin: float = 0.0,
    most_recent: bool = False,
    reduced: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next amax history ``[L, n]`` and scales ``[n]`` of delayed scaling (fused semantics)."""
    history, scale = history.clone(), scale.clone()
    for c in range(history.shape[1]):
        last = history[0, c].clone() if reduced is None or reduced[c] == 0 else reduced[c].clone()
        if last == 0:
            continue
        window = torch.cat([history[1:, c], last[None]])
        history[:, c] = window
        history[0, c] = 0
        amax = last if most_recent else amax_of(window)
        if amax.isfinite() and amax > 0:
            new = (
                torch.tensor(fp8_max * 2.0**-margin, dtype=torch.float32).double() / amax.double()
            ).float()
            scale[c] = F32_MAX if new.isinf() else new
    return history, scale


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, fmt: str, dtype: torch.dtype
) -> torch.Tensor:
    """Values of FP8 bytes under a ``scale_inv`` that broadcasts over them."""
    values = data.view(TORCH_FP8[fmt]).float()
    return _scaled(values, scale_inv.expand_as(values)).to(dtype)


def quantized_values(t, fmt, kind, *, transposed=False, scale=None):
    """``t`` rounded to FP8, in FP64: scaled per tensor, in 1x128 blocks along the contraction, or in 128x128 blocks."""
    t = t.detach()
    t = t.t().contiguous() if transposed else t
    if kind == "2d":
        bytes_, inverse = quantize_2d(t, fmt)
        blocks = inverse[:, : -(-t.shape[1] // 128)]
        spread = blocks.repeat_interleave(128, 0)[: t.shape[0]].repeat_interleave(128, 1)[
            :, : t.shape[1]
        ]
    elif kind == "1d":
        bytes_, inverse = quantize_1d(t, fmt)
        spread = inverse[:, : t.shape[0]].t().repeat_interleave(128, 1)[:, : t.shape[1]]
    else:
        scale = amax_to_scale(amax_of(t), FP8_MAX[fmt]) if scale is None else scale
        bytes_, spread = (
            quantize_per_tensor(t, scale, fmt),
            reciprocal(torch.as_tensor(scale)),
        )
    return bytes_.view(TORCH_FP8[fmt]).double() * spread.double()


class QuantizedLinear:
    """Products of quantised operands in FP64, differentiable, for chains in plain torch.

    Calls are told apart by their order within a step. Delayed scaling starts at scale 1. Each `update` sets the scales
    from the largest magnitudes so far, as with a window that holds all steps.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.maxima: dict[tuple[int, str], torch.Tensor] = {}
        self.scales: dict[tuple[int, str], torch.Tensor] = {}

    def __call__(self, x, weight, bias=None):
        y = _QuantizedProduct.apply(x, weight, self, self.calls)
        self.calls += 1
        return y if bias is None else y + bias

    def quantized(self, t, call, operand, *, transposed=False):
        """An operand, ``x``, ``w`` or ``g``, rounded to FP8."""
        t = t.detach().float()
        if self.name == "block":
            kind = "2d" if operand == "w" else "1d"
            return quantized_values(t, "e4m3", kind, transposed=transposed)
        scale = None
        if self.name == "delayed":
            key = call, operand
            amax = amax_of(t)
            self.maxima[key] = torch.maximum(amax, self.maxima.get(key, amax))
            scale = self.scales.get(key, torch.tensor(1.0))
        fmt = "e5m2" if operand == "g" else "e4m3"
        return quantized_values(t, fmt, "t", transposed=transposed, scale=scale)

    def update(self) -> None:
        """End a step."""
        self.calls = 0
        for (call, operand), amax in self.maxima.items():
            fmt = "e5m2" if operand == "g" else "e4m3"
            self.scales[call, operand] = amax_to_scale(amax, FP8_MAX[fmt])


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, linear, call):
        ctx.save_for_backward(x, weight)
        ctx.linear, ctx.call = linear, call
        rows = x.reshape(-1, x.shape[-1])
        y = linear.quantized(rows, call, "x") @ linear.quantized(weight, call, "w").t()
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        quantized, call = ctx.linear.quantized, ctx.call
        rows, g = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        dx = quantized(g, call, "g") @ quantized(weight, call, "w")
        dw = (
            quantized(g, call, "g", transposed=True)
            @ quantized(rows, call, "x", transposed=True).t()
        )
        return dx.reshape(x.shape).to(x.dtype), dw.to(weight.dtype), None, None
