"""The autocast state of the process under Transformer Engine's names.

The state itself is in the dispatcher, where layers read it. These classes read and write it there.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from te_fast.errors import StateError
from te_fast.recipe import DelayedScaling, Recipe
from te_fast.runtime import delayed, native
from te_fast.runtime.delayed import DelayedScalingRecipeState, native_recipe
from te_fast.runtime.support import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    get_default_recipe,
    kind_of_device,
)

# The recipe of regions without one (by kind of device if GPUs differ); made again if a user has changed it.
_defaults: dict[tuple[int, int] | None, Recipe] = {}


def default_recipe() -> Recipe:
    """Return the recipe of regions without one, the same object until a user changes it."""
    kind = kind_of_device()
    recipe = _defaults.get(kind)
    if recipe is None or recipe._native is None:
        recipe = _defaults[kind] = get_default_recipe()
        native_recipe(recipe)
    return recipe


def _flag(index: int, name: str, doc: str) -> property:
    """Return a property for a flag of the region in force."""
    return property(
        lambda _: bool(native.autocast_region()[index]),
        lambda state, value: state._set(**{name: value}),
        doc=doc,
    )


def _object(index: int, name: str, doc: str) -> property:
    """Return a property for an object of the region in force."""
    return property(
        lambda _: native.autocast_objects()[index],
        lambda state, value: state._set(**{name: value}),
        doc=doc,
    )


class FP8GlobalState:
    """The autocast state of the process under Transformer Engine's names.

    Attributes that concern the region in force are read from the dispatcher, and written to it.
    """

    __slots__ = (
        "autocast_arguments",
        "fp8_parameters",
        "fp8_tensors_recompute_buffer",
        "high_precision_init_val",
        "model_recipe",
        "skip_fp8_weight_update_tensor",
    )

    def __init__(self) -> None:
        self.autocast_arguments: dict[str, tuple[Recipe | None, Any]] = {}
        self.fp8_parameters = False
        self.fp8_tensors_recompute_buffer: list[deque[Any]] = []
        self.high_precision_init_val = False
        self.model_recipe: Recipe | None = None
        self.skip_fp8_weight_update_tensor: torch.Tensor | None = None

    def _set(self, **changes: Any) -> None:
        """Change the region in force."""
        enabled, calibrating, graph, *_ = native.autocast_region()
        recipe, group = native.autocast_objects()
        former = {"enabled": enabled, "calibrating": calibrating, "graph": graph}
        values = {**former, "recipe": recipe, "group": group, **changes}
        recipe = values["recipe"]
        if recipe is None and (values["enabled"] or values["calibrating"]):
            recipe = default_recipe()
        if recipe is not None:
            native_recipe(recipe)
        enabled, calibrating, graph = (bool(values[name]) for name in former)
        native.autocast_set(recipe, enabled, calibrating, graph, values["group"])

    fp8_enabled = _flag(0, "enabled", "Whether layers quantise.")
    fp8_calibration = _flag(1, "calibrating", "Whether layers record absolute maxima.")
    fp8_graph_capturing = _flag(
        2, "graph", "Whether the region is part of a graph whose wrapper updates the scales."
    )
    fp8_recipe = _object(0, "recipe", "Recipe of the region.")
    fp8_distributed_group = _object(1, "group", "Process group that maxima are reduced over.")

    @property
    def is_first_fp8_module(self) -> bool:
        """Whether no FP8 module has run in the outermost region."""
        return bool(native.autocast_region()[3])

    @is_first_fp8_module.setter
    def is_first_fp8_module(self, value: bool) -> None:
        native.autocast_set_first(value)

    @property
    def autocast_depth(self) -> int:
        """Number of regions entered."""
        return int(native.autocast_region()[4])

    @autocast_depth.setter
    def autocast_depth(self, value: int) -> None:
        native.autocast_set_depth(value)

    def _buffers(self, name: str) -> dict[str, list[torch.Tensor]]:
        buffers: dict[str, list[torch.Tensor]] = {}
        for forward in (True, False):
            for state in delayed.states(forward=forward):
                key = FP8GlobalStateManager.get_key_in_buffer(forward, state.recipe, state.group)
                tensor = state.amax_history[0] if name == "amax" else getattr(state, name)
                buffers.setdefault(key, []).append(tensor)
        return buffers

    @property
    def global_amax_buffer(self) -> dict[str, list[torch.Tensor]]:
        """Live maxima of all layers of delayed scaling."""
        return self._buffers("amax")

    @property
    def global_amax_history_buffer(self) -> dict[str, list[torch.Tensor]]:
        """Histories of all layers of delayed scaling."""
        return self._buffers("amax_history")

    @property
    def global_scale_buffer(self) -> dict[str, list[torch.Tensor]]:
        """Scales of all layers of delayed scaling."""
        return self._buffers("scale")


autocast_state = FP8GlobalState()

_RECOMPUTE = "global_fp8_buffer_pos_fwd_recompute"


def _delayed_state(fp8_meta: dict[str, Any]) -> DelayedScalingRecipeState | None:
    state = fp8_meta.get("scaling_fwd")
    return state if isinstance(state, DelayedScalingRecipeState) else None


def place_in_recompute_buffer(fp8_meta: dict[str, Any]) -> deque[Any]:
    """Return the kept scales of a layer's first phases of recomputation, after giving it an index."""
    buffer = autocast_state.fp8_tensors_recompute_buffer
    # A reset empties the buffer, but layers keep their indices.
    if fp8_meta.get(_RECOMPUTE, len(buffer)) >= len(buffer):
        fp8_meta[_RECOMPUTE] = len(buffer)
        buffer.append(deque())
    return buffer[fp8_meta[_RECOMPUTE]]


class FP8GlobalStateManager:
    """Transformer Engine's access to the autocast state.

    See Also
    --------
    autocast : What sets the state.
    is_fp8_available : Whether FP8 can run.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.quantization import FP8GlobalStateManager
    >>> with te.autocast():
    ...     print(FP8GlobalStateManager.is_fp8_enabled())
    True
    """

    quantization_state = autocast_state

    @classmethod
    def reset(cls) -> None:
        """Restore the state of a fresh process; living layers stay registered."""
        native.autocast_reset()
        FP8GlobalState.__init__(autocast_state)

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Set the flag by which a captured graph skips the quantisation of its weights.

        Replays read the flag on the device. A graph that was captured after the first call of this function quantises
        its weights if `skip` is false, as in the first microbatch, and uses the FP8 weights of an earlier replay if it
        is true.
        """
        if autocast_state.skip_fp8_weight_update_tensor is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            with torch.inference_mode(mode=False):
                flag = torch.empty(1, dtype=torch.float32, device=device)
            autocast_state.skip_fp8_weight_update_tensor = flag
        autocast_state.skip_fp8_weight_update_tensor.fill_(skip)

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> torch.Tensor | None:
        """Return the flag, or ``None`` if it was never set."""
        return autocast_state.skip_fp8_weight_update_tensor

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """Return whether FP8 can run, and why not."""
        return check_fp8_support()

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        """Return whether MXFP8 can run, and why not."""
        return check_mxfp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        """Return whether FP8 block scaling can run, and why not."""
        return check_fp8_block_scaling_support()

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        """Return whether NVFP4 can run, and why not."""
        return check_nvfp4_support()

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Return the key of a direction in a layer's ``fp8_meta``."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """Return the name of a direction."""
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        """Return the key under which Transformer Engine notes a layer's index in the buffers."""
        return "buffer_index_and_autocast_key"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe, fp8_group: Any) -> str:
        """Return the key of a bucket in the global buffers."""
        key = cls.get_unique_autocast_key(fp8_recipe, fp8_group)
        return f"{cls.get_fwd_bwd_key(forward)}_{key}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """Return the direction and the region of a bucket's key."""
        direction, _, rest = key.partition("_")
        return direction == "forward", rest

    @classmethod
    def get_unique_autocast_key(cls, recipe: Recipe | None = None, group: Any = None) -> str:
        """Return the properties that distinguish regions: recipe and group."""
        return f"{recipe!s}:{None if group is None else id(group)}"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Let a layer's scales take part in the next update of forward scales, after a replay has run the layer.

        Layers outside of graphs do this themselves. Gradients' scales need no such call:
        :meth:`reduce_and_update_fp8_tensors` updates all of them.

        Parameters
        ----------
        fp8_meta : dict
            The layer's ``fp8_meta``, with the recipe and group of the region.
        """
        state = _delayed_state(fp8_meta)
        if state is None or not isinstance(fp8_meta.get("recipe"), DelayedScaling):
            return
        state.use(fp8_meta["recipe"], fp8_meta.get("fp8_group"))
        state.take_part()
        state.slots.mark_ran()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return whether layers quantise."""
        return autocast_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Return whether layers record absolute maxima."""
        return autocast_state.fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Return whether layers are made with quantised parameters."""
        return autocast_state.fp8_parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Return whether such layers keep their parameters' initial values."""
        return autocast_state.high_precision_init_val

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Return whether a CUDA graph is being captured."""
        if autocast_state.fp8_graph_capturing:
            return True
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return ``True`` the first time that this is called in a region."""
        return bool(native.autocast_take_first())

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the region's recipe, or the default one."""
        return autocast_state.fp8_recipe or get_default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """Return the region's process group."""
        return autocast_state.fp8_distributed_group

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        """Return a snapshot for :meth:`set_autocast_state`."""
        enabled, calibrating, graph, is_first, *_ = native.autocast_region()
        return (
            enabled,
            calibrating,
            autocast_state.fp8_recipe,
            autocast_state.fp8_distributed_group,
            is_first,
            graph,
        )

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        """Restore a snapshot."""
        enabled, calibrating, recipe, group, is_first, graph = state
        autocast_state._set(
            enabled=enabled, calibrating=calibrating, recipe=recipe, group=group, graph=graph
        )
        native.autocast_set_first(is_first)

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: torch.Tensor, group: Any) -> None:
        """Reduce a tensor over a process group."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Update the scales of one direction of all layers of delayed scaling."""
        delayed.update_all(forward=forward)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Keep a layer's forward scales for the second phase of activation recomputation."""
        state = _delayed_state(fp8_meta)
        if state is None:
            return
        kept = [state.amax_history.clone(), state.scale.clone()]
        place_in_recompute_buffer(fp8_meta).append(kept)

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Switch to the scales that the first phase ran with.

        Raises
        ------
        StateError
            If :meth:`copy_forward_fp8_meta_tensors_for_recompute` has kept none, or all have been used.
        """
        state = _delayed_state(fp8_meta)
        if state is None:
            return
        kept = place_in_recompute_buffer(fp8_meta)
        if not kept:
            message = (
                "get_old_fp8_meta_tensors_for_recompute: no scales of a first phase are left; te_fast's layers take "
                "theirs back by themselves, others keep them by copy_forward_fp8_meta_tensors_for_recompute"
            )
            raise StateError(message)
        fp8_meta["updated_amax_history_fwd"] = state.amax_history.clone()
        fp8_meta["updated_scale_fwd"] = state.scale.clone()
        amax_history, scale = kept.popleft()
        state.load(scale, amax_history)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict[str, Any]) -> None:
        """Switch back to the scales from before :meth:`get_old_fp8_meta_tensors_for_recompute`."""
        state = _delayed_state(fp8_meta)
        if state is not None:
            state.load(fp8_meta["updated_scale_fwd"], fp8_meta["updated_amax_history_fwd"])
