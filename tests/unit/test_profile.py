"""The latency report: its parts add up, its three forms agree, it is callable and runnable."""

import json
import sys

import pytest
import torch

import te_fast
import te_fast.profiling
import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling
from te_fast.errors import ArgumentError
from te_fast.profiling.timing import interleave


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


@pytest.mark.slow
def test_plot_is_a_png(report, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.png"
    report.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_names_a_format_that_is_not_there(report, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError, match="report.abc.*png"):
        report.plot(tmp_path / "report.abc")


def test_plot_without_matplotlib_says_what_is_missing(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot(tmp_path / "report.png")


def test_module_runs(tmp_path, fresh):
    path = tmp_path / "report.json"
    small = (
        "--rows 16 --in-features 32 --out-features 16 --dtype f32 --device cpu --rounds 3 --calls 2"
    )
    arguments = ["te_fast.profiling", *small.split(), "--json", str(path)]
    run = "runpy.run_module('te_fast.profiling', run_name='__main__', alter_sys=True)"
    printed = fresh(f"import runpy, sys; sys.argv = {arguments}; {run}")
    assert "host time per forward: Linear, [16 x 32] -> 16" in printed
    assert json.loads(path.read_text())["ratios"].keys() == {"no_grad", "with grad"}


def test_bodies_take_turns():
    order = []
    bodies = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    interleave(bodies, torch.device("cpu"), rounds=2, calls=2)
    # Two bursts of each do not count; then each round begins with another body.
    assert "".join(order) == "aaaabbbb" + "aabb" + "bbaa"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rows 5 --device cpu", "multiple of 8 for FP8 (append 3 rows"),
        ("--in-features 24 --rows 16 --device cpu", "in_features"),
        ("--device abacus", "--device must be cuda, cuda:<number> or cpu, got 'abacus'"),
        ("--rows 0", "argument --rows: must be 1 or more, got 0"),
        ("--calls two", "argument --calls: invalid integer value: 'two'"),
        ("--json /nowhere/report.json --rows 16 --rounds 1 --calls 1 --device cpu", "/nowhere"),
    ],
)
def test_the_command_line_answers_what_cannot_be_in_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as left:
        te_fast.profiling.main(options.split())
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith("python -m te_fast.profiling: error: ")
    assert message in printed.err.splitlines()[-1]
    assert "Traceback" not in printed.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_command_line_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        te_fast.profiling.main(["--device", "cuda"])
    assert (
        "Pass device='cpu' to run on the host backend" in capsys.readouterr().err.splitlines()[-1]
    )


def test_any_module_can_be_measured():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), te.Linear(32, 16, device="cpu"))
    with te.autocast(recipe=DelayedScaling()):
        report = te_fast.profile(model, torch.randn(16, 64), rounds=2, calls=2)
    assert report.subject == "Sequential, [16 x 64] -> 16, torch.float32, cpu"
    assert report.ratios.keys() == {"no_grad", "with grad"}
    assert sum(report.stages.values()) > report.stages["call from Python"] > 0


@pytest.mark.slow
def test_a_module_that_maps_no_rows_has_no_reference(tmp_path):
    class Pair(torch.nn.Module):
        def forward(self, words, scale=2.0):
            return words * scale, words

    report = te_fast.profile(Pair(), torch.arange(8), rounds=2, calls=2)
    assert report.subject == "Pair, [8], torch.int64, cpu"
    assert report.ratios == {}
    assert "nn.Linear" not in str(report)
    assert "no stage was marked" in str(report)
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "pair.png")
    assert "cpu" in te_fast.profile(Pair(), 3, rounds=2, calls=2).subject


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"calls": 0}, {"rounds": "a"}, {"module": None}], ids=str
)
def test_wrong_arguments_are_named(wrong):
    arguments = {"module": te.Linear(16, 16, device="cpu"), "rounds": 1, "calls": 1, **wrong}
    with pytest.raises(ArgumentError, match=f"^profile: {next(iter(wrong))} must be"):
        te_fast.profile(arguments.pop("module"), torch.ones(16, 16), **arguments)
