"""One of several ranks that share a vocabulary: ``cross_entropy_rank.py RANK RANKS FOLDER`` leaves losses.

Run by ``unit/test_cross_entropy.py``.
"""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from te_fast.errors import RanksError
from te_fast.pytorch.cross_entropy import parallel_cross_entropy

VOCABULARY = 24
IGNORED = 5
#: Widths of unequal shares, by the number of ranks.
WIDTHS = {2: [0, 24], 4: [0, 11, 1, 12]}
CASES = [
    {"dtype": dtype, "label_smoothing": smoothing, "reduce_loss": reduced, "hidden": hidden}
    for dtype in (torch.float32, torch.bfloat16)
    for smoothing in (0.0, 0.2)
    for reduced in (False, True)
    # Tokens that no model may choose have logits of minus infinity, which would spoil a mean.
    for hidden in ({False, not smoothing})
]


def problem(dtype, hidden):
    """Logits, targets and the gradient of the losses, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 3, VOCABULARY, generator=generator).mul(8).to(dtype)
    target = torch.randint(0, VOCABULARY, (4, 3), generator=generator)
    target[1, 2] = target[3, 0] = IGNORED
    target[0] = torch.tensor([0, VOCABULARY // 2, VOCABULARY - 1])  # at the borders of shards
    if hidden:
        logits[..., 20:23] = -torch.inf  # most of the last of four ranks' tokens
        logits[2] += 3e4  # far from where exp is finite
    grad = torch.randn(4, 3, generator=generator)
    return logits, target, grad


def losses_of(logits, target, grad, case, group):
    logits = logits.clone().requires_grad_()
    options = {name: case[name] for name in ("label_smoothing", "reduce_loss")}
    loss = parallel_cross_entropy(
        logits, target, **options, dist_process_group=group, ignore_idx=IGNORED
    )
    loss.backward(grad.sum().reshape(1) if case["reduce_loss"] else grad)
    return loss.detach(), logits.grad


def main(rank, ranks, folder):
    store = f"file://{folder / 'store'}"
    options = {"init_method": store, "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60), **options)
    found = []
    for case in CASES:
        logits, target, grad = problem(case["dtype"], case["hidden"])
        shard = logits.chunk(ranks, dim=2)[rank]
        found.append(losses_of(shard, target, grad, case, dist.group.WORLD))
    for case in CASES:  # shares of unequal width, the first of which is empty
        logits, target, grad = problem(case["dtype"], case["hidden"])
        shard = logits.split(WIDTHS[ranks], dim=2)[rank]
        found.append(losses_of(shard, target, grad, case, dist.group.WORLD))
    # A target that no rank has, and a group that this rank is not in.
    logits, target, _ = problem(torch.float32, hidden=False)
    target[2, 1], target[2, 2] = VOCABULARY, -1
    shard = logits.chunk(ranks, dim=2)[rank]
    losses = parallel_cross_entropy(shard, target, dist_process_group=dist.group.WORLD)
    assert losses.isinf().nonzero().tolist() == [[2, 1], [2, 2]]
    alone = [dist.new_group([each]) for each in range(ranks)]
    try:
        parallel_cross_entropy(shard, target, dist_process_group=alone[rank - 1])
    except RanksError as error:
        assert "this rank is not in dist_process_group" in str(error)  # noqa: PT017
    else:
        raise AssertionError
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()  # no rank closes connections that others read
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
