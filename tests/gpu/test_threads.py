"""Threads beside calls that wait for the GPU."""

from __future__ import annotations

import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import te_fast.pytorch as te  # noqa: E402
from te_fast import dispatch  # noqa: E402
from te_fast.common.recipe import Float8CurrentScaling  # noqa: E402

pytestmark = pytest.mark.gpu

A_SECOND = 1 << 31  # cycles, about


def private_bytes():
    return dispatch.inventory()["cuda:0"]["private_bytes"]


def fill():
    """Let the dispatcher allocate memory of its own."""
    layer = te.Linear(1024, 1024, device="cuda", params_dtype=torch.bfloat16)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        layer(torch.ones(256, 1024, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()


def in_thread(body):
    """Run `body` in a thread without a context of its own; return how often this thread ran meanwhile."""
    entered, left = threading.Event(), threading.Event()

    def run():
        entered.set()
        body()
        left.set()

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    turns = 0
    while not left.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    return turns


def test_memory_goes_back_from_a_thread_that_lets_others_run():
    fill()
    held, free = private_bytes(), torch.cuda.mem_get_info()[0]
    torch.cuda._sleep(A_SECOND)
    # The driver waits for the kernel; a thread that held the GIL would leave this one two turns at most.
    assert in_thread(dispatch.release_memory) > 20
    assert private_bytes() == 0
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers take memory of the same GPU
        assert torch.cuda.mem_get_info()[0] >= free + held // 2
    fill()  # the memory is taken again
    assert private_bytes() > 0


def test_kernels_are_loaded_from_a_thread():
    counts = []
    in_thread(lambda: counts.append(dispatch.load_kernels()))
    assert counts[0] > 100
    assert dispatch.load_kernels("cuda:0") == counts[0]
    fill()
