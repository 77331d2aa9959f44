"""Constants of Transformer Engine that are plain data."""

from __future__ import annotations

import torch

ATTENTION_TYPES = ("self", "cross")
LAYER_TYPES = ("encoder", "decoder")
PARALLEL_MODES = ("row", "column", None)
#: Elements that share a scale.
MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16
#: None if torch is without torch.distributed.
PROCESS_GROUP = getattr(torch.distributed, "ProcessGroup", None)


def _layouts_of(axis: str) -> tuple[str, ...]:
    """Return how queries, keys and values may lie in memory, in order from one tensor of all to three."""
    return (
        f"{axis}3hd",
        f"{axis}h3d",
        f"{axis}hd_{axis}2hd",
        f"{axis}hd_{axis}h2d",
        f"{axis}hd_{axis}hd_{axis}hd",
    )


#: Layouts of equal formats, then of queries in another format than keys and values, then of caches in pages.
QKV_LAYOUTS = (
    *(layout for axis in ("sb", "bs", "t") for layout in _layouts_of(axis)),
    *("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd"),
    *(
        f"paged_kv_{queries}hd_{keys}hd_{keys}hd"
        for queries in ("bs", "sb", "t")
        for keys in ("bs", "sb")
    ),
)
