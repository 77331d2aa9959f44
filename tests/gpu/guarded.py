"""Device memory whose surroundings reveal writes out of bounds."""

from __future__ import annotations

import torch

POISON, CANARY = 0xA5, 256


class Guarded:
    """A tensor of poisoned bytes between two canaries."""

    def __init__(self, shape, dtype, offset=0):
        count = torch.Size(shape).numel() * dtype.itemsize
        self.whole = torch.full(
            (count + 2 * CANARY + offset,), POISON, dtype=torch.uint8, device="cuda"
        )
        self.first, self.end = CANARY + offset, CANARY + offset + count
        self.tensor = self.whole[self.first : self.end].view(dtype).view(shape)

    def check(self):
        edges = torch.cat([self.whole[: self.first], self.whole[self.end :]])
        assert (edges == POISON).all(), "a kernel wrote outside its buffer"


def guarded_like(outputs, offset=0, aligned=()):
    """A named tuple's tensors, poisoned, between canaries, `offset` elements off alignment except the `aligned` fields.

    Returns the guards by name and the same tuple of the new tensors.
    """
    guards = {}
    for name, tensor in outputs._asdict().items():
        if tensor is not None:
            shift = 0 if name in aligned else offset * tensor.element_size()
            guards[name] = Guarded(tensor.shape, tensor.dtype, shift)
    return guards, outputs._replace(**{name: guard.tensor for name, guard in guards.items()})
