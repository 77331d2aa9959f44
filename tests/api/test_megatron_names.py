"""te_fast has every name of Transformer Engine that Megatron-LM mentions, or lacks the name as another version would.

``megatron_names.txt`` lists the names, from Megatron-LM's main branch of August 2026 (commit d98e8a64).
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
NAMES = (HERE / "megatron_names.txt").read_text().split()
#: Beginnings of names that te_fast lacks: Megatron-LM checks whether they exist, or uses them only with a flag.
ABSENT = (
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",  # of version 1
    "transformer_engine.pytorch.cpp_extensions.gemm.get_cublas_workspace",
    "transformer_engine.pytorch.ep",
    "transformer_engine.pytorch.cpu_offload_v1",
    "transformer_engine.pytorch.module._common",
    "transformer_engine.pytorch.module.base.UserBufferQuantizationMode",
    "transformer_engine.pytorch.module.base.get_workspace",
    "transformer_engine.pytorch.module.base.initialize_ub",
    "transformer_engine.pytorch.module.layernorm_linear.general_gemm",
    "transformer_engine.pytorch.module.linear.general_gemm",
    "transformer_engine.pytorch.distributed._NVFP4AllGatherAsyncHandle",
    "transformer_engine.pytorch.tensor.MXFP8",
    "transformer_engine.pytorch.tensor.NVFP4",
    "transformer_engine.pytorch.tensor.grouped_tensor",
    "transformer_engine.pytorch.tensor.mxfp8_tensor",
    "transformer_engine.pytorch.tensor.nvfp4_tensor",
)
SCRIPT = f"""
import sys
sys.path.insert(0, {str(HERE.parents[1] / "python" / "alias")!r})
import importlib, json
import te_fast_alias
te_fast_alias.install()

def import_from(name):
    module, _, last = name.rpartition(".")
    if not module:
        return importlib.import_module(last)
    try:
        parent = importlib.import_module(module)
    except ModuleNotFoundError:  # the name of a class's attribute
        parent = import_from(module)
    try:
        return getattr(parent, last)
    except AttributeError:
        return importlib.import_module(name)

found = {{}}
for name in json.loads({json.dumps(json.dumps(NAMES))}):
    try:
        import_from(name)
    except (ImportError, AttributeError) as error:
        found[name] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(found))
"""


def test_names_are_there_or_missing_as_those_of_older_versions(fresh):
    missing = json.loads(fresh(SCRIPT).splitlines()[-1])
    expected = {name for name in NAMES if name.startswith(ABSENT)}
    assert set(missing) == expected, {name: missing.get(name) for name in set(missing) ^ expected}
    # Megatron-LM catches only one error: that of a missing module.
    assert all(text.startswith("ModuleNotFoundError") for text in missing.values()), missing


def test_the_list_is_of_use():
    assert len(NAMES) > 120
    assert all(any(name.startswith(start) for name in NAMES) for start in ABSENT)
