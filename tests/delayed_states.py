"""States of delayed scaling without a layer, and what a layer's forward does to them."""

import torch

from te_fast.common.recipe import DelayedScaling
from te_fast.runtime.delayed import DelayedScalingRecipeState


def make_state(recipe=None, *, mode="forward", tensors=3, group=None, **fields):
    """A state that takes part in updates, as it does after a forward."""
    recipe = recipe or DelayedScaling(amax_history_len=4, **fields)
    state = DelayedScalingRecipeState(
        recipe, mode=mode, num_quantizers=tensors, device="cpu", group=group
    )
    state.take_part()
    return state


def record(state, values):
    """Raise the live maxima, and mark the state as run."""
    live = state.amax_history[0]
    torch.maximum(live, torch.tensor(values, dtype=torch.float32), out=live)
    state.slots.mark_ran()
