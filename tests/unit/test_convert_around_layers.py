"""What convert replaces around the decoder layers of Transformers' models: loss, last norm, masks and angles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import te_fast
import te_fast.pytorch as te
from te_fast.convert.loss import causal_loss
from te_fast.errors import DeviceError, UnsupportedError
from te_fast.runtime.compiling import CAN_COMPILE

pytestmark = pytest.mark.every_torch  # the import of transformers alone takes seconds

compiles = pytest.mark.skipif(not CAN_COMPILE, reason="layers are compiled from torch 2.8 on")
TOKENS = torch.randint(1, 96, (2, 16), generator=torch.Generator().manual_seed(3))
LABELS = TOKENS.clone()
LABELS[0, :5] = -100

transformers: Any = None


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    globals()["transformers"] = pytest.importorskip("transformers")
    pytest.importorskip("transformers.loss.loss_utils")


def made(**options):
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def logits(request):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, 16, 96, generator=generator).to(request.param)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 5, "labels": LABELS.clamp(min=5)},
        {"shift_labels": LABELS.roll(-1, 1)},
        {"reduction": "ignored by Transformers, too"},
    ],
    ids=lambda given: " ".join(given) or "plain",
)
def test_the_loss_is_transformers_own(logits, given):
    own = transformers.loss.loss_utils.ForCausalLMLoss
    found = []
    for loss in (own, causal_loss):
        leaf = logits.clone().requires_grad_()
        value = loss(logits=leaf, vocab_size=96, **{"labels": LABELS} | given)
        value.backward()
        found.append((value.detach(), leaf.grad))
    (wanted, gradient), (got, grad) = found
    assert got.dtype is wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    rounding = 2**-8 if logits.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(grad, gradient, rtol=rounding, atol=1e-8)


def test_a_loss_of_nothing_is_nan_as_transformers_own(logits):
    labels = torch.full_like(LABELS, -100)
    assert causal_loss(logits=logits, labels=labels, vocab_size=96).isnan()


def test_labels_outside_of_the_vocabulary_are_refused(logits):
    with pytest.raises(IndexError, match="96"):
        causal_loss(logits=logits, labels=LABELS + 96, vocab_size=96)


def test_the_loss_of_logits_in_fp64(logits):
    own = transformers.loss.loss_utils.ForCausalLMLoss(logits.double(), LABELS, 96)
    torch.testing.assert_close(causal_loss(logits.double(), LABELS, 96), own)


def test_the_report_names_what_is_around_the_layers():
    model = made()
    report = te_fast.convert(model, dry_run=True)
    expected = {
        "": "loss",
        "model": "causal mask",
        "model.norm": "norm",
        "model.rotary_emb": "rotary embedding",
    }
    assert expected.items() <= report.converted.items()
    assert [*report.converted.values()].count("loss") == 1  # the inner model has none
    assert model.loss_function is not causal_loss
    te_fast.convert(model)
    assert model.loss_function is causal_loss
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.loss_function is causal_loss
        assert torch.equal(*(m(TOKENS, labels=LABELS).loss for m in (model, twin)))
    te_fast.convert.undo(model)
    assert model.loss_function is not causal_loss
    assert "forward" not in model.model.norm.__dict__


@pytest.mark.parametrize("name", ["loss_function", "norm", "rotary_emb", "model"])
def test_excluded_parts_stay(name):
    model = made()
    report = te_fast.convert(model, exclude=[name])
    assert not any(name in path.split(".") for path in report.converted)
    # Layers within an excluded module stay, too, and with them the loss.
    assert (model.loss_function is causal_loss) == (name not in ("loss_function", "model"))
    assert not report.unmatched
    assert model(TOKENS, labels=LABELS).loss.isfinite()


def test_a_loss_of_the_users_stays():
    model = made()
    model.loss_function = lambda **_: torch.zeros(())
    assert "" not in te_fast.convert(model).converted
    assert model(TOKENS, labels=LABELS).loss == 0


def test_releases_without_a_place_for_a_loss_keep_theirs(monkeypatch):
    model = made()
    own = transformers.loss.loss_utils.ForCausalLMLoss
    monkeypatch.setattr(
        transformers.PreTrainedModel, "loss_function", property(lambda _: staticmethod(own))
    )
    assert "" not in te_fast.convert(model).converted


def test_a_norm_that_changes_later_computes_what_it_would():
    model = made()
    te_fast.convert(model)
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(torch.full((64,), 3.0))
    x = torch.randn(5, 64)
    torch.testing.assert_close(norm(x), type(norm).forward(norm, x))
    norm.variance_epsilon = 4.0
    assert torch.equal(norm(x), type(norm).forward(norm, x))
    assert norm(x.double()).dtype is torch.float64
    norm.bfloat16()
    mixed = norm(x)  # FP32 by a weight of BF16
    assert torch.equal(mixed, type(norm).forward(norm, x))


def test_a_model_on_the_meta_device_is_refused_by_name():
    with torch.device("meta"):
        model = made()
    te_fast.convert(model)
    with pytest.raises(DeviceError, match="parameters are on the meta device"):
        model(TOKENS.to("meta"))
    assert model.model.norm(torch.ones(2, 64, device="meta")).shape == (2, 64)
    model.to_empty(device="cpu")
    twin = made()
    model.load_state_dict(twin.state_dict())
    model.model.rotary_emb.inv_freq.copy_(twin.model.rotary_emb.inv_freq)
    torch.testing.assert_close(model(TOKENS).logits, twin(TOKENS).logits)


@pytest.fixture
def rotary():
    """A converted model, and the number of times that it computed angles."""
    model = made()
    calls = []
    embedding = model.model.rotary_emb
    forward = type(embedding).forward

    def counted(self, x, position_ids):
        calls.append(position_ids.shape)
        return forward(self, x, position_ids)

    kind = type(embedding)
    kind.forward = counted
    try:
        te_fast.convert(model)
        yield model, calls
    finally:
        kind.forward = forward


def test_angles_of_a_models_own_positions_are_computed_once(rotary):
    model, calls = rotary
    wanted = model(TOKENS).logits
    for _ in range(3):
        assert torch.equal(model(TOKENS).logits, wanted)
    assert len(calls) == 1
    model(TOKENS[:, :9])
    model(TOKENS)
    assert len(calls) == 3


def test_angles_of_given_positions_are_computed_again(rotary):
    model, calls = rotary
    own = model(TOKENS).logits
    positions = torch.arange(16)[None]
    assert torch.equal(model(TOKENS, position_ids=positions).logits, own)
    others = model(TOKENS, position_ids=positions * 2, attention_mask=torch.ones_like(TOKENS))
    assert not torch.allclose(others.logits, own)
    assert torch.equal(model(TOKENS).logits, own)
    assert len(calls) == 3
    model(TOKENS, cache_position=torch.arange(16))  # numbers tokens in earlier releases
    assert len(calls) == 4


def test_angles_follow_the_frequencies(rotary):
    model, calls = rotary
    own = model(TOKENS).logits
    model.model.rotary_emb.inv_freq.mul_(0.5)
    changed = model(TOKENS).logits
    assert not torch.allclose(changed, own)
    te_fast.convert.undo(model)
    torch.testing.assert_close(model(TOKENS).logits, changed)
    assert len(calls) == 3


def test_angles_of_inference_do_not_reach_training(rotary):
    model, calls = rotary
    with torch.inference_mode():
        model(TOKENS)
    model(TOKENS, labels=LABELS).loss.backward()
    with torch.inference_mode():
        model(TOKENS)
    model(TOKENS, labels=LABELS).loss.backward()
    assert 2 <= len(calls) <= 4


def test_angles_that_a_hook_writes_to_are_not_kept(rotary):
    model, _ = rotary
    own = model(TOKENS).logits

    def halve(module, args, waves):
        waves[0].mul_(0.5)

    handle = model.model.rotary_emb.register_forward_hook(halve)
    halves = [model(TOKENS).logits for _ in range(2)]
    assert torch.equal(*halves)
    assert not torch.allclose(halves[0], own)
    handle.remove()
    assert torch.equal(model(TOKENS).logits, own)


@compiles
def test_angles_of_fake_tensors_do_not_reach_real_ones(rotary):
    model, _ = rotary
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(TOKENS))
    logits = model(TOKENS).logits
    te_fast.convert.undo(model)
    torch.testing.assert_close(logits, model(TOKENS).logits)


def test_a_transform_is_refused_by_name(rotary):
    model, _ = rotary
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters):
        options = {"labels": LABELS, "use_cache": False}
        return torch.func.functional_call(model, parameters, (TOKENS,), options).loss

    with pytest.raises(UnsupportedError, match="torch.func transforms"):
        torch.func.grad(loss)(parameters)
    assert model(TOKENS, labels=LABELS).loss.isfinite()


def test_angles_that_depend_on_the_length_are_left_to_the_model():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = made(rope_parameters=scaling, max_position_embeddings=8)
    wanted = [model(TOKENS[:, :n]).logits for n in (16, 4, 16)]
    twin = made(rope_parameters=scaling, max_position_embeddings=8)
    assert "model.rotary_emb" not in te_fast.convert(twin).converted
    for n, logits in zip((16, 4, 16), wanted, strict=True):
        torch.testing.assert_close(twin(TOKENS[:, :n]).logits, logits, rtol=1e-4, atol=1e-5)


def test_a_forward_does_not_look_for_packed_sequences(monkeypatch):
    """That search waits for the GPU."""
    masks = transformers.masking_utils
    calls = []
    search = masks.find_packed_sequence_indices
    monkeypatch.setattr(
        masks, "find_packed_sequence_indices", lambda ids: calls.append(1) or search(ids)
    )
    model = made(use_cache=False)
    wanted = model(TOKENS).logits
    assert calls
    calls.clear()
    te_fast.convert(model)
    torch.testing.assert_close(model(TOKENS).logits, wanted, rtol=1e-4, atol=1e-5)
    assert not calls
    packed = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)
    apart = model(TOKENS, position_ids=packed).logits
    assert calls
    assert not torch.allclose(apart, wanted, atol=1e-3)


@compiles
@pytest.mark.slow
def test_compiled_and_eager_steps_agree():
    model = made()
    te_fast.convert(model)
    losses = []
    for run in (model, torch.compile(model)):
        model.zero_grad()
        with te.autocast():
            loss = run(TOKENS, labels=LABELS).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
