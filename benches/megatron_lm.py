"""Megatron-LM on one GPU or several: tokens a second and losses, by the ``transformer_engine`` that can be imported.

    torchrun --nproc-per-node 1 benches/megatron_lm.py --alias --fp8 delayed --out benches/results/megatron_lm.json \
        [--layers 4 --seconds 40]

The long steps before training (imports, the model, its optimizer) and every training step are printed when they are
done. With ``--seconds`` training ends when that much time has passed since the start, after 8 steps at least.
For te_fast, te_fast_alias must be installed or on the path (``python/alias``); for Transformer Engine it must not.
The bench measures megatron-core (model, DistributedDataParallel, distributed optimizer) on random tokens.
``--recompute``, ``--microbatches``, ``--mla`` and ``--shared-experts`` change the model or its schedule.

``--save FOLDER --save-at 150`` writes a checkpoint in the middle of a run, and ``--load FOLDER`` goes on from one,
which the other library may have written: the model with its FP8 states, and the optimizer's state. One rank only.

``--graphs`` trains with Megatron-LM's CUDA graphs of each layer (its ``--cuda-graph-impl``), which are made when its
own training loop makes them. ``transformer_engine``: the library's ``make_graphed_callables``, after 3 steps; of layers
with experts it captures attention, router and the preparation of the exchange. ``local``: Megatron-LM's own graphs, at
the end of the first step; dense models only. Both are made before the steps that count.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fp8", choices=("delayed", "tensorwise", "blockwise"))
    parser.add_argument("--fp8-params", action="store_true", help="weights are FP8")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0 is a dense model")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--microbatches", type=int, default=1, help="of a step, each of --batch")
    parser.add_argument(
        "--recompute", nargs="+", metavar="PART", help="full, or Megatron-LM's recompute_modules"
    )
    parser.add_argument("--mla", action="store_true", help="multi-latent attention, 192/128")
    parser.add_argument("--shared-experts", type=int, default=0, help="their hidden size")
    parser.add_argument("--seconds", type=float, help="of the whole run; fewer steps then")
    parser.add_argument(
        "--alias", action="store_true", help="install te_fast_alias from python/alias"
    )
    parser.add_argument("--save", type=Path, help="folder of a checkpoint to write")
    parser.add_argument("--save-at", type=int, default=150, help="step before which it is written")
    parser.add_argument("--load", type=Path, help="folder of a checkpoint to go on from")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument(
        "--graphs", choices=("local", "transformer_engine"), help="CUDA graphs of each layer"
    )
    given = parser.parse_args()
    check_graphs(parser, given)
    return given


def check_graphs(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse graphs that Megatron-LM would refuse or fail to capture, before the time of GPUs is spent."""
    if given.graphs == "local" and given.experts:
        parser.error(
            "--graphs local with --experts: Megatron-LM would capture whole layers of this model, but the shapes of "
            "experts follow the tokens; use --graphs transformer_engine"
        )
    can_grow = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    is_registered = os.environ.get("NCCL_GRAPH_REGISTER", "") != "0"
    if given.graphs == "transformer_engine" and can_grow and is_registered:
        parser.error(
            "--graphs transformer_engine: Megatron-LM refuses PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            "without NCCL_GRAPH_REGISTER=0"
        )


#: Steps that are not counted, and the fewest that are.
WARM_UP, LEAST_STEPS = 5, 8
_begin = time.perf_counter()


def say(what: str) -> None:
    """Print the present step and the seconds since the start, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{time.perf_counter() - _begin:7.1f} s: {what}", file=sys.stderr, flush=True)


def is_over(given: argparse.Namespace, step: int) -> bool:
    """Tell whether the time is over for any rank."""
    import torch

    if given.seconds is None or step < LEAST_STEPS:
        return False
    over = torch.tensor([time.perf_counter() - _begin > given.seconds], device="cuda").int()
    torch.distributed.all_reduce(over, op=torch.distributed.ReduceOp.MAX)
    return bool(over.item())


def make_config(given: argparse.Namespace) -> Any:
    """Return Megatron-LM's configuration."""
    import torch
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    fp8: dict[str, Any] = {}
    if given.fp8 is not None:
        number_format = "e4m3" if given.fp8 == "blockwise" else "hybrid"
        fp8 = {"fp8": number_format, "fp8_recipe": given.fp8, "fp8_param": given.fp8_params}
    experts: dict[str, Any] = {}
    if given.experts:
        experts = {
            "num_moe_experts": given.experts,
            "moe_router_topk": 2,
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_router_fusion": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "expert_model_parallel_size": given.ep,
            "expert_tensor_parallel_size": 1,
            "moe_shared_expert_intermediate_size": given.shared_experts or None,
        }
    recomputed: dict[str, Any] = {}
    if given.recompute == ["full"]:
        recomputed = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif given.recompute:
        recomputed = {
            "recompute_granularity": "selective",
            "recompute_modules": given.recompute,
        }
    graphs: dict[str, Any] = {}
    if given.graphs is not None:
        # No parts are the whole layer. The shapes of experts follow the tokens, so that graphs cannot have them.
        parts = ["attn", "moe_router", "moe_preprocess"] if given.experts else []
        graphs = {"cuda_graph_impl": given.graphs, "cuda_graph_modules": parts}
    kind = MLATransformerConfig if given.mla else TransformerConfig
    return kind(
        num_layers=given.layers,
        hidden_size=given.hidden,
        ffn_hidden_size=4 * given.hidden,
        num_attention_heads=given.heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=given.tp,
        sequence_parallel=given.tp > 1,
        gradient_accumulation_fusion=False,
        qk_layernorm=given.mla,
        **fp8,
        **experts,
        **recomputed,
        **graphs,
    )


def make_model(given: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model inside of Megatron-LM's DistributedDataParallel, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = make_config(given)
    parts = {"num_experts": given.experts, "moe_grouped_gemm": True} if given.experts else {}
    with get_fp8_context(config, is_init=True):
        model = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(
                **parts, multi_latent_attention=given.mla, qk_layernorm=given.mla
            ),
            vocab_size=32768,
            max_sequence_length=given.length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
    model = model.cuda()
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            fp8_param_gather=given.fp8_params,
        ),
        model if given.fp8_params else model.bfloat16(),
    )
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        clip_grad=1.0,
    )
    return wrapped, get_megatron_optimizer(options, [wrapped])


class Graphs:
    """CUDA graphs of a model's layers, made as Megatron-LM's ``training.py`` and ``schedules.py`` make them.

    Parameters
    ----------
    given : argparse.Namespace
        The command line.
    model, optimizer
        The model inside of DistributedDataParallel, and its optimizer.
    """

    def __init__(self, given: argparse.Namespace, model: Any, optimizer: Any) -> None:
        self._kind, self._model, self._helper = given.graphs, model, None
        if given.graphs != "transformer_engine":
            return  # for Megatron-LM's own graphs the layers have made their managers
        from megatron.core import num_microbatches_calculator, parallel_state
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        replicas = parallel_state.get_data_parallel_world_size()
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank=int(os.environ.get("RANK", "0")),
            global_batch_size=given.batch * replicas * given.microbatches,
            micro_batch_size=given.batch,
            data_parallel_size=replicas,
        )
        self._helper = TECudaGraphHelper(
            model=[model],
            config=model.config,
            seq_length=given.length,
            micro_batch_size=given.batch,
            optimizers=[optimizer],
        )

    def before_step(self, step: int) -> None:
        """Capture with Transformer Engine's function if as many steps are done as Megatron-LM warms up with."""
        if self._helper is None or step != self._model.config.cuda_graph_warmup_steps:
            return
        # Graphs do not have the hooks that wait for gathered parameters; the layers call them before each replay.
        self._model.disable_forward_pre_hook(param_sync=False)
        self._helper.create_cudagraphs()
        self._model.enable_forward_pre_hook()
        self._helper.cuda_graph_set_manual_hooks()
        say(f"captured {len(self._helper.flattened_callables)} layers")

    def after_backward(self) -> None:
        """Make Megatron-LM's own graphs of the layers that ran in the first step; later calls do nothing."""
        if self._kind != "local":
            return
        from megatron.core.transformer.cuda_graphs import create_cudagraphs

        made = create_cudagraphs()
        if made is not None:
            say(f"captured the layers, {made['reserved_bytes'] / 2**20:.0f} MiB")

    def close(self) -> None:
        """Free the graphs: NCCL waits for those that have its collectives before it ends."""
        if self._helper is not None and self._helper.graphs_created():
            self._helper.delete_cuda_graphs()
        if self._kind == "local":
            from megatron.core.transformer.cuda_graphs import CudaGraphManager, delete_cuda_graphs

            modules = self._model.modules()
            for manager in (each for each in modules if isinstance(each, CudaGraphManager)):
                for runner in manager.cudagraph_runners:
                    runner.fwd_graph = runner.bwd_graph = None
            delete_cuda_graphs()


def save(folder: Path, step: int, model: Any, optimizer: Any) -> None:
    """Write a checkpoint."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, folder / "state.pt")
    optimizer.save_parameter_state(str(folder / "parameters.pt"))
    say(f"saved before step {step}")


def load(folder: Path, model: Any, optimizer: Any) -> int:
    """Read a checkpoint; return its step."""
    import torch

    # Megatron-LM's optimizer state holds its own classes; the file is the bench's own.
    state = torch.load(folder / "state.pt", weights_only=False, map_location="cuda")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.load_parameter_state(str(folder / "parameters.pt"))
    say(f"loaded, step {state['step']}")
    return int(state["step"])


def train(given: argparse.Namespace, model: Any, optimizer: Any) -> tuple[list[float], list[float]]:
    """Return losses and the seconds of each step."""
    import torch
    from megatron.core.distributed import finalize_model_grads

    losses, seconds = [], []
    places = torch.arange(given.length, device="cuda").expand(given.batch, -1)
    graphs = Graphs(given, model, optimizer)
    first = 0 if given.load is None else load(given.load, model, optimizer)
    for step in range(first, given.steps):
        if is_over(given, step - first):
            break
        if given.save is not None and step == given.save_at:
            save(given.save, step, model, optimizer)
        graphs.before_step(step - first)
        generator = torch.Generator(device="cuda").manual_seed(step % 4)
        size = (given.microbatches, given.batch, given.length + 1)
        tokens = torch.randint(0, 32768, size, device="cuda", generator=generator)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model.module.set_is_first_microbatch()
        loss = torch.zeros((), device="cuda")
        for number, microbatch in enumerate(tokens):
            is_last = number == given.microbatches - 1
            # As Megatron-LM's schedule does: gradients are reduced in the last backward.
            with nullcontext() if is_last else model.no_sync():
                own = model(microbatch[:, :-1], places, None, labels=microbatch[:, 1:])
                own = own.float().mean() / given.microbatches
                own.backward()
            loss += own.detach()
        finalize_model_grads([model])
        graphs.after_backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        say(f"step {step}: {seconds[-1] * 1e3:.1f} ms, loss {losses[-1]:.4f}")
    graphs.close()
    return losses, seconds


def main() -> None:
    """Train, and print the measurements as JSON."""
    given = arguments()
    if given.alias:
        sys.path.insert(0, str(ROOT / "python" / "alias"))
        import te_fast_alias

        te_fast_alias.install()
    import torch
    import transformer_engine
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    rank = int(os.environ.get("RANK", "0"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if given.graphs == "transformer_engine":
        torch.cuda.set_stream(torch.cuda.Stream())  # as Megatron-LM does for captures
    say("imported")
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=given.tp,
        expert_model_parallel_size=given.ep,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(
        1234, te_rng_tracker=True, use_cudagraphable_rng=given.graphs is not None
    )
    torch.manual_seed(1234)
    model, optimizer = make_model(given)
    say("made model and optimizer")
    losses, seconds = train(given, model, optimizer)
    tokens = given.microbatches * given.batch * given.length
    tokens = tokens * torch.distributed.get_world_size() // given.tp
    result = {
        "transformer_engine": transformer_engine.__version__,
        "megatron": importlib.metadata.version("megatron-core"),
        "device": torch.cuda.get_device_name(),
        "ranks": torch.distributed.get_world_size(),
        "options": {name: str(value) for name, value in vars(given).items()},
        "tokens_per_second": tokens / statistics.median(seconds[WARM_UP:]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "losses": losses,
    }
    if rank == 0:
        text = json.dumps(result, indent=1)
        print(text)
        if given.out is not None:
            given.out.write_text(text + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
