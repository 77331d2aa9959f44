"""The trial of cuBLASLt's product of groups, here of the host's product, which is right."""

from contextlib import nullcontext

import pytest
import torch

from te_fast.ops import cublas_groups
from te_fast.runtime import native

OPERANDS = ["float16", "bfloat16", "fp8"]


@pytest.fixture
def trial(monkeypatch):
    """A trial on the CPU, of small sizes."""
    for name, size in {"_ROWS": 4096, "_N": 24, "_K": 40}.items():
        monkeypatch.setattr(cublas_groups, name, size)
    return lambda operands: cublas_groups._Trial(torch.device("cpu"), operands)


@pytest.mark.parametrize("operands", OPERANDS)
def test_a_right_product_passes(operands, trial):
    made = trial(operands)
    assert made.by_rows()
    assert made.weight_gradient(add=False)
    assert made.weight_gradient(add=True)


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("at", [0, 1, -1], ids=["first", "empty or none", "last"])
def test_one_wrong_element_fails(at, operands, trial, monkeypatch):
    right = native.grouped_gemm

    def wrong(a, b, out, *rest):
        right(a, b, out, *rest)
        out[at].view(-1)[-1] += 1

    monkeypatch.setattr(native, "grouped_gemm", wrong)
    made = trial(operands)
    assert not made.by_rows()
    assert not made.weight_gradient(add=False)
    assert not made.weight_gradient(add=True)


def test_an_untouched_result_fails(trial, monkeypatch):
    monkeypatch.setattr(native, "grouped_gemm", lambda *_: None)
    made = trial("bfloat16")
    assert not made.by_rows()
    assert not made.weight_gradient(add=False)


def test_answers_are_kept(monkeypatch):
    asked = []
    monkeypatch.setattr(cublas_groups, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(asked))
    monkeypatch.setattr(native, "cublas_multiplies_groups", lambda *of: asked.append(of) or True)
    monkeypatch.setattr(cublas_groups, "is_right", lambda *_: True)
    assert cublas_groups.multiplies(0, "fp8")
    assert cublas_groups.multiplies(0, "fp8")
    assert not cublas_groups.multiplies(0, "float16")  # unknown, and a graph is captured
    assert asked == [(0, "fp8")]


@pytest.mark.parametrize("warn_only", [False, True])
def test_the_callers_determinism_stays(warn_only, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(cublas_groups, "_Trial", lambda *_: FailedTrial())
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert not cublas_groups.is_right(0, "float16")
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    finally:
        torch.use_deterministic_algorithms(False)


class FailedTrial:
    """A trial of a wrong product, which looks that torch's own may be of any kind."""

    def by_rows(self):
        return torch.are_deterministic_algorithms_enabled()

    def weight_gradient(self, *, add):
        return torch.are_deterministic_algorithms_enabled()
