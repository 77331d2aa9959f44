"""A model of Megatron-LM with its distributed optimizer: each rank has its own tokens and slices of master weights."""

from __future__ import annotations

from typing import Any


class Training:
    """A model and its distributed optimizer.

    Parameters
    ----------
    model : GPTModel
        The model.
    scene : dict
        With the recipe, ``param_gather`` and ``overlap``.
    """

    def __init__(self, model: Any, scene: dict[str, Any]) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        overlap = scene["overlap"]
        gathers = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            fp8_param_gather=scene["param_gather"],
            bucket_size=20000,
        )
        self.model = DistributedDataParallel(model.config, gathers, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
            fp8_recipe=scene["fp8"],
        )
        self.optimizer = get_megatron_optimizer(config, [self.model])

    def step(self, loss_of: Any) -> float:
        """Make a step as Megatron-LM's schedules do; return the loss."""
        from megatron.core.distributed import finalize_model_grads

        self.model.module.set_is_first_microbatch()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = loss_of(self.model)
        loss.backward()
        finalize_model_grads([self.model])
        done, _, _ = self.optimizer.step()
        assert done
        return float(loss)

    def state(self, *, is_loading: bool) -> dict[str, Any]:
        """Return the state that a checkpoint of all ranks holds."""
        if not is_loading and self.model.ddp_config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)
        model = self.model.module.sharded_state_dict()
        how = {"distrib_optim_sharding_type": "fully_reshardable"}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=how)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Any) -> None:
        """Write a checkpoint of all ranks."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self.state(is_loading=False), str(folder))

    def load(self, folder: Any) -> None:
        """Read one."""
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self.state(is_loading=True), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
