"""Checkpoints from and to Transformer Engine; classes with the names of its loader stand in for the loader."""

import argparse
import collections
import copy
import io
import pickle
import sys
import types
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from quantized_tensors import parts, quantizer
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.convert_checkpoint import Report, convert_file, main
from te_fast.errors import ArgumentError, StateError, UnsupportedError
from te_fast.state.extra_state import write_as

KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
OPTIONS = {"params_dtype": torch.bfloat16, "device": "cpu"}
ENGINE = "transformer_engine.pytorch"


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclass
class EngineRecipe:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"


class EngineDType(IntEnum):
    kFloat8E4M3 = 7


def _make_float8_tensor_in_reduce_ex(data, fp8_dtype, scale, dtype, shape, transpose=None):
    return EngineTensor(data, fp8_dtype, scale, dtype, shape, transpose)


def _make_float8_blockwise_tensor_in_reduce_ex(*fields):
    return EngineTensor(*fields)


def _make_identity_tensor_in_reduce_ex(hp_data, quantizer, dtype, shape):
    return EngineTensor(hp_data, quantizer, dtype, shape)


class IdentityQuantizer:
    """Transformer Engine's quantizer, with the attributes of its pickle."""

    def __init__(self):
        self.rowwise_usage = self.columnwise_usage = True
        self.internal = self.optimize_for_gemm = False
        self.dtype = None


class EngineTensor:
    """A quantised tensor of Transformer Engine, with the fields of its pickle."""

    def __init__(self, *fields):
        self.fields = fields

    def __reduce_ex__(self, protocol):
        makers = {
            4: _make_identity_tensor_in_reduce_ex,
            6: _make_float8_tensor_in_reduce_ex,
            10: _make_float8_blockwise_tensor_in_reduce_ex,
        }
        return makers[len(self.fields)], self.fields

    @classmethod
    def _make_in_reduce_ex(cls, *fields):
        return cls(*fields)


class OldTensor(EngineTensor):
    """A quantised tensor as versions before 2.0 write it: by a method of the class."""

    def __reduce_ex__(self, protocol):
        return OldTensor._make_in_reduce_ex, self.fields


NAMES = {
    "transformer_engine.common.recipe": {
        "_FormatHelper": _FormatHelper,
        "Format": Format,
        "DelayedScaling": EngineRecipe,
    },
    f"{ENGINE}.constants": {"DType": EngineDType},
    f"{ENGINE}.tensor.float8_tensor": {
        "_make_float8_tensor_in_reduce_ex": _make_float8_tensor_in_reduce_ex,
    },
    f"{ENGINE}.float8_tensor": {"Float8Tensor": OldTensor},
    f"{ENGINE}.tensor.float8_blockwise_tensor": {
        "_make_float8_blockwise_tensor_in_reduce_ex": _make_float8_blockwise_tensor_in_reduce_ex,
    },
    f"{ENGINE}.tensor.identity_tensor": {
        "_make_identity_tensor_in_reduce_ex": _make_identity_tensor_in_reduce_ex,
        "IdentityQuantizer": IdentityQuantizer,
    },
}


for _path, _names in NAMES.items():
    for _name, _thing in _names.items():
        _thing.__module__, _thing.__qualname__ = _path, _name


@pytest.fixture
def engine(monkeypatch):
    """Modules with Transformer Engine's names, while a test writes and reads as Transformer Engine does."""
    for path, names in NAMES.items():
        parents = path.split(".")
        for count in range(1, len(parents)):
            parent = ".".join(parents[:count])
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(path)
        monkeypatch.setitem(sys.modules, path, module)
        for name, thing in names.items():
            setattr(module, name, thing)


def trained(make, recipe, width=64):
    torch.manual_seed(1)
    module = make()
    for _ in range(3):
        with te.autocast(recipe=recipe):
            y = module(torch.randn(32, width).bfloat16())
        y.float().pow(2).sum().backward()
    return module


def linear():
    return te.Linear(64, 48, **OPTIONS)


def mlp():
    return te.LayerNormMLP(64, 128, **OPTIONS)


def operations():
    return te.ops.Sequential(
        te.ops.Quantize(),
        te.ops.GELU(),
        te.ops.Linear(64, 64, device="cpu", dtype=torch.bfloat16),
    )


def load(tensor):
    return pickle.loads(bytes(tensor.tolist()))


@pytest.mark.parametrize(("make", "gemms"), [(linear, 1), (mlp, 2)])
def test_transformer_engine_reads_the_state_of_layers(make, gemms, engine):
    layer = trained(make, DelayedScaling(margin=1, amax_history_len=4))
    before = layer.state_dict()
    state = te_fast.convert_checkpoint(before, to="transformer_engine")
    assert type(state) is type(before)
    assert state._metadata == before._metadata
    assert state["_extra_state"] is not before["_extra_state"]
    content = load(state["_extra_state"])
    recipe = content["recipe"]
    assert isinstance(recipe, EngineRecipe)
    assert (recipe.margin, recipe.amax_history_len, recipe.fp8_format) == (1, 4, Format.HYBRID)
    assert content["extra_fp8_variables"] == {"num_gemms": gemms, "fp8_checkpoint": True}
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    expected = (forward.scale, forward.amax_history, backward.scale, backward.amax_history)
    for key, tensor in zip(KEYS, expected, strict=True):
        assert torch.equal(content[key], tensor), key


def test_transformer_engine_reads_the_state_of_operations(engine):
    module = trained(operations, DelayedScaling(amax_history_len=4))
    state = te_fast.convert_checkpoint(module.state_dict())
    contents = {key: load(value) for key, value in state.items() if key.endswith("_extra_state")}
    assert sorted(map(sorted, contents.values())) == [["backward", "forward"], ["forward"]]
    for key, content in contents.items():
        op = module.get_submodule(key.removesuffix("._extra_state"))
        for mode, part in content.items():
            scale, history = KEYS[:2] if mode == "forward" else KEYS[2:]
            kept = op._delayed_state(mode)
            assert torch.equal(part[scale], kept.scale)
            assert torch.equal(part[history], kept.amax_history)
            assert isinstance(part["recipe"], EngineRecipe)
            assert part["extra_fp8_variables"] == {}


@pytest.mark.parametrize("make", [linear, mlp, operations])
def test_there_and_back(make):
    module = trained(make, DelayedScaling(amax_history_len=4))
    own = module.state_dict()
    there = te_fast.convert_checkpoint(own)
    back = te_fast.convert_checkpoint(there, to="te_fast")
    for key, value in own.items():
        assert torch.equal(value, back[key]), key
    other = make()
    other.load_state_dict(there)
    for key, value in other.state_dict().items():
        assert torch.equal(value, own[key]), key


def test_nested_checkpoints_keep_their_form():
    layer = trained(linear, DelayedScaling(amax_history_len=4))
    tree = {
        "model": [layer.state_dict(), {"x": torch.ones(2)}],
        "optimizer": collections.OrderedDict(state={0: {"step": 3}}),
        "args": (1, "two", None),
    }
    report = Report()
    made = te_fast.convert_checkpoint(tree, report=report)
    assert report.states == ["model.0._extra_state"]
    assert made["optimizer"] is tree["optimizer"]
    assert made["args"] is tree["args"]
    assert made["model"][0]["weight"] is tree["model"][0]["weight"] or torch.equal(
        made["model"][0]["weight"], layer.weight
    )
    assert "_extra_state" in tree["model"][0]
    nothing = {"weight": torch.ones(2), "_extra_state": torch.empty(0, dtype=torch.uint8)}
    assert te_fast.convert_checkpoint(nothing) is nothing


class Step(NamedTuple):
    model: Any
    number: int


def test_containers_keep_their_classes():
    state = trained(linear, DelayedScaling(amax_history_len=4)).state_dict()
    by_name = collections.defaultdict(dict, {"model": state})
    tree = {"step": Step(state, 3), "by_name": by_name, "fixed": types.MappingProxyType(state)}
    report = Report()
    made = te_fast.convert_checkpoint(tree, report=report)
    paths = ("step.0", "by_name.model", "fixed")
    assert report.states == [f"{path}._extra_state" for path in paths]
    assert isinstance(made["step"], Step)
    assert made["step"].number == 3
    assert made["by_name"].default_factory is dict
    assert made["step"].model._metadata == state._metadata
    assert type(made["fixed"]) is types.MappingProxyType


def test_modules_are_refused():
    with pytest.raises(ArgumentError, match=r"Linear.*state_dict\(\)"):
        te_fast.convert_checkpoint(linear())


def test_states_of_te_fast_do_not_depend_on_what_layers_write():
    state = trained(linear, DelayedScaling(amax_history_len=4)).state_dict()
    theirs = te_fast.convert_checkpoint(state, to="transformer_engine")
    write_as("transformer_engine")
    try:
        back = te_fast.convert_checkpoint(theirs, to="te_fast")
    finally:
        write_as("te_fast")
    assert torch.equal(back["_extra_state"], state["_extra_state"])


def test_what_cannot_be_converted_is_named():
    state = {"fc1._extra_state": torch.ones(9, dtype=torch.uint8)}
    with pytest.raises(StateError, match="fc1"):
        te_fast.convert_checkpoint(state)
    with pytest.raises(ArgumentError, match="'te_fast'"):
        te_fast.convert_checkpoint({}, to="torch")


@pytest.mark.parametrize("kind", ["current", "2d"])
def test_quantised_weights_go_by_transformer_engines_names(kind, engine, tmp_path):
    weight = quantizer(kind)(torch.randn(128, 256).bfloat16())
    torch.save({"weight": weight}, tmp_path / "own.pt")
    report = convert_file(tmp_path / "own.pt", tmp_path / "their.pt")
    assert report.weights == ["weight"]
    found = torch.load(tmp_path / "their.pt", weights_only=False)["weight"]
    assert isinstance(found, EngineTensor)
    row, scale, col, col_scale = parts(weight)
    if kind == "current":
        data, dtype, found_scale, nominal, shape, transpose = found.fields
        assert (dtype, nominal, tuple(shape)) == (7, torch.bfloat16, (128, 256))
        assert transpose is None
        assert torch.equal(data, row)
        assert torch.equal(found_scale, scale)
    else:
        shape, *tensors, dtype, nominal, own, is_2d, _ = found.fields
        for one, other in zip(tensors, (row, scale, col, col_scale), strict=True):
            assert torch.equal(one, other)
        assert (tuple(shape), dtype, nominal, own, is_2d) == (
            (128, 256),
            7,
            torch.bfloat16,
            None,
            True,
        )


@pytest.mark.parametrize("form", ["new", "old", "block"])
def test_quantised_weights_of_transformer_engine_are_read(form, engine, tmp_path):
    made = quantizer("2d" if form == "block" else "current")(torch.randn(128, 256).bfloat16())
    row, scale, col, col_scale = parts(made)
    if form == "block":
        shape = torch.Size((128, 256))
        tensor = EngineTensor(
            shape, row, scale, col, col_scale, EngineDType(7), torch.bfloat16, None, True, None
        )
    else:
        kind = OldTensor if form == "old" else EngineTensor
        tensor = kind(row, EngineDType(7), scale, torch.bfloat16, torch.Size((128, 256)), None)
    torch.save({"model": {"weight": tensor}}, tmp_path / "their.pt")
    convert_file(tmp_path / "their.pt", tmp_path / "own.pt", to="te_fast")
    found = torch.load(tmp_path / "own.pt", weights_only=True)["model"]["weight"]
    assert type(found) is type(made)
    assert torch.equal(found.dequantize(), made.dequantize())
    convert_file(tmp_path / "their.pt", tmp_path / "plain.pt", to="te_fast", dequantize=True)
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)["model"]["weight"]
    assert type(plain) is torch.Tensor
    assert torch.equal(plain, made.dequantize())
    recipe = Float8BlockScaling() if form == "block" else Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(256, 128, bias=False, **OPTIONS)
    layer.load_state_dict({"weight": found})
    assert torch.equal(layer.weight.dequantize(), made.dequantize())


@pytest.mark.parametrize("kind", ["delayed", "current", "2d"])
def test_parameters_of_fp8_are_written_and_read(kind, tmp_path):
    weight = quantizer(kind)(torch.randn(128, 256).bfloat16())
    for requires_grad in (True, False):
        parameter = torch.nn.Parameter(weight, requires_grad=requires_grad)
        torch.save({"model": {"weight": parameter}}, tmp_path / "own.pt")
        for name, source, to in (
            ("their.pt", "own.pt", "transformer_engine"),
            ("back.pt", "their.pt", "te_fast"),
        ):
            report = convert_file(tmp_path / source, tmp_path / name, to=to)
            assert report.weights == ["model.weight"]
        found = torch.load(tmp_path / "back.pt", weights_only=True)["model"]["weight"]
        assert type(found) is type(weight)
        assert isinstance(found, torch.nn.Parameter)
        assert found.requires_grad == requires_grad
        assert torch.equal(found.dequantize(), weight.dequantize())
        for path in tmp_path.iterdir():
            path.unlink()


def test_dequantised_parameters_stay_parameters():
    weight = quantizer("current")(torch.randn(16, 32).bfloat16())
    for requires_grad in (True, False):
        parameter = torch.nn.Parameter(weight, requires_grad=requires_grad)
        made = te_fast.convert_checkpoint({"weight": parameter}, dequantize=True)["weight"]
        assert type(made) is torch.nn.Parameter
        assert made.is_leaf
        assert made.requires_grad == requires_grad
        assert torch.equal(copy.deepcopy(made), weight.dequantize())


def hybrid_quantizer():
    return te.HybridQuantizer(
        rowwise_quantizer=quantizer("current"), columnwise_quantizer=te.IdentityQuantizer()
    )


@pytest.mark.parametrize("make", [te.IdentityQuantizer, hybrid_quantizer])
def test_weights_of_other_quantizers_are_dequantised(make, tmp_path):
    weight = make()(torch.randn(16, 32))
    torch.save({"weight": weight}, tmp_path / "own.pt")
    report = convert_file(tmp_path / "own.pt", tmp_path / "plain.pt", dequantize=True)
    assert report.weights == ["weight"]
    found = torch.load(tmp_path / "plain.pt", weights_only=True)["weight"]
    assert type(found) is torch.Tensor
    assert torch.equal(found, weight.dequantize())


def test_identity_weights_go_by_transformer_engines_names(engine, tmp_path):
    values = torch.randn(16, 32).bfloat16()
    torch.save({"weight": te.IdentityQuantizer()(values)}, tmp_path / "own.pt")
    convert_file(tmp_path / "own.pt", tmp_path / "their.pt")
    found = torch.load(tmp_path / "their.pt", weights_only=False)["weight"]
    assert isinstance(found, EngineTensor)
    data, own, nominal, shape = found.fields
    assert torch.equal(data, values)
    assert (own, nominal, tuple(shape)) == (None, torch.bfloat16, (16, 32))
    tensor = EngineTensor(values, IdentityQuantizer(), torch.bfloat16, torch.Size((16, 32)))
    torch.save({"weight": tensor}, tmp_path / "other.pt")
    convert_file(tmp_path / "other.pt", tmp_path / "back.pt", to="te_fast")
    back = torch.load(tmp_path / "back.pt", weights_only=True)["weight"]
    assert type(back).__name__ == "IdentityTensor"
    assert torch.equal(back.quantize_(2 * values).dequantize(), 2 * values)


def test_hybrid_weights_are_refused_for_transformer_engine(tmp_path):
    weight = hybrid_quantizer()(torch.randn(16, 32))
    torch.save({"fc1": {"weight": weight}}, tmp_path / "own.pt")
    for dry_run in (True, False):
        with pytest.raises(UnsupportedError, match=r"fc1\.weight.*dequantize=True"):
            convert_file(tmp_path / "own.pt", tmp_path / "their.pt", dry_run=dry_run)
    assert not (tmp_path / "their.pt").exists()
    convert_file(tmp_path / "own.pt", tmp_path / "copy.pt", to="te_fast")
    found = torch.load(tmp_path / "copy.pt", weights_only=True)["fc1"]["weight"]
    assert torch.equal(found.dequantize(), weight.dequantize())


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_nothing_of_a_file_is_run(tmp_path):
    torch.save({"weight": Payload(str(tmp_path / "run"))}, tmp_path / "bad.pt")
    with pytest.raises(StateError, match="without running code"):
        convert_file(tmp_path / "bad.pt", tmp_path / "out.pt")
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(StateError, match="not a checkpoint"):
        convert_file(tmp_path / "torn.pt", tmp_path / "out.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pt", "torn.pt"]


@pytest.mark.parametrize("archive", [True, False])
def test_damaged_files_are_named(archive, tmp_path):
    path = tmp_path / "torn.pt"
    torch.save({"x": torch.ones(99)}, path, _use_new_zipfile_serialization=archive)
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StateError, match=r"torn\.pt"):
            convert_file(path, tmp_path / "out.pt")
    # A memo entry that is not there.
    path.write_bytes(b"\x80\x02h\x05.")
    with pytest.raises(StateError, match=r"torn\.pt"):
        convert_file(path, tmp_path / "out.pt")


def test_objects_that_are_not_read_are_named(tmp_path):
    torch.save({"args": argparse.Namespace(steps=1)}, tmp_path / "own.pt")
    with pytest.raises(StateError, match=r"argparse\.Namespace.*safe_globals"):
        convert_file(tmp_path / "own.pt", tmp_path / "out.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        convert_file(tmp_path / "own.pt", tmp_path / "out.pt")


def test_safetensors_are_not_files_of_torch_save(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"x": torch.ones(2)}, tmp_path / "own.safetensors")
    with pytest.raises(StateError, match=r"own\.safetensors: not a checkpoint of torch\.save"):
        convert_file(tmp_path / "own.safetensors", tmp_path / "out.safetensors")


class Sly:
    def __reduce__(self):
        return getattr, (collections.OrderedDict, "fromkeys")


def test_attributes_of_others_are_not_looked_up(tmp_path):
    torch.save({"weight": Sly()}, tmp_path / "sly.pt")
    with pytest.raises(te_fast.TeFastError, match="fromkeys"):
        convert_file(tmp_path / "sly.pt", tmp_path / "out.pt")


def test_the_command_line(tmp_path, capsys):
    layer = trained(linear, DelayedScaling(amax_history_len=4))
    folder = tmp_path / "run"
    (folder / "rank0").mkdir(parents=True)
    torch.save(layer.state_dict(), folder / "rank0" / "model.pt")
    torch.save({"x": torch.ones(1)}, folder / "plain.pt")
    (folder / "folder.pt").mkdir()
    (folder / "notes.txt").write_text("not a checkpoint")
    target = tmp_path / "converted"
    assert main([str(folder), str(target), "--dry-run"]) == 0
    assert not target.exists()
    assert "1 states" in capsys.readouterr().out
    assert main([str(folder), str(target)]) == 0
    made = torch.load(target / "rank0" / "model.pt", weights_only=True)
    other = linear()
    other.load_state_dict(made)
    assert torch.equal(other.get_extra_state(), layer.get_extra_state())
    assert main([str(folder), str(target)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), str(target)]) == 2
    assert main([str(folder / "plain.pt"), str(folder / "notes.txt" / "out.pt")]) == 2
    assert "notes.txt" in capsys.readouterr().err
    assert (
        main([str(target / "rank0" / "model.pt"), str(tmp_path / "back.pt"), "--to", "te_fast"])
        == 0
    )
    assert torch.equal(
        torch.load(tmp_path / "back.pt", weights_only=True)["_extra_state"], layer.get_extra_state()
    )


def test_the_bar_is_for_terminals(tmp_path, monkeypatch, capsys):
    torch.save({"x": torch.ones(1)}, tmp_path / "a.pt")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 0
    assert "0/1 a.pt" in terminal.getvalue()
    assert terminal.getvalue().endswith("1/1\n")
    capsys.readouterr()


def test_bf16_checkpoints_load_into_fp8_models_and_back(recipe):
    torch.manual_seed(0)
    plain = te.Linear(256, 128, **OPTIONS)
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(256, 128, **OPTIONS)
    layer.load_state_dict(plain.state_dict())
    values = layer.weight.dequantize()
    assert (values - plain.weight).abs().max() <= 0.0625 * plain.weight.abs().max()
    other = te.Linear(256, 128, **OPTIONS)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, values)
    third = te.Linear(256, 128, **OPTIONS)
    third.load_state_dict(te_fast.convert_checkpoint(layer.state_dict(), dequantize=True))
    assert torch.equal(third.weight, values)
