"""Attention of ranks that share the tokens of sequences: milliseconds of forward and backward, and what sharing costs.

    NCCL_NVLS_ENABLE=0 python benches/context_ranks.py --ranks 2 [--tokens 16384 65536] [--heads 32] [--groups 8]
        [--packed 1 8]

Causal attention in BF16, with heads of 128 channels: to one sequence, and to as many packed sequences of equal lengths
as --packed says. "Alone" is one rank's attention to the whole
sequence. "Cost" is a way's time times the ranks, over the time alone: 1 if communication were free and work balanced.
Transformer Engine's attention runs in turn where it can be imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import te_fast.pytorch as te
from _harness import DTYPES, options, show, write
from ranks import medians, transformer_engine

if TYPE_CHECKING:
    from collections.abc import Callable

CHANNELS = 128
WAYS = ("p2p", "all_gather", "a2a")


def step_of(
    module: Any, tokens: int, way: str | None, arguments: argparse.Namespace, sequences: int = 1
) -> Any:
    """Return forward and backward of this rank's tokens; of whole sequences without a way."""
    heads, groups = arguments.heads, arguments.groups
    is_packed = sequences > 1
    fmt, mask = ("thd", "padding_causal") if is_packed else ("bshd", "causal")
    options_ = {"num_gqa_groups": groups, "qkv_format": fmt, "attn_mask_type": mask}
    given: dict[str, Any] = {}
    if is_packed:
        length = tokens // sequences
        ends = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=arguments.device)
        given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        given |= {"max_seqlen_q": length, "max_seqlen_kv": length}
    layer = module.DotProductAttention(heads, CHANNELS, attention_dropout=0.0, **options_)
    if way is not None:
        ranks = list(range(dist.get_world_size()))
        stream = torch.cuda.Stream() if arguments.device.type == "cuda" else None
        layer.set_context_parallel_group(dist.group.WORLD, ranks, stream, way)
        tokens //= dist.get_world_size()
    kind = {"dtype": DTYPES[arguments.dtype], "device": arguments.device}
    rows = (tokens,) if is_packed else (1, tokens)
    leaves = [
        torch.randn(*rows, count, CHANNELS, **kind).requires_grad_()
        for count in (heads, groups, groups)
    ]
    gradient = torch.randn(*rows, heads * CHANNELS, **kind)

    def step() -> None:
        torch.autograd.grad(layer(*leaves, **given), leaves, gradient)

    return step


def measure(tokens: int, arguments: argparse.Namespace, sequences: int) -> dict[str, float]:
    """Return milliseconds by way, and what each costs."""
    bodies: dict[str, Callable[[], object]] = {
        "alone": step_of(te, tokens, None, arguments, sequences),
        **{way: step_of(te, tokens, way, arguments, sequences) for way in WAYS},
    }
    theirs = transformer_engine()
    if theirs is not None:
        for way in WAYS:
            step = step_of(theirs, tokens, way, arguments, sequences)
            bodies[f"Transformer Engine, {way}"] = step
    found = medians(bodies, arguments, arguments.seconds)
    del found["rounds"]
    row = {name: round(value / 1e3, 3) for name, value in found.items()}
    ranks = dist.get_world_size()
    costs = {f"cost of {way}": round(ranks * row[way] / row["alone"], 3) for way in WAYS}
    return row | costs


def worker(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """Run as one rank."""
    is_cuda = arguments.device.type == "cuda"
    if is_cuda:
        arguments.device = torch.device("cuda", rank)
        torch.cuda.set_device(arguments.device)
    backend = "nccl" if is_cuda else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=arguments.ranks
    )
    torch.manual_seed(rank)
    figures = {
        f"{tokens}" if sequences == 1 else f"{tokens} in {sequences} packed sequences": measure(
            tokens, arguments, sequences
        )
        for tokens in arguments.tokens
        for sequences in arguments.packed
    }
    if rank == 0:
        names = list(next(iter(figures.values())))
        rows = [[tokens, *(str(row[name]) for name in names)] for tokens, row in figures.items()]
        show(f"attention of {arguments.ranks} ranks, ms", ["tokens", *names], rows)
        sizes = {name: getattr(arguments, name) for name in ("ranks", "heads", "groups", "dtype")}
        write(f"context_ranks-{arguments.ranks}", arguments, {"sizes": sizes, "tokens": figures})
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--packed", type=int, nargs="+", default=[1, 8], help="sequences")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each length")
    parser.set_defaults(calls=5)
    arguments = parser.parse_args()
    arguments.command = " ".join(["python", *sys.orig_argv[1:]])
    # NVLink multicast is off: shared machines do not have it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, (arguments, str(Path(folder) / "store")), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
