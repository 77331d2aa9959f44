"""Activation checkpointing, collectives and states of random numbers where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.parallel.fsdp import has_te_modules, prepare_te_modules_for_fsdp
from te_fast.pytorch._missing import missing
from te_fast.runtime.collectives import (
    allreduce,
    gather_along_first_dim,
    gather_split_1d_tensor,
    get_distributed_rank,
    get_distributed_world_size,
    reduce_scatter_along_first_dim,
    set_tensor_model_parallel_attributes,
    split_tensor_into_1d_equal_chunks,
)
from te_fast.runtime.recompute import (
    activation_recompute_forward,
    checkpoint,
    get_activation_recompute_contexts,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from te_fast.runtime.rng import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    set_all_rng_states,
)

__all__ = [
    "CudaRNGStatesTracker",
    "activation_recompute_forward",
    "allreduce",
    "checkpoint",
    "gather_along_first_dim",
    "gather_split_1d_tensor",
    "get_activation_recompute_contexts",
    "get_all_rng_states",
    "get_distributed_rank",
    "get_distributed_world_size",
    "graph_safe_rng_available",
    "has_te_modules",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "prepare_te_modules_for_fsdp",
    "reduce_scatter_along_first_dim",
    "set_all_rng_states",
    "set_tensor_model_parallel_attributes",
    "split_tensor_into_1d_equal_chunks",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
