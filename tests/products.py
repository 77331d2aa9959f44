"""Products of matrices as they are launched: their types, and the operands of torch's."""

from __future__ import annotations

import re

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What cuBLAS writes besides the operands' own type, for 16- and 32-bit operands.
WIDE = "F32"


def check_types(launches):
    """Check that cuBLAS has the products in high precision among these launches; there is one at least."""
    products = [launch.problem for launch in launches if launch.problem]
    assert products
    for problem in products:
        x, w = re.findall(r"Operand { dtype: (\w+)", problem)
        (d,) = re.findall(r" d: (\w+), ldd", problem)
        assert x == w, problem
        assert d in (x, WIDE), problem


class Products(TorchDispatchMode):
    """Notes shapes and strides of the operands of torch's products."""

    def __init__(self):
        super().__init__()
        self.operands = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.operands.append([(x.shape, x.stride()) for x in args])
        return func(*args, **(kwargs or {}))
