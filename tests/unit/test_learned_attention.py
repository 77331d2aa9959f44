"""Which calls of attention are learned, and when. `tests/gpu/test_learned_attention.py` has the launches."""

import contextlib
import subprocess
import sys
import threading

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from te_fast.attention import learned
from te_fast.attention.block import Attending
from te_fast.attention.learned import Kind, Uses, learn
from te_fast.attention.rope import Heads
from te_fast.runtime import native

pytestmark = pytest.mark.usefixtures("_own_state")


@pytest.fixture
def _own_state(monkeypatch):
    for name in ("_learned", "_threads"):
        monkeypatch.setattr(learned, name, type(getattr(learned, name))())


def kind(**changes):
    found = Kind(
        kernel=None,
        shape=torch.Size((2, 64)),
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
        heads=Heads(4, 4, 64),
        interleaved=False,
        orders=((0, 2, 1, 3), (0, 2, 1, 3)),
        is_causal=True,
        scale=0.125,
        trains=True,
    )
    return found._replace(**changes)


NEW_TORCH = hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, NEW_TORCH),
        ({"heads": Heads(4, 4, 64, is_grouped=True)}, NEW_TORCH),
        ({"heads": Heads(4, 2, 64)}, NEW_TORCH),
        ({"heads": Heads(4, 2, 64, is_grouped=True)}, False),
        ({"device": torch.device("cpu")}, False),
        # 768 columns of two bytes: 32 MiB are 21845 rows.
        ({"shape": torch.Size((1, 21845))}, NEW_TORCH),
        ({"shape": torch.Size((1, 21846))}, False),
    ],
)
def test_kinds_that_can_be_learned(changes, expected):
    assert kind(**changes).can_be_learned() is expected


def test_the_environment_turns_learning_off(monkeypatch):
    monkeypatch.setattr(native, "learns_launches", lambda: False)
    assert not kind().can_be_learned()


@pytest.fixture
def tasks(monkeypatch):
    """The kinds that were learned, without a GPU."""
    found = []

    def learn(kind):
        found.append((kind, threading.current_thread().name))
        return "launches"

    monkeypatch.setattr(learned, "learn", learn)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_a_kind_is_learned_once_after_enough_calls(tasks):
    uses = Uses(kind())
    for _ in range(learned.CALLS - 1):
        uses.count()
    assert not uses.is_settled
    assert not tasks
    for _ in range(3):
        uses.count()
    assert uses.is_settled
    assert uses.repeated == "launches"
    assert [of for of, _ in tasks] == [kind()]
    # torch's kernels live as long as this thread.
    assert tasks[0][1] == "te_fast attention"


def test_nothing_is_learned_under_capture(tasks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    uses = Uses(kind())
    for _ in range(2 * learned.CALLS):
        uses.count()
    assert not uses.is_settled
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    uses.count()
    assert uses.repeated == "launches"
    assert len(tasks) == 1


def test_a_process_learns_a_limited_number_of_kinds(tasks, monkeypatch):
    monkeypatch.setattr(learned, "CALLS", 1)
    monkeypatch.setattr(learned, "KINDS", 3)
    found = [Uses(kind(scale=float(number))) for number in range(5)]
    for uses in found:
        uses.count()
    assert [uses.repeated for uses in found] == ["launches"] * 3 + [None] * 2
    assert all(uses.is_settled for uses in found)


def test_a_failure_settles_the_kind(tasks, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(learned, "learn", interrupted)
    monkeypatch.setattr(learned, "CALLS", 1)
    uses = Uses(kind())
    with pytest.raises(KeyboardInterrupt):
        uses.count()
    assert uses.is_settled
    assert uses.repeated is None
    uses.count()


def test_other_threads_go_on_while_one_learns(tasks, monkeypatch):
    may_end, has_begun = threading.Event(), threading.Event()

    def learn(kind):
        has_begun.set()
        assert may_end.wait(60)
        return "launches"

    monkeypatch.setattr(learned, "learn", learn)
    monkeypatch.setattr(learned, "CALLS", 1)
    uses = Uses(kind())
    first = threading.Thread(target=uses.count)
    first.start()
    assert has_begun.wait(60)
    uses.count()
    # Nothing is settled before the launches are known: a later call must get them.
    assert not uses.is_settled
    may_end.set()
    first.join()
    assert uses.is_settled
    assert uses.repeated == "launches"


class FakePool:
    id = (0, 1)


@pytest.fixture
def _no_gpu(monkeypatch):
    """What `learn` calls of torch, without a GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "MemPool", FakePool)
    monkeypatch.setattr(FakePool, "snapshot", lambda _: [], raising=False)
    monkeypatch.setattr(learned, "_pools", [])


def refuses(*_):
    raise RuntimeError("cudaMallocAsync does not yet support this")


@pytest.mark.usefixtures("_no_gpu")
def test_an_allocator_without_pools_goes_through_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "MemPool", refuses)
    monkeypatch.setattr(learned, "CALLS", 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    uses = Uses(kind())
    uses.count()
    assert uses.is_settled
    assert uses.repeated is None


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_a_pool_that_cannot_be_examined_is_kept(monkeypatch, error):
    def unknown(_):
        raise error("snapshot")

    monkeypatch.setattr(FakePool, "snapshot", unknown)
    monkeypatch.setattr(learned, "_observe_in", lambda pool, kind: "launches")
    assert learn(kind()) == "launches"
    assert len(learned._pools) == 1


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("in_use", [0, 512])
def test_pools_are_kept_while_tensors_refer_to_them(monkeypatch, in_use):
    monkeypatch.setattr(FakePool, "snapshot", lambda _: [{"allocated_size": in_use}])
    monkeypatch.setattr(learned, "_observe_in", refuses)
    assert learn(kind()) is None
    assert len(learned._pools) == bool(in_use)


def test_results_that_share_memory_are_no_part_of_the_workspace(monkeypatch):
    shared, found = torch.empty(1024), []
    # 4096 bytes of results and 512 of workspace, a block each.
    allocated = ((4608 * number, 2 * number) for number in range(6))
    monkeypatch.setattr(learned, "_allocated", lambda: next(allocated))
    monkeypatch.setattr(learned, "_tensors_in", list)
    monkeypatch.setattr(native, "observe_launches", lambda _, call: (call(), "launches"))
    monkeypatch.setattr(native, "repeat_launches", lambda _, workspace: found.append(workspace))
    halves = [shared[:512], shared[512:]]
    learned.launches_of([lambda: halves] * 3, list, [[shared]] * 3)
    assert found == [(512, 1)]


def test_the_thread_outlives_failures():
    def fails():
        raise KeyboardInterrupt("a task")

    thread = learned._thread()
    assert learned._thread() is thread
    with pytest.raises(KeyboardInterrupt, match="a task"):
        thread.run(fails)
    assert thread.run(lambda: 7) == 7
    first = thread.run(threading.get_ident)
    assert first == thread.run(threading.get_ident) != threading.get_ident()


def test_a_forked_process_makes_a_thread_of_its_own():
    code = (
        "import os, te_fast.pytorch, torch\n"
        "from te_fast.attention import learned\n"
        "assert learned._thread().run(lambda: 7) == 7\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(learned._thread().run(lambda: 5))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_layers_on_the_host_run_as_before(monkeypatch):
    monkeypatch.setattr(learned, "CALLS", 2)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    layer = te.TransformerLayer(64, 128, 4, attn_input_format="bshd", **options)
    x = torch.randn(2, 16, 64)
    results = [layer(x) for _ in range(5)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_call_takes_the_launches_once_they_are_known(tasks, monkeypatch):
    monkeypatch.setattr(learned, "CALLS", 2)
    uses = Uses(kind())
    attending = Attending(None, None, (None,), (), uses)
    assert attending.counted() is attending
    settled = attending.counted()
    assert settled.uses is None
    assert settled.repeated == "launches"
    assert settled.counted() is settled


def test_launches_of_the_host_cannot_be_observed():
    with pytest.raises(te_fast.TeFastError, match="must be on a GPU") as caught:
        native.observe_launches(torch.ones(1), lambda: None)
    assert isinstance(caught.value, RuntimeError)
