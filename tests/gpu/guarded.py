"""Device memory whose surroundings tell of writes out of bounds."""

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
