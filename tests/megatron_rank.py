"""One rank that trains Megatron-LM's models on te_fast: ``megatron_rank.py RANK RANKS FOLDER SCENES`` leaves losses.

Run by ``unit/test_megatron.py``. Megatron-LM comes from PyPI; it imports ``transformer_engine`` and gets te_fast by
te_fast_alias. Megatron-LM does not run on CPUs, so this file answers its calls of ``torch.cuda``.
"""

import copy
import datetime
import gc
import json
import sys
import warnings
from functools import partial
from pathlib import Path

import megatron_host

ROOT = Path(__file__).parents[1]
VOCABULARY, LENGTH, BATCH = 128, 32, 2
STEPS = 4
#: The settings of a scene and their defaults.
SCENE = {
    "tp": 1,  # ranks that share each layer
    "sp": False,  # sequence parallelism among them
    "cp": 1,  # ranks that share the tokens of sequences
    "packed": False,  # sequences follow each other in one row
    "way": "p2p",  # how they attend to each other's tokens
    "ep": 1,  # ranks that share the experts
    "dispatcher": "allgather",  # how rows travel to their experts
    "fp8": None,  # recipe
    "moe": False,  # a mixture of experts
    "local": False,  # Megatron-LM's own layers
    "recompute": False,  # activations are computed again
    "resume": False,  # go on from a checkpoint, too
    "load": None,  # the scene from whose checkpoint training begins
    "distributed": False,  # other tokens on each rank, and Megatron-LM's distributed optimizer
    "param_gather": False,  # its weights are FP8
    "overlap": False,  # collectives beside products
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def start():
    """Import Megatron-LM as its users do, where there is no GPU."""
    sys.path.insert(0, str(ROOT / "python" / "alias"))
    warnings.simplefilter("ignore")  # Megatron-LM's own
    import te_fast_alias

    te_fast_alias.install()
    import torch

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.set_num_threads(1)


def recipe_of(scene):
    fp8 = scene["fp8"]
    if fp8 is None:
        return {}
    number_format = "e4m3" if fp8 == "blockwise" else "hybrid"
    return {
        "fp8": number_format,
        "fp8_recipe": fp8,
        "fp8_amax_history_len": 4,
        "fp8_param": scene["param_gather"],
    }


def experts_of(scene):
    if not scene["moe"]:
        return {}
    return {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
        "moe_token_dispatcher_type": scene["dispatcher"],
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "expert_model_parallel_size": scene["ep"],
        "expert_tensor_parallel_size": 1,
    }


def make_model(scene, seed):
    import torch
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        # Megatron-LM would write the weights, and not the initial values that master weights are made of.
        use_cpu_initialization=not scene["distributed"],
        tensor_model_parallel_size=scene["tp"],
        sequence_parallel=scene["sp"],
        context_parallel_size=scene["cp"],
        cp_comm_type=scene["way"],
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **(RECOMPUTE if scene["recompute"] else {}),
        **recipe_of(scene),
        **experts_of(scene),
    )
    experts = {"num_experts": 4, "moe_grouped_gemm": True} if scene["moe"] else {}
    kind = "local" if scene["local"] else "transformer_engine"
    specs = getattr(gpt_layer_specs, f"get_gpt_layer_{'with_' * (not scene['local'])}{kind}_spec")
    torch.manual_seed(seed)
    model = GPTModel(
        config,
        specs(**experts),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.bfloat16()


def loss_of(model, step, share=0, *, is_packed=False):
    """Loss on this rank's part of tokens that depend only on the step and on its share of them."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    # Its own attention makes no causal mask without a GPU.
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    generator = torch.Generator().manual_seed(1000 + step % 2 + 10 * share)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1),
        "loss_mask": torch.ones(BATCH, LENGTH),
        "cu_seqlens": None,
    }
    packed = pack(batch) if is_packed else None
    real = batch["loss_mask"].sum()
    group = parallel_state.get_context_parallel_group()
    here = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    inputs = here["tokens"], here["position_ids"], None if packed else mask
    losses = model(*inputs, labels=here["labels"], packed_seq_params=packed).float()
    # The mean over ranks is the mean over tokens.
    return (losses * here["loss_mask"]).sum() * group.size() / real


def pack(batch):
    """Make one row of packed sequences with padding out of a batch; return where they lie."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    sizes, lengths = torch.tensor([12, 20, 32]), torch.tensor([11, 20, 30])
    bounds, ends = (
        torch.nn.functional.pad(one.cumsum(0), (1, 0)).int() for one in (sizes, lengths)
    )
    for key in ("tokens", "labels", "loss_mask"):
        batch[key] = batch[key].reshape(1, -1).clone()
    within = torch.cat([torch.arange(size) for size in sizes])
    batch["position_ids"] = within[None]
    batch["loss_mask"][0, within >= lengths.repeat_interleave(sizes)] = 0.0
    batch |= {"cu_seqlens": ends[None], "cu_seqlens_padded": bounds[None]}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=LENGTH,
        max_seqlen_kv=LENGTH,
    )


def train(model, optimizer, steps, *, is_packed=False):
    """Losses of some steps."""
    losses = []
    for step in steps:
        loss = loss_of(model, step, is_packed=is_packed)
        loss.backward()
        reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of_parts(loss.detach()).item())
    return losses


def mean_of_parts(tensor):
    """Return the mean over the ranks that share the tokens of sequences."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        tensor /= dist.get_world_size(group)
    return tensor


def reduce_gradients(model):
    """Sum gradients as Megatron-LM does under sequence parallelism: whole parameters saw only a part of the rows."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    for parameter in model.parameters():
        if parameter.grad is not None:
            mean_of_parts(parameter.grad)
    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def load(model, folder):
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(loaded["model"])


def run(name, scene, folder):
    from megatron.core import dist_checkpointing
    from transformer_engine.pytorch.optimizers import FusedAdam

    def fresh(seed):
        model = make_model(scene, seed)
        return model, FusedAdam(model.parameters(), lr=3e-3, master_weights=True)

    def steps(model, optimizer, numbers):
        return train(model, optimizer, numbers, is_packed=scene["packed"])

    model, optimizer = fresh(1)
    if scene["load"] is not None:
        load(model, folder / scene["load"])
        return {"losses": steps(model, optimizer, range(STEPS, STEPS + 3))}
    found = {"losses": steps(model, optimizer, range(STEPS))}
    found["keys"] = sorted(key for key in model.state_dict() if key.endswith("_extra_state"))
    if not scene["resume"]:
        return found
    kept = folder / name
    kept.mkdir(exist_ok=True)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(kept))
    moments = copy.deepcopy(optimizer.state_dict())
    found["goes_on"] = steps(model, optimizer, range(STEPS, STEPS + 3))
    other, resumed = fresh(2)
    load(other, kept)
    resumed.load_state_dict(moments)
    found["resumed"] = steps(other, resumed, range(STEPS, STEPS + 3))
    return found


def run_distributed(name, scene, folder):
    """Losses of a model whose master weights are in slices, one on each rank."""
    from megatron.core import parallel_state

    from megatron_optimizer import Training

    share = parallel_state.get_data_parallel_rank()

    def fresh(seed):
        return Training(make_model(scene, seed), scene)

    def steps(training, numbers):
        return [training.step(partial(loss_of, step=step, share=share)) for step in numbers]

    training = fresh(1)
    found = {"types": sorted({type(p).__name__ for p in training.model.parameters()})}
    if scene["load"] is not None:
        training.load(folder / scene["load"])
        return found | {"losses": steps(training, range(STEPS, STEPS + 3))}
    found["losses"] = steps(training, range(STEPS))
    if not scene["resume"]:
        return found
    kept = folder / name
    kept.mkdir(exist_ok=True)
    training.save(kept)
    found["goes_on"] = steps(training, range(STEPS, STEPS + 3))
    other = fresh(2)
    other.load(kept)
    found["resumed"] = steps(other, range(STEPS, STEPS + 3))
    return found


def play(name, scene, folder):
    """Run a scene on groups of ranks of its own."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=scene["tp"],
        context_parallel_size=scene["cp"],
        expert_model_parallel_size=scene["ep"],
        expert_tensor_parallel_size=1,
    )
    random.initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
    # As Megatron-LM does: ranks that hold the same weights draw them alike.
    split, experts = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    for tracked, seed in (
        ("data-parallel-rng", 1),
        ("model-parallel-rng", 100 + split),
        ("expert-parallel-rng", 200 + experts),
    ):
        random.get_cuda_rng_tracker().add(tracked, seed)
    with megatron_host.OnTheHost():
        found = (run_distributed if scene["distributed"] else run)(name, scene, folder)
    # Layers of delayed scaling take part in reductions as long as they live, on all ranks or on none.
    gc.collect()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return found


def main(rank, ranks, folder, scenes):
    start()
    import torch.distributed as dist

    store = f"file://{folder / 'store'}"
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=wait)
    megatron_host.answer()
    found = {name: play(name, {**SCENE, **given}, folder) for name, given in scenes.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
