"""The latency report: its parts add up, its three forms agree, it is callable and runnable."""

import json
import subprocess
import sys

import pytest
import torch

import te_fast
import te_fast.profile
import te_fast.pytorch as te
from te_fast._timing import interleave
from te_fast.common.recipe import DelayedScaling


@pytest.fixture(scope="module")
def report():
    layer = te.Linear(64, 32, device="cpu")
    with te.autocast(enabled=True, recipe=DelayedScaling()):
        return te_fast.profile(layer, torch.randn(16, 64), rounds=5, calls=4)


def test_stages_are_those_of_the_dispatcher_and_the_call_around_them(report):
    layer = te.Linear(64, 32, device="cpu")
    with torch.no_grad(), te.autocast(enabled=True, recipe=DelayedScaling()):
        native = te_fast.dispatch.stage_times(layer, torch.randn(16, 64), calls=2)
    assert list(report.stages) == ["call from Python", *native]
    assert all(microseconds > 0 for microseconds in report.stages.values())


def test_quartiles_enclose_the_median(report):
    for timing in report.totals.values():
        assert 0 < timing.low <= timing.median <= timing.high


def test_ratio_is_module_over_reference(report):
    expected = report.totals["module, no_grad"].median / report.totals["nn.Linear, no_grad"].median
    assert report.ratios["no_grad"] == pytest.approx(expected)


def test_table_and_json_have_the_same_figures(report, tmp_path):
    path = tmp_path / "report.json"
    report.write_json(path)
    data = json.loads(path.read_text())
    assert data["subject"] == "Linear, [16 x 64] -> 32, torch.float32, cpu"
    assert data["environment"]["torch"] == torch.__version__
    for name, microseconds in data["stages_us"].items():
        line = next(line for line in str(report).splitlines() if line.startswith(name))
        assert float(line[30:38]) == pytest.approx(microseconds, abs=0.006)


def test_plot_is_a_png(report, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.png"
    report.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_is_missing(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot(tmp_path / "report.png")


def test_module_runs(tmp_path):
    path = tmp_path / "report.json"
    small = (
        "--rows 16 --in-features 32 --out-features 16 --dtype f32 --device cpu --rounds 3 --calls 2"
    )
    command = [sys.executable, "-m", "te_fast.profile", *small.split(), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "host time per forward: Linear, [16 x 32] -> 16" in done.stdout
    assert json.loads(path.read_text())["ratios"].keys() == {"no_grad", "with grad"}


def test_bodies_take_turns():
    order = []
    bodies = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    interleave(bodies, torch.device("cpu"), rounds=2, calls=2)
    assert "".join(order) == "aaaabbbb" + "aabb" * 2
