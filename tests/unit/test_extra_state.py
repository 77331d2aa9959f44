import io
import os
import pickle
import sys
import types
import zipfile
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Format
from te_fast.errors import StateError, TeFastError
from te_fast.state import extra_state
from te_fast.state.extra_state import ExtraState, pack, unpack, write_as
from te_fast.state.pickle_writer import layer_state

KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


def make_state(history_len: int = 5, gemms: int = 1, **fields: Any) -> ExtraState:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    return ExtraState(
        DelayedScaling(amax_history_len=history_len, **fields),
        random(3 * gemms),
        random(history_len, 3 * gemms),
        random(2 * gemms),
        random(history_len, 2 * gemms),
    )


def assert_equal(got: ExtraState | None, expected: ExtraState) -> None:
    assert got is not None
    assert got.recipe == expected.recipe
    for key in KEYS:
        assert torch.equal(getattr(got, key), getattr(expected, key)), key


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


# A stand-in for Transformer Engine's module, with the classes that its pickles name.


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class TeFormat(Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclass
class TeDelayedScaling:
    margin: int = 0
    fp8_format: TeFormat = TeFormat.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class TeCurrentScaling:
    fp8_format: TeFormat = TeFormat.HYBRID


TE_MODULE = "transformer_engine.common.recipe"
TE_CLASSES = {
    "_FormatHelper": _FormatHelper,
    "Format": TeFormat,
    "DelayedScaling": TeDelayedScaling,
    "Float8CurrentScaling": TeCurrentScaling,
}
for _name, _class in TE_CLASSES.items():
    _class.__module__, _class.__qualname__ = TE_MODULE, _name


@pytest.fixture
def te_recipe(monkeypatch):
    module = types.ModuleType(TE_MODULE)
    vars(module).update(TE_CLASSES)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, TE_MODULE, module)
    return module


def te_state(state: ExtraState, recipe: Any) -> dict[str, Any]:
    tensors = {key: getattr(state, key) for key in KEYS}
    extra = {"num_gemms": 1, "fp8_checkpoint": True, "names": ["a"], "pair": (1, 2.5)}
    return {"recipe": recipe, **tensors, "extra_fp8_variables": extra}


@pytest.mark.parametrize("history_len", [1, 2, 1024])
@pytest.mark.parametrize("gemms", [1, 4])
def test_round_trip(history_len, gemms):
    state = make_state(history_len, gemms, margin=-3, amax_compute_algo="most_recent")
    packed = pack(state)
    assert packed.dtype is torch.uint8
    assert packed.device.type == "cpu"
    assert packed.numel() == 44 + 4 * 5 * gemms * (history_len + 1)
    assert_equal(unpack(packed, layer="fc1"), state)


def test_size_is_that_of_a_fresh_state():
    fresh, trained = make_state(8, 2), make_state(8, 2, margin=9, fp8_format=Format.E4M3)
    assert pack(fresh).numel() == pack(trained).numel()


def test_nothing_to_keep():
    assert pack(None).numel() == 0
    for empty in (None, torch.empty(0, dtype=torch.uint8), io.BytesIO(), pack(None)):
        assert unpack(empty, layer="fc1") is None


def test_own_algorithms_come_back_as_the_default():
    state = make_state(amax_compute_algo=lambda history: history[0])
    got = unpack(pack(state), layer="fc1")
    assert got is not None
    assert got.recipe.amax_compute_algo == "max"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("member", ["HYBRID", "E4M3"])
def test_reads_transformer_engine_pickles(te_recipe, protocol, member):
    state = make_state(margin=2, fp8_format=Format[member], reduce_amax=False)
    recipe = te_recipe.DelayedScaling(margin=2, fp8_format=TeFormat[member], reduce_amax=False)
    recipe._cached_repr = "recipe_type=DelayedScaling"
    data = pickle.dumps(te_state(state, recipe), protocol=protocol)
    if protocol == 2:  # bytes become a call of _codecs.encode; Transformer Engine writes 4 and 5
        with pytest.raises(StateError, match=r"_codecs\.encode"):
            unpack(as_tensor(data), layer="fc1")
    else:
        assert_equal(unpack(as_tensor(data), layer="fc1"), state)


def test_reads_what_is_pickled_beside_megatron(te_recipe, monkeypatch):
    """Megatron-LM has a subclass of the recipe, and replaces one of torch's functions by its own."""
    recipe, loader = "megatron.core.extensions.transformer_engine", "megatron.core.safe_globals"
    for name in ("megatron", "megatron.core", "megatron.core.extensions", recipe, loader):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    made = type("TEDelayedScaling", (te_recipe.DelayedScaling,), {"__module__": recipe})
    sys.modules[recipe].TEDelayedScaling = made

    def safe_load_from_bytes(data):
        raise AssertionError

    safe_load_from_bytes.__module__, safe_load_from_bytes.__qualname__ = (
        loader,
        "safe_load_from_bytes",
    )
    sys.modules[loader].safe_load_from_bytes = safe_load_from_bytes
    state = make_state(margin=2)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)
    own = layer_state(state)
    pickled = [pickle.dumps(te_state(state, made(margin=2)), protocol=each) for each in (3, 4)]
    monkeypatch.undo()
    assert b"megatron" not in own
    for data in (own, *pickled):
        assert (b"safe_load_from_bytes" in data) == (data is not own)
        assert_equal(unpack(as_tensor(data), layer="fc1"), state)


@pytest.fixture
def for_transformer_engine():
    write_as("transformer_engine")
    yield
    write_as("te_fast")


MODULES = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu"),
    "LayerNorm": lambda: te.LayerNorm(32, device="cpu"),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "BasicLinear": lambda: te.ops.BasicLinear(32, 32, device="cpu"),
    "DotProductAttention": lambda: te.DotProductAttention(2, 16),
}


@pytest.mark.usefixtures("for_transformer_engine")
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_written_for_transformer_engine_every_module_has_its_key(make):
    module = make()
    state = module.state_dict()
    assert state["_extra_state"].shape == (0,)
    assert state["_extra_state"].dtype is torch.uint8
    make().load_state_dict(state)
    write_as("te_fast")
    assert "_extra_state" not in module.state_dict()
    make().load_state_dict(module.state_dict())


@pytest.mark.usefixtures("for_transformer_engine")
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "BasicLinear"])
def test_written_for_transformer_engine_scales_are_pickled(te_recipe, name):
    module = MODULES[name]()
    with te.autocast(recipe=DelayedScaling(amax_history_len=3, margin=1)):
        module(torch.randn(16, 32)).sum().backward()
    packed = module.state_dict()["_extra_state"]
    content = pickle.loads(as_bytes(packed))
    own = module._scaling_states()
    for mode, state in zip(("fwd", "bwd"), own, strict=True):
        direction = "forward" if mode == "fwd" else "backward"
        part = content[direction] if name == "BasicLinear" else content
        assert isinstance(part["recipe"], te_recipe.DelayedScaling)
        assert torch.equal(part[f"scale_{mode}"], state.scale)
        assert torch.equal(part[f"amax_history_{mode}"], state.amax_history)
    twin = MODULES[name]()
    twin.load_state_dict(module.state_dict())
    for got, wanted in zip(twin._scaling_states(), own, strict=True):
        assert torch.equal(got.scale, wanted.scale)
        assert torch.equal(got.amax_history, wanted.amax_history)


def test_whose_format_is_written():
    assert extra_state.written_as() == "te_fast"
    with pytest.raises(ValueError, match="'te_fast', 'transformer_engine', got 'torch'"):
        write_as("torch")


@pytest.mark.parametrize("archive", [True, False])
def test_reads_what_torch_saved(te_recipe, archive):
    state = make_state()
    buffer = io.BytesIO()
    content = te_state(state, te_recipe.DelayedScaling())
    torch.save(content, buffer, _use_new_zipfile_serialization=archive)
    assert_equal(unpack(buffer, layer="fc1"), state)
    assert_equal(unpack(as_tensor(buffer.getvalue()), layer="fc1"), state)


def test_reads_version_1_states():
    state = make_state()
    content = te_state(state, None)
    del content["recipe"]
    content.update(scale_inv_fwd=1 / state.scale_fwd, scale_inv_bwd=1 / state.scale_bwd)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    assert_equal(unpack(buffer, layer="fc1"), state)


def test_reads_shared_and_strided_tensors():
    state = make_state(4)
    both = torch.stack([state.amax_history_fwd.t().contiguous(), torch.zeros(3, 4)])
    content = te_state(state, None)
    content["amax_history_fwd"] = both[0].t()
    assert_equal(unpack(as_tensor(pickle.dumps(content)), layer="fc1"), state)


def test_stateless_recipe_of_transformer_engine(te_recipe):
    data = pickle.dumps({"recipe": te_recipe.Float8CurrentScaling(), "extra_fp8_variables": {}})
    assert unpack(as_tensor(data), layer="fc1") is None


def test_pickled_none():
    buffer = io.BytesIO()
    torch.save(None, buffer)
    assert unpack(buffer, layer="fc1") is None


def test_writes_what_transformer_engine_reads(te_recipe):
    state = make_state(6, 2, margin=1, fp8_format=Format.E4M3)
    packed = as_tensor(layer_state(state))
    assert_equal(unpack(packed, layer="fc1"), state)
    content = pickle.loads(as_bytes(packed))
    assert isinstance(content["recipe"], te_recipe.DelayedScaling)
    assert content["recipe"].fp8_format is TeFormat.E4M3
    assert content["recipe"].margin == 1
    assert content["extra_fp8_variables"] == {"num_gemms": 2, "fp8_checkpoint": True}
    for key in KEYS:
        assert torch.equal(content[key], getattr(state, key))


# Hostile and damaged states.


class Payload:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def bomb(depth: int) -> bytes:
    return b"\x80\x04)" + b"\x85" * depth + b"."


def nested_key(depth: int) -> bytes:
    return b"\x80\x04}" + b")" + b"\x85" * depth + b"Ns."


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"te_fast\0",
        b"\x80",
        b"\x80\x04.",
        b"\x80\x04N",
        b"\x80\x04}u.",
        b"\x80\x04(.",
        b"\x80\x04h\x07.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        b"\x80\x04\x8a\xff.",
        b"\x80\x04K\x01.trailing",
        b"PK\x03\x04",
        b"PK\x03\x04" + bytes(100),
        bomb(90_000),
        bomb(1_000_000),
        nested_key(90_000),
        b"cos\nsystem\n(S'true'\ntR.",
        pickle.dumps({"recipe": os.system}),
        pickle.dumps(Payload(os.getcwd)),
        pickle.dumps({"scale_fwd": Payload(eval, "1 + 1")}),
        pickle.dumps({"scale_fwd": torch.ones(3)}),
        pickle.dumps([1, 2, 3]),
        pickle.dumps({"recipe": "DelayedScaling"}),
    ],
    ids=lambda data: f"{data[:16]!r}-{len(data)}",
)
def test_hostile_bytes_are_refused(data):
    with pytest.raises(StateError, match=r"^decoder\.fc1: cannot read _extra_state"):
        unpack(as_tensor(data), layer="decoder.fc1")


def test_nothing_is_executed(tmp_path):
    witness = tmp_path / "witness"
    data = pickle.dumps({"recipe": Payload(os.mkdir, str(witness))})
    with pytest.raises(StateError, match=r"(posix|nt)\.mkdir"):
        unpack(as_tensor(data), layer="fc1")
    assert not witness.exists()


@pytest.mark.parametrize("state", [torch.zeros(8), torch.zeros(8, dtype=torch.int8), b"abc", [1]])
def test_wrong_type_is_refused(state):
    with pytest.raises(StateError, match=r"torch\.uint8") as caught:
        unpack(state, layer="fc1")
    assert isinstance(caught.value, TeFastError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("cut", [1, 7, 8, 15, 20, 47, 48, 49, 100])
def test_truncated_and_oversized(cut):
    packed = pack(make_state())
    for damaged in (packed[:cut], packed[:-cut], torch.cat([packed, packed[:cut]])):
        with pytest.raises(StateError, match="fc1"):
            unpack(damaged, layer="fc1")


def test_oversized_lengths_allocate_nothing():
    data = bytearray(as_bytes(pack(make_state())))
    for field in range(4):
        damaged = bytearray(data)
        damaged[28 + 4 * field : 32 + 4 * field] = b"\xff\xff\xff\x7f"
        with pytest.raises(StateError, match=r"expected \d+ bytes"):
            unpack(as_tensor(bytes(damaged)), layer="fc1")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale_fwd", torch.tensor([1.0, float("nan"), 1.0])),
        ("scale_fwd", torch.tensor([1.0, float("inf"), 1.0])),
        ("scale_bwd", torch.tensor([0.0, 1.0])),
        ("scale_bwd", torch.ones(3)),
        ("scale_fwd", torch.ones(3, dtype=torch.float16)),
        ("amax_history_fwd", torch.ones(5)),
        ("amax_history_fwd", torch.ones(5, 2)),
        ("amax_history_bwd", -torch.ones(5, 2)),
        ("amax_history_bwd", torch.ones(0, 2)),
        ("amax_history_bwd", 3.0),
    ],
)
def test_impossible_values_are_refused(key, value):
    content = te_state(make_state(), None)
    content[key] = value
    with pytest.raises(StateError, match="fc1"):
        unpack(as_tensor(pickle.dumps(content)), layer="fc1")


def test_a_tensor_beyond_its_storage_is_refused():
    content = pickle.dumps(te_state(make_state(5), None), protocol=4)
    # amax_history_fwd has size (5, 3): BININT1 5, BININT1 3, TUPLE2.
    assert content.count(b"K\x05K\x03\x86") == 1
    for size in (b"K\x06K\x03\x86", b"K\xffK\x03\x86"):
        with pytest.raises(StateError, match="storage"):
            unpack(as_tensor(content.replace(b"K\x05K\x03\x86", size)), layer="fc1")


def test_compressed_archive_is_refused():
    saved, squeezed = io.BytesIO(), io.BytesIO()
    torch.save(te_state(make_state(), None), saved)
    with (
        zipfile.ZipFile(saved) as source,
        zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    with pytest.raises(StateError, match="compressed"):
        unpack(squeezed, layer="fc1")


def _samples() -> list[bytes]:
    content = te_state(make_state(3), None)
    saved, legacy = io.BytesIO(), io.BytesIO()
    torch.save(content, saved)
    torch.save(content, legacy, _use_new_zipfile_serialization=False)
    own, te = pack(make_state(3)), as_tensor(layer_state(make_state(3)))
    pickled = pickle.dumps(content)
    return [as_bytes(own), as_bytes(te), pickled, saved.getvalue(), legacy.getvalue()]


SAMPLES = _samples()


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sample=st.sampled_from(range(len(SAMPLES))),
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=0, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    cut=st.floats(0, 1),
    whole=st.booleans(),
)
def test_mutations_end_in_a_state_or_a_state_error(sample, edits, cut, whole):
    data = bytearray(SAMPLES[sample])
    for position, patch in edits:
        start = int(position * len(data))
        data[start : start + len(patch)] = patch
    if not whole:
        data = data[: int(cut * len(data))]
    try:
        state = unpack(as_tensor(bytes(data)) if data else None, layer="fc1")
    except StateError as error:
        assert str(error).startswith("fc1: ")  # noqa: PT017 - a state is right, too
    else:
        if state is not None:
            assert all(bool(getattr(state, key).isfinite().any()) for key in ("scale_fwd",))
            assert state.recipe.amax_history_len == state.amax_history_fwd.shape[0]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"\x80\x04", b"te_fast\0", b"PK\x03\x04", b"x"]))
def test_random_bytes(data, prefix):
    with pytest.raises(StateError):
        unpack(as_tensor(prefix + data + b"!"), layer="fc1")
