"""Autocast regions of threads: a thread that has entered no region is in the region of another thread."""

from __future__ import annotations

import threading

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.pytorch.quantization import FP8GlobalStateManager
from te_fast.runtime import native, scale_tape

CURRENT, BLOCK = Float8CurrentScaling(), Float8BlockScaling()


@pytest.fixture(autouse=True)
def _fresh_state():
    FP8GlobalStateManager.reset()
    yield
    assert FP8GlobalStateManager.quantization_state.autocast_depth == 0
    assert not FP8GlobalStateManager.is_fp8_enabled()
    FP8GlobalStateManager.reset()


class Turns:
    """Runs the steps of two threads in one order; a step is a thread's number and a function without arguments."""

    def __init__(self):
        self.failure = None

    def run(self, steps):
        done = [threading.Event() for _ in steps]

        def work(number):
            for index, (thread, body) in enumerate(steps):
                if thread != number:
                    continue
                if index > 0 and not done[index - 1].wait(30):
                    return
                try:
                    body()
                except BaseException as error:
                    self.failure = self.failure or error
                done[index].set()

        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


def seen():
    """The recipe that a layer of this thread would use, or None in high precision."""
    manager = FP8GlobalStateManager
    return manager.get_fp8_recipe() if manager.is_fp8_enabled() else None


def expect(wanted):
    def body():
        assert seen() is wanted, (seen(), wanted)

    return body


def test_a_region_without_a_recipe_does_not_show_that_of_another_thread():
    first, second = te.autocast(recipe=CURRENT), te.autocast(recipe=BLOCK)
    off, state = te.autocast(enabled=False), FP8GlobalStateManager.quantization_state
    shown = []
    steps = [(0, first.__enter__), (1, second.__enter__), (0, off.__enter__)]
    steps += [(0, lambda: shown.append(state.fp8_recipe)), (0, lambda: off.__exit__(None))]
    steps += [(0, lambda: shown.append(state.fp8_recipe)), (0, lambda: first.__exit__(None))]
    Turns().run([*steps, (1, lambda: second.__exit__(None))])
    assert shown == [None, CURRENT]


@pytest.mark.parametrize("order", ["first in, first out", "first in, last out"])
def test_a_thread_does_not_leave_the_region_of_another(order):
    first, second = te.autocast(recipe=CURRENT), te.autocast(recipe=BLOCK)
    enter = [(0, first.__enter__), (1, second.__enter__), (0, expect(CURRENT)), (1, expect(BLOCK))]
    leave_first = [(0, lambda: first.__exit__(None, None, None)), (1, expect(BLOCK))]
    leave_second = [(1, lambda: second.__exit__(None, None, None))]
    if order == "first in, first out":
        Turns().run(enter + leave_first + leave_second)
    else:
        Turns().run([*enter, *leave_second, (0, expect(CURRENT)), leave_first[0]])


def test_layers_of_two_threads_compute_by_their_own_recipes():
    torch.default_generator.manual_seed(1)
    layers = [te.Linear(64, 48, params_dtype=torch.float32, device="cpu") for _ in range(2)]
    x = torch.randn(32, 64)
    wanted = []
    for layer, recipe in zip(layers, (CURRENT, BLOCK), strict=True):
        with torch.no_grad(), te.autocast(recipe=recipe):
            wanted.append(layer(x))
    with torch.no_grad():
        assert not torch.equal(wanted[0], layers[0](x))  # high precision gives another result
    failures = []

    def work(number):
        for _ in range(200):
            with torch.no_grad(), te.autocast(recipe=(CURRENT, BLOCK)[number]):
                if not torch.equal(layers[number](x), wanted[number]):
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_thread_inside_of_a_region_is_in_it():
    found = []

    def work():
        found.append(seen())
        with te.autocast(recipe=BLOCK):
            found.append(seen())
        found.append(seen())
        with te.autocast(enabled=False):
            found.append(seen())
        found.append(seen())

    recipe = DelayedScaling()
    with te.autocast(recipe=recipe):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen() is recipe
    assert [id(each) for each in found] == [
        id(each) for each in (recipe, BLOCK, recipe, None, recipe)
    ]


def test_training_in_two_threads_is_that_of_one():
    """The recipes keep no histories, so neither thread changes the other's numbers."""

    def make():
        torch.default_generator.manual_seed(2)
        return te.LayerNormMLP(32, 64, params_dtype=torch.float32, device="cpu")

    def train(layer, recipe, steps=6):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(3)
        results = []
        for _ in range(steps):
            x = torch.randn(16, 32, generator=generator)
            optimizer.zero_grad()
            with te.autocast(recipe=recipe):
                y = layer(x)
            y.square().mean().backward()
            optimizer.step()
            results.append(y.detach())
        return torch.stack(results)

    wanted = [train(make(), recipe) for recipe in (CURRENT, BLOCK)]
    assert not torch.equal(*wanted)
    layers, results = [make(), make()], [None, None]

    def work(number):
        results[number] = train(layers[number], (CURRENT, BLOCK)[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(results[0], wanted[0])
    assert torch.equal(results[1], wanted[1])


LAYERS = {
    "linear": lambda: te.Linear(16, 16, device="cpu"),
    "mlp": lambda: te.LayerNormMLP(16, 16, checkpoint=True, device="cpu"),
}


class Meanwhile(torch.nn.Module):
    """Calls a function in each backward through it."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        if torch._C._current_graph_task_id() >= 0:
            self.function()
        return self.layer(x)


def gradients_of_a_recomputation(make, recipe, meanwhile):
    torch.default_generator.manual_seed(0)
    layer = Meanwhile(make(), meanwhile)
    x = torch.linspace(-2, 2, 256).view(16, 16).requires_grad_()
    with te.autocast(recipe=recipe):
        y = te.checkpoint(layer, x, use_reentrant=False)
    y.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", [CURRENT, DelayedScaling()], ids=["current", "delayed"])
def test_a_recomputation_keeps_to_its_thread(name, recipe):
    """Another thread leaves a region meanwhile, and runs a layer of its own."""
    wanted = gradients_of_a_recomputation(LAYERS[name], recipe, lambda: None)
    entered, leave = threading.Event(), threading.Event()
    layer, results = LAYERS[name](), []

    def work():
        with te.autocast(recipe=BLOCK):
            entered.set()
            assert leave.wait(30)
        with te.autocast(recipe=recipe):
            y = layer(torch.ones(16, 16))
        y.sum().backward()
        results.append(seen())

    other = threading.Thread(target=work)

    def meanwhile():
        leave.set()
        other.join()

    other.start()
    assert entered.wait(30)
    got = gradients_of_a_recomputation(LAYERS[name], recipe, meanwhile)
    assert results == [recipe]  # the other thread has no region then, and sees this thread's
    assert all(map(torch.equal, got, wanted))


def test_a_recomputation_of_one_thread_is_not_that_of_another(monkeypatch):
    """A layer of the second thread keeps no scales for a recomputation, and is in no recomputation phase."""
    recipe = DelayedScaling(amax_history_len=2)
    layers, x = [te.Linear(16, 16, device="cpu") for _ in range(2)], torch.ones(16, 16)
    asked = []
    phases = scale_tape._own_phases
    monkeypatch.setattr(scale_tape, "_own_phases", lambda: (asked.append(0), phases())[1])

    def other():
        with torch.no_grad(), te.autocast(recipe=recipe):
            layers[1](x)
            assert native.autocast_phase_thread() is None

    def helper():
        assert native.autocast_phase_thread() is not None

    with te.autocast(recipe=recipe), te.distributed.activation_recompute_forward(True, False):
        for body in (other, helper):
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
        assert not asked
        layers[0](x)
    assert asked
    assert native.autocast_phase_thread() is None
