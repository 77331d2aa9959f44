"""Whether cuBLASLt multiplies all experts in one call on a GPU: if its version is trusted, and a trial is right."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from te_fast.errors import TeFastError
from te_fast.runtime import native

#: Sizes of the trial. Its tiles are several for each multiprocessor.
_GROUPS, _ROWS, _N, _K = 16, 8192, 2048, 256
#: Groups of FP8 operands of a weight gradient begin at multiples of this.
_ALIGN = 128

#: What trials found, by GPU and type of the operands.
_found: dict[tuple[int, str], bool] = {}


def multiplies(index: int, operands: str) -> bool:
    """Tell whether cuBLASLt's product of groups is taken on a GPU.

    The first call for a GPU and a type tries the product, and waits for the GPU. While a graph is captured it cannot,
    and the answer is False.

    Parameters
    ----------
    index : int
        The GPU.
    operands : str
        ``"float16"``, ``"bfloat16"`` or ``"fp8"`` (one scale for each expert).
    """
    known = _found.get((index, operands))
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = native.cublas_multiplies_groups(index, operands) and is_right(index, operands)
        _found[index, operands] = known
    return known


# torch.compiler.assume_constant_result sets this attribute, too, but imports torch._dynamo.
multiplies._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_right(index: int, operands: str) -> bool:
    """Multiply groups of whole numbers, whose sums are exact, and compare with one product after the other."""
    from torch.utils._python_dispatch import _disable_current_modes

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.cuda.device(index))
        stack.enter_context(torch.autocast("cuda", enabled=False))
        stack.enter_context(torch.no_grad())
        stack.callback(torch.use_deterministic_algorithms, was_deterministic, warn_only=only_warned)
        torch.use_deterministic_algorithms(False)  # torch's own products might refuse
        trial = _Trial(torch.device("cuda", index), operands)
        try:
            right = [trial.by_rows(), *[trial.weight_gradient(add=add) for add in (False, True)]]
        except TeFastError:  # cuBLASLt refuses the product after all
            return False
    return all(right)


class _Trial:
    """Groups of rows with small whole numbers: one group is empty, one has a single row, some rows belong to none."""

    def __init__(self, device: torch.device, operands: str) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)
        self.in_fp8 = operands == "fp8"
        self.dtype = torch.float8_e4m3fn if self.in_fp8 else getattr(torch, operands)
        self.align = _ALIGN if self.in_fp8 else 1
        counts = [_ROWS // _GROUPS] * _GROUPS
        counts[1], counts[2], counts[5] = 0, 1, _ALIGN + 3
        self.splits = torch.tensor(counts, device=device)
        self.spans, start = [], 0
        for count in counts:
            self.spans.append(slice(start, start + count))
            start += -(-count // self.align) * self.align
        powers = [2.0 ** (group % 3 - 1) for group in range(_GROUPS)]
        self.factors = [1.0] * _GROUPS
        self.scales: list[torch.Tensor | None] = [None, None]
        if self.in_fp8:
            pair = powers, powers[::-1]
            self.scales = [torch.tensor(of, dtype=torch.float32, device=device) for of in pair]
            self.factors = [one * other for one, other in zip(*pair, strict=True)]

    def _numbers(self, *shape: int) -> torch.Tensor:
        drawn = torch.randint(-2, 3, shape, generator=self.generator, device=self.device)
        return drawn.float()

    def _full(self, value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=self.device)

    def _run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, gradient: bool, add: bool
    ) -> None:
        a, b = (
            (rows.T if gradient and self.in_fp8 else rows).to(self.dtype).contiguous()
            for rows in (a, b)
        )
        pair = ((a, self.scales[0]), (b, self.scales[1]))
        native.grouped_gemm(*pair, out, self.splits, None, gradient, add, False, self.align)

    def by_rows(self) -> bool:
        """Try ``y = x @ w[group].T``; other rows stay as they are."""
        x, w = self._numbers(_ROWS, _K), self._numbers(_GROUPS, _N, _K)
        y = self._full(0.5, _ROWS, _N)
        expected = y.clone()
        self._run(x, w, y, gradient=False, add=False)
        for span, matrix, factor in zip(self.spans, w, self.factors, strict=True):
            expected[span] = x[span] @ matrix.T * factor
        return torch.equal(y, expected)

    def weight_gradient(self, *, add: bool) -> bool:
        """Try ``dw[group] = dy.T @ x`` of the group's rows, or ``+=``."""
        dy, x, empty = self._numbers(_ROWS, _N), self._numbers(_ROWS, _K), self._full(1, _ROWS, 1)
        for span in self.spans:
            empty[span] = 0
        dy, x = (rows * (1 - empty) for rows in (dy, x))  # FP8 operands have zeros between groups
        first = 1.0 if add else 0.5
        dw = self._full(first, _GROUPS, _N, _K)
        self._run(dy, x, dw, gradient=True, add=add)
        expected = [
            dy[span].T @ x[span] * factor + (first if add else 0.0)
            for span, factor in zip(self.spans, self.factors, strict=True)
        ]
        return torch.equal(dw, torch.stack(expected))
