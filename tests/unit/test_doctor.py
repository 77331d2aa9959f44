"""The doctor: a script computes the same numbers under it, and a trace is added up by module."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from te_fast import doctor
from te_fast.doctor.swap import Sketch, measure
from te_fast.doctor.trace import GRADIENTS, MARK, OUTSIDE, Owner, read_events
from te_fast.doctor.watch import Shape, Watch

TRAIN = """
import hashlib, random, sys
import torch
from torch import nn
import te_fast.pytorch as te
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(
            te.TransformerLayer(32, 64, 2, device="cpu", hidden_dropout=0.1, attention_dropout=0.1) for _ in range(2)
        )
        self.again = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.head = torch.compile(te.LayerNormLinear(32, 32, device="cpu"), backend="eager")

    def forward(self, x):
        x = self.drop(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(checkpoint(self.again, x, use_reentrant=False))

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(int(sys.argv[1])):
    for _ in range(2):
        with te.autocast():
            loss = model(torch.randn(8, 2, 32)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
state = b"".join(t.detach().numpy().tobytes() for t in [*model.parameters(), torch.get_rng_state()])
print(hashlib.sha256(state).hexdigest(), loss.item(), random.getstate()[1][0] * 0, sys.argv[1:], __name__)
sys.exit(7)
"""


def run(folder: Path, script: str, *arguments: str, options=(), looked_at=True):
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, *(["-m", "te_fast.doctor", *options] if looked_at else [])]
    return subprocess.run(
        [*command, str(path), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
def test_a_script_computes_bit_for_bit_what_it_does_alone(tmp_path):
    alone = run(tmp_path, TRAIN, "5", looked_at=False)
    paths = {"--json": tmp_path / "report.json", "--svg": tmp_path / "report.svg"}
    options = [part for name, path in paths.items() for part in (name, str(path))]
    options += ["--steps", "1", "--skip", "1"]
    watched = run(tmp_path, TRAIN, "5", options=options)
    assert alone.returncode == watched.returncode == 7, watched.stderr
    assert alone.stdout == watched.stdout
    report = json.loads(paths["--json"].read_text())
    assert report["script"].endswith("script.py 5")
    assert len(report["step_us"]) == report["profiled_steps"] == 1
    by_name = {(row["name"], row["class"]): row for row in report["modules"]}
    block = by_name["blocks.*", "TransformerLayer"]
    assert block["calls"] == 4  # two blocks, two microbatches
    assert block["forward_host_us"] > 0
    assert block["backward"]["host"] > 0
    assert by_name["again.*", "Linear"]["calls"] == 4  # forward, and once more in backward
    assert by_name["embed", "Linear"]["backward"]["host"] > 0
    # Rows have the model's names; a compiled module has one row.
    assert by_name["head", "OptimizedModule"]["calls"] == 2
    assert {swap["name"] for swap in report["swaps"]} >= {"embed"}
    assert "blocks.* (TransformerLayer)" in watched.stderr
    picture = paths["--svg"].read_text()
    assert picture.startswith("<svg ")
    assert "blocks.* (TransformerLayer)" in picture


@pytest.mark.slow
def test_a_script_that_fails_fails_as_it_does_alone(tmp_path):
    script = "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\nraise ValueError('no more')\n"
    alone, watched = (run(tmp_path, script, looked_at=looked) for looked in (False, True))
    assert alone.returncode == watched.returncode == 1
    assert watched.stderr.startswith(alone.stderr)
    assert "before the profiler began" in watched.stderr


@pytest.mark.slow
def test_a_module_runs_by_its_name_and_messages_of_exit_are_shown(tmp_path):
    (tmp_path / "whole.py").write_text("import sys; print(sys.argv[1:], __name__); sys.exit('bye')")
    command = [sys.executable, "-m", "te_fast.doctor", "-m", "whole", "--json", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (1, "['--json', 'x'] __main__\n")
    assert done.stderr.startswith("bye\n")
    assert "no module was called" in done.stderr


def test_a_script_that_is_not_there_is_told_so(capsys):
    with pytest.raises(SystemExit) as left:
        doctor.main(["nowhere.py"])
    assert left.value.code == 2
    assert "there is no file 'nowhere.py'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--skip -1", "argument --skip: must be 0 or more, got -1"),
        ("--json /nowhere/report.json", "argument --json: there is no folder /nowhere"),
        ("--svg /nowhere/report.svg", "argument --svg: there is no folder /nowhere"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_script_runs(options, message, capsys):
    with pytest.raises(SystemExit) as left:
        doctor.main([*options.split(), __file__])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_arguments_go_to_the_script_and_reports_to_the_folder_of_the_command(tmp_path):
    (tmp_path / "inner").mkdir()
    script = "import os, sys\nos.chdir('inner')\nprint(sys.argv[1:])\n"
    done = run(tmp_path, script, "--", "-m", "--json", "x", options=["--json", "report.json"])
    assert done.stdout == "['--', '-m', '--json', 'x']\n", done.stderr
    assert (tmp_path / "report.json").exists()


@pytest.mark.slow
def test_a_profiler_of_the_script_is_left_alone(tmp_path):
    script = """
import torch
model = torch.nn.Linear(8, 8)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
    for _ in range(9):
        model(torch.ones(8, 8))
print(sum(event.count for event in own.key_averages() if event.key == "aten::addmm"))
"""
    done = run(tmp_path, script)
    assert (done.returncode, done.stdout) == (0, "9\n"), done.stderr
    assert "ran torch's profiler itself" in done.stderr


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def mark(owner, ts, dur):
    return event("user_annotation", f"{MARK}{owner.name}|{owner.kind}", ts, dur)


def test_a_trace_of_a_gpu_is_added_up_by_who_caused_what():
    block, linear = Owner("layers.*", "Block"), Owner("layers.*.fc", "Linear")
    node = "autograd::engine::evaluate_function: "
    events = [
        mark(block, 0, 100),
        mark(linear, 10, 40),
        event("cpu_op", "aten::addmm", 12, 30, **{"Sequence number": 5, "Fwd thread id": 0}),
        event("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=1),
        event("cpu_op", "aten::mul", 60, 10, **{"Sequence number": 6, "Fwd thread id": 0}),
        event("cuda_driver", "cuLaunchKernelEx", 62, 3, correlation=2),
        event("cuda_runtime", "cudaStreamSynchronize", 70, 9, correlation=3),
        event("cpu_op", "aten::copy_", 80, 5, **{"Input type": ["c10::BFloat16", "float"]}),
        event("cpu_op", "aten::copy_", 86, 5, **{"Input type": ["float", "float"]}),
        # These events are on autograd's thread, which has no marks.
        event(
            "cpu_op",
            node + "MulBackward0",
            210,
            20,
            2,
            **{"Sequence number": 6, "Fwd thread id": 1},
        ),
        event(
            "cpu_op",
            node + "AddmmBackward0",
            230,
            30,
            2,
            **{"Sequence number": 5, "Fwd thread id": 1},
        ),
        event("cuda_runtime", "cudaGraphLaunch", 240, 4, 2, correlation=4),
        event("cpu_op", node + "torch::autograd::AccumulateGrad", 270, 7, 2),
        event("user_annotation", "Optimizer.step#AdamW.step", 300, 50),
        event("cuda_runtime", "cudaMemcpyAsync", 360, 2, correlation=5),
        event("cuda_runtime", "cudaDeviceSynchronize", 400, 90, correlation=6),
        # The GPU runs two kernels at once, then a graph of two kernels.
        event("kernel", "gemm", 30, 50, 7, correlation=1),
        event("kernel", "mul", 60, 40, 8, correlation=2),
        event("kernel", "quantize_cast_bf16_e4m3", 250, 10, 7, correlation=4),
        event("kernel", "gemm", 260, 20, 7, correlation=4),
        event("gpu_memcpy", "Memcpy HtoD", 365, 5, 7, correlation=5),
    ]
    spent = read_events(events)
    assert spent.forward[linear].host == 40
    assert spent.forward[linear].gpu == 50
    assert spent.forward[block].host == 60
    assert spent.forward[block].gpu == 40
    assert spent.forward[block].synchronisations == 1
    assert spent.forward[block].casts == 1
    assert spent.backward[block].host == 20
    assert spent.backward[linear].host == 30
    assert spent.backward[linear].gpu == 30
    assert spent.backward[linear].casts == 1
    assert spent.backward[linear].launches == 1
    assert spent.backward[GRADIENTS].host == 7
    assert spent.forward[Owner("", "(AdamW)")].host == 50
    assert spent.forward[OUTSIDE].gpu == 5
    assert spent.forward[OUTSIDE].synchronisations == 0  # the last wait is the profiler's
    assert spent.gpu_busy == 70 + 30 + 5


def test_what_a_swap_would_give_is_timed_on_modules_made_anew():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 24))
    before = [parameter.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    sketch = Sketch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.parameters(), before))
    assert {str(owner): what for owner, (what, _) in sketch.kinds.items()} == {
        "* (Linear)": "linear layer"  # no swap for 24 channels
    }
    [(_, module)] = sketch.kinds.values()
    assert module.weight.is_meta
    example = ((Shape((16, 32), torch.float32, torch.device("cpu")),), {})
    assert all(0 < time < 1e6 for time in measure(module, example, torch.device("cpu"), "current"))


@pytest.mark.every_torch  # the import of transformers alone takes seconds
def test_a_model_of_transformers_is_shown_by_its_layers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes)
    sketch = Sketch(transformers.LlamaForCausalLM(config))
    assert {str(owner): what for owner, (what, _) in sketch.kinds.items()} == {
        "model.layers.* (LlamaDecoderLayer)": "decoder layer (not tried)",
        "model.norm (LlamaRMSNorm)": "norm",
    }


def test_a_model_that_cannot_be_copied_is_said_to_be_so():
    class Held(torch.nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("mine")

    sketch = Sketch(Held(16, 16))
    assert sketch.why == "the model cannot be copied: RuntimeError: mine"
    assert not sketch.kinds


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.*:FutureWarning")
def test_traces_are_those_of_the_model_alone():
    """torch.jit.trace runs a module twice and compares the graphs; the profiler's marks would be in them."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.ones(2, 4)
    alone = str(torch.jit.trace(model, x).inlined_graph)
    watch = Watch(skip=0, steps=5, on_end=lambda _: None)
    with watch.installed():
        for _ in range(6):
            model(x)
        assert watch._profiler is not None
        watched = torch.jit.trace(model, x)
    assert "profiler::" not in str(watched.inlined_graph)
    assert str(watched.inlined_graph).count("::") == alone.count("::")
