"""Code that mypy must refuse or accept; `make lint` checks it, and nothing runs it.

An ignore that hides no error is an error (``warn_unused_ignores``), so that each ignore asserts a refusal of its line.
"""

import torch

import te_fast
import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling, Format, Recipe
from te_fast.convert_checkpoint import Report


def taken(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> te_fast.profiling.Report:
    recipe: Recipe = DelayedScaling(margin=1, fp8_format=Format.HYBRID, amax_compute_algo="max")
    layer = te.Linear(16, 16, bias=False, params_dtype=torch.bfloat16, device="cpu")
    with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group) as region:
        layer(x)
        same: te.autocast = region
    with same, te.autocast(recipe=Float8CurrentScaling()):
        return te_fast.profile(layer, x, rounds=3)


def converted(model: torch.nn.Module) -> Report:
    report = te_fast.convert(model, exclude=("head",))
    te_fast.convert.load_scaling_state(model, te_fast.convert.scaling_state(model))
    te_fast.convert_checkpoint(model.state_dict(), to="te_fast")
    print(report.converted, te_fast.convert.undo(model))
    return te_fast.convert_checkpoint.convert_file("own.pt", "other.pt")


def refused(x: torch.Tensor) -> None:
    te.autocast(recipe="delayed")  # type: ignore[arg-type]
    te.autocast(recipe=DelayedScaling)  # type: ignore[arg-type]
    te.autocast(recip=DelayedScaling())  # type: ignore[call-arg]
    te.autocast(enabled=DelayedScaling())  # type: ignore[arg-type]
    te.fp8_autocast(fp8_recipe="delayed")  # type: ignore[arg-type]
    DelayedScaling(history=16)  # type: ignore[call-arg]
    DelayedScaling(margin="1")  # type: ignore[arg-type]
    Float8CurrentScaling(fp8_format="hybrid")  # type: ignore[arg-type]
    te.Linear(16, 16, biass=True)  # type: ignore[call-arg]
    te.TransformerLayer(16, 16, 2, heads=2)  # type: ignore[call-arg]
    te.optimizers.FusedAdam([], rate=1e-3)  # type: ignore[call-arg]
    te_fast.convert(model=1)  # type: ignore[arg-type]
    te_fast.convert_checkpoint({}, to="torch")  # type: ignore[arg-type]
    te_fast.profile(layer=x)  # type: ignore[call-arg]
