"""Machines with a CUDA driver that te_fast cannot use: what works there, and what it says.

A stub stands in for the driver: a library of the driver's name that reports a version.
"""

import os
import shutil
import subprocess
import sys

import pytest

FUNCTIONS = """
extern "C" int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
"""
STUBS = {
    "old": ("-DVERSION=11040", FUNCTIONS),
    "incomplete": ("-DVERSION=13000", FUNCTIONS),
    "foreign": ("-DVERSION=0", 'extern "C" int unrelated() { return 0; }'),
    "broken": ("-DVERSION=0", 'extern "C" int cuDriverGetVersion(int*) { return 999; }'),
}
REASONS = {
    "old": ["the driver supports CUDA 11.4", "a driver for CUDA 13.0", "update the NVIDIA driver"],
    "incomplete": ["supports CUDA 13.0 and lacks cu", "incomplete"],
    "foreign": ["no cuDriverGetVersion"],
    "broken": ["cuDriverGetVersion failed with 999"],
}

SCRIPT = """
import sys
import torch
import te_fast
import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.errors import CudaError, DeviceError

def reason(call, *kinds):
    try:
        call()
    except kinds as error:
        return str(error)
    raise SystemExit("no error")

layer = te.Linear(32, 16, device="cpu")
x = torch.ones(16, 32, requires_grad=True)
with te.autocast(enabled=True):
    layer(x).sum().backward()
assert layer.weight.grad.shape == (16, 32)
layer.load_state_dict(layer.state_dict())
te.Linear(32, 16, device="meta")

reasons = [
    reason(dispatch.cuda_driver_version, CudaError),
    reason(lambda: dispatch.device_facts(0), CudaError),
    reason(lambda: te.Linear(32, 16), DeviceError),
    reason(lambda: te.Linear(32, 16, device="cuda"), RuntimeError),
]
# A torch of an older CUDA runs on an older driver: what te_fast says where torch has a GPU.
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda index=None: (9, 0)
torch.version.cuda = "12.9"
for check in (te.is_fp8_available, te.is_fp8_block_scaling_available):
    available, text = check(return_reason=True)
    assert not available and not check()
    reasons.append(text)
assert te.FP8GlobalStateManager.is_fp8_available() == (False, reasons[-1])
with_fp8 = te.autocast(enabled=True, recipe=Float8CurrentScaling())
reasons.append(reason(with_fp8.__enter__, DeviceError))
print(*reasons, sep="\\n")
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for a stub of the driver")
@pytest.mark.parametrize("stub", STUBS)
def test_a_driver_that_cannot_be_used(stub, tmp_path):
    version, source = STUBS[stub]
    (tmp_path / "stub.cpp").write_text(source)
    library = str(tmp_path / "libcuda.so.1")
    command = ["g++", "-shared", "-fPIC", version, "-o", library, "stub.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "LD_LIBRARY_PATH": str(tmp_path),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
    )
    assert result.returncode == 0, result.stderr
    reasons = result.stdout.strip().splitlines()
    assert len(reasons) == 7
    for reason in reasons:
        for part in REASONS[stub]:
            assert part in reason, reason
