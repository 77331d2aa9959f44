"""cuBLASLt's product of groups, which GPUs without te_fast's kernels take: a Hopper tries it without these kernels.

A version of cuBLAS that has it on Hopper, 13.8 or newer, must be loaded in place of torch's, for instance by
``LD_LIBRARY_PATH``; with others the tests are skipped.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
import te_fast.pytorch as te  # noqa: E402
from grouped_layers import grads, inputs, make  # noqa: E402
from linear_layers import close  # noqa: E402
from recipes import RECIPES  # noqa: E402
from te_fast.ops import cublas_groups, expert_loop  # noqa: E402
from te_fast.runtime import native  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not native.cublas_multiplies_groups(torch.cuda.current_device(), "bfloat16"),
        reason="this cuBLAS is not trusted with groups on this GPU",
    ),
]

ALL = {"high": lambda: None, "delayed": RECIPES["delayed"], "current": RECIPES["current"]}
SPLITS = [[0, 70, 1, 0, 129, 128, 16, 0], [0, 0, 300], [7], [0, 0], [3] * 300]
WITHOUT_KERNELS = os.environ.get("TE_FAST_OWN_GEMM") == "0"


if not WITHOUT_KERNELS:

    def test_these_pass_without_te_fasts_kernels():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "gpu",
        ]
        found = subprocess.run(
            [*command, "-n", "0", __file__],
            env={**os.environ, "TE_FAST_OWN_GEMM": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stdout[-3000:]

else:

    @pytest.fixture(autouse=True)
    def _without_kernels(monkeypatch):
        """Choose the path as on a GPU that has no kernels."""
        monkeypatch.setattr(expert_loop, "has_kernels", lambda _: False)

    @pytest.mark.parametrize("operands", ["float16", "bfloat16", "fp8"])
    def test_a_trial_is_right(operands):
        assert cublas_groups.multiplies(torch.cuda.current_device(), operands)

    @pytest.mark.parametrize("operands", ["bfloat16", "fp8"])
    @pytest.mark.parametrize("wrong", [1, 2, 3])
    def test_a_trial_finds_one_wrong_element(operands, wrong, monkeypatch):
        calls, right = [], native.grouped_gemm

        def grouped_gemm(a, b, out, *rest):
            right(a, b, out, *rest)
            calls.append(out)
            if len(calls) == wrong:
                out[0].view(-1)[-1] += 1

        monkeypatch.setattr(native, "grouped_gemm", grouped_gemm)
        assert not cublas_groups.is_right(torch.cuda.current_device(), operands)

    def steps(layer, splits, name, dtype):
        x, grad = inputs(layer, splits, dtype)
        device = next(layer.parameters()).device
        x, grad = x.detach().to(device).requires_grad_(), grad.to(device)
        recipe = ALL[name]()
        for _ in range(2):  # delayed scaling has measured scales from the second step on
            x.grad = None
            layer.zero_grad(set_to_none=True)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(x, torch.tensor(splits, device=device))
            y.backward(grad)
        return y, x.grad

    @pytest.mark.parametrize("fuse", [False, True])
    @pytest.mark.parametrize("splits", SPLITS, ids=lambda splits: f"{len(splits)} groups")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", ALL)
    def test_steps_are_near_the_hosts(name, dtype, splits, fuse):
        options = {"bias": False, "fuse_wgrad_accumulation": fuse, "single_grouped_weight": fuse}
        host = make(len(splits), dtype=dtype, **options)
        device = copy.deepcopy(host).cuda()
        for layer in (host, device):
            for parameter in layer.parameters() if fuse else ():
                parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
        wanted, found = (steps(layer, splits, name, dtype) for layer in (host, device))
        assert not device._loop
        of = (lambda weight: weight.main_grad) if fuse else (lambda weight: weight.grad)
        pairs = [
            *zip(wanted, found, strict=True),
            [grads(layer, of=of) for layer in (host, device)],
        ]
        for mine, theirs in pairs:
            if mine.numel():
                close(theirs.cpu(), mine.double(), dtype)

    def test_a_bias_runs_experts_one_by_one():
        layer = make(3).cuda()
        steps(layer, [5, 0, 9], "current", torch.bfloat16)
        assert layer._loop

    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
    @pytest.mark.parametrize("name", ALL)
    def test_graphs_replay_other_counts_with_eagers_bits(name):
        layer, recipe = make(8, 128, 96, bias=False).cuda(), ALL[name]()
        x = torch.randn(256, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        grad = torch.randn(256, 96, dtype=torch.bfloat16, device="cuda")
        counts = torch.full((8,), 32, device="cuda")

        def step():
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(x, counts)
            y.backward(grad)
            return y

        def clear():
            x.grad = None
            layer.zero_grad(set_to_none=True)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                clear()
                step()
        torch.cuda.current_stream().wait_stream(stream)
        clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        found = [captured, x.grad, *[parameter.grad for parameter in layer.parameters()]]
        for seed in range(100):
            torch.manual_seed(seed)
            drawn = torch.randint(0, 8, (256,)).clamp_max(seed % 8).bincount(minlength=8)
            with torch.no_grad():
                counts.copy_(drawn)
                x.copy_(torch.randn_like(x))
            graph.replay()
            kept = [tensor.clone() for tensor in found]
            if name == "delayed":  # its scales change from step to step
                assert all(tensor.isfinite().all() for tensor in kept)
                continue
            clear()
            wanted = [step(), x.grad, *[parameter.grad for parameter in layer.parameters()]]
            assert all(map(torch.equal, kept, wanted))
            x.grad = found[1]
            for parameter, tensor in zip(layer.parameters(), found[2:], strict=True):
                parameter.grad = tensor
