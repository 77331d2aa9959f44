"""Machines with a CUDA driver that te_fast cannot use: working calls, and error messages.

A stub stands in for the driver: a library of the driver's name that reports a version.
"""

import shutil
import subprocess

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs g++ for a stub of the driver"
)

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

# A call of the driver that ends when another thread of Python says so, or after ten seconds.
WAITING = """
#include <unistd.h>
extern "C" {
volatile int entered, released;
int cuDriverGetVersion(int* version) {
  entered = 1;
  for (int i = 0; i < 10000 && !released; ++i) usleep(1000);
  return *version = VERSION, released ? 0 : 999;
}
}
"""

WAITING_SCRIPT = """
import ctypes
import threading
import time
from te_fast import dispatch
from te_fast.errors import CudaError

driver = ctypes.CDLL("libcuda.so.1")
entered, released = (ctypes.c_int.in_dll(driver, name) for name in ("entered", "released"))
reasons = []

def load():
    try:
        dispatch.load_kernels()
    except CudaError as error:
        reasons.append(str(error))

thread = threading.Thread(target=load)
thread.start()
while not entered.value:
    time.sleep(0.001)
released.value = 1
thread.join()
print(*reasons)
"""


def run_with_driver(fresh, folder, source, define, script):
    """Run a script with a stub as the driver; return the script's output."""
    (folder / "stub.cpp").write_text(source)
    library = folder / "libcuda.so.1"
    # Code that asks for a library of that name gets the library that is already loaded.
    command = [
        "g++",
        "-shared",
        "-fPIC",
        define,
        f"-Wl,-soname,{library.name}",
        "-o",
        library,
        "stub.cpp",
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    load = f"import ctypes, warnings; ctypes.CDLL({str(library)!r})"
    return fresh(f'{load}; warnings.simplefilter("ignore")\n{script}')


@needs_compiler
def test_other_threads_run_while_the_driver_loads(tmp_path, fresh):
    """The thread that lets the driver go on needs the GIL to do so."""
    printed = run_with_driver(fresh, tmp_path, WAITING, "-DVERSION=11040", WAITING_SCRIPT)
    assert "the driver supports CUDA 11.4" in printed


@needs_compiler
@pytest.mark.parametrize("stub", STUBS)
def test_a_driver_that_cannot_be_used(stub, tmp_path, fresh):
    define, source = STUBS[stub]
    printed = run_with_driver(fresh, tmp_path, source, define, SCRIPT)
    reasons = printed.strip().splitlines()
    assert len(reasons) == 7
    for reason in reasons:
        for part in REASONS[stub]:
            assert part in reason, reason
