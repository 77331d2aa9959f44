"""Print a hash of every output and gradient of the layers, for a comparison of two machines.

    make test-arm

The inputs are made of integers, and FP8 layers on a CPU compute with te_fast's own code. So both machines must give
equal bits.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import torch

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

LAYERS: dict[str, Callable[[torch.dtype], torch.nn.Module]] = {
    "Linear": lambda dtype: te.Linear(128, 64, params_dtype=dtype, device="cpu"),
    "LayerNormLinear": lambda dtype: te.LayerNormLinear(128, 64, params_dtype=dtype, device="cpu"),
    "LayerNormLinear RMSNorm": lambda dtype: te.LayerNormLinear(
        128, 64, normalization="RMSNorm", params_dtype=dtype, device="cpu"
    ),
    "LayerNormMLP gelu": lambda dtype: te.LayerNormMLP(128, 256, params_dtype=dtype, device="cpu"),
    "LayerNormMLP swiglu": lambda dtype: te.LayerNormMLP(
        128, 256, activation="swiglu", params_dtype=dtype, device="cpu"
    ),
}
RECIPES: list[type[Recipe]] = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of a linear congruence, in thousandths around zero: no library's random generator."""
    count = torch.Size(shape).numel()
    values, state = [], seed
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        values.append((state >> 8) % 2001 - 1000)
    return (torch.tensor(values, dtype=torch.float32).reshape(shape) / 1000).to(dtype)


def told(name: str, tensor: torch.Tensor) -> None:
    """Print the hash of a tensor's bytes."""
    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    print(name, hashlib.sha256(data).hexdigest()[:16])


def main() -> None:
    """Two steps of every layer under every recipe, in every type."""
    torch.set_num_threads(1)
    for (name, make), recipe, dtype in itertools.product(LAYERS.items(), RECIPES, DTYPES):
        layer = make(dtype)
        for index, parameter in enumerate(layer.parameters()):
            parameter.data.copy_(numbers(tuple(parameter.shape), dtype, index + 1))
        region = te.autocast(recipe=recipe())
        for step in range(2):
            x = numbers((48, 128), dtype, 100 + step).requires_grad_()
            with region:
                y = layer(x)
            y.backward(numbers(tuple(y.shape), dtype, 200 + step))
            case = f"{name}, {recipe.__name__}, {dtype}, step {step}:"
            told(f"{case} y", y)
            if x.grad is not None:
                told(f"{case} dx", x.grad)
            for key, parameter in layer.named_parameters():
                if parameter.grad is not None:
                    told(f"{case} d{key}", parameter.grad)
                parameter.grad = None


if __name__ == "__main__":
    main()
