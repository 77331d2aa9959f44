"""Effects of importing te_fast, and effects that it must not have."""

import pytest

from selection import quickly

CASES = {
    "touches no GPU and starts nothing": """
import sys, threading, time, torch
before = set(sys.modules)
threads, begin = threading.active_count(), time.perf_counter()
import te_fast
import te_fast.pytorch
milliseconds = (time.perf_counter() - begin) * 1e3
assert not torch.cuda.is_initialized()
assert threading.active_count() == threads
new = {name.partition(".")[0] for name in set(sys.modules) - before}
unexpected = {"matplotlib", "rich", "numpy", "sklearn", "sympy", "transformer_engine", "pkg_resources"} & new
assert not unexpected, unexpected
print(f"import te_fast.pytorch: {milliseconds:.1f} ms beyond import torch")
""",
    "what a linear layer does not need comes later": """
import pickle, sys
import te_fast.pytorch as te
deferred = ("attention", "cross_entropy", "graph", "ops", "optimizers", "permutation", "router", "transformer")
names = [f"te_fast.pytorch.{name}" for name in deferred]
early = [name for name in [*names, "te_fast.experts.block", "te_fast.graphed"] if name in sys.modules]
assert not early, early
te.Linear(16, 16, device="cpu")
assert not any(name in sys.modules for name in names)
for name in deferred:
    assert getattr(te, name) is sys.modules[f"te_fast.pytorch.{name}"]
for name in ("MoE", "TransformerLayer", "moe_permute", "make_graphed_callables"):
    thing = getattr(te, name)
    assert thing.__module__ == "te_fast.pytorch" and getattr(te, name) is thing
    assert pickle.loads(pickle.dumps(thing)) is thing
assert not hasattr(te, "nothing")
""",
    "te_fast.pytorch can be reloaded before and after the compiler is imported": """
import importlib, sys, torch
import te_fast.pytorch as te
from te_fast.runtime.compiling import CAN_COMPILE
def finders():
    return sum(type(one).__module__.startswith("te_fast") for one in sys.meta_path)
before = finders()
assert importlib.reload(te) is te
assert finders() == before
import torch._dynamo
assert finders() == before - CAN_COMPILE
assert importlib.reload(te) is te
layer = te.Linear(32, 32, device="cpu")
with te.autocast():
    layer(torch.ones(16, 32)).sum().backward()
assert te.Linear.__module__ == te.TransformerLayer.__module__ == "te_fast.pytorch"
""",
    "a deferred name is of te_fast.pytorch, whoever imports it": """
from te_fast.pytorch.attention import DotProductAttention
from te_fast.pytorch.ops import Linear
from te_fast.pytorch.transformer import DropPath
assert DotProductAttention.__module__ == "te_fast.pytorch"
assert Linear.__module__ == "te_fast.pytorch.ops"
assert DropPath.__module__ == "te_fast.pytorch.transformer"
import te_fast.pytorch as te
assert te.DotProductAttention is DotProductAttention and te.Linear is not Linear
""",
    "each layer works where nothing else was asked for": """
import os, sys, torch
import te_fast.pytorch as te
from te_fast.common.recipe import Float8CurrentScaling
common = {"device": "cpu"}
makers = {
    "Linear": lambda: (te.Linear(32, 32, **common), (16, 32)),
    "LayerNorm": lambda: (te.LayerNorm(32, **common), (4, 32)),
    "RMSNorm": lambda: (te.RMSNorm(32, **common), (4, 32)),
    "LayerNormLinear": lambda: (te.LayerNormLinear(32, 32, **common), (16, 32)),
    "LayerNormMLP": lambda: (te.LayerNormMLP(32, 64, **common), (16, 32)),
    "MoE": lambda: (te.MoE(32, 64, 2, 1, **common), (16, 32)),
    "MultiheadAttention": lambda: (te.MultiheadAttention(32, 2, **common), (16, 1, 32)),
    "TransformerLayer": lambda: (te.TransformerLayer(32, 64, 2, **common), (16, 1, 32)),
}
failed = []
for name, make in makers.items():
    child = os.fork()
    if child == 0:
        code = 1
        try:
            layer, shape = make()
            for enabled in (False, True):
                with te.autocast(enabled=enabled, recipe=Float8CurrentScaling()):
                    y = layer(torch.randn(shape, requires_grad=True))
                (y[0] if isinstance(y, tuple) else y).sum().backward()
            code = 0
        except BaseException as error:
            print(name, repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(name)
assert not failed, failed
""",
    "a star brings every name": """
import te_fast.pytorch as te
from te_fast.pytorch import *
assert MoE is te.MoE and moe_permute is te.moe_permute
""",
    "te_fast.profiling may come first": """
import te_fast.profiling
import te_fast.pytorch as te
te.Linear(16, 16, device="cpu")
""",
    "te_fast.dispatch may come first": """
import te_fast.dispatch
import te_fast.pytorch as te
te.Linear(16, 16, device="cpu")
""",
    "te_fast.common.recipe may come first": """
import te_fast.common.recipe
import te_fast.pytorch as te
te.Linear(16, 16, device="cpu")
""",
    "te_fast.errors may come first": """
import te_fast.errors
import te_fast.pytorch as te
te.Linear(16, 16, device="cpu")
""",
    "a forked process runs layers on the host": """
import os
import signal
import torch
import te_fast.pytorch as te
from te_fast.common.recipe import Float8CurrentScaling

torch.set_num_threads(1)  # torch's own threads do not survive the fork
layer, x = te.LayerNormMLP(256, 512, device="cpu"), torch.randn(256, 256, requires_grad=True)

def gradient():
    x.grad = None
    with te.autocast(recipe=Float8CurrentScaling()):
        layer(x).square().sum().backward()
    return x.grad

before = gradient().clone()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if torch.equal(gradient(), before) and torch.equal(gradient(), before) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(gradient(), before)
""",
    "a layer runs where no GPU is visible": """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
import te_fast.pytorch as te
layer = te.Linear(32, 16, device="cpu")
with te.autocast(enabled=True):
    layer(torch.ones(16, 32)).sum().backward()
assert layer.weight.grad.shape == (16, 32)
""",
    "CUDA use without a GPU raises one clear error": """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import te_fast.pytorch as te
try:
    te.Linear(32, 16)
except RuntimeError as error:
    assert "cuda" in str(error).lower() or "NVIDIA" in str(error), error
else:
    raise SystemExit("no error")
""",
    "NVTE_SET_CUDA_DEVICE=0 turns the device check off": """
import os
os.environ["NVTE_SET_CUDA_DEVICE"] = "0"
import te_fast.pytorch as te
assert not te.should_set_cuda_device_every_batch()
te.set_cuda_device_every_batch(True)
assert te.should_set_cuda_device_every_batch()
""",
    "switches of te_fast refuse other values": """
import os, sys
from te_fast.errors import ArgumentError
names = "DEBUG EXPERT_LOOP SYNC GRAPHS LEARN WEIGHTS_TOGETHER EXACT NO_EXCHANGE OWN_GEMM".split()
for name, value in [(f"TE_FAST_{name}", value) for name in names for value in ("true", "")]:
    os.environ[name] = value
    sys.modules.pop("te_fast._config", None)
    try:
        import te_fast._config
    except ArgumentError as error:
        assert str(error).startswith(f"{name} must be one of 0, 1") and repr(value) in str(error), error
    else:
        raise SystemExit(f"{name}={value!r} is taken")
    del os.environ[name]
os.environ["TE_FAST_OWN_GEMM"] = "grouped"
import te_fast.pytorch
""",
    "torch.compile says nothing of layers": """
import warnings
import torch
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._dynamo
import te_fast.pytorch as te
from te_fast.common.recipe import Float8CurrentScaling
# torch 2.8 warns of what it does itself.
warnings.filterwarnings("ignore", message=".*should not be instantiated")
layer = te.Linear(32, 16, device="cpu")
recipe = Float8CurrentScaling()
x = torch.ones(8, 32)
def function(x):
    with te.autocast(recipe=recipe):
        return layer(torch.sin(x)) + 1
# With gradients, torch warns by itself that it looks at those of an intermediate tensor.
with torch.no_grad():
    for each in (function, layer, lambda x: layer(x) * 2):
        assert torch.equal(torch.compile(each, backend="eager")(x), each(x))
""",
    "what asks for torch._dynamo does not keep layers out of graphs": """
import importlib.util
import torch
import te_fast.pytorch as te
importlib.util.find_spec("torch._dynamo")
from te_fast.runtime.compiling import CAN_COMPILE
layer = te.Linear(32, 16, device="cpu")
x = torch.ones(8, 32)
if CAN_COMPILE:
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
""",
    "the version is that of the distribution": """
import importlib.metadata
import te_fast
assert te_fast.__version__ == importlib.metadata.version("te_fast")
""",
}


# Cases that call torch.compile are slow.
@pytest.mark.parametrize(
    "name", quickly(CASES, *(name for name, code in CASES.items() if "torch.compile(" not in code))
)
def test_import(name, fresh):
    output = fresh(CASES[name])
    if name == "touches no GPU and starts nothing":
        # The test prints the time and asserts nothing about it, since the time depends on the machine.
        print(output, end="")
        assert output.startswith("import te_fast.pytorch: ")
        assert output.count("\n") == 1, "importing printed something"
    else:
        assert output == ""
