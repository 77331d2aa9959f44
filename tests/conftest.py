"""What every test starts with."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Random data is the same in every run, in whatever order tests come; a test may seed for itself."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
