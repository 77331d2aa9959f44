"""convert: states can be saved by libraries that tell tensors apart by their storages."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import te_fast
from llama_like import Model


def storage_of(tensor):
    """Return what safetensors, Accelerate and Transformers take for the identity of a tensor's memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def converted(dtype=torch.float32):
    model = Model(1, bias=True).to(dtype)
    te_fast.convert(model)
    return model


CHANGES = {
    "converted": lambda model: model,
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "undone": lambda model: (te_fast.convert.undo(model), model)[1],
    "converted again": lambda model: (
        te_fast.convert.undo(model),
        te_fast.convert(model),
        model,
    )[-1],
    "loaded": lambda model: (model.load_state_dict(Model(1, bias=True).state_dict()), model)[1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_entries_of_a_state_have_storages_of_their_own(change):
    model = CHANGES[change](converted())
    wanted, state = Model(1, bias=True).state_dict(), model.state_dict()
    assert list(state) == list(wanted)
    assert len({storage_of(tensor) for tensor in state.values()}) == len(wanted)
    for name, tensor in state.items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors(dtype, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, wanted = converted(dtype), Model(1, bias=True).to(dtype).state_dict()
    safetensors.save_model(model, tmp_path / "model.safetensors")
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    safetensors.load_model(model, tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_torch_writes_a_part_alone():
    projection = converted().layers[0].self_attn.v_proj
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save(projection.state_dict(), file)
    torch.save({name: t.clone() for name, t in projection.state_dict().items()}, plain)
    assert file.tell() < plain.tell() + 512  # The joint weights have 8 KiB more.


def test_an_entry_is_the_parameter():
    """Averages of weights are swapped in by writing to a state's entries."""
    model = converted()
    parameter = model.layers[0].self_attn.k_proj.weight
    versions = [parameter._version]
    entry = model.state_dict()["layers.0.self_attn.k_proj.weight"]
    versions.append(parameter._version)
    entry.fill_(3.0)
    versions.append(parameter._version)
    assert versions[0] == versions[1] < versions[2]
    assert torch.equal(parameter, torch.full_like(parameter, 3.0))
    kept = model.state_dict(keep_vars=True)["layers.0.self_attn.k_proj.weight"]
    assert kept is parameter


def test_an_entry_outlives_the_model():
    model = converted()
    wanted = Model(1, bias=True).state_dict()["layers.0.mlp.up_proj.weight"]
    entry = model.state_dict()["layers.0.mlp.up_proj.weight"]
    del model
    torch.full((2**16,), 7.0)
    assert torch.equal(entry, wanted)


def test_inference_tensors():
    with torch.inference_mode():
        model = converted()
    entry = model.state_dict()["layers.0.mlp.up_proj.weight"]
    assert entry.untyped_storage().nbytes() == entry.numel() * 4
    model = converted()
    with torch.inference_mode():
        state = model.state_dict()
    assert len({storage_of(tensor) for tensor in state.values()}) == len(state)
