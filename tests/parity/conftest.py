"""Transformer Engine for the tests beside it."""

import pytest
import torch

import parity


@pytest.fixture(scope="module")
def theirs():
    library = parity.installed()
    if library is None:
        pytest.skip("Transformer Engine is not installed")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return library
