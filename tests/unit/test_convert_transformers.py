"""convert with models of Hugging Face's Transformers: their numbers, their masks in compiled code, their files."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from selection import sampled
from te_fast.attention import scores
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.convert.forwards import DecoderForward
from te_fast.runtime.compiling import CAN_COMPILE

pytestmark = pytest.mark.every_torch  # the import of transformers alone takes seconds

compiles = pytest.mark.skipif(not CAN_COMPILE, reason="layers are compiled from torch 2.8 on")

transformers: Any = None


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    """Imported late: a process that runs other files need not wait for it."""
    globals()["transformers"] = pytest.importorskip("transformers")


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "sliding window": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
}
TOKENS = torch.randint(1, 96, (2, 16), generator=torch.Generator().manual_seed(3))
PADDED = torch.ones_like(TOKENS)
PADDED[0, :5] = 0


def made(kind="llama"):
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(KINDS[kind]())


def step(model, run=None, **given):
    """Return the loss, the logits and the gradients of a step."""
    model.zero_grad()
    out = (model if run is None else run)(input_ids=TOKENS, labels=TOKENS, **given)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), out.logits.detach(), grads


def compare(got, wanted):
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-5)
    assert got[2].keys() == wanted[2].keys()
    for name, grad in got[2].items():
        torch.testing.assert_close(grad, wanted[2][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.fixture
def seen(monkeypatch):
    """Whether each call of attention had a mask."""
    found = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, *rest, **options):
        found.append(attn_mask is not None)
        return attend(q, k, v, attn_mask, *rest, **options)

    attend_in_graph = scores.attend_in_graph

    def operator(*heads, **options):  # it takes no mask
        out = attend_in_graph(*heads, **options)
        if out is not None:
            found.append(False)
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(scores, "attend_in_graph", operator)
    return found


@pytest.mark.parametrize(
    ("kind", "options"), sampled(KINDS, [{}, {"use_cache": False}, {"attention_mask": PADDED}])
)
def test_a_step_is_the_models_own(kind, options):
    model = made(kind)
    wanted = step(model, **options)
    report = te_fast.convert(model)
    assert "decoder layer" in " ".join(report.converted.values())
    compare(step(model, **options), wanted)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "has_mask"),
    [
        ("llama", {"use_cache": False}, False),
        ("llama", {}, False),
        (
            "llama",
            {"position_ids": torch.arange(16)[None], "use_cache": False},
            True,
        ),
        ("llama", {"attention_mask": PADDED}, True),
        ("qwen3", {}, False),
        ("mistral", {}, False),
        ("sliding window", {}, True),
    ],
)
def test_compiled_attention_has_a_mask_only_where_it_needs_one(kind, options, has_mask, seen):
    model = made(kind)
    wanted = step(model, **options)
    te_fast.convert(model)
    seen.clear()
    got = step(model, torch.compile(model, backend="aot_eager"), **options)
    assert set(seen) == {has_mask}
    compare(got, wanted)


@compiles
@pytest.mark.slow
def test_compiled_calls_of_another_length_are_right():
    model = made()
    te_fast.convert(model)
    run = torch.compile(model, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for length in (16, 9, 12):
            got = run(input_ids=TOKENS[:, :length]).logits
            wanted = model(input_ids=TOKENS[:, :length]).logits
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@compiles
@pytest.mark.slow
def test_an_exported_graph_keeps_the_mask(seen):
    model = made().eval()
    te_fast.convert(model)
    with torch.no_grad():
        wanted = model(input_ids=TOKENS, use_cache=False).logits
        seen.clear()
        options = {"input_ids": TOKENS, "use_cache": False}
        program = torch.export.export(model, (), options, strict=False)
        assert set(seen) == {True}
        torch.testing.assert_close(program.module()(**options).logits, wanted, rtol=1e-4, atol=1e-5)


def test_fp8_training_follows_the_model():
    losses = []
    for is_fp8 in (False, True):
        model = made()
        if is_fp8:
            te_fast.convert(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(8):
            with te.autocast(enabled=is_fp8, recipe=Float8CurrentScaling()):
                loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[1] - losses[0]) < 0.02 * losses[0]


def test_generation_is_the_models_own():
    model = made().eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(TOKENS, attention_mask=PADDED, **options)
    te_fast.convert(model)
    assert torch.equal(model.generate(TOKENS, attention_mask=PADDED, **options), wanted)


def test_undone_saved_and_copied(tmp_path):
    model = made()
    signature = inspect.signature(model.model.forward)
    report = te_fast.convert(model)
    assert report.converted["model"] == "causal mask"
    assert inspect.signature(model.model.forward) == signature
    wanted = step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
    compare(step(other), wanted)
    compare(step(pickle.loads(pickle.dumps(other))), wanted)
    other.save_pretrained(tmp_path)
    compare(step(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), wanted)
    assert te_fast.convert.undo(other) > 0
    assert "forward" not in other.model.__dict__
    compare(step(other), wanted)


def with_eager_attention(model):
    model.set_attn_implementation("eager")


def with_a_layer_left(model):
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", with_eager_attention),
        ("llama", with_a_layer_left),
        ("sliding window", lambda model: None),
    ],
)
def test_models_that_need_their_masks_make_them(kind, change):
    model = made(kind)
    change(model)
    wanted = step(model)
    assert "model" not in te_fast.convert(model).converted
    compare(step(model), wanted)


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=[compiles, pytest.mark.slow])]
)
def test_attention_of_both_sides(is_compiled):
    model = made()
    causal = step(model)
    wanted = step(model, is_causal=False)
    assert not torch.allclose(wanted[1], causal[1])
    te_fast.convert(model)
    run = torch.compile(model, backend="aot_eager") if is_compiled else None
    compare(step(model, run, is_causal=False), wanted)
    compare(step(model, run), causal)


@compiles
@pytest.mark.slow
def test_a_layer_that_changes_later_gets_its_mask(seen):
    model = made()
    wanted = step(model)
    te_fast.convert(model)
    with_a_layer_left(model)
    seen.clear()
    compare(step(model, torch.compile(model, backend="aot_eager")), wanted)
    del model.model.layers[0].__dict__["forward"]
    torch.compiler.reset()
    seen.clear()
    compare(step(model, torch.compile(model, backend="aot_eager")), wanted)
    assert set(seen) == {True}


def by_windows_and_packed_sequences(
    module, q, k, v, mask, scaling, sliding_window=None, position_ids=None, **_
):
    """Attend as flash_attn does, which takes windows and packed sequences from arguments, not from masks."""
    places = torch.arange(q.shape[2])
    distance = places[:, None] - places
    seen = (distance >= 0)[None]
    if sliding_window is not None:
        seen = seen & (distance < sliding_window)
    if len(q) == 1 and position_ids is not None:
        sequence = (position_ids == 0).cumsum(-1)
        seen = seen & (sequence[:, :, None] == sequence[:, None, :])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    y = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], scale=scaling
    )
    return y.transpose(1, 2), None


PACKED = torch.cat([torch.arange(6), torch.arange(10)])[None]


@pytest.mark.parametrize("how", ["flash_attention_2", "of_its_own"])
@pytest.mark.parametrize("kind", ["llama", "sliding window"])
def test_attention_that_takes_windows_and_lengths_from_arguments(kind, how, monkeypatch):
    """The implementation that counts is that of the call."""
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(attention._global_mapping, how, by_windows_and_packed_sequences)
    monkeypatch.setitem(masks._global_mapping, how, lambda *_, **__: None)
    model, other = made(kind), made(kind)
    report = te_fast.convert(model)
    assert list(report.converted.values()).count("decoder layer") == 2
    for each in (model, other):
        each.config._attn_implementation = how
    runs = []
    monkeypatch.setattr(
        DecoderForward,
        "run",
        lambda *a, _run=DecoderForward.run, **k: runs.append(1) or _run(*a, **k),
    )
    compare(step(model), step(other))
    assert bool(runs) == (kind == "llama" and how == "flash_attention_2")
    packed = {"input_ids": TOKENS[:1], "position_ids": PACKED}
    torch.testing.assert_close(model(**packed).logits, other(**packed).logits, rtol=1e-4, atol=1e-5)
    if how == "of_its_own":
        te_fast.convert.undo(model)
        report = te_fast.convert(model)
        assert "computes attention by of_its_own" in report.left["model.layers.0"]


def test_attention_that_is_not_causal():
    model, other = made(), made()
    te_fast.convert(model)
    for each in (model, other):
        for layer in each.model.layers:
            layer.self_attn.is_causal = False
    compare(step(model), step(other))


def test_the_command_line_says_what_it_has_not_tried(tmp_path, capsys):
    KINDS["llama"]().save_pretrained(tmp_path)
    assert te_fast.convert.main([f"hf:{tmp_path}"]) == 0
    assert "2 x decoder layer (not tried), " in capsys.readouterr().out
    transformers.T5Config(d_model=64, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        te_fast.convert.main([f"hf:{tmp_path}"])
    assert "ValueError: Unrecognized configuration class" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SystemExit):
            te_fast.convert.main([f"hf:{path}"])
        assert f"hf:{path} has no configuration that Transformers knows" in capsys.readouterr().err
