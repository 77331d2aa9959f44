"""Grouped products by plain torch in FP64, and ragged operands with poison in all memory that must not be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def starts_of(splits: list[int], align: int, rows: int) -> list[tuple[int, int]]:
    """First row and rows of every group, cut at the end of the memory."""
    spans, start = [], 0
    for split in splits:
        length = max(0, min(split, rows - start))
        spans.append((start, length))
        start = min(start + up(length, align), rows)
    return spans


def fp8_values(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str
) -> torch.Tensor:
    """Random FP8 numbers of many magnitudes."""
    spread = torch.randint(-4, 3, shape, generator=generator, device=device)
    values = torch.randn(shape, generator=generator, device=device) * torch.exp2(spread.float())
    return values.to(dtype)


def scales_of(shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    """Powers of two, as the default recipes make them."""
    return torch.exp2(torch.randint(-6, 3, shape, generator=generator, device=device).float())


@dataclass
class Problem:
    """Operands as `te_fast.dispatch.grouped_gemm` takes them, and the same operands in FP64."""

    kind: str  # "rows" or "weight_gradient"
    splits: list[int]
    rows: int
    n: int
    k: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    scaling: str  # "none", "tensor" or "block"
    align: int
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        make = torch.Generator(self.device).manual_seed(self.seed)
        rows, n, k, groups = self.rows, self.n, self.k, len(self.splits)
        self.spans = starts_of(self.splits, self.align, rows)
        self.counts = torch.tensor(self.splits, dtype=torch.int64, device=self.device)
        fp8 = self.scaling != "none"
        forward = self.kind == "rows"

        def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if fp8:
                return fp8_values(shape, dtype, make, self.device)
            return torch.randn(shape, generator=make, device=self.device).to(dtype)

        self.a = values((rows, k if forward else n), self.a_dtype)
        self.b = values((groups, n, k) if forward else (rows, k), self.b_dtype)
        inside = torch.zeros(rows, dtype=torch.bool, device=self.device)
        for start, length in self.spans:
            inside[start : start + length] = True
        self.inside = inside
        # Rows of no group hold zeros where an FP8 weight gradient needs them, else poison.
        pad = 0.0 if fp8 and not forward else float("nan")
        ends = [start + up(length, BLOCK) for start, length in self.spans if length]
        last = max(ends, default=0)
        for operand in [self.a] if forward else [self.a, self.b]:
            poisoned = operand.float()
            poisoned[~inside] = pad
            if not forward:
                poisoned[last:] = float("nan")
            operand.copy_(poisoned)
        self.a_scale = self.b_scale = None
        self.a_exact, self.b_exact = self.a.double(), self.b.double()
        if self.scaling == "tensor":
            self.a_scale, self.b_scale = (
                scales_of((groups,), make, self.device),
                scales_of((groups,), make, self.device),
            )
        elif self.scaling == "block" and forward:
            blocks = -(-k // BLOCK)
            pitch = up(rows, 4)
            self.a_scale = scales_of((blocks, pitch), make, self.device)
            self.a_scale[:, :rows][:, ~inside] = float("nan")
            self.a_scale[:, rows:] = float("nan")
            self.b_scale = scales_of((groups, -(-n // BLOCK), up(blocks, 4)), make, self.device)
            self.b_scale[:, :, blocks:] = float("nan")
            self.a_exact *= self.a_scale[:, :rows].t().repeat_interleave(BLOCK, 1)[:, :k].double()
            square = (
                self.b_scale[:, :, :blocks].repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
            )
            self.b_exact *= square[:, :n, :k].double()
        elif self.scaling == "block":
            strips = -(-rows // BLOCK)
            self.a_scale = scales_of((strips, up(n, 4)), make, self.device)
            self.b_scale = scales_of((strips, up(k, 4)), make, self.device)
            self.a_exact *= self.a_scale[:, :n].repeat_interleave(BLOCK, 0)[:rows].double()
            self.b_exact *= self.b_scale[:, :k].repeat_interleave(BLOCK, 0)[:rows].double()
        if fp8 and not forward:
            self.a, self.b = self.a.t().contiguous(), self.b.t().contiguous()

    def expected(
        self, out: torch.Tensor, bias: torch.Tensor | None = None, *, accumulate: bool = False
    ) -> torch.Tensor:
        """The expected contents of `out`, in FP64."""
        result = out.double()
        for group, (start, length) in enumerate(self.spans):
            rows = slice(start, start + length)
            factor = 1.0
            if self.scaling == "tensor":
                assert self.a_scale is not None
                assert self.b_scale is not None
                factor = (self.a_scale[group].double() * self.b_scale[group].double()).item()
            if self.kind == "rows":
                product = self.a_exact[rows] @ self.b_exact[group].t() * factor
                result[rows] = product if bias is None else product + bias[group].double()
            elif length or not accumulate:
                product = self.a_exact[rows].t() @ self.b_exact[rows] * factor
                result[group] = result[group] + product if accumulate else product
        return result

    def magnitude(self) -> torch.Tensor:
        """The sums of the products' magnitudes, which bound the errors of rounding."""
        absolute = Problem(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        absolute.a_exact, absolute.b_exact = self.a_exact.abs(), self.b_exact.abs()
        shape = (self.rows, self.n) if self.kind == "rows" else (len(self.splits), self.n, self.k)
        return absolute.expected(torch.zeros(shape, dtype=torch.float64, device=self.device))
