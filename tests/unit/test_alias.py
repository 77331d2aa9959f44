"""te_fast_alias: code that imports ``transformer_engine`` gets te_fast, unless another package has that name."""

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = f"""
import sys
sys.path.insert(0, {str(ROOT / "python" / "alias")!r})
import importlib, importlib.metadata, importlib.util, pickle
import te_fast_alias
"""


def test_nothing_is_imported_before_it_is_asked_for(fresh):
    fresh(f"""{START}
from te_fast_alias import start
start()
assert te_fast_alias.is_installed()
assert importlib.util.find_spec("transformer_engine").name == "transformer_engine"
assert "te_fast" not in sys.modules and "transformer_engine" not in sys.modules
""")


def test_benches_do_not_take_the_alias_for_transformer_engine(fresh):
    pytest.importorskip("rich")
    fresh(f"""{START}
te_fast_alias.install()
sys.path.insert(0, {str(ROOT / "benches")!r})
import _harness
assert _harness.peer() is None
""")


def test_consumers_get_the_very_objects(fresh):
    fresh(f"""{START}
te_fast_alias.install()
te_fast_alias.install()  # twice is once
import transformer_engine
assert transformer_engine.__te_fast__
assert transformer_engine.pytorch.Linear is transformer_engine.pytorch.module.Linear
import transformer_engine.pytorch as te
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.utils import cast_master_weights_to_fp8
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import DotProductAttention
import te_fast.pytorch
import te_fast.pytorch.module.base
assert te is te_fast.pytorch
assert sys.modules["transformer_engine.pytorch.module.base"] is te_fast.pytorch.module.base
assert te.module.base.__spec__.name == "te_fast.pytorch.module.base"
layer = te.Linear(16, 16, device="cpu")
assert isinstance(layer, te_fast.pytorch.module.base.TransformerEngineBaseModule)
assert isinstance(DelayedScaling(), te_fast.common.recipe.Recipe)
assert importlib.import_module("transformer_engine.pytorch.ops.basic") is te_fast.pytorch.ops.basic
assert pickle.loads(pickle.dumps(DelayedScaling(margin=1))) == DelayedScaling(margin=1)
pickled = pickle.dumps(DelayedScaling())
assert b"transformer_engine.common.recipe" in pickled and b"te_fast" not in pickled
assert layer.state_dict()["_extra_state"].shape == (0,)
with te.autocast(recipe=DelayedScaling()):
    assert te_fast.pytorch.FP8GlobalStateManager.is_fp8_enabled()
""")


@pytest.mark.parametrize("first", ["", "import transformer_engine.pytorch"])
def test_the_extension_is_te_fasts_own_module(fresh, first):
    fresh(f"""{START}
te_fast_alias.install()
spec = importlib.util.find_spec("transformer_engine_torch")
assert spec.name == "transformer_engine_torch"
assert "te_fast" not in sys.modules
{first}
import transformer_engine_torch as tex
import te_fast.tex
assert tex is te_fast.tex is sys.modules["transformer_engine_torch"]
import te_fast.pytorch
assert tex.DType is te_fast.pytorch.DType
from transformer_engine.pytorch.cpp_extensions import general_gemm, gelu, DType
from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm
assert gelu is tex.gelu and DType is tex.DType
assert pickle.loads(pickle.dumps(tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK)) is tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK
assert pickle.loads(pickle.dumps(tex.gelu)) is tex.gelu
te_fast_alias.uninstall()
assert importlib.util.find_spec("transformer_engine_torch") is None
""")


def test_another_extension_goes_first(fresh, tmp_path):
    """The package and its extension are of one kind: te_fast's extension never serves NVIDIA's package."""
    (tmp_path / "transformer_engine_torch.py").write_text("MARK = 1\n")
    other = tmp_path / "package" / "transformer_engine"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    fresh(f"""{START}
sys.path.insert(0, {str(tmp_path)!r})
try:
    te_fast_alias.install()
except RuntimeError as error:
    assert "transformer_engine_torch" in str(error) and {str(tmp_path)!r} in str(error), error
else:
    raise AssertionError
sys.path.pop(0)
te_fast_alias.install()
sys.path.insert(0, {str(tmp_path)!r})
import transformer_engine_torch
assert transformer_engine_torch.MARK == 1
del sys.modules["transformer_engine_torch"]
sys.path[0] = {str(other.parent)!r}
assert importlib.util.find_spec("transformer_engine_torch") is None
""")


def test_modules_say_whose_they_are(fresh):
    """Lightning replaces the linear layers of a model if no module's class belongs to Transformer Engine."""
    fresh(f"""{START}
import te_fast.pytorch
before = pickle.dumps(te_fast.pytorch.Linear)
assert te_fast.pytorch.Linear.__module__ == "te_fast.pytorch"
te_fast_alias.install()
import transformer_engine.pytorch as te
kinds = [te.Linear, te.LayerNorm, te.RMSNorm, te.LayerNormLinear, te.LayerNormMLP, te.GroupedLinear]
kinds += [te.DotProductAttention, te.MultiheadAttention, te.TransformerLayer]  # loaded after the alias
for kind in kinds:
    assert kind.__module__ == "transformer_engine.pytorch", kind
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert kind.__name__ in repr(kind)
assert pickle.loads(before) is te.Linear
import torch
for kind in (te.Linear, te.LayerNormLinear):
    layer = kind(16, 16, device="cpu")
    again = pickle.loads(pickle.dumps(layer))
    x = torch.randn(4, 16)
    assert torch.equal(again(x), layer(x))
for layer in (te.LayerNorm(16, device="cpu"), te.RMSNorm(16, device="cpu")):
    assert te.distributed.has_te_modules(torch.nn.Sequential(layer))
# Tensors travel in checkpoints that te_fast reads without the other name.
assert te.Float8Tensor.__module__ == "te_fast.pytorch"
""")


def test_versions(fresh):
    """Megatron-LM, Accelerate and Lightning ask for the version in these ways."""
    fresh(f"""{START}
te_fast_alias.install()
version = importlib.metadata.version("transformer-engine")
assert version == importlib.metadata.version("transformer_engine")
summary = importlib.metadata.metadata("transformer-engine")["Summary"]
assert "te_fast" in summary and "not NVIDIA" in summary
import transformer_engine, te_fast
assert transformer_engine.__version__ == version
assert version.startswith(te_fast.TRANSFORMER_ENGINE_VERSION + "+te.fast")
try:
    from packaging.version import Version
except ImportError:  # torch 2.6 comes without
    pass
else:
    assert Version("2.20.2") < Version(version) < Version("2.20.3")
# Who manages packages looks into folders, where there is nothing that pip could take for NVIDIA's.
found = importlib.metadata.distributions(path=sys.path)
assert "transformer-engine" not in [each.metadata["Name"] for each in found]
names = [each.metadata["Name"] for each in importlib.metadata.distributions()]
assert names.count("transformer-engine") == 1
""")


def test_what_is_not_there_is_missing_as_anything_is(fresh):
    fresh(f"""{START}
te_fast_alias.install()
import transformer_engine
import transformer_engine.pytorch as te
def raised(statement):
    try:
        exec(statement)
    except Exception as error:
        return error
error = raised("import transformer_engine.pytorch.ep")
assert isinstance(error, ModuleNotFoundError), error
error = raised("import transformer_engine.jax")
assert isinstance(error, ModuleNotFoundError), error
import transformer_engine_torch
error = raised("transformer_engine_torch.fused_attn_fwd")
assert isinstance(error, AttributeError) and "te_fast" in str(error), error
error = raised("from transformer_engine_torch import MXFP8")
assert isinstance(error, ImportError), error
error = raised("from transformer_engine.pytorch import ep")
assert isinstance(error, ImportError) and "te_fast" in str(error), error
error = raised("te.MXFP8Tensor")
assert isinstance(error, AttributeError) and "te_fast" in str(error), error
error = raised("transformer_engine.jax")
assert isinstance(error, AttributeError) and "te_fast" in str(error), error
assert importlib.util.find_spec("transformer_engine.pytorch.ep") is None
assert importlib.util.find_spec("transformer_engine.pytorch.fp8") is not None
assert not hasattr(transformer_engine, "finder")
""")


def test_it_can_be_taken_back(fresh):
    fresh(f"""{START}
te_fast_alias.install()
import transformer_engine
te_fast_alias.uninstall()
te_fast_alias.uninstall()
assert importlib.util.find_spec("transformer_engine") is None
try:
    importlib.metadata.version("transformer-engine")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    raise AssertionError
transformer_engine.pytorch.Linear
""")


def test_another_package_of_the_name_goes_first(fresh, tmp_path):
    other = tmp_path / "transformer_engine"
    other.mkdir()
    (other / "__init__.py").write_text("__version__ = '1.2.3'\n")
    info = tmp_path / "transformer_engine-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer_engine\nVersion: 1.2.3\n"
    )
    fresh(f"""{START}
import warnings
sys.path.insert(0, {str(tmp_path)!r})
try:
    te_fast_alias.install()
except RuntimeError as error:
    from te_fast.errors import StateError
    assert isinstance(error, StateError) and {str(other)!r} in str(error), error
    assert "uninstall" in str(error)
else:
    raise AssertionError
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    te_fast_alias.start()
assert {str(other)!r} in str(caught[0].message)
assert not te_fast_alias.is_installed()
# One that comes later, as editable installs may.
sys.path.pop(0)
te_fast_alias.install()
sys.path.insert(0, {str(tmp_path)!r})
assert importlib.metadata.version("transformer-engine") == "1.2.3"
import transformer_engine
assert transformer_engine.__version__ == "1.2.3"
""")


def test_a_directory_that_an_uninstalled_package_left_is_none(fresh, tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    fresh(f"""{START}
sys.path.insert(0, {str(tmp_path)!r})
te_fast_alias.install()
""")


def test_wheel():
    wheels = list((ROOT / "dist").glob("te_fast_alias-*.whl"))
    if not wheels:
        pytest.skip("no wheel of the alias in dist/; make alias builds one")
    (wheel,) = wheels
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        code = ("__init__", "extension", "finder", "metadata", "root/__init__")
        assert names == {"te_fast_alias.pth", *(f"te_fast_alias/{name}.py" for name in code)}
        assert archive.read("te_fast_alias.pth").decode().count("\n") == 1
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        assert "\nRequires-Dist: te-fast\n" in archive.read(metadata).decode().replace("_", "-")
