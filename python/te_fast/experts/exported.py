"""A mixture of experts in ``torch.export``: one operator for the program that eager calls run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import TeFastError
from te_fast.graphs.refusal import Problem, problem_of, raise_problem
from te_fast.graphs.region import entered, key_of_region
from te_fast.graphs.traced import Traced
from te_fast.ops.common import autocast_dtype
from te_fast.runtime.compiling import is_any_autocast_enabled, is_exporting
from te_fast.tensor.primary import is_quantized

if TYPE_CHECKING:
    from te_fast.experts.block import MoE


def run(block: MoE, tokens: torch.Tensor) -> tuple[Any, Any, Any] | None:
    """Return the result, the logits and the numbers of the experts' tokens, of which the block may lack the last two.

    None if torch does not export, if gradients are wanted, or if the program does not take the call. Operations then
    run one by one, as in eager calls that the program does not take.

    Parameters
    ----------
    block : MoE
        The block.
    tokens : torch.Tensor
        ``(..., hidden_size)``.

    Raises
    ------
    UnsupportedError
        If a part of the program cannot be saved.
    """
    if not is_exporting() or torch.is_grad_enabled():
        return None
    from te_fast.graphs.operators import _kind_of

    autocast = autocast_dtype(tokens) if is_any_autocast_enabled() else None
    is_there, problem = block._prepare_exported(tokens.dtype, autocast, tokens.device)
    raise_problem(problem)
    if not is_there:
        return None
    enabled, _, recipe = key_of_region()
    params: list[list[Any]] = [[block.router]]
    for product in (block.experts[0], block.experts[2]):
        params += [list(parts) for parts in product._parts_of_parameters()]
    if not enabled:
        params = [[_dequantized(part) for part in parts] for parts in params]
    program: Any = block._mixture.routed
    kinds = tuple([_kind_of(parts) for parts in params])
    region = (enabled, recipe, entered.region is not None)
    text, problem = program.traced.exported(region, block.hidden_size, kinds)
    raise_problem(problem)
    scales = []
    if '"DelayedScaling"' in text:
        scales = [state._scale for state in program._delayed_states_of_linears(forward=True)]
    bias = block.expert_bias
    outs = torch.ops.te_fast.inference(
        tokens.reshape(-1, block.hidden_size),
        [] if bias is None else [bias],
        [part for parts in params for part in parts],
        scales,
        text,
    )
    logits = outs[1] if block.aux_loss_coeff != 0.0 else None
    return outs[0].view(tokens.shape), logits, None if bias is None else outs[-1]


def _dequantized(part: Any) -> Any:
    return part.dequantize() if is_quantized(part) else part


def prepare(
    block: MoE, dtype: torch.dtype, autocast: torch.dtype | None, device: torch.device
) -> tuple[bool, Problem | None]:
    """Make a block's program for an export; tell whether it takes tokens of a type. Runs once in a trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        with _disable_current_modes(), torch.no_grad():
            program = block._exported_program(dtype, autocast, device)
    except TeFastError as error:
        return False, problem_of(error)
    if program is not None and program.traced is None:
        program.traced = Traced(program.program, program, type(block).__name__)
    return program is not None, None
