"""Megatron-LM of PyPI trains on te_fast unmodified: dense, with experts, on ranks that share layers, in FP8."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core: make test has it"
    ),
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.timeout(300),
]
SPLIT = {"tp": 2, "sp": True}
EXPERTS = {"moe": True}
SCENES = {
    "dense": {"resume": True},
    "delayed": {"fp8": "delayed", "resume": True},
    "recomputed": {"fp8": "delayed", "recompute": True},
    "block": {"fp8": "blockwise"},
    "split": {**SPLIT, "resume": True},
    "split, current": {**SPLIT, "fp8": "tensorwise"},
    "split, delayed": {"tp": 2, "fp8": "delayed", "resume": True},
    "tokens": {"cp": 2, "resume": True},
    "tokens, gathered": {"cp": 2, "way": "all_gather", "fp8": "tensorwise"},
    "tokens, exchanged": {"cp": 2, "way": "a2a"},
    "packed": {"packed": True},
    "packed tokens": {"packed": True, "cp": 2, "resume": True},
    "packed tokens, gathered": {"packed": True, "cp": 2, "way": "all_gather"},
    "packed tokens, exchanged": {"packed": True, "cp": 2, "way": "a2a"},
    "experts": {**EXPERTS, "resume": True},
    "experts, block": {**EXPERTS, "fp8": "blockwise"},
    "split experts": {**EXPERTS, **SPLIT, "ep": 2, "resume": True},
    "split experts, delayed": {**EXPERTS, **SPLIT, "ep": 2, "fp8": "delayed", "resume": True},
    "exchanged experts": {**EXPERTS, **SPLIT, "ep": 2, "dispatcher": "alltoall", "resume": True},
}
#: Scenes in which each rank has tokens and slices of master weights of its own.
DISTRIBUTED = {
    "delayed": {"fp8": "delayed"},
    "current": {"fp8": "tensorwise", "overlap": True},
    "block": {"fp8": "blockwise"},
    "split": {"fp8": "tensorwise", **SPLIT},
    "experts": {"fp8": "blockwise", **EXPERTS, "ep": 2, "dispatcher": "alltoall"},
}
#: The same scenes with weights in BF16, and with weights in FP8 alone.
IN_BF16 = {f"{name}, BF16": {"distributed": True, **scene} for name, scene in DISTRIBUTED.items()}
IN_BF16["split, BF16"]["resume"] = True
IN_FP8 = {
    f"{name}, FP8": {"distributed": True, "param_gather": True, **scene}
    for name, scene in DISTRIBUTED.items()
}
for each in ("delayed", "split", "experts"):
    IN_FP8[f"{each}, FP8"]["resume"] = True
SCENES |= IN_BF16 | IN_FP8
#: Scenes that start from the checkpoint of another scene.
LOADED = {
    "dense as local": {"local": True, "load": "dense"},
    "dense as split": {**SPLIT, "load": "dense"},
    "split as dense": {"load": "split"},
    "split, delayed as dense": {"fp8": "delayed", "load": "split, delayed"},
    "split experts as experts": {**EXPERTS, "load": "split experts"},
    "exchanged experts as experts": {**EXPERTS, "load": "exchanged experts"},
    "BF16 as FP8": {**IN_FP8["split, FP8"], "load": "split, BF16"},
    "FP8 as BF16": {**IN_BF16["split, BF16"], "load": "split, FP8"},
}


@pytest.fixture(scope="module")
def seen(fresh, tmp_path_factory):
    """Return the results of each of two ranks by scene; one pair of processes plays all scenes."""
    folder = tmp_path_factory.mktemp("megatron")
    program = (
        "import runpy, sys; sys.argv[1:] = {}; sys.path.insert(0, {!r}); "
        "runpy.run_module('megatron_rank', run_name='__main__')"
    )
    scenes = json.dumps(SCENES | LOADED)
    arguments = [[str(rank), "2", str(folder), scenes] for rank in (0, 1)]
    fresh.together(*(program.format(given, str(TESTS)) for given in arguments))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", SCENES)
def test_it_trains(seen, name):
    losses = seen[0][name]["losses"]
    # The losses agree where ranks have the same tokens or share each layer.
    if not SCENES[name].get("distributed") or SCENES[name].get("tp") == 2:
        assert seen[1][name]["losses"] == losses
    # Two batches alternate, so that losses two steps apart are comparable.
    assert losses[2] < losses[0] - 0.2
    assert losses[3] < losses[1] - 0.2


def difference(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_ranks_that_share_layers_see_what_one_sees(seen):
    assert difference(seen[0]["dense"]["losses"], seen[0]["split"]["losses"]) < 3e-3


@pytest.mark.parametrize(
    ("name", "like"),
    [("tokens", "dense"), ("tokens, exchanged", "dense")]
    + [(f"packed tokens{way}", "packed") for way in ("", ", gathered", ", exchanged")],
)
def test_ranks_that_share_tokens_see_what_one_sees(seen, name, like):
    assert difference(seen[0][like]["losses"], seen[0][name]["losses"]) < 3e-3


@pytest.mark.parametrize(
    ("name", "like"),
    [
        (name, "dense")
        for name in ("delayed", "block", "split, current", "split, delayed", "tokens, gathered")
    ]
    + [("experts, block", "experts")],
)
def test_fp8_is_close_to_bf16(seen, name, like):
    assert 0 < difference(seen[0][name]["losses"], seen[0][like]["losses"]) < 2e-2


def test_recomputed_activations_are_the_same(seen):
    assert seen[0]["recomputed"]["losses"] == seen[0]["delayed"]["losses"]


@pytest.mark.parametrize("name", [name for name, scene in SCENES.items() if scene.get("resume")])
def test_a_checkpoint_goes_on_where_it_was(seen, name):
    """A model of other weights loads torch_dist's format and continues bit for bit, delayed scales included."""
    for rank in seen:
        assert rank[name]["resumed"] == rank[name]["goes_on"]


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_fp8_weights_of_the_distributed_optimizer_are_those_of_bf16(seen, name):
    """The losses agree bit for bit: both runs cast the same masters, rounded to BF16, with whole-weight maxima."""
    for rank in seen:
        assert rank[f"{name}, FP8"]["losses"] == rank[f"{name}, BF16"]["losses"]
        assert "Parameter" in rank[f"{name}, FP8"]["types"]
        (kind,) = set(rank[f"{name}, FP8"]["types"]) - set(rank[f"{name}, BF16"]["types"])
        assert kind.startswith("Float8")


@pytest.mark.parametrize("name", LOADED)
def test_a_checkpoint_is_taken_by_others(seen, name):
    """Megatron-LM's own layers, which need torch alone, load the checkpoint, and so do more or fewer ranks."""
    found, wanted = (seen[0][each] for each in (name, LOADED[name]["load"]))
    assert found["losses"] == seen[1][name]["losses"]
    assert abs(found["losses"][0] - wanted["goes_on"][0]) < 3e-3
    if LOADED[name].get("distributed"):  # the checkpoint has the masters
        assert found["losses"] == wanted["goes_on"]


@pytest.mark.parametrize("name", ["dense", "delayed"])
def test_every_module_of_transformer_engine_has_its_state(seen, name):
    """A checkpoint without these ``_extra_state`` keys cannot be loaded by Transformer Engine itself."""
    layer = "decoder.layers.{}.{}._extra_state"
    parts = ["linear_qkv", "linear_proj", "core_attention"]
    inside = [f"self_attention.{part}" for part in parts] + ["mlp.linear_fc1", "mlp.linear_fc2"]
    wanted = {layer.format(number, part) for number in (0, 1) for part in inside}
    assert wanted | {"decoder.final_layernorm._extra_state"} <= set(seen[0][name]["keys"])
