"""Random calls of a module on the GPU and of its twin on the host backend, which tests/unit checks with torch.

Free memory is always full of NaN, so that a read after a release, or before the kernel that writes, shows.
"""

from __future__ import annotations

import copy
import threading
from random import Random
from typing import Any

import pytest
import torch

import te_fast.pytorch as te
from compound_reference import relative
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.pytorch import ops

pytestmark = pytest.mark.gpu
RECIPES = [
    None,
    DelayedScaling(amax_history_len=4),
    DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
    Float8CurrentScaling(),
    Float8BlockScaling(),
]
NORMS = ["LayerNorm", "RMSNorm"]
# Several roundings in a row. In FP8, sums in another order move single operands to a neighbour, 2^-3 away.
PRECISE = {torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 2.5e-2}
FP8 = 0.08
STEPS = 10


def poison() -> None:
    """Fills the allocator's free memory with NaN."""
    for size in (1 << 10, 1 << 14, 1 << 18):
        blocks = [torch.full((size + 64 * i,), float("nan"), device="cuda") for i in range(4)]
        del blocks


def an_op(random: Random, cols: int, options: dict[str, Any]) -> tuple[torch.nn.Module, int]:
    """An op for `cols` columns, and the number of columns of its result."""
    kind = random.choice(["linear", "linear", "norm", "activation", "gated", "other", "torch"])
    if kind == "linear":
        outputs = random.choice([64, 128, 256])
        return ops.Linear(cols, outputs, bias=random.random() < 0.6, **options), outputs
    if kind == "norm":
        return random.choice([ops.LayerNorm, ops.RMSNorm])(cols, **options), cols
    if kind == "activation":
        return random.choice([ops.GELU, ops.ReLU, ops.SiLU, ops.QGELU, ops.SReLU])(), cols
    if kind == "gated" and cols >= 128 and cols % 32 == 0:
        return random.choice([ops.SwiGLU, ops.GEGLU, ops.ReGLU])(), cols // 2
    if kind == "torch":
        layer_norm = torch.nn.LayerNorm(cols, dtype=options["dtype"])
        return random.choice([torch.nn.Tanh(), layer_norm]), cols
    backward = random.random() < 0.5
    choices = [
        ops.Identity(),
        ops.ConstantScale(0.5),
        ops.Quantize(forward=True, backward=backward),
    ]
    return random.choice(choices), cols


def a_module(random: Random, dtype: torch.dtype) -> tuple[torch.nn.Module, int]:
    """A layer or a chain on the CPU, and the columns it takes."""
    cols, outputs = random.choice([64, 128, 192, 256, 272]), random.choice([64, 144, 256])
    kind = random.choice(["Linear", "LayerNormLinear", "LayerNormMLP", "norm", "chain", "chain"])
    norm = {"normalization": random.choice(NORMS), "zero_centered_gamma": random.random() < 0.5}
    options = {"params_dtype": dtype, "device": "cpu", "bias": random.random() < 0.7}
    if kind == "Linear":
        return te.Linear(cols, outputs, **options), cols
    if kind == "LayerNormLinear":
        return te.LayerNormLinear(cols, outputs, **norm, **options), cols
    if kind == "LayerNormMLP":
        activation = random.choice(["gelu", "relu", "swiglu", "geglu", "srelu", "clamped_swiglu"])
        checkpoint = random.random() < 0.3
        return te.LayerNormMLP(
            cols, 288, activation=activation, checkpoint=checkpoint, **norm, **options
        ), cols
    if kind == "norm":
        return random.choice([te.LayerNorm, te.RMSNorm])(cols, dtype=dtype, device="cpu"), cols
    chain, width = [], cols
    for _ in range(random.randint(1, 6)):
        op, width = an_op(random, width, {"dtype": dtype, "device": "cpu"})
        chain.append(op)
    return ops.Sequential(*chain), cols


class Twins:
    """A module on the GPU, its twin on the host, and the calls of both."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.random = Random(seed)
        self.dtype = self.random.choice([torch.float32, torch.float16, torch.bfloat16])
        self.host, self.cols = a_module(self.random, self.dtype)
        self.gpu = copy.deepcopy(self.host).cuda()
        self.recipe = self.random.choice(RECIPES)
        self.side = torch.cuda.Stream()
        self.history = [repr(self.host)]

    def check(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        bound = PRECISE[self.dtype] + (FP8 if self.recipe is not None else 0.0)
        assert relative(ours.cpu(), theirs) <= bound, (what, self.history)

    def forward(self, x: torch.Tensor, gpu_x: torch.Tensor, aside: bool) -> Any:
        """Both in one region: delayed scaling updates all scales where a region ends."""
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y = self.host(x)
            if aside:
                self.side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.side):
                    gpu_y = self.gpu(gpu_x)
                torch.cuda.current_stream().wait_stream(self.side)
            else:
                gpu_y = self.gpu(gpu_x)
        poison()
        return y, gpu_y

    def infer(self, x: torch.Tensor) -> None:
        mode = self.random.choice([torch.no_grad, torch.inference_mode])
        with mode():
            y, gpu_y = self.forward(x, x.cuda(), aside=False)
        self.check("y", gpu_y, y)

    @torch.no_grad()
    def replay(self, x: torch.Tensor) -> None:
        """A graph of the GPU's forward, replayed with new numbers."""
        gpu_x, graph = x.cuda(), torch.cuda.CUDAGraph()
        self.forward(x, gpu_x, aside=True)
        region = {"enabled": self.recipe is not None, "recipe": self.recipe}
        with torch.cuda.graph(graph), te.autocast(**region):
            gpu_y = self.gpu(gpu_x)
        for _ in range(2):
            x = torch.randn_like(x)
            gpu_x.copy_(x)
            poison()
            graph.replay()
            with te.autocast(**region):
                y = self.host(x)
            self.check("y of a graph", gpu_y, y)

    def train(self, x: torch.Tensor, kind: str) -> None:
        frozen = [kind == "frozen" and self.random.random() < 0.5 for _ in self.host.parameters()]
        for module in (self.host, self.gpu):
            for parameter, still in zip(module.parameters(), frozen, strict=True):
                parameter.requires_grad_(not still)
                parameter.grad = None
        gpu_x, x = x.cuda().requires_grad_(), x.requires_grad_()
        passes = [
            self.forward(x * times, gpu_x * times, aside=kind == "aside")
            for times in ((1, 2) if kind in ("twice", "later") else (1,))
        ]
        grad = 0.1 * torch.randn_like(passes[0][0])
        # The gradients' scales are updated when the backward of the region's first module, the host's, has ended.
        for y, gpu_y in passes[:: -1 if kind == "later" else 1]:
            self.check("y", gpu_y.detach(), y.detach())
            gpu_y.backward(grad.cuda())
            poison()
            y.backward(grad)
        self.check("gradient of x", gpu_x.grad, x.grad)
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Moves each parameter by a twentieth of its norm, on the GPU to the same numbers."""
        named = dict(self.gpu.named_parameters())
        for name, theirs in self.host.named_parameters():
            ours, grad = named[name], theirs.grad
            assert (ours.grad is None) == (grad is None), (name, self.history)
            if grad is None:
                continue
            self.check(f"gradient of {name}", ours.grad, grad)
            length = 0.05 * theirs.float().norm() / grad.float().norm().clamp_min(1e-20)
            theirs.sub_((length * grad.float()).to(self.dtype))
            ours.copy_(theirs)

    def live(self) -> None:
        random = self.random
        for _ in range(STEPS):
            if random.random() < 0.15:
                self.recipe = random.choice(RECIPES)
            rows = random.choice([0, 16, 32, 64, 144, 400])
            shape = (rows, self.cols) if random.random() < 0.7 else (2, rows, self.cols)
            kinds = ["train", "twice", "later", "aside", "frozen", "thread", "infer", "graph"]
            kind = random.choice(kinds if rows > 0 else kinds[:-1])
            self.history.append(f"{kind}, {type(self.recipe).__name__}, {shape}")
            x = (random.choice([0.1, 1.0, 3.0]) * torch.randn(shape)).to(self.dtype)
            if random.random() < 0.2:
                torch.cuda.empty_cache()
            if kind == "infer":
                self.infer(x)
            elif kind == "graph":
                self.replay(x)
            elif kind == "thread":
                in_thread(lambda x=x: self.train(x, "thread"))
            else:
                self.train(x, kind)


def in_thread(work: Any) -> None:
    """Runs `work` in a thread of its own, and raises the thread's errors here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.mark.filterwarnings("ignore:.*Recipe type changed:UserWarning")
@pytest.mark.parametrize("seed", range(40))
def test_a_life_is_that_of_the_twin(seed: int) -> None:
    Twins(seed).live()
