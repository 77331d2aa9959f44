"""The scripts of examples/ train with FP8 as they do without FP8."""

from __future__ import annotations

import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from selection import quickly

EXAMPLES = Path(__file__).parents[2] / "examples"
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def losses(name, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    return printed, [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.parametrize("recipe", quickly(["delayed", "current", "block"], "delayed"))
def test_nanogpt_learns_in_fp8_what_it_learns_without(recipe, monkeypatch, capsys):
    options = ["--device", "cpu", "--steps", "6"]
    printed, fp8 = losses("nanogpt.py", [*options, "--recipe", recipe], monkeypatch, capsys)
    _, plain = losses("nanogpt.py", [*options, "--recipe", "none"], monkeypatch, capsys)
    assert "8 x linear layer" in printed
    assert plain[-1] < plain[0] - 0.3
    assert fp8 == pytest.approx(plain, rel=0.01)
    assert fp8 != plain


@pytest.mark.slow
@pytest.mark.skipif(
    _VERSION < (2, 11) or not dist.is_gloo_available(),
    reason="needs gloo, and an FSDP2 that runs without a GPU",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the script takes the GPU where there is one")
def test_the_fsdp2_loop_learns(monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, str(value))
    printed, found = losses("fsdp2.py", ["--steps", "12"], monkeypatch, capsys)
    assert "2 x decoder layer" in printed
    assert found[-1] < found[0] / 3
