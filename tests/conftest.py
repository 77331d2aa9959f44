"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fresh import Processes

# Each of the processes that share the tests has one core: more threads would only wait for each other. The variables
# must be set before torch and the native module are loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# Two processes share the files: they end together if the longest files begin.
LONG = (
    "test_megatron.py",
    "test_graphs.py",
    "test_graphs_quantized.py",
    "test_parallel_ranks.py",
    "test_graphs_quantized_experts.py",
    "test_graphs_parts.py",
    "test_grouped_linear.py",
    "test_convert.py",
    "test_export_experts.py",
    "test_transformer_layer.py",
    "test_convert_transformers.py",
    "test_export.py",
    "test_sharded_ranks.py",
    "test_doctor.py",
    "test_fsdp_quantized.py",
    "test_moe_program.py",
    "test_checkpoint.py",
    "test_graphs_form.py",
    "test_compound_layers.py",
    "test_compiled_ranks.py",
    "test_graphed_callables.py",
    "test_permutation_compile.py",
    "test_weights_together.py",
    "test_import.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules of tests that need a GPU are not imported where no such test may run."""
    of_gpus = collection_path == Path(__file__).parent / "gpu"
    return True if of_gpus and "not gpu" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, the other files in their order."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


def pytest_collection_finish() -> None:
    """Modules and collected tests live to the end: a test that collects garbage need not visit them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Random data is the same in every run, in whatever order tests come; a test may seed for itself."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # torch.manual_seed keeps a seed and a formatted stack for each kind of device that may come yet: milliseconds.
        torch.default_generator.manual_seed(0)


# The names of recipes.RECIPES, which this file cannot import: te_fast and torch must load after the variables are set.
@pytest.fixture(params=["delayed", "current", "block"])
def recipe(request: pytest.FixtureRequest) -> object:
    """Each recipe with its defaults; a module that needs other recipes overrides this fixture."""
    from recipes import RECIPES

    return RECIPES[request.param]()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Lets a test compile for itself, and leave nothing behind."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def fresh() -> Iterator[Processes]:
    """Runs a script in a process that has imported torch alone, and returns what it wrote."""
    from fresh import Processes

    processes = Processes()
    yield processes
    processes.close()
