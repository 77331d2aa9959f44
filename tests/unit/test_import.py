"""What importing te_fast does, and what it must not do. Each case is a process of its own."""

import subprocess
import sys

import pytest


def run(script, **environment):
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_touches_no_gpu_and_starts_nothing():
    out = run(
        """
import sys, threading, time
import torch
before = set(sys.modules)
threads, begin = threading.active_count(), time.perf_counter()
import te_fast
import te_fast.pytorch
milliseconds = (time.perf_counter() - begin) * 1e3
assert not torch.cuda.is_initialized()
assert threading.active_count() == threads
new = {name.partition(".")[0] for name in set(sys.modules) - before}
unexpected = {"matplotlib", "rich", "numpy", "sklearn", "transformer_engine", "pkg_resources"} & new
assert not unexpected, unexpected
libraries = open("/proc/self/maps").read()
if not torch.version.cuda:
    assert "libcuda.so" not in libraries
print(f"import te_fast.pytorch: {milliseconds:.1f} ms beyond import torch")
"""
    )
    # The time is told, not asserted: it belongs to the machine.
    assert out.startswith("import te_fast.pytorch: ")
    assert out.count("\n") == 1, "importing printed something"
    print(out, end="")


@pytest.mark.parametrize("first", ["te_fast.profile", "te_fast.dispatch", "te_fast.common.recipe"])
def test_any_submodule_can_be_imported_first(first):
    run(f"import {first}; import te_fast.pytorch as te; te.Linear(16, 16, device='cpu')")


def test_layer_runs_where_no_gpu_is_visible():
    out = run(
        """
import torch, te_fast.pytorch as te
layer = te.Linear(32, 16, device="cpu")
with te.autocast(enabled=True):
    layer(torch.ones(16, 32)).sum().backward()
print(tuple(layer.weight.grad.shape))
""",
        CUDA_VISIBLE_DEVICES="",
    )
    assert out == "(16, 32)\n"


def test_cuda_use_without_a_gpu_raises_one_clear_error():
    run(
        """
import torch, te_fast.pytorch as te
try:
    te.Linear(32, 16)
except RuntimeError as error:
    assert "cuda" in str(error).lower() or "NVIDIA" in str(error), error
else:
    raise SystemExit("no error")
""",
        CUDA_VISIBLE_DEVICES="",
    )


def test_version_is_that_of_the_distribution():
    run(
        "import importlib.metadata, te_fast;"
        "assert te_fast.__version__ == importlib.metadata.version('te_fast')"
    )
